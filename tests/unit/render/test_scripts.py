"""What the scripts say; their behaviour is tested with bash and Slurm elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_rl.errors import ConfigError
from hpc_rl.render.slurm_time import seconds, signal_lead_s


def test_options_that_are_not_set_are_not_there(script):
    text = script("slurm", mem=None)
    for option in ("partition", "account", "qos", "gres", "gpus-per-node", "constraint", "None"):
        assert option not in text
    assert "#SBATCH --mem=500M\n" in text and "#SBATCH --requeue\n" in text


def test_options_that_are_set_are_there(script):
    text = script("slurm", partition="gpu", gres="gpu:a100:2", mem="10G", extra_args=["--licenses=a:1"], comment="mine")
    for line in ("--partition=gpu", "--gres=gpu:a100:2", "--mem=10G", "--licenses=a:1", '--comment="tag mine"'):
        assert f"#SBATCH {line}\n" in text


def test_disabled_is_not_requeued_and_gets_no_warning(script):
    text = script("slurm", mode="disabled")
    assert "--no-requeue" in text and "--signal" not in text


@pytest.mark.parametrize(
    "argument", ["--mem=4G", "-N4", "--output=/dev/null", "x", "--a=b\nrm -rf /", "--qos=a --gres=gpu:1", ""]
)
def test_further_options_may_not_contradict_the_plan(script, argument):
    with pytest.raises(ConfigError, match="extra_args"):
        script("slurm", extra_args=[argument])


@pytest.mark.parametrize("root", ["/a:b", "/a\nb"])
def test_paths_that_no_pythonpath_can_hold_are_refused(script, root):
    with pytest.raises(ConfigError, match="fileroot"):
        script("local", root=Path(root))


def test_a_percent_sign_in_the_path_is_no_pattern(script):
    assert "#SBATCH --output=/a%%j/exp/one/jobs/%j.out\n" in script("slurm", root=Path("/a%j"))


def test_a_site_overrides_a_block_and_keeps_the_rest(script, tmp_path):
    folder = tmp_path / "site" / "sbatch"
    folder.mkdir(parents=True)
    override = '{% extends "builtin/sbatch/trial.sbatch.j2" %}\n{% block site %}\nmodule load cuda/12.4\n{% endblock %}\n'
    (folder / "trial.sbatch.j2").write_text(override)
    ours, theirs = script("slurm"), script("slurm", site=tmp_path / "site")
    assert theirs.replace("module load cuda/12.4\n", "") == ours


def test_a_broken_site_template_is_told(script, tmp_path):
    (tmp_path / "sbatch").mkdir()
    (tmp_path / "sbatch" / "trial.sbatch.j2").write_text("{{ partiton }}")
    with pytest.raises(ConfigError, match="partiton"):
        script("slurm", site=tmp_path)


@pytest.mark.parametrize(
    ("text", "want"),
    [("90", 5400), ("1:30", 90), ("2:00:00", 7200), ("1-0", 86400), ("1-2:30", 95400), ("1-0:0:5", 86405), ("UNLIMITED", None)],
)
def test_slurm_time(text, want):
    assert seconds(text) == want


def test_a_short_job_is_not_told_at_its_start():
    assert signal_lead_s("1") == 12 and signal_lead_s("24:00:00") == 300 and signal_lead_s(None) == 180
    with pytest.raises(ConfigError, match="time limit"):
        seconds("soon")
