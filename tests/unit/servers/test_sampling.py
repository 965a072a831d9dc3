"""Sampling parameters: what is taken, and the words of a refusal."""

import pytest

from hpc_rl.core.errors import RequestRefused
from hpc_rl.servers.wire import SamplingParams, parse_sampling


def test_omitted_and_null_are_sglangs_defaults():
    assert (
        parse_sampling(None)
        == parse_sampling({"temperature": None, "stop_token_ids": None})
        == SamplingParams()
    )
    assert SamplingParams().max_new_tokens == 128


def test_stop_tokens_are_a_sorted_set():
    assert parse_sampling({"stop_token_ids": [7, 3, 7]}).stop_token_ids == (3, 7)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"max_tokens": 3}, "did you mean 'max_new_tokens'"),
        ({"frobnicate": 3}, "unknown sampling key 'frobnicate'"),
        ({"max_new_tokens": "3"}, "must be an integer"),
        ({"max_new_tokens": True}, "must be an integer"),
        ({"max_new_tokens": -1}, "at least 0"),
        ({"max_new_tokens": 3, "min_new_tokens": 4}, "from 0 to max_new_tokens"),
        ({"temperature": -0.1}, "at least 0"),
        ({"temperature": float("nan")}, "finite"),
        ({"top_p": 0}, "above 0"),
        ({"top_k": 0}, "-1 for all"),
        ({"n": 0}, "at least 1"),
        ({"temperature": 10**400}, "finite number"),
        ({"top_k": 10**30}, "must be an integer"),
        ({"stop_token_ids": 3}, "list of integers"),
        ({"ignore_eos": 1}, "true or false"),
        ({"min_p": 0.1}, "can't serve sampling key"),
        ({"stop": ["\n"]}, "can't serve sampling key"),
        ([], "must be an object"),
    ],
)
def test_refusals_name_key_and_what_is_allowed(given, words):
    with pytest.raises(RequestRefused, match=words):
        parse_sampling(given)


def test_neutral_values_of_what_is_not_served_are_accepted():
    neutral = {"min_p": 0.0, "repetition_penalty": 1.0, "stop": [], "regex": None}
    neutral["skip_special_tokens"] = False
    assert parse_sampling(neutral) == SamplingParams()
