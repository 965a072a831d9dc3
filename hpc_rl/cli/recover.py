"""`hpc-rl recover <trial>`: a new submission of the stored configuration whose first start resumes from the newest generation."""

from __future__ import annotations

import argparse
import dataclasses

from hpc_rl.checkpoint.decide import Decision, Situation, decide
from hpc_rl.checkpoint.lineage import gather, read_lineages
from hpc_rl.cli.options import add_trial, new_parser, print_json
from hpc_rl.cli.submit import add_outcome, announce, changed_lines, compared, parse, plan_of
from hpc_rl.config.check import check
from hpc_rl.config.load import Loaded, load
from hpc_rl.errors import ExitCode, TrialStateError
from hpc_rl.launch import index
from hpc_rl.launch import submit as submission
from hpc_rl.trial import Trial


def run(argv: list[str]) -> int:
    made = new_parser("recover", "Go on with a trial from its newest generation, as a new job.", EPILOG)
    add_trial(made)
    made.add_argument("--explain", action="store_true", help="say what a start would do now, and why; do nothing")
    add_outcome(made)
    args, overrides = parse(made, argv)
    trial = index.resolve(args.trial)
    loaded = stored(trial, overrides)
    if args.explain:
        return explain(trial, loaded, args)
    submission.check_idle(trial)
    planned = compared(plan_of(loaded), args.no_check)
    parent = next((record.submission for record in reversed(read_lineages(trial))), None)
    done = submission.submit(
        planned.loaded, planned.plan, command=["hpc-rl", "recover", *argv], trial=trial, recover=True, lineage_parent=parent
    )
    return announce(done, planned, args)


EPILOG = """Options may change, as --a.b VALUE or a.b=VALUE, where the trial's state can take it; what changed is printed:
  hpc-rl recover first total_train_steps=200 actor.optimizer.lr=1e-6"""


def stored(trial: Trial, overrides: list[str]) -> Loaded:
    """The configuration as it was submitted, with the overrides. Raises TrialStateError, ConfigError."""
    if not trial.config_yaml.is_file():
        raise TrialStateError(f"{trial} has no {trial.config_yaml.name} in {trial.dir}: it was not made by submit or render.")
    return load([trial.config_yaml], overrides)


def explain(trial: Trial, loaded: Loaded, args: argparse.Namespace) -> int:
    """Print what the first start of a recover would do now; exit code 3 where there is nothing to resume."""
    changed = submission.changed_options(trial, check(loaded, files=False).config)
    recover = loaded.config.recover
    situation, _ = gather(trial, trial.attempt("next.0"), 0, recover.mode, "resume", recover.retries)
    decision = decide(situation)
    if args.json:
        said = {"action": decision.action, "step": decision.step, "lineage": decision.lineage, "reason": decision.reason}
        print_json(said | {"changes": [dataclasses.asdict(change) for change in changed]})
    else:
        print("\n".join([*explanation(trial, situation, decision), *changed_lines(changed)]))
    return ExitCode(decision.exit_code)


def explanation(trial: Trial, situation: Situation, decision: Decision) -> list[str]:
    lines = [f"trial        {trial}", f"recover.mode {situation.mode} (this first start counts as {situation.start_mode})"]
    for one in situation.generations:
        verdict = "valid" if one.valid else one.problem or "not looked into"
        lines.append(f"generation   {one.step}, of lineage {one.lineage}, job {one.submission or 'unknown'}: {verdict}")
    act = {"load": f"load generation {decision.step}", "fresh": "start from step 0"}.get(decision.action, decision.action)
    return [*lines, f"decision     {act}", f"reason       {decision.reason}"]
