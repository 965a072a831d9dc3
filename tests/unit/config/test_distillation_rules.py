"""Distillation: what submission refuses, and the reward that it needs none of."""

import json

import pytest

from hpc_rl.config.pool_view import find_teacher_pool
from hpc_rl.core.errors import ConfigError
from hpc_rl.core.refusal import Kind
from hpc_rl.examples.toy import make_model, make_tokenizer
from tests.unit.config.test_dataset_rules import load_checked, make_place

ROWS = [{"prompt": "1+2=", "solution": "1+2=3"}]


@pytest.fixture
def place(tmp_path):
    made = make_place(tmp_path)
    make_model(made / "teacher")
    return made


def given(place, *more, algorithm="opd"):
    pools = [f"pools.teacher.path={place / 'teacher'}"]
    pools += ["allocation_mode=embedded[rollout]:d1+embedded[teacher]:d1+fsdp:d1"]
    return [f"actor.algorithm={algorithm}", *pools, *more]


SECTION = "distillation.distill_loss_weight=1"


def test_a_teacher_alone_needs_no_reward(place):
    loaded = load_checked(place, ROWS, *given(place, SECTION))
    assert loaded.config.rollout.reward_fn == "none" and find_teacher_pool(loaded.config) == "teacher"
    with_answers = [{"prompt": "1+2=", "answer": "3"}]
    assert load_checked(place, with_answers, *given(place, SECTION)).config.rollout.reward_fn == "exact_match"
    with pytest.raises(ConfigError, match="compares with the column answer"):
        load_checked(place, ROWS, *given(place, "distillation.rl_loss_weight=1"))


def test_the_policy_is_its_own_teacher_only_by_name(place):
    shown = "distillation.demonstration_column=solution"
    words = given(place, shown, algorithm="opsd")
    assert find_teacher_pool(load_checked(place, ROWS, *words).config) == "teacher"
    alone = [shown, "actor.algorithm=opsd", "distillation.pool=rollout"]
    assert find_teacher_pool(load_checked(place, ROWS, *alone).config) is None
    with pytest.raises(ConfigError, match=r"distillation\.pool 'teacher' is not a pool"):
        load_checked(place, ROWS, *alone[:2])


@pytest.mark.parametrize(
    ("algorithm", "more", "option", "kind", "words"),
    [
        ("opd", [], "actor.algorithm", Kind.MISSING, "needs a section distillation"),
        ("opd", [SECTION, "distillation.pool=techer"], "distillation.pool", Kind.VALUE, "Did you mean teacher"),
        ("opd", [SECTION, "gconfig.temperature=0.7"], "gconfig.temperature", Kind.CONFLICT, "must be 1 with opd"),
        ("opd", ["distillation.demonstration_column=answer"], "distillation.demonstration_column", Kind.FILE,
         "needs the column answer in each row"),
        ("opd", ["distillation.demonstration_column=solution", "distillation.demonstration_template=x"],
         "distillation.demonstration_template", Kind.VALUE, "must contain {demonstration}"),
        ("opd", [SECTION, "pools.teacher.temperature=0.5"], "pools.teacher.temperature", Kind.NO_EFFECT,
         "not for texts"),
        ("opsd", [SECTION], "distillation.demonstration_column", Kind.MISSING, "the policy itself"),
        ("opd", ["distillation.pool=rollout"], "distillation.demonstration_column", Kind.MISSING,
         "the teacher of opd is the policy itself"),
        ("sft_distill", ["distillation.pool=rollout"], "distillation.pool", Kind.CONFLICT,
         "the trained model's own pool"),
        ("opd", ["distillation.top_k=21", "allocation_mode=embedded[rollout]:d1+vllm[teacher]:d1+fsdp:d1"],
         "distillation.top_k", Kind.UNSUPPORTED, "use at most 20, or sglang servers"),
        ("sft_distill", ["distillation.top_k=2"], "distillation.top_k", Kind.NO_EFFECT, "the same weight"),
        ("sft_distill", ["distillation.rl_loss_weight=1"], "distillation.rl_loss_weight", Kind.NO_EFFECT,
         "the same weight"),
        ("grpo", [SECTION, "rollout.reward_fn=format"], "distillation", Kind.NO_EFFECT,
         "grpo has no teacher; use opd, opsd, sft_distill"),
    ],
)  # fmt: skip
def test_submission_refuses(place, algorithm, more, option, kind, words):
    with pytest.raises(ConfigError) as caught:
        load_checked(place, ROWS, *given(place, *more, algorithm=algorithm))
    found = [one for one in caught.value.refusals if one.option == option]
    assert found and found[0].kind is kind and words in str(found[0]), str(caught.value)


def test_more_likely_tokens_than_the_vocabulary_has_are_refused(place):
    path = place / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"vocab_size": 20}))
    load_checked(place, ROWS, *given(place, "distillation.top_k=20"))
    with pytest.raises(ConfigError, match=r"top_k 21 is more than the 20 tokens of .*; use at most 20"):
        load_checked(place, ROWS, *given(place, "distillation.top_k=21"))


def test_a_teacher_with_other_tokens_is_refused(place):
    """One more token, or the same tokens with other ids."""
    for alphabet, words in (("0123456789+=;?", "'\\?' \\(id 16\\)"), ("+=;0123456789", r"'\+' \(id 3\)")):
        make_tokenizer(alphabet).save_pretrained(place / "teacher")
        with pytest.raises(
            ConfigError, match=rf"another tokenizer than the student's .*{words} is only in one"
        ):
            load_checked(place, ROWS, *given(place, SECTION))
    path = place / "teacher" / "tokenizer.json"
    make_tokenizer().save_pretrained(place / "teacher")
    path.write_text(json.dumps(json.loads(path.read_text()), indent=3))  # other bytes, the same tokens
    load_checked(place, ROWS, *given(place, SECTION))


def test_an_endpoint_scores_with_its_tokenizer_and_samples_without(place):
    url = ["pools.teacher.url=http://host:1/v1", "actor.algorithm=opd", SECTION]
    with pytest.raises(ConfigError, match=r"pools\.teacher\.tokenizer_path is missing"):
        load_checked(place, ROWS, *url)
    tokenizer = f"pools.teacher.tokenizer_path={place / 'teacher'}"
    load_checked(place, ROWS, *url, tokenizer)
    with pytest.raises(ConfigError, match=r"distillation\.top_k 3 can't be used with pools\.teacher\.url"):
        load_checked(place, ROWS, *url, tokenizer, "distillation.top_k=3")
    samples = [url[0], "actor.algorithm=sft_distill", "distillation.pool=teacher"]
    load_checked(place, ROWS, *samples)
    with pytest.raises(ConfigError, match=r"pools\.teacher\.tokenizer_path has no effect"):
        load_checked(place, ROWS, *samples, tokenizer)
    with pytest.raises(ConfigError, match=r"rollout\.workflow multi_turn can't be used with pools"):
        load_checked(place, ROWS, *samples, "rollout.workflow=multi_turn")
