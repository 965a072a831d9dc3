"""A foreign process: its end, its last words, and that it dies with its parent."""

import asyncio
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

from hpc_rl.files import last_lines
from hpc_rl.servers.server_process import TiedProcess


def _gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def test_child_dies_when_the_parent_is_killed(tmp_path):
    code = """
        import sys, time
        from pathlib import Path
        from hpc_rl.servers.server_process import TiedProcess
        child = TiedProcess(sys.executable, ["-c", "import time; time.sleep(600)"], {}, Path(sys.argv[1]) / "log")
        print(child.pid, flush=True)
        time.sleep(600)
    """
    argv = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as parent:
        pid = int(parent.stdout.readline())
        time.sleep(0.3)
        assert Path(f"/proc/{pid}").exists()
        parent.kill()
    deadline = time.monotonic() + 5
    while not _gone(pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)


async def test_end_and_last_words_are_told(tmp_path):
    process = TiedProcess(
        sys.executable, ["-c", "print('last words'); raise SystemExit(3)"], dict(os.environ), tmp_path / "log"
    )
    while not process.exit_status():
        await asyncio.sleep(0.02)
    assert process.exit_status() == "exit code 3"
    assert last_lines(tmp_path / "log", 20) == ["last words"]
    assert (tmp_path / "log").stat().st_mode & 0o077 == 0


def test_what_a_child_started_dies_with_it(tmp_path):
    """Also where the child is killed, and no call to stop follows."""
    code = "import subprocess, sys, time; child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"
    code += "; print(child.pid, flush=True); time.sleep(600)"
    process = TiedProcess(sys.executable, ["-c", code], dict(os.environ), tmp_path / "log")
    deadline = time.monotonic() + 20
    while not (said := last_lines(tmp_path / "log", 1)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.kill()
    while not _gone(int(said[0])):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert process.exit_status() == "signal SIGKILL"


async def test_stop_kills_what_ignores_term(tmp_path):
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
    process = TiedProcess(sys.executable, ["-c", code], dict(os.environ), tmp_path / "log")
    while last_lines(tmp_path / "log", 20) != ["up"]:
        await asyncio.sleep(0.02)
    await process.stop(grace_s=0.2)
    assert process.exit_status() == "signal SIGKILL"
