"""What a planned trial needs, and how it is shown.

Of a model only config.json is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from hpc_rl.config.options.experiment import Config, GRPOConfig, has_own_prompts
from hpc_rl.config.rules.slurm_rules import DERIVED
from hpc_rl.config.rules.training_rules import models
from hpc_rl.core import slurm_time
from hpc_rl.core.allocation import DEFAULT_POOL
from hpc_rl.core.trial import read_json
from hpc_rl.datasets.rows import fingerprint_in_passing
from hpc_rl.doctor.machine import usable_memory_bytes
from hpc_rl.plan.disk_use import DiskUse
from hpc_rl.plan.estimate import Estimate, Work, estimate, in_gb
from hpc_rl.plan.memory import Items
from hpc_rl.plan.model_shape import Models
from hpc_rl.plan.schema import Plan
from hpc_rl.plan.server_memory import ServerMemory

LABEL = 11  # width of the first column
KB, MB = 1 << 10, 1 << 20


def known_models(config: Config) -> Models:
    """Return the config.json of each model of a trial that can be read, by its path."""
    paths = [engine.path for _, engine in models(config)]
    if isinstance(config, GRPOConfig):
        paths += [pool.path for pool in config.pools.values() if pool.path]
    contents = {path: read_json(Path(path) / "config.json") for path in paths}
    return {path: content for path, content in contents.items() if isinstance(content, dict)}


def needs_of(
    config: Config, plan: Plan, known: Models, scheduler: str, count_rows: bool = False
) -> Estimate | None:
    """Return what a trial needs; None where the model's config.json is not there or of an unknown kind.

    With `count_rows` the training data is read, if it is small.
    """
    num_rows = None
    if count_rows and has_own_prompts(config):
        num_rows = fingerprint_in_passing(config.train_dataset.path).get("rows")
    requests_memory = scheduler == "slurm" and config.launcher.slurm.mem == DERIVED
    found = estimate(config, plan, known, num_rows, requests_memory)
    if found is not None and scheduler == "local" and (problem := _beyond_this_machine(found)):
        found = replace(found, problems=[*found.problems, problem])
    return found


def _beyond_this_machine(found: Estimate) -> str:
    """Return that the ranks hold more than the memory of this machine all the time, else ""."""
    if found.load.on_gpu:
        return ""
    held, size = found.ranks * sum(found.trainer.standing.values()), usable_memory_bytes()
    if held <= size:
        return ""
    parts = ", ".join(found.trainer.standing)
    holds = f"the trainer holds {in_gb(held)} of {parts}"
    return f"{holds}, and this machine has {in_gb(size)} of memory: use a smaller model, or a cluster."


def as_json(found: Estimate) -> dict[str, Any]:
    """Return an estimate for --json; sizes in bytes."""
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
        "servers": [asdict(one) | {"cached_tokens": one.cached_tokens} for one in found.servers],
        "disk": asdict(found.disk),
        "steps": found.work.steps,
        "rows": found.work.rows,
        "steps_per_pass": found.work.per_pass,
        "trajectories_per_step": found.work.trajectories,
        "tokens_per_step": found.work.tokens,
        "problems": found.problems,
    }


def lines(found: Estimate, config: Config, plan: Plan) -> list[str]:
    """Return the estimate as a table; sizes in GB of 1024 MB."""
    return [
        *_work_lines(found.work, config, plan),
        *_rank_lines(found),
        *_host_lines(found, plan),
        *(line for server in found.servers for line in _server_lines(server, plan)),
        *_disk_lines(found.disk, sum(unit.pool == DEFAULT_POOL for unit in plan.units)),
    ]


def _row(label: str, text: str) -> str:
    return f"{label:<{LABEL}}{text}"


def _item_lines(items: Items) -> Iterator[str]:
    width = max(map(len, items), default=0)
    for name, size in items.items():
        if size:
            yield _row("", f"  {name:<{width}}  {in_gb(size):>9}")


def _work_lines(work: Work, config: Config, plan: Plan) -> Iterator[str]:
    steps = "a number of steps that depends on the rows" if work.steps is None else _steps(work.steps)
    each = f"{work.trajectories} sequences of at most {work.longest} tokens"
    yield _row("work", f"{steps}, each of {each}, {_count(work.tokens)} tokens")
    if work.per_pass:
        yield _row("", f"one pass over the {work.rows} rows is {work.per_pass:.4g} steps")
    limit = config.train_dataset.max_length
    if limit is not None:
        is_cut = config.train_dataset.too_long == "truncate_left"
        what = "prompts are cut to the last" if is_cut else "rows are dropped that have more than"
        yield _row("", f"{what} {limit} tokens, by train_dataset.max_length")
    time, num_gpus = config.launcher.slurm.time, plan.n_nodes * plan.n_gpus_per_node
    if time and num_gpus:
        hours = (slurm_time.to_seconds(time) or 0) / 3600 * num_gpus
        yield _row("", f"at most {hours:.0f} GPU-hours until the time limit {time}, on {num_gpus} GPUs")


def _rank_lines(found: Estimate) -> Iterator[str]:
    trainer, load = found.trainer, found.load
    of = f" of {in_gb(found.gpu_bytes)}" if found.gpu_bytes else ""
    where = f"{in_gb(trainer.device_bytes)}{of} on {'its GPU' if load.on_gpu else 'the CPU'}"
    yield _row("memory", f"each of {found.ranks} trainer rank(s) at most {where}, during {trainer.largest}")
    yield _row("", f"of a micro-batch of {load.tokens} tokens:")
    yield from _item_lines(trainer.device_items)


def _host_lines(found: Estimate, plan: Plan) -> Iterator[str]:
    trainer = next(unit for unit in plan.units if unit.role == "trainer")
    given = in_gb(trainer.tasks_per_node * trainer.mem_mb_per_task * MB)
    ranks = f"the {found.ranks_per_node} trainer rank(s) of the first node"
    first = ", ".join(f"{name} {in_gb(size)}" for name, size in found.trainer.first.items())
    total = f"{in_gb(found.node_host_bytes)} of {given} for {ranks}"
    also = "" if found.load.on_gpu else ", in addition"
    yield _row("", f"CPU memory: at most {total}; {first} on one of them; on each{also}:")
    yield from _item_lines(found.trainer.host)
    others: dict[str, float] = {}
    for unit in plan.units:
        if unit.role != "trainer" and 0 in unit.nodes:
            others[unit.role] = others.get(unit.role, 0) + unit.tasks_per_node * unit.mem_mb_per_task
    text = ", ".join(f"{role} {in_gb(size * MB)}" for role, size in others.items())
    if text:
        yield _row("", f"other roles of the first node, as requested: {text}")


def _server_lines(server: ServerMemory, plan: Plan) -> Iterator[str]:
    unit = "GPU" if plan.device == "cuda" else "process"
    text = f"{server.backend} of pool {server.pool}: {in_gb(server.weight_bytes)} of weights on each {unit}"
    if server.cache_bytes is not None:
        left = f"{in_gb(max(0.0, server.cache_bytes))} left for {_count(server.cached_tokens or 0)} tokens"
        text += f", {left}"
    if server.token_bytes:
        text += f", {server.token_bytes / KB:.0f} KB of keys and values each"
    yield _row("servers", text)


def _disk_lines(disk: DiskUse, num_servers: int) -> Iterator[str]:
    if disk.per_step:
        readers = f"{num_servers} servers read" if num_servers > 1 else "the server reads"
        parts = (
            f"{in_gb(disk.weights)} published, which {readers}, and up to {in_gb(disk.batch)} of batch log"
        )
        yield _row("disk", f"each step writes {in_gb(disk.per_step)}: {parts}")
    saves = f"checkpoint {in_gb(disk.checkpoint)} ({disk.checkpoint_period})"
    yield _row(
        "" if disk.per_step else "disk", f"{saves}, export {in_gb(disk.export)} ({disk.export_period})"
    )
    kept = {
        "weights": disk.kept_weights,
        "checkpoints": disk.kept_checkpoints,
        "batch log": disk.kept_batches,
        "exports": disk.kept_exports,
    }
    texts = [
        f"{name} {'unknown' if size is None else in_gb(size)}" for name, size in kept.items() if size != 0
    ]
    yield _row("", f"kept at most: {', '.join(texts)}")


def _steps(number: int) -> str:
    return f"{number} step{'' if number == 1 else 's'}"


def _count(number: int) -> str:
    for size, unit in ((10**9, "billion"), (10**6, "million")):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return str(number)
