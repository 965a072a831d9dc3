"""Resuming with another configuration: every option is safe or unsafe; unsafe changes are refused."""

import pytest

from hpc_rl.config.changes import (
    MEASURES,
    NEW_BATCHES,
    NOT_WITH_REPLAY,
    REPLAYS,
    SAFE,
    UNSAFE,
    Change,
    classify,
    list_changes,
    refuse_other_model,
    refuse_unsafe,
)
from hpc_rl.config.load.fields import find_section, list_options
from hpc_rl.config.load.load import load
from hpc_rl.config.options.experiment import CONFIGS
from hpc_rl.core.errors import ConfigError

GIVEN = [
    "experiment_name=e",
    "trial_name=t",
    "train_dataset.path=/d.jsonl",
    "train_dataset.batch_size=8",
    "actor.path=/m",
]
ALL = {name: hint for cls in CONFIGS.values() for name, hint in list_options(cls).items()}


def list_changes_between(*overrides: str, before: tuple[str, ...] = ()) -> list[str]:
    return [
        str(change)
        for change in list_changes(
            load([], [*GIVEN, *before]).config, load([], [*GIVEN, *before, *overrides]).config
        )
    ]


def test_every_option_is_classed_with_a_reason_where_it_is_unsafe():
    classes = {name: classify(name) for name, hint in ALL.items() if not find_section(hint)}
    assert [name for name, (safe, reason) in classes.items() if not (safe or reason)] == []


def test_the_tables_name_nothing_that_is_not_there():
    there = {name.replace("actor", "model", 1) if name.startswith("actor") else name for name in ALL}
    assert set(UNSAFE) | set(SAFE) <= there
    assert {*NEW_BATCHES, *REPLAYS, *NOT_WITH_REPLAY, *MEASURES} <= ALL.keys()
    with pytest.raises(KeyError):
        classify("no_such_section.option")


def test_what_is_equal_is_no_change():
    assert list_changes_between() == []


def test_safe_changes_say_what_they_leave_as_it_was():
    assert list_changes_between(
        "actor.optimizer.lr=1e-6", "rollout.reward_fn=contains", "--n_nodes", "2"
    ) == [
        "cluster.n_nodes: 1 -> 2  (safe)",
        "rollout.reward_fn: exact_match -> contains  (safe)",
        "actor.optimizer.lr: 2e-05 -> 1e-06  (safe)",
    ]


def test_a_section_that_comes_is_one_change():
    assert list_changes_between("ref.path=/r") == ["ref: null -> {path: /r, ...}  (safe)"]
    assert list_changes_between("ref.path=/other", before=("ref.path=/r",)) == [
        "ref.path: /r -> /other  (unsafe: the KL divergence would refer to another model)"
    ]


def test_a_critic_may_come_and_go_but_not_become_another_model():
    critic = ("critic.path=/c",)
    assert list_changes_between(*critic) == ["critic: null -> {path: /c, ...}  (safe)"]
    changed = "critic.path: /c -> /other  (unsafe: the trial's checkpoints hold the model that this option describes)"
    assert list_changes_between("critic.path=/other", before=critic) == [changed]
    options = ["critic.optimizer.lr=1e-6", "critic.warmup_steps=0"]
    assert all("(safe)" in one for one in list_changes_between(*options, before=critic))
    old, new = (load([], [*GIVEN, f"critic.path={path}"]).config for path in ("/c", "/other"))
    refuse_other_model(list_changes(old, new), "e/t", only_weights=True)  # its critic starts afresh
    with pytest.raises(ConfigError, match=r"critic\.path can't change from /c to /other in a fork of e/t"):
        refuse_other_model(list_changes(old, new), "e/t")


def test_unsafe_changes_are_refused_with_the_reason_and_what_to_do():
    old = load([], GIVEN).config
    new = load([], [*GIVEN, "train_dataset.batch_size=4", "actor.path=/other", "actor.optimizer.lr=1"]).config
    found = list_changes(old, new)
    assert [change.name for change in found if not change.safe] == ["train_dataset.batch_size", "actor.path"]
    with pytest.raises(ConfigError) as caught:
        refuse_unsafe(found, "e/t")
    assert str(caught.value).splitlines() == [
        "train_dataset.batch_size can't change from 8 to 4 in trial e/t: "
        "the position in the data and the batches on disk depend on it.",
        "actor.path can't change from /m to /other in trial e/t: the trial's checkpoints hold the model that this option describes.",
        "To resume e/t, use train_dataset.batch_size=8 actor.path=/m. For other values, "
        "`hpc-rl fork e/t NEW` begins a new trial with its checkpoint, `hpc-rl submit` one without it.",
    ]
    with pytest.raises(ConfigError, match=r"use trial_name=t\..*`hpc-rl fork e/t second` begins"):
        refuse_unsafe([Change("trial_name", "t", "second", False, "it identifies the trial")], "e/t")


def test_a_change_of_the_policy_or_of_what_is_generated_needs_new_batches():
    old = load([], GIVEN).config
    for words, needed in (
        (["actor.optimizer.lr=1e-6"], True),
        (["actor.eps_clip=0.3"], True),
        (["gconfig.n_samples=8"], True),
        (["gconfig.max_new_tokens=64"], True),
        (["rollout.reward_fn=contains"], True),
        (["actor.mb_spec.max_tokens_per_mb=4096", "actor.gradient_checkpointing=false"], False),
        (["total_train_steps=7", "saver.freq_steps=5", "rollout.request_retries=9"], False),
    ):
        assert (
            any(one.new_batches for one in list_changes(old, load([], [*GIVEN, *words]).config)) == needed
        ), words


def test_what_kept_groups_were_made_with_can_not_change():
    found = list_changes(load([], GIVEN).config, load([], [*GIVEN, "gconfig.n_samples=8"]).config)
    refuse_unsafe(found, "e/t")
    with pytest.raises(ConfigError, match=r"gconfig.n_samples can't change from \d to 8 .*--replay"):
        refuse_unsafe(found, "e/t", replay=True)


def test_nothing_unsafe_is_nothing_refused():
    refuse_unsafe(
        list_changes(load([], GIVEN).config, load([], [*GIVEN, "saver.freq_steps=5"]).config), "e/t"
    )


def test_another_trainer_is_another_trial():
    sft = [*(one for one in GIVEN if not one.startswith("actor")), "model.path=/m", "trainer=sft"]
    found = list_changes(load([], GIVEN).config, load([], sft).config)
    assert not next(change for change in found if change.name == "trainer").safe
