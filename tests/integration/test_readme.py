"""The commands of README.md are run here, in its order; its paths, and the exit codes of the docs, are checked."""

import json
import re
import subprocess
from pathlib import Path

import pytest
from command_line import Shell

from hpc_rl.core.errors import ExitCode

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
DOCTOR = "hpc-rl doctor"  # tests/slurm/test_look.py runs it; `hpc-rl quickstart` is run by test_quickstart.py
TEACHER = "hpc-rl quickstart --method teacher"  # test_teacher_quickstart.py runs it
ON_SLURM = "hpc-rl submit --config configs/grpo.yaml --n_nodes 4"  # tests/slurm runs it


def fenced() -> list[str]:
    """The commands of the block that is marked for this test, without their comments."""
    block = re.search(
        rf"<!-- run: {Path(__file__).relative_to(ROOT)} -->\n```bash\n(.*?)```", README, re.DOTALL
    )
    assert block
    return [line.partition(" #")[0].strip() for line in block.group(1).splitlines() if line.strip()]


@pytest.fixture(scope="module")
def shell(tmp_path_factory) -> Shell:
    """The root of a clone, as far as the commands see it."""
    shell = Shell(tmp_path_factory.mktemp("readme"))
    (shell.here / "configs").symlink_to(ROOT / "configs")
    return shell


@pytest.mark.timeout(600)
def test_the_commands_of_a_run_of_your_own(shell):
    commands = fenced()
    assert len(commands) >= 8
    said = {}
    try:
        for command in commands:
            wait_until_it_makes_sense(shell, command)
            said[command.split()[1]] = shell.type(command, timeout_s=240)
        shell.wait_for(
            "first", r"^sums/first +done", timeout_s=240
        )  # "done in about a minute" is something else
        shell.wait_for("second", r"step [1-9]")
    finally:
        shell.run("cancel", "second", "--now", "--wait_s", "40")
        shell.run("cancel", "first", "--now", "--wait_s", "40")
    assert "ready: " in said["quickstart"]
    assert (
        subprocess.run(["bash", "-n", *(shell.here / "scripts-to-read" / "scripts").glob("*.sh")]).returncode
        == 0
    )
    assert "nothing is refused" in said["check"] and "sample 0: reward " in said["check"]
    assert "hpc-rl cancel sums/first" in said["submit"]
    assert said["status"].startswith("sums/first")
    assert "step 1" in said["logs"]
    assert re.match(r"checkpoint [1-9]", said["checkpoint"])
    assert "saves its state" in said["cancel"]
    assert "trial      sums/first" in said["recover"]
    assert "sums/first" in said["list"]
    assert re.search(r"step [1-9]\d*, prompt \d+, sample 0: reward ", said["samples"])
    assert re.search(r"fork       of sums/first at checkpoint [1-9]", said["fork"])
    assert "forked from sums/first, checkpoint " in shell.run("status", "second").stdout
    story = shell.run("status", "first").stdout
    assert "cancelled by the user, state saved" in story
    assert re.search(r"from checkpoint [1-9]", story)
    assert "<title>first" in (shell.here / "report.html").read_text()
    check_goodput(shell)


def check_goodput(shell: Shell) -> None:
    """The buckets of a trial with a recover sum to what its two jobs held: a server and a trainer."""
    (report,) = json.loads(shell.run("report", "first", "--json").stdout)
    held_s = 0.0
    for path in Path(report["dir"]).glob("jobs/*.state"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        held_s += lines[-1]["time"] - lines[0]["time"]
    assert len(report["attempts"]) == 2
    assert sum(report["buckets"].values()) == pytest.approx(
        2 * held_s, rel=0.01, abs=4
    )  # whole seconds there
    assert sum(report["buckets"].values()) == pytest.approx(report["allocation_s"], rel=0.001)
    assert list(Path(report["dir"]).glob("attempts/*/use/server-0.0.json")), "servers told how busy they were"
    assert {"generate", "train", "publish", "start"} <= set(report["buckets"])


def wait_until_it_makes_sense(shell: Shell, command: str) -> None:
    """People read what one command printed before they type the next."""
    word = command.split()[1]
    if word in ("logs", "samples", "checkpoint", "cancel"):
        shell.wait_for("first", "step [1-9]")
    if word == "recover":
        shell.wait_for("first", "cancelled")


def test_every_command_of_the_readme_is_run_by_a_test():
    blocks = [line.strip() for line in README.splitlines() if line.startswith("    ")]
    inline = re.findall(r"`((?:hpc-rl|make) [^`]*)`", README)
    fences = fenced()
    typed = {
        line.partition("#")[0].strip() for line in (*blocks, *inline) if line.startswith(("hpc-rl", "make"))
    }
    elsewhere = {"make quickstart", "make test", "make docs", "hpc-rl quickstart", TEACHER, ON_SLURM, DOCTOR}
    assert ON_SLURM in typed
    assert typed <= elsewhere | set(fences), typed - elsewhere - set(fences)


def test_the_test_command_is_what_ci_runs():
    assert "    make test " in README
    assert (ROOT / ".ci" / "run").read_text().rstrip().endswith("exec make test")
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    words = re.findall(r"^    make ([a-z]+)", README + (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    assert len(words) >= 6
    assert set(words) <= set(targets)


def test_exit_codes_of_the_docs_are_those_of_the_code():
    section = (ROOT / "docs" / "compatibility.md").read_text().partition("## Exit codes\n")[2]
    codes = re.findall(r"^\| ([\d, ]+) \|", section, re.MULTILINE)
    assert {int(code) for row in codes for code in row.split(", ")} == {int(code) for code in ExitCode}


def test_paths_of_the_readme_exist():
    for path in re.findall(r"`((?:configs|sbatch|templates|tests)/[^`\s]*)`", README):
        assert path == "sbatch/trial.sbatch.j2" or (ROOT / path).exists(), path
