"""A unit's command in its container: bound paths, the environment of the process, and early refusals."""

import re
from pathlib import Path

import pytest
from toy_plans import toy_unit

from hpc_rl.config.load.load import load
from hpc_rl.config.rules.check import check
from hpc_rl.config.rules.container_rules import check_image_files
from hpc_rl.core.errors import ConfigError
from hpc_rl.plan.containers import add_paths, check_places, make_command, make_common_env, make_container_env
from hpc_rl.plan.plan import make_plan
from hpc_rl.plan.schema import Container, Plan, Unit
from hpc_rl.render.steps import make_launch_lines

BASE = ["experiment_name=e", "trial_name=t", "cluster.fileroot=/shared/runs", "actor.path=/models/warm"]
BASE += ["train_dataset.path=/data/sums/train.jsonl", "train_dataset.batch_size=64", "gconfig.n_samples=4"]
IMAGES = ["trainer_image=/images/t.sif", "inference_server_image=/images/s.sif"]
SQSH = [image.replace(".sif", ".sqsh") for image in IMAGES]
PYXIS = "container_type=pyxis"
PATH = "/shared/runs/u/e/t/scripts/w.zip:/home/me/code"
ENV = {"PYTHONPATH": f"{PATH}:/opt/module/lib", "TMPDIR": "/scratch/7", "HPC_RL_STEPS": "srun"}
TRIAL, WORKDIR = Path("/shared/runs/u/e/t"), Path("/home/me/code")


def argv(made: Unit, trial: Path = TRIAL) -> list[str]:
    """The command that starts a unit's interpreter."""
    return [word for line in make_command(made, "/host/python", trial, WORKDIR).program for word in line]


def environ(made: Unit, env: dict[str, str]) -> dict[str, str]:
    return make_container_env(made, env, "srun", TRIAL, WORKDIR)


def words(*overrides: str) -> list[str]:
    """The options of a trial; those without a section are of launcher.slurm, but for allocation_mode."""
    is_whole = re.compile(r"\w+\.|allocation_mode=").match
    given = [one if is_whole(one) else f"launcher.slurm.{one}" for one in overrides]
    return [*BASE, *given]


def loaded(*overrides: str):
    return check(load([], words(*overrides), profiles=[]), files=False)


def plan(*overrides: str, scheduler: str = "slurm") -> Plan:
    found = loaded(*overrides)
    return make_plan(found.config, found.explicit, interpreter="/host/python", scheduler=scheduler)


def unit(*overrides: str, role: str = "server") -> Unit:
    return next(unit for unit in plan(*overrides).units if unit.role == role)


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        loaded(*overrides)
    return str(caught.value)


def test_each_role_has_its_image_and_interpreter_and_the_supervisor_none():
    made = plan(*IMAGES, "trainer_image_python=/opt/venv/bin/python")
    assert made.python == "/host/python"
    assert {(one.role, one.container.image, one.container.python) for one in made.units} == {
        ("trainer", "/images/t.sif", "/opt/venv/bin/python"),
        ("rollout", "/images/t.sif", "python3"),
        ("server", "/images/s.sif", "python3"),
    }
    some = plan(IMAGES[1], "rollout_image=/images/r.sif")
    images = {one.role: one.container and one.container.image for one in some.units}
    assert images == {"trainer": None, "rollout": "/images/r.sif", "server": "/images/s.sif"}
    assert unit(IMAGES[0], "rollout_image=none", role="rollout").container is None
    assert all(one.container is None for one in plan().units)
    assert Plan.from_json(made.to_json()) == made


def test_apptainer_wraps_the_command():
    made = unit(*IMAGES, "container_args=[--no-home]", "mount=/a:/b:ro,/c")
    paths = ["/shared/runs", "/models/warm", "/data/sums", "/home/me/code"]
    binds = ["/a:/b:ro", "/c:/c", *(f"{path}:{path}" for path in paths)]
    assert argv(made) == [
        *("apptainer", "exec", "--nv"),
        *(word for bind in binds for word in ("--bind", bind)),
        *("--pwd", "/home/me/code", "--no-home", "/images/s.sif"),
        "python3",
    ]
    assert make_command(made, "/host/python", TRIAL, WORKDIR).srun_options == []


def test_gpus_are_asked_for_only_where_they_are_planned():
    for role, wanted in (("trainer", True), ("rollout", False)):
        assert ("--nv" in argv(unit(*IMAGES, role=role))) is wanted
    assert "--nv" not in argv(unit(*IMAGES, "cluster.n_gpus_per_node=0"))


def test_amd_gpus_are_passed_by_rocm_and_named_by_their_own_variable():
    amd = [*IMAGES, "cluster.gpu_kind=amd"]
    assert "--rocm" in argv(unit(*amd)) and "--nv" not in argv(unit(*amd))
    assert "--rocm" not in argv(unit(*amd, role="rollout"))
    dealt = ["gpus_by=null", "exclusive=true"]
    for kind, name in (("amd", "ROCR_VISIBLE_DEVICES"), ("nvidia", "CUDA_VISIBLE_DEVICES")):
        env = unit(f"cluster.gpu_kind={kind}", *dealt, role="trainer").env
        dealt_out = {key: value for key, value in env.items() if key.endswith("_VISIBLE_DEVICES")}
        assert dealt_out == {name: "0,1,2,3"}
    refused = refusal(*IMAGES, "container_args=[--rocm]")
    assert "launcher.slurm.container_args: --rocm can't be given" in refused


def test_a_sif_image_is_started_by_what_copies_it_to_the_node():
    local = "cluster.local_dir=/scratch"
    found = argv(unit(*IMAGES, local))
    copies = ["/host/python", "-m", "hpc_rl.roles.local_image", "/scratch", "/images/s.sif"]
    assert found[:6] == [*copies, "apptainer"]
    assert "/scratch:/scratch" in found and found.count("/images/s.sif") == 2
    assert argv(unit(*IMAGES, "inference_server_image=/images/unpacked", local))[0] == "apptainer"


def names_of(*overrides: str) -> list[str]:
    return [line["container_name"] for line in make_launch_lines(plan(*overrides), TRIAL, WORKDIR)]


def test_pyxis_unpacks_an_image_once_per_node_and_role():
    pools = ["pools.judge.path=/models/judge", "rollout.workflow=my.workflows:ask"]
    pools += ["allocation_mode=sglang:d2+sglang[judge]:d2+fsdp:d4"]
    own = '--container-name=hpc-rl-"$SLURM_JOB_ID"-'
    for given in ([], pools):
        named = names_of(PYXIS, *SQSH, *given)
        assert len(set(named)) == len(named) and all(name.startswith(own) for name in named)
    assert set(names_of(PYXIS, *SQSH, "container_args=[--container-name=mine]")) == {""}
    of_trial = make_launch_lines(plan(PYXIS, *SQSH), TRIAL, WORKDIR)[0]["container_name"]
    assert of_trial != make_launch_lines(plan(PYXIS, *SQSH), TRIAL / "other", WORKDIR)[0]["container_name"]
    assert set(names_of(*IMAGES)) == {""}


def test_what_must_hold_within_is_in_the_environment_not_in_argv():
    made = unit(*IMAGES, "launcher.trainer_env_vars={WORDS: 'a b,$(id)=\"'}", role="trainer")
    env = environ(made, ENV | make_common_env(made, "srun"))
    assert {name: value for name, value in env.items() if name.startswith("APPTAINER")} == {
        "APPTAINER_NO_EVAL": "1",
        "APPTAINERENV_HPC_RL_STEPS": "srun",
        "APPTAINERENV_HPC_RL_NUM_RANKS": "4",
        "APPTAINERENV_OMP_NUM_THREADS": "4",
        "APPTAINERENV_WORDS": 'a b,$(id)="',
        "APPTAINERENV_PYTHONPATH": PATH,
        "APPTAINERENV_PYTHONNOUSERSITE": "1",
        "APPTAINERENV_PYTHONSAFEPATH": "1",
        "APPTAINERENV_PYTHONUNBUFFERED": "1",
        "APPTAINERENV_PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    }
    assert not any("$(id)" in word for word in argv(made))
    assert "TMPDIR" not in env  # it is not bound
    made = unit(*IMAGES, "launcher.trainer_env_vars={PYTHONPATH: /in/the/image}", role="trainer")
    env = ENV | {"PYTHONPATH": ENV["PYTHONPATH"] + ":/in/the/image"}
    assert environ(made, env)["APPTAINERENV_PYTHONPATH"] == f"{PATH}:/in/the/image"
    assert environ(made, ENV | {"TMPDIR": "/tmp/7"})["TMPDIR"] == "/tmp/7"
    made = unit(*IMAGES, "container_program=/usr/bin/singularity")
    assert argv(made)[:2] == ["/usr/bin/singularity", "exec"]
    env = environ(made, ENV)
    assert env["SINGULARITYENV_HPC_RL_STEPS"] == "srun" and env["SINGULARITY_NO_EVAL"] == "1"


def test_pyxis_is_options_of_srun():
    own = ("inference_server_image=/i/s.sqsh", "container_args=[--no-container-mount-home]")
    made = unit(PYXIS, *own)
    assert argv(made) == ["python3"]
    options = make_command(made, "/host/python", TRIAL, WORKDIR).srun_options
    bound = ("/shared/runs", "/models/warm", "/data/sums", "/home/me/code")
    kept = "HPC_RL_NUM_RANKS,HPC_RL_STEPS,OMP_NUM_THREADS,PYTHONNOUSERSITE,PYTHONPATH,PYTHONSAFEPATH"
    assert [word for line in options for word in line] == [
        "--container-image=/i/s.sqsh",
        f"--container-mounts={','.join(f'{path}:{path}' for path in bound)}",
        "--container-workdir=/home/me/code",
        f"--container-env={kept},PYTHONUNBUFFERED",
        "--no-container-entrypoint",
        "--no-container-mount-home",
    ]
    env = environ(made, ENV)
    assert env["PYTHONPATH"] == PATH
    assert not any(name.startswith("APPTAINER") for name in env)


def test_without_a_container_nothing_changes():
    assert (argv(unit()), environ(unit(), ENV)) == (["/host/python"], ENV)


def test_binds_hold_each_path_once_and_what_a_hub_snapshot_links_to():
    added = add_paths(["/a:/a:ro", "/x:/y"], ["/a/b", "/x/1", "/c/d", "/c", "/c", "/"])
    assert added == ["/a:/a:ro", "/x:/y", "/x/1:/x/1", "/c:/c"]
    made = unit(*IMAGES, "actor.path=/hub/models--q--w/snapshots/12ab", "train_dataset.path=/train.jsonl")
    assert made.container.mounts[1:] == ["/hub/models--q--w:/hub/models--q--w", "/train.jsonl:/train.jsonl"]


@pytest.mark.parametrize("text", ["a b", "a'b", "$(touch x)", "`id`", "a;b", "a&b", "%j", "ü", "*"])
def test_strange_characters_stay_one_word(text):
    image = f"/images/{text}/t.sif"
    own = {"image": image, "python": "python3", "program": "apptainer", "mounts": [f"/{text}:/x"], "args": []}
    found = argv(toy_unit(container=Container(type="apptainer", **own)), TRIAL / text)
    assert {image, f"/{text}:/x", f"{TRIAL / text}:{TRIAL / text}"} <= set(found)


ONLY = "can't be used with launcher.slurm.container_type none"
UNBOUND = "can't be mounted in a container"
PATHS = "has no effect without launcher.slurm.trainer_image"


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["trainer_image=docker://x/y:1"], "is not a file: run `apptainer pull"),
        ([PYXIS, "trainer_image=docker://x/y:1"], "`enroot import -o FILE.sqsh docker://…`"),
        (["rollout_image=r.sif"], "rollout_image r.sif is not a path: use /…/r.sif or ./r.sif"),
        (
            [PYXIS, *SQSH, IMAGES[0]],
            "/images/t.sif is an image of apptainer (.sif); pyxis needs a .sqsh file",
        ),
        (["trainer_image=/a:b.sif"], "which the path of an image can't have"),
        (["container_type=none", IMAGES[0]], f"{ONLY}"),
        (["mount=/a:/b"], f"mount {PATHS} or inference_server_image"),
        (["container_args=[--no-home]"], "container_args has no effect without"),
        ([IMAGES[1], "trainer_image_python=/p"], f"trainer_image_python {PATHS}"),
        ([*IMAGES, "mount=a:/b"], "'a:/b' is not of the form /source:/target"),
        ([*IMAGES, "mount=/a\\,b:/c"], "'b:/c' is not of the form /source:/target"),
        ([*IMAGES, "cluster.fileroot='/shared/a,b'"], f"cluster.fileroot /shared/a,b {UNBOUND}"),
        ([*IMAGES, "actor.path='/m\"x'"], UNBOUND),
        ([*IMAGES, "container_args=[--pid]"], "--pid can't be given: the supervisor stops roles by their"),
        ([*IMAGES, "container_args=[-C]"], "-C can't be given: it implies --pid"),
        ([*IMAGES, "container_args=[--cleanenv]"], "--cleanenv can't be given: ranks read their number"),
        ([*IMAGES, "container_args=['--bind=/a']"], "use launcher.slurm.mount"),
        ([*IMAGES, "container_args=['--bind /a']"], "write --bind=/a."),
        ([*IMAGES, "container_args=[-B/a]"], "write the long form, --name=value"),
        ([*IMAGES, "container_args=[image.sif]"], "'image.sif' is not an option"),
        ([PYXIS, *IMAGES, "container_args=[--container-mounts=/a:/b]"], "use launcher.slurm.mount"),
        ([PYXIS, *IMAGES, "container_args=[--comment=x]"], "--comment is not an option of pyxis"),
        (["srun_additional_args=--container-image=x"], "use launcher.slurm.trainer_image"),
    ],
)
def test_refusals(overrides, reason):
    assert reason in refusal(*overrides)


def test_pyxis_needs_slurm():
    with pytest.raises(ConfigError, match=r"launcher\.slurm\.container_type pyxis needs srun"):
        plan(PYXIS, *SQSH, scheduler="local")
    plan(PYXIS, scheduler="local")  # no image: nothing to start with it


def test_directories_that_no_bind_can_name_are_refused_when_rendering():
    for trial, workdir in ((Path("/a,b/t"), WORKDIR), (TRIAL, Path('/a"b'))):
        with pytest.raises(ConfigError, match="can't be mounted in a container"):
            check_places(plan(*IMAGES), trial, workdir)
        check_places(plan(), trial, workdir)


def test_an_image_that_is_missing_where_this_node_looks_is_refused(tmp_path):
    (tmp_path / "s.sif").touch()

    def refused(*overrides: str) -> list[str]:
        found = load([], words("launcher.type=slurm", *overrides), profiles=[])
        return [str(one) for one in check_image_files(found.config, ())]

    there, missing = f"trainer_image={tmp_path}/s.sif", f"inference_server_image={tmp_path}/x/t.sif"
    assert refused(there) == []
    [told] = refused(there, missing)
    assert told == (
        f"launcher.slurm.inference_server_image {tmp_path}/x/t.sif does not exist; "
        "it must be a .sif file or the directory of an unpacked image that all nodes see."
    )
    assert refused("trainer_image=/on-the-nodes-only/t.sif") == [], "nothing of that path is here"
    [told] = refused(PYXIS, f"trainer_image={tmp_path}")
    assert told.endswith("is not a file; pyxis needs a .sqsh file.")
    [told] = refused(there, f"mount={tmp_path}/none:/x")
    assert (
        told
        == f"launcher.slurm.mount: {tmp_path}/none does not exist, so it can't be mounted; correct the path or create it."
    )
