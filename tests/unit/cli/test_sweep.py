"""`hpc-rl sweep` with a fake Slurm and with the scheduler of this machine: what is submitted, and when."""

import json
import os
from pathlib import Path

import pytest

import hpc_rl
from hpc_rl.cli.__main__ import main
from hpc_rl.core.sweep import Sweep
from hpc_rl.core.trial import Trial, find_account_name, load_json, load_object, write_json
from hpc_rl.doctor import machine
from hpc_rl.schedulers.base import State
from hpc_rl.status.submitted_jobs import load_jobs

pytestmark = [pytest.mark.waits, pytest.mark.usefixtures("state_home")]

SINFO = "batch*|up|1-00:00:00|1-infinite|n1|64|512000|(null)|(null)|1"
SBATCH = """#!/bin/bash
echo "$*" >>"{folder}/calls"
case " $* " in *" --array="*) array=1;; *) array=;; esac
if [[ -e "{folder}/refuse" ]]; then echo "sbatch: error: Batch job submission failed: no" >&2; exit 1; fi
echo $((100 + $(wc -l <"{folder}/calls")))
"""


@pytest.fixture
def slurm(tmp_path, monkeypatch) -> Path:
    """The folder of a fake Slurm; `calls` has the arguments of sbatch, and `others` the other calls."""
    folder = tmp_path / "slurm"
    folder.mkdir()
    programs = {
        "sinfo": f"echo '{SINFO}'",
        "squeue": f'cat "{folder}/queue" 2>/dev/null || true',
        "sacct": ":",
    }
    for name in ("scontrol", "srun", "scancel"):
        programs[name] = ":"
    for name, does in programs.items():
        text = f'#!/bin/bash\necho "{name} $*" >>"{folder}/others"\n{does}\n'
        (folder / name).write_text(text)
    (folder / "sbatch").write_text(SBATCH.format(folder=folder))
    for path in folder.iterdir():
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return folder


def calls_of(folder: Path) -> list[list[str]]:
    path = folder / "calls"
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def sweep_of(config: Path, name: str = "small") -> Sweep:
    return Sweep(config.parent / "runs" / find_account_name() / "sums" / f"{name}.sweep")


def test_equal_requests_are_one_array(config, slurm, capsys):
    command = ["sweep", str(config), "launcher.type=slurm", "actor.optimizer.lr=1e-6,3e-6", "seed=1..2"]
    assert main([*command, "--max_running", "2", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    names = [f"small-lr{rate}-seed{seed}" for rate in ("1e-6", "3e-6") for seed in (1, 2)]
    assert (told["array"], told["submitted"]) == ("101", names)
    ((*options, script),) = calls_of(slurm)
    assert "--array=0-3%2" in options
    others = (slurm / "others").read_text().splitlines()
    assert len([one for one in others if one.startswith("sinfo")]) == 1, "one for all trials"
    assert not [one for one in others if one.startswith(("squeue", "sacct"))]
    text = Path(script).read_text()
    assert "#SBATCH --nodes=1" in text and "--job-name" not in text and "#SBATCH --output" not in text
    sweep = sweep_of(config)
    for number, name in enumerate(names):
        trial = sweep.trial(name)
        (job,) = load_jobs(trial)
        assert (job.job_id, job.native_id, job.scheduler) == (f"101-{number}", f"101_{number}", "slurm")
        assert str(trial.dir) in text
        assert load_json(trial.config_json)["seed"] == 1 + number % 2
    assert main([*command, "--max_running", "2"]) == 0, "nothing is left to do"
    assert "0 waiting" in capsys.readouterr().out
    assert len(calls_of(slurm)) == 1
    assert main(["sweep", str(config), "launcher.type=slurm", "seed=1..5"]) == 75
    assert "exists with 4 other trials" in capsys.readouterr().err


def test_a_refused_array_leaves_no_trial(config, slurm, capsys):
    (slurm / "refuse").touch()
    command = ["sweep", str(config), "launcher.type=slurm", "seed=1..3"]
    assert main(command) == 69
    sweep = sweep_of(config)
    assert not sweep.trial("small-seed1").dir.exists() and not sweep.list_arrays()
    (slurm / "refuse").unlink()
    assert main(command) == 0
    assert len(load_jobs(sweep.trial("small-seed3"))) == 1


def test_an_array_whose_answer_was_lost_is_found_again(config, slurm, capsys):
    command = ["sweep", str(config), "launcher.type=slurm", "seed=1..3"]
    assert main(command) == 0
    sweep = sweep_of(config)
    ((path, array),) = sweep.list_arrays()
    write_json(path, {**array.to_json(), "job_id": ""})
    for name in array.trials:  # the command was killed before it recorded the jobs
        for record in sweep.trial(name).jobs.glob("*.json"):
            record.unlink()
    (slurm / "queue").write_text(f"101_[0-2]|{array.tag}\n")
    assert main(command) == 0
    assert len(calls_of(slurm)) == 1, "it is not submitted twice"
    (job,) = load_jobs(sweep.trial("small-seed2"))
    assert (job.job_id, job.native_id) == ("101-1", "101_1")


def test_unequal_requests_wait_for_each_other(config, slurm, capsys):
    options = ["launcher.type=slurm", "launcher.slurm.time=1:00:00,2:00:00,3:00:00,4:00:00"]
    assert main(["sweep", str(config), *options, "--max_running", "2", "--metric", "loss"]) == 0
    waits = [[one for one in call if one.startswith("--dependency")] for call in calls_of(slurm)]
    assert waits == [[], [], ["--dependency=afterany:101"], ["--dependency=afterany:102"]]
    assert sweep_of(config).load().metric == "loss"


def test_early_stopping_adds_the_callback_of_the_median_rule(config, slurm):
    options = ["launcher.type=slurm", "callbacks=[]", "seed=1,2", "--stop_early", "20"]
    assert main(["sweep", str(config), *options]) == 0
    sweep = sweep_of(config)
    assert load_object(sweep.trial("small-seed1").config_json)["callbacks"] == [
        "hpc_rl.stats.median_rule:MedianRule"
    ]
    assert (sweep.load().stop_from, sweep.load().metric) == (20, "reward")


def test_on_this_machine_the_next_trial_starts_when_one_ends(config, scheduler, monkeypatch, capsys):
    sweep = sweep_of(config)
    started: list[list[str]] = []

    def end_first(*_given: object) -> None:
        """The oldest live trial ends."""
        live = [trial for trial in trials() if load_jobs(trial) and not trial.done.exists()]
        started.append([trial.name for trial in live])
        write_json(live[0].done, {"job_id": load_jobs(live[0])[-1].job_id})

    def trials() -> list[Trial]:
        return [sweep.trial(one.name) for one in sweep.load().trials]

    monkeypatch.setattr("hpc_rl.cli.sweep._wait_for_change", end_first)
    command = ["sweep", str(config), "seed=1..3", "--max_running", "2"]
    assert main(command) == 0
    assert started == [
        ["small-seed1", "small-seed2"],
        ["small-seed2", "small-seed3"],
        ["small-seed3"],
    ]
    assert "hpc-rl sweep --report sums/small" in capsys.readouterr().out
    assert [call for call, _ in scheduler.calls] == ["submit"] * 3


def kill(*_given: object) -> None:
    """Take the place of a command that is interrupted."""
    raise KeyboardInterrupt


def test_a_killed_command_continues(config, scheduler, monkeypatch, capsys):
    monkeypatch.setattr("hpc_rl.cli.sweep._wait_for_change", kill)
    command = ["sweep", str(config), "seed=1..3"]
    assert main(command) == 130
    sweep = sweep_of(config)
    first = sweep.trial("small-seed1")
    assert load_jobs(first) and not sweep.trial("small-seed2").dir.exists()
    assert main(command) == 130, "it waits for the first trial"
    assert len(scheduler.calls) == 1
    write_json(first.done, {"job_id": "job-1"})
    assert main(command) == 130
    assert len(scheduler.calls) == 2 and load_jobs(sweep.trial("small-seed2"))
    assert main(["sweep", "--cancel", "small"]) == 0
    assert load_jobs(sweep.trial("small-seed2"))[0].cancelled


def test_a_cancelled_sweep_submits_no_more_trials(config, scheduler, monkeypatch, capsys):
    sweep = sweep_of(config)
    rounds: list[int] = []

    def cancel_meanwhile(*_given: object) -> None:
        """Another terminal cancels the sweep; then the first trial ends."""
        rounds.append(len(scheduler.calls))
        if len(rounds) == 1:
            assert main(["sweep", "--cancel", "small"]) == 0
        else:
            write_json(sweep.trial("small-seed1").done, {"job_id": "job-1"})

    monkeypatch.setattr("hpc_rl.cli.sweep._wait_for_change", cancel_meanwhile)
    command = ["sweep", str(config), "seed=1..3"]
    assert main(command) == 0
    said = capsys.readouterr().out
    assert "job job-1 of sums/small-seed1 finishes its step" in said
    assert "small-seed2, small-seed3: not submitted" in said and "cancelled; 2 trials not submitted" in said
    assert scheduler.calls == [("submit", "job-1"), ("nudge", "job-1")]
    assert main(["sweep", "--report", "small", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["num_over"], told["is_cancelled"]) == (3, True)
    monkeypatch.setattr("hpc_rl.cli.sweep._wait_for_change", kill)
    assert main(command) == 130, "repeated, it continues"
    assert load_jobs(sweep.trial("small-seed2")) and not sweep.load_cancel()


def test_an_array_is_cancelled_by_one_query_and_one_call_for_each_kind_of_end(config, slurm, capsys):
    assert main(["sweep", str(config), "launcher.type=slurm", "seed=1..12", "--max_running", "2"]) == 0
    rows = [f"101_{number}|RUNNING|None|N/A|n1|N/A" for number in range(2)]
    (slurm / "queue").write_text("\n".join([*rows, "101_[3-11%2]|PENDING|JobArrayTaskLimit|N/A||N/A"]) + "\n")
    (slurm / "others").unlink()
    capsys.readouterr()
    assert main(["sweep", "--cancel", "small", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [f"small-seed{number}" for number in range(1, 13)]
    calls = [line.split() for line in (slurm / "others").read_text().splitlines()]
    tasks = [f"101_{number}" for number in range(12)]
    assert [words for words in calls if words[0] == "scancel"] == [
        ["scancel", *tasks[3:]],
        ["scancel", "--batch", "--signal=USR1", *tasks[:2]],
    ], "the pending ones first"
    assert [words[0] for words in calls].count("squeue") == 1, (
        "one squeue, and one sacct about the third task"
    )
    assert [words[0] for words in calls].count("sacct") == 1
    for one in (sweep := sweep_of(config)).load().trials:
        (job,) = load_jobs(sweep.trial(one.name))
        assert job.cancelled


def test_every_trial_has_what_its_options_need(config, slurm, monkeypatch, capsys):
    monkeypatch.delenv("PYTHONPATH", raising=False)  # it may bring packages to the job
    monkeypatch.setattr(
        machine, "find_versions", lambda python: {"torch": "2.9", "transformers": "5", "safetensors": "1"}
    )
    command = ["sweep", str(config), "launcher.type=slurm", "stats_logger.mlflow.mode=disabled,local"]
    assert main(command) == 64
    said = capsys.readouterr().err
    assert (
        "trial small-modelocal of the sweep can't be submitted" in said and "needs the package mlflow" in said
    )
    assert not calls_of(slurm)


def test_a_report_names_the_best(config, scheduler, capsys, monkeypatch):
    command = [
        "sweep",
        str(config),
        "actor.optimizer.lr=1e-6,3e-6",
        "seed=1,2",
        "--max_running",
        "4",
        "--metric",
    ]
    monkeypatch.setattr("hpc_rl.cli.sweep._wait_for_change", kill)
    assert main([*command, "loss"]) == 130
    for number, one in enumerate((sweep := sweep_of(config)).load().trials):
        trial = sweep.trial(one.name)
        trial.attempt("7.0").make_dirs()
        row = {"step": 1, "loss": 4.0 - number, "lineage": 0}
        trial.attempt("7.0").metrics(0).write_text(json.dumps(row) + "\n")
        write_json(trial.done, {"job_id": "job-1"})
    capsys.readouterr()
    assert main(["sweep", "--report", "sums/small"]) == 0
    said = capsys.readouterr().out
    assert "sweep sums/small: 4 of 4 trials over; loss, lower is better" in said
    assert "best  actor.optimizer.lr=3e-6: mean 1.5 over 2; trial small-lr3e-6-seed2 with 1" in said
    assert main(["sweep", "--report", "small", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["best_trial"], told["groups"][0]["mean"]) == ("small-lr3e-6-seed2", 1.5)
    assert main(["sweep", "--report", "nope"]) == 64
    assert "Sweeps of yours: sums/small" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["seed=1"], "nothing varies"),
        (["seed=1,2", "--max_running", "0"], "max_running must be at least 1, got 0"),
        (["seed=1..1000000000000"], "the sweep has 1000000000000 trials; allowed are 1000"),
        (["seed=1..900", "total_train_steps=1..900", "gconfig.n_samples=1..900"], "has 729000000 trials"),
        (["seed=1,2", "total_train_steps=3,4,5", "--zip"], "seed has 2, total_train_steps has 3"),
        (["seed=1,2", "--list", "points"], "--list can't be combined with several values of seed"),
        (["--list", "nowhere"], "can't be read"),
        (["seed=1,-2"], "seed"),
    ],
)
def test_mistakes_are_refused_before_anything_is_written(words, said, config, scheduler, capsys):
    assert main(["sweep", str(config), *words]) == 64
    assert said in capsys.readouterr().err
    assert not scheduler.calls and not sweep_of(config).dir.exists()


def test_a_sweep_from_python(config, scheduler):
    points = {"actor.optimizer.lr": [1e-6, 3e-6], "seed": range(1, 3)}
    sweep = hpc_rl.sweep(str(config), points, max_running=3, stop_early=2, total_train_steps=5)
    names = [f"small-lr{rate}-seed{seed}" for rate in ("1e-06", "3e-06") for seed in (1, 2)]
    assert [one.name for one in sweep.trials] == names[:3] and sweep.advance() == 1
    assert load_object(sweep_of(config).trial(names[0]).config_json)["total_train_steps"] == 5
    for number, name in enumerate(names[:2], 1):
        write_json(sweep_of(config).trial(name).done, {"job_id": f"job-{number}"})
        scheduler.answers[f"job-{number}"] = State.DONE
    assert sweep.advance() == 0 and [one.name for one in sweep.trials] == names
    with pytest.raises(TimeoutError, match="2 trials of sweep sums/small are not over"):
        sweep.wait(timeout_s=0)
    sweep.cancel()
    assert scheduler.calls[4:] == [("nudge", "job-3"), ("nudge", "job-4")]
    for number, name in enumerate(names[2:], 3):
        write_json(sweep_of(config).trial(name).done, {"job_id": f"job-{number}"})
    report = sweep.wait(timeout_s=0)
    assert report.is_cancelled and [one.name for one in report.trials] == names
    assert [row["seed"] for row in sweep.records()] == ["1", "2", "1", "2"]
    assert "<table" in sweep._repr_html_()


def test_a_cancelled_sweep_of_python_is_over(config, scheduler):
    sweep = hpc_rl.sweep(str(config), [{"seed": 1}, {"seed": 2}, {"seed": 3}])
    sweep.cancel()
    write_json(sweep_of(config).trial("small-seed1").done, {"job_id": "job-1"})
    assert sweep.wait(timeout_s=0).num_over == 3 and sweep.done()
    assert [name for name, *_ in scheduler.calls] == ["submit", "nudge"]


@pytest.mark.parametrize(
    ("points", "options", "said"),
    [
        ({"seed": "12"}, {}, "seed needs a list of values in a sweep, got '12'"),
        ({"seed": 3}, {}, "seed needs a list of values"),
        ({"seed": []}, {}, "nothing varies"),
        ({"seed": [1, 2]}, {"max_running": 0}, "max_running must be at least 1"),
        ({"seed": [1, 2]}, {"stop_early": -1}, "stop_early must be a step"),
        ({"seed": [1, 1]}, {}, "are the same"),
        ({"seed": [1, 2]}, {"name": "a/b"}, "name of the sweep"),
    ],
)
def test_mistakes_in_python(points, options, said, config, scheduler):
    with pytest.raises(hpc_rl.HpcRlError, match=said):
        hpc_rl.sweep(str(config), points, **options)
    assert not scheduler.calls


def test_a_dry_run_lists_the_trials_of_a_list(config, scheduler, capsys):
    points = config.parent / "points"
    points.write_text("seed=1 actor.optimizer.lr=1e-6\nseed=2 actor.optimizer.lr=3e-6\n")
    assert main(["sweep", str(config), "--list", str(points), "--dry_run", "--name", "best"]) == 0
    said = capsys.readouterr().out
    assert "best-seed1-lr1e-6  seed=1 actor.optimizer.lr=1e-6" in said and "nothing was written" in said
    assert not scheduler.calls and State.RUNNING.alive
