"""`hpc-rl templates`: what an admin sees, writes, compares and checks."""

import functools
import json
import re

import pytest

from hpc_rl.cli import templates
from hpc_rl.cli.__main__ import main
from hpc_rl.cli.templates import KINDS, samples
from hpc_rl.config.loading.load import Loaded, load
from hpc_rl.config.loading.profiles import site_dirs
from hpc_rl.render import lint
from hpc_rl.render.jinja_environment import template_root
from hpc_rl.render.overrides import shipped

TRIAL, SERVERS, SITE = "sbatch/trial.sbatch.j2", "sbatch/servers.sbatch.j2", "templates/site.sh.j2"


@pytest.fixture
def site(tmp_path, monkeypatch):
    monkeypatch.setenv("HPC_RL_SITE_DIR", f"{tmp_path / 'person'}:{tmp_path / 'etc'}")
    return tmp_path


@functools.cache
def loaded_once(options: tuple[str, ...]) -> Loaded:
    return load([], list(options), profiles=[])


@pytest.fixture(autouse=True)
def samples_are_loaded_once(monkeypatch):
    monkeypatch.setattr(
        templates, "load", lambda files, options, profiles: loaded_once((*files, *options, *profiles))
    )


def override(folder, text, template=TRIAL):
    path = folder / template
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_list_names_templates_blocks_profiles_and_hooks(site, capsys):
    (site / "etc" / "hooks.d").mkdir(parents=True)
    (site / "etc" / "hooks.d" / "pre_node").write_text("true\n")
    (site / "etc" / "cluster").mkdir()
    (site / "etc" / "cluster" / "ours.yaml").write_text("{}")
    assert main(["templates", "eject", "site", "--to", str(site / "etc")]) == 0
    capsys.readouterr()
    assert main(["templates", "list", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    rows = {row["template"]: row for row in found["templates"]}
    assert {"resources", "accounting", "environment", "teardown"} <= set(rows[TRIAL]["blocks"])
    assert rows["templates/steps.sh.j2"]["blocks"] == ["server", "rollout", "trainer", "environment"]
    assert rows[SITE]["overrides"] == [{"path": str(site / "etc" / SITE), "blocks": ["site"]}]
    assert found["hooks"]["pre_node"] == [str(site / "etc" / "hooks.d" / "pre_node")]
    assert found["profiles"]["ours"] == str(site / "etc" / "cluster" / "ours.yaml")
    assert "whole-nodes" in found["profiles"]
    assert main(["templates", "list"]) == 0
    said = capsys.readouterr().out
    assert f"site by {site / 'etc' / SITE}" in said and "--cluster ours" in said


def test_eject_edit_diff_check(site, capsys):
    assert main(["templates", "diff"]) == 0 and capsys.readouterr().out == ""
    assert main(["templates", "eject", "site"]) == 0
    path = site_dirs()[0] / SITE
    assert str(path) in capsys.readouterr().out
    assert main(["templates", "eject", "site"]) == 64, "an existing override is kept"
    path.write_text(path.read_text().replace("{{ super() }}", "{{ super() }}module load cuda"))
    capsys.readouterr()
    assert main(["templates", "diff"]) == 1
    said = capsys.readouterr().out
    assert said.count("+module load cuda") == len(KINDS) and "-#SBATCH" not in said
    assert main(["templates", "check"]) == 0
    assert str(path) in capsys.readouterr().out


@pytest.mark.parametrize("template", shipped())
def test_an_ejected_block_is_what_ours_contains_and_changes_nothing(site, capsys, template):
    blocks = [word for block in shipped()[template] for word in ("--block", block)]
    assert main(["templates", "eject", template, *blocks]) == 0
    text = (site_dirs()[0] / template).read_text()
    if "resources" in blocks:
        assert "{{ directives.resources | sbatch }}" in text
    if "server" in blocks:
        assert "exec srun --job-name" in text
    capsys.readouterr()
    main(["templates", "diff"])
    changed = [line for line in capsys.readouterr().out.splitlines() if line[:1] in "+-" and line[3:4] != " "]
    assert not [
        line for line in changed if not line.startswith(("+# changed by ", "+++", "---")) and line[1:]
    ]


def test_every_template_and_branch_is_in_the_samples():
    """Each line of a template that a sample can show is shown by one of them."""
    shown = "\n".join(samples([]).values())
    for line in BRANCHES:
        assert re.search(line, shown, re.MULTILINE), line
    for path in [*(template_root() / "sbatch").glob("*"), *(template_root() / "templates").glob("*.sh.j2")]:
        assert path.name.removesuffix(".j2") in {name.rpartition(" ")[2] for name in samples([])}


BRANCHES = (
    *(
        "^#SBATCH hetjob$",
        "^#SBATCH --array=",
        "^#SBATCH --hold$",
        "^#SBATCH --no-requeue$",
        "^#SBATCH --requeue$",
    ),
    *('--het-group="\\$component"', "--container-image=", "^    apptainer exec", '--output="\\$output"'),
    *(
        "--gpus-per-node=0",
        "backend=submitit",
        "continue_by=successor",
        "layout=jobs",
        "recover_mode=disabled",
    ),
    *(r"pre_job_hooks=\(hook", "scheduler=local", "knows_gpus=0", "knows_gpus=1"),
)


@pytest.fixture
def without_shellcheck(monkeypatch):
    """Its second and more for all samples is spent in one test."""
    monkeypatch.setattr(lint, "shellcheck", lambda: None)


def test_check_renders_every_script(site, capsys, without_shellcheck):
    """An override of any of them that bash can't read is wrong."""
    blocks = {SITE: "site", "templates/steps.sh.j2": "rollout", TRIAL: "teardown", SERVERS: "teardown"}
    for template, block in blocks.items():
        text = f'{{% extends "below/{template}" %}}{{% block {block} %}}\nif\n{{% endblock %}}'
        override(site_dirs()[1], text, template)
    assert main(["templates", "check", "--json"]) == 64
    wrong = [one for one in json.loads(capsys.readouterr().out)["wrong"] if "bash -n: " in one]
    for template in blocks:
        name = template.split("/")[1].removesuffix(".j2")
        assert any(f": {name}: " in one for one in wrong), template


def test_an_undefined_variable_of_the_second_component_is_refused(site, capsys):
    block = "{% block resources_of_servers %}{{ nothing }}{% endblock %}"
    override(site_dirs()[1], f'{{% extends "below/{TRIAL}" %}}{block}')
    for action in ("check", "diff"):
        assert main(["templates", action]) == 64
        assert "'nothing' is undefined" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            '{% extends "below/sbatch/trial.sbatch.j2" %}{% block sight %}x{% endblock %}',
            "has no block 'sight'",
        ),
        ('{% extends "below/sbatch/trial.sbatch.j2" %}{% block site %}x{% endblock %}', "eject site"),
        ("#!/bin/bash\ntrue\n", "replaces the whole file"),
        (
            '{% extends "below/sbatch/trial.sbatch.j2" %}{% block environment %}\n#SBATCH --mem=1\n{% endblock %}',
            "comes after the first command",
        ),
    ],
)
def test_check_finds_what_can_not_be_meant(site, capsys, without_shellcheck, text, words):
    override(site_dirs()[1], text)
    assert main(["templates", "check", "--json"]) == 64
    assert any(words in wrong for wrong in json.loads(capsys.readouterr().out)["wrong"])


def test_a_broken_template_is_told_with_its_line(site, capsys):
    path = site_dirs()[0] / TRIAL
    path.parent.mkdir(parents=True)
    path.write_text('{% extends "below/sbatch/trial.sbatch.j2" %}\n{% block teardown %}\n')
    assert main(["templates", "check"]) == 64
    assert f"{path}:" in capsys.readouterr().err


def test_a_file_that_nothing_reads_is_told(site, capsys, without_shellcheck):
    (site / "etc" / "sbatch").mkdir(parents=True)
    (site / "etc" / "sbatch" / "trail.sbatch.j2").write_text("")
    assert main(["templates", "check"]) == 64
    assert "trail.sbatch.j2: not used" in capsys.readouterr().out


def test_unknown_names_are_refused(site, capsys):
    assert main(["templates", "eject", "trail"]) == 64 and "sbatch/trial.sbatch.j2" in capsys.readouterr().err
    assert (
        main(["templates", "eject", "trial", "--block", "sight"]) == 64
        and "has no block 'sight'" in capsys.readouterr().err
    )
    assert main(["templates", "eject", "trial", "--to", "-"]) == 0
    assert capsys.readouterr().out.startswith('{% extends "below/sbatch/trial.sbatch.j2" %}\n')
