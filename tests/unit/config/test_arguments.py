"""`submit --help`: every option of every trainer is listed with words of its own, without torch."""

from __future__ import annotations

import argparse
import subprocess
import sys

import pytest

from hpc_rl.config.loading.arguments import add_config_arguments, describe_options
from hpc_rl.config.loading.build import options
from hpc_rl.config.sections.experiment import CONFIGS


@pytest.mark.parametrize("trainer", CONFIGS)
def test_every_option_has_help(trainer):
    described = {option.name: option for option in describe_options(CONFIGS[trainer])}
    assert described.keys() == options(CONFIGS[trainer]).keys()
    assert [name for name, option in described.items() if len(option.text) < 8] == []


def test_help_lists_options_with_types_and_defaults():
    parser = argparse.ArgumentParser(prog="hpc-rl submit")
    add_config_arguments(parser)
    text = " ".join(parser.format_help().split())
    assert (
        "--n_nodes VALUE, --cluster.n_nodes VALUE Number of nodes. (an integer, at least 1 and at most 10000; default: 1)"
        in text
    )
    assert "--model.optimizer.lr VALUE" in text
    assert "--actor.optimizer.min_lr_ratio VALUE Final learning rate as a share of the peak." in text
    assert "default: required" in text


def test_no_heavy_import():
    code = (
        "import sys, hpc_rl.config.loading.arguments, hpc_rl.config.rules.check, hpc_rl.plan.plan\n"
        "from hpc_rl.config.loading.load import load\n"
        "load([], ['actor.path=/m', 'train_dataset.path=/t', 'experiment_name=a', 'trial_name=b'])\n"
        "heavy = ['torch', 'transformers', 'omegaconf', 'jsonargparse', 'numpy', 'aiohttp']\n"
        "print([m for m in heavy if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
