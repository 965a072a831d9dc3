"""ATLAS names have one meaning each; conflicts are errors, and names without effect give notes."""

import pytest

from hpc_rl.config.load.load import load
from hpc_rl.config.options.experiment import get_value
from hpc_rl.config.rules.check import check
from hpc_rl.core.errors import ConfigError

BASE = ["experiment_name=e", "trial_name=t", "train_dataset.path=/d.jsonl", "actor.path=/m"]
HELD_OUT = "valid_dataset.path=/v.jsonl"


@pytest.mark.parametrize(
    ("given", "option", "value"),
    [
        ("beta=0.04", "actor.beta", 0.04),
        ("max_prompt_length=512", "train_dataset.max_length", 512),
        ("max_prompt_length=512", "train_dataset.too_long", "truncate_left"),
        ("top_k=null", "gconfig.top_k", 100_000_000),
        ("top_k=-1", "gconfig.top_k", 100_000_000),
        ("min_p=null", "gconfig.min_p", 0.0),
        ("backprop_accumulation_steps=null", "actor.mb_spec.n_mbs", 1),
        ("backprop_accumulation_micro_batch_size=null", "actor.mb_spec.max_seqs_per_mb", None),
        ("metric_for_best_model=eval/reward", "saver.keep_best.metric", "eval_reward"),
        ("metric_for_best_model=reward", "saver.keep_best.metric", "eval_reward"),
        ("metric_for_best_model=eval/accuracy_delta", "saver.keep_best.metric", "eval_accuracy_delta"),
        ("vllm_dtype=half", "vllm.dtype", "float16"),
        ("report_to=none", "stats_logger.wandb.mode", "disabled"),
    ],
)
def test_names_mean_what_they_say(given, option, value, tmp_path):
    base = [*BASE, HELD_OUT]
    assert get_value(load([], [*base, given]).config, option) == value
    assert get_value(load([], [*base, f"--{given}"]).config, option) == value
    (tmp_path / "a.yaml").write_text(given.replace("=", ": ") + "\n")
    loaded = load([tmp_path / "a.yaml"], base)
    assert get_value(loaded.config, option) == value
    if option in loaded.origins:
        assert loaded.origins[option] == f"{tmp_path}/a.yaml:1 ({given.partition('=')[0]})"
    assert given.partition("=")[0] in {note.option for note in loaded.notes}


def test_the_model_of_each_trainer():
    grpo = load(
        [],
        [
            "experiment_name=e",
            "trial_name=t",
            "train_dataset.path=/d",
            "trainer=grpo",
            "model_name_or_path=/m",
        ],
    )
    sft = load(
        [],
        [
            "experiment_name=e",
            "trial_name=t",
            "train_dataset.path=/d",
            "trainer=sft",
            "model_name_or_path=/m",
        ],
    )
    assert (grpo.config.actor.path, sft.config.model.path) == ("/m", "/m")


@pytest.mark.parametrize(
    "given",
    [
        "generation_aggregation_steps=null",
        "shuffle_generation_inputs=false",
        "eval_steps=500",
        "load_best_model_at_end=true",
        "metric_for_best_model=eval_reward",
        "greater_is_better=true",
        "load_best_model_at_end=false",
        "metric_for_best_model=null",
        "greater_is_better=null",
        "generation_aggregation_steps=16",
        "shuffle_generation_inputs=true",
        "ds3_gather_for_generation=false",
        "vllm_device=cuda:1",
        "vllm_host=localhost",
        "vllm_port=8765",
        "use_vllm=false",
        "ds3_gather_for_generation=true",
        "remove_unused_columns=false",
        "offload_untrained_models=false",
        "offload_untrained_models=true",
        "student_diagnostic_template=null",
        "teacher_adaptive_template=null",
        "student_with_teaching_template=null",
        "student_baseline_template=null",
    ],
)
def test_what_has_no_effect_says_so(given):
    loaded = load([], [*BASE, given])
    assert loaded.config == load([], BASE).config
    assert [
        note
        for note in map(str, loaded.notes)
        if note.startswith(given.partition("=")[0]) and "has no effect here" in note
    ]


@pytest.mark.parametrize(
    ("given", "allocation"),
    [
        (["use_vllm=true"], "vllm:d1+fsdp:d*"),
        (["use_vllm_server=true", "num_vllm_clients=4"], "vllm:d4+fsdp:d*"),
        (["use_vllm=true", "use_vllm_server=true", "allocation_mode="], "vllm:d1+fsdp:d*"),
        (["use_vllm=true", "actor.backend=megatron"], "vllm:d1+megatron:d*"),
        (["use_vllm=true", "num_vllm_clients=4", "allocation_mode=vllm:d4+fsdp:d4"], "vllm:d4+fsdp:d4"),
        (
            ["use_vllm_server=true", "num_vllm_clients=1", "allocation_mode=vllm:d4+fsdp:d4"],
            "vllm:d4+fsdp:d4",
        ),
        (
            ["use_vllm_server=true", "num_vllm_clients=3", "allocation_mode=vllm:d*+fsdp:d4"],
            "vllm:d*+fsdp:d4",
        ),
        (["num_vllm_clients=4", "allocation_mode=sglang:d4+fsdp:d4"], "sglang:d4+fsdp:d4"),
        (["num_vllm_clients=4"], ""),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_vllm_servers_are_what_allocation_mode_has(given, allocation, tmp_path):
    """By arguments as by a file."""
    as_yaml = (word.partition("=")[::2] for word in given)
    text = "".join(f"{name}: {value or repr(value)}\n" for name, value in as_yaml if "." not in name)
    (tmp_path / "a.yaml").write_text(text)
    sections = [word for word in given if "." in word.partition("=")[0]]
    for loaded in (load([], [*BASE, *given]), load([tmp_path / "a.yaml"], [*BASE, *sections])):
        assert loaded.config.allocation_mode == allocation
        names = [word.partition("=")[0] for word in given if "vllm_" in word or "use_" in word]
        assert {*names} <= {note.option for note in loaded.notes}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["use_vllm=true", "allocation_mode=sglang:d4+fsdp:d4"], "has sglang servers; use vllm:dN"),
        (
            ["use_vllm=true", "num_vllm_clients=4", "allocation_mode=vllm:d2+fsdp:d2"],
            "has 2 servers; use vllm:d4 in allocation_mode",
        ),
        (["use_vllm=much"], "much can't be used: it must be true or false"),
        (["use_vllm=true", "num_vllm_clients=0"], "0 can't be used: it must be a whole number"),
        (["use_vllm=true", "pools.student.path=/s", "trainer=teacher"], r"vllm:dN\+vllm\[student\]"),
        (["vllm_host=10.0.0.7"], "the trial starts its own servers"),
    ],
)
def test_vllm_servers_that_can_not_be_are_refused(given, words):
    with pytest.raises(ConfigError, match=words) as caught:
        load([], [*BASE, *given])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "mode", "freq_steps"),
    [
        ([], "auto", 100),
        (["recover.mode=fault"], "fault", 100),
        (["recover.mode=disabled"], "disabled", None),
        (["recover.freq_secs=60"], "auto", None),
        (["recover.freq_steps=5"], "auto", 5),
    ],
)
@pytest.mark.parametrize("presets", [[], ["atlas"]])
def test_what_save_steps_saves_can_be_resumed_from(given, mode, freq_steps, presets):
    config = load([], [*BASE, "save_steps=100", *given], presets=presets).config
    assert (config.saver.freq_steps, config.recover.mode) == (100, mode)
    if freq_steps or not presets:
        assert config.recover.freq_steps == freq_steps
    assert load([], [*BASE, "save_steps=null"]).config.recover.mode == "disabled"
    assert load([], [*BASE, "save_total_limit=3"]).config.recover.keep == 3


@pytest.mark.parametrize("trainer", ["grpo", "sft", "rw"])
def test_decay_and_warm_up_are_those_of_hugging_face(trainer):
    section = "actor" if trainer == "grpo" else "model"
    words = [*BASE[:3], f"trainer={trainer}", f"{section}.path=/m"]

    def optimizer(*given, **more):
        return getattr(load([], [*words, *given], **more).config, section).optimizer

    named = optimizer("weight_decay=0.1", "warmup_ratio=0.1")
    assert (named.decay_norms_and_biases, named.warmup_from_zero) == (False, True)
    assert (optimizer().decay_norms_and_biases, optimizer().warmup_from_zero) == (True, False)
    assert optimizer(
        "weight_decay=0.1", f"{section}.optimizer.decay_norms_and_biases=true"
    ).decay_norms_and_biases
    if trainer == "grpo":
        preset = optimizer(presets=["atlas"])
        assert (preset.decay_norms_and_biases, preset.warmup_from_zero) == (False, True)


@pytest.mark.parametrize(
    "given",
    [
        ["learning_rate=1e-6", "actor.optimizer.lr=1e-5"],
        ["actor.optimizer={lr: 1e-5}", "learning_rate=1e-6"],
        ["gconfig.n_samples=4", "num_generations=8"],
    ],
)
def test_one_thing_given_twice_with_different_values(given):
    with pytest.raises(ConfigError, match="are the same option with different values"):
        load([], [*BASE, *given])


def test_one_thing_given_twice_with_one_value():
    assert load([], [*BASE, "num_generations=8", "gconfig.n_samples=8"]).config.gconfig.n_samples == 8
    assert (
        load([], [*BASE, "num_generations=8", "num_generations=4"]).config.gconfig.n_samples == 4
    )  # the last one wins


def test_one_thing_given_twice_in_a_file(tmp_path):
    (tmp_path / "a.yaml").write_text("num_generations: 8\ngconfig: {n_samples: 8}\n")
    assert load([tmp_path / "a.yaml"], BASE).config.gconfig.n_samples == 8
    (tmp_path / "b.yaml").write_text("num_generations: 8\ngconfig: {n_samples: 4}\n")
    with pytest.raises(
        ConfigError,
        match=r"num_generations \(.*b.yaml:1 .*\) 8 and gconfig.n_samples \(.*b.yaml:2\) 4 are the same",
    ):
        load([tmp_path / "b.yaml"], BASE)


@pytest.mark.parametrize(
    ("line", "override"),
    [("gconfig: {n_samples: 8}", "num_generations=4"), ("num_generations: 8", "gconfig.n_samples=4")],
)
def test_an_argument_lies_over_a_file_by_either_name(tmp_path, line, override):
    (tmp_path / "a.yaml").write_text(line + "\n")
    loaded = load([tmp_path / "a.yaml"], [*BASE, override])
    assert loaded.config.gconfig.n_samples == 4
    assert loaded.origins["gconfig.n_samples"].startswith("command line")


def test_a_file_in_these_names_alone_is_a_grpo_trial(tmp_path):
    lines = ["experiment_name: e", "trial_name: t", "model_name_or_path: /m", "train_dataset: {path: /d}"]
    (tmp_path / "a.yaml").write_text("\n".join([*lines, "num_generations: 4"]) + "\n")
    assert load([tmp_path / "a.yaml"]).config.gconfig.n_samples == 4
    (tmp_path / "b.yaml").write_text("\n".join([*lines, "learning_rate: 1e-6"]) + "\n")
    assert load([tmp_path / "b.yaml"], presets=["atlas"]).config.actor.optimizer.lr == 1e-6
    with pytest.raises(ConfigError, match="trainer to one of grpo, teacher, sft, rw"):
        load([tmp_path / "b.yaml"])


def test_the_reference_model_is_what_is_offloaded():
    offloaded = load([], [*BASE, "ref.path=/m", "offload_untrained_models=true"]).config
    assert offloaded.ref is not None and offloaded.ref.fsdp.offload_params
    from_preset = load([], [*BASE, "offload_untrained_models=true"], presets=["atlas"]).config
    assert from_preset.ref is not None and from_preset.ref.fsdp.offload_params
    loaded = load([], [*BASE, "offload_untrained_models=true", "ref=null"])
    assert loaded.config.ref is None
    assert any("have separate servers" in note for note in map(str, loaded.notes))


def test_names_of_the_teacher_make_a_teacher_trial():
    assert load([], [*BASE, "max_probe_tokens=300"]).config.trainer == "teacher"
    # its default chooses nothing, but where there are other models to ask
    assert load([], [*BASE, "max_probe_tokens=500"]).config.trainer == "grpo"
    assert load([], [*BASE, "max_probe_tokens=500", "pools.student.path=/s"]).config.trainer == "teacher"
    assert load([], [*BASE, "student_baseline_template=null"]).config.trainer == "grpo"
    with pytest.raises(
        ConfigError, match=r"stands for teacher.max_probe_tokens, which trainer grpo does not"
    ):
        load([], [*BASE, "trainer=grpo", "max_probe_tokens=300"])


def test_beta_is_the_only_kl_term_unless_both_are_said(tmp_path):
    words = [
        "experiment_name=e",
        "trial_name=t",
        "actor.path=/m",
        "ref.path=/m",
        "train_dataset.path=/d",
        "beta=0.04",
    ]
    words += ["actor.ppo_n_minibatches=1"]
    loaded = check(load([], words), files=False)
    assert loaded.config.actor.kl_ctl == 0 and any(
        "actor.beta is the KL term" in note for note in map(str, loaded.notes)
    )
    loaded = check(load([], [*words, "actor.kl_ctl=0.1"]), files=False)
    assert loaded.config.actor.kl_ctl == 0.1 and any(
        "the KL term counts in the reward and in the loss" in note for note in map(str, loaded.notes)
    )


def test_beta_alone_makes_its_reference_model():
    assert load([], [*BASE, "beta=0.04"]).config.ref.path == "/m"
    assert load([], [*BASE, "beta=0.04", "ref.path=/other"]).config.ref.path == "/other"
    assert load([], [*BASE, "beta=0"]).config.ref is None
    with pytest.raises(ConfigError, match=r"actor.beta 0.04 needs a reference model"):
        check(load([], [*BASE, "beta=0.04", "ref=null"]), files=False)


@pytest.mark.parametrize(
    ("given", "batch_size", "n_mbs"),
    [
        (["cluster.n_gpus_per_node=0"], 1, 1),
        (["allocation_mode=sglang:d4+fsdp:d4"], 4, 1),
        (["allocation_mode=sglang:d4+fsdp:d2t2"], 2, 1),
        (["allocation_mode=sglang:d4+fsdp:d*", "gradient_accumulation_steps=2"], 8, 2),
        (["cluster.n_nodes=2", "gradient_accumulation_steps=3", "backprop_accumulation_steps=2"], 24, 6),
        (["num_generations=16", "gradient_accumulation_steps=1"], 2, 1),
    ],
)
def test_the_batch_is_what_the_ranks_have_together(given, batch_size, n_mbs):
    loaded = check(
        load([], [*BASE, "num_generations=8", "per_device_train_batch_size=8", *given]), files=False
    )
    assert loaded.config.train_dataset.batch_size == batch_size
    assert loaded.config.actor.mb_spec.n_mbs == n_mbs


def test_sequences_of_ranks_make_whole_groups_and_no_second_batch_size():
    given = [*BASE, "num_generations=6", "per_device_train_batch_size=8", "actor.ppo_n_minibatches=1"]
    with pytest.raises(ConfigError, match=r"8 \* 4 data ranks is not a multiple of .* multiple of 3"):
        check(load([], given), files=False)
    batch = [*given, "per_device_train_batch_size=3"]
    assert check(load([], [*batch, "train_dataset.batch_size=2"]), files=False)
    with pytest.raises(
        ConfigError,
        match=r"batch_size 4 contradicts .*sequences_per_rank 3 on 4 data ranks, which gives 2; .*per_device_train",
    ):
        check(load([], [*batch, "train_dataset.batch_size=4"]), files=False)
    with pytest.raises(ConfigError, match=r"per_device_train_batch_size .*: 0 can't be used: .* 1 or larger"):
        load([], [*BASE, "per_device_train_batch_size=0"])
    with pytest.raises(ConfigError, match=r"^gradient_accumulation_steps .*: x can't be used"):
        load([], [*BASE, "per_device_train_batch_size=8", "gradient_accumulation_steps=x"])


@pytest.mark.parametrize(
    "trainer", [["trainer=sft"], ["trainer=grpo", "rollout.workflow=multi_turn"]], ids=str
)
def test_only_prompts_that_are_sent_as_they_are_can_be_truncated(trainer):
    model = "model.path=/m" if "trainer=sft" in trainer else "actor.path=/m"
    given = ["experiment_name=e", "trial_name=t", "train_dataset.path=/d", model, *trainer]
    given += ["train_dataset.too_long=truncate_left", "train_dataset.max_length=5"]
    with pytest.raises(
        ConfigError, match=r"train_dataset.too_long truncate_left can't be used: .*; use drop"
    ):
        check(load([], given), files=False)


def test_wrong_values_name_the_alias():
    with pytest.raises(ConfigError, match=r"gconfig.n_samples \(command line: num_generations\): 0"):
        load([], [*BASE, "num_generations=0"])
    with pytest.raises(
        ConfigError, match=r"greater_is_better .*: yes can't be used: it must be true or false"
    ):
        load([], [*BASE, "greater_is_better=yes"])
    with pytest.raises(ConfigError, match="clearml is not known; allowed: wandb"):
        load([], [*BASE, "report_to=[clearml]"])


def test_the_preset_lies_below_files(tmp_path):
    (tmp_path / "a.yaml").write_text("gconfig: {n_samples: 16}\n")
    loaded = load([tmp_path / "a.yaml"], [*BASE, "learning_rate=5e-6"], presets=["atlas"])
    config = loaded.config
    assert (config.gconfig.n_samples, config.gconfig.max_new_tokens, config.gconfig.temperature) == (
        16,
        256,
        0.9,
    )
    assert (config.actor.optimizer.lr, config.actor.optimizer.weight_decay, config.total_train_epochs) == (
        5e-6,
        0,
        3,
    )
    assert loaded.origins["gconfig.temperature"] == "preset atlas"


def test_no_limit_of_prompts_leaves_none_truncated():
    given = [
        "experiment_name=e",
        "trial_name=t",
        "train_dataset.path=/d",
        "actor.path=/m",
        "num_generations=4",
    ]
    found = check(load([], [*given, "max_prompt_length=null"], presets=["atlas"]), files=False)
    assert found.config.train_dataset.max_length is None
    assert any("too_long truncate_left: no effect" in note for note in map(str, found.notes))


@pytest.mark.parametrize(
    ("preset", "given", "batch_size", "too_long"),
    [
        ("atlas", [], 1, "truncate_left"),
        ("atlas", ["rollout.workflow=multi_turn"], 1, "drop"),
        ("atlas-teacher", ["pools.student.url=http://s/v1"], 4, "drop"),
        ("atlas-teacher", ["pools.student.url=http://s/v1", "per_device_train_batch_size=32"], 1, "drop"),
    ],
)
def test_a_preset_gives_way_to_what_is_given(preset, given, batch_size, too_long):
    words = [*BASE, *given, "allocation_mode=embedded:d1+fsdp:d1", "cluster.n_gpus_per_node=0"]
    found = check(load([], words, presets=[preset]), files=False).config.train_dataset
    assert (found.batch_size, found.too_long) == (batch_size, too_long)


def test_the_preset_of_the_teacher_is_its_recipe(tmp_path):
    pools = ["pools.student.path=/s", "allocation_mode=embedded:d1+embedded[student]:d1+fsdp:d1"]
    words = [*BASE, *pools, "cluster.n_gpus_per_node=0", "max_probe_tokens=200"]
    loaded = load([], words, presets=["atlas-teacher"])
    config = loaded.config
    assert config.trainer == "teacher"
    assert (config.gconfig.n_samples, config.gconfig.temperature, config.gconfig.max_new_tokens) == (
        32,
        0.7,
        4096,
    )
    assert config.train_dataset.batch_size * config.gconfig.n_samples == 128
    assert (config.teacher.max_probe_tokens, config.teacher.degradation_penalty_multiplier) == (200, 2.0)
    assert (config.actor.beta, config.actor.optimizer.lr, config.ref.path) == (0.04, 1e-6, "/m")
    assert loaded.origins["gconfig.n_samples"] == "preset atlas-teacher"


def test_sft_has_no_generation():
    words = [
        "experiment_name=e",
        "trial_name=t",
        "train_dataset.path=/d",
        "model.path=/m",
        "num_generations=8",
    ]
    with pytest.raises(ConfigError, match=r"stands for gconfig.n_samples, which trainer sft does not have"):
        load([], words)
