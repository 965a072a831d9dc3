"""Rules about `distillation`: its algorithm, its pool, and the tokenizers of teacher and student."""

import functools
import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from hpc_rl.config.load.fields import suggest_name
from hpc_rl.config.options.experiment import Config, GRPOConfig, TeacherConfig, is_held_out, list_datasets
from hpc_rl.config.pool_view import (
    find_backend,
    find_teacher_pool,
    find_trained_pool,
    is_scoring_teacher,
    list_reward_models,
)
from hpc_rl.config.row_shapes import list_columns, load_named_rows
from hpc_rl.config.rules.consistency import list_given
from hpc_rl.config.rules.vocabulary_rules import load_vocabulary_size
from hpc_rl.config.text_templates import list_names
from hpc_rl.core.algorithms import ALGORITHMS
from hpc_rl.core.refusal import Kind, Refusal

SECTION, ALGORITHM, POOL = "distillation", "actor.algorithm", "distillation.pool"
_OF_ANSWERS = ("max_new_tokens", "temperature", "top_p", "stop_token_ids")
_OF_CREDIT = ("distill_loss_weight", "rl_loss_weight", "top_k", "demonstration_column")
_MOST_OF_VLLM = 20  # likely tokens that vLLM reports


def check_distillation(config: GRPOConfig, explicit: Collection[str]) -> Iterator[Refusal]:
    name = config.actor.algorithm
    row = ALGORITHMS.get(name)
    if config.distillation is None or (row is None and ":" in name):  # the user's own may have a teacher
        return
    if row is None or SECTION not in row.needs:
        fits = [one for one, other in ALGORITHMS.items() if SECTION in other.needs]
        use = f"use {', '.join(fits)}, or remove the section"
        why = f"has no effect: {ALGORITHM} {name} has no teacher"
        yield Refusal(option=SECTION, kind=Kind.NO_EFFECT, why=why, use=use, related=(ALGORITHM,))
        return
    yield from _check_pool(config, explicit)
    yield from _check_credit(config, explicit)
    if config.environments is not None:
        why = "can't be used with environments: no teacher scores the groups that they send"
        yield Refusal(option=SECTION, kind=Kind.UNSUPPORTED, why=why, related=("environments",))
    if isinstance(config, TeacherConfig):
        why = "can't be used with trainer teacher, which trains a teacher by rewards"
        yield Refusal(
            option=SECTION, kind=Kind.CONFLICT, why=why, use="use trainer grpo", related=("trainer",)
        )


def _check_pool(config: GRPOConfig, explicit: Collection[str]) -> Iterator[Refusal]:
    name, option = find_teacher_pool(config), POOL
    if name is None:
        if ALGORITHMS[config.actor.algorithm].sampled_by == "teacher":
            why = (
                f"is the trained model's own pool: {config.actor.algorithm} trains on another model's samples"
            )
            given = repr(config.distillation and config.distillation.pool)
            yield Refusal(option=option, value=given, kind=Kind.CONFLICT, why=why, use="name another pool")
        return
    pool = config.pools.get(name)
    if pool is None:
        known = f"section pools has {', '.join(config.pools) or 'no pool'}"
        use = f"{known}. {suggest_name(name, config.pools)}".strip()
        why = "is not a pool of section pools"
        yield Refusal(option=option, value=repr(name), kind=Kind.VALUE, why=why, use=use, related=("pools",))
        return
    if is_scoring_teacher(config, name):
        for given in list_given(config, explicit, tuple(f"pools.{name}.{one}" for one in _OF_ANSWERS)):
            why = (
                f"has no effect: {config.actor.algorithm} asks this pool for log-probabilities, not for texts"
            )
            related = (ALGORITHM,)
            yield Refusal(option=given, kind=Kind.NO_EFFECT, why=why, use="remove it", related=related)
    if name in list_reward_models(config):
        why, related = "is a reward model, which has no log-probabilities of tokens", ("rollout.reward_fn",)
        yield Refusal(option=option, value=repr(name), kind=Kind.CONFLICT, why=why, related=related)
    url = f"pools.{name}.url"
    if pool.url and config.actor.algorithm == "sft_distill":
        if config.rollout.workflow != "single_turn":
            why = f"can't be used with {url}: the endpoint answers the chat of each row once"
            workflow = "rollout.workflow"
            yield Refusal(
                option=workflow,
                value=config.rollout.workflow,
                kind=Kind.UNSUPPORTED,
                why=why,
                use=f"use single_turn, or pools.{name}.path and servers for it",
                related=(url,),
            )
    elif pool.url and not pool.tokenizer_path:
        why = f"is missing: hpc-rl compares the tokenizers of the student and of the teacher at {url}"
        use = "set it to a copy of the teacher's tokenizer"
        option = f"pools.{name}.tokenizer_path"
        yield Refusal(option=option, kind=Kind.MISSING, why=why, use=use, related=(url,))


def _check_credit(config: GRPOConfig, explicit: Collection[str]) -> Iterator[Refusal]:
    section, name = config.distillation, config.actor.algorithm
    assert section is not None
    if name == "sft_distill":
        for option in list_given(config, explicit, tuple(f"{SECTION}.{one}" for one in _OF_CREDIT)):
            why = "has no effect with sft_distill, which gives all samples of the teacher the same weight"
            yield Refusal(option=option, kind=Kind.NO_EFFECT, why=why, use="remove it", related=(ALGORITHM,))
        return
    sampling = config.gconfig
    if sampling.temperature != 1 and not sampling.greedy:
        why = f"must be 1 with {name}: servers return a teacher's log-probabilities at temperature 1"
        yield Refusal(
            option="gconfig.temperature",
            value=f"{sampling.temperature:g}",
            kind=Kind.CONFLICT,
            why=why,
            use="use 1",
            related=(ALGORITHM,),
        )
    column, is_policy = f"{SECTION}.demonstration_column", find_teacher_pool(config) is None
    if (name == "opsd" or is_policy) and section.demonstration_column is None:
        why = f"is missing: without a demonstration, the teacher of {name} is the policy itself"
        use = "name the column with the demonstrations"
        yield Refusal(option=column, kind=Kind.MISSING, why=why, use=use, related=(ALGORITHM,))
    yield from _check_top_k(config)
    if section.demonstration_column and "demonstration" not in list_names(section.demonstration_template):
        why = "must contain {demonstration}, in the place where that text belongs"
        yield Refusal(option=f"{SECTION}.demonstration_template", kind=Kind.VALUE, why=why)


def _check_top_k(config: GRPOConfig) -> Iterator[Refusal]:
    """Refuse likely tokens of servers that do not report them, or not so many."""
    assert config.distillation is not None
    name, top_k = find_teacher_pool(config) or find_trained_pool(config), config.distillation.top_k
    option, of_pool = f"{SECTION}.top_k", config.pools.get(name)
    if top_k and of_pool is not None and of_pool.url:
        url = f"pools.{name}.url"
        why = f"can't be used with {url}: endpoints name likely tokens by their texts, not by their ids"
        use = f"use 0, or pools.{name}.path and servers for it"
        yield Refusal(option=option, value=top_k, kind=Kind.UNSUPPORTED, why=why, use=use, related=(url,))
    elif top_k > _MOST_OF_VLLM and find_backend(config, name) == "vllm":
        why = f"is more than vLLM servers report, and pool {name} has vLLM servers"
        use = f"use at most {_MOST_OF_VLLM}, or sglang servers"
        related = ("allocation_mode",)
        yield Refusal(option=option, value=top_k, kind=Kind.UNSUPPORTED, why=why, use=use, related=related)


GRPO_RULES = [check_distillation]


def check_demonstrations(config: Config, explicit: Collection[str]) -> Iterator[Refusal]:
    """Refuse training rows without the column of demonstrations, or without one of the template."""
    section = config.distillation if isinstance(config, GRPOConfig) else None
    if section is None or section.demonstration_column is None:
        return
    named = {*list_names(section.demonstration_template)} - {"question", "demonstration"}
    for name, dataset in list_datasets(config):
        rows = load_named_rows(dataset.path, dataset.columns) if not is_held_out(name) else []
        for column in [section.demonstration_column, *sorted(named)]:
            if rows and not all(row.get(column) for row in rows):
                own = column == section.demonstration_column
                option = f"{SECTION}.demonstration_{'column' if own else 'template'}"
                why = f"needs the column {column} in each row of {dataset.path}"
                use = f"the rows have {', '.join(list_columns(rows))}"
                yield Refusal(option=option, value=column, kind=Kind.FILE, why=why, use=use)


def check_tokenizers(config: Config, explicit: Collection[str]) -> Iterator[Refusal]:
    """Refuse a teacher whose tokens have other ids: it is asked for the student's ids."""
    name = find_teacher_pool(config) if isinstance(config, GRPOConfig) else None
    if name is None or not isinstance(config, GRPOConfig) or name not in config.pools:
        return
    if config.pools[name].url and config.actor.algorithm == "sft_distill":
        return  # its texts become the student's tokens
    pool, own = config.pools[name], Path(config.tokenizer_path or config.actor.path)
    other = Path(pool.tokenizer_path or pool.path)
    student, teacher = (load_token_ids(folder / "tokenizer.json") for folder in (own, other))
    if student is None or teacher is None or student == teacher:  # file_rules refuse missing files
        return
    differing = sorted(
        (id_, text) for text, id_ in {*student.items()} ^ {*teacher.items()} if isinstance(id_, int)
    )
    id_, text = differing[0]
    used = "tokenizer_path" if pool.tokenizer_path else "path"
    yield Refusal(
        option=f"pools.{name}.{used}",
        value=other,
        kind=Kind.FILE,
        why=f"has another tokenizer than the student's {own}: {text!r} (id {id_}) is only in one of them",
        use="use a teacher with the same tokenizer",
        related=("tokenizer_path" if config.tokenizer_path else "actor.path",),
    )


def load_token_ids(path: Path) -> dict[str, int] | None:
    """Return the ids of a tokenizer's tokens; None if its file can't be read."""
    try:
        stat = path.stat()
        return _load_token_ids(path, stat.st_mtime_ns, stat.st_size)
    except (OSError, ValueError, KeyError, TypeError):
        return None


@functools.lru_cache(maxsize=4)
def _load_token_ids(path: Path, changed_ns: int, size: int) -> dict[str, int]:
    content: dict[str, Any] = json.loads(path.read_bytes())
    vocabulary = content["model"]["vocab"]
    if isinstance(vocabulary, list):  # of a unigram model: text and score
        vocabulary = {text: id_ for id_, (text, _) in enumerate(vocabulary)}
    return {**vocabulary, **{one["content"]: one["id"] for one in content.get("added_tokens") or ()}}


def check_vocabulary(config: Config, explicit: Collection[str]) -> Iterator[Refusal]:
    """Refuse more likely tokens than the model has tokens."""
    section = config.distillation if isinstance(config, GRPOConfig) else None
    if section is None or not isinstance(config, GRPOConfig):
        return
    size = load_vocabulary_size(Path(config.actor.path))
    if size is not None and section.top_k > size:
        why, use = f"is more than the {size} tokens of {config.actor.path}", f"use at most {size}"
        option, related = f"{SECTION}.top_k", ("actor.path",)
        yield Refusal(option=option, value=section.top_k, kind=Kind.FILE, why=why, use=use, related=related)


FILE_RULES = [check_demonstrations, check_tokenizers, check_vocabulary]
