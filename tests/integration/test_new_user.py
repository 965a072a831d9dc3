"""A day of a new user who has README and docs/: own data, own model, own reward of two parts, own workflow of three
turns; each mistake is told before anything is submitted; then a trial, what is seen of it, a fork, and cleaning up.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from command_line import Shell

pytestmark = pytest.mark.timeout(900)
FILES = {
    "make_model.py": """
import string
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

words = ["<end>", *string.digits, *string.ascii_lowercase, *" ?:."]
tokenizer = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, unk_token="?"))
tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
tokenizer.decoder = decoders.Fuse()
fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
fast.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
fast.save_pretrained("model")
torch.manual_seed(0)
sizes = dict(vocab_size=len(words), hidden_size=64, intermediate_size=128, num_hidden_layers=2)
heads = dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=96)
LlamaForCausalLM(LlamaConfig(**sizes, **heads, bos_token_id=None, eos_token_id=0)).save_pretrained("model")
""",
    "make_data.py": """
import json

for name, numbers in (("train", range(20)), ("test", range(20, 24))):
    with open(f"{name}.jsonl", "w") as file:
        for number in numbers:
            kind = "odd" if number % 2 else "even"
            chat = [{"role": "user", "content": f"say {kind} {number}: "}]
            file.write(json.dumps({"messages": chat, "kind": kind}) + "\\n")
""",
    "my_reward.py": """
def score(prompt, completion, kind, **columns):
    first = completion.strip()[:1]
    digit = float(first.isdigit())
    right = float(digit and (int(first) % 2 == 1) == (kind == "odd"))
    return {"reward": 0.3 * digit + 0.7 * right, "digit": digit, "right": right}
""",
    "three.py": """
import asyncio

from hpc_rl import Conversation, TrajectoryGroup, trajectory


async def play(prompt, generate):
    tries = (attempt(prompt, generate, sample) for sample in range(generate.n_samples))
    return TrajectoryGroup(generate.index, list(await asyncio.gather(*tries)))


async def attempt(prompt, generate, sample):
    async def turn(input_ids):
        return await generate(input_ids, sample)

    talk = Conversation(generate.tokenizer, turn, prompt["messages"])
    for _ in range(3):
        reward = await generate.reward(prompt, await talk.reply())
        if reward == 1:
            break
        talk.say(". no. again: ")
    made = trajectory(talk.turns, reward)
    made.stats["turns"] = len(talk.turns)
    return made
""",
    "day.yaml": """
experiment_name: mine
trial_name: one
total_train_steps: 12
cluster: {fileroot: runs, n_gpus_per_node: 0}
actor:
  path: model
  gradient_checkpointing: false
  eps_clip: 0.2
  optimizer: {lr: 3e-3, weight_decay: 0}
  reward_norm: {mean_level: group, std_level: group}
gconfig: {n_samples: 8, max_new_tokens: 2}
rollout: {workflow: "three:play", reward_fn: "my_reward:score", max_head_offpolicyness: 1}
train_dataset: {path: train.jsonl, batch_size: 10, max_length: 40}
valid_dataset: {path: test.jsonl}
evaluator: {freq_steps: 6, keep_samples: 4}
eval_gconfig: {n_samples: 4}
recover: {mode: auto, freq_steps: 6}
launcher: {type: local}
""",
}


@pytest.fixture(scope="module")
def shell(tmp_path_factory) -> Shell:
    """An empty directory, and what the user writes and makes there."""
    shell = Shell(tmp_path_factory.mktemp("day"))
    for name, text in FILES.items():
        (shell.here / name).write_text(text.lstrip())
    shell.type("python make_model.py && python make_data.py", timeout_s=120)
    return shell


@dataclass(frozen=True)
class Mistake:
    """What stands in a file instead of what should, and what one refusal tells: place and remedy. LINE is the line of
    the mistake.
    """

    file: str
    right: str
    wrong: str | None  # None: there is no such file
    told: tuple[str, ...]

    def make(self, folder: Path) -> list[str]:
        """Write it; return what must be told."""
        good = (folder / self.file).read_text()
        assert self.right in good
        (folder / self.file).unlink()
        if self.wrong is not None:
            (folder / self.file).write_text(good.replace(self.right, self.wrong))
        line = good.partition(self.right)[0].count("\n") + 1
        return [word.replace("LINE", str(line)) for word in self.told]


# each entry is one call
TRIES = {
    "first": (
        Mistake("day.yaml", "keep_samples", "keep_sample", ("day.yaml:LINE", "evaluator.keep_samples")),
        Mistake("day.yaml", "eps_clip: 0.2", "eps_clip: -0.2", ("day.yaml:LINE", "at least 0 and at most 1")),
        Mistake("day.yaml", "n_samples: 8", "n_samples: 1", ("day.yaml:LINE", "use at least 2")),
        Mistake("day.yaml", "path: model", "path: Qwen/Qwen3-0.6B", ("day.yaml:LINE", "hf download Qwen")),
        Mistake("day.yaml", "train.jsonl", "trian.jsonl", ("day.yaml:LINE", "does not exist")),
        Mistake(
            "test.jsonl", '"messages": ', '"question": ', ("test.jsonl row LINE", "valid_dataset.columns {")
        ),
        Mistake("day.yaml", "three:play", "three:plya", ("rollout.workflow", "Did you mean play?")),
        Mistake("my_reward.py", "[:1]", "[:1", ("SyntaxError", "my_reward.py, line LINE")),
    ),
    "second": (
        Mistake("day.yaml", "max_new_tokens: 2", "max_new_tokens: 96", ("leaves no room", "is 96")),
        Mistake("train.jsonl", "}]", "}", ("train.jsonl line LINE", "not valid JSON")),
        Mistake("my_reward.py", "def", "import numpyy\ndef", ("No module named 'numpyy'",)),
        Mistake("three.py", "play(prompt, ", "play(", ("run(prompt, generate)",)),
    ),
    "third": (
        Mistake("model/chat_template.jinja", "{%", None, ("row 1", "add chat_template.jinja")),
        Mistake(
            "my_reward.py", "prompt, completion, ", "completions, ", ("prompt, completion", "my_reward:score")
        ),
    ),
    "fourth": (
        Mistake(
            "day.yaml",
            "max_length: 40",
            "max_length: 5",
            ("train.jsonl", "20 rows have more than 5 tokens", "raise train_dataset.max_length"),
        ),
        Mistake("my_reward.py", "float(d", "float(g", ("NameError", "my_reward.py:LINE, in score")),
    ),
    "fifth": (
        Mistake(
            "train.jsonl", '"kind"', '"sort"', ("my_reward:score", "missing a required argument: 'kind'")
        ),
    ),
    "sixth": (Mistake("my_reward.py", '{"reward"', '"good" or {"reward"', ("allowed: a finite number",)),),
}


@pytest.mark.parametrize("mistakes", TRIES.values(), ids=TRIES)
def test_mistakes_are_told_before_anything_is_submitted_and_all_at_once(mistakes, shell):
    good = {mistake.file: (shell.here / mistake.file).read_text() for mistake in mistakes}
    try:
        expected = [mistake.make(shell.here) for mistake in mistakes]
        refusals = shell.refused(64, "submit", "day.yaml").splitlines()
        if len(mistakes) > 4:
            assert shell.call("check", "day.yaml").stderr.splitlines() == refusals
    finally:
        for file, text in good.items():
            (shell.here / file).write_text(text)
    told = [[words for words in expected if all(word in line for word in words)] for line in refusals]
    assert [words for words in expected if [words] not in told] == [], refusals
    assert [line for line, found in zip(refusals, told, strict=True) if not found] == []


@pytest.fixture(scope="module")
def printed(shell) -> dict[str, str]:
    """What the commands of the day print; a trial of twelve steps, and a fork of six more from its middle."""
    said = {}

    def type(command: str) -> None:
        said[command] = shell.type(command, timeout_s=600)

    try:
        type("hpc-rl check day.yaml --episode --timeout_s 300")
        type("hpc-rl submit day.yaml --dry_run")
        type("hpc-rl submit day.yaml")
        shell.wait_for("one", "step [1-9]", timeout_s=300)
        type("hpc-rl top one --once")
        type("hpc-rl status one --follow")
        type("hpc-rl fork one two --from 6 actor.optimizer.lr=1e-3 --follow")
    finally:
        for trial in ("one", "two"):
            shell.run("cancel", trial, "--now", "--wait_s", "40")
    return said


def test_the_trial_is_submitted_watched_and_learns(shell, printed):
    episode = printed["hpc-rl check day.yaml --episode --timeout_s 300"]
    assert len(re.findall(r"^sample \d: reward [01]", episode, re.M)) == 8
    assert "3 turns, 6 of " in episode
    assert "  given       | . no. again:" in episode
    assert "12 steps, each of 80 sequences" in printed["hpc-rl submit day.yaml --dry_run"]
    assert "hpc-rl status mine/one" in printed["hpc-rl submit day.yaml"]
    assert re.search(r"mine/one +(running|done) +step [1-9]\d?/12", printed["hpc-rl top one --once"])
    status = shell.call("status", "one").stdout
    assert re.match("mine/one +done +step 12 of 12", status)
    before, after = re.search(
        r"held-out +reward ([\d.]+) \(step 0\) -> ([\d.]+) \(step 12\)", status
    ).groups()
    assert float(after) > float(before) + 0.2
    (metrics,) = shell.here.glob("runs/*/mine/one/attempts/*/metrics.0.jsonl")
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    rewards = [row["reward"] for row in rows if "reward" in row]
    assert len(rewards) == 12
    assert sum(rewards[-3:]) > sum(rewards[:3]) + 0.3


def test_completions_are_seen(shell, printed):
    best = shell.call("samples", "one", "--all", "--best", "-n", "1").stdout
    assert re.search(r"reward 1 \(reward/digit 1, reward/right 1, turns [123]\); advantage", best)
    worst = shell.call("samples", "one", "--all", "--worst", "-n", "1").stdout
    assert re.search(r"reward 0 \(.*turns 3\); advantage -", worst)
    assert worst.count("  completion  | ") == 3
    assert worst.count("  given       | . no. again:") >= 2
    rows = shell.call("samples", "one", "--eval", "--step", "12", "--all", "--jsonl").stdout.splitlines()
    assert len(rows) == 4 * 4
    assert {json.loads(row)["prompt"] for row in rows} >= {"say even 20: ", "say odd 23: "}


def test_curves_and_the_page_compare_two_trials(shell, printed):
    curves = shell.call("plot", "one", "two", "--metric", "reward/right,eval_pass@4").stdout
    assert all(name in curves for name in ("reward/right", "eval_pass@4", "one", "two"))
    assert "did you mean eval_turns?" in shell.call("plot", "one", "--metric", "turns").stderr
    report = shell.call("report", "one", "two", "--html", "report.html")
    assert "report.html" in report.stdout
    page = (shell.here / "report.html").read_text()
    assert all(
        text in page for text in ("mine/one", "mine/two", "eval_pass@4", "say even 20: ", ". no. again: ")
    )
    diff = shell.call("config", "diff", "one", "two")
    assert diff.returncode == 1
    assert re.search(r"^actor.optimizer.lr: 0.003 .*-> 0.001 ", diff.stdout, re.M)


def test_what_is_done_is_cleaned_up(shell, printed):
    listed = shell.call("list", "--experiment", "mine", "--state", "done").stdout
    assert re.findall(r"^mine/(\w+) ", listed, re.M) == ["two", "one"]
    assert "mine/one" in shell.call("du").stdout
    assert "removed" in shell.call("remove", "one", "--yes").stdout
    assert not list(shell.here.glob("runs/*/mine/one"))
    assert "mine/one" not in shell.call("list").stdout
    assert "forked from mine/one, checkpoint 6" in shell.call("status", "two").stdout
    assert shell.call("recover", "two", "total_train_steps=13", "--explain").returncode == 0
