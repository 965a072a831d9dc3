"""What a planned trial needs, and how it is shown.

Of a model only config.json is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from hpc_rl.config.options.experiment import (
    Config,
    GRPOConfig,
    has_own_prompts,
    has_trainer,
    list_training_paths,
)
from hpc_rl.config.rules.slurm_rules import DERIVED
from hpc_rl.config.rules.training_rules import list_models
from hpc_rl.core import slurm_time
from hpc_rl.core.allocation import DEFAULT_POOL
from hpc_rl.core.refusal import Kind, Refusal
from hpc_rl.core.trial import load_json
from hpc_rl.datasets.rows import compute_fingerprint
from hpc_rl.doctor.machine import measure_usable_memory
from hpc_rl.plan.estimate import (
    DiskUse,
    Estimate,
    ServerMemory,
    ServersEstimate,
    Work,
    estimate,
    estimate_servers,
    format_gb,
    format_items,
)
from hpc_rl.plan.memory import MB, OFFLOADED, Items, Models
from hpc_rl.plan.schema import Plan

LABEL = 11  # width of the first column


def find_known_models(config: Config) -> Models:
    """Return the config.json of each model of a trial that can be read, by its path."""
    paths = [engine.path for _, engine in list_models(config)]
    if isinstance(config, GRPOConfig):
        paths += [pool.path for pool in config.pools.values() if pool.path]
    contents = {path: load_json(Path(path) / "config.json") for path in paths}
    return {path: content for path, content in contents.items() if isinstance(content, dict)}


def estimate_needs(
    config: Config, plan: Plan, known: Models, scheduler: str, count_rows: bool = False
) -> Estimate | ServersEstimate | None:
    """Return the needs of a trial; None if the model's config.json is not there or of an unknown kind.

    With `count_rows` the training data is read, if it is small.
    """
    if not has_trainer(config):
        return estimate_servers(config, plan, known)
    num_rows = None
    if count_rows and has_own_prompts(config):
        num_rows = compute_fingerprint(*list_training_paths(config)).get("rows")
    requests_memory = scheduler == "slurm" and config.launcher.slurm.mem == DERIVED
    found = estimate(config, plan, known, num_rows, requests_memory)
    if found is not None and scheduler == "local" and (problem := _check_this_machine(found)):
        found = replace(found, problems=[*found.problems, problem])
    return found


def _check_this_machine(found: Estimate) -> Refusal | None:
    """Return that the ranks hold more than the memory of this machine all the time."""
    if found.load.on_gpu:
        return None
    held, size = found.ranks * sum(found.trainer.standing.values()), measure_usable_memory()
    if held <= size:
        return None
    parts = ", ".join(found.trainer.standing)
    holds = f"the trainer holds {format_gb(held)} of {parts}"
    why = f"{holds}, but this machine has only {format_gb(size)} of memory"
    return Refusal(option="", kind=Kind.MACHINE, why=why, use="use a smaller model, or a cluster")


def make_json(found: Estimate | ServersEstimate) -> dict[str, Any]:
    """Return an estimate for --json; sizes in bytes."""
    of_all = {
        "servers": [asdict(one) | {"cached_tokens": one.cached_tokens} for one in found.servers],
        "problems": list(map(str, found.problems)),
    }
    if isinstance(found, ServersEstimate):
        return of_all
    trainer = found.trainer
    return {
        "rank": {
            "bytes": trainer.device_bytes,
            "moment": trainer.largest,
            "items": trainer.device_items,
            "cpu_bytes": found.rank_host_bytes,
            "cpu_items": trainer.host,
        },
        "gpu_bytes": found.gpu_bytes,
        "first_node_cpu_bytes": found.node_host_bytes,
        "tokens_per_micro_batch": found.load.tokens,
        "disk": asdict(found.disk),
        "steps": found.work.steps,
        "rows": found.work.rows,
        "steps_per_pass": found.work.per_pass,
        "trajectories_per_step": found.work.trajectories,
        "tokens_per_step": found.work.tokens,
        **of_all,
    }


def describe_needs(found: Estimate | ServersEstimate, config: Config, plan: Plan) -> list[str]:
    """Return the estimate as a table; sizes in GB of 1024 MB."""
    if isinstance(found, ServersEstimate):
        return [line for server in found.servers for line in _describe_servers(server, plan)]
    return [
        *_describe_work(found.work, config, plan),
        *_describe_ranks(found),
        *_describe_host(found, plan),
        *(line for server in found.servers for line in _describe_servers(server, plan)),
        *_describe_turns(found, plan),
        *_describe_disk(found.disk, sum(unit.pool == DEFAULT_POOL for unit in plan.units)),
    ]


def _format_row(label: str, text: str) -> str:
    return f"{label:<{LABEL}}{text}"


def _describe_items(items: Items) -> Iterator[str]:
    width = max(map(len, items), default=0)
    for name, size in items.items():
        if size:
            yield _format_row("", f"  {name:<{width}}  {format_gb(size):>9}")


def _describe_work(work: Work, config: Config, plan: Plan) -> Iterator[str]:
    steps = f"{work.steps} step{'' if work.steps == 1 else 's'}"
    if work.steps is None:
        steps = "a number of steps that depends on the rows"
    each = f"{work.trajectories} sequences of at most {work.longest} tokens"
    yield _format_row("work", f"{steps}, each of {each}, {_format_count(work.tokens)} tokens")
    if work.per_pass:
        yield _format_row("", f"one pass over the {work.rows} rows is {work.per_pass:.4g} steps")
    limit = config.train_dataset.max_length
    if limit is not None:
        is_cut = config.train_dataset.too_long == "truncate_left"
        what = "prompts are cut to the last" if is_cut else "rows are dropped that have more than"
        yield _format_row("", f"{what} {limit} tokens, by train_dataset.max_length")
    time, num_gpus = config.launcher.slurm.time, plan.n_nodes * plan.n_gpus_per_node
    if time and num_gpus:
        hours = (slurm_time.parse_time_limit(time) or 0) / 3600 * num_gpus
        yield _format_row(
            "", f"at most {hours:.0f} GPU-hours until the time limit {time}, on {num_gpus} GPUs"
        )


def _describe_ranks(found: Estimate) -> Iterator[str]:
    trainer, load = found.trainer, found.load
    of = f" of {format_gb(found.gpu_bytes)}" if found.gpu_bytes else ""
    where = f"{format_gb(trainer.device_bytes)}{of} on {'its GPU' if load.on_gpu else 'the CPU'}"
    yield _format_row(
        "memory", f"each of {found.ranks} trainer rank(s) at most {where}, during {trainer.largest}"
    )
    yield _format_row("", f"of a micro-batch of {load.tokens} tokens:")
    yield from _describe_items(trainer.device_items)


def _describe_host(found: Estimate, plan: Plan) -> Iterator[str]:
    trainer = next(unit for unit in plan.units if unit.role == "trainer")
    given = format_gb(trainer.tasks_per_node * trainer.mem_mb_per_task * MB)
    ranks = f"the {found.ranks_per_node} trainer rank(s) of the first node"
    first = format_items(found.trainer.first)
    total = f"{format_gb(found.node_host_bytes)} of {given} for {ranks}"
    also = "" if found.load.on_gpu else ", in addition"
    yield _format_row("", f"CPU memory: at most {total}; {first} on one of them; on each{also}:")
    yield from _describe_items(found.trainer.host)
    others: dict[str, float] = {}
    for unit in plan.units:
        if unit.role != "trainer" and 0 in unit.nodes:
            others[unit.role] = others.get(unit.role, 0) + unit.tasks_per_node * unit.mem_mb_per_task * MB
    if others:
        yield _format_row("", f"other roles of the first node, as requested: {format_items(others)}")


def _describe_servers(server: ServerMemory, plan: Plan) -> Iterator[str]:
    unit = "GPU" if plan.device == "cuda" else "process"
    text = (
        f"{server.backend} of pool {server.pool}: {format_gb(server.weight_bytes)} of weights on each {unit}"
    )
    if server.cache_bytes is not None:
        num_tokens = _format_count(server.cached_tokens or 0)
        left = f"{format_gb(max(0.0, server.cache_bytes))} left for {num_tokens} tokens"
        text += f", {left}"
    if server.token_bytes:
        text += f", {server.token_bytes / 1024:.0f} KB of keys and values each"
    yield _format_row("servers", text)


def _describe_turns(found: Estimate, plan: Plan) -> Iterator[str]:
    """Describe the memory of both phases if servers and trainer take turns."""
    if not plan.shares_gpus or not found.servers:
        return
    [server] = found.servers
    text = "the servers release weights, keys and values while the trainer trains"
    if found.load.on_gpu:
        offloaded = format_gb(found.trainer.host[OFFLOADED])
        cache = "keys and values" if server.cache_bytes is None else format_gb(max(0.0, server.cache_bytes))
        text = (
            f"a GPU has {format_gb(found.trainer.device_bytes)} of the trainer while it trains; then "
            f"{format_gb(server.weight_bytes)} of weights and {cache} of the server, and the trainer has "
            f"{offloaded} in CPU memory"
        )
    yield _format_row("turns", text)


def _describe_disk(disk: DiskUse, num_servers: int) -> Iterator[str]:
    if disk.per_step:
        readers = f"{num_servers} servers read" if num_servers > 1 else "the server reads"
        batch_log = f"up to {format_gb(disk.batch)} of batch log"
        parts = f"{format_gb(disk.weights)} published, which {readers}, and {batch_log}"
        yield _format_row("disk", f"each step writes {format_gb(disk.per_step)}: {parts}")
    saves = f"checkpoint {format_gb(disk.checkpoint)} ({disk.checkpoint_period})"
    yield _format_row(
        "" if disk.per_step else "disk", f"{saves}, export {format_gb(disk.export)} ({disk.export_period})"
    )
    kept = {
        "weights": disk.kept_weights,
        "checkpoints": disk.kept_checkpoints,
        "batch log": disk.kept_batches,
        "exports": disk.kept_exports,
    }
    kept = {name: size for name, size in kept.items() if size != 0}
    yield _format_row("", f"kept at most: {format_items(kept)}")


def _format_count(number: int) -> str:
    for size, unit in ((10**9, "billion"), (10**6, "million")):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return str(number)
