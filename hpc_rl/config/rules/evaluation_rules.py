"""Rules about evaluations during training, about their servers, and about further held-out sets."""

from collections.abc import Collection, Iterator
from typing import Any

from hpc_rl.config.held_out import MAIN_SET
from hpc_rl.config.options.experiment import Config, GRPOConfig, has_trainer
from hpc_rl.config.pool_view import EVALUATION_POOL, has_evaluation_pool
from hpc_rl.config.rules.consistency import list_given
from hpc_rl.core.allocation import parse
from hpc_rl.core.refusal import Kind, Refusal

_BESIDE = ("evaluator.blocking", "evaluator.server_share", "evaluator.end_wait_s")


def adapt_defaults(config: Config, explicit: Collection[str]) -> dict[str, tuple[Any, str]]:
    """Return option -> (new default, reason)."""
    if isinstance(config, GRPOConfig) and (found := _find_reason_to_pause(config)):
        return {"evaluator.blocking": (True, found[0])}
    return {}


def _find_reason_to_pause(config: GRPOConfig) -> tuple[str, str] | None:
    """Return why an evaluation must pause training, and the option; None if it need not."""
    if not has_trainer(config):
        return None
    if config.allocation_mode and parse(config.allocation_mode).colocate:
        return "servers and trainer take turns on the same GPUs", "allocation_mode"
    if config.critic is not None and config.saver.keep_best is not None:
        return (
            "saver.keep_best also exports the critic, so training must wait for each evaluation",
            "saver.keep_best",
        )
    return None


def check_trainer(config: Config, explicit: Collection[str]) -> Iterator[Refusal]:
    """Refuse options of grpo and teacher for other trainers."""
    if isinstance(config, GRPOConfig):
        return
    given = list_given(config, explicit, _BESIDE) + ["evaluator.sets"] * bool(config.evaluator.sets)
    for option in given:
        why = f"has no effect with trainer {config.trainer}, which evaluates valid_dataset itself"
        yield Refusal(option=option, kind=Kind.NO_EFFECT, why=why, use="remove it", related=("trainer",))


def check_servers(config: GRPOConfig, explicit: Collection[str]) -> Iterator[Refusal]:
    """Refuse options and servers without an effect."""
    evaluator, has_pool = config.evaluator, has_evaluation_pool(config)
    if has_pool and (evaluator.blocking or config.valid_dataset is None):
        needed = "evaluator.blocking false" if evaluator.blocking else "valid_dataset.path"
        why = f"has servers for the pool {EVALUATION_POOL}, which need {needed}"
        yield Refusal(
            option="allocation_mode",
            value=config.allocation_mode,
            kind=Kind.CONFLICT,
            why=why,
            related=("evaluator.blocking" if evaluator.blocking else "valid_dataset.path",),
        )
    for option in list_given(config, explicit, _BESIDE[1:]):
        if evaluator.blocking:
            why, related = "has no effect with evaluator.blocking", "evaluator.blocking"
        elif has_pool and option == "evaluator.server_share":
            why = f"has no effect with servers for the pool {EVALUATION_POOL}"
            related = "allocation_mode"
        else:
            continue
        yield Refusal(option=option, kind=Kind.NO_EFFECT, why=why, use="remove it", related=(related,))


def check_blocking(config: GRPOConfig, explicit: Collection[str]) -> Iterator[Refusal]:
    found = _find_reason_to_pause(config)
    if found and not config.evaluator.blocking:
        why, use = f"can't be used: {found[0]}", "remove it"
        option = "evaluator.blocking"
        yield Refusal(option=option, value="false", kind=Kind.CONFLICT, why=why, use=use, related=(found[1],))


def check_sets(config: GRPOConfig, explicit: Collection[str]) -> Iterator[Refusal]:
    if MAIN_SET in config.evaluator.sets:
        option = f"evaluator.sets.{MAIN_SET}"
        why = f"can't be used: {MAIN_SET} is the name of the set of section {MAIN_SET}"
        yield Refusal(option=option, kind=Kind.VALUE, why=why, use="rename the set")


RULES = [check_trainer]
GRPO_RULES = [check_servers, check_blocking, check_sets]
