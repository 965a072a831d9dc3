"""Retention: which generations stay. Called after a commit was read back, by the owner of the trial only."""

from __future__ import annotations

import logging
import os
import shutil

from hpc_rl.checkpoint.generation import Found, scan
from hpc_rl.trial import Trial

logger = logging.getLogger(__name__)


def surplus(found: list[Found], keep: int, protected: frozenset[int] = frozenset()) -> list[Found]:
    """Those to delete of a newest-first scan: sound ones beyond the newest `keep` that nobody holds.

    One that is not sound is neither counted nor deleted: it is evidence.
    """
    sound = [one for one in found if not one.problem]
    return [one for one in sound[max(1, keep) :] if one.step not in protected]


def retain(trial: Trial, keep: int, protected: frozenset[int] = frozenset()) -> int:
    """Delete what is surplus, but not the `protected` (one that is being loaded).

    Returns the step of the oldest sound generation that stays, 0 where there is none. Raises OSError.
    """
    found = scan(trial)
    going = surplus(found, keep, protected)
    for one in going:
        gone = one.path.with_name(f".{one.path.name}.gone")
        shutil.rmtree(gone, ignore_errors=True)
        os.rename(one.path, gone)  # first out of sight: half a generation would be reported as damaged
        shutil.rmtree(gone, ignore_errors=True)
        logger.info("generation %d removed, %d newer are kept", one.step, keep)
    staying = [one.step for one in found if not one.problem and one not in going]
    return min(staying, default=0)
