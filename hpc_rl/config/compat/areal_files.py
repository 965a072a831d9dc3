"""Translate names and values of AReaL's files, or drop the ones without effect, each with a note.

`translate` handles names, before references are resolved; `drop_idle_values` handles values, afterwards.
"""

import dataclasses
import os
import re
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from typing import Any

from hpc_rl.config.compat.areal_names import (
    ANY,
    AS_UNWRITTEN,
    CODE_OF_WORKFLOWS,
    MEGATRON_LAYERS,
    MODELS,
    MOUNT,
    NAMES,
    OF_MULTI_TURN,
    OF_WORKFLOWS,
    SRUN_ARGS,
    WORKFLOW,
    WORKFLOW_ARGS,
)
from hpc_rl.config.compat.areal_options import IDENTITY, ONE_VALUE
from hpc_rl.config.compat.areal_placement import convert_placement
from hpc_rl.config.compat.renamed import RenamedSettings, explain_name, follow_references, shorten_list
from hpc_rl.config.load.fields import list_defaults, list_options
from hpc_rl.config.load.names import ALIASES
from hpc_rl.config.load.parser import convert_value
from hpc_rl.config.load.source import Settings, SourceValue, add_origin, merge
from hpc_rl.config.options.training import PPOActorConfig, TrainEngineConfig
from hpc_rl.core.refusal import UNSET, Kind, Refusal, make_note

_OF_TEACHER: dict[str, tuple[str, Any]] = {  # option of AReaL's teacher -> ours, its default there
    "teacher.path": ("pools.teacher.path", None),
    "teacher.rl_loss_weight": ("distillation.rl_loss_weight", 1.0),
    "teacher.distill_loss_weight": ("distillation.distill_loss_weight", 0.005),
}
_HAS_SERVERS = "the teacher has servers: allocation_mode and pools.teacher have their options"
_NOT_TRAINED = "the reference model is not trained"
_SUPERVISED = ("sft", "rw", "dpo")  # trainers whose section `model` is `actor` in AReaL v0.5.3 and v1.0
_TO_ACTOR = re.compile(r"\$\{actor(?=[.}])")
_SECTIONS = (
    "checkpointer",
    "scheduler",
    "rollout.agent",
    "rollout.openai",
    "actor.rejection_sampling",
    *(f"{model}.{name}" for model in MODELS for name in ("archon", "archon.fp8_config", "ds_auto_tp")),
)


def rename_supervised_model(
    files: Sequence[Settings], typed: Sequence[tuple[str, SourceValue]]
) -> tuple[list[Settings], list[tuple[str, SourceValue]], list[Refusal]]:
    """Rename `actor` to `model` in files of SFT, reward models and DPO of AReaL v0.5.3 and v1.0.

    Returns files, arguments and notes. `train_dataset.type` tells such a file.
    """
    values = ({name: item} for name, item in typed if name not in ALIASES and not item.is_deletion)
    given = merge([*files, *values])
    set_names = reversed([name for name, item in given.items() if item.value is not None])
    sections = {name.partition(".")[0]: given[name] for name in set_names}
    is_supervised = "train_dataset.type" in given and given["train_dataset.type"].value in _SUPERVISED
    if not is_supervised or "actor" not in sections or sections.keys() & {"model", "gconfig", "rollout"}:
        return list(files), list(typed), []
    why = f"is read as section model, which trainer {given['train_dataset.type'].value} has instead"
    note = make_note("actor", why, origin=sections["actor"].origin)
    renamed = [{_rename_actor(name): _refer_to_model(item) for name, item in file.items()} for file in files]
    return renamed, [(_rename_actor(name), _refer_to_model(item)) for name, item in typed], [note]


def _rename_actor(name: str) -> str:
    section, dot, inside = name.partition(".")
    return f"model{dot}{inside}" if section == "actor" else name


def _refer_to_model(item: SourceValue) -> SourceValue:
    """Replace `${actor.a}` by `${model.a}` in a value."""
    value = item.value
    if isinstance(value, dict):
        return dataclasses.replace(item, value={key: _refer_to_model(one) for key, one in value.items()})
    if isinstance(value, list):
        return dataclasses.replace(item, value=[_refer_to_model(one) for one in value])
    if not isinstance(value, str):
        return item
    text = None if item.text is None else _TO_ACTOR.sub("${model", item.text)
    return dataclasses.replace(item, value=_TO_ACTOR.sub("${model", value), text=text)


def translate(cls: type, given: Settings, chosen: Collection[str] = ()) -> RenamedSettings:
    """Translate the AReaL names that `cls`, the configuration of a trainer, does not have.

    `chosen` are the names that presets or the command line set over the files.
    """
    done = RenamedSettings({})
    given = convert_placement(cls, _flatten_sections(given), frozenset(chosen), done)
    if "teacher" not in list_options(cls) and "teacher" in given and given["teacher"].value is None:
        done.replaced["teacher"] = given.pop("teacher")  # AReaL's default
    given, of_teacher = _take_teacher(given, done)
    if of_teacher:
        done.idle[_HAS_SERVERS] = of_teacher
    given = _drop_one_value_options(cls, given, done)
    for name, item in _convert_rejection_sampling(_convert_norms(given)).items():
        row = NAMES.get(_find_known_part(name))
        if _is_optimizer_of_ref(name, item, cls):
            done.replaced[name] = item
            done.idle[_NOT_TRAINED].append(name)
            continue
        if name in list_options(cls) or (row is None and not _is_of_ref(name, cls)):
            done.settings[name] = item
            continue
        done.replaced[name] = item
        if row is None:
            _check_type(name, item, done)
            done.idle[_NOT_TRAINED].append(name)
        elif row.to:
            if row.to not in given:
                done.settings[row.to] = item
            done.notes.append(make_note(name, explain_name(row.to), origin=item.origin))
        elif ANY in row.idle or item.to_plain() in row.idle or _is_idle(name, item, given):
            done.idle[row.why].append(name)
        else:
            is_section, why = isinstance(item.value, dict), f"{row.why}. Remove this option"
            done.refusals.append(
                Refusal(
                    option=name,
                    origin=item.origin,
                    value=UNSET if is_section else item.shown,
                    kind=Kind.UNSUPPORTED,
                    why=why if is_section else f"can't be used: {why}",
                )
            )
    done.note_idle()
    if WORKFLOW_ARGS in list_options(cls):
        if "teacher" not in list_options(cls):
            _choose_workflow(done)
        _collect_workflow_args(done)
    return done


def is_teacher_of_areal(given: Iterable[str]) -> bool:
    """Return whether a section `teacher` is AReaL's: a model to learn from, not the one to train."""
    return not _OF_TEACHER.keys().isdisjoint(given)


def _take_teacher(given: Settings, done: RenamedSettings) -> tuple[Settings, list[str]]:
    """Move AReaL's teacher to the pool `teacher` and the section `distillation`, with AReaL's defaults.

    Returns the other settings, and the names of options without effect.
    """
    if not is_teacher_of_areal(given):
        return given, []
    mine = {name: item for name, item in given.items() if name.partition(".")[0] == "teacher"}
    origin = next(iter(mine.values())).origin
    found = {name: item for name, item in given.items() if name not in mine}
    found.setdefault("actor.algorithm", SourceValue("opd", origin))
    for name, (to, default) in _OF_TEACHER.items():
        item = mine.get(name, SourceValue(default, origin))
        if item.value is not None:
            found.setdefault(to, item)
            done.notes.append(make_note(name, explain_name(to), origin=item.origin))
    done.replaced |= mine
    return found, [name for name in mine if name not in _OF_TEACHER]


def _flatten_sections(given: Settings) -> Settings:
    """Flatten AReaL's sections that hpc-rl does not have to dotted names."""
    found: Settings = {}
    for name, item in given.items():
        if name in _SECTIONS and isinstance(item.value, dict):
            found |= _flatten_sections({f"{name}.{key}": part for key, part in item.value.items()})
        elif item.value is not None or name not in _SECTIONS:
            found[name] = item
    return found


def _drop_one_value_options(cls: type, given: Settings, done: RenamedSettings) -> Settings:
    """Return the settings without AReaL's options that can have only one value; other values are refused."""
    sections = {name.partition(".")[0] for name in list_options(cls)} | {"scheduler", "checkpointer"}
    found: Settings = {}
    for name, item in given.items():
        row, root = ONE_VALUE.get(name), IDENTITY.get(name)
        if (row is None and root is None) or name.partition(".")[0] not in sections:
            found[name] = item
            continue
        done.replaced[name] = item
        refuse = partial(Refusal, option=name, origin=item.origin, value=item.shown)
        if row is not None and not row.is_allowed(item.to_plain()):
            why = f"can't be used: {row.why}"
            done.refusals.append(refuse(kind=Kind.UNSUPPORTED, why=why, related=row.related_options))
        elif root is not None and item.value is not None:
            wanted = given.get(root, SourceValue(list_defaults(cls).get(root), ""))
            is_known = wanted.value is not None  # else another refusal asks for it
            if is_known and _resolve_text(item, given) != _resolve_text(wanted, given):
                why, use = f"must equal {root} {wanted.shown}", "remove it: it defaults to that"
                done.refusals.append(refuse(kind=Kind.CONFLICT, why=why, use=use, related=(root,)))
    return found


def _resolve_text(item: SourceValue, given: Settings) -> str:
    """Return a name or a path as text; `${a.b}` stands for the value of that option."""
    item = follow_references(item, given)
    text = str(item.value if item.text is None else item.text)
    return os.path.abspath(os.path.expanduser(text)) if "/" in text and "${" not in text else text


def _convert_norms(given: Settings) -> Settings:
    """Replace the switches of v0.3.0 to v0.3.2, which turned adv_norm on, by sections."""
    found = dict(given)
    for norm, switch in (("adv_norm", "group_adv_norm"), ("reward_norm", "group_reward_norm")):
        by_group, section = found.pop(f"actor.{switch}", None), f"actor.{norm}"
        is_on = found.pop(section) if section in found and isinstance(found[section].value, bool) else None
        item = by_group or is_on
        if item is None or any(name.startswith(f"{section}.") or name == section for name in found):
            continue
        level = "group" if by_group is not None and by_group.value is True else "batch"
        if (is_on is not None and not is_on.value) or (norm == "reward_norm" and level == "batch"):
            found[section] = dataclasses.replace(item, value=None, text=None)
            continue
        for name in ("mean_level", "std_level"):
            found[f"{section}.{name}"] = dataclasses.replace(item, value=level, text=level)
    return found


def _convert_rejection_sampling(given: Settings) -> Settings:
    """Spell out AReaL's defaults of a section `actor.rejection_sampling`, with our words for its action.

    Without the decoupled loss the section has no effect in AReaL, so it is dropped.
    """
    section, decoupled = "actor.rejection_sampling", given.get("actor.use_decoupled_loss")
    item = next((item for name, item in given.items() if name.startswith(f"{section}.")), None)
    if item is None:
        return given
    found = dict(given)
    if decoupled is None or decoupled.value is not True:
        found = {name: one for name, one in found.items() if not name.startswith(f"{section}.")}
        return found | {section: dataclasses.replace(item, value=None, text=None)}
    for name, value in (("action", "mask"), ("upper", 5.0)):
        default = dataclasses.replace(item, value=value, text=str(value))
        found.setdefault(f"{section}.{name}", default)
    action = found[f"{section}.action"]
    if action.value == "clamp":
        found[f"{section}.action"] = dataclasses.replace(action, value="truncate", text="truncate")
    return found


def _find_known_part(name: str) -> str:
    """Return the name, or the section around it, that the table lists; else empty."""
    while name and name not in NAMES:
        name = name.rpartition(".")[0]
    return name


def _is_of_ref(name: str, cls: type) -> bool:
    """Return whether a name is an option of the policy's loss in section ref, where AReaL allows it."""
    section, _, option = name.partition(".")
    return (
        section == "ref"
        and section in list_options(cls)
        and option in list_options(PPOActorConfig)
        and option not in list_options(TrainEngineConfig)
    )


def _is_optimizer_of_ref(name: str, item: SourceValue, cls: type) -> bool:
    """Return whether a file has a valid option for the optimizer of the reference model, as AReaL's have."""
    if not name.startswith("ref.optimizer.") or item.is_argument or name not in list_options(cls):
        return False
    try:
        convert_value(list_options(cls)[name], item)
    except ValueError:
        return "${" in str(item.value)
    return True


def _check_type(name: str, item: SourceValue, done: RenamedSettings) -> None:
    if isinstance(item.value, dict) or "${" in str(item.value):
        return
    try:
        convert_value(list_options(PPOActorConfig)[name.partition(".")[2]], item)
    except ValueError as error:
        use = f"remove it. {error}".strip()
        done.refusals.append(
            Refusal(
                option=name,
                origin=item.origin,
                value=item,
                kind=Kind.VALUE,
                why="can't be used",
                use=use,
            )
        )


def _is_idle(name: str, item: SourceValue, given: Settings) -> bool:
    """Return whether other settings leave a name without effect."""
    return name == "vllm.model" and "actor.path" in given and item.value == given["actor.path"].value


def _choose_workflow(done: RenamedSettings) -> None:
    """Choose multi_turn for AReaL's multi-turn example; refuse its agents until a workflow is named.

    Each of AReaL's examples is a script with its own workflow. The keys at the top level tell which it is.
    """
    named = done.settings.get(WORKFLOW)
    found = {name: item for name, item in done.settings.items() if name.partition(".")[0] in OF_WORKFLOWS}
    found |= {name: item for name, item in done.replaced.items() if name in CODE_OF_WORKFLOWS}
    if not found or (named is not None and named.value is not None):
        return
    keys = {name.partition(".")[0] for name in found}
    if keys <= OF_MULTI_TURN and ("turn_discount" in keys or {"max_turns"} < keys):
        item = next(iter(found.values()))
        done.settings[WORKFLOW] = dataclasses.replace(item, value="multi_turn", text="multi_turn")
        why = f"is multi_turn, for {shorten_list(list(found))} ({item.origin})"
        done.notes.append(make_note(WORKFLOW, why, related=tuple(found)))
        return
    telling = [name for name in found if name.partition(".")[0] not in OF_MULTI_TURN] or list(found)
    why = (
        f"{WORKFLOW} is not set. AReaL's examples with this option run agents whose code hpc-rl does not "
        f"have. Set the workflow, as {WORKFLOW}=my_module:MyAgent or {WORKFLOW}=multi_turn; it gets these "
        f"options as {WORKFLOW_ARGS}"
    )
    done.refusals.append(
        Refusal(
            option=shorten_list(telling),
            origin=found[telling[0]].origin,
            kind=Kind.MISSING,
            why=why,
            related=(*telling, WORKFLOW, WORKFLOW_ARGS),
        )
    )


def _collect_workflow_args(done: RenamedSettings) -> None:
    """Collect the arguments of the workflow in `rollout.workflow_args`.

    Keys of this mapping win over top-level keys of AReaL's files; the command line wins over both.
    """
    known = done.settings
    whole = known.get(WORKFLOW_ARGS, SourceValue({}, ""))
    if not isinstance(whole.value, dict):
        return
    args: dict[str, SourceValue] = {}
    typed_in: dict[str, SourceValue] = {}
    for name in list(known):
        item, inside = known[name], name.removeprefix(f"{WORKFLOW_ARGS}.")
        if name == inside and name.partition(".")[0] not in OF_WORKFLOWS:
            continue
        del known[name]
        _insert(typed_in if item.is_argument else args, inside.split("."), item)
        if name == inside:
            done.replaced[name] = item
            done.notes.append(make_note(name, explain_name(f"{WORKFLOW_ARGS}.{name}"), origin=item.origin))
        if name == "n_trajs":
            _apply_n_trajs(item, done)
    args |= whole.value | typed_in
    if args:
        known[WORKFLOW_ARGS] = SourceValue(args, whole.origin or next(iter(args.values())).origin)


def _insert(tree: dict[str, SourceValue], path: list[str], item: SourceValue) -> None:
    for part in path[:-1]:
        inside = tree.get(part)
        members = dict(inside.value) if inside is not None and isinstance(inside.value, dict) else {}
        tree[part] = SourceValue(members, item.origin)
        tree = members
    tree[path[-1]] = item


def _apply_n_trajs(item: SourceValue, done: RenamedSettings) -> None:
    """Set the size of a group to `n_trajs`, the trajectories per prompt that AReaL makes with n_samples 1."""
    own, count = done.settings.get("gconfig.n_samples"), item.value
    is_free = own is None or (own.value == 1 and not own.is_argument)
    if isinstance(count, int) and count > 1 and is_free:
        done.settings["gconfig.n_samples"] = item
        why = f"is {count}, from n_trajs, which is AReaL's number of trajectories per prompt"
        done.notes.append(make_note("gconfig.n_samples", why, related=("n_trajs",)))


def drop_idle_values(cls: type, settings: Settings) -> list[Refusal]:
    """Remove values of AReaL's files that mean nothing here; return notes. References must be resolved."""
    notes, of = [], list_defaults(cls)
    for name, item in list(settings.items()):
        if item.is_argument:
            continue
        value, leaf = item.to_plain(), name.rpartition(".")[2]
        if leaf in ("mean_level", "std_level") and str(value).lower() == "none":
            settings[name] = dataclasses.replace(item, value=None, text=None)
        elif leaf == "target_modules" and isinstance(value, list) and MEGATRON_LAYERS.keys() & set(value):
            layers = [layer for one in value for layer in MEGATRON_LAYERS.get(one, (one,))]
            settings[name] = add_origin(layers, item.origin)
            notes.append(make_note(name, f"is {', '.join(layers)}", origin=item.origin))
        elif (row := AS_UNWRITTEN.get(name)) and (type(value), value) == (type(row[0]), row[0]):
            followed = row[1]
            other = settings[followed].to_plain() if followed in settings else of.get(followed, ...)
            if other != value:
                del settings[name]
            if other not in (value, ...):
                why = f": {value}, AReaL's default, is not used: this option follows {followed} unless set"
                notes.append(make_note(name, why, origin=item.origin))
        elif reason := _explain_idle(name, value, settings):
            del settings[name]
            notes.append(make_note(name, f": no effect: {reason}", Kind.NO_EFFECT, origin=item.origin))
    return notes


def _explain_idle(name: str, value: Any, settings: Settings) -> str:
    """Return why a value of AReaL's files has no effect; empty if it may have one."""
    if name == "launcher.slurm.srun_additional_args" and value and set(str(value).split()) <= SRUN_ARGS:
        return "the plan sets all needed options of srun, and -K would end the roles before they save"
    images = (f"launcher.slurm.{role}_image" for role in ("trainer", "inference_server", "rollout"))
    if name == "launcher.slurm.mount" and value == MOUNT:
        given = (settings[image].value for image in images if image in settings)
        return "" if any(one not in (None, "none") for one in given) else "no container image is set"
    return ""
