"""A trial directory, a generation server that makes its tokens up, and the rollout role as a process: for
tests of that role.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import tokenizers
import xxhash
from aiohttp import web
from channels import add_channel
from patience import extend, look
from toy_plans import toy_plan

from hpc_rl.config.load.stored import to_dict
from hpc_rl.config.options.cluster import ClusterSpecConfig
from hpc_rl.config.options.dataset import DatasetConfig
from hpc_rl.config.options.environments import EnvironmentsConfig
from hpc_rl.config.options.experiment import GRPOConfig
from hpc_rl.config.options.inference import GenerationHyperparameters, InferenceEngineConfig
from hpc_rl.config.options.training import PPOActorConfig
from hpc_rl.core.allocation import DEFAULT_POOL
from hpc_rl.core.net import bind
from hpc_rl.core.trial import Trial, write_json
from hpc_rl.core.types import Batch, decode
from hpc_rl.name_resolve import keys
from hpc_rl.name_resolve.shared_fs import NameResolve
from hpc_rl.rollout.batch_client import RolloutClient
from hpc_rl.servers.channel import ChannelRequest

ALPHABET = "0123456789+=; "
EOS = len(ALPHABET)


def make_tokenizer(folder: Path) -> Path:
    """One token per character of ALPHABET, then the end-of-sequence token."""
    vocab = {character: i for i, character in enumerate(ALPHABET)} | {"<eos>": EOS}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token=" "))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    made.decoder = tokenizers.decoders.Fuse()
    made.add_special_tokens(["<eos>"])
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    return folder


def write_rows(path: Path, num_rows: int, offset: int = 0) -> Path:
    rows = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(offset, offset + num_rows)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def begin_lineage(trial: Trial, number: int, from_step: int = 0, new_batches: bool = False) -> None:
    """Leave the record that a trainer leaves before it asks for a batch."""
    trial.lineages.mkdir(exist_ok=True)
    record = {"lineage": number, "from_step": from_step, "new_batches": new_batches}
    path = trial.lineages / f"{number:04d}.json"
    if not path.exists():
        write_json(path, {**record, "attempt": "1.0", "incarnation": number})


def make_trial(
    root: Path,
    *,
    batch_size: int = 2,
    num_rows: int = 10,
    n_samples: int = 2,
    environments: EnvironmentsConfig | None = None,
    **rollout,
) -> Trial:
    """A trial whose prompts are `i+1=`; keyword arguments go into the rollout section."""
    trial = Trial.of(root, "user", "exp", "trial")
    trial.make_dirs()
    trial.make_secret()
    model = make_tokenizer(root / "model")
    config = GRPOConfig(
        experiment_name="exp",
        trial_name="trial",
        cluster=ClusterSpecConfig(fileroot=str(root)),
        train_dataset=DatasetConfig(
            path=str(write_rows(root / "train.jsonl", num_rows)), batch_size=batch_size
        ),
        valid_dataset=DatasetConfig(path=str(write_rows(root / "valid.jsonl", 7, offset=num_rows))),
        gconfig=GenerationHyperparameters(n_samples=n_samples, max_new_tokens=6),
        rollout=InferenceEngineConfig(**{"max_head_offpolicyness": 2, **rollout}),
        actor=PPOActorConfig(path=str(model)),
        environments=environments,
        total_train_steps=1000 if environments else None,
    )
    write_json(trial.config_json, to_dict(config))
    plan = toy_plan([], sys.executable, experiment_name="exp", trial_name="trial")
    write_json(trial.plan_json, plan.to_json())
    trial.attempt("1.0").make_dirs()
    return trial


class FakeServer:
    """Speaks over the channel: output is a pure function of (input, sampling_seed); the version is whatever
    `version` is set to. As a reward model it speaks /classify: an input scores its length.
    """

    def __init__(
        self,
        trial: Trial,
        index: int = 0,
        max_delay_s: float = 0.0,
        version: str = "0.0",
        pool: str = DEFAULT_POOL,
    ) -> None:
        self.version = version
        self.max_delay_s = max_delay_s
        self.requests = 0
        self.errors = 0  # answer so many requests with 500
        self._lease_key = keys.server(pool, index)
        self._names = NameResolve(trial.names)
        self._started = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        assert self._started.wait(extend(60))

    def publish(self, version: str) -> None:
        self.version = version

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(extend(10))

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._main())
        self._loop.close()

    async def _main(self) -> None:
        self._stop = asyncio.Event()
        app = web.Application(client_max_size=1 << 26)
        channel = add_channel(app, self._generate)
        app.router.add_post("/classify", self._classify)
        app.router.add_get("/health", self._health)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        listener = bind("127.0.0.1")
        await web.SockSite(runner, listener).start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        lease = self._names.lease(self._lease_key, self._record(url), ttl_s=10.0)
        self._started.set()
        while not self._stop.is_set():
            lease.renew(self._record(url))
            await asyncio.wait({asyncio.ensure_future(self._stop.wait())}, timeout=0.2)
        lease.release()
        await channel.close(0.1)
        await runner.cleanup()

    def _record(self, url: str) -> dict:
        return {
            "url": url,
            "version": self.version,
            "held": self.version,  # for evaluations
            "state": "serving",
            "attempt": "1.0",
            "incarnation": 0,
            "pid": 1,
            "host": "h",
        }

    async def _health(self, _request: web.Request) -> web.Response:
        return web.json_response({"state": "serving", "weight_version": self.version})

    async def _classify(self, request: web.Request) -> web.Response:
        inputs = (await request.json())["input_ids"]
        self.requests += 1
        return web.json_response([{"embedding": [len(ids)]} for ids in inputs])

    async def _generate(self, request: ChannelRequest) -> Any:
        self.requests += 1
        if self.errors > 0:
            self.errors -= 1
            return 500
        if self.max_delay_s:
            await asyncio.sleep(random.random() * self.max_delay_s)
        pairs = zip(request.body["input_ids"], request.body["sampling_params"], strict=True)
        return [self._answer(ids, sampling) for ids, sampling in pairs]

    def _answer(self, ids: list[int], sampling: dict) -> dict:
        seed = xxhash.xxh64_intdigest(f"{ids}/{sampling['sampling_seed']}".encode())
        made = [(seed >> 4 * i) % 10 for i in range(1 + seed % min(4, sampling["max_new_tokens"] - 1))] + [
            EOS
        ]
        logprobs = [[-1.5 - i, token, None] for i, token in enumerate(made)]
        span = {"version": self.version, "start": 0, "end": len(made)}
        meta = {
            "finish_reason": {"type": "stop"},
            "output_token_logprobs": logprobs,
            "weight_version": self.version,
        }
        return {"output_ids": made, "meta_info": {**meta, "weight_versions": [span]}}


class DecodingClient(RolloutClient):
    """The trainer's client, with batches decoded, and the counters."""

    def batch(self, step: int, lineage: int, stopping: threading.Event | None = None) -> Batch | None:
        body = self.batch_bytes(step, lineage, stopping)
        return None if body is None else decode(body)

    def status(self) -> dict:
        return json.loads(self._request("GET", "/status", None)[1])


class RolloutRole:
    """The rollout role's process; start it again after a kill with the next incarnation."""

    module = "hpc_rl.roles.rollout"

    def __init__(self, trial: Trial, env: dict[str, str] | None = None) -> None:
        self.trial = trial
        self.env = env or {}
        self.incarnation = -1
        self.process: subprocess.Popen | None = None

    def start(self) -> RolloutRole:
        self.incarnation += 1
        argv = [
            "-m",
            self.module,
            "--trial_dir",
            str(self.trial.dir),
            "--attempt",
            "1.0",
            "--incarnation",
            str(self.incarnation),
        ]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **self.env}
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, *argv], stdin=subprocess.PIPE, stdout=out, stderr=out, env=env
            )
        return self

    @property
    def log(self) -> Path:
        return self.trial.attempt("1.0").log("rollout", 0, self.incarnation)

    def kill(self) -> None:
        assert self.process
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()

    def stop(self, timeout_s: float = 90.0) -> int:
        """Exit code after TERM."""
        assert self.process
        self.process.terminate()
        code = self.process.wait(extend(timeout_s))
        self.process.stdin.close()
        return code

    def client(self, poll_s: float = 2.0) -> DecodingClient:
        return DecodingClient(
            NameResolve(self.trial.names), self.trial.load_tokens(), deadline_s=extend(60), poll_s=poll_s
        )

    def children(self) -> list[int]:
        assert self.process
        pid = self.process.pid
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def wait_until(condition, timeout_s: float = 90.0) -> None:
    deadline = time.monotonic() + extend(timeout_s)
    while not look(condition, 0.05):
        assert time.monotonic() < deadline, "waited in vain"
