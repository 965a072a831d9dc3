"""Trial directories written by hand, as the processes of a trial leave them."""

import functools
import json
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpc_rl.checkpoint.generation import Commit, Manifest
from hpc_rl.core import checked_file
from hpc_rl.core.trial import Trial, write_json
from hpc_rl.render import lint

T0 = 1_790_000_000.0  # when the first job of a fake trial was submitted


class FakeTrial:
    """Writes the files of one trial. Times are seconds after T0."""

    def __init__(self, root: Path, experiment: str = "exp", name: str = "t1") -> None:
        self.trial = Trial(root / "user" / experiment / name)
        self.trial.make_dirs()
        self.trial.make_secret()
        plan = {"trainer": "grpo", "allocation": "embedded:d1+fsdp:d1", "n_nodes": 1, "recover_mode": "auto"}
        write_json(self.trial.plan_json, plan)
        write_json(self.trial.config_json, {"total_train_steps": 100})

    def job(self, job_id: str, at: float = 0.0, scheduler: str = "local", **more: Any) -> None:
        write_json(
            self.trial.job(job_id), {"job_id": job_id, "scheduler": scheduler, "time": T0 + at, **more}
        )

    def script_said(self, job_id: str, event: str, at: float = 0.0, **more: Any) -> None:
        self._append(self.trial.jobs / f"{job_id}.state", {"event": event, "time": T0 + at, **more})

    def event(self, attempt: str, event: str, at: float = 0.0, **more: Any) -> None:
        self.trial.attempt(attempt).make_dirs()
        self._append(self.trial.attempt(attempt).events, {"event": event, "time": T0 + at, **more})

    def started(self, attempt: str, role: str, incarnation: int = 0, at: float = 0.0, index: int = 0) -> None:
        self.event(attempt, "started", at, role=role, index=index, incarnation=incarnation)
        self.trial.attempt(attempt).log(role, index, incarnation).write_text(
            f"{role}-{index}.{incarnation} line\n"
        )

    def exited(
        self, attempt: str, role: str, code: int, reason: str = "", incarnation: int = 0, at: float = 0.0
    ) -> None:
        self.event(
            attempt, "exited", at, role=role, index=0, incarnation=incarnation, code=code, reason=reason
        )

    def ended(self, attempt: str, code: int, reason: str = "", at: float = 0.0) -> None:
        write_json(self.trial.attempt(attempt).ended, {"exit_code": code, "reason": reason, "time": T0 + at})

    def lineage(
        self, number: int, from_step: int, attempt: str, incarnation: int = 0, reason: str = ""
    ) -> None:
        record = {"lineage": number, "from_step": from_step, "attempt": attempt, "incarnation": incarnation}
        submission = attempt.rpartition(".")[0]
        write_json(
            self.trial.lineages / f"{number:04d}.json", record | {"reason": reason, "submission": submission}
        )

    def steps(
        self, attempt: str, first: int, last: int, lineage: int = 0, incarnation: int = 0, at: float = 0.0
    ) -> None:
        """One line for each step, a second apart; the reward is step / 100."""
        for step in range(first, last + 1):
            row = {
                "step": step,
                "time": T0 + at + step - first,
                "version": f"{lineage}.{step}",
                "lineage": lineage,
            }
            self.row(attempt, row | {"reward": step / 100, "staleness_mean": 0.5, "step_s": 1.0}, incarnation)

    def evaluation(self, attempt: str, step: int, reward: float, incarnation: int = 0) -> None:
        self.row(
            attempt,
            {"step": step, "eval_reward": reward, "eval_num_prompts": 200, "eval_version": f"0.{step}"},
            incarnation,
        )

    def row(self, attempt: str, row: dict[str, Any], incarnation: int = 0) -> None:
        self.trial.attempt(attempt).make_dirs()
        self._append(self.trial.attempt(attempt).metrics(incarnation), row)

    def generation(self, step: int) -> None:
        self.trial.generation(step).mkdir(parents=True)
        write_json(self.trial.generation(step) / "manifest.json", {"step": step})

    def cancel_wish(self, job_id: str) -> None:
        write_json(self.trial.cancel_intent(job_id), {"time": T0})

    def run_to(self, last: int, attempt: str = "7.0") -> None:
        """A job 7 that started fresh and made steps 1 to `last`, without an end."""
        self.job("7", scheduler="local")
        for role in ("server", "rollout", "trainer"):
            self.started(attempt, role, at=1)
        self.lineage(0, 0, attempt, reason="first start, recover.mode auto")
        self.evaluation(attempt, 0, 0.31)
        self.steps(attempt, 1, last, at=10)

    @staticmethod
    def _append(path: Path, row: dict[str, Any]) -> None:
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")


@pytest.fixture(autouse=True, scope="session")
def nothing_waits_for_the_disk() -> Iterator[None]:
    """What is written survives a process at once, and a machine is not lost here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: None)
        yield


# what differs between equal scripts of two tests: the test's folder, the trial's number, a checksum in a comment
OF_A_TEST = re.compile(
    rf"{re.escape(tempfile.gettempdir())}/pytest-of-[\w./-]*|(?<=[: ])([0-9a-f]{{64}}|[0-9a-f]{{8}})\b"
)


@pytest.fixture(autouse=True, scope="session")
def equal_scripts_are_checked_once() -> Iterator[None]:
    """Shellcheck would take most of the time of a command that submits."""
    check = functools.cache(lint.check_shell)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lint, "check_shell", lambda text: check(OF_A_TEST.sub("0", text)))
        yield


@pytest.fixture
def fake_trial(tmp_path: Path) -> FakeTrial:
    return FakeTrial(tmp_path / "runs")


@pytest.fixture
def make_fake_trial():
    """FakeTrial itself, for tests that need several."""
    return FakeTrial


@pytest.fixture
def make_generation():
    """`make_generation(trial, step)` commits a generation as the trainer of job-1 does; its one file is
    `state`.
    """

    def make(trial: Trial, step: int, **more: Any) -> None:
        making = Commit(trial, step, "job-1.0", 0)
        making.begin()
        (making.folder / "state").write_text(f"state of {step}")
        making.record_rank(0, [checked_file.record(making.folder / "state")])
        who = {"attempt": "job-1.0", "incarnation": 0, "submission": "job-1", "version": f"0.{step}"}
        making.commit(Manifest(step=step, lineage=0, num_ranks=1, config_hash="c", **who, **more))

    return make


@pytest.fixture
def make_seal():
    """`make_seal(trial, step)` leaves the seal of a batch without groups."""

    def make(trial: Trial, step: int) -> None:
        seal = {
            "step": step,
            "lineage": 0,
            "groups": [],
            "staleness": [],
            "num_bytes": 0,
            "xxh3": "",
            "counters": {},
        }
        trial.batches.mkdir(parents=True, exist_ok=True)
        write_json(trial.batches / f"{step:08d}.seal", seal)

    return make


@pytest.fixture
def state_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty trial index of this test's own."""
    home = tmp_path / "state"
    monkeypatch.setenv("XDG_STATE_HOME", str(home))
    return home
