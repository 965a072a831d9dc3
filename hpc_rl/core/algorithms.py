"""The algorithms that `actor.algorithm` can name, as seen by the configuration.

The configuration reads this table without importing torch. The functions of an algorithm are on its page in
hpc_rl/algorithms.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

_TAUS = ("sapo_tau_pos", "sapo_tau_neg")


@dataclass(frozen=True)
class AlgorithmRow:
    """An algorithm of hpc-rl."""

    path: str  # module:name of its Algorithm
    # option of section `actor` -> its default if a file names this algorithm
    defaults: Mapping[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ()  # sections of the configuration, such as `critic`
    ignores: tuple[str, ...] = _TAUS  # options of section `actor` without effect
    sampled_by: Literal["policy", "teacher"] = "policy"


_PAGES = "hpc_rl.algorithms"
_GRPO = f"{_PAGES}.grpo:GRPO"
_OF_GROUP = {"reward_norm.mean_level": "group", "reward_norm.std_level": "group"}
_CENTERED = {"reward_norm.mean_level": "group", "reward_norm.std_level": None}
_OF_BATCH = {"adv_norm.mean_level": "batch", "adv_norm.std_level": "batch"}
_GSPO = {
    **_OF_GROUP,
    "importance_sampling_level": "sequence",
    "eps_clip": 3e-4,
    "eps_clip_higher": 4e-4,
    "loss_aggregation": "sequence_mean",
}
_OPD, _TEACHER = f"{_PAGES}.opd:OPD", ("distillation",)
_OF_REWARDS = ("reward_norm", "adv_norm", "kl_ctl", "length_penalty", "dynamic_sampling")
ALGORITHMS: dict[str, AlgorithmRow] = {
    "grpo": AlgorithmRow(_GRPO),
    "ppo": AlgorithmRow(f"{_PAGES}.ppo:PPO", {**_OF_BATCH, "gae_lambda": 0.95}, needs=("critic",)),
    "dapo": AlgorithmRow(_GRPO, {**_OF_GROUP, "eps_clip_higher": 0.28, "dynamic_sampling": True}),
    "dr_grpo": AlgorithmRow(_GRPO, {**_CENTERED, "loss_aggregation": "constant_length"}),
    "lite_ppo": AlgorithmRow(_GRPO, {"reward_norm.mean_level": "group", "reward_norm.std_level": "batch"}),
    "rloo": AlgorithmRow(_GRPO, {**_CENTERED, "reward_norm.mean_leave1out": True}),
    "reinforce_pp": AlgorithmRow(f"{_PAGES}.reinforce_pp:REINFORCE_PP", _OF_BATCH),
    "max_rl": AlgorithmRow(f"{_PAGES}.max_rl:MAX_RL", ignores=(*_TAUS, "reward_norm")),
    "gspo": AlgorithmRow(f"{_PAGES}.gspo:GSPO", _GSPO),
    "gspo_token": AlgorithmRow(f"{_PAGES}.gspo:GSPO_TOKEN", _GSPO),
    "cispo": AlgorithmRow(
        f"{_PAGES}.cispo:CISPO",
        {**_OF_GROUP, "eps_clip": 1.0, "eps_clip_higher": 4.0},
        ignores=(*_TAUS, "c_clip"),
    ),
    "sapo": AlgorithmRow(
        f"{_PAGES}.sapo:SAPO",
        {**_OF_GROUP, "use_sapo_loss": True},
        ignores=("eps_clip", "eps_clip_higher", "c_clip"),
    ),
    "m2po": AlgorithmRow(
        f"{_PAGES}.m2po:M2PO", {**_OF_GROUP, "m2_threshold": 0.04, "use_decoupled_loss": True}
    ),
    "opd": AlgorithmRow(_OPD, needs=_TEACHER, ignores=(*_TAUS, "dynamic_sampling")),
    "opsd": AlgorithmRow(_OPD, needs=_TEACHER, ignores=(*_TAUS, "dynamic_sampling")),
    "sft_distill": AlgorithmRow(
        f"{_PAGES}.sft_distill:SFT_DISTILL",
        needs=_TEACHER,
        ignores=(*_TAUS, *_OF_REWARDS, "eps_clip", "eps_clip_higher", "c_clip"),
        sampled_by="teacher",
    ),
    "areal": AlgorithmRow(f"{_PAGES}.areal:AREAL", ignores=(*_TAUS, "length_penalty")),
}
# Algorithms whose credit is an advantage over the values of a critic, if there is one.
TAKE_CRITIC = ("ppo", "gspo", "gspo_token", "cispo", "sapo", "m2po")
# Options of section `actor` that may have another value for one data set.
OF_SETS = (
    *("discount", "gae_lambda", "length_penalty", "dynamic_sampling"),
    *("eps_clip", "eps_clip_higher", "c_clip", *_TAUS),
)
NOT_OF_SETS = ("areal", "m2po", "ppo")  # algorithms that need the whole batch, or a critic
# Option of AReaL, the value that selects an algorithm (None: any but null), the algorithms that it allows.
SELECTED_BY: tuple[tuple[str, Any, tuple[str, ...]], ...] = (
    ("importance_sampling_level", "sequence", ("gspo", "gspo_token")),
    ("use_sapo_loss", True, ("sapo",)),
    ("m2_threshold", None, ("m2po",)),
)
