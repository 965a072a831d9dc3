"""The door: what is listed, what a wrong word gets, which exit code a mistake ends with, and how little is imported."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from hpc_rl.cli import __main__ as cli
from hpc_rl.errors import ConfigError, NothingToResume, SchedulerError, TrialBusy

HEAVY = (
    "torch",
    "transformers",
    "sglang",
    "omegaconf",
    "datasets",
    "ray",
    "wandb",
    "submitit",
    "jsonargparse",
)


def python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, sys.path))
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path, **env},
        timeout=60,
    )


def test_help_lists_every_command_and_nothing_that_is_not_built(capsys):
    assert cli.main(["--help"]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    assert {
        "submit",
        "render",
        "status",
        "logs",
        "cancel",
        "recover",
        "list",
        "quickstart",
        "config",
        "checkpoint",
        "templates",
    } <= set(listed)
    for command in listed:
        with pytest.raises(SystemExit) as ended:
            cli.main([command, "--help"])
        assert ended.value.code == 0
        assert f"hpc-rl {command}" in capsys.readouterr().out


def test_no_word_at_all_is_bad_usage(capsys):
    assert cli.main([]) == 2
    assert "usage: hpc-rl" in capsys.readouterr().err


def test_an_unknown_command_suggests_the_nearest(capsys):
    assert cli.main(["sumbit"]) == 2
    assert "Did you mean `hpc-rl submit`?" in capsys.readouterr().err
    assert cli.main(["zzz"]) == 2
    assert "Commands: " in capsys.readouterr().err


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main([command, "--help"])
    assert caught.value.code == 0
    assert f"usage: hpc-rl {command}" in capsys.readouterr().out


def test_submit_help_lists_the_options_of_the_configuration(capsys):
    with pytest.raises(SystemExit):
        cli.main(["submit", "--help"])
    out = capsys.readouterr().out
    for option in (
        "--config",
        "--dry_run",
        "--n_nodes",
        "--actor.optimizer.lr",
        "--rollout.max_head_offpolicyness",
    ):
        assert option in out


@pytest.mark.parametrize(
    "argv",
    [["status"], ["status", "t", "--offlin"], ["logs", "t", "-n", "x"], ["cancel", "t", "--wait_s", "-1"]],
)
def test_bad_usage_ends_with_2(argv, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(argv)
    assert caught.value.code == 2


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("no"), 64),
        (SchedulerError("no"), 69),
        (TrialBusy("no"), 75),
        (NothingToResume("no"), 3),
        (KeyboardInterrupt(), 130),
        (ZeroDivisionError("no"), 70),
    ],
)
def test_a_mistake_is_one_message_and_an_exit_code(monkeypatch, capsys, error, code):
    def fail(argv):
        raise error

    monkeypatch.setattr("hpc_rl.cli.listing.run", fail)
    assert cli.main(["list"]) == code
    message = capsys.readouterr().err
    assert message.startswith("hpc-rl: ")
    assert "Traceback" not in message


def test_an_internal_error_says_where_and_how_to_see_more(monkeypatch, capsys):
    monkeypatch.setattr("hpc_rl.cli.listing.run", lambda argv: 1 / 0)
    cli.main(["list"])
    assert "HPC_RL_TRACEBACK=1" in capsys.readouterr().err
    monkeypatch.setenv("HPC_RL_TRACEBACK", "1")
    cli.main(["list"])
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv",
    [["--help"], ["submit", "--help"], ["list"], ["status", "nothing"]],
    ids=["help", "submit-help", "list", "status"],
)
def test_light_commands_import_nothing_heavy(argv, tmp_path):
    code = f"""
import sys
from hpc_rl.cli.__main__ import main
try:
    main({argv!r})
except SystemExit:
    pass
heavy = [name for name in {HEAVY!r} if name in sys.modules]
if {argv[0]!r} != "submit":
    heavy += [name for name in ("jinja2", "rich", "numpy", "hpc_rl.config.loading.load") if name in sys.modules]
sys.exit(f"imported {{heavy}}" if heavy else 0)
"""
    done = python(code, XDG_STATE_HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr


def test_a_reader_that_leaves_early_is_no_error(tmp_path):
    code = "from hpc_rl.cli.__main__ import main; import sys; sys.exit(main(['--version']))"
    assert python(code, XDG_STATE_HOME=str(tmp_path)).stdout.startswith("hpc-rl ")


def test_quickstart_hands_over_with_an_absolute_directory(monkeypatch, tmp_path):
    handed = []
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr("os.execv", lambda path, argv: handed.append(argv))
    monkeypatch.chdir(tmp_path)
    cli.main(["quickstart", "--dir", "here", "--seed", "3", "total_train_steps=20"])
    assert handed[0][1:3] == ["-m", "hpc_rl.app.quickstart_trial"]
    assert handed[0][3:] == ["--dir", str(tmp_path / "here"), "--seed", "3", "total_train_steps=20"]


def test_quickstart_without_torch_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert cli.main(["quickstart"]) == 64
    assert "hpc-rl[train]" in capsys.readouterr().err
