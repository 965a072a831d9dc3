"""Check rendered scripts without a scheduler: directives, `bash -n`, shellcheck if installed."""

import difflib
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc_rl.core.errors import ConfigError
from hpc_rl.render.slurm_options import SBATCH_OPTIONS

TIMEOUT_S = 60.0
# Options that exclude each other.
EXCLUSIVE = (
    {"--gpus-per-node", "--gpus"},
    {"--mem", "--mem-per-cpu", "--mem-per-gpu"},
    {"--requeue", "--no-requeue"},
)
# pyxis adds these to sbatch.
_PYXIS = ("container-", "no-container-")
_PLACE = "put it into block site_directives of sbatch/trial.sbatch.j2"


@dataclass(frozen=True)
class Problem:
    """A mistake in a script."""

    message: str
    line: int | None = None  # of the script, from 1

    def __str__(self) -> str:
        return self.message if self.line is None else f"line {self.line}: {self.message}"


def is_checked(name: str) -> bool:
    """Return whether to check a rendered file; `name` may have words before the file name."""
    # Hooks may be in any language, JSON is for submitit.
    file = name.split()[-1]
    return not (file.startswith("hook.") or file.endswith(".json"))


def find_problems(texts: Mapping[str, str], sources: Sequence[Path] = ()) -> list[str]:
    """Check scripts; equal texts are checked once, equal problems are returned once.

    Args:
        texts: Script by name.
        sources: Files of the site included in the scripts; a problem in such a line names its file and line.
    """
    first: dict[str, str] = {}
    for name, text in texts.items():
        if is_checked(name):
            first.setdefault(text, name)
    places = _map_places(sources)
    found: dict[str, None] = {}
    for text, name in first.items():
        lines = text.splitlines()
        for checks in check_script(name, text).values():
            for problem in checks or []:
                number = problem.line
                wrong = lines[number - 1].strip() if number and number <= len(lines) else ""
                place = places.get(wrong)
                changed = ", ".join(str(path) for path in sources if str(path) in text)
                elsewhere = f"{name}: {problem}" + (f" (changed by {changed})" if changed else "")
                found[f"{place}: {problem.message}" if place else elsewhere] = None
    return list(found)


def _map_places(sources: Iterable[Path]) -> dict[str, str]:
    """Return line of text -> `file:line`, without lines that occur several times."""
    places: dict[str, list[str]] = {}
    for path in sources:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if line.strip():
                places.setdefault(line.strip(), []).append(f"{path}:{number}")
    return {line: where[0] for line, where in places.items() if len(where) == 1}


def check_script(name: str, text: str) -> dict[str, list[Problem] | None]:
    """Return the problems of a script by check; None for a missing program."""
    directives = check_directives(text) if name.endswith(".sbatch") else check_no_directives(text)
    return {"directives": directives, "bash -n": check_bash(text), "shellcheck": check_shell(text)}


def check_no_directives(text: str) -> list[Problem]:
    """Return the #SBATCH lines of a script that is not passed to sbatch."""
    message = f"sbatch reads #SBATCH lines only in the job script, not in a file that it sources; {_PLACE}"
    return [
        Problem(f"{message}: {line}", number)
        for number, line in enumerate(text.splitlines(), 1)
        if line.startswith("#SBATCH")
    ]


def check_directives(text: str) -> list[Problem]:
    """Return #SBATCH lines that sbatch would ignore or refuse, or that contradict each other."""
    lines = text.splitlines()
    head = next(
        (number for number, line in enumerate(lines) if line.strip() and not line.startswith("#")), len(lines)
    )
    found = [
        Problem(
            f"sbatch ignores this line, because it comes after the first command; {_PLACE}: {line}", number
        )
        for number, line in enumerate(lines[head:], head + 1)
        if line.startswith("#SBATCH")
    ]
    options: dict[str, int] = {}
    hetjob = any(line.split() == ["#SBATCH", "hetjob"] for line in lines[:head])
    for number, line in enumerate(lines[:head], 1):
        found += [Problem(message, number) for message in _check_line(line)]
        if not line.startswith("#SBATCH -"):
            continue
        option = line.split()[1].partition("=")[0]
        if option in options and not hetjob:
            found.append(Problem(f"{option} is given twice; sbatch takes the last", number))
        options[option] = number
    for group in EXCLUSIVE:
        if len(both := group & set(options)) > 1:
            last = max(options[option] for option in both)
            found.append(Problem(f"{' and '.join(sorted(both))} exclude each other", last))
    if options and not {"--requeue", "--no-requeue"} & set(options):
        found.append(
            Problem(
                "the script has neither --requeue nor --no-requeue: the site's default decides whether Slurm "
                "requeues the job when a node fails"
            )
        )
    if options and "--open-mode" not in options:
        found.append(Problem("the script has no --open-mode=append: a requeue would truncate its output"))
    return found


def _check_line(line: str) -> Iterator[str]:
    """Yield the problems of one line before the first command."""
    if line.startswith("#SBATCH"):
        # Values decided by the plan may contain a literal dollar sign.
        if re.match(r"#SBATCH -(?!-(chdir|output|comment|job-name))", line) and re.search(
            r"\$\{?[A-Za-z_]", line
        ):
            yield f"sbatch does not expand shell variables: {line}"
        if not line.startswith("#SBATCH "):
            yield f"sbatch ignores this line, because there is no blank after #SBATCH: {line}"
        for name in _find_unknown_options(line):
            near = difflib.get_close_matches(name, SBATCH_OPTIONS, n=1)
            yield f"sbatch has no option --{name}" + (f"; did you mean --{near[0]}?" if near else "")
    elif (word := re.match(r"#\s*(\w+)\s+-", line)) and _is_near_sbatch(word[1]):
        yield f"sbatch takes this line for a comment; write #SBATCH, without a blank: {line}"


def _is_near_sbatch(word: str) -> bool:
    return difflib.SequenceMatcher(None, word.upper(), "SBATCH").ratio() > 0.8


def _find_unknown_options(line: str) -> list[str]:
    """Return the long options of an #SBATCH line that sbatch does not have; it accepts prefixes."""
    try:
        words = shlex.split(line.removeprefix("#SBATCH"), comments=True)
    except ValueError:
        return []  # sbatch's quoting differs slightly; bash -n ignores comments
    names = [word[2:].partition("=")[0] for word in words if re.match(r"--[a-z]", word) and " " not in word]
    unknown = [name for name in names if not any(known.startswith(name) for known in SBATCH_OPTIONS)]
    unknown = [name for name in unknown if not name.startswith(_PYXIS)]
    return [name for name in unknown if f"--{name}" not in _load_sbatch_help()] if unknown else []


def _load_sbatch_help() -> str:
    """Return sbatch's help, which includes the options of the site's plugins; empty without sbatch."""
    if shutil.which("sbatch") is None:
        return ""
    try:
        return _execute(["sbatch", "--help"], "").stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def check_bash(text: str) -> list[Problem]:
    """Return the syntax errors that bash finds. Raises ConfigError if there is no bash."""
    if shutil.which("bash") is None:
        raise ConfigError("PATH has no bash, which checks and runs scripts; add its directory, usually /bin.")
    done = _execute(["bash", "-n", "/dev/stdin"], text)  # /dev/stdin gives line numbers
    if not done.returncode:
        return []
    found = [re.match(r"\S+: line (\d+): (.*)", line) for line in done.stderr.splitlines()]
    # A line that only quotes the script begins with a backtick.
    return [
        Problem(f"bash -n: {error[2]}", int(error[1])) for error in found if error and error[2][:1] != "`"
    ] or [Problem(f"bash -n: {done.stderr.strip()}")]


def find_shellcheck() -> str | None:
    """Return shellcheck: next to this Python, or on the PATH; else None."""
    beside = Path(sys.executable).parent / "shellcheck"
    return str(beside) if beside.is_file() else shutil.which("shellcheck")


def check_shell(text: str) -> list[Problem] | None:
    """Return errors and warnings of shellcheck; None if it is not installed."""
    # Lower severities would refuse a path with a dollar sign.
    program = find_shellcheck()
    if program is None:
        return None
    done = _execute([program, "-s", "bash", "-S", "warning", "-f", "gcc", "-"], text)
    if not done.returncode:
        return []
    lines = [re.match(r"-:(\d+):\d+: (.*)", line) for line in done.stdout.splitlines()]
    return [Problem(f"shellcheck: {line[2]}", int(line[1])) for line in lines if line]


def _execute(argv: list[str], text: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, input=text, capture_output=True, text=True, timeout=TIMEOUT_S)
