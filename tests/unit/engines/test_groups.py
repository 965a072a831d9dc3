"""Products and orders of groups of rows, against one group after another."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hpc_rl.engines.megatron.groups import find_places, multiply_groups, order_chunks

SIZES = (4, 0, 5, 1)  # of groups


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype).requires_grad_()


def find_ends(sizes: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor(sizes).cumsum(0).to(torch.int32)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 0.1)])
@pytest.mark.parametrize("num_in, num_out", [(32, 24), (10, 24), (32, 7), (5, 3)])
def test_one_product_equals_one_for_each_matrix(num_in, num_out, dtype, tolerance):
    x, matrices = draw(sum(SIZES), num_in, dtype=dtype), draw(len(SIZES), num_out, num_in, dtype=dtype)
    weights = draw(sum(SIZES), num_out, dtype=dtype).detach()
    want = torch.cat([part @ one.T for part, one in zip(x.split(SIZES), matrices, strict=True)])
    wanted = torch.autograd.grad((want * weights).sum(), (x, matrices))
    got = multiply_groups(x, matrices, find_ends(SIZES))
    found = torch.autograd.grad((got * weights).sum(), (x, matrices))
    for one, other in zip((got, *found), (want, *wanted), strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def test_without_rows_the_matrices_have_a_gradient():
    x, matrices = draw(0, 8), draw(3, 4, 8)
    product = multiply_groups(x, matrices, find_ends((0, 0, 0)))
    product.sum().backward()
    assert product.shape == (0, 4) and matrices.grad is not None and not matrices.grad.any()


class Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def count(num_groups: int) -> Counter[str]:
    x, matrices = draw(3 * num_groups, 8), draw(num_groups, 4, 8)
    weights, ends = draw(3 * num_groups, 4).detach(), find_ends((3,) * num_groups)
    with Operators() as operators:
        (multiply_groups(x, matrices, ends) * weights).sum().backward()
    return operators.counts


def test_the_number_of_operators_does_not_depend_on_the_number_of_groups():
    assert count(2) == count(16)
    assert count(2)["_grouped_mm"] == 3  # the product and two gradients


def test_the_places_of_true_values():
    is_chosen = torch.tensor([0, 1, 1, 0, 1, 0], dtype=torch.bool)
    assert find_places(is_chosen, 3).tolist() == [1, 2, 4]
    assert find_places(torch.zeros(4, dtype=torch.bool), 0).tolist() == []


def test_chunks_in_another_order():
    sizes, order = (2, 0, 3, 1), [2, 0, 3, 1]
    values = torch.arange(6)
    parts = values.split(sizes)
    rows = order_chunks(torch.tensor(sizes), torch.tensor(order), 6)
    assert values[rows].tolist() == torch.cat([parts[at] for at in order]).tolist()
