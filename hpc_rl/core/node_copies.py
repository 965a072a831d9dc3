"""Copies of files on a node's local disk: copied once, verified, and shared by all processes of a job there.

The first process that needs a folder copies it under a lock on that disk; the others wait and read the copy.
A copy gets its name once it is complete, and the lock ends with its process, so a partial copy is never read.
A copy is identified by the path, by the names, sizes and times of the files, and by this boot of the node:
changed files are copied again. If the disk is full or anything fails, the original is read, with a warning.
"""

import errno
import fcntl
import hashlib
import logging
import os
import shutil
import socket
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_rl.core.errors import ConfigError
from hpc_rl.core.files import format_size, is_shared, mount_of
from hpc_rl.core.refusal import Kind, Refusal

if TYPE_CHECKING:
    from filelock import FileLock

logger = logging.getLogger(__name__)
SPARE_BYTES = 256 << 20  # stay free for others
BLOCK_BYTES = 8 << 20
NUM_FILES = 4  # copied concurrently
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
# other formats of the weights, not read if there are *.safetensors
_UNREAD = (".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
_Files = dict[str, tuple[int, int]]  # name -> size, time


@dataclass(frozen=True)
class NodeCopies:
    """The copies below a folder of this node's local disk; without a folder, the originals are read."""

    folder: Path | None = None

    def find_path(self, source: str) -> str:
        """Return the copy of a file or directory, or `source`. The copy stays until the job ends."""
        with self.open_copy(source) as path:
            return path

    @contextmanager
    def open_copy(self, source: str) -> Iterator[str]:
        """Yield the path of the copy, or `source`; the copy is not removed meanwhile."""
        path, held = source, None
        if self.folder is not None:
            try:
                path, held = _open_copy(Path(source), self.folder / "others")
            except OSError as error:
                form = "%s can't be copied to this node's disk, so the original is read: %s"
                logger.warning(form, source, error)
        try:
            yield path
        finally:
            if held is not None:
                os.close(held)

    def make_once(self, key: str, suffix: str, make: Callable[[Path], None]) -> Path:
        """Return a file that `make` wrote on this node, in any process. Raises the errors of `make`."""
        assert self.folder is not None, "no folder for copies"
        folder = self.folder / "made"
        folder.mkdir(parents=True, exist_ok=True)
        final = folder / f"{_hash_source(key)}{suffix}"
        with _lock(folder / f".{final.name}.lock"):
            if not final.exists():
                partial = folder / f".partial-{final.name}"
                make(partial)
                partial.rename(final)
        return final


def find_local_dir(local_dir: str, environ: Mapping[str, str]) -> Path:
    """Return the directory of `cluster.local_dir` on this node. Raises ConfigError."""
    refuse = partial(Refusal, option="cluster.local_dir", kind=Kind.MACHINE)
    first, _, rest = local_dir.partition("/")
    if first.startswith("$"):
        first = environ.get(first.strip("${}"), "")
        if not first:
            raise ConfigError(
                refuse(value=local_dir, why=f": the variable is not set on node {socket.gethostname()}")
            )
    place = Path(first, rest) if first else Path(local_dir)
    kind, _ = mount_of(place)
    if is_shared(kind):
        why, use = f"is on {kind}, which nodes share", "name a directory on a local disk of the node"
        raise ConfigError(refuse(value=place, why=why, use=use))
    return place


def choose_place(num_bytes: int) -> Path:
    """Return a directory of this node with room for a copy of a model: in memory, or for temporary files.

    Raises ConfigError if none has room.
    """
    places = [Path("/dev/shm"), Path(tempfile.gettempdir())]
    found: dict[Path, int] = {}
    for place in places:
        if place.is_dir() and os.access(place, os.W_OK) and not is_shared(mount_of(place)[0]):
            found[place] = shutil.disk_usage(place).free
            if found[place] >= num_bytes + SPARE_BYTES:
                return place
    free = ", ".join(f"{place} has {format_size(size)} free" for place, size in found.items())
    needed = f"{format_size(num_bytes)} and {format_size(SPARE_BYTES)} to spare"
    raise ConfigError(
        f"node {socket.gethostname()} has no room for a copy of the model ({needed}): "
        f"{free or 'it has no local directory'}. "
        "Set cluster.local_dir to a directory on its disk."
    )


def compute_identity(source: Path) -> str:
    """Return a text that changes when a file, or a file of a directory, changes. Raises OSError."""
    return repr((str(source.absolute()), sorted(_list_files(source).items())))


def _open_copy(source: Path, folder: Path) -> tuple[str, int]:
    """Return the path of the copy, and a descriptor that holds it. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    files = _list_files(source)
    place = folder / _hash_source(compute_identity(source))
    with _lock(folder / f".{place.name}.lock"):
        if not place.exists():
            _copy(source, files, place)
        held = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(held, fcntl.LOCK_SH)
    return str(place / source.name), held


def _lock(path: Path) -> "FileLock":
    from filelock import FileLock  # needed with cluster.local_dir only

    # Without flock it must raise: the fallback lock survives a killed process. Older versions have none.
    with suppress(TypeError):
        return FileLock(path, fallback_to_soft=False)
    return FileLock(path)


def _list_files(source: Path) -> _Files:
    paths = [source] if source.is_file() else [Path(entry) for entry in os.scandir(source) if entry.is_file()]
    found = {path.name: path.stat() for path in paths}
    return {name: (stat.st_size, stat.st_mtime_ns) for name, stat in found.items()}


def find_boot_id() -> str:
    """Return a text that identifies this boot of the node."""
    return _BOOT_ID.read_text().strip()


def _hash_source(text: str) -> str:
    return hashlib.blake2b((find_boot_id() + text).encode(), digest_size=16).hexdigest()


def _copy(source: Path, files: _Files, place: Path) -> None:
    """Copy the files of a model that are read, and link the rest of its directory. Raises OSError."""
    has_safetensors = any(name.endswith(".safetensors") for name in files)
    wanted = [name for name in files if not (has_safetensors and name.endswith(_UNREAD))]
    num_bytes = sum(files[name][0] for name in wanted)
    partial = place.with_name(f".partial-{place.name}")
    shutil.rmtree(partial, ignore_errors=True)  # left by a killed process
    _check_room(place.parent, num_bytes)
    start = time.monotonic()
    target, is_file = partial / source.name, source.is_file()
    (partial if is_file else target).mkdir(parents=True)
    try:
        pairs = [(source, target) if is_file else (source / name, target / name) for name in wanted]
        with ThreadPoolExecutor(NUM_FILES) as pool:
            list(pool.map(_copy_file, *zip(*pairs, strict=True)))
        for entry in () if is_file else os.scandir(source):
            if entry.name not in wanted:
                (target / entry.name).symlink_to(Path(entry).absolute())
        if _list_files(source) != files:
            raise OSError(errno.ESTALE, "the original changed during the copy")
        partial.rename(place)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    seconds = time.monotonic() - start
    logger.info(
        "this node copied %s to %s: %.3f GB in %.1f s", source, place / source.name, num_bytes / 1e9, seconds
    )


def _check_room(folder: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < num_bytes + SPARE_BYTES:
        needed, spare, free_text = map(format_size, (num_bytes, SPARE_BYTES, free))
        message = f"{needed} and {spare} to spare are needed, {free_text} are free in"
        raise OSError(errno.ENOSPC, message, str(folder))


def _copy_file(source: Path, target: Path) -> None:
    """Copy a file, and read the copy back to verify it. Raises OSError."""
    checksum = again = size = 0
    with source.open("rb", buffering=0) as read, target.open("xb") as write:
        while block := read.read(BLOCK_BYTES):
            checksum = zlib.crc32(block, checksum)
            size += write.write(block)
    with target.open("rb", buffering=0) as read:
        while block := read.read(BLOCK_BYTES):
            again = zlib.crc32(block, again)
    if again != checksum or target.stat().st_size != size:
        raise OSError(errno.EIO, "the copy differs from the original", str(target))
