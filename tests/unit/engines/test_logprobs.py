"""Log-probabilities from tiles of logits against full logits, gradients included."""

import pytest
import torch

from hpc_rl.engines.shared.logprobs import Tile, choose_tile, token_logprobs


def full(hidden, head, targets, temperature) -> tuple[torch.Tensor, torch.Tensor]:
    logprobs = torch.log_softmax(hidden @ head.T / temperature, dim=1)
    return logprobs.gather(1, targets[:, None]).squeeze(1), -(logprobs.exp() * logprobs).sum(1)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("tile", [None, Tile(128, 50), Tile(7, 50), Tile(300, 50), Tile(7, 9), Tile(300, 16)])
def test_values_and_gradients_equal_full_logits(temperature: float, tile: Tile | None) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(300, 16, generator=generator, requires_grad=True)
    head = torch.randn(50, 16, generator=generator, requires_grad=True)
    targets = torch.randint(0, 50, (300,), generator=generator)
    weights = torch.randn(300, generator=generator)
    want, want_entropy = full(hidden, head, targets, temperature)
    want_grads = torch.autograd.grad((want * weights).sum(), (hidden, head))
    got, entropy = token_logprobs(hidden, head, targets, temperature, tile)
    grads = torch.autograd.grad((got * weights).sum(), (hidden, head))
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy, want_entropy, atol=1e-5, rtol=1e-5)
    for grad, want_grad in zip(grads, want_grads, strict=True):
        torch.testing.assert_close(grad, want_grad, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("temperature", [0.7, torch.tensor([0.5, 0.7, 1.0, 2.0]).repeat(10)])
@pytest.mark.parametrize("tile", [None, Tile(7, 50), Tile(7, 9)])
def test_several_tokens_of_a_position_equal_full_logits(temperature, tile) -> None:
    """Some of them twice, and the entropy as well."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(40, 16, generator=generator, requires_grad=True)
    head = torch.randn(50, 16, generator=generator, requires_grad=True)
    targets = torch.randint(0, 50, (40, 5), generator=generator)
    targets[:, 1] = targets[:, 0]
    weights = torch.randn(40, 5, generator=generator)
    divisor = temperature if isinstance(temperature, float) else temperature[:, None]
    whole = torch.log_softmax(hidden @ head.T / divisor, dim=1)
    want, want_entropy = whole.gather(1, targets), -(whole.exp() * whole).sum(1)
    got, entropy = token_logprobs(hidden, head, targets, temperature, tile)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    wanted = torch.autograd.grad((want * weights).sum() + want_entropy.sum(), (hidden, head))
    found = torch.autograd.grad((got * weights).sum() + entropy.sum(), (hidden, head))
    for grad, want_grad in zip(found, wanted, strict=True):
        torch.testing.assert_close(grad, want_grad, atol=1e-5, rtol=1e-4)


def clamp(hidden, head, temperature, share) -> torch.Tensor:
    """Return the entropy over the more probable tokens, by full logits."""
    logits = hidden @ head.T / temperature
    num_tokens = logits.shape[1] - int(share * logits.shape[1])
    logprobs = torch.log_softmax(logits.topk(num_tokens, dim=1).values, dim=1)
    return -(logprobs.exp() * logprobs).sum(1)


@pytest.mark.parametrize(
    ("share", "tile"),
    [(0.0, None), (0.3, None), (0.0, Tile(7, 50)), (0.3, Tile(7, 50)), (0.0, Tile(40, 9))],
)
def test_the_entropy_has_a_gradient_and_may_leave_out_improbable_tokens(share, tile) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(40, 16, generator=generator, requires_grad=True)
    head = torch.randn(50, 16, generator=generator, requires_grad=True)
    targets = torch.randint(0, 50, (40,), generator=generator)
    temperature, weights = torch.tensor([0.5, 0.7, 1.0, 2.0]).repeat(10), torch.randn(40, generator=generator)
    logprobs, whole = full(hidden, head, targets, temperature[:, None])
    want = clamp(hidden, head, temperature[:, None], share) if share else whole
    got_logprobs, got = token_logprobs(hidden, head, targets, temperature, tile, entropy_clamp=share)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    for value, want_value in ((got, want), (got_logprobs + 2 * got, logprobs + 2 * want)):
        grads, want_grads = (
            torch.autograd.grad((one * weights).sum(), (hidden, head), retain_graph=True)
            for one in (value, want_value)
        )
        for grad, want_grad in zip(grads, want_grads, strict=True):
            torch.testing.assert_close(grad, want_grad, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("tile", [None, Tile(7, 50), Tile(40, 9)])
def test_each_token_may_have_its_own_temperature(tile: Tile | None) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(40, 16, generator=generator, requires_grad=True)
    head = torch.randn(50, 16, generator=generator, requires_grad=True)
    targets = torch.randint(0, 50, (40,), generator=generator)
    temperature = torch.tensor([0.1, 0.7, 1.0, 2.0]).repeat(10)
    want, want_entropy = full(hidden, head, targets, temperature[:, None])
    want_grads = torch.autograd.grad(want.sum(), (hidden, head))
    got, entropy = token_logprobs(hidden, head, targets, temperature, tile)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(entropy, want_entropy, atol=1e-5, rtol=1e-5)
    for grad, want_grad in zip(torch.autograd.grad(got.sum(), (hidden, head)), want_grads, strict=True):
        torch.testing.assert_close(grad, want_grad, atol=1e-4, rtol=1e-5)


def test_no_rows_still_give_a_gradient_of_zero() -> None:
    hidden = torch.zeros(0, 4, requires_grad=True)
    head = torch.ones(5, 4, requires_grad=True)
    logprobs, _ = token_logprobs(hidden, head, torch.zeros(0, dtype=torch.long))
    logprobs.sum().backward()
    assert head.grad is not None
    assert not head.grad.any()


def test_full_logits_are_never_held() -> None:
    rows, vocab = 2048, 32_768  # all logits: 268 MB
    hidden = torch.randn(rows, 4, requires_grad=True)
    head = torch.randn(vocab, 4, requires_grad=True)
    sizes: list[int] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                sizes.append(out.numel())
            return out

    with Watch():
        token_logprobs(hidden, head, torch.zeros(rows, dtype=torch.long))[0].sum().backward()
    tile = choose_tile(vocab, "cpu")
    assert max(sizes) <= max(tile.rows * tile.columns, head.numel()) == 1 << 18


@pytest.mark.parametrize("tile", [None, Tile(7, 9)])
def test_without_need_the_entropy_is_zero_and_the_rest_the_same(tile: Tile | None) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(40, 16, generator=generator, requires_grad=True)
    head = torch.randn(50, 16, generator=generator, requires_grad=True)
    targets = torch.randint(0, 50, (40,), generator=generator)
    want, _ = token_logprobs(hidden, head, targets, 0.7, tile)
    got, entropy = token_logprobs(hidden, head, targets, 0.7, tile, needs_entropy=False)
    assert not entropy.any() and not entropy.requires_grad
    torch.testing.assert_close(got, want, atol=0, rtol=0)
    grads, want_grads = (torch.autograd.grad(one.square().sum(), (hidden, head)) for one in (got, want))
    for grad, want_grad in zip(grads, want_grads, strict=True):
        torch.testing.assert_close(grad, want_grad, atol=0, rtol=0)


def test_tiles_of_16_bit_types_add_up_in_float32() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(40, 16, generator=generator).bfloat16().requires_grad_()
    head = torch.randn(50, 16, generator=generator).bfloat16().requires_grad_()
    targets = torch.randint(0, 50, (40,), generator=generator)
    gradients = [
        torch.autograd.grad(token_logprobs(hidden, head, targets, 1.0, tile)[0].sum(), (hidden, head))
        for tile in (Tile(40, 50), Tile(40, 5))
    ]
    for whole, tiled in zip(*gradients, strict=True):
        torch.testing.assert_close(tiled, whole, atol=2e-2, rtol=2e-2)


def test_a_clamped_entropy_refuses_tiles_of_some_columns() -> None:
    with pytest.raises(ValueError, match="all columns"):
        token_logprobs(
            torch.zeros(2, 4),
            torch.ones(50, 4),
            torch.zeros(2, dtype=torch.long),
            tile=Tile(2, 9),
            entropy_clamp=0.3,
        )
