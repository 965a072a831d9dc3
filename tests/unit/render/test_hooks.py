"""Hooks of a real job script: the local runner with a supervisor that only notes that it was started."""

import fcntl
import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from job_scripts import RUN_JOB

from hpc_rl.config.options.cluster import HooksConfig
from hpc_rl.core.errors import ConfigError
from hpc_rl.core.files import JsonLines
from hpc_rl.core.trial import Trial
from hpc_rl.render.hooks import gather, removal

SUPERVISOR = (
    f"#!/bin/bash\n{RUN_JOB}"
    + """
echo supervisor >>"$NOTES"
if [[ -e $NOTES.wait ]]; then trap 'exit 143' TERM; touch "$NOTES.waits"; while :; do sleep 0.05; done; fi
exit "$(cat "$NOTES.code" 2>/dev/null || echo 0)"
"""
)


@dataclass
class Runner:
    """The local script of a trial, and what its processes noted."""

    here: Path
    trial: Trial
    make: object

    @property
    def notes(self) -> Path:
        return self.here / "notes"

    def start(self, hooks: dict, site: Path | None = None, scheduler: str = "local") -> subprocess.Popen[str]:
        python = self.here / "python"
        python.write_text(SUPERVISOR)
        python.chmod(0o755)
        self.trial.make_dirs()
        self.trial.scripts.mkdir(exist_ok=True)
        texts = self.make(
            scheduler, python=str(python), workdir=self.here, hooks=hooks, site=[site] if site else []
        )
        for name, text in texts.items():
            (self.trial.scripts / name).write_text(text)
            (self.trial.scripts / name).chmod(0o755)
        env = os.environ | {"NOTES": str(self.notes)}
        argv = [
            "bash",
            str(self.trial.scripts / {"local": "local.sh", "slurm": "trial.sbatch"}[scheduler]),
            "job",
        ]
        return subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def run(self, hooks: dict, site: Path | None = None, scheduler: str = "local") -> tuple[int, str]:
        process = self.start(hooks, site, scheduler)
        said, _ = process.communicate(timeout=60)
        return process.returncode, said

    def noted(self) -> list[str]:
        return self.notes.read_text().split("\n")[:-1] if self.notes.exists() else []

    def ended(self) -> dict:
        return JsonLines(self.trial.job_state("job")).poll()[-1]


@pytest.fixture
def runner(scripts, tmp_path):
    return Runner(tmp_path, Trial(tmp_path / "exp" / "one"), scripts)


def note(*words: str) -> str:
    return f'#!/bin/bash\necho {" ".join(words)} >>"$NOTES"\n'


def test_they_run_in_their_order_site_first_and_site_last(runner, tmp_path):
    (tmp_path / "site" / "hooks.d").mkdir(parents=True)
    (tmp_path / "site" / "hooks.d" / "pre_job").write_text(note("site", "pre_job", "$HPC_RL_ATTEMPT"))
    (tmp_path / "site" / "hooks.d" / "post_job").write_text(note("site", "post_job", "$HPC_RL_CODE"))
    own = {
        event: note(event, "$HPC_RL_HOOK")
        for event in ("pre_job", "pre_node", "post_node", "post_job", "on_preempt")
    }
    code, said = runner.run(own, tmp_path / "site")
    assert code == 0, said
    lines = [
        "site pre_job job.0",
        "pre_job pre_job",
        "pre_node pre_node",
        "supervisor",
        "post_node post_node",
    ]
    assert runner.noted() == [*lines, "post_job post_job", "site post_job 0"]


def test_they_run_around_every_attempt(runner):
    (runner.here / "notes.code").write_text("75")
    again = 'if [[ $HPC_RL_ATTEMPT == job.1 ]]; then echo 0 >"$NOTES.code"; fi\n'
    assert (
        runner.run(
            {"pre_job": note("pre", "$HPC_RL_ATTEMPT") + again, "post_job": note("post", "$HPC_RL_CODE")}
        )[0]
        == 0
    )
    assert runner.noted() == ["pre job.0", "supervisor", "post 75", "pre job.1", "supervisor", "post 0"]


def test_what_runs_afterwards_is_told_the_code_of_the_attempt(runner):
    (runner.here / "notes.code").write_text("70")
    told = {event: note(event, "$HPC_RL_CODE") for event in ("post_node", "post_job")}
    assert runner.run(told)[0] == 70
    assert runner.noted() == ["supervisor", "post_node 70", "post_job 70"]


SRUN = """#!/bin/bash
printf '%s\n' "Welcome to the cluster" "quota: 3% used" word "" # what a TaskProlog of the site prints
while [[ $1 == --* ]]; do shift; done
exec "$@"
"""


def test_words_of_a_sites_task_prolog_are_no_answers(runner, tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "srun").write_text(SRUN)
    (tmp_path / "bin" / "srun").chmod(0o755)
    for name, value in {
        "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_JOB_ID": "7",
    }.items():
        monkeypatch.setenv(name, value)
    code, said = runner.run(
        {"pre_node": note("pre_node"), "post_node": "#!/bin/bash\nexit 5\n"}, scheduler="slurm"
    )
    assert code == 0 and "hook.post_node.0 ended with code 5" in said, said
    assert (
        runner.noted() == ["pre_node", "supervisor"] and "Welcome" not in said and "answers came" not in said
    )


@pytest.mark.parametrize(
    ("event", "script", "words"),
    [
        ("pre_job", "#!/bin/bash\nexit 3\n", "hook hook.pre_job.0 ended with code 3 on node "),
        ("pre_node", "#!/bin/bash\nexit 3\n", "hook hook.pre_node.0 ended with code 3 on node "),
        ("pre_node", "#!/bin/bash\nsleep 60\n", "hook hook.pre_node.0 took longer than 1 s on node "),
    ],
)
def test_one_that_fails_before_ends_the_job_and_says_which(runner, event, script, words):
    code, said = runner.run({event: script, "timeout_s": 1, "post_job": note("post")})
    assert code == 70, said
    assert runner.ended()["reason"].startswith(words) and runner.ended()["cancelled"] is False
    assert runner.noted() == ["post"], "no supervisor, but the clean-up"


def test_one_that_fails_afterwards_is_only_told(runner):
    code, said = runner.run({"post_node": "#!/bin/bash\necho words\nexit 5\n"})
    assert code == 0 and "hook.post_node.0 ended with code 5" in said
    assert runner.ended()["reason"] == "done"
    [log] = (runner.trial.attempt("job.0").dir / "hooks").glob("post_node.*.log")
    assert log.read_text() == "words\n"


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 50
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.05)


def test_told_to_end_runs_on_preempt_once_beside_the_supervisor(runner):
    (runner.here / "notes.wait").touch()
    process = runner.start({"on_preempt": note("preempt"), "post_job": note("post")})
    wait_for(runner.here / "notes.waits")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 143
    assert runner.noted() == ["supervisor", "preempt", "post"]


def test_told_to_end_ends_a_hook_too(runner):
    process = runner.start({"pre_job": '#!/bin/bash\ntouch "$NOTES.in"\nsleep 300\n'})
    wait_for(runner.here / "notes.in")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 143 and runner.noted() == []
    assert runner.ended()["reason"] == "stopped by a signal"


def test_a_script_is_a_path_or_a_text(tmp_path):
    (tmp_path / "check.sh").write_text("true\n")
    found = gather(HooksConfig(pre_job=str(tmp_path / "check.sh"), post_job="echo a\necho b"), [])
    assert found["pre_job"] == {"hook.pre_job.0": "#!/bin/bash\ntrue\n"}
    assert found["post_job"] == {"hook.post_job.0": "#!/bin/bash\necho a\necho b\n"}
    assert not any(found[event] for event in ("pre_node", "post_node", "on_preempt"))
    with pytest.raises(
        ConfigError, match=r"launcher\.hooks\.pre_job: .* can't be read: No such file .*several lines"
    ):
        gather(HooksConfig(pre_job=str(tmp_path / "nowhere")), [])
    with pytest.raises(ConfigError, match=r"launcher\.hooks\.dir"):
        gather(HooksConfig(dir=str(tmp_path / "nowhere")), [])


@pytest.mark.parametrize("local_dir", ["{}", "$DISK/my disk"])
def test_what_a_job_leaves_in_local_dir_is_removed_and_what_another_uses_is_not(tmp_path, local_dir):
    disk = tmp_path / "my disk"
    own, other = (disk / f"hpc-rl-{os.getuid()}-{job}" for job in (7, 8))
    for folder in (own, other):
        (folder / "copies").mkdir(parents=True)
    [text] = removal(local_dir.format(disk)).values()
    env = {"PATH": os.environ["PATH"], "HPC_RL_ATTEMPT": "7.0", "DISK": str(tmp_path)}
    held = os.open(own, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_SH)  # by a role of another trial in this job
    soon = text.replace("--timeout 10", "--timeout 0.1")
    assert subprocess.run(["bash", "-c", soon], env=env).returncode == 0 and own.exists()
    os.close(held)
    done = subprocess.run(["bash", "-c", text], env=env, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert list(disk.iterdir()) == [other]
    assert subprocess.run(["bash", "-c", text], env=env).returncode == 0, "nothing is left"
