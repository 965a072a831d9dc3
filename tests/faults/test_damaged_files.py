"""Files of a trial that are damaged in every way: the commands about it answer in words and in time."""

import contextlib
import math
import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from command_line import Shell
from patience import extend
from stored_trials import folder, trial_of

from hpc_rl.core.errors import ExitCode
from hpc_rl.core.trial import Trial
from hpc_rl.trials import trial_index

__all__ = ["folder"]
LIMIT_S = math.ceil(extend(6.6))
SAMPLE = 30  # damages in every run of the tests; all of them in make soak
COMMANDS = (
    ("status", "TRIAL"),
    ("status", "TRIAL", "--json", "--all"),
    ("list",),
    ("recover", "TRIAL", "--explain"),
    ("logs", "TRIAL"),
    ("checkpoint", "list", "TRIAL"),
    ("report", "TRIAL"),
    ("plot", "TRIAL"),
    ("top", "TRIAL", "--once"),
    ("du", "TRIAL"),
)
JSON = {
    "deep": "[" * 100_000,
    "deep-object": '{"time": ' * 5000 + "1" + "}" * 5000,
    "infinite": '{"time": 1e999, "step": 1e999, "code": 1e999, "lineage": -1e999, "event": "ended"}',
    "huge": '{"time": 1'
    + "0" * 400
    + ', "step": 1'
    + "0" * 400
    + ', "code": 1'
    + "0" * 400
    + ', "event": "ended"}',
    "surrogate": '{"reason": "\\ud800", "job_id": "\\udfff", "event": "\\ud800", "time": 1}',
    "types": '{"time": [], "step": {}, "code": "x", "reason": 5, "job_id": {}, "event": null, "role": []}',
    "escape": '{"reason": "\\u001b[2J", "event": "ended", "time": 1, "code": 0}',
    "list": "[1, 2]",
    "null": "null",
    "empty": "",
}


def replaced(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        path.unlink()
        make(path)

    return damage


def written(content: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "zero": replaced(lambda path: path.symlink_to("/dev/zero")),
    "random": replaced(lambda path: path.symlink_to("/dev/urandom")),
    "loop": replaced(lambda path: path.symlink_to(path)),
    "nowhere": replaced(lambda path: path.symlink_to("/nowhere")),
    "pipe": replaced(os.mkfifo),
    "folder": replaced(Path.mkdir),
    "gone": Path.unlink,
    "bytes": written(bytes(range(256)) * 40),
    **{name: written(f"{text}\n".encode()) for name, text in JSON.items()},
}


class TookTooLong(BaseException):
    pass


@contextlib.contextmanager
def limit(seconds: int) -> Iterator[None]:
    def late(*_arguments: object) -> None:
        raise TookTooLong

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def kept(path: Path) -> Iterator[None]:
    """The file is as it was afterwards."""
    content, mode = path.read_bytes(), path.stat().st_mode
    try:
        yield
    finally:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        path.write_bytes(content)
        path.chmod(mode)


def problems(shell: Shell, trial: Trial, what: str) -> list[str]:
    """What a person would complain about, over all commands."""
    found = []
    for command in COMMANDS:
        argv = [str(trial.dir) if word == "TRIAL" else word for word in command]
        try:
            with limit(LIMIT_S):
                done = shell.call(*argv)
        except TookTooLong:
            found.append(f"{what}: {' '.join(command)}: no answer in {LIMIT_S} s")
            continue
        shown = done.stdout + done.stderr
        if "internal error" in shown or done.returncode not in set(ExitCode) or "\x1b" in shown:
            found.append(f"{what}: {' '.join(command)}: {done.returncode} {done.stderr[-300:]}")
        if not shown:
            found.append(f"{what}: {' '.join(command)}: nothing was said")
    return found


@pytest.fixture
def shell(folder: Path, tmp_path: Path, monkeypatch) -> Shell:
    shell = Shell(tmp_path / "shell")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_STATE_HOME", str(shell.root / "state"))
        for name in ("finished", "stopped"):
            trial_index.record_trial(trial_of(folder, name))
    return shell


def cases(trial: Trial) -> list[tuple[Path, str]]:
    files = sorted(path for path in trial.dir.rglob("*") if path.is_file() and "scripts" not in path.parts)
    return [(path, name) for path in files for name in DAMAGES]


def damage_all(shell: Shell, trial: Trial, wanted: list[tuple[Path, str]]) -> None:
    found = []
    for path, name in wanted:
        with kept(path):
            DAMAGES[name](path)
            new = problems(shell, trial, f"{path.relative_to(trial.dir)} is {name}")
            print(*new, sep="\n", end="", flush=True)
            found += new
    assert not found, f"{len(found)} of {len(wanted) * len(COMMANDS)}:\n" + "\n".join(found[:60])


@pytest.mark.timeout(300)
def test_some_damages_of_any_file(shell, folder):
    trial = trial_of(folder, "stopped")
    seed = int(os.environ.get("HPC_RL_FAULT_SEED", random.randrange(10**6)))
    print(f"HPC_RL_FAULT_SEED={seed}")
    damage_all(shell, trial, random.Random(seed).sample(cases(trial), SAMPLE))


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", ["finished", "stopped"])
def test_every_damage_of_every_file(shell, folder, name):
    trial = trial_of(folder, name)
    damage_all(shell, trial, cases(trial))


@pytest.mark.timeout(120)
def test_folders_that_are_no_folders(shell, folder):
    trial = trial_of(folder, "stopped")
    found = []
    above = [path for path in trial.dir.iterdir() if path.is_dir() and path.name != "scripts"]
    below = [path for one in above for path in one.iterdir() if path.is_dir()]
    for path in sorted(above + below):
        aside = path.rename(folder / "aside")
        for name in ("zero", "loop", "pipe", "deep") if path in above else ("loop",):
            path.touch()
            DAMAGES[name](path)
            found += problems(shell, trial, f"{path.relative_to(trial.dir)} is {name}")
            path.unlink()
        aside.rename(path)
    assert not found, "\n".join(found)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another account")
def test_the_trial_of_another_account_is_told_in_a_sentence(tmp_path, monkeypatch):
    import tempfile

    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o755)
        trial = Trial(Path(place) / "me" / "exp" / "one")
        trial.make_dirs()
        trial.plan_json.write_text("{}")
        shell = Shell(Path(place) / "shell")
        for path in (shell.root, *shell.root.rglob("*")):
            os.chown(path, 12345, 12345)
        os.setegid(12345)
        os.seteuid(12345)
        try:
            found = [
                shell.call(command, str(trial.dir)) for command in ("status", "logs", "recover", "cancel")
            ]
        finally:
            os.seteuid(0)
            os.setegid(0)
    for done in found:
        assert done.returncode == ExitCode.REFUSED, done.stderr
        assert "belongs to another account" in done.stderr and len(done.stderr) < 600
