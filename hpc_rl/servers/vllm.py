"""The vLLM backend: one vLLM server in a subprocess, behind SGLang's native API.

vLLM's API for pausing and weight updates has no key. So the server opens no port: it listens on a socket in a
directory that only its user can enter. If a replica spans nodes, each of them has such a process; only the
first one's gets requests (members.py). Not supported: log-probabilities with top_p, top_k or min_p (vLLM
reports them over the remaining tokens only).
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any, ClassVar

import aiohttp

from hpc_rl.config.options.experiment import GRPOConfig
from hpc_rl.config.options.inference import VLLMConfig
from hpc_rl.config.vllm_versions import FLAGS, NO_FLAGS
from hpc_rl.core.adapters import is_adapter
from hpc_rl.core.errors import RequestRefused, RoleFailed
from hpc_rl.servers.base import Answer, Receiver, ReplicaPlace
from hpc_rl.servers.client import BUCKET_S, JOIN_S
from hpc_rl.servers.loaded_adapters import NUM_AT_ONCE, LoadedAdapters, gets_adapters, name_adapter
from hpc_rl.servers.server_process import (
    ServerProcess,
    Setting,
    choose_table,
    find_tokenizer,
    list_interface_variables,
    make_arguments,
    select_settings,
)
from hpc_rl.servers.streams import (
    END_S,
    Stream,
    StreamedSample,
    Streams,
    is_continuable,
    wait_for_ends,
)
from hpc_rl.servers.wire import (
    LOGPROBS,
    GivenTokens,
    NativeRequest,
    SendParts,
    convert_to_parts,
    make_answer,
    make_given_answer,
    make_refusal,
    make_unknown_key_error,
    parse_given,
    parse_pause_mode,
    split,
)

logger = logging.getLogger(__name__)

NAME = "vLLM"
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",  # pause, resume, reload
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",  # for connections among its processes, all on one node
}
# The launcher of the role binds its threads. vLLM's own binding would put a second server on the same cores.
CPU_ENVIRONMENT = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
ADAPTER_ENVIRONMENT = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM reserves memory for
MAX_CPU_ADAPTERS = 8  # versions in CPU memory; an older one would be read again
CPU_KV_CACHE_BYTES = 4 << 30  # without a limit, vLLM takes a share of the host's memory
WORKER_MODULE = "hpc_rl_worker"  # the copy of vllm_worker.py, in the directory of the socket
EXTENSION = f"{WORKER_MODULE}.WorkerExtension"
TRANSFER_ENGINE = "hpc_rl"  # its name there
GROUP_S = JOIN_S + BUCKET_S  # for a call that waits for the trainer
LONGEST_SOCKET = 100  # bytes of its path; the system allows 107
# settings that servers of reward models do not have
OF_GENERATION = (
    *("enable_scale_out", "logprobs_mode", "generation_config", "worker_extension_cls"),
    "weight_transfer_config",
)
MAX_NEW_TOKENS = 128  # SGLang's default
_SAMPLING = {  # SGLang's name -> vLLM's
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
    **{
        name: name
        for name in (
            *("temperature", "top_p", "top_k", "min_p", "n", "stop", "stop_token_ids", "ignore_eos"),
            *("repetition_penalty", "frequency_penalty", "presence_penalty", "logit_bias"),
            *("skip_special_tokens", "spaces_between_special_tokens"),
        )
    },
}
_ALL_TOKENS = {"top_p": (1,), "top_k": (-1, 0), "min_p": (0,)}
_SEED_STEP = 0x9E3779B97F4A7C15


def make_settings(
    config: VLLMConfig, device: str, tensor_parallel_size: int, index: int, receives: bool = False
) -> dict[str, Setting]:
    """Return the settings from the configuration, plus settings for a CPU. None is left to vLLM.

    If it `receives`, weights come over a process group.
    """
    own = {name: value for name, value in sorted(vars(config).items()) if name not in NO_FLAGS}
    settings: dict[str, Setting | None] = {
        **own,
        "seed": config.seed + index,
        "tensor_parallel_size": tensor_parallel_size,
        "enable_scale_out": True,  # the API of token ids
        "logprobs_mode": "processed_logprobs",  # at the temperature of the request
        # defaults of requests must not come from the model's generation config
        "generation_config": "vllm",
        "worker_extension_cls": EXTENSION,
    }
    if device == "cpu":
        settings["kv_cache_memory_bytes"] = config.kv_cache_memory_bytes or CPU_KV_CACHE_BYTES
    if receives:
        settings["weight_transfer_config"] = json.dumps({"backend": TRANSFER_ENGINE})
    return select_settings(settings)


def make_node_settings(place: ReplicaPlace) -> dict[str, Setting]:
    """Return the settings of one node of a replica that spans nodes."""
    host, port = place.rendezvous
    found: dict[str, Setting] = {"nnodes": place.num_nodes, "node_rank": place.node_rank}
    found |= {"master_addr": host, "master_port": port, "distributed_executor_backend": "mp"}
    return found | ({"headless": True} if place.node_rank else {})


def make_adapter_settings(rank: int) -> dict[str, Setting]:
    """Return the settings of a server that gets adapters."""
    largest = next(one for one in ADAPTER_RANKS if one >= rank)
    loaded = {"max_loras": NUM_AT_ONCE, "max_cpu_loras": MAX_CPU_ADAPTERS}
    return {"enable_lora": True, "max_lora_rank": largest, **loaded}


def make_sampling(request: NativeRequest, with_logprobs: bool) -> dict[str, Any]:
    """Return vLLM's sampling parameters for a request. Raises RequestRefused."""
    said = {key: value for key, value in (request.sampling or {}).items() if value is not None}
    for key in said:
        if key not in _SAMPLING:
            raise make_unknown_key_error(key, _SAMPLING)
    sampling = {"max_tokens": MAX_NEW_TOKENS} | {_SAMPLING[key]: value for key, value in said.items()}
    if with_logprobs:
        sampling["logprobs"] = 0  # only the sampled token's
        for key, neutral in _ALL_TOKENS.items() if sampling.get("temperature", 1) else ():
            if sampling.get(key, neutral[0]) not in neutral:
                problem = (
                    f"with {sampling[key]!r} vLLM's log-probabilities would leave tokens out; "
                    "remove this parameter"
                )
                raise RequestRefused(f"sampling key {key!r}: {problem}")
    if sampling.get("ignore_eos"):
        sampling.pop("stop_token_ids", None)
    if isinstance(sampling.get("seed"), int):
        # a resubmitted sequence must not repeat the random numbers of its beginning
        sampling["seed"] = (sampling["seed"] + len(request.ids) * _SEED_STEP) % (1 << 63)
    return {**sampling, "detokenize": bool(sampling.get("stop"))}


def convert_to_native(
    rid: str, answer: dict[str, Any], label: str, has_adapter: bool = False
) -> list[dict[str, Any]]:
    """Convert vLLM's answer to SGLang's form, one answer per sample.

    `label` is of the weights at the beginning; with an adapter they stay the same.
    """
    return [
        make_answer(
            rid,
            choice["token_ids"],
            [one["logprob"] for one in choice["logprobs"]["content"] or ()] if choice["logprobs"] else None,
            _make_finish(choice["finish_reason"], choice["stop_reason"], choice["token_ids"]),
            [(label, 0, len(choice["token_ids"]))]
            if has_adapter
            else [(one["version"], one["start"], one["end"]) for one in choice["weight_versions"] or ()],
            prompt_tokens=answer["usage"]["prompt_tokens"],
            weight_version=label,  # for samples without tokens
        )
        for choice in answer["choices"]
    ]


def _make_finish(kind: str, matched: int | str | None, made: list[int]) -> dict[str, Any]:
    if kind == "stop":
        return {"type": kind, "matched": made[-1] if matched is None and made else matched}
    return {"type": kind, "length": len(made)} if kind == "length" else {"type": kind}


def take_given(entries: list[dict[str, Any] | None], given: GivenTokens, top_k: int) -> dict[str, Any]:
    """Return the log-probabilities of given tokens from vLLM's entries, one of each input token.

    An entry has the likely tokens by id, and the given one, which may be one of them.
    """
    logprobs, top_ids, top_logprobs = [], [], []
    num = len(given.ids) - given.start
    for token, entry in zip(given.ids[given.start :], entries[-num:], strict=True):
        assert entry is not None, "only the first token has no entry"
        logprobs.append(entry[str(token)]["logprob"])
        if top_k:
            best = sorted(entry.items(), key=lambda one: one[1]["rank"])[:top_k]
            top_ids.append([int(name) for name, _ in best])
            top_logprobs.append([one["logprob"] for _, one in best])
    return make_given_answer(logprobs, top_ids, top_logprobs)


def _take_event(
    sample: StreamedSample, num_prompt: int, label: str, has_adapter: bool, event: dict[str, Any]
) -> None:
    """Add the new tokens of an event."""
    (choice,) = event["choices"]
    ids, entries = choice["token_ids"] or [], (choice["logprobs"] or {}).get("content") or ()
    sample.ids += ids
    sample.logprobs += [one["logprob"] for one in entries[: len(ids)]]
    if choice["finish_reason"] is not None:
        sample.end = {
            "id": sample.rid,
            "finish_reason": _make_finish(choice["finish_reason"], choice["stop_reason"], sample.ids),
            "weight_versions": None if has_adapter else choice["weight_versions"],
            "weight_version": label,
            "prompt_tokens": num_prompt,
        }
        if sample.end["finish_reason"]["type"] == "length":
            sample.end["finish_reason"]["length"] = sample.num_made


def make_internal_id(rid: str) -> str:
    return f"generate-tokens-{rid}"  # vLLM's prefix of that API


def refuse_text(_text: str) -> list[int]:
    raise RequestRefused("vLLM servers take no text; send input_ids")


@dataclass(kw_only=True)
class VLLMBackend:
    """See Backend."""

    process: ServerProcess
    settings: dict[str, Setting]
    version: str = ""  # the version for which the options were checked
    extra_args: Sequence[str] = ()
    receiver: Receiver | None = None

    makes_initial_weights: ClassVar[bool] = False
    socket: Path | None = None
    _model: str = ""
    _label: str = ""
    _is_paused: bool = False
    _group: str = ""  # the process group that vLLM has joined
    _last: dict[str, Any] = field(default_factory=dict)  # the newest bucket
    _is_receiving: bool = False  # vLLM waits for the rest of a version
    _stuck: str = ""  # why vLLM will not answer any more
    _control: asyncio.Lock = field(default_factory=asyncio.Lock)
    _streams: Streams = field(default_factory=Streams)
    _adapters: LoadedAdapters = field(default_factory=LoadedAdapters)

    @classmethod
    def create(cls, config: GRPOConfig, place: ReplicaPlace) -> VLLMBackend:
        env = ENVIRONMENT | (CPU_ENVIRONMENT if place.device == "cpu" else {})
        num_ranks, receiver = max(1, place.num_gpus), None
        if config.actor.weight_update_mode == "xccl" and not config.actor.is_critic:
            receiver = Receiver("gloo" if place.device == "cpu" else "nccl", num_ranks)
        if receiver or place.num_nodes > 1:
            env |= list_interface_variables(place.address)
        settings = make_settings(config.vllm, place.device, num_ranks, place.index, receiver is not None)
        if place.num_nodes > 1:
            settings |= make_node_settings(place)
            env["VLLM_HOST_IP"] = place.address
        if gets_adapters(config.actor):
            settings |= make_adapter_settings(config.actor.lora_rank)
            env |= ADAPTER_ENVIRONMENT
        if place.shares_gpus and place.device != "cpu":  # if nothing can be released
            settings["enable_sleep_mode"] = True
        if config.actor.is_critic:
            settings = {name: value for name, value in settings.items() if name not in OF_GENERATION}
            settings["runner"] = "pooling"
        return cls(
            process=ServerProcess.create(NAME, config, place, env),
            settings=settings | {"tokenizer": find_tokenizer(config)},
            version=config.vllm.version,
            extra_args=config.vllm.extra_args,
            receiver=receiver,
        )

    async def start(self, path: str, version: str) -> None:
        self.socket = make_private_socket()
        argv = await self._make_command(self.socket.parent, {"model": path, "uds": str(self.socket)})
        # no idle connection: vLLM may close it in the moment of a request, and the request would fail
        connector = aiohttp.UnixConnector(str(self.socket), limit=0, force_close=True)
        session = aiohttp.ClientSession(connector=connector)
        await self.process.start(argv, "http://vllm", session)
        self._model = path
        if self.settings.get("runner") == "pooling":
            return
        await self._change_label(version or "none")
        self._streams.start(self._label)
        first = NativeRequest([0], "", {"max_new_tokens": 1, "ignore_eos": True})
        status, answer = await self._sample(first, with_logprobs=True)
        if status != 200:
            raise RoleFailed(
                f"vLLM has started, but its first generation failed: {answer}; see {self.process.log}"
            )

    async def start_member(self, path: str) -> None:
        self.socket = make_private_socket()  # of the directory of its worker; headless, it does not listen
        self.process.launch_member(await self._make_command(self.socket.parent, {"model": path}))

    async def _make_command(self, folder: Path, own: dict[str, Setting]) -> list[str]:
        """Write the worker's extension into a private directory; return the arguments."""
        flags, warning = choose_table(FLAGS, NAME, await self.process.version(), self.version)
        if warning:
            logger.warning(warning)
        if "worker_extension_cls" in self.settings:
            env = self.process.env
            # the code of a trial is in a zip file
            source = resources.files("hpc_rl.servers").joinpath("vllm_worker.py").read_text()
            (folder / f"{WORKER_MODULE}.py").write_text(source)
            env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(folder), env.get("PYTHONPATH"))))
        arguments = make_arguments(own | self.settings, self.extra_args, flags)
        return ["-m", "vllm.entrypoints.cli.main", "serve", *arguments]

    async def prepare_changes(self, folder: Path) -> None:
        """Do nothing: the next version is loaded from the node's copy."""

    def alive(self) -> str:
        return self._stuck or self.process.alive()

    async def stop(self) -> None:
        await self.process.stop()
        if self.socket:
            await asyncio.to_thread(shutil.rmtree, self.socket.parent, ignore_errors=True)

    async def request(self, path: str, body: dict[str, Any] | None) -> Answer:
        handler = self._HANDLERS.get(path)
        if handler is None:
            return 404, make_refusal(f"no such path: {path}")
        try:
            return await handler(self, body or {})
        except RequestRefused as error:
            return 400, make_refusal(str(error))

    # generation
    async def _generate(self, body: dict[str, Any]) -> Answer:
        requests, batched = split(body, "vLLM servers", refuse_text)
        with_logprobs = bool(body.get("return_logprob"))
        answers = await asyncio.gather(*(self._sample(one, with_logprobs) for one in requests))
        failed = next((answer for answer in answers if answer[0] != 200), None)
        if failed:
            return failed
        samples = [sample for _, made in answers for sample in made]
        return 200, samples if batched or len(samples) > 1 else samples[0]

    async def _sample(self, request: NativeRequest, with_logprobs: bool) -> Answer:
        rid, label = request.rid or uuid.uuid4().hex, self._label
        body = {
            "request_id": rid,
            "token_ids": request.ids,
            "sampling_params": make_sampling(request, with_logprobs),
            **self._choose_weights(label),
        }
        has_adapter = self._adapters.has(label)
        with self._adapters.use(label):
            status, answer = await self.process.request("/inference/v1/generate", body)
        label = label if has_adapter else self._label
        return status, convert_to_native(rid, answer, label, has_adapter) if status == 200 else answer

    def _choose_weights(self, label: str) -> dict[str, str]:
        """Return the fields of a request that choose the weights and prevent the use of a cache of others."""
        model = {"model": name_adapter(label)} if self._adapters.has(label) else {}
        return {"cache_salt": label, **model}

    async def _compute_logprobs(self, body: dict[str, Any]) -> Answer:
        inputs, top_k = parse_given(body)
        answers = await asyncio.gather(*(self._score_given(one, top_k) for one in inputs))
        failed = next((answer for answer in answers if answer[0] != 200), None)
        return failed or (200, [answer for _, answer in answers])

    async def _score_given(self, given: GivenTokens, top_k: int) -> Answer:
        label = self._label
        body = {
            "token_ids": given.ids,
            "sampling_params": {"max_tokens": 1, "prompt_logprobs": top_k, "detokenize": False},
            **self._choose_weights(label),
        }
        with self._adapters.use(label):
            status, answer = await self.process.request("/inference/v1/generate", body)
        return status, take_given(answer["prompt_logprobs"], given, top_k) if status == 200 else answer

    async def generate(self, body: dict[str, Any], send: SendParts) -> Answer:
        try:
            requests, _ = split(body, "vLLM servers", refuse_text)
            with_logprobs = bool(body.get("return_logprob"))
            sampling = [make_sampling(one, with_logprobs) for one in requests]
        except RequestRefused as error:
            return 400, make_refusal(str(error))
        if any(one.get("n", 1) != 1 for one in sampling):
            status, answer = await self.request("/generate", body)
            return status, convert_to_parts(answer) if status == 200 else answer
        continuable = all(is_continuable(one.sampling) for one in requests)
        async with self._streams.open(
            [one.rid or uuid.uuid4().hex for one in requests], continuable
        ) as stream:
            request = self._stream_all(stream, requests, sampling)
            return await self._streams.relay(stream, request, send)

    async def _stream_all(
        self, stream: Stream, requests: list[NativeRequest], sampling: list[dict[str, Any]]
    ) -> Answer:
        """Stream one request for each sample; return the first error."""
        interval, label = self._streams.interval, self._label
        if stream.label is not None and self._adapters.has(stream.label):
            label = stream.label  # an update may have come since
        has_adapter = self._adapters.has(label)
        with self._adapters.use(label):
            return await self._stream_each(stream, requests, sampling, interval, label, has_adapter)

    async def _stream_each(
        self,
        stream: Stream,
        requests: list[NativeRequest],
        sampling: list[dict[str, Any]],
        interval: int,
        label: str,
        has_adapter: bool,
    ) -> Answer:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(
                    self.process.stream(
                        "/inference/v1/generate",
                        {
                            "request_id": sample.rid,
                            "token_ids": request.ids,
                            "sampling_params": {**parameters, "stream_interval": interval},
                            **self._choose_weights(label),
                            "stream": True,
                        },
                        partial(_take_event, sample, len(request.ids), label, has_adapter),
                    )
                )
                for sample, request, parameters in zip(stream.samples, requests, sampling, strict=True)
            ]
        answers = [task.result() for task in tasks]
        return next((answer for answer in answers if answer[0] != 200), (200, None))

    async def _chat(self, body: dict[str, Any]) -> Answer:
        if body.get("stream"):
            raise RequestRefused("vLLM servers can't stream a chat: remove 'stream'")
        asked = {key: value for key, value in body.items() if key != "model"}  # vLLM knows another name
        label = self._label
        with self._adapters.use(label):
            status, answer = await self.process.request(
                "/v1/chat/completions", {**asked, **self._choose_weights(label)}
            )
        if status == 200:
            label = label if self._adapters.has(label) else self._label
            answer |= {"model": body.get("model") or "default", "metadata": {"weight_version": label}}
        return status, answer

    async def _classify(self, body: dict[str, Any]) -> Answer:
        asked = {"input": body.get("input_ids"), "use_activation": False}  # the score, not a probability
        status, answer = await self.process.request("/classify", asked)
        if status == 200:
            answer = [{"embedding": one["probs"]} for one in answer["data"]]
        return status, answer

    # control
    async def _pause(self, body: dict[str, Any]) -> Answer:
        mode = parse_pause_mode(body)
        async with self._control:
            with self._streams.pausing():
                answer = await self._hold(mode)
                if answer[0] == 200:
                    self._is_paused = True
                    self._streams.pause()
        return answer

    async def _hold(self, mode: str) -> Answer:
        """Pause generation. `retract` also interrupts streams, and drops the cache of running requests."""
        if mode == "abort":
            return await self.process.request("/pause?mode=abort", {})
        answer = await self.process.request("/pause?mode=keep&clear_cache=false", {})
        if mode == "retract" and answer[0] == 200:
            await self._interrupt()
            answer = await self._drop_cache("?reset_running_requests=true")
        return answer

    async def _interrupt(self) -> None:
        """End running streams with their tokens so far: an update must not meet them."""
        deadline = time.monotonic() + END_S
        while (streams := self._streams.list_continuable()) and time.monotonic() < deadline:
            ids = [make_internal_id(rid) for stream in streams for rid in stream.list_running()]
            # vLLM ignores the id of a request that has not arrived yet
            await self.process.request("/abort_requests", {"request_ids": ids})
            await wait_for_ends(streams, 0.5)

    async def _drop_cache(self, options: str = "") -> Answer:
        status, answer = await self.process.request(f"/reset_prefix_cache{options}", {})
        if status == 200 and not answer.get("success"):
            return 400, make_refusal("the KV cache can't be flushed, because running requests use it")
        return status, answer

    async def _continue(self, _body: dict[str, Any]) -> Answer:
        async with self._control:
            self._streams.resume()
            answer = await self.process.request("/resume", {})
            self._is_paused = self._is_paused and answer[0] != 200
        return answer

    async def _release_memory(self, _body: dict[str, Any]) -> Answer:
        """Drop weights and cache of a paused vLLM; the weights must be loaded again."""
        async with self._control:
            return await self.process.request("/sleep?level=2&mode=keep", {})

    async def _resume_memory(self, body: dict[str, Any]) -> Answer:
        tags = "&".join(f"tags={tag}" for tag in body.get("tags") or ())
        async with self._control:
            return await self.process.request(f"/wake_up?{tags}", {})

    async def _abort(self, body: dict[str, Any]) -> Answer:
        rid, everything = body.get("rid") or "", bool(body.get("abort_all"))
        if not rid and not everything:
            return 200, {"status": "ok"}
        ids = [] if everything else [make_internal_id(rid)]
        return await self.process.request("/abort_requests", {"request_ids": ids})

    async def _update(self, body: dict[str, Any]) -> Answer:
        path, label = body.get("model_path"), body.get("weight_version")
        if isinstance(path, str) and is_adapter(Path(path)):
            async with self._control:
                return await self._load_adapter(path, str(label))
        # a failed reload would end vLLM
        if not isinstance(path, str) or not await asyncio.to_thread(is_checkpoint, Path(path)):
            raise RequestRefused(f"model_path {path!r} has no weights, so the server keeps its old ones")
        async with self._control:
            if not self._is_paused:
                await self._hold("retract")
            loaded = False
            self._streams.begin_update()
            try:
                status, answer = await self._reload(path)
                if status != 200:
                    return 400, {"success": False, "message": f"vLLM did not load {path}", **answer}
                self._model = path
                await self._change_label(self._label if label is None else str(label))
                loaded = True
                if body.get("flush_cache", True):
                    await self._drop_cache()
            finally:
                self._streams.end_update(self._label if loaded else None)
                if not self._is_paused:
                    await self.process.request("/resume", {})
        return 200, {"success": True, "message": "updated", "num_paused_requests": 0}

    async def _load_adapter(self, path: str, label: str) -> Answer:
        """Load a version of the adapter for new requests; running ones keep theirs."""
        call = {"lora_name": name_adapter(label), "lora_path": path}
        status, answer = await self.process.request("/v1/load_lora_adapter", call)
        if status != 200:
            return 400, {"success": False, "message": f"vLLM did not load the adapter {path}: {answer}"}
        self._adapters.add(label)
        self._model = path
        self._label = label
        self._streams.enter_adapter(label)
        for old in self._adapters.take_unused():
            await self.process.request("/v1/unload_lora_adapter", {"lora_name": name_adapter(old)})
        return 200, {"success": True, "message": "updated", "num_paused_requests": 0}

    async def _reload(self, path: str) -> Answer:
        if self._is_receiving:
            status, answer = await self._abandon()
            if status != 200:
                return status, answer
        call = {"method": "reload_weights", "kwargs": {"weights_path": path}}
        answer = await self.process.request("/collective_rpc", call)
        return await self._pack() if answer[0] == 200 else answer

    async def _pack(self) -> Answer:
        if "kv_cache_memory_bytes" not in self.settings or "worker_extension_cls" not in self.settings:
            return 200, {}
        return await self.process.request("/collective_rpc", {"method": "pack_output_layer"})

    # weights over a process group, by the calls of SGLang
    async def _join(self, body: dict[str, Any]) -> Answer:
        names = ("master_address", "master_port", "rank_offset", "world_size", "group_name", "backend")
        info = {name: body.get(name) for name in names}
        answer = await self._ask_with_limit("/init_weight_transfer_engine", {"init_info": info})
        self._group = str(body.get("group_name")) if answer[0] == 200 else ""
        return answer

    async def _leave(self, body: dict[str, Any]) -> Answer:
        if body.get("group_name") != self._group:
            return 200, {"success": True, "message": "vLLM has left this group"}
        self._group = ""
        return await self._ask_with_limit("/shutdown_weight_transfer_engine", {})

    async def _begin(self, _body: dict[str, Any]) -> Answer:
        async with self._control:
            if self._is_receiving:
                await self._abandon()
            self._streams.begin_update()
            answer = await self.process.request("/start_weight_update", {})
            self._is_receiving = answer[0] == 200
        return answer

    async def _receive(self, body: dict[str, Any]) -> Answer:
        info = {name: body.get(name) for name in ("names", "dtypes", "shapes")}
        answer = await self._ask_with_limit("/update_weights", {"update_info": info})
        self._last = body
        return answer

    async def _end(self, _body: dict[str, Any]) -> Answer:
        label, loaded = self._last.get("weight_version"), False
        async with self._control:
            try:
                answer = await self.process.request("/finish_weight_update", {})
                self._is_receiving = self._is_receiving and answer[0] != 200
                answer = await self._pack() if answer[0] == 200 else answer
                if answer[0] != 200:
                    return answer
                await self._change_label(self._label if label is None else str(label))
                loaded = True
                if self._last.get("flush_cache", True):
                    await self._drop_cache()
            finally:
                self._streams.end_update(self._label if loaded else None)
        return 200, {"success": True, "message": "updated"}

    async def _abandon(self) -> Answer:
        answer = await self.process.request("/collective_rpc", {"method": "abandon_weight_update"})
        self._is_receiving = answer[0] != 200
        return answer

    async def _ask_with_limit(self, path: str, body: dict[str, Any]) -> Answer:
        try:
            async with asyncio.timeout(GROUP_S):
                return await self.process.request(path, body)
        except TimeoutError:
            problem = f"vLLM did not answer {path} within {GROUP_S:.0f} s"
            self._stuck = f"{problem}, probably because it waits for a trainer that was lost"
            return 503, make_refusal(self._stuck)

    async def _change_label(self, label: str) -> None:
        """Set the label of the loaded weights, which vLLM reports with each token."""
        status, answer = await self.process.request("/update_weight_version", {"new_version": label})
        if status != 200:
            raise RoleFailed(f"vLLM can't label its weights {label}: {answer}; see {self.process.log}")
        self._label = label

    async def _flush(self, _body: dict[str, Any]) -> Answer:
        return await self._drop_cache()

    async def _check_weights(self, _body: dict[str, Any]) -> Answer:
        """Return the checksums of each rank's parameters, as SGLang's call does."""
        status, answer = await self.process.request("/collective_rpc", {"method": "compute_checksums"})
        if status == 200:
            ranks = [{"checksums": checksums} for checksums in answer["results"]]
            answer = {"success": True, "message": "computed", "ranks": ranks}
        return status, answer

    async def _info(self, _body: dict[str, Any]) -> Answer:
        return 200, {"model_path": self._model, "is_generation": True, "weight_version": self._label}

    _HANDLERS: ClassVar = {
        "/generate": _generate,
        "/v1/chat/completions": _chat,
        LOGPROBS: _compute_logprobs,
        "/classify": _classify,
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


def make_private_socket() -> Path:
    """Return the path of a socket in a new directory on this node that only this user can enter."""
    folder = Path(tempfile.mkdtemp(prefix="hpc-rl-vllm-"))
    if len(bytes(folder)) > LONGEST_SOCKET - len("/http"):
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix="hpc-rl-vllm-", dir="/tmp"))
    return folder / "http"


def is_checkpoint(folder: Path) -> bool:
    return (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))
