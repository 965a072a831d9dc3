"""Predictions of the simulator, and the trials that they predict: toys with artificial durations.

    python benchmarks/simulator.py trials [--only NAME …] [--beside 2] [--out FILE]
    python benchmarks/simulator.py split  [--beside 2] [--out FILE]
    python benchmarks/simulator.py scale  [--out FILE]

`trials` runs ten trials with the real service and real files on a private Slurm of this machine. A decode step
of a server takes a time that grows with its rows, an update a time that grows with its tokens
(tests/helpers/timed_algorithm.py); both are long beside the work of the processor. Costs are measured in five
trials; the others are predicted: throughput, staleness and makespan, some with kills.
`split` runs a badly divided trial, asks `tune` for a split, and runs the other splits of the same processes.
`scale` times simulations of 1,000 steps on up to 10,000 nodes whose mean time between failures is 30 days, and
counts what the supervisor of so many nodes costs.
"""

import argparse
import json
import os
import resource
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from run_record import describe_run, write_record

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "helpers"), str(ROOT / "tests" / "slurm")]

from cluster import LEAKS, Cluster  # noqa: E402
from packages import find_or_fetch  # noqa: E402
from patience import extend  # noqa: E402
from scale_trials import measure_apart  # noqa: E402
from simulated_trials import make_units  # noqa: E402
from toy_trials import hpc_rl, logs_of, make_toy  # noqa: E402

from hpc_rl.config.options.operations import FrequencyConfig  # noqa: E402
from hpc_rl.core.errors import JobEvent  # noqa: E402
from hpc_rl.core.records import load_job_state  # noqa: E402
from hpc_rl.core.trial import Trial, load_object  # noqa: E402
from hpc_rl.rollout.batch_log.seals import load_seals  # noqa: E402
from hpc_rl.rollout.sequencer import Rules  # noqa: E402
from hpc_rl.simulate.costs import Costs  # noqa: E402
from hpc_rl.simulate.prepare import make_case  # noqa: E402
from hpc_rl.simulate.result import Result, run  # noqa: E402
from hpc_rl.simulate.setup import Faults, Kill, Setup  # noqa: E402
from hpc_rl.stats.read import load_history  # noqa: E402
from hpc_rl.trials import prepare  # noqa: E402

Kills = tuple[tuple[float, str], ...]  # seconds after the first row of metrics, role
STEPS = 24
NUM_DRAWS = 5
OPTIONS = {
    "experiment_name": "simulated",
    "total_train_steps": STEPS,
    "cluster.n_gpus_per_node": 0,
    "cluster.n_nodes": 2,
    "launcher.type": "slurm",
    "actor.algorithm": "timed_algorithm:TIMED",
    "actor.algorithm_args": "{step_s: 0.5, token_s: 0.0015}",
    "actor.gradient_checkpointing": False,
    "actor.optimizer.lr": 1e-7,  # lengths stay as they are
    "actor.reward_norm.mean_level": "group",
    "actor.reward_norm.std_level": "group",
    "gconfig.n_samples": 4,
    "gconfig.max_new_tokens": 32,
    "rollout.reward_fn": "exact_match",
    "rollout.num_workers": 1,
    "recover.mode": "auto",
    "recover.freq_steps": 5,
    "recover.retries": 20,
    "train_dataset.batch_size": 16,
    "launcher.inference_server_env_vars": "HPC_RL_TEST_DECODE_S=0.08:0.003",
    "launcher.inference_server_cpus_per_gpu": 1,
    "launcher.inference_server_mem_per_gpu": 2048,
    "launcher.trainer_cpus_per_gpu": 1,
    "launcher.trainer_mem_per_gpu": 2048,
    "launcher.rollout_cpus": 1,
    "launcher.rollout_mem_mb": 2048,
}
SPLIT, AGE, ROOM = "allocation_mode", "rollout.max_head_offpolicyness", "rollout.max_concurrent_rollouts"
HARD = {"rollout.staleness_bound": "hard"}
# name -> options, and kills
MEASURED: dict[str, tuple[dict[str, Any], Kills]] = {
    "m1": ({SPLIT: "embedded:d1+fsdp:d1", AGE: 1, ROOM: 16}, ()),
    "m2": ({SPLIT: "embedded:d2+fsdp:d1", AGE: 2, ROOM: 32}, ()),
    "m3": ({SPLIT: "embedded:d1+fsdp:d2", AGE: 1, ROOM: 32}, ()),
    "m4": ({SPLIT: "embedded:d2+fsdp:d2", AGE: 0, ROOM: 16}, ()),
    "m5": ({SPLIT: "embedded:d1+fsdp:d1", AGE: 1, ROOM: 32}, ((10.0, "trainer"),)),
}
PREDICTED: dict[str, tuple[dict[str, Any], Kills]] = {
    "p1": ({SPLIT: "embedded:d2+fsdp:d2", AGE: 2, ROOM: 32}, ()),
    "p2": ({SPLIT: "embedded:d1+fsdp:d1", AGE: 0, ROOM: 16}, ()),
    "p3": ({SPLIT: "embedded:d3+fsdp:d1", AGE: 1, ROOM: 48, **HARD}, ()),
    "p4": ({SPLIT: "embedded:d2+fsdp:d1", AGE: 1, ROOM: 32}, ((20.0, "trainer"), (100.0, "trainer"))),
    "p5": ({SPLIT: "embedded:d2+fsdp:d2", AGE: 1, ROOM: 24}, ((10.0, "server"), (40.0, "trainer"))),
}
# four splits of six processes; the last one gives the servers far too much
SPLITS = tuple(f"embedded:d{count}+fsdp:d{6 - count}" for count in (2, 3, 4, 5))
BAD_SPLIT = SPLITS[-1]
OF_SPLITS: dict[str, Any] = {
    "total_train_steps": 14,
    AGE: 2,
    ROOM: 48,
    "train_dataset.batch_size": 24,
    "actor.algorithm_args": "{step_s: 0.5, token_s: 0.005}",
}
STAGGER_S = 25.0  # between the submissions of two trials: starts take the processor


class Workplace:
    """A folder from which toy trials are submitted, some beside each other."""

    def __init__(self, folder: Path, beside: int) -> None:
        self.folder, self._beside = make_toy(folder, "base"), beside
        timed = (ROOT / "tests" / "helpers" / "timed_algorithm.py").read_text()
        (folder / "timed_algorithm.py").write_text(timed)

    def run_all(self, wanted: dict[str, tuple[dict[str, Any], Kills]]) -> dict[str, Trial]:
        """Run trials to their ends, by name: options and kills."""
        with ThreadPoolExecutor(self._beside) as pool:
            running = {}
            for number, (name, (options, kills)) in enumerate(wanted.items()):
                delay_s = STAGGER_S * number if number < self._beside else 0.0
                running[name] = pool.submit(self.run, name, options, kills, delay_s)
            return {name: one.result() for name, one in running.items()}

    def run(self, name: str, options: dict[str, Any], kills: Kills, delay_s: float) -> Trial:
        """Run a trial to its end; kill -9 a role's first process some seconds after the first step."""
        time.sleep(delay_s)
        given = {
            **OPTIONS,
            "trial_name": name,
            "cluster.fileroot": self.folder / "trials",
            "actor.path": self.folder / "base",
            "train_dataset.path": self.folder / "task" / "train.jsonl",
            **options,
        }
        words = (f"{key}={value}" for key, value in given.items())
        done = hpc_rl("submit", "--json", *words, cwd=self.folder)
        trial = Trial(Path(json.loads(done.stdout)["dir"]))
        began = wait_for(trial, lambda: load_history(trial).steps)[0]["time"]
        for seconds, role in kills:
            wait_for(trial, lambda at=began + seconds: time.time() >= at)
            kill_newest(trial, role)
        wait_for(trial, lambda: find_times(trial)[1])
        print(name, json.dumps(measure(trial)), flush=True)
        return trial


def wait_for(trial: Trial, get: Callable[[], Any]) -> Any:
    """Return what `get` returns, as soon as that is true."""
    deadline = time.monotonic() + extend(600)
    while not (found := get()):
        assert time.monotonic() < deadline, logs_of(trial)
        note_staleness(trial)
        time.sleep(0.2)
    return found


def note_staleness(trial: Trial) -> dict[str, dict[int, int]]:
    """Return the staleness of the groups of each batch so far; the trial deletes the seals of old batches."""
    path = trial.dir / "noted_staleness.json"
    noted = load_object(path)
    noted |= {str(step): dict(seal.staleness) for step, seal in load_seals(trial.rollout).items()}
    path.write_text(json.dumps(noted))
    return noted


def kill_newest(trial: Trial, role: str) -> None:
    """Kill the newest process of a role's first unit, by its record."""
    paths = trial.attempts.glob(f"*/processes/{role}-0.*-rank0.json")
    newest = max(paths, key=lambda path: path.stat().st_mtime)
    with suppress(ProcessLookupError):
        os.kill(load_object(newest)["pid"], signal.SIGKILL)


def find_times(trial: Trial) -> tuple[float, float | None]:
    """Return the times at which the script of the only job began and ended, the latter if it has."""
    lines = [one for path in trial.jobs.glob("*.state") for one in load_job_state(trial, path.stem)]
    ends = [one.time for one in lines if one.event is JobEvent.ENDED]
    return min((one.time for one in lines), default=0.0), max(ends, default=None)


def measure(trial: Trial) -> dict[str, Any]:
    """Return what the simulator predicts, from the files of a trial."""
    history, (begun, ended) = load_history(trial), find_times(trial)
    makespan_s = (ended or 0.0) - begun
    ages: Counter[int] = Counter()
    for batch in note_staleness(trial).values():
        ages.update({int(age): count for age, count in batch.items()})
    total = ages.total() or 1
    later = history.steps[len(history.steps) // 4 :]
    names = ("wait_s", "train_s", "publish_s", "save_s")
    return {
        "makespan_s": makespan_s,
        "tokens_per_s": sum(row["num_tokens"] for row in history.steps) / makespan_s,
        "steady_tokens_per_s": sum(row["num_tokens"] for row in later[1:])
        / (later[-1]["time"] - later[0]["time"]),
        "step_s": statistics.fmean(row["step_s"] for row in history.steps[1:]),
        "staleness": {str(age): count / total for age, count in sorted(ages.items())},
        "parts_s": {n: statistics.fmean(row.get(n, 0.0) for row in history.steps[1:]) for n in names},
        "first_row_s": history.steps[0]["time"] - begun,
    }


def predict(trial: Trial, measured: Sequence[Trial], kills: Kills) -> dict[str, Any]:
    """Return what `hpc-rl simulate --from` predicts. Kills count from the first row, as in the trial."""
    case = make_case(prepare.load_stored(trial, []), measured)
    first_row_s = run(case.setup, case.costs).first_row_s
    faults = Faults(kills=tuple(Kill(at_s=first_row_s + seconds, role=role) for seconds, role in kills))
    results = sorted(
        (run(case.setup, case.costs, faults, seed) for seed in range(NUM_DRAWS)),
        key=lambda one: one.makespan_s,
    )
    middle: Result = results[len(results) // 2]
    names = ("makespan_s", "tokens_per_s", "step_s", "parts_s")
    found = middle.to_json()
    return {name: found[name] for name in names} | {
        "staleness": found["staleness"],
        "steady_tokens_per_s": middle.steady_tokens_per_s,
        "first_row_s": middle.first_row_s,
    }


def compare(measured: dict[str, Any], predicted: dict[str, Any], kills: Kills) -> dict[str, float]:
    """Return relative errors; of the histograms half the sum of the differences of the shares."""
    names = ["makespan_s", "tokens_per_s", "step_s"]
    if not kills:  # else a restart is a part of what would be steady
        names.append("steady_tokens_per_s")
    ages = measured["staleness"].keys() | predicted["staleness"].keys()
    apart = sum(abs(measured["staleness"].get(a, 0) - predicted["staleness"].get(a, 0)) for a in ages) / 2
    return {**{name: predicted[name] / measured[name] - 1 for name in names}, "staleness": apart}


def run_trials(workplace: Workplace, only: list[str]) -> dict[str, Any]:
    """Return measurements, predictions and errors of each trial, and the costs."""
    wanted = {name: one for name, one in (MEASURED | PREDICTED).items() if not only or name in only}
    trials = workplace.run_all(wanted)
    sources = [trial for name, trial in trials.items() if name in MEASURED]
    rows = {}
    for name, trial in trials.items():
        measured, predicted = measure(trial), predict(trial, sources, wanted[name][1])
        errors = compare(measured, predicted, wanted[name][1])
        row = {"calibrates": name in MEASURED, "options": wanted[name][0], "kills": wanted[name][1]}
        rows[name] = row | {"measured": measured, "predicted": predicted, "errors": errors}
        print(name, json.dumps({key: round(value, 3) for key, value in errors.items()}), flush=True)
    new = [abs(error) for row in rows.values() if not row["calibrates"] for error in row["errors"].values()]
    return {"trials": rows, "largest_error_of_the_predicted": max(new, default=None)}


def run_splits(workplace: Workplace) -> dict[str, Any]:
    """Return the rates of all splits, and the split that `tune` names after the bad one."""
    wanted = {f"s{number}": ({SPLIT: split, **OF_SPLITS}, ()) for number, split in enumerate(SPLITS)}
    trials = dict(zip(SPLITS, workplace.run_all(wanted).values(), strict=True))
    done = hpc_rl("tune", trials[BAD_SPLIT].dir, "--json", cwd=workplace.folder)
    advice = json.loads(done.stdout)["advice"]
    named = next((one["value"] for one in advice if one["option"] == SPLIT), BAD_SPLIT)
    measured = {split: measure(trial) for split, trial in trials.items()}
    predicted = {split: predict(trial, [trials[BAD_SPLIT]], ()) for split, trial in trials.items()}
    rates = {split: one["steady_tokens_per_s"] for split, one in measured.items()}
    print(rates, "tune names", named, flush=True)
    found = {"bad": BAD_SPLIT, "named": named, "of_best": rates[named] / max(rates.values())}
    return {**found, "rates": rates, "advice": advice, "measured": measured, "predicted": predicted}


def run_scale() -> dict[str, Any]:
    """Return CPU seconds, memory and outcome of large simulations, and the load of the supervisor."""
    rows: dict[int, Any] = {}
    for num_nodes in (100, 1_000, 10_000):
        ranks_nodes = num_nodes // 4
        prompts = max(64, 2 * num_nodes)
        setup = Setup(
            rules=Rules(batch_size=prompts, max_concurrent=4 * prompts, eta=2),
            n_samples=8,
            max_new_tokens=8192,
            total_steps=1000,
            units=make_units(num_nodes - ranks_nodes, 8 * ranks_nodes, per_node=8),
            n_nodes=num_nodes,
            n_gpus_per_node=8,
            update_mode="xccl",
            recover_retries=20,
            save=FrequencyConfig(freq_steps=10),
            async_save=True,
        )
        begun = time.process_time()
        found = run(setup, Costs(train_ranks=8 * ranks_nodes), Faults(mtbf_s=30 * 86400.0))
        cpu_s = time.process_time() - begun
        memory_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        rows[num_nodes] = {"cpu_s": cpu_s, "largest_memory_mb": memory_mb, **found.to_json()}
        outcome = f"{found.steps} steps, {found.node_failures} failures"
        print(f"{num_nodes} nodes: {cpu_s:.1f} s of CPU time, {memory_mb:.0f} MB, {outcome}", flush=True)
    loads = {}
    for num_nodes in rows:
        with tempfile.TemporaryDirectory(prefix="scale-") as folder:
            loads[num_nodes] = measure_apart("supervisor", Path(folder), num_nodes)
        print(f"supervisor of {num_nodes} nodes: {json.dumps(loads[num_nodes])}", flush=True)
    return {"simulations": rows, "supervisor": loads}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("trials", "split", "scale"))
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--beside", type=int, default=1, metavar="N", help="trials that run at a time")
    parser.add_argument("--dir", type=Path, help="keep all files here")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    about = describe_run()
    if args.what == "scale":
        record = run_scale()
    else:
        with tempfile.TemporaryDirectory(prefix="simulator-") as folder:
            workplace = Workplace((args.dir or Path(folder)).absolute(), args.beside)
            with Cluster.private(find_or_fetch(), num_nodes=2 * args.beside, num_gpus=0) as cluster:
                for name in [name for name in os.environ if name.startswith(LEAKS)]:
                    del os.environ[name]
                os.environ.update(cluster.client_env)
                record = run_splits(workplace) if args.what == "split" else run_trials(workplace, args.only)
                record["slurm"] = ".".join(map(str, cluster.slurm.version))
    if args.out:
        write_record(args.out, {**about, **record})


if __name__ == "__main__":
    main()
