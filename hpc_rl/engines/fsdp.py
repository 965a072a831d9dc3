"""Engine on FSDP2: a transformers model, sharded over the ranks by `fully_shard`; parameters and optimizer in float32.

One rank in float32 is not sharded at all. Left out: tensor and context parallelism, offloading of parameters. Memory note:
every rank builds the whole model on its CPU before it keeps its shard.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from hpc_rl.checked_file import FileRecord
from hpc_rl.config.sections.training import TrainEngineConfig
from hpc_rl.engines import hf_io, model, state
from hpc_rl.engines.base import LossFn, Sequences, sum_over_ranks
from hpc_rl.engines.distributed import init_alone
from hpc_rl.engines.micro_batches import Inputs, Layout, cut, inputs_of, micro_batch
from hpc_rl.engines.optimizer import LossScale, Optimizer, learning_rate, shards_of
from hpc_rl.engines.packing import Groups


class FSDPEngine:
    """See Engine for the methods. With more than one rank, the process group exists before `initialize`."""

    def __init__(
        self,
        config: TrainEngineConfig,
        rank: int = 0,
        num_ranks: int = 1,
        device: torch.device | str = "cpu",
        seed: int = 1,
        layout: Layout | None = None,
        frozen: bool = False,
    ) -> None:
        """`layout` None: packed where the attention knows how (flash), padded elsewhere. Raises ConfigError.

        Frozen (a reference model): `logprobs` only, without optimizer, parameters in the type that it computes in.
        """
        self.config = config
        self.rank = rank
        self.num_ranks = num_ranks
        self.device = torch.device(device)
        self.pin_memory = False  # what goes to the GPU goes by page-locked memory
        self.seed = seed
        self.frozen = frozen
        self._buffer: state.Buffer | None = None  # of snapshots that are written while training goes on
        self.layout: Layout = layout or ("packed" if config.attn_impl.startswith("flash") else "padded")
        model.check(config, self.device)

    def initialize(self, num_train_steps: int) -> None:
        """Collective. `num_train_steps` counts calls of `train_batch`: the schedule ends with the last."""
        self.num_train_steps = num_train_steps
        self.num_updates = 0  # calls of train_batch, skipped ones included: the position of the schedule
        self.model = model.build(self.config, self.seed, self.frozen)
        names = [name for name, _ in self.model.hf.named_parameters()]
        saved = set(self.model.hf.state_dict())
        self.buffer_names = [name for name, _ in self.model.hf.named_buffers() if name in saved]
        if self.frozen:
            self._freeze()
            return
        if self.num_ranks > 1 or self.config.dtype != "float32":
            self._shard()
        self.model.to(self.device)
        assert self.config.optimizer is not None, "check.py refuses a trained model without an optimizer"
        parameters = dict(self.model.hf.named_parameters())
        self.shards = shards_of({name: parameters[name] for name in names}, self.rank, self.num_ranks)
        self.optimizer = Optimizer(self.config.optimizer, self.shards)
        self.scale = LossScale(self.config.optimizer, self.config.dtype == "float16")
        torch.manual_seed(self.seed * 1_000_003 + self.rank)

    def _freeze(self) -> None:
        for (
            parameter
        ) in self.model.parameters():  # buffers keep their type: positions in bfloat16 would be wrong
            parameter.requires_grad_(False)
            parameter.data = parameter.data.to(model.DTYPES[self.config.dtype])
        if self.num_ranks > 1:
            self._shard()
        self.model.to(self.device)

    def _shard(self) -> None:
        if not dist.is_initialized():
            init_alone(self.device)
        mesh = init_device_mesh(self.device.type, (self.num_ranks,))
        compute, reduce = model.DTYPES[self.config.dtype], model.DTYPES[self.config.grad_reduce_dtype]
        precision = MixedPrecisionPolicy(None if compute == torch.float32 else compute, reduce)
        wrap = self.config.fsdp.wrap_policy
        for block in self.model.blocks(wrap.transformer_layer_cls_to_wrap if wrap else None):
            fully_shard(block, mesh=mesh, mp_policy=precision)
        fully_shard(self.model, mesh=mesh, mp_policy=precision)

    def logprobs(self, rows: Sequences, temperature: float) -> list[np.ndarray]:
        """Collective; 0 outside of the column `loss_mask`, where there is one."""
        self.model.eval()
        out = [np.zeros(len(ids), dtype=np.float32) for ids in rows.ids]
        groups, _ = self._rounds(rows)
        with torch.no_grad():
            for group in groups:
                inputs = self._inputs(rows, group)
                logprobs_N, _ = self._forward(inputs, temperature)
                flat_T = inputs.flat(logprobs_N).cpu().numpy()
                ends = np.cumsum([len(out[row]) for row in group])
                for row, end in zip(group, ends, strict=True):
                    out[row][:] = flat_T[end - len(out[row]) : end]
        if isinstance(self.model, FSDPModule):
            self.model.reshard()  # a forward pass without a backward leaves the root gathered, and so out of date later
        return out

    def train_batch(
        self, rows: Sequences, loss: LossFn, loss_weight: float, temperature: float
    ) -> dict[str, float]:
        """Collective. Sums of `loss`'s statistics over all ranks, `loss` (already divided), grad_norm, lr, update_successful.

        An update whose gradient is not finite is skipped, on all ranks. Raises ValueError where no rank has rows.
        """
        self.model.train()
        groups, total_rows = self._rounds(rows)
        if not total_rows:
            raise ValueError("train_batch got no rows on any rank")
        totals: dict[str, torch.Tensor] = {}
        for group in groups:
            inputs = self._inputs(rows, group)
            logprobs_N, entropy_N = self._forward(inputs, temperature)
            loss_sum, sums = loss(micro_batch(rows, group, inputs, logprobs_N, entropy_N))
            (
                loss_sum * (self.num_ranks / loss_weight * self.scale.value)
            ).backward()  # FSDP averages gradients over the ranks
            for name, value in {**sums, "loss": loss_sum / loss_weight}.items():
                totals[name] = totals.get(name, 0) + value.detach().double()
        return self._update(totals)

    def pass_updates(self, count: int) -> None:
        self.num_updates += count

    def _update(self, totals: dict[str, torch.Tensor]) -> dict[str, float]:
        names = sorted(totals)
        mine = torch.stack([totals[name] for name in names]).tolist()
        squared_norm, *sums = sum_over_ranks([self.optimizer.squared_norm(), *mine])
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
        """This rank's micro-batches, filled up with empty ones to the largest number of any rank, and the rows of all ranks.

        A row that does not fit raises ValueError on every rank.
        """
        spec = self.config.mb_spec
        groups: Groups = []
        refused = ""
        try:
            groups = cut(rows, self.layout, spec.max_tokens_per_mb, spec.n_mbs or 1, spec.granularity)
        except ValueError as error:
            refused = str(error)
        mine = [0.0] * self.num_ranks
        mine[self.rank] = float(len(groups))
        total_rows, num_refused, *counts = sum_over_ranks([float(len(rows)), float(bool(refused)), *mine])
        if num_refused:
            raise ValueError(refused or "a row of another rank is longer than max_tokens_per_mb")
        return groups + [[] for _ in range(int(max(counts)) - len(groups))], int(total_rows)

    def _inputs(self, rows: Sequences, group: list[int]) -> Inputs:
        pad_to = (self.config.mb_spec.max_tokens_per_mb or 0) if self.config.pad_to_maximum else 0
        return inputs_of(
            rows, group, self.layout, self.device, 0 if self.config.is_critic else 1, pad_to, self.pin_memory
        )

    def _forward(self, inputs: Inputs, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        return self.model(
            inputs.input_ids, inputs.position_ids, inputs.source_N, inputs.targets_N, temperature
        )

    def snapshot(self, copied: bool) -> state.ShardSnapshot:
        if copied and self._buffer is None:
            self._buffer = state.Buffer(pin=self.device.type == "cuda")
        counters = {"updates": self.num_updates, **self.scale.state()}
        return state.take(
            self.rank, self.num_ranks, self.shards, self.optimizer, counters, self._buffer if copied else None
        )

    def save(self, folder: Path) -> list[FileRecord]:
        """A snapshot, written at once."""
        return self.snapshot(copied=False).write(folder)

    def state_bytes(self) -> int:
        return state.size_bytes(self.shards, self.optimizer)

    def counters(self) -> dict[str, Any]:
        return {"updates": self.num_updates, "adam_steps": self.optimizer.num_steps}

    def load(self, folder: Path, saved_num_ranks: int, files: Mapping[str, FileRecord] | None = None) -> None:
        counters = state.load(
            folder, saved_num_ranks, self.rank, self.num_ranks, self.shards, self.optimizer, files
        )
        self.num_updates = counters["updates"]
        self.scale.restore(counters)

    def hf_weights(self) -> Iterator[tuple[str, torch.Tensor]] | None:
        """In the type of the configuration, on the CPU."""
        tensors = self._gather()
        return iter(hf_io.on_disk_names(self.model.hf, tensors).items()) if self.rank == 0 else None

    def export(self, folder: Path, tokenizer: Path | None = None, durable: bool = True) -> None:
        tensors = self._gather()
        if self.rank == 0:
            source = Path(self.config.path)
            others = [
                source / "generation_config.json",
                *(hf_io.tokenizer_files(tokenizer) if tokenizer else []),
            ]
            config_json = model.exported_config(source, self.model.hf, self.config)
            hf_io.write_checkpoint(
                folder, hf_io.on_disk_names(self.model.hf, tensors), config_json, others, durable
            )

    def _gather(self) -> dict[str, torch.Tensor]:
        """All parameters and saved buffers, whole, on rank 0; tied ones once. Empty on other ranks."""
        dtype = model.DTYPES[self.config.dtype]
        tensors = {}
        for shard in self.shards:
            value = shard.parameter.detach()
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            if self.rank == 0:
                tensors[shard.name] = whole.to("cpu", dtype).contiguous()
        if self.rank == 0:
            buffers = dict(self.model.hf.named_buffers())
            tensors |= {name: buffers[name].cpu() for name in self.buffer_names}
        return tensors
