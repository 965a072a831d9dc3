"""submit, render and recover: what they say, what they leave on disk, and what they refuse."""

import json
import re
import shutil
import time
from types import SimpleNamespace

import pytest
from command_line import NO_TENSORS, TOKENIZER, make_python
from model_shapes import QWEN3_8B

from hpc_rl.cli.__main__ import main
from hpc_rl.core.records import JobRecord
from hpc_rl.core.trial import load_json, write_json
from hpc_rl.datasets.rows import load_rows
from hpc_rl.schedulers.base import State
from hpc_rl.schedulers.sinfo import Node
from hpc_rl.supervise import bad_nodes
from hpc_rl.trials import (
    checklist,
    needs,
    storage,
    trial_index,
)

pytestmark = pytest.mark.usefixtures("state_home")


def submitted(config, *more: str) -> int:
    return main(["submit", "--config", str(config), *more])


def test_submit_says_what_it_did_and_what_to_type_next(config, scheduler, capsys):
    assert submitted(config, "--actor.optimizer.lr", "1e-4", "total_train_steps=20") == 0
    out = capsys.readouterr().out
    trial = trial_index.resolve("small")
    assert scheduler.calls == [("submit", "job-1")]
    for words in (
        "note: allocation_mode is not set, so",
        str(trial.dir),
        "job-1",
        "hpc-rl status sums/small",
        "hpc-rl cancel sums/small",
    ):
        assert words in out
    assert load_json(trial.config_json)["actor"]["optimizer"]["lr"] == 1e-4
    assert load_json(trial.config_json)["total_train_steps"] == 20
    assert load_json(trial.job("job-1"))["start_mode"] == "auto"


def test_for_scripts(config, scheduler, capsys):
    assert submitted(config, "--parsable") == 0
    assert capsys.readouterr().out == "job-1\n"
    scheduler.answers.clear()
    assert submitted(config, "--json", "trial_name=other") == 0
    said = json.loads(capsys.readouterr().out)
    assert said["job_id"] == "job-2"
    assert said["dir"] == str(trial_index.resolve("other").dir)
    assert said["notes"]


def test_a_dry_run_writes_and_submits_nothing(config, scheduler, tmp_path, capsys):
    assert submitted(config, "--dry_run") == 0
    out = capsys.readouterr().out
    assert "node 0  trainer     1 process" in out
    assert not scheduler.calls
    assert not (tmp_path / "runs").exists()
    assert (
        main(["render", "--config", str(config), "recover.mode=resume"]) == 0
    )  # what it starts from may be imported yet


def test_render_writes_scripts_and_submits_nothing(config, scheduler, tmp_path, capsys):
    assert main(["render", "--config", str(config), "--output", str(tmp_path / "here")]) == 0
    assert not scheduler.calls
    assert (tmp_path / "here" / "scripts" / "local.sh").is_file()
    out = capsys.readouterr().out
    assert str(tmp_path / "here" / "scripts" / "local.sh") in out
    assert f"the trial has the name of the directory: {tmp_path.name}/here" in out
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["actor.optimzer.lr=1"], "optimizer"),
        (["total_train_steps=many"], "total_train_steps"),
        (["trial_name=a/b"], "trial_name"),
        (["experiment_name=.."], "experiment_name"),
        (["actor.path=/nowhere"], "actor.path"),
        (["allocation_mode=embedded:d1+fsdp:"], "allocation_mode"),
        (["nonsense"], "nonsense"),
    ],
)
def test_bad_input_is_refused_in_words_and_leaves_nothing(config, scheduler, tmp_path, capsys, more, words):
    assert submitted(config, *more) == 64
    said = capsys.readouterr()
    assert words in said.err
    assert said.err.startswith("hpc-rl: ")
    assert said.out == ""
    assert not (tmp_path / "runs").exists()


def test_a_scheduler_that_refuses_leaves_nothing(config, scheduler, tmp_path, capsys):
    scheduler.refuses = "sbatch: error: invalid partition"
    assert submitted(config) == 69
    assert "invalid partition" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
    assert trial_index.list_entries() == []


def test_nodes_that_failed_the_trial_are_avoided_if_enough_are_left(config, scheduler, monkeypatch, capsys):
    nodes = [Node("main", name, 64, 256_000, is_default=True) for name in ("n1", "n2")]
    monkeypatch.setattr(checklist, "SlurmScheduler", lambda: SimpleNamespace(query_nodes=lambda: nodes))
    monkeypatch.setattr(checklist, "require", lambda program: None)
    scheduler.name = "slurm"
    assert submitted(config, "launcher.type=slurm") == 0
    trial = trial_index.resolve("small")
    bad_nodes.add(trial, trial.attempt("job-1.0"), ["n1"], "lost", time.time(), hours=1)
    for left, excluded, words in ((nodes[1], True, "avoided"), (None, False, "not avoided")):
        nodes[1:] = [left] if left else []
        scheduler.answers.clear()
        capsys.readouterr()
        assert submitted(config, "launcher.type=slurm") == 0
        assert f"note: n1 failed this trial recently: {words}" in capsys.readouterr().out
        assert ("--exclude=n1" in (trial.scripts / "trial.sbatch").read_text()) is excluded


def test_a_trial_that_runs_is_busy(config, scheduler, capsys):
    assert submitted(config) == 0
    assert submitted(config) == 75
    assert "job-1" in capsys.readouterr().err


# -- recover


@pytest.fixture
def stopped(config, scheduler, capsys, make_generation):
    """sums/small, submitted once, ended with a generation."""
    submitted(config)
    capsys.readouterr()
    scheduler.answers["job-1"] = State.CANCELLED
    trial = trial_index.resolve("small")
    make_generation(trial, 5)
    return trial


def test_recover_submits_the_stored_configuration_as_a_resume(stopped, capsys):
    assert main(["recover", "small", "total_train_steps=30"]) == 0
    assert "job-2" in capsys.readouterr().out
    assert load_json(stopped.job("job-2"))["start_mode"] == "resume"
    stored = load_json(stopped.config_json)
    assert (stored["total_train_steps"], stored["recover"]["mode"], stored["trial_name"]) == (
        30,
        "auto",
        "small",
    )


def test_a_note_is_printed_by_the_first_submission_only(config, scheduler, capsys, make_generation):
    assert submitted(config) == 0
    first = capsys.readouterr().out
    assert "note: actor.dtype is float32" in first
    scheduler.answers["job-1"] = State.CANCELLED
    make_generation(trial_index.resolve("small"), 5)
    assert main(["recover", "small", "total_train_steps=30"]) == 0
    assert "note: actor." not in capsys.readouterr().out
    scheduler.answers["job-2"] = State.CANCELLED
    assert main(["recover", "small", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["notes"]


def test_recover_refuses_what_the_state_can_not_take_and_changes_nothing(stopped, scheduler, capsys):
    before = stopped.config_json.read_bytes()
    assert main(["recover", "small", "gconfig.n_samples=8", "--n_nodes", "1", "--replay"]) == 64
    said = capsys.readouterr().err
    assert (
        "gconfig.n_samples can't change from 4 to 8 in trial sums/small: completions that are not trained on yet"
        in said
    )
    assert "use gconfig.n_samples=4. For other values, `hpc-rl fork sums/small NEW`" in said
    assert "cluster.n_nodes" not in said
    assert scheduler.calls == [("submit", "job-1")]
    assert stopped.config_json.read_bytes() == before


def test_recover_applies_safe_changes_and_prints_them(stopped, capsys):
    assert main(["recover", "small", "actor.optimizer.lr=1e-6"]) == 0
    assert "changed    actor.optimizer.lr: 2e-05 -> 1e-06  (safe)" in capsys.readouterr().out
    assert load_json(stopped.config_json)["actor"]["optimizer"]["lr"] == 1e-6


def test_resubmission_is_compared_with_what_the_trial_was_made_with(stopped, config, scheduler, capsys):
    assert submitted(config, "seed=7") == 64
    assert "seed can't change from 1 to 7" in capsys.readouterr().err
    assert submitted(config, "--dry_run", "seed=7") == 64
    capsys.readouterr()
    assert submitted(config, "--json", "actor.eps_clip=0.3") == 0
    assert json.loads(capsys.readouterr().out)["changes"] == [
        {"name": "actor.eps_clip", "old": 0.2, "new": 0.3, "safe": True, "reason": "", "renews": True}
    ]


def test_a_trial_that_never_saved_anything_takes_any_change(stopped, config):
    (stopped.generation(5) / "manifest.json").unlink()
    assert submitted(config, "seed=7") == 0


def test_a_trial_that_never_trained_can_be_corrected(stopped, config, scheduler, capsys, make_seal):
    """Its first start had a lineage and an empty ledger, perhaps groups, and then failed."""
    shutil.rmtree(stopped.generation(5))
    stopped.batches.mkdir(exist_ok=True)
    ledger = stopped.rollout / "segment-0000.ledger"
    ledger.write_bytes(b"groups of the old seed")
    stopped.current_weights.write_text("{}")
    assert main(["recover", "small"]) == 3
    assert (
        "`hpc-rl submit` with recover.mode=auto starts trial sums/small from step 0"
        in capsys.readouterr().err
    )
    scheduler.refuses = "no"
    assert submitted(config, "seed=7") == 69
    scheduler.refuses = ""
    assert ledger.exists() and stopped.current_weights.exists()
    assert submitted(config, "actor.eps_clip=0.3") == 0
    assert ledger.exists(), "it fits the seed still"
    scheduler.answers["job-2"] = State.CANCELLED
    capsys.readouterr()
    assert submitted(config, "seed=7", "actor.eps_clip=0.3") == 0
    assert (
        "dropped    unused rollouts from an earlier configuration (segment-0000.ledger, current.json)"
        in capsys.readouterr().out
    )
    assert not ledger.exists() and not stopped.current_weights.exists()
    scheduler.answers["job-3"] = State.CANCELLED
    ledger.write_bytes(b"groups of a batch")
    make_seal(stopped, 1)
    for command in ("submit", "render"):
        assert main([command, "--config", str(config), "seed=8"]) == 64
    assert ledger.exists() and load_json(stopped.config_json)["seed"] == 7


def test_what_never_trained_can_be_rendered_with_other_options(stopped, config, capsys):
    """The next submission would find its own options in config.json, and groups that do not fit them."""
    shutil.rmtree(stopped.generation(5))
    ledger = stopped.rollout / "segment-0000.ledger"
    ledger.write_bytes(b"groups of the old seed")
    assert main(["render", "--config", str(config), "seed=7"]) == 0
    assert (
        "dropped    unused rollouts from an earlier configuration (segment-0000.ledger)"
        in capsys.readouterr().out
    )
    assert not ledger.exists()


def test_what_never_trained_can_be_submitted_with_corrected_rows(stopped, config, capsys):
    shutil.rmtree(stopped.generation(5))
    ledger = stopped.rollout / "segment-0000.ledger"
    ledger.write_bytes(b"rejections of wrong rows")
    rows = config.parent / "train.jsonl"
    write_json(stopped.rollout / "data.json", load_rows(rows).fingerprint)
    rows.write_text(rows.read_text().replace("1+1", "2+1"))
    assert submitted(config) == 0
    assert (
        "dropped    unused rollouts from an earlier configuration (segment-0000.ledger)"
        in capsys.readouterr().out
    )
    assert not ledger.exists()


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["total_train_steps=3"], 64, "ends at step 3"),
        (["recover.mode=fault"], 75, "has state already, and recover.mode=fault"),
    ],
)
def test_render_refuses_what_a_submission_of_it_would_come_to(stopped, config, capsys, options, code, words):
    before = stopped.config_json.read_bytes()
    assert main(["render", "--config", str(config), *options]) == code
    assert words in capsys.readouterr().err and stopped.config_json.read_bytes() == before


def test_resubmission_of_a_finished_trial_says_so_and_starts_no_job(stopped, config, scheduler, capsys):
    stopped.done.write_text("{}")
    assert submitted(config) == 3
    assert "sums/small has reached its end" in capsys.readouterr().err
    assert scheduler.calls == [("submit", "job-1")]
    assert submitted(config, "total_train_steps=40") == 0
    assert not stopped.done.exists()


def test_recover_shows_what_changes_and_records_it(stopped, capsys):
    assert main(["recover", "small", "actor.optimizer.lr=1e-6", "allocation_mode=embedded:d2+fsdp:d1"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"changed +actor.optimizer.lr: \S+ -> 1e-06  \(safe\)", said)
    assert "changed    allocation: embedded:d1+fsdp:d1 -> embedded:d2+fsdp:d1  (safe" in said
    assert any("actor.optimizer.lr" in line for line in load_json(stopped.job("job-2"))["changed"])


def test_recover_refuses_what_would_make_another_trial(stopped, scheduler, capsys):
    assert main(["recover", "small", "train_dataset.batch_size=4", "--n_nodes", "1"]) == 64
    said = capsys.readouterr().err
    assert "train_dataset.batch_size can't change from 1 to 4" in said
    assert "cluster.n_nodes" not in said
    assert scheduler.calls == [("submit", "job-1")]
    assert main(["recover", "small", "train_dataset.batch_size=4", "--explain"]) == 64
    said = capsys.readouterr().out
    assert "decision     refuse" in said
    assert "train_dataset.batch_size: 1 -> 4  (unsafe: " in said


def test_recover_from_an_older_generation(stopped, scheduler, capsys, make_generation, make_seal):
    for step in (2, 3):
        make_generation(stopped, step)
    assert main(["recover", "small", "--from", "4"]) == 3
    assert (
        "there is no such checkpoint; the trial has checkpoints 2, 3, 5. Allowed: 5, 3, 2."
        in capsys.readouterr().err
    )
    make_seal(stopped, 4)
    assert main(["recover", "small", "--from", "2"]) == 3
    said = capsys.readouterr().err
    assert "batches 3 to 3 were trimmed" in said
    assert "Allowed: 5, 3." in said
    assert main(["recover", "small", "--from", "newest"]) == 2
    stopped.done.write_text("{}")
    assert main(["recover", "small", "--from", "gen-00000003"]) == 0  # a finished trial, too
    assert "from checkpoint 3, which was read and is sound;" in capsys.readouterr().out
    assert load_json(stopped.job("job-2"))["from_step"] == 3
    script = next(stopped.scripts.glob("local.sh")).read_text()
    assert " from_step=3 " in script  # should the job start before its record is there


@pytest.mark.parametrize(
    ("words", "renews"),
    [
        (["--from", "3"], True),
        (["--from", "3", "--replay"], False),
        (["actor.optimizer.lr=1e-6"], True),
        (["actor.optimizer.lr=1e-6", "--replay"], False),
        (["gconfig.n_samples=8"], True),
        ([], False),
        (["total_train_steps=99"], False),
    ],
)
def test_recover_sets_batches_of_an_abandoned_policy_aside(
    stopped, capsys, make_generation, make_seal, words, renews
):
    make_generation(stopped, 3)
    for step in range(3, 8):
        make_seal(stopped, step)
    first = 4 if "--from" in words else 6
    expected = list(range(first, 8)) if renews else []
    assert main(["recover", "small", *words, "--explain"]) == 0
    sentence = f"batches {first} to 7 came from the old policy or old options, and will be regenerated"
    said = capsys.readouterr().out
    assert (sentence in said) == renews
    assert ("although they came from the old policy or old options" in said) == ("--replay" in words)
    assert ("at learning rate 1e-06 (2e-05 before)" in said) == ("actor.optimizer.lr=1e-6" in words)
    assert main(["recover", "small", *words, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["new_batches"], said["set_aside_batches"]) == (renews, expected)
    assert said["replayed_batches"] == ([] if renews else list(range(first, 8)))
    job = JobRecord.read(stopped.job("job-2"))
    assert job.new_batches == renews
    script = next(stopped.scripts.glob("local.sh")).read_text()
    assert ("new_batches=1 " in script) == renews  # should the job start before its record is there


@pytest.fixture
def decaying(config, scheduler, capsys, make_generation):
    """sums/small with a linear schedule from 0.3 to 0 over 10 steps, stopped after step 5."""
    submitted(config, "actor.optimizer.lr=0.3", "actor.optimizer.lr_scheduler_type=linear")
    capsys.readouterr()
    scheduler.answers["job-1"] = State.CANCELLED
    trial = trial_index.resolve("small")
    for step in (3, 5):
        make_generation(trial, step)
    return trial


@pytest.mark.parametrize(
    ("words", "rate", "before", "raised"),
    [
        ([], 0.15, 0.18, False),
        (["--from", "3"], 0.21, 0.24, False),
        (["actor.optimizer.lr=0.1"], 0.05, 0.18, False),
        (["total_train_steps=60"], 0.275, 0.18, True),
        (["actor.ppo_n_minibatches=2"], 0.15, 0.18, False),
    ],
)
def test_the_rate_of_the_next_step_is_the_schedules(decaying, capsys, words, rate, before, raised):
    assert main(["recover", "small", *words, "--explain"]) == 0
    said = capsys.readouterr().out
    assert ("the schedule runs over all steps, and there are more now" in said) == raised
    assert (f"at learning rate {rate:g} ({before:g} before)" in said) == (bool(words) and not raised)
    assert main(["recover", "small", *words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["learning_rate"] == pytest.approx(rate)
    assert found["learning_rate_before"] == pytest.approx(before)
    assert (found["raised_by_length"], found["learning_rate_exact"]) == (raised, True)


def test_a_dry_run_says_what_the_next_step_trains_on(stopped, config, capsys, make_seal):
    make_seal(stopped, 6)
    assert submitted(config, "--dry_run") == 0
    assert "batches    the next steps train on batch 6 again" in capsys.readouterr().out
    assert submitted(config, "--dry_run", "actor.optimizer.lr=1e-6") == 0
    assert "step 6 and later train on new completions" in capsys.readouterr().out


def test_recover_of_a_running_trial_is_busy(stopped, scheduler):
    scheduler.answers["job-1"] = State.RUNNING
    assert main(["recover", "small"]) == 75


def test_recover_without_a_generation_has_nothing_to_resume(stopped):
    (stopped.generation(5) / "manifest.json").unlink()
    assert main(["recover", "small"]) == 3


def test_recover_of_a_finished_trial_needs_more_steps(stopped, scheduler, capsys):
    stopped.done.write_text("{}")
    assert main(["recover", "small"]) == 3
    assert "total_train_steps=N" in capsys.readouterr().err
    scheduler.refuses = "no"
    assert main(["recover", "small", "total_train_steps=99"]) == 69
    assert stopped.done.exists()
    scheduler.refuses = ""
    assert main(["recover", "small", "total_train_steps=99"]) == 0
    assert not stopped.done.exists()


def test_explain_shows_the_decision_and_does_nothing(stopped, scheduler, capsys):
    (stopped.generation(5) / "manifest.json").write_text("{}")
    assert main(["recover", "small", "--explain", "actor.eps_clip=0.3"]) == 3
    out = capsys.readouterr().out
    assert "changed    actor.eps_clip: 0.2 -> 0.3  (safe)" in out
    assert "checkpoint   5" in out
    assert "no valid checkpoint to resume from" in out
    assert scheduler.calls == [("submit", "job-1")]
    assert main(["recover", "small", "--explain", "--json"]) == 3
    assert json.loads(capsys.readouterr().out)["action"] == "refuse"


def test_render_checks_first_and_writes_nothing_that_can_not_run(config, scheduler, tmp_path, capsys):
    good, bad = ["#!/bin/bash\n", "true\n"], ["{% block environment %}\nif\n{% endblock %}"]
    (tmp_path / "own" / "templates").mkdir(parents=True)
    template = tmp_path / "own" / "templates" / "local.sh.j2"
    template.write_text('{% extends "below/templates/local.sh.j2" %}' + "".join(bad))
    arguments = [
        "render",
        "--config",
        str(config),
        f"launcher.templates_dir={tmp_path / 'own'}",
        "--output",
        str(tmp_path / "out"),
    ]
    assert main([*arguments, "--check"]) == 64
    assert "syntax error" in capsys.readouterr().err and not (tmp_path / "out").exists()
    assert main([*arguments, "--check", "--json"]) == 64
    checks = json.loads(capsys.readouterr().out)["checks"]
    assert [check["state"] for check in checks if check["name"] == "local.sh: bash -n"] == ["refused"]
    template.write_text("".join(good))
    assert main([*arguments, "--check"]) == 0
    assert (
        "check      local.sh: bash -n" in capsys.readouterr().out
        and (tmp_path / "out" / "scripts" / "local.sh").exists()
    )
    assert scheduler.calls == []


# -- what a trial needs

LARGE = ["cluster.n_gpus_per_node=8", "train_dataset.batch_size=64", "launcher.trainer_mem_per_gpu=200000"]


@pytest.fixture
def large(config, tmp_path):
    """The configuration with a model of 8 billion parameters, of which there is only config.json."""
    for path in (tmp_path / "model").iterdir():
        path.unlink()
    write_json(tmp_path / "model" / "config.json", QWEN3_8B)
    return config


def test_a_plan_alone_needs_nothing_but_config_json(large, scheduler, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PATH", "/usr/bin:/bin")  # no Slurm
    alone = ("--dry_run", "--no_check", "launcher.type=slurm", *LARGE)
    assert submitted(large, *alone) == 0
    said = capsys.readouterr().out
    assert "cluster.gpu_mem_gb" in said  # a note: the size is not known
    for words in (
        "10 steps, each of 256 sequences",
        "rows is ",
        " servers read, and up to ",
        "parameters",
        "Adam moments",
        "checkpoint 91.5 GB",
    ):
        assert words in said
    assert submitted(large, *alone, "--json") == 0
    assert json.loads(capsys.readouterr().out)["estimate"]["rank"]["items"]["parameters"] == 8_190_735_360
    assert not (tmp_path / "runs").exists()


def test_a_dry_run_of_config_json_alone_is_refused_before_it_shows_a_plan(
    large, scheduler, capsys, monkeypatch
):
    assert submitted(large, "--dry_run", *LARGE) == 64
    said = capsys.readouterr()
    assert said.out == ""
    assert "contains no weights (*.safetensors)" in said.err
    assert submitted(large, "--dry_run", "--json", *LARGE) == 64
    said = json.loads(capsys.readouterr().out)
    assert said["estimate"]["rank"]["items"]["parameters"] == 4 * 8_190_735_360 / 4
    assert any("contains no weights" in line for line in said["refusals"])
    here = ["launcher.type=local", "cluster.n_gpus_per_node=0"]
    monkeypatch.setattr(needs, "measure_usable_memory", lambda: 64 << 30)
    assert submitted(large, "--dry_run", *LARGE, *here) == 64
    assert (
        "Adam moments, but this machine has only 64.0 GB of memory; use a smaller model"
        in capsys.readouterr().err
    )


def test_what_can_not_fit_is_refused_before_anything_is_written(
    large, scheduler, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    monkeypatch.setattr(storage, "measure_free_bytes", lambda path: 1 << 50)
    (tmp_path / "model" / "model.safetensors").write_bytes(NO_TENSORS)
    (tmp_path / "model" / "tokenizer.json").write_text(TOKENIZER)
    servers = make_python(tmp_path / "python", packages={"sglang": "0.5.23"})
    given = [*LARGE, f"launcher.inference_server_python={servers}"]
    small = [*given, "cluster.gpu_mem_gb=24"]
    assert submitted(large, *small) == 64
    said = capsys.readouterr()
    assert "cluster.gpu_mem_gb 24 leaves" in said.err
    assert "What fits:" in said.err
    assert said.out == ""
    assert main(["render", "--config", str(large), *small]) == 64
    assert submitted(large, "--dry_run", *small) == 64
    said = capsys.readouterr()
    assert said.out == "" and "cluster.gpu_mem_gb 24 leaves" in said.err
    assert submitted(large, "--dry_run", "--no_check", *small) == 0
    said = capsys.readouterr().out
    assert "Adam moments" in said and "cluster.gpu_mem_gb 24 leaves" in said
    assert not (tmp_path / "runs").exists()
    assert submitted(large, *given, "cluster.gpu_mem_gb=80") == 0


def test_a_model_that_is_not_known_is_not_estimated(config, scheduler, capsys):
    assert submitted(config, "--dry_run") == 0
    assert "memory     not estimated" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("place", "words"), [("nowhere", "there is no such folder"), ("a", "it has no config.json")]
)
def test_a_place_that_is_neither_a_model_nor_a_trial_is_refused(tmp_path, monkeypatch, capsys, place, words):
    (tmp_path / "a").mkdir()
    monkeypatch.chdir(tmp_path)
    assert main(["evaluate", place]) == 64
    said = capsys.readouterr().err
    assert f"{place} is not a model ({words}) and not a trial: there is no trial {place!r}" in said


def test_a_dry_run_shows_the_purpose(config, scheduler, capsys):
    assert submitted(config, "purpose=serve", "--dry_run") == 0
    assert "plan       serve, embedded:d1, 1 node" in capsys.readouterr().out
