"""`hpc-rl recover <trial>`: submit the stored configuration again; its first start resumes a checkpoint."""

from dataclasses import asdict

from hpc_rl.checkpoint.decide import Decision, Situation
from hpc_rl.cli.options import CommandParser, Namespace, parse_checkpoint_step, print_result
from hpc_rl.cli.outcome import add_outcome, submit_and_report
from hpc_rl.cli.start_text import (
    describe_continuation,
    format_change_json,
    format_continuation_json,
    list_changes,
)
from hpc_rl.core.errors import ExitCode
from hpc_rl.core.trial import Trial
from hpc_rl.trials import prepare, trial_index
from hpc_rl.trials.first_start import FirstStart

EPILOG = """Options may change, as --a.b VALUE or a.b=VALUE, if the trial's state allows it:
  hpc-rl recover first total_train_steps=200 actor.optimizer.lr=1e-6
  hpc-rl recover first --n_nodes 2            on fewer nodes, or more
  hpc-rl recover first --from 400             from an older checkpoint; later ones and batches are set aside
  hpc-rl recover first --from 400 --replay    the same, trained on the existing batches
  hpc-rl recover first --from 400 --explain   only show what would happen, and why"""


def make_parser() -> CommandParser:
    made = CommandParser("Resume a trial from a checkpoint, as a new job.", EPILOG)
    made.add_trial()
    checkpoint = "checkpoint (default: the newest)"
    made.add_argument("--from", dest="from_step", type=parse_checkpoint_step, metavar="STEP", help=checkpoint)
    replay = "train on the batches after that checkpoint as they are, although another policy made them"
    made.add_flag("--replay", help=replay)
    made.add_flag("--explain", help="show what a start would do now, and why; do nothing")
    add_outcome(made)
    made.add_overrides()
    return made


def main(args: Namespace) -> int:
    trial = trial_index.resolve(args.trial)
    loaded = prepare.load_stored(trial, args.overrides)
    recovery = prepare.make_recovery(trial, args.from_step, args.replay)
    if args.explain:
        start, decision = prepare.explain_start(trial, loaded, recovery, args.no_check)
        return _print_explanation(trial, start, decision, args.json)
    planned = prepare.plan_recovery(trial, loaded, args.no_check)
    return submit_and_report(planned, args, trial, recovery)


def _print_explanation(trial: Trial, start: FirstStart, decision: Decision, as_json: bool) -> int:
    """Print the decision of the first start; return the exit code of a recover without --explain."""
    starts = decision.action in ("load", "fresh")
    unread = start.unread if decision.action == "load" else ()
    facts = {
        "read_while_loading": unread,
        "checkpoints": [asdict(found) for found in start.situation.generations],
        "changes": [format_change_json(change) for change in start.changes],
    }
    if starts:
        facts |= format_continuation_json(start.continuation())
    lines = _describe_decision(trial, start.situation, decision)
    lines += [_describe_unread(trial, start)] if unread else []
    lines += list_changes(start.changes)
    lines += describe_continuation(start.continuation()) if starts else []
    print_result(as_json, asdict(decision) | facts, lines)
    return ExitCode(decision.exit_code)


def _describe_unread(trial: Trial, start: FirstStart) -> str:
    """Name the files that only the start reads, and its reaction to a damaged one."""
    then = "the start checks them while it loads, and falls back to the previous checkpoint if one is damaged"
    if start.situation.wanted is not None:
        then = "the start reads them before it sets later checkpoints aside, and stops if one is damaged"
    verify = f"hpc-rl checkpoint verify {trial_index.format_name(trial)} --step {start.decision.step}"
    return f"not read     {', '.join(start.unread)}: large; {then}. To read them now: {verify}"


def _describe_decision(trial: Trial, situation: Situation, decision: Decision) -> list[str]:
    """List the checkpoints and the decision."""
    lines = [
        f"trial        {trial}",
        f"recover.mode {situation.mode} (this start: {situation.start_mode})",
    ]
    for found in situation.generations:
        state = found.problem or ("valid" if found.read else "looks sound; its content was not read")
        origin = f"lineage {found.lineage}, job {found.submission or 'unknown'}"
        lines.append(f"checkpoint   {found.step}, {origin}: {state}")
    if situation.trimmed:
        lines.append(f"batch log    from batch {situation.trimmed + 1}")
    actions = {"load": f"load checkpoint {decision.step}", "fresh": "start from step 0"}
    action = actions.get(decision.action, decision.action)
    return [*lines, f"decision     {action}", f"reason       {decision.reason}"]
