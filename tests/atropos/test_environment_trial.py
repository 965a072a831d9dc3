"""A trial that two environments of atroposlib feed, unmodified, as roles of the trial; one kill on the way."""

import json
import os
import re
import signal
import time
from pathlib import Path

import msgpack
import numpy as np
import pytest
import xxhash
from toy_trials import ROOT, groups_in_ledger, hpc_rl, logs_of, make_quickstart, trial_of

from hpc_rl.rollout.batch_log.ledger import FIRST_OUTSIDE

pytestmark = pytest.mark.timeout(400)
ENVIRONMENT = Path(__file__).parent / "sums_environment.py"
STEPS = 20


@pytest.fixture(scope="module")
def trial(tmp_path_factory, atropos_python):
    here = tmp_path_factory.mktemp("environments")
    make_quickstart(here)
    serve = f"{atropos_python} {ENVIRONMENT} serve"
    commands = {"four": serve, "eight": f"{serve} --env.group_size 8"}
    options = {
        "experiment_name": "sums",
        "trial_name": "fed",
        "actor.path": "quickstart/base",
        "train_dataset.path": "''",
        "train_dataset.batch_size": 4,
        "gconfig.n_samples": 4,
        "actor.ppo_n_minibatches": 1,
        "rollout.max_head_offpolicyness": 4,
        "total_train_steps": STEPS,
        "evaluator.freq_steps": "null",
        "environments.commands": json.dumps(commands),
    }
    given = [f"{name}={value}" for name, value in options.items()]
    hpc_rl("submit", ROOT / "configs/quickstart/grpo.yaml", *given, cwd=here)
    made = trial_of(here, "fed")
    kill_rollout_once(made)
    hpc_rl("status", "fed", "--follow", cwd=here, timeout_s=300, check=False)
    return here, made


def kill_rollout_once(trial) -> None:
    """Kill the rollout role with signal 9 once it has sealed a few batches."""
    until = time.monotonic() + 120
    while len(list((trial.rollout / "batches").glob("*.seal"))) < 4:
        assert time.monotonic() < until, logs_of(trial)
        time.sleep(0.1)
    (record,) = trial.attempts.glob("*/processes/rollout-0.0-rank0.json")
    os.kill(json.loads(record.read_text())["pid"], signal.SIGKILL)


def test_it_makes_its_steps(trial):
    here, made = trial
    shown = json.loads(hpc_rl("status", "fed", "--json", cwd=here).stdout)
    assert shown["state"] == "done", logs_of(made)


def logged_completions(trial) -> set[tuple[bytes, bytes, bytes, tuple]]:
    """Return prompt hash, ids, log-probabilities and version spans of all that the gateway made."""
    found = set()
    for path in trial.gateway.glob("segment-*.log"):
        with path.open("rb") as file:
            for prompt_hash, _, _, _, ids, logprobs, spans in msgpack.Unpacker(file):
                found.add((prompt_hash, ids, logprobs, tuple(map(tuple, spans))))
    return found


def test_every_token_that_was_trained_on_is_as_the_gateway_logged_it(trial):
    _, made = trial
    logged = logged_completions(made)
    groups = groups_in_ledger(made)
    assert len(groups) >= 4 and {len(group.trajectories) for group in groups} == {4, 8}
    assert all(group.index >= FIRST_OUTSIDE for group in groups)
    for one in (one for group in groups for one in group.trajectories):
        start = int(np.argmax(one.loss_mask))
        assert one.has_logprobs and one.loss_mask[start:].all()
        prompt_hash = xxhash.xxh3_64_intdigest(one.ids[:start].tobytes())
        exact = (prompt_hash, one.ids[start:].tobytes(), one.logprobs[start:].tobytes())
        spans = [spans for *found, spans in logged if tuple(found) == exact]
        steps = {tuple(step for _, step, first, last in span for _ in range(last - first)) for span in spans}
        assert tuple(one.steps[start:].tolist()) in steps


def test_no_group_is_in_two_batches(trial):
    _, made = trial
    indexes = [group.index for group in groups_in_ledger(made)]
    assert len(indexes) == len(set(indexes))


def test_environments_end_with_0_and_saw_no_error(trial):
    _, made = trial
    for number in (0, 1):
        text = "".join(path.read_text() for path in made.attempts.rglob(f"environment-{number}*.log"))
        assert "has finished" in text, text[-3000:]
        assert not re.search(r"\b[45]\d\d\b.*(error|Error|for url)", text), text[-3000:]
    (path,) = made.attempts.rglob("events.jsonl")
    events = [json.loads(line) for line in path.read_text().splitlines()]
    ends = [one for one in events if one["event"] == "exited" and one.get("role") == "environment"]
    assert [one["code"] for one in ends] == [0, 0]
    # the rollout role was killed, and its environments did not notice: one incarnation of the unit
    of_rollout = [one["code"] for one in events if one["event"] == "exited" and one["role"] == "rollout"]
    assert of_rollout == [75]


def test_a_command_prints_the_urls_of_a_trial_that_runs(trial):
    here, _ = trial
    done = hpc_rl("env", "urls", "fed", cwd=here, check=False)
    assert done.returncode != 0 and "no rollout role that runs" in done.stderr
