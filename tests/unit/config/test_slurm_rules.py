"""Options of launcher.slurm that contradict each other or the plan are refused before sbatch runs."""

import json

import pytest

from hpc_rl.config.load.load import load
from hpc_rl.config.rules import consistency, slurm_rules


@pytest.fixture
def refusals(tmp_path):
    (tmp_path / "sft.yaml").write_text(
        "experiment_name: e\ntrial_name: t\nmodel: {path: /m}\ntrain_dataset: {path: /d, type: sft}\n"
    )

    rules = [*slurm_rules.RULES, *consistency.RULES]

    def ask(*options: str) -> list[str]:
        loaded = load([tmp_path / "sft.yaml"], options)
        return [str(refusal) for rule in rules for refusal in rule(loaded.config, loaded.explicit)]

    return ask


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            ["mem=10G", "mem_per_cpu=1G"],
            "launcher.slurm.mem and launcher.slurm.mem_per_cpu exclude each other",
        ),
        (["mem_per_gpu=10G", "mem_per_cpu=1G"], "exclude each other"),
        (["mem_per_cpu=1G", "cpus_per_task=null"], "needs launcher.slurm.cpus_per_task"),
        (["gres=gpu:8", "gpus_by=gres"], "Omit one"),
        (["gres=gpu:8", "gpu_type=h100"], "Omit one"),
        (["gres=gpu:a100:4"], "requests 4 GPUs per node, but cluster.n_gpus_per_node is 8"),
        (["gres=gpu"], "requests 1 GPUs"),
        (["gpu_type=h100", "gpus_by=null"], "gpu_type has no effect"),
        (["mail_user=a@b.org"], "mail_user has no effect without launcher.slurm.mail_type"),
        (["partition=''"], "use null"),
        (["constraint='a\u2028b'"], "line break"),
    ],
)
def test_contradictions_are_refused(refusals, options, words):
    [refusal, *_] = refusals(*(f"launcher.slurm.{option}" for option in options))
    assert words in refusal and "launcher.slurm." in refusal


@pytest.mark.parametrize(
    "options",
    [
        ["gres=gpu:a100:8"],
        ["gres=nvme:1", "gpu_type=h100"],
        ["mem=0"],
        ["mem=null", "mem_per_cpu=2G"],
        ["exclusive=true"],
    ],
)
def test_what_can_stand_together_is_accepted(refusals, options):
    assert refusals(*(f"launcher.slurm.{option}" for option in options)) == []


@pytest.mark.parametrize("role", ["trainer", "server", "rollout", "environment"])
def test_a_role_may_have_srun_options_of_its_own_unless_the_plan_sets_them(refusals, role):
    name = f"launcher.slurm.srun_args.{role}"
    binding = [
        "--distribution=cyclic",
        "--cpu-bind=cores",
        "--gpu-bind=closest",
        "--mem-bind=local",
        "--mpi=pmix",
    ]
    assert refusals(f"{name}={json.dumps(binding)}") == []
    for wrong, words in (("-n4", "derived"), ("cores", "not an option"), ("--x=$HOME", "not expanded")):
        [refusal] = refusals(f"{name}={json.dumps([wrong])}")
        assert name in refusal and words in refusal


def test_memory_per_gpu_needs_gpus(refusals):
    assert (
        "mem_per_gpu needs GPUs" in refusals("launcher.slurm.mem_per_gpu=4G", "cluster.n_gpus_per_node=0")[0]
    )


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("--mem=4G", "launcher.slurm.mem"),
        ("-N4", "cluster.n_nodes"),
        ("-c 4", "cpus_per_task"),
        ("--output=/dev/null", "the script"),
        ("x", "not an sbatch option"),
        ("--a=b\nrm -rf /", "line break"),
        ("--hint=a --gres=gpu:1", "launcher.slurm.gres"),
        ('--hint=a "--gres=gpu:1"', "launcher.slurm.gres"),
        ("--hint='a", "can't be read"),
        ("", "empty"),
        ("--no-requeue", "recover.mode"),
        ("hetjob", "not an sbatch option"),
    ],
)
def test_further_arguments_may_not_contradict_the_plan(refusals, argument, words):
    refused = refusals(f"launcher.slurm.extra_args={json.dumps([argument])}")
    text = " ".join(refused)
    assert "launcher.slurm.extra_args" in text and words in text
