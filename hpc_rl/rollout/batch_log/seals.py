"""Sealed batches: the permanent choice of the groups in batch k; and the bytes for the trainer.

A seal is `batches/<step>.seal`, created by link: of two services one wins, and the other reads the winner's
seal. It names the place of each group in the ledger and the checksum of the batch's bytes.
"""

import json
import logging
import os
from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack
import xxhash

from hpc_rl.core.trial import create_exclusive, fsync_dir, load_json, write_json
from hpc_rl.datasets.rows import Draw, RowKey
from hpc_rl.rollout.batch_log.ledger import GroupRecord, Ledger, LedgerDamaged, RecordPlace, get_segment_path
from hpc_rl.rollout.staleness import compute_staleness

logger = logging.getLogger(__name__)

TRIMMED = "trimmed.json"
SET_ASIDE = "set-aside"


@dataclass(frozen=True)
class Seal:
    """Batch `step`: prompt indexes in their order, and the place of each group."""

    step: int
    lineage: int  # of the trainer that first asked for it
    places: dict[int, RecordPlace]
    staleness: dict[int, int]  # age -> number of groups
    num_bytes: int
    checksum: str
    counters: dict[str, float] = field(default_factory=dict)
    rates: dict[RowKey, float] = field(default_factory=dict)  # mean reward of the group of each row


def encode_batch(step: int, groups: list[bytes]) -> bytes:
    """Return `types.encode(Batch(step, groups))`, from groups that are already encoded."""
    packer = msgpack.Packer(use_bin_type=True)
    head = [packer.pack_map_header(2), packer.pack("__t__"), packer.pack("Batch"), packer.pack("v")]
    head += [packer.pack_map_header(2), packer.pack("step"), packer.pack(step), packer.pack("groups")]
    head += [packer.pack_array_header(len(groups))]
    return b"".join([*head, *groups])


class Batches:
    """The seals of a trial, in `batches/` below its `rollout/`."""

    def __init__(self, folder: Path, ledger: Ledger) -> None:
        self.folder = folder / "batches"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.ledger = ledger

    def seal(
        self,
        step: int,
        lineage: int,
        groups: dict[int, tuple[GroupRecord, RecordPlace]],
        draws: Mapping[int, Draw],
    ) -> tuple[Seal, bytes, bool]:
        """Commit the ledger, then try to make this the batch of `step`.

        `draws` has the rows of prompt indexes, as far as they are known.
        Return (the seal that holds, its bytes, whether it is ours). Raises OSError.
        """
        self.ledger.commit()
        places = {index: place for index, (_, place) in groups.items()}
        body = encode_batch(step, [self.ledger.fetch_group(place) for place in places.values()])
        seal = Seal(
            step=step,
            lineage=lineage,
            places=places,
            staleness=dict(
                Counter(compute_staleness(step, record.oldest_step) for record, _ in groups.values())
            ),
            num_bytes=len(body),
            checksum=xxhash.xxh3_64_hexdigest(body),
            counters={
                "older_lineage": float(sum(one.oldest_lineage < lineage for one, _ in groups.values()))
            },
            rates={
                draws[index].key: record.reward_sum / max(1, record.num_trajectories)
                for index, (record, _) in groups.items()
                if index in draws
            },
        )
        self.ledger.check_owned({place.segment for place in places.values()})
        content = {
            "step": step,
            "lineage": lineage,
            "groups": [[place.segment, place.offset, index] for index, place in places.items()],
            "staleness": sorted(seal.staleness.items()),
            "num_bytes": seal.num_bytes,
            "xxh3": seal.checksum,
            "counters": seal.counters,
            "rates": [[*key, rate] for key, rate in seal.rates.items()],
        }
        text = json.dumps(content)
        if self.ledger.room.write(f"batch {step}", lambda: create_exclusive(self._get_path(step), text)):
            fsync_dir(self.folder)
            return seal, body, True
        won = _load_seal(self._get_path(step))
        if won is None:
            raise LedgerDamaged(f"the record of batch {step}, {self._get_path(step)}, is damaged")
        return won, self.load_body(won), False

    def load_body(self, seal: Seal) -> bytes:
        """Return the batch's bytes, unchanged since it was sealed. Raises LedgerDamaged."""
        body = encode_batch(seal.step, [self.ledger.fetch_group(place) for place in seal.places.values()])
        if xxhash.xxh3_64_hexdigest(body) != seal.checksum:
            raise LedgerDamaged(
                f"batch {seal.step} in the batch log differs from its record: the checksum does not match"
            )
        return body

    def drop_trimmed(self, step: int) -> None:
        """Delete the seals of batches up to this one; 0 deletes nothing."""
        if not step:
            return
        # for checkpoint/start_facts.py, which does not read the log: the first step that can be replayed
        note = self.folder.parent / TRIMMED
        self.ledger.room.write(TRIMMED, lambda: write_json(note, {"step": step}))
        for path in self.folder.glob("[0-9]*.seal"):
            if path.stem.isdecimal() and int(path.stem) <= step:
                path.unlink(missing_ok=True)

    def move_aside(self, seals: Collection[Seal], lineage: int) -> None:
        """Move seals that a lineage dropped to `set-aside/<lineage>/`, with links to the segments they need.

        That folder has the form of `rollout/`.
        """
        if not seals:
            return
        folder = self.folder.parent / SET_ASIDE / str(lineage)
        (folder / self.folder.name).mkdir(parents=True, exist_ok=True)
        for number in {place.segment for seal in seals for place in seal.places.values()}:
            source = get_segment_path(self.folder.parent, number)
            try:
                with suppress(FileExistsError):
                    os.link(source, folder / source.name)
            except OSError as error:
                form = "%s can't be linked to %s, so the unused batches there may become unreadable; "
                form += "training continues: %s"
                logger.warning(form, source, folder, error)
        for seal in seals:
            path = self._get_path(seal.step)
            os.replace(path, folder / self.folder.name / path.name)
        fsync_dir(self.folder)

    def _get_path(self, step: int) -> Path:
        return self.folder / f"{step:08d}.seal"


def load_seals(folder: Path) -> dict[int, Seal]:
    """Return all seals below a trial's `rollout/`, by step. Raises LedgerDamaged for an unreadable one."""
    seals = {}
    for path in sorted((folder / "batches").glob("[0-9]*.seal")):
        seal = _load_seal(path)
        if seal is not None:
            seals[seal.step] = seal
        elif path.exists():  # otherwise it was trimmed meanwhile
            raise LedgerDamaged(f"{path}, the record of a batch, is damaged")
    return seals


def _load_seal(path: Path) -> Seal | None:
    data: Any = load_json(path)
    try:
        return Seal(
            step=data["step"],
            lineage=data["lineage"],
            places={index: RecordPlace(segment, offset) for segment, offset, index in data["groups"]},
            staleness=dict(data["staleness"]),
            num_bytes=data["num_bytes"],
            checksum=data["xxh3"],
            counters=data["counters"],
            rates={(part, row): rate for part, row, rate in data.get("rates", ())},  # not in older logs
        )
    except (KeyError, TypeError, ValueError):  # missing, not JSON, or not a seal
        return None
