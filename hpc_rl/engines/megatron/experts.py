"""Experts of Megatron's layers as one grouped product, whatever their number, and their tokens' order.

Without Transformer Engine, Megatron computes one expert after another; with and without it, the host reads
the number of tokens of each expert in each layer, so that a GPU waits for it. Here sizes stay on the device.
Only ranks that exchange tokens read them, once per layer: the sizes of the messages must be known.
"""

from typing import Any

import torch
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import nn

from hpc_rl.engines.megatron.groups import find_places, multiply_groups, order_chunks


def replace_dispatchers(model: nn.Module) -> None:
    """Let the layers of experts order their tokens on the device."""
    for layer in model.modules():
        if isinstance(layer, MoELayer):
            layer.token_dispatcher = TokenDispatcher(
                layer.num_local_experts,
                layer.local_expert_indices,
                config=layer.config,
                pg_collection=get_default_pg_collection(),
            )


class GroupedExperts(MegatronModule):
    """The gated MLPs of a rank's experts."""

    def __init__(self, num_local_experts: int, config: Any, pg_collection: Any, **kwargs: Any) -> None:
        super().__init__(config=config)
        width = config.moe_ffn_hidden_size // pg_collection.expt_tp.size()
        # [expert, gate and up, hidden] and [expert, hidden, width]
        self.gate_up = _make_matrices(config, num_local_experts, 2 * width, config.hidden_size)
        self.down = _make_matrices(config, num_local_experts, config.hidden_size, width)

    def forward(
        self, hidden_NH: torch.Tensor, num_tokens_E: torch.Tensor, weights_N: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """Compute the outputs [N, H] of tokens in the order of experts, times their weights, and no bias."""
        ends_E = num_tokens_E.cumsum(0).to(torch.int32)
        gate, up = multiply_groups(hidden_NH, self.gate_up, ends_E).chunk(2, -1)
        inner = self.config.activation_func(gate) * up * weights_N[:, None]
        return multiply_groups(inner.to(hidden_NH.dtype), self.down, ends_E), None


def _make_matrices(config: Any, *shape: int) -> nn.Parameter:
    device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
    value = nn.Parameter(torch.empty(shape, dtype=config.params_dtype, device=device))
    # False: the gradient is not summed over ranks with other experts
    setattr(value, "allreduce", config.expert_model_parallel_size == 1)  # noqa: B010
    return value


class TokenDispatcher(MoEAlltoAllTokenDispatcher):
    """Sends tokens to the ranks of their experts and puts them in the order of the experts."""

    input_splits: Any  # numbers of tokens for and from other ranks: on the device, then on the host
    output_splits: Any
    output_splits_tp: Any

    def __init__(self, *args: Any, config: Any, **kwargs: Any) -> None:
        super().__init__(*args, config=config, **kwargs)
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        self.order = self.sort_input_by_local_experts.to(device)
        self.exchanges = self.tp_size * self.ep_size > 1

    def dispatch_preprocess(
        self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Repeat this rank's tokens, in the order of all experts."""
        self.hidden_shape, self.probs, self.routing_map = hidden_states.shape, probs, routing_map
        hidden_TH = hidden_states.view(-1, self.hidden_shape[-1])
        self.hidden_shape_before_permute = hidden_TH.shape
        self.tokens_per_expert = self.preprocess(routing_map)
        chosen_N = find_places(routing_map.T.reshape(-1), self.num_out_tokens)
        tokens_N = self.reversed_local_input_permutation_mapping = chosen_N % len(hidden_TH)
        return hidden_TH.index_select(0, tokens_N), probs.T.reshape(-1).index_select(0, chosen_N)

    def dispatch_postprocess(
        self, global_input_tokens: torch.Tensor, global_probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Put the tokens that all ranks sent in the order of this rank's experts."""
        tokens, weights = global_input_tokens, global_probs
        if self.tp_size > 1:
            tokens, weights = (
                gather_from_sequence_parallel_region(
                    one, group=self.tp_group, output_split_sizes=self.output_splits_tp
                )
                for one in (tokens, weights)
            )
        if self.exchanges:
            sizes = self.num_global_tokens_per_local_expert.ravel()
            self.rows_N = order_chunks(sizes, self.order, len(tokens))
            tokens, weights = tokens.index_select(0, self.rows_N), weights.index_select(0, self.rows_N)
        return tokens, self.tokens_per_expert, weights

    def combine_preprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Put outputs in the order in which the tokens came; sum the parts of the tensor ranks."""
        if self.exchanges:
            hidden_states = torch.zeros_like(hidden_states).index_copy(0, self.rows_N, hidden_states)
        if self.tp_size == 1:
            return hidden_states
        summed = reduce_scatter_to_sequence_parallel_region(
            hidden_states.to(self.probs.dtype), group=self.tp_group, input_split_sizes=self.output_splits_tp
        )
        return summed.to(hidden_states.dtype)

    def _maybe_dtoh_and_synchronize(self, point: str, tokens_per_expert: Any = None) -> Any:
        """Read the sizes of the messages of other ranks, all at once."""
        if self.exchanges and point == "before_ep_alltoall":
            splits = [self.input_splits, self.output_splits, self.output_splits_tp]
            found = torch.cat(splits).tolist()
            sizes = [len(one) for one in splits]
            self.input_splits, self.output_splits = found[: sizes[0]], found[sizes[0] : sum(sizes[:2])]
            self.output_splits_tp = found[sum(sizes[:2]) :]
        return tokens_per_expert
