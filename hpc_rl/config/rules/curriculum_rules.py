"""Rules about mixtures of data sets, and about how often their rows are drawn."""

from collections.abc import Collection, Iterator

from hpc_rl.config.options.experiment import Config, GRPOConfig, has_own_prompts, is_held_out, list_datasets
from hpc_rl.config.row_shapes import find_weight, load_named_rows
from hpc_rl.config.rules.consistency import list_given
from hpc_rl.core.errors import ConfigError
from hpc_rl.core.refusal import Kind, Refusal

_OPTIONS = {  # curriculum -> its options
    "band": ("pass_band", "outside_share"),
    "weights": ("weight_column",),
}


def check_curriculum(config: GRPOConfig, explicit: Collection[str]) -> Iterator[Refusal]:
    dataset, kind = config.train_dataset, "train_dataset.curriculum"
    for curriculum, names in _OPTIONS.items():
        for name in list_given(config, explicit, tuple(f"train_dataset.{name}" for name in names)):
            if curriculum != dataset.curriculum:
                why = f"has no effect with {kind} {dataset.curriculum}"
                use = f"set {kind} {curriculum}, or remove it"
                yield Refusal(option=name, kind=Kind.NO_EFFECT, why=why, use=use, related=(kind,))
    band = dataset.pass_band
    if len(band) != 2 or not band[0] <= band[1]:
        why = "must be two numbers, the lowest and the highest mean reward"
        use = "use values such as [0.1, 0.9]"
        yield Refusal(option="train_dataset.pass_band", value=band, kind=Kind.VALUE, why=why, use=use)
    used = [
        name for name, is_used in ((kind, dataset.curriculum != "uniform"), ("mix", dataset.mix)) if is_used
    ]
    for name in used if not has_own_prompts(config) else ():
        option = name if name == kind else f"train_dataset.{name}"
        why = "has no effect: the prompts come from the environments"
        related = ("environments.own_prompts",)
        yield Refusal(option=option, kind=Kind.NO_EFFECT, why=why, use="remove it", related=related)


def check_shares(config: GRPOConfig, explicit: Collection[str]) -> Iterator[Refusal]:
    mix = config.train_dataset.mix
    if mix and config.train_dataset.shares[0] <= 0:
        shares = " + ".join(f"{one.share:g}" for one in mix.values())
        why = f"has the shares {shares}, which leave none for train_dataset.path"
        use = "their sum must be below 1"
        yield Refusal(option="train_dataset.mix", kind=Kind.VALUE, why=why, use=use)
    if "main" in mix:
        why = "can't be used: main is the name of the rows of train_dataset.path"
        yield Refusal(option="train_dataset.mix.main", kind=Kind.VALUE, why=why, use="use another name")


GRPO_RULES = [check_curriculum, check_shares]


def check_weights(config: Config, explicit: Collection[str]) -> Iterator[Refusal]:
    """Refuse data with a bad weight in the first rows."""
    if not isinstance(config, GRPOConfig) or config.train_dataset.curriculum != "weights":
        return
    option, column = "train_dataset.weight_column", config.train_dataset.weight_column
    for section, dataset in list_datasets(config):
        rows = load_named_rows(dataset.path, dataset.columns) if not is_held_out(section) else []
        for number, row in enumerate(rows, 1):
            try:
                find_weight(row, column)
            except ConfigError as error:
                why = f": {dataset.path} row {number}: {error}"
                use = f"its columns are {', '.join(row)}"
                yield Refusal(option=option, value=column, kind=Kind.FILE, why=why, use=use)
                break


FILE_RULES = [check_weights]
