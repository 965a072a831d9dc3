"""AReaL v0.5.3 and v1.0.4: every key of the examples works, is noted or is refused; configurations load.

areal_recent/ has half of v1.0.4's configurations, and the keys of all examples of both releases, each with a
value, and with what becomes of it.
"""

import copy
import csv
import functools
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from hpc_rl.config.compat.areal_names import CODE_OF_WORKFLOWS, OF_WORKFLOWS
from hpc_rl.config.compat.areal_options import CHANGED_DEFAULTS, IDENTITY, ONE_VALUE
from hpc_rl.config.load.fields import list_defaults
from hpc_rl.config.load.load import load
from hpc_rl.config.options.experiment import CONFIGS, DPOConfig, SFTConfig, get_value
from hpc_rl.config.rules.check import check
from hpc_rl.core.errors import ConfigError
from hpc_rl.core.refusal import Kind, Refusal
from hpc_rl.plan.plan import make_plan

FOLDER = Path(__file__).parent / "areal_recent"
GRPO = "math/gsm8k_grpo"
SPECS = [f"{section}.scheduling_spec" for section in ("actor", "rollout", "ref")]
COLOCATED = {"type": "colocation", "target": "actor"}
RECENT = yaml.safe_load((FOLDER / "configurations.yaml").read_text())
with (FOLDER / "keys.tsv").open() as _file:
    KEYS = list(csv.DictReader(_file, delimiter="\t", quoting=csv.QUOTE_NONE))


def make_tree(values: dict[str, Any]) -> dict[str, Any]:
    """Nest dotted names; `[]` is the only item of a list."""
    tree: dict[str, Any] = {}
    for name, value in values.items():
        set_value(tree, name, value)
    return tree


def set_value(tree: dict[str, Any], name: str, value: Any) -> None:
    *parts, leaf = name.replace(".[]", "[]").split(".")
    for part in parts:
        key, is_list = part.removesuffix("[]"), part.endswith("[]")
        if not isinstance(tree.get(key), list if is_list else dict):
            tree[key] = [{}] if is_list else {}
        tree = tree[key][0] if is_list else tree[key]
    tree[leaf] = value


def make_recent(name: str) -> dict[str, Any]:
    """Return a configuration of configurations.yaml."""
    entry = RECENT[name]
    values = dict(RECENT[GRPO]["with"]) if entry.get("base", True) else {}
    gone = entry.get("without", [])
    kept = {
        one: value
        for one, value in values.items()
        if not any(f"{one}.".startswith(f"{other}.") for other in gone)
    }
    return make_tree(kept | entry.get("with", {}))


@functools.cache
def make_resolved() -> dict[str, Any]:
    """Return GRPO's configuration without references, which loads three times as fast."""
    tree = OmegaConf.to_container(OmegaConf.create(make_recent(GRPO)), resolve=True)
    assert isinstance(tree, dict)
    return tree


def write_tree(folder: Path, tree: dict[str, Any]) -> Path:
    path = folder / "a.yaml"
    path.write_text(yaml.dump(tree, Dumper=yaml.CSafeDumper, sort_keys=False))
    return path


def write_recent(folder: Path, name: str, changes: dict[str, Any] | None = None) -> Path:
    tree = make_recent(name)
    for option, value in (changes or {}).items():
        set_value(tree, option, value)
    return write_tree(folder, tree)


def load_checked(path: Path, *arguments: str, presets=()):
    return check(load([path], list(arguments), profiles=[], presets=presets), files=False)


def find_notes(loaded) -> str:
    return "\n".join(map(str, loaded.notes))


def collect_refusals(path: Path, *arguments: str) -> tuple[Refusal, ...]:
    with pytest.raises(ConfigError) as caught:
        load_checked(path, *arguments)
    return caught.value.refusals


# Configuration -> allocation, and what options are then
LOADS: dict[str, tuple[str, dict[str, Any]]] = {
    GRPO: (
        "sglang:d4+fsdp:d4",
        {
            "launcher.trainer_mem_per_gpu": 32768,
            "launcher.inference_server_mem_per_gpu": 32768,
            "actor.backend": "",
            "actor.rollout_correction.mode": "mask",
            "actor.rollout_correction.upper": 5.0,
        },
    ),
    "math/gsm8k_dapo_dynamic_bs": ("sglang:d4+fsdp:d4", {"actor.dynamic_sampling": True}),
    "math/gsm8k_grpo_lora": ("sglang:d4+fsdp:d4", {"actor.use_lora": True, "actor.lora_rank": 16}),
    "math/gsm8k_grpo_megatron_lora_moe": (
        "vllm:t2+megatron:p6",
        {
            "actor.behav_imp_weight_cap": 5.0,
            "actor.target_modules": [
                *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
            ],
        },
    ),
    "math/gsm8k_gspo": ("sglang:d4+fsdp:d4", {"actor.algorithm": "gspo"}),
    "math/gsm8k_m2po": ("sglang:d4+fsdp:d4", {"actor.algorithm": "m2po"}),
    "math/gsm8k_ppo_megatron": (
        "sglang:d4+megatron:d4",
        {"actor.algorithm": "ppo", "critic.optimizer.lr": 3e-6},
    ),
    "math/gsm8k_reinforce_baseline": ("sglang:d4+fsdp:d4", {"actor.kl_estimator": "k2"}),
    "math/gsm8k_sapo": (
        "sglang:d4+fsdp:d4",
        {"actor.algorithm": "sapo", "actor.rollout_correction": None},
    ),
    "experimental/prox_approx/gsm8k_grpo_prox_approx_eval": (
        "sglang:d4+fsdp:d4",
        {"actor.prox_logp_method": "metrics"},
    ),
    "distillation/gsm8k_grpo_distill": (
        "vllm:d1+vllm[teacher]:t4+fsdp:d1",
        {
            "actor.algorithm": "opd",
            "cluster.n_gpus_per_node": 6,
            "distillation.rl_loss_weight": 1.0,
            "distillation.distill_loss_weight": 0.005,
        },
    ),
    "alignment/hhrlhf_dpo": (
        "fsdp:d8",
        {"model.beta": 0.1, "model.optimizer.min_lr_ratio": 0.1, "train_dataset.type": "dpo"},
    ),
    # Their models are of images: refused as soon as the directory of the model is there.
    "vlm/clevr_count_70k_sft": ("fsdp:d8", {"train_dataset.type": "sft"}),
    "vlm_npu/qwen2_5_vl_3b_geometry3k_grpo": ("vllm:d4+fsdp:d4", {"sglang.enable_multimodal": True}),
    # Their only GPU is for servers and trainer.
    "scaffolding/gsm8k_rlvr_scaffolding": ("sglang:d1|fsdp:d1", {"rollout.max_head_offpolicyness": 1}),
    "scaffolding/search_scaffolding": ("sglang:d1|fsdp:d1", {"rollout.max_head_offpolicyness": 1}),
}
CODE = "AReaL's examples with this option run agents whose code hpc-rl does not have"
FP8 = "FP8 training needs kernels that hpc-rl does not have"
# Configuration -> options of the refusals, and words of the first
REFUSED: dict[str, tuple[list[str], str]] = {
    "agent_workflow": (["workflow, eval_workflow"], CODE),
    "camel": (["max_tokens_per_trajectory"], CODE),
    "openai_agents": (["agent_builder_path"], CODE),
    "search_agent/tongyi_deepresearch": (["judge_engine, max_llm_calls_per_run, log_agent_stats"], CODE),
    "tau2_1.7b_airline": (["econfig"], CODE),
    "tau2_30b_moe_airline": (
        ["actor.scheduling_spec.additional_bash_cmds", "econfig"],
        "use launcher.setup for a job",
    ),
    "terminal_bench_tb_sglang": (["n_trajs, max_tokens_per_trajectory"], CODE),
    "tir/tir_math_config": (["tir"], CODE),
    "experimental/inference_service/tau2_rollout": (
        ["rollout._version", ""],
        "Servers alone have a model on the command line: `hpc-rl generate MODEL",
    ),
    "math/gsm8k_grpo_megatron_fp8": (
        ["actor.megatron.ddp.fp8_param_gather", "actor.megatron.fp8_config"],
        FP8,
    ),
    "math/gsm8k_sft_archon_fp8": (["model.archon.fp8_config.mode"], FP8),
}


def test_each_configuration_has_its_outcome():
    assert LOADS.keys() | REFUSED.keys() == RECENT.keys()
    assert (len(RECENT), len(LOADS.keys() & REFUSED.keys())) == (27, 0)


@pytest.mark.parametrize("name", LOADS)
def test_a_configuration_loads_and_plans(name, tmp_path):
    allocation, effects = LOADS[name]
    loaded = load_checked(write_recent(tmp_path, name))
    plan = make_plan(loaded.config, loaded.explicit, interpreter="python", scheduler="slurm")
    assert plan.allocation == allocation
    for option, value in effects.items():
        assert get_value(loaded.config, option) == value, option


@pytest.mark.parametrize("name", REFUSED)
def test_a_configuration_is_refused_for_what_is_missing(name, tmp_path):
    options, words = REFUSED[name]
    path = write_recent(tmp_path, name)
    with pytest.raises(ConfigError) as caught:
        loaded = load_checked(path)
        make_plan(loaded.config, loaded.explicit, interpreter="python", scheduler="slurm")
    assert [one.option for one in caught.value.refusals] == options
    assert words in str(caught.value)


# What hpc-rl lacks for a refused configuration -> the changes and arguments without it
AGENT = ({"gconfig.max_new_tokens": 1024}, ["rollout.workflow=my:Agent"])
WITHOUT: dict[str, tuple[dict[str, Any], list[str]]] = {
    "the code of AReaL's agent": AGENT,
    "the code of AReaL's agent, and commands in each process": (
        AGENT[0] | {"actor.scheduling_spec.[].additional_bash_cmds": None},
        AGENT[1],
    ),
    "AReaL's inference service": ({}, []),  # the file has no model to train
    "FP8 kernels in Megatron": (
        {"actor.megatron.fp8_config": None, "actor.megatron.ddp.fp8_param_gather": False},
        [],
    ),
    "FP8 kernels in Archon": ({"actor.archon.fp8_config": None}, []),
}
LACKS = {name: "the code of AReaL's agent" for name, (_, words) in REFUSED.items() if words == CODE} | {
    "tau2_30b_moe_airline": "the code of AReaL's agent, and commands in each process",
    "experimental/inference_service/tau2_rollout": "AReaL's inference service",
    "math/gsm8k_grpo_megatron_fp8": "FP8 kernels in Megatron",
    "math/gsm8k_sft_archon_fp8": "FP8 kernels in Archon",
}


def test_only_services_and_runtimes_that_are_missing_are_refused():
    assert LACKS.keys() == REFUSED.keys() and {*LACKS.values()} == WITHOUT.keys()
    assert Counter(LACKS.values()).most_common(1) == [("the code of AReaL's agent", 7)]
    assert (len(LOADS), len(REFUSED)) == (16, 11)


@pytest.mark.parametrize("name", [name for name in LACKS if LACKS[name] != "AReaL's inference service"])
def test_a_refused_configuration_loads_without_what_is_missing(name, tmp_path):
    changes, arguments = WITHOUT[LACKS[name]]
    loaded = load_checked(write_recent(tmp_path, name, changes), *arguments)
    make_plan(loaded.config, loaded.explicit, interpreter="python", scheduler="slurm")


@pytest.mark.parametrize("name", [name for name, (_, words) in REFUSED.items() if words == CODE])
def test_a_configuration_with_an_agent_loads_with_a_workflow_of_ours(name, tmp_path):
    changes = {"actor.scheduling_spec.[].additional_bash_cmds": None, "gconfig.max_new_tokens": 1024}
    loaded = load_checked(write_recent(tmp_path, name, changes), "rollout.workflow=my:Agent")
    make_plan(loaded.config, loaded.explicit, interpreter="python", scheduler="slurm")
    own = make_recent(name).keys() & set(OF_WORKFLOWS)
    assert own <= loaded.config.rollout.workflow_args.keys()
    assert not loaded.config.rollout.workflow_args.keys() & set(CODE_OF_WORKFLOWS)
    assert loaded.config.ref is None or "ref.optimizer.lr" not in loaded.explicit


def find_outcome(path: Path, key: str, value: Any) -> str:
    """Return what becomes of a key: works, noted or refused. It may do nothing only where it repeats what is
    so anyway.
    """

    def is_about(one: Refusal) -> bool:
        return any(f"{key}.".startswith(f"{option}.") for option in one.options)

    try:
        loaded = load([path], profiles=[])
    except ConfigError as error:
        assert any(map(is_about, error.refusals)), str(error)
        return "refused"
    if any(map(is_about, loaded.notes)):
        return "noted"
    name = f"rollout.workflow_args.{key}" if key.partition(".")[0] in OF_WORKFLOWS else key
    if key in IDENTITY or key in ONE_VALUE:
        return "works"
    is_same = isinstance(value, str) and value.startswith("${")
    found = get_value(loaded.config, name)
    assert is_same or found == value or str(found).endswith(str(value)), (key, found)
    return "works"


@pytest.mark.parametrize("row", KEYS, ids=lambda row: row["key"])
def test_a_key_works_or_is_noted_or_is_refused(row, tmp_path):
    key, value = row["key"], json.loads(row["value"])
    tree = make_recent(GRPO)
    used = re.findall(r"\$\{([\w.]+)", json.dumps(tree))
    if "${" not in row["value"] and not any(f"{key}.".startswith(f"{name}.") for name in used):
        tree = copy.deepcopy(make_resolved())
    section = key.partition(".")[0]
    if section in ("critic", "teacher"):
        tree[section] = {"path": "/m"} | ({"scheduling_strategy": COLOCATED} if section == "critic" else {})
    if section in (*OF_WORKFLOWS, *CODE_OF_WORKFLOWS):
        tree["rollout"]["workflow"] = "my:Agent"
    if section == "allocation_mode":
        for role in ("rollout", "actor", "ref"):
            del tree[role]["backend"]
    set_value(tree, key, value)
    assert find_outcome(write_tree(tmp_path, tree), key.replace(".[]", ""), value) == row["outcome"]


def test_the_keys_of_both_releases_are_complete():
    assert len(KEYS) == 376 and {row["outcome"] for row in KEYS} == {"works", "noted", "refused"}
    named = {name for entry in RECENT.values() for name in entry.get("with", {})}
    assert named - {row["key"] for row in KEYS} == set()


@pytest.mark.parametrize("name", CHANGED_DEFAULTS)
def test_a_changed_default_differs_from_ours(name):
    assert list_defaults(CONFIGS["grpo"])[name] != CHANGED_DEFAULTS[name]


def test_backends_follow_the_command_line_and_presets(tmp_path):
    path = write_recent(tmp_path, "math/gsm8k_ppo_megatron")
    assert load_checked(path, "rollout.backend=vllm:d2t2").config.allocation_mode == "vllm:d2t2+megatron:d4"
    loaded = load_checked(path, "allocation_mode=sglang:d6+fsdp:d2")
    assert loaded.config.allocation_mode == "sglang:d6+fsdp:d2"
    words = "rollout.backend, actor.backend: no effect: allocation_mode overrides the file"
    assert words in find_notes(loaded)
    loaded = load_checked(path, presets=["cpu"])  # the engine of the file stays
    plan = make_plan(loaded.config, loaded.explicit, interpreter="python", scheduler="local")
    assert plan.allocation == "embedded:d1+megatron:d1"
    loaded = load_checked(path, "rollout.backend=embedded:d1", "actor.backend=fsdp:d1", presets=["cpu"])
    assert loaded.config.allocation_mode == "embedded:d1+fsdp:d1"


@pytest.mark.parametrize(
    ("backend", "allocation"),
    [
        ("archon:d4", "sglang:d4+fsdp:d4"),
        ("archon:d1p2t2", "sglang:d4+megatron:p2t2"),
        ("megatron:(attn:d2t2|ffn:d2e2)", "sglang:d4+megatron:(attn:d2t2|ffn:d2t1p1e2)"),  # t of ffn is 1
        ("megatron:(attn:d1t4|ffn:d1e1)", "sglang:d4+megatron:t4"),  # or as of attn
    ],
)
def test_a_mesh_of_areal_is_a_mesh_here(backend, allocation, tmp_path):
    loaded = load_checked(write_recent(tmp_path, GRPO, {"actor.backend": backend}))
    assert loaded.config.allocation_mode == allocation
    assert ("hpc-rl has no archon" in find_notes(loaded)) is backend.startswith("archon")


def test_what_areal_leaves_idle_of_one_node_is_not_requested(tmp_path):
    path = write_recent(tmp_path, GRPO, {"rollout.backend": "sglang:d1"})
    loaded = load_checked(path)
    assert loaded.config.cluster.n_gpus_per_node == 5
    assert "cluster.n_gpus_per_node is 5, not 8" in find_notes(loaded)
    with pytest.raises(ConfigError, match="none may stay idle"):
        loaded = load_checked(path, "cluster.n_gpus_per_node=8")
        make_plan(loaded.config, loaded.explicit, interpreter="python", scheduler="slurm")


@pytest.mark.parametrize(
    ("changes", "option", "words"),
    [
        ({"rollout.backend": "fsdp:d4"}, "rollout.backend", "name servers only, as sglang:d4"),
        ({"actor.backend": "sglang:d4"}, "actor.backend", "name a train engine only, as fsdp:d4"),
        ({"actor.backend": "fsdp:d4p2"}, "actor.backend", "fsdp has no p"),
        ({"ref.backend": "fsdp:d2"}, "ref.backend", "must equal actor.backend"),
        ({"allocation_mode": "sglang:d4+fsdp:d4"}, "allocation_mode", "remove one"),
        (
            {"ref.scheduling_strategy": {"type": "separation"}},
            "ref.scheduling_strategy",
            "use type colocation",
        ),
        ({"ref.scheduling_spec": [{"cpu": 2}]}, "ref.scheduling_spec", "must equal actor.scheduling_spec"),
        (
            {"actor.scheduling_spec": [{"cpu": 2}, {"cpu": 3}], "ref.scheduling_spec": None},
            "actor.scheduling_spec",
            "give a list with one mapping",
        ),
        (
            {"actor.scheduling_spec.[].cores": 2},
            "actor.scheduling_spec.cores",
            "known here: cpu, mem",
        ),
        (
            {"actor.scheduling_spec.[].nodelist": "a[1-2]", "rollout.scheduling_spec": [{"nodelist": "b"}]},
            "rollout.scheduling_spec.nodelist",
            "must have the trainer's value, a[1-2]",
        ),
        ({"rollout._version": "v2"}, "rollout._version", "service of version 2"),
        ({"reward_fn_path": "my.reward"}, "reward_fn_path", "use rollout.reward_fn"),
    ],
)
def test_what_can_not_be_placed_is_refused_by_name(changes, option, words, tmp_path):
    (refusal,) = collect_refusals(write_recent(tmp_path, GRPO, changes))
    assert refusal.option == option and words in str(refusal)
    assert refusal.origin.startswith(str(tmp_path))


@pytest.mark.parametrize(
    "changes",
    [
        {"rollout.scheduling_strategy": COLOCATED},
        {"actor.scheduling_strategy": {"type": "colocation", "target": "rollout"}},
        {"rollout.scheduling_strategy.type": "colocation", "rollout.scheduling_strategy.target": "actor"},
    ],
)
def test_servers_that_share_the_gpus_of_the_trainer_are_a_colocated_allocation(changes, tmp_path):
    changes = changes | {"actor.weight_update_mode": "disk", "rollout.max_head_offpolicyness": 1}
    loaded = load_checked(write_recent(tmp_path, GRPO, changes))
    plan = make_plan(loaded.config, loaded.explicit, interpreter="python", scheduler="slurm")
    assert (plan.allocation, loaded.config.cluster.n_gpus_per_node) == ("sglang:d4|fsdp:d4", 4)


def test_a_node_of_one_gpu_is_for_servers_and_trainer_in_turn(tmp_path):
    path = write_recent(tmp_path, "scaffolding/gsm8k_rlvr_scaffolding")
    notes = load_checked(path).notes
    (shared,) = [one for one in notes if "take turns on the GPUs" in str(one)]
    assert shared.is_warning and shared.option == "allocation_mode"
    assert "rollout.max_head_offpolicyness is 1, not 2" in "\n".join(map(str, notes))
    two = load_checked(path, "cluster.n_gpus_per_node=2").config
    assert (two.allocation_mode, two.rollout.max_head_offpolicyness) == ("sglang:d1+d1", 2)


@pytest.mark.parametrize(
    ("changes", "arguments"),
    [
        ({}, ["allocation_mode=sglang:d1+fsdp:d1"]),  # as the user says
        ({"allocation_mode": "sglang:d2+d1"}, []),  # not even the servers fit
        (dict.fromkeys(SPECS), []),  # of an earlier release
    ],
)
def test_other_nodes_with_too_few_gpus_are_refused(changes, arguments, tmp_path):
    path = write_recent(tmp_path, "scaffolding/gsm8k_rlvr_scaffolding", changes)
    with pytest.raises(ConfigError, match=r"1 node\(s\) of 1 GPUs have 1"):
        loaded = load_checked(path, *arguments)
        make_plan(loaded.config, loaded.explicit, interpreter="python", scheduler="slurm")


def test_a_strategy_that_contradicts_is_refused(tmp_path):
    changes = {"rollout.scheduling_strategy": COLOCATED}
    (refusal,) = collect_refusals(write_recent(tmp_path, "scaffolding/gsm8k_rlvr_scaffolding", changes))
    assert (refusal.option, refusal.kind) == ("rollout.scheduling_strategy", Kind.CONFLICT)
    changes = {"actor.scheduling_strategy": {"type": "colocation", "target": "critic"}}
    (refusal,) = collect_refusals(write_recent(tmp_path, GRPO, changes))
    assert "colocation with critic can't be used" in str(refusal)


def test_a_backend_alone_lacks_the_other(tmp_path):
    tree = make_recent(GRPO)
    del tree["rollout"]["backend"]
    (refusal,) = collect_refusals(write_tree(tmp_path, tree))
    assert (refusal.option, refusal.kind) == ("rollout.backend", Kind.MISSING)


def test_without_a_trainer_its_backend_may_be_missing(tmp_path):
    tree = make_recent(GRPO)
    del tree["actor"]["backend"], tree["ref"]
    path = write_tree(tmp_path, tree)
    (refusal,) = collect_refusals(path)
    assert (refusal.option, refusal.kind) == ("actor.backend", Kind.MISSING)
    loaded = load_checked(path, "purpose=generate")
    assert loaded.config.allocation_mode == "sglang:d4" and loaded.config.cluster.n_gpus_per_node == 4


def test_a_scheduling_spec_is_options_of_the_launcher(tmp_path):
    spec = {
        "cpu": 6,
        "mem": 48,
        "env_vars": {"NCCL_IB_TIMEOUT": 22, "WANDB_API_KEY": "k"},
        "image": "/i.sif",
        "mount": "/data:/data",
        "exclude": "n7",
        "srun_additional_args": "--unbuffered --mpi=pmi2 -K --chdir $PWD",
        "port_count": 2,
    }
    servers = {"cpu": 2, "env_vars": {"A": "b,c"}, "image": "/s.sif", "mount": "/data:/data"}
    changes = {"actor.scheduling_spec": [spec], "rollout.scheduling_spec": [servers]}
    changes |= {"launcher.trainer_mem_per_gpu": 1000}
    loaded = load_checked(write_recent(tmp_path, GRPO, changes))
    launcher = loaded.config.launcher
    assert (launcher.trainer_cpus_per_gpu, launcher.inference_server_cpus_per_gpu) == (6, 2)
    assert (launcher.trainer_mem_per_gpu, launcher.inference_server_mem_per_gpu) == (1000, 32768)
    assert launcher.trainer_env_vars == {"NCCL_IB_TIMEOUT": "22", "WANDB_API_KEY": "k"}
    assert launcher.inference_server_env_vars == {"A": "b,c"}
    slurm = launcher.slurm
    assert (slurm.trainer_image, slurm.inference_server_image, slurm.mount) == (
        "/i.sif",
        "/s.sif",
        "/data:/data",
    )
    assert (slurm.exclude, slurm.srun_additional_args) == ("n7", "")
    notes = find_notes(loaded)
    assert "actor.scheduling_spec.cpu" in notes and "actor.scheduling_spec.port_count: no effect" in notes
    assert (
        "actor.scheduling_spec.mem: no effect: the option of section launcher that replaces it is set"
        in notes
    )


@pytest.mark.parametrize(("kind", "cls"), [("sft", SFTConfig), ("rw", CONFIGS["rw"]), ("dpo", DPOConfig)])
def test_the_trained_model_of_a_supervised_file_is_in_section_actor(kind, cls, tmp_path):
    name = "alignment/hhrlhf_dpo"
    tree = make_recent(name)
    tree["actor"]["is_critic"] = kind == "rw"
    for section in ("train_dataset", "valid_dataset"):
        tree[section]["type"] = kind
    if kind != "dpo":
        del tree["ref"], tree["actor"]["beta"]
    path = write_tree(tmp_path, tree)
    loaded = load_checked(path, "actor.optimizer.lr=1e-4", "model=/other", "experiment_name=x")
    assert type(loaded.config) is cls
    assert (loaded.config.model.optimizer.lr, loaded.config.tokenizer_path) == (1e-4, "/other")
    assert f"is read as section model, which trainer {kind} has instead" in find_notes(loaded)


def test_an_actor_with_sampling_is_no_supervised_file(tmp_path):
    path = write_recent(tmp_path, GRPO, {"train_dataset.type": "sft"})
    assert any(one.option == "train_dataset.type" for one in collect_refusals(path))


def test_a_section_may_refer_to_one_with_more_options(tmp_path):
    tree = copy.deepcopy(make_recent(GRPO))
    tree["ref"] = "${actor}"
    loaded = load_checked(write_tree(tmp_path, tree))
    assert loaded.config.ref.path == loaded.config.actor.path
    assert loaded.config.ref.mb_spec.max_tokens_per_mb == 10240
