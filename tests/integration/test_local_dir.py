"""A trial with `cluster.local_dir`: its replicas read each checkpoint once from the shared disk."""

import re
import subprocess
from pathlib import Path

import pytest
from patience import extend
from toy_trials import hpc_rl, logs_of, make_quickstart, status, trial_of

from hpc_rl.core.trial import Trial
from hpc_rl.stats.read import load_history

CONFIGS = Path(__file__).resolve().parents[2] / "configs" / "quickstart"
# two steps may be faster than the start of a server: they wait until all three have loaded their weights
REWARDS = """
import time

def half(prompt, completion, **columns):
    return 0.5

class Waits:
    def on_step(self, event):
        while not event.is_check and self.count_loaded(event.trial_dir) < 3:
            time.sleep(0.1)

    def count_loaded(self, trial_dir):
        logs = (trial_dir / "attempts").glob("*/logs/server-*.log")
        return sum("the server is " in log.read_text() for log in logs)
"""


def run_script(trial: Trial) -> subprocess.CompletedProcess[str]:
    script = ["bash", str(trial.scripts / "local.sh")]
    return subprocess.run(script, capture_output=True, text=True, timeout=extend(280))


@pytest.mark.timeout(300)
def test_replicas_of_a_node_share_copies_that_are_gone_in_the_end_with_the_code_of_the_submission(tmp_path):
    make_quickstart(tmp_path)
    rewards = tmp_path / "my_rewards.py"
    disk = tmp_path / "disk"
    rewards.write_text(REWARDS)
    options = ["experiment_name=sums", "trial_name=local", "total_train_steps=2", "valid_dataset=null"]
    options += ["allocation_mode=embedded:d3+fsdp:d1", "evaluator.freq_steps=null", "launcher.type=local"]
    options += ["train_dataset.batch_size=8", "gconfig.n_samples=2", "actor.ppo_n_minibatches=1"]
    options += ["rollout.reward_fn=my_rewards:half", "launcher.snapshot=[my_rewards.py]"]
    options.append("callbacks=[my_rewards:Waits]")
    given = ["render", "--config", CONFIGS / "grpo.yaml", *options, f"cluster.local_dir={disk}"]
    rendered = hpc_rl(*given, cwd=tmp_path)
    assert "launcher.snapshot: 1 files are copied" in rendered.stdout + rendered.stderr
    rewards.write_text("def half(prompt, completion, **columns):\n    return 1.0\n")
    trial = trial_of(tmp_path, "local")
    done = run_script(trial)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}\n{logs_of(trial)}"
    assert [row["reward"] for row in load_history(trial).steps] == [0.5] * 2, "the code of the submission"
    [attempt] = trial.attempts.iterdir()
    servers = [path.read_text() for path in sorted((attempt / "logs").glob("server-*.log"))]
    copied = [source for text in servers for source in re.findall(r"copied (\S+) to", text)]
    base = str(tmp_path / "quickstart" / "warm")
    assert len(servers) == 3 and copied.count(base) <= 1
    every = "".join(path.read_text() for path in (attempt / "logs").glob("*.log"))
    # The rank of the trainer on this node shares it too.
    assert len(re.findall(f"copied {re.escape(base)} to", every)) == 1
    versions = [label for text in servers for label in re.findall(f"copied weights (\\S+) to {disk}/", text)]
    assert versions and len(versions) == len(set(versions)), "each version once"
    # a server that starts after the first publication begins with the copy of its weights
    place = rf"{re.escape(str(disk))}/\S*/copies/weights/"
    loaded = rf"loaded (weights \S+ from its published values in )?{place}"
    assert all(re.search(loaded, text) for text in servers), servers
    assert list(disk.iterdir()) == []


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_ranks_of_a_node_encode_a_dataset_once(tmp_path):
    make_quickstart(tmp_path)
    disk = tmp_path / "disk"
    options = ["experiment_name=sums", "trial_name=encoded", "total_train_steps=2", "launcher.type=local"]
    options += ["allocation_mode=fsdp:d2", "valid_dataset=null", "evaluator.freq_steps=null"]
    given = ["submit", "--follow", "--config", CONFIGS / "sft.yaml", *options]
    losses = []
    for name, more in (("encoded", [f"cluster.local_dir={disk}"]), ("plain", [])):
        done = hpc_rl(*given, f"trial_name={name}", *more, cwd=tmp_path, timeout_s=140, check=False)
        trial = trial_of(tmp_path, name)
        assert done.returncode == 0, f"{done.stdout}{done.stderr}\n{logs_of(trial)}"
        [attempt] = trial.attempts.iterdir()
        losses.append(re.findall(r'"loss": ([^,]+)', (attempt / "metrics.0.jsonl").read_text()))
    assert losses[0] == losses[1] and len(losses[0]) == 2
    assert list(disk.iterdir()) == []


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("quickstart/task/train.jsonl", "train_dataset.path"),
        ("my_rewards.py", "SyntaxError: '(' was never closed (my_rewards.py, line 1)"),
    ],
)
def test_what_is_gone_or_broken_since_the_submission_ends_the_job_at_once(tmp_path, file, words):
    make_quickstart(tmp_path)
    rewards = tmp_path / "my_rewards.py"
    rewards.write_text("def half(prompt, completion, **columns):\n    return 0.5\n")
    options = ["experiment_name=sums", "trial_name=lacks", "launcher.type=local"]
    options.append("rollout.reward_fn=my_rewards:half")
    hpc_rl("render", "--config", CONFIGS / "grpo.yaml", *options, cwd=tmp_path)
    (tmp_path / file).unlink()
    if file == "my_rewards.py":
        rewards.write_text("def half(prompt:\n")
    trial = trial_of(tmp_path, "lacks")
    done = run_script(trial)
    assert done.returncode == 78, done.stdout + done.stderr
    found = status(tmp_path, str(trial.dir))
    assert found["state"] == "failed" and words in found["reason"]
    assert [one.name for one in trial.attempts.glob("*/logs/rollout-*")] in ([], ["rollout-0.0.log"])
