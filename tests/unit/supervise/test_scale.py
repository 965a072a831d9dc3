"""The supervisor of a thousand nodes: its calls on files and its CPU time grow with the nodes, not faster.

Real processes are in benchmarks/cluster_load.py.
"""

import pytest
from scale_trials import BigTrial, Load, measure_load

from hpc_rl.core.errors import ExitCode, StopCause
from hpc_rl.name_resolve.roster import POLL_S, READS_PER_POLL
from hpc_rl.supervise.agents import AgentHandle, AgentSteps
from hpc_rl.supervise.job_policy import choose_excluded
from hpc_rl.supervise.unit_loop import TICK_S

SMALL, LARGE = 100, 1000
FACTOR = LARGE / SMALL
# each second: intents, checkpoints, the lease of the trial, metrics, the listing of two folders every POLL_S
FIXED_PER_MINUTE = 1200


@pytest.fixture(scope="module")
def loads(tmp_path_factory) -> dict[int, dict[str, Load]]:
    """What it costs to start, to watch for a minute, and to stop, by the number of nodes."""
    return {n: measure(tmp_path_factory.mktemp(f"nodes-{n}"), n) for n in (SMALL, LARGE)}


def measure(folder, num_nodes: int) -> dict[str, Load]:
    big, found = BigTrial(folder, num_nodes), {}
    with measure_load() as found["start"]:
        big.begin()
    big.write_leases()
    big.pass_time(30)
    assert big.num_serving == sum(unit.role == "server" for unit in big.plan.units)
    with measure_load() as found["minute"]:
        big.pass_time(60)
    with measure_load() as found["stop"]:
        big.runner.requests.add(StopCause.CANCELLED)
        big.pass_time(2)
    assert big.runner.finish is not None and big.runner.finish.code == ExitCode.STOPPED
    return found


@pytest.mark.soak
def test_ten_thousand_nodes(tmp_path):
    found = measure(tmp_path, 10_000)
    assert found["start"].num_file_calls <= 4 * 10_000
    assert found["minute"].num_file_calls <= FIXED_PER_MINUTE + 60 / POLL_S * READS_PER_POLL
    assert found["stop"].num_file_calls <= 20 * 10_000
    assert found["minute"].cpu_s <= 30.0, "half of a core"


def test_bad_nodes_are_chosen_from_ten_thousand():
    nodes = [f"n{number}" for number in range(10_000)]
    bad = nodes[::20]
    assert choose_excluded(bad, nodes, (), 9_700) == bad[:300], "the worst first, and enough nodes stay"


@pytest.mark.parametrize("what", ["start", "stop"])
def test_a_start_and_a_stop_cost_the_same_for_each_node(loads, what):
    small, large = (loads[n][what].num_file_calls for n in (SMALL, LARGE))
    assert large <= 1.2 * FACTOR * small
    assert large / LARGE <= 20


def test_a_minute_of_watching_has_a_bound_on_its_calls(loads):
    small, large = (loads[n]["minute"].num_file_calls for n in (SMALL, LARGE))
    assert large <= FACTOR * small
    # however many servers: READS_PER_POLL leases in each poll of the registrar
    assert large <= FIXED_PER_MINUTE + 60 / POLL_S * READS_PER_POLL
    assert loads[LARGE]["minute"].file_calls["os.rename"] <= 60


def test_cpu_time_grows_no_faster_than_the_nodes(loads):
    """Generous, because machines vary: quadratic costs would be 100 times as high, not 10 times."""
    for what in ("start", "minute", "stop"):
        assert loads[LARGE][what].cpu_s <= 4 * FACTOR * loads[SMALL][what].cpu_s + 1.0


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
