"""The configuration of a trial, one class per trainer; its length in steps, and access by dotted names."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from hpc_rl.config.options.cluster import ClusterSpecConfig, LauncherConfig
from hpc_rl.config.options.dataset import DatasetConfig, PromptDatasetConfig
from hpc_rl.config.options.distillation import DistillationConfig
from hpc_rl.config.options.environments import EnvironmentsConfig
from hpc_rl.config.options.inference import (
    EmbeddedConfig,
    GenerationHyperparameters,
    InferenceEngineConfig,
    SGLangConfig,
    VLLMConfig,
)
from hpc_rl.config.options.limits import NonNegativeInt, PathText, PositiveInt
from hpc_rl.config.options.operations import (
    EvaluatorConfig,
    RecoverConfig,
    SaverConfig,
    StatsLoggerConfig,
)
from hpc_rl.config.options.pools import PoolConfig, PoolName
from hpc_rl.config.options.teacher import TeachingConfig
from hpc_rl.config.options.training import (
    DPOEngineConfig,
    PPOActorConfig,
    PPOCriticConfig,
    TrainEngineConfig,
)
from hpc_rl.config.options.weights import WeightsConfig
from hpc_rl.core.errors import ConfigError
from hpc_rl.core.refusal import Kind, Refusal

TrainerName = Literal["grpo", "teacher", "sft", "rw", "dpo"]
Purpose = Literal["train", "generate", "evaluate", "serve"]


@dataclass(kw_only=True)
class BaseExperimentConfig:
    """Options of every trial."""

    experiment_name: str
    """Name of the experiment; groups related trials."""
    trial_name: str
    """Name of the trial; unique within the experiment."""
    trainer: TrainerName | None = None
    """Trainer; null derives it from the sections: `teacher` means teacher; `actor` grpo; `model` means rw or
    dpo if that is train_dataset.type, else sft."""
    seed: NonNegativeInt = 1
    """Random seed."""
    allocation_mode: str = ""
    """How devices are divided between generation servers and the trainer, such as `sglang:d4+fsdp:d4` or
    `embedded:d1+fsdp:d1`. With `|`, as in `sglang:d8|fsdp:d8`, both use the same devices in turn. Empty means
    derived."""
    total_train_epochs: PositiveInt | None = 1
    """Number of passes over the training data. Defaults to null (as many as needed) when either of the next
    two options is set."""
    total_train_steps: PositiveInt | None = None
    """Stop after N steps; null means no such limit."""
    total_train_n_seqs: PositiveInt | None = None
    """Stop after N sequences (prompts times samples for grpo). Of several limits the earliest applies."""
    tokenizer_path: PathText = ""
    """Directory of the tokenizer; empty means the model's."""
    cluster: ClusterSpecConfig = field(default_factory=ClusterSpecConfig)
    """The cluster that the trial runs on."""
    train_dataset: DatasetConfig
    """Training data."""
    valid_dataset: DatasetConfig | None = None
    """Held-out data, read in the order of the file: `batch_size`, `shuffle` and `drop_last` mean nothing."""
    saver: SaverConfig = field(default_factory=SaverConfig)
    """Exports in Hugging Face format."""
    evaluator: EvaluatorConfig = field(default_factory=EvaluatorConfig)
    """When to evaluate."""
    stats_logger: StatsLoggerConfig = field(default_factory=StatsLoggerConfig)
    """Where metrics go."""
    recover: RecoverConfig = field(default_factory=RecoverConfig)
    """Checkpoints."""
    sglang: SGLangConfig = field(default_factory=SGLangConfig)
    """SGLang servers, if the allocation has them."""
    launcher: LauncherConfig = field(default_factory=LauncherConfig)
    """How processes are started."""
    callbacks: list[str] = field(default_factory=list)
    """Classes `package.module:Class` whose methods on_step, on_evaluation, on_checkpoint and on_end the
    trainer calls on rank 0. Their errors are logged and counted in `hpc-rl status`. hpc-rl extension."""


@dataclass(kw_only=True)
class GRPOConfig(BaseExperimentConfig):
    """A GRPO trial."""

    train_dataset: PromptDatasetConfig
    """Training prompts."""
    purpose: Purpose = "train"
    """What the trial does. `train` has a trainer; the others have servers alone: `generate` answers the
    prompts of train_dataset, `evaluate` the prompts of valid_dataset, and `serve` answers requests of
    OpenAI's API. The commands of these names set it. hpc-rl extension."""
    keep_best_samples: PositiveInt | None = None
    """Completions per prompt, the best ones by reward, in the file of purpose `generate`; null means all.
    hpc-rl extension."""
    async_training: bool = True
    """Generate while training; false alternates the two, so that the newest weights make each batch."""
    gconfig: GenerationHyperparameters = field(default_factory=GenerationHyperparameters)
    """Sampling of completions."""
    eval_gconfig: GenerationHyperparameters | None = None
    """Sampling in evaluations: one completion per held-out prompt, or the mean reward of n_samples. Options
    that are not given here follow `gconfig`. hpc-rl extension."""
    rollout: InferenceEngineConfig = field(default_factory=InferenceEngineConfig)
    """The rollout role."""
    actor: PPOActorConfig
    """The policy."""
    critic: PPOCriticConfig | None = None
    """The value model of PPO, trained in the same ranks; null means none. A section selects algorithm ppo."""
    ref: TrainEngineConfig | None = None
    """The frozen reference model, in the trainer's ranks: for actor.kl_ctl and actor.beta, where null means
    none, and for dpo, where null means `model` as it is before training."""
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    """Published weights. hpc-rl extension."""
    vllm: VLLMConfig = field(default_factory=VLLMConfig)
    """vLLM servers, if the allocation has them. hpc-rl extension."""
    embedded: EmbeddedConfig = field(default_factory=EmbeddedConfig)
    """Embedded servers, if the allocation has them."""
    pools: dict[PoolName, PoolConfig] = field(default_factory=dict)
    """Models that answer or score but are never trained, by name: every pool of `allocation_mode` except the
    trained one, and external endpoints. hpc-rl extension."""
    distillation: DistillationConfig | None = None
    """The teacher of actor.algorithm opd, opsd and sft_distill; null means none. hpc-rl extension."""
    environments: EnvironmentsConfig | None = None
    """Environments that feed the trial from outside; null means none."""


@dataclass(kw_only=True)
class TeacherConfig(GRPOConfig):
    """A trial that trains a teacher, by GRPO, to make a student answer better."""

    teacher: TeachingConfig = field(default_factory=TeachingConfig)
    """How to probe and teach the student in pool `student`, and the teacher's reward."""


@dataclass(kw_only=True)
class SFTConfig(BaseExperimentConfig):
    """A supervised fine-tuning trial."""

    model: TrainEngineConfig
    """The model."""


@dataclass(kw_only=True)
class RWConfig(BaseExperimentConfig):
    """A reward-model trial, on rows with a chosen and a rejected text."""

    model: TrainEngineConfig
    """The model; its head is replaced by a scalar one."""


@dataclass(kw_only=True)
class DPOConfig(BaseExperimentConfig):
    """A trial of direct preference optimization, on rows with a chosen and a rejected text."""

    model: DPOEngineConfig
    """The policy."""
    ref: TrainEngineConfig | None = None
    """The frozen reference model, in the trainer's ranks: for actor.kl_ctl and actor.beta, where null means
    none, and for dpo, where null means `model` as it is before training."""


Config = GRPOConfig | SFTConfig | RWConfig | DPOConfig
CONFIGS: dict[str, type] = {
    "grpo": GRPOConfig,
    "teacher": TeacherConfig,
    "sft": SFTConfig,
    "rw": RWConfig,
    "dpo": DPOConfig,
}
HELD_OUT_SETS = "evaluator.sets."
LENGTH_OPTIONS = ("total_train_steps", "total_train_epochs", "total_train_n_seqs")


def find_loaded_reference(config: GRPOConfig | DPOConfig) -> TrainEngineConfig | None:
    """Return the section of a reference model that is loaded beside the policy, if any.

    With an adapter, its frozen base is the reference model, unless `ref` names another one.
    """
    ref, policy = config.ref, config.actor if isinstance(config, GRPOConfig) else config.model
    if isinstance(config, GRPOConfig) and not (config.actor.kl_ctl or config.actor.beta):
        return None
    if policy.use_lora and (ref is None or ref.path == policy.path):
        return None
    return policy if ref is None and isinstance(config, DPOConfig) else ref


def has_own_prompts(config: Config) -> bool:
    """Return whether the trial reads `train_dataset`; it does not if it trains on environments alone."""
    if not isinstance(config, GRPOConfig):
        return True
    if config.purpose in ("evaluate", "serve"):
        return False
    return config.environments is None or config.environments.own_prompts


def has_trainer(config: Config) -> bool:
    """Return whether the trial trains; without a trainer it has servers and the rollout role only."""
    return not isinstance(config, GRPOConfig) or config.purpose == "train"


def list_datasets(config: Config) -> Iterator[tuple[str, DatasetConfig]]:
    """Yield section and data set of all data that the configuration names, with the sets of a mixture."""
    train = config.train_dataset
    parts = train.parts if isinstance(train, PromptDatasetConfig) else {"": train}
    for name, part in parts.items():
        yield f"train_dataset.{name}" if name else "train_dataset", part
    if config.valid_dataset is not None:
        yield "valid_dataset", config.valid_dataset
        for name, one in config.evaluator.sets.items():
            kind = config.valid_dataset.type
            yield f"{HELD_OUT_SETS}{name}", DatasetConfig(path=one.path, columns=one.columns, type=kind)


def list_training_paths(config: Config) -> list[str]:
    """Return the paths of the training data, with the sets of a mixture; of an evaluation, of its data."""
    if isinstance(config, GRPOConfig) and config.purpose == "evaluate":
        return [one.path for name, one in list_datasets(config) if name == "valid_dataset"]
    return [one.path for name, one in list_datasets(config) if not is_held_out(name)]


def is_held_out(section: str) -> bool:
    """Return whether a section of list_datasets is evaluated, not trained on."""
    return section.startswith(("valid_dataset", HELD_OUT_SETS))


def count_steps(config: Config, num_rows: int) -> int:
    """Return the number of steps of a trial: the smallest limit of `LENGTH_OPTIONS`.

    Raises ConfigError if the passes over the data make no whole batch.
    """
    steps = find_last_step(config, num_rows)
    assert steps is not None, "rules/check.py requires one of LENGTH_OPTIONS"
    if steps < 1:
        size = config.train_dataset.batch_size
        raise ConfigError(
            Refusal(
                option="train_dataset.batch_size",
                value=size,
                kind=Kind.FILE,
                why=f": {config.total_train_epochs} epoch(s) of {num_rows} rows make no whole batch",
                use="lower it, raise total_train_epochs, or set total_train_steps",
                related=("total_train_epochs", "train_dataset.path"),
            )
        )
    return steps


def find_last_step(config: Config, num_rows: int | None) -> int | None:
    """Return an upper bound of the number of steps; `num_rows` counts rows before `max_length` drops any.

    Returns None if only `total_train_epochs` is set and the number of rows is unknown.
    """
    size = config.train_dataset.batch_size
    bounds = [config.total_train_steps] if config.total_train_steps is not None else []
    if config.total_train_n_seqs is not None:
        num_samples = config.gconfig.n_samples if isinstance(config, GRPOConfig) else 1
        bounds.append(-(-config.total_train_n_seqs // (size * num_samples)))
    if config.total_train_epochs is not None and num_rows is not None and has_own_prompts(config):
        rows = config.total_train_epochs * num_rows
        bounds.append(rows // size if config.train_dataset.drop_last else -(-rows // size))
    return min(bounds, default=None)


class _Absent:
    def __bool__(self) -> bool:
        return False


ABSENT: Any = _Absent()


def get_value(config: Any, name: str) -> Any:
    """Return the value of a dotted option, or ABSENT if a section is missing or null."""
    for part in name.split("."):
        config = config.get(part, ABSENT) if isinstance(config, dict) else getattr(config, part, ABSENT)
    return config


def replace_value(section: Any, path: list[str], value: Any) -> Any:
    """Return a copy of a section with one option changed."""
    if len(path) > 1:
        value = replace_value(get_value(section, path[0]), path[1:], value)
    if isinstance(section, dict):
        return section | {path[0]: value}
    return dataclasses.replace(section, **{path[0]: value})
