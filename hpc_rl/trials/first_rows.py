"""The first rows of a trial as tokens, by the code of the job: rows that can't be encoded or are too long."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_rl.config.held_out import refuse_same_names
from hpc_rl.config.load.stored import find_trainer
from hpc_rl.config.options.dataset import DatasetConfig
from hpc_rl.config.options.experiment import Config, GRPOConfig, list_datasets
from hpc_rl.config.row_shapes import Row, get_messages, load_named_rows
from hpc_rl.config.rules.file_rules import find_context
from hpc_rl.config.rules.training_rules import find_trained_model
from hpc_rl.core.errors import ConfigError
from hpc_rl.core.refusal import Kind, Refusal, make_note

if TYPE_CHECKING:
    from hpc_rl.datasets.tokenizer import Tokenizer

TEXT_COLUMNS = ("prompt", "completion", "chosen", "rejected", "answer")
MAX_EXAMPLES = 5


def check_first_rows(config: Config, unreadable: Collection[str] = ()) -> Iterator[Refusal]:
    """Yield notes on rows that the job rejects or leaves out; refusals if that is all of them.

    Datasets and tokenizers that only the nodes see are left out, and the `unreadable` sections.
    """
    section, engine = find_trained_model(config)
    option = "tokenizer_path" if config.tokenizer_path else f"{section}.path"
    folder = Path(config.tokenizer_path or engine.path).expanduser()
    found = [
        (name, one, rows)
        for name, one in list_datasets(config)
        if one.path and name.partition(".")[0] not in unreadable
        if (rows := load_named_rows(one.path, one.columns))
    ]
    if not (folder / "tokenizer.json").is_file() or not found:
        return
    from hpc_rl.datasets.tokenizer import Tokenizer  # imports take time, and only rows need it

    try:
        tokenizer = Tokenizer(folder)
    except ConfigError as error:
        yield Refusal(option=option, kind=Kind.FILE, why=f": {error}")
        return
    for name, one, rows in found:
        yield from _check_dataset(config, name, one, rows, tokenizer)


def _check_dataset(
    config: Config, name: str, dataset: DatasetConfig, rows: list[Row], tokenizer: Tokenizer
) -> Iterator[Refusal]:
    lengths, trainer = list[int](), find_trainer(config)
    for number, row in enumerate(rows, 1):
        try:
            lengths.append(_count_tokens(trainer, tokenizer, row))
        except (ConfigError, UnicodeError, TypeError, ValueError) as error:
            yield _refuse(name, dataset, f": row {number} can't be encoded: {error}")
            return
    sets = config.evaluator.sets_column
    if name == "valid_dataset" and sets and not any(sets in row for row in rows):
        why, related = f"is not a column of the first {len(rows)} rows of {name}", (f"{name}.path",)
        yield Refusal(option="evaluator.sets_column", value=sets, kind=Kind.FILE, why=why, related=related)
    if name == "valid_dataset":
        yield from refuse_same_names(config.evaluator, rows)
    context = find_context(config) if isinstance(config, GRPOConfig) else None
    is_cut = dataset.too_long == "truncate_left"
    most = min(
        (limit for limit in (dataset.max_length, context and context - 1) if limit is not None), default=None
    )
    yield from _find_unknown(name, dataset, rows, tokenizer)
    odd = sum(not length for length in lengths)
    yield from _report_unusable(name, dataset, "have no token", odd, len(lengths))
    if most is not None and not (is_cut and dataset.max_length):
        long = sum(length > most for length in lengths)
        use = f"raise {name}.max_length" if most == dataset.max_length else ""
        yield from _report_unusable(name, dataset, f"have more than {most} tokens", long, len(lengths), use)


def _count_tokens(trainer: str, tokenizer: Tokenizer, row: Row) -> int:
    """Return the length of a row, of a pair of answers the longer one's."""
    from hpc_rl.datasets.encode import encode_pair, encode_preference, encode_prompt, encode_sequence

    if trainer == "sft":
        return len(encode_sequence(tokenizer, row)[0])
    if trainer == "rw":
        return max(map(len, encode_pair(tokenizer, row)))
    if trainer == "dpo":
        return max(map(len, encode_preference(tokenizer, row)))
    return len(encode_prompt(tokenizer, row))


def _refuse(name: str, dataset: DatasetConfig, why: str, use: str = "") -> Refusal:
    return Refusal(option=f"{name}.path", value=dataset.path, kind=Kind.FILE, why=why, use=use)


def _find_unknown(
    name: str, dataset: DatasetConfig, rows: list[Row], tokenizer: Tokenizer
) -> Iterator[Refusal]:
    """Yield a note if rows have characters without a token; a refusal if nothing has a token.

    A model reads and writes only tokens.
    """
    unknown, num_rows, num_unknown, num_chars = dict[str, None](), 0, 0, 0
    for row in rows:
        texts = [str(row[column]) for column in TEXT_COLUMNS if isinstance(row.get(column), str | int)]
        texts += [one["content"] for one in get_messages(row) or () if isinstance(one.get("content"), str)]
        parts = [part for text in texts for part in tokenizer.unknown(text)]
        unknown |= dict.fromkeys(parts)
        num_rows += bool(parts)
        num_unknown += sum(map(_count_visible, parts))
        num_chars += sum(map(_count_visible, texts))
    if not unknown:
        return
    shown = ", ".join(repr(part) for part in list(unknown)[:MAX_EXAMPLES])
    what = f"{num_rows} of the first {len(rows)} rows have text without a token: {shown}"
    if num_unknown == num_chars:
        use = "use the tokenizer that the model was trained with, or one that has these characters"
        yield _refuse(name, dataset, f": tokenizer {tokenizer.folder}: {what}", use)
        return
    why = f": {what} in tokenizer {tokenizer.folder}; the model neither reads nor writes it"
    yield make_note(name, why, Kind.FILE, is_warning=True)


def _count_visible(text: str) -> int:
    return len("".join(text.split()))


def _report_unusable(
    name: str, dataset: DatasetConfig, what: str, num_bad: int, num: int, use: str = ""
) -> Iterator[Refusal]:
    """Yield a note if some rows are unusable; a refusal if all are."""
    if num_bad and num_bad == num:
        yield _refuse(name, dataset, f": the first {num} rows {what}, and can't be trained on", use)
    elif num_bad:
        why = f"{num_bad} of the first {num} rows of {name} {what}, so they are not trained on"
        yield make_note("", why, Kind.FILE, related=(f"{name}.path",))
