"""Generation servers on a virtual clock: identical servers that share their speed among their sequences.

All sequences of a server advance by one token per decode iteration, and an iteration takes longer with more
of them. So a server has one count of iterations; a sequence that joins at count c with n tokens to make
finishes at count c + n, whatever happens in between. Updates and prefills stop the count for a while.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from hpc_rl.core.types import WeightVersion
from hpc_rl.simulate.clock import Clock
from hpc_rl.simulate.costs import Costs

FIRST = WeightVersion(-1, 0)  # before the first publication


@dataclass(eq=False, slots=True)
class Group:
    """The sequences of one prompt, all on one server, as the router places them."""

    ticket: int
    lengths: Sequence[int]
    least: WeightVersion  # older weights must not generate it
    oldest_step: int = -1  # of the weights that made its first token; -1 before that
    num_left: int = 0  # sequences that have not finished

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)


@dataclass(eq=False, slots=True)
class Server:
    """One simulated server, which stands for `Fleet.weight` real ones."""

    version: WeightVersion = FIRST
    is_up: bool = False
    count: float = 0.0  # decode iterations so far
    at: float = 0.0  # time of `count`
    stalled_until: float = 0.0
    busy_s: float = 0.0
    full_s: float = 0.0  # of busy_s, with no room for another sequence
    # heap of (count at which it finishes, order, count at which it joined, its group)
    running: list[tuple[float, int, float, Group]] = field(default_factory=list)
    waiting: deque[tuple[int, Group]] = field(default_factory=deque)  # sequences without room
    joined: float = 0.0  # sum of the counts at which the running sequences joined
    turn: int = 0  # of the newest call on the clock
    is_touched: bool = False

    @property
    def load(self) -> int:
        return len(self.running) + len(self.waiting)


class Fleet:
    """Servers, of which `num_real` real ones are up. `on_finish` gets each finished group."""

    def __init__(
        self, clock: Clock, costs: Costs, num_servers: int, num_real: int, on_finish: Callable[[Group], None]
    ) -> None:
        self.clock, self.costs, self.num_real = clock, costs, num_real
        self.servers = [Server() for _ in range(num_servers)]
        self.weight = num_real / num_servers
        self.num_tokens = 0
        self.version = FIRST  # the newest
        self._on_finish = on_finish
        self._num_up = 0  # of the simulated servers
        self._order = 0
        self._touched: list[Server] = []
        self._homeless: deque[Group] = deque()  # groups that wait for a server, or for newer weights
        self._lost: dict[Group, list[int]] = {}

    @property
    def busy_s(self) -> float:
        """Seconds in which a server had a request, on average over the servers."""
        return sum(one.busy_s for one in self.servers) / len(self.servers)

    @property
    def full_s(self) -> float:
        return sum(one.full_s for one in self.servers) / len(self.servers)

    def resize(self, num_up: int) -> None:
        """Let `num_up` of the real servers be up; new ones have the newest weights."""
        target = round(num_up / self.weight)
        if num_up and not target:
            target = 1
        if target == self._num_up:  # one of thousands, of which a simulated one stands for many
            return
        self._num_up = target
        for number, server in enumerate(self.servers):
            if number < target and not server.is_up:
                server.is_up, server.version = True, self.version
                server.at = server.stalled_until = self.clock.now
            elif number >= target and server.is_up:
                self._take_down(server)
        self._submit_homeless()
        for group, left in self._pop_lost():
            self._place(group, left)
        self.flush()

    def submit(self, group: Group) -> None:
        """Start a group on the server with the fewest sequences."""
        group.num_left = len(group.lengths)
        if self.version < group.least or not any(server.is_up for server in self.servers):
            self._homeless.append(group)
            return
        self._place(group, list(group.lengths))

    def clear(self) -> None:
        """Forget all groups: their rollout role is gone."""
        self._homeless.clear()
        self._lost.clear()
        for server in self.servers:
            self._advance(server)
            server.running.clear()
            server.waiting.clear()
            server.joined = 0.0
            server.turn += 1

    def update(self, version: WeightVersion, pause_s: float) -> None:
        """Switch every server to new weights; it computes the cache of its sequences again."""
        self.version = version
        for server in self.servers:
            if server.is_up:
                self._advance(server)
                server.version = version
                made = len(server.running) * server.count - server.joined
                tokens = made + len(server.running) * self.costs.prompt_tokens
                self._stall(server, pause_s + tokens * self.costs.prefill_token_s)
        self._submit_homeless()
        self.flush()

    def lend(self, share: float, seconds: float) -> None:
        """Let some servers, at least one, do other work for some seconds."""
        for server in self.servers[: max(1, round(share * len(self.servers)))]:
            self._advance(server)
            self._stall(server, seconds)
        self.flush()

    def hold(self) -> None:
        """Stop all servers until `release`: the trainer has their GPUs."""
        for server in self.servers:
            self._advance(server)
            server.stalled_until = math.inf
            self._touch(server)
        self.flush()

    def release(self) -> None:
        for server in self.servers:
            self._advance(server)
            server.stalled_until = self.clock.now
            self._touch(server)
        self.flush()

    def advance(self) -> None:
        """Bring the counts to the present."""
        for server in self.servers:
            self._advance(server)

    def _submit_homeless(self) -> None:
        waiting, self._homeless = self._homeless, deque()
        for group in waiting:
            self.submit(group)

    def _place(self, group: Group, lengths: list[int]) -> None:
        server = min((one for one in self.servers if one.is_up), key=_get_load)
        self._advance(server)
        self._stall(server, self.costs.prompt_tokens * self.costs.prefill_token_s)
        for length in lengths:
            server.waiting.append((length, group))
        self._admit(server)

    def _admit(self, server: Server) -> None:
        room = self.costs.server_sequences - len(server.running)
        while server.waiting and room > 0:
            length, group = server.waiting.popleft()
            self._order += 1
            heapq.heappush(server.running, (server.count + length, self._order, server.count, group))
            server.joined += server.count
            if group.oldest_step < 0:
                group.oldest_step = server.version.step
            room -= 1
        self._touch(server)

    def _advance(self, server: Server) -> None:
        now = self.clock.now
        if server.running:
            server.busy_s += now - server.at
            if len(server.running) >= self.costs.server_sequences:
                server.full_s += now - server.at
            begun = min(max(server.at, server.stalled_until), now)
            if now > begun:
                server.count += (now - begun) / self.costs.compute_token_s(len(server.running))
        server.at = now

    def _stall(self, server: Server, seconds: float) -> None:
        server.stalled_until = max(server.stalled_until, self.clock.now) + seconds
        self._touch(server)

    def _touch(self, server: Server) -> None:
        if not server.is_touched:
            server.is_touched = True
            self._touched.append(server)

    def flush(self) -> None:
        """Schedule the next finish of all servers that have changed."""
        touched, self._touched = self._touched, []
        for server in touched:
            server.is_touched = False
            server.turn += 1
            if server.running and server.stalled_until < math.inf:
                left = server.running[0][0] - server.count
                token_s = self.costs.compute_token_s(len(server.running))
                stall_s = max(0.0, server.stalled_until - self.clock.now)
                self.clock.after(stall_s + left * token_s, partial(self._finish, server, server.turn))

    def _finish(self, server: Server, turn: int) -> None:
        if turn != server.turn:
            return
        self._advance(server)
        server.count = max(server.count, server.running[0][0])  # rounding
        done = []
        while server.running and server.running[0][0] <= server.count + 1e-6:
            _, _, joined, group = heapq.heappop(server.running)
            server.joined -= joined
            group.num_left -= 1
            if not group.num_left:
                done.append(group)
        self._admit(server)
        for group in done:
            self.num_tokens += group.num_tokens
            self._on_finish(group)
        self.flush()

    def _take_down(self, server: Server) -> None:
        """Move the sequences of a server to others: the router continues them with the tokens so far."""
        self._advance(server)
        server.is_up = False
        server.turn += 1
        for finishing, _, _, group in server.running:
            self._lost.setdefault(group, []).append(max(1, round(finishing - server.count)))
        for length, group in server.waiting:
            self._lost.setdefault(group, []).append(length)
        server.running.clear()
        server.waiting.clear()
        server.joined = 0.0

    def _pop_lost(self) -> list[tuple[Group, list[int]]]:
        if not any(server.is_up for server in self.servers):
            return []
        lost, self._lost = self._lost, {}
        return list(lost.items())


def _get_load(server: Server) -> int:
    return server.load
