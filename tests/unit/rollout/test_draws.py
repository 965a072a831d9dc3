"""The batch log keeps the row of each prompt index and the difficulty of rows, whatever is killed."""

import itertools
import json
import random
from types import SimpleNamespace

from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_rl.config.options.dataset import PromptDatasetConfig
from hpc_rl.datasets.curriculum import Curriculum
from hpc_rl.datasets.rows import Draw
from hpc_rl.rollout.batch_log.ledger import BaseRecord, DrawRecord, GroupRecord, RecordPlace, RejectRecord
from hpc_rl.rollout.batch_log.replay import NewBatches, make_base, replay
from hpc_rl.rollout.batch_log.seals import Seal
from hpc_rl.rollout.difficulty import count_by_difficulty
from hpc_rl.rollout.sequencer import Rules, Sequencer
from hpc_rl.status.rollout_report import describe_difficulty
from tests.unit.rollout.test_rollout_service import decode, make

TOKENIZER = SimpleNamespace(encode=lambda text: [1])
RULES = Rules(batch_size=2, max_concurrent=5, eta=2)


def make_curriculum(folder, num_rows=6) -> Curriculum:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"r{number}"}) + "\n" for number in range(num_rows)))
    dataset = PromptDatasetConfig(path=str(path), curriculum="band", pass_band=[0.3, 0.7], outside_share=0.3)
    return Curriculum(dataset, TOKENIZER, 1)


class World:
    """A sequencer with its records and seals, and prompts that are drawn by difficulty."""

    def __init__(self, curriculum: Curriculum) -> None:
        self.curriculum, self.core = curriculum, Sequencer(RULES)
        self.records, self.committed, self.seals = [], 0, {}
        self.segment, self.places = 0, itertools.count()
        self.seen: dict[int, Draw] = {}  # draws whose prompts left a record on disk
        self.version = 0
        self.core.observe(0, 0)
        self.issue()

    def append(self, record) -> RecordPlace:
        place = RecordPlace(self.segment, next(self.places))
        self.records.append((place, record))
        return place

    def issue(self) -> None:
        log = self.core.log
        for issue in self.core.issue():
            if issue.index not in log.draws:
                draw = self.curriculum.draw(issue.index, log.next_visits, log.rates)
                self.append(DrawRecord(issue.index, draw))
                log.add_draw(issue.index, draw)
            assert log.draws[issue.index] == self.seen.get(issue.index, log.draws[issue.index])

    def finish(self, pick: random.Random) -> None:
        if self.core.running:
            issue = pick.choice(list(self.core.running.values()))
            if pick.random() < 0.2:
                record = RejectRecord(issue.index, self.version, "workflow_none")
                self.append(record)
                self.core.reject(record)
            else:
                reward = pick.choice([0.0, 0.5, 1.0])
                record = GroupRecord(issue.index, issue.begun, issue.begun, 0, 1, 1, reward)
                self.core.finish(issue.ticket, record, self.append(record))
            self.issue()

    def commit(self, _pick: random.Random) -> None:
        self.committed = len(self.records)
        self.seen |= self.core.log.draws

    def seal(self, pick: random.Random) -> None:
        step = self.core.log.top + 1
        groups = self.core.cut(step)
        if groups is None:
            return
        self.commit(pick)
        rates = {self.core.log.draws[i].key: record.reward_sum for i, (record, _) in groups.items()}
        places = {index: place for index, (_, place) in groups.items()}
        seal = Seal(step, 0, places, {0: len(places)}, 0, "", rates=rates)
        self.seals[step] = seal
        self.core.add_seal(seal)
        self.version = step
        self.core.observe(self.core.log.lineage, step)
        self.issue()

    def trim(self, pick: random.Random) -> None:
        log = self.core.log
        step = pick.randint(log.trimmed, log.top)
        if step > log.trimmed:
            self.append(BaseRecord(log.summarize(step)))
            log.trim(step)
            self.seals = {number: seal for number, seal in self.seals.items() if number > step}
            if pick.random() < 0.5:  # the older segments are deleted
                self.records = [one for one in self.records if not isinstance(one[1], DrawRecord)]
            self.commit(pick)

    def go_back(self, pick: random.Random) -> None:
        """A new lineage drops the batches after a step: their prompts are issued again."""
        self.commit(pick)
        self.core.reissue(list(self.core.running))
        self.core.version = None
        self.segment += 1
        log = replay(self.records, self.seals)
        new = NewBatches(log.lineage + 1, pick.randint(log.trimmed, log.top), self.segment)
        self.append(BaseRecord(make_base(log, new)))
        self.commit(pick)
        log = replay(self.records, self.seals)
        self.seals = {step: seal for step, seal in self.seals.items() if step not in log.set_aside}
        self.version = log.top
        self.core.restore(log)
        self.core.observe(new.lineage, self.version)
        self.issue()

    def kill(self, _pick: random.Random) -> None:
        del self.records[self.committed :]
        self.core = Sequencer(RULES)
        self.core.restore(replay(self.records, self.seals))
        self.core.observe(self.core.log.lineage, self.version)
        self.issue()

    def check(self) -> None:
        """Compare the state in memory with what the records give."""
        log, again = self.core.log, replay(self.records, self.seals)
        assert again.draws.items() >= log.draws.items()
        assert (again.next_visits, again.rates) == (log.next_visits, log.rates)
        latest = {}
        for _, seal in sorted(self.seals.items()):
            latest |= seal.rates
        assert log.rates == {**log.trimmed_rates, **latest}


ACTIONS = [*["finish"] * 8, *["seal"] * 4, "commit", "commit", "trim", "go_back", "kill", "kill"]


@given(st.integers(0, 10**9))
@settings(max_examples=40, deadline=None)
def test_a_prompt_keeps_its_row_and_difficulty_follows_from_the_records(tmp_path_factory, seed):
    world, pick = World(make_curriculum(tmp_path_factory.getbasetemp())), random.Random(seed)
    for _ in range(150):
        getattr(world, pick.choice(ACTIONS))(pick)
        world.check()
    visits = [draw.visit for draw in world.core.log.draws.values()]
    assert len(set(visits)) == len(visits)


async def test_a_killed_role_issues_the_same_prompts_and_draws_on_as_if_nothing_was(tmp_path):
    """The rewards of Instant are 1: with the band below that, most visits of known rows are skipped."""
    curriculum = make_curriculum(tmp_path)
    rows, counts = {}, []

    async def train(folder, steps, kill):
        issued: dict[int, int] = {}

        def fate(frame):
            assert issued.setdefault(frame["index"], frame["row"]) == frame["row"]
            return "group"

        service = make_with(folder, curriculum, fate)
        for step in range(1, steps + 1):
            if kill:
                service.ledger.commit()
                service = make_with(folder, curriculum, fate)
            assert decode(await service.batch(step, 0, 5)).step == step
        counts.append(service.sequencer.log.rates)
        await service.close()
        return issued

    rows["whole"] = await train(tmp_path / "whole", 12, kill=False)
    rows["killed"] = await train(tmp_path / "killed", 12, kill=True)
    assert rows["whole"] == rows["killed"] and counts[0] == counts[1] == {(0, row): 1.0 for row in range(6)}
    visited = list(rows["whole"].values())
    assert len(visited) == 24 and visited[:6] != visited[6:12]


def make_with(folder, curriculum, fate):
    """Return a service in synchronous training, which draws a batch only after the one before."""
    service = make(folder, fate, num_rows=6, eta=0)
    service.prompts = curriculum
    return service


def test_rows_are_counted_by_the_mean_reward_of_their_latest_group():
    counts = count_by_difficulty([0.0, 0.0, 0.1, 0.25, 0.26, 0.74, 0.99, 1.0, -2.0, 7.0])
    assert list(counts.values()) == [3, 2, 1, 1, 1, 2]
    # a file may have the ranges in another order
    assert describe_difficulty(dict(sorted(counts.items()))) == (
        "0: 30%, to 0.25: 20%, to 0.5: 10%, to 0.75: 10%, below 1: 10%, 1: 20% of 10 rows"
    )
    assert describe_difficulty(count_by_difficulty([])) == ""
