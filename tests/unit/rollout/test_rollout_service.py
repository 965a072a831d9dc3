"""The service with an executor that answers at once: replay, two owners of one ledger, trimming, evaluation,
hopeless runs.
"""

import asyncio
import contextlib
import errno
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import astuple
from types import MappingProxyType

import pytest
from aiohttp.test_utils import TestClient, TestServer
from patience import extend

from hpc_rl.checkpoint.start_facts import find_trimmed, list_seals
from hpc_rl.config.options.operations import EvaluatorConfig, HeldOutSetConfig
from hpc_rl.core.errors import ConfigError, Stale, UserCodeFailed
from hpc_rl.core.records import LineageRecord
from hpc_rl.core.trial import Trial
from hpc_rl.core.types import TrajectoryGroup, WeightVersion, decode, encode
from hpc_rl.datasets.encode import Prompt
from hpc_rl.datasets.rows import Draw, Rows
from hpc_rl.rollout.batch_log.judged import Judged
from hpc_rl.rollout.batch_log.ledger import GroupRecord, list_segments
from hpc_rl.rollout.batch_log.replay import load_state
from hpc_rl.rollout.report import collect_counters, describe_progress
from hpc_rl.rollout.routes import make_application, make_rollout_routes
from hpc_rl.rollout.sequencer import Rules, Sequencer
from hpc_rl.rollout.service import Refused, RolloutService

TOKENS = {"control": "c" * 8, "data": "d" * 8}
CONTROL, DATA = ({"Authorization": f"Bearer {TOKENS[name]}"} for name in ("control", "data"))


def asked(service: RolloutService) -> TestClient:
    return TestClient(TestServer(make_application(make_rollout_routes(service), TOKENS)))


class Prompts:
    path = "rows.jsonl"

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.rows = Rows([], {"rows": num_rows, "xxh3": "0"})
        self.fingerprint = self.rows.fingerprint

    def __len__(self) -> int:
        return self.num_rows

    def at(self, index: int) -> Prompt:
        return Prompt(index // self.num_rows, index % self.num_rows, {"prompt": "x"}, [1])

    in_file_order = at

    def draw(self, index: int, next_visits: dict, rates: dict) -> Draw:
        return Draw(0, index % self.num_rows, index)

    def get(self, draw: Draw) -> Prompt:
        return self.at(draw.visit)

    def columns(self, position: int) -> dict[str, str]:
        return {"of": "odd" if position % 2 else "even"}


SCORED = {"op": "scored", "rewards": [1.0], "num_tokens": 3, "stats": {}, "group": b""}
MADE: list[RolloutService] = []


@pytest.fixture(autouse=True)
def all_are_closed():
    yield
    for service in MADE:
        if service.ledger._write_fds:  # the test has not closed it
            service.ledger.close()
    MADE.clear()


class Instant:
    """Answers each prompt in the next turn of the loop; `fate` may make something else of a frame, None for
    no answer.
    """

    restarts = 0
    endpoints: Mapping[str, str] = MappingProxyType({})
    blocked: Mapping[str, float] = MappingProxyType({})

    def __init__(self, fate=None) -> None:
        self.fate = fate or (lambda frame: "group")
        self.cancelled: list[int] = []
        self.continue_workflow: Callable[[dict], None] = lambda frame: None
        # which weights the servers have, by the version that was asked for
        self.version_of = lambda asked: asked

    def run(self, frame: dict) -> None:
        asyncio.get_running_loop().call_soon(self.answer, frame)

    def answer(self, frame: dict) -> None:
        op = self.fate(frame)
        if op is None:
            return
        version = frame["version"]
        answer = SCORED | {"versions": [version]} if frame["evaluate"] else {"op": op}
        if op == "group" and not frame["evaluate"]:
            lineage, step = map(int, self.version_of(version).split("."))
            asked = int(version.split(".")[1])
            record = astuple(GroupRecord(frame["index"], asked, step, lineage, 1, 3, 1.0))
            group = encode(TrajectoryGroup(frame["index"], []))
            answer |= {"record": record, "newest_lineage": lineage, "group": group}
        if isinstance(op, dict):
            answer = op
        self.on_outcome({**answer, "ticket": frame["ticket"]})

    def cancel(self, ticket: int) -> None:
        self.cancelled.append(ticket)


def make(
    folder, fate=None, num_rows: int = 50, left_s=lambda: None, lineages=lambda: (9, []), **rules
) -> RolloutService:
    sequencer = Sequencer(Rules(**{"batch_size": 2, "max_concurrent": 4, "eta": 1, **rules}))
    prompts, held_out = Prompts(num_rows), {"": Prompts(5)}
    service = RolloutService(folder, sequencer, prompts, held_out, lineages, Instant(fate), left_s)
    sequencer.log.lineage = load_state(folder).lineage
    service.evaluations.options = EvaluatorConfig(blocking=True)
    MADE.append(service)
    return service


async def evaluate(service: RolloutService, version: WeightVersion, name: str = "", lineage=None):
    """The result for a trainer that is at this version, or is of a later lineage."""
    trainer = WeightVersion(version.lineage if lineage is None else lineage, version.step)
    return await service.evaluate((version, name), None, trainer)


async def batches(service: RolloutService, *steps: int, lineage: int = 0) -> list[bytes]:
    return [await service.batch(step, lineage, 5) for step in steps]


def indexes(*bodies: bytes) -> list[int]:
    return [group.index for body in bodies for group in decode(body).groups]


def record(lineage: int, from_step: int = 0, new_batches: bool = False) -> LineageRecord:
    of_attempt = {"attempt": "1.0", "incarnation": 0, "new_batches": new_batches}
    return LineageRecord(lineage=lineage, from_step=from_step, **of_attempt)


async def test_batches_replay_byte_for_byte_in_the_next_incarnation(tmp_path):
    one = make(tmp_path)
    bodies = await batches(one, 1, 2, 3)
    assert [decode(body).step for body in bodies] == [1, 2, 3]
    await one.close()
    two = make(tmp_path)
    assert await batches(two, 1, 2, 3) == bodies
    assert decode(await two.batch(4, 0, 5)).step == 4


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
        # the trainer knows the rows from its generation, and refuses: these are not the measure from now on
        await make(tmp_path, num_rows=24).close()
        assert (tmp_path / "data.json").read_text() == damage


async def test_a_segment_that_is_gone_is_named_to_who_asks_for_a_batch_of_it(tmp_path):
    one = make(tmp_path)
    await one.batch(1, 0, 5)
    await one.close()
    two = make(tmp_path)
    (tmp_path / "segment-0000.ledger").unlink()
    async with asked(two) as client:
        answer = await client.get("/batch?step=1&lineage=0", headers=CONTROL)
        assert answer.status == 500 and "segment-0000.ledger" in await answer.text()


async def test_requests_at_the_same_time_get_the_same_batch(tmp_path):
    service = make(tmp_path)
    bodies = await asyncio.gather(*(service.batch(1, 0, 5) for _ in range(6)))
    assert len(set(bodies)) == 1


async def test_a_trainer_that_asks_early_gets_the_same_batch_and_issues_nothing_for_weights_it_lacks(
    tmp_path,
):
    runs: list[str] = []
    noting = lambda frame: runs.append(frame["version"]) or "group"  # noqa: E731
    service = make(tmp_path, noting)
    await batches(service, 1)
    early = await service.batch(2, 0, 5, version=0)
    assert decode(early).step == 2 and {*runs} == {"0.0"}
    assert await service.batch(2, 0, 5) == early
    await asyncio.sleep(0)
    assert "0.1" in runs
    async with asked(service) as client:
        get = lambda query: client.get(f"/batch?lineage=0&{query}", headers=CONTROL)  # noqa: E731
        assert (await get("step=3&version=1")).status == 200
        for query in ("step=4&version=1", "step=2&version=2", "step=1&version=-1", "step=2&version=x"):
            assert (await get(query)).status == 400


async def test_synchronous_no_group_is_made_by_weights_given_up(tmp_path):
    """It published 1.1 before it asked: what ran meanwhile is not the data of batch 4, and the server has
    nothing better yet.
    """
    runs: list[str] = []
    noting = lambda frame: runs.append(frame["version"]) or "group"  # noqa: E731
    service = make(tmp_path, noting, eta=0, order="in_order")
    await batches(service, 1, 2, 3)
    service.executor.version_of = lambda asked: max(asked, "1.1")
    assert await service.batch(4, 0, 0.2) is None
    assert runs[-2:] == ["0.3", "0.3"] and len(runs) == 8  # once each, and then not again
    assert not load_state(tmp_path).ready
    await batches(service, 2, 3, lineage=1)
    assert len(runs) == 8
    assert indexes(await service.batch(4, 1, 5)) == [6, 7] and runs[8:] == ["1.3", "1.3"]
    assert service.sequencer.log.seals[4].staleness == {0: 2}


async def test_no_batch_within_the_time_is_none_and_costs_no_spinning(tmp_path):
    service = make(tmp_path, fate=lambda frame: None)
    turns = 0
    cut = service._cut

    async def counted(step):
        nonlocal turns
        turns += 1
        return await cut(step)

    service._cut = counted
    assert await asyncio.gather(*(service.batch(1, 0, 0.2) for _ in range(3))) == [None] * 3
    assert turns < 20


async def test_an_older_lineage_a_skipped_step_and_a_trimmed_batch_are_refused(tmp_path):
    service = make(tmp_path)
    await batches(service, 1, 2, 3, lineage=1)
    with pytest.raises(Stale):
        await service.batch(4, 0, 5)
    with pytest.raises(Refused, match="the batch log has 3 batches, so the next one can't be batch 5"):
        await service.batch(5, 1, 5)
    await service.retain(2)
    with pytest.raises(Refused, match="deleted already"):
        await service.batch(2, 1, 5)
    await service.close()
    later = make(tmp_path)
    with pytest.raises(Stale):
        await later.batch(4, 0, 5)
    assert decode(await later.batch(3, 2, 5)).step == 3


async def test_what_a_killed_trim_left_goes_and_the_log_says_so(tmp_path, monkeypatch):
    trial = Trial(tmp_path)
    monkeypatch.setattr("hpc_rl.rollout.batch_log.ledger.Ledger.drop_segment", lambda *_: None)
    service = make(trial.rollout)
    await batches(service, 1, 2, 3)
    with monkeypatch.context() as patched:
        patched.setattr("pathlib.Path.unlink", lambda *_, **__: None)  # killed before
        await service.retain(2)
    await service.close()
    assert find_trimmed(trial) == 2 and sorted(list_seals(trial)) == [1, 2, 3]
    later = make(trial.rollout)
    assert list_seals(trial) == [3]
    await later.batch(3, 0, 5)
    await later.retain(3)
    assert list_seals(trial) == [] and find_trimmed(trial) == 3
    assert decode(await later.batch(4, 0, 5)).step == 4


async def test_two_owners_of_one_ledger_agree_on_every_batch(tmp_path):
    one, two = make(tmp_path), make(tmp_path)
    bodies = {}
    for step in range(1, 9):
        first, second = (one, two) if step % 3 else (two, one)
        bodies[step] = await first.batch(step, 0, 5)
        if step not in (2, 5):  # then the second one has missed a batch
            assert await second.batch(step, 0, 5) == bodies[step]
    found = indexes(*bodies.values())
    assert len(set(found)) == len(found) == 16
    await one.close()
    await two.close()
    state = load_state(tmp_path)
    assert state.consumed == 16 and not state.rejected


async def test_segments_that_nothing_needs_are_deleted(tmp_path):
    for start in (1, 3, 5):
        service = make(tmp_path, eta=0)
        await batches(service, start, start + 1)
        await service.close()
    assert list_segments(tmp_path) == [0, 1, 2]
    service = make(tmp_path, eta=0)
    await service.retain(4)
    assert list_segments(tmp_path) == [2, 3]
    kept = await service.batch(5, 0, 5)
    await service.close()
    again = make(tmp_path, eta=0)
    assert again.sequencer.log.trimmed == 4 and again.sequencer.log.consumed == 12
    assert await again.batch(5, 0, 5) == kept
    assert min(group.index for group in decode(await again.batch(7, 0, 5)).groups) == 12


async def test_a_segment_that_is_begun_while_others_are_deleted_stays(tmp_path):
    service = make(tmp_path)
    service.ledger.segment_bytes = 150
    await batches(service, *range(1, 8))
    commit, begun = service.ledger.commit, []

    def commit_and_go_on() -> None:
        commit()
        while not begun or begun[-1].segment == begun[0].segment:
            begun.append(service.ledger.append_base(service.sequencer.log.summarize(1)))

    service.ledger.commit = commit_and_go_on
    await service.retain(5)
    service.ledger.commit = commit
    assert begun[-1].segment in list_segments(tmp_path) and 0 not in list_segments(tmp_path)


class Unreadable(Prompts):
    def at(self, index: int) -> Prompt:
        raise ConfigError("dataset rows.jsonl row 7: chat template of /m refuses the messages: no system")

    in_file_order = at


async def test_a_row_that_the_chat_template_refuses_ends_the_role_with_its_name(tmp_path):
    service = make(tmp_path)
    service.prompts = Unreadable(50)
    assert await service.batch(1, 0, 0) is None
    with pytest.raises(ConfigError, match="row 7: chat template"):
        await asyncio.wait_for(service.run(), extend(5))
    held_out = make(tmp_path / "another")
    held_out.evaluations.sets[""] = Unreadable(5)
    with pytest.raises(Refused, match=r"the rollout role ends: dataset .* row 7"):
        await evaluate(held_out, WeightVersion(0, 0))
    with pytest.raises(ConfigError, match="row 7: chat template"):
        await asyncio.wait_for(held_out.run(), extend(5))


async def test_after_a_failed_seal_the_next_role_cuts_the_same_batch(tmp_path, monkeypatch):
    service = make(tmp_path)
    whole = await service.batch(1, 0, 5)
    running = asyncio.create_task(service.run())

    def broken(_fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", broken)
        with pytest.raises(Refused, match="Input/output error"):
            await service.batch(2, 0, 5)
        with pytest.raises(OSError, match="Input/output error"):
            await asyncio.wait_for(running, extend(5))
    after = make(tmp_path)
    assert await after.batch(1, 0, 5) == whole
    assert decode(await after.batch(2, 0, 5)).step == 2


async def test_on_a_full_disk_the_batch_waits_for_room(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("hpc_rl.core.files.PAUSE_S", (0.01, 0.01))
    service = make(tmp_path)
    await service.batch(1, 0, 5)
    running = asyncio.create_task(service.run())

    room, fsync = False, os.fsync

    def perhaps(*what):
        if not room:
            raise OSError(errno.ENOSPC, "No space left on device")
        return fsync(*what)

    monkeypatch.setattr(os, "fsync", perhaps)
    first = asyncio.create_task(service.batch(2, 0, 5))
    while not service.ledger.room.waiting:
        await asyncio.sleep(0.01)
    told = await service.batch(2, 0, 0.05)
    room = True
    body = await asyncio.wait_for(first, extend(30))
    assert told is None and "DISK FULL: " in caplog.text  # a second ask was answered: the role lives
    assert decode(body).step == 2 and not running.done() and not service.ledger.room.waiting
    running.cancel()
    await service.close()
    after = make(tmp_path)
    assert await after.batch(2, 0, 5) == body


async def test_prompts_that_fail_are_tried_again_then_rejected_with_the_reason(tmp_path):
    def fate(frame):
        return {1: "failed", 2: {"op": "rejected", "reason": "reward_timeout"}}.get(frame["index"], "group")

    service = make(tmp_path, fate, order="in_order", eta=0)
    assert indexes(await service.batch(1, 0, 5)) == [0, 3]
    assert collect_counters(service)["rejected"] == {"exception": 1, "reward_timeout": 1}
    await service.close()
    reasons = {index: record.reason for index, record in load_state(tmp_path).rejected.items()}
    assert reasons == {1: "exception", 2: "reward_timeout"}


async def test_a_reward_that_raises_for_every_prompt_ends_the_role_and_is_in_the_log_once(tmp_path, caplog):
    place, trace = "KeyError (mine.py:3, in near)", "Traceback (most recent call last):\n  File"
    rejected = {"op": "rejected", "reason": "reward_exception", "place": place, "trace": trace}

    def fate(frame):
        return rejected | {"error": f"KeyError: '{frame['index']}' (mine.py:3, in near)"}

    service = make(tmp_path, fate)
    asking = asyncio.create_task(service.batch(1, 0, 30))
    told = r"^the reward fails: KeyError: '63' \(mine.py:3, in near\); the last 64"
    with pytest.raises(UserCodeFailed, match=told):
        await asyncio.wait_for(service.run(), extend(10))
    assert caplog.text.count("Traceback (most recent call last)") == 1
    asking.cancel()


async def test_a_reward_that_raises_for_every_held_out_prompt_ends_the_role(tmp_path):
    rejected = {"op": "rejected", "reason": "reward_exception", "error": "KeyError: 'x' (mine.py:3, in near)"}
    service = make(tmp_path, lambda frame: rejected if frame["evaluate"] else None)
    with pytest.raises(Refused):
        await evaluate(service, WeightVersion(0, 3))
    told = r"5 were left out; the last exception: KeyError: 'x' \(mine.py:3"
    with pytest.raises(UserCodeFailed, match=told):
        await service.run()


async def test_a_filter_that_rejects_for_long_is_no_failure_within_an_epoch(tmp_path):
    rejected = {"op": "rejected", "reason": "workflow_none"}
    service = make(tmp_path, lambda frame: "group" if frame["index"] > 300 else rejected, num_rows=1000)
    assert decode(await service.batch(1, 0, 10)).groups[0].index > 300
    assert not service._failed.done()


async def test_answers_of_a_dead_worker_do_not_count_twice(tmp_path):
    held = []
    fate = lambda frame: held.append(frame) if frame["index"] == 0 and not held else "group"  # noqa: E731
    service = make(tmp_path, fate, eta=0)
    assert await service.batch(1, 0, 0.1) is None
    service.on_lost([held[0]["ticket"]])
    body = await service.batch(1, 0, 5)
    service.executor.fate = lambda frame: "group"
    service.executor.answer(held[0])
    assert await service.batch(1, 0, 5) == body
    assert decode(await service.batch(2, 0, 5)).groups[0].index == 2


async def test_an_evaluation_asks_every_prompt_once_and_only_counts_its_version(tmp_path):
    asked = []

    def fate(frame):
        if not frame["evaluate"]:
            return None
        asked.append(frame["row"])
        if asked.count(frame["row"]) == 1 and frame["row"] == 2:
            return scored | {"rewards": [9.0], "versions": ["0.2", "0.3"]}
        if frame["row"] == 4:
            return {"op": "rejected", "reason": "reward_timeout"}
        stats = {"row": frame["row"]} | ({"left_out": 7.0, "odd": 1.0} if frame["row"] % 2 else {})
        return scored | {"stats": stats}

    scored = SCORED | {"versions": ["0.3"], "stats": {"row": 99}}
    service = make(tmp_path, fate)
    result = await evaluate(service, WeightVersion(0, 3))
    assert (result.num_prompts, result.reward, result.version) == (4, 1.0, "0.3")
    counts = {"num_tokens": 12.0, "left_out": 1.0, "asked_again": 1.0}
    assert result.stats == {"row": 1.5, "odd": 1.0} | counts  # means over the rows that have it
    assert sorted(asked) == [0, 1, 2, 2, 3, 4]
    assert await evaluate(service, WeightVersion(0, 3)) is result
    assert 0 < len(service.sequencer.running) <= 4  # evaluation is not counted as running


async def test_an_evaluation_of_several_completions_measures_pass_at_k_for_each_set(tmp_path):
    def fate(frame):
        rewards = [[1.0, 0.0, 0.0, 0.0], [0.0] * 4, [1.0] * 4, [1.0, 1.0, 0.5, 0.5], [0.0] * 4][frame["row"]]
        return SCORED | {"rewards": rewards, "versions": ["0.3"]} if frame["evaluate"] else None

    service = make(tmp_path, fate)
    service.evaluations.options = EvaluatorConfig(sets_column="of", blocking=True)
    result = await evaluate(service, WeightVersion(0, 3))
    await service.close()
    assert result.reward == pytest.approx((1 + 0 + 4 + 3 + 0) / 20)
    found = {name: value for name, value in result.stats.items() if name.startswith("pass@")}
    expected = {"pass@1": (1 / 4 + 1 + 1 / 2) / 5, "pass@2": (1 / 2 + 1 + 5 / 6) / 5, "pass@4": 3 / 5}
    assert found == pytest.approx(expected)
    of_sets = {name: value for name, value in result.stats.items() if "/" in name}
    assert of_sets["even/reward"] == pytest.approx(5 / 12) and of_sets["odd/pass@4"] == 0.5
    assert {name.partition("/")[0] for name in of_sets} == {"even", "odd"}


async def test_an_evaluation_that_can_never_end_is_refused(tmp_path):
    newer = SCORED | {"versions": ["0.4"]}
    service = make(tmp_path, lambda frame: newer if frame["evaluate"] else None)
    with pytest.raises(Stale, match=r"0\.4"):
        await evaluate(service, WeightVersion(0, 3))
    await service.close()
    waiting = make(tmp_path, lambda frame: None)
    first = asyncio.create_task(evaluate(waiting, WeightVersion(0, 3)))
    await asyncio.sleep(0)
    waiting.observe(1, 2)
    with pytest.raises(Stale, match="lineage 1"):
        await first


def scores(asked: list, held=lambda frame: False):
    """A fate that scores held-out prompts by their row and notes them, except those that are held."""

    def fate(frame):
        if not frame["evaluate"] or held(frame):
            return None
        asked.append((frame["held_out_set"], frame["row"]))
        return SCORED | {"rewards": [float(frame["row"])], "versions": [frame["version"]]}

    return fate


async def test_a_restarted_role_asks_only_the_held_out_prompts_without_an_outcome(tmp_path):
    seen: list[tuple[str, int]] = []
    service = make(tmp_path, scores(seen, held=lambda frame: frame["row"] == 3))
    first = asyncio.create_task(evaluate(service, WeightVersion(0, 3)))
    while len(seen) < 4:
        await asyncio.sleep(0.01)
    while service.evaluations.count_scored((WeightVersion(0, 3), "")) < 4:
        await asyncio.sleep(0.01)  # an outcome is written after its prompt was asked
    first.cancel()
    service.ledger.close()
    (log,) = (tmp_path / "evaluations" / "0.3").glob("*.log")
    log.write_bytes(log.read_bytes()[:-3])  # the last outcome is torn
    torn = seen.pop()
    again: list[tuple[str, int]] = []
    service = make(tmp_path, scores(again))
    result = await evaluate(service, WeightVersion(0, 3))
    assert sorted(again) == sorted([torn, ("", 3)])
    assert (result.num_prompts, result.reward) == (5, 2.0)
    service.ledger.close()
    changed: list[tuple[str, int]] = []
    service = make(tmp_path, scores(changed))
    service.evaluations.identity = "another reward"
    await evaluate(service, WeightVersion(0, 3))
    assert len(changed) == 5, "outcomes of another reward do not count"


async def test_an_evaluation_goes_on_for_a_later_trainer_that_asks_for_it(tmp_path):
    seen: list[tuple[str, int]] = []
    waits = [True]
    service = make(tmp_path, scores(seen, held=lambda frame: waits[0] and frame["row"] == 3))
    service.evaluations.options = EvaluatorConfig()
    first = asyncio.create_task(evaluate(service, WeightVersion(0, 3)))
    while len(seen) < 4:
        await asyncio.sleep(0.01)
    await service.begin(1)
    service.observe(1, 5)
    with pytest.raises(Stale, match=r"0\.3 was dropped"):
        await first
    assert service.evaluations.running == []
    waits[0] = False
    assert (await evaluate(service, WeightVersion(0, 3), lineage=1)).num_prompts == 5
    assert sorted(seen) == [("", row) for row in range(5)], "none is asked twice"


async def test_an_answer_without_a_result_has_the_number_of_scored_prompts(tmp_path):
    service = make(tmp_path, scores([], held=lambda frame: frame["row"] == 3))
    wanted = {"version": "0.3", "wait_s": 0.05}
    async with asked(service) as client:
        scored = ""
        while scored != "4":
            answer = await client.post("/evaluate", json=wanted, headers=CONTROL)
            assert answer.status == 204
            scored = answer.headers["X-Hpc-Rl-Scored"]


async def test_each_held_out_set_has_its_prompts_its_result_and_its_log(tmp_path):
    seen: list[tuple[str, int]] = []
    service = make(tmp_path, scores(seen))
    service.evaluations.sets["hard"] = Prompts(3)
    service.evaluations.options = EvaluatorConfig(sets={"hard": HeldOutSetConfig(path="h", pass_reward=2.0)})
    main = await evaluate(service, WeightVersion(0, 3))
    hard = await evaluate(service, WeightVersion(0, 3), "hard")
    assert (main.num_prompts, main.reward, hard.num_prompts, hard.reward) == (5, 2.0, 3, 1.0)
    assert len(seen) == 8 == len(set(seen))
    await evaluate(service, WeightVersion(0, 9))
    await service.retain(9)
    assert [path.name for path in (tmp_path / "evaluations").iterdir()] == ["0.9"]
    async with asked(service) as client:
        for name, status in (("hard", 200), ("unknown", 404)):
            body = {"version": "0.3", "set": "", "together": [name], "wait_s": 5}
            assert (await client.post("/evaluate", json=body, headers=CONTROL)).status == status


async def test_a_batch_that_cannot_come_any_more_is_said_not_to_come(tmp_path):
    left: list[float | None] = [None]
    service = make(tmp_path, left_s=lambda: left[0])
    assert decode(await service.batch(1, 0, 5)).step == 1
    left[0] = -1.0
    with pytest.raises(Refused) as refused:
        while True:
            await service.batch(service.sequencer.log.top + 1, 0, 5)
    assert refused.value.status == 205
    made, issued = service.sequencer.log.top, service.sequencer.next_index
    assert made >= 1 and collect_counters(service)["holding"]
    assert decode(await service.batch(made, 0, 5)).step == made, "what was cut is there all the same"
    left[0] = 1000.0
    assert service.clock.can_resume()
    service._issue()
    assert decode(await service.batch(made + 1, 0, 5)).step == made + 1
    assert service.sequencer.next_index > issued


async def test_a_reader_moves_nothing(tmp_path):
    service = make(tmp_path, lineages=lambda: (1, []))
    async with asked(service) as client:

        async def get(query: str, headers=DATA) -> int:
            return (await client.get(f"/batch?{query}&wait_s=0", headers=headers)).status

        async def evaluate(version: str, headers=DATA) -> int:
            wanted = {"version": version, "wait_s": 0}
            return (await client.post("/evaluate", json=wanted, headers=headers)).status

        assert await get("step=1&lineage=0") == 204 and not service.sequencer.running
        assert await get("step=5&lineage=0") == 412
        assert await get("step=1&lineage=0", CONTROL) in (200, 204)
        before = collect_counters(service)
        assert await get("step=1&lineage=99999999") == 403
        assert await get("step=1&lineage=1") == 403
        assert await evaluate("99999999.1") == 403 and await evaluate("0.1") == 403
        # also the trainer's token begins no lineage that the trial directory does not know
        assert await get("step=1&lineage=2", CONTROL) == 425 and await evaluate("2.1", CONTROL) == 425
        assert collect_counters(service) == before and service.sequencer.log.lineage == 0
        assert await get("step=1&lineage=1", CONTROL) == 200 and service.sequencer.log.lineage == 1
        assert await get("step=1&lineage=1") == 200 and await get("step=1&lineage=0") == 409


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/evaluate", b"[" * 5000),
        ("/evaluate", b'{"version": ["0.1"]}'),
        ("/evaluate", b'{"version": "\\ud800"}'),
        ("/evaluate", b"null"),
        ("/retain", b'{"step": "x"}'),
        ("/retain", b'{"step": 1e999}'),
        ("/retain", b"[1]"),
    ],
)
async def test_a_body_that_is_not_what_is_asked_for_is_400(tmp_path, path, body):
    service = make(tmp_path)
    async with asked(service) as client:
        assert (await client.post(path, data=body, headers=CONTROL)).status == 400
        odd = {"Authorization": b"Bearer \xff".decode(errors="surrogateescape")}
        assert (await client.get("/status", headers=odd)).status == 401


async def test_a_seal_of_a_lineage_that_has_no_record_does_not_stop_the_trial(tmp_path):
    one = make(tmp_path, lineages=lambda: (99999999, []))
    body = await one.batch(1, 99999999, 5)
    await one.close()
    assert load_state(tmp_path).lineage == 99999999
    two = make(tmp_path, lineages=lambda: (3, []))
    two.sequencer.log.lineage = 0
    assert await two.batch(1, 3, 5) == body and decode(await two.batch(2, 3, 5)).step == 2
    assert load_state(tmp_path).seals[2].lineage == 3


@pytest.mark.parametrize("order", ["ready", "in_order"])
@pytest.mark.parametrize("restarts", [True, False])
async def test_a_lineage_with_new_batches_issues_later_prompts_again(tmp_path, order, restarts):
    known = [record(0)]
    one = make(tmp_path, order=order, lineages=lambda: (known[-1].lineage, known))
    bodies = await batches(one, *range(1, 7))
    if restarts:
        await one.close()
        one = make(tmp_path, order=order, lineages=lambda: (known[-1].lineage, known))
    known.append(record(1, 3, new_batches=True))
    made = await batches(one, *range(4, 8), lineage=1)
    assert sorted(indexes(*made)) == list(range(6, 14))
    assert await batches(one, 2, 3, lineage=1) == bodies[1:3]
    await one.close()
    state = load_state(tmp_path)
    assert sorted(state.seals) == [1, 2, 3, 4, 5, 6, 7] and state.consumed == 14 and not state.set_aside
    assert [seal.lineage for _, seal in sorted(state.seals.items())] == [0, 0, 0, 1, 1, 1, 1]
    aside = load_state(tmp_path / "set-aside" / "1")
    assert sorted(aside.seals) == [4, 5, 6]
    # a crash replays what this lineage made
    known.append(record(2, 3))
    again = make(tmp_path, order=order, lineages=lambda: (known[-1].lineage, known))
    assert await batches(again, *range(4, 8), lineage=2) == made
    # and after a trim nothing of what was given up comes back
    await again.retain(6)
    await again.close()
    assert min(list_segments(tmp_path)) > 0
    last = make(tmp_path, order=order, lineages=lambda: (known[-1].lineage, known))
    assert sorted(indexes(await last.batch(8, 2, 5))) == [14, 15]


@pytest.mark.parametrize("is_new", [True, False])
@pytest.mark.parametrize("trimmed", [0, 2])
@pytest.mark.parametrize("goes_back", [True, False])
async def test_prompts_that_user_code_rejected_are_issued_again_once_it_has_changed(
    tmp_path, caplog, goes_back, trimmed, is_new
):
    caplog.set_level("INFO")
    broken = {1: "reward_exception", 3: "too_long", 4: "bad_group", 9: "too_long"}

    def fate(frame):
        reason = broken.get(frame["index"])
        return {"op": "rejected", "reason": reason} if reason else "group"

    def started(code: str) -> RolloutService:
        service = make(tmp_path, fate, order="in_order", eta=0, lineages=lambda: (known[-1].lineage, known))
        service.judged = Judged(tmp_path, {"code of rollout.reward_fn": code, "gconfig.n_samples": "4"})
        return service

    known = [record(0)]
    one = started("old")
    assert indexes(*await batches(one, 1, 2, 3)) == [0, 2, 5, 6, 7, 8]
    await one.batch(4, 0, 5)
    await one.retain(trimmed)
    await one.close()
    broken.clear()
    known.append(record(1, 2, new_batches=goes_back))
    two = started("new" if is_new else "old")
    # prompt 9 was rejected after step 2, prompt 3 is as long as it was
    expected = [7, 8, 9, 10, 11, 12] if goes_back else [7, 8, 10, 11, 12, 13]
    if is_new:
        expected = [1, 4, 7, 8, 9, 10] if goes_back else [7, 8, 10, 11, 1, 4]
    assert indexes(*await batches(two, 3, 4, 5, lineage=1)) == expected
    assert describe_progress(two)["issued_again"] == (2 if is_new else 0)
    told = "2 prompts begin again, because an earlier reward or workflow had rejected them"
    assert (told in caplog.text) == is_new
    await two.close()
    state = load_state(tmp_path)
    of_user_code = {} if is_new else {"reward_exception": 1, "bad_group": 1}
    assert state.rejections == {"too_long": 1 if goes_back else 2, **of_user_code}
    # a crash changes nothing of it
    known.append(record(2, 4))
    three = started("new" if is_new else "old")
    assert indexes(await three.batch(5, 2, 5)) == expected[4:] and three.issued_again == 0


@pytest.mark.parametrize("killed_in", ["append_base", "commit", "move_aside", "replace", "restore"])
async def test_giving_batches_up_may_be_killed_anywhere(tmp_path, monkeypatch, killed_in):
    known = [record(0), record(1, 2, new_batches=True)]
    one = make(tmp_path, lineages=lambda: (known[-1].lineage, known[:1]))
    one.sequencer.log.lineage = 0
    bodies = await batches(one, *range(1, 6))
    await one.close()

    class Killed(Exception):
        pass

    def kill(*_: object) -> None:
        raise Killed

    two = make(tmp_path, lineages=lambda: (known[-1].lineage, known))
    owners = {"append_base": two.ledger, "commit": two.ledger, "move_aside": two.batches, "replace": os}
    owner = owners.get(killed_in, two.sequencer)
    with monkeypatch.context() as patched:
        patched.setattr(owner, killed_in, kill)
        with pytest.raises((Killed, Refused)):
            await two.batch(3, 1, 5)
    with contextlib.suppress(Killed, TimeoutError):
        await asyncio.wait_for(two.run(), 0.1)  # no close: a killed process writes nothing more
    known.append(record(2, 2))
    three = make(tmp_path, lineages=lambda: (known[-1].lineage, known))
    assert await three.batch(2, 2, 5) == bodies[1]
    made = await batches(three, *range(3, 8), lineage=2)
    assert sorted(indexes(*made)) == list(range(4, 14))
    await three.close()
    state = load_state(tmp_path)
    assert sorted(state.seals) == list(range(1, 8)) and state.consumed == 14
    assert [seal.lineage for _, seal in sorted(state.seals.items())] == [0, 0, 2, 2, 2, 2, 2]
    assert sorted(load_state(tmp_path / "set-aside" / "1").seals) == [3, 4, 5]


def note(ticket: int, index: int, value: bytes, version: str = "0.0") -> dict:
    of_prompt = {"ticket": ticket, "index": index, "version": version}
    return {"op": "note", "key": "probe", "value": value, **of_prompt}


async def test_a_workflow_continues_when_its_note_is_on_disk_and_notes_share_a_sync(tmp_path, monkeypatch):
    service = make(tmp_path, lambda frame: None, eta=9, max_concurrent=9)
    on_disk, syncs, fsync = [], [], os.fsync

    def keep(frame):
        on_disk.append(load_state(tmp_path).notes[frame["ticket"] - 1]["probe"][0] == frame["value"])

    def slow(fd):
        syncs.append(fd)
        time.sleep(0.1)
        fsync(fd)

    service.executor.confirm_note = keep
    service.observe(0, 0)
    running = asyncio.create_task(service.run())
    await asyncio.sleep(0.05)
    monkeypatch.setattr(os, "fsync", slow)
    service.on_note(note(1, 0, b"first"))
    await asyncio.sleep(0.05)
    assert on_disk == []
    for ticket in range(2, 9):
        service.on_note(note(ticket, ticket - 1, b"more"))
    await asyncio.sleep(0.4)
    assert on_disk == [True] * 8 and len(syncs) == 2
    running.cancel()


async def test_a_note_that_a_seal_is_writing_is_not_kept_before_it_is_written(tmp_path, monkeypatch):
    service = make(tmp_path, lambda frame: None)
    kept, writing, go_on, fsync = [], threading.Event(), threading.Event(), os.fsync

    def held(fd):
        writing.set()
        go_on.wait(extend(10))
        fsync(fd)

    service.executor.confirm_note = kept.append
    service.observe(0, 0)
    service.on_note(note(1, 0, b"p"))
    monkeypatch.setattr(os, "fsync", held)
    seal = asyncio.create_task(asyncio.to_thread(service.ledger.commit))
    await asyncio.to_thread(writing.wait, 10)
    running = asyncio.create_task(service.run())
    await asyncio.sleep(0.2)
    assert not service.ledger.uncommitted and kept == []
    go_on.set()
    await seal
    await asyncio.sleep(0.2)
    assert [frame["value"] for frame in kept] == [b"p"]
    running.cancel()


async def test_a_note_of_a_ticket_that_was_given_up_counts_and_the_first_one_holds(tmp_path):
    kept, seen = [], []
    service = make(tmp_path, lambda frame: seen.append(frame), eta=0, batch_size=1, max_concurrent=1)
    service.executor.confirm_note = kept.append
    running = asyncio.create_task(service.run())
    service.observe(0, 0)
    service.observe(1, 0)  # synchronous: what ran is issued again
    await asyncio.sleep(0.05)
    asked = [(frame["ticket"], frame["index"], frame["version"]) for frame in seen]
    assert asked == [(1, 0, "0.0"), (2, 0, "1.0")]
    service.on_note(note(1, 0, b"late"))
    service.on_note(note(2, 0, b"later", "1.0"))
    await asyncio.sleep(0.2)
    assert [(frame["ticket"], frame["value"]) for frame in kept] == [(1, b"late"), (2, b"late")]
    assert load_state(tmp_path).notes[0]["probe"][0] == b"late"
    running.cancel()


async def test_notes_of_prompts_issued_before_new_batches_do_not_count(tmp_path):
    one = make(tmp_path, lambda frame: "group" if frame["index"] != 1 else None, batch_size=1)
    await one.batch(1, 0, 5)
    known = [record(1, 1, new_batches=True)]
    one._lineages = lambda: (1, known)
    begin_segment, loop = one.ledger.begin_segment, asyncio.get_running_loop()

    def begin_and_note() -> None:
        begin_segment()
        arrived = threading.Event()
        loop.call_soon_threadsafe(lambda: (one.on_note(note(2, 1, b"old")), arrived.set()))
        arrived.wait(extend(5))

    one.ledger.begin_segment = begin_and_note
    await one.begin(1)
    one.on_note(note(2, 1, b"old"))
    one.observe(1, 1)
    assert one.sequencer.log.notes == {}
    one.on_note(note(9, 1, b"new", "1.1"))
    await one.close()
    assert load_state(tmp_path).notes[1]["probe"][0] == b"new"
    two = make(tmp_path, lambda frame: None, lineages=lambda: (1, known))
    two.on_note(note(1, 2, b"old"))
    assert two.sequencer.log.notes.keys() == {1}


async def test_notes_go_with_their_prompt_until_it_has_its_group(tmp_path):
    def fate(frame):
        seen.append((frame["index"], frame["notes"]))
        return "group" if frame["notes"] else None

    seen = []
    one = make(tmp_path, fate)
    waiting = asyncio.create_task(one.batch(1, 0, 20))
    running = asyncio.create_task(one.run())
    await asyncio.sleep(0.1)
    assert seen == [(index, {}) for index in range(4)]
    for ticket in (1, 2, 3):
        one.on_note(note(ticket, ticket - 1, bytes([ticket])))
    await asyncio.sleep(0.2)  # on disk at once, not a second later
    assert load_state(tmp_path).notes.keys() == {0, 1, 2}
    one.on_lost([2])
    await asyncio.sleep(0.1)
    assert seen[4:] == [(1, {"probe": bytes([2])})] and 1 not in one.sequencer.log.notes
    waiting.cancel()
    running.cancel()
    await one.close()

    seen.clear()
    two = make(tmp_path, fate, max_concurrent=3)
    two.observe(0, 0)
    await asyncio.sleep(0.1)
    assert seen[:2] == [(0, {"probe": bytes([1])}), (2, {"probe": bytes([3])})]
    assert two.sequencer.log.notes == {}


async def test_a_segment_with_notes_of_open_prompts_stays_and_a_new_policy_makes_its_own(tmp_path):
    hold = {0}
    one = make(tmp_path, lambda frame: None if frame["index"] in hold else "group", eta=9, max_concurrent=9)
    waiting = asyncio.create_task(one.batch(1, 0, 20))
    await asyncio.sleep(0.05)
    [ticket] = [ticket for ticket, issue in one.sequencer.running.items() if issue.index == 0]
    one.on_note(note(ticket, 0, b"p"))
    await waiting
    one.ledger.begin_segment()
    await batches(one, 2, 3)
    await one.retain(2)
    await one.close()
    assert load_state(tmp_path).notes[0]["probe"][0] == b"p"
    two = make(tmp_path, lineages=lambda: (1, [record(1, 3, new_batches=True)]))
    await two.begin(1)
    assert two.sequencer.log.notes == {} == load_state(tmp_path).notes
