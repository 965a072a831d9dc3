"""The door: what is listed, what a wrong word gets, which exit code a mistake ends with, and how little is
imported.
"""

import os
import re
import subprocess
import sys

import pytest
from patience import extend

from hpc_rl.cli import __main__ as cli
from hpc_rl.cli import options
from hpc_rl.core.errors import ConfigError, NothingToResume, SchedulerError, TrialBusy

HEAVY = (
    "torch",
    "transformers",
    "sglang",
    "omegaconf",
    "datasets",
    "ray",
    "wandb",
    "submitit",
)


def python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, sys.path))
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path, **env},
        timeout=extend(60),
    )


def test_help_lists_every_command_and_nothing_that_is_not_built(capsys):
    assert cli.main(["--help"]) == 0
    listed = re.findall(r"^    ([a-z]+)(?:  |$)", capsys.readouterr().out, re.MULTILINE)
    assert listed == list(cli.COMMANDS)


def test_no_word_at_all_is_bad_usage(capsys):
    assert cli.main([]) == 2
    assert "usage: hpc-rl" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        ("sumbit", "Did you mean `hpc-rl submit`?"),
        ("stop", "Did you mean `hpc-rl cancel`?"),
        ("kill", "Did you mean `hpc-rl cancel`?"),
        ("resume", "Did you mean `hpc-rl recover`?"),
        ("continue", "Did you mean `hpc-rl recover`?"),
        ("ps", "Did you mean `hpc-rl list`?"),
        ("ls", "Did you mean `hpc-rl list`?"),
        ("info", "Did you mean `hpc-rl status`?"),
        ("validate", "Did you mean `hpc-rl check`?"),
        ("rm", "Did you mean `hpc-rl remove`?"),
        ("rename", "Did you mean `hpc-rl fork`?"),
        ("archive", "Did you mean `hpc-rl export`?"),
        ("completion", "Did you mean `hpc-rl config completion`?"),
        ("zzz", "Commands: quickstart, check, submit"),
    ],
)
def test_an_unknown_command_is_answered(capsys, typed, hint):
    assert cli.main([typed, "x"]) == 2
    assert hint in capsys.readouterr().err


def test_synonyms_name_commands_that_exist():
    assert {meant.split()[0] for meant in cli.SYNONYMS.values()} <= set(cli.COMMANDS)
    assert not cli.COMMANDS.keys() & cli.SYNONYMS.keys()


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_has_help(command, capsys):
    assert cli.main([command, "--help"]) == 0
    assert f"usage: hpc-rl {command}" in capsys.readouterr().out


def help_of(capsys, *argv: str) -> str:
    assert cli.main([*argv, "--help"]) == 0
    return capsys.readouterr().out


def test_submit_help_is_one_screen(capsys):
    out = help_of(capsys, "submit")
    assert len(out.splitlines()) <= 80
    for expected in ("--config", "--dry_run", "-N N, --n_nodes", "-p NAME", "-A NAME", "-t TIME", "-q NAME"):
        assert expected in out
    for expected in ("examples:", "sections: actor, cluster", "--help SECTION", "--print_config"):
        assert expected in out


@pytest.mark.parametrize(
    ("topic", "expected", "absent"),
    [
        ("launcher.slurm", "--launcher.slurm.time TIME", "--launcher.type"),
        ("actor.optimizer", "--actor.optimizer.lr LR", "--actor.path"),
        ("model", "--model.optimizer.lr LR", "--actor.path"),
        ("actor.optimizer.lr", "--actor.optimizer.lr LR", "--actor.optimizer.type"),
        ("torch compile", "--actor.enable_torch_compile", "--actor.path"),
        ("all", "--rollout.max_head_offpolicyness", "--dry_run"),
    ],
)
def test_help_of_a_section(capsys, topic, expected, absent):
    assert cli.main(["submit", "--help", topic]) == 0
    out = capsys.readouterr().out
    assert expected in out and absent not in out
    assert cli.main(["recover", "first", "--help", topic]) == 0
    assert capsys.readouterr().out == out


def test_help_of_a_section_that_does_not_exist(capsys):
    for topic in ("luncher", "?"):
        assert cli.main(["submit", "--help", topic]) == 64
        assert "sections: actor, cluster" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "argv", "arranged"),
    [
        ("submit", ["a.yaml", "--dry-run"], ["--config=a.yaml", "--dry_run"]),
        ("submit", ["--config", "a", "b.yml"], ["--config", "a", "--config=b.yml"]),
        ("submit", ["-N", "4", "-pgpu"], ["n_nodes 4", "partition gpu"]),
        ("submit", ["--n-nodes=4", "a.b=1", "--a.b", "-1"], ["--overrides=--n-nodes=4", "a.b=1", "a.b -1"]),
        ("submit", ["--preset", "cpu", "hello"], ["--preset", "cpu", "hello"]),
        ("recover", ["first", "--from", "4", "--lr", "1"], ["first", "--from", "4", "lr 1"]),
        ("recover", ["first", "~ref"], ["first", "--overrides=~ref"]),
        ("attach", ["t", "--exec", "--", "ls", "-l"], ["t", "--exec", "--run=ls", "--run=-l"]),
        ("logs", ["t", "-n", "5"], ["t", "-n", "5"]),
    ],
)
def test_options_of_a_configuration_are_told_from_those_of_a_command(command, argv, arranged):
    parser = cli.build_parsers([command])[command,]
    wanted: list[str] = []
    for one in arranged:
        name, space, value = one.partition(" ")
        if space:
            wanted += [f"--overrides=--{name}", f"--overrides={value}"]
        elif command == "submit" and one in ("a.b=1", "hello"):
            wanted.append(f"--overrides={one}")
        else:
            wanted.append(one)
    assert options.arrange_arguments(parser, argv) == wanted


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["cancel"], "arguments are required: trial"),
        (["checkpoint", "export"], "arguments are required: trial"),
        (["status", "t", "--offlin"], "--offlin"),
        (["logs", "t", "-n", "x"], "x can't be used; allowed: an integer, at least 0"),
        (["cancel", "t", "--wait_s", "-1"], "-1 can't be used; allowed: a number of seconds, at least 0"),
    ],
)
def test_bad_usage_ends_with_2(argv, words, capsys):
    assert cli.main(argv) == 2
    message = capsys.readouterr().err
    assert message.startswith("hpc-rl: ") and words in message and f"`hpc-rl {argv[0]} --help`" in message


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
    def fail(args):
        raise error

    monkeypatch.setattr("hpc_rl.cli.list.main", fail)
    assert cli.main(["list"]) == code
    message = capsys.readouterr().err
    assert message.startswith("hpc-rl: ")
    assert "Traceback" not in message


def test_an_internal_error_says_where_and_how_to_see_more(monkeypatch, capsys):
    monkeypatch.setattr("hpc_rl.cli.list.main", lambda args: 1 / 0)
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
    heavy += [name for name in ("jinja2", "rich", "numpy", "hpc_rl.config.load.load") if name in sys.modules]
    heavy += [name for name in ("hpc_rl.cli.submit", "hpc_rl.cli.config", "shtab") if name in sys.modules]
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
    assert handed[0][1:3] == ["-m", "hpc_rl.tools.quickstart_trial"]
    own = ["--method", "grpo", "--dir", str(tmp_path / "here"), "--seed", "3"]
    assert handed[0][3:] == [*own, "total_train_steps=20"]


def test_quickstart_without_torch_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert cli.main(["quickstart"]) == 64
    assert "hpc-rl[train]" in capsys.readouterr().err
