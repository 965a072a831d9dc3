"""Reinforcement-learning post-training of language models, with Slurm as the distributed engine.

    import hpc_rl

    trial = hpc_rl.submit("grpo.yaml", seed=3)
    trial.wait()
    trial.metrics().frame()

Names are imported when they are used, so `import hpc_rl` needs neither NumPy nor torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpc_rl.api.configuration import CheckReport, Configuration, check, load
    from hpc_rl.api.sweep import Sweep, sweep
    from hpc_rl.api.tables import Records
    from hpc_rl.api.trial import Report, Result, Trial, Trials, list_trials, submit
    from hpc_rl.core.callbacks import Callback, Event
    from hpc_rl.core.errors import (
        CannotWrite,
        ConfigError,
        HpcRlError,
        NothingToResume,
        SchedulerError,
        TrialBusy,
        TrialFailed,
        TrialNameError,
        TrialStateError,
    )
    from hpc_rl.core.records import TrialState
    from hpc_rl.core.types import Trajectory, TrajectoryGroup
    from hpc_rl.rollout.conversation import Conversation
    from hpc_rl.rollout.multi_turn import MultiTurn
    from hpc_rl.rollout.workflow import trajectory
    from hpc_rl.status.sweep_report import SweepReport

__version__ = "0.1.0"

__all__ = [
    "Callback",
    "CannotWrite",
    "CheckReport",
    "ConfigError",
    "Configuration",
    "Conversation",
    "Event",
    "HpcRlError",
    "MultiTurn",
    "NothingToResume",
    "Records",
    "Report",
    "Result",
    "SchedulerError",
    "Sweep",
    "SweepReport",
    "Trajectory",
    "TrajectoryGroup",
    "Trial",
    "TrialBusy",
    "TrialFailed",
    "TrialNameError",
    "TrialState",
    "TrialStateError",
    "Trials",
    "__version__",
    "check",
    "list_trials",
    "load",
    "submit",
    "sweep",
    "trajectory",
]
# imported when they are asked for
_MODULES = {
    "api.configuration": ("CheckReport", "Configuration", "check", "load"),
    "api.sweep": ("Sweep", "sweep"),
    "api.tables": ("Records",),
    "api.trial": ("Report", "Result", "Trial", "Trials", "list_trials", "submit"),
    "core.callbacks": ("Callback", "Event"),
    "core.errors": (
        "CannotWrite",
        "ConfigError",
        "HpcRlError",
        "NothingToResume",
        "SchedulerError",
        "TrialBusy",
        "TrialFailed",
        "TrialNameError",
        "TrialStateError",
    ),
    "core.records": ("TrialState",),
    "core.types": ("Trajectory", "TrajectoryGroup"),
    "rollout.conversation": ("Conversation",),
    "rollout.multi_turn": ("MultiTurn",),
    "rollout.workflow": ("trajectory",),
    "status.sweep_report": ("SweepReport",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
