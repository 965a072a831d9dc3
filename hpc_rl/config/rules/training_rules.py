"""Rules about models in the trainer (sections `actor`, `ref` and `model`), and their adapted defaults."""

from collections.abc import Collection, Iterator
from typing import Any

from hpc_rl.config.options.experiment import (
    Config,
    DPOConfig,
    GRPOConfig,
    RWConfig,
    TeacherConfig,
    get_value,
    replace_value,
)
from hpc_rl.config.options.inference import GenerationHyperparameters
from hpc_rl.config.options.training import PPOActorConfig, TrainEngineConfig
from hpc_rl.config.rules.consistency import is_default
from hpc_rl.core.refusal import Kind, Refusal, make_idle_note, make_note

_ONLY_FOR_TRAINING = (
    *("gradient_checkpointing", "disable_dropout", "grad_reduce_dtype"),
    "fsdp.offload_activations",
)
_LOSS_SCALE = ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
TOKENS_PER_MB = 32768  # default limit on GPUs, because one micro-batch of all rows would be too large
FLASH_PACKAGES = {"flash_attention_3": "flash-attn-3", "flash_attention_2": "flash-attn"}  # of attn_impl
HIGH_LR, MAX_LR = 0.01, 1.0  # for Adam: a step moves each weight by about the learning rate


def refuse_without_gpus(option: str, value: Any, allowed: str) -> Refusal:
    """Return the refusal of a value that needs GPUs."""
    return Refusal(
        option=option,
        value=value,
        kind=Kind.MACHINE,
        why="can't be used without GPUs (cluster.n_gpus_per_node 0)",
        use=f"allowed: {allowed}",
        related=("cluster.n_gpus_per_node",),
    )


def find_trained_model(config: Config) -> tuple[str, TrainEngineConfig]:
    """Return name and section of the trained model, with a critic the policy."""
    return ("actor", config.actor) if isinstance(config, GRPOConfig) else ("model", config.model)


def list_trained_models(config: Config) -> Iterator[tuple[str, TrainEngineConfig]]:
    """Yield name and section of each model that is trained: the policy first, then the critic."""
    yield find_trained_model(config)
    if isinstance(config, GRPOConfig) and config.critic is not None:
        yield "critic", config.critic


def list_models(config: Config) -> Iterator[tuple[str, TrainEngineConfig]]:
    """Yield name and section of each model in the trainer's ranks."""
    yield from list_trained_models(config)
    if (reference := find_reference(config)) is not None:
        yield "ref", reference


def find_reference(config: Config) -> TrainEngineConfig | None:
    """Return the section of the reference model, if it is given."""
    return config.ref if isinstance(config, GRPOConfig | DPOConfig) else None


def list_samplings(config: GRPOConfig) -> dict[str, GenerationHyperparameters]:
    """Return the sections with sampling options of the trained model that the purpose uses."""
    if config.purpose == "serve":  # each request has its own
        return {}
    if config.eval_gconfig is None or config.purpose == "generate":
        return {"gconfig": config.gconfig}
    held_out = {"eval_gconfig": config.eval_gconfig}
    return held_out if config.purpose == "evaluate" else {"gconfig": config.gconfig, **held_out}


def adapt_defaults(config: Config, explicit: Collection[str]) -> dict[str, tuple[Any, str]]:
    """Return option -> (new default, reason); an empty reason means no note."""
    wanted: dict[str, tuple[Any, str]] = {}
    together = "model.mb_spec.granularity"
    if isinstance(config, RWConfig | DPOConfig):
        wanted = {together: (2, "")}
        if isinstance(config, RWConfig):
            wanted["model.is_critic"] = (True, "")
        if together not in explicit:
            config = replace_value(config, together.split("."), 2)
    budgets = _choose_token_budgets(config, explicit)
    wanted |= budgets
    for name, (budget, _) in budgets.items():
        config = replace_value(config, name.split("."), budget)
    if not config.cluster.n_gpus_per_node:
        for section, _ in list_models(config):
            wanted[f"{section}.dtype"] = ("float32", "the plan has no GPUs")
            wanted[f"{section}.attn_impl"] = ("sdpa", "the plan has no GPUs")
    for section, engine in list_models(config):
        if engine.dtype == "float32" and config.cluster.n_gpus_per_node:
            wanted[f"{section}.attn_impl"] = ("sdpa", f"{section}.dtype is float32")
    for name, bound, limit in sorted(find_too_long(config), key=lambda one: -one[1]):
        wanted[name] = (bound, f"{limit} does not allow more")
    if config.total_train_steps is not None or config.total_train_n_seqs is not None:
        wanted["total_train_epochs"] = (None, "")
    if isinstance(config, TeacherConfig):
        wanted |= {"rollout.workflow": ("teacher", ""), "rollout.reward_fn": ("final_answer", "")}
    if isinstance(config, GRPOConfig):
        if config.ref is None and config.actor.algorithm != "areal":
            wanted["actor.kl_ctl"] = (0.0, "")  # no reference model
        elif config.actor.beta:
            wanted["actor.kl_ctl"] = (0.0, "actor.beta is the KL term, in the loss")
        if needs_recompute(config.actor):
            wanted["actor.recompute_logprob"] = (True, "")
    return wanted


def _choose_token_budgets(config: Config, explicit: Collection[str]) -> dict[str, tuple[Any, str]]:
    """Return a token limit, which holds the longest sequence, for micro-batches on GPUs without a limit."""
    if not config.cluster.n_gpus_per_node:
        return {}
    longest, reason = _find_longest(config, explicit), "the plan has GPUs, whose memory limits a micro-batch"
    return {
        name: (max(TOKENS_PER_MB, longest * engine.mb_spec.granularity), reason)
        for section, engine in list_models(config)
        if (name := f"{section}.mb_spec.max_tokens_per_mb") not in explicit
        and engine.mb_spec.max_tokens_per_mb is None
    }


def _find_longest(config: Config, explicit: Collection[str]) -> int:
    """Return the tokens of the longest sequence, or 0 if the configuration does not tell."""
    if isinstance(config, GRPOConfig):
        g, prompt = config.gconfig, config.train_dataset.max_length
        if prompt is not None:
            return min(g.max_tokens, prompt + g.max_new_tokens)
        given = "gconfig.max_tokens" in explicit or g.max_new_tokens >= TOKENS_PER_MB
        return g.max_tokens if given else 0
    datasets = (config.train_dataset, config.valid_dataset)
    return max((rows.max_length or 0 for rows in datasets if rows is not None), default=0)


def find_too_long(config: Config) -> Iterator[tuple[str, int, str]]:
    """Yield (option, largest value, limiting option) if a sequence could exceed a micro-batch."""
    for section, engine in list_models(config):
        name, limit = f"{section}.mb_spec.max_tokens_per_mb", engine.mb_spec.max_tokens_per_mb
        if limit is None:
            continue
        bound = limit // engine.mb_spec.granularity  # neighbours stay together
        if isinstance(config, GRPOConfig):
            g, prompt = config.gconfig, config.train_dataset.max_length
            longest = g.max_tokens if prompt is None else min(g.max_tokens, prompt + g.max_new_tokens)
            # If not even a completion fits, generation_rules.check_lengths refuses.
            if longest > bound > g.max_new_tokens:
                yield "gconfig.max_tokens", bound, name
            continue
        for dataset in ("train_dataset", "valid_dataset"):
            rows = getattr(config, dataset)
            if rows is not None and (rows.max_length is None or rows.max_length > bound) and bound:
                yield f"{dataset}.max_length", bound, name


def list_notes(config: GRPOConfig) -> Iterator[Refusal]:
    """Yield notes about options that are harmless but have no effect."""
    actor = config.actor
    for name in ("reward_norm", "adv_norm"):
        norm = getattr(actor, name)
        idle = [one for one in ("std_unbiased", "eps") if not is_default(config, f"actor.{name}.{one}")]
        if norm is not None and norm.std_level is None and idle:
            names = [f"actor.{name}.{one}" for one in idle]
            yield make_idle_note(names, f"actor.{name}.std_level is null")
    if not actor.overlong_reward_penalty:
        for name in ("overlong_tokens", "overlong_penalty_factor"):
            if getattr(actor, name) is not None:
                yield make_idle_note([f"actor.{name}"], "actor.overlong_reward_penalty is false")
    if actor.log_agent_stats_keys and not actor.log_agent_stats:
        yield make_idle_note(["actor.log_agent_stats_keys"], "actor.log_agent_stats is false")
    if actor.algorithm == "areal" and actor.kl_ctl and config.ref is None and not actor.use_lora:
        why = "rewards improbable tokens, as in AReaL, because there is no reference model"
        yield make_note("actor.kl_ctl", why, value=f"{actor.kl_ctl:g}", related=("actor.algorithm", "ref"))
    if config.ref is None:
        return
    if actor.kl_ctl and actor.beta:
        why = ": actor.beta is set as well, so the KL term counts in the reward and in the loss"
        yield make_note("actor.kl_ctl", why, related=("actor.beta",))
    if not (actor.kl_ctl or actor.beta):
        why = "has no effect, and the reference model is not loaded: actor.kl_ctl and actor.beta are 0"
        yield make_note("ref", why, Kind.NO_EFFECT, related=("actor.kl_ctl", "actor.beta"))


def list_reference_notes(config: Config) -> Iterator[Refusal]:
    idle = [f"ref.{name}" for name in _ONLY_FOR_TRAINING if not is_default(config, f"ref.{name}")]
    if find_reference(config) is not None and idle:
        yield make_idle_note(idle, "the reference model is not trained")


def list_learning_rate_notes(config: Config) -> Iterator[Refusal]:
    for section, engine in list_trained_models(config):
        optimizer = engine.optimizer
        if optimizer is not None and optimizer.type != "empty" and HIGH_LR < optimizer.lr < MAX_LR:
            usual = "usual are 1e-7 to 1e-5 for reinforcement learning, up to 1e-3 for small models"
            why, value = f"is very high: {usual}", f"{optimizer.lr:g}"
            yield make_note(f"{section}.optimizer.lr", why, value=value, is_warning=True)


def needs_recompute(actor: PPOActorConfig) -> bool:
    """Return whether the loss needs log-probabilities of the trainer, besides the servers'."""
    return (
        bool(actor.use_decoupled_loss or actor.rollout_correction) and actor.prox_logp_method != "loglinear"
    )


def check_policy_loss(config: GRPOConfig, explicit: Collection[str]) -> Iterator[Refusal]:
    actor, recompute = config.actor, "actor.recompute_logprob"
    if needs_recompute(actor) and recompute in explicit and not actor.recompute_logprob:
        other = f"actor.{'use_decoupled_loss' if actor.use_decoupled_loss else 'rollout_correction'}"
        yield Refusal(
            option=recompute,
            value="false",
            kind=Kind.CONFLICT,
            why=f"contradicts {other}, which needs recomputed log-probabilities",
            use="set it to true, or leave it out",
            related=(other,),
        )


def check_rewards(config: GRPOConfig, explicit: Collection[str]) -> Iterator[Refusal]:
    actor, budget, n_samples = config.actor, config.gconfig.max_new_tokens, config.gconfig.n_samples
    if actor.overlong_reward_penalty and (actor.overlong_tokens or 0) > budget:
        yield Refusal(
            option="actor.overlong_tokens",
            value=actor.overlong_tokens,
            kind=Kind.CONFLICT,
            why=f"must not exceed gconfig.max_new_tokens {budget}",
            related=("gconfig.max_new_tokens",),
        )
    if actor.dynamic_sampling and n_samples < 2:
        yield Refusal(
            option="gconfig.n_samples",
            value=n_samples,
            kind=Kind.CONFLICT,
            why=": actor.dynamic_sampling drops prompts with equal rewards, so it would drop every prompt",
            use="use at least 2",
            related=("actor.dynamic_sampling",),
        )


def check_reference_model(config: GRPOConfig, explicit: Collection[str]) -> Iterator[Refusal]:
    for name in ("kl_ctl", "beta"):
        value = getattr(config.actor, name)
        # Without a reference model a KL term would reward any improbable token.
        has_reference = config.ref is not None or config.actor.use_lora  # then the base is one
        if value and not has_reference and not (name == "kl_ctl" and config.actor.algorithm == "areal"):
            use = f"add a section ref with ref.path, or set actor.{name} to 0"
            yield Refusal(
                option=f"actor.{name}",
                value=f"{value:g}",
                kind=Kind.CONFLICT,
                why=f"needs a reference model: {use}",
                related=("ref", "ref.path"),
            )


def check_reference_optimizer(config: Config, explicit: Collection[str]) -> Iterator[Refusal]:
    reference = find_reference(config)
    if reference is None or reference.optimizer is None:
        return
    for name in vars(reference.optimizer):
        if name != "type" and not is_default(config, f"ref.optimizer.{name}"):
            yield Refusal(
                option=f"ref.optimizer.{name}",
                kind=Kind.NO_EFFECT,
                why="has no effect, because the reference model is not trained",
                use="remove ref.optimizer",
                related=("ref.optimizer",),
            )


GRPO_RULES = [check_policy_loss, check_rewards, check_reference_model]


def check_micro_batches(config: Config, explicit: Collection[str]) -> Iterator[Refusal]:
    # A sequence that exceeds a micro-batch would end the trial at its step.
    for name, bound, limit in find_too_long(config):
        yield Refusal(
            option=name,
            value=get_value(config, name),
            kind=Kind.CONFLICT,
            why=f"is too large: with {limit} a sequence can have at most {bound} tokens",
            use=f"reduce {name}, or increase {limit}",
            related=(limit,),
        )


def check_optimizers(config: Config, explicit: Collection[str]) -> Iterator[Refusal]:
    for section, engine in list_trained_models(config):
        yield from _check_optimizer(config, section, engine)


def _check_optimizer(config: Config, section: str, engine: TrainEngineConfig) -> Iterator[Refusal]:
    name, optimizer = f"{section}.optimizer", engine.optimizer
    if optimizer is None or optimizer.type == "empty":
        option, value = (name, "null") if optimizer is None else (f"{name}.type", "empty")
        why, use = "would train nothing", "use type adam"
        yield Refusal(option=option, value=value, kind=Kind.VALUE, why=why, use=use)
        return
    if optimizer.lr >= MAX_LR:
        yield Refusal(
            option=f"{name}.lr",
            value=f"{optimizer.lr:g}",
            kind=Kind.VALUE,
            why="is so large that the first step would destroy the model",
            use=f"use less than {MAX_LR:g}, such as 1e-5",
        )
    for option in _LOSS_SCALE:
        if engine.dtype != "float16" and not is_default(config, f"{name}.{option}"):
            why = f"has no effect with dtype {engine.dtype}: only float16 needs loss scaling"
            yield Refusal(option=f"{name}.{option}", kind=Kind.NO_EFFECT, why=why)


def check_attention(config: Config, explicit: Collection[str]) -> Iterator[Refusal]:
    on_gpus = config.cluster.n_gpus_per_node > 0
    allowed = ["sdpa", "eager", *(["flex_attention", *FLASH_PACKAGES] if on_gpus else [])]
    for section, engine in list_models(config):
        name, value = f"{section}.attn_impl", engine.attn_impl
        if value not in allowed and on_gpus:
            why, use = "can't be used", f"allowed: {', '.join(allowed)}"
            yield Refusal(option=name, value=value, kind=Kind.VALUE, why=why, use=use)
        elif value not in allowed:
            yield refuse_without_gpus(name, value, ", ".join(allowed))
        elif value in FLASH_PACKAGES and engine.dtype == "float32":
            yield Refusal(
                option=name,
                value=value,
                kind=Kind.CONFLICT,
                why=f"can't compute in {section}.dtype float32",
                use="use sdpa, or dtype bfloat16",
                related=(f"{section}.dtype",),
            )


def check_engines(config: Config, explicit: Collection[str]) -> Iterator[Refusal]:
    for section, engine in list_models(config):
        yield from _check_critic(config, section, engine)
    section, engine = find_trained_model(config)
    if isinstance(config, RWConfig | DPOConfig) and engine.mb_spec.granularity % 2:
        yield Refusal(
            option=f"{section}.mb_spec.granularity",
            value=engine.mb_spec.granularity,
            kind=Kind.VALUE,
            why="would put `chosen` and `rejected` of a pair into different micro-batches",
            use="remove it, or use 2",
        )


def _check_critic(config: Config, section: str, engine: TrainEngineConfig) -> Iterator[Refusal]:
    if isinstance(config, RWConfig) or section == "critic":
        if not engine.is_critic:
            yield Refusal(
                option=f"{section}.is_critic",
                value="false",
                kind=Kind.CONFLICT,
                why=f"can't be used, because a {'critic' if section == 'critic' else 'reward model'} "
                "has one output (a score)",
                use="remove it: it is true here",
            )
        return
    if engine.is_critic:
        is_actor = section == "actor"
        of_policy = ": a policy needs one output for each token of the vocabulary, not a single score"
        of_others = ": only trainer rw trains a model with a single score as its output"
        yield Refusal(
            option=f"{section}.is_critic",
            value="true",
            kind=Kind.CONFLICT,
            why=of_policy if is_actor else of_others,
            use="remove it",
            related=() if is_actor else ("trainer",),
        )


RULES = [check_engines, check_micro_batches, check_optimizers, check_attention, check_reference_optimizer]
