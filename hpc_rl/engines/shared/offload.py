"""Moves tensors out of GPU memory for a while: their storages become empty, and get their bytes back later.

Tensors, views and parameters stay the same objects, so nothing that refers to them needs to know.
"""

from collections.abc import Iterable

import torch


class Offload:
    """The storages of some tensors on one device. Their buffer in CPU memory is kept for the next time."""

    def __init__(self, device: torch.device) -> None:
        self._is_gpu = device.type == "cuda"
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._moved: list[tuple[torch.UntypedStorage, torch.Tensor]] = []  # with its part of the buffer

    def move_out(self, tensors: Iterable[torch.Tensor]) -> None:
        """Copy the storages of the tensors to CPU memory, and free them."""
        found = (tensor.untyped_storage() for tensor in tensors)
        storages = list({storage.data_ptr(): storage for storage in found if storage.nbytes()}.values())
        sizes = [storage.nbytes() for storage in storages]
        if sum(sizes) != self._buffer.nbytes:
            self._buffer = torch.empty(0, dtype=torch.uint8)  # frees the old one first
            self._buffer = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=self._is_gpu)
        self._moved = list(zip(storages, self._buffer.split(sizes), strict=True))
        for storage, part in self._moved:
            part.copy_(_view_bytes(storage), non_blocking=True)
        self._wait_for_copies()
        for storage, _ in self._moved:
            storage.resize_(0)
        if self._is_gpu:
            torch.cuda.empty_cache()

    def move_back(self) -> None:
        """Undo `move_out`; without one, do nothing."""
        for storage, part in self._moved:
            storage.resize_(part.nbytes)
            _view_bytes(storage).copy_(part, non_blocking=True)
        self._moved = []
        self._wait_for_copies()

    def _wait_for_copies(self) -> None:
        if self._is_gpu:
            torch.cuda.synchronize()


def _view_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
