from __future__ import annotations

import json
import math
import subprocess
import sys

import pytest

from hpc_rl.stats.sinks import JsonlSink, open_sinks
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
    assert json.loads(text, parse_constant=pytest.fail) == {
        "step": 1,
        "loss": None,
        "grad_norm": None,
        "reward": 0.5,
        "version": "0.1",
    }
    assert sink.state() == {"file": "metrics.0.jsonl", "bytes": len(text)}
    sink.close()


def test_tensorboard_reads_back_what_was_logged(tmp_path):
    sinks = open_sinks(tmp_path / "metrics.0.jsonl", tmp_path / "tensorboard", start_step=4)
    sinks.log(5, {"time": 1000.0, "loss": 0.25, "version": "0.5"})
    assert set(sinks.state()) == {"JsonlSink", "TensorBoardSink"}
    sinks.close()
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    (file,) = (tmp_path / "tensorboard").iterdir()
    events = list(EventFileLoader(str(file)).Load())
    scalars = [(event.step, value.tag, round(value.tensor.float_val[0], 6)) for event in events for value in event.summary.value]
    assert scalars == [(5, "loss", 0.25)]
    assert [event.step for event in events if event.HasField("session_log")] == [5]


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
