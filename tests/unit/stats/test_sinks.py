import errno
import json
import math
import subprocess
import sys

import pytest

from hpc_rl.config.options.operations import StatsLoggerConfig, SwanlabConfig, WandBConfig
from hpc_rl.core.errors import ConfigError
from hpc_rl.stats.sinks import JsonlSink, RunIdentity, TensorBoardSink, make_tag, open_sinks
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
    sink = JsonlSink(tmp_path / "new" / "metrics.0.jsonl")
    sink.log(1, {"loss": math.nan, "grad_norm": math.inf, "reward": 0.5, "version": "0.1"})
    text = sink.path.read_text()
    assert text.endswith("\n")
    numbers = {"loss": None, "grad_norm": None, "reward": 0.5}
    assert json.loads(text, parse_constant=pytest.fail) == {"step": 1, "version": "0.1", **numbers}
    assert sink.state() == {"file": "metrics.0.jsonl", "bytes": len(text)}
    sink.close()


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
    sink = JsonlSink(path, disk)
    sink.log(1, {"loss": 0.5})
    disk.room = 7
    sink.log(2, {"loss": 0.25})
    sink.log(3, {"loss": 0.125})
    assert caplog.text.count("DISK FULL: metrics wait in memory") == 1
    disk.room = 10**6
    sink.state()  # as before a generation is committed
    assert [json.loads(line)["step"] for line in sink.path.read_text().splitlines()] == [1, 2, 3]
    sink.log(4, {})
    sink.close()
    assert [json.loads(line)["step"] for line in sink.path.read_text().splitlines()] == [1, 2, 3, 4]


def test_tensorboard_goes_on_in_a_new_file_once_there_is_room(tmp_path, caplog):
    class Writer:
        def add_event(self, _event) -> None:
            if full:
                raise OSError(errno.EDQUOT, "Disk quota exceeded")
            events.append(_event)

        def close(self) -> None: ...

    full, events, opened = True, [], []
    sink = TensorBoardSink(tmp_path, open_writer=lambda: opened.append(Writer()) or opened[-1])
    sink.log(1, {"loss": 0.5})
    sink.log(2, {"loss": 0.5})
    assert caplog.text.count("DISK FULL: TensorBoard's files") == 1
    full = False
    sink.log(3, {"loss": 0.5})
    sink.close()
    assert [event.step for event in events] == [3] and len(opened) == 4  # a new file after each failure


def test_tensorboard_reads_back_what_was_logged(tmp_path):
    every = StatsLoggerConfig(every_steps=5)
    metrics = tmp_path / "metrics.0.jsonl"
    sinks = open_sinks(metrics, tmp_path / "tensorboard", start_step=4, stats_logger=every)
    sinks.log(5, {"time": 1000.0, "loss": 0.25, "version": "0.5"})
    sinks.log(6, {"loss": 0.5})
    sinks.log(6, {"eval_loss": 0.75})
    assert len(metrics.read_text().splitlines()) == 3  # has every step
    assert set(sinks.state()) == {"JsonlSink", "TensorBoardSink"}
    sinks.close()
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


def test_sinks_need_no_torch(tmp_path):
    code = f"""
import sys
from pathlib import Path
from hpc_rl.stats.sinks import open_sinks
sinks = open_sinks(Path({str(tmp_path)!r}) / "m.jsonl", Path({str(tmp_path)!r}) / "tb")
sinks.log(1, {{"loss": 1.0}})
sinks.close()
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
    who = RunIdentity("sums", "grpo", tmp_path, {"seed": 1})
    logger = StatsLoggerConfig(
        wandb=WandBConfig(mode="offline", tags=["a"], entity="team", wandb_base_url="http://w"),
        swanlab=SwanlabConfig(mode="local", project="p", logdir=str(tmp_path / "s")),
    )
    sinks = open_sinks(tmp_path / "m.jsonl", tmp_path / "tb", 0, who, logger)
    sinks.log(3, {"loss": 0.5, "version": "0.3", "time": 1.0})
    sinks.log(2, {"eval_reward": 0.5, "eval_version": "0.2"})
    sinks.close()
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


@pytest.mark.parametrize("package", ["wandb", "swanlab"])
def test_a_service_that_is_not_installed_says_how_to_install_it(tmp_path, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    section = WandBConfig(mode="online") if package == "wandb" else SwanlabConfig(mode="cloud")
    who = RunIdentity("sums", "grpo", tmp_path, {})
    with pytest.raises(ConfigError, match=rf"pip install 'hpc-rl\[{package}\]'`, or set it to disabled"):
        open_sinks(tmp_path / "m.jsonl", tmp_path / "tb", 0, who, StatsLoggerConfig(**{package: section}))


def test_services_are_not_imported_while_they_are_disabled(tmp_path, monkeypatch):
    for package in ("wandb", "swanlab"):
        monkeypatch.setitem(sys.modules, package, None)
    who, logger = (
        RunIdentity("e", "t", tmp_path, {}),
        StatsLoggerConfig(wandb=WandBConfig(), swanlab=SwanlabConfig()),
    )
    open_sinks(tmp_path / "m.jsonl", tmp_path / "tb", 0, who, logger).close()


def test_tensorboard_shows_the_starts_of_a_trial_as_one_series(tmp_path):
    for start, last in ((0, 4), (2, 5)):
        sink = TensorBoardSink(tmp_path, start)
        for step in range(start + 1, last + 1):
            sink.log(step, {"loss": float(start)})
        sink.close()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path)).Reload().Scalars("train/loss")
    assert [(event.step, event.value) for event in events] == [
        (1, 0), (2, 0), (3, 2), (4, 2), (5, 2),
    ]  # fmt: skip
