"""Policy-gradient algorithms: to add one, add a module and a row; `actor.algorithm` names the row."""

from hpc_rl.algorithms import advantages, areal, grpo
from hpc_rl.algorithms.base import Algorithm

ALGORITHMS: dict[str, Algorithm] = {
    "grpo": Algorithm(
        advantages=grpo.advantages,
        policy_loss=grpo.policy_loss,
        overlong_penalty=advantages.overlong_penalty,
        informative_rows=advantages.informative_rows,
    ),
    "areal": Algorithm(
        advantages=areal.advantages,
        policy_loss=grpo.policy_loss,
        overlong_penalty=areal.overlong_penalty,
        informative_rows=areal.informative_rows,
        drops_groups_first=False,
        compares_given_rewards=False,
        zeroes_truncated=True,
        zero_reference=True,
        recomputes_at_temperature=False,
    ),
}
