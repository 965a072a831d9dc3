"""What a configuration can name and this version can't honour: which values are accepted, why no others, what to use instead.

One readable table; a test loads every row. What depends on other options is a rule in check.py or agreement.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from hpc_rl.config.sections.experiment import ABSENT, Config, value_of

_ONE_DIRECTORY = "the roles find each other by files on the shared file system, no daemon is needed; use nfs, or leave it out"
_NO_SERVICE = "there is no scheduler service: Slurm places the roles; leave the section out"
_NO_REWARD_SERVICE = (
    "rewards are computed by processes of the rollout role; name a function in rollout.reward_fn"
)
_KEY_IN_FILE = "a key does not belong in a file that many may read"


@dataclass(frozen=True)
class Unavailable:
    """The values that an option may have, and why it may have no other."""

    allowed: tuple[Any, ...]
    why: str
    built: bool = True  # false: it could be built, and is not

    def accepted(self) -> str:
        return ", ".join("empty" if value in ("", {}) else str(value).lower() for value in self.allowed)


UNAVAILABLE: dict[str, Unavailable] = {
    "cluster.name_resolve.type": Unavailable(("nfs",), _ONE_DIRECTORY),
    "cluster.name_resolve.etcd3_addr": Unavailable(("localhost:2379",), _ONE_DIRECTORY),
    "cluster.name_resolve.ray_actor_name": Unavailable(("ray_kv_store",), _ONE_DIRECTORY),
    "scheduler.endpoint": Unavailable(("http://localhost:8081",), _NO_SERVICE),
    "scheduler.deploy_mode": Unavailable(
        ("separation",), "who shares units with whom is said by allocation_mode; leave it out"
    ),
    "scheduler.functioncall_service_domain": Unavailable(("http://localhost:8080",), _NO_REWARD_SERVICE),
    "scheduler.reward_functioncall_config": Unavailable(({},), _NO_REWARD_SERVICE),
    "scheduler.reward_model_path": Unavailable(("",), _NO_REWARD_SERVICE),
    "scheduler.reward_model_service_url": Unavailable(
        ("http://localhost:30000/classify",), _NO_REWARD_SERVICE
    ),
    "stats_logger.wandb.wandb_api_key": Unavailable(
        ("",), f"{_KEY_IN_FILE}; run `wandb login` once, or export WANDB_API_KEY before you submit"
    ),
    "stats_logger.swanlab.api_key": Unavailable(
        ("",), f"{_KEY_IN_FILE}; run `swanlab login` once, or export SWANLAB_API_KEY before you submit"
    ),
    "sglang.dp_size": Unavailable(
        (1,), "replicas are servers of their own here; say how many in allocation_mode, as sglang:d4"
    ),
    "sglang.enable_dp_attention": Unavailable(
        (False,),
        "data-parallel attention within a server is not implemented; use more servers: allocation_mode sglang:dN",
        built=False,
    ),
}


def unavailable(config: Config, explicit: Collection[str]) -> Iterator[str]:
    """A refusal for every value that is outside its row."""
    for name, row in UNAVAILABLE.items():
        value = value_of(config, name)
        if value is not ABSENT and value not in row.allowed:
            shown = "***" if name.endswith("api_key") else value
            yield f"{name} {shown} can't be used{'' if row.built else ' yet'}: {row.why}."
