"""Files in blocks: written bytes, checked reads, and the names in errors."""

import dataclasses
import errno
import os
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_rl.core import checked_file
from hpc_rl.core.checked_file import Abandoned, CheckedReader, FileRecord
from hpc_rl.core.errors import Damaged


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(checked_file, "BLOCK_BYTES", 10)


def write(path, *parts: bytes) -> FileRecord:
    return checked_file.write(path, [memoryview(part) for part in parts])


@given(st.lists(st.binary(max_size=35), max_size=6))
def test_the_file_is_the_parts_and_its_record_is_what_a_reader_finds(tmp_path_factory, parts):
    path = tmp_path_factory.mktemp("blocks") / "file"
    record = write(path, *parts)
    content = b"".join(parts)
    assert path.read_bytes() == content
    assert record == checked_file.record(path)
    assert (record.size, len(record.xxh3)) == (len(content), 16 * max(1, -(-len(content) // 10)))
    with CheckedReader(path, record) as reader:
        reader.check()
        assert reader.read(0, len(content)) == content


@given(st.integers(0, 57), st.integers(0, 57))
def test_any_range(tmp_path_factory, one, other):
    path = tmp_path_factory.mktemp("blocks") / "file"
    record = write(path, bytes(range(57)))
    start, end = sorted((one, other))
    with CheckedReader(path, record) as reader:
        assert reader.read(start, end) == bytes(range(start, end))


@pytest.mark.parametrize("at", range(0, 33, 4))
def test_every_flipped_bit_is_found_by_whoever_reads_its_block(tmp_path, at):
    record = write(tmp_path / "file", bytes(33))
    content = bytearray(33)
    content[at] = 4
    (tmp_path / "file").write_bytes(content)
    first = at // 10 * 10
    with CheckedReader(tmp_path / "file", record) as reader:
        told = rf"^file: bytes {first} to {min(first + 10, 33)} differ from what was written"
        whole = [(0, np.empty(33, np.uint8))]
        for read in (reader.check, lambda: reader.read(at, at + 1), lambda: reader.fill(whole)):
            with pytest.raises(Damaged, match=told):
                read()
        other = (first + 10) % 30
        assert reader.read(other, other + 3) == bytes(3)


def test_a_file_of_another_size_is_refused_before_it_is_read(tmp_path):
    record = write(tmp_path / "file", bytes(33))
    os.truncate(tmp_path / "file", 30)
    with pytest.raises(Damaged, match="file has 30 bytes, 33 were written"):
        CheckedReader(tmp_path / "file", record)


def test_a_record_that_lacks_checksums_proves_nothing(tmp_path):
    record = write(tmp_path / "file", bytes(33))
    shorter = dataclasses.replace(record, xxh3=record.xxh3[:16])
    with CheckedReader(tmp_path / "file", shorter) as reader, pytest.raises(Damaged):
        reader.check()


def test_a_file_is_never_overwritten(tmp_path):
    write(tmp_path / "file", b"first")
    with pytest.raises(FileExistsError):
        write(tmp_path / "file", b"second")


def test_short_writes_are_gone_on_with(tmp_path, monkeypatch):
    real = os.pwritev
    monkeypatch.setattr(checked_file.os, "pwritev", lambda fd, parts, at: real(fd, [parts[0][:3]], at))
    record = write(tmp_path / "file", b"ab", bytes(range(33)), b"c" * 9)
    assert (tmp_path / "file").read_bytes() == b"ab" + bytes(range(33)) + b"c" * 9
    assert record == checked_file.record(tmp_path / "file")


def no_reservation(monkeypatch, error: int, calls: list[str]) -> None:
    libc = SimpleNamespace(fallocate=lambda *_args: calls.append("reserve") or -1)
    monkeypatch.setattr(checked_file, "_libc", libc)
    monkeypatch.setattr(checked_file.ctypes, "get_errno", lambda: error)


def test_space_is_reserved_before_anything_is_written(tmp_path, monkeypatch):
    calls: list[str] = []
    no_reservation(monkeypatch, errno.EDQUOT, calls)
    monkeypatch.setattr(checked_file.os, "pwritev", lambda *_args: calls.append("write"))
    with pytest.raises(OSError, match="quota"):
        write(tmp_path / "file", bytes(33))
    assert calls == ["reserve"]


def test_a_file_system_that_can_not_reserve_is_written_to_all_the_same(tmp_path, monkeypatch):
    no_reservation(monkeypatch, errno.EOPNOTSUPP, [])
    write(tmp_path / "file", bytes(33))
    assert (tmp_path / "file").read_bytes() == bytes(33)


def test_a_write_that_is_called_off_ends(tmp_path):
    cancel = threading.Event()
    cancel.set()
    with pytest.raises(Abandoned):
        checked_file.write(tmp_path / "file", [memoryview(bytes(100))], cancel)


@pytest.mark.parametrize("failures", [1, 2])
def test_a_read_that_fails_is_tried_once_more_then_named_as_damage(tmp_path, monkeypatch, failures):
    record = write(tmp_path / "file", b"0123456789abc")
    left, read = [failures], os.preadv
    monkeypatch.setattr(checked_file, "AGAIN_S", 0.0)

    def preadv(*what):
        left[0] -= 1
        if left[0] >= 0:
            raise OSError(errno.EIO, "Input/output error")
        return read(*what)

    monkeypatch.setattr(os, "preadv", preadv)
    with CheckedReader(tmp_path / "file", record) as reader:
        if failures == 1:
            assert reader.read(0, 13) == b"0123456789abc"
        else:
            with pytest.raises(Damaged, match=r"^file: bytes 0 to 10 can't be read: Input/"):
                reader.read(0, 5)
