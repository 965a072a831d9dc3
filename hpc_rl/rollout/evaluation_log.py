"""The log of one evaluation: the outcome of each held-out prompt, so that a restart asks none again.

`rollout/evaluations/<version>/<set>.<n>.log` has one writer, the incarnation that created its number. A file
is 16 bytes of magic, 16 bytes that identify the evaluation, then records: `<IQ` length and xxh3-64 of the
payload, then the payload, encoded. Readers ignore files with another identity, and stop at the first record
that is short or damaged.
"""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import xxhash

from hpc_rl.config.held_out import MAIN_SET
from hpc_rl.core.files import is_full
from hpc_rl.core.types import WeightVersion, decode, encode
from hpc_rl.rollout.batch_log.ledger import FRAME
from hpc_rl.rollout.pipes import NoGroup, PromptScored

MAGIC = b"hpc-rl held-out\n"
HEAD_BYTES = len(MAGIC) + 16
Logged = PromptScored | NoGroup


class EvaluationLog:
    """The log of one version and set. `identity` stands for all that affects the outcomes."""

    def __init__(self, folder: Path, name: str, identity: str) -> None:
        """Load the outcomes in `folder`, which may be missing, and begin a file of this incarnation."""
        self.outcomes: dict[int, Logged] = {}  # by the position of the prompt in its file
        head = MAGIC + xxhash.xxh3_128_digest(identity.encode())
        folder.mkdir(parents=True, exist_ok=True)
        prefix = f"{name or MAIN_SET}."
        numbers = sorted(
            int(path.name.removeprefix(prefix).removesuffix(".log")) for path in folder.glob(f"{prefix}*.log")
        )
        for number in numbers:
            for position, outcome in load_outcomes(folder / f"{prefix}{number}.log", head):
                self.outcomes.setdefault(position, outcome)
        self._waiting = b""  # records, while the disk is full
        self._file = (folder / f"{prefix}{max(numbers, default=-1) + 1}.log").open("xb", buffering=0)
        self._file.write(head)

    def add(self, position: int, outcome: Logged) -> None:
        """Write an outcome: a kill does not lose it, except while the disk is full. Raises OSError."""
        self.outcomes[position] = outcome
        payload = encode({"position": position, "outcome": outcome})
        self._waiting += FRAME.pack(len(payload), xxhash.xxh3_64_intdigest(payload)) + payload
        try:
            while self._waiting:
                self._waiting = self._waiting[self._file.write(self._waiting) or 0 :]
        except OSError as error:
            if not is_full(error):
                raise

    def close(self) -> None:
        with contextlib.suppress(OSError):  # a crash of the host then costs some prompts
            os.fsync(self._file.fileno())
        self._file.close()


def load_outcomes(path: Path, head: bytes) -> Iterator[tuple[int, Logged]]:
    """Yield position and outcome of the prompts in a file that begins with `head`."""
    data = path.read_bytes()
    if not data.startswith(head):
        return
    at = len(head)
    while at + FRAME.size <= len(data):
        length, checksum = FRAME.unpack_from(data, at)
        payload = data[at + FRAME.size : at + FRAME.size + length]
        if len(payload) < length or xxhash.xxh3_64_intdigest(payload) != checksum:
            return
        record = decode(payload)
        yield record["position"], record["outcome"]
        at += FRAME.size + length


def drop_logs(folder: Path, step: int) -> None:
    """Delete the logs of versions before `step`. Raises OSError."""
    for entry in folder.iterdir() if folder.is_dir() else ():
        if WeightVersion.parse(entry.name).step < step:
            shutil.rmtree(entry, ignore_errors=True)
