"""A wish to cancel that can't be written down."""

import errno

import pytest

from hpc_rl.core.errors import CannotWrite
from hpc_rl.core.trial import Trial
from hpc_rl.schedulers.base import JobState, State
from hpc_rl.status.submitted_jobs import TrialJob
from hpc_rl.trials import cancellation


class Running:
    def query_states(self, job_ids):
        return {one: JobState(one, State.RUNNING) for one in job_ids}


def test_on_a_full_disk_it_says_how_the_job_is_ended_all_the_same(tmp_path, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(cancellation, "write_json", full)
    monkeypatch.setattr(cancellation, "make_job_scheduler", lambda trial, job: Running())
    trial = Trial(tmp_path / "u" / "e" / "t")
    trial.make_dirs()
    with pytest.raises(CannotWrite, match=r"Nothing was cancelled\..* scancel 8"):
        cancellation.write_request(trial, TrialJob("7", native_id="8", scheduler="slurm"), now=False)
