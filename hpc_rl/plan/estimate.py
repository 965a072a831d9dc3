"""What a trial needs, before anything is submitted: memory of GPUs and nodes, bytes on disk, steps. Pure.

Upper bounds where lengths are not known: every row as long as the configuration allows. A size that is known
(cluster.gpu_mem_gb, memory that the plan requests) and can't hold the trial is a problem, with what fits.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hpc_rl.config.options.experiment import Config, GRPOConfig, RWConfig, last_step
from hpc_rl.config.rules.training_rules import trained
from hpc_rl.core.allocation import TRAIN_BACKENDS, Train, parse
from hpc_rl.plan.disk_use import DiskUse, disk_use
from hpc_rl.plan.memory import GB, MB, Items, RankLoad, RankMemory, rank_memory, with_tokens
from hpc_rl.plan.model_shape import Models, ModelShape
from hpc_rl.plan.schema import Plan, Unit
from hpc_rl.plan.server_memory import ServerMemory, server_memories
from hpc_rl.plan.train_mesh import remainders

MAX_RANKS = 4096  # up to which a larger number is looked for


@dataclass(frozen=True, kw_only=True)
class Work:
    """Steps and what each of them trains on."""

    steps: int | None  # None where the number of rows is not known
    trajectories: int  # sequences of a step
    longest: int  # tokens
    rows_per_update: int  # over all ranks
    together: int = 1  # rows that stay in one micro-batch
    rows: int | None = None  # of the training data; None where they are not known or not a trial's own
    per_pass: float | None = None  # steps that they last

    @property
    def tokens(self) -> int:
        """Return the most tokens of a step."""
        return self.trajectories * self.longest


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What was estimated. `problems` refuse the trial."""

    load: RankLoad
    trainer: RankMemory
    ranks: int
    ranks_per_node: int
    gpu_bytes: int | None  # size of a GPU; None where it is not known, or there are none
    work: Work
    servers: list[ServerMemory]
    disk: DiskUse
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def rank_host_bytes(self) -> float:
        """CPU memory of a rank."""
        own = 0.0 if self.load.on_gpu else self.trainer.device_bytes
        return own + self.trainer.host_bytes

    @property
    def node_host_bytes(self) -> float:
        """CPU memory of the ranks on the first node."""
        return self.ranks_per_node * self.rank_host_bytes + sum(self.trainer.first.values())


def estimate(
    config: Config, plan: Plan, models: Models, num_rows: int | None = None, requests_memory: bool = False
) -> Estimate | None:
    """Return what a planned trial needs; None where the model is of a kind that is not known.

    `num_rows` of the training data; with `requests_memory` a node has no more than what the plan requests.
    """
    section, engine = trained(config)
    content = models.get(engine.path, {})
    shape = ModelShape.of(content)
    if shape is None:
        return None
    if engine.is_critic:  # one vector in place of the head
        shape = replace(shape, is_tied=True)
    unit = next(unit for unit in plan.units if unit.role == "trainer")
    work = _work(config, content, num_rows)
    load = _load(config, plan, shape, models, work)
    gpu_gb = config.cluster.gpu_mem_gb if load.on_gpu else None
    found = Estimate(
        load=load,
        trainer=rank_memory(load),
        ranks=unit.num_tasks,
        ranks_per_node=unit.tasks_per_node,
        gpu_bytes=gpu_gb * GB if gpu_gb else None,
        work=work,
        servers=server_memories(config, plan, models, gpu_gb),
        disk=disk_use(config, shape, work.steps, work.tokens),
    )
    notes = list(_notes(section, found, config))
    problems = [*_gpu_problems(section, found), *(server.problem for server in found.servers)]
    # Without a limit of a micro-batch, what a CPU rank holds depends on the rows; of one row it is certain.
    certain = replace(found, trainer=rank_memory(_certain(found)))
    if host := _host_problem(certain, unit):
        (problems if requests_memory else notes).append(host)
    elif (host := _host_problem(found, unit)) and (load.on_gpu or engine.mb_spec.max_tokens_per_mb):
        (problems if requests_memory and load.on_gpu else notes).append(host)
    return replace(found, problems=list(filter(None, problems)), notes=notes)


def _work(config: Config, content: Mapping[str, Any], num_rows: int | None) -> Work:
    size, limit = config.train_dataset.batch_size, content.get("max_position_embeddings")
    spec, updates = trained(config)[1].mb_spec, 1
    if isinstance(config, GRPOConfig):
        g, prompt = config.gconfig, config.train_dataset.max_length
        longest = g.max_tokens if prompt is None else min(g.max_tokens, prompt + g.max_new_tokens)
        rows, updates = size * g.n_samples, config.actor.ppo_n_minibatches
    else:
        rows = 2 * size if isinstance(config, RWConfig) else size
        longest = config.train_dataset.max_length or (
            (spec.max_tokens_per_mb or limit or 1) // spec.granularity
        )
    if isinstance(limit, int):
        longest = min(longest, limit)
    return Work(
        steps=last_step(config, num_rows),
        trajectories=rows,
        longest=longest,
        rows_per_update=-(-rows // updates),
        together=spec.granularity,
        rows=num_rows,
        per_pass=num_rows / size if num_rows else None,
    )


def _load(config: Config, plan: Plan, shape: ModelShape, models: Models, work: Work) -> RankLoad:
    load = RankLoad(
        shape=shape,
        engine=trained(config)[1],
        mesh=Train("fsdp"),
        on_gpu=plan.device == "cuda",
        tokens=0,
        longest=work.longest,
        saves=config.recover.mode != "disabled",
        saves_copies=config.recover.async_save,
    )
    load = _on_mesh(load, work, parse(plan.allocation).train or load.mesh)
    if not isinstance(config, GRPOConfig):
        return load
    load = replace(load, batch_tokens=work.tokens)
    if config.ref is None or not (config.actor.kl_ctl or config.actor.beta):
        return load
    reference_shape = ModelShape.of(models.get(config.ref.path, {}))
    return replace(load, reference=config.ref, reference_shape=reference_shape)


def _on_mesh(load: RankLoad, work: Work, mesh: Train) -> RankLoad:
    """Return the load with the share of the rows that a rank of the mesh has."""
    engine, budget = load.engine, load.engine.mb_spec.max_tokens_per_mb
    all_tokens = -(-work.rows_per_update // (mesh.d or 1)) * work.longest
    tokens = min(budget or all_tokens, all_tokens)
    number = max(engine.mb_spec.n_mbs or 1, -(-all_tokens // tokens))
    if engine.pad_to_maximum and budget:
        tokens = budget
    return replace(load, mesh=mesh, tokens=tokens, micro_batches=number)


# -- what can't fit, and what would


def _gpu_problems(section: str, found: Estimate) -> Iterator[str]:
    size, load = found.gpu_bytes, _certain(found)
    if size is None:
        return
    memory = rank_memory(load)
    if memory.device_bytes <= size:
        return
    parts = ", ".join(f"{name} {in_gb(part)}" for name, part in _by_size(memory.device_items)[:4])
    fits = "; or ".join(_ways(section, found, size)) or "nothing that is known here"
    yield (
        f"a trainer rank needs {in_gb(memory.device_bytes)} on its GPU, but cluster.gpu_mem_gb is "
        f"{size // GB}: {parts}. What fits: {fits}. cluster.gpu_mem_gb null omits this check."
    )


def _certain(found: Estimate) -> RankLoad:
    """Return the load without a doubt: where nothing limits a micro-batch, of one row."""
    load = found.load
    if load.engine.mb_spec.max_tokens_per_mb:
        return load
    return with_tokens(load, found.work.longest * found.work.together)


def _ways(section: str, found: Estimate, size: int) -> Iterator[str]:
    """Yield what would fit, each by one change, or by that and a smaller token budget."""
    load = found.load
    shortest = max(1024, found.work.longest * found.work.together)
    budget = f"{section}.mb_spec.max_tokens_per_mb"
    if not load.engine.gradient_checkpointing:
        again = replace(load, engine=replace(load.engine, gradient_checkpointing=True))
        if _fits(again, size):
            yield f"{section}.gradient_checkpointing true"
    if tokens := _most_tokens(load, shortest, size):
        yield f"{budget} {tokens} or less"
    for words, changed in _larger(section, found, shortest, size):
        if _fits(changed, size):
            yield words
        elif tokens := _most_tokens(changed, shortest, size):
            yield f"{words} with {budget} {tokens} or less"


def _larger(section: str, found: Estimate, shortest: int, size: int) -> Iterator[tuple[str, RankLoad]]:
    """Yield other sizes, more ranks and offloading.

    Of more ranks, as few as a smaller token budget allows and as many as need none.
    """
    load, work, per_node = found.load, found.work, found.ranks_per_node
    divided = (_on_mesh(load, work, mesh) for mesh in _meshes(found, found.ranks))
    if other := next((one for one in divided if _fits(with_tokens(one, shortest), size)), None):
        yield str(other.mesh), other
    step = load.mesh.units_per_replica
    most = min(MAX_RANKS, work.rows_per_update * step)
    candidates = [ranks for ranks in range(found.ranks + per_node, most + 1, per_node) if ranks % step == 0]
    more = [_on_mesh(load, work, replace(load.mesh, d=ranks // step)) for ranks in candidates]
    fewest = next((one for one in more if _fits(with_tokens(one, shortest), size)), None)
    enough = next((one for one in more if _fits(one, size)), None)
    if fewest is None and other is None:
        several = (_on_mesh(load, work, mesh) for ranks in candidates for mesh in _meshes(found, ranks))
        fewest = next((one for one in several if _fits(with_tokens(one, shortest), size)), None)
    for mesh, one in {one.mesh: one for one in (fewest, enough) if one}.items():
        yield f"{mesh} or more ranks", one
    engine = load.engine
    if load.is_megatron or engine.fsdp.offload_params or engine.optimizer is None:
        return
    if engine.gradient_checkpointing and not engine.fsdp.offload_activations:
        fsdp = replace(engine.fsdp, offload_activations=True)
        moved = replace(load, engine=replace(engine, fsdp=fsdp))
        yield f"{section}.fsdp.offload_activations true ({_host_words(found, moved)})", moved
    moved = replace(load, engine=replace(engine, optimizer=replace(engine.optimizer, offload=True)))
    yield f"{section}.optimizer.offload true ({_host_words(found, moved)})", moved
    optimizer = replace(engine.optimizer, offload=False)
    fsdp = replace(engine.fsdp, offload_params=True)
    moved = replace(load, engine=replace(engine, optimizer=optimizer, fsdp=fsdp))
    yield f"{section}.fsdp.offload_params true ({_host_words(found, moved)})", moved


def _meshes(found: Estimate, ranks: int) -> Iterator[Train]:
    """Yield meshes of as many ranks that divide the model further, those that change least first."""
    mesh, shape, work = found.load.mesh, found.load.shape, found.work
    stages = found.load.engine.megatron.virtual_pipeline_size
    doubled = [[1, 2, 4, 8] if letter in TRAIN_BACKENDS[mesh.backend].dimensions else [1] for letter in "tpc"]
    for t, p, c in sorted(itertools.product(*doubled), key=lambda sizes: (math.prod(sizes), sizes[1:])):
        if t * p * c == 1 or mesh.is_hybrid:
            continue
        tensor_of_experts = mesh.etp * (t if mesh.e > 1 else 1)
        other = replace(mesh, t=mesh.t * t, p=mesh.p * p, c=mesh.c * c, etp=tensor_of_experts)
        other = replace(other, d=ranks // other.units_per_replica)
        if other.t > found.ranks_per_node or other.num_units != ranks or ranks % other.multiple:
            continue
        if other.d and other.d <= work.rows_per_update and not any(remainders(other, shape, stages)):
            yield other


def _host_words(found: Estimate, load: RankLoad) -> str:
    other = replace(found, load=load, trainer=rank_memory(load))
    return f"launcher.trainer_mem_per_gpu {_needed_mb(other)}"


def _fits(load: RankLoad, size: int) -> bool:
    return rank_memory(load).device_bytes <= size


def _most_tokens(load: RankLoad, shortest: int, size: int) -> int | None:
    """Return the largest token budget that fits and holds the longest row, in whole thousands."""
    budgets = range(load.tokens // 1024 * 1024, shortest - 1, -1024)
    return next((tokens for tokens in budgets if _fits(with_tokens(load, tokens), size)), None)


def _needed_mb(found: Estimate) -> int:
    """Return launcher.trainer_mem_per_gpu that would do, rounded up."""
    return math.ceil(found.node_host_bytes / found.ranks_per_node / MB / 1000) * 1000


def _host_problem(found: Estimate, unit: Unit) -> str:
    given = unit.tasks_per_node * unit.mem_mb_per_task * MB
    if found.node_host_bytes <= given:
        return ""
    items = {**found.trainer.host, **({} if found.load.on_gpu else found.trainer.device_items)}
    largest = ", ".join(f"{name} {in_gb(size)}" for name, size in _by_size(items)[:3])
    first = ", ".join(f"{name} {in_gb(size)}" for name, size in found.trainer.first.items())
    ranks = f"{found.ranks_per_node} trainer rank{'s' if found.ranks_per_node > 1 else ''}"
    return (
        f"launcher.trainer_mem_per_gpu {unit.mem_mb_per_task}: {ranks} of the first node need up to "
        f"{in_gb(found.node_host_bytes)} of CPU memory, but have {in_gb(given)} (each rank: {largest}; the "
        f"first also: {first}). What fits: launcher.trainer_mem_per_gpu {_needed_mb(found)}."
    )


def _notes(section: str, found: Estimate, config: Config) -> Iterator[str]:
    load = found.load
    if load.on_gpu and found.gpu_bytes is None:
        yield "the size of the GPUs is not known, so nothing was compared with it: set cluster.gpu_mem_gb."
    unlimited = load.on_gpu and load.engine.mb_spec.max_tokens_per_mb is None
    if unlimited and load.tokens > found.work.longest * found.work.together:
        option = f"{section}.mb_spec.max_tokens_per_mb"
        whole = f"one micro-batch may have all rows of a rank, up to {load.tokens} tokens"
        yield f"WARNING: {option} is null: {whole}, and the GPU may run out of memory; set a limit."
    if found.gpu_bytes and not found.problems:
        used = found.trainer.device_bytes / found.gpu_bytes
        if 0.9 < used <= 1:
            yield f"a trainer rank fills {used:.0%} of its GPU: fragmentation may take the rest."


def _by_size(items: Items) -> list[tuple[str, float]]:
    return sorted(items.items(), key=lambda item: -item[1])


def in_gb(size: float) -> str:
    """Return a size as text, in GB of 1024 MB."""
    return f"{size / GB:.1f} GB" if size >= GB / 10 else f"{size / MB:.0f} MB"
