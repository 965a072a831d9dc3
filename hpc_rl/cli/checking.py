"""`hpc-rl check`: everything that submit does before the queue, and one episode."""

import shlex
import shutil
from pathlib import Path
from typing import Any

from hpc_rl.cli import submit
from hpc_rl.cli.options import CommandParser, Namespace, Seconds, print_json, require_torch
from hpc_rl.cli.samples import MAX_WIDTH, block
from hpc_rl.errors import ConfigError, HpcRlError
from hpc_rl.schedulers import pick
from hpc_rl.status.formatting import format_number
from hpc_rl.submit import preflight, submission
from hpc_rl.submit.episode import run_episode
from hpc_rl.submit.lock import check_unlocked, check_writable
from hpc_rl.submit.user_code import own_environment

ABOUT = """Check a configuration as submit does, and tell all that is wrong; write and submit nothing.
Looked at are its options, the models, the first rows, rewards and workflow, the plan, the scripts, and what
the cluster says to the request. `submit --dry_run` checks the same and shows the plan with what it needs;
`render --check` checks the same and writes the scripts."""
EPILOG = """examples:
  hpc-rl check grpo.yaml
  hpc-rl check grpo.yaml --episode
  hpc-rl check grpo.yaml --episode --tiny_model gconfig.max_new_tokens=64

Exit codes are those of submit: 0 where it would submit, 64 where something is refused, or the episode
fails."""
DEFAULT_TIMEOUT_S = 300.0
MAX_CHARS = 2000  # of a text, as lines
MAX_LINES = 20  # of what was printed, at its start and its end


def parser() -> CommandParser:
    made = CommandParser(ABOUT, EPILOG)
    made.add_config()
    episode = """then run the first prompt of train_dataset here, on the CPU, through model, workflow and
reward; show what came of it, and what would be trained on"""
    made.add_flag("--episode", help=episode)
    tiny = "for --episode: a tiny model of random weights with the model's tokenizer, in place of each model"
    made.add_flag("--tiny_model", help=tiny)
    limit = f"time limit of the episode (default: {DEFAULT_TIMEOUT_S:g})"
    made.add_argument("--timeout_s", type=Seconds, default=DEFAULT_TIMEOUT_S, metavar="S", help=limit)
    made.add_json("refusals, notes, checks and the episode")
    return made


def run(args: Namespace) -> int:
    checks: list[preflight.PreflightCheck] = []
    notes: list[str] = []
    errors: list[HpcRlError] = []
    played: dict[str, Any] | None = None
    try:
        planned, refusal = submit.plan_and_refusal(submit.loaded(args))
        notes += planned.notes
        errors += [refusal] if refusal else []
        checks = _checks(planned, errors)
        if args.episode and not errors:
            played = _episode(planned, args, notes)
    except ConfigError as error:  # no plan can be made, or no episode be run
        errors.append(error)
    if played and played.get("error"):
        errors.append(ConfigError(f"the episode failed: {played['error']}"))
    if args.json:
        shown = [line for error in errors for line in str(error).splitlines()]
        rows = {"refusals": shown, "notes": notes, "checks": list(map(vars, checks)), "episode": played}
        print_json(rows)
        return errors[0].exit_code if errors else 0
    said = [check.line() for check in checks if check.state is preflight.CheckState.NOTE]
    lines = [*(f"note: {note}" for note in notes), *(f"check      {line}" for line in said)]
    lines += _episode_lines(played) if played else []
    if not errors:
        options = [f"--preset={name}" for name in args.preset]
        options += [f"--cluster={args.cluster}"] if args.cluster else []
        command = shlex.join(["hpc-rl", "submit", *args.config, *options, *args.overrides])
        lines += [f"ok         nothing is refused; {submit.NOTHING_WRITTEN}", f"next       {command}"]
    for line in lines:
        print(line, flush=True)
    if errors:
        refused = HpcRlError("\n".join(map(str, errors)))
        refused.exit_code = errors[0].exit_code
        raise refused
    return 0


def _episode(planned: submit.Planned, args: Namespace, notes: list[str]) -> dict[str, Any]:
    """Run one episode; what differs from the job's is put to the notes. Raises ConfigError."""
    require_torch("--episode runs the model on this machine")
    config = planned.loaded.config
    if own_environment(config, planned.plan.python):
        notes.append("the episode runs in this environment; the job has one of its own")
    played = run_episode(config, args.timeout_s, args.tiny_model, Path.cwd())
    if unused := played.pop("unused", ""):
        notes.append(f"the episode is without {unused}: the embedded engine has no such option")
    return played


def _episode_lines(played: dict[str, Any]) -> list[str]:
    """Return the prompt, what was made of it, and what was printed."""
    lines, width = [], min(shutil.get_terminal_size().columns, MAX_WIDTH)
    if "prompt" in played:
        lines += [
            f"episode    row {played['row']} of train_dataset",
            *block("prompt", played["prompt"], width),
        ]
    rows = played.get("trajectories", [])
    if "trajectories" in played and not rows:
        lines.append("note: the workflow returned None, which rejects the prompt: nothing is trained on")
    for number, one in enumerate(rows):
        stats = ", ".join(f"{name} {format_number(value)}" for name, value in one["stats"].items())
        reward = f"reward {format_number(one['reward'])}{f' ({stats})' if stats else ''}"
        parts = one["parts"]
        tokens = f"{_trained(one)} of {sum(part['tokens'] for part in parts)} tokens are trained on"
        turns = f"{one['turns']} turn{'s' * (one['turns'] != 1)}"
        lines.append(f"sample {number}: {reward}; {turns}, {tokens}; {one['finish_reason']}")
        for part in parts[parts[0]["text"] == played["prompt"] :]:
            lines += block("model" if part["trained"] else "given", _cut(part["text"]), width)
    if rows and len({one["reward"] for one in rows}) == 1 < len(rows):
        lines.append(
            "note: all rewards are equal; where they are compared within a group, nothing is learnt from it"
        )
    for name in ("log", "trace"):
        if text := played.get(name, "").strip("\n"):
            shown = text.split("\n")
            if (left_out := len(shown) - 2 * MAX_LINES) > 0:
                shown[MAX_LINES:-MAX_LINES] = [f"… ({left_out} more lines: see --json)"]
            lines += [
                {"log": "printed:", "trace": "traceback:"}[name],
                *(f"  {_cut(one)}" for one in shown),
            ]
    return lines


def _cut(text: str) -> str:
    left_out = len(text) - MAX_CHARS
    return text if left_out <= 0 else f"{text[:MAX_CHARS]} … ({left_out} more characters: see --json)"


def _trained(one: dict[str, Any]) -> int:
    return sum(part["tokens"] for part in one["parts"] if part["trained"])


def _checks(planned: submit.Planned, errors: list[HpcRlError]) -> list[preflight.PreflightCheck]:
    """Return the checks of the scripts; what refuses the submission is put to the errors."""
    trial = submission.trial_of(planned.loaded.config)
    where = pick(planned.loaded.config.launcher.type)
    try:
        check_writable(trial)
        check_unlocked(trial)
        submission.check_submittable(trial, planned.loaded, planned.plan, where)
    except HpcRlError as error:
        errors.append(error)
    checks = submit.checked_scripts(planned, trial)
    try:
        preflight.raise_for(checks)
    except HpcRlError as error:
        errors.append(error)
    return checks
