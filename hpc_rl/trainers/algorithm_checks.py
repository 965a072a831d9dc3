"""Checks of the values that an algorithm returns.

Without them, a tensor of another shape would be broadcast, and a mask would pass for row numbers: the trial
would train something else without an error. Shapes and types are checked at each call; values only until a
call with tokens has passed, because reading them makes a GPU wait.
"""

from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from hpc_rl.algorithms.algorithm import Algorithm
from hpc_rl.algorithms.token_batch import Loss, RewardBatch, TokenBatch
from hpc_rl.core.errors import ConfigError
from hpc_rl.core.refusal import Kind, Refusal

OPTION = "actor.algorithm"
COMPONENTS = ("rl", "ce", "ref_kl")


class OutputChecks:
    """The checks of the algorithm `name`. All methods raise ConfigError, which is never retried."""

    def __init__(self, name: str = "", option: str = OPTION) -> None:
        self.name = name
        self.option = option  # that names the algorithm
        self._passed: set[str] = set()  # functions whose values were finite once

    def check_tensor(
        self,
        function: str,
        value: Any,
        shape: Sequence[int],
        axes: str,
        dtype: torch.dtype = torch.float32,
        inputs: Sequence[torch.Tensor | None] = (),
    ) -> torch.Tensor:
        """Return the result of a function, which must be a tensor of this shape and type.

        `axes` names the axes for the message, such as "[B, T]". The first result of finite `inputs` must be
        finite.
        """
        self._check_shape(function, value, shape, axes, dtype)
        if function not in self._passed and value.numel() and _are_finite(inputs):
            self._check_finite(function, value)
            self._passed.add(function)
        return value

    def check_rows(self, function: str, rows: Any, num_rows: int) -> list[int]:
        """Return the result of a function, which must be a list of different numbers below `num_rows`."""
        expected = f"expected a list of different row numbers, of type int, from 0 to {num_rows - 1}"
        if not isinstance(rows, list):
            self._refuse(f"{function} returned {type(rows).__name__}, {expected}")
        if odd := [one for one in rows if type(one) is not int or not 0 <= one < num_rows]:
            self._refuse(f"{function} returned a list with {odd[0]!r}, {expected}")
        if len({*rows}) < len(rows):
            self._refuse(f"{function} returned a row number twice, {expected}")
        return rows

    def check_loss(self, loss: Any, tokens: TokenBatch) -> Loss:
        """Return the result of `compute_loss`, which must be a loss of these tokens.

        The first values must be finite if the tokens' are, and 0 outside of the mask.
        """
        allowed = ", ".join(COMPONENTS)
        if not isinstance(loss, Loss) or not loss.components_T:
            got = "a Loss without components" if isinstance(loss, Loss) else type(loss).__name__
            self._refuse(f"compute_loss returned {got}, expected a Loss with one or more of {allowed}")
        parts = loss.components_T
        for name, term_T in parts.items():
            if name not in COMPONENTS:
                self._refuse(f"compute_loss returned the component {name!r}, allowed: {allowed}")
            function = f"compute_loss, component {name},"
            self._check_shape(function, term_T, tokens.logprobs_T.shape, "[T]", torch.float32)
        for name, total in loss.sums.items():
            got = f"shape {list(total.shape)}" if isinstance(total, torch.Tensor) else type(total).__name__
            if got != "shape []":
                self._refuse(f"compute_loss returned the sum {name} of {got}, expected a tensor of shape []")
        if tokens.logprobs_T.requires_grad and not any(term_T.requires_grad for term_T in parts.values()):
            use = "compute them from tokens.logprobs_T"
            self._refuse(f"compute_loss returned values without gradient, so nothing would be learned; {use}")
        if "compute_loss" not in self._passed and bool(tokens.mask_T.any()) and _can_be_finite(tokens):
            for name, term_T in parts.items():
                self._check_values(name, term_T.detach(), tokens.mask_T)
            self._passed.add("compute_loss")
        return loss

    def _check_values(self, name: str, term_T: torch.Tensor, mask_T: torch.Tensor) -> None:
        function = f"compute_loss, component {name},"
        self._check_finite(function, term_T)
        if outside := int((term_T[~mask_T] != 0).sum()):
            use = "use tokens.mask_tokens"
            self._refuse(f"{function} returned {outside} values other than 0 outside of mask_T; {use}")

    def _check_shape(
        self, function: str, value: Any, shape: Sequence[int], axes: str, dtype: torch.dtype
    ) -> None:
        expected = f"expected {dtype} of shape {axes} = {list(shape)}"
        if not isinstance(value, torch.Tensor):
            self._refuse(f"{function} returned {type(value).__name__}, {expected}")
        if list(value.shape) != list(shape) or value.dtype is not dtype:
            self._refuse(f"{function} returned {value.dtype} of shape {list(value.shape)}, {expected}")

    def _check_finite(self, function: str, value: torch.Tensor) -> None:
        if wrong := int((~value.isfinite()).sum()):
            count = f"{wrong} of {value.numel()} values"
            self._refuse(f"{function} returned {count} that are not finite, from finite inputs")

    def _refuse(self, problem: str) -> NoReturn:
        raise ConfigError(Refusal(option=self.option, value=self.name, kind=Kind.FILE, why=f": {problem}"))


def _are_finite(tensors: Sequence[torch.Tensor | None]) -> bool:
    return all(bool(one.isfinite().all()) for one in tensors if one is not None)


def _can_be_finite(tokens: TokenBatch) -> bool:
    """Return whether a loss of the trained tokens can be finite."""
    inputs = (tokens.prox_T, tokens.behav_T, tokens.credit_T, tokens.ref_T, tokens.teacher_T)
    known = [tokens.logprobs_T.detach(), *(one for one in inputs if one is not None)]
    return _are_finite([one[tokens.mask_T] for one in known])


def try_algorithm(algorithm: Algorithm, options: Any, name: str, option: str = OPTION) -> None:
    """Call the functions of an algorithm in the order of a step, on made-up rows.

    There are two groups of two trajectories, with three tokens of which the last two are generated. Raises
    ConfigError as OutputChecks does, and the algorithm's own exceptions.
    """
    checks, mask_BT = OutputChecks(name, option), torch.tensor([[False, True, True]]).repeat(4, 1)
    logprobs_BT = torch.where(mask_BT, -1.0, 0.0)
    has_teacher = "distillation" in algorithm.needs
    batch = RewardBatch(
        rewards_B=torch.tensor([1.0, 0.0, 1.0, 0.5]),
        masks=mask_BT,
        group_B=torch.tensor([0, 0, 1, 1]),
        given_B=torch.tensor([1.0, 0.0, 1.0, 0.5]),
        truncated_B=torch.zeros(4, dtype=torch.bool),
        lengths_B=torch.full((4,), 3),
        group_size=2,
        values_BT=torch.where(mask_BT, 0.25, 0.0) if "critic" in algorithm.needs else None,
        logprobs_BT=logprobs_BT if has_teacher else None,
        teacher_BT=1.5 * logprobs_BT if has_teacher else None,
    )
    checks.check_tensor("penalize_lengths", algorithm.penalize_lengths(batch, options), [4], "[B]")
    checks.check_rows("select_groups", algorithm.select_groups(batch, options), 4)
    credit_BT = algorithm.compute_credit(batch, options)
    checks.check_tensor("compute_credit", credit_BT, mask_BT.shape, "[B, T]")
    checks.check_rows("select_rows", algorithm.select_rows(batch, options), 4)
    prox_T = 1.25 * logprobs_BT.flatten()
    if algorithm.select_tokens is not None:
        log_weight_N = (prox_T - logprobs_BT.flatten())[mask_BT.flatten()]
        kept_N = algorithm.select_tokens(log_weight_N, options)
        checks.check_tensor("select_tokens", kept_N, log_weight_N.shape, "[N]", torch.bool)
    mask_T, current_T = mask_BT.flatten(), logprobs_BT.flatten().requires_grad_()
    tokens = TokenBatch(
        logprobs_T=current_T,
        prox_T=prox_T,
        behav_T=logprobs_BT.flatten(),
        credit_T=torch.where(mask_T, credit_BT.flatten(), 0.0),
        mask_T=mask_T,
        entropy_T=-current_T,
        row_T=torch.arange(4).repeat_interleave(3),
        teacher_T=1.5 * logprobs_BT.flatten() if has_teacher else None,
    )
    checks.check_loss(algorithm.compute_loss(tokens, options), tokens)
