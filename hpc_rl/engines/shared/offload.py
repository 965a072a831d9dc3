"""Moves tensors out of GPU memory for a while: their storages become empty, and get their bytes back later.

Tensors, views and parameters stay the same objects, so nothing that refers to them needs to know.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch


@dataclass
class Offload:
    """The storages of some tensors. The copies in CPU memory are kept for the next time."""

    pin: bool = True  # copy to page-locked memory
    _copies: dict[int, tuple[torch.UntypedStorage, torch.Tensor]] = field(default_factory=dict)

    def move_out(self, tensors: Iterable[torch.Tensor]) -> None:
        """Copy the storages to CPU memory, and free them."""
        before, self._copies = self._copies, {}
        for storage in {one._cdata: one for one in (tensor.untyped_storage() for tensor in tensors)}.values():
            _, copy = before.get(storage._cdata, (None, None))
            if copy is None or copy.nbytes != storage.nbytes():
                copy = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=self.pin)
            copy.copy_(_view_bytes(storage), non_blocking=True)
            self._copies[storage._cdata] = (storage, copy)
        _synchronize(self.pin)
        for storage, _ in self._copies.values():
            storage.resize_(0)
        if self.pin:
            torch.cuda.empty_cache()

    def move_back(self) -> None:
        """Undo `move_out`; without one, do nothing."""
        for storage, copy in self._copies.values():
            if not storage.nbytes():
                storage.resize_(copy.nbytes)
                _view_bytes(storage).copy_(copy, non_blocking=True)
        _synchronize(self.pin)


def _view_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _synchronize(is_on_gpu: bool) -> None:
    if is_on_gpu:
        torch.cuda.synchronize()
