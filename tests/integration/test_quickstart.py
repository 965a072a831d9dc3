"""The quickstart as a user types it: short in every run of the tests, whole and with three seeds in the soak."""

from __future__ import annotations

import re

import pytest
from toy_trials import hpc_rl


def reward_before_and_after(text: str) -> tuple[float, float]:
    found = re.search(r"^held-out reward (\d\.\d\d) -> (\d\.\d\d)$", text, re.MULTILINE)
    assert found, text
    return float(found[1]), float(found[2])


@pytest.mark.timeout(400)
def test_a_short_quickstart_goes_from_nothing_to_the_closing_lines(tmp_path):
    said = hpc_rl(
        "quickstart", "total_train_steps=12", "evaluator.freq_steps=6", cwd=tmp_path, timeout_s=390
    ).stdout
    before, _ = reward_before_and_after(said)
    assert 0.1 < before <= 0.5
    assert "training prompts" in said  # the curve
    directory = re.search(r"^trial directory +(\S+)$", said, re.MULTILINE)
    assert directory and directory[1].startswith(str(tmp_path / "quickstart" / "runs"))
    assert re.search(r"hpc-rl status quickstart/grpo-", said)
    listed = hpc_rl("list", cwd=tmp_path).stdout
    assert "quickstart/grpo-" in listed and "quickstart/sft-" in listed


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_it_learns(tmp_path, seed):
    said = hpc_rl("quickstart", "--seed", str(seed), cwd=tmp_path, timeout_s=1700).stdout
    print(said)
    before, after = reward_before_and_after(said)
    assert before <= 0.5
    assert after >= 0.8
