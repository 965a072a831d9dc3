"""The one list of checks of a set-up. `check`, `submit`, `submit --dry_run` and `doctor` run it.

CHECKS has the order of a submission. Each check reads and extends the subject: the adapted configuration, the
plan, its needs, the scripts. It yields refusals and notes, or raises an error of this package, which may hold
several refusals. All refusals are reported at once, causes before consequences.
"""

import dataclasses
import enum
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from hpc_rl.config.load.stored import Loaded
from hpc_rl.config.options.experiment import (
    count_steps,
    has_own_prompts,
    has_trainer,
    list_training_paths,
)
from hpc_rl.config.rules.check import RulesRefuse, check
from hpc_rl.core.errors import ConfigError, ExitCode, HpcRlError, SchedulerError
from hpc_rl.core.refusal import Kind, Refusal, order_refusals
from hpc_rl.core.trial import Trial
from hpc_rl.datasets.rows import count_rows
from hpc_rl.doctor.machine import find_interface_problem, find_modules_problem
from hpc_rl.plan import train_mesh
from hpc_rl.plan.estimate import Estimate, ServersEstimate
from hpc_rl.plan.plan import make_plan
from hpc_rl.plan.schema import Plan
from hpc_rl.schedulers import pick
from hpc_rl.schedulers.sinfo import UNKNOWN_THREADS_PER_CORE
from hpc_rl.schedulers.slurm import SlurmScheduler, require
from hpc_rl.supervise import bad_nodes
from hpc_rl.trials import (
    interpreters,
    needs,
    preflight,
    storage,
    submission,
)
from hpc_rl.trials.check_result import WRONG, CheckResult, CheckState
from hpc_rl.trials.first_rows import check_first_rows
from hpc_rl.trials.first_start import FirstStart, Recovery
from hpc_rl.trials.lock import check_unlocked, check_writable
from hpc_rl.trials.user_code import check_user_code


@dataclass(frozen=True)
class Planned:
    """A checked configuration and its plan."""

    loaded: Loaded
    plan: Plan
    # Nodes that failed the trial lately; None if the cluster was not asked.
    avoid: tuple[str, ...] | None = None
    needs: Estimate | ServersEstimate | None = None  # None if the model's config.json says nothing
    problems: tuple[Refusal, ...] = ()  # why the models can't be trained so

    @property
    def notes(self) -> list[Refusal]:
        estimated = self.needs.notes if self.needs else []
        return [*self.loaded.notes, *self.plan.notes, *estimated]

    def note_lines(self, known: Collection[str] = ()) -> list[str]:
        """Return a line for each note but the known ones."""
        return [f"note: {note}" for note in map(str, self.notes) if note not in known]


class Stage(enum.Enum):
    """The requirement of a check besides the configuration."""

    OPTIONS = enum.auto()  # nothing
    HERE = enum.auto()  # models, data and code that this machine sees
    PYTHONS = enum.auto()  # the packages of interpreters
    TRIAL = enum.auto()  # the directory of the trial
    SCRIPTS = enum.auto()
    CLUSTER = enum.auto()  # one sinfo
    SLURM = enum.auto()  # its programs
    ACCEPTANCE = enum.auto()  # one `sbatch --test-only`, which a submission replaces


ALL = frozenset(Stage)
OF_A_PLAN = frozenset({Stage.OPTIONS, Stage.HERE, Stage.PYTHONS})
WITHOUT_A_PLAN = frozenset({Stage.HERE})  # checks of a configuration that lacks options


@dataclass
class Subject:
    """The object of the checks."""

    loaded: Loaded
    scheduler: str
    stages: frozenset[Stage]
    recovery: Recovery | None = None
    counts_rows: bool = False
    unreadable: set[str] = field(default_factory=set)  # sections of datasets that rules refuse
    can_plan: bool = True
    plan: Plan | None = None
    needs: Estimate | ServersEstimate | None = None
    problems: list[Refusal] = field(default_factory=list)
    start: FirstStart | None = None
    avoid: tuple[str, ...] | None = None
    scripts: dict[str, str] = field(default_factory=dict)
    has_no_answer: bool = False  # of Slurm, to the sinfo

    @property
    def trial(self) -> Trial:
        return submission.make_trial(self.loaded.config)

    @property
    def planned(self) -> Planned | None:
        if self.plan is None:
            return None
        return Planned(self.loaded, self.plan, self.avoid, self.needs, tuple(self.problems))


Finding = Refusal | CheckResult
FIX = "correct the option."


@dataclass(frozen=True)
class Check:
    """One row of the list; `fix` is the advice of `hpc-rl doctor` after a refusal."""

    name: str
    stage: Stage
    look: Callable[[Subject], Iterable[Finding] | None]
    fix: str = FIX
    needs_plan: bool = True


@dataclass(frozen=True)
class Verdict:
    """The results of the checks, and the plan of a submission: None if no plan can be made."""

    results: list[CheckResult]
    planned: Planned | None
    start: FirstStart | None
    of_scripts: list[CheckResult]  # results about the scripts and the cluster

    @property
    def refusals(self) -> list[CheckResult]:
        """Return the refusals, each one once, causes before consequences."""
        wrong = {result.detail: result for result in self.results if result.state in WRONG}
        return order_refusals(wrong.values(), lambda result: result.refusal)

    @property
    def lines(self) -> list[str]:
        return [result.detail for result in self.refusals]

    @property
    def notes(self) -> list[Refusal]:
        return self.planned.notes if self.planned else []

    @property
    def exit_code(self) -> int:
        """Return the exit code of the first check that refuses."""
        return next((result.exit_code for result in self.results if result.state in WRONG), ExitCode.DONE)

    def error(self) -> HpcRlError:
        """Return the refusals as one error."""
        error = ConfigError(*(result.refusal or result.detail for result in self.refusals))
        error.exit_code = ExitCode(self.exit_code)
        return error

    def require(self) -> Planned:
        """Return the plan. Raises the error of the refusals."""
        if self.refusals or self.planned is None:
            raise self.error()
        return self.planned

    def rows(self) -> list[dict[str, Any]]:
        """Return all results and notes for --json."""
        shown = {result.detail for result in self.results}
        others = [CheckResult.make("configuration", note) for note in self.notes if str(note) not in shown]
        return [result.to_json() for result in (*self.results, *others)]


# -- the checks


def _check_options(subject: Subject) -> Iterator[Finding]:
    """Adapt the defaults, and ask every rule."""
    try:
        subject.loaded = check(subject.loaded, files=Stage.HERE in subject.stages)
    except RulesRefuse as error:
        subject.loaded, subject.unreadable = error.adapted, error.unreadable
        subject.can_plan = error.is_about_files_only
        yield from error.refusals


def _check_rows(subject: Subject) -> Iterator[Refusal]:
    return check_first_rows(subject.loaded.config, subject.unreadable)


def _check_user_code(subject: Subject) -> Iterator[Refusal]:
    config = subject.loaded.config
    return check_user_code(config, config.launcher.python or sys.executable, Path.cwd())


def _note(subject: Subject, notes: Sequence[Refusal]) -> None:
    subject.loaded = dataclasses.replace(subject.loaded, notes=[*subject.loaded.notes, *notes])


def _make_plan(subject: Subject) -> None:
    if not subject.can_plan:
        return
    # The true number of threads is known only by sinfo.
    threads = UNKNOWN_THREADS_PER_CORE if subject.scheduler == "slurm" else 1
    subject.plan = make_plan(
        subject.loaded.config,
        subject.loaded.explicit,
        interpreter=sys.executable,
        scheduler=subject.scheduler,  # type: ignore[arg-type]
        threads_per_core=threads,
    )


def _check_batch(subject: Subject) -> Iterator[Refusal]:
    """Yield that the data has less rows than a batch, and refuse a trial without a step."""
    config, rows = subject.loaded.config, subject.loaded.config.train_dataset
    is_read = has_own_prompts(config) and "train_dataset" not in subject.unreadable
    if not is_read or not has_trainer(config):
        return
    paths = list_training_paths(config)
    counts = [count_rows(path, rows.batch_size) for path in paths]
    num_rows = sum(count or 0 for count in counts)
    if None in counts or num_rows >= rows.batch_size:
        return
    count_steps(config, num_rows)
    has = f"{' and '.join(paths)} {'have' if len(paths) > 1 else 'has'}"
    why = f": {has} {num_rows} rows, so each batch has some of them several times"
    yield Refusal(
        option="train_dataset.batch_size", value=rows.batch_size, kind=Kind.FILE, why=why, is_note=True
    )


def _check_trainer(subject: Subject) -> Iterator[Finding]:
    config, plan = subject.loaded.config, _require_plan(subject)
    yield from filter(None, [preflight.check_interpreter(config, plan, "trainer")])
    yield from interpreters.check_trainer(config, plan)


def _check_servers(subject: Subject, library: str) -> Iterator[Finding]:
    config, plan = subject.loaded.config, _require_plan(subject)
    if any(pool.backend == library for pool in plan.pools):
        yield from filter(None, [preflight.check_interpreter(config, plan, "server")])
        yield from interpreters.check_servers(config, plan, library)


def _check_megatron(subject: Subject) -> Iterator[Refusal]:
    return preflight.check_engine(_require_plan(subject))


def _check_libraries(subject: Subject) -> Iterator[Refusal]:
    return interpreters.check_libraries(subject.loaded.config, _require_plan(subject))


def _adapt_attention(subject: Subject) -> None:
    subject.loaded = preflight.adapt_attention(subject.loaded, _require_plan(subject))


def _check_mpi(subject: Subject) -> None:
    subject.loaded = preflight.adapt_mpi(subject.loaded, _require_plan(subject), subject.scheduler)


def _check_modules(subject: Subject) -> Iterator[Refusal]:
    return filter(None, [find_modules_problem(tuple(subject.loaded.config.launcher.modules))])


def _check_address(subject: Subject) -> Iterator[Refusal]:
    interface = subject.loaded.config.cluster.interface
    return filter(None, [find_interface_problem(interface, subject.scheduler == "slurm")])


def _check_gpus(subject: Subject) -> Iterator[Refusal]:
    return preflight.check_gpus(subject.loaded.config, subject.scheduler)


def _check_local_dir(subject: Subject) -> None:
    preflight.check_local_dir(subject.loaded.config, subject.scheduler)


def _check_sandbox(subject: Subject) -> Iterator[Refusal]:
    return preflight.check_sandbox(subject.loaded.config, subject.scheduler)


def _check_memory(subject: Subject) -> Iterator[Refusal]:
    """Estimate the memory of the trial; refuse machines that are too small."""
    config, plan = subject.loaded.config, _require_plan(subject)
    known = needs.find_known_models(config)
    subject.needs = needs.estimate_needs(config, plan, known, subject.scheduler, subject.counts_rows)
    estimated = subject.needs.problems if subject.needs else []
    subject.problems = [*train_mesh.find_problems(config, plan, known), *estimated]
    if Stage.HERE in subject.stages:
        yield from subject.problems
    if Stage.HERE in subject.stages and not subject.problems:
        yield from preflight.check_memory(_require_plan(subject), subject.scheduler)


def _check_accounts(subject: Subject) -> None:
    subject.trial.refuse_others()


def _check_lock(subject: Subject) -> None:
    check_unlocked(subject.trial)


def _check_fileroot(subject: Subject) -> Iterator[Refusal]:
    yield from storage.check_places(subject.loaded.config)
    check_writable(subject.trial)


def _check_space(subject: Subject) -> Iterator[Refusal]:
    disk = subject.needs.disk if isinstance(subject.needs, Estimate) else None
    return storage.check_space(subject.loaded.config, subject.trial, disk)


def _check_state(subject: Subject) -> None:
    subject.start = submission.check_submittable(
        subject.trial, subject.loaded, _require_plan(subject), subject.scheduler, subject.recovery
    )


def _check_programs(subject: Subject) -> None:
    require("sbatch")


def _check_capacity(subject: Subject) -> Iterator[Finding]:
    """Compare the request with the cluster, and fit the plan to it."""
    if subject.scheduler != "slurm":
        yield CheckResult("capacity", CheckState.SKIPPED, preflight.HERE)
        return
    bad = list(bad_nodes.find_bad_nodes(subject.trial, time.time()))
    said = preflight.compare_capacity(subject.loaded.config, _require_plan(subject), SlurmScheduler(), bad)
    subject.plan, subject.avoid, subject.has_no_answer = said.plan, said.avoid, said.has_no_answer
    yield from said.refusals
    yield from said.notes
    if not said.refusals and not said.notes:
        fits = f"{said.plan.cpus_per_node} CPUs per node; the request fits"
        yield CheckResult("capacity", CheckState.OK, fits)


def _check_scripts(subject: Subject) -> Iterator[CheckResult]:
    subject.scripts = submission.render_scripts(
        subject.loaded, _require_plan(subject), subject.trial, subject.scheduler
    )
    yield from preflight.check_lint(subject.scripts)


def _check_acceptance(subject: Subject) -> list[CheckResult]:
    return preflight.check_acceptance(subject.scripts, SlurmScheduler())


def _require_plan(subject: Subject) -> Plan:
    assert subject.plan is not None, "`judge` runs the checks that need a plan only if there is one"
    return subject.plan


_INSTALL = "install it there, or correct the path."
_STAGE = "correct the option, or stage the file."
_DIRECTORY = "name a directory that can be written, or ask the administrators."
_OWN_DIRECTORY = "do as shown, or set cluster.fileroot to a directory of your own."
_SANDBOX = "allow user namespaces, or use a kernel with Landlock (5.13 or newer)."
_LOGIN_NODE = "load Slurm's module, or use a login node of the cluster."
_REQUEST = "change the request; a fitting request is named."
CHECKS: tuple[Check, ...] = (
    Check("configuration", Stage.OPTIONS, _check_options, _STAGE, needs_plan=False),
    Check("rows", Stage.HERE, _check_rows, _STAGE, needs_plan=False),
    Check("user code", Stage.HERE, _check_user_code, "correct the code.", needs_plan=False),
    Check("plan", Stage.OPTIONS, _make_plan, needs_plan=False),
    Check("batch", Stage.HERE, _check_batch, needs_plan=False),
    Check("torch", Stage.PYTHONS, _check_trainer, _INSTALL),
    Check("sglang", Stage.PYTHONS, partial(_check_servers, library="sglang"), _INSTALL),
    Check("vllm", Stage.PYTHONS, partial(_check_servers, library="vllm"), _INSTALL),
    Check("megatron", Stage.HERE, _check_megatron, _INSTALL),
    Check("libraries", Stage.PYTHONS, _check_libraries, _INSTALL),
    Check("attention", Stage.HERE, _adapt_attention, _INSTALL),
    Check("mpi", Stage.HERE, _check_mpi, _INSTALL),
    Check("modules", Stage.HERE, _check_modules),
    Check("address", Stage.HERE, _check_address),
    Check("gpus", Stage.HERE, _check_gpus),
    Check("local dir", Stage.HERE, _check_local_dir),
    Check("sandbox", Stage.HERE, _check_sandbox, _SANDBOX),
    Check("memory", Stage.OPTIONS, _check_memory, "choose options that fit."),
    Check("accounts", Stage.TRIAL, _check_accounts, _OWN_DIRECTORY, needs_plan=False),
    Check("fileroot", Stage.TRIAL, _check_fileroot, _DIRECTORY, needs_plan=False),
    Check("space", Stage.TRIAL, _check_space, _DIRECTORY),
    Check("trial", Stage.TRIAL, _check_lock, "wait for it.", needs_plan=False),
    Check("state", Stage.TRIAL, _check_state, "see `hpc-rl status`."),
    Check("slurm programs", Stage.SLURM, _check_programs, _LOGIN_NODE, needs_plan=False),
    Check("capacity", Stage.CLUSTER, _check_capacity, _REQUEST),
    Check("scripts", Stage.SCRIPTS, _check_scripts),
    Check("sbatch --test-only", Stage.ACCEPTANCE, _check_acceptance, _REQUEST),
)


_ON_SLURM = (Stage.SLURM, Stage.ACCEPTANCE)
_OF_SCRIPTS = (Stage.SCRIPTS, Stage.CLUSTER, Stage.ACCEPTANCE)


def judge(
    given: Loaded,
    stages: frozenset[Stage] = ALL,
    recovery: Recovery | None = None,
    counts_rows: bool = False,
) -> Verdict:
    """Run the checks of some stages; with `counts_rows` the training data is read for the number of steps."""
    subject = Subject(given, pick(given.config.launcher.type), stages, recovery, counts_rows)
    results: list[CheckResult] = []
    of_scripts: list[CheckResult] = []
    for one in CHECKS:
        is_wanted = one.stage in stages or one.name == "configuration"
        if one.stage is Stage.ACCEPTANCE:
            # A submission replaces it, unless Slurm did not answer; it has nothing to add to a refusal.
            is_wanted |= subject.has_no_answer
            is_wanted &= not any(row.state in WRONG for row in results)
        is_wanted &= subject.scheduler == "slurm" or one.stage not in _ON_SLURM
        if is_wanted and (subject.plan or not one.needs_plan):
            found = _apply_check(one, subject)
            results += found
            of_scripts += found if one.stage in _OF_SCRIPTS else []
    _note(subject, [row.refusal for row in results if row.refusal and row.refusal.is_note])
    return Verdict(results, subject.planned, subject.start, of_scripts)


def refuse_unreadable(error: ConfigError) -> Verdict:
    """Return the verdict on a configuration that can't be read."""
    name = "configuration"
    found = _convert_error(name, error)
    rows = [CheckResult.make(name, one) if isinstance(one, Refusal) else one for one in found]
    return Verdict(rows, None, None, [])


def _apply_check(one: Check, subject: Subject) -> list[CheckResult]:
    """Return the results of a check, at least one."""
    found: list[Finding] = []
    try:
        for finding in one.look(subject) or ():
            found.append(finding)
    except HpcRlError as error:
        found += _convert_error(one.name, error)
    origins = subject.loaded.origins
    results = [
        CheckResult.make(one.name, finding, origins) if isinstance(finding, Refusal) else finding
        for finding in found
    ]
    return results or [CheckResult(one.name, CheckState.OK)]


def _convert_error(name: str, error: HpcRlError) -> Iterator[Finding]:
    """Yield the refusals of an error, or its text."""
    state = CheckState.UNREACHABLE if isinstance(error, SchedulerError) else CheckState.REFUSED
    for part in error.args if isinstance(error, ConfigError) else [str(error)]:
        if isinstance(part, Refusal):
            yield part
        else:
            yield from (
                CheckResult(name, state, line, exit_code=error.exit_code) for line in part.splitlines()
            )


def make_planned(loaded: Loaded, pythons: bool = True, count_rows: bool = False) -> Planned:
    """Check a configuration (data, models, this machine, memory) and plan it.

    `pythons` checks the packages of interpreters; `count_rows` counts the rows for the number of steps.
    Raises ConfigError with one refusal a line.
    """
    stages = OF_A_PLAN if pythons else OF_A_PLAN - {Stage.PYTHONS}
    return judge(loaded, stages, counts_rows=count_rows).require()
