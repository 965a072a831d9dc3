"""The gateway log: what it finds again, and in which shapes environments return what they sampled."""

import os

import msgpack
import numpy as np
import pytest

from hpc_rl.core.types import Turn
from hpc_rl.gateway.gateway_log import NUM_SEGMENTS, GatewayLog, _hash_tokens

PROMPT = [4, 13, 5]


def turn(ids, version="0.3", spans=None):
    return Turn(ids, [-0.1 * token for token in ids], spans or [(version, 0, len(ids))], "stop")


def logprobs(ids):
    return np.asarray([-0.1 * token for token in ids], np.float32)


def masked(prompt, output, after=()):
    return [*prompt, *output, *after], [False] * len(prompt) + [True] * len(output) + [False] * len(after)


@pytest.fixture
def log(tmp_path):
    made = GatewayLog(tmp_path / "log")
    yield made
    made.close()


async def test_each_completion_of_a_group_is_found_by_its_ids(log):
    outputs = [[7, 8, 1], [7, 8, 9, 1], [2, 1]]
    await log.append(PROMPT, [turn(ids, f"0.{i}") for i, ids in enumerate(outputs)], 1.0)
    for i, output in enumerate(outputs):
        found = log.match(*masked(PROMPT, output))
        assert found.has_logprob.tolist() == [False] * 3 + [True] * len(output)
        assert (found.logprobs[3:] == logprobs(output)).all()
        assert found.steps.tolist() == [-1] * 3 + [i] * len(output)
        assert found.lineages.tolist() == [-1] * 3 + [0] * len(output)


async def test_temperature_and_end_of_the_last_completion_are_found(log):
    await log.append(PROMPT, [Turn([7, 8], [-0.7, -0.8], [("0.3", 0, 2)], "length")], 0.25)
    await log.append([*PROMPT, 7, 8, 5], [turn([9, 1])], 0.5)
    assert log.match(*masked(PROMPT, [7, 8])).finish_reason == "length"
    both = log.match([*PROMPT, 7, 8, 5, 9, 1], [False] * 3 + [True] * 2 + [False] + [True] * 2)
    assert both.finish_reason == "stop"
    assert both.temperatures[3:].tolist() == pytest.approx([0.25, 0.25, np.nan, 0.5, 0.5], nan_ok=True)
    cut = log.match(*masked(PROMPT, [7]))  # by the environment
    assert cut.finish_reason == "" and cut.temperatures[3] == 0.25
    continued = log.match(*masked(PROMPT, [7, 8, 9]))
    assert continued.finish_reason == "" and np.isnan(continued.temperatures[5])


def test_a_log_of_before_finish_reasons_is_read(tmp_path):
    ids, values = np.array([7, 1], np.int32), np.array([-0.5, -0.25], np.float32)
    hashes = (_hash_tokens(np.array(PROMPT, np.int32)), _hash_tokens(ids))
    record = (*hashes, 0.0, 0.7, ids.tobytes(), values.tobytes(), [(0, 3, 0, 2)])
    (tmp_path / "segment-0000.log").write_bytes(msgpack.packb(record))
    log = GatewayLog(tmp_path)
    found = log.match(*masked(PROMPT, [7, 1]))
    assert found.logprobs[3:].tolist() == [-0.5, -0.25] and found.steps[3:].tolist() == [3, 3]
    assert found.temperatures[3:].tolist() == pytest.approx([0.7, 0.7]) and found.finish_reason == ""
    log.close()


async def test_each_token_has_the_version_of_its_span(log):
    await log.append(PROMPT, [turn([7, 8, 9, 1], spans=[("0.9", 0, 1), ("1.2", 1, 4)])], 1.0)
    found = log.match(*masked(PROMPT, [7, 8, 9, 1]))
    assert found.lineages.tolist()[3:] == [0, 1, 1, 1] and found.steps.tolist()[3:] == [9, 2, 2, 2]


async def test_turns_of_a_conversation_with_the_end_token_twice(log):
    await log.append(PROMPT, [turn([7, 1], "0.1")], 1.0)
    second = [*PROMPT, 7, 1, 1, 6]  # as atroposlib joins them
    await log.append(second, [turn([8, 9, 1], "0.2")], 1.0)
    ids = [*second, 8, 9, 1]
    found = log.match(ids, [False] * 3 + [True] * 2 + [False] * 2 + [True] * 3)
    assert found.steps.tolist() == [-1, -1, -1, 1, 1, -1, -1, 2, 2, 2]
    assert found.has_logprob.tolist() == [step > 0 for step in found.steps]


async def test_a_completion_that_was_cut_or_continued_by_the_environment(log):
    await log.append(PROMPT, [turn([7, 8, 9]), turn([7, 8, 2, 2])], 1.0)
    cut = log.match(*masked(PROMPT, [7, 8]))
    assert cut.has_logprob.tolist() == [False] * 3 + [True] * 2
    continued = log.match(*masked(PROMPT, [7, 8, 9, 1]))
    assert continued.has_logprob.tolist() == [False] * 3 + [True] * 3 + [False]
    assert continued.steps.tolist()[-1] == -1


async def test_a_completion_whose_begin_is_masked(log):
    await log.append(PROMPT, [turn([7, 8, 9, 1])], 1.0)
    found = log.match([*PROMPT, 7, 8, 9, 1], [False] * 5 + [True] * 2)
    assert found.has_logprob.tolist() == [False] * 5 + [True] * 2
    assert (found.logprobs[5:] == logprobs([9, 1])).all()


async def test_another_prompt_tells_the_version_but_no_logprobs(log):
    await log.append(PROMPT, [turn([7, 8, 9, 1], "0.5")], 1.0)
    found = log.match(*masked([2, *PROMPT], [7, 8, 9, 1]))
    assert not found.has_logprob.any() and found.steps.tolist()[4:] == [5] * 4
    unknown = log.match(*masked(PROMPT, [6, 6]))
    assert not unknown.has_logprob.any() and (unknown.steps == -1).all()


async def test_an_earlier_incarnation_and_its_torn_end(tmp_path):
    first = GatewayLog(tmp_path)
    await first.append(PROMPT, [turn([7, 1])], 1.0)
    await first.append(PROMPT, [turn([8, 1])], 1.0)
    first.close()
    path = tmp_path / "segment-0000.log"
    os.truncate(path, path.stat().st_size - 3)
    second = GatewayLog(tmp_path)
    await second.append(PROMPT, [turn([9, 1])], 1.0)
    for ids, known in (([7, 1], True), ([8, 1], False), ([9, 1], True)):
        assert second.match(*masked(PROMPT, ids)).has_logprob[3] == known
    assert second.get_status()["records"] == 2
    second.close()


async def test_processes_share_a_folder(tmp_path):
    service, gateways = GatewayLog(tmp_path), [GatewayLog(tmp_path) for _ in range(2)]
    for number in range(4):
        await gateways[number % 2].append(PROMPT, [turn([number, 1], f"0.{number}")], 1.0)
        assert service.match(*masked(PROMPT, [number, 1])).steps.tolist()[3:] == [number] * 2
    assert service.get_status()["records"] == 4 and len(list(tmp_path.iterdir())) == 2
    path = min(tmp_path.iterdir())
    whole = path.read_bytes()
    path.write_bytes(whole + whole[: len(whole) // 4])  # a record that is still being written
    assert not service.match(*masked(PROMPT, [9, 1])).has_logprob.any()
    path.unlink()
    assert not service.match(*masked(PROMPT, [9, 1])).has_logprob.any()
    assert service.get_status()["records"] == 2
    for log in (service, *gateways):
        log.close()


async def test_the_oldest_are_dropped(tmp_path):
    log = GatewayLog(tmp_path, max_records=32)
    for number in range(100):
        await log.append([5, number], [turn([number, 1])], 1.0)
    assert log.get_status()["records"] <= 32 and len(list(tmp_path.iterdir())) <= NUM_SEGMENTS
    assert not log.match(*masked([5, 3], [3, 1])).has_logprob.any()
    assert log.match(*masked([5, 99], [99, 1])).has_logprob[2:].all()
    log.close()


async def test_a_disk_that_fails_costs_the_record_only(log, monkeypatch):
    def full(_fd, _data):
        raise OSError(28, "no space")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        await log.append(PROMPT, [turn([7, 1])], 1.0)
    await log.append(PROMPT, [turn([8, 1])], 1.0)
    assert log.get_status()["lost"] == 1
    assert log.match(*masked(PROMPT, [8, 1])).has_logprob[3:].all()
