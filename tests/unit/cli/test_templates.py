"""`hpc-rl templates`: what an admin sees, writes, compares and checks."""

from __future__ import annotations

import json

import pytest

from hpc_rl.cli.__main__ import main
from hpc_rl.config.loading.profiles import site_dirs

TRIAL = "sbatch/trial.sbatch.j2"


@pytest.fixture
def site(tmp_path, monkeypatch):
    monkeypatch.setenv("HPC_RL_SITE_DIR", f"{tmp_path / 'person'}:{tmp_path / 'etc'}")
    return tmp_path


def test_list_names_templates_blocks_profiles_and_hooks(site, capsys):
    (site / "etc" / "hooks.d").mkdir(parents=True)
    (site / "etc" / "hooks.d" / "pre_node").write_text("true\n")
    (site / "etc" / "cluster").mkdir()
    (site / "etc" / "cluster" / "ours.yaml").write_text("{}")
    assert main(["templates", "eject", "trial", "--to", str(site / "etc")]) == 0
    capsys.readouterr()
    assert main(["templates", "list", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    rows = {row["template"]: row for row in found["templates"]}
    assert {"site", "resources", "environment", "teardown"} <= set(rows[TRIAL]["blocks"])
    assert rows[TRIAL]["overrides"] == [{"path": str(site / "etc" / TRIAL), "blocks": ["site"]}]
    assert found["hooks"]["pre_node"] == [str(site / "etc" / "hooks.d" / "pre_node")]
    assert (
        found["profiles"]["ours"] == str(site / "etc" / "cluster" / "ours.yaml")
        and "whole-nodes" in found["profiles"]
    )
    assert main(["templates", "list"]) == 0
    said = capsys.readouterr().out
    assert f"site by {site / 'etc' / TRIAL}" in said and "--cluster ours" in said


def test_eject_edit_diff_check(site, capsys):
    assert main(["templates", "diff"]) == 0 and capsys.readouterr().out == ""
    assert main(["templates", "eject", "trial", "--block", "site", "--block", "accounting"]) == 0
    path = site_dirs()[0] / TRIAL
    assert str(path) in capsys.readouterr().out
    assert main(["templates", "eject", "trial"]) == 64, "what somebody wrote is not overwritten"
    path.write_text(path.read_text().replace("# what this machine", "module load cuda\n# what this machine"))
    capsys.readouterr()
    assert main(["templates", "diff"]) == 1
    said = capsys.readouterr().out
    assert said.count("+module load cuda") == 2 and "-#SBATCH" not in said
    assert main(["templates", "check"]) == 0
    assert str(path) in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            '{% extends "below/sbatch/trial.sbatch.j2" %}{% block sight %}x{% endblock %}',
            "has no block 'sight'",
        ),
        ('{% extends "below/sbatch/trial.sbatch.j2" %}{% block site %}\nif\n{% endblock %}', "bash -n: "),
        ("#!/bin/bash\ntrue\n", "replaces the whole file"),
        (
            '{% extends "below/sbatch/trial.sbatch.j2" %}{% block environment %}\n#SBATCH --mem=1\n{% endblock %}',
            "comes after the first command",
        ),
    ],
)
def test_check_finds_what_can_not_be_meant(site, capsys, text, words):
    path = site_dirs()[1] / TRIAL
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert main(["templates", "check", "--json"]) == 64
    assert any(words in wrong for wrong in json.loads(capsys.readouterr().out)["wrong"])


def test_a_broken_template_is_told_with_its_line(site, capsys):
    path = site_dirs()[0] / TRIAL
    path.parent.mkdir(parents=True)
    path.write_text('{% extends "below/sbatch/trial.sbatch.j2" %}\n{% block site %}\n')
    assert main(["templates", "check"]) == 64
    assert f"{path}:" in capsys.readouterr().err


def test_a_file_that_nothing_reads_is_told(site, capsys):
    (site / "etc" / "sbatch").mkdir(parents=True)
    (site / "etc" / "sbatch" / "trail.sbatch.j2").write_text("")
    assert main(["templates", "check"]) == 64
    assert "trail.sbatch.j2: nothing reads it" in capsys.readouterr().out


def test_unknown_names_are_refused(site, capsys):
    assert main(["templates", "eject", "trail"]) == 64 and "sbatch/trial.sbatch.j2" in capsys.readouterr().err
    assert (
        main(["templates", "eject", "trial", "--block", "sight"]) == 64
        and "has no block 'sight'" in capsys.readouterr().err
    )
    assert main(["templates", "eject", "trial", "--to", "-"]) == 0
    assert capsys.readouterr().out.startswith('{% extends "below/sbatch/trial.sbatch.j2" %}\n')
