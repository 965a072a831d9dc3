"""Incomplete weights are refused before submission, by their sizes and headers."""

import json

import pytest

from hpc_rl.config.rules.weight_rules import INDEX, SINGLE, find_weights_problem

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 988\n"


def make_content(num_bytes: int, header: bytes = b"") -> bytes:
    """Return a file of weights that has one tensor of 8 bytes, with so many of them."""
    table = {"__metadata__": {"format": "pt"}, "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
    header = header or json.dumps(table).encode()
    return len(header).to_bytes(8, "little") + header + b"x" * num_bytes


@pytest.mark.parametrize(
    ("file", "words"),
    [
        (make_content(8), ""),
        (make_content(7), "model.safetensors is cut off: it has"),
        (make_content(0)[:20], "are less than its header"),
        (b"", "its 0 bytes are less than its header"),
        (b"xx", "is damaged or cut off"),
        (POINTER, "run `git lfs pull` there"),
        (make_content(8, b"[1]"), "its header is not a table of tensors"),
        (make_content(8, b'{"a": {}}'), "its header is not a table of tensors"),
        (make_content(8, b"\xff\xff"), "its header is not a table of tensors"),
    ],
)
def test_a_file_of_weights(file, words, tmp_path):
    (tmp_path / SINGLE).write_bytes(file)
    found = find_weights_problem(tmp_path)
    assert words in found and bool(found) == bool(words)


def test_each_file_of_an_index_is_there_and_whole(tmp_path):
    (tmp_path / INDEX).write_text(
        json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}})
    )
    (tmp_path / "one.safetensors").write_bytes(make_content(8))
    assert find_weights_problem(tmp_path) == f"two.safetensors, which {INDEX} names, is not there"
    (tmp_path / "two.safetensors").write_bytes(make_content(3))
    assert "two.safetensors is cut off" in find_weights_problem(tmp_path)
    (tmp_path / "two.safetensors").write_bytes(make_content(9))
    (tmp_path / "unread.safetensors").write_bytes(b"")
    assert find_weights_problem(tmp_path) == ""
