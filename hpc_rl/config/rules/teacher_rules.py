"""Rules about trainer `teacher`: its student, templates and reward, and options that it does not use."""

import re
from collections.abc import Collection, Iterator
from functools import partial

from hpc_rl.config.load.fields import suggest_name
from hpc_rl.config.options.experiment import Config, GRPOConfig, TeacherConfig
from hpc_rl.config.options.teacher import STUDENT, TRUTH_COLUMNS
from hpc_rl.config.row_shapes import list_columns, load_named_rows
from hpc_rl.config.rules.consistency import list_given, list_server_pools
from hpc_rl.config.rules.generation_rules import BUILT_IN, IMPORT_PATH
from hpc_rl.config.text_templates import list_names
from hpc_rl.core.allocation import Allocation, Servers, Train
from hpc_rl.core.refusal import Kind, Refusal

VARIABLES = {  # template -> required variables, optional variables
    "diagnostic": (("question",), ()),
    "adaptive": (("question",), ("approach",)),
    "with_teaching": (("question", "teaching"), ("approach",)),
    "baseline": (("question",), ()),
}
_EVERY = {variable for both in VARIABLES.values() for some in both for variable in some}
REWARD_PARTS = ("gain", "solved", "efficiency", "leak")
_WEIGHTS = {"efficiency_weight": "efficiency", "degradation_penalty_multiplier": "gain"}


def check_student(config: GRPOConfig, explicit: Collection[str]) -> Iterator[Refusal]:
    if not isinstance(config, TeacherConfig) or STUDENT in config.pools:
        return
    pools = list_server_pools(config)
    missing = [Servers(one.backend, pool=STUDENT) for one in pools[:1]]
    use = f" and allocation_mode {Allocation((*pools, *missing), Train('fsdp'))}"
    if not pools or STUDENT in [one.pool for one in pools]:
        use = ""
    path, url = f"pools.{STUDENT}.path", f"pools.{STUDENT}.url"
    needed = f"set {path}{use}, or {url} of an endpoint"
    yield Refusal(
        option="trainer",
        value="teacher",
        kind=Kind.MISSING,
        why=f"needs a pool {STUDENT}, the model that is taught: {needed}",
        related=(path, "allocation_mode", url) if use else (path, url),
    )


def check_templates(config: GRPOConfig, explicit: Collection[str]) -> Iterator[Refusal]:
    if not isinstance(config, TeacherConfig):
        return
    for name, (needed, _) in VARIABLES.items():
        refuse = partial(Refusal, option=f"teacher.templates.{name}", kind=Kind.VALUE)
        used = list_names(getattr(config.teacher.templates, name))
        for variable in needed:
            if variable not in used:
                yield refuse(why=f"must contain {{{variable}}}, in the place where that text belongs")
        for variable in used:
            if variable in TRUTH_COLUMNS and name != "adaptive":
                why = f": {{{variable}}} would tell the student the right answer"
                yield refuse(why=why, use="remove it")
            if variable in _EVERY - _list_variables(name):
                there = ", ".join(f"{{{one}}}" for one in sorted(_list_variables(name)))
                yield refuse(why=f": this template can't contain {{{variable}}}", use=f"known: {there}")


def _list_variables(template: str) -> set[str]:
    needed, optional = VARIABLES[template]
    return {*needed, *optional}


def check_reward(config: GRPOConfig, explicit: Collection[str]) -> Iterator[Refusal]:
    if not isinstance(config, TeacherConfig):
        return
    option, parts = "teacher.reward_parts", config.teacher.reward_parts
    refuse = partial(Refusal, option=option, kind=Kind.VALUE)
    if not parts:
        default = f"the default is {', '.join(REWARD_PARTS)}"
        yield refuse(why="is empty, so every reward would be 0", use=default)
    for part in parts:
        if part not in REWARD_PARTS and not re.fullmatch(IMPORT_PATH, part):
            use = f"allowed: {', '.join(REWARD_PARTS)}, or your own package.module:name. "
            use += suggest_name(part, REWARD_PARTS)
            yield refuse(value=repr(part), why="is not known", use=use.strip())
    names = [part.rpartition(":")[2] for part in parts]
    for name in dict.fromkeys(name for name in names if names.count(name) > 1):
        why = f"has {name} twice, but metrics name each part, so the names must differ"
        yield refuse(why=why, use="remove one, or rename your function")
    for weight, part in _WEIGHTS.items():
        if part not in parts and list_given(config, explicit, f"teacher.{weight}"):
            yield Refusal(
                option=f"teacher.{weight}",
                kind=Kind.NO_EFFECT,
                why=f"has no effect without {part} in {option}",
                use="add it, or remove the weight",
                related=(option,),
            )


def check_rollout(config: GRPOConfig, explicit: Collection[str]) -> Iterator[Refusal]:
    workflow = config.rollout.workflow
    refuse = partial(Refusal, kind=Kind.CONFLICT, related=("trainer",))
    if not isinstance(config, TeacherConfig):
        if workflow == "teacher":
            why = "needs trainer teacher and its section `teacher`"
            yield refuse(option="rollout.workflow", value=workflow, why=why)
        return
    if workflow in BUILT_IN["workflow"] and workflow != "teacher":
        use = "remove it: trainer teacher has its own workflow"
        yield refuse(option="rollout.workflow", value=workflow, why="can't teach a student", use=use)
    if config.environments is not None:
        why = "can't be used with trainer teacher, because environments bring their own prompts and rewards"
        yield refuse(option="environments", why=why, use="remove it")


GRPO_RULES = [check_student, check_templates, check_reward, check_rollout]


def check_columns(config: Config, explicit: Collection[str]) -> Iterator[Refusal]:
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
) -> Iterator[Refusal]:
    """Refuse each name in a template that is not known, not a column of the rows, and not refused already."""
    for section in ("train_dataset", "valid_dataset"):
        dataset = getattr(config, section)
        there = list_columns(load_named_rows(dataset.path, dataset.columns)) if dataset is not None else ()
        for variable in list_names(template):
            if there and variable not in {*known, *there, *refused}:
                rows = f"nor a column of {section}.path ({', '.join(sorted(there))})"
                hint = suggest_name(variable, {*known, *there}) or "Braces of a LaTeX command are text."
                why = f": {{{variable}}} is neither a variable {rows}. {hint}"
                yield Refusal(option=option, kind=Kind.VALUE, why=why, related=(f"{section}.path",))


FILE_RULES = [check_columns]
