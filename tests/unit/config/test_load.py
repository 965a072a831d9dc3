"""Loading: precedence, YAML 1.2, origins, interpolation, and one clear refusal for each kind of mistake."""

import json
import textwrap
from pathlib import Path

import pytest
import yaml

from hpc_rl.config.load import source
from hpc_rl.config.load.load import Loaded, load
from hpc_rl.config.load.source import SourceValue, escape_references
from hpc_rl.config.load.stored import from_dict, to_dict
from hpc_rl.core.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]
BASE = """\
experiment_name: toy
trial_name: t1
cluster:
  n_nodes: 2
  fileroot: /shared
actor:
  path: /models/m
train_dataset: {path: /data/train.jsonl}
"""


class Files:
    """Writes YAML files and loads them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.write_text(textwrap.dedent(text))
        return path

    def load(self, *overrides: str, base: str = BASE, more: str = "") -> Loaded:
        files = [self.path("base.yaml", base)]
        if more:
            files.append(self.path("more.yml", more))
        return load(files, overrides)

    def refusal(self, *overrides: str, base: str = BASE, more: str = "") -> str:
        with pytest.raises(ConfigError) as caught:
            self.load(*overrides, base=base, more=more)
        return str(caught.value).replace(f"{self.folder}/", "")


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def test_later_files_and_then_overrides_win(files):
    more = "cluster: {n_nodes: 3}\nactor: {optimizer: {lr: 1e-4, beta1: 0.5}}\n"
    loaded = files.load("--actor.optimizer.lr", "1e-5", "actor.optimizer.lr=1e-6", "--n_nodes=4", more=more)
    assert loaded.config.actor.optimizer.lr == 1e-6
    assert loaded.config.actor.optimizer.beta1 == 0.5
    assert loaded.config.cluster.n_nodes == 4
    assert loaded.config.cluster.fileroot == "/shared"
    assert loaded.config.trainer == "grpo"


def test_origins_name_file_and_line_or_the_argument(files):
    loaded = files.load("--n-nodes", "4", more="gconfig:\n  n_samples: 4\n")
    assert loaded.origins["cluster.fileroot"].endswith("base.yaml:5")
    assert loaded.origins["gconfig.n_samples"].endswith("more.yml:2")
    assert loaded.origins["cluster.n_nodes"] == "command line: --n-nodes"
    assert "seed" not in loaded.explicit


def test_yaml_is_yaml_1_2(files):
    more = """\
        launcher:
          slurm: {time: 24:00:00, account: 0123, partition: no, qos: 1_0, mem: 200G}
        gconfig: {top_k: 1e8}
        """
    slurm = files.load(more=more).config.launcher.slurm
    assert (slurm.time, slurm.account, slurm.partition, slurm.qos) == ("24:00:00", "0123", "no", "1_0")
    assert files.load(more=more).config.gconfig.top_k == 100_000_000


def test_text_options_keep_numbers_as_they_were_written(files):
    assert files.load(more="trial_name: 2024\n").config.trial_name == "2024"
    assert files.load("trial_name=1e5").config.trial_name == "1e5"
    assert files.load("--launcher.slurm.comment", "a: [b").config.launcher.slurm.comment == "a: [b"
    assert files.load("--time", "90").config.launcher.slurm.time == "90"


def test_a_section_set_to_null_can_be_brought_back(files):
    more = "actor: {adv_norm: {mean_level: group}}\n"
    assert files.load("actor.adv_norm=null", more=more).config.actor.adv_norm is None
    back = files.load(
        "actor.adv_norm=null", "actor.adv_norm.std_level=group", more=more
    ).config.actor.adv_norm
    assert (back.mean_level, back.std_level) == ("batch", "group")


def test_an_empty_optional_section_is_there_with_its_defaults(files):
    loaded = files.load(more="actor: {adv_norm: {}}\n")
    assert loaded.config.actor.adv_norm.mean_level == "batch"
    assert "actor.adv_norm.mean_level" in loaded.explicit


def test_dotted_keys_lists_and_mappings_in_files(files):
    more = """\
        cluster.n_nodes: 5
        gconfig: {stop_token_ids: [1, 2]}
        launcher: {trainer_env_vars: {OMP_NUM_THREADS: 4, A: b}}
        """
    config = files.load("gconfig.stop_token_ids=[3]", more=more).config
    assert config.cluster.n_nodes == 5
    assert config.gconfig.stop_token_ids == [3]
    assert config.launcher.trainer_env_vars == {"OMP_NUM_THREADS": "4", "A": "b"}
    assert files.load("launcher.trainer_env_vars=A=b,C=d").config.launcher.trainer_env_vars == "A=b,C=d"


def test_anchors_and_merge_keys(files):
    more = "actor: &a\n  optimizer: {lr: 1.0}\n"
    more += "valid_dataset:\n  <<: {path: /x, batch_size: 2}\n  batch_size: 3\n"
    config = files.load(more=more).config
    assert (config.valid_dataset.path, config.valid_dataset.batch_size) == ("/x", 3)


def test_a_value_within_a_mapping_is_named(files):
    assert "allowed: a mapping (text) or text. A is [1] (a list)." in files.refusal(
        more="launcher: {trainer_env_vars: {A: [1]}}"
    )


def test_aliases_that_multiply_are_refused(files):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 9)]
    with pytest.raises(ConfigError, match="more than 100000 values, probably because its aliases"):
        files.load(more="\n".join(lines))


def test_what_comes_from_the_environment_has_the_type_of_its_option(files, monkeypatch):
    monkeypatch.setenv("HPC_RL_TEST_SEED", "7")
    config = files.load(
        more='seed: "${oc.env:HPC_RL_TEST_SEED}"\ntrial_name: "${oc.env:HPC_RL_TEST_SEED}"'
    ).config
    assert (config.seed, config.trial_name) == (7, "7")
    with pytest.raises(
        ConfigError, match=r"seed \(.*\): '\$\{oc.env:HPC_RL_NONE\}' can't be resolved: .*not found"
    ):
        files.load(more='seed: "${oc.env:HPC_RL_NONE}"')


def test_an_escaped_variable_is_text_and_so_is_a_reference_in_its_value(files, monkeypatch):
    monkeypatch.setenv("HPC_RL_TEST_TEXT", "a ${b.c")
    more = """\
        trial_name: '\\${oc.env:HPC_RL_TEST_TEXT}'
        tokenizer_path: "/x/${oc.env:HPC_RL_TEST_TEXT}"
        stats_logger: {wandb: {name: "${trial_name}", group: "${tokenizer_path}"}}
        launcher: {env: '\\${oc.env:'}
        """
    config = files.load(more=more).config
    assert config.launcher.env == "${oc.env:", "text, although it would be a mapping on the command line"
    assert config.trial_name == config.stats_logger.wandb.name == "${oc.env:HPC_RL_TEST_TEXT}"
    assert config.tokenizer_path == config.stats_logger.wandb.group == "/x/a ${b.c"


def test_a_reference_takes_the_type_and_the_text_of_what_it_names(files, monkeypatch):
    monkeypatch.setenv("HPC_RL_TEST_SEED", "7")
    more = """\
        seed: "${oc.env:HPC_RL_TEST_SEED}"
        sglang: {random_seed: "${seed}"}
        trial_name: 1.10
        stats_logger: {wandb: {name: "${trial_name}"}}
        tokenizer_path: "/x/${trial_name}"
        """
    config = files.load(more=more).config
    assert config.sglang.random_seed == 7
    assert (config.stats_logger.wandb.name, config.tokenizer_path) == ("1.10", "/x/1.10")


def test_references_to_names_with_hyphens(files):
    more = """
        pools:
          of-maths: {url: "http://h:1/v1", model: m, max_new_tokens: 77}
          other: ${pools.of-maths}
        gconfig: {max_new_tokens: "${pools.of-maths.max_new_tokens}"}
    """
    config = files.load(more=more).config
    assert config.pools["other"] == config.pools["of-maths"]
    assert config.gconfig.max_new_tokens == 77


def test_a_reference_to_a_default_says_nothing_of_its_own(files):
    loaded = files.load(
        more='ref: {path: /m, dtype: "${actor.dtype}"}\nsglang: {context_length: "${gconfig.max_tokens}"}'
    )
    assert "ref.dtype" not in loaded.explicit and "sglang.context_length" in loaded.explicit
    assert (
        "ref.dtype"
        in files.load("actor.dtype=float32", more='ref: {path: /m, dtype: "${actor.dtype}"}').explicit
    )


def test_a_reward_model_whose_type_is_a_reference(tmp_path):
    text = "experiment_name: e\ntrial_name: t\nmodel: {path: /m}\n"
    text += "train_dataset: {path: /d, type: '${valid_dataset.type}'}\n"
    (tmp_path / "a.yaml").write_text(text + "valid_dataset: {path: /v, type: rw}\n")
    assert load([tmp_path / "a.yaml"]).config.trainer == "rw"


def test_interpolation_sees_overrides_and_defaults(files):
    more = """\
        train_dataset: {path: "${cluster.fileroot}/d.jsonl"}
        actor: {group_size: "${gconfig.n_samples}"}
        trial_name: s${seed}
        """
    config = files.load("gconfig.n_samples=4", "cluster.fileroot=/other", more=more).config
    assert config.train_dataset.path == "/other/d.jsonl"
    assert config.actor.group_size == 4
    assert config.trial_name == "s1"


def test_relative_paths_are_taken_from_the_working_directory(files, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = files.load("actor.path=m", "launcher.python=python3", "cluster.fileroot=~/x").config
    assert config.actor.path == str(tmp_path / "m")
    assert config.launcher.python == "python3"
    assert config.cluster.fileroot == str(Path.home() / "x")
    assert config.tokenizer_path == ""


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (
            "cluster.n_node=4",
            ["unknown key cluster.n_node ", "command line", "did you mean cluster.n_nodes?"],
        ),
        ("n_sample=4", ["unknown key n_sample", "did you mean gconfig.n_samples"]),
        ("eps_clip=1", ["did you mean actor.eps_clip or critic.eps_clip?"]),
        ("learning_rat=1", ["did you mean learning_rate?"]),
        ("n_node=2", ["did you mean n_nodes?"]),
        ("actor.optimizer.learning_rate=1", ["did you mean actor.optimizer.lr?", "stands at the top level"]),
        ("actor.optimizer.LR=3", ["did you mean actor.optimizer.lr?"]),
        (
            "trainer=[grpo]",
            ["trainer (command line: trainer)", "['grpo'] can't be used; allowed: grpo, teacher, sft, rw"],
        ),
        (
            "actor.path=???",
            [
                "actor.path (command line: actor.path): ??? means that a value must be given here; set the option."
            ],
        ),
        (
            "cluster.cluster_name=${oc.env:C}",
            ["is read before references are resolved; write the name"],
        ),
        ("top_k=[1]", ["gconfig.top_k (command line: top_k): [1] (a list) can't be used"]),
        (
            "actor.mb_spec=${actor.optimizer}",
            ["a reference stands for one option: give each option of the section its own"],
        ),
        (
            "trial_name=${oops",
            [
                "trial_name (command line: trial_name): ",
                "the ${…} in it can't be read",
                "where no reference is meant, write \\${ for ${",
            ],
        ),
        ("cluster.n_nodes=four", ["cluster.n_nodes", "four", "an integer, at least 1"]),
        ("cluster.n_nodes=0", ["cluster.n_nodes", "at least 1"]),
        ("cluster.n_nodes=1.5", ["cluster.n_nodes", "an integer"]),
        ("cluster.n_nodes=true", ["cluster.n_nodes", "an integer"]),
        ("actor.optimizer.lr=-1", ["actor.optimizer.lr", "at least 0"]),
        ("actor.optimizer.lr=.nan", ["actor.optimizer.lr", "finite"]),
        ("actor.c_clip=1", ["actor.c_clip", "above 1 or null"]),
        ("async_training=maybe", ["async_training", "true, false"]),
        ("recover.mode=fualt", ["recover.mode", "disabled, auto, fault, resume", "Did you mean fault?"]),
        ("gconfig.stop_token_ids=3", ["gconfig.stop_token_ids", "a list"]),
        ("launcher.slurm.time=tomorrow", ["launcher.slurm.time", "24:00:00"]),
        ("cluster=null", ["cluster", "null can't be the value of a section", "section"]),
        ("cluster=3", ["cluster", "section"]),
        ("actor=null", ["section actor"]),
        ("trainer=ppo", ["trainer", "ppo", "grpo, teacher, sft"]),
        ("model.path=/x", ["both actor and model"]),
        ("trial_name=${nowhere}", ["trial_name", "nowhere", "can't be resolved"]),
        ("trial_name=${trial_name}", ["trial_name", "can't be resolved"]),
        ("plain", ["'plain' is not understood"]),
        ("--seed", ["--seed needs a value"]),
        ("~", ["'~' is not understood"]),
        ("~seed", ["~seed: nothing sets seed, so there is nothing to delete"]),
    ],
)
def test_refusals_of_an_override(files, override, words):
    message = files.refusal(override)
    assert "\n" not in message
    assert [word for word in words if word not in message] == [], message


def test_an_option_is_deleted_as_in_hydra(files):
    more = """\
        gconfig: {n_samples: 4, temperature: 0.7}
        ref: {path: /r}
        rollout: {workflow: "my:Flow", workflow_args: {a: 1, deep: {b: 2, c: 3}}}
    """
    words = ["~gconfig.temperature", "~ref", "~rollout.workflow_args.deep.b", "~n_nodes=2"]
    loaded = files.load(*words, "seed=5", "~seed", more=more)
    config = loaded.config
    assert (config.gconfig.n_samples, config.gconfig.temperature, config.ref, config.seed) == (
        4,
        1.0,
        None,
        1,
    )
    assert config.rollout.workflow_args == {"a": 1, "deep": {"c": 3}}
    assert config.cluster.n_nodes == 1
    assert not loaded.explicit & {"gconfig.temperature", "cluster.n_nodes", "seed"}


def test_what_follows_a_deletion_counts(files):
    loaded = files.load("seed=5", "~seed", "+seed=7", "~cluster.n_nodes", "++gconfig.n_samples=3")
    assert (loaded.config.seed, loaded.config.gconfig.n_samples) == (7, 3)


def test_a_preset_and_a_profile_are_deleted_from(files, tmp_path):
    (tmp_path / "big.yaml").write_text("launcher: {slurm: {partition: gpu}}\n")
    words = ["cluster.cluster_name=big", "~launcher.slurm.partition", "~actor.beta", "~ref"]
    base = files.path("base.yaml", BASE)
    config = load([base], words, presets=["atlas"], profiles=[tmp_path]).config
    assert (config.launcher.slurm.partition, config.actor.beta, config.ref) == (None, 0.0, None)
    assert config.actor.loss_aggregation == "sequence_mean"  # of the preset


def test_a_deletion_of_another_value_is_refused(files):
    assert "~cluster.n_nodes=3 deletes nothing, because cluster.n_nodes is 2;" in files.refusal("~n_nodes=3")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (
            "gconfig:\n  n_sampels: 4\n",
            ["unknown key gconfig.n_sampels (more.yml:2): did you mean gconfig.n_samples?"],
        ),
        ("gconfig:\n  greedy: 1\n", ["gconfig.greedy (more.yml:2): 1 (an integer)", "true, false"]),
        ("seed: 1\nseed: 2\n", ["more.yml:2: key seed is given twice", "more.yml:1"]),
        (
            "cluster: {n_nodes: 1}\ncluster.n_nodes: 2\n",
            ["cluster.n_nodes (more.yml:2): set twice in one file"],
        ),
        ("n_nodes: 4\n", ["n_nodes (more.yml:1)", "cluster.n_nodes"]),
        (
            "launcher:\n  slurm:\n    time: 90\n",
            ["launcher.slurm.time (more.yml:3): 90", "'90' in quotes (minutes)"],
        ),
        ("valid_dataset: {batch_size: 2}\n", ["valid_dataset.path is missing"]),
        ("valid_dataset: {pth: /x}\n", ["did you mean valid_dataset.path?"]),
        ("gconfig:\n", ["gconfig (more.yml:1): null can't be the value of a section"]),
        ("a: [1\n", ["more.yml:2: not valid YAML"]),
        ("- 1\n", ["must hold a mapping"]),
        ("gconfig: {top_p: 0}\n", ["gconfig.top_p (more.yml:1)", "above 0 and at most 1"]),
    ],
)
def test_refusals_of_a_file(files, more, words):
    message = files.refusal(more=more)
    assert "\n" not in message
    assert [word for word in words if word not in message] == [], message


def test_several_mistakes_are_told_at_once(files):
    assert len(files.refusal("seed=x", "gconfig.greedy=2", "nope=1").splitlines()) == 3


def test_a_key_of_another_trainer_says_so(files):
    assert "only a trial with trainer: sft or rw or dpo has it" in files.refusal(
        "trainer=grpo", "model.path=/x"
    )


def test_a_misspelt_required_key_is_told_once(files):
    message = files.refusal(base=BASE.replace("trial_name", "trialname"))
    assert message == "unknown key trialname (base.yaml:2): did you mean trial_name?"


def test_missing_file_and_empty_command_line(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.yaml can't be read: No such file"):
        load([tmp_path / "nowhere.yaml"])
    with pytest.raises(ConfigError, match="--config FILE"):
        load([])


@pytest.mark.parametrize("model", ["actor", "model"])
def test_round_trip_through_json(model):
    minimal = {
        "experiment_name": "a",
        "trial_name": "b",
        "train_dataset": {"path": "/t"},
        model: {"path": "/m"},
    }
    config = from_dict(minimal)
    data = json.loads(json.dumps(to_dict(config)))
    assert from_dict(data) == config
    assert data["trainer"] == {"actor": "grpo", "model": "sft"}[model]
    data["clutser"] = {}
    with pytest.raises(ConfigError, match="did you mean cluster"):
        from_dict(data)


def test_an_unknown_key_is_told_before_uninterpolated_values(files):
    message = files.refusal(more="sead: 1\ngconfig: {n_samples: '${seed}'}\n")
    assert message.startswith("unknown key sead") and "\n" not in message


@pytest.mark.parametrize(("text", "value"), [("", ""), ("#1 try", "#1 try")])
def test_text_on_the_command_line_is_text(files, text, value):
    assert files.load(f"tokenizer_path={text}").config.tokenizer_path in (value, str(Path(value).absolute()))
    assert files.load(f"launcher.slurm.comment={text}").config.launcher.slurm.comment == (
        text if text == "#1 try" else None
    )
    assert files.load("++seed=4", "allocation_mode=").config.seed == 4


def test_a_misspelt_section_of_the_model_is_named(files):
    message = files.refusal(base=BASE.replace("actor:", "acotr:"))
    assert (
        "neither actor nor model is given" in message
        and "trainer to one of grpo, teacher, sft, rw" in message
    )
    assert "unknown key acotr (base.yaml:6): did you mean actor?" in message


def test_what_is_no_reference_stays_as_it_is(files):
    loaded = files.load(more="launcher: {slurm: {comment: 'echo \\${SLURM_JOB_ID} ${trial_name}'}}\n")
    assert loaded.config.launcher.slurm.comment == "echo ${SLURM_JOB_ID} t1"
    stored = files.path("config.yaml", yaml.safe_dump(escape_references(to_dict(loaded.config))))
    assert load([stored]).config == loaded.config


def test_a_character_that_yaml_does_not_allow_is_a_refusal(files):
    assert "base.yaml:1: not valid YAML" in files.refusal(base='trial_name: "\ufffe"\n')


ODD = """
plain: {a: 1, "b": 2, 'c': ~, d: [1, 2.5, .inf, 1e-6, 0x10, 0o7, 1_0, 24:00:00, no, yes, true, Null, null, .nan]}
empty:
list:
-
- a
-   - b
    -
  # a comment
- {}
- []
- |
  two
    lines
- >-
  folded
  lines

  here
&key anchored: &x {p: 1, q: [2]}
alias: *x
merged: {<<: *x, p: 3}
more: {<<: [*x, {r: 5}], q: 1}
? complex
: value
url: http://host:80/a#b
text: a b # comment
quoted: "tab \\t, umlaut \\xe4, \\u20ac"
single: 'it''s'
several: a
  b
  c
tagged: !!str 5
reference: ${a.b}
größe: "–"
"""


@pytest.mark.parametrize(
    "text",
    [
        ODD,
        *(path.read_text() for path in sorted((ROOT / "configs").rglob("*.yaml"))),
        *("", "# nothing", "a", "- 1", "{a: b}", "a: {b: c", "a: *b", "a: b: c", "a: !!int ten", "a: !x b"),
        *(
            "a: 1\na: 2",
            "--- a\n--- b",
            "a:\tb",
            "a: b\t# c",
            "[a, b]: c",
            "{a: b}: c",
            "a: '",
            "a: @b",
            "a: %b",
        ),
        *(
            "{a:1}",
            "{a: 1,}",
            "[a:b]",
            "{a, b}",
            "a: {b:}",
            "%YAML 1.2\n---\na: 1",
            "a: |\n b\n  c\n d",
            "a: -",
        ),
        *(
            "? a\n? b",
            "a: &b\nc: *b",
            "- - - a",
            "a:\n- b\n- c",
            "a: [\n1,\n2\n]",
            'a: "b\n c"',
            "a: 'b\n\n c'",
        ),
        *(
            "<<: {a: 1}",
            "<<: [1]",
            "a: {<<: 1}",
            "!!map {a: 1}",
            "a: =",
            "=: a",
            "a: 😀",
            "a: \x85b",
            "\ufeffa: 1",
        ),
    ],
    ids=lambda text: text[:20],
)
def test_libyaml_reads_what_pyyaml_reads(text, monkeypatch):
    def read() -> SourceValue | str:
        try:
            return source._parse(text, "file")
        except ConfigError as error:
            return str(error)

    fast = read()
    monkeypatch.setattr(source, "MOST_NESTED", -1)
    assert fast == read()


def test_values_nested_without_end_are_refused(files):
    for text in ("a: " + "[" * 100_000, "- " * 100_000, "? " * 100_000):
        assert "nested too deeply" in files.refusal(more=text) or "not valid YAML" in files.refusal(more=text)
