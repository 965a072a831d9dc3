"""The history of published weights with a real model: transformers loads exports, and a fork trains."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from toy_trials import hpc_rl, logs_of, make_quickstart, trial_of
from transformers import AutoModelForCausalLM, AutoTokenizer
from version_history import publish_model

from hpc_rl.core.trial import load_json, write_json
from hpc_rl.core.types import WeightVersion
from hpc_rl.weights.disk import History

pytestmark = pytest.mark.timeout(600)
CONFIG = Path(__file__).parents[2] / "configs" / "quickstart" / "grpo.yaml"
NUM_STEPS = 5


@pytest.fixture(scope="module")
def here(tmp_path_factory) -> Path:
    """A directory with a rendered trial `first`, whose weights of steps 1 to 5 are published.

    `step-<N>` is the checkpoint whose values version 0.N has; versions 1 and 4 have all values.
    """
    here = tmp_path_factory.mktemp("history")
    make_quickstart(here)
    hpc_rl(
        "render", "--config", CONFIG, "trial_name=first", "launcher.type=local", "recover.mode=auto", cwd=here
    )
    trial = trial_of(here, "first", "quickstart")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(here / "quickstart" / "warm")
    tokenizer = AutoTokenizer.from_pretrained(here / "quickstart" / "warm")
    before = None
    for step in range(1, NUM_STEPS + 1):
        with torch.no_grad():
            for values in model.parameters():
                values.add_(torch.randn_like(values) * 0.02 * (torch.rand_like(values) < 0.05))
        after = here / f"step-{step}"
        model.save_pretrained(after)
        tokenizer.save_pretrained(after)
        whole = step in (1, 4)
        version, base = (WeightVersion(0, one) for one in (step, step - 1))
        publish_model(trial.weights, version, base, None if whole else before, after, num_ranks=3)
        before = after
    label = {"label": f"0.{NUM_STEPS}", "lineage": 0, "step": NUM_STEPS}
    write_json(trial.current_weights, label | {"path": str(trial.published(f"0.{NUM_STEPS}"))})
    return here


def compute_logits(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokens = AutoTokenizer.from_pretrained(folder)("1+2+3=", return_tensors="pt")
    with torch.no_grad():
        return model(tokens["input_ids"]).logits


def test_transformers_loads_the_export_of_any_step(here):
    trial = trial_of(here, "first", "quickstart")
    assert "steps 1-5 can be exported" in hpc_rl("checkpoint", "list", trial.dir, cwd=here).stdout
    for step in range(1, NUM_STEPS + 1):
        hpc_rl("checkpoint", "export", trial.dir, "--step", str(step), "--to", f"export-{step}", cwd=here)
        ours, theirs = (
            load_file(here / name / "model.safetensors") for name in (f"export-{step}", f"step-{step}")
        )
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
        assert torch.equal(compute_logits(here / f"export-{step}"), compute_logits(here / f"step-{step}"))
        assert load_json(here / f"export-{step}" / "hpc_rl.json")["version"] == f"0.{step}"
    assert not torch.equal(compute_logits(here / "export-1"), compute_logits(here / "export-5"))
    assert not list(trial.weights.glob(".*"))


def test_the_function_of_the_page_reads_every_step(here):
    """docs/weights.md, with the safetensors library alone."""
    page = (Path(__file__).parents[2] / "docs" / "weights.md").read_text()
    namespace: dict = {}
    exec(page.partition("```python\n")[2].partition("```")[0], namespace)
    for step in range(1, NUM_STEPS + 1):
        found = namespace["rebuild"](trial_of(here, "first", "quickstart").weights, f"0.{step}")
        wanted = load_file(here / f"step-{step}" / "model.safetensors")
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_a_fork_of_published_weights_trains_from_them(here):
    # a random model has no right sum
    (here / "lengths.py").write_text(
        "def reward(prompt, completion, **_):\n    return len(completion) / 10\n"
    )
    options = ["total_train_steps=2", "actor.optimizer.lr=1e-6", "evaluator.freq_steps=1"]
    options.append("rollout.reward_fn=lengths:reward")
    done = hpc_rl(
        "fork",
        f"{trial_of(here, 'first', 'quickstart').dir}@3",
        "second",
        *options,
        "--follow",
        cwd=here,
        timeout_s=500,
        check=False,
    )
    fork = trial_of(here, "second", "quickstart")
    assert done.returncode == 0, done.stdout + done.stderr + logs_of(fork)
    begun = load_file(fork.exports / "initial" / "model.safetensors")
    wanted = load_file(here / "step-3" / "model.safetensors")
    assert all(torch.equal(begun[name], wanted[name]) for name in wanted)
    ended = load_file(fork.exports / "final" / "model.safetensors")
    assert 0 < max((ended[name] - wanted[name]).abs().max() for name in wanted) < 1e-4  # two small steps
    status = json.loads(hpc_rl("status", "second", "--json", cwd=here).stdout)
    assert (status["state"], status["step"]) == ("done", 2)


def test_a_removal_leaves_versions_that_transformers_loads(here):
    trial = trial_of(here, "first", "quickstart")
    assert History(trial).prune([]) == ["0.3", "0.2", "0.1"]
    assert "steps 4-5 can be exported" in hpc_rl("checkpoint", "list", trial.dir, cwd=here).stdout
    hpc_rl("checkpoint", "export", trial.dir, "--version", "0.5", "--to", "again", cwd=here)
    assert torch.equal(compute_logits(here / "again"), compute_logits(here / "step-5"))
    refused = hpc_rl("checkpoint", "export", trial.dir, "--step", "3", "--to", "x", cwd=here, check=False)
    assert refused.returncode == 3 and "can be exported of steps 4-5" in refused.stderr
