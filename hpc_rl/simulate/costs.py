"""The costs of a trial's work, in seconds, with their origin: measured in a trial, or a named default."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

DEFAULT_LENGTHS = (7.0, 0.8)  # mu and sigma of the logarithm of a completion's tokens
NUM_DEFAULT_LENGTHS = 4096
DEFAULT_BYTES = 16.4e9  # of the model of the defaults
DEFAULT_SAVED_BYTES = 7 * DEFAULT_BYTES  # of its checkpoint: float32 weights and two moments besides


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Every cost. The defaults are for a dense model of 8 billion parameters on H100 GPUs.

    `origins` tells where a value comes from; a cost without an entry is a default.
    """

    # a generation server: one decode iteration gives each of n sequences a token
    decode_s: float = 0.010  # of an iteration, whatever n
    decode_sequence_s: float = 5e-5  # more for each sequence
    prefill_token_s: float = 2e-5  # per token of a new prompt, or of a sequence whose cache was dropped
    prompt_tokens: float = 512.0
    server_sequences: int = (
        256  # sequences that a server decodes at once: its setting, or what its cache holds
    )
    reward_s: float = 0.1  # from the last token of a group to its place in the batch log
    lengths: tuple[int, ...] = ()  # tokens of completions; empty: lognormal, up to max_new_tokens
    # training
    train_s: float = 2.0  # of a step, whatever its tokens
    train_token_s: float = 1.2e-4  # per token, on one rank
    train_scaling: float = 0.97  # efficiency that remains when the number of ranks doubles
    train_ranks: int = 8  # ranks at which train_token_s holds
    batch_s: float = 0.1  # from the last group of a batch to the trainer's first computation
    log_s: float = 0.05  # of a step: metrics, exports and the rest
    # publication: n x overhead + bytes / bandwidth (docs/publication_cost.md)
    model_bytes: float = DEFAULT_BYTES
    num_tensors: int = 399
    changed_share: float = 0.037  # of the bytes, in a difference
    blocked_tensor_s: float = 17e-6
    blocked_byte_s: float = 1 / 6.5e9
    write_tensor_s: float = 74e-6
    write_byte_s: float = 1 / 1.8e9
    apply_tensor_s: float = 62e-6
    apply_byte_s: float = 1 / (4 * 2.2e9)  # four threads on a node
    network_byte_s: float = 1 / 10e9  # of collectives
    publish_blocked_s: float = 0.0  # measured: replaces the four lines above
    publish_write_s: float = 0.0  # measured: from the end of the step to the servers' switch
    publish_pause_s: float = 0.3  # of generation on a server, for a difference
    # shared file system
    file_byte_s: float = 1 / 2e9  # all readers and writers share it
    file_ops_per_s: float = 5000.0  # of metadata
    visible_s: float = 1.0  # until another node sees a new file
    # checkpoints, evaluations, starts
    save_s: float = 20.0  # training waits, or (async_save) the writing
    save_copy_s: float = 1.0  # training waits with async_save
    load_s: float = 60.0  # a trainer reads a checkpoint
    evaluate_s: float = 60.0  # training waits, or (evaluator.blocking false) servers are lent
    start_job_s: float = 5.0  # from the start of the job to the supervisor
    start_step_s: float = 0.02  # between the starts of two nodes' steps
    start_server_s: float = 120.0
    start_rollout_s: float = 20.0
    start_trainer_s: float = 90.0
    end_s: float = 10.0  # from the last step to the end of the job: the last export and the ends of all roles
    start_unit_ops: float = 60.0  # file operations of a process at its start
    origins: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def drawn_lengths(self) -> tuple[int, ...]:
        """Completion lengths to draw from."""
        if self.lengths:
            return self.lengths
        drawn = random.Random(0)
        return tuple(
            max(1, round(drawn.lognormvariate(*DEFAULT_LENGTHS))) for _ in range(NUM_DEFAULT_LENGTHS)
        )

    @property
    def mean_length(self) -> float:
        return sum(self.drawn_lengths) / len(self.drawn_lengths)

    def cap_lengths(self, max_new_tokens: int) -> Costs:
        """Return the costs with completions of at most `max_new_tokens`."""
        return replace(self, lengths=tuple(min(one, max_new_tokens) for one in self.drawn_lengths))

    def replace_measured(self, origin: str, **values: Any) -> Costs:
        """Return the costs with values of a known origin."""
        return replace(self, **values, origins={**self.origins, **dict.fromkeys(values, origin)})

    def compute_token_s(self, num_sequences: int) -> float:
        """Return the seconds of one decode iteration of a server with `num_sequences` sequences."""
        return self.decode_s + self.decode_sequence_s * num_sequences

    def compute_train_s(self, tokens: float, ranks: int) -> float:
        """Return the seconds of the updates of a step."""
        efficiency = self.train_scaling ** math.log2(ranks / self.train_ranks)
        return self.train_s + tokens * self.train_token_s / ranks / efficiency

    def fit_model(self, size: float, gpu_size: float, checkpoint_bytes: float) -> Costs:
        """Return the costs with the defaults that depend on the model scaled to its size.

        `size` is that of the served model in bytes, `gpu_size` that of the part on each GPU of a server. Half
        of the fixed time of an iteration reads the weights.
        """
        model, part, saved = (
            size / DEFAULT_BYTES,
            gpu_size / DEFAULT_BYTES,
            checkpoint_bytes / DEFAULT_SAVED_BYTES,
        )
        factors = {
            "train_token_s": model, "prefill_token_s": part, "decode_s": (1 + part) / 2,
            "save_s": saved, "save_copy_s": saved, "load_s": saved,
        }  # fmt: skip
        scaled = {name: getattr(self, name) * factors[name] for name in factors if name not in self.origins}
        return replace(self, **scaled)

    def list_defaults(self) -> list[str]:
        """Return the names of the costs that were not measured."""
        return [one.name for one in fields(self) if one.name not in self.origins and one.name != "origins"]


@dataclass(frozen=True, kw_only=True)
class Published:
    """The times of one publication, in seconds."""

    blocked_s: float  # the trainer waits
    complete_s: float  # afterwards, until the servers can switch
    pause_s: float  # a server does not generate


def compute_publication(costs: Costs, mode: str, ranks: int, nodes: int, whole: bool) -> Published:
    """Return the times of a publication by `weight_update_mode`, of all values or of the changed ones.

    `ranks` write, and `nodes` with servers read.
    """
    size = costs.model_bytes
    if costs.publish_write_s:  # measured, on a system of that size
        return Published(
            blocked_s=costs.publish_blocked_s, complete_s=costs.publish_write_s, pause_s=costs.publish_pause_s
        )
    if mode == "xccl":
        sent_s = costs.num_tensors * costs.blocked_tensor_s + size * costs.network_byte_s
        return Published(blocked_s=sent_s, complete_s=0.0, pause_s=sent_s)
    share = 1.0 if whole else costs.changed_share
    blocked_s = costs.num_tensors * costs.blocked_tensor_s + size / ranks * costs.blocked_byte_s
    write_s = costs.num_tensors * costs.write_tensor_s + size / ranks * costs.write_byte_s
    moved_s = (1 + nodes) * share * size * costs.file_byte_s
    apply_s = costs.num_tensors * ranks * costs.apply_tensor_s + size * costs.apply_byte_s
    meta_s = (ranks + nodes * ranks) / costs.file_ops_per_s + costs.visible_s
    return Published(
        blocked_s=blocked_s, complete_s=write_s + moved_s + apply_s + meta_s, pause_s=costs.publish_pause_s
    )
