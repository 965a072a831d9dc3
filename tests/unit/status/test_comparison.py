"""The sentence that compares trials."""

from types import SimpleNamespace

from hpc_rl.stats.read import History
from hpc_rl.status.comparison import group_by_seed, make_headline


def make(name: str, rewards: dict[int, float] | None = None, steps: dict[int, float] | None = None, **config):
    """Return a report with held-out rewards and training rewards by step."""
    history = History(
        steps=[{"step": step, "reward": value} for step, value in (steps or {}).items()],
        evaluations=[{"step": step, "eval_reward": value} for step, value in (rewards or {}).items()],
    )
    return SimpleNamespace(name=name, history=history, config={"trial_name": name, "seed": 1, **config})


def test_the_best_is_compared_at_the_last_shared_evaluation():
    first, second = make("first", {20: 0.1, 60: 0.5}), make("second", {60: 0.56, 80: 0.9}, lr=2)
    assert make_headline([first, second]) == "held-out reward: second is +0.06 over first at step 60"
    third = make("third", {60: 0.46}, lr=3)
    said = "second is +0.06 over first, +0.1 over third at step 60"
    assert make_headline([first, second, third]) == f"held-out reward: {said}"


def test_seeds_are_averaged_and_give_the_error():
    plain = [make(f"plain-seed{seed}", {60: 0.5 + seed / 100}, seed=seed) for seed in (0, 1, 2)]
    mixed = [make(f"mixed-seed{seed}", {60: 0.57 + seed / 100}, seed=seed, lr=2) for seed in (0, 1, 2)]
    said = make_headline([*plain, *mixed])
    # deviations of 0.01 over 3 seeds on both sides
    assert said == "held-out reward: mixed is +0.07 over plain (standard error 0.0082) at step 60, 3 seeds"
    assert make_headline([*plain, mixed[1]]).endswith("at step 60, 3, 1 seeds")


def test_trials_that_differ_in_their_seed_alone_are_not_compared():
    trials = [make(f"t{seed}", {60: 0.5}, seed=seed) for seed in (0, 1)]
    assert list(group_by_seed(trials)) == ["t"] and make_headline(trials) == ""
    assert make_headline(trials[:1]) == ""


def test_an_option_that_is_empty_is_no_difference():
    assert make_headline([make("a", {1: 0.5}, notes=None), make("b", {1: 0.5})]) == ""


def test_without_evaluations_the_newest_steps_of_training_are_compared():
    first = make("first", steps=dict.fromkeys(range(1, 31), 0.1))
    second = make("second", steps={step: step / 100 for step in range(1, 21)}, lr=2)
    assert make_headline([first, second]) == "mean reward of 10 steps: second is +0.055 over first at step 20"
    assert make_headline([make("first"), make("second", lr=2)]) == ""


def test_less_loss_is_better():
    first, second = make("first"), make("second", lr=2)
    for one, loss in ((first, 2.0), (second, 1.5)):
        one.history = History(steps=[{"step": 5, "loss": loss, "eval_loss": loss}])
    assert make_headline([first, second]) == "held-out loss: second is -0.5 under first at step 5"


def test_groups_keep_names_that_tell_them_apart():
    names = {1: ("x-a", "x-b"), 2: ("x-c", "x-d"), 3: ("y-seed1", "y-seed2"), 4: ("z",)}
    trials = [make(name, {1: 0.5}, lr=lr, seed=seed) for lr in (3, 4) for seed, name in enumerate(names[lr])]
    assert list(group_by_seed(trials)) == ["y", "z"]
    trials += [make(name, {1: 0.5}, lr=lr, seed=seed) for lr in (1, 2) for seed, name in enumerate(names[lr])]
    assert list(group_by_seed(trials)) == ["y-seed1", "z", "x-a", "x-c"]
