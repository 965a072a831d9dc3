"""What evaluations cost training: trials without them, beside training and pausing it, alternately.

    python benchmarks/evaluation.py [--rounds 3] [--steps 60] [--out benchmarks/results/evaluation.json]

Each round runs the toy on this machine once in each way: `none` without held-out rows; `share` with two
held-out sets of 8 rows every 5 steps, beside training on one of two servers; `pool` with a server of the pool
`eval`; `blocking` with all servers while training pauses. A reward takes REWARD_S of time without the CPU, as
generation on GPUs does. The measure is the mean of `wait_s + evaluate_s` of a step and of `step_s`, and their
ratio to `none` of the same round. Steps before the first evaluated one are left out.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from run_record import describe_run, write_record

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "faults"), str(ROOT / "tests" / "helpers")]

from kill_anything import READY, Killed, make_workplace  # noqa: E402

from hpc_rl.stats.read import load_history  # noqa: E402

REWARD_S = 1.0
EVERY = 5
REWARD = f"""import asyncio


async def score(prompt, completion, **columns):
    await asyncio.sleep({REWARD_S})
    return sum(map(ord, completion)) % 7 / 7
"""
SETS = {"evaluator.freq_steps": EVERY, "evaluator.sets.second.n_samples": 2}
WAYS: dict[str, dict[str, object]] = {
    "none": {
        "allocation_mode": "embedded:d2+fsdp:d1",
        "valid_dataset": "null",
        "evaluator.freq_steps": "null",
    },
    "share": {"allocation_mode": "embedded:d2+fsdp:d1", **SETS},
    "pool": {"allocation_mode": "embedded:d2+embedded[eval]:d1+fsdp:d1", **SETS},
    "blocking": {"allocation_mode": "embedded:d2+fsdp:d1", "evaluator.blocking": True, **SETS},
}


def measure(folder: Path, way: str, number: int, num_steps: int) -> dict[str, float]:
    """Run one trial; return its mean seconds of a step."""
    options = {**READY, "recover.freq_steps": 1000, **WAYS[way]}
    if way != "none":
        options["evaluator.sets.second.path"] = folder / "task" / "heldout.jsonl"
    one = Killed(folder, f"{way}-{number}", options, total_steps=num_steps)
    try:
        one.submit()
        one.until(lambda: one.over)
    finally:
        one.close()
    rows = [row for row in load_history(one.trial).steps if EVERY < row["step"] < num_steps]
    waits = [row["wait_s"] + row.get("evaluate_s", 0.0) for row in rows]
    return {
        "wait_and_evaluate_s": statistics.fmean(waits),
        "step_s": statistics.fmean(row["step_s"] for row in rows),
    }


def compare(rounds: list[dict[str, dict[str, float]]]) -> dict[str, Any]:
    """Return, per way, the median seconds, and the median ratio to `none` of the same round."""
    result: dict[str, Any] = {}
    for way in WAYS:
        for name in ("wait_and_evaluate_s", "step_s"):
            ratios = [one[way][name] / one["none"][name] for one in rounds]
            seconds = statistics.median(one[way][name] for one in rounds)
            result.setdefault(way, {})[name] = {"median": seconds, "ratio": statistics.median(ratios)}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "evaluation.json")
    args = parser.parse_args()
    about = describe_run("torch", "transformers")
    with tempfile.TemporaryDirectory() as place:
        folder = make_workplace(Path(place))
        (folder / "some_reward.py").write_text(REWARD)
        rounds = []
        for number in range(args.rounds):
            rounds.append({way: measure(folder, way, number, args.steps) for way in WAYS})
            print(json.dumps(rounds[-1]), flush=True)
    found = compare(rounds)
    write_record(args.out, {**about, "rounds": rounds, **found})
    for way, one in found.items():
        words = [f"{name} {value['median']:.4f} s, ratio {value['ratio']:.3f}" for name, value in one.items()]
        print(f"{way}: {'; '.join(words)}")


if __name__ == "__main__":
    main()
