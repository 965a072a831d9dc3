"""The batch script is killed and its supervisor lives: the attempt ends with its state saved and a record."""

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

from hpc_rl.core.trial import load_json

sys.path.insert(0, str(Path(__file__).parent))

from supervised import HERE, ROOT, Fake


def test_a_supervisor_without_its_script_saves_and_ends(tmp_path):
    fake = Fake(tmp_path)
    fake.write({"trainer": ["serve"]})
    argv = [sys.executable, "-m", "hpc_rl.roles.supervisor", "--trial_dir", str(fake.trial.dir)]
    argv += ["--attempt", fake.attempt.id, "--steps", "process"]
    script = subprocess.Popen(
        ["bash", "-c", f"{shlex.join(argv)} 2>{shlex.quote(str(fake.trial.dir))}/supervisor.0.log & wait"],
        env={**os.environ, "PYTHONPATH": f"{HERE}:{ROOT}"},
        stdin=subprocess.DEVNULL,
    )
    fake.until(lambda: len(fake.alive()) >= 3)
    script.send_signal(signal.SIGKILL)
    script.wait()
    fake.until(lambda: fake.attempt.ended.exists())
    ended = load_json(fake.attempt.ended)
    assert (
        ended["exit_code"] == 75
        and load_json(fake.attempt.ended)["cause"] == "script_killed"
        and "job script" in ended["reason"]
    )
    assert not fake.alive()


def test_a_script_that_died_first_is_missed(tmp_path):
    fake = Fake(tmp_path)
    fake.write({"trainer": ["serve"]})
    script = subprocess.Popen(["true"])
    script.wait()
    assert fake.run(HPC_RL_SCRIPT_PID=str(script.pid)) == 75, fake.story()
    assert (
        load_json(fake.attempt.ended)["cause"] == "script_killed"
        and "job script" in load_json(fake.attempt.ended)["reason"]
    )
    assert not fake.events("started")
