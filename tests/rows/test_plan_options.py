"""Options of every trainer that say where a trial is, and what its processes are given: by the plan of a whole one."""

from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from hpc_rl.config.environment_file import make_environment_settings
from hpc_rl.config.load.load import load
from hpc_rl.config.rules.check import check
from hpc_rl.core.trial import Trial
from hpc_rl.datasets.curriculum import Curriculum
from hpc_rl.datasets.encode import Prompts
from hpc_rl.datasets.order import locate
from hpc_rl.examples.toy import ALPHABET, make_tokenizer
from hpc_rl.plan.plan import make_plan
from hpc_rl.plan.schema import Plan
from hpc_rl.render.scripts import Stamp, render
from hpc_rl.roles.rollout import open_prompts
from hpc_rl.roles.rollout_worker import open_servers
from hpc_rl.rollout.sequencer import make_rules
from hpc_rl.servers.base import ReplicaPlace
from hpc_rl.servers.server_process import find_tokenizer
from hpc_rl.servers.sglang import SGLangBackend
from hpc_rl.trials.submission import make_trial

TRAINERS = ("grpo", "sft", "rw")


def checked(trainer: str, *overrides: str, **more):
    section = "actor" if trainer == "grpo" else "model"
    words = ["experiment_name=e", "trial_name=t", f"trainer={trainer}", f"{section}.path=/m"]
    words += ["train_dataset.path=/d", "train_dataset.batch_size=64"]
    return check(load([], [*words, *overrides], **{"profiles": [], **more}), files=False)


def planned(trainer: str, *overrides: str) -> Plan:
    loaded = checked(trainer, *overrides)
    return make_plan(loaded.config, loaded.explicit, interpreter="python", scheduler="slurm")


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize(
    ("option", "place"),
    [
        ("experiment_name", "/r/USER/other/t"),
        ("trial_name", "/r/USER/e/other"),
        ("cluster.fileroot", "other/USER/e/t"),
    ],
    ids=lambda value: value if "/" not in value else "",
)
def test_a_trial_lies_where_its_names_say(trainer, option, place, monkeypatch):
    monkeypatch.setattr("hpc_rl.trials.submission.find_account_name", lambda: "USER")
    value = "/other" if "fileroot" in option else "other"
    overrides = ["cluster.fileroot=/r", f"{option}={value}"]
    assert str(make_trial(checked(trainer, *overrides).config).dir).endswith(place)


@pytest.mark.parametrize("trainer", TRAINERS)
def test_the_plan_has_the_machines_and_the_division_that_are_asked_for(trainer):
    machines = ["cluster.n_nodes=2", "cluster.n_gpus_per_node=4"]
    made = planned(trainer, *machines)
    assert (made.n_nodes, made.n_gpus_per_node) == (2, 4)
    assert made.allocation == ("sglang:d4+fsdp:d4" if trainer == "grpo" else "fsdp:d8")
    other = "sglang:d2+fsdp:d6" if trainer == "grpo" else "fsdp:d4t2"
    assert planned(trainer, *machines, f"allocation_mode={other}").allocation == other


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_process_is_given_what_the_launcher_says(trainer):
    """And the job's script asks for it."""
    asked = {"trainer_cpus_per_gpu": 3, "trainer_mem_per_gpu": 700, "trainer_env_vars": "A=1"}
    if trainer == "grpo":
        asked |= {"inference_server_cpus_per_gpu": 5, "inference_server_mem_per_gpu": 900}
    overrides = [f"launcher.{name}={value}" for name, value in asked.items()]
    division = "sglang:d1t2+fsdp:d2" if trainer == "grpo" else "fsdp:d4"
    overrides += [
        f"allocation_mode={division}",
        "cluster.n_gpus_per_node=4",
        "launcher.slurm.partition=night",
    ]
    loaded = checked(trainer, *overrides)
    plan = make_plan(loaded.config, loaded.explicit, interpreter="python", scheduler="slurm")
    given = {unit.role: (unit.cpus_per_task, unit.mem_mb_per_task) for unit in plan.units}
    assert given["trainer"] == (3, 700)
    assert next(unit.env["A"] for unit in plan.units if unit.role == "trainer") == "1"
    assert trainer != "grpo" or given["server"] == (2 * 5, 2 * 900)
    stamp = Stamp(
        version="1",
        config_sha256="0",
        command=["x"],
        tag="t",
        wheel="w",
        workdir=Path("/w"),
        start_mode="auto",
    )
    script = render(loaded.config, plan, make_trial(loaded.config), stamp, "slurm", [])["trial.sbatch"]
    assert "\n#SBATCH --partition=night\n" in script


def test_a_server_is_started_as_the_configuration_says():
    loaded = checked("grpo", "sglang.mem_fraction_static=0.5", "launcher.inference_server_env_vars=X=1")
    backend = SGLangBackend.create(loaded.config, ReplicaPlace(0, "cuda", 1, Path("log"), Path("key")))
    assert backend.settings["mem_fraction_static"] == 0.5
    assert backend.process.env["X"] == "1"
    embedded = planned("grpo", "cluster.n_gpus_per_node=0", "launcher.inference_server_env_vars=X=1").units
    assert next(unit.env["X"] for unit in embedded if unit.role == "server") == "1"


def test_a_server_has_the_setup_time_to_start():
    config = checked("grpo", "rollout.setup_timeout=77").config
    backend = SGLangBackend.create(config, ReplicaPlace(0, "cuda", 1, Path("log"), Path("key")))
    assert backend.process.ready_timeout_s == 77


def rollout_prompts(tmp_path: Path, *overrides: str) -> tuple[Curriculum, dict[str, Prompts]]:
    """What the rollout role opens of two files, with the tokenizer of the model or another one."""
    for name, alphabet in (("model", ALPHABET), ("other", ALPHABET[::-1])):
        make_tokenizer(alphabet).save_pretrained(tmp_path / name)
    for name, start in (("train", 10), ("valid", 50)):
        rows = (f'{{"prompt": "{start + i}", "answer": "1"}}' for i in range(8))
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    words = [f"actor.path={tmp_path}/model", f"train_dataset.path={tmp_path}/train.jsonl"]
    words += [f"valid_dataset.path={tmp_path}/valid.jsonl", *overrides]
    return open_prompts(checked("grpo", *words).config)


def test_the_rollout_role_orders_prompts_by_the_seed(tmp_path):
    for seed in (5, 6):
        prompts, held_out = rollout_prompts(tmp_path, f"seed={seed}")
        order = [locate(index, seed, 8, True)[1] for index in range(8)]
        drawn = [prompts.get(prompts.draw(index, {}, {})) for index in range(8)]
        assert [prompt.columns["prompt"] for prompt in drawn] == [f"{10 + i}" for i in order]
        assert held_out[""].in_file_order(1).columns["prompt"] == "51"
    # an environment brings its own prompts
    prompts, held_out = rollout_prompts(tmp_path, "environments={}", "total_train_steps=3")
    assert (len(prompts), len(held_out[""])) == (0, 8)
    assert rollout_prompts(tmp_path, "valid_dataset=null")[1] == {}


def test_the_rollout_role_takes_the_tokenizer_of_another_folder(tmp_path):
    all_prompts = (
        rollout_prompts(tmp_path, f"tokenizer_path={path}")[0] for path in ("''", f"{tmp_path}/other")
    )
    own, other = (prompts.get(prompts.draw(0, {}, {})) for prompts in all_prompts)
    assert own.columns == other.columns and own.input_ids != other.input_ids


def test_an_environment_is_told_of_the_tokenizer_of_another_folder():
    config = checked("grpo", "environments={}", "total_train_steps=3", "tokenizer_path=/other").config
    assert make_environment_settings(config, "a", "http://h", "token")["env"]["tokenizer_name"] == "/other"


async def test_workers_and_servers_take_the_tokenizer_of_another_folder(tmp_path):
    make_tokenizer().save_pretrained(tmp_path / "other")
    config = checked("grpo", f"tokenizer_path={tmp_path}/other").config
    trial = Trial(tmp_path / "trial")
    trial.make_dirs()
    async with AsyncExitStack() as stack:
        pool = await open_servers(stack, trial, config, "rollout", "token")
        assert str(pool.tokenizer.folder) == find_tokenizer(config) == f"{tmp_path}/other"


def test_the_rollout_role_follows_the_configuration():
    overrides = ["async_training=false", "gconfig.n_samples=3", "rollout.queue_size=99"]
    made = make_rules(checked("grpo", *overrides, "rollout.max_head_offpolicyness=5").config)
    assert (made.eta, made.n_samples, made.queue_size) == (0, 3, 99)


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_profile_is_found_by_the_name_of_the_cluster(trainer, tmp_path):
    (tmp_path / "big.yaml").write_text("cluster: {n_gpus_per_node: 2, n_nodes: 3}\n")
    config = checked(trainer, "cluster.cluster_name=big", profiles=[tmp_path]).config
    assert (config.cluster.n_nodes, config.cluster.n_gpus_per_node) == (3, 2)
