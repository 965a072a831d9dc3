"""Callbacks in a real trial: an error is counted and shown, and a stop saves, cancels and has its reason."""

import json

import pytest
from patience import extend, wait_until
from toy_trials import ROOT, hpc_rl, logs_of, make_toy, status, trial_of

CODE = """
import json, os

def note(event, what):
    if not event.is_check:
        with open("called", "a") as file:
            file.write(json.dumps([what, event.step, event.total_steps, event.is_done]) + "\\n")

class Raises:
    def on_step(self, event):
        note(event, "step")
        if event.step == 2:
            raise RuntimeError("the message server is away")

class Stops:
    def on_evaluation(self, event):
        note(event, "evaluation")
        assert event.metrics["eval_loss"] > 0
        if event.step == 4:
            event.stop("loss is low enough")

    def on_checkpoint(self, event):
        assert event.is_check or os.path.exists(os.path.join(event.path, "manifest.json"))
        note(event, "checkpoint")

    def on_end(self, event):
        note(event, "end")
        if not event.is_check:
            raise OSError("the last word")
"""


@pytest.mark.timeout(extend(300))
def test_callbacks_of_a_trial(tmp_path):
    make_toy(tmp_path / "quickstart", "base")
    (tmp_path / "mine.py").write_text(CODE)
    options = {
        "experiment_name": "sums",
        "trial_name": "called",
        "total_train_steps": 100_000,
        "recover.freq_steps": 2,
        "valid_dataset.path": "quickstart/task/sft.jsonl",
        "evaluator.freq_steps": 4,
        "callbacks": "[mine:Raises,mine:Stops]",
        "launcher.type": "local",
    }
    words = [f"{name}={value}" for name, value in options.items()]
    hpc_rl("submit", ROOT / "configs/quickstart/sft.yaml", *words, cwd=tmp_path)
    trial = trial_of(tmp_path, "called")
    wait_until(lambda: status(tmp_path, "called")["state"] == "cancelled", 120, lambda: logs_of(trial))

    told = status(tmp_path, "called")
    assert told["reason"].startswith("cancelled by a callback: loss is low enough")
    assert told["checkpoint"] == told["step"] >= 4, "its state is saved"
    called = [json.loads(line) for line in (tmp_path / "called").read_text().splitlines()]
    names = [(what, step) for what, step, total, is_done in called if (total, is_done) == (100_000, False)]
    assert names[:2] == [("step", 1), ("step", 2)] and len(names) == len(called)
    assert names.index(("evaluation", 4)) < names.index(("step", 4))
    assert {("checkpoint", 2), ("checkpoint", told["step"])} <= {*names}
    assert names[-1] == ("end", told["step"])
    shown = hpc_rl("status", "called", cwd=tmp_path).stdout
    last = (
        f"on_end of mine:Stops at step {told['step']} raised OSError: the last word (mine.py:29, in on_end)"
    )
    assert f"2 errors; training continues. The last one: {last}" in shown
    logged = hpc_rl("logs", "called", "-n", "500", cwd=tmp_path).stdout
    assert "CALLBACK FAILED: on_step of mine:Raises at step 2 raised RuntimeError" in logged
    assert "(mine.py:13, in on_step)" in logged
