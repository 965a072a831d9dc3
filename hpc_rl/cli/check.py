"""`hpc-rl check`: everything that submit does before the queue, and one episode."""

import shlex
import shutil
import time
from pathlib import Path
from typing import Any

from hpc_rl.cli.options import CommandParser, Namespace, Seconds, print_json
from hpc_rl.cli.outcome import add_fetch, collect_sources
from hpc_rl.cli.plan_text import NOTHING_WRITTEN
from hpc_rl.cli.samples import MAX_WIDTH, format_block
from hpc_rl.core.errors import ConfigError, ExitCode, HpcRlError
from hpc_rl.status.formatting import format_number
from hpc_rl.trials.checklist import Planned
from hpc_rl.trials.conversion import require_torch
from hpc_rl.trials.episode import EpisodeProgress, EpisodeStage, play_episode
from hpc_rl.trials.prepare import judge_config
from hpc_rl.trials.user_code import own_environment

ABOUT = """Check a configuration as submit does, and report every problem; write and submit nothing.
It checks options, models, the first rows, rewards and workflow, the plan, the Python of trainer and servers,
memory and disk, the scripts, and whether the cluster accepts the request. `submit` and `doctor --config FILE`
run the same checks; `submit --dry_run` also shows the plan and its needs."""
EPILOG = """examples:
  hpc-rl check grpo.yaml
  hpc-rl check grpo.yaml --episode
  hpc-rl check grpo.yaml --episode --tiny_model gconfig.max_new_tokens=64

Exit codes, as of submit: 0 nothing is refused; 64 something is refused, or the episode fails; 69 Slurm
refuses or does not answer; 73 a directory is not writable or has no space; 75 the trial is running."""
DEFAULT_TIMEOUT_S = 300.0
# Checks that an episode does not need: the state of the trial's directory, and Slurm.
NOT_OF_EPISODES = ("trial", "state", "slurm programs", "sbatch --test-only")
LINE_EVERY_S = 10.0  # of progress, without a terminal
MAX_CHARS = 2000  # of a text, as lines
MAX_LINES = 20  # of the printed text, at its start and its end


def make_parser() -> CommandParser:
    made = CommandParser(ABOUT, EPILOG)
    made.add_config()
    add_fetch(made)
    episode = """then run the first prompt of train_dataset here, on the CPU, through model, workflow and
reward; show the completion, its reward and the tokens that would be trained on"""
    made.add_flag("--episode", help=episode)
    tiny = "for --episode: a tiny model of random weights with the model's tokenizer, in place of each model"
    made.add_flag("--tiny_model", help=tiny)
    limit = f"time limit of the episode (default: {DEFAULT_TIMEOUT_S:g})"
    made.add_argument("--timeout_s", type=Seconds, default=DEFAULT_TIMEOUT_S, metavar="S", help=limit)
    made.add_json("refusals, notes, checks and the episode")
    return made


def main(args: Namespace) -> int:
    verdict = judge_config(collect_sources(args))
    notes, errors = [str(note) for note in verdict.notes], [*verdict.lines]
    exit_code = verdict.exit_code
    played: dict[str, Any] | None = None
    in_the_way = [row.detail for row in verdict.refusals if row.name in NOT_OF_EPISODES]
    if args.episode and verdict.planned and len(in_the_way) == len(verdict.refusals):
        try:
            played = _play_episode(verdict.planned, args, notes)
            notes += [f"submit refuses this trial as it is now: {text}" for text in in_the_way]
            errors, exit_code = [], ExitCode.DONE
        except ConfigError as error:
            errors, exit_code = str(error).splitlines(), error.exit_code
    if played and played.get("error"):
        errors, exit_code = [f"the episode failed: {played['error']}"], ExitCode.REFUSED
    if args.json:
        print_json({"refusals": errors, "notes": notes, "checks": verdict.rows(), "episode": played})
        return exit_code
    lines = [f"note: {note}" for note in notes]
    lines += _describe_episode(played) if played else []
    if not errors:
        options = [f"--preset={name}" for name in args.preset]
        options += [f"--cluster={args.cluster}"] if args.cluster else []
        options += ["--fetch"] if args.fetch else []
        command = shlex.join(["hpc-rl", "submit", *args.config, *options, *args.overrides])
        found = "the episode ran; see the note for submit" if in_the_way else "nothing is refused"
        lines.append(f"ok         {found}; {NOTHING_WRITTEN}")
        lines += [] if in_the_way else [f"next       {command}"]
    for line in lines:
        print(line, flush=True)
    if errors:
        refused = HpcRlError("\n".join(errors))
        refused.exit_code = ExitCode(exit_code)
        raise refused
    return 0


def _play_episode(planned: Planned, args: Namespace, notes: list[str]) -> dict[str, Any]:
    """Run one episode; differences from the job go to the notes. Raises ConfigError."""
    require_torch("--episode runs the model on this machine")
    config = planned.loaded.config
    if own_environment(config, planned.plan.python):
        notes.append("the episode runs in this environment; the job has its own")
    with ProgressLine() as line:
        played = play_episode(config, args.timeout_s, args.tiny_model, Path.cwd(), line.show)
    if unused := played.pop("unused", ""):
        notes.append(f"the episode is without {unused}: the embedded engine has no such option")
    return played


class ProgressLine:
    """How far an episode is, on standard error: one line that changes on a terminal, else some lines."""

    def __init__(self) -> None:
        from rich.console import Console  # importing rich takes time

        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._status = self._console.status("") if self._console.is_terminal else None
        self._began = time.monotonic()
        self._stage: EpisodeStage | None = None
        self._next_s = 0.0  # time of the next line

    def __enter__(self) -> "ProgressLine":
        if self._status:
            self._status.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._status:
            self._status.stop()

    def show(self, progress: EpisodeProgress) -> None:
        """Show the stage, the tokens so far and the time."""
        elapsed_s = time.monotonic() - self._began
        tokens = f"{progress.num_tokens} tokens, " if progress.num_tokens else ""
        text = f"episode: {progress.stage} ({tokens}{elapsed_s:.0f} s)"
        if self._status:
            self._status.update(text)
        elif progress.stage != self._stage or elapsed_s >= self._next_s:
            self._console.print(text)
            self._next_s = elapsed_s + LINE_EVERY_S
        self._stage = progress.stage


def _describe_episode(played: dict[str, Any]) -> list[str]:
    """Return the prompt, the trajectories, and the printed text."""
    lines, width = [], min(shutil.get_terminal_size().columns, MAX_WIDTH)
    if "prompt" in played:
        lines += [
            f"episode    row {played['row']} of train_dataset",
            *format_block("prompt", played["prompt"], width),
        ]
    rows = played.get("trajectories", [])
    if "trajectories" in played and not rows:
        lines.append("note: the workflow returned None, which rejects the prompt: nothing is trained on")
    for number, one in enumerate(rows):
        stats = ", ".join(f"{name} {format_number(value)}" for name, value in one["stats"].items())
        reward = f"reward {format_number(one['reward'])}{f' ({stats})' if stats else ''}"
        parts = one["parts"]
        tokens = f"{_count_trained(one)} of {sum(part['tokens'] for part in parts)} tokens are trained on"
        turns = f"{one['turns']} turn{'s' * (one['turns'] != 1)}"
        lines.append(f"sample {number}: {reward}; {turns}, {tokens}; {one['finish_reason']}")
        for part in parts[parts[0]["text"] == played["prompt"] :]:
            lines += format_block("model" if part["trained"] else "given", _cut(part["text"]), width)
    if rows and len({one["reward"] for one in rows}) == 1 < len(rows):
        lines.append(
            "note: all rewards are equal: algorithms that compare rewards within a group learn nothing"
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


def _count_trained(one: dict[str, Any]) -> int:
    return sum(part["tokens"] for part in one["parts"] if part["trained"])
