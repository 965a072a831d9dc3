"""docs/: the site builds without a warning, and every block of its pages is run, loaded or parsed.

A comment before a block says more about it: `file: NAME` is saved first; `run` is typed, line by line, in the order of
the navigation; `over: FILE` is the configuration that options are laid over (default: configs/grpo_sglang.yaml);
`rows: rl`, `sft` or `rw` are rows of a
dataset; `override: NAME` is a block of a template. What names another test is run there.
"""

import ast
import asyncio
import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import yaml
from command_line import Shell
from markdown_it import MarkdownIt
from patience import extend

from hpc_rl.cli import options as command_options
from hpc_rl.cli.__main__ import COMMANDS, build_parsers, load_module
from hpc_rl.config.load.fields import list_options, make_generic
from hpc_rl.config.load.load import load
from hpc_rl.config.options.dataset import DatasetConfig
from hpc_rl.config.options.experiment import CONFIGS
from hpc_rl.config.rules.check import check
from hpc_rl.core.allocation import parse as parse_allocation
from hpc_rl.core.types import Reply, Turn
from hpc_rl.datasets.encode import Prompts, load_pairs, load_preferences, load_sequences
from hpc_rl.datasets.tokenizer import Tokenizer
from hpc_rl.plan.plan import make_plan
from hpc_rl.rollout.rewards import BUILTINS
from hpc_rl.rollout.tool_call import call_tool
from hpc_rl.rollout.workflow import check_group
from hpc_rl.rollout.workflows import WORKFLOWS
from hpc_rl.trials.sweep_points import split_options

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
BASE = ROOT / "configs" / "grpo_sglang.yaml"
OTHER_PROGRAMS = {
    "bash",
    "cd",
    "curl",
    "eval",
    "git",
    "hf",
    "lm_eval",
    "make",
    "mkdocs",
    "pip",
    "python",
    "python3",
    "salloc",
    "sbatch",
    "scontrol",
    "source",
    "tensorboard",
    "vllm",
}
PLACEHOLDER = re.compile(r"[A-Z]+|…")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page; `mark` is the comment before it."""

    page: str
    language: str
    mark: str
    text: str
    line: int

    @property
    def file(self) -> str:
        return self.mark.partition("file: ")[2]

    @property
    def commands(self) -> list[str]:
        joined = self.text.replace("\\\n", " ")
        return [line for line in joined.splitlines() if line.strip() and not line.startswith("#")]


@cache
def nav() -> list[str]:
    def pages(entry):
        if isinstance(entry, str):
            return [entry]
        return [page for one in (entry.values() if isinstance(entry, dict) else entry) for page in pages(one)]

    return pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])


@cache
def tokens(page: str) -> list:
    return MarkdownIt().enable("table").parse((DOCS / page).read_text())


@cache
def blocks() -> list[Block]:
    found = []
    for page in nav():
        before = None
        for token in tokens(page):
            if token.type == "fence":
                mark = before.content if before is not None and before.type == "html_block" else ""
                mark = mark.strip().removeprefix("<!--").removesuffix("-->").strip()
                found.append(Block(page, token.info, mark, token.content, token.map[0] + 1))
            before = token
    return found


def named(one: Block) -> str:
    return f"{one.page}:{one.line}"


def of(language: str) -> list:
    return [pytest.param(one, id=named(one)) for one in blocks() if one.language == language]


def inline_code(page: str) -> list[str]:
    inline = [child for token in tokens(page) for child in token.children or ()]
    return [child.content for child in inline if child.type == "code_inline"]


def test_the_site_builds_without_a_warning(tmp_path):
    environ = os.environ | {"NO_MKDOCS_2_WARNING": "1"}  # a remark about a later mkdocs
    argv = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(argv, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=extend(120))
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    built = {
        path.relative_to(tmp_path / "site").with_suffix(".md").as_posix() for path in tmp_path.rglob("*.html")
    }
    assert {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")} == set(nav()) <= built


def test_links_from_the_repository_into_the_docs():
    for name in ("README.md", "CONTRIBUTING.md"):
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", (ROOT / name).read_text()):
            assert (ROOT / link).exists(), f"{name}: {link}"


def test_every_block_is_of_a_kind_that_is_tested():
    assert not [page for page in nav() for token in tokens(page) if token.type == "code_block"]
    assert {one.language for one in blocks()} <= {"bash", "python", "yaml", "json", "jinja", "text"}
    hidden = [
        named(one) for one in blocks() if one.language == "text" and re.search("^hpc-rl ", one.text, re.M)
    ]
    assert not hidden


@pytest.fixture(scope="module")
def shell(tmp_path_factory) -> Shell:
    """An empty directory with the files of all pages, and `configs` of a clone."""
    shell = Shell(tmp_path_factory.mktemp("docs"))
    (shell.here / "configs").symlink_to(ROOT / "configs")
    for one in blocks():
        if one.file:
            (shell.here / one.file).write_text(one.text)
    return shell


@pytest.fixture(scope="module")
def typed(shell) -> dict[str, str]:
    """What the commands of the blocks `run` print, in the order of the pages; among them are short trials."""
    printed = {}
    for one in blocks():
        for command in one.commands if one.mark == "run" else ():
            printed[command.partition(" #")[0].strip()] = shell.type(command, timeout_s=400)
    return printed


@pytest.mark.timeout(900)
def test_the_game_of_the_pages_is_learned(shell, typed):
    (metrics,) = shell.root.rglob("guess/attempts/*/metrics.0.jsonl")
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    rewards = [row["reward"] for row in rows if "reward" in row]
    assert sum(rewards[-5:]) > sum(rewards[:5])
    logged = next(row for row in rows if "reward" in row).keys()
    assert {"agent/turns", "agent/solved"} <= logged
    metrics_of_the_page = {*quoted("operations.md")} - {
        "kl_rewards",
        "kl_loss",
        "mismatch_log_w_fresh",
        "mismatch_excluded",
        "eval_num_prompts",
        "eval_left_out",
    }
    assert len(metrics_of_the_page) > 12
    assert metrics_of_the_page <= logged
    assert {"eval_reward", "eval_solved", "eval_num_prompts", "eval_left_out"} <= next(
        row for row in rows if "eval_reward" in row
    ).keys()
    assert "held-out" in typed["hpc-rl status guess"]
    talk = "".join(
        json.loads(line)["completion"]
        for line in shell.run("samples", "guess", "--all", "--jsonl").stdout.splitlines()
    )
    assert "higher" in talk
    assert "lower" in talk


@pytest.mark.timeout(900)
def test_a_policy_learns_what_the_reward_model_of_the_pages_likes(shell, typed):
    (metrics,) = shell.root.rglob("liked/attempts/*/metrics.0.jsonl")
    rows = [row for row in map(json.loads, metrics.read_text().splitlines()) if "reward" in row]
    rewards = [row["reward"] for row in rows]
    assert rewards == pytest.approx([row["reward/reward_model"] for row in rows])
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 1
    assert all(0 <= row["reward/near"] <= 1 for row in rows)
    best = next(line for command, line in typed.items() if command == "hpc-rl samples liked --best")
    assert "reward/reward_model" in best and "reward/near" in best


@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", sorted({one.page for one in blocks() if one.language == "python"}))
def test_python_of_a_page_runs(page, shell, typed):
    code = [one.text for one in blocks() if (one.page, one.language) == (page, "python") and not one.file]
    program = "import sys; sys.path.insert(0, '')\n" + "\n".join(code)
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=shell.here,
        env=shell.environ,
        capture_output=True,
        text=True,
        timeout=extend(120),
    )
    assert done.returncode == 0, done.stderr


class Fake:
    """What a workflow generates with: says `1+2`, and knows another model."""

    index, n_samples = 3, 2

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.asked = tokenizer, 0

    async def samples(self, input_ids):
        ids = self.tokenizer.encode("1+2")
        return [Turn(ids, [-1.0] * len(ids), [("0.0", 0, len(ids))], "stop")] * self.n_samples

    async def reward(self, prompt, text):
        return float(text == prompt["answer"])

    async def ask(self, messages, pool):
        self.asked += pool == "adviser"
        return [Reply("1+2 =", 4, "stop")]

    async def once(self, key, make):
        return await make()


@pytest.mark.parametrize(("module", "reward"), [("two_parts", 1.1), ("critic", 0.5)])
def test_workflows_of_a_page_make_groups(module, reward, shell, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(shell.here)
    generate = Fake(Tokenizer(toy_tokenizer(tmp_path / "tokenizer")))
    row = {"prompt": "1+", "answer": "1+2", "input_ids": [3, 4]}
    group = asyncio.run(importlib.import_module(module).run(row, generate))
    check_group(group, 3, 1 << 20, generate.n_samples, strict=True)
    assert [one.reward for one in group.trajectories] == [reward] * 2
    assert generate.asked == (module == "critic")


def test_tools_of_a_page_are_called(shell, monkeypatch):
    monkeypatch.chdir(shell.here)
    monkeypatch.syspath_prepend(shell.here)
    assert asyncio.run(call_tool("calculator:multiply", {"a": 6, "b": 7}, timeout_s=60)) == "42"


@pytest.mark.parametrize("one", of("yaml"))
def test_options_of_a_page_make_a_plan(one, shell):
    if one.mark.startswith("options: "):
        return  # test_teacher_page.py
    own = shell.here / (one.file or "own.yaml")
    own.write_text(one.text)
    files = [own] if one.file else [shell.here / (one.mark.partition("over: ")[2] or BASE), own]
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(shell.here)
        loaded = check(load(files), files=False)
    make_plan(loaded.config, loaded.explicit, interpreter="python", scheduler="slurm")


@pytest.mark.parametrize("one", of("json"))
def test_rows_of_a_page_are_rows(one, shell, tmp_path):
    kind = one.mark.removeprefix("rows: ")
    rows = tmp_path / "rows.jsonl"
    rows.write_text(one.text)
    dataset = DatasetConfig(path=str(rows), type=kind)
    tokenizer = Tokenizer(toy_tokenizer(tmp_path / "tokenizer"))
    made = {"rl": lambda: Prompts(dataset, tokenizer, 1), "sft": lambda: load_sequences(dataset, tokenizer)}
    made["rw"] = lambda: load_pairs(dataset, tokenizer)
    made["dpo"] = lambda: load_preferences(dataset, tokenizer)
    assert len(made[kind]()) == len(one.text.splitlines())


def toy_tokenizer(folder: Path) -> Path:
    from hpc_rl.examples.toy import make_tokenizer

    make_tokenizer().save_pretrained(folder)
    return folder


def commands() -> list:
    """Every command of the blocks and of the text."""
    found = [
        (named(one), line)
        for one in blocks()
        if one.language == "bash" and "tests/" not in one.mark
        for line in one.commands
    ]
    found += [(page, code) for page in nav() for code in inline_code(page) if code.startswith("hpc-rl ")]
    return [pytest.param(line, id=f"{where} {line[:60]}") for where, line in dict.fromkeys(found)]


@pytest.mark.parametrize("line", commands())
def test_a_command_has_these_options(line, shell):
    words = [str(BASE) if word == "FILE" else word for word in shlex.split(line, comments=True)]
    words = words[: next((at for at, word in enumerate(words) if word in ("|", ">", "&&")), len(words))]
    if "hpc-rl" not in words:
        assert Path(words[0]).name in OTHER_PROGRAMS, words
        return
    argv = words[words.index("hpc-rl") + 1 :]
    if argv[0].startswith("-") or PLACEHOLDER.fullmatch(argv[0]):
        return
    assert argv[0] in COMMANDS
    if argv[0] == "env" and argv[1:2] and argv[1] in load_module("env").HANDED_OVER:
        return  # test_environments_page.py
    parsers = build_parsers(argv[:1])
    path = next(tuple(argv[:length]) for length in (2, 1) if tuple(argv[:length]) in parsers)
    if len(argv) == len(path) or "--help" in argv:  # the name of a command
        return
    args = parsers[()].parse_args(
        [*path, *command_options.arrange_arguments(parsers[path], argv[len(path) :])]
    )
    for name in path:
        args = args[name]
    if overrides := getattr(args, "overrides", None):
        there = [shell.here / file for file in getattr(args, "config", ()) if (shell.here / file).exists()]
        if argv[0] == "sweep":  # the first value of each option
            shared, varied = split_options(overrides)
            overrides = [*shared, *(f"{name}={values[0]}" for name, values in varied.items())]
        load(there or [BASE], overrides, presets=getattr(args, "preset", ()))


def is_option(name: str) -> bool:
    return any(make_generic(cls, name) in list_options(cls) for cls in CONFIGS.values())


@pytest.mark.parametrize("page", [page for page in nav() if not page.startswith("configuration/")])
def test_options_that_a_page_names_exist(page):
    for code in inline_code(page):
        found = re.match(r"[a-z_]+(?:\.[a-z_0-9]+)+(?=$|[ :=])", code)
        name = found[0] if found else ""
        if is_option(name.partition(".")[0]) and not re.search(r"\.(py|md|j2|yaml|json|sbatch)$", name):
            assert is_option(name), f"{page}: {code}"


def test_overrides_of_templates_are_accepted(shell):
    """Those of a page begin with `extends` only where that is explained."""
    for one in blocks():
        if one.language == "jinja":
            name = one.mark.removeprefix("override: ")
            override = shell.root / "site" / name
            override.parent.mkdir(parents=True, exist_ok=True)
            extends = "" if "extends" in one.text else f'{{% extends "below/{name}" %}}\n'
            override.write_text(extends + one.text)
    site = Shell(shell.root, {"HPC_RL_SITE_DIR": str(shell.root / "site")})
    done = site.run("templates", "check")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "site.sh.j2" in done.stdout + site.run("templates", "list").stdout


def test_allocations_of_the_engines_page_are_understood():
    (block,) = [one for one in blocks() if one.mark == "allocations"]
    for line in block.text.splitlines():
        parse_allocation(line.split()[0])


def sentences() -> str:
    """What the program can print, one text a line; values in it are `…`."""
    found = []
    for path in sorted((ROOT / "hpc_rl").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.append(
                    "".join(
                        str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values
                    )
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return (
        "\n".join(" ".join(text.split()) for text in found) + (ROOT / "tests/golden/messages.txt").read_text()
    )


def quoted(page: str) -> list[str]:
    """The inline code in the first column of the tables of a page."""
    texts = []
    for number, token in enumerate(tokens(page)):
        first = token.type == "td_open" and tokens(page)[number - 1].type == "tr_open"
        texts += (
            [one.content for one in tokens(page)[number + 1].children if one.type == "code_inline"]
            if first
            else []
        )
    return texts


def test_every_command_and_built_in_is_on_a_page():
    text = "".join((DOCS / page).read_text() for page in nav() if not page.startswith("configuration/"))
    assert not [name for name in COMMANDS if f"hpc-rl {name}" not in text]
    for page, table in (("rewards.md", BUILTINS), ("workflows.md", WORKFLOWS)):
        assert table.keys() <= {*quoted(page)}, page


def test_symptoms_are_what_the_program_says():
    """Messages, options and metrics; what other programs say has no blank in it, or is Slurm's."""
    said = sentences()
    for page in ("troubleshooting.md", "troubleshooting-admins.md"):
        assert len(quoted(page)) > 10
        for text in quoted(page):
            pattern = "[^\n]*".join(re.escape(part.strip()) for part in text.split("…"))
            assert text.startswith(("-", "Duplicate jobid", "step creation")) or re.search(pattern, said), (
                f"{page}: {text}"
            )
