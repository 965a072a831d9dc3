"""`hpc-rl check --episode`: one prompt through model, workflow and reward before anything is submitted."""

import getpass
import json
import shutil

import pytest
from command_line import Shell
from patience import extend

from hpc_rl.examples.toy import make_model

CODE = """
import asyncio, time
from hpc_rl import TrajectoryGroup, trajectory

async def three_turns(prompt, generate):
    return TrajectoryGroup(generate.index, [await _one(prompt, generate, n) for n in range(generate.n_samples)])

async def _one(prompt, generate, number):
    turns, context = [], list(prompt["input_ids"])
    so_far = []
    for turn in range(3):
        so_far += context
        made = await generate(so_far, number)
        turns.append((context, made))
        so_far += made.output_ids
        context = generate.tokenizer.encode("again?")
    text = generate.tokenizer.decode(made.output_ids)
    return trajectory(turns, await generate.reward(prompt, text) + 10 * number)

def two_parts(prompt, completion, answer, **columns):
    print("scores", completion)
    return {"reward": 0.5, "short": len(completion), "right": completion == answer}

def later(prompt, completion, **columns):
    return 1.0 if completion == "The answer is 1." else helper(columns)

def helper(columns):
    return columns["anwser"]

async def rejects(prompt, generate):
    for number in range(99):
        print("line", number)

async def hangs(prompt, generate):
    await asyncio.sleep(3600)

async def asks(prompt, generate):
    await generate.ask([{"role": "user", "content": "?"}], "judge", 1, "?")

async def holds(prompt, generate):
    time.sleep(3600)
"""
CONFIG = """
experiment_name: sums
total_train_steps: 10
trial_name: small
cluster: {fileroot: runs, n_gpus_per_node: 0}
train_dataset: {path: rows.jsonl, batch_size: 2}
actor: {path: model, init_from_scratch: true}
gconfig: {n_samples: 2, max_new_tokens: 4, min_new_tokens: 4}  # no early end
rollout: {reward_fn: "mine:two_parts", workflow: "mine:three_turns"}
launcher: {type: local}
"""


@pytest.fixture(scope="module")
def shell(tmp_path_factory) -> Shell:
    made = Shell(tmp_path_factory.mktemp("episode"))
    make_model(made.here / "model", alphabet="0123456789+=?abcdefghijklmnopqrstuvwxyz ")
    (made.here / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    (made.here / "mine.py").write_text(CODE)
    (made.here / "small.yaml").write_text(CONFIG)
    return made


def test_an_episode_shows_turns_rewards_parts_and_what_is_trained_on(shell):
    done = shell.run("check", "small.yaml", "--episode", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    first, second = found["episode"]["trajectories"]
    assert found["refusals"] == [] and found["episode"]["prompt"] == "1+1="
    assert (first["reward"], second["reward"]) == (0.5, 10.5)
    texts = [(part["trained"], part["text"]) for part in first["parts"]]
    assert texts[0] == (False, "1+1=") and texts[2] == texts[4] == (False, "again?")
    assert first["turns"] == 3 and [one for one, _ in texts] == [False, True] * 3
    assert all(part["tokens"] == 4 for part in first["parts"][1::2])
    assert f"scores {texts[5][1].replace('<pad>', '')}" in found["episode"]["log"]
    assert not (shell.here / "runs").exists()


def test_an_episode_runs_after_a_trial_of_that_name_and_shows_progress(shell):
    trial = shell.here / "runs" / getpass.getuser() / "sums" / "over"
    trial.mkdir(parents=True)
    try:
        (trial / "done.json").write_text(json.dumps({"step": 3, "lineage": 0}))
        plain = shell.run("check", "small.yaml", "trial_name=over")
        assert plain.returncode == 3 and "has reached its end" in plain.stderr
        done = shell.run("check", "small.yaml", "trial_name=over", "--episode")
    finally:
        shutil.rmtree(shell.here / "runs")
    assert done.returncode == 0, done.stderr
    assert (
        "note: submit refuses this trial as it is now:" in done.stdout
        and "has reached its end" in done.stdout
    )
    assert "sample 1: reward" in done.stdout and "next " not in done.stdout
    assert "episode: " in done.stderr and " s)\n" in done.stderr, "progress"


def test_an_episode_as_text_with_a_tiny_model_in_place_of_one_that_is_too_large(shell):
    config = shell.here / "model" / "config.json"
    content = json.loads(config.read_text())
    large = content | {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80}
    try:
        config.write_text(json.dumps(large))
        plain = ["check", "small.yaml", "--episode", "rollout.workflow=single_turn", *ROOM]
        refused = shell.run(*plain)
        assert refused.returncode == 64
        assert "GB of weights" in refused.stderr and "--tiny_model" in refused.stderr
        done = shell.run(*plain, "--tiny_model")
    finally:
        config.write_text(json.dumps(content))
    assert done.returncode == 0, done.stderr
    assert "sample 1: reward 0.5 (reward/short" in done.stdout
    assert "1 turn, 4 of 8 tokens are trained on; length" in done.stdout
    assert "all rewards are equal" in done.stdout
    assert "note: submit refuses this trial as it is now: sbatch is not on the PATH" in done.stdout


# so that the plan has room for the large model, which this machine has not
ROOM = (
    "launcher.type=slurm",
    "launcher.trainer_mem_per_gpu=9000000",
    "launcher.inference_server_mem_per_gpu=9000000",
)


def test_an_error_of_user_code_has_its_place_and_its_traceback(shell):
    done = shell.run("check", "small.yaml", "--episode", "rollout.reward_fn=mine:later")
    assert done.returncode == 64
    assert "the episode failed: prompt 0: KeyError: 'anwser' (mine.py:28, in helper)" in done.stderr
    assert 'columns["anwser"]' in done.stdout and "in later" in done.stdout


def test_a_workflow_may_reject_a_prompt_and_print_much(shell):
    done = shell.run("check", "small.yaml", "--episode", "rollout.workflow=mine:rejects")
    assert done.returncode == 0 and "note: the workflow returned None" in done.stdout
    assert "line 0\n" in done.stdout and "line 98\n" in done.stdout and "line 50\n" not in done.stdout


@pytest.mark.parametrize(
    ("workflow", "line"), [("hangs", "asyncio.sleep(3600)"), ("holds", "time.sleep(3600)")]
)
def test_an_episode_over_its_time_limit_says_where_it_is(shell, workflow, line):
    done = shell.run(
        "check",
        "small.yaml",
        "--episode",
        f"rollout.workflow=mine:{workflow}",
        f"--timeout_s={extend(8):.0f}",
    )
    assert done.returncode == 64
    assert "--timeout_s" in done.stderr
    assert f"in {workflow}\n" in done.stdout and line in done.stdout and "asyncio/" not in done.stdout


def test_an_endpoint_that_can_not_be_reached_is_named_soon(shell):
    url = "http://127.0.0.1:9/v1"  # a port without a server
    done = shell.run(
        *("check", "small.yaml", "--episode", "rollout.workflow=mine:asks", f"pools.judge.url={url}"),
        *("pools.judge.model=m", f"--timeout_s={extend(60):.0f}"),
    )
    assert done.returncode == 64
    said = done.stdout + done.stderr
    assert f"pool judge: {url}" in said and "can't be reached: Connection refused; given up after" in said
