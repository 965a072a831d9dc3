"""Rules about datasets: files must exist, rows must suit the trainer, and the reward must not always be 0."""

from collections.abc import Collection, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from hpc_rl.config.load.fields import suggest_name
from hpc_rl.config.load.stored import find_trainer
from hpc_rl.config.options.dataset import DatasetConfig
from hpc_rl.config.options.experiment import (
    Config,
    GRPOConfig,
    TeacherConfig,
    has_own_prompts,
    is_held_out,
    list_datasets,
)
from hpc_rl.config.options.teacher import TRUTH_COLUMNS
from hpc_rl.config.row_shapes import (
    PAIRS,
    Row,
    check_row,
    find_shape,
    get_messages,
    list_columns,
    load_first_rows,
    load_named_rows,
    rename_columns,
)
from hpc_rl.config.rules.container_rules import is_trusted
from hpc_rl.config.rules.file_rules import DATA_FILES, find_split_file, make_hub_hint, make_relative_hint
from hpc_rl.config.rules.generation_rules import BUILT_IN
from hpc_rl.config.rules.training_rules import find_trained_model
from hpc_rl.config.text_templates import list_names
from hpc_rl.core.errors import ConfigError
from hpc_rl.core.files import find_similar_file
from hpc_rl.core.refusal import Kind, Refusal, make_note
from hpc_rl.core.trial import load_json

_NEEDED = {"rl": ("prompt",), "sft": ("prompt", "completion"), "rw": ("chosen", "rejected")}
_NEEDED["dpo"] = _NEEDED["rw"]
_ALL_NEEDED = {name for names in _NEEDED.values() for name in names}
_ALIKE = {  # needed name -> words in names of columns with the same meaning
    "prompt": ("prompt", "text", "question", "problem", "query", "instruction"),
    "completion": ("completion", "response", "answer", "output", "reply"),
    "chosen": ("chosen",),
    "rejected": ("rejected",),
}
_TRUTH = {  # built-in reward -> the columns with the right answer; it needs one of them
    "exact_match": ("answer",),
    "contains": ("answer",),
    "final_answer": TRUTH_COLUMNS,
    "math_verify": TRUTH_COLUMNS,
}
_COLUMNS = {
    "countdown": ("nums", "target"),
    "code_tests": ("tests",),
}  # built-in reward -> all needed columns
_MEDIA = ("image", "images", "video", "videos", "audio")


def list_read_datasets(config: Config) -> Iterator[tuple[str, DatasetConfig]]:
    """Yield section and data set of all data that the trial reads."""
    for section, dataset in list_datasets(config):
        is_read = is_held_out(section) or has_own_prompts(config)
        if dataset.path and is_read:
            yield section, dataset


def adapt_defaults(config: Config, explicit: Collection[str]) -> dict[str, tuple[Any, str]]:
    """Return option -> (new default, reason) for the columns and the reward of known data sets."""
    wanted: dict[str, tuple[Any, str]] = {}
    is_maths = False
    for section, dataset in list_read_datasets(config):
        columns, reason, is_known_maths = _choose_columns(config, section, dataset)
        if columns != dataset.columns:
            wanted[f"{section}.columns"] = (columns, reason)
        if section == "train_dataset" and (found := load_named_rows(dataset.path, columns)):
            is_maths = is_known_maths or all(_is_worked(row.get("answer")) for row in found)
    if is_maths and isinstance(config, GRPOConfig) and not isinstance(config, TeacherConfig):
        reason = "the answers of train_dataset are results of maths, compared by value"
        wanted["rollout.reward_fn"] = ("math_verify", reason)
    elif isinstance(config, GRPOConfig) and _learns_from_teacher_alone(config):
        reason = "the teacher has the only signal, and the rows have no answers"
        wanted["rollout.reward_fn"] = ("none", reason)
    return wanted


def _learns_from_teacher_alone(config: GRPOConfig) -> bool:
    """Return whether no reward is needed, and the training rows have no answer to compare with."""
    if config.distillation is None or config.distillation.rl_loss_weight:
        return False
    rows = load_named_rows(config.train_dataset.path, config.train_dataset.columns)
    return not any(row.get(name) for row in rows for name in TRUTH_COLUMNS)


def _choose_columns(config: Config, section: str, dataset: DatasetConfig) -> tuple[dict[str, str], str, bool]:
    """Return the columns of a dataset, the reason if they are derived, and whether it has maths questions."""
    found, train, kind = load_named_rows(dataset.path, {}), config.train_dataset.columns, _find_kind(config)
    if dataset.columns or not found:
        return dataset.columns, "", False
    if train and is_held_out(section) and found[0].keys() >= {*train.values()}:
        return train, "the same as in train_dataset", False
    if (shape := find_shape(found[0], kind)) is None:
        return {}, "", False
    name = "messages" if kind == "rl" and has_chat_template(_find_tokenizer(config)) else "prompt"
    reason = f"its rows have {' and '.join(shape.known_by)}"
    return {**({name: shape.prompt} if shape.prompt else {}), **shape.columns}, reason, shape.is_maths


def _find_kind(config: Config) -> str:
    return "rl" if isinstance(config, GRPOConfig) else find_trainer(config)


def _is_worked(answer: Any) -> bool:
    """Return whether an answer is a solution with a marked result: after ####, as in GSM8K, or in a box."""
    return isinstance(answer, str) and ("####" in answer or "\\boxed" in answer)


def _find_tokenizer(config: Config) -> Path:
    return Path(config.tokenizer_path or find_trained_model(config)[1].path)


def has_chat_template(folder: Path) -> bool:
    """Return whether the tokenizer in a folder has a chat template."""
    settings = load_json(folder / "tokenizer_config.json")
    is_set = isinstance(settings, dict) and bool(settings.get("chat_template"))
    return is_set or (folder / "chat_template.jinja").is_file()


def check_files(config: Config, explicit: Collection[str]) -> Iterator[Refusal]:
    for section, dataset in list_datasets(config):
        name, path = f"{section}.path", Path(dataset.path)
        refuse = partial(Refusal, option=name, value=path, kind=Kind.FILE)
        split = "test" if is_held_out(section) else "train"
        if not dataset.path:
            if is_held_out(section) or has_own_prompts(config):
                why = "is not set: give the file of the data (only a trial on environments alone needs none)"
                related = ("environments",) if isinstance(config, GRPOConfig) else ()
                yield Refusal(option=name, kind=Kind.MISSING, why=why, related=related)
        elif is_trusted(config, dataset.path):
            continue
        elif not path.exists():
            near = find_similar_file(path)
            place = f"{make_hub_hint(path, 'datasets', split)}{make_relative_hint(path)}"
            use = f"did you mean {near}?" if near else place.rstrip("; ")
            yield refuse(why="does not exist", use=use)
        elif path.is_dir():
            yield from _check_saved_dataset(name, path, split)
        elif path.suffix not in DATA_FILES:
            use = "allowed: a .jsonl or .parquet file, or a directory with a saved dataset"
            yield refuse(why="can't be read", use=use)
        elif not path.stat().st_size:
            yield refuse(why="is empty", use="give a file with rows")


def _check_saved_dataset(name: str, path: Path, split: str) -> Iterator[Refusal]:
    refuse = partial(Refusal, option=name, value=path, kind=Kind.FILE)
    # Dataset.save_to_disk writes state.json next to the data; DatasetDict writes one directory per split.
    if (path / "state.json").is_file():
        return
    splits = sorted(one.parent.name for one in path.glob("*/state.json"))
    if splits:
        one = f"use the path of one, such as {path / splits[0]}"
        yield refuse(why=f"has the splits {', '.join(splits)}: {one}")
        return
    file = find_split_file(path, split)
    why = "is a directory without a saved Hugging Face dataset (it has no state.json)"
    yield refuse(why=why, use=f"did you mean {file}?" if file else "")


def check_rows(config: Config, explicit: Collection[str]) -> Iterator[Refusal]:
    """Yield one refusal for each dataset whose first rows the trainer can't read."""
    kind = _find_kind(config)
    for section, dataset in list_read_datasets(config):
        number, row = 0, dict[str, Any]()
        try:
            for row in load_first_rows(dataset.path):
                number += 1
                made = rename_columns(row, dataset.columns)
                check_row(made, kind)
                if (chat := get_messages(made)) is None:
                    continue
                if isinstance(config, TeacherConfig) and not any(one.get("role") == "user" for one in chat):
                    raise ConfigError("a chat needs a message of role user, which is the question.")
                folder = _find_tokenizer(config)
                if (folder / "tokenizer.json").is_file() and not has_chat_template(folder):
                    hint = "add chat_template.jinja, or give prompts as texts"
                    raise ConfigError(f"the prompt is a chat, and {folder} has no chat template: {hint}.")
        except ConfigError as error:
            columns, hint = f"{section}.columns", _suggest_columns(section, dataset, kind, row)
            why = f": {error} {hint}".rstrip()
            refuse = partial(Refusal, option=f"{section}.path", kind=Kind.FILE)
            if number and dataset.columns:
                yield refuse(option=columns, why=f": {dataset.path} row {number}{why}")
            elif number:
                related = (columns,) if columns in hint else ()
                yield refuse(value=dataset.path, why=f"row {number}{why}", related=related)
            else:
                yield refuse(why=why)


def _suggest_columns(section: str, dataset: DatasetConfig, kind: str, row: Row) -> str:
    """Return a hint for naming the columns if a row lacks needed ones, else an empty text."""
    for column in dataset.columns.values():
        if column.partition(".")[0] not in row:
            return suggest_name(column, row)
    missing = [name for name in _NEEDED[kind] if name not in row]
    if "messages" in row and "prompt" in missing:
        missing.remove("prompt")
    texts = [name for name, value in row.items() if isinstance(value, str) and name not in _ALL_NEEDED]
    like = {
        name: [text for text in texts if any(word in text.lower() for word in _ALIKE[name])]
        for name in missing
    }
    if not texts or not missing:
        return ""
    pairs = ", ".join(f"{name}: {found[0] if len(found) == 1 else 'COLUMN'}" for name, found in like.items())
    return f"Say which column is which by {section}.columns {{{pairs}}}; texts are in {', '.join(texts)}."


def check_agent_columns(config: Config, explicit: Collection[str]) -> Iterator[Refusal]:
    """Refuse an agent's command with a name in braces that is not a column of the first rows."""
    if not isinstance(config, GRPOConfig) or config.rollout.workflow != "agent":
        return
    command = config.rollout.workflow_args.get("command") or ""
    names = list_names(command if isinstance(command, str) else "\n".join(map(str, command)))
    for section, dataset in list_read_datasets(config):
        found = load_named_rows(dataset.path, dataset.columns)
        missing = [name for name in names if found and any(name not in row for row in found)]
        if missing:
            yield Refusal(
                option="rollout.workflow_args",
                kind=Kind.CONFLICT,
                why=f": command has {{{missing[0]}}}, but not every row of {dataset.path} has this column",
                use=f"the rows have {', '.join(list_columns(found)) or 'no columns'}",
                related=(f"{section}.path",),
            )


def check_rewards(config: Config, explicit: Collection[str]) -> Iterator[Refusal]:
    """Refuse a built-in reward that is 0 for each of the first rows, whatever the answer."""
    # an agent may give its own reward
    scoring = {*BUILT_IN["workflow"]} - {"agent"}
    if not isinstance(config, GRPOConfig) or config.rollout.workflow not in scoring:
        return
    refuse = partial(Refusal, option="rollout.reward_fn", kind=Kind.CONFLICT)
    for reward, (section, dataset) in product(config.rollout.reward_functions, list_read_datasets(config)):
        found = load_named_rows(dataset.path, dataset.columns)
        missing = [
            name for name in _COLUMNS.get(reward, ()) if found and any(name not in row for row in found)
        ]
        if missing:
            there = ", ".join(list_columns(found)) or "nothing"
            yield refuse(
                value=reward,
                why=f"needs the column {' and '.join(missing)} in each row of {dataset.path}",
                use=f"its rows have {there}. Set {section}.columns {{{missing[0]}: COLUMN}}",
                related=(f"{section}.columns",),
            )
    checked = [reward for reward in config.rollout.reward_functions if reward in _TRUTH]
    for reward, (section, dataset) in product(checked, list_read_datasets(config)):
        found, names = load_named_rows(dataset.path, dataset.columns), _TRUTH[reward]
        values = [row.get(name) for row in found for name in names]
        truths = [value for value in values if value is not None and str(value).strip()]
        if found and not truths:
            there = ", ".join(list_columns(found)) or "nothing"
            needed = f"compares with the column {' or '.join(names)}"
            yield refuse(
                value=reward,
                why=f"{needed}, which is empty or missing in {dataset.path}",
                use=f"its rows have {there}. Set {section}.columns {{answer: COLUMN}}",
                related=(f"{section}.columns",),
            )
        elif truths and all(isinstance(one, list | dict) for one in truths):
            kind = type(truths[0]).__name__
            each = f"the answers of {dataset.path} are of type {kind}, not texts"
            use = f"write answers as texts, or set {section}.columns {{answer: COLUMN}} to another column"
            yield refuse(value=reward, why=f"would be 0 for every row, because {each}", use=use)
        elif truths and reward == "exact_match" and all(str(one) != str(one).strip() for one in truths):
            spaces = "begin or end with blanks, but completions are compared without blanks"
            yield refuse(
                value=reward,
                why=f"would be 0 for every row: the answers of {dataset.path} {spaces}",
                use="remove the blanks from the answers",
            )


def check_pairs(config: Config, explicit: Collection[str]) -> Iterator[Refusal]:
    """Refuse rows of equal answers, because nothing can be learned from them."""
    for section, dataset, num_equal, num in _count_equal_pairs(config):
        if num_equal == num:
            why = f": `chosen` and `rejected` are equal in the first {num} rows, so nothing would be learned"
            yield Refusal(option=f"{section}.path", value=dataset.path, kind=Kind.FILE, why=why)


def _count_equal_pairs(config: Config) -> Iterator[tuple[str, DatasetConfig, int, int]]:
    """Yield (section, dataset, number of first rows with equal answers, number of first rows)."""
    for section, dataset in list_read_datasets(config) if _find_kind(config) in PAIRS else ():
        found = load_named_rows(dataset.path, dataset.columns)
        if num_equal := sum("chosen" in row and row["chosen"] == row.get("rejected") for row in found):
            yield section, dataset, num_equal, len(found)


RULES = [check_files, check_rows, check_agent_columns, check_rewards, check_pairs]


def list_notes(config: Config) -> Iterator[Refusal]:
    if isinstance(config, GRPOConfig) and config.rollout.workflow == "agent":
        folder = _find_tokenizer(config)
        if (folder / "tokenizer.json").is_file() and not has_chat_template(folder):
            why = f": {folder} has no chat template, so an agent can only use /v1/completions"
            yield make_note("rollout.workflow", why, Kind.FILE, value="agent")
    for section, _, num_equal, num in _count_equal_pairs(config):
        which = f"{num_equal} of the first {num} rows; the model learns nothing from them"
        yield make_note(section, f": `chosen` and `rejected` are equal in {which}", Kind.FILE)
    for section, dataset in list_read_datasets(config):
        found = load_named_rows(dataset.path, dataset.columns)
        media = [name for name in _MEDIA if any(row.get(name) for row in found)]
        if media:
            no_use = "is not used: neither servers nor trainers get images or sound"
            yield make_note(section, f": the column {media[0]} {no_use}", Kind.FILE)
        reward = config.rollout.reward_fn if isinstance(config, GRPOConfig) else ""
        if (
            found
            and reward in ("exact_match", "contains")
            and all(_is_worked(row.get("answer")) for row in found)
        ):
            whole = "rewards only completions with the whole column answer, solution steps included"
            why = f"{whole} ({section}); math_verify compares the results alone"
            yield make_note("rollout.reward_fn", why, value=reward)
