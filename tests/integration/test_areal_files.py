"""AReaL's files of v0.3 to v1.0, and one in ATLAS's names, run end to end on the toy: only paths, a short
length and `--preset cpu` are said beside them, and the mesh of the trainer where one is wanted.
"""

import json
import shutil
import time
from pathlib import Path

import pytest
import yaml
from patience import extend, look
from toy_trials import ROOT, hpc_rl, logs_of, make_quickstart, status
from transformers import AutoConfig, AutoModelForCausalLM

from hpc_rl.core.trial import Trial
from hpc_rl.stats.read import load_history
from tests.unit.config.test_areal import EXAMPLES, make_saved_config, write_example
from tests.unit.config.test_areal_recent import write_recent

STEPS = 2
ROWS = {  # example -> trainer's section, training rows, held-out rows
    "multi_turn": ("actor", "gsm8k", "gsm8k-heldout"),
    "sft": ("model", "sft", "sft"),  # as AReaL saves it, with every option
    "reward_model": ("model", "preferences", "preferences-heldout"),
    "megatron": ("actor", "train", "heldout"),
    "megatron_moe": ("actor", "train", "heldout"),
}
SOON = ("multi_turn", "megatron_moe")  # the others only in `make soak`
MESHES = {
    "megatron": "embedded:d1+megatron:d1p1t2",
    "megatron_moe": "embedded:d1+megatron:(attn:d1p1t2|ffn:d1p1t1e2)",
}
OF_RL, PAIRS = ("gsm8k", "gsm8k-heldout"), ("preferences", "preferences-heldout")
# A reward model's file is that of DPO but for these.
REWARD_MODEL = [
    "train_dataset.type=rw",
    "valid_dataset.type=rw",
    "actor.is_critic=true",
    "~ref",
    "~actor.beta",
]
FILES = {"v1_0_reward_model": "alignment/hhrlhf_dpo"}
# Configuration of v1.0.4 -> training rows, held-out rows, what is said beside it
RECENT: dict[str, tuple[str, str, list[str]]] = {
    "math/gsm8k_grpo": (*OF_RL, []),
    "math/gsm8k_dapo_dynamic_bs": (*OF_RL, []),
    "math/gsm8k_gspo": (*OF_RL, []),
    "math/gsm8k_sapo": (*OF_RL, []),
    "math/gsm8k_m2po": (*OF_RL, []),
    "math/gsm8k_reinforce_baseline": (*OF_RL, []),
    "experimental/prox_approx/gsm8k_grpo_prox_approx_eval": (*OF_RL, []),
    "math/gsm8k_grpo_lora": (*OF_RL, []),
    "math/gsm8k_grpo_megatron_lora_moe": (*OF_RL, []),
    "math/gsm8k_ppo_megatron": (*OF_RL, []),
    "distillation/gsm8k_grpo_distill": (
        *OF_RL,
        ["allocation_mode=embedded[rollout]:d1+embedded[teacher]:d1+fsdp:d1", "teacher.path={model}"],
    ),
    "alignment/hhrlhf_dpo": (*PAIRS, []),
    "v1_0_reward_model": (*PAIRS, REWARD_MODEL),
    "vlm/clevr_count_70k_sft": ("sft", "sft", []),  # its model is of text here
}
RECENT_SOON = ("alignment/hhrlhf_dpo", "vlm/clevr_count_70k_sft")
EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """The toy, with a context in which the files' max_new_tokens of 1024 finds room, and `wide` for 4096."""
    folder = tmp_path_factory.mktemp("areal")
    make_quickstart(folder)
    task = folder / "quickstart" / "task"
    for name, sums in (("gsm8k", "train"), ("gsm8k-heldout", "heldout")):  # the sums, in GSM8K's columns
        rows = map(json.loads, (task / f"{sums}.jsonl").read_text().splitlines())
        lines = [
            json.dumps(
                {"question": row["prompt"], "answer": f"So it is {row['answer']}.\n#### {row['answer']}"}
            )
            for row in rows
        ]
        (task / f"{name}.jsonl").write_text("\n".join(lines))
    config = folder / "quickstart" / "base" / "config.json"
    sizes = json.loads(config.read_text()) | {"max_position_embeddings": 2048}
    config.write_text(json.dumps(sizes))
    wide = shutil.copytree(config.parent, folder / "quickstart" / "wide")
    (wide / "config.json").write_text(json.dumps(sizes | {"max_position_embeddings": 8192}))
    experts = shutil.copytree(config.parent, folder / "quickstart" / "experts")
    (experts / "model.safetensors").unlink()
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**sizes | EXPERTS))
    model.save_pretrained(experts)
    return folder


@pytest.fixture(scope="module")
def trials(place, request) -> dict[str, Trial]:
    """Those of the tests that run, all at once: submit returns at once."""
    made = {}
    calls = [item.callspec for item in request.session.items if hasattr(item, "callspec")]
    names = {call.params.get("name") for call in calls}
    toy = place / "quickstart"
    for name, (model, train, valid) in ROWS.items():
        if name not in names:
            continue
        path = toy / ("experts" if name.endswith("moe") else "base")
        file, changes, *_ = EXAMPLES[name]
        folder = place / name
        folder.mkdir()
        config = write_example(folder, file, changes)
        if name == "sft":
            text = yaml.safe_dump(make_saved_config(file)).replace("/storage/experiments", str(toy / "runs"))
            config.write_text(text.replace("/storage/models/Qwen2.5-1.5B-Instruct", str(path)))
        more = ["actor.log_agent_stats=true", "actor.log_agent_stats_keys=[turns]"] * (name == "multi_turn")
        if name in MESHES:
            more = [f"trial_name={name}", f"allocation_mode={MESHES[name]}", f"ref.path={path}"]
        said = hpc_rl(
            "submit", "--json", "--config", config, "--preset", "cpu", f"total_train_steps={STEPS}",
            f"cluster.fileroot={toy / 'runs'}", f"cluster.name_resolve.nfs_record_root={toy / 'names'}",
            f"{model}.path={path}", *more, f"train_dataset.path={toy / 'task' / train}.jsonl",
            f"valid_dataset.path={toy / 'task' / valid}.jsonl", "launcher.type=local", cwd=place,
        )  # fmt: skip
        made[name] = Trial(Path(json.loads(said.stdout)["dir"]))
    return made


def wait_for(trial: Trial, place: Path, limit_s: float) -> None:
    deadline = time.monotonic() + extend(limit_s)
    while not look(trial.done.exists, 1):
        state = status(place, str(trial))["state"]
        assert state not in ("failed", "cancelled"), logs_of(trial)
        assert time.monotonic() < deadline, logs_of(trial)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "name", [name if name in SOON else pytest.param(name, marks=pytest.mark.soak) for name in ROWS]
)
def test_it_runs_to_its_end(trials, place, name):
    trial = trials[name]
    wait_for(trial, place, 380)
    assert (trial.exports / "final" / "model.safetensors").is_file()
    history = load_history(trial)
    assert [row["step"] for row in history.steps] == [1, 2]
    assert history.held_out[1][-1][0] == STEPS  # after the last step, whatever evaluator.freq_epochs says
    config = json.loads(trial.config_json.read_text())
    if ROWS[name][0] == "actor":  # the file's numbers are those that ran
        assert (config["actor"]["group_size"], config["rollout"]["consumer_batch_size"]) == (4, 256)
        assert all(row["num_tokens"] >= 256 * 4 for row in history.steps)
    if name == "multi_turn":  # of the random model one completion in 250 ends in the right number
        assert config["rollout"]["reward_fn"] == "math_verify"
        assert config["rollout"]["workflow"] == "multi_turn"  # the file names none
        # a second turn, if the first answer is wrong
        assert all(row["agent/turns"] > 1 for row in history.steps)
        assert any(row["reward"] > 0 for row in history.steps)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name", [name if name in RECENT_SOON else pytest.param(name, marks=pytest.mark.soak) for name in RECENT]
)
def test_a_file_of_v1_0_trains(place, name):
    train, valid, more = RECENT[name]
    toy, folder = place / "quickstart", place / name.replace("/", "_")
    model = toy / "wide"
    folder.mkdir()
    said = hpc_rl(
        "submit", "--json", "--config", write_recent(folder, FILES.get(name, name)), "--preset", "cpu",
        f"total_train_steps={STEPS + 1}", f"experiment_name={folder.name.replace('_', '-')}",
        f"cluster.fileroot={toy / 'runs'}", f"cluster.name_resolve.nfs_record_root={toy / 'names'}",
        f"actor.path={model}", f"train_dataset.path={toy / 'task' / train}.jsonl",
        f"valid_dataset.path={toy / 'task' / valid}.jsonl", "launcher.type=local",
        *(one.format(model=model) for one in more), cwd=place,
    )  # fmt: skip
    trial = Trial(Path(json.loads(said.stdout)["dir"]))
    wait_for(trial, place, 560)
    history = load_history(trial)
    assert [row["step"] for row in history.steps] == [1, 2, 3]
    assert all(row["grad_norm"] >= 0 for row in history.steps)
    assert any((trial.exports / "final").glob("*.safetensors"))


def test_a_file_as_atlas_documents_it_trains(place):
    toy = place / "quickstart"
    said = hpc_rl(
        "submit", "--json", "--config", ROOT / "tests/unit/config/atlas.yaml", "--preset", "atlas", "--preset", "cpu",
        "experiment_name=atlas", "trial_name=t", f"cluster.fileroot={toy / 'runs'}", "launcher.type=local",
        f"model_name_or_path={toy / 'base'}", f"train_dataset.path={toy / 'task' / 'train'}.jsonl",
        "gradient_accumulation_steps=2", "max_completion_length=8", "report_to=none",
        f"total_train_steps={STEPS}", cwd=place,
    )  # fmt: skip
    trial = Trial(Path(json.loads(said.stdout)["dir"]))
    wait_for(trial, place, 160)
    # 8 sequences twice on one rank are two questions with 8 answers each
    assert [round(row["num_tokens"] / row["seq_len"]) for row in load_history(trial).steps] == [16, 16]
    assert load_history(trial).steps[1]["kl_loss"] >= 0
