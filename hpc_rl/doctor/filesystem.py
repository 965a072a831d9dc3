"""Checks of the directory of the trials, in a separate process: a mount that hangs costs a time limit.

`python -m hpc_rl.doctor.filesystem DIR [--on_slurm]` prints the findings as JSON. What several nodes must
see of each other is checked by node.py.
"""

import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from hpc_rl.core.files import is_shared, mount_of
from hpc_rl.doctor.finding import Finding, Verdict, fail, judge, make_finding, ok, parse_finding, warn

TIMEOUT_S = 60.0
GB = 10**9
MIN_INODES = 10_000
SLOW_SYNC_S = 1.0
MAX_CLOCK_SKEW_S = 5.0
# Types of mounts that are local to a node.
VOLATILE = ("tmpfs", "ramfs", "overlay", "squashfs", "devtmpfs")
BAD_OPTIONS = ("nolock", "localflock", "local_lock=all", "local_lock=flock", "nocto")
LOCAL_CACHES = (
    "hpc-rl takes no locks there, but libraries may: keep HF_HOME, TRITON_CACHE_DIR on a local disk."
)
NOT_FOR_TRIALS = "this file system can't hold trials: choose another one as cluster.fileroot."


@dataclass(frozen=True)
class DirectoryProbe:
    """A directory, its nearest parent that exists, and a temporary folder there to try things in."""

    path: Path
    base: Path
    folder: Path
    on_slurm: bool


def check_directory(path: Path, on_slurm: bool, timeout_s: float = TIMEOUT_S) -> list[Finding]:
    """Return the findings about a directory, from a child process."""
    argv = [sys.executable, "-m", "hpc_rl.doctor.filesystem", str(path), *["--on_slurm"] * on_slurm]
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s
        )
        return [parse_finding(row) for row in json.loads(done.stdout)]
    except subprocess.TimeoutExpired:
        return [make_unusable(f"{path} gave no answer within {timeout_s:g} s")]
    except (OSError, ValueError, TypeError, KeyError) as error:
        return [make_unusable(f"the probe of {path} failed: {error}")]


def probe_directory(path: Path, on_slurm: bool) -> list[Finding]:
    """Run all checks in a temporary folder below the directory, or below its nearest parent that exists."""
    base = next(parent for parent in (path, *path.parents) if parent.exists())
    kind, options = mount_of(base)
    findings = [
        Finding("shared", *check_shared(path, kind, on_slurm)),
        Finding("mount options", *check_mount_options(options)),
    ]
    try:
        folder = Path(tempfile.mkdtemp(prefix=".hpc-rl-doctor-", dir=base))
    except OSError as error:
        return [make_unusable(f"{base} can't be written: {error.strerror or error}"), *findings]
    here = DirectoryProbe(path, base, folder, on_slurm)
    writable = Finding("fileroot", *ok(str(path) + ("" if path.is_dir() else " (made at the first submit)")))
    try:
        return [writable, *findings, *(make_finding(check, here) for check in DIRECTORY_CHECKS)]
    except OSError as error:
        return [make_unusable(f"{error.strerror or error} ({error.filename or folder})"), *findings]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def make_unusable(found: str) -> Finding:
    fix = "name a directory that can be written as cluster.fileroot, or ask the administrators."
    return Finding("fileroot", *fail(found, fix))


def check_shared(path: Path, kind: str, on_slurm: bool) -> Verdict:
    found = f"{path} is {kind or 'of unknown type'}"
    if kind in VOLATILE and on_slurm:
        fix = "name a directory on the cluster's shared file system as cluster.fileroot."
        return fail(f"{found}: each node has its own", fix)
    fix = "`hpc-rl doctor --allocation` shows whether every node sees it."
    return judge(found, fix, warn=on_slurm and not is_shared(kind))


def check_mount_options(options: list[str]) -> Verdict:
    bad = [option for option in options if option in BAD_OPTIONS]
    if bad:
        return warn(
            f"{', '.join(bad)}: locks do not work across nodes, or opened files may be stale", LOCAL_CACHES
        )
    return ok("no option that breaks locks or opens")


def check_rename(here: DirectoryProbe) -> Verdict:
    target = _write(here.folder / "target", b"old")
    os.replace(_write(here.folder / "source", b"new"), target)
    if target.read_bytes() != b"new" or (here.folder / "source").exists():
        return fail("rename does not replace a file as a whole", NOT_FOR_TRIALS)
    return ok("replaces a file as a whole")


def check_link(here: DirectoryProbe) -> Verdict:
    taken, other = _write(here.folder / "linked"), _write(here.folder / "other")
    if not _is_refused(lambda: os.link(other, taken)):
        return fail("link does not refuse a name that is taken: two writers could both win", NOT_FOR_TRIALS)
    return ok("refuses a taken name")


def check_exclusive_create(here: DirectoryProbe) -> Verdict:
    taken = _write(here.folder / "taken")
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY
    if not (_is_refused(lambda: os.close(os.open(taken, flags))) and _is_refused(lambda: os.mkdir(taken))):
        return fail("O_EXCL or mkdir accepts a name that exists: two writers could both win", NOT_FOR_TRIALS)
    return ok("O_EXCL and mkdir refuse a taken name")


def check_locks(here: DirectoryProbe) -> Verdict:
    path = _write(here.folder / "lock")
    with path.open("r+b") as one, path.open("r+b") as two:
        if not try_lock(one.fileno()) or try_lock(two.fileno()):
            return warn("flock does not exclude other processes, even on this machine", LOCAL_CACHES)
    return ok("flock works on this machine")


def try_lock(descriptor: int) -> bool:
    """Lock a file; return False if another process has the lock, or locks do not work."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def check_sync_time(here: DirectoryProbe) -> Verdict:
    start = time.monotonic()
    _write(here.folder / "synced")
    took_s = time.monotonic() - start
    if took_s > SLOW_SYNC_S:
        fix = "state and batches are synced at every step: expect waits, or choose a faster file system."
        return warn(f"a small synced write takes {took_s:.1f} s", fix)
    return ok(f"a small synced write takes {took_s * 1000:.0f} ms")


def check_space(here: DirectoryProbe) -> Verdict:
    usage = os.statvfs(here.base)
    free = usage.f_bavail * usage.f_frsize
    found = f"{free / GB:.1f} GB free in {here.path}"
    if free < GB:
        return fail(found, "remove old trials (`hpc-rl list`), or choose another cluster.fileroot.")
    fix = "a trial keeps several copies of model and optimizer; recover.keep bounds them."
    return judge(found, fix, warn=free < 20 * GB and here.on_slurm)


def check_inodes(here: DirectoryProbe) -> Verdict:
    usage = os.statvfs(here.base)
    if not usage.f_files:
        return ok("not counted")
    fix = "remove old trials; a trial makes some thousand files."
    return judge(f"{usage.f_favail} free in {here.path}", fix, fail=usage.f_favail < MIN_INODES)


def check_file_server_clock(here: DirectoryProbe) -> Verdict:
    skew_s = _write(here.folder / "clock").stat().st_mtime - time.time()
    fix = "hpc-rl compares no clocks, but make and caches do: set both by NTP."
    return judge(f"{skew_s:+.1f} s against this machine's", fix, warn=abs(skew_s) > MAX_CLOCK_SKEW_S)


DIRECTORY_CHECKS = (
    check_rename, check_link, check_exclusive_create, check_locks, check_sync_time, check_space,
    check_inodes, check_file_server_clock,
)  # fmt: skip


def _write(path: Path, content: bytes = b"x") -> Path:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return path


def _is_refused(act: Callable[[], object]) -> bool:
    try:
        act()
    except FileExistsError:
        return True
    return False


if __name__ == "__main__":
    found = probe_directory(Path(sys.argv[1]), on_slurm="--on_slurm" in sys.argv[2:])
    print(json.dumps([asdict(finding) for finding in found]))
