"""What a requeued job is told to avoid: the part of the script that asks Slurm, under bash with programs that only note."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCONTROL = """#!/bin/bash
if [[ $1 == show ]]; then tr , '\\n' <<<"$3"; else echo "${0##*/} $*" >>"$CALLS"; fi
"""


@pytest.mark.parametrize(
    ("told", "own", "calls"),
    [
        (None, None, []),  # no node was ever bad: nothing to say
        ("n2,n3", None, ["scontrol update jobid=7 ExcNodeList=n2,n3"]),
        ("n2", "n9", ["scontrol update jobid=7 ExcNodeList=n9,n2"]),
        ("", None, ["scontrol update jobid=7 ExcNodeList="]),  # their time is over
        ("", "n9", ["scontrol update jobid=7 ExcNodeList=n9"]),
        ("n1,n2,n3,n4", "n9", ["scontrol update jobid=7 ExcNodeList=n9"]),  # too few would be left
    ],
)
def test_a_requeue_says_which_nodes_are_bad_and_takes_back_those_whose_time_is_over(
    script, tmp_path, told, own, calls
):
    assert asked(script("slurm", root=tmp_path, n_nodes=2, exclude=own), tmp_path, told) == [
        "scontrol requeue 7",
        *calls,
    ]


@pytest.mark.parametrize(
    ("told", "own", "flags"),
    [
        (None, "n9", ""),
        ("n2", "n9", " --exclude n9,n2"),
        ("", "n9", " --exclude n9"),
        ("", None, " --exclude "),
    ],
)
def test_a_successor_is_told_the_same(script, tmp_path, told, own, flags):
    [call] = asked(
        script("slurm", root=tmp_path, n_nodes=2, exclude=own, continue_by="successor"), tmp_path, told
    )
    assert call.startswith("python -m hpc_rl.app.submit_successor ") and f"--after 7{flags} --name" in call


def asked(text: str, tmp_path: Path, told: str | None) -> list[str]:
    """What is called when a job that stopped asks to go on, with this list of bad nodes."""
    asking = text[text.index("\nask_again() {") : text.index("\nstart_again() {")]
    here = tmp_path / "exp" / "one"
    (here / "jobs").mkdir(parents=True)
    if told is not None:
        (here / "jobs" / "7.exclude").write_text(told + "\n")
    for name, content in (
        ("scontrol", SCONTROL),
        ("python", SCONTROL),
        ("sinfo", "#!/bin/bash\nprintf 'n%s\\n' 1 2 3 4\n"),
    ):
        (tmp_path / name).write_text(content)
        (tmp_path / name).chmod(0o755)
    stubs = f"set -euo pipefail\nsay() {{ :; }}\nrecord() {{ :; }}\ntrial_dir={here} job_id=7 slurm_job=7 restart=0\n"
    stubs += "told_to_end=0 interrupted=0 time_limit='' cancel_intent=/none python=python\n"
    env = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "CALLS": str(tmp_path / "calls"),
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_PARTITION": "main",
        "SLURM_JOB_NUM_NODES": "2",
    }
    subprocess.run(["bash", "-c", f'{stubs}{asking}\nask_again "more"'], env=env, check=True)
    return (tmp_path / "calls").read_text().splitlines()
