"""The task of submitit in the job: it requeues only if the script asked to be started again."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from patience import extend, wait_until

pytest.importorskip("submitit")

RUN = """
import os, signal, sys
from hpc_rl.schedulers.submitit_task import TrialTask
task = TrialTask(sys.argv[1], sys.argv[2])
def handler(number, frame):
    print("requeued" if task.checkpoint() is not None else "let go", flush=True)
    os._exit(0)
signal.signal(signal.SIGUSR2, handler)
print("up", flush=True)
try:
    print("code", task(), flush=True)
except RuntimeError as error:
    print(error, flush=True)
"""
SCRIPT = """
trap 'stop=1' USR1
echo '{"event": "started"}' >"$(dirname "$0")/7.state"
while [[ -z ${stop:-} ]]; do sleep 0.05; done
"""


def start(folder: Path, script: str) -> subprocess.Popen[str]:
    (folder / "trial.sbatch").write_text(script)
    environ = {"SLURM_JOB_ID": "7", "PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(sys.path)}
    argv = [sys.executable, "-c", RUN, str(folder / "trial.sbatch"), str(folder)]
    child = subprocess.Popen(argv, env=environ, stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "up\n"
    return child


@pytest.mark.parametrize(
    ("last", "said"), [("requeued", "requeued"), ("ended", "the trial ended with code 75")]
)
def test_submitits_signal_waits_for_the_save_and_the_scripts_word(tmp_path, last, said):
    end = f"""echo '{{"event": "{last}"}}' >>"$(dirname "$0")/7.state"\nexit 75\n"""
    child = start(tmp_path, SCRIPT + end)
    wait_until((tmp_path / "7.state").exists)
    child.send_signal(signal.SIGUSR2)
    assert child.communicate(timeout=extend(60))[0].startswith(said)


def test_an_end_is_an_end(tmp_path):
    assert start(tmp_path, "exit 0\n").communicate(timeout=extend(60))[0] == "code 0\n"
    assert "ended with code 70" in start(tmp_path, "exit 70\n").communicate(timeout=extend(60))[0]
