"""Trials of the toy, and the roles of a trial as processes without a supervisor: for tests of the trainer."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from held_trainer import CALLBACK, VARIABLE, find_permission
from patience import extend, look
from toy_plans import toy_plan
from toy_trials import make_toy

from hpc_rl.config.load.load import load
from hpc_rl.config.load.stored import to_dict
from hpc_rl.config.rules.check import check
from hpc_rl.core.allocation import DEFAULT_POOL
from hpc_rl.core.trial import Trial, write_json
from hpc_rl.plan.schema import Pool, Unit


def make_trial(folder: Path, name: str, kind: str, overrides: list[str]) -> Trial:
    """A trial as submit leaves it, with the model and data of `make_toy(folder, "base")`."""
    data = {"sft": "sft", "rw": "preferences", "dpo": "preferences", "grpo": "train"}[kind]
    section = "actor" if kind == "grpo" else "model"
    common = [
        f"trainer={kind}",
        "experiment_name=toy",
        f"trial_name={name}",
        f"cluster.fileroot={folder / 'runs'}",
        "cluster.n_gpus_per_node=0",
        f"train_dataset.path={folder / 'task' / f'{data}.jsonl'}",
        f"{section}.path={folder / 'base'}",
        f"{section}.gradient_checkpointing=false",
        f"{section}.attn_impl=sdpa",
        f"{section}.dtype=float32",
        f"{section}.optimizer.weight_decay=0",
        f"callbacks=[{CALLBACK}]",
    ]
    trial = Trial.of(folder / "runs", "user", "toy", name)
    trial.make_dirs()
    trial.make_secret()
    write_json(trial.config_json, to_dict(check(load([], [*common, *overrides])).config))
    return trial


def make_started_trial(folder: Path, name: str, overrides: list[str], num_ranks: int = 1) -> Trial:
    """A trial of GRPO with its plan, as job 1 starts it."""
    trial = make_trial(folder, name, "grpo", overrides)
    write_plan(trial, "grpo", num_ranks)
    write_json(trial.job("1"), {"job_id": "1", "start_mode": "auto"})
    return trial


def make_digit_toy(folder: Path) -> Path:
    """Make the toy, and a reward `digits:count`, which a random model does not always miss."""
    code = "def count(prompt, completion, **columns):\n    return sum(one.isdigit() for one in completion)\n"
    (folder / "digits.py").write_text(code)
    return make_toy(folder, "base")


def write_plan(trial: Trial, kind: str, num_ranks: int, allocation: str = "") -> None:
    modules = {
        "server": "hpc_rl.roles.server",
        "rollout": "hpc_rl.roles.rollout",
        "trainer": "hpc_rl.roles.trainer",
    }
    tasks = {"trainer": num_ranks} if kind != "grpo" else {"server": 1, "rollout": 1, "trainer": num_ranks}
    size = {"index": 0, "nodes": [0], "cpus_per_task": 1, "mem_mb_per_task": 1024, "gpus_per_task": 0}
    units = [
        Unit(
            role=role,
            tasks_per_node=count,
            module=modules[role],
            pool=DEFAULT_POOL if role == "server" else "",
            **size,  # type: ignore[arg-type]
        )
        for role, count in tasks.items()
    ]
    plan = toy_plan(
        units,
        sys.executable,
        experiment_name="toy",
        trial_name=trial.name,
        trainer=kind,
        allocation=allocation or f"{'embedded:d1+' if kind == 'grpo' else ''}fsdp:d{num_ranks}",
        pools=[Pool(name=DEFAULT_POOL, backend="embedded")] if kind == "grpo" else [],
    )
    write_json(trial.plan_json, plan.to_json())


@dataclass
class Roles:
    """Processes of one attempt; leaving the context kills what still runs."""

    trial: Trial
    attempt_id: str
    incarnations: dict[str, int] = field(default_factory=dict)
    processes: list[subprocess.Popen] = field(default_factory=list)

    def __enter__(self) -> Roles:
        self.trial.attempt(self.attempt_id).make_dirs()
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()
            process.stdin.close()

    def start(
        self, role: str, rank: int = 0, num_ranks: int = 1, stays_at: int | None = None
    ) -> subprocess.Popen:
        incarnation = self.incarnations.setdefault(role, 0)
        where = [
            "--trial_dir",
            str(self.trial.dir),
            "--attempt",
            self.attempt_id,
            "--incarnation",
            str(incarnation),
        ]
        env = {
            **os.environ,
            "HPC_RL_STEPS": "process",
            "HPC_RL_RANK": str(rank),
            "HPC_RL_NUM_RANKS": str(num_ranks),
        }
        tests = Path(__file__).resolve().parents[1]
        env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{tests.parent}:{tests / 'helpers'}"}
        env |= {} if stays_at is None else {VARIABLE: str(stays_at)}
        with self.log(role, rank).open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", f"hpc_rl.roles.{role}", *where],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=env,
            )
        self.processes.append(process)
        return process

    def trainer(self, num_ranks: int = 1, stays_at: int | None = None) -> list[subprocess.Popen]:
        """Start all ranks. They go no further than the step `stays_at`, before it is saved, until `go_on`."""
        return [self.start("trainer", rank, num_ranks, stays_at) for rank in range(num_ranks)]

    def go_on(self) -> None:
        """Let the trainer go beyond the step at which it stays."""
        find_permission(self.trial.dir, self.trial.attempt(self.attempt_id).job_id).touch()

    def ended(self, processes: list[subprocess.Popen], timeout_s: float = 180.0) -> list[int]:
        """Exit codes, with the supervisor's record of them; the next start of the trainer is a new
        incarnation.
        """
        codes = [process.wait(extend(timeout_s)) for process in processes]
        incarnation = self.incarnations["trainer"]
        row = {"event": "exited", "role": "trainer", "incarnation": incarnation, "code": codes[0]}
        with self.trial.attempt(self.attempt_id).events.open("a") as file:
            file.write(json.dumps(row) + "\n")
        self.incarnations["trainer"] = incarnation + 1
        return codes

    def log(self, role: str, rank: int = 0) -> Path:
        return self.trial.attempt(self.attempt_id).log(role, 0, self.incarnations.get(role, 0), rank)

    def rows(self, incarnation: int = 0) -> list[dict[str, Any]]:
        path = self.trial.attempt(self.attempt_id).metrics(incarnation)
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
        return [json.loads(line) for line in lines]

    def wait_for_step(self, step: int, incarnation: int = 0, timeout_s: float = 180.0) -> None:
        deadline = time.monotonic() + extend(timeout_s)

        def is_reached() -> bool:
            return any(row["step"] >= step and "loss" in row for row in self.rows(incarnation))

        while not look(is_reached, 0.05):
            assert time.monotonic() < deadline, (
                f"step {step} was not reached:\n{self.log('trainer').read_text()[-3000:]}"
            )
            assert any(process.poll() is None for process in self.processes)

    @staticmethod
    def kill(processes: list[subprocess.Popen]) -> None:
        """Kill them at one instant: a rank that sees another one die would end by itself, with another code."""
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for process in processes:
                process.send_signal(number)
