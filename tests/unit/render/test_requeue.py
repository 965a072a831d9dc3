"""Which nodes a requeued job avoids: job_policy.sh under bash, with programs that only note their calls."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from hpc_rl.render.jinja_environment import template_root

POLICY = template_root() / "templates" / "job_policy.sh"
SCONTROL = """#!/bin/bash
if [[ "$1 $2" == "show job" ]]; then
  [[ ! -e $CALLS.away ]] || { rm "$CALLS.away"; exit 1; }
  echo "JobId=7 Restarts=$RESTARTS BatchFlag=1"
elif [[ $1 == show ]]; then
  tr , '\\n' <<<"$3"
else
  echo "${0##*/} $*" >>"$CALLS"
fi
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
def test_a_requeue_names_bad_nodes_and_takes_back_those_whose_time_is_over(tmp_path, told, own, calls):
    assert asked(tmp_path, told, exclude=own) == ["scontrol requeue 7", *calls]


def test_both_components_of_a_heterogeneous_job_get_them(tmp_path):
    updates = [f"scontrol update jobid={job} ExcNodeList=n2" for job in ("7", "7+1")]
    assert asked(tmp_path, "n2", layout="hetjob") == ["scontrol requeue 7", *updates]


@pytest.mark.parametrize(
    ("told", "own", "flags"),
    [
        (None, "n9", ""),
        ("n2", "n9", " --exclude n9,n2"),
        ("", "n9", " --exclude n9"),
        ("", None, " --exclude "),
    ],
)
def test_a_successor_is_told_the_same(tmp_path, told, own, flags):
    [call] = asked(tmp_path, told, exclude=own, continue_by="successor")
    assert (
        call.startswith("python -m hpc_rl.app.submit_again successor ") and f"--after 7{flags} --name" in call
    )


def test_a_successor_of_a_server_task_continues_that_task_alone(tmp_path):
    [call] = asked(tmp_path, None, continue_by="successor", script_name="servers.sbatch")
    assert call.endswith(" --script servers.sbatch --array 3 100")


def test_submitit_requeues_what_is_recorded(tmp_path):
    assert asked(tmp_path, None, backend="submitit") == []
    assert '"event": "requeued"' in (tmp_path / "trial" / "jobs" / "7.state").read_text()


def test_a_start_that_was_cut_off_does_not_requeue_the_start_after_it(tmp_path):
    assert asked(tmp_path, None, restarts="1", code=75) == []


def test_a_scheduler_that_does_not_answer_is_waited_for(tmp_path):
    (tmp_path / "calls.away").touch()
    (tmp_path / "sleep").write_text('#!/bin/bash\necho "sleep $*" >>"$CALLS"\n')
    (tmp_path / "sleep").chmod(0o755)
    assert asked(tmp_path, None) == ["sleep 10", "scontrol requeue 7"]


@pytest.mark.parametrize("blamed", [False, True])
def test_in_an_allocation_an_attempt_that_blames_a_node_is_the_last(tmp_path, blamed):
    """A start in place would get the same node; `hpc-rl run` shows the reason."""
    own = tmp_path / "attempts" / "7-abc.0"
    own.mkdir(parents=True)
    events = [{"time": 1.0, "event": "bad_nodes", "nodes": ["n2", "n3"], "hours": 24}] if blamed else []
    (own / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    for folder in ("jobs", "scripts"):
        (tmp_path / folder).mkdir()
    (tmp_path / "scripts" / "exit_policy.sh").touch()
    settings = f"trial_dir='{tmp_path}' scheduler=allocation attempts=attempts rc=75"
    call = 'name_job 7-abc; if start_again; then echo "start $restart"; else echo "end: $reason"; fi'
    done = subprocess.run(
        ["bash", "-c", f"set -euo pipefail; {settings}; source '{POLICY}'; {call}"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    if blamed:
        assert done.stdout.startswith("end: ") and "n2,n3" in done.stdout
    else:
        assert done.stdout == "start 1\n"


def asked(
    tmp_path: Path, told: str | None, restarts: str = "0", code: int = 0, **given: str | None
) -> list[str]:
    """What is called when a job that stopped with code 75 asks to continue, with this list of bad nodes.

    Args:
        tmp_path: Where the programs are.
        told: The nodes that are bad.
        restarts: How often Slurm has started the job again.
        code: With which the script exits.
        given: Settings of the script.
    """
    here = tmp_path / "trial"
    for folder in ("jobs", "scripts"):
        (here / folder).mkdir(parents=True)
    (here / "scripts" / "exit_policy.sh").write_text(
        "declare -A after_stop after_exit exit_reason stop_reason\n"
    )
    if told is not None:
        (here / "jobs" / "7.exclude").write_text(told + "\n")
    for name, content in (
        ("scontrol", SCONTROL),
        ("python", SCONTROL),
        ("sinfo", "#!/bin/bash\nprintf 'n%s\\n' 1 2 3 4\n"),
    ):
        (tmp_path / name).write_text(content)
        (tmp_path / name).chmod(0o755)
    values = {
        "trial_dir": here,
        "python": "python",
        "scheduler": "slurm",
        "backend": "sbatch",
        "layout": "allocation",
        "continue_by": "requeue",
        "exclude": "",
        "job_name": "name",
        "script_name": "trial.sbatch",
        **{name: value for name, value in given.items() if value is not None},
    }
    settings = " ".join(f"{name}='{value}'" for name, value in values.items())
    env = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "CALLS": str(tmp_path / "calls"),
        "RESTARTS": restarts,
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_PARTITION": "main",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_ARRAY_JOB_ID": "7",
        "SLURM_ARRAY_TASK_ID": "3",
    }
    for number in (0, 1):
        env |= {
            f"SLURM_JOB_PARTITION_HET_GROUP_{number}": "main",
            f"SLURM_JOB_NUM_NODES_HET_GROUP_{number}": "1",
        }
    calls = f"set -euo pipefail; {settings}; source '{POLICY}'; name_job '' 0 100; rc=75; ask_again '\"code\": 75'"
    assert subprocess.run(["bash", "-c", calls], env=env, check=False).returncode == code
    noted = tmp_path / "calls"
    return noted.read_text().splitlines() if noted.exists() else []
