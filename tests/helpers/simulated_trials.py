"""Small trials to simulate."""

import json
from typing import Any

import numpy as np
from toy_plans import toy_unit

from hpc_rl.config.options.operations import FrequencyConfig
from hpc_rl.core.trial import Trial, write_json
from hpc_rl.core.types import Trajectory, TrajectoryGroup, encode
from hpc_rl.plan.schema import Unit
from hpc_rl.rollout.batch_log.ledger import GroupRecord, Ledger
from hpc_rl.rollout.sequencer import Rules
from hpc_rl.simulate.costs import Costs
from hpc_rl.simulate.setup import Setup

# a server's iteration takes 20 ms and 1 ms for each sequence; few completions are long
COSTS = Costs(
    decode_s=0.02,
    decode_sequence_s=0.001,
    prefill_token_s=0.0,
    prompt_tokens=10.0,
    reward_s=0.0,
    lengths=(5, 10, 10, 10, 60),
    train_s=1.0,
    train_token_s=0.001,
    train_scaling=1.0,
    train_ranks=1,
    batch_s=0.0,
    log_s=0.0,
    publish_write_s=0.2,
    publish_pause_s=0.1,
    save_s=2.0,
    load_s=3.0,
    start_job_s=1.0,
    start_step_s=0.0,
    start_server_s=5.0,
    start_rollout_s=2.0,
    start_trainer_s=4.0,
    start_unit_ops=0.0,
    end_s=1.0,
)


def make_units(num_servers: int, num_ranks: int, per_node: int = 1) -> tuple[Unit, ...]:
    """Return a trainer with `per_node` ranks on each of its nodes, and servers on a node each after it."""
    trainer_nodes = list(range(max(1, num_ranks // per_node)))
    first = len(trainer_nodes)
    servers = [toy_unit("server", index=i, nodes=[first + i]) for i in range(num_servers)]
    return (
        *servers,
        toy_unit("rollout"),
        toy_unit("trainer", nodes=trainer_nodes, tasks_per_node=num_ranks // len(trainer_nodes)),
    )


def make_small(
    num_servers: int = 2, num_ranks: int = 1, per_node: int = 1, save_every: int | None = 5, **more: Any
) -> Setup:
    """Return a trial of 20 steps of 8 prompts with 4 samples; `more` are fields of Rules or of Setup."""
    names = ("batch_size", "max_concurrent", "eta", "bound", "order", "queue_size")
    rules: dict[str, Any] = {"batch_size": 8, "max_concurrent": 16, "eta": 2}
    rules |= {name: more.pop(name) for name in names if name in more}
    units = make_units(num_servers, num_ranks, per_node)
    fields: dict[str, Any] = {
        "n_samples": 4,
        "max_new_tokens": 64,
        "total_steps": 20,
        "units": units,
        "n_nodes": 1 + max(node for unit in units for node in unit.nodes),
        "save": FrequencyConfig(freq_steps=save_every),
    }
    return Setup(rules=Rules(**rules), **{**fields, **more})


# -- files of a trial to measure

LENGTHS = (4, 8)  # tokens of the two completions of each group
PROMPT_TOKENS = 3
TOKEN_S = 0.05  # of a decode iteration


def make_group(index: int) -> TrajectoryGroup:
    rows = []
    for length in LENGTHS:
        mask = np.array([False] * PROMPT_TOKENS + [True] * length)
        zeros = np.zeros(len(mask), np.float32)
        steps = np.where(mask, 0, -1).astype(np.int32)
        ids = np.arange(len(mask), dtype=np.int32)
        rows.append(Trajectory(ids, mask, zeros, steps, steps, 0.0, "stop"))
    return TrajectoryGroup(index, rows)


def write_history(
    trial: Trial,
    num_steps: int = 12,
    ranks: int = 1,
    wait_s: float = 0.2,
    train_s: float | None = None,
    iteration_s: float = TOKEN_S,
) -> None:
    """Write metrics, a batch log, events and the use of two servers, as of a trial that has ended.

    An update takes 0.5 s and 1 ms for each token of a rank, or `train_s`.
    """
    attempt = trial.attempt("job.0")
    attempt.make_dirs()
    rows, now = [], 1020.0
    for step in range(1, num_steps + 1):
        tokens = 100 * (1 + step % 3)
        update_s = 0.5 + tokens / ranks * 0.001 if train_s is None else train_s
        parts = {"wait_s": wait_s, "train_s": update_s, "publish_s": 0.1}
        parts |= {"save_s": 1.5 if step % 4 == 0 else 0.0}
        step_s = sum(parts.values()) + 0.05
        now += step_s
        more = {"publish_write_s": 0.3, "publish_pause_s": 0.02, "num_tokens": tokens, "lineage": 0}
        rows.append({"step": step, "time": now, "step_s": step_s, **parts, **more})
    attempt.metrics(0).write_text("".join(json.dumps(row) + "\n" for row in rows))
    started = {"time": 1010.0, "event": "started", "role": "trainer", "index": 0, "incarnation": 0}
    attempt.events.write_text(json.dumps(started) + "\n")
    states = [{"event": "started", "time": 1000.0}, {"event": "ended", "time": now + 4.0}]
    trial.job_state("job").write_text("".join(json.dumps(line) + "\n" for line in states))
    write_json(trial.done, {})
    ledger = Ledger(trial.rollout)
    for index in range(20):
        group = make_group(index)
        ledger.append_group(GroupRecord.from_group(group, 0), encode(group))
    ledger.close()
    # ten requests on each of two servers, two at once
    request_s = max(LENGTHS) * iteration_s
    use = {"busy_s": 10 * request_s / 2, "request_s": 10 * request_s, "requests": 10}
    for server in range(2):
        path = attempt.server_use(server, 0)
        path.parent.mkdir(exist_ok=True)
        write_json(path, use)
