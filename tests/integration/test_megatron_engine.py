"""The engine on Megatron-core against plain transformers: layouts of 2 and 4 gloo ranks, state, exports."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import gloo_ranks
import numpy as np
import plain_lora
import plain_training
import pytest
import torch
from patience import extend
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Trainer,
    get_cosine_schedule_with_warmup,
)

from hpc_rl.config.schedule import compute_learning_rate
from hpc_rl.core.trial import load_json, write_json
from hpc_rl.engines.base import MicroBatch
from hpc_rl.engines.fsdp.engine import FSDPEngine
from hpc_rl.trainers.supervised import compute_sequence_loss

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import megatron_rank  # noqa: E402
import plain_objectives  # noqa: E402
import published_weights  # noqa: E402

pytestmark = pytest.mark.timeout(400)
SIZES = {
    "vocab_size": megatron_rank.VOCABULARY,  # odd: it is padded for tensor ranks
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
SCALED = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen2": {"model_type": "qwen2"},
    "tied": {"model_type": "qwen2", "tie_word_embeddings": True, "pad_token_id": 3},
    "qwen3": {"model_type": "qwen3", "head_dim": 12, "pad_token_id": 3},
    "llama": {"model_type": "llama", "rope_parameters": SCALED},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "head_dim": 12,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
    },
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4},
}
AS_HUGGING_FACE = {  # much decay, so that it matters where there is none
    "decay_norms_and_biases": False,
    "weight_decay": 20.0,
    "warmup_from_zero": True,
    "warmup_steps_proportion": 0.25,
}
LAYOUTS: dict[int, list[dict[str, Any]]] = {
    2: [
        {"name": "d2", "kind": "qwen2"},
        {"name": "d2-whole-optimizer", "kind": "llama", "ddp": {"use_distributed_optimizer": False}},
        {
            "name": "d2-overlap",
            "kind": "tied",
            "ddp": {"overlap_grad_reduce": True, "overlap_param_gather": True},
        },
        {"name": "t2", "kind": "qwen3", "tensor": 2, "config": {"gradient_checkpointing": True}},
        {"name": "t2-tied", "kind": "tied", "tensor": 2},
        {"name": "t2-experts", "kind": "qwen3_moe", "tensor": 2},
        {"name": "p2", "kind": "qwen2", "pipeline": 2},
        {"name": "p2-tied", "kind": "tied", "pipeline": 2},
        {"name": "p2v2", "kind": "llama", "pipeline": 2, "megatron": {"virtual_pipeline_size": 2}},
        {"name": "c2", "kind": "qwen3", "context": 2},
        {"name": "e2", "kind": "qwen3_moe", "experts": 2},
        {"name": "t2e2", "kind": "mixtral", "tensor": 2, "experts": 2},
        {"name": "d2-as-hf", "kind": "qwen2", "optimizer": AS_HUGGING_FACE},
        {"name": "t2-as-hf", "kind": "qwen3", "tensor": 2, "optimizer": AS_HUGGING_FACE},
        {"name": "fsdp-as-hf", "kind": "qwen2", "engine": "fsdp", "optimizer": AS_HUGGING_FACE},
        {"name": "fsdp", "kind": "qwen2", "engine": "fsdp"},
        {"name": "fsdp-experts", "kind": "qwen3_moe", "engine": "fsdp"},
    ],
    4: [
        {"name": "t2p2", "kind": "tied", "tensor": 2, "pipeline": 2},
        {"name": "t4", "kind": "qwen3", "tensor": 4},
        {"name": "t2c2", "kind": "qwen2", "tensor": 2, "context": 2},
        {"name": "d2p2", "kind": "llama", "pipeline": 2},
        {"name": "p2c2", "kind": "qwen3", "pipeline": 2, "context": 2},
        {"name": "d2t2e2", "kind": "mixtral", "tensor": 2, "experts": 2, "expert_tensor": 2},
    ],
}


# (what saved the state, what loads it)
MOVES = [
    ("d2", "p2"),
    ("p2", "fsdp"),
    ("fsdp", "d2"),
    ("d2-overlap", "t2-tied"),
    ("t2-tied", "p2-tied"),
    ("t2", "c2"),
    ("p2v2", "d2-whole-optimizer"),
    ("d2-whole-optimizer", "p2v2"),
    ("t2-experts", "e2"),
    ("e2", "fsdp-experts"),
    ("fsdp-experts", "t2-experts"),
]
RECOMPUTED = {"recompute_granularity": "selective", "recompute_method": None, "recompute_num_layers": None}
OTHERS: list[dict[str, Any]] = [
    {"name": "scores t2", "kind": "tied", "tensor": 2, "config": {"is_critic": True}},
    {"name": "scores p2", "kind": "qwen3", "pipeline": 2, "config": {"is_critic": True}},
    {"name": "reference c2", "kind": "llama", "context": 2, "frozen": True},
    {"name": "bfloat16 d2", "kind": "qwen3", "config": {"dtype": "bfloat16"}},
    {"name": "bfloat16 t2", "kind": "tied", "tensor": 2, "config": {"dtype": "bfloat16"}},
    {
        "name": "padded t2",
        "kind": "llama",
        "tensor": 2,
        "max_tokens": 200,
        "config": {"pad_to_maximum": True},
    },
    {"name": "refused d2", "kind": "llama", "max_tokens": 200},
    {
        "name": "recomputed p2",
        "kind": "qwen2",
        "pipeline": 2,
        "megatron": RECOMPUTED,
        "config": {"gradient_checkpointing": True},
    },
    {
        "name": "recomputed norms t2",
        "kind": "qwen3",
        "tensor": 2,
        "megatron": {**RECOMPUTED, "recompute_modules": ["core_attn", "layernorm", "mlp"]},
        "config": {"gradient_checkpointing": True},
    },
    *(
        {"name": f"scratch {kind}", "kind": kind, **sizes, "config": {"init_from_scratch": True}}
        for kind, sizes in (
            ("tied", {"pipeline": 2}),
            ("qwen3", {"tensor": 2}),
            ("qwen3_moe", {"experts": 2}),
        )
    ),
]


ADAM = {"lr": 1e-3, "weight_decay": 0.01, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}
ADAM |= {"lr_scheduler_type": "constant", "warmup_steps_proportion": 0.0}
OBJECTIVES: list[dict[str, Any]] = [
    {
        "name": f"{objective} {name}",
        "objective": objective,
        "of": of,
        "kind": f"critic of {of}" if objective == "critic" else of,
        "optimizer": ADAM,
        "config": {"is_critic": True} if objective == "critic" else {},
        "granularity": 2,
        **sizes,
    }
    for objective in ("critic", "dpo", "top")
    for name, of, sizes in (
        ("t2", "qwen3", {"tensor": 2}),
        ("p2", "qwen2", {"pipeline": 2}),
        ("e2", "qwen3_moe", {"experts": 2}),
    )
]


# what only differs in config.json from a model that there is
UNSUITED = {
    "gemma": {"model_type": "gemma"},
    "yarn": {
        "model_type": "qwen2",
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0},
    },
    "biased": {"model_type": "llama", "attention_bias": True},
    "noisy": {"model_type": "llama", "attention_dropout": 0.1},
}
REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "another architecture": (
        {"kind": "gemma"},
        "gemma model, but the megatron backend can train llama, .* use fsdp",
    ),
    "positions": ({"kind": "yarn"}, "rope_type: yarn .*use fsdp"),
    "a bias": ({"kind": "biased"}, "attention_bias: True .*use fsdp"),
    "dropout": ({"kind": "noisy"}, "set disable_dropout true"),
    "heads": ({"kind": "qwen2", "tensor": 3}, "its 4 attention heads can't be divided by t3"),
    "layers": ({"kind": "qwen2", "pipeline": 3}, "its 4 layers can't be divided by p3"),
    "chunks": (
        {"kind": "qwen2", "pipeline": 2, "megatron": {"virtual_pipeline_size": 3}},
        "its 4 layers can't be divided by p2 times 3 chunks",
    ),
    "no pipeline": (
        {"kind": "qwen2", "megatron": {"virtual_pipeline_size": 2}},
        "2 virtual stages need a pipeline",
    ),
    "experts": ({"kind": "mixtral", "experts": 3}, "its 4 experts can't be divided by e3"),
    "no experts": ({"kind": "qwen2", "experts": 2}, "it has no experts for e2"),
}


OF_ADAPTERS = {
    "qwen2": plain_training.ARCHITECTURES["qwen2"],
    "tied": plain_training.ARCHITECTURES["tied"],
    "qwen3_moe": {
        **plain_training.ARCHITECTURES["qwen3"],
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
    },
}
RECOMPUTED = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
ADAPTERS: list[dict[str, Any]] = [
    {"name": "adapter t2", "kind": "qwen2", "tensor": 2},
    {
        "name": "adapter p2",
        "kind": "tied",
        "pipeline": 2,
        "megatron": RECOMPUTED,
        "config": {"gradient_checkpointing": True},
    },
    {"name": "adapter e2", "kind": "qwen3_moe", "experts": 2},
]


def make(folder: Path, kind: str) -> None:
    """Write a random model whose norms and biases matter."""
    options = {**SIZES, "tie_word_embeddings": False, **MODELS[kind]}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**options), dtype=torch.float32)
    for name, parameter in model.named_parameters():
        parameter.data.normal_(std=0.2).add_(1.0 if "norm" in name else 0.0)
    model.save_pretrained(folder / kind)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("megatron")
    torch.manual_seed(1)
    for kind in MODELS:
        make(path, kind)
    for kind, architecture in OF_ADAPTERS.items():
        plain_training.write_model(path / f"lora-{kind}", architecture)
        plain_lora.write_adapter(
            path / f"lora-{kind}",
            path / f"lora-{kind}-adapter",
            plain_lora.ATTENTION if "num_experts" in architecture else "all-linear",
        )
    for name, options in UNSUITED.items():
        AutoConfig.for_model(**{**SIZES, **options}).save_pretrained(path / name)
    return path


class Plain:
    """What a model of transformers and AdamW of PyTorch do with the same batches, a row at a time."""

    def __init__(self, path: Path, as_hugging_face: bool = False) -> None:
        self.as_hugging_face = as_hugging_face
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self.logprobs = [one.tolist() for one in self.forward(0)]
        self.gradients: dict[str, torch.Tensor] = {}
        self.steps = self.train()

    def forward(self, step: int) -> list[torch.Tensor]:
        rows = megatron_rank.batch(step)
        found = []
        for ids, mask in zip(rows.ids, rows.columns["loss_mask"], strict=True):
            ids_T = torch.from_numpy(ids).long()
            logits = self.model(ids_T[None]).logits[0, :-1] / megatron_rank.TEMPERATURE
            logprobs = torch.log_softmax(logits, 1).gather(1, ids_T[1:, None]).squeeze(1)
            found.append(torch.cat([torch.zeros(1), logprobs]) * torch.from_numpy(mask))
        return found

    def train(self) -> list[dict[str, float]]:
        config, out = megatron_rank.OPTIMIZER, []
        settings = {"lr": config.lr, "betas": (config.beta1, config.beta2), "eps": config.eps}
        adam = torch.optim.AdamW(self.model.parameters(), weight_decay=config.weight_decay, **settings)
        schedule = None
        if self.as_hugging_face:
            decayed = Trainer.get_decay_parameter_names(None, self.model)
            parts: tuple[list, list] = ([], [])
            for name, one in self.model.named_parameters():
                parts[name in decayed].append(one)
            bare, rest = (
                {"params": part, "weight_decay": decay}
                for part, decay in zip(parts, (0.0, 20.0), strict=True)
            )
            adam = torch.optim.AdamW([bare, rest], **settings)
            # a quarter of ten updates, rounded up
            schedule = get_cosine_schedule_with_warmup(adam, 3, megatron_rank.NUM_STEPS)
        for step in range(megatron_rank.NUM_STEPS):
            logprobs_T = torch.cat(self.forward(step))
            masks = np.concatenate(megatron_rank.batch(step).columns["loss_mask"])
            columns = {"loss_mask": torch.from_numpy(masks)}
            seen = MicroBatch(
                logprobs_T, torch.zeros_like(logprobs_T), columns, torch.zeros_like(logprobs_T).long()
            )
            loss = compute_sequence_loss(seen)[0] / megatron_rank.WEIGHT
            adam.zero_grad()
            loss.backward()
            grads = {name: one.grad for name, one in self.model.named_parameters()}
            norm = torch.stack([one.norm() for one in grads.values()]).norm().item()
            if step == 0:
                self.gradients = {name: one.clone() for name, one in grads.items()}
            if schedule is None:
                adam.param_groups[0]["lr"] = compute_learning_rate(config, step, megatron_rank.NUM_STEPS)
            adam.step()
            if schedule is not None:
                schedule.step()
            out.append({"loss": loss.item(), "grad_norm": norm})
        return out


@pytest.fixture(scope="module")
def plain(folder: Path) -> dict[str, Plain]:
    known = {kind: Plain(folder / kind) for kind in MODELS}
    return known | {
        f"{kind}-as-hf": Plain(folder / kind, as_hugging_face=True) for kind in ("qwen2", "qwen3")
    }


def run(folder: Path, num_ranks: int) -> None:
    plan: dict[str, Any] = {"layouts": LAYOUTS[num_ranks], "refusals": {}}
    plan |= {"moves": [], "others": [], "objectives": [], "adapters": []}
    if num_ranks == 2:
        plan |= {"moves": MOVES, "others": OTHERS, "objectives": OBJECTIVES, "adapters": ADAPTERS}
        for layout in OBJECTIVES:
            if layout["objective"] == "critic":
                plain_objectives.make_critic(folder / layout["of"], folder / layout["kind"])
        plan["refusals"] = {name: layout for name, (layout, _) in REFUSALS.items()}
    write_json(folder / f"layouts-{num_ranks}.json", plan)
    gloo_ranks.run(HERE / "megatron_rank.py", "layouts", num_ranks, folder, timeout_s=300)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_chains_of_fifty_versions_equal_exports(folder, monkeypatch):
    monkeypatch.setenv(published_weights.LENGTH_VARIABLE, "50")
    layouts = [{**layout, "name": f"chain {layout['name']}"} for layout in LAYOUTS[2]]
    plan: dict[str, Any] = {"layouts": layouts, "refusals": {}}
    plan |= {"moves": [], "others": [], "objectives": [], "adapters": []}
    write_json(folder / "layouts-2.json", plan)
    gloo_ranks.run(HERE / "megatron_rank.py", "layouts", 2, folder, timeout_s=1800)


@pytest.fixture(scope="module")
def two_ranks(folder: Path) -> None:
    run(folder, 2)


@pytest.fixture(scope="module")
def four_ranks(folder: Path) -> None:
    run(folder, 4)


def saved(folder: Path, num_ranks: int, kind: str) -> dict[str, torch.Tensor]:
    """Whole tensors of one kind from the state of all ranks; each number must be there once."""
    wholes: dict[str, torch.Tensor] = {}
    counts: dict[str, torch.Tensor] = {}
    for rank in range(num_ranks):
        with safe_open(folder / f"actor-rank-{rank:05d}.safetensors", framework="pt") as opened:
            state = json.loads(opened.metadata()["state"])
            for key, piece in state["pieces"].items():
                if piece["kind"] != kind:
                    continue
                shape, name, values = state["shapes"][piece["name"]], piece["name"], opened.get_tensor(key)
                part = tuple(
                    slice(at, at + size) for at, size in zip(piece["offset"], values.shape, strict=True)
                )
                wholes.setdefault(name, torch.zeros(shape))[part] = values
                counts.setdefault(name, torch.zeros(shape))[part] += 1
    assert all(bool((one == 1).all()) for one in counts.values())
    return wholes


def results(folder: Path, name: str, num_ranks: int = 2) -> list[dict[str, Any]]:
    return [load_json(folder / f"{name}-{num_ranks}-{rank}.json") for rank in range(num_ranks)]


def logprobs_of(found: list[dict[str, Any]]) -> list[list[float]]:
    """Numbers of all rows; peers must have the same."""
    numbers: dict[int, list[float]] = {}
    for one in found:
        for row, values in zip(one["rows"], one["logprobs"], strict=True):
            assert values == pytest.approx(numbers.setdefault(row, values), abs=1e-6)
    return [numbers[row] for row in range(len(megatron_rank.LENGTHS))]


def check(folder: Path, layout: dict[str, Any], num_ranks: int, want: Plain) -> None:
    found = results(folder, layout["name"], num_ranks)
    assert all(one["steps"] == found[0]["steps"] for one in found)
    for values, wanted in zip(logprobs_of(found), want.logprobs, strict=True):
        assert values == pytest.approx(wanted, abs=1e-5)
    out = folder / f"{layout['name']}-{num_ranks}"
    first_moments = saved(out, num_ranks, "exp_avg")
    assert first_moments.keys() == want.gradients.keys()
    for name, gradient in want.gradients.items():
        got = first_moments[name] / (1 - megatron_rank.OPTIMIZER.beta1)
        torch.testing.assert_close(
            got, gradient, atol=1e-5, rtol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )
    for got, step in zip(found[0]["steps"], want.steps, strict=True):
        assert got["loss"] == pytest.approx(step["loss"], abs=1e-4)
        assert got["grad_norm"] == pytest.approx(step["grad_norm"], rel=1e-3)
    assert found[0]["steps"][0]["loss"] == pytest.approx(want.steps[0]["loss"], abs=1e-5)
    original, untrained = (
        load_file(folder / layout["kind"] / "model.safetensors"),
        load_file(out / "untrained" / "model.safetensors"),
    )
    assert original.keys() == untrained.keys()
    assert all(torch.equal(original[name], untrained[name]) for name in original)


@pytest.mark.parametrize("layout", LAYOUTS[2], ids=lambda layout: layout["name"])
def test_two_ranks_compute_what_transformers_does(folder, plain, two_ranks, layout):
    kind = layout["kind"]
    check(folder, layout, 2, plain[f"{kind}-as-hf" if "optimizer" in layout else kind])


@pytest.mark.parametrize(("saved_by", "name"), MOVES, ids=lambda name: name)
def test_state_moves_between_layouts_and_engines(folder, plain, two_ranks, saved_by, name):
    kind = next(layout["kind"] for layout in LAYOUTS[2] if layout["name"] == name)
    for one in results(folder, f"{saved_by} {name}"):
        assert one["counters"] == {"updates": 3, "adam_steps": 3}
        for got, step in zip(one["steps"], plain[kind].steps[1:3], strict=True):
            assert got["loss"] == pytest.approx(step["loss"], abs=1e-4)
            assert got["grad_norm"] == pytest.approx(step["grad_norm"], rel=1e-3)


@pytest.mark.parametrize(
    "name", ["reference c2", "padded t2", "recomputed p2", "recomputed norms t2", "refused d2"]
)
def test_references_padding_and_recomputation_change_no_number(folder, plain, two_ranks, name):
    want = plain[next(layout["kind"] for layout in OTHERS if layout["name"] == name)]
    found = results(folder, name)
    for values, wanted in zip(logprobs_of(found), want.logprobs, strict=True):
        assert values == pytest.approx(wanted, abs=1e-5)
    if "step" in found[0]:
        assert found[0]["step"]["grad_norm"] == pytest.approx(want.steps[0]["grad_norm"], rel=1e-5)


@pytest.mark.parametrize("layout", OBJECTIVES, ids=lambda layout: layout["name"])
def test_two_ranks_train_other_objectives_as_plain_code_does(folder, two_ranks, layout):
    wanted = plain_objectives.plain(folder / layout["kind"], layout["objective"])
    plain_objectives.check(results(folder, layout["name"]), wanted)


@pytest.mark.parametrize("layout", ADAPTERS, ids=lambda layout: layout["name"])
def test_two_ranks_train_an_adapter_as_peft_does(folder, two_ranks, layout):
    model, out = folder / f"lora-{layout['kind']}", folder / layout["name"]
    adapter = model.with_name(f"{model.name}-adapter")
    plain_lora.check(model, adapter, plain_lora.plain(model, adapter), out, 2)
    single = FSDPEngine(plain_training.config_of(model, **plain_lora.OPTIONS))
    single.initialize(plain_lora.NUM_STEPS, empty=True)
    single.load(out, 2)
    single.export(out / "loaded")
    theirs = load_file(out / "exported" / "adapter_model.safetensors")
    for name, tensor in load_file(out / "loaded" / "adapter_model.safetensors").items():
        torch.testing.assert_close(tensor, theirs[name], atol=0, rtol=0)


@pytest.mark.parametrize("name", ["bfloat16 d2", "bfloat16 t2"])
def test_bfloat16_is_near(folder, plain, two_ranks, name):
    want = plain[next(layout["kind"] for layout in OTHERS if layout["name"] == name)]
    assert results(folder, name)[0]["step"]["loss"] == pytest.approx(want.steps[0]["loss"], rel=0.02)


@pytest.mark.parametrize("name", ["scores t2", "scores p2", "bfloat16 d2", "padded t2", "scratch qwen3_moe"])
def test_a_gradient_that_is_not_finite_skips_the_update_on_all_ranks(folder, two_ranks, name):
    for one in results(folder, name):
        assert one["broken"] == {"update_successful": 0.0, "unchanged": True, "next": 1.0}


def test_a_row_that_does_not_fit_is_refused_on_all_ranks(folder, two_ranks):
    assert all("max_tokens_per_mb" in one["refused"] for one in results(folder, "refused d2"))


@pytest.mark.parametrize("name", REFUSALS)
def test_what_can_not_be_is_refused_in_words(folder, two_ranks, name):
    assert re.search(REFUSALS[name][1], results(folder, "refusals")[0][name])


@pytest.mark.parametrize("name", ["scores t2", "scores p2"])
def test_a_reward_model_scores_tokens_as_transformers_does(folder, two_ranks, name):
    out = folder / f"{name}-2"
    model = AutoModelForSequenceClassification.from_pretrained(out, dtype=torch.float32)
    rows = megatron_rank.batch(0)
    for ids, mask, values in zip(
        rows.ids, rows.columns["loss_mask"], logprobs_of(results(folder, name)), strict=True
    ):
        hidden = model.model(torch.from_numpy(ids).long()[None]).last_hidden_state
        scores = model.score(hidden)[0, :, 0] * torch.from_numpy(mask)
        assert values == pytest.approx(scores.tolist(), abs=1e-5)
    torch.manual_seed(megatron_rank.SEED)  # the head, which the files do not have, is drawn
    kind = next(layout["kind"] for layout in OTHERS if layout["name"] == name)
    drawn = AutoModelForSequenceClassification.from_pretrained(folder / kind, num_labels=1).score.weight
    assert torch.equal(load_file(out / "model.safetensors")["score.weight"], drawn)


@pytest.mark.parametrize("kind", ["tied", "qwen3", "qwen3_moe"])
def test_random_weights_are_those_of_the_whole_model(folder, two_ranks, kind):
    torch.manual_seed(megatron_rank.SEED)
    want = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder / kind), dtype=torch.float32)
    got = AutoModelForCausalLM.from_pretrained(folder / f"scratch {kind}-2", dtype=torch.float32)
    for name, value in want.named_parameters():
        assert torch.equal(got.get_parameter(name), value), name


LOADED = """
import sys
from hpc_rl.engines.megatron import shim
shim.install()
from transformers import AutoModelForCausalLM
print(AutoModelForCausalLM.from_pretrained(sys.argv[1]).model.rotary_emb.inv_freq.tolist())
"""


def test_models_that_transformers_loads_beside_megatron_are_whole(folder):
    path = folder / "tied"
    done = subprocess.run(
        [sys.executable, "-c", LOADED, path], capture_output=True, text=True, timeout=extend(120)
    )
    want = AutoModelForCausalLM.from_pretrained(path).model.rotary_emb.inv_freq.tolist()
    assert done.stdout.splitlines()[-1:] == [str(want)], done.stderr[-2000:]


@pytest.mark.soak
@pytest.mark.parametrize("layout", LAYOUTS[4], ids=lambda layout: layout["name"])
def test_four_ranks_compute_what_transformers_does(folder, plain, four_ranks, layout):
    check(folder, layout, 4, plain[layout["kind"]])
