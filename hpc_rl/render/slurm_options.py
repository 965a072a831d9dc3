"""The sbatch options of one job, or of one component, in order, by heading. Pure."""

import shlex
from collections.abc import Mapping
from functools import partial

from hpc_rl.config.options.cluster import SlurmLauncherConfig
from hpc_rl.config.rules.slurm_rules import DERIVED, has_gpus
from hpc_rl.core import slurm_time
from hpc_rl.core.errors import ConfigError
from hpc_rl.core.refusal import Kind, Refusal
from hpc_rl.plan.schema import Group
from hpc_rl.render.jinja_environment import LINE_BREAK

# Name without dashes; value: empty for a flag, None for an unused option.
Option = tuple[str, str | None]

# Every option, in order, under its heading. The value comes from the key of `launcher.slurm` with the same
# name, or from `_make_values`.
SLURM_OPTIONS: dict[str, tuple[str, ...]] = {
    "resources": (
        "nodes", "ntasks-per-node", "cpus-per-task", "mem", "mem-per-cpu", "mem-per-gpu", "gpus-per-node",
        "gres", "time", "constraint", "nodelist", "exclude", "tmp", "switches", "exclusive", "array",
    ),
    "accounting": (
        "job-name", "comment", "partition", "account", "qos", "reservation", "licenses", "wckey", "mail-type",
        "mail-user",
    ),
    "output": ("chdir", "output", "open-mode"),
    "ending": ("no-kill", "requeue", "no-requeue", "signal", "dependency"),
}  # fmt: skip
# The long options of sbatch in #SBATCH lines (22.05 to 26.05). Plugins of a site may add more.
_SBATCH_OPTIONS = """
    account acctg-freq array batch bb bbf begin chdir cluster cluster-constraint clusters comment
    consolidate-segments constraint container container-id contiguous core-spec cores-per-socket
    cpu-freq cpus-per-gpu cpus-per-task deadline delay-boot dependency distribution error exclude
    exclusive export export-file extra extra-node-info get-user-env gid gpu-bind gpu-freq gpus
    gpus-per-node gpus-per-socket gpus-per-task gres gres-flags hint hold ignore-pbs input job-name
    kill-on-invalid-dep licenses mail-type mail-user mcs-label mem mem-bind mem-per-cpu mem-per-gpu
    mincpus network nice no-kill no-requeue nodefile nodelist nodes ntasks ntasks-per-core
    ntasks-per-gpu ntasks-per-node ntasks-per-socket oom-kill-step open-mode output overcommit
    oversubscribe parsable partition power prefer priority profile propagate qos quiet reboot requeue
    reservation resv-ports segment share signal sockets-per-node spread-job spread-segments stepmgr
    switches tasks-per-node test-only thread-spec threads-per-core time time-min tmp tres-bind
    tres-per-job tres-per-node tres-per-socket tres-per-task uid use-min-nodes verbose wait
    wait-all-nodes wckey workdir wrap
"""
SBATCH_OPTIONS = frozenset(_SBATCH_OPTIONS.split())
# Options that get no `##SBATCH` placeholder when unused.
_UNSHOWN = ("array", "no-kill", "requeue", "no-requeue")
# Accounting options that the second component of a heterogeneous job states itself.
_OF_COMPONENT = ("partition", "account", "qos", "reservation")


def make_directives(
    slurm: SlurmLauncherConfig,
    group: Group,
    n_gpus_per_node: int,
    given: Mapping[str, str | None] | None = None,
) -> dict[str, list[Option]]:
    """Return the options of a job by heading: from the section, from the nodes' needs, and from `given`."""
    values = _make_values(slurm, group) | _make_gpu_options(slurm, n_gpus_per_node) | dict(given or {})
    return {
        heading: [(name, values[name]) for name in names if values[name] is not None or name not in _UNSHOWN]
        for heading, names in SLURM_OPTIONS.items()
    }


def select_component(whole: dict[str, list[Option]]) -> dict[str, list[Option]]:
    """Return the options that the second component of a heterogeneous job states itself."""
    return {
        "resources": [option for option in whole["resources"] if option[1] is not None],
        "accounting": [option for option in whole["accounting"] if option[1] and option[0] in _OF_COMPONENT],
    }


def _make_values(slurm: SlurmLauncherConfig, group: Group) -> dict[str, str | None]:
    names = (name for names in SLURM_OPTIONS.values() for name in names)
    values = {name: getattr(slurm, name.replace("-", "_"), None) for name in names}
    values["nodes"] = str(len(group.nodes))
    if slurm.ntasks_per_node is not None:
        values["ntasks-per-node"] = str(slurm.ntasks_per_node)
    if slurm.cpus_per_task == DERIVED:
        values["cpus-per-task"] = str(group.cpus_per_node)
    if slurm.mem == DERIVED:
        # sbatch accepts only one of the three: --mem-per-… replaces the derived --mem.
        values["mem"] = None if slurm.mem_per_cpu or slurm.mem_per_gpu else f"{group.mem_mb_per_node}M"
    if isinstance(slurm.exclusive, bool):
        values["exclusive"] = "" if slurm.exclusive else None
    return values


def _make_gpu_options(slurm: SlurmLauncherConfig, count: int) -> dict[str, str | None]:
    """Return one option for GPUs: of --gres=gpu and --gpus-per-node, Slurm uses only one."""
    if not count or not slurm.gpus_by or has_gpus(slurm.gres):
        return {"gpus-per-node": None, "gres": slurm.gres}
    needed = f"{slurm.gpu_type}:{count}" if slurm.gpu_type else str(count)
    if slurm.gpus_by == "gres":
        return {"gpus-per-node": None, "gres": ",".join(filter(None, [f"gpu:{needed}", slurm.gres]))}
    return {"gpus-per-node": needed, "gres": slurm.gres}


def split_words(argument: str) -> list[str]:
    """Split an item of `launcher.slurm.extra_args` by sbatch's quoting. Raises ConfigError."""
    refuse = partial(Refusal, option="launcher.slurm.extra_args", kind=Kind.VALUE)
    try:
        found = shlex.split(argument, posix=True)
    except ValueError as error:
        raise ConfigError(refuse(why=f": {argument!r} can't be split into arguments: {error}")) from error
    if not found or LINE_BREAK.search(argument):
        why, use = f": {argument!r} is not a valid sbatch option", "write one per item, as --licenses=a:1"
        raise ConfigError(refuse(why=why, use=use))
    return found


def compute_signal_lead_s(time_limit: str | None) -> int:
    """Return how long before the end of the job Slurm signals the batch script."""
    # Slurm may be a minute early and acts every half minute; the rest leaves time for a step and a save.
    # A short job must not be signalled at its start.
    if not time_limit:
        return 180
    limit_s = slurm_time.parse_time_limit(time_limit)
    return 300 if limit_s is None else max(1, min(300, limit_s // 5))
