"""Translate how AReaL v0.5.3 and v1.0 place roles: backends, scheduling_strategy and scheduling_spec."""

import dataclasses
import re
from collections.abc import Set
from dataclasses import dataclass
from typing import Any

from hpc_rl.config.compat.renamed import RenamedSettings, explain_name, follow_references
from hpc_rl.config.load.fields import list_options
from hpc_rl.config.load.source import Settings, SourceValue, add_origin
from hpc_rl.core.allocation import MAX_AHEAD_IN_TURNS, OPTION, Allocation, Servers, parse
from hpc_rl.core.errors import ConfigError
from hpc_rl.core.refusal import UNSET, Kind, Refusal, make_note

SERVERS, TEACHER = "rollout", "teacher"
_BESIDE = ("critic", "ref")  # models in the ranks of the trained one
_ARCHON = "archon"
_EXPERTS_WITHOUT_T = re.compile(r"\bffn:([dpe][0-9]+)+(?=\)?$)")
_GB = 1024  # MB, the unit of our options
_OF_NODES = ("cluster.n_nodes", "cluster.n_gpus_per_node")
_AHEAD = "rollout.max_head_offpolicyness"


@dataclass(frozen=True)
class SpecField:
    """The meaning of a field of `scheduling_spec`."""

    trainer: str = ""  # our option for the trainer, if any
    servers: str = ""  # our option for the servers; if it is the same, the values must be equal
    why: str = ""  # the reason for no option
    is_refused: bool = False  # else a field without an option has no effect

    def describe(self) -> str:
        if self.trainer:
            return " and ".join(f"`{name}`" for name in dict.fromkeys((self.trainer, self.servers)))
        return f"refused: {self.why}" if self.is_refused else f"no effect: {self.why}"


def _make_slurm_field(name: str) -> SpecField:
    return SpecField(f"launcher.slurm.{name}", f"launcher.slurm.{name}")


_OWN_ROLES = "hpc-rl starts its own roles, which choose free ports"
SPEC = {
    "cpu": SpecField("launcher.trainer_cpus_per_gpu", "launcher.inference_server_cpus_per_gpu"),
    "mem": SpecField("launcher.trainer_mem_per_gpu", "launcher.inference_server_mem_per_gpu"),
    "env_vars": SpecField("launcher.trainer_env_vars", "launcher.inference_server_env_vars"),
    "image": SpecField("launcher.slurm.trainer_image", "launcher.slurm.inference_server_image"),
    **{
        name: _make_slurm_field(name)
        for name in ("container_type", "mount", "nodelist", "exclude", "srun_additional_args")
    },
    "gpu": SpecField(why="a rank has one GPU, a server as many as its backend has units"),
    **dict.fromkeys(("cmd", "port_count", "task_type"), SpecField(why=_OWN_ROLES)),
    "ray_placement_strategy": SpecField(why="Slurm places the roles"),
    "additional_bash_cmds": SpecField(
        why="roles run no shell; use launcher.setup for a job, launcher.hooks.pre_node for each node, or "
        "build it into the image",
        is_refused=True,
    ),
}
_OF_CONTAINERS = ("image", "mount")


def convert_placement(cls: type, given: Settings, chosen: Set[str], done: RenamedSettings) -> Settings:
    """Return the settings with `allocation_mode` and `launcher` in place of backends and scheduling."""
    trained = "model" if "model" in list_options(cls) else "actor"
    given, is_colocated = _take_strategies(given, trained, done)
    spec = given.get("actor.scheduling_spec")
    given = _take_backends(given, trained, chosen, is_colocated, done)
    if spec is not None and spec.value is not None:
        _share_one_node(given, chosen, done)
    return _take_specs(given, trained, done)


def _take_strategies(given: Settings, trained: str, done: RenamedSettings) -> tuple[Settings, bool]:
    """Return the settings without strategies, and whether servers and trained model share GPUs."""
    found, is_colocated = dict(given), False
    for section in (trained, *_BESIDE, SERVERS, TEACHER):
        name = f"{section}.scheduling_strategy"
        mine = {one: item for one, item in given.items() if f"{one}.".startswith(f"{name}.")}
        if not mine:
            continue
        found = {one: item for one, item in found.items() if one not in mine}
        done.replaced |= mine
        kind, target = _parse_strategy(name, mine, given)
        wanted = ""
        if section in _BESIDE:
            wanted = (
                "" if kind == "colocation" and target in (trained, "actor") else "colocation, target actor"
            )
            why = "the trainer's ranks hold this model"
        elif kind != "separation" and {section, target} != {trained, SERVERS}:
            wanted, why = "separation", "only rollout can share the GPUs of the trained model"
        if wanted:
            item = next(iter(mine.values()))
            shown = f"{kind}{f' with {target}' if target else ''} can't be used: {why}"
            refusal = Refusal(option=name, origin=item.origin, kind=Kind.UNSUPPORTED, why=shown)
            done.refusals.append(dataclasses.replace(refusal, use=f"use type {wanted}"))
            continue
        is_colocated |= section not in _BESIDE and kind == "colocation"
        done.idle[f"{OPTION} places servers and trainer, whose ranks hold critic and ref"].append(name)
    return found, is_colocated


def _parse_strategy(name: str, mine: Settings, given: Settings) -> tuple[str, str]:
    """Return type and target of a strategy, a mapping or dotted names."""
    whole = follow_references(mine[name], given).value if name in mine else {}
    parts = dict(whole) if isinstance(whole, dict) else {}
    parts |= {one.removeprefix(f"{name}."): item for one, item in mine.items() if one != name}
    kind, target = (
        follow_references(parts[key], given).value if key in parts else "" for key in ("type", "target")
    )
    return str(kind or "separation"), str(target or "")


def _take_backends(
    given: Settings, trained: str, chosen: Set[str], is_colocated: bool, done: RenamedSettings
) -> Settings:
    """Return the settings with `allocation_mode` in place of AReaL's backends, such as `fsdp:d4`."""
    engine, servers, teacher = (f"{section}.backend" for section in (trained, SERVERS, TEACHER))
    names = (servers, engine, teacher, *(f"{section}.backend" for section in _BESIDE))
    items = {name: follow_references(given[name], given) for name in names if name in given}
    items = {name: item for name, item in items.items() if isinstance(item.value, str) and ":" in item.value}
    whole = given.get(OPTION)
    if not items:
        if is_colocated and OPTION not in chosen and "|" not in str(whole.value if whole else ""):
            why = f"puts servers and trainer on the same GPUs: set {OPTION} with '|', as sglang:d4|fsdp:d4"
            done.refusals.append(
                Refusal(
                    option=f"{SERVERS}.scheduling_strategy", kind=Kind.CONFLICT, why=why, related=(OPTION,)
                )
            )
        return given
    found = {name: item for name, item in given.items() if name not in items}
    done.replaced |= {name: given[name] for name in items}
    placed = {name: item for name, item in items.items() if name.partition(".")[0] not in _BESIDE}
    for name in items.keys() - placed.keys():
        if engine not in items or _normalize(items[name]) != _normalize(items[engine]):
            why = f"must equal {engine}, because the trainer's ranks hold this model"
            done.refusals.append(_refuse(name, items[name], Kind.CONFLICT, why, related=(engine,)))
    parsed = {name: _parse_backend(name, item, done) for name, item in placed.items()}
    mesh, deciding = parsed.get(engine), [name for name in (servers, engine) if name in items]
    if not deciding or (whole is not None and OPTION in chosen and chosen.isdisjoint(deciding)):
        # The servers of a teacher are not in this allocation, so its backend stays.
        found = {name: item for name, item in given.items() if name not in items or name == teacher}
        if deciding:
            done.idle[f"{OPTION} overrides the file"] += deciding
        if mesh is not None and mesh.train is not None and whole is not None and not whole.value:
            found[engine] = dataclasses.replace(items[engine], value=mesh.train.backend, text=None)
        return found
    if whole is not None and whole.value:
        why = f"can't be used with {', '.join(deciding)}, because each assigns the GPUs"
        done.refusals.append(_refuse(OPTION, whole, Kind.CONFLICT, why, "remove one", tuple(deciding)))
        return found
    needed = [engine] if trained == "model" else [servers, engine]
    if (purpose := given.get("purpose")) is not None and purpose.value not in (None, "train"):
        needed = [servers]
    if missing := [name for name in needed if name not in items]:
        why = f"is missing: {deciding[0]} and this option together make {OPTION}"
        done.refusals.append(Refusal(option=missing[0], kind=Kind.MISSING, why=why, related=tuple(deciding)))
    elif all(parsed.values()):
        pools = _make_pools(parsed[servers], parsed.get(teacher)) if servers in needed else ()
        train = mesh.train if mesh is not None else None
        allocation = Allocation(pools, train, colocate=is_colocated and train is not None)
        found[OPTION] = add_origin(str(allocation), items[deciding[-1]].origin)
        why = f"is {allocation}, from {', '.join(placed)}"
        done.notes.append(make_note(OPTION, why, related=tuple(placed)))
        _leave_gpus_idle(allocation, found, chosen, done)
    return found


def _leave_gpus_idle(
    allocation: Allocation, found: Settings, chosen: Set[str], done: RenamedSettings
) -> None:
    """Set `cluster.n_gpus_per_node` to the GPUs of the backends if they need only a part of one node.

    AReaL leaves the others idle; a plan must use all.
    """
    option, nodes = "cluster.n_gpus_per_node", found.get("cluster.n_nodes")
    per_node = found.get(option)
    units = [part.num_units for part in (*allocation.pools, allocation.train) if part is not None]
    if per_node is None or nodes is None or nodes.value != 1 or option in chosen or None in units:
        return
    needed = sum(units[:1] if allocation.colocate else units)  # type: ignore[arg-type]
    if isinstance(per_node.value, int) and 0 < needed < per_node.value:
        found[option] = add_origin(needed, per_node.origin)
        why = f"is {needed}, not {per_node.shown}, because {allocation} needs no more GPUs"
        done.notes.append(make_note(option, why, related=(OPTION,)))


def _share_one_node(found: Settings, chosen: Set[str], done: RenamedSettings) -> None:
    """Let servers and trainer take turns on a node whose GPUs suffice for only one of them.

    AReaL v0.5.3 and v1.0 give the GPUs of such a node to both at once.
    """
    whole, nodes, per_node = (found.get(name) for name in (OPTION, *_OF_NODES))
    if whole is None or nodes is None or per_node is None or not chosen.isdisjoint((OPTION, *_OF_NODES)):
        return
    try:
        allocation = parse(str(whole.value))
    except ConfigError:  # refused later
        return
    parts = (*allocation.pools, allocation.train)
    needed = {None if part is None else part.num_units for part in parts}
    is_full = nodes.value == 1 and len(parts) == 2 and needed == {per_node.value}
    if allocation.colocate or not is_full:
        return
    shared = dataclasses.replace(allocation, colocate=True)
    found[OPTION] = add_origin(str(shared), whole.origin)
    why = f"is {shared}: servers and trainer take turns on the GPUs, which AReaL gives to both at once"
    done.notes.append(make_note(OPTION, why, related=_OF_NODES, is_warning=True))
    ahead = found.get(_AHEAD)
    if ahead is None or _AHEAD in chosen or not isinstance(ahead.value, int):
        return
    if ahead.value > MAX_AHEAD_IN_TURNS:
        found[_AHEAD] = add_origin(MAX_AHEAD_IN_TURNS, ahead.origin)
        why = f"is {MAX_AHEAD_IN_TURNS}, not {ahead.shown}: servers do not generate while the trainer trains"
        done.notes.append(make_note(_AHEAD, why, related=(OPTION,)))


def _normalize(item: SourceValue) -> str:
    return str(item.value).replace(" ", "")


def _parse_backend(name: str, item: SourceValue, done: RenamedSettings) -> Allocation | None:
    """Return the servers, or the mesh, of a backend; None if it is refused."""
    text = str(item.value)
    is_archon = text.partition(":")[0].strip() == _ARCHON
    text = text.partition(":")[2] if is_archon else text
    try:
        found = _parse_mesh(text)
    except ConfigError as error:
        done.refusals += [dataclasses.replace(one, option=name, origin=item.origin) for one in error.refusals]
        return None
    wants_servers = name.startswith(SERVERS)
    if len(found.pools) == wants_servers and (found.train is None) is wants_servers:
        if is_archon:
            done.notes.append(make_note(name, f"is {found}: hpc-rl has no archon engine", origin=item.origin))
        return found
    use = "name servers only, as sglang:d4" if wants_servers else "name a train engine only, as fsdp:d4"
    done.refusals.append(_refuse(name, item, Kind.VALUE, "can't be used", use))
    return None


def _parse_mesh(text: str) -> Allocation:
    """Parse a backend. Experts without t have the attention's t, or 1 if only this fits."""
    try:
        return parse(text)
    except ConfigError:
        if not _EXPERTS_WITHOUT_T.search(text):
            raise
        return parse(_EXPERTS_WITHOUT_T.sub(r"\g<0>t1", text))


def _make_pools(servers: Allocation | None, teacher: Allocation | None) -> tuple[Servers, ...]:
    """Return the servers, and those for the teacher, which get as many units as its mesh has in AReaL."""
    own = servers.pools if servers else ()
    if not own or teacher is None or (mesh := teacher.train) is None:
        return own
    d = None if mesh.d is None else mesh.d * mesh.c
    return (*own, Servers(own[0].backend, d=d, t=mesh.t * mesh.p, pool=TEACHER))


def _take_specs(given: Settings, trained: str, done: RenamedSettings) -> Settings:
    """Return the settings with options of `launcher` in place of AReaL's scheduling_spec."""
    names = [f"{section}.scheduling_spec" for section in (trained, SERVERS, *_BESIDE, TEACHER)]
    items = {name: follow_references(given[name], given) for name in names if name in given}
    if not items:
        return given
    found = {name: item for name, item in given.items() if name not in items}
    done.replaced |= {name: given[name] for name in items}
    for section in (*_BESIDE, TEACHER):
        name, other = f"{section}.scheduling_spec", names[section == TEACHER]
        if name not in items or items[name].value is None:
            continue
        if other not in items or items[name].to_plain() != items[other].to_plain():
            why = f"must equal {other}, because hpc-rl has one set of options for the two"
            done.refusals.append(_refuse(name, items[name], Kind.CONFLICT, why, "remove it", (other,)))
    for name in names[:2]:
        if name in items:
            part = dataclasses.replace(done, refusals=[])  # with the notes of `done`
            _convert_spec(name, items[name], found, given, part)
            known = {refusal.origin for refusal in done.refusals}  # rollout often refers to the spec of actor
            done.refusals += [refusal for refusal in part.refusals if refusal.origin not in known]
    return found


def _convert_spec(
    name: str, item: SourceValue, found: Settings, given: Settings, done: RenamedSettings
) -> None:
    """Add the options of one `scheduling_spec` to `found`."""
    specs = item.value if isinstance(item.value, list) else [item]
    if not specs or item.value is None:
        return
    if len(specs) > 1 or not isinstance(specs[0].value, dict):
        why = "can't be used: all ranks, and all servers, have the same options"
        done.refusals.append(_refuse(name, item, Kind.VALUE, why, "give a list with one mapping"))
        return
    spec: dict[str, SourceValue] = {key: follow_references(one, given) for key, one in specs[0].value.items()}
    has_no_container = "container_type" in spec and spec["container_type"].value == "none"
    for key, one in spec.items():
        row, full = SPEC.get(key), f"{name}.{key}"
        if row is None:
            known = f"{name} has no such field; known here: {', '.join(SPEC)}"
            done.refusals.append(
                Refusal(option=full, origin=one.origin, kind=Kind.UNKNOWN, why=known, related=(name,))
            )
        elif one.value is None or one.value == {} or one.value == []:
            continue
        elif row.is_refused:
            done.refusals.append(_refuse(full, one, Kind.UNSUPPORTED, f"can't be used: {row.why}"))
        elif not row.trainer:
            done.idle[row.why].append(full)
        elif has_no_container and key in _OF_CONTAINERS:
            done.idle["container_type is none"].append(full)
        else:
            to = row.servers if name.startswith(SERVERS) else row.trainer
            _add_launcher(full, to, _convert_value(key, one), found, given, done)


def _add_launcher(
    name: str, to: str, item: SourceValue, found: Settings, given: Settings, done: RenamedSettings
) -> None:
    """Set one option of `launcher`, unless it is given."""
    if to in given:
        done.idle["the option of section launcher that replaces it is set"].append(name)
    elif to in found and found[to].to_plain() != item.to_plain():
        why = f"must have the trainer's value, {found[to].shown}, because {to} applies to all roles"
        done.refusals.append(_refuse(name, item, Kind.CONFLICT, why, related=(to,)))
    elif to not in found:
        found[to] = item
        done.notes.append(make_note(name, explain_name(to), origin=item.origin))


def _convert_value(key: str, item: SourceValue) -> SourceValue:
    """Return MB for GB, and texts for the values of variables."""
    value: Any = item.value
    if key == "mem" and isinstance(value, int) and not isinstance(value, bool):
        return add_origin(value * _GB, item.origin)
    if key == "env_vars" and isinstance(value, dict):
        texts = {
            variable: one.text if one.text is not None else str(one.value) for variable, one in value.items()
        }
        return add_origin(texts, item.origin)
    return item


def _refuse(
    name: str, item: SourceValue, kind: Kind, why: str, use: str = "", related: tuple[str, ...] = ()
) -> Refusal:
    value = UNSET if isinstance(item.value, list | dict) else item.shown
    return Refusal(option=name, origin=item.origin, value=value, kind=kind, why=why, use=use, related=related)
