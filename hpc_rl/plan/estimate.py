"""Estimate the needs of a trial before its submission: memory of GPUs and nodes, bytes on disk, steps. Pure.

Unknown lengths count with their upper bounds: each row is as long as the configuration allows. If a known
size (cluster.gpu_mem_gb, or memory that the plan requests) can't hold the trial, this is a problem, and its
text lists changes that fit.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hpc_rl.config.options.experiment import (
    Config,
    DPOConfig,
    GRPOConfig,
    RWConfig,
    find_last_step,
    find_loaded_reference,
    has_trainer,
)
from hpc_rl.config.options.operations import FrequencyConfig
from hpc_rl.config.options.training import TrainEngineConfig
from hpc_rl.config.pool_view import view_pool
from hpc_rl.config.rules.training_rules import find_trained_model, list_trained_models
from hpc_rl.core.allocation import Servers, Train, parse
from hpc_rl.core.backends import SERVER_BACKENDS, TRAIN_BACKENDS
from hpc_rl.core.refusal import Kind, Refusal, make_note
from hpc_rl.plan.memory import (
    CUDA_BYTES,
    DTYPE_BYTES,
    GB,
    MB,
    PROCESS_BYTES,
    Items,
    Models,
    ModelShape,
    RankLoad,
    RankMemory,
    count_published,
    count_trained,
    estimate_rank_memory,
    limit_critic_tokens,
    limit_tokens,
    make_critic_load,
)
from hpc_rl.plan.schema import Plan, Unit
from hpc_rl.plan.train_mesh import find_remainders

MAX_RANKS = 4096  # upper limit of the search for more ranks
# Share of a GPU's nominal memory that programs can use: 79 GiB of an H100, 139 GiB of an H200 with 141 GB
USABLE_SHARE = 79 / 80
# Share of a GPU for weights and cache if the server decides it; the servers' defaults are close to it.
USUAL_SHARE = 0.9
_SHARES = {"sglang": "mem_fraction_static", "vllm": "gpu_memory_utilization"}
TOKEN_BYTES = 17.5  # per token in the batch log: id, log-probability, mask, version
# Sizes of the model: a version with all values, the differences after it, and the next one with all values.
# A test compares it with weights/disk_transport.py.
STORED_MODELS = 5
_GPU_MEMORY = "cluster.gpu_mem_gb"


@dataclass(frozen=True, kw_only=True)
class Work:
    """The number of steps, and the rows and tokens of a step."""

    steps: int | None  # None if the number of rows is unknown
    trajectories: int  # sequences of a step
    longest: int  # tokens
    rows_per_update: int  # over all ranks
    together: int = 1  # rows that stay in one micro-batch
    rows: int | None = None  # of the training data; None if unknown, or if the trial does not read them
    per_pass: float | None = None  # steps per pass over these rows

    @property
    def tokens(self) -> int:
        """Return the most tokens of a step."""
        return self.trajectories * self.longest


@dataclass(frozen=True, kw_only=True)
class ServerMemory:
    """Memory of a server of a pool, on each of its GPUs or in its process."""

    pool: str
    backend: str
    units: int  # GPUs or processes of a server
    weight_bytes: float  # on each of them
    token_bytes: float  # of keys and values of one token, on each of them
    cache_bytes: float | None = None  # left for keys and values; None if unknown
    problem: str = ""  # why it can't fit

    @property
    def cached_tokens(self) -> int | None:
        return None if self.cache_bytes is None else max(0, int(self.cache_bytes / self.token_bytes))


@dataclass(frozen=True, kw_only=True)
class DiskUse:
    """Bytes per event, and the bytes that stay; 0 if the event never happens."""

    weights: float  # published after each step
    batch: float  # logged in each step, at most
    checkpoint: float  # each
    export: float  # each
    kept_weights: float
    kept_checkpoints: float
    kept_batches: float | None  # None if checkpoints are not counted in steps
    kept_exports: float | None  # None if their number is unknown
    checkpoint_period: str
    export_period: str

    @property
    def per_step(self) -> float:
        """Bytes of each step, without checkpoints and exports."""
        return self.weights + self.batch


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The estimate of a trial; `problems` refuse it."""

    load: RankLoad
    trainer: RankMemory
    ranks: int
    ranks_per_node: int
    gpu_bytes: int | None  # usable memory of a GPU; None if unknown, or without GPUs
    work: Work
    servers: list[ServerMemory]
    disk: DiskUse
    problems: list[Refusal] = field(default_factory=list)
    notes: list[Refusal] = field(default_factory=list)

    @property
    def rank_host_bytes(self) -> float:
        """CPU memory of a rank."""
        own = 0.0 if self.load.on_gpu else self.trainer.device_bytes
        return own + self.trainer.host_bytes

    @property
    def node_host_bytes(self) -> float:
        """CPU memory of the ranks on the first node."""
        return self.ranks_per_node * self.rank_host_bytes + sum(self.trainer.first.values())


@dataclass(frozen=True, kw_only=True)
class ServersEstimate:
    """The estimate of a trial without a trainer; `problems` refuse it."""

    servers: list[ServerMemory]
    problems: list[Refusal]
    notes: list[Refusal] = field(default_factory=list)


def estimate_servers(config: Config, plan: Plan, models: Models) -> ServersEstimate | None:
    """Return the needs of a planned trial without a trainer; None for an unknown kind of model."""
    gpu_gb = config.cluster.gpu_mem_gb if plan.device == "cuda" else None
    servers = _estimate_servers(config, plan, models, gpu_gb)
    problems = [problem for server in servers if (problem := _refuse_server(server))]
    return ServersEstimate(servers=servers, problems=problems) if servers else None


def estimate(
    config: Config, plan: Plan, models: Models, num_rows: int | None = None, requests_memory: bool = False
) -> Estimate | None:
    """Return the needs of a planned trial; None for an unknown kind of model, and without a trainer.

    `num_rows` counts the rows of the training data. With `requests_memory` a node has only the memory that
    the plan requests.
    """
    section, engine = find_trained_model(config)
    content = models.get(engine.path, {})
    shape = ModelShape.of(content, engine.is_critic)
    if shape is None or not has_trainer(config):
        return None
    unit = next(unit for unit in plan.units if unit.role == "trainer")
    work = _estimate_work(config, content, num_rows)
    load = _estimate_load(config, plan, shape, models, work)
    gpu_gb = config.cluster.gpu_mem_gb if load.on_gpu else None
    found = Estimate(
        load=load,
        trainer=estimate_rank_memory(load),
        ranks=unit.num_tasks,
        ranks_per_node=unit.tasks_per_node,
        gpu_bytes=int(gpu_gb * GB * USABLE_SHARE) if gpu_gb else None,
        work=work,
        servers=_estimate_servers(config, plan, models, gpu_gb),
        disk=_estimate_disk(config, shape, load.critic_shape, work.steps, work.tokens),
    )
    notes = list(_list_notes(section, found, config))
    problems = [*_find_gpu_problems(section, found), *(_refuse_server(server) for server in found.servers)]
    for one in _check_copies(config, plan, shape):
        (problems if requests_memory else notes).append(replace(one, is_note=not requests_memory))
    # Without a limit of micro-batches the memory of a CPU rank depends on the rows; one row is certain.
    certain = replace(found, trainer=estimate_rank_memory(_limit_to_certain(found)))
    if host := _find_host_problem(certain, unit):
        (problems if requests_memory else notes).append(replace(host, is_note=not requests_memory))
    elif (host := _find_host_problem(found, unit)) and (load.on_gpu or engine.mb_spec.max_tokens_per_mb):
        is_note = not (requests_memory and load.on_gpu)
        (notes if is_note else problems).append(replace(host, is_note=is_note))
    return replace(found, problems=list(filter(None, problems)), notes=notes)


def _estimate_work(config: Config, content: Mapping[str, Any], num_rows: int | None) -> Work:
    size, limit = config.train_dataset.batch_size, content.get("max_position_embeddings")
    spec, updates = find_trained_model(config)[1].mb_spec, 1
    if isinstance(config, GRPOConfig):
        g, prompt = config.gconfig, config.train_dataset.max_length
        longest = g.max_tokens if prompt is None else min(g.max_tokens, prompt + g.max_new_tokens)
        rows, updates = size * g.n_samples, config.actor.ppo_n_minibatches
    else:
        rows = 2 * size if isinstance(config, RWConfig | DPOConfig) else size
        longest = config.train_dataset.max_length or (
            (spec.max_tokens_per_mb or limit or 1) // spec.granularity
        )
    if isinstance(limit, int):
        longest = min(longest, limit)
    return Work(
        steps=find_last_step(config, num_rows),
        trajectories=rows,
        longest=longest,
        rows_per_update=-(-rows // updates),
        together=spec.granularity,
        rows=num_rows,
        per_pass=num_rows / size if num_rows else None,
    )


def _estimate_load(config: Config, plan: Plan, shape: ModelShape, models: Models, work: Work) -> RankLoad:
    load = RankLoad(
        shape=shape,
        engine=find_trained_model(config)[1],
        mesh=Train("fsdp"),
        on_gpu=plan.device == "cuda",
        tokens=0,
        longest=work.longest,
        saves=config.recover.mode != "disabled",
        saves_copies=config.recover.async_save,
    )
    load = _apply_mesh(load, work, parse(plan.allocation).train or load.mesh)
    if not isinstance(config, GRPOConfig | DPOConfig):
        return load
    if isinstance(config, GRPOConfig):
        load = replace(load, batch_tokens=work.tokens, publishes=True, shares_gpu=plan.shares_gpus)
        if config.critic is not None:
            load = replace(load, critic=config.critic, critic_shape=_measure_critic(config.critic, models))
    reference = find_loaded_reference(config)
    if reference is None:
        return load
    reference_shape = ModelShape.of(models.get(reference.path, {}))
    return replace(load, reference=reference, reference_shape=reference_shape)


def _measure_critic(critic: TrainEngineConfig, models: Models) -> ModelShape | None:
    return ModelShape.of(models.get(critic.path, {}), is_critic=True)


def _apply_mesh(load: RankLoad, work: Work, mesh: Train) -> RankLoad:
    """Return the load of a rank on a mesh, with its share of the rows."""
    engine, budget = load.engine, load.engine.mb_spec.max_tokens_per_mb
    all_tokens = -(-work.rows_per_update // (mesh.d or 1)) * work.longest
    tokens = min(budget or all_tokens, all_tokens)
    number = max(engine.mb_spec.n_mbs or 1, -(-all_tokens // tokens))
    if engine.pad_to_maximum and budget:
        tokens = budget
    return replace(load, mesh=mesh, tokens=tokens, micro_batches=number)


# -- servers


def _estimate_servers(config: Config, plan: Plan, models: Models, gpu_gb: int | None) -> list[ServerMemory]:
    """Return one entry for each pool whose model is known."""
    if not isinstance(config, GRPOConfig):
        return []
    views = [(view_pool(config, servers.pool), servers) for servers in parse(plan.allocation).pools]
    return [
        _estimate_server(view, servers, shape, plan, gpu_gb)
        for view, servers in views
        if (shape := ModelShape.of(models.get(view.actor.path, {}), view.actor.is_critic))
    ]


def _estimate_server(
    view: GRPOConfig, servers: Servers, shape: ModelShape, plan: Plan, gpu_gb: int | None
) -> ServerMemory:
    """Return the memory of a server on each of its GPUs; on CPUs, of each of its ranks."""
    section, backend = getattr(view, servers.backend), SERVER_BACKENDS[servers.backend]
    on_gpus, cache_bytes, problem = plan.device == "cuda" and backend.on_gpus, None, ""
    weight_bytes, token_bytes = _count_weights(section, servers, shape, servers.t)
    if not on_gpus:
        given = view.launcher.inference_server_mem_per_gpu * MB
        if backend.is_process or not view.actor.is_critic:
            cache_bytes = max(0.0, given - PROCESS_BYTES[False] - weight_bytes)
        else:
            token_bytes = 0.0  # it keeps nothing
    elif gpu_gb is not None:
        share = getattr(section, _SHARES[servers.backend]) or USUAL_SHARE
        cache_bytes = gpu_gb * GB * USABLE_SHARE * share - weight_bytes
        if plan.shares_gpus:  # CUDA of the trainer stays
            cache_bytes -= CUDA_BYTES
        if cache_bytes < token_bytes:
            problem = _describe_too_large(view, servers, shape, gpu_gb, share)
    return ServerMemory(
        pool=servers.pool,
        backend=servers.backend,
        units=servers.units_per_replica,
        weight_bytes=weight_bytes,
        token_bytes=token_bytes,
        cache_bytes=cache_bytes,
        problem=problem,
    )


def _count_weights(section: Any, servers: Servers, shape: ModelShape, num_parts: int) -> tuple[float, float]:
    """Return the bytes of the weights, and of a token's keys and values, on one of `num_parts` GPUs."""
    value_bytes = DTYPE_BYTES[shape.dtype if section.dtype == "auto" else section.dtype]
    if section.dtype == "auto" and shape.dtype == "float32":
        value_bytes = 2  # both servers convert to bfloat16
    if getattr(section, "quantization", None):
        value_bytes = 1
    moved = (getattr(section, "cpu_offload_gb", 0) or 0) * GB
    cache_value_bytes = 1 if "fp8" in str(getattr(section, "kv_cache_dtype", "")) else value_bytes
    weight_bytes = max(0.0, value_bytes * shape.num_params / num_parts / servers.p - moved)
    return weight_bytes, shape.count_cache_bytes(cache_value_bytes) / num_parts / servers.p


def _describe_too_large(
    view: GRPOConfig, servers: Servers, shape: ModelShape, gpu_gb: int, share: float
) -> str:
    section, usable = getattr(view, servers.backend), gpu_gb * GB * USABLE_SHARE * share
    weight_bytes, _ = _count_weights(section, servers, shape, servers.t)
    n_nodes, n_gpus = view.cluster.n_nodes, view.cluster.n_gpus_per_node
    most_nodes = n_nodes - 1 if has_trainer(view) else n_nodes  # a trainer needs a node beside theirs
    within, spanning = range(2, n_gpus + 1), range(2 * n_gpus, n_gpus * most_nodes + 1, n_gpus)
    sizes = (t for t in (2, 4, 8, 16, 32) if t > servers.t and (t in within or t in spanning))
    enough = next((t for t in sizes if sum(_count_weights(section, servers, shape, t)) < usable), None)
    fits = f"{servers.backend} with t{enough}" if enough else "larger GPUs"
    limit = f"{servers.backend}.{_SHARES[servers.backend]} {share:g} of cluster.gpu_mem_gb {gpu_gb}"
    return (
        f"a server of pool {servers.pool} needs {weight_bytes / GB:.1f} GB of weights on each GPU, but "
        f"{limit} leaves {usable / GB:.1f} GB. What fits: {fits}."
    )


# -- disk


def _estimate_disk(
    config: Config, shape: ModelShape, critic: ModelShape | None, steps: int | None, tokens_per_step: int
) -> DiskUse:
    """Return the disk use of a trial; `tokens_per_step` is an upper bound."""
    engines = [engine for _, engine in list_trained_models(config)]
    counts = [
        (engine, count_trained(one, engine))
        for engine, one in zip(engines, filter(None, (shape, critic)), strict=False)
    ]
    trained = sum(count for _, count in counts)
    export = float(sum(DTYPE_BYTES[engine.dtype] * count for engine, count in counts))
    policy = find_trained_model(config)[1]
    weights = float(DTYPE_BYTES[policy.dtype] * count_published(shape, policy))
    generates, saves = isinstance(config, GRPOConfig), config.recover.mode != "disabled"
    checkpoint = 12.0 * trained if saves else 0.0
    batch = _count_token_bytes(config) * tokens_per_step if isinstance(config, GRPOConfig) else 0.0
    recover, saver = config.recover, config.saver
    history = (config.weights.history_gb or 0.0) * GB if isinstance(config, GRPOConfig) else 0.0
    num_kept = recover.keep + recover.keep_best + 1  # one more during its write
    if recover.keep_every_steps and steps:
        num_kept += steps // recover.keep_every_steps
    kept_batches = None
    if recover.freq_steps and saves:
        kept_batches = batch * recover.freq_steps * (recover.keep + 1)
    return DiskUse(
        weights=weights if generates else 0.0,
        batch=batch,
        checkpoint=checkpoint,
        export=export,
        kept_weights=max(STORED_MODELS * weights, history) if generates else 0.0,
        kept_checkpoints=num_kept * checkpoint,
        kept_batches=kept_batches if generates else 0.0,
        kept_exports=_estimate_kept_exports(config, export, steps),
        checkpoint_period=_describe_period(recover) if saves else "never",
        export_period=", ".join(filter(None, [_describe_period(saver), "at the end"])),
    )


def _count_token_bytes(config: GRPOConfig) -> float:
    """Return the bytes of a token in the batch log, with the scores of a teacher."""
    return TOKEN_BYTES + (0 if config.distillation is None else 4 + 8 * config.distillation.top_k)


def _estimate_kept_exports(config: Config, export: float, steps: int | None) -> float | None:
    saver = config.saver
    always = 1 + (saver.keep_best is not None)  # final, best
    if not (saver.freq_steps or saver.freq_epochs or saver.freq_secs):
        return export * always
    if saver.keep_last:
        return export * (always + saver.keep_last)
    if saver.freq_secs:
        return None
    number = 0
    if saver.freq_steps:
        if steps is None:
            return None
        number += steps // saver.freq_steps
    if saver.freq_epochs:
        if config.total_train_epochs is None:
            return None
        number += config.total_train_epochs // saver.freq_epochs
    return export * (always + number)


def _describe_period(options: FrequencyConfig) -> str:
    periods = (("epochs", options.freq_epochs), ("steps", options.freq_steps), ("s", options.freq_secs))
    return ", ".join(f"every {number} {unit}" for unit, number in periods if number)


# -- problems, and changes that fit


def _refuse_server(server: ServerMemory) -> Refusal | None:
    if not server.problem:
        return None
    related = (_GPU_MEMORY, "allocation_mode")
    return Refusal(option="", kind=Kind.MACHINE, why=server.problem, related=related)


def _find_gpu_problems(section: str, found: Estimate) -> Iterator[Refusal]:
    size, load = found.gpu_bytes, _limit_to_certain(found)
    if size is None:
        return
    memory = estimate_rank_memory(load)
    if memory.device_bytes <= size:
        return
    fits = "; or ".join(_find_remedies(section, found, size)) or "no change that hpc-rl knows"
    nominal_gb, largest = round(size / GB / USABLE_SHARE), _format_largest(memory.device_items, 4)
    why = (
        f"a trainer rank needs {format_gb(memory.device_bytes)} on its GPU, but {_GPU_MEMORY} {nominal_gb} "
        f"leaves {format_gb(size)}: {largest}. What fits: {fits}. "
        f"{_GPU_MEMORY} null disables this check"
    )
    yield Refusal(option="", kind=Kind.MACHINE, why=why, related=(_GPU_MEMORY, "allocation_mode"))


def _limit_to_certain(found: Estimate) -> RankLoad:
    """Return the certain load: micro-batches of one row if nothing limits them."""
    load, row = found.load, found.work.longest * found.work.together
    if (
        load.critic_shape is not None
        and load.critic is not None
        and not load.critic.mb_spec.max_tokens_per_mb
    ):
        load = limit_critic_tokens(load, row)
    return load if load.engine.mb_spec.max_tokens_per_mb else limit_tokens(load, row)


@dataclass(frozen=True)
class _Changed:
    """The model whose options the remedies change: the one that needs more memory."""

    section: str
    is_critic: bool = False

    @classmethod
    def choose(cls, section: str, load: RankLoad) -> _Changed:
        if load.critic_shape is None:
            return cls(section)
        policy = estimate_rank_memory(replace(load, critic=None))
        larger = estimate_rank_memory(make_critic_load(load)).device_bytes > policy.device_bytes
        return cls("critic", True) if larger else cls(section)

    def get_engine(self, load: RankLoad) -> TrainEngineConfig:
        return load.critic if self.is_critic and load.critic is not None else load.engine

    def replace_engine(self, load: RankLoad, engine: TrainEngineConfig) -> RankLoad:
        return replace(load, critic=engine) if self.is_critic else replace(load, engine=engine)

    def count_tokens(self, load: RankLoad) -> int:
        return make_critic_load(load).tokens if self.is_critic else load.tokens

    def limit_tokens(self, load: RankLoad, tokens: int) -> RankLoad:
        return limit_critic_tokens(load, tokens) if self.is_critic else limit_tokens(load, tokens)


def _find_remedies(section: str, found: Estimate, size: int) -> Iterator[str]:
    """Yield changes that fit, each alone or together with a smaller token budget."""
    load = found.load
    model = _Changed.choose(section, load)
    shortest = max(1024, found.work.longest * found.work.together)
    budget = f"{model.section}.mb_spec.max_tokens_per_mb"
    if not model.get_engine(load).gradient_checkpointing:
        again = model.replace_engine(load, replace(model.get_engine(load), gradient_checkpointing=True))
        if _can_fit(again, size):
            yield f"{model.section}.gradient_checkpointing true"
    if tokens := _find_most_tokens(model, load, shortest, size):
        yield f"{budget} {tokens} or less"
    for words, changed in _find_larger(model, found, shortest, size):
        if _can_fit(changed, size):
            yield words
        elif tokens := _find_most_tokens(model, changed, shortest, size):
            yield f"{words} with {budget} {tokens} or less"


def _find_larger(
    model: _Changed, found: Estimate, shortest: int, size: int
) -> Iterator[tuple[str, RankLoad]]:
    """Yield (words, load) for other meshes, more ranks, and offloading.

    For more ranks these are the fewest that fit with a smaller token budget, and the fewest that fit without.
    """
    load, work, per_node = found.load, found.work, found.ranks_per_node
    divided = (_apply_mesh(load, work, mesh) for mesh in _list_meshes(found, found.ranks))
    if other := next((one for one in divided if _can_fit(model.limit_tokens(one, shortest), size)), None):
        yield str(other.mesh), other
    step = load.mesh.units_per_replica
    most = min(MAX_RANKS, work.rows_per_update * step)
    candidates = [ranks for ranks in range(found.ranks + per_node, most + 1, per_node) if ranks % step == 0]
    more = [_apply_mesh(load, work, replace(load.mesh, d=ranks // step)) for ranks in candidates]
    fewest = next((one for one in more if _can_fit(model.limit_tokens(one, shortest), size)), None)
    enough = next((one for one in more if _can_fit(one, size)), None)
    if fewest is None and other is None:
        several = (
            _apply_mesh(load, work, mesh) for ranks in candidates for mesh in _list_meshes(found, ranks)
        )
        fewest = next((one for one in several if _can_fit(model.limit_tokens(one, shortest), size)), None)
    for mesh, one in {one.mesh: one for one in (fewest, enough) if one}.items():
        yield f"{mesh} or more ranks", one
    engine = model.get_engine(load)
    if load.is_megatron or engine.fsdp.offload_params or (optimizer := engine.optimizer) is None:
        return
    moves = {
        "fsdp.offload_activations": replace(engine, fsdp=replace(engine.fsdp, offload_activations=True)),
        "optimizer.offload": replace(engine, optimizer=replace(optimizer, offload=True)),
        "fsdp.offload_params": replace(
            engine,
            optimizer=replace(optimizer, offload=False),
            fsdp=replace(engine.fsdp, offload_params=True),
        ),
    }
    if not engine.gradient_checkpointing or engine.fsdp.offload_activations:
        del moves["fsdp.offload_activations"]
    for option, changed in moves.items():
        moved = model.replace_engine(load, changed)
        needed = _count_needed_mb(replace(found, load=moved, trainer=estimate_rank_memory(moved)))
        yield f"{model.section}.{option} true (launcher.trainer_mem_per_gpu {needed})", moved


def _list_meshes(found: Estimate, ranks: int) -> Iterator[Train]:
    """Yield meshes of the same number of ranks that divide the model further, the smallest changes first."""
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
        if other.d and other.d <= work.rows_per_update and not any(find_remainders(other, shape, stages)):
            yield other


def _can_fit(load: RankLoad, size: int) -> bool:
    return estimate_rank_memory(load).device_bytes <= size


def _find_most_tokens(model: _Changed, load: RankLoad, shortest: int, size: int) -> int | None:
    """Return the largest token budget, a multiple of 1024, that fits and holds the longest row."""
    budgets = range(model.count_tokens(load) // 1024 * 1024, shortest - 1, -1024)
    return next((tokens for tokens in budgets if _can_fit(model.limit_tokens(load, tokens), size)), None)


def _count_needed_mb(found: Estimate) -> int:
    """Return the needed launcher.trainer_mem_per_gpu, rounded up."""
    return math.ceil(found.node_host_bytes / found.ranks_per_node / MB / 1000) * 1000


def _find_host_problem(found: Estimate, unit: Unit) -> Refusal | None:
    given = unit.tasks_per_node * unit.mem_mb_per_task * MB
    if found.node_host_bytes <= given:
        return None
    items = {**found.trainer.host, **({} if found.load.on_gpu else found.trainer.device_items)}
    ranks = f"{found.ranks_per_node} trainer rank{'s' if found.ranks_per_node > 1 else ''}"
    return Refusal(
        option="launcher.trainer_mem_per_gpu",
        value=unit.mem_mb_per_task,
        kind=Kind.MACHINE,
        why=f": {ranks} of the first node need up to {format_gb(found.node_host_bytes)} of CPU memory, but "
        f"have {format_gb(given)} (each rank: {_format_largest(items, 3)}; "
        f"the first also: {format_items(found.trainer.first)})",
        use=f"use {_count_needed_mb(found)}",
    )


def _check_copies(config: Config, plan: Plan, shape: ModelShape) -> Iterator[Refusal]:
    """Yield that a node's servers have no memory for their copy of the model, which follows the trainer."""
    if not isinstance(config, GRPOConfig) or config.cluster.local_dir:
        return
    copy = DTYPE_BYTES[config.actor.dtype] * count_published(shape, config.actor)
    servers = [unit for unit in plan.units if unit.role == "server" and unit.pool not in config.pools]
    for node in sorted({node for unit in servers for node in unit.nodes}):
        here = [unit for unit in servers if node in unit.nodes]
        num_tasks = sum(unit.tasks_per_node for unit in here)
        given = MB * sum(unit.tasks_per_node * unit.mem_mb_per_task for unit in here)
        needed = copy + num_tasks * PROCESS_BYTES[plan.device == "cuda"]
        if needed <= given:
            continue
        least = math.ceil(needed / num_tasks / MB / 1000) * 1000
        yield Refusal(
            option="launcher.inference_server_mem_per_gpu",
            value=config.launcher.inference_server_mem_per_gpu,
            kind=Kind.MACHINE,
            why=f": the servers of a node have {format_gb(given)} of CPU memory, but with the node's copy of "
            f"the model they need {format_gb(needed)}",
            use=f"use {math.ceil(least / max(1, here[0].gpus_per_task))} or more, or set cluster.local_dir",
            related=("cluster.local_dir",),
        )
        return


def _list_notes(section: str, found: Estimate, config: Config) -> Iterator[Refusal]:
    load = found.load
    if load.on_gpu and found.gpu_bytes is None:
        why = (
            "whether the trial fits the GPUs was not checked, because their memory is unknown; "
            "set cluster.gpu_mem_gb"
        )
        yield make_note("", why, Kind.MACHINE, related=(_GPU_MEMORY,))
    unlimited = load.on_gpu and load.engine.mb_spec.max_tokens_per_mb is None
    if unlimited and load.tokens > found.work.longest * found.work.together:
        option = f"{section}.mb_spec.max_tokens_per_mb"
        whole = f"one micro-batch may have all rows of a rank, up to {load.tokens} tokens"
        why = f"is null: {whole}, and the GPU may run out of memory; set a limit"
        yield make_note(option, why, Kind.MACHINE, is_warning=True)
    if found.gpu_bytes and not found.problems:
        used = found.trainer.device_bytes / found.gpu_bytes
        if 0.9 < used <= 1:
            why = f"a trainer rank fills {used:.0%} of its GPU, so it may run out of memory"
            yield make_note("", why, Kind.MACHINE, related=(_GPU_MEMORY,))


def _format_largest(items: Items, number: int) -> str:
    return format_items(dict(sorted(items.items(), key=lambda item: -item[1])[:number]))


def format_items(items: Mapping[str, float | None]) -> str:
    """Return sizes as text on one line."""
    texts = [f"{name} {'unknown' if size is None else format_gb(size)}" for name, size in items.items()]
    return ", ".join(texts)


def format_gb(size: float) -> str:
    """Return a size as text, in GB of 1024 MB."""
    return f"{size / GB:.1f} GB" if size >= GB / 10 else f"{size / MB:.0f} MB"
