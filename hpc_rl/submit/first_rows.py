"""The first prompts of a trial as tokens, by the code of the job: what can't be encoded, or is too long."""

from collections.abc import Iterator
from pathlib import Path

from hpc_rl.config.row_shapes import Row, named_rows
from hpc_rl.config.rules.file_rules import context_of
from hpc_rl.config.sections.dataset import DatasetConfig
from hpc_rl.config.sections.experiment import Config, GRPOConfig
from hpc_rl.datasets.encode import encode_prompt
from hpc_rl.datasets.tokenizer import Tokenizer
from hpc_rl.errors import ConfigError


def check_first_rows(config: Config) -> list[str]:
    """Return notes on prompts that the job will reject. Raises ConfigError where that is all of them.

    Of GRPO trials; datasets and tokenizers that only the nodes see are left out.
    """
    if not isinstance(config, GRPOConfig):
        return []
    folder = Path(config.tokenizer_path or config.actor.path).expanduser()
    sections = [("train_dataset", config.train_dataset), ("valid_dataset", config.valid_dataset)]
    found = [(name, one, named_rows(one.path, one.columns)) for name, one in sections if one and one.path]
    if not (folder / "tokenizer.json").is_file() or not any(rows for _, _, rows in found):
        return []
    try:
        tokenizer = Tokenizer(folder)
    except Exception as error:  # the library raises its own, of no common kind
        raise ConfigError(f"tokenizer {folder} can't be read: {error}") from error
    return [note for name, one, rows in found for note in _notes(config, name, one, rows, tokenizer)]


def _notes(
    config: GRPOConfig, name: str, dataset: DatasetConfig, rows: list[Row], tokenizer: Tokenizer
) -> Iterator[str]:
    lengths = []
    for number, row in enumerate(rows, 1):
        try:
            lengths.append(len(encode_prompt(tokenizer, row)))
        except (ConfigError, UnicodeError, TypeError, ValueError) as error:
            raise ConfigError(f"{name}.path {dataset.path} row {number} can't be encoded: {error}") from error
    context = context_of(config)
    is_cut = dataset.too_long == "truncate_left"
    most = min(
        (limit for limit in (dataset.max_length, context and context - 1) if limit is not None), default=None
    )
    odd = sum(not length for length in lengths)
    yield from _told(name, dataset, "are empty", odd, len(lengths))
    if most is not None and not (is_cut and dataset.max_length):
        long = sum(length > most for length in lengths)
        yield from _told(name, dataset, f"have more than {most} tokens", long, len(lengths))


def _told(name: str, dataset: DatasetConfig, what: str, num_bad: int, num: int) -> Iterator[str]:
    """Yield a note where some prompts are unusable. Raises ConfigError where all are."""
    if num_bad and num_bad == num:
        raise ConfigError(
            f"{name}.path {dataset.path}: the first {num} prompts {what}, and can't be trained on."
        )
    if num_bad:
        yield f"{num_bad} of the first {num} prompts of {name} {what}: they are left out, or rejected"
