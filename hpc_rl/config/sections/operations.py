"""Sections `saver`, `evaluator`, `recover` and `stats_logger`: what happens every so often."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from hpc_rl.config.sections.limits import AboveOne, NonNegativeInt, PathText, PositiveInt


@dataclass(kw_only=True)
class FrequencyConfig:
    """How often: any of the three that is set. All null means never.

    Args:
        freq_epochs: Every so many epochs.
        freq_steps: Every so many steps.
        freq_secs: Every so many seconds.
    """

    freq_epochs: PositiveInt | None = None
    freq_steps: PositiveInt | None = None
    freq_secs: PositiveInt | None = None


@dataclass(kw_only=True)
class IdentityConfig:
    """AReaL repeats the trial's identity in many sections. There is one identity here: other values are refused.

    Args:
        experiment_name: The root's `experiment_name`; null follows it.
        trial_name: The root's `trial_name`; null follows it.
        fileroot: The same as `cluster.fileroot`; null follows it.
    """

    experiment_name: str | None = None
    trial_name: str | None = None
    fileroot: PathText | None = None


@dataclass(kw_only=True)
class KeepBestConfig:
    """The best model by its evaluations, as `exports/best`.

    Args:
        metric: Number of an evaluation: `eval_reward` (grpo), `eval_loss` (sft, rw), `eval_accuracy` (rw); null means the
            first of these that the trainer has.
        mode: Whether larger or smaller is better; null means `min` for a loss, else `max`.
        as_final: `exports/final` is the best model in place of the last step's.
    """

    metric: Literal["eval_reward", "eval_loss", "eval_accuracy"] | None = None
    mode: Literal["max", "min"] | None = None
    as_final: bool = False


@dataclass(kw_only=True)
class SaverConfig(FrequencyConfig, IdentityConfig):
    """Exports for people, in Hugging Face format, into `exports/`; one is always written at the end.

    Args:
        keep_last: Exports kept, the final and the best one not counted; null means all (ours).
        keep_best: The best model by its evaluations; null means that it is not kept (ours).
    """

    keep_last: PositiveInt | None = None
    keep_best: KeepBestConfig | None = None


@dataclass(kw_only=True)
class EvaluatorConfig(FrequencyConfig, IdentityConfig):
    """Evaluation on `valid_dataset`; one always runs after the last step if there is such a dataset, and before the
    first one of a grpo trial."""


@dataclass(kw_only=True)
class RecoverConfig(FrequencyConfig, IdentityConfig):
    """Generations of recover state, and what a start does with them.

    Args:
        mode: `disabled` never saves nor loads; `auto` loads the newest valid generation if there is one; `fault` loads only
            what this submission wrote; `resume` loads or ends with exit code 3.
        retries: Restarts in a row without a new generation before the trial gives up.
        keep: Generations kept: the newest so many.
        keep_every_steps: Besides, each generation whose step is a multiple of this is kept; null means none (ours).
        keep_best: Besides, so many generations with the best number of `saver.keep_best`, or where that is null of the
            trainer's own evaluation: reward, accuracy or loss (ours).
        async_save: Write generations while training goes on, from a copy of the state in memory; false stands still (ours).
        hang_factor: Nothing may move for so many times the 95th percentile of a step; then stacks are written down, and what
            hangs is started again.
        hang_min_s: The least time that nothing may move before that, in seconds.
        hang_max_s: The most, in seconds; also how long a start and the first step may take.
        avoid_hours: A node that failed is avoided for so many hours by requeues and later submissions; 0 for not at all.
    """

    mode: Literal["disabled", "auto", "fault", "resume"] = "disabled"
    retries: NonNegativeInt = 3
    keep: PositiveInt = 2
    keep_every_steps: PositiveInt | None = None
    keep_best: NonNegativeInt = 0
    async_save: bool = False
    hang_factor: AboveOne = 10.0
    hang_min_s: PositiveInt = 300
    hang_max_s: PositiveInt = 3600
    avoid_hours: NonNegativeInt = 24


@dataclass(kw_only=True)
class TensorBoardConfig:
    """TensorBoard files.

    Args:
        path: Directory; null means `tensorboard/` in the attempt's directory, which also holds `metrics.jsonl`, always written.
    """

    path: PathText | None = None


@dataclass(kw_only=True)
class WandBConfig:
    """Weights & Biases, beside the files that are always written. A key is never in a configuration: see `wandb_api_key`.

    Args:
        mode: `online` sends, `offline` writes files for `wandb sync`, `disabled` does neither.
        wandb_base_url: Server; empty means the public one.
        wandb_api_key: Refused: many may read this file. `wandb login`, or WANDB_API_KEY in the environment that submits.
        entity: Team or user; null means your default.
        project: Project; null means the experiment's name.
        name: Name of the run; null means the trial's.
        job_type: Job type.
        group: Group; null means experiment and trial, so that the attempts of a trial stand together.
        notes: Free text beside the run.
        tags: Words to find the run by.
        config: What is stored as the run's configuration; null means the whole configuration, secrets redacted.
        id_suffix: End of the run's id, which is made of experiment and trial: a restart goes on in the same run.
    """

    mode: Literal["online", "offline", "disabled"] = "disabled"
    wandb_base_url: str = ""
    wandb_api_key: str = ""
    entity: str | None = None
    project: str | None = None
    name: str | None = None
    job_type: str | None = None
    group: str | None = None
    notes: str | None = None
    tags: list[str] | None = None
    config: dict[str, str] | None = None
    id_suffix: str = "train"


@dataclass(kw_only=True)
class SwanlabConfig:
    """SwanLab, beside the files that are always written.

    Args:
        mode: `cloud` sends, `local` and `offline` write files, `disabled` does neither.
        project: Project; null means the experiment's name.
        name: Name of the run; null means the trial's.
        config: What is stored as the run's configuration; null means the whole configuration, secrets redacted.
        logdir: Where its files go; null means the attempt's directory.
        api_key: Refused: many may read this file. `swanlab login`, or SWANLAB_API_KEY in the environment that submits.
    """

    mode: Literal["cloud", "local", "offline", "disabled"] = "disabled"
    project: str | None = None
    name: str | None = None
    config: dict[str, str] | None = None
    logdir: PathText | None = None
    api_key: str = ""


@dataclass(kw_only=True)
class StatsLoggerConfig(IdentityConfig):
    """Where numbers go: JSON lines and TensorBoard files always, others where they are asked for.

    Args:
        wandb: Weights & Biases.
        swanlab: SwanLab.
        tensorboard: TensorBoard files.
    """

    wandb: WandBConfig = field(default_factory=WandBConfig)
    swanlab: SwanlabConfig = field(default_factory=SwanlabConfig)
    tensorboard: TensorBoardConfig = field(default_factory=TensorBoardConfig)


@dataclass(kw_only=True)
class SchedulerConfig:
    """AReaL's scheduler service, which does not exist here: Slurm places the roles, rewards run in the rollout role.

    Args:
        endpoint: Address of the service; only the default is accepted.
        deploy_mode: How AReaL deploys; only `separation` is accepted.
        functioncall_service_domain: Address of a reward service; only the default is accepted, see `rollout.reward_fn`.
        reward_functioncall_config: Settings of a reward service; only an empty mapping is accepted.
        reward_model_path: A reward model behind a service; only empty is accepted.
        reward_model_service_url: Address of a reward model; only the default is accepted.
    """

    endpoint: str = "http://localhost:8081"
    deploy_mode: str = "separation"
    functioncall_service_domain: str = "http://localhost:8080"
    reward_functioncall_config: dict[str, str] = field(default_factory=dict)
    reward_model_path: str = ""
    reward_model_service_url: str = "http://localhost:30000/classify"
