"""A whole GRPO trial whose server is a real one of another project: what must be true of it, whichever it is.

Subclass `ServerTrial` and give a module-scoped fixture `finished`, made by `run_trial`.
"""

import os
from pathlib import Path

import numpy as np
import torch
from conformance import make_model, make_reward_model, plain_scores
from patience import extend
from toy_trials import ROOT, groups_in_ledger, hpc_rl, logs_of, make_quickstart, status, trial_of
from transformers import AutoModelForCausalLM

from hpc_rl.core.trial import Trial

BATCH_SIZE = 8


def run_trial(
    here: Path, backend: str, python: str, num_steps: int, *overrides: str, shares_units: bool = False
) -> tuple[Path, Trial]:
    """Run a trial of synchronous steps: batch k is made by version k-1 and by nothing else."""
    make_quickstart(here)
    make_model(here / "quickstart/warm", 1)  # the toy's is too small for some
    make_reward_model(here / "liked", 2)
    (here / "counting.py").write_text(
        "def reward(prompt, completion, **columns):\n    return completion.count('1') / 6\n"
    )
    submit = ("submit", "--follow", "--config", ROOT / "configs/grpo.yaml", "trial_name=real")
    allocation = f"allocation_mode={backend}:d1+{backend}[liked]:d1+fsdp:d1"
    # a random model never gets a sum right, and would not learn
    reward = ("rollout.reward_fn=counting:reward,liked", "rollout.reward_weights=[1,0]")
    pools = (f"pools.liked.path={here / 'liked'}",)
    if shares_units:  # a second pool can't
        allocation = f"allocation_mode={backend}:d1|fsdp:d1"
        reward, pools = ("rollout.reward_fn=counting:reward",), ()
    slow_start = f"rollout.setup_timeout={extend(600):.0f}"
    servers = (slow_start, allocation, f"launcher.inference_server_python={python}", *pools)
    steps = (
        f"total_train_steps={num_steps}",
        f"train_dataset.batch_size={BATCH_SIZE}",
        "gconfig.n_samples=4",
    )
    order = ("rollout.max_head_offpolicyness=0", "rollout.batch_order=in_order")
    no_evaluation = ("evaluator.freq_steps=null", "valid_dataset=null", "saver.freq_steps=1")
    words = (*submit, "launcher.type=local", *servers, *steps, *order, *no_evaluation, *reward, *overrides)
    done = hpc_rl(*words, cwd=here, timeout_s=500, check=False)
    trial = trial_of(here, "real")
    assert done.returncode == 0, f"{done.stdout}{done.stderr}\n{logs_of(trial)}"
    return here, trial


class ServerTrial:
    """The tests of a trial of NUM_STEPS steps."""

    NUM_STEPS = 0

    def test_it_makes_its_steps_and_a_server_took_every_version(self, finished):
        here, _ = finished
        said = status(here, "real", "--offline")
        assert said["state"] == "done"
        assert said["step"] == self.NUM_STEPS

    def test_tokens_carry_the_version_that_made_them(self, finished):
        """With no staleness allowed, the server's own label on the tokens of batch k must be that of version k-1."""
        _, trial = finished
        groups = groups_in_ledger(trial)
        assert {group.index for group in groups} == set(range(self.NUM_STEPS * BATCH_SIZE))
        for group in groups:
            for trajectory in group.trajectories:
                made = trajectory.steps[trajectory.loss_mask]
                assert made.size
                assert set(made.tolist()) == {group.index // BATCH_SIZE}
                assert set(trajectory.lineages[trajectory.loss_mask].tolist()) == {0}

    def test_the_label_stands_for_the_weights_of_that_step(self, finished):
        """The log-probabilities of the last batch are those of the weights published before it, and not of the
        first ones.
        """
        here, trial = finished
        last = [g for g in groups_in_ledger(trial) if g.index // BATCH_SIZE == self.NUM_STEPS - 1]
        made_by = AutoModelForCausalLM.from_pretrained(trial.exports / f"step-{self.NUM_STEPS - 1:08d}")
        first = AutoModelForCausalLM.from_pretrained(here / "quickstart/warm")
        assert max_difference(made_by, last) < 2e-3
        assert max_difference(first, last) > 2e-2

    def test_scores_are_those_of_the_reward_model(self, finished):
        """Of prompt, completion and end of sequence, as it is trained; not of a random head, nor a share of 1."""
        here, trial = finished
        made = [trajectory for group in groups_in_ledger(trial)[:4] for trajectory in group.trajectories]
        special = (0, 1, 2)  # not in the text that a reward gets
        inputs = [
            [
                token
                for token, is_made in zip(one.ids.tolist(), one.loss_mask, strict=True)
                if not is_made or token not in special
            ]
            + [1]
            for one in made
        ]
        scores = [one.stats["reward/liked"] for one in made]
        assert np.abs(np.subtract(scores, plain_scores(here / "liked", inputs))).max() < 1e-3
        assert np.std(scores) > 0.1

    def test_nothing_of_the_server_is_left(self, finished):
        """Its processes end with the trial."""
        _, trial = finished
        ours = str(trial.dir).encode()
        left = []
        for entry in os.scandir("/proc"):
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                try:
                    with open(f"/proc/{entry.name}/cmdline", "rb") as file:
                        command = file.read()
                except OSError:
                    continue
                if ours in command and b"pytest" not in command:
                    left.append(command)
        assert not left


class SharedUnitsTrial(ServerTrial):
    """The tests of a trial whose server and trainer take turns."""

    test_scores_are_those_of_the_reward_model = None  # it has no second pool

    def test_the_server_gives_up_its_memory_for_each_step(self, finished):
        _, trial = finished
        logs = [path.read_text() for path in trial.dir.glob("attempts/*/logs/server-0.*.log")]
        assert len(logs) == 1  # it never restarted
        assert logs[0].count("has released its memory") > self.NUM_STEPS
        assert logs[0].count("has its memory again") >= self.NUM_STEPS


def max_difference(model, groups) -> float:
    worst = 0.0
    for trajectory in (t for group in groups for t in group.trajectories):
        ids = torch.from_numpy(trajectory.ids.astype(np.int64))[None]
        with torch.no_grad():
            logprobs = torch.log_softmax(model(input_ids=ids).logits[0].float(), -1)
        own = logprobs[:-1].gather(1, ids[0, 1:, None])[:, 0].numpy()
        mask = trajectory.loss_mask[1:]
        worst = max(worst, float(np.abs(own[mask] - trajectory.logprobs[1:][mask]).max()))
    return worst
