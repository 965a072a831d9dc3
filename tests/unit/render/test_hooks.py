"""Hooks of a real job script: the local runner with a supervisor that only notes that it was started."""

import fcntl
import os
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from job_scripts import RUN_JOB, write_programs
from patience import extend, wait_until

from hpc_rl.config.options.cluster import HooksConfig
from hpc_rl.core.errors import ConfigError
from hpc_rl.core.files import JsonLines
from hpc_rl.core.trial import Trial
from hpc_rl.render.hooks import gather, make_removal

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
    """The script of a trial, and the notes of its processes."""

    here: Path
    trial: Trial
    written: Callable[..., Path]

    @property
    def notes(self) -> Path:
        return self.here / "notes"

    def start(self, hooks: dict, site: Path | None = None, scheduler: str = "local") -> subprocess.Popen[str]:
        write_programs(self.here, {"python": SUPERVISOR})
        script = self.written(scheduler, self.here / "python", hooks=hooks, site=[site] if site else [])
        env, argv = os.environ | {"NOTES": str(self.notes)}, ["bash", str(script), "job"]
        return subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def run(self, hooks: dict, site: Path | None = None, scheduler: str = "local") -> tuple[int, str]:
        process = self.start(hooks, site, scheduler)
        said, _ = process.communicate(timeout=extend(60))
        return process.returncode, said

    def noted(self) -> list[str]:
        return self.notes.read_text().split("\n")[:-1] if self.notes.exists() else []

    def ended(self) -> dict:
        return JsonLines(self.trial.job_state("job")).poll()[-1]


@pytest.fixture
def runner(written, trial, tmp_path):
    return Runner(tmp_path, trial, written)


def note(*words: str) -> str:
    return f'#!/bin/bash\necho {" ".join(words)} >>"$NOTES"\n'


def test_they_run_in_their_order_site_first_and_site_last(runner, tmp_path):
    told = {"pre_job": "$HPC_RL_ATTEMPT", "post_job": "$HPC_RL_CODE"}
    of_site = {event: note("site", event, variable) for event, variable in told.items()}
    write_programs(tmp_path / "site" / "hooks.d", of_site)
    events = ("pre_job", "pre_node", "post_node", "post_job", "on_preempt")
    own = {event: note(event, "$HPC_RL_HOOK") for event in events}
    code, said = runner.run(own, tmp_path / "site")
    assert code == 0, said
    before = ["site pre_job job.0", "pre_job pre_job", "pre_node pre_node"]
    after = ["post_node post_node", "post_job post_job", "site post_job 0"]
    assert runner.noted() == [*before, "supervisor", *after]


def test_they_run_around_every_attempt_and_are_told_its_code(runner):
    (runner.here / "notes.code").write_text("75")
    again = 'if [[ $HPC_RL_ATTEMPT == job.1 ]]; then echo 70 >"$NOTES.code"; fi\n'
    told = {event: note(event, "$HPC_RL_CODE") for event in ("post_node", "post_job")}
    assert runner.run({"pre_job": note("pre_job", "$HPC_RL_ATTEMPT") + again, **told})[0] == 70
    first = ["pre_job job.0", "supervisor", "post_node 75", "post_job 75"]
    assert runner.noted() == [*first, "pre_job job.1", "supervisor", "post_node 70", "post_job 70"]


SRUN = """#!/bin/bash
printf '%s\n' "Welcome to the cluster" "quota: 3% used" word "" # what a TaskProlog of the site prints
while [[ $1 == --* ]]; do shift; done
exec "$@"
"""


def test_words_of_a_sites_task_prolog_are_no_answers(runner, tmp_path, monkeypatch):
    write_programs(tmp_path / "bin", {"srun": SRUN})
    environ = {
        "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_JOB_ID": "7",
    }
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    hooks = {"pre_node": note("pre_node"), "post_node": "#!/bin/bash\nexit 5\n"}
    code, said = runner.run(hooks, scheduler="slurm")
    assert code == 0 and "hook.post_node.0 ended with code 5" in said, said
    assert runner.noted() == ["pre_node", "supervisor"]
    assert "Welcome" not in said and "answers came" not in said


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


def test_told_to_end_runs_on_preempt_once_beside_the_supervisor(runner):
    (runner.here / "notes.wait").touch()
    process = runner.start({"on_preempt": note("preempt"), "post_job": note("post")})
    wait_until((runner.here / "notes.waits").exists)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=extend(60))
    assert process.returncode == 143
    assert runner.noted() == ["supervisor", "preempt", "post"]


def test_told_to_end_ends_a_hook_too(runner):
    process = runner.start({"pre_job": '#!/bin/bash\ntouch "$NOTES.in"\nsleep 300\n'})
    wait_until((runner.here / "notes.in").exists)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=extend(60))
    assert process.returncode == 143 and runner.noted() == []
    assert runner.ended()["reason"] == "stopped by a signal"


def test_a_script_is_a_path_or_a_text(tmp_path):
    (tmp_path / "check.sh").write_text("true\n")
    found = gather(HooksConfig(pre_job=str(tmp_path / "check.sh"), post_job="echo a\necho b"), [])
    assert found["pre_job"] == {"hook.pre_job.0": "#!/bin/bash\ntrue\n"}
    assert found["post_job"] == {"hook.post_job.0": "#!/bin/bash\necho a\necho b\n"}
    assert not any(found[event] for event in ("pre_node", "post_node", "on_preempt"))
    unread = r"launcher\.hooks\.pre_job: .* can't be read: No such file .*several lines"
    with pytest.raises(ConfigError, match=unread):
        gather(HooksConfig(pre_job=str(tmp_path / "nowhere")), [])
    with pytest.raises(ConfigError, match=r"launcher\.hooks\.dir"):
        gather(HooksConfig(dir=str(tmp_path / "nowhere")), [])


@pytest.mark.parametrize("local_dir", ["{}", "$DISK/my disk"])
def test_what_a_job_leaves_in_local_dir_is_removed_and_what_another_uses_is_not(tmp_path, local_dir):
    disk = tmp_path / "my disk"
    own, other = (disk / f"hpc-rl-{os.getuid()}-{job}" for job in (7, 8))
    for folder in (own, other):
        (folder / "copies").mkdir(parents=True)
    [text] = make_removal(local_dir.format(disk)).values()
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
