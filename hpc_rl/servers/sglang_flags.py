"""Command line of one SGLang replica, by the table of its version (config/tables/sglang_versions.py). Pure.

A version that is not in the table gets the newest one that is, with a warning: SGLang itself refuses a flag that it does
not know, and the server's error shows its words.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from hpc_rl.config.sections.inference import SGLangConfig
from hpc_rl.config.tables.sglang_versions import DROPPED, FLAGS, Flags

Setting = str | int | float | bool | list[int]

CPU_MAX_TOTAL_TOKENS = 65536  # without a bound SGLang takes a share of the host's memory


# options of the section that are no flags: ours, set elsewhere, refused at other values, or dropped by every version we know
NOT_FLAGS = {
    "version",
    "extra_args",
    "model_path",
    "dp_size",
    "enable_dp_attention",
    *(n for gone in DROPPED.values() for n in gone),
}


@dataclass(frozen=True, kw_only=True)
class SGLangLaunch:
    """What one replica is started with, before model and ports are known; `version` is the one that was configured."""

    python: str
    env: dict[str, str]
    settings: dict[str, Setting]
    version: str = ""
    extra_args: list[str] = field(default_factory=list)


def table_for(version: str, configured: str = "") -> tuple[Flags, str]:
    """The flags of an installed version, and a warning where it is not the configured one, or one that we don't know."""
    if version in FLAGS:
        other = f"SGLang is {version}, but sglang.version, by which the options were checked, is {configured}"
        return FLAGS[version], other if configured and version != configured else ""
    newest = max(FLAGS, key=_numbers)
    return FLAGS[
        newest
    ], f"SGLang {version} is not in the flag table (known: {', '.join(FLAGS)}): taking the flags of {newest}"


def settings_of(
    config: SGLangConfig, device: str, tensor_parallel_size: int, index: int
) -> dict[str, Setting]:
    """What the configuration says, and what a CPU needs besides. Values that are None are left to SGLang."""
    own = {field.name for field in dataclasses.fields(config)} - NOT_FLAGS
    settings: dict[str, Setting | None] = {name: getattr(config, name) for name in sorted(own)}
    settings |= {
        "host": "127.0.0.1",
        "random_seed": config.random_seed + index,
        "tensor_parallel_size": tensor_parallel_size,
        "sampling_defaults": "openai",  # what a request does not say must not come from the model's generation config
    }
    if device == "cpu":
        backend = config.sampling_backend or "pytorch"
        settings |= {"device": "cpu", "sampling_backend": backend, "disable_overlap_schedule": True}
        settings["max_total_tokens"] = config.max_total_tokens or CPU_MAX_TOTAL_TOKENS
    return {
        name: value
        for name, value in settings.items()
        if value is not None and value is not False and value != ""
    }


def arguments(settings: dict[str, Setting], extra_args: list[str], flags: Flags) -> list[str]:
    """argv behind the interpreter."""
    argv = ["-m", "sglang.launch_server"]
    for name, value in settings.items():
        flag = flags[name]
        if value is True:
            argv += [flag] if isinstance(flag, str) else flag
        elif value is not False:
            assert isinstance(flag, str)
            argv += [flag, *map(str, value if isinstance(value, list) else [value])]
    return [*argv, *extra_args]


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".") if part.isdigit()]
