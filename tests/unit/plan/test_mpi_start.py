"""When MPI starts the trainer, and when it can't."""

import pytest

from hpc_rl.config.load.load import load
from hpc_rl.config.rules.check import check
from hpc_rl.core.errors import ConfigError, DoesNotFit
from hpc_rl.plan.plan import make_plan
from hpc_rl.plan.schema import MpiStart, Plan

BASE = ["experiment_name=e", "trial_name=t", "actor.path=/m", "train_dataset.path=/d", "launcher.type=slurm"]
BASE += ["train_dataset.batch_size=8", "gconfig.n_samples=8", "actor.ppo_n_minibatches=1"]
BY_MPIEXEC = "launcher.trainer_start=mpiexec"


def plan_trial(*options: str, scheduler: str = "slurm") -> Plan:
    loaded = check(load([], [*BASE, "cluster.n_gpus_per_node=0", *options]), files=False)
    return make_plan(loaded.config, loaded.explicit, interpreter="python", scheduler=scheduler)


def list_starts(*options: str, scheduler: str = "slurm") -> dict[str, MpiStart | None]:
    return {unit.role: unit.mpi for unit in plan_trial(*options, scheduler=scheduler).units}


def test_only_the_trainer_is_started_by_mpi():
    assert set(list_starts().values()) == {None}
    found = list_starts(BY_MPIEXEC, "launcher.mpi.mpiexec=/opt/mpiexec", "launcher.mpi.args=[--mca,btl,tcp]")
    assert found["trainer"] == MpiStart(mpiexec="/opt/mpiexec", args=["--mca", "btl", "tcp"])
    assert found["server"] is None and found["rollout"] is None
    assert list_starts("launcher.slurm.srun_mpi=pmix")["trainer"] == MpiStart(srun_mpi="pmix")
    assert (
        list_starts("launcher.slurm.srun_mpi=pmix", "launcher.type=auto", scheduler="local")["trainer"]
        is None
    )


def test_a_stored_plan_keeps_it():
    made = plan_trial(BY_MPIEXEC)
    assert Plan.from_json(made.to_json()) == made


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([BY_MPIEXEC, "launcher.slurm.trainer_image=/i.sif"], "use trainer_start srun"),
        ([BY_MPIEXEC, "launcher.slurm.layout=hetjob"], "use layout allocation or jobs"),
        ([BY_MPIEXEC, "launcher.slurm.srun_mpi=pmix"], "srun_mpi pmix has no effect"),
        (["launcher.mpi.mpiexec=/m"], "launcher.mpi.mpiexec has no effect with launcher.trainer_start srun"),
        (["launcher.slurm.srun_mpi=pmix", "launcher.type=local"], "launcher.type local: it needs srun"),
        (["launcher.slurm.srun_mpi=pmix", "launcher.slurm.srun_additional_args=--mpi=pmi2"], "remove one"),
        ([BY_MPIEXEC, "launcher.mpi.args=[-n,'4']"], "-n can't be given, because the trial sets it"),
        ([BY_MPIEXEC, "launcher.mpi.args=['--host=a']"], "--host can't be given, because the trial sets it"),
        ([BY_MPIEXEC, 'launcher.mpi.args=["a\\nb"]'], "control character"),
    ],
)  # fmt: skip
def test_what_can_not_work_is_refused_in_words(options, words):
    with pytest.raises(ConfigError) as caught:
        plan_trial(*options)
    assert words in str(caught.value)


def test_gpus_that_srun_would_divide_are_refused():
    shared = [BY_MPIEXEC, "cluster.n_gpus_per_node=8", "allocation_mode=sglang:d4+fsdp:d4"]
    with pytest.raises(DoesNotFit, match="node 0 has GPUs of the trainer and of servers") as caught:
        plan_trial(*shared)
    assert "launcher.slurm.gpus_by" in caught.value.refusals[0].options
    assert plan_trial(*shared, "launcher.slurm.gpus_by=null", "launcher.slurm.exclusive=true")
    assert plan_trial(*shared[:2], "cluster.n_nodes=2", "allocation_mode=sglang:d8+fsdp:d8")
    assert plan_trial(*shared, "launcher.type=auto", scheduler="local"), "there the units get theirs by name"
