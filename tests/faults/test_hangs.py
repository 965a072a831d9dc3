"""A rank that hangs (stopped, or in an endless loop) and a supervisor that does: found, written down, started
again, bounded.
"""

import math
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_rl.core.trial import load_json, write_json

sys.path.insert(0, str(Path(__file__).parent))

from patience import extend
from supervised import JOB, Fake, unit

# a start has to come to its work within the limit
RULES = {"hang_min_s": 1, "hang_max_s": math.ceil(extend(2.6))}


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[Fake]:
    one = Fake(tmp_path)
    yield one
    for process in one.supervisors:
        if process.poll() is None:
            process.kill()
        process.wait()
    one.until(lambda: not one.alive())


def stacks(fake: Fake, name: str) -> str:
    return (fake.attempt.dir / "stacks" / f"{name}.txt").read_text()


@pytest.mark.parametrize("how", ["spin", "stopped"])
def test_a_rank_that_hangs_is_found_written_down_and_started_again(fake, how):
    first = "spin" if how == "spin" else "deaf"
    fake.write({"trainer": [first, "train"], "total": 1}, units=[unit("trainer", tasks=2)], rules=RULES)
    supervisor = fake.start()
    if how == "stopped":
        fake.until(
            lambda: (
                fake.attempt.stacks("trainer", 0, 0, 1).exists() and (fake.trial.dir / "writes.log").exists()
            )
        )
        fake.until(
            lambda: {"rank0", "rank1"} <= {*re.findall("rank.", (fake.trial.dir / "writes.log").read_text())}
        )
        os.kill(next(one.pid for one in fake.alive() if one.rank == 1), signal.SIGSTOP)
    assert supervisor.wait(extend(90)) == 0, fake.story()
    [hung] = fake.events("hung")
    assert hung["role"] == "trainer" and "nothing moved for" in hung["reason"]
    assert "behave" in stacks(fake, "trainer-0.0-rank1"), "it says where it was"
    assert "behave" in stacks(fake, "trainer-0.0-rank0"), "and so does its peer"
    ended = fake.events("exited", "trainer")
    assert [row["code"] for row in ended] == [137, 0] and ended[0]["reason"] == hung["reason"]
    assert ended[0]["class"] == "infrastructure"


def test_hangs_without_progress_come_to_an_end(fake):
    fake.write(
        {"trainer": ["deaf"]}, retries=1, rules={"hang_min_s": 1, "hang_max_s": 1}, units=[unit("trainer")]
    )
    assert fake.run() == 70, fake.story()
    assert len(fake.events("hung")) == 2
    reason = load_json(fake.attempt.ended)["reason"]
    assert "hangs" in reason and "2 failures in a row" in reason and "hpc-rl status" in reason


def test_a_drain_survives_the_death_of_the_supervisor(fake):
    fake.write({"trainer": ["deaf"]})
    supervisor = fake.start()
    fake.until(lambda: len({one.role for one in fake.alive()}) == 3)
    supervisor.send_signal(signal.SIGUSR1)
    fake.until(lambda: fake.events("stopping"))
    supervisor.kill()
    supervisor.wait()
    assert fake.run() == 75, fake.story()
    assert len(fake.events("started", "trainer")) == 1, "nothing was started again"
    assert "SIGUSR1" in load_json(fake.attempt.ended)["reason"]


def test_a_drain_intent_is_found_by_a_later_supervisor(fake):
    fake.write({"trainer": ["deaf"]})
    write_json(fake.trial.drain_intent(f"{JOB}.0"), {"reason": "SIGUSR1"})
    assert fake.run() == 75, fake.story()
    assert not fake.events("started", "trainer")


def test_slurms_early_signal_is_left_to_the_clock_that_knows_better(fake):
    fake.write({"trainer": ["serve"]})
    supervisor = fake.start(HPC_RL_END_TIME=str(int(time.time() + extend(8))))
    fake.until(lambda: len({one.role for one in fake.alive()}) == 3 and fake.events("end_time"))
    supervisor.send_signal(signal.SIGUSR1)
    fake.until(lambda: fake.events("reminded"))
    assert not fake.events("stopping")
    assert supervisor.wait(extend(90)) == 75, fake.story()
    [stopping] = fake.events("stopping")
    assert stopping["class"] == "wall time" and "time is nearly over" in stopping["reason"]
