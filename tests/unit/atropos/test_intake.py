"""Groups of the protocol, and what can be trained on."""

import numpy as np
import pytest

from hpc_rl.atropos.intake import GroupRejected, MalformedRequest, SequenceLimits, check_shape, make_group
from hpc_rl.core.types import decode, encode
from hpc_rl.gateway.gateway_log import Behavior


def body(**fields):
    return {"tokens": [[1, 2, 3]], "masks": [[-100, 2, 3]], "scores": [1.0], **fields}


def nothing_known(ids, mask):
    return Behavior.make_unknown(len(ids))


def all_known(ids, mask):
    logprobs = np.where(mask, np.float32(-0.25), np.float32(0))
    lineages, steps = (np.where(mask, number, -1).astype(np.int32) for number in (1, 6))
    temperatures = np.where(mask, np.float32(0.7), np.float32(np.nan))
    return Behavior(logprobs, mask.copy(), lineages, steps, temperatures, "length")


def group(lookup=nothing_known, **fields):
    return make_group(check_shape(body(**fields)), lookup, (2, 9), SequenceLimits(100, 8)).trajectories


def test_what_the_gateway_knows_is_taken():
    (one,) = group(all_known, inference_logprobs=[[1.0, -3.0, -3.0]])
    assert one.has_logprobs and one.logprobs.tolist() == [0, -0.25, -0.25]
    assert one.lineages.tolist() == [-1, 1, 1] and one.steps.tolist() == [-1, 6, 6]
    assert one.loss_mask.tolist() == [False, True, True] and one.reward == 1.0


def test_what_the_environment_sends_is_taken_where_the_gateway_knows_nothing():
    (one,) = group(inference_logprobs=[[1.0, -3.0, -2.0]])
    assert one.has_logprobs and one.logprobs.tolist() == [0, -3, -2]
    assert one.steps.tolist() == [-1, 9, 9] and one.lineages.tolist() == [-1, 2, 2]  # the moment's
    assert one.stats["unknown_version_tokens"] == 2


def test_absent_logprobs_are_left_to_the_trainer():
    (one,) = group()
    assert not one.has_logprobs and one.logprobs.tolist() == [0, 0, 0]


def test_a_sequence_carries_its_sampling_temperature_where_it_is_not_the_trials():
    (known,) = group(all_known, generation_params={"temperature": 0.2})
    assert known.temperatures.tolist() == pytest.approx([1.0, 0.7, 0.7])
    (said,) = group(generation_params={"temperature": 0.2})
    assert said.temperatures.tolist() == pytest.approx([1.0, 0.2, 0.2])
    said = {"overrides": [{"temperature": 0.5}], "group_overrides": {"temperature": 0.3}}
    assert group(**said)[0].temperatures[1] == 0.5
    assert group()[0].temperatures is None
    assert group(generation_params={"temperature": 1.0})[0].temperatures is None
    words = "temperature of sequence 0 must be a number of at least 0, got 'hot'"
    with pytest.raises(GroupRejected, match=words):
        group(group_overrides={"temperature": "hot"})


def test_the_finish_reason_is_the_gateways():
    assert [group(lookup)[0].finish_reason for lookup in (all_known, nothing_known)] == ["length", "stop"]


def test_empty_lists_are_absent():
    (one,) = group(advantages=[], ref_logprobs=[], messages=[], overrides=[], images=[], group_overrides={})
    assert one.advantages is None and one.ref_logprobs is None


def test_advantages_reference_and_overrides_are_kept():
    overrides = [{"set_advantage_to_zero": True, "temperature": 0.5}]
    (one,) = group(advantages=[[0.0, 2.0, -2.0]], ref_logprobs=[[0.0, -1.0, -1.5]], overrides=overrides)
    assert one.advantages.tolist() == [0, 2, -2] and one.ref_logprobs.tolist() == [0, -1, -1.5]
    assert one.zero_advantage
    copy = decode(encode(one))
    assert copy.zero_advantage and copy.advantages.tolist() == [0, 2, -2]


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"tokens": None}, "tokens"),
        ({"tokens": [1]}, "tokens"),
        ({"tokens": [["a"]]}, "tokens[0]"),
        ({"tokens": [[1.5]]}, "tokens[0]"),
        ({"tokens": [[True]]}, "tokens[0]"),
        ({"masks": {}}, "masks"),
        ({"scores": ["high"]}, "scores"),
        ({"messages": [[{"content": "no role"}]]}, "messages[0][0]"),
        ({"overrides": [1]}, "overrides"),
        ({"group_overrides": 3}, "group_overrides"),
        ({"env_id": "0"}, "env_id"),
    ],
)
def test_what_is_not_of_the_protocol_is_named(change, place):
    with pytest.raises(MalformedRequest) as failure:
        check_shape(body(**change))
    assert failure.value.place == place


def test_a_missing_field_is_named():
    for name in ("tokens", "masks", "scores"):
        without = {key: value for key, value in body().items() if key != name}
        with pytest.raises(MalformedRequest, match=f"{name}: field required"):
            check_shape(without)
    with pytest.raises(MalformedRequest, match="a group must be an object, got list"):
        check_shape([])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"scores": [float("nan")]}, r"scores\[0\] is nan"),
        ({"scores": [1.0, 2.0]}, "scores has 2 entries, but tokens has 1"),
        ({"masks": [[-100, 2]]}, r"masks\[0\] has 2 entries for 3 tokens"),
        ({"masks": [[-100, -100, -100]]}, "nothing to learn from"),
        (
            {"masks": [[0, 1, 1]]},
            r"masks\[0\] has 0 at position 0, .* is 1: .*masks of 0 and 1 are not supported",
        ),
        ({"masks": [[-100, 2, 4]]}, r"masks\[0\] has 4 at position 2, where the token is 3"),
        ({"scores": [1e300]}, r"scores\[0\] is 1e\+300; allowed: -1e\+06 to 1e\+06"),
        ({"scores": [10**400]}, r"scores\[0\] is a huge integer"),
        ({"tokens": [[1, -2, 3]]}, "token id -2; the model has 0 to 99"),
        ({"tokens": [[1, 100, 3]]}, "token id 100; .*does the environment use the model's tokenizer"),
        ({"tokens": [[1] * 9], "masks": [[1] * 9]}, r"tokens\[0\] has 9 tokens; at most 8 are allowed"),
        (
            {"advantages": [[1e300, 1, 1]]},
            r"advantages\[0\] has a number outside of -1e\+06 to 1e\+06, or NaN",
        ),
        (
            {"inference_logprobs": [[1.0, -3e38, 0]]},
            r"inference_logprobs\[0\] has a number outside of -1e\+06 to 1e\+06, or NaN",
        ),
        ({"tokens": [[1, 2**40, 3]]}, "too large"),
        ({"tokens": [], "masks": [], "scores": []}, "no sequence"),
        (
            {"advantages": [[1, float("inf"), 1]]},
            r"advantages\[0\] has a number outside of -1e\+06 to 1e\+06, or NaN",
        ),
        ({"ref_logprobs": [[1.0]]}, r"ref_logprobs\[0\] has 1 entries for 3 tokens"),
    ],
)
def test_what_no_trainer_could_use_is_rejected_with_its_reason(change, reason):
    with pytest.raises(GroupRejected, match=reason):
        group(**change)
