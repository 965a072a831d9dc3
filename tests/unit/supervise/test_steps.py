"""Processes of a unit as one handle, and the srun line."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launch_lines import write_steps
from patience import extend, wait_until
from toy_plans import toy_plan, toy_unit

from hpc_rl.core.errors import ConfigError
from hpc_rl.core.proc import end_processes, find_start_ticks, is_alive
from hpc_rl.core.records import ProcessRecord
from hpc_rl.core.trial import load_json, write_json
from hpc_rl.plan.schema import Unit
from hpc_rl.supervise import ownership, processes
from hpc_rl.supervise.agents import AgentHandle, open_steps
from hpc_rl.supervise.ownership import find_next_incarnations, kill_leftovers
from hpc_rl.supervise.processes import ProcessSteps, SrunSteps, describe_unplaced

UNTIL_EOF = "import os, sys; print('up', flush=True)\nwhile d := os.read(0, 99): print(d.decode(), flush=True); sys.exit(75)"
DEAF = "import time; print('up', flush=True); time.sleep(60)"


def unit(tasks: int = 1, nodes: tuple[int, ...] = (0,), gpus: int = 0, **more) -> Unit:
    size = {"tasks_per_node": tasks, "nodes": list(nodes), "gpus_per_task": gpus, "cpus_per_task": 3}
    return toy_unit(**{**size, **more})


def start(attempt, code: str, tasks: int = 1, environ: dict | None = None, **more):
    own = ProcessSteps({**os.environ, **(environ or {})})
    return own.start(unit(tasks, **more), [sys.executable, "-c", code], attempt, 0)


def wait(handle) -> int:
    wait_until(lambda: handle.poll() is not None)
    return handle.poll()


def until_up(attempt, num: int) -> None:
    logs = attempt.dir / "logs"
    wait_until(lambda: sum("up" in path.read_text() for path in logs.iterdir()) == num)


def test_all_tasks_are_asked_by_their_pipes_and_write_logs_of_their_own(attempt):
    handle = start(attempt, UNTIL_EOF, tasks=2)
    until_up(attempt, 2)
    assert handle.poll() is None
    handle.send(processes.STOP)
    assert wait(handle) == 75
    handle.send(processes.STOP)  # harmless afterwards
    handle.kill()
    assert handle.poll() == 75
    names = {path.name for path in (attempt.dir / "logs").iterdir()}
    assert names == {"trainer-0.0-rank0.log", "trainer-0.0-rank1.log"}
    assert "stop" in attempt.log("trainer", 0, 0, 1).read_text()


def test_the_pipe_of_a_unit_is_held_by_nobody_else(attempt):
    first = start(attempt, UNTIL_EOF)
    second = start(attempt, DEAF, role="server")
    until_up(attempt, 2)
    os.close(first._pipes.pop())  # what the supervisor's death does; the other child must not keep it open
    assert wait(first) == 0
    second.kill()
    assert wait(second) == -9


def test_environment(attempt):
    shown = [
        "HPC_RL_STEPS",
        "HPC_RL_RANK",
        "HPC_RL_NUM_RANKS",
        "OMP_NUM_THREADS",
        "X",
        "CUDA_VISIBLE_DEVICES",
    ]
    show = f"import os; print('up', *(os.environ.get(name, '-') for name in {shown}))"
    wait(start(attempt, show, tasks=2, gpus=1, gpu_offset=1, env={"X": "y"}, cpus_per_task=1))
    assert attempt.log("trainer", 0, 0, 1).read_text() == "up process 1 2 1 y 1,2\n"
    environ = {"CUDA_VISIBLE_DEVICES": "4,5,6"}
    wait(start(attempt, show, role="server", gpus=2, gpu_offset=1, environ=environ, cpus_per_task=1))
    assert attempt.log("server", 0, 0).read_text() == "up process 0 1 1 - 5,6\n"
    wait(start(attempt, show, role="rollout", env={"OMP_NUM_THREADS": "7"}))
    assert attempt.log("rollout", 0, 0).read_text() == "up process 0 1 7 - \n"


@pytest.mark.parametrize(
    ("num_servers", "num_cpus", "threads"), [(1, 8, 4), (3, 8, 2), (3, 2, 1), (9, 64, 4)]
)
def test_processes_of_one_machine_share_its_cpus(num_servers, num_cpus, threads, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: num_cpus)
    units = [
        toy_unit(role=role, cpus_per_task=4) for role in ["server"] * num_servers + ["trainer", "rollout"]
    ]
    steps = open_steps("process", toy_plan(units, sys.executable))
    assert steps.count_threads(units[-2]) == threads


def test_a_search_path_of_the_users_comes_after_ours(attempt):
    show = "import os; print(os.environ['PYTHONPATH'])"
    wait(start(attempt, show, environ={"PYTHONPATH": "/ours"}, env={"PYTHONPATH": "/theirs"}))
    assert attempt.log("trainer", 0, 0).read_text() == "/ours:/theirs\n"


def test_fewer_gpus_than_planned_are_refused_in_words(attempt):
    with pytest.raises(
        ConfigError, match="the GPUs 1 to 2 of this machine, but the number in CUDA_VISIBLE_DEVICES is 2"
    ):
        start(attempt, "", tasks=2, gpus=1, gpu_offset=1, environ={"CUDA_VISIBLE_DEVICES": "4,5"})


def test_peers_of_a_task_that_ended_get_a_bounded_time(attempt, monkeypatch):
    monkeypatch.setattr(processes, "AFTER_FAILURE_S", 0.3)
    code = f"import os, sys\nif os.environ['HPC_RL_RANK'] == '1': sys.exit(70)\n{DEAF}"
    started = time.monotonic()
    assert wait(start(attempt, code, tasks=3)) == 70
    assert time.monotonic() - started < extend(5)


def test_what_a_task_leaves_in_its_group_ends_with_it(attempt):
    code = f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {DEAF!r}]); print(p.pid, flush=True)"
    handle = start(attempt, code)
    wait(handle)
    pid = int(attempt.log("trainer", 0, 0).read_text().split()[0])
    wait_until(lambda: find_start_ticks(pid) is None)


def test_a_program_that_is_not_there_is_an_error_and_leaves_nothing_open(attempt):
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(FileNotFoundError):
        ProcessSteps(dict(os.environ)).start(unit(), ["/no/such/python"], attempt, 0)
    assert len(os.listdir("/proc/self/fd")) == before


FAKE_SRUN = """#!/bin/bash
printf '%s\\n' "$@" > "$OUT/argv"; env > "$OUT/env"; echo $$ > "$OUT/pid"
trap 'echo killed-step >> "$OUT/argv"; exit 137' TERM
if [ -n "$STUBBORN" ]; then trap '' TERM; fi
read -r line; echo "$line" >> "$OUT/argv"
[ -n "$line" ] || exit 9
while :; do sleep 0.05; done
"""


@pytest.fixture
def fake_srun(tmp_path, monkeypatch) -> Path:
    (tmp_path / "srun").write_text(FAKE_SRUN)
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path


def srun_start(attempt, out: Path, own: Unit | None = None, components: list[int] | None = None, **env: str):
    of_job = {"SLURM_MEM_PER_NODE": "5", "SLURM_CPUS_PER_TASK": "9", "SLURM_JOB_ID": "7"}
    environ = {**os.environ, **of_job, "OUT": str(out), **env}
    own = own or unit()
    write_steps(attempt.trial, own, layout="hetjob" if components else "allocation")
    steps = SrunSteps(["a1", "a2", "b7"], environ, components)
    handle = steps.start(own, ["python", "-m", "m"], attempt, 3)
    wait_until((out / "pid").exists)
    return handle


def test_one_srun_is_asked_by_its_pipe_and_killed_by_term(attempt, fake_srun):
    handle = srun_start(attempt, fake_srun)
    handle.send(processes.STOP)
    time.sleep(0.3)
    assert handle.poll() is None
    handle.kill()
    assert wait(handle) == 137
    assert (fake_srun / "argv").read_text().split()[-5:] == ["python", "-m", "m", "stop", "killed-step"]
    env = dict(line.split("=", 1) for line in (fake_srun / "env").read_text().splitlines() if "=" in line)
    assert env["HPC_RL_STEPS"] == "srun" and env["SLURM_JOB_ID"] == "7" and env["OMP_NUM_THREADS"] == "3"
    assert "SLURM_MEM_PER_NODE" not in env and "SLURM_CPUS_PER_TASK" not in env
    own = int((fake_srun / "pid").read_text())
    assert [child.pid for child in handle.children] == [own], "signals of the handle go to srun itself"


def test_a_step_has_its_name_its_nodes_its_logs_and_its_component(attempt, fake_srun):
    handle = srun_start(attempt, fake_srun, unit(tasks=2, nodes=(1, 2)), [0, 1, 1])
    argv = (fake_srun / "argv").read_text().splitlines()
    log = f"{attempt.dir}/logs/trainer-0.3-rank%t.log"
    assert {"--job-name=trainer-0.3", "--nodelist=a2,b7", f"--output={log}", "--het-group=1"} <= set(argv)
    handle.kill()
    wait(handle)


@pytest.mark.parametrize(
    ("missing", "words"), [("steps.sh", "does not exist"), ("srun", "is not on the PATH")]
)
def test_a_step_that_lacks_its_script_or_srun_is_an_error(attempt, fake_srun, missing, words):
    if missing == "srun":
        write_steps(attempt.trial, unit())
        (fake_srun / "srun").unlink()
    environ = {**os.environ, "PATH": str(fake_srun)}
    with pytest.raises(FileNotFoundError, match=f"{missing} {words}"):
        SrunSteps(["a"], environ).start(unit(), ["python", "-m", "m"], attempt, 0)


def test_a_step_that_slurm_does_not_make_says_so_until_a_process_runs(attempt, fake_srun):
    handle = srun_start(attempt, fake_srun)
    assert handle.explain_unplaced() == "", "nothing was said"
    said = "srun: Job 7 step creation still disabled, retrying (Requested nodes are busy)"
    with attempt.log("trainer", 0, 3).open("a") as log:
        log.write(f"{said}\n")
    assert handle.explain_unplaced() == said
    write_json(attempt.processes / "trainer-0.3-rank0.json", {"pid": 1})
    assert handle.explain_unplaced() == ""
    handle.kill()
    wait(handle)


def test_a_step_without_a_place_names_its_cpus_and_the_threads_of_a_core():
    trainer = unit(tasks=2)
    plan = toy_plan([trainer], "python", cpus_per_node=5, threads_per_core=2)
    reason = describe_unplaced(trainer, plan, "Requested nodes are busy")
    assert "trainer 0" in reason and "Requested nodes are busy" in reason
    assert "6 CPUs" in reason and "2 threads per core" in reason and "5 CPUs per node" in reason


def test_a_client_that_does_not_end_is_killed(attempt, fake_srun, monkeypatch):
    monkeypatch.setattr(processes, "KILL_STEP_S", 0.3)
    handle = srun_start(attempt, fake_srun, STUBBORN="1")
    handle.kill()
    assert wait(handle) == -signal.SIGKILL


def test_starts_of_srun_keep_their_distance(attempt, fake_srun, monkeypatch):
    monkeypatch.setattr(processes, "START_EVERY_S", 0.4)
    write_steps(attempt.trial, unit())
    steps = SrunSteps(["a1"], {**os.environ, "OUT": str(fake_srun)})
    began = time.monotonic()
    handles = [steps.start(unit(), ["python", "-m", "m"], attempt, number) for number in range(3)]
    assert time.monotonic() - began >= 0.8
    for handle in handles:
        handle._kill_groups()
        wait(handle)


def test_leftovers_are_asked_then_killed_and_only_the_very_processes(attempt, monkeypatch):
    for name in ("WAIT_S", "TERM_S", "KILL_S"):
        monkeypatch.setattr(ownership, name, 0.3 if name != "KILL_S" else 5.0)
    deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    argvs = ([sys.executable, "-c", code] for code in (deaf, DEAF, DEAF))
    all_three = [subprocess.Popen(argv, stdout=subprocess.PIPE) for argv in argvs]
    left, reused, elsewhere = all_three
    try:
        for rank, process in enumerate(all_three):
            process.stdout.readline()
            record = ProcessRecord.of("trainer", process.pid, rank)
            write_json(attempt.process_record("trainer", 0, 0, rank, by_client=True), record.to_json())
        for rank, change in ((1, {"start_ticks": 1}), (2, {"host": "another"})):
            path = attempt.processes / f"client-trainer-0.0-rank{rank}.json"
            write_json(path, load_json(path) | change)
        (attempt.processes / "torn.json").write_text("{")
        assert kill_leftovers(attempt.trial) == []
        assert left.wait(extend(5)) == -9
        assert reused.poll() is None and elsewhere.poll() is None
    finally:
        for process in all_three:
            process.kill()
            process.communicate()


def test_who_can_not_be_ended_is_told(monkeypatch):
    me = (os.getpid(), find_start_ticks(os.getpid()))
    monkeypatch.setattr(os, "kill", lambda pid, number: None)
    assert end_processes([me, (me[0], 1)], 0.0, 0.0, 0.0) == [me]
    assert is_alive(*me) and not is_alive(me[0], None)


def test_incarnations_go_on_from_every_trace(attempt):
    attempt.events.write_text('{"event": "started", "role": "trainer", "index": 0, "incarnation": 2}\n')
    attempt.log("server", 1, 4).touch()
    attempt.log("trainer", 0, 1, rank=3).touch()
    attempt.exit_record("rollout", 0, 0, 0).touch()
    write_json(attempt.processes / "client-server-1.5-rank0.json", {})
    assert find_next_incarnations(attempt) == {("trainer", 0): 3, ("server", 1): 6, ("rollout", 0): 1}


def test_a_line_that_only_looks_like_an_agents_goes_to_its_log(tmp_path):
    agent = AgentHandle("serveragent", tmp_path / "log", tmp_path)
    agent.running |= {"0 0", "1 0"}
    read_end, write_end = os.pipe()
    agent.listen_to(read_end)
    os.write(write_end, b"exited 0 0 exited\nexited 0 0 1x\nexited 1 0 75\n")
    os.close(write_end)
    agent.poll()
    assert agent.codes == {"1 0": 75}
    assert (tmp_path / "log").read_text() == "exited 0 0 exited\nexited 0 0 1x\n"
