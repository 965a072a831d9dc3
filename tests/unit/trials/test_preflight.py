"""The checks before a submission, with a cluster of few lines."""

import pytest

from hpc_rl.config.load.load import load
from hpc_rl.config.rules.check import check
from hpc_rl.core.errors import ConfigError, SchedulerError
from hpc_rl.core.refusal import Kind
from hpc_rl.doctor.mpi_check import MpiLook
from hpc_rl.plan.plan import make_plan
from hpc_rl.render import lint
from hpc_rl.sandbox import Mechanism, Protection, Sandbox
from hpc_rl.schedulers.sinfo import Node
from hpc_rl.schedulers.slurm import SlurmScheduler, TestAnswer
from hpc_rl.trials import preflight

BASE = [
    "experiment_name=e",
    "trial_name=t",
    "train_dataset.path=/d.jsonl",
    "train_dataset.batch_size=64",
    "model.path=/m",
]
GOOD = "#!/bin/bash\n#SBATCH --nodes=1\n#SBATCH --no-requeue\n#SBATCH --open-mode=append\ntrue\n"


ACCEPTED = TestAnswer("Job 1 to start at once", True)


class FakeCluster:
    """Two nodes; counts what it is asked."""

    def __init__(self, says: TestAnswer = ACCEPTED, broken: str = "", threads: int = 1) -> None:
        self.says, self.broken, self.threads = says, broken, threads
        self.asked: list[str] = []

    def query_nodes(self) -> list[Node]:
        self.asked.append("sinfo")
        if self.broken:
            raise SchedulerError(self.broken)
        known = {"is_default": True, "threads_per_core": self.threads}
        return [Node("main", f"n{i}", 64, 256_000, {"": 8}, **known) for i in (1, 2)]

    def test_only(self, script: str) -> TestAnswer:
        self.asked.append("sbatch")
        return self.says


GRPO = ["allocation_mode=sglang:d4+fsdp:d4", "tokenizer_path=/m", *BASE[:4]]


def whole(*overrides: str, base=BASE):
    loaded = check(load([], [*base, *overrides]), files=False)
    return loaded, make_plan(loaded.config, loaded.explicit, interpreter="python", scheduler="slurm")


def planned(*overrides: str):
    loaded, plan = whole(*overrides)
    return loaded.config, plan


def test_what_confines_code_is_told_and_where_it_is_required_also_refused(monkeypatch):
    weak = Sandbox(Mechanism.LANDLOCK, frozenset({Protection.FILES}))
    monkeypatch.setattr(preflight, "find_sandbox", lambda: weak)
    base = [*GRPO, "actor.path=/m", "gconfig.n_samples=4"]
    loaded, _ = whole("rollout.reward_fn=format,code_tests", "rollout.sandbox=required", base=base)
    [note] = preflight.check_sandbox(loaded.config, "slurm")
    assert note.is_note and (note.option, note.kind) == ("rollout.sandbox", Kind.MACHINE)
    assert "code_tests runs code in this sandbox: Landlock: no other file can be" in str(note)
    assert "not protected: the network can be used" in str(note) and "the one of its node" in str(note)
    refused, _ = preflight.check_sandbox(loaded.config, "local")
    assert (refused.option, refused.kind, refused.is_note) == ("rollout.sandbox", Kind.MACHINE, False)
    assert "It has Landlock" in str(refused)
    loaded, _ = whole(base=base)
    assert list(preflight.check_sandbox(loaded.config, "local")) == []  # runs no code


@pytest.mark.parametrize(
    ("overrides", "asked"),
    [
        ([], {"cpus": 33, "mem_mb": 8 * 32768 + 1024, "gpus": 8}),
        (
            ["launcher.slurm.mem=0", "launcher.slurm.cpus_per_task=null"],
            {"cpus": None, "mem_mb": None, "gpus": 8},
        ),
        (["launcher.slurm.mem_per_cpu=2G"], {"cpus": 33, "mem_mb": 33 * 2048, "gpus": 8}),
        (
            ["launcher.slurm.mem_per_gpu=1T", "launcher.slurm.gres=gpu:h100:8"],
            {"gpu_type": "h100", "mem_mb": 8 * 1024**2},
        ),
        (["launcher.slurm.gpus_by=null", "launcher.slurm.time=90"], {"gpus": None, "time_s": 5400}),
    ],
)
def test_what_is_asked_of_the_cluster(overrides, asked):
    request = preflight.make_request(*planned(*overrides))
    assert {name: getattr(request, name) for name in asked} == asked


def test_a_submission_asks_once_and_refuses_what_can_never_run():
    cluster = FakeCluster()
    with pytest.raises(
        ConfigError,
        match=r"has 2 nodes; 3 were requested\. Nearest that fits: --n_nodes 2",
    ):
        preflight.quick_check(*planned("--n_nodes=3", "launcher.trainer_mem_per_gpu=1000"), cluster)
    assert cluster.asked == ["sinfo"]


def test_a_submission_goes_on_where_sinfo_does_not_answer():
    said = preflight.quick_check(*planned(), FakeCluster(broken="sinfo: no"), ["n1"])
    assert str(
        said.notes[0]
    ) == "the request was not compared with the nodes of the cluster: sinfo: no." and said.avoid == ("n1",)


@pytest.mark.parametrize(("threads", "cpus"), [(1, 3 * 8 + 1), (2, 3 * 8 + 1), (16, 32 + 1)])
def test_the_plan_is_fitted_to_the_cores_of_the_cluster(threads, cpus):
    options = ["launcher.trainer_mem_per_gpu=1000", "launcher.trainer_cpus_per_gpu=3"]
    found = preflight.quick_check(*planned(*options), FakeCluster(threads=threads))
    assert (found.plan.threads_per_core, found.plan.cpus_per_node) == (threads, cpus)


def test_where_a_job_uses_one_thread_per_core_a_cpu_is_a_core():
    options = ["launcher.trainer_mem_per_gpu=1000", "launcher.slurm.extra_args=[--hint=nomultithread]"]
    fits = planned(*options, "launcher.trainer_cpus_per_gpu=3")
    found = preflight.quick_check(*fits, FakeCluster(threads=2))
    assert (found.plan.threads_per_core, found.plan.cpus_per_node) == (1, 3 * 8 + 1)
    with pytest.raises(ConfigError, match=r"33 CPUs per node.*the most on 1 node\(s\) is 32"):
        preflight.quick_check(*planned(*options, "launcher.trainer_cpus_per_gpu=4"), FakeCluster(threads=2))


def test_as_many_bad_nodes_are_avoided_as_leave_enough_others():
    small = "launcher.trainer_mem_per_gpu=1000"
    said = preflight.quick_check(*planned(small), FakeCluster(), ["n1"])
    assert (said.avoid, [*map(str, said.notes)]) == (("n1",), ["n1 failed this trial recently: avoided."])
    said = preflight.quick_check(*planned(small, "--n_nodes=2"), FakeCluster(), ["n1"])
    not_avoided = "n1 failed this trial recently: not avoided, because too few other nodes are left."
    assert (said.avoid, [*map(str, said.notes)]) == ((), [not_avoided])
    said = preflight.quick_check(*planned(small, "launcher.slurm.exclude=n2"), FakeCluster(), ["n1"])
    assert said.avoid == (), "what the configuration excludes stays excluded"
    said = preflight.quick_check(*planned(small), FakeCluster(), ["n2", "n1"])
    assert said.avoid == ("n2",), "the worst comes first"
    assert str(said.notes[1]) == not_avoided
    assert preflight.quick_check(*planned(small), FakeCluster()).notes == []


def test_all_checks():
    small = planned("launcher.trainer_mem_per_gpu=1000")
    fine = preflight.full_check(*small, {"a.sbatch": GOOD}, FakeCluster())
    preflight.raise_failures(fine)
    assert {check.state for check in fine} <= {"ok", "skipped"}
    no = preflight.full_check(
        *small, {"a.sbatch": GOOD + "if\n"}, FakeCluster(TestAnswer("Invalid account", False))
    )
    with pytest.raises(ConfigError, match=r"(?s)syntax error.*sbatch refused the job: Invalid account"):
        preflight.raise_failures(no)
    waits = FakeCluster(TestAnswer("Required node not available", False, may_wait=True))
    assert preflight.full_check(*small, {"a.sbatch": GOOD}, waits)[-1].state == "note"
    with pytest.raises(SchedulerError, match="no controller"):
        preflight.raise_failures(
            preflight.full_check(*small, {"a.sbatch": GOOD}, FakeCluster(broken="no controller"))
        )
    assert preflight.full_check(*small, {"local.sh": "true\n"}, None)[-1].state == "skipped"


def test_a_plan_can_be_checked_where_there_is_no_slurm(monkeypatch, tmp_path):
    small = planned("launcher.trainer_mem_per_gpu=1000")
    monkeypatch.setenv("PATH", str(tmp_path))
    checks = preflight.full_check(*small, {}, SlurmScheduler())
    assert "not compared with the nodes of the cluster: sinfo is not on the PATH" in checks[-1].line()
    preflight.raise_failures(checks)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            GOOD + "#SBATCH --time=1\n",
            "line 6: sbatch ignores this line, because it comes after the first command",
        ),
        (GOOD.replace("--nodes=1", "--nodes=1\n#SBATCH --nodes=2"), "--nodes is given twice"),
        (
            GOOD.replace("--nodes=1", "--mem=1\n#SBATCH --mem-per-cpu=2"),
            "--mem and --mem-per-cpu exclude each other",
        ),
        (GOOD.replace("--nodes=1", "--account=$USER"), "shell variable"),
        (GOOD.replace("#SBATCH --no-requeue\n", ""), "neither --requeue nor --no-requeue"),
        (GOOD.replace("#SBATCH --open-mode=append\n", ""), "--open-mode=append"),
        (GOOD + "for\n", "bash -n: "),
    ],
)
def test_the_linter(text, words):
    assert any(words in problem for problem in lint.find_problems({"x.sbatch": text}))
    assert lint.check_directives(GOOD) == [] and lint.check_bash(GOOD) == []


def test_a_path_without_bash_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="PATH has no bash"):
        lint.check_bash(GOOD)


def test_sizes_of_memory():
    assert [preflight.parse_megabytes(text) for text in ("200", "200M", "2G", "1T", "2048K")] == [
        200,
        200,
        2048,
        1048576,
        2,
    ]


@pytest.mark.parametrize(
    ("packages", "attn_impl", "words"),
    [
        ({"flash_attn": "2.8"}, "flash_attention_2", None),
        ({"flash-attn": "2.8", "flash_attn_3": "3.0"}, "flash_attention_3", "python has flash-attn-3, flash"),
        ({"torch": "2.13"}, "sdpa", "python has neither flash-attn nor flash-attn-3"),
        ("python can't be asked", "sdpa", "is not known: python can't be asked"),
    ],
)
def test_attention_defaults_to_what_the_trainers_python_has(monkeypatch, packages, attn_impl, words):
    asked = []
    monkeypatch.setattr(preflight.machine, "find_versions", lambda python: asked.append(python) or packages)
    found = preflight.adapt_attention(*whole("actor.path=/m", base=GRPO))
    assert asked == ["python"]
    assert found.config.actor.attn_impl == attn_impl
    notes = [note for note in map(str, found.notes) if note.startswith("actor.attn_impl is")]
    assert bool(notes) == bool(words)
    assert not words or words in notes[0]
    preflight.adapt_attention(*whole("cluster.n_gpus_per_node=0"))
    assert asked == ["python"]  # a plan without GPUs has no choice


def test_an_attention_that_is_not_installed_is_refused_unless_an_image_may_have_it(monkeypatch):
    flash = "model.attn_impl=flash_attention_2"
    monkeypatch.setattr(preflight.machine, "find_versions", lambda python: {"flash_attn_3": "3.0"})
    refusal = "needs the package flash-attn, but python has flash-attn-3; install it there, or use flash_atte"
    with pytest.raises(ConfigError, match=f"model.attn_impl flash_attention_2 {refusal}ntion_3"):
        preflight.adapt_attention(*whole(flash))
    image = ["launcher.slurm.container_type=apptainer", "launcher.slurm.trainer_image=/images/a.sif"]
    assert preflight.adapt_attention(*whole(flash, *image)).config.model.attn_impl == "flash_attention_2"
    loaded = preflight.adapt_attention(*whole(*image))
    assert loaded.config.model.attn_impl == "sdpa"
    assert "image" in str(loaded.notes[-1])


def test_megatron_core_that_is_not_installed_is_refused_unless_an_image_may_have_it(monkeypatch):
    monkeypatch.setattr(preflight.machine, "find_versions", lambda python: {"torch": "2.13"})
    _, plan = whole("allocation_mode=megatron:d4t2")
    [refusal] = preflight.check_engine(plan)
    assert (refusal.option, refusal.kind) == ("allocation_mode", Kind.MACHINE)
    assert "megatron-core, which python lacks" in refusal.why and "or use fsdp:d4t2" in refusal.use
    image = ["launcher.slurm.container_type=apptainer", "launcher.slurm.trainer_image=/images/a.sif"]
    assert not list(preflight.check_engine(whole("allocation_mode=megatron:d4t2", *image)[1]))
    monkeypatch.setattr(preflight.machine, "find_versions", lambda python: {"megatron_core": "0.16.1"})
    assert not list(preflight.check_engine(plan))


BY_MPIEXEC = ["launcher.trainer_start=mpiexec", "cluster.n_gpus_per_node=0"]


@pytest.mark.parametrize(
    ("is_certain", "scheduler", "is_refused"),
    [(True, "slurm", True), (False, "slurm", False), (False, "local", True)],
)
def test_a_missing_mpi_is_refused_where_the_nodes_lack_it_too(monkeypatch, is_certain, scheduler, is_refused):
    asked = []
    seen = MpiLook(problem="no mpi4py", is_certain=is_certain)
    monkeypatch.setattr(preflight.mpi_check, "inspect_mpi", lambda *what: asked.append(what) or seen)
    loaded, plan = whole(*BY_MPIEXEC, "launcher.python=/p", "launcher.mpi.mpiexec=/m")
    if is_refused:
        with pytest.raises(
            ConfigError,
            match=r"launcher.trainer_start mpiexec can't start the trainer: no mpi4py;.*pip install",
        ):
            preflight.adapt_mpi(loaded, plan, scheduler)
    else:
        note = preflight.adapt_mpi(loaded, plan, scheduler).notes[-1]
        assert str(note).startswith("no mpi4py; the nodes of the job must")
    assert asked == [("/p", "/m")]


def test_mpi_is_asked_for_only_where_it_starts_the_trainer(monkeypatch):
    monkeypatch.setattr(preflight.mpi_check, "inspect_mpi", lambda *what: pytest.fail("asked"))
    loaded, plan = whole()
    assert preflight.adapt_mpi(loaded, plan, "slurm") is loaded
