"""The requirements of a trial on a machine, and the verdict of `submit` as findings: for `hpc-rl doctor`."""

import os
import sys
from dataclasses import replace

from hpc_rl.config.load.load import load
from hpc_rl.config.options.cluster import SlurmLauncherConfig
from hpc_rl.config.options.experiment import GRPOConfig
from hpc_rl.config.rules.slurm_rules import DERIVED
from hpc_rl.core.errors import ConfigError
from hpc_rl.doctor.finding import Finding, Requirements, Status
from hpc_rl.plan.schema import Group
from hpc_rl.render.slurm_options import make_directives
from hpc_rl.schedulers import pick
from hpc_rl.trials.check_result import WRONG, CheckState
from hpc_rl.trials.checklist import CHECKS, FIX, Planned, Verdict, judge
from hpc_rl.trials.prepare import ConfigSources

ANY_TRIAL = ["experiment_name=any", "trial_name=any", "actor.path=any", "train_dataset.path=any"]


def find_requirements(
    sources: ConfigSources, fileroot: str | None, partition: str | None, num_nodes: int | None
) -> tuple[Requirements, SlurmLauncherConfig, Verdict | None]:
    """Return the requirements on a machine, the job's options, and the verdict of `submit` on the trial.

    Without a configuration the requirements hold for any trial, and there is no verdict. `fileroot`,
    `partition` and `num_nodes` replace the configuration's. Raises ConfigError.
    """
    if sources.overrides and not sources.files:
        first = sources.overrides[0]
        raise ConfigError(
            f"doctor has no option {first}; `hpc-rl doctor --help` lists them. Options of a configuration "
            "need the configuration as well: hpc-rl doctor --config FILE …"
        )
    overrides = list(sources.overrides if sources.files else ANY_TRIAL)
    overrides += [f"--partition={partition}"] if partition else []
    loaded = load(
        sources.files, overrides, presets=sources.presets, cluster=sources.cluster, environ=os.environ
    )
    config, options = loaded.config, loaded.config.launcher.slurm
    on_slurm = pick(config.launcher.type) == "slurm"
    needs = Requirements(
        on_slurm=on_slurm,
        num_nodes=2 if on_slurm else 1,
        fileroot=config.cluster.fileroot,
        python=sys.executable,
        partition=options.partition or "",
        interface=config.cluster.interface,
        local_dir=config.cluster.local_dir,
    )
    verdict = judge(loaded) if sources.files else None
    if verdict and verdict.planned:
        needs = _add_plan(needs, verdict.planned)
    if num_nodes == 0:
        raise ConfigError("--nodes must be at least 1, got 0.")
    needs = replace(
        needs,
        num_nodes=num_nodes or needs.num_nodes,
        fileroot=os.path.abspath(os.path.expanduser(fileroot or needs.fileroot)),
    )
    return needs, replace(options, partition=needs.partition or None), verdict


def _add_plan(needs: Requirements, planned: Planned) -> Requirements:
    plan, launcher = planned.plan, planned.loaded.config.launcher
    mpi = next((unit.mpi for unit in plan.units if unit.mpi), None)
    config, sandbox = planned.loaded.config, ""
    if isinstance(config, GRPOConfig) and "code_tests" in config.rollout.reward_functions:
        sandbox = config.rollout.sandbox
    return replace(
        needs,
        sandbox=sandbox,
        num_nodes=plan.n_nodes,
        cpus=plan.cpus_per_node,
        gpus=plan.n_gpus_per_node if any(unit.gpus_per_task for unit in plan.units) else 0,
        mem_mb=plan.mem_mb_per_node,
        python=plan.python,
        server_python=launcher.inference_server_python or plan.python,
        modules=tuple(launcher.modules),
        servers=tuple(pool.backend for pool in plan.pools),
        megatron="megatron" in plan.allocation,
        mpi=mpi is not None,
        mpiexec=mpi.mpiexec if mpi else "",
    )


def list_findings(verdict: Verdict) -> list[Finding]:
    """Return the refusals, notes and warnings of a verdict, and the capacity."""
    fixes = {check.name: check.fix for check in CHECKS}
    findings = []
    for result in (*verdict.refusals, *verdict.results):  # causes before consequences
        if result.state in WRONG or result.state is CheckState.NOTE:
            status = Status.FAIL if result.state in WRONG else Status.WARN
            findings.append(Finding(result.name, status, result.detail, fixes.get(result.name, FIX)))
        elif result.name == "capacity" and result.state is CheckState.OK:
            findings.append(Finding(result.name, Status.OK, result.detail))
    known = {finding.found for finding in findings}
    warnings = [str(note) for note in verdict.notes if note.is_warning]
    findings += [Finding("configuration", Status.WARN, text, FIX) for text in warnings if text not in known]
    return list(dict.fromkeys(findings))


def make_srun_options(needs: Requirements, options: SlurmLauncherConfig) -> list[str]:
    """Return the srun options of a short job with the trial's resources."""
    if not needs.mem_mb and options.mem == DERIVED:
        options = replace(options, mem=None)  # nothing was planned
    nodes = Group(
        name="trial",
        nodes=list(range(needs.num_nodes)),
        cpus_per_node=max(1, needs.cpus),
        mem_mb_per_node=needs.mem_mb,
    )
    ours = ("nodes", "ntasks-per-node", "time")
    resources = make_directives(options, nodes, needs.gpus)["resources"]
    machines = [(name, value) for name, value in resources if value is not None and name not in ours]
    names = {name: getattr(options, name) for name in ("partition", "account", "qos", "reservation")}
    account = [(name, value) for name, value in names.items() if value is not None]
    return [f"--{name}={value}" if value != "" else f"--{name}" for name, value in (*machines, *account)]
