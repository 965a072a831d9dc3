"""Load a configuration: convert files, overrides, ATLAS names and references to dataclasses.

Later sources win, in this order: defaults, a preset below files, the cluster's profile, the files from left
to right, a preset over files, the overrides from left to right. Sections and mappings of sections merge by
key; lists and other mappings are replaced.
rules/check.py has the rules across sections.
"""

import contextlib
import dataclasses
import functools
import itertools
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from hpc_rl.config import presets as presets_of
from hpc_rl.config.compat import areal_files, atlas
from hpc_rl.config.compat.areal_names import AT_TOP, NAMES
from hpc_rl.config.load import parser
from hpc_rl.config.load.fields import (
    find_members,
    find_nearest,
    find_section,
    list_defaults,
    list_hints,
    list_limits,
    list_options,
)
from hpc_rl.config.load.names import ALIASES, Hint, find_refused_names, refuse_unknown
from hpc_rl.config.load.profiles import SHIPPED_PROFILES, find_profiles, list_profile_dirs
from hpc_rl.config.load.source import (
    MAX_EXPANSIONS,
    WHOLE_REFERENCE,
    Settings,
    SourceValue,
    add_origin,
    escape_references,
    expand_references,
    flatten_settings,
    is_reference,
    load_yaml,
    merge,
    parse_argument,
    parse_overrides,
    remove_setting,
)
from hpc_rl.config.load.stored import Loaded, find_trainer
from hpc_rl.config.options.experiment import CONFIGS
from hpc_rl.config.options.limits import Place
from hpc_rl.core.errors import ConfigError
from hpc_rl.core.refusal import Kind, Refusal, make_note


def load(
    config_files: Sequence[str | Path],
    overrides: Sequence[str] = (),
    *,
    presets: Sequence[str] = (),
    profiles: Sequence[Path] | None = None,
    cluster: str | None = None,
    environ: Mapping[str, str] | None = None,
) -> Loaded:
    """Return the configuration of files and overrides (`a.b=c`, `--a.b=c`, `--a.b c`). Raises ConfigError.

    `~a.b` deletes the values of files, presets and earlier overrides for an option or a section.
    Relative paths become absolute. `cluster` names a profile that must exist. `profiles` are the directories
    to search for it, by default the site's and the shipped ones. `environ` may contain SBATCH_DEFAULTS.
    """
    defaults_of_site = _load_site_defaults(environ or {})
    files = [load_yaml(Path(file)) for file in config_files]
    profiles = list_profile_dirs() if profiles is None else profiles
    if cluster is not None:
        overrides = [f"cluster.cluster_name={cluster}", *overrides]
    typed = parse_overrides(list(overrides))
    files, typed, notes_on_model = areal_files.rename_supervised_model(files, typed)
    model = _find_model_section(files, typed)
    aliases = {short: full.replace("{model}", model) for short, full in ALIASES.items()}
    deletions = _Deletions()
    arguments: list[Settings] = []
    for short, item in typed:
        name = aliases.get(short, short)
        if item.is_deletion:
            files, arguments = deletions.add(name, item, files, arguments)
        else:
            arguments.append(flatten_settings(SourceValue({name: item}, "")))
    profile, notes = _load_profile(merge([*files, *arguments]), profiles, required=cluster is not None)
    profile = deletions.apply(profile)
    trainer = pick_trainer(merge([*profile, *files, *arguments]), config_files, presets)
    cls = CONFIGS[trainer]
    below, over = presets_of.load_presets(presets, list_options(cls), [*profile, *files, *arguments])
    below, over = deletions.apply(below), deletions.apply(over)
    given = merge([*below, *profile, *files, *arguments])
    present = {name.partition(".")[0] for name, item in given.items() if item.value is not None}
    translated = atlas.translate([*profile, *files, *arguments], list_options(cls), present)
    num_files = len(profile) + len(files)
    settings = merge(
        [defaults_of_site, *below, *translated.sources[:num_files], *over, *translated.sources[num_files:]]
    )
    chosen = merge([*over, *translated.sources[num_files:]])
    of_areal = areal_files.translate(cls, expand_references(settings), chosen)
    settings = of_areal.settings
    refusals = [
        *deletions.list_refusals(),
        *translated.refusals,
        *of_areal.refusals,
        *find_refused_names(cls, settings, aliases),
    ]
    known = list_options(cls, members=find_members(cls, settings))
    settings = {name: item for name, item in settings.items() if name in known}
    try:
        # The environment comes first, because a reference to such an option takes its type.
        resolved = _resolve(cls, settings, "${oc.env:", of_areal.replaced)
        _resolve(cls, settings, "${", of_areal.replaced, resolved)
    except ConfigError as error:
        if not refusals:  # else it may refer to a refused option
            refusals += error.refusals
    of_areal.notes += areal_files.drop_idle_values(cls, settings)
    config, refusals = parser.parse(cls, settings, refusals)
    config = dataclasses.replace(config, trainer=find_trainer(config))
    notes += [
        make_note(name, f"is {item.value}, set by {item.origin}")
        for name, item in settings.items()
        if item is defaults_of_site.get(name)
    ]
    notes += [*notes_on_model, *translated.notes, *of_areal.notes]
    found = Loaded(_make_absolute(config), _list_origins(cls, settings), notes)
    if refusals:
        unresolved = {name for name, item in settings.items() if "${" in repr(item.to_plain())}
        raise UnusableOptions(refusals, found, unresolved)
    return found


class UnusableOptions(ConfigError):
    """Refused options; `rest` is the configuration without them."""

    def __init__(self, refusals: Sequence[Refusal], rest: Loaded, unresolved: Set[str]) -> None:
        super().__init__(*refusals)
        self.rest = rest
        self._unknown = unresolved | {name for refusal in refusals for name in refusal.options}

    def is_unknown(self, name: str) -> bool:
        """Return whether `rest` may have another value than the user meant for an option."""
        above = itertools.accumulate(name.split("."), "{}.{}".format)
        return any(one in self._unknown for one in above)


# Variables that sbatch reads, and sites set in login profiles -> the option that gets this default.
SBATCH_DEFAULTS = {
    "SBATCH_ACCOUNT": "launcher.slurm.account",
    "SBATCH_PARTITION": "launcher.slurm.partition",
    "SBATCH_QOS": "launcher.slurm.qos",
    "SBATCH_RESERVATION": "launcher.slurm.reservation",
    "SBATCH_TIMELIMIT": "launcher.slurm.time",
}


class _Deletions:
    """The deletions of the command line (`~a.b`): each removes the values of files and earlier arguments."""

    def __init__(self) -> None:
        self._items: dict[str, SourceValue] = {}
        self._deleted: dict[str, list[Any]] = {}  # the deleted values

    def add(
        self, name: str, item: SourceValue, files: list[Settings], arguments: list[Settings]
    ) -> tuple[list[Settings], list[Settings]]:
        """Return files and earlier arguments without an option."""
        self._items[name] = item
        self._deleted[name] = []
        return self._remove(name, files), self._remove(name, arguments)

    def apply(self, sources: list[Settings]) -> list[Settings]:
        """Apply the deletions to sources that come before the command line."""
        for name in self._items:
            sources = self._remove(name, sources)
        return sources

    def _remove(self, name: str, sources: list[Settings]) -> list[Settings]:
        kept = [remove_setting(source, name) for source in sources]
        for before, after in zip(sources, kept, strict=True):
            if before != after:
                item = before.get(name)
                self._deleted[name].append(None if item is None else item.to_plain())
        return kept

    def list_refusals(self) -> Iterator[Refusal]:
        """Yield a refusal for each deletion that finds no such value, as Hydra does."""
        for name, item in self._items.items():
            values, wanted = self._deleted[name], item.to_plain()
            if not values:
                why = f"~{name}: nothing sets {name}, so there is nothing to delete"
                use = "remove this argument, or correct the name"
            elif item.text is not None and wanted not in values:
                why = f"~{name}={wanted} deletes nothing, because {name} is {values[0]}"
                use = f"write ~{name} to delete any value"
            else:
                continue
            yield Refusal(option="", kind=Kind.VALUE, why=why, use=use, related=(name,))


def _load_site_defaults(environ: Mapping[str, str]) -> Settings:
    given = {name: environ[variable] for variable, name in SBATCH_DEFAULTS.items() if environ.get(variable)}
    variables = {name: variable for variable, name in SBATCH_DEFAULTS.items()}
    return {name: SourceValue(value, f"environment {variables[name]}") for name, value in given.items()}


OF_MODELS = ("sft", "rw", "dpo")  # trainers with a section `model`


def _find_model_section(files: Sequence[Settings], typed: Sequence[tuple[str, SourceValue]]) -> str:
    """Return the section, `actor` or `model`, that the short names of the model mean."""
    values = {name: item.value for file in files for name, item in file.items()}
    values |= {name: item.value for name, item in typed if name not in ALIASES and not item.is_deletion}
    has_model = any(name.partition(".")[0] == "model" for name in values)
    return "model" if has_model or values.get("trainer") in OF_MODELS else "actor"


def _load_profile(
    settings: Settings, folders: Sequence[Path], required: bool
) -> tuple[list[Settings], list[Refusal]]:
    """Return the profile that `cluster.cluster_name` names, with a note. Raises ConfigError."""
    option = "cluster.cluster_name"
    item = settings.get(option)
    name = item.value if item else None
    if item and isinstance(name, str) and is_reference(name):
        why = "can't be a reference, because the profile of this name is read before references are resolved"
        use = "write the name itself, or give --cluster NAME"
        raise ConfigError(
            Refusal(option=option, origin=item.origin, value=name, kind=Kind.VALUE, why=why, use=use)
        )
    known = find_profiles([folder.expanduser() for folder in folders])
    if isinstance(name, str) and name in known and name != "local":
        why = f": the profile {known[name]} is loaded first, and other files override it"
        return [load_yaml(known[name])], [make_note(option, why, Kind.FILE, value=name)]
    if required:
        places = ", ".join(str(folder) for folder in folders if folder.is_dir()) or "no directory that exists"
        names = ", ".join(sorted(known)) or "none"
        why = f"--cluster {name}: there is no such profile; the profiles in {places} are: {names}"
        raise ConfigError(Refusal(option="", kind=Kind.FILE, why=why, related=(option,)))
    if not isinstance(name, str) or name == "local":
        return [], []
    places = " nor ".join(str(folder) for folder in folders if folder not in SHIPPED_PROFILES)
    why = f"is only a label, because {places} has no profile {name}.yaml to load"
    return [], [make_note(option, why, Kind.FILE, value=name)]


def _list_origins(cls: type, settings: Settings) -> dict[str, str]:
    """Return the origins of all options and null sections that were set."""
    found: dict[str, str] = {}
    members = find_members(cls, settings)
    known, of = list_options(cls, members=members), list_defaults(cls, members=members)
    for name, item in settings.items():
        if item.value is None and name in members:
            continue  # it was removed
        if item.value is None or not find_section(known[name]):
            found[name] = item.origin
        elif of.get(name, ...) is None:
            inside = [other for other in of if other.startswith(f"{name}.")]
            # An empty optional section counts as chosen with all its defaults.
            if not settings.keys() & set(inside):
                found |= dict.fromkeys(inside, item.origin)
    return found


_OF_GRPO = ("actor.", "gconfig.")  # an ATLAS name for these options means trainer grpo


def pick_trainer(settings: Settings, files: Iterable[str | Path], presets: Collection[str] = ()) -> str:
    """Return the trainer by the key `trainer`, else by the sections, else by ATLAS names and presets.

    Raises ConfigError if nothing tells the trainer.
    """
    named = settings.get("trainer")
    if named is not None and named.value is not None:
        if not isinstance(named.value, str) or named.value not in CONFIGS:
            raise ConfigError(
                Refusal(
                    option="trainer",
                    origin=named.origin,
                    value=repr(named.to_plain()),
                    kind=Kind.VALUE,
                    why="can't be used",
                    use=f"allowed: {', '.join(CONFIGS)}",
                )
            )
        return named.value
    origins: dict[str, str] = {}
    for name, item in settings.items():
        if item.value is not None:
            origins.setdefault(name.partition(".")[0], item.origin)
    if {"actor", "model"} <= origins.keys():
        why = f"both actor and model are given ({origins['actor']} and {origins['model']})"
        use = "a grpo trial has a section actor, an sft trial a section model"
        raise ConfigError(
            Refusal(option="", kind=Kind.CONFLICT, why=why, use=use, related=("actor", "model"))
        )
    if "model" in origins:
        # as in AReaL's files; one of the two may refer to the other
        kinds = (settings.get(f"{section}.type") for section in ("train_dataset", "valid_dataset"))
        types = {str(kind.value) for kind in kinds if kind}
        return next((trainer for trainer in ("rw", "dpo") if trainer in types), "sft")
    stands_for = [alias.to for name, alias in atlas.ALIASES.items() if name in origins]
    probes = settings.get("max_probe_tokens")
    if probes and probes.value == atlas.PROBE_TOKENS and "pools" not in origins:
        stands_for.remove("teacher.max_probe_tokens")  # ATLAS's default chooses nothing
    if (
        ("teacher" in origins and not areal_files.is_teacher_of_areal(settings))
        or "atlas-teacher" in presets
        or any(to.startswith("teacher.") for to in stands_for)
    ):
        return "teacher"
    if "actor" in origins or "atlas" in presets or any(to.startswith(_OF_GRPO) for to in stands_for):
        return "grpo"
    where = ", ".join(dict.fromkeys(str(file) for file in files))
    nulls = (name for name in ("actor", "model") if name in settings)
    given = "".join(f"; {name} ({settings[name].origin}) is null" for name in nulls)
    why = f"neither actor nor model is given{f' in {where}' if where else ''}{given}"
    use = "a grpo trial has a section actor, an sft trial a section model; or set trainer to one of "
    use += ", ".join(CONFIGS)
    use += "" if where else ". Give a configuration with --config FILE"
    if "rollout" in origins:
        use += ". Servers alone have a model on the command line: `hpc-rl generate MODEL --config FILE`"
    related = ("trainer", "actor", "model")
    no_trainer = Refusal(option="", kind=Kind.MISSING, why=why, use=use, related=related)
    raise ConfigError(*_list_unknown_names(settings), *_refuse_service(settings), no_trainer)


def _refuse_service(settings: Settings) -> Iterator[Refusal]:
    """Yield a refusal of AReaL's service for rollouts, which needs no trainer."""
    name = "rollout._version"
    item, known = settings.get(name), NAMES[name]
    if item is not None and item.value not in (None, *known.idle):
        value, why = repr(item.to_plain()), f": {known.why}"
        yield Refusal(option=name, origin=item.origin, value=value, kind=Kind.UNSUPPORTED, why=why)


def _list_unknown_names(settings: Settings) -> Iterator[Refusal]:
    """Yield a refusal for each name that no trainer knows."""
    known = {name for cls in CONFIGS.values() for name in list_hints(cls)} | {*atlas.ALIASES, *AT_TOP}
    for name, item in settings.items():
        if name.partition(".")[0] not in known:
            near = find_nearest(name, known)
            yield refuse_unknown(
                name, item.origin, Hint(f"did you mean {near}?" if near else "no trainer has it")
            )


_LITERAL = "where no reference is meant, write \\${ for ${"


def _resolve(
    cls: type, settings: Settings, mark: str, replaced: Settings, resolved: Collection[str] = ()
) -> Collection[str]:
    """Resolve `${a.b}` against all settings, defaults and `replaced` names. Raises ConfigError.

    Returns the names of the settings that had references. Each `${` in a `resolved` setting is text.
    """
    wanted = {
        name: item
        for name, item in settings.items()
        if mark in repr(item.to_plain()) and name not in resolved
    }
    if not wanted:
        return ()
    tree: dict[str, Any] = {}
    members = find_members(cls, settings)
    known, of = list_options(cls, members=members), list_defaults(cls, members=members)
    for name, default in of.items():
        parser.insert_value(tree, name.split("."), default)
    for name, item in replaced.items():
        parser.insert_value(tree, name.split("."), item.to_plain())
    for name, item in settings.items():
        value = item.to_plain()
        if "${" in repr(value):
            value = escape_references(value) if name in resolved else value
        elif find_section(known[name]) is None:
            with contextlib.suppress(ValueError):  # the parser refuses it later
                value = parser.convert_value(known[name], item)
        parser.insert_value(tree, name.split("."), value)
    for name, value in _follow_references(tree, wanted, replaced) or _interpolate(tree, settings, wanted):
        item = wanted[name]
        reference = WHOLE_REFERENCE.fullmatch(item.value) if isinstance(item.value, str) else None
        follows_a_default = reference and reference[1] not in settings and reference[1] in of
        if follows_a_default and value == of.get(name, ...):
            del settings[name]  # both are defaults, and may still adapt together
        elif isinstance(value, str) and "${oc.env:" in str(item.value) and is_reference(str(item.value)):
            # variables are text
            settings[name] = parse_argument(value, item.origin)
        else:
            settings[name] = add_origin(value, item.origin)
    return wanted.keys()


def _follow_references(tree: dict[str, Any], wanted: Settings, replaced: Settings) -> list[tuple[str, Any]]:
    """Return name and value of each setting if each is `${a.b}` with a plain value in the tree; else empty.

    Also empty if a replaced name has a reference of another form, which may not be readable.
    """
    if not all(map(_has_plain_references, replaced.values())):
        return []
    values: list[tuple[str, Any]] = []
    for name, item in wanted.items():
        value = item.value
        for _ in range(MAX_EXPANSIONS):
            match = WHOLE_REFERENCE.fullmatch(value) if isinstance(value, str) else None
            if match is None:
                break
            value = functools.reduce(_get_inner, match[1].split("."), tree)
        if not isinstance(value, str | int | float | None) or value == "???" or "${" in str(value):
            return []
        values.append((name, value))
    return values


def _has_plain_references(item: SourceValue) -> bool:
    """Return whether each `${` in a value, or in the values inside, begins a text of the form `${a.b}`."""
    if isinstance(item.value, dict | list):
        parts = item.value.values() if isinstance(item.value, dict) else item.value
        return all(map(_has_plain_references, parts))
    text = str(item.value)
    return "${" not in text or WHOLE_REFERENCE.fullmatch(text) is not None


def _get_inner(tree: Any, key: str) -> Any:
    """Return the value of a key; without one, an object that is not a plain value."""
    return tree.get(key, _ABSENT) if isinstance(tree, dict) else _ABSENT


_ABSENT = object()


def _interpolate(tree: dict[str, Any], settings: Settings, wanted: Settings) -> Iterator[tuple[str, Any]]:
    """Yield name and value of each setting by OmegaConf, which knows all references. Raises ConfigError."""
    import omegaconf  # takes 0.1 s, and few configurations need it

    try:
        whole = omegaconf.OmegaConf.create(tree)
    except omegaconf.errors.GrammarParseError as error:
        broken = settings.get(str(error.full_key).partition("[")[0])
        raise ConfigError(
            Refusal(
                option=str(error.full_key),
                origin=broken.origin if broken else "",
                kind=Kind.VALUE,
                why="the ${…} in it can't be read" if broken else ": the ${…} in it can't be read",
                use=f"write a reference as ${{section.option}}; {_LITERAL}",
            )
        ) from error
    for name, item in wanted.items():
        try:
            value = omegaconf.OmegaConf.select(whole, name)
            if omegaconf.OmegaConf.is_config(value):
                value = omegaconf.OmegaConf.to_container(value, resolve=True)
        except (omegaconf.errors.OmegaConfBaseException, ValueError) as error:
            raise ConfigError(
                Refusal(
                    option=name,
                    origin=item.origin,
                    value=repr(item.to_plain()),
                    kind=Kind.VALUE,
                    why=f"can't be resolved: {str(error).splitlines()[0]}",
                    use=f"{_LITERAL}{_suggest_environment(item)}",
                )
            ) from error
        yield name, value


def _suggest_environment(item: SourceValue) -> str:
    """Return the correct form for a shell variable in a text; empty if it has none."""
    names = re.findall(r"\$\{([A-Z_][A-Z0-9_]*)\}", str(item.to_plain()))
    return f"; for an environment variable, write ${{oc.env:{names[0]}}}" if names else ""


def _make_absolute(section: Any) -> Any:
    """Return a section with absolute paths."""
    changes: dict[str, Any] = {}
    cls: type = type(section)
    for name, places in _list_places(cls).items():
        value = getattr(section, name)
        if dataclasses.is_dataclass(value):
            changes[name] = _make_absolute(value)
        elif isinstance(value, dict):
            changes[name] = {key: _make_absolute(member) for key, member in value.items()}
        elif value and any(place.is_path(value) for place in places):
            changes[name] = os.path.abspath(os.path.expanduser(value))
    return dataclasses.replace(section, **changes) if changes else section


@functools.cache
def _list_places(cls: type) -> dict[str, list[Place]]:
    """Return field -> its Place limits, for each path, section and mapping of sections."""
    found = {
        name: [one for one in list_limits(hint) if isinstance(one, Place)]
        for name, hint in list_hints(cls).items()
    }
    return {name: places for name, places in found.items() if places or find_section(list_hints(cls)[name])}
