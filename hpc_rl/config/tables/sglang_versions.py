"""The command-line flags of each supported SGLang version, and the options that it no longer has."""

import dataclasses

from hpc_rl.config.sections.inference import SGLangConfig

Flags = dict[str, str | tuple[str, ...]]

# version -> option of the section `sglang` that it lacks -> what to use
DROPPED: dict[str, dict[str, str]] = {
    "0.5.23": {
        "enable_ep_moe": "use sglang.ep_size, and --moe-a2a-backend in sglang.extra_args",
        "torchao_config": "use --quantization in sglang.extra_args",
        "enable_nan_detection": "omit it",
    }
}
NO_FLAGS = {"version", "extra_args", "dp_size", "enable_dp_attention"}
_SET_BY_THE_ROLE = (
    "tokenizer_path", "host", "port", "weight_version", "device", "sampling_defaults",
)  # fmt: skip
_RENAMED_0_5_23: Flags = {
    "tensor_parallel_size": "--tp-size",
    "config_file": "--config",
    "cuda_graph_max_bs": "--cuda-graph-max-bs-decode",
    "cuda_graph_bs": "--cuda-graph-bs-decode",
    "disable_cuda_graph": (
        "--cuda-graph-backend-decode",
        "disabled",
        "--cuda-graph-backend-prefill",
        "disabled",
    ),
}


def _flags(version: str, renamed: Flags) -> Flags:
    """Return name -> flag: the name with dashes, or what `renamed` has (for a switch, its arguments)."""
    names = {field.name for field in dataclasses.fields(SGLangConfig)} - NO_FLAGS - DROPPED[version].keys()
    return {name: f"--{name.replace('_', '-')}" for name in sorted({*names, *_SET_BY_THE_ROLE})} | renamed


FLAGS: dict[str, Flags] = {"0.5.23": _flags("0.5.23", _RENAMED_0_5_23)}

# Other names of flags, and flags that the trial sets and has no option for: extra_args may not contain them.
ALSO: dict[str, str] = {
    "--model": "--model-path",
    "--tp": "--tp-size",
    "--tensor-parallel-size": "--tp-size",
    "--ep": "--ep-size",
    "--expert-parallel-size": "--ep-size",
    "--dp": "--dp-size",
    "--data-parallel-size": "--dp-size",
}
SET_BY_THE_TRIAL = (
    "--dp-size", "--nnodes", "--node-rank", "--dist-init-addr", "--api-key", "--admin-api-key",
)  # fmt: skip
