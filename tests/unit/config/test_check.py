"""Cross-section rules refuse contradictions; defaults adapt with a note; explicit values never change."""

import json
import re
import threading
from pathlib import Path

import pytest
from command_line import NO_TENSORS

from hpc_rl.config.load.load import Loaded, load
from hpc_rl.config.options.experiment import count_steps, find_last_step, get_value
from hpc_rl.config.rules.check import check
from hpc_rl.config.rules.file_rules import check_on_node
from hpc_rl.core.errors import ConfigError
from hpc_rl.core.refusal import Kind
from hpc_rl.core.trial import Trial
from hpc_rl.roles.supervisor import check_inputs

GRPO = [
    "experiment_name=toy",
    "trial_name=t1",
    "actor.path=/models/m",
    "train_dataset.path=/data/t.jsonl",
    "train_dataset.batch_size=8",
    "gconfig.n_samples=4",
    "gconfig.max_new_tokens=16",
    "cluster.n_gpus_per_node=0",
]
SFT = [
    "experiment_name=toy",
    "trial_name=t1",
    "model.path=/models/m",
    "train_dataset.path=/data/t.jsonl",
    "cluster.n_gpus_per_node=0",
]


def load_checked(*overrides: str, base: list[str] = GRPO, files: bool = False) -> Loaded:
    return check(load([], [*base, *overrides]), files=files)


@pytest.mark.parametrize(
    ("overrides", "option", "kind"),
    [
        (["experiment_name=a/b"], "experiment_name", Kind.VALUE),
        (["trial_name=.."], "trial_name", Kind.VALUE),
        (["environments.port=99999", "total_train_steps=9"], "environments.port", Kind.VALUE),
        (["environments={}"], "total_train_steps", Kind.MISSING),
        (
            ["environments={}", "total_train_steps=9", "total_train_epochs=2"],
            "total_train_epochs",
            Kind.NO_EFFECT,
        ),
        (["train_dataset.type=sft"], "train_dataset.type", Kind.CONFLICT),
        (["actor.attn_impl=flash_attention_2"], "actor.attn_impl", Kind.MACHINE),
        (
            ["allocation_mode=sglang:d1+fsdp:d1", "sglang.disable_overlap_schedule=false"],
            "sglang.disable_overlap_schedule",
            Kind.MACHINE,
        ),
        (["cluster.n_gpus_per_node=8", "actor.attn_impl=magic"], "actor.attn_impl", Kind.VALUE),
        (
            ["cluster.n_gpus_per_node=8", "actor.attn_impl=flash_attention_2", "actor.dtype=float32"],
            "actor.attn_impl",
            Kind.CONFLICT,
        ),
        (["actor.optimizer.hysteresis=3"], "actor.optimizer.hysteresis", Kind.NO_EFFECT),
        (
            [
                "actor.dtype=float16",
                "actor.optimizer.initial_loss_scale=2",
                "actor.optimizer.min_loss_scale=4",
            ],
            "actor.optimizer.min_loss_scale",
            Kind.CONFLICT,
        ),
        (["actor.optimizer.type=empty"], "actor.optimizer.type", Kind.VALUE),
        (["actor.optimizer.offload=true"], "actor.optimizer.offload", Kind.NO_EFFECT),
        (["sglang.schedule_policy=lmp"], "sglang.schedule_policy", Kind.VALUE),
        (["sglang.attention_backend=fa5"], "sglang.attention_backend", Kind.VALUE),
        (["sglang.kv_cache_dtype=int3"], "sglang.kv_cache_dtype", Kind.VALUE),
        (["sglang.chunked_prefill_size=-77"], "sglang.chunked_prefill_size", Kind.VALUE),
        (["actor.experiment_name=other"], "actor.experiment_name", Kind.CONFLICT),
        (["ref.path=/m", "ref.trial_name=other"], "ref.trial_name", Kind.CONFLICT),
        (["saver.fileroot=/other"], "saver.fileroot", Kind.CONFLICT),
        (["actor.ds_auto_tp.autotp_size=2"], "actor.ds_auto_tp.autotp_size", Kind.UNSUPPORTED),
        (["actor.fsdp.offload_params=true"], "actor.fsdp.offload_params", Kind.NO_EFFECT),
        (["actor.fsdp.offload_activations=true"], "actor.fsdp.offload_activations", Kind.NO_EFFECT),
        (
            [
                "cluster.n_gpus_per_node=8",
                "actor.fsdp.offload_activations=true",
                "actor.gradient_checkpointing=false",
            ],
            "actor.fsdp.offload_activations",
            Kind.NO_EFFECT,
        ),
        (
            ["actor.fsdp.float32_head=true"],
            "actor.fsdp.float32_head",
            Kind.NO_EFFECT,
        ),  # on CPUs all is float32
        (
            ["cluster.n_gpus_per_node=8", "actor.fsdp.float32_head=true", "actor.use_lora=true"],
            "actor.fsdp.float32_head",
            Kind.CONFLICT,
        ),
        (["ref.path=/m", "ref.fsdp.offload_params=true"], "ref.fsdp.offload_params", Kind.NO_EFFECT),
        (
            ["cluster.n_gpus_per_node=8", "actor.optimizer.offload=true", "actor.fsdp.offload_params=true"],
            "actor.optimizer.offload",
            Kind.NO_EFFECT,
        ),
        (["actor.pad_to_maximum=true"], "actor.pad_to_maximum", Kind.NO_EFFECT),
        (["actor.is_critic=true"], "actor.is_critic", Kind.CONFLICT),
        (
            ["actor.mb_spec.granularity=3", "actor.mb_spec.max_tokens_per_mb=50"],
            "actor.mb_spec.max_tokens_per_mb",
            Kind.CONFLICT,
        ),
        (["sglang.attention_backend=fa3"], "sglang.attention_backend", Kind.MACHINE),
        (["gconfig.n_samples=1", "actor.adv_norm.mean_level=group"], "gconfig.n_samples", Kind.CONFLICT),
        (["actor.ppo_n_minibatches=33"], "actor.ppo_n_minibatches", Kind.CONFLICT),
        (["actor.eps_clip=1.5"], "actor.eps_clip", Kind.VALUE),
        (
            ["actor.use_decoupled_loss=true", "actor.recompute_logprob=false"],
            "actor.recompute_logprob",
            Kind.CONFLICT,
        ),
        (["actor.behav_imp_weight_cap=2"], "actor.behav_imp_weight_cap", Kind.NO_EFFECT),
        (["gconfig.greedy=true"], "gconfig.greedy", Kind.CONFLICT),
        (["gconfig.greedy=true", "actor.adv_norm.mean_level=group"], "gconfig.greedy", Kind.CONFLICT),
        (["gconfig.temperature=0"], "gconfig.temperature", Kind.CONFLICT),
        (["gconfig.min_new_tokens=17"], "gconfig.min_new_tokens", Kind.CONFLICT),
        (["gconfig.max_tokens=16"], "gconfig.max_tokens", Kind.CONFLICT),
        (["actor.mb_spec.max_tokens_per_mb=16"], "actor.mb_spec.max_tokens_per_mb", Kind.CONFLICT),
        (
            ["allocation_mode=sglang:d1+d1", "sglang.context_length=16"],
            "sglang.context_length",
            Kind.CONFLICT,
        ),
        (["rollout.reward_fn=exact_mach"], "rollout.reward_fn", Kind.VALUE),
        (["rollout.workflow=my.module"], "rollout.workflow", Kind.VALUE),
        (["actor.optimizer.min_lr_ratio=0.1"], "actor.optimizer.min_lr_ratio", Kind.NO_EFFECT),
        (["actor.optimizer=null"], "actor.optimizer", Kind.VALUE),
        (["actor.max_new_tokens=32"], "actor.max_new_tokens", Kind.CONFLICT),
        (
            ["actor.overlong_reward_penalty=true", "actor.overlong_penalty_factor=1"],
            "actor.overlong_reward_penalty",
            Kind.CONFLICT,
        ),
        (
            [
                "actor.overlong_reward_penalty=true",
                "actor.overlong_tokens=17",
                "actor.overlong_penalty_factor=1",
            ],
            "actor.overlong_tokens",
            Kind.CONFLICT,
        ),
        (["actor.adv_norm.group_size=1"], "actor.adv_norm.group_size", Kind.CONFLICT),
        (
            ["actor.adv_norm.mean_level=null", "actor.adv_norm.mean_leave1out=true"],
            "actor.adv_norm.mean_leave1out",
            Kind.NO_EFFECT,
        ),
        (["actor.log_agent_stats=true"], "actor.log_agent_stats", Kind.NO_EFFECT),
        (
            ["actor.algorithm=areal", "actor.loss_aggregation=sequence_mean"],
            "actor.loss_aggregation",
            Kind.CONFLICT,
        ),
        (
            ["gconfig.n_samples=1", "train_dataset.batch_size=4", "actor.dynamic_sampling=true"],
            "gconfig.n_samples",
            Kind.CONFLICT,
        ),
        (["actor.kl_ctl=0.1"], "actor.kl_ctl", Kind.CONFLICT),
        (["actor.beta=0.04"], "actor.beta", Kind.CONFLICT),
        (["ref.path=/m", "ref.mb_spec.max_tokens_per_mb=16"], "ref.mb_spec.max_tokens_per_mb", Kind.CONFLICT),
        (["ref.path=/m", "ref.optimizer.lr=1"], "ref.optimizer.lr", Kind.NO_EFFECT),
        (["ref.path=/m", "ref.attn_impl=flash_attention_2"], "ref.attn_impl", Kind.MACHINE),
        (["evaluator.freq_steps=1"], "evaluator.freq_steps", Kind.NO_EFFECT),
        (["launcher.slurm.extra_args=[licenses]"], "launcher.slurm.extra_args", Kind.VALUE),
        (["launcher.slurm.extra_args=[--nodes=3]"], "launcher.slurm.extra_args", Kind.VALUE),
        (["launcher.slurm.extra_args=[--ntasks=3]"], "launcher.slurm.extra_args", Kind.VALUE),
        (["launcher.slurm.comment=a\nb"], "launcher.slurm.comment", Kind.VALUE),
        (["launcher.trainer_env_vars={HF_TOKEN: '***'}"], "launcher.trainer_env_vars", Kind.VALUE),
        (["cluster.fileroot=/d", "cluster.local_dir=/d/e"], "cluster.local_dir", Kind.CONFLICT),
        (["cluster.local_dir=disk"], "cluster.local_dir", Kind.VALUE),
        (
            ["cluster.local_dir=$TMPDIR", "launcher.slurm.trainer_image=/i.sif"],
            "cluster.local_dir",
            Kind.CONFLICT,
        ),
        (["launcher.trainer_env_vars=A"], "launcher.trainer_env_vars", Kind.VALUE),
        (["launcher.trainer_env_vars={A-B: c}"], "launcher.trainer_env_vars", Kind.VALUE),
    ],
)
def test_refusals(overrides, option, kind):
    with pytest.raises(ConfigError) as caught:
        load_checked(*overrides)
    assert [(one.option, one.kind) for one in caught.value.refusals] == [(option, kind)]


def test_an_evaluation_that_is_turned_off_needs_no_other_option():
    load_checked("evaluator.freq_steps=1", "valid_dataset=null")


LIMIT = "actor.mb_spec.max_tokens_per_mb=100"


@pytest.mark.parametrize(
    ("overrides", "base", "option", "value"),
    [
        ([LIMIT], GRPO, "gconfig.max_tokens", 100),
        ([LIMIT, "ref.path=/m", "ref.mb_spec.max_tokens_per_mb=80"], GRPO, "gconfig.max_tokens", 80),
        ([LIMIT, "actor.mb_spec.granularity=3"], GRPO, "gconfig.max_tokens", 33),  # neighbours fit together
        ([LIMIT, "train_dataset.max_length=84"], GRPO, "gconfig.max_tokens", 65536),  # nothing is longer
        ([LIMIT, "train_dataset.max_length=85"], GRPO, "gconfig.max_tokens", 100),
        (
            [LIMIT, "gconfig.max_tokens=101"],
            GRPO,
            "refused",
            "gconfig.max_tokens 101 is too large: with actor.mb_spec.max_tokens_per_mb",
        ),
        (["model.mb_spec.max_tokens_per_mb=100"], SFT, "train_dataset.max_length", 100),
        (
            ["model.mb_spec.max_tokens_per_mb=100", "trainer=rw"],
            SFT,
            "train_dataset.max_length",
            50,
        ),  # a pair stays together
        (
            ["model.mb_spec.max_tokens_per_mb=9", "valid_dataset={path: /v, max_length: 10}"],
            SFT,
            "refused",
            "valid_dataset.max_l",
        ),
    ],
)
def test_no_sequence_is_longer_than_a_micro_batch(overrides, base, option, value):
    """In the trainer it would end the trial, at whatever step it comes."""
    if option == "refused":
        with pytest.raises(ConfigError, match=value):
            load_checked(*overrides, base=base)
        return
    loaded = load_checked(*overrides, base=base)
    assert get_value(loaded.config, option) == value
    assert value == 65536 or any(
        note.startswith(f"{option} is {value} instead of the default") for note in map(str, loaded.notes)
    )


def test_what_has_no_effect_in_a_norm_is_noted():
    notes = load_checked("actor.adv_norm.std_level=null", "actor.adv_norm.eps=1").notes
    assert any(
        "actor.adv_norm.eps: no effect: actor.adv_norm.std_level is null" in note for note in map(str, notes)
    )


def test_the_ends_of_a_trial():
    assert load_checked().config.total_train_epochs == 1
    # a trial on environments alone has no epochs
    alone = load_checked("environments={}", "total_train_steps=9", "train_dataset.path=''").config
    assert count_steps(alone, num_rows=0) == find_last_step(alone, num_rows=8) == 9
    assert load_checked("total_train_steps=9").config.total_train_epochs is None
    both = load_checked("total_train_steps=9", "total_train_epochs=2")
    assert both.config.total_train_epochs == 2
    assert any(
        "stops at the earliest of total_train_steps 9, total_train_epochs 2" in note
        for note in map(str, both.notes)
    )
    with pytest.raises(ConfigError, match="the trial would never stop"):
        load_checked("total_train_epochs=null")


def test_a_refusal_says_where_its_options_were_written(tmp_path):
    (tmp_path / "a.yaml").write_text("gconfig:\n  max_new_tokens: 8\n  min_new_tokens: 9\n")
    with pytest.raises(
        ConfigError,
        match=r"min_new_tokens 9 must not exceed .*max_new_tokens 8\. \(.*a\.yaml:3, .*a\.yaml:2\)$",
    ):
        check(load([tmp_path / "a.yaml"], [one for one in GRPO if "new_tokens" not in one]), files=False)


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ("--port=1", "--port can't be given, because the trial sets it"),
        ("--model-path", "--model-path can't be given, because the trial sets it"),
        ("--tp", "--tp can't be given, because the trial sets it"),
        ("--api-key", "--api-key can't be given, because the trial sets it"),
        ("--context-length", "--context-length can't be given; set sglang.context_length instead"),
    ],
)
def test_sglangs_extra_arguments(extra, words):
    servers = "allocation_mode=sglang:d1+fsdp:d1"
    with pytest.raises(ConfigError, match=words):
        load_checked(servers, f"sglang.extra_args=[{extra}, '7']")
    assert load_checked(
        servers, "sglang.extra_args=[--attention-backend, mine]", "sglang.attention_backend=null"
    )
    assert load_checked(servers, "sglang.extra_args=[--enable-deterministic-inference]")


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ("--port=1", "--port can't be given, because the trial sets it"),
        ("--uds", "--uds can't be given, because the trial sets it"),
        ("-tp", "-tp can't be given, because the trial sets it"),
        ("--logprobs-mode", "--logprobs-mode can't be given, because the trial sets it"),
        ("--seed", "--seed can't be given; set vllm.seed instead"),
    ],
)
def test_vllms_extra_arguments(extra, words):
    servers = "allocation_mode=vllm:d1+fsdp:d1"
    with pytest.raises(ConfigError, match=words):
        load_checked(servers, f"vllm.extra_args=[{extra}, '7']")
    assert load_checked(servers, "vllm.extra_args=[--max-num-seqs, '7']").config.vllm.max_num_seqs is None


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("gconfig.top_p=0.9", "gconfig.top_p 0.9 can't be used with vllm servers"),
        ("gconfig.top_k=5", "gconfig.top_k 5 can't be used with vllm servers"),
        (
            "vllm.max_model_len=16",
            "vllm.max_model_len 16 is too small for a prompt and gconfig.max_new_tokens",
        ),
        ("vllm.dtype=float16", "vllm.dtype float16 can't be used without GPUs"),
        ("vllm.dtype=float8", "allowed: auto, bfloat16, float16, float32"),
        ("vllm.version=0.1.0", "allowed: 0.32.0"),
    ],
)
def test_what_vllm_servers_can_not_do(override, words):
    with pytest.raises(ConfigError, match=words):
        load_checked("allocation_mode=vllm:d1+fsdp:d1", override)


def test_what_is_fine_passes():
    good = [
        "--launcher.slurm.extra_args",
        "[--hint=nomultithread, --nice=10]",
        "rollout.reward_fn=my.rewards:maths",
        "launcher.trainer_env_vars=A=b",
    ]
    assert load_checked(*good).config.gconfig.n_samples == 4
    assert load_checked(base=SFT).config.trainer == "sft"


SUBMITIT, JOBS, HETJOB = (
    f"launcher.slurm.{what}" for what in ("backend=submitit", "layout=jobs", "layout=hetjob")
)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            [SUBMITIT, HETJOB],
            "backend submitit can't be used with launcher.slurm.layout hetjob: submitit submits",
        ),
        ([SUBMITIT, JOBS], "backend submitit can't be used with launcher.slurm.layout jobs"),
        ([SUBMITIT, "launcher.slurm.continue_by=successor"], "use backend sbatch, or continue_by requeue"),
        ([JOBS, "launcher.type=local"], "layout jobs can't be used with launcher.type local"),
        (["launcher.slurm.servers.partition=spare"], "servers.partition has no effect in layout allocation"),
        ([HETJOB, "launcher.slurm.servers.idle_s=60"], "servers.idle_s has no effect in layout hetjob"),
        (
            [HETJOB, "launcher.slurm.servers.time=1-0"],
            "its components stop together; use launcher.slurm.time",
        ),
        ([HETJOB, "launcher.slurm.switches=1"], "Slurm counts switches per component"),
        ([JOBS, "launcher.slurm.servers.qos=''"], "or null for the one in launcher.slurm"),
    ],
)
def test_layouts_and_backends_that_contradict_are_refused(options, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        load_checked("cluster.n_nodes=2", *options)


def test_layouts_are_about_servers():
    with pytest.raises(ConfigError, match="trainer sft has none; use allocation"):
        load_checked("launcher.slurm.layout=jobs", base=SFT)


def test_defaults_adapt_to_a_plan_without_gpus_and_say_so():
    loaded = load_checked()
    actor, sglang = loaded.config.actor, loaded.config.sglang
    assert (actor.dtype, actor.attn_impl, sglang.dtype, sglang.attention_backend) == (
        "float32",
        "sdpa",
        "float32",
        "torch_native",
    )
    assert [note.split(" is ")[0] for note in map(str, loaded.notes) if "no GPUs" in note] == [
        "actor.dtype",
        "actor.attn_impl",
    ]
    assert "actor.dtype" not in loaded.explicit
    on_gpus = load_checked("cluster.n_gpus_per_node=8").config
    assert (on_gpus.actor.dtype, on_gpus.actor.attn_impl, on_gpus.sglang.attention_backend) == (
        "bfloat16",
        "flash_attention_2",
        "fa3",
    )
    assert load_checked("cluster.n_gpus_per_node=8", "actor.dtype=float32").config.actor.attn_impl == "sdpa"


def test_kl_in_the_reward_needs_a_reference_and_its_default_adapts():
    loaded = load_checked()
    assert loaded.config.actor.kl_ctl == 0
    assert not any("kl_ctl" in note for note in map(str, loaded.notes)), (
        "without a section ref nobody expects one"
    )
    loaded = load_checked("ref.path=/models/m", "ref.optimizer=null", "ref.disable_dropout=true")
    assert (loaded.config.actor.kl_ctl, loaded.config.ref.dtype, loaded.config.ref.attn_impl) == (
        0.1,
        "float32",
        "sdpa",
    )
    assert ("ref.disable_dropout", Kind.NO_EFFECT) in {(note.option, note.kind) for note in loaded.notes}
    assert load_checked("actor.algorithm=areal").config.actor.kl_ctl == 0.1
    idle = load_checked("ref.path=/models/m", "actor.kl_ctl=0")
    assert any(
        note.startswith("ref has no effect, and the reference model is not loaded")
        for note in map(str, idle.notes)
    )


def test_explicit_values_stay():
    loaded = load_checked("actor.dtype=bfloat16", "sglang.dtype=bfloat16")
    assert (loaded.config.actor.dtype, loaded.config.sglang.dtype) == ("bfloat16", "bfloat16")


def test_dataset_type_follows_the_trainer():
    loaded = load_checked("valid_dataset.path=/v.jsonl", base=SFT)
    assert (loaded.config.train_dataset.type, loaded.config.valid_dataset.type) == ("sft", "sft")
    with pytest.raises(
        ConfigError,
        match=r"train_dataset\.type rl can't be used with trainer sft, which needs rows of type sft",
    ):
        load_checked("train_dataset.type=rl", base=SFT)


def test_a_critic_selects_ppo_and_has_the_layout_of_the_policy():
    critic = ["critic.path=/c", "critic.ppo_n_minibatches=2", "train_dataset.batch_size=4"]
    config = load_checked(*critic, "cluster.n_gpus_per_node=0").config
    assert (config.actor.algorithm, config.critic.is_critic, config.critic.dtype) == ("ppo", True, "float32")
    assert (config.actor.gae_lambda, config.critic.eps_clip) == (1.0, 0.5)
    named = load_checked(*critic, "actor.algorithm=ppo").config
    assert (named.actor.gae_lambda, named.actor.adv_norm.std_level) == (0.95, "batch")
    sequence = load_checked(*critic, "actor.importance_sampling_level=sequence").config
    assert sequence.actor.algorithm == "gspo"
    layout = ["allocation_mode=sglang:d1+megatron:p2", "actor.megatron.virtual_pipeline_size=2"]
    assert load_checked(*critic, *layout).config.critic.megatron.virtual_pipeline_size == 2
    for overrides, words in (
        (["actor.algorithm=ppo"], "actor.algorithm ppo needs a section critic"),
        ([*critic, "actor.algorithm=rloo"], "critic has no effect with actor.algorithm rloo"),
        (
            [*critic, "critic.is_critic=false"],
            "critic.is_critic false can't be used, because a critic has one output",
        ),
        ([*critic, "critic.ppo_n_minibatches=99"], "critic.ppo_n_minibatches 99 must not exceed"),
        ([*critic, "critic.optimizer=null"], "critic.optimizer null would train nothing"),
        (
            [*critic, layout[0], "critic.megatron.virtual_pipeline_size=2"],
            "the critic is divided among the ranks as actor is",
        ),
    ):
        with pytest.raises(ConfigError, match=words):
            load_checked(*overrides)


@pytest.mark.parametrize("named", ["trainer=dpo", "train_dataset.type=dpo"])
def test_a_dpo_trial_is_named_by_trainer_or_by_its_rows(named):
    reference = ["ref.path=/r", "model.megatron.recompute_num_layers=2", "allocation_mode=megatron:d2"]
    config = load_checked(named, "model.beta=0.2", *reference, base=SFT).config
    assert (config.trainer, config.train_dataset.type, config.model.beta) == ("dpo", "dpo", 0.2)
    assert (config.model.is_critic, config.model.mb_spec.granularity) == (False, 2)
    assert (config.ref.path, config.ref.megatron.recompute_num_layers) == ("/r", 2)
    for overrides, words in (
        (["model.is_critic=true"], "model.is_critic true: only trainer rw trains"),
        (["model.mb_spec.granularity=3"], "would put `chosen` and `rejected` of a pair"),
        (["model.label_smoothing=0.5"], "model.label_smoothing"),
        (["model.loss_type=ipo", "model.label_smoothing=0.1"], "has no effect with model.loss_type ipo"),
        (
            ["ref.path=/r", "ref.optimizer.lr=1e-3"],
            "ref.optimizer.lr has no effect, because the reference model is not trained",
        ),
        (["ref.path=/r", "ref.megatron.ddp.bucket_size=9"], "set model.megatron.ddp.bucket_size"),
    ):
        with pytest.raises(ConfigError, match=words):
            load_checked(named, *overrides, base=SFT)


@pytest.mark.parametrize("named", ["trainer=rw", "train_dataset.type=rw"])
def test_a_reward_model_trial_is_named_by_trainer_or_by_its_rows(named):
    loaded = load_checked(named, "valid_dataset.path=/v.jsonl", base=SFT)
    config = loaded.config
    assert (config.trainer, config.train_dataset.type, config.valid_dataset.type) == ("rw", "rw", "rw")
    assert (config.model.is_critic, config.model.mb_spec.granularity) == (True, 2)
    assert load_checked(named, "model.is_critic=true", "model.mb_spec.granularity=4", base=SFT)
    for override, words in (
        (
            "model.is_critic=false",
            "model.is_critic false can't be used, because a reward model has one output",
        ),
        ("model.mb_spec.granularity=3", "would put `chosen` and `rejected` of a pair"),
        (
            "model.mb_spec.max_seqs_per_mb=1",
            "must be at least model.mb_spec.granularity 2",
        ),
    ):
        with pytest.raises(ConfigError, match=words):
            load_checked(named, override, base=SFT)
    with pytest.raises(ConfigError, match="only trainer rw trains"):
        load_checked("model.is_critic=true", base=SFT)


def test_what_a_section_does_not_name_keeps_defaults_that_adapt(tmp_path):
    file = tmp_path / "ref.yaml"
    file.write_text(
        "ref: {path: /m, optimizer: null, backend: fsdp}\nactor: {optimizer: {type: adam, lr: 1.0e-5}}\n"
    )
    loaded = check(load([file], GRPO), files=False)
    assert (loaded.config.ref.dtype, loaded.config.ref.attn_impl, loaded.config.ref.optimizer) == (
        "float32",
        "sdpa",
        None,
    )
    assert "actor.optimizer.lr" in loaded.explicit and "actor.optimizer.beta1" not in loaded.explicit


def test_names_that_areal_files_repeat_pass():
    plain = load_checked("cluster.fileroot=/r")
    names = ["actor.experiment_name=toy", "actor.trial_name=${trial_name}", "rollout.trial_name=null"]
    places = ["saver.fileroot=/r/", "recover.fileroot=${saver.fileroot}", "checkpointer.fileroot=/r"]
    repeated = load_checked("cluster.fileroot=/r", *names, *places)
    assert (repeated.config, repeated.notes) == (plain.config, plain.notes)


def test_recover_saves_every_ten_minutes_by_default():
    loaded = load_checked("recover.mode=auto")
    assert loaded.config.recover.freq_secs == 600
    assert any("a checkpoint is saved every 600 s" in note for note in map(str, loaded.notes))
    assert load_checked("recover.mode=auto", "recover.freq_steps=5").config.recover.freq_secs is None
    assert any(
        "no effect" in note
        for note in map(str, load_checked("recover.mode=disabled", "recover.freq_steps=5").notes)
    )


def test_all_refusals_come_at_once():
    with pytest.raises(ConfigError) as caught:
        load_checked("trial_name=a/b", "actor.group_size=2", "gconfig.greedy=true")
    assert len(str(caught.value).splitlines()) == 3


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 32}))
    (folder / "model.safetensors").write_bytes(NO_TENSORS)
    (folder / "tokenizer.json").touch()
    (tmp_path / "t.jsonl").write_text('{"prompt": "1", "answer": "1"}')
    return folder


def load_from_disk(model: Path, *overrides: str) -> Loaded:
    return load_checked(
        f"actor.path={model}", f"train_dataset.path={model.parent / 't.jsonl'}", *overrides, files=True
    )


def test_a_model_and_dataset_that_are_there(model):
    assert load_from_disk(model).config.actor.path == str(model)
    (model / "model.safetensors").unlink()
    assert load_from_disk(model, "actor.init_from_scratch=true").config.actor.init_from_scratch


@pytest.mark.parametrize(
    ("spoil", "overrides", "words"),
    [
        (lambda m: None, ["actor.path=quickstart/nowhere"], "`hpc-rl quickstart` makes the models"),
        (
            lambda m: None,
            ["actor.path=Qwen/Qwen2.5-1.5B"],
            "is not a directory: it must be a Hugging Face checkpoint",
        ),
        (lambda m: (m / "config.json").unlink(), [], "has no readable config.json"),
        (
            lambda m: (m / "config.json").rename(m / "adapter_config.json"),
            [],
            "has an adapter instead of a whole model",
        ),
        (lambda m: (m / "model.safetensors").unlink(), [], "contains no weights"),
        (lambda m: (m / "model.safetensors").write_bytes(b""), [], "model.safetensors is damaged or cut off"),
        (lambda m: (m / "tokenizer.json").unlink(), [], "has no tokenizer.json"),
        (lambda m: None, ["ref.path=/nowhere"], "ref.path /nowhere is not a directory"),
        (lambda m: None, ["ref.path="], "ref.path is empty; set it to the directory"),
        (
            lambda m: None,
            ["gconfig.max_new_tokens=32", "eval_gconfig.top_p=0.9", "valid_dataset.path=t.jsonl"],
            "max_position_embeddings) is 32",
        ),
        (
            lambda m: None,
            ["eval_gconfig.max_new_tokens=32", "valid_dataset.path=t.jsonl"],
            "eval_gconfig.max_new_tokens 32 leaves no room for a prompt",
        ),
        (
            lambda m: None,
            ["train_dataset.max_length=20"],
            "and gconfig.max_new_tokens 16 make 36 tokens, but the model's context",
        ),
        (
            lambda m: None,
            ["train_dataset.path=/nowhere.jsonl"],
            "train_dataset.path /nowhere.jsonl does not exist",
        ),
        (
            lambda m: (m.parent / "t.csv").touch(),
            ["valid_dataset.path=t.csv"],
            "allowed: a .jsonl or .parquet file",
        ),
    ],
)
def test_refusals_about_files(model, monkeypatch, spoil, overrides, words):
    monkeypatch.chdir(model.parent)
    spoil(model)
    with pytest.raises(ConfigError) as caught:
        load_from_disk(model, *overrides)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_where_relative_paths_start_is_said_of_relative_ones(model):
    with pytest.raises(ConfigError, match=r"rows\.jsonl does not exist; relative paths start at the working"):
        load_from_disk(model, "train_dataset.path=rows.jsonl")
    with pytest.raises(ConfigError, match=r"/no/rows\.jsonl does not exist\. "):
        load_from_disk(model, "train_dataset.path=/no/rows.jsonl")


def test_a_directory_must_be_a_saved_dataset(model):
    folder = model.parent / "data"
    folder.mkdir()
    option = f"train_dataset.path={folder}"
    with pytest.raises(
        ConfigError, match=r"is a directory without a saved Hugging Face dataset \(it has no state.json\)\."
    ):
        load_from_disk(model, option)
    (folder / "train.jsonl").touch()
    with pytest.raises(ConfigError, match=f"did you mean {folder}/train.jsonl"):
        load_from_disk(model, option)
    (folder / "test").mkdir()
    (folder / "test" / "state.json").touch()
    with pytest.raises(ConfigError, match=f"has the splits test: use the path of one, such as {folder}/test"):
        load_from_disk(model, option)
    assert load_from_disk(model, f"{option}/test").config.train_dataset.path == f"{folder}/test"
    (model.parent / "t.jsonl").write_text("")
    with pytest.raises(ConfigError, match=r"train_dataset.path .*t\.jsonl is empty"):
        load_from_disk(model)


def test_what_only_compute_nodes_see_is_trusted_and_noted(model, tmp_path):
    slurm = "launcher.type=slurm"
    given = ["actor.path=/nvme-of-nodes/model", "train_dataset.path=/nvme-of-nodes/t.jsonl", slurm]
    notes = [
        note for note in map(str, load_from_disk(model, *given).notes) if "the job will check it" in note
    ]
    assert [note.split(" does")[0] for note in map(str, notes)] == [
        "actor.path /nvme-of-nodes/model",
        "train_dataset.path /nvme-of-nodes/t.jsonl",
    ]
    hidden = f"train_dataset.path={tmp_path}/hidden/t.jsonl"
    with pytest.raises(ConfigError, match=r"train_dataset\.path .* does not exist"):
        load_from_disk(model, hidden, slurm)
    assert load_from_disk(model, hidden, slurm, f"cluster.node_dirs=[{tmp_path}/hidden]")
    with pytest.raises(ConfigError, match=r"actor\.path /nvme-of-nodes/model is not a directory"):
        load_from_disk(model, *given, "launcher.type=local")


def test_a_node_that_lacks_a_model_ends_the_job_by_its_name(model):
    config = load_from_disk(model, "actor.path=/nvme-of-nodes/model", "launcher.type=slurm").config
    with pytest.raises(ConfigError, match=r"^actor\.path /nvme-of-nodes/model does not exist on node n7"):
        check_on_node(config, "n7")


def test_a_job_that_starts_again_waits_for_a_mount_that_is_away(model):
    away = model.with_name("away")
    config = load_from_disk(model, "launcher.type=slurm").config
    model.rename(away)
    back = threading.Timer(0.2, away.rename, [model])
    back.start()
    check_inputs(Trial(model.parent / "trial").attempt("7.1"), config)
    back.join()


def test_a_server_of_layout_jobs_needs_no_dataset(model):
    trial = Trial(model.parent / "trial")
    config = load_from_disk(model, "train_dataset.path=/nvme-of-nodes/t.jsonl", "launcher.type=slurm").config
    check_inputs(trial.attempt("7_0.0"), config)
    with pytest.raises(
        ConfigError, match=r"^train_dataset\.path /nvme-of-nodes/t\.jsonl does not exist on node"
    ):
        check_inputs(trial.attempt("7.0"), config)


def test_a_fileroot_in_the_memory_of_one_node(model, monkeypatch):
    monkeypatch.setattr("hpc_rl.config.rules.file_rules.mount_of", lambda path: ("tmpfs", []))
    with pytest.raises(
        ConfigError,
        match=r"cluster\.fileroot .* is on tmpfs, which only this node sees, but the trial has 2 nodes",
    ):
        load_from_disk(model, "--n_nodes=2")
    assert load_from_disk(model, "--n_nodes=1").config.cluster.n_nodes == 1
    monkeypatch.setattr("hpc_rl.config.rules.file_rules.mount_of", lambda path: ("xfs", []))
    assert any(
        "is on xfs, a disk of this machine" in note
        for note in map(str, load_from_disk(model, "--n_nodes=2").notes)
    )
    assert not any("xfs" in note for note in map(str, load_from_disk(model, "--n_nodes=1").notes))


@pytest.mark.parametrize(
    ("overrides", "base", "budget"),
    [
        ([], GRPO, 32768),
        (["gconfig.max_tokens=50000"], GRPO, 50000),
        (["gconfig.max_new_tokens=40000", "train_dataset.max_length=2000"], GRPO, 42000),
        (["gconfig.max_new_tokens=40000"], GRPO, 65536),
        (["train_dataset.max_length=40000"], SFT, 40000),
        (["trainer=rw", "train_dataset.max_length=40000"], SFT, 80000),
        (["valid_dataset={path: /v, max_length: 50000}"], SFT, 50000),
    ],
)
def test_a_micro_batch_on_gpus_is_limited_by_default(overrides, base, budget):
    section = "actor" if base is GRPO else "model"
    name = f"{section}.mb_spec.max_tokens_per_mb"
    gpus = ["cluster.n_gpus_per_node=8"]
    gpus += ["sglang.context_length=65536"] if base is GRPO else []
    found = load_checked(*overrides, *gpus, base=base)
    assert get_value(found.config, name) == budget
    assert any(
        note.startswith(f"{name} is {budget} instead of the default null") for note in map(str, found.notes)
    )
    assert get_value(load_checked(*overrides, *gpus, f"{name}=null", base=base).config, name) is None
    assert get_value(load_checked(*overrides, base=base).config, name) is None


def test_rows_of_unknown_length_are_limited_with_the_micro_batch():
    found = load_checked("cluster.n_gpus_per_node=8", base=SFT)
    assert found.config.train_dataset.max_length == 32768
