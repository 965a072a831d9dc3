"""Evaluations beside training, one at a time: rank 0 waits for them in a thread.

The publisher holds servers at the version (weights/held_servers.py), and the rollout role runs the prompts.
An evaluation that waits for its result is in the manifest of each checkpoint: the next start asks for it
again, and the rollout role continues from its log.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from hpc_rl.core.types import EvalResult, WeightVersion
from hpc_rl.rollout.batch_client import RolloutClient
from hpc_rl.weights.publish import Publisher

logger = logging.getLogger(__name__)
ROUND_S = 10.0  # between checks whether the version can still be loaded
Numbers = dict[str, float | int | str]


@dataclass(frozen=True)
class Evaluation:
    """A version to evaluate, with the names of its held-out sets; "" is valid_dataset."""

    version: str
    step: int
    sets: tuple[str, ...]

    @classmethod
    def parse(cls, data: Mapping[str, Any]) -> "Evaluation":
        return cls(str(data["version"]), int(data["step"]), tuple(map(str, data["sets"])))


@dataclass
class Evaluated:
    """The results of an evaluation by set; or why there are none."""

    evaluation: Evaluation
    results: dict[str, EvalResult] = field(default_factory=dict)
    elapsed_s: float = 0.0
    problem: str = ""


class EvaluationsBeside:
    """The evaluations of a trainer of a lineage. Rank 0 only; its methods are for the main thread.

    `on_progress` is called, from another thread, when prompts are scored.
    """

    def __init__(
        self,
        client: RolloutClient,
        publisher: Publisher,
        lineage: int,
        stopping: threading.Event,
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        self._client, self._publisher, self._lineage = client, publisher, lineage
        self._stopping, self._on_progress = stopping, on_progress
        self._waiting: list[Evaluation] = []  # the first one runs
        self._done: Evaluated | None = None
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None

    def begin(self, evaluation: Evaluation, is_published: bool = False) -> None:
        """Begin an evaluation, or let it wait for those before it."""
        self._waiting.append(evaluation)
        self._publisher.kept = frozenset(one.version for one in self._waiting)
        if len(self._waiting) == 1:
            self._start(is_published)

    def list_pending(self) -> list[dict[str, Any]]:
        """Return the evaluations whose results are not used yet, for `Evaluation.parse`."""
        return [asdict(one) for one in self._waiting]

    @property
    def is_pending(self) -> bool:
        return bool(self._waiting)

    def wait(self, timeout_s: float) -> None:
        """Wait until the running evaluation ends."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def find_result(self) -> Evaluated | None:
        """Return the result, if the evaluation ended; `finish` must follow. Raises its error."""
        if self._error is not None:
            raise self._error
        return self._done

    def finish(self) -> None:
        """Take note that the result is used: begin the next evaluation."""
        self._waiting.pop(0)
        self._done = None
        self._publisher.kept = frozenset(one.version for one in self._waiting)
        if self._waiting:
            self._start(is_published=True)

    def _start(self, is_published: bool) -> None:
        one = self._waiting[0]
        self._publisher.hold(one.version, is_published)
        self._thread = threading.Thread(
            target=self._work, args=(one,), daemon=True, name=f"evaluation-{one.version}"
        )
        self._thread.start()

    def _work(self, one: Evaluation) -> None:
        began = time.monotonic()
        found = Evaluated(one)
        try:
            for name in one.sets:
                result = self._obtain(one, name)
                if self._stopping.is_set() and result is None:
                    return
                if result is None:
                    found.problem = self._publisher.held.problem
                    break
                found.results[name] = result
            found.elapsed_s = time.monotonic() - began
            self._publisher.release()
            self._done = found
        except Exception as error:  # raised on the main thread
            self._error = error

    def _obtain(self, one: Evaluation, name: str) -> EvalResult | None:
        """Return the result of a set; None after a stop, or if no server can load the version."""
        trainer = str(WeightVersion(self._lineage, one.step))
        while not self._publisher.held.problem:
            try:
                return self._client.evaluate(
                    one.version, trainer, name, one.sets, self._stopping, self._on_progress, ROUND_S
                )
            except TimeoutError:
                continue
        return None


def make_numbers(version: str, results: Mapping[str, EvalResult], elapsed_s: float) -> Numbers:
    """Return the metrics of an evaluation; metrics of a named set begin with `eval_<set>/`."""
    numbers: Numbers = {"eval_version": version, "eval_s": elapsed_s}
    for name, result in results.items():
        prefix = f"eval_{name}/" if name else "eval_"
        numbers |= {f"{prefix}{key}": value for key, value in result.stats.items()}
        numbers |= {f"{prefix}reward": result.reward, f"{prefix}num_prompts": result.num_prompts}
    return numbers


def describe_results(results: Mapping[str, EvalResult]) -> str:
    """Return the rewards in words."""
    parts: Sequence[str] = [
        f"held-out reward {f'of {name} ' if name else ''}{one.reward:.4f} over {_count_rows(one)} rows"
        for name, one in results.items()
    ]
    return "; ".join(parts)


def _count_rows(one: EvalResult) -> str:
    left_out = int(one.stats.get("left_out", 0))
    return f"{one.num_prompts} of {one.num_prompts + left_out}" if left_out else str(one.num_prompts)
