"""The configuration of a trial without a trainer: of files, of a model, or of another trial."""

from dataclasses import replace
from pathlib import Path

from hpc_rl.config.load.load import Loaded
from hpc_rl.config.load.stored import from_dict
from hpc_rl.config.options.experiment import GRPOConfig
from hpc_rl.core.errors import ConfigError, TrialStateError
from hpc_rl.core.trial import Trial, load_object
from hpc_rl.trials import forking, prepare, submission
from hpc_rl.trials.prepare import ConfigSources

PRESET = "servers"


def is_model(place: str) -> bool:
    """Return whether a place is the folder of a model, and not of a trial."""
    folder = Path(place).expanduser()
    return (folder / "config.json").is_file() and not Trial(folder).plan_json.is_file()


def load_for_files(sources: ConfigSources, purpose: str, model: str) -> Loaded:
    """Load the configuration of files for a purpose, and for a model if one is named. Raises ConfigError.

    The trial is named after its model, or else after the trial of the files, and its purpose.
    """
    own = [f"purpose={purpose}", *([f"actor.path={Path(model).expanduser().absolute()}"] if model else [])]
    given = replace(sources, presets=[*sources.presets, PRESET], overrides=[*own, *sources.overrides])
    name = Path(model).expanduser().absolute().name if model else prepare.load_config(given).config.trial_name
    named = [*own, f"trial_name={name}-{purpose}", *sources.overrides]
    return prepare.load_config(replace(given, overrides=named))


def load_for_trial(sources: ConfigSources, purpose: str, parent: Trial, step: int) -> Loaded:
    """Load the configuration of a trial for a purpose, with its weights at a step.

    The result names the folder of the weights, which may not exist yet: in the new trial. Raises ConfigError,
    TrialStateError.
    """
    if sources.files or sources.presets or sources.cluster:
        raise ConfigError(
            f"trial {parent} has its own configuration: give options (--a.b VALUE) in place of files."
        )
    if not isinstance(from_dict(load_object(parent.config_json)), GRPOConfig):
        raise TrialStateError(
            f"trial {parent} has no generation servers: export its model, and give that folder."
        )
    own = [f"purpose={purpose}", "environments=null", "actor.init_from_scratch=false", "actor.use_lora=false"]
    own += ["launcher.slurm.layout=allocation", "recover.mode=auto"]
    own += [f"trial_name={parent.name}-{purpose}-{step}"]
    loaded = prepare.load_stored(parent, [*own, *sources.overrides])
    of_weights = forking.list_weights_options(loaded.config, find_weights_folder(loaded, parent, step))
    return prepare.load_stored(parent, [*own, *of_weights, *sources.overrides])


def has_adapter(trial: Trial) -> bool:
    """Return whether a trial trains an adapter, which an export can merge into its model."""
    config = from_dict(load_object(trial.config_json))
    return isinstance(config, GRPOConfig) and config.actor.use_lora


def find_weights_folder(loaded: Loaded, parent: Trial, step: int) -> Path:
    """Return the folder in a new trial of the weights of `parent` at a step; clients see its name."""
    return submission.make_trial(loaded.config).exports / f"{parent.name}-{step}"
