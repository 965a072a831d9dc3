"""The faster layers against transformers': outputs and gradients of each architecture."""

import copy
from collections import Counter

import pytest
import torch
from exact_models import measure_error, widen
from transformers import AutoConfig, AutoModelForCausalLM

from hpc_rl.engines.shared import attention, compiled, fast_layers
from hpc_rl.engines.shared.lora import AdaptedLinear


def build(model_type: str, **more):
    options = {"attn_implementation": "sdpa"}
    config = AutoConfig.for_model(
        model_type,
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        pad_token_id=None,
        **({"sliding_window": None} | more),
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, **options)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:  # norms and biases
            torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.3)
    return model


def find_results(model, hidden: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the hidden states and the gradients of a weighted sum of them, in float64."""
    model.zero_grad()
    weights = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(1))
    (hidden * weights).sum().backward()
    grads = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    return {name: one.detach().double() for name, one in {"hidden": hidden, **grads}.items()}


def compare(plain, compiles: bool = False) -> None:
    """Compare hidden states and gradients of a model with and without the faster layers.

    Both round differently, and large weights amplify it. So for each tensor the mean error of several inputs,
    relative to float64, is at most twice the one of transformers.
    """
    fast, exact = copy.deepcopy(plain), widen(plain)
    assert fast_layers.fits(fast)
    fast_layers.install(fast)
    if compiles:
        compiled.compile_layers(fast.base_model.layers)
    own_errors, their_errors = Counter[str](), Counter[str]()
    for seed in range(8):
        ids = draw_ids(seed)
        got = find_results(fast, fast_layers.compute_trunk(fast.base_model, ids, None))
        theirs, want = (
            find_results(one, one.base_model(input_ids=ids, use_cache=False).last_hidden_state)
            for one in (plain, exact)
        )
        assert got.keys() == theirs.keys() == want.keys()
        for name, value in want.items():
            own_errors[name] += measure_error(got[name], value)
            their_errors[name] += measure_error(theirs[name], value)
    assert max(their_errors.values()) / 8 < 1e-4  # float64 computes the same model
    too_large = {name for name, error in own_errors.items() if error > 2 * their_errors[name]}
    assert not too_large, [(name, own_errors[name], their_errors[name]) for name in too_large]


def draw_ids(seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 50, (3, 11), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("model_type", fast_layers.ARCHITECTURES)
def test_results_equal_transformers(model_type: str) -> None:
    compare(build(model_type))


@pytest.mark.waits
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # hidden by PyTorch
@pytest.mark.parametrize("model_type", fast_layers.ARCHITECTURES)
def test_results_of_compiled_layers_equal_transformers(model_type: str, monkeypatch) -> None:
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")  # inductor takes seconds
    compare(build(model_type), compiles=True)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({"attention_bias": True}, id="biases"),
        pytest.param(
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, id="rope"
        ),
        pytest.param({"tie_word_embeddings": True}, id="tied"),
    ],
)
def test_options_of_an_architecture_equal_transformers(more) -> None:
    compare(build("llama", **more))


def test_recomputed_activations_give_the_same_gradients() -> None:
    plain = build("qwen3").train()
    plain.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    compare(plain)


def test_adapters_stay_beside_their_matrices() -> None:
    plain = build("qwen2")
    for layer in plain.model.layers:
        for linear in (layer.self_attn.q_proj, layer.mlp.up_proj):
            AdaptedLinear.adapt(linear, 2, 0.5)
            torch.nn.init.normal_(linear.lora_A.weight)
            torch.nn.init.normal_(linear.lora_B.weight)
    compare(plain)


@pytest.mark.parametrize(
    ("model_type", "more"),
    [
        pytest.param("gemma", {}, id="another-architecture"),
        pytest.param(
            "qwen3", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}, id="window"
        ),
        pytest.param("llama", {"hidden_act": "gelu"}, id="another-activation"),
    ],
)
def test_other_models_keep_their_layers(model_type: str, more) -> None:
    assert not fast_layers.fits(build(model_type, **more))


def test_packed_rows_equal_rows_of_their_own() -> None:
    model = build("qwen3")
    fast_layers.install(model)
    ids = draw_ids()
    want = fast_layers.compute_trunk(model.base_model, ids, None).flatten(0, 1)
    model.config._attn_implementation = "packed_rows"
    rows = attention.PackedRows(torch.tensor([0, 11, 22, 33], dtype=torch.int32), 11, (11, 11, 11))
    at = torch.arange(11).repeat(3)[None]
    got = fast_layers.compute_trunk(model.base_model, ids.view(1, -1), at, packed_rows=rows)[0]
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-6)


def test_nothing_in_a_pass_reads_from_the_device() -> None:
    model = build("qwen3")
    fast_layers.install(model)
    seen: list[str] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Watch():
        fast_layers.compute_trunk(model.base_model, draw_ids(), None).sum().backward()
    assert not [one for one in seen if "local_scalar_dense" in one or "nonzero" in one]
    assert len(seen) > 50
