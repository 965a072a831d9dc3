"""What is passed to submitit's executor, from the same options as our own batch script. Pure."""

from __future__ import annotations

import json
from typing import Any

from hpc_rl import slurm_time
from hpc_rl.config.sections.cluster import SlurmLauncherConfig
from hpc_rl.errors import ConfigError
from hpc_rl.render.directives import Directives, signal_lead_s

UNLIMITED_MIN = 365 * 24 * 60
# submitit runs its callable as a step, which must leave the job to the steps of the roles.
STEP = [
    "--overlap",
    "--relative=0",
    "--nodes=1",
    "--ntasks=1",
    "--cpus-per-task=1",
    "--mem=0",
    "--export=ALL",
]


def parameters(slurm: SlurmLauncherConfig, asked: Directives, *, with_gpus: bool) -> dict[str, Any]:
    """Keyword arguments of `SlurmExecutor.update_parameters`. Raises ConfigError for what submitit can't be told."""
    if slurm.time is None:
        raise ConfigError(
            "launcher.slurm.backend submitit needs launcher.slurm.time: submitit asks for 5 minutes where none is given."
        )
    options: dict[str, Any] = {}
    for name, value in (*asked.resources, *asked.accounting, *asked.output, *asked.policy):
        options[name] = value if value != "" else True
    for words in asked.extra:
        options |= _extra(words)
    limit_s = slurm_time.to_seconds(slurm.time)
    job_name = options.pop("job-name")
    options.pop("wckey", None)
    # To the steps, where submitit's handler is; without B: the batch shell hears nothing of it.
    options["signal"] = f"USR2@{signal_lead_s(slurm.time)}"
    return {
        # `hpc-rl cancel` sends USR1 to the batch script, which is submitit's and would die of it; the supervisor sees the wish.
        "setup": ["trap '' USR1"],
        "job_name": job_name,
        "time": UNLIMITED_MIN
        if limit_s is None
        else max(1, limit_s // 60),  # submitit's own idea of it; the option below counts
        "wckey": slurm.wckey,  # submitit names one otherwise
        "stderr_to_stdout": True,
        "srun_args": [*STEP, *(["--gpus-per-node=0"] if with_gpus else [])],
        "additional_parameters": options,
    }


def text(values: dict[str, Any]) -> str:
    return json.dumps(values, indent=2, sort_keys=True) + "\n"


def _extra(words: list[str]) -> dict[str, Any]:
    """`--name=value` and `--name` only: submitit takes options by name."""
    found: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not name.startswith("--"):
            raise ConfigError(
                f"launcher.slurm.extra_args: {word!r} can't be passed to submitit; write --name=value, or use backend sbatch."
            )
        found[name.removeprefix("--")] = value if equals else True
    return found
