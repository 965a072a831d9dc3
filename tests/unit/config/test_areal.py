"""Files in the shape of AReaL's examples load, check and plan as they are, but for what WAITING names.

WAITING is exact: a key that starts to work must be taken out of it, and nothing may be added without this
test saying so.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from hpc_rl.config.loading.load import load
from hpc_rl.config.rules.check import check
from hpc_rl.errors import ConfigError
from hpc_rl.plan.plan import make_plan
from hpc_rl.submit.submission import render_scripts
from hpc_rl.trial import Trial

FOLDER = Path(__file__).parent / "areal"
FILES = sorted(path.stem for path in FOLDER.glob("*.yaml"))
WAITING: dict[str, set[str]] = {  # refused as not implemented
    "gsm8k_grpo": set(),
    "gsm8k_grpo_megatron": set(),
    "gsm8k_grpo_megatron_tp": set(),
    "gsm8k_grpo_megatron_moe": set(),
    "gsm8k_dr_grpo": set(),
    "gsm8k_dapo": set(),
    "gsm8k_sft": set(),
    "hhrlhf_rw": set(),
}
MESHES = {
    "gsm8k_grpo_megatron": "sglang:d4+megatron:d2p2",
    "gsm8k_grpo_megatron_tp": "sglang:d4+megatron:d2t2",
    "gsm8k_grpo_megatron_moe": "sglang:d4+megatron:(attn:d2t2|ffn:d1t1p1e4)",
}


def refused(path: Path) -> set[str]:
    """The options that a refusal begins with."""
    try:
        check(load([path], profiles=[]), files=False)
    except ConfigError as error:
        return {re.match(r"(?:unknown key )?(\S+)", line)[1] for line in str(error).splitlines()}
    return set()


def without(tree: dict, names: set[str], prefix: str = "") -> dict:
    kept = {key: value for key, value in tree.items() if prefix + key not in names}
    return {
        key: without(value, names, f"{prefix}{key}.") if isinstance(value, dict) else value
        for key, value in kept.items()
    }


@pytest.mark.parametrize("name", FILES)
def test_nothing_is_refused_but_what_is_waited_for(name):
    assert refused(FOLDER / f"{name}.yaml") == WAITING[name]


@pytest.mark.parametrize("name", FILES)
def test_the_rest_loads_and_plans_unmodified(name, tmp_path):
    tree = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
    path = tmp_path / "a.yaml"
    path.write_text(yaml.safe_dump(without(tree, WAITING[name])))
    loaded = check(load([path], profiles=[]), files=False)
    config = loaded.config
    assert config.tokenizer_path.startswith("/storage/models/Qwen")
    plan = make_plan(config, loaded.explicit, interpreter="python", scheduler="slurm")
    usual = "sglang:d4+fsdp:d4" if config.trainer == "grpo" else "fsdp:d8"
    assert plan.allocation == MESHES.get(name, usual)
    scripts = render_scripts(loaded, plan, Trial(tmp_path / "trial"), "slurm")
    assert any("srun" in text for text in scripts.values())
    if config.trainer == "grpo":
        assert (config.rollout.consumer_batch_size, config.actor.group_size, config.sglang.model_path) == (
            256,
            4,
            config.actor.path,
        )


def test_the_cpu_preset_makes_it_run_here(tmp_path):
    tree = yaml.safe_load((FOLDER / "gsm8k_grpo.yaml").read_text())
    path = tmp_path / "a.yaml"
    path.write_text(yaml.safe_dump(tree))
    loaded = check(load([path], presets=["cpu"], profiles=[]), files=False)
    plan = make_plan(loaded.config, loaded.explicit, interpreter="python", scheduler="local")
    assert (plan.allocation, plan.device) == ("embedded:d1+fsdp:d1", "cpu")


def test_loading_and_planning_a_whole_file_needs_no_torch():
    code = f"""
import sys
from hpc_rl.config.rules.check import check
from hpc_rl.config.loading.load import load
from hpc_rl.plan.plan import make_plan
loaded = check(load([{str(FOLDER / "gsm8k_grpo.yaml")!r}], presets=["cpu"]), files=False)
make_plan(loaded.config, loaded.explicit, interpreter="python", scheduler="slurm")
heavy = {{"torch", "transformers", "tokenizers", "sglang", "datasets", "wandb", "numpy"}}
print(sorted(heavy & sys.modules.keys()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr
