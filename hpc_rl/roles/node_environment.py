"""The environment of a role on its node: drop settings of other nodes, and use local caches.

Directories and proxies in the submission's environment were valid on the login node, or on the first node.
Compilers' caches go to a directory of the job on the node's local disk, because home directories are on a
network: each role locks it, and the last role on the node that ends normally removes it. A failed role leaves
it for its next start; the next job of the same account on the node removes leftovers. With
`cluster.local_dir` the directory is there, also holds the copies of node_copies.py, and is removed at the end
of the job.
"""

import contextlib
import fcntl
import logging
import os
import shutil
import socket
import stat
import time
from collections.abc import Iterable, MutableMapping
from pathlib import Path

from hpc_rl.core.errors import ConfigError
from hpc_rl.core.node_copies import find_local_dir
from hpc_rl.core.refusal import Kind, Refusal

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
    """Drop directories missing on this node; bypass proxies for `hosts` and for this host."""
    for name in ("TMPDIR", "XDG_RUNTIME_DIR"):
        if environ.get(name) and not (os.path.isdir(environ[name]) and os.access(environ[name], os.W_OK)):
            del environ[name]
    if any(environ.get(name) or environ.get(name.upper()) for name in PROXIES):
        # Programs use one of the two.
        for name in ("no_proxy", "NO_PROXY"):
            given = filter(None, environ.get(name, "").split(","))
            environ[name] = ",".join(dict.fromkeys([*given, *LOOPBACK, *hosts]))


class NodeDirectory:
    """The directory of a job on this node's local disk, while this process uses it."""

    def __init__(self, environ: MutableMapping[str, str], job_id: str, local_dir: str = "") -> None:
        """Create it in `local_dir` or for temporary files, and set compilers' caches to it; no OSError.

        Caches that the user has placed elsewhere stay there. Raises ConfigError for an unusable `local_dir`.
        """
        place = find_local_dir(local_dir, environ) if local_dir else Path(environ.get("TMPDIR") or "/tmp")
        prefix = f"hpc-rl-{os.getuid()}-"
        self.path = place / f"{prefix}{job_id}"
        self._fd: int | None = None
        try:
            _remove_unused(path for path in place.glob(f"{prefix}*") if path != self.path)
            self._fd = _make_own(self.path)
        except OSError as error:
            if local_dir:
                why = f"can't be used on node {socket.gethostname()}: {error}"
                raise ConfigError(
                    Refusal(option="cluster.local_dir", value=place, kind=Kind.MACHINE, why=why)
                ) from error
            logger.warning(
                "compiled kernels are not cached on this node, because it has no directory for them: %s",
                error,
            )
            return
        for name, folder in CACHES.items():
            environ.setdefault(name, str(self.path / folder))

    def keep_open(self) -> None:
        """Let the program that replaces this process hold the directory."""
        if self._fd is not None:
            os.set_inheritable(self._fd, True)

    @property
    def copies(self) -> Path:
        return self.path / "copies"

    def leave(self, in_order: bool) -> None:
        """End the use; a role that ends normally removes the directory if no other role uses it."""
        if self._fd is not None:
            if in_order:
                _remove_unused([self.path], self._fd)
            os.close(self._fd)
            self._fd = None


def _make_own(path: Path) -> int:
    """Return a descriptor that holds a directory; create it if it is missing. Raises OSError."""
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
    """Open a directory that only this account can use. Raises OSError."""
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
