"""Commands that serve and evaluate an export outside of this program."""

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hpc_rl.core.adapters import CONFIG_NAME as ADAPTER_CONFIG
from hpc_rl.core.trial import Trial, load_object

PORTS = {"sglang": 30000, "vllm": 8000}  # their own defaults, written out for the reader
# word in the path of the training data -> task of lm-evaluation-harness
TASKS = {"gsm8k": "gsm8k", "math": "minerva_math", "mmlu": "mmlu", "arc": "arc_challenge", "ifeval": "ifeval"}
DEFAULT_TASK = "gsm8k"


@dataclass(frozen=True)
class ExportFacts:
    """What the commands need to know of an export."""

    folder: str  # or its name on the hub
    base: str = ""  # of an adapter: its base model
    rank: int = 0  # of an adapter
    has_chat_template: bool = False
    task: str = DEFAULT_TASK


def load_export_facts(folder: Path, shown: str = "", data: str = "") -> ExportFacts:
    """Return the facts of an export in a folder. `shown` stands for the folder in commands."""
    adapter = load_object(folder / ADAPTER_CONFIG)
    tokenizer = load_object(folder / "tokenizer_config.json")
    has_template = (folder / "chat_template.jinja").exists() or bool(tokenizer.get("chat_template"))
    task = next((task for word, task in TASKS.items() if word in data.lower()), DEFAULT_TASK)
    base, rank = str(adapter.get("base_model_name_or_path") or ""), int(adapter.get("r") or 0)
    return ExportFacts(shown or str(folder), base, rank, has_template, task)


def list_serve_commands(export: ExportFacts, pythons: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the shell command of each server. `pythons`: backend -> its Python, else the one on PATH."""
    name = Path(export.folder).name or "adapter"
    if export.base:
        sglang = ["--model-path", export.base, "--lora-paths", f"{name}={export.folder}"]
        vllm = [export.base, "--enable-lora", "--lora-modules", f"{name}={export.folder}"]
        vllm += ["--max-lora-rank", str(_round_up_rank(export.rank))]
    else:
        sglang, vllm = ["--model-path", export.folder], [export.folder]
    own = pythons or {}
    sglang = [own.get("sglang", "python"), "-m", "sglang.launch_server", *sglang]
    start = [str(Path(own["vllm"]).with_name("vllm"))] if "vllm" in own else ["vllm"]
    return {
        "sglang": shlex.join([*sglang, "--port", str(PORTS["sglang"])]),
        "vllm": shlex.join([*start, "serve", *vllm, "--port", str(PORTS["vllm"])]),
    }


def _round_up_rank(rank: int) -> int:
    """Return the least rank of vLLM's that holds adapters of a rank."""
    return next((one for one in (8, 16, 32, 64, 128, 256, 320, 512) if one >= rank), rank)


def make_evaluate_command(export: ExportFacts) -> str:
    """Return the shell command that evaluates an export with lm-evaluation-harness, by transformers."""
    model = {"pretrained": export.base or export.folder} | ({"peft": export.folder} if export.base else {})
    words = ["lm_eval", "--model", "hf", "--model_args", _format_arguments(model), "--tasks", export.task]
    words += ["--batch_size", "auto", "--output_path", "lm_eval_results"]
    return shlex.join([*words, *(["--apply_chat_template"] if export.has_chat_template else [])])


def _format_arguments(arguments: Mapping[str, str]) -> str:
    """Return arguments of a model of lm-evaluation-harness: `a=b,c=d`, or JSON for values with such marks."""
    if any(re.search(r"[,={}\[\]\"']", value) for value in arguments.values()):
        return json.dumps(arguments)
    return ",".join(f"{name}={value}" for name, value in arguments.items())


def list_data_paths(trial: Trial) -> list[str]:
    """Return the paths of a trial's training and held-out data."""
    stored = load_object(trial.config_json)
    sections = [stored.get(name) or {} for name in ("train_dataset", "valid_dataset")]
    return [str(section["path"]) for section in sections if isinstance(section, dict) and section.get("path")]


def find_server_pythons(trial: Trial) -> dict[str, str]:
    """Return the Python of a trial's servers, by backend: the one that has served the model already."""
    stored, plan = load_object(trial.config_json), load_object(trial.plan_json)
    python = (stored.get("launcher") or {}).get("inference_server_python")
    allocation = str(plan.get("allocation") or "")
    return {backend: str(python) for backend in PORTS if python and allocation.startswith(backend)}
