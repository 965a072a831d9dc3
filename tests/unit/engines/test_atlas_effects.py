"""Each name of ATLAS, from the command line to what it changes."""

import asyncio
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from training import Starter

from hpc_rl.config.load.load import load
from hpc_rl.config.options.experiment import count_steps
from hpc_rl.config.options.operations import RecoverConfig
from hpc_rl.config.rules.check import check
from hpc_rl.config.schedule import compute_learning_rate
from hpc_rl.config.vllm_versions import FLAGS
from hpc_rl.core.types import Reply, Turn
from hpc_rl.datasets.encode import Prompts
from hpc_rl.engines.base import Sequences
from hpc_rl.engines.fsdp import engine as fsdp
from hpc_rl.engines.shared.micro_batches import cut
from hpc_rl.engines.shared.optimizer import Optimizer, make_shards
from hpc_rl.roles.rollout_worker import open_rewards
from hpc_rl.rollout.rewards import score_each, weight_rewards
from hpc_rl.rollout.server_pool import ServerPool
from hpc_rl.rollout.teacher.teaching import TeacherWorkflow
from hpc_rl.servers.server_process import make_arguments
from hpc_rl.servers.vllm import make_settings
from hpc_rl.stats.metrics_writers import RunIdentity, TensorBoardWriter, open_writers
from hpc_rl.trainers import compose
from hpc_rl.trainers.run import find_tokenizer_folder
from hpc_rl.trainers.timer import Timer

WORDS = ["experiment_name=e", "trial_name=t", "train_dataset.path=/d", "actor.ppo_n_minibatches=1"]
WORDS += ["model_name_or_path=/m", "num_generations=2"]
TEACHER = ["pools.student.path=/s", "allocation_mode=sglang:d1+sglang[student]:d1+fsdp:d2"]


def configured(*words: str):
    return check(load([], [*WORDS, "cluster.n_gpus_per_node=4", *words]), files=False).config


def test_the_model():
    assert find_tokenizer_folder(configured("model_name_or_path=/other")) == Path("/other")


def test_learning_rate_and_warm_up():
    made = configured("learning_rate=0.25", "warmup_ratio=0.5").actor.optimizer
    assert [compute_learning_rate(made, update, 8) for update in (0, 1, 3, 4)] == [0, 0.0625, 0.1875, 0.25]


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("weight_decay=0.5", 1 - 0.1 * 0.5 - 0.1),
        # clipped to the size of eps, a gradient moves by half of the rate
        ("max_grad_norm=1e-5", 1 - 0.1 * 0.5),
    ],
)
def test_an_update(given, wanted):
    made = configured("weight_decay=0", given).actor.optimizer
    weight = nn.Parameter(torch.ones(1))
    optimizer = Optimizer(made, make_shards({"w": weight}))
    weight.grad = torch.ones(1)
    optimizer.step(lr=0.1, grad_norm=1.0)
    assert weight.item() == pytest.approx(wanted, abs=1e-3)


@pytest.mark.parametrize(
    ("given", "steps"),
    [
        ("num_train_epochs=5", 500),
        ("per_device_train_batch_size=5", 20),  # 5 sequences on each of 2 ranks: 5 questions
        ("per_device_train_batch_size=5 gradient_accumulation_steps=2", 10),
        ("total_train_n_seqs=100 num_generations=4", 25),
    ],
)
def test_the_length_of_a_trial(given, steps):
    assert count_steps(configured(*given.split()), num_rows=100) == steps


@pytest.mark.parametrize(
    ("given", "groups"),
    [
        ("gradient_accumulation_steps=3", 3),
        ("backprop_accumulation_steps=3", 3),
        ("backprop_accumulation_micro_batch_size=2", 3),
    ],
)
def test_micro_batches(given, groups):
    rows = Sequences([np.zeros(8, np.int32)] * 6, {})
    assert len(cut(rows, "padded", configured(given).actor.mb_spec)) == groups


def test_beta_loads_a_reference_model(monkeypatch):
    loaded = []
    monkeypatch.setattr(
        compose,
        "_make_engine",
        lambda start, model, *_, **__: (
            loaded.append(model.path) or SimpleNamespace(initialize=lambda _: None)
        ),
    )
    config = configured("beta=0.04")
    assert compose._build_reference(SimpleNamespace(is_one_node=False), config) and loaded == ["/m"]


@pytest.mark.parametrize(
    ("given", "name", "value"),
    [
        ("temperature=0.7", "temperature", 0.7),
        ("top_k=50", "top_k", 50),
        ("top_p=0.5", "top_p", 0.5),
        ("min_p=0.25", "min_p", 0.25),
        ("repetition_penalty=1.5", "repetition_penalty", 1.5),
        ("max_completion_length=7", "max_new_tokens", 7),
    ],
)
def test_a_request_for_a_completion(given, name, value):
    tokenizer = SimpleNamespace(eos_token_ids=[])
    pool = ServerPool("", SimpleNamespace(), tokenizer, configured(given).gconfig)  # type: ignore[arg-type]
    assert pool.request([1, 2], seed=1).sampling[name] == value


def test_long_prompts_keep_their_last_tokens(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "abcdefgh"}) + "\n")
    config = configured("max_prompt_length=3", f"train_dataset.path={tmp_path / 'a.jsonl'}")
    tokenizer = SimpleNamespace(encode=lambda text: [*map(ord, text)])
    assert Prompts(config.train_dataset, tokenizer, 1).at(0).input_ids == [*map(ord, "fgh")]  # type: ignore[arg-type]


async def test_several_rewards_are_weighted():
    config = configured("rollout.reward_fn=exact_match, contains", "reward_weights=[2, 0.5]")
    tokenizer = SimpleNamespace(encode=None)
    rewards = await open_rewards(config, {}, tokenizer)  # type: ignore[arg-type]
    assert await rewards("?", ["3", "it is 3", "4"], {"answer": "3"}) == [2.5, 0.5, 0]
    both = configured("rollout.reward_fn=exact_match,contains")
    plain = await open_rewards(both, {}, tokenizer)  # type: ignore[arg-type]
    assert await plain("?", ["3"], {"answer": "3"}) == [2]

    async def slow(*_):
        await asyncio.sleep(0)
        return 1.0

    assert await weight_rewards({"slow": (score_each(slow), -1)})("?", ["3"], {}) == [-1]


@pytest.mark.parametrize(
    ("given", "flag", "value"),
    [
        ("vllm_gpu_memory_utilization=0.5", "--gpu-memory-utilization", "0.5"),
        ("vllm_dtype=half", "--dtype", "float16"),
        ("vllm_max_model_len=512", "--max-model-len", "512"),
    ],
)
def test_a_server_of_vllm(given, flag, value):
    config = configured(given, "allocation_mode=vllm:d2+fsdp:d2", "max_completion_length=9")
    argv = make_arguments(make_settings(config.vllm, "cuda", 1, 0), [], FLAGS["0.32.0"])
    assert argv[argv.index(flag) + 1] == value


def test_the_reference_model_is_in_cpu_memory(model_dir, monkeypatch):
    seen = []
    monkeypatch.setattr(fsdp, "fully_shard", lambda _, **options: seen.append(options["offload_policy"]))
    given = [f"model_name_or_path={model_dir}", "beta=0.1", "offload_untrained_models=true"]
    config = configured(*given, "ref.init_from_scratch=true", "ref.dtype=float32")
    fsdp.FSDPEngine(config.ref, frozen=True).initialize(0)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    assert seen and all(isinstance(policy, CPUOffloadPolicy) for policy in seen)


class Asked:
    """What a workflow of the teacher asks; it is answered by one letter."""

    index = 1
    tokenizer = SimpleNamespace(
        chat=lambda chat: chat[-1]["content"], encode=lambda text, **_: [*map(ord, text)], decode=str
    )

    def __init__(self) -> None:
        self.texts, self.limits = {}, {}

    async def ask(self, chat, pool, n=1, label="", max_new_tokens=None):
        self.texts[label], self.limits[label] = chat[-1]["content"], max_new_tokens
        return [Reply("x", 1, "stop")] * n

    async def ask_many(self, chats, pool, n=1):
        return {label: await self.ask(chat, pool, n, label) for label, chat in chats.items()}

    async def once(self, key, make):
        return await make()

    async def samples(self, ids):
        self.texts["teacher"] = "".join(map(chr, ids))
        return [Turn([1], [-0.5], [("0.0", 0, 1)], "stop")]

    async def reward(self, *_):
        return 1.0


@pytest.mark.parametrize(
    ("given", "label", "asked"),
    [
        ("student_diagnostic_template=D {question}", "probe", "D 1+2?"),
        ("teacher_adaptive_template=A {question} {approach}", "teacher", "A 1+2? x"),
        ("student_with_teaching_template=T {question} {teaching}", "taught.0", "T 1+2? [1]"),
        ("student_baseline_template=B {question}", "baseline", "B 1+2?"),
    ],
)
async def test_what_teacher_and_student_are_asked(given, label, asked):
    generate = Asked()
    await TeacherWorkflow.create(configured(given, *TEACHER)).run({"prompt": "1+2?", "answer": "3"}, generate)
    assert generate.texts[label] == asked


async def test_tokens_of_a_probe():
    generate = Asked()
    workflow = TeacherWorkflow.create(configured("max_probe_tokens=30", *TEACHER))
    await workflow.run({"prompt": "1+2?", "answer": "3"}, generate)
    assert generate.limits["probe"] == 30


def test_tensorboard_gets_every_third_step(tmp_path, monkeypatch):
    steps = []
    monkeypatch.setattr(TensorBoardWriter, "log", lambda _, step, __: steps.append(step))
    logger = configured("logging_steps=3").stats_logger
    writers = open_writers(tmp_path / "m.jsonl", tmp_path / "tb", stats_logger=logger)
    for step in range(1, 8):
        writers.log(step, {"loss": 1.0})
    writers.close()
    assert steps == [3, 6] and len((tmp_path / "m.jsonl").read_text().splitlines()) == 7


def test_wandb_gets_what_is_reported(tmp_path, monkeypatch):
    modes = []
    run = SimpleNamespace(finish=lambda: None, define_metric=lambda *_, **__: None)
    wandb = SimpleNamespace(init=lambda mode, **_: modes.append(mode) or run, Settings=dict)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    who = RunIdentity("e", "t", tmp_path, tmp_path, {})
    for names in ("[wandb]", "none"):
        logger = configured(f"report_to={names}").stats_logger
        open_writers(tmp_path / "m.jsonl", tmp_path / "tb", 0, who, logger).close()
    assert modes == ["online"]


@pytest.mark.parametrize(("given", "section"), [("save_steps=3", "saver"), ("eval_steps=3", "evaluator")])
def test_every_third_step(given, section):
    timer = Timer(getattr(configured(given, "valid_dataset.path=/v"), section))
    assert [timer.check() for _ in range(6)] == [False, False, True] * 2


SCORES = {2: {"eval_reward": 1, "eval_loss": 3}, 4: {"eval_reward": 2, "eval_loss": 2}, 6: {"eval_reward": 3}}


def exports(tmp_path, *words: str) -> dict[str, int]:
    """Name of an export -> the step of its weights."""
    config = configured("valid_dataset.path=/v", "save_steps=2", "eval_steps=2", *words)
    every = RecoverConfig(mode="auto", freq_steps=2)
    start = Starter(tmp_path, saver=config.saver, evaluator=config.evaluator, recover=every)
    start(6, numbers=SCORES)
    records = {
        path.parent.name: json.loads(path.read_text()) for path in start.trial.exports.glob("*/hpc_rl.json")
    }
    return {name: int(record["version"].split(".")[1]) for name, record in records.items()}


def test_the_newest_exports_are_kept(tmp_path):
    assert set(exports(tmp_path, "save_total_limit=1")) == {"step-00000006", "final"}


@pytest.mark.parametrize(
    ("given", "best", "final"),
    [
        ("metric_for_best_model=eval_reward", 6, 6),
        ("metric_for_best_model=reward greater_is_better=false", 2, 6),
        ("metric_for_best_model=reward greater_is_better=false load_best_model_at_end=true", 2, 2),
    ],
)
def test_the_best_model(tmp_path, given, best, final):
    found = exports(tmp_path, *given.split())
    assert (found["best"], found["final"]) == (best, final)
