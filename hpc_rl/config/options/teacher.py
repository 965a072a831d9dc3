"""Section `teacher`: a teacher helps a student, and gets the improvement of its answers as reward."""

from __future__ import annotations

from dataclasses import dataclass, field

from hpc_rl.config.options.limits import NonNegativeFloat, PositiveInt

STUDENT = "student"  # the pool of the student
TRUTH_COLUMNS = ("answer", "ground_truth")  # columns with the right answer; the second is ATLAS's
_DIAGNOSTIC = """\
{question}

Do not answer yet. Say in a few sentences how you would approach this question: which steps you would take,
what you need to know for each, and where you are unsure."""
_ADAPTIVE = """\
You are a teacher. A student has to answer a question, and has said how it would approach it.

Question:
{question}

The student's approach:
{approach}

Find what is missing or wrong in this approach. Then write the shortest teaching with which this student can
answer by itself: the fact, the step or the mistake to avoid that matters most. Do not state the final answer,
and do not work the question out. Write the teaching between <teaching> and </teaching>."""
_WITH_TEACHING = """\
{question}

A teacher who knows how you would approach this question says:
{teaching}

Use what helps. Think step by step, and end with the final answer in \\boxed{}."""
_BASELINE = """\
{question}

Think step by step, and end with the final answer in \\boxed{}."""


@dataclass(kw_only=True)
class TemplatesConfig:
    """Prompts of the two models, each one turn of a user.

    A name in braces stands for a value: {question}, a column of the row, and {approach} and {teaching} once
    they exist. Other braces are text, and values are never searched for names.
    """

    diagnostic: str = _DIAGNOSTIC
    """Asks the student how it would approach the question; the answer is {approach}."""
    adaptive: str = _ADAPTIVE
    """Asks the teacher, the trained model, for a teaching, with {question} and {approach}. {teaching} is the
    text between <teaching> and </teaching>, or the whole completion if they are missing."""
    with_teaching: str = _WITH_TEACHING
    """Asks the student for an answer to {question} with {teaching}."""
    baseline: str = _BASELINE
    """Asks the student for an answer without teaching."""


@dataclass(kw_only=True)
class TeachingConfig:
    """How to probe and teach the student, and the teacher's reward. hpc-rl extension."""

    max_probe_tokens: PositiveInt = 500
    """Largest number of tokens of the student's approach to a question."""
    num_baseline_answers: PositiveInt = 2
    """Number of the student's answers without teaching, per question."""
    num_taught_answers: PositiveInt = 2
    """Number of the student's answers with each teaching."""
    templates: TemplatesConfig = field(default_factory=TemplatesConfig)
    """Prompts of the two models."""
    reward_parts: list[str] = field(default_factory=lambda: ["gain", "solved", "efficiency", "leak"])
    """Parts of a teaching's reward, which is their sum in this order: `gain`, `solved`, `efficiency`, `leak`,
    or your own `package.module:name`. Each is reported as reward_<name>."""
    efficiency_weight: NonNegativeFloat = 1.0
    """Weight of a short teaching: `efficiency` adds this times 100 / (100 + its tokens) of a positive reward.
    """
    degradation_penalty_multiplier: NonNegativeFloat = 2.0
    """Factor of `gain` if the student answers worse with the teaching than without."""
