"""Rules about servers and trainer that take turns on the same units (`|` in `allocation_mode`)."""

from collections.abc import Collection, Iterator

from hpc_rl.config.options.experiment import Config, GRPOConfig
from hpc_rl.config.rules.consistency import list_given
from hpc_rl.config.rules.engine_rules import find_engine
from hpc_rl.core.allocation import MAX_AHEAD_IN_TURNS, parse
from hpc_rl.core.errors import ConfigError
from hpc_rl.core.refusal import UNSET, Kind, Refusal

_OPTION = "allocation_mode"


def has_shared_units(config: Config) -> bool:
    """Return whether servers and trainer take turns; false if the plan will refuse the allocation."""
    try:
        return bool(config.allocation_mode.strip()) and parse(config.allocation_mode).colocate
    except ConfigError:
        return False


def check_sharing(config: GRPOConfig, explicit: Collection[str]) -> Iterator[Refusal]:
    if not has_shared_units(config):
        return
    ahead = config.rollout.max_head_offpolicyness
    if config.async_training and ahead > MAX_AHEAD_IN_TURNS:
        why = "the servers do not generate while the trainer trains"
        yield _refuse("rollout.max_head_offpolicyness", ahead, why, "use 0 or 1")
    if config.actor.weight_update_mode != "disk":
        why = "no server runs while the trainer sends weights"
        yield _refuse("actor.weight_update_mode", config.actor.weight_update_mode, why, "use disk")
    if config.environments is not None:
        why = "environments send requests at any time"
        yield _refuse("environments", UNSET, why, "give servers and trainer their own units, with '+'")
    if find_engine(config) != "fsdp":
        why = ": megatron can't take turns with servers, because it can't move its state to CPU memory"
        value, use = config.allocation_mode, "use fsdp, or '+'"
        yield Refusal(option=_OPTION, value=value, kind=Kind.UNSUPPORTED, why=why, use=use)
    if config.launcher.slurm.layout != "allocation":
        why = "no node has servers only"
        yield _refuse("launcher.slurm.layout", config.launcher.slurm.layout, why, "use allocation, or '+'")
    for option in list_given(config, explicit, ("weights.pause_mode", "weights.max_paused")):
        why = f"has no effect with '|' in {_OPTION}: all servers stop while the trainer trains"
        yield Refusal(option=option, kind=Kind.NO_EFFECT, why=why, use="remove it", related=(_OPTION,))


def _refuse(option: str, value: object, why: str, use: str) -> Refusal:
    why = f"can't be used with '|' in {_OPTION}: {why}"
    return Refusal(option=option, value=value, kind=Kind.CONFLICT, why=why, use=use, related=(_OPTION,))


GRPO_RULES = [check_sharing]
