"""The nodes and units of a trial's environments. Pure."""

from dataclasses import replace

from hpc_rl.config.sections.experiment import Config, GRPOConfig
from hpc_rl.errors import DoesNotFit
from hpc_rl.plan.schema import Unit


def without_environment_nodes(config: Config) -> Config:
    """Return the configuration with the nodes that servers and trainer share. Raises DoesNotFit for none."""
    if not isinstance(config, GRPOConfig) or config.environments is None or not config.environments.n_nodes:
        return config
    own, n_nodes = config.environments.n_nodes, config.cluster.n_nodes
    if own >= n_nodes:
        raise DoesNotFit(
            f"environments.n_nodes {own} leaves none of {n_nodes} node(s) to servers and trainer; "
            f"use cluster.n_nodes {own + 1} or more, or fewer nodes for environments."
        )
    return replace(config, cluster=replace(config.cluster, n_nodes=n_nodes - own))


def environment_units(config: Config) -> list[Unit]:
    """Return a unit for each command, spread over the nodes for environments."""
    section = config.environments if isinstance(config, GRPOConfig) else None
    if section is None:
        return []
    last = config.cluster.n_nodes
    nodes = list(range(last - section.n_nodes, last)) or [0]
    return [
        Unit(
            role="environment",
            index=index,
            nodes=[nodes[index % len(nodes)]],
            tasks_per_node=1,
            cpus_per_task=section.cpus,
            mem_mb_per_task=section.mem_mb,
            gpus_per_task=0,
            module="hpc_rl.app.environment_role",
        )
        for index in range(len(section.commands))
    ]
