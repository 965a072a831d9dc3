"""Options of a small trial, as words of a command and as a stored configuration."""

from typing import Any

from hpc_rl.config.load.stored import from_dict

WORDS = ["experiment_name=e", "trial_name=t", "train_dataset.path=/d", "actor.path=/m"]
STORED = {
    "experiment_name": "e",
    "trial_name": "t",
    "cluster": {"fileroot": "/root"},
    "train_dataset": {"path": "/d"},
    "actor": {"path": "/m"},
}


def stored(**sections: Any) -> Any:
    """Return the configuration that STORED and more sections make."""
    return from_dict({**STORED, **sections})
