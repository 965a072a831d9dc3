"""A trial whose roles are the fake ones of this folder, and its real supervisor as a process or in a Slurm
job.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from patience import extend, look
from toy_plans import toy_plan
from toy_trials import is_running, pid_of

from hpc_rl.core.files import JsonLines
from hpc_rl.core.records import ProcessRecord
from hpc_rl.core.trial import Trial, write_json
from hpc_rl.plan.schema import Unit
from hpc_rl.render.scripts import render_steps

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
JOB = "local-7"
ENDLESS = 1_000_000  # generations


def unit(role: str, index: int = 0, tasks: int = 1, nodes: tuple[int, ...] = (0,), gpus: int = 0) -> Unit:
    return Unit(
        role=role,
        index=index,
        nodes=list(nodes),
        tasks_per_node=tasks,
        cpus_per_task=1,
        mem_mb_per_task=100,
        gpus_per_task=gpus,
        module=f"fake_{role}",
    )


class Fake:
    """A trial with fake roles and its supervisor."""

    def __init__(self, root: Path, job_id: str = JOB) -> None:
        self.trial = Trial(root / "u" / "e" / "t")
        self.trial.make_dirs()
        self.trial.make_secret()
        self.attempt = self.trial.attempt(f"{job_id}.0")
        self.supervisors: list[subprocess.Popen] = []

    def write(
        self,
        script: dict,
        mode: str = "auto",
        retries: int = 3,
        units: list[Unit] | None = None,
        rules: dict | None = None,
        allocation: str = "embedded:d1+fsdp:d1",
    ) -> None:
        units = units or [unit("server"), unit("rollout"), unit("trainer")]
        n_nodes = 1 + max(node for one in units for node in one.nodes)
        more = {"recover_mode": mode, "recover_retries": retries, "allocation": allocation}
        plan = toy_plan(units, sys.executable, n_nodes=n_nodes, **more)
        write_json(self.trial.plan_json, plan.to_json())
        (self.trial.scripts / "steps.sh").write_text(render_steps(plan, self.trial, Path.cwd()))
        config = {
            "experiment_name": "e",
            "trial_name": "t",
            "train_dataset": {"path": str(HERE)},
            "actor": {"path": str(HERE)},
        }
        write_json(self.trial.config_json, config | {"recover": {"mode": mode, **(rules or {})}})
        write_json(
            self.trial.dir / "script.json", {"total": 5, "server": ["serve"], "rollout": ["serve"], **script}
        )

    def start(self, steps: str = "process", **env: str) -> subprocess.Popen:
        argv = [sys.executable, "-m", "hpc_rl.roles.supervisor", "--trial_dir", str(self.trial.dir)]
        argv += ["--attempt", self.attempt.id, "--steps", steps]
        environ = {**os.environ, "PYTHONPATH": f"{HERE}:{ROOT}", **env}
        with (self.trial.dir / f"supervisor.{len(self.supervisors)}.log").open("wb") as log:
            process = subprocess.Popen(argv, env=environ, stdin=subprocess.DEVNULL, stderr=log)
        self.supervisors.append(process)
        return process

    def run(self, timeout_s: float = 120.0, **env: str) -> int:
        return self.start(**env).wait(extend(timeout_s))

    def end_training(self) -> None:
        """Let a trainer whose `total` is ENDLESS end with its next generation."""
        self.trial.generation(ENDLESS).mkdir()

    def events(self, event: str, role: str | None = None) -> list[dict]:
        rows = JsonLines(self.attempt.events).poll()
        return [row for row in rows if row["event"] == event and role in (None, row.get("role"))]

    def alive(self) -> list[ProcessRecord]:
        records = map(ProcessRecord.read, self.attempt.processes.glob("*.json"))
        return [
            one for one in records if one is not None and one.role != "supervisor" and is_running(vars(one))
        ]

    def newest(self, role: str, index: int) -> ProcessRecord | None:
        """The process of a unit that lives."""
        records = map(ProcessRecord.read, self.attempt.processes.glob(f"{role}-{index}.*-rank0.json"))
        return next((one for one in records if one and is_running(vars(one))), None)

    def replicas(self) -> dict[int, ProcessRecord]:
        """The servers that live, by their index."""
        indexes = {
            int(path.name.split("-")[1].split(".")[0]) for path in self.attempt.processes.glob("server-*")
        }
        found = {index: self.newest("server", index) for index in indexes}
        return {index: record for index, record in found.items() if record}

    def wait_for_new(self, known: dict[int, ProcessRecord], *replaced: int) -> dict[int, ProcessRecord]:
        """Wait until all the known servers run, these as other processes; return the servers of that moment."""
        servers: dict[int, ProcessRecord] = {}

        def are_new() -> bool:
            servers.clear()
            servers.update(self.replicas())
            return servers.keys() == known.keys() and all(servers[i] != known[i] for i in replaced)

        self.until(are_new)
        return servers

    def kill(self, role: str, index: int) -> None:
        record = self.newest(role, index)
        assert record is not None, f"{role} {index} does not run"
        os.kill(pid_of(vars(record)), signal.SIGKILL)

    def until(self, what, timeout_s: float = 90.0) -> None:
        deadline = time.monotonic() + extend(timeout_s)
        while not look(what):
            assert time.monotonic() < deadline, self.story()

    def story(self) -> str:
        return "\n".join(path.read_text()[-4000:] for path in sorted(self.trial.dir.glob("supervisor.*.log")))
