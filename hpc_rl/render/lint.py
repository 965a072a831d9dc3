"""Checks of a rendered script that need no scheduler: directives, `bash -n`, shellcheck if installed."""

import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from hpc_rl.render.scripts import POLICY

TIMEOUT_S = 60.0
# Options of which sbatch takes one.
EXCLUSIVE = (
    {"--gpus-per-node", "--gpus"},
    {"--mem", "--mem-per-cpu", "--mem-per-gpu"},
    {"--requeue", "--no-requeue"},
)


def is_checked(name: str) -> bool:
    """Return whether a rendered file is one to check; `name` may have words before that of the file."""
    # Hooks may be in any language, JSON is for submitit. The policy is long, and the same for all trials: the
    # tests of this version have checked it.
    file = name.split()[-1]
    return not (file.startswith("hook.") or file.endswith(".json") or file == POLICY)


def problems(texts: Mapping[str, str]) -> list[str]:
    """Return what is wrong with scripts, by name; equal texts are checked once."""
    first: dict[str, str] = {}
    for name, text in texts.items():
        if is_checked(name):
            first.setdefault(text, name)
    checks = (directive_problems, bash_problems, shellcheck_problems)
    return [
        f"{name}: {problem}"
        for text, name in first.items()
        for check in checks
        for problem in check(text) or []
    ]


def directive_problems(text: str) -> list[str]:
    """Return #SBATCH lines that sbatch would ignore or that contradict each other."""
    lines = text.splitlines()
    first = next(
        (number for number, line in enumerate(lines) if line.strip() and not line.startswith("#")), len(lines)
    )
    found = [
        f"line {number + 1} comes after the first command, so sbatch ignores it: {line}"
        for number, line in enumerate(lines)
        if line.startswith("#SBATCH") and number > first
    ]
    options = [line.split()[1].partition("=")[0] for line in lines[:first] if line.startswith("#SBATCH -")]
    twice = sorted({option for option in options if options.count(option) > 1})
    hetjob = any(line.split()[1:] == ["hetjob"] for line in lines[:first] if line.startswith("#SBATCH"))
    found += [] if hetjob else [f"{option} is given twice; sbatch takes the last" for option in twice]
    for group in EXCLUSIVE:
        if len(both := group & set(options)) > 1:
            found.append(f"{' and '.join(sorted(both))} exclude each other")
    for line in lines[:first]:
        # Of some options of ours the value may hold a dollar sign that is meant.
        if re.match(r"#SBATCH -(?!-(chdir|output|comment|job-name))", line) and re.search(
            r"\$\{?[A-Za-z_]", line
        ):
            found.append(f"#SBATCH {line.split()[1]} holds a shell variable, which sbatch does not expand")
    if options and not {"--requeue", "--no-requeue"} & set(options):
        found.append("neither --requeue nor --no-requeue: what happens when a node dies is left to the site")
    if options and "--open-mode" not in options:
        found.append("no --open-mode=append: a requeue would truncate the script's output")
    if any(line.startswith("#SBATCH") and not line.startswith("#SBATCH ") for line in lines):
        found.append("#SBATCH without a blank after it is a comment")
    return found


def bash_problems(text: str) -> list[str]:
    done = _run(["bash", "-n"], text)
    return [f"bash -n: {line}" for line in done.stderr.splitlines()] if done.returncode else []


def shellcheck() -> str | None:
    """Return the program: beside this Python, or on the PATH; None where there is none."""
    beside = Path(sys.executable).parent / "shellcheck"
    return str(beside) if beside.is_file() else shutil.which("shellcheck")


def shellcheck_problems(text: str) -> list[str] | None:
    """Return errors and warnings; None where shellcheck is not installed."""
    # Mere advice would refuse a path with a dollar sign in it.
    program = shellcheck()
    if program is None:
        return None
    done = _run([program, "-s", "bash", "-S", "warning", "-f", "gcc", "-"], text)
    return [f"shellcheck: {line}" for line in done.stdout.splitlines()] if done.returncode else []


def _run(argv: list[str], text: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, input=text, capture_output=True, text=True, timeout=TIMEOUT_S)
