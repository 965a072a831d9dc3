"""Facts of the machine that this runs on: what it is, what it lets us use, what of ours is left on it. Nothing is judged here."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import zoneinfo
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hpc_rl import net
from hpc_rl.doctor.filesystem import FileSystem, look
from hpc_rl.errors import ConfigError
from hpc_rl.schedulers.hostlist import peer_hosts
from hpc_rl.trial import state_home

DISTRIBUTION = re.compile(r"[A-Za-z0-9._-]+")
LIBRARIES = ("torch", "transformers", "safetensors", "tensorboard", "sglang", "megatron-core")
UNLIMITED = -1
OURS = b"HPC_RL_STEPS="
INITS = (
    "init",
    "systemd",
    "tini",
    "dumb-init",
    "docker-init",
    "catatonit",
)  # what inherits a process whose parent has died
ASK_VERSIONS = """
import importlib.metadata, json, sys
def version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
print(json.dumps({"python": ".".join(map(str, sys.version_info[:3])), **{name: version(name) for name in sys.argv[1:]}}))
"""


@dataclass
class Leftover:
    """A process of a trial that no supervisor holds any more."""

    pid: int
    words: str
    job_id: str = ""


@dataclass
class Facts:
    """What a machine says of itself. Counts of bytes are bytes; UNLIMITED where a limit is none; None where it can't be told."""

    host: str = ""
    node: str = ""  # the scheduler's name for it
    job_id: str = ""  # of the allocation that this runs in
    python: str = ""
    packages: dict[str, str] = field(default_factory=dict)  # of this interpreter; empty text where missing
    templates: bool = True  # whether those of the package are there
    trainer: dict[str, str] | str = ""  # versions in the trainer's interpreter, or why they can't be told
    server: dict[str, str] | str = ""  # the same of SGLang's
    state_dir: str = ""
    state_error: str = ""
    xdg_relative: list[str] = field(default_factory=list)
    leaking: list[str] = field(default_factory=list)  # variables that would speak for sbatch
    proxies: list[str] = field(default_factory=list)
    encoding: str = ""
    time_zone: str = ""
    zone_error: str = ""
    clock: float = 0.0  # Unix seconds
    cpus: int = 0
    gpus: int = 0
    gpus_from: str = ""
    mem_bytes: int = 0
    cgroup_bytes: int | None = None
    shm_bytes: int = 0
    shm_free: int = 0
    tmp: str = ""
    tmp_free: int = 0
    tmp_error: str = ""
    nofile: tuple[int, int] = (0, 0)
    nproc: tuple[int, int] = (0, 0)
    memlock: tuple[int, int] = (0, 0)
    port: int = 0
    port_error: str = ""
    port_range: tuple[int, int] = (0, 0)
    address: str = ""
    address_error: str = ""  # why other hosts can't reach this one
    resolves: bool = True
    leftovers: list[Leftover] = field(default_factory=list)
    fs: FileSystem = field(default_factory=FileSystem)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Facts:
        """Raises TypeError, KeyError for what is no Facts."""
        pairs = {name: tuple(data[name]) for name in ("nofile", "nproc", "memlock", "port_range")}
        parts = {"leftovers": [Leftover(**one) for one in data["leftovers"]], "fs": FileSystem(**data["fs"])}
        return cls(**{**data, **pairs, **parts})


def gather(root: Path, trainer_python: str = "", server_python: str = "") -> Facts:
    """Look at this machine. Takes a second or two; never raises for what it finds."""
    facts = Facts(
        host=socket.gethostname(),
        node=os.environ.get("SLURMD_NODENAME", ""),
        job_id=os.environ.get("SLURM_JOB_ID", ""),
    )
    facts.python = ".".join(map(str, sys.version_info[:3]))
    facts.packages = {name: _version(name) for name in _needed_here()}
    facts.trainer = versions(trainer_python or sys.executable)
    facts.server = versions(server_python or trainer_python or sys.executable)
    _environment(facts)
    _limits(facts)
    _network(facts)
    facts.leftovers = leftovers()
    facts.fs = look(root)
    facts.clock = time.time()
    return facts


def versions(python: str) -> dict[str, str] | str:
    """Versions of what a trial imports, by that interpreter's metadata; importing nothing. Words where it can't be asked."""
    program = shutil.which(python)
    if program is None:
        return f"{python} is not a program that can be run here"
    environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    try:
        done = subprocess.run(
            [program, "-c", ASK_VERSIONS, *LIBRARIES],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, env=environ,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{python} can't be asked: {error}"
    found = _json_object(done.stdout)
    return found if found else f"{python} gave no answer: {' '.join(done.stderr.split())[-200:]}"


def _json_object(text: str) -> dict[str, str]:
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _needed_here() -> list[str]:
    """The dependencies that this installation of hpc-rl names, without its extras; hpc-rl alone where it isn't installed."""
    try:
        requirements = importlib.metadata.requires("hpc-rl") or []
    except importlib.metadata.PackageNotFoundError:
        return ["hpc-rl"]
    names = (DISTRIBUTION.match(one) for one in requirements if "extra ==" not in one)
    return [name.group() for name in names if name]


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _environment(facts: Facts) -> None:
    facts.state_dir = str(state_home())
    try:
        state_home().mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.NamedTemporaryFile(dir=state_home()):
            pass
    except OSError as error:
        facts.state_error = error.strerror or str(error)
    names = ("XDG_STATE_HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME")
    facts.xdg_relative = [
        name for name in names if os.environ.get(name) and not os.path.isabs(os.environ[name])
    ]
    facts.leaking = sorted(name for name in os.environ if name.startswith(("SBATCH_", "SALLOC_", "SQUEUE_")))
    facts.proxies = sorted(
        name for name in os.environ if name.lower() in ("http_proxy", "all_proxy") and os.environ[name]
    )
    if os.environ.get("no_proxy") == "*" or os.environ.get("NO_PROXY") == "*":
        facts.proxies = []
    facts.encoding = sys.getfilesystemencoding()
    facts.time_zone = time.strftime("%Z %z")
    zone = os.environ.get("TZ", "").removeprefix(":")
    if zone and "/" in zone and not zone.startswith("/"):
        try:
            zoneinfo.ZoneInfo(zone)
        except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
            facts.zone_error = zone


def _limits(facts: Facts) -> None:
    facts.cpus = len(os.sched_getaffinity(0))
    facts.gpus, facts.gpus_from = visible_gpus()
    facts.mem_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    facts.cgroup_bytes = cgroup_memory()
    facts.nofile, facts.nproc = _limit(resource.RLIMIT_NOFILE), _limit(resource.RLIMIT_NPROC)
    facts.memlock = _limit(resource.RLIMIT_MEMLOCK)
    for path, prefix in (("/dev/shm", "shm"), (tempfile.gettempdir(), "tmp")):
        try:
            usage = shutil.disk_usage(path)
        except OSError as error:
            usage = None
            facts.tmp_error = f"{path}: {error.strerror or error}" if prefix == "tmp" else facts.tmp_error
        if prefix == "shm":
            facts.shm_bytes, facts.shm_free = (usage.total, usage.free) if usage else (0, 0)
        else:
            facts.tmp, facts.tmp_free = path, usage.free if usage else 0


def _limit(number: int) -> tuple[int, int]:
    soft, hard = resource.getrlimit(number)
    return tuple(UNLIMITED if value == resource.RLIM_INFINITY else value for value in (soft, hard))  # type: ignore[return-value]


def visible_gpus() -> tuple[int, str]:
    """How many GPUs a process here would see, and who says so."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return len(
            [one for one in named.split(",") if one.strip() and one.strip() != "-1"]
        ), "CUDA_VISIBLE_DEVICES"
    if shutil.which("nvidia-smi"):
        try:
            said = subprocess.run(
                ["nvidia-smi", "-L"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30
            )
            return sum(line.startswith("GPU ") for line in said.stdout.splitlines()), "nvidia-smi"
        except (OSError, subprocess.TimeoutExpired):
            pass
    return len(
        [path for path in Path("/dev").glob("nvidia[0-9]*") if path.name[6:].isdigit()]
    ), "/dev/nvidia*"


def cgroup_memory(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int | None:
    """The smallest memory limit of this process's control groups, version 2 or 1; None where there is none."""
    limits = []
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory") and "memory" not in controllers.split(","):
            continue
        top, name = (root, "memory.max") if not controllers else (root / "memory", "memory.limit_in_bytes")
        here = top / path.lstrip("/")
        for folder in (here, *here.parents):
            if not folder.is_relative_to(top):
                break
            try:
                text = (folder / name).read_text().strip()
            except OSError:
                continue
            if text.isdigit() and int(text) < 1 << 60:
                limits.append(int(text))
    return min(limits, default=None)


def _network(facts: Facts) -> None:
    try:
        sock = net.bind()
        facts.port = sock.getsockname()[1]
        sock.close()
    except OSError as error:
        facts.port_error = error.strerror or str(error)
    try:
        low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
        facts.port_range = int(low), int(high)
    except (OSError, ValueError):
        facts.port_range = (0, 0)
    facts.address, facts.address_error = own_address()
    try:
        socket.getaddrinfo(facts.host, None)
    except OSError:
        facts.resolves = False


def own_address() -> tuple[str, str]:
    """The address that a role would publish to other hosts; else the one for a trial on this host alone, and why."""
    interface = os.environ.get("HPC_RL_INTERFACE", "")
    try:
        return net.published_address(2, interface, peer_hosts(os.environ)), ""
    except ConfigError as error:
        return net.published_address(1), str(error)


def leftovers(proc: Path = Path("/proc")) -> list[Leftover]:
    """Processes of trials, of this account, whose supervisor is gone: init, or what stands in for it, is their parent.

    Known by their environment and parent alone, never by a name of theirs.
    """
    found = []
    for path in proc.iterdir():
        if not path.name.isdigit():
            continue
        try:
            raw = (path / "environ").read_bytes()
            if OURS not in raw or path.stat().st_uid != os.getuid():
                continue
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            words = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            adopted = parent <= 1 or (proc / str(parent) / "comm").read_text().strip() in INITS
        except (OSError, ValueError):
            continue
        environ = dict(line.partition("=")[::2] for line in raw.decode(errors="replace").split("\0"))
        if words and adopted:
            found.append(Leftover(int(path.name), words[:120], environ.get("SLURM_JOB_ID", "")))
    return sorted(found, key=lambda one: one.pid)
