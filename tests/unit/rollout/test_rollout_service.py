"""The driver with an executor that answers at once: replay, two owners of one ledger, trimming, evaluation, hopeless runs."""

from __future__ import annotations

import asyncio
import errno
import os

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from hpc_rl.checkpoint.start_facts import seals_of, trimmed
from hpc_rl.datasets.encode import Prompt
from hpc_rl.datasets.rows import Rows
from hpc_rl.errors import ConfigError, RoleFailed, Stale
from hpc_rl.rollout.batch_log.ledger import segments
from hpc_rl.rollout.batch_log.replay import read_state
from hpc_rl.rollout.routes import routes
from hpc_rl.rollout.sequencer import Rules, Sequencer
from hpc_rl.rollout.service import Driver, OutOfStep, OutOfTime, RoleEnds, Trimmed
from hpc_rl.trial import Trial
from hpc_rl.types import TrajectoryGroup, decode, encode


class Prompts:
    path = "rows.jsonl"

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.rows = Rows([], {"rows": num_rows, "xxh3": "0"})

    def __len__(self) -> int:
        return self.num_rows

    def at(self, index: int) -> Prompt:
        return Prompt(index // self.num_rows, index % self.num_rows, {"prompt": "x"}, [1])

    in_file_order = at


class Instant:
    """Answers each prompt in the next turn of the loop; `fate` may make something else of a frame, None for no answer."""

    restarts = 0

    def __init__(self, driver: Driver, fate=None) -> None:
        self.driver = driver
        self.fate = fate or (lambda frame: "group")
        self.cancelled: list[int] = []
        self.version_of = lambda asked: (
            asked
        )  # which weights the servers have, by the version that was asked for

    def run(self, frame: dict) -> None:
        asyncio.get_running_loop().call_soon(self.answer, frame)

    def answer(self, frame: dict) -> None:
        op = self.fate(frame)
        if op is None:
            return
        version = frame["version"]
        answer = (
            {"op": "scored", "reward": 1.0, "num_tokens": 3, "versions": [version]}
            if frame["evaluate"]
            else {"op": op}
        )
        if op == "group" and not frame["evaluate"]:
            lineage, step = map(int, self.version_of(version).split("."))
            numbers = {
                "oldest_step": step,
                "oldest_lineage": lineage,
                "newest_lineage": lineage,
                "num_trajectories": 1,
            }
            numbers["num_tokens"] = 3
            answer |= {**numbers, "reward_sum": 1.0, "group": encode(TrajectoryGroup(frame["index"], []))}
        if isinstance(op, dict):
            answer = op
        self.driver.on_frame({**answer, "ticket": frame["ticket"]})

    def cancel(self, ticket: int) -> None:
        self.cancelled.append(ticket)


def make(folder, fate=None, num_rows: int = 50, left_s=lambda: None, **rules) -> Driver:
    rules = {"batch_size": 2, "max_concurrent": 4, "eta": 1, **rules}
    driver = Driver(folder, Sequencer(Rules(**rules)), Prompts(num_rows), Prompts(5), left_s)
    driver.executor = Instant(driver, fate)
    return driver


async def test_batches_replay_byte_for_byte_in_the_next_incarnation(tmp_path):
    one = make(tmp_path)
    bodies = [await one.batch(step, 0, 5) for step in (1, 2, 3)]
    assert [decode(body).step for body in bodies] == [1, 2, 3]
    await one.close()
    two = make(tmp_path)
    assert [await two.batch(step, 0, 5) for step in (1, 2, 3)] == bodies
    assert decode(await two.batch(4, 0, 5)).step == 4
    await two.close()


async def test_a_log_goes_on_only_with_the_rows_that_it_was_begun_with(tmp_path):
    nothing_yet = make(tmp_path, num_rows=24)
    await nothing_yet.close()
    one = make(tmp_path, num_rows=50)
    await one.batch(1, 0, 5)
    await one.close()
    with pytest.raises(ConfigError, match="had 50 rows when its batch log was begun, and has 24 rows now"):
        make(tmp_path, num_rows=24)
    two = make(tmp_path, num_rows=50)
    assert decode(await two.batch(2, 0, 5)).step == 2
    await two.close()
    for damage in ("{", '{"rows": 50}'):
        (tmp_path / "data.json").write_text(damage)
        await make(
            tmp_path, num_rows=24
        ).close()  # the trainer knows the rows from its generation, and refuses
        assert (tmp_path / "data.json").read_text() == damage  # so these are not the measure from now on


async def test_a_segment_that_is_gone_is_named_to_who_asks_for_a_batch_of_it(tmp_path):
    one = make(tmp_path)
    await one.batch(1, 0, 5)
    await one.close()
    two = make(tmp_path)
    (tmp_path / "segment-0000.ledger").unlink()
    client = TestClient(TestServer(web.Application()))
    client.server.app.add_routes(routes(two))
    async with client:
        answer = await client.get("/batch?step=1&lineage=0")
        assert answer.status == 500 and "segment-0000.ledger" in await answer.text()
    await two.close()


async def test_requests_at_the_same_time_get_the_same_batch(tmp_path):
    driver = make(tmp_path)
    bodies = await asyncio.gather(*(driver.batch(1, 0, 5) for _ in range(6)))
    assert len(set(bodies)) == 1
    await driver.close()


async def test_synchronous_no_group_is_made_by_weights_of_a_trainer_that_went_back_further(tmp_path):
    """It published 1.1 before it asked: what ran meanwhile is not the data of batch 4, and the server has nothing better yet."""
    runs: list[str] = []
    driver = make(
        tmp_path, fate=lambda frame: runs.append(frame["version"]) or "group", eta=0, order="in_order"
    )
    for step in (1, 2, 3):
        await driver.batch(step, 0, 5)
    driver.executor.version_of = lambda asked: max(asked, "1.1")
    assert await driver.batch(4, 0, 0.2) is None
    assert runs[-2:] == ["0.3", "0.3"] and len(runs) == 8  # once each, and then not again
    assert not read_state(tmp_path).ready
    for step in (2, 3):
        await driver.batch(step, 1, 5)
    assert len(runs) == 8
    batch = decode(await driver.batch(4, 1, 5))
    assert [group.index for group in batch.groups] == [6, 7] and runs[8:] == ["1.3", "1.3"]
    assert driver.core.seals[4].staleness == {0: 2}
    await driver.close()


async def test_no_batch_within_the_time_is_none_and_costs_no_spinning(tmp_path):
    driver = make(tmp_path, fate=lambda frame: None)
    turns = 0
    cut = driver._cut

    async def counted(step):
        nonlocal turns
        turns += 1
        return await cut(step)

    driver._cut = counted
    assert await asyncio.gather(*(driver.batch(1, 0, 0.2) for _ in range(3))) == [None] * 3
    assert turns < 20
    await driver.close()


async def test_an_older_lineage_a_skipped_step_and_a_trimmed_batch_are_refused(tmp_path):
    driver = make(tmp_path)
    for step in (1, 2, 3):
        await driver.batch(step, 1, 5)
    with pytest.raises(Stale):
        await driver.batch(4, 0, 5)
    with pytest.raises(OutOfStep):
        await driver.batch(5, 1, 5)
    await driver.retain(2)
    with pytest.raises(Trimmed):
        await driver.batch(2, 1, 5)
    await driver.close()
    later = make(tmp_path)
    with pytest.raises(Stale):
        await later.batch(4, 0, 5)
    assert decode(await later.batch(3, 2, 5)).step == 3
    await later.close()


async def test_what_a_trim_that_was_killed_left_goes_and_the_log_says_from_where_it_replays(
    tmp_path, monkeypatch
):
    trial = Trial(tmp_path)
    monkeypatch.setattr("hpc_rl.rollout.batch_log.ledger.Ledger.drop_segment", lambda *_: None)
    driver = make(trial.rollout)
    for step in (1, 2, 3):
        await driver.batch(step, 0, 5)
    with monkeypatch.context() as patched:
        patched.setattr(
            "hpc_rl.rollout.batch_log.seals.Batches.delete", lambda self, step: None
        )  # killed before
        await driver.retain(2)
    await driver.close()
    assert trimmed(trial) == 2 and sorted(seals_of(trial)) == [1, 2, 3]
    later = make(trial.rollout)
    assert seals_of(trial) == [3]
    await later.batch(3, 0, 5)
    await later.retain(3)
    assert seals_of(trial) == [] and trimmed(trial) == 3
    assert decode(await later.batch(4, 0, 5)).step == 4
    await later.close()


async def test_two_owners_of_one_ledger_agree_on_every_batch(tmp_path):
    one, two = make(tmp_path), make(tmp_path)
    bodies = {}
    for step in range(1, 9):
        first, second = (one, two) if step % 3 else (two, one)
        bodies[step] = await first.batch(step, 0, 5)
        if step not in (2, 5):  # then the second one has missed a batch
            assert await second.batch(step, 0, 5) == bodies[step]
    indexes = [group.index for body in bodies.values() for group in decode(body).groups]
    assert len(set(indexes)) == len(indexes) == 16
    await one.close()
    await two.close()
    state = read_state(tmp_path)
    assert state.consumed == 16 and not state.rejected


async def test_segments_that_nothing_needs_are_deleted(tmp_path):
    for start in (1, 3, 5):
        driver = make(tmp_path, eta=0)
        for step in (start, start + 1):
            await driver.batch(step, 0, 5)
        await driver.close()
    assert segments(tmp_path) == [0, 1, 2]
    driver = make(tmp_path, eta=0)
    await driver.retain(4)
    assert segments(tmp_path) == [2, 3]
    kept = await driver.batch(5, 0, 5)
    await driver.close()
    again = make(tmp_path, eta=0)
    assert again.core.trimmed == 4 and again.core.consumed == 12
    assert await again.batch(5, 0, 5) == kept
    assert min(group.index for group in decode(await again.batch(7, 0, 5)).groups) == 12
    await again.close()


async def test_a_segment_that_is_begun_while_others_are_deleted_stays(tmp_path):
    driver = make(tmp_path)
    driver.ledger.segment_bytes = 150
    for step in range(1, 8):
        await driver.batch(step, 0, 5)
    commit, begun = driver.ledger.commit, []

    def commit_and_go_on() -> None:
        commit()
        while not begun or begun[-1].segment == begun[0].segment:
            begun.append(driver.ledger.append_base(driver.core.base(1)))

    driver.ledger.commit = commit_and_go_on
    await driver.retain(5)
    driver.ledger.commit = commit
    assert begun[-1].segment in segments(tmp_path) and 0 not in segments(tmp_path)
    await driver.close()


async def test_a_disk_that_fails_while_a_batch_is_sealed_ends_the_role_and_the_next_one_cuts_the_same_batch(
    tmp_path, monkeypatch
):
    driver = make(tmp_path)
    whole = await driver.batch(1, 0, 5)
    running = asyncio.create_task(driver.run())

    def broken(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr("hpc_rl.rollout.batch_log.ledger.os.write", broken)
        with pytest.raises(RoleEnds, match="Input/output error"):
            await driver.batch(2, 0, 5)
        with pytest.raises(OSError, match="Input/output error"):
            await asyncio.wait_for(running, 5)
    after = make(tmp_path)
    assert await after.batch(1, 0, 5) == whole
    assert decode(await after.batch(2, 0, 5)).step == 2
    await after.close()


async def test_on_a_full_disk_the_batch_waits_for_room_and_who_asks_hears_that_it_is_not_there_yet(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr("hpc_rl.files.PAUSE_S", (0.01, 0.01))
    driver = make(tmp_path)
    await driver.batch(1, 0, 5)
    running = asyncio.create_task(driver.run())

    room, write = False, os.write

    def perhaps(*what):
        if not room:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(*what)

    monkeypatch.setattr("hpc_rl.rollout.batch_log.ledger.os.write", perhaps)
    first = asyncio.create_task(driver.batch(2, 0, 5))
    while not driver.ledger.room.waiting:
        await asyncio.sleep(0.01)
    told = await driver.batch(2, 0, 0.05)
    room = True
    body = await asyncio.wait_for(first, 30)
    assert told is None and "DISK FULL: " in caplog.text  # a second ask was answered: the role lives
    assert decode(body).step == 2 and not running.done() and not driver.ledger.room.waiting
    running.cancel()
    await driver.close()
    after = make(tmp_path)
    assert await after.batch(2, 0, 5) == body
    await after.close()


async def test_prompts_that_fail_are_tried_again_then_rejected_with_the_reason(tmp_path):
    def fate(frame):
        return {1: "failed", 2: {"op": "rejected", "reason": "reward_timeout"}}.get(frame["index"], "group")

    driver = make(tmp_path, fate, order="in_order", eta=0)
    batch = decode(await driver.batch(1, 0, 5))
    assert [group.index for group in batch.groups] == [0, 3]
    assert driver.status()["rejected"] == {"exception": 1, "reward_timeout": 1}
    await driver.close()
    assert read_state(tmp_path).rejected == {1: "exception", 2: "reward_timeout"}


async def test_a_run_in_which_every_prompt_is_rejected_fails_loudly(tmp_path):
    driver = make(tmp_path, lambda frame: {"op": "rejected", "reason": "reward_exception"})
    asking = asyncio.create_task(driver.batch(1, 0, 30))
    with pytest.raises(RoleFailed, match="reward_exception"):
        await asyncio.wait_for(driver.run(), 10)
    asking.cancel()
    await driver.close()


async def test_a_filter_that_rejects_for_long_is_no_failure_within_an_epoch(tmp_path):
    rejected = {"op": "rejected", "reason": "workflow_none"}
    driver = make(tmp_path, lambda frame: "group" if frame["index"] > 300 else rejected, num_rows=1000)
    assert decode(await driver.batch(1, 0, 10)).groups[0].index > 300
    assert not driver._failed.done()
    await driver.close()


async def test_answers_of_a_dead_worker_do_not_count_twice(tmp_path):
    held = []
    driver = make(
        tmp_path,
        lambda frame: held.append(frame) if frame["index"] == 0 and len(held) == 0 else "group",
        eta=0,
    )
    assert await driver.batch(1, 0, 0.1) is None
    driver.on_lost([held[0]["ticket"]])
    body = await driver.batch(1, 0, 5)
    driver.executor.fate = lambda frame: "group"
    driver.executor.answer(held[0])
    assert await driver.batch(1, 0, 5) == body
    assert decode(await driver.batch(2, 0, 5)).groups[0].index == 2
    await driver.close()


async def test_an_evaluation_asks_every_prompt_once_and_only_counts_its_version(tmp_path):
    asked = []

    def fate(frame):
        if not frame["evaluate"]:
            return None
        asked.append(frame["row"])
        if asked.count(frame["row"]) == 1 and frame["row"] == 2:
            return {"op": "scored", "reward": 9.0, "num_tokens": 3, "versions": ["0.2", "0.3"]}
        if frame["row"] == 4:
            return {"op": "rejected", "reason": "reward_timeout"}
        return "group"

    driver = make(tmp_path, fate)
    result = await driver.evaluate("0.3", None)
    assert (result.num_prompts, result.reward, result.version) == (4, 1.0, "0.3")
    assert result.stats["left_out"] == 1 and result.stats["asked_again"] == 1
    assert sorted(asked) == [0, 1, 2, 2, 3, 4]
    assert await driver.evaluate("0.3", None) is result
    assert driver.core.running and len(driver.core.running) <= 4  # evaluation is not counted as running
    await driver.close()


async def test_an_evaluation_that_can_never_end_is_refused(tmp_path):
    newer = {"op": "scored", "reward": 1.0, "num_tokens": 3, "versions": ["0.4"]}
    driver = make(tmp_path, lambda frame: newer if frame["evaluate"] else None)
    with pytest.raises(Stale, match=r"0\.4"):
        await driver.evaluate("0.3", None)
    await driver.close()
    waiting = make(tmp_path, lambda frame: None)
    first = asyncio.create_task(waiting.evaluate("0.3", None))
    await asyncio.sleep(0)
    waiting.observe(1, 2)
    with pytest.raises(Stale, match="lineage 1"):
        await first
    await waiting.close()


async def test_a_batch_that_cannot_come_any_more_is_said_not_to_come(tmp_path):
    left: list[float | None] = [None]
    driver = make(tmp_path, left_s=lambda: left[0])
    assert decode(await driver.batch(1, 0, 5)).step == 1
    left[0] = -1.0
    while True:
        try:
            await driver.batch(driver.core.top + 1, 0, 5)
        except OutOfTime:
            break
    made, issued = driver.core.top, driver.core.next_index
    assert made >= 1 and driver.status()["last_call"]
    assert decode(await driver.batch(made, 0, 5)).step == made, "what was cut is there all the same"
    left[0] = 1000.0
    assert driver.last_call.taken_back()
    driver._pump()
    assert decode(await driver.batch(made + 1, 0, 5)).step == made + 1 and driver.core.next_index > issued
    await driver.close()
