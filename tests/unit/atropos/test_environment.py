"""An environment at work: groups, evaluations, limits; against a few lines of an API and a server."""

import asyncio
import json
import logging

import pytest
from aiohttp import web
from atropos_services import FakeApi, FakeServer
from patience import extend

from hpc_rl.atropos import APIServerConfig, EnvConfig, Environment, ScoredGroup
from hpc_rl.atropos.groups import NO_LOGPROB, NO_LOSS
from hpc_rl.atropos.inference_servers import InferenceServers, find_servers
from hpc_rl.atropos.rollout_api import RolloutApi
from hpc_rl.atropos.serving import Serving
from hpc_rl.core.errors import ConfigError, RequestRefused
from hpc_rl.datasets.tokenizer import Tokenizer
from hpc_rl.tools import run_environment
from hpc_rl.tools.run_environment import load_environment, main

pytestmark = pytest.mark.waits


class Echo(Environment):
    """The model's reply is its score; the second of each group gets a second turn."""

    items = ({"prompt": "a"}, {"prompt": "b"})
    eval_items = ({"prompt": "c"}, {"prompt": "d"}, {"prompt": "e"})
    played = 0

    async def episode(self, item, conversation):
        type(self).played += 1
        number = type(self).played
        await conversation.reply()
        if number % 2:
            conversation.say("!")
            await conversation.reply()
        return float(number % 2)


class World:
    """An environment with its two services."""

    def __init__(self, tokenizer, api, server):
        self.tokenizer, self.api, self.server = tokenizer, api, server
        self.urls = ("", "")

    async def run(self, cls=Echo, stop_when=None, openai=None, **settings):
        config = EnvConfig(**{"group_size": 2, "use_wandb": False, "max_num_workers": 2, **settings})
        stopping = asyncio.Event()
        servers = self.inference(api_key="key", **(openai or {}))
        async with servers as inference, RolloutApi(self.urls[0]) as api:
            serving = Serving(cls(config, inference, self.tokenizer), api, stopping)
            running = asyncio.create_task(serving.run())
            while stop_when is not None and not running.done() and not stop_when(serving):
                await asyncio.sleep(0.02)
            if stop_when is not None:
                stopping.set()
            await asyncio.wait_for(running, extend(30))
            return serving

    def inference(self, **settings):
        return InferenceServers([APIServerConfig(base_url=f"{self.urls[1]}/v1", **settings)])

    def temperatures(self):
        return {body["sampling_params"]["temperature"] for body in self.server.bodies}


@pytest.fixture
async def world(chat_tokenizer, serve):
    made = World(chat_tokenizer, FakeApi(4, 3), FakeServer(chat_tokenizer, lambda text: "ok"))
    made.urls = (await serve(made.api.app()), await serve(made.server.app()))
    return made


async def test_it_samples_at_the_trainers_temperature_unless_it_says_another(world):
    world.api.temperature = 0.6
    await world.run(total_steps=-1, steps_per_eval=0)
    assert world.temperatures() == {0.6}
    assert world.api.groups[0]["generation_params"] == {"temperature": 0.6}
    for sampling, temperature in (({"top_k": 5}, 0.6), ({"temperature": 0.1}, 0.1)):
        world.server.bodies.clear()
        world.api.groups.clear()
        await world.run(type("Own", (Echo,), {"sampling": sampling}), total_steps=-1, steps_per_eval=0)
        assert world.temperatures() == {temperature}


async def test_an_api_that_does_not_tell_its_temperature(world):
    await world.run(total_steps=-1, steps_per_eval=0)  # as run-api of atroposlib, which has no such route
    assert world.temperatures() == {1.0}


async def test_the_messages_of_a_plain_prompt_begin_with_it(world):
    await world.run(total_steps=-1, steps_per_eval=0, include_messages=True)
    for messages in (one for group in world.api.groups for one in group["messages"]):
        assert messages[0]["role"] == "user" and messages[0]["content"] in "ab"
        assert messages[1] == {"role": "assistant", "content": "ok"}


async def test_it_feeds_a_trainer_until_its_steps_are_made(world):
    serving = await world.run(total_steps=-1, include_messages=True)
    assert world.api.step == 3
    assert world.api.registered[0]["group_size"] == 2 and world.api.registered[0]["desired_name"] == "Echo"
    for group in world.api.groups:
        assert group["env_id"] == 7
        scored = ScoredGroup(**{name: value for name, value in group.items() if name != "env_id"})
        for ids, mask, logprobs, messages in zip(
            scored.tokens, scored.masks, scored.inference_logprobs, scored.messages, strict=True
        ):
            made = [i for i, entry in enumerate(mask) if entry != NO_LOSS]
            assert [mask[i] for i in made] == [ids[i] for i in made]
            assert all((logprobs[i] == -0.5) == (i in made) for i in range(len(ids)))
            assert all(logprobs[i] == NO_LOGPROB for i in range(len(ids)) if i not in made)
            replies = [message["content"] for message in messages if message["role"] == "assistant"]
            assert set(replies) == {"ok"} and len(made) == 3 * len(replies)  # with the end of a reply
    assert serving.workers.counts["sent"] >= 6


async def test_groups_with_equal_scores_are_dropped_and_counted(world):
    class Flat(Echo):
        async def episode(self, item, conversation):
            await conversation.reply()
            return 1.0

    await world.run(Flat, lambda serving: serving.workers.counts["equal_scores"] > 0)
    assert not world.api.groups
    assert world.api.disconnected == [7]
    await world.run(Flat, total_steps=-1, ensure_scores_are_not_same=False)
    assert world.api.step == 3


async def test_a_failed_delivery_is_repeated_under_the_same_key(world):
    world.api.failures = [503, 500]
    await world.run(total_steps=-1, max_num_workers=1)
    assert len(set(world.api.keys)) == len(world.api.groups)
    assert len(world.api.keys) == len(world.api.groups) + 2


async def test_servers_that_fail_are_asked_again_and_refusals_are_not(world):
    world.server.failures = [500, 503]
    await world.run(total_steps=-1)
    assert world.api.step == 3
    async with world.inference() as servers:
        world.server.failures, world.server.bodies = [400], []
        with pytest.raises(RequestRefused, match="400: told to fail"):
            await servers.generate([3])
        assert len(world.server.bodies) == 1


async def test_completions_are_asked_for_in_parts(world):
    async with world.inference(n_kwarg_is_ignored=True) as servers:
        assert len(await servers.generate([3], n=3)) == 3
        assert [body["sampling_params"]["n"] for body in world.server.bodies] == [1, 1, 1]


@pytest.mark.parametrize("handling", ["stop_train", "LIMIT_TRAIN", "none"])
async def test_training_makes_room_for_an_evaluation(world, handling):
    seen, most = [], {"stop_train": 0, "LIMIT_TRAIN": 1, "none": 4}[handling]

    class Slow(Echo):
        async def evaluate(self):
            async with asyncio.timeout(extend(30)):  # those that run may finish
                while serving.workers.num_running != most:
                    await asyncio.sleep(0.02)
            for _ in range(5):
                seen.append(serving.workers.num_running)
                await asyncio.sleep(0.1)
            stopping.set()
            return {"eval_score": 1.0}

        async def episode(self, item, conversation):
            await asyncio.sleep(0.05)
            return await super().episode(item, conversation)

    world.api.num_steps = 1000
    room = {"max_num_workers": 4, "max_batches_offpolicy": 8, "total_steps": 1000}
    evaluation = {"steps_per_eval": 2, "eval_handling": handling, "eval_limit_ratio": 0.25}
    config = EnvConfig(group_size=2, use_wandb=False, **room, **evaluation)
    stopping = asyncio.Event()
    async with world.inference() as inference, RolloutApi(world.urls[0]) as api:
        serving = Serving(Slow(config, inference, world.tokenizer), api, stopping)
        await serving.run()
    assert seen and max(seen) == most


async def test_an_evaluation_that_fails_is_reported_and_the_environment_goes_on(world, caplog):
    caplog.set_level(logging.INFO)

    class Failing(Echo):
        async def evaluate(self):
            return {"eval_score": 1 / 0}

    serving = await world.run(Failing, total_steps=-1, steps_per_eval=1)
    assert world.api.step == 3 and serving.evaluations_failed >= 1
    line = next(one for one in caplog.messages if "evaluation at step" in one)
    assert "ZeroDivisionError: division by zero" in line and "test_environment.py:" in line
    assert ", in evaluate" in line
    assert f"evaluations_failed {serving.evaluations_failed}" in caplog.text


async def test_items_that_fail_are_left_out_of_an_evaluation(world, caplog):
    class Failing(Echo):
        async def episode(self, item, conversation):
            if item["prompt"] in self.bad:
                raise ValueError(f"bad item {item['prompt']}")
            return 1.0

    async with world.inference() as inference:
        environment = Failing(EnvConfig(), inference, world.tokenizer)
        environment.bad = "c"
        assert await environment.evaluate() == {"eval_score": 1.0, "eval_items": 2, "eval_failed": 1}
        assert (
            "1 of 3 evaluation episodes failed and are left out of the score: ValueError: bad item c"
            in caplog.text
        )
        assert ", in episode" in caplog.text
        environment.bad = "cde"
        with pytest.raises(ValueError, match="bad item c"):
            await environment.evaluate()


async def test_a_server_that_ignores_n_is_noticed(world, serve, caplog):
    async def one_only(request):
        body = await request.json()
        world.server.bodies.append(body)
        return web.json_response(world.server._one("ok"))

    app = web.Application()
    app.router.add_post("/generate", one_only)
    world.urls = ("", await serve(app))
    async with world.inference() as inference:
        assert len(await inference.generate([5, 6], n=5)) == 5
        assert len(await inference.generate([5, 6], n=3)) == 3
    assert [body["sampling_params"]["n"] for body in world.server.bodies] == [5, 1, 1, 1, 1, 1, 1, 1]
    assert caplog.text.count("returned fewer completions than n = 5") == 1


def test_a_token_that_begins_with_v1_stays_in_the_url():
    config = APIServerConfig(base_url="http://host:1/t/v1abc/v1/")
    assert InferenceServers([config]).servers[0].native_url == "http://host:1/t/v1abc"


async def test_an_evaluation_has_limits_of_its_own(world):
    running = most = 0

    class Counting(Echo):
        async def episode(self, item, conversation):
            nonlocal running, most
            running, most = running + 1, max(most, running + 1)
            await conversation.reply()
            running -= 1
            return 1.0

    config = EnvConfig(max_eval_workers=2)
    async with world.inference() as inference:
        metrics = await Counting(config, inference, world.tokenizer).evaluate()
    assert metrics == {"eval_score": 1.0, "eval_items": 3} and most == 2
    assert world.temperatures() == {0.0}


async def test_an_episode_that_needs_too_many_tokens_is_dropped(world):
    def is_decided(serving):  # "a" + "ok<end>", then no room
        return serving.workers.counts["too_long"] > 0 or world.api.groups

    await world.run(Echo, is_decided, max_token_length=4)
    assert not world.api.groups


async def test_it_waits_for_the_trainer_and_refuses_a_batch_that_is_too_small(world):
    world.api.wait_rounds = 1
    with pytest.raises(ConfigError, match=r"group_size is 8.*4 sequences"):
        await world.run(group_size=8)


async def test_broken_environments_end_with_their_error_and_its_place(world, caplog):
    class Broken(Echo):
        async def episode(self, item, conversation):
            raise KeyError("answer")

    place = r"KeyError: 'answer' \(.*test_environment.py:\d+, in episode\)"
    with pytest.raises(RequestRefused, match=rf"64 episodes in a row failed.*{place}"):
        await world.run(Broken, max_num_workers=32, max_batches_offpolicy=16)
    assert caplog.text.count("Traceback (most recent call last)") == 1


def test_servers_come_from_the_urls_or_the_slurm_job():
    given = [APIServerConfig(base_url="http://a/v1"), APIServerConfig()]
    (one,) = find_servers(given, True, {"SLURM_JOB_NODELIST": "n[1-4]"})
    assert one.base_url == "http://a/v1"
    job = {"SLURM_JOB_NODELIST": "n[1-3]", "NUM_TRAINING_NODES": "1"}
    job |= {"SLURM_GPUS_ON_NODE": "4", "INFER_TP": "2"}
    found = [one.base_url for one in find_servers([APIServerConfig(timeout=5)], True, job)]
    assert found == [f"http://{node}:{port}/v1" for node in ("n2", "n3") for port in (9000, 9001)]
    assert find_servers([], False, job)[0].base_url == "http://localhost:9004/v1"
    with pytest.raises(ConfigError, match="no node is left for servers"):
        find_servers([], True, {**job, "NUM_TRAINING_NODES": "3"})
    with pytest.raises(ConfigError, match="INFER_TP is 'two'"):
        find_servers([], True, {**job, "INFER_TP": "two"})


def test_groups_that_no_trainer_could_use_are_refused():
    with pytest.raises(ValueError, match=r"masks\[0\] has 1 entries for 2 tokens"):
        ScoredGroup(tokens=[[1, 2]], masks=[[1]], scores=[0.0])
    with pytest.raises(ValueError, match="finite"):
        ScoredGroup(tokens=[[1]], masks=[[1]], scores=[float("nan")])
    with pytest.raises(ValueError, match="scores has 2 entries, but tokens has 1"):
        ScoredGroup(tokens=[[1]], masks=[[1]], scores=[0.0, 1.0])


@pytest.mark.parametrize("name", ["arithmetic", "calculator", "guess_number"])
def test_shipped_environments_make_groups_without_a_server(name, chat_tokenizer, tmp_path, capsys):
    given = [f"--env.tokenizer_name={chat_tokenizer.folder}", "--testing=true", "--env.total_steps=3"]
    output = tmp_path / "groups.jsonl"
    options = [*given, "--env.ensure_scores_are_not_same=false", f"--output={output}", "--env.group_size=2"]
    assert main(["process", name, *options]) == 0
    assert "3 groups of 2" in capsys.readouterr().out
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert [len(line["tokens"]) for line in lines] == [2, 2, 2]
    page = output.with_suffix(".html").read_text()
    assert page.count("<details") == 3 and "made by the model" in page
    # a second run does not touch the first one's file
    assert main(["process", name, *options]) == 0
    assert (tmp_path / "groups_1.jsonl").exists()
    assert main(["evaluate", name, *given, "--json"]) == 0
    assert "eval_score" in json.loads(capsys.readouterr().out.splitlines()[-1])


def test_an_environment_is_found_by_file_or_name(tmp_path):
    one = tmp_path / "one.py"
    one.write_text("from hpc_rl.atropos import Environment\nclass Mine(Environment): pass\n")
    assert load_environment(str(one)).__name__ == "Mine"
    assert load_environment(f"{one}:Mine").__name__ == "Mine"
    one.write_text(one.read_text() + "class Other(Environment): pass\n")
    with pytest.raises(ConfigError, match="has Mine, Other"):
        load_environment(str(one))
    with pytest.raises(ConfigError, match="no_such"):
        load_environment("no_such_module:Env")


def test_a_wrong_option_is_named(capsys):
    assert main(["serve", "arithmetic", "--env.group_siz=2"]) == 2
    assert "group_siz" in capsys.readouterr().err
    assert main(["process", "arithmetic", "--env.tokenizer_name=/no/where"]) == 64
    assert "/no/where has no tokenizer.json" in capsys.readouterr().err


def test_the_calculator_takes_numbers_only():
    from hpc_rl.examples.environments.calculator import call_tool

    assert call_tool('{"name": "calculator", "arguments": {"expression": "12*(3+4)"}}') == "84"
    for bad in (
        '{"arguments": {"expression": "__import__(1)"}}',
        "{",
        '{"arguments": {"expression": "1/0"}}',
    ):
        assert call_tool(bad).startswith("error")


def test_a_yaml_file_of_atropos_is_read(chat_tokenizer, tmp_path, capsys):
    file = tmp_path / "env.yaml"
    file.write_text(
        f"env:\n  tokenizer_name: {chat_tokenizer.folder}\n  group_size: 3\n  total_steps: 1\n"
        "  ensure_scores_are_not_same: false\n  eval_handling: LIMIT_TRAIN\n"
        "openai:\n- {base_url: http://a/v1, model_name: m}\n- {base_url: http://b/v1}\nslurm: false\ntesting: true\n"
    )
    assert main(["process", "arithmetic", f"--config={file}", f"--output={tmp_path}/g.jsonl"]) == 0
    assert "1 groups of 3" in capsys.readouterr().out
    assert isinstance(Tokenizer(chat_tokenizer.folder).size, int)


async def test_a_signal_ends_an_environment_whose_api_is_away(monkeypatch):
    monkeypatch.setattr(run_environment, "GRACE_S", 0.1)
    stopping = asyncio.Event()
    asyncio.get_running_loop().call_later(0.1, stopping.set)
    async with RolloutApi("http://127.0.0.1:1") as api:
        await asyncio.wait_for(
            run_environment._serve_until(stopping, api.register(EnvConfig(), "x")), extend(10)
        )


async def test_what_fails_while_it_serves_is_raised():
    async def fails():
        raise ConfigError("no")

    with pytest.raises(ConfigError):
        await run_environment._serve_until(asyncio.Event(), fails())
