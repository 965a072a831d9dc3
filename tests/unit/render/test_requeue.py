"""The nodes that the next start avoids: the program of a job script, with programs that note their calls."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from job_scripts import ROOT, write_programs

from hpc_rl.core.files import JsonLines

PROGRAM = """#!/bin/bash
if [[ "$*" == *roles.supervisor* ]]; then exit 75; fi
if [[ "$1 $2" == "show job" ]]; then
  [[ ! -e $CALLS.away ]] || { rm "$CALLS.away"; echo away >>"$CALLS"; exit 1; }
  echo "JobId=7 Restarts=$RESTARTS BatchFlag=1"
elif [[ $1 == show ]]; then
  tr , '\\n' <<<"$3"
else
  echo "${0##*/} $*" >>"$CALLS"
fi
"""
# With less patience than the program has.
RUN = "import sys; from hpc_rl.supervise import job_runner; job_runner.ASK_EVERY_S = 0.1; "
RUN += "from hpc_rl.roles.job import main; sys.exit(main())"


@pytest.mark.parametrize(
    ("told", "own", "calls"),
    [
        (None, None, []),  # no node was ever bad: nothing to say
        ("n2,n3", None, ["scontrol update jobid=7 ExcNodeList=n2,n3"]),
        ("n2", "n9", ["scontrol update jobid=7 ExcNodeList=n9,n2"]),
        ("", None, ["scontrol update jobid=7 ExcNodeList="]),  # their time is over
        ("", "n9", ["scontrol update jobid=7 ExcNodeList=n9"]),
        ("n1,n2,n3,n4", "n9", ["scontrol update jobid=7 ExcNodeList=n9,n1,n2"]),  # as many as leave two
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
    assert call.startswith("python -m hpc_rl.roles.submit_again successor ")
    assert f"--after 7{flags} --name" in call


def test_a_successor_of_a_server_task_continues_that_task_alone(tmp_path):
    [call] = asked(tmp_path, None, continue_by="successor", script_name="servers.sbatch")
    assert call.endswith(" --script servers.sbatch --array 3 100")


def test_submitit_requeues_what_is_recorded(tmp_path):
    assert asked(tmp_path, None, backend="submitit") == []
    assert '"event": "requeued"' in (tmp_path / "trial" / "jobs" / "7.state").read_text()


def test_a_start_that_was_cut_off_does_not_requeue_the_start_after_it(tmp_path):
    assert asked(tmp_path, None, restarts="1") == []


def test_a_scheduler_that_does_not_answer_is_waited_for(tmp_path):
    (tmp_path / "calls.away").touch()
    assert asked(tmp_path, None) == ["away", "scontrol requeue 7"]


@pytest.mark.parametrize("is_blamed", [False, True])
def test_in_an_allocation_an_attempt_that_blames_a_node_is_the_last(tmp_path, is_blamed):
    """A start in place would get the same node; `hpc-rl run` shows the reason."""
    own = tmp_path / "trial" / "attempts" / "7-abc.0"
    own.mkdir(parents=True)
    events = [{"time": 1.0, "event": "bad_nodes", "nodes": ["n2", "n3"], "hours": 24}] if is_blamed else []
    (own / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    assert asked(tmp_path, None, arguments=["7-abc"], scheduler="allocation") == []
    lines = JsonLines(tmp_path / "trial" / "jobs" / "7-abc.state").poll()
    if is_blamed:
        assert [line["event"] for line in lines] == ["started", "ended"] and "n2,n3" in lines[-1]["reason"]
    else:
        assert [line["event"] for line in lines][:3] == ["started", "requeued", "started"]


def asked(
    tmp_path: Path,
    told: str | None,
    restarts: str = "0",
    arguments: list[str] | None = None,
    **given: Any,
) -> list[str]:
    """What is called when a job of two of four nodes, whose supervisor stopped with code 75, asks to continue.

    `told` are its bad nodes, the worst first, or None where none ever was; Slurm has started the job again
    `restarts` times; `arguments` are those of the script and `given` its settings.
    """
    here = tmp_path / "trial"
    for folder in ("jobs", "scripts", "intent", "recover"):
        (here / folder).mkdir(parents=True)
    if told is not None:
        (here / "jobs" / "7.exclude").write_text(told + "\n")
    sinfo = "#!/bin/bash\nprintf 'n%s\\n' {1..4}\n"
    write_programs(tmp_path, {"scontrol": PROGRAM, "python": PROGRAM, "sinfo": sinfo})
    settings = {"trial_dir": here, "workdir": here, "python": "python", "scheduler": "slurm"}
    settings |= {"script_name": "trial.sbatch", "attempts": "attempts", "job_name": "name"}
    settings |= {"recover_mode": "auto", "recover_retries": 3, "start_mode": "auto"}
    settings |= {name: value for name, value in given.items() if value is not None}
    words = [f"{name}={value}" for name, value in settings.items()]
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    env |= {"CALLS": str(tmp_path / "calls"), "RESTARTS": restarts}
    env |= {"SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}
    for part, number in (("", 2), ("_HET_GROUP_0", 1), ("_HET_GROUP_1", 1)):
        env |= {f"SLURM_JOB_PARTITION{part}": "main", f"SLURM_JOB_NUM_NODES{part}": str(number)}
    argv = [sys.executable, "-c", RUN, *words, "--", *(arguments or ["", "0", "100"])]
    assert subprocess.run(argv, env=env, check=False).returncode == 75
    noted = tmp_path / "calls"
    return noted.read_text().splitlines() if noted.exists() else []
