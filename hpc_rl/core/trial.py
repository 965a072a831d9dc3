"""Trials and attempts: their ids, and every path of their directories, written once.

Also the two ways in which this project writes a file: `write_atomic` (temp, fsync, rename) and
`create_exclusive` (link: exactly one of two writers wins). Both are safe on NFS as far as shared file systems
go.
"""

from __future__ import annotations

import contextlib
import errno
import getpass
import json
import os
import re
import secrets
import stat
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_rl.core.errors import ConfigError, NotPrivate, TrialStateError
from hpc_rl.core.private_files import read_secret, writable_by_others

ORPHAN_NAME = re.compile(r"\..+\.[0-9a-f]{12}\.tmp")  # of _written_beside
ORPHAN_S = 24 * 3600
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=@-]{0,63}")


def check_name(what: str, name: str) -> str:
    """Return `name` where it is safe as one path component and as part of a job name. Raises ConfigError."""
    if not NAME.fullmatch(name) or ".." in name:
        raise ConfigError(
            f"{what} {name!r} can't be used: it becomes a directory and a job name. "
            "Allowed: 1 to 64 letters, digits and . _ + = @ -, starting with a letter or digit, without '..'."
        )
    return name


def account() -> str:
    """Return the name of this account; its number where it has none, as in many containers."""
    try:
        return check_name("account", getpass.getuser())
    except (KeyError, OSError, ConfigError):
        return str(os.getuid())


def state_home() -> Path:
    """Return the user's state directory: `$XDG_STATE_HOME/hpc-rl`, else below ~/.local/state."""
    state = os.environ.get("XDG_STATE_HOME", "")
    home = Path(state) if os.path.isabs(state) else Path.home() / ".local" / "state"
    return home / "hpc-rl"


_swept: set[Path] = set()  # folders in which this process has looked for orphans


def _remove_orphans(folder: Path, now: float) -> None:
    """Remove temporary files of writers that were killed.

    Writing takes seconds: one that is a day old has no writer, even if a job was suspended. Both times are of
    the file server's clock.
    """
    with contextlib.suppress(OSError), os.scandir(folder) as found:
        old = [one for one in found if ORPHAN_NAME.fullmatch(one.name) and one.is_file(follow_symlinks=False)]
        for entry in old:
            if now - entry.stat(follow_symlinks=False).st_mtime > ORPHAN_S:
                os.unlink(entry)


@contextlib.contextmanager
def _written_beside(path: Path, data: bytes | str, mode: int, durable: bool = True) -> Iterator[Path]:
    """Yield a file with this content in the folder of `path`; it is removed where an exception comes."""
    temp = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.tmp")
    remove_orphans = path.parent not in _swept
    try:
        with open(temp, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        if remove_orphans:
            _swept.add(path.parent)
            _remove_orphans(path.parent, temp.stat().st_mtime)
        yield temp
    except BaseException:
        temp.unlink(missing_ok=True)
        raise


def write_atomic(path: Path, data: bytes | str, mode: int = 0o644, durable: bool = True) -> None:
    """Replace `path` atomically: readers see the old content or the new one. Raises OSError.

    What is not `durable` may be gone after a crash of the file server: for what is soon written again.
    """
    with _written_beside(path, data, mode, durable) as temp:
        os.replace(temp, path)


def create_exclusive(path: Path, data: bytes | str, mode: int = 0o644) -> bool:
    """Create `path` with its content; False where it exists already. Raises OSError."""
    with _written_beside(path, data, mode) as temp:
        try:
            os.link(temp, path)
            created = True
        except FileExistsError:
            # After a lost reply NFS reports that the link exists although this writer made it.
            created = temp.stat().st_nlink == 2
        temp.unlink(missing_ok=True)
    return created


def overwrite(path: Path, data: str) -> None:
    """Overwrite a file in place, padded with blanks: the only way on a full disk.

    Readers may see a mixture for a moment: for small JSON with one writer. Raises OSError.
    """
    fd = os.open(path, os.O_WRONLY)
    try:
        os.pwrite(fd, data.encode().ljust(os.fstat(fd).st_size), 0)
        os.fsync(fd)
    finally:
        os.close(fd)


def fsync_dir(path: Path) -> None:
    """Make the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def read_json(path: Path) -> Any | None:
    """Return parsed content, or None where the file is missing, incomplete, damaged or not a regular file."""
    try:
        # a pipe that has no writer must not block
        with open(
            path, "rb", buffering=0, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)
        ) as file:
            is_regular = stat.S_ISREG(os.fstat(file.fileno()).st_mode)  # a device may never end
            return json.loads(file.read() or b"") if is_regular else None
    except (OSError, ValueError, RecursionError):
        return None


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; {} where read_json finds none."""
    data = read_json(path)
    return data if isinstance(data, dict) else {}


def entries(folder: Path) -> list[os.DirEntry[str]]:
    """Return the entries of a folder of a trial; none where it is missing.

    Raises OSError, TrialStateError where it is not a folder.
    """
    try:
        with os.scandir(folder) as found:
            return list(found)
    except OSError as error:
        if error.errno == errno.ENOENT and not folder.is_symlink():
            return []
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise
        raise TrialStateError(
            f"{folder} must be a folder, or a link to one: {error.strerror}. Put back what was there."
        ) from error


def write_json(path: Path, value: Any, mode: int = 0o644) -> None:
    """Replace `path` atomically by a JSON document. Raises OSError."""
    write_atomic(path, json.dumps(value, indent=2, sort_keys=True) + "\n", mode)


def new_token() -> str:
    """Return a token that may be a part of a URL's path.

    It does not begin with `v1`: clients of atroposlib remove every `/v1` from the URL of a server.
    """
    while (token := secrets.token_urlsafe(32)).startswith("v1"):
        pass
    return token


def _set_mode(path: Path, mode: int) -> None:
    """Set the mode of a directory, whose files still get the group that a setgid bit gives them."""
    path.chmod(path.stat().st_mode & stat.S_ISGID | mode)


class _Path:
    """A path below the directory of a trial or an attempt."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, owner: Any, _: type | None = None) -> Path:
        return owner.dir / self._name


class _PathOf:
    """A path below that directory whose name has the arguments of a call in it."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern

    def __get__(self, owner: Any, _: type | None = None) -> Callable[..., Path]:
        return lambda *values: owner.dir / self._pattern.format(*values)


@dataclass(frozen=True, order=True)
class AttemptId:
    """One start by the scheduler, `<job id>.<restart>`; of a server array `<array>_<task>.<restart>`."""

    job_id: str
    restart: int

    def __str__(self) -> str:
        return f"{self.job_id}.{self.restart}"

    @classmethod
    def parse(cls, text: str) -> AttemptId | None:
        """Return the id in a text, or None where it is not one."""
        job_id, _, restart = text.rpartition(".")
        return cls(job_id, int(restart)) if job_id and restart.isdecimal() else None

    @property
    def is_server_task(self) -> bool:
        return "_" in self.job_id

    @property
    def array_id(self) -> str:
        """Job id of the whole array, where the job is a task of one."""
        return self.job_id.partition("_")[0]


def submission_of(attempt_id: str) -> str:
    """Return the job id of an attempt; a text that is not an attempt id counts as one."""
    known = AttemptId.parse(attempt_id)
    return known.job_id if known else attempt_id


@dataclass(frozen=True)
class Trial:
    """A trial, by its directory `{fileroot}/{user}/{experiment}/{trial}`."""

    dir: Path

    @classmethod
    def of(cls, fileroot: str | Path, user: str, experiment: str, trial: str) -> Trial:
        check_name("experiment_name", experiment)
        check_name("trial_name", trial)
        return cls(Path(fileroot).expanduser().absolute() / user / experiment / trial)

    @property
    def name(self) -> str:
        return self.dir.name

    @property
    def experiment(self) -> str:
        return self.dir.parent.name

    @property
    def job_name(self) -> str:
        return f"hpc-rl.{self.experiment}.{self.name}"

    def __str__(self) -> str:
        return f"{self.experiment}/{self.name}"

    # as submitted
    config_yaml = _Path("config.yaml")
    config_json = _Path("config.json")
    plan_json = _Path("plan.json")
    provenance_json = _Path("provenance.json")
    forked_from = _Path("forked_from.json")
    secret = _Path("secret")
    # secrets among the variables of an option of launcher: `NAME=value`, each with a NUL at its end
    secret_variables = _PathOf("secret.{}")
    scripts = _Path("scripts")
    # there while a submission is being prepared and handed to the scheduler
    submitting = _Path(".submitting")

    # jobs and requests
    jobs = _Path("jobs")
    intent = _Path("intent")
    bad_nodes = _Path("bad_nodes.json")  # see supervise/bad_nodes.py
    names = _Path("names")
    attempts = _Path("attempts")
    # attempts of the tasks of a server array: no lineage, no metrics, only servers
    server_attempts = _Path("server_attempts")

    # state
    lineages = _Path("lineages")
    recover = _Path("recover")
    rollout = _Path("rollout")
    gateway = _Path("rollout/gateway")  # segments of the gateway log
    batches = _Path("rollout/batches")  # seals of the batch log, `<step>.seal`
    # `{"step"}`: batches up to this one are gone from the batch log, or are about to be
    trimmed = _Path("rollout/trimmed.json")
    rollout_port = _Path("rollout/port.json")  # `{"host", "port"}` where environments last found it
    weights = _Path("weights")
    # `{"label", "path", "lineage", "step"}` of the newest published weights
    current_weights = _Path("weights/current.json")
    exports = _Path("exports")
    tensorboard = _Path("tensorboard")  # event files of all attempts, which readers show as one series
    done = _Path("done.json")

    # of a job, by its id
    job = _PathOf("jobs/{}.json")
    job_state = _PathOf("jobs/{}.state")  # what the job script itself reported, one JSON object a line
    job_output = _PathOf("jobs/{}.out")  # standard output and error of the job script
    exclude = _PathOf("jobs/{}.exclude")  # nodes that its next attempt must not get, as the script reads them
    successor = _PathOf("jobs/{}.next-{:04d}")  # the job that continues it as its start of this number
    cancel_intent = _PathOf("intent/cancel-{}.json")  # a request that it stops and is never started again
    # a request that an attempt saves and stops; it outlives a supervisor that is killed
    drain_intent = _PathOf("intent/drain-{}.json")
    save_intent = _Path("intent/save.json")  # a request of `hpc-rl checkpoint now`, removed by that command

    generation = _PathOf("recover/gen-{:08d}")  # by its step
    lineage = _PathOf("lineages/{:04d}.json")  # by its number
    published = _PathOf("weights/{}")  # by its label

    def attempt(self, attempt: str) -> Attempt:
        return Attempt(self, attempt)

    def attempts_of(self, job_id: str) -> list[Attempt]:
        """Return the attempts of a submission, or of one task of a server array, oldest first."""
        folder = self.attempt(f"{job_id}.0").dir.parent
        found = [AttemptId.parse(entry.name) for entry in entries(folder) if Path(entry).is_dir()]
        own = sorted(one for one in found if one is not None and one.job_id == job_id)
        return [self.attempt(str(one)) for one in own]

    def has_state(self) -> bool:
        """Return whether a fresh start would mix with the state of another one."""
        return any(
            p.is_dir() and any(p.iterdir()) for p in (self.recover, self.rollout, self.attempts, self.weights)
        )

    def make_dir(self) -> None:
        """Create the directory; new parents can be read by all. Raises OSError, and as `refuse_others`."""
        self.refuse_others()
        for path in reversed([self.dir, *self.dir.parents]):
            if not path.exists():
                path.mkdir(mode=0o700, exist_ok=True)
                if path != self.dir:
                    _set_mode(path, 0o755)  # whatever the umask
        self.refuse_others()

    def refuse_others(self) -> None:
        """Raise NotPrivate where another account could put its files in the place of the trial's.

        That is the owner of the directory, or of the experiment's and the user's above it, and who may write
        there. The fileroot above these may be shared by a group, and not be open to all. Of a directory that
        `hpc-rl render --output` names, only the one above it counts as the user's.
        """
        num_own = 2 if self.dir.parent.parent.name == account() else 1
        fileroot = self.dir.parents[num_own : num_own + 1]
        for path in (*fileroot, *self.dir.parents[num_own - 1 :: -1], self.dir):
            exposed = writable_by_others(path, only_by_all=path in fileroot)
            if exposed:
                what = f"{path} {exposed.problem}, so another account could change what trial {self} runs"
                remedy = f"{exposed.remedy[0].upper()}{exposed.remedy[1:]}"
                raise NotPrivate(f"{what}. {remedy} as cluster.fileroot, or as --output of hpc-rl render.")

    def make_dirs(self, umask: int = 0o077) -> None:
        """Create the directory with its fixed folders. Raises OSError, TrialStateError."""
        self.make_dir()
        folders = (self.scripts, self.jobs, self.intent, self.names, self.attempts, self.lineages)
        for folder in (*folders, self.recover, self.rollout, self.weights, self.exports):
            folder.mkdir(exist_ok=True)
            _set_mode(folder, 0o700 if folder == self.scripts else 0o777 & ~umask)
        _set_mode(self.dir, 0o755 & ~umask)

    def make_secret(self) -> None:
        """Create the tokens `control` (pause, update, …) and `data` (generate, rollout API). Idempotent.

        Raises OSError, TrialStateError as `tokens`.
        """
        tokens = {"control": new_token(), "data": new_token()}
        create_exclusive(self.secret, json.dumps(tokens), mode=0o600)
        self.tokens()

    def tokens(self) -> dict[str, str]:
        """Return `{"control": …, "data": …}`.

        Raises OSError; TrialStateError where the file is missing or damaged, or others may know them.
        """
        try:
            text = read_secret(self.secret)
        except FileNotFoundError as error:
            remedy = "Stop the trial if it runs, and submit it again: that makes new tokens."
            raise TrialStateError(
                f"{self.secret}, with the tokens of the trial, is missing. {remedy}"
            ) from error
        try:
            return {name: str(json.loads(text)[name]) for name in ("control", "data")}
        except (ValueError, KeyError, TypeError) as error:
            problem = f"{self.secret} is damaged. Remove it and submit the trial again."
            raise TrialStateError(problem) from error

    def variables(self, option: str) -> dict[str, str]:
        """Return the secrets among the variables of an option of launcher; none where it has none.

        Raises as `tokens`.
        """
        path = self.secret_variables(option)
        pairs = read_secret(path).split("\0") if path.exists() else []
        return {name: value for name, equals, value in (pair.partition("=") for pair in pairs) if equals}

    def read_secret_files(self) -> dict[Path, str]:
        """Return the texts of the files with secrets, tokens and variables of launcher. Raises OSError."""
        paths = [path for path in (self.secret, *self.dir.glob(f"{self.secret.name}.*")) if path.exists()]
        return {path: read_secret(path) for path in paths}

    def restore_secret_files(self, texts: Mapping[Path, str]) -> list[Path]:
        """Write those of the files again that are missing; return which they were. Raises OSError."""
        if not self.dir.is_dir():
            return []
        return [
            path
            for path, text in texts.items()
            if not path.exists() and create_exclusive(path, text, mode=0o600)
        ]

    def every_secret(self) -> list[str]:
        """Return the values of its tokens and of all its secret variables. Raises as `tokens`."""
        options = [path.name.partition(".")[2] for path in self.dir.glob("secret.*")]
        variables = (self.variables(option) for option in options)
        return [value for known in (self.tokens(), *variables) for value in known.values()]


@dataclass(frozen=True)
class Attempt:
    trial: Trial
    id: str

    @property
    def job_id(self) -> str:
        return submission_of(self.id)

    @property
    def restart(self) -> int:
        """Number of this start of the job, from 0; -1 where the id has none."""
        known = AttemptId.parse(self.id)
        return known.restart if known else -1

    @property
    def is_server_task(self) -> bool:
        return "_" in self.id

    @property
    def dir(self) -> Path:
        return (self.trial.server_attempts if self.is_server_task else self.trial.attempts) / self.id

    events = _Path("events.jsonl")
    ended = _Path("ended.json")  # missing where the supervisor was killed
    processes = _Path("processes")
    # by role, index, incarnation and rank
    exit_record = _PathOf("exits/{}-{}.{}-rank{}.json")
    stacks = _PathOf("stacks/{}-{}.{}-rank{}.txt")  # of a process that was asked for them, or got stuck
    # `{"doing", "step", "time"}` by role, index, incarnation: what it does, rewritten while that changes
    activity = _PathOf("activity/{}-{}.{}.json")
    metrics = _PathOf("metrics.{}.jsonl")  # of an incarnation of the trainer
    samples = _PathOf("samples.{}.jsonl")  # completions that it keeps readable
    # `{"busy_s"}` of an incarnation of a server, by its index: for how long it had a request
    server_use = _PathOf("use/server-{}.{}.json")
    # what an incarnation of the rollout role reports every few seconds, for `hpc-rl status`
    rollout_report = _PathOf("rollout.{}.json")

    def log(self, role: str, index: int, incarnation: int, rank: int | None = None) -> Path:
        suffix = "" if rank is None else f"-rank{rank}"
        return self.dir / "logs" / f"{role}-{index}.{incarnation}{suffix}.log"

    def process_record(
        self, role: str, index: int, incarnation: int, rank: int, by_client: bool = False
    ) -> Path:
        prefix = "client-" if by_client else ""
        return self.processes / f"{prefix}{role}-{index}.{incarnation}-rank{rank}.json"

    def make_dirs(self) -> None:
        """Create the directory with its fixed folders. Raises OSError."""
        for folder in ("logs", "exits", "stacks", "activity", "processes"):
            (self.dir / folder).mkdir(parents=True, exist_ok=True)
