"""Predictions of the simulator, and the trials that they predict: toys with artificial durations.

    python benchmarks/simulator.py trials [--only NAME …] [--out FILE]
    python benchmarks/simulator.py split  [--out FILE]
    python benchmarks/simulator.py scale  [--out FILE]

`trials` runs ten trials with the real service and real files. A decode step of a server takes a time that
grows with its rows, an update a time that grows with its tokens (tests/helpers/timed_algorithm.py). Costs are
measured in five of them; the others are predicted: throughput, staleness and makespan, some with kills.
`split` runs a badly divided trial, asks `tune` for a split, and runs every split of the same four processes.
`scale` times simulations of 1,000 steps on up to 10,000 nodes whose mean time between failures is 30 days.
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
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "helpers"), str(ROOT / "tests" / "slurm")]

from patience import extend  # noqa: E402
from simulated_trials import make_units  # noqa: E402
from toy_trials import hpc_rl, make_toy  # noqa: E402

from hpc_rl.config.load.stored import from_dict  # noqa: E402
from hpc_rl.config.options.operations import FrequencyConfig  # noqa: E402
from hpc_rl.core.trial import Trial, load_object  # noqa: E402
from hpc_rl.plan.schema import Plan  # noqa: E402
from hpc_rl.rollout.batch_log.seals import load_seals  # noqa: E402
from hpc_rl.rollout.sequencer import Rules  # noqa: E402
from hpc_rl.simulate.calibrate import calibrate  # noqa: E402
from hpc_rl.simulate.costs import Costs  # noqa: E402
from hpc_rl.simulate.result import run  # noqa: E402
from hpc_rl.simulate.setup import Faults, Kill, Setup, make_setup  # noqa: E402
from hpc_rl.stats.read import load_history  # noqa: E402

STEPS = 16
OPTIONS = {
    "experiment_name": "simulated",
    "total_train_steps": STEPS,
    "cluster.n_gpus_per_node": 0,
    "actor.algorithm": "timed_algorithm:TIMED",
    "actor.algorithm_args": "{step_s: 0.3, token_s: 0.0015}",
    "actor.gradient_checkpointing": False,
    "actor.optimizer.lr": 1e-7,  # lengths stay as they are
    "actor.reward_norm.mean_level": "group",
    "actor.reward_norm.std_level": "group",
    "gconfig.n_samples": 4,
    "gconfig.max_new_tokens": 48,
    "rollout.reward_fn": "exact_match",
    "rollout.num_workers": 1,
    "recover.mode": "auto",
    "recover.freq_steps": 5,
    "recover.retries": 20,
    "train_dataset.batch_size": 16,
    "launcher.inference_server_env_vars": "HPC_RL_TEST_DECODE_S=0.03:0.002",
    "launcher.inference_server_cpus_per_gpu": 1,
    "launcher.inference_server_mem_per_gpu": 2048,
    "launcher.trainer_cpus_per_gpu": 1,
    "launcher.trainer_mem_per_gpu": 2048,
    "launcher.rollout_cpus": 1,
    "launcher.rollout_mem_mb": 2048,
}
SPLIT, AGE, ROOM = "allocation_mode", "rollout.max_head_offpolicyness", "rollout.max_concurrent_rollouts"
HARD = {"rollout.staleness_bound": "hard"}
# name -> options, and kills (seconds after the first row of metrics, role)
MEASURED: dict[str, tuple[dict[str, Any], tuple[tuple[float, str], ...]]] = {
    "m1": ({SPLIT: "embedded:d1+fsdp:d1", AGE: 1, ROOM: 16}, ()),
    "m2": ({SPLIT: "embedded:d2+fsdp:d1", AGE: 2, ROOM: 32}, ()),
    "m3": ({SPLIT: "embedded:d1+fsdp:d2", AGE: 1, ROOM: 32}, ()),
    "m4": ({SPLIT: "embedded:d2+fsdp:d2", AGE: 0, ROOM: 16}, ()),
    "m5": ({SPLIT: "embedded:d1+fsdp:d1", AGE: 1, ROOM: 32}, ((10.0, "trainer"),)),
}
PREDICTED: dict[str, tuple[dict[str, Any], tuple[tuple[float, str], ...]]] = {
    "p1": ({SPLIT: "embedded:d2+fsdp:d2", AGE: 2, ROOM: 32}, ()),
    "p2": ({SPLIT: "embedded:d1+fsdp:d1", AGE: 0, ROOM: 16}, ()),
    "p3": ({SPLIT: "embedded:d3+fsdp:d1", AGE: 1, ROOM: 48, **HARD}, ()),
    "p4": ({SPLIT: "embedded:d2+fsdp:d1", AGE: 1, ROOM: 32}, ((8.0, "trainer"), (30.0, "trainer"))),
    "p5": ({SPLIT: "embedded:d2+fsdp:d2", AGE: 1, ROOM: 24}, ((6.0, "server"), (16.0, "trainer"))),
}
SPLITS = ("embedded:d1+fsdp:d3", "embedded:d2+fsdp:d2", "embedded:d3+fsdp:d1")


class Workplace:
    """A folder from which toy trials are submitted, one after the other."""

    def __init__(self, folder: Path) -> None:
        self.folder = make_toy(folder, "base")
        (folder / "timed_algorithm.py").write_text(
            (ROOT / "tests" / "helpers" / "timed_algorithm.py").read_text()
        )

    def run(self, name: str, options: dict[str, Any], kills: tuple[tuple[float, str], ...] = ()) -> Trial:
        """Run a trial to its end; kill -9 a role's first process some seconds after the first step."""
        given = {
            **OPTIONS,
            "trial_name": name,
            "cluster.fileroot": self.folder / "trials",
            "actor.path": self.folder / "base",
            "train_dataset.path": self.folder / "task" / "train.jsonl",
            "launcher.type": "local",
            **options,
        }
        done = hpc_rl(
            "submit", "--json", *(f"{key}={value}" for key, value in given.items()), cwd=self.folder
        )
        trial = Trial(Path(json.loads(done.stdout)["dir"]))
        began = self._wait(trial, lambda: load_history(trial).steps)[0]["time"]
        for seconds, role in kills:
            time.sleep(max(0.0, began + seconds - time.time()))
            kill_newest(trial, role)
        self._wait(trial, lambda: end_of(trial))
        return trial

    def _wait(self, trial: Trial, get: Any) -> Any:
        deadline = time.monotonic() + extend(600)
        while not (found := get()):
            assert time.monotonic() < deadline, f"{trial.dir} does not get on"
            time.sleep(0.2)
        return found


def kill_newest(trial: Trial, role: str) -> None:
    """Kill the newest process of a role's first unit, by its record."""
    paths = trial.attempts.glob(f"*/processes/{role}-0.*-rank0.json")
    newest = max(paths, key=lambda path: path.stat().st_mtime)
    with suppress(ProcessLookupError):
        os.kill(load_object(newest)["pid"], signal.SIGKILL)


def end_of(trial: Trial) -> float | None:
    """Return the time at which the job script of the only job ended."""
    for path in trial.jobs.glob("*.state"):
        for line in path.read_text().splitlines():
            if '"ended"' in line:
                return float(json.loads(line)["time"])
    return None


def begin_of(trial: Trial) -> float:
    lines = [
        json.loads(line) for path in trial.jobs.glob("*.state") for line in path.read_text().splitlines()
    ]
    return float(min(line["time"] for line in lines))


def measure(trial: Trial) -> dict[str, Any]:
    """Return what the simulator predicts, from the files of a trial."""
    history, makespan_s = load_history(trial), (end_of(trial) or 0.0) - begin_of(trial)
    ages: dict[int, int] = {}
    for seal in load_seals(trial.rollout).values():
        for age, count in seal.staleness.items():
            ages[age] = ages.get(age, 0) + count
    total = sum(ages.values()) or 1
    tokens = sum(row["num_tokens"] for row in history.steps)
    steady = [row["step_s"] for row in history.steps[1:]]
    later = history.steps[len(history.steps) // 4 :]
    steady_s = later[-1]["time"] - later[0]["time"]
    return {
        "makespan_s": makespan_s,
        "tokens_per_s": tokens / makespan_s,
        "steady_tokens_per_s": sum(row["num_tokens"] for row in later[1:]) / steady_s,
        "step_s": statistics.fmean(steady),
        "staleness": {str(age): count / total for age, count in sorted(ages.items())},
    }


def predict(trial: Trial, costs: Any, kills: tuple[tuple[float, str], ...]) -> dict[str, Any]:
    """Simulate the configuration of a trial. Kills count from the first row, as in the trial."""
    config = from_dict(load_object(trial.config_json))
    setup = make_setup(config, Plan.from_json(load_object(trial.plan_json)))
    plain = run(setup, costs)
    first_row_s = plain.first_row_s
    faults = Faults(kills=tuple(Kill(at_s=first_row_s + seconds, role=role) for seconds, role in kills))
    results = [run(setup, costs, faults, seed) for seed in range(5)]
    middle = sorted(results, key=lambda one: one.makespan_s)[2]
    found = middle.to_json()
    return {name: found[name] for name in ("makespan_s", "tokens_per_s", "step_s", "staleness", "parts_s")}


def compare(measured: dict[str, Any], predicted: dict[str, Any]) -> dict[str, float]:
    """Return relative errors; of the histograms half the sum of the differences of the shares."""
    errors = {name: predicted[name] / measured[name] - 1 for name in ("makespan_s", "tokens_per_s", "step_s")}
    ages = measured["staleness"].keys() | predicted["staleness"].keys()
    apart = (abs(measured["staleness"].get(a, 0) - predicted["staleness"].get(a, 0)) for a in ages)
    return {**errors, "staleness": sum(apart) / 2}


def run_trials(workplace: Workplace, only: list[str]) -> dict[str, Any]:
    trials: dict[str, Trial] = {}
    wanted = {**MEASURED, **PREDICTED}
    for name, (options, kills) in wanted.items():
        if not only or name in only:
            trials[name] = workplace.run(name, options, kills)
            print(name, measure(trials[name]), flush=True)
    rows = {}
    costs = calibrate([trial for name, trial in trials.items() if name in MEASURED])
    for name, trial in trials.items():
        measured, predicted = measure(trial), predict(trial, costs, wanted[name][1])
        row = {"measured": measured, "predicted": predicted, "errors": compare(measured, predicted)}
        rows[name] = row | {"calibrates": name in MEASURED}
        print(name, json.dumps(row["errors"]), flush=True)
    values = {name: getattr(costs, name) for name in costs.origins if name != "lengths"}
    return {"trials": rows, "costs": values}


def run_splits(workplace: Workplace) -> dict[str, Any]:
    """Return the rates of all splits, and the split that `tune` names after the first one."""
    options: dict[str, Any] = {AGE: 2, ROOM: 48}
    trials = {split: workplace.run(f"s{i}", {SPLIT: split, **options}) for i, split in enumerate(SPLITS)}
    first = trials[SPLITS[0]]
    done = hpc_rl("tune", first.dir, "--json", cwd=workplace.folder)
    advice = {one["option"]: one["value"] for one in json.loads(done.stdout)["advice"]}
    rates = {split: measure(trial)["steady_tokens_per_s"] for split, trial in trials.items()}
    named = advice.get(SPLIT, SPLITS[0])
    print(rates, "tune names", named, flush=True)
    return {"rates": rates, "named": named, "of_best": rates[named] / max(rates.values())}


def run_scale() -> dict[str, Any]:
    """Return CPU seconds, memory and outcome of large simulations."""
    rows = {}
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
        cpu_s, memory_mb = (
            time.process_time() - begun,
            resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        )
        rows[num_nodes] = {"cpu_s": cpu_s, "largest_memory_mb": memory_mb, **found.to_json()}
        print(
            num_nodes,
            f"{cpu_s:.1f} s of CPU time, {memory_mb:.0f} MB",
            found.steps,
            found.node_failures,
            flush=True,
        )
    return {"nodes": rows}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("trials", "split", "scale"))
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--dir", type=Path, help="keep all files here")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    load_before = os.getloadavg()
    with tempfile.TemporaryDirectory(prefix="simulator-") as folder:
        if args.what == "scale":
            record = run_scale()
        else:
            workplace = Workplace(args.dir or Path(folder))
            record = run_splits(workplace) if args.what == "split" else run_trials(workplace, args.only)
    record["load"] = {"before": load_before, "after": os.getloadavg()}
    if args.out:
        args.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
