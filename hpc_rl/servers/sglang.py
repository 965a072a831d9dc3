"""The SGLang backend: one SGLang server in a subprocess on loopback; requests are forwarded unchanged.

If the client accepts parts, a request is streamed (streams.py). A pause with mode `retract` interrupts these.
The server gets a new API key in a config file with mode 0600. Reward models are served by /classify. If a
replica spans nodes, each of them has such a process; only the first one's gets requests (members.py).
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import shutil
import struct
import tempfile
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from hpc_rl.config.options.experiment import GRPOConfig
from hpc_rl.config.options.inference import SGLangConfig
from hpc_rl.config.options.training import PPOActorConfig
from hpc_rl.config.sglang_versions import FLAGS
from hpc_rl.core.adapters import is_adapter
from hpc_rl.core.errors import RequestRefused, RoleFailed
from hpc_rl.core.net import bind
from hpc_rl.core.trial import load_json, write_atomic
from hpc_rl.servers.base import Answer, Receiver, ReplicaPlace
from hpc_rl.servers.client import BUCKET_S, JOIN_S, open_session
from hpc_rl.servers.loaded_adapters import (
    NUM_AT_ONCE,
    LoadedAdapters,
    gets_adapters,
    list_layers,
    name_adapter,
)
from hpc_rl.servers.server_process import (
    ServerProcess,
    Setting,
    choose_table,
    find_tokenizer,
    list_interface_variables,
    make_arguments,
    select_settings,
)
from hpc_rl.servers.streams import END_S, StreamedSample, Streams, is_continuable, wait_for_ends
from hpc_rl.servers.wire import (
    LOGPROBS,
    GivenTokens,
    SendParts,
    convert_to_parts,
    make_given_answer,
    make_refusal,
    parse_given,
)

logger = logging.getLogger(__name__)

NAME = "SGLang"
RANDOM_BIAS = ("Qwen2ForSequenceClassification", "Qwen3ForSequenceClassification")
GENERATES, SCORES = ("/generate", "/v1/chat/completions", LOGPROBS), ("/classify",)
_UPDATE_KEYS = ("model_path", "weight_version", "flush_cache")
GROUP_S = JOIN_S + BUCKET_S  # SGLang waits for a lost trainer much longer, and answers nothing meanwhile
CPU_MAX_TOTAL_TOKENS = 65536  # without a limit, SGLang takes a share of the host's memory
# options of the section that are not flags: our own, or set elsewhere
NOT_FLAGS = {"version", "extra_args", "model_path"}


def make_settings(
    config: SGLangConfig, device: str, tensor_parallel_size: int, index: int
) -> dict[str, Setting]:
    """Return the settings from the configuration, plus settings for a CPU. None is left to SGLang."""
    own = {name: value for name, value in sorted(vars(config).items()) if name not in NOT_FLAGS}
    settings: dict[str, Setting | None] = {
        **own,
        "host": "127.0.0.1",
        "random_seed": config.random_seed + index,
        "tensor_parallel_size": tensor_parallel_size,
        # defaults of requests must not come from the model's generation config
        "sampling_defaults": "openai",
        # an event of a stream has the new tokens only, not all
        "incremental_streaming_output": True,
    }
    if device == "cpu":
        backend = config.sampling_backend or "pytorch"
        settings |= {"device": "cpu", "sampling_backend": backend}
        settings["max_total_tokens"] = config.max_total_tokens or CPU_MAX_TOTAL_TOKENS
    return select_settings(settings)


def make_cpu_environment(num_ranks: int) -> dict[str, str]:
    """Return the environment on a CPU: each rank may use all CPUs of this process.

    By default SGLang wants a NUMA node for each rank, also of those on other nodes.
    """
    cpus = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    bound = {"SGLANG_CPU_OMP_THREADS_BIND": "|".join([cpus] * num_ranks)} if num_ranks > 1 else {}
    return {"SGLANG_USE_CPU_ENGINE": "1", **bound}


def make_node_settings(place: ReplicaPlace) -> dict[str, Setting]:
    """Return the settings of one node of a replica that spans nodes."""
    host, port = place.rendezvous
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return {"nnodes": place.num_nodes, "node_rank": place.node_rank, "dist_init_addr": address}


def make_adapter_settings(actor: PPOActorConfig, device: str) -> dict[str, Setting]:
    """Return the settings of a server that gets adapters."""
    sizes = {"max_lora_rank": actor.lora_rank, "max_loras_per_batch": NUM_AT_ONCE}
    backend = {"lora_backend": "torch_native"} if device == "cpu" else {}
    return {"enable_lora": True, "lora_target_modules": list_layers(actor), **sizes, **backend}


@dataclass(kw_only=True)
class SGLangBackend:
    """See Backend."""

    process: ServerProcess
    settings: dict[str, Setting]
    secret: Path  # the config file with its API key; SGLang requires the suffix .yaml
    version: str = ""  # the version for which the options were checked
    extra_args: Sequence[str] = ()
    receiver: Receiver | None = None

    makes_initial_weights: ClassVar[bool] = False
    _streams: Streams = field(default_factory=Streams)
    _adapters: LoadedAdapters = field(default_factory=LoadedAdapters)
    _newest: str = ""  # label of the newest adapter
    _group: str = ""  # the process group that SGLang has joined
    _label: str | None = None  # of the version that arrives over it
    _has_session: bool = False  # SGLang waits for the rest of a version
    _stuck: str = ""  # why SGLang will not answer any more

    @classmethod
    def create(cls, config: GRPOConfig, place: ReplicaPlace) -> SGLangBackend:
        env = make_cpu_environment(place.num_gpus) if place.device == "cpu" else {}
        receiver = None
        if config.actor.weight_update_mode == "xccl" and not config.actor.is_critic:
            receiver = Receiver("gloo" if place.device == "cpu" else "nccl", max(1, place.num_gpus))
        if receiver or place.num_nodes > 1:
            env |= list_interface_variables(place.address)
        settings = make_settings(config.sglang, place.device, max(1, place.num_gpus), place.index)
        if place.num_nodes > 1:
            settings |= make_node_settings(place)
        if gets_adapters(config.actor):
            settings |= make_adapter_settings(config.actor, place.device)
        if place.shares_gpus and place.device != "cpu":  # if nothing can be released
            settings["enable_memory_saver"] = True
        return cls(
            process=ServerProcess.create(NAME, config, place, env),
            settings=settings
            | {"tokenizer_path": find_tokenizer(config), "is_embedding": config.actor.is_critic},
            secret=place.secret,
            version=config.sglang.version,
            extra_args=config.sglang.extra_args,
            receiver=receiver,
        )

    async def start(self, path: str, version: str) -> None:
        key = secrets.token_hex(32)
        argv, port = await self._make_command(path, version, key)
        await self.process.start(argv, f"http://127.0.0.1:{port}", open_session(reuse_connections=False), key)
        self._streams.start(version or "none")
        if self.settings.get("is_embedding"):
            await self._zero_bias(Path(path))

    async def start_member(self, path: str) -> None:
        argv, _ = await self._make_command(path, "", secrets.token_hex(32))
        self.process.launch_member(argv)

    async def _make_command(self, path: str, version: str, key: str) -> tuple[list[str], int]:
        """Write the config file with the key; return the arguments, and the port in them."""
        flags, warning = choose_table(FLAGS, NAME, await self.process.version(), self.version)
        if warning:
            logger.warning(warning)
        with bind("127.0.0.1") as sock:  # free now; if SGLang loses the race for the port, it is restarted
            port = sock.getsockname()[1]
        write_atomic(self.secret, json.dumps({"api-key": key}) + "\n", mode=0o600)  # JSON is YAML
        files = {"config_file": str(self.secret), "model_path": path}
        settings = {**files, **self.settings, "port": port, "weight_version": version or "none"}
        return ["-m", "sglang.launch_server", *make_arguments(settings, self.extra_args, flags)], port

    async def _zero_bias(self, model: Path) -> None:
        """Set the bias of a reward model's head to 0: no checkpoint has it, and SGLang leaves it random."""
        content = load_json(model / "config.json")
        if not isinstance(content, dict) or content.get("architectures", [""])[0] not in RANDOM_BIAS:
            return
        with tempfile.TemporaryDirectory(prefix="hpc-rl-") as folder:
            shutil.copy(model / "config.json", folder)
            table = json.dumps(
                {"score.bias": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
            ).encode()
            file = struct.pack("<Q", len(table)) + table + bytes(4)
            Path(folder, "model.safetensors").write_bytes(file)
            status, answer = await self.process.request("/update_weights_from_disk", {"model_path": folder})
        if status != 200:
            raise RoleFailed(f"SGLang could not load the score head of the reward model {model}: {answer}")

    async def prepare_changes(self, folder: Path) -> None:
        """Do nothing: the next version is loaded from the node's copy."""

    def alive(self) -> str:
        return self._stuck or self.process.alive()

    async def stop(self) -> None:
        await self.process.stop()
        self.secret.unlink(missing_ok=True)

    async def request(self, path: str, body: dict[str, Any] | None) -> Answer:
        if path in (GENERATES if self.settings.get("is_embedding") else SCORES):  # SGLang would crash
            return 404, make_refusal(f"no such path of this model: {path}")
        if path == LOGPROBS:
            return await self._compute_logprobs(body or {})
        if path == "/pause_generation":
            return await self._pause(body or {})
        if path == "/release_memory_occupation":
            await self._wait_until_idle()
        if path == "/continue_generation":
            self._streams.resume()
        if path in GENERATES and self._newest:
            return await self._generate_whole(path, body or {})
        if path == "/update_weights_from_disk" and body is not None and is_adapter(Path(body["model_path"])):
            return await self._load_adapter(body["model_path"], str(body["weight_version"]))
        if path == "/update_weights_from_disk" and body is not None:
            return await self._update(path, {key: body[key] for key in _UPDATE_KEYS if key in body})
        if handler := self._GROUP_CALLS.get(path):
            return await handler(self, path, body or {})
        return await self.process.request(path, body)

    # adapters
    async def _load_adapter(self, path: str, label: str) -> Answer:
        """Load a version of the adapter for new requests; running ones keep theirs."""
        call = {"lora_name": name_adapter(label), "lora_path": path}
        status, answer = await self.process.request("/load_lora_adapter", call)
        if status != 200:
            return status, answer
        self._adapters.add(label)
        self._newest = label
        self._streams.enter_adapter(label)
        for old in self._adapters.take_unused():
            await self.process.request("/unload_lora_adapter", {"lora_name": name_adapter(old)})
        return 200, {"success": True, "message": "updated", "num_paused_requests": 0}

    async def _generate_whole(self, path: str, body: dict[str, Any]) -> Answer:
        """Answer a request that is not streamed, with the newest adapter."""
        label = self._newest
        with self._adapters.use(label):
            asked = {**body, "lora_path": name_adapter(label)}
            status, answer = await self.process.request(path, asked)
        if status != 200:
            return status, answer
        if path != "/generate":
            return 200, {**answer, "metadata": {**(answer.get("metadata") or {}), "weight_version": label}}
        for one in answer if isinstance(answer, list) else [answer]:
            span = {"version": label, "start": 0, "end": len(one["output_ids"])}
            one["meta_info"] |= {"weight_version": label, "weight_versions": [span]}
        return 200, answer

    async def _compute_logprobs(self, body: dict[str, Any]) -> Answer:
        try:
            inputs, top_k = parse_given(body)
        except RequestRefused as error:
            return 400, make_refusal(str(error))
        asked = {
            "input_ids": [one.ids for one in inputs],
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": [one.start - 1 for one in inputs],
            "top_logprobs_num": [top_k] * len(inputs),
        }
        status, answer = await self.request("/generate", asked)  # by the newest adapter, if there is one
        if status != 200:
            return status, answer
        metas = [one["meta_info"] for one in answer]
        for meta in metas:
            if meta["finish_reason"]["type"] == "abort":
                return 503, make_refusal(f"aborted: {meta['finish_reason'].get('message')}")
        return 200, [_take_given(meta, one, top_k) for meta, one in zip(metas, inputs, strict=True)]

    # weights over a process group
    async def _join(self, path: str, body: dict[str, Any]) -> Answer:
        if self._group:  # of a trainer that is gone, or has lost it
            await self._leave("/destroy_weights_update_group", {"group_name": self._group})
        answer = await self._ask_with_limit(path, body)
        self._group = str(body.get("group_name")) if answer[0] == 200 else ""
        return answer

    async def _leave(self, path: str, body: dict[str, Any]) -> Answer:
        if body.get("group_name") != self._group:
            return 200, {"success": True, "message": "SGLang has left this group"}
        self._group = ""
        return await self._ask_with_limit(path, body)

    async def _begin(self, path: str, _body: dict[str, Any]) -> Answer:
        await self._end_session()
        self._streams.begin_update()
        answer = await self.process.request(path, {})
        self._has_session = answer[0] == 200
        return answer

    async def _receive(self, path: str, body: dict[str, Any]) -> Answer:
        answer = await self._ask_with_limit(path, body)
        if answer[0] == 200 and body.get("weight_version") is not None:
            self._label = str(body["weight_version"])
        return answer

    async def _end(self, _path: str, _body: dict[str, Any]) -> Answer:
        answer = await self._end_session()
        self._streams.end_update(self._label if answer[0] == 200 else None)
        return answer

    async def _end_session(self) -> Answer:
        if not self._has_session:
            return 200, {"success": True, "message": "no update is open"}
        self._has_session = False
        return await self.process.request("/end_weight_update", {})

    async def _ask_with_limit(self, path: str, body: dict[str, Any]) -> Answer:
        try:
            async with asyncio.timeout(GROUP_S):
                return await self.process.request(path, body)
        except TimeoutError:
            problem = f"SGLang did not answer {path} within {GROUP_S:.0f} s"
            self._stuck = f"{problem}, probably because it waits for a trainer that was lost"
            return 503, make_refusal(self._stuck)

    _GROUP_CALLS: ClassVar = {
        "/init_weights_update_group": _join,
        "/destroy_weights_update_group": _leave,
        "/begin_weight_update": _begin,
        "/update_weights_from_distributed": _receive,
        "/end_weight_update": _end,
    }

    async def _pause(self, body: dict[str, Any]) -> Answer:
        with self._streams.pausing():
            if body.get("mode") == "retract":
                await self._interrupt()
            answer = await self.process.request("/pause_generation", body)
            if answer[0] == 200:
                self._streams.pause()
        return answer

    async def _wait_until_idle(self) -> None:
        """Wait until a paused SGLang computes nothing: with a running request, it would exit at a release."""
        deadline = time.monotonic() + END_S
        while time.monotonic() < deadline:
            status, answer = await self.process.request("/v1/loads", None)
            if status == 200 and not any(one["num_running_reqs"] for one in answer["loads"]):
                return
            await asyncio.sleep(0.05)

    async def _interrupt(self) -> None:
        """End running streams with their tokens so far: retracted, they would be met by an update."""
        deadline = time.monotonic() + END_S
        while (streams := self._streams.list_continuable()) and time.monotonic() < deadline:
            rids = [rid for stream in streams for rid in stream.list_running()]
            # SGLang ignores the id of a request that has not arrived yet
            await asyncio.gather(*(self.process.request("/abort_request", {"rid": rid}) for rid in rids))
            await wait_for_ends(streams, 0.5)

    async def _update(self, path: str, body: dict[str, Any]) -> Answer:
        loaded = False
        self._streams.begin_update()
        try:
            await self._end_session()
            answer = await self.process.request(path, body)
            loaded = answer[0] == 200
        finally:
            # after some failures, the weights have changed
            self._streams.end_update(body.get("weight_version") if loaded else None)
        return answer

    async def generate(self, body: dict[str, Any], send: SendParts) -> Answer:
        plan = _plan_stream(body)
        if plan is None or self.settings.get("is_embedding"):
            status, answer = await self.request("/generate", body)
            return status, convert_to_parts(answer) if status == 200 else answer
        rids, sampling = plan
        continuable = all(map(is_continuable, sampling))
        async with self._streams.open(rids, continuable) as stream:
            intervals = [{**(one or {}), "stream_interval": self._streams.interval} for one in sampling]
            batched = isinstance(body["input_ids"][0], list)
            asked = {**body, "stream": True}
            asked |= {"rid": rids if batched else rids[0]}
            asked |= {"sampling_params": intervals if batched else intervals[0]}
            label = stream.label if self._adapters.has(stream.label) else None
            if label is not None:
                asked |= {"lora_path": name_adapter(label)}
            take = partial(_take_event, stream.samples, label)
            with self._adapters.use(label or ""):
                request = self.process.stream("/generate", asked, take)
                return await self._streams.relay(stream, request, send)


def _plan_stream(body: dict[str, Any]) -> tuple[list[str], list[dict[str, Any] | None]] | None:
    """Return id and sampling parameters of each sample; None for a request that can't be streamed."""
    ids = body.get("input_ids")
    if not isinstance(ids, list) or not ids or body.get("text") is not None:
        return None
    count = len(ids) if isinstance(ids[0], list) else 1
    sampling, rid = body.get("sampling_params"), body.get("rid")
    several = sampling if isinstance(sampling, list) else [sampling] * count
    rids = rid if isinstance(rid, list) else [rid] if count == 1 and rid else None
    rids = rids or [uuid.uuid4().hex for _ in range(count)]
    plain = all(one is None or (isinstance(one, dict) and one.get("n") in (None, 1)) for one in several)
    extra = body.get("top_logprobs_num") or body.get("logprob_start_len") not in (None, -1)
    if not plain or extra or len(several) != count or len(rids) != count:
        return None
    return [str(one) for one in rids], several


def _take_given(meta: dict[str, Any], given: GivenTokens, top_k: int) -> dict[str, Any]:
    """Return the log-probabilities of given tokens. SGLang's list may begin with the token before them."""
    num = len(given.ids) - given.start
    tops = meta["input_top_logprobs"][-num:] if top_k else []
    return make_given_answer(
        [entry[0] for entry in meta["input_token_logprobs"][-num:]],
        [[entry[1] for entry in entries] for entries in tops],
        [[entry[0] for entry in entries] for entries in tops],
    )


def _take_event(samples: list[StreamedSample], adapter: str | None, event: dict[str, Any]) -> None:
    """Add the new tokens of an event. `adapter` is the label of the request's adapter."""
    sample, meta = samples[event.get("index", 0)], event["meta_info"]
    # events that SGLang has joined may repeat the last token
    num_new = meta["completion_tokens"] - sample.num_made
    sample.ids += event["output_ids"][:num_new]
    sample.logprobs += [entry[0] for entry in meta.get("output_token_logprobs", ())[:num_new]]
    if meta["finish_reason"]:
        own = {} if adapter is None else {"weight_versions": None, "weight_version": adapter}
        sample.end = meta | own
