"""The inference servers of an environment: token ids in, turns out, and the plain OpenAI API.

Requests go to the server with the fewest open sequences. A failed request is sent again, to another server if
there are several. Training and evaluation have separate limits.
"""

import asyncio
import logging
import os
import random
import statistics
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from hpc_rl.atropos.settings import APIServerConfig
from hpc_rl.core.errors import ConfigError, RequestRefused, ServerUnavailable
from hpc_rl.core.gate import Gate
from hpc_rl.core.types import Turn
from hpc_rl.schedulers.hostlist import expand
from hpc_rl.servers.client import append_spans, open_session
from hpc_rl.servers.wire import parse_spans

logger = logging.getLogger(__name__)

ATTEMPTS = 3
LONGEST_PAUSE_S = 10.0  # between two attempts
FIRST_PORT = 9000  # ports of the servers on a node, if Slurm's environment names the nodes
LOCAL_URLS = [f"http://localhost:{port}/v1" for port in range(9004, 9008)]


class InferenceServer:
    """One server, with its limits and the times of its latest requests."""

    def __init__(self, config: APIServerConfig) -> None:
        if not config.base_url:
            raise ConfigError("openai.base_url is not set; give the URL of an inference server or a gateway.")
        if config.server_type != "sglang":
            raise ConfigError(
                f"openai.server_type {config.server_type!r} can't be used, because only SGLang's native API "
                "returns token ids. Set it to sglang, and give the URL of an SGLang server or of a trial's "
                "gateway, which offers this API for every kind of server."
            )
        self.config = config
        self.base_url = config.base_url.rstrip("/")
        # the native API has the same root as the OpenAI API
        self.native_url = self.base_url.removesuffix("/v1")
        self.weight = 1.0
        self.ignores_n = config.n_kwarg_is_ignored
        self.num_running = 0
        self.latencies_s: deque[float] = deque(maxlen=config.rolling_buffer_length)
        self._training = Gate(lambda: self._find_limit(config.num_max_requests_at_once))
        self._evaluation = Gate(lambda: self._find_limit(config.num_requests_for_eval))

    def _find_limit(self, most: int) -> int:
        return max(1, round(most * self.weight))

    async def post(
        self, session: aiohttp.ClientSession, url: str, body: dict[str, Any], evaluate: bool
    ) -> Any:
        """Return the JSON answer to one request.

        Raises RequestRefused for a status below 500, ServerUnavailable for a failure that may pass.
        """
        headers = {"Authorization": f"Bearer {self.config.api_key}"} if self.config.api_key else {}
        limit = aiohttp.ClientTimeout(total=self.config.timeout)
        async with self._evaluation if evaluate else self._training:
            begin = time.monotonic()
            try:
                async with session.post(url, json=body, headers=headers, timeout=limit) as response:
                    if 400 <= response.status < 500:
                        text = (await response.text())[:400]
                        raise RequestRefused(f"{url} answered {response.status}: {text}")
                    response.raise_for_status()
                    answer = await response.json()
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                reason = str(error) or type(error).__name__
                raise ServerUnavailable(f"{url} failed: {reason}") from error
        self.latencies_s.append(time.monotonic() - begin)
        return answer


@dataclass(frozen=True)
class ServerMetrics:
    """Latest requests of one server."""

    url: str
    num_running: int
    num_requests: int
    median_latency_s: float


class InferenceServers:
    """All servers of an environment. Use it as an async context manager.

    Args:
        configs: The servers.
        max_n_completions: Most completions in one request.
    """

    def __init__(self, configs: Sequence[APIServerConfig], max_n_completions: int = 8) -> None:
        if not configs:
            raise ConfigError(
                "the environment has no inference server: give openai.base_url, or run with testing=true."
            )
        self.servers = [InferenceServer(config) for config in configs]
        self.max_n_completions = max_n_completions
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> "InferenceServers":
        self._session = open_session()
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._session is not None
        await self._session.close()

    async def generate(
        self, input_ids: list[int], n: int = 1, evaluate: bool = False, **sampling: Any
    ) -> list[Turn]:
        """Return n completions of one input, sampled with SGLang's parameters.

        Raises RequestRefused, ServerUnavailable.
        """
        body = {
            "input_ids": input_ids,
            "return_logprob": True,
            "return_text_in_logprobs": False,
        }

        def part(count: int) -> dict[str, Any]:
            return {**body, "sampling_params": {**sampling, "n": count}}

        answers = await self._request_in_parts("native", "/generate", part, n, evaluate)
        return [_parse_turn(turn) for answer in answers for turn in _split_native_answers(answer)]

    def change_weight(self, weight: float) -> None:
        """Use only this share of each server's request limit, because others use the server too."""
        for server in self.servers:
            server.weight = weight

    async def chat_completion(self, evaluate: bool = False, n: int = 1, **body: Any) -> dict[str, Any]:
        """Return an OpenAI chat completion with n choices. Raises the same as generate."""
        return await self._request_openai("/chat/completions", body, n, evaluate)

    async def completion(self, evaluate: bool = False, n: int = 1, **body: Any) -> dict[str, Any]:
        """Return an OpenAI completion with n choices. Raises the same as generate."""
        return await self._request_openai("/completions", body, n, evaluate)

    def metrics(self) -> list[ServerMetrics]:
        return [
            ServerMetrics(
                server.base_url,
                server.num_running,
                len(server.latencies_s),
                statistics.median(server.latencies_s) if server.latencies_s else 0.0,
            )
            for server in self.servers
        ]

    async def _request_openai(
        self, path: str, body: dict[str, Any], n: int, evaluate: bool
    ) -> dict[str, Any]:
        answers = await self._request_in_parts(
            "openai", path, lambda count: {**body, "n": count}, n, evaluate
        )
        first = answers[0]
        choices = [choice for answer in answers for choice in answer["choices"]]
        return {**first, "choices": [{**choice, "index": i} for i, choice in enumerate(choices)]}

    async def _request_in_parts(self, api: str, path: str, body: Any, n: int, evaluate: bool) -> list[Any]:
        """Return the answers of as many requests as n completions need."""
        most = 1 if any(server.ignores_n for server in self.servers) else self.max_n_completions
        counts = [min(most, n - start) for start in range(0, n, most)]
        answers = await asyncio.gather(
            *(self._post(api, path, body(count), count, evaluate) for count in counts)
        )
        num_made = sum(_count_completions(api, answer) for answer in answers)
        if 0 < num_made < n and most > 1:
            answers += await self._request_in_parts(api, path, body, n - num_made, evaluate)
        return answers

    async def _post(self, api: str, path: str, body: dict[str, Any], count: int, evaluate: bool) -> Any:
        assert self._session is not None, "use `async with`"
        failed: list[InferenceServer] = []
        for attempt in range(ATTEMPTS):
            server = self._choose_server(failed)
            base = server.base_url if api == "openai" else server.native_url
            if api == "openai":
                body = {"model": server.config.model_name, **body}
            server.num_running += count
            try:
                answer = await server.post(self._session, base + path, body, evaluate)
                if 0 < _count_completions(api, answer) < count and not server.ignores_n:
                    server.ignores_n = True
                    form = (
                        "%s returned fewer completions than n = %d; from now on it is asked for one at a time"
                    )
                    logger.warning(form, server.base_url, count)
                return answer
            except ServerUnavailable as error:
                failed.append(server)
                if attempt == ATTEMPTS - 1:
                    raise
                logger.warning("%s; the request is sent again", error)
                await asyncio.sleep(random.uniform(0.1, min(LONGEST_PAUSE_S, 2.0**attempt)))
            finally:
                server.num_running -= count

    def _choose_server(self, failed: list[InferenceServer]) -> InferenceServer:
        candidates = [server for server in self.servers if server not in failed] or self.servers
        return min(candidates, key=lambda server: server.num_running)


class MadeUpServers(InferenceServers):
    """Random tokens in place of a server, to try an environment out.

    Args:
        vocabulary: Number of distinct tokens.
        seed: Seed of the tokens.
    """

    def __init__(self, vocabulary: int, seed: int = 0) -> None:
        self.servers = []
        self._vocabulary = vocabulary
        self._random = random.Random(seed)

    async def __aenter__(self) -> "MadeUpServers":
        return self

    async def __aexit__(self, *_: object) -> None: ...

    async def generate(
        self, input_ids: list[int], n: int = 1, evaluate: bool = False, **sampling: Any
    ) -> list[Turn]:
        turns = []
        for _ in range(n):
            count = self._random.randint(1, min(16, int(sampling.get("max_new_tokens", 16))))
            ids = [self._random.randrange(self._vocabulary) for _ in range(count)]
            turns.append(Turn(ids, [-1.0] * count, [("0.0", 0, count)], "stop"))
        return turns

    async def _request_openai(
        self, path: str, body: dict[str, Any], n: int, evaluate: bool
    ) -> dict[str, Any]:
        content = {"message": {"role": "assistant", "content": "made up"}, "text": "made up"}
        return {"choices": [{"index": i, "finish_reason": "stop", **content} for i in range(n)]}


def find_job_servers(config: APIServerConfig, environ: Mapping[str, str]) -> list[APIServerConfig]:
    """Return the servers of the Slurm job, one for each tensor-parallel group of GPUs.

    As in atroposlib, they run on the nodes after the first NUM_TRAINING_NODES, at ports from 9000 on; each
    uses INFER_TP GPUs. With fewer than two nodes they are on this host. Raises ConfigError.
    """
    hosts = expand(environ.get("SLURM_JOB_NODELIST", ""))
    if len(hosts) < 2:
        return [_make_local_server(config, url) for url in LOCAL_URLS]
    num_training = _count(environ, "NUM_TRAINING_NODES", 0)
    # "8", "8(x2)", or a list of GPU numbers
    on_node = environ.get("SLURM_GPUS_ON_NODE", "8").partition("(")[0]
    num_gpus = len(on_node.split(",")) if "," in on_node else int(on_node)
    num_servers = max(1, num_gpus // max(1, _count(environ, "INFER_TP", 1)))
    if num_training >= len(hosts):
        raise ConfigError(
            f"NUM_TRAINING_NODES is {num_training}, but the job has {len(hosts)} nodes: no node is left for "
            "servers. Lower it, or give openai.base_url."
        )
    return [
        _make_local_server(config, f"http://{host}:{FIRST_PORT + number}/v1")
        for host in hosts[num_training:]
        for number in range(num_servers)
    ]


def find_servers(
    configs: Sequence[APIServerConfig], slurm: bool, environ: Mapping[str, str] = os.environ
) -> list[APIServerConfig]:
    """Return the servers to use: the configured URLs, else the Slurm job's servers, else this host's."""
    with_url = [config for config in configs if config.base_url]
    if with_url:
        return with_url
    template = configs[0] if configs else APIServerConfig()
    return find_job_servers(template, environ if slurm else {})


def _make_local_server(config: APIServerConfig, url: str) -> APIServerConfig:
    return APIServerConfig(**{**vars(config), "base_url": url})


def _count(environ: Mapping[str, str], name: str, default: int) -> int:
    value = environ.get(name, str(default))
    if not value.isdecimal():
        raise ConfigError(f"the environment variable {name} is {value!r}; it must be a whole number.")
    return int(value)


def _split_native_answers(answer: Any) -> list[Any]:
    return answer if isinstance(answer, list) else [answer]


def _count_completions(api: str, answer: Any) -> int:
    return len(_split_native_answers(answer) if api == "native" else answer["choices"])


def _parse_turn(answer: dict[str, Any]) -> Turn:
    """Return the turn of a native answer; its tokens come from the log-probabilities."""
    meta = answer["meta_info"]
    tokens = meta["output_token_logprobs"]
    turn = Turn(
        [entry[1] for entry in tokens], [entry[0] for entry in tokens], [], meta["finish_reason"]["type"]
    )
    append_spans(turn.versions, parse_spans(meta, len(tokens)), 0)
    return turn
