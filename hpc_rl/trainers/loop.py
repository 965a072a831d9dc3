"""The training loop.

What a step is made of is the recipe's (grpo.py, sft.py); when to save, evaluate and stop is the run's.

A step's line of metrics is written before its generation, so that no step that counts is without its line;
`save_s` in a line is therefore the time spent on saving since the line before.
"""

from __future__ import annotations

from typing import Any, Protocol

from hpc_rl.errors import ConfigError, ExitCode
from hpc_rl.trainers.run import Run


class Recipe(Protocol):
    """One kind of training. All methods but `frontier` and `retain` are called by every rank."""

    total_steps: int

    def batch(self, step: int) -> Any | None:
        """The whole train batch of a step; None when the trainer is told to stop while it waits."""

    def update(self, step: int, batch: Any) -> None:
        """Train on it; numbers go to the run's tracker."""

    def publish(self, step: int) -> None:
        """Bring the weights after `step` to whoever generates with them."""

    def evaluate(self, step: int) -> dict[str, float | int | str] | None:
        """Numbers on held-out data; {} where there is none (or on a rank that does not ask), None when told
        to stop meanwhile.
        """

    def position(self, step: int) -> tuple[int, int]:
        """(finished epochs, rows of the next one that are used up) after a step."""

    def frontier(self, step: int) -> dict[str, int]:
        """Where the batch log stood when the state after `step` was made; {} where there is none.

        Rank 0 only.
        """

    def retain(self, step: int) -> None:
        """Generations before `step` are gone: what is kept only for them may go. Rank 0 only."""


def train(run: Run, recipe: Recipe) -> ExitCode:
    """Train from the run's step to the end, or to the boundary after a stop; returns the exit code of the
    role.

    Raises ConfigError where the end lies before the state that was loaded.
    """
    total = run.total_steps = recipe.total_steps
    if run.step > total:
        raise ConfigError(
            f"the training ends after step {total}, and the state that was loaded is of step {run.step}: raise total_train_steps "
            "(or total_train_epochs, total_train_n_seqs), or go on from an earlier generation by `hpc-rl recover --from`."
        )
    if run.is_done(total):
        return ExitCode.DONE
    if run.step < total or run.owes_evaluation:
        run.does("publish", run.step)
        recipe.publish(run.step)
        if run.step == 0 or run.owes_evaluation:
            run.evaluate(recipe, run.step)

    for step in range(run.step + 1, total + 1):
        run.does("wait", step)
        with run.stats.timed("wait_s"):
            batch = recipe.batch(step)
        if run.any_rank(batch is None):
            return run.stop(recipe, step - 1)
        run.does("train", step)
        with run.stats.timed("train_s"):
            recipe.update(step, batch)
        run.does("publish", step)
        with run.stats.timed("publish_s"):
            recipe.publish(step)
        due = run.due(recipe, step)
        if due.evaluate or step == total:
            run.evaluate(recipe, step)
        if due.export:
            run.exports.write_step(step)
        run.log(step)
        stops = due.stop or run.owes_evaluation  # told to stop meanwhile: it is owed of this very state
        if due.save or stops or step == total:
            run.save(recipe, step, last=step == total)
        if stops and step < total:
            return run.stop(recipe, step)

    if run.owes_evaluation or not run.exports.write_final(total):
        return run.stop(recipe, total)
    return run.finish(recipe, total)
