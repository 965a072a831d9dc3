"""Servers and trainer that take turns on the same units: the same training, and no memory held in between."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from patience import extend
from toy_trials import ROOT, make_toy
from trainer_processes import Roles, make_trial, write_plan
from transformers import AutoModelForCausalLM, Qwen3Config

from hpc_rl.core.trial import Trial, write_json
from hpc_rl.name_resolve import keys, open_names
from hpc_rl.servers.client import GenerateRequest, HttpServerClient, open_session
from hpc_rl.stats.read import load_history

NUM_STEPS = 4
OPTIONS = [
    "train_dataset.batch_size=4",
    "gconfig.n_samples=4",
    "gconfig.max_new_tokens=4",
    "actor.ppo_n_minibatches=1",
    "actor.optimizer.lr=1e-2",
    "actor.adv_norm.mean_level=batch",
    "recover.freq_steps=1",
    "rollout.batch_order=in_order",
    "embedded.batch_invariant=true",
]
APART, SHARED = "embedded:d1+fsdp:d1", "embedded:d1|fsdp:d1"


def run_part(trial: Trial, attempt: str, allocation: str) -> list[str]:
    """Run an attempt to the end of its steps; return the lines of the server's log."""
    write_plan(trial, "grpo", 1, allocation)
    write_json(trial.job(attempt.split(".")[0]), {"job_id": attempt.split(".")[0], "start_mode": "auto"})
    with Roles(trial, attempt) as roles:
        roles.start("server")
        roles.start("rollout")
        assert roles.ended(roles.trainer(), timeout_s=300) == [0], roles.log("trainer").read_text()[-3000:]
        return roles.log("server").read_text().splitlines()


def make(folder: Path, name: str, num_steps: int) -> Trial:
    return make_trial(folder, name, "grpo", [*OPTIONS, f"total_train_steps={num_steps}"])


def list_numbers(trial: Trial) -> list[tuple[float, ...]]:
    return [
        tuple(row[name] for name in ("step", "loss", "grad_norm", "reward"))
        for row in load_history(trial).steps
    ]


@pytest.mark.timeout(400)
def test_a_trial_in_turn_makes_its_steps(tmp_path):
    trial = make(make_toy(tmp_path, "base"), "in-turn", 3)
    said = run_part(trial, "1.0", SHARED)
    assert sum("has released its memory" in line for line in said) >= 3
    rows = load_history(trial).steps
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(row["turn_s"] > 0 and row["staleness_mean"] == 0 for row in rows)


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_units_in_turn_train_as_units_apart_and_continue_each_other(tmp_path):
    toy = make_toy(tmp_path, "base")
    whole = make(toy, "apart", NUM_STEPS)
    run_part(whole, "1.0", APART)
    for attempt, num_steps, allocation in (("1.0", 2, SHARED), ("2.0", 3, APART), ("3.0", NUM_STEPS, SHARED)):
        parts = make(toy, "parts", num_steps)
        run_part(parts, attempt, allocation)
    assert len(list_numbers(whole)) == NUM_STEPS
    assert list_numbers(parts) == list_numbers(whole)


MB = 1 << 20
CODE_MB = 150  # that a server imports for its model at the first start


def make_large_model(folder: Path) -> int:
    """Make a model of which a process that holds it can be told by its memory; return its bytes."""
    shape = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 10, "vocab_size": 4000}
    heads = {
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 1024,
    }
    model = AutoModelForCausalLM.from_config(Qwen3Config(**shape, **heads, eos_token_id=None))
    model.save_pretrained(folder)
    return sum(parameter.nbytes for parameter in model.parameters())


async def measure_turns(trial: Trial, process: psutil.Process) -> tuple[list[int], list[list[int]]]:
    """Return resident bytes before the first turn, then in and after each of two turns, and their tokens."""
    names, key, tokens = open_names(trial), keys.server("rollout", 0), trial.load_tokens()
    sizes, made = [], []
    async with open_session() as session, asyncio.timeout(extend(60)):
        while key not in (found := names.list_leases(keys.servers("rollout"))):
            assert process.is_running() and process.status() != psutil.STATUS_ZOMBIE
            await asyncio.sleep(0.05)
        client = HttpServerClient(session, found[key].value["url"], tokens["data"], tokens["control"])
        while (await client.health())["state"] != "released":
            await asyncio.sleep(0.05)
        sizes.append(process.memory_info().rss)
        for turn in range(2):
            while await client.resume_memory() != "serving":
                await asyncio.sleep(0.05)
            sampling = {"max_new_tokens": 16, "temperature": 0}
            turns = await client.generate_many(
                [GenerateRequest([5, 6, 7], sampling, f"{turn}-{i}") for i in range(4)]
            )
            made.append(turns[0].output_ids)
            sizes.append(process.memory_info().rss)
            await client.release_memory()
            sizes.append(process.memory_info().rss)
    return sizes, made


@pytest.mark.timeout(300)
def test_between_its_turns_a_server_holds_no_model_and_no_cache(tmp_path):
    trial = Trial(tmp_path / "trial")
    trial.make_dirs()
    trial.make_secret()
    trial.attempt("1.0").make_dirs()
    num_bytes = make_large_model(tmp_path / "model")
    write_json(trial.current_weights, {"label": "0.1", "path": str(tmp_path / "model")})
    argv = [sys.executable, ROOT / "tests/integration/replica_process.py", trial.dir, "0", ""]
    process = subprocess.Popen(argv, env={**os.environ, "PYTHONPATH": str(ROOT)})
    try:
        sizes, made = asyncio.run(measure_turns(trial, psutil.Process(process.pid)))
    finally:
        process.kill()
        process.wait()
    before, *later = (size / MB for size in sizes)
    print(f"model {num_bytes / MB:.0f} MB, process {before:.0f} MB, in and after its turns {later}")
    in_turns, between = later[::2], later[1::2]
    assert min(in_turns) - before > num_bytes / MB, "the measurement does not see the model"
    assert max(between) < before + CODE_MB < before + num_bytes / MB
    assert len(made[0]) == 16 and made[1] == made[0]
