"""`hpc-rl recover <trial>`: a new submission of the stored configuration whose first start resumes from a generation."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import re
from typing import Any

from hpc_rl.checkpoint.decide import Decision, Situation
from hpc_rl.cli.options import ArgumentParser, Namespace, add_overrides, add_trial, new_parser, print_json
from hpc_rl.cli.submit import (
    Planned,
    add_outcome,
    announce,
    changed_lines,
    compared,
    new_batches_lines,
    plan_of,
)
from hpc_rl.config.loading.load import Loaded, load
from hpc_rl.config.rules.check import check
from hpc_rl.config.tables.changes import Change
from hpc_rl.errors import ConfigError, ExitCode, HpcRlError, TrialStateError
from hpc_rl.records import read_lineages
from hpc_rl.schedulers import pick, slurm
from hpc_rl.submit import submission as submission
from hpc_rl.submit import trial_index
from hpc_rl.submit.first_start import (
    FirstStart,
    batches_after,
    needs_new_batches,
    option_changes,
    predict_start,
)
from hpc_rl.submit.lock import check_unlocked
from hpc_rl.submit.submission import Recovery
from hpc_rl.trial import Trial

EPILOG = """Options may change, as --a.b VALUE or a.b=VALUE, where the trial's state can take it; what changed is printed:
  hpc-rl recover first total_train_steps=200 actor.optimizer.lr=1e-6
  hpc-rl recover first --n_nodes 2            on fewer nodes, or more
  hpc-rl recover first --from 400             from an older generation; later ones are set aside, batches too
  hpc-rl recover first --from 400 --replay    the same, trained on the batches that are there
  hpc-rl recover first --from 400 --explain   only say what would happen, and why"""


def parser() -> ArgumentParser:
    made = new_parser("Go on with a trial from a generation of its state, as a new job.", EPILOG)
    add_trial(made)
    made.add_argument(
        "--from", dest="from_step", type=_step, metavar="STEP", help="this generation; the newest by default"
    )
    made.add_argument(
        "--replay",
        action="store_true",
        help="train on the batches after that generation as they are, although another policy made them",
    )
    made.add_argument(
        "--explain", action="store_true", help="say what a start would do now, and why; do nothing"
    )
    add_outcome(made)
    add_overrides(made)
    return made


def run(args: Namespace) -> int:
    trial = trial_index.resolve(args.trial)
    loaded = stored(trial, args.overrides)
    parent = next((record.submission for record in reversed(read_lineages(trial))), None)
    recovery = submission.Recovery(from_step=args.from_step, replay=args.replay, parent=parent)
    if args.explain:
        return explain(trial, loaded, recovery, args)
    planned = prepared(trial, loaded, args.no_check)
    command = ["hpc-rl", *args.argv]
    done = submission.submit(
        planned.loaded, planned.plan, command=command, trial=trial, recovery=recovery, avoid=planned.avoid
    )
    return announce(done, planned, args)


def prepared(trial: Trial, loaded: Loaded, no_check: bool) -> Planned:
    """What is refused before the state is looked at. Raises TrialBusy, ConfigError, SchedulerError."""
    submission.check_idle(trial)
    planned = compared(plan_of(loaded), trial, no_check)
    if pick(planned.loaded.config.launcher.type) == "slurm":
        slurm.require("sbatch")
    return planned


def _step(text: str | int) -> int:
    """Return the step of `40` or `gen-00000040`; 0 is an imported checkpoint."""
    match = re.fullmatch(r"(?:gen-)?([0-9]+)", str(text))  # the library may convert what was converted
    if match is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a checkpoint: give its step, as 40 or gen-00000040"
        )
    return int(match[1])


def stored(trial: Trial, overrides: list[str]) -> Loaded:
    """The configuration as it was submitted, with the overrides. Raises TrialStateError, ConfigError."""
    if not trial.config_yaml.is_file():
        raise TrialStateError(
            f"{trial} has no {trial.config_yaml.name} in {trial.dir}: it was not made by submit or render."
        )
    return load([trial.config_yaml], overrides)


def explain(trial: Trial, loaded: Loaded, recovery: Recovery, args: Namespace) -> int:
    """Print what the first start of a recover would do now; refusals and the exit code are those of the recover."""
    config = check(loaded, files=False).config
    outlook = predict_start(trial, config, "resume", recovery.from_step)
    decision = outlook.decision
    changed: list[Change] = []
    with contextlib.suppress(ConfigError):  # it is told below, where a recover would come to it
        changed = option_changes(trial, config, decision)
    try:
        check_unlocked(trial)
        planned = prepared(trial, loaded, args.no_check)
        submission.check_submittable(
            trial, planned.loaded, planned.plan, pick(config.launcher.type), recovery
        )
    except HpcRlError as error:
        decision = Decision("refuse", str(error), exit_code=error.exit_code)
    renews = needs_new_batches(config, outlook.situation, changed, recovery.replay)
    renews = renews and decision.action in ("load", "fresh")
    batches = batches_after(trial, decision.step) if renews else []
    if args.json:
        said: dict[str, Any] = {
            "action": decision.action,
            "step": decision.step,
            "lineage": decision.lineage,
            "reason": decision.reason,
        }
        said |= {"exit_code": int(decision.exit_code), "set_aside": decision.set_aside}
        said |= {"read_while_loading": outlook.unread if decision.action == "load" else []}
        said |= {"new_batches": renews, "set_aside_batches": batches}
        said |= {"generations": [dataclasses.asdict(one) for one in outlook.situation.generations]}
        print_json(said | {"changes": [dataclasses.asdict(change) for change in changed]})
    else:
        lines = explanation(trial, outlook.situation, decision)
        if decision.action == "load" and outlook.unread:
            lines.append(not_read(trial, outlook))
        lines += new_batches_lines(batches) if renews else []
        print("\n".join([*lines, *changed_lines(changed)]))
    return ExitCode(decision.exit_code)


def not_read(trial: Trial, outlook: FirstStart) -> str:
    """Which files of the generation to load only the start reads, and what it does where one is damaged."""
    step, names = outlook.decision.step, ", ".join(outlook.unread)
    then = "so a start checks it while it loads, and takes the generation before where it is damaged"
    if outlook.situation.wanted is not None:
        then = "so the start reads it before it sets later ones aside, and ends where it is damaged"
    return f"not read     {names}: large, {then}. Read it now: hpc-rl checkpoint verify {trial_index.cli_name(trial)} --step {step}"


def explanation(trial: Trial, situation: Situation, decision: Decision) -> list[str]:
    """What was found and what would be done, for a person."""
    lines = [
        f"trial        {trial}",
        f"recover.mode {situation.mode} (this first start counts as {situation.start_mode})",
    ]
    for one in situation.generations:
        verdict = one.problem or ("valid" if one.read else "looks sound; its content was not read")
        lines.append(
            f"generation   {one.step}, of lineage {one.lineage}, job {one.submission or 'unknown'}: {verdict}"
        )
    if situation.trimmed:
        lines.append(f"batch log    from batch {situation.trimmed + 1}")
    act = {"load": f"load generation {decision.step}", "fresh": "start from step 0"}.get(
        decision.action, decision.action
    )
    return [*lines, f"decision     {act}", f"reason       {decision.reason}"]
