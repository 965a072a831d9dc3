"""What a start trains on, in sentences and for --json: for `submit`, `recover` and `--explain`."""

import math
from collections.abc import Sequence
from typing import Any

from hpc_rl.trials.first_start import Continuation


def continuation_json(found: Continuation) -> dict[str, Any]:
    return {
        "new_batches": found.new_batches,
        "set_aside_batches": found.set_aside,
        "replayed_batches": found.replayed,
        "learning_rate": found.learning_rate,
        "learning_rate_before": found.learning_rate_before,
        "highest_learning_rate": found.highest_learning_rate,
        "learning_rate_exact": found.learning_rate_exact,
        "raised_by_length": found.raised_by_length,
        "rejected_prompts": found.rejected,
        "rejected_again": found.rejected_again,
    }


def continuation_lines(found: Continuation) -> list[str]:
    """Return what becomes of the batches after the checkpoint, and of prompts that user code rejected."""
    lines, next_step = [], found.step + 1
    rate = "" if found.learning_rate is None else _rate_text(found.learning_rate, found.learning_rate_exact)
    at = f", at learning rate {rate}" if rate else ""
    before = found.learning_rate_before
    if at and before is not None and not math.isclose(before, found.learning_rate or 0.0, rel_tol=1e-6):
        at += f" ({before:.4g} before)"
    if found.raised_by_length and found.highest_learning_rate is not None and before is not None:
        highest = _rate_text(found.highest_learning_rate, found.learning_rate_exact)
        times = (
            f", {found.highest_learning_rate / before:.2g} times that of step {found.step}" if before else ""
        )
        rises = f"step {next_step} has learning rate {rate} ({before:.4g} before)"
        if highest != rate:
            rises += f", and it rises to {highest}"
        why = "the schedule runs over all steps, and there are more now; a lower lr keeps the rate"
        lines.append(f"warning    {rises}{times}: {why}")
    if found.new_batches:
        what = _batches(found.set_aside) if found.set_aside else "finished groups"
        lines.append(
            f"batches    step {next_step} and later train on new completions{at}: {what} came from the "
            "old policy or old options, and will be regenerated (`recover --replay` keeps them)"
        )
    elif found.replayed and found.of_another_policy:
        lines.append(
            f"batches    the next steps train on {_batches(found.replayed)}{at}, although they came from "
            "the old policy or old options (without --replay they are regenerated)"
        )
    elif found.replayed:
        lines.append(f"batches    the next steps train on {_batches(found.replayed)} again")
    count = "any prompts" if found.rejected is None else f"{found.rejected} prompts"
    if found.rejected_again and found.rejected != 0:
        lines.append(f"rejected   {count} that the earlier reward or workflow rejected are generated again")
    elif found.rejected:
        why = "its code and options are the same as before"
        lines.append(f"rejected   {count} that the reward or the workflow rejected stay rejected: {why}")
    return lines


def _rate_text(rate: float, is_exact: bool) -> str:
    return f"{'' if is_exact else 'about '}{rate:.4g}"


def _batches(steps: Sequence[int]) -> str:
    return f"batches {steps[0]} to {steps[-1]}" if len(steps) > 1 else f"batch {steps[0]}"
