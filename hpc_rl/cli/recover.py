"""`hpc-rl recover <trial>`: a new submission of the stored configuration whose first start resumes from the newest generation."""

from __future__ import annotations

import argparse

from hpc_rl.checkpoint.decide import Decision, Situation, decide
from hpc_rl.checkpoint.lineage import gather, read_lineages
from hpc_rl.cli.options import add_trial, new_parser, print_json
from hpc_rl.cli.submit import add_outcome, announce, compared, parse, plan_of
from hpc_rl.config.load import ALIASES, Loaded, load
from hpc_rl.config.source import read_overrides
from hpc_rl.errors import CannotWrite, ConfigError, ExitCode, NothingToResume, TrialStateError
from hpc_rl.launch import index
from hpc_rl.launch import submit as submission
from hpc_rl.trial import Trial, read_json, write_json

ALLOWED = ("total_train_steps", "total_train_epochs", "allocation_mode", "cluster.n_nodes", "cluster.n_gpus_per_node")
ALLOWED_SECTIONS = ("launcher.", "recover.")
LONGER = ("total_train_steps", "total_train_epochs")


def run(argv: list[str]) -> int:
    made = new_parser("recover", "Go on with a trial from its newest generation, as a new job.", EPILOG)
    add_trial(made)
    made.add_argument("--explain", action="store_true", help="say what a start would do now, and why; do nothing")
    add_outcome(made)
    args, overrides = parse(made, argv)
    trial = index.resolve(args.trial)
    changed = refuse_others(overrides)
    loaded = stored(trial, overrides)
    if args.explain:
        return explain(trial, loaded, args)
    submission.check_idle(trial)
    refuse_finished(trial, changed)
    planned = compared(plan_of(loaded), args.no_check)
    parent = next((record.submission for record in reversed(read_lineages(trial))), None)
    finished = read_json(trial.done)
    try:
        if trial.done.exists():
            trial.done.unlink()  # it goes on
    except OSError as error:
        raise CannotWrite(f"{trial.done} can't be removed: {error.strerror or error}. The trial was left as it was.") from error
    try:
        done = submission.submit(
            planned.loaded, planned.plan, command=["hpc-rl", "recover", *argv], trial=trial, recover=True, lineage_parent=parent
        )
    except BaseException:
        if finished is not None:
            write_json(trial.done, finished)
        raise
    return announce(done, planned, args)


EPILOG = f"""What may change: {", ".join(ALLOWED)}, {", ".join(f"{section}*" for section in ALLOWED_SECTIONS)}"""


def refuse_others(overrides: list[str]) -> list[str]:
    """Names of the options that are overridden. Raises ConfigError for those that would make it another trial."""
    names = [name for name, _ in read_overrides(overrides, ALIASES)]
    wrong = [name for name in names if name not in ALLOWED and not name.startswith(ALLOWED_SECTIONS)]
    if wrong:
        sections = ", ".join(f"{section}*" for section in ALLOWED_SECTIONS)
        raise ConfigError(
            f"recover goes on with the same trial, and {', '.join(wrong)} would make it another one. "
            f"What may change: {', '.join(ALLOWED)}, {sections}. For anything else submit a new trial."
        )
    return names


def stored(trial: Trial, overrides: list[str]) -> Loaded:
    """The configuration as it was submitted, with the overrides. Raises TrialStateError, ConfigError."""
    if not trial.config_yaml.is_file():
        raise TrialStateError(f"{trial} has no {trial.config_yaml.name} in {trial.dir}: it was not made by submit or render.")
    return load([trial.config_yaml], overrides)


def refuse_finished(trial: Trial, changed: list[str]) -> None:
    if trial.done.exists() and not set(changed) & set(LONGER):
        raise NothingToResume(
            f"{trial} has reached its end. To train it longer: hpc-rl recover {index.handle(trial)} total_train_steps=N; "
            f"what it made is in {trial.exports}."
        )


def explain(trial: Trial, loaded: Loaded, args: argparse.Namespace) -> int:
    """Print what the first start of a recover would do now; exit code 3 where there is nothing to resume."""
    recover = loaded.config.recover
    situation, _ = gather(trial, trial.attempt("next.0"), 0, recover.mode, "resume", recover.retries)
    decision = decide(situation)
    if args.json:
        print_json({"action": decision.action, "step": decision.step, "lineage": decision.lineage, "reason": decision.reason})
    else:
        print("\n".join(explanation(trial, situation, decision)))
    return ExitCode(decision.exit_code)


def explanation(trial: Trial, situation: Situation, decision: Decision) -> list[str]:
    lines = [f"trial        {trial}", f"recover.mode {situation.mode} (this first start counts as {situation.start_mode})"]
    for one in situation.generations:
        verdict = "valid" if one.valid else one.problem or "not looked into"
        lines.append(f"generation   {one.step}, of lineage {one.lineage}, job {one.submission or 'unknown'}: {verdict}")
    act = {"load": f"load generation {decision.step}", "fresh": "start from step 0"}.get(decision.action, decision.action)
    return [*lines, f"decision     {act}", f"reason       {decision.reason}"]
