"""The outcome of a simulation: step times, staleness, goodput, makespan, and the first bottleneck."""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from hpc_rl.simulate.costs import Costs
from hpc_rl.simulate.job import Life
from hpc_rl.simulate.setup import Faults, Setup
from hpc_rl.simulate.trainer import StepRow
from hpc_rl.status.goodput import Bucket, Goodput

MAX_LIFE_S = 365 * 86400.0
SLACK = 0.1  # a smaller share of the steps' time is not a bottleneck


class Bottleneck(enum.StrEnum):
    """What limits a trial first."""

    SERVERS = "servers"
    TAIL = "tail"
    ROOM = "room"
    TRAINING = "training"
    PUBLICATION = "publication"
    EVALUATION = "evaluation"
    CHECKPOINTS = "checkpoints"
    FAILURES = "failures"
    STARTS = "starts"
    QUEUE = "queue"


ADVICE = {
    Bottleneck.SERVERS: "the trainer waits and the servers are full: give more GPUs to servers",
    Bottleneck.TAIL: "the trainer waits for the longest completions: raise rollout.max_head_offpolicyness",
    Bottleneck.ROOM: "the trainer waits and the servers have room: raise rollout.max_concurrent_rollouts, or "
    "rollout.max_head_offpolicyness",
    Bottleneck.TRAINING: "the trainer computes most of the time: give it more GPUs",
    Bottleneck.PUBLICATION: "new weights take longer than a step: use a faster file system, or another "
    "actor.weight_update_mode",
    Bottleneck.EVALUATION: "training waits for evaluations: set evaluator.blocking=false, or evaluate "
    "less often",
    Bottleneck.CHECKPOINTS: "training waits for saves: set recover.async_save=true, or save less often",
    Bottleneck.FAILURES: "lost steps are made again after failures: save more often",
    Bottleneck.STARTS: "jobs start and stop often: use longer jobs, or faster starts",
    Bottleneck.QUEUE: "jobs wait in the queue: use longer jobs",
}


@dataclass(frozen=True, kw_only=True)
class Result:
    """Predictions for one trial."""

    ended: bool  # within a year
    exit_code: int | None
    reason: str
    steps: int
    makespan_s: float  # from the submission to the end
    step_s: float  # mean, of steps that count, without the first one
    first_row_s: float  # from the start of the first job to the end of the first step
    parts_s: dict[str, float]  # mean of wait_s, train_s, publish_s, evaluate_s, save_s
    tokens_per_s: float  # trained on, prompts included, over the makespan
    steady_tokens_per_s: float  # from the end of the first quarter of the steps to the end of the last one
    staleness: dict[int, float]  # age -> share of the groups
    goodput: Goodput
    attempts: int
    lineages: int  # starts of a trainer
    node_failures: int
    servers_busy: float  # share of the steps' time
    servers_full: float
    bottleneck: Bottleneck
    calls: int  # of the virtual clock

    def to_json(self) -> dict[str, Any]:
        use = self.goodput
        return {
            "ended": self.ended,
            "exit_code": self.exit_code,
            "reason": self.reason,
            "steps": self.steps,
            "makespan_s": self.makespan_s,
            "step_s": self.step_s,
            "parts_s": self.parts_s,
            "tokens_per_s": self.tokens_per_s,
            "staleness": {str(age): share for age, share in self.staleness.items()},
            "goodput": use.share,
            "buckets": {str(bucket): seconds for bucket, seconds in use.buckets.items()},
            "allocation_s": use.allocation_s,
            "queued_s": use.queued_s,
            "attempts": self.attempts,
            "trainer_starts": self.lineages,
            "node_failures": self.node_failures,
            "servers_busy": self.servers_busy,
            "servers_full": self.servers_full,
            "bottleneck": str(self.bottleneck),
            "advice": ADVICE[self.bottleneck],
        }


def run(setup: Setup, costs: Costs, faults: Faults | None = None, seed: int = 0) -> Result:
    """Simulate a trial. Equal arguments give equal results."""
    life = Life(setup, costs, faults or Faults(), seed)
    ended = life.run(MAX_LIFE_S)
    rows = list({row.step: row for row in life.rows}.values())
    names = ("wait_s", "train_s", "publish_s", "evaluate_s", "save_s")
    parts = {name: fmean(getattr(row, name) for row in rows) if rows else 0.0 for name in names}
    step_s = fmean(row.step_s for row in rows[1:] or rows) if rows else 0.0
    goodput = life.timeline.compute_goodput()
    ages: Counter[int] = life.batches.sequencer.log.staleness
    total = ages.total() or 1
    fleet, spent_s = life.batches.fleet, sum(row.step_s for row in life.rows) or 1.0
    busy, full = min(1.0, fleet.busy_s / spent_s), min(1.0, fleet.full_s / spent_s)
    return Result(
        ended=ended,
        exit_code=life.exit_code,
        reason=life.reason,
        steps=len(rows),
        makespan_s=life.clock.now,
        step_s=step_s,
        first_row_s=life.rows[0].time - life.first_start_s if life.rows else 0.0,
        parts_s=parts,
        tokens_per_s=sum(life.trained_tokens.values()) / life.clock.now if life.clock.now else 0.0,
        steady_tokens_per_s=_compute_steady_rate(rows, life.trained_tokens),
        staleness={age: count / total for age, count in sorted(ages.items())},
        goodput=goodput,
        attempts=life.num_attempts,
        lineages=life.lineage + 1,
        node_failures=life.num_failed_nodes,
        servers_busy=busy,
        servers_full=full,
        bottleneck=_find_bottleneck(setup, parts, goodput, full),
        calls=life.clock.num_calls,
    )


def _compute_steady_rate(rows: list[StepRow], tokens: dict[int, float]) -> float:
    first, *later = rows[len(rows) // 4 :] or [StepRow(0, 0)]
    seconds = later[-1].time - first.time if later else 0.0
    return sum(tokens[row.step] for row in later) / seconds if seconds else 0.0


def _find_bottleneck(setup: Setup, parts: dict[str, float], goodput: Goodput, full: float) -> Bottleneck:
    """Return the activity with the largest part of the time."""
    buckets, allocation_s = goodput.buckets, goodput.allocation_s or 1.0
    spent_s = max((one.end for one in goodput.attempts), default=0.0) or 1.0
    outside = {
        Bottleneck.QUEUE: goodput.queued_s / spent_s,
        Bottleneck.FAILURES: buckets.get(Bucket.LOST, 0.0) / allocation_s,
        Bottleneck.STARTS: (buckets.get(Bucket.START, 0.0) + buckets.get(Bucket.STOP, 0.0)) / allocation_s,
    }
    inside = 1.0 - min(1.0, sum(outside.values()))
    total = sum(parts.values()) or 1.0
    waits = Bottleneck.SERVERS if full > 1 - SLACK else Bottleneck.ROOM
    if setup.rules.eta == 0:
        waits = Bottleneck.TAIL
    named = {
        waits: parts["wait_s"],
        Bottleneck.TRAINING: parts["train_s"],
        Bottleneck.PUBLICATION: parts["publish_s"],
        Bottleneck.EVALUATION: parts["evaluate_s"],
        Bottleneck.CHECKPOINTS: parts["save_s"],
    }
    shares = outside | {name: inside * seconds / total for name, seconds in named.items()}
    return max(shares, key=lambda name: shares[name])


def explain_result(result: Result) -> str:
    """Return the largest parts of a step as text."""
    parts = sorted(result.parts_s.items(), key=lambda item: -item[1])
    return ", ".join(f"{name.removesuffix('_s')} {seconds:.3g} s" for name, seconds in parts if seconds > 0)
