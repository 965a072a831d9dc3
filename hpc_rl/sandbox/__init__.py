"""A sandbox for untrusted Python programs, such as code that a model wrote.

The available protection differs between machines: `find_sandbox` tries the mechanisms, the strongest first,
and measures their protection. `run_python` runs a program in it (launcher.py runs inside).
"""

import contextlib
import enum
import json
import os
import re
import socket
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from hpc_rl.sandbox.launcher import remove

# imported to let Python cache its bytecode
START_LAUNCHER = f"""
import sys
sys.path.append({str(Path(__file__).parent)!r})
import launcher
launcher.main()
"""
REQUIRED = "required"  # value of rollout.sandbox
GRACE_S = 15.0  # time beyond the limit to kill a program's processes
# system folders that everybody can read
SYSTEM_PATHS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache")
# from this version on, kernels count the processes of a user namespace separately
COUNTS_BY_NAMESPACE = (5, 14)
LIBRARIES_PROGRAM = """
import os, sys
for name in os.listdir(sys.argv[1]):
    try:
        __import__(name.partition(".")[0])
    except Exception:
        pass
for line in open("/proc/self/maps"):
    path = line.split(None, 5)[5:]
    if path and path[0].startswith("/") and ".so" in path[0]:
        print(os.path.dirname(path[0].strip()))
"""


class Mechanism(enum.StrEnum):
    """Mechanisms that confine a program, the strongest first."""

    NAMESPACES = "namespaces"  # private processes, network and files, as in a container
    LANDLOCK = "Landlock"  # kernel rules for files and signals, and a filter of system calls
    LIMITS = "limits"  # resource limits, and a filter of system calls


class Protection(enum.StrEnum):
    """The actions that a sandbox prevents."""

    FILES = "files"
    NETWORK = "network"
    SIGNALS = "signals"
    SURVIVORS = "survivors"
    NUM_PROCESSES = "num_processes"
    MEMORY = "memory"


# texts for people: with the protection, and without it
WORDS = {
    Protection.FILES: (
        "no other file can be read or changed",
        "files of this account can be read and changed",
    ),
    Protection.NETWORK: ("no network", "the network can be used"),
    Protection.SIGNALS: ("no signal to another process", "other processes of this account can be ended"),
    Protection.SURVIVORS: ("no process stays behind", "processes can stay behind"),
    Protection.NUM_PROCESSES: ("a limit on the number of processes", "any number of processes can run"),
    Protection.MEMORY: ("a limit on memory", "any amount of memory can be used"),
}


@dataclass(frozen=True)
class Limits:
    """Limits of one program: CPU time and memory per process, everything else for all together."""

    cpu_s: int = 10
    wall_s: float = 20.0
    memory_bytes: int = 1 << 30
    total_memory_bytes: int = 2 << 30
    file_bytes: int = 1 << 20  # of each file
    num_processes: int = 64  # threads included


@dataclass(frozen=True)
class Sandbox:
    """The confinement of programs on this machine, with its measured protection."""

    mechanism: Mechanism
    active: frozenset[Protection]
    as_stranger: bool = True  # root's programs run as a user that owns nothing
    problems: tuple[str, ...] = ()  # reason against a stronger mechanism

    @property
    def is_complete(self) -> bool:
        return not self.missing

    @property
    def missing(self) -> list[Protection]:
        return [protection for protection in Protection if protection not in self.active]

    def describe(self) -> str:
        """Return one line: the mechanism, its protection, and the gaps."""
        active = [WORDS[protection][0] for protection in Protection if protection in self.active]
        text = f"{self.mechanism}: {', '.join(active) or 'nothing is protected'}"
        if active and self.missing:
            text += f"; not protected: {', '.join(WORDS[protection][1] for protection in self.missing)}"
        return text


def find_problem(wanted: str, sandbox: Sandbox) -> str:
    """Return why this sandbox does not satisfy `rollout.sandbox`, or ""; USE is the remedy."""
    if wanted != REQUIRED or sandbox.is_complete:
        return ""
    why = "".join(f" ({problem})" for problem in sandbox.problems[:1])
    return f"this machine has no complete sandbox for code_tests. It has {sandbox.describe()}{why}"


USE = "use a machine with user namespaces or Landlock (Linux 5.13), or set rollout.sandbox to available"


class Ended(enum.StrEnum):
    """How a program ended."""

    EXIT = "exit"  # by itself or by a signal; `code` has the exit code
    TIME = "time"
    MEMORY = "memory"
    STOPPED = "stopped"  # together with the process that started it


@dataclass(frozen=True)
class Outcome:
    """How a program ended; `code` is its exit code, or 128 plus the number of the signal."""

    code: int
    ended: Ended
    killed: int = 0  # processes that it left running, without namespaces
    left: int = 0  # those processes that could not be killed


class NotConfined(Exception):
    """A program could not be started in this sandbox."""


def run_python(program: str, limits: Limits | None = None, sandbox: Sandbox | None = None) -> Outcome:
    """Run a program in a sandbox, by default this machine's best, without output or arguments.

    Raises NotConfined if the sandbox can't be created.
    """
    used = sandbox or find_sandbox()
    return _execute(program, limits or Limits(), used.mechanism, used.as_stranger)


def _execute(program: str, limits: Limits, mechanism: Mechanism, as_stranger: bool) -> Outcome:
    with _make_folder() as folder:
        order = {
            "mechanism": mechanism,
            "as_stranger": as_stranger,
            "program": program,
            "folder": os.path.realpath(folder),
            "python": os.path.realpath(sys.executable),
            "readable": list_readable_paths(),
            "counts_by_namespace": _get_kernel_version() >= COUNTS_BY_NAMESPACE,
            **asdict(limits),
        }
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-S", "-c", START_LAUNCHER],
                input=json.dumps(order),
                env={"PATH": "/usr/bin:/bin"},
                capture_output=True,
                text=True,
                timeout=limits.wall_s + GRACE_S,
            )
            answer: dict[str, Any] = json.loads(done.stdout)
        except (subprocess.TimeoutExpired, OSError, ValueError) as error:
            raise NotConfined(
                f"the process that starts programs in the sandbox gave no answer: {error}"
            ) from error
    if "problem" in answer:
        raise NotConfined(answer["problem"])
    return Outcome(**{**answer, "ended": Ended(answer["ended"])})


@contextlib.contextmanager
def _make_folder() -> Iterator[str]:
    folder = tempfile.mkdtemp(prefix="hpc-rl-code-")
    try:
        yield folder
    finally:
        parent = os.open(os.path.dirname(folder), os.O_PATH | os.O_DIRECTORY)
        try:
            remove(os.path.basename(folder), parent)
        finally:
            os.close(parent)


@cache
def find_sandbox() -> Sandbox:
    """Return the most protective sandbox of this machine; the search runs once per process."""
    problems: list[str] = []
    best: Sandbox | None = None
    for as_stranger in (True, False) if os.geteuid() == 0 else (True,):
        for mechanism in Mechanism:
            try:
                active = probe(mechanism, as_stranger)
            except NotConfined as error:
                problems.append(f"{mechanism}: {error}")
                continue
            if best is None or len(active) > len(best.active):
                best = Sandbox(mechanism, active, as_stranger, tuple(problems))
            if best.is_complete:
                return best
    return best or Sandbox(Mechanism.LIMITS, frozenset(), False, tuple(problems))


PROBE_LIMITS = Limits(cpu_s=10, wall_s=60.0, memory_bytes=512 << 20, num_processes=16)
# The exit code has a bit for each action that succeeded; ANSWERED tells it from an accident.
ANSWERED = 64
PROBE_PROGRAM = """
import os, signal, socket, sys, time
code, marker, port, num_processes, memory = {answered}, {marker!r}, {port}, {num_processes}, {memory}
def can(action):
    try:
        action()
        return True
    except (OSError, MemoryError):
        return False
def reach():
    with socket.create_connection(("127.0.0.1", port), 2):
        pass
def send():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        other.sendto(b"x", ("127.0.0.1", port))
def write():
    with open(marker + ".new", "w"):
        pass
# as process 1 is the parent in a namespace, all others; else the parent, which is not of this sandbox
other = -1 if os.getppid() == 1 else os.getppid()
actions = [
    (1, lambda: open(marker)), (1, write), (1, lambda: os.listdir(os.path.dirname(marker))),
    (2, reach), (2, send), (4, lambda: os.kill(other, 0)), (16, lambda: bytearray(2 * memory)),
]
for bit, action in actions:
    code |= bit * can(action)
if not os.fork():  # a process that outlives this one, if it can
    os.setsid()
    if os.fork():
        os._exit(0)
    time.sleep(300)
os.wait()
def fork():
    if not os.fork():
        time.sleep(300)
code |= 8 * all(can(fork) for _ in range(num_processes + 8))
os._exit(code)
"""
BITS = {
    Protection.FILES: 1,
    Protection.NETWORK: 2,
    Protection.SIGNALS: 4,
    Protection.NUM_PROCESSES: 8,
    Protection.MEMORY: 16,
}


def probe(mechanism: Mechanism, as_stranger: bool) -> frozenset[Protection]:
    """Return a mechanism's protection, measured by a program that tries every action. Raises NotConfined."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hpc-rl-probe-")))
        folder.chmod(0o777)
        marker = folder / "marker"
        marker.write_text("")
        marker.chmod(0o666)
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        program = PROBE_PROGRAM.format(
            answered=ANSWERED,
            marker=str(marker),
            port=listener.getsockname()[1],
            num_processes=PROBE_LIMITS.num_processes,
            memory=PROBE_LIMITS.memory_bytes,
        )
        outcome = _execute(program, PROBE_LIMITS, mechanism, as_stranger)
        could_write = marker.with_name("marker.new").exists()
    if outcome.ended is not Ended.EXIT or not outcome.code & ANSWERED or outcome.code >= 128:
        raise NotConfined(
            f"the program that tests the sandbox ended with code {outcome.code} ({outcome.ended})"
        )
    active = {one for one, bit in BITS.items() if not outcome.code & bit}
    if could_write:
        active.discard(Protection.FILES)
    if not outcome.left and (mechanism is Mechanism.NAMESPACES or outcome.killed):
        active.add(Protection.SURVIVORS)
    return frozenset(active)


@cache
def list_readable_paths() -> list[str]:
    """Return the paths that a program may read: the system, Python's standard library, and its libraries."""
    own = [os.path.realpath(sys.executable), _find_library("stdlib"), _find_library("platstdlib")]
    paths = [*SYSTEM_PATHS, *own]
    if not all(path.startswith("/usr/") for path in map(os.path.realpath, own)):
        paths += _list_library_folders()
    kept: list[str] = []
    for path in sorted({path for path in paths if os.path.lexists(path)}, key=len):
        if not any(path.startswith(f"{other}/") for other in kept):
            kept.append(path)
    return kept


def _find_library(name: str) -> str:
    """Return a folder of the standard library, also in a virtual environment."""
    base = {"base": sys.base_prefix, "platbase": sys.base_exec_prefix}
    return os.path.realpath(sysconfig.get_path(name, vars={**base, "installed_base": sys.base_prefix}))


def _list_library_folders() -> list[str]:
    """Return the folders of the libraries that this Python's modules load."""
    modules = os.path.join(_find_library("platstdlib"), "lib-dynload")
    argv = [sys.executable, "-I", "-S", "-c", LIBRARIES_PROGRAM, modules]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return sorted({*done.stdout.splitlines()})


def _get_kernel_version() -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", os.uname().release)[:2]))
