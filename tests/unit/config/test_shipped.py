"""Every shipped configuration loads, passes the rules that need no files, and plans."""

from pathlib import Path

import pytest
import yaml

from hpc_rl.config.load.load import load
from hpc_rl.config.load.stored import from_dict, to_dict
from hpc_rl.config.rules.check import check
from hpc_rl.plan.plan import make_plan
from hpc_rl.plan.schema import Plan

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
PROFILES = sorted(path.stem for path in (CONFIGS / "cluster").glob("*.yaml"))
SHIPPED = sorted(
    path.relative_to(CONFIGS).as_posix() for path in CONFIGS.rglob("*.yaml") if path.parent.name != "cluster"
)


@pytest.mark.parametrize("name", SHIPPED)
def test_it_loads_and_plans(name):
    loaded = check(load([CONFIGS / name]), files=False)
    plan = make_plan(loaded.config, loaded.explicit, interpreter="python", scheduler="slurm")
    assert Plan.from_json(plan.to_json()) == plan
    assert from_dict(to_dict(loaded.config)) == loaded.config


@pytest.mark.parametrize("name", SHIPPED)
def test_its_json_is_yaml_with_the_same_meaning(name, tmp_path):
    loaded = check(load([CONFIGS / name]), files=False)
    (tmp_path / "again.yaml").write_text(yaml.dump(to_dict(loaded.config), Dumper=yaml.CSafeDumper))
    assert load([tmp_path / "again.yaml"]).config == loaded.config


def test_the_literal_command_of_the_readme():
    loaded = check(load([CONFIGS / "grpo.yaml"], ["--n_nodes", "4"]), files=False)
    plan = make_plan(loaded.config, loaded.explicit, interpreter="python", scheduler="slurm")
    assert plan.allocation == "embedded:d2+fsdp:d2"
    assert 35 <= len((CONFIGS / "grpo.yaml").read_text().splitlines()) <= 45


@pytest.mark.parametrize("name", PROFILES)
def test_every_cluster_profile_carries_a_trial(name):
    gpus = "n_gpus_per_node: 0" not in (CONFIGS / "cluster" / f"{name}.yaml").read_text()
    trial = "grpo_sglang.yaml" if gpus else "grpo.yaml"
    loaded = check(
        load([CONFIGS / trial], ["--n_nodes", "2", "allocation_mode=''"], cluster=name), files=False
    )
    plan = make_plan(loaded.config, loaded.explicit, interpreter="python", scheduler="slurm")
    assert loaded.config.launcher.slurm.partition and f"configs/cluster/{name}.yaml" in " ".join(
        map(str, loaded.notes)
    )
    assert bool(plan.n_gpus_per_node) == gpus
