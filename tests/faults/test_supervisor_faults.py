"""The supervisor as a process, with fake roles: what ends, what restarts, and what a kill -9 at any instant
leaves behind.
"""

import json
import os
import random
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_rl.core.trial import load_json, write_json
from hpc_rl.name_resolve import keys, open_names
from hpc_rl.supervise import bad_nodes

sys.path.insert(0, str(Path(__file__).parent))

from patience import extend
from supervised import ENDLESS, JOB, Fake, unit


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[Fake]:
    one = Fake(tmp_path)
    yield one
    for process in one.supervisors:
        if process.poll() is None:
            process.kill()
        process.wait()
    one.until(lambda: not one.alive())


def test_the_end_of_training_ends_everything_and_says_done(fake):
    fake.write({"trainer": ["train"]})
    assert fake.run() == 0, fake.story()
    assert load_json(fake.trial.done)["job_id"] == JOB
    assert load_json(fake.attempt.ended)["exit_code"] == 0
    assert {row["role"]: row["code"] for row in fake.events("exited")} == {
        "trainer": 0,
        "server": 75,
        "rollout": 75,
    }
    assert not fake.alive()
    left = fake.trial.published("0.3")  # as by a kill just after it was done
    left.mkdir(parents=True)
    (left / "model.safetensors").write_bytes(b"12345")
    assert fake.run() == 0  # done is done: nothing is started again
    assert len(fake.events("started", "trainer")) == 1
    assert not left.exists() and load_json(fake.trial.done)["freed_bytes"] == 5


def test_a_later_jobs_end_is_kept_and_an_earlier_jobs_mark_goes(fake):
    fake.write({"trainer": ["train"]})
    write_json(fake.trial.job(JOB), {"time": 100.0})
    write_json(fake.trial.job("later"), {"time": 200.0})
    write_json(fake.trial.job("earlier"), {"time": 50.0})
    write_json(fake.trial.done, {"job_id": "later"})
    assert fake.run() == 0
    assert not fake.events("started") and load_json(fake.trial.done)["job_id"] == "later"
    write_json(fake.trial.done, {"job_id": "earlier"})
    assert fake.run() == 0
    assert fake.events("started") and load_json(fake.trial.done)["job_id"] == JOB


def test_the_script_hears_of_bad_nodes_at_both_ends_of_an_attempt(fake):
    fake.write({"trainer": ["train"]})
    bad_nodes.add(
        fake.trial, fake.trial.attempt("earlier.0"), ["n1"], "lost", now=time.time() - 7200, hours=1
    )
    fake.trial.exclude(JOB).write_text("n1\n")
    assert fake.run() == 0, fake.story()
    assert fake.trial.exclude(JOB).read_text() == "\n"


def test_a_trainer_that_dies_is_started_again_as_a_whole(fake):
    fake.write({"trainer": ["die", "exit 70", "train"]}, units=[unit("trainer", tasks=2)])
    assert fake.run() == 0, fake.story()
    assert [row["code"] for row in fake.events("exited", "trainer")] == [137, 70, 0]
    assert [row["incarnation"] for row in fake.events("started", "trainer")] == [0, 1, 2]


def test_retries_are_counted_across_supervisors(fake):
    fake.write({"trainer": ["exit 70", "exit 70", "deaf", "exit 70"]}, retries=2)
    supervisor = fake.start()
    fake.until(lambda: len(fake.events("started", "trainer")) == 3)
    supervisor.kill()
    assert fake.run() == 70, fake.story()
    assert len(fake.events("started", "trainer")) == 4
    assert "3 failures in a row" in load_json(fake.attempt.ended)["reason"]


def test_progress_gives_the_retries_back(fake):
    fake.write({"trainer": ["commit exit 70"] * 5 + ["train"], "total": 8}, retries=1)
    assert fake.run() == 0, fake.story()
    assert len(fake.events("started", "trainer")) == 6


@pytest.mark.parametrize(("mode", "code"), [("disabled", 70), ("resume", 70)])
def test_other_modes_end_with_the_first_failure(fake, mode, code):
    fake.write({"trainer": ["die", "train"]}, mode=mode)
    assert fake.run() == code, fake.story()
    assert len(fake.events("started", "trainer")) == 1


def test_servers_and_rollout_restart_alone(fake):
    script = {"trainer": ["train"], "server": ["die", "die", "serve"], "rollout": ["die", "serve"]}
    fake.write({**script, "total": ENDLESS})
    supervisor = fake.start()
    # training takes no CPU time: on a busy machine it would be over before the others have started again
    fake.until(
        lambda: len(fake.events("started", "server")) >= 3 and len(fake.events("started", "rollout")) >= 2
    )
    fake.end_training()
    assert supervisor.wait(extend(90)) == 0, fake.story()
    assert len(fake.events("started", "server")) == 3
    assert len(fake.events("started", "rollout")) == 2
    assert len(fake.events("started", "trainer")) == 1


def test_secrets_that_are_removed_while_a_trial_runs_are_written_again(fake):
    fake.write({"trainer": ["serve"]})
    secrets = fake.trial.secret_variables("trainer_env_vars")
    secrets.write_text("HF_TOKEN=x\0")
    secrets.chmod(0o600)
    tokens = fake.trial.load_tokens()
    supervisor = fake.start()
    fake.until(lambda: fake.newest("server", 0) and fake.newest("trainer", 0))
    fake.trial.secret.unlink()
    secrets.unlink()
    fake.until(lambda: fake.trial.secret.exists() and secrets.exists())
    assert fake.trial.load_tokens() == tokens and fake.trial.load_variables("trainer_env_vars") == {
        "HF_TOKEN": "x"
    }
    assert fake.trial.secret.stat().st_mode & 0o777 == 0o600
    # it writes the files, then the lines about them
    fake.until(lambda: f"{fake.trial.secret} was removed while the trial runs" in fake.story())
    supervisor.terminate()
    assert supervisor.wait(extend(60)) == 75


def test_one_replica_that_gives_up_costs_only_itself(fake):
    script = {"trainer": ["train"], "server-0": ["exit 1"], "server-1": ["serve"], "total": ENDLESS}
    fake.write(script, units=[unit("server", 0), unit("server", 1), unit("rollout"), unit("trainer")])
    supervisor = fake.start()
    fake.until(lambda: fake.events("gave_up"))
    # training goes on without it
    known = len(fake.events("progress"))
    fake.until(lambda: len(fake.events("progress")) > known)
    fake.end_training()
    assert supervisor.wait(extend(90)) == 0, fake.story()
    assert [row["index"] for row in fake.events("gave_up")] == [0]


def test_bad_config_of_any_role_is_final(fake):
    fake.write({"trainer": ["serve"], "server": ["exit 78"]})
    assert fake.run() == 78, fake.story()
    assert [row["code"] for row in fake.events("exited", "trainer")] == [75]  # it had the time to save


def test_peers_of_a_failed_rank_do_not_hang(fake):
    fake.write({"trainer": ["deaf", "train"], "total": 1}, units=[unit("trainer", tasks=2)])
    supervisor = fake.start()
    fake.until(
        lambda: (fake.trial.dir / "writes.log").exists() and any(one.rank == 1 for one in fake.alive())
    )
    victim = next(one for one in fake.alive() if one.rank == 1)
    os.kill(victim.pid, signal.SIGKILL)
    assert supervisor.wait(extend(90)) == 0, fake.story()
    assert [row["code"] for row in fake.events("exited", "trainer")] == [137, 0]


@pytest.mark.parametrize("wish", ["TERM", "TERM twice", "USR1", "cancel"])
def test_a_request_to_stop_lets_the_trainer_save_first(fake, wish):
    fake.write({"trainer": ["serve"]})
    supervisor = fake.start()
    fake.until(lambda: len(fake.alive()) >= 3 and (fake.trial.dir / "writes.log").exists())
    if wish == "cancel":
        write_json(fake.trial.cancel_intent(JOB), {})
    else:
        for _ in range(2 if wish.endswith("twice") else 1):
            supervisor.send_signal(signal.Signals[f"SIG{wish.split()[0]}"])
    assert supervisor.wait(extend(90)) == 75, fake.story()
    ends = [row["role"] for row in fake.events("exited")]
    assert ends[0] == "trainer" and len(ends) == 3
    assert load_json(fake.attempt.ended)["exit_code"] == 75
    assert not fake.trial.done.exists()


def test_a_later_term_ends_at_once_and_the_pipes_end_the_rest(fake):
    fake.write({"trainer": ["deaf"]})
    supervisor = fake.start()
    fake.until(
        lambda: len({one.role for one in fake.alive()}) == 3 and (fake.trial.dir / "writes.log").exists()
    )
    supervisor.terminate()
    fake.until(lambda: fake.events("stopping"))  # it has counted the first: the next one is later for it, too
    time.sleep(2.2)
    supervisor.terminate()
    assert supervisor.wait(extend(90)) == 143
    fake.until(lambda: not fake.alive())


def test_a_cancelled_attempt_starts_nothing(fake):
    fake.write({"trainer": ["train"]})
    write_json(fake.trial.cancel_intent(JOB), {})
    assert fake.run() == 75, fake.story()
    assert not fake.events("started")


def test_the_end_of_the_wall_time_is_foreseen(fake):
    fake.write({"trainer": ["serve"]})
    end = int(time.time() + extend(4))
    assert fake.run(SLURM_JOB_END_TIME=str(end)) == 75, fake.story()
    [stopping] = fake.events("stopping")
    assert "time is nearly over" in stopping["reason"]
    assert fake.events("started", "trainer")[0]["time"] < stopping["time"] < end


def test_a_supervisor_that_lost_the_trial_kills_and_leaves(fake):
    fake.write({"trainer": ["deaf"]})
    supervisor = fake.start()
    fake.until(lambda: len({one.role for one in fake.alive()}) == 3)
    open_names(fake.trial).lease(keys.OWNER, {"attempt": "other.0"}, 15.0)
    assert supervisor.wait(extend(90)) == 70, fake.story()
    assert not fake.alive()
    assert "another supervisor" in load_json(fake.attempt.ended)["reason"]


@pytest.mark.parametrize(
    "seed", [0, pytest.param(1, marks=pytest.mark.soak)]
)  # one is enough for each change
def test_kill_9_at_random_instants_leaves_one_writer(fake, seed):
    """Nobody of an older start is alive when somebody of the next one writes, and the trial comes to its
    end.
    """
    units = [unit("server"), unit("rollout"), unit("trainer", tasks=2)]
    fake.write({"trainer": ["train"], "total": ENDLESS}, retries=20, units=units)
    luck = random.Random(seed)
    writes = fake.trial.dir / "writes.log"

    def writers() -> set[str]:
        """The processes of rank 0 that have written."""
        rows = [line.split() for line in writes.read_text().splitlines()] if writes.exists() else []
        return {row[2] for row in rows if re.fullmatch(r"trainer-0\.\d+-rank0", row[1])}

    for number in range(6):
        if number == 2:  # else a slow machine would have only one life that writes
            fake.write({"trainer": ["train"], "total": 25}, retries=20, units=units)
        supervisor = fake.start()
        if number < 2:
            fake.until(lambda number=number: len(writers()) > number)
        time.sleep(luck.uniform(0, 2.0))
        supervisor.kill()
        if supervisor.wait() == 0:
            break
    assert fake.run() == 0, fake.story()
    assert not fake.alive()
    spans: dict[tuple[str, str], list[tuple[float, float, int]]] = {}
    for line in writes.read_text().splitlines():
        when, name, pid = line.split()
        role, _, rest = name.partition(".")
        rank = rest.partition("-")[2]
        known = spans.setdefault((role, rank), [])
        if known and known[-1][2] == int(pid):
            known[-1] = (known[-1][0], float(when), int(pid))
        else:
            assert int(pid) not in [one[2] for one in known], "an older incarnation wrote after a newer one"
            known.append((float(when), float(when), int(pid)))
    assert len(spans["trainer-0", "rank0"]) >= 2
    for event in ("started", "exited"):
        numbers = [(row["role"], row["index"], row["incarnation"]) for row in fake.events(event)]
        assert len(numbers) == len(set(numbers))
    json.loads(fake.attempt.ended.read_text())
