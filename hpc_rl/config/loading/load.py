"""Loading a configuration: files, overrides, ATLAS names and references, to dataclasses.

Order: defaults, a preset below files, the cluster's profile, the files from left to right, a preset over
files, the overrides from left to right. Sections merge by key; lists and mappings of free keys are replaced.
Rules across sections are those of rules/check.py.
"""

import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpc_rl.config import presets as presets_of
from hpc_rl.config.loading import parser
from hpc_rl.config.loading.fields import (
    alternatives,
    default_of,
    extras_of,
    hints,
    is_optional,
    section_of,
)
from hpc_rl.config.loading.merging import MergedSettings, nearest
from hpc_rl.config.loading.profiles import SHIPPED_PROFILES, known_profiles, profile_dirs
from hpc_rl.config.loading.source import (
    SourceValue,
    is_reference,
    read_argument,
    read_overrides,
    read_yaml,
    with_origin,
)
from hpc_rl.config.loading.stored import Loaded, trainer_of
from hpc_rl.config.sections.experiment import CONFIGS
from hpc_rl.config.sections.limits import Place
from hpc_rl.config.tables import atlas
from hpc_rl.errors import ConfigError

ALIASES = {  # short names on the command line; {model} is actor or model
    "n_nodes": "cluster.n_nodes",
    "nodes": "cluster.n_nodes",
    "time": "launcher.slurm.time",
    "partition": "launcher.slurm.partition",
    "account": "launcher.slurm.account",
    "qos": "launcher.slurm.qos",
    "nodelist": "launcher.slurm.nodelist",
    "exclude": "launcher.slurm.exclude",
    "fileroot": "cluster.fileroot",
    "name": "trial_name",
    "model": "{model}.path",
    "data": "train_dataset.path",
    "lr": "{model}.optimizer.lr",
    "max_steps": "total_train_steps",
}
_GPUS = "GPUs are counted by node: cluster.n_gpus_per_node, and --n_nodes for the nodes."
_LORA = "LoRA is not built; leave it out."
ANSWERS = {  # names that other toolkits have -> what to do here
    "gpus": _GPUS,
    "n_gpus": _GPUS,
    "num_gpus": _GPUS,
    "gpus_per_node": _GPUS,
    "use_lora": _LORA,
    "lora_r": _LORA,
    "lora_rank": _LORA,
    "lora_alpha": _LORA,
    "peft": _LORA,
    "critic": "a critic is not built: GRPO needs none; leave it out.",
    "entropy_coeff": "an entropy bonus is not built; leave it out.",
    "output_dir": "a trial writes below cluster.fileroot.",
    "bf16": "use actor.dtype bfloat16.",
    "loss_type": "see actor.loss_aggregation and actor.eps_clip_higher.",
    "reward_funcs": "a trial has one reward function: rollout.reward_fn.",
}


def load(
    config_files: Sequence[str | Path],
    overrides: Sequence[str] = (),
    *,
    presets: Sequence[str] = (),
    profiles: Sequence[Path] | None = None,
    cluster: str | None = None,
) -> Loaded:
    """Return the configuration of files and overrides (`a.b=c`, `--a.b=c`, `--a.b c`). Raises ConfigError.

    Relative paths are made absolute. `cluster` names a profile that must exist; `profiles` are the
    directories searched, by default those of the site and the shipped ones.
    """
    files = [read_yaml(Path(file)) for file in config_files]
    profiles = profile_dirs() if profiles is None else profiles
    if cluster is not None:
        _require_profile(cluster, list(profiles))
        overrides = [f"cluster.cluster_name={cluster}", *overrides]
    typed = read_overrides(list(overrides))
    model = _model_section(files, typed)
    aliases = {short: full.replace("{model}", model) for short, full in ALIASES.items()}
    arguments = [
        SourceValue({aliases.get(name, name): item}, item.origin, is_argument=True) for name, item in typed
    ]
    profile, notes = _profile([*files, *arguments], profiles)
    sources = [*profile, *files, *arguments]
    trainer = pick_trainer(sources, atlas_names="atlas" in presets)
    others = {name: cls for name, cls in CONFIGS.items() if name != trainer}
    merged = MergedSettings(CONFIGS[trainer], others, aliases, atlas.ALIASES, ANSWERS)
    translated = atlas.translate(sources, "actor" if "actor" in merged.known else "model", merged.known)
    merged.refusals += translated.refusals
    below, over = _presets(presets, merged, translated.sources)
    num_files = len(profile) + len(files)
    for source in [*below, *translated.sources[:num_files], *over, *translated.sources[num_files:]]:
        merged.overlay(source)
    if not merged.refusals:
        _interpolate(merged)
    config = parser.parse(merged)
    config = dataclasses.replace(config, trainer=trainer_of(config))
    return Loaded(_absolute(config), _origins(merged), [*notes, *translated.notes])


def _model_section(files: Sequence[SourceValue], typed: Sequence[tuple[str, SourceValue]]) -> str:
    """Return the section that short names of the model mean."""
    values = {name: item.value for file in files for name, item in file.value.items()}
    values |= {name: item.value for name, item in typed if name not in ALIASES}
    has_model = any(name.partition(".")[0] == "model" for name in values)
    return "model" if has_model or values.get("trainer") in ("sft", "rw") else "actor"


def _presets(
    names: Sequence[str], merged: MergedSettings, sources: Sequence[SourceValue]
) -> tuple[list[SourceValue], list[SourceValue]]:
    """Return the presets below the files, and those over them. Raises ConfigError."""
    present = {
        key.partition(".")[0]
        for source in sources
        for key, item in source.value.items()
        if item.value is not None
    }
    fitted = [(name, presets_of.fit(presets_of.read_preset(name), merged.known, present)) for name in names]
    return (
        [source for name, source in fitted if name in presets_of.BELOW],
        [source for name, source in fitted if name in presets_of.OVER],
    )


def _require_profile(name: str, folders: list[Path]) -> None:
    known = known_profiles(folders)
    if name not in known:
        places = ", ".join(str(folder) for folder in folders if folder.is_dir()) or "no directory that exists"
        raise ConfigError(
            f"--cluster {name}: there is no such profile; known: {', '.join(sorted(known)) or 'none'} "
            f"(in {places})."
        )


def _profile(sources: Sequence[SourceValue], profiles: Sequence[Path]) -> tuple[list[SourceValue], list[str]]:
    """Return the profile that `cluster.cluster_name` names, with a note. Raises ConfigError if unreadable."""
    found = [item for source in sources if (item := atlas.find(source, "cluster.cluster_name")) is not None]
    name = found[-1].plain() if found else None
    if isinstance(name, str) and is_reference(name):
        raise ConfigError(
            f"cluster.cluster_name ({found[-1].origin}): {name} can't be used: its profile is read "
            "before references are resolved; write the name, or give --cluster NAME."
        )
    if not isinstance(name, str) or name == "local" or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        return [], []
    for folder in profiles:
        path = folder.expanduser() / f"{name}.yaml"
        if path.is_file():
            return [read_yaml(path)], [
                f"cluster.cluster_name {name}: {path} is loaded before every other file."
            ]
    places = " nor ".join(str(folder) for folder in profiles if folder not in SHIPPED_PROFILES)
    return [], [f"cluster.cluster_name {name} is only a name: there is no profile {name}.yaml in {places}."]


def _origins(merged: MergedSettings) -> dict[str, str]:
    """Return the origins of the options and null sections that were written."""
    found: dict[str, str] = {}
    for name, item in merged.settings.items():
        if item.value is None or not section_of(merged.known[name]):
            found[name] = item.origin
        elif not item.value and is_optional(merged.known[name]):
            inside = [
                key
                for key in merged.known
                if key.startswith(f"{name}.") and not section_of(merged.known[key])
            ]
            # A section that is there but empty was chosen with all its defaults.
            if not any(key in merged.settings for key in inside):
                found |= dict.fromkeys(inside, item.origin)
    return found


def pick_trainer(sources: Sequence[SourceValue], atlas_names: bool = False) -> str:
    """Return the trainer: the key `trainer`, else by the section given, else grpo for ATLAS names.

    `atlas_names`: the preset atlas was asked for. Raises ConfigError.
    """
    top = {name: item for source in sources for name, item in source.value.items()}
    named = top.get("trainer")
    if named is not None and named.value is not None:
        if not isinstance(named.value, str) or named.value not in CONFIGS:
            raise ConfigError(
                f"trainer ({named.origin}): {named.plain()!r} can't be used; allowed: {', '.join(CONFIGS)}."
            )
        return named.value
    sections = {"actor": "grpo", "model": "sft"}
    given_sections = {name.partition(".")[0] for name, item in top.items() if item.value is not None}
    found = [section for section in sections if section in given_sections]
    if len(found) == 1:
        return "rw" if found == ["model"] and _has_pairs(sources) else sections[found[0]]
    if found:
        where = " and ".join(item.origin for name, item in top.items() if name.partition(".")[0] in sections)
        raise ConfigError(
            f"both actor and model are given ({where}): a grpo trial has a section actor, "
            "an sft trial a section model."
        )
    if atlas_names or any(
        alias.to.startswith(("actor.", "gconfig.")) for name, alias in atlas.ALIASES.items() if name in top
    ):
        return "grpo"
    files = (source.origin for source in sources if not source.origin.startswith("command line"))
    where = ", ".join(dict.fromkeys(origin.rpartition(":")[0] or origin for origin in files))
    raise ConfigError(
        f"neither actor nor model is given{f' in {where}' if where else ''}: "
        "a grpo trial has a section actor, an sft trial a section model; or say it: trainer: grpo, sft or rw."
        + ("" if where else " Give a configuration with --config FILE.")
        + "".join(f" {name} ({top[name].origin}) is null." for name in sections if name in top)
        + "".join(f"\n{line}" for line in _unknown_at_top(top))
    )


def _unknown_at_top(top: Mapping[str, SourceValue]) -> list[str]:
    """Return a refusal for each name that no trainer has."""
    known = {name for cls in CONFIGS.values() for name in hints(cls)} | set(atlas.ALIASES)
    lines = []
    for name, item in top.items():
        if name.partition(".")[0] not in known:
            near = nearest(name, known)
            lines.append(f"unknown key {name} ({item.origin}){f': did you mean {near}?' if near else '.'}")
    return lines


def _has_pairs(sources: Sequence[SourceValue]) -> bool:
    """Return whether a dataset has type rw, as in AReaL's reward-model files."""
    for name in ("train_dataset.type", "valid_dataset.type"):  # the one may refer to the other
        kinds = [item.value for source in sources if (item := atlas.find(source, name)) is not None]
        if kinds and kinds[-1] == "rw":
            return True
    return False


_LITERAL = "; where no reference is meant, write \\${ for ${"


def _interpolate(merged: MergedSettings) -> None:
    """Resolve `${a.b}` against everything that is set, defaults included. Raises ConfigError."""
    _resolve(merged, "${oc.env:")  # first: what refers to such an option takes its type
    _resolve(merged, "${")


def _resolve(merged: MergedSettings, mark: str) -> None:
    wanted = {name: item for name, item in merged.settings.items() if mark in repr(item.plain())}
    if not wanted:
        return
    import omegaconf  # 0.1 s, and few configurations have references

    tree = _defaults(merged.root)
    for name, item in sorted(merged.settings.items()):
        plain = item.plain()
        is_option = section_of(merged.known[name]) is None and "${" not in repr(plain)
        value = parser.as_written(merged.known[name], item) if is_option else plain
        parser.put(tree, name.split("."), value)
    try:
        whole = omegaconf.OmegaConf.create(tree)
    except omegaconf.errors.GrammarParseError as error:
        broken = str(error.full_key).partition("[")[0]
        where = f" ({merged.settings[broken].origin})" if broken in merged.settings else ""
        raise ConfigError(
            f"{error.full_key}{where}: the ${{…}} in it can't be read; "
            f"a reference is ${{section.option}}{_LITERAL}."
        ) from error
    for name, item in wanted.items():
        try:
            value = omegaconf.OmegaConf.select(whole, name)
            value = (
                omegaconf.OmegaConf.to_container(value, resolve=True)
                if omegaconf.OmegaConf.is_config(value)
                else value
            )
        except (omegaconf.errors.OmegaConfBaseException, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(
                f"{name} ({item.origin}): {item.plain()!r} can't be resolved: {reason}{_LITERAL}."
            ) from error
        if isinstance(value, str) and "${oc.env:" in str(item.value):  # the environment has text only
            merged.settings[name] = read_argument(value, item.origin)
        else:
            merged.settings[name] = with_origin(value, item.origin)
    for name, item in wanted.items():
        if merged.follows_a_default(name, item):
            del merged.settings[name]


def _defaults(cls: type) -> dict[str, Any]:
    """Return every default as plain data; required options are left out."""
    found: dict[str, Any] = {}
    for item in dataclasses.fields(cls):
        section = section_of(hints(cls)[item.name])
        if section and item.default is not None:
            found[item.name] = _defaults(section)
        elif (default := default_of(item)) is not dataclasses.MISSING:
            found[item.name] = default
    return found


def _absolute(section: Any) -> Any:
    """Return the section with absolute paths."""
    changes: dict[str, Any] = {}
    cls: type = type(section)
    for name, hint in hints(cls).items():
        value = getattr(section, name)
        if dataclasses.is_dataclass(value):
            changes[name] = _absolute(value)
        elif isinstance(value, str) and value:
            place = next(
                (
                    extra
                    for kind in alternatives(hint)
                    for extra in extras_of(kind)
                    if isinstance(extra, Place)
                ),
                None,
            )
            if place and place.is_path(value):
                changes[name] = os.path.abspath(os.path.expanduser(value))
    return dataclasses.replace(section, **changes)
