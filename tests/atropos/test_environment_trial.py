"""A trial that two environments of atroposlib feed, unmodified: one as a role of the trial, one that is started
by hand with the URLs; one kill on the way.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import msgpack
import numpy as np
import pytest
import xxhash
import yaml
from patience import extend
from toy_trials import ROOT, groups_in_ledger, hpc_rl, logs_of, make_quickstart, trial_of

from hpc_rl.rollout.batch_log.ledger import FIRST_OUTSIDE

pytestmark = pytest.mark.timeout(400)
ENVIRONMENT = Path(__file__).parent / "sums_environment.py"
STEPS = 200  # some seconds more than the environments need to start
PHRASES = "Bad Request|Unauthorized|Not Found|Unprocessable|Internal Server|Bad Gateway|Service Unavailable"
ERROR_STATUS = re.compile(
    rf"(?i)(error|status|http|refused)[^\n]{{0,25}}(?<![\d.,])[45]\d\d\b|\b[45]\d\d ({PHRASES})"
)


@pytest.mark.parametrize(
    "line",
    [
        "Error status code 422",
        "ERROR HTTP 500 from server",
        "ClientError: 422, message='no'",
        "503 Service Unavailable",
    ],
)
def test_the_search_for_errors_finds_them(line):
    assert ERROR_STATUS.search(line)


@pytest.fixture(scope="module")
def trial(tmp_path_factory, atropos_python):
    here = tmp_path_factory.mktemp("environments")
    make_quickstart(here)
    serve = f"{atropos_python} {ENVIRONMENT} serve"
    commands = {"four": serve}
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
    with started_by_hand(here, atropos_python) as process:
        kill_rollout_once(made)
        hpc_rl("status", "fed", "--follow", cwd=here, timeout_s=300, check=False)
        code = process.wait(extend(60))
    return here, made, code


@contextlib.contextmanager
def started_by_hand(here: Path, atropos_python: str) -> Iterator[subprocess.Popen]:
    """An environment of eight sequences a group, from the URLs of the trial once it runs."""
    until = time.monotonic() + extend(120)
    while (found := hpc_rl("env", "urls", "fed", "--json", cwd=here, check=False)).returncode != 0:
        assert time.monotonic() < until, found.stderr
        time.sleep(1)
    urls = json.loads(found.stdout)
    hpc_rl("env", "urls", "fed", "--write", "by-hand.yaml", cwd=here)
    options = {
        "slurm": "False",
        "env.rollout_server_url": urls["rollout_server_url"],
        "openai.base_url": urls["base_url"],
        "openai.model_name": "quickstart/base",  # a tokenizer that is here; theirs would be fetched
        "env.tokenizer_name": "quickstart/base",
        "env.group_size": "8",
    }
    argv = [atropos_python, str(ENVIRONMENT), "serve"]
    argv += [word for name, value in options.items() for word in (f"--{name}", value)]
    with (here / "by-hand.log").open("wb") as log:
        process = subprocess.Popen(argv, cwd=here, stdout=log, stderr=log)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def kill_rollout_once(trial) -> None:
    """Kill the rollout role with signal 9 once it has sealed a few batches."""
    until = time.monotonic() + extend(120)
    while len(list((trial.rollout / "batches").glob("*.seal"))) < 4:
        assert time.monotonic() < until, logs_of(trial)
        time.sleep(0.1)
    (record,) = trial.attempts.glob("*/processes/rollout-0.0-rank0.json")
    os.kill(json.loads(record.read_text())["pid"], signal.SIGKILL)


def test_it_makes_its_steps(trial):
    here, made, _ = trial
    shown = json.loads(hpc_rl("status", "fed", "--json", cwd=here).stdout)
    assert shown["state"] == "done" and shown["step"] == STEPS, logs_of(made)
    rejected = {one["name"]: one["rejected"] for one in shown["rollout"]["environments"]}
    assert rejected == {"four_0": 0, "environment_0": 0}


def logged_completions(trial) -> set[tuple[bytes, bytes, bytes, tuple]]:
    """Return prompt hash, ids, log-probabilities and version spans of all that the gateway made."""
    found = set()
    for path in trial.gateway.glob("segment-*.log"):
        with path.open("rb") as file:
            for prompt_hash, _, _, _, ids, logprobs, spans, _ in msgpack.Unpacker(file):
                found.add((prompt_hash, ids, logprobs, tuple(map(tuple, spans))))
    return found


def test_every_token_that_was_trained_on_is_as_the_gateway_logged_it(trial):
    _, made, _ = trial
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
    _, made, _ = trial
    indexes = [group.index for group in groups_in_ledger(made)]
    assert len(indexes) == len(set(indexes))


def test_environments_end_with_0_and_saw_no_error(trial):
    here, made, code = trial
    role = "".join(path.read_text() for path in made.attempts.rglob("environment-0*.log"))
    assert "has finished" in role
    by_hand = (here / "by-hand.log").read_text()
    assert code == 0, by_hand[-3000:]
    for text in (role, by_hand):
        assert not ERROR_STATUS.search(text), text[-3000:]
        assert made.load_tokens()["data"] not in text or text is by_hand  # of the role's command it is masked
    (path,) = made.attempts.rglob("events.jsonl")
    events = [json.loads(line) for line in path.read_text().splitlines()]
    ends = [one for one in events if one["event"] == "exited" and one.get("role") == "environment"]
    assert [one["code"] for one in ends] == [0]
    # the rollout role was killed, and its environments did not notice: one incarnation of the unit
    of_rollout = [one["code"] for one in events if one["event"] == "exited" and one["role"] == "rollout"]
    assert of_rollout == [75]


def test_a_command_prints_the_urls_of_a_trial_that_runs(trial):
    here, made, _ = trial
    written = here / "by-hand.yaml"
    settings = yaml.safe_load(written.read_text())
    assert written.stat().st_mode & 0o777 == 0o600  # it has the data token
    token = made.load_tokens()["data"]
    assert settings["env"]["rollout_server_url"].endswith(f"/t/{token}")
    assert settings["env"]["wandb_name"] == "by-hand" and settings["env"]["group_size"] == 4
    assert [one["api_key"] for one in settings["openai"]] == [token, token]
    done = hpc_rl("env", "urls", "fed", cwd=here, check=False)
    assert done.returncode != 0 and "the rollout role" in done.stderr
