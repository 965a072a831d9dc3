"""The watches start on other nodes, without the helpers of their sruns."""

import os
import stat
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from patience import wait_until

from hpc_rl.supervise.watch_steps import WatchSteps, end_helper

# As srun: a process of this name, whose child of the same name is its helper.
SRUN = f"""#!{sys.executable} -S
import os, sys, time
def rename():
    open("/proc/self/comm", "w").write("srun")
rename()
helper = os.fork()
if helper == 0:
    time.sleep(60)
    os._exit(0)
line = f"{{helper}} " + " ".join(sys.argv[1:])
open(os.environ["SRUN_CALLS"], "a").write(line + "\\n")
for _ in range(600):
    if os.path.exists(os.environ["SRUN_CALLS"] + ".end"):
        break
    time.sleep(0.02)
"""


@pytest.fixture
def calls(tmp_path, monkeypatch) -> Path:
    program = tmp_path / "bin" / "srun"
    program.parent.mkdir()
    program.write_text(SRUN)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("SRUN_CALLS", str(tmp_path / "calls"))
    yield tmp_path / "calls"
    (tmp_path / "calls.end").touch()


def lines_of(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def nodes_of(lines: list[str]) -> list[str]:
    return sorted(word for line in lines for word in line.split() if "nodelist" in word)


def test_two_watches_lose_their_helpers_and_start_elsewhere_when_they_end(calls, tmp_path):
    steps = WatchSteps(["n2", "n3", "n4", "n5"], [], lambda n: ["true", str(n)], tmp_path / "log", again_s=30)
    now = 0.0
    steps.poll(now)
    wait_until(lambda: len(lines_of(calls)) == 2)

    def have_no_helpers() -> bool:
        steps.poll(now)
        return not any(is_alive(int(line.split()[0])) for line in lines_of(calls))

    wait_until(have_no_helpers)
    assert nodes_of(lines_of(calls)) == ["--nodelist=n2", "--nodelist=n4"]
    calls.with_name("calls.end").touch()
    wait_until(lambda: (steps.poll(now), not steps.running)[1])
    steps.poll(29.0)
    assert len(lines_of(calls)) == 2
    now = 30.0
    steps.poll(now)
    wait_until(lambda: len(lines_of(calls)) == 4)
    assert nodes_of(lines_of(calls)[2:]) == ["--nodelist=n3", "--nodelist=n5"]
    wait_until(lambda: (steps.poll(now), not steps.running)[1])
    for line in lines_of(calls)[2:]:
        with suppress(ProcessLookupError):  # of a helper that was ended in time
            os.kill(int(line.split()[0]), 9)


def test_a_process_that_has_no_helper_yet_is_left_alone():
    assert not end_helper(os.getpid())
