"""Estimates of a trial against manual calculations: three models on 1, 4 and 16 nodes of 8 GPUs."""

import json
import math
import re
from pathlib import Path

import pytest
import torch
from model_shapes import LLAMA3_70B, QWEN3_8B, QWEN3_30B_A3B, QWEN3_32B
from pytest import approx
from transformers import AutoConfig, AutoModelForCausalLM

from hpc_rl.config.load.load import load
from hpc_rl.config.options.training import TrainEngineConfig
from hpc_rl.config.rules.check import check
from hpc_rl.core.allocation import parse
from hpc_rl.engines.shared import hf_io, logprobs, lora
from hpc_rl.plan import memory
from hpc_rl.plan.estimate import STORED_MODELS, Estimate, estimate
from hpc_rl.plan.memory import ModelShape
from hpc_rl.plan.plan import make_plan
from hpc_rl.trials import needs
from hpc_rl.weight_files.chain import MAX_CHAIN
from hpc_rl.weights import disk

SFT = ["experiment_name=e", "trial_name=t", "train_dataset.path=/t", "train_dataset.batch_size=1024"]
GPUS = ["model.path=/m", "train_dataset.max_length=8192", "total_train_steps=100"]
GRPO = ["actor.path=/m", "gconfig.n_samples=8", "gconfig.max_new_tokens=3072"]
GRPO += ["train_dataset.max_length=1024"]
CLOSE = 0.15


def estimate_needs(
    content: dict, *overrides: str, base=(*SFT, *GPUS), reference: dict | None = None
) -> Estimate:
    checked = check(load([], [*base, "cluster.n_gpus_per_node=8", *overrides]), files=False)
    plan = make_plan(checked.config, checked.explicit, interpreter="python", scheduler="slurm")
    models = {"/m": content, "/r": reference or content}
    found = estimate(checked.config, plan, models, requests_memory=True)
    assert found is not None
    needs.describe_needs(found, checked.config, plan)
    json.dumps(needs.make_json(found))
    return found


@pytest.mark.parametrize(
    ("content", "params"),
    [(QWEN3_8B, 8_190_735_360), (QWEN3_32B, 32_762_123_264), (LLAMA3_70B, 70_553_706_496)],
    ids=["8B", "32B", "70B"],
)
def test_parameters_are_counted(content, params):
    assert ModelShape.of(content).num_params == params


TINY = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "vocab_size": 96}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2}
TINY_QWEN3 = {"model_type": "qwen3", **TINY}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


@pytest.mark.parametrize(
    "content",
    [
        {"model_type": "qwen2", "tie_word_embeddings": True},
        {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": False},
        {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
        {"model_type": "mistral", "head_dim": 8},
        {"model_type": "qwen3_moe", "head_dim": 16, **EXPERTS},
        {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 24, **EXPERTS},
    ],
    ids=lambda content: content["model_type"],
)
def test_transformers_makes_as_many_parameters(content):
    config = AutoConfig.for_model(**TINY, **content)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert ModelShape.of(TINY | content).num_params == sum(one.numel() for one in model.parameters())


ADAPTER = ["actor.use_lora=true", "actor.lora_rank=16", "actor.kl_ctl=0"]
ONE_NODE = ["allocation_mode=sglang:d1t4+fsdp:d4", "actor.mb_spec.max_tokens_per_mb=8192"]


def test_an_adapter_of_a_70b_model_trains_on_one_node():
    """Rank 16 at all linear layers: per layer 16 (16384 + 2 * 9216 + 16384 + 3 * 36864) = 2,588,672."""
    base = [*SFT, *GRPO, *ONE_NODE, "total_train_steps=100", "recover.mode=auto"]
    found = estimate_needs(LLAMA3_70B, *ADAPTER, "cluster.gpu_mem_gb=80", base=base)
    standing, params = found.trainer.standing, 80 * 2_588_672
    assert standing["frozen parameters"] == 2 * 70_553_706_496 / 4
    assert (standing["parameters"], standing["Adam moments"]) == (4 * params / 4, 8 * params / 4)
    assert "gradient of the head" not in found.trainer.moments["the loss"]
    assert (found.disk.checkpoint, found.disk.weights, found.disk.export) == (
        12 * params,
        2 * params,
        2 * params,
    )
    assert not found.problems
    merged = estimate_needs(LLAMA3_70B, *ADAPTER, "actor.lora_publish=merged", base=base)
    assert merged.disk.weights == 2 * 70_553_706_496 and merged.disk.export == 2 * params
    assert estimate_needs(LLAMA3_70B, "actor.kl_ctl=0", "cluster.gpu_mem_gb=80", base=base).problems


@pytest.mark.parametrize(
    "content",
    [
        {"model_type": "llama", "num_key_value_heads": 2},
        {"model_type": "qwen3", "head_dim": 16},
        {"model_type": "qwen3_moe", "head_dim": 16, **EXPERTS},
    ],
    ids=lambda content: content["model_type"],
)
@pytest.mark.parametrize("targets", [[], ["q_proj", "v_proj"]])
def test_an_adapter_has_as_many_parameters_as_is_estimated(content, targets):
    config = AutoConfig.for_model(**TINY | content)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shapes = lora.list_shapes(lora.find_targets(model, targets), 3)
    engine = TrainEngineConfig(path="/m", use_lora=True, lora_rank=3, target_modules=targets)
    assert memory.count_trained(ModelShape.of(TINY | content), engine) == sum(map(math.prod, shapes.values()))


def test_a_reward_model_has_no_head():
    base = [*SFT, *GPUS, "trainer=rw"]
    moments = estimate_needs(QWEN3_8B, base=base).trainer.moments
    assert "logits of a chunk" not in moments["the loss"]
    assert moments["the loss"]["gathered blocks"] == approx(2 * (0.622e9 + 2 * 0.193e9), rel=CLOSE)


def test_other_models_are_not_guessed():
    assert ModelShape.of({"model_type": "gpt2", "n_embd": 768, "vocab_size": 50257}) is None
    assert ModelShape.of({}) is None


def test_experts_count_whole_but_compute_in_part():
    shape = ModelShape.of(QWEN3_30B_A3B)
    assert shape.num_params == approx(30.53e9, rel=0.001)
    assert shape.active_mlp_width == 8 * 768


# By hand, in billions of bytes, for micro-batches of 32,768 tokens in bfloat16. Per model:
# - params: P.
# - gathered: 2 bytes of embedding, head and two layers: 8B 2 x (1.245 + 2 x 0.193); 32B 2 x (1.556 + 2 x 0.488);
#   70B 2 x (2.101 + 2 x 0.856).
# - inputs of the layers, L x 32768 x H x 2: 8B 36 x 268 MB; 32B 64 x 336 MB; 70B 80 x 537 MB.
# - one layer again: per token two norms at 8 bytes a value and the residual (18 H), norms of queries and keys (6 bytes),
#   queries, keys, values and result (2 bytes), four of the MLP's width (8 I): 8B 223 kB, 32B 389 kB, 70B 414 kB,
#   times 32768.
# - flowing: gradients of twice the MLP's width and twice H, 4 x (I + H) bytes: 8B 65.5 kB, 32B 123 kB, 70B 147 kB.
# - head: its gradient in bfloat16, V x H x 2.
# - layer: its gradients in bfloat16, and in float32 those that are summed: 6 bytes x 0.193, 0.488, 0.856.
BY_HAND = {
    "8B": (QWEN3_8B, 8.191, {"gathered": 3.26, "activations": 9.66 + 7.31, "flowing": 2.15, "head": 1.245, "layer": 1.16}),
    "32B": (QWEN3_32B, 32.76, {"gathered": 5.06, "activations": 21.5 + 12.7, "flowing": 4.03, "head": 1.556, "layer": 2.93}),
    "70B": (LLAMA3_70B, 70.55, {"gathered": 7.63, "activations": 42.9 + 13.6, "flowing": 4.83, "head": 2.10, "layer": 5.13}),
}  # fmt: skip
NAMES = {
    "gathered": "gathered blocks",
    "activations": "activations",
    "flowing": "gradients of activations",
    "head": "gradient of the head",
    "layer": "gradients of a layer",
}


@pytest.mark.parametrize("n_nodes", [1, 4, 16])
@pytest.mark.parametrize("name", BY_HAND)
def test_items_are_those_of_a_hand_calculation(name, n_nodes):
    content, params, by_hand = BY_HAND[name]
    ranks = 8 * n_nodes
    found = estimate_needs(
        content, f"cluster.n_nodes={n_nodes}", "recover.mode=auto", "recover.freq_steps=10"
    )
    assert (found.ranks, found.load.tokens) == (ranks, 32768)
    moment = found.trainer.moments["the backward pass of a layer"]
    for short, size in by_hand.items():
        assert moment[NAMES[short]] / 1e9 == approx(size, rel=CLOSE), short
    standing = found.trainer.standing
    assert standing["parameters"] / 1e9 == approx(4 * params / ranks, rel=CLOSE)
    assert standing["gradients"] / 1e9 == approx(4 * params / ranks, rel=CLOSE)
    assert standing["Adam moments"] / 1e9 == approx(8 * params / ranks, rel=CLOSE)
    total = 16 * params / ranks + sum(by_hand.values()) + 2 * 1.074
    assert found.trainer.device_bytes / 1e9 == approx(total, rel=CLOSE)
    # a checkpoint is copied in blocks while it is written; the first rank has a file of weights to export
    assert "copy of the state to be saved" not in found.trainer.host
    assert found.trainer.first["a file of weights"] / 1e9 == 5
    node = 8 * (3.2 + 0.3) + 5
    assert found.node_host_bytes / 1e9 == approx(node, rel=CLOSE)
    # three checkpoints of 12 bytes a parameter, one of which is being written; the export at the end
    assert found.disk.checkpoint / 1e9 == approx(12 * params, rel=CLOSE)
    assert found.disk.kept_checkpoints / 1e9 == approx(3 * 12 * params, rel=CLOSE)
    assert found.disk.kept_exports / 1e9 == approx(2 * params, rel=CLOSE)


def test_logits_take_a_chunk_and_without_recomputation_every_layer_is_kept():
    found = estimate_needs(
        QWEN3_8B, "model.gradient_checkpointing=false", "model.mb_spec.max_tokens_per_mb=8192"
    )
    assert found.trainer.largest == "the loss"
    loss = found.trainer.moments["the loss"]
    # 2208 rows x 151,936: the gradient in float32 and in bfloat16
    assert loss["logits of a chunk"] == approx(2208 * 151_936 * 6, rel=CLOSE)
    assert loss["gradient of the head"] == approx(151_936 * 4096 * 4, rel=CLOSE)
    assert loss["activations"] == approx(36 * 8192 * 223e3, rel=CLOSE)  # 223 kB a token, as above
    assert loss["activations"] > 6 * estimate_needs(
        QWEN3_8B, "model.mb_spec.max_tokens_per_mb=8192"
    ).trainer.moments["the loss"].get("activations", 0)


def test_offloading_moves_to_cpu_memory():
    moments = estimate_needs(QWEN3_32B, "model.optimizer.offload=true")
    assert "Adam moments" not in moments.trainer.standing
    moved = "parameters, moments and gradients"
    assert moments.trainer.host[moved] == approx(16 * 32.76e9 / 8, rel=CLOSE)
    parameters = estimate_needs(QWEN3_32B, "model.fsdp.offload_params=true")
    assert set(parameters.trainer.standing) == {"CUDA and NCCL"}
    assert parameters.trainer.host[moved] == approx(16 * 32.76e9 / 8, rel=CLOSE)
    budget = "model.mb_spec.max_tokens_per_mb=16384"
    kept = estimate_needs(QWEN3_32B, budget)
    offloaded = estimate_needs(QWEN3_32B, budget, "model.fsdp.offload_activations=true")
    layers = 64 * 16384 * 5120 * 2  # the input of each
    before, after = (found.trainer.moments["the loss"]["activations"] for found in (kept, offloaded))
    assert before - after == approx(layers, rel=CLOSE)
    # page-locked memory is given in powers of two: 256 MB for 160
    assert offloaded.trainer.host["activations"] == approx(64 * 2**28, rel=CLOSE)


def test_a_size_that_is_not_known_refuses_nothing():
    found = estimate_needs(LLAMA3_70B, "launcher.trainer_mem_per_gpu=300000")
    assert not found.problems
    assert any("cluster.gpu_mem_gb" in note for note in map(str, found.notes))


def test_70b_on_one_node_is_refused_with_what_fits():
    [problem] = map(
        str,
        estimate_needs(LLAMA3_70B, "cluster.gpu_mem_gb=80", "launcher.trainer_mem_per_gpu=300000").problems,
    )
    assert "cluster.gpu_mem_gb 80 leaves 79.0 GB" in problem
    assert "Adam moments 65.7 GB" in problem
    ways = problem.partition("What fits: ")[2]
    assert "model.fsdp.offload_params true (launcher.trainer_mem_per_gpu 139000)" in ways
    ranks = int(ways.partition("fsdp:d")[2].split()[0])
    budget = f"fsdp:d{ranks} or more ranks with model.mb_spec.max_tokens_per_mb "
    tokens = ways.partition(budget)[2].split()[0]
    for budget, fits in ((int(tokens), True), (int(tokens) + 1024, False)):
        options = [f"cluster.n_nodes={ranks // 8}", f"model.mb_spec.max_tokens_per_mb={budget}"]
        roomy = ["cluster.gpu_mem_gb=80", "launcher.trainer_mem_per_gpu=300000"]
        assert bool(estimate_needs(LLAMA3_70B, *options, *roomy).problems) is not fits


def test_what_is_named_as_fitting_does_fit():
    roomy = ["cluster.gpu_mem_gb=80", "launcher.trainer_mem_per_gpu=600000"]
    assert estimate_needs(QWEN3_32B, *roomy).problems
    assert not estimate_needs(QWEN3_32B, *roomy, "cluster.n_nodes=4").problems
    assert not estimate_needs(QWEN3_8B, *roomy).problems
    offloaded = ["model.fsdp.offload_params=true", "launcher.trainer_mem_per_gpu=139000"]
    assert not estimate_needs(LLAMA3_70B, *roomy, *offloaded).problems
    budget = ["cluster.n_nodes=2", "model.mb_spec.max_tokens_per_mb=65536"]
    [problem] = map(str, estimate_needs(QWEN3_32B, *roomy, *budget).problems)
    assert "model.fsdp.offload_activations true (launcher.trainer_mem_per_gpu 70000);" in problem
    inputs = ["model.fsdp.offload_activations=true", "launcher.trainer_mem_per_gpu=70000"]
    assert not estimate_needs(QWEN3_32B, *roomy, *budget, *inputs).problems


def test_cpu_memory_that_the_plan_requests_must_hold_the_ranks():
    saves = ["recover.mode=auto", "recover.freq_steps=10"]
    assert not estimate_needs(QWEN3_32B, *saves).problems  # no rank has a copy of its state
    saves.append("recover.async_save=true")
    found = estimate_needs(QWEN3_32B, *saves)
    # 12 x 32.76 / 8 = 49.1 billion bytes of state; page-locked memory is given in powers of two
    assert found.trainer.host["copy of the state to be saved"] == 2**36
    [problem] = map(str, found.problems)
    # 8 x (68.7 of state + 3.5) + 5 in billions of bytes, divided by 8
    fits = int(problem.rpartition("; use ")[2].rstrip("."))
    assert fits == approx((8 * (68.7 + 3.5) + 5) / 8 * 1e9 / 2**20, rel=CLOSE)
    assert not estimate_needs(QWEN3_32B, *saves, f"launcher.trainer_mem_per_gpu={fits}").problems


def test_cpu_ranks_are_refused_only_for_what_they_need_without_a_doubt():
    cpus = "cluster.n_gpus_per_node=0"
    [problem] = map(str, estimate_needs(TINY_QWEN3, cpus, "launcher.trainer_mem_per_gpu=50").problems)
    assert "launcher.trainer_mem_per_gpu 50: " in problem and "but have 50 MB" in problem
    roomy = estimate_needs(TINY_QWEN3, cpus, "launcher.trainer_mem_per_gpu=4000")
    assert not roomy.problems and not any("trainer_mem_per_gpu" in note for note in map(str, roomy.notes))


def estimate_grpo(content: dict, *overrides: str, reference: dict | None = None) -> Estimate:
    base = [*SFT, *GRPO, "total_train_steps=10", "launcher.trainer_mem_per_gpu=300000"]
    return estimate_needs(content, *overrides, base=base, reference=reference)


def test_dpo_has_a_reference_which_is_the_model_itself_or_another():
    of_dpo = (*SFT, *GPUS, "trainer=dpo", "cluster.n_nodes=2", "train_dataset.batch_size=64")
    own = estimate_needs(QWEN3_8B, base=of_dpo)
    other = estimate_needs(QWEN3_8B, "ref.path=/r", base=of_dpo, reference=QWEN3_32B)
    assert own.trainer.standing["reference model"] == approx(2 * 8.19e9 / 16, rel=CLOSE)
    assert other.trainer.standing["reference model"] == approx(2 * 32.76e9 / 16, rel=CLOSE)
    assert own.work.trajectories == 2 * 64


def test_a_critic_has_parameters_gradients_moments_and_a_backward_pass_of_its_own():
    alone = estimate_grpo(QWEN3_8B, "cluster.n_nodes=2")
    both = estimate_grpo(
        QWEN3_8B, "cluster.n_nodes=2", "critic.path=/r", "recover.mode=auto", reference=QWEN3_32B
    )
    # 8 ranks train; 4 bytes of parameters, 4 of gradients, 8 of moments
    assert both.trainer.standing["critic"] == approx(16 * 31.98e9 / 8, rel=CLOSE)
    assert both.trainer.standing["CUDA and NCCL"] == alone.trainer.standing["CUDA and NCCL"]
    assert both.trainer.device_bytes > alone.trainer.device_bytes + both.trainer.standing["critic"]
    assert both.trainer.largest.endswith("of the critic")
    assert both.disk.checkpoint == approx(12 * (8.19e9 + 31.98e9), rel=CLOSE)
    assert both.disk.export == approx(2 * (8.19e9 + 31.98e9), rel=CLOSE)
    assert both.disk.weights == alone.disk.weights


def test_a_critic_that_is_too_large_is_changed_by_its_own_options():
    of_critic = ["cluster.gpu_mem_gb=80", "critic.path=/r", "launcher.trainer_mem_per_gpu=600000"]
    [problem] = map(str, estimate_grpo(QWEN3_8B, *of_critic, reference=QWEN3_32B).problems)
    ways = problem.partition("What fits: ")[2]
    assert "critic.fsdp.offload_params true (launcher.trainer_mem_per_gpu " in ways
    assert "actor." not in ways
    offloaded = "critic.fsdp.offload_params=true"
    assert not estimate_grpo(QWEN3_8B, *of_critic, offloaded, reference=QWEN3_32B).problems
    # the policy is the larger one
    [problem] = map(str, estimate_grpo(QWEN3_32B, *of_critic, reference=QWEN3_8B).problems)
    assert "actor.fsdp.offload_params true" in problem and "critic.fsdp" not in problem


def test_a_smaller_budget_of_the_critic_is_named_if_it_fits():
    policy = ["actor.mb_spec.max_tokens_per_mb=8192", "critic.path=/r", "cluster.gpu_mem_gb=80"]
    wide = [*policy, "critic.mb_spec.max_tokens_per_mb=262144", "cluster.n_nodes=2"]
    [problem] = map(str, estimate_grpo(QWEN3_8B, *wide, reference=QWEN3_8B).problems)
    tokens = int(problem.partition("critic.mb_spec.max_tokens_per_mb ")[2].split()[0])
    for budget, fits in ((tokens, True), (tokens + 1024, False)):
        changed = [*policy, f"critic.mb_spec.max_tokens_per_mb={budget}", "cluster.n_nodes=2"]
        assert bool(estimate_grpo(QWEN3_8B, *changed, reference=QWEN3_8B).problems) is not fits


def test_the_likely_tokens_of_a_teacher_take_room_in_the_batch_log():
    teacher = ["allocation_mode=sglang:d4+sglang[teacher]:d4+fsdp:d8", "pools.teacher.path=/r"]
    teacher += ["cluster.n_nodes=2", "actor.algorithm=opd", "distillation.distill_loss_weight=1"]
    alone, with_tokens = (
        estimate_grpo(QWEN3_8B, *teacher, *more) for more in ([], ["distillation.top_k=16"])
    )
    tokens = alone.work.tokens
    assert with_tokens.disk.batch - alone.disk.batch == approx(16 * 8 * tokens)


def test_rl_has_servers_a_reference_and_a_batch_log():
    ref = ["ref.path=/r", "actor.kl_ctl=0.1", "cluster.gpu_mem_gb=80"]
    found = estimate_grpo(QWEN3_8B, "cluster.n_nodes=2", *ref, reference=QWEN3_32B)
    assert found.trainer.standing["reference model"] == approx(2 * 32.76e9 / 8, rel=CLOSE)
    assert (found.work.steps, found.work.trajectories, found.work.longest) == (10, 8192, 4096)
    assert found.disk.weights == approx(2 * 8.19e9, rel=CLOSE)
    assert found.disk.batch == approx(17.5 * 8192 * 4096, rel=CLOSE)
    [server] = found.servers
    assert server.weight_bytes == approx(2 * 8.19e9, rel=CLOSE)
    # keys and values of 36 layers x 8 heads x 128, 2 bytes; 0.9 of 80 GB without the weights
    assert server.token_bytes == 2 * 36 * 1024 * 2
    assert server.cached_tokens == approx((0.9 * 80 * 2**30 - 16.38e9) / 147_456, rel=CLOSE)
    assert not found.problems
    idle = ["ref.path=/r", "actor.kl_ctl=0", "cluster.n_nodes=2"]
    assert "reference model" not in estimate_grpo(QWEN3_8B, *idle).trainer.standing


def test_a_reward_model_has_a_number_as_its_head_and_embedded_keeps_no_cache():
    liked = ["pools.liked.path=/m", "rollout.reward_fn=liked"]
    allocation = "allocation_mode=sglang:d4+sglang[liked]:d4+fsdp:d8"
    policy, scorer = estimate_grpo(QWEN3_8B, "cluster.n_nodes=2", allocation, *liked).servers
    assert policy.weight_bytes - scorer.weight_bytes == 2 * 151936 * 4096
    here = ["cluster.n_gpus_per_node=0", "allocation_mode=embedded:d1+embedded[liked]:d1+fsdp:d1"]
    assert [one.cached_tokens is None for one in estimate_grpo(QWEN3_8B, *here, *liked).servers] == [
        False,
        True,
    ]


def test_a_server_that_can_not_hold_the_weights_is_refused_with_more_gpus():
    options = ["cluster.n_nodes=8", "cluster.gpu_mem_gb=80", "actor.fsdp.offload_params=true"]
    [problem] = estimate_grpo(LLAMA3_70B, *options, "actor.mb_spec.max_tokens_per_mb=8192").problems
    assert "cluster.gpu_mem_gb" in problem.related
    assert str(problem) == (
        "a server of pool rollout needs 131.4 GB of weights on each GPU, but sglang.mem_fraction_static 0.9 "
        "of cluster.gpu_mem_gb 80 leaves 71.1 GB. What fits: sglang with t2."
    )
    wide = estimate_grpo(
        LLAMA3_70B, *options[1:], "cluster.n_nodes=8", "allocation_mode=sglang:d16t2+fsdp:d32"
    )
    assert not any("server" in str(problem) for problem in wide.problems)


def test_a_micro_batch_on_gpus_is_limited_unless_the_user_says_null():
    assert estimate_grpo(QWEN3_8B).load.tokens == 32768
    loud = estimate_grpo(QWEN3_8B, "actor.mb_spec.max_tokens_per_mb=null", "cluster.gpu_mem_gb=80")
    assert loud.load.tokens == 1024 * 8 // 4 // 4 * 4096  # all rows of a rank
    assert any(
        note.startswith("WARNING: actor.mb_spec.max_tokens_per_mb is null") for note in map(str, loud.notes)
    )
    assert not loud.problems  # one row fits, and rows may be short


def test_constants_are_those_of_the_trainer():
    for name in ("CHUNK_ROWS", "CHUNK_LOGITS", "CHUNK_LOGITS_ON_GPU", "TILE_ROWS", "TILE_COLUMNS"):
        assert getattr(memory, name) == getattr(logprobs, name)
    assert memory.FILE_BYTES == hf_io.MAX_FILE_BYTES
    assert max(MAX_CHAIN + 2, disk.KEEP + 1) == STORED_MODELS


# By hand, in billions of bytes of one rank, from the numbers above.
# fsdp with t divides what is gathered, and of a layer's activations all but norms and residual (18 H bytes a token):
#   32B t2: gathered 5.06 / 2; again 32768 x (92.2 + 297 / 2 kB); flowing 32768 x (2 I + 4 H bytes).
# megatron has parameters (2 bytes) and gradients (4) of its part whole, moments (8) and float32 parameters (4) of its
# share of that part; with t all activations are divided:
#   70B d4t8: the part 70.55 / 8 = 8.82, the share 8.82 / 4 = 2.2; inputs 42.9 / 8, again 13.6 / 8, flowing 32768 x (8 I + 4 H) / 8.
#   70B d2p2t8: the part of one stage (40 x 0.856 + 1.051) / 8 = 4.41, the share 2.2; two micro-batches in flight of
#   half of the layers each; parts of stages hold (2 + 2 + 1) / 2 of them in place of 2.
#   32B d2t4c2: the part 32.76 / 4 = 8.19, the share 8.19 / 4; inputs 21.5 / 8, again 12.7 / 8.
#   30B-A3B d8e8: 1.54 beside the experts, and 28.99 / 8 of these, in their moments not shared out any more.
BY_HAND_ON_MESHES = [
    (QWEN3_32B, "fsdp:d4t2", [],
     {"parameters": 4 * 32.76 / 8, "Adam moments": 8 * 32.76 / 8, "gathered blocks": 2.53,
      "activations": 21.5 + 7.88, "gradients of activations": 2.35}),
    (QWEN3_32B, "fsdp:d4c2", [],
     {"parameters": 4 * 32.76 / 8, "gathered blocks": 5.06, "activations": (21.5 + 12.7) / 2}),
    (QWEN3_32B, "fsdp:d16", ["model.fsdp.replicate_size=2"],
     {"parameters": 4 * 32.76 / 8, "Adam moments": 8 * 32.76 / 8, "gathered blocks": 5.06}),
    (QWEN3_8B, "fsdp:d8", ["model.fsdp.reshard_after_forward=false"],
     {"parameters": 4 * 8.19 / 8, "gathered blocks": 2 * (1.245 + 36 * 0.193)}),
    (LLAMA3_70B, "megatron:d4t8", [],
     {"parameters": 2 * 8.82, "gradients": 4 * 8.82, "Adam moments": 8 * 2.2, "float32 parameters": 4 * 2.2,
      "activations": (42.9 + 13.6) / 8, "gradients of activations": 8.59 / 8}),
    (LLAMA3_70B, "megatron:d4t8", ["model.megatron.ddp.use_distributed_optimizer=false"],
     {"Adam moments": 8 * 8.82, "float32 parameters": 4 * 8.82}),
    (LLAMA3_70B, "megatron:d4t8", ["model.megatron.ddp.grad_reduce_in_fp32=false"],
     {"gradients": 2 * 8.82 + 4 * 2.2}),
    (LLAMA3_70B, "megatron:d2p2t8", [],
     {"parameters": 2 * 4.41, "gradients": 4 * 4.41, "Adam moments": 8 * 2.2,
      "activations": (42.9 + 13.6) / 8}),
    (LLAMA3_70B, "megatron:d2p2t8", ["model.megatron.virtual_pipeline_size=2"],
     {"parameters": 2 * 4.41, "activations": (42.9 * 2.5 / 2 + 13.6) / 8}),
    (QWEN3_32B, "megatron:d2t4c2", [],
     {"parameters": 2 * 8.19, "Adam moments": 8 * 8.19 / 4, "activations": (21.5 + 12.7) / 8}),
    (QWEN3_30B_A3B, "megatron:d8e8", [],
     {"parameters": 2 * (1.54 + 3.62), "gradients": 4 * (1.54 + 3.62), "Adam moments": 8 * (1.54 / 8 + 3.62)}),
    (QWEN3_8B, "megatron:d8", ["model.gradient_checkpointing=false", "model.mb_spec.max_tokens_per_mb=8192"],
     {"activations": 36 * 8192 * 223e-6}),
    (QWEN3_8B, "megatron:d8", ["model.megatron.recompute_num_layers=4"],
     {"activations": 9 * 0.268 + 4 * 7.31}),
    (QWEN3_8B, "megatron:d8", ["model.megatron.recompute_method=block", "model.megatron.recompute_num_layers=30"],
     {"activations": 30 * 0.268 + 7 * 7.31}),
    # the MLP's share (8 I = 98.3 kB of 223 kB a token) is in none of the layers but one
    (QWEN3_8B, "megatron:d8", ["model.megatron.recompute_granularity=selective", "model.megatron.recompute_modules=[mlp]"],
     {"activations": 36 * 32768 * 124.7e-6 + 32768 * 98.3e-6}),
]  # fmt: skip


@pytest.mark.parametrize(("content", "mesh", "overrides", "by_hand"), BY_HAND_ON_MESHES)
def test_sizes_of_a_mesh_divide_what_a_hand_calculation_says(content, mesh, overrides, by_hand):
    ranks = parse(mesh).train.num_units
    found = estimate_needs(content, f"allocation_mode={mesh}", f"cluster.n_nodes={ranks // 8}", *overrides)
    moment = found.trainer.moments["the backward pass of a layer"]
    items = {**found.trainer.standing, **moment}
    for name, size in by_hand.items():
        assert items[name] / 1e9 == approx(size, rel=CLOSE), name
    assert found.trainer.device_bytes >= sum(items.values())


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_sizes_that_divide_further_are_named_and_fit(backend):
    roomy = ["cluster.gpu_mem_gb=80", "launcher.trainer_mem_per_gpu=600000", "cluster.n_nodes=4"]
    roomy += ["model.mb_spec.max_tokens_per_mb=65536", "train_dataset.max_length=65536"]
    [problem] = map(str, estimate_needs(LLAMA3_70B, *roomy, f"allocation_mode={backend}:d32").problems)
    mesh = re.search(rf"{backend}:\S*[tpc]\d\S*", problem.partition("What fits: ")[2])[0].rstrip(";.")
    assert parse(mesh).train.num_units == 32
    assert not estimate_needs(LLAMA3_70B, *roomy, f"allocation_mode={mesh}").problems


def test_the_table_of_the_docs_is_what_is_estimated():
    models = {"8B": QWEN3_8B, "32B": QWEN3_32B, "70B": LLAMA3_70B, "30B-A3B": QWEN3_30B_A3B}
    text = (Path(__file__).parents[3] / "docs" / "engines.md").read_text().replace("\\|", "/")
    rows = re.findall(r"^\| (\S+) \| `(\S+)` \| (\d+) \| (\d+) \| (\d+) \|$", text, re.MULTILINE)
    assert len(rows) == 10
    for model, mesh, gpus, standing, peak in rows:
        allocation = f"allocation_mode={mesh.replace('/', '|')}"
        found = estimate_needs(models[model], allocation, f"cluster.n_nodes={int(gpus) // 8}").trainer
        assert sum(found.standing.values()) / memory.GB == approx(int(standing), abs=1), mesh
        assert found.device_bytes / memory.GB == approx(int(peak), abs=1), mesh


def test_in_turn_a_gpu_holds_one_of_both_and_the_other_is_in_cpu_memory():
    base = [*SFT, *GRPO, "rollout.max_head_offpolicyness=0", "cluster.gpu_mem_gb=80"]
    roomy = ["launcher.trainer_mem_per_gpu=100000", "actor.mb_spec.max_tokens_per_mb=8192"]
    shared, alone = (
        estimate_needs(QWEN3_8B, *roomy, f"allocation_mode={mode}", f"cluster.n_nodes={nodes}", base=base)
        for mode, nodes in (("sglang:d8|fsdp:d8", 1), ("sglang:d8+fsdp:d8", 2))
    )
    assert not shared.problems
    shard = 8_190_735_360 / 8
    assert shared.trainer.host["state, while the server generates"] == 2 ** math.ceil(math.log2(12 * shard))
    assert shared.trainer.device_bytes - alone.trainer.device_bytes == memory.CUDA_BYTES
    [server], [own] = shared.servers, alone.servers
    assert own.cache_bytes - server.cache_bytes == memory.CUDA_BYTES
    words = [*base, *roomy, "cluster.n_gpus_per_node=8", "allocation_mode=sglang:d8|fsdp:d8"]
    checked = check(load([], words), files=False)
    plan = make_plan(checked.config, checked.explicit, interpreter="python", scheduler="slurm")
    lines = [line for line in needs.describe_needs(shared, checked.config, plan) if line.startswith("turns")]
    assert len(lines) == 1 and "of weights and" in lines[0] and "16.0 GB in CPU memory" in lines[0]


def test_servers_without_a_trainer_are_estimated(tmp_path: Path):
    """70 billion parameters of 2 bytes need 8 GPUs of 24 GB; of 16 GB, those of two nodes."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA3_70B))
    own = [*SFT, f"actor.path={tmp_path}", "purpose=generate", "cluster.n_gpus_per_node=8"]

    def find(*words: str):
        checked = check(load([], [*own, *words]), files=False)
        plan = make_plan(checked.config, checked.explicit, interpreter="python", scheduler="slurm")
        found = needs.estimate_needs(checked.config, plan, needs.find_known_models(checked.config), "slurm")
        [line] = needs.describe_needs(found, checked.config, plan)
        assert json.loads(json.dumps(needs.make_json(found)))["servers"][0]["units"] == found.servers[0].units
        return found, line

    found, line = find("allocation_mode=sglang:t8", "cluster.gpu_mem_gb=24")
    assert not found.problems and "16.4 GB of weights on each GPU" in line
    two = ("cluster.gpu_mem_gb=16", "cluster.n_nodes=2")
    found, _ = find("allocation_mode=sglang:d2t8", *two)
    assert "What fits: sglang with t16" in str(found.problems[0])
    found, line = find("allocation_mode=sglang:t16", *two)
    assert not found.problems and "8.2 GB of weights on each GPU" in line


def test_estimating_reads_no_weights(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    base = [*SFT, f"model.path={tmp_path}", "total_train_steps=1", "cluster.n_gpus_per_node=8"]
    checked = check(load([], base), files=False)
    plan = make_plan(checked.config, checked.explicit, interpreter="python", scheduler="slurm")
    assert (
        needs.estimate_needs(
            checked.config, plan, needs.find_known_models(checked.config), "slurm"
        ).load.shape.num_params
        == 8_190_735_360
    )


def test_a_pass_of_the_reference_model_gathers_its_layers():
    large = estimate_grpo(
        QWEN3_8B, "cluster.n_nodes=2", "ref.path=/r", "actor.kl_ctl=0.1", reference=QWEN3_32B
    )
    moment = large.trainer.moments["a pass of the reference model"]
    # the embedding and the head, and two layers
    assert moment["gathered blocks"] == approx(5.06e9, rel=CLOSE)
    assert "a pass of the reference model" not in estimate_grpo(QWEN3_8B, "cluster.n_nodes=2").trainer.moments


def test_a_float32_head_is_gathered_in_float32():
    plain, wide = (estimate_needs(QWEN3_8B, *more).trainer for more in ([], ["model.fsdp.float32_head=true"]))
    grown = wide.moments["the loss"]["gathered blocks"] - plain.moments["the loss"]["gathered blocks"]
    assert grown == approx(2 * 2 * 151_936 * 4096, rel=CLOSE)
