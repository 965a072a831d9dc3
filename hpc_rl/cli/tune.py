"""`hpc-rl tune TRIAL`: recommend the split and other options after a short trial, by simulation."""

import shlex
import sys
from pathlib import Path
from typing import Any

import yaml

from hpc_rl.cli.options import CommandParser, Namespace, PositiveCount, align_columns, print_json
from hpc_rl.cli.simulate import add_faults, make_faults
from hpc_rl.core.errors import CannotWrite, ExitCode
from hpc_rl.core.trial import write_atomic
from hpc_rl.simulate.describe import costs_to_json, describe_costs, format_rounded
from hpc_rl.simulate.prepare import make_case
from hpc_rl.simulate.result import ADVICE, explain_result, run
from hpc_rl.simulate.tune import NUM_DRAWS, Advice, tune
from hpc_rl.trials import prepare, trial_index

ABOUT = """Measure the costs of a trial in its files, and search for options with a higher throughput: split
(allocation_mode), concurrency, publication, checkpoint interval, staleness bound and batch size. Each has its
expected gain, and the range of the gain if the costs are as uncertain as they are. Changes of staleness and
batch size also change what the model learns; they are marked."""
EPILOG = """examples:
  hpc-rl tune first
  hpc-rl tune first --mtbf 60d                 also the checkpoint interval
  hpc-rl tune first --apply tuned.yaml         write the options to a file, for submit
  hpc-rl tune first --apply second             fork the trial as `second` with them

--apply takes the changes that do not affect learning; --learning takes the others too."""
FILE_ENDINGS = (".yaml", ".yml")


def make_parser() -> CommandParser:
    made = CommandParser(ABOUT, EPILOG)
    made.add_trial()
    add_faults(made)
    draws = f"number of draws of the costs (default: {NUM_DRAWS})"
    made.add_argument("--draws", type=PositiveCount, default=NUM_DRAWS, metavar="N", help=draws)
    made.add_argument(
        "--apply", metavar="FILE|NAME", help="write the options to FILE.yaml, or fork the trial"
    )
    made.add_flag("--learning", help="also apply changes that affect learning")
    made.add_json("recommendations, the trial as it is, and all costs")
    return made


def main(args: Namespace) -> int:
    trial = trial_index.resolve(args.trial)
    case = make_case(prepare.load_stored(trial, []), [trial])
    faults = make_faults(args)
    found = tune(case.setup, case.plan.allocation, case.costs, faults, case.list_splits, num_draws=args.draws)
    now = run(case.setup, case.costs, faults)
    chosen = [one for one in found if args.learning or not one.changes_learning]
    if args.json:
        print_json(
            {
                "allocation": case.plan.allocation,
                "now": now.to_json(),
                "advice": [one.to_json() for one in found],
                "overrides": format_overrides(chosen),
                "costs": costs_to_json(case.costs),
            }
        )
    else:
        print(f"now         {format_rounded(now.step_s)} s per step: {explain_result(now)}")
        print(f"bottleneck  {now.bottleneck}: {ADVICE[now.bottleneck]}")
        print("\n".join(describe(found)))
        for line in describe_costs(case.costs):
            print(line)
        if chosen:
            print(f"options     {shlex.join(format_overrides(chosen))}")
    if args.apply and chosen:
        return apply(args, trial.name, chosen)
    if args.apply:
        changes_learning = (
            "every recommended option changes what the model learns; add --learning to apply them"
        )
        why = changes_learning if found else "no options are recommended"
        print(f"nothing is applied to {args.apply}: {why}", file=sys.stderr)
    return ExitCode.DONE


def describe(found: list[Advice]) -> list[str]:
    """Return the recommendations as lines."""
    if not found:
        return ["nothing to change: no option that was searched gains 1 %"]
    rows = [["option", "now", "better", "gain", "range", ""]]
    for one in found:
        note = "changes what is learned" if one.changes_learning else one.reason
        gain, span = f"{one.gain:+.0%}", f"{one.low:+.0%} to {one.high:+.0%}"
        rows.append([one.option, str(one.now), str(one.value), gain, span, note])
    return [line.rstrip() for line in align_columns(rows)]


def format_overrides(found: list[Advice]) -> list[str]:
    """Return the options as arguments of a command."""
    return [f"{one.option}={one.value}" for one in found]


def apply(args: Namespace, name: str, chosen: list[Advice]) -> int:
    """Write the options to a file, or fork the trial with them. Raises CannotWrite."""
    if not args.apply.endswith(FILE_ENDINGS):
        from hpc_rl.cli.__main__ import main as run_command

        flags = ["--json"] if args.json else []
        return run_command(["fork", args.trial, args.apply, *flags, *format_overrides(chosen)])
    path = Path(args.apply).expanduser().absolute()
    try:
        write_atomic(path, format_file(name, chosen))
    except OSError as error:
        raise CannotWrite(f"{path} can't be written: {error.strerror or error}") from error
    if not args.json:
        print(f"written     {path}: hpc-rl submit CONFIG.yaml {path.name}")
    return ExitCode.DONE


def format_file(name: str, chosen: list[Advice]) -> str:
    """Return a configuration file with the options alone, to be merged over another one."""
    tree: dict[str, Any] = {}
    for one in chosen:
        *sections, last = one.option.split(".")
        place = tree
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = one.value
    return f"# `hpc-rl tune {name}`; merge it over the configuration of that trial\n{yaml.safe_dump(tree)}"
