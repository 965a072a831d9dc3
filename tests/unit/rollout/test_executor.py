"""What ends an executor worker ends the rollout role in the worker's own words: they are the reason that
`status` shows.
"""

import asyncio
import sys

import pytest
from patience import extend
from small_configs import STORED
from tokenizers import Tokenizer, models

from hpc_rl.core.errors import ConfigError, EndpointUnavailable, FailureClass, RoleFailed
from hpc_rl.core.trial import Trial, write_json
from hpc_rl.rollout import executor as executor_module
from hpc_rl.rollout.executor import Executor


async def end_of(argv: list[str]) -> None:
    """Raises what ends the role whose one worker is started so."""
    executor = Executor(lambda number: argv, 1)
    await executor.start()
    try:
        await executor.wait_for_failure()
    finally:
        await executor.close()


async def test_a_reward_that_fails_to_import_is_told_in_its_own_words(tmp_path):
    trial = Trial(tmp_path / "runs/user/e/t")
    trial.make_dirs()
    trial.make_secret()
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    sections = {"tokenizer_path": str(tmp_path), "rollout": {"reward_fn": "nosuch:score"}}
    write_json(trial.config_json, STORED | sections)
    argv = [sys.executable, "-m", "hpc_rl.roles.rollout_worker", "--trial_dir", str(trial.dir)]
    told = r"rollout\.reward_fn 'nosuch:score' can't be imported: No module named 'nosuch'"
    with pytest.raises(ConfigError, match=told):
        await end_of([*argv, "--attempt", "1.0"])


def program(lines: str) -> list[str]:
    """A worker of these lines; `send` writes a frame."""
    head = "import sys; from hpc_rl.rollout import pipes\ndef send(op, **more):\n"
    head += "    sys.stdout.buffer.write(pipes.pack({'op': op, **more})); sys.stdout.flush()\n"
    return [sys.executable, "-c", head + lines]


async def test_a_worker_that_ends_again_and_again_says_why(monkeypatch):
    monkeypatch.setattr(executor_module, "MAX_SHORT_LIVES", 1)
    ends = program("send('ends', error='no server in sight'); sys.exit(70)")
    with pytest.raises(RoleFailed, match="1 times in a row, last with exit code 70: no server in sight"):
        await end_of(ends)


async def test_an_endpoint_that_is_gone_ends_the_role_as_a_failure_of_the_infrastructure():
    lives = program("send('unavailable', ticket=1, error='h: 401'); sys.stdin.read()")
    with pytest.raises(EndpointUnavailable, match="h: 401") as raised:
        await asyncio.wait_for(end_of(lives), extend(20))
    assert raised.value.failure is FailureClass.INFRASTRUCTURE


async def test_a_note_counts_under_any_ticket_and_only_a_wanted_one_is_answered():
    echo = "send('ready')\nwhile frame := pipes.receive_frame_blocking(sys.stdin.buffer):\n"
    echo += "    send('note', ticket=frame['ticket'], seen=frame['op'])\n"
    executor, notes = Executor(lambda number: program(echo), 1), asyncio.Queue()
    executor.on_note = notes.put_nowait
    await executor.start()
    try:
        executor.run({"op": "run", "ticket": 1})
        assert (await asyncio.wait_for(notes.get(), extend(20)))["seen"] == "run"
        executor.confirm_note({"op": "kept", "ticket": 1})
        assert (await asyncio.wait_for(notes.get(), extend(20)))["seen"] == "kept"
        executor.cancel(1)
        executor.confirm_note({"op": "kept", "ticket": 1})
        executor.run({"op": "run", "ticket": 2})
        last = [await asyncio.wait_for(notes.get(), extend(20)) for _ in range(2)]
        assert [(note["ticket"], note["seen"]) for note in last] == [(1, "cancel"), (2, "run")]
    finally:
        await executor.close()
