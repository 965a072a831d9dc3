"""Small trials to simulate."""

from typing import Any

from toy_plans import toy_unit

from hpc_rl.config.options.operations import FrequencyConfig
from hpc_rl.plan.schema import Unit
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
