"""Submission imports the user's rewards and workflow and calls each reward once, before anything is queued."""

import json
import sys

import pytest

from hpc_rl.cli.__main__ import main
from hpc_rl.config.load.load import load
from hpc_rl.config.load.stored import from_dict
from hpc_rl.core.trial import load_json
from hpc_rl.rollout.batch_log.judged import Judged
from hpc_rl.rollout.batch_log.ledger import Ledger, RejectReason, RejectRecord
from hpc_rl.schedulers.base import State
from hpc_rl.stats import median_rule
from hpc_rl.trials import trial_index, user_code
from hpc_rl.trials.user_code import fingerprint_judges

pytestmark = [pytest.mark.waits, pytest.mark.usefixtures("state_home", "scheduler")]

CODE = """
import os, sys, time
def good(prompt, completion, answer, **columns):
    print("noise")
    return {"reward": 1.0, "right": completion == answer}
def of_trl(completions, answer, **kwargs):
    return [1.0]
def misspelt(prompt, completion, **columns):
    return columns["anwser"]
def picky(prompt, completion, **columns):
    return float(completion)
def text(prompt, completion, **columns):
    return "yes"
def ends(prompt, completion, **columns):
    os._exit(3)
def exits(prompt, completion, **columns):
    sys.exit(0)
def forks(prompt, completion, **columns):
    if not os.fork():
        time.sleep(600)
    return 1.0
def loops(prompt, completion, **columns):
    while True:
        pass
async def later(prompt, completion, **columns):
    return 0.5
def ranks(prompt, completions, **columns):
    return [1.0] * len(completions)
ranks.batched = True
async def run(prompt, generate):
    return None
def plain(prompt, generate):
    return None
def sync(prompt):
    return None
number = 3
"""


def submit(config, capsys, **options: str) -> tuple[int, str]:
    given = [f"rollout.{name}={value}" for name, value in options.items()]
    code = main(["submit", "--config", str(config), "--dry_run", *given])
    out, err = capsys.readouterr()
    return code, out + err


@pytest.fixture(autouse=True)
def own_code(config, monkeypatch):
    monkeypatch.chdir(config.parent)
    (config.parent / "mine.py").write_text(CODE)
    (config.parent / "broken.py").write_text("def reward(:\n")


def test_sound_code_of_every_kind_is_taken(config, capsys):
    code, said = submit(config, capsys, reward_fn="mine:good,mine:later,mine:ranks", workflow="mine:run")
    assert code == 0 and "mine" not in said.partition("plan ")[0]
    assert (
        "note: rollout.workflow mine:plain is not `async def`"
        in submit(config, capsys, workflow="mine:plain")[1]
    )


def test_all_mistakes_are_refused_at_once_with_their_places(config, capsys):
    names = "mine:nope, absent:reward, broken:reward, mine:of_trl, mine:misspelt, mine:text"
    mistakes = [
        "clutser.n_nodes=1",
        "total_train_steps=many",
        "gconfig.n_sample=4",  # so n_samples is not known, and no rule is asked about it
        "actor.overlong_reward_penalty=true",
        "valid_dataset.path=nowhere.jsonl",
        "launcher.slurm.time=${nothing}",
        f"rollout.reward_fn={names}",
        "rollout.workflow=mine:sync",
    ]
    assert main(["check", "--config", str(config), *mistakes, "--json"]) == 64
    refusals = json.loads(capsys.readouterr().out)["refusals"]
    assert main(["submit", "--config", str(config), *mistakes]) == 64
    assert capsys.readouterr().err.removeprefix("hpc-rl: ").splitlines() == refusals
    for line, words in zip(
        refusals,
        (
            "unknown key clutser (command line: clutser.n_nodes): did you mean cluster?",
            "unknown key gconfig.n_sample (command line: gconfig.n_sample): did you mean gconfig.n_samples?",
            "total_train_steps (command line: total_train_steps): many (text) can't be used; allowed: an integer",
            "actor.overlong_reward_penalty true can't be used with actor.overlong_tokens null",
            "actor.overlong_reward_penalty true can't be used with actor.overlong_penalty_factor null",
            "nowhere.jsonl does not exist",
            "rollout.workflow mine:sync must accept the call run(prompt, generate)",
            "'mine:nope' can't be imported: module 'mine' has no attribute 'nope'",
            "'absent:reward' can't be imported: No module named 'absent'",
            "'broken:reward' can't be imported: SyntaxError",
            "reward(prompt, completion, **columns); this is of_trl(completions, answer, **kwargs) (mine.py:6)",
            "raises KeyError: 'anwser' (mine.py:9, in misspelt)",
            "does not return a reward: the reward is 'yes' (str); allowed: a finite number",
        ),
        strict=True,
    ):
        assert words in line


def test_check_says_that_nothing_is_wrong_and_what_comes_next(config, scheduler, tmp_path, capsys):
    before = {*tmp_path.rglob("*")}
    assert main(["check", str(config), "rollout.reward_fn=mine:good"]) == 0
    said = capsys.readouterr().out
    assert "nothing is refused" in said
    assert f"next       hpc-rl submit {config} rollout.reward_fn=mine:good" in said
    assert not scheduler.calls and {*tmp_path.rglob("*")} == before


def test_refusals_of_rules_and_of_the_machine_are_told_together(config, capsys):
    taken = config.parent / "taken"
    taken.write_text("")
    assert main(["check", str(config), "train_dataset.path=nowhere.jsonl", f"cluster.fileroot={taken}"]) == 64
    said = capsys.readouterr().err
    assert "nowhere.jsonl does not exist" in said and f"{taken}" in said


def test_what_is_not_a_function_and_where_modules_are_searched_for(config, capsys):
    code, said = submit(config, capsys, reward_fn="mine:number")
    assert code == 64 and "mine:number is 3 of type int, not a function" in said
    code, said = submit(config, capsys, reward_fn="mien:good")
    assert code == 64 and f"Did you mean mine? Modules of yours are searched for in {config.parent};" in said
    code, said = submit(config, capsys, reward_fn="mine:of_trl")
    assert code == 64 and "write `of_trl.batched = True` below the function" in said


@pytest.mark.parametrize(
    ("part", "code", "words"),
    [
        ("mine:brief", 0, ""),
        (
            "nowhere:brief",
            64,
            "teacher.reward_parts 'nowhere:brief' can't be imported: No module named 'nowhere'",
        ),
        (
            "mine:number",
            64,
            "teacher.reward_parts: 'mine:number' must be a function (lesson, so_far) -> float",
        ),
        ("mine:wordy", 64, "mine:wordy, for an example lesson, does not return a number"),
        ("mine:takes_nothing", 64, "mine:takes_nothing, for an example lesson, raises TypeError"),
    ],
)
def test_a_part_of_a_teachers_reward_is_tried(config, capsys, part, code, words):
    with (config.parent / "mine.py").open("a") as file:
        file.write("def brief(lesson, so_far): return -0.01 * lesson.num_tokens\n")
        file.write("def wordy(lesson, so_far): return lesson.teaching\n")
        file.write("def takes_nothing(): return 0.0\n")
    model = config.parent / "model"
    (model / "chat_template.jinja").write_text("{{ messages }}")
    options = ["trainer=teacher", f"pools.student.path={model}", "pools.student.max_new_tokens=4"]
    options += ["allocation_mode=embedded:d1+embedded[student]:d1+fsdp:d1", "actor.ppo_n_minibatches=1"]
    options += [f"teacher.reward_parts=[gain,'{part}']"]
    assert main(["check", str(config), *options]) == code
    said = " ".join("".join(capsys.readouterr()).split())
    assert words in said
    judges = fingerprint_judges(load([config], options).config, [str(config.parent)])
    assert (f"code of teacher.reward_parts {part}" in judges) == part.startswith("mine")


def test_a_misspelt_option_of_the_command_and_a_misspelt_file_are_told(config, capsys):
    assert main(["check", str(config), "--epsiode"]) == 64
    assert "there is no option --epsiode: did you mean --episode?" in capsys.readouterr().err
    (config.parent / "train.jsonl").write_text("{}\n")
    assert main(["check", str(config), f"train_dataset.path={config.parent}/trian.jsonl"]) == 64
    assert "trian.jsonl does not exist; did you mean train.jsonl?" in capsys.readouterr().err


def test_what_is_tried_is_refused_with_option_and_place(config, monkeypatch, capsys):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    bad = config.parent / "bad"
    bad.mkdir()
    (bad / "tokenizer.json").write_text("{")
    options = [f"tokenizer_path={bad}", "launcher.type=local", "cluster.n_gpus_per_node=2"]
    assert main(["check", str(config), *options, "rollout.reward_fn=mine:nope"]) == 64
    said = capsys.readouterr().err
    assert f"tokenizer_path: {bad}/tokenizer.json can't be read: EOF" in said
    assert "(command line: tokenizer_path)" in said and "(command line: rollout.reward_fn)" in said
    assert "cluster.n_gpus_per_node 2 exceeds the GPUs of this machine, which are 0" in said


def test_code_that_ends_its_process_is_refused(config, capsys):
    code, said = submit(config, capsys, reward_fn="mine:ends")
    assert code == 64 and "mine:ends" in said and "ends the process, with code 3" in said


def test_code_that_never_returns_is_refused_with_its_place(config, capsys):
    """What a reward forks may live on."""
    code, said = submit(config, capsys, reward_fn="mine:forks,mine:exits,mine:loops", reward_timeout_s="2")
    assert code == 64 and "mine:forks" not in said
    assert "raises SystemExit: 0 (mine.py:17, in exits)" in said
    assert "takes more than 2 s (rollout.reward_timeout_s) (mine.py:2" in said and ", in loops)" in said


def test_what_only_this_completion_raises_is_a_note(config, capsys):
    code, said = submit(config, capsys, reward_fn="mine:picky")
    assert code == 0
    assert "note: rollout.reward_fn mine:picky" in said and "ValueError" in said and "mine.py:11" in said


def test_another_environment_is_not_tried(config, capsys):
    code = main(["submit", "--config", str(config), "--dry_run", "rollout.reward_fn=mine:nope",
                 "launcher.setup=module load cuda"])  # fmt: skip
    out, err = capsys.readouterr()
    assert code == 0, err
    assert "not tried, because the job has another environment" in out


def test_prompts_that_user_code_rejected_are_issued_again_when_it_has_changed(
    config, scheduler, capsys, make_generation
):
    """The change is in a module that the reward imports; the files of other packages do not count."""
    helper = config.parent / "helping.py"
    helper.write_text("def value(): return 0.5\n")
    (config.parent / "scoring.py").write_text(
        "import json\nfrom helping import value\ndef score(prompt, completion, **columns):\n    return value()\n"
    )
    assert main(["submit", "--config", str(config), "rollout.reward_fn=scoring:score"]) == 0
    scheduler.answers["job-1"] = State.CANCELLED
    trial = trial_index.resolve("small")
    make_generation(trial, 5)
    ledger = Ledger(trial.rollout)
    for index in range(3):
        ledger.append_reject(RejectRecord(index, 1, RejectReason.REWARD_EXCEPTION))
    ledger.append_reject(RejectRecord(3, 1, RejectReason.TOO_LONG))
    ledger.close()
    of_the_job = from_dict(load_json(trial.config_json))
    Judged(trial.rollout, fingerprint_judges(of_the_job, [str(config.parent)])).write()
    capsys.readouterr()
    assert main(["recover", "small", "--explain"]) == 0
    said = capsys.readouterr().out
    assert (
        "3 prompts that the reward or the workflow rejected stay rejected" in said and "changed" not in said
    )
    helper.write_text("def value(): return 1.0\n")
    assert main(["recover", "small", "--explain"]) == 0
    said = capsys.readouterr().out
    assert (
        "changed    code of rollout.reward_fn: " in said
        and "finished groups came from the old policy" in said
    )
    assert "3 prompts that the earlier reward or workflow rejected are generated again" in said
    assert main(["recover", "small", "--replay", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [found[name] for name in ("rejected_prompts", "rejected_again", "new_batches")] == [3, True, False]


def test_the_digest_of_a_reward_is_that_of_all_own_files_that_it_imports(tmp_path, config):
    files = {
        "own/__init__.py": "",
        "own/rewards.py": "import json, numpy\nfrom .parts import part\ndef score(*_): return part.value()\n",
        "own/parts/__init__.py": "from . import part\n",
        "own/parts/part.py": "from own import rewards\ndef value(: return 1\n",  # can't be parsed
        "own/other.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    loaded = load([config], ["rollout.reward_fn=own.rewards:score"]).config

    def digest() -> str:
        return fingerprint_judges(loaded, [str(tmp_path), *sys.path])["code of rollout.reward_fn"]

    changed = {}
    for name in files:
        before = digest()
        (tmp_path / name).write_text(files[name] + "# more\n")
        changed[name] = digest() != before
    assert changed == dict.fromkeys(files, True) | {"own/__init__.py": False, "own/other.py": False}


CALLBACKS = """
import os, time
class Good:
    def on_step(self, event):
        event.stop("never in a check")
        print(event.metrics["reward"])
    def on_checkpoint(self, event):
        assert event.is_check and os.path.isdir(event.path)
class Misspelt:
    def on_evaluation(self, event):
        return event.metrics["eval_rewrad"]
class Ends:
    def on_end(self, event): os._exit(4)
class Waits:
    def on_end(self, event): time.sleep(600)
"""


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Good", None),
        (
            "Misspelt",
            "called as on_evaluation(event) with event.is_check, raises KeyError: 'eval_rewrad' (calls.py:",
        ),
        ("Ends", "ends the process, with code 4"),
        ("Waits", "takes more than 1 s (calls.py:"),
    ],
)
def test_callbacks_are_tried(name, words, config, capsys):
    (config.parent / "calls.py").write_text(CALLBACKS)
    options = [f"callbacks=[calls:{name}]", "rollout.reward_timeout_s=1"]
    code = main(["submit", "--config", str(config), "--dry_run", *options])
    said = "".join(capsys.readouterr())
    assert code == (0 if words is None else 64), said
    assert words is None or (words in said and "callbacks" in said)
    assert not list(config.parent.rglob("cancel-*"))


@pytest.mark.parametrize(
    ("value", "words"),
    [("[Notify]", "is not of the form package.module:Class"), ("[a:B,a:B]", "is named twice")],
)
def test_callbacks_are_import_paths(value, words, config, capsys):
    assert main(["submit", "--config", str(config), "--dry_run", f"callbacks={value}"]) == 64
    assert words in capsys.readouterr().err


def test_the_rule_of_a_sweep_is_not_tried(config, capsys, monkeypatch):
    """Each trial of a sweep that stops bad trials has it."""
    monkeypatch.setattr(user_code, "execute_apart", None)
    options = ["--dry_run", f"callbacks=[{median_rule.PATH}]"]
    assert main(["submit", "--config", str(config), *options]) == 0
