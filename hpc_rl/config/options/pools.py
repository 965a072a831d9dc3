"""Section `pools`: further models, never trained, that answer or score during rollouts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from hpc_rl.config.options.limits import (
    AnyText,
    Executable,
    Grammar,
    NonNegativeFloat,
    NonNegativeInt,
    PathText,
    PositiveInt,
    PositiveShare,
)
from hpc_rl.core.allocation import POOL_NAME, POOL_NAME_WORDS

PoolName = Annotated[str, Grammar(POOL_NAME.pattern, POOL_NAME_WORDS)]


@dataclass(kw_only=True)
class PoolConfig:
    """A pool of servers whose model is not trained, or an external endpoint. hpc-rl extension."""

    path: PathText = ""
    """Directory of a Hugging Face checkpoint, which is never updated; `allocation_mode` has servers for it.
    If `rollout.reward_fn` names the pool, it is a reward model. Set either this or `url`."""
    tokenizer_path: PathText = ""
    """Directory of its tokenizer; empty means the model's."""
    url: str = ""
    """Base URL of an endpoint with OpenAI's API, such as http://host:8000/v1; `allocation_mode` has no
    servers for it."""
    model: str = ""
    """Name of the model at `url`; empty means the only model that it lists."""
    api_key_env: str = ""
    """Environment variable of the job with the key for `url`; empty means no key."""
    max_new_tokens: PositiveInt = 1024
    """Largest number of tokens in an answer."""
    temperature: NonNegativeFloat = 1.0
    """Sampling temperature; 0 always takes the most likely token."""
    top_p: PositiveShare = 1.0
    """Nucleus sampling: probability mass to sample from; 1 means all."""
    stop_token_ids: list[NonNegativeInt] = field(default_factory=list)
    """Tokens that end an answer, in addition to the tokenizer's end-of-sequence token."""
    python: Executable | None = None
    """Python interpreter of its SGLang or vLLM servers; null means `launcher.inference_server_python`."""
    max_requests: PositiveInt = 256
    """Simultaneous requests of each executor process."""
    options: dict[str, AnyText] = field(default_factory=dict)
    """Server options that differ for this pool, by their names in the backend's section, such as
    `context_length: 4096`."""
