"""Datasets: files, order, tokens."""

import itertools
import json
import subprocess
import sys
import threading

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from hpc_rl.config.options.dataset import DatasetConfig
from hpc_rl.core.errors import ConfigError
from hpc_rl.datasets.encode import (
    Prompts,
    encode_pair,
    encode_preference,
    encode_prompt,
    encode_sequence,
    load_encoded,
    load_pairs,
    load_preferences,
    load_sequences,
    save_encoded,
)
from hpc_rl.datasets.order import locate, make_sample_seed, permute_rows
from hpc_rl.datasets.rows import Rows, count_rows, load_rows
from hpc_rl.datasets.tokenizer import Tokenizer


@pytest.fixture
def model(tmp_path):
    """A character tokenizer with a chat template."""
    characters = [chr(code) for code in range(32, 127)]
    vocab = {character: i for i, character in enumerate(characters)} | {"<eos>": 95, "<bos>": 96}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token=" "))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    made.decoder = tokenizers.decoders.Fuse()
    made.add_special_tokens(["<eos>", "<bos>"])
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", 96)]
    )
    folder = tmp_path / "model"
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    template = "{{ bos_token }}{% for m in messages %}\n<{{ m.role }}>{{ m.content }}{% endfor %}"
    template += "{% if add_generation_prompt %}>{% endif %}"
    content = {"eos_token": {"content": "<eos>"}, "bos_token": "<bos>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(content))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [95, 7]}))
    return folder


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_rows_are_counted_up_to_a_number(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"prompt": str(number)} for number in range(5)])
    path.write_text(path.read_text() + "\n\n")
    assert (count_rows(path, 3), count_rows(path, 100)) == (3, 5)
    assert count_rows(tmp_path / "none.jsonl", 3) is None and count_rows(tmp_path, 3) is None


def test_a_tokenizer_names_text_without_a_token(model):
    tokenizer = Tokenizer(model)
    assert tokenizer.unknown("1+1 ist 2") == []
    assert tokenizer.unknown("é = ü") == ["é", "ü"]


def test_rows_of_a_jsonl_file(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"prompt": "1+1=", "answer": 2}, {"prompt": "é"}])
    assert load_rows(path) == [{"prompt": "1+1=", "answer": 2}, {"prompt": "é"}]


def test_the_fingerprint_tells_other_rows_not_another_place_or_blank_lines(tmp_path):
    rows = [{"prompt": "1+1=", "answer": 2}, {"prompt": "é"}, {"prompt": "x"}]
    first = load_rows(write(tmp_path / "a.jsonl", rows)).fingerprint
    spaced = tmp_path / "b.jsonl"
    spaced.write_text("\n" + (tmp_path / "a.jsonl").read_text().replace("\n", "\r\n\n"))
    assert load_rows(spaced).fingerprint == first and first["rows"] == 3
    changed = [rows[:2], rows[::-1], [*rows[:2], {"prompt": "y"}]]
    others = [load_rows(write(tmp_path / "c.jsonl", some)).fingerprint for some in changed]
    assert len({first["xxh3"], *(one["xxh3"] for one in others)}) == 4


def write_parquet(path, prompts: list[str]):
    """Here, not at the top: every process that collects tests would pay for the import."""
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"prompt": prompts}), path)
    return path


def test_the_fingerprint_of_a_table_is_of_its_rows_too(tmp_path):
    prints = []
    for name, prompts in (("a", ["x", "y"]), ("b", ["x", "y"]), ("c", ["x", "z"])):
        prints.append(load_rows(write_parquet(tmp_path / f"{name}.parquet", prompts)).fingerprint)
    assert prints[0] == prints[1] != prints[2]


def test_a_saved_dataset_gives_its_rows(tmp_path):
    import datasets

    rows = [{"prompt": "1+1=", "answer": 2, "extra": {"a": [1]}}]
    rows += [{"prompt": "é", "answer": 3, "extra": {"a": []}}]
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    assert load_rows(tmp_path / "saved") == rows
    datasets.DatasetDict({"train": datasets.Dataset.from_list(rows)}).save_to_disk(tmp_path / "split")
    with pytest.raises(ConfigError, match="has the splits train: give the path of one of them"):
        load_rows(tmp_path / "split")
    assert load_rows(tmp_path / "split" / "train") == rows


@pytest.mark.parametrize("kept_bytes", [0, 40])
def test_damaged_tables_are_refused_in_words(tmp_path, kept_bytes):
    import datasets

    write_parquet(tmp_path / "a.parquet", ["x", "y"])
    datasets.Dataset.from_list([{"prompt": "x"}]).save_to_disk(tmp_path / "saved")
    for path in (tmp_path / "a.parquet", *(tmp_path / "saved").glob("*.arrow")):
        path.write_bytes(path.read_bytes()[:kept_bytes])
    with pytest.raises(ConfigError, match=r"a\.parquet is damaged, or not a parquet file"):
        load_rows(tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match=r"or not written by Dataset\.save_to_disk"):
        load_rows(tmp_path / "saved")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("gone.jsonl", None, "does not exist"),
        ("a.csv", "x", "unknown format '.csv'"),
        ("a.jsonl", "", "has no rows"),
        ("a.jsonl", '{"a": 1}\n{"a"', "line 2 is not valid JSON"),
        ("a.jsonl", "[1]\n", "line 1 must be a JSON object"),
        ("a.jsonl", '{"a": "\xff"}\n', "line 1 is not valid JSON: 'utf-8' codec"),
    ],
)
def test_what_can_not_be_read_is_refused_in_words(tmp_path, name, content, words):
    if content is not None:
        (tmp_path / name).write_text(content, encoding="latin-1")
    with pytest.raises(ConfigError, match=words):
        load_rows(tmp_path / name)


@given(st.integers(0, 2**40), st.integers(0, 1000), st.integers(1, 300))
def test_an_epoch_visits_every_row_once(seed, epoch, num_rows):
    order = permute_rows(seed, epoch, num_rows)
    assert sorted(order) == list(range(num_rows))
    index = epoch * num_rows + num_rows // 2
    assert locate(index, seed, num_rows) == (epoch, order[num_rows // 2])
    assert locate(index, seed, num_rows, shuffle=False) == (epoch, num_rows // 2)


def test_orders_differ_between_epochs_and_seeds_and_never_change():
    # frozen: a recovered trial goes on in this order
    assert permute_rows(1, 0, 10).tolist() == [0, 5, 4, 3, 6, 8, 2, 7, 1, 9]
    assert len({tuple(permute_rows(seed, epoch, 50)) for seed in range(3) for epoch in range(3)}) == 9
    places = itertools.product((0, 1, "evaluation"), range(9), range(9))
    seeds = [make_sample_seed(1, *place) for place in places]
    assert len(set(seeds)) == len(seeds) and all(0 <= seed < 2**63 for seed in seeds)
    assert make_sample_seed(1, 0, 3, 2) == 6671139356718540785


def test_tokens_of_prompts_chats_and_sequences(model):
    tokenizer = Tokenizer(model)
    assert (tokenizer.eos_token_id, tokenizer.eos_token_ids) == (95, [95, 7])
    assert encode_prompt(tokenizer, {"prompt": "1+1="}) == [96, 17, 11, 17, 29]
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    assert tokenizer.decode(encode_prompt(tokenizer, chat), skip_special_tokens=False) == "<bos><user>hi>"
    assert encode_prompt(tokenizer, chat).count(96) == 1
    ids, mask = encode_sequence(tokenizer, {"prompt": "1+1=", "completion": "2"})
    assert ids.tolist() == [96, 17, 11, 17, 29, 18, 95] and ids.dtype == np.int32
    assert mask.tolist() == [False] * 5 + [True] * 2
    assert tokenizer.decode([18, 95]) == "2"


def test_tokens_of_pairs(model, tmp_path):
    tokenizer = Tokenizer(model)
    completions = {"prompt": "1+1=", "chosen": "2", "rejected": "3"}
    assert [ids.tolist() for ids in encode_pair(tokenizer, completions)] == [
        [96, 17, 11, 17, 29, x, 95] for x in (18, 19)
    ]
    texts = {"chosen": "12", "rejected": "1"}
    assert [ids.tolist() for ids in encode_pair(tokenizer, texts)] == [[96, 17, 18, 95], [96, 17, 95]]
    chats = {"chosen": [{"role": "user", "content": "a"}], "rejected": [{"role": "user", "content": "b"}]}
    shown = [tokenizer.decode(ids, skip_special_tokens=False) for ids in encode_pair(tokenizer, chats)]
    assert shown == ["<bos><user>a<eos>", "<bos><user>b<eos>"]
    asked = {"role": "user", "content": "1+1="}
    said = {name: {"role": "assistant", "content": completions[name]} for name in ("chosen", "rejected")}
    whole = {name: [asked, reply] for name, reply in said.items()}
    apart = {"messages": [asked], "chosen": "2", "rejected": "3"}
    for one, other in zip(encode_pair(tokenizer, whole), encode_pair(tokenizer, apart), strict=True):
        assert one.tolist() == other.tolist()
    words = r"a row of type rw needs `chosen` and `rejected`.*this one has 'prompt', 'chosen'"
    with pytest.raises(ConfigError, match=words):
        encode_pair(tokenizer, {"prompt": "1", "chosen": "2"})
    rows = write(tmp_path / "pairs.jsonl", [completions, texts])
    assert len(load_pairs(DatasetConfig(path=str(rows), max_length=4), tokenizer)) == 1
    with pytest.raises(ConfigError, match="every pair is longer than max_length = 3 tokens for each text"):
        load_pairs(DatasetConfig(path=str(rows), max_length=3), tokenizer)


def test_preferences_leave_the_prompt_out_of_the_loss(model, tmp_path):
    tokenizer = Tokenizer(model)
    completions = {"prompt": "1+1=", "chosen": "2", "rejected": "34"}
    *ids, chosen, rejected = encode_preference(tokenizer, completions)
    assert [one.tolist() for one in ids] == [[96, 17, 11, 17, 29, 18, 95], [96, 17, 11, 17, 29, 19, 20, 95]]
    assert chosen.tolist() == [False] * 5 + [True] * 2 and rejected.tolist() == [False] * 5 + [True] * 3
    # without a prompt, the loss begins where the texts differ
    *_, chosen, rejected = encode_preference(tokenizer, {"chosen": "12", "rejected": "1"})
    assert (chosen.tolist(), rejected.tolist()) == ([False, False, True, True], [False, False, True])
    *_, chosen, rejected = encode_preference(tokenizer, {"chosen": "12", "rejected": "12"})
    assert not chosen.any() and not rejected.any()
    with pytest.raises(ConfigError, match="a row of type dpo needs `chosen` and `rejected`"):
        encode_preference(tokenizer, {"prompt": "1", "chosen": "2"})
    path = write(tmp_path / "pairs.jsonl", [completions, {"chosen": "12", "rejected": "1"}])
    rows = load_preferences(DatasetConfig(path=str(path), max_length=8, type="dpo"), tokenizer)
    save_encoded(tmp_path / "rows.npz", rows)
    again = load_encoded(tmp_path / "rows.npz")
    assert [[one.tolist() for one in row] for row in again] == [[one.tolist() for one in row] for row in rows]
    assert len(load_preferences(DatasetConfig(path=str(path), max_length=7), tokenizer)) == 1


def test_templates_run_in_a_sandbox(model):
    hostile = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    (model / "chat_template.jinja").write_text(hostile)
    with pytest.raises(ConfigError, match="chat template"):
        Tokenizer(model).chat([{"role": "user", "content": "x"}])
    (model / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ConfigError, match="roles must alternate"):
        Tokenizer(model).chat([])


def test_a_missing_template_is_said_once(model):
    (model / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ConfigError) as caught:
        Tokenizer(model).chat([{"role": "user", "content": "x"}])
    needed = "rows with `messages` and chat requests need one: add chat_template.jinja."
    assert str(caught.value) == f"tokenizer {model} has no chat template; {needed}"


def test_rows_and_folders_of_the_wrong_kind_are_refused(model, tmp_path):
    tokenizer = Tokenizer(model)
    with pytest.raises(ConfigError, match="'question'"):
        encode_prompt(tokenizer, {"question": "?"})
    with pytest.raises(ConfigError, match="completion"):
        encode_sequence(tokenizer, {"prompt": "x"})
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize("limits", [{}, {"max_length": 9}, {"max_length": 9, "num_workers": 2}])
@pytest.mark.parametrize(
    ("row", "words"),
    [
        (
            {"prompt": None},
            r"needs a `prompt` \(text\) or `messages` \(a list\); this one has 'prompt' \(null\)",
        ),
        ({"messages": [None]}, "messages of a row must be objects"),
    ],
)
def test_every_row_is_looked_at_before_the_first_prompt(model, tmp_path, limits, row, words):
    rows = write(tmp_path / "a.jsonl", [{"prompt": "x"}, {"prompt": "y"}, row])
    with pytest.raises(ConfigError, match=rf"dataset .*a\.jsonl row 3: .*{words}"):
        Prompts(DatasetConfig(path=str(rows), **limits), Tokenizer(model), seed=1)


def test_a_row_that_can_not_be_encoded_is_named(model, tmp_path):
    rows = write(tmp_path / "a.jsonl", [{"prompt": "x", "completion": "y"}, {"prompt": "x"}])
    with pytest.raises(ConfigError, match=r"a\.jsonl row 2: an sft row needs a `completion`"):
        load_sequences(DatasetConfig(path=str(rows)), Tokenizer(model))
    (model / "chat_template.jinja").write_text("{% if messages[1:] %}{{ raise_exception('no') }}{% endif %}x")
    said = {"role": "user", "content": "?"}
    rows = write(tmp_path / "a.jsonl", [{"messages": [said]}, {"messages": [said, said]}])
    prompts = Prompts(DatasetConfig(path=str(rows)), Tokenizer(model), seed=1)
    with pytest.raises(
        ConfigError, match=r"a\.jsonl row 2: the chat template of .* refuses the messages: no"
    ):
        prompts.in_file_order(1)


def test_long_rows_are_left_out_and_keep_their_place_in_the_file(model, tmp_path):
    rows = [{"prompt": "x" * size, "completion": "y"} for size in (1, 9, 2, 9, 3)]
    dataset = DatasetConfig(path=str(write(tmp_path / "a.jsonl", rows)), max_length=5)
    prompts = Prompts(dataset, Tokenizer(model), seed=1)
    assert len(prompts) == 3
    assert sorted(prompts.at(index).row for index in range(3)) == [0, 2, 4]
    assert prompts.at(4).epoch == 1
    assert [prompts.in_file_order(position).row for position in range(3)] == [0, 2, 4]
    # with completion and end, 3 + 1 + 1 + 1 is too long
    assert len(load_sequences(dataset, Tokenizer(model))) == 2
    with pytest.raises(ConfigError, match="max_length = 1"):
        Prompts(DatasetConfig(path=dataset.path, max_length=1), Tokenizer(model), seed=1)


def test_long_prompts_can_keep_their_last_tokens(model, tmp_path):
    path = write(tmp_path / "a.jsonl", [{"prompt": "abcdefgh"}, {"prompt": "ij"}])
    whole, cut = (
        Prompts(DatasetConfig(path=str(path), **limit), Tokenizer(model), seed=1)
        for limit in ({}, {"max_length": 5, "too_long": "truncate_left"})
    )
    assert len(whole) == len(cut) == 2
    assert len(cut.in_file_order(0).input_ids) == 5 < len(whole.in_file_order(0).input_ids)
    for row in (0, 1):
        assert cut.in_file_order(row).input_ids == whole.in_file_order(row).input_ids[-5:]


def test_no_torch_in_datasets_and_rollout():
    code = "import sys, hpc_rl.datasets.encode, hpc_rl.roles.rollout, hpc_rl.roles.rollout_worker; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"


@pytest.mark.parametrize("limit", [{}, {"max_length": 5}])
def test_threads_that_tokenize_change_nothing_but_the_time(model, tmp_path, monkeypatch, limit):
    rows = [
        {"prompt": "x" * (i % 7), "completion": "y", "chosen": "y" * (i % 3), "rejected": "z"}
        for i in range(99)
    ]
    path = write(tmp_path / "rows.jsonl", rows)
    tokenizer, encode, threads = Tokenizer(model), Tokenizer.encode, set()

    def noting(self, *args, **options):
        threads.add(threading.current_thread().name.partition("_")[0])
        return encode(self, *args, **options)

    monkeypatch.setattr(Tokenizer, "encode", noting)

    def read(num_workers):
        dataset = DatasetConfig(path=str(path), num_workers=num_workers, **limit)
        prompts = Prompts(dataset, tokenizer, 1)
        yield [prompts.at(index) for index in range(len(prompts))]
        for load in (load_sequences, load_pairs):
            yield [[array.tolist() for array in row] for row in load(dataset, tokenizer)]

    for plain, threaded in zip(read(0), read(3), strict=True):
        assert plain == threaded and threads == {"MainThread", "tokenize"}
        threads.clear()
        assert (len(plain) < 99) == bool(limit)


def test_encoded_rows_are_the_same_after_a_file(tmp_path):
    rows = Rows(
        [(np.array([1, 2, 3]), np.array([False, True, True])), (np.array([4]), np.array([True]))], {"rows": 2}
    )
    save_encoded(tmp_path / "rows.npz", rows)
    again = load_encoded(tmp_path / "rows.npz")
    assert again.fingerprint == {"rows": 2}
    for before, after in zip(rows, again, strict=True):
        for one, other in zip(before, after, strict=True):
            assert one.dtype == other.dtype and one.tolist() == other.tolist()


@pytest.mark.parametrize("name", ["tokenizer_config.json", "config.json", "generation_config.json"])
def test_settings_beside_a_tokenizer_that_are_no_object_are_refused(model, name):
    (model / name).write_text("[]")
    with pytest.raises(ConfigError, match=rf"{name} is not a JSON object"):
        Tokenizer(model)
