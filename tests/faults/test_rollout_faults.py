"""kill -9 of the sequencer and of its workers at random instants, with real ledger files: the promises of the
batch log hold.
"""

import contextlib
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))

from patience import extend
from rollout_trial import FakeServer, RolloutRole, begin_lineage, make_trial, wait_until

from hpc_rl.core.errors import RoleFailed
from hpc_rl.core.types import decode, encode
from hpc_rl.rollout.batch_log.ledger import NoteRecord, list_segments, load_segment
from hpc_rl.rollout.batch_log.replay import load_state

STEPS = 12


class Killer:
    """Kills the role at random instants, some of them while it starts, and starts it again."""

    def __init__(self, role: RolloutRole, seed: int, num_kills: int) -> None:
        self.count = 0
        self._stop = threading.Event()
        chance = random.Random(seed)

        def loop() -> None:
            while self.count < num_kills and not self._stop.is_set():
                if chance.random() < 0.75:
                    wait_until(lambda: b"serves batches" in role.log.read_bytes() or self._stop.is_set())
                self._stop.wait(chance.uniform(0.1, 2.5))
                role.kill()
                role.start()
                self.count += 1

        self._thread = threading.Thread(target=loop)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


def train(
    role: RolloutRole, server: FakeServer, killer: Killer, seed: int, num_steps: int = STEPS
) -> dict[int, bytes]:
    """A trainer that sometimes goes back a few steps: each batch that it gets again must be the same. It leaves
    the killer time for two kills.
    """
    chance = random.Random(seed)
    client = role.client()
    seen: dict[int, bytes] = {}
    step, lineage = 1, 0
    server.publish("0.0")
    while step <= num_steps:
        if step == num_steps:
            wait_until(lambda: killer.count >= 2)
        body = encode(client.batch(step, lineage))
        assert seen.setdefault(step, body) == body
        server.publish(f"{lineage}.{step}")
        step += 1
        time.sleep(0.05)
        if chance.random() < 0.15:
            step, lineage = max(1, step - chance.randrange(4)), lineage + 1
            begin_lineage(role.trial, lineage, step - 1)
            server.publish(f"{lineage}.{step - 1}")
    client.close()
    return seen


def audit(trial, batch_size: int, num_steps: int = STEPS) -> list[list[int]]:
    """Prompt indexes of each batch, after checks that every index is used at most once and none was lost."""
    state = load_state(trial.rollout)
    batches = [list(state.seals[step].places) for step in range(1, num_steps + 1)]
    used = [index for batch in batches for index in batch]
    assert len(set(used)) == len(used) == batch_size * num_steps
    assert not state.rejected
    return batches


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("order", "bound"),
    [
        ("ready", "soft"),
        *(pytest.param(*both, marks=pytest.mark.soak) for both in (("in_order", "soft"), ("ready", "hard"))),
    ],
)
def test_kills_of_the_sequencer_lose_and_repeat_nothing(tmp_path, order, bound):
    trial = make_trial(tmp_path, batch_size=3, num_rows=20, batch_order=order, staleness_bound=bound)
    server = FakeServer(trial, max_delay_s=0.3)
    role = RolloutRole(trial).start()
    killer = Killer(role, seed=7, num_kills=4)
    try:
        seen = train(role, server, killer, seed=3)
        killer.stop()
        batches = audit(trial, 3) if bound == "soft" else None
        assert killer.count >= 2
        if order == "in_order":
            assert batches == [list(range(3 * i, 3 * i + 3)) for i in range(STEPS)]
        if bound == "hard":
            assert (
                max(age for seal in load_state(trial.rollout).seals.values() for age in seal.staleness) <= 2
            )
        client = role.client()
        begin_lineage(trial, 99)
        assert {step: encode(client.batch(step, 99)) for step in seen} == seen
        client.close()
    finally:
        killer.stop()
        role.kill()
        server.close()


ONCE = """
import asyncio, os, random, signal, time
from hpc_rl.rollout.workflows import single_turn

def tell(what, index, nonce):
    told = os.open(os.environ["TOLD"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(told, f"{what} {index} {nonce}\\n".encode())
    os.close(told)

async def run(prompt, generate):
    async def make():
        await asyncio.sleep(random.random() * 0.2)
        nonce = random.getrandbits(50)
        tell("made", generate.index, nonce)
        if os.environ.get("VICTIM") == "role" and not os.path.exists(os.environ["TOLD"] + "-last"):
            role = os.getppid()  # it can't read or write the note for a while
            os.kill(role, signal.SIGSTOP)
            asyncio.get_running_loop().call_later(0.2, os.kill, role, signal.SIGCONT)
        return nonce

    nonce = await generate.once("nonce", make)
    tell("continued", generate.index, nonce)
    for number in os.environ.get("KILLS", "").split():
        try:
            os.close(os.open(f"{os.environ['TOLD']}-{number}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            continue
        os.kill(os.getppid() if os.environ["VICTIM"] == "role" else os.getpid(), signal.SIGKILL)
        time.sleep(100)  # not asyncio: another workflow of this worker would spend its kill on the same role
    await asyncio.sleep(random.random() * 0.3)
    group = await single_turn(prompt, generate)
    for one in group.trajectories:
        one.stats = {"nonce": float(nonce)}
    return group
"""


def audit_notes(trial, told: Path, used: dict[int, set[int]]) -> None:
    """Each workflow went by what is on disk, and nothing was made again after one had continued with it."""
    noted: dict[int, list[int]] = {}
    for number in list_segments(trial.rollout):
        for _, record in load_segment(trial.rollout, number):
            if isinstance(record, NoteRecord):
                noted.setdefault(record.index, []).append(decode(record.value))
    assert all(len(nonces) == 1 for nonces in noted.values()), "what is on disk is never made again"
    assert used == {index: set(noted[index]) for index in used}
    going_by: dict[int, int] = {}  # index -> what its workflow continued with
    for line in told.read_text().splitlines():
        what, index, nonce = line.split()
        if what == "made":
            assert int(index) not in going_by, "what a workflow has continued with is never made again"
        else:
            assert going_by.setdefault(int(index), int(nonce)) == int(nonce)
    assert going_by.keys() >= used.keys()
    assert all(noted[index] == [nonce] for index, nonce in going_by.items()), "it is on disk by then"


@pytest.mark.timeout(120)
@pytest.mark.parametrize("victim", ["role", "worker"])
def test_a_kill_at_the_instant_a_workflow_continues_costs_no_note(tmp_path, victim):
    (tmp_path / "once_workflow.py").write_text(ONCE)
    trial = make_trial(tmp_path, batch_size=3, num_rows=20, workflow="once_workflow:run")
    server = FakeServer(trial)
    told = tmp_path / "told"
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    env = {"TOLD": str(told), "PYTHONPATH": path, "VICTIM": victim, "KILLS": "first second last"}
    role = RolloutRole(trial, env).start()
    client, stopping, used = role.client(), threading.Event(), {}

    def restart() -> None:
        while not stopping.wait(0.02):
            if role.process.poll() is not None:
                role.kill()
                role.start()

    keeper = threading.Thread(target=restart)
    keeper.start()
    try:
        for step in (1, 2, 3):
            server.publish(f"0.{step - 1}")
            for group in client.batch(step, 0).groups:
                used[group.index] = {int(one.stats["nonce"]) for one in group.trajectories}
    finally:
        stopping.set()
        keeper.join()
        client.close()
        role.kill()
        server.close()
    assert len(list(tmp_path.glob("told-*"))) == 3 and role.incarnation == (3 if victim == "role" else 0)
    audit_notes(trial, told, used)


@pytest.mark.timeout(120)
def test_what_a_workflow_made_once_survives_kills_of_the_role_and_its_workers(tmp_path):
    (tmp_path / "once_workflow.py").write_text(ONCE)
    trial = make_trial(tmp_path, batch_size=3, num_rows=20, num_workers=2, workflow="once_workflow:run")
    server = FakeServer(trial, max_delay_s=0.2)
    told = tmp_path / "told"
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    role = RolloutRole(trial, {"TOLD": str(told), "PYTHONPATH": path}).start()
    killer = Killer(role, seed=5, num_kills=4)
    chance = random.Random(2)
    client = role.client()
    used = {}
    try:
        for step in range(1, STEPS + 1):
            if step == STEPS:
                wait_until(lambda: killer.count >= 2)
            server.publish(f"0.{step - 1}")
            for group in client.batch(step, 0).groups:
                used[group.index] = {int(one.stats["nonce"]) for one in group.trajectories}
            if step % 3 == 0:
                with contextlib.suppress(OSError, IndexError):  # it may be between two lives
                    os.kill(chance.choice(role.children()), signal.SIGKILL)
        killer.stop()
        assert killer.count >= 2
    finally:
        killer.stop()
        client.close()
        role.kill()
        server.close()
    audit_notes(trial, told, used)
    assert len(used) == 3 * STEPS


@pytest.mark.timeout(120)
def test_kills_of_workers_are_noticed_at_once_and_cost_nothing(tmp_path):
    trial = make_trial(tmp_path, batch_size=3, num_rows=20, batch_order="in_order", num_workers=2)
    server = FakeServer(trial, max_delay_s=0.2)
    role = RolloutRole(trial).start()
    client = role.client()
    chance = random.Random(1)
    try:
        for step in range(1, 9):
            server.publish(f"0.{step - 1}")
            assert client.batch(step, 0).step == step
            if step in (2, 4, 6):
                wait_until(lambda: len(role.children()) == 2)
                os.kill(chance.choice(role.children()), signal.SIGKILL)
                wait_until(lambda num_kills=step // 2: client.status()["worker_restarts"] == num_kills)
        assert audit(trial, 3, 8) == [list(range(3 * i, 3 * i + 3)) for i in range(8)]
    finally:
        client.close()
        role.kill()
        server.close()


def test_workers_end_with_their_parent(tmp_path):
    trial = make_trial(tmp_path, num_workers=2, reward_fn="slow_reward:score")
    (tmp_path / "slow_reward.py").write_text("def score(prompt, completion, **columns):\n    return 1.0\n")
    role = RolloutRole(trial, {"PYTHONPATH": str(tmp_path)}).start()

    def descendants() -> list[int]:
        children = role.children()
        return children + [
            int(pid)
            for child in children
            for pid in Path(f"/proc/{child}/task/{child}/children").read_text().split()
        ]

    wait_until(lambda: len(descendants()) == 4)
    pids = descendants()
    role.kill()
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() and "Z" not in _state(pid) for pid in pids))


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def test_no_server_means_waiting_not_rejecting(tmp_path):
    trial = make_trial(tmp_path, setup_timeout=1.0)
    role = RolloutRole(trial).start()
    client = role.client(poll_s=0.5)
    stopping = threading.Event()
    try:
        wait_until(lambda: b"serves batches" in role.log.read_bytes())
        threading.Timer(5.0, stopping.set).start()  # several times setup_timeout
        assert client.batch(1, 0, stopping) is None
        wait_until(lambda: client.status()["running"] > 0)
        assert client.status()["rejected"] == {}
        server = FakeServer(trial)
        assert client.batch(1, 0).step == 1
        server.close()
    finally:
        client.close()
        role.kill()


def test_a_server_that_answers_500_now_and_then_costs_no_prompt(tmp_path):
    trial = make_trial(tmp_path)
    server = FakeServer(trial)
    server.errors = 5
    role = RolloutRole(trial).start()
    client = role.client()
    try:
        assert client.batch(1, 0).step == 1
        assert client.status()["rejected"] == {}
    finally:
        client.close()
        role.kill()
        server.close()


@pytest.mark.timeout(90)
def test_a_reward_that_hangs_rejects_its_prompt_only(tmp_path):
    source = """
        import os, time
        def score(prompt, completion, answer, **columns):
            print("noise on standard output")
            if prompt == "3+1=":
                time.sleep(1000)
            if prompt == "5+1=":
                raise KeyError("made up")
            if prompt == "7+1=":
                os._exit(9)
            return float(len(answer))
        """
    (tmp_path / "odd_reward.py").write_text("\n".join(line[8:] for line in source.splitlines()))
    trial = make_trial(
        tmp_path, batch_size=8, num_rows=16, n_samples=1, batch_order="in_order", max_head_offpolicyness=0,
        reward_fn="odd_reward:score", reward_timeout_s=extend(0.7),
    )  # fmt: skip
    server = FakeServer(trial)
    role = RolloutRole(trial, {"PYTHONPATH": str(tmp_path)}).start()
    client = role.client()
    try:
        rewards = [t.reward for step in (1,) for g in client.batch(step, 0).groups for t in g.trajectories]
        server.publish("0.1")
        client.batch(2, 0)
        assert set(rewards) <= {1.0, 2.0}
        rejected = client.status()["rejected"]
        assert rejected["reward_timeout"] >= 1 and rejected["reward_exception"] >= 2
        assert set(rejected) == {"reward_timeout", "reward_exception"}
    finally:
        client.close()
        role.kill()
        server.close()


def test_a_client_gives_up_after_its_deadline(tmp_path):
    trial = make_trial(tmp_path)
    role = RolloutRole(trial)
    client = role.client()
    client.deadline_s = 1.0
    with pytest.raises(RoleFailed, match="did not answer the trainer for 1 s"):
        client.batch(1, 0)
    client = role.client()
    client.deadline_s = 1.0
    with pytest.raises(
        RoleFailed, match="did not answer the trainer for 1 s"
    ):  # also where it is asked in short rounds
        while True:
            with contextlib.suppress(TimeoutError):
                client.batch_bytes(1, 0, within_s=0.1)
