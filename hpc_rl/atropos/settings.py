"""The settings of an environment process, with the names and defaults of atroposlib 0.4.0."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal


class EvalHandling(StrEnum):
    """Treatment of training episodes while an evaluation runs."""

    STOP_TRAIN = "STOP_TRAIN"
    LIMIT_TRAIN = "LIMIT_TRAIN"
    NONE = "NONE"

    @classmethod
    def _missing_(cls, value: object) -> "EvalHandling | None":
        """Accept any case, such as `stop_train`."""
        return cls.__members__.get(str(value).upper())


@dataclass(kw_only=True)
class EnvConfig:
    """How an environment works.

    Args:
        group_size: Episodes per task, scored together.
        max_num_workers: Groups made at once; -1 means max_num_workers_per_node per server.
        max_eval_workers: Evaluation episodes that run at once.
        max_num_workers_per_node: Groups made at once per server, if max_num_workers is -1.
        steps_per_eval: Training steps between two evaluations; 0 or less turns evaluations off.
        max_token_length: Largest number of tokens of an episode, prompt included.
        eval_handling: STOP_TRAIN cancels training episodes during an evaluation, LIMIT_TRAIN makes fewer,
            NONE leaves them alone.
        eval_limit_ratio: Share of the workers that LIMIT_TRAIN leaves.
        inference_weight: Share of the servers' capacity, relative to other environments: limits the requests
            to each server.
        batch_size: Sequences per training batch; the trainer's value replaces it.
        max_batches_offpolicy: Batches that may wait for the trainer before the environment pauses.
        tokenizer_name: Directory of the model's tokenizer.
        use_wandb: Log to Weights & Biases, in the trainer's project and group.
        rollout_server_url: URL of the rollout API: of a trial, or of atroposlib's `run-api`.
        total_steps: Training steps after which to end; -1 means the trainer's. In `process`, groups to make.
        wandb_name: Name of this environment in logs; null means the name of its class.
        num_rollouts_to_keep: Groups in the logged table of rollouts.
        num_rollouts_per_group_for_logging: Episodes of a group in that table; -1 means all.
        ensure_scores_are_not_same: Drop a group whose scores are all equal.
        data_path_to_save_groups: File for the groups, one JSON object a line; at the end a page to read them
            is written next to it.
        min_items_sent_before_logging: Least number of sent groups between two lines of metrics.
        include_messages: Send the messages of each episode with its tokens.
        min_batch_allocation: Smallest share of each batch for this environment.
        worker_timeout: Seconds after which an unfinished group is dropped.
        seed: Seed of the order of tasks and of the sampling.
    """

    group_size: int = 4
    max_num_workers: int = -1
    max_eval_workers: int = 16
    max_num_workers_per_node: int = 8
    steps_per_eval: int = 100
    max_token_length: int = 2048
    eval_handling: EvalHandling | Literal["stop_train", "limit_train", "none"] = EvalHandling.STOP_TRAIN
    eval_limit_ratio: float = 0.5
    inference_weight: float = 1.0
    batch_size: int = -1
    max_batches_offpolicy: int = 3
    tokenizer_name: str = "NousResearch/DeepHermes-3-Llama-3-3B-Preview"
    use_wandb: bool = True
    rollout_server_url: str = "http://localhost:8000"
    total_steps: int = 1000
    wandb_name: str | None = None
    num_rollouts_to_keep: int = 32
    num_rollouts_per_group_for_logging: int = 1
    ensure_scores_are_not_same: bool = True
    data_path_to_save_groups: str | None = None
    min_items_sent_before_logging: int = 2
    include_messages: bool = False
    min_batch_allocation: float | None = None
    worker_timeout: float = 600.0
    seed: int = 0

    def __post_init__(self) -> None:
        self.eval_handling = EvalHandling(self.eval_handling)


@dataclass(kw_only=True)
class APIServerConfig:
    """An inference server, or a gateway in front of several.

    Args:
        timeout: Seconds that one request may take.
        num_max_requests_at_once: Training requests to the server at once, each of up to max_n_completions
            completions.
        num_requests_for_eval: Evaluation requests to the server at once.
        model_name: Model to ask for.
        rolling_buffer_length: Latest requests that the metrics of a server cover.
        api_key: Sent as bearer token; the data token of a trial.
        base_url: Its OpenAI API, ending in /v1.
        n_kwarg_is_ignored: The server returns one completion for any `n`: send n requests. The first answer
            also shows this.
        server_type: Its native API, which gives token ids: only sglang, which a gateway of hpc-rl has.
    """

    timeout: float = 1200
    num_max_requests_at_once: int = 512
    num_requests_for_eval: int = 64
    model_name: str = "default"
    rolling_buffer_length: int = 1000
    api_key: str | None = None
    base_url: str | None = None
    n_kwarg_is_ignored: bool = False
    server_type: str = "sglang"


@dataclass(kw_only=True)
class EnvironmentSettings:
    """All settings of an environment process.

    Args:
        env: How it works.
        openai: Its servers.
        slurm: In a Slurm job without base_url, take the servers of the job's nodes.
        testing: Make up completions instead of asking a server.
        max_n_completions: Completions in one request; larger numbers are split into several requests.
    """

    env: EnvConfig = field(default_factory=EnvConfig)
    openai: list[APIServerConfig] = field(default_factory=list)
    slurm: bool = True
    testing: bool = False
    max_n_completions: int = 8
