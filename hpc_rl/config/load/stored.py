"""Convert a configuration to the plain data of `config.json` and back, and redact secrets."""

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hpc_rl.config.load.fields import find_nearest, find_section, is_mapping, list_hints
from hpc_rl.config.options.cluster import parse_environment
from hpc_rl.config.options.experiment import (
    CONFIGS,
    Config,
    DPOConfig,
    GRPOConfig,
    RWConfig,
    TeacherConfig,
    TrainerName,
)
from hpc_rl.core.errors import ConfigError
from hpc_rl.core.refusal import Kind, Refusal

REDACTED = "***"
_SECRET = re.compile(r"(^|_)(api_?key|token|secret|password)($|_)(?!env$)", re.IGNORECASE)
# Matches environment variables; not TOKENIZERS_PARALLELISM, nor counts such as MAX_NUM_BATCHED_TOKENS.
_SECRET_VARIABLE = re.compile(
    r"key|passw|passphrase|_pwd$|secret|credential|(^|_)(auth|pat)$|^(?!.*(max|min|num)_\w*tokens).*token(?!iz)",
    re.IGNORECASE,
)
VARIABLES = ("env", "trainer_env_vars", "inference_server_env_vars")  # options of the section launcher


@dataclass(frozen=True)
class Loaded:
    """A configuration, the origin of each explicit value (`file:line` or argument), notes for the user."""

    config: Config
    origins: dict[str, str]
    notes: list[Refusal] = field(default_factory=list)
    adapted: dict[str, str] = field(default_factory=dict)  # option -> why its default changed

    @property
    def explicit(self) -> frozenset[str]:
        return frozenset(self.origins)


def find_trainer(config: Config) -> TrainerName:
    """Return the trainer of a configuration."""
    if isinstance(config, GRPOConfig):
        return "teacher" if isinstance(config, TeacherConfig) else "grpo"
    if isinstance(config, DPOConfig):
        return "dpo"
    return "rw" if isinstance(config, RWConfig) else "sft"


def to_dict(config: Config) -> dict[str, Any]:
    """Return every option as JSON data; `trainer` names the class."""
    return dataclasses.asdict(config) | {"trainer": find_trainer(config)}


def from_dict(data: Mapping[str, Any]) -> Config:
    """Return the configuration that `to_dict` stored. Raises ConfigError for unknown and missing names."""
    named = data.get("trainer") or ("grpo" if data.get("actor") else "sft")
    if named not in CONFIGS:
        use = f"allowed: {', '.join(CONFIGS)}"
        raise _refuse_stored("trainer", Kind.VALUE, f"{named!r} is not a trainer of this version", use)
    config = construct(CONFIGS[named], data)
    return dataclasses.replace(config, trainer=find_trainer(config))


def construct(cls: type, data: Mapping[str, Any], prefix: str = "") -> Any:
    """Return a section from nested plain data. Raises ConfigError for unknown and missing names."""
    values: dict[str, Any] = {}
    for name, value in data.items():
        if name not in list_hints(cls):
            near = find_nearest(name, list_hints(cls))
            hint = f"did you mean {prefix}{near}? " if near else ""
            why = f"{hint}If another version of hpc-rl stored this, use that version, or submit a new trial"
            raise _refuse_stored(f"{prefix}{name}", Kind.UNKNOWN, why)
        section = find_section(list_hints(cls)[name])
        if section is not None and is_mapping(list_hints(cls)[name]):
            members = {key: part for key, part in (value or {}).items() if part is not None}
            value = {key: construct(section, part, f"{prefix}{name}.{key}.") for key, part in members.items()}
        elif section is not None and isinstance(value, Mapping):
            value = construct(section, value, f"{prefix}{name}.")
        values[name] = value
    try:
        return cls(**values)
    except TypeError as error:
        raise _refuse_stored(prefix.rstrip("."), Kind.MISSING, str(error)) from error


def _refuse_stored(option: str, kind: Kind, why: str, use: str = "") -> ConfigError:
    return ConfigError(Refusal(option=option, origin="config.json", kind=kind, why=why, use=use))


def redact(value: Any, name: str = "") -> Any:
    """Replace secrets by stars in the value of an option, or in a configuration as plain data."""
    option = name.rpartition(".")[2]
    if option in VARIABLES and isinstance(value, dict):
        return {key: REDACTED if item and is_secret_variable(key) else item for key, item in value.items()}
    if option in VARIABLES and isinstance(value, str):  # A=b,C=d
        pairs = [part.partition("=") for part in value.split(",")]
        starred = (REDACTED if text and is_secret_variable(key) else text for key, _, text in pairs)
        return ",".join(f"{key}{equals}{text}" for (key, equals, _), text in zip(pairs, starred, strict=True))
    if isinstance(value, dict):
        return {key: redact(item, key) for key, item in value.items()}
    return REDACTED if isinstance(value, str) and value and is_secret(name) else value


def is_secret(name: str) -> bool:
    """Return whether the name of an option tells that its value is a secret."""
    return _SECRET.search(name.rpartition(".")[2]) is not None


def is_secret_variable(name: str) -> bool:
    """Return whether the name of an environment variable tells that its value is a secret."""
    return _SECRET_VARIABLE.search(name) is not None


def list_open_variables(config: Config, name: str) -> dict[str, str]:
    """Return the variables of an option in VARIABLES, without secrets. Raises ConfigError."""
    found = parse_environment(f"launcher.{name}", getattr(config.launcher, name))
    return {key: value for key, value in found.items() if not is_secret_variable(key)}


def list_secret_variables(config: Config, name: str) -> dict[str, str]:
    """Return the secret variables of an option in VARIABLES. Raises ConfigError."""
    found = parse_environment(f"launcher.{name}", getattr(config.launcher, name))
    return {key: value for key, value in found.items() if value and is_secret_variable(key)}


def redact_secrets(config: Config) -> Config:
    """Replace secret variables by stars, for files that other users may read."""
    starred = {name: redact(getattr(config.launcher, name), name) for name in VARIABLES}
    return dataclasses.replace(config, launcher=dataclasses.replace(config.launcher, **starred))


def restore_secrets(config: Config, known: Mapping[str, Mapping[str, str]]) -> Config:
    """Replace stars by the known values of secret variables; `known` is option -> variable -> value."""
    filled: dict[str, Any] = {}
    for name in VARIABLES:
        given = parse_environment(f"launcher.{name}", getattr(config.launcher, name))
        if starred := {key for key, value in given.items() if value == REDACTED and is_secret_variable(key)}:
            values = known.get(name, {})
            filled[name] = given | {key: values[key] for key in starred & values.keys()}
    return dataclasses.replace(config, launcher=dataclasses.replace(config.launcher, **filled))
