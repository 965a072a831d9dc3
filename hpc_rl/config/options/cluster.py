"""Sections `cluster` and `launcher`: machines, scheduler, and the environment of the processes."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from hpc_rl.config.options.limits import (
    Executable,
    GpuType,
    ModuleName,
    NodeCount,
    NodePath,
    NonNegativeInt,
    PathText,
    PositiveInt,
    ScriptOrPath,
    SlurmCountOrDerived,
    SlurmMemory,
    SlurmMemoryOrDerived,
    SlurmTime,
    Umask,
    UnitCount,
)
from hpc_rl.core.errors import ConfigError
from hpc_rl.core.refusal import Kind, Refusal


@dataclass(kw_only=True)
class NameResolveConfig:
    """How the processes of a trial find each other: by files on the shared file system."""

    nfs_record_root: PathText = ""
    """Directory of the records; empty means `names/` in the trial directory."""


@dataclass(kw_only=True)
class ClusterSpecConfig:
    """The cluster that a trial runs on."""

    name_resolve: NameResolveConfig = field(default_factory=NameResolveConfig)
    """How the processes of a trial find each other."""
    cluster_name: str = "local"
    """Profile to load before all other files: `cluster/<name>.yaml` in the site's directories or in
    configs/cluster. Without such a profile the value is only a label; `--cluster NAME` requires one."""
    fileroot: PathText = "~/hpc-rl"
    """Directory on a file system that all nodes share; trials are stored in
    `{fileroot}/{user}/{experiment}/{trial}`."""
    n_nodes: NodeCount = 1
    """Number of nodes."""
    n_gpus_per_node: UnitCount = 8
    """GPUs per node; with 0, allocation units are processes without a GPU."""
    gpu_mem_gb: PositiveInt | None = None
    """Memory of each GPU in GB, such as 80; a trial that can't fit is refused. null means unknown. hpc-rl
    extension."""
    interface: str = ""
    """Network interface that the roles publish, by name (`ib0`) or network (`10.1.0.0/16`); empty means the
    variable HPC_RL_INTERFACE of the job, else the route to the other nodes."""
    local_dir: NodePath = ""
    """Directory on each node's own disk, such as `/scratch` or `$TMPDIR`. Models, published weights,
    encoded datasets and .sif images of apptainer are copied there once per node and removed at the end of
    the job. Empty means no copies. hpc-rl extension."""
    gpu_kind: Literal["nvidia", "amd"] = "nvidia"
    """Kind of the GPUs. With `amd`, apptainer gets `--rocm` instead of `--nv`, and if Slurm does not assign
    GPUs, ROCR_VISIBLE_DEVICES names them instead of CUDA_VISIBLE_DEVICES. hpc-rl extension."""
    node_dirs: list[PathText] = field(default_factory=list)
    """Directories that only compute nodes see. The job, not the submission, checks models, datasets and
    images below them. Not needed if this machine has no parent of a path. hpc-rl extension."""


@dataclass(kw_only=True)
class SlurmNodesConfig:
    """Which nodes a job requests, and for how long."""

    partition: str | None = None
    """Partition. For servers a preemptible one is safe: losing them only slows the trial down."""
    account: str | None = None
    """Account to charge."""
    qos: str | None = None
    """Quality of service."""
    time: SlurmTime | None = None
    """Time limit in Slurm's format: `24:00:00`, `2-12` (days-hours), or `'90'` in quotes (minutes)."""
    constraint: str | None = None
    """Node features."""
    reservation: str | None = None
    """Reservation."""
    nodelist: str | None = None
    """Nodes to use."""
    exclude: str | None = None
    """Nodes to avoid."""
    gpu_type: GpuType | None = None
    """GPU type, such as `a100`."""
    gres: str | None = None
    """Generic resources per node; if they include GPUs, no other option requests GPUs."""


@dataclass(kw_only=True)
class ServerJobsConfig(SlurmNodesConfig):
    """Slurm options of the server nodes (layouts `hetjob` and `jobs`); null means as in `launcher.slurm`."""

    cpus_per_task: SlurmCountOrDerived | None = None
    """CPUs per node; `derived` takes the number from the plan."""
    mem: SlurmMemoryOrDerived | None = None
    """Memory per node, even if `launcher.slurm` sets it per CPU or GPU."""
    exclusive: bool | Literal["user", "mcs", "topo"] | None = None
    """Whole nodes (true), or nodes not shared with some others."""
    tmp: SlurmMemory | None = None
    """Local disk space per node."""
    switches: str | None = None
    """Largest number of leaf switches, and how long to wait for them."""
    max_running: PositiveInt | None = None
    """Largest number of server nodes at once, in layout `jobs`; null means all of them."""
    idle_s: PositiveInt = 900
    """Seconds without a running supervisor of the trial after which servers stop, in layout `jobs`. The next
    trainer job submits them again."""


@dataclass(kw_only=True)
class SrunArgsConfig:
    """Further srun options of single roles, one per item; they win over the plan's.

    Examples: `--cpu-bind=cores`, `--gpu-bind=closest`, `--mem-bind=local`, `--distribution=cyclic`,
    `--hint=nomultithread`.
    """

    trainer: list[str] = field(default_factory=list)
    """Options for the trainer."""
    server: list[str] = field(default_factory=list)
    """Options for the generation servers."""
    rollout: list[str] = field(default_factory=list)
    """Options for the rollout role."""
    environment: list[str] = field(default_factory=list)
    """Options for the commands of `environments`."""


@dataclass(kw_only=True)
class SlurmLauncherConfig(SlurmNodesConfig):
    """Slurm options. `null` omits an option; `derived` takes the number from the plan."""

    ntasks_per_node: Literal[1] | None = 1
    """`--ntasks-per-node`; null for sites that forbid it."""
    cpus_per_task: SlurmCountOrDerived | None = "derived"
    """CPUs per node; null for sites that allocate whole nodes."""
    mem: SlurmMemoryOrDerived | None = "derived"
    """Memory per node; `0` requests all of it; null for sites that forbid `--mem`."""
    mem_per_cpu: SlurmMemory | None = None
    """Memory per CPU, instead of per node."""
    mem_per_gpu: SlurmMemory | None = None
    """Memory per GPU, instead of per node."""
    gpus_by: Literal["gpus-per-node", "gres"] | None = "gpus-per-node"
    """Option that requests the GPUs; null if Slurm does not manage GPUs (this requires whole nodes)."""
    exclusive: bool | Literal["user", "mcs", "topo"] | None = None
    """Whole nodes (true), or nodes not shared with other users (`user`), accounts (`mcs`) or switches
    (`topo`)."""
    tmp: SlurmMemory | None = None
    """Local disk space per node."""
    switches: str | None = None
    """Largest number of leaf switches, and how long to wait for them, such as `1@60:00`."""
    licenses: str | None = None
    """Licenses, such as `name:1`."""
    wckey: str | None = None
    """Workload characterisation key."""
    dependency: str | None = None
    """Jobs to wait for, such as `afterany:1234`."""
    mail_type: str | None = None
    """Events to send mail for, such as `END,FAIL`."""
    mail_user: str | None = None
    """Recipient of mail; null means the submitting user."""
    comment: str | None = None
    """Comment of the job, appended to hpc-rl's own tag."""
    extra_args: list[str] = field(default_factory=list)
    """Further sbatch options, one per item, such as `--hint=nomultithread`."""
    srun_additional_args: str = ""
    """Further options of every role's srun, split as by a shell; variables are not expanded."""
    srun_args: SrunArgsConfig = field(default_factory=SrunArgsConfig)
    """Further options of the srun of single roles, after `srun_additional_args`. hpc-rl extension."""
    srun_mpi: Literal["none", "pmix", "pmi2", "cray_shasta"] = "none"
    """`--mpi` of the trainer's srun. With any value but `none` its ranks find each other by MPI, which needs
    the extra `mpi` (mpi4py) in the trainer's Python. hpc-rl extension."""
    container_type: Literal["apptainer", "pyxis", "none"] = "apptainer"
    """Program that starts the images. A role without an image runs without a container; the supervisor always
    does. `pyxis` needs Slurm."""
    mount: str = ""
    """Further binds of the containers: `source:target`, separated by commas. The trial directory, the working
    directory, models and datasets are always bound, each at its own path."""
    trainer_image: PathText | None = None
    """Container image of the trainer, a path that all nodes see; null means no container."""
    rollout_image: Executable | None = None
    """Container image of the rollout role; null means the trainer's, `none` no container."""
    inference_server_image: PathText | None = None
    """Container image of the generation servers; null means no container."""
    trainer_image_python: Executable = "python3"
    """Python interpreter in `trainer_image`."""
    rollout_image_python: Executable = "python3"
    """Python interpreter in the rollout role's image."""
    inference_server_image_python: Executable = "python3"
    """Python interpreter in `inference_server_image`; SGLang or vLLM uses it too, unless
    `launcher.inference_server_python` names another."""
    container_program: Executable = "apptainer"
    """Program for `container_type: apptainer`: a name or a path; `singularity` works too."""
    container_args: list[str] = field(default_factory=list)
    """Further options of `apptainer exec`, or `--container-…` options of pyxis, one per item."""
    layout: Literal["allocation", "hetjob", "jobs"] = "allocation"
    """Jobs of a trial. `allocation`: one job for all roles. `hetjob`: one heterogeneous job, with the server
    nodes as a second component. `jobs`: a trainer job and a job array of server nodes, which may be preempted
    and may join and leave at any time."""
    servers: ServerJobsConfig = field(default_factory=ServerJobsConfig)
    """Options that differ for the server nodes, in the layouts `hetjob` and `jobs`."""
    replace_servers: bool = False
    """Submit a job for the servers of a node that Slurm has lost: it takes the node out of a running job for
    good. In layout `allocation`, for nodes with servers alone. hpc-rl extension."""
    continue_by: Literal["requeue", "successor"] = "requeue"
    """How a job that stopped with its state saved resumes. `requeue`: `scontrol requeue`, or a successor job
    if Slurm refuses; `successor`: always a new job that depends on this one (`--no-requeue`)."""
    backend: Literal["sbatch", "submitit"] = "sbatch"
    """How jobs are submitted: by `sbatch`, or by `submitit` (needs the extra of that name)."""


@dataclass(kw_only=True)
class HooksConfig:
    """Scripts that run at fixed moments of every attempt.

    They run after the scripts in the site's `hooks.d`. A script is a path or inline text (several lines, or
    one that begins with `#!`); the trial gets a copy.
    """

    dir: PathText = ""
    """Directory with scripts that are named after the moments below."""
    pre_job: ScriptOrPath | None = None
    """Runs on the first node before anything else; a failure ends the job."""
    pre_node: ScriptOrPath | None = None
    """Runs on every node after pre_job; a failure on any node ends the job and names the node."""
    post_node: ScriptOrPath | None = None
    """Runs on every node after the supervisor has stopped."""
    post_job: ScriptOrPath | None = None
    """Runs on the first node, last of all."""
    on_preempt: ScriptOrPath | None = None
    """Runs on the first node as soon as Slurm asks the job to stop (preemption, time limit), while the state
    is being saved."""
    timeout_s: PositiveInt = 300
    """Time limit of each script in seconds; a script that exceeds it counts as failed."""
    on_preempt_timeout_s: PositiveInt = 20
    """Time limit of on_preempt in seconds; Slurm kills the job soon after."""


@dataclass(kw_only=True)
class MpiConfig:
    """How `launcher.trainer_start: mpiexec` starts the trainer."""

    mpiexec: Executable = "mpiexec"
    """Program of Open MPI, MPICH or Intel MPI: a name or a path. mpi4py in the trainer's Python must load the
    same MPI."""
    args: list[str] = field(default_factory=list)
    """Further options of mpiexec, one per item; the plan sets hosts and ranks."""


@dataclass(kw_only=True)
class LauncherConfig:
    """How processes are started."""

    type: Literal["auto", "slurm", "local"] = "auto"
    """`auto` uses Slurm if `sbatch` is on the PATH, else this machine."""
    python: Executable | None = None
    """Python interpreter of the supervisor and of roles without a container; null means the submitting
    one."""
    inference_server_python: Executable | None = None
    """Python interpreter of SGLang or vLLM, from their separate environment; null means the role's."""
    templates_dir: PathText = ""
    """Directory of templates that take precedence over the site's and the packaged ones; empty means none."""
    modules: list[ModuleName] = field(default_factory=list)
    """Environment modules to load on the first node before anything else, such as `cuda/12.4`; all roles
    inherit their variables. hpc-rl extension."""
    setup: str = ""
    """Bash text that every job script sources after the modules, without `-e` and `-u`. hpc-rl extension."""
    env: dict[str, str] | str = ""
    """Environment variables of all roles: a mapping, or `A=b,C=d`; they win over the site's, the modules' and
    the setup's. hpc-rl extension."""
    snapshot: list[PathText] = field(default_factory=list)
    """Files and directories with your code, such as `rewards.py`, that a submission copies into the trial;
    its roles import the copies. If empty, they import the files that are in the working directory when they
    start. hpc-rl extension."""
    umask: Umask = "077"
    """Permissions that new files of a trial do not get. With `027` the group may read logs, checkpoints and
    exports; scripts, config.json and tokens stay private. hpc-rl extension."""
    inference_server_cpus_per_gpu: PositiveInt = 4
    """CPUs per unit of the generation servers."""
    inference_server_mem_per_gpu: PositiveInt = 32768
    """Memory per unit of the generation servers, in MB."""
    trainer_cpus_per_gpu: PositiveInt = 4
    """CPUs per trainer rank."""
    trainer_mem_per_gpu: PositiveInt = 32768
    """Memory per trainer rank, in MB."""
    rollout_cpus: PositiveInt = 4
    """CPUs of the rollout role."""
    rollout_mem_mb: PositiveInt = 16384
    """Memory of the rollout role, in MB."""
    inference_server_env_vars: dict[str, str] | str = ""
    """Environment variables of the generation servers: a mapping, or `A=b,C=d`."""
    trainer_env_vars: dict[str, str] | str = ""
    """Environment variables of the trainer ranks: a mapping, or `A=b,C=d`. Unless given here, GPUs add
    `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`, and megatron with t or c
    `CUDA_DEVICE_MAX_CONNECTIONS=1`."""
    trainer_start: Literal["srun", "mpiexec"] = "srun"
    """Program that starts the trainer's ranks. `srun`: by srun as all roles, or directly on this machine.
    `mpiexec`: by MPI, which needs the extra `mpi` (mpi4py) in the trainer's Python. hpc-rl extension."""
    mpi: MpiConfig = field(default_factory=MpiConfig)
    """How `trainer_start: mpiexec` starts the trainer. hpc-rl extension."""
    check_collectives: bool = True
    """Check before training that the trainer's ranks sum and exchange numbers correctly, and name slow nodes.
    hpc-rl extension."""
    preflight_timeout_s: NonNegativeInt = 60
    """Seconds in which each node of a Slurm job must reach every other one, before an attempt starts
    anything; nodes that fail are named and avoided. 0 skips this check. hpc-rl extension."""
    hooks: HooksConfig = field(default_factory=HooksConfig)
    """Scripts that run at fixed moments of every attempt."""
    slurm: SlurmLauncherConfig = field(default_factory=SlurmLauncherConfig)
    """Slurm options."""


def parse_environment(option: str, value: dict[str, str] | str) -> dict[str, str]:
    """Return the variables of a mapping, or of `A=b,C=d` if no value contains a comma. Raises ConfigError."""
    found = dict(value) if isinstance(value, dict) else {}
    for part in value.split(",") if isinstance(value, str) else ():
        name, equals, text = part.partition("=")
        if part.strip() and not equals:
            why, use = f": {part!r} is not NAME=value", "use a mapping if a value contains a comma"
            raise ConfigError(Refusal(option=option, kind=Kind.VALUE, why=why, use=use))
        if equals:
            found[name.strip()] = text
    for name in found:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            why = f": {name!r} is not a valid name of an environment variable"
            raise ConfigError(
                Refusal(option=option, kind=Kind.VALUE, why=why, use="use letters, digits and _")
            )
    return found
