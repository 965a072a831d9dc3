"""The settings file of an environment that feeds a trial: URLs, and settings that the trial decides."""

from typing import Any

from hpc_rl.config.options.experiment import GRPOConfig


def make_environment_settings(config: GRPOConfig, name: str, url: str, token: str) -> dict[str, Any]:
    """Return the settings, in the format that environments of hpc-rl and atroposlib read with `--config`.

    Args:
        config: The trial's configuration, with a section `environments`.
        name: The name of the environment.
        url: The URL of the rollout role.
        token: The trial's data token.
    """
    assert config.environments is not None
    tokenizer = config.tokenizer_path or config.actor.path
    server = {
        "model_name": tokenizer,  # where atroposlib looks for the tokenizer of a server
        "base_url": f"{url}/v1",
        "api_key": token,
        "num_max_requests_at_once": max(1, config.environments.max_requests // 2),
        "server_type": "sglang",
    }
    return {
        "env": {
            "rollout_server_url": f"{url}/t/{token}",
            "tokenizer_name": tokenizer,
            "group_size": config.gconfig.n_samples,
            "total_steps": -1,
            "use_wandb": config.stats_logger.wandb.mode != "disabled",
            "wandb_name": name,
        },
        # some environments of atroposlib accept only a list of two or more
        "openai": [server, dict(server)],
        "slurm": False,
    }
