"""What is wrong with a set-up, `doctor` says and `submit` refuses or mends before the queue, in the same words."""

import json
import os
import resource
from pathlib import Path

import pytest

from hpc_rl.cli.__main__ import main
from hpc_rl.doctor import machine
from hpc_rl.doctor.slurm_checks import PROGRAMS

NODE = "|up|1-00:00:00|1-infinite|n{}|16|256000|(null)|(null)|2"
SINFO = "\\n".join(f"{name}{NODE.format(number)}" for name in ("gpu*", "cpu") for number in (1, 2))
WELL = {
    "sinfo": f"if [[ $1 == --version ]]; then echo 'slurm-wlm 23.11.4'; else printf '{SINFO}\\n'; fi",
    "scontrol": "echo 'Slurmctld(primary) at ctl is UP'",
    "sacct": "true",
    "sbatch": "echo 77",
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
    machine.modules_problem.cache_clear()
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


NOTHING = lambda site: None  # noqa: E731
NO_PYTHON = "/usr/bin/no-such-python"
SETUPS = {  # what is wrong: set-up, options, check of the doctor and its status, words of both, code of submit
    "cores of two threads": (NOTHING, ["launcher.rollout_cpus=3"], "capacity", "ok", "13 CPUs per node", 0),
    "more cores than a node has": (NOTHING, ["launcher.rollout_cpus=13"], "capacity", "fail", "at most 16 CPUs", 64),
    "soft limits": (soft_limits, [], "open files", "ok", "now 256; roles raise it", 0),
    "a module that is not there": (
        with_modules, ["launcher.modules=[cuda, nope]"], "modules", "fail", "`module load nope` fails here", 64,
    ),
    "no command for modules": (
        NOTHING, ["launcher.modules=[cuda]"], "modules", "warn", "there is no command `module` here", 0,
    ),
    "an interface that is not there": (NOTHING, ["cluster.interface=nope0"], "address", "warn", "nope0", 0),
    "data that is not there": (
        NOTHING, ["train_dataset.path=/usr/nope.jsonl"], "configuration", "fail", "/usr/nope.jsonl does not exist", 64,
    ),
    "a fileroot that can't be written": (file_as_fileroot, [], "fileroot", "fail", "can't be written", 73),
    "a fileroot where all may write": (
        open_to_all, [], "accounts", "fail", "another account could change what trial sums/small runs", 64,
    ),
    "a partition that is not there": (
        NOTHING, ["--partition", "nope"], "capacity", "fail", "there is no partition 'nope'", 64,
    ),
    "more time than the partition allows": (NOTHING, ["--time", "9-00:00:00"], "capacity", "fail", "9-00:00:00", 64),
    "no interpreter of the trainer": (
        NOTHING, [f"launcher.python={NO_PYTHON}"], "torch", "fail", f"{NO_PYTHON} is not a program that can be run", 64,
    ),
    "no interpreter of the servers": (
        NOTHING, ["allocation_mode=sglang:d1+fsdp:d1", f"launcher.inference_server_python={NO_PYTHON}"],
        "sglang", "fail", f"{NO_PYTHON} is not a program that can be run", 64,
    ),
    "no sbatch": (without_sbatch, [], "slurm programs", "fail", "not on the PATH", 69),
    "no controller": (controller_down, [], "slurm controller", "fail", "Unable to contact slurm controller", 69),
}  # fmt: skip


@pytest.mark.parametrize("name", SETUPS)
def test_doctor_and_submit_agree(site, capsys, name):
    set_up, options, check, status, words, code = SETUPS[name]
    set_up(site)
    common = ["--config", str(site.config), "launcher.type=slurm", *options, *site.options]
    doctor_code = main(["doctor", *common, "--json"])
    told = json.loads(capsys.readouterr().out)["findings"]
    rows = [row for row in told if row["check"] == check]
    assert [row["status"] for row in rows] == [status], rows
    assert words in rows[0]["found"], rows
    if status == "fail":
        assert doctor_code == 1
    assert main(["check", *common]) == code
    if code:
        assert words in capsys.readouterr().err
    assert main(["submit", *common]) == code
    said = capsys.readouterr()
    if status != "ok":
        assert words in said.out + said.err
    if "CPUs per node" in words:
        script = next(site.folder.rglob("trial.sbatch")).read_text()
        assert f"--cpus-per-task={words.split()[0]}\n" in script
    if code:
        assert not list(site.folder.rglob("trial.sbatch")), "a refusal leaves nothing"
