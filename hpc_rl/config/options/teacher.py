"""Section `teacher`: a student is taught, and how much better it answers is the teacher's reward."""

from __future__ import annotations

from dataclasses import dataclass, field

from hpc_rl.config.options.limits import NonNegativeFloat, PositiveInt

STUDENT = "student"  # the pool of the model that is taught
TRUTH_COLUMNS = ("answer", "ground_truth")  # with the right answer of a row; the second is ATLAS's
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
    """What the two models are asked, as one turn of a user.

    A name in braces stands for a value: {question}, or a column of the row, and where it exists {approach} or
    {teaching}. Other braces are text, and values are never searched for names.
    """

    diagnostic: str = _DIAGNOSTIC
    """Asks the student how it would approach the question; the answer is {approach}."""
    adaptive: str = _ADAPTIVE
    """Asks the teacher, the model that is trained, for a teaching; it knows {question} and {approach}. The
    text between <teaching> and </teaching> is {teaching}, or the whole completion without them."""
    with_teaching: str = _WITH_TEACHING
    """Asks the student for an answer to {question} with {teaching}."""
    baseline: str = _BASELINE
    """Asks the student for an answer without teaching."""


@dataclass(kw_only=True)
class TeachingConfig:
    """How a student is probed and taught, and what the teacher is rewarded for. hpc-rl extension."""

    max_probe_tokens: PositiveInt = 500
    """Largest number of tokens in which the student says how it would approach a question."""
    num_baseline_answers: PositiveInt = 2
    """Answers of the student without teaching, for each question."""
    num_taught_answers: PositiveInt = 2
    """Answers of the student with each teaching."""
    templates: TemplatesConfig = field(default_factory=TemplatesConfig)
    """What the two models are asked."""
    reward_parts: list[str] = field(default_factory=lambda: ["gain", "solved", "efficiency", "leak"])
    """What the reward of a teaching is the sum of, in this order: `gain`, `solved`, `efficiency`, `leak`, or
    `package.module:name` of your own. Each is reported as reward_<name>."""
    efficiency_weight: NonNegativeFloat = 1.0
    """How much a short teaching is worth: `efficiency` adds this times 100 / (100 + its tokens) of a positive
    reward."""
    degradation_penalty_multiplier: NonNegativeFloat = 2.0
    """Factor of `gain` where the student answers worse with the teaching than without."""
