"""The training loop: the recipe defines a step; the run decides when to save, evaluate, export and stop.

A step's line of metrics is written before its generation, so every saved step has its line. `save_s` in a
line is therefore the time spent on saving since the previous line.
"""

from typing import Any, Protocol

from hpc_rl.config.options.experiment import LENGTH_OPTIONS
from hpc_rl.core.errors import ConfigError, ExitCode
from hpc_rl.core.refusal import Kind, Refusal
from hpc_rl.trainers.run import Run


class Recipe(Protocol):
    """One kind of training. Every rank calls all methods except `frontier` and `retain`."""

    total_steps: int

    def batch(self, step: int) -> Any | None:
        """Return the whole train batch of a step; None if the trainer must stop while it waits."""

    def update(self, step: int, batch: Any) -> None:
        """Train on a batch. Adds metrics to the run's tracker."""

    def publish(self, step: int) -> None:
        """Send the weights after `step` to the generation servers."""

    def evaluate(self, step: int) -> dict[str, float | int | str] | None:
        """Return metrics on held-out data; None if the trainer must stop meanwhile.

        Returns {} without held-out data, and on ranks that do not evaluate.
        """

    def position(self, step: int) -> tuple[int, int]:
        """Return (finished epochs, used rows of the current epoch) after a step."""

    def frontier(self, step: int) -> dict[str, int]:
        """Return the position of the batch log after `step`; {} without a batch log. Rank 0 only."""

    def retain(self, step: int) -> None:
        """Release data that only removed generations before `step` needed. Rank 0 only."""


def train(run: Run, recipe: Recipe) -> ExitCode:
    """Train from the run's step to the end, or until the end of a step after a stop; return the exit code.

    Raises ConfigError if the loaded state is beyond the end.
    """
    total = run.total_steps = recipe.total_steps
    if run.step > total:
        why = f"the training ends after step {total}, but the loaded state is of step {run.step}"
        use = f"raise {' or '.join(LENGTH_OPTIONS)}, or use an earlier checkpoint: `hpc-rl recover --from`"
        raise ConfigError(Refusal(option="", kind=Kind.CONFLICT, why=why, use=use, related=LENGTH_OPTIONS))
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
        if run.ranks.any(batch is None):
            return run.stop(recipe, step - 1)
        run.does("train", step)
        with run.stats.timed("train_s"):
            recipe.update(step, batch)
        run.does("publish", step)
        with run.stats.timed("publish_s"):
            recipe.publish(step)
        stops, saves, evaluates, exports = run.due(recipe, step)
        if evaluates or step == total:
            run.evaluate(recipe, step)
        if exports:
            run.exports.write_step(step)
        run.log(step)
        # a stop interrupted the evaluation, so the next start must repeat it for this state
        stops = stops or run.owes_evaluation
        if saves or stops or step == total:
            run.save(recipe, step, last=step == total)
        if stops and step < total:
            return run.stop(recipe, step)

    if run.owes_evaluation or not run.finish_evaluations(recipe, total) or not run.exports.write_final(total):
        return run.stop(recipe, total)
    return run.finish(recipe, total)
