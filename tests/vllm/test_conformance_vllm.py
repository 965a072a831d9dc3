"""The conformance suite on a real vLLM on the CPU, and what only vLLM needs: a socket that only its user can
reach, and that log-probabilities mean the same as elsewhere.
"""

import asyncio
import os
import stat
from pathlib import Path

import aiohttp
import psutil
import pytest
import torch
from aiohttp import web
from aiohttp.test_utils import TestServer
from patience import extend, until

pytest.register_assert_rewrite("conformance")

from conformance import (  # noqa: E402
    LONG,
    PROMPT,
    TRUNCATED,
    Conformance,
    api,  # noqa: F401
    check_drain,
    check_failed_start,
    check_logprobs,
    forward_all_logprobs,
    make_model,
    named,
)
from vllm_servers import backend_of, served_vllm  # noqa: E402

from hpc_rl.config.options.pools import PoolConfig  # noqa: E402
from hpc_rl.core.errors import InputRefused  # noqa: E402
from hpc_rl.servers.external import Endpoint  # noqa: E402

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def served(tmp_path_factory, vllm_python):
    replica = served_vllm(tmp_path_factory.mktemp("vllm"), vllm_python)
    folder, processes = replica.backend.socket.parent, _tree(replica.backend.process.pid)
    for one in processes[1:]:
        # its engine and its worker spin, and would leave no core to others
        one.cpu_affinity(one.cpu_affinity()[:1])
    yield replica
    replica.stop()
    assert not folder.exists()
    assert not psutil.wait_procs(processes, timeout=extend(5))[1]


def _tree(pid: int) -> list[psutil.Process]:
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


class TestVLLM(Conformance):
    long = LONG | {"max_new_tokens": 3500}  # it is fast

    @pytest.mark.parametrize("sampling", TRUNCATED, ids=named)
    async def test_tokens_that_are_left_out_count_in_logprobs(self, api, sampling):  # noqa: F811
        """Its own would not count them: the request is refused, and without log-probabilities it is served."""
        with pytest.raises(InputRefused, match="would leave tokens out"):
            await api.turn(**sampling)
        body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 5, "ignore_eos": True, **sampling}}
        assert len((await api.post("/generate", body))[1]["output_ids"]) == 5

    async def test_vllm_elsewhere_scores_given_tokens(self, api):  # noqa: F811
        """As the teacher of a distillation at a URL: vLLM's own API, reached over TCP."""

        async def forward(request: web.Request) -> web.Response:
            url, body = f"http://vllm{request.path}", await request.read()
            headers = {"Content-Type": "application/json"}
            async with session.request(request.method, url, data=body, headers=headers) as answer:
                return web.json_response(await answer.json(), status=answer.status)

        ids = [*PROMPT, 4, 5, 6]
        app = web.Application()
        app.add_routes([web.get("/v1/models", forward), web.post("/v1/completions", forward)])
        socket = aiohttp.UnixConnector(str(api.served.backend.socket))
        async with aiohttp.ClientSession(connector=socket) as session, TestServer(app) as server:
            elsewhere = PoolConfig(url=str(server.make_url("/v1")))
            async with Endpoint("teacher", elsewhere) as endpoint:
                await endpoint.check_scoring()
                scored = await endpoint.compute_logprobs([ids, ids[:4]], [3, 1])
        for one, length, start in zip(scored, (len(ids), 4), (3, 1), strict=True):
            wanted_TV = forward_all_logprobs(api.served.model, ids[:length])[start - 1 : -1]
            own_T = wanted_TV.gather(1, torch.tensor(ids[start:length])[:, None])[:, 0]
            assert one.logprobs == pytest.approx(own_T.tolist(), abs=1e-3)

    async def test_only_its_user_can_reach_it(self, api):  # noqa: F811
        socket = api.served.backend.socket
        assert stat.S_IMODE(socket.parent.stat().st_mode) == 0o700 and socket.is_socket()
        found = [one for each in _tree(api.served.backend.process.pid) for one in _listening(each)]
        assert {address.ip for address in found} <= {"127.0.0.1", "::1"}

    async def test_seed_gives_the_same_tokens_again(self, api):  # noqa: F811
        seeded = {"max_new_tokens": 24, "ignore_eos": True}
        first, again, other = [await api.turn(**seeded, sampling_seed=seed) for seed in (7, 7, 8)]
        assert first.output_ids == again.output_ids != other.output_ids

    async def test_stop_text_ends_a_completion(self, api):  # noqa: F811
        free = await api.turn(max_new_tokens=30, temperature=0.0, ignore_eos=True)
        text = api.served.tokenizer.decode(free.output_ids[3:5])
        turn = await api.turn(max_new_tokens=30, temperature=0.0, ignore_eos=True, stop=[text])
        assert turn.finish_reason == "stop" and len(turn.output_ids) < 30
        assert turn.output_ids == free.output_ids[: len(turn.output_ids)]

    async def test_cache_of_older_weights_is_not_used_again(self, api):  # noqa: F811
        """After an update in place, which keeps the cache for the requests that go on."""
        served, long_prompt = api.served, PROMPT * 20
        running = asyncio.create_task(api.turn(**self.long))
        await api.turn(long_prompt)
        await api.control("/pause_generation", {"mode": "in_place"})
        old = served.label
        served.step += 1
        served.model = served.models[served.step % 2]
        served.point(served.model)
        body = {"model_path": str(served.model), "weight_version": served.label, "flush_cache": False}
        await api.control("/update_weights_from_disk", body)
        await api.client.resume()
        turn = await api.turn(long_prompt, max_new_tokens=8, ignore_eos=True)
        check_logprobs(turn, {served.label: served.model}, 1.0, long_prompt)
        assert [span[0] for span in (await running).versions] == [old, served.label]


def _listening(process: psutil.Process) -> list:
    return [one.laddr for one in process.net_connections("inet") if one.status == psutil.CONN_LISTEN]


async def test_a_server_that_stops_returns_its_tokens(served):
    await check_drain(served, TestVLLM.long)  # the last test of this server


async def test_failed_start_shows_vllms_own_words(tmp_path, vllm_python):
    make_model(tmp_path / "model", 0)
    backend = backend_of(vllm_python, tmp_path / "model", tmp_path, ("--no-such-flag",))
    await check_failed_start(backend, tmp_path / "model")


@pytest.mark.soak
async def test_nothing_is_left_when_vllm_is_killed(tmp_path, vllm_python):
    make_model(tmp_path / "model", 0)
    backend = backend_of(vllm_python, tmp_path / "model", tmp_path)
    await backend.start(str(tmp_path / "model"), "0.0")
    assert not backend.alive()
    processes = _tree(backend.process.pid)
    os.kill(backend.process.pid, 9)
    await until(backend.alive, 30)  # the kernel has its memory to free
    assert "SIGKILL" in backend.alive()
    assert not psutil.wait_procs(processes, timeout=extend(10))[1]
    await backend.stop()
    assert not Path(backend.socket).parent.exists()
