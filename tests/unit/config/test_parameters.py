"""Every parameter of AReaL, ATLAS and atroposlib, row by row: it works, as a named test shows, or it is refused, in the
words given here.

parameters.tsv is the table of the seeds; parameter_status.tsv has the status of each row, in the same order. `works`: the option exists with the table's default (departures.py names the exceptions), and
the test that is named (of a parametrized one the case, `test_x[id]`) fails without it: see tests/rows. `refused`: the override that is given really is refused, with these words.
`todo`: neither yet; NUM_TODO can only shrink.
"""

import ast
import csv
import dataclasses
import re
from functools import cache
from pathlib import Path

import pytest

from hpc_rl.atropos import APIServerConfig, EnvConfig, EnvironmentSettings
from hpc_rl.atropos.settings import EvalHandling
from hpc_rl.config.compat.areal_options import DEPARTURES
from hpc_rl.config.compat.atlas import ALIASES, PRESET_DEPARTURES
from hpc_rl.config.load.fields import find_section, get_default, list_hints, list_options
from hpc_rl.config.load.load import load
from hpc_rl.config.load.source import load_yaml
from hpc_rl.config.options.experiment import ABSENT, CONFIGS, get_value
from hpc_rl.config.rules.check import check
from hpc_rl.core.errors import ConfigError
from hpc_rl.plan.plan import make_plan

NUM_TODO = {"areal": 0, "atlas": 0, "atropos": 0}
FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[2]
SECTIONS = {  # section of the table -> (trainer, prefix of its options)
    "Base Experiment Configuration": ("grpo", ""),
    "SFT Configuration": ("sft", ""),
    "GRPO Configuration": ("grpo", ""),
    "Reward Model Configuration": ("rw", ""),
    "Training Engine Configuration": ("sft", "model."),
    "PPO Actor Configuration": ("grpo", "actor."),
    "Optimizer Configuration": ("grpo", "actor.optimizer."),
    "Micro-batch Specification": ("grpo", "actor.mb_spec."),
    "Normalization Configuration": ("grpo", "actor.adv_norm."),
    "Inference Engine Configuration": ("grpo", "rollout."),
    "SGLang Configuration": ("grpo", "sglang."),
    "Generation Hyperparameters": ("grpo", "gconfig."),
    "Dataset Configuration": ("grpo", "train_dataset."),
    "Cluster Specification": ("grpo", "cluster."),
    "Launcher Configuration": ("grpo", "launcher."),
    "Statistics Logger Configuration": ("grpo", "stats_logger."),
    "Checkpoint Saver Configuration": ("grpo", "saver."),
    "Evaluator Configuration": ("grpo", "evaluator."),
    "Recovery Configuration": ("grpo", "recover."),
    "Scheduler Configuration": ("grpo", "scheduler."),
}
ENVIRONMENT = {  # the classes of atroposlib -> ours
    "BaseEnvConfig": EnvConfig,
    "ServerManagerConfig": EnvironmentSettings,
    "ServerBaseline": APIServerConfig,
    "APIServerConfig": APIServerConfig,
}
COMMON = ["experiment_name=e", "trial_name=t", "train_dataset.path=/d.jsonl", "train_dataset.batch_size=8"]
BASE = {
    "grpo": [*COMMON, "actor.path=/m", "gconfig.n_samples=4"],
    "sft": [*COMMON, "model.path=/m", "trainer=sft"],
    "rw": [*COMMON, "model.path=/m", "trainer=rw"],
}


@dataclasses.dataclass(frozen=True)
class Row:
    system: str
    section: str
    parameter: str
    default: str
    verdict: str
    shown_by: str

    def __str__(self) -> str:
        return f"{self.section}.{self.parameter}"

    @property
    def option(self) -> str:
        if self.system == "atlas":
            return ALIASES[self.parameter].to.replace("{model}", "actor")
        return SECTIONS[self.section][1] + self.parameter


def _load_table(name: str) -> list[list[str]]:
    with (FOLDER / name).open(newline="") as file:
        return list(csv.reader(file, delimiter="\t"))[1:]


def _load_rows() -> list[Row]:
    table, status = _load_table("parameters.tsv"), _load_table("parameter_status.tsv")
    assert [row[:3] for row in table] == [row[:3] for row in status], (
        "parameter_status.tsv must have the rows of parameters.tsv"
    )
    return [Row(*row[:3], row[4], *said[3:]) for row, said in zip(table, status, strict=True)]


ROWS = _load_rows()


def select_rows(verdict: str) -> list[Row]:
    return [row for row in ROWS if row.verdict == verdict]


def test_there_is_no_third_kind_but_a_todo_that_only_shrinks():
    assert {row.verdict for row in ROWS} <= {"works", "refused", "todo"}
    todo = {system: sum(row.system == system for row in select_rows("todo")) for system in NUM_TODO}
    assert todo == NUM_TODO, "a row was finished (lower NUM_TODO) or has become a todo (don't)"
    assert len(ROWS) == 365


@pytest.mark.parametrize("row", select_rows("refused"), ids=str)
def test_refused_rows_are_refused_in_these_words(row):
    override, _, words = row.shown_by.partition(" => ")
    trainer = SECTIONS[row.section][0] if row.section in SECTIONS else "grpo"
    check(load([], BASE[trainer]), files=False)  # without it nothing is wrong
    with pytest.raises(ConfigError) as caught:
        found = check(load([], [*BASE[trainer], override]), files=False)
        make_plan(found.config, found.explicit, interpreter="python", scheduler="slurm")
    assert words in str(caught.value)
    name = override.partition("=")[0]
    assert name in str(caught.value) and f"command line: {name}" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_nothing_of_areal_is_refused_because_it_is_missing():
    lacking = [row for row in select_rows("refused") if re.search("not (built|implemented)", row.shown_by)]
    assert not [row for row in lacking if row.system == "areal"]


@cache
def _list_tests(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_working_rows_name_a_test_that_exists_and_an_option_that_does():
    for row in select_rows("works"):
        path, _, name = row.shown_by.partition("::")
        assert name.startswith("test_") and name.partition("[")[0] in _list_tests(path), row
        if row.system == "atlas":
            assert row.parameter in ALIASES, row
        elif row.system == "atropos":
            ours = ENVIRONMENT[row.section.rpartition(".")[2]]()
            assert getattr(ours, row.parameter) == _parse_number(row.default), row
        else:
            _check_option(row)


def _check_option(row) -> None:
    trainer = SECTIONS[row.section][0]
    assert row.option in list_options(CONFIGS[trainer]), f"there is no option {row.option}"
    hint = list_options(CONFIGS[trainer])[row.option]
    if row.option in DEPARTURES:
        return
    default = _get_default(CONFIGS[trainer], row.option)
    if find_section(hint):
        agrees = default is None if row.default == "None" else default is not None
    else:
        agrees = row.default in ("**Required**", '"???"') or default == _parse_number(row.default)
    assert agrees, f"{row.option}: say so in DEPARTURES"


@pytest.mark.parametrize("n_gpus", [8, 0])
def test_a_default_that_adapts_is_a_departure(n_gpus):
    words = [f"cluster.n_gpus_per_node={n_gpus}", "valid_dataset.path=/v", "recover.mode=auto"]
    more = {trainer: ["model.mb_spec.max_tokens_per_mb=1024"] for trainer in ("sft", "rw")}
    more["grpo"] = ["ref.path=/r", "actor.beta=1", "total_train_steps=3", "allocation_mode=sglang:d*+fsdp:d1"]
    found = {
        trainer: check(load([], [*BASE[trainer], *words, *more[trainer]]), files=False) for trainer in more
    }
    for row in (row for row in select_rows("works") if row.system == "areal"):
        trainer = SECTIONS[row.section][0]
        value = get_value(found[trainer].config, row.option)
        is_left_out = row.option not in found[trainer].explicit and value is not ABSENT
        if is_left_out and not dataclasses.is_dataclass(value):
            departs = value != _get_default(CONFIGS[trainer], row.option)
            assert not departs or row.option in DEPARTURES, f"{row.option}: say so in DEPARTURES"


ATLAS_FILE = FOLDER / "atlas.yaml"


@pytest.mark.parametrize("presets", [["atlas"], []])
def test_a_file_as_atlas_documents_it(presets):
    rows = {row.parameter: row.default for row in ROWS if row.system == "atlas"}
    said = {name: item.to_plain() for name, item in load_yaml(ATLAS_FILE).items()}
    known = {"model_name_or_path": "/m", "report_to": ["wandb"]}
    assert said == {name: known.get(name) or _parse_number(text) for name, text in rows.items()}
    loaded = check(load([ATLAS_FILE], COMMON[:3], presets=presets), files=False)
    plan = make_plan(loaded.config, loaded.explicit, interpreter="python", scheduler="slurm")
    # 8 sequences on each of 4 ranks, in groups of 8
    assert (plan.allocation, loaded.config.train_dataset.batch_size) == ("sglang:d4+fsdp:d4", 4)
    assert loaded.config.gconfig.n_samples == 8


def test_what_the_preset_lacks_of_the_documented_defaults_is_listed():
    words = [*COMMON[:3], "actor.path=/m", "valid_dataset.path=/v"]
    documented, preset = (load(files, words, presets=["atlas"]).config for files in ([ATLAS_FILE], []))
    names = {name: alias.to.replace("{model}", "actor") for name, alias in ALIASES.items() if alias.to}
    departing = {
        name for name, option in names.items() if get_value(documented, option) != get_value(preset, option)
    }
    assert departing == set(PRESET_DEPARTURES)


def _get_default(cls: type, name: str):
    *sections, leaf = name.split(".")
    for part in sections:
        cls = find_section(list_hints(cls)[part])
    return get_default(next(field for field in dataclasses.fields(cls) if field.name == leaf))


def _parse_number(text: str):
    if text.startswith('"'):
        return text.strip('"')
    words = {"None": None, "True": True, "False": False, "default": "default"}
    words["EvalHandlingEnum.STOP_TRAIN"] = EvalHandling.STOP_TRAIN
    if text in words:
        return words[text]
    return float(text) if re.search(r"[.e]", text) else int(text)


def test_departures_are_options_that_depart():
    for name in DEPARTURES:
        assert any(name in list_options(cls) for cls in CONFIGS.values()), name


def test_every_alias_is_a_row():
    assert {row.parameter for row in ROWS if row.system == "atlas"} == set(ALIASES)


def test_every_option_of_an_environment_is_a_row():
    own = {"worker_timeout", "seed", "server_type", "env", "openai"}
    for cls in ENVIRONMENT.values():
        sections = {name for name, known in ENVIRONMENT.items() if known is cls}
        rows = {row.parameter for row in ROWS if row.section.rpartition(".")[2] in sections}
        assert {field.name for field in dataclasses.fields(cls)} - own == rows
