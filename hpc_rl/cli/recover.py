"""`hpc-rl recover <trial>`: submit the stored configuration again; its first start resumes a checkpoint."""

import argparse
import contextlib
import re
from dataclasses import asdict, replace

from hpc_rl.checkpoint.decide import Decision, Situation
from hpc_rl.cli import submit
from hpc_rl.cli.continuation import continuation_json, continuation_lines
from hpc_rl.cli.options import CommandParser, Namespace, print_result
from hpc_rl.config.load.load import Loaded, load
from hpc_rl.config.load.stored import VARIABLES, with_secrets
from hpc_rl.config.rules.check import check
from hpc_rl.core.errors import ConfigError, ExitCode, HpcRlError, TrialStateError
from hpc_rl.core.records import read_lineages
from hpc_rl.core.trial import Trial
from hpc_rl.schedulers import pick, slurm
from hpc_rl.trials import (
    submission,
    trial_index,
)
from hpc_rl.trials.checklist import Planned, plan_of
from hpc_rl.trials.first_start import FirstStart, Recovery
from hpc_rl.trials.lock import check_unlocked

EPILOG = """Options may change, as --a.b VALUE or a.b=VALUE, where the trial's state allows it:
  hpc-rl recover first total_train_steps=200 actor.optimizer.lr=1e-6
  hpc-rl recover first --n_nodes 2            on fewer nodes, or more
  hpc-rl recover first --from 400             from an older checkpoint; later ones and batches are set aside
  hpc-rl recover first --from 400 --replay    the same, trained on the existing batches
  hpc-rl recover first --from 400 --explain   only show what would happen, and why"""


def parser() -> CommandParser:
    made = CommandParser("Resume a trial from a checkpoint, as a new job.", EPILOG)
    made.add_trial()
    checkpoint = "checkpoint (default: the newest)"
    made.add_argument("--from", dest="from_step", type=checkpoint_step, metavar="STEP", help=checkpoint)
    replay = "train on the batches after that checkpoint as they are, although another policy made them"
    made.add_flag("--replay", help=replay)
    made.add_flag("--explain", help="show what a start would do now, and why; do nothing")
    submit.add_outcome(made)
    made.add_overrides()
    return made


def run(args: Namespace) -> int:
    trial = trial_index.resolve(args.trial)
    loaded = stored(trial, args.overrides)
    parent = next((record.submission for record in reversed(read_lineages(trial))), None)
    recovery = Recovery(from_step=args.from_step, replay=args.replay, parent=parent)
    if args.explain:
        return explain(trial, loaded, recovery, args)
    planned = prepared(trial, loaded, args.no_check)
    return submit.submitted(planned, args, trial, recovery)


def prepared(trial: Trial, loaded: Loaded, no_check: bool) -> Planned:
    """Return the plan, after the checks that need no state. Raises TrialBusy, ConfigError, SchedulerError."""
    submission.check_idle(trial)
    planned = submit.compared(plan_of(loaded), trial, no_check)
    if pick(planned.loaded.config.launcher.type) == "slurm":
        slurm.require("sbatch")
    return planned


def checkpoint_step(text: str | int) -> int:
    """Return the step of `40` or `gen-00000040`; 0 is an imported checkpoint."""
    match = re.fullmatch(r"(?:gen-)?([0-9]+)", str(text))  # jsonargparse may convert what was converted
    if match is None:
        expected = "expected a step such as 40 or gen-00000040"
        raise argparse.ArgumentTypeError(f"invalid checkpoint {text!r}: {expected}")
    return int(match[1])


def stored(trial: Trial, overrides: list[str]) -> Loaded:
    """Return the configuration as submitted, with the overrides. Raises TrialStateError, ConfigError."""
    if not trial.config_yaml.is_file():
        raise TrialStateError(
            f"{trial} has no {trial.config_yaml.name} in {trial.dir}: it was not made by submit or render."
        )
    loaded = load([trial.config_yaml], overrides)
    known = {name: trial.variables(name) for name in VARIABLES}
    return replace(loaded, config=with_secrets(loaded.config, known))


def explain(trial: Trial, loaded: Loaded, recovery: Recovery, args: Namespace) -> int:
    """Print what the first start would do now; return the exit code of a recover without --explain."""
    config = check(loaded, files=False).config
    start = FirstStart(trial, config, recovery)
    decision = start.decision
    with contextlib.suppress(ConfigError):  # reported below, at the same point as by a recover
        start.find_changes()
    try:
        check_unlocked(trial)
        planned = prepared(trial, loaded, args.no_check)
        where = pick(config.launcher.type)
        submission.check_submittable(trial, planned.loaded, planned.plan, where, recovery)
    except HpcRlError as error:
        decision = Decision("refuse", str(error), exit_code=error.exit_code)
    starts = decision.action in ("load", "fresh")
    unread = start.unread if decision.action == "load" else ()
    facts = {
        "read_while_loading": unread,
        "checkpoints": [asdict(one) for one in start.situation.generations],
        "changes": [submit.change_json(change) for change in start.changes],
    }
    if starts:
        facts |= continuation_json(start.continuation())
    lines = explanation(trial, start.situation, decision)
    lines += [unread_line(trial, start)] if unread else []
    lines += submit.changed_lines(start.changes)
    lines += continuation_lines(start.continuation()) if starts else []
    print_result(args.json, asdict(decision) | facts, lines)
    return ExitCode(decision.exit_code)


def unread_line(trial: Trial, start: FirstStart) -> str:
    """Return which files of the checkpoint only the start reads, and what it does where one is damaged."""
    then = "the start checks them while it loads, and falls back to the previous checkpoint if one is damaged"
    if start.situation.wanted is not None:
        then = "the start reads them before it sets later checkpoints aside, and stops where one is damaged"
    verify = f"hpc-rl checkpoint verify {trial_index.cli_name(trial)} --step {start.decision.step}"
    return f"not read     {', '.join(start.unread)}: large; {then}. To read them now: {verify}"


def explanation(trial: Trial, situation: Situation, decision: Decision) -> list[str]:
    """Return what was found and what a start would do."""
    lines = [
        f"trial        {trial}",
        f"recover.mode {situation.mode} (this start: {situation.start_mode})",
    ]
    for one in situation.generations:
        state = one.problem or ("valid" if one.read else "looks sound; its content was not read")
        origin = f"lineage {one.lineage}, job {one.submission or 'unknown'}"
        lines.append(f"checkpoint   {one.step}, {origin}: {state}")
    if situation.trimmed:
        lines.append(f"batch log    from batch {situation.trimmed + 1}")
    actions = {"load": f"load checkpoint {decision.step}", "fresh": "start from step 0"}
    action = actions.get(decision.action, decision.action)
    return [*lines, f"decision     {action}", f"reason       {decision.reason}"]
