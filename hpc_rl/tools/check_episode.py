"""Run one prompt of a configuration as the job would, with the embedded engine in this process.

Reads `{"config", "folder", "progress", "timeout_s"}` as JSON from standard input and prints the prompt's
outcome to standard output, as JSON. With a `folder`, models are tiny with random weights; their sizes are
written there. Meanwhile the file `progress` shows the current step.
"""

import asyncio
import contextlib
import itertools
import json
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification
from transformers.utils.logging import disable_progress_bar

from hpc_rl.config.load.stored import from_dict
from hpc_rl.config.options.experiment import GRPOConfig
from hpc_rl.config.pool_view import list_reward_models, view_pool
from hpc_rl.config.row_shapes import load_named_rows
from hpc_rl.config.rules.file_rules import find_context
from hpc_rl.config.snapshot import is_user_file
from hpc_rl.core import log
from hpc_rl.core.errors import ConfigError, HpcRlError
from hpc_rl.core.refusal import Kind, Refusal
from hpc_rl.core.trial import load_json, write_json
from hpc_rl.core.types import Trajectory, TrajectoryGroup, WeightVersion, decode
from hpc_rl.datasets.encode import Prompt, encode_prompt
from hpc_rl.datasets.tokenizer import Tokenizer
from hpc_rl.roles.rollout_worker import open_worker
from hpc_rl.rollout import pipes
from hpc_rl.rollout.executor import make_run_frame
from hpc_rl.rollout.pipes import NoteKept
from hpc_rl.rollout.server_pool import ServerPool
from hpc_rl.servers.base import Backend, ReplicaPlace
from hpc_rl.servers.channel import ChannelRequest
from hpc_rl.servers.client import HttpServerClient
from hpc_rl.servers.embedded.backend import EmbeddedBackend
from hpc_rl.servers.embedded.engine import EmbeddedEngine
from hpc_rl.servers.router import Router
from hpc_rl.servers.wire import Part
from hpc_rl.trials.episode import EpisodeProgress, EpisodeStage

PROGRESS_S = 0.5
MAX_THREADS = 4  # a login node is shared
VERSION = WeightVersion(0, 0)
# an engine in this process needs no GPU
NOWHERE = ReplicaPlace(0, "cpu", 0, Path(os.devnull), Path(os.devnull))
LATE = "it took more time than --timeout_s"
ENDPOINT_S = 20.0  # how long an external endpoint may fail; a trial waits for rollout.setup_timeout
_NOT_EMBEDDED: dict[str, Any] = {  # options of gconfig that the engine lacks, with their neutral values
    "stop": None,
    "frequency_penalty": 0.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}


class EngineClient(HttpServerClient):
    """The client of an embedded engine in this process, without HTTP."""

    def __init__(self, backend: Backend, timeout_s: float) -> None:
        self.url, self._backend, self._timeout_s = "the embedded engine", backend, timeout_s
        self._data = self._control = {}
        self._tokens_per_s = 0.0

    async def _call(
        self, path: str, body: dict[str, Any] | None, headers: dict[str, str], timeout_s: float | None = None
    ) -> Any:
        return self._check_answer(path, *await self._backend.request(path, body))

    async def _generate_parts(
        self, request: ChannelRequest, take: Callable[[list[Part]], None]
    ) -> tuple[int, Any]:
        async def send(parts: list[Part]) -> None:
            take(parts)

        status, answer = await self._backend.generate(request.body, send)
        if status == 200:
            take(answer)
        return status, answer

    async def close(self) -> None:
        pass


def find_first_prompt(config: GRPOConfig, tokenizer: Tokenizer) -> Prompt:
    """Return the first prompt of the file that the job would take. Raises ConfigError without one."""
    dataset = config.train_dataset
    most = dataset.max_length
    for number, row in enumerate(load_named_rows(dataset.path, dataset.columns)):
        ids = encode_prompt(tokenizer, row)
        if most is not None and dataset.too_long == "truncate_left":
            ids = ids[-most:]
        if ids and (most is None or len(ids) <= most):
            return Prompt(0, number, row, ids)
    why = "has no prompt of at most train_dataset.max_length tokens in its first rows"
    raise ConfigError(Refusal(option="train_dataset.path", value=dataset.path, kind=Kind.FILE, why=why))


class ProgressWriter:
    """A thread that writes the episode's progress: user code may block the event loop."""

    def __init__(self, path: Path) -> None:
        self.stage = EpisodeStage.STARTING
        self.engines: list[EmbeddedEngine] = []
        self.problems: dict[str, str] = {}  # of external pools, by their names; '' if a pool answers again
        self._path = path
        threading.Thread(target=self._write, daemon=True).start()

    def _write(self) -> None:
        # The parent removes the folder when its time is up.
        with contextlib.suppress(OSError):
            while True:
                num_tokens = sum(engine.num_tokens for engine in self.engines)
                write_json(self._path, asdict(EpisodeProgress(self.stage, num_tokens)))
                time.sleep(PROGRESS_S)


async def try_episode(
    config: GRPOConfig, timeout_s: float, scratch: bool, progress: ProgressWriter
) -> dict[str, Any]:
    """Return the outcome of one prompt: `trajectories`, or `error` and `trace`.

    With `scratch`, the weights of all models are random.
    """
    progress.stage = EpisodeStage.LOADING
    unused = {
        name: one for name, one in _NOT_EMBEDDED.items() if getattr(config.gconfig, name) not in (one, [])
    }
    rollout = replace(config.rollout, setup_timeout=min(config.rollout.setup_timeout, ENDPOINT_S))
    config = replace(config, gconfig=replace(config.gconfig, **unused), rollout=rollout)
    began, outcome = time.monotonic(), asyncio.get_running_loop().create_future()

    def write(data: bytes) -> None:
        frame = decode(data[4:])
        if frame["op"] == "note":
            worker.continue_workflow(NoteKept(op="kept", ticket=0, key=frame["key"], value=frame["value"]))
        elif frame["op"] == "endpoint":
            progress.problems[frame["pool"]] = frame["problem"]
        else:
            outcome.set_result(frame)

    async with contextlib.AsyncExitStack() as stack:
        keys = {name: os.environ.get(pool.api_key_env, "") for name, pool in config.pools.items()}
        open_pool = partial(_open_pool, stack, config, timeout_s, scratch, progress)
        worker = await open_worker(stack, config, keys, write, open_pool)
        tokenizer = Tokenizer(config.tokenizer_path or config.actor.path)
        prompt = find_first_prompt(config, tokenizer)
        asked: dict[str, Any] = {"row": prompt.row, "prompt": tokenizer.decode(prompt.input_ids, False)}
        progress.stage = EpisodeStage.RUNNING
        running = asyncio.create_task(worker.answer(make_run_frame(0, 0, prompt, VERSION)))
        await asyncio.wait({running}, timeout=timeout_s - (time.monotonic() - began))
        if not running.done():
            return asked | _describe_delay(_find_awaited(running.get_coro()), progress.problems)
        running.result()
        frame = outcome.result()
        asked["unused"] = ", ".join(f"gconfig.{name}" for name in unused)
        if frame["op"] != "group" and frame["error"]:
            return asked | {"error": frame["error"], "trace": frame.get("trace", "")}
        if frame["op"] != "group":  # the workflow returned None
            return asked | {"trajectories": []}
        group: TrajectoryGroup = decode(frame["group"])
        return asked | {"trajectories": [_show(one, tokenizer) for one in group.trajectories]}


def _describe_delay(frames: traceback.StackSummary, problems: Mapping[str, str]) -> dict[str, Any]:
    """Return the error of an episode over its limit, with its place in user code or a pool's problem."""
    own = [frame for frame in frames if is_user_file(Path(frame.filename))]
    found = "; ".join(filter(None, problems.values())) or "the model was being loaded, or made tokens"
    where = "" if own else f": {found}"
    return {"error": LATE + where, "trace": "".join(traceback.format_list(own))}


def _find_awaited(coroutine: Any) -> traceback.StackSummary:
    """Return the place where a suspended coroutine waits."""
    frames = []
    while frame := getattr(coroutine, "cr_frame", None):
        frames.append((frame, frame.f_lineno))
        coroutine = coroutine.cr_await
    return traceback.StackSummary.extract(iter(frames))


async def _open_pool(
    stack: contextlib.AsyncExitStack,
    config: GRPOConfig,
    timeout_s: float,
    scratch: bool,
    progress: ProgressWriter,
    name: str,
) -> ServerPool:
    """Return a pool on an engine of this process, which the stack stops."""
    view = view_pool(config, name)
    if scratch:
        view = replace(view, actor=replace(view.actor, init_from_scratch=True))
    backend = EmbeddedBackend.create(view, NOWHERE)
    await backend.start(view.actor.path, "")
    stack.push_async_callback(backend.stop)
    if isinstance(backend, EmbeddedBackend):
        backend.engine.version = str(VERSION)
        progress.engines.append(backend.engine)
    client = cast(Router, EngineClient(backend, timeout_s))
    tokenizer = Tokenizer(view.tokenizer_path or view.actor.path)
    return ServerPool(name, client, tokenizer, view.gconfig, find_context(config, name))


def _show(one: Trajectory, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return a trajectory as text: the model's tokens, which are trained on, and the given ones."""
    parts = []
    for made, tokens in itertools.groupby(
        zip(one.ids, one.loss_mask, strict=True), lambda pair: bool(pair[1])
    ):
        ids = [int(token) for token, _ in tokens]
        parts.append({"trained": made, "tokens": len(ids), "text": tokenizer.decode(ids, False)})
    return {
        "reward": float(one.reward),
        "stats": {name: float(value) for name, value in one.stats.items()},
        "finish_reason": one.finish_reason,
        "turns": sum(bool(part["trained"]) for part in parts),
        "parts": parts,
    }


def use_tiny_models(config: GRPOConfig, folder: Path) -> GRPOConfig:
    """Return the configuration with tiny models without weights, and the tokenizers of the real ones."""
    own = config.tokenizer_path or config.actor.path
    pools = {
        name: pool
        if pool.url
        else replace(
            pool,
            path=_write_tiny(folder / f"pool_{name}", pool.path, name in list_reward_models(config)),
            tokenizer_path=pool.tokenizer_path or pool.path,
        )
        for name, pool in config.pools.items()
    }
    actor = replace(config.actor, path=_write_tiny(folder / "model", config.actor.path))
    return replace(config, actor=actor, tokenizer_path=own, pools=pools)


def _write_tiny(folder: Path, like: str, scores: bool = False) -> str:
    """Write the config.json of a two-layer Qwen2 with the vocabulary and context of a model.

    A reward model, which scores texts, is written with its weights.
    """
    content: Any = load_json(Path(like) / "config.json")
    content = content.get("text_config") or content
    names = ("vocab_size", "max_position_embeddings", "eos_token_id")
    given = {name: content[name] for name in names if content.get(name) is not None}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "tie_word_embeddings": True}
    tiny = AutoConfig.for_model("qwen2", **sizes, **heads, **given, num_labels=1, pad_token_id=0)
    model = AutoModelForSequenceClassification.from_config(tiny) if scores else tiny
    model.save_pretrained(folder)
    return str(folder)


def main() -> int:
    out = pipes.reserve_stdout()
    given = json.load(sys.stdin)

    def tell(result: dict[str, Any]) -> None:
        with os.fdopen(out, "w") as file:
            json.dump(result, file)

    def give_up() -> None:
        """Report the place where the user's code blocks the event loop."""
        frame = sys._current_frames()[threading.main_thread().ident or 0]
        tell(_describe_delay(traceback.extract_stack(frame), progress.problems))
        os._exit(0)

    progress = ProgressWriter(Path(given["progress"]))
    disable_progress_bar()
    alarm = threading.Timer(given["timeout_s"] + 5, give_up)
    alarm.daemon = True
    alarm.start()
    os.nice(10)
    torch.set_num_threads(min(MAX_THREADS, os.cpu_count() or 1))
    log.configure("episode")
    logging.getLogger().setLevel(logging.ERROR)  # the outcome has the workers' warnings
    config = from_dict(given["config"])
    assert isinstance(config, GRPOConfig)
    torch.manual_seed(config.seed)  # of random weights: repeatable
    try:
        if given["folder"]:
            config = use_tiny_models(config, Path(given["folder"]))
        outcome = asyncio.run(try_episode(config, given["timeout_s"], bool(given["folder"]), progress))
    except HpcRlError as error:
        outcome = {"error": str(error), "trace": ""}
    alarm.cancel()
    tell(outcome)
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    # User code may have left threads behind.
    os._exit(code)
