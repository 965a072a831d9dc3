"""`hpc-rl generate`, `evaluate` and `serve` on this machine: servers alone, interrupted by kill -9."""

import json
import os
import signal
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from alone_trials import (
    NUM_PROMPTS,
    count_calls,
    list_arguments,
    list_finished,
    list_prompts,
    load_completions,
    make_folder,
)
from patience import extend, wait_until
from toy_trials import hpc_rl, logs_of, pid_of, status, trial_of

from hpc_rl.core.trial import Trial, load_json
from hpc_rl.stats.read import load_history

pytestmark = pytest.mark.timeout(600)


def kill_rollout(trial: Trial) -> None:
    """Kill the newest process of the rollout role."""
    records = sorted(trial.attempts.glob("*/processes/rollout-0.*"), key=lambda path: path.stat().st_mtime)
    os.kill(pid_of(load_json(records[-1])), signal.SIGKILL)


def test_generate_finishes_each_prompt_once_after_a_kill(tmp_path):
    folder = make_folder(tmp_path, waits=True)
    trial = trial_of(folder, "base-generate")
    data = {"train_dataset.path": "prompts.jsonl", "gconfig.n_samples": 3, "keep_best_samples": 1}
    own = [f"{name}={value}" for name, value in data.items()]
    submit = ["generate", "quickstart/base", *list_arguments(), *own, "--launcher.type", "local"]
    said = hpc_rl(*submit, cwd=folder).stdout
    assert "embedded:d1 is chosen" in said

    wait_until(lambda: len(list_finished(trial)) >= 5, said=lambda: logs_of(trial))
    kill_rollout(trial)
    before = list_finished(trial)
    (folder / "go").touch()
    wait_until(lambda: trial.done.exists(), 120, lambda: logs_of(trial))

    rows, prompts = load_completions(trial), list_prompts(folder)
    assert [row["index"] for row in rows] == list(range(NUM_PROMPTS)), "the best completion of each prompt"
    assert [row["prompt"] for row in rows] == prompts
    assert all(row["reward"] == len(set(row["completion"])) for row in rows)
    calls = count_calls(folder)
    assert {calls[index] for index in before} == {3}, "a finished prompt is not repeated"
    scores = load_json(trial.results / "scores.json")
    assert (scores["prompts"], scores["completions"], scores["left_out"]) == (
        NUM_PROMPTS,
        3 * NUM_PROMPTS,
        {},
    )
    assert scores["reward"] < sum(row["reward"] for row in rows) / NUM_PROMPTS, (
        "of all three, not of the best"
    )

    shown = hpc_rl("status", "base-generate", "--offline", cwd=folder).stdout
    assert f"{NUM_PROMPTS} of {NUM_PROMPTS} prompts answered" in shown
    assert "finished every prompt" in shown
    again = hpc_rl(*submit, cwd=folder, check=False)
    assert again.returncode == 3
    assert "its results are in" in again.stderr


def test_evaluate_scores_each_set_of_a_model(tmp_path):
    folder = make_folder(tmp_path)
    rows = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    marked = (json.dumps(row | {"topic": "ab"[number % 2]}) for number, row in enumerate(rows))
    (folder / "marked.jsonl").write_text("\n".join(marked) + "\n")
    own = ["valid_dataset.path=marked.jsonl", "eval_gconfig.n_samples=2", "evaluator.sets_column=topic"]
    own += ["evaluator.sets.other.path=prompts.jsonl", "evaluator.sets.other.n_samples=1"]
    words = [*list_arguments(), *own, "evaluator.pass_reward=4", "--launcher.type=local", "--follow"]
    hpc_rl("evaluate", "quickstart/base", *words, cwd=folder)
    trial = trial_of(folder, "base-evaluate")
    every, scores = load_completions(trial), load_json(trial.results / "scores.json")
    found, others = ([row for row in every if row["set"] == name] for name in ("", "other"))
    assert len(others) == NUM_PROMPTS
    assert scores["other/reward"] == pytest.approx(sum(row["reward"] for row in others) / NUM_PROMPTS)
    of_a = [row["reward"] for row in found if row["topic"] == "a"]
    assert len(found) == 2 * NUM_PROMPTS
    assert scores["a/reward"] == pytest.approx(sum(of_a) / len(of_a))
    assert scores["pass@1"] == pytest.approx(sum(row["reward"] >= 4 for row in found) / len(found))
    shown = hpc_rl("status", "base-evaluate", "--offline", cwd=folder).stdout
    assert "pass@2" in shown
    assert status(folder, "base-evaluate", "--offline")["scores"] == scores
    assert "evaluate, embedded:d1" in shown


@pytest.mark.soak
def test_evaluate_repeats_the_evaluation_of_a_trial(tmp_path):
    folder = make_folder(tmp_path)
    training = list_arguments(
        trial_name="trained",
        actor__path="quickstart/base",
        total_train_steps=2,
        train_dataset__path="prompts.jsonl",
        train_dataset__batch_size=4,
        gconfig__n_samples=2,
        valid_dataset__path="prompts.jsonl",
        evaluator__freq_steps=1,
        recover__freq_steps=1,
        launcher__trainer_cpus_per_gpu=1,
        launcher__trainer_mem_per_gpu=2048,
        rollout__max_concurrent_rollouts="null",
    )
    hpc_rl("submit", *training, "--launcher.type=local", "--follow", cwd=folder)
    hpc_rl("evaluate", "trained@1", "--follow", cwd=folder)

    own = next(row for row in load_history(trial_of(folder, "trained")).evaluations if row["step"] == 1)
    trial = trial_of(folder, "trained-evaluate-1")
    assert (trial.exports / "trained-1" / "config.json").is_file(), "an endpoint shows this folder's name"
    scores = load_json(trial.results / "scores.json")
    assert scores["prompts"] == NUM_PROMPTS
    assert scores["reward"] == pytest.approx(own["eval_reward"], abs=1e-6)
    assert len(load_completions(trial)) == NUM_PROMPTS


def ask(url: str, path: str, key: str, body: dict | None = None) -> dict:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    with urllib.request.urlopen(
        urllib.request.Request(url + path, data, headers), timeout=extend(60)
    ) as answer:
        return json.load(answer)


def find_urls(folder: Path) -> dict[str, str]:
    """Return what `env urls` prints; {} while the endpoint is down."""
    done = hpc_rl("env", "urls", "base-serve", "--json", cwd=folder, check=False)
    return json.loads(done.stdout) if done.returncode == 0 else {}


def test_serve_answers_openai_requests_until_it_is_cancelled(tmp_path):
    folder = make_folder(tmp_path)
    trial = trial_of(folder, "base-serve")
    hpc_rl("serve", "quickstart/base", *list_arguments(), "--launcher.type", "local", cwd=folder)
    urls: dict[str, str] = {}
    wait_until(lambda: urls.update(find_urls(folder)) or urls, said=lambda: logs_of(trial))
    base, key = urls["base_url"], urls["api_key"]
    host = base.partition("/t/")[0]
    question = {"model": "any", "prompt": "1+1=", "max_tokens": 4, "n": 2, "seed": 1}
    with pytest.raises(urllib.error.HTTPError, match="401"):
        ask(host, "/v1/completions", "guessed", question)
    answer = ask(host, "/v1/completions", key, question)
    assert len(answer["choices"]) == 2
    assert ask(host, "/health", key)["status"] == "ok"
    assert ask(host, "/v1/models", key)["data"][0]["id"] == "base"

    kill_rollout(trial)

    def answers_again() -> bool:
        try:
            return ask(host, "/v1/completions", key, question)["choices"] == answer["choices"]
        except OSError:
            return False

    wait_until(answers_again, 120, lambda: logs_of(trial))
    wait_until(lambda: "endpoint http" in hpc_rl("status", "base-serve", cwd=folder).stdout)
    hpc_rl("cancel", "base-serve", cwd=folder)
    wait_until(lambda: status(folder, "base-serve")["state"] == "cancelled", said=lambda: logs_of(trial))
