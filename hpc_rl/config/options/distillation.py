"""Section `distillation`: the teacher of actor.algorithm opd, opsd and sft_distill."""

from __future__ import annotations

from dataclasses import dataclass

from hpc_rl.config.options.limits import NonNegativeFloat, PositiveFloat

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
    """Pool of the teacher, in section `pools`. null means `teacher`, or with `actor.algorithm: opsd` the
    trained model's own servers."""
    distill_loss_weight: PositiveFloat = 1.0
    """Weight of log teacher - log policy in the credit of a token (opd, opsd)."""
    rl_loss_weight: NonNegativeFloat = 0.0
    """Weight of the reward's credit in the credit of a token (opd, opsd); 0 needs no reward."""
    demonstration_column: str | None = None
    """Column with a demonstration, which only the teacher sees: it scores the samples after the prompt that
    `demonstration_template` makes. null means the policy's prompt; opsd needs it."""
    demonstration_template: str = _DEMONSTRATION
    """The teacher's question in place of the row's. A name in braces stands for a value: {question},
    {demonstration} or a column of the row; other braces are text."""
