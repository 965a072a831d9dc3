"""What a trial costs the scheduler, the file system and its first node: counted on a private Slurm of many nodes.

    python benchmarks/cluster_load.py [--nodes 16 32 64] [--replicas 2] [--seconds 60] [--out benchmarks/results/cluster_load.json]

Real are the supervisor, the agents, and what a server and the router of a rollout worker do beside their work
(leases, HTTP, what they read); servers have no model, the rollout role no prompts, the trainer does not train. Commands of
Slurm are counted by wrappers on the PATH. Calls on files of the trial directory are counted by strace, of the
supervisor, of one agent, one server and the rollout role, while nothing happens: names of files that are
opened, made, renamed, removed, asked for, and listings. All nodes are this host, so that times say little.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

from run_record import describe_run, write_record

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/faults"), str(ROOT / "tests/slurm"), str(ROOT / "tests/helpers")]

from cluster import Cluster  # noqa: E402
from packages import find_or_fetch  # noqa: E402
from supervised import HERE, Fake, unit  # noqa: E402

from hpc_rl.core.proc import is_alive  # noqa: E402
from hpc_rl.core.records import ProcessRecord  # noqa: E402
from hpc_rl.core.trial import write_json  # noqa: E402
from hpc_rl.name_resolve import keys, open_names  # noqa: E402

COMMANDS = ("srun", "sbatch", "scontrol", "squeue", "sinfo", "sacct", "scancel")
WRAPPER = '#!/bin/bash\necho "$EPOCHREALTIME $$ {name} $*" >> "{calls}"\nexec "{program}" "$@"\n'
SCRIPT = f"""#!/bin/bash
export PYTHONPATH={HERE}:{ROOT} SLURM_EXPORT_ENV=ALL
exec {sys.executable} -m hpc_rl.roles.supervisor --trial_dir "$1" --attempt $SLURM_JOB_ID.0 --steps srun
"""
CHANGES = re.compile(
    r"^(rename|link|symlink|unlink|mkdir|rmdir|creat|truncate|chmod)|O_CREAT|O_WRONLY|O_RDWR"
)


class IdleTrial(Fake):
    """A trial with one trainer node and servers on all others, as a job of a private cluster."""

    def __init__(self, root: Path, cluster: Cluster, num_nodes: int, replicas: int) -> None:
        super().__init__(root)
        self.cluster, self.num_nodes = cluster, num_nodes
        self.num_servers = (num_nodes - 1) * replicas
        self.calls_file = root / "calls"
        self.calls_file.touch()
        servers = [unit("server", index, nodes=(1 + index // replicas,)) for index in range(self.num_servers)]
        self.write({"trainer": ["serve"]}, units=[*servers, unit("rollout"), unit("trainer")])
        plan = json.loads(self.trial.plan_json.read_text())
        for one in plan["units"]:
            if one["role"] != "trainer":
                one["module"] = f"idle_{one['role']}"
        self.trial.plan_json.write_text(json.dumps(plan))
        write_json(self.trial.current_weights, {"label": "1.1", "path": "/published"})

    def submit(self) -> None:
        path, wrappers = self.cluster.env["PATH"], self.calls_file.parent / "bin"
        wrappers.mkdir()
        for name in COMMANDS:
            text = WRAPPER.format(name=name, calls=self.calls_file, program=shutil.which(name, path=path))
            (wrappers / name).write_text(text)
            (wrappers / name).chmod(0o755)
        script = self.trial.dir / "job.sh"
        script.write_text(SCRIPT)
        size = [f"--nodes={self.num_nodes}", "--ntasks-per-node=1", "--cpus-per-task=16", "--mem=8000M"]
        options = [*size, "--no-kill", "--time=60", f"--output={self.trial.dir}/job.out"]
        argv = ["sbatch", "--parsable", *options, str(script), str(self.trial.dir)]
        env = self.cluster.env | {"PATH": f"{wrappers}:{path}"}
        job_id = subprocess.run(argv, env=env, capture_output=True, text=True, check=True).stdout.strip()
        self.attempt = self.trial.attempt(f"{job_id}.0")

    def story(self) -> str:
        return (self.trial.dir / "job.out").read_text()[-3000:]

    def num_serving(self) -> int:
        seen = open_names(self.trial).list_leases(keys.servers("rollout"))
        return sum(one.alive and one.value["state"] in keys.ROUTABLE for one in seen.values())

    def calls(self) -> list[tuple[float, int, str, str]]:
        """Time (Unix seconds), pid, name and arguments of each command of Slurm."""
        rows = [line.split(" ", 3) for line in self.calls_file.read_text().splitlines()]
        return [(float(when), int(pid), name, arguments) for when, pid, name, arguments in rows]

    def process(self, name: str) -> ProcessRecord:
        record = ProcessRecord.read(sorted(self.attempt.processes.glob(f"{name}-*.*-rank0.json"))[0])
        assert record is not None and is_alive(record.pid, record.start_ticks), name
        return record


def sruns(trial: IdleTrial) -> dict[str, Any]:
    """Return how many steps of each role were started, how close together, and how many run now."""
    found = [call for call in trial.calls() if call[2] == "srun"]
    names = [re.search(r"--job-name=(\S+)", arguments)[1] for *_, arguments in found]  # type: ignore[index]
    steps = [(call, name) for call, name in zip(found, names, strict=True) if name != "preflight"]
    nodes = Counter(
        (name.partition("-")[0], re.search(r"--nodelist=(\S+)", call[3])[1])  # type: ignore[index]
        for call, name in steps
    )
    times = sorted(call[0] for call, _ in steps)
    return {
        "started": dict(Counter(name.partition("-")[0] for name in names)),
        "most_for_one_node_and_role": max(nodes.values()),
        "running": sum(Path(f"/proc/{call[1]}").exists() for call in found),
        "shortest_time_between_starts_ms": round(1000 * min(b - a for a, b in pairwise(times))),
        "most_starts_in_a_second": max(sum(a <= b < a + 1 for b in times) for a in times),
    }


def memory_mb(pids: list[int]) -> float:
    """Return what processes have in memory, shared parts divided by those that share them."""
    total_kb = 0
    for pid in pids:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        total_kb += int(re.search(r"^Pss:\s+(\d+)", text, re.MULTILINE)[1])  # type: ignore[index]
    return total_kb / 1024


def children(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += map(int, (task / "children").read_text().split())
    return found


def file_calls(trial: IdleTrial, seconds: float) -> dict[str, dict[str, Any]]:
    """Return, by process, the calls on files of the trial in a minute."""
    pids = {name: trial.process(name).pid for name in ("supervisor", "serveragent", "server", "rollout")}
    logs = {name: trial.calls_file.with_name(f"strace.{name}") for name in pids}
    calls = "trace=%file,getdents64,fsync,fdatasync"
    tracers = [
        subprocess.Popen(["strace", "-f", "-qq", "-y", "-s0", "-e", calls, "-o", logs[name], "-p", str(pid)])
        for name, pid in pids.items()
    ]
    time.sleep(seconds)
    for tracer in tracers:
        tracer.terminate()
        tracer.wait(30)
    found = {}
    for name, log in logs.items():
        rows = [line.split(None, 1)[1] for line in log.read_text().splitlines()]
        # A call that another thread interrupts has a second line, which begins with <.
        rows = [row for row in rows if not row.startswith("<") and str(trial.trial.dir) in row]
        found[name] = summary(rows, 60 / seconds)
    return found


def summary(rows: list[str], per_minute: float) -> dict[str, Any]:
    by_call = Counter(row.partition("(")[0] for row in rows)
    return {
        "all": round(len(rows) * per_minute, 1),
        "changes": round(sum(bool(CHANGES.search(row)) for row in rows) * per_minute, 1),
        "renames": round(sum(row.startswith("rename") for row in rows) * per_minute, 1),
        "fsyncs": round(sum("sync(" in row for row in rows) * per_minute, 1),
        "by_call": {name: round(count * per_minute, 1) for name, count in by_call.most_common()},
    }


def measure(trial: IdleTrial, seconds: float) -> dict[str, Any]:
    began = time.time()
    trial.submit()
    trial.until(lambda: trial.num_serving() == trial.num_servers, 900)
    up_s = time.time() - began
    time.sleep(20)  # the leases of the start have been renewed
    began = time.time()
    per_minute = file_calls(trial, seconds)
    minutes = (time.time() - began) / 60
    idle = Counter(name for when, _, name, _ in trial.calls() if when >= began)
    supervisor = trial.process("supervisor").pid
    clients = children(supervisor)
    clients += [below for pid in clients for below in children(pid)]
    agents = trial.num_nodes - 1
    total = per_minute["server"]["all"] * trial.num_servers + per_minute["serveragent"]["all"] * agents
    total += per_minute["supervisor"]["all"] + per_minute["rollout"]["all"]
    return {
        "nodes": trial.num_nodes,
        "servers": trial.num_servers,
        "srun": sruns(trial),
        "seconds_until_all_served": round(up_s),
        "scheduler_calls_at_start": dict(Counter(name for when, _, name, _ in trial.calls() if when < began)),
        "scheduler_calls_per_minute_while_idle": {name: round(idle[name] / minutes, 2) for name in COMMANDS},
        "file_calls_per_minute": per_minute,
        "file_calls_per_second_of_the_trial": round(total / 60, 1),
        "memory_mb_of_first_node": {
            "supervisor": round(memory_mb([supervisor])),
            "all_srun_clients": round(memory_mb(clients)),
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, nargs="+", default=[16, 32, 64])
    parser.add_argument("--replicas", type=int, default=2, help="servers of each node but the first")
    parser.add_argument("--seconds", type=float, default=60.0, help="that file calls are counted for")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    about = describe_run()
    runs = [measure_cluster(num_nodes, args.replicas, args.seconds) for num_nodes in args.nodes]
    found = {**about, "runs": runs, "file_calls_per_minute_by_nodes": compare_runs(runs)}
    print(json.dumps(found, indent=2))
    if args.out:
        write_record(args.out, found)


def measure_cluster(num_nodes: int, replicas: int, seconds: float) -> dict[str, Any]:
    with Cluster.private(find_or_fetch(), num_nodes, num_gpus=0) as cluster:
        root = Path(tempfile.mkdtemp(prefix="hpcrl-load-"))
        trial = IdleTrial(root, cluster, num_nodes, replicas)
        try:
            found = measure(trial, seconds)
        except BaseException:
            print(trial.story(), file=sys.stderr)
            raise
        cluster.cancel_all()
        shutil.rmtree(root)
    return found


def compare_runs(runs: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the calls of each process by the number of nodes, and the growth from the first to the last run."""
    found = {}
    for name in runs[0]["file_calls_per_minute"]:
        counts = {str(run["nodes"]): run["file_calls_per_minute"][name]["all"] for run in runs}
        first, *_, last = [*counts.values()] * 2
        found[name] = {**counts, "growth": round(last / first, 3) if first else 1.0}
    return found


if __name__ == "__main__":
    main()
