"""The prompts of the held-out sets of a trial."""

from hpc_rl.config.held_out import list_held_out_sets, refuse_same_names
from hpc_rl.config.options.experiment import GRPOConfig
from hpc_rl.core.errors import ConfigError
from hpc_rl.datasets.encode import Prompts
from hpc_rl.datasets.tokenizer import Tokenizer


def open_held_out_sets(config: GRPOConfig, tokenizer: Tokenizer) -> dict[str, Prompts]:
    """Return the prompts by set. Raises ConfigError."""
    held_out = list_held_out_sets(config).items()
    opened = {name: Prompts(one, tokenizer, config.seed) for name, one in held_out}
    if opened and (refusals := [*refuse_same_names(config.evaluator, opened[""].rows)]):
        raise ConfigError(*refusals)
    return opened
