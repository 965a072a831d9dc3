"""Values that AReaL v0.3.0 to v1.0.4 offer and hpc-rl refuses: each has its reason here, and no reason is a method of training.

The tables are complete: a value that is refused and not listed fails, and so does a listed one that is accepted.
"""

import csv
import re
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest
import yaml

from hpc_rl.config.compat.areal_names import ANY, MODELS, NAMES
from hpc_rl.config.compat.areal_options import IDENTITY, ONE_VALUE
from hpc_rl.config.compat.areal_placement import SPEC
from hpc_rl.config.load.load import load
from hpc_rl.config.rules.check import check
from hpc_rl.config.rules.consistency import FOLLOWS
from hpc_rl.core.errors import ConfigError
from tests.unit.config.test_parameters import BASE, SECTIONS, select_rows

FOLDER = Path(__file__).parent


class Lack(StrEnum):
    """What hpc-rl lacks for the values of an option that it refuses."""

    SERVICE = "a service: Kubernetes, Ray, Sky, etcd, or AReaL's own"
    RUNTIME = "kernels, or a program"
    NOTHING_ELSEWHERE = "nothing: the refusal names the option or command that does it"
    NOTHING_REPEATED = "nothing: the option repeats another one, and contradicts it"
    NOTHING_IDLE = "nothing: the value trains nothing, or is what each trial does"
    LATER = "something that AReaL v1.0 has, and no example of any release uses"


SERVICE, RUNTIME, ELSEWHERE, REPEATED, IDLE, LATER = Lack

# `{model}` stands for actor, critic, ref and model.
REASONS: dict[Lack, tuple[str, ...]] = {
    SERVICE: (
        "cluster.name_resolve.type",  # etcd3, ray
        *("scheduler.type", "scheduler.endpoint", "scheduler.functioncall_service_domain"),
        *("scheduler.reward_functioncall_config", "scheduler.reward_model_service_url"),
        *("rollout._version", "{model}._version", "rollout.api_url"),
        *("rollout.agent.mode", "rollout.openai.mode"),  # online
    ),
    RUNTIME: (
        *("{model}.megatron.fp8_config", "{model}.megatron.ddp.fp8_param_gather"),
        "{model}.archon.fp8_config.mode",
        # these need the optimizer of Transformer Engine
        *("{model}.megatron.use_precision_aware_optimizer", "{model}.megatron.main_grads_dtype"),
        *("{model}.megatron.main_params_dtype", "{model}.megatron.exp_avg_dtype"),
        "{model}.megatron.exp_avg_sq_dtype",
        # SGLang and vLLM of today have no such option
        *("sglang.enable_ep_moe", "sglang.torchao_config", "sglang.enable_nan_detection", "vllm.swap_space"),
    ),
    ELSEWHERE: (
        "server_only",  # hpc-rl serve
        *("{model}.fsdp.ulysses_sp_size", "{model}.ds_auto_tp.autotp_size"),
        *("sglang.dp_size", "sglang.enable_dp_attention"),
        *("sglang.context_length",),  # of SFT and reward models, which have no servers
        *("{model}.offload", "{model}.fsdp.per_layer_optim_step"),
        *("{model}.megatron.use_torch_fsdp2", "{model}.megatron.use_custom_fsdp"),
        *("{model}.megatron.overlap_param_gather_with_optimizer_step", "{model}.megatron.async_save"),
        "{model}.megatron.distribute_saved_activations",
        *("scheduler.deploy_mode", "scheduler.reward_model_path"),
        *("gconfig.ignore_eos", "vllm.distributed_executor_backend", "vllm.disable_sliding_window"),
        *("reward_fn_path", "model_path", "rollout.routing_strategy"),
        *("rollout.agent.turn_discount", "rollout.openai.turn_discount"),
        *("train_dataset.dataset_kwargs", "valid_dataset.dataset_kwargs"),
        "{model}.scheduling_spec.additional_bash_cmds",
    ),
    REPEATED: (*IDENTITY, *FOLLOWS, "vllm.model"),
    IDLE: (
        *("{model}.optimizer.type", "{model}.is_critic"),
        *("{model}.megatron.wrap_with_ddp", "{model}.megatron.ddp.average_in_collective"),
        "{model}.megatron.use_checkpoint_opt_param_scheduler",
        "actor.rejection_sampling",  # as a whole, without the decoupled loss
    ),
    LATER: (
        *("actor.rejection_sampling.metric", "actor.rejection_sampling.agg"),
        *("gconfig.use_beam_search", "memory_profiler"),
        *("rollout.return_routed_experts", "sglang.enable_return_routed_experts"),
        *("recover.no_load_optim", "recover.no_save_optim"),
    ),
}


def generalize(option: str) -> str:
    """Return the name for all models: `{model}.offload` for `actor.offload`."""
    section, dot, inside = option.partition(".")
    name = f"{{model}}{dot}{inside}" if section in MODELS else option
    return name if name in {*NAMES, *ONE_VALUE, *OF_ALL_MODELS} else option


OF_ALL_MODELS = (
    "{model}.optimizer.type",
    "{model}.is_critic",
    "{model}.scheduling_spec.additional_bash_cmds",
)


def list_refusing() -> set[str]:
    """Return the options of AReaL of which hpc-rl refuses values that AReaL accepts."""
    names = {name for name, row in NAMES.items() if not row.to and ANY not in row.idle}
    of_table = {row.shown_by.partition("=")[0] for row in select_rows("refused") if row.system == "areal"}
    specs = {f"actor.scheduling_spec.{name}" for name, field in SPEC.items() if field.is_refused}
    return {generalize(name) for name in {*names, *ONE_VALUE, *IDENTITY, *FOLLOWS, *of_table, *specs}}


def test_each_option_with_refused_values_has_one_reason():
    named = [generalize(name) for names in REASONS.values() for name in names]
    assert sorted(named) == sorted(list_refusing())


def test_what_only_later_releases_have_is_not_in_the_table_of_the_first():
    first = {f"{SECTIONS[row['section']][1]}{row['parameter']}" for row in PARAMETERS}
    assert not first & {*REASONS[LATER]}


# -- the values of AReaL's table, v0.3


with (FOLDER / "parameters.tsv").open(newline="") as _file:
    PARAMETERS = [row for row in csv.DictReader(_file, delimiter="\t") if row["system"] == "areal"]

# Option, value -> words of the refusal. All other values that the table offers are accepted.
REFUSED_VALUES: dict[tuple[str, Any], str] = {
    **{("allocation_mode", word): "leave it empty" for word in ("manual", "heuristic")},
    ("actor.optimizer", None): "would train nothing",
    ("model.optimizer", None): "would train nothing",
    ("actor.optimizer.type", "empty"): "would train nothing",
    ("actor.is_critic", True): "a policy needs one output for each token of the vocabulary",
    ("model.is_critic", True): "only trainer rw trains",
    ("sglang.enable_dp_attention", True): "use more servers",
    ("sglang.enable_ep_moe", True): "use sglang.ep_size",
    ("sglang.enable_nan_detection", True): "SGLang 0.5.23 lacks this option",
}
NEEDED = {  # option -> settings without which it has no effect, also in AReaL
    "actor.overlong_reward_penalty": {"actor.overlong_tokens": 8, "actor.overlong_penalty_factor": 1.0},
    "actor.log_agent_stats": {"actor.log_agent_stats_keys": ["turns"]},
    "actor.pad_to_maximum": {"actor.mb_spec.max_tokens_per_mb": 65536},
    "model.pad_to_maximum": {"model.mb_spec.max_tokens_per_mb": 65536},
    "gconfig.greedy": {"gconfig.n_samples": 1, "actor.ppo_n_minibatches": 1},
}


def list_offered(row: dict[str, str]) -> list[Any]:
    """Return the values that the table offers by name: choices, both truth values, null."""
    choices = re.search(r"Choices:\W+((?:\w+(?:, )?)+)", row["description"])
    named = choices[1].split(", ") if choices else re.findall(r"'(\w+)':", row["description"])
    truth = [True, False] if row["type"] == "boolean" else []
    return [*named, *truth, *([None] if "None" in row["type"] else [])]


def collect_values(trainer: str) -> dict[str, list[Any]]:
    """Return the accepted values of each option of a trainer with any."""
    found = {}
    for row in PARAMETERS:
        kind, prefix = SECTIONS[row["section"]]
        option = f"{prefix}{row['parameter']}"
        values = [value for value in list_offered(row) if (option, value) not in REFUSED_VALUES]
        if kind == trainer and values:
            # never both: with greedy decoding, dynamic sampling would drop every group
            found[option] = values[::-1] if option == "gconfig.greedy" else values
    return found


OFFERED = {trainer: collect_values(trainer) for trainer in BASE}


def write_settings(folder: Path, settings: dict[str, Any]) -> Path:
    tree: dict[str, Any] = {}
    for name, value in settings.items():
        *sections, leaf = name.split(".")
        inside: Any = tree
        for section in sections:
            inside = inside.setdefault(section, {})
        if inside is not None:  # else its section is null
            inside[leaf] = value
    path = folder / "a.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def test_the_table_offers_values():
    counts = {trainer: sum(map(len, values.values())) for trainer, values in OFFERED.items()}
    assert counts == {"grpo": 128, "sft": 13, "rw": 3}
    assert OFFERED["grpo"]["recover.mode"] == ["disabled", "auto", "fault", "resume"]
    assert OFFERED["grpo"]["actor.adv_norm.mean_level"] == ["batch", "group", None]


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("trainer", BASE)
def test_offered_values_are_accepted(trainer, number, tmp_path):
    """Each option has its next value at each number, all options together."""
    chosen = {option: values[number % len(values)] for option, values in OFFERED[trainer].items()}
    for option, settings in NEEDED.items():
        chosen |= settings if chosen.get(option) else {}
    words = [word for word in BASE[trainer] if word.partition("=")[0] not in chosen]
    check(load([write_settings(tmp_path, chosen)], words, profiles=[]), files=False)


@pytest.mark.parametrize(("option", "value"), REFUSED_VALUES, ids=str)
def test_a_refused_value_has_its_reason(option, value, tmp_path):
    trainer = "sft" if option.startswith("model.") else "grpo"
    path = write_settings(tmp_path, {option: value})
    with pytest.raises(ConfigError, match=re.escape(REFUSED_VALUES[option, value])) as caught:
        check(load([path], BASE[trainer], profiles=[]), files=False)
    assert [one.option for one in caught.value.refusals] == [option]
