"""Policy-gradient algorithms. To add one, add a module and a row here; `actor.algorithm` selects the row."""

from hpc_rl.algorithms import advantages, areal, grpo
from hpc_rl.algorithms.base import Algorithm

ALGORITHMS: dict[str, Algorithm] = {
    "grpo": Algorithm(
        advantages=grpo.compute_advantages,
        policy_loss=grpo.compute_policy_loss,
        overlong_penalty=advantages.compute_overlong_penalty,
        informative_rows=advantages.select_informative_rows,
    ),
    "areal": Algorithm(
        advantages=areal.compute_advantages,
        policy_loss=grpo.compute_policy_loss,
        overlong_penalty=areal.compute_overlong_penalty,
        informative_rows=areal.select_informative_rows,
        drops_groups_first=False,
        compares_given_rewards=False,
        zeroes_truncated=True,
        zero_reference=True,
        recomputes_at_temperature=False,
    ),
}
