"""Secrets among the variables of a trial: the roles get them, and nothing that is written shows them."""

import json
import stat
import subprocess
from pathlib import Path

import pytest
from command_line import Shell, small_trial
from patience import extend

from hpc_rl.config.load.stored import from_dict
from hpc_rl.core.trial import Trial, find_account_name
from hpc_rl.trials.prepare import load_stored

SECRETS = {
    "env": {"HF_TOKEN": "hf_secretvalue1", "SITE_LICENSE_KEY": "key with 'quotes'\nand lines"},
    "trainer_env_vars": {"MY_PASSWORD": "pass$(word)2"},
    "inference_server_env_vars": {"AWS_SECRET_ACCESS_KEY": "aws/secret+3"},
}
OPEN = {"TOKENIZERS_PARALLELISM": "true", "PLAIN": "shown"}


@pytest.fixture
def rendered(tmp_path: Path) -> tuple[Shell, Trial]:
    shell = small_trial(tmp_path, "{type: local}")
    words = [f"launcher.{name}={json.dumps(values | OPEN)}" for name, values in SECRETS.items()]
    done = shell.call("render", "--config", "grpo.yaml", *words)
    assert done.returncode == 0, done.stderr
    assert not any(value in done.stdout + done.stderr for value in every_secret())
    return shell, Trial.of(tmp_path / "runs", find_account_name(), "sums", "small")


def every_secret() -> list[str]:
    return [value for values in SECRETS.values() for value in values.values()]


def test_only_files_of_their_own_have_them(rendered):
    _, trial = rendered
    files = {path for path in trial.dir.rglob("*") if path.is_file()}
    keeping = {trial.secret_variables(name) for name in SECRETS}
    assert keeping < files
    for path in files - keeping:
        content = path.read_bytes()
        shown = [
            one
            for one in every_secret()
            if one.encode() in content or json.dumps(one)[1:-1].encode() in content
        ]
        assert not shown, f"{path.name} has {shown}"
    assert {stat.S_IMODE(path.stat().st_mode) for path in keeping} == {0o600}


def test_what_is_no_secret_stays_where_it_was(rendered):
    _, trial = rendered
    config = from_dict(json.loads(trial.config_json.read_bytes()))
    assert OPEN.items() <= dict(config.launcher.env).items()
    assert "export PLAIN=shown" in (trial.scripts / "site.sh").read_text()
    units = json.loads(trial.plan_json.read_bytes())["units"]
    assert all(unit["env"]["PLAIN"] == "shown" for unit in units if unit["role"] in ("trainer", "server"))


def test_the_processes_get_them(rendered):
    _, trial = rendered
    script = f"set +eu; source {trial.scripts}/site.sh; printf '%s' \"$HF_TOKEN/$SITE_LICENSE_KEY\""
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, timeout=extend(20), check=True
    )
    assert done.stdout == "/".join(SECRETS["env"].values()), done.stderr
    assert {name: trial.load_variables(name) for name in SECRETS} == SECRETS


def test_a_short_value_is_hidden_in_the_command_and_other_words_stay(rendered):
    shell, trial = rendered
    words = ['launcher.env={"A_KEY": "e", "PLAIN": "here"}', "recover.mode=disabled"]
    done = shell.call("render", "--config", "grpo.yaml", *words)
    assert done.returncode == 0, done.stderr
    command = json.loads(trial.provenance_json.read_bytes())["command"]
    assert command[-2:] == ['launcher.env={"A_KEY": "***", "PLAIN": "here"}', words[1]]


def test_recover_has_them_again(rendered):
    _, trial = rendered
    launcher = load_stored(trial, []).config.launcher
    assert {name: getattr(launcher, name) for name in SECRETS} == {
        name: values | OPEN for name, values in SECRETS.items()
    }
    trial.secret_variables("env").unlink()
    assert load_stored(trial, []).config.launcher.env["HF_TOKEN"] == "***"
