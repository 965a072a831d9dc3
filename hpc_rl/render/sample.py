"""A small trial of every kind of script, for looking at templates without a configuration of one's own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hpc_rl.config.loading.load import load
from hpc_rl.plan.plan import make_plan
from hpc_rl.render.scripts import Stamp, render
from hpc_rl.trial import Trial

OPTIONS = (
    *(
        "experiment_name=sample",
        "trial_name=sample",
        "cluster.n_gpus_per_node=0",
        "cluster.fileroot=/fileroot",
    ),
    *(
        "train_dataset.path=/data.jsonl",
        "train_dataset.batch_size=64",
        "actor.path=/model",
        "recover.mode=auto",
    ),
)
KINDS = {"slurm, one node": ("slurm", 1), "slurm, two nodes": ("slurm", 2), "local": ("local", 1)}


def samples(layers: Sequence[Path]) -> dict[str, str]:
    """`kind: file` -> text. Raises ConfigError for templates that do not render."""
    found = {}
    for kind, (scheduler, n_nodes) in KINDS.items():
        loaded = load([], [*OPTIONS, f"cluster.n_nodes={n_nodes}"], profiles=[])
        plan = make_plan(loaded.config, loaded.explicit, interpreter="/python", scheduler=scheduler)  # type: ignore[arg-type]
        trial = Trial.of("/fileroot", "user", "sample", "sample")
        stamp = Stamp(
            version="VERSION",
            config_sha256="SHA256",
            command=["hpc-rl", "render"],
            tag="hpc-rl:TAG",
            wheel="hpc_rl.zip",
            workdir=Path("/workdir"),
            start_mode="auto",
        )
        for name, text in render(loaded.config, plan, trial, stamp, scheduler, layers).items():
            found[f"{kind}: {name}"] = text
    return found
