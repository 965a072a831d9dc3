"""Property: an unknown key, wrong type or value out of range is refused with its dotted name, file and line."""

import random
import re
import string
import typing
from collections import defaultdict
from functools import cache

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpc_rl.config.compat.areal_names import AS_UNWRITTEN, AT_TOP, NAMES
from hpc_rl.config.compat.atlas import ALIASES as ATLAS
from hpc_rl.config.compat.other_names import ANSWERS
from hpc_rl.config.load.fields import find_section, is_mapping, list_alternatives, list_options
from hpc_rl.config.load.load import load
from hpc_rl.config.load.names import ALIASES
from hpc_rl.config.options.experiment import CONFIGS
from hpc_rl.config.options.limits import Grammar, Limits, Place
from hpc_rl.config.show import format_scalar
from hpc_rl.core.errors import ConfigError

BASE = "experiment_name: e\ntrial_name: t\ntrainer: {trainer}\n"
BASE += "train_dataset: {{path: /d}}\n{model}: {{path: /m}}\n"
BASE += "valid_dataset: {{path: /v}}\n{ref}"
REF = {"grpo": "ref: {path: /r}\ncritic: {path: /c}\n", "dpo": "ref: {path: /r}\n", "sft": "", "rw": ""}
REF["teacher"] = REF["grpo"]
MODEL = {"grpo": "actor", "teacher": "actor", "sft": "model", "rw": "model", "dpo": "model"}
KNOWN = {trainer: list_options(cls) for trainer, cls in CONFIGS.items()}
SECTIONS = {
    trainer: sorted(name for name, hint in known.items() if find_section(hint) and not is_mapping(hint))
    for trainer, known in KNOWN.items()
}
LEAVES = {
    trainer: sorted(name for name, hint in known.items() if not find_section(hint) and name != "trainer")
    for trainer, known in KNOWN.items()
}
OF_AREAL = {name.rpartition(".")[2] for name in (*NAMES, *AT_TOP)}
ANYTHING = [True, False, 0, 1, 7, -3, 1.5, "some text", "", [1, 2], ["a"], {"a": 1}, {"a": "b"}, None]
PROPERTY = settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def can_accept(hint, value) -> bool:
    """What the types alone say, worked out again: text takes numbers as they were written, true and false are
    only bool.
    """
    return any(_can_accept(kind, value) for kind in list_alternatives(hint))


def _can_accept(kind, value) -> bool:
    origin = typing.get_origin(kind)
    if kind is typing.Any:
        return True
    if origin is typing.Annotated:
        return _can_accept(typing.get_args(kind)[0], value)
    if origin is typing.Literal:
        return not isinstance(value, bool) and value in typing.get_args(kind)
    if origin is list:
        return isinstance(value, list) and all(_can_accept(typing.get_args(kind)[0], one) for one in value)
    if origin is dict:
        return isinstance(value, dict) and all(
            _can_accept(typing.get_args(kind)[1], one) for one in value.values()
        )
    if isinstance(value, bool) or kind is bool:
        return isinstance(value, bool) and kind is bool
    if kind is int:
        return isinstance(value, int | float) and value == int(value)
    return isinstance(value, {float: (int, float), str: (str, int, float), type(None): type(None)}[kind])


def list_outside(hint) -> list:
    """Values of the right type that the limits leave out."""
    found = []
    for kind in list_alternatives(hint):
        if typing.get_origin(kind) is typing.Literal:
            found += [one for one in ("no such choice", 99) if not can_accept(hint, one)]
        for extra in typing.get_args(kind)[1:] if typing.get_origin(kind) is typing.Annotated else ():
            if isinstance(extra, Limits):
                ends = [(extra.at_least, -1), (extra.at_most, 1), (extra.above, 0), (extra.below, 0)]
                found += [end + step for end, step in ends if end is not None]
            elif isinstance(extra, Grammar):
                found += ["24 hours", "1;2"]
            elif isinstance(extra, Place):
                found += ["/" + "x" * 300] if extra.or_script else ["/a\nb", "/" + "x" * 300]
    return found if type(None) not in list_alternatives(hint) else [one for one in found if one is not None]


def list_bounds(hint) -> list[str]:
    """Every choice and every bound of a type, as a refusal must name it."""
    found = []
    for kind in list_alternatives(hint):
        if typing.get_origin(kind) is typing.Literal:
            found += [str(one) or "empty" for one in typing.get_args(kind)]
        for extra in typing.get_args(kind)[1:] if typing.get_origin(kind) is typing.Annotated else ():
            if isinstance(extra, Limits):
                ends = (extra.at_least, extra.at_most, extra.above, extra.below)
                found += [f"{end:g}" for end in ends if end is not None]
    return found


NULLS_OF_AREAL = [(name, value) for name, (value, _) in AS_UNWRITTEN.items()]  # null as AReaL's files have it
BAD_TYPE = {
    t: [
        (n, v)
        for n in LEAVES[t]
        for v in ANYTHING
        if not can_accept(KNOWN[t][n], v) and (n, v) not in NULLS_OF_AREAL
    ]
    for t in CONFIGS
}
OUTSIDE = {t: [(n, v) for n in LEAVES[t] for v in list_outside(KNOWN[t][n])] for t in CONFIGS}


def write_nested(name: str, value, gap: int) -> tuple[str, int]:
    """A YAML file that says this one thing in block style after some lines of comment; and the line of the
    value's key.
    """
    lines = ["# a comment", ""][: 1 + gap % 2] * gap
    *sections, leaf = name.split(".")
    lines += [f"{'  ' * depth}{section}:" for depth, section in enumerate(sections)]
    lines.append(f"{'  ' * len(sections)}{leaf}: {format_scalar(value)}")
    return "\n".join(lines) + "\n", len(lines)


def collect_refusals(tmp_path, trainer: str, name: str, value, gap: int) -> tuple[list[str], str]:
    """The lines of the refusal, and the place that one of them must name."""
    (tmp_path / "base.yaml").write_text(BASE.format(trainer=trainer, model=MODEL[trainer], ref=REF[trainer]))
    text, line = write_nested(name, value, gap)
    (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load([tmp_path / "base.yaml", tmp_path / "bad.yaml"], profiles=[])
    return str(caught.value).splitlines(), f"{name} ({tmp_path}/bad.yaml:{line})"


@pytest.mark.parametrize("trainer", CONFIGS)
@PROPERTY
@given(data=st.data(), gap=st.integers(0, 5))
def test_an_unknown_key(trainer, data, gap, tmp_path):
    section = data.draw(st.sampled_from(["", *SECTIONS[trainer]]))
    leaf = data.draw(st.text(string.ascii_lowercase + "_", min_size=1, max_size=20))
    name = f"{section}.{leaf}" if section else leaf
    if name in KNOWN[trainer] or (not section and (leaf in ATLAS or leaf in ALIASES)):
        return
    if leaf in OF_AREAL:  # Hypothesis draws words of the product's code, too
        return
    said, place = collect_refusals(tmp_path, trainer, name, data.draw(st.sampled_from(ANYTHING)), gap)
    assert [line for line in said if line.startswith(f"unknown key {place}: ")], said


@cache
def make_slips(leaf: str) -> frozenset[str]:
    """The name with a letter left out, doubled, or in the place of the next one; its first one stays."""
    found = {leaf[:i] + leaf[i + 1 :] for i in range(1, len(leaf))} | {
        leaf[:i] + leaf[i - 1 :] for i in range(2, len(leaf))
    }
    return frozenset(
        found | {leaf[:i] + leaf[i + 1] + leaf[i] + leaf[i + 2 :] for i in range(1, len(leaf) - 1)}
    )


@pytest.mark.parametrize("trainer", CONFIGS)
def test_every_misspelt_option_is_answered_with_the_right_one(trainer, tmp_path):
    sections, lines = defaultdict(set), {}
    for name in KNOWN[trainer]:
        sections[name.rpartition(".")[0]].add(name.rpartition(".")[2])
    for name in (name for name in LEAVES[trainer] if len(name.rpartition(".")[2]) > 5 and "NAME" not in name):
        section, dot, leaf = name.rpartition(".")
        others = sections[section] - {leaf}
        wrong = random.choice(sorted(make_slips(leaf) - sections[section].union(*map(make_slips, others))))
        lines[f"{section}{dot}{wrong}"] = name
    (tmp_path / "bad.yaml").write_text("".join(f"{wrong}: 1\n" for wrong in lines))
    with pytest.raises(ConfigError) as caught:
        load([tmp_path / "bad.yaml"], [f"trainer={trainer}"], profiles=[])
    said = str(caught.value).splitlines()
    for number, (wrong, name) in enumerate(lines.items(), 1):
        expected = f"unknown key {wrong} ({tmp_path}/bad.yaml:{number}): did you mean {name}?"
        assert expected in said, [line for line in said if wrong in line]


FOREIGN = {  # names of other toolkits -> part of the answer; empty if hpc-rl has nothing similar
    "use_lora": "actor.use_lora",
    "eta": "",
    "actor.eta": "",
    "sp_size": "",
    "trainer_mode": "",
    "saver.freq": "",
    "actor.report": "",
    "rollout_n": "gconfig.n_samples",
    "max_new_tokens": "gconfig.max_new_tokens",
    "actor.max_tokens": "gconfig.max_tokens",
    "rollout.judge.temperature": "rollout.judge.temperatures",
    "lr_scheduler": "actor.optimizer.lr_scheduler_type",
    "notes": "stats_logger.wandb.notes",
    "max_seq_length": "train_dataset.max_length",
    "max_response_length": "gconfig.max_new_tokens",
    "epsilon_high": "actor.eps_clip_higher",
    "log_completions": "hpc-rl samples",
    "num_iterations": "actor.ppo_n_minibatches",
    "system_prompt": "messages",
    "evaluator.keep_completions": "evaluator.keep_samples",
    "steps_per_generation": "actor.ppo_n_minibatches",
    "torch_compile": "actor.enable_torch_compile",
    "use_liger_kernel": "",
    "data.train_batch_size": "train_dataset.batch_size",
    "actor_rollout_ref.rollout.n": "gconfig.n_samples",
    "algorithm.use_kl_in_reward": "actor.kl_ctl",
    "algorithm.zebra": "no option has a similar name",
    "nnodes": "n_nodes",
    "actor.beta1": "actor.optimizer.beta1",
    "ref.model": "",
    "rollout.temperature": "gconfig.temperature",
    "rollout.max_turns": "rollout.workflow_args.max_turns",
    "sglang.tp_size": "allocation_mode",
}


@pytest.mark.parametrize("name", FOREIGN)
def test_hints_do_not_mislead(name):
    with pytest.raises(ConfigError) as caught:
        load([], ["trainer=grpo", "actor.path=/m", f"{name}=1"], profiles=[])
    line = next(line for line in str(caught.value).splitlines() if line.startswith(f"unknown key {name} "))
    answer = line.partition("): ")[2]
    assert (FOREIGN[name] in answer) if FOREIGN[name] else "did you mean" not in answer, line


def test_answers_name_options_that_there_are():
    known = {name for trainer in CONFIGS for name in KNOWN[trainer]}
    for name, answer in ANSWERS.items():
        words = re.findall(r"[a-z_]+(?:\.[a-z0-9_]+)+", answer.replace("{model}", "actor"))
        assert set(words) <= known and name not in known, (name, answer)


@pytest.mark.parametrize("trainer", CONFIGS)
@PROPERTY
@given(data=st.data(), gap=st.integers(0, 5))
def test_a_wrong_type(trainer, data, gap, tmp_path):
    name, value = data.draw(st.sampled_from(BAD_TYPE[trainer]))
    said, place = collect_refusals(tmp_path, trainer, name, value, gap)
    assert said[0].startswith(f"{place}: ") and "can't be used; allowed: " in said[0], said


@pytest.mark.parametrize("trainer", CONFIGS)
@PROPERTY
@given(data=st.data(), gap=st.integers(0, 5))
def test_a_value_out_of_range(trainer, data, gap, tmp_path):
    name, value = data.draw(st.sampled_from(OUTSIDE[trainer]))
    said, place = collect_refusals(tmp_path, trainer, name, value, gap)
    assert said[0].startswith(f"{place}: ") and "can't be used; allowed: " in said[0], said
    answer = said[0].partition("allowed: ")[2]
    assert all(word in answer for word in list_bounds(KNOWN[trainer][name])), said


@pytest.mark.parametrize("trainer", CONFIGS)
@PROPERTY
@given(data=st.data())
def test_on_the_command_line_the_argument_is_named(trainer, data, tmp_path):
    numbers = [(name, value) for name, value in OUTSIDE[trainer] if isinstance(value, int | float)]
    name, value = data.draw(st.sampled_from(numbers))
    (tmp_path / "base.yaml").write_text(BASE.format(trainer=trainer, model=MODEL[trainer], ref=REF[trainer]))
    spelled = data.draw(
        st.sampled_from([[f"{name}={value}"], [f"--{name}={value}"], [f"--{name}", f"{value}"]])
    )
    with pytest.raises(ConfigError) as caught:
        load([tmp_path / "base.yaml"], spelled, profiles=[])
    assert str(caught.value).startswith(f"{name} (command line: {spelled[0].partition('=')[0]}): "), str(
        caught.value
    )


@pytest.mark.parametrize("trainer", CONFIGS)
def test_the_properties_draw_from_nearly_every_option(trainer):
    assert {name for name, _ in BAD_TYPE[trainer]} == set(LEAVES[trainer])
    assert len(OUTSIDE[trainer]) > 100
