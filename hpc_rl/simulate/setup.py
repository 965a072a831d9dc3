"""The inputs of a simulation besides costs: what a configuration and its plan ask for, and faults."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, replace

from hpc_rl.config.options.experiment import GRPOConfig, find_last_step
from hpc_rl.config.options.operations import FrequencyConfig
from hpc_rl.config.pool_view import find_trained_pool
from hpc_rl.core.errors import ConfigError
from hpc_rl.core.refusal import Kind, Refusal
from hpc_rl.core.slurm_time import parse_time_limit
from hpc_rl.plan.schema import Plan, Unit, list_server_tasks
from hpc_rl.rollout.sequencer import Rules, make_rules

DEFAULT_STEPS = 200  # if the configuration does not tell
MAX_SEQUENCES = 1_000_000  # of a simulation: more are thinned out
MIN_PROMPTS = 64  # of a simulated batch
MAX_SERVERS = 64  # simulated: more are identical


@dataclass(frozen=True, kw_only=True)
class Setup:
    """One trial to simulate."""

    rules: Rules  # of the sequencer
    n_samples: int  # sequences of a prompt
    max_new_tokens: int
    total_steps: int
    units: tuple[Unit, ...]
    n_nodes: int
    n_gpus_per_node: int = 0
    shares_gpus: bool = False
    update_mode: str = "disk"
    recover_mode: str = "auto"
    recover_retries: int = 3
    save: FrequencyConfig = field(default_factory=FrequencyConfig)
    async_save: bool = False
    evaluate: FrequencyConfig = field(default_factory=FrequencyConfig)
    evaluates: bool = False  # has held-out data
    evaluates_blocking: bool = False
    server_share: float = 0.25  # lent to an evaluation beside training
    keep: int = 2  # newest checkpoints
    steps_per_epoch: float | None = None  # if the number of rows is known
    time_limit_s: float | None = None  # of a job
    layout: str = "allocation"  # hetjob starts, fails and ends as allocation does
    server_time_limit_s: float | None = None  # of a server job of layout jobs
    max_sequences: int = MAX_SEQUENCES  # to simulate

    @property
    def num_servers(self) -> int:
        return sum(unit.role == "server" for unit in self.units)

    @property
    def trainer(self) -> Unit:
        return next(unit for unit in self.units if unit.role == "trainer")

    @property
    def ranks(self) -> int:
        return self.trainer.num_tasks

    def count_devices(self, role: str) -> int:
        """Return the GPUs of a role, or its processes if there are no GPUs."""
        return sum(unit.num_tasks * max(1, unit.gpus_per_task) for unit in self.units if unit.role == role)

    @property
    def server_nodes(self) -> int:
        return len({node for unit in self.units if unit.role == "server" for node in unit.nodes})

    def list_server_tasks(self) -> list[list[int]]:
        """Return the nodes of each server job of layout `jobs`; other layouts have none."""
        return list_server_tasks(self.units) if self.layout == "jobs" else []

    def list_job_units(self) -> list[tuple[Unit, list[int]]]:
        """Return the units of the trainer's job, each with the places of its nodes in that job."""
        apart = {node for nodes in self.list_server_tasks() for node in nodes}
        all_nodes = sorted({node for unit in self.units for node in unit.nodes} | {*range(self.n_nodes)})
        place = {node: number for number, node in enumerate(node for node in all_nodes if node not in apart)}
        units = (unit for unit in self.units if apart.isdisjoint(unit.nodes))
        return [(unit, [place[node] for node in unit.nodes]) for unit in units]

    @property
    def num_job_nodes(self) -> int:
        """Nodes of the trainer's job: all but those of the server jobs."""
        return self.n_nodes - sum(map(len, self.list_server_tasks()))

    @property
    def num_unused(self) -> int:
        """GPUs without a process."""
        used = self.count_devices("trainer") + (0 if self.shares_gpus else self.count_devices("server"))
        return max(0, self.n_nodes * self.n_gpus_per_node - used)

    def choose_weight(self) -> float:
        """Return how many real servers a simulated one stands for; batches shrink as much.

        1 for small trials. Otherwise identical servers are merged, so that a simulated batch still has
        MIN_PROMPTS prompts, and the simulation ends soon.
        """
        sequences = self.rules.batch_size * self.n_samples * self.total_steps
        wanted = max(sequences / self.max_sequences, self.num_servers / MAX_SERVERS, 1.0)
        most = max(1.0, self.rules.batch_size / MIN_PROMPTS)
        number = max(1, round(self.num_servers / min(wanted, most)))
        return self.num_servers / number


@dataclass(frozen=True, kw_only=True)
class Kill:
    """A kill -9 at a time after the first start of the job: of a role's first unit, or of the whole job."""

    at_s: float
    role: str  # trainer, server, rollout or job


@dataclass(frozen=True, kw_only=True)
class Faults:
    """What a cluster does to a job. The defaults do nothing."""

    mtbf_s: float = math.inf  # mean time between failures of one node
    repair_s: float = 4 * 3600.0
    spare_nodes: int | None = None  # of the partition, beyond the job's; None: always enough
    notice_s: float = 300.0  # until Slurm gives up a silent node (SlurmdTimeout)
    queue_s: float = 0.0  # mean wait of a new job
    requeue_s: float = 120.0  # mean wait of a requeued one (BeginTime)
    preempt_every_s: float = math.inf  # mean time until a running job is preempted
    preempt_grace_s: float = 120.0
    purge_every_s: float = math.inf  # mean time until a purge or a disk removes the newest checkpoint
    kills: tuple[Kill, ...] = ()


def make_setup(config: GRPOConfig, plan: Plan, num_rows: int | None = None) -> Setup:
    """Return the trial of a checked configuration and its plan.

    Raises ConfigError for a trial without servers or trainer.
    """
    pool = find_trained_pool(config)
    units = tuple(unit for unit in plan.units if unit.role != "server" or unit.pool in ("", pool))
    roles = Counter(unit.role for unit in units)
    if not roles["trainer"] or not roles["server"]:
        why = f"plans no {'generation servers' if roles['trainer'] else 'trainer'}"
        use = "simulate a grpo configuration"
        raise ConfigError(Refusal(option="allocation_mode", kind=Kind.CONFLICT, why=why, use=use))
    limit = config.launcher.slurm.time
    server_limit = config.launcher.slurm.servers.time or limit
    return Setup(
        rules=replace(make_rules(config), batch_sequences=None, own_prompts=True),
        n_samples=config.gconfig.n_samples,
        max_new_tokens=config.gconfig.max_new_tokens,
        total_steps=find_last_step(config, num_rows) or DEFAULT_STEPS,
        units=units,
        n_nodes=plan.n_nodes,
        n_gpus_per_node=plan.n_gpus_per_node,
        shares_gpus=plan.shares_gpus,
        update_mode=config.actor.weight_update_mode,
        recover_mode=config.recover.mode,
        recover_retries=config.recover.retries,
        save=config.recover,
        async_save=config.recover.async_save,
        keep=config.recover.keep,
        steps_per_epoch=num_rows / config.train_dataset.batch_size if num_rows else None,
        evaluate=config.evaluator,
        evaluates=config.valid_dataset is not None,
        evaluates_blocking=config.evaluator.blocking,
        server_share=config.evaluator.server_share,
        time_limit_s=parse_time_limit(limit) if limit else None,
        layout=plan.layout,
        server_time_limit_s=parse_time_limit(server_limit) if server_limit else None,
    )
