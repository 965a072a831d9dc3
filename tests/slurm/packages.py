"""Slurm without root: the installed one, the distribution's packages, or the packages of another Debian suite, each
unpacked into a cache folder. Debian and its kin only.

    python tests/slurm/packages.py              what `make test` needs: today's Slurm and the newest
    python tests/slurm/packages.py 24.11        that version
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import sys
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
# Debian's suites by the version of their Slurm. The last one moves on; what it has then is the newest.
SUITES = {"22.05": "bookworm", "24.11": "trixie", "26.05": "forky"}
OLDEST, *_, NEWEST = SUITES
SWITCH = "HPC_RL_TEST_SLURM"
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")


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
        env = {"PATH": f"{self.root}/usr/bin:{self.root}/usr/sbin:{path}"}
        if self.loader:  # its programs know where their libraries are, and jobs have the system's
            return env
        libraries = f"{self.plugins}:{self.plugins.parent}"
        inherited = os.environ.get("LD_LIBRARY_PATH", "")
        return env | {"LD_LIBRARY_PATH": f"{libraries}:{inherited}" if inherited else libraries}

    @property
    def plugins(self) -> Path:
        assert self.root is not None
        return next(self.root.glob("usr/lib/*/slurm-wlm"))

    @property
    def loader(self) -> Path | None:
        """The program loader of a tree with a C library of its own."""
        if self.root is None:
            return None
        found = [(self.root / "needed").glob(f"{lib}/*/ld-linux*.so.*") for lib in ("usr/lib", "lib")]
        return next(itertools.chain(*found), None)

    @property
    def libraries(self) -> str:
        """Library path of the programs of a tree with a C library of its own."""
        assert self.root is not None and self.loader is not None
        needed = self.plugins.parent.relative_to(self.root)
        return f"{self.plugins}:{self.loader.parent}:{self.root / 'needed' / needed}"

    @property
    def version(self) -> tuple[int, ...]:
        """As (22, 5, 8)."""
        program = str(self.root / "usr/sbin/slurmctld-wlm") if self.root else "slurmctld"
        said = subprocess.run([program, "-V"], env=os.environ | self.env, capture_output=True, text=True)
        return tuple(int(number) for number in re.findall(r"\d+", said.stdout))


def find_or_fetch(cache: Path | None = None, debs: Path | None = None, version: str = "") -> Slurm:
    """Return that version of SUITES, by default the one that HPC_RL_TEST_SLURM names; where neither does, an installed
    Slurm, else one from the cache (default `.cache/slurm` of the checkout), else downloaded. Raises NoSlurm.
    """
    version = version or os.environ.get(SWITCH, "")
    if version and not debs:
        return _of_suite(version)
    if shutil.which("slurmctld", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") and shutil.which(
        "munged"
    ):
        return Slurm(None)
    cache = cache or CHECKOUT / ".cache" / "slurm"
    root = cache / "root"
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / "lock"):  # tests in several processes may be the first to ask
        if not root.is_dir():
            _require("dpkg", *(() if debs else ("apt-get",)))
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
    try:
        _run(["apt-get", "download", *PACKAGES], folder)
    except NoSlurm:
        own = _own_lists(cache)
        _run(["apt-get", *own, "update"], folder)
        _run(["apt-get", *own, "download", *PACKAGES], folder)
    return folder


def _own_lists(cache: Path) -> list[str]:
    """Options of apt-get that keep its lists and packages below a folder."""
    (cache / "lists" / "partial").mkdir(parents=True, exist_ok=True)
    (cache / "apt" / "archives" / "partial").mkdir(parents=True, exist_ok=True)
    options = [f"Dir::State::lists={cache}/lists", f"Dir::Cache={cache}/apt", "APT::Sandbox::User="]
    return [word for option in options for word in ("-o", option)]


def _of_suite(version: str) -> Slurm:
    """Return the Slurm of another suite, from the cache or downloaded.

    Its programs get a loader and a library path in the tree (patchelf, of that suite too), so that they run on an
    older system while what they start has the system's libraries. For that the tree can't be moved.
    """
    if version not in SUITES:
        raise NoSlurm(f"{SWITCH} is {version!r}; it can be {', '.join(SUITES)}")
    cache = (CHECKOUT / ".cache").resolve() / f"slurm-{version}"
    root, place = cache / "root", cache / "place"
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / "lock"):
        if not (root.is_dir() and place.is_file() and place.read_text() == str(root)):
            _require("dpkg", "apt-get")
            shutil.rmtree(root, ignore_errors=True)
            place.unlink(missing_ok=True)
            debs = _download_suite(cache, SUITES[version])
            (root / "needed").mkdir(parents=True)
            for package in sorted(debs.glob("*.deb")):
                is_own = package.name.startswith(("slurm", "munge"))
                _run(["dpkg", "-x", str(package), str(root if is_own else root / "needed")], cache)
            _make_self_contained(Slurm(root))
            for folder in (cache / "apt", cache / "lists", root / "usr/share", root / "needed/usr/share"):
                shutil.rmtree(folder, ignore_errors=True)
            place.write_text(str(root))
    return Slurm(root)


def _download_suite(cache: Path, suite: str) -> Path:
    """Fetch the packages of a suite with all that they need, from the mirror that apt already uses.

    apt checks signatures (with the system's own keyring) and hashes.
    """
    mirror = _mirror(cache)
    own = [*_own_lists(cache), "-o", "Acquire::Languages=none", "-o", "APT::Install-Recommends=false"]
    shutil.rmtree(cache / "lists", ignore_errors=True)  # those of the system's suites
    settings = {
        "Dir::Etc::sourcelist": cache / "apt" / "sources.list",
        "Dir::Etc::sourceparts": "/dev/null",
        "Dir::Etc::preferencesparts": "/dev/null",
        "Dir::State": cache / "apt",
        "Dir::State::status": cache / "apt" / "status",
        "Debug::NoLocking": "true",
    }
    for key, value in settings.items():
        own += ["-o", f"{key}={value}"]
    (cache / "lists" / "partial").mkdir(parents=True)
    (cache / "apt" / "status").touch()
    (cache / "apt" / "sources.list").write_text(f"deb [signed-by={KEYRING}] {mirror} {suite} main\n")
    _run(["apt-get", *own, "update"], cache)
    wanted = ["slurmctld", "slurmd", "slurm-client", "munge", "patchelf"]
    _run(["apt-get", *own, "install", "-y", "--download-only", *wanted], cache)
    return cache / "apt" / "archives"


def _mirror(cache: Path) -> str:
    """Return the address of the Debian mirror in apt's configuration."""
    query = [
        "indextargets",
        "--format",
        "$(ORIGIN)|$(COMPONENT)|$(CODENAME)|$(REPO_URI)",
        "Created-By: Packages",
    ]
    for update in (False, True):  # without package lists apt does not know the origin
        own = _own_lists(cache) if update else []
        if update:
            _run(["apt-get", *own, "update"], cache)
        for line in _run(["apt-get", *own, *query], cache).splitlines():
            origin, component, codename, address = line.split("|")
            if (origin, component) == ("Debian", "main") and "-" not in codename:
                return address
    raise NoSlurm("apt's configuration has no Debian mirror, so other versions of Slurm can't be had")


def _make_self_contained(slurm: Slurm) -> None:
    """Write loader and library path of the tree into its programs and libraries."""
    root, loader = slurm.root, slurm.loader
    if root is None or loader is None:
        raise NoSlurm(f"the packages in {root} have no program loader")
    patchelf = [str(loader), "--library-path", slurm.libraries, str(root / "needed" / "usr/bin/patchelf")]
    path = ["--force-rpath", "--set-rpath", slurm.libraries]
    programs = [*(root / "usr" / "bin").iterdir(), *(root / "usr" / "sbin").iterdir()]
    _run([*patchelf, "--set-interpreter", str(loader), *path, *filter(_is_elf, programs)], root)
    # A library's own path, as Slurm's have one, would hide that of the program from what the library needs.
    _run([*patchelf, *path, *filter(_is_elf, slurm.plugins.glob("*.so*"))], root)


def _is_elf(path: Path) -> bool:
    if path.is_symlink() or not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(4) == b"\x7fELF"


def _require(*tools: str) -> None:
    for tool in tools:
        if not shutil.which(tool):
            raise NoSlurm(f"Slurm is not installed, and without {tool} its packages can't be had")


def _run(argv: list[str | Path], folder: Path) -> str:
    try:
        done = subprocess.run(
            argv, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=1200
        )
    except subprocess.TimeoutExpired as error:
        raise NoSlurm(f"{' '.join(map(str, argv[:2]))} took longer than 300 s") from error
    if done.returncode != 0:
        raise NoSlurm(f"{' '.join(map(str, argv))[:200]}: {done.stderr.strip()[-500:]}")
    return done.stdout


if __name__ == "__main__":
    for version in sys.argv[1:] or ["", NEWEST]:
        print(find_or_fetch(version=version))
