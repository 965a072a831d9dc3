"""docs/teacher.md: its commands as a reader would type them, its options in a whole configuration and, with an
endpoint in place of those it names, in a trial.
"""

import json
import random
import re
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
import yaml
from command_line import Shell

from hpc_rl.config.load.load import load
from hpc_rl.config.options.teacher import TeachingConfig
from hpc_rl.config.rules.check import check
from hpc_rl.plan.plan import make_plan
from hpc_rl.rollout.teacher.reward import Lesson, compute_values, load_parts

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "teacher.md").read_text()
WHOLE = ROOT / "configs" / "teacher.yaml"
OPTIONS = re.findall(r"<!-- options: (\w+) -->", PAGE)
KEY = "a-key-that-no-file-has"


def block(mark: str) -> str:
    found = re.search(rf"<!-- {re.escape(mark)} -->\n```\w+\n(.*?)```", PAGE, re.DOTALL)
    assert found, mark
    return found[1]


def options(name: str) -> dict:
    return yaml.safe_load(block(f"options: {name}"))


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Shell:
    """The root of a clone, as far as the commands see it."""
    shell = Shell(tmp_path_factory.mktemp("teacher"), env={"STUDENT_API_KEY": KEY})
    (shell.here / "configs").symlink_to(ROOT / "configs")
    (shell.here / "brief.py").write_text(block("file: brief.py"))
    return shell


@pytest.fixture(scope="module")
def said(clone) -> dict[str, str]:
    """What the commands of the page print."""
    printed = {}
    for line in block("run: tests/integration/test_teacher_page.py").splitlines():
        command = line.partition(" #")[0].strip()
        printed[" ".join(command.split()[1:3])] = clone.type(command, timeout_s=300)
    return printed


def metrics_of(clone: Shell, trial: str) -> list[dict]:
    (path,) = clone.here.rglob(f"{trial}/attempts/*/metrics.0.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.timeout(400)
def test_see_one_learn(clone, said):
    assert "ready: " in said["quickstart --method"]
    assert "step 30 of 30" in said["status hints"]
    gains = [row["eval_accuracy_delta"] for row in metrics_of(clone, "hints") if "eval_accuracy_delta" in row]
    assert gains[0] < 0.25
    assert gains[-1] > gains[0] + 0.3


@pytest.mark.timeout(400)
def test_the_metrics_of_the_page_are_logged(clone, said):
    table = re.search(r"^## Metrics\n(.*?)\n\n[^|]", PAGE, re.MULTILINE | re.DOTALL)
    assert table
    names = set(re.findall(r"`(\w+)`", "".join(line.split("|")[1] for line in table[1].splitlines() if line)))
    names |= {f"reward_{part}" for part in TeachingConfig().reward_parts}
    assert len(names) >= 12
    rows = metrics_of(clone, "hints")
    assert names <= next(row for row in rows if "loss" in row).keys()
    assert {f"eval_{name}" for name in names} <= next(row for row in rows if "eval_reward" in row).keys()


@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_the_page_make_a_trial(name, tmp_path):
    base, own = yaml.safe_load(WHOLE.read_text()), options(name)
    del base["launcher"]  # its time limit is a number in YAML 1.1
    if "pools" in own:  # on the page they are all that there are
        del base["pools"]
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(base))
    (tmp_path / "own.yaml").write_text(block(f"options: {name}"))
    loaded = check(load([tmp_path / "base.yaml", tmp_path / "own.yaml"]), files=False)
    plan = make_plan(loaded.config, loaded.explicit, interpreter="python", scheduler="slurm")
    expected = {"elsewhere": ["rollout"], "judge": ["teacher", "student", "judge"]}
    assert [pool.name for pool in plan.pools] == expected.get(name, ["teacher", "student"])


def test_the_example_of_the_page_is_worth_what_it_says():
    lesson = Lesson(
        baseline=0.5, taught=1.0, teaching="Multiply, then add.", num_tokens=40, leaks=False, has_answer=True
    )
    values = compute_values(load_parts(TeachingConfig().reward_parts), lesson)
    assert f"{values['efficiency']:.3f}" in PAGE
    assert f"reward is {sum(values.values()):.3f}" in PAGE.replace("\n", " ")
    rows = re.findall(r"^\| `(\w+)` \|", PAGE.partition("## The reward")[2], re.MULTILINE)
    assert rows[: len(values)] == list(values)


class Endpoint(BaseHTTPRequestHandler):
    """A student that adds hints, and a judge that knows the answer, behind OpenAI's API."""

    asked: ClassVar[Counter[str]] = Counter()

    def do_GET(self) -> None:
        self._say({"data": [{"id": "student"}, {"id": "judge"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        (turn,) = body["messages"]
        model = body["model"]
        answer = student if model == "student" else judge
        type(self).asked[model] += 1
        type(self).asked[f"{model} {self.headers.get('Authorization')}"] += 1
        choices = [
            {"message": {"role": "assistant", "content": answer(turn["content"])}, "finish_reason": "stop"}
            for _ in range(body["n"])
        ]
        self._say({"choices": choices, "usage": {"completion_tokens": len(choices)}})

    def log_message(self, *_: object) -> None:
        """Nothing."""

    def _say(self, answer: dict) -> None:
        text = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


def student(text: str) -> str:
    hinted = re.fullmatch(r"(\d)\|[a-h](\d)=", text)
    return str((int(hinted[1]) + int(hinted[2])) % 10) if hinted else str(random.randrange(10))


def judge(text: str) -> str:
    completion, _, answer = text.partition(" or ")
    return f"Let me see. <score>{float(completion == answer)}</score>"


@pytest.fixture
def endpoint():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Endpoint)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.timeout(400)
def test_a_student_and_a_judge_elsewhere_and_a_part_of_ones_own(clone, said, endpoint):
    """The page's options in one trial, with an endpoint of the test's own in place of those it names."""
    toy = yaml.safe_load((ROOT / "configs/quickstart/teacher.yaml").read_text())
    elsewhere, parts, judged = (options(name) for name in ("elsewhere", "parts", "judge"))
    found = elsewhere["pools"]["student"] | {"url": endpoint, "max_new_tokens": 3}
    toy["pools"] = {"student": found | {"model": "student"}, "judge": {"url": endpoint, "model": "judge"}}
    toy["teacher"] |= parts["teacher"]
    toy["rollout"] |= judged["rollout"]
    toy["rollout"]["judge"] = judged["rollout"]["judge"] | {"template": "{completion} or {answer}"}
    toy |= {"allocation_mode": "embedded:d1+fsdp:d1", "trial_name": "elsewhere", "total_train_steps": 3}
    toy["train_dataset"]["batch_size"] = toy["gconfig"]["n_samples"] = 4
    (clone.here / "elsewhere.yaml").write_text(yaml.safe_dump(toy))
    done = clone.run("submit", "--follow", "elsewhere.yaml", timeout_s=300)
    assert done.returncode == 0, done.stdout + done.stderr
    last = [row for row in metrics_of(clone, "elsewhere") if "loss" in row][-1]
    assert {"reward_gain", "reward_brief", "accuracy_delta"} <= last.keys()
    assert "reward_efficiency" not in last
    assert Endpoint.asked["student"] == Endpoint.asked[f"student Bearer {KEY}"] > 3 * 4 * 4
    assert Endpoint.asked["judge"] == Endpoint.asked["judge None"] > 3 * 4 * 4
    files = [path for path in clone.here.rglob("*") if path.is_file()]
    assert not [path for path in files if KEY.encode() in path.read_bytes()]


def test_options_that_the_page_names_exist():
    for name in set(re.findall(r"`teacher\.([a-z_]+)`", PAGE)) - {"templates"}:
        assert name in TeachingConfig.__dataclass_fields__, name
