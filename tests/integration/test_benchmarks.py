"""The benchmarks can be started, and the one of publications runs at a tiny size."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = sorted((ROOT / "benchmarks").glob("*.py"))


@pytest.mark.parametrize("path", BENCHMARKS, ids=lambda path: path.stem)
def test_a_benchmark_says_what_it_does(path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(path), "--help"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(path), run_name="__main__")
    assert not ended.value.code and "--out" in capsys.readouterr().out


@pytest.mark.timeout(600)
def test_publications_are_compared_with_two_peers(tmp_path):
    options = ["--size", "tiny", "--ranks", "2", "--rates", "1e-6", "--servers", "1x1", "4x2", "--steps", "1"]
    command = [sys.executable, ROOT / "benchmarks" / "publish.py", *options, "--dir", tmp_path]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([*command, "--out", tmp_path / "out.json"], check=True, env=environment)
    cases = json.loads((tmp_path / "out.json").read_text())["cases"]
    assert [(case["servers"], case["nodes"]) for case in cases] == [(1, 1), (4, 2)]
    for case in cases:
        assert case["difference"]["share_of_bytes"]["max"] < 0.05 and not case["whole_versions"]
        assert case["disk"]["share_of_bytes"]["median"] >= 1 and case["gloo"]["share_of_bytes"]["median"] == 1
        assert all(case[way]["server_blocked_s"]["min"] > 0 for way in ("difference", "disk", "gloo"))


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_methods_learn_their_toys(tmp_path):
    chosen = ["grpo", "gspo", "opd", "opsd", "sft_distill", "full", "lora-1", "lora-8", "ppo-turns"]
    command = [sys.executable, ROOT / "benchmarks" / "learning_curves.py", *chosen, "--seeds", "1"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([*command, "--out", tmp_path / "out.json"], check=True, env=environment)
    cases = json.loads((tmp_path / "out.json").read_text())["cases"]
    assert [*cases] == chosen
    assert all(case["seeds"]["1"]["steps"] for case in cases.values()), cases
