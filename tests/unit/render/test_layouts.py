"""The layouts' Slurm requests for server nodes, and the parameters of submitit."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from job_scripts import make_stamp
from small_configs import WORDS

from hpc_rl.config.load.load import load
from hpc_rl.config.rules.check import check
from hpc_rl.core.errors import ConfigError
from hpc_rl.core.trial import Trial
from hpc_rl.plan.plan import make_plan
from hpc_rl.render.scripts import render
from hpc_rl.trials.preflight import list_job_requests

BASE = [*WORDS, "cluster.n_gpus_per_node=0", "launcher.type=slurm", "recover.mode=auto"]
BASE += ["cluster.n_nodes=3", "allocation_mode=embedded:d2+fsdp:d1", "train_dataset.batch_size=8"]


def made(*options: str, more: Sequence[str] = ()):
    words = [word if word.startswith("launcher.hooks") else f"launcher.slurm.{word}" for word in options]
    loaded = check(load([], [*BASE, *words, *more]), files=False)
    return loaded.config, make_plan(loaded.config, loaded.explicit, interpreter="/python", scheduler="slurm")


def scripts(*options: str, avoid: tuple[str, ...] = ()) -> dict[str, str]:
    config, plan = made(*options)
    stamp = make_stamp(Path("/w"), tag="TAG", avoid=avoid)
    return render(config, plan, Trial(Path("/r/e/t")), stamp, "slurm")


def directives(text: str) -> list[list[str]]:
    """Lines of each component."""
    lines = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]
    at = lines.index("hetjob") if "hetjob" in lines else len(lines)
    return [lines[:at], lines[at + 1 :]]


SPARE = ["partition=normal", "account=lab", "qos=high", "time=2-0"]
SPARE += ["servers.partition=spare", "servers.qos=preemptible"]


def test_the_servers_array_takes_its_own_options_over_the_sections():
    own = ("servers.time=4:00:00", "servers.max_running=1", "dependency=afterok:7")
    texts = scripts("layout=jobs", *SPARE, *own)
    trial, servers = directives(texts["trial.sbatch"])[0], directives(texts["servers.sbatch"])[0]
    assert {"--partition=normal", "--qos=high", "--time=2-0", "--nodes=1"} <= set(trial)
    assert "--dependency=afterok:7" in trial
    assert {"--partition=spare", "--qos=preemptible", "--time=4:00:00", "--account=lab"} <= set(servers)
    assert {"--array=0-1%1", "--nodes=1", "--requeue"} <= set(servers)
    assert not any(line.startswith("--dependency") for line in servers), "only the trial waits for other jobs"


@pytest.mark.parametrize("layout", ["jobs", "hetjob"])
def test_nodes_of_the_servers_may_have_other_memory_and_cpus(layout):
    own = ("servers.mem=9000", "servers.cpus_per_task=24", "servers.exclusive=true", "servers.tmp=5G")
    texts = scripts(f"layout={layout}", "mem_per_cpu=100", *own)
    first, second = directives(texts["trial.sbatch"])
    servers = second if layout == "hetjob" else directives(texts["servers.sbatch"])[0]
    assert {"--mem=9000", "--cpus-per-task=24", "--exclusive", "--tmp=5G"} <= set(servers)
    assert not any(line.startswith("--mem-per-cpu") for line in servers)
    assert "--mem-per-cpu=100" in first and "--exclusive" not in first


@pytest.mark.parametrize("layout", ["jobs", "hetjob"])
def test_bad_nodes_are_avoided_by_every_part_and_only_by_this_submission(layout):
    texts = scripts(f"layout={layout}", "exclude=n1", "servers.exclude=n2", avoid=("n7", "n8"))
    first, second = directives(texts["trial.sbatch"])
    parts = [first, second if layout == "hetjob" else directives(texts["servers.sbatch"])[0]]
    assert ["--exclude=n1,n7,n8" in parts[0], "--exclude=n2,n7,n8" in parts[1]] == [True, True]
    after = [line for text in texts.values() for line in text.splitlines() if not line.startswith("#SBATCH")]
    assert not [line for line in after if "n7" in line], "later starts are told what is bad then"


def test_a_component_says_only_what_is_its_own():
    texts = scripts("layout=hetjob", *SPARE, "mail_type=END", "mail_user=me")
    first, second = directives(texts["trial.sbatch"])
    assert {"--nodes=1", "--partition=normal", "--mail-type=END"} <= set(first)
    assert {"--nodes=2", "--partition=spare", "--qos=preemptible", "--account=lab"} <= set(second)
    # sbatch reads them by component
    parts = directives(scripts("layout=hetjob", "extra_args=[--hint=nomultithread]")["trial.sbatch"])
    assert all("--hint=nomultithread" in part for part in parts)
    of_job = ("--job-name", "--mail", "--output", "--signal", "--requeue")
    assert not [line for line in parts[1] if line.startswith(of_job)]


@pytest.mark.parametrize(("how", "line"), [("requeue", "--requeue"), ("successor", "--no-requeue")])
def test_where_requeue_is_refused_nothing_asks_for_it(how, line):
    texts = scripts("layout=jobs", f"continue_by={how}")
    for name in ("trial.sbatch", "servers.sbatch"):
        assert line in directives(texts[name])[0] and f" continue_by={how} " in texts[name]


def test_replicas_that_span_nodes_have_one_step_and_one_task_of_the_array():
    own = ["cluster.n_gpus_per_node=8", "cluster.n_nodes=5", "allocation_mode=sglang:d2t16+fsdp:d8"]
    own += ["train_dataset.batch_size=64"]
    config, plan = made("layout=jobs", "servers.partition=spare", more=own)
    texts = render(config, plan, Trial(Path("/r/e/t")), make_stamp(Path("/w"), tag="TAG"), "slurm")
    servers = directives(texts["servers.sbatch"])[0]
    assert {"--array=0-1", "--nodes=2", "--gpus-per-node=8", "--requeue"} <= set(servers)
    assert "--no-kill" not in servers, "without one of its nodes a replica is lost"
    assert "--no-kill" in directives(texts["trial.sbatch"])[0]
    step = texts["steps.sh"].partition("server() {")[2].partition("}")[0]
    assert "--nodes=2 --ntasks=2" in step and "--ntasks-per-node=1" in step
    assert "--gpus-per-node=8 " in step and '--output="$output"' in step
    assert (
        "nodes 1-4  server      server 0-1: 1 replica on each 2 nodes, 1 process on each node"
        in texts["trial.sbatch"]
    )
    assert "for each 2 of these 4 nodes" in texts["trial.sbatch"]
    assert [part.n_nodes for _, part in list_job_requests(config, plan)] == [1, 2]


@pytest.mark.parametrize(
    ("options", "has_script"),
    [
        ((), False),
        (("replace_servers=true",), True),
        (("replace_servers=true", "backend=submitit", "time=1:00:00"), False),
    ],
)
def test_a_job_has_a_script_for_the_servers_of_lost_nodes(options, has_script):
    texts = scripts(*options)
    assert ("servers.sbatch" in texts) == has_script
    if has_script:
        servers = directives(texts["servers.sbatch"])[0]
        assert {"--array=0-1", "--nodes=1", "--requeue"} <= set(servers)
        assert "array" not in texts["trial.sbatch"]


def test_both_parts_are_compared_with_the_cluster():
    for layout, n_nodes in (("jobs", 1), ("hetjob", 2)):
        requests = list_job_requests(*made(f"layout={layout}", *SPARE))
        found = [(one.launcher.slurm.partition, part.n_nodes) for one, part in requests]
        assert found == [("normal", 1), ("spare", n_nodes)]


def test_node_hooks_are_refused_where_one_srun_does_not_reach_all():
    hook, words = "launcher.hooks.pre_node='#!/bin/sh'", "does not work with launcher.slurm.layout hetjob"
    with pytest.raises(ConfigError, match=rf"launcher\.hooks\.pre_node.* {words}"):
        scripts("layout=hetjob", hook)
    assert "server_attempts" in scripts("layout=jobs", hook)["servers.sbatch"]


def test_what_submitit_is_told():
    own = ("time=2:00:00", "partition=p", "extra_args=[--hint=nomultithread]", "wckey=w")
    texts = scripts("backend=submitit", *own)
    told = json.loads(texts["submitit.json"])
    options = told["additional_parameters"]
    assert (told["time"], told["wckey"], options["time"], options["partition"]) == (120, "w", "2:00:00", "p")
    assert (options["signal"], options["requeue"]) == ("USR2@300", True)
    assert options["hint"] == "nomultithread"
    assert "--overlap" in told["srun_args"], "its step leaves the job to the roles"
    assert told["setup"] == ["trap '' USR1"], "a nudge does not kill the batch shell, which is submitit's"
    assert " backend=submitit " in texts["trial.sbatch"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "submitit needs launcher.slurm.time"),
        (["time=1-0", "extra_args=[-s]"], "'-s' can't be passed to submitit"),
    ],
)
def test_what_submitit_can_not_be_told_is_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        scripts("backend=submitit", *options)
