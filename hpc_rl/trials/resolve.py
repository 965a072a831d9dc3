"""The resolved configuration: every option with its value and origin, derived values included."""

import sys

from hpc_rl.config.load.stored import Loaded
from hpc_rl.config.show import ResolvedValue, derive_values, show
from hpc_rl.plan.plan import make_plan


def resolve_values(loaded: Loaded) -> dict[str, ResolvedValue]:
    """Return every option with its value and origin, derived values included.

    Raises ConfigError if no plan can be made.
    """
    plan = make_plan(loaded.config, loaded.explicit, interpreter=sys.executable, scheduler="slurm")
    return show(loaded, derive_values(loaded.config, plan.allocation))
