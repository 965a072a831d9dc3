from hypothesis import given
from hypothesis import strategies as st

from hpc_rl.config.options.operations import FrequencyConfig
from hpc_rl.trainers.run import Timer


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_each_counter_starts_again_only_when_it_was_due_itself():
    clock = Clock()
    timer = Timer(FrequencyConfig(freq_steps=3, freq_secs=10), clock)
    fired = []
    for step in range(1, 10):
        clock.now += 4.0
        if timer.check():
            fired.append(step)
    # by steps: 3, 6, 9. By seconds: at 12 s (step 3), then 12 s later (6, 9).
    assert fired == [3, 6, 9]
    timer = Timer(FrequencyConfig(freq_steps=4, freq_secs=10), clock)
    fired = []
    for step in range(1, 10):
        clock.now += 4.0
        if timer.check():
            fired.append(step)
    assert fired == [3, 4, 6, 8, 9]


def test_epochs():
    timer = Timer(FrequencyConfig(freq_epochs=2))
    assert [timer.check(epochs=ended) for ended in (0, 1, 0, 1, 1, 1)] == [
        False,
        False,
        False,
        True,
        False,
        True,
    ]


def test_nothing_set_never_fires():
    timer = Timer(FrequencyConfig())
    assert not any(timer.check(epochs=1) for _ in range(100))


@given(st.lists(st.integers(0, 2), max_size=30), st.integers(0, 30), st.integers(1, 5), st.integers(1, 5))
def test_a_restored_timer_goes_on_as_if_nothing_had_happened(epochs, cut, freq_steps, freq_epochs):
    frequency = FrequencyConfig(freq_steps=freq_steps, freq_epochs=freq_epochs)
    whole = Timer(frequency)
    expected = [whole.check(ended) for ended in epochs]
    first = Timer(frequency)
    found = [first.check(ended) for ended in epochs[:cut]]
    second = Timer(frequency)
    second.restore(first.state())
    assert found + [second.check(ended) for ended in epochs[cut:]] == expected


def test_pauses_do_not_count_and_frequencies_are_those_in_force():
    clock = Clock()
    timer = Timer(FrequencyConfig(freq_secs=60), clock)
    clock.now += 50
    state = timer.state()
    assert "freq" not in str(state)
    clock.now += 10_000
    timer = Timer(FrequencyConfig(freq_secs=100), clock)
    timer.restore(state)
    assert not timer.check()
    clock.now += 49
    assert not timer.check()
    clock.now += 1
    assert timer.check()
