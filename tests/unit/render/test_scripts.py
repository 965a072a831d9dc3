"""The text of the scripts; their behaviour is tested with bash and Slurm elsewhere."""

import dataclasses
import re
from pathlib import Path

import pytest
from toy_plans import toy_unit

from hpc_rl.config.options.cluster import SlurmLauncherConfig
from hpc_rl.core.errors import ConfigError
from hpc_rl.plan.schema import Group
from hpc_rl.render import scripts as script_names
from hpc_rl.render.slurm_options import compute_signal_lead_s, make_directives

CLUSTER_PAGE = Path(__file__).resolve().parents[3] / "docs" / "cluster.md"


def test_the_docs_name_every_script():
    _, _, rest = CLUSTER_PAGE.read_text().partition("| file in `<trial>/scripts/` | content |\n")
    documented = set(re.findall(r"^\| `([^`]+)` \|", rest.partition("\n\n")[0], re.MULTILINE))
    names = ("TRIAL", "SERVERS", "LOCAL", "SITE", "STEPS", "PARAMETERS")
    known = {getattr(script_names, name) for name in names}
    assert documented == known | {"hook.<event>.<n>", "hpc_rl-….zip"}


def test_options_that_are_not_set_are_not_there(script):
    text = script("slurm")
    for option in ("partition", "account", "qos", "gres", "gpus-per-node", "constraint"):
        assert f"\n#SBATCH --{option}" not in text and f"\n##SBATCH --{option}=\n" in text
    assert "None" not in text
    assert "#SBATCH --mem=500M\n" in text and "#SBATCH --requeue\n" in text


ALL = {  # every option of the section that is a directive -> its line
    "partition": ("gpu,long", "--partition=gpu,long"),
    "account": ("0123", "--account=0123"),
    "qos": ("high", "--qos=high"),
    "time": ("2-12", "--time=2-12"),
    "constraint": ("[rack1*2&ib]|a100", '--constraint="[rack1*2&ib]|a100"'),
    "reservation": ("maint", "--reservation=maint"),
    "nodelist": ("n[1-4,7]", "--nodelist=n[1-4,7]"),
    "exclude": ("n9", "--exclude=n9"),
    "ntasks_per_node": (1, "--ntasks-per-node=1"),
    "cpus_per_task": ("64", "--cpus-per-task=64"),
    "mem": ("0", "--mem=0"),
    "mem_per_cpu": ("4G", "--mem-per-cpu=4G"),
    "mem_per_gpu": ("60G", "--mem-per-gpu=60G"),
    "gres": ("nvme:1,gpu:a100:2", "--gres=nvme:1,gpu:a100:2"),
    "exclusive": (True, "--exclusive"),
    "tmp": ("100G", "--tmp=100G"),
    "switches": ("1@60:00", "--switches=1@60:00"),
    "licenses": ("abaqus:2", "--licenses=abaqus:2"),
    "wckey": ("thesis", "--wckey=thesis"),
    "dependency": ("afterany:12", "--dependency=afterany:12"),
    "mail_type": ("END,FAIL", "--mail-type=END,FAIL"),
    "mail_user": ("a@b.org", "--mail-user=a@b.org"),
    "comment": ("mine", '--comment="tag mine"'),
    "extra_args": (["--hint=nomultithread", '--prefer "a b"'], '--prefer "a b"'),
}


@pytest.mark.parametrize("name", ALL)
def test_every_option_becomes_its_line_and_null_is_not_there(script, name):
    value, line = ALL[name]
    assert f"#SBATCH {line}\n" in script("slurm", **{name: value})
    if name not in ("comment", "extra_args"):
        assert f"\n#SBATCH --{name.replace('_', '-')}" not in script("slurm", **{name: None})


def test_no_option_of_the_section_is_without_a_test():
    not_directives = {"gpus_by", "gpu_type", "srun_additional_args", "layout", "servers", "continue_by"}
    not_directives |= {"replace_servers"}
    not_directives |= {"container_type", "mount", "backend", "srun_mpi", "srun_args"}  # test_steps.py
    options = {field.name for field in dataclasses.fields(SlurmLauncherConfig) if "image" not in field.name}
    assert options - not_directives - {"container_program", "container_args"} == set(ALL)  # test_container.py


@pytest.mark.parametrize(
    ("options", "lines"),
    [
        ({}, ["--gpus-per-node=8"]),
        ({"gpu_type": "h100"}, ["--gpus-per-node=h100:8"]),
        ({"gpus_by": "gres", "gpu_type": "h100"}, ["--gres=gpu:h100:8"]),
        ({"gpus_by": "gres", "gres": "nvme:1"}, ["--gres=gpu:8,nvme:1"]),
        ({"gres": "nvme:1"}, ["--gpus-per-node=8", "--gres=nvme:1"]),
        ({"gres": "gpu:8"}, ["--gres=gpu:8"]),
        ({"gpus_by": None}, []),
    ],
)
def test_gpus_are_asked_for_by_one_option(options, lines):
    group = Group(name="trial", nodes=[0], cpus_per_node=1, mem_mb_per_node=1)
    asked = make_directives(SlurmLauncherConfig(**options), group, 8)
    found = [f"--{name}={value}" for name, value in asked["resources"] if value is not None]
    assert [line for line in found if "gpu" in line or "gres" in line] == lines


@pytest.mark.parametrize("root", ["/a:b", "/a\nb"])
def test_paths_that_no_pythonpath_can_hold_are_refused(script, root):
    with pytest.raises(ConfigError, match="fileroot"):
        script("local", root=Path(root))


@pytest.mark.parametrize(
    ("options", "there", "absent"),
    [
        ({"mem_per_cpu": "4G"}, "--mem-per-cpu=4G", "--mem="),
        ({"mode": "disabled"}, "--no-requeue", "--signal"),
        ({"root": Path("/a%j")}, "--output=/a%%j/exp/one/jobs/%j.out", "--output=/a%j"),
    ],
    ids=[
        "memory by CPU replaces the derived one",
        "disabled gets no warning",
        "a percent sign is no pattern",
    ],
)
def test_one_directive_in_place_of_another(script, options, there, absent):
    text = script("slurm", **options)
    assert f"\n#SBATCH {there}\n" in text and f"\n#SBATCH {absent}" not in text


def override(folder: Path, text: str, name: str = "sbatch/trial.sbatch.j2") -> Path:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
    return folder


EXTENDS = '{% extends "below/sbatch/trial.sbatch.j2" %}\n'
SITE = '{% extends "below/templates/site.sh.j2" %}\n'
STEPS = '{% extends "below/templates/steps.sh.j2" %}\n'


def site_override(folder: Path, text: str) -> Path:
    return override(folder, SITE + text, "templates/site.sh.j2")


def test_a_site_overrides_a_block_and_keeps_the_rest(scripts, tmp_path):
    block = "{% block site %}\nmodule load cuda/12.4\n{% endblock %}\n"
    for number, base in enumerate(("builtin", "below")):
        text = SITE.replace("below", base) + block
        site = override(tmp_path / f"site{number}", text, "templates/site.sh.j2")
        ours, theirs = scripts("slurm"), scripts("slurm", site=site)
        changed = theirs.pop("site.sh")
        assert f"# changed by {site}/templates/site.sh.j2\n" in changed
        own = [line for line in changed.splitlines() if "cuda" not in line and "changed by" not in line]
        assert "module load cuda/12.4\n" in changed and own == ours.pop("site.sh").splitlines()
        assert theirs == ours


def test_layers_add_up_and_the_nearest_wins(scripts, tmp_path):
    system = "{% block site %}\nmodule load base\n{% endblock %}"
    person = "{% block site %}\n{{ super() }}module load mine\n{% endblock %}"
    folders = [site_override(tmp_path / "person", person), site_override(tmp_path / "etc", system)]
    override(tmp_path / "etc", EXTENDS + "{% block teardown %}\necho system\n{% endblock %}")
    trial = override(tmp_path / "trial", EXTENDS + "{% block teardown %}\necho trial\n{% endblock %}")
    texts = scripts("slurm", own=trial, site=folders)
    site = texts["site.sh"]
    assert site.index("module load base\n") < site.index("module load mine\n")
    assert site.count("# changed by ") == texts["trial.sbatch"].count("# changed by ") == 2
    assert "echo trial\n" in texts["trial.sbatch"] and "echo system" not in texts["trial.sbatch"]


def test_single_directives_can_be_dropped_and_replaced(script, tmp_path):
    block = '{% block resources %}\n{{ super() | without("--mem", "--time") }}#SBATCH --mem=0\n{% endblock %}'
    site = override(tmp_path, EXTENDS + block)
    lines = script("slurm", site=site, time="1:00:00").splitlines()
    assert [line for line in lines if "--mem=" in line or "--time" in line] == ["#SBATCH --mem=0"]
    assert "#SBATCH --cpus-per-task=2" in lines
    with pytest.raises(ConfigError, match="long options of sbatch, such as --mem, not 'mem'"):
        script("slurm", site=override(tmp_path, EXTENDS + block.replace('"--mem"', '"mem"')))


def test_a_launch_line_can_be_changed(scripts, tmp_path):
    change = 'replace("--distribution=block:block", "--distribution=cyclic")'
    block = f"{{% block trainer %}}\n{{{{ super() | {change} }}}}{{% endblock %}}"
    site = override(tmp_path, STEPS + block, "templates/steps.sh.j2")
    text = scripts("slurm", site=site, units=[toy_unit()])["steps.sh"]
    assert "--distribution=cyclic" in text and f"# changed by {site}/templates/steps.sh.j2\n" in text


@pytest.mark.parametrize(
    "name", ["sbatch/trial.sbatch.j2", "sbatch/servers.sbatch.j2", "templates/local.sh.j2"]
)
def test_a_block_of_another_template_is_refused_with_the_name_of_that_template(script, tmp_path, name):
    text = f'{{% extends "below/{name}" %}}{{% block site %}}\nmodule load cuda\n{{% endblock %}}'
    site = override(tmp_path, text, name)
    with pytest.raises(ConfigError, match=r"has no block 'site'; templates/site\.sh\.j2 has it"):
        script("slurm", site=site)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            EXTENDS + "{% block sight %}x{% endblock %}",
            r"no block 'sight'\. Its blocks: resources, accounting",
        ),
        (EXTENDS.replace("below/", ""), "extends itself; write `below/sbatch"),
        ("{{ partiton }}", "changed by .*partiton"),
    ],
    ids=["a block that does not exist", "itself", "broken"],
)
def test_a_template_that_can_not_be_used_is_refused_with_the_reason(script, tmp_path, text, words):
    with pytest.raises(ConfigError, match=words):
        script("slurm", site=override(tmp_path, text))


def test_a_missing_templates_dir_is_refused(script, tmp_path):
    with pytest.raises(ConfigError, match="templates_dir"):
        script("slurm", own=tmp_path / "nowhere")


def test_a_short_job_is_not_told_at_its_start():
    assert (
        compute_signal_lead_s("1") == 12
        and compute_signal_lead_s("24:00:00") == 300
        and compute_signal_lead_s(None) == 180
    )
