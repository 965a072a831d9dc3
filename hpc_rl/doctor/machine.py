"""Checks of the machine that they run on: software, resources, limits, network, leftover processes."""

import contextlib
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
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

from hpc_rl.config import (
    sglang_versions,
    vllm_versions,
)
from hpc_rl.core import net
from hpc_rl.core.errors import ConfigError
from hpc_rl.core.node_copies import find_local_dir
from hpc_rl.core.refusal import Kind, Refusal
from hpc_rl.doctor import mpi_check
from hpc_rl.doctor.finding import Requirements, Verdict, fail, judge, ok, warn
from hpc_rl.plan.schema import GPU_VARIABLES
from hpc_rl.sandbox import REQUIRED, find_sandbox
from hpc_rl.schedulers.hostlist import list_peer_hosts

GB = 10**9
MIN_PYTHON, MIN_TORCH = (3, 11), (2, 9)
MIN_SHM_GB = 1.0
MIN_SHM_GB_WITHOUT_GPU = 0.064
# Parents of a process whose own parent has died.
INITS = ("init", "systemd", "tini", "dumb-init", "docker-init", "catatonit")
ROLE_VARIABLE = b"HPC_RL_STEPS="
# All that a trial may need of an interpreter.
PACKAGES = (
    "torch", "transformers", "safetensors", "megatron-core", "flash-attn", "flash-attn-3", "sglang", "vllm",
    "tensorboard", "wandb", "swanlab", "mlflow", "mlflow-skinny", "trackio", "math-verify", "pyarrow",
    "datasets",
)  # fmt: skip
VERSIONS_PROGRAM = """
import importlib.metadata, json, sys
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
print(json.dumps(found))
"""
ASK_TIMEOUT_S = 30.0  # for an interpreter on a shared disk that is busy

# As templates/site.sh.j2 finds the command.
MODULES_PROGRAM = """
if ! type module >/dev/null 2>&1; then
  for file in /etc/profile.d/{modules,lmod,z00_lmod}.sh; do
    if [[ -r $file ]]; then source "$file" && break; fi
  done
fi
type module >/dev/null 2>&1 || exit 3
for one; do
  module load "$one" >/dev/null 2>&1 || printf '%s: %s\\n' "$one" "$(module load "$one" 2>&1 | tr '\\n' ' ')"
done
"""


NODES_MUST = "the nodes of the job must have it"


def find_program_problem(option: str, program: str) -> Refusal | None:
    """Return why a program can't be run here; a note if nodes may have another disk, or a module with it."""
    if shutil.which(program):
        return None
    why = f"is not a program that {socket.gethostname()} can run"
    problem = Refusal(option=option, value=program, kind=Kind.MACHINE, why=why)
    is_certain = os.path.isabs(program) and os.path.isdir(os.path.dirname(program))
    return problem if is_certain else replace(problem, use=NODES_MUST, is_note=True)


@cache
def find_modules_problem(modules: tuple[str, ...]) -> Refusal | None:
    """Return which modules can't be loaded here; a note if that can't be tried."""
    if not modules:
        return None
    refuse = partial(Refusal, option="launcher.modules", kind=Kind.MACHINE)
    argv = ["bash", "-c", MODULES_PROGRAM, "modules", *modules]
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        return refuse(why=f"can't be tried on {socket.gethostname()}: {error}", use=NODES_MUST, is_note=True)
    if done.returncode == 3:
        why = f": {socket.gethostname()} has no command `module`, so they were not tried"
        return refuse(why=why, use=NODES_MUST, is_note=True)
    problems = [" ".join(line.split()).rstrip(":") for line in done.stdout.splitlines()]
    if not problems:
        return None
    why = f": `module load` fails on {socket.gethostname()}: {'; '.join(problems)}"
    return refuse(why=why, use="correct the names; `module avail` lists the modules")


def find_interface_problem(interface: str, is_login: bool) -> Refusal | None:
    """Return why a configured interface can't be used here; a note on a login node."""
    try:
        if interface:
            net.choose_address(1, interface)
    except ConfigError as error:
        return replace(error.refusals[0], is_note=is_login, use=NODES_MUST if is_login else "")
    return None


def check_python(needs: Requirements) -> Verdict:
    fix = f"use Python {_format_dots(MIN_PYTHON)} or newer; launcher.python is the interpreter of jobs."
    return judge(_format_dots(sys.version_info[:3]), fix, fail=sys.version_info < MIN_PYTHON)


def check_torch(needs: Requirements) -> Verdict:
    fix = "set launcher.python to the interpreter that has torch."
    problem = find_program_problem("launcher.python", needs.python or sys.executable)
    if problem:
        return _judge_problem(problem, fix)
    found = find_versions(needs.python or sys.executable)
    if isinstance(found, str):
        return fail(found, fix)
    fix = f"`pip install 'torch>={_format_dots(MIN_TORCH)}' transformers safetensors` into launcher.python."
    if missing := [name for name in ("torch", "transformers", "safetensors") if not found.get(name)]:
        return fail(f"missing in the trainer's Python: {', '.join(missing)}", fix)
    both = f"torch {found['torch']}, transformers {found['transformers']}"
    return judge(both, fix, fail=_parse_numbers(found["torch"]) < MIN_TORCH)


def check_megatron(needs: Requirements) -> Verdict:
    version = find_version("megatron-core", needs.python)
    if needs.megatron and not version:
        fix = "`pip install megatron-core` there, or use fsdp."
        return fail("megatron-core is missing in the trainer's Python", fix)
    return ok(f"megatron-core {version}" if version else "not installed, not required")


def check_mpi(needs: Requirements) -> Verdict:
    if not needs.mpi:
        return ok("not required")
    seen = mpi_check.inspect_mpi(needs.python or sys.executable, needs.mpiexec)
    return fail(seen.problem, mpi_check.FIX) if seen.problem else ok(seen.found)


def check_sglang(needs: Requirements) -> Verdict:
    return _check_servers("sglang", sglang_versions.FLAGS, needs)


def check_vllm(needs: Requirements) -> Verdict:
    return _check_servers("vllm", vllm_versions.FLAGS, needs)


def _check_servers(library: str, known: Collection[str], needs: Requirements) -> Verdict:
    python = needs.server_python or needs.python
    if python and library in needs.servers:
        problem = find_program_problem("launcher.inference_server_python", python)
        if problem:
            return _judge_problem(problem, "install it there, or correct the path.")
    version = find_version(library, python)
    if not version and library in needs.servers:
        found = find_versions(python or sys.executable)
        fix = "set launcher.inference_server_python to the environment that has it, or use embedded servers."
        return fail(found if isinstance(found, str) else "not installed", fix)
    if not version:
        return ok("not installed, not required")
    tested = sorted(known, key=_parse_numbers)
    fix = f"its options are taken from {tested[-1]}; tested versions: {', '.join(tested)}."
    return judge(f"version {version}", fix, warn=version.partition("+")[0] not in known)


def find_version(library: str, python: str) -> str:
    """Return the version in an interpreter (by default this one); empty if it is not installed."""
    found = find_versions(python or sys.executable)
    return found.get(library, "") if isinstance(found, dict) else ""


@cache
def find_versions(python: str) -> dict[str, str] | str:
    """Return the version of each of PACKAGES that an interpreter has, or why it can't be asked.

    It is asked once in a run of a command.
    """
    program = shutil.which(python)
    if program is None:
        return f"{python} is not a program that can be run here"
    if os.path.abspath(program) == sys.executable:
        return _find_own_versions()
    environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    argv = [program, "-c", VERSIONS_PROGRAM, *PACKAGES]
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=ASK_TIMEOUT_S,
            env=environ,
        )
        found = json.loads(done.stdout)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{python} can't be asked: {error}"
    except ValueError:
        found = None
    if not isinstance(found, dict):
        said = " ".join(done.stderr.split())[-200:] or f"exit code {done.returncode} without a message"
        return f"{python} gave no answer as Python would: {said}"
    return found


def _find_own_versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def check_cpus(needs: Requirements) -> Verdict:
    usable = len(os.sched_getaffinity(0))
    found = f"{usable} usable" + (f", {needs.cpus} required" if needs.cpus else "")
    if not needs.on_slurm:
        fix = "the roles share the CPUs, and take longer; lower launcher.*_cpus*."
        return judge(found, fix, warn=usable < needs.cpus)
    fix = "ask for more CPUs per node or lower launcher.*_cpus*; fewer than requested: wrong CPU binding."
    return judge(found, fix, fail=usable < needs.cpus)


def check_gpus(needs: Requirements) -> Verdict:
    count, source = count_visible_gpus()
    found = f"{count} visible ({source})" + (f", {needs.gpus} required" if needs.gpus else "")
    fix = "ask for GPUs (cluster.n_gpus_per_node, launcher.slurm.gres), or repair the node's driver."
    return judge(found, fix, fail=count < needs.gpus)


def count_visible_gpus() -> tuple[int, str]:
    """Return the number of GPUs that a process here would see, and its source."""
    for variable in GPU_VARIABLES.values():
        if (named := os.environ.get(variable)) is not None:
            return len([one for one in named.split(",") if one.strip() not in ("", "-1")]), variable
    if shutil.which("nvidia-smi"):
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30)
            return sum(line.startswith("GPU ") for line in done.stdout.splitlines()), "nvidia-smi"
    if Path("/dev/kfd").exists():  # AMD's driver
        return len(list(Path("/dev/dri").glob("renderD*"))), "/dev/dri/renderD*"
    devices = [path for path in Path("/dev").glob("nvidia[0-9]*") if path.name[6:].isdigit()]
    return len(devices), "/dev/nvidia*"


def check_memory(needs: Requirements) -> Verdict:
    usable, limit = measure_usable_memory(), measure_cgroup_memory()
    found = f"{_format_gb(usable)} usable" + (" (control group)" if limit is not None else "")
    found += f", {_format_gb(needs.mem_mb << 20)} required" if needs.mem_mb else ""
    fix = "ask for more (launcher.slurm.mem) or lower launcher.*_mem*: the kernel ends processes above it."
    return judge(found, fix, fail=usable < needs.mem_mb << 20)


def measure_usable_memory() -> int:
    """Return the memory of this machine, or of the control group of this process if that has less."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(machine, measure_cgroup_memory() or machine)


def measure_cgroup_memory(
    root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")
) -> int | None:
    """Return the smallest memory limit of this process's control groups (version 2 or 1), or None."""
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


def check_shared_memory(needs: Requirements) -> Verdict:
    usage = shutil.disk_usage("/dev/shm")
    found = f"/dev/shm has {_format_gb(usage.free)} free of {_format_gb(usage.total)}"
    fix = "NCCL and data loaders need it: remove old files there, or give the container a larger one."
    return judge(found, fix, fail=usage.free < (MIN_SHM_GB if needs.gpus else MIN_SHM_GB_WITHOUT_GPU) * GB)


def check_temporary(needs: Requirements) -> Verdict:
    folder = tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    return judge(
        f"{folder} has {_format_gb(free)} free", "set TMPDIR to a local disk with space.", warn=free < GB
    )


def check_local_dir(needs: Requirements) -> Verdict:
    """Judge cluster.local_dir by the code of the roles; a login node may have another one."""
    if not needs.local_dir or needs.is_login:
        return ok("not required here")
    try:
        place = find_local_dir(needs.local_dir, os.environ)
    except ConfigError as error:
        return fail(str(error), "correct cluster.local_dir.")
    here = next(parent for parent in (place, *place.parents) if parent.exists())
    found = f"{place} has {_format_gb(shutil.disk_usage(here).free)} free"
    if not os.access(here, os.W_OK):
        return fail(f"{here} is not writable", "correct cluster.local_dir.")
    return ok(f"{found}; what does not fit is read from the shared disk")


# The roles raise the soft limits of files and locked memory, so the hard ones count.
def check_open_files(needs: Requirements) -> Verdict:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"at most {_format_limit(hard)} (now {_format_limit(soft)}; roles raise it)"
    if _judge_limit(hard, 1024):
        return fail(found, "raise the hard limit: limits.conf of the site, LimitNOFILE of slurmd.")
    return judge(found, "many servers need more: 65536 is usual.", warn=_judge_limit(hard, 4096))


def check_processes(needs: Requirements) -> Verdict:
    soft, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    fix = "raise it: `ulimit -u`; threads count, and a node runs thousands."
    return judge(
        f"limit {_format_limit(soft)}, at most {_format_limit(hard)}", fix, fail=_judge_limit(soft, 1024)
    )


def check_locked_memory(needs: Requirements) -> Verdict:
    _, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    fix = "InfiniBand needs more: LimitMEMLOCK=infinity of slurmd, PropagateResourceLimitsExcept=MEMLOCK."
    low = needs.gpus and needs.num_nodes > 1 and hard != resource.RLIM_INFINITY
    return judge(f"at most {_format_limit(hard)}", fix, warn=bool(low))


def check_ports(needs: Requirements) -> Verdict:
    try:
        with net.bind() as sock:
            port = sock.getsockname()[1]
    except OSError as error:
        fix = "a sandbox or a limit forbids it; run where sockets are allowed."
        return fail(f"none can be bound: {error.strerror or error}", fix)
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    fix = "widen net.ipv4.ip_local_port_range: each connection takes one."
    return judge(f"bound {port}; {low} to {high} are assigned", fix, warn=high - low < 5000)


def check_modules(needs: Requirements) -> Verdict:
    problem = find_modules_problem(tuple(needs.modules))
    if problem:
        return _judge_problem(
            problem, "correct launcher.modules; what only the nodes have goes into launcher.setup."
        )
    return ok(", ".join(needs.modules) or "none asked for")


def _judge_problem(problem: Refusal, fix: str) -> Verdict:
    """Return the verdict on a problem; a note about a part that only this machine may lack is a warning."""
    return warn(str(problem), f"else {fix}") if problem.is_note else fail(str(problem), fix)


def check_address(needs: Requirements) -> Verdict:
    fix = "set cluster.interface (or HPC_RL_INTERFACE in the job) to the one that leads to the other nodes."
    if needs.is_login:  # which need not have an address that nodes reach
        problem = find_interface_problem(needs.interface, needs.is_login)
        return _judge_problem(problem, fix) if problem else ok("the nodes choose their own")
    try:
        return ok(f"peers reach {find_address(needs)}")
    except ConfigError as error:
        return fail(str(error), fix)


def find_address(needs: Requirements) -> str:
    """Return the address that a role on this machine would publish. Raises ConfigError."""
    interface = needs.interface or os.environ.get("HPC_RL_INTERFACE", "")
    return net.choose_address(needs.num_nodes, interface, list_peer_hosts(os.environ))


def check_host_name(needs: Requirements) -> Verdict:
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        return warn(f"{name} does not resolve", "put it into DNS or /etc/hosts: NCCL and gloo look it up.")
    return ok(name)


def check_proxy(needs: Requirements) -> Verdict:
    given = {name for name in os.environ if name.lower() in ("http_proxy", "all_proxy") and os.environ[name]}
    if given and "*" not in (os.environ.get("no_proxy"), os.environ.get("NO_PROXY")):
        fix = "set no_proxy to the cluster's nodes (or `*`), or unset them: libraries would use the proxy."
        return warn(f"set: {', '.join(sorted(given))}", fix)
    return ok("none")


@dataclass(frozen=True)
class LeftoverProcess:
    """A process of a trial without a supervisor."""

    pid: int
    command: str
    job_id: str = ""


def check_leftovers(needs: Requirements) -> Verdict:
    found = list_leftovers()
    if not found:
        return ok("no process of an earlier trial")
    named = [f"{one.pid} of job {one.job_id or '?'} {one.command[:60]}" for one in found[:3]]
    named += [f"{len(found) - 3} more"] if len(found) > 3 else []
    fix = f"their supervisor has ended; stop them: kill {' '.join(str(one.pid) for one in found)}"
    return warn("; ".join(named), fix)


def list_leftovers(proc: Path = Path("/proc")) -> list[LeftoverProcess]:
    """Return processes of trials, of this account, whose supervisor has ended: init is their parent.

    They are known by environment and parent, never by name.
    """
    found = []
    for path in proc.iterdir():
        if not path.name.isdigit():
            continue
        try:
            raw = (path / "environ").read_bytes()
            if ROLE_VARIABLE not in raw or path.stat().st_uid != os.getuid():
                continue
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            command = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            is_adopted = parent <= 1 or (proc / str(parent) / "comm").read_text().strip() in INITS
        except (OSError, ValueError):
            continue
        environ = dict(line.partition("=")[::2] for line in raw.decode(errors="replace").split("\0"))
        if command and is_adopted:
            found.append(LeftoverProcess(int(path.name), command[:120], environ.get("SLURM_JOB_ID", "")))
    return sorted(found, key=lambda one: one.pid)


def check_sandbox(needs: Requirements) -> Verdict:
    """Check the sandbox of the code that the reward code_tests runs; no other reward needs it."""
    sandbox = find_sandbox()
    if not needs.sandbox:
        return ok(sandbox.describe())
    weak, required = not sandbox.is_complete, needs.sandbox == REQUIRED
    fix = "code_tests runs code there: allow user namespaces, or use a kernel with Landlock (5.13 or newer)."
    return judge(sandbox.describe(), fix, fail=weak and required, warn=weak)


MACHINE_CHECKS = (
    check_python, check_torch, check_sglang, check_vllm, check_megatron, check_mpi, check_cpus, check_gpus,
    check_memory, check_shared_memory, check_temporary, check_local_dir,
    check_open_files, check_processes, check_locked_memory,
    check_ports, check_modules, check_address, check_host_name, check_proxy, check_leftovers,
    check_sandbox,
)  # fmt: skip


def _parse_numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version.partition("+")[0])[:3]))


def _format_dots(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _format_gb(size: int) -> str:
    return f"{size / GB:.1f} GB"


def _judge_limit(value: int, bound: int) -> bool:
    return value != resource.RLIM_INFINITY and value < bound


def _format_limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)
