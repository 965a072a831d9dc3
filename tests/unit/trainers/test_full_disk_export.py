"""A full disk that safetensors reports."""

import pytest
import torch
from safetensors import SafetensorError

from hpc_rl.engines.shared import hf_io


def test_a_full_disk_reported_by_safetensors_is_an_os_error(tmp_path, monkeypatch):
    def full(*_args: object, **_more: object) -> None:  # its words for a write to a full tmpfs
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(hf_io, "save_file", full)
    with pytest.raises(OSError, match="No space left") as caught:
        writer = hf_io.CheckpointWriter(tmp_path)
        writer.add("w", torch.zeros(2))
        writer.finish()
    assert caught.value.errno == 28
