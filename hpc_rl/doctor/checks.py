"""The checks of one machine: facts in, a finding with its fix out. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable

from hpc_rl.config.tables.sglang_versions import DROPPED
from hpc_rl.doctor.facts import UNLIMITED, Facts
from hpc_rl.doctor.finding import Finding, Wanted, fail, ok, warn

GB = 10**9
MIN_PYTHON, MIN_TORCH = (3, 11), (2, 9)
SHARED = (
    "nfs",
    "nfs4",
    "lustre",
    "gpfs",
    "mmfs",
    "beegfs",
    "wekafs",
    "ceph",
    "fuse.cephfs",
    "panfs",
    "pvfs2",
    "orangefs",
    "cifs",
    "afs",
)
VOLATILE = ("tmpfs", "ramfs", "overlay", "squashfs", "devtmpfs")
LOCAL_LOCKS = ("nolock", "localflock", "local_lock=all", "local_lock=flock")
Check = Callable[[Facts, Wanted], Finding]


def python(facts: Facts, wanted: Wanted) -> Finding:
    if _numbers(facts.python) < MIN_PYTHON:
        return fail(
            "python",
            f"Python {facts.python}",
            f"use Python {_dots(MIN_PYTHON)} or newer; launcher.python names the jobs' one.",
        )
    return ok("python", f"Python {facts.python}")


def packages(facts: Facts, wanted: Wanted) -> Finding:
    missing = [name for name, version in facts.packages.items() if not version]
    if missing:
        return fail(
            "packages",
            f"missing here: {', '.join(missing)}",
            "install hpc-rl with its dependencies: `pip install -e .`",
        )
    return ok("packages", f"{len(facts.packages)} of {len(facts.packages)} that hpc-rl imports here")


def templates(facts: Facts, wanted: Wanted) -> Finding:
    if not facts.templates:
        return fail(
            "templates",
            "the script templates are not beside the package",
            "reinstall hpc-rl; its wheel brings them.",
        )
    return ok("templates", "found")


def trainer_libraries(facts: Facts, wanted: Wanted) -> Finding:
    name, fix = (
        "torch",
        f"`pip install 'torch>={_dots(MIN_TORCH)}' transformers safetensors` into {wanted.python or 'launcher.python'}.",
    )
    if isinstance(facts.trainer, str):
        return fail(name, facts.trainer, "set launcher.python to the interpreter that has torch.")
    missing = [one for one in ("torch", "transformers", "safetensors") if not facts.trainer.get(one)]
    if missing:
        return fail(name, f"missing in the trainer's Python: {', '.join(missing)}", fix)
    if _numbers(facts.trainer["torch"]) < MIN_TORCH:
        return fail(name, f"torch {facts.trainer['torch']}", fix)
    return ok(name, f"torch {facts.trainer['torch']}, transformers {facts.trainer['transformers']}")


def megatron(facts: Facts, wanted: Wanted) -> Finding:
    version = facts.trainer.get("megatron-core", "") if isinstance(facts.trainer, dict) else ""
    if wanted.megatron and not version:
        return fail(
            "megatron",
            "megatron-core is missing in the trainer's Python",
            "`pip install megatron-core` there, or use fsdp.",
        )
    return ok("megatron", f"megatron-core {version}" if version else "not installed; nothing asks for it")


def sglang(facts: Facts, wanted: Wanted) -> Finding:
    fix = "set launcher.inference_server_python to the environment that has it, or use embedded servers."
    if isinstance(facts.server, str):
        return (
            fail("sglang", facts.server, fix)
            if wanted.sglang
            else ok("sglang", "not found; nothing asks for it")
        )
    version = facts.server.get("sglang", "")
    if not version:
        return (
            fail("sglang", "not installed", fix)
            if wanted.sglang
            else ok("sglang", "not installed; nothing asks for it")
        )
    known = sorted(DROPPED, key=_numbers)
    if known and version not in DROPPED:
        return warn(
            "sglang",
            f"version {version}",
            f"its flags are taken from {known[-1]}; tested are {', '.join(known)}.",
        )
    return ok("sglang", f"version {version}")


def state_directory(facts: Facts, wanted: Wanted) -> Finding:
    if facts.state_error:
        why = "trial names are not remembered, and every command asks the scheduler by itself"
        return warn(
            "state directory",
            f"{facts.state_dir}: {facts.state_error}; {why}",
            "make it writable, or set XDG_STATE_HOME.",
        )
    return ok("state directory", facts.state_dir)


def xdg(facts: Facts, wanted: Wanted) -> Finding:
    if facts.xdg_relative:
        return warn(
            "xdg",
            f"relative, hence ignored: {', '.join(facts.xdg_relative)}",
            "give absolute paths, or unset them.",
        )
    return ok("xdg", "absolute or unset")


def leaking_variables(facts: Facts, wanted: Wanted) -> Finding:
    if facts.leaking:
        return warn(
            "variables",
            f"set: {', '.join(facts.leaking)}",
            "hpc-rl does not pass them on; put what is meant under launcher.slurm.",
        )
    return ok("variables", "none that would speak for sbatch")


def proxies(facts: Facts, wanted: Wanted) -> Finding:
    if facts.proxies:
        fix = "set no_proxy to the cluster's nodes (or `*`), or unset them: libraries may send requests between nodes to the proxy."
        return warn("proxy", f"set: {', '.join(facts.proxies)}", fix)
    return ok("proxy", "none")


def encoding(facts: Facts, wanted: Wanted) -> Finding:
    if facts.encoding.lower().replace("-", "") != "utf8":
        return warn(
            "encoding",
            facts.encoding or "unknown",
            "set LC_ALL=C.UTF-8: prompts and paths may hold any letter.",
        )
    return ok("encoding", facts.encoding)


def time_zone(facts: Facts, wanted: Wanted) -> Finding:
    if facts.zone_error:
        return warn(
            "time zone",
            f"TZ={facts.zone_error} is not known here: times are shown in UTC",
            "set TZ to a name of /usr/share/zoneinfo.",
        )
    return ok("time zone", facts.time_zone)


def cpus(facts: Facts, wanted: Wanted) -> Finding:
    if facts.cpus < wanted.cpus:
        fix = "ask for more CPUs per node, or lower launcher.*_cpus*; a job that sees fewer than it asked for is bound too tightly."
        return fail("cpus", f"{facts.cpus} usable, {wanted.cpus} wanted", fix)
    return ok("cpus", f"{facts.cpus} usable" + (f", {wanted.cpus} wanted" if wanted.cpus else ""))


def gpus(facts: Facts, wanted: Wanted) -> Finding:
    found = f"{facts.gpus} visible ({facts.gpus_from})" + (f", {wanted.gpus} wanted" if wanted.gpus else "")
    if facts.gpus < wanted.gpus:
        return fail(
            "gpus",
            found,
            "ask for GPUs (cluster.n_gpus_per_node, launcher.slurm.gres), or repair the node's driver.",
        )
    return ok("gpus", found)


def memory(facts: Facts, wanted: Wanted) -> Finding:
    usable = facts.mem_bytes if facts.cgroup_bytes is None else min(facts.mem_bytes, facts.cgroup_bytes)
    found = f"{_gb(usable)} usable" + (" (control group)" if facts.cgroup_bytes is not None else "")
    found += f", {_gb(wanted.mem_mb << 20)} wanted" if wanted.mem_mb else ""
    if usable < wanted.mem_mb << 20:
        return fail(
            "memory",
            found,
            "ask for more (launcher.slurm.mem), or lower launcher.*_mem*: beyond its limit the kernel kills the job.",
        )
    return ok("memory", found)


def shared_memory(facts: Facts, wanted: Wanted) -> Finding:
    found, needed = (
        f"/dev/shm has {_gb(facts.shm_free)} free of {_gb(facts.shm_bytes)}",
        (1 if wanted.gpus else 0.064) * GB,
    )
    if facts.shm_free < needed:
        return fail(
            "shared memory",
            found,
            "NCCL and data loaders need it: remove what lies there, or give the container a larger one.",
        )
    return ok("shared memory", found)


def temporary(facts: Facts, wanted: Wanted) -> Finding:
    if facts.tmp_error or facts.tmp_free < GB:
        return warn(
            "temporary",
            facts.tmp_error or f"{facts.tmp} has {_gb(facts.tmp_free)} free",
            "set TMPDIR to a local disk with space.",
        )
    return ok("temporary", f"{facts.tmp} has {_gb(facts.tmp_free)} free")


def open_files(facts: Facts, wanted: Wanted) -> Finding:
    soft, hard = facts.nofile
    if _below(hard, 1024) or _below(soft, 1024):
        return fail(
            "open files",
            f"limit {_limit(soft)}, at most {_limit(hard)}",
            "raise it: `ulimit -n 65536`, or the site's limits.conf.",
        )
    if _below(hard, 4096):
        return warn(
            "open files",
            f"limit {_limit(soft)}, at most {_limit(hard)}",
            "many servers need more: 65536 is usual.",
        )
    return ok("open files", f"limit {_limit(soft)}, at most {_limit(hard)}")


def processes(facts: Facts, wanted: Wanted) -> Finding:
    soft, hard = facts.nproc
    if _below(soft, 1024):
        return fail(
            "processes",
            f"limit {_limit(soft)}",
            "raise it: `ulimit -u`; threads count, and a node runs thousands.",
        )
    return ok("processes", f"limit {_limit(soft)}, at most {_limit(hard)}")


def locked_memory(facts: Facts, wanted: Wanted) -> Finding:
    soft, _ = facts.memlock
    if wanted.gpus and wanted.num_nodes > 1 and soft != UNLIMITED:
        fix = "InfiniBand needs it unlimited: PropagateResourceLimitsExcept=MEMLOCK, and LimitMEMLOCK=infinity of slurmd."
        return warn("locked memory", f"limit {_limit(soft)}", fix)
    return ok("locked memory", f"limit {_limit(soft)}")


def ports(facts: Facts, wanted: Wanted) -> Finding:
    low, high = facts.port_range
    if facts.port_error:
        return fail(
            "ports",
            f"none can be bound: {facts.port_error}",
            "a sandbox or a limit forbids it; run where sockets are allowed.",
        )
    if high and high - low < 5000:
        return warn(
            "ports",
            f"only {low} to {high} are handed out",
            "widen net.ipv4.ip_local_port_range: each connection takes one.",
        )
    return ok(
        "ports", f"bound {facts.port}; {low} to {high} are handed out" if high else f"bound {facts.port}"
    )


def address(facts: Facts, wanted: Wanted) -> Finding:
    if facts.address_error:
        fix = "set cluster.interface, or HPC_RL_INTERFACE in the job: servers publish the address of that interface."
        status = fail if wanted.num_nodes > 1 else warn
        return status("address", facts.address_error, fix)
    return ok("address", f"peers reach {facts.address}")


def host_name(facts: Facts, wanted: Wanted) -> Finding:
    if not facts.resolves:
        return warn(
            "host name",
            f"{facts.host} does not resolve",
            "put it into DNS or /etc/hosts: NCCL and gloo look it up.",
        )
    return ok("host name", facts.host)


def left_processes(facts: Facts, wanted: Wanted) -> Finding:
    if facts.leftovers:
        named = "; ".join(
            f"{one.pid}" + (f" of job {one.job_id}" if one.job_id else "") + f" {one.words[:60]}"
            for one in facts.leftovers[:3]
        )
        more = f" and {len(facts.leftovers) - 3} more" if len(facts.leftovers) > 3 else ""
        return warn(
            "leftovers",
            f"{named}{more}",
            f"their supervisor is gone; end them: kill {' '.join(str(one.pid) for one in facts.leftovers)}",
        )
    return ok("leftovers", "no process of an earlier trial")


# --- the directory of the trials ---------------------------------------------------------------------------------------


def writable(facts: Facts, wanted: Wanted) -> Finding:
    fs = facts.fs
    if fs.error:
        return fail(
            "fileroot",
            f"{fs.path}: {fs.error}",
            "name a directory that can be written as cluster.fileroot, or ask the admins why not.",
        )
    return ok("fileroot", fs.path + ("" if fs.exists else " (made at the first submit)"))


def shared_kind(facts: Facts, wanted: Wanted) -> Finding:
    fs = facts.fs
    if fs.kind in VOLATILE and wanted.on_slurm:
        return fail(
            "shared",
            f"{fs.path} is {fs.kind}: each node has its own",
            "name a directory on the cluster's shared file system as cluster.fileroot.",
        )
    if wanted.on_slurm and fs.kind not in SHARED and not fs.kind.startswith("fuse"):
        return warn(
            "shared",
            f"{fs.path} is {fs.kind or 'of unknown kind'}",
            "`hpc-rl doctor --allocation` shows whether every node sees it.",
        )
    return ok("shared", f"{fs.path} is {fs.kind or 'of unknown kind'}")


def mount_options(facts: Facts, wanted: Wanted) -> Finding:
    bad = [option for option in facts.fs.options if option in (*LOCAL_LOCKS, "nocto")]
    if bad:
        fix = "hpc-rl takes no locks there, but libraries may: keep their caches (HF_HOME, TRITON_CACHE_DIR) on a local disk."
        return warn("mount options", ", ".join(bad) + ": locks or opens do not reach across nodes", fix)
    return ok("mount options", "nothing that breaks locks or opens")


def _fs(name: str, works: Callable[[Facts], bool], wrong: str, right: str) -> Check:
    def check(facts: Facts, wanted: Wanted) -> Finding:
        if facts.fs.error:
            return fail(name, f"not tried: {facts.fs.error}", "see `fileroot`.")
        if not works(facts):
            return fail(
                name, wrong, "this file system can't hold trials: choose another one as cluster.fileroot."
            )
        return ok(name, right)

    return check


rename = _fs(
    "rename",
    lambda facts: facts.fs.rename,
    "rename does not replace a file as a whole",
    "replaces a file as a whole",
)
link = _fs(
    "link",
    lambda facts: facts.fs.link,
    "link does not refuse a name that is taken: two writers could both win",
    "refuses a taken name",
)
exclusive = _fs(
    "exclusive create",
    lambda facts: facts.fs.exclusive,
    "O_EXCL or mkdir takes a name twice",
    "O_EXCL and mkdir refuse a taken name",
)


def locks(facts: Facts, wanted: Wanted) -> Finding:
    if not facts.fs.error and not facts.fs.flock:
        return warn(
            "locks",
            "flock keeps nobody out, even on one machine",
            "hpc-rl takes none there; keep the caches of libraries elsewhere.",
        )
    return ok("locks", "flock works on this machine" if facts.fs.flock else "not tried")


def speed(facts: Facts, wanted: Wanted) -> Finding:
    if facts.fs.fsync_s > 1.0:
        fix = "state and batches are synced at every step: expect waits, or choose a faster file system."
        return warn("sync time", f"a small synced write takes {facts.fs.fsync_s:.1f} s", fix)
    return ok("sync time", f"a small synced write takes {facts.fs.fsync_s * 1000:.0f} ms")


def space(facts: Facts, wanted: Wanted) -> Finding:
    found = f"{_gb(facts.fs.free_bytes)} free in {facts.fs.path}"
    if facts.fs.error:
        return fail("space", f"not known: {facts.fs.error}", "see `fileroot`.")
    if facts.fs.free_bytes < GB:
        return fail("space", found, "remove old trials (`hpc-rl list`), or choose another cluster.fileroot.")
    if facts.fs.free_bytes < 20 * GB and wanted.on_slurm:
        return warn(
            "space", found, "a trial keeps several copies of model and optimizer; recover.keep bounds them."
        )
    return ok("space", found)


def inodes(facts: Facts, wanted: Wanted) -> Finding:
    free = facts.fs.free_inodes
    if free is not None and free < 10_000:
        return fail(
            "inodes",
            f"{free} free in {facts.fs.path}",
            "remove old trials; a trial makes some thousand files.",
        )
    return ok("inodes", "not counted" if free is None else f"{free} free")


def file_clock(facts: Facts, wanted: Wanted) -> Finding:
    skew = facts.fs.skew_s
    if abs(skew) > 5.0:
        return warn(
            "file server's clock",
            f"{skew:+.1f} s against ours",
            "hpc-rl compares no clocks, but make and caches do: let NTP set both.",
        )
    return ok("file server's clock", f"{skew:+.1f} s against ours")


MACHINE: tuple[Check, ...] = (
    python, trainer_libraries, sglang, megatron, cpus, gpus, memory, shared_memory, temporary, open_files, processes,
    locked_memory, ports, address, host_name, time_zone, encoding, proxies, left_processes,
)  # fmt: skip
DIRECTORY: tuple[Check, ...] = (
    writable, shared_kind, mount_options, rename, link, exclusive, locks, speed, space, inodes, file_clock,
)  # fmt: skip
HERE_ONLY: tuple[Check, ...] = (packages, templates, state_directory, xdg, leaking_variables)


def judge(facts: Facts, wanted: Wanted, checks: tuple[Check, ...]) -> list[Finding]:
    """The findings of these checks, in their order."""
    return [check(facts, wanted) for check in checks]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version.partition("+")[0])[:3]))


def _dots(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _gb(size: int) -> str:
    return f"{size / GB:.1f} GB"


def _below(value: int, bound: int) -> bool:
    return value != UNLIMITED and value < bound


def _limit(value: int) -> str:
    return "none" if value == UNLIMITED else str(value)
