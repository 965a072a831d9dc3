"""Sections `saver`, `evaluator`, `recover` and `stats_logger`: periodic work."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from hpc_rl.config.options.dataset import SetName
from hpc_rl.config.options.limits import (
    AboveOne,
    NonNegativeFloat,
    NonNegativeInt,
    PathText,
    PositiveInt,
    PositiveShare,
)


@dataclass(kw_only=True)
class FrequencyConfig:
    """How often: whenever one of the three periods has passed. All null means never."""

    freq_epochs: PositiveInt | None = None
    """Every N epochs."""
    freq_steps: PositiveInt | None = None
    """Every N steps."""
    freq_secs: PositiveInt | None = None
    """Every N seconds."""


@dataclass(kw_only=True)
class KeepBestConfig:
    """Keep the best model by evaluation, as `exports/best`."""

    metric: str | None = None
    """Metric of an evaluation: `eval_reward`, or `eval_NAME/reward` of a further set (grpo), `eval_loss`
    (sft, rw), `eval_accuracy` (rw), `eval_token_accuracy` (sft), or `eval_accuracy_delta`, `eval_reward`,
    `eval_student_accuracy`,
    `eval_baseline_accuracy` and `eval_reward_<part>` (teacher), or `eval_<name>` if your own workflow puts
    <name> into `Trajectory.stats`; null means the trainer's first metric in this list."""
    mode: Literal["max", "min"] | None = None
    """Whether larger or smaller is better; null means `min` for a loss, else `max`."""
    as_final: bool = False
    """Make `exports/final` the best model instead of the last one."""


@dataclass(kw_only=True)
class SaverConfig(FrequencyConfig):
    """Exports in Hugging Face format, in `exports/`; one is always written at the end."""

    keep_last: PositiveInt | None = None
    """Number of most recent exports to keep, in addition to the final and the best one; null keeps all.
    hpc-rl extension."""
    keep_best: KeepBestConfig | None = None
    """Keep the best model by evaluation; null disables it. After a change of the held-out dataset, reward,
    workflow, teacher or pools, the next evaluation starts as the best. hpc-rl extension."""


@dataclass(kw_only=True)
class HeldOutSetConfig(FrequencyConfig):
    """A further held-out set of a GRPO trial. hpc-rl extension."""

    path: PathText
    """Its file or directory, as `valid_dataset.path`."""
    columns: dict[str, str] = field(default_factory=dict)
    """Columns with other names in its file, as `valid_dataset.columns`."""
    n_samples: PositiveInt | None = None
    """Completions per prompt."""
    max_new_tokens: PositiveInt | None = None
    """Largest number of tokens in a completion."""
    temperature: NonNegativeFloat | None = None
    """Sampling temperature."""
    top_p: PositiveShare | None = None
    """Nucleus sampling: probability mass to sample from; 1 means all."""
    greedy: bool | None = None
    """Always take the most likely token."""
    pass_reward: float = 1.0
    """Smallest reward of a completion that passes, for `eval_NAME/pass@k`."""


@dataclass(kw_only=True)
class EvaluatorConfig(FrequencyConfig):
    """Evaluation on `valid_dataset`.

    With this dataset one always runs after the last step, and in a GRPO trial also before the first.
    """

    blocking: bool = False
    """Pause training during an evaluation; false evaluates beside training. Trainers other than grpo and
    teacher always pause. hpc-rl extension."""
    server_share: PositiveShare = 0.25
    """Share of the servers that stay at the version of an evaluation until it is done, at least one. Has no
    effect if `allocation_mode` has servers for the pool `eval`. hpc-rl extension."""
    end_wait_s: PositiveInt = 3600
    """Longest time that the end of a trial waits for evaluations, in seconds. hpc-rl extension."""
    sets: dict[SetName, HeldOutSetConfig] = field(default_factory=dict)
    """Further held-out sets by name, each with its own metrics, such as `eval_NAME/reward`. A set without a
    period has `evaluator`'s; sampling options that are null follow `eval_gconfig`. hpc-rl extension."""
    keep_samples: NonNegativeInt = 32
    """Number of prompts, from the start of `valid_dataset`, whose completions each evaluation keeps for
    `hpc-rl samples`. hpc-rl extension."""
    pass_reward: float = 1.0
    """Smallest reward of a completion that passes, for `eval_pass@k` if `eval_gconfig.n_samples` is above 1.
    hpc-rl extension."""
    sets_column: str | None = None
    """Column of `valid_dataset` that names the set of a row. Each set gets its metrics, such as
    `eval_NAME/reward`; null measures all rows together only. hpc-rl extension."""


@dataclass(kw_only=True)
class RecoverConfig(FrequencyConfig):
    """Checkpoints, and how a start uses them."""

    mode: Literal["disabled", "auto", "fault", "resume"] = "disabled"
    """`disabled` neither saves nor loads checkpoints; `auto` loads the newest valid checkpoint, if any;
    `fault` only one of the same submission; `resume` loads one or exits with code 3."""
    retries: NonNegativeInt = 3
    """Restarts in a row without a new checkpoint before the trial gives up."""
    keep: PositiveInt = 2
    """Number of most recent checkpoints to keep. hpc-rl extension."""
    keep_every_steps: PositiveInt | None = None
    """Additionally keep every checkpoint whose step is a multiple of this; null disables it. hpc-rl
    extension."""
    keep_best: NonNegativeInt = 0
    """Additionally keep the N checkpoints with the best evaluation, by the metric of `saver.keep_best` or, if
    that is null, the trainer's own (reward, accuracy or loss). hpc-rl extension."""
    async_save: bool = False
    """Write checkpoints while training continues, from a copy in memory; false pauses training. hpc-rl
    extension."""
    hang_factor: AboveOne = 10.0
    """Treat the trial as hung after hang_factor × the 95th percentile of the step time without progress: dump
    stacks and restart the hung role. hpc-rl extension."""
    hang_min_s: PositiveInt = 300
    """Shortest time without progress that counts as a hang, in seconds. hpc-rl extension."""
    hang_max_s: PositiveInt = 3600
    """Longest time without progress before it counts as a hang, in seconds; it also applies to start-up and
    the first step. hpc-rl extension."""
    avoid_hours: NonNegativeInt = 24
    """Hours during which requeues and later submissions avoid a failed node; 0 disables it. hpc-rl extension.
    """


@dataclass(kw_only=True)
class TensorBoardConfig:
    """TensorBoard files."""

    path: PathText | None = None
    """Directory; null means `tensorboard/` in the trial's, one series for all attempts."""


@dataclass(kw_only=True)
class WandBConfig:
    """Weights & Biases, in addition to the files that are always written."""

    mode: Literal["online", "offline", "disabled"] = "disabled"
    """`online` sends metrics, `offline` writes files for `wandb sync`, `disabled` does neither."""
    wandb_base_url: str = ""
    """URL of the server; empty means the public one."""
    wandb_api_key: str = ""
    """Refused, because others may read the file. Run `wandb login`, or export WANDB_API_KEY before
    submitting."""
    entity: str | None = None
    """Team or user; null means your default."""
    project: str | None = None
    """Project; null means the experiment name."""
    name: str | None = None
    """Name of the run; null means the trial name."""
    job_type: str | None = None
    """Job type."""
    group: str | None = None
    """Group; null means experiment and trial, which groups the attempts of a trial."""
    notes: str | None = None
    """Notes of the run."""
    tags: list[str] | None = None
    """Tags of the run."""
    config: dict[str, Any] | None = None
    """Configuration stored with the run; null means the whole configuration, secrets redacted."""
    id_suffix: str = "train"
    """Suffix of the run id, which consists of experiment and trial; a restart resumes the same run."""


@dataclass(kw_only=True)
class SwanlabConfig:
    """SwanLab, in addition to the files that are always written."""

    mode: Literal["cloud", "local", "offline", "disabled"] = "disabled"
    """`cloud` sends metrics, `local` and `offline` write files, `disabled` does neither."""
    project: str | None = None
    """Project; null means the experiment name."""
    name: str | None = None
    """Name of the run; null means the trial name."""
    config: dict[str, Any] | None = None
    """Configuration stored with the run; null means the whole configuration, secrets redacted."""
    logdir: PathText | None = None
    """Directory of its files; null means the attempt's directory."""
    api_key: str = ""
    """Refused, because others may read the file. Run `swanlab login`, or export SWANLAB_API_KEY before
    submitting."""


@dataclass(kw_only=True)
class MLflowConfig:
    """MLflow, in addition to the files that are always written."""

    mode: Literal["online", "local", "disabled"] = "disabled"
    """`online` sends metrics to a server, `local` writes files for `mlflow ui`, `disabled` does neither.
    hpc-rl extension."""
    tracking_uri: str = ""
    """URI of the server in mode online; empty means MLFLOW_TRACKING_URI of the job. hpc-rl extension."""
    experiment: str | None = None
    """Experiment; null means the experiment name. hpc-rl extension."""
    name: str | None = None
    """Name of the run; null means the trial name. A restart continues the same run. hpc-rl extension."""
    tags: dict[str, str] | None = None
    """Tags of the run. hpc-rl extension."""
    config: dict[str, Any] | None = None
    """Parameters stored with the run; null means the whole configuration, secrets redacted. hpc-rl
    extension."""
    logdir: PathText | None = None
    """Directory of its files in mode local; null means `mlflow/` in the trial's. hpc-rl extension."""


@dataclass(kw_only=True)
class TrackioConfig:
    """Trackio, in addition to the files that are always written."""

    mode: Literal["online", "local", "disabled"] = "disabled"
    """`online` sends metrics to a Space of Hugging Face, `local` writes files for `trackio show`, `disabled`
    does neither."""
    space_id: str | None = None
    """The Space, as `user/space`, in mode online. Run `hf auth login`, or export HF_TOKEN before submitting.
    """
    project: str | None = None
    """Project; null means the experiment name."""
    name: str | None = None
    """Name of the run; null means the trial name. A restart continues the same run."""
    config: dict[str, Any] | None = None
    """Configuration stored with the run; null means the whole configuration, secrets redacted. hpc-rl
    extension."""
    logdir: PathText | None = None
    """Directory of its files; null means `trackio/` in the trial's. hpc-rl extension."""


@dataclass(kw_only=True)
class StatsLoggerConfig:
    """Where metrics go. JSON lines and TensorBoard files are always written."""

    wandb: WandBConfig = field(default_factory=WandBConfig)
    """Weights & Biases."""
    swanlab: SwanlabConfig = field(default_factory=SwanlabConfig)
    """SwanLab."""
    mlflow: MLflowConfig = field(default_factory=MLflowConfig)
    """MLflow. hpc-rl extension."""
    trackio: TrackioConfig = field(default_factory=TrackioConfig)
    """Trackio."""
    tensorboard: TensorBoardConfig = field(default_factory=TensorBoardConfig)
    """TensorBoard files."""
    every_steps: PositiveInt = 1
    """Send the metrics of every N-th step, and of all evaluations, to TensorBoard and the services;
    metrics.jsonl has every step. hpc-rl extension."""
