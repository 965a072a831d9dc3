"""Callbacks: when they are called, and that none stops a trial without a word."""

import logging

import pytest

from hpc_rl.core.callbacks import Callback, Event
from hpc_rl.core.errors import ConfigError
from hpc_rl.core.trial import load_object
from hpc_rl.status.status_text import describe_metrics
from hpc_rl.status.trial_status import load_status
from hpc_rl.trainers.callbacks import Callbacks, create_callback

CODE = """
from hpc_rl import Callback
called = []
class Records(Callback):
    def on_step(self, event):
        called.append((event.step, event.metrics["reward"], event.total_steps))
class Raises:
    def on_step(self, event):
        called.append("raises")
        raise ValueError("no disk")
    def on_end(self, event):
        raise SystemExit(3)
class Stops:
    def on_evaluation(self, event):
        event.stop("good enough")
class Wants:
    def __init__(self, rate): pass
    on_step = print
class Empty: pass
class Later:
    async def on_step(self, event): pass
class Bare:
    def on_step(self): pass
class Broken:
    def __init__(self): self.x = nothing
number = 3
"""


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    (tmp_path / "calls.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    yield
    __import__("sys").modules.pop("calls", None)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("absent:X", "can't be imported"),
        ("calls:Nope", "has no attribute 'Nope'"),
        ("calls:number", "is not a class"),
        ("calls:Wants", "without arguments: TypeError"),
        ("calls:Empty", "has none of the methods on_step, on_evaluation, on_checkpoint, on_end"),
        ("calls:Later", "async def on_step"),
        ("calls:Bare", r"has a method on_step that can't be called with one event"),
        ("calls:Broken", r"NameError: name 'nothing' is not defined \(calls.py:\d+, in __init__\)"),
    ],
)
def test_a_callback_that_can_not_be_called_is_refused(name, words):
    with pytest.raises(ConfigError, match=words) as caught:
        create_callback(name)
    assert caught.value.refusals[0].option == "callbacks"


def test_an_error_is_logged_with_its_place_and_training_continues(fake_trial, caplog):
    doing: list[tuple[str, int]] = []
    made = Callbacks(
        ["calls:Raises", "calls:Records"], fake_trial.trial.attempt("7.0"), lambda *what: doing.append(what)
    )
    import calls

    for step in (1, 2):
        made.call("on_step", step, {"reward": 0.5}, total_steps=9)
    assert calls.called == ["raises", (1, 0.5, 9), "raises", (2, 0.5, 9)]
    assert doing == [(f"callback calls:{name}", step) for step in (1, 2) for name in ("Raises", "Records")]
    made.call("on_end", 2)
    made.call("on_checkpoint", 2)  # none has it, except the base class of Records
    told = made.list_metrics()
    assert (
        told["callback_errors"] == 3
        and "on_end of calls:Raises at step 2 raised SystemExit" in told["callback_error"]
    )
    errors = [one.getMessage() for one in caplog.records if one.levelno == logging.ERROR]
    assert sum("CALLBACK FAILED: on_step of calls:Raises" in one for one in errors) == 2
    assert sum("Traceback" in one for one in errors) == 2, "once for each place"
    assert "calls.py:" in errors[0]


def test_errors_are_shown_by_status(fake_trial):
    fake_trial.run_to(3)
    fake_trial.row(
        "7.0", {"step": 4, "lineage": 0, "callback_errors": 2, "callback_error": "on_step of c:X raised"}
    )
    (line,) = (one for one in describe_metrics(load_status(fake_trial.trial)) if one.startswith("callbacks"))
    assert "2 errors; training continues. The last one: on_step of c:X raised" in line


def test_a_callback_may_stop_the_trial_with_a_reason(fake_trial):
    fake_trial.run_to(3)
    made = Callbacks(["calls:Stops"], fake_trial.trial.attempt("7.0"), lambda doing, step: None)
    made.call("on_evaluation", 3, {"eval_reward": 0.9})
    assert load_object(fake_trial.trial.cancel_intent("7"))["reason"] == "good enough"
    fake_trial.ended("7.0", 75, "cancelled by the user")
    fake_trial.script_said("7", "ended", code=75, reason="cancelled", cancelled=True)
    status = load_status(fake_trial.trial)
    assert status.state == "cancelled"
    assert status.reason.startswith("cancelled by a callback: good enough")
    Event(step=1, trial_dir=fake_trial.trial.dir, job_id="8", is_check=True).stop("never")
    assert not fake_trial.trial.cancel_intent("8").exists()


def test_the_base_class_does_nothing():
    one = Callback()
    for point in ("on_step", "on_evaluation", "on_checkpoint", "on_end"):
        assert getattr(one, point)(None) is None
