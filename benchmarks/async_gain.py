"""The gain of asynchronous over synchronous training, as a share of its bound, on a virtual clock.

    python benchmarks/async_gain.py [--devices 64] [--out benchmarks/results/async_gain.json]

Synchronous training has all devices for generation, and then for training. A step takes G_tail + T, of which
G_tail ends with the longest completion. Asynchronous training divides the same devices. No scheduler can need
less than G_full + T on all devices, where every slot of every server is busy in G_full. So the gain is at most
(G_tail + T) / (G_full + T) (docs/scale.md). Both sides get the same lengths, drawn from a lognormal distribution
with the parameter `sigma`, and are run by the trial's own sequencer on simulated servers (hpc_rl.simulate). The
asynchronous side has its best division of the devices.
"""

import argparse
import math
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from run_record import describe_run, write_record

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "helpers")]

from simulated_trials import make_units  # noqa: E402
from toy_plans import toy_unit  # noqa: E402

from hpc_rl.rollout.sequencer import Rules  # noqa: E402
from hpc_rl.simulate.costs import Costs  # noqa: E402
from hpc_rl.simulate.result import run  # noqa: E402
from hpc_rl.simulate.setup import Setup  # noqa: E402

N_SAMPLES, LONGEST, MEDIAN = 16, 32_768, 4096  # of a prompt; tokens
ETA = 4  # rollout.max_head_offpolicyness
CASES = [(num_prompts, sigma) for num_prompts in (128, 256, 512) for sigma in (0.0, 0.6, 1.0)]


def make_costs(sigma: float, devices: int) -> Costs:
    """Return the costs of a model of 8 billion parameters, whose training time falls with the devices."""
    drawn = random.Random(0)
    lengths = tuple(max(1, round(MEDIAN * math.exp(drawn.gauss(0.0, sigma)))) for _ in range(4096))
    return replace(Costs(), lengths=lengths, train_ranks=devices, train_scaling=1.0)


def make_setup(num_prompts: int, devices: int, eta: int, **more: Any) -> Setup:
    rules = Rules(batch_size=num_prompts, max_concurrent=(eta + 1) * num_prompts, eta=eta)
    return Setup(
        rules=rules, n_samples=N_SAMPLES, max_new_tokens=LONGEST, total_steps=16 if eta else 8, units=(),
        n_nodes=devices // 8, n_gpus_per_node=8, update_mode="xccl", max_sequences=16_000, **more,
    )  # fmt: skip


def measure(num_prompts: int, sigma: float, devices: int) -> dict[str, Any]:
    """Return the steps of both sides, the gain, its bound, and the share that is reached."""
    costs = make_costs(sigma, devices)
    servers = (toy_unit("server", index=i, nodes=[i // 8], gpus_per_task=1) for i in range(devices))
    units = (*servers, *make_units(0, devices, per_node=8))
    sync = run(replace(make_setup(num_prompts, devices, 0, shares_gpus=True), units=units), costs)
    capped = costs.cap_lengths(LONGEST)
    num_tokens = num_prompts * N_SAMPLES * (capped.mean_length + costs.prompt_tokens)
    steps: dict[int, float] = {}
    for num_servers in range(devices // 8, devices, max(1, devices // 32)):
        units = make_units(num_servers, devices - num_servers, per_node=1)
        setup = replace(make_setup(num_prompts, devices, ETA, shares_gpus=False), units=units)
        steps[num_servers] = num_tokens / run(setup, costs).steady_tokens_per_s
    best = min(steps, key=steps.__getitem__)
    slots = costs.server_sequences
    prefill_s = num_prompts * costs.prompt_tokens * costs.prefill_token_s
    made = num_prompts * N_SAMPLES * capped.mean_length
    full_s = (made * costs.compute_token_s(slots) / slots + prefill_s) / devices
    train_s = costs.compute_train_s(num_tokens, devices)
    bound = (sync.parts_s["wait_s"] + train_s) / (full_s + train_s)
    gain = sync.step_s / steps[best]
    return {
        "prompts": num_prompts,
        "sigma": sigma,
        "sync_s": sync.step_s,
        "generation_with_tail_s": sync.parts_s["wait_s"],
        "generation_full_s": full_s,
        "training_s": train_s,
        "async_s": steps[best],
        "servers": best,
        "gain": gain,
        "bound": bound,
        "share": gain / bound,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", type=int, default=64, help="GPUs of the cluster, a multiple of 8")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.devices < 16 or args.devices % 8:
        parser.error(f"--devices {args.devices}: use a multiple of 8, 16 or more")
    about, found = describe_run(), []
    for num_prompts, sigma in CASES:
        found.append(measure(num_prompts, sigma, args.devices))
        print({name: round(value, 2) for name, value in found[-1].items()}, flush=True)
    if args.out:
        write_record(args.out, {**about, "devices": args.devices, "cases": found})


if __name__ == "__main__":
    main()
