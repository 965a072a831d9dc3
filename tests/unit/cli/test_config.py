"""`hpc-rl config`: show, diff, schema, reference, completion; presets on the command line."""

import contextlib
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_rl.cli.__main__ import main
from hpc_rl.config.load.load import load
from hpc_rl.config.load.stored import to_dict
from hpc_rl.config.rules.check import check
from hpc_rl.core.trial import Trial
from hpc_rl.trials import trial_index

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
GRPO = str(CONFIGS / "grpo.yaml")


def test_show_prints_yaml_that_loads_again(capsys, tmp_path):
    assert main(["config", "show", "--config", GRPO, "gconfig.n_samples=4"]) == 0
    first = capsys.readouterr().out
    assert "  n_samples: 4" in first and "# command line: gconfig.n_samples" in first
    (tmp_path / "again.yaml").write_text(first)
    assert main(["config", "diff", GRPO, str(tmp_path / "again.yaml"), "--json"]) == 1
    differ = json.loads(capsys.readouterr().out)  # what is derived is compared too, not told as new
    assert differ.keys() == {"gconfig.n_samples", "actor.group_size", "actor.reward_norm.group_size"}


def test_diff_takes_a_trials_configuration_without_references(capsys, tmp_path):
    config = check(load([GRPO], ["launcher.slurm.comment=a \\${x} b"]), files=False).config
    (tmp_path / "config.json").write_text(json.dumps(to_dict(config)))
    assert main(["config", "diff", str(tmp_path / "config.json"), GRPO, "--json"]) == 1
    differ = json.loads(capsys.readouterr().out)
    assert (
        differ.keys() == {"launcher.slurm.comment"}
        and differ["launcher.slurm.comment"]["a"]["value"] == "a ${x} b"
    )


def test_show_as_json_is_one_object_by_dotted_name(capsys):
    assert main(["config", "show", "--config", GRPO, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["seed"] == {"value": 1, "origin": "default"}
    assert shown["actor.group_size"]["value"] == 8 and shown["actor.group_size"]["origin"].startswith(
        "derived"
    )


def test_show_refuses_as_submit_does(capsys):
    assert main(["config", "show", "--config", GRPO, "gconfig.n_sample=4"]) == 64
    assert "did you mean gconfig.n_samples?" in capsys.readouterr().err


def test_diff_of_equals_is_empty_and_0(capsys):
    assert main(["config", "diff", GRPO, GRPO]) == 0
    assert capsys.readouterr().out == ""
    assert main(["config", "diff", GRPO, str(CONFIGS / "grpo_sglang.yaml"), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["gconfig.max_new_tokens"]["b"]["value"] == 1024


def test_schema_and_reference(capsys):
    assert main(["config", "schema", "--trainer", "sft"]) == 0
    assert json.loads(capsys.readouterr().out)["$ref"] == "#/$defs/SFTConfig"
    assert main(["config", "reference"]) == 0
    assert "| `n_samples`<br>" in capsys.readouterr().out


def test_the_reference_as_pages(capsys, tmp_path):
    assert main(["config", "reference", "--output", str(tmp_path / "pages")]) == 0
    assert capsys.readouterr().out == ""
    assert "| `n_samples`<br>" in (tmp_path / "pages" / "gconfig.md").read_text()
    assert "[`gconfig`](gconfig.md)" in (tmp_path / "pages" / "index.md").read_text()


def test_a_preset_for_a_machine_without_gpus(capsys):
    args = ["config", "show", "--config", str(CONFIGS / "grpo_sglang.yaml"), "--preset", "cpu", "--json"]
    assert main(args) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["allocation_mode"]["value"] == "embedded:d1+fsdp:d1"
    assert (shown["cluster.n_nodes"]["value"], shown["cluster.n_nodes"]["origin"]) == (1, "preset cpu")


@pytest.fixture(scope="module")
def completion():
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        assert main(["config", "completion", "bash"]) == 0
    return said.getvalue()


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("submit --gconfig.n_s", ["--gconfig.n_samples"]),
        ("submit --dry", ["--dry_run"]),
        ("recover first --fro", ["--from"]),
        ("recover first --model.optimizer.lr_", ["--model.optimizer.lr_scheduler_type"]),
        ("status first --of", ["--offline"]),
        ("checkpoint ver", ["verify"]),
        ("checkpoint export --to", ["--to"]),
        ("config show --actor.eps_clip_", ["--actor.eps_clip_higher"]),
        ("config show --config a.yaml --see", ["--seed"]),
        ("submit --cluster.n_no", ["--cluster.n_nodes"]),
        ("submit --ref.dty", ["--ref.dtype"]),
        ("submit --recover.mode f", ["fault"]),
        ("submit mine.yaml recover.mode = f", ["fault"]),  # as the shell splits recover.mode=f
        ("submit actor.path = min", ["mine.yaml"]),
        ("recover first --recover.mode =", ["disabled", "auto", "fault", "resume"]),
        ("submit --n_no", ["--n_nodes"]),
        ("config completion z", ["zsh"]),
        ("config sch", ["schema"]),
        ("can", ["cancel"]),
        ("status --gconfig", []),
        ("status fi", ["first"]),
        ("fork first new actor.optimizer.lr", ["actor.optimizer.lr=", "actor.optimizer.lr_scheduler_type="]),
        ("submit mine.y", ["mine.yaml"]),
        ("render actor.eps_clip_", ["actor.eps_clip_higher="]),
        ("logs exp/s", ["exp/second"]),
        ("plot first s", ["second"]),
        ("config diff s", ["second"]),
        ("checkpoint export f", ["first"]),
        ("submit --after s", ["second"]),
        ("plot second --metric agent/", ["agent/turns"]),
        ("plot --metric reward,rew", ["reward,reward", "reward,reward/format"]),
        ("plot first --metric agent/", []),
        ("plot exp/first --metric hel", ["held-out"]),
    ],
)
def test_completion_is_a_script_that_completes(completion, typed, offered, tmp_path, state_home):
    for name in ("first", "second"):
        trial_index.record_trial(trial := Trial(tmp_path / "exp" / name))
        row = {"step": 1, "reward": 0.5, "reward/format": 1} | (
            {"agent/turns": 2} if name == "second" else {}
        )
        metrics = trial.attempt("7.0").metrics(0)
        metrics.parent.mkdir(parents=True)
        metrics.write_text(f"{json.dumps(row)}\n")
    (tmp_path / "mine.yaml").touch()
    words = ["hpc-rl", *typed.split()]
    call = f"COMP_WORDS=({' '.join(words)}) COMP_CWORD={len(words) - 1}; _hpc_rl 2>/dev/null"
    (tmp_path / "completion.sh").write_text(f'{completion}\n{call}; printf "%s\\n" "${{COMPREPLY[@]}}"\n')
    done = subprocess.run(["bash", "completion.sh"], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.split() == offered


def test_the_completion_of_zsh(capsys):
    assert main(["config", "completion", "zsh"]) == 0
    assert capsys.readouterr().out.startswith("#compdef hpc-rl")


def test_no_torch_and_no_interpolation_library():
    code = (
        "import sys; from hpc_rl.cli.__main__ import main\n"
        f"main(['config', 'show', '--config', {GRPO!r}])\n"
        "print([m for m in ('torch', 'transformers', 'omegaconf', 'numpy') if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"
