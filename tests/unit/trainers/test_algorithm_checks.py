"""Values of the wrong shape, type or component from the user's algorithm stop the trial at the first step."""

import dataclasses
import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch

from hpc_rl.algorithms import grpo, token_batch
from hpc_rl.algorithms.algorithm import Algorithm
from hpc_rl.algorithms.token_batch import Loss, TokenBatch
from hpc_rl.core.algorithms import ALGORITHMS
from hpc_rl.core.errors import ConfigError
from hpc_rl.trainers.algorithm_checks import OutputChecks, try_algorithm
from tests.unit.trainers.test_recipes import RecordingEngine, batch_of, grpo_recipe

NAN = float("nan")


def loss_of(change, name: str = "rl", sums=None):
    """Return a `compute_loss` whose component is GRPO's loss after a change."""

    def compute_loss(tokens: TokenBatch, options: grpo.Options) -> Loss:
        term_T = grpo.compute_loss(tokens, options).components_T["rl"]
        return Loss({name: change(term_T)}, sums or {})

    return {"compute_loss": compute_loss}


def credit_of(change):
    return {"compute_credit": lambda batch, options: change(grpo.compute_credit(batch, options))}


def none_of(value):
    return lambda batch, options: value


def update_with(tmp_path, monkeypatch, functions: dict[str, Any], **actor) -> None:
    """Train a step with two groups of two completions of three tokens, 20 tokens with their prompts."""
    monkeypatch.setitem(sys.modules, "mine", SimpleNamespace(ODD=dataclasses.replace(grpo.GRPO, **functions)))
    recipe = grpo_recipe(tmp_path, RecordingEngine(), algorithm="mine:ODD", **actor)
    recipe.update(6, batch_of([1.0, 0.0], [0.0, 1.0]))


@pytest.mark.parametrize(
    ("functions", "words"),
    [
        (loss_of(lambda T: T.mean()), r"compute_loss, component rl, .*shape \[\], .*shape \[T\] = \[20\]"),
        (loss_of(lambda T: T.mean().reshape(1)), r"shape \[1\], expected .* = \[20\]"),
        (loss_of(lambda T: T[:, None]), r"shape \[20, 1\]"),
        (loss_of(lambda T: T.double()), r"torch.float64 of shape \[20\], expected torch.float32"),
        (loss_of(lambda T: T.tolist()), r"component rl, returned list, expected torch.float32"),
        (loss_of(lambda T: T * NAN), "20 of 20 values that are not finite"),
        (loss_of(lambda T: T - 1), "8 values other than 0 outside of mask_T"),
        (loss_of(lambda T: T, "policy"), "the component 'policy', allowed: rl, ce, ref_kl"),
        (loss_of(lambda T: T, "entropy"), "the component 'entropy', allowed: rl, ce, ref_kl"),
        (loss_of(lambda T: T, sums={"a": 1.0}), r"the sum a of float, expected a tensor of shape \[\]"),
        ({"compute_loss": none_of(torch.zeros(20))}, "compute_loss returned Tensor, expected a Loss"),
        ({"compute_loss": none_of(Loss({}, {}))}, "a Loss without components"),
        (credit_of(lambda BT: BT.sum(1)), r"compute_credit .*shape \[4\], .*shape \[B, T\] = \[4, 5\]"),
        (credit_of(lambda BT: BT[:1]), r"shape \[1, 5\], expected"),
        (credit_of(lambda BT: BT[:, :, None]), r"shape \[4, 5, 1\]"),
        (credit_of(lambda BT: BT.int()), "torch.int32 .*expected torch.float32"),
        (credit_of(lambda BT: BT / 0), "compute_credit returned .* that are not finite"),
        ({"penalize_lengths": none_of(torch.zeros(1))}, r"penalize_lengths .*shape \[B\] = \[4\]"),
        ({"select_groups": none_of(torch.ones(4).bool())}, "select_groups returned Tensor, expected a list"),
        ({"select_groups": none_of([0, 4])}, "select_groups returned a list with 4, .* from 0 to 3"),
        ({"select_rows": none_of([True, False, True, True])}, "select_rows returned a list with True"),
        ({"select_rows": none_of([0, 1, 1])}, "select_rows returned a row number twice"),
    ],
)  # fmt: skip
def test_a_wrong_result_is_refused_with_what_came_and_what_is_expected(
    tmp_path, monkeypatch, functions, words
):
    with pytest.raises(ConfigError, match=words) as caught:
        update_with(tmp_path, monkeypatch, functions)
    (refusal,) = caught.value.refusals
    assert (refusal.option, refusal.value) == ("actor.algorithm", "mine:ODD")


def test_kl_rewards_and_selected_tokens_are_checked(tmp_path, monkeypatch):
    odd = {"compute_kl_rewards": lambda *given: torch.zeros(4)}
    with pytest.raises(ConfigError, match=r"compute_kl_rewards .*\[B, T\] = \[4, 5\]"):
        update_with(tmp_path, monkeypatch, odd, kl_ctl=0.1)
    odd = {"select_tokens": lambda log_weight_N, options: log_weight_N}
    with pytest.raises(
        ConfigError, match=r"select_tokens returned torch.float32 of shape \[12\], .*torch.bool"
    ):
        update_with(tmp_path, monkeypatch, odd)


def test_a_loss_without_gradient_is_refused():
    logprobs_T = torch.full((2,), -1.0, requires_grad=True)
    zero_T = torch.zeros(2)
    tokens = TokenBatch(logprobs_T, zero_T, zero_T, zero_T, torch.ones(2).bool(), zero_T)
    with pytest.raises(ConfigError, match="without gradient"):
        OutputChecks("m:A").check_loss(Loss({"rl": logprobs_T.detach()}, {}), tokens)
    assert OutputChecks("m:A").check_loss(Loss({"rl": logprobs_T, "ce": zero_T}, {}), tokens)


def test_values_that_are_not_finite_are_the_algorithms_fault_only_with_finite_inputs():
    checks, broken_T, zero_T = OutputChecks("m:A"), torch.tensor([NAN, 0.0]), torch.zeros(2)
    tokens = TokenBatch(broken_T, zero_T, zero_T, zero_T, torch.ones(2).bool(), zero_T)
    checks.check_loss(Loss({"rl": broken_T}, {}), tokens)  # the gradient is not finite: the update is skipped
    with pytest.raises(ConfigError, match="1 of 2 values"):
        checks.check_loss(Loss({"rl": broken_T}, {}), tokens._replace(logprobs_T=zero_T))
    finite = tokens._replace(logprobs_T=zero_T)
    checks.check_loss(Loss({"rl": zero_T}, {}), finite)
    checks.check_loss(Loss({"rl": broken_T}, {}), finite)  # later ones are not read


def test_a_rank_without_tokens_passes():
    empty = torch.zeros(0)
    tokens = TokenBatch(empty, empty, empty, empty, empty.bool(), empty)
    OutputChecks("m:A").check_loss(Loss({"rl": empty}, {}), tokens)
    with pytest.raises(ConfigError, match=r"= \[0\]"):
        OutputChecks("m:A").check_loss(Loss({"rl": torch.zeros(1)}, {}), tokens)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_passes_with_made_up_rows(tmp_path, name):
    recipe = grpo_recipe(tmp_path, algorithm=name)
    try_algorithm(recipe.algorithm, recipe.options, name)


def test_made_up_rows_find_the_same_mistakes():
    options = grpo.Options()
    for functions, words in (
        (loss_of(lambda T: T.mean()), r"\[T\] = \[12\]"),
        (credit_of(lambda BT: BT.sum(1)), r"\[B, T\] = \[4, 3\]"),
        ({"select_rows": none_of([4])}, "from 0 to 3"),
        ({"select_tokens": none_of(None)}, "select_tokens returned NoneType"),
    ):
        with pytest.raises(ConfigError, match=words):
            try_algorithm(dataclasses.replace(grpo.GRPO, **functions), options, "mine:ODD")


@dataclass(frozen=True, kw_only=True)
class Typed(token_batch.Options):
    width: float = 0.5
    count: int | None = None
    kind: Literal["soft", "hard"] = "soft"
    names: list[str] = dataclasses.field(default_factory=list)
    other: Any = None
    pair: tuple[float, float] = (0.0, 1.0)


TYPED = Algorithm(options=Typed, compute_credit=grpo.compute_credit, compute_loss=grpo.compute_loss)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"width": 1, "count": 2.0}, {"width": 1.0, "count": 2}),
        ({"count": None, "kind": "hard", "names": ["a"]}, {"count": None, "kind": "hard", "names": ["a"]}),
        ({"other": {"a": [1]}, "pair": [1, 2]}, {"other": {"a": [1]}, "pair": [1, 2]}),
    ],
)
def test_own_options_have_the_types_of_their_fields(tmp_path, monkeypatch, given, wanted):
    monkeypatch.setitem(sys.modules, "mine", SimpleNamespace(TYPED=TYPED))
    options = grpo_recipe(tmp_path, algorithm="mine:TYPED", algorithm_args=given).options
    found = {name: getattr(options, name) for name in wanted}
    assert found == wanted and [type(one) for one in found.values()] == [type(one) for one in wanted.values()]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"width": "0,5"}, r"algorithm_args.width '0,5' can't be used; allowed: a number"),
        ({"width": True}, "allowed: a number"),
        ({"width": None}, "allowed: a number"),
        ({"count": 1.5}, "algorithm_args.count 1.5 can't be used; allowed: an integer or null"),
        ({"kind": "sofd"}, "allowed: soft, hard. Did you mean soft"),
        ({"names": "a"}, "allowed: a list"),
        ({"width": float("inf")}, "It must be finite"),
    ],
)
def test_own_options_of_another_type_are_refused(tmp_path, monkeypatch, given, words):
    monkeypatch.setitem(sys.modules, "mine", SimpleNamespace(TYPED=TYPED))
    with pytest.raises(ConfigError, match=words):
        grpo_recipe(tmp_path, algorithm="mine:TYPED", algorithm_args=given)


@pytest.mark.parametrize(
    ("options", "shown"), [(dict, "dict"), (Typed(), "Typed"), (dataclasses.field, "field")]
)
def test_options_of_another_class_are_refused(tmp_path, monkeypatch, options, shown):
    odd = dataclasses.replace(TYPED, options=options)
    monkeypatch.setitem(sys.modules, "mine", SimpleNamespace(ODD=odd))
    with pytest.raises(ConfigError, match=rf"must be a subclass of .*token_batch\.Options, not .*{shown}"):
        grpo_recipe(tmp_path, algorithm="mine:ODD")
