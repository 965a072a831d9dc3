"""Every signal, and every pair of signals, at every stage of a job script: its exit code, and its requests to
the scheduler. The scripts run concurrently, so that they wait at the same time."""

import itertools
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from signal import SIGCONT, SIGINT, SIGTERM, SIGUSR1, SIGUSR2, Signals
from typing import NamedTuple

import pytest
from job_scripts import JobRun

pytestmark = pytest.mark.waits

SIGNALS = (SIGTERM, SIGUSR1, SIGUSR2, SIGCONT, SIGINT)
TOLD = {SIGTERM, SIGINT}  # that end a job for good
SINGLES = [(one,) for one in SIGNALS]
PAIRS = list(itertools.product(SIGNALS, SIGNALS))
GAPS_S = (0.0, 0.1, 0.7, 1.5, 3.0)
OF_SLURM = ("answer", "requeue", "successor")
BEFORE_PYTHON = ("site", "python")
STAGES = (*BEFORE_PYTHON, "starting", "running", "draining", *OF_SLURM, "pre_job", "post_job")
SIDE_BY_SIDE = 24


class Case(NamedTuple):
    scheduler: str
    stage: str
    signals: tuple[Signals, ...]
    gap_s: float = 0.0
    reason: str = "None"  # of Slurm, for the state of the job

    def __str__(self) -> str:
        names = "+".join(one.name for one in self.signals)
        return f"{self.scheduler} {self.stage} {names} {self.gap_s:g} s {self.reason}"


class Outcome(NamedTuple):
    code: int
    calls: list[str]
    num_starts: int
    last: str  # event of the last line of the state


def expected(case: Case) -> Outcome:
    """The promised outcome."""
    has_term = bool(TOLD & set(case.signals))
    again = ["successor" if case.stage == "successor" else "requeue"]
    if case.stage in BEFORE_PYTHON and has_term:
        return Outcome(-next(one for one in case.signals if one in TOLD), [], 0, "")
    if case.scheduler == "local":
        if not has_term:
            return Outcome(0, [], 2, "ended")
        if case.stage in ("pre_job", "starting"):
            return Outcome(143, [], int(case.stage == "starting"), "ended")
        return Outcome(75, [], 1, "ended")
    if case.stage in ("pre_job", "starting") and has_term:
        again = again if case.reason == "TimeLimit" else []
        return Outcome(143, again, int(case.stage == "starting"), "")
    # The request that Slurm has taken causes a TERM by itself.
    is_taken = case.stage == "requeue" or case.reason == "TimeLimit"
    if not has_term or is_taken:
        return Outcome(75, again, 1, "requeued")
    return Outcome(75, [*again, "scancel 8"] if case.stage == "successor" else [], 1, "ended")


# A fork of one thread inherits the programs that another one is writing, and these are busy until it executes.
ONE_FORKS = threading.Lock()


def play(case: Case, here: Path) -> str:
    """Run one case; return a description of the failure, or ""."""
    options = {"continue_by": "successor"} if case.stage == "successor" else {}
    with ONE_FORKS:
        run = JobRun(here, case.scheduler, **options)
    (here / "reason").write_text(f"Reason={case.reason}")
    held = [case.stage]
    if case.stage in ("starting", "running", "draining"):
        held.append("ending")  # or the first signal might end it all before the second one
    run.hold(*held)
    try:
        with ONE_FORKS:
            run.start()
        run.reach(case.stage)
        for number, one in enumerate(case.signals):
            time.sleep(case.gap_s if number else 0)
            run.signal(one)
        # A supervisor that does not listen dies of a TERM: it is not let on before the TERM has come.
        is_killed = case.stage == "starting" and bool(TOLD & set(case.signals))
        code = run.release([] if is_killed else held)
        events = [line["event"] for line in run.lines()]
        found = Outcome(code, run.calls(), run.starts(), events[-1] if events else "")
        wanted = expected(case)
        if not wanted.last:  # not what this is about
            found = found._replace(last="")
        problem = "" if found == wanted else f"{case}: {found}, expected {wanted}\n{run.said()[-600:]}"
    except AssertionError as error:
        problem = f"{case}: {error}\n{run.said()[-600:]}"
    finally:
        run.end()
    shutil.rmtree(here, ignore_errors=True)
    return problem


def play_all(cases: list[Case], folder: Path) -> None:
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        problems = list(pool.map(lambda one: play(one[1], folder / str(one[0])), enumerate(cases)))
    wrong = list(filter(None, problems))
    assert not wrong, f"{len(wrong)} of {len(cases)}:\n" + "\n".join(wrong)


def is_possible(case: Case) -> bool:
    if case.scheduler == "local" and (case.stage in OF_SLURM or case.reason != "None"):
        return False
    # bash leaves an INT to the program that it waits for
    return not (case.stage in BEFORE_PYTHON and SIGINT in case.signals)


# Each of these ended a job that should have continued, or continued one that should have ended.
KNOWN = [
    *(Case("slurm", stage, (SIGUSR1, SIGUSR1), 0.7) for stage in STAGES),
    *(Case("local", stage, (SIGUSR1, SIGUSR1), 0.7) for stage in STAGES if stage not in OF_SLURM),
    *(Case("slurm", stage, (SIGUSR2,)) for stage in ("running", "draining", "pre_job", "requeue")),
    *(Case("slurm", stage, (SIGUSR1,)) for stage in BEFORE_PYTHON),
    *(Case("slurm", stage, (SIGTERM,)) for stage in STAGES),
    *(Case("slurm", at, (SIGTERM, SIGUSR1), 0.1, "TimeLimit") for at in ("running", "draining", "post_job")),
    *(Case("slurm", stage, (SIGUSR1, SIGTERM), 0.1) for stage in ("running", "draining", "successor")),
    Case("slurm", "running", (SIGCONT, SIGTERM)),
    Case("local", "running", (SIGINT, SIGTERM)),
]


def test_the_signals_that_killed_scripts(tmp_path):
    play_all(KNOWN, tmp_path)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("scheduler", ["slurm", "local"])
def test_every_pair_of_signals_at_every_stage(tmp_path, scheduler):
    cases = [
        Case(scheduler, stage, signals, gap_s, reason)
        for stage in STAGES
        for signals in [*SINGLES, *PAIRS]
        for gap_s in (GAPS_S if len(signals) > 1 else GAPS_S[:1])
        for reason in ("None", "TimeLimit")
        if reason == "None" or SIGTERM in signals
    ]
    play_all([case for case in cases if is_possible(case)], tmp_path)
