"""The roster of a pool: its leases in one record, so that a poll costs one open and one read.

The registrar is a part of the trial's supervisor. It reads the leases of all pools. It writes the roster of a
pool after a change (a key, an epoch, a value, a death), and as a heartbeat. The roster is a cache and decides
nothing. A reader uses it while its counter moves, by the reader's own clock, and otherwise reads the leases.

Load: a poll of the registrar lists each pool, which shows the heartbeats, and reads at most READS_PER_POLL
leases in POLL_S: new epochs, then changed ones, then leases that may be dead. So while nothing changes, the
number of servers does not matter to the file system. Listing and judging take processor time for each lease,
so beyond JUDGED_PER_S * POLL_S leases the polls are rarer, and each of them reads more.
"""

import json
import logging
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hpc_rl.name_resolve.shared_fs import HEARTBEATS_PER_TTL, LeaseMark, LeaseView, NameResolve

logger = logging.getLogger(__name__)

POLL_S = 0.5  # of the registrar
READS_PER_POLL = 128
JUDGED_PER_S = 4000.0  # leases that the registrar lists and judges
RECHECK_S = 10.0  # between two readings of a lease that may be dead, or that could not be read
MISSED_BEATS = 2  # after which a lease may be dead, or its listing does not show its renewals
HEARTBEAT_S = 2.0
STUCK_S = 3 * HEARTBEAT_S  # without a new counter; then the registrar is dead or slow
READS_PER_S = 32.0  # of leases, by a reader without a roster: with many servers each is read less often


def compute_poll_s(num_leases: int) -> float:
    """Return the time between two polls of the registrar, in seconds; at most HEARTBEAT_S."""
    return min(max(POLL_S, num_leases / JUDGED_PER_S), HEARTBEAT_S)


@dataclass(frozen=True)
class _Reading:
    """The last reading of a lease."""

    content: tuple[int, int, int]  # of its mark
    read_at: float
    view: LeaseView | None  # None: released or unreadable


@dataclass
class _Pool:
    """The leases below one prefix as the registrar knows them, and the roster as it was written."""

    marks: dict[str, LeaseMark] = field(default_factory=dict)  # of the newest listing
    readings: dict[str, _Reading] = field(default_factory=dict)
    written: dict[str, tuple[int, bool, dict[str, Any]]] | None = None
    written_at: float = -math.inf
    counter: int = 0
    views: dict[str, LeaseView] = field(default_factory=dict)  # of the readings, in the order of the marks


class Registrar:
    """Reads all leases below some prefixes and writes their rosters.

    `term` orders the registrars of a trial: the epoch of the supervisor's own lease.
    """

    def __init__(self, names: NameResolve, prefixes: Sequence[str], term: int) -> None:
        self._names, self._term = names, term
        self._pools = {prefix: _Pool() for prefix in prefixes}
        self._is_failing = False  # the last write failed
        self._polled_at = math.inf

    def poll(self) -> dict[str, dict[str, LeaseView]]:
        """Read the most urgent leases, write the rosters that are due, and return the known leases.

        Raises OSError if a lease can't be read; a roster that can't be written costs a log line.
        """
        for prefix, pool in self._pools.items():
            pool.marks = self._names.list_epochs(prefix)
            readings = {key: one for key, one in pool.readings.items() if key in pool.marks}
            pool.readings = {key: self._judge(one, pool.marks[key]) for key, one in readings.items()}
        for pool, key in self._choose_leases():
            mark = pool.marks[key]
            view = self._names.load_lease(key, mark)
            pool.readings[key] = _Reading(mark.content, self._names.clock(), view)
        for prefix, pool in self._pools.items():
            known = ((key, pool.readings.get(key)) for key in pool.marks)
            pool.views = {key: one.view for key, one in known if one is not None and one.view is not None}
            # readers drop absent servers: the first roster waits until every lease was read once
            if pool.written is not None or pool.readings.keys() == pool.marks.keys():
                self._write_if_due(prefix, pool)
        return {prefix: pool.views for prefix, pool in self._pools.items()}

    def _judge(self, last: _Reading, mark: LeaseMark) -> _Reading:
        """Return a reading with the heartbeats of the newest listing."""
        if last.view is None or last.content[0] != mark.epoch:
            return last
        return _Reading(last.content, last.read_at, self._names.judge(last.view, mark))

    def _choose_leases(self) -> list[tuple[_Pool, str]]:
        """Return the leases to read now, the most urgent first."""
        now = self._names.clock()
        urgent: list[tuple[int, float, _Pool, str]] = []
        for pool in self._pools.values():
            for key, mark in pool.marks.items():
                last = pool.readings.get(key)
                if last is None or last.content[0] != mark.epoch:
                    urgent.append((0, -math.inf, pool, key))
                elif last.content != mark.content:
                    urgent.append((1, last.read_at, pool, key))
                elif now - last.read_at >= RECHECK_S and _is_doubtful(last.view):
                    urgent.append((2, last.read_at, pool, key))
        urgent.sort(key=lambda one: one[:2])
        passed_s = min(max(POLL_S, now - self._polled_at), HEARTBEAT_S)
        self._polled_at = now
        return [(pool, key) for *_, pool, key in urgent[: round(READS_PER_POLL * passed_s / POLL_S)]]

    def _write_if_due(self, prefix: str, pool: _Pool) -> None:
        views, now = pool.views, self._names.clock()
        content = {key: (view.epoch, view.alive, view.value) for key, view in views.items()}
        if content == pool.written and now - pool.written_at < HEARTBEAT_S:
            return
        pool.counter += 1
        record = {"term": self._term, "counter": pool.counter, "leases": [*map(_encode, views.values())]}
        try:
            self._names.write_volatile(prefix, record)
        except OSError as error:
            if not self._is_failing:
                form = "the supervisor can't write the list of %s, so others read each file (slower): %s"
                logger.warning(form, prefix, error)
            self._is_failing = True
            return
        self._is_failing = False
        pool.written, pool.written_at = content, now


class RosterReader:
    """Reads the leases below a prefix from their roster. Several threads may use it."""

    def __init__(self, names: NameResolve, prefix: str) -> None:
        self._names, self._prefix = names, prefix
        self._lock = threading.Lock()
        self._content = b""
        self._mark: tuple[int, int] | None = None  # term and counter of the last roster
        self._moved_at = -math.inf  # a roster that was seen once proves nothing: its registrar may be dead
        self._views: dict[str, LeaseView] = {}
        self._listed: dict[str, LeaseView] = {}  # the leases when they were last read without a roster
        self._listed_at = self._list_again_at = -math.inf
        self._missing_since: float | None = None
        self._is_logged = False

    def list_leases(self, at_once: bool = False) -> dict[str, LeaseView]:
        """Return the leases, as `NameResolve.list_leases`. Do not change the result. Raises OSError.

        Without a roster that moves it reads the leases, READS_PER_S of them; `at_once`: all of them.
        """
        with self._lock:
            now = self._names.clock()
            self._load_roster(now)
            if now - self._moved_at <= STUCK_S:
                self._missing_since, self._is_logged = None, False
                return self._views
            self._log_once(now)
            if at_once or now >= self._list_again_at:
                self._listed = self._names.list_leases(self._prefix)
                self._listed_at = self._names.clock()
                self._list_again_at = self._listed_at + len(self._listed) / READS_PER_S
            return self._listed

    def _load_roster(self, now: float) -> None:
        """Take over the roster if it has moved; an absent or torn one has not."""
        try:
            content = self._names.load_record(self._prefix)
        except OSError:
            return
        if content == self._content:
            return
        try:
            value = json.loads(content)["value"]
            mark = (int(value["term"]), int(value["counter"]))
            views = {row[0]: _decode(*row) for row in value["leases"]}
        except (ValueError, TypeError, LookupError):
            return
        self._content = content
        last, is_stuck = self._mark, now - self._moved_at > STUCK_S
        if last is not None and (mark == last or (mark[0] < last[0] and not is_stuck)):
            return  # of a supervisor that lost the trial
        for view in views.values():  # so that a reader without a roster gives dead servers no new time
            self._names.note_counter(view.key, view.epoch, view.counter, view.age_s)
        self._mark = mark
        if last is None:
            return
        self._moved_at = now
        if now - self._listed_at <= STUCK_S:  # this listing may be newer
            views = {key: _choose_newer(view, self._listed.get(key)) for key, view in views.items()}
        self._views = views

    def _log_once(self, now: float) -> None:
        if self._missing_since is None:
            self._missing_since = now
        if not self._is_logged and (self._moved_at > -math.inf or now - self._missing_since > STUCK_S):
            form = "no supervisor keeps the list of %s now, so this process reads each file instead (slower)"
            logger.info(form, self._prefix)
            self._is_logged = True


def _is_doubtful(view: LeaseView | None) -> bool:
    """Return whether a lease may be dead, or have changed although its listing is the same."""
    return view is None or view.age_s >= MISSED_BEATS * view.ttl_s / HEARTBEATS_PER_TTL


def _encode(view: LeaseView) -> list[Any]:
    return [view.key, view.epoch, view.alive, round(view.age_s, 1), view.counter, view.ttl_s, view.value]


def _decode(
    key: str, epoch: int, alive: bool, age_s: float, counter: int, ttl_s: float, value: dict[str, Any]
) -> LeaseView:
    return LeaseView(key, value, epoch, alive, age_s, counter, ttl_s)


def _choose_newer(view: LeaseView, other: LeaseView | None) -> LeaseView:
    return other if other is not None and other.epoch > view.epoch else view
