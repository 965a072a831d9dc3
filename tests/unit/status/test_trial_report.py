"""report: facts of trials beside each other, and one page that needs no other file."""

import json
import re
from dataclasses import replace

import pytest

from hpc_rl.cli.__main__ import main
from hpc_rl.core.trial import write_json
from hpc_rl.stats.kept_samples import Sample
from hpc_rl.status.goodput import Bucket, Span
from hpc_rl.status.report_page import (
    list_other_curves,
    make_figures,
    make_page,
    make_sample_tables,
    merge_spans,
    spread_out,
)
from hpc_rl.status.trial_report import list_facts, make_report, summarize_staleness, thin_out
from hpc_rl.status.trial_status import load_status
from hpc_rl.trials import trial_index

T0 = 1_790_000_000.0
SAMPLE = Sample(
    step=3, evaluation=False, prompt_index=7, sample=0, prompt="1+1=", completion="</script><b>2", reward=1.0, stats={},
    advantage=None, finish_reason="stop", versions=["0.1", "1.2"], num_tokens=3,
)  # fmt: skip


@pytest.fixture
def trials(make_fake_trial, tmp_path, state_home):
    """Two trials that ended, of which the second has another learning rate."""
    made = []
    for name, lr in (("low", 1e-4), ("high", 1e-3)):
        fake = make_fake_trial(tmp_path / "runs", name=name)
        write_json(
            fake.trial.config_json,
            {"total_train_steps": 8, "trial_name": name, "actor": {"lr": lr, "eps": 1}}
            | ({"pools": {"judge": {"path": "m", "url": ""}}} if name == "high" else {}),
        )
        fake.run_to(8)
        fake.evaluation("7.0", 8, 0.5)
        fake.ended("7.0", 75, at=30)
        fake.cancel_wish("7")
        fake.script_said("7", "ended", at=30, code=75)
        trial_index.record_trial(fake.trial)
        made.append(fake)
    return made


def test_trials_stand_beside_each_other_in_the_terminal(trials, capsys):
    assert main(["report", "low", "high"]) == 0
    lines = [re.split(r"  +", line.strip()) for line in capsys.readouterr().out.splitlines()]
    assert ["low", "high"] in lines
    assert ["held-out reward", *["0.31 (step 0) -> 0.5 (step 8)"] * 2] in lines
    assert ["actor.lr", "0.0001", "0.001"] in lines
    assert ["held-out reward: low is +0 over high at step 8"] in lines
    assert ["mean reward of the last 10 steps", "0.045", "0.045"] in lines
    assert ["pools.judge.path", "not set", "m"] in lines
    assert not [line for line in lines if line[0] in ("actor.eps", "trial_name", "pools.judge.url")]
    attempts = lines[lines.index(next(line for line in lines if line[0] == "attempts of low")) + 1]
    assert attempts[:2] == ["7.0", "cancelled"]
    assert main(["report", "low", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert sum(found["buckets"].values()) == pytest.approx(found["allocation_s"])


def test_the_page_loads_nothing_and_what_a_model_wrote_stays_text(trials):
    reports = [make_report(fake.trial.name, load_status(fake.trial), T0 + 40) for fake in trials]
    reports[0].samples = [SAMPLE, replace(SAMPLE, step=5, completion="3", reward=0.0)]
    html = make_page(reports, T0)
    own = html.replace(html[html.index("<script>") : html.index("</script>")], "")
    assert not re.search(r'(src|href)="(?!data:)', own)
    assert "<b>2" not in own and "No step was made yet" not in own
    assert "&lt;/script&gt;&lt;b&gt;2" in own
    assert "held-out reward: low is +0 over high at step 8" in own
    axes = json.loads(re.search(r"const axes = (.*), searched = ", own)[1])
    assert list(axes) == ["step", "hours", "gpu_hours"], "these trials have no num_tokens"
    assert axes["hours"]["places"][0][0] == list(range(9)) and len(axes["hours"]["places"]) == 2
    searched = json.loads(re.search(r", searched = (.*);", own)[1])
    assert [cell["facts"].split(", ")[:3] for cell in searched] == [
        ["low", "training", "step 3"], ["low", "training", "step 5"],
    ]  # fmt: skip
    figures = json.loads(re.search(r"const figures = (.*), others = ", own)[1])
    names = "goodput attempts-0 attempts-1 curve-reward curve-held-out lengths ages"
    assert set(names.split()) <= set(figures)
    assert [trace["name"] for trace in figures["curve-reward"]["data"]] == ["low", "high"]
    assert figures["curve-reward"]["data"][0]["y"][-1] == pytest.approx(0.08)
    assert figures["lengths"]["data"][0]["x"] == [3, 3]
    total = sum(trace["x"][0] for trace in figures["goodput"]["data"])
    assert total == pytest.approx(100)


def test_the_page_of_a_trial_without_a_step_says_so(fake_trial):
    fake_trial.started("7.0", "trainer")
    report = make_report("new", load_status(fake_trial.trial), T0 + 40)
    assert "No step was made yet" in make_page([report], T0)


def test_samples_are_chosen_over_the_whole_training():
    trained = [
        replace(SAMPLE, step=step, reward=reward) for step in range(1, 21) for reward in (0.0, step / 20)
    ]
    held_out = [
        replace(SAMPLE, step=step, evaluation=True, prompt_index=row) for step in (0, 10) for row in range(5)
    ]
    *prompts, best, worst = make_sample_tables([*trained, *held_out])
    assert [table["title"] for table in prompts] == [f"Held-out prompt {row}" for row in range(3)]
    assert [len(table["cells"]) for table in prompts] == [2, 2, 2]
    assert [cell["facts"].split(", ")[:2] for cell in best["cells"]][-1] == ["step 20", "reward 1"]
    assert {cell["facts"].split(", ")[1] for cell in worst["cells"]} == {"reward 0"}
    assert spread_out(dict.fromkeys(range(1, 21))) == [1, 7, 14, 20]


def test_curves_spans_and_ages_of_a_long_trial_stay_small():
    curve = thin_out([(step, 0.0) for step in range(1, 100_001)])
    assert len(curve) <= 1500
    assert curve[-1][0] == 100_000
    spans = [
        Span(second, second + 1, Bucket.WAIT if second % 10 == 0 else Bucket.TRAIN) for second in range(1000)
    ]
    assert merge_spans([*spans, Span(1000, 1100, Bucket.LOST)], 20) == [
        ("train", 0, 1000),
        ("lost", 1000, 1100),
    ]
    assert summarize_staleness(SAMPLE) == 1  # made by the weights of steps 1 and 2, for step 3
    assert summarize_staleness(replace(SAMPLE, versions=["-1.-1"])) is None  # an environment did not tell
    assert summarize_staleness(replace(SAMPLE, versions=["3.9"])) == 0  # of a lineage that was given up


def test_own_metrics_have_a_chart_and_a_row_each(trials):
    fake = trials[0]
    own = {"reward/format": 0.5, "agent/turns": 2.0}
    fake.row("7.0", {"step": 9, "time": T0 + 20, "lineage": 0, **own})
    measured = {"eval_reward": 0.5, "eval_pass@4": 0.75, "eval_num_prompts": 10, "eval_left_out": 2}
    fake.row("7.0", {"step": 9, **measured})
    report = make_report("low", load_status(fake.trial), T0 + 40)
    assert {"curve-reward/format", "curve-agent/turns", "curve-eval_pass@4"} <= make_figures([report]).keys()
    assert not {*own, "eval_pass@4"} & list_other_curves([report]).keys()
    told = list_facts(report)
    assert told["mean agent/turns of the last 10 steps"] == "2"
    assert told["held-out pass@4"] == "0.75 (step 9), over 10 of 12 rows"


def test_rejected_prompts_and_steps_without_learning_are_facts(trials, capsys):
    fake = trials[0]
    write_json(fake.trial.attempt("7.0").rollout_report(0), {"rejected": {"too_long": 4}})
    for step in range(9, 29):
        fake.row("7.0", {"step": step, "time": T0 + 20, "lineage": 0, "grad_norm": 0.0})
    assert main(["report", "low", "--json"]) == 0
    (told,) = json.loads(capsys.readouterr().out)
    assert told["rejected_prompts"] == {"total": 4, "reasons": {"too_long": 4}}
    assert told["idle_steps"]["in_a_row"] == 20 and told["idle_steps"]["notable"]
    assert told["facts"]["rejected prompts"] == "4 (too_long 4)"
    assert told["facts"]["steps without learning"].startswith("20 of 28")


def test_options_that_differ_come_first(trials, capsys):
    assert main(["report", "low", "high"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("option that differs")
    html = make_page([make_report(fake.trial.name, load_status(fake.trial), T0 + 40) for fake in trials], T0)
    assert html.index("options differ") < html.index(">state<")


def test_what_a_workflow_said_is_marked_and_the_row_is_shown(trials):
    report = make_report("low", load_status(trials[0].trial), T0 + 40)
    report.samples = [replace(SAMPLE, completion="one<two>three", given=((3, 8),), columns={"answer": "42"})]
    html = make_page([report], T0)
    assert re.search(r'<pre>one</pre>\s*<div class="note">given by the workflow</div>\s*<pre class="given">&lt;two&gt;</pre>\s*<pre>three</pre>', html)  # fmt: skip
    assert "answer: 42" in html


def test_the_page_smooths_curves_of_many_steps_and_no_evaluation(make_fake_trial, tmp_path, state_home):
    fake = make_fake_trial(tmp_path / "runs", name="long")
    fake.run_to(100)
    for step in range(1, 61):
        fake.evaluation("7.0", step, float(step % 2))
    report = make_report("long", load_status(fake.trial), T0 + 400)
    drawn = make_figures([report])
    pale, mean = drawn["curve-reward"]["data"]
    assert "(mean of 5 steps)" in drawn["curve-reward"]["layout"]["title"]["text"]
    assert pale["opacity"] < 1 and pale["y"][-1] == 1.0 and mean["y"][-1] == pytest.approx(0.98)
    (values,) = drawn["curve-held-out"]["data"]
    assert set(values["y"][1:]) == {0.0, 1.0}
