"""The fleet: how long sequences take that share a server, by hand."""

from dataclasses import replace

import pytest
from simulated_trials import COSTS

from hpc_rl.core.types import WeightVersion
from hpc_rl.simulate.clock import Clock
from hpc_rl.simulate.fleet import Fleet, Group

ITERATION = replace(COSTS, decode_s=1.0, decode_sequence_s=0.5)
V1, V2 = WeightVersion(0, 1), WeightVersion(0, 2)


class Finished(dict):
    """Ticket -> time of the group's last token, and its oldest step."""

    def make_fleet(self, num_servers: int = 1, num_real: int | None = None, **costs) -> tuple[Clock, Fleet]:
        clock = Clock()

        def note(group: Group) -> None:
            self[group.ticket] = (clock.now, group.oldest_step)

        fleet = Fleet(clock, replace(ITERATION, **costs), num_servers, num_real or num_servers, note)
        fleet.update(V1, 0.0)
        fleet.resize(fleet.num_real)
        return clock, fleet


@pytest.fixture
def finished() -> Finished:
    return Finished()


def run(clock: Clock, fleet: Fleet, until: float = 1e9) -> None:
    fleet.flush()
    clock.after(until - clock.now, lambda: None)
    clock.run(lambda: clock.now >= until)


def test_sequences_share_a_server(finished):
    clock, fleet = finished.make_fleet()
    fleet.submit(Group(1, [2], V1))
    fleet.submit(Group(2, [4], V1))
    run(clock, fleet)
    # two iterations of 2 s for both; then two iterations of 1.5 s for the longer one
    assert finished == {1: (4.0, 1), 2: (7.0, 1)}
    assert fleet.num_tokens == 6 and fleet.busy_s == pytest.approx(7.0)


def test_a_group_ends_with_its_longest_sequence(finished):
    clock, fleet = finished.make_fleet()
    fleet.submit(Group(1, [1, 3], V1))
    run(clock, fleet)
    assert finished[1][0] == pytest.approx(1 * 2.0 + 2 * 1.5)


def test_a_full_server_lets_sequences_wait(finished):
    clock, fleet = finished.make_fleet(server_sequences=1)
    fleet.submit(Group(1, [2], V1))
    fleet.submit(Group(2, [2], V1))
    run(clock, fleet)
    assert [when for when, _ in finished.values()] == pytest.approx([3.0, 6.0])
    assert fleet.full_s == pytest.approx(6.0)


def test_an_update_stalls_and_new_groups_are_younger(finished):
    clock, fleet = finished.make_fleet(prefill_token_s=0.01)
    fleet.submit(Group(1, [4], V1))  # 10 tokens of its prompt: 0.1 s
    fleet.flush()
    clock.after(3.1, lambda: fleet.update(V2, 2.0))
    run(clock, fleet, until=3.1)
    fleet.submit(Group(2, [1], V2))
    run(clock, fleet)
    # after two of four iterations a pause of 2 s, and the cache of 10 + 2 tokens again; then another prefill
    assert finished[2] == (pytest.approx(3.1 + 2.0 + 0.12 + 0.1 + 2.0), 2)
    assert finished[1] == (pytest.approx(finished[2][0] + 1.5), 1)


def test_weights_that_a_prompt_needs_are_awaited(finished):
    clock, fleet = finished.make_fleet()
    fleet.submit(Group(1, [1], V2))
    run(clock, fleet, until=10.0)
    assert not finished
    fleet.update(V2, 0.0)
    run(clock, fleet)
    assert finished == {1: (11.5, 2)}


def test_another_server_continues_the_sequences_of_a_lost_one(finished):
    clock, fleet = finished.make_fleet(num_servers=2)
    fleet.submit(Group(1, [10], V1))
    fleet.submit(Group(2, [10], V1))
    run(clock, fleet, until=6.0)  # four iterations each
    fleet.resize(1)
    run(clock, fleet)
    # the six that are left of both take 2 s each on one server
    assert [when for when, _ in finished.values()] == pytest.approx([18.0, 18.0])


def test_without_a_server_groups_wait_for_one(finished):
    clock, fleet = finished.make_fleet()
    fleet.submit(Group(1, [4], V1))
    run(clock, fleet, until=3.0)
    fleet.resize(0)
    fleet.submit(Group(2, [1], V1))
    run(clock, fleet, until=20.0)
    assert not finished
    fleet.resize(1)
    run(clock, fleet)
    assert finished[2] == (pytest.approx(22.0), 1)
    assert finished[1][0] == pytest.approx(22.0 + 1.5)


def test_a_simulated_server_stands_for_several_real_ones(finished):
    _, fleet = finished.make_fleet(num_servers=2, num_real=200)
    assert fleet.weight == 100
    fleet.resize(120)
    assert [server.is_up for server in fleet.servers] == [True, False]


def test_held_servers_make_no_tokens(finished):
    clock, fleet = finished.make_fleet()
    fleet.submit(Group(1, [2], V1))
    run(clock, fleet, until=1.5)
    fleet.hold()
    run(clock, fleet, until=50.0)
    fleet.release()
    run(clock, fleet)
    assert finished[1][0] == pytest.approx(51.5)
