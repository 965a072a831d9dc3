"""Which attention a model gets, and how kernels are called.

Packed rows against padded ones are in tests/integration/test_packed_rows.py.
"""

import pytest
import torch
from transformers import AutoConfig

from hpc_rl.engines.shared import attention

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.mark.parametrize(
    ("attn_impl", "device", "dtype", "model_type", "expected"),
    [
        ("sdpa", CPU, "bfloat16", "qwen3", ("sdpa", "padded")),
        ("eager", CUDA, "bfloat16", "qwen3", ("eager", "padded")),
        ("flex_attention", CUDA, "bfloat16", "qwen3", ("flex_attention", "padded")),
        ("sdpa", CUDA, "bfloat16", "qwen3", ("packed_torch", "packed")),
        ("sdpa", CUDA, "float32", "qwen3", ("sdpa", "padded")),
        ("sdpa", CUDA, "bfloat16", "gemma2", ("sdpa", "padded")),
        ("flash_attention_2", CUDA, "bfloat16", "llama", ("packed_fa2", "packed")),
        ("flash_attention_3", CUDA, "bfloat16", "llama", ("packed_fa3", "packed")),
        ("flash_attention_2", CUDA, "bfloat16", "gemma2", ("flash_attention_2", "padded")),
    ],
)
def test_the_attention_that_is_chosen(monkeypatch, attn_impl, device, dtype, model_type, expected) -> None:
    for name in ("fa2", "fa3"):
        monkeypatch.setitem(attention.KERNELS, name, lambda: None)  # is installed
    monkeypatch.setattr(attention, "_has_varlen", lambda: True)
    architecture = AutoConfig.for_model(model_type)
    assert attention.choose(attn_impl, architecture, device, dtype, no_dropout=True) == expected


def test_attention_with_dropout_and_an_old_torch_keep_the_padded_layout(monkeypatch) -> None:
    architecture = AutoConfig.for_model("qwen3", attention_dropout=0.1)
    for no_dropout, expected in ((False, "padded"), (True, "packed")):
        chosen = attention.choose("sdpa", architecture, CUDA, "bfloat16", no_dropout)
        assert chosen[1] == expected
    monkeypatch.setattr(attention, "_import_torch_varlen", lambda: lambda query, key, value: None)
    attention._has_varlen.cache_clear()
    assert attention.choose("sdpa", architecture, CUDA, "bfloat16", True) == ("sdpa", "padded")
    attention._has_varlen.cache_clear()


def test_a_missing_kernel_is_an_import_error() -> None:
    with pytest.raises(ImportError, match="flash_attn"):
        attention.choose("flash_attention_2", AutoConfig.for_model("qwen3"), CUDA, "bfloat16", True)


@pytest.mark.parametrize("kernel", ["fa2", "fa3", "torch"])
def test_kernels_get_rows_and_window_in_their_own_words(monkeypatch, kernel) -> None:
    """A kernel that computes by torch what it was asked for stands for the one that a GPU would run."""
    rows = attention.PackedRows(torch.tensor([0, 5, 12], dtype=torch.int32), 7, (5, 7))
    query, key, value = (torch.randn(1, heads, 12, 8) for heads in (4, 2, 2))

    def flash(q, k, v, ends_q, ends_k, longest_q, longest_k, *, window_size, **options):
        assert (longest_q, longest_k) == (7, 7)
        assert ends_q is ends_k is rows.cu_seqlens
        if kernel == "torch":
            assert options == {"scale": 0.3, "enable_gqa": True}
        else:
            assert options == {"softmax_scale": 0.3, "causal": True}
        out = []
        for start, end in ((0, 5), (5, 12)):
            place = torch.arange(end - start)
            behind = place[:, None] - place
            seen = (behind >= 0) & (behind <= (window_size[0] if window_size[0] >= 0 else 99))
            parts = [one[start:end].transpose(0, 1) for one in (q, k, v)]
            one = torch.nn.functional.scaled_dot_product_attention(*parts, seen, scale=0.3, enable_gqa=True)
            out.append(one.transpose(0, 1))
        whole = torch.cat(out)
        return (whole, None) if kernel == "fa3" else whole

    monkeypatch.setitem(attention.KERNELS, kernel, lambda: flash)
    for window in (None, 3):
        got = attention.attend_packed(query, key, value, rows, 0.3, window, kernel)
        torch.testing.assert_close(got, attention.attend_packed(query, key, value, rows, 0.3, window))
