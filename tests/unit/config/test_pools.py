"""Sections with free keys: `pools` in files, on the command line, stored, shown and compared.

Also the trainer that a section `teacher` means.
"""

import json

import pytest
import yaml

from hpc_rl.config.changes import list_changes, refuse_unsafe
from hpc_rl.config.json_schema import make_schema
from hpc_rl.config.load.load import load
from hpc_rl.config.load.stored import from_dict, redact, to_dict
from hpc_rl.config.options.experiment import (
    ABSENT,
    GRPOConfig,
    SFTConfig,
    TeacherConfig,
    get_value,
    replace_value,
)
from hpc_rl.config.options.pools import PoolConfig
from hpc_rl.config.reference import format_help, list_section_names
from hpc_rl.config.rules.check import adapt
from hpc_rl.config.rules.consistency import is_default, list_given
from hpc_rl.config.show import format_yaml, show
from hpc_rl.core.errors import ConfigError
from hpc_rl.trials.submission import list_explicit_options

GIVEN = ["experiment_name=e", "trial_name=t", "train_dataset.path=/d", "actor.path=/m"]
BASE = "experiment_name: e\ntrial_name: t\ntrain_dataset: {path: /d}\nactor: {path: /m}\n"
POOLS = """\
pools:
  student: {path: models/student, max_new_tokens: 300, options: {context_length: 4096}}
  judge-2:
    url: http://host:8000/v1
    max_new_tokens: ${pools.student.max_new_tokens}
    temperature: ${pools.student.temperature}
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "a.yaml"
    path.write_text(BASE + POOLS)
    return path


def collect_refusals(*arguments: str, files=()) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(files, arguments, profiles=[])
    return str(caught.value).splitlines()


def test_pools_of_a_file_are_sections_by_name(file, tmp_path):
    loaded = load([file], profiles=[])
    assert loaded.config.pools == {
        "student": PoolConfig(
            path=str(tmp_path / "models/student"), max_new_tokens=300, options={"context_length": "4096"}
        ),
        "judge-2": PoolConfig(url="http://host:8000/v1", max_new_tokens=300),
    }
    assert loaded.origins["pools.student.path"] == f"{file}:6"
    assert loaded.origins["pools.judge-2.max_new_tokens"] == f"{file}:9"
    assert "pools" not in loaded.origins


def test_files_and_arguments_merge_by_key_and_the_later_wins(file, tmp_path):
    other = tmp_path / "b.yaml"
    other.write_text("pools: {student: {top_p: 0.5}, third: {url: http://x}}\n")
    loaded = load(
        [file, other],
        ["pools.student.path=/s", "--pools.judge-2.max-new-tokens", "9", "--pools.student.top_p=0.25"],
        profiles=[],
    )
    pools = loaded.config.pools
    assert list(pools) == ["student", "judge-2", "third"]
    assert (pools["student"].path, pools["student"].top_p, pools["student"].max_new_tokens) == (
        "/s",
        0.25,
        300,
    )
    assert pools["judge-2"].max_new_tokens == 9
    assert loaded.origins["pools.student.path"] == "command line: pools.student.path"


def test_null_removes_a_pool_and_all_of_them(file):
    loaded = load([file], ["pools.judge-2=null"], profiles=[])
    assert list(loaded.config.pools) == ["student"]
    assert "judge-2" not in list_explicit_options(loaded)["pools"]
    assert load([file], ["pools=null"], profiles=[]).config.pools == {}
    assert list(load([file], ["pools=null", "pools.new.path=/n"], profiles=[]).config.pools) == ["new"]
    assert load([], [*GIVEN, "pools.a={}"], profiles=[]).config.pools == {"a": PoolConfig()}


def test_everything_that_is_wrong_in_pools_is_refused_at_once(tmp_path):
    path = tmp_path / "bad.yaml"
    path.write_text(
        BASE + "pools:\n  student: {pth: /s, top_p: 2, url: 7, options: [x]}\n"
        "  1st: {path: /x}\n  text: /y\n  stop: {stop_token_ids: [-1]}\n"
    )
    lines = [line.replace(f"{tmp_path}/", "") for line in collect_refusals(files=[path])]
    assert lines[0] == "unknown key pools.student.pth (bad.yaml:6): did you mean pools.student.path?"
    assert lines[1].startswith("pools.text (bad.yaml:8): '/y' (text) can't be the value of a section") or (
        lines[1].startswith("pools.text (bad.yaml:8): /y (text) can't be the value of a section")
    )
    assert lines[2] == (
        "pools.1st (bad.yaml:7): '1st' can't be a name in section pools; "
        "allowed: a letter, then up to 62 letters, digits, _ or -."
    )
    found = "\n".join(lines)
    assert "pools.student.top_p (bad.yaml:6): 2 can't be used; allowed: a number, above 0" in found
    assert "pools.student.options (bad.yaml:6): ['x'] (a list) can't be used; allowed: a mapping" in found
    assert "pools.stop.stop_token_ids (bad.yaml:9)" in found
    assert len(lines) == 6


def test_pools_that_are_none_are_refused_by_name():
    (line,) = collect_refusals(*GIVEN, "pools=5")
    assert line.startswith("pools (command line: pools): 5 (an integer) can't be the value of a section")
    (line,) = collect_refusals(
        "experiment_name=e", "trial_name=t", "train_dataset.path=/d", "model.path=/m", "pools.a.path=/p"
    )
    assert line.endswith("only a trial with trainer: grpo or teacher has it.")
    (line,) = collect_refusals(*GIVEN, "pools.a.path=${pools.b.path}")
    assert "pools.a.path" in line and "can't be resolved" in line


def test_pools_survive_config_json_and_show(file, tmp_path):
    loaded = load([file], ["pools.third={}"], profiles=[])
    assert from_dict(json.loads(json.dumps(to_dict(loaded.config)))) == loaded.config
    shown = show(loaded)
    assert "pools" not in shown
    assert shown["pools.student.path"].origin == f"{file}:6"
    assert shown["pools.student.top_p"].origin == "default"
    again = tmp_path / "again.yaml"
    again.write_text(format_yaml(shown))
    assert load([again], profiles=[]).config == loaded.config
    again.write_text(yaml.safe_dump(list_explicit_options(loaded)))
    assert load([again], profiles=[]).config == loaded.config


def test_a_config_json_without_pools_still_loads():
    stored = to_dict(load([], GIVEN, profiles=[]).config)
    del stored["pools"]
    assert from_dict(stored).pools == {}
    assert "pools: {}" in format_yaml(show(load([], GIVEN, profiles=[])))


def test_unknown_keys_of_a_stored_pool_are_refused():
    stored = to_dict(load([], [*GIVEN, "pools.a.path=/p"], profiles=[]).config)
    stored["pools"]["a"]["pth"] = "/p"
    with pytest.raises(
        ConfigError, match=r"unknown key pools.a.pth .config.json.: did you mean pools\.a\.path\?"
    ):
        from_dict(stored)


def test_options_of_a_pool_are_found_and_replaced_by_their_names():
    loaded = load([], [*GIVEN, "pools.a.top_p=0.5", "pools.a.max_new_tokens=1024"], profiles=[])
    config = loaded.config
    assert get_value(config, "pools.a.top_p") == 0.5
    assert get_value(config, "pools.b.top_p") is ABSENT
    assert is_default(config, "pools.a.max_new_tokens") and not is_default(config, "pools.a.top_p")
    assert list_given(config, loaded.explicit, "pools.") == ["pools.a.top_p"]
    changed = replace_value(config, ["pools", "a", "path"], "/q")
    assert (changed.pools["a"].path, changed.pools["a"].top_p, config.pools["a"].path) == ("/q", 0.5, "")


def test_the_name_of_a_variable_with_a_key_is_no_secret():
    loaded = load([], [*GIVEN, "pools.a.api_key_env=OPENAI_API_KEY", "pools.a.url=http://x"], profiles=[])
    assert redact(to_dict(loaded.config))["pools"]["a"]["api_key_env"] == "OPENAI_API_KEY"


def test_changes_of_pools_are_told_one_by_one():
    def between(before: list[str], after: list[str]) -> dict[str, bool]:
        old, new = (load([], [*GIVEN, *words], profiles=[]).config for words in (before, after))
        return {str(one): one.new_batches for one in list_changes(old, new)}

    one = ["pools.a.path=/p"]
    assert between(one, one) == {}
    assert between([], one) == {"pools.a: nothing -> {path: /p, ...}  (safe)": True}
    assert between(one, ["pools.b.path=/p"]) == {
        "pools.b: nothing -> {path: /p, ...}  (safe)": True,
        "pools.a: {path: /p, ...} -> nothing  (safe)": True,
    }
    assert between(one, ["pools.a.path=/q", "pools.a.max_requests=4"]) == {
        "pools.a.path: /p -> /q  (safe)": True,
        "pools.a.max_requests: 256 -> 4  (safe)": False,
    }


def test_help_schema_and_sections_know_pools_by_a_stand_in():
    assert {"pools", "teacher"} <= set(list_section_names())
    for topic in ("pools", "pools.NAME", "pools.NAME.path"):
        assert "--pools.NAME.path PATH" in format_help(topic)
    pools = make_schema("grpo")["$defs"]["GRPOConfig"]["properties"]["pools"]
    ((pattern, member),) = pools["patternProperties"].items()
    assert pattern == "^(?:[A-Za-z][A-Za-z0-9_-]{0,62})$" and pools["additionalProperties"] is False
    options = member["anyOf"][0]["properties"]
    assert options["max_new_tokens"]["anyOf"][0]["minimum"] == 1
    assert options["options"]["anyOf"][0]["additionalProperties"] is True  # numbers, true and null as well


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["actor.path=/m"], GRPOConfig),
        (["actor.path=/m", "teacher.max_probe_tokens=7"], TeacherConfig),
        (["actor.path=/m", "teacher={}"], TeacherConfig),
        (["actor.path=/m", "trainer=teacher"], TeacherConfig),
        (["model.path=/m"], SFTConfig),
    ],
)
def test_the_section_says_which_trainer_it_is(arguments, expected):
    config = load([], [*GIVEN[:3], *arguments], profiles=[]).config
    assert type(config) is expected
    assert from_dict(to_dict(config)) == config


def test_a_teacher_needs_a_section_actor_and_grpo_has_no_teacher():
    assert collect_refusals(*GIVEN[:3], "teacher.max_probe_tokens=7") == [
        "section actor is missing; it needs at least actor.path."
    ]
    (line,) = collect_refusals(*GIVEN, "trainer=grpo", "teacher.max_probe_tokens=7")
    assert line.startswith("unknown key teacher (") and line.endswith(
        "only a trial with trainer: teacher has it."
    )


def test_templates_have_defaults_that_name_their_variables():
    config, *_ = adapt(load([], [*GIVEN, "trainer=teacher"], profiles=[]).config, frozenset())
    templates = vars(config.teacher.templates)
    assert {name: [one for one in ("question", "approach", "teaching") if f"{{{one}}}" in text]
            for name, text in templates.items()} == {
        "diagnostic": ["question"],
        "adaptive": ["question", "approach"],
        "with_teaching": ["question", "teaching"],
        "baseline": ["question"],
    }  # fmt: skip


def test_the_model_of_a_pool_can_not_change_where_finished_groups_are_kept():
    old = load([], [*GIVEN, "pools.student.path=/p"], profiles=[]).config
    for words in (["pools.student.path=/q"], ["pools.student.url=http://h/v1", "pools.student.path=''"]):
        found = list_changes(old, load([], [*GIVEN, *words], profiles=[]).config)
        refuse_unsafe(found, "e/t")
        with pytest.raises(
            ConfigError, match=r"pools\.student\.path can't change from /p .* --replay keeps them"
        ):
            refuse_unsafe(found, "e/t", replay=True)
    found = list_changes(
        old, load([], [*GIVEN, "pools.student.path=/p", "pools.student.top_p=0.5"], profiles=[]).config
    )
    refuse_unsafe(found, "e/t", replay=True)
