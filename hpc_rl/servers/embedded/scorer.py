"""The embedded backend of a reward model: scores whole texts in a separate thread."""

from __future__ import annotations

import asyncio
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification
from transformers.utils.logging import disable_progress_bar

from hpc_rl.config.options.experiment import GRPOConfig
from hpc_rl.config.options.inference import EmbeddedConfig
from hpc_rl.core.errors import ConfigError
from hpc_rl.servers.base import Answer, Receiver, ReplicaPlace
from hpc_rl.servers.wire import SendParts, make_refusal

MAX_TOKENS = 8192  # padded, per forward pass


class EmbeddedScorer:
    """See Backend. Requests to /classify are not batched together, so other requests never change a score."""

    makes_initial_weights = True
    receiver: Receiver | None = None

    def __init__(self, config: EmbeddedConfig) -> None:
        self._dtype = getattr(torch, config.dtype)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="scorer")
        self._path = ""
        self._model: Any = None

    @classmethod
    def create(cls, config: GRPOConfig, place: ReplicaPlace) -> EmbeddedScorer:
        return cls(config.embedded)

    async def start(self, path: str, version: str) -> None:
        if not Path(path).is_dir():
            raise ConfigError(f"model path {path!r} is not a directory on node {socket.gethostname()}")
        self._model = await asyncio.get_running_loop().run_in_executor(self._thread, load, path, self._dtype)
        self._path = path

    async def prepare_changes(self, folder: Path) -> None:
        """Do nothing: the model is frozen."""

    def alive(self) -> str:
        return ""

    async def stop(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def request(self, path: str, body: dict[str, Any] | None) -> Answer:
        if path == "/model_info":
            return 200, {"model_path": self._path, "is_generation": False, "engine": "embedded"}
        if path != "/classify":
            return 404, make_refusal(f"no such path of a reward model: {path}")
        inputs, config = (body or {}).get("input_ids"), self._model.config
        size, longest = config.vocab_size, config.max_position_embeddings
        if not isinstance(inputs, list) or not all(_is_input(ids, size) for ids in inputs):
            return 400, make_refusal(
                f"input_ids must be a list of non-empty lists of integers from 0 to {size - 1}"
            )
        if (most := max(map(len, inputs), default=0)) > longest:
            return 400, make_refusal(f"{most} input tokens exceed the model's context of {longest} tokens")
        loop = asyncio.get_running_loop()
        scores = await loop.run_in_executor(self._thread, score, self._model, inputs)
        return 200, [{"embedding": [one]} for one in scores]

    async def generate(self, body: dict[str, Any], send: SendParts) -> Answer:
        return await self.request("/generate", body)


def _is_input(ids: Any, size: int) -> bool:
    return isinstance(ids, list) and set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < size


def load(path: str, dtype: torch.dtype) -> Any:
    """Load the reward model at a path. Raises ConfigError, ImportError, OSError, ValueError."""
    disable_progress_bar()
    model, found = AutoModelForSequenceClassification.from_pretrained(
        path, dtype=dtype, num_labels=1, local_files_only=True, output_loading_info=True
    )
    if missing := sorted(map(str, found["missing_keys"])):
        raise ConfigError(
            f"{path} can't be used as a reward model, because its files lack {', '.join(missing[:3])}; "
            "use a sequence-classification model with one output"
        )
    if not isinstance(getattr(model, "score", None), torch.nn.Linear):
        kind = type(model).__name__
        raise ConfigError(
            f"{path} can't be used as a reward model, because a {kind} has no linear layer `score`; use a "
            "sequence-classification model that has one, such as Qwen2ForSequenceClassification"
        )
    return model.eval().requires_grad_(False)


@torch.inference_mode()
def score(model: Any, inputs: list[list[int]]) -> list[float]:
    """Return the score of each input at its last token."""
    order = sorted(range(len(inputs)), key=lambda one: len(inputs[one]))
    scores = [0.0] * len(inputs)
    while order:
        longest = len(inputs[order[-1]])
        rows = [order.pop() for _ in range(min(len(order), max(1, MAX_TOKENS // longest)))]
        lengths = torch.tensor([len(inputs[row]) for row in rows])
        ids = torch.zeros(len(rows), longest, dtype=torch.long)
        for number, row in enumerate(rows):
            ids[number, : len(inputs[row])] = torch.tensor(inputs[row])
        mask = (torch.arange(longest)[None] < lengths[:, None]).long()
        hidden = model.base_model(input_ids=ids, attention_mask=mask).last_hidden_state
        last = hidden[torch.arange(len(rows)), lengths - 1]
        for row, value in zip(rows, model.score(last)[:, 0].float().tolist(), strict=True):
            scores[row] = value
    return scores
