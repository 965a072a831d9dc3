"""The benchmarks can be started, and the one of publications runs at a tiny size."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
SIDE_BY_SIDE = ROOT / "benchmarks" / "side_by_side"
BENCHMARKS = [*sorted((ROOT / "benchmarks").glob("*.py")), SIDE_BY_SIDE / "run.py"]
BENCHMARKS.remove(ROOT / "benchmarks" / "run_record.py")  # only others import it
sys.path.append(str(ROOT / "benchmarks"))  # as if each were started by its path


@pytest.mark.parametrize("path", BENCHMARKS, ids=lambda path: path.stem)
def test_a_benchmark_says_what_it_does(path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(path), "--help"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(path), run_name="__main__")
    assert not ended.value.code and "--out" in capsys.readouterr().out


# name -> options of a short run
SHORT = {
    "async_gain": "--devices 16",
    "atropos_api": "--pairs 1 --environments 1 --groups 16",
    "checkpoint": "--pairs 1 --gb 0.05",
    "cluster_load": "--nodes 2 --seconds 2",
    "config_load": "--runs 1",
    "embedded": "--pairs 1",
    "engines": "--pairs 1 --size tiny",
    "evaluation": "--rounds 1 --steps 60",
    "loss_memory": "--pairs 1 --size tiny",
    "proximal": "--pairs 1",
    "publish_fit": "",
    "recovery": "--scheduler local --kills 1",
    "rollout_path": "quickstart --pairs 1",
    "simulator": "scale",
    "startup": "--scheduler local --runs 1",
}
IN_MAKE_GPU = ("engines", "loss_memory")


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in IN_MAKE_GPU else pytest.mark.soak) for name in SHORT]
)
def test_a_short_run_writes_its_record(name, tmp_path):
    command = [sys.executable, f"benchmarks/{name}.py", *SHORT[name].split(), "--out", tmp_path / "out.json"]
    subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    record = json.loads((tmp_path / "out.json").read_text())
    assert record["command"].startswith(f"python benchmarks/{name}.py"), record["command"]
    assert record["machine"]["cpus"] and record["versions"]["python"]


def test_each_benchmark_is_run_by_a_test():
    others = {
        "advantages",
        "learning_curves",
        "publish",
        "step_counts",
        "run",
    }  # have tests of their own below
    assert {path.stem for path in BENCHMARKS} == SHORT.keys() | others


def test_ragged_credit_takes_little_memory(tmp_path):
    options = ["--pairs", "1", "--size", "small", "--cases", "adv_norm", "kl_rewards"]
    options += ["--out", tmp_path / "out.json"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, ROOT / "benchmarks" / "advantages.py", *options]
    subprocess.run(command, check=True, env=environment)
    found = json.loads((tmp_path / "out.json").read_text())["cases"]
    one_column_mb = 256 * 32_768 * 4 / 1e6
    assert found["adv_norm"]["ragged"]["peak_mb"]["max"] < 0.2 * one_column_mb  # 1 MB: not even the mask
    assert found["kl_rewards"]["ragged"]["peak_mb"]["max"] < 2 * one_column_mb  # the credit, and 25 MB
    for case in found.values():
        assert case["rectangle"]["peak_mb"]["min"] > 5 * one_column_mb, "the measurement sees nothing"


@pytest.mark.timeout(600)
def test_publications_are_compared_with_two_peers(tmp_path):
    options = ["--size", "tiny", "--ranks", "2", "--rates", "1e-6", "--servers", "4x2", "--steps", "1"]
    command = [sys.executable, ROOT / "benchmarks" / "publish.py", *options, "--dir", tmp_path]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([*command, "--out", tmp_path / "out.json"], check=True, env=environment)
    cases = json.loads((tmp_path / "out.json").read_text())["cases"]
    assert [(case["servers"], case["nodes"]) for case in cases] == [(4, 2)]
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


def test_the_page_has_the_table_of_the_stored_result():
    run = runpy.run_path(str(SIDE_BY_SIDE / "run.py"))
    record = json.loads((ROOT / "benchmarks/results/side_by_side.json").read_text())
    assert run["format_table"](record) in (ROOT / "docs/performance.md").read_text()


def test_the_page_has_the_stored_counts():
    run = runpy.run_path(str(ROOT / "benchmarks/step_counts.py"))
    record = json.loads((ROOT / "benchmarks/results/step_counts.json").read_text())
    assert run["format_table"](record) in (ROOT / "docs/performance.md").read_text()
    for role in ("supervisor", "rollout"):
        calls = record["after"]["files"][role]
        assert calls["64"] <= 1.2 * calls["16"], role


@pytest.mark.timeout(600)
def test_no_layer_reads_a_value_back_and_a_group_is_one_request(tmp_path):
    few, many = "megatron, 4 experts", "megatron, 16 experts"
    command = [sys.executable, ROOT / "benchmarks/step_counts.py", "--only", "engines", "wire"]
    command += ["--cases", "fsdp, padded rows", "fsdp, packed rows", few, many, "--groups", "4"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([*command, "--out", tmp_path / "out.json"], check=True, env=environment)
    found = json.loads((tmp_path / "out.json").read_text())["after"]
    share = "layer and micro-batch"
    for name, counts in found["engines"].items():
        assert counts["reads"][share] == 0, (name, counts)
        assert counts["forward"][share] > 0 and counts["backward"][share] > 0, name
        assert counts["reads"]["step"] > 0, "reads are not counted"
    experts = [[found["engines"][name][kind] for kind in ("forward", "backward")] for name in (few, many)]
    assert experts[0] == experts[1]
    assert [found["wire"][length]["requests_per_group"] for length in found["wire"]] == [1.0, 1.0]


@pytest.mark.parametrize(
    "lengths, groups",
    [
        ([9, 8, 7, 6, 5, 4, 3, 2, 1, 1], [[0, 3], [1, 2], [4, 5, 6, 7, 8], [9]]),
        ([10, 2, 2], [[0, 1], [2]]),
    ],
)
def test_the_peers_packing_is_as_areal_does_it(lengths, groups):
    areal = runpy.run_path(str(SIDE_BY_SIDE / "areal_algorithms.py"))
    assert areal["pack_as_peer"](np.asarray(lengths), 15 if len(lengths) > 3 else 12) == groups


def test_packing_and_advantages_are_compared_with_the_peers_algorithms(tmp_path):
    options = [
        "--only",
        "packing",
        "gae-one",
        "gae-random",
        "gae-turns",
        "--quick",
        "--out",
        tmp_path / "out.json",
    ]
    (tmp_path / "page.md").write_text(
        "Before.\n<!-- begin of the table of benchmarks/side_by_side -->\nold\n<!-- end of the table -->\nAfter.\n"
    )
    command = [sys.executable, SIDE_BY_SIDE / "run.py", *options, "--page", tmp_path / "page.md"]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    cases = json.loads((tmp_path / "out.json").read_text())["cases"]
    assert all(case["ratio"]["min"] > 0 for case in cases.values())
    assert cases["packing"]["groups"]["ours"] <= cases["packing"]["groups"]["peer"]
    page = (tmp_path / "page.md").read_text()
    assert "| packing 10,000 rows" in page and "old" not in page and page.endswith("\nAfter.\n")


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_the_comparison_with_peers_runs(tmp_path):
    """All cases, one pair each; the first run installs TRL."""
    command = [sys.executable, SIDE_BY_SIDE / "run.py", "--quick", "--out", tmp_path / "out.json"]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    cases = json.loads((tmp_path / "out.json").read_text())["cases"]
    assert {"grpo-cold", "grpo-warm", "grpo-learn", "packing", "atropos", "import", "help"} <= cases.keys()
    assert all(case["ratio"]["min"] > 0 for case in cases.values())
    (pair,) = cases["grpo-cold"]["pairs"]
    assert pair["ours_tokens"] == pytest.approx(pair["peer_tokens"], rel=0.1), "the work is equal"
