"""A real rendered job script beside programs that only note their calls, for tests of signals.

Each program says where it is by a file `at.<stage>`, and waits there for `go.<stage>` where the test holds that
stage. So a test sends its signals at a stage, and not at a time.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from patience import extend
from toy_plans import sft_plan

from hpc_rl.config.load.stored import from_dict
from hpc_rl.core.files import JsonLines
from hpc_rl.core.trial import Trial
from hpc_rl.render.scripts import Stamp, choose_script_name, render

ROOT = Path(__file__).resolve().parents[2]
GUARD_S = 120.0
STAGE = """stage() { : >"$HERE/at.$1"; while [[ -e $HERE/hold.$1 && ! -e $HERE/go.$1 ]]; do sleep 0.05; done; }
"""
# Lines of a program that stands for Python: what runs the job itself is no stub.
RUN_JOB = f"""case "$*" in *hpc_rl.roles.job*) PYTHONPATH=${{PYTHONPATH:+$PYTHONPATH:}}{ROOT} exec {sys.executable} "$@" ;; esac
"""
RUN_JOB_IN_PYTHON = f"""import os, sys
if "hpc_rl.roles.job" in sys.argv:
    os.environ["PYTHONPATH"] = os.environ.get("PYTHONPATH", "") + ":{ROOT}"
    os.execv({sys.executable!r}, [{sys.executable!r}, *sys.argv[1:]])
"""
PYTHON = f"""#!/bin/bash
{STAGE}
if [[ "$*" == *hpc_rl.roles.job* ]]; then stage python; fi
{RUN_JOB}
case "$*" in
  *roles.supervisor*) exec {sys.executable} -S "$HERE/supervisor.py" "$@" ;;
  *"submit_again successor"*) echo "successor" >>"$HERE/calls"; stage successor; echo 8 ;;
  *) exit 0 ;;
esac
"""
PROGRAMS = {
    "python": PYTHON,
    "scontrol": f"""#!/bin/bash
{STAGE}
case "$1 $2" in
  "show job") stage answer; echo "JobId=7 $(cat "$HERE/reason") Restarts=0 " ;;
  "requeue 7") echo "requeue" >>"$HERE/calls"; stage requeue; exit "$(cat "$HERE/refuses")" ;;
  *) echo "scontrol $*" >>"$HERE/calls" ;;
esac
""",
    "scancel": '#!/bin/bash\necho "scancel $*" >>"$HERE/calls"\n',
    "sinfo": "#!/bin/bash\nprintf 'n%d\\n' 1 2 3 4\n",
    "srun": '#!/bin/bash\nwhile [[ $1 == --* ]]; do shift; done\nexec "$@"\n',
}
# Starts, listens, runs, and stops with 75 where it is asked to, as the real one does; a later start is done at once.
SUPERVISOR = """
import os, signal, sys, time
here = os.environ["HERE"]
attempt = sys.argv[sys.argv.index("--attempt") + 1]
job, _, restart = attempt.rpartition(".")
intent = os.path.join(sys.argv[sys.argv.index("--trial_dir") + 1], "intent", f"drain-{attempt}.json")
asked = []

def stage(name):
    open(f"{here}/at.{name}", "w").close()
    return os.path.exists(f"{here}/hold.{name}") and not os.path.exists(f"{here}/go.{name}")

with open(f"{here}/starts", "a") as file:
    file.write(attempt + "\\n")
if restart != "0":
    sys.exit(0)
while stage("starting"):
    time.sleep(0.05)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
    signal.signal(number, lambda number, _: asked.append(number))
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1})
while stage("running") and not asked and not os.path.exists(intent):
    time.sleep(0.05)
if os.path.exists(f"{here}/hold.draining"):
    open(intent, "w").close()  # of the supervisor itself, whose time is nearly over
while stage("draining") or stage("ending"):
    time.sleep(0.05)
os._exit(75)
"""
HOOK = '#!/bin/bash\n: >"$HERE/at.$HPC_RL_HOOK"; while [[ -e $HERE/hold.$HPC_RL_HOOK && ! -e $HERE/go.$HPC_RL_HOOK ]]; do sleep 0.05; done\n'


def write_programs(folder: Path, programs: dict[str, str]) -> None:
    """Write executable files."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in programs.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)


def make_stamp(workdir: Path, **more: Any) -> Stamp:
    """Return a stamp; `more` replaces any field."""
    usual = {"version": "1", "config_sha256": "0", "command": ["render"], "tag": "tag", "wheel": "w.zip"}
    return Stamp(**{"start_mode": "auto", "workdir": workdir, **usual, **more})


def sft_config(mode: str = "auto", **launcher: Any) -> Any:
    """Return the configuration of the SFT trial exp/one; `launcher` is its section of that name."""
    names = {"experiment_name": "exp", "trial_name": "one"}
    paths = {"train_dataset": {"path": "/data"}, "model": {"path": "/model"}}
    return from_dict({**names, **paths, "recover": {"mode": mode}, "launcher": launcher})


def render_toy(root: Path, scheduler: str, python: Path, **options: Any) -> tuple[Trial, dict[str, str]]:
    """Return a small trial below `root` and its scripts; `options` are sections of launcher."""
    hooks, launcher = options.pop("hooks", {}), options.pop("launcher", {})
    config = sft_config(slurm=options, hooks=hooks, **launcher)
    plan = sft_plan([], str(python), recover_mode="auto")
    trial = Trial(root / "exp" / "one")
    return trial, render(config, plan, trial, make_stamp(root), scheduler)


class JobRun:
    """The job script of one trial, which this process signals."""

    def __init__(self, here: Path, scheduler: str, **options: Any) -> None:
        """Write a trial and the programs of its job below `here`; `options` are those of `render_toy`."""
        self.here, self.scheduler = here, scheduler
        self.job_id = "7" if scheduler == "slurm" else "job"
        self.process: subprocess.Popen[bytes] | None = None
        write_programs(here / "bin", PROGRAMS)
        (here / "supervisor.py").write_text(SUPERVISOR)
        for name, text in {"reason": "Reason=None", "refuses": "0"}.items():
            (here / name).write_text(text)
        hooks = {"pre_job": HOOK, "post_job": HOOK}
        launcher = {"setup": HOOK.replace("$HPC_RL_HOOK", "site"), **options.pop("launcher", {})}
        python = here / "bin" / "python"
        self.trial, texts = render_toy(here, scheduler, python, hooks=hooks, launcher=launcher, **options)
        self.trial.make_dirs()
        write_programs(self.trial.scripts, texts)

    def hold(self, *stages: str) -> None:
        """Have the script wait at these stages until `release`."""
        for stage in stages:
            (self.here / f"hold.{stage}").touch()

    def start(self) -> None:
        env = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        env |= {"HERE": str(self.here), "PATH": f"{self.here}/bin:{os.environ['PATH']}"}
        if self.scheduler == "slurm":
            env |= {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_PARTITION": "main"}
            env |= {"SLURMD_NODENAME": "n1"}
        argv = ["bash", str(self.trial.scripts / choose_script_name(self.scheduler))]
        argv += [] if self.scheduler == "slurm" else [self.job_id]
        with (self.here / "said").open("wb") as said:
            self.process = subprocess.Popen(
                argv, env=env, stdin=subprocess.DEVNULL, stdout=said, stderr=said, start_new_session=True
            )

    def reach(self, stage: str) -> None:
        """Wait until a program of the job is at a stage. Raises AssertionError where the script ended first."""
        assert self.process is not None
        deadline = time.monotonic() + extend(GUARD_S)
        while not (self.here / f"at.{stage}").exists():
            assert self.process.poll() is None, f"ended with {self.process.returncode} before {stage}"
            assert time.monotonic() < deadline, f"{stage} was not reached"
            time.sleep(0.02)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the script alone, as `scancel --batch` does."""
        assert self.process is not None
        self.process.send_signal(number)

    def release(self, stages: Iterable[str]) -> int:
        """Let the script pass stages; return its exit code, negative for the signal that killed it."""
        assert self.process is not None
        for stage in stages:
            (self.here / f"go.{stage}").touch()
        return self.process.wait(extend(GUARD_S))

    def end(self) -> None:
        """End what is left."""
        if self.process is not None:
            for path in self.here.glob("hold.*"):
                path.unlink()
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def calls(self) -> list[str]:
        path = self.here / "calls"
        return path.read_text().splitlines() if path.exists() else []

    def starts(self) -> int:
        path = self.here / "starts"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def lines(self) -> list[dict[str, Any]]:
        """Return what the script reported in `jobs/<job id>.state`."""
        return JsonLines(self.trial.job_state(self.job_id)).poll()

    def said(self) -> str:
        return (self.here / "said").read_text()
