"""mpiexec as one handle: its ranks follow the supervisor, and exit together. A script plays mpiexec."""

import os
import signal
import socket
import time
from pathlib import Path

import pytest
from launch_lines import write_steps
from patience import wait_until
from toy_plans import toy_unit

from hpc_rl.core.net import LOOPBACK
from hpc_rl.core.proc import is_alive
from hpc_rl.core.records import ProcessRecord
from hpc_rl.core.trial import Attempt, write_json
from hpc_rl.plan.schema import MpiStart
from hpc_rl.supervise import mpiexec, processes
from hpc_rl.supervise.mpiexec import MpiexecHandle, MpiexecSteps
from hpc_rl.supervise.processes import ProcessSteps

pytestmark = pytest.mark.waits

# Ends its ranks as soon as one has exited, as MPICH and Open MPI do.
FAKE_MPIEXEC = """#!/bin/bash
if [[ $1 == --version ]]; then echo HYDRA; exit; fi
for rank in 0 1; do FAKE_RANK=$rank python3 -c "$RANK" <&0 & ranks+=($!); done
wait -n; code=$?
kill -KILL "${ranks[@]}" 2>/dev/null
((code > 128)) && exit $((code - 128))
exit $code
"""
RANK = """
import os, sys, threading, time
from pathlib import Path
from hpc_rl.roles import control
from hpc_rl.core.records import ProcessRecord
from hpc_rl.core.trial import write_json
rank, how = int(os.environ["FAKE_RANK"]), os.environ["HOW"]
here = Path(os.environ["HERE"])
control.connect(os.environ["HPC_RL_SUPERVISOR"], "the token")
stopping, stacks = threading.Event(), control.Stacks()
stacks.open(here / f"stacks-{rank}")
threading.Thread(target=control.listen, args=(stopping, control.Deadline(), stacks), daemon=True).start()
write_json(here / f"trainer-0.0-rank{rank}.json", ProcessRecord.of("trainer", os.getpid(), rank).to_json())
if how == "dies" and rank == 1:
    os.kill(os.getpid(), 9)
if how == "fails" and rank == 1:
    while not (here / "trainer-0.0-rank0.json").exists():
        time.sleep(0.02)
    control.leave(70)
    os._exit(70)
stopping.wait()
time.sleep(0.2 * rank)
(here / f"saved-{rank}").touch()
control.leave(75)
os._exit(75)
"""


@pytest.fixture
def attempt(attempt) -> Attempt:
    write_json(attempt.trial.secret, {"control": "the token", "data": "another"}, 0o600)
    return attempt


def start(attempt: Attempt, tmp_path: Path, how: str = "waits") -> MpiexecHandle:
    program = tmp_path / "mpiexec"
    program.write_text(FAKE_MPIEXEC)
    program.chmod(0o755)
    unit = toy_unit(tasks_per_node=2, mpi=MpiStart(mpiexec=str(program)))
    write_steps(attempt.trial, unit, scheduler="local")
    environ = {**os.environ, "RANK": RANK, "HOW": how, "HERE": str(attempt.processes)}
    environ["PYTHONPATH"] = str(Path(processes.__file__).parents[2])
    handle = MpiexecSteps(ProcessSteps(environ), LOOPBACK, environ).start(
        unit, ["python", "-m", "m"], attempt, 0
    )
    assert isinstance(handle, MpiexecHandle)
    return handle


def poll(handle: MpiexecHandle, until) -> int | None:
    """Poll until the condition holds; return the last answer."""
    answers = []

    def holds() -> bool:
        answers.append(handle.poll())
        return until(answers[-1])

    wait_until(holds)
    return answers[-1]


def records(attempt: Attempt) -> list[ProcessRecord]:
    return [ProcessRecord.read(path) for path in sorted(attempt.processes.glob("trainer-*"))]


def has_ended(code: int | None) -> bool:
    return code is not None


def both_up(attempt: Attempt):
    return lambda code: len(records(attempt)) == 2


def test_a_stop_reaches_ranks_that_connect_later_and_none_exits_before_all_have_saved(attempt, tmp_path):
    handle = start(attempt, tmp_path)
    handle.send(processes.STOP)
    assert poll(handle, has_ended) == 75
    assert (attempt.processes / "saved-0").exists() and (attempt.processes / "saved-1").exists()
    assert handle.poll() == 75, "again"


def test_a_stranger_is_told_nothing_and_counts_for_nothing(attempt, tmp_path):
    handle = start(attempt, tmp_path)
    poll(handle, both_up(attempt))
    host, _, port = handle.where.rpartition(":")
    with socket.create_connection((host, int(port))) as stranger:
        stranger.sendall(b"a guess\nexited 70\n")
        poll(handle, lambda code: True)
        time.sleep(0.1)
        handle.send(processes.STOP)
        assert poll(handle, has_ended) == 75
        stranger.settimeout(5)
        assert stranger.recv(100) == b""


@pytest.mark.parametrize("sent", [b"", b"x" * 10_000], ids=["silent", "without_end"])
def test_a_stranger_that_stays_delays_no_end(attempt, tmp_path, monkeypatch, sent):
    monkeypatch.setattr(mpiexec, "STRANGER_S", 1.0)
    handle = start(attempt, tmp_path)
    host, _, port = handle.where.rpartition(":")
    with socket.create_connection((host, int(port))) as stranger:
        stranger.sendall(sent)
        poll(handle, both_up(attempt))
        handle.send(processes.STOP)
        began = time.monotonic()
        assert poll(handle, has_ended) == 75
        assert time.monotonic() - began < processes.KILL_STEP_S


def test_all_ranks_dump_their_stacks(attempt, tmp_path):
    handle = start(attempt, tmp_path)
    poll(handle, both_up(attempt))
    poll(handle, lambda code: all(rank.is_known for rank in handle._ranks))
    handle.send(processes.STACKS)
    poll(handle, lambda code: all((attempt.processes / f"stacks-{n}").read_text() for n in (0, 1)))
    handle.kill()
    poll(handle, has_ended)
    assert not any(is_alive(one.pid, one.start_ticks) for one in records(attempt))


def test_a_killed_rank_is_a_death_by_signal(attempt, tmp_path):
    handle = start(attempt, tmp_path, "dies")
    assert poll(handle, has_ended) == 128 + signal.SIGKILL


def test_after_a_failure_the_others_have_a_bounded_time(attempt, tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "AFTER_FAILURE_S", 0.3)
    handle = start(attempt, tmp_path, "fails")
    poll(handle, has_ended)
    assert len(records(attempt)) == 2 and not (attempt.processes / "saved-0").exists()
    assert not any(is_alive(one.pid, one.start_ticks) for one in records(attempt))


def test_a_killed_mpiexec_ends_when_its_ranks_have(attempt, tmp_path):
    handle = start(attempt, tmp_path)
    poll(handle, both_up(attempt))
    os.kill(handle.children[0].pid, signal.SIGKILL)
    assert poll(handle, has_ended) == -signal.SIGKILL
    assert not any(is_alive(one.pid, one.start_ticks) for one in records(attempt))


def test_a_missing_mpiexec_says_which_option_names_it(attempt, tmp_path):
    unit = toy_unit(mpi=MpiStart(mpiexec="/no/such"))
    write_steps(attempt.trial, unit, scheduler="local")
    with pytest.raises(FileNotFoundError, match=r"/no/such is not on the PATH \(launcher.mpi.mpiexec\)"):
        MpiexecSteps(ProcessSteps(), LOOPBACK).start(unit, ["python"], attempt, 0)
