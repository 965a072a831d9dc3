"""Options whose effect no other test shows, and the rules of consistency.py."""

import json
from pathlib import Path

import pytest

from hpc_rl.config.compat.areal_options import ONE_VALUE
from hpc_rl.config.load.load import SBATCH_DEFAULTS, UnusableOptions, load
from hpc_rl.config.load.profiles import list_site_dirs
from hpc_rl.config.rules.check import check
from hpc_rl.core.errors import ConfigError
from hpc_rl.core.refusal import Kind, Refusal
from hpc_rl.plan.plan import make_plan
from hpc_rl.schedulers.slurm import OF_CONFIGURATION

COMMON = ["experiment_name=e", "trial_name=t", "train_dataset.path=/d.jsonl", "train_dataset.batch_size=8"]
BASE = [*COMMON, "actor.path=/m", "gconfig.n_samples=4"]


def collect_refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        check(load([], [*BASE, *overrides]), files=False)
    return str(caught.value)


def test_a_cluster_profile_is_loaded_before_every_file(tmp_path):
    (tmp_path / "big.yaml").write_text(
        "cluster: {n_nodes: 7, n_gpus_per_node: 4}\nlauncher: {slurm: {partition: gpu}}\n"
    )
    (tmp_path / "a.yaml").write_text("cluster: {cluster_name: big, n_nodes: 2}\n")
    loaded = load([tmp_path / "a.yaml"], BASE, profiles=[tmp_path])
    assert (loaded.config.cluster.n_nodes, loaded.config.cluster.n_gpus_per_node) == (2, 4)
    assert loaded.config.launcher.slurm.partition == "gpu"
    assert loaded.origins["launcher.slurm.partition"] == f"{tmp_path}/big.yaml:2"
    assert "big.yaml is loaded first" in str(loaded.notes[0])
    odd = load([], [*BASE, r"cluster.cluster_name=\${a.b}"], profiles=[tmp_path])
    assert odd.config.cluster.cluster_name == "${a.b}"
    lone = load([], [*BASE, "cluster.cluster_name=other"], profiles=[tmp_path])
    assert lone.notes[0].option == "cluster.cluster_name" and "is only a label" in str(lone.notes[0])


def test_what_sbatch_takes_from_the_environment_is_a_default_that_is_named(tmp_path):
    (tmp_path / "big.yaml").write_text("launcher: {slurm: {qos: high}}\n")
    environ = {
        "SBATCH_ACCOUNT": "0123",
        "SBATCH_TIMELIMIT": "90",
        "SBATCH_QOS": "low",
        "SBATCH_PARTITION": "gpu",
    }
    environ |= {"SBATCH_RESERVATION": "", "SBATCH_GRES": "gpu:1"}
    given = [*BASE, "cluster.cluster_name=big", "launcher.slurm.partition=null"]
    loaded = load([], given, profiles=[tmp_path], environ=environ)
    slurm = loaded.config.launcher.slurm
    assert (slurm.account, slurm.time) == ("0123", "90")
    assert (slurm.qos, slurm.partition, slurm.reservation, slurm.gres) == ("high", None, None, None)
    assert loaded.origins["launcher.slurm.account"] == "environment SBATCH_ACCOUNT"
    noted = [note for note in map(str, loaded.notes) if "SBATCH_" in note]
    assert noted == [
        "launcher.slurm.account is 0123, set by environment SBATCH_ACCOUNT.",
        "launcher.slurm.time is 90, set by environment SBATCH_TIMELIMIT.",
    ]
    with pytest.raises(ConfigError, match=r"launcher.slurm.time .environment SBATCH_TIMELIMIT"):
        load([], BASE, profiles=[], environ={"SBATCH_TIMELIMIT": "soon"})
    assert set(SBATCH_DEFAULTS) == set(OF_CONFIGURATION), "sbatch does not say that it ignores them"


def test_a_profile_that_is_asked_for_by_name_must_exist(tmp_path, monkeypatch):
    monkeypatch.setenv("HPC_RL_SITE_DIR", str(tmp_path))
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster" / "big.yaml").write_text("cluster: {n_nodes: 7}\n")
    loaded = load([], BASE, cluster="big")
    assert (loaded.config.cluster.n_nodes, loaded.config.cluster.cluster_name) == (7, "big")
    with pytest.raises(
        ConfigError, match=r"--cluster bg: there is no such profile; the profiles in .* are: .*\bbig\b"
    ):
        load([], BASE, cluster="bg")


@pytest.mark.parametrize(
    ("environ", "places"),
    [
        ({"HPC_RL_SITE_DIR": "/a:/b", "XDG_CONFIG_HOME": "/x"}, ["/a", "/b"]),
        ({"HPC_RL_SITE_DIR": ""}, []),
        ({"XDG_CONFIG_HOME": "/x"}, ["/x/hpc-rl", "/etc/hpc-rl"]),
    ],
)
def test_where_a_site_keeps_its_own(environ, places):
    assert [str(folder) for folder in list_site_dirs(environ)] == places


def test_srun_options_reach_the_units():
    loaded = check(
        load([], [*BASE, "launcher.slurm.srun_additional_args=--mpi=pmix --comment='a b'"]), files=False
    )
    units = make_plan(loaded.config, loaded.explicit, interpreter="python", scheduler="slurm").units
    assert {tuple(unit.srun_args) for unit in units} == {("--mpi=pmix", "--comment=a b")}


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["rollout.queue_size=4"], "rollout.queue_size 4 must be at least train_dataset.batch_size 8"),
        (
            ["gconfig.stop=[x]", "sglang.skip_tokenizer_init=true"],
            "gconfig.stop needs the server's tokenizer",
        ),
        (
            ["gconfig.stop=[x]", "cluster.n_gpus_per_node=0"],
            "can't be used with embedded servers; use gconfig.stop_token_ids",
        ),
        (
            ["gconfig.frequency_penalty=1", "cluster.n_gpus_per_node=0"],
            "gconfig.frequency_penalty 1.0 can't be used with",
        ),
        (
            ["train_dataset.pin_memory=true", "cluster.n_gpus_per_node=0"],
            "train_dataset.pin_memory has no effect without GPUs",
        ),
        (
            ["launcher.slurm.srun_additional_args=--mpi=pmi2 -K --chdir $PWD"],
            "-K can't be given, because the trial sets it",
        ),
        (["launcher.slurm.srun_additional_args=--mpi=$X"], "is not replaced by its value"),
        (["launcher.slurm.srun_additional_args=x"], "'x' is not an option"),
        (["launcher.slurm.srun_additional_args='"], "can't be split"),
        (["launcher.slurm.mount=/a:/b"], "launcher.slurm.mount has no effect without"),
        (
            ["stats_logger.wandb.wandb_api_key=abc"],
            "stats_logger.wandb.wandb_api_key *** can't be used: a key does not belong",
        ),
        (["sglang.version=0.4.9"], "0.4.9 (text) can't be used; allowed: 0.5.23"),
    ],
)
def test_refusals(overrides, words):
    assert words in collect_refusal(*overrides)


@pytest.mark.parametrize(
    "name", [name for name in ONE_VALUE if not name.startswith(("{model}.", "model.", "ref."))]
)
def test_an_option_with_one_value_is_accepted_at_this_value_only(name):
    """It is no option: the configuration is the same without it, whether its name is dotted or nested."""
    row = ONE_VALUE[name]
    plain = load([], BASE, profiles=[])
    for value in row.allowed:
        found = load([], [*BASE, f"{name}={json.dumps(value)}"], profiles=[])
        assert (found.config, found.notes) == (plain.config, plain.notes)
    (refusal,) = collect_refusals_of_names([f"{name}=other"])
    assert (refusal.option, refusal.kind, refusal.value) == (name, Kind.UNSUPPORTED, "other")
    assert row.why in refusal.why and refusal.origin


def test_sections_of_areal_with_one_value_may_be_nested_empty_or_null(tmp_path):
    file = tmp_path / "areal.yaml"
    file.write_text(
        "scheduler: {endpoint: http://localhost:8081, type: local}\n"
        "actor: {ds_auto_tp: null, megatron: {wrap_with_ddp: true}}\n"
        "ref: {path: /m, ds_auto_tp: {autotp_size: 1}}\n"
    )
    found = load([file], BASE, profiles=[])
    assert not any("ds_auto_tp" in name or name.startswith("scheduler") for name in found.explicit)
    file.write_text("scheduler: {endpoint: http://other:1}\n")
    (refusal,) = collect_refusals_of_names([], file)
    assert refusal.option == "scheduler.endpoint" and "areal.yaml:1" in refusal.origin


def collect_refusals_of_names(overrides: list[str], *files: Path) -> tuple[Refusal, ...]:
    with pytest.raises(UnusableOptions) as caught:
        load(files, [*BASE, *overrides], profiles=[])
    return caught.value.refusals
