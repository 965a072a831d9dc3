"""Rules about trainer `teacher`: its student, templates and reward, and options that it does not use."""

import re
from collections.abc import Collection, Iterator

from hpc_rl.config.load.fields import suggest_name
from hpc_rl.config.options.experiment import Config, GRPOConfig, TeacherConfig
from hpc_rl.config.options.teacher import STUDENT, TRUTH_COLUMNS
from hpc_rl.config.row_shapes import list_columns, load_named_rows
from hpc_rl.config.rules.consistency import list_given, list_server_pools
from hpc_rl.config.rules.generation_rules import BUILT_IN, IMPORT_PATH
from hpc_rl.config.text_templates import list_names
from hpc_rl.core.allocation import Allocation, Servers, Train

VARIABLES = {  # template -> required variables, optional variables
    "diagnostic": (("question",), ()),
    "adaptive": (("question",), ("approach",)),
    "with_teaching": (("question", "teaching"), ("approach",)),
    "baseline": (("question",), ()),
}
_EVERY = {variable for both in VARIABLES.values() for some in both for variable in some}
REWARD_PARTS = ("gain", "solved", "efficiency", "leak")
_WEIGHTS = {"efficiency_weight": "efficiency", "degradation_penalty_multiplier": "gain"}


def check_student(config: GRPOConfig, explicit: Collection[str]) -> Iterator[str]:
    if not isinstance(config, TeacherConfig) or STUDENT in config.pools:
        return
    pools = list_server_pools(config)
    missing = [Servers(one.backend, pool=STUDENT) for one in pools[:1]]
    use = f" and allocation_mode {Allocation((*pools, *missing), Train('fsdp'))}"
    if not pools or STUDENT in [one.pool for one in pools]:
        use = ""
    needed = f"set pools.{STUDENT}.path{use}, or pools.{STUDENT}.url of an endpoint"
    yield f"trainer teacher needs a pool {STUDENT}, the model that is taught: {needed}."


def check_templates(config: GRPOConfig, explicit: Collection[str]) -> Iterator[str]:
    if not isinstance(config, TeacherConfig):
        return
    for name, (needed, _) in VARIABLES.items():
        used = list_names(getattr(config.teacher.templates, name))
        for variable in needed:
            if variable not in used:
                yield f"teacher.templates.{name} has no {{{variable}}}: write it where that belongs."
        for variable in used:
            if variable in TRUTH_COLUMNS and name != "adaptive":
                told = "would tell the student the right answer"
                yield f"teacher.templates.{name}: {{{variable}}} {told}; remove it."
            if variable in _EVERY - _list_variables(name):
                there = ", ".join(f"{{{one}}}" for one in sorted(_list_variables(name)))
                yield f"teacher.templates.{name}: there is no {{{variable}}} when it is used; known: {there}."


def _list_variables(template: str) -> set[str]:
    needed, optional = VARIABLES[template]
    return {*needed, *optional}


def check_reward(config: GRPOConfig, explicit: Collection[str]) -> Iterator[str]:
    if not isinstance(config, TeacherConfig):
        return
    option, parts = "teacher.reward_parts", config.teacher.reward_parts
    if not parts:
        yield f"{option} is empty, so every reward would be 0; the default is {', '.join(REWARD_PARTS)}."
    for part in parts:
        if part not in REWARD_PARTS and not re.fullmatch(IMPORT_PATH, part):
            allowed = f"allowed: {', '.join(REWARD_PARTS)}, or your own package.module:name"
            yield f"{option} {part!r} is not known; {allowed}. {suggest_name(part, REWARD_PARTS)}".strip()
    names = [part.rpartition(":")[2] for part in parts]
    for name in dict.fromkeys(name for name in names if names.count(name) > 1):
        yield f"{option} has {name} twice, but each is reported by its name; omit one, or rename it."
    for weight, part in _WEIGHTS.items():
        if part not in parts and list_given(config, explicit, f"teacher.{weight}"):
            yield f"teacher.{weight} has no effect without {part} in {option}; add it, or remove the weight."


def check_rollout(config: GRPOConfig, explicit: Collection[str]) -> Iterator[str]:
    workflow = config.rollout.workflow
    if not isinstance(config, TeacherConfig):
        if workflow == "teacher":
            yield "rollout.workflow teacher needs trainer: teacher, whose section teacher it follows."
        return
    if workflow in BUILT_IN["workflow"] and workflow != "teacher":
        yield f"rollout.workflow {workflow} teaches no student; remove it: trainer teacher has its own."
    if config.environments is not None:
        yield "environments can't be used with trainer teacher: they ask and score by themselves; remove it."


GRPO_RULES = [check_student, check_templates, check_reward, check_rollout]


def check_columns(config: Config, explicit: Collection[str]) -> Iterator[str]:
    """Refuse each name in a template that is neither a variable nor a column of the rows."""
    if isinstance(config, TeacherConfig):
        for name in VARIABLES:
            template = getattr(config.teacher.templates, name)
            # `check_templates` refuses variables of other templates
            yield from check_template_columns(
                config, f"teacher.templates.{name}", template, _list_variables(name), _EVERY
            )


def check_template_columns(
    config: Config, option: str, template: str, known: Collection[str], refused: Collection[str] = ()
) -> Iterator[str]:
    """Refuse each name in a template that is not known, not a column of the rows, and not refused already."""
    for section in ("train_dataset", "valid_dataset"):
        dataset = getattr(config, section)
        there = list_columns(load_named_rows(dataset.path, dataset.columns)) if dataset is not None else ()
        for variable in list_names(template):
            if there and variable not in {*known, *there, *refused}:
                rows = f"nor a column of {section}.path ({', '.join(sorted(there))})"
                hint = suggest_name(variable, {*known, *there}) or "Braces of a LaTeX command are text."
                yield f"{option}: {{{variable}}} is neither a variable {rows}. {hint}"


FILE_RULES = [check_columns]
