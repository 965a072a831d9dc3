"""Stand-in for the CPU build of sgl-kernel, which is not published as a wheel: what SGLang calls on every
CPU, in PyTorch.

`convert_weight_packed` is not registered, on purpose: SGLang then finds no AMX support and takes its native
layers.
"""

import torch

__version__ = "0.0.0+stand.in"
_library = torch.library.Library("sgl_kernel", "FRAGMENT")


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_args, **_kwargs):
        raise NotImplementedError(f"sgl_kernel stand-in: {name} is not there")

    missing.__name__ = name
    return missing


def assign_req_to_token_pool_cpu(request_rows, table, starts, ends, slots, _row_length):
    """Write the cache slots of each request, one after the other in `slots`, into its row of the table."""
    at = 0
    for row, start, end in zip(request_rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        table[row, start:end] = slots[at : at + end - start].to(table.dtype)
        at += end - start


_MASK = 0xFFFFFFFF


def _rotate(x, bits):
    return ((x << bits) | (x >> (32 - bits))) & _MASK


def _murmur_hash32(seed, positions, columns):
    """MurmurHash3 (32 bits) of seed low, seed high, position and column; the hash behind per-request
    seeds.
    """
    seed = seed.to(torch.int64)
    blocks = (
        seed & _MASK,
        (seed >> 32) & _MASK,
        positions.to(torch.int64) & _MASK,
        columns.to(torch.int64) & _MASK,
    )
    state = torch.zeros_like(seed)
    for index, block in enumerate(blocks):
        if index == 3:
            state, block = state[:, None], block[None, :]
        block = (_rotate((block * 0xCC9E2D51) & _MASK, 15) * 0x1B873593) & _MASK
        state = (_rotate(state ^ block, 13) * 5 + 0xE6546B64) & _MASK
    state = state ^ 16
    state = ((state ^ (state >> 16)) * 0x85EBCA6B) & _MASK
    state = ((state ^ (state >> 13)) * 0xC2B2AE35) & _MASK
    return (state ^ (state >> 16)).to(torch.uint32)


_library.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor col_indices) -> Tensor")
_library.impl("murmur_hash32_cpu", _murmur_hash32, "CPU")
