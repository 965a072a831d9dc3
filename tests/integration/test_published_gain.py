"""The gain of asynchronous training that AReaL published: 41.0 hours became 14.8 (arXiv 2505.24298).

Published: a model of 1.5 billion parameters, 16 nodes of 8 GPUs, 1,000 steps, completions of up to 32,768
tokens, staleness of up to 4. So a synchronous step took 147.6 s. Synchronous training has all devices for
generation and training in turn; asynchronous training has the best of some splits of them.

Not known here are the size of the batch, the lengths and the speed of a GPU. Each has a range. The middle of
the decode speeds was added when the gains at both ends were known. The mean length is not free: in each case
the synchronous step takes the published time with it. The asynchronous time is predicted.
"""

import math
import random
from dataclasses import dataclass, replace

import pytest
from simulated_trials import make_units
from toy_plans import toy_unit

from hpc_rl.rollout.sequencer import Rules
from hpc_rl.simulate.costs import Costs
from hpc_rl.simulate.result import run
from hpc_rl.simulate.setup import Setup

PUBLISHED = 41.0 / 14.8
SYNC_STEP_S = 41.0 * 3600 / 1000
SYNC = Setup(
    rules=Rules(batch_size=1, max_concurrent=1, eta=0),
    n_samples=16,
    max_new_tokens=32768,
    total_steps=8,
    units=(),
    n_nodes=16,
    n_gpus_per_node=8,
    shares_gpus=True,
    update_mode="xccl",
    max_sequences=16_000,
)
# of 1.5 billion parameters: the defaults of 8 billion, scaled
SMALL = (
    Costs()
    .fit_model(3.1e9, 3.1e9, 7 * 3.1e9)
    .replace_measured("its size", model_bytes=3.1e9, num_tensors=338)
)


@dataclass(frozen=True)
class Case:
    """Values that were not published; `decode_s` is of a decode iteration with few sequences."""

    num_prompts: int
    sigma: float  # of the logarithm of the lengths
    decode_s: float
    median: int  # tokens, fitted to SYNC_STEP_S


# At less than 2 ms a GPU can hardly read the weights and start the kernels of all layers; at more than 4 ms the
# longest completion alone takes nearly the published time of a step.
CASES = (
    Case(512, 0.6, 0.002, 13490),
    Case(512, 0.6, 0.003, 7285),
    Case(512, 0.6, 0.004, 3759),
    Case(512, 1.0, 0.002, 11763),
    Case(512, 1.0, 0.003, 5303),
    Case(512, 1.0, 0.004, 1361),
    Case(128, 0.6, 0.004, 7538),
    Case(128, 1.0, 0.004, 5173),
)
SPEEDS = (0.002, 0.003, 0.004)


def make_costs(case: Case, devices: int) -> Costs:
    drawn = random.Random(0)
    lengths = tuple(max(1, round(case.median * math.exp(drawn.gauss(0.0, case.sigma)))) for _ in range(4096))
    return replace(SMALL, lengths=lengths, decode_s=case.decode_s, train_ranks=devices, train_scaling=1.0)


def run_sync(case: Case, devices: int, base: Setup, costs: Costs) -> float:
    """Return the seconds of a synchronous step."""
    servers = (toy_unit("server", index=i, nodes=[i // 8], gpus_per_task=1) for i in range(devices))
    rules = Rules(batch_size=case.num_prompts, max_concurrent=case.num_prompts, eta=0)
    units = (*servers, *make_units(0, devices, per_node=8))
    return run(replace(base, rules=rules, units=units), costs).step_s


def run_async(case: Case, devices: int, base: Setup, costs: Costs) -> float:
    """Return the seconds of an asynchronous step with the best of three splits."""
    rules = Rules(batch_size=case.num_prompts, max_concurrent=5 * case.num_prompts, eta=4)
    splits = (
        make_units(devices * part // 8, devices - devices * part // 8, per_node=8) for part in (4, 5, 6)
    )
    base = replace(base, rules=rules, shares_gpus=False, total_steps=2 * base.total_steps)
    rate = max(run(replace(base, units=units), costs).steady_tokens_per_s for units in splits)
    mean = costs.cap_lengths(base.max_new_tokens).mean_length + costs.prompt_tokens
    return case.num_prompts * base.n_samples * mean / rate


def test_the_published_gain_is_within_the_range():
    gains = {}
    for case in CASES:
        costs = make_costs(case, 128)
        sync_s = run_sync(case, 128, SYNC, costs)
        assert sync_s == pytest.approx(SYNC_STEP_S, rel=0.03), case
        gains[case] = sync_s / run_async(case, 128, SYNC, costs)
    assert min(gains.values()) < PUBLISHED < max(gains.values())
    # the speed of a decode iteration with few sequences decides: the longest completion takes so long
    assert all(
        gain > PUBLISHED if case.decode_s > 0.003 else gain < PUBLISHED for case, gain in gains.items()
    )


def test_without_a_tail_and_with_full_servers_nothing_is_gained():
    case = Case(512, 0.0, 0.004, 8192)
    base = replace(SYNC, n_nodes=8, max_sequences=8_000)
    costs = make_costs(case, 64)
    assert run_sync(case, 64, base, costs) / run_async(case, 64, base, costs) == pytest.approx(1.0, abs=0.1)
