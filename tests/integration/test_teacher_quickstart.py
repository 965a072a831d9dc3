"""The quickstart of teacher training, as a user types it: short in every test run, whole and with three seeds in the
soak. While it trains, both servers are asked the same questions again and again.
"""

import json
import re
import shutil
import subprocess
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from command_line import PROGRAM, Shell
from patience import extend
from toy_trials import groups_in_ledger, hpc_rl, logs_of
from transformers import AutoModelForCausalLM
from version_history import rebuild

from hpc_rl.core.errors import Damaged
from hpc_rl.core.trial import Trial, load_json
from hpc_rl.examples import hints, toy
from hpc_rl.name_resolve.shared_fs import NameResolve

NUM_STEPS = 24
TOKENIZER = toy.make_tokenizer(hints.ALPHABET)
ASKED = [f"{question}?0;" for question in hints.QUESTIONS[::9]]  # one question of each cue, of both models


def gain_before_and_after(text: str) -> tuple[float, float]:
    found = re.search(r"^held-out accuracy delta (-?\d\.\d\d) -> (-?\d\.\d\d)$", text, re.MULTILINE)
    assert found, text
    return float(found[1]), float(found[2])


@dataclass(frozen=True)
class Answers:
    """What a server said to ASKED at temperature 0, and which version it says it has."""

    pool: str
    version: str
    logprobs: tuple[float, ...]  # of the first token, of each question


@dataclass
class Watch:
    """Asks the servers of a trial, and keeps the weights that were published for what they said."""

    trial: Trial
    kept: Path
    seen: list[Answers] = field(default_factory=list)

    def look(self) -> None:
        for key, lease in NameResolve(self.trial.names).list_leases("server/teacher").items():
            self._ask(key, lease.value)
        for key, lease in NameResolve(self.trial.names).list_leases("server/student").items():
            self._ask(key, lease.value)

    def _ask(self, key: str, lease: dict) -> None:
        body = {
            "input_ids": [TOKENIZER(text)["input_ids"] for text in ASKED],
            "sampling_params": [{"max_new_tokens": 1, "temperature": 0}] * len(ASKED),
            "return_logprob": True,
        }
        token = load_json(self.trial.secret)["data"]
        request = urllib.request.Request(
            lease["url"] + "/generate",
            json.dumps(body).encode(),
            {"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=extend(20)) as response:
                answers = json.loads(response.read())
        except OSError:
            return  # it starts, or has ended
        metas = [answer["meta_info"] for answer in answers]
        versions = {meta["weight_version"] for meta in metas}
        if len(versions) > 1:
            return  # updated in between
        (version,) = versions
        logprobs = tuple(meta["output_token_logprobs"][0][0] for meta in metas)
        self.seen.append(Answers(key.split("/")[1], version, logprobs))
        self._keep(version)

    def _keep(self, version: str) -> None:
        if version and not (self.kept / version).exists():
            partial = self.kept / f"{version}.partial"
            try:
                rebuild(self.trial, version, partial)
            except (OSError, Damaged):  # replaced by newer ones meanwhile
                shutil.rmtree(partial, ignore_errors=True)
            else:
                partial.rename(self.kept / version)

    def of(self, pool: str) -> list[Answers]:
        return [answers for answers in self.seen if answers.pool == pool]


def first_tokens(model: Path, prompts: list[str]) -> torch.Tensor:
    """Log-probabilities [prompts, tokens] of the first token that a model says to each of prompts of one length."""
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    ids = torch.tensor([TOKENIZER(prompt)["input_ids"] for prompt in prompts])
    with torch.no_grad():
        return torch.log_softmax(loaded(input_ids=ids).logits[:, -1].float(), -1)


def share_right(model: Path, prompts: list[str], answers: list[str]) -> float:
    """Mean probability that a model's first token is the right one."""
    right = torch.tensor([TOKENIZER.convert_tokens_to_ids(answer) for answer in answers])
    return float(first_tokens(model, prompts).gather(1, right[:, None]).exp().mean())


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Path, str, Watch]:
    """The quickstart's directory, what it printed, and what was seen meanwhile."""
    shell = Shell(tmp_path_factory.mktemp("teacher"))
    words = [PROGRAM, "quickstart", "--method", "teacher", f"total_train_steps={NUM_STEPS}"]
    words += ["evaluator.freq_steps=8", "recover.freq_steps=8"]
    here, watch, deadline = shell.here / "quickstart", None, time.monotonic() + extend(380)
    with (shell.root / "said.txt").open("w+") as said:
        process = subprocess.Popen(
            words, cwd=shell.here, env=shell.environ, stdout=said, stderr=subprocess.STDOUT
        )
        while process.poll() is None and time.monotonic() < deadline:
            found = list(here.glob("runs/*/quickstart/teacher-[0-9]*"))
            if watch is None and found:
                watch = Watch(Trial(found[0]), shell.root / "kept")
            elif watch is not None:
                watch.look()
            time.sleep(0.05 if watch else 0.5)
        said.seek(0)
        text = said.read()
    late = process.poll() is None
    if late:
        process.terminate()
        process.wait(extend(30))
    assert watch is not None, text
    assert not late and process.returncode == 0, f"{text}\n{logs_of(watch.trial)}"
    return here, text, watch


def task_of(here: Path, name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (here / "hints" / "task" / f"{name}.jsonl").read_text().splitlines()]


@pytest.mark.soak
@pytest.mark.timeout(420)
def test_the_student_needs_a_hint_and_can_use_one(finished):
    here, _, _ = finished
    rows = task_of(here, "train") + task_of(here, "heldout")
    answers = [row["answer"] for row in rows]
    right_hints = [str((int(row["answer"]) - int(row["prompt"][1])) % 10) for row in rows]
    student = here / "hints" / "student"
    assert 0.06 < share_right(student, [f"|{row['prompt']}=" for row in rows], answers) < 0.14
    hinted = [f"{hint}|{row['prompt']}=" for hint, row in zip(right_hints, rows, strict=True)]
    assert share_right(student, hinted, answers) > 0.95


@pytest.mark.soak
@pytest.mark.timeout(420)
def test_the_teacher_learns_to_give_the_right_hint(finished):
    here, text, watch = finished
    before, after = gain_before_and_after(text)
    assert before < 0.25
    assert after - before > 0.3
    rows = task_of(here, "heldout")
    prompts = [f"{row['prompt']}?{probe};" for row in rows for probe in hints.DIGITS]
    right = [str((int(row["answer"]) - int(row["prompt"][1])) % 10) for row in rows for _ in hints.DIGITS]
    assert share_right(here / "hints" / "teacher", prompts, right) < 0.2
    assert share_right(watch.trial.exports / "final", prompts, right) > 0.4
    assert "training prompts" in text and "accuracy delta" in text  # the curves


@pytest.mark.soak
@pytest.mark.timeout(420)
def test_the_teachers_servers_follow_the_trainer(finished):
    """The weights of each version that a server says it has are those that the trainer published."""
    _, _, watch = finished
    answers = watch.of("teacher")
    steps = [int(one.version.partition(".")[2]) for one in answers]
    assert steps == sorted(steps)
    assert len(set(steps)) >= 4
    kept = [one for one in answers if (watch.kept / one.version).exists()]
    assert len({one.version for one in kept}) >= 3
    for version in {one.version for one in kept}:
        expected = first_tokens(watch.kept / version, ASKED).max(-1).values
        for one in kept:
            if one.version == version:
                torch.testing.assert_close(torch.tensor(one.logprobs), expected, rtol=0, atol=1e-3)
    first, last = kept[0], kept[-1]
    assert max(abs(a - b) for a, b in zip(first.logprobs, last.logprobs, strict=True)) > 0.1


@pytest.mark.soak
@pytest.mark.timeout(420)
def test_the_students_servers_never_change(finished):
    here, _, watch = finished
    answers = watch.of("student")
    assert len(answers) >= 4
    assert {one.version for one in answers} == {""}
    expected = first_tokens(here / "hints" / "student", ASKED).max(-1).values
    for one in answers:
        torch.testing.assert_close(torch.tensor(one.logprobs), expected, rtol=0, atol=1e-3)


@pytest.mark.soak
@pytest.mark.timeout(420)
def test_hints_carry_the_version_that_made_them(finished):
    """What is trained on is the teacher's alone: its prompt, and the hint that newer and newer weights wrote."""
    _, _, watch = finished
    rows = [row for group in groups_in_ledger(watch.trial) for row in group.trajectories]
    for row in rows:
        prompt = TOKENIZER.decode(row.ids[~row.loss_mask].tolist())
        assert re.fullmatch(r"[a-h][1-9]\?.?;", prompt), prompt
    made_by = {int(step) for row in rows for step in row.steps[row.loss_mask]}
    assert max(made_by) >= NUM_STEPS - 2
    assert {"baseline_accuracy", "student_accuracy", "accuracy_delta"} <= rows[0].stats.keys()


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_it_learns(tmp_path, seed):
    said = hpc_rl(
        "quickstart", "--method", "teacher", "--seed", str(seed), cwd=tmp_path, timeout_s=1100
    ).stdout
    print(said)
    before, after = gain_before_and_after(said)
    assert before < 0.25
    assert after - before >= 0.3
