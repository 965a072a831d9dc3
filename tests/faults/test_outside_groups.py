"""kill -9 of the rollout service while four environments feed it: no group is lost, none counts twice."""

import asyncio
import itertools
import os
import random
import signal
import sys
import threading
from pathlib import Path

import aiohttp
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))

from patience import extend
from rollout_trial import RolloutRole, make_trial, wait_until

from hpc_rl.atropos.groups import ScoredGroup
from hpc_rl.atropos.rollout_api import RolloutApi
from hpc_rl.atropos.settings import EnvConfig
from hpc_rl.config.options.environments import EnvironmentsConfig
from hpc_rl.core.types import decode
from hpc_rl.name_resolve import keys
from hpc_rl.name_resolve.shared_fs import NameResolve

pytestmark = pytest.mark.timeout(180)
KILLS = 4
BATCH = 16  # sequences
SIZES = (2, 4, 4, 8)  # of the groups of each environment


class Role(RolloutRole):
    """The role behind the process that holds its listening socket, as a trial with environments runs it."""

    module = "hpc_rl.roles.rollout_front"

    def kill_behind_front(self) -> None:
        (child,) = self.children()
        os.kill(child, signal.SIGKILL)
        wait_until(lambda: self.children() not in ([], [child]))


def group_of(number: int, tag: int, size: int) -> ScoredGroup:
    """The tag-th group of an environment, which its first two tokens name."""
    ids = [[number, tag, 1, 2 + i] for i in range(size)]
    masks = [[-100, -100, *row[2:]] for row in ids]
    return ScoredGroup(tokens=ids, masks=masks, scores=[float(i) for i in range(size)])


class Feeder:
    """An environment that sends one group after the other; `acknowledged` has the tags."""

    def __init__(self, number: int, url: str) -> None:
        self.number, self.url, self.size = number, url, SIZES[number]
        self.acknowledged: set[int] = set()
        self.sent = 0
        self.stopping = False

    async def run(self) -> None:
        """Half of them send again under a key, half as the client of atroposlib does."""
        async with RolloutApi(self.url) as api, aiohttp.ClientSession() as session:
            asked = EnvConfig(group_size=self.size)
            env_id = (await api.register(asked, f"environment-{self.number}")).env_id
            for tag in itertools.count():
                if self.stopping:
                    return
                self.sent = tag + 1
                group = group_of(self.number, tag, self.size)
                if self.number % 2:
                    await api.send([group], env_id)
                else:
                    await self.send_without_key(session, {**group.payload(), "env_id": env_id})
                self.acknowledged.add(tag)

    async def send_without_key(self, session: aiohttp.ClientSession, body: dict) -> None:
        while True:
            try:
                async with session.post(f"{self.url}/scored_data", json=body) as response:
                    assert response.status == 200, await response.text()
                    assert (await response.json())["status"] == "received"
                    return
            except aiohttp.ClientConnectorError:
                raise  # the listening socket is to survive: an environment never sees a refused connection
            except aiohttp.ClientError:
                await asyncio.sleep(0.05)


def tags_of(body: bytes) -> list[tuple[int, int]]:
    rows = [group.trajectories for group in decode(body).groups]
    assert sum(map(len, rows)) == BATCH
    assert all(len(row) == SIZES[int(row[0].ids[0])] for row in rows)
    return [(int(row[0].ids[0]), int(row[0].ids[1])) for row in rows]


@pytest.mark.parametrize("order", ["ready", "in_order"])
def test_no_group_is_lost_or_counts_twice(tmp_path, order):
    section = EnvironmentsConfig()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"vocab_size": 100000}')  # a tag is a token
    trial = make_trial(
        tmp_path, batch_size=4, n_samples=4, environments=section,
        max_head_offpolicyness=10_000, batch_order=order,
    )  # fmt: skip
    role = Role(trial).start()
    names = NameResolve(trial.names)
    wait_until(lambda: (seen := names.list_leases(keys.ROLLOUT).get(keys.ROLLOUT)) is not None and seen.alive)
    base = names.list_leases(keys.ROLLOUT)[keys.ROLLOUT].value["url"]
    url = f"{base}/t/{trial.load_tokens()['data']}"
    client = role.client(poll_s=0.5)
    with pytest.raises(TimeoutError):  # the trainer has asked: environments may register
        client.batch_bytes(1, 0, within_s=1)
    feeders = [Feeder(number, url) for number in range(len(SIZES))]
    failures: list[BaseException] = []

    async def feed() -> None:
        await asyncio.gather(*(feeder.run() for feeder in feeders))

    def in_thread() -> None:
        try:
            asyncio.run(feed())
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=in_thread)
    thread.start()
    batches: dict[int, bytes] = {}
    try:
        chance = random.Random(order)
        for kills in range(1, KILLS + 1):
            until = len(batches) + chance.randint(3, 12)
            while len(batches) < until:
                step = len(batches) + 1
                batches[step] = client.batch_bytes(step, 0, within_s=extend(60))
                assert not failures, failures
            threading.Timer(chance.uniform(0, 0.1), role.kill_behind_front).start()
            # kills come while batches are cut and while groups are taken
            wait_until(lambda kills=kills: role.log.read_bytes().count(b"killed by signal 9") == kills)
    finally:
        for feeder in feeders:
            feeder.stopping = True
        while thread.is_alive():  # what is held waits for room in the queue
            step = len(batches) + 1
            try:
                batches[step] = client.batch_bytes(step, 0, within_s=1)
            except TimeoutError:
                thread.join(0.1)
    assert not failures, failures
    trained = [tag for body in batches.values() for tag in tags_of(body)]
    left = {(f.number, tag) for f in feeders for tag in f.acknowledged} - set(trained)
    # what makes no whole batch waits for more: any sizes that are powers of two make one of 16
    while sum(SIZES[number] for number, _ in left) >= BATCH:
        step = len(batches) + 1
        batches[step] = client.batch_bytes(step, 0, within_s=extend(60))
        trained += tags_of(batches[step])
        left -= set(trained)
    assert len(trained) == len(set(trained))
    assert client.status()["ready"] == len(left)
    assert all(len(f.acknowledged) > KILLS for f in feeders)
    if order == "in_order":
        for number in range(len(SIZES)):  # each environment's groups in the order of acknowledgement
            of_one = [tag for who, tag in trained if who == number]
            assert of_one == sorted(of_one)
    # another start hands out the very same batches
    role.kill_behind_front()
    for step, body in batches.items():
        assert client.batch_bytes(step, 0, within_s=extend(60)) == body
    client.close()
    assert role.stop() == 75
