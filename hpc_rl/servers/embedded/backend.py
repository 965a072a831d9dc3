"""The embedded backend: serves SGLang's native requests with an engine thread in the server's own process.

The event loop's thread parses requests and builds answers; the engine's thread sees only sequences. The
sequences that finish in one step return in one call.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import socket
import sys
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from hpc_rl.config.options.experiment import GRPOConfig
from hpc_rl.config.options.inference import EmbeddedConfig
from hpc_rl.core.collector import spare_collector
from hpc_rl.core.errors import ConfigError, RequestRefused
from hpc_rl.core.proc import keep_freed_memory
from hpc_rl.datasets.tokenizer import Tokenizer
from hpc_rl.servers.base import Answer, Backend, Receiver, ReplicaPlace
from hpc_rl.servers.chat import convert_answers, convert_request
from hpc_rl.servers.embedded.changes import PreparedChanges, load_changes
from hpc_rl.servers.embedded.decode_batch import Sequence
from hpc_rl.servers.embedded.engine import EmbeddedEngine
from hpc_rl.servers.embedded.given_tokens import compute_logprobs
from hpc_rl.servers.embedded.model import Model
from hpc_rl.servers.embedded.receive import WeightReceiver
from hpc_rl.servers.weight_group import start_in_thread
from hpc_rl.servers.wire import (
    LOGPROBS,
    PART_S,
    NativeRequest,
    Part,
    SamplingParams,
    SendParts,
    cut_spans,
    make_answer,
    make_refusal,
    parse_given,
    parse_pause_mode,
    parse_several,
    split,
)

logger = logging.getLogger(__name__)

_SWITCH_INTERVAL_S = 0.001  # the engine releases the GIL in every tensor operation and needs it back soon
_MASK_63 = (1 << 63) - 1
MAX_SEQUENCES = 4096  # per request
TEST_PACE = "HPC_RL_TEST_DECODE_S"  # for tests, as 0.03:0.002: least seconds of a step, and more of each row


def load_pace(environ: Mapping[str, str]) -> Callable[[int], float] | None:
    """Return the artificial duration of a decode step by its rows, which tests and benchmarks set."""
    if TEST_PACE not in environ:
        return None
    step_s, row_s = map(float, environ[TEST_PACE].split(":"))
    return lambda num_rows: step_s + row_s * num_rows


class _Sample:
    """A sequence, and how many of its tokens are sent."""

    def __init__(self, sequence: Sequence) -> None:
        self.sequence = sequence
        self._num_sent, self._end_is_sent = 0, False

    def has_news(self) -> bool:
        ended = self.sequence.finish is not None and not self._end_is_sent
        return ended or len(self.sequence.tokens) > self._num_sent

    def take(self, index: int) -> Part:
        """Return the unsent tokens."""
        sequence, start = self.sequence, self._num_sent
        self._num_sent, self._end_is_sent = len(sequence.tokens), sequence.finish is not None
        # copies: the engine goes on to extend these lists
        tokens, logprobs = sequence.tokens[start:], sequence.logprobs[start:]
        return Part(
            index, tokens, logprobs, cut_spans(sequence.spans, start), sequence.finish, self._num_sent
        )


class _Countdown:
    """An event that the last of `count` sequences sets."""

    def __init__(self, count: int) -> None:
        self._left, self._event = count, asyncio.Event()

    def set(self) -> None:
        self._left -= 1
        if self._left == 0:
            self._event.set()

    async def wait(self, timeout_s: float | None) -> bool:
        """Return whether all ended within the time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._event.wait()
        return self._left == 0


class EmbeddedBackend:
    """See Backend.

    Args:
        config: The section `embedded`.
        seed: For requests without a seed.
        tokenizer_path: By default, the model's path.
        scratch: Start with random weights of the model's architecture.
        address: Of this host; "" to receive weights from files only.
    """

    makes_initial_weights = True

    def __init__(
        self,
        config: EmbeddedConfig,
        seed: int = 1,
        tokenizer_path: str = "",
        scratch: bool = False,
        address: str = "",
    ) -> None:
        self.receiver = Receiver("gloo") if address else None
        self._arriving = WeightReceiver(address)
        self._config, self._tokenizer_path, self._scratch = config, tokenizer_path, scratch
        self._random = random.Random(seed)
        self._engine: EmbeddedEngine | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tokenizer: Tokenizer | None = None
        self._live: set[str] = set()  # ids of requests
        self._changes: PreparedChanges | None = None  # of the version that comes next
        self._is_mixed = False  # weights over a group have begun to arrive

    @classmethod
    def create(cls, config: GRPOConfig, place: ReplicaPlace) -> Backend:
        if config.actor.is_critic:
            # it needs transformers, whose import takes longer than PyTorch's
            from hpc_rl.servers.embedded.scorer import EmbeddedScorer

            return EmbeddedScorer.create(config, place)
        tokenizer = config.tokenizer_path or config.actor.path
        address = place.address if config.actor.weight_update_mode == "xccl" else ""
        return cls(config.embedded, config.seed, tokenizer, config.actor.init_from_scratch, address)

    @property
    def engine(self) -> EmbeddedEngine:
        assert self._engine is not None, "start() comes first"
        return self._engine

    async def start(self, path: str, version: str) -> None:
        if not Path(path).is_dir():
            raise ConfigError(f"model path {path!r} is not a directory on node {socket.gethostname()}")
        self._loop = asyncio.get_running_loop()
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        keep_freed_memory()
        start = time.monotonic()
        scratch = self._scratch and not version
        model = await asyncio.to_thread(Model, path, self._config.dtype, scratch)
        self._tokenizer = _load_tokenizer(self._tokenizer_path or path)
        config = self._config
        limits = config.max_running_requests, config.batch_invariant
        self._engine = EmbeddedEngine(model, version, self._deliver, *limits, load_pace(os.environ))
        self._engine.start()
        spare_collector()
        form = "the embedded engine has loaded %s in %.1f s (%s)"
        logger.info(form, path, time.monotonic() - start, type(model.decoder).__name__)

    def alive(self) -> str:
        if self._engine is None or self._engine.alive():
            return ""
        return f"the engine thread has ended: {self._engine.failure or 'stopped'}"

    async def stop(self) -> None:
        self._arriving.leave()
        if self._engine:
            await asyncio.to_thread(self._engine.stop)

    async def request(self, path: str, body: dict[str, Any] | None) -> Answer:
        handler = self._HANDLERS.get(path)
        if handler is None:
            return 404, make_refusal(f"no such path: {path}")
        return await self._answer_or_refuse(handler(self, body or {}))

    async def generate(self, body: dict[str, Any], send: SendParts) -> Answer:
        return await self._answer_or_refuse(self._generate_parts(body, send))

    async def _answer_or_refuse(self, answer: Awaitable[Any]) -> Answer:
        try:
            return 200, await answer
        except RequestRefused as error:
            return 400, make_refusal(str(error))
        except RuntimeError as error:  # the engine has failed or stops
            return 503, make_refusal(str(error))

    # generation
    async def _generate(self, body: dict[str, Any]) -> Any:
        requests, batched = self._split(body)
        sequences, is_several = self._make_sequences(requests)
        await self._run([_Sample(sequence) for sequence in sequences], requests, None)
        return_logprob, version = bool(body.get("return_logprob")), self.engine.version
        answers = [_make_native_answer(one, return_logprob, version) for one in sequences]
        return answers if batched or is_several else answers[0]

    async def _generate_parts(self, body: dict[str, Any], send: SendParts) -> list[Part]:
        requests, _ = self._split(body)
        samples = [_Sample(sequence) for sequence in self._make_sequences(requests)[0]]
        await self._run(samples, requests, send)
        return [sample.take(index) for index, sample in enumerate(samples)]

    def _split(self, body: dict[str, Any]) -> tuple[list[NativeRequest], bool]:
        def encode(text: str) -> list[int]:
            return self._require_tokenizer().encode(text, add_special_tokens=False)

        return split(body, "the embedded engine", encode)

    def _make_sequences(self, requests: list[NativeRequest]) -> tuple[list[Sequence], bool]:
        """Return a sequence for each sample, and whether there may be several. Raises RequestRefused."""
        if running := {one.rid for one in requests if one.rid} & self._live:
            raise RequestRefused(f"rid {min(running)!r} is the id of a request that is still running")
        params = parse_several([one.sampling for one in requests])
        if (total := sum(one.n for one in params)) > MAX_SEQUENCES:
            raise RequestRefused(f"the request asks for {total} samples; at most {MAX_SEQUENCES} are allowed")
        sequences: list[Sequence] = []
        for request, one in zip(requests, params, strict=True):
            sequences += self._sequences(request.ids, request.rid, one)
        return sequences, total > 1

    def _sequences(self, ids: list[int], rid: str, params: SamplingParams) -> list[Sequence]:
        model = self.engine.model
        is_list = isinstance(ids, list) and set(map(type, ids)) == {int}
        if not is_list or min(ids) < 0 or max(ids) >= model.vocab_size:
            raise RequestRefused(f"input_ids must be integers from 0 to {model.vocab_size - 1}, at least one")
        total = len(ids) + params.max_new_tokens
        if len(ids) >= model.context_length or total > model.context_length:
            raise RequestRefused(
                f"{len(ids)} input tokens and max_new_tokens {params.max_new_tokens} exceed "
                f"the model's context of {model.context_length} tokens"
            )
        rid = rid or uuid.uuid4().hex
        # the samples of a request differ; a sequence resubmitted after an abort continues in the same way
        given = params.sampling_seed
        seeds = [
            self._random.getrandbits(63) if given is None else (given + index) & _MASK_63
            for index in range(params.n)
        ]
        rids = [rid] if params.n == 1 else [f"{rid}_{index}" for index in range(params.n)]
        return [Sequence(ids, params, seed, own) for seed, own in zip(seeds, rids, strict=True)]

    async def _run(
        self, samples: list[_Sample], requests: list[NativeRequest], send: SendParts | None
    ) -> None:
        if self.engine.failure:
            raise RuntimeError(self.engine.failure)
        rids = {one.rid for one in requests if one.rid}
        self._live |= rids
        sequences, ending = [sample.sequence for sample in samples], _Countdown(len(samples))
        for sequence in sequences:
            sequence.done = ending
        self.engine.submit(sequences)
        try:
            while not await ending.wait(PART_S if send else None):
                parts = await self._in_engine(partial(self._take_parts, samples))
                if parts and send:
                    await send(parts)
        finally:
            self._live -= rids
            if not all(sequence.finish for sequence in sequences):  # the client has disconnected
                for sequence in sequences:
                    sequence.cancelled = True
                self.engine.command(
                    lambda: self.engine.abort(lambda one: one.cancelled, "the client has gone")
                )

    def _take_parts(self, samples: list[_Sample]) -> list[Part]:
        """Return the new tokens of running samples. Runs in the engine's thread."""
        self.engine.collect({sample.sequence for sample in samples})
        return [sample.take(index) for index, sample in enumerate(samples) if sample.has_news()]

    def _deliver(self, finished: list[Sequence]) -> None:
        """Pass finished sequences from the engine's thread to this event loop."""

        def settle() -> None:
            for sequence in finished:
                sequence.done.set()

        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(settle)

    async def _compute_logprobs(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        inputs, top_k = parse_given(body)
        model = self.engine.model
        if (most := max(max(one.ids) for one in inputs)) >= model.vocab_size:
            raise RequestRefused(f"input_ids must be from 0 to {model.vocab_size - 1}, got {most}")
        if (longest := max(len(one.ids) for one in inputs)) > model.context_length:
            context = f"the model's context of {model.context_length} tokens"
            raise RequestRefused(f"{longest} input tokens exceed {context}")
        return await self._in_engine(lambda: compute_logprobs(model, inputs, top_k))

    async def _chat(self, body: dict[str, Any]) -> dict[str, Any]:
        tokenizer = self._require_tokenizer()
        request, stops = convert_request(body, tokenizer, self.engine.model.context_length)
        answers = await self._generate(request)
        return convert_answers(body, answers if isinstance(answers, list) else [answers], tokenizer, stops)

    def _require_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise RequestRefused(
                "this server could load no tokenizer.json: send input_ids, not text or chats"
            )
        return self._tokenizer

    # control
    async def _in_engine(self, command: Callable[[], Any]) -> Any:
        return await asyncio.wrap_future(self.engine.command(command))

    async def _pause(self, body: dict[str, Any]) -> dict[str, Any]:
        mode = parse_pause_mode(body)
        await self._in_engine(lambda: self.engine.pause(mode))
        return {"status": "ok", "message": f"paused ({mode})"}

    async def _continue(self, _body: dict[str, Any]) -> dict[str, Any]:
        await self._in_engine(self.engine.resume)
        return {"status": "ok", "message": "continued"}

    async def _abort(self, body: dict[str, Any]) -> dict[str, Any]:
        rid, everything = body.get("rid") or "", bool(body.get("abort_all"))

        def match(sequence: Sequence) -> bool:
            return everything or (bool(rid) and (sequence.rid == rid or sequence.rid.startswith(f"{rid}_")))

        count = await self._in_engine(lambda: self.engine.abort(match, "aborted by abort_request"))
        return {"status": "ok", "num_aborted": count}

    async def _update(self, body: dict[str, Any]) -> dict[str, Any]:
        path, version = body.get("model_path"), body.get("weight_version")
        if not isinstance(path, str) or not path:
            raise RequestRefused(f"model_path must be the path of a directory, got {path!r}")
        label = None if version is None else str(version)
        keep_cache = not body.get("flush_cache", True)
        changes, self._changes = self._changes, None
        if changes is not None and (self._is_mixed or str(changes.version) != label):
            changes = None
        try:
            await self._in_engine(lambda: self.engine.update(path, label, keep_cache, changes))
        except (OSError, ValueError) as error:
            message = f"the server can't load the weights at {path} and keeps the old ones: {error}"
            raise RequestRefused(message) from error
        self._is_mixed = False
        return {"success": True, "message": "updated", "num_paused_requests": 0}

    async def _release_memory(self, _body: dict[str, Any]) -> dict[str, Any]:
        """Drop weights and cache; the server must be paused. The next update loads weights."""
        self._changes = None
        await self._in_engine(self.engine.release_memory)
        return {"success": True, "message": "released"}

    async def _resume_memory(self, _body: dict[str, Any]) -> dict[str, Any]:
        return {"success": True, "message": "memory is taken when it is needed"}

    async def prepare_changes(self, folder: Path) -> None:
        self._changes = await asyncio.to_thread(load_changes, folder, self.engine.model.dtype)

    async def _join(self, body: dict[str, Any]) -> dict[str, Any]:
        await start_in_thread(partial(self._arriving.join, body))
        return {"success": True, "message": "joined"}

    async def _leave(self, body: dict[str, Any]) -> dict[str, Any]:
        self._arriving.leave(str(body.get("group_name")))
        return {"success": True, "message": "left"}

    async def _begin(self, _body: dict[str, Any]) -> dict[str, Any]:
        self._arriving.begin()
        self._is_mixed = True
        return {"success": True, "message": "the next buckets are of one version"}

    async def _receive(self, body: dict[str, Any]) -> dict[str, Any]:
        tensors = await start_in_thread(partial(self._arriving.receive, body))
        try:
            await self._in_engine(lambda: self.engine.model.write(tensors))
        except ValueError as error:
            raise RequestRefused(str(error)) from error
        self._arriving.note(tensors)
        return {"success": True, "message": f"{len(tensors)} tensors are loaded"}

    async def _end(self, _body: dict[str, Any]) -> dict[str, Any]:
        version, keep_cache = self._arriving.finish(self.engine.model.list_names())
        await self._in_engine(lambda: self.engine.finish_writing(version, keep_cache))
        self._is_mixed = False
        return {"success": True, "message": "updated"}

    async def _flush(self, _body: dict[str, Any]) -> dict[str, Any]:
        return {"status": "ok", "message": "there is no cache beyond the running requests"}

    async def _check_weights(self, _body: dict[str, Any]) -> dict[str, Any]:
        """Return checksums of the weights in use, and their version. As SGLang's, but by tensor."""

        def compute() -> dict[str, Any]:
            ranks = [{"checksums": self.engine.model.compute_checksums()}]
            return {"ranks": ranks, "weight_version": self.engine.version}

        return {"success": True, "message": "computed", **await self._in_engine(compute)}

    async def _info(self, _body: dict[str, Any]) -> dict[str, Any]:
        engine = self.engine
        info = {"model_path": engine.model.path, "is_generation": True, "weight_version": engine.version}
        return {**info, "context_length": engine.model.context_length, "engine": "embedded", **engine.load()}

    _HANDLERS = {  # noqa: RUF012 (a table, never changed)
        "/generate": _generate,
        "/v1/chat/completions": _chat,
        LOGPROBS: _compute_logprobs,
        "/pause_generation": _pause,
        "/continue_generation": _continue,
        "/abort_request": _abort,
        "/update_weights_from_disk": _update,
        "/init_weights_update_group": _join,
        "/destroy_weights_update_group": _leave,
        "/begin_weight_update": _begin,
        "/update_weights_from_distributed": _receive,
        "/end_weight_update": _end,
        "/release_memory_occupation": _release_memory,
        "/resume_memory_occupation": _resume_memory,
        "/flush_cache": _flush,
        "/weights_checker": _check_weights,
        "/model_info": _info,
    }


def _make_native_answer(sequence: Sequence, return_logprob: bool, version: str) -> dict[str, Any]:
    """Return SGLang's answer for an ended sequence. `version` counts for an answer without tokens."""
    return make_answer(
        sequence.rid,
        sequence.tokens,
        sequence.logprobs if return_logprob else None,
        sequence.finish,
        sequence.spans,
        prompt_tokens=len(sequence.ids),
        cached_tokens=0,
        weight_version=version,
        num_retractions=sequence.num_retractions,
    )


def _load_tokenizer(path: str) -> Tokenizer | None:
    try:
        return Tokenizer(path)
    except (OSError, ValueError) as error:
        logger.info("the server takes only token ids, no text and no chats: %s", error)
        return None
