"""Reinforcement-learning post-training of language models, with Slurm as the distributed engine.

What workflows of the user need is here too: `from hpc_rl import Trajectory, TrajectoryGroup, trajectory`.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

# imported when they are asked for: `import hpc_rl` alone needs no NumPy
_MODULES = {
    "Conversation": "rollout.conversation",
    "MultiTurn": "rollout.multi_turn",
    "Trajectory": "core.types",
    "TrajectoryGroup": "core.types",
    "trajectory": "rollout.workflow",
}
__all__ = ["Conversation", "MultiTurn", "Trajectory", "TrajectoryGroup", "__version__", "trajectory"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
