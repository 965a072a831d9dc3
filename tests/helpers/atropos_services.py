"""The two services that an environment talks to, in a few lines each."""

from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from hpc_rl.atropos import rollout_api, serving
from hpc_rl.datasets.tokenizer import Tokenizer


class FakeApi:
    """The rollout API: a trainer that takes a step for each `batch_size` sequences it gets."""

    def __init__(self, batch_size: int, num_steps: int, wait_rounds: int = 0) -> None:
        self.batch_size, self.num_steps, self.wait_rounds = batch_size, num_steps, wait_rounds
        self.groups: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self.failures: list[int] = []  # statuses of the next answers to groups
        self.registered: list[dict[str, Any]] = []
        self.disconnected: list[int] = []
        self.temperature: float | None = None
        self.env_weight = 1.0

    @property
    def step(self) -> int:
        return min(self.num_steps, sum(len(group["tokens"]) for group in self.groups) // self.batch_size)

    async def register(self, request: web.Request) -> web.Response:
        if self.wait_rounds:
            self.wait_rounds -= 1
            return web.json_response({"status": "wait for trainer to start"})
        self.registered.append(await request.json())
        return web.json_response(
            {
                "status": "success",
                "env_id": 7,
                "wandb_name": "name_0",
                "checkpoint_dir": "",
                "starting_step": 0,
                "checkpoint_interval": 0,
                "num_steps": self.num_steps,
            }
        )

    async def info(self, request: web.Request) -> web.Response:
        return web.json_response({"batch_size": self.batch_size, "max_token_len": 64})

    async def sampling(self, request: web.Request) -> web.Response:
        known = self.temperature is not None
        return web.json_response({"temperature": self.temperature}, status=200 if known else 404)

    async def status(self, request: web.Request) -> web.Response:
        assert (await request.json()) == {"env_id": 7}
        return web.json_response(
            {
                "current_step": self.step,
                "queue_size": 0,
                "unallocated_fraction": 1.0,
                "self_queue_size": 0,
                "max_group_size": 1,
                "env_weight": self.env_weight,
            }
        )

    async def groups_in(self, request: web.Request) -> web.Response:
        self.keys.append(request.headers["Idempotency-Key"])
        if self.failures:
            return web.Response(status=self.failures.pop(0))
        body = await request.json()
        self.groups += body if isinstance(body, list) else [body]
        return web.json_response({"status": "received"})

    async def disconnect(self, request: web.Request) -> web.Response:
        self.disconnected.append((await request.json())["env_id"])
        return web.json_response({"status": "success"})

    def app(self) -> web.Application:
        app = web.Application()
        app.add_routes(
            [
                web.post("/register-env", self.register),
                web.get("/info", self.info),
                web.get("/sampling", self.sampling),
                web.get("/status-env", self.status),
                web.post("/scored_data", self.groups_in),
                web.post("/scored_data_list", self.groups_in),
                web.post("/disconnect-env", self.disconnect),
            ]
        )
        return app


class FakeServer:
    """SGLang's /generate: every completion is the text that `answer` makes of the input's text."""

    def __init__(self, tokenizer: Tokenizer, answer: Any) -> None:
        self.tokenizer, self.answer = tokenizer, answer
        self.bodies: list[dict[str, Any]] = []
        self.failures: list[int] = []

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.bodies.append(body)
        if self.failures:
            return web.Response(status=self.failures.pop(0), text="told to fail")
        text = self.tokenizer.decode(body["input_ids"], skip_special_tokens=False)
        n = body["sampling_params"]["n"]
        answers = [self._one(self.answer(text)) for _ in range(n)]
        return web.json_response(answers if n > 1 else answers[0])

    def _one(self, text: str) -> dict[str, Any]:
        ids = [*self.tokenizer.encode(text, add_special_tokens=False), *self.tokenizer.eos_token_ids[:1]]
        return {
            "text": text,
            "output_ids": ids,
            "meta_info": {
                "finish_reason": {"type": "stop", "matched": ids[-1]},
                "output_token_logprobs": [[-0.5, token, None] for token in ids],
                "weight_version": "0.3",
            },
        }

    def app(self) -> web.Application:
        app = web.Application()
        app.add_routes([web.post("/generate", self.generate)])
        return app


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Environments look at the trainer, and for services that are away, more often."""
    monkeypatch.setattr(serving, "POLL_S", 0.02)
    monkeypatch.setattr(rollout_api, "POLL_S", 0.05)


@pytest.fixture
async def serve():
    """Return a function that serves an application on this host and returns its URL."""
    runners = []

    async def start(app: web.Application) -> str:
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        runners.append(runner)
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        return f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"

    yield start
    for runner in runners:
        await runner.cleanup()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path
