"""`hpc-rl samples <trial>`: completions of steps and evaluations, with their rewards."""

import json
import math
import shutil
import sys
import textwrap
from dataclasses import asdict

from hpc_rl.cli import list as listing
from hpc_rl.cli.options import CommandParser, Count, Namespace
from hpc_rl.core.errors import ConfigError, ExitCode
from hpc_rl.core.log import escape_controls
from hpc_rl.core.trial import Trial
from hpc_rl.stats.kept_samples import MAX_COLUMN_CHARS, MAX_ROW_CHARS, Sample, load_samples, select_step
from hpc_rl.status.formatting import format_number

DEFAULT_N = 5
MAX_WIDTH = 120
INDENT = 16  # of the text, in columns
DESCRIPTION = """Show completions of a trial: prompt, completion, reward and its parts, advantage, finish
reason, versions of the weights. The default is the newest step; see --step, --all, --best and --worst."""
EPILOG = f"""A trial keeps rollout.keep_samples groups of each step and evaluator.keep_samples prompts of each
evaluation. --jsonl prints one object per completion: step, evaluation, prompt_index, sample, prompt,
completion, reward, stats, advantage, finish_reason, versions, num_tokens, given (ranges of characters of
the completion that the workflow wrote between two turns), columns (the other columns
of the row, such as the right answer), shortened (names of columns that are cut: each has at most
{MAX_COLUMN_CHARS} characters, all columns of a row {MAX_ROW_CHARS}), output (text that its agent
wrote, shortened)."""


def make_parser() -> CommandParser:
    made = CommandParser(DESCRIPTION, EPILOG)
    made.add_trial("the one that runs, else the newest")
    made.add_argument("--step", type=Count, metavar="N", help="samples of this step (default: the newest)")
    made.add_flag("--all", help="samples of all steps")
    made.add_flag("--eval", help="samples of evaluations, not of steps")
    made.add_flag("--best", help="highest rewards first")
    made.add_flag("--worst", help="lowest rewards first")
    text = "samples of all steps with this text in prompt, completion or columns"
    made.add_argument("--search", metavar="TEXT", help=text)
    reward = "samples with a reward from A to B; A or B may be left out"
    made.add_argument("--reward", metavar="A..B", help=reward)
    number = f"number of samples to show (default: {DEFAULT_N}; with --jsonl all)"
    made.add_argument("-n", type=Count, metavar="N", help=number)
    made.add_flag("--jsonl", help="one JSON object per line instead")
    return made


def main(args: Namespace) -> int:
    least, most = _parse_bounds(args.reward)
    trial = listing.find_trial(args.trial)
    kept = [one for one in load_samples(trial) if one.evaluation == args.eval]
    is_sorted = args.best or args.worst
    every = args.step is None and (args.all or is_sorted or args.search)
    found = [one for one in select_step(kept, args.step, every) if least <= one.reward <= most]
    if args.search:
        found = [one for one in found if has_text(one, args.search)]
    if is_sorted:
        found.sort(key=lambda one: one.reward, reverse=bool(args.best))
    if args.jsonl:
        for one in found[: args.n]:
            print(json.dumps(asdict(one)))
        return ExitCode.DONE
    if not found:
        print(_describe_nothing(trial, kept, args))
        return ExitCode.DONE
    width = min(shutil.get_terminal_size().columns, MAX_WIDTH)
    shown = found[: DEFAULT_N if args.n is None else args.n]
    print("\n\n".join("\n".join(_format_text(one, width)) for one in shown))
    if len(found) > len(shown):
        print(f"\n{len(shown)} of {len(found)} completions are shown: -n shows more", file=sys.stderr)
    return ExitCode.DONE


def _parse_bounds(text: str | None) -> tuple[float, float]:
    """Return the least and the largest reward of `A..B`. Raises ConfigError."""
    low, dots, high = ("..", "..", "") if text is None else text.partition("..")
    try:
        bounds = (-math.inf, math.inf) if text is None else (float(low or "-inf"), float(high or "inf"))
    except ValueError:
        bounds = (1.0, 0.0)
    if bounds[0] > bounds[1] or (text is not None and not dots):
        raise ConfigError(f"--reward is {text!r}; it must be A..B, such as 0.5..1, ..0 or 1..")
    return bounds


def has_text(one: Sample, text: str) -> bool:
    """Return whether a text is in the prompt, the completion or a column, in any case of letters."""
    texts = (one.prompt, one.completion, *map(one.format_column, one.columns))
    return any(text.casefold() in part.casefold() for part in texts)


def _describe_nothing(trial: Trial, kept: list[Sample], args: Namespace) -> str:
    what = "evaluation" if args.eval else "step"
    if kept:
        steps = sorted({one.step for one in kept})
        return f"no completion of {trial} matches; steps with completions: {steps[0]} to {steps[-1]}"
    option = "evaluator.keep_samples" if args.eval else "rollout.keep_samples"
    return f"{trial} has no completions of {what}s yet ({option} 0 keeps none)"


def _format_text(one: Sample, width: int) -> list[str]:
    what = f"evaluation after step {one.step}, row" if one.evaluation else f"step {one.step}, prompt"
    parts = ", ".join(f"{name} {format_number(value)}" for name, value in one.stats.items())
    facts = [f"reward {format_number(one.reward)}{f' ({parts})' if parts else ''}"]
    facts += [] if one.advantage is None else [f"advantage {one.advantage:+.4g}"]
    facts += [f"{one.num_tokens} tokens", one.finish_reason, f"weights {', '.join(one.versions)}"]
    head = f"{what} {one.prompt_index}, sample {one.sample}: {'; '.join(facts)}"
    blocks = [("completion" if made else "given", text) for made, text in one.texts()]
    columns = [("row", one.format_column(name)) for name in one.columns]
    output = [("output", one.output.rstrip("\n"))] if one.output else []
    return [
        head,
        *(
            line
            for part in [("prompt", one.prompt), *columns, *blocks, *output]
            for line in format_block(*part, width)
        ),
    ]


def format_block(name: str, text: str, width: int) -> list[str]:
    """Return lines of text, wrapped, behind a name."""
    wrapped = [
        part
        for line in escape_controls(text).split("\n")
        for part in textwrap.wrap(line, width - INDENT) or [""]
    ]
    return [f"  {name if number == 0 else '':<{INDENT - 4}}| {line}" for number, line in enumerate(wrapped)]
