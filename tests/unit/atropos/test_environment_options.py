"""What the options of an environment do; tests/unit/config/parameter_status.tsv names the test of each."""

import asyncio
import json
import logging
import sys
import types

import pytest
import yaml
from aiohttp import web
from atropos_services import FakeServer
from jsonargparse import ArgumentError
from patience import extend

from hpc_rl.atropos import APIServerConfig
from hpc_rl.atropos.inference_servers import InferenceServers, MadeUpServers
from hpc_rl.atropos.settings import EvalHandling
from hpc_rl.core.errors import ConfigError, ServerUnavailable
from hpc_rl.roles import environment_role
from hpc_rl.tools import run_environment
from tests.unit.atropos.test_environment import Echo, world

pytestmark = pytest.mark.waits

__all__ = ["world"]


def serving(path, answer):
    app = web.Application()
    app.router.add_post(path, answer)
    return app


async def test_what_it_registers_with(world):
    same = {"max_token_length": 64, "min_batch_allocation": 0.25}
    await world.run(total_steps=-1, inference_weight=2.5, wandb_name="mine", **same)
    assert world.api.registered == [{"desired_name": "mine", "weight": 2.5, "group_size": 2, **same}]


async def test_the_trainer_decides_the_batch_size(world, caplog):
    await world.run(batch_size=1, group_size=2, total_steps=-1)  # 1 would be too small for a group
    assert world.api.step == 3
    assert "env.batch_size 1 is ignored: the trainer decides, and its batch has 4 sequences" in caplog.text


def options_of(tmp_path, *argv, settings=None):
    command = ["serve", "arithmetic", *argv]
    if settings is not None:
        (tmp_path / "settings.yaml").write_text(yaml.safe_dump(settings))
        command = environment_role.add_settings(["hpc-rl", "env", *command], str(tmp_path / "settings.yaml"))[
            2:
        ]
    return run_environment.make_settings(run_environment.parse(command))


def test_the_command_counts_more_than_the_settings_of_the_trial(tmp_path):
    servers = [{"base_url": f"http://{host}/v1", "api_key": "key"} for host in "ab"]
    settings = {"env": {"group_size": 4, "wandb_name": "trials"}, "openai": servers, "slurm": False}
    got = options_of(tmp_path, "--env.group_size", "2", settings=settings)
    assert (got.env.group_size, got.env.wandb_name, got.slurm) == (2, "trials", False)
    own = tmp_path / "own.yaml"
    own.write_text("env: {wandb_name: mine, max_num_workers: 3}")
    got = options_of(tmp_path, f"--config={own}", "--env.max_num_workers", "5", settings=settings)
    assert (got.env.group_size, got.env.wandb_name, got.env.max_num_workers) == (4, "mine", 5)
    # of another program the file is at the end
    assert environment_role.add_settings(["python", "x.py", "serve"], "f")[-2:] == ["--config", "f"]


def test_an_option_of_servers_is_for_all_of_them(tmp_path):
    servers = [{"base_url": f"http://{host}/v1", "api_key": "key"} for host in "ab"]
    got = options_of(tmp_path, "--openai.timeout", "5", "--openai.api_key=k", settings={"openai": servers})
    wanted = [(f"http://{host}/v1", 5, "k") for host in "ab"]
    assert [(one.base_url, one.timeout, one.api_key) for one in got.openai] == wanted
    (one,) = options_of(tmp_path, "--openai.timeout", "5").openai
    assert one.timeout == 5 and one.num_max_requests_at_once == 512
    with pytest.raises(ArgumentError, match="no_such"):
        options_of(tmp_path, "--openai.no_such", "5", settings={"openai": servers})


@pytest.mark.parametrize("given", ["limit_train", "LIMIT_TRAIN"])
def test_eval_handling_in_any_case(tmp_path, given):
    assert options_of(tmp_path, "--env.eval_handling", given).env.eval_handling is EvalHandling.LIMIT_TRAIN
    got = options_of(tmp_path, settings={"env": {"eval_handling": given}})
    assert got.env.eval_handling is EvalHandling.LIMIT_TRAIN


@pytest.mark.parametrize(("weight", "most"), [(1.0, 8), (0.25, 2), (0.01, 1)])
async def test_requests_at_once_are_the_share_of_its_weight(world, serve, weight, most):
    running = reached = 0
    world.api.env_weight, world.api.batch_size = weight, 64

    async def generate(request):
        nonlocal running, reached
        running += 1
        if len(world.server.bodies) <= 60:  # then it is stopped
            reached = max(reached, running)
        await asyncio.sleep(0.02)
        running -= 1
        return await FakeServer.generate(world.server, request)

    world.urls = (world.urls[0], await serve(serving("/generate", generate)))
    room = {"max_num_workers": 16, "max_batches_offpolicy": 1000, "total_steps": -1}
    limit = {"num_max_requests_at_once": 8}
    await world.run(Echo, lambda _: len(world.server.bodies) > 60, limit, **room)
    assert reached == most


class Counting(Echo):
    running = most = 0

    async def episode(self, item, conversation):
        cls = type(self)
        cls.running, cls.most = cls.running + 1, max(cls.most, cls.running + 1)
        await asyncio.sleep(0.05)
        score = await super().episode(item, conversation)
        cls.running -= 1
        return score


@pytest.mark.parametrize(
    ("given", "groups"),
    [({"max_num_workers": 3}, 3), ({"max_num_workers": -1, "max_num_workers_per_node": 2}, 2)],
)
async def test_workers_per_server_or_in_all(world, given, groups):
    world.api.batch_size = 64
    counting = type("Counting", (Counting,), {"played": 0})
    await world.run(counting, lambda _: counting.played >= 10 * groups, total_steps=-1, **given)
    assert counting.most == 2 * groups  # episodes of groups of two


async def test_it_stops_where_the_queue_is_long(world, serve):
    asked = []

    async def full(request):
        asked.append(request)
        answer = {"current_step": 0, "unallocated_fraction": 1.0, "self_queue_size": 4, "max_group_size": 2}
        return web.json_response({**answer, "queue_size": 4, "env_weight": 1.0})

    world.api.status = full
    world.urls = (await serve(world.api.app()), world.urls[1])
    # 4 groups of 2 are two batches of 4
    await world.run(Echo, lambda _: len(asked) > 20 or world.api.groups, max_batches_offpolicy=2)
    assert not world.api.groups
    await world.run(Echo, lambda _: len(asked) > 1000 or world.api.groups, max_batches_offpolicy=4)
    assert world.api.groups


async def test_an_evaluation_at_every_multiple(world):
    evaluated = []

    class Noting(Echo):
        async def evaluate(self):
            evaluated.append(world.api.step)
            return {"eval_score": 0.0}

    await world.run(Noting, total_steps=-1, steps_per_eval=1, eval_handling="NONE")
    assert evaluated and len(evaluated) <= 3
    evaluated.clear()
    world.api.groups.clear()
    await world.run(Noting, total_steps=-1, steps_per_eval=0)
    assert not evaluated


async def test_metrics_wait_for_enough_groups(world, caplog):
    caplog.set_level(logging.INFO)
    await world.run(total_steps=-1, min_items_sent_before_logging=1000)
    lines = [one for one in caplog.messages if one.startswith("step ")]
    assert len(lines) == 1  # at the end
    caplog.clear()
    world.api.groups.clear()
    await world.run(total_steps=-1, min_items_sent_before_logging=0)
    assert len([one for one in caplog.messages if one.startswith("step ")]) >= 2


async def test_groups_are_kept_while_serving(world, tmp_path):
    path = tmp_path / "kept" / "groups.jsonl"
    await world.run(total_steps=-1, data_path_to_save_groups=str(path))
    kept = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(kept) == len(world.api.groups)
    assert all(one["env_id"] == 7 and "step" in one and one["texts"] for one in kept)
    assert path.with_suffix(".html").exists()


async def test_rollouts_and_metrics_go_to_wandb(world, serve, monkeypatch):
    logged = []
    module = types.ModuleType("wandb")
    module.Table = lambda columns, data: (columns, data)
    run = types.SimpleNamespace(log=lambda values, step: logged.append((step, values)), finish=lambda: None)
    begun = []
    module.init = lambda **given: begun.append(given) or run
    monkeypatch.setitem(sys.modules, "wandb", module)

    async def info(request):
        return web.json_response({"group": "g", "project": "p"})

    app = world.api.app()
    app.add_routes([web.get("/wandb_info", info)])
    world.urls = (await serve(app), world.urls[1])
    shown = {"num_rollouts_to_keep": 2, "num_rollouts_per_group_for_logging": -1}
    await world.run(total_steps=-1, use_wandb=True, wandb_name="mine", **shown)
    assert begun == [{"project": "p", "group": "g", "name": "mine"}]
    columns, rows = logged[-1][1]["rollouts"]
    assert columns == ["text", "score"] and len(rows) == 4  # two groups of two
    assert "score" in logged[-1][1]
    begun.clear()
    await world.run(total_steps=-1, use_wandb=False)
    assert begun == []


async def test_wandb_that_is_missing_is_named(world, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    from hpc_rl.atropos.serving import start_wandb

    with pytest.raises(ConfigError, match=r"--env\.use_wandb false"):
        start_wandb("g", "p", "n")


async def test_a_request_takes_no_longer_than_its_timeout(serve, chat_tokenizer):
    async def slow(request):
        await asyncio.sleep(30)

    url = await serve(serving("/generate", slow))
    config = APIServerConfig(base_url=f"{url}/v1", timeout=0.05)
    async with InferenceServers([config]) as servers:
        async with asyncio.timeout(extend(15)):
            with pytest.raises(ServerUnavailable):
                await servers.generate([1])


async def test_training_and_evaluation_have_own_limits(serve):
    running = {"train": 0, "eval": 0}
    most = dict(running)

    async def count(request):
        split = "eval" if (await request.json())["sampling_params"]["temperature"] == 0 else "train"
        running[split] += 1
        most[split] = max(most[split], running[split])
        await asyncio.sleep(0.05)
        running[split] -= 1
        meta = {"finish_reason": {"type": "stop"}, "output_token_logprobs": [[-1.0, 5, None]]}
        return web.json_response({"text": "", "output_ids": [5], "meta_info": meta})

    url = await serve(serving("/generate", count))
    config = APIServerConfig(base_url=f"{url}/v1", num_max_requests_at_once=3, num_requests_for_eval=2)
    async with InferenceServers([config]) as servers:
        train = [servers.generate([1], temperature=1.0) for _ in range(9)]
        held_out = [servers.generate([1], temperature=0, evaluate=True) for _ in range(9)]
        await asyncio.gather(*train, *held_out)
    assert most == {"train": 3, "eval": 2}


async def test_metrics_are_of_the_latest_requests(world):
    async with world.inference(rolling_buffer_length=2) as servers:
        for _ in range(5):
            await servers.generate([3])
        (metrics,) = servers.metrics()
    assert metrics.num_requests == 2 and metrics.median_latency_s > 0


async def test_the_openai_api_is_there_too(serve):
    asked = []

    async def chat(request):
        body = await request.json()
        asked.append((request.path, body, request.headers["Authorization"]))
        choices = [{"index": i, "message": {"content": "hi"}} for i in range(body["n"])]
        return web.json_response({"choices": choices})

    app = web.Application()
    app.add_routes([web.post("/v1/chat/completions", chat), web.post("/v1/completions", chat)])
    config = APIServerConfig(base_url=f"{await serve(app)}/v1", model_name="m", api_key="key")
    async with InferenceServers([config], max_n_completions=2) as servers:
        answer = await servers.chat_completion(messages=[], n=3)
        await servers.completion(prompt="x")
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert sorted(body["n"] for path, body, _ in asked if path.startswith("/v1/chat")) == [1, 2]
    assert {(body["model"], key) for _, body, key in asked} == {("m", "Bearer key")}


async def test_a_server_without_token_ids_is_refused():
    with pytest.raises(ConfigError, match="server_type 'openai'"):
        InferenceServers([APIServerConfig(base_url="http://a/v1", server_type="openai")])
    async with MadeUpServers(5) as servers:
        (turn,) = await servers.generate([1], max_new_tokens=3)
    assert 1 <= len(turn.output_ids) <= 3


async def test_serve_takes_both_urls(world):
    base = f"{world.urls[1]}/v1"
    options = [
        f"--env.tokenizer_name={world.tokenizer.folder}", f"--env.rollout_server_url={world.urls[0]}",
        f"--openai.base_url={base}", "--env.use_wandb=false", "--env.total_steps=-1", "--env.group_size=2",
        "--env.ensure_scores_are_not_same=false",
    ]  # fmt: skip
    await command(run_environment.load_environment("guess_number"), "serve", *options)
    assert world.api.step == 3


async def command(cls, *words):
    """Run `hpc-rl env` in this process, with an environment."""
    given = run_environment.make_parser()
    args = given.instantiate(given.parse_args([words[0], cls.__name__, *words[1:]]))
    async with asyncio.timeout(extend(30)):
        assert await run_environment.serve_environment(args, cls) == 0


@pytest.mark.parametrize(("slurm", "host"), [("true", "n1:9000"), ("false", "localhost:9004")])
async def test_servers_are_those_of_the_job_or_of_this_host(chat_tokenizer, monkeypatch, slurm, host):
    class Asking(Echo):
        async def evaluate(self):
            assert self.servers.servers[0].base_url == f"http://{host}/v1"
            return {}

    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    await command(Asking, "evaluate", f"--env.tokenizer_name={chat_tokenizer.folder}", f"--slurm={slurm}")


async def test_requests_ask_for_as_many_completions_as_are_configured(world):
    class Asking(Echo):
        async def evaluate(self):
            assert len(await self.servers.generate([3], n=7)) == 7
            return {}

    options = [f"--env.tokenizer_name={world.tokenizer.folder}", f"--openai.base_url={world.urls[1]}/v1"]
    await command(Asking, "evaluate", *options, "--max_n_completions=3")
    assert sorted(body["sampling_params"]["n"] for body in world.server.bodies) == [1, 3, 3]
    world.server.bodies.clear()
    await command(Asking, "evaluate", *options, "--testing=true")
    assert not world.server.bodies
