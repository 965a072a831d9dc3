"""Control of a role: lines of the pipe, a first and a later TERM, and stack dumps even if it is stuck."""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from patience import extend, wait_until

from hpc_rl.roles.control import SAME_TERM_S, Deadline, Stacks, obey

ROLE = """
import os, sys, threading, time
from pathlib import Path
from hpc_rl.roles import control
stopping = threading.Event()
stacks = control.Stacks(Path(sys.argv[1]))
control.obey_signals(stopping)
threading.Thread(target=control.listen, args=(stopping, control.Deadline(), stacks), daemon=True).start()
print("up", flush=True)
def a_place_to_be_found_at():
    if sys.argv[2] == "stuck":
        threading.Lock().acquire(); lock = threading.Lock(); lock.acquire(); lock.acquire()
    if sys.argv[2] == "holds the lock":
        sum(range(10**12))
    stopping.wait()
a_place_to_be_found_at()
print("stopping", flush=True)
stacks.close()
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], subprocess.Popen]]:
    with ExitStack() as stack:

        def start(how: str) -> subprocess.Popen:
            pipe = subprocess.PIPE
            argv = [sys.executable, "-c", ROLE, str(tmp_path / "stacks.txt"), how]
            role = stack.enter_context(subprocess.Popen(argv, stdin=pipe, stdout=pipe))
            stack.callback(role.kill)
            assert role.stdout.readline() == b"up\n"
            return role

        yield start


@pytest.mark.parametrize("by", ["line", "TERM", "USR2"])
def test_it_stops_when_asked_and_leaves_no_empty_file(start, tmp_path, by):
    role = start("waits")
    if by == "line":
        for part in (b"sto", b"p\n"):
            role.stdin.write(part)
            role.stdin.flush()
    else:
        role.send_signal(signal.Signals[f"SIG{by}"])
    assert role.stdout.readline() == b"stopping\n"
    assert role.wait(extend(30)) == 0 and not list(tmp_path.iterdir())


def test_the_second_term_ends_a_process_whose_main_thread_is_stuck(start):
    role = start("stuck")
    role.terminate()
    time.sleep(SAME_TERM_S + 0.3)
    assert role.poll() is None
    role.terminate()
    assert role.wait(extend(30)) == 143


def test_the_end_of_the_pipe_ends_it(start):
    role = start("stuck")
    role.stdin.close()
    assert role.wait(extend(30)) == 143


@pytest.mark.parametrize(
    ("how", "by"),
    [("waits", "line"), ("stuck", "USR1"), ("holds the lock", "USR1"), ("waits", "USR1 while stopped")],
)
def test_it_says_where_it_is(start, tmp_path, how, by):
    path = tmp_path / "stacks.txt"
    role = start(how)

    def ask() -> bool:
        """Again and again: it has said `up` a moment before it is where it will be found."""
        if by == "line":
            role.stdin.write(b"stacks\n")
            role.stdin.flush()
        else:
            if "stopped" in by:
                role.send_signal(signal.SIGSTOP)
            role.send_signal(signal.SIGUSR1)
            role.send_signal(signal.SIGCONT)
        return "a_place_to_be_found_at" in path.read_text()

    wait_until(ask)


def test_the_lines():
    stopping, deadline = threading.Event(), Deadline()

    class NoStacks(Stacks):
        def __init__(self) -> None: ...

    assert deadline.left_s is None
    obey(["ends_in", "100.5"], stopping, deadline, NoStacks())
    assert 90 < deadline.left_s <= 100.5
    obey(["of", "a", "later", "version"], stopping, deadline, NoStacks())
    assert not stopping.is_set()
    obey(["stop"], stopping, deadline, NoStacks())
    assert stopping.is_set()
