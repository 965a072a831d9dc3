"""The history of published weights by commands: list, export, fork, status and du."""

import json
import os
import shutil
import threading

import pytest
from patience import extend
from safetensors import safe_open
from version_history import as_bytes, make_history, read_model

from hpc_rl.checkpoint import generation
from hpc_rl.cli.__main__ import main
from hpc_rl.config.load.stored import from_dict
from hpc_rl.core.trial import Trial, load_json, load_object, write_json
from hpc_rl.core.types import WeightVersion
from hpc_rl.schedulers.base import State
from hpc_rl.status.formatting import format_size
from hpc_rl.trials import conversion, published_weights, trial_index
from hpc_rl.trials.first_start import FirstStart
from hpc_rl.weight_files import model_copy
from hpc_rl.weights.disk import History

pytestmark = pytest.mark.usefixtures("state_home")


@pytest.fixture
def trial(fake_trial, make_generation) -> Trial:
    """exp/t1 with checkpoints 3 and 6 and no published weights."""
    for step in (3, 6):
        make_generation(fake_trial.trial, step)
    return fake_trial.trial


@pytest.fixture
def published(trial):
    """The weights of versions 0.1 to 0.12, and after a recover from step 6 of 1.6 to 1.9."""
    weights, _ = make_history(trial.weights, 7, 12)
    later, _ = make_history(trial.weights, 8, 4, lineage=1, first=6)
    point_to(trial, "1.9")
    return weights | later


def point_to(trial: Trial, label: str) -> None:
    version = WeightVersion.parse(label)
    record = {"label": label, "lineage": version.lineage, "step": version.step}
    write_json(trial.current_weights, record | {"path": str(trial.published(label))})


def run(*argv: object) -> int:
    return main([str(arg) for arg in argv])


def export(trial: Trial, *more: object) -> int:
    return run("checkpoint", "export", trial.dir, *more)


def test_the_list_shows_the_steps_that_can_be_exported(trial, published, capsys):
    assert run("checkpoint", "list", trial.dir) == 0
    *_, last = capsys.readouterr().out.splitlines()
    size = sum(index.stored_bytes for index in published_weights.list_versions(trial))
    assert last == f"weights of steps 1-12 can be exported; {format_size(size)}"
    assert run("checkpoint", "list", trial.dir, "--json") == 0
    rows = json.loads(capsys.readouterr().out)["weights"]
    assert [row["label"] for row in rows] == [str(version) for version in sorted(published)]
    assert rows[-1]["lineage"] == 1 and rows[-1]["step"] == 9 and sum(row["bytes"] for row in rows) == size


def test_the_list_leaves_out_what_cannot_be_rebuilt(trial, published, capsys):
    (trial.published("0.1") / "index.json").unlink()
    shutil.rmtree(trial.published("1.6"))
    starts = [step for step in range(2, 13) if (trial.published(f"0.{step}") / "model").is_dir()]
    first = min(starts, default=None)
    assert run("checkpoint", "list", trial.dir, "--json") == 0
    rows = json.loads(capsys.readouterr().out)["weights"]
    assert [row["step"] for row in rows if row["lineage"] == 0] == ([*range(first, 13)] if first else [])


def test_a_step_without_a_checkpoint_is_rebuilt_byte_for_byte(trial, published, tmp_path, capsys):
    for version, weights in published.items():
        there = tmp_path / f"model-{version}"
        assert export(trial, "--version", version, "--to", there) == 0
        said = capsys.readouterr().out.splitlines()
        assert said[0] == f"weights {version} of exp/t1: written to {there}"
        assert read_model(there) == as_bytes(weights)
        record = {"step": version.step, "version": str(version), "trial": "exp/t1"}
        assert load_json(there / "hpc_rl.json") == record
        with safe_open(there / "model.safetensors", framework="pt") as file:
            assert file.metadata() == {"format": "pt"}
    assert not [name for name in os.listdir(trial.weights) if name.startswith(".")]


def test_the_newest_lineage_of_a_step_is_the_default(trial, published, tmp_path, capsys):
    assert export(trial, "--step", 8, "--json") == 0
    value = json.loads(capsys.readouterr().out)
    there = trial.exports / "weights-1.8"
    wanted = {"trial": "exp/t1", "step": 8, "version": "1.8", "path": str(there)}
    assert wanted.items() <= value.items()
    assert read_model(there) == as_bytes(published[WeightVersion(1, 8)])
    assert export(trial, "--step", 11, "--to", tmp_path / "m") == 0
    assert read_model(tmp_path / "m") == as_bytes(published[WeightVersion(0, 11)])


def test_a_step_with_a_checkpoint_is_exported_from_it_unless_it_is_damaged(
    trial, published, tmp_path, capsys, monkeypatch
):
    asked = []
    monkeypatch.setattr(conversion, "convert", lambda *args: asked.append(args) or 0)
    assert export(trial, "--step", 6, "--to", tmp_path / "a") == 0
    assert asked[0][:3] == ("export", trial, 6)
    (trial.generation(6) / "state").write_text("STATE of 6")
    assert export(trial, "--step", 6, "--to", tmp_path / "b") == 0 and len(asked) == 2
    (trial.generation(6) / "state").unlink()
    assert export(trial, "--step", 6, "--to", tmp_path / "c") == 0 and len(asked) == 2
    assert read_model(tmp_path / "c") == as_bytes(published[WeightVersion(1, 6)])


@pytest.mark.parametrize(
    ("more", "code", "words"),
    [
        (["--step", "20"], 3, "has no checkpoint 20. Sound ones: 6, 3. Published weights can be exported of "
                              "steps 1-12 of lineage 0; 6-9 of lineage 1."),
        (["--version", "2.7"], 3, "weights 2.7 of exp/t1 can't be rebuilt. Published weights can be exported"),
        (["--version", "0.7", "--step", "7"], 2, "not allowed with"),
    ],
)  # fmt: skip
def test_a_refused_export_lists_what_can_be_exported(trial, published, tmp_path, capsys, more, code, words):
    before = sorted(os.listdir(tmp_path))
    assert export(trial, *more, "--to", tmp_path / "m") == code
    assert words in capsys.readouterr().err and sorted(os.listdir(tmp_path)) == before


def test_an_export_of_damage_names_the_file_and_leaves_nothing(trial, published, tmp_path, capsys):
    path = trial.published("0.1") / "rank-00000.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert export(trial, "--version", "0.3", "--to", tmp_path / "m") != 0
    assert "rank-00000.safetensors" in capsys.readouterr().err
    assert not (tmp_path / "m").exists() and not list(tmp_path.glob(".m*"))


def test_a_version_is_not_removed_while_it_is_exported(trial, published, tmp_path, monkeypatch):
    real, history, kept = model_copy.build_model, History(trial), []

    def build(target, folder, chain):
        removed = history.prune([])
        kept.extend(index.version for index in chain)
        assert removed and not {str(index.version) for index in chain} & {*removed}
        real(target, folder, chain)

    monkeypatch.setattr(model_copy, "build_model", build)
    assert export(trial, "--version", "0.5", "--to", tmp_path / "m") == 0
    assert read_model(tmp_path / "m") == as_bytes(published[WeightVersion(0, 5)])
    assert {str(version) for version in kept} <= {*history.prune([])}


def test_exports_during_publications_either_succeed_or_are_refused(trial, tmp_path, monkeypatch):
    """A trainer publishes and removes while a user exports: every finished export has its values."""
    monkeypatch.setattr(published_weights, "APPEAR_S", 0.5)
    weights, _ = make_history(trial.weights, 3, 30)
    staged = trial.dir / "staged"
    trial.weights.rename(staged)
    trial.weights.mkdir()
    history, ended, exported = History(trial), threading.Event(), threading.Event()

    def publish_all() -> None:
        for step in range(1, 31):
            (staged / f"0.{step}").rename(trial.published(f"0.{step}"))
            point_to(trial, f"0.{step}")
            history.prune([])
            if step == 10:  # on a busy machine all versions would be gone before the first export
                exported.wait(extend(20))
        ended.set()

    trainer = threading.Thread(target=publish_all)
    trainer.start()
    done, number = set(), 0
    while not ended.is_set() or number == 0:
        for index in published_weights.list_versions(trial):
            number += 1
            there = tmp_path / f"m{number}"
            if export(trial, "--version", index.version, "--to", there) == 0:
                assert read_model(there) == as_bytes(weights[index.version])
                done.add(index.version)
                exported.set()
    trainer.join()
    assert done


def test_status_and_du_show_the_history_if_it_is_kept(trial, published, capsys):
    config = load_object(trial.config_json)
    assert run("status", trial.dir, "--offline") == 0 and "history_gb" not in capsys.readouterr().out
    write_json(trial.config_json, config | {"weights": {"history_gb": 2.5}})
    assert run("status", trial.dir, "--offline") == 0
    assert "weights     0.0 MB of 2.5 GB (weights.history_gb)\n" in capsys.readouterr().out
    History(trial, 2.5e9).prune([])
    size = sum(index.stored_bytes for index in published_weights.list_versions(trial))
    line = f"{format_size(size)} of 2.5 GB (weights.history_gb); steps 1-12 can be exported"
    assert run("status", trial.dir, "--offline") == 0
    assert f"weights     {line}\n" in capsys.readouterr().out
    assert run("status", trial.dir, "--offline", "--json") == 0
    value = {"budget_gb": 2.5, "num_versions": 16, "bytes": size, "steps": [[1, 12]]}
    assert json.loads(capsys.readouterr().out)["weight_history"] == value
    assert run("du", trial.dir) == 0
    assert capsys.readouterr().out.endswith(f"published weights of exp/t1: {line}\n")
    assert run("du", trial.dir, "--json") == 0
    assert json.loads(capsys.readouterr().out)[0]["weight_history"] == value


@pytest.fixture
def parent(config, scheduler, capsys, make_generation) -> Trial:
    """sums/small with checkpoints 3 and 6, and published weights of steps 1 to 8; it still runs."""
    assert main(["submit", "--config", str(config)]) == 0
    scheduler.answers["job-1"] = State.RUNNING
    trial = trial_index.resolve("small")
    for step in (3, 6):
        make_generation(trial, step)
    make_history(trial.weights, 4, 8)
    model = config.parent / "model"
    for folder in trial.weights.glob("*/model"):  # as the trainer publishes it
        shutil.rmtree(folder)
        shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    capsys.readouterr()
    return trial


def test_a_fork_of_published_weights_begins_with_them(parent, config, scheduler, capsys):
    assert main(["fork", "small@7", "other", "seed=7", "--dry_run"]) == 0
    said = capsys.readouterr().out
    afresh = "fork       of sums/small with weights 0.7: training begins at step 0, and the optimizer starts afresh"
    assert said.startswith(f"{afresh}\nchanged    seed: ") and not parent.dir.with_name("other").exists()
    assert main(["fork", "small@7", "other", "seed=7"]) == 0
    assert capsys.readouterr().out.startswith(afresh)
    fork = trial_index.resolve("other")
    folder = fork.exports / "initial"
    options = load_object(fork.config_json)
    assert (options["actor"]["path"], options["seed"]) == (str(folder), 7)
    assert load_json(folder / "hpc_rl.json") == {"step": 7, "version": "0.7", "trial": "sums/small"}
    assert scheduler.calls[-1] == ("submit", "job-2")
    chosen = published_weights.choose_version(parent, "0.7")
    (config.parent / "m").mkdir()
    published_weights.write_export(parent, chosen, config.parent / "m")
    assert read_model(folder) == read_model(config.parent / "m")
    assert sorted(os.listdir(fork.exports)) == ["initial"] and not generation.scan(fork)
    assert main(["status", "other", "--offline"]) == 0
    assert "forked from sums/small, weights 0.7" in capsys.readouterr().out
    assert FirstStart(fork, from_dict(options)).decision.action == "fresh"


def test_a_step_with_a_checkpoint_is_forked_from_it(parent, capsys):
    assert main(["fork", "small@6", "other"]) == 0
    assert "fork       of sums/small at checkpoint 6" in capsys.readouterr().out
    assert generation.scan(trial_index.resolve("other"))[0].step == 6


def test_every_option_with_the_path_of_the_model_follows(parent, config, capsys):
    path = parent.config_yaml
    path.write_text(path.read_text() + f"sglang: {{model_path: {config.parent / 'model'}}}\n")
    assert main(["fork", "small@7", "other"]) == 0
    options = load_object(trial_index.resolve("other").config_json)
    assert options["sglang"]["model_path"] == options["actor"]["path"]


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (["small@9", "x"], 3, "has no sound checkpoint 9. Allowed: 6, 3. Published weights can be forked by "
                              "@STEP: 1-8."),
        (["small@7", "x", "--from", "6"], 64, "names two steps"),
        (["small@7", "x", "actor.path=/y"], 64, "actor.path"),
        (["small@7", "x", "recover.mode=resume"], 64, "recover.mode resume needs a checkpoint"),
        (["smal@7", "x"], 64, "there is no trial 'smal'. Did you mean small"),
    ],
)  # fmt: skip
def test_a_refused_fork_leaves_nothing(parent, scheduler, capsys, argv, code, words):
    assert main(["fork", *argv]) == code
    assert words in capsys.readouterr().err
    assert len(scheduler.calls) == 1 and not parent.dir.with_name("x").exists()


def test_a_fork_of_damaged_weights_leaves_nothing(parent, scheduler, capsys):
    for path in parent.weights.glob("*/rank-*"):
        path.write_bytes(path.read_bytes()[:-1])
    assert main(["fork", "small@7", "x"]) != 0
    assert "rank-" in capsys.readouterr().err
    assert len(scheduler.calls) == 1 and not parent.dir.with_name("x").exists()
    assert not [name for name in os.listdir(parent.weights) if name.startswith(".")]


def test_a_fork_that_was_not_submitted_says_how_to_submit_it(parent, scheduler, capsys):
    scheduler.refuses = "sbatch: no"
    assert main(["fork", "small@7", "x"]) != 0
    scheduler.refuses = ""
    capsys.readouterr()
    assert main(["fork", "small@7", "x"]) == 75
    config = parent.dir.with_name("x") / "config.yaml"
    assert f"submit it with `hpc-rl submit {config}`" in capsys.readouterr().err
    assert main(["submit", str(config)]) == 0


def test_a_trial_whose_name_has_an_at_sign_is_found_first(parent, config, capsys):
    assert main(["submit", "--config", str(config), "trial_name=small@7"]) == 0
    assert main(["fork", "small@7", "x"]) == 3
    assert "sums/small@7 has no sound checkpoint" in capsys.readouterr().err
