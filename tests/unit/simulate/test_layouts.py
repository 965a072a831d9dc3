"""Layouts: a heterogeneous job is one job; server jobs come and go while the trainer continues."""

from dataclasses import replace
from statistics import fmean

import pytest
from simulated_trials import COSTS, make_small

from hpc_rl.core.errors import ExitCode
from hpc_rl.plan.schema import list_server_tasks
from hpc_rl.simulate.job import Attempt, Life
from hpc_rl.simulate.result import run
from hpc_rl.simulate.setup import Faults

SLOW_SERVERS = replace(COSTS, decode_s=0.2)
JOBS = make_small(num_servers=4, layout="jobs", total_steps=40)


def test_a_heterogeneous_job_behaves_as_an_allocation():
    faults = Faults(mtbf_s=150.0, notice_s=5.0, requeue_s=10.0, queue_s=30.0)
    one, other = (run(replace(JOBS, layout=layout), COSTS, faults) for layout in ("allocation", "hetjob"))
    assert one.to_json() == other.to_json() and one.node_failures > 0


def test_nodes_of_servers_alone_are_jobs_of_their_own():
    assert JOBS.list_server_tasks() == [[1], [2], [3], [4]] and JOBS.num_job_nodes == 1
    attempt = Attempt(Life(JOBS, COSTS, Faults()), ["n0"], 0)
    assert {role for role, _ in attempt.machine.slots} == {"trainer", "rollout"}
    assert replace(JOBS, layout="hetjob").list_server_tasks() == []
    assert list_server_tasks(JOBS.units[4:]) == [], "a node with other roles belongs to the trainer's job"


def test_the_trainer_waits_for_the_first_server_job():
    late = run(JOBS, COSTS, Faults(queue_s=100.0), seed=3)
    assert late.exit_code == ExitCode.DONE and late.lineages == late.attempts == 1
    assert run(JOBS, COSTS).makespan_s + 30.0 < late.makespan_s


@pytest.mark.parametrize("what", [{"mtbf_s": 600.0}, {"preempt_every_s": 60.0}])
def test_lost_server_jobs_come_back_and_stop_nothing(what):
    quiet = run(JOBS, SLOW_SERVERS)
    faults = Faults(**what, notice_s=5.0, requeue_s=10.0)
    lives = [Life(JOBS, SLOW_SERVERS, faults, seed) for seed in range(4)]
    assert all(life.run(1e6) for life in lives)
    for life in lives:
        jobs = life.server_jobs
        # the trainer's job starts again for failures of its own node alone
        assert life.exit_code == ExitCode.DONE and life.lineage <= life.num_node_failures
        assert jobs.num_serving <= 4 and life.clock.now < 4 * quiet.makespan_s
    assert sum(life.server_jobs.num_failures + life.server_jobs.num_preempted for life in lives) >= 4
    assert fmean(life.clock.now for life in lives) > quiet.makespan_s + 5.0


def test_a_time_limit_of_server_jobs_does_not_end_the_trial():
    found = run(replace(JOBS, server_time_limit_s=40.0), SLOW_SERVERS, Faults(requeue_s=10.0))
    assert found.exit_code == ExitCode.DONE and found.attempts == 1
    assert found.makespan_s > run(JOBS, SLOW_SERVERS).makespan_s


def test_without_spare_nodes_a_server_job_waits_for_a_repair():
    often = Faults(mtbf_s=100.0, notice_s=1.0, requeue_s=1.0, repair_s=500.0)
    setup = replace(JOBS, total_steps=15)
    lives = [Life(setup, COSTS, replace(often, spare_nodes=spare), seed=4) for spare in (0, None)]
    served = []
    for life in lives:
        life.clock.run(lambda life=life: life.clock.now > 300.0, 300.0)
        served.append(life.server_jobs.num_serving)
        assert life.server_jobs.num_failures > 0
    assert served[0] < served[1]
