"""Notes about sampling options and learning rates that do not suit the loss."""

import pytest

from hpc_rl.config.load.load import load
from hpc_rl.config.rules.check import RulesRefuse, check

BASE = ["experiment_name=e", "trial_name=t", "train_dataset.path=/d", "actor.path=/m"]
SGLANG = [*BASE, "allocation_mode=sglang:d4+fsdp:d4", "train_dataset.batch_size=64"]


def collect_warnings(*options: str, base=SGLANG) -> list[str]:
    notes = check(load([], [*base, *options]), files=False).notes
    return [note for note in map(str, notes) if note.startswith("WARNING")]


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("gconfig.top_p=0.7", "sampled from a part of the distribution"),
        ("gconfig.top_k=20", "sampled from a part of the distribution"),
        ("gconfig.min_p=0.1", "sampled from a part of the distribution"),
        ("gconfig.repetition_penalty=1.2", "sglang servers return log-probabilities with the penalty"),
        ("gconfig.frequency_penalty=0.5", "sglang servers return log-probabilities with the penalty"),
    ],
)
def test_sampling_that_the_loss_can_not_follow(option, words):
    (note,) = collect_warnings(option)
    name, _, value = option.partition("=")
    assert f"{name} {value}: " in note and words in note
    held_out = option.replace("gconfig", "eval_gconfig")
    assert collect_warnings(held_out, "valid_dataset.path=/d") == []


def test_temperature_and_neutral_values_need_no_warning():
    assert (
        collect_warnings("gconfig.temperature=0.7", "gconfig.top_p=1", "gconfig.repetition_penalty=1.0") == []
    )


def test_an_implausible_learning_rate():
    assert collect_warnings("actor.optimizer.lr=1e-3") == []
    (note,) = collect_warnings("actor.optimizer.lr=0.1")
    assert "actor.optimizer.lr 0.1 is very high" in note
    with pytest.raises(RulesRefuse, match=r"actor\.optimizer\.lr 10: .* use less than 1"):
        collect_warnings("actor.optimizer.lr=10")


@pytest.mark.parametrize(
    ("option", "hint"),
    [
        ("actor.path=$HOME/model", "write ${oc.env:HOME} for $HOME"),
        ("cluster.fileroot=/scratch/$USER", "write ${oc.env:USER} for $USER"),
        ("train_dataset.path=\\${SCRATCH}/d.jsonl", "write ${oc.env:SCRATCH} for ${SCRATCH}"),
        ("stats_logger.tensorboard.path=$WORK/tb", "write ${oc.env:WORK} for $WORK"),
        ("launcher.snapshot=[$HOME/code]", "write ${oc.env:HOME} for $HOME"),
        ("actor.path=${HOME}/model", "for an environment variable, write ${oc.env:HOME}"),
    ],
)
def test_variables_of_a_shell_are_refused_in_every_path(option, hint):
    with pytest.raises(ValueError) as error:
        load([], [*BASE, option])
    assert option.partition("=")[0] in str(error.value) and hint in str(error.value)


def test_references_to_the_environment_are_resolved(monkeypatch):
    monkeypatch.setenv("MY_SCRATCH", "/scratch/me")
    loaded = load([], [*BASE, "cluster.fileroot=${oc.env:MY_SCRATCH}/runs", "cluster.local_dir=$TMPDIR"])
    assert loaded.config.cluster.fileroot == "/scratch/me/runs"
    assert loaded.config.cluster.local_dir == "$TMPDIR", "it is the node's variable"
    assert load([], [*BASE[:3], "actor.path=/data/50$/model"]).config.actor.path == "/data/50$/model"
