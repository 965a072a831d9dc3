"""Completions in slices: where they end, and which text may be shown meanwhile."""

import pytest

from hpc_rl.core.types import Turn
from hpc_rl.gateway.completions import Completion
from hpc_rl.gateway.requests import PromptOrder


class Bytes:
    """A tokenizer with one token per byte."""

    def decode(self, ids, skip_special_tokens=True):
        return bytes(ids).decode(errors="replace")


def completion(stops=(), trims_stop=True, **sampling):
    given = {"max_new_tokens": 20, "stop_token_ids": [0], **sampling}
    return Completion(PromptOrder([5, 6], given, 1, list(stops), trims_stop, True), 0, 2, Bytes())


def absorb(one, text, finish="length", version="0.1"):
    ids = text if isinstance(text, bytes) else text.encode()
    one.absorb(Turn(list(ids), [-0.5] * len(ids), [(version, 0, len(ids))], finish))


@pytest.mark.parametrize("slices", [["one sto", "p two"], ["one stop two"], [*"one stop two"]])
def test_a_stop_string_ends_at_the_same_token_however_it_is_sliced(slices):
    one = completion(["two", "stop"])
    for text in slices:
        if not one.done:
            absorb(one, text)
    assert one.text == "one " and one.matched == "stop" and one.turn.finish_reason == "stop"
    assert bytes(one.turn.output_ids) == b"one stop" and len(one.turn.output_logprobs) == 8
    assert one.turn.versions == [("0.1", 0, 8)]


def test_text_that_may_become_a_stop_string_is_held_back():
    one = completion(["stop"])
    absorb(one, "a st")
    assert one.find_stable_text() == "a "
    absorb(one, "ar sto", version="0.2")
    assert one.find_stable_text() == "a star "
    absorb(one, b"\0", "stop")
    assert one.find_stable_text() == "a star sto" and one.matched == 0
    assert one.turn.versions == [("0.1", 0, 4), ("0.2", 4, 10), ("0.1", 10, 11)]


def test_half_a_character_is_held_back():
    one = completion()
    absorb(one, "é".encode()[:1])
    assert one.find_stable_text() == ""
    absorb(one, "é".encode()[1:])
    assert one.find_stable_text() == "é"


def test_stop_strings_and_stop_tokens_stay_where_they_are_asked_for():
    one = completion(["stop"], trims_stop=False)
    absorb(one, "a stop b")
    assert one.text == "a stop"
    one = completion(trims_stop=False)
    absorb(one, b"a\0", "stop")
    assert one.text == "a\0"


def test_each_slice_asks_for_what_is_left():
    one = completion(min_new_tokens=18, sampling_seed=7)
    assert one.request(16).sampling == {
        "max_new_tokens": 16, "min_new_tokens": 16, "sampling_seed": 9, "stop_token_ids": [0],
    }  # fmt: skip
    absorb(one, "x" * 16)
    request = one.request(32)
    assert request.input_ids == [5, 6, *b"x" * 16]
    assert request.sampling["max_new_tokens"] == 4 and request.sampling["min_new_tokens"] == 2
    absorb(one, "y" * 4)
    assert one.done and one.turn.finish_reason == "length" and one.matched is None
