"""A save that is cut before any call that changes the disk leaves generation k or k-1, whole."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from patience import extend

HERE = Path(__file__).parent
HOWS = ("before", "torn", "lossy", "threads")


def cut_saves(folder: Path, stride: int) -> list[dict]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parents[1])}
    command = [sys.executable, str(HERE / "cut_saves.py"), str(folder), ",".join(HOWS), str(stride)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=extend(1500))
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(rows: list[dict]) -> None:
    for row in rows:
        assert row["code"] in (0, 9), row
        newest, *others = row["after"]
        assert newest[0] in (2, 3), row
        assert all(value == step and not problem for step, value, problem in row["after"]), (
            row
        )  # each that is there is whole
        assert [step for step, _, _ in others][:1] == [newest[0] - 1], row
        assert row["left"] == [], row  # what was half written or half removed is cleared by the next start
        assert row["next"][0][:2] == [4, 4.0], row
    ends = [row for row in rows if row["code"] == 0]  # the last of each way was not cut
    assert [(row["how"], row["after"][0][0]) for row in ends] == [(how, 3) for how in HOWS]


@pytest.mark.timeout(300)
def test_a_cut_save_leaves_the_old_generation_or_the_new_one(tmp_path):
    rows = cut_saves(tmp_path, stride=11)
    check(rows)
    assert len(rows) > 15


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_cut_at_every_point(tmp_path):
    rows = cut_saves(tmp_path, stride=1)
    check(rows)
    assert {row["after"][0][0] for row in rows} == {2, 3}
