"""The environment of a role on its node: without what holds on other nodes only, and with local caches.

What the submission's environment says of directories and proxies was true on the login node, or on the first
node. Compilers' caches go to a directory of the job on the node's own disk, because home directories are on a
network: each role locks it, and the last one on the node that ends in order removes it. A role that fails
leaves it to its next start; what a job left behind is removed by the next one of the same account there. With
`cluster.local_dir` it is there, also has the copies of node_copies.py, and the end of the job removes it.
"""

import contextlib
import fcntl
import logging
import os
import shutil
import stat
import time
from collections.abc import Iterable, MutableMapping
from pathlib import Path

from hpc_rl.core.errors import ConfigError
from hpc_rl.core.node_copies import local_place

logger = logging.getLogger(__name__)

CACHES = {  # variable -> its directory within the job's
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TORCH_EXTENSIONS_DIR": "extensions",
    "CUDA_CACHE_PATH": "cuda",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "SGLANG_CACHE_DIR": "sglang",
    "SGLANG_DG_CACHE_DIR": "deep_gemm",
    "VLLM_CACHE_ROOT": "vllm",
}
PROXIES = ("http_proxy", "https_proxy", "all_proxy")
LOCK_TRIES, LOCK_WAIT_S = 100, 0.1
LOOPBACK = ("localhost", "127.0.0.1", "::1")


def correct(environ: MutableMapping[str, str], hosts: Iterable[str] = ()) -> None:
    """Drop directories that are not on this node; have requests to `hosts` and to this one use no proxy."""
    for name in ("TMPDIR", "XDG_RUNTIME_DIR"):
        if environ.get(name) and not (os.path.isdir(environ[name]) and os.access(environ[name], os.W_OK)):
            del environ[name]
    if any(environ.get(name) or environ.get(name.upper()) for name in PROXIES):
        # Programs read one of the two.
        for name in ("no_proxy", "NO_PROXY"):
            given = filter(None, environ.get(name, "").split(","))
            environ[name] = ",".join(dict.fromkeys([*given, *LOOPBACK, *hosts]))


class NodeDirectory:
    """The directory of a job on this node's own disk, while this process uses it."""

    def __init__(self, environ: MutableMapping[str, str], job_id: str, local_dir: str = "") -> None:
        """Make it in `local_dir` or for temporary files, and point compilers' caches to it; no OSError.

        What caches are placed elsewhere stay there. Raises ConfigError for a `local_dir` that can't be used.
        """
        place = local_place(local_dir, environ) if local_dir else Path(environ.get("TMPDIR") or "/tmp")
        prefix = f"hpc-rl-{os.getuid()}-"
        self.path = place / f"{prefix}{job_id}"
        self._fd: int | None = None
        try:
            _remove_unused(path for path in place.glob(f"{prefix}*") if path != self.path)
            self._fd = _make_own(self.path)
        except OSError as error:
            if local_dir:
                raise ConfigError(f"cluster.local_dir {place} can't be used on this node: {error}") from error
            logger.warning("no directory for caches on this node: %s", error)
            return
        for name, folder in CACHES.items():
            environ.setdefault(name, str(self.path / folder))

    def keep_open(self) -> None:
        """Have the program that this process gives way to hold the directory."""
        if self._fd is not None:
            os.set_inheritable(self._fd, True)

    @property
    def copies(self) -> Path:
        return self.path / "copies"

    def leave(self, in_order: bool) -> None:
        """End the use; a role that ends in order removes it where no other uses it."""
        if self._fd is not None:
            if in_order:
                _remove_unused([self.path], self._fd)
            os.close(self._fd)
            self._fd = None


def _make_own(path: Path) -> int:
    """Return a descriptor that holds a directory, which is made if it is not there. Raises OSError."""
    for _ in range(LOCK_TRIES):
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = _open_own(path)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if path.exists() and os.path.samestat(os.fstat(fd), path.stat()):
                return fd
        except BlockingIOError:  # another process removes it
            time.sleep(LOCK_WAIT_S)
        os.close(fd)
    raise TimeoutError(f"another process keeps {path} locked")


def _open_own(path: Path) -> int:
    """Open a directory of this account alone. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    found = os.fstat(fd)
    if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        os.close(fd)
        raise PermissionError(f"{path} belongs to another account, or is open to others")
    return fd


def _remove_unused(paths: Iterable[Path], own_fd: int | None = None) -> None:
    for path in paths:
        with contextlib.suppress(OSError):
            fd = _open_own(path) if own_fd is None else own_fd
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                if own_fd is None:
                    os.close(fd)
