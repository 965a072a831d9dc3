"""Simulated trials as a whole: they follow the rules of the package, and their numbers add up."""

from dataclasses import replace

import pytest
from simulated_trials import COSTS, make_small

from hpc_rl.checkpoint import decide as choosing
from hpc_rl.core.errors import ExitCode, FailureClass
from hpc_rl.rollout import sequencer
from hpc_rl.simulate import cluster, job
from hpc_rl.simulate.result import Bottleneck, Result, run
from hpc_rl.simulate.setup import Faults, Kill, Setup
from hpc_rl.status.goodput import Bucket
from hpc_rl.supervise import failure_policy, job_policy
from hpc_rl.supervise.deadline import JobDeadline

KILLED = Faults(kills=(Kill(at_s=30.0, role="trainer"),))


def simulate(setup: Setup | None = None, faults: Faults | None = None, **costs) -> Result:
    return run(setup or make_small(), replace(COSTS, **costs), faults)


def test_equal_arguments_give_equal_results():
    first, second = simulate(faults=KILLED), simulate(faults=KILLED)
    assert first.to_json() == second.to_json() and first.ended
    assert first.to_json() != run(make_small(), COSTS, KILLED, seed=1).to_json()


def test_the_seconds_of_the_devices_add_up():
    found = simulate(faults=Faults(kills=(Kill(at_s=30.0, role="trainer"), Kill(at_s=40.0, role="job"))))
    assert sum(found.goodput.buckets.values()) == pytest.approx(found.goodput.allocation_s)
    assert {Bucket.GENERATE, Bucket.TRAIN, Bucket.START, Bucket.LOST} <= found.goodput.buckets.keys()
    assert found.goodput.queued_s == pytest.approx(120.0)


def test_a_step_is_the_sum_of_its_parts():
    found = simulate(make_small(num_servers=16, eta=0))
    # no server is a bottleneck: the longest completion, the update, the publication
    longest = 60 * COSTS.compute_token_s(2)
    assert found.parts_s["train_s"] == pytest.approx(1.0 + 8 * 4 * (19 + 10) * 0.001, rel=0.05)
    assert found.parts_s["wait_s"] == pytest.approx(0.3 + longest, rel=0.15)
    assert found.staleness == {0: 1.0}


@pytest.mark.parametrize(("bound", "largest"), [("hard", 1), ("drop", 1), ("soft", 9)])
def test_the_staleness_bound_holds(bound, largest):
    found = simulate(make_small(eta=1, bound=bound, max_concurrent=16))
    assert found.ended and max(found.staleness) <= largest


def test_asynchronous_training_is_faster():
    sync, ahead = simulate(make_small(eta=0)), simulate(make_small(eta=2, max_concurrent=24))
    assert ahead.tokens_per_s > 1.2 * sync.tokens_per_s
    assert sync.bottleneck in (Bottleneck.TAIL, Bottleneck.TRAINING)


def test_a_killed_trainer_repeats_the_steps_after_its_checkpoint():
    plain, found = simulate(), simulate(faults=KILLED)
    assert found.lineages == 2 and found.attempts == 1 and found.steps == plain.steps
    assert plain.goodput.buckets.get(Bucket.LOST, 0.0) == 0.0 < found.goodput.buckets[Bucket.LOST]
    assert found.makespan_s > plain.makespan_s + COSTS.start_trainer_s + COSTS.load_s


def test_batches_are_not_made_twice():
    """The repeated steps get the batches of the log at once."""
    slow = make_small(num_servers=1)
    plain, found = simulate(slow), simulate(slow, KILLED)
    repeated = COSTS.start_trainer_s + COSTS.load_s + 5 * (plain.parts_s["train_s"] + plain.parts_s["save_s"])
    assert found.makespan_s < plain.makespan_s + repeated + 2.0


def test_a_time_limit_divides_a_trial_without_loss():
    found = simulate(make_small(time_limit_s=60.0), Faults(requeue_s=10.0, queue_s=5.0))
    assert found.attempts > 1 and found.exit_code == ExitCode.DONE
    assert Bucket.LOST not in found.goodput.buckets
    assert found.goodput.queued_s >= 10.0 * (found.attempts - 1)


def test_a_preempted_job_continues():
    found = simulate(make_small(total_steps=60), Faults(preempt_every_s=30.0, requeue_s=1.0))
    assert found.attempts > 1 and found.exit_code == ExitCode.DONE


def test_disabled_recovery_starts_nothing_again():
    found = simulate(make_small(recover_mode="disabled"), KILLED)
    assert found.exit_code == ExitCode.FAILED and found.steps < 20


def test_a_failed_node_is_replaced_and_avoided():
    setup = make_small(num_servers=3, num_ranks=2, total_steps=60)
    found = simulate(setup, Faults(mtbf_s=120.0, notice_s=5.0, requeue_s=5.0, repair_s=1e6))
    assert found.node_failures and found.attempts > 1 and found.exit_code == ExitCode.DONE


def test_a_partition_without_spare_nodes_waits_for_repairs():
    faults = Faults(mtbf_s=120.0, notice_s=5.0, requeue_s=5.0, repair_s=500.0)
    setup = make_small(num_servers=3, num_ranks=2, total_steps=60)
    plenty, none = simulate(setup, faults), simulate(setup, replace(faults, spare_nodes=0))
    assert none.goodput.queued_s > plenty.goodput.queued_s + 100.0


def test_a_lost_checkpoint_costs_the_steps_since_the_one_before():
    faults = Faults(kills=(Kill(at_s=45.0, role="trainer"),))
    kept = simulate(faults=faults)
    purged = simulate(faults=replace(faults, purge_every_s=10.0))
    assert purged.goodput.buckets[Bucket.LOST] > kept.goodput.buckets[Bucket.LOST]


def test_saves_beside_training_block_it_for_the_copy_only():
    waits = simulate(make_small(save_every=1))
    beside = simulate(make_small(save_every=1, async_save=True), save_copy_s=0.1, save_s=1.0)
    assert beside.parts_s["save_s"] < waits.parts_s["save_s"] / 2


def test_an_evaluation_beside_training_takes_servers_instead_of_time():
    more = {"evaluates": True, "evaluate": make_small(save_every=4).save}
    blocking = simulate(make_small(evaluates_blocking=True, **more), evaluate_s=4.0)
    beside = simulate(make_small(**more), evaluate_s=4.0)
    assert blocking.parts_s["evaluate_s"] >= 1.0 > beside.parts_s["evaluate_s"]


def test_merged_servers_behave_as_all_of_them():
    big = make_small(
        num_servers=64, num_ranks=8, per_node=8, batch_size=512, max_concurrent=1024, total_steps=30
    )
    costs = {"train_token_s": 1e-4, "decode_sequence_s": 1e-3}
    exact = simulate(big, **costs)
    thin = simulate(replace(big, max_sequences=8_000), **costs)
    assert big.choose_weight() == 1.0 < replace(big, max_sequences=8_000).choose_weight()
    assert thin.calls < exact.calls / 4
    assert thin.steady_tokens_per_s == pytest.approx(exact.steady_tokens_per_s, rel=0.1)


def test_shared_gpus_take_turns():
    shared = simulate(make_small(eta=0, shares_gpus=True, num_servers=4, num_ranks=4, per_node=4))
    assert shared.ended and shared.staleness == {0: 1.0}
    assert sum(shared.goodput.buckets.values()) == pytest.approx(shared.goodput.allocation_s)


# -- every rule is that of the package: a changed rule changes the simulation


def refuse_to_continue(situation):
    return choosing.Decision("end", "changed", exit_code=ExitCode.FAILED)


def exclude_all(bad, nodes, *_):
    return list(nodes) if bad else []


BLIPS = Faults(mtbf_s=100.0, repair_s=1.0, notice_s=1.0, requeue_s=5.0)
MANY = {"max_concurrent": 64, "total_steps": 40, "num_servers": 1}
NEVER_AGAIN = {FailureClass.UNKNOWN: failure_policy.POLICIES[FailureClass.UNKNOWN]._replace(action="end")}


@pytest.mark.parametrize(
    ("module", "name", "changed", "setup", "faults"),
    [
        (sequencer, "count_room", lambda most, *rest: min(most, 8 - rest[-1]), {}, Faults()),
        (sequencer, "has_room_after", lambda *_: False, {"bound": "hard", "eta": 1, **MANY}, Faults()),
        (failure_policy, "compute_pause_s", lambda _: 50.0, {}, KILLED),
        (failure_policy, "POLICIES", failure_policy.POLICIES | NEVER_AGAIN, {}, KILLED),
        (job, "decide", refuse_to_continue, {}, KILLED),
        (job_policy, "AFTER_EXIT", {}, {"time_limit_s": 60.0}, Faults()),
        (JobDeadline, "lead_s", 5.0, {"time_limit_s": 60.0}, Faults()),
        (cluster, "choose_excluded", exclude_all, {"num_ranks": 2, "total_steps": 100}, BLIPS),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_changed_rule_changes_the_simulation(monkeypatch, module, name, changed, setup, faults):
    before = simulate(make_small(**setup), faults).to_json()
    monkeypatch.setattr(module, name, changed)
    assert simulate(make_small(**setup), faults).to_json() != before
