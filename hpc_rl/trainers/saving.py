"""Saves generations on all ranks together, while the loop waits or continues.

A thread of each rank writes the rank's snapshot; rank 0's thread then waits for the files of the others and
commits. At most one save is in flight. Ranks exchange their outcomes in `settle`, on the main thread: a save
that fails on one rank is canceled on all. A failed save is logged as an error and training continues: earlier
generations are complete, the partial one is removed, and the next due save tries again.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hpc_rl.checkpoint.generation import Commit, Manifest, find_room_problem
from hpc_rl.checkpoint.retention import Holds, RetentionPolicy, retain
from hpc_rl.core.checked_file import Abandoned
from hpc_rl.core.errors import CannotWrite
from hpc_rl.core.records import check_newest_lineage
from hpc_rl.core.trial import Trial
from hpc_rl.engines.base import Engine, Snapshot, sum_over_ranks
from hpc_rl.trainers.ranks import Ranks

logger = logging.getLogger(__name__)
POLL_S = (0.02, 1.0)  # first and longest pause between checks for the other ranks' files


@dataclass
class PendingSave:
    """The progress of one save on this rank."""

    commit: Commit
    manifest: Manifest | None  # rank 0 only
    snapshots: list[Snapshot]  # of each trained model
    started: float = field(default_factory=time.monotonic)
    cancel: threading.Event = field(default_factory=threading.Event)
    written: threading.Event = field(default_factory=threading.Event)  # this rank's part is written or failed
    ended: threading.Event = field(default_factory=threading.Event)
    committed: bool = False
    oldest: int = 0  # step of the oldest generation after retention
    took_s: float = 0.0
    error: Exception | None = None


@dataclass
class Saving:
    """The saves of one trainer incarnation; every rank has one and calls its methods in the same order."""

    trial: Trial
    attempt_id: str
    incarnation: int
    engines: Sequence[Engine]  # of the trained models
    ranks: Ranks
    policy: RetentionPolicy
    newest: int = -1  # step of the newest committed generation, or -1
    problem: str = ""  # why the newest save failed; '' if it succeeded
    num_failed: int = 0  # saves in a row that failed
    waits_for: frozenset[int] = frozenset()  # steps whose evaluation decides whether they stay
    owed: bool = False  # a save was due while another was in flight
    _job: PendingSave | None = None
    _last: bool = False
    _known: dict[str, str] = field(default_factory=dict)  # results of retention's checks: version -> problem

    def __post_init__(self) -> None:
        self._holds = Holds(self.trial)

    def start(self, step: int, manifest: Callable[[], Manifest], copied: bool, last: bool = False) -> None:
        """Begin to save the state after `step`; `settle` finishes it. Collective.

        No other save may be in flight. If not `copied`, the live tensors are written: settle before the next
        update. `last`: no step follows.
        """
        assert self._job is None, "one save at a time"
        self.owed, self._last = False, last
        commit = Commit(self.trial, step, self.attempt_id, self.incarnation)
        size = int(sum_over_ranks([float(sum(one.state_bytes() for one in self.engines))])[0])
        if problem := self.ranks.from_rank0(lambda: self._make_room(commit, size)):
            self._report_failure(step, problem)
            return
        first = self.ranks.rank == 0
        snapshots = [engine.snapshot(copied) for engine in self.engines]
        job = self._job = PendingSave(commit, manifest() if first else None, snapshots)
        threading.Thread(target=self._work, args=(job,), daemon=True, name=f"save-{step}").start()

    def settle(self, wait: bool) -> int | None:
        """Finish the save in flight if it is written. Collective.

        Returns the step of the oldest kept generation after a commit. Returns None while the save is being
        written (unless `wait`), after a failure, and without a save in flight. Errors other than OSError are
        raised on every rank.
        """
        job = self._job
        if job is None:
            return None
        if wait:
            job.written.wait()
        failed, committed = self.ranks.any_of(job.error is not None, job.committed)
        if wait and not failed:
            if self.ranks.rank == 0:
                job.ended.wait()
            failed, committed = self.ranks.any_of(job.error is not None, job.committed)
        if not failed and not committed:
            return None
        job.cancel.set()
        job.ended.wait()
        self._job = None
        if failed:
            self._call_off(job)
            return None
        self.newest, self.problem, self.num_failed = job.commit.step, "", 0
        if self.ranks.rank == 0:
            logger.info("checkpoint %d saved in %.2f s", job.commit.step, job.took_s)
        return job.oldest

    @property
    def in_flight(self) -> bool:
        """Whether a save was started and is not settled."""
        return self._job is not None

    def _make_room(self, commit: Commit, size: int) -> str:
        """Make the folder for a save; return '' or the problem."""
        try:
            self.trial.recover.mkdir(exist_ok=True)
            if problem := find_room_problem(self.trial, size):
                return problem
            commit.begin()
        except OSError as error:
            return str(error)
        return ""

    def _work(self, job: PendingSave) -> None:
        try:
            # a listing refreshes NFS's cache of missing names
            os.listdir(job.commit.folder.parent)
            folder = job.commit.folder
            files = [file for one in job.snapshots for file in one.write(folder, job.cancel)]
            job.commit.record_rank(self.ranks.rank, files)
            job.written.set()
            if job.manifest is not None:
                self._commit(job, job.manifest)
        except Exception as error:  # settle raises or reports it on the main thread of every rank
            job.error = error
        finally:
            job.took_s = time.monotonic() - job.started
            job.written.set()
            job.ended.set()

    def _commit(self, job: PendingSave, manifest: Manifest) -> None:
        pause_s, longest_s = POLL_S
        while job.commit.list_missing_ranks(self.ranks.num):
            if job.cancel.wait(pause_s):
                raise Abandoned
            pause_s = min(longest_s, 2 * pause_s)
        check_newest_lineage(self.trial, manifest.lineage)
        job.commit.commit(manifest)
        try:
            job.oldest = retain(self.trial, self.policy, self._holds, self._known, self.waits_for)
        except OSError as error:  # the generation is committed; the next save removes the surplus
            logger.warning("old checkpoints could not be removed, and the next save tries again: %s", error)
        job.committed = True

    def _call_off(self, job: PendingSave) -> None:
        self.ranks.any(False)  # from here on no rank writes
        if self.ranks.rank == 0:
            job.commit.abandon()
        error = job.error
        if self.ranks.any(error is not None and not isinstance(error, OSError | Abandoned)):
            raise error or CannotWrite(
                f"another trainer rank could not save checkpoint {job.commit.step}; its log has the reason"
            )
        mine = isinstance(error, OSError)
        failed = "another trainer rank could not write its part of the checkpoint; its log has the reason"
        problem = str(error) if mine else failed
        self._report_failure(job.commit.step, problem, mine)

    def _report_failure(self, step: int, problem: str, mine: bool = True) -> None:
        self.num_failed += 1
        kept = f"checkpoint {self.newest} is the newest" if self.newest >= 0 else "there is no checkpoint yet"
        self.problem = f"checkpoint {step} could not be saved: {problem}; {kept}"
        if mine or self.ranks.rank == 0:
            then = "" if self._last else " Training continues;"
            logger.error("SAVE FAILED: %s.%s free space in %s", self.problem, then, self.trial.recover)
