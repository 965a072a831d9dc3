"""Rewards by the model of another pool: `judge`, which answers a chat, and reward models.

A judge scores a completion once at each of several temperatures.
"""

import asyncio
import logging
import re
from typing import Any

import xxhash

from hpc_rl.config.options.inference import JudgeConfig
from hpc_rl.datasets.encode import encode_scored, find_question
from hpc_rl.datasets.order import make_sample_seed
from hpc_rl.rollout.batch_log.ledger import RejectReason
from hpc_rl.rollout.rewards import BatchReward, Rejection, check_number, fill_from_row
from hpc_rl.rollout.server_pool import ChatPool, ServerPool

logger = logging.getLogger(__name__)
MAX_SHOWN_CHARS = 200  # of an answer without a score
_SCORE = re.compile(r"<score>\s*([0-9]+\.?[0-9]*|\.[0-9]+)\s*</score>", re.IGNORECASE)


class Judge:
    """Use `reward`, as of any other reward; only its requests limit the time of a call.

    Seeds follow from the trial's seed and the question, so the same completion gets the same score.
    """

    def __init__(self, pool: ChatPool, options: JudgeConfig, seed: int, trace: bool = False) -> None:
        self._pool, self._options, self._seed, self._trace = pool, options, seed, trace

    async def reward(self, prompt: Any, completion: str, columns: dict[str, Any]) -> float:
        """Return the mean score, from 0 to 1; temperatures that gave no score are skipped.

        Raises Rejection if the judge gives no score at all.
        """
        known = {"question": find_question({"prompt": prompt})[0], "completion": completion}
        text = fill_from_row("rollout.judge.template", self._options.template, columns, known)
        numbers = range(len(self._options.temperatures))
        answers = await asyncio.gather(*(self._score(text, number) for number in numbers))
        scores = [answer for answer in answers if isinstance(answer, float)]
        unscored = [answer for answer in answers if isinstance(answer, Rejection)]
        if not scores:
            raise unscored[-1]
        for rejection in unscored:
            logger.warning(
                "%s; the reward is the mean of the scores at other temperatures", rejection.message
            )
        return sum(scores) / len(scores)

    async def _score(self, text: str, number: int) -> float | Rejection:
        """Return the score at a temperature, or why the judge gave none."""
        temperature, answer = self._options.temperatures[number], ""
        digest = xxhash.xxh64_intdigest(text.encode())
        for attempt in range(self._options.retries + 1):
            seed = make_sample_seed(self._seed, "judge", digest, f"{number}/{attempt}")
            chat = [{"role": "user", "content": text}]
            answer = (await self._pool.ask(chat, [seed], temperature=temperature))[0].text
            score = find_score(answer)
            if self._trace:
                logger.info("the judge at temperature %g gave the score %s:\n%s", temperature, score, answer)
            if score is not None:
                return score
        problem = (
            f"the judge of pool {self._options.pool} gave no score from 0 to 1 between <score> and </score>"
        )
        shown = f"its last answer at temperature {temperature:g} ends with {answer[-MAX_SHOWN_CHARS:]!r}"
        return Rejection(RejectReason.REWARD_EXCEPTION, f"{problem}; {shown}")


def make_model_reward(pool: ServerPool) -> BatchReward:
    """Return the reward of a reward model: its score of prompt and completion, encoded as in its training."""

    async def rewards(prompt: Any, completions: list[str], columns: dict[str, Any]) -> list[float]:
        row = {**columns, "prompt": prompt}
        inputs = [encode_scored(pool.tokenizer, row, text).tolist() for text in completions]
        return [check_number(score, f"the score of pool {pool.name}") for score in await pool.score(inputs)]

    return rewards


def find_score(text: str) -> float | None:
    """Return the last score in a judge's answer; None without one from 0 to 1."""
    scores = _SCORE.findall(text.rpartition("</think>")[2])
    score = float(scores[-1]) if scores else None
    return score if score is not None and 0 <= score <= 1 else None
