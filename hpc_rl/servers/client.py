"""The client of one generation server: generation over a channel, all other calls over HTTP.

`generate_many` hides interruptions: it sends an aborted request again with the tokens so far. The caller gets
one Turn; its version spans tell which weights generated which tokens. A server sends the tokens of a longer
request in parts (channel.py), so that another server continues from them if this one is lost. The router
(router.py) chooses servers and handles failed ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from hpc_rl.core import net
from hpc_rl.core.errors import (
    Damaged,
    InputRefused,
    RequestRefused,
    ServerLost,
    ServerStale,
    ServerUnavailable,
)
from hpc_rl.core.types import TokenLogprobs, Turn
from hpc_rl.servers.channel import Channel, ChannelClosed, ChannelLost, ChannelRequest
from hpc_rl.servers.wire import LOGPROBS, PART_S, Part, Span

if TYPE_CHECKING:  # it takes as long to import as all else, and a check of user code asks no server
    import aiohttp

MIN_VERSION_HEADER = "X-Hpc-Rl-Min-Version"
EXACT_HEADER = "X-Hpc-Rl-Exact-Version"  # the server must have the minimum version, not a newer one
PauseMode = Literal["retract", "abort", "in_place"]
CONTROL_TIMEOUT_S = 600.0
JOIN_S = 60.0  # for a process group of a trainer and a server
BUCKET_S = 30.0  # to send one bucket of weights over it
DAMAGED_STATUS = 424  # of a server that can't build weights from the published files


@dataclass(slots=True)
class GenerateRequest:
    """A request for one sample.

    `sampling` has SGLang's names (max_new_tokens, temperature, top_p, top_k, stop_token_ids, ignore_eos,
    sampling_seed …). All `rid` of a trial have the same length, because servers match aborts by prefix.
    `min_version` is a label, "" for any version. `exact` excludes newer versions, and servers that are not
    held at this one.
    """

    input_ids: list[int]
    sampling: dict[str, Any]
    rid: str
    min_version: str = ""
    exact: bool = False


def open_session(*, reuse_connections: bool = True) -> aiohttp.ClientSession:
    """Open a session without a limit on connections, so that servers can batch all requests.

    A server that closes idle connections after less than 60 s may close one in the moment of a request, and
    the request fails: do not reuse connections to it.
    """
    import aiohttp

    kept: dict[str, Any] = {"keepalive_timeout": 60} if reuse_connections else {"force_close": True}
    connector = aiohttp.TCPConnector(limit=0, socket_factory=net.open_socket, **kept)
    timeout = aiohttp.ClientTimeout(total=CONTROL_TIMEOUT_S, sock_connect=net.SILENCE_S)
    return aiohttp.ClientSession(connector=connector, timeout=timeout)


def append_spans(spans: list[Span], more: list[Span], offset: int) -> None:
    """Append version spans, shifted by `offset`; join neighbours with the same version."""
    for version, first, last in more:
        start, end = first + offset, last + offset
        if start == end:
            continue
        if spans and spans[-1][0] == version and spans[-1][2] == start:
            spans[-1] = (version, spans[-1][1], end)
        else:
            spans.append((version, start, end))


def make_version_headers(request: GenerateRequest) -> dict[str, str]:
    """Return the headers that limit the weights of a request."""
    if not request.min_version:
        return {}
    return {MIN_VERSION_HEADER: request.min_version} | ({EXACT_HEADER: "1"} if request.exact else {})


class PartialTurn:
    """An unfinished turn. It may continue after interruptions, also on other servers."""

    def __init__(self, request: GenerateRequest) -> None:
        self.request = request
        self.turn = Turn([], [], [], "abort")
        self._budget: int | None = request.sampling.get("max_new_tokens")
        self._begun = self._heard = time.monotonic()  # the current request, and its newest part
        self._num_before = 0  # tokens before the current request
        self._num_held = 0  # tokens of the current request that the server has made, but not sent

    @property
    def is_unfinished(self) -> bool:
        return self.turn.finish_reason == "abort"

    def body(self) -> dict[str, Any]:
        """Begin the next request: the input plus the tokens so far, with a smaller token budget."""
        self._begun = self._heard = time.monotonic()
        self._num_before, self._num_held = len(self.turn.output_ids), 0
        request, made = self.request, len(self.turn.output_ids)
        sampling = dict(request.sampling)
        if made and self._budget is not None:
            sampling["max_new_tokens"] = self._budget - made
        if made and sampling.get("min_new_tokens"):
            sampling["min_new_tokens"] = max(0, sampling["min_new_tokens"] - made)
        ids = request.input_ids + self.turn.output_ids
        return {"input_ids": ids, "sampling_params": sampling, "rid": request.rid}

    def absorb(self, part: Part) -> None:
        """Append new tokens. Raises InputRefused."""
        turn, reason = self.turn, part.finish or {"type": "abort"}
        if reason["type"] == "abort" and reason.get("status_code") == 400:
            raise InputRefused(f"the server aborted the request: {reason.get('message')}")
        append_spans(turn.versions, part.spans, len(turn.output_ids))
        turn.output_ids += part.ids
        turn.output_logprobs += part.logprobs
        turn.finish_reason = reason["type"]
        used_up = self._budget is not None and len(turn.output_ids) >= self._budget
        if turn.finish_reason == "abort" and used_up:
            turn.finish_reason = "length"
        self._heard = time.monotonic()
        self._num_held = max(0, part.num_made - self.num_received)

    @property
    def num_received(self) -> int:
        """The tokens of the current request."""
        return len(self.turn.output_ids) - self._num_before

    @property
    def tokens_per_s(self) -> float:
        """The speed of the current request; 0 before its first part."""
        elapsed_s = self._heard - self._begun
        return (self.num_received + self._num_held) / elapsed_s if elapsed_s > 0 else 0.0

    def count_lost(self, tokens_per_s: float) -> None:
        """Estimate the tokens that the lost server of the current request has made, but not sent.

        A running sample has a part every PART_S: so these are at most the tokens of that time, and the tokens
        that the server has announced only. `tokens_per_s` counts before the first part.
        """
        silent_s = time.monotonic() - self._heard
        if not self.num_received and silent_s > 2 * PART_S:
            return  # it was waiting: a running sample would have had a part
        unsent = (self.tokens_per_s or tokens_per_s) * min(PART_S, silent_s)
        self.turn.num_regenerated += self._num_held + int(unsent)


class HttpServerClient:
    """The client of the server at a URL.

    Without a control token, only `generate_many`, `score_many`, `health` and `model_info` work. `timeout_s`
    limits one generation, including resubmissions and weight updates.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        data_token: str,
        control_token: str | None = None,
        timeout_s: float = 3600.0,
    ) -> None:
        self.url = url.rstrip("/")
        self._session = session
        self._data = {"Authorization": f"Bearer {data_token}"}
        self._control = {"Authorization": f"Bearer {control_token}"} if control_token else self._data
        self._timeout_s = timeout_s
        self._tokens_per_s = 0.0  # of one sample, lately
        self._channel = Channel(session, self.url, self._data)

    async def generate_many(self, requests: list[GenerateRequest]) -> list[Turn]:
        """Generate the samples of one prompt in one call; return their turns when all are done.

        All requests must have the same min_version and `exact`. Raises RequestRefused, ServerStale or
        ServerUnavailable for all of them together.
        """
        return await self.finish([PartialTurn(request) for request in requests])

    async def finish(self, partials: list[PartialTurn]) -> list[Turn]:
        """Finish turns, as generate_many. After a failure they keep their tokens, for another server."""
        left = [partial for partial in partials if partial.is_unfinished]
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._finish(left)
        except TimeoutError as error:
            limit = f"{self._timeout_s:.0f} s (rollout.request_timeout)"
            problem = f"{self.url} did not finish a generation within {limit}"
            self._count_lost(left)
            raise ServerLost(problem) from error
        except ServerLost:
            self._count_lost(left)
            raise
        return [partial.turn for partial in partials]

    def _count_lost(self, partials: list[PartialTurn]) -> None:
        for partial in partials:
            if partial.is_unfinished:
                partial.count_lost(self._tokens_per_s)

    async def _finish(self, left: list[PartialTurn]) -> None:
        pause_s = 0.0
        while left:
            if pause_s:
                await asyncio.sleep(pause_s)
            parts, first = [partial.body() for partial in left], left[0].request
            body = {key: [part[key] for part in parts] for key in parts[0]}
            await self._ask(ChannelRequest(body, first.min_version, first.exact), left)
            made = sum(partial.num_received for partial in left)
            left = [partial for partial in left if partial.is_unfinished]
            # aborted before the first token: the server is paused or updating
            pause_s = 0.0 if made else min(1.0, 2 * pause_s + 0.05)

    async def _ask(self, request: ChannelRequest, partials: list[PartialTurn]) -> None:
        """Send a request over the channel; the partial turns take its parts as they come."""
        path = "/generate"
        refused: list[InputRefused] = []
        take = functools.partial(self._take_parts, partials, refused)
        with self._translate_errors(path, CONTROL_TIMEOUT_S):
            try:
                status, answer = await self._generate_parts(request, take)
            except ChannelClosed as error:
                raise ServerUnavailable(f"{self.url}{path}: {error}") from error
            except ChannelLost as error:
                raise ServerLost(f"{self.url}{path}: {error}") from error
        if refused:
            raise refused[0]
        try:
            self._check_answer(path, status, answer)
        except ServerUnavailable as error:
            if any(partial.num_received for partial in partials):
                raise ServerLost(str(error)) from error
            raise

    async def _generate_parts(
        self, request: ChannelRequest, take: Callable[[list[Part]], None]
    ) -> tuple[int, Any]:
        """Generate; call `take` with all parts. Returns the status, and the body of an error."""
        return await self._channel.ask(request, take)

    def _take_parts(
        self, partials: list[PartialTurn], refused: list[InputRefused], parts: list[Part]
    ) -> None:
        for part in parts:
            partial = partials[part.index]
            try:
                partial.absorb(part)
            except InputRefused as error:
                refused.append(error)
            self._tokens_per_s = partial.tokens_per_s or self._tokens_per_s

    async def close(self) -> None:
        """Close the channel: its requests fail with ServerLost."""
        await self._channel.close()

    async def score_many(self, requests: list[GenerateRequest]) -> list[float]:
        """Return the reward model's score of each input. Raises as generate_many."""
        body = {"input_ids": [request.input_ids for request in requests]}
        answers = await self._call("/classify", body, self._data, self._timeout_s)
        return [float(answer["embedding"][0]) for answer in answers]

    async def logprobs_many(
        self, requests: list[GenerateRequest], starts: list[int], top_k: int = 0
    ) -> list[TokenLogprobs]:
        """Return the log-probabilities of each input's tokens from its start on. Raises as generate_many.

        All requests must have the same min_version; their sampling has no effect.
        """
        headers = self._data | make_version_headers(requests[0])
        body = {"input_ids": [one.input_ids for one in requests], "starts": starts, "top_k": top_k}
        answers = await self._call(LOGPROBS, body, headers, self._timeout_s)
        return [TokenLogprobs(**answer) for answer in answers]

    async def pause(self, mode: PauseMode = "retract") -> None:
        """Pause generation; see `weights.pause_mode`."""
        await self._call("/pause_generation", {"mode": mode}, self._control, CONTROL_TIMEOUT_S)

    async def resume(self, timeout_s: float = CONTROL_TIMEOUT_S) -> None:
        await self._call("/continue_generation", {}, self._control, timeout_s)

    async def release_memory(self) -> None:
        """Let a server on shared GPUs give up its memory. Raises ServerUnavailable while it starts."""
        await self._call("/release_memory_occupation", {}, self._control, CONTROL_TIMEOUT_S)

    async def resume_memory(self) -> str:
        """Let it take its memory, with the newest published weights; return its state, `serving` at the end.

        After its start it takes the memory in the background.
        """
        answer = await self._call("/resume_memory_occupation", {}, self._control, CONTROL_TIMEOUT_S)
        return str(answer.get("state"))

    async def prepare_weights(self, path: str, label: str) -> None:
        """Let the server's node read published weights, while the server generates.

        Raises Damaged if they can't be built from the published files.
        """
        body = {"model_path": path, "weight_version": label}
        await self._call("/prepare_weights", body, self._control, CONTROL_TIMEOUT_S)

    async def update_weights(self, path: str, label: str, keep_cache: bool = False) -> None:
        """Load weights from a path. Raises RequestRefused if the server kept its old weights."""
        body = {"model_path": path, "weight_version": label, "flush_cache": not keep_cache}
        await self._call("/update_weights_from_disk", body, self._control, CONTROL_TIMEOUT_S)

    async def switch_weights(self, path: str, label: str, mode: PauseMode) -> tuple[str, float]:
        """Pause, load weights from a path, and resume; return the version and the seconds of the pause.

        Raises RequestRefused if the server kept its old weights.
        """
        body = {"model_path": path, "weight_version": label, "flush_cache": mode != "in_place"}
        body["pause_mode"] = mode
        answer = await self._call("/switch_weights", body, self._control, CONTROL_TIMEOUT_S)
        return str(answer.get("weight_version")), float(answer.get("paused_s", 0.0))

    async def hold_weights(self, label: str, path: str = "") -> None:
        """Let the server stay at a version, which it loads from a path if needed; "" ends that.

        Raises RequestRefused if it can't load them.
        """
        body = {"model_path": path, "weight_version": label}
        await self._call("/hold_weights", body, self._control, CONTROL_TIMEOUT_S)

    async def join_group(self, name: str, where: tuple[str, int], size: int, backend: str) -> None:
        """Let the server's ranks join a process group of `size` ranks, whose rank 0 is the trainer."""
        body = {"master_address": where[0], "master_port": where[1], "rank_offset": 1, "world_size": size}
        body |= {"group_name": name, "backend": backend}
        await self._call("/init_weights_update_group", body, self._control, 1.5 * JOIN_S)

    async def leave_group(self, name: str) -> None:
        await self._call("/destroy_weights_update_group", {"group_name": name}, self._control, JOIN_S)

    async def begin_update(self, label: str) -> None:
        """Begin to send weights over the process group, in buckets; the server must be paused.

        Until `end_update` returns, it has a mixture of weights and does not resume.
        """
        await self._call("/begin_weight_update", {"weight_version": label}, self._control, CONTROL_TIMEOUT_S)

    async def receive_bucket(self, body: dict[str, Any]) -> None:
        """Let the server receive one bucket, which the trainer sends meanwhile."""
        await self._call("/update_weights_from_distributed", body, self._control, 2 * BUCKET_S)

    async def end_update(self) -> None:
        await self._call("/end_weight_update", {}, self._control, CONTROL_TIMEOUT_S)

    async def model_info(self) -> dict[str, Any]:
        return await self._call("/model_info", None, self._data, 30.0)

    async def health(self, timeout_s: float = 5.0) -> dict[str, Any]:
        """Return state, epoch and weight version, even while paused. Raises ServerUnavailable for 503."""
        return await self._call("/health", None, self._data, timeout_s)

    async def _call(
        self, path: str, body: dict[str, Any] | None, headers: dict[str, str], timeout_s: float | None = None
    ) -> Any:
        """POST `body`, or GET if it is None."""
        import aiohttp

        method = "GET" if body is None else "POST"
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=net.SILENCE_S)
        with self._translate_errors(path, timeout_s):
            async with self._session.request(
                method, self.url + path, json=body, headers=headers, timeout=timeout
            ) as response:
                answer = await response.json(content_type=None)
                status = response.status
        return self._check_answer(path, status, answer)

    @contextlib.contextmanager
    def _translate_errors(self, path: str, timeout_s: float | None) -> Iterator[None]:
        """Raise ServerUnavailable if no answer came, and ServerLost if it broke off."""
        import aiohttp

        try:
            yield
        except aiohttp.ConnectionTimeoutError as error:
            raise ServerUnavailable(f"no connection to {self.url}{path} within {net.SILENCE_S} s") from error
        except aiohttp.WSServerHandshakeError as error:
            kind = RequestRefused if error.status in (401, 403, 404) else ServerUnavailable
            raise kind(
                f"{self.url} refused the WebSocket connection: {error.status} {error.message}"
            ) from error
        except aiohttp.ClientConnectorError as error:
            raise ServerUnavailable(f"{self.url}{path}: {type(error).__name__}: {error}") from error
        except TimeoutError as error:
            raise ServerUnavailable(f"{self.url}{path} did not answer within {timeout_s} s") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise ServerLost(f"{self.url}{path}: {type(error).__name__}: {error}") from error

    def _check_answer(self, path: str, status: int, answer: Any) -> Any:
        if status == 200:
            return answer
        message = f"{self.url}{path} answered {status}: {answer}"
        if status == DAMAGED_STATUS and isinstance(answer, dict) and answer.get("error") == "damaged":
            raise Damaged(message)
        if status == 503 and isinstance(answer, dict) and answer.get("error") == "stale":
            raise ServerStale(message)
        if status in (408, 429) or status >= 500:
            raise ServerUnavailable(message)
        raise (InputRefused if status in (400, 413, 422) else RequestRefused)(message)
