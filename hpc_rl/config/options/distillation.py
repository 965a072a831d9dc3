"""Section `distillation`: the teacher of actor.algorithm opd, opsd and sft_distill."""

from __future__ import annotations

from dataclasses import dataclass

from hpc_rl.config.options.limits import NonNegativeFloat, NonNegativeInt, PositiveFloat

# Shenfeld et al., arXiv 2601.19897, section 3
_DEMONSTRATION = """\
{question}

This is an example for a response to the question:
{demonstration}

Now answer with a response of your own, including the thinking process."""


@dataclass(kw_only=True)
class DistillationConfig:
    """The teacher that the policy learns from. hpc-rl extension."""

    pool: str | None = None
    """Pool of the teacher, in section `pools`; null means `teacher`. The name of the trained model's pool
    (`rollout`) makes the policy its own teacher, which changes with it."""
    distill_loss_weight: PositiveFloat = 1.0
    """Weight of log teacher - log policy in the credit of a token (opd, opsd), or of the divergence of
    `top_k` in its loss."""
    rl_loss_weight: NonNegativeFloat = 0.0
    """Weight of the reward's credit in the credit of a token (opd, opsd); 0 needs no reward."""
    top_k: NonNegativeInt = 0
    """Learn from the teacher's `top_k` most probable tokens at each position (opd, opsd): KL(teacher ||
    policy) over these and the class of all others, as a term of the loss in place of the credit. 0 uses the
    sampled token alone. The batch log stores 8 more bytes for each of them."""
    demonstration_column: str | None = None
    """Column with a demonstration, which only the teacher sees: it scores the samples after the prompt that
    `demonstration_template` makes. null means the policy's prompt; opsd needs it."""
    demonstration_template: str = _DEMONSTRATION
    """The teacher's question in place of the row's. A name in braces stands for a value: {question},
    {demonstration} or a column of the row; other braces are text."""
