"""Two replicas in processes of their own; one is killed or stopped in the middle of a group."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conformance import PROMPT, make_model
from patience import extend

from hpc_rl.core.trial import Trial, write_json
from hpc_rl.name_resolve import keys, open_names
from hpc_rl.servers.client import GenerateRequest, PartialTurn
from hpc_rl.servers.embedded.backend import TEST_PACE
from hpc_rl.servers.router import Router

SCRIPT = Path(__file__).parent / "replica_process.py"
LENGTHS = (5, 2500, 2500)
# a step of decoding takes 1 ms at least: at half a second, when the first tokens come, no machine has made half of them
PACE = {TEST_PACE: "0.001:0"}


class Pair:
    def __init__(self, folder: Path) -> None:
        self.trial = Trial(folder / "trial")
        self.trial.make_dirs()
        self.trial.make_secret()
        make_model(folder / "model", 0)
        record = {"label": "0.0", "lineage": 0, "step": 0, "path": str(folder / "model")}
        write_json(self.trial.current_weights, record)
        self.counts = [folder / f"tokens-{index}" for index in range(2)]
        self.processes = [
            subprocess.Popen(
                [sys.executable, SCRIPT, folder / "trial", str(index), folder / "model", self.counts[index]],
                env=os.environ | PACE,
            )
            for index in range(2)
        ]

    def count_tokens(self, index: int) -> int:
        return int.from_bytes(self.counts[index].read_bytes(), "little")

    async def until_both_serve(self) -> None:
        names = open_names(self.trial)
        async with asyncio.timeout(extend(120)):
            while True:
                leases = await asyncio.to_thread(names.list_leases, keys.servers("rollout"))
                if [lease.value["state"] for lease in leases.values()] == ["serving"] * 2:
                    return
                assert all(process.poll() is None for process in self.processes)
                await asyncio.sleep(0.1)

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


@pytest.fixture
def pair(tmp_path):
    pair = Pair(tmp_path)
    yield pair
    pair.end()


@pytest.fixture
def streamed(monkeypatch):
    """The number of tokens that the router has received of each sample, without the final answers."""
    counts: dict[str, int] = {}
    absorb = PartialTurn.absorb

    def absorb_and_count(self, part):
        counts[self.request.rid] = counts.get(self.request.rid, 0) + len(part.ids)
        return absorb(self, part)

    monkeypatch.setattr(PartialTurn, "absorb", absorb_and_count)
    return counts


def requests():
    common = {"temperature": 1.0, "ignore_eos": True}
    return [
        GenerateRequest(
            PROMPT, {**common, "max_new_tokens": length, "sampling_seed": number}, f"rid-{number}"
        )
        for number, length in enumerate(LENGTHS)
    ]


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGKILL, id="killed"),
        pytest.param(signal.SIGTERM, id="stopped", marks=pytest.mark.soak),
    ],
)
async def test_another_server_continues_a_group(pair, streamed, number):
    await pair.until_both_serve()
    async with Router(open_names(pair.trial), pair.trial.load_tokens()["data"]) as router:
        generating = asyncio.create_task(router.generate_many(requests()))
        async with asyncio.timeout(extend(120)):
            while sum(count > 0 for count in streamed.values()) < len(LENGTHS):
                await asyncio.sleep(0.01)
        assert not generating.done()
        (index,) = [index for index in range(2) if pair.count_tokens(index)]
        os.kill(pair.processes[index].pid, number)
        turns = await generating
        assert pair.processes[index].wait(extend(60)) == (-9 if number == signal.SIGKILL else 75)
        whole = await router.generate_many(requests())
    assert [len(turn.output_ids) for turn in turns] == list(LENGTHS)
    for turn, uncut in zip(turns, whole, strict=True):
        assert turn.output_ids == uncut.output_ids and turn.versions == [("0.0", 0, len(turn.output_ids))]
        assert turn.output_logprobs == pytest.approx(uncut.output_logprobs, abs=1e-4)
    assert sum(streamed.values()) == 2 * sum(LENGTHS)  # no token came twice
    if number == signal.SIGTERM:
        assert not any(turn.num_regenerated for turn in turns)
        async with asyncio.timeout(extend(30)):
            while pair.count_tokens(0) + pair.count_tokens(1) < 2 * sum(LENGTHS):
                await asyncio.sleep(0.01)
    twice = pair.count_tokens(0) + pair.count_tokens(1) - 2 * sum(LENGTHS)
    assert twice == 0 if number == signal.SIGTERM else twice < sum(LENGTHS) / 2
