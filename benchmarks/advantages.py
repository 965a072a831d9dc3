"""Memory and CPU time of the credit of a train batch of long rows, on ragged rows and as a rectangle.

    python benchmarks/advantages.py [--pairs 3] [--size large] [--out benchmarks/results/advantages.json]

A rank of eight computes the credit of 2,048 rows of 32,768 tokens, cuts the mini-batches and reads the credit
of its own rows, as PolicyData does for the recipe. Cases: advantages of groups; also normalized over the
batch; with a discount; with KL rewards of known log-probabilities. `rectangle` is the way of algorithms whose
`compute_credit` is a function of [B, T], and was the way of all. Peak memory is the one of the process less
the memory with the inputs; with a discount or KL rewards, 0.27 GB of it are the result. The sums of the credit
of both ways are compared.

Each run has a process of its own, because a peak can't be taken back. Both ways alternate; ratios are taken
within a pair. One thread, CPU seconds.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from run_record import describe_run, spread, write_record

from hpc_rl.algorithms import grpo
from hpc_rl.algorithms.correction import Correction
from hpc_rl.config.options.dataset import PromptDatasetConfig
from hpc_rl.config.options.experiment import GRPOConfig
from hpc_rl.config.options.inference import GenerationHyperparameters
from hpc_rl.config.options.training import NormConfig, PPOActorConfig
from hpc_rl.core.types import Batch, Trajectory, TrajectoryGroup
from hpc_rl.engines.shared.mesh import Mesh
from hpc_rl.stats.tracker import Tracker
from hpc_rl.trainers.algorithm_options import make_options
from hpc_rl.trainers.minibatches import Known
from hpc_rl.trainers.policy_data import PolicyData

GROUP_SIZE, NUM_RANKS, PROMPT = 8, 8, 512
SIZES = {"large": (2048, 32_768), "small": (256, 32_768)}  # rows, tokens of each
CASES: dict[str, dict[str, Any]] = {
    "groups": {},
    "adv_norm": {"adv_norm": NormConfig()},
    "discount": {"discount": 0.999, "gae_lambda": 0.99},
    "kl_rewards": {"kl_ctl": 0.1},
}
WAYS = ("ragged", "rectangle")


def make_rows(num_rows: int, length: int) -> tuple[Batch, Known]:
    """Return rows that share their arrays: only the credit takes memory."""
    random = np.random.default_rng(0)
    mask = np.arange(length) >= PROMPT
    logprobs = np.where(mask, -random.random(length), 0.0).astype(np.float32)
    reference = np.where(mask, -random.random(length), 0.0).astype(np.float32)
    versions = np.where(mask, 0, -1).astype(np.int32)
    ids = np.zeros(length, np.int32)
    rows = [
        Trajectory(ids, mask, logprobs, versions, versions, reward, "stop")
        for reward in random.random(num_rows).tolist()
    ]
    parts = range(0, num_rows, GROUP_SIZE)
    groups = [TrajectoryGroup(number, rows[at : at + GROUP_SIZE]) for number, at in enumerate(parts)]
    return Batch(1, groups), Known(None, dict.fromkeys(range(num_rows), reference))


def make_data(case: str, way: str, num_rows: int) -> PolicyData:
    norm = NormConfig(mean_level="group", std_level="group")
    config = GRPOConfig(
        experiment_name="e",
        trial_name="t",
        train_dataset=PromptDatasetConfig(path="x.jsonl", batch_size=num_rows // GROUP_SIZE),
        gconfig=GenerationHyperparameters(n_samples=GROUP_SIZE),
        actor=PPOActorConfig(path="m", **{"kl_ctl": 0.0, "reward_norm": norm, **CASES[case]}),
    )
    algorithm = grpo.GRPO
    if way == "rectangle":
        algorithm = replace(algorithm, compute_credit=lambda *given: grpo.compute_credit(*given))
    run: Any = SimpleNamespace(
        config=config, stats=Tracker(), engine=SimpleNamespace(mesh=Mesh(0, NUM_RANKS))
    )
    return PolicyData(run, algorithm, make_options(algorithm, config), Correction(), None)


def compute(data: PolicyData, batch: Batch, known: Known | None) -> float:
    """Do what a rank does for a step, but for its columns. Returns the sum of the squares of its credit."""
    scored = data.select_groups(data.score(batch))
    rows = scored.rows
    rewards = data.make_rewards(scored, known)
    credit = data.compute_credit(rows, rewards, known)
    minibatches = data.cut_minibatches(rows, rewards, credit, None, False)
    own = (credit[i] for one in minibatches for i in one.rows[0])
    return float(sum(np.square(row, dtype=np.float64).sum() for row in own))


def measure(case: str, way: str, size: str) -> dict[str, float]:
    """Run in a process of its own: a peak can't be taken back."""
    torch.set_num_threads(1)
    num_rows, length = SIZES[size]
    for count, tokens in ((2 * GROUP_SIZE, 2 * PROMPT), (num_rows, length)):  # first what is made once
        data = make_data(case, way, count)
        batch, known = make_rows(count, tokens)
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
        before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
        begin = time.process_time()
        total = compute(data, batch, known if case == "kl_rewards" else None)
        took = time.process_time() - begin
    status = Path("/proc/self/status").read_text()
    peak = int(status.split("VmHWM:")[1].split()[0]) * 1024
    return {"peak_mb": (peak - before) / 1e6, "cpu_s": took, "sum": total}


def compare(cases: list[str], size: str, pairs: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for case in cases:
        runs: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
        for number in range(pairs):
            for way in WAYS if number % 2 == 0 else WAYS[::-1]:
                command = [sys.executable, __file__, "--case", case, "--way", way, "--size", size]
                done = subprocess.run(command, capture_output=True, text=True)
                if done.returncode:
                    raise SystemExit(f"{case} {way}: {done.stderr[-2000:]}")
                runs[way].append(json.loads(done.stdout.splitlines()[-1]))
                print(case, way, runs[way][-1], flush=True)
        sums = [run["sum"] for way in WAYS for run in runs[way]]
        if max(sums) > (1 + 1e-6) * min(sums):
            raise SystemExit(f"the ways differ in {case}: {sums}")
        found[case] = {
            **{
                way: {key: spread([run[key] for run in runs[way]]) for key in ("peak_mb", "cpu_s")}
                for way in WAYS
            },
            "rectangle_over_ragged": {
                key: spread(
                    [other[key] / one[key] for one, other in zip(*(runs[way] for way in WAYS), strict=True)]
                )
                for key in ("peak_mb", "cpu_s")
            },
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=3, help="runs of each way in each case")
    parser.add_argument("--size", choices=tuple(SIZES), default="large", help="2,048 or 256 rows")
    parser.add_argument("--cases", nargs="+", choices=tuple(CASES), default=[*CASES])
    parser.add_argument("--case", choices=tuple(CASES), help=argparse.SUPPRESS)  # in a process of its own
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.case:
        print(json.dumps(measure(args.case, args.way, args.size)))
        return
    rows, tokens = SIZES[args.size]
    result = {
        **describe_run("torch", "numpy"),
        "pairs": args.pairs,
        "shape": {"rows": rows, "tokens": tokens, "ranks": NUM_RANKS},
        "cases": compare(args.cases, args.size, args.pairs),
    }
    if args.out:
        write_record(args.out, result)


if __name__ == "__main__":
    main()
