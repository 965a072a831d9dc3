"""The shared part of `generate`, `evaluate` and `serve`: trials with servers alone."""

from dataclasses import replace
from pathlib import Path

from hpc_rl.cli.options import CONFIG_FILES, CommandParser, Namespace
from hpc_rl.cli.outcome import add_outcome, collect_sources, submit_and_report
from hpc_rl.config.load.load import Loaded
from hpc_rl.core.errors import CannotWrite, TrialNameError
from hpc_rl.trials import forking, prepare, submission, without_trainer
from hpc_rl.trials.checkpoints import choose_export
from hpc_rl.trials.conversion import write_export


def make_parser(about: str, epilog: str) -> CommandParser:
    made = CommandParser(about, epilog)
    what = "folder of a model; or a trial, @STEP may follow it; else the model of the configuration"
    made.add_completed("model", nargs="?", metavar="MODEL|TRIAL[@STEP]", help=what)
    made.add_config()
    add_outcome(made)
    return made


def submit(args: Namespace, purpose: str) -> int:
    """Submit a trial without a trainer; return the exit code."""
    sources, model = collect_sources(args), args.model or ""
    if model.endswith(CONFIG_FILES):
        model, sources = "", replace(sources, files=[model, *sources.files])
    if not model or without_trainer.is_model(model):
        loaded = without_trainer.load_for_files(sources, purpose, model)
    else:
        loaded = _load_for_trial(sources, purpose, model)
    planned = prepare.plan_submission(loaded, skip_cluster=args.no_check)
    trial = submission.make_trial(planned.loaded.config)
    return submit_and_report(planned, args, trial, is_checked=True)


def _load_for_trial(sources: prepare.ConfigSources, purpose: str, named: str) -> Loaded:
    """Return the configuration for `TRIAL[@STEP]`, whose weights are then in the new trial."""
    try:
        parent, step = forking.resolve_parent(named, None)
    except TrialNameError as error:
        folder = Path(named).expanduser()
        state = "it has no config.json" if folder.is_dir() else "there is no such folder"
        raise TrialNameError(f"{named} is not a model ({state}) and not a trial: {error}") from error
    chosen = choose_export(parent, step)
    loaded = without_trainer.load_for_trial(sources, purpose, parent, chosen.step)
    folder = without_trainer.find_weights_folder(loaded, parent, chosen.step)
    if not folder.exists():
        trial = submission.make_trial(loaded.config)
        trial.make_dirs(int(loaded.config.launcher.umask, 8))
        if code := write_export(parent, chosen, folder, without_trainer.has_adapter(parent)):
            raise CannotWrite(f"step {chosen.step} of {parent} can't be exported (exit code {code})")
    return loaded
