"""The parser of a configuration has help for every option and reports all refusals; roles do not need it."""

import json
import pkgutil
import subprocess
import sys

import pytest

import hpc_rl.roles
from hpc_rl.config.load.fields import find_section, list_options
from hpc_rl.config.load.load import load
from hpc_rl.config.load.parser import describe_options, list_sections, make_parser
from hpc_rl.config.options.experiment import CONFIGS
from hpc_rl.config.reference import format_help
from hpc_rl.core.errors import ConfigError

BASE = ["experiment_name=a", "trial_name=b", "actor.path=/m", "train_dataset.path=/t"]
BAD = """\
experiment_name: a
trial_name: 0123
cluster: {n_nodes: 0, n_gpu_per_node: 8}
launcher:
  slurm:
    time: 90
    gpus_by: grse
    mem: 12Q
train_dataset: {path: /x, batch_size: many}
actor: {path: /m, optimizer: {lr: fast}}
"""


@pytest.mark.parametrize("trainer", CONFIGS)
def test_every_option_has_help(trainer):
    described = [
        (prefix + option.name, option.text)
        for prefix, section, _ in list_sections(CONFIGS[trainer])
        for option in describe_options(section)
    ]
    expected = {name for name, hint in list_options(CONFIGS[trainer]).items() if find_section(hint) is None}
    assert {name for name, _ in described} == expected
    assert [name for name, text in described if len(text) < 8] == []
    assert all(len(text) > 5 for prefix, _, text in list_sections(CONFIGS[trainer]) if prefix)


def test_help_names_the_options_of_optional_sections():
    text = format_help("all")
    for name in (
        "--actor.optimizer.lr LR",
        "--ref.path PATH",
        "--valid_dataset.path PATH",
        "--model.path PATH",
    ):
        assert name in text
    assert "Final learning rate as a share of the peak. (type: float," in " ".join(text.split())
    for topic in ("lr", "learning_rate", "optimizer"):  # as typed; spaces and hyphens are underscores
        found = format_help(topic)
        assert "--actor.optimizer.lr LR" in found and "--model.optimizer.lr LR" in found, topic
        assert "--seed" not in found
    with pytest.raises(ConfigError, match="no option has that in its name or text; sections: actor"):
        format_help("zebra")


@pytest.mark.parametrize("chosen", [["actor.optimizer.lr"], ["ref.dtype", "seed"]])
def test_a_parser_of_chosen_options_asks_for_no_others(chosen):
    parsed = make_parser(CONFIGS["grpo"], chosen).parse_object({})
    assert sorted(parsed.keys()) == sorted(chosen)


def test_all_wrong_values_of_a_file_are_refused_at_once(tmp_path):
    path = tmp_path / "bad.yaml"
    path.write_text(BAD)
    with pytest.raises(ConfigError) as caught:
        load([path])
    lines = str(caught.value).replace(f"{tmp_path}/", "").splitlines()
    assert len(lines) == 7
    for line, expected in zip(
        lines,
        [
            "unknown key cluster.n_gpu_per_node (bad.yaml:3): did you mean cluster.n_gpus_per_node?",
            "cluster.n_nodes (bad.yaml:3): 0 can't be used; allowed: an integer, at least 1",
            "launcher.slurm.time (bad.yaml:6): 90 (an integer) can't be used; allowed: 24:00:00",
            "launcher.slurm.gpus_by (bad.yaml:7): grse (text) can't be used; allowed: gpus-per-node, gres",
            "launcher.slurm.mem (bad.yaml:8): 12Q can't be used; allowed: derived, or a number with an optional unit",
            "train_dataset.batch_size (bad.yaml:9): many (text) can't be used; allowed: an integer",
            "actor.optimizer.lr (bad.yaml:10): fast (text) can't be used; allowed: a number",
        ],
        strict=True,
    ):
        assert line.startswith(expected), line
    assert lines[3].endswith("Did you mean gres?")


@pytest.mark.parametrize("value", ['"5"', "true", "null", "[1]", "1.5"])
def test_what_looks_like_a_number_is_not_one(tmp_path, value):
    (tmp_path / "a.yaml").write_text(f"seed: {value}\n")
    with pytest.raises(ConfigError, match=r"seed \(.*a\.yaml:1\): .* can't be used; allowed: an integer"):
        load([tmp_path / "a.yaml"], BASE)


@pytest.mark.parametrize(
    ("typed", "name", "value"),
    [
        (["--model", "/n"], "actor.path", "/n"),
        (["--lr", "1e-3"], "actor.optimizer.lr", 1e-3),
        (["--data", "/u"], "train_dataset.path", "/u"),
        (["--name", "c"], "trial_name", "c"),
        (["--fileroot", "/r"], "cluster.fileroot", "/r"),
        (["--nodes", "3"], "cluster.n_nodes", 3),
        (["--max-steps", "7"], "total_train_steps", 7),
    ],
)
def test_short_names(typed, name, value):
    found = load([], [*BASE, *typed]).config
    for part in name.split("."):
        found = getattr(found, part)
    assert found == value


def test_short_names_of_the_model_follow_the_trainer():
    base = ["experiment_name=a", "trial_name=b", "--data", "/t", "trainer=sft"]
    config = load([], [*base, "--model", "/m", "--lr", "1"]).config
    assert (config.model.path, config.model.optimizer.lr) == ("/m", 1.0)


@pytest.mark.parametrize(
    ("typed", "answer"),
    [
        ("gpus=8", "cluster.n_gpus_per_node"),
        ("launcher.slurm.spare_nodes=1", "layout jobs"),
        ("cluster.n_nodes=2-4", "layout jobs"),
        ("actor.zebra=1", "`--help actor` shows"),
        ("actor.mb_spec.zebra=1", "known here: granularity, max_seqs_per_mb, max_tokens_per_mb, n_mbs."),
        ("trainer.total_epochs=1", "trainer is an option"),
        ("turn_penalty=1", "A value for your own workflow goes into rollout.workflow_args."),
    ],
)
def test_a_name_that_is_not_close_to_any_gets_no_suggestion(typed, answer):
    with pytest.raises(ConfigError) as caught:
        load([], [*BASE, typed])
    assert answer in str(caught.value) and "did you mean" not in str(caught.value)


def test_no_role_imports_the_parser():
    """Roles read config.json; images of servers need not have jsonargparse."""
    roles = [f"hpc_rl.roles.{found.name}" for found in pkgutil.iter_modules(hpc_rl.roles.__path__)]
    made_on_the_login_side = {
        "hpc_rl.tools.quickstart_trial",
        "hpc_rl.roles.submit_again",
        "hpc_rl.tools.run_environment",  # a command; the role is roles.environment_role
    }
    roles = sorted(set(roles) - made_on_the_login_side)
    code = f"import importlib, json, sys\nfor name in {roles}: importlib.import_module(name)\n"
    code += "print(json.dumps([name for name in sys.modules if name.partition('.')[0] in ('jsonargparse', 'shtab')]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []


def test_loading_imports_nothing_heavy():
    code = (
        "import sys, hpc_rl.config.rules.check, hpc_rl.plan.plan\n"
        "from hpc_rl.config.load.load import load\n"
        f"load([], {BASE})\n"
        "heavy = ['torch', 'transformers', 'omegaconf', 'numpy', 'aiohttp', 'shtab', 'rich', 'ruamel']\n"
        "print([m for m in heavy if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("launcher.slurm.time=banana", "banana can't be used; allowed: 24:00:00 (hours)"),
        (
            "gconfig.use_beam_search=true",
            "true can't be used: hpc-rl samples completions and has no beam search. Remove this",
        ),
    ],
)
def test_a_value_of_the_right_type_is_refused_without_its_type(option, message):
    with pytest.raises(ConfigError) as refusal:
        load([], [*BASE, option], profiles=[])
    assert message in str(refusal.value)


def test_a_missing_file_names_the_file_that_may_be_meant(tmp_path):
    (tmp_path / "grpo.yaml").write_text("{}")
    with pytest.raises(ConfigError, match=r"gpro\.yaml can't be read: .* Did you mean .*/grpo\.yaml\?"):
        load([tmp_path / "gpro.yaml"], [], profiles=[])
