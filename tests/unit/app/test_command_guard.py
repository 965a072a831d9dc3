"""The process between the environment role and a command of the user's."""

import os
import signal
import subprocess
import sys
import time

import pytest


def guarded(*argv: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "hpc_rl.app.command_guard", *argv],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


@pytest.mark.parametrize(
    ("argv", "code", "said"),
    [
        (["bash", "-c", "echo hello; exit 3"], 3, "hello\n"),
        (["bash", "-c", "kill -9 $$"], 128 + signal.SIGKILL, ""),
        (["nosuchcommand"], 127, "'nosuchcommand' can't be started: "),
    ],
)
def test_the_exit_code_and_output_are_the_commands(argv, code, said):
    process = guarded(*argv)
    assert process.wait(20) == code
    assert said in process.stdout.read()
    process.stdin.close()
    process.stdout.close()


def test_nothing_is_left_once_its_input_closes():
    """As it does when the role is killed."""
    process = guarded("bash", "-c", "sleep 1000 & echo $!; sleep 1000")
    grandchild = int(process.stdout.readline())
    process.stdin.close()
    assert process.wait(20) == -signal.SIGKILL
    until = time.monotonic() + 20
    while is_alive(grandchild):
        assert time.monotonic() < until
        time.sleep(0.02)
    process.stdout.close()


def test_a_signal_to_the_group_lets_the_command_end_by_itself():
    process = guarded("bash", "-c", "trap 'echo ends; exit 5' TERM; echo ready; while :; do sleep 0.05; done")
    assert process.stdout.readline() == "ready\n"
    os.killpg(process.pid, signal.SIGTERM)
    assert process.wait(20) == 5
    assert process.stdout.read().endswith("ends\n")  # bash may report the end of its own child first
    process.stdin.close()
    process.stdout.close()
