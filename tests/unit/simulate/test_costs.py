"""Costs: which are measured, and what a publication takes."""

import pytest

from hpc_rl.simulate.costs import Costs, compute_publication


def test_values_know_their_origin():
    costs = Costs().replace_measured("3 steps", train_s=1.5, log_s=0.1)
    assert costs.origins == {"train_s": "3 steps", "log_s": "3 steps"}
    assert "train_s" not in costs.list_defaults() and "save_s" in costs.list_defaults()


def test_more_ranks_lose_some_efficiency():
    costs = Costs(train_s=0.0, train_token_s=1.0, train_ranks=8, train_scaling=0.9)
    assert costs.compute_train_s(800, 8) == pytest.approx(100.0)
    assert costs.compute_train_s(800, 32) == pytest.approx(25.0 / 0.9**2)


def test_lengths_end_at_the_limit_of_new_tokens():
    assert max(Costs().cap_lengths(100).lengths) == 100


SIZES = {
    "model_bytes": 8e9, "num_tensors": 100, "changed_share": 0.05, "file_byte_s": 1e-9, "visible_s": 0.0,
    "blocked_tensor_s": 0.0, "write_tensor_s": 0.0, "apply_tensor_s": 0.0, "file_ops_per_s": 1e9,
    "blocked_byte_s": 1e-9, "write_byte_s": 1e-9, "apply_byte_s": 1e-9, "network_byte_s": 2e-9,
}  # fmt: skip


@pytest.mark.parametrize(
    ("mode", "whole", "blocked_s", "complete_s"),
    [
        ("disk", False, 1.0, 1.0 + 4 * 0.4 + 8.0),  # a rank has 1 GB; 3 nodes read 5 %, after one write
        ("disk", True, 1.0, 1.0 + 4 * 8.0 + 8.0),
        ("xccl", False, 16.0, 0.0),
    ],
)
def test_a_publication_is_overhead_and_bytes_over_bandwidth(mode, whole, blocked_s, complete_s):
    found = compute_publication(Costs(**SIZES), mode, ranks=8, nodes=3, whole=whole)
    assert found.blocked_s == pytest.approx(blocked_s, rel=1e-3)
    assert found.complete_s == pytest.approx(complete_s, rel=1e-3)


def test_a_measured_publication_needs_no_model():
    costs = Costs(publish_write_s=3.0, publish_blocked_s=0.5, publish_pause_s=0.2)
    found = compute_publication(costs, "disk", ranks=8, nodes=3, whole=False)
    assert (found.blocked_s, found.complete_s, found.pause_s) == (0.5, 3.0, 0.2)


def test_defaults_follow_the_size_of_the_model():
    small = Costs().replace_measured("12 steps", save_s=3.0).fit_model(1.64e9, 0.82e9, 11.48e9)
    assert small.train_token_s == pytest.approx(0.1 * Costs().train_token_s)
    assert small.decode_s == pytest.approx(0.5 * 1.05 * Costs().decode_s), "two GPUs share the weights"
    assert small.load_s == pytest.approx(0.1 * Costs().load_s)
    assert small.save_s == 3.0, "measured"
    assert "train_token_s" in small.list_defaults()
