"""The limits of a role, in another process, and commands that end with it; supervise/test_steps.py tests how
processes are identified and ended.
"""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from patience import extend, wait_until

from hpc_rl.core.proc import TiedProcess

pytestmark = pytest.mark.waits

LOWERED = """
import json, resource
from hpc_rl.core.resource_limits import raise_limits
names = ("RLIMIT_NOFILE", "RLIMIT_MEMLOCK", "RLIMIT_CORE")
numbers = [getattr(resource, name) for name in names]
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 2048))
resource.setrlimit(resource.RLIMIT_MEMLOCK, (4096, resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]))
raise_limits()
print(json.dumps([resource.getrlimit(number) for number in numbers]))
"""


def test_soft_limits_are_raised_to_the_hard_ones_and_cores_are_off():
    files, locked, core = json.loads(
        subprocess.check_output([sys.executable, "-c", LOWERED], timeout=extend(60))
    )
    assert (files, locked[0], core[0]) == ([2048, 2048], locked[1], 0)


@pytest.fixture
def tied():
    """Starts a command whose output is read from it."""
    started = []

    def start(*argv: str) -> TiedProcess:
        started.append(TiedProcess(argv, dict(os.environ), subprocess.PIPE))
        return started[-1]

    yield start
    for process in started:
        process.end(0)
        process.stdout.close()


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


@pytest.mark.parametrize(
    ("argv", "status", "said"),
    [
        (["bash", "-c", "echo hello; cat; exit 3"], "exit code 3", "hello\n"),
        ([sys.executable, "-c", "import os; print(os.getpid() == os.getsid(0))"], "exit code 0", "True\n"),
        (["bash", "-c", "kill -9 $$"], "signal SIGKILL", ""),
        (
            ["nosuchcommand"],
            "exit code 127",
            "'nosuchcommand' can't be started: [Errno 2] No such file or dir",
        ),
        (
            ["bash", "-c", "yes | head -1; echo ${PIPESTATUS[0]}"],
            "exit code 0",
            "y\n141\n",
        ),  # SIGPIPE ends it
    ],
)
def test_the_exit_code_and_output_are_the_commands(tied, argv, status, said):
    process = tied(*argv)
    process.wait(extend(20))
    assert process.exit_status() == status
    assert process.stdout.read().decode().startswith(said)


PARENT = """
import os, subprocess, sys, time
from hpc_rl.core.proc import TiedProcess
child = TiedProcess(sys.argv[1:], dict(os.environ), subprocess.PIPE)
print(child.pid, int(child.stdout.readline()), flush=True)
time.sleep(600)
"""
UNTIED = "import ctypes, os, time; ctypes.CDLL(None).prctl(1, 0); "
UNTIED += "print(os.getpid(), flush=True); time.sleep(600)"


@pytest.mark.parametrize(
    "argv",
    [["bash", "-c", "sleep 600 & echo $!; sleep 600"], [sys.executable, "-c", UNTIED]],
    ids=["with a child", "that loses the kernel's tie"],
)
def test_nothing_of_a_command_is_left_once_its_parent_is_killed(argv):
    with subprocess.Popen([sys.executable, "-c", PARENT, *argv], stdout=subprocess.PIPE, text=True) as parent:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert not any(map(is_gone, pids))
        parent.kill()
    wait_until(lambda: all(map(is_gone, pids)))


def test_the_kernel_kills_a_command_at_once(tied):
    """It does so when the starting thread ends; the watch only sees the process."""
    started = []

    def start() -> None:
        started.append(tied("bash", "-c", "echo ready; exec sleep 600"))
        started[0].stdout.readline()

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert started[0].wait(extend(20)) == -signal.SIGKILL


@pytest.mark.parametrize("ending", ["exit 0", "kill -9 $$"])
def test_what_a_command_started_ends_with_it(tied, ending):
    """Also if the command is killed, and nothing calls `end`."""
    process = tied("bash", "-c", f"sleep 600 & echo $!; {ending}")
    pid = int(process.stdout.readline())
    wait_until(lambda: is_gone(pid))


TRAP = "trap 'echo ends; exit 5' TERM; echo ready; while :; do sleep 0.05; done"


@pytest.mark.parametrize("whole_session", [False, True])
def test_a_command_may_end_by_itself_before_it_is_killed(tied, whole_session):
    process = tied("bash", "-c", TRAP)
    assert process.stdout.readline() == b"ready\n"
    process.end(20, whole_session)
    assert process.exit_status() == "exit code 5"
    assert process.stdout.read().endswith(b"ends\n")  # bash may report the end of its own child first


def test_a_whole_session_may_end_by_itself(tied):
    """Its first process does not pass the signal on, and dies at once; the other one takes a second."""
    process = tied("bash", "-c", f'bash -c "{TRAP.replace("echo ends", "sleep 1; echo ends")}"; echo outer')
    assert process.stdout.readline() == b"ready\n"
    process.end(20, whole_session=True)
    assert b"ends\n" in process.stdout.read()


def test_what_ignores_term_is_killed(tied):
    process = tied("bash", "-c", "trap '' TERM; echo ready; while :; do sleep 0.05; done")
    assert process.stdout.readline() == b"ready\n"
    process.end(0.2)
    assert process.exit_status() == "signal SIGKILL"
