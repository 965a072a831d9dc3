"""Roles in containers, started and ended like other roles: a stand-in for apptainer checks its arguments and
uses a new root.
"""

import json
import os
import sys
import sysconfig
from pathlib import Path

import pytest
from launch_lines import write_steps
from patience import wait_until
from toy_plans import toy_unit

from hpc_rl.core.proc import find_start_ticks
from hpc_rl.core.trial import Attempt, Trial
from hpc_rl.plan.schema import Container
from hpc_rl.supervise.processes import STOP, ProcessSteps, SrunSteps

STAND_IN = Path(__file__).resolve().parents[2] / "helpers" / "bin" / "apptainer"
STRANGE = "a b;$(touch broken) 'q' `id`"
ROLE = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("up", os.getpid(), child.pid, flush=True)
while data := os.read(0, 99):
    sys.exit(75)
sys.exit(143)
"""


@pytest.fixture
def attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Attempt:
    """Below a directory with a strange name, which is also the working directory."""
    here = tmp_path / STRANGE
    here.mkdir()
    monkeypatch.chdir(here)
    made = Trial(here / "u" / "e" / "t").attempt("7.0")
    made.make_dirs()
    return made


@pytest.fixture
def container(tmp_path: Path) -> Container:
    image_file = tmp_path / f"{STRANGE}.sif"
    holds = [sys.prefix, sys.base_prefix, sysconfig.get_path("stdlib")]
    image_file.write_text(json.dumps({"holds": holds, "env": {"X": "of the image", "PYTHONPATH": "/image"}}))
    where = {"image": str(image_file), "python": sys.executable, "program": str(STAND_IN)}
    return Container(type="apptainer", mounts=[], args=[], **where)


def start(attempt: Attempt, container: Container, code: str, **env: str):
    environ = os.environ | {"PYTHONPATH": f"{Path.cwd()}:/elsewhere"}
    unit = toy_unit(env=env, container=container)
    return ProcessSteps(environ).start(unit, ["/host/python", "-c", code], attempt, 0)


def wait(handle) -> int:
    wait_until(lambda: handle.poll() is not None)
    return handle.poll()


def said(attempt: Attempt, word: str) -> str:
    """The last complete line of the role's log that begins with a word."""
    log, found = attempt.log("trainer", 0, 0), []

    def is_there() -> bool:
        found[:] = [line for line in log.read_text().splitlines(keepends=True) if line.startswith(word)]
        return bool(found) and found[-1].endswith("\n")

    wait_until(is_there, said=log.read_text)
    return found[-1]


def are_gone(attempt: Attempt) -> None:
    """Wait until the role and its child have ended."""
    pids = [int(word) for word in said(attempt, "up").split()[1:]]
    wait_until(lambda: all(find_start_ticks(pid) is None for pid in pids))


def test_a_role_is_stopped_through_its_container_and_gives_its_code(attempt, container):
    handle = start(attempt, container, ROLE)
    said(attempt, "up")
    handle.send(STOP)
    assert wait(handle) == 75


def test_it_ends_with_the_supervisor_and_by_force_with_all_that_it_started(attempt, container):
    handle = start(attempt, container, ROLE)
    said(attempt, "up")
    os.close(handle._pipes.pop())  # what the supervisor's death does
    assert wait(handle) == 143
    are_gone(attempt)
    attempt.log("trainer", 0, 0).write_text("")
    deaf = ROLE.replace("os.read(0, 99)", "os.read(0, 99) or True").replace("sys.exit(75)", "pass")
    handle = start(attempt, container, deaf)
    said(attempt, "up")
    handle.kill()
    assert wait(handle) == -9
    are_gone(attempt)


def test_strange_text_reaches_the_role_as_it_is(attempt, container):
    show = "import json, os, sys; print('env', json.dumps([dict(os.environ), os.getcwd(), "
    show += "sys.flags.safe_path, os.listdir('.')]), flush=True)"
    assert wait(start(attempt, container, show, X=STRANGE, PLUS='"\\n, $HOME', HPC_RL_RANK="9")) == 0
    env, cwd, safe_path, seen = json.loads(said(attempt, "env").removeprefix("env"))
    assert (env["X"], env["PLUS"]) == (STRANGE, '"\\n, $HOME')
    assert (env["HPC_RL_NUM_RANKS"], env["HPC_RL_RANK"], safe_path) == ("1", "9", True)
    assert env["PYTHONPATH"] == cwd == str(Path.cwd()) and seen == ["u"]
    assert not (Path.cwd() / "broken").exists()


def test_only_what_is_bound_is_seen(attempt, container, tmp_path):
    (tmp_path / "bound").mkdir()
    (tmp_path / "unbound").mkdir()
    bound = Container(**{**vars(container), "mounts": [f"{tmp_path / 'bound'}:/there"]})
    show = "import os; print('seen', os.path.exists('/there'), os.path.exists({!r}))"
    assert wait(start(attempt, bound, show.format(str(tmp_path / "unbound")))) == 0
    if "not isolated" in attempt.log("trainer", 0, 0).read_text():
        pytest.skip("this account may not make mount namespaces")
    assert said(attempt, "seen") == "seen True False\n"


def test_what_apptainer_complains_about_is_in_the_roles_log(attempt, container):
    missing = Container(**{**vars(container), "image": "/no/image.sif"})
    assert wait(start(attempt, missing, "")) == 255
    assert "could not open image /no/image.sif" in said(attempt, "FATAL:")


def test_pyxis_is_handed_to_srun_behind_the_users_own_options(attempt, monkeypatch, tmp_path):
    (tmp_path / "srun").write_text('#!/bin/bash\nprintf "%s\\n" "$@"; env\n')
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    image = f"/{STRANGE}.sqsh"
    container = Container(type="pyxis", image=image, python="python3", program="", mounts=["/a:/b"], args=[])
    unit = toy_unit("server", srun_args=["--comment=x"], container=container)
    write_steps(attempt.trial, unit)
    handle = SrunSteps(["a"], dict(os.environ)).start(unit, ["/host/python", "-m", "m"], attempt, 0)
    assert wait(handle) == 0
    lines = attempt.log("server", 0, 0).read_text().splitlines()
    at = lines.index("--comment=x")
    assert lines[at + 1 : at + 3] == [
        f"--container-image=/{STRANGE}.sqsh",
        f"--container-mounts=/a:/b,{Path.cwd()}:{Path.cwd()}",
    ]
    assert lines[lines.index("--no-container-entrypoint") + 1 :][:3] == ["python3", "-m", "m"]
