"""The engine on FSDP2: a transformers model sharded by `fully_shard`, parameters and optimizer in float32.

A single rank in float32 is not sharded, unless its parameters are offloaded: then FSDP keeps parameters and
gradients, and so the optimizer's state, in CPU memory, and copies a layer to the GPU while it is used. The
model is built without memory for its parameters and sharded; then each rank loads its rows. Tensor and
context parallelism are in engines/shared.
"""

from collections.abc import Iterator

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from hpc_rl.config.options.training import TrainEngineConfig
from hpc_rl.core.errors import ConfigError
from hpc_rl.engines.base import BUCKET_BYTES, LossFn, PublishedPiece, Sequences, sum_over_data_ranks
from hpc_rl.engines.shared import (
    attention,
    compiled,
    context_parallel,
    drawing,
    hf_io,
    lora,
    model,
    state,
    tensor_parallel,
    trainable,
)
from hpc_rl.engines.shared.attention import Layout
from hpc_rl.engines.shared.distributed import init_alone
from hpc_rl.engines.shared.mesh import Mesh
from hpc_rl.engines.shared.micro_batches import Inputs, make_inputs, make_micro_batch, share_rounds
from hpc_rl.engines.shared.optimizer import LossScale, Optimizer, Shard, make_shards
from hpc_rl.engines.shared.pieces import Piece, StatePiece
from hpc_rl.engines.shared.trained import TrainedEngine

DIMENSIONS = ("replicate", "shard", "tensor")  # of the mesh; `shard` includes the context ranks


class FSDPEngine(TrainedEngine):
    """An Engine. With more than one rank, the process group must exist before `initialize`."""

    def __init__(
        self,
        config: TrainEngineConfig,
        mesh: Mesh | None = None,
        *,
        device: torch.device | str = "cpu",
        seed: int = 1,
        layout: Layout | None = None,
        frozen: bool = False,
        name: str = "actor",
    ) -> None:
        """Check the configuration. Raises ConfigError.

        Args:
            config: The configuration of the model.
            mesh: By default, a single rank.
            device: This rank's device.
            seed: For random weights.
            layout: Of micro-batches; by default, the layout that suits the attention.
            frozen: Build no optimizer and keep parameters in the compute type, for a reference model.
            name: Prefix of the names of state files.
        """
        self.config = config
        self.mesh = mesh or Mesh()
        self.name = name
        self.device = torch.device(device)
        self.pin_memory = False  # copy inputs to the GPU through page-locked memory
        self.entropy_clamp = 0.0  # share of the vocabulary that the entropy leaves out
        self.seed = seed
        self.frozen = frozen
        self._layout: Layout | None = "packed" if self.mesh.context > 1 else layout
        self._check_mesh()
        model.check(config, self.device)
        self._check_compiler()

    def initialize(self, num_train_steps: int, empty: bool = False) -> None:
        self.num_train_steps = num_train_steps
        self.num_updates = 0
        self.model = model.build(self.config, self.seed, self.frozen, self.device, self._layout)
        self.model.entropy_clamp = self.entropy_clamp
        self.layout = self.model.layout
        self.has_dropout = model.has_dropout(self.model.hf)
        self.trainable = trainable.choose(self.config, self.model.hf)
        saved = set(self.model.hf.state_dict())
        self.buffer_names = [name for name, _ in self.model.hf.named_buffers() if name in saved]
        if self.frozen:
            # buffers keep their type: positions in bfloat16 would be wrong
            kept = self._list_float32_parameters()
            for parameter in self.model.parameters():
                parameter.requires_grad_(False)
                if parameter not in kept:
                    parameter.data = parameter.data.to(model.DTYPES[self.config.dtype])
        offload = self.config.fsdp.offload_params
        self.partial: set[str] = set()  # parameters whose gradients must be summed over the tensor ranks
        self.device_mesh: DeviceMesh | None = None
        is_sharded = self.mesh.num_ranks > 1 or offload
        has_two_types = not self.frozen or self.config.fsdp.float32_head
        is_sharded = is_sharded or (self.config.dtype != "float32" and has_two_types)
        if is_sharded:
            self._enter_mesh()
        self.trainable.attach(self.model.hf)
        names = [name for name, _ in self.model.hf.named_parameters()]
        if self.config.enable_torch_compile:
            compiled.compile_layers(self.model.blocks())  # by their classes, which FSDP replaces
        if is_sharded:
            self._shard()
        drawing.allocate(self.model, torch.device("cpu") if offload else self.device)
        if not offload:  # otherwise FSDP has moved the buffers
            self.model.to(self.device)
        parameters = dict(self.model.hf.named_parameters())
        self.shards = make_shards({name: parameters[name] for name in names}, self._coordinates())
        self._fill(empty)
        trained = [shard for shard in self.shards if self.trainable.is_trained(shard.name)]
        pieces = [StatePiece("model", shard.piece(), shard.is_saved) for shard in trained]
        if not self.frozen:
            pieces = self._build_optimizer(trained)
        self.local = state.RankState(self.mesh, pieces, self.trainable.shapes, engine=self.name)

    def _build_optimizer(self, trained: list[Shard]) -> list[StatePiece]:
        assert self.config.optimizer is not None, "check.py refuses a trained model without an optimizer"
        self.optimizer = Optimizer(self.config.optimizer, trained)
        self.scale = LossScale(self.config.optimizer, self.config.dtype == "float16")
        torch.manual_seed(self.seed * 1_000_003 + self.mesh.rank)
        return self.optimizer.pieces()

    def _fill(self, empty: bool) -> None:
        """Load parameters and saved buffers; if `empty`, only tensors that snapshots lack."""
        buffers = dict(self.model.hf.named_buffers())
        parts = [
            Piece(name, buffers[name], (0,) * buffers[name].ndim, tuple(buffers[name].shape))
            for name in self.buffer_names
        ]
        added = [shard.piece() for shard in self.shards if lora.is_factor(shard.name)]
        if self.config.use_lora or not empty:
            parts += [shard.piece() for shard in self.shards if not lora.is_factor(shard.name)]
        if parts and not (empty and self.config.init_from_scratch):
            model.fill(self.model, self.config, self.seed, parts, self.mesh.rank)
        if not empty:
            self.trainable.fill(added, self.seed)

    def _enter_mesh(self) -> None:
        """Cut the matrices over the tensor ranks; note the groups of ranks."""
        if not dist.is_initialized():
            init_alone(self.device)
        copies, tensor = self.config.fsdp.replicate_size, self.mesh.tensor
        sizes = (copies, self.mesh.num_ranks // (copies * tensor), tensor)
        self.device_mesh = init_device_mesh(self.device.type, sizes, mesh_dim_names=DIMENSIONS)
        if tensor > 1:
            self.partial = tensor_parallel.cut(self.model.hf, self.device_mesh["tensor"])
            self.model.tensor_group = self.device_mesh["tensor"].get_group()
        if self.mesh.context > 1:
            self._check_context()
            by_context = (self.mesh.num_data_ranks, self.mesh.context, tensor)
            names = ("data", "context", "tensor")
            peers = init_device_mesh(self.device.type, by_context, mesh_dim_names=names)["context"]
            self.model.context_group = peers.get_group()

    def _shard(self) -> None:
        assert self.device_mesh is not None
        copies = self.config.fsdp.replicate_size
        mesh = self.device_mesh["replicate", "shard"] if copies > 1 else self.device_mesh["shard"]
        compute, reduce = model.DTYPES[self.config.dtype], model.DTYPES[self.config.grad_reduce_dtype]
        precision = MixedPrecisionPolicy(None if compute == torch.float32 else compute, reduce)
        home = OffloadPolicy()
        if self.config.fsdp.offload_params:
            home = CPUOffloadPolicy(pin_memory=self.device.type == "cuda")
        reshard = self.config.fsdp.reshard_after_forward
        for block in self._list_blocks():
            fully_shard(
                block,
                mesh=mesh,
                reshard_after_forward=reshard,
                mp_policy=precision,
                offload_policy=home,
            )
        if self.config.fsdp.float32_head:
            precision = MixedPrecisionPolicy(None, reduce)
        fully_shard(self.model, mesh=mesh, mp_policy=precision, offload_policy=home)

    def _list_blocks(self) -> list[torch.nn.Module]:
        """Return the modules that are sharded one by one."""
        wrap = self.config.fsdp.wrap_policy
        return self.model.blocks(wrap.transformer_layer_cls_to_wrap if wrap else None)

    def _list_float32_parameters(self) -> set[torch.nn.Parameter]:
        """Return the parameters that stay in float32 in a model of 16 bits."""
        if not self.config.fsdp.float32_head:
            return set()
        in_blocks = {parameter for block in self._list_blocks() for parameter in block.parameters()}
        return set(self.model.parameters()) - in_blocks

    def _check_mesh(self) -> None:
        mesh, copies = self.mesh, self.config.fsdp.replicate_size
        if mesh.pipeline > 1 or mesh.experts > 1:
            raise ConfigError(
                "allocation_mode: the fsdp backend has no p (pipeline) and no e (experts); use megatron"
            )
        if mesh.num_data_ranks % copies:
            raise ConfigError(
                f"fsdp.replicate_size {copies} must divide the data ranks, d{mesh.num_data_ranks}"
            )

    def _check_compiler(self) -> None:
        if not self.config.enable_torch_compile:
            return
        if self.mesh.tensor > 1:  # of PyTorch 2.13: it can't compile DTensors of changing sizes
            raise ConfigError(
                f"{compiled.OPTION}: matrices that are divided among ranks (t{self.mesh.tensor}) can't be "
                "compiled; in allocation_mode use d or c in place of t, or set it to false"
            )
        compiled.check(self.device.type)

    def _check_context(self) -> None:
        config, context = self.model.hf.config, self.mesh.context
        if config._attn_implementation not in attention.NAMES:
            raise ConfigError(
                f"{config.model_type} models with attn_impl {self.config.attn_impl} can't be trained with "
                f"context parallelism (c{context}) by fsdp; use attn_impl sdpa, or d in place of c"
            )
        heads = config.num_attention_heads // self.mesh.tensor
        shared = config.num_key_value_heads // self.mesh.tensor
        if heads % context or (shared % context and context % shared):
            raise ConfigError(
                f"c{context} must divide the {heads} heads of a tensor rank, and divide or be a multiple of "
                f"its {shared} key-value heads; use another c in allocation_mode, or d in place of c"
            )

    def _coordinates(self) -> dict[str, int]:
        mesh = self.device_mesh
        return {} if mesh is None else {name: mesh.get_local_rank(name) for name in DIMENSIONS}

    def logprobs(self, rows: Sequences, temperature: float) -> list[np.ndarray]:
        self.model.eval()
        out = [np.zeros(len(ids), dtype=np.float32) for ids in rows.ids]
        groups, _ = share_rounds(rows, self.layout, self.config.mb_spec, self.mesh)
        with torch.no_grad():
            for group in groups:
                inputs, logprobs_N, _ = self._forward(rows, group, temperature)
                flat_T = self._whole(inputs.flat(logprobs_N)).cpu().numpy()
                ends = np.cumsum([len(out[row]) for row in group])
                for row, end in zip(group, ends, strict=True):
                    out[row][:] = flat_T[end - len(out[row]) : end]
        # a forward pass without a backward leaves parameters gathered; the next update would make them stale
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        return out

    def train_batch(
        self, rows: Sequences, loss: LossFn, loss_weight: float, temperature: float
    ) -> dict[str, float]:
        self.model.train()
        groups, total_rows = share_rounds(rows, self.layout, self.config.mb_spec, self.mesh)
        if not total_rows:
            raise ValueError("train_batch got no rows on any rank")
        totals: dict[str, torch.Tensor] = {}
        for group in groups:
            if isinstance(self.model, FSDPModule):  # replicas sum their gradients only once
                self.model.set_requires_all_reduce(group is groups[-1])
            inputs, logprobs_N, entropy_N = self._forward(rows, group, temperature)
            batch = make_micro_batch(rows, group, inputs, logprobs_N, entropy_N)
            batch.logprobs_T, batch.entropy_T = self._whole(batch.logprobs_T), self._whole(batch.entropy_T)
            if batch.top_logprobs_TK is not None:
                batch.top_logprobs_TK = self._whole(batch.top_logprobs_TK)
            loss_sum, sums = loss(batch)
            # FSDP averages gradients over the ranks; context ranks have parts of the same sum
            num_terms = self.mesh.num_data_ranks * self.mesh.context
            (loss_sum * (num_terms / loss_weight * self.scale.value)).backward()
            for name, value in {**sums, "loss": loss_sum / loss_weight}.items():
                totals[name] = totals.get(name, 0) + value.detach().double()
        return self._update(totals)

    def _update(self, totals: dict[str, torch.Tensor]) -> dict[str, float]:
        names = sorted(totals)
        mine = torch.stack([totals[name] for name in names]).tolist()
        self._sum_partial_gradients()
        stepped = self._step()
        self.optimizer.zero_grad()
        return {**dict(zip(names, sum_over_data_ranks(self.mesh, mine), strict=True)), **stepped}

    def _whole(self, values_T: torch.Tensor) -> torch.Tensor:
        """Gather the values of all tokens from the context ranks."""
        group = self.model.context_group
        return values_T if group is None else context_parallel.gather_whole(values_T, group)

    def _sum_partial_gradients(self) -> None:
        """Sum the gradients of the norms of heads over the tensor ranks. Collective."""
        grads = [one.gradient() for one in self.shards if one.name in self.partial]
        found = [grad for grad in grads if grad is not None and grad.numel()]
        if not found:
            return
        flat = torch.cat([grad.reshape(-1) for grad in found]).to(self.device)
        dist.all_reduce(flat, group=self.model.tensor_group)
        for grad, part in zip(found, flat.split([grad.numel() for grad in found]), strict=True):
            grad.copy_(part.view_as(grad))

    def _forward(
        self, rows: Sequences, group: list[int], temperature: float
    ) -> tuple[Inputs, torch.Tensor, torch.Tensor]:
        """Return the inputs of a group of rows, and log-probabilities and entropies of its wanted tokens."""
        pad_to = (self.config.mb_spec.max_tokens_per_mb or 0) if self.config.pad_to_maximum else 0
        shift = 0 if self.config.is_critic else 1
        inputs = make_inputs(
            rows,
            group,
            self.layout,
            self.device,
            shift,
            pad_to,
            self.pin_memory,
            (self.mesh.context_rank, self.mesh.context),
        )
        logprobs_N, entropy_N = self.model(
            inputs.input_ids,
            inputs.position_ids,
            inputs.source_N,
            inputs.targets_N,
            temperature if inputs.temperature_N is None else inputs.temperature_N,
            inputs.rows,
        )
        return inputs, logprobs_N, entropy_N

    def list_published_pieces(self) -> list[PublishedPiece] | None:
        pieces = super().list_published_pieces()
        if pieces is None or self.mesh.rank or not self.publishes_model:
            return pieces
        buffers = dict(self.model.hf.named_buffers())
        return [*pieces, *(PublishedPiece.of_whole(name, buffers[name]) for name in self.buffer_names)]

    def list_base(self) -> list[Piece]:
        return [
            shard.piece()
            for shard in self.shards
            if shard.is_saved and not self.trainable.is_trained(shard.name)
        ]

    def list_modules(self) -> list[torch.nn.Module]:
        return [self.model]

    def weights(self, bucket_bytes: int = BUCKET_BYTES) -> Iterator[list[tuple[str, torch.Tensor]]]:
        first, dtype = self.mesh.rank == 0, model.DTYPES[self.config.dtype]
        merge = self.trainable.make_merge(self)
        buffers = dict(self.model.hf.named_buffers()) if first else {}
        bucket = {name: buffers[name].cpu() for name in self.buffer_names if first}
        size = 0
        for shard in self.shards:
            if lora.is_factor(shard.name):
                continue
            # gathered on the device, because NCCL can't use CPU memory, and in the type of the result
            value = shard.parameter.detach().to(self.device, dtype)
            if isinstance(value, DTensor):
                value = value.full_tensor()
            size += value.nbytes
            if first:
                piece = Piece(shard.name, value, (0,) * value.ndim, tuple(value.shape))
                bucket[shard.name] = merge(piece).local.cpu().contiguous()
            if size >= bucket_bytes:
                yield list(hf_io.convert_to_disk_names(self.model.hf, bucket).items())
                bucket, size = {}, 0
        yield list(hf_io.convert_to_disk_names(self.model.hf, bucket).items())
