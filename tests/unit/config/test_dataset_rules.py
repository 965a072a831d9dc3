"""Submission checks the first rows of datasets: other columns, wrong kinds of rows, and rewards that stay 0."""

import json
from pathlib import Path

import pytest
from command_line import NO_TENSORS

from hpc_rl.config.load.load import Loaded, load
from hpc_rl.config.row_shapes import NUM_FIRST, load_first_rows
from hpc_rl.config.rules.check import check
from hpc_rl.config.rules.file_rules import make_hub_hint
from hpc_rl.config.show import format_yaml, show
from hpc_rl.core.errors import ConfigError
from hpc_rl.core.refusal import Kind
from hpc_rl.datasets.encode import Prompts, encode_prompt, load_pairs, load_sequences
from hpc_rl.datasets.held_out import open_held_out_sets
from hpc_rl.datasets.tokenizer import Tokenizer
from hpc_rl.examples.toy import make_tokenizer
from hpc_rl.trials.first_rows import check_first_rows

GSM8K = {"question": "1+2=", "answer": "1+2 is <<1+2=3>>3.\n#### 3"}
PAIR = {"chosen": "1+2=3", "rejected": "1+2=4"}
CHAT = {"messages": [{"role": "user", "content": "1+2="}], "answer": "3"}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return make_place(tmp_path)


def make_place(tmp_path: Path) -> Path:
    """Make a model's directory with a tokenizer; its weights are never read."""
    model = tmp_path / "model"
    make_tokenizer().save_pretrained(model)
    (model / "config.json").write_text(json.dumps({"model_type": "qwen3", "max_position_embeddings": 64}))
    (model / "model.safetensors").write_bytes(NO_TENSORS)
    return tmp_path


def remove_template(place: Path) -> None:
    (place / "model" / "chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads((place / "model" / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (place / "model" / "tokenizer_config.json").write_text(json.dumps(settings))


def load_checked(place: Path, rows: list, *overrides: str, section: str = "actor") -> Loaded:
    (place / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["experiment_name=e", "trial_name=t", f"{section}.path={place / 'model'}"]
    words += ["gconfig.max_new_tokens=8", "gconfig.n_samples=4"] if section == "actor" else []
    words += [f"train_dataset.path={place / 'd.jsonl'}", f"cluster.fileroot={place}"]
    return check(load([], [*words, "cluster.n_gpus_per_node=0", *overrides]))


def collect_refusal(place: Path, *given, **more) -> str:
    with pytest.raises(ConfigError) as caught:
        load_checked(place, *given, **more)
    return str(caught.value)


@pytest.mark.parametrize(
    ("row", "columns", "reward"),
    [
        (GSM8K, {"messages": "question"}, "math_verify"),
        ({"problem": "1+2=", "answer": "3"}, {"messages": "problem"}, "math_verify"),
        (
            {"problem": "1+2=", "solution": r"\boxed{3}"},
            {"messages": "problem", "answer": "solution"},
            "math_verify",
        ),
        (
            {
                "prompt": [{"role": "user", "content": "1+2="}],
                "reward_model": {"style": "rule", "ground_truth": "3"},
            },
            {"answer": "reward_model.ground_truth"},
            "math_verify",
        ),
        ({"prompt": "1+2=", "solutions": [r"\boxed{3}"]}, {"answer": "solutions.0"}, "math_verify"),
        ({"prompt": "1+2=", "answer": "so\n#### 3"}, {}, "math_verify"),
        ({"question": "1+2=", "answer": "three"}, {"messages": "question"}, "exact_match"),
        ({"prompt": "1+2=", "answer": "3"}, {}, "exact_match"),
    ],
)
def test_known_data_sets_are_read_as_they_are(place, row, columns, reward):
    found = load_checked(place, [row])
    assert (found.config.train_dataset.columns, found.config.rollout.reward_fn) == (columns, reward)
    names = [
        note.split()[0]
        for note in map(str, found.notes)
        if note.startswith(("train_dataset.columns", "rollout.rew"))
    ]
    assert names == ["train_dataset.columns"] * bool(columns) + ["rollout.reward_fn"] * (
        reward == "math_verify"
    )
    prompts = Prompts(found.config.train_dataset, tokenizer := Tokenizer(place / "model"), seed=1)
    assert prompts.at(0).input_ids == tokenizer.encode("1+2=")
    assert "3" in prompts.at(0).columns["answer"] or "three" in prompts.at(0).columns["answer"]


def test_columns_that_were_found_are_shown_and_load_again(place):
    found = load_checked(place, [GSM8K])
    (place / "shown.yaml").write_text(format_yaml(show(found, {})))
    assert check(load([place / "shown.yaml"], [])).config == found.config


def test_what_is_given_is_left_as_it_is(place):
    found = load_checked(
        place, [GSM8K], "train_dataset.columns={prompt: question}", "rollout.reward_fn=contains"
    )
    assert found.config.train_dataset.columns == {"prompt": "question"}
    assert found.config.rollout.reward_fn == "contains"
    told = [note for note in map(str, found.notes) if "solution steps included" in note]
    assert len(told) == 1 and "math_verify" in told[0]
    notes = map(str, load_checked(place, [GSM8K]).notes)
    assert not [note for note in notes if "solution steps included" in note]
    held_out = load_checked(
        place, [GSM8K], f"valid_dataset.path={place / 'd.jsonl'}", "train_dataset.columns={prompt: question}"
    )
    assert held_out.config.valid_dataset.columns == {"prompt": "question"}
    remove_template(place)
    assert load_checked(place, [GSM8K]).config.train_dataset.columns == {"prompt": "question"}


def test_sft_learns_the_answers_of_gsm8k(place):
    dataset = load_checked(place, [GSM8K], section="model").config.train_dataset
    assert dataset.columns == {"prompt": "question", "completion": "answer"}
    (ids, mask), tokenizer = (
        load_sequences(dataset, Tokenizer(place / "model"))[0],
        Tokenizer(place / "model"),
    )
    assert ids.tolist() == [*tokenizer.encode(GSM8K["question"] + GSM8K["answer"]), tokenizer.eos_token_id]
    assert mask.tolist() == [False] * 4 + [True] * (len(ids) - 4)


SFT, RW = {"section": "model"}, ["train_dataset.type=rw"]


@pytest.mark.parametrize(
    ("rows", "overrides", "more", "words"),
    [
        (
            [{"text": "1+2=", "answer": "3"}],
            [],
            {},
            "row 1: a row needs a `prompt` (text) or `messages` (a list)",
        ),
        ([{"text": "1+2=", "answer": "3"}], [], {}, "train_dataset.columns {prompt: text}; "),
        ([CHAT, CHAT, {"answer": "3"}], [], {}, "row 3: a row needs a `prompt`"),
        ([GSM8K], ["train_dataset.columns={prompt: quesion}"], {}, "Did you mean question?"),
        ([{"prompt": "1", "reply": "2"}], [], SFT, "train_dataset.columns {completion: reply}; "),
        ([{"prompt": "1", "completion": "2"}], RW, SFT, "a row of type rw needs `chosen` and `rejected`"),
        (
            [{"prompt": "1", "chosen": [{"role": "user", "content": "2"}], "rejected": "3"}],
            RW,
            SFT,
            "a row of type rw needs `chosen` and `rejected`",
        ),
        (
            [
                {
                    "chosen": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}],
                    "rejected": "3",
                }
            ],
            RW,
            SFT,
            "row 1: `chosen` and `rejected` of a row must both be texts, or both be whole chats.",
        ),
        ([{"chosen": "2", "rejected": "2"}], RW, SFT, "are equal in the first 1 rows, so nothing"),
        (
            [{"chosen": "2", "rejected": "2"}],
            ["trainer=dpo"],
            SFT,
            "are equal in the first 1 rows, so nothing",
        ),
        ([{"prompt": "1", "solution": "2"}], [], {}, "the column answer, which is empty or missing"),
        ([{"prompt": "1", "answer": None}], ["rollout.reward_fn=final_answer"], {}, "answer or ground_truth"),
        (
            [{"messages": [{"role": "assistant", "content": "3"}]}],
            [],
            {},
            "its last message is the assistant's",
        ),
        ([{"prompt": "1", "answer": " 2"}], [], {}, "exact_match would be 0 for every row"),
        ([CHAT, "no object"], [], {}, "line 2 must be a JSON object"),
        ([{"prompt": "1", "answer": ["2"]}], [], {}, "exact_match would be 0 for every row"),
        (
            [{"prompt": "1", "response_chosen": "2", "response_rejected": "3"}],
            RW,
            SFT,
            "columns {chosen: response_chosen, rejected: response_rejected}",
        ),
        (
            [{"instruction": "1", "input": "", "output": "2"}],
            [],
            SFT,
            "{prompt: instruction, completion: output}",
        ),
        (
            [{"messages": [{"role": "user", "content": [{"type": "image"}]}]}],
            [],
            {},
            "images and sound can't be",
        ),
        (
            [{"prompt": "1", "nums": [1]}],
            ["rollout.reward_fn=countdown"],
            {},
            "countdown needs the column target in each row",
        ),
        ([{"prompt": "1"}], ["rollout.reward_fn=code_tests"], {}, "code_tests needs the column tests"),
        (
            [{"messages": [{"role": "system", "content": "1"}], "answer": "3"}],
            ["trainer=teacher", "pools.student.url=http://h/v1", "pools.student.model=m"],
            {},
            "a chat needs a message of role user",
        ),
    ],
)
def test_rows_that_can_teach_nothing_are_refused(place, rows, overrides, more, words):
    assert words in collect_refusal(place, rows, *overrides, **more)


def test_a_row_that_is_nested_too_deeply_is_refused(place):
    (place / "deep.jsonl").write_text('{"prompt": "1", "answer": ' + "[" * 100_000 + "\n")
    with pytest.raises(ConfigError, match="line 1 is n"):
        load_first_rows(place / "deep.jsonl")


def test_chats_with_their_answers_are_read_as_trl_has_them(place):
    user, answer = {"role": "user", "content": "1+2="}, {"role": "assistant", "content": "3"}
    tokenizer = Tokenizer(place / "model")
    prompt = encode_prompt(tokenizer, {"messages": [user]})
    made = [*tokenizer.encode("3", add_special_tokens=False), tokenizer.eos_token_id]
    for row in (
        {"messages": [user, answer]},
        {"messages": [user], "completion": "3"},
        {"prompt": [user], "completion": [answer]},
    ):
        dataset = load_checked(place, [row], section="model").config.train_dataset
        ((ids, mask),) = load_sequences(dataset, tokenizer)
        assert (ids.tolist(), mask.tolist()) == ([*prompt, *made], [False] * len(prompt) + [True] * len(made))
    for row in (
        {"prompt": [user], "chosen": [answer], "rejected": [answer]},
        {"prompt": [user], "chosen": "3", "rejected": "3"},
    ):
        found = load_checked(place, [row, PAIR], "train_dataset.type=rw", section="model")
        assert any("are equal in 1 of the first 2 rows" in note for note in map(str, found.notes))
        (chosen, rejected), _ = load_pairs(found.config.train_dataset, tokenizer)
        assert chosen.tolist() == rejected.tolist() == [*prompt, *made]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{"prompt": "1" * 80, "answer": "1"}], "the first 1 rows have more than 63 tokens"),
        ([{"prompt": "", "answer": "1"}] * 2, "the first 2 rows have no token"),
        ([{"prompt": "1", "answer": "1"}, {"prompt": "\ud800", "answer": "1"}], "row 2 can't be encoded"),
    ],
)
def test_prompts_that_the_job_can_not_use_are_refused_before_it(place, rows, words):
    [refusal] = check_first_rows(load_checked(place, rows).config)
    assert (refusal.option, refusal.kind, refusal.is_note) == ("train_dataset.path", Kind.FILE, False)
    assert words in str(refusal)


def test_some_prompts_that_the_job_can_not_use_are_a_note(place):
    rows = [{"prompt": "1" * length, "answer": "1"} for length in (3, 80, 0)]
    empty, long = check_first_rows(load_checked(place, rows).config)
    assert empty.is_note and "1 of the first 3 rows of train_dataset have no token" in str(empty)
    assert long.is_note and "1 of the first 3 rows of train_dataset have more than 63 tokens" in str(long)


@pytest.mark.parametrize(
    ("kind", "row"),
    [("sft", {"prompt": "1+2=", "completion": "3"}), ("rw", PAIR), ("dpo", PAIR)],
)
def test_rows_of_supervised_trials_that_are_all_too_long_are_refused_for_each_dataset(place, kind, row):
    (place / "h.jsonl").write_text(json.dumps(row) + "\n")
    options = [f"trainer={kind}", "train_dataset.max_length=5", f"valid_dataset.path={place / 'h.jsonl'}"]
    config = load_checked(place, [row] * 2, *options, "valid_dataset.max_length=5", section="model").config
    first, second = check_first_rows(config)
    assert (first.option, second.option) == ("train_dataset.path", "valid_dataset.path")
    assert "the first 2 rows have more than 5 tokens" in str(first) and not first.is_note
    assert "the first 1 rows have more than 5 tokens" in str(second) and not second.is_note
    short = dict(zip(row, "12", strict=True))
    (note,) = check_first_rows(load_checked(place, [row, short], *options, section="model").config)
    assert note.is_note and "1 of the first 2 rows of train_dataset have more than 5 tokens" in str(note)


def test_held_out_rows_are_looked_at_too(place):
    (place / "h.jsonl").write_text('{"prompt": "1", "answer": "1"}\n')
    options = [f"valid_dataset.path={place / 'h.jsonl'}", "evaluator.sets_column=topic"]
    config = load_checked(place, [{"prompt": "1", "answer": "1"}], *options).config
    [refusal] = check_first_rows(config)
    assert refusal.option == "evaluator.sets_column" and "is not a column of the first 1 rows" in str(refusal)
    (place / "h.jsonl").write_text('{"text": "1"}\n')
    said = collect_refusal(place, [CHAT], f"valid_dataset.path={place / 'h.jsonl'}")
    assert said.startswith("valid_dataset.path") and "valid_dataset.columns {prompt: text}" in said


def test_an_answer_of_0_is_one(place):
    assert load_checked(place, [{"prompt": "1", "answer": 0}])


def test_only_the_first_rows_are_read(place):
    assert load_checked(place, [CHAT] * NUM_FIRST + [{}])


def test_a_chat_needs_a_template(place):
    remove_template(place)
    assert "has no chat template: add chat_template.jinja" in collect_refusal(place, [CHAT])


def test_a_workflow_of_ones_own_may_score_without_an_answer(place):
    assert load_checked(place, [{"prompt": "1"}], "rollout.workflow=mine:run")


def test_first_rows_of_every_kind_of_dataset(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    pyarrow.parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"prompt": [str(i) for i in range(100)]})
    pyarrow.parquet.write_table(table, tmp_path / "d.parquet")
    with (
        pyarrow.OSFile(str(tmp_path / "data-0.arrow"), "wb") as file,
        pyarrow.ipc.new_stream(file, table.schema) as to,
    ):
        to.write_table(table)
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-0.arrow"}]}))
    wanted = [{"prompt": str(i)} for i in range(NUM_FIRST)]
    assert load_first_rows(tmp_path / "d.parquet") == load_first_rows(tmp_path) == wanted
    assert load_first_rows(tmp_path / "absent.jsonl") == []
    (tmp_path / "d.json").write_text('{"prompt": "0"}')
    assert load_first_rows(tmp_path / "d.json") == wanted[:1]
    (tmp_path / "damaged.parquet").write_text("PAR1")
    with pytest.raises(ConfigError, match=r"damaged\.parquet is damaged"):
        load_first_rows(tmp_path / "damaged.parquet")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (
            {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "vision_config": {}},
            "(Qwen2_5_VLForConditionalGeneration) can't be trained: its config.json has vision_config",
        ),
        (
            {"model_type": "t5", "is_encoder_decoder": True},
            "(t5) can't be trained: it is not a language model",
        ),
        ({"architectures": ["BertForMaskedLM"]}, "(BertForMaskedLM) can't be trained"),
        ({"architectures": ["Qwen3ForSequenceClassification"]}, "scores texts and generates none"),
        ({"model_type": "qwen33"}, "does not know model_type 'qwen33'. Install a newer one"),
    ],
)
def test_models_that_no_engine_builds_are_refused(place, more, words):
    path = place / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | more))
    said = collect_refusal(place, [CHAT], f"ref.path={place / 'model'}")
    assert [line.split()[0] for line in said.splitlines()] == ["actor.path", "ref.path"]
    assert words in said


def test_a_name_of_the_hub_is_found_in_its_cache(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    environ = {"HF_HOME": str(tmp_path / "home")}
    wanted = "hf download openai/gsm8k --repo-type dataset --local-dir DIR"
    assert wanted in make_hub_hint(tmp_path / "openai/gsm8k", "datasets", "train", environ)
    cached = tmp_path / "home/hub/datasets--openai--gsm8k/snapshots/abc"
    for name in ("main/test-0.parquet", "main/train-0.parquet", "socratic/train-0.parquet"):
        (cached / name).parent.mkdir(parents=True, exist_ok=True)
        (cached / name).touch()
    assert f"in {cached}/main/train-0.parquet: use" in make_hub_hint(
        tmp_path / "openai/gsm8k", "datasets", "train", environ
    )
    assert f"in {cached}/main/test-0.parquet: use" in make_hub_hint(
        tmp_path / "openai/gsm8k", "datasets", "test", environ
    )
    models = tmp_path / "home/hub/models--Qwen--Qwen3"
    for commit in ("aaa", "bbb"):
        (models / "snapshots" / commit).mkdir(parents=True)
        (models / "snapshots" / commit / "config.json").touch()
    (models / "refs").mkdir()
    (models / "refs" / "main").write_text("bbb")
    assert make_hub_hint(tmp_path / "data/rows.jsonl", "datasets", "train", environ) == ""
    assert f"in {models}/snapshots/bbb: use that path" in make_hub_hint(
        tmp_path / "Qwen/Qwen3", environ=environ
    )
    assert (
        make_hub_hint(Path("/elsewhere/Qwen"), environ=environ)
        == make_hub_hint(tmp_path / "a/b/c", environ=environ)
        == ""
    )


def test_a_set_with_the_name_of_held_out_rows_is_refused(place):
    rows = [{"prompt": "1", "answer": "1", "topic": topic} for topic in ("easy", "hard")]
    (place / "h.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = [f"valid_dataset.path={place / 'h.jsonl'}", "evaluator.sets_column=topic"]
    options += [f"evaluator.sets.{name}.path={place / 'h.jsonl'}" for name in ("hard", "other")]
    config = load_checked(place, [{"prompt": "1", "answer": "1"}], *options).config
    [refusal] = check_first_rows(config)
    assert refusal.option == "evaluator.sets.hard" and "with 'hard' in column 'topic'" in str(refusal)
    (place / "h.jsonl").write_text("".join(json.dumps(rows[0]) + "\n" for _ in range(1000)))
    assert not [*check_first_rows(config)]
    with (place / "h.jsonl").open("a") as file:
        file.write(json.dumps(rows[1]) + "\n")
    assert not [*check_first_rows(config)], "only the first rows are read at submission"
    with pytest.raises(ConfigError, match="rename the set"):
        open_held_out_sets(config, Tokenizer(config.actor.path))


@pytest.mark.parametrize(
    ("options", "refused"),
    [
        (["purpose=train"], ["gconfig.max_new_tokens"]),
        (["purpose=serve"], []),
        (["purpose=generate"], ["gconfig.max_new_tokens"]),
        (["purpose=evaluate"], ["gconfig.max_new_tokens"]),
        (["purpose=evaluate", "eval_gconfig.greedy=true"], ["eval_gconfig.max_new_tokens"]),
        (["purpose=evaluate", "eval_gconfig.max_new_tokens=8"], []),
        (["purpose=generate", "gconfig.max_new_tokens=8", "keep_best_samples=5"], ["keep_best_samples"]),
        (["purpose=generate", "gconfig.max_new_tokens=8", "keep_best_samples=4"], []),
    ],
)
def test_only_the_sampling_of_the_purpose_must_fit_the_model(place, options, refused):
    rows = [{"prompt": "1", "answer": "1"}]
    held_out = [f"valid_dataset.path={place / 'd.jsonl'}"] if "generate" not in options[0] else []
    words = ["gconfig.max_new_tokens=16384", "allocation_mode=", *held_out, *options]
    if not refused:
        load_checked(place, rows, *words)
        return
    with pytest.raises(ConfigError) as caught:
        load_checked(place, rows, *words)
    assert [one.option for one in caught.value.refusals] == refused
