"""`hpc-rl export`: the model of a trial for other programs; the same as `hpc-rl checkpoint export`.

What needs torch is run by `python -m hpc_rl.tools.convert`.
"""

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path

from hpc_rl.cli.options import CommandParser, Count, Namespace, print_result
from hpc_rl.core.errors import ConfigError, ExitCode
from hpc_rl.trials import forking
from hpc_rl.trials.exporting import plan_export, write_and_upload
from hpc_rl.trials.model_card import list_use_commands


@contextlib.contextmanager
def clean_up_at_sigterm() -> Iterator[None]:
    """Make a SIGTERM unwind like a Ctrl-C, to remove holds and a partial export."""

    def end(number: int, _frame: object) -> None:
        signal.signal(number, signal.SIG_IGN)  # a second one must not interrupt the cleanup
        raise SystemExit(ExitCode.KILLED_BY_SYSTEM)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def make_parser() -> CommandParser:
    made = CommandParser(
        "write the weights of a checkpoint or of any published version in Hugging Face format; needs no GPU",
        """The folder has a model card (README.md). Servers, transformers and `actor.path` take the folder.
A checkpoint needs torch. A step without one is rebuilt from the published weights, if they are still there:
`hpc-rl checkpoint list` shows these steps, and `weights.history_gb` keeps them.

  hpc-rl export my-trial --to model
  hpc-rl export my-trial@120 --to model-120
  hpc-rl export my-trial --best eval_reward --push me/my-model""",
    )
    made.add_completed("trial", help="a path, experiment/trial, or a trial name; @STEP may follow it")
    which = made.add_mutually_exclusive_group()
    step_help = "step of the checkpoint (default: the newest) or of published weights of the newest lineage"
    which.add_argument("--step", type=Count, help=step_help)
    best_help = "the checkpoint with the largest METRIC, as eval_reward"
    which.add_argument("--best", metavar="METRIC", help=best_help)
    version_help = "published weights by lineage and step, as 0.120"
    which.add_argument("--version", metavar="LABEL", help=version_help)
    to_help = "folder to write (default: <trial>/exports/checkpoint-<step> or weights-<version>)"
    made.add_argument("--to", type=Path, metavar="FOLDER", help=to_help)
    merge_help = "write a whole model with the trained adapter merged into it, instead of the adapter"
    made.add_argument("--merge", action="store_true", help=merge_help)
    push_help = (
        "upload it to this repository of Hugging Face's hub; needs a token (`hf auth login` or HF_TOKEN)"
    )
    made.add_argument("--push", metavar="OWNER/NAME", help=push_help)
    made.add_flag("--private", help="with --push: make a new repository private")
    made.add_json("its path, its URL, and the commands that serve and evaluate it")
    return made


@clean_up_at_sigterm()
def main(args: Namespace) -> int:
    trial, step = forking.resolve_parent(args.trial, None)
    if step is not None and (args.step is not None or args.best or args.version):
        raise ConfigError(
            f"{args.trial} names a step, and --step, --best or --version another one: remove one"
        )
    export = plan_export(
        trial,
        args.to,
        step=args.step if step is None else step,
        best=args.best,
        label=args.version,
        merge=args.merge,
        push=args.push,
        private=args.private,
    )
    code, url = write_and_upload(export)
    if code != 0:
        return code
    there = export.folder
    serve, evaluate = list_use_commands(trial, there)
    value = {"trial": str(trial), "step": export.step, "version": export.version, "path": str(there)}
    value |= {"url": url, "serve": serve, "evaluate": evaluate}
    lines = [f"{export.title}: written to {there}", *([f"uploaded   {url}"] if url else [])]
    lines += [f"serve      {serve['sglang']}", f"           {serve['vllm']}", f"evaluate   {evaluate}"]
    print_result(args.json, value, lines)
    return ExitCode.DONE
