"""The environment that a job script gives to the supervisor: run with bash, the supervisor is a stub."""

import os
import subprocess

import pytest
from job_scripts import RUN_JOB, write_programs
from patience import extend

from hpc_rl.config.load.load import load
from hpc_rl.core.errors import ConfigError

STUB = (
    f"#!/bin/bash\n{RUN_JOB}"
    + """
{ env; echo "limits=$(ulimit -Sn) $(ulimit -Sc) umask=$(umask)"; } >"$HERE/seen"
"""
)
MODULE = """module() { echo "warning: $2" >&2; export "LOADED=${LOADED:-} $2"; return 1; }
export SITE=first PLACE=site PROXY_FREE=${DISPLAY:-none}
false
: "$NEVER_SET"
"""


@pytest.fixture
def seen(written, tmp_path):
    """`seen(scheduler, environ, **launcher)` -> what the supervisor's environment is, and the job's stderr."""

    def run(scheduler: str, environ: dict[str, str] | None = None, **launcher):
        site, stub = tmp_path / "site", tmp_path / "python"
        write_programs(site / "hooks.d", {"environment": MODULE})
        write_programs(tmp_path, {"python": STUB})
        main = str(written(scheduler, stub, site=site, launcher=launcher))
        env = {"PATH": os.environ["PATH"], "HERE": str(tmp_path), "HOME": str(tmp_path)}
        env |= {"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n1", **(environ or {})}
        argv = ["bash", "-c", 'ulimit -Sn 256; ulimit -Sc unlimited; exec bash "$@"', "run", main, "job"]
        done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=extend(60))
        assert done.returncode == 0, done.stderr
        lines = (tmp_path / "seen").read_text().splitlines()
        return dict(line.partition("=")[::2] for line in lines), done.stderr

    return run


@pytest.mark.parametrize("scheduler", ["local", "slurm"])
def test_modules_setup_and_variables_reach_the_supervisor_and_no_failure_ends_the_job(seen, scheduler):
    setup = "export PLACE=setup OF=$LOADED\nfalse\n"
    value = 'it\'s $(touch pwned) "a b"'
    env, said = seen(scheduler, modules=["cuda/12.4", "gcc"], setup=setup, env={"PLACE": value})
    assert env["SITE"] == "first", "the site's file"
    assert env["OF"] == " cuda/12.4 gcc", "the modules come before the setup"
    assert env["PLACE"] == value, "the variables come last"
    assert "warning: cuda/12.4" in said and "module load gcc returned 1" in said


def test_limits_are_raised_and_cores_are_not_written(seen):
    env, _ = seen("local")
    files, cores, umask = env["limits"].split()
    assert int(files) > 256 and (cores, umask) == ("0", "umask=0077")
    assert seen("local", umask="027")[0]["limits"].endswith("umask=0027")


def test_what_holds_on_the_login_node_only_does_not_reach_a_job(seen):
    of_login = {"DISPLAY": ":1", "XDG_RUNTIME_DIR": "/run/user/1", "TMPDIR": "/not/here"}
    env, _ = seen("slurm", of_login)
    assert not env.keys() & of_login.keys() and env["PROXY_FREE"] == "none"
    assert seen("local", of_login)[0]["DISPLAY"] == ":1", "it runs on the same machine"


@pytest.mark.parametrize("value", ["cuda 12", "-f", "$(id)", ""])
def test_a_name_of_a_module_is_no_command(value):
    base = ["model.path=/m", "experiment_name=e", "trial_name=t", "train_dataset.path=/d"]
    with pytest.raises(ConfigError, match="modules"):
        load([], [*base, f"launcher.modules=['{value}']"], profiles=[])
