"""The engine on Megatron-core: its GPTModel, pipeline schedules, gradient buffers and distributed optimizer.

Rows are packed. Tables of rectangles (weight_map.py) map weights to Hugging Face checkpoints. Recover state
uses them too, instead of Megatron's dist_checkpointing: it has checksums, needs no pickle, and any layout of
either engine can load it.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from hpc_rl.config.options.training import TrainEngineConfig
from hpc_rl.core.checked_file import FileRecord
from hpc_rl.core.errors import ConfigError
from hpc_rl.engines.base import BUCKET_BYTES, LossFn, Sequences, sum_over_ranks
from hpc_rl.engines.megatron import shim
from hpc_rl.engines.shared import (
    attention,
    drawing,
    lora,
    model,
    state,
    trainable,
)
from hpc_rl.engines.shared.mesh import Mesh
from hpc_rl.engines.shared.micro_batches import Inputs, make_inputs, make_micro_batch, share_rounds
from hpc_rl.engines.shared.optimizer import LossScale
from hpc_rl.engines.shared.packing import Groups
from hpc_rl.engines.shared.pieces import Piece, StatePiece
from hpc_rl.engines.shared.trainable import Lora
from hpc_rl.engines.shared.trained import TrainedEngine

shim.install()  # before the first import of megatron
shim.repair()

from megatron.core import parallel_state  # noqa: E402
from megatron.core.distributed import finalize_model_grads  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402

from hpc_rl.engines.megatron import adapters, packed, process_groups, weight_map  # noqa: E402
from hpc_rl.engines.megatron.gpt_model import (  # noqa: E402
    PolicyModel,
    check_architecture,
    check_layout,
    make_transformer_config,
)
from hpc_rl.engines.megatron.packed import RankBatch  # noqa: E402
from hpc_rl.engines.megatron.sharded_optimizer import ShardedOptimizer, wrap_chunks  # noqa: E402
from hpc_rl.engines.megatron.weight_stream import RankParameter, WeightStream  # noqa: E402


class Round(NamedTuple):
    """One micro-batch, as the pipeline schedules pass it to a step."""

    group: list[int]  # rows of this data rank
    inputs: Inputs
    batch: RankBatch


class MegatronEngine(TrainedEngine):
    """An Engine. With more than one rank, the process group must exist before `initialize`."""

    def __init__(
        self,
        config: TrainEngineConfig,
        mesh: Mesh | None = None,
        *,
        device: torch.device | str = "cpu",
        seed: int = 1,
        frozen: bool = False,
        name: str = "actor",
    ) -> None:
        """Check the configuration, the architecture, and whether the mesh can divide it. Raises ConfigError.

        Args:
            config: The configuration of the model.
            mesh: By default, a single rank.
            device: This rank's device.
            seed: For random weights.
            frozen: Build no optimizer, for a reference model.
            name: Prefix of the names of state files.
        """
        self.config = config
        self.mesh = mesh or Mesh()
        if self.mesh.experts == 1:  # then experts are divided like the other weights
            self.mesh = dataclasses.replace(self.mesh, expert_tensor=self.mesh.tensor)
        self.name = name
        self.device = torch.device(device)
        self.pin_memory = False  # copy inputs to the GPU through page-locked memory
        self.entropy_clamp = 0.0  # share of the vocabulary that the entropy leaves out
        self.has_dropout = False
        self.seed = seed
        self.frozen = frozen
        chunks = config.megatron.virtual_pipeline_size
        self.virtual = chunks if chunks > 1 else None
        self._stream: WeightStream | None = None
        model.check(config, self.device)
        architecture = model.load_architecture(Path(config.path))
        check_architecture(architecture, config.path)
        check_layout(architecture, self.mesh, self.virtual)
        if getattr(architecture, "attention_dropout", 0.0) and not (config.disable_dropout or frozen):
            raise ConfigError("the megatron backend has no dropout in attention; set disable_dropout true")
        if config.optimizer is not None and config.optimizer.offload:
            raise ConfigError("optimizer.offload: the megatron backend has no such option; set it to false")
        if config.enable_torch_compile:
            raise ConfigError("enable_torch_compile: only the fsdp backend has this option; set it to false")

    def initialize(self, num_train_steps: int, empty: bool = False) -> None:
        self.num_train_steps = num_train_steps
        self.num_updates = 0
        # its tensors have names and shapes but no memory
        self.described = model.build(self.config, self.seed, True, self.device, "packed")
        self.shapes = {name: tuple(one.shape) for name, one in self.described.hf.named_parameters()}
        self.trainable = trainable.choose(self.config, self.described.hf)
        if self.config.megatron.use_deterministic_algorithms:
            torch.use_deterministic_algorithms(True)
        process_groups.enter_layout(self.mesh, self.virtual, self.device, self.seed)
        self._build()
        if self.frozen:
            pieces = [
                StatePiece("model", piece, one.is_owned)
                for one in self.parameters
                for piece in one.pieces()
                if self.trainable.is_trained(piece.name)
            ]
        else:
            pieces = self._build_optimizer()
        self.local = state.RankState(self.mesh, pieces, self.trainable.shapes, engine=self.name)
        self._fill(empty)
        if not self.frozen:
            self.optimizer.parameters_from_main()
        torch.manual_seed(self.seed * 1_000_003 + self.mesh.data_rank)

    def _build(self) -> None:
        """Build this rank's chunks of the model."""
        options, hf = self.config.megatron, self.described.hf
        more: dict[str, Any] = {"deterministic_mode": options.use_deterministic_algorithms}
        if self.config.gradient_checkpointing and not self.frozen:
            more["recompute_granularity"] = options.recompute_granularity
            more["recompute_method"] = options.recompute_method
            more["recompute_num_layers"] = options.recompute_num_layers
            if options.recompute_modules is not None:
                more["recompute_modules"] = options.recompute_modules
        if self.virtual:
            # batched messages would be mixed up if both neighbours are the same rank
            more |= {
                "virtual_pipeline_model_parallel_size": self.virtual,
                "overlap_p2p_comm": True,
                "batch_p2p_comm": False,
            }
        # the loss of a micro-batch is already divided by the batch's weight, so gradients are only summed
        more |= {"calculate_per_token_loss": True, "finalize_model_grads_func": _add_up_gradients}
        self.layers = make_transformer_config(hf.config, self.config, self.mesh, self.device, **more)
        angles = self.described.trunk().rotary_emb.inv_freq.float().to(self.device)
        kernel = hf.config._attn_implementation
        kernel = kernel.removeprefix("packed_") if kernel in attention.NAMES else "rows"
        stages = range(self.virtual or 1)
        self.chunks: list[Any] = [
            PolicyModel(hf.config, self.layers, angles, self.config, kernel, at if self.virtual else None)
            for at in stages
        ]
        for chunk in self.chunks:
            chunk.to(self.device)
            chunk.entropy_clamp = self.entropy_clamp
        self.parameters = [one for chunk in self.chunks for one in self._list_parameters(chunk)]
        for one in self.parameters:
            is_trained = any(self.trainable.is_trained(rectangle.name) for rectangle in one.rectangles)
            is_padding = not one.rectangles and not self.config.use_lora
            one.value.requires_grad_(not self.frozen and (is_trained or is_padding))

    def _list_parameters(self, chunk: PolicyModel) -> Iterator[RankParameter]:
        """Yield the parameters of a chunk, adapters last; set padding of the vocabulary to zero."""
        find = self._make_finder(chunk)
        for name, value in chunk.named_parameters():
            found = find(name)
            used = sum(math.prod(one.sizes) for one in found)
            if used < value.numel():
                value.data.view(-1)[used:].zero_()
            yield self._describe_parameter(name, value, found)
        if isinstance(self.trainable, Lora):
            scale = self.config.lora_alpha / self.config.lora_rank
            targets = self.trainable.targets
            for factor in adapters.attach(chunk, find, targets, self.config.lora_rank, scale):
                yield self._describe_parameter("", *factor)

    def _make_finder(self, chunk: PolicyModel) -> Callable[[str], list[weight_map.Rectangle]]:
        """Return the function from the name of a parameter of a chunk to its rectangles."""
        hf, mesh = self.described.hf.config, self.mesh
        experts = getattr(hf, weight_map.ARCHITECTURES[hf.model_type].num_experts or "none", 0)
        place = weight_map.RankPlace(
            mesh.tensor,
            mesh.tensor_rank,
            mesh.expert_tensor,
            parallel_state.get_expert_tensor_parallel_rank(),
            experts // mesh.experts * parallel_state.get_expert_model_parallel_rank(),
            experts // mesh.experts,
        )

        def find(name: str) -> list[weight_map.Rectangle]:
            parts = name.split(".")
            layer = 0
            if name.startswith("decoder.layers."):
                layer = chunk.first_layer + int(parts.pop(2))
            return weight_map.find_rectangles(
                ".".join(parts), layer, place, self.shapes, hf.num_key_value_heads
            )

        return find

    def _describe_parameter(
        self, name: str, value: torch.nn.Parameter, found: list[weight_map.Rectangle]
    ) -> RankParameter:
        mesh = self.mesh
        is_first_data_rank = {  # of experts (True) and of other weights (False)
            False: mesh.data_rank == 0 and mesh.context_rank == 0,
            True: parallel_state.get_expert_data_parallel_rank() == 0,
        }
        whole = len(found) == 1 and found[0].sizes == found[0].shape
        is_expert = mesh.experts > 1 and ".experts." in name
        # tensor ranks share norms, routers and scores; the last stage has a copy of tied embeddings
        is_first = is_expert or mesh.tensor_rank == 0 or not whole
        is_first = is_first and not getattr(value, "shared", False)
        return RankParameter(value, found, is_first, is_first and is_first_data_rank[is_expert])

    def _build_optimizer(self) -> list[StatePiece]:
        assert self.config.optimizer is not None, "the plan refuses a trained model without an optimizer"
        self.chunks = wrap_chunks(self.chunks, self.layers, self.config.megatron)
        self.optimizer = ShardedOptimizer(
            self.config.optimizer,
            self.config.megatron,
            self.config.dtype,
            self.chunks,
            self.parameters,
        )
        self.scale = LossScale(self.config.optimizer, self.config.dtype == "float16")
        return list(self.optimizer.pieces())

    def _fill(self, empty: bool) -> None:
        """Load the parameters; if `empty`, only parameters that are not in snapshots."""
        trained = [one.piece for one in self.local.pieces if one.kind == "model"]
        if not empty:
            self.trainable.fill([one for one in trained if lora.is_factor(one.name)], self.seed)
        elif not self.config.use_lora:
            return
        pieces = [one for one in trained if not lora.is_factor(one.name)]
        pieces += [
            piece
            for one in self.parameters
            for piece in one.pieces()
            if not self.trainable.is_trained(piece.name)
        ]
        with drawing.draw_into(pieces, self.described.hf):
            model.fill(self.described, self.config, self.seed, pieces, self.mesh.rank, self.shapes)

    def logprobs(self, rows: Sequences, temperature: float) -> list[np.ndarray]:
        out = [np.zeros(len(ids), dtype=np.float32) for ids in rows.ids]
        own, _ = self._groups(rows)

        def collect_values(item: Round, output: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            flat_T = item.inputs.flat(output[0])
            return flat_T.sum(), _make_one(self.device), flat_T

        with torch.no_grad():
            flats = self._pass_through(rows, own, temperature, collect_values, train=False)
        for group, flat in zip(own, self._from_last_stage(rows, own, flats), strict=True):
            ends = np.cumsum([len(out[row]) for row in group])
            for row, end in zip(group, ends, strict=True):
                out[row][:] = flat[end - len(out[row]) : end]
        return out

    def train_batch(
        self, rows: Sequences, loss: LossFn, loss_weight: float, temperature: float
    ) -> dict[str, float]:
        own, total_rows = self._groups(rows)
        if not total_rows:
            raise ValueError("train_batch got no rows on any rank")

        def weigh_loss(
            item: Round, output: Any
        ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
            logprobs_N, entropy_N = output
            loss_sum, sums = loss(make_micro_batch(rows, item.group, item.inputs, logprobs_N, entropy_N))
            if not loss_sum.requires_grad:  # earlier stages wait for a gradient
                loss_sum = loss_sum + 0.0 * logprobs_N.sum()
            reported = {**sums, "loss": loss_sum / loss_weight}
            reported = {name: value.detach().double() for name, value in reported.items()}
            return loss_sum * (self.scale.value / loss_weight), _make_one(self.device), reported

        self.optimizer.zero_grad()
        reports = self._pass_through(rows, own, temperature, weigh_loss, train=True)
        totals: dict[str, torch.Tensor] = {}
        for report in reports:
            for name, value in report.items():
                totals[name] = totals.get(name, 0) + value
        return self._update(totals)

    def _pass_through(
        self, rows: Sequences, own: Groups, temperature: float, loss: Any, train: bool
    ) -> list[Any]:
        """Run micro-batches through the pipeline; return the reports of `loss` on the last stage."""
        rounds = [self._round(rows, group) for group in own]

        def step(iterator: Any, chunk: Any) -> tuple[Any, Any]:
            item = next(iterator)
            return chunk(item.batch, temperature), partial(loss, item)

        for chunk in self.chunks:
            chunk.train(train)
        iterators = [iter(rounds) for _ in self.chunks]
        return get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iterators if self.virtual else iterators[0],
            model=self.chunks if self.virtual else self.chunks[0],
            num_microbatches=len(rounds),
            seq_length=rounds[0].batch.input_ids.shape[1],  # not used: lengths are variable
            micro_batch_size=1,
            forward_only=not train,
        )

    def _round(self, rows: Sequences, group: list[int]) -> Round:
        spec = self.config.mb_spec
        pad_to = (spec.max_tokens_per_mb or 0) if self.config.pad_to_maximum else 0
        shift = 0 if self.config.is_critic else 1
        inputs = make_inputs(rows, group, "packed", torch.device("cpu"), shift)
        mesh = self.mesh

        def move(array: np.ndarray) -> torch.Tensor:
            tensor = torch.from_numpy(array)
            return (tensor.pin_memory() if self.pin_memory else tensor).to(self.device, non_blocking=True)

        batch = packed.share(inputs, mesh.tensor, mesh.context, mesh.context_rank, move, pad_to)
        inputs.wanted_N = move(inputs.wanted_N.numpy())
        return Round(group, inputs, batch)

    def _groups(self, rows: Sequences) -> tuple[Groups, int]:
        """Return this data rank's micro-batches, as many as on other ranks, and the number of all rows."""
        # interleaved stages need a multiple of the pipeline's size
        multiple = self.mesh.pipeline if self.virtual else 1
        return share_rounds(rows, "packed", self.config.mb_spec, self.mesh, multiple)

    def _from_last_stage(self, rows: Sequences, own: Groups, flats: list[torch.Tensor]) -> list[np.ndarray]:
        """Broadcast per-token numbers from the last stage; return them for each micro-batch on all stages."""
        sizes = [sum(len(rows.ids[row]) for row in group) for group in own]
        if flats:
            flat = torch.cat(flats)
        else:
            flat = torch.empty(sum(sizes), dtype=torch.float32, device=self.device)
        if self.mesh.pipeline > 1:
            last = parallel_state.get_pipeline_model_parallel_last_rank()
            dist.broadcast(flat, last, group=parallel_state.get_pipeline_model_parallel_group())
        return np.split(flat.cpu().numpy(), np.cumsum(sizes)[:-1])

    def _update(self, totals: dict[str, torch.Tensor]) -> dict[str, float]:
        self.optimizer.prepare()
        stepped = self._step()
        return {**self._sums(totals), **stepped}

    def _sums(self, totals: dict[str, torch.Tensor]) -> dict[str, float]:
        """Sum the reports of the last stage over data ranks; return the sums on all ranks."""
        mesh = self.mesh
        names = [sorted(totals)]
        if mesh.pipeline > 1:
            first_of_last = mesh.num_ranks // mesh.pipeline * (mesh.pipeline - 1)
            dist.broadcast_object_list(names, first_of_last, device=self.device)
        is_last = mesh.pipeline_rank == mesh.pipeline - 1
        counts = is_last and mesh.tensor_rank == 0 and mesh.context_rank == 0
        mine = [totals[name].item() if counts else 0.0 for name in names[0]]
        return dict(zip(names[0], sum_over_ranks(mine), strict=True))

    def load(self, folder: Path, saved_num_ranks: int, files: Mapping[str, FileRecord] | None = None) -> None:
        super().load(folder, saved_num_ranks, files)
        self.optimizer.parameters_from_main()

    def list_base(self) -> list[Piece]:
        return [
            piece
            for one in self.parameters
            if one.is_owned
            for piece in one.pieces()
            if not self.trainable.is_trained(piece.name)
        ]

    def list_modules(self) -> list[torch.nn.Module]:
        return self.chunks

    def weights(self, bucket_bytes: int = BUCKET_BYTES) -> Iterator[list[tuple[str, torch.Tensor]]]:
        if not self.frozen:
            self.optimizer.gather()
        if self._stream is None:
            dtype = model.DTYPES[self.config.dtype]
            own = [one for one in self.parameters if not lora.is_factor(one.rectangles[0].name)]
            self._stream = WeightStream(self.described.hf, self.mesh, own, dtype)
        yield from self._stream.buckets(bucket_bytes, self.trainable.make_merge(self))


def _add_up_gradients(chunks: list[Any], num_tokens: Any, **groups_of: Any) -> None:
    finalize_model_grads(chunks, None, **groups_of)


def _make_one(device: torch.device) -> torch.Tensor:
    return torch.ones((), dtype=torch.int, device=device)
