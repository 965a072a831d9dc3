"""Options of launcher.slurm that contradict each other or the plan are refused before sbatch runs."""

import json

import pytest

from hpc_rl.config.load.load import load
from hpc_rl.config.rules import consistency, slurm_rules
from hpc_rl.core.refusal import Kind, Refusal


@pytest.fixture
def refusals(tmp_path):
    (tmp_path / "sft.yaml").write_text(
        "experiment_name: e\ntrial_name: t\nmodel: {path: /m}\ntrain_dataset: {path: /d, type: sft}\n"
    )

    rules = [*slurm_rules.RULES, *consistency.RULES]

    def ask(*options: str) -> list[Refusal]:
        loaded = load([tmp_path / "sft.yaml"], options)
        return [refusal for rule in rules for refusal in rule(loaded.config, loaded.explicit)]

    return ask


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            ["mem=10G", "mem_per_cpu=1G"],
            "launcher.slurm.mem can't be used together with launcher.slurm.mem_per_cpu",
        ),
        (["mem_per_gpu=10G", "mem_per_cpu=1G"], "can't be used together with"),
        (["mem_per_cpu=1G", "cpus_per_task=null"], "can't be used with launcher.slurm.cpus_per_task null"),
        (["gres=gpu:8", "gpus_by=gres"], "Remove one"),
        (["gres=gpu:8", "gpu_type=h100"], "Remove one"),
        (["gres=gpu:a100:4"], "requests 4 GPUs per node, but cluster.n_gpus_per_node is 8"),
        (["gres=gpu"], "requests 1 GPUs"),
        (["gpu_type=h100", "gpus_by=null"], "gpu_type has no effect"),
        (["mail_user=a@b.org"], "mail_user has no effect without launcher.slurm.mail_type"),
        (["partition=''"], "write null"),
        (["constraint='a\u2028b'"], "line break"),
    ],
)
def test_contradictions_are_refused(refusals, options, words):
    [refusal, *_] = refusals(*(f"launcher.slurm.{option}" for option in options))
    assert words in str(refusal) and refusal.option.startswith("launcher.slurm.")


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
    for wrong, words in (
        ("-n4", "the trial sets it"),
        ("cores", "not an option"),
        ("--x=$HOME", "not replaced"),
    ):
        [refusal] = refusals(f"{name}={json.dumps([wrong])}")
        assert (refusal.option, refusal.kind) == (name, Kind.VALUE) and words in refusal.why


def test_memory_per_gpu_needs_gpus(refusals):
    [refusal, *_] = refusals("launcher.slurm.mem_per_gpu=4G", "cluster.n_gpus_per_node=0")
    assert (refusal.option, refusal.kind) == ("launcher.slurm.mem_per_gpu", Kind.CONFLICT)
    assert refusal.related == ("cluster.n_gpus_per_node",)


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("--mem=4G", "launcher.slurm.mem"),
        ("-N4", "cluster.n_nodes"),
        ("-c 4", "cpus_per_task"),
        ("--output=/dev/null", "the job script sets"),
        ("x", "is not an option"),
        ("--a=b\nrm -rf /", "line break"),
        ("--hint=a --gres=gpu:1", "launcher.slurm.gres"),
        ('--hint=a "--gres=gpu:1"', "launcher.slurm.gres"),
        ("--hint='a", "can't be split"),
        ("", "empty"),
        ("--no-requeue", "recover.mode"),
        ("hetjob", "is not an option"),
    ],
)
def test_further_arguments_may_not_contradict_the_plan(refusals, argument, words):
    refused = refusals(f"launcher.slurm.extra_args={json.dumps([argument])}")
    assert {(one.option, one.kind) for one in refused} == {("launcher.slurm.extra_args", Kind.VALUE)}
    assert words in " ".join(map(str, refused))


@pytest.mark.parametrize(
    ("options", "text", "kind", "related"),
    [
        (
            ["launcher.slurm.mem=10G", "launcher.slurm.mem_per_cpu=1G"],
            "launcher.slurm.mem can't be used together with launcher.slurm.mem_per_cpu: "
            "sbatch takes one of them; keep one.",
            Kind.CONFLICT,
            {"launcher.slurm.mem_per_cpu"},
        ),
        (
            ["launcher.slurm.gpu_type=h100", "launcher.slurm.gpus_by=null"],
            "launcher.slurm.gpu_type has no effect, because launcher.slurm.gpus_by null "
            "requests no GPUs; remove one of the two.",
            Kind.NO_EFFECT,
            {"launcher.slurm.gpus_by"},
        ),
        (
            ["launcher.slurm.extra_args=[--array=1-3]"],
            "launcher.slurm.extra_args: --array can't be given: it is derived from cluster, allocation_mode "
            "and the resources in launcher.",
            Kind.VALUE,
            {"cluster", "allocation_mode", "launcher"},
        ),
        (
            ["launcher.slurm.layout=jobs"],
            "launcher.slurm.layout jobs needs servers, but trainer sft has none; use allocation.",
            Kind.CONFLICT,
            {"trainer"},
        ),
    ],
)
def test_a_refusal_names_all_options_that_it_depends_on(refusals, options, text, kind, related):
    [refusal] = refusals(*options)
    assert (str(refusal), refusal.kind, {*refusal.related}) == (text, kind, related)
