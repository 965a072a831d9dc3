"""`config show`, `schema`, `reference`: every value has its origin, and shown configurations load unchanged."""

import dataclasses
import json
import typing
from collections.abc import Collection
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from hpc_rl.config.compat.areal_names import AT_TOP
from hpc_rl.config.compat.atlas import ALIASES
from hpc_rl.config.json_schema import make_schema
from hpc_rl.config.load.fields import find_section, is_mapping, list_alternatives, list_hints, list_options
from hpc_rl.config.load.load import load
from hpc_rl.config.load.source import escape_references
from hpc_rl.config.load.stored import REDACTED, is_secret, redact, to_dict
from hpc_rl.config.options.experiment import CONFIGS
from hpc_rl.config.options.limits import Grammar, Limits, Place
from hpc_rl.config.reference import make_pages
from hpc_rl.config.rules.check import check
from hpc_rl.config.rules.consistency import list_members
from hpc_rl.config.show import derive_values, diff, format_scalar, format_yaml, show
from hpc_rl.core.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]
BASE = ["experiment_name=e", "trial_name=t", "train_dataset.path=/d.jsonl"]
MODEL = {
    "grpo": "actor.path=/m",
    "teacher": "actor.path=/m",
    "sft": "model.path=/m",
    "rw": "model.path=/m",
    "dpo": "model.path=/m",
}


def draw_values(hint) -> st.SearchStrategy:
    """Values of an option's type, as JSON."""
    return st.one_of([_draw_kind(kind) for kind in list_alternatives(hint)])


def _draw_kind(kind) -> st.SearchStrategy:
    origin = typing.get_origin(kind)
    if origin is typing.Annotated:
        base, *extras = typing.get_args(kind)
        made = _draw_kind(base)
        for extra in extras:
            if isinstance(extra, Limits):
                made = _draw_number(base, extra)
            elif isinstance(extra, Grammar):
                made = st.from_regex(rf"\A(?:{extra.pattern})\Z").filter(
                    lambda text: text.isascii() and not text.endswith("\n")
                )
            elif isinstance(extra, Place):
                made = st.sampled_from(["", "/a b", "/x/y-1.2", "~/z", "rel/1e5"])
        return made
    if origin is typing.Literal:
        return st.sampled_from(typing.get_args(kind))
    if origin is list:
        return st.lists(_draw_kind(typing.get_args(kind)[0]), max_size=3)
    if origin is dict:
        return st.dictionaries(TEXT, TEXT, max_size=2)
    if kind is str:
        return TEXT
    return {bool: st.booleans(), int: st.integers(-5, 10**6), float: st.floats(-5, 5), type(None): st.none()}[
        kind
    ]


def _draw_number(base, limits: Limits) -> st.SearchStrategy:
    low = limits.above if limits.above is not None else limits.at_least
    high = limits.below if limits.below is not None else limits.at_most
    if base is int:
        return st.integers(int(low if low is not None else -9), int(high if high is not None else 10**6))
    return st.floats(
        low,
        high if high is not None else 1e9,
        exclude_min=limits.above is not None,
        exclude_max=limits.below is not None,
    )


ODD = [
    "24:00:00",
    "1e5",
    "0123",
    "no",
    "null",
    "true",
    "#x",
    "'",
    '"',
    "~",
    "1_0",
    "{a}",
    "&a",
    "*b",
    "!c",
    "%d",
    "@e",
    "=",
    "<<",
]
ODD += ["${a.b}", "\\${a}", "\\\\${", "${", "$", "echo ${X:-y}", "${oc.env:"]
ODD += ["a: b", "- y", "\u2028", "\ufeff"]
# Hypothesis also draws texts from the package's sources; ??? means that a value must be given
ANY = st.text(st.characters(exclude_categories=("Cs", "Cc")), max_size=12).filter(lambda text: text != "???")
TEXT = ANY | st.sampled_from(ODD)


@pytest.mark.parametrize("trainer", CONFIGS)
@settings(
    max_examples=3,  # of every option each
    phases=[Phase.generate],  # shrinking takes minutes
    deadline=None,
    suppress_health_check=[
        HealthCheck.function_scoped_fixture,
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
    ],
)
@given(data=st.data())
def test_every_option_at_a_random_value_survives_show(trainer, data, tmp_path):
    tree = {"trainer": trainer}
    for name, hint in list_options(CONFIGS[trainer]).items():
        if find_section(hint) is None and name != "trainer":
            tree[name] = (
                ""
                if is_secret(name) and str in list_alternatives(hint)
                else data.draw(draw_values(hint), label=name)
            )
    (tmp_path / "a.yaml").write_text(
        "".join(f"{name}: {format_scalar(escape_references(value))}\n" for name, value in tree.items())
    )
    loaded = load([tmp_path / "a.yaml"], profiles=[])
    shown = show(loaded)
    if any(REDACTED in str(item.value) for item in shown.values()):  # of an environment variable
        return
    (tmp_path / "b.yaml").write_text(format_yaml(shown))
    assert load([tmp_path / "b.yaml"], profiles=[]).config == loaded.config


SHIPPED = sorted(
    p.relative_to(ROOT).as_posix() for p in (ROOT / "configs").rglob("*.yaml") if p.parent.name != "cluster"
)


CHANGED = {
    "configs/grpo_sglang.yaml": ["ref.path=/m", "actor.use_decoupled_loss=true", "launcher.slurm.gres=gpu:8"]
}


@pytest.mark.parametrize(
    "name", [*SHIPPED, *sorted((ROOT / "tests/unit/config/areal").glob("*.yaml"))], ids=str
)
def test_a_shipped_configuration_survives_show_with_what_is_derived(name, tmp_path):
    loaded = check(load([ROOT / name], CHANGED.get(name, [])), files=False)
    shown = show(loaded, derive_values(loaded.config, "embedded:d1+fsdp:d1"))
    (tmp_path / "again.yaml").write_text(format_yaml(shown))
    again = check(load([tmp_path / "again.yaml"]), files=False)
    assert {name: item.value for name, item in show(again).items()} == {
        name: item.value for name, item in shown.items()
    }
    known = list_options(type(loaded.config), members=list_members(loaded.config))
    assert set(shown) <= set(known)


def test_each_value_says_where_it_came_from(tmp_path):
    (tmp_path / "a.yaml").write_text(
        "actor:\n  path: /m\n  ppo_n_minibatches: 1\ncluster: {n_gpus_per_node: 0}\n"
    )
    loaded = check(load([tmp_path / "a.yaml"], [*BASE, "--n_nodes=2"]), files=False)
    shown = show(loaded, derive_values(loaded.config, "embedded:d1+fsdp:d1"))
    assert shown["actor.path"].origin == f"{tmp_path}/a.yaml:2"
    assert shown["cluster.n_nodes"].origin == "command line: --n_nodes"
    assert shown["seed"].origin == "default"
    assert (shown["actor.dtype"].value, shown["actor.dtype"].origin) == (
        "float32",
        "adapted: the plan has no GPUs",
    )
    assert (shown["actor.group_size"].value, shown["actor.group_size"].origin) == (
        1,
        "derived: gconfig.n_samples",
    )
    assert (shown["allocation_mode"].value, shown["tokenizer_path"].value) == ("embedded:d1+fsdp:d1", "/m")
    assert shown["valid_dataset"].value is None


def test_secrets_in_environment_variables_are_not_shown_and_not_sent():
    for text in (
        "launcher.trainer_env_vars=A=1,WANDB_API_KEY=wk,HF_TOKEN=hf",
        "launcher.trainer_env_vars={A: '1', HF_TOKEN: hf}",
    ):
        loaded = load([], [*BASE, MODEL["grpo"], text])
        for shown in (show(loaded)["launcher.trainer_env_vars"].value, redact(to_dict(loaded.config))):
            assert (
                "wk" not in str(shown)
                and "hf" not in str(shown).replace("/hf", "")
                and REDACTED in str(shown)
            )


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        *(
            (name, True)
            for name in ("HF_TOKEN", "API_TOKENS", "GPG_PASSPHRASE", "BASIC_AUTH", "GH_PAT", "DB_PWD")
        ),
        *(
            (name, False)
            for name in ("VLLM_MAX_NUM_BATCHED_TOKENS", "TOKENIZERS_PARALLELISM", "PATH", "AUTHOR")
        ),
    ],
)
def test_names_of_variables_tell_secrets_from_counts(name, secret):
    assert (redact({name: "12"}, "launcher.env") == {name: REDACTED}) is secret


def test_secrets_are_not_shown():
    loaded = load([], [*BASE, MODEL["grpo"], "stats_logger.wandb.wandb_api_key=abc"])
    assert show(loaded)["stats_logger.wandb.wandb_api_key"].value == REDACTED
    assert "abc" not in format_yaml(show(loaded))


def test_diff_names_what_differs_in_values_only():
    a = show(load([], [*BASE, MODEL["grpo"], "seed=2"]))
    b = show(load([], [*BASE, MODEL["grpo"], "seed=3", "cluster.n_nodes=1", "valid_dataset.path=/v"]))
    found = diff(a, b)
    assert {"seed", "valid_dataset", "valid_dataset.path"} <= set(found)
    assert "cluster.n_nodes" not in found
    assert diff(a, a) == {}


def test_the_schema_describes_every_option():
    made = make_schema()
    assert made["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    json.dumps(made)
    for trainer, cls in CONFIGS.items():
        _draw_section(cls, made["$defs"][cls.__name__], {*ALIASES, *AT_TOP})
        assert make_schema(trainer)["$ref"] == f"#/$defs/{cls.__name__}"
    top = made["$defs"]["GRPOConfig"]["properties"]
    n_nodes = top["cluster"]["properties"]["n_nodes"]
    assert n_nodes["anyOf"][0] == {"type": "integer", "minimum": 1, "maximum": 10000}
    assert n_nodes["default"] == 1 and n_nodes["anyOf"][-1] == {"$ref": "#/$defs/reference"}
    assert top["recover"]["properties"]["mode"]["anyOf"][0]["enum"] == ["disabled", "auto", "fault", "resume"]
    assert top["valid_dataset"]["anyOf"][1] == {"type": "null"}
    assert "valid_dataset" not in made["$defs"]["GRPOConfig"]["required"]


def _draw_section(cls: type, made: dict, others: Collection[str] = ()) -> None:
    assert made["additionalProperties"] is False
    assert set(made["properties"]) - set(others) == {field.name for field in dataclasses.fields(cls)}
    assert all(len(item["description"]) > 7 for item in made["properties"].values())
    for name, hint in list_hints(cls).items():
        section = find_section(hint)
        if section:
            inner = made["properties"][name]
            if is_mapping(hint):
                (inner,) = inner["patternProperties"].values()
            _draw_section(section, inner["anyOf"][0] if "anyOf" in inner else inner)


def test_the_pages_of_the_reference_are_current():
    folder = ROOT / "docs" / "configuration"
    stored = {path.name: path.read_text() for path in folder.iterdir()}
    assert stored == make_pages(), (
        "run: rm -r docs/configuration; hpc-rl config reference --output docs/configuration"
    )


@pytest.mark.parametrize("preset", ["atlas", "atlas-teacher", "cpu"])
@pytest.mark.parametrize("trainer", CONFIGS)
def test_every_key_of_a_preset_is_one_that_a_trainer_has(preset, trainer):
    text = (ROOT / "hpc_rl" / "config" / "presets" / f"{preset}.yaml").read_text()
    known = {name for cls in CONFIGS.values() for name in list_options(cls)}
    assert {name for name in _list_keys(yaml.safe_load(text), "") if name not in known} == set()
    load([], [*BASE, MODEL[trainer], f"trainer={trainer}"], presets=[preset])


def _list_keys(tree: dict, prefix: str):
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _list_keys(value, f"{prefix}{key}.")
        else:
            yield prefix + key


def test_an_unknown_preset():
    with pytest.raises(
        ConfigError, match="preset 'cup' is not known; allowed: atlas, atlas-teacher, servers, cpu"
    ):
        load([], [*BASE, MODEL["grpo"]], presets=["cup"])
