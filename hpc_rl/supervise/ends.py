"""Ends: how an incarnation of a unit ended, from its exit records, its launcher's code and its logs."""

from __future__ import annotations

from dataclasses import replace

from hpc_rl.errors import ExitCode, FailureClass
from hpc_rl.files import is_full, last_lines
from hpc_rl.plan.schema import Unit
from hpc_rl.supervise.exit_policy import unit_end
from hpc_rl.supervise.failures import End, classify
from hpc_rl.trial import Attempt, read_json

LAST_WORDS = 200  # characters
LOG_LINES = 12  # of each log, in which the launcher may say why


def end_of(attempt: Attempt, unit: Unit, incarnation: int, raw_code: int) -> End:
    """Those that left a word have told their class; of the others the launcher and the node may tell, in the log."""
    who = (unit.role, unit.index, incarnation)
    records = [read_json(attempt.exit_record(*who, rank)) for rank in range(unit.num_tasks)]
    end = unit_end(records, raw_code)
    logs = [attempt.log(*who, rank) for rank in (None, *range(unit.num_tasks))]
    if not any(records) and not end.by_signal:
        last = (said[0].strip()[:LAST_WORDS] for log in logs if (said := last_lines(log, 1)))
        words = next(filter(None, last), "")
        end = replace(end, reason=f"{end.reason}; its log ends: {words}") if words else end
    return classify(
        end, [] if all(records) else [line for log in logs for line in last_lines(log, LOG_LINES)]
    )


def not_started(error: OSError) -> End:
    """The end of an incarnation that could not even be started."""
    missing = isinstance(error, FileNotFoundError | PermissionError)
    failure = FailureClass.DISK_FULL if is_full(error) else FailureClass.UNKNOWN
    return End(ExitCode.BAD_CONFIG if missing else ExitCode.FAILED, f"can't be started: {error}", failure)
