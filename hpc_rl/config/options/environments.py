"""Section `environments`: processes that feed a trial from outside, by the protocol of Atropos."""

from __future__ import annotations

from dataclasses import dataclass, field

from hpc_rl.config.options.limits import NonNegativeInt, Port, PositiveFloat, PositiveInt


@dataclass(kw_only=True)
class EnvironmentsConfig:
    """Environments sample from the trial's servers and send it scored groups. hpc-rl extension."""

    commands: dict[str, str] = field(default_factory=dict)
    """Command of each environment for the launcher to start, by name, such as `hpc-rl env serve my_env.py` or
    `python my_env.py serve`; `--config FILE` with the URLs is appended. You may also start environments by
    hand, with the URLs of `hpc-rl env urls TRIAL`."""
    n_nodes: NonNegativeInt = 0
    """Nodes of the cluster for these commands alone, the last ones; 0 runs them on the first node."""
    cpus: PositiveInt = 1
    """CPUs of each command."""
    mem_mb: PositiveInt = 4096
    """Memory of each command, in MB."""
    own_prompts: bool = False
    """Also generate for the prompts of `train_dataset`. false trains on environments alone:
    train_dataset.path may be empty, and total_train_steps or total_train_n_seqs must end the trial."""
    port: Port = 0
    """Port of the rollout API and the gateway, on the node of the rollout role; 0 takes a free one."""
    max_queued_batches: PositiveInt = 3
    """Batches of one environment that may wait for the trainer before it is held."""
    max_n_per_request: PositiveInt = 8
    """Completions that one request to a server asks for; more are split."""
    max_requests: PositiveInt = 512
    """Requests for training that each server has at once."""
    max_eval_requests: PositiveInt = 64
    """Requests for evaluation that each server has at once, in addition to `max_requests`."""
    metrics_window: PositiveInt = 1000
    """Number of recent requests over which the metrics of a server are computed."""
    hold_s: PositiveFloat = 3600.0
    """Seconds that a request waits while no server answers, before it fails."""
