"""The rollout role as a process, against a generation server that makes its tokens up."""

import json
import os
import sys
import urllib.error
import urllib.request
from types import SimpleNamespace

import pytest
from patience import extend
from recipes import make_run
from rollout_trial import FakeServer, RolloutRole, begin_lineage, make_trial
from training import FakeEngine

from hpc_rl.config.load.stored import from_dict
from hpc_rl.config.options.operations import KeepBestConfig
from hpc_rl.core.errors import ExitCode, RoleFailed, Stale
from hpc_rl.core.trial import load_json
from hpc_rl.core.types import encode
from hpc_rl.name_resolve import keys
from hpc_rl.name_resolve.shared_fs import NameResolve
from hpc_rl.rollout.batch_log.replay import load_state
from hpc_rl.stats.metrics_writers import JsonlWriter, MetricsWriters
from hpc_rl.trainers.grpo_recipe import GRPO


@pytest.fixture
def run(tmp_path):
    """Starts a trial's server and role; ends them after the test."""
    started = []

    def start(env=None, **options):
        trial = make_trial(tmp_path, **options)
        server = FakeServer(trial)
        role = RolloutRole(trial, env).start()
        started.append((server, role))
        return trial, server, role

    yield start
    for server, role in started:
        if role.process.poll() is None:
            role.kill()
        server.close()


def test_a_run_with_evaluation_replay_trim_and_stop(run):
    trial, server, role = run(batch_size=3, n_samples=2)
    client = role.client()
    batches = {}
    for step in range(1, 8):
        server.publish(f"0.{step - 1}")
        batches[step] = client.batch(step, 0)
    assert [len(batch.groups) for batch in batches.values()] == [3] * 7
    first = batches[1].groups[0].trajectories[0]
    assert len(batches[1].groups[0].trajectories) == 2
    made = first.loss_mask
    assert made.sum() == len(first.ids) - first.loss_mask.argmax()
    assert (first.logprobs[made] <= -1.5).all() and (first.logprobs[~made] == 0).all()
    assert (
        (first.steps[made] == 0).all()
        and (first.steps[~made] == -1).all()
        and (first.lineages[made] == 0).all()
    )
    indexes = [group.index for batch in batches.values() for group in batch.groups]
    assert len(set(indexes)) == 21

    result = client.evaluate("0.6", "0.6")
    assert (result.num_prompts, result.version) == (7, "0.6")
    assert encode(client.evaluate("0.6", "0.6")) == encode(result)

    status = client.status()
    assert (
        status["sealed"] == 7
        and status["consumed"] == 21
        and status["servers"] == 1
        and status["bytes_per_step"] > 100
    )
    assert status["rejected"] == {} and sum(status["staleness"].values()) == 21

    begin_lineage(trial, 1, 4)
    server.publish("1.4")  # the trainer went back to step 4
    assert [encode(client.batch(step, 1)) for step in (5, 6, 7)] == [
        encode(batches[step]) for step in (5, 6, 7)
    ]
    with pytest.raises(Stale):
        client.batch(7, 0)
    with pytest.raises(RoleFailed, match="412"):
        client.batch(12, 1)

    client.retain(5)
    with pytest.raises(RoleFailed, match="410"):
        client.batch(5, 1)
    assert encode(client.batch(6, 1)) == encode(batches[6])
    client.close()
    assert role.stop() == ExitCode.STOPPED
    state = load_state(trial.rollout)
    assert (state.trimmed, sorted(state.seals), state.consumed) == (5, [6, 7], 21)


WORKFLOW = """
from hpc_rl.rollout.workflow import trajectory
from hpc_rl.core.types import TrajectoryGroup

async def run(prompt, generate):
    ids = prompt["input_ids"]
    made = trajectory([(ids, await generate(ids))], reward=0.5)
    made.stats = {"made_by": made.oldest_step(), "question": float(prompt["prompt"].split("+")[0])}
    return TrajectoryGroup(generate.index, [made])
"""


def test_what_a_workflow_measures_in_an_evaluation_is_logged_and_decides_what_is_best(tmp_path, run):
    (tmp_path / "measuring.py").write_text(WORKFLOW)
    trial, server, role = run(workflow="measuring:run", env={"PYTHONPATH": str(tmp_path)})
    config = from_dict(load_json(trial.config_json))
    config.saver.keep_best = KeepBestConfig(metric="eval_made_by")
    metrics, client = trial.attempt("1.0").metrics(0), role.client()
    writers = MetricsWriters([JsonlWriter(metrics)])
    trainer = make_run(tmp_path, config, FakeEngine(), trial, writers)
    recipe = GRPO(trainer, client, SimpleNamespace(settle=lambda wait: None), num_prompts=10)
    for step in (2, 5):
        server.publish(f"0.{step}")
        trainer.evaluate(recipe, step)
    client.close()
    writers.close()
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [(row["eval_made_by"], row["eval_question"]) for row in rows] == [(2.0, 13.0), (5.0, 13.0)]
    assert all(
        (row["eval_reward"], row["eval_num_prompts"], row["eval_left_out"]) == (0.5, 7, 0) for row in rows
    )
    best = load_json(trial.exports / "best" / "hpc_rl.json")
    assert (best["step"], best["metric"], best["value"]) == (5, "eval_made_by", 5.0)


def test_a_stopped_role_goes_on_where_it_was(run):
    _, server, role = run()
    client = role.client()
    first = [encode(client.batch(step, 0)) for step in (1, 2)]
    assert role.stop() == ExitCode.STOPPED
    role.start()
    again = role.client()
    assert [encode(again.batch(step, 0)) for step in (1, 2)] == first
    server.publish("0.2")
    assert again.batch(3, 0).step == 3
    client.close()
    again.close()


def test_tokens_are_asked_for(run):
    trial, _, role = run()
    client = role.client()
    client.batch(1, 0)
    client.close()
    url = NameResolve(trial.names).list_leases(keys.ROLLOUT)[keys.ROLLOUT].value["url"]
    tokens = trial.load_tokens()

    def code(path: str, token: str = "", data: bytes | None = None) -> int:
        request = urllib.request.Request(
            url + path, data, {"Authorization": f"Bearer {token}"} if token else {}
        )
        try:
            with urllib.request.urlopen(request) as response:
                return response.status
        except urllib.error.HTTPError as error:
            error.close()
            return error.code

    assert code("/status") == 401
    assert code("/status", "wrong") == 401
    assert code("/status", tokens["data"]) == 200
    assert code(f"/t/{tokens['data']}/status") == 200
    assert code(f"/t/{tokens['control']}/status") == 401
    assert code("/retain", tokens["data"], json.dumps({"step": 1}).encode()) == 401
    assert code("/retain", tokens["control"], json.dumps({"step": 1}).encode()) == 200
    assert code("/batch?step=x&lineage=0", tokens["data"]) == 400


@pytest.mark.parametrize(
    ("named", "words"),
    [
        ({"reward_fn": "no_such_package.rewards:f"}, "No module named 'no_such_package'"),
        ({"reward_fn": "broken:f"}, "SyntaxError: invalid syntax (broken.py, line 1)"),
        ({"reward_fn": "leaves:f"}, "SystemExit: 3 (leaves.py:2, in <module>)"),
        ({"workflow": "sound:nothing"}, "module 'sound' has no attribute 'nothing'"),
        (
            {"workflow": "sound:Made"},
            "rollout.workflow sound:Made can't be created, because it raised KeyError: 'oops' (sound.py:3, in",
        ),
    ],
    ids=["no module", "syntax", "exit", "no name", "class"],
)
def test_user_code_that_cannot_be_loaded_is_a_bad_configuration(run, tmp_path, named, words):
    """It is never tried again. At the submission it was sound, or it was not tried there."""
    (tmp_path / "broken.py").write_text("def f(:\n")
    (tmp_path / "leaves.py").write_text("import sys\nsys.exit(3)\n")
    (tmp_path / "sound.py").write_text("class Made:\n    def __init__(self):\n        {}['oops']\n")
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    trial, _, role = run({"PYTHONPATH": path}, **named)
    with role.process.stdin:
        assert role.process.wait(extend(90)) == ExitCode.BAD_CONFIG, role.log.read_text()
    said = role.log.read_text()
    assert words in said and "rollout worker 0 exited" not in said
    record = load_json(trial.attempt("1.0").exit_record("rollout", 0, 0, 0))
    assert record["class"] == "user" and record["final"] and words in record["reason"]


def test_a_trainer_that_gives_batches_up_gets_new_ones_by_its_own_weights(run):
    trial, server, role = run(batch_order="in_order")
    client = role.client()
    begin_lineage(trial, 0)
    first = {}
    for step in range(1, 6):
        first[step] = encode(client.batch(step, 0))
        server.publish(f"0.{step}")
    client.close()
    role.kill()
    role.start()
    begin_lineage(trial, 1, 2, new_batches=True)
    server.publish("1.2")
    client = role.client()
    assert encode(client.batch(2, 1)) == first[2]
    for step in range(3, 7):
        groups = client.batch(step, 1).groups
        assert {int(t.lineages.max()) for group in groups for t in group.trajectories} == {1}
        server.publish(f"1.{step}")
    client.close()
    assert role.stop() == ExitCode.STOPPED
    state = load_state(trial.rollout)
    used = [index for _, seal in sorted(state.seals.items()) for index in list(seal.places)]
    assert used == list(range(len(used)))
    assert sorted(load_state(trial.rollout / "set-aside" / "1").seals) == [3, 4, 5]
