"""A scheduler that only remembers, and a configuration that passes the checks."""

import os
import sys
from pathlib import Path

import pytest
from command_line import make_checkpoint

from hpc_rl import schedulers
from hpc_rl.core.errors import SchedulerError
from hpc_rl.schedulers.base import JobSpec, JobState, State


class FakeScheduler:
    """Answers what `answers` says; `asked` and `calls` tell what it was asked for."""

    name = "local"

    def __init__(self) -> None:
        self.answers: dict[str, State] = {}
        self.refuses = ""
        self.calls: list[tuple[str, ...]] = []
        self.num_questions = 0
        self.on_call = lambda: None

    def submit(self, spec: JobSpec) -> str:
        if self.refuses:
            raise SchedulerError(self.refuses)
        job_id = f"job-{len(self.calls) + 1}"
        self.calls.append(("submit", job_id))
        self.answers[job_id] = State.RUNNING
        return job_id

    def query_states(self, job_ids: list[str]) -> dict[str, JobState]:
        self.num_questions += 1
        if self.refuses:
            raise SchedulerError(self.refuses)
        return {job_id: JobState(job_id, self.answers.get(job_id, State.UNKNOWN)) for job_id in job_ids}

    def cancel(self, *job_ids: str) -> None:
        self.calls.append(("cancel", *job_ids))
        self.on_call()

    def nudge(self, *job_ids: str) -> None:
        self.calls.append(("nudge", *job_ids))
        self.on_call()


@pytest.fixture(autouse=True)
def activated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The PATH has `hpc-rl`, as in an activated environment."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> FakeScheduler:
    fake = FakeScheduler()
    for name in ("local", "slurm"):
        monkeypatch.setitem(schedulers.SCHEDULERS, name, lambda trial: fake)
    return fake


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A GRPO configuration of a model that is there but never loaded."""
    model = tmp_path / "model"
    make_checkpoint(model)
    data = tmp_path / "train.jsonl"
    data.write_text('{"prompt": "1+1=", "answer": "2"}\n')
    path = tmp_path / "grpo.yaml"
    path.write_text(
        f"""experiment_name: sums
trial_name: small
total_train_steps: 10
cluster: {{fileroot: {tmp_path / "runs"}, n_gpus_per_node: 0}}
train_dataset: {{path: {data}}}
actor: {{path: {model}}}
gconfig: {{n_samples: 4, max_new_tokens: 4}}
recover: {{mode: auto}}
launcher: {{type: local}}
"""
    )
    return path
