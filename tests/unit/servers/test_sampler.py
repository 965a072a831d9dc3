"""The sampler: distribution, filters, log-probabilities, and that a row does not depend on its neighbours."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_rl.servers.embedded.sampler import draw_uniforms, sample


def _sample(logits, uniform, temperature=1.0, top_k=0, top_p=1.0):
    n = len(logits)
    return sample(logits, np.full(n, temperature), np.full(n, top_k), np.full(n, top_p), uniform)


def test_tokens_follow_the_distribution():
    n = 20000
    logits = torch.tensor([0.1, 0.2, 0.3, 0.4]).log().repeat(n, 1)
    tokens, logprobs = _sample(logits, draw_uniforms(np.arange(n, dtype=np.uint64), np.zeros(n, np.int64)))
    assert np.abs(np.bincount(tokens, minlength=4) / n - [0.1, 0.2, 0.3, 0.4]).max() < 0.015
    assert np.allclose(np.exp(logprobs), np.array([0.1, 0.2, 0.3, 0.4])[tokens], atol=1e-6)


def test_uniforms_of_neighbouring_seeds_and_positions_look_independent():
    seeds, positions = np.meshgrid(np.arange(100, dtype=np.uint64), np.arange(100))
    draws = draw_uniforms(seeds.ravel(), positions.ravel())
    assert len(set(draws)) == 10000 and draws.min() >= 0 and draws.max() < 1
    assert abs(draws.mean() - 0.5) < 0.01 and abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 0.03


def test_logprobs_are_at_the_temperature_and_before_the_filters():
    logits = torch.tensor([[1.0, 2.0, 4.0]])
    token, logprob = _sample(logits, np.array([0.0]), temperature=0.5, top_k=1)
    assert token[0] == 2
    assert abs(logprob[0] - torch.log_softmax(logits / 0.5, -1)[0, 2].item()) < 1e-6


def test_greedy_reports_temperature_one():
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    token, logprob = _sample(logits, np.array([0.99]), temperature=0.0)
    assert token[0] == 1 and abs(logprob[0] - torch.log_softmax(logits, -1)[0, 1].item()) < 1e-6


def test_top_k_and_top_p_keep_the_likeliest():
    probs = torch.tensor([0.05, 0.5, 0.15, 0.3])
    draws = np.linspace(0, 0.999, 500)
    logits = probs.log().repeat(500, 1)
    assert set(_sample(logits, draws, top_k=2)[0]) == {1, 3}
    assert set(_sample(logits, draws, top_p=0.79)[0]) == {1, 3}
    assert set(_sample(logits, draws, top_p=0.81)[0]) == {1, 2, 3}
    kept = _sample(logits, draws, top_k=2)[0]
    assert abs((kept == 1).mean() - 0.5 / 0.8) < 0.01


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), st.integers(2, 12), st.integers(2, 30))
def test_a_row_does_not_depend_on_its_neighbours(seed, num_rows, vocabulary):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_rows, vocabulary, generator=generator)
    rng = np.random.default_rng(seed)
    uniform, temperature = rng.random(num_rows), rng.choice([0.0, 0.5, 1.0], num_rows)
    top_k, top_p = rng.choice([0, 1, 3], num_rows), rng.choice([1.0, 0.5], num_rows)
    together = sample(logits.clone(), temperature, top_k, top_p, uniform)
    for i in range(num_rows):
        row = slice(i, i + 1)
        alone = sample(logits[row].clone(), temperature[row], top_k[row], top_p[row], uniform[row])
        assert (alone[0][0], alone[1][0]) == (together[0][i], together[1][i])


def test_impossible_tokens_are_never_drawn():
    logits = torch.tensor([[float("-inf"), 0.0, float("-inf")]]).repeat(3, 1)
    tokens, logprobs = _sample(logits, np.array([0.0, 0.5, 1 - 2**-53]))
    assert tokens.tolist() == [1, 1, 1] and logprobs.tolist() == [0, 0, 0]
