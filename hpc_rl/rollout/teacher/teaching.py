"""The workflow `teacher`: probe and teach a student; its improvement is the teacher's reward.

For each question:

1. the student's answers without a teaching (`baseline`), and in parallel the description of its approach (the
   probe): once for a prompt, shared by its group, and not repeated after a kill;
2. one input for the teacher, from question and approach, and n_samples completions of it: only these tokens
   are trained on;
3. the student's answers with each teaching (`taught`), all by one request to one of its servers, and the
   reward of each (reward.py).

`rollout.reward_fn` scores the answers. All texts come from templates with named values, each one a chat turn
for its model.
"""

import asyncio
import logging
from dataclasses import dataclass
from typing import Any

from hpc_rl.config.options.experiment import GRPOConfig, TeacherConfig
from hpc_rl.config.options.teacher import STUDENT, TemplatesConfig
from hpc_rl.core.errors import ConfigError
from hpc_rl.core.refusal import Kind, Refusal
from hpc_rl.core.types import Reply, Trajectory, TrajectoryGroup, Turn
from hpc_rl.datasets.encode import find_question
from hpc_rl.rollout.rewards import BUILTINS, LIMITED, fill_from_row
from hpc_rl.rollout.rewards.answers import find_truth
from hpc_rl.rollout.server_pool import Chat
from hpc_rl.rollout.teacher.leak import find_teaching, has_leaked
from hpc_rl.rollout.teacher.reward import Lesson, compute_values, load_parts
from hpc_rl.rollout.workflow import Sampler, trajectory

logger = logging.getLogger(__name__)


class TeacherWorkflow:
    """See above; use `create`."""

    def __init__(self, config: TeacherConfig) -> None:
        self._options, self._templates = config.teacher, config.teacher.templates
        self._parts = load_parts(config.teacher.reward_parts)
        # the user's own reward may need no right answer, or have it in another column
        self._needs_answer = not {*BUILTINS, *LIMITED}.isdisjoint(config.rollout.reward_functions)
        self._trace = config.rollout.enable_rollout_tracing

    @classmethod
    def create(cls, config: GRPOConfig) -> "TeacherWorkflow":
        if not isinstance(config, TeacherConfig):
            why = "needs trainer teacher and its section `teacher`"
            raise ConfigError(
                Refusal(option="rollout.workflow", value="teacher", kind=Kind.CONFLICT, why=why)
            )
        return cls(config)

    async def run(self, prompt: dict[str, Any], generate: Sampler) -> TrajectoryGroup:
        """Return a group of one trajectory for each teaching."""
        row = _Row.of(prompt)

        async def probe() -> Reply:
            chat = row.chat("diagnostic", self._templates)
            self._show_chat(generate, "probe", chat)
            return (await generate.ask(chat, STUDENT, 1, "probe", self._options.max_probe_tokens))[0]

        async def baseline() -> list[Reply]:
            chat, num = row.chat("baseline", self._templates), self._options.num_baseline_answers
            self._show_chat(generate, "baseline", chat)
            return await generate.ask(chat, STUDENT, num, "baseline")

        probed, answers = await asyncio.gather(
            generate.once("probe", probe), generate.once("baseline", baseline)
        )
        approach = probed.text.strip()
        chat = row.chat("adaptive", self._templates, approach=approach)
        self._show_chat(generate, "teacher", chat)
        ids = generate.tokenizer.encode(generate.tokenizer.chat(chat), add_special_tokens=False)
        turns, p_baseline = await asyncio.gather(
            generate.samples(ids), self._score(row, generate, "baseline", answers)
        )
        self._show(generate, "probe", probed.text)
        answered = await self._teach(row, generate, turns, approach)
        lessons = (
            self._reward(row, generate, number, (ids, turn), answers, approach, p_baseline)
            for number, (turn, answers) in enumerate(zip(turns, answered, strict=True))
        )
        return TrajectoryGroup(generate.index, list(await asyncio.gather(*lessons)))

    async def _teach(
        self, row: "_Row", generate: Sampler, turns: list[Turn], approach: str
    ) -> list[list[Reply]]:
        """Return the student's answers with each teaching."""
        chats: dict[str, Chat] = {}
        for number, turn in enumerate(turns):
            teaching = find_teaching(generate.tokenizer.decode(turn.output_ids))
            chat = row.chat("with_teaching", self._templates, approach=approach, teaching=teaching)
            self._show_chat(generate, label := f"taught.{number}", chat)
            chats[label] = chat
        answered = await generate.ask_many(chats, STUDENT, self._options.num_taught_answers)
        for number, found in enumerate(answered.values()):
            if not isinstance(found, list):
                form = "teaching %d of prompt %d gets no reward, as it can't be input of the student: %s"
                logger.info(form, number, generate.index, found)
        # a value, not a missing row: a teaching that the student can't read teaches nothing
        return [found if isinstance(found, list) else [] for found in answered.values()]

    async def _reward(
        self,
        row: "_Row",
        generate: Sampler,
        number: int,
        completion: tuple[list[int], Turn],
        answers: list[Reply],
        approach: str,
        p_baseline: float,
    ) -> Trajectory:
        """Return the trajectory of a teaching, with its reward for the student's answers."""
        text = generate.tokenizer.decode(completion[1].output_ids)
        teaching, truth = find_teaching(text), find_truth(row.columns)
        lesson = Lesson(
            baseline=p_baseline,
            taught=await self._score(row, generate, f"taught.{number}", answers),
            teaching=teaching,
            num_tokens=len(generate.tokenizer.encode(teaching, add_special_tokens=False)),
            leaks=truth is not None and has_leaked(truth, teaching, row.question, approach),
            has_answer=self._is_scored(row),
            efficiency_weight=self._options.efficiency_weight,
            degradation_penalty_multiplier=self._options.degradation_penalty_multiplier,
        )
        values = compute_values(self._parts, lesson)
        result = trajectory([completion], sum(values.values()))
        result.stats |= make_stats(lesson) | {f"reward_{name}": value for name, value in values.items()}
        self._show(generate, f"teaching {number}, reward {result.reward:g}", text)
        return result

    def _is_scored(self, row: "_Row") -> bool:
        return not self._needs_answer or find_truth(row.columns) is not None

    async def _score(self, row: "_Row", generate: Sampler, label: str, answers: list[Reply]) -> float:
        """Return the mean score of answers; 0 for none, and for a row without a right answer."""
        scored = answers if self._is_scored(row) else []
        scores = await asyncio.gather(*(generate.reward(row.columns, answer.text) for answer in scored))
        for number, answer in enumerate(answers):
            score = f"scored {scores[number]:g}" if scores else "not scored"
            self._show(generate, f"{label}, answer {number}, {score}", answer.text)
        return sum(scores) / len(scores) if scores else 0.0

    def _show_chat(self, generate: Sampler, what: str, chat: Chat) -> None:
        turns = (f"[{turn.get('role')}] {turn.get('content')}" for turn in chat)
        self._show(generate, f"{what}, asked", "\n".join(turns))

    def _show(self, generate: Sampler, what: str, text: str) -> None:
        if self._trace:
            logger.info("prompt %d, %s:\n%s", generate.index, what, text)


def make_stats(lesson: Lesson) -> dict[str, float]:
    """Return the metrics of a lesson; accuracies only if its answers could be scored."""
    known = {"teaching_tokens": float(lesson.num_tokens), "leak": float(lesson.leaks)}
    if not lesson.has_answer:
        return known
    return {
        "baseline_accuracy": lesson.baseline,
        "student_accuracy": lesson.taught,
        "accuracy_delta": lesson.taught - lesson.baseline,
        "improved": float(lesson.taught > lesson.baseline),
        "degraded": float(lesson.taught < lesson.baseline),
        **known,
    }


@dataclass(frozen=True)
class _Row:
    """A prompt: its columns, its question, and the turns before it."""

    columns: dict[str, Any]
    question: str
    before: Chat

    @classmethod
    def of(cls, prompt: dict[str, Any]) -> "_Row":
        return cls(
            {name: value for name, value in prompt.items() if name != "input_ids"}, *find_question(prompt)
        )

    def chat(self, name: str, templates: TemplatesConfig, **values: str) -> Chat:
        """Return the conversation, with the question in its template as the last turn.

        A system turn is for the student only. Raises Rejection for a column that the row lacks.
        """
        known = {"question": self.question, **values}
        option = f"teacher.templates.{name}"
        text = fill_from_row(option, getattr(templates, name), self.columns, known)
        to_student = name != "adaptive"
        before = [turn for turn in self.before if to_student or turn.get("role") != "system"]
        return [*before, {"role": "user", "content": text}]
