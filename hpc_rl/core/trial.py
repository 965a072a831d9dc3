"""Trials and attempts: their ids, and every path of their directories, written once.

Also the two ways to write a file: `write_atomic` (temp, fsync, rename) and `create_exclusive` (link: exactly
one of two writers wins). Both are as safe on NFS as a shared file system allows.
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
from hpc_rl.core.private_files import find_exposure, load_secret
from hpc_rl.core.refusal import Kind, Refusal

ORPHAN_NAME = re.compile(r"\..+\.[0-9a-f]{12}\.tmp")  # of _write_beside
ORPHAN_S = 24 * 3600
SCORES = "scores.json"  # of the results of a trial without a trainer, written last
EXPORT_RECORD_NAME = "hpc_rl.json"  # in every export: step, version, trial
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=@-]{0,63}")


def check_name(what: str, name: str) -> str:
    """Return `name` if it is safe as a path component and as part of a job name. Raises ConfigError."""
    if not NAME.fullmatch(name) or ".." in name:
        allowed = "1 to 64 letters, digits and . _ + = @ -, starting with a letter or digit, without '..'"
        raise ConfigError(
            Refusal(
                option=what,
                value=repr(name),
                kind=Kind.VALUE,
                why=f"can't be used: it becomes a directory and a job name. Allowed: {allowed}",
            )
        )
    return name


def find_account_name() -> str:
    """Return the name of this account; its number if it has no name, as in many containers."""
    try:
        return check_name("account", getpass.getuser())
    except (KeyError, OSError, ConfigError):
        return str(os.getuid())


def find_state_home() -> Path:
    """Return the user's state directory: `$XDG_STATE_HOME/hpc-rl`, else below ~/.local/state."""
    state = os.environ.get("XDG_STATE_HOME", "")
    home = Path(state) if os.path.isabs(state) else Path.home() / ".local" / "state"
    return home / "hpc-rl"


_swept: set[Path] = set()  # folders that this process has searched for orphans


def _remove_orphans(folder: Path, now: float) -> None:
    """Remove temporary files of killed writers.

    Writing takes seconds: a file that is a day old has no writer, even if a job was suspended.
    Both times are of the file server's clock.
    """
    with contextlib.suppress(OSError), os.scandir(folder) as found:
        old = [one for one in found if ORPHAN_NAME.fullmatch(one.name) and one.is_file(follow_symlinks=False)]
        for entry in old:
            if now - entry.stat(follow_symlinks=False).st_mtime > ORPHAN_S:
                os.unlink(entry)


@contextlib.contextmanager
def _write_beside(path: Path, data: bytes | str, mode: int, durable: bool = True) -> Iterator[Path]:
    """Yield a new file with this content in the folder of `path`; an exception removes the file."""
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

    A file that is not `durable` may be lost in a crash of the file server: for data that is soon rewritten.
    """
    with _write_beside(path, data, mode, durable) as temp:
        os.replace(temp, path)


def create_exclusive(path: Path, data: bytes | str, mode: int = 0o644) -> bool:
    """Create `path` with its content; return False if it already exists. Raises OSError."""
    with _write_beside(path, data, mode) as temp:
        try:
            os.link(temp, path)
            created = True
        except FileExistsError:
            # After a lost reply, NFS reports that the link exists although this writer created it.
            created = temp.stat().st_nlink == 2
        temp.unlink(missing_ok=True)
    return created


def overwrite(path: Path, data: str) -> None:
    """Overwrite a file in place, padded with blanks: the only way to write on a full disk.

    Readers may see a mixture for a moment: use it for small JSON with one writer. Raises OSError.
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


def load_json(path: Path) -> Any | None:
    """Return parsed content, or None if the file is missing, incomplete, damaged or not a regular file."""
    try:
        # a pipe without a writer must not block
        with open(
            path, "rb", buffering=0, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)
        ) as file:
            is_regular = stat.S_ISREG(os.fstat(file.fileno()).st_mode)  # a device may never end
            return json.loads(file.read() or b"") if is_regular else None
    except (OSError, ValueError, RecursionError):
        return None


def load_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; {} if `load_json` finds none."""
    data = load_json(path)
    return data if isinstance(data, dict) else {}


def list_entries(folder: Path) -> list[os.DirEntry[str]]:
    """Return the entries of a folder of a trial; an empty list for a missing folder.

    Raises OSError; TrialStateError if it is not a folder.
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
            f"{folder} must be a folder, or a link to one: {error.strerror}. Restore the folder."
        ) from error


def write_json(path: Path, value: Any, mode: int = 0o644) -> None:
    """Replace `path` atomically with a JSON document. Raises OSError."""
    write_atomic(path, json.dumps(value, indent=2, sort_keys=True) + "\n", mode)


def make_token() -> str:
    """Return a new token that is safe in a URL's path.

    It does not begin with `v1`: clients of atroposlib remove every `/v1` from the URL of a server.
    """
    while (token := secrets.token_urlsafe(32)).startswith("v1"):
        pass
    return token


def _change_mode(path: Path, mode: int) -> None:
    """Set the mode of a directory; keep its setgid bit, which gives files their group."""
    path.chmod(path.stat().st_mode & stat.S_ISGID | mode)


class _Path:
    """A path below the directory of a trial or an attempt."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, owner: Any, _: type | None = None) -> Path:
        return owner.dir / self._name


class _PathOf:
    """A path below that directory; the arguments of a call become parts of its name."""

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
        """Parse an attempt id; return None for other texts."""
        job_id, _, restart = text.rpartition(".")
        return cls(job_id, int(restart)) if job_id and restart.isdecimal() else None

    @property
    def is_server_task(self) -> bool:
        return "_" in self.job_id

    @property
    def array_id(self) -> str:
        """Job id of the whole array, if the job is a task of an array."""
        return self.job_id.partition("_")[0]


def parse_submission(attempt_id: str) -> str:
    """Return the job id of an attempt id; any other text counts as a job id."""
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
    # secrets among the variables of an option of launcher: `NAME=value`, each terminated by NUL
    secret_variables = _PathOf("secret.{}")
    scripts = _Path("scripts")
    # exists while a submission is prepared and handed to the scheduler
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
    evaluations = _Path("recover/evaluations.json")  # version -> metrics, of evaluations beside training
    rollout = _Path("rollout")
    gateway = _Path("rollout/gateway")  # segments of the gateway log
    batches = _Path("rollout/batches")  # seals of the batch log, `<step>.seal`
    # `{"step"}`: the batch log drops batches up to this one
    trimmed = _Path("rollout/trimmed.json")
    rollout_port = _Path("rollout/port.json")  # `{"host", "port"}`: last address of the rollout API
    weights = _Path("weights")
    # `{"label", "path", "lineage", "step"}` of the newest published weights
    current_weights = _Path("weights/current.json")
    # `{"label", "path", "servers"}`: a version for an evaluation, and the keys of the servers that stay at it
    held_weights = _Path("weights/held.json")
    # `{"num_versions", "bytes", "steps"}` of the versions that weights.history_gb keeps
    weights_history = _Path("weights/history.json")
    exports = _Path("exports")
    results = _Path("exports/results")  # of a trial without a trainer
    tensorboard = _Path("tensorboard")  # event files of all attempts, shown as one series
    done = _Path("done.json")

    # of a job, by its id
    job = _PathOf("jobs/{}.json")
    job_state = _PathOf("jobs/{}.state")  # events of the job script, one JSON object a line
    job_output = _PathOf("jobs/{}.out")  # standard output and error of the job script
    exclude = _PathOf("jobs/{}.exclude")  # nodes that its next attempt must exclude, for the script
    successor = _PathOf("jobs/{}.next-{:04d}")  # the job that continues it as the start with this number
    cancel_intent = _PathOf("intent/cancel-{}.json")  # a request to stop it for good
    # a request to save and stop an attempt; it outlives a killed supervisor
    drain_intent = _PathOf("intent/drain-{}.json")
    save_intent = _Path("intent/save.json")  # a request of `hpc-rl checkpoint now`, removed by that command

    generation = _PathOf("recover/gen-{:08d}")  # by its step
    lineage = _PathOf("lineages/{:04d}.json")  # by its number
    published = _PathOf("weights/{}")  # by its label

    def attempt(self, attempt: str) -> Attempt:
        return Attempt(self, attempt)

    def list_attempts(self, job_id: str) -> list[Attempt]:
        """Return the attempts of a submission, or of one task of a server array, oldest first."""
        folder = self.attempt(f"{job_id}.0").dir.parent
        found = [AttemptId.parse(entry.name) for entry in list_entries(folder) if Path(entry).is_dir()]
        own = sorted(one for one in found if one is not None and one.job_id == job_id)
        return [self.attempt(str(one)) for one in own]

    def has_state(self) -> bool:
        """Return whether the trial has state that a fresh start would mix with."""
        return any(
            p.is_dir() and any(p.iterdir()) for p in (self.recover, self.rollout, self.attempts, self.weights)
        )

    def make_dir(self) -> None:
        """Create the directory; all accounts can read new parents. Raises OSError, and as `refuse_others`."""
        self.refuse_others()
        for path in reversed([self.dir, *self.dir.parents]):
            if not path.exists():
                path.mkdir(mode=0o700, exist_ok=True)
                if path != self.dir:
                    _change_mode(path, 0o755)  # whatever the umask
        self.refuse_others()

    def refuse_others(self) -> None:
        """Raise NotPrivate if another account could replace the trial's files.

        Checks owner and mode of the trial directory, and of the experiment's and the user's directories above
        it. The fileroot above these may be shared by a group, but not be open to all. For a directory of
        `hpc-rl render --output`, only its parent counts as the user's.
        """
        num_own = 2 if self.dir.parent.parent.name == find_account_name() else 1
        fileroot = self.dir.parents[num_own : num_own + 1]
        for path in (*fileroot, *self.dir.parents[num_own - 1 :: -1], self.dir):
            exposed = find_exposure(path, only_by_all=path in fileroot)
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
            _change_mode(folder, 0o700 if folder == self.scripts else 0o777 & ~umask)
        _change_mode(self.dir, 0o755 & ~umask)

    def make_secret(self) -> None:
        """Create the tokens `control` (pause, update, …) and `data` (generate, rollout API). Idempotent.

        Raises OSError, TrialStateError as `load_tokens`.
        """
        tokens = {"control": make_token(), "data": make_token()}
        create_exclusive(self.secret, json.dumps(tokens), mode=0o600)
        self.load_tokens()

    def load_tokens(self) -> dict[str, str]:
        """Return `{"control": …, "data": …}`.

        Raises OSError; TrialStateError if the file is missing, damaged, or readable by others.
        """
        try:
            text = load_secret(self.secret)
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

    def load_variables(self, option: str) -> dict[str, str]:
        """Return the secrets among the variables of an option of launcher.

        Raises as `load_tokens`.
        """
        path = self.secret_variables(option)
        pairs = load_secret(path).split("\0") if path.exists() else []
        return {name: value for name, equals, value in (pair.partition("=") for pair in pairs) if equals}

    def load_secret_files(self) -> dict[Path, str]:
        """Return the texts of the secret files: tokens and variables of launcher. Raises OSError."""
        paths = [path for path in (self.secret, *self.dir.glob(f"{self.secret.name}.*")) if path.exists()]
        return {path: load_secret(path) for path in paths}

    def restore_secret_files(self, texts: Mapping[Path, str]) -> list[Path]:
        """Write missing files again; return their paths. Raises OSError."""
        if not self.dir.is_dir():
            return []
        return [
            path
            for path, text in texts.items()
            if not path.exists() and create_exclusive(path, text, mode=0o600)
        ]

    def load_every_secret(self) -> list[str]:
        """Return the values of its tokens and of all its secret variables. Raises as `load_tokens`."""
        options = [path.name.partition(".")[2] for path in self.dir.glob("secret.*")]
        variables = (self.load_variables(option) for option in options)
        return [value for known in (self.load_tokens(), *variables) for value in known.values()]


@dataclass(frozen=True)
class Attempt:
    trial: Trial
    id: str

    @property
    def job_id(self) -> str:
        return parse_submission(self.id)

    @property
    def restart(self) -> int:
        """Number of this start of the job, from 0; -1 if the id has no number."""
        known = AttemptId.parse(self.id)
        return known.restart if known else -1

    @property
    def is_server_task(self) -> bool:
        return "_" in self.id

    @property
    def dir(self) -> Path:
        return (self.trial.server_attempts if self.is_server_task else self.trial.attempts) / self.id

    events = _Path("events.jsonl")
    ended = _Path("ended.json")  # missing if the supervisor was killed
    processes = _Path("processes")
    # by role, index, incarnation and rank
    exit_record = _PathOf("exits/{}-{}.{}-rank{}.json")
    stacks = _PathOf("stacks/{}-{}.{}-rank{}.txt")  # of a process that was asked for its stacks, or got stuck
    # `{"doing", "step", "time"}` by role, index, incarnation: its current activity
    activity = _PathOf("activity/{}-{}.{}.json")
    metrics = _PathOf("metrics.{}.jsonl")  # of an incarnation of the trainer
    samples = _PathOf("samples.{}.jsonl")  # readable completions
    # `{"busy_s", "request_s", "requests", "decode"}` of a server by its index and incarnation: the time with
    # at least one request, the sum of the durations of requests, their number, and servers/decode_speed.py
    server_use = _PathOf("use/server-{}.{}.json")
    # report of an incarnation of the rollout role, every few seconds, for `hpc-rl status`
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
