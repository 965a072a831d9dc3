"""The section launcher.slurm, hooks and the checks before a submission, on a real Slurm."""

import json
import re
from pathlib import Path

import pytest
from command_line import Shell, make_python, small_trial

pytestmark = pytest.mark.timeout(300)

SUPERVISOR = """\
echo "supervisor on $SLURMD_NODENAME" >>"$PWD/notes"
"""


@pytest.fixture
def shell(cluster, tmp_path: Path) -> Shell:
    python = tmp_path / "python"
    shell = small_trial(tmp_path, f"{{python: {python}}}")
    shell.env |= {name: value for name, value in cluster.client_env.items() if name != "PATH"}
    shell.env["HPC_RL_SITE_DIR"] = str(tmp_path / "site")
    make_python(python, SUPERVISOR)
    return shell


def submitted(shell: Shell, *arguments: str) -> str:
    done = shell.run("submit", "--config", "grpo.yaml", "--parsable", *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_slurm_read_every_option(shell, cluster):
    options = {
        "partition": "high",
        "account": "0123",
        "time": "0:45:00",
        "constraint": "ib",
        "nodelist": "n[2-3]",
        "exclude": "n4",
        "mem": "3G",
        "exclusive": "user",
        "tmp": "1M",
        "licenses": "abaqus:2",
        "wckey": "thesis",
        "mail_type": "FAIL",
        "mail_user": "somebody@example.org",
        "comment": 'it\'s "mine" # ü',
        "gres": "gpu:2",
        "extra_args": '["--nice=7", "--begin=now+1hour"]',
    }
    given = [f"launcher.slurm.{name}={value}" for name, value in options.items()]
    job_id = submitted(
        shell, "--n_nodes", "2", *given, "cluster.n_gpus_per_node=0", "launcher.slurm.gpus_by=null"
    )
    shown = cluster.run("scontrol", "show", "job", job_id)
    for words in (
        "Partition=high",
        "Account=0123",
        "TimeLimit=00:45:00",
        "Features=ib",
        "ReqNodeList=n[2-3]",
        "ExcNodeList=n4",
        "MinMemoryNode=3G",
        "MinTmpDiskNode=1M",
        "Licenses=abaqus:2",
        "MailType=FAIL",
        "MailUser=somebody@example.org",
        '"mine" # ü',
        "Nice=7",
        "NumNodes=2",
    ):
        assert words in shown, f"{words}\n{shown}"
    # 22.05 and 24.11, then 26.05
    assert re.search(r"TresPerNode=gres(:gpu:|/gpu:)2\b", shown), shown
    assert re.search(r"\b(OverSubscribe|Exclusive)=USER\b", shown), shown
    cluster.run("scancel", job_id)


def test_null_leaves_the_decision_to_slurm(shell, cluster):
    bare = [f"launcher.slurm.{name}=null" for name in ("mem", "cpus_per_task", "ntasks_per_node")]
    job_id = submitted(shell, *bare, 'launcher.slurm.extra_args=["--begin=now+1hour"]')
    shown = cluster.run("scontrol", "show", "job", job_id)
    assert "MinMemoryCPU=1000M" in shown and "NumCPUs=1" in shown
    cluster.run("scancel", job_id)


def test_hooks_on_every_node_and_the_site_adds_its_own(shell, cluster, tmp_path, until):
    (tmp_path / "site" / "hooks.d").mkdir(parents=True)
    (tmp_path / "site" / "hooks.d" / "pre_node").write_text(
        'echo "site $SLURMD_NODENAME $HPC_RL_HOOK" >>"$PWD/notes"\n'
    )
    note = 'echo "{} $SLURMD_NODENAME" >>"$PWD/notes"\n#\n'
    hooks = {name: note.format(name) for name in ("pre_job", "post_node", "post_job")}
    job_id = submitted(
        shell, "--n_nodes", "3", *(f"launcher.hooks.{name}={text}" for name, text in hooks.items())
    )
    [state] = until_found(until, tmp_path, f"{job_id}.state")
    until(lambda: '"ended"' in state.read_text(), 120)
    assert '"reason": "done"' in state.read_text(), state.read_text()
    lines = (shell.here / "notes").read_text().splitlines()
    first = next(line.split()[1] for line in lines if line.startswith("pre_job"))
    nodes = sorted(line.split()[1] for line in lines if line.startswith("site"))
    assert (
        lines[0] == f"pre_job {first}"
        and lines[4] == f"supervisor on {first}"
        and lines[-1] == f"post_job {first}"
    )
    assert (
        len(set(nodes)) == 3
        and sorted(line.split()[1] for line in lines if line.startswith("post_node")) == nodes
    )


def until_found(until, root: Path, name: str) -> list[Path]:
    until(lambda: list(root.rglob(name)))
    return list(root.rglob(name))


def test_a_node_that_fails_its_check_ends_the_job_by_name(shell, cluster, tmp_path, until):
    bad = 'if [[ $SLURMD_NODENAME == n2 ]]; then echo "GPU 3 fell off the bus"; exit 9; fi\n#\n'
    job_id = submitted(
        shell, "--n_nodes", "3", "launcher.slurm.nodelist=n[1-3]", f"launcher.hooks.pre_node={bad}"
    )
    until(lambda: "pre_node" in shell.run("status", "small").stdout, 120)
    story = shell.run("status", "small").stdout
    assert "hook.pre_node.0 ended with code 9 on node n2" in story
    assert not (shell.here / "notes").exists(), "no supervisor was started"
    [log] = tmp_path.rglob("pre_node.n2.log")
    assert log.read_text() == "GPU 3 fell off the bus\n"
    until(lambda: job_id not in cluster.run("squeue", "-h", "-o", "%i"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--partition", "hihg"],
            "there is no partition 'hihg' with nodes; this cluster has high, main, short.",
        ),
        (
            ["launcher.slurm.mem=900G"],
            "0 of 4 nodes of partition main have 921600 MB of memory per node (from launcher.slurm.mem)",
        ),
        (
            ["--partition", "short", "--time", "31"],
            "has a time limit of 00:30:00; 00:31:00 was requested.",
        ),
    ],
)
def test_what_can_never_run_is_refused_before_anything_is_written(shell, cluster, arguments, words):
    message = shell.refused(64, "submit", "--config", "grpo.yaml", *arguments)
    assert words in message and "Nearest that fits: " in message
    assert cluster.run("squeue", "-h") == ""


def test_the_whole_check_has_slurms_own_words_too(shell, cluster):
    message = shell.refused(
        64,
        "render",
        "--check",
        "--config",
        "grpo.yaml",
        "--n_nodes",
        "9",
        "allocation_mode=embedded:d8+fsdp:d1",
    )
    assert "has 4 nodes; 9 were requested. Nearest that fits: --n_nodes 4" in message
    assert "Requested node configuration is not available" in message


def test_check_says_what_slurm_thinks_and_submits_nothing(shell, cluster):
    done = shell.run("submit", "--dry_run", "--config", "grpo.yaml", "--n_nodes", "2")
    assert done.returncode == 0, done.stderr
    assert re.search(r"check +sbatch --test-only +ok: Job \d+ to start at .* partition main", done.stdout)
    done = shell.run("render", "--check", "--json", "--config", "grpo.yaml", "--output", "seen")
    found = {check["name"]: check["state"] for check in json.loads(done.stdout)["checks"]}
    assert found["capacity"] == found["sbatch --test-only"] == found["trial.sbatch: bash -n"] == "ok"
    assert (shell.here / "seen" / "scripts" / "trial.sbatch").exists()
    assert cluster.run("squeue", "-h") == ""
