"""What `hpc-rl run` makes of a configuration and of the job that it is typed in."""

import pytest

from hpc_rl.core.errors import DoesNotFit
from hpc_rl.trials.checklist import Planned
from hpc_rl.trials.prepare import ConfigSources, plan_for_job
from hpc_rl.trials.surrounding_job import JobNode, SurroundingJob

LARGE = {"cpus": 64, "mem_mb": 256000, "gpus": 0}
JOB = SurroundingJob("7", (JobNode("n1", **LARGE), JobNode("n2", cpus=1, mem_mb=1, gpus=0)))


def planned(config, *argv: str, preset: tuple[str, ...] = ()) -> Planned:
    overrides = [*([] if preset else ["launcher.type=slurm"]), *argv]
    return plan_for_job(ConfigSources("run", [str(config)], overrides, preset, None), JOB)


def test_a_plan_for_fewer_nodes_need_only_fit_the_first_ones(config):
    assert planned(config, "cluster.n_nodes=1").plan.n_nodes == 1
    assert planned(config, "cluster.n_nodes=1", preset=("cpu",)).loaded.config.launcher.type == "slurm"
    with pytest.raises(DoesNotFit, match="CPUs"):
        planned(config, "allocation_mode=embedded:d1+fsdp:d2", "actor.ppo_n_minibatches=1")


def test_options_that_only_sbatch_would_use_are_named(config):
    given = (
        "launcher.slurm.time=1:00:00",
        "launcher.slurm.partition=p",
        "launcher.slurm.container_type=none",
    )
    notes = planned(config, "cluster.n_nodes=1", *given).loaded.notes
    assert any(note.endswith(": launcher.slurm.partition, launcher.slurm.time.") for note in map(str, notes))
    assert "launcher.slurm." not in "".join(map(str, planned(config, "cluster.n_nodes=1").loaded.notes))
