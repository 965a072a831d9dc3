"""Sections `cluster` and `launcher`: machines, scheduler, and the environment of the processes."""

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
    """How the processes of a trial find each other.

    Args:
        type: `nfs` is a directory on the shared file system; the only type that is supported.
        nfs_record_root: Directory of the records; empty means `names/` in the trial directory.
        etcd3_addr: Address of etcd; only the default is accepted, because hpc-rl uses no etcd.
        ray_actor_name: Name of a Ray actor; only the default is accepted, because hpc-rl uses no Ray.
    """

    type: Literal["nfs", "etcd3", "ray"] = "nfs"
    nfs_record_root: PathText = ""
    etcd3_addr: str = "localhost:2379"
    ray_actor_name: str = "ray_kv_store"


@dataclass(kw_only=True)
class ClusterSpecConfig:
    """The cluster that a trial runs on.

    Args:
        name_resolve: How the processes of a trial find each other.
        cluster_name: Profile to load before all other files: `cluster/<name>.yaml` in the site's directories,
            else one of configs/cluster. If no such profile exists, the value is only a label; `--cluster
            NAME` requires one.
        fileroot: Directory on a file system that all nodes share; trials are stored in
            `{fileroot}/{user}/{experiment}/{trial}`.
        n_nodes: Number of nodes.
        n_gpus_per_node: GPUs per node; with 0, allocation units are processes without a GPU.
        interface: Network interface that the roles publish, by name (`ib0`) or network (`10.1.0.0/16`); empty
            means the variable HPC_RL_INTERFACE of the job, else the route to the other nodes.
    """

    name_resolve: NameResolveConfig = field(default_factory=NameResolveConfig)
    cluster_name: str = "local"
    fileroot: PathText = "~/hpc-rl"
    n_nodes: NodeCount = 1
    n_gpus_per_node: UnitCount = 8
    interface: str = ""


@dataclass(kw_only=True)
class SlurmNodesConfig:
    """Which nodes a job requests, and for how long.

    Args:
        partition: Partition. For servers a preemptible one is safe: losing them only slows the trial down.
        account: Account to charge.
        qos: Quality of service.
        time: Time limit in Slurm's format: `24:00:00`, `2-12` (days-hours), or `'90'` in quotes (minutes).
        constraint: Node features.
        reservation: Reservation.
        nodelist: Nodes to use.
        exclude: Nodes to avoid.
        gpu_type: GPU type, such as `a100`.
        gres: Generic resources per node; if it names GPUs, it is what requests them.
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


@dataclass(kw_only=True)
class ServerJobsConfig(SlurmNodesConfig):
    """Slurm options of the server nodes (layouts `hetjob` and `jobs`); null means as in `launcher.slurm`.

    Args:
        max_running: Largest number of server nodes at once, in layout `jobs`; null means all of them.
        idle_s: Seconds without a running supervisor of the trial after which servers stop, in layout `jobs`.
            The next trainer job submits them again.
    """

    max_running: PositiveInt | None = None
    idle_s: PositiveInt = 900


@dataclass(kw_only=True)
class SlurmLauncherConfig(SlurmNodesConfig):
    """Slurm options. `null` omits an option; `derived` takes the number from the plan.

    Args:
        ntasks_per_node: `--ntasks-per-node`; null for sites that forbid it.
        cpus_per_task: CPUs per node; null for sites that allocate whole nodes.
        mem: Memory per node; `0` requests all of it; null for sites that forbid `--mem`.
        mem_per_cpu: Memory per CPU, instead of per node.
        mem_per_gpu: Memory per GPU, instead of per node.
        gpus_by: Option that requests the GPUs; null where Slurm does not manage GPUs (this requires whole
            nodes).
        exclusive: Whole nodes (true), or nodes not shared with other users (`user`), accounts (`mcs`) or
            switches (`topo`).
        tmp: Local disk space per node.
        switches: Largest number of leaf switches, and how long to wait for them, such as `1@60:00`.
        licenses: Licenses, such as `name:1`.
        wckey: Workload characterisation key.
        dependency: Jobs to wait for, such as `afterany:1234`.
        mail_type: Events to send mail for, such as `END,FAIL`.
        mail_user: Recipient of mail; null means the submitting user.
        comment: Comment of the job, appended to hpc-rl's own tag.
        extra_args: Further sbatch options, one per item, such as `--hint=nomultithread`.
        srun_additional_args: Further options of every role's srun, split as by a shell; variables are not
            expanded.
        container_type: Program that starts the images. A role without an image runs without a container; the
            supervisor always does. `pyxis` needs Slurm.
        mount: Further binds of the containers: `source:target`, separated by commas. The trial directory, the
            working directory, models and datasets are always bound, each at its own path.
        trainer_image: Container image of the trainer, a path that all nodes see; null means no container.
        rollout_image: Container image of the rollout role; null means the trainer's, `none` no container.
        inference_server_image: Container image of the generation servers; null means no container.
        trainer_image_python: Python interpreter in `trainer_image`.
        rollout_image_python: Python interpreter in the rollout role's image.
        inference_server_image_python: Python interpreter in `inference_server_image`; SGLang uses it too,
            unless `launcher.inference_server_python` names another.
        container_program: Program for `container_type: apptainer`: a name or a path; `singularity` works too.
        container_args: Further options of `apptainer exec`, or `--container-…` options of pyxis, one per
            item.
        layout: Jobs of a trial. `allocation`: one job for all roles. `hetjob`: one heterogeneous job, with
            the server nodes as a second component. `jobs`: a trainer job and a job array of server nodes,
            which may be preempted and may join and leave at any time.
        servers: Options that differ for the server nodes, in the layouts `hetjob` and `jobs`.
        continue_by: How a job that stopped with its state saved resumes. `requeue`: `scontrol requeue`, or a
            successor job if Slurm refuses; `successor`: always a new job that depends on this one
            (`--no-requeue`).
        backend: How jobs are submitted: by `sbatch`, or by `submitit` (needs the extra of that name).
    """

    ntasks_per_node: Literal[1] | None = 1
    cpus_per_task: SlurmCountOrDerived | None = "derived"
    mem: SlurmMemoryOrDerived | None = "derived"
    mem_per_cpu: SlurmMemory | None = None
    mem_per_gpu: SlurmMemory | None = None
    gpus_by: Literal["gpus-per-node", "gres"] | None = "gpus-per-node"
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
    """Scripts that run at fixed moments of every attempt.

    They run after those in the site's `hooks.d`. A script is a path or inline text (several lines, or one
    that begins with `#!`); a copy is submitted.

    Args:
        dir: Directory with scripts that are named after the moments below.
        pre_job: Runs on the first node before anything else; a failure ends the job.
        pre_node: Runs on every node after pre_job; a failure on any node ends the job and names the node.
        post_node: Runs on every node after the supervisor has stopped.
        post_job: Runs on the first node, last of all.
        on_preempt: Runs on the first node as soon as Slurm asks the job to stop (preemption, time limit),
            while the state is being saved.
        timeout_s: Time limit of each script in seconds; a script that exceeds it counts as failed.
        on_preempt_timeout_s: Time limit of on_preempt in seconds; Slurm kills the job soon after.
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
        type: `auto` uses Slurm if `sbatch` is on the PATH, else this machine.
        python: Python interpreter of the supervisor and of roles without a container; null means the one that
            submits.
        inference_server_python: Python interpreter of SGLang, which has an environment of its own; null means
            that of its role.
        templates_dir: Directory of templates that take precedence over the site's and the packaged ones;
            empty means none.
        inference_server_cpus_per_gpu: CPUs per unit of the generation servers.
        inference_server_mem_per_gpu: Memory per unit of the generation servers, in MB.
        trainer_cpus_per_gpu: CPUs per trainer rank.
        trainer_mem_per_gpu: Memory per trainer rank, in MB.
        rollout_cpus: CPUs of the rollout role.
        rollout_mem_mb: Memory of the rollout role, in MB.
        inference_server_env_vars: Environment variables of the generation servers: a mapping, or `A=b,C=d`.
        trainer_env_vars: Environment variables of the trainer ranks: a mapping, or `A=b,C=d`.
        hooks: Scripts that run at fixed moments of every attempt.
        slurm: Slurm options.
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
    """Return the variables of a mapping, or of `A=b,C=d` if no value contains a comma. Raises ConfigError."""
    pairs = (
        value
        if isinstance(value, dict)
        else dict(_pair(option, part) for part in value.split(",") if part.strip())
    )
    for name in pairs:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ConfigError(
                f"{option}: {name!r} is not a valid name of an environment variable; use letters, digits, _."
            )
    return dict(pairs)


def _pair(option: str, part: str) -> tuple[str, str]:
    name, equals, value = part.partition("=")
    if not equals:
        raise ConfigError(f"{option}: {part!r} is not NAME=value; use a mapping if a value contains a comma.")
    return name.strip(), value
