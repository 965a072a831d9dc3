"""The quickstart as a user types it: short in every test run, whole and with three seeds in the soak."""

import re
from pathlib import Path

import pytest
from command_line import Shell
from toy_trials import ROOT, hpc_rl


def reward_before_and_after(text: str) -> tuple[float, float]:
    found = re.search(r"^held-out reward (\d\.\d\d) -> (\d\.\d\d)$", text, re.MULTILINE)
    assert found, text
    return float(found[1]), float(found[2])


@pytest.mark.timeout(400)
def test_a_short_quickstart_goes_from_nothing_to_the_closing_lines(tmp_path):
    shell = Shell(tmp_path)
    (shell.here / "configs").symlink_to(ROOT / "configs")  # as in the root of a clone
    done = shell.run("quickstart", "total_train_steps=12", "evaluator.freq_steps=6", timeout_s=390)
    assert done.returncode == 0, done.stdout + done.stderr
    before, _ = reward_before_and_after(done.stdout)
    assert 0.1 < before <= 0.5
    assert "training prompts" in done.stdout and "held-out prompts" in done.stdout  # the curves
    lines = done.stdout.splitlines()
    assert re.fullmatch(r"held-out reward \d\.\d\d -> \d\.\d\d", lines[-1])
    directory = re.search(r"^trial directory +(\S+)$", done.stdout, re.MULTILINE)
    assert directory and Path(directory[1]).is_dir()
    assert directory[1].startswith(str(shell.here / "quickstart" / "runs"))
    assert f"{ROOT}/configs/grpo.yaml" in done.stdout  # not the link
    assert "Writing model shards" not in done.stderr
    assert re.search(r"hpc-rl status quickstart/grpo-", done.stdout)
    following = next(line for line in lines if line.startswith("next ")).split()[1:]
    assert shell.run(*following[1:]).returncode == 0
    listed = shell.run("list").stdout
    assert "quickstart/grpo-" in listed and "quickstart/sft-" in listed


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("seed", "words"), [(1, []), (2, []), (3, []), (1, ["allocation_mode=embedded:d2|fsdp:d2"])]
)
def test_it_learns(tmp_path, seed, words):
    said = hpc_rl("quickstart", "--seed", str(seed), *words, cwd=tmp_path, timeout_s=1700).stdout
    print(said)
    before, after = reward_before_and_after(said)
    assert before <= 0.5
    assert after >= 0.8
