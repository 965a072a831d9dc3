"""The engine on FSDP2: a transformers model sharded by `fully_shard`, parameters and optimizer in float32.

A single rank in float32 is not sharded, unless its parameters are to be in CPU memory: there FSDP keeps them,
their gradients and so the optimizer's state, and copies a layer to the GPU while it is used. The model is
built without memory for its parameters and sharded; then each rank fills its rows. Left out: tensor and
context parallelism.
"""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from hpc_rl.checked_file import FileRecord
from hpc_rl.config.sections.training import TrainEngineConfig
from hpc_rl.engines import drawing, hf_io, model, state
from hpc_rl.engines.attention import Layout
from hpc_rl.engines.base import BUCKET_BYTES, LossFn, Sequences, Snapshot, sum_over_data_ranks, sum_over_ranks
from hpc_rl.engines.distributed import init_alone
from hpc_rl.engines.mesh import Mesh
from hpc_rl.engines.micro_batches import Inputs, cut, inputs_of, micro_batch
from hpc_rl.engines.optimizer import LossScale, Optimizer, learning_rate, shards_of
from hpc_rl.engines.packing import Groups
from hpc_rl.engines.pieces import Piece


class FSDPEngine:
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

        `mesh` None: a single rank. `layout` None: the one that suits the attention. `frozen` (a
        reference model): without an optimizer, parameters in the compute type. `name` begins the names of
        files of its state.
        """
        self.config = config
        self.mesh = mesh or Mesh()
        self.name = name
        self.device = torch.device(device)
        self.pin_memory = False  # copy inputs to the GPU through page-locked memory
        self.seed = seed
        self.frozen = frozen
        self._buffer: state.Buffer | None = None  # of snapshots that are written while training continues
        self._layout = layout
        model.check(config, self.device)

    def initialize(self, num_train_steps: int, empty: bool = False) -> None:
        self.num_train_steps = num_train_steps
        self.num_updates = 0  # position of the schedule: calls of train_batch, including skipped updates
        self.model = model.build(self.config, self.seed, self.frozen, self.device, self._layout)
        self.layout = self.model.layout
        names = [name for name, _ in self.model.hf.named_parameters()]
        saved = set(self.model.hf.state_dict())
        self.buffer_names = [name for name, _ in self.model.hf.named_buffers() if name in saved]
        if self.frozen:
            # buffers keep their type: positions in bfloat16 would be wrong
            for parameter in self.model.parameters():
                parameter.requires_grad_(False)
                parameter.data = parameter.data.to(model.DTYPES[self.config.dtype])
        offload = self.config.fsdp.offload_params
        if self.mesh.num_ranks > 1 or offload or (self.config.dtype != "float32" and not self.frozen):
            self._shard()
        drawing.allocate(self.model, torch.device("cpu") if offload else self.device)
        if not offload:  # else FSDP has moved the buffers
            self.model.to(self.device)
        parameters = dict(self.model.hf.named_parameters())
        self.shards = shards_of(
            {name: parameters[name] for name in names}, self.mesh.rank, self.mesh.num_ranks
        )
        self._fill(empty)
        if self.frozen:
            return
        assert self.config.optimizer is not None, "check.py refuses a trained model without an optimizer"
        self.optimizer = Optimizer(self.config.optimizer, self.shards)
        shapes = {shard.name: shard.global_shape for shard in self.shards}
        self.local = state.RankState(self.mesh, self.optimizer.pieces(), shapes, engine=self.name)
        self.scale = LossScale(self.config.optimizer, self.config.dtype == "float16")
        torch.manual_seed(self.seed * 1_000_003 + self.mesh.rank)

    def _fill(self, empty: bool) -> None:
        """Fill parameters and saved buffers; if `empty`, only these, which no snapshot has."""
        buffers = dict(self.model.hf.named_buffers())
        parts = [
            Piece(name, buffers[name], (0,) * buffers[name].ndim, tuple(buffers[name].shape))
            for name in self.buffer_names
        ]
        if not empty:
            parts += [shard.piece() for shard in self.shards]
        if parts and not (empty and self.config.init_from_scratch):
            model.fill(self.model, self.config, self.seed, parts, self.mesh.rank)

    def _shard(self) -> None:
        if not dist.is_initialized():
            init_alone(self.device)
        mesh = init_device_mesh(self.device.type, (self.mesh.num_ranks,))
        compute, reduce = model.DTYPES[self.config.dtype], model.DTYPES[self.config.grad_reduce_dtype]
        precision = MixedPrecisionPolicy(None if compute == torch.float32 else compute, reduce)
        home = OffloadPolicy()
        if self.config.fsdp.offload_params:
            home = CPUOffloadPolicy(pin_memory=self.device.type == "cuda")
        wrap = self.config.fsdp.wrap_policy
        for block in self.model.blocks(wrap.transformer_layer_cls_to_wrap if wrap else None):
            fully_shard(block, mesh=mesh, mp_policy=precision, offload_policy=home)
        fully_shard(self.model, mesh=mesh, mp_policy=precision, offload_policy=home)

    def logprobs(self, rows: Sequences, temperature: float) -> list[np.ndarray]:
        self.model.eval()
        out = [np.zeros(len(ids), dtype=np.float32) for ids in rows.ids]
        groups, _ = self._rounds(rows)
        with torch.no_grad():
            for group in groups:
                inputs, logprobs_N, _ = self._forward(rows, group, temperature)
                flat_T = inputs.flat(logprobs_N).cpu().numpy()
                ends = np.cumsum([len(out[row]) for row in group])
                for row, end in zip(group, ends, strict=True):
                    out[row][:] = flat_T[end - len(out[row]) : end]
        # a forward pass without a backward leaves the root gathered, and out of date after the next update
        if isinstance(self.model, FSDPModule):
            self.model.reshard()
        return out

    def train_batch(
        self, rows: Sequences, loss: LossFn, loss_weight: float, temperature: float
    ) -> dict[str, float]:
        self.model.train()
        groups, total_rows = self._rounds(rows)
        if not total_rows:
            raise ValueError("train_batch got no rows on any rank")
        totals: dict[str, torch.Tensor] = {}
        for group in groups:
            inputs, logprobs_N, entropy_N = self._forward(rows, group, temperature)
            loss_sum, sums = loss(micro_batch(rows, group, inputs, logprobs_N, entropy_N))
            # FSDP averages gradients over the ranks
            (loss_sum * (self.mesh.num_ranks / loss_weight * self.scale.value)).backward()
            for name, value in {**sums, "loss": loss_sum / loss_weight}.items():
                totals[name] = totals.get(name, 0) + value.detach().double()
        return self._update(totals)

    def pass_updates(self, count: int) -> None:
        self.num_updates += count

    def _update(self, totals: dict[str, torch.Tensor]) -> dict[str, float]:
        names = sorted(totals)
        mine = torch.stack([totals[name] for name in names]).tolist()
        squared_norm = sum_over_ranks([self.optimizer.squared_norm()])[0]
        sums = sum_over_data_ranks(self.mesh, mine)
        grad_norm = math.sqrt(squared_norm) / self.scale.value if squared_norm >= 0 else math.nan
        lr = learning_rate(self.optimizer.config, self.num_updates, self.num_train_steps)
        successful = math.isfinite(grad_norm)
        if successful:
            self.optimizer.step(lr, grad_norm, self.scale.value)
        self.scale.update(not successful)
        self.optimizer.zero_grad()
        self.num_updates += 1
        return {
            **dict(zip(names, sums, strict=True)),
            "grad_norm": grad_norm,
            "lr": lr,
            "update_successful": float(successful),
        }

    def _rounds(self, rows: Sequences) -> tuple[Groups, int]:
        """Return this rank's micro-batches, with empty ones up to the most of any rank, and the row total.

        Raises ValueError on every rank if a row of any rank does not fit. Collective.
        """
        groups: Groups = []
        refused = ""
        try:
            groups = cut(rows, self.layout, self.config.mb_spec)
        except ValueError as error:
            refused = str(error)
        mine = [0.0] * self.mesh.num_data_ranks
        mine[self.mesh.data_rank] = float(len(groups))
        numbers = [float(len(rows)), float(bool(refused)), *mine]
        total_rows, num_refused, *counts = sum_over_data_ranks(self.mesh, numbers)
        if num_refused:
            raise ValueError(refused or "a row of another rank is longer than max_tokens_per_mb")
        return groups + [[] for _ in range(int(max(counts)) - len(groups))], int(total_rows)

    def _forward(
        self, rows: Sequences, group: list[int], temperature: float
    ) -> tuple[Inputs, torch.Tensor, torch.Tensor]:
        """Return the inputs of a group of rows, and log-probabilities and entropies of its wanted tokens."""
        pad_to = (self.config.mb_spec.max_tokens_per_mb or 0) if self.config.pad_to_maximum else 0
        shift = 0 if self.config.is_critic else 1
        inputs = inputs_of(rows, group, self.layout, self.device, shift, pad_to, self.pin_memory)
        logprobs_N, entropy_N = self.model(
            inputs.input_ids,
            inputs.position_ids,
            inputs.source_N,
            inputs.targets_N,
            temperature,
            inputs.rows,
        )
        return inputs, logprobs_N, entropy_N

    def snapshot(self, copied: bool) -> Snapshot:
        if copied and self._buffer is None:
            self._buffer = state.Buffer(pin=self.device.type == "cuda")
        counters = {**self.counters(), **self.scale.state()}
        return self.local.take(counters, self._buffer if copied else None)

    def save(self, folder: Path) -> list[FileRecord]:
        return self.snapshot(copied=False).write(folder)

    def state_bytes(self) -> int:
        return self.local.size_bytes()

    def counters(self) -> dict[str, Any]:
        return {"updates": self.num_updates, "adam_steps": self.optimizer.num_steps}

    def load(self, folder: Path, saved_num_ranks: int, files: Mapping[str, FileRecord] | None = None) -> None:
        counters = self.local.load(folder, saved_num_ranks, files)
        self.num_updates = counters["updates"]
        self.optimizer.set_num_steps(counters["adam_steps"])
        self.scale.restore(counters)

    def export(self, folder: Path, tokenizer: Path | None = None, durable: bool = True) -> None:
        writes = self.mesh.rank == 0
        model.write_export(folder, self.config, self.model.hf, self.weights(), tokenizer, durable, writes)

    def weights(self, bucket_bytes: int = BUCKET_BYTES) -> Iterator[list[tuple[str, torch.Tensor]]]:
        first, dtype = self.mesh.rank == 0, model.DTYPES[self.config.dtype]
        buffers = dict(self.model.hf.named_buffers()) if first else {}
        bucket = {name: buffers[name].cpu() for name in self.buffer_names if first}
        size = 0
        for shard in self.shards:
            # gathered on the device, for NCCL does not know CPU memory, and in the type of the result
            value = shard.parameter.detach().to(self.device, dtype)
            if isinstance(value, DTensor):
                value = value.full_tensor()
            size += value.nbytes
            if first:
                bucket[shard.name] = value.cpu().contiguous()
            if size >= bucket_bytes:
                yield list(hf_io.on_disk_names(self.model.hf, bucket).items())
                bucket, size = {}, 0
        yield list(hf_io.on_disk_names(self.model.hf, bucket).items())
