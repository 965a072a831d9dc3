"""What a start trains on, in sentences and for --json: for `submit`, `recover` and `--explain`."""

from collections.abc import Sequence
from typing import Any

from hpc_rl.submit.first_start import Continuation


def continuation_json(found: Continuation) -> dict[str, Any]:
    return {
        "new_batches": found.new_batches,
        "set_aside_batches": found.set_aside,
        "replayed_batches": found.replayed,
        "learning_rate": found.learning_rate,
        "learning_rate_before": found.learning_rate_before,
        "rejected_prompts": found.rejected,
        "rejected_again": found.rejected_again,
    }


def continuation_lines(found: Continuation) -> list[str]:
    """Return what becomes of the batches after the checkpoint, and of prompts that user code rejected."""
    lines, next_step = [], found.step + 1
    rate = f"learning rate {found.learning_rate:g}" if found.learning_rate is not None else ""
    if rate and found.learning_rate_before not in (None, found.learning_rate):
        rate += f" ({found.learning_rate_before:g} before)"
    at = f", at {rate}" if rate else ""
    if found.new_batches:
        what = _batches(found.set_aside) if found.set_aside else "finished groups"
        lines.append(
            f"batches    step {next_step} and later train on new completions{at}: {what}, made by a policy "
            "or under options that this start gives up, are set aside and their prompts issued again "
            "(`recover --replay` keeps them)"
        )
    elif found.replayed and found.of_another_policy:
        lines.append(
            f"batches    the next steps train on {_batches(found.replayed)}{at}, although a policy or "
            "options that this start gives up made them (without --replay their prompts are issued again)"
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


def _batches(steps: Sequence[int]) -> str:
    return f"batches {steps[0]} to {steps[-1]}" if len(steps) > 1 else f"batch {steps[0]}"
