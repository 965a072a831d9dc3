"""Load and check a configuration. Options have the names of the command line, and Python values."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_rl.api.display import make_table
from hpc_rl.config.load.stored import Loaded, redact, to_dict
from hpc_rl.config.options.experiment import ABSENT, Config, get_value
from hpc_rl.core.errors import ConfigError
from hpc_rl.core.refusal import Kind, Refusal
from hpc_rl.trials import prepare
from hpc_rl.trials.checklist import Verdict
from hpc_rl.trials.prepare import ConfigSources

PathLike = str | os.PathLike[str]


@dataclass(frozen=True)
class Configuration:
    """A loaded configuration, and where it came from. `load` makes it."""

    sources: ConfigSources
    loaded: Loaded

    @property
    def config(self) -> Config:
        """Every option, as nested dataclasses."""
        return self.loaded.config

    @property
    def notes(self) -> list[str]:
        """Sentences about options that were adapted or that have no effect."""
        return [str(note) for note in self.loaded.notes]

    @property
    def origins(self) -> dict[str, str]:
        """Where each explicit option came from, by its name: `file:line`, or an argument."""
        return dict(self.loaded.origins)

    def __getitem__(self, option: str) -> Any:
        """Return the value of an option, as `config["actor.optimizer.lr"]`. Raises KeyError."""
        value = get_value(self.loaded.config, option)
        if value is ABSENT:
            raise KeyError(option)
        return value

    def with_options(self, **options: Any) -> "Configuration":
        """Return the configuration with other options; values as for `load`. Raises ConfigError."""
        overrides = [*self.sources.overrides, *format_options(options)]
        return _load(self.sources.files, overrides, self.sources.presets, self.sources.cluster)

    def to_dict(self) -> dict[str, Any]:
        """Return every option as plain data, with secrets as stars."""
        plain: dict[str, Any] = redact(to_dict(self.loaded.config))
        return plain

    def _repr_html_(self) -> str:
        rows = [
            (name, redact(get_value(self.loaded.config, name), name), origin)
            for name, origin in sorted(self.loaded.origins.items())
        ]
        return make_table(("option", "value", "from"), rows)


@dataclass(frozen=True)
class CheckReport:
    """What the checks of `hpc-rl check` found."""

    verdict: Verdict

    @property
    def ok(self) -> bool:
        """Whether a submission would be accepted."""
        return not self.verdict.refusals

    @property
    def refusals(self) -> list[str]:
        """Why it would be refused: one sentence for each problem, causes before consequences."""
        return self.verdict.lines

    @property
    def notes(self) -> list[str]:
        """Sentences that do not prevent a submission."""
        return [str(note) for note in self.verdict.notes]

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The result of each check, as `hpc-rl check --json` prints it."""
        return self.verdict.rows()

    def require(self) -> None:
        """Raise ConfigError with all refusals if there are any."""
        if self.verdict.refusals:
            raise self.verdict.error()

    def __bool__(self) -> bool:
        return self.ok

    def _repr_html_(self) -> str:
        return make_table(
            ("check", "result", ""), [(row["name"], row["state"], row["detail"]) for row in self.rows]
        )


def load(
    *files: PathLike, presets: Sequence[str] = (), profile: str | None = None, **options: Any
) -> Configuration:
    """Load a configuration from YAML files, merged from left to right, and options.

    Args:
        files: YAML files; none if the options are complete.
        presets: `atlas`, `atlas-teacher` or `cpu`, as --preset of the command line.
        profile: The cluster's profile, as --cluster of the command line.
        options: By their names: `seed=3`, `**{"actor.optimizer.lr": 1e-6}`, or a section as a dict,
            `actor={"optimizer": {"lr": 1e-6}}`. They win over the files.

    Raises ConfigError with every refused option.
    """
    return _load([os.fspath(file) for file in files], format_options(options), presets, profile)


def check(config: Configuration | PathLike, **options: Any) -> CheckReport:
    """Run every check of `hpc-rl check`, and return their results. Writes and submits nothing.

    `config` is a loaded configuration or a YAML file. Unusable options are refusals in the report.
    """
    if isinstance(config, Configuration):
        overrides = [*config.sources.overrides, *format_options(options)]
        files, presets, profile = config.sources.files, config.sources.presets, config.sources.cluster
    else:
        files, overrides, presets, profile = [os.fspath(config)], format_options(options), (), None
    return CheckReport(prepare.judge_config(ConfigSources("check", files, overrides, presets, profile)))


def make_configuration(config: Configuration | PathLike, options: Mapping[str, Any]) -> Configuration:
    """Return the configuration that an argument and options mean. Raises ConfigError."""
    if isinstance(config, Configuration):
        return config.with_options(**options) if options else config
    return load(config, **options)


def format_options(options: Mapping[str, Any]) -> list[str]:
    """Return options as the command line has them, `a.b=VALUE`. Raises ConfigError."""
    return [f"{name}={format_value(name, value)}" for name, value in options.items()]


def _load(
    files: Sequence[str], overrides: Sequence[str], presets: Sequence[str], profile: str | None
) -> Configuration:
    sources = ConfigSources("submit", list(files), list(overrides), list(presets), profile)
    return Configuration(sources, prepare.load_config(sources))


def format_value(name: str, value: Any) -> str:
    """Return a value as YAML. Raises ConfigError for one that YAML can't have."""
    if isinstance(value, float) and not math.isfinite(value):
        return {math.inf: ".inf", -math.inf: "-.inf"}.get(value, ".nan")
    try:
        return json.dumps(value, default=_convert)
    except (TypeError, ValueError) as error:
        why = f"can't take this {type(value).__name__}: {error}"
        raise ConfigError(Refusal(option=name, kind=Kind.VALUE, why=why)) from error


def _convert(value: Any) -> Any:
    """Return a path, or a number of NumPy, as JSON has it."""
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    kinds = "text, numbers, true and false, None, paths, lists and dicts"
    raise TypeError(f"{value!r} is a {type(value).__name__}; allowed are {kinds}")
