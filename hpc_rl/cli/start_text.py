"""The first start of a job, as lines and for --json: changed options, and the data that it trains on."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from hpc_rl.config.changes import Change
from hpc_rl.trials.first_start import Continuation


def list_changes(changes: Sequence[Change]) -> list[str]:
    """Return one line for each option whose value differs from the earlier start."""
    return [f"changed    {change}" for change in changes]


def format_change_json(change: Change) -> dict[str, Any]:
    """Return a change for --json; `renews` tells whether it needs new batches."""
    row = dataclasses.asdict(change)
    row["renews"] = row.pop("new_batches")
    return row


def format_continuation_json(found: Continuation) -> dict[str, Any]:
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


def describe_continuation(found: Continuation) -> list[str]:
    """Describe the future of the batches after the checkpoint, and of rejected prompts."""
    lines, next_step = [], found.step + 1
    rate = "" if found.learning_rate is None else _format_rate(found.learning_rate, found.learning_rate_exact)
    at = f", at learning rate {rate}" if rate else ""
    before = found.learning_rate_before
    if at and before is not None and not math.isclose(before, found.learning_rate or 0.0, rel_tol=1e-6):
        at += f" ({before:.4g} before)"
    if found.raised_by_length and found.highest_learning_rate is not None and before is not None:
        highest = _format_rate(found.highest_learning_rate, found.learning_rate_exact)
        times = f", {found.highest_learning_rate / before:.2g} times step {found.step}'s" if before else ""
        rises = f"step {next_step} has learning rate {rate} ({before:.4g} before)"
        if highest != rate:
            rises += f", and it rises to {highest}"
        why = "the schedule runs over all steps, and there are more now; a lower lr keeps the rate"
        lines.append(f"warning    {rises}{times}: {why}")
    if found.new_batches:
        what = _format_batches(found.set_aside) if found.set_aside else "finished groups"
        lines.append(
            f"batches    step {next_step} and later train on new completions{at}: {what} came from the "
            "old policy or old options, and will be regenerated (`recover --replay` keeps them)"
        )
    elif found.replayed and found.of_another_policy:
        lines.append(
            f"batches    the next steps train on {_format_batches(found.replayed)}{at}, "
            "although they came from the old policy or old options (without --replay they are regenerated)"
        )
    elif found.replayed:
        lines.append(f"batches    the next steps train on {_format_batches(found.replayed)} again")
    count = "any prompts" if found.rejected is None else f"{found.rejected} prompts"
    if found.rejected_again and found.rejected != 0:
        lines.append(f"rejected   {count} that the earlier reward or workflow rejected are generated again")
    elif found.rejected:
        why = "its code and options are the same as before"
        lines.append(f"rejected   {count} that the reward or the workflow rejected stay rejected: {why}")
    return lines


def _format_rate(rate: float, is_exact: bool) -> str:
    return f"{'' if is_exact else 'about '}{rate:.4g}"


def _format_batches(steps: Sequence[int]) -> str:
    return f"batches {steps[0]} to {steps[-1]}" if len(steps) > 1 else f"batch {steps[0]}"
