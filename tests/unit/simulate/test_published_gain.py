"""The gain of asynchronous training that AReaL published, in its setting (arXiv 2505.24298: up to 2.77 times).

64 devices, completions of up to 32,768 tokens with a long tail, 16 per prompt. Synchronous training has all
devices for generation and training in turn; asynchronous training has the best of some splits of them.
"""

import math
import random
from dataclasses import replace

import pytest
from simulated_trials import make_units
from toy_plans import toy_unit

from hpc_rl.rollout.sequencer import Rules
from hpc_rl.simulate.costs import Costs
from hpc_rl.simulate.result import run
from hpc_rl.simulate.setup import Setup

DEVICES = 64
PUBLISHED = 2.77
SYNC = Setup(
    rules=Rules(batch_size=1, max_concurrent=1, eta=0),
    n_samples=16,
    max_new_tokens=32768,
    total_steps=10,
    units=(),
    n_nodes=8,
    n_gpus_per_node=8,
    shares_gpus=True,
    update_mode="xccl",
    max_sequences=30_000,
)


def measure_gain(num_prompts: int, sigma: float) -> float:
    drawn = random.Random(0)
    lengths = tuple(round(8192 * math.exp(drawn.gauss(0.0, sigma))) for _ in range(4096))
    costs = Costs(lengths=lengths, train_ranks=DEVICES, train_scaling=1.0)
    shared = (
        *(toy_unit("server", index=i, nodes=[i // 8], gpus_per_task=1) for i in range(DEVICES)),
        *make_units(0, DEVICES, per_node=8),
    )
    sync = replace(SYNC, rules=Rules(batch_size=num_prompts, max_concurrent=num_prompts, eta=0), units=shared)
    rules = Rules(batch_size=num_prompts, max_concurrent=5 * num_prompts, eta=4)
    splits = (make_units(count, DEVICES - count, per_node=8) for count in (32, 40, 48))
    rates = [
        run(replace(SYNC, rules=rules, units=units, shares_gpus=False), costs).steady_tokens_per_s
        for units in splits
    ]
    return max(rates) / run(sync, costs).steady_tokens_per_s


def test_the_published_gain_lies_between_those_of_its_batch_sizes():
    many, few = measure_gain(512, 0.6), measure_gain(128, 0.6)
    assert many < PUBLISHED < few
    # reference: 1.4 to 1.7 and 2.8 to 3.8 in a model of this setting, 1.55 to 2.67 published by verl
    assert many == pytest.approx(1.6, abs=0.3) and few == pytest.approx(3.3, abs=0.6)


def test_without_a_tail_and_with_full_servers_nothing_is_gained():
    assert measure_gain(512, 0.0) == pytest.approx(1.0, abs=0.1)
