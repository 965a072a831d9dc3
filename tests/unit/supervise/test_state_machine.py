"""The state machine without processes: what it starts, asks, kills and records."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from toy_plans import toy_unit

from hpc_rl.core.errors import FailureClass, StopCause
from hpc_rl.core.records import ExitRecord
from hpc_rl.supervise.failure_policy import UnitExit, combine_ranks, compute_pause_s
from hpc_rl.supervise.state_machine import (
    DRAIN_GRACE_S,
    END_GRACE_S,
    KILL_GRACE_S,
    STACKS_S,
    AskToStop,
    AttemptMachine,
    Avoid,
    DumpStacks,
    Finish,
    Kill,
    LogEvent,
    Phase,
    Replace,
    SlotState,
    Start,
)

TRAINER, ROLLOUT, SERVER_0, SERVER_1 = ("trainer", 0), ("rollout", 0), ("server", 0), ("server", 1)


class World:
    """Plays the loop: remembers which units run, and hands exits to the machine."""

    def __init__(
        self, mode: str = "auto", retries: int = 2, keys=(SERVER_0, SERVER_1, ROLLOUT, TRAINER)
    ) -> None:
        self.now = 1000.0
        self.machine = AttemptMachine([toy_unit(role, index=index) for role, index in keys], mode, retries)
        self.running: dict[tuple[str, int], int] = {}
        self.asked: list[tuple[str, int]] = []
        self.killed: list[tuple[str, int]] = []
        self.dumped: list[tuple[tuple[str, int], bool]] = []
        self.avoided: list[str] = []
        self.replaced: list[tuple[str, int]] = []
        self.records: list[LogEvent] = []
        self.finish: Finish | None = None

    def begin(self) -> World:
        self.do(self.machine.start(self.now))
        return self

    def do(self, actions) -> None:
        for action in actions:
            match action:
                case Start(one, incarnation):
                    assert (one.role, one.index) not in self.running, "started while it runs"
                    self.running[one.role, one.index] = incarnation
                case AskToStop(key):
                    self.asked.append(key)
                case Kill(key):
                    self.killed.append(key)
                case DumpStacks(key, hangs):
                    self.dumped.append((key, hangs))
                case Avoid(nodes):
                    self.avoided += nodes
                case Replace(one):
                    self.replaced.append((one.role, one.index))
                case LogEvent():
                    self.records.append(action)
                case Finish():
                    assert self.finish is None, "finished twice"
                    self.finish = action

    def end(self, key, code: int, after_s: float = 1.0, reason: str = "", **more) -> None:
        self.now += after_s
        self.do(
            self.machine.handle_exit(self.now, key, self.running.pop(key), UnitExit(code, reason, **more))
        )

    def hang(self, key) -> None:
        """Report a hanging unit: its stacks are written, then it is killed."""
        self.do(self.machine.kill_hung(self.now, key, "nothing moved"))
        self.pass_time(STACKS_S)
        assert self.killed.pop() == key
        self.end(key, 137, after_s=0.1)

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.do(self.machine.tick(self.now))

    def stop(self, cause: StopCause = StopCause.USER_SIGNAL) -> None:
        self.do(self.machine.stop(self.now, cause))

    def all_end(self, code: int = 75) -> None:
        for key in list(self.running):
            self.end(key, code)

    def ends_with(self, code: int, *words: str, of_trainer: int | None = None) -> bool:
        """End all running units, the trainer first if its code is given."""
        if of_trainer is not None:
            self.end(TRAINER, of_trainer)
        self.all_end()
        return self.finish.code == code and all(word in self.finish.reason for word in words)

    def end_again_and_again(self, key, times: int = 5) -> None:
        for _ in range(times):
            self.end(key, 1)
            self.pass_time(30)

    def details(self, kind: str) -> list[dict]:
        return [record.details for record in self.records if record.kind == kind]


@pytest.fixture
def world() -> World:
    return World().begin()


def test_everything_starts_at_once(world):
    assert world.running == {SERVER_0: 0, SERVER_1: 0, ROLLOUT: 0, TRAINER: 0}
    assert [record.kind for record in world.records] == ["started"] * 4


def test_a_restarted_supervisor_goes_on_counting():
    world = World()
    world.machine.restore(failures=2, incarnations={TRAINER: 3})
    world.begin()
    assert world.running[TRAINER] == 3 and world.running[ROLLOUT] == 0
    world.end(TRAINER, 70)
    assert world.machine.phase is Phase.ENDING  # the third failure with two retries


@pytest.mark.parametrize(("code", "verdict"), [(0, 0), (75, 75), (78, 78), (64, 64), (3, 3)])
def test_final_ends_of_the_trainer(world, code, verdict):
    world.end(TRAINER, code, reason="words")
    assert world.asked == [SERVER_0, SERVER_1, ROLLOUT] and world.finish is None
    assert world.ends_with(verdict)


def test_a_failed_trainer_starts_again_after_a_pause(world):
    world.end(TRAINER, 137)
    assert TRAINER not in world.running and not world.asked
    world.pass_time(0.4)
    assert TRAINER not in world.running
    world.pass_time(0.2)
    assert world.running[TRAINER] == 1


def test_the_budget_counts_failures_without_a_generation(world):
    for _ in range(2):
        world.end(TRAINER, 70)
        world.pass_time(60)
    world.do(world.machine.note_progress(5))
    for _ in range(2):
        world.end(TRAINER, 137)
        world.pass_time(60)
    assert world.running[TRAINER] == 4
    world.end(TRAINER, 70, reason="boom")
    assert world.ends_with(70, "boom", "3 failures in a row")


@pytest.mark.parametrize("key", [TRAINER, ROLLOUT, SERVER_0])
def test_a_full_disk_uses_up_nothing_however_long_it_lasts(world, key):
    for _ in range(20):
        world.end(key, 73, failure=FailureClass.DISK_FULL)
        world.pass_time(15)
        assert key not in world.running
        world.pass_time(6)
        assert key in world.running
    assert world.machine.phase is Phase.RUNNING and world.machine.failures == 0


@pytest.mark.parametrize("mode", ["disabled", "resume"])
def test_modes_that_do_not_start_again(mode):
    world = World(mode).begin()
    world.end(TRAINER, 70)
    assert world.ends_with(70, mode)


def test_a_server_comes_back_with_growing_pauses_and_gives_up_alone(world):
    starts = 0
    for _ in range(5):
        world.end(SERVER_0, 1, after_s=5)
        world.pass_time(30)
        starts += SERVER_0 in world.running
    assert starts == 4 and world.machine.slots[SERVER_0].state is SlotState.GAVE_UP
    assert world.machine.phase is Phase.RUNNING and TRAINER in world.running
    assert [one["pause_s"] for one in world.details("restarting")] == [0.5, 1, 2, 4]


def test_a_server_that_was_given_up_is_tried_again_much_later(world):
    world.end_again_and_again(SERVER_0)
    assert SERVER_0 not in world.running
    world.pass_time(560)
    assert SERVER_0 not in world.running
    world.pass_time(20)
    assert SERVER_0 in world.running
    world.end(SERVER_0, 1, after_s=5)
    world.pass_time(30)
    assert SERVER_0 not in world.running  # once, not five times
    world.pass_time(600)
    world.machine.note_serving(world.now, SERVER_0, world.running[SERVER_0])
    world.end(SERVER_0, 1, after_s=70)  # it has lived: an end is an accident again
    world.pass_time(1)
    assert SERVER_0 in world.running
    given_up = world.details("gave_up")
    assert [one["pause_s"] for one in given_up] == [600, 600] and "5 times in a row" in given_up[0]["reason"]


def test_a_long_life_makes_earlier_ends_forgotten(world):
    for _ in range(10):
        world.end(ROLLOUT, 1, after_s=61)
        world.pass_time(0.6)
    assert world.running[ROLLOUT] == 10


def test_a_server_that_only_loads_is_in_a_crash_loop(world):
    for _ in range(5):
        assert SERVER_0 in world.running
        world.pass_time(300)
        for incarnation in (world.running[SERVER_0] - 1, world.running[SERVER_0]):  # the earlier lease rests
            world.machine.note_serving(world.now, SERVER_0, incarnation)
        world.end(SERVER_0, 1, after_s=10)
        world.pass_time(30)
    assert world.machine.slots[SERVER_0].state is SlotState.GAVE_UP


def test_progress_ends_the_crash_loop_of_a_helper_without_a_peer(world):
    for _ in range(4):
        world.end(ROLLOUT, 137)
        world.pass_time(30)
        world.end(SERVER_0, 137)
        world.pass_time(30)
    world.do(world.machine.note_progress(5))
    world.end(ROLLOUT, 137)
    world.end(SERVER_0, 137)  # its peer may have done all the work
    world.pass_time(30)
    assert ROLLOUT in world.running and SERVER_0 not in world.running


@pytest.mark.parametrize("lost", [[ROLLOUT], [SERVER_0, SERVER_1]])
def test_without_rollout_or_servers_the_trainer_saves_and_stops(world, lost):
    for key in lost:
        world.end_again_and_again(key)
    assert world.machine.phase is Phase.DRAINING and world.asked == [TRAINER]
    assert world.ends_with(70, "5 times in a row", of_trainer=75)


@pytest.mark.parametrize(
    ("key", "code", "failure", "words"),
    [(SERVER_1, 78, FailureClass.UNKNOWN, "too much"), (ROLLOUT, 70, FailureClass.DATA, "Check the data")],
    ids=["bad configuration", "unusable data"],
)
def test_what_no_restart_of_a_helper_mends_lets_the_trainer_save_first(world, key, code, failure, words):
    world.end(key, code, reason="too much", failure=failure)
    assert world.asked == [TRAINER]
    assert world.ends_with(code, words, of_trainer=75)


@pytest.mark.parametrize(("end", "code"), [(75, 75), (0, 0), (137, 75), (143, 75), (70, 75), (78, 78)])
def test_a_stop_lets_the_trainer_end_first(world, end, code):
    world.stop(StopCause.PREEMPTION)
    assert world.asked == [TRAINER]
    world.stop(StopCause.INTERRUPTED)
    [stopping] = world.details("stopping")
    assert (stopping["cause"], stopping["class"]) == ("preemption", "preemption")
    assert world.asked == [TRAINER]
    world.end(TRAINER, end)
    assert world.asked[1:] == [SERVER_0, SERVER_1, ROLLOUT]
    assert world.ends_with(code)


def test_failures_while_stopping_use_up_the_retries():
    world = World(retries=0).begin()
    world.stop()
    world.end(TRAINER, 70, reason="disk full")
    assert world.ends_with(70, "disk full")


def test_no_unit_is_started_again_while_the_trainer_stops(world):
    world.end(SERVER_0, 1)
    world.stop()
    world.end(ROLLOUT, 1)
    world.pass_time(20)
    assert world.running == {SERVER_1: 0, TRAINER: 0}


def test_a_stop_while_the_trainer_pauses_or_before_any_start():
    world = World().begin()
    world.end(TRAINER, 70)
    world.stop()
    assert world.ends_with(75)
    early = World()
    early.stop()
    assert early.finish.code == 75 and not early.running


def test_a_trainer_that_does_not_stop_is_killed_then_left_behind(world):
    world.stop()
    world.pass_time(DRAIN_GRACE_S - 1)
    assert not world.killed
    world.pass_time(2)
    assert world.killed == [TRAINER]
    world.pass_time(KILL_GRACE_S + 1)
    world.pass_time(END_GRACE_S + 1)
    assert set(world.killed) == {SERVER_0, SERVER_1, ROLLOUT, TRAINER}
    world.pass_time(KILL_GRACE_S + 1)
    assert world.finish.code == 75
    assert (
        "these processes could not be ended: server 0, server 1, rollout 0, trainer 0" in world.finish.reason
    )


def test_helpers_that_do_not_end_are_killed(world):
    world.end(TRAINER, 0)
    world.pass_time(END_GRACE_S + 1)
    assert world.killed == [SERVER_0, SERVER_1, ROLLOUT]
    world.all_end(137)
    assert world.finish.code == 0


def test_a_supervisor_that_lost_the_trial_kills_without_saving(world):
    world.do(world.machine.abandon(world.now, 70, "another supervisor"))
    assert not world.asked and len(world.killed) == 4
    world.all_end(137)
    assert world.finish.code == 70


def test_a_hung_unit_is_killed_once_all_have_dumped_stacks(world):
    world.do(world.machine.kill_hung(world.now, TRAINER, "nothing moved for 300 s"))
    assert dict(world.dumped) == {SERVER_0: False, SERVER_1: False, ROLLOUT: False, TRAINER: True}
    assert not world.killed
    world.do(world.machine.kill_hung(world.now, TRAINER, "still"))
    assert len(world.dumped) == 4, "once is enough"
    world.pass_time(STACKS_S)
    assert world.killed == [TRAINER]
    world.end(TRAINER, 137, after_s=0.1)
    world.pass_time(1)
    assert world.running[TRAINER] == 1 and world.machine.failures == 1
    [ended] = world.details("exited")
    assert (ended["reason"], ended["class"]) == ("nothing moved for 300 s", "infrastructure")


def test_a_first_start_without_a_place_is_no_fault_of_its_node(world):
    world.do(world.machine.kill_unplaced(TRAINER, "Requested nodes are busy"))
    world.end(TRAINER, 1)
    assert world.ends_with(70, "Requested nodes are busy")
    assert [one["class"] for one in world.details("exited") if one["role"] == "trainer"] == ["user"]


@pytest.mark.parametrize("key", [TRAINER, ROLLOUT])
def test_a_restart_that_gets_no_place_on_its_nodes_needs_others(world, key):
    world.end(key, 1)
    world.pass_time(60)
    assert world.running[key] == 1
    world.do(world.machine.kill_unplaced(key, "Requested nodes are busy"))
    assert world.killed == [key] and not world.dumped and not world.avoided
    world.end(key, 1)
    assert world.ends_with(75, "Requested nodes are busy")


def test_servers_go_on_without_one_that_gets_no_place(world):
    world.do(world.machine.kill_unplaced(SERVER_0, "Requested nodes are busy"))
    world.end(SERVER_0, 1)
    world.pass_time(1)
    assert world.running[SERVER_0] == 1, "its place may be free by now"
    world.do(world.machine.kill_unplaced(SERVER_0, "Requested nodes are busy"))
    world.end(SERVER_0, 1)
    world.pass_time(10_000)
    assert SERVER_0 not in world.running and world.machine.phase is Phase.RUNNING


@pytest.mark.parametrize("key", [TRAINER, ROLLOUT])
def test_hangs_without_progress_use_up_the_retries(key):
    world = World(retries=2).begin()
    for number in range(4):
        if number == 2:
            world.do(world.machine.note_progress(7))
        world.hang(key)
        world.pass_time(100)
        assert key in world.running
    world.hang(key)
    assert key not in world.running
    assert world.ends_with(70, "nothing moved", "hpc-rl status")


def test_a_trainer_that_lost_its_node_needs_other_nodes(world):
    world.end(TRAINER, 143, reason="lost its node", failure=FailureClass.NODE, nodes=("n3",))
    assert world.avoided == ["n3"] and world.asked == [SERVER_0, SERVER_1, ROLLOUT]
    assert world.ends_with(75, "other nodes are needed")


def test_lost_nodes_cost_replicas_and_the_last_the_attempt(world):
    world.end(SERVER_0, 143, reason="lost its node", failure=FailureClass.NODE, nodes=("n3",))
    world.pass_time(60)
    assert SERVER_0 not in world.running and TRAINER in world.running and world.avoided == ["n3"]
    assert world.replaced == [SERVER_0], "Slurm never gives the node back to the job"
    world.end(SERVER_1, 143, reason="lost its node", failure=FailureClass.NODE, nodes=("n4",))
    assert world.asked == [TRAINER]
    assert world.ends_with(75, of_trainer=75) and world.avoided == ["n3", "n4"]
    assert world.replaced == [SERVER_0], "the next start has other nodes"


def test_a_trainer_without_work_near_the_end_stopped_for_time(world):
    world.machine.announce_end(StopCause.TIME_LIMIT)
    world.end(TRAINER, 75)
    world.all_end()
    assert world.finish == Finish(75, "the job's time is nearly over: no rollout would finish in time")
    assert world.machine.stop_cause is StopCause.TIME_LIMIT


def test_a_trainer_with_long_steps_gets_the_time_for_one(world):
    world.machine.drain_grace_s = 900
    world.stop()
    world.pass_time(899)
    assert not world.killed
    world.pass_time(2)
    assert world.killed == [TRAINER]


def test_an_end_of_an_older_incarnation_is_ignored(world):
    assert world.machine.handle_exit(world.now, TRAINER, 7, UnitExit(70, "")) == []
    assert world.machine.phase is Phase.RUNNING


def test_a_trial_without_rollout_and_servers():
    world = World(keys=(TRAINER,)).begin()
    world.end(TRAINER, 0)
    assert world.finish.code == 0


@given(st.data())
def test_whatever_happens_it_ends_once_and_starts_nothing_twice(data):
    world = World(mode=data.draw(st.sampled_from(["auto", "fault", "resume", "disabled"])), retries=1).begin()
    codes = st.sampled_from([0, 1, 3, 70, 75, 78, 137, 143])
    for _ in range(data.draw(st.integers(1, 25))):
        whats = ["end", "time", "stop", "progress", "abandon", "hung"] if world.finish is None else ["time"]
        what = data.draw(st.sampled_from(whats))
        if what == "end" and world.running:
            key = data.draw(st.sampled_from(sorted(world.running)))
            failure = data.draw(st.sampled_from(FailureClass))
            world.end(key, data.draw(codes), data.draw(st.sampled_from([1, 70])), failure=failure)
        elif what == "hung":
            key = data.draw(st.sampled_from(sorted(world.machine.slots)))
            world.do(world.machine.kill_hung(world.now, key, "x"))
        elif what == "stop":
            world.stop()
        elif what == "progress":
            world.do(world.machine.note_progress(1))
        elif what == "abandon":
            world.do(world.machine.abandon(world.now, 70, "other"))
        else:
            world.pass_time(data.draw(st.sampled_from([0.1, 5, 130])))
    world.stop()
    for _ in range(6):
        world.pass_time(130)
    assert world.finish is not None
    assert world.machine.phase is Phase.OVER


def said(code: int, reason: str = "") -> ExitRecord:
    return ExitRecord(code=code, reason=reason)


@pytest.mark.parametrize(
    ("records", "raw", "code"),
    [
        ([said(0)], 0, 0),
        ([said(75)], 75, 75),
        ([None], -9, 137),
        ([None], 143, 143),
        ([None], 0, 70),  # srun says 0 when the node of its task died
        ([None], 1, 1),
        ([None], 78, 78),
        ([said(75), said(78)], 143, 78),  # srun -K would say 143
        ([said(3), said(70)], 70, 3),
        ([said(75), None, None], 143, 75),  # peers that were ended after rank 0
        ([said(75), said(70, "x")], 75, 70),
        ([None, said(70)], 137, 70),
        ([None, said(75)], 137, 137),
        ([said(0), said(0)], 0, 0),
        ([said(0), said(143)], 143, 0),
        ([None, ExitRecord.parse({"reason": "no code"})], 9, 9),
    ],
)
def test_the_end_of_a_unit_by_its_ranks(records, raw, code):
    assert combine_ranks(records, raw).code == code


def test_the_end_of_a_unit_in_words():
    assert combine_ranks([None], -9).reason == "killed by SIGKILL"
    assert combine_ranks([said(75), said(70, "boom")], 75).reason == "rank 1: boom"
    lost = combine_ranks([said(70, "lost a peer"), None], 70).reason
    assert lost.startswith("rank 1 exited without a record (killed?)")
    assert combine_ranks([None], 128 + 99).reason == "killed by signal 99"


def test_pauses():
    assert [compute_pause_s(n) for n in (0, 1, 2, 3, 7, 100)] == [0.5, 0.5, 1, 2, 30, 30]


def test_without_a_trainer_the_rollout_role_leads():
    alone = (SERVER_0, ROLLOUT)
    world = World(keys=alone).begin()
    world.end(SERVER_0, 137)
    world.pass_time(30)
    world.end(ROLLOUT, 0)
    assert world.asked == [SERVER_0]
    world.all_end()
    assert (world.finish.code, world.finish.reason) == (0, "every prompt has its result")

    world = World(keys=alone).begin()
    world.stop(StopCause.PREEMPTION)
    assert world.asked == [ROLLOUT], "it stops while the servers still serve it"
    world.end(ROLLOUT, 75)
    world.all_end()
    assert world.finish.code == 75

    world = World(keys=alone, retries=1).begin()
    world.end(ROLLOUT, 137, reason="killed")
    world.pass_time(30)
    world.do(world.machine.note_progress(3))
    world.end(ROLLOUT, 137, reason="killed")
    world.pass_time(30)
    assert ROLLOUT in world.running, "progress resets the failures"
    world.end(ROLLOUT, 70, reason="connection reset")
    assert world.finish is None
    world.all_end()
    assert world.finish.code == 70
