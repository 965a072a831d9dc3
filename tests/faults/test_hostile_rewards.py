"""Rewards of user code that fork, print without end, exit, raise or hang: their prompts are rejected and named,
and the others make batches.
"""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))

from rollout_trial import FakeServer, RolloutRole, begin_lineage, make_trial, wait_until

from hpc_rl.core.proc import find_start_ticks
from hpc_rl.rollout.batch_log.ledger import RejectReason, RejectRecord, list_segments, load_segment
from hpc_rl.status.rollout_report import RolloutReport

pytestmark = pytest.mark.timeout(180)
REWARD = """import os, sys, time

def note(pid):
    with open(os.path.join(os.path.dirname(__file__), "forked"), "a") as file:
        file.write(f"{pid}\\n")

def score(prompt, completion, **columns):
    number = int(prompt.split("+")[0])
    if number == 3 and (child := os.fork()):
        note(child)
    if number == 5:
        while True:
            print("x" * 1000)
    if number == 7:
        sys.exit(3)
    if number == 9:
        time.sleep(1000)
    if number == 11:
        raise KeyError("oops")
    return float(number)
"""
REASONS = [RejectReason.REWARD_EXCEPTION] * 2 + [RejectReason.REWARD_TIMEOUT] * 2


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_their_prompts_are_rejected_and_the_others_make_batches(tmp_path):
    (tmp_path / "hostile.py").write_text(REWARD)
    trial = make_trial(
        tmp_path, batch_size=3, num_rows=12, n_samples=2, reward_fn="hostile:score", reward_timeout_s=1.5,
        num_workers=1, batch_order="in_order", max_concurrent_rollouts=4,
    )  # fmt: skip
    begin_lineage(trial, 0)
    server = FakeServer(trial)
    role = RolloutRole(trial, {"PYTHONPATH": f"{tmp_path}:{os.pathsep.join(filter(None, sys.path))}"}).start()
    client = role.client()
    try:
        indices = []
        for step in range(1, 5):  # an epoch, in an order of its own, and the beginning of the next
            batch = client.batch(step, 0)
            indices += [group.index for group in batch.groups]
            server.publish(f"0.{step}")
        found = {index: reason for index, reason in rejected(trial).items() if index < 12}
        assert sorted(found.values()) == REASONS
        assert indices[:8] == [index for index in range(12) if index not in found]
        log = role.log.read_text(errors="replace")
        for number, reason in found.items():
            assert f"prompt {number} is rejected, {reason}" in log
        assert log.count("Traceback (most recent call last)") == 1
        assert "later failures are only counted): KeyError (hostile.py:19, in score)" in log
        assert role.log.stat().st_size < 6 << 20 and "the log omits the next output" in log
    finally:
        assert role.stop() in (0, 75)
        client.close()
        server.close()
    forked = [int(line) for line in (tmp_path / "forked").read_text().split()]
    wait_until(lambda: not any(find_start_ticks(pid) for pid in forked))


BLOCKING = """import os, time

async def run(prompt, generate):
    wait_for(os.path.join(os.path.dirname(__file__), "release"))
    return None

def wait_for(path):
    while not os.path.exists(path): time.sleep(0.1)
"""


def test_a_workflow_that_blocks_its_event_loop_is_reported_with_its_place(tmp_path):
    (tmp_path / "blocking.py").write_text(BLOCKING)
    trial = make_trial(tmp_path, batch_size=2, num_rows=2, workflow="blocking:run", num_workers=1)
    begin_lineage(trial, 0)
    server = FakeServer(trial)
    role = RolloutRole(trial, {"PYTHONPATH": f"{tmp_path}:{os.pathsep.join(filter(None, sys.path))}"}).start()
    client = role.client()

    def blocked() -> dict[str, float]:
        reports = map(RolloutReport.read, trial.attempts.glob("*/rollout.*.json"))
        return {place: since_s for one in reports if one for place, since_s in one.blocked.items()}

    def asks() -> bool:
        with pytest.raises(TimeoutError):
            client.batch_bytes(1, 0, within_s=1.0)
        return bool(blocked())

    try:
        wait_until(asks)
        assert [*blocked()] == ["blocking.py:8, in wait_for"]
        log = role.log.read_text()
        assert "blocking.py:8, in wait_for blocks this rollout worker" in log and ", line 4, in run" in log
        (tmp_path / "release").touch()
        wait_until(lambda: not blocked())
    finally:
        role.stop()
        client.close()
        server.close()


def rejected(trial) -> dict[int, str]:
    records = [
        record for number in list_segments(trial.rollout) for _, record in load_segment(trial.rollout, number)
    ]
    return {record.index: record.reason for record in records if isinstance(record, RejectRecord)}


def test_prompts_that_a_broken_reward_rejected_are_issued_again_once_its_file_has_changed(tmp_path):
    helper = tmp_path / "helping.py"
    helper.write_text("def value(number):\n    return {0: 1.0}[number % 3]\n")
    code = "from helping import value\ndef score(prompt, completion, **columns):\n"
    (tmp_path / "scoring.py").write_text(f"{code}    return value(int(prompt.split('+')[0]))\n")
    trial = make_trial(tmp_path, batch_size=2, num_rows=12, reward_fn="scoring:score", batch_order="in_order")
    environ = {"PYTHONPATH": f"{tmp_path}:{os.pathsep.join(filter(None, sys.path))}"}
    begin_lineage(trial, 0)
    server = FakeServer(trial)
    role = RolloutRole(trial, environ).start()
    client = role.client()
    try:
        assert [group.trajectories[0].reward for group in client.batch(1, 0).groups] == [1.0, 1.0]
        assert role.stop() in (0, 75)
        broken = {
            index for index, reason in rejected(trial).items() if reason == RejectReason.REWARD_EXCEPTION
        }
        assert broken
        helper.write_text("def value(number):\n    return 0.25\n")
        begin_lineage(trial, 1, 1)
        role.start()
        server.publish("1.1")
        made = [group for step in (2, 3, 4) for group in client.batch(step, 1).groups]
        assert {group.index for group in made} >= {*sorted(broken)[:2]}
        assert {trajectory.reward for group in made for trajectory in group.trajectories} == {0.25}
        issued = f"{len(broken)} prompts begin again, because an earlier reward or workflow had rejected them"
        assert issued in role.log.read_text(errors="replace")
    finally:
        role.stop()
        client.close()
        server.close()
