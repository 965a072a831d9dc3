"""Trial: which experiment, which trial, which attempt, and every path of its directory, written once.

Also the two ways in which this project writes a file: `write_atomic` (temp, fsync, rename) and `create_exclusive`
(link: of two writers exactly one wins). Both are safe on NFS as far as shared file systems go.
"""

from __future__ import annotations

import errno
import getpass
import json
import os
import re
import secrets
import stat
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_rl.errors import ConfigError, TrialStateError

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=@-]{0,63}")


def check_name(what: str, name: str) -> str:
    """A name that is safe as one path component and as part of a job name. Raises ConfigError."""
    if not NAME.fullmatch(name) or ".." in name:
        raise ConfigError(
            f"{what} {name!r} can't be used: it becomes a directory and a job name. "
            "Allowed: 1 to 64 letters, digits and . _ + = @ -, starting with a letter or digit, without '..'."
        )
    return name


def account() -> str:
    """The name of this account as a directory's; its number where it has none, as in many containers."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())
    return name if NAME.fullmatch(name) and ".." not in name else str(os.getuid())


def state_home() -> Path:
    """The user's own directory for what is remembered between commands: `$XDG_STATE_HOME/hpc-rl`, else below ~/.local/state."""
    state = os.environ.get("XDG_STATE_HOME", "")
    home = Path(state) if os.path.isabs(state) else Path.home() / ".local" / "state"
    return home / "hpc-rl"


def write_atomic(path: Path, data: bytes | str, mode: int = 0o644) -> None:
    """Replace `path` as a whole: readers see the old content or the new one. Raises OSError."""
    raw = data.encode() if isinstance(data, str) else data
    temp = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.tmp")
    try:
        _write_synced(temp, raw, mode)
        os.replace(temp, path)
    finally:
        temp.unlink(missing_ok=True)


def create_exclusive(path: Path, data: bytes | str, mode: int = 0o644) -> bool:
    """Create `path` with its content, whole, or find that it exists: true for the one winner. Raises OSError."""
    raw = data.encode() if isinstance(data, str) else data
    temp = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.tmp")
    try:
        _write_synced(temp, raw, mode)
        os.link(temp, path)
        return True
    except FileExistsError:
        return temp.stat().st_nlink == 2  # a lost reply of NFS says "exists" although this writer won
    finally:
        temp.unlink(missing_ok=True)


def overwrite(path: Path, data: str) -> None:
    """New content where the old lies, filled up with blanks: on a full disk the only way. Readers may see a mixture for a moment.

    For small JSON with one writer. Raises OSError.
    """
    fd = os.open(path, os.O_WRONLY)
    try:
        os.pwrite(fd, data.encode().ljust(os.fstat(fd).st_size), 0)
        os.fsync(fd)
    finally:
        os.close(fd)


def _write_synced(path: Path, raw: bytes, mode: int) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        view = memoryview(raw)
        while view:
            view = view[os.write(fd, view) :]
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
    """Return parsed content, or None where the file is missing, stale, damaged, not complete yet or not a regular file."""
    try:
        with open(path, "rb", buffering=0, opener=_without_waiting) as file:
            is_regular = stat.S_ISREG(os.fstat(file.fileno()).st_mode)  # a device may never end
            return json.loads(file.read() or b"") if is_regular else None
    except (OSError, ValueError, RecursionError):
        return None


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # a pipe that has no writer must not block


def entries(folder: Path) -> list[os.DirEntry[str]]:
    """What lies in a folder of a trial; nothing where none is there. Raises OSError, TrialStateError where it is no folder."""
    try:
        with os.scandir(folder) as found:
            return list(found)
    except FileNotFoundError as error:
        if not folder.is_symlink():
            return []
        problem: OSError = error
    except OSError as error:
        if error.errno not in (errno.ENOTDIR, errno.ELOOP):
            raise
        problem = error
    raise TrialStateError(
        f"{folder} must be a folder, or a link to one: {problem.strerror}. Put back what was there."
    )


def write_json(path: Path, value: Any, mode: int = 0o644) -> None:
    write_atomic(path, json.dumps(value, indent=2, sort_keys=True) + "\n", mode)


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
    """A trial by its directory `{fileroot}/{user}/{experiment}/{trial}`."""

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

    def __str__(self) -> str:
        return f"{self.experiment}/{self.name}"

    # as submitted
    @property
    def config_yaml(self) -> Path:
        return self.dir / "config.yaml"

    @property
    def config_json(self) -> Path:
        return self.dir / "config.json"

    @property
    def plan_json(self) -> Path:
        return self.dir / "plan.json"

    @property
    def provenance_json(self) -> Path:
        return self.dir / "provenance.json"

    @property
    def secret(self) -> Path:
        return self.dir / "secret"

    @property
    def scripts(self) -> Path:
        return self.dir / "scripts"

    @property
    def jobs(self) -> Path:
        return self.dir / "jobs"

    def job(self, job_id: str) -> Path:
        return self.jobs / f"{job_id}.json"

    def job_state(self, job_id: str) -> Path:
        """What the job script itself reported, one JSON object a line."""
        return self.jobs / f"{job_id}.state"

    def successor(self, job_id: str, restart: int) -> Path:
        """`{"job_id", "after", "time"}` of the job that goes on with this submission as its start number `restart`."""
        return self.jobs / f"{job_id}.next-{restart:04d}"

    @property
    def intent(self) -> Path:
        return self.dir / "intent"

    def cancel_intent(self, job_id: str) -> Path:
        """A person's wish that this job, and no later one, stays dead."""
        return self.intent / f"cancel-{job_id}.json"

    def drain_intent(self, attempt: str) -> Path:
        """`{"reason", "time"}`: a wish that this attempt saves and ends; it outlives a supervisor that is killed."""
        return self.intent / f"drain-{attempt}.json"

    @property
    def bad_nodes(self) -> Path:
        """Nodes that failed and are avoided for a while; see supervise/bad_nodes.py."""
        return self.dir / "bad_nodes.json"

    def exclude(self, job_id: str) -> Path:
        """Nodes that the next attempt of a job is not to get, as Slurm's list; read by the batch script."""
        return self.jobs / f"{job_id}.exclude"

    @property
    def names(self) -> Path:
        return self.dir / "names"

    @property
    def attempts(self) -> Path:
        return self.dir / "attempts"

    @property
    def server_attempts(self) -> Path:
        """Attempts of the tasks of a server array, `<array job>_<task>.<restart>`: no lineage, no metrics, only servers."""
        return self.dir / "server_attempts"

    def attempt(self, attempt: str) -> Attempt:
        return Attempt(self, attempt)

    # state
    @property
    def lineages(self) -> Path:
        return self.dir / "lineages"

    @property
    def recover(self) -> Path:
        return self.dir / "recover"

    def generation(self, step: int) -> Path:
        return self.recover / f"gen-{step:08d}"

    @property
    def rollout(self) -> Path:
        return self.dir / "rollout"

    @property
    def batches(self) -> Path:
        """Seals of the batch log, `<step>.seal`."""
        return self.rollout / "batches"

    @property
    def trimmed(self) -> Path:
        """`{"step"}`: batches up to this one are gone from the batch log, or are about to be."""
        return self.rollout / "trimmed.json"

    @property
    def weights(self) -> Path:
        return self.dir / "weights"

    def published(self, label: str) -> Path:
        return self.weights / label

    @property
    def current_weights(self) -> Path:
        """Pointer record `{"label", "path", "lineage", "step"}` of the newest published weights."""
        return self.weights / "current.json"

    @property
    def exports(self) -> Path:
        return self.dir / "exports"

    @property
    def done(self) -> Path:
        """The run-complete marker, written by the supervisor when the trial has reached its end."""
        return self.dir / "done.json"

    @property
    def submitting(self) -> Path:
        """There while a submission is being prepared and handed in."""
        return self.dir / ".submitting"

    def has_state(self) -> bool:
        """Whether a fresh start would mix with something that lies here."""
        return any(
            p.is_dir() and any(p.iterdir()) for p in (self.recover, self.rollout, self.attempts, self.weights)
        )

    def make_dirs(self) -> None:
        """Create the directory (0700) with its fixed folders. Raises OSError."""
        self.dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.dir.chmod(0o700)
        folders = (self.scripts, self.jobs, self.intent, self.names, self.attempts, self.lineages)
        for folder in (*folders, self.recover, self.rollout, self.weights, self.exports):
            folder.mkdir(exist_ok=True)

    def make_secret(self) -> None:
        """The two tokens of the trial, once: control (pause, update, shutdown) and data (generate, rollout API)."""
        tokens = {"control": secrets.token_urlsafe(32), "data": secrets.token_urlsafe(32)}
        create_exclusive(self.secret, json.dumps(tokens), mode=0o600)

    def tokens(self) -> dict[str, str]:
        """`{"control": …, "data": …}`. Raises OSError, ValueError."""
        return json.loads(self.secret.read_text())


@dataclass(frozen=True)
class Attempt:
    """One start by the scheduler: `<jobid>.<restart>`."""

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
        known = AttemptId.parse(self.id)
        return known is not None and known.is_server_task

    @property
    def dir(self) -> Path:
        return (self.trial.server_attempts if "_" in self.id else self.trial.attempts) / self.id

    @property
    def events(self) -> Path:
        return self.dir / "events.jsonl"

    @property
    def ended(self) -> Path:
        """`{"exit_code", "reason", "time"}`: why the attempt ended; missing when it was killed."""
        return self.dir / "ended.json"

    @property
    def processes(self) -> Path:
        """Folder of process records, one file per incarnation, for whoever waits for their ends."""
        return self.dir / "processes"

    def log(self, role: str, index: int, incarnation: int, rank: int | None = None) -> Path:
        suffix = "" if rank is None else f"-rank{rank}"
        return self.dir / "logs" / f"{role}-{index}.{incarnation}{suffix}.log"

    def exit_record(self, role: str, index: int, incarnation: int, rank: int = 0) -> Path:
        """`{"code", "reason", "class"}` by the process itself; srun's own code is only a fallback."""
        return self.dir / "exits" / f"{role}-{index}.{incarnation}-rank{rank}.json"

    def stacks(self, role: str, index: int, incarnation: int, rank: int = 0) -> Path:
        """Where a process was when it was asked, or when nothing moved; there only while it lives, or where it was asked."""
        return self.dir / "stacks" / f"{role}-{index}.{incarnation}-rank{rank}.txt"

    def activity(self, role: str, index: int, incarnation: int) -> Path:
        """`{"doing", "step", "time"}`: what a role does, rewritten while that changes."""
        return self.dir / "activity" / f"{role}-{index}.{incarnation}.json"

    def metrics(self, incarnation: int) -> Path:
        return self.dir / f"metrics.{incarnation}.jsonl"

    def rollout_report(self, incarnation: int) -> Path:
        """What the rollout role says of itself every few seconds, for `hpc-rl status`."""
        return self.dir / f"rollout.{incarnation}.json"

    @property
    def tensorboard(self) -> Path:
        return self.dir / "tensorboard"

    def make_dirs(self) -> None:
        for folder in (
            self.dir,
            *(self.dir / name for name in ("logs", "exits", "stacks", "activity")),
            self.processes,
        ):
            folder.mkdir(parents=True, exist_ok=True)
