"""Estimate the memory of a trainer rank, on its device and on its node, by model, engine and mesh. Pure.

Of a model only the content of its config.json is known: decoders like Llama, Mistral, Qwen2 and Qwen3, also
with experts, and no other kinds of model.

One part of the memory is permanent. The rest varies, so the peak is the largest of some moments of a
micro-batch: the loss (all kept activations, and the logits), the backward pass of one layer, the sum of the
gradients outside of the layers, and a pass of the reference model, whose layers are gathered, too. In a
pipeline the last stage has the loss, and the first stage the most micro-batches in flight. Sizes are in
bytes; b is the size of a value in the compute type, r in the type of summed gradients.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hpc_rl.config.options.training import TrainEngineConfig
from hpc_rl.core.adapters import ALL_LINEAR
from hpc_rl.core.allocation import Train

GB = 1 << 30
MB = 1 << 20
# The same as in engines/shared/logprobs.py, which needs torch; a test compares them.
CHUNK_ROWS = 128
CHUNK_LOGITS = 1 << 22
CHUNK_LOGITS_ON_GPU = 320 << 20
TILE_ROWS = TILE_COLUMNS = 512
FILE_BYTES = 5_000_000_000  # size of a published or exported file, as in engines/shared/hf_io.py
CUDA_BYTES = 2 * GB  # on the GPU, for CUDA's context, NCCL and the libraries' workspaces
PROCESS_BYTES = {True: 3 * GB, False: GB // 2}  # Python and PyTorch, with CUDA and without
RELEASED_SERVER = "CUDA of the server"  # that shares the GPU and has released its memory
OFFLOADED = "state, while the server generates"
LOADING_BYTES = 300 * MB  # pieces of weights during loading
BATCH_BYTES_PER_TOKEN = 60  # the received bytes, the decoded ones, and the computed columns

Items = dict[str, float]  # name -> bytes

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
Models = Mapping[str, Mapping[str, Any]]  # path of a model -> content of its config.json
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "intermediate_size")


# -- the model


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Numbers of parameters, and the widths that determine the size of activations."""

    num_layers: int
    width: int
    vocabulary: int
    query_width: int  # of all heads together
    key_width: int  # of keys, and of values
    num_heads: int
    num_key_heads: int  # of keys, and of values
    mlp_width: int  # of a layer without experts
    active_mlp_width: int  # for one token: the sum over its experts
    has_qk_norm: bool
    is_tied: bool  # the head is the embedding
    layer_params: int  # of one layer, all of its experts included
    num_experts: int  # of a layer
    expert_width: int
    dtype: str  # of the files

    @classmethod
    def of(cls, content: Mapping[str, Any], is_critic: bool = False) -> ModelShape | None:
        """Return the shape that a config.json describes; None for an unknown kind of model.

        The head of a critic is a vector, which counts as nothing.
        """
        content = content.get("text_config") or content
        sizes = [content.get(name) for name in _NEEDED]
        if not all(isinstance(size, int) and size > 0 for size in sizes):
            return None
        width, num_layers, num_heads, vocabulary, mlp_width = map(int, sizes)  # type: ignore[arg-type]
        head_dim = content.get("head_dim") or width // num_heads
        num_key_heads = content.get("num_key_value_heads") or num_heads
        key_width = num_key_heads * head_dim
        kind, query_width = str(content.get("model_type", "")), num_heads * head_dim
        attention = 2 * width * query_width + 2 * width * key_width
        if content.get("attention_bias", kind.startswith("qwen2")):
            attention += query_width + 2 * key_width + (0 if kind.startswith("qwen2") else width)
        has_qk_norm = kind.startswith("qwen3")
        norms = 2 * width + (2 * head_dim if has_qk_norm else 0)
        num_experts = next((content[name] for name in _EXPERTS if content.get(name)), 0)
        mlp_params, active = _measure_mlp(content, width, mlp_width, num_experts)
        return cls(
            num_layers=num_layers,
            width=width,
            vocabulary=vocabulary,
            query_width=query_width,
            key_width=key_width,
            num_heads=num_heads,
            num_key_heads=num_key_heads,
            mlp_width=mlp_width,
            active_mlp_width=active,
            has_qk_norm=has_qk_norm,
            is_tied=is_critic or bool(content.get("tie_word_embeddings", False)),
            layer_params=attention + norms + mlp_params,
            num_experts=num_experts,
            expert_width=content.get("moe_intermediate_size") or mlp_width,
            dtype=_find_dtype(content),
        )

    @property
    def expert_params(self) -> int:
        """Parameters of all experts of a layer."""
        return 3 * self.width * self.num_experts * self.expert_width

    @property
    def table_params(self) -> int:
        """Parameters of the embedding; the head has as many."""
        return self.vocabulary * self.width

    @property
    def outer_params(self) -> int:
        """Parameters outside of the layers: embedding, last norm, and the head if it is separate."""
        return (1 if self.is_tied else 2) * self.table_params + self.width

    @property
    def num_params(self) -> int:
        return self.outer_params + self.num_layers * self.layer_params

    def count_cache_bytes(self, value_bytes: int) -> int:
        """Return the bytes of the keys and values of a token."""
        return 2 * self.num_layers * self.key_width * value_bytes


def count_adapter(shape: ModelShape, engine: TrainEngineConfig, tensor: int = 1) -> float:
    """Return the parameters of a layer's adapter on one of some tensor ranks; 0 without an adapter.

    The outputs of q, k, v, gate and up are cut, and the inputs of the others. Experts have no adapters.
    """
    if not engine.use_lora:
        return 0.0
    width, mlp = shape.width, 0 if shape.num_experts else shape.mlp_width
    sizes = {  # per token: whole values, and cut ones
        "q_proj": (width, shape.query_width),
        **dict.fromkeys(("k_proj", "v_proj"), (width, shape.key_width)),
        "o_proj": (width, shape.query_width),
        **(dict.fromkeys(("gate_proj", "up_proj", "down_proj"), (width, mlp)) if mlp else {}),
    }
    wanted = engine.target_modules
    every = not wanted or ALL_LINEAR in wanted
    used = [size for name, size in sizes.items() if every or name in wanted]
    return engine.lora_rank * sum(whole + cut / tensor for whole, cut in used)


def count_trained(shape: ModelShape, engine: TrainEngineConfig) -> float:
    """Return the trained parameters of a model: all of them, or its adapter's."""
    return shape.num_layers * count_adapter(shape, engine) if engine.use_lora else shape.num_params


def count_published(shape: ModelShape, engine: TrainEngineConfig) -> float:
    """Return the parameters that servers get."""
    is_merged = getattr(engine, "lora_publish", "") == "merged"
    return float(shape.num_params) if is_merged else count_trained(shape, engine)


def _measure_mlp(content: Mapping[str, Any], width: int, mlp_width: int, num_experts: int) -> tuple[int, int]:
    """Return the parameters of a layer's MLP, and its active width for one token."""
    if not num_experts:
        bias = 2 * mlp_width + width if content.get("mlp_bias") else 0
        return 3 * width * mlp_width + bias, mlp_width
    expert_width = content.get("moe_intermediate_size") or mlp_width
    shared_width = content.get("shared_expert_intermediate_size") or 0
    router = width * num_experts + (width if shared_width else 0)
    active = (content.get("num_experts_per_tok") or 1) * expert_width + shared_width
    return 3 * width * (num_experts * expert_width + shared_width) + router, active


def _find_dtype(content: Mapping[str, Any]) -> str:
    named = str(content.get("torch_dtype") or content.get("dtype") or "")
    return named if named in DTYPE_BYTES else "bfloat16"


# -- the rank


@dataclass(frozen=True, kw_only=True)
class RankLoad:
    """The work of a rank."""

    shape: ModelShape
    engine: TrainEngineConfig
    mesh: Train
    on_gpu: bool
    tokens: int  # of a micro-batch
    longest: int  # tokens of the longest row
    micro_batches: int = 1  # of an update
    batch_tokens: int = 0  # of a train batch; every rank gets the whole batch
    saves: bool = False  # writes checkpoints
    saves_copies: bool = False  # writes checkpoints while training continues
    publishes: bool = False  # its weights go to servers
    shares_gpu: bool = False  # with a server, in turn
    reference: TrainEngineConfig | None = None
    reference_shape: ModelShape | None = None
    critic: TrainEngineConfig | None = None
    critic_shape: ModelShape | None = None

    @property
    def compute_bytes(self) -> int:
        return DTYPE_BYTES[self.engine.dtype]

    @property
    def outer_compute_bytes(self) -> int:
        """Size of a value outside of the layers while they compute."""
        return 4 if self.engine.fsdp.float32_head and not self.is_megatron else self.compute_bytes

    @property
    def is_megatron(self) -> bool:
        return self.mesh.backend == "megatron"

    @property
    def num_shards(self) -> int:
        """Number of ranks that divide the parameters of a part of the model, or their moments."""
        groups = 1 if self.is_megatron else self.engine.fsdp.replicate_size
        return (self.mesh.d or 1) * self.mesh.c // groups

    @property
    def is_sharded(self) -> bool:
        """Whether layers are gathered; not with megatron, nor on a single rank in float32."""
        if self.is_megatron:
            return False
        return self.num_shards > 1 or self.engine.fsdp.offload_params or self.compute_bytes < 4

    @property
    def num_layers(self) -> int:
        """Layers of this rank's pipeline stage."""
        return math.ceil(self.shape.num_layers / self.mesh.p)

    @property
    def expert_params(self) -> float:
        """Parameters of a layer's experts on this rank, gathered."""
        return self.shape.expert_params / (self.mesh.e * self.mesh.etp if self.mesh.e > 1 else self.mesh.t)

    @property
    def layer_params(self) -> float:
        """Parameters of a layer on this rank, gathered."""
        return (self.shape.layer_params - self.shape.expert_params) / self.mesh.t + self.expert_params

    @property
    def outer_params(self) -> float:
        """Parameters outside of the layers; in a pipeline one stage has the embedding, one the head."""
        shape = self.shape
        outer = shape.outer_params if self.mesh.p == 1 else shape.table_params + shape.width
        return outer / self.mesh.t

    @property
    def table_params(self) -> float:
        return 0.0 if self.engine.is_critic else self.shape.table_params / self.mesh.t

    @property
    def rank_params(self) -> float:
        """Parameters of this rank's part of the model, gathered."""
        return self.outer_params + self.num_layers * self.layer_params

    @property
    def shard_params(self) -> float:
        """Parameters whose moments this rank holds; with fsdp it holds only these parameters."""
        if self.is_megatron and not self.engine.megatron.ddp.use_distributed_optimizer:
            return self.rank_params
        experts = self.num_layers * self.expert_params
        expert_shards = (self.mesh.edp or 1) if self.mesh.e > 1 else self.num_shards
        return (self.rank_params - experts) / self.num_shards + experts / expert_shards

    @property
    def trained_layer_params(self) -> float:
        """Trained parameters of a layer on this rank, gathered."""
        if not self.engine.use_lora:
            return self.layer_params
        return count_adapter(self.shape, self.engine, self.mesh.t)

    @property
    def trained_rank_params(self) -> float:
        """Trained parameters of this rank's part of the model, gathered."""
        return self.num_layers * self.trained_layer_params if self.engine.use_lora else self.rank_params

    @property
    def trained_params(self) -> float:
        """Trained parameters whose moments this rank holds."""
        if not self.engine.use_lora:
            return self.shard_params
        is_whole = self.is_megatron and not self.engine.megatron.ddp.use_distributed_optimizer
        return self.trained_rank_params / (1 if is_whole else self.num_shards)

    @property
    def merges(self) -> bool:
        """Whether servers get whole models with the adapter merged into them."""
        return self.engine.use_lora and getattr(self.engine, "lora_publish", "") == "merged"

    @property
    def frozen_bytes(self) -> float:
        """Bytes of the frozen base that this rank holds, in the compute type."""
        if not self.engine.use_lora:
            return 0.0
        return self.compute_bytes * (self.rank_params if self.is_megatron else self.shard_params)

    @property
    def width_parts(self) -> int:
        """Number of ranks that divide model-wide activations: the tensor ranks, by sequence parallelism."""
        return self.mesh.t if self.is_megatron else 1

    @property
    def most_in_flight(self) -> float:
        """Micro-batches whose activations the first stage of a pipeline keeps at once."""
        p, parts = self.mesh.p, self.engine.megatron.virtual_pipeline_size
        if parts == 1:
            return min(p, self.micro_batches)
        return min(2 * (p - 1) + (parts - 1) * p + 1, parts * self.micro_batches) / parts

    @property
    def last_in_flight(self) -> float:
        """Micro-batches whose activations the last stage of a pipeline keeps at once."""
        parts = self.engine.megatron.virtual_pipeline_size if self.mesh.p > 1 else 1
        return min((parts - 1) * self.mesh.p + 1, parts * self.micro_batches) / parts


@dataclass(frozen=True)
class RankMemory:
    """The memory of a rank: `standing` and at each moment on its device, and `host` in CPU memory.

    Without a GPU the device is the CPU. `first` is additional CPU memory of the first rank.
    """

    standing: Items
    moments: Mapping[str, Items]
    host: Items
    first: Items = field(default_factory=dict)

    @property
    def largest(self) -> str:
        """Name of the moment with the most memory."""
        return max(self.moments, key=lambda name: sum(self.moments[name].values()))

    @property
    def device_items(self) -> Items:
        return {**self.standing, **self.moments[self.largest]}

    @property
    def device_bytes(self) -> float:
        return sum(self.device_items.values())

    @property
    def host_bytes(self) -> float:
        return sum(self.host.values())


def estimate_rank_memory(load: RankLoad) -> RankMemory:
    """Return the memory of a rank of the trained models."""
    moments = {"the loss": _count_loss(load), "the backward pass of a layer": _count_layer_backward(load)}
    if load.is_sharded and load.engine.use_lora:
        # one buffer, and the parameters that are copied from it
        gathered = 2 * load.compute_bytes * load.outer_params
        moments["the gather outside of the layers"] = {"gathered blocks": gathered}
    elif load.is_sharded:
        moments["the sum of gradients outside of the layers"] = _count_reduction(load)
    if load.reference is not None and load.reference_shape is not None:
        moments["a pass of the reference model"] = _count_reference_pass(load)
    exported = load.compute_bytes * count_trained(load.shape, load.engine)
    first = {"a file of weights": float(min(FILE_BYTES, exported))}
    found = RankMemory(_count_standing(load), moments, _count_host(load), first)
    if load.critic is None or load.critic_shape is None:
        return found
    return _add_critic(found, estimate_rank_memory(make_critic_load(load)))


def make_critic_load(load: RankLoad) -> RankLoad:
    """Return the work of a rank on the critic, which reads the same rows as the policy."""
    critic, shape = load.critic, load.critic_shape
    assert critic is not None and shape is not None
    all_tokens = load.tokens * load.micro_batches
    budget = critic.mb_spec.max_tokens_per_mb or all_tokens
    tokens = budget if critic.pad_to_maximum else min(budget, all_tokens)
    return replace(
        load,
        shape=shape,
        engine=critic,
        tokens=tokens,
        micro_batches=max(critic.mb_spec.n_mbs or 1, -(-all_tokens // tokens)),
        batch_tokens=0,
        publishes=False,
        reference=None,
        critic=None,
    )


def _add_critic(policy: RankMemory, critic: RankMemory) -> RankMemory:
    """Return the memory of a rank that trains both, one after the other."""
    shared = {
        *("CUDA and NCCL", RELEASED_SERVER, "Python and PyTorch"),
        *("weights while they are loaded", "batch"),
    }
    standing = sum(size for name, size in critic.standing.items() if name not in shared)
    host = sum(size for name, size in critic.host.items() if name not in shared)
    return RankMemory(
        {**policy.standing, "critic": standing},
        {**policy.moments, **{f"{name} of the critic": items for name, items in critic.moments.items()}},
        {**policy.host, **({"critic": host} if host else {})},
        {name: max(size, critic.first[name]) for name, size in policy.first.items()},
    )


def limit_tokens(load: RankLoad, tokens: int) -> RankLoad:
    """Return the load with a smaller limit of tokens in a micro-batch, and the same work."""
    tokens = min(load.tokens, tokens)
    return replace(load, tokens=tokens, micro_batches=-(-load.tokens * load.micro_batches // tokens))


def limit_critic_tokens(load: RankLoad, tokens: int) -> RankLoad:
    """Return the load with a smaller limit of tokens in a micro-batch of the critic."""
    assert load.critic is not None
    spec = replace(load.critic.mb_spec, max_tokens_per_mb=min(make_critic_load(load).tokens, tokens))
    return replace(load, critic=replace(load.critic, mb_spec=spec))


def _count_standing(load: RankLoad) -> Items:
    shard, engine = load.trained_params, load.engine
    items: Items = {}
    if load.frozen_bytes and not engine.fsdp.offload_params:
        items["frozen parameters"] = load.frozen_bytes
    if load.is_megatron:
        items |= _count_megatron_standing(load)
    elif not engine.fsdp.offload_params:
        items |= {"parameters": 4 * shard, "gradients": 4 * shard}
        if not _has_offloaded_moments(load):
            items["Adam moments"] = 8 * shard
    if load.reference and load.reference_shape and not load.reference.fsdp.offload_params:
        items["reference model"] = _count_reference_bytes(load)
    if load.publishes and load.merges:
        items["merged weights"] = load.frozen_bytes
    if load.on_gpu:
        items["CUDA and NCCL"] = CUDA_BYTES
        if load.shares_gpu:
            items[RELEASED_SERVER] = CUDA_BYTES
    return items


def _count_megatron_standing(load: RankLoad) -> Items:
    """Return whole parameters and gradients, and this rank's share of the optimizer's float32 values."""
    b, whole, shard = load.compute_bytes, load.trained_rank_params, load.trained_params
    if b == 4 or load.engine.megatron.ddp.grad_reduce_in_fp32:
        gradients = 4 * whole
    else:
        gradients = b * whole + 4 * shard
    items = {"parameters": b * whole, "gradients": gradients, "Adam moments": 8 * shard}
    return items | ({} if b == 4 else {"float32 parameters": 4 * shard})


def _has_offloaded_moments(load: RankLoad) -> bool:
    return load.engine.optimizer is not None and load.engine.optimizer.offload


def _count_reference_bytes(load: RankLoad) -> float:
    assert load.reference is not None and load.reference_shape is not None
    value_bytes = DTYPE_BYTES[load.reference.dtype]
    copied = replace(load, shape=load.reference_shape, engine=load.reference)
    more = copied.outer_compute_bytes - value_bytes
    if more and not load.is_megatron:
        return value_bytes * copied.shard_params + more * copied.outer_params / copied.num_shards
    return value_bytes * (copied.rank_params if load.is_megatron else copied.shard_params)


def _count_gathered(load: RankLoad) -> float:
    """Return the bytes gathered at once: all outside of the layers, a layer, and on GPUs the next layer."""
    if not load.is_sharded:
        return 0.0
    layers = 1 + load.on_gpu if load.engine.fsdp.reshard_after_forward else load.num_layers
    return load.outer_compute_bytes * load.outer_params + load.compute_bytes * layers * load.layer_params


# -- the moments


def _count_loss(load: RankLoad) -> Items:
    b, shape, tokens = load.outer_compute_bytes, load.shape, load.tokens / load.mesh.c
    kept = load.last_in_flight * _count_kept(load)
    # the last norm, the hidden states of the trained tokens, and their gradient
    items = {
        "gathered blocks": _count_gathered(load),
        "activations": kept + tokens * shape.width * (8 + 2 * b),
    }
    if load.table_params:
        most_rows, columns = _choose_tile(shape.vocabulary / load.mesh.t, load.on_gpu)
        logits = min(tokens, most_rows) * columns
        is_kept = tokens <= most_rows and columns == shape.vocabulary / load.mesh.t
        cast_bytes = b if b < 4 else 0  # of gradients in the compute type
        # the sum is float32; a chunk adds its part after most of its logits are freed
        added = max(0.0, cast_bytes * load.table_params - 4 * logits)
        if not load.engine.use_lora:
            items["gradient of the head"] = 4 * load.table_params + added
        backward = (4 + cast_bytes + (4 if is_kept else 0)) * logits
        forward = 8 * logits - items.get("gradient of the head", 0.0)  # log-probabilities and probabilities
        items["logits of a chunk"] = max(backward, forward)
    return items


def _choose_tile(vocabulary: float, on_gpu: bool) -> tuple[int, float]:
    """Return the rows and columns of the logits in memory at once, as `choose_tile` of logprobs.py."""
    at_once = CHUNK_LOGITS_ON_GPU if on_gpu else CHUNK_LOGITS
    rows = max(CHUNK_ROWS, int(at_once // vocabulary))
    return (rows, vocabulary) if on_gpu or rows >= TILE_ROWS else (TILE_ROWS, TILE_COLUMNS)


def _count_reference_pass(load: RankLoad) -> Items:
    """Return the memory of a forward pass of the reference model, which keeps no activations."""
    assert load.reference is not None and load.reference_shape is not None
    own = replace(load, shape=load.reference_shape, engine=load.reference)
    b, shape, tokens = own.compute_bytes, own.shape, load.tokens / load.mesh.c
    rows, columns = _choose_tile(shape.vocabulary / load.mesh.t, load.on_gpu)
    is_sharded = own.num_shards > 1 or own.engine.fsdp.offload_params  # a single rank has it whole
    return {
        "gathered blocks": _count_gathered(own) if is_sharded else 0.0,
        # the MLP's factors and their product, the residual, the normalized input and the result
        "activations": tokens * b * (3 * shape.active_mlp_width / load.mesh.t + 3 * shape.width),
        "logits of a chunk": 4 * min(tokens, rows) * columns,
    }


def _count_layer_backward(load: RankLoad) -> Items:
    b, tokens = load.compute_bytes, load.tokens / load.mesh.c
    kept, shape = load.most_in_flight * _count_kept(load), load.shape
    # the MLP's product, which is freed, and its two factors; megatron concatenates these
    num_widths = 4 if load.is_megatron else 2
    mlp, width = num_widths * shape.active_mlp_width / load.mesh.t, 2 * shape.width / load.width_parts
    flowing = tokens * b * (mlp + width)
    items = {
        "gathered blocks": _count_gathered(load),
        "activations": kept + _count_recomputed(load),
        "gradients of activations": flowing,
    }
    if load.engine.use_lora:
        items["gradients of a layer"] = (b + _get_reduce_bytes(load)) * load.trained_layer_params
        return items
    if load.is_megatron:  # each is added at once to the gradients of the update
        mlp_width = shape.expert_width if shape.num_experts else shape.mlp_width / load.mesh.t
        items["gradients of a layer"] = b * 2 * shape.width * mlp_width
    else:
        items["gradient of the head"] = load.outer_compute_bytes * load.table_params
    if load.is_sharded:  # whole gradients; on GPUs the previous layer's are summed at the same time
        summed = _get_reduce_bytes(load) if load.on_gpu else 0
        items["gradients of a layer"] = (b + summed) * load.layer_params
    return items


def _count_reduction(load: RankLoad) -> Items:
    b, r, outer = load.outer_compute_bytes, _get_reduce_bytes(load), load.outer_params
    summed = r * outer / load.num_shards
    table = load.shape.table_params / load.mesh.t
    if load.on_gpu:
        return {"gradients outside of the layers": max((b + r) * outer, r * outer + summed + b * table)}
    # gloo sums a copy
    return {"gradients outside of the layers": 2 * r * outer + summed + b * table}


def _get_reduce_bytes(load: RankLoad) -> int:
    return DTYPE_BYTES[load.engine.grad_reduce_dtype]


def _count_kept(load: RankLoad) -> float:
    """Return the bytes of a micro-batch that the layers of a stage keep for the backward pass."""
    tokens, layers = load.tokens / load.mesh.c, load.num_layers
    inputs = tokens * load.compute_bytes * load.shape.width / load.width_parts
    saved = tokens * _count_saved_per_token(load)
    if not load.engine.gradient_checkpointing:
        return layers * saved
    if not load.is_megatron:
        return 0.0 if _has_offloaded_activations(load) else layers * inputs
    options = load.engine.megatron
    several = options.recompute_num_layers or 1
    if options.recompute_granularity == "selective":
        return layers * tokens * _count_saved_per_token(load, options.recompute_modules or ())
    if options.recompute_method == "block":
        again = min(several, layers)
        return again * inputs + (layers - again) * saved
    return math.ceil(layers / several) * inputs


def _count_recomputed(load: RankLoad) -> float:
    """Return the bytes that the backward pass recomputes at once."""
    options, saved = load.engine.megatron, load.tokens / load.mesh.c * _count_saved_per_token(load)
    if not load.engine.gradient_checkpointing:
        return 0.0
    if not load.is_megatron or options.recompute_method == "block":
        return saved
    if options.recompute_granularity == "selective":
        return saved - _count_kept(load) / load.num_layers
    return saved * min(options.recompute_num_layers or 1, load.num_layers)


def _count_saved_per_token(load: RankLoad, without: Collection[str] = ()) -> float:
    """Return the bytes per token that autograd saves in one layer, except in the recomputed parts `without`.

    A norm saves its input in float32, the normalized values and its result, together 8 bytes per value. In
    float32 the input is saved only once, but is kept as the residual.
    """
    b, shape, parts = load.compute_bytes, load.shape, load.mesh.t
    norms = (0.0 if "layernorm" in without else 2.0 * 8 * shape.width) + b * shape.width
    query, key = shape.query_width / parts, shape.key_width / parts
    qk_norms = (4 + b) * (query + key) if shape.has_qk_norm else 0.0
    attention = b * (2 * query + 2 * key)  # queries and result, keys and values
    if load.engine.attn_impl == "eager":  # scores, and probabilities in float32 and in the compute type
        attention += load.longest * shape.num_heads / parts * (4 + 2 * b)
    mlp = 4 * b * shape.active_mlp_width / parts  # gate, its activation, up, and their product
    if load.is_megatron and shape.num_experts:  # a copy per expert of a token, both ways
        norms += 2 * b * shape.width * shape.active_mlp_width / shape.expert_width
    if "mlp" in without or "moe" in without:
        mlp = 0.0
    return norms / load.width_parts + qk_norms + attention + mlp


# -- CPU memory


def _count_host(load: RankLoad) -> Items:
    """Return the CPU memory of a rank, in addition to its device."""
    shard, engine = load.trained_params, load.engine
    items: Items = {
        "Python and PyTorch": PROCESS_BYTES[load.on_gpu],
        "weights while they are loaded": LOADING_BYTES,
        "batch": float(BATCH_BYTES_PER_TOKEN * load.batch_tokens),
    }
    if engine.fsdp.offload_params or _has_offloaded_moments(load):
        # parameters or copies of them, moments, gradients
        items["parameters, moments and gradients"] = 16 * shard
    if engine.fsdp.offload_params:
        items["frozen parameters"] = load.frozen_bytes
    if load.shares_gpu and load.on_gpu:
        moved = _count_standing(load)
        kept = ("gradients", "CUDA and NCCL", RELEASED_SERVER)
        items[OFFLOADED] = _round_page_locked(sum(moved[name] for name in moved if name not in kept))
    if _has_offloaded_activations(load):
        layer = load.tokens / load.mesh.c * load.compute_bytes * load.shape.width / load.width_parts
        items["activations"] = load.num_layers * _round_page_locked(layer)
    if load.reference and load.reference_shape and load.reference.fsdp.offload_params:
        items["reference model"] = _count_reference_bytes(load)
    if load.saves and (copied := _count_snapshot_bytes(load)):
        items["copy of the state to be saved"] = copied
    if load.publishes:  # the newest version and the one before
        size = 2 * load.compute_bytes * (load.shard_params if load.merges else shard)
        items["copies of the published weights"] = _round_page_locked(size) if load.on_gpu and size else size
    return {name: size for name, size in items.items() if size}


def _has_offloaded_activations(load: RankLoad) -> bool:
    return load.on_gpu and load.engine.fsdp.offload_activations


def _round_page_locked(size: float) -> float:
    """Return the size of page-locked memory for a tensor: it is allocated in powers of two."""
    return float(2 ** math.ceil(math.log2(size)))


def _count_snapshot_bytes(load: RankLoad) -> float:
    """Return the bytes of the CPU copy of parameters and moments that a checkpoint needs."""
    if not load.saves_copies:
        return 0.0  # written without a copy
    size = 12 * load.trained_params
    return _round_page_locked(size) if load.on_gpu and size else size
