"""The held-out sets of a trial: `valid_dataset`, under the name "", and `evaluator.sets`."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from hpc_rl.config.options.dataset import DatasetConfig
from hpc_rl.config.options.experiment import GRPOConfig
from hpc_rl.config.options.inference import GenerationHyperparameters
from hpc_rl.config.options.operations import EvaluatorConfig, FrequencyConfig
from hpc_rl.core.refusal import Kind, Refusal

MAIN_SET = "valid_dataset"  # where the set without a name needs one
SAMPLING = ("n_samples", "max_new_tokens", "temperature", "top_p", "greedy")


def list_held_out_sets(config: GRPOConfig) -> dict[str, DatasetConfig]:
    """Return the data of each set; {} without `valid_dataset`."""
    if config.valid_dataset is None:
        return {}
    others = {
        name: DatasetConfig(path=one.path, columns=one.columns) for name, one in config.evaluator.sets.items()
    }
    return {"": config.valid_dataset, **others}


def find_sampling(config: GRPOConfig, name: str) -> tuple[GenerationHyperparameters, str]:
    """Return the sampling of a set, and its section."""
    if config.purpose == "generate":
        return config.gconfig, "gconfig"
    common = config.eval_gconfig or replace(config.gconfig, n_samples=1)
    if not name:
        return common, "eval_gconfig" if config.eval_gconfig else "gconfig"
    own = {option: getattr(config.evaluator.sets[name], option) for option in SAMPLING}
    given = {option: value for option, value in own.items() if value is not None}
    return replace(common, **given), f"evaluator.sets.{name}"


def find_period(config: GRPOConfig, name: str) -> FrequencyConfig:
    """Return how often a set is evaluated."""
    own = config.evaluator.sets.get(name)
    periods = (own and own.freq_epochs, own and own.freq_steps, own and own.freq_secs)
    return own if own is not None and any(periods) else config.evaluator


def refuse_same_names(evaluator: EvaluatorConfig, rows: Iterable[Mapping[str, Any]]) -> Iterator[Refusal]:
    """Yield a refusal for each set whose name is also one of `sets_column` in the rows of `valid_dataset`."""
    column = evaluator.sets_column
    if column is None or not evaluator.sets:
        return
    for name in sorted({str(row.get(column, "")) for row in rows} & evaluator.sets.keys()):
        why = f"has the same name as the rows of valid_dataset with {name!r} in column {column!r}"
        yield Refusal(
            option=f"evaluator.sets.{name}",
            kind=Kind.CONFLICT,
            why=why,
            use="rename the set",
            related=("evaluator.sets_column",),
        )
