"""How often job_policy.sh starts a supervisor again that something kills: under bash, with supervisors that
kill themselves.
"""

import json
import subprocess
from pathlib import Path

import pytest

from hpc_rl.render.jinja_environment import template_root

POLICY = template_root() / "templates" / "job_policy.sh"
SUPERVISOR = """#!/bin/bash
echo start >>starts
start=$(wc -l <starts)
if [[ " {progress} " == *" $start "* ]]; then mkdir "recover/gen-$(printf %08d "$start")"; fi
if ((start > {kills})); then exit 0; fi
kill -KILL $$
"""
EXITS = """declare -A after_stop stop_reason
declare -A after_exit=([0]=done [signal]=restart_supervisor [other]=end)
declare -A exit_reason=([0]=done [signal]="killed too often" [other]=other)
"""


def run_job(folder: Path, kills: int, progress: str, retries: int) -> tuple[list[dict], int]:
    """The records of a job whose supervisor is killed so many times, and how many were started."""
    for name in ("jobs", "scripts", "recover", "intent"):
        (folder / name).mkdir(exist_ok=True)
    (folder / "scripts" / "exit_policy.sh").write_text(EXITS)
    supervisor = folder / "supervisor"
    supervisor.write_text(SUPERVISOR.format(kills=kills, progress=progress))
    supervisor.chmod(0o755)
    values = {"trial_dir": folder, "python": supervisor, "scheduler": "local", "n_nodes": 1}
    values |= {
        "recover_mode": "auto",
        "recover_retries": retries,
        "start_mode": "auto",
        "from_step": "",
        "hook_limit_s": 60,
    }
    settings = " ".join(f"{name}='{value}'" for name, value in values.items())
    hooks = " ".join(f"{name}_hooks=()" for name in ("pre_job", "pre_node", "post_node", "post_job"))
    script = f"set -euo pipefail; {settings} new_batches=0 script_name=x attempts=attempts {hooks}; "
    script += f"on_preempt_hooks=(); source '{POLICY}'; run_job one"
    done = subprocess.run(["bash", "-c", script], cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in (folder / "jobs" / "one.state").read_text().splitlines()]
    return records, len((folder / "starts").read_text().splitlines())


def test_kills_without_a_new_checkpoint_end_the_trial_with_the_reason(tmp_path):
    records, num_starts = run_job(tmp_path, kills=100, progress="", retries=2)
    assert num_starts == 3
    assert (records[-1]["event"], records[-1]["code"], records[-1]["reason"]) == (
        "ended",
        137,
        "killed too often",
    )


@pytest.mark.parametrize("retries", [1, 3])
def test_a_new_checkpoint_gives_the_retries_back(tmp_path, retries):
    progress = " ".join(str(start) for start in range(1, 13, retries))
    records, num_starts = run_job(tmp_path, kills=12, progress=progress, retries=retries)
    assert num_starts == 13
    assert (records[-1]["event"], records[-1]["code"]) == ("ended", 0)


def test_checkpoints_that_were_there_before_give_nothing_back(tmp_path):
    (tmp_path / "recover" / "gen-00000100").mkdir(parents=True)
    assert run_job(tmp_path, kills=100, progress="", retries=1)[1] == 2
