import asyncio
import signal
import sys

from hpc_rl.rollout import pipes

PIPE = asyncio.subprocess.PIPE
CLOSES = "import os, sys, time; os.close(1); time.sleep(float(sys.argv[1])); os._exit(78)"


async def child(life_s: float) -> asyncio.subprocess.Process:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", CLOSES, str(life_s), stdout=PIPE)
    assert process.stdout is not None
    assert await pipes.receive_frame(process.stdout) is None
    return process


async def test_the_exit_code_of_a_child_that_closed_its_pipe_is_its_own():
    children = await asyncio.gather(*(child(i / 100) for i in range(12)))
    assert await asyncio.gather(*map(pipes.wait_for_exit, children)) == [78] * 12


async def test_a_child_that_lives_on_without_its_pipe_is_killed(monkeypatch):
    monkeypatch.setattr(pipes, "EXIT_GRACE_S", 0.1)
    assert await pipes.wait_for_exit(await child(60)) == -signal.SIGKILL
