"""`hpc-rl recover <trial>`: a new submission of the stored configuration whose first start resumes from a generation."""

from __future__ import annotations

import argparse
import dataclasses
import re
from typing import Any

from hpc_rl.checkpoint.decide import Decision, Situation, decide
from hpc_rl.checkpoint.lineage import gather, read_lineages
from hpc_rl.cli.options import add_trial, new_parser, print_json
from hpc_rl.cli.submit import Planned, add_outcome, announce, parse, plan_of
from hpc_rl.config.changes import Change, changes, refuse_unsafe
from hpc_rl.config.load import Loaded, load
from hpc_rl.errors import ConfigError, ExitCode, NothingToResume, TrialStateError
from hpc_rl.launch import index
from hpc_rl.launch import submit as submission
from hpc_rl.trial import Trial, read_json

LONGER = ("total_train_steps", "total_train_epochs", "total_train_n_seqs")
EPILOG = """Any option of the configuration may follow, as --a.b VALUE or a.b=VALUE. What changes is shown; what would
contradict the state on disk (the model, the data, how groups are made) is refused, with the reason:
  hpc-rl recover grpo --n_nodes 2            on fewer nodes
  hpc-rl recover grpo --from 400             from an older generation; later ones are set aside
  hpc-rl recover grpo --from 400 --explain   only say what would happen, and why"""


def run(argv: list[str]) -> int:
    made = new_parser("recover", "Go on with a trial from a generation of its state, as a new job.", EPILOG)
    add_trial(made)
    made.add_argument("--from", dest="from_step", type=_step, metavar="STEP", help="this generation; the newest by default")
    made.add_argument("--explain", action="store_true", help="say what a start would do now, and why; do nothing")
    add_outcome(made)
    args, overrides = parse(made, argv)
    trial = index.resolve(args.trial)
    before, loaded = stored(trial, []), stored(trial, overrides)
    changed = changes(before.config, loaded.config)
    if args.explain:
        return explain(trial, loaded, changed, args)
    refuse_unsafe(changed, str(trial))
    submission.check_idle(trial)
    refuse_finished(trial, changed, args.from_step)
    planned = plan_of(loaded)
    more = submission.Recovery(
        from_step=args.from_step,
        parent=next((record.submission for record in reversed(read_lineages(trial))), None),
        changed=tuple(map(str, changed)),
    )
    shown = dataclasses.replace(planned, changed=change_lines(trial, changed, planned))
    done = submission.submit(planned.loaded, planned.plan, command=["hpc-rl", "recover", *argv], trial=trial, recovery=more)
    return announce(done, shown, args)


def _step(text: str) -> int:
    """`40` or `gen-00000040`."""
    match = re.fullmatch(r"(?:gen-)?(\d+)", text)
    if match is None or not int(match[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is no generation: give its step, as 40 or gen-00000040")
    return int(match[1])


def stored(trial: Trial, overrides: list[str]) -> Loaded:
    """The configuration as it was submitted, with the overrides. Raises TrialStateError, ConfigError."""
    if not trial.config_yaml.is_file():
        raise TrialStateError(f"{trial} has no {trial.config_yaml.name} in {trial.dir}: it was not made by submit or render.")
    return load([trial.config_yaml], overrides)


def refuse_finished(trial: Trial, changed: list[Change], from_step: int | None) -> None:
    """Raises NothingToResume where the trial is done and nothing was said that makes it longer."""
    if trial.done.exists() and from_step is None and not {change.name for change in changed} & set(LONGER):
        raise NothingToResume(
            f"{trial} has reached its end. To train it longer: hpc-rl recover {index.handle(trial)} total_train_steps=N; "
            f"what it made is in {trial.exports}."
        )


def change_lines(trial: Trial, changed: list[Change], planned: Planned | None = None) -> list[str]:
    """What is different from before, a line each; with the plan also what follows from it."""
    lines = [f"changed    {change}" for change in changed]
    before: Any = read_json(trial.plan_json)
    old = before.get("allocation") if isinstance(before, dict) else None
    if planned is not None and old and old != planned.plan.allocation:
        lines.append(f"changed    allocation: {old} -> {planned.plan.allocation}  (safe: the state is cut anew)")
    return lines


def explain(trial: Trial, loaded: Loaded, changed: list[Change], args: argparse.Namespace) -> int:
    """Print what the first start of a recover would do now; the exit code is that of the recover."""
    recover = loaded.config.recover
    situation, _ = gather(trial, trial.attempt("next.0"), 0, recover.mode, "resume", recover.retries, args.from_step)
    decision = decide(situation)
    try:
        refuse_unsafe(changed, str(trial))
    except ConfigError as error:
        decision = Decision("refuse", str(error), exit_code=ExitCode.REFUSED)
    if args.json:
        print_json(
            {
                "action": decision.action,
                "step": decision.step,
                "lineage": decision.lineage,
                "reason": decision.reason,
                "exit_code": int(decision.exit_code),
                "set_aside": decision.set_aside,
                "changed": [dataclasses.asdict(change) for change in changed],
                "generations": [dataclasses.asdict(one) for one in situation.generations],
            }
        )
    else:
        print("\n".join([*explanation(trial, situation, decision), *change_lines(trial, changed)]))
    return ExitCode(decision.exit_code)


def explanation(trial: Trial, situation: Situation, decision: Decision) -> list[str]:
    """What was found and what would be done, for a person."""
    lines = [f"trial        {trial}", f"recover.mode {situation.mode} (this first start counts as {situation.start_mode})"]
    for one in situation.generations:
        verdict = "valid" if one.valid else one.problem or "not looked into"
        lines.append(f"generation   {one.step}, of lineage {one.lineage}, job {one.submission or 'unknown'}: {verdict}")
    if situation.trimmed:
        lines.append(f"batch log    from batch {situation.trimmed + 1}")
    act = {"load": f"load generation {decision.step}", "fresh": "start from step 0"}.get(decision.action, decision.action)
    return [*lines, f"decision     {act}", f"reason       {decision.reason}"]
