"""`hpc-rl templates`: what an admin sees, writes, compares and checks."""

import base64
import functools
import hashlib
import importlib.metadata
import json
import re
import shutil
import subprocess
from types import SimpleNamespace

import pytest

from hpc_rl.cli import templates
from hpc_rl.cli.__main__ import main
from hpc_rl.cli.templates import make_samples
from hpc_rl.config.load.load import Loaded, load
from hpc_rl.config.load.profiles import list_site_dirs
from hpc_rl.render import lint, overrides
from hpc_rl.render.jinja_environment import find_template_root
from hpc_rl.render.overrides import list_templates

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
    path = list_site_dirs()[0] / SITE
    assert str(path) in capsys.readouterr().out
    assert main(["templates", "eject", "site"]) == 64, "an existing override is kept"
    path.write_text(path.read_text().replace("{{ super() }}", "{{ super() }}module load cuda"))
    capsys.readouterr()
    assert main(["templates", "diff"]) == 1
    said = capsys.readouterr().out
    assert said.count("+module load cuda") == 1 and "@@ every sample\n" in said and "-#SBATCH" not in said
    assert main(["templates", "check"]) == 0
    assert str(path) in capsys.readouterr().out


@pytest.mark.parametrize("template", list_templates())
def test_an_ejected_block_is_what_ours_contains_and_changes_nothing(site, capsys, template):
    blocks = [word for block in list_templates()[template] for word in ("--block", block)]
    assert main(["templates", "eject", template, *blocks]) == 0
    text = (list_site_dirs()[0] / template).read_text()
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
    shown = "\n".join(make_samples([]).values())
    for line in BRANCHES:
        assert re.search(line, shown, re.MULTILINE), line
    for path in [
        *(find_template_root() / "sbatch").glob("*"),
        *(find_template_root() / "templates").glob("*.sh.j2"),
    ]:
        assert path.name.removesuffix(".j2") in {name.rpartition(" ")[2] for name in make_samples([])}


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
)


@pytest.fixture
def without_shellcheck(monkeypatch):
    """Its second and more for all samples is spent in one test."""
    monkeypatch.setattr(lint, "find_shellcheck", lambda: None)


def test_check_renders_every_script(site, capsys, without_shellcheck):
    """An override of any of them that bash can't read is wrong."""
    blocks = {SITE: "site", "templates/steps.sh.j2": "rollout", TRIAL: "teardown", SERVERS: "teardown"}
    for template, block in blocks.items():
        text = f'{{% extends "below/{template}" %}}{{% block {block} %}}\nif\n{{% endblock %}}'
        override(list_site_dirs()[1], text, template)
    assert main(["templates", "check", "--json"]) == 64
    wrong = [one for one in json.loads(capsys.readouterr().out)["wrong"] if "bash -n: " in one]
    for template in blocks:
        name = template.split("/")[1].removesuffix(".j2")
        assert any(f": {name}: " in one for one in wrong), template


def test_an_undefined_variable_of_the_second_component_is_refused(site, capsys):
    block = "{% block resources_of_servers %}{{ nothing }}{% endblock %}"
    override(list_site_dirs()[1], f'{{% extends "below/{TRIAL}" %}}{block}')
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
        (
            '{% extends "below/sbatch/trial.sbatch.j2" %}{% block site %}x{% endblock %}',
            "templates/site.sh.j2 has it",
        ),
        ("#!/bin/bash\ntrue\n", "replaces the whole file"),
        (
            '{% extends "below/sbatch/trial.sbatch.j2" %}{% block environment %}\n#SBATCH --mem=1\n{% endblock %}',
            "2: sbatch ignores this line, because it comes after the first command",
        ),
    ],
)
def test_check_finds_what_can_not_be_meant(site, capsys, without_shellcheck, text, words):
    override(list_site_dirs()[1], text)
    assert main(["templates", "check", "--json"]) == 64
    assert any(words in wrong for wrong in json.loads(capsys.readouterr().out)["wrong"])


def check(layer, template, block, text, capsys):
    """Return what `templates check` says of an override of one block, with the file as FILE."""
    path = override(
        layer,
        f'{{% extends "below/{template}" %}}\n{{% block {block} %}}\n{text}\n{{% endblock %}}\n',
        template,
    )
    assert main(["templates", "check", "--json"]) == 64
    return [wrong.replace(str(path), "FILE") for wrong in json.loads(capsys.readouterr().out)["wrong"]]


@pytest.mark.parametrize(
    ("template", "block", "text", "wrong"),
    [
        (
            "templates/steps.sh.j2",
            "trainer",
            '{{ super() | replace("--wait=31", "--wait=120") }}',
            'FILE:3: replace("--wait=31", …) matches nothing in any sample script',
        ),
        (
            TRIAL,
            "resources",
            '{{ super() | without("--memm", "--time") }}',
            'FILE:3: without("--memm") matches',
        ),
        (
            TRIAL,
            "site_directives",
            "#SBATCH --licences=x",
            "FILE:3: sbatch has no option --licences; did you mean --licenses?",
        ),
        (
            TRIAL,
            "accounting",
            "# SBATCH --qos=x",
            "FILE:3: sbatch takes this line for a comment; write #SBATCH",
        ),
        (SITE, "site", "#SBATCH --qos=x", "FILE:3: sbatch reads #SBATCH lines only in the job script"),
        (SITE, "site", "true\nfi", "FILE:4: bash -n: syntax error near unexpected token `fi'"),
    ],
)
def test_a_mistake_of_an_override_is_told_once_with_its_file_and_line(
    site, capsys, without_shellcheck, template, block, text, wrong
):
    problems = check(site / "etc", template, block, text, capsys)
    assert sum(problem.startswith(wrong) for problem in problems) == 1, problems


def test_a_mistake_that_bash_notices_at_the_end_names_the_overrides_of_the_script(
    site, capsys, without_shellcheck
):
    [problem] = check(site / "etc", SITE, "site", "echo $( y", capsys)
    assert "bash -n: unexpected EOF" in problem and problem.endswith("(changed by FILE)")


def test_filters_that_have_an_effect_in_some_sample_and_options_of_plugins_are_fine(
    site, capsys, without_shellcheck
):
    text = '{{ super() | without("--array") | replace("sbatch", "sbatch") }}#SBATCH --licen=a --container-mounts=/x\n'
    override(
        site / "etc",
        f'{{% extends "below/{SERVERS}" %}}{{% block resources %}}{text}{{% endblock %}}',
        SERVERS,
    )
    main(["templates", "check", "--json"])
    wrong = json.loads(capsys.readouterr().out)["wrong"]
    assert len(wrong) == 1 and 'replace("sbatch"' in wrong[0]


@pytest.mark.parametrize("hook", ["pre_node", "post_node"])
def test_a_hook_on_every_node_leaves_out_the_layout_that_has_none(site, capsys, without_shellcheck, hook):
    (site / "etc" / "hooks.d").mkdir(parents=True)
    (site / "etc" / "hooks.d" / hook).write_text("true\n")
    assert main(["templates", "diff"]) in (0, 1)
    assert main(["templates", "check"]) == 0
    said = capsys.readouterr().out
    assert f"note: sample hetjob is left out: the site's hooks {hook} do not work" in said


def test_the_environment_of_a_site_is_listed_and_its_mistakes_have_a_place(site, capsys, without_shellcheck):
    path = site / "etc" / "hooks.d" / "environment"
    path.parent.mkdir(parents=True)
    path.write_text("export A=1\nesac\n")
    assert main(["templates", "list"]) == 0
    assert f"environment: {path}" in capsys.readouterr().out
    assert main(["templates", "check"]) == 64
    assert f"{path}:2: bash -n: syntax error near unexpected token `esac'" in capsys.readouterr().out


def test_a_change_that_only_some_samples_have_names_them(site, capsys):
    block = "{% block resources_of_servers %}{{ super() }}#SBATCH --hold\n{% endblock %}"
    override(site / "etc", f'{{% extends "below/{TRIAL}" %}}{block}')
    assert main(["templates", "diff"]) == 1
    said = capsys.readouterr().out
    assert re.search(r"@@ hetjob\n(?: .*\n)*\+#SBATCH --hold", said) and said.count("+# changed by") == 1


def test_templates_of_a_checkout_that_were_edited_are_told(tmp_path, monkeypatch):
    run = functools.partial(subprocess.run, cwd=tmp_path, check=True, capture_output=True)
    for folder in overrides.FOLDERS:
        shutil.copytree(find_template_root() / folder, tmp_path / folder)
    run(["git", "init"])
    run(["git", "add", "."])
    run(["git", "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-m", "as shipped"])
    monkeypatch.setattr(overrides, "find_template_root", lambda: tmp_path)
    assert overrides.find_edited() == []
    with (tmp_path / SITE).open("a") as file:
        file.write("ulimit -n 4096\n")
    assert overrides.find_edited() == [tmp_path / SITE]


def test_templates_of_a_wheel_that_were_edited_are_told(tmp_path, monkeypatch):
    root = tmp_path / "_data"
    shutil.copytree(find_template_root() / "sbatch", root / "sbatch")
    digest = (
        base64.urlsafe_b64encode(hashlib.sha256((root / TRIAL).read_bytes()).digest()).rstrip(b"=").decode()
    )
    file = importlib.metadata.PackagePath(TRIAL)
    file.hash = importlib.metadata.FileHash(f"sha256={digest}")
    file.dist = SimpleNamespace(locate_file=lambda name: root / name)
    monkeypatch.setattr(overrides, "find_template_root", lambda: root)
    monkeypatch.setattr(overrides.importlib.metadata, "files", lambda name: [file])
    assert overrides.find_edited() == []
    (root / TRIAL).write_text("#!/bin/bash\n")
    assert overrides.find_edited() == [root / TRIAL]


def test_check_names_a_shipped_template_that_was_edited(site, capsys, monkeypatch, without_shellcheck):
    monkeypatch.setattr(overrides, "find_edited", lambda: [find_template_root() / SITE])
    assert main(["templates", "check"]) == 0
    said = capsys.readouterr().out
    assert f"note: {find_template_root() / SITE} was edited" in said and "nothing overridden" not in said


def test_a_broken_template_is_told_with_its_line(site, capsys):
    path = list_site_dirs()[0] / TRIAL
    path.parent.mkdir(parents=True)
    path.write_text('{% extends "below/sbatch/trial.sbatch.j2" %}\n{% block teardown %}\n')
    assert main(["templates", "check"]) == 64
    assert f"{path}:" in capsys.readouterr().err


def test_a_file_that_nothing_reads_is_told(site, capsys, without_shellcheck):
    (site / "etc" / "sbatch").mkdir(parents=True)
    (site / "etc" / "sbatch" / "trail.sbatch.j2").write_text("")
    assert main(["templates", "check"]) == 64
    assert "trail.sbatch.j2: no template has this name" in capsys.readouterr().out


def test_unknown_names_are_refused(site, capsys):
    assert main(["templates", "eject", "trail"]) == 64 and "sbatch/trial.sbatch.j2" in capsys.readouterr().err
    assert (
        main(["templates", "eject", "trial", "--block", "sight"]) == 64
        and "has no block 'sight'" in capsys.readouterr().err
    )
    assert main(["templates", "eject", "trial", "--to", "-"]) == 0
    assert capsys.readouterr().out.startswith('{% extends "below/sbatch/trial.sbatch.j2" %}\n')
