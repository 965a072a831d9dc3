"""One prompt of a configuration, run in a separate process on this machine before the submission."""

import enum
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_rl.config.load.stored import redact_secrets, to_dict
from hpc_rl.config.options.experiment import Config, GRPOConfig, has_own_prompts
from hpc_rl.core.errors import ConfigError
from hpc_rl.core.records import JsonRecord
from hpc_rl.core.refusal import Kind, Refusal
from hpc_rl.core.trial import load_json
from hpc_rl.doctor.machine import measure_cgroup_memory
from hpc_rl.plan.memory import DTYPE_BYTES, GB, ModelShape
from hpc_rl.trials.needs import find_known_models
from hpc_rl.trials.user_code import START_S, execute_apart

MOST_BYTES = 8 * GB  # of weights: more takes a CPU minutes for a completion
MEMORY_SHARE = 0.5  # share of the free memory that they may take
GRACE_S = 20.0  # beyond the time limit, for the process to say where it hangs
SMALLER = "give a smaller one by --model DIR, or add --tiny_model"


class EpisodeStage(enum.StrEnum):
    """What the process of an episode does at the moment."""

    STARTING = "starting Python and importing torch"
    LOADING = "loading the model"
    RUNNING = "running the workflow"


@dataclass(frozen=True)
class EpisodeProgress(JsonRecord):
    """How far an episode is: written by its process, read by who waits for it."""

    stage: EpisodeStage = EpisodeStage.STARTING
    num_tokens: int = 0  # that the models have made


def play_episode(
    config: Config,
    timeout_s: float,
    tiny: bool,
    workdir: Path,
    show: Callable[[EpisodeProgress], None] = lambda progress: None,
) -> dict[str, Any]:
    """Return the outcome of the first prompt (see tools/check_episode.py), and its output as `log`.

    With `tiny`, models are tiny ones of random weights. `show` gets the progress about once a second. Raises
    ConfigError if no episode can be run here.
    """
    if not isinstance(config, GRPOConfig) or not has_own_prompts(config):
        raise ConfigError(
            "--episode needs prompts from train_dataset: trainers sft and rw, and environments, have none."
        )
    if not tiny and (refusals := list(_describe_size(config))):
        raise ConfigError(*refusals)
    with tempfile.TemporaryDirectory(prefix="hpc-rl-episode-") as folder:
        progress = Path(folder) / "progress.json"
        given = {
            "config": to_dict(redact_secrets(config)),
            "folder": folder if tiny else "",
            "progress": str(progress),
            "timeout_s": timeout_s,
        }
        said, printed, code = execute_apart(
            "hpc_rl.tools.check_episode",
            config,
            given,
            START_S + timeout_s + GRACE_S,
            workdir,
            lambda: show(EpisodeProgress.parse(load_json(progress)) or EpisodeProgress()),
        )
    try:
        return json.loads(said) | {"log": printed}
    except ValueError:
        late = "it took more time than --timeout_s, and did not end"
        error = late if code is None else f"its process ended with code {code}"
        return {"error": error, "trace": "", "log": printed}


def _describe_size(config: GRPOConfig) -> Iterator[Refusal]:
    """Yield a refusal for each model that this machine should not load."""
    room = min(MOST_BYTES, MEMORY_SHARE * _measure_free_bytes())
    paths = {"actor.path": config.actor.path}
    paths |= {f"pools.{name}.path": pool.path for name, pool in config.pools.items() if not pool.url}
    known = find_known_models(config)
    for option, path in paths.items():
        shape = ModelShape.of(known.get(path, {}))
        files = sum(file.stat().st_size for file in Path(path).glob("*.safetensors"))
        size = DTYPE_BYTES[config.embedded.dtype] * shape.num_params if shape else files
        if size > room:
            has = f"--episode loads it on this machine's CPU and takes at most {room / GB:.1f} GB"
            why = f"has {size / GB:.1f} GB of weights, and {has}"
            yield Refusal(option=option, value=path, kind=Kind.MACHINE, why=why, use=SMALLER)


def _measure_free_bytes() -> float:
    """Return the memory that is free here, as far as the kernel and the control group say."""
    free = float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            free = float(rest.split()[0]) * 1024
    limit = measure_cgroup_memory()
    return free if limit is None else min(free, limit)
