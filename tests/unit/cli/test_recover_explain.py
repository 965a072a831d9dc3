"""`hpc-rl recover --explain` prints the very words by which the trainer of that recover then starts, or does
not.
"""

import dataclasses
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from patience import extend

from hpc_rl.checkpoint import generation, start_facts
from hpc_rl.checkpoint.decide import Decision
from hpc_rl.checkpoint.generation import scan
from hpc_rl.checkpoint.lineage import create_lineage
from hpc_rl.cli.__main__ import main
from hpc_rl.config.load.stored import from_dict
from hpc_rl.core.allocation import Train
from hpc_rl.core.errors import ConfigError, GivenUp, NothingToResume
from hpc_rl.core.files import JsonLines
from hpc_rl.core.proc import find_start_ticks
from hpc_rl.core.records import load_lineages
from hpc_rl.core.trial import Trial, load_json, write_json
from hpc_rl.datasets import rows as rows_module
from hpc_rl.datasets.rows import load_rows
from hpc_rl.rollout.batch_log.ledger import GroupRecord, Ledger
from hpc_rl.rollout.batch_log.seals import Batches
from hpc_rl.schedulers.base import State
from hpc_rl.trainers.start import TrainerContext, begin
from hpc_rl.trials import trial_index

pytestmark = pytest.mark.usefixtures("state_home")
OTHERS = ("disabled", "fault", "resume")


@pytest.fixture
def trial(config, scheduler, capsys, make_generation) -> Trial:
    """sums/small: job-1 made generations 3, 6 and 9 and was cancelled."""
    assert main(["submit", "--config", str(config)]) == 0
    scheduler.answers["job-1"] = State.CANCELLED
    trial = trial_index.resolve("small")
    trial.attempt("job-1.0").make_dirs()
    create_lineage(trial, trial.attempt("job-1.0"), 0, Decision("fresh", "first"))
    for step in (3, 6, 9):
        make_generation(trial, step, data=load_rows(config.parent / "train.jsonl").fingerprint)
    capsys.readouterr()
    return trial


def start(trial: Trial, job_id: str) -> TrainerContext:
    attempt = trial.attempt(f"{job_id}.0")
    attempt.make_dirs()
    config = from_dict(json.loads(trial.config_json.read_text()))
    return TrainerContext(
        trial=trial,
        attempt=attempt,
        incarnation=0,
        config=config,
        tokens={},
        names=None,  # type: ignore[arg-type]
        train=Train("fsdp"),
        device="cpu",
        ranks=None,  # type: ignore[arg-type]
        stopping=threading.Event(),
    )


def tear(trial: Trial, *steps: int) -> None:
    for step in steps:
        (trial.generation(step) / "state").write_text("torn")


CASES = {
    "the newest": ((), [], 9),
    "the newest is torn": ((9,), [], 6),
    "an older one": ((), ["--from", "6"], 6),
    "an older one is torn": ((6,), ["--from", "6"], None),
    "all are torn": ((3, 6, 9), [], None),
}


@pytest.mark.parametrize(
    ("case", "mode"), [*((case, "auto") for case in CASES), *(("the newest", mode) for mode in OTHERS)]
)
def test_the_same_words(trial, scheduler, capsys, case, mode):
    torn, flags, step = CASES[case]
    tear(trial, *torn)
    code = main(["recover", "small", f"recover.mode={mode}", *flags, "--explain", "--json"])
    said = json.loads(capsys.readouterr().out)
    assert main(["recover", "small", f"recover.mode={mode}", *flags]) == code
    refusal = capsys.readouterr().err
    if step is not None:
        begun = begin(start(trial, "job-2"))
        assert (code, begun["step"], said["reason"]) == (0, step, load_lineages(trial)[-1].reason)
        return
    assert code == 3 and refusal == f"hpc-rl: {said['reason']}\n"
    from_step = int(flags[1]) if flags else None
    write_json(trial.job("job-2"), {"job_id": "job-2", "start_mode": "resume", "from_step": from_step})
    with pytest.raises(NothingToResume) as error:
        begin(start(trial, "job-2"))
    words, _, advice = said["reason"].partition(f"{error.value}. ")
    assert (
        not words
        and ("Allowed: 9, 3." if flags else "recover.mode=auto starts trial sums/small from step 0") in advice
    )


def test_from_an_older_generation_the_later_ones_are_kept_aside(trial, capsys):
    assert main(["recover", "small", "--from", "3"]) == 0
    assert begin(start(trial, "job-2"))["step"] == 3
    assert [found.step for found in scan(trial)] == [3]
    aside = sorted(path.name.split(".")[0] for path in (trial.recover / "set-aside").iterdir())
    assert aside == ["gen-00000006", "gen-00000009"]
    assert all((path / "manifest.json").exists() for path in (trial.recover / "set-aside").iterdir())
    assert load_lineages(trial)[-1].set_aside == (6, 9)
    assert load_lineages(trial)[-1].lineage == 1  # a label of a step that is made again is another one


def test_explain_says_what_it_did_not_read(trial, capsys, monkeypatch):
    assert main(["recover", "small", "--explain"]) == 0
    assert "not read     " not in capsys.readouterr().out
    monkeypatch.setattr(generation, "LIGHT_BYTES", 8)
    assert main(["recover", "small", "--explain"]) == 0
    said = capsys.readouterr().out
    assert (
        "not read     " in said
        and "state" in said
        and "hpc-rl checkpoint verify" in said
        and "--step 9" in said
    )
    assert main(["recover", "small"]) == 0
    assert (
        "start      from checkpoint 9, which was read and is sound; checked while it is loaded: "
        in capsys.readouterr().out
    )


def test_the_generation_asked_for_is_read_whole_where_that_is_quick(trial, capsys, monkeypatch):
    monkeypatch.setattr(generation, "LIGHT_BYTES", 8)
    assert main(["recover", "small", "--from", "6", "--explain"]) == 0
    said = capsys.readouterr().out
    assert "not read     " not in said
    assert "checkpoint   9, lineage 0, job job-1: looks sound; its content was not read\n" in said
    assert "checkpoint   6, lineage 0, job job-1: valid\n" in said
    assert " (this start: resume)\n" in said
    monkeypatch.setattr(start_facts, "IN_PASSING_BYTES", 8)
    assert main(["recover", "small", "--from", "6", "--explain"]) == 0
    assert "the start reads them before it sets" in capsys.readouterr().out
    (trial.generation(6) / "state").write_text("tornx of 6")
    assert main(["recover", "small", "--from", "6", "--explain"]) == 0


REFUSALS = {
    "past its total": (["total_train_steps=5"], 64, "ends at step 5, before checkpoint 9"),
    "past its epochs": (
        ["total_train_steps=null"],
        64,
        "total_train_epochs 1: trial sums/small ends at step 1, ",
    ),
    "being submitted": ([], 75, "is being submitted by process"),
    "more nodes than this machine": (["--n_nodes", "2"], 64, "n_nodes"),
    "a file that is not there": (["valid_dataset.path=/nowhere"], 64, "/nowhere"),
    "an unsafe change": (["seed=9"], 64, "seed can't change"),
    "no Slurm here": (["launcher.type=slurm"], 69, "sbatch is not on the PATH"),
    "at its end": ([], 3, "has reached its end"),
    "running": ([], 75, "is running as job job-1"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_explain_refuses_what_recover_refuses_in_the_same_words(trial, scheduler, capsys, monkeypatch, case):
    options, code, words = REFUSALS[case]
    monkeypatch.setenv("PATH", "/nowhere")
    if case == "running":
        scheduler.answers["job-1"] = State.RUNNING
    if case == "at its end":
        trial.done.write_text("{}")
    if case == "being submitted":
        other = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "start_ticks": find_start_ticks(os.getpid()),
        }
        write_json(trial.submitting, other)
    assert main(["recover", "small", *options, "--explain", "--json"]) == code
    said = json.loads(capsys.readouterr().out)
    assert (said["action"], said["exit_code"]) == ("refuse", code) and words in said["reason"]
    assert main(["recover", "small", *options]) == code
    assert capsys.readouterr().err == f"hpc-rl: {said['reason']}\n"


def test_other_rows_are_refused_before_submission_a_moved_file_is_not(trial, config, capsys, monkeypatch):
    rows = config.parent / "train.jsonl"
    moved = rows.rename(config.parent / "moved.jsonl")
    there = [f"train_dataset.path={moved}"]
    assert main(["recover", "small", *there, "--explain"]) == 0
    assert f"{moved}  (safe: its rows must be the same, and are compared)" in capsys.readouterr().out
    moved.write_text(moved.read_text() * 2)
    for more in (["--explain"], []):
        assert main(["recover", "small", *there, *more]) == 64
        said = capsys.readouterr()
        assert f"{moved} had 1 rows when checkpoint 9 was made" in said.out + said.err
    monkeypatch.setattr(
        rows_module, "IN_PASSING_BYTES", 10
    )  # too large to be read here: the start itself compares them
    assert main(["recover", "small", *there]) == 0
    with pytest.raises(ConfigError, match="had 1 rows when checkpoint 9 was made, and has 2 rows now"):
        begin(dataclasses.replace(start(trial, "job-2"), data=load_rows(moved).fingerprint))


def test_a_trial_directory_that_was_moved_goes_on_where_it_lies(trial, config, tmp_path, capsys):
    shutil.move(tmp_path / "runs", tmp_path / "elsewhere")
    assert main(["submit", "--config", str(config), f"cluster.fileroot={tmp_path / 'elsewhere'}"]) == 0
    assert "elsewhere  (safe: " in capsys.readouterr().out
    assert main(["submit", "--config", str(config), "trial_name=other", "recover.mode=resume"]) == 3


@pytest.mark.parametrize("damage", ["a seal", "a segment", "none"])
def test_a_batch_that_is_lost_keeps_newer_generations_where_they_are(trial, capsys, damage):
    log = Ledger(trial.rollout)
    batches = Batches(trial.rollout, log)
    for step in range(1, 10):
        record = GroupRecord(step, 0, 0, 0, 1, 1, 0.0)
        batches.seal(step, 0, {step: (record, log.append_group(record, b"group"))}, {})
    log.close()
    broken = {
        "a seal": trial.batches / "00000005.seal",
        "a segment": trial.rollout / "segment-0000.ledger",
    }.get(damage)
    code = 3 if broken else 0
    assert main(["recover", "small", "--from", "3"]) == 0
    if broken:
        broken.write_bytes(broken.read_bytes()[:40])
        with pytest.raises(GivenUp, match=f"nothing was changed: .*{broken.name}"):
            begin(start(trial, "job-2"))
    else:
        assert begin(start(trial, "job-2"))["step"] == 3
        return
    assert [found.step for found in scan(trial)] == [9, 6, 3]
    (trial.jobs / "job-2.state").write_text('{"event": "ended", "code": 70}\n')
    for more in (["--explain"], []):
        assert main(["recover", "small", "--from", "3", *more]) == code
        said = capsys.readouterr()
        assert (
            f"cannot resume from checkpoint 3: {'batch 4' if damage == 'a segment' else broken}"
            in said.out + said.err
        )
    if damage == "a segment":  # nothing that it had is needed
        assert main(["recover", "small", "--from", "9"]) == 0


def test_a_backup_beside_the_generations_is_none_of_them(trial, capsys):
    shutil.copytree(trial.generation(9), trial.recover / "gen-00000009.bak")
    assert main(["recover", "small", "--from", "7"]) == 3
    assert "the trial has checkpoints 3, 6, 9. Allowed: 9, 6, 3." in capsys.readouterr().err
    assert main(["recover", "small", "--from", "6"]) == 0


def test_what_can_not_start_over_is_not_told_to(trial, scheduler, config, capsys):
    """Its generations are gone, and so is the beginning of its batch log: neither recover nor submit has a
    way.
    """
    shutil.rmtree(trial.recover)
    write_json(trial.trimmed, {"step": 4})
    for command in (["recover", "small"], ["submit", "--config", str(config)]):
        assert main(command) == 3
        said = capsys.readouterr().err
        assert "another trial_name" in said and "starts" not in said
    assert scheduler.calls == [("submit", "job-1")]


def test_an_imported_generation_of_step_0_can_be_named(trial, capsys, make_generation):
    assert main(["recover", "small", "--from", "0", "--explain"]) == 3
    assert "there is no such checkpoint; the trial has checkpoints 3, 6, 9" in capsys.readouterr().out
    make_generation(trial, 0)
    assert main(["recover", "small", "--from", "gen-00000000"]) == 0
    assert begin(start(trial, "job-2"))["step"] == 0
    assert [found.step for found in scan(trial)] == [0]


@pytest.mark.parametrize(
    ("seals", "step", "words"),
    [
        (
            (),
            9,
            r"checkpoint 9, from which `hpc-rl recover` would resume instead of step 9\. "
            "Import as step 10 or later",
        ),
        (
            (8, 9, 10, 11),
            12,
            r"from step 12: the batch log only contains batches 8 to 11\. Import as a step from 10 to 11",
        ),
        (
            (8, 9),
            10,
            r"from step 10: .*Import into another trial, or set actor\.path of a new one",
        ),
    ],
)
def test_an_import_that_no_start_could_go_on_from_is_refused(
    trial, tmp_path, capsys, make_seal, seals, step, words
):
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")
    for number in seals:
        make_seal(trial, number)
    assert main(["checkpoint", "import", "small", str(tmp_path / "hf"), "--step", str(step)]) != 0
    assert re.search(words, capsys.readouterr().err)


def test_starts_that_come_to_nothing_end_the_trial_for_good(trial, capsys):
    """Each was requeued: nothing in place would have counted them."""
    assert main(["recover", "small", "recover.retries=2"]) == 0
    for restart in range(3):
        begun = dataclasses.replace(start(trial, "job-2"), attempt=trial.attempt(f"job-2.{restart}"))
        begun.attempt.make_dirs()
        begin(begun)
        with begun.attempt.events.open("a") as file:
            file.write(json.dumps({"event": "stopping", "cause": "time_limit"}) + "\n")
            file.write(
                json.dumps({"event": "exited", "role": "trainer", "incarnation": 0, "code": 75}) + "\n"
            )
        write_json(begun.attempt.ended, {"exit_code": 75, "cause": "time_limit"})
    last = dataclasses.replace(start(trial, "job-2"), attempt=trial.attempt("job-2.3"))
    with pytest.raises(
        GivenUp,
        match=r"3 starts in a row without a new checkpoint; recover\.retries allows 2: .*job-2\.2 ran into",
    ):
        begin(last)


def test_of_two_recovers_at_once_one_wins_and_the_other_says_busy(trial, tmp_path):
    """Real processes and a real local runner, whose job lasts until both have spoken: its Python is a script
    that waits.
    """
    env = {
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "PATH": "/usr/bin:/bin",
        "PYTHONPATH": str(Path(__file__).parents[3]),
    }
    write_json(trial.job("job-1"), {**load_json(trial.job("job-1")), "scheduler": "local"})
    trial.job("job-1").with_suffix(".state").write_text(
        '{"event": "started"}\n{"event": "ended", "code": 75}\n'
    )
    spoken, waits = tmp_path / "spoken", tmp_path / "waits"
    waits.write_text(
        f'#!/bin/bash\n[[ $1 == -c || " $* " == *" hpc_rl.roles.job "* ]] && exec {shlex.quote(sys.executable)} "$@"\n'
        f"while [[ ! -e {shlex.quote(str(spoken))} ]]; do sleep 0.1; done\nexit 1\n"
    )
    waits.chmod(0o755)
    command = [
        sys.executable,
        "-m",
        "hpc_rl.cli",
        "recover",
        str(trial.dir),
        "--no_check",
        f"launcher.python={waits}",
    ]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    both = [subprocess.Popen(command, env=env, cwd=tmp_path, **pipes) for _ in range(2)]
    said = [process.communicate(timeout=extend(50)) for process in both]
    spoken.touch()
    assert sorted(process.returncode for process in both) == [0, 75], said
    busy = next(err for process, (_, err) in zip(both, said, strict=True) if process.returncode == 75)
    assert (
        "being submitted by process" in busy or "is running as job" in busy or "is pending as job" in busy
    ), busy
    [job] = trial.jobs.glob("local-*.json")
    deadline = time.monotonic() + extend(40)
    while JsonLines(trial.job_state(job.stem)).poll()[-1]["event"] != "ended":
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("content", [None, "{", "[]", "{}"])
def test_without_config_a_trial_is_compared_by_its_generation(trial, scheduler, capsys, content):
    """Accepted unseen, such options train another trial on this one's batches."""
    trial.config_json.unlink()
    if content is not None:
        trial.config_json.write_text(content)
    for more in (["--explain"], []):
        assert main(["recover", "small", "seed=9", *more]) == 64
        said = capsys.readouterr()
        assert "seed can't change from 1 to 9" in said.out + said.err
    trial.done.write_text("{}")
    assert main(["recover", "small"]) == 3
    assert main(["recover", "small", "total_train_steps=20"]) == 0
    assert "changed    total_train_steps: 10 -> 20  (safe)" in capsys.readouterr().out


def test_options_that_can_be_compared_with_nothing_are_refused(trial, scheduler, config, capsys, make_seal):
    """Batches of a trial that has no generation, and no word of how they were made."""
    shutil.rmtree(trial.recover)
    make_seal(trial, 1)
    trial.config_json.write_text("{")
    assert main(["submit", "--config", str(config)]) == 64
    said = capsys.readouterr().err
    assert f"{trial.config_json} is lost or damaged" in said and "another trial_name" in said
    assert scheduler.calls == [("submit", "job-1")]


def test_options_that_a_start_came_to_nothing_with_are_still_told(trial, scheduler, capsys):
    assert main(["recover", "small", "rollout.reward_fn=contains"]) == 0
    scheduler.answers["job-2"] = State.CANCELLED
    capsys.readouterr()
    assert main(["recover", "small", "--explain"]) == 0
    assert "exact_match -> contains  (safe" in capsys.readouterr().out


def test_only_the_first_start_of_a_recover_sets_batches_aside(trial, scheduler, capsys):
    assert main(["recover", "small", "--from", "6"]) == 0
    begin(start(trial, "job-2"))
    begin(dataclasses.replace(start(trial, "job-2"), incarnation=1))
    scheduler.answers["job-2"] = State.CANCELLED
    assert main(["recover", "small", "--from", "3", "--replay"]) == 0
    begin(start(trial, "job-3"))
    found = [(record.from_step, record.new_batches) for record in load_lineages(trial)[1:]]
    assert found == [(6, True), (6, False), (3, False)]
