"""A small trial to render."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from toy_plans import sft_plan

from hpc_rl.config.load.stored import from_dict
from hpc_rl.core.trial import Trial
from hpc_rl.plan.schema import Unit
from hpc_rl.render.scripts import Stamp, render, script_name


@pytest.fixture
def script(scripts):
    """`script("slurm", root=…, mode=…, **options of launcher.slurm)` -> text of what the scheduler gets."""

    def make(scheduler: str, **options) -> str:
        return scripts(scheduler, **options)[script_name(scheduler)]

    return make


@pytest.fixture
def scripts(tmp_path):
    """The same, as {file name: text}."""

    def make(
        scheduler: str,
        *,
        root: Path = tmp_path,
        mode: str = "auto",
        n_nodes: int = 1,
        own: Path | None = None,
        site: Path | Sequence[Path] = (),
        python: str = "/python",
        workdir: Path = Path("/work"),
        wheel: str = "w.zip",
        hooks: dict | None = None,
        units: Sequence[Unit] = (),
        n_gpus_per_node: int = 0,
        launcher: dict | None = None,
        **slurm,
    ) -> dict[str, str]:
        config = from_dict(
            {
                "experiment_name": "exp",
                "trial_name": "one",
                "train_dataset": {"path": "/data"},
                "model": {"path": "/model"},
                "recover": {"mode": mode},
                "launcher": {
                    **(launcher or {}),
                    "templates_dir": str(own) if own else "",
                    "slurm": slurm,
                    "hooks": hooks or {},
                },
            }
        )
        plan = sft_plan(
            list(units), python, n_nodes=n_nodes, recover_mode=mode, n_gpus_per_node=n_gpus_per_node
        )
        stamp = Stamp(
            version="1",
            config_sha256="0",
            command=["render"],
            tag="tag",
            wheel=wheel,
            workdir=workdir,
            start_mode=mode,
        )
        folders = [site] if isinstance(site, Path) else site
        return render(config, plan, Trial(root / "exp" / "one"), stamp, scheduler, folders)

    return make
