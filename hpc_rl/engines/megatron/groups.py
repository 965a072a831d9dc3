"""Groups of rows: one product for all, and their order. No number of rows is read from the device.

On GPUs, PyTorch's grouped product reads them unless the values are bfloat16. This file does not import
Megatron, so that it can be tested in any process.
"""

import torch
import torch.nn.functional as F

_ALIGNMENT_BYTES = 16  # of the rows of matrices in a grouped product


def multiply_groups(x_NK: torch.Tensor, matrices_EMK: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    """Return x @ matrix.T [N, M], where each matrix has its group of rows of x, in one operator.

    ends_E: where the group of each matrix ends, int32, on the device of x.
    """
    if not len(x_NK):  # no group has a row; the matrices still get a gradient
        return F.linear(x_NK, matrices_EMK[0])
    unit = _ALIGNMENT_BYTES // x_NK.element_size()
    num_out, num_in = matrices_EMK.shape[1:]
    more_out, more_in = -num_out % unit, -num_in % unit
    if more_in:
        x_NK = F.pad(x_NK, (0, more_in))
    if more_out or more_in:
        matrices_EMK = F.pad(matrices_EMK, (0, more_in, 0, more_out))
    product = F.grouped_mm(x_NK.contiguous(), matrices_EMK.transpose(1, 2), offs=ends_E)
    return product[:, :num_out] if more_out else product


def find_places(is_chosen: torch.Tensor, num_chosen: int) -> torch.Tensor:
    """Return the places of the `num_chosen` true values of a flat tensor, in order."""
    slots = torch.where(is_chosen, is_chosen.cumsum(0) - 1, num_chosen)  # the last slot is dropped
    places = torch.arange(len(is_chosen), device=is_chosen.device)
    return places.new_empty(num_chosen + 1).scatter_(0, slots, places)[:num_chosen]


def order_chunks(sizes_C: torch.Tensor, order_C: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Return the rows [num_rows] of chunks of the sizes, in another order of the chunks."""
    starts_C, moved_C = sizes_C.cumsum(0) - sizes_C, sizes_C[order_C]
    shifts_C = starts_C[order_C] - (moved_C.cumsum(0) - moved_C)
    rows = torch.arange(num_rows, device=order_C.device)
    return rows + shifts_C.repeat_interleave(moved_C, output_size=num_rows)
