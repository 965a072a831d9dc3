"""A trial whose every step is exported afterwards: the weights are those that its server used."""

import json
import subprocess
import threading
import urllib.request
from pathlib import Path

import pytest
import xxhash
from patience import extend
from toy_trials import hpc_rl, logs_of, make_quickstart, trial_of
from version_history import read_model, rebuild

from hpc_rl.core.trial import Trial
from hpc_rl.name_resolve import keys, open_names
from hpc_rl.weight_files.chain import load_indices

pytestmark = pytest.mark.timeout(900)
CONFIG = Path(__file__).parents[2] / "configs" / "quickstart" / "grpo.yaml"
NUM_STEPS = 60
# the server keeps a version until the next step is trained
WAITS = """
import time
from pathlib import Path

class Waits:
    def on_step(self, event):
        seen = Path("seen", str(event.metrics.get("version")))
        until = time.monotonic() + 60
        while not (event.is_check or seen.exists() or time.monotonic() > until):
            time.sleep(0.01)
"""


class Watch(threading.Thread):
    """Asks the trial's server for the checksums of its weights until the trial ends. Leaves a file in `folder` for each
    version that it has seen.
    """

    def __init__(self, trial: Trial, folder: Path) -> None:
        super().__init__(daemon=True)
        self.trial, self.folder = trial, folder
        self.seen: dict[str, dict[str, str]] = {}  # version -> checksums
        self.ending = threading.Event()

    def run(self) -> None:
        while not self.ending.wait(0.02):
            try:
                answer = self._ask()
            except (OSError, StopIteration, ValueError):  # it starts, or has ended
                continue
            if answer["weight_version"]:
                [rank] = answer["ranks"]
                assert self.seen.setdefault(answer["weight_version"], rank["checksums"]) == rank["checksums"]
                (self.folder / answer["weight_version"]).touch()

    def _ask(self) -> dict:
        leases = open_names(self.trial).list_leases(keys.servers("rollout"))
        lease = next(one for one in leases.values() if one.alive)
        token = self.trial.load_tokens()["control"]
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        request = urllib.request.Request(lease.value["url"] + "/weights_checker", b"{}", headers)
        with urllib.request.urlopen(request, timeout=extend(20)) as response:
            return json.loads(response.read())


def compute_checksums(folder: Path) -> dict[str, str]:
    return {name: xxhash.xxh3_64_hexdigest(values) for name, values in read_model(folder).items()}


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.soak), "bfloat16"])
def test_every_step_can_be_exported_as_the_server_had_it(tmp_path, dtype):
    """In float32 a step changes most values, in bfloat16 few."""
    make_quickstart(tmp_path)
    trial = trial_of(tmp_path, dtype, "quickstart")
    (tmp_path / "watched.py").write_text(WAITS)
    (tmp_path / "seen").mkdir()
    watch = Watch(trial, tmp_path / "seen")
    watch.start()
    options = [
        *(f"trial_name={dtype}", f"total_train_steps={NUM_STEPS}", "launcher.type=local"),
        *("train_dataset.batch_size=4", "actor.ppo_n_minibatches=1", "evaluator.freq_steps=null"),
        *(f"actor.dtype={dtype}", f"embedded.dtype={dtype}", "actor.optimizer.lr=1e-5"),
        *("weights.history_gb=1", "valid_dataset=null", "recover.freq_steps=null"),
        "callbacks=[watched:Waits]",
    ]
    try:
        hpc_rl("submit", "--config", CONFIG, *options, "--follow", cwd=tmp_path, timeout_s=500)
    except (AssertionError, subprocess.TimeoutExpired) as error:
        raise AssertionError(f"{error}\n{logs_of(trial)}") from error
    finally:
        watch.ending.set()
        watch.join(extend(30))
    assert len(watch.seen) > NUM_STEPS / 2, sorted(watch.seen)
    indices = load_indices(trial.weights)
    assert len(indices) == NUM_STEPS + 1
    if dtype == "bfloat16":
        assert sum(one.base is not None for one in indices.values()) > NUM_STEPS / 2
        [log] = trial.attempts.glob("*/logs/server-0.0.log")
        assert log.read_text().count("from changes since") > NUM_STEPS / 2
    for label, checksums in watch.seen.items():
        model = rebuild(trial, label, tmp_path / "models" / label)
        assert compute_checksums(model) == checksums, label
    for step in (1, 17, NUM_STEPS):
        hpc_rl("checkpoint", "export", dtype, "--step", str(step), "--to", f"export-{step}", cwd=tmp_path)
        rebuilt = tmp_path / "models" / f"0.{step}"
        if rebuilt.exists():
            assert compute_checksums(tmp_path / f"export-{step}") == compute_checksums(rebuilt)
