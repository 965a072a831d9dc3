"""The rollout role as a process with several pools: the trained one, a frozen one, and a judge elsewhere."""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import json
import sys
import threading

import pytest
from aiohttp import web
from patience import extend, wait_until
from rollout_trial import FakeServer, RolloutRole, make_trial
from toy_plans import toy_plan

from hpc_rl.config.load.stored import from_dict, to_dict
from hpc_rl.config.options.experiment import TeacherConfig
from hpc_rl.config.options.inference import InferenceEngineConfig, JudgeConfig
from hpc_rl.config.options.pools import PoolConfig
from hpc_rl.config.options.teacher import TeachingConfig, TemplatesConfig
from hpc_rl.core.errors import ExitCode
from hpc_rl.core.net import bind
from hpc_rl.core.trial import write_json
from hpc_rl.plan.schema import Pool
from hpc_rl.status.rollout_report import list_problems, load_rollout

KEY = "sk-of-the-judge"
CHAT = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %};{% endif %}"
TEMPLATES = TemplatesConfig(
    baseline="0{question}",
    diagnostic="1{question}",
    adaptive="2{question}{approach}",
    with_teaching="3{question}{teaching}",
)


class JudgeElsewhere:
    """An endpoint that finds every answer half good; keeps what it is asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, float]] = []
        self.url = ""
        self.works = True
        self._started = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        assert self._started.wait(extend(60))

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(extend(10))

    def _serve(self) -> None:
        self._loop.run_until_complete(self._main())
        self._loop.close()

    async def _main(self) -> None:
        self._stop = asyncio.Event()
        app = web.Application()
        app.add_routes([web.get("/v1/models", self._models), web.post("/v1/chat/completions", self._chat)])
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        listener = bind("127.0.0.1")
        await web.SockSite(runner, listener).start()
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        self._started.set()
        await self._stop.wait()
        await runner.cleanup()

    async def _models(self, request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != f"Bearer {KEY}":
            return web.json_response({"error": "who are you?"}, status=401)
        return web.json_response({"data": [{"id": "grader"}]})

    async def _chat(self, request: web.Request) -> web.Response:
        if not self.works:
            return web.json_response({"error": "overloaded"}, status=503)
        body = await request.json()
        self.asked.append((body["messages"][0]["content"], body["temperature"]))
        choice = {"message": {"content": "<score>0.5</score>"}, "finish_reason": "stop"}
        return web.json_response({"choices": [choice] * body["n"], "usage": {"completion_tokens": 4}})


@pytest.fixture
def judge():
    made = JudgeElsewhere()
    yield made
    made.close()


def test_prompts_wait_for_a_reward_model_that_is_away(tmp_path):
    trial = make_trial(
        tmp_path, batch_size=2, n_samples=2, num_rows=6, reward_fn="liked", max_head_offpolicyness=0
    )
    grpo = from_dict(json.loads(trial.config_json.read_bytes()))
    options = {"allocation_mode": "embedded:d1+embedded[liked]:d1+fsdp:d1"}
    pools = {"liked": PoolConfig(path=str(tmp_path / "model"))}
    write_json(trial.config_json, to_dict(dataclasses.replace(grpo, pools=pools, **options)))
    policy, liked = FakeServer(trial), FakeServer(trial, 1, version="", pool="liked")
    with concurrent.futures.ThreadPoolExecutor() as background, contextlib.ExitStack() as stack:
        stack.callback(policy.close)
        role = RolloutRole(trial).start()
        stack.callback(role.kill)
        client = role.client()
        batches = [client.batch(1, 0)]
        assert liked.requests >= 2
        liked.close()
        policy.publish("0.1")
        batch = background.submit(client.batch, 2, 0)
        with pytest.raises(TimeoutError):
            batch.result(timeout=4)
        liked = FakeServer(trial, 1, version="", pool="liked")
        stack.callback(liked.close)
        batches.append(batch.result(timeout=extend(60)))
        client.close()
    rows = [row for batch in batches for group in batch.groups for row in group.trajectories]
    assert len(rows) == 8 and all(row.reward == len(row.ids) for row in rows)
    assert {group.index for batch in batches for group in batch.groups} == {0, 1, 2, 3}


def teacher_trial(root, judge: JudgeElsewhere):
    """A trial that teaches; the models are one tokenizer."""
    trial = make_trial(root, batch_size=2, n_samples=2, num_rows=6)
    (root / "model" / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<eos>", "chat_template": CHAT})
    )
    grpo = from_dict(json.loads(trial.config_json.read_bytes()))
    known = {field.name: getattr(grpo, field.name) for field in dataclasses.fields(grpo)}
    known |= {
        "trainer": "teacher",
        "allocation_mode": "embedded[teacher]:d1+embedded[student]:d1+fsdp:d1",
        "pools": {
            "student": PoolConfig(path=str(root / "model"), max_new_tokens=5),
            "judge": PoolConfig(url=judge.url, api_key_env="JUDGE_KEY"),
        },
        "rollout": InferenceEngineConfig(
            max_head_offpolicyness=2,
            workflow="teacher",
            reward_fn="judge",
            judge=JudgeConfig(temperatures=[0.0, 1.0], template="{question}|{completion}|{answer}"),
            enable_rollout_tracing=True,
        ),
    }
    config = TeacherConfig(**known, teacher=TeachingConfig(templates=TEMPLATES))
    write_json(trial.config_json, to_dict(config))
    pools = [Pool(name=name, backend="embedded") for name in ("teacher", "student")]
    plan = toy_plan([], sys.executable, experiment_name="exp", trial_name="trial", pools=pools)
    write_json(trial.plan_json, plan.to_json())
    return trial


def test_a_teacher_a_frozen_student_and_a_judge_elsewhere(tmp_path, judge):
    trial = teacher_trial(tmp_path, judge)
    teacher, student = FakeServer(trial, pool="teacher"), FakeServer(trial, 1, version="", pool="student")
    role = RolloutRole(trial, {"JUDGE_KEY": KEY}).start()
    try:
        client = role.client()
        batches = []
        for step in (1, 2, 3):
            teacher.publish(f"0.{step - 1}")
            batches.append(client.batch(step, 0))
        groups = [group for batch in batches for group in batch.groups]
        rows = [row for group in groups for row in group.trajectories]
        assert len(groups) == 6 and len(rows) == 12
        assert {int(row.steps.max()) for row in rows} <= {0, 1, 2}
        for row in rows:  # the judge finds all answers alike
            assert (row.stats["baseline_accuracy"], row.stats["reward_solved"]) == (0.5, 0.25)
            assert row.ids[0] == 2, "the trained prompt is the adaptive one"
        for group in groups:
            assert len({tuple(row.ids[~row.loss_mask]) for row in group.trajectories}) == 1
        result = client.evaluate("0.2", "0.2")
        assert (result.num_prompts, result.stats["accuracy_delta"]) == (7, 0.0)
        assert {temperature for _, temperature in judge.asked} == {0.0, 1.0}
        assert all(text.startswith(tuple("0123456789")) and text.count("|") == 2 for text, _ in judge.asked)
        log = role.log.read_text()
        assert "probe:\n" in log and "the judge at temperature 1 gave the score 0.5" in log and KEY not in log
        client.close()
        assert role.stop() == ExitCode.STOPPED
    finally:
        if role.process.poll() is None:
            role.kill()
        teacher.close()
        student.close()


def test_status_tells_of_a_judge_that_fails_until_it_answers_again(tmp_path, judge):
    trial = teacher_trial(tmp_path, judge)
    teacher, student = FakeServer(trial, pool="teacher"), FakeServer(trial, 1, version="", pool="student")
    teacher.publish("0.0")
    judge.works = False
    role = RolloutRole(trial, {"JUDGE_KEY": KEY}).start()

    def wait_for_problem(count: int) -> list[str]:
        found = []

        def has_so_many() -> bool:
            found.append(load_rollout(trial.attempt("1.0")))
            return found[-1] is not None and len(found[-1].endpoints) == count

        wait_until(has_so_many, 60, lambda: found[-1])
        return [line for line in list_problems(found[-1], live=True) if "pool judge" in line]

    with concurrent.futures.ThreadPoolExecutor() as background, contextlib.ExitStack() as stack:
        stack.callback(student.close)
        stack.callback(teacher.close)
        stack.callback(role.kill)
        client = role.client()
        batch = background.submit(client.batch, 1, 0)
        [line] = wait_for_problem(1)
        assert f"{judge.url}/chat/completions answered 503" in line and KEY not in line
        judge.works = True
        assert wait_for_problem(0) == []
        assert len(batch.result(extend(60)).groups) == 2
        client.close()


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({}, "pools.judge.api_key_env JUDGE_KEY is not set in the environment of the job"),
        ({"JUDGE_KEY": "sk-wrong"}, "models answered 401: "),
    ],
    ids=["no key", "wrong key"],
)
def test_a_judge_without_its_key_ends_the_role_with_the_reason(tmp_path, judge, env, words):
    trial = teacher_trial(tmp_path, judge)
    role = RolloutRole(trial, env).start()
    try:
        assert role.process.wait(extend(90)) == ExitCode.BAD_CONFIG
        role.process.stdin.close()
    finally:
        if role.process.poll() is None:
            role.kill()
    log = role.log.read_text()
    assert words in log and "sk-wrong" not in log
