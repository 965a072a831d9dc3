"""What both implementations of NameResolve promise."""

import threading
import time

import pytest

from hpc_rl.errors import ConfigError, Stale
from hpc_rl.name_resolve.memory import MemoryNames
from hpc_rl.name_resolve.shared_fs import SharedFsNames


class Clock:
    """A reader's clock that a test moves."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture(params=["shared_fs", "memory"])
def names(request, tmp_path, clock):
    return MemoryNames(clock) if request.param == "memory" else SharedFsNames(tmp_path / "names", clock)


def test_records(names):
    assert names.get("a/b") is None
    names.add("a/b", {"x": 1})
    with pytest.raises(FileExistsError, match="a/b"):
        names.add("a/b", {"x": 2})
    assert names.get("a/b") == {"x": 1}
    names.add("a/b", {"x": 3}, replace=True)
    assert names.get("a/b") == {"x": 3}
    names.delete("a/b")
    names.delete("a/b")
    assert names.get("a/b") is None


def test_a_record_and_a_prefix_may_have_the_same_name(names):
    for number, key in enumerate(["a", "a/b", "a/b/c", "ab", "b"]):
        names.add(key, {"n": number})
    assert list(names.list("a")) == ["a", "a/b", "a/b/c"]
    assert list(names.list("a/b")) == ["a/b", "a/b/c"]
    assert list(names.list("")) == ["a", "a/b", "a/b/c", "ab", "b"]
    assert names.list("nothing/here") == {}


@pytest.mark.parametrize(
    "key", ["", "/a", "a//b", "a/../b", "..", ".hidden", "a b", "a.json", "a.epoch-1", "ä", "a/" + "x" * 129]
)
def test_keys_that_are_no_safe_file_names_are_refused(names, key):
    with pytest.raises(ConfigError):
        names.add(key, {})
    with pytest.raises(ConfigError):
        names.lease(key, {}, 1.0)


def test_wait_gives_what_comes_or_names_what_did_not(names):
    threading.Timer(0.1, lambda: names.add("late/one", {"ok": True})).start()
    assert names.wait("late/one", 5.0) == {"ok": True}
    with pytest.raises(TimeoutError, match="never/comes"):
        names.wait("never/comes", 0.1)


def test_watch_yields_each_change_until_it_is_quiet(names):
    names.add("w/1", {})
    threading.Timer(0.15, lambda: names.add("w/2", {})).start()
    start = time.monotonic()
    assert [sorted(seen) for seen in names.watch("w", 0.6)] == [["w/1"], ["w/1", "w/2"]]
    assert time.monotonic() - start < 3


def test_a_lease_lives_while_its_counter_moves_by_the_readers_clock(names, clock):
    lease = names.lease("server/0", {"url": "u"}, 5.0)
    assert names.leases("server")["server/0"].alive
    clock.now += 4
    lease.renew()
    seen = names.leases("server")["server/0"]
    assert (seen.alive, seen.value, seen.age_s) == (True, {"url": "u"}, 0)
    clock.now += 6
    seen = names.leases("server")["server/0"]
    assert (seen.alive, seen.age_s) == (False, 6)
    lease.renew({"url": "v"})
    seen = names.leases("server")["server/0"]
    assert (seen.alive, seen.value) == (True, {"url": "v"})


def test_the_higher_epoch_wins_and_the_lower_one_is_told(names):
    old = names.lease("rollout/0", {"who": "old"}, 5.0)
    new = names.lease("rollout/0", {"who": "new"}, 5.0)
    assert new.epoch > old.epoch
    with pytest.raises(Stale, match="rollout/0"):
        old.renew({"who": "old again"})
    old.release()  # has no effect on the new owner
    assert names.leases("")["rollout/0"].value == {"who": "new"}
    new.renew()


def test_a_released_lease_is_gone_and_its_epoch_is_not_given_again(names):
    lease = names.lease("owner", {}, 5.0)
    lease.release()
    lease.release()
    assert names.leases("owner") == {}
    with pytest.raises(Stale):
        lease.renew()
    assert names.lease("owner", {}, 5.0).epoch == lease.epoch + 1


def test_leases_and_records_do_not_mix(names):
    names.lease("server/0", {}, 5.0)
    names.lease("server/10", {}, 5.0)
    names.add("server/1", {})
    assert list(names.list("server")) == ["server/1"]
    assert list(names.leases("server")) == ["server/0", "server/10"]
    assert list(names.leases("server/1")) == []


def test_of_64_adders_one_wins(names):
    barrier, won = threading.Barrier(64), []

    def add(number: int) -> None:
        barrier.wait()
        try:
            names.add("race", {"n": number})
            won.append(number)
        except FileExistsError:
            pass

    threads = [threading.Thread(target=add, args=(n,)) for n in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert names.get("race") == {"n": won[0]}


def test_of_many_takers_each_has_an_epoch_of_its_own_and_only_the_last_can_renew(names):
    barrier, taken = threading.Barrier(16), []

    def take() -> None:
        barrier.wait()
        taken.append(names.lease("owner", {}, 5.0))

    threads = [threading.Thread(target=take) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    epochs = [lease.epoch for lease in taken]
    assert len(set(epochs)) == 16
    alive = []
    for lease in taken:
        try:
            lease.renew()
            alive.append(lease.epoch)
        except Stale:
            pass
    assert alive == [max(epochs)]
