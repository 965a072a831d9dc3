"""The supervisor of many nodes; its load with thousands of nodes is in tests/integration/test_scale.py."""

import math

from scale_trials import BigTrial, IdleHandle, measure_load

from hpc_rl.supervise.agents import AgentHandle, AgentSteps
from hpc_rl.supervise.job_policy import choose_excluded
from hpc_rl.supervise.state_machine import SlotState
from hpc_rl.supervise.unit_loop import POLL_ALL_S, POLLS_PER_ROUND, TICK_S


def test_bad_nodes_are_chosen_from_ten_thousand():
    nodes = [f"n{number}" for number in range(10_000)]
    bad = nodes[::20]
    assert choose_excluded(bad, nodes, (), 9_700) == bad[:300], "the worst first, and enough nodes stay"


def test_a_round_polls_a_part_of_the_units_and_a_second_all_of_them(tmp_path, monkeypatch):
    big, polled = BigTrial(tmp_path, 1_600), []
    big.begin()
    monkeypatch.setattr(IdleHandle, "poll", lambda handle: polled.append(handle) or handle.code)
    num_units = len(big.handles)
    big.pass_time(TICK_S)
    assert len(polled) == 1 + math.ceil(num_units * TICK_S / POLL_ALL_S) > POLLS_PER_ROUND
    big.pass_time(POLL_ALL_S - TICK_S)
    assert len({*map(id, polled)}) == num_units
    big.handles[7].code = 75
    big.pass_time(POLL_ALL_S)
    assert big.runner.machine.slots[("server", 7)].state is not SlotState.RUNNING


def test_the_memory_of_a_node_is_a_few_kilobytes(tmp_path):
    with measure_load(memory=True) as load:
        big = BigTrial(tmp_path, 300)
        big.begin()
        big.write_leases()
        big.pass_time(10 * TICK_S)
    assert load.memory_mb / 300 <= 0.02


def test_starting_agents_searches_no_other_units(tmp_path, monkeypatch):
    """Each agent needs the units of its own node; reading all units for each would be quadratic."""
    big = BigTrial(tmp_path, 400)
    reads = []
    units = big.plan.units

    class Counted(list):
        def __iter__(self):
            reads.append(len(self))
            return super().__iter__()

    object.__setattr__(big.plan, "units", Counted(units))
    monkeypatch.setattr(AgentSteps, "launch", lambda *_, **__: None)
    monkeypatch.setattr(AgentHandle, "send", lambda *_: None)
    steps = AgentSteps([f"n{i}" for i in range(400)], plan=big.plan)
    for unit in units:
        if unit.role == "server":
            steps.start(unit, ["python"], big.attempt, 0)
    for agent in steps._agents.values():
        agent.poll = lambda: None
    assert sum(reads) <= 3 * len(units)
