import errno
import json
import math
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from hpc_rl.config.options.operations import (
    MLflowConfig,
    StatsLoggerConfig,
    SwanlabConfig,
    TrackioConfig,
    WandBConfig,
)
from hpc_rl.core.errors import ConfigError
from hpc_rl.stats.metrics_writers import JsonlWriter, RunIdentity, TensorBoardWriter, make_tag, open_writers
from hpc_rl.stats.tracker import Tracker


def test_tracker_divides_sums_by_counts_and_starts_again():
    stats = Tracker()
    stats.mean("loss", 6.0, 2)
    stats.mean("loss", 3.0, 1)
    stats.mean("nothing", 0.0, 0)
    stats.value("lr", 0.1)
    stats.value("lr", 0.2)
    stats.add("rows_skipped", 2)
    stats.add("rows_skipped", 3)
    assert stats.take() == {"loss": 3.0, "lr": 0.2, "rows_skipped": 5}
    assert stats.take() == {}


def test_tracker_times_a_block_that_raises():
    stats = Tracker()
    with pytest.raises(KeyError), stats.timed("wait_s"):
        raise KeyError
    with stats.timed("wait_s"):
        pass
    assert 0 <= stats.take()["wait_s"] < 1


def test_a_line_is_on_disk_when_log_returns_and_is_strict_json(tmp_path):
    writer = JsonlWriter(tmp_path / "new" / "metrics.0.jsonl")
    writer.log(1, {"loss": math.nan, "grad_norm": math.inf, "reward": 0.5, "version": "0.1"})
    text = writer.path.read_text()
    assert text.endswith("\n")
    numbers = {"loss": None, "grad_norm": None, "reward": 0.5}
    assert json.loads(text, parse_constant=pytest.fail) == {"step": 1, "version": "0.1", **numbers}
    assert writer.state() == {"file": "metrics.0.jsonl", "bytes": len(text)}
    writer.close()


class Full:
    """A file on a disk with room for so many bytes more."""

    def __init__(self, file, room: int) -> None:
        self.file, self.room, self.closed = file, room, False

    def write(self, data: bytes) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        count = self.file.write(data[: self.room])
        self.room -= count
        return count

    def tell(self) -> int:
        return self.file.tell()

    def close(self) -> None:
        self.closed = True
        self.file.close()


def test_on_a_full_disk_no_line_is_lost_or_torn(tmp_path, caplog):
    path = tmp_path / "metrics.0.jsonl"
    disk = Full(path.open("ab", buffering=0), room=10**6)
    writer = JsonlWriter(path, disk)
    writer.log(1, {"loss": 0.5})
    disk.room = 7
    writer.log(2, {"loss": 0.25})
    writer.log(3, {"loss": 0.125})
    assert caplog.text.count("DISK FULL: metrics wait in memory") == 1
    disk.room = 10**6
    writer.state()  # as before a generation is committed
    assert [json.loads(line)["step"] for line in writer.path.read_text().splitlines()] == [1, 2, 3]
    writer.log(4, {})
    writer.close()
    assert [json.loads(line)["step"] for line in writer.path.read_text().splitlines()] == [1, 2, 3, 4]


def test_tensorboard_goes_on_in_a_new_file_once_there_is_room(tmp_path, caplog):
    class Writer:
        def add_event(self, _event) -> None:
            if full:
                raise OSError(errno.EDQUOT, "Disk quota exceeded")
            events.append(_event)

        def close(self) -> None: ...

    full, events, opened = True, [], []
    writer = TensorBoardWriter(tmp_path, open_writer=lambda: opened.append(Writer()) or opened[-1])
    writer.log(1, {"loss": 0.5})
    writer.log(2, {"loss": 0.5})
    assert caplog.text.count("DISK FULL: TensorBoard's files") == 1
    full = False
    writer.log(3, {"loss": 0.5})
    writer.close()
    assert [event.step for event in events] == [3] and len(opened) == 4  # a new file after each failure


def test_tensorboard_reads_back_what_was_logged(tmp_path):
    every = StatsLoggerConfig(every_steps=5)
    metrics = tmp_path / "metrics.0.jsonl"
    writers = open_writers(metrics, tmp_path / "tensorboard", start_step=4, stats_logger=every)
    writers.log(5, {"time": 1000.0, "loss": 0.25, "version": "0.5"})
    writers.log(6, {"loss": 0.5})
    writers.log(6, {"eval_loss": 0.75})
    assert len(metrics.read_text().splitlines()) == 3  # has every step
    assert set(writers.state()) == {"JsonlWriter", "TensorBoardWriter"}
    writers.close()
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    (file,) = (tmp_path / "tensorboard").iterdir()
    events = list(EventFileLoader(str(file)).Load())
    values = [(event.step, value) for event in events for value in event.summary.value]
    scalars = [(step, value.tag, round(value.tensor.float_val[0], 6)) for step, value in values]
    assert scalars == [(5, "train/loss", 0.25), (6, "eval/loss", 0.75)]
    assert [event.step for event in events if event.HasField("session_log")] == [5]


def test_tensorboard_has_metrics_in_groups():
    of_rl = {
        "rollout": ["reward", "reward_std", "truncated", "staleness_mean", "zero_advantage_groups", "leak"],
        "train": ["loss", "grad_norm", "lr", "entropy", "behave_approx_kl"],
        "time": ["step_s", "wait_s", "eval_s"],
        "eval": ["eval_reward", "eval_pass@4", "eval_algebra/reward"],
    }
    for group, names in of_rl.items():
        for name in names:
            short = name.removeprefix("eval_") if group == "eval" else name
            assert make_tag(name, has_reward=True) == f"{group}/{short}"
    for name in ("agent/turns", "reward/format"):
        assert make_tag(name, has_reward=True) == name
    assert make_tag("accuracy", has_reward=False) == "train/accuracy"


def test_metrics_writers_need_no_torch(tmp_path):
    code = f"""
import sys
from pathlib import Path
from hpc_rl.stats.metrics_writers import open_writers
writers = open_writers(Path({str(tmp_path)!r}) / "m.jsonl", Path({str(tmp_path)!r}) / "tb")
writers.log(1, {{"loss": 1.0}})
writers.close()
print([name for name in ("torch", "tensorflow") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


class FakeService:
    """Stands in for the modules wandb and swanlab (the real ones, run offline by hand, did the same)."""

    def __init__(self):
        self.options, self.rows, self.finished, self.id = {}, [], False, ""

    def init(self, **options):
        self.options = options
        self.id = options.get("id", "")
        return self

    def log(self, numbers, step=None):
        self.rows.append((step, numbers))

    def define_metric(self, name, step_metric):
        self.axes = (name, step_metric)

    def finish(self):
        self.finished = True

    Settings = dict


def test_services_get_names_tags_and_numbers(tmp_path, monkeypatch):
    wandb, swanlab = FakeService(), FakeService()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setitem(sys.modules, "swanlab", swanlab)
    who = RunIdentity("sums", "grpo", tmp_path, tmp_path, {"seed": 1})
    logger = StatsLoggerConfig(
        wandb=WandBConfig(mode="offline", tags=["a"], entity="team", wandb_base_url="http://w"),
        swanlab=SwanlabConfig(mode="local", project="p", logdir=str(tmp_path / "s")),
    )
    writers = open_writers(tmp_path / "m.jsonl", tmp_path / "tb", 0, who, logger)
    writers.log(3, {"loss": 0.5, "version": "0.3", "time": 1.0})
    writers.log(2, {"eval_reward": 0.5, "eval_version": "0.2"})
    writers.close()
    wanted = {"mode": "offline", "entity": "team", "tags": ["a"], "config": {"seed": 1}}
    wanted |= {"project": "sums", "name": "grpo", "group": "sums_grpo", "settings": {"base_url": "http://w"}}
    assert wanted.items() <= wandb.options.items() and wandb.id == "sums_grpo_train"
    wanted = {"project": "p", "experiment_name": "grpo", "mode": "local"}
    assert wanted.items() <= swanlab.options.items()
    assert wandb.rows[0] == swanlab.rows[0] == (3, {"loss": 0.5})
    assert wandb.axes == ("eval_*", "evaluated_step"), "it drops what is logged with an earlier step"
    assert wandb.rows[1] == (None, {"eval_reward": 0.5, "evaluated_step": 2})
    assert swanlab.rows[1] == (2, {"eval_reward": 0.5})
    assert wandb.finished and swanlab.finished


class FakeMLflow:
    """Stands in for the module mlflow; `runs` outlives a start, as its server does."""

    def __init__(self):
        self.runs, self.uri, self.metrics, self.ended = {}, "", [], 0

    def set_tracking_uri(self, uri):
        self.uri = uri

    def set_experiment(self, name):
        return SimpleNamespace(experiment_id=name)

    def search_runs(self, experiments, output_format):
        return [run for run in self.runs.values() if run.experiment in experiments]

    def start_run(self, run_id=None, run_name=None, tags=None):
        if run_id is None:
            run_id = str(len(self.runs))
            made = {"info": SimpleNamespace(run_id=run_id), "data": SimpleNamespace(tags=tags, params={})}
            self.runs[run_id] = SimpleNamespace(experiment="sums", name=run_name, **made)
        self.active = self.runs[run_id]
        return self.active

    def log_params(self, params):
        self.active.data.params |= params

    def log_metrics(self, numbers, step, synchronous):
        assert not synchronous
        self.metrics.append((self.active.info.run_id, step, numbers))

    def flush_async_logging(self):
        self.ended += 1

    def end_run(self):
        self.ended += 1


def open_service(tmp_path, **section):
    who = RunIdentity("sums", "grpo", tmp_path / "attempt", tmp_path, {"actor": {"lr": 0.1}, "seed": 1})
    logger = StatsLoggerConfig(**section)
    return open_writers(tmp_path / "m.jsonl", tmp_path / "tb", 0, who, logger)


def test_the_attempts_of_a_trial_are_one_run_of_mlflow(tmp_path, monkeypatch):
    mlflow = FakeMLflow()
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    mlflow.start_run(run_name="another trial", tags={})
    for step in (3, 4):
        writers = open_service(tmp_path, mlflow=MLflowConfig(mode="local", tags={"team": "a"}))
        writers.log(step, {"loss": 0.5, "eval_pass@8": 0.25, "version": "0.3", "time": 1.0})
        writers.close()
    assert mlflow.uri == (tmp_path / "mlflow").as_uri()
    assert mlflow.metrics == [("1", step, {"loss": 0.5, "eval_pass_8": 0.25}) for step in (3, 4)]
    run = mlflow.runs["1"]
    assert run.name == "grpo" and run.data.tags["team"] == "a"
    assert run.data.params == {"actor.lr": "0.1", "seed": "1"}
    assert mlflow.ended == 4 and len(mlflow.runs) == 2


def test_mlflow_sends_to_the_server_that_is_named(tmp_path, monkeypatch):
    mlflow = FakeMLflow()
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    section = MLflowConfig(mode="online", tracking_uri="http://m", name="n", config={"a": 1})
    open_service(tmp_path, mlflow=section).close()
    assert mlflow.uri == "http://m"
    assert (mlflow.runs["0"].name, mlflow.runs["0"].data.params) == ("n", {"a": "1"})


@pytest.mark.parametrize("space", [None, "team/curves"])
def test_trackio_gets_names_numbers_and_a_folder_or_a_space(tmp_path, monkeypatch, space):
    trackio = FakeService()
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    monkeypatch.delenv("TRACKIO_DIR", raising=False)
    monkeypatch.setenv("TRACKIO_SPACE_ID", "another/space")
    section = TrackioConfig(mode="online" if space else "local", space_id=space, project="p")
    writers = open_service(tmp_path, trackio=section)
    writers.log(3, {"loss": 0.5, "version": "0.3"})
    writers.close()
    wanted = {"project": "p", "name": "grpo", "space_id": space, "resume": "allow"}
    assert wanted.items() <= trackio.options.items() and trackio.options["config"]["seed"] == 1
    assert os.environ.pop("TRACKIO_DIR") == str(tmp_path / "trackio")
    assert ("TRACKIO_SPACE_ID" in os.environ) is bool(space), "mode local stays on this machine"
    assert trackio.rows == [(3, {"loss": 0.5})] and trackio.finished


ENABLED = {
    "wandb": WandBConfig(mode="online"),
    "swanlab": SwanlabConfig(mode="cloud"),
    "mlflow": MLflowConfig(mode="local"),
    "trackio": TrackioConfig(mode="local"),
}


@pytest.mark.parametrize("package, section", ENABLED.items(), ids=list(ENABLED))
def test_a_service_that_is_not_installed_says_how_to_install_it(tmp_path, monkeypatch, package, section):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delenv("TRACKIO_DIR", raising=False)
    who = RunIdentity("sums", "grpo", tmp_path, tmp_path, {})
    with pytest.raises(ConfigError, match=rf"pip install 'hpc-rl\[{package}\]'`, or set it to disabled"):
        open_writers(tmp_path / "m.jsonl", tmp_path / "tb", 0, who, StatsLoggerConfig(**{package: section}))


def test_services_are_not_imported_while_they_are_disabled(tmp_path, monkeypatch):
    for package in ENABLED:
        monkeypatch.setitem(sys.modules, package, None)
    open_service(tmp_path).close()


def test_tensorboard_shows_the_starts_of_a_trial_as_one_series(tmp_path):
    for start, last in ((0, 4), (2, 5)):
        writer = TensorBoardWriter(tmp_path, start)
        for step in range(start + 1, last + 1):
            writer.log(step, {"loss": float(start)})
        writer.close()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path)).Reload().Scalars("train/loss")
    assert [(event.step, event.value) for event in events] == [
        (1, 0), (2, 0), (3, 2), (4, 2), (5, 2),
    ]  # fmt: skip
