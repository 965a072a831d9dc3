"""Slurm without root: the installed one, or the distribution's packages unpacked into a cache folder. Debian
and its kin only.
"""

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

CHECKOUT = Path(__file__).resolve().parents[2]
PACKAGES = [
    "slurmctld",
    "slurmd",
    "slurm-client",
    "slurm-wlm-basic-plugins",
    "munge",
    "libmunge2",
    "libhwloc15",
    "liblua5.1-0",
]


class NoSlurm(Exception):
    """There is no Slurm, and none can be had; the message says why."""


@dataclass(frozen=True)
class Slurm:
    """Where the programs are: `root` is an unpacked tree, or None for an installed Slurm."""

    root: Path | None

    @property
    def env(self) -> dict[str, str]:
        """What a client needs to find programs and libraries."""
        path = os.environ.get("PATH", os.defpath)
        if self.root is None:
            return {"PATH": f"{path}:/usr/sbin:/sbin"}
        libraries = f"{self.plugins}:{self.plugins.parent}"
        inherited = os.environ.get("LD_LIBRARY_PATH", "")
        return {
            "PATH": f"{self.root}/usr/bin:{self.root}/usr/sbin:{path}",
            "LD_LIBRARY_PATH": f"{libraries}:{inherited}" if inherited else libraries,
        }

    @property
    def plugins(self) -> Path:
        assert self.root is not None
        return next(self.root.glob("usr/lib/*/slurm-wlm"))


def find_or_fetch(cache: Path | None = None, debs: Path | None = None) -> Slurm:
    """An installed Slurm, else one from the cache (default `.cache/slurm` of the checkout), else downloaded.
    Raises NoSlurm.
    """
    if shutil.which("slurmctld", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") and shutil.which(
        "munged"
    ):
        return Slurm(None)
    cache = cache or CHECKOUT / ".cache" / "slurm"
    root = cache / "root"
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / "lock"):  # tests in several processes may be the first to ask
        if not root.is_dir():
            for tool in ("dpkg", *(() if debs else ("apt-get",))):
                if not shutil.which(tool):
                    raise NoSlurm(f"Slurm is not installed, and without {tool} its packages can't be had")
            unpacked = cache / "unpacked"
            shutil.rmtree(unpacked, ignore_errors=True)
            for package in sorted((debs or _download(cache)).glob("*.deb")):
                _run(["dpkg", "-x", str(package), str(unpacked)], cache)
            unpacked.rename(root)
    return Slurm(root)


def _download(cache: Path) -> Path:
    """Fetch the packages, with the system's package lists or, where it has none, with lists of our own."""
    folder = cache / "debs"
    folder.mkdir(exist_ok=True)
    private = [
        "-o",
        f"Dir::State::lists={cache}/lists",
        "-o",
        f"Dir::Cache={cache}/apt",
        "-o",
        "APT::Sandbox::User=",
    ]
    try:
        _run(["apt-get", "download", *PACKAGES], folder)
    except NoSlurm:
        (cache / "lists" / "partial").mkdir(parents=True, exist_ok=True)
        (cache / "apt" / "archives" / "partial").mkdir(parents=True, exist_ok=True)
        _run(["apt-get", *private, "update"], folder)
        _run(["apt-get", *private, "download", *PACKAGES], folder)
    return folder


def _run(argv: list[str], folder: Path) -> None:
    try:
        done = subprocess.run(
            argv, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300
        )
    except subprocess.TimeoutExpired as error:
        raise NoSlurm(f"{' '.join(argv[:2])} took longer than 300 s") from error
    if done.returncode != 0:
        raise NoSlurm(f"{' '.join(argv)}: {done.stderr.strip()[-500:]}")


if __name__ == "__main__":
    print(find_or_fetch())
