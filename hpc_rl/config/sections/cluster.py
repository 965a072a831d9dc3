"""Sections `cluster` and `launcher`: which machines, which scheduler, with what around the processes."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from hpc_rl.config.sections.limits import (
    Executable,
    GpuType,
    NodeCount,
    PathText,
    PositiveInt,
    ScriptOrPath,
    SlurmCountOrDerived,
    SlurmMemory,
    SlurmMemoryOrDerived,
    SlurmTime,
    UnitCount,
)
from hpc_rl.errors import ConfigError


@dataclass(kw_only=True)
class NameResolveConfig:
    """How the roles find each other.

    Args:
        type: `nfs` is a directory on the shared file system; the only kind that spans processes.
        nfs_record_root: Where records lie; empty means `names/` in the trial directory.
        etcd3_addr: Address of etcd, which is never needed here.
        ray_actor_name: Actor of Ray, which is never needed here.
    """

    type: Literal["nfs", "etcd3", "ray"] = "nfs"
    nfs_record_root: PathText = ""
    etcd3_addr: str = "localhost:2379"
    ray_actor_name: str = "ray_kv_store"


@dataclass(kw_only=True)
class ClusterSpecConfig:
    """The machines of a trial.

    Args:
        name_resolve: How the roles find each other.
        cluster_name: A profile of this name is loaded before every other file; without one it is only a name. It is looked for
            as `cluster/<name>.yaml` in the site's directories, then among those of configs/cluster; `--cluster NAME` insists.
        fileroot: Directory on a file system that every node shares; trials live in `{fileroot}/{user}/{experiment}/{trial}`.
        n_nodes: Number of nodes.
        n_gpus_per_node: GPUs per node; 0 means that allocation units are processes without a GPU.
        interface: Network interface that the roles publish, by name (`ib0`) or network (`10.1.0.0/16`); empty means that of
            the environment variable HPC_RL_INTERFACE of the job, else the one on the route to the other nodes.
    """

    name_resolve: NameResolveConfig = field(default_factory=NameResolveConfig)
    cluster_name: str = "local"
    fileroot: PathText = "~/hpc-rl"
    n_nodes: NodeCount = 1
    n_gpus_per_node: UnitCount = 8
    interface: str = ""


@dataclass(kw_only=True)
class ServerJobsConfig:
    """What is asked of Slurm for the nodes of the generation servers, in the layouts that ask for them apart.

    Where it is null, an option is as `launcher.slurm` has it.

    Args:
        partition: Partition; a preemptible one costs the trial nothing but speed.
        account: Account to charge.
        qos: Quality of service.
        time: Time limit of each server node, in Slurm's grammar.
        constraint: Node features.
        reservation: Reservation.
        nodelist: Nodes to use.
        exclude: Nodes to avoid.
        gpu_type: Type of GPU.
        gres: Generic resources per node.
        max_running: At most so many server nodes at once, in layout `jobs`; null means all of them.
        idle_s: Servers end after so many seconds in which no supervisor of their trial ran, in layout `jobs`: they hold their
            nodes for nothing. A trainer job that starts later submits them again.
    """

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time: SlurmTime | None = None
    constraint: str | None = None
    reservation: str | None = None
    nodelist: str | None = None
    exclude: str | None = None
    gpu_type: GpuType | None = None
    gres: str | None = None
    max_running: PositiveInt | None = None
    idle_s: PositiveInt = 900


@dataclass(kw_only=True)
class SlurmLauncherConfig:
    """What is asked of Slurm. `null` means that the option is not emitted; `derived` that the plan says the number.

    Args:
        partition: Partition.
        account: Account to charge.
        qos: Quality of service.
        time: Time limit in Slurm's grammar (`24:00:00`, `2-12`, `90` in quotes is minutes).
        constraint: Node features.
        reservation: Reservation.
        nodelist: Nodes to use.
        exclude: Nodes to avoid.
        ntasks_per_node: `--ntasks-per-node`; null where a site forbids it.
        cpus_per_task: CPUs per node; null where whole nodes are given.
        mem: Memory per node; `0` asks for all of it; null where a site forbids `--mem`.
        mem_per_cpu: Memory per CPU instead of per node.
        mem_per_gpu: Memory per GPU instead of per node.
        gpus_by: Option that asks for the plan's GPUs; null where Slurm does not know the GPUs (whole nodes are needed then).
        gpu_type: Type of GPU, as `a100`.
        gres: Generic resources per node; where it names GPUs it is what asks for them.
        exclusive: Whole nodes (true), or not shared with other users' jobs (`user`), accounts (`mcs`), switches (`topo`).
        tmp: Local disk per node.
        switches: Most leaf switches and how long to wait for them, as `1@60:00`.
        licenses: Licenses, as `name:1`.
        wckey: Workload characterisation key.
        dependency: Jobs to wait for, as `afterany:1234`.
        mail_type: When to send mail, as `END,FAIL`.
        mail_user: Whom to send it to; null means the account.
        comment: Comment of the job, after our own tag.
        extra_args: Further sbatch options, one per item (`--hint=nomultithread`).
        srun_additional_args: Further options of the srun of every role, as a shell would split them; variables are not expanded.
        container_type: What images are started with; without an image a role runs without a container. Also with
            `launcher.type local`, but for pyxis, which is a part of srun. The supervisor never runs in one.
        mount: Further binds of the containers, `source:target` separated by commas. The trial, the working directory, models
            and datasets are bound anyway, each at its own path.
        trainer_image: Container image of the trainer, a path that every node sees; null means none.
        rollout_image: Container image of the rollout role; null means that of the trainer, `none` none.
        inference_server_image: Container image of the generation servers; null means none.
        trainer_image_python: Interpreter within `trainer_image`.
        rollout_image_python: Interpreter within the rollout role's image.
        inference_server_image_python: Interpreter within `inference_server_image`; SGLang has the same one unless
            `launcher.inference_server_python` names another.
        container_program: What `container_type apptainer` starts; a path, or `singularity`, works too.
        container_args: Further options of `apptainer exec` (or of pyxis, `--container-…`), one per item, as they stand.
        layout: How the trial is laid out as jobs. `allocation`: one job, every role in it. `hetjob`: one heterogeneous job, the
            nodes of the servers as a component of their own. `jobs`: a trainer job and an array of server nodes, which may be
            preempted, may come and may go.
        servers: What is different for the nodes of the servers, in the layouts `hetjob` and `jobs`.
        continue_by: How a job that stopped with its state saved goes on. `requeue`: by `scontrol requeue`, and where Slurm
            refuses that by a successor; `successor`: always by a new job that depends on the end of this one (`--no-requeue`).
        backend: Who calls sbatch: we ourselves (`sbatch`), or `submitit` (the extra of that name), with the same script inside.
    """

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time: SlurmTime | None = None
    constraint: str | None = None
    reservation: str | None = None
    nodelist: str | None = None
    exclude: str | None = None
    ntasks_per_node: Literal[1] | None = 1
    cpus_per_task: SlurmCountOrDerived | None = "derived"
    mem: SlurmMemoryOrDerived | None = "derived"
    mem_per_cpu: SlurmMemory | None = None
    mem_per_gpu: SlurmMemory | None = None
    gpus_by: Literal["gpus-per-node", "gres"] | None = "gpus-per-node"
    gpu_type: GpuType | None = None
    gres: str | None = None
    exclusive: bool | Literal["user", "mcs", "topo"] | None = None
    tmp: SlurmMemory | None = None
    switches: str | None = None
    licenses: str | None = None
    wckey: str | None = None
    dependency: str | None = None
    mail_type: str | None = None
    mail_user: str | None = None
    comment: str | None = None
    extra_args: list[str] = field(default_factory=list)
    srun_additional_args: str = ""
    container_type: Literal["apptainer", "pyxis", "none"] = "apptainer"
    mount: str = ""
    trainer_image: PathText | None = None
    rollout_image: Executable | None = None
    inference_server_image: PathText | None = None
    trainer_image_python: Executable = "python3"
    rollout_image_python: Executable = "python3"
    inference_server_image_python: Executable = "python3"
    container_program: Executable = "apptainer"
    container_args: list[str] = field(default_factory=list)
    layout: Literal["allocation", "hetjob", "jobs"] = "allocation"
    servers: ServerJobsConfig = field(default_factory=ServerJobsConfig)
    continue_by: Literal["requeue", "successor"] = "requeue"
    backend: Literal["sbatch", "submitit"] = "sbatch"


@dataclass(kw_only=True)
class HooksConfig:
    """Scripts that run at moments of every attempt, after those of the site's `hooks.d`. A script is a path, or a text of
    several lines (or one that begins with `#!`); what is submitted is a copy.

    Args:
        dir: Directory with scripts that are called as the moments are.
        pre_job: On the first node, before anything else; its failure ends the job.
        pre_node: On every node, after pre_job; its failure on any node ends the job, naming the node.
        post_node: On every node, after the supervisor has ended.
        post_job: On the first node, at the very end.
        on_preempt: On the first node, as soon as the job is told to end (preemption, time limit), while the state is saved.
        timeout_s: Time limit of each script in seconds; one that takes longer counts as failed.
        on_preempt_timeout_s: Time limit of on_preempt in seconds; Slurm kills what is left soon after.
    """

    dir: PathText = ""
    pre_job: ScriptOrPath | None = None
    pre_node: ScriptOrPath | None = None
    post_node: ScriptOrPath | None = None
    post_job: ScriptOrPath | None = None
    on_preempt: ScriptOrPath | None = None
    timeout_s: PositiveInt = 300
    on_preempt_timeout_s: PositiveInt = 20


@dataclass(kw_only=True)
class LauncherConfig:
    """How processes are started.

    Args:
        type: `auto` takes Slurm where `sbatch` is on the PATH, else this machine.
        python: Interpreter of the supervisor, and of the roles that have no container; null means the one that submits.
        inference_server_python: Interpreter of SGLang, which lives in an environment of its own; null means that of its role.
        templates_dir: Directory searched for templates before the site's and ours; empty means none.
        inference_server_cpus_per_gpu: CPUs per unit of the generation servers.
        inference_server_mem_per_gpu: Memory per unit of the generation servers, in MB.
        trainer_cpus_per_gpu: CPUs per trainer rank.
        trainer_mem_per_gpu: Memory per trainer rank, in MB.
        rollout_cpus: CPUs of the rollout role (sequencer and executor workers).
        rollout_mem_mb: Memory of the rollout role, in MB.
        inference_server_env_vars: Environment of the generation servers: a mapping, or `A=b,C=d`.
        trainer_env_vars: Environment of the trainer ranks: a mapping, or `A=b,C=d`.
        hooks: Scripts of the site and of the trial around every attempt.
        slurm: What is asked of Slurm.
    """

    type: Literal["auto", "slurm", "local"] = "auto"
    python: Executable | None = None
    inference_server_python: Executable | None = None
    templates_dir: PathText = ""
    inference_server_cpus_per_gpu: PositiveInt = 4
    inference_server_mem_per_gpu: PositiveInt = 32768
    trainer_cpus_per_gpu: PositiveInt = 4
    trainer_mem_per_gpu: PositiveInt = 32768
    rollout_cpus: PositiveInt = 4
    rollout_mem_mb: PositiveInt = 16384
    inference_server_env_vars: dict[str, str] | str = ""
    trainer_env_vars: dict[str, str] | str = ""
    hooks: HooksConfig = field(default_factory=HooksConfig)
    slurm: SlurmLauncherConfig = field(default_factory=SlurmLauncherConfig)


def environment_of(option: str, value: dict[str, str] | str) -> dict[str, str]:
    """Environment variables of a mapping, or of `A=b,C=d` where no value holds a comma. Raises ConfigError."""
    pairs = (
        value
        if isinstance(value, dict)
        else dict(_pair(option, part) for part in value.split(",") if part.strip())
    )
    for name in pairs:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ConfigError(
                f"{option}: {name!r} is no name of an environment variable: letters, digits and _ only."
            )
    return dict(pairs)


def _pair(option: str, part: str) -> tuple[str, str]:
    name, equals, value = part.partition("=")
    if not equals:
        raise ConfigError(
            f"{option}: {part!r} is no NAME=value; write a mapping where a value holds a comma."
        )
    return name.strip(), value
