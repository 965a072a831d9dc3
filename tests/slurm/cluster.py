"""A private Slurm cluster of several nodes on this one host, without root, systemd or cgroups. For tests and
for trying things.

    python tests/slurm/cluster.py up [--nodes 4] [--dir D]     prints the `export` lines that clients need
    python tests/slurm/cluster.py kill n3 [--dir D]            power loss of one node; `up` again brings it
    back python tests/slurm/cluster.py down [--dir D]

One slurmd per node (n1, n2, …), each on a port of its own; nodes claim 64 CPUs, 256 GB and 8 GPUs (links to
/dev/null). What all nodes share: host name, /tmp, port space. Only processes that hold files below the
cluster's directory are ever ended.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# this file is a program too
sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

from packages import Slurm, find_or_fetch
from patience import extend

LEAKS = ("SLURM_", "SBATCH_", "SRUN_", "SALLOC_", "SQUEUE_", "SINFO_", "SCONTROL_", "SCANCEL_")


@dataclass(frozen=True)
class Cluster:
    """A cluster by its directory (short and of plain characters: unix sockets and slurm.conf want that)."""

    dir: Path
    slurm: Slurm
    num_nodes: int = 4
    num_cpus: int = 64
    threads_per_core: int = 1
    mem_mb: int = 256_000
    num_gpus: int = 8
    extra_conf: str = ""
    without: tuple[str, ...] = ()  # beginnings of lines of slurm.conf that extra_conf replaces

    @property
    def conf(self) -> Path:
        return self.dir / "etc" / "slurm.conf"

    @property
    def env(self) -> dict[str, str]:
        """The environment of clients."""
        clean = {name: value for name, value in os.environ.items() if not name.startswith(LEAKS)}
        # All nodes are this host, which may have no network at all.
        return clean | self.slurm.env | {"SLURM_CONF": str(self.conf), "HPC_RL_INTERFACE": "lo"}

    @property
    def client_env(self) -> dict[str, str]:
        """Of `env` what makes a process a client of this cluster."""
        return {
            name: self.env[name]
            for name in ("SLURM_CONF", "PATH", "LD_LIBRARY_PATH", "HPC_RL_INTERFACE")
            if name in self.env
        }

    @classmethod
    @contextlib.contextmanager
    def private(cls, slurm: Slurm, num_nodes: int = 4, **more: Any) -> Iterator[Cluster]:
        """A running cluster in a new directory below /tmp, gone at the end."""
        cluster = cls(Path(tempfile.mkdtemp(prefix="hpcrl-", dir="/tmp")), slurm, num_nodes, **more)
        try:
            cluster.up()
            yield cluster
        finally:
            cluster.down()

    @property
    def nodes(self) -> list[str]:
        return [f"n{i}" for i in range(1, self.num_nodes + 1)]

    def run(self, *argv: str, timeout_s: float = 60) -> str:
        """Output of a client command. Raises CalledProcessError, TimeoutExpired."""
        done = subprocess.run(
            argv,
            env=self.env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=extend(timeout_s),
        )
        if done.returncode != 0:
            raise subprocess.CalledProcessError(done.returncode, argv, done.stdout, done.stderr)
        return done.stdout

    def up(self, timeout_s: float = 60) -> None:
        """Start what does not run, and wait until every node is usable. Raises RuntimeError."""
        if not self.conf.exists():
            self._write_files(_free_ports(self.num_nodes + 2))
        self._start("munge/munged.pid", "munged", self._munged())
        self._start("run/slurmctld.pid", "slurmctld", [self._program("slurmctld"), "-c"])
        for node in self.nodes:
            stepd = ["-d", self._program("slurmstepd")] if self.slurm.root else []
            self._start(f"run/slurmd.{node}.pid", "slurmd", [self._program("slurmd"), *stepd, "-N", node])
        deadline = time.monotonic() + extend(timeout_s)
        while self._num_usable() < self.num_nodes:
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"{self._num_usable()} of {self.num_nodes} nodes came up; logs are in {self.dir}/log"
                )
            time.sleep(0.1)

    def down(self) -> None:
        """Cancel all jobs, stop everything that was started, remove the directory."""
        if self._pid("run/slurmctld.pid", "slurmctld"):
            self.cancel_all()
        # No step may outlive its controller: it would talk to the next one. Then those that left their step.
        _kill([*self._steps(), *self._escaped()])
        _stop([pid for node in self.nodes if (pid := self._pid(f"run/slurmd.{node}.pid", "slurmd"))], 10)
        _stop([pid for pid in [self._pid("run/slurmctld.pid", "slurmctld")] if pid], 20)
        _kill(self._steps())
        _stop(
            [pid for pid in [self._pid("munge/munged.pid", "munged")] if pid], 10
        )  # last: all authenticate through it
        shutil.rmtree(self.dir, ignore_errors=True)

    def cancel_all(self, timeout_s: float = 30) -> None:
        """End every job, and wait until the queue is empty.

        A requeue that a script asked for just before it was cancelled revives the job: each look cancels
        again.
        """
        deadline = time.monotonic() + extend(timeout_s)
        while time.monotonic() < deadline:
            with contextlib.suppress(subprocess.SubprocessError):
                self.run("scancel", f"--user={os.getuid()}")
                if not self.run("squeue", "-h"):
                    return
            time.sleep(0.1)

    def hurry(self, job_id: str = "") -> None:
        """Spare that job, or every one, Slurm's two minutes after a requeue."""
        for line in self.run(
            "squeue", "-h", "-t", "pending", *(["-j", job_id] if job_id else []), "-o", "%i %r"
        ).splitlines():
            waiting, _, reason = line.partition(" ")
            if reason == "BeginTime":
                time.sleep(
                    1.1
                )  # a start in the second in which the nodes revoked the job's credential fails, and is put off again
                with contextlib.suppress(subprocess.CalledProcessError):  # it started meanwhile
                    self.run("scontrol", "update", f"jobid={waiting.partition('+')[0]}", "StartTime=now")

    def kill_node(self, node: str) -> None:
        """Power loss: the node's slurmd, its steps and all that runs below them, at once."""
        slurmd = self._pid(f"run/slurmd.{node}.pid", "slurmd")
        pids: list[int] = []
        # All stop first: none may see another die, as srun's helper does, which then cancels the step. What
        # they started while they were listed is found by another look, after which none can start anything.
        while new := [pid for pid in (slurmd, *self._steps(node)) if pid and pid not in pids]:
            for pid in new:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
            pids += new
        _kill(
            pids[::-1]
        )  # children first: the kernel wakes stopped processes (HUP, CONT) whose parent is gone
        (self.dir / "run" / f"slurmd.{node}.pid").unlink(missing_ok=True)

    def kill_processes(
        self, node: str, luck: random.Random, longest_pause_s: float = 0.02, first: str = ""
    ) -> None:
        """Kill the node's slurmd, its steps and all that runs below them one by one, in any order.

        Each may see others die, and act. Those with the name `first` are killed first.
        """
        while found := self.processes(node):
            luck.shuffle(found)
            for doomed, _, _ in sorted(found, key=lambda one: one[1] != first):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(doomed, signal.SIGKILL)
                time.sleep(luck.uniform(0.0, longest_pause_s))
        (self.dir / "run" / f"slurmd.{node}.pid").unlink(missing_ok=True)

    def processes(self, node: str) -> list[tuple[int, str, int]]:
        """Return slurmd, the steps and the job processes of a node: each pid, its name, and its parent."""
        slurmd = self._pid(f"run/slurmd.{node}.pid", "slurmd")
        pids = {*([slurmd] if slurmd else []), *self._steps(node), *self._escaped(node)}
        return [(pid, _comm(pid), _parent(pid)) for pid in sorted(pids) if _running(pid)]

    def _num_usable(self) -> int:
        with contextlib.suppress(subprocess.SubprocessError):
            return sum(
                map(
                    int,
                    self.run("sinfo", "-h", "-p", "main", "-t", "idle,mixed,allocated", "-o", "%D").split(),
                )
            )
        return 0

    def _program(self, name: str) -> str:
        """Under its real name: Slurm derives what it is from argv[0], and as `slurmd-wlm` the nodes lose
        their GPUs.
        """
        if self.slurm.root is None:
            return shutil.which(name, path=self.slurm.env["PATH"]) or name
        link = self.dir / "bin" / name
        link.parent.mkdir(exist_ok=True)
        if not link.is_symlink():
            link.symlink_to(self.slurm.root / "usr" / "sbin" / f"{name}-wlm")
        return str(link)

    def _munged(self) -> list[str]:
        here = self.dir / "munge"
        files = {
            "key-file": "munge.key",
            "socket": "munge.sock",
            "pid-file": "munged.pid",
            "log-file": "munged.log",
            "seed-file": "seed",
        }
        program = shutil.which("munged", path=self.slurm.env["PATH"]) or "munged"
        return [
            program,
            "--force",
            "--num-threads=4",
            *(f"--{option}={here / name}" for option, name in files.items()),
        ]

    def _start(self, pid_file: str, program: str, argv: list[str]) -> None:
        if not self._pid(pid_file, program):
            with (self.dir / "log" / "start.log").open("ab") as log:
                subprocess.run(
                    argv,
                    env=self.env,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    check=True,
                    timeout=extend(30),
                )

    def _pid(self, pid_file: str, program: str) -> int | None:
        """Pid of a daemon of ours: it runs that program and holds a file of the cluster open."""
        with contextlib.suppress(OSError, ValueError):
            pid = int((self.dir / pid_file).read_text())
            if program.encode() in Path(f"/proc/{pid}/cmdline").read_bytes() and any(self._held(pid)):
                return pid
        return None

    def _held(self, pid: int) -> Iterator[str]:
        """Files below the cluster's directory that a process holds open."""
        with contextlib.suppress(OSError):
            for link in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    target = os.readlink(link)
                    if target.startswith(f"{self.dir}/"):
                        yield target

    def _steps(self, node: str | None = None) -> list[int]:
        """The slurmstepds of a node (or of all) and every process below them; a stepd holds its node's slurmd
        log open.
        """
        logs = {f"{self.dir}/log/slurmd.{name}.log" for name in ([node] if node else self.nodes)}
        stepds = [pid for pid in _pids() if _comm(pid) == "slurmstepd" and logs & set(self._held(pid))]
        return [pid for stepd in stepds for pid in (stepd, *_below(stepd))]

    def _escaped(self, node: str = "") -> list[int]:
        """Job processes, of a node or of all, that left their step, known by the job's environment."""
        wanted, found = f"SLURM_CONF={self.conf}", []
        for pid in _pids():
            with contextlib.suppress(OSError):
                env = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
                if wanted in env and all(
                    any(line.startswith(n) for line in env)
                    for n in ("SLURM_JOB_ID=", f"SLURMD_NODENAME={node}")
                ):
                    found.append(pid)
        return [pid for pid in found if pid not in _own_ancestry()]

    def _write_files(self, port0: int) -> None:
        for name in ("etc", "run", "log", "state", "spool", "munge", "dev"):
            (self.dir / name).mkdir(parents=True, exist_ok=True)
        for node in self.nodes:
            (self.dir / "spool" / node).mkdir(exist_ok=True)
        key = self.dir / "munge" / "munge.key"
        key.touch(0o600)
        key.write_bytes(os.urandom(128))
        for gpu in range(self.num_gpus):  # slurmd wants a character device, a link to one will do
            (self.dir / "dev" / f"nvidia{gpu}").symlink_to("/dev/null")
        gres = f"Name=gpu File={self.dir}/dev/nvidia[0-{self.num_gpus - 1}]\n" if self.num_gpus else ""
        (self.dir / "etc" / "gres.conf").write_text(gres)
        cgroup = "CgroupPlugin=disabled" if self.slurm.version >= (23, 11) else "CgroupAutomount=no"
        (self.dir / "etc" / "cgroup.conf").write_text(f"{cgroup}\n")
        lines = self._slurm_conf(port0).splitlines()
        kept = [
            line
            for line in lines
            if line in self.extra_conf.splitlines() or not line.startswith(self.without or ("\n",))
        ]
        self.conf.write_text("\n".join(kept) + "\n")

    def _slurm_conf(self, port0: int) -> str:
        user, host, here, n = _user(), socket.gethostname().split(".")[0], self.dir, self.num_nodes
        plugins = f"PluginDir={self.slurm.plugins}\n" if self.slurm.root else ""
        gres = f"Gres=gpu:{self.num_gpus}" if self.num_gpus else ""
        first_job = (
            int(time.time()) % 30_000_000 * 2 + 1000
        )  # fresh ids: a step of an earlier cluster must not meet its own again
        cores_per_socket = self.num_cpus // 2 // self.threads_per_core
        return f"""ClusterName=lab
FirstJobId={first_job}
{plugins}SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={here}/munge/munge.sock
CredType=cred/munge
SlurmctldPort={port0}
SlurmdPort={port0 + 1}
SlurmctldPidFile={here}/run/slurmctld.pid
SlurmdPidFile={here}/run/slurmd.%n.pid
SlurmctldLogFile={here}/log/slurmctld.log
SlurmdLogFile={here}/log/slurmd.%n.log
StateSaveLocation={here}/state
SlurmdSpoolDir={here}/spool/%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=1000
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0,bf_interval=1,bf_resolution=1,max_rpc_cnt=0
PriorityType=priority/basic
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
Licenses=abaqus:4
ReturnToService=2
SlurmdParameters=config_overrides
SlurmdTimeout=5
MessageTimeout=5
TCPTimeout=2
UnkillableStepTimeout=25
SlurmctldTimeout=20
InactiveLimit=0
KillWait=5
MinJobAge=3600
Waittime=0
JobRequeue=1
AccountingStorageType=accounting_storage/none
DebugFlags=NO_CONF_HASH
MailProg=/bin/true
PropagateResourceLimits=NONE
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
NodeName=n[1-{n}] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{port0 + 2}-{port0 + 1 + n}] Sockets=2 \
CoresPerSocket={cores_per_socket} ThreadsPerCore={self.threads_per_core} \
RealMemory={self.mem_mb} TmpDisk=1000 Feature=ib {gres} State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE DefaultTime=60 State=UP PriorityTier=1
PartitionName=short Nodes=n1 MaxTime=30 DefaultTime=10 State=UP PriorityTier=1
PartitionName=high Nodes=ALL MaxTime=INFINITE DefaultTime=60 State=UP PriorityTier=10
{self.extra_conf}"""


def speak_to(cluster: Cluster, monkeypatch: Any) -> None:
    """Make this process a client of the cluster until the test ends."""
    for name in [name for name in os.environ if name.startswith(LEAKS)]:
        monkeypatch.delenv(name)
    for name, value in cluster.client_env.items():
        monkeypatch.setenv(name, value)


def _user() -> str:
    import pwd

    return pwd.getpwuid(os.getuid()).pw_name


def _free_ports(count: int) -> int:
    """First of `count` free consecutive ports, outside of what systems hand out to clients."""
    for _ in range(200):
        first = random.randrange(20_000, 32_000 - count)
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + count):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first
    raise RuntimeError(f"no {count} free ports in a row between 20000 and 32000")


def _pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def _comm(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def _parent(pid: int) -> int:
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def _below(pid: int) -> list[int]:
    children: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            children += map(int, (task / "children").read_text().split())
    return [p for child in children for p in (child, *_below(child))]


def _own_ancestry() -> set[int]:
    pid, found = os.getpid(), set()
    while pid > 1 and pid not in found:
        found.add(pid)
        pid = _parent(pid)
    return found


def _running(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def _kill(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _stop(pids: list[int], grace_s: float) -> None:
    """TERM, some seconds, KILL."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while any(map(_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    _kill([pid for pid in pids if _running(pid)])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=["up", "down", "kill", "guard"])
    parser.add_argument("node", nargs="?")
    parser.add_argument("--dir", type=Path, default=Path(f"/tmp/hpc-rl-slurm-{os.getuid()}"))
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument(
        "--debs", type=Path, help="a folder with the packages; default: installed, cached or downloaded"
    )
    args = parser.parse_args()
    cluster = Cluster(args.dir.absolute(), find_or_fetch(debs=args.debs), args.nodes)
    if args.command == "up":
        cluster.up()
        for name, value in cluster.client_env.items():
            if value != os.environ.get(name):
                print(f"export {name}={shlex.quote(value)}")
    elif args.command == "down":
        cluster.down()
    elif (
        args.command == "guard"
    ):  # whoever has the other end of our input died, or says that it takes it down itself
        if not sys.stdin.buffer.read():
            cluster.down()
    elif args.node in cluster.nodes:
        cluster.kill_node(args.node)
    else:
        sys.exit(f"kill wants one of {', '.join(cluster.nodes)}")


if __name__ == "__main__":
    main()
