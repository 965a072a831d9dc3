"""The stored results of the training methods: each learns, and the numbers of the documentation are theirs."""

import json
import re
from pathlib import Path

import pytest

from hpc_rl.core.algorithms import ALGORITHMS

ROOT = Path(__file__).resolve().parents[2]
CURVES = json.loads((ROOT / "benchmarks/results/learning_curves.json").read_text())
CASES = CURVES["cases"]
SEEDS = ["1", "2", "3"]
NUMBER = r"(\d+(?:\.\d+)?)"
OF_TEACHER = ("opd", "opsd", "sft_distill")
STEPS = {name: [case["seeds"][seed]["steps"] for seed in SEEDS] for name, case in CASES.items()}


def find_numbers(page: str, sentence: str) -> list[float]:
    """Return the numbers of a sentence on a page of docs/; N stands for each of them, spaces for any."""
    text = " ".join((ROOT / "docs" / page).read_text().split())
    found = re.search(re.escape(sentence).replace("N", NUMBER).replace(r"\ ", " "), text)
    assert found is not None, f"docs/{page} no longer says: {sentence}"
    return [float(one) for one in found.groups()]


def compare_steps(name: str) -> float:
    """Return the steps of a case over those of full training, all seeds together."""
    return sum(STEPS[name]) / sum(STEPS["full"])


def test_every_method_has_a_curve():
    methods = {*ALGORITHMS, "opd-top4", "full", "lora-1", "lora-8", "ppo-turns"}
    assert CASES.keys() == methods
    assert all([*case["seeds"]] == SEEDS for case in CASES.values())


@pytest.mark.parametrize("name", CASES)
def test_a_method_reached_its_threshold_on_each_seed(name):
    task = CURVES["tasks"][CASES[name]["task"]]
    for found in CASES[name]["seeds"].values():
        reaches_teacher = name in ("opd", "opd-top4", "sft_distill")
        assert found["threshold"] >= (0.98 if reaches_teacher else task["threshold"])
        assert found["steps"] is not None and found["steps"] <= task["num_steps"]
        assert len(found["curve"]) == -(-found["steps"] // CURVES["window"])
        assert found["curve"][0] < 0.5, "the task is not solved at the start"


@pytest.mark.parametrize("name", ["lora-1", "lora-8"])
def test_adapters_at_ten_times_the_rate_need_at_most_a_tenth_more_steps(name):
    assert CASES[name]["lr"] == 10 * CASES["full"]["lr"]
    assert f"actor.lora_rank={name.partition('-')[2]}" in CASES[name]["options"]
    assert compare_steps(name) <= 1.1


def test_the_numbers_of_the_page_about_adapters():
    sentence = "adapters of rank 1 and 8 need N and N of the steps of full training"
    shares = [round(compare_steps(name), 1) for name in ("lora-1", "lora-8")]
    assert find_numbers("lora.md", sentence) == shares
    # tests/unit/plan/test_memory.py plans this adapter of a 70B model on four GPUs of 80 GB
    sentence = "of a 70B model has N billion of them: it trains on N GPUs of N GB, and its checkpoint is N GB"
    params = 80 * 2_588_672
    found = find_numbers("lora.md", sentence.replace("N GPUs", "four GPUs"))
    assert found == [round(params / 1e9, 1), 80, round(12 * params / 1e9, 1)]


def test_the_numbers_of_the_page_about_distillation():
    sentence = "reaches the teacher's reward in N to N steps in place of N to N"
    wanted = [edge(STEPS[name]) for name in ("opd-top4", "opd") for edge in (min, max)]
    assert find_numbers("distillation.md", sentence) == wanted
    assert CASES["opd-top4"]["options"][-1] == "distillation.top_k=4"


def test_the_numbers_of_the_page_about_algorithms():
    sentence = "a mean reward of N in N to N steps of N completions, `opd` its teacher's reward in N to N"
    of_rewards = [step for name in ALGORITHMS if name not in OF_TEACHER for step in STEPS[name]]
    wanted = [CURVES["tasks"]["copy"]["threshold"], min(of_rewards), max(of_rewards), 32 * 8]
    assert find_numbers("algorithms.md", sentence) == [*wanted, min(STEPS["opd"]), max(STEPS["opd"])]
    sentence = (
        "The learning rate is Ne-3; `cispo` and `sapo`, whose loss has no hard bound of the ratio, have Ne-4"
    )
    usual, smaller = find_numbers("algorithms.md", sentence)
    rates = {name: CASES[name]["lr"] for name in ALGORITHMS if name not in OF_TEACHER}
    assert rates.pop("cispo") == rates.pop("sapo") == smaller * 1e-4
    assert {*rates.values()} == {usual * 1e-3}


def test_a_step_without_a_pass_for_the_proximal_policy_is_cheaper_by_a_sixth():
    record = json.loads((ROOT / "benchmarks/results/proximal.json").read_text())
    ratio = record["loglinear_over_recompute"]
    assert ratio["max"] < 1 and record["pairs"] >= 5
    assert ratio["median"] == pytest.approx(5 / 6, abs=0.02) and record["shape"]["minibatches"] == 4
    text = " ".join((ROOT / "docs/algorithms.md").read_text().split())
    claim = "a sixth less CPU for a step of a small model with four mini-batches, `benchmarks/results/proximal.json`"
    assert claim in text
