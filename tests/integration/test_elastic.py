"""Recover with fewer and with more ranks: the same batches, and the losses of an unbroken run."""

import signal
from pathlib import Path

import numpy as np
import pytest
from promises import read_groups
from toy_trials import make_toy
from trainer_processes import Roles, make_trial, write_plan

from hpc_rl.core.files import JsonLines
from hpc_rl.core.records import load_lineages
from hpc_rl.core.trial import Trial, write_json
from hpc_rl.rollout.batch_log.seals import Seal, load_seals
from hpc_rl.stats.read import load_history

pytestmark = pytest.mark.timeout(1500)
NUM_STEPS = 9
OPTIONS = [
    f"total_train_steps={NUM_STEPS}",
    "train_dataset.batch_size=4",
    "gconfig.n_samples=4",
    "gconfig.max_new_tokens=4",
    "actor.ppo_n_minibatches=2",
    "actor.optimizer.lr=1e-3",
    "actor.adv_norm.mean_level=batch",
    "rollout.max_head_offpolicyness=0",
    "rollout.batch_order=in_order",
    "embedded.batch_invariant=true",
    "recover.mode=auto",
    "recover.freq_steps=1",
    "recover.keep=50",
]


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Path:
    return make_toy(tmp_path_factory.mktemp("toy"), "base")


def run(toy: Path, name: str, parts: list[tuple[int, int]], again_from: int | None = None) -> Trial:
    """Train with so many ranks up to about this step, and so on; each part is a job that recovers from the
    one before.

    Then, with `again_from`, one rank trains to the end from that generation, as after `hpc-rl recover
    --from`.
    """
    trial = make_trial(toy, name, "grpo", OPTIONS)
    write_plan(trial, "grpo", parts[0][0])
    with Roles(trial, "1.0") as serving:
        serving.start("server")
        serving.start("rollout")
        again = [] if again_from is None else [(1, NUM_STEPS)]
        for job, (num_ranks, last_step) in enumerate([*parts, *again], 1):
            record = {"job_id": str(job), "start_mode": "resume" if job > 1 else "auto"}
            write_json(trial.job(str(job)), record | ({"from_step": again_from} if job > len(parts) else {}))
            with Roles(trial, f"{job}.0") as roles:
                is_stopped = last_step < NUM_STEPS
                ranks = roles.trainer(num_ranks, stays_at=last_step + 1 if is_stopped else None)
                if is_stopped:
                    roles.wait_for_step(last_step, timeout_s=500)
                    ranks[-1].send_signal(signal.SIGTERM)
                    roles.go_on()
                expected = 75 if is_stopped else 0
                assert roles.ended(ranks, timeout_s=500) == [expected] * num_ranks
    return trial


@pytest.mark.soak
def test_any_number_of_ranks_after_a_restart_trains_as_one_unbroken_run(toy):
    whole = run(toy, "whole", [(1, NUM_STEPS)])
    elastic = run(toy, "elastic", [(4, 2), (2, 4), (3, NUM_STEPS)], again_from=1)
    lines = load_lineages(elastic)
    assert [line.submission for line in lines] == ["1", "2", "3", "4"]
    assert 2 <= lines[1].from_step < lines[2].from_step < NUM_STEPS
    assert lines[3].from_step == 1 and lines[3].set_aside == tuple(range(2, NUM_STEPS + 1))
    assert len(list((elastic.recover / "set-aside").iterdir())) == NUM_STEPS - 1
    compare(whole, elastic, load_history(elastic).steps)
    assert {row["lineage"] for row in load_history(elastic).steps[1:]} == {3}, (
        "every batch was trained again, from the log"
    )
    rows = [row for row in JsonLines(elastic.attempt("3.0").metrics(0)).poll() if "loss" in row]
    assert rows[-1]["step"] == NUM_STEPS
    quiet = {row["step"]: row["loss"] for row in load_history(whole).steps}
    np.testing.assert_allclose(
        [row["loss"] for row in rows], [quiet[row["step"]] for row in rows], rtol=1e-5, atol=1e-5
    )


def compare(whole: Trial, elastic: Trial, stopped: list[dict]) -> None:
    """The same batches, token for token, and the same numbers."""

    seals, others = load_seals(whole.rollout), load_seals(elastic.rollout)
    assert (
        list(seals) == list(others) == list(range(2, NUM_STEPS + 1))
    )  # what came before the first generation is trimmed
    for step, seal in seals.items():
        assert list(seal.places) == list(others[step].places)
        for group, again in zip(
            read_groups(whole.rollout, seal), read_groups(elastic.rollout, others[step]), strict=True
        ):
            for row, same in zip(group.trajectories, again.trajectories, strict=True):
                np.testing.assert_array_equal(row.ids, same.ids)
                np.testing.assert_array_equal(row.steps, same.steps)
    check_versions(others, elastic)

    quiet = load_history(whole).steps
    assert [row["step"] for row in stopped] == list(range(1, NUM_STEPS + 1))
    for name in ("loss", "grad_norm", "reward", "lr"):
        np.testing.assert_allclose(
            [row[name] for row in stopped], [row[name] for row in quiet], rtol=1e-5, atol=1e-5, err_msg=name
        )


def check_versions(seals: dict[int, Seal], trial: Trial) -> None:
    """Synchronous: batch k is made by version k-1.

    After a recover the servers have that one before the first new token.
    """
    starts = {line.lineage: line.from_step for line in load_lineages(trial)}
    for step, seal in seals.items():
        for group in read_groups(trial.rollout, seal):
            for row in group.trajectories:
                made = row.loss_mask
                assert set(row.steps[made]) == {step - 1}
                if step > starts[seal.lineage] + 1:  # else its prompts may have been finished before the stop
                    assert set(row.lineages[made]) == {seal.lineage}
