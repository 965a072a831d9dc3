"""A small plan, for what reads a plan and starts nothing that it names."""

from typing import Any

from hpc_rl.plan.schema import Plan, Pool, Unit


def toy_plan(units: list[Unit], python: str, **more: Any) -> Plan:
    """Return the plan of a GRPO trial on one node without GPUs; `more` replaces any field."""
    fields: dict[str, Any] = {
        "experiment_name": "e",
        "trial_name": "t",
        "trainer": "grpo",
        "allocation": "embedded:d1+fsdp:d1",
        "n_nodes": 1,
        "n_gpus_per_node": 0,
        "cpus_per_node": 4,
        "mem_mb_per_node": 1000,
        "device": "cpu",
        "pools": [Pool(name="rollout", backend="embedded")],
        "recover_mode": "auto",
        "recover_retries": 3,
    }
    return Plan(units=units, python=python, **{**fields, **more})


def sft_plan(units: list[Unit], python: str, **more: Any) -> Plan:
    """Return the plan of an SFT trial exp/one on one node without GPUs; `more` replaces any field."""
    fields: dict[str, Any] = {
        "experiment_name": "exp",
        "trial_name": "one",
        "trainer": "sft",
        "allocation": "fsdp:d1",
        "cpus_per_node": 2,
        "mem_mb_per_node": 500,
        "pools": [],
    }
    return toy_plan(units, python, **{**fields, **more})


def toy_unit(role: str = "trainer", **more: Any) -> Unit:
    """Return a unit of one process with one CPU on the first node; `more` replaces any field."""
    size = {"nodes": [0], "tasks_per_node": 1, "cpus_per_task": 1, "mem_mb_per_task": 1, "gpus_per_task": 0}
    return Unit(role=role, **{"index": 0, "module": "m", **size, **more})
