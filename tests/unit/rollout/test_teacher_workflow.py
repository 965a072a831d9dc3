"""The workflow `teacher`, with a student that answers by a table and a teacher whose completions are given."""

import asyncio
import json
import string

import pytest
import tokenizers
from small_configs import WORDS

from hpc_rl.config.load.load import load
from hpc_rl.config.options.inference import GenerationHyperparameters
from hpc_rl.config.rules.check import check
from hpc_rl.core.errors import ConfigError, InputRefused, ServerUnavailable
from hpc_rl.core.types import Reply, Turn, decode
from hpc_rl.datasets.encode import encode_prompt
from hpc_rl.datasets.order import make_sample_seed
from hpc_rl.datasets.tokenizer import Tokenizer
from hpc_rl.rollout.rewards import BUILTINS, make_built_in, score_each
from hpc_rl.rollout.server_pool import ChatPool, ServerPool
from hpc_rl.rollout.worker import Worker
from hpc_rl.rollout.workflows import load_workflow

LETTERS = [*string.printable, "…", "<eos>"]
EOS = len(LETTERS) - 1
CHAT = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
CHAT += "{% if add_generation_prompt %}[assistant]{% endif %}"

PENS = "A pen costs 3, a pad 5. Cost of 2 pens and 4 pads?"
ROW = {"prompt": [{"role": "user", "content": PENS}], "ground_truth": "26"}
TEACHINGS = ["Pads: four times five.", "Hm", "Add first.", "<teaching>It is 26.</teaching>"]
TEMPLATES = {
    "baseline": "B {question}",
    "diagnostic": r"D {question} \boxed{}",
    "adaptive": "A {question} / {approach}",
    "with_teaching": "T {question} / {teaching}",
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """One token a character."""
    folder = tmp_path_factory.mktemp("tokenizer")
    numbers = {letter: i for i, letter in enumerate(LETTERS)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(numbers, unk_token="…"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    made.decoder = tokenizers.decoders.Fuse()
    made.add_special_tokens(["<eos>"])
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>", "chat_template": CHAT}))
    return Tokenizer(folder)


class Student:
    """Answers by the last turn of a chat: `answers` has a list for each text that begins it."""

    def __init__(self, answers: dict[str, list[str]]) -> None:
        self.answers, self.asked = answers, []

    async def ask(self, messages, seeds, max_new_tokens=None, temperature=None):
        text = messages[-1]["content"]
        self.asked.append((messages, max_new_tokens, list(seeds)))
        found = next((said for begin, said in self.answers.items() if text.startswith(begin)), None)
        if found is None:
            raise InputRefused(f"pool student: answered 400: too long: {text}")
        return [Reply(found[number % len(found)], 3, "stop") for number in range(len(seeds))]


class Teacher:
    """The router of the trained pool: writes the teachings, one for each sample."""

    def __init__(self, tokenizer: Tokenizer, teachings: list[str]) -> None:
        self.tokenizer, self.teachings, self.requests = tokenizer, teachings, []

    async def generate_many(self, requests):
        self.requests += requests
        ids = [[*self.tokenizer.encode(text), EOS] for text in self.teachings[: len(requests)]]
        return [Turn(made, [-0.5] * len(made), [("0.4", 0, len(made))], "stop") for made in ids]


class Endpoint(Student):
    """A student that is an external endpoint: it answers by the seeds."""

    async def ask(self, messages, seeds, max_new_tokens=None, temperature=None):
        found = [await super(Endpoint, self).ask(messages, range(2)) for _ in seeds]
        return [said[seed % 2] for said, seed in zip(found, seeds, strict=True)]


class Servers(Endpoint):
    """The router of a student that the trial serves: it answers the same."""

    def __init__(self, tokenizer: Tokenizer, answers: dict[str, list[str]], errors=()) -> None:
        super().__init__(answers)
        self.tokenizer, self.requests, self.errors = tokenizer, [], list(errors)

    async def generate_many(self, requests):
        self.requests.append(requests)
        if self.errors:
            raise self.errors.pop(0)
        return [await self._answer(one) for one in requests]

    async def _answer(self, request):
        text = self.tokenizer.decode(request.input_ids).removeprefix("[user]").removesuffix("[assistant]")
        (reply,) = await self.ask([{"content": text}], [request.sampling["sampling_seed"]])
        ids = [*self.tokenizer.encode(reply.text), EOS]
        return Turn(ids, [-0.5] * len(ids), [("", 0, len(ids))], "stop")

    def pool(self, context=None) -> ServerPool:
        sampling = GenerationHyperparameters(max_new_tokens=40)
        return ServerPool("student", self, self.tokenizer, sampling, context)


class Trial:
    """A worker with both; `run` gives it one row."""

    def __init__(self, tokenizer, student: ChatPool, teachings=TEACHINGS, options=()) -> None:
        words = [*WORDS, "trainer=teacher", "actor.ppo_n_minibatches=1", "actor.optimizer.lr=1e-3"]
        words += [
            "allocation_mode=embedded[teacher]:d1+embedded[student]:d1+fsdp:d1",
            "cluster.n_gpus_per_node=0",
        ]
        words += [f"teacher.templates.{name}={json.dumps(text)}" for name, text in TEMPLATES.items()]
        words += ["pools.student.path=/s", f"gconfig.n_samples={len(teachings)}", *options]
        config = check(load([], words), files=False).config
        self.teacher, self.student, self.sent = Teacher(tokenizer, teachings), student, []
        pool = ServerPool("teacher", self.teacher, tokenizer, config.gconfig)
        reward = config.rollout.reward_fn
        reward = make_built_in(reward) if reward in BUILTINS else _always_right
        workflow = load_workflow(config)
        self.worker = Worker(
            config, pool, {"student": student}, workflow, score_each(reward), self.write, 1000
        )
        self.tokenizer, self.seed = tokenizer, config.seed

    def write(self, data):
        self.sent.append(data)
        frame = decode(data[4:])
        if frame["op"] == "note":  # is on disk in no time
            asyncio.get_running_loop().call_soon(self.worker.continue_workflow, {**frame, "op": "kept"})

    async def run(self, row, evaluate=False, notes=None):
        frame = {"op": "run", "ticket": 4, "index": 40, "epoch": 0, "row": 2, "version": "0.3"}
        ids = encode_prompt(self.tokenizer, row)
        frame |= {"columns": row, "input_ids": ids, "evaluate": evaluate, "notes": notes or {}}
        frame["held_out_set"] = ""
        await self.worker.answer(frame)
        outcome = decode(self.sent[-1][4:])
        return decode(outcome["group"]) if outcome["op"] == "group" else outcome

    def notes(self):
        frames = [decode(one[4:]) for one in self.sent]
        return {frame["key"]: frame["value"] for frame in frames if frame["op"] == "note"}


async def _always_right(prompt, completion, columns):
    return 1.0


def pens() -> Student:
    return Student(
        {
            f"B {PENS}": [r"So \boxed{26}", "It is 23."],
            f"D {PENS}": [" Multiply and add … {question} "],
            f"T {PENS} / Pads": ["26", "The answer is 26."],
            f"T {PENS} / Hm": ["26", "25"],
            f"T {PENS} / Add": ["1", "2"],
            f"T {PENS} / It is 26.": ["26", "26.0"],
        }
    )


async def test_the_worked_example(tokenizer):
    trial = Trial(tokenizer, pens())
    group = await trial.run(ROW)
    lengths = [len(text) for text in (*TEACHINGS[:3], "It is 26.")]
    efficiency = [100 / (100 + length) for length in lengths]
    expected = [0.5 * (1 + efficiency[0]), 0.25 * (1 + efficiency[1]), -1.0, 0.0]
    assert [one.reward for one in group.trajectories] == pytest.approx(expected)
    first, _second, third, fourth = (one.stats for one in group.trajectories)
    of_student = {"baseline_accuracy": 0.5, "student_accuracy": 1.0, "accuracy_delta": 0.5}
    of_teaching = {"improved": 1.0, "degraded": 0.0, "teaching_tokens": lengths[0], "leak": 0.0}
    parts = {"gain": 0.5, "solved": 0.0, "efficiency": 0.5 * efficiency[0], "leak": 0.0}
    of_reward = {f"reward_{name}": value for name, value in parts.items()}
    assert first == pytest.approx(of_student | of_teaching | of_reward)
    assert (third["degraded"], third["accuracy_delta"]) == (1.0, -0.5)
    assert fourth["leak"] == 1.0 and fourth["reward_leak"] == pytest.approx(-0.5 * (1 + efficiency[3]))


async def test_trained_is_exactly_what_the_engine_was_sent(tokenizer):
    """One chat turn of question and approach; not the bare question, and no turn within a turn."""
    trial = Trial(tokenizer, pens())
    group = await trial.run(ROW)
    sent = {tuple(request.input_ids) for request in trial.teacher.requests}
    assert len(sent) == 1 and {request.min_version for request in trial.teacher.requests} == {"0.3"}
    ids = list(*sent)
    text = f"[user]A {PENS} / Multiply and add … {{question}}[assistant]"
    assert tokenizer.decode(ids) == text
    for one, teaching in zip(group.trajectories, TEACHINGS, strict=True):
        assert one.ids.tolist() == [*ids, *tokenizer.encode(teaching), EOS]
        assert one.loss_mask.tolist() == [False] * len(ids) + [True] * (len(teaching) + 1)
        assert set(one.logprobs[one.loss_mask].tolist()) == {-0.5} and set(one.steps[one.loss_mask]) == {4}


async def test_baseline_and_probe_are_made_once_for_a_question(tokenizer):
    trial = Trial(tokenizer, pens(), options=["teacher.max_probe_tokens=7"])
    await trial.run(ROW)
    asked = [(chat[-1]["content"][:1], limit, len(seeds)) for chat, limit, seeds in trial.student.asked]
    assert sorted(asked, key=str) == [("B", None, 2), ("D", 7, 1), *[("T", None, 2)] * 4]
    seeds = [seed for _, _, each in trial.student.asked for seed in each]
    assert len(set(seeds)) == len(seeds) == 2 + 1 + 8
    again = Trial(tokenizer, pens())
    await again.run(ROW, notes=trial.notes())
    assert [chat[-1]["content"][:1] for chat, _, _ in again.student.asked] == ["T"] * 4
    assert again.student.asked == [one for one in trial.student.asked if one[0][-1]["content"][0] == "T"]


async def test_a_question_is_three_requests_to_the_servers_of_the_student(tokenizer):
    servers = Servers(tokenizer, pens().answers)
    trial = Trial(tokenizer, servers.pool())
    group = await trial.run(ROW)
    *first, taught = servers.requests
    assert sorted(map(len, first)) == [1, 2] and len(taught) == 4 * 2
    names = [f"taught.{number}/{answer}" for number in range(4) for answer in range(2)]
    seeds = [request.sampling["sampling_seed"] for request in taught]
    assert seeds == [make_sample_seed(trial.seed, 0, 2, name) for name in names]
    apart = await Trial(tokenizer, Endpoint(pens().answers)).run(ROW)
    assert [one.stats for one in group.trajectories] == [one.stats for one in apart.trajectories]
    assert [one.reward for one in group.trajectories] == [one.reward for one in apart.trajectories]


@pytest.mark.parametrize(
    ("limits", "num_requests"),
    [
        pytest.param({"context": 90}, 3, id="the pool knows that one is too long"),
        # which one it was shows if each is asked alone
        pytest.param({}, 3 + 3, id="the server refuses one"),
    ],
)
async def test_servers_read_the_other_teachings_if_one_is_no_input(tokenizer, limits, num_requests):
    servers = Servers(tokenizer, pens().answers)
    trial = Trial(tokenizer, servers.pool(**limits), ["Pads: four", "unreadable" * 9, "Add"])
    group = await trial.run(ROW)
    lengths = [one.stats["teaching_tokens"] for one in group.trajectories]
    assert lengths == [10, 90, 3] and len(servers.requests) == num_requests
    apart = await Trial(tokenizer, Endpoint(pens().answers), ["Pads: four", "unreadable" * 9, "Add"]).run(ROW)
    rewards = [one.reward for one in group.trajectories]
    assert rewards == [one.reward for one in apart.trajectories] and len({*rewards}) > 1
    assert group.trajectories[1].stats["student_accuracy"] == 0.0


async def test_no_request_is_sent_if_no_teaching_is_input(tokenizer):
    servers = Servers(tokenizer, pens().answers)
    group = await Trial(tokenizer, servers.pool(90), ["unreadable" * 9] * 2).run(ROW)
    assert [one.stats["student_accuracy"] for one in group.trajectories] == [0.0] * 2
    assert len(servers.requests) == 2


async def test_a_prompt_whose_student_fails_is_rejected(tokenizer):
    servers = Servers(tokenizer, pens().answers)
    trial = Trial(tokenizer, servers.pool())
    await trial.run(ROW)
    servers.errors = [ServerUnavailable("gone")]
    outcome = await trial.run(ROW, notes=trial.notes())
    assert (outcome["op"], outcome["reason"]) == ("rejected", "exception")
    assert "rollout.request_retries are used up: gone" in outcome["error"]


async def test_an_evaluation_has_one_teaching(tokenizer):
    trial = Trial(tokenizer, pens())
    outcome = await trial.run(ROW, evaluate=True)
    assert (outcome["op"], len(trial.teacher.requests)) == ("scored", 1)
    assert outcome["stats"]["accuracy_delta"] == 0.5


async def test_a_row_without_a_right_answer_has_reward_zero(tokenizer):
    trial = Trial(tokenizer, pens())
    for row in ({**ROW, "ground_truth": None}, {"prompt": PENS}):
        group = await trial.run(row)
        assert [one.reward for one in group.trajectories] == [0.0] * 4
        assert "accuracy_delta" not in group.trajectories[0].stats


async def test_a_reward_of_the_users_own_needs_no_right_answer(tokenizer):
    trial = Trial(tokenizer, pens(), options=["rollout.reward_fn=own:score"])
    group = await trial.run({"prompt": PENS})
    assert {one.stats["reward_solved"] for one in group.trajectories} == {0.5}


async def test_a_teaching_that_the_student_can_not_read_is_worth_nothing(tokenizer):
    trial = Trial(tokenizer, pens(), ["Pads: four", "unreadable"])
    group = await trial.run(ROW)
    assert [one.stats["student_accuracy"] for one in group.trajectories] == [1.0, 0.0]


async def test_a_question_that_the_student_can_not_read_is_refused(tokenizer):
    outcome = await Trial(tokenizer, pens()).run({"prompt": "another", "answer": "1"})
    assert (outcome["op"], outcome["reason"]) == ("rejected", "refused")


async def test_turns_before_the_question_stay(tokenizer):
    said = {"system": "Be brief.", "user": "Hi", "assistant": "Hello"}
    before = [{"role": role, "content": text} for role, text in said.items()]
    question = {"role": "user", "content": [{"type": "text", "text": PENS}]}
    trial = Trial(tokenizer, pens())
    await trial.run({"messages": [*before, question], "answer": 26})
    assert all(chat[:-1] == before for chat, _, _ in trial.student.asked)
    sent = tokenizer.decode(trial.teacher.requests[0].input_ids)
    assert sent.startswith(f"[user]Hi[assistant]Hello[user]A {PENS}")
    outcome = await trial.run({"messages": [before[0]], "answer": 26})
    assert "needs a message of role user" in outcome["error"]


async def test_templates_know_the_columns_and_show_no_other(tokenizer):
    student = Student({"B": ["26"], "D": ["{secret}"], "T": ["26"]})
    template = 'teacher.templates.adaptive="A {question} {note} {facts} {approach}"'
    trial = Trial(tokenizer, student, options=[template])
    row = {"prompt": PENS, "answer": "26", "note": None, "facts": {"a": [1]}, "secret": "s"}
    await trial.run(row)
    sent = tokenizer.decode(trial.teacher.requests[0].input_ids)
    assert sent == f'[user]A {PENS}  {{"a": [1]}} {{secret}}[assistant]'
    outcome = await trial.run({"prompt": PENS, "answer": "26", "facts": ""})
    assert (outcome["op"], outcome["reason"]) == ("rejected", "exception")
    told = "teacher.templates.adaptive: the row lacks the column {note}; it has answer, facts, prompt"
    assert told in outcome["error"]


async def test_tracing_shows_every_text(tokenizer, caplog):
    with caplog.at_level("INFO"):
        await Trial(tokenizer, pens()).run(ROW)
        assert "Pads" not in caplog.text
        await Trial(tokenizer, pens(), options=["rollout.enable_rollout_tracing=true"]).run(ROW)
    told = [
        f"probe, asked:\n[user] D {PENS} \\boxed{{}}\n",
        f"baseline, asked:\n[user] B {PENS}\n",
        f"teacher, asked:\n[user] A {PENS} / ",
        f"taught.1, asked:\n[user] T {PENS} / Hm\n",
        "probe:\n Multiply and add",
        "baseline, answer 1, scored 0:\nIt is 23.",
        "teaching 3, reward 0:\n<teaching>It is 26.",
        "taught.1, answer 0, scored 1:\n26",
    ]
    assert [text for text in told if f"prompt 40, {text}" not in caplog.text] == []


def test_the_workflow_needs_its_section(tokenizer):
    with pytest.raises(ConfigError, match="needs trainer teacher"):
        load_workflow(load([], [*WORDS, "rollout.workflow=teacher"]).config)
    with pytest.raises(ConfigError, match=r"teacher.reward_parts 'nowhere:f' can't be imported"):
        Trial(tokenizer, pens(), options=["teacher.reward_parts=[gain, 'nowhere:f']"])
