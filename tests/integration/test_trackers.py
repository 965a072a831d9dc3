"""MLflow and Trackio themselves: what a trial with two attempts leaves in their own files.

Each is installed into an environment of the test, which also sees the packages of this one.
"""

import json
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
from own_environments import make_environment
from patience import extend

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.soak, pytest.mark.timeout(1200)]

ATTEMPT = """
import sys
from pathlib import Path

from hpc_rl.config.options.operations import MLflowConfig, StatsLoggerConfig, TrackioConfig
from hpc_rl.stats.metrics_writers import RunIdentity, open_writers

service, folder, first = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
section = {"mlflow": MLflowConfig, "trackio": TrackioConfig}[service](mode="local")
who = RunIdentity("sums", "grpo", folder / "attempt", folder, {"actor": {"lr": 0.1}, "seed": 1})
writers = open_writers(folder / "m.jsonl", folder / "tb", first, who, StatsLoggerConfig(**{service: section}))
for step in (first, first + 1):
    writers.log(step, {"loss": 1 / step, "grad_norm": float("nan"), "reward/right": 0.5, "version": "0.3"})
writers.log(first, {"eval_pass@8": 0.25, "eval_version": "0.1"})
writers.close()
"""
READ_MLFLOW = """
import json, os, sys

os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
from mlflow.tracking import MlflowClient

client = MlflowClient("file://" + sys.argv[1] + "/mlflow")
(experiment,) = [one for one in client.search_experiments() if one.name == "sums"]
found = []
for run in client.search_runs([experiment.experiment_id]):
    curves = {
        name: [(one.step, one.value) for one in client.get_metric_history(run.info.run_id, name)]
        for name in ("loss", "reward/right", "eval_pass_8")
    }
    found.append({"name": run.info.run_name, "state": run.info.status, "options": run.data.params, **curves})
print(json.dumps(found))
"""
READ_TRACKIO = """
import json, os, sys

os.environ["TRACKIO_DIR"] = sys.argv[1] + "/trackio"
from trackio.sqlite_storage import SQLiteStorage

found = []
for name in SQLiteStorage.get_runs("sums"):
    rows = SQLiteStorage.get_logs("sums", name)
    curves = {
        key: [(row["step"], row[key]) for row in rows if key in row]
        for key in ("loss", "reward/right", "eval_pass@8")
    }
    found.append({"name": name, "options": SQLiteStorage.get_run_config("sums", name), **curves})
print(json.dumps(found))
"""


@pytest.fixture(scope="module", params=["mlflow", "trackio"])
def service(request, tmp_path_factory) -> tuple[str, Path]:
    """The name of a service, and a Python that has it."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, make_environment(folder, *extras[request.param])


def run(*argv: str | Path, **more: Any) -> str:
    done = subprocess.run([*map(str, argv)], capture_output=True, text=True, timeout=extend(300), **more)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_attempts_of_a_trial_are_one_run_with_all_metrics(service, tmp_path):
    name, python = service
    # variables of the user's that would send the files of mode local elsewhere
    environ = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    environ |= {"MLFLOW_TRACKING_URI": "http://127.0.0.1:9", "TRACKIO_SPACE_ID": "nobody/none"}
    for first in (1, 3):  # two attempts, in processes of their own
        run(python, "-c", ATTEMPT, name, tmp_path, str(first), env=environ, cwd=tmp_path)
    read = {"mlflow": READ_MLFLOW, "trackio": READ_TRACKIO}[name]
    (found,) = json.loads(run(python, "-c", read, tmp_path, cwd=tmp_path).splitlines()[-1])
    assert found["name"] == "grpo"
    assert found["loss"] == [[step, pytest.approx(1 / step)] for step in (1, 2, 3, 4)]
    assert found["reward/right"] == [[step, 0.5] for step in (1, 2, 3, 4)]
    rate = found["options"]["actor.lr"] if name == "mlflow" else found["options"]["actor"]["lr"]
    assert float(rate) == 0.1
    if name == "mlflow":
        assert found["eval_pass_8"] == [[1, 0.25], [3, 0.25]] and found["state"] == "FINISHED"
    else:
        assert found["eval_pass@8"] == [[1, 0.25], [3, 0.25]]
