"""What is wrong with a set-up, `check`, `submit`, its dry run and `doctor` say in the same words, before the queue."""

import json
import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import TRAINER_PACKAGES, make_checkpoint, make_python
from model_shapes import QWEN3_8B

from hpc_rl.cli import doctor
from hpc_rl.cli.__main__ import main
from hpc_rl.core import node_copies
from hpc_rl.core.trial import Trial, find_account_name, write_json
from hpc_rl.doctor import machine
from hpc_rl.doctor.slurm_checks import PROGRAMS
from hpc_rl.render import lint
from hpc_rl.trials import storage
from hpc_rl.trials.check_result import WRONG

NODE = "|up|1-00:00:00|1-infinite|n{}|16|256000|(null)|(null)|2"
SINFO = "\\n".join(f"{name}{NODE.format(number)}" for name in ("gpu*", "cpu") for number in (1, 2))
WELL = {
    "sinfo": f"if [[ $1 == --version ]]; then echo 'slurm-wlm 23.11.4'; else printf '{SINFO}\\n'; fi",
    "scontrol": "echo 'Slurmctld(primary) at ctl is UP'",
    "sacct": "true",
    "sbatch": '[[ $* == *--test-only* ]] || touch "$0.submitted"; echo 77',
}
DOWN = "echo 'error: Unable to contact slurm controller (connect failure)' >&2; exit 1"
MODULES = "module() { [[ $2 == cuda ]]; }\n"


class Site:
    """A login node with programs that only speak like Slurm's; `set_up` says what is wrong with it."""

    def __init__(self, folder: Path, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.config, self.monkeypatch = folder, config, monkeypatch
        self.options: list[str] = []
        bin_dir = folder / "slurm"
        bin_dir.mkdir()
        clean = [part for part in os.environ["PATH"].split(":") if not os.path.exists(f"{part}/sinfo")]
        monkeypatch.setenv("PATH", ":".join([str(bin_dir), *clean]))
        self.programs(**WELL)

    def programs(self, **texts: str) -> None:
        for name, text in (dict.fromkeys(PROGRAMS, "true") | WELL | texts).items():
            program = self.folder / "slurm" / name
            program.write_text(f"#!/bin/bash\n{text}\n")
            program.chmod(0o755)


@pytest.fixture
def site(tmp_path, config, monkeypatch, state_home) -> Site:
    for name in ("SLURM_JOB_ID", "SLURM_CONF", "HPC_RL_INTERFACE"):
        monkeypatch.delenv(name, raising=False)
    machine.find_modules_problem.cache_clear()
    # What takes long, and is tested elsewhere: processes that examine the directory and the scripts.
    monkeypatch.setattr(doctor, "check_directory", lambda path, on_slurm: [])
    for slow in ("check_bash", "check_shell"):
        monkeypatch.setattr(lint, slow, lambda text: [])
    return Site(tmp_path, config, monkeypatch)


def soft_limits(site: Site) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    site.monkeypatch.setattr(machine.resource, "getrlimit", lambda number: (256, hard))


def with_modules(site: Site) -> None:
    (site.folder / "profile").write_text(MODULES)
    site.monkeypatch.setenv("BASH_ENV", str(site.folder / "profile"))


def without_sbatch(site: Site) -> None:
    (site.folder / "slurm" / "sbatch").unlink()


def controller_down(site: Site) -> None:
    site.programs(sinfo=DOWN, scontrol=DOWN, sbatch=DOWN, squeue=DOWN, sacct=DOWN)


def file_as_fileroot(site: Site) -> None:
    (site.folder / "file").write_text("")
    site.options = [f"cluster.fileroot={site.folder}/file/runs"]


def open_to_all(site: Site) -> None:
    (site.folder / "runs").mkdir()
    (site.folder / "runs").chmod(0o777)


def large_model(site: Site) -> None:
    """Of 8 billion parameters, with files that are never loaded."""
    write_json(site.folder / "model" / "config.json", QWEN3_8B)
    site.options = ["gconfig.max_tokens=4096"]
    # refusals quote the free space, which changes between two commands
    site.monkeypatch.setattr(storage, "measure_free_bytes", lambda path: 1 << 40)


def small_disk(site: Site) -> None:
    large_model(site)
    site.monkeypatch.setattr(storage, "measure_free_bytes", lambda path: 100 << 20)
    site.options += ["launcher.trainer_mem_per_gpu=200000"]


def letters_without_tokens(site: Site) -> None:
    tokenizer = {"model": {"type": "WordLevel", "vocab": {"<unk>": 0, "7": 1}, "unk_token": "<unk>"}}
    write_json(site.folder / "model" / "tokenizer.json", tokenizer)
    write_rows(site, [{"prompt": "reverse abc", "answer": "cba"}])


def reference(site: Site, tokens: dict[str, int], size: int) -> None:
    """A trained model with two tokens, and a reference model with others."""
    for name, vocabulary, number in (("model", {"<unk>": 0, "1": 1}, 2), ("ref", tokens, size)):
        make_checkpoint(site.folder / name)
        write_json(site.folder / name / "config.json", {"model_type": "qwen3", "vocab_size": number})
        table = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"}
        digits = {"type": "Replace", "pattern": {"Regex": r"[\\s\\S]+"}, "content": "1"}
        tokenizer = {"model": table, "normalizer": digits}
        write_json(site.folder / name / "tokenizer.json", tokenizer)
    site.options = [f"ref.path={site.folder}/ref", "actor.kl_ctl=0.1"]


def other_reference(site: Site) -> None:
    reference(site, {"<unk>": 0, "2": 1}, 2)


def small_reference(site: Site) -> None:
    reference(site, {"<unk>": 0, "1": 1}, 1)


def write_rows(site: Site, rows: list[dict[str, str]]) -> None:
    (site.folder / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def no_parquet_library(site: Site) -> None:
    (site.folder / "rows").mkdir()
    (site.folder / "rows" / "state.json").write_text("{}")
    python = make_python(site.folder / "python", packages=TRAINER)
    site.options = [f"launcher.python={python}", f"train_dataset.path={site.folder}/rows"]


def running(site: Site) -> None:
    trial = Trial.of(site.folder / "runs", find_account_name(), "sums", "small")
    trial.make_dirs()
    record = {"job_id": "7", "scheduler": "slurm", "time": 0.0}
    write_json(trial.job("7"), record)
    site.programs(squeue="echo '7|RUNNING|None|N/A|n1|N/A'")


def with_state(site: Site) -> None:
    trial = Trial.of(site.folder / "runs", find_account_name(), "sums", "small")
    trial.generation(4).mkdir(parents=True)
    (trial.generation(4) / "manifest.json").write_text("{}")
    site.options = ["recover.mode=fault"]


def python_with(**packages: str) -> Callable[[Site], None]:
    """Return the set-up of an interpreter of trainer or servers that has these packages."""

    def set_up(site: Site) -> None:
        python = make_python(site.folder / "python", packages=packages)
        name = "launcher.python" if "transformers" in packages else SERVER_PYTHON
        site.options = [f"{name}={python}"]

    return set_up


def no_python(site: Site) -> None:
    program = site.folder / "python"
    program.write_text("#!/bin/bash\necho sorry >&2; exit 1\n")
    program.chmod(0o755)
    site.options = [f"launcher.python={program}"]


NOTHING = lambda site: None  # noqa: E731
NO_PYTHON = "/usr/bin/no-such-python"
SERVER_PYTHON = "launcher.inference_server_python"
TRAINER = TRAINER_PACKAGES
SGLANG, VLLM = "allocation_mode=sglang:d1+fsdp:d1", "allocation_mode=vllm:d1+fsdp:d1"
# What is wrong: set-up, options, the check that says so, its status in `doctor`, words, exit code of submit.
SETUPS = {
    "cores of two threads": (NOTHING, ["launcher.rollout_cpus=3"], "capacity", "ok", "13 CPUs per node", 0),
    "more cores than a node has": (NOTHING, ["launcher.rollout_cpus=13"], "capacity", "fail", "at most 16 CPUs", 64),
    "soft limits": (soft_limits, [], "open files", "ok", "now 256; roles raise it", 0),
    "a module that is not there": (
        with_modules, ["launcher.modules=[cuda, nope]"], "modules", "fail", "`module load` fails on ", 64,
    ),
    "no command for modules": (
        NOTHING, ["launcher.modules=[cuda]"], "modules", "warn", "has no command `module`", 0,
    ),
    "an interface that is not there": (NOTHING, ["cluster.interface=nope0"], "address", "warn", "nope0", 0),
    "data that is not there": (
        NOTHING, ["train_dataset.path=/usr/nope.jsonl"], "configuration", "fail", "/usr/nope.jsonl does not exist", 64,
    ),
    "a fileroot that can't be written": (file_as_fileroot, [], "fileroot", "fail", "can't be written", 73),
    "a fileroot in /proc": (
        NOTHING, ["cluster.fileroot=/proc/foo"], "fileroot", "fail", "no file can be created in /proc", 73,
    ),
    "a name-resolve root in /proc": (
        NOTHING, ["cluster.name_resolve.nfs_record_root=/proc/names"], "fileroot", "fail",
        "cluster.name_resolve.nfs_record_root /proc/names: it can't be written", 73,
    ),
    "a fileroot where all may write": (
        open_to_all, [], "accounts", "fail", "another account could change what trial sums/small runs", 64,
    ),
    "a disk without space for a checkpoint": (
        small_disk, [], "space", "fail", "no checkpoint could be saved: it needs 91.5 GB, but only 100.0 MB are free", 73,
    ),
    "a partition that is not there": (
        NOTHING, ["--partition", "nope"], "capacity", "fail", "there is no partition 'nope'", 64,
    ),
    "more time than the partition allows": (NOTHING, ["--time", "9-00:00:00"], "capacity", "fail", "9-00:00:00", 64),
    "no interpreter of the trainer": (
        NOTHING, [f"launcher.python={NO_PYTHON}"], "torch", "fail", f"{NO_PYTHON} is not a program that ", 64,
    ),
    "an interpreter that is not Python": (no_python, [], "torch", "fail", "gave no answer as Python would: sorry", 64),
    "no torch": (python_with(transformers="5.0"), [], "torch", "fail", "lacks the packages torch, safetensors", 64),
    "an old torch": (
        python_with(**TRAINER | {"torch": "2.8.0"}), [], "torch", "fail", "has torch 2.8.0, but 2.9 or newer", 64,
    ),
    "no tensorboard": (
        python_with(torch="2.13.0", transformers="5.0", safetensors="0.8"), [], "torch", "warn",
        "has no tensorboard", 0,
    ),
    "no interpreter of the servers": (
        NOTHING, [SGLANG, f"{SERVER_PYTHON}={NO_PYTHON}"], "sglang", "fail",
        f"{NO_PYTHON} is not a program that ", 64,
    ),
    "no SGLang": (python_with(vllm="0.32.0"), [SGLANG], "sglang", "fail", "lacks the packages sglang", 64),
    "no vLLM": (python_with(sglang="0.5.23"), [VLLM], "vllm", "fail", "lacks the packages vllm", 64),
    "an SGLang without a table of flags": (
        python_with(sglang="0.1.0"), [SGLANG], "sglang", "warn", "0.1.0, unknown to this hpc-rl", 0,
    ),
    "an SGLang that is brought by the set-up": (
        NOTHING, [SGLANG, "launcher.setup=export A=1"], "sglang", "warn", "launcher.setup or PYTHONPATH must bring it", 0,
    ),
    "no megatron": (
        python_with(**TRAINER), ["allocation_mode=embedded:d1+megatron:d1"], "megatron", "fail", "megatron-core", 64,
    ),
    "no wandb": (
        python_with(**TRAINER), ["stats_logger.wandb.mode=offline"], "libraries", "fail",
        "stats_logger.wandb.mode offline needs the package wandb", 64,
    ),
    "no swanlab": (
        python_with(**TRAINER), ["stats_logger.swanlab.mode=local"], "libraries", "fail",
        "stats_logger.swanlab.mode local needs the package swanlab", 64,
    ),
    "no mlflow": (
        python_with(**TRAINER), ["stats_logger.mlflow.mode=local"], "libraries", "fail",
        "stats_logger.mlflow.mode local needs the package mlflow", 64,
    ),
    "the small mlflow": (
        python_with(**TRAINER, **{"mlflow-skinny": "3.6.0"}), ["stats_logger.mlflow.mode=local"], "", "ok", "", 0,
    ),
    "no library for the rows": (no_parquet_library, [], "libraries", "fail", "needs the package datasets", 64),
    "too little memory for the trainer": (
        large_model, ["launcher.trainer_mem_per_gpu=50"], "memory", "fail", "but have 50 MB", 64,
    ),
    "more rows in a batch than there are": (
        NOTHING, ["train_dataset.batch_size=5000"], "batch", "warn", "has 1 rows, so each batch has some", 0,
    ),
    "no whole batch": (
        NOTHING, ["train_dataset.batch_size=5000", "total_train_steps=null", "total_train_epochs=1"], "batch", "fail",
        "1 epoch(s) of 1 rows make no whole batch", 64,
    ),
    "text without tokens": (letters_without_tokens, [], "rows", "fail", "text without a token: 'reverse abc'", 64),
    "a reference model of other tokens": (
        other_reference, [], "configuration", "fail", "the token '1' (id 1) is missing", 64,
    ),
    "a reference model with less tokens": (
        small_reference, [], "configuration", "fail", "has a vocabulary of 1 tokens", 64,
    ),
    "a variable in a path": (
        NOTHING, ["actor.path=$HOME/model"], "", "fail", "write ${oc.env:HOME} for $HOME", 64,
    ),
    "a learning rate that leaves nothing": (
        NOTHING, ["actor.optimizer.lr=10"], "configuration", "fail", "actor.optimizer.lr 10", 64,
    ),
    "a penalty that the loss can't follow": (
        python_with(sglang="0.5.23"), [SGLANG, "gconfig.repetition_penalty=1.2"], "configuration", "warn",
        "WARNING: gconfig.repetition_penalty 1.2", 0,
    ),
    "a trial that runs": (running, [], "state", "fail", "is running as job 7", 75),
    "a trial with state": (with_state, [], "state", "fail", "has state already", 75),
    "no sbatch": (without_sbatch, [], "slurm programs", "fail", "sbatch is not on the PATH", 69),
    "no controller": (controller_down, [], "slurm controller", "fail", "Unable to contact slurm controller", 69),
}  # fmt: skip


@pytest.mark.parametrize("name", SETUPS)
def test_all_four_agree(site, capsys, name):
    set_up, options, check, status, words, code = SETUPS[name]
    set_up(site)
    common = ["--config", str(site.config), "launcher.type=slurm", *options, *site.options]
    assert main(["check", *common, "--json"]) == code
    checked = json.loads(capsys.readouterr().out)
    refusals = checked["refusals"]
    assert bool(refusals) == bool(code) == any(row["state"] in WRONG for row in checked["checks"])
    assert not code or any(words in line for line in refusals), refusals
    assert main(["submit", "--dry_run", *common, "--json"]) == code
    dry = json.loads(capsys.readouterr().out)
    assert dry["refusals"] == refusals and dry["checks"] == checked["checks"]

    doctor_code = main(["doctor", *common, "--json"])
    said = capsys.readouterr()
    if said.out:
        rows = json.loads(said.out)["findings"]
        failed = {row["found"] for row in rows if row["status"] == "fail"}
        assert {*refusals} <= failed and bool(refusals) == bool(failed) == (doctor_code == 1), rows
        found = [row for row in rows if check and row["check"] == check and words in row["found"]]
        assert [row["status"] for row in found] == ([status] if check else []), rows
    else:  # of options that can't be read
        assert doctor_code == code and said.err.removeprefix("hpc-rl: ").splitlines() == refusals

    assert main(["submit", *common]) == code
    said = capsys.readouterr()
    if code:
        assert said.err.removeprefix("hpc-rl: ").splitlines() == refusals and said.out == ""
    elif status == "warn" or not check:
        assert words in said.out
    assert (site.folder / "slurm" / "sbatch.submitted").exists() == (not code), "nothing enters the queue"
    scripts = [*site.folder.rglob("trial.sbatch")]
    assert bool(scripts) == (not code), "a refusal leaves nothing"
    if "CPUs per node" in words and not code:
        assert f"--cpus-per-task={words.split()[0]}\n" in scripts[0].read_text()


GPUS = ["cluster.n_gpus_per_node=2"]
MUCH = ["launcher.trainer_mem_per_gpu=100000000"]
# Type of the launcher, options, the check that says so, its status in `doctor`, words, exit code of check.
LOCAL_SETUPS = {
    "few CPUs": ("local", ["launcher.rollout_cpus=999"], "cpus", "warn", "the roles share the CPUs", 0),
    "little memory": ("local", MUCH, "memory", "warn", "launcher.trainer_mem_per_gpu, launcher.inference", 0),
    "no GPU": (
        "local",
        GPUS,
        "gpus",
        "fail",
        "n_gpus_per_node 2 exceeds the GPUs of this machine, which are 0",
        64,
    ),
    "no GPU, and no Slurm": (
        "auto",
        GPUS,
        "gpus",
        "fail",
        "where the trial runs, because there is no sbatch.",
        64,
    ),
    "a local directory that is shared": (
        "local",
        ["cluster.local_dir=/tmp"],
        "local dir",
        "fail",
        "nfs4",
        64,
    ),
}


@pytest.mark.parametrize("name", LOCAL_SETUPS)
def test_all_four_agree_on_a_trial_for_this_machine(site, capsys, name):
    kind, options, check, status, words, code = LOCAL_SETUPS[name]
    for program in PROGRAMS:
        (site.folder / "slurm" / program).unlink(missing_ok=True)
    site.monkeypatch.setattr(machine, "count_visible_gpus", lambda: (0, "nvidia-smi"))
    site.monkeypatch.setattr(node_copies, "mount_of", lambda path: ("nfs4", ""))
    python_with(**TRAINER, sglang="0.5.23")(site)
    common = ["--config", str(site.config), f"launcher.type={kind}", *site.options, *options]
    assert main(["check", *common, "--json"]) == code
    checked = json.loads(capsys.readouterr().out)
    assert main(["submit", "--dry_run", *common, "--json"]) == code
    assert json.loads(capsys.readouterr().out)["refusals"] == checked["refusals"]
    assert main(["doctor", *common, "--json"]) == (1 if code else 0)
    findings = json.loads(capsys.readouterr().out)["findings"]
    (found,) = [row for row in findings if row["check"] == check]
    assert found["status"] == status and words in f"{found['found']} {found['fix']}"
    assert [row["found"] for row in findings if row["status"] == "fail"] == checked["refusals"]
    if check == "memory":
        assert found["found"] in checked["notes"]
    if code:
        assert main(["submit", *common]) == code
        assert capsys.readouterr().err.removeprefix("hpc-rl: ").splitlines() == checked["refusals"]


@pytest.mark.parametrize("command", [("check",), ("submit", "--dry_run"), ("submit",)], ids=" ".join)
def test_people_read_the_same_lines_before_any_plan(site, capsys, command):
    wrong = ["cluster.fileroot=/proc/foo", "stats_logger.wandb.mode=offline", "launcher.rollout_cpus=13"]
    python_with(**TRAINER)(site)
    assert main([*command, str(site.config), "launcher.type=slurm", *wrong, *site.options]) == 64
    said = capsys.readouterr()
    lines = said.err.removeprefix("hpc-rl: ").splitlines()
    for line, words in zip(lines, ("wandb.mode offline", "/proc/foo", "at most 16 CPUs"), strict=True):
        assert words in line
    assert command == ("check",) or said.out == ""
