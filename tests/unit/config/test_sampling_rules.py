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
        ("gconfig.top_p=0.7", "servers sample from a part of the distribution"),
        ("gconfig.top_k=20", "servers sample from a part of the distribution"),
        ("gconfig.min_p=0.1", "servers sample from a part of the distribution"),
        ("gconfig.repetition_penalty=1.2", "sglang servers return log-probabilities with the penalty"),
        ("gconfig.frequency_penalty=0.5", "sglang servers return log-probabilities with the penalty"),
        ("gconfig.min_new_tokens=4", "leave the end-of-sequence token out"),
    ],
)
def test_sampling_that_the_loss_can_not_follow(option, words):
    (note,) = collect_warnings(option)
    name, _, value = option.partition("=")
    assert f"{name} {value}: " in note and words in note
    held_out = option.replace("gconfig", "eval_gconfig")
    assert collect_warnings(held_out, "valid_dataset.path=/d") == []


REFUSED = {  # backend -> the options that it lacks
    "embedded": ("min_p", "repetition_penalty", "frequency_penalty"),
    "sglang": (),
    "vllm": ("top_p", "top_k", "min_p"),
}
VALUES = {"top_p": 0.9, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.1, "frequency_penalty": 0.5}
VALUES |= {"min_new_tokens": 4}


@pytest.mark.parametrize("backend", REFUSED)
@pytest.mark.parametrize("name", VALUES)
def test_each_backend_reproduces_refuses_or_explains_a_sampling_option(backend, name):
    base = [*BASE, f"allocation_mode={backend}:d4+fsdp:d4", "train_dataset.batch_size=64"]
    base += ["cluster.n_gpus_per_node=0"] if backend == "embedded" else []
    options = ["gconfig.temperature=0.7", f"gconfig.{name}={VALUES[name]}"]
    if name in REFUSED[backend]:
        with pytest.raises(RulesRefuse, match=rf"gconfig\.{name} .*can't be used with {backend} servers"):
            collect_warnings(*options, base=base)
    else:
        (note,) = collect_warnings(*options, base=base)
        assert f"gconfig.{name} {VALUES[name]}: " in note
        if name in ("repetition_penalty", "frequency_penalty", "min_new_tokens"):
            assert f"{backend} servers" in note and "log-probabilities" in note


def test_a_teachers_samples_may_be_drawn_in_any_way():
    words = ["actor.algorithm=sft_distill", "distillation.pool=teacher", "pools.teacher.url=http://h/v1"]
    assert not any("top_p" in one for one in collect_warnings("gconfig.top_p=0.9", *words))


def test_a_presence_penalty_is_unknown():
    with pytest.raises(ValueError, match=r"gconfig\.presence_penalty.*use gconfig\.frequency_penalty"):
        load([], [*SGLANG, "gconfig.presence_penalty=0.5"])


def test_temperature_and_neutral_values_need_no_warning():
    assert (
        collect_warnings("gconfig.temperature=0.7", "gconfig.top_p=1", "gconfig.repetition_penalty=1.0") == []
    )


def test_an_implausible_learning_rate():
    assert collect_warnings("actor.optimizer.lr=1e-3") == []
    (note,) = collect_warnings("actor.optimizer.lr=0.1")
    assert "actor.optimizer.lr 0.1 is very high" in note
    with pytest.raises(RulesRefuse, match=r"actor\.optimizer\.lr 10 .* use less than 1"):
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
