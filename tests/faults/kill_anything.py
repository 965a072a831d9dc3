"""A real trial of the toy, handed in by `hpc-rl submit`, whose processes are killed one after the other while
it trains.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from patience import extend, look
from promises import Promises, every_row, story
from toy_trials import make_toy, pid_of

from hpc_rl.core.files import JsonLines
from hpc_rl.core.proc import find_start_ticks, is_alive
from hpc_rl.core.trial import Trial, load_json
from hpc_rl.rollout.evaluation_log import HEAD_BYTES, load_outcomes
from hpc_rl.rollout.service import EVALUATIONS
from hpc_rl.schedulers import make_scheduler
from hpc_rl.stats.read import is_evaluation, load_history

VICTIMS = ("trainer", "server", "worker", "sequencer", "supervisor")
ROLES = {"sequencer": "rollout", "worker": "rollout"}
ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 400.0
REWARD = """import os, time

HELD = os.path.join(os.path.dirname(__file__), "held")


def score(prompt, completion, **columns):
    if os.path.exists(HELD):
        time.sleep(0.3)
    return sum(map(ord, completion)) % 7 / 7
"""

OPTIONS = {
    "experiment_name": "faults",
    "cluster.n_gpus_per_node": 0,
    "actor.gradient_checkpointing": False,
    "actor.optimizer.lr": 1e-3,
    "actor.optimizer.weight_decay": 0,
    "actor.reward_norm.mean_level": "group",
    "actor.reward_norm.std_level": "group",
    "gconfig.n_samples": 2,
    "gconfig.max_new_tokens": 4,
    "rollout.reward_fn": "some_reward:score",  # exact_match would give a random model nothing to learn from
    "rollout.reward_timeout_s": 300,  # no rejection depends on time
    "recover.mode": "auto",
    "recover.freq_steps": 5,
    "recover.retries": 20,
    "evaluator.freq_steps": 7,
    "launcher.inference_server_cpus_per_gpu": 1,
    "launcher.inference_server_mem_per_gpu": 2048,
    "launcher.trainer_cpus_per_gpu": 1,
    "launcher.trainer_mem_per_gpu": 2048,
    "launcher.rollout_cpus": 1,
    "launcher.rollout_mem_mb": 2048,
}


READY = {"allocation_mode": "embedded:d1+fsdp:d2", "rollout.max_head_offpolicyness": 2}
IN_ORDER = {
    "allocation_mode": "embedded:d2+fsdp:d1",
    "rollout.max_head_offpolicyness": 1,
    "rollout.batch_order": "in_order",
}
EXACT = {
    "allocation_mode": "embedded:d1+fsdp:d1",
    "rollout.max_head_offpolicyness": 0,
    "rollout.batch_order": "in_order",
    "embedded.batch_invariant": True,
}

SHARED = {**EXACT, "allocation_mode": "embedded:d1|fsdp:d1"}

NUM_HELD_OUT = 8
NUM_ROWS = 32  # of few.jsonl, an epoch that several trials see more than once


def make_workplace(folder: Path) -> Path:
    """Make the toy with NUM_HELD_OUT held-out prompts and a reward of the user's own; trials are submitted from here."""
    make_toy(folder, "base")
    heldout = folder / "task" / "heldout.jsonl"
    heldout.write_text("".join(heldout.read_text().splitlines(keepends=True)[:NUM_HELD_OUT]))
    rows = (folder / "task" / "train.jsonl").read_text().splitlines(keepends=True)[:NUM_ROWS]
    (folder / "task" / "few.jsonl").write_text("".join(rows))
    (folder / "some_reward.py").write_text(REWARD)
    return folder


@dataclass(frozen=True)
class Victim:
    """One process, by what tells it from any other."""

    pid: int
    start_ticks: int


@dataclass
class Trials:
    """Trials below one folder; `end_all` ends those that a failed test leaves."""

    folder: Path
    name: str
    started: list[Killed] = field(default_factory=list)

    def start(self, options: dict[str, object], suffix: str = "", **more: Any) -> Killed:
        self.started.append(Killed(self.folder, self.name + suffix, options, **more))
        return self.started[-1].submit()

    def end_all(self) -> None:
        for trial in self.started:
            trial.close()


def short_name(test_name: str) -> str:
    """A trial name of a test's."""
    return re.sub(r"\W+", "-", test_name.removeprefix("test_")).strip("-")[-50:].strip("-_")


@dataclass
class Killed:
    """A trial under fire.

    Args:
        folder: Of make_workplace.
        name: Trial name.
        options: Options on top of OPTIONS.
        scheduler: `local` or `slurm`.
        batch_size: Prompts per batch.
        total_steps: Of the trial.
        held: Its steps take their time until `release` or `finish`, so that whatever is to be done to it is done before its end.
    """

    folder: Path
    name: str
    options: dict[str, object]
    scheduler: str = "local"
    batch_size: int = 4
    total_steps: int = 24
    held: bool = False
    job_id: str = ""
    kills: list[tuple[str, int]] = field(default_factory=list)  # who, at which step

    def __post_init__(self) -> None:
        self.trial = Trial.of(self.folder / "runs", getpass.getuser(), "faults", self.name)
        in_order = self.options.get("rollout.batch_order") == "in_order"
        eta = int(str(self.options.get("rollout.max_head_offpolicyness", 0)))
        self.promises = Promises(self.trial, self.batch_size, self.total_steps, in_order, eta)

    def release(self) -> None:
        (self.folder / "held").unlink(missing_ok=True)

    def submit(self) -> Killed:
        if self.held:
            (self.folder / "held").touch()
        where = {
            "trial_name": self.name,
            "total_train_steps": self.total_steps,
            "cluster.fileroot": self.folder / "runs",
            "launcher.type": self.scheduler,
            "actor.path": self.folder / "base",
            "train_dataset.path": self.folder / "task" / "train.jsonl",
            "train_dataset.batch_size": self.batch_size,
            "valid_dataset.path": self.folder / "task" / "heldout.jsonl",
        }
        words = [f"{name}={value}" for name, value in {**OPTIONS, **where, **self.options}.items()]
        env = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        env["XDG_STATE_HOME"] = str(self.folder / "state")  # the index of trials
        command = [sys.executable, "-m", "hpc_rl.cli", "submit", "--json", *words]
        done = subprocess.run(
            command, cwd=self.folder, env=env, capture_output=True, text=True, timeout=extend(60)
        )
        assert done.returncode == 0, done.stderr
        self.job_id = json.loads(done.stdout)["job_id"]
        return self

    def kill_each(self, victims: Sequence[str], luck: random.Random, most_steps: int = 3) -> None:
        """Kill these, one after the other, each after 1 … most_steps further steps. Stops early where the
        trial is over.

        Args:
            victims: VICTIMS, or several at one instant as `server+trainer`.
            luck: Which process of a kind, and when.
            most_steps: See above.
        """
        for victim in victims:
            enough = self.num_rows() + luck.randint(1, most_steps)
            self.until(lambda enough=enough: self.num_rows() >= enough or self.over)
            time.sleep(luck.uniform(0.0, 0.3))
            self.until(lambda victim=victim: self.over or self._kill(victim, luck))
            if self.over:
                return

    def kill_in_turn(self, victim: str, holder: str, luck: random.Random) -> None:
        """Kill one while `holder`, trainer or servers, has the units that both share."""
        enough = self.num_rows() + 1
        self.until(lambda: self.num_rows() >= enough or self.over)
        self.until(lambda: self.over or (self.holder == holder and self._kill(victim, luck)))
        assert not self.over

    @property
    def holder(self) -> str:
        """Who has the shared units, by the newest log of a server."""
        logs = sorted(self.trial.attempts.glob("*/logs/server-*.log"), key=lambda path: path.stat().st_mtime)
        text = logs[-1].read_text() if logs else ""
        released = text.rfind("has released its memory")
        return "trainer" if released > text.rfind("is serving weights") else "servers"

    def kill_at_random(self, count: int, luck: random.Random, longest_pause_s: float) -> None:
        """Kill any process, `count` times, while roles start, load, save or end, too; every second time it
        has trained before.
        """
        for _ in range(count):
            rows = self.num_rows() if luck.random() < 0.5 else -1
            self.until(lambda rows=rows: self.num_rows() > rows or self.over)
            pause_ends = time.monotonic() + luck.uniform(0.0, longest_pause_s)
            self.until(lambda pause_ends=pause_ends: time.monotonic() >= pause_ends or self.over)
            self.until(lambda: self.over or self._kill(luck.choice(VICTIMS), luck))
            if self.over:
                return

    def _kill(self, what: str, luck: random.Random) -> bool:
        """One process of each kind in `a+b`, at one instant; false while there is none of a kind."""
        found = [self.find(one) for one in what.split("+")]
        if not all(found):
            return False
        step = self.step
        for victims in found:
            victim = luck.choice(victims)
            if is_alive(victim.pid, victim.start_ticks):
                with contextlib.suppress(ProcessLookupError):  # it may end between the two
                    os.kill(victim.pid, signal.SIGKILL)
        self.kills.append((what, step))
        print(f"{self.name}: killed {what} at step {step}", flush=True)
        return True

    def find(self, what: str) -> list[Victim]:
        """The living processes of a kind."""
        role = ROLES.get(what, what)
        records = [load_json(path) for path in self.trial.attempts.glob(f"*/processes/{role}-*.json")]
        found = []
        for row in filter(None, records):
            with contextlib.suppress(ProcessLookupError):
                found.append(Victim(pid_of(row), row["start_ticks"]))
        alive = [one for one in found if is_alive(one.pid, one.start_ticks)]
        return [child for one in alive for child in children(one.pid)] if what == "worker" else alive

    def finish(self) -> Killed:
        """Wait until the trial has ended by itself, and see that it is done and nobody of it is left."""
        self.release()
        self.until(lambda: self.over)
        end = JsonLines(self.trial.job_state(self.job_id)).poll()[-1]
        assert (end["event"], end["code"]) == ("ended", 0), f"{end}\n{story(self.trial)}"
        assert (load_json(self.trial.done) or {}).get("job_id") == self.job_id
        assert (self.trial.exports / "final" / "model.safetensors").exists()
        assert not list(self.trial.weights.iterdir()), "what was published for servers is removed"
        self.check_evaluations()
        self.until(lambda: not any(self.find(what) for what in VICTIMS))
        print(
            f"{self.name}: done; {len(self.kills)} kills, {self.promises.steps_repeated()} steps trained again",
            flush=True,
        )
        return self

    def check_evaluations(self) -> None:
        """No evaluation is missing, and no held-out prompt was lost or scored twice."""
        every = str(self.options.get("evaluator.freq_steps", OPTIONS["evaluator.freq_steps"]))
        before_last = [0] if every == "null" else range(0, self.total_steps, int(every))
        steps = [*before_last, self.total_steps]
        rows = load_history(self.trial).evaluations
        assert [row["step"] for row in rows] == steps
        assert {row["eval_num_prompts"] for row in rows} == {NUM_HELD_OUT}
        scored = list_scored(self.trial)
        assert scored and max(Counter(scored).values()) == 1, "a held-out prompt was scored twice"

    def weights(self) -> bytes:
        return (self.trial.exports / "final" / "model.safetensors").read_bytes()

    def close(self) -> None:
        """End what a failed test leaves."""
        self.release()
        if self.job_id and not self.over:
            scheduler = make_scheduler(self.scheduler, self.trial)
            scheduler.cancel(self.job_id)
            with contextlib.suppress(AssertionError):
                self.until(lambda: self.over, 60.0)

    def base_weights(self) -> bytes:
        return (self.folder / "base" / "model.safetensors").read_bytes()

    @property
    def over(self) -> bool:
        return any(event["event"] == "ended" for event in JsonLines(self.trial.job_state(self.job_id)).poll())

    @property
    def step(self) -> int:
        rows = [row for row in every_row(self.trial) if not is_evaluation(row)]
        return max(rows, key=lambda row: row["time"])["step"] if rows else 0

    def num_rows(self) -> int:
        return sum(not is_evaluation(row) for row in every_row(self.trial))

    def until(self, what: Callable[[], object], timeout_s: float = PATIENCE_S) -> None:
        deadline = time.monotonic() + extend(timeout_s)
        while not look(lambda: what() or self.promises.look(), 0.03):
            assert time.monotonic() < deadline, (
                f"waited in vain; kills so far {self.kills}\n{story(self.trial)}"
            )


def list_scored(trial: Trial) -> list[tuple[str, str, int]]:
    """Version, set and position of each outcome in the logs of the evaluations that are kept."""
    return [
        (folder.name, path.name.partition(".")[0], position)
        for folder in (trial.rollout / EVALUATIONS).iterdir()
        for path in sorted(folder.glob("*.log"))
        for position, _ in load_outcomes(path, path.read_bytes()[:HEAD_BYTES])
    ]


def children(pid: int) -> list[Victim]:
    """The living children of a process."""
    try:
        pids = [
            int(child)
            for task in Path(f"/proc/{pid}/task").iterdir()
            for child in (task / "children").read_text().split()
        ]
    except OSError:
        return []
    return [Victim(child, ticks) for child in pids if (ticks := find_start_ticks(child)) is not None]


def new_luck() -> random.Random:
    """A generator whose seed is printed; HPC_RL_FAULT_SEED sets it."""
    seed = int(os.environ.get("HPC_RL_FAULT_SEED", random.randrange(10**6)))
    print(f"HPC_RL_FAULT_SEED={seed}", flush=True)
    return random.Random(seed)


def shuffled(luck: random.Random, rounds: int = 1) -> list[str]:
    """All victims in random order, so many times."""
    victims: list[str] = []
    for _ in range(rounds):
        victims += luck.sample(VICTIMS, len(VICTIMS))
    return victims
