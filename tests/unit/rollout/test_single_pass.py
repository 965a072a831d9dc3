"""A pass over prompts: one result each, over restarts; and the files that are written of it."""

import asyncio
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from hpc_rl.core.errors import RoleFailed
from hpc_rl.core.types import Trajectory, TrajectoryGroup, encode
from hpc_rl.datasets.encode import Prompt
from hpc_rl.datasets.rows import Rows
from hpc_rl.rollout.results import write_results
from hpc_rl.rollout.single_pass import SinglePass


class FewPrompts:
    """Prompts without a tokenizer."""

    path = "few.jsonl"

    def __init__(self, count: int) -> None:
        self.rows = Rows([{"prompt": f"p{i}", "topic": "ab"[i % 2]} for i in range(count)], {})

    def __len__(self) -> int:
        return len(self.rows)

    def in_file_order(self, position: int) -> Prompt:
        return Prompt(0, position, self.rows[position], [position])


class FakeExecutor:
    """Answers each ticket by `behave(index, try)`: a list of rewards, or an operation."""

    def __init__(self, behave) -> None:
        self.behave, self.asked = behave, Counter()
        self.endpoints, self.blocked = {}, {}

    def run(self, frame) -> None:
        index = frame["index"]
        self.asked[index] += 1
        asyncio.get_running_loop().call_soon(self.answer, index)

    def answer(self, index: int) -> None:
        said = self.behave(index, self.asked[index])
        if said == "lost":
            self.on_lost([index])
        elif isinstance(said, str):
            self.on_outcome({"op": said, "ticket": index, "reason": "workflow_none", "error": ""})
        elif said is not None:
            frame = {"op": "scored", "ticket": index, "rewards": said, "num_tokens": 2 * len(said)}
            self.on_outcome(frame | {"group": encode(make_group(index, said))})


def make_group(index: int, rewards: list[float]) -> TrajectoryGroup:
    ids, mask, zeros = np.array([9, 1, 2], np.int32), np.array([False, True, True]), np.zeros(3, np.float32)
    versions = np.zeros(3, np.int32)
    one = [Trajectory(ids, mask, zeros, versions, versions, reward, "stop") for reward in rewards]
    return TrajectoryGroup(index, one)


class Digits:
    def decode(self, ids: list[int]) -> str:
        return "".join(map(str, ids))


def open_pass(folder: Path, behave, count: int = 6, retries: int = 1) -> tuple[SinglePass, FakeExecutor]:
    executor = FakeExecutor(behave)
    return SinglePass(folder, [FewPrompts(count)], 2, retries, executor), executor


def test_a_restart_issues_only_prompts_without_a_result(tmp_path):
    async def play() -> None:
        # the third prompt never ends
        made, executor = open_pass(tmp_path, lambda index, tries: None if index == 3 else [1.0, 0.0])
        running = asyncio.ensure_future(made.run())
        while len(made.groups) < 5:
            await asyncio.sleep(0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await made.close()
        assert made.describe_progress()["progress"] == 5

        again, executor = open_pass(tmp_path, lambda index, tries: [0.5, 0.25])
        await again.run()
        assert executor.asked == {3: 1}
        scores = write_results(tmp_path / "out", again, Digits(), 1.0, sets_column="topic")
        await again.close()
        assert scores["reward"] == pytest.approx((5 * 0.5 + 0.375) / 6)
        assert scores["a/reward"] == 0.5
        assert scores["b/pass@1"] == pytest.approx(2 / 3 * 0.5)

    asyncio.run(play())
    rows = [json.loads(line) for line in (tmp_path / "out" / "completions.jsonl").read_text().splitlines()]
    assert [(row["index"], row["sample"]) for row in rows] == [(i, k) for i in range(6) for k in range(2)]
    assert {row["completion"] for row in rows} == {"12"}, "without the prompt"


def test_each_held_out_set_has_its_own_measures_and_positions(tmp_path):
    """The seeds follow from the positions: the results are those of an evaluation during training."""
    frames = []

    async def play() -> None:
        executor = FakeExecutor(lambda index, tries: [0.5] if index < 3 else [2.0, 0.0])
        run, sets = executor.run, ["", "hard"]
        executor.run = lambda frame: (frames.append(frame), run(frame | {"index": frame["ticket"]}))
        parts = [FewPrompts(3), FewPrompts(2)]
        made = SinglePass(tmp_path, parts, 2, 1, executor, sets)
        await made.run()
        given = {"sets_column": "topic", "set_pass_rewards": {"hard": 2.0}}
        scores = write_results(tmp_path / "out", made, Digits(), 1.0, **given)
        await made.close()
        assert (scores["reward"], scores["hard/reward"]) == (0.5, 1.0)
        assert (scores["hard/pass@1"], scores["hard/pass@2"]) == (0.5, 1.0)
        assert scores["a/reward"] == scores["b/reward"] == 0.5, "the column is of valid_dataset"
        assert (scores["prompts"], scores["completions"]) == (5, 7)

    asyncio.run(play())
    asked = sorted((frame["held_out_set"], frame["index"], frame["columns"]["prompt"]) for frame in frames)
    assert asked == [("", 0, "p0"), ("", 1, "p1"), ("", 2, "p2"), ("hard", 0, "p0"), ("hard", 1, "p1")]
    rows = [json.loads(line) for line in (tmp_path / "out" / "completions.jsonl").read_text().splitlines()]
    assert [(row["index"], row["set"]) for row in rows][2:] == [
        (2, ""),
        *[(3, "hard")] * 2,
        *[(4, "hard")] * 2,
    ]


def test_lost_and_failed_prompts_are_issued_again_and_rejected_ones_left_out(tmp_path):
    def behave(index: int, tries: int) -> list[float] | str:
        if index == 0:
            return "lost" if tries < 4 else [1.0]
        if index == 1:
            return "failed"
        return "rejected" if index == 2 else [0.0]

    async def play() -> None:
        made, executor = open_pass(tmp_path, behave)
        await made.run()
        assert executor.asked == {0: 4, 1: 2, 2: 1, 3: 1, 4: 1, 5: 1}
        scores = write_results(tmp_path / "out", made, Digits(), 1.0)
        assert scores["left_out"] == {"exception": 1, "workflow_none": 1}
        assert scores["prompts"] == 4
        await made.close()

        again, executor = open_pass(tmp_path, behave)
        await again.run()
        assert not executor.asked, "a rejection is a result"
        await again.close()

    asyncio.run(play())


def test_the_best_completions_are_kept(tmp_path):
    async def play() -> None:
        made, _ = open_pass(tmp_path, lambda index, tries: [0.0, 2.0, 1.0])
        await made.run()
        scores = write_results(tmp_path / "out", made, Digits(), 1.0, num_kept=2)
        assert (scores["reward"], scores["completions"]) == (1.0, 18)
        await made.close()

    asyncio.run(play())
    rows = [json.loads(line) for line in (tmp_path / "out" / "completions.jsonl").read_text().splitlines()]
    assert [(row["sample"], row["reward"]) for row in rows[:3]] == [(1, 2.0), (2, 1.0), (1, 2.0)]


def test_a_pass_without_a_score_fails(tmp_path):
    async def play() -> None:
        made, _ = open_pass(tmp_path, lambda index, tries: "rejected")
        with pytest.raises(RoleFailed, match="all 6 were left out"):
            await made.run()
        await made.close()

    asyncio.run(play())
