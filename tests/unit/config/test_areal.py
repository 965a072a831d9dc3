"""AReaL's own files, v0.3.0 to v0.4.1, load, plan and render unchanged; refusals name unsupported options.

Four whole files are in areal/; every other example is one of them with the differences of the example.
"""

import csv
import itertools
import json
import re
import subprocess
import sys
from pathlib import Path

import omegaconf
import pytest
import yaml

from hpc_rl.config.compat.areal_files import translate
from hpc_rl.config.compat.areal_names import OF_MULTI_TURN, OF_WORKFLOWS
from hpc_rl.config.load.load import load
from hpc_rl.config.load.source import SourceValue
from hpc_rl.config.options.experiment import GRPOConfig, get_value
from hpc_rl.config.rules.check import check
from hpc_rl.config.show import format_yaml, show
from hpc_rl.core.errors import ConfigError
from hpc_rl.core.refusal import Kind
from hpc_rl.core.trial import Trial
from hpc_rl.plan.plan import make_plan
from hpc_rl.trials.submission import render_scripts
from tests.unit.config.test_parameters import SECTIONS, _parse_number

FOLDER = Path(__file__).parent / "areal"
GONE = object()  # in place of a value: the example has no such option
GRPO, SFT = "gsm8k_grpo", "gsm8k_sft"
BATCH, GROUP = ({"mean_level": level, "std_level": level} for level in ("batch", "group"))
ROOT = {"experiment_name": "${experiment_name}", "trial_name": "${trial_name}"}
PERIODS = {"freq_epochs": 1, "freq_steps": None, "freq_secs": 3600}
V030 = {  # before v0.3.3
    "actor.adv_norm": GONE,
    "actor.group_adv_norm": False,
    "actor.mb_spec": {"max_tokens_per_gpu": 10240},
    "ref.mb_spec": {"max_tokens_per_gpu": 10240},
    "actor.fsdp": {"ulysses_sp_size": 1},
}
AGENT = {"n_trajs": 4, "max_tokens_per_trajectory": 8192, "gconfig.n_samples": 1}
NAMED = {"rollout.workflow": "my:Agent"}  # AReaL's own agents are code that is not here
VLLM = {
    "allocation_mode": "vllm:d96+fsdp:d32",
    "cluster.n_nodes": 16,
    "sglang": GONE,
    "gconfig": {"n_samples": 16, "max_new_tokens": 27648, "temperature": 1.0},
    "actor.mb_spec.max_tokens_per_mb": 32768,
    "ref.mb_spec.max_tokens_per_mb": 32768,
    "vllm": {
        "model": "${actor.path}",
        "seed": "${seed}",
        "skip_tokenizer_init": False,
        "dtype": "${actor.dtype}",
        "max_model_len": 32768,
        "gpu_memory_utilization": 0.9,
        "worker_extension_cls": "areal.thirdparty.vllm.vllm_worker_extension.VLLMWorkerExtension",
    },
}
# Example -> (file, what differs, allocation, what options are then)
EXAMPLES = {
    "grpo": (GRPO, {}, "sglang:d4+fsdp:d4", {"rollout.consumer_batch_size": 256, "actor.group_size": 4}),
    "sft": (SFT, {}, "fsdp:d8", {"train_dataset.max_length": 10240}),
    "reward_model": ("hhrlhf_rw", {}, "fsdp:d8", {"model.mb_spec.granularity": 2}),
    "v0.3.0_grpo": (
        GRPO,
        V030 | {"server_only": False, "checkpointer": ROOT | PERIODS, "recover": {"mode": "auto"} | ROOT},
        "sglang:d4+fsdp:d4",
        {
            "actor.adv_norm.mean_level": "batch",
            "actor.adv_norm.std_level": "batch",
            "actor.mb_spec.max_tokens_per_mb": 10240,
            "recover.freq_epochs": 1,
            "recover.freq_secs": 3600,
        },
    ),
    "v0.3.0_sft": (
        SFT,
        {"recover": GONE, "checkpointer": ROOT | PERIODS},
        "fsdp:d8",
        {"recover.freq_secs": 3600},
    ),
    "v0.3.1_group_norms": (
        GRPO,
        V030 | {"actor.group_adv_norm": True, "actor.group_reward_norm": True},
        "sglang:d4+fsdp:d4",
        {"actor.adv_norm.std_level": "group", "actor.reward_norm.mean_level": "group"},
    ),
    "v0.3.2_sft_with_etcd_address": (
        SFT,
        {"cluster.name_resolve.etcd3_addr": "etcd-client.example.local:2379"},
        "fsdp:d8",
        {},
    ),
    "dapo": (
        GRPO,
        {
            "allocation_mode": "sglang.d4+fsdp.d4",
            "gconfig.max_new_tokens": 4096,
            "actor.eps_clip": 0.2,
            "actor.eps_clip_higher": 0.28,
            "actor.dynamic_sampling": True,
            "actor.overlong_reward_penalty": True,
            "actor.overlong_tokens": 512,
            "actor.overlong_penalty_factor": 1.0,
        },
        "sglang:d4+fsdp:d4",
        {"actor.max_new_tokens": 4096, "actor.eps_clip_higher": 0.28},
    ),
    "defaults_written_out": (
        GRPO,
        {"train_dataset.max_length": None, "gconfig.max_tokens": 65536, "gconfig.max_new_tokens": 2048}
        | {"actor.max_new_tokens": 1024, "rollout.consumer_batch_size": 1, "actor.group_size": 1},
        "sglang:d4+fsdp:d4",
        {"gconfig.max_tokens": 10240, "actor.max_new_tokens": 2048, "actor.group_size": 4},
    ),
    "dr_grpo": (
        GRPO,
        {"actor.adv_norm.std_level": "none"},
        "sglang:d4+fsdp:d4",
        {"actor.adv_norm.std_level": None},
    ),
    "rloo": (
        GRPO,
        {"actor.adv_norm": {"mean_level": "group", "std_level": None, "mean_leave1out": True}},
        "sglang:d4+fsdp:d4",
        {"actor.adv_norm.mean_leave1out": True},
    ),
    "reinforce": (GRPO, {"actor.kl_estimator": "k3", "actor.kl_ctl": 0.0}, "sglang:d4+fsdp:d4", {}),
    "gspo": (
        GRPO,
        {"actor.importance_sampling_level": "sequence"},
        "sglang:d4+fsdp:d4",
        {"actor.algorithm": "gspo", "actor.eps_clip": 0.4, "actor.loss_aggregation": "token_mean"},
    ),
    "aent": (
        GRPO,
        {
            "actor.aent": {
                "entropy_coeff": 0.0005,
                "entropy_clamp": 0.3,
                "adaptive_coeff": True,
                "entropy_high": 0.4,
                "entropy_low": 0.2,
                "coeff_lr": 0.002,
                "coeff_box_high": 0.02,
                "coeff_box_low": 0.0001,
                "warmup_steps": 20,
            }
        },
        "sglang:d4+fsdp:d4",
        {"actor.aent.entropy_clamp": 0.3, "actor.aent.warmup_steps": 20},
    ),
    "m2po": (
        GRPO,
        {"actor.m2_threshold": 0.04, "actor.eps_clip": 0.0},
        "sglang:d4+fsdp:d4",
        {"actor.algorithm": "m2po", "actor.m2_threshold": 0.04, "actor.eps_clip": 0.0},
    ),
    "sapo": (
        GRPO,
        {
            "actor.use_sapo_loss": True,
            "actor.sapo_tau_neg": 1.1,
            "actor.use_decoupled_loss": False,
            "actor.behav_imp_weight_cap": GONE,
            "actor.rejection_sampling": {"metric": "ratio", "upper": 5.0},
        },
        "sglang:d4+fsdp:d4",
        {"actor.algorithm": "sapo", "actor.sapo_tau_neg": 1.1, "actor.rollout_correction": None},
    ),
    "rejection_sampling": (
        GRPO,
        {
            "actor.behav_imp_weight_cap": GONE,
            "actor.rejection_sampling": {
                "level": "sequence",
                "agg": "mean",
                "action": "clamp",
                "metric": "ratio",
                "upper": 3.0,
            },
        },
        "sglang:d4+fsdp:d4",
        {
            "actor.rollout_correction.level": "sequence",
            "actor.rollout_correction.mode": "truncate",
            "actor.rollout_correction.upper": 3.0,
        },
    ),
    "rejection_sampling_by_defaults": (
        GRPO,
        {"actor.behav_imp_weight_cap": GONE, "actor.rejection_sampling": {"metric": "ratio"}},
        "sglang:d4+fsdp:d4",
        {"actor.rollout_correction.mode": "mask", "actor.rollout_correction.upper": 5.0},
    ),
    "prox_approx": (
        GRPO,
        {"actor.prox_logp_method": "loglinear"},
        "sglang:d4+fsdp:d4",
        {"actor.prox_logp_method": "loglinear"},
    ),
    "reinforce_baseline": (
        GRPO,
        {"actor.kl_estimator": "k2", "actor.kl_ctl": 0.001},
        "sglang:d4+fsdp:d4",
        {"actor.kl_estimator": "k2", "actor.kl_ctl": 0.001},
    ),
    "ppo": (
        GRPO,
        {
            "critic": ROOT
            | {
                "path": "${actor.path}",
                "is_critic": True,
                "init_from_scratch": False,
                "disable_dropout": True,
                "dtype": "${actor.dtype}",
                "eps_clip": 0.5,
                "ppo_n_minibatches": "${actor.ppo_n_minibatches}",
                "mb_spec": {"max_tokens_per_mb": 10240},
                "optimizer": "${actor.optimizer}",
            }
        },
        "sglang:d4+fsdp:d4",
        {
            "actor.algorithm": "ppo",
            "critic.ppo_n_minibatches": 1,
            "critic.mb_spec.max_tokens_per_mb": 10240,
            "critic.optimizer.lr": 1.7e-5,
        },
    ),
    "lite_ppo": (
        GRPO,
        {"actor.reward_norm": GROUP | {"std_level": "batch", "group_size": 4}},
        "sglang:d4+fsdp:d4",
        {"actor.reward_norm.std_level": "batch"},
    ),
    "megatron": (
        "gsm8k_grpo_megatron",
        {},
        "sglang:d4+megatron:p2t2",
        {"actor.megatron.ddp.overlap_grad_reduce": True},
    ),
    "megatron_moe": (
        "gsm8k_grpo_megatron",
        {"allocation_mode": "sglang:d4p1t1+megatron:(attn:d2p1t2|ffn:d1p1t1e4)"},
        "sglang:d4+megatron:(attn:d2t2|ffn:d1t1p1e4)",
        {},
    ),
    "lora": (
        GRPO,
        {
            "actor.use_lora": True,
            "actor.peft_type": "lora",
            "actor.lora_rank": 16,
            "actor.lora_alpha": 16,
            "actor.target_modules": ["all-linear"],
            "actor.weight_update_mode": "disk",
            "rollout.pause_grace_period": 0.1,
            "sglang.enable_lora": True,
            "sglang.max_lora_rank": 32,
            "sglang.lora_target_modules": ["all"],
        },
        "sglang:d4+fsdp:d4",
        {"actor.lora_rank": 16, "actor.target_modules": ["all-linear"]},
    ),
    "boba_vllm": (GRPO, VLLM, "vllm:d96+fsdp:d32", {"vllm.max_model_len": 32768, "vllm.seed": 1}),
    "tracer": (
        GRPO,
        {"perf_tracer": ROOT | {"enabled": True, "session_tracer": {"enabled": True}}},
        "sglang:d4+fsdp:d4",
        {},
    ),
    "multi_turn": (
        GRPO,
        AGENT | {"max_turns": 2, "actor.group_size": "${n_trajs}"},
        "sglang:d4+fsdp:d4",
        {
            "rollout.workflow": "multi_turn",
            "rollout.workflow_args": {"n_trajs": 4, "max_tokens_per_trajectory": 8192, "max_turns": 2},
            "gconfig.n_samples": 4,
        },
    ),
    "multi_turn_with_discount": (
        GRPO,
        {"max_turns": 5, "turn_discount": 0.9},
        "sglang:d4+fsdp:d4",
        {"rollout.workflow": "multi_turn", "rollout.workflow_args": {"max_turns": 5, "turn_discount": 0.9}},
    ),
    "camel": (GRPO, AGENT | NAMED, "sglang:d4+fsdp:d4", {"gconfig.n_samples": 4}),
    "search": (
        GRPO,
        {"max_turns": 128} | NAMED,
        "sglang:d4+fsdp:d4",
        {"rollout.workflow_args": {"max_turns": 128}},
    ),
    "tool_integrated": (
        GRPO,
        {"tir": {"max_turns": 2, "max_length": 3000, "tool_timeout": 30.0, "enable_tools": "python;calc"}}
        | NAMED,
        "sglang:d4+fsdp:d4",
        {
            "rollout.workflow_args": {
                "tir": {
                    "max_turns": 2,
                    "max_length": 3000,
                    "tool_timeout": 30.0,
                    "enable_tools": "python;calc",
                }
            }
        },
    ),
    "openai_agents": (
        GRPO,
        AGENT | {"max_turns": 8, "agent_type": "math"} | NAMED,
        "sglang:d4+fsdp:d4",
        {"gconfig.n_samples": 4},
    ),
    "tongyi": (
        GRPO,
        {
            "n_trajs": 1,
            "max_llm_calls_per_run": 50,
            "max_tokens_per_trajectory": 27000,
            "log_agent_stats": True,
            "judge_engine": ROOT | {"max_concurrent_rollouts": "${rollout.max_concurrent_rollouts}"},
            **NAMED,
        },
        "sglang:d4+fsdp:d4",
        {
            "rollout.workflow_args": {
                "n_trajs": 1,
                "max_llm_calls_per_run": 50,
                "max_tokens_per_trajectory": 27000,
                "log_agent_stats": True,
                "judge_engine": {
                    "experiment_name": "gsm8k-grpo",
                    "trial_name": "trial0",
                    "max_concurrent_rollouts": 256,
                },
            }
        },
    ),
}
# Example -> (what differs, words of each line of the refusal)
NOT_BUILT = {
    "rejection_sampling_by_divergence": (
        {"actor.rejection_sampling": {"metric": "kl_k3", "upper": 0.1}},
        ["actor.rejection_sampling.metric .*: kl_k3 .* compares the ratio"],
    ),
    "ulysses": (
        {"actor.fsdp": {"ulysses_sp_size": 4}},
        ["allocation_mode has this size: c, as in fsdp:d2c4"],
    ),
    "ray": ({"cluster.name_resolve.type": "ray"}, ["use nfs, or remove it"]),
    "a_value_for_ref_that_is_none": ({"ref.eps_clip": "much"}, ["ref.eps_clip .*: much"]),
}


# Keys that each of AReaL's examples with an agent has -> the one that the refusal names
AGENTS: dict[str, tuple[dict, str]] = {
    "camel": (AGENT, "n_trajs, max_tokens_per_trajectory"),
    "search": ({"max_turns": 128}, "max_turns"),
    "search_with_stats": (
        AGENT | {"max_turns": 32, "log_agent_stats": True, "log_agent_stats_keys": ["num_pages"]},
        "log_agent_stats, log_agent_stats_keys",
    ),
    "tool_integrated": (EXAMPLES["tool_integrated"][1], "tir"),
    "openai_agents": (EXAMPLES["openai_agents"][1], "agent_type"),
    "tongyi": (EXAMPLES["tongyi"][1], "max_llm_calls_per_run, log_agent_stats, judge_engine"),
}


def write_example(folder: Path, file: str, changes: dict) -> Path:
    """Write a file of areal/ with other values, or without an option, by dotted names."""
    tree = yaml.safe_load((FOLDER / f"{file}.yaml").read_text())
    for name, value in changes.items():
        *sections, leaf = name.split(".")
        inside = tree
        for section in sections:
            inside = inside.setdefault(section, {})
        inside.pop(leaf, None)
        if value is not GONE:
            inside[leaf] = value
    path = folder / "a.yaml"
    path.write_text(yaml.dump(tree, Dumper=yaml.CSafeDumper, sort_keys=False))
    return path


def load_checked(path: Path, **given):
    return check(load([path], profiles=[], **given), files=False)


@pytest.mark.parametrize(("file", "changes", "allocation", "effects"), EXAMPLES.values(), ids=list(EXAMPLES))
def test_an_example_loads_plans_and_renders(file, changes, allocation, effects, tmp_path):
    path = write_example(tmp_path, file, changes)
    loaded = load_checked(path)
    config = loaded.config
    assert config.tokenizer_path.startswith("/storage/models/Qwen")
    plan = make_plan(config, loaded.explicit, interpreter="python", scheduler="slurm")
    assert plan.allocation == allocation
    if not changes or "vllm" in changes:  # scripts differ by what plan and launcher have
        scripts = render_scripts(loaded, plan, Trial(tmp_path / "trial"), "slurm")
        assert any("srun" in text for text in scripts.values())
    follow = {"actor.group_size": "gconfig.n_samples", "actor.max_new_tokens": "gconfig.max_new_tokens"}
    found = {
        name: get_value(config, name) if get_value(config, name) is not None or name not in follow
        else get_value(config, follow[name])
        for name in effects
    }  # fmt: skip
    assert found == effects


@pytest.mark.parametrize(("changes", "names"), AGENTS.values(), ids=list(AGENTS))
def test_an_agent_is_refused_until_a_workflow_is_named(changes, names, tmp_path):
    changes = {name: value for name, value in changes.items() if name != "rollout.workflow"}
    path = write_example(tmp_path, GRPO, changes)
    with pytest.raises(ConfigError) as caught:
        load_checked(path)
    (line,) = str(caught.value).splitlines()
    assert line.startswith(f"{names} ({path}:") and "rollout.workflow=my_module:MyAgent" in line
    for workflow in ("single_turn", "multi_turn", "my:Agent"):
        loaded = check(load([path], [f"rollout.workflow={workflow}"], profiles=[]), files=False)
        assert loaded.config.rollout.workflow == workflow


def test_no_key_of_a_workflow_trains_single_turn():
    """Each key alone and with each other one."""
    accepted = set()
    for keys in itertools.combinations_with_replacement(OF_WORKFLOWS, 2):
        made = translate(GRPOConfig, {key: SourceValue(1, f"a.yaml:1: {key}") for key in keys})
        if made.refusals:
            assert made.refusals[0].kind == Kind.MISSING and "rollout.workflow" in made.refusals[0].options
        else:
            assert made.settings["rollout.workflow"].value == "multi_turn"
            accepted |= {*keys}
    assert accepted == OF_MULTI_TURN
    with pytest.raises(ConfigError, match="workflow is not set"):
        load([FOLDER / f"{GRPO}.yaml"], ["agent_type=math"], profiles=[])


@pytest.mark.parametrize(("changes", "refusals"), NOT_BUILT.values(), ids=list(NOT_BUILT))
def test_what_does_not_work_here_is_named(changes, refusals, tmp_path):
    path = write_example(tmp_path, GRPO, changes)
    with pytest.raises(ConfigError) as caught:
        load_checked(path)
    lines = str(caught.value).splitlines()
    assert len(lines) == len(refusals), lines
    for line, words in zip(lines, refusals, strict=True):
        assert re.search(words, line), line
        assert f"{path}:" in line


def test_notes_say_what_became_of_each_name(tmp_path):
    changes = EXAMPLES["multi_turn"][1] | {"perf_tracer": {"enabled": True}, "ref.eps_clip": 0.3}
    changes |= {"ref.reward_norm": None, "actor.adv_norm.group_size": 1}
    path = write_example(tmp_path, GRPO, changes)
    notes = "\n".join(map(str, load_checked(path).notes))
    assert "rollout.workflow_args: " not in notes  # each has an effect
    for words in (
        "max_turns (.*) is read as rollout.workflow_args.max_turns, its name in hpc-rl.",
        "gconfig.n_samples is 4, from n_trajs",
        "rollout.workflow is multi_turn, for n_trajs, max_tokens_per_trajectory, max_turns (.*).",
        "perf_tracer: no effect: ",
        "ref.eps_clip, ref.reward_norm: no effect: the reference model is not trained.",
        "actor.adv_norm.group_size (.*): 1, AReaL's default, is not used: this option follows gconfig.n_samples unless set.",
    ):
        assert re.search(words, notes), words
    single = check(load([path], ["rollout.workflow=single_turn"], profiles=[]), files=False).notes
    words = "max_turns has no effect, because workflow single_turn takes no such argument; remove"
    assert any(words in str(note) for note in single)


def test_arguments_of_a_workflow_can_be_typed_in(tmp_path):
    path = write_example(
        tmp_path, GRPO, {"rollout.workflow": "my:Flow", "rollout.workflow_args": {"a": 1, "b": [{}]}}
    )
    typed = ["rollout.workflow_args.a=2", "--rollout.workflow_args.deep.c", "[x, null]", "max_turns=7"]
    loaded = check(load([path], typed, profiles=[]), files=False)
    args = {"a": 2, "b": [{}], "deep": {"c": ["x", None]}, "max_turns": 7}
    assert loaded.config.rollout.workflow_args == args
    (tmp_path / "again.yaml").write_text(format_yaml(show(loaded)))
    assert load([tmp_path / "again.yaml"], profiles=[]).config == loaded.config


@pytest.mark.parametrize(
    ("workflow", "args", "words"),
    [
        ("single_turn", {"speed": 1}, "speed can't be used: rollout.workflow single_turn takes no arguments"),
        ("multi_turn", {"max_turn": 1}, "Did you mean max_turns?"),
        ("multi_turn", {"max_turns": 0}, "max_turns 0 can't be used; allowed: an integer, at least 1."),
    ],
)
def test_arguments_that_a_workflow_does_not_take_are_refused(workflow, args, words, tmp_path):
    changes = {"rollout.workflow": workflow, "rollout.workflow_args": args}
    with pytest.raises(ConfigError) as caught:
        load_checked(write_example(tmp_path, GRPO, changes))
    assert words in str(caught.value)


SAVED = {  # AReaL's defaults below the sections of the seeds' tables
    **{f"stats_logger.wandb.{name}": None for name in ("entity", "project", "name", "job_type", "group")},
    **{f"stats_logger.wandb.{name}": None for name in ("notes", "tags", "config", "id_suffix")},
    "stats_logger.wandb.mode": "disabled",
    "stats_logger.wandb.wandb_base_url": "",
    "stats_logger.wandb.wandb_api_key": "",
    **{f"stats_logger.swanlab.{name}": None for name in ("project", "name", "config", "logdir", "api_key")},
    "stats_logger.swanlab.mode": "disabled",
    "stats_logger.tensorboard.path": None,
    "launcher.slurm.srun_additional_args": "--mpi=pmi2 -K --chdir $PWD",
    "launcher.slurm.container_type": "apptainer",
    "launcher.slurm.mount": "/storage:/storage",
    "launcher.slurm.trainer_image": None,
    "launcher.slurm.inference_server_image": None,
    "cluster.name_resolve.type": "nfs",
    "cluster.name_resolve.etcd3_addr": "localhost:2379",
    "cluster.name_resolve.ray_actor_name": "ray_kv_store",
}
MODEL = {
    "fsdp": {"wrap_policy": None, "offload_params": False},
    "ds_auto_tp": {"autotp_size": None},
    "megatron": {"virtual_pipeline_parallel_size": 1, "moe_router_dtype": "fp32", "fp8_config": None},
    "mb_spec": {"n_mbs": 1, "granularity": 1, "max_tokens_per_mb": None},
}


def make_saved_config(file: str) -> dict:
    """Return the config.yaml that AReaL writes: every option of the seeds' tables at its value."""
    own = omegaconf.OmegaConf.create((FOLDER / f"{file}.yaml").read_text())
    own.launcher.pop("slurm")
    models = ("actor", "ref") if "actor" in own else ("model",)
    whole = omegaconf.OmegaConf.create(dict.fromkeys(models, MODEL))
    table = (FOLDER.parent / "parameters.tsv").read_text().splitlines()
    for row in csv.DictReader(table, delimiter="\t"):
        prefix = SECTIONS.get(row["section"], ("", "unknown."))[1].partition(".")
        is_section = row["type"].endswith(("Config", "Spec")) or row["default"].startswith(("**", '"???'))
        of_models = prefix[0] in ("actor", "model") and not prefix[2].startswith("adv_norm")
        if row["section"].startswith(("GRPO", "PPO", "Training")) and (prefix[0] or "actor") not in own:
            continue
        for section in models if of_models else prefix[:1]:
            if not is_section and (section in own or section in ("sglang", "scheduler", "")):
                name = ".".join(filter(None, (section, prefix[2].rstrip("."), row["parameter"])))
                omegaconf.OmegaConf.update(whole, name, _parse_number(row["default"]), force_add=True)
    for name, value in SAVED.items():
        omegaconf.OmegaConf.update(whole, name, value, force_add=True)
    return omegaconf.OmegaConf.to_container(omegaconf.OmegaConf.merge(whole, own), resolve=True)


@pytest.mark.parametrize("file", [GRPO, SFT, "hhrlhf_rw"])
def test_a_saved_config_of_areal_loads(file, tmp_path):
    tree = make_saved_config(file)
    assert len(tree["sglang"]) > 40
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(tree))
    loaded, usual = load_checked(path), load_checked(FOLDER / f"{file}.yaml")
    make_plan(loaded.config, loaded.explicit, interpreter="python", scheduler="slurm")
    section = "actor" if file == GRPO else "model"
    assert getattr(loaded.config, section) == getattr(usual.config, section)
    assert loaded.config.launcher.slurm.mount == loaded.config.launcher.slurm.srun_additional_args == ""


def test_the_cpu_preset_makes_it_run_here():
    loaded = load_checked(FOLDER / f"{GRPO}.yaml", presets=["cpu"])
    plan = make_plan(loaded.config, loaded.explicit, interpreter="python", scheduler="local")
    assert (plan.allocation, plan.device) == ("embedded:d1+fsdp:d1", "cpu")
    assert loaded.config.launcher.type == "local"  # also where an sbatch is on the PATH


def test_loading_and_planning_a_whole_file_needs_no_torch():
    code = f"""
import sys
from hpc_rl.config.rules.check import check
from hpc_rl.config.load.load import load
from hpc_rl.plan.plan import make_plan
loaded = check(load([{str(FOLDER / "gsm8k_grpo.yaml")!r}], presets=["cpu"]), files=False)
make_plan(loaded.config, loaded.explicit, interpreter="python", scheduler="slurm")
heavy = {{"torch", "transformers", "tokenizers", "sglang", "datasets", "wandb", "numpy"}}
print(sorted(heavy & sys.modules.keys()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr


def test_what_a_saved_file_spells_out_for_the_reference_model_and_attention_means_nothing(tmp_path):
    path = tmp_path / "saved.yaml"
    path.write_text(
        "experiment_name: e\ntrial_name: t\ntrain_dataset: {path: /d, batch_size: 8}\ngconfig: {n_samples: 4}\n"
        "actor: {path: /m, attn_impl: flash_attention_2}\n"
        "ref: {path: /m, kl_estimator: k1, importance_sampling_level: token, m2_threshold: null}\n"
    )
    found = load([path], ["cluster.n_gpus_per_node=0"])
    assert "actor.attn_impl" not in found.explicit
    assert check(found, files=False).config.actor.attn_impl == "sdpa"


MODEL_ONLY = ["experiment_name=e", "trial_name=t", "train_dataset.path=/d", "actor.path=/m"]
MODEL_ONLY += ["train_dataset.batch_size=8"]


def test_a_teacher_to_learn_from_is_a_pool_of_servers(tmp_path):
    """AReaL's teacher is another model in the trainer's ranks; ours has servers."""
    given = {"path": "/big", "backend": "fsdp:d1t4", "distill_loss_weight": 0.01, "optimizer": None}
    options = [*MODEL_ONLY, "allocation_mode=sglang[rollout]:d4+sglang[teacher]:d2+fsdp:d2"]
    loaded = check(load([], [*options, f"teacher={json.dumps(given)}"]), files=False)
    config = loaded.config
    assert (type(config), config.actor.algorithm) == (GRPOConfig, "opd")
    assert config.pools["teacher"].path == "/big"
    # AReaL's default of the weight that is not given
    assert (config.distillation.rl_loss_weight, config.distillation.distill_loss_weight) == (1.0, 0.01)
    notes = "\n".join(map(str, loaded.notes))
    assert "teacher.backend, teacher.optimizer: no effect: the teacher has servers" in notes
    with pytest.raises(ConfigError, match="allocation_mode, which is derived, has no servers for this pool"):
        check(load([], [*MODEL_ONLY, f"teacher={json.dumps(given)}"]), files=False)
