"""Submission: what is written, what is refused, and that a refusal leaves nothing behind."""

import dataclasses
import json
import os
import shutil
import stat
import threading
from pathlib import Path

import pytest
import yaml
from toy_plans import sft_plan

from hpc_rl.config.load.load import Loaded, load
from hpc_rl.config.load.stored import from_dict
from hpc_rl.core.errors import CannotWrite, ConfigError, NothingToResume, SchedulerError, TrialBusy
from hpc_rl.core.trial import Trial, write_json
from hpc_rl.plan.schema import Plan
from hpc_rl.schedulers.base import JobSpec, JobState, State
from hpc_rl.status import scheduler_view as asking
from hpc_rl.trials import submission as submission
from hpc_rl.trials.lock import TrialLock


class FakeScheduler:
    """Counts submissions; refuses where it is told to."""

    name = "local"

    def __init__(self, refusal: str = "") -> None:
        self.refusal = refusal
        self.specs: list[JobSpec] = []

    def submit(self, spec: JobSpec) -> str:
        if self.refusal:
            raise SchedulerError(self.refusal)
        self.specs.append(spec)
        return f"local-{len(self.specs)}"

    def query_states(self, job_ids: list[str]) -> dict[str, JobState]:
        return {job_id: JobState(job_id, State.RUNNING) for job_id in job_ids}


@pytest.fixture
def world(tmp_path, monkeypatch, state_home):
    """`world(mode=…, scheduler=…)` submits one trial below tmp_path/root."""
    for module in (submission, asking):
        monkeypatch.setattr(module, "make_scheduler", lambda kind, trial: FakeScheduler())

    def go(
        mode: str = "auto", scheduler: FakeScheduler | None = None, root: Path = tmp_path / "root", **options
    ):
        return submission.submit(
            *given(root, mode),
            command=["hpc-rl", "submit"],
            scheduler=scheduler or FakeScheduler(),
            **options,
        )

    return go


def given(root: Path, mode: str = "auto", **changes) -> tuple[Loaded, Plan]:
    data = {
        "experiment_name": "exp",
        "trial_name": "one",
        "train_dataset": {"path": "/d"},
        "model": {"path": "/m"},
    }
    config = from_dict(data | {"cluster": {"fileroot": str(root)}, "recover": {"mode": mode}} | changes)
    plan = sft_plan([], "/python", recover_mode=mode)
    explicit = (
        "experiment_name",
        "trial_name",
        "train_dataset.path",
        "model.path",
        "cluster.fileroot",
        "recover.mode",
    )
    return Loaded(config, dict.fromkeys(explicit, "test")), plan


def finish(trial: Trial, job_id: str) -> None:
    (trial.jobs / f"{job_id}.state").write_text('{"event": "ended", "code": 0}\n')


def test_a_submission_leaves_what_the_job_reads(world):
    scheduler = FakeScheduler()
    made = world(scheduler=scheduler)
    trial = made.trial
    assert (
        stat.S_IMODE(trial.dir.stat().st_mode) == 0o700 and stat.S_IMODE(trial.secret.stat().st_mode) == 0o600
    )
    assert scheduler.specs == [JobSpec("hpc-rl.exp.one", trial.scripts / "local.sh", scheduler.specs[0].tag)]
    assert (
        json.loads(trial.job(made.job_id).read_text()).items()
        >= {"scheduler": "local", "start_mode": "auto"}.items()
    )
    assert from_dict(json.loads(trial.config_json.read_text())).recover.mode == "auto"
    assert json.loads(trial.provenance_json.read_text())["sha256"].keys() >= {
        "config.json",
        "plan.json",
        "scripts/local.sh",
    }
    assert len(list(trial.scripts.glob("hpc_rl-*.zip"))) == 1 and not (trial.dir / ".submitting").exists()


def test_a_trial_does_not_end_before_the_generation_that_it_goes_on_from(world, tmp_path, make_generation):
    """A folder beside it with the manifest of another step is none."""
    trial = world().trial
    finish(trial, "local-1")
    make_generation(trial, 85)
    trial.generation(99).mkdir()
    (trial.generation(99) / "manifest.json").write_bytes(
        (trial.generation(85) / "manifest.json").read_bytes()
    )
    loaded, plan = given(tmp_path / "root", total_train_steps=84)
    with pytest.raises(ConfigError, match=r"total_train_steps 84.*checkpoint 85.*allowed: an end at step 85"):
        submission.submit(
            loaded, plan, command=[], trial=trial, recovery=submission.Recovery(), scheduler=FakeScheduler()
        )
    loaded, plan = given(tmp_path / "root", total_train_steps=85)
    submission.submit(
        loaded, plan, command=[], trial=trial, recovery=submission.Recovery(), scheduler=FakeScheduler()
    )


def test_config_yaml_is_what_was_said_and_loads_to_the_same(world, tmp_path):
    trial = world().trial
    assert "optimizer" not in yaml.safe_load(trial.config_yaml.read_text())["model"]
    assert load([trial.config_yaml]).config == given(tmp_path / "root")[0].config


def test_a_refusing_scheduler_leaves_nothing(world, tmp_path):
    with pytest.raises(SchedulerError, match="no"):
        world(scheduler=FakeScheduler("no"))
    assert not (tmp_path / "root").exists()


def test_a_refusing_scheduler_leaves_an_older_trial_as_it_was(world, tmp_path, monkeypatch):
    made = world()
    finish(made.trial, made.job_id)
    before = {path: path.read_bytes() for path in made.trial.dir.rglob("*") if path.is_file()}
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SchedulerError):
        world(scheduler=FakeScheduler("no"), mode="fault")
    assert {path: path.read_bytes() for path in made.trial.dir.rglob("*") if path.is_file()} == before


def test_a_template_that_does_not_render_leaves_nothing(tmp_path, state_home):
    loaded, plan = given(tmp_path / "root")
    launcher = dataclasses.replace(loaded.config.launcher, templates_dir=str(tmp_path / "nowhere"))
    loaded = dataclasses.replace(loaded, config=dataclasses.replace(loaded.config, launcher=launcher))
    with pytest.raises(ConfigError, match="templates_dir"):
        submission.submit(loaded, plan, command=[], scheduler=FakeScheduler())
    assert not (tmp_path / "root").exists()


def test_a_running_trial_is_busy(world):
    job_id = world().job_id
    with pytest.raises(TrialBusy, match=f"running as job {job_id}"):
        world()


@pytest.mark.parametrize("mode", ["disabled", "fault"])
def test_a_fresh_start_refuses_state(world, mode, make_generation):
    made = world()
    finish(made.trial, made.job_id)
    made.trial.attempt("1.0").make_dirs()
    with pytest.raises(TrialBusy, match=r"Resume it with recover\.mode=auto\. For a fresh"):
        world(mode=mode)
    make_generation(made.trial, 3)
    with pytest.raises(TrialBusy, match="hpc-rl recover exp/one` or recover"):
        world(mode=mode)
    shutil.rmtree(made.trial.recover)
    write_json(made.trial.trimmed, {"step": 2})
    with pytest.raises(TrialBusy, match=r"starts from step 0\. For a fresh start"):
        world(mode=mode)
    made.trial.trimmed.unlink()
    world(mode="auto")


def test_resume_wants_a_generation(world, tmp_path, make_generation):
    with pytest.raises(NothingToResume):
        world(mode="resume")
    assert not (tmp_path / "root").exists()
    made = world()
    finish(made.trial, made.job_id)
    make_generation(made.trial, 3)
    job = json.loads(
        made.trial.job(world(mode="fault", recovery=submission.Recovery(parent="x")).job_id).read_text()
    )
    assert job["start_mode"] == "resume" and job["lineage_parent"] == "x"


def test_a_fileroot_that_can_not_be_written(world, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CannotWrite, match="fileroot"):
        world(root=tmp_path / "file" / "root")
    with pytest.raises(CannotWrite):
        world(root=Path("/proc/hpc-rl"))


def test_of_many_at_once_exactly_one_wins(world, tmp_path):
    scheduler, lost = FakeScheduler(), []

    def one() -> None:
        try:
            world(scheduler=scheduler)
        except TrialBusy as error:
            lost.append(error)

    threads = [threading.Thread(target=one) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(scheduler.specs) == 1 and len(lost) == 5
    trial = submission.make_trial(given(tmp_path / "root")[0].config)
    assert [path.stem for path in trial.jobs.glob("*.json")] == ["local-1"] and trial.plan_json.exists()


def test_the_lock_of_a_dead_submitter_is_taken_over(tmp_path):
    trial = Trial(tmp_path / "e" / "t")
    trial.dir.mkdir(parents=True)
    lock = trial.dir / ".submitting"
    lock.write_text(json.dumps({"host": os.uname().nodename, "pid": os.getpid(), "start_ticks": 1}))
    with TrialLock(trial), pytest.raises(TrialBusy, match=f"process {os.getpid()}"), TrialLock(trial):
        pass
    assert not lock.exists()


def test_render_to_a_folder_is_a_whole_trial_that_nobody_handed_in(tmp_path, state_home):
    made = submission.render_to(*given(tmp_path / "root"), tmp_path / "out", command=["hpc-rl", "render"])
    assert made.trial.dir == tmp_path / "out" and made.script.read_text().startswith("#!/bin/bash")
    assert (
        made.trial.secret.exists()
        and not list(made.trial.jobs.iterdir())
        and not (tmp_path / "root").exists()
    )
