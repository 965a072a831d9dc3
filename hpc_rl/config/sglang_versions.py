"""Which of our SGLang options a version no longer has, and what replaced them. servers/sglang_flags.py has the flags."""

from __future__ import annotations

_0_5_23 = {
    "enable_ep_moe": "use sglang.ep_size, and --moe-a2a-backend in sglang.extra_args",
    "torchao_config": "use --quantization in sglang.extra_args",
    "enable_nan_detection": "it was removed without one; leave it out",
}
DROPPED: dict[str, dict[str, str]] = {"0.5.23": _0_5_23}
VERSIONS = tuple(DROPPED)
