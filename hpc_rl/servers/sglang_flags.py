"""Command line of SGLang: a table for each version that we know, and the flags of one replica. Pure.

A version that is not in the table gets the newest one that is, with a warning: SGLang itself refuses a flag that it does
not know, and the server's error shows its words.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hpc_rl.config.generation import SGLangConfig

# our name -> SGLang's flag; None where that version has no such flag
_0_5_23: dict[str, str] = {
    "model_path": "--model-path",
    "tokenizer_path": "--tokenizer-path",
    "host": "--host",
    "port": "--port",
    "weight_version": "--weight-version",
    "random_seed": "--random-seed",
    "dtype": "--dtype",
    "device": "--device",
    "attention_backend": "--attention-backend",
    "sampling_backend": "--sampling-backend",
    "disable_overlap_schedule": "--disable-overlap-schedule",
    "context_length": "--context-length",
    "mem_fraction_static": "--mem-fraction-static",
    "max_running_requests": "--max-running-requests",
    "max_total_tokens": "--max-total-tokens",
    "tensor_parallel_size": "--tp-size",
    "log_level": "--log-level",
    "sampling_defaults": "--sampling-defaults",
    "config_file": "--config",
}
FLAGS: dict[str, dict[str, str]] = {"0.5.23": _0_5_23}

CPU_MAX_TOTAL_TOKENS = 65536  # without a bound SGLang takes a share of the host's memory


@dataclass(frozen=True, kw_only=True)
class SGLangLaunch:
    """What one replica is started with, before model and ports are known."""

    python: str
    env: dict[str, str]
    settings: dict[str, str | int | float | bool]
    extra_args: list[str] = field(default_factory=list)


def table_for(version: str) -> tuple[dict[str, str], str]:
    """The flags of a version, and a warning where it is one that we don't know."""
    if version in FLAGS:
        return FLAGS[version], ""
    newest = max(FLAGS, key=_numbers)
    return FLAGS[newest], f"SGLang {version} is not in the flag table (known: {', '.join(FLAGS)}): taking the flags of {newest}"


def settings_of(config: SGLangConfig, device: str, tensor_parallel_size: int, index: int) -> dict[str, str | int | float | bool]:
    """What the configuration says, and what a CPU needs besides. Values that are None are left to SGLang."""
    settings: dict[str, str | int | float | bool | None] = {
        "host": "127.0.0.1",
        "random_seed": config.random_seed + index,
        "dtype": config.dtype,
        "attention_backend": config.attention_backend,
        "context_length": config.context_length,
        "mem_fraction_static": config.mem_fraction_static,
        "max_running_requests": config.max_running_requests,
        "max_total_tokens": config.max_total_tokens,
        "tensor_parallel_size": tensor_parallel_size,
        "log_level": config.log_level,
        "sampling_defaults": "openai",  # what a request does not say must not come from the model's generation config
    }
    if device == "cpu":
        settings |= {"device": "cpu", "sampling_backend": "pytorch", "disable_overlap_schedule": True}
        settings["max_total_tokens"] = config.max_total_tokens or CPU_MAX_TOTAL_TOKENS
        settings["mem_fraction_static"] = None
    return {name: value for name, value in settings.items() if value is not None}


def arguments(settings: dict[str, str | int | float | bool], extra_args: list[str], flags: dict[str, str]) -> list[str]:
    """argv behind the interpreter."""
    argv = ["-m", "sglang.launch_server"]
    for name, value in settings.items():
        if value is True:
            argv.append(flags[name])
        elif value is not False:
            argv += [flags[name], str(value)]
    return [*argv, *extra_args]


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".") if part.isdigit()]
