"""What people look at on the real Slurm: doctor on the login node and on nodes, attach, and what a submission
says of itself.
"""

import json
import sys
import time

import pytest
from toy_trials import hpc_rl

from hpc_rl.core.trial import Trial, write_json
from hpc_rl.trials import trial_index


def findings(said: str) -> dict[tuple[str, str], dict]:
    return {(row["check"], row["where"]): row for row in json.loads(said)["findings"]}


@pytest.mark.timeout(240)
def test_the_doctor_visits_three_nodes(cluster, tmp_path, until):
    root = tmp_path / "runs root"
    done = hpc_rl(
        "doctor",
        "--allocation",
        "--nodes",
        "3",
        "--fileroot",
        root,
        "--json",
        cwd=tmp_path,
        timeout_s=200,
        check=False,
    )
    found = findings(done.stdout)
    together = {check: row for (check, where), row in found.items() if where == "nodes"}
    assert len(together) >= 10
    assert [row for row in together.values() if row["status"] != "ok"] == [], done.stdout
    assert together["nodes reported"]["found"].startswith("3 of 3: n")
    assert "reached 2 others" in together["network"]["found"]
    slurm = {check: row for (check, _), row in found.items() if check.startswith("slurm")}
    assert slurm["slurm version"]["found"] and slurm["slurm controller"]["status"] == "ok"
    assert slurm["slurm accounting"]["status"] == "warn", "this cluster has none"
    of_nodes = [where for check, where in found if check == "cpus" and "," in where]
    assert sorted(of_nodes[0].split(",")) == sorted(
        together["nodes reported"]["found"].partition(": ")[2].split(", ")
    )
    assert done.returncode == 0, done.stdout
    assert not list(root.glob(".hpc-rl*")), "the visit left something behind"
    # srun ends before the nodes have cleaned up after the job
    until(lambda: not cluster.run("squeue", "-h").strip())


@pytest.mark.timeout(120)
def test_the_doctor_within_a_job_visits_its_nodes(cluster, tmp_path):
    command = [sys.executable, "-m", "hpc_rl.cli", "doctor", "--fileroot", str(tmp_path), "--json"]
    said = cluster.run("salloc", "-N2", *command, timeout_s=100)
    assert findings(said[said.index("{") :])["nodes reported", "nodes"]["found"].startswith("2 of 2")


@pytest.mark.timeout(120)
def test_the_doctor_says_what_slurm_refuses(cluster, tmp_path):
    done = hpc_rl(
        "doctor",
        "--allocation",
        "--partition",
        "nope",
        "--fileroot",
        tmp_path,
        cwd=tmp_path,
        timeout_s=100,
        check=False,
    )
    assert done.returncode == 1
    assert "no partition 'nope'" in done.stdout
    assert "invalid partition" in done.stdout.lower()


@pytest.mark.timeout(120)
def test_attach_runs_a_command_on_the_node_of_a_role(cluster, tmp_path, until):
    trial = Trial(tmp_path / "runs" / "user" / "exp" / "t1")
    trial.make_dirs()
    write_json(trial.plan_json, {"trainer": "grpo", "n_nodes": 2})
    job_id = cluster.run("sbatch", "--parsable", "-N2", "-o", "/dev/null", "--wrap", "sleep 300").strip()
    write_json(trial.job(job_id), {"job_id": job_id, "scheduler": "slurm", "time": time.time()})
    trial_index.record_trial(trial)
    until(lambda: cluster.run("squeue", "-h", "-j", job_id, "-o", "%T").strip() == "RUNNING")
    nodes = cluster.run("squeue", "-h", "-j", job_id, "-o", "%N").strip()
    last = cluster.run("scontrol", "show", "hostnames", nodes).split()[-1]
    attempt = trial.attempt(f"{job_id}.0")
    attempt.make_dirs()
    attempt.events.write_text(
        json.dumps({"event": "started", "time": time.time(), "role": "server", "index": 0, "incarnation": 0})
    )
    with attempt.events.open("a") as file:
        file.write("\n")
    record = {"pid": 1, "start_ticks": 1, "host": "x", "role": "server", "rank": 0}
    record |= {"node": last, "job_id": job_id}
    write_json(attempt.processes / "server-0.0-rank0.json", record)
    shown = hpc_rl("attach", trial.dir, "--role", "server", cwd=tmp_path)
    assert (
        f"--jobid={job_id}" in shown.stdout
        and f"--nodelist={last}" in shown.stdout
        and "--pty" in shown.stdout
    )
    done = hpc_rl(
        "attach", trial.dir, "--exec", "--", "bash", "-c", "echo $SLURMD_NODENAME $PWD", cwd=tmp_path
    )
    assert done.stdout.split() == [last, str(trial.dir)]
