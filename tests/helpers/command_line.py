"""The installed `hpc-rl` as a person runs it: a subprocess in a directory of its own, with a state directory
of its own.
"""

import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

from patience import extend, look

from hpc_rl.cli.__main__ import main

PROGRAM = Path(sys.executable).with_name("hpc-rl")
TOKENIZER = json.dumps(  # every text is one token
    {
        "normalizer": {"type": "Replace", "pattern": {"Regex": r"[\s\S]+"}, "content": "a"},
        "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "<unk>"},
    }
)


@dataclass
class Shell:
    """Runs commands in `here`, which may start empty. State, home and fileroot lie beside it, below
    `root`.
    """

    root: Path
    env: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for folder in (self.here, self.root / "state", self.root / "home"):
            folder.mkdir(parents=True, exist_ok=True)

    @property
    def here(self) -> Path:
        return self.root / "here"

    @property
    def environ(self) -> dict[str, str]:
        clean = {
            name: value for name, value in os.environ.items() if not name.startswith(("SBATCH_", "SLURM_"))
        }
        own = {
            "XDG_STATE_HOME": str(self.root / "state"),
            "HOME": str(self.root / "home"),
            "OMP_NUM_THREADS": "1",
        }
        return clean | own | {"PATH": f"{PROGRAM.parent}{os.pathsep}{os.environ['PATH']}"} | self.env

    def run(self, *args: str | bytes | Path, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
        """`hpc-rl ARGS`, with its two outputs as text."""
        argv = [str(arg) if isinstance(arg, Path) else arg for arg in (PROGRAM, *args)]
        return subprocess.run(
            argv,
            cwd=self.here,
            env=self.environ,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=extend(timeout_s),
        )

    def type(self, command: str, timeout_s: float) -> str:
        """Run a line as a person types it; return what it prints. It must succeed."""
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=self.here,
            env=self.environ,
            capture_output=True,
            text=True,
            timeout=extend(timeout_s),
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def tree(self) -> dict[str, tuple[int, bytes | None]]:
        """Everything below `root`: mode and content."""
        found = {}
        for path in sorted(self.root.rglob("*")):
            content = path.read_bytes() if path.is_file() and not path.is_symlink() else None
            found[str(path.relative_to(self.root))] = (path.lstat().st_mode, content)
        return found

    @contextlib.contextmanager
    def nothing_left(self) -> Iterator[None]:
        """What is done inside changes no file."""
        before = self.tree()
        yield
        after = self.tree()
        changed = [name for name in before.keys() | after.keys() if before.get(name) != after.get(name)]
        assert not changed, f"left behind or changed: {sorted(changed)}"

    def call(self, *args: str | bytes | Path) -> subprocess.CompletedProcess[str]:
        """`run` without a process: the program's main function, called with this shell's directory and
        environment. A command that replaces its process needs one of its own.
        """
        replaced = AssertionError("this command replaces its process: run it in one of its own")
        argv = [os.fsdecode(arg) for arg in args]
        out, err = io.StringIO(), io.StringIO()
        with (
            contextlib.chdir(self.here),
            mock.patch.dict(os.environ, self.environ, clear=True),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            mock.patch.multiple(os, **dict.fromkeys(("execv", "execvpe"), mock.Mock(side_effect=replaced))),
        ):
            code = main(argv)
        return subprocess.CompletedProcess(argv, code, out.getvalue(), err.getvalue())

    def refused(self, code: int, *args: str | bytes | Path, process: bool = False) -> str:
        """The one message of a command that must end with this code, print no result and leave nothing
        behind. A process of its own runs it where the words are bytes, or the test asks for one.
        """
        real = process or any(isinstance(arg, bytes) for arg in args)
        with self.nothing_left():
            done = (self.run if real else self.call)(*args)
        assert done.returncode == code, f"exit code {done.returncode}: {done.stderr}"
        assert done.stdout == ""
        assert len(re.findall(r"^hpc-rl", done.stderr, re.MULTILINE)) == 1, done.stderr
        assert "Traceback" not in done.stderr
        assert "internal error" not in done.stderr
        return done.stderr

    def state(self, trial: str) -> str:
        return self.call("status", trial).stdout.split("\n")[0]

    def wait_for(self, trial: str, pattern: str, timeout_s: float = 120) -> None:
        """Until the first line of `hpc-rl status` matches."""
        deadline = time.monotonic() + extend(timeout_s)
        while not look(lambda: re.search(pattern, self.state(trial)), 0.3):
            assert time.monotonic() < deadline, (
                f"{trial} is not {pattern}:\n{self.run('status', trial).stdout}"
            )


NO_TENSORS = (2).to_bytes(8, "little") + b"{}"  # a whole file of weights, without any


def make_checkpoint(folder: Path, context: int = 64) -> None:
    """Make a checkpoint that passes all checks and is never loaded; every text is one token."""
    folder.mkdir(exist_ok=True)
    settings = {"model_type": "qwen3", "max_position_embeddings": context}
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "tokenizer.json").write_text(TOKENIZER)
    (folder / "model.safetensors").write_bytes(NO_TENSORS)


TRAINER_PACKAGES = {"torch": "2.13.0", "transformers": "5.0", "safetensors": "0.8", "tensorboard": "2.0"}


def make_python(path: Path, text: str = "", packages: dict[str, str] = TRAINER_PACKAGES) -> Path:
    """Make a program that names these packages where it is asked for its own, as an interpreter would.

    In place of the supervisor it runs the bash text; other modules run in the interpreter of the tests.
    """
    answer = shlex.quote(json.dumps(packages))
    path.write_text(
        "#!/bin/bash\n"
        f"[[ $1 == -c ]] && echo {answer} && exit\n"
        f'[[ $1 == -m && $2 != hpc_rl.roles.supervisor ]] && exec {shlex.quote(sys.executable)} "$@"\n'
        f"{text}\n"
    )
    path.chmod(0o755)
    return path


def small_trial(root: Path, launcher: str = "{}") -> Shell:
    """Return a shell beside the good configuration `grpo.yaml`; its model is there but never loaded."""
    make_checkpoint(root / "model")
    (root / "train.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    shell = Shell(root)
    (shell.here / "grpo.yaml").write_text(
        f"""experiment_name: sums
trial_name: small
total_train_steps: 10
cluster: {{fileroot: {root / "runs"}, n_gpus_per_node: 0}}
train_dataset: {{path: {root / "train.jsonl"}}}
actor: {{path: {root / "model"}}}
gconfig: {{n_samples: 4, max_new_tokens: 4}}
launcher: {launcher}
"""
    )
    return shell
