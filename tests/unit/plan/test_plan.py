"""make_plan: derived values, refusals, and the resources that every node requests."""

import json
import re

import pytest

from hpc_rl.config.load.load import load
from hpc_rl.config.rules.check import check
from hpc_rl.core.errors import ConfigError, DoesNotFit, NotBuilt
from hpc_rl.plan.plan import apply_threads_per_core, make_plan
from hpc_rl.plan.schema import Plan, Pool

COMMON = ["experiment_name=toy", "trial_name=t1", "train_dataset.path=/t", "train_dataset.batch_size=64"]
COMMON += ["cluster.n_gpus_per_node=0"]
GRPO = [*COMMON, "actor.path=/m", "gconfig.n_samples=4"]
SFT = [*COMMON, "model.path=/m"]


def plan_trial(*overrides: str, base: list[str] = GRPO, scheduler: str = "slurm") -> Plan:
    loaded = check(load([], [*base, *overrides]), files=False)
    return make_plan(loaded.config, loaded.explicit, interpreter="/venv/bin/python", scheduler=scheduler)


def list_places(made: Plan) -> list[tuple]:
    return [(unit.role, unit.index, unit.nodes, unit.tasks_per_node) for unit in made.units]


@pytest.mark.parametrize(
    ("overrides", "allocation"),
    [
        ([], "embedded:d1+fsdp:d1"),
        (["--n_nodes=2"], "embedded:d1+fsdp:d1"),
        (["--n_nodes=3"], "embedded:d2+fsdp:d1"),
        (["--n_nodes=4"], "embedded:d2+fsdp:d2"),
        (["cluster.n_gpus_per_node=8"], "sglang:d4+fsdp:d4"),
        (["cluster.n_gpus_per_node=3"], "sglang:d2+fsdp:d1"),
        (["cluster.n_gpus_per_node=8", "--n_nodes=4"], "sglang:d16+fsdp:d16"),
        (["cluster.n_gpus_per_node=8", "--n_nodes=3"], "sglang:d16+fsdp:d8"),
    ],
)
def test_derived_allocations(overrides, allocation):
    made = plan_trial(*overrides)
    assert made.allocation == allocation
    assert any(allocation in note for note in map(str, made.notes))


def test_sft_takes_everything():
    assert plan_trial(base=SFT).allocation == "fsdp:d1"
    made = plan_trial("cluster.n_gpus_per_node=8", "--n_nodes=2", base=SFT)
    assert made.allocation == "fsdp:d16"
    assert list_places(made) == [("trainer", 0, [0, 1], 8)]
    assert made.pools == []


STUDENT = ("pools.student.path=/models/student", "rollout.workflow=my.workflows:ask")
TWO_POOLS = (*STUDENT, "allocation_mode=vllm[teacher]:d2+sglang[student]:t2+fsdp:d12")


def test_pools_have_servers_of_their_own():
    made = plan_trial(*TWO_POOLS, "cluster.n_gpus_per_node=8", "--n_nodes=2")
    assert made.pools == [Pool(name="teacher", backend="vllm"), Pool(name="student", backend="sglang")]
    servers = [unit for unit in made.units if unit.role == "server"]
    assert [(one.index, one.pool, one.nodes, one.gpu_offset, one.gpus_per_task) for one in servers] == [
        (0, "teacher", [0], 6, 1),
        (1, "teacher", [0], 7, 1),
        (2, "student", [1], 6, 2),
    ]
    assert [one.launch_line for one in servers] == ["server_teacher", "server_teacher", "server_student"]
    assert Plan.from_json(json.loads(json.dumps(made.to_json()))) == made


def test_pools_are_on_different_nodes_where_there_are_enough():
    mode = "allocation_mode=embedded[teacher]:d1+embedded[student]:d1+fsdp:d1"
    made = plan_trial(*STUDENT, mode, "--n_nodes=3")
    assert [unit.nodes for unit in made.units if unit.role == "server"] == [[1], [2]]


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("embedded[teacher]:d1+embedded[other]:d1+fsdp:d1", "set pools.teacher.path or pools.other.path"),
        ("embedded[student]:d1+fsdp:d1", "It has 0; add embedded:d1+embedded[student]:d1+fsdp:d1"),
    ],
)
def test_one_pool_follows_the_trainer(mode, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        plan_trial(*STUDENT, f"allocation_mode={mode}")


def test_four_nodes_without_gpus():
    made = plan_trial("--n_nodes=4")
    assert list_places(made) == [
        ("server", 0, [2], 1),
        ("server", 1, [3], 1),
        ("rollout", 0, [0], 1),
        ("trainer", 0, [0, 1], 1),
    ]
    modules = {unit.role: unit.module for unit in made.units}
    assert modules == {role: f"hpc_rl.roles.{role}" for role in ("server", "rollout", "trainer")}
    assert all(unit.gpus_per_task == 0 for unit in made.units)
    assert (made.device, made.python) == ("cpu", "/venv/bin/python")
    assert made.pools == [Pool(name="rollout", backend="embedded")]
    # node 0: supervisor 1 + rollout 4 + rank 4
    assert (made.cpus_per_node, made.mem_mb_per_node) == (9, 1024 + 16384 + 32768)


@pytest.mark.parametrize(
    ("threads", "cpus_of_groups"),
    [(1, [1 + 7 + 2 * 3, 2 * 7]), (2, [1 + 8 + 2 * 3, 2 * 7]), (4, [1 + 8 + 8, 2 * 8])],
)
def test_each_step_is_given_whole_cores(threads, cpus_of_groups):
    options = ["--n_nodes=3", "allocation_mode=embedded:d4+fsdp:d2", "launcher.slurm.layout=hetjob"]
    options += ["launcher.inference_server_cpus_per_gpu=7", "launcher.rollout_cpus=7"]
    options += ["launcher.trainer_cpus_per_gpu=3"]
    made = apply_threads_per_core(plan_trial(*options), threads)
    assert made.threads_per_core == threads and Plan.from_json(made.to_json()) == made
    assert [group.cpus_per_node for group in made.groups] == cpus_of_groups


@pytest.mark.parametrize(
    ("options", "cpus"),
    [
        ([], 1 + 8 + 8),
        (["launcher.slurm.extra_args=[--hint=nomultithread]"], 1 + 7 + 8),
        (["launcher.slurm.extra_args=['--prefer=a --threads-per-core=1']"], 1 + 7 + 8),
        (["launcher.slurm.srun_args.trainer=[--hint=nomultithread]"], 1 + 8 + 2 * 8),
        (["launcher.slurm.srun_additional_args=--threads-per-core=1"], 1 + 2 * 7 + 2 * 8),
        (["launcher.slurm.srun_args.server=[--threads-per-core=4]"], 1 + 8 + 8),
    ],
)
def test_a_job_or_a_step_that_leaves_threads_idle_is_counted_so(options, cpus):
    # node 0 of nodes with two threads per core: supervisor, rollout role of 7, 2 ranks of 4
    mode = ["--n_nodes=2", "allocation_mode=embedded:d2+fsdp:d2", "launcher.slurm.layout=hetjob"]
    sizes = ["launcher.rollout_cpus=7", "launcher.trainer_cpus_per_gpu=4"]
    loaded = check(load([], [*GRPO, *mode, *sizes, *options]), files=False)
    kinds = {"interpreter": "python", "scheduler": "slurm", "threads_per_core": 2}
    made = make_plan(loaded.config, loaded.explicit, **kinds)
    assert made.groups[0].cpus_per_node == cpus


def test_gpus_are_packed_by_index():
    made = plan_trial("cluster.n_gpus_per_node=8", "allocation_mode=sglang:d2t2+fsdp:d4")
    servers = [unit for unit in made.units if unit.role == "server"]
    places = [(unit.gpu_offset, unit.gpus_per_task, unit.cpus_per_task) for unit in servers]
    assert places == [(4, 2, 8), (6, 2, 8)]
    assert (made.device, made.pools) == ("cuda", [Pool(name="rollout", backend="sglang")])


def test_what_is_left():
    assert (
        plan_trial("--n_nodes=4", "allocation_mode=embedded:d*+fsdp:d1").allocation == "embedded:d3+fsdp:d1"
    )
    assert (
        plan_trial("cluster.n_gpus_per_node=8", "allocation_mode=sglang:d*t2+fsdp:d4").allocation
        == "sglang:d2t2+fsdp:d4"
    )
    assert (
        plan_trial("cluster.n_gpus_per_node=8", "allocation_mode=sglang:d2+d*").allocation
        == "sglang:d2+fsdp:d6"
    )
    with pytest.raises(ConfigError, match="only one part"):
        plan_trial("allocation_mode=embedded:d*+d*")
    with pytest.raises(DoesNotFit, match="nothing is left"):
        plan_trial("cluster.n_gpus_per_node=8", "allocation_mode=sglang:d*+d8")


def test_environment_and_python_of_the_configuration():
    variables = ("launcher.trainer_env_vars=A=b,C=d=e", "launcher.inference_server_env_vars={X: 1}")
    made = plan_trial(*variables, "launcher.python=/other/python")
    found = {unit.role: unit.env for unit in made.units}
    assert found == {"server": {"X": "1"}, "rollout": {}, "trainer": {"A": "b", "C": "d=e"}}
    assert made.python == "/other/python"


def test_memory_of_trainers_on_gpus_grows_in_place_unless_the_user_has_another_wish():
    def variables(*overrides: str) -> dict[str, str]:
        units = plan_trial("cluster.n_gpus_per_node=8", "allocation_mode=sglang:d4+fsdp:d4", *overrides).units
        assert not any("ALLOC" in name for unit in units if unit.role == "server" for name in unit.env)
        return next(unit.env for unit in units if unit.role == "trainer")

    expandable = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    assert variables("launcher.trainer_env_vars=A=b").items() >= (expandable | {"A": "b"}).items()
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        own = variables(f"launcher.trainer_env_vars={{{name}: 'max_split_size_mb:128'}}")
        assert [value for key, value in own.items() if "ALLOC" in key] == ["max_split_size_mb:128"]


@pytest.mark.parametrize(
    ("train", "value"), [("megatron:d2t2", "1"), ("megatron:d4", None), ("fsdp:d2t2", None)]
)
def test_messages_of_megatrons_tensor_ranks_start_in_order(train, value):
    gpus = ("cluster.n_gpus_per_node=8", "train_dataset.batch_size=8")
    made = plan_trial(*gpus, f"allocation_mode=sglang:d4+{train}")
    assert made.units[-1].env.get("CUDA_DEVICE_MAX_CONNECTIONS") == value


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["--n_nodes=4", "allocation_mode=embedded:d1+fsdp:d2"], "nearest that fits: embedded:d2+fsdp:d2"),
        (["--n_nodes=4", "allocation_mode=embedded:d1+fsdp:d1"], "some of 4 nodes would stay idle"),
        (
            ["cluster.n_gpus_per_node=8", "allocation_mode=sglang:d4+fsdp:d8"],
            "needs 12 GPUs, 1 node(s) of 8 GPUs have 8; the nearest that fits: sglang:d",
        ),
        (
            ["cluster.n_gpus_per_node=8", "--n_nodes=2", "allocation_mode=sglang:d3t2+fsdp:d8"],
            "the nearest that fits: sglang:d4t2+fsdp:d8",
        ),
        (["cluster.n_gpus_per_node=1"], "cluster.n_gpus_per_node 1: one GPU can't hold both"),
        (["train_dataset.batch_size=4", "allocation_mode=embedded:d1+fsdp:d8"], "an update has 4 row"),
    ],
)
def test_what_does_not_fit_names_the_nearest_that_does(overrides, words):
    with pytest.raises(DoesNotFit) as caught:
        plan_trial(*overrides)
    assert words in str(caught.value)


def test_sft_that_does_not_fit():
    words = r"3 ranks can't be spread evenly over 2 nodes; the nearest that fits: fsdp:d[24]"
    with pytest.raises(DoesNotFit, match=words):
        plan_trial("--n_nodes=2", "allocation_mode=fsdp:d3", base=SFT)


def test_megatron_is_planned_with_all_its_ranks():
    gpus = ("cluster.n_gpus_per_node=8", "train_dataset.batch_size=2")
    made = plan_trial(*gpus, "allocation_mode=sglang:d4+megatron:d2t2")
    trainer = made.units[-1]
    assert (made.allocation, trainer.role, trainer.num_tasks) == ("sglang:d4+megatron:d2t2", "trainer", 4)
    # what config show says loads again
    assert plan_trial("actor.backend=megatron").allocation == "embedded:d1+megatron:d1"
    with pytest.raises(
        ConfigError, match=r"actor.backend megatron contradicts allocation_mode .*; set fsdp, or"
    ):
        plan_trial("actor.backend=megatron", "allocation_mode=embedded:d1+fsdp:d1")


def test_servers_and_trainer_in_turn_have_the_same_gpus():
    gpus = "cluster.n_gpus_per_node=8"
    made = plan_trial(gpus, "--n_nodes=2", "allocation_mode=sglang:d4t4|fsdp:d16")
    *servers, _, trainer = made.units
    assert made.shares_gpus and not plan_trial(gpus).shares_gpus
    assert [(one.nodes, one.gpu_offset, one.gpus_per_task) for one in servers] == [
        ([0], 0, 4), ([0], 4, 4), ([1], 0, 4), ([1], 4, 4),
    ]  # fmt: skip
    assert (trainer.nodes, trainer.tasks_per_node, trainer.gpus_per_task) == ([0, 1], 8, 1)
    without = plan_trial("--n_nodes=2", "allocation_mode=embedded:d4|fsdp:d4")
    assert [one.nodes for one in without.units if one.role == "server"] == [[0], [0], [1], [1]]
    with pytest.raises(DoesNotFit, match=r"nearest that fits: sglang:d2t4\|fsdp:d8"):
        plan_trial(gpus, "allocation_mode=sglang:d4t4|fsdp:d16")
    with pytest.raises(DoesNotFit, match=r"nearest that fits: sglang:d8\|fsdp:d8"):
        plan_trial(gpus, "allocation_mode=sglang:d4|fsdp:d4")


@pytest.mark.parametrize(
    ("text", "filled"),
    [
        ("sglang:d*|fsdp:d*", "sglang:d16|fsdp:d16"),
        ("sglang:d*t4|fsdp:d16", "sglang:d4t4|fsdp:d16"),
        ("sglang:d4t4|fsdp:d*", "sglang:d4t4|fsdp:d16"),
    ],
)
def test_a_star_is_all_units_in_turn(text, filled):
    gpus = "cluster.n_gpus_per_node=8"
    assert plan_trial(gpus, "--n_nodes=2", f"allocation_mode={text}").allocation == filled


def test_a_star_in_turn_must_fill_the_units():
    assert plan_trial("allocation_mode=embedded:d*|fsdp:d*").allocation == "embedded:d1|fsdp:d1"
    with pytest.raises(DoesNotFit, match=r"8 GPUs are not a multiple of 3 per replica; write a number"):
        plan_trial("cluster.n_gpus_per_node=8", "allocation_mode=sglang:d*t3|fsdp:d*")


def test_one_gpu_is_enough_in_turn():
    with pytest.raises(DoesNotFit, match=r"or allocation_mode sglang:d1\|fsdp:d1"):
        plan_trial("cluster.n_gpus_per_node=1")
    assert plan_trial("cluster.n_gpus_per_node=1", "allocation_mode=sglang:d1|fsdp:d1").shares_gpus


@pytest.mark.parametrize(
    ("allocation", "words"),
    [
        ("sglang:d4", "add a trainer: sglang:d4+fsdp:d1"),
        ("sglang:d4+eval", "run `hpc-rl evaluate`, or add a trainer: sglang:d4+fsdp:d1"),
        ("fsdp:d4", "add servers, as embedded:d1+fsdp:d4"),
        ("sglang:d1p2+fsdp:d1", "use t: sglang:t2"),
    ],
)
def test_what_is_not_built_says_what_is(allocation, words):
    with pytest.raises(NotBuilt) as caught:
        plan_trial(f"allocation_mode={allocation}")
    assert words in str(caught.value)


def test_servers_that_can_not_be_on_gpus_or_span_nodes():
    gpus = "cluster.n_gpus_per_node=8"
    words = r"embedded servers can't use GPUs.*use sglang, or cluster\.n_gpus_per_node 0"
    with pytest.raises(NotBuilt, match=words):
        plan_trial(gpus, "allocation_mode=embedded:d4+fsdp:d4")
    words = r"t12 spans nodes, and must have all GPUs of each; use a t that is a multiple of .*per_node, 8"
    with pytest.raises(NotBuilt, match=words):
        plan_trial(gpus, "--n_nodes=4", "allocation_mode=sglang:t12+fsdp:d20")
    with pytest.raises(NotBuilt, match=r"take turns with the trainer can't span nodes; use t at most 8"):
        plan_trial(gpus, "--n_nodes=2", "allocation_mode=sglang:t16|fsdp:d16")
    with pytest.raises(ConfigError, match=r"sglang\.ep_size 3 must divide the GPUs of a server, t 4 of"):
        plan_trial(gpus, "allocation_mode=sglang:t4+fsdp:d4", "sglang.ep_size=3")
    with pytest.raises(ConfigError, match="trainer sft has no generation servers; use fsdp:d1"):
        plan_trial("allocation_mode=embedded:d1+fsdp:d1", base=SFT)


@pytest.mark.parametrize("backend", ["sglang", "vllm"])
def test_a_replica_may_span_nodes(backend):
    gpus = ("cluster.n_gpus_per_node=8", "--n_nodes=4", f"allocation_mode={backend}:t16+fsdp:d16")
    made = plan_trial(*gpus, "launcher.inference_server_cpus_per_gpu=2")
    [replica] = [unit for unit in made.units if unit.role == "server"]
    assert (replica.nodes, replica.num_tasks, replica.gpus_per_task, replica.gpu_offset) == ([2, 3], 2, 8, 0)
    assert replica.cpus_per_task == 16, "on each node"
    assert not replica.by_agent and made.list_step_units(replica) == [replica]
    of_processes = plan_trial("--n_nodes=3", f"allocation_mode={backend}:t2+fsdp:d1")
    assert list_places(of_processes)[0] == ("server", 0, [1, 2], 1)
    together = plan_trial("--n_nodes=2", f"allocation_mode={backend}:t2+fsdp:d1")
    assert list_places(together)[0] == ("server", 0, [1], 1)


def test_servers_of_an_array_span_equal_numbers_of_nodes():
    options = ("cluster.n_gpus_per_node=8", "launcher.type=slurm", "launcher.slurm.layout=jobs")
    made = plan_trial(*options, "--n_nodes=5", "allocation_mode=sglang:d2t16+fsdp:d8")
    assert made.list_server_tasks() == [[1, 2], [3, 4]]
    assert [unit.nodes for unit in made.list_units_on([3, 4])] == [[0, 1]]
    pools = (*STUDENT, "allocation_mode=sglang:t16+sglang[student]:d2t4+fsdp:d8")
    with pytest.raises(
        DoesNotFit, match="needs servers on equal numbers of nodes, but some are on 1 and on 2"
    ):
        plan_trial(*options, "--n_nodes=4", *pools)


def test_one_machine_is_one_node():
    with pytest.raises(ConfigError, match="sbatch is not on the PATH"):
        plan_trial("--n_nodes=2", scheduler="local")
    with pytest.raises(ConfigError, match=r"n_nodes 2 needs Slurm, but launcher\.type is local"):
        plan_trial("--n_nodes=2", "launcher.type=local", scheduler="local")
    assert plan_trial(scheduler="local").n_nodes == 1


def test_plans_are_deterministic_and_survive_json():
    assert plan_trial("--n_nodes=4") == plan_trial("--n_nodes=4")
    assert Plan.from_json(plan_trial("--n_nodes=4").to_json()) == plan_trial("--n_nodes=4")


def test_gpus_that_slurm_does_not_know_are_dealt_out_by_the_plan():
    gpus = ("cluster.n_gpus_per_node=4", "allocation_mode=sglang:d2+fsdp:d2")
    made = plan_trial(*gpus, "launcher.slurm.gpus_by=null")
    seen = {f"{unit.role}-{unit.index}": unit.env.get("CUDA_VISIBLE_DEVICES") for unit in made.units}
    assert sorted(",".join(filter(None, seen.values())).split(",")) == ["0", "1", "2", "3"]
    assert seen["rollout-0"] == "" and not made.slurm_knows_gpus
    assert plan_trial(*gpus, "launcher.slurm.gpus_by=null", "launcher.slurm.gres=gpu:4").slurm_knows_gpus
    assert not any("CUDA_VISIBLE_DEVICES" in unit.env for unit in plan_trial(*gpus).units)


@pytest.mark.parametrize("layout", ["hetjob", "jobs"])
def test_nodes_of_servers_alone_are_a_group(layout):
    made = plan_trial(f"launcher.slurm.layout={layout}", "--n_nodes=3", "allocation_mode=embedded:d4+fsdp:d1")
    trial, servers = made.groups
    assert (trial.name, trial.nodes, servers.name, servers.nodes) == ("trial", [0], "servers", [1, 2])
    own = 1 if layout == "jobs" else 0  # each server node has a supervisor of its own
    assert (trial.cpus_per_node, servers.cpus_per_node) == (1 + 4 + 4, 2 * 4 + own)
    assert Plan.from_json(made.to_json()) == made
    assert [(unit.index, unit.nodes) for unit in made.list_units_on([2])] == [(2, [0]), (3, [0])]
    assert [unit.role for unit in made.list_units_on([0])] == ["rollout", "trainer"]


def test_gpus_beside_the_trainer_stay_in_its_job():
    gpus = ("--n_nodes=2", "cluster.n_gpus_per_node=8", "allocation_mode=sglang:d12+fsdp:d4")
    made = plan_trial("launcher.slurm.layout=jobs", *gpus)
    assert [group.nodes for group in made.groups] == [[0], [1]]
    assert sum(unit.role == "server" for unit in made.list_units_on([0])) == 4


@pytest.mark.parametrize("layout", ["hetjob", "jobs"])
def test_a_layout_without_nodes_for_servers_does_not_fit(layout):
    words = f"layout {layout} needs nodes with servers only, but the trainer is on all 1"
    with pytest.raises(DoesNotFit, match=words):
        plan_trial(f"launcher.slurm.layout={layout}")


def test_one_machine_plays_no_jobs():
    with pytest.raises(ConfigError, match="layout jobs needs Slurm, but sbatch is not on the PATH"):
        plan_trial("launcher.slurm.layout=jobs", scheduler="local")


@pytest.mark.parametrize(
    ("overrides", "allocation", "nodes"),
    [
        ([], "embedded:d1", [0]),
        (["--n_nodes=2"], "embedded:d2", [0, 1]),
        (["allocation_mode=embedded:d3+fsdp:d2"], "embedded:d3", [0, 0, 0]),
        (["cluster.n_gpus_per_node=2"], "sglang:d2", [0, 0]),
        (["cluster.n_gpus_per_node=8", "allocation_mode=vllm:d2t2+fsdp:d4"], "vllm:d4t2", [0] * 4),
        (["cluster.n_gpus_per_node=4", "--n_nodes=2", "allocation_mode=sglang:t4d2"], "sglang:d2t4", [0, 1]),
        (["cluster.n_gpus_per_node=4", "allocation_mode=sglang:d4+eval"], "sglang:d4", [0] * 4),
    ],
)
def test_without_a_trainer_servers_take_everything(overrides, allocation, nodes):
    made = plan_trial("purpose=generate", *overrides)
    assert made.allocation == allocation
    assert [unit.nodes for unit in made.units if unit.role == "server"] == [[node] for node in nodes]
    assert [(unit.role, unit.module) for unit in made.units if unit.role != "server"] == [
        ("rollout", "hpc_rl.roles.generator")
    ]
    assert Plan.from_json(json.loads(json.dumps(made.to_json()))) == made


@pytest.mark.parametrize(
    ("overrides", "option", "words"),
    [
        (["allocation_mode=embedded:d1"], "allocation_mode", "it has no trainer"),
        (["purpose=evaluate"], "valid_dataset", "purpose evaluate needs it"),
        (["purpose=serve", "actor.init_from_scratch=true"], "actor.init_from_scratch", "no trainer"),
        (["purpose=serve", "actor.use_lora=true"], "actor.use_lora", "merged"),
        (["purpose=serve", "launcher.slurm.layout=jobs", "--n_nodes=2"], "launcher.slurm.layout", "layout"),
        (["keep_best_samples=2"], "keep_best_samples", "no effect with purpose train"),
        (
            ["purpose=generate", "--n_nodes=2", "allocation_mode=embedded:d1"],
            "allocation_mode",
            "embedded:d2",
        ),
    ],
)
def test_refusals_without_a_trainer(overrides, option, words):
    with pytest.raises(ConfigError) as caught:
        plan_trial(*overrides)
    assert any(option in refusal.options and words in str(refusal) for refusal in caught.value.refusals)
