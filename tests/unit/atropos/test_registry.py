"""What environments learn of the queue, and their shares of a batch."""

import pytest

from hpc_rl.atropos.registry import SMALLEST_WEIGHT, RegisteredEnvironment, Registry


def registered(registry, name="conf", size=4, now_s=0.0, **settings):
    settings = {"max_token_length": 100, **settings}
    asked = RegisteredEnvironment(env_id=-1, desired_name=name, group_size=size, **settings)
    made = registry.register(asked)
    registry.note_seen(made.env_id, now_s)
    return made


def test_names_and_ids_are_unique():
    registry = Registry(16, 100)
    made = [registered(registry), registered(registry), registered(registry, "other")]
    assert [(one.env_id, one.name) for one in made] == [(0, "conf_0"), (1, "conf_1"), (2, "other_0")]
    registry.disconnect(1)
    assert registered(registry).env_id == 3  # an id is not used again


def test_weights_are_shares_of_the_capacity():
    registry = Registry(16, 100)
    registered(registry, weight=1.0), registered(registry, weight=3.0)
    assert registry.make_view(0, {}, 0.0, (0, 0)).env_weight == pytest.approx(0.25)
    assert registry.make_view(1, {}, 0.0, (0, 0)).env_weight == pytest.approx(0.75)


@pytest.mark.parametrize("settings", [{"weight": -1.0}, {"max_token_length": -3}])
def test_a_number_without_meaning_is_refused(settings):
    registry, [(name, value)] = Registry(16, 100), settings.items()
    with pytest.raises(ValueError, match=f"{name} must be at least 0, got {value}"):
        registered(registry, **settings)
    assert not registry.environments


def test_a_weight_of_nothing_does_no_harm():
    registry = Registry(16, 100)
    registered(registry, weight=0.0)
    assert registry.make_view(0, {}, 0.0, (0, 0)).env_weight == SMALLEST_WEIGHT
    registry.disconnect(0)
    assert registry.make_view(0, {}, 0.0, (0, 0)).max_group_size == 1  # a divisor


def test_an_unknown_environment_sees_a_full_queue():
    view = Registry(16, 100).make_view(5, {}, 0.0, (0, 0))
    assert view.queue_size > 1000 and view.max_group_size == 1


def test_sizes_count_groups_of_its_own_size():
    registry = Registry(16, 100)
    registered(registry, size=4), registered(registry, size=8)
    view = registry.make_view(0, {0: 12, 1: 16}, 0.0, (0, 0))
    assert (view.self_queue_size, view.queue_size) == (3, 7)
    assert registry.make_view(1, {0: 12, 1: 16}, 0.0, (0, 0)).queue_size == 3


def test_an_allocation_is_in_whole_groups_and_counts_for_its_owner_only():
    registry = Registry(32, 100)
    registered(registry, size=8, min_batch_allocation=0.6), registered(registry, size=4)
    assert registry.allocate(0.0) == {0: 16}  # 19 sequences hold two groups of 8
    assert registry.make_view(1, {0: 16}, 0.0, (0, 0)).queue_size == 0
    assert registry.make_view(1, {0: 24}, 0.0, (0, 0)).queue_size == 2
    assert registry.make_view(1, {}, 0.0, (0, 0)).unallocated_fraction == pytest.approx(0.5)


def test_allocations_above_the_whole_are_scaled_down():
    registry = Registry(32, 100)
    registered(registry, min_batch_allocation=1.0), registered(registry, min_batch_allocation=1.0)
    assert registry.allocate(0.0) == {0: 16, 1: 16}
    assert registry.make_view(0, {}, 0.0, (0, 0)).unallocated_fraction == 0


def test_a_silent_environment_has_no_claim():
    registry = Registry(32, 100, silent_s=60)
    registered(registry, min_batch_allocation=0.5)
    assert registry.allocate(59.0) == {0: 16}
    assert registry.allocate(61.0) == {}
    registry.note_seen(0, 61.0)
    assert registry.allocate(61.0) == {0: 16}
    assert registry.disconnect(0) and not registry.disconnect(0) and not registry.disconnect(-1)
    assert registry.allocate(61.0) == {}


def test_a_group_that_no_batch_can_hold_is_refused():
    with pytest.raises(ValueError, match="group_size is 64, but a batch has 32"):
        registered(Registry(32, 100), size=64)
    with pytest.raises(ValueError, match="groups of 5 never add up to"):
        registered(Registry(32, 100), size=5)
    registry = Registry(32, 100)
    registered(registry, size=16)
    with pytest.raises(ValueError, match="groups of 5 and 16 never add up to"):
        registered(registry, size=5)  # 2 * 16 make a batch, but none with a group of 5
    own = Registry(32, 100).register(RegisteredEnvironment(-1, "x", 5), own_group_size=9)  # 5 + 3 * 9
    assert own.env_id == 0
    with pytest.raises(ValueError, match="from 0 to 1"):
        registered(Registry(32, 100), min_batch_allocation=1.5)


def test_only_environments_that_live_decide_what_adds_up():
    registry = Registry(12, 100, silent_s=60)
    registered(registry, size=3)
    with pytest.raises(ValueError, match="groups of 9 never add up to"):
        registry.register(RegisteredEnvironment(-1, "x", 9), now_s=100.0)  # the other is silent
    assert registry.register(RegisteredEnvironment(-1, "x", 9), now_s=10.0).env_id == 1


def test_groups_that_shares_leave_no_room_for_are_refused():
    registry = Registry(12, 100)
    registered(registry, size=4, min_batch_allocation=0.5)  # 4 of 12; the other 8 are two groups of 4
    with pytest.raises(
        ValueError, match=r"reserves 4 of the 12 .* of 4 and 6 fill the other 8 exactly if one of them has 6"
    ):
        registered(registry, size=6)
    registered(registry, size=2)
    registered(registry, size=6)  # 4, 6 and 2
    with pytest.raises(ValueError, match="reserves 10 of the 12 sequences"):
        registered(registry, size=6, min_batch_allocation=0.5)  # leaves 2 for the other groups of 6


def test_one_that_left_is_not_connected_again_by_a_poll():
    registry = Registry(16, 100)
    registered(registry)
    assert registry.disconnect(0)
    registry.note_seen(0, 1.0)
    assert not registry.environments[0].connected and registry.list_alive(1.0) == []
    assert not registry.disconnect(0)


def test_environments_end_once_the_last_batch_is_cut():
    """The rule of atroposlib: steps done and batches in the queue are more than the trainer's steps."""
    registry = Registry(16, 10)
    registered(registry, size=4)

    def ends(waiting, step, newest):
        queue_size = registry.make_view(0, {0: waiting}, 0.0, (step, newest)).queue_size
        return step + queue_size * 4 // 16 > 10

    assert not ends(1000, 8, 9)  # what waits may still be rejected as too old
    assert not ends(1000, 9, 9) and not ends(0, 9, 9)
    assert ends(0, 9, 10) and ends(1000, 9, 10) and ends(0, 10, 10)
