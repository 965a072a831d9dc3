"""The model card of an export, and the commands that serve and evaluate it."""

import json
import re
import shlex

import pytest
import yaml

import hpc_rl
from hpc_rl.cli.__main__ import main
from hpc_rl.config.load.load import load
from hpc_rl.config.load.stored import to_dict
from hpc_rl.core.trial import write_json
from hpc_rl.stats.read import History
from hpc_rl.trials import conversion
from hpc_rl.trials.handing_over import (
    ExportFacts,
    list_serve_commands,
    load_export_facts,
    make_evaluate_command,
)
from hpc_rl.trials.model_card import draw_curves, load_license, write_model_card

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def trial(fake_trial, tmp_path):
    """A GRPO trial of 20 steps from a model of the hub, with evaluations and known rows."""
    base = tmp_path / f"hub/models--me--base/snapshots/{COMMIT}"
    base.mkdir(parents=True)
    (base / "README.md").write_text("---\nlicense: apache-2.0\ntags: [x]\n---\nAbout it.\n")
    (base / "LICENSE").write_text("the terms")
    rows = tmp_path / "gsm8k.jsonl"
    rows.write_text('{"prompt": "1", "answer": "1"}\n')
    given = [f"actor.path={base}", f"train_dataset.path={rows}", "experiment_name=e", "trial_name=t"]
    config = load([], ["trainer=grpo", *given, "gconfig.n_samples=4"]).config
    write_json(fake_trial.trial.config_json, to_dict(config))
    fake_trial.trial.config_yaml.write_text("gconfig: {n_samples: 4}\n")
    about = {"version": "0.1.0", "git": {"commit": "abc", "dirty": True}, "workdir_git": None}
    write_json(fake_trial.trial.provenance_json, about)
    fake_trial.run_to(20)
    for step, reward in ((10, 0.4), (20, 0.6)):
        fake_trial.evaluation("7.0", step, reward)
    return fake_trial.trial


def read_card(folder):
    _, head, text = (folder / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(head), text


def test_the_card_has_method_results_options_and_origins(trial, tmp_path):
    there = tmp_path / "out"
    there.mkdir()
    write_model_card(trial, 15, "0.15", there)
    head, text = read_card(there)
    assert head["base_model"] == "me/base" and head["license"] == "apache-2.0"
    assert {"hpc-rl", "reinforcement-learning"} <= set(head["tags"])
    assert "by grpo, all parameters" in text and "with 4 completions each a step" in text
    assert "Weights after step 15 (version 0.15)" in text
    assert f"at commit {COMMIT}" in text and "Its license is apache-2.0." in text
    rows = [line for line in text.splitlines() if re.match(r"\| \d+ \|", line)]
    assert rows == ["| 0 | 0.31 |", "| 10 | 0.4 |"], "step 20 came after these weights"
    assert "![Curves of training and evaluations](curves.svg)" in text
    assert (there / "curves.svg").read_text().startswith("<svg ")
    assert (there / "LICENSE").read_text() == "the terms"
    digest = re.search(r"\| train_dataset \| `(.*)` \| 1 \| ([0-9a-f]{64}) \|", text)
    assert digest and digest[1].endswith("gsm8k.jsonl")
    assert "- commit of hpc-rl: abc, with changes" in text
    assert "```yaml\ngconfig: {n_samples: 4}\n```" in text
    assert "--tasks gsm8k" in text and "vllm serve . --port 8000" in text


def test_the_card_of_a_trial_that_recorded_nothing_says_so(fake_trial, tmp_path):
    write_model_card(fake_trial.trial, 0, "0.0", tmp_path)
    head, text = read_card(tmp_path)
    assert "license" not in head and "The base model is not recorded." in text
    assert not (tmp_path / "curves.svg").exists() and "## Results" not in text


@pytest.mark.parametrize(
    "text, expected",
    [
        ("---\nlicense: other\nlicense_name: qwen\n---\n", {"license": "other", "license_name": "qwen"}),
        ("no head\n", {}),
        ("---\n[broken\n---\n", {}),
        ("---\njust text\n---\n", {}),
    ],
)
def test_the_license_is_read_from_the_head_of_the_base_models_card(tmp_path, text, expected):
    (tmp_path / "README.md").write_text(text)
    assert load_license(tmp_path) == expected
    assert load_license(tmp_path / "missing") == {}


def test_the_curves_are_inside_of_the_picture():
    history = History(steps=[{"step": step, "loss": 3.0 - step} for step in (1, 2)], evaluations=[])
    history.steps[1]["eval_loss"] = 5.0
    picture = draw_curves(history)
    (line,) = re.findall(r'polyline points="([^"]*)"', picture)
    places = [tuple(map(float, place.split(","))) for place in line.split()]
    assert len(places) == 2 and places[0][0] < places[1][0] <= 640
    assert all(0 <= y <= 280 for _, y in places) and places[1][1] > places[0][1]
    assert picture.count("<circle") == 1, "one evaluation is a point"
    assert draw_curves(History()) == ""


def test_commands_of_an_adapter_name_its_base(tmp_path):
    write_json(tmp_path / "adapter_config.json", {"base_model_name_or_path": "/m/base model", "r": 12})
    (tmp_path / "chat_template.jinja").touch()
    facts = load_export_facts(tmp_path, data="/d/MATH/train.jsonl")
    assert facts == ExportFacts(str(tmp_path), "/m/base model", 12, True, "minerva_math")
    serve = list_serve_commands(facts, {"vllm": "/v/bin/python"})
    vllm = shlex.split(serve["vllm"])
    assert vllm[:3] == ["/v/bin/vllm", "serve", "/m/base model"]
    assert vllm[vllm.index("--max-lora-rank") + 1] == "16"
    assert f"{tmp_path.name}={tmp_path}" in shlex.split(serve["sglang"])
    evaluate = shlex.split(make_evaluate_command(facts))
    assert f"pretrained=/m/base model,peft={tmp_path}" in evaluate and "--apply_chat_template" in evaluate


def test_a_path_with_a_comma_stays_one_argument_of_the_evaluation():
    evaluate = shlex.split(make_evaluate_command(ExportFacts("/m/lr=1,b=2")))
    assert json.loads(evaluate[evaluate.index("--model_args") + 1]) == {"pretrained": "/m/lr=1,b=2"}


def test_without_a_checkpoint_it_tells_where_the_final_model_is(trial, tmp_path):
    (trial.exports / "final").mkdir(parents=True)
    with pytest.raises(hpc_rl.NothingToResume) as error:
        hpc_rl.Trial(trial.dir).export(tmp_path / "model")
    said = str(error.value)
    assert f"The model after the last step is in {trial.exports / 'final'}." in said
    assert said.count("sound") == 1


def test_the_command_prints_how_to_serve_and_evaluate(trial, make_generation, tmp_path, monkeypatch, capsys):
    make_generation(trial, 10)
    monkeypatch.setattr(conversion, "convert", lambda *_args, **_more: 0)
    there = tmp_path / "model"
    assert main(["export", f"{trial.dir}@10", "--to", str(there), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["path"], told["step"], told["url"]) == (str(there), 10, "")
    assert told["serve"]["vllm"] == f"vllm serve {there} --port 8000"
    assert f"pretrained={there}" in told["evaluate"] and "--tasks gsm8k" in told["evaluate"]
    assert "Weights after step 10" in (there / "README.md").read_text()
    folder = hpc_rl.Trial(trial.dir).export(tmp_path / "from Python", step=10)
    assert "Weights after step 10" in (folder / "README.md").read_text()
    assert main(["export", f"{trial.dir}@10", "--step", "3"]) == 64
    assert "remove one" in capsys.readouterr().err
