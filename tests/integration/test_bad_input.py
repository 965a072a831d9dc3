"""Bad input on the command line: one clear message, the documented exit code, and nothing left behind.

Most cases call the program's main function; those about words in bytes, signals, outputs and what runs start it.
"""

import os
import signal
import subprocess
import unicodedata
from pathlib import Path

import pytest
from command_line import PROGRAM, Shell, make_python, small_trial
from patience import extend

from hpc_rl.core.trial import Trial, find_account_name
from hpc_rl.trials import trial_index


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    """A good configuration `grpo.yaml` in an otherwise empty directory; its model is there but never
    loaded.
    """
    return small_trial(tmp_path, "{type: local}")


SUBMIT = ("submit", "--config", "grpo.yaml")


def test_the_configuration_itself_is_good(shell):
    with shell.nothing_left():
        done = shell.run(*SUBMIT, "--dry_run")
    assert done.returncode == 0, done.stderr


# -- the command line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["actor.optimzer.lr=1e-5"], ["unknown key actor.optimzer (", "did you mean actor.optimizer?"]),
        (["--n_node", "2"], ["unknown key n_node", "command line: --n_node"]),
        (["total_train_steps=many"], ["total_train_steps", "many (text)", "allowed: an integer"]),
        (["total_train_steps=1.5"], ["1.5 (a number)", "allowed: an integer"]),
        (["actor.path=/nowhere/model"], ["actor.path /nowhere/model is not a directory"]),
        (["train_dataset.path=nothing.jsonl"], ["train_dataset.path", "nothing.jsonl does not exist"]),
        (
            ["train_dataset.columns={prompt: promt}"],
            ["row 1", "train_dataset.columns", "Did you mean prompt?"],
        ),
        (["tokenizer_path=/nowhere"], ["tokenizer_path /nowhere has no tokenizer.json"]),
        (["allocation_mode=embedded:d1+fsdp:"], ["allocation_mode", "character 18"]),
        (
            ["cluster.n_gpus_per_node=8", "allocation_mode=sglang:d8+fsdp:d8"],
            ["it needs 16 GPUs", "nearest that fits: sglang:d"],
        ),
        (
            ["cluster.n_gpus_per_node=8", "allocation_mode=sglang:d6+fsdp:d4"],
            ["nearest that fits: sglang:d4+fsdp:d4"],
        ),
        (["allocation_mode=embedded:d999999999+fsdp:d1"], ["at most 100000 are allowed"]),
        (["allocation_mode=embedded:d" + "9" * 5000], ["5000 digits"]),
        (["--n_nodes", "4"], ["needs Slurm, but launcher.type is local"]),
        (["trial_name=a/b"], ["trial_name 'a/b' can't be used"]),
        (["trial_name=.."], ["trial_name '..' can't be used"]),
        (["trial_name=../../x"], ["trial_name '../../x' can't be used"]),
        (["trial_name=a..b"], ["trial_name 'a..b' can't be used"]),
        (["trial_name=-rf"], ["trial_name '-rf' can't be used"]),
        (["trial_name=a\n"], ["trial_name 'a\\n' can't be used"]),
        (["trial_name="], ["trial_name '' can't be used"]),
        (["trial_name=null"], ["trial_name", "null can't be used"]),
        ([b"trial_name=\xff"], ["trial_name"]),
        (["experiment_name=a/b"], ["experiment_name 'a/b' can't be used"]),
        (["experiment_name=.."], ["experiment_name '..' can't be used"]),
        (["total_train_steps=" + "9" * 5000], ["total_train_steps", "5000 characters"]),
        (["seed=99999999999999999999"], ["seed", "It must be from -"]),
        (["actor.optimizer.lr=" + "9" * 400], ["actor.optimizer.lr", "It must be from -"]),
        (["actor.optimizer.lr=.nan"], ["actor.optimizer.lr", "must be finite"]),
        (["actor.optimizer.lr=nan"], ["actor.optimizer.lr", "nan (text)"]),
        (["actor.optimizer.lr=1e999"], ["actor.optimizer.lr", "must be finite"]),
        (["actor.optimizer.lr=-1"], ["actor.optimizer.lr", "at least 0"]),
        (["--n_nodes", "-3"], ["cluster.n_nodes", "at least 1"]),
        (["--n_nodes=0"], ["cluster.n_nodes", "at least 1"]),
        (["--n_nodes", "1000000000000"], ["cluster.n_nodes", "at most 10000"]),
        (
            ["train_dataset.batch_size=1000000000039", "actor.ppo_n_minibatches=1000000000000000"],
            ["must not exceed"],
        ),
        (["cluster=null"], ["cluster", "is a section"]),
        (["cluster=[1,2]"], ["cluster", "is a section"]),
        (["cluster.fileroot=/tmp/a\nb"], ["cluster.fileroot", "line breaks"]),
        (["cluster.fileroot=/tmp/a:b"], ["cluster.fileroot", "colon"]),
        (["cluster.fileroot=/tmp/" + "a" * 300], ["cluster.fileroot", "too long"]),
        ([b"cluster.fileroot=/tmp/\xff"], ["cluster.fileroot", "UTF-8"]),
        (["launcher.slurm.partition=a\n#SBATCH --wrap=x"], ["launcher.slurm.partition", "line break"]),
        (["launcher.slurm.time=1:2:3:4"], ["launcher.slurm.time", "24:00:00"]),
        (["launcher.trainer_env_vars={'A;rm': x}"], ["launcher.trainer_env_vars", "'A;rm'"]),
        (["launcher.python=/nowhere/python"], ["launcher.python /nowhere/python"]),
        (["launcher.templates_dir=/nowhere"], ["launcher.templates_dir /nowhere is not a directory"]),
        (["rollout.reward_fn=os.system('x')"], ["rollout.reward_fn"]),
        (["trial_name=${nothing.there}"], ["trial_name", "can't be resolved"]),
        (["trial_name=${"], ["trial_name", "can't be read"]),
        (["trial_name=${trial_name}"], ["trial_name", "can't be resolved"]),
        (["--n_nodes"], ["--n_nodes needs a value"]),
        (["hello"], ["argument 'hello' is not understood"]),
        (["--"], ["argument '--' is not understood"]),
        (["=5"], ["argument '=5' is not understood"]),
        ([""], ["argument '' is not understood"]),
    ],
    ids=lambda value: "_".join(map(repr, value))[:60] if isinstance(value, list) else None,
)
def test_refused_on_the_command_line(shell, arguments, words):
    message = shell.refused(64, *SUBMIT, *arguments)
    assert all(part in message for part in words), message
    assert len(message) < 1500


def test_usage(shell):
    assert "did you mean" in shell.refused(2, "sumbit", process=True).lower()
    assert shell.run("submit", "--config").returncode == 2
    assert shell.run("cancel").returncode == 2
    assert "hpc-rl submit FILE" in shell.refused(64, "submit", process=True)


# -- files


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("total_train_steps", "total_train_step", ["grpo.yaml:3", "did you mean total_train_steps?"]),
        (
            "n_samples: 4",
            "n_sample: 4",
            ["unknown key gconfig.n_sample (grpo.yaml:7)", "did you mean gconfig.n_samples?"],
        ),
        ("steps: 10", "steps: many", ["total_train_steps (grpo.yaml:3)", "many (text)"]),
        (
            "trial_name: small",
            "trial_name: small\ntrial_name: other",
            ["grpo.yaml:3", "trial_name is given twice", "grpo.yaml:2"],
        ),
        ("n_samples: 4", "n_samples: 4, n_samples: 5", ["grpo.yaml:7", "n_samples is given twice"]),
        (
            "gconfig: {n_samples: 4, max_new_tokens: 4}",
            "gconfig: null",
            ["gconfig (grpo.yaml:7)", "is a section"],
        ),
        (
            "gconfig: {n_samples: 4, max_new_tokens: 4}",
            "gconfig: [1]",
            ["gconfig (grpo.yaml:7)", "is a section"],
        ),
        ("actor: {", "actor_: {", ["neither actor nor model is given in grpo.yaml"]),
        (
            "trial_name: small",
            "trial_name: !!python/object/apply:os.system [touch pwned]",
            ["grpo.yaml:2", "!!python/object/apply:os.system"],
        ),
        ("trial_name: small", "trial_name: !!binary aGVsbG8=", ["grpo.yaml:2", "!!binary"]),
        ("steps: 10", "steps: !!int ten", ["grpo.yaml:3", "ten can't be read as a number"]),
        ("steps: 10", "steps: " + "9" * 5000, ["grpo.yaml:3", "can't be read as a number"]),
        (
            "gconfig: {n_samples: 4",
            "gconfig: {<<: 5, n_samples: 4",
            ["grpo.yaml:7", "the value of << must be a mapping"],
        ),
        ("trial_name: small", "trial_name: &a [*a]", ["grpo.yaml", "contains itself"]),
        ("trial_name: small", "trial_name: " + "[" * 5000 + "]" * 5000, ["grpo.yaml", "nested too deeply"]),
        ("trial_name: small", "trial_name: a\x00b", ["grpo.yaml", "not valid YAML"]),
        ("trial_name: small", "trial_name: [", ["grpo.yaml", "not valid YAML"]),
        ("launcher: {type: local}", "launcher:\n\ttype: local", ["grpo.yaml:9", "not valid YAML"]),
        ("launcher: {type: local}", "---\na: 1", ["grpo.yaml:8", "another document"]),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else None,
)
def test_refused_in_a_file(shell, old, new, words):
    file = shell.here / "grpo.yaml"
    assert file.read_text().count(old) == 1
    file.write_text(file.read_text().replace(old, new))
    message = shell.refused(64, *SUBMIT)
    assert all(part in message for part in words), message


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "neither actor nor model is given in grpo.yaml"),
        (b"# nothing\n", "neither actor nor model is given in grpo.yaml"),
        (b"- a\n- b\n", "must hold a mapping"),
        (b"hello\n", "must hold a mapping"),
        (b"trial_name: \xff\xfe\n", "not UTF-8"),
        ("trial_name: a".encode("utf-16"), "not UTF-8"),
        (b"a: [" + b"1, " * 7_000_000 + b"1]", "more than 512 KiB"),
    ],
)
def test_a_file_that_is_no_configuration(shell, content, words):
    (shell.here / "grpo.yaml").write_bytes(content)
    assert words in shell.refused(64, *SUBMIT)


def test_no_file(shell):
    assert "Is a directory" in shell.refused(64, "submit", "--config", ".")
    assert "No such file" in shell.refused(64, "submit", "--config", "nothing.yaml")
    assert "more than 512 KiB" in shell.refused(64, "submit", "--config", "/dev/zero")
    assert "neither actor nor model is given in /dev/null" in shell.refused(
        64, "submit", "--config", "/dev/null"
    )


# -- what the machine says


def test_a_fileroot_that_can_not_be_written(shell, tmp_path):
    for place in (tmp_path / "train.jsonl", tmp_path / "train.jsonl" / "below", Path("/proc/nothing")):
        assert f"{place}/" in shell.refused(73, *SUBMIT, f"cluster.fileroot={place}")
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    if os.geteuid():  # root may write anywhere
        assert "Permission denied" in shell.refused(73, *SUBMIT, f"cluster.fileroot={closed}")


def test_a_refusing_sbatch(shell, tmp_path):
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "sbatch").write_text(
        "#!/bin/sh\necho 'sbatch: error: invalid account or partition' >&2\nexit 1\n"
    )
    (programs / "sbatch").chmod(0o755)
    shell.env["PATH"] = f"{programs}:/usr/bin:/bin"
    message = shell.refused(
        69, *SUBMIT, "launcher.type=slurm", "--n_nodes", "2", "--partition", "nowhere", process=True
    )
    assert "sbatch refused the job: invalid account or partition" in message
    (programs / "sbatch").unlink()
    assert "sbatch is not on the PATH" in shell.refused(69, *SUBMIT, "launcher.type=slurm")


def test_a_trial_that_has_state(shell, tmp_path):
    trial = Trial.of(tmp_path / "runs", find_account_name(), "sums", "small")
    trial.make_dirs()
    (trial.generation(5)).mkdir()
    for mode in ("disabled", "fault"):
        message = shell.refused(75, *SUBMIT, f"recover.mode={mode}")
        assert "trial sums/small has state already" in message
        assert "recover.mode=auto" in message  # a recover has nothing to go on from


def test_nothing_to_resume(shell):
    assert "no valid checkpoint to resume from" in shell.refused(
        3, *SUBMIT, "recover.mode=resume", process=True
    )


@pytest.fixture
def sleeper(tmp_path: Path) -> Path:
    """A sleep that stands in for the supervisor of a job."""
    return make_python(tmp_path / "python", f"exec sleep {extend(60):.0f}")


def test_a_trial_that_runs(shell, sleeper):
    """A real job of the local runner."""
    done = shell.run(*SUBMIT, f"launcher.python={sleeper}", "--parsable")
    assert done.returncode == 0, done.stderr
    try:
        for command in (
            SUBMIT,
            (*SUBMIT, "recover.mode=auto"),
            ("recover", "small"),
            ("render", "--config", "grpo.yaml"),
        ):
            message = shell.refused(75, *command, process=True)
            assert f"sums/small is running as job {done.stdout.strip()}" in message
            assert "hpc-rl cancel sums/small" in message
    finally:
        assert shell.run("cancel", "small", "--now", "--wait_s", "30").returncode == 0


def started_as_from_a_terminal(argv: list[str], shell: Shell) -> subprocess.Popen[str]:
    """A process that Ctrl-C reaches, also where the tests run in the background and ignore it themselves."""
    ours = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return subprocess.Popen(
            argv, cwd=shell.here, env=shell.environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
    finally:
        signal.signal(signal.SIGINT, ours)


def test_an_interrupt_of_follow_leaves_the_trial_and_says_so(shell, sleeper):
    argv = [str(PROGRAM), *SUBMIT, f"launcher.python={sleeper}", "--follow"]
    process = started_as_from_a_terminal(argv, shell)
    try:
        assert process.stdout
        assert any("sums/small: running" in line for line in process.stdout)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=extend(30))
        assert process.returncode == 130
        assert said == "\nhpc-rl: interrupted; the trial continues. Stop it with: hpc-rl cancel sums/small\n"
        assert "running" in shell.state("small")
    finally:
        assert shell.run("cancel", "small", "--now", "--wait_s", "30").returncode == 0


# -- names of trials


def test_an_ambiguous_trial_name(shell, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for experiment in ("sums", "maths"):
        trial = Trial.of(tmp_path / "runs", find_account_name(), experiment, "small")
        trial.make_dirs()
        trial.plan_json.write_text("{}")
        trial_index.record_trial(trial)
    for command in ("status", "logs", "cancel", "recover"):
        message = shell.refused(64, command, "small", process=True)
        assert "2 trials match 'small'" in message
        for experiment in ("sums", "maths"):
            assert f"{experiment}/small" in message
            assert str(Trial.of(tmp_path / "runs", find_account_name(), experiment, "small").dir) in message
    assert "Did you mean" in shell.refused(64, "status", "smal")


@pytest.mark.parametrize(
    "name", ["nothing", "../x", "/nowhere", ".", "/etc/passwd", "", "a/b/c", "~nobody-at-all", b"\xff", "*"]
)
def test_a_trial_that_is_not_there(shell, name):
    for command in ("status", "logs", "cancel", "recover"):
        shell.refused(64, command, name)


# -- outputs


def test_a_reader_that_leaves_early_is_no_error(shell):
    for command in ("--help", "submit --help", "list"):
        piped = f"set -o pipefail; {PROGRAM} {command} | true"
        done = subprocess.run(
            ["bash", "-c", piped], env=shell.environ, capture_output=True, text=True, timeout=extend(60)
        )
        assert done.returncode in (0, 141), done.stderr
        assert done.stderr == ""


def test_a_full_disk_behind_the_output_is_told(shell):
    done = subprocess.run(
        ["bash", "-c", f"{PROGRAM} --help > /dev/full"], env=shell.environ, capture_output=True, text=True
    )
    assert done.returncode == 73
    assert done.stderr == "hpc-rl: the output can't be written: No space left on device\n"


# -- quickstart


@pytest.mark.timeout(180)
def test_an_interrupt_of_quickstart_ends_its_trial_and_says_so(shell):
    argv = [str(PROGRAM), "quickstart"]
    process = started_as_from_a_terminal(argv, shell)
    assert process.stdout
    assert any("quickstart/sft-" in line and ": running" in line for line in process.stdout)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=extend(60))
    assert process.returncode == 130
    assert (
        "interrupted; the trial saves its state and stops. To resume it: hpc-rl recover quickstart/sft-"
        in said
    )
    assert "Traceback" not in said
    shell.wait_for(said.rsplit(None, 1)[1], "cancelled", timeout_s=60)


def test_quickstart_refuses_before_it_begins(shell):
    assert "did you mean total_train_steps?" in shell.refused(64, "quickstart", "total_train_step=3")


def test_quickstart_does_not_replace_what_is_not_its_own(shell):
    (shell.here / "task").mkdir()
    (shell.here / "task" / "thesis.txt").write_text("years of work")
    for code, folder, words in (
        (64, ".", "was not made by quickstart"),
        (73, "/proc/nothing", "--dir"),
        (73, shell.here / "grpo.yaml" / "below", "--dir"),
    ):
        assert words in shell.refused(code, "quickstart", "--dir", folder, process=True)


@pytest.mark.parametrize(
    "words",
    [
        ["experiment_name=\x1b[31mred"],
        ["actor.path=/no/\x1b[2Jmodel"],
        ["launcher.slurm.partition=\x1b]0;title\x07"],
        ["launcher.modules=['\x9b31m']"],
        ["launcher.env={A: \x1b[31m}", "total_train_steps=\x07"],
        ["\x1b[31m=5"],
        ["--\x1b[31m", "5"],
        ["rollout.reward_fn=\x1b[31m:x"],
        ["stats_logger.wandb.mode=\x1b[31m"],
    ],
    ids=repr,
)
@pytest.mark.parametrize("command", [("submit", "--dry_run"), ("render",), ("config", "show")], ids=" ".join)
def test_no_control_character_of_a_value_reaches_the_terminal(shell, command, words):
    done = shell.call(*command, "--config", "grpo.yaml", *words)
    shown = (done.stdout + done.stderr).replace("\n", "").replace("\t", "")
    assert not [char for char in shown if unicodedata.category(char) == "Cc"], repr(shown)
