"""A small trial to render."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from hpc_rl.config.load import from_dict
from hpc_rl.plan.schema import Plan
from hpc_rl.render.scripts import Stamp, render
from hpc_rl.trial import Trial


@pytest.fixture
def script(tmp_path):
    """`script("slurm", root=…, mode=…, **options of launcher.slurm)` -> text."""

    def make(
        scheduler: str,
        *,
        root: Path = tmp_path,
        mode: str = "auto",
        n_nodes: int = 1,
        own: Path | None = None,
        site: Path | Sequence[Path] = (),
        **slurm,
    ) -> str:
        config = from_dict(
            {
                "experiment_name": "exp",
                "trial_name": "one",
                "train_dataset": {"path": "/data"},
                "model": {"path": "/model"},
                "recover": {"mode": mode},
                "launcher": {"templates_dir": str(own) if own else "", "slurm": slurm},
            }
        )
        plan = Plan(
            experiment_name="exp",
            trial_name="one",
            trainer="sft",
            allocation="fsdp:d1",
            n_nodes=n_nodes,
            n_gpus_per_node=0,
            cpus_per_node=2,
            mem_mb_per_node=500,
            device="cpu",
            server_backend=None,
            units=[],
            recover_mode=mode,
            recover_retries=3,
            python="/python",
        )
        stamp = Stamp(
            version="1", config_sha256="0", command=["render"], tag="tag", wheel="w.zip", workdir=Path("/work"), start_mode=mode
        )
        folders = [site] if isinstance(site, Path) else site
        [text] = render(config, plan, Trial(root / "exp" / "one"), stamp, scheduler, folders).values()
        return text

    return make
