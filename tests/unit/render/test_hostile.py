"""Texts that a shell would execute, in every option that reaches a script: refused, or inert under bash."""

import dataclasses
import functools
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from job_scripts import RUN_JOB, make_stamp, write_programs
from patience import extend

from hpc_rl.config.load.fields import list_options
from hpc_rl.config.load.load import Loaded, load
from hpc_rl.config.options.cluster import HooksConfig
from hpc_rl.config.options.experiment import SFTConfig
from hpc_rl.config.rules.check import check
from hpc_rl.core.errors import ConfigError
from hpc_rl.core.trial import Trial
from hpc_rl.plan.plan import make_plan
from hpc_rl.render.jinja_environment import LINE_BREAK
from hpc_rl.render.lint import check_bash, check_directives
from hpc_rl.render.scripts import choose_script_name, render

pytestmark = pytest.mark.waits

BASE = ["experiment_name=e", "trial_name=t", "train_dataset.path=/d", "train_dataset.batch_size=8"]
BASE += ["model.path=/m", "cluster.n_gpus_per_node=0", "recover.mode=auto"]
# What can't be judged by a text alone: the path of what is run, and directories that must exist.
NOT_HERE = {"launcher.python", "launcher.templates_dir", "cluster.fileroot", "launcher.hooks.dir"}
NOT_HERE |= {"launcher.setup", "trainer", "launcher.type"}  # the first is code
TEXTS = sorted(
    name
    for name, hint in list_options(SFTConfig).items()
    if name.startswith(("launcher.", "cluster.", "experiment_name", "trial_name"))
    and "str" in str(hint)
    and name not in NOT_HERE
)
HOSTILE = [
    "a b",
    "$(touch pwned)",
    "`touch pwned`",
    "'; touch pwned; '",
    '"; touch pwned; "',
    "x\ntouch pwned\n",
    "x\rtouch pwned",
    "${HOME}$IFS",
    "a & touch pwned",
    "a;touch pwned #",
    "ü 漢 \u202e \u2028 touch pwned",
    "-n --wrap=touch",
    "%j%%A",
    "\\'\\\"\\",
    "*?[a-z]~!!",
    "{{ 1 + 1 }}{% raw %}",
]
STUB = f"#!/bin/bash\n{RUN_JOB}" + 'printf "%s\\0" "$@" "$PYTHONPATH" "$PWD" >>"$HERE/argv"\n'


@functools.cache
def accepted(text: str) -> tuple[list[str], list[str]]:
    """The options that take the text, and those that refuse it, by what the loader and the rules say of each
    alone.
    """
    fine, refused = [], []
    for name in TEXTS:
        try:
            check(load([], [*BASE, _said(name, text)], profiles=[]), files=False)
        except ConfigError as error:
            told = f"{name} is not named: {error}"
            assert name.rpartition(".")[2] in str(error) or "launcher" in str(error), told
            refused.append(name)
        else:
            fine.append(name)
    return fine, refused


def _said(name: str, text: str) -> str:
    """The option as an argument: JSON is valid YAML for exactly this text."""
    if name.endswith("extra_args"):
        value = [f"--hint={text}"]
    else:
        value = {"NAME": text} if name.endswith(("env_vars", "launcher.env")) else text
    return f"{name}={json.dumps(value)}"


def run_with(text: str, here: Path) -> int:
    """Every script with the text wherever it is taken, under bash; the supervisor is a stub that notes what
    it was given.

    Returns how many scripts were run.
    """
    num_run = 0
    shutil.rmtree(here, ignore_errors=True)
    folder = "".join("_" if char in "/:" or LINE_BREAK.match(char) else char for char in text)
    root = here / "w" / f"a {folder}"
    for scheduler in ("local", "slurm"):
        try:
            loaded = _together(text)
            own = {"interpreter": str(root / "py thon"), "scheduler": scheduler}
            plan = make_plan(loaded.config, loaded.explicit, **own)
            trial = Trial(root / "runs" / loaded.config.experiment_name / loaded.config.trial_name)
            stamp = make_stamp(root, version=text, command=["render", text])
            texts = render(_with_hooks(loaded.config), plan, trial, stamp, scheduler)
        except ConfigError:
            continue  # options that exclude each other once both are given
        _execute(texts, trial, root, here, scheduler)
        num_run += 1
    return num_run


def _together(text: str) -> Loaded:
    """Every option that takes the text; without images where they exclude a path that a bind can't hold.
    Raises ConfigError.
    """
    fine, _ = accepted(text)
    bound = ("mount", "nfs_record_root")
    without = [name for name in fine if "image" not in name and not name.endswith(bound)]
    for names in (fine, without):
        try:
            return check(load([], [*BASE, *(_said(name, text) for name in names)], profiles=[]), files=False)
        except ConfigError:
            if names is without:
                raise
    raise AssertionError


def _with_hooks(config):
    hooks = HooksConfig(**dict.fromkeys(("pre_job", "pre_node", "post_node", "post_job"), "true\n#\n"))
    return dataclasses.replace(config, launcher=dataclasses.replace(config.launcher, hooks=hooks))


def _execute(texts: dict[str, str], trial: Trial, root: Path, here: Path, scheduler: str) -> None:
    trial.make_dirs()
    write_programs(root, {"py thon": STUB})
    write_programs(trial.scripts, texts)
    main = choose_script_name(scheduler)
    for name in (main, "site.sh", *(["steps.sh"] if scheduler == "slurm" else [])):
        assert check_bash(texts[name]) == [], name
    assert [problem for problem in check_directives(texts[main]) if "variable" not in problem.message] == []
    first = next(i for i, line in enumerate(texts[main].split("\n")) if line and not line.startswith("#"))
    assert texts[main].split("\n")[first] == "set -euo pipefail", "a text became a line of the script"
    (here / "argv").unlink(missing_ok=True)
    bin_ = here / "bin"
    write_programs(bin_, {"srun": '#!/bin/bash\nwhile [[ $1 == -* ]]; do shift; done\nexec "$@"\n'})
    env = {"PATH": f"{bin_}:{os.environ['PATH']}", "HERE": str(here), "HOME": str(here)}
    env |= {"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n1"}
    argv = ["bash", str(trial.scripts / main), *(["job"] if scheduler == "local" else [])]
    done = subprocess.run(argv, cwd=root, env=env, capture_output=True, text=True, timeout=extend(60))
    assert done.returncode == 0, done.stderr
    said = (here / "argv").read_bytes().decode().split("\0")
    assert said[:4] == ["-m", "hpc_rl.roles.supervisor", "--trial_dir", str(trial.dir)]
    assert said[8].startswith(f"{trial.dir}/scripts/w.zip:{root}")
    if scheduler == "slurm":
        # The launch line of a role: the words of a container and of the user's own options stay words.
        step = ["trainer", "trainer-0.0", "n1", "%t.log", "", "1", "-m", "the_role"]
        write_programs(bin_, {"srun": '#!/bin/bash\nprintf "%s\\0" "$@"\n'})
        argv = ["bash", str(trial.scripts / "steps.sh"), *step]
        done = subprocess.run(argv, cwd=root, env=env, capture_output=True, text=True)
        assert done.returncode == 0 and done.stdout.split("\0")[-3:] == ["-m", "the_role", ""], done.stderr
    assert not list(here.rglob("pwned")) and not Path("pwned").exists()


@pytest.mark.parametrize("text", HOSTILE)
def test_it_is_inert(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run_with(text, tmp_path / "here") == 2


def test_some_options_take_each_of_them():
    fine = {name for text in HOSTILE for name in accepted(text)[0]}
    assert {"launcher.slurm.partition", "launcher.slurm.comment", "launcher.trainer_env_vars"} <= fine
    assert "launcher.slurm.comment" in accepted("a\nb")[1]


ANY = st.characters(blacklist_categories=("Cs",), blacklist_characters="\0")


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(ANY, min_size=1, max_size=40))
def test_any_text_is_inert(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_with(text, tmp_path / "here")
