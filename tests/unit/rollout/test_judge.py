"""Rewards by other models: what a judge and a reward model are asked, and what follows without a score."""

import math

import pytest

from hpc_rl.config.options.inference import GenerationHyperparameters, JudgeConfig
from hpc_rl.core.types import Reply
from hpc_rl.datasets.encode import encode_pair
from hpc_rl.datasets.tokenizer import Tokenizer
from hpc_rl.examples.toy import make_tokenizer
from hpc_rl.rollout.batch_log.ledger import RejectReason
from hpc_rl.rollout.rewards import Rejection
from hpc_rl.rollout.rewards.judge import Judge, find_score, make_model_reward
from hpc_rl.rollout.server_pool import ServerPool
from hpc_rl.rollout.workflow import make_reward_arguments


class Pool:
    """Says what it is given, in turn; keeps what it is asked."""

    def __init__(self, *said: str) -> None:
        self.said, self.asked = list(said), []

    async def ask(self, messages, seeds, max_new_tokens=None, temperature=None):
        self.asked.append((messages[-1]["content"], seeds[0], temperature))
        said = self.said.pop(0) if self.said else "no idea"
        return [Reply(said, 3, "stop")]


def judge(pool: Pool, **options) -> Judge:
    return Judge(pool, JudgeConfig(pool="judge", **options), seed=1)


async def test_the_reward_is_the_mean_of_the_scores_at_the_temperatures():
    pool = Pool("<score>1</score>", "so <score>0</score> no: <score> 0.5 </score>", "<score>.3</score>")
    assert await judge(pool).reward("1+2?", "3", {"answer": "3"}) == pytest.approx(0.6)
    texts, seeds, temperatures = zip(*pool.asked, strict=True)
    assert temperatures == (0.2, 0.5, 0.8) and len(set(seeds)) == 3 and len(set(texts)) == 1
    assert "Question:\n1+2?\n\nAnswer:\n3\n" in texts[0] and "{" not in texts[0]


async def test_the_same_completion_gets_the_same_seeds():
    pool = Pool(*["<score>1</score>"] * 9)
    for completion in ("3", "3", "4"):
        await judge(pool).reward("1+2?", completion, {})
    seeds = [seed for _, seed, _ in pool.asked]
    assert seeds[:3] == seeds[3:6] and not set(seeds[:3]) & set(seeds[6:])


async def test_named_values_only():
    pool = Pool("<score>1</score>")
    options = {"template": r"{question} \boxed{} {completion} {answer} {hint}", "temperatures": [0.0]}
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "1+2 {answer}?"}]
    await judge(pool, **options).reward(chat, "{hint}{}", {"answer": 3, "hint": None})
    assert pool.asked[0][0] == r"1+2 {answer}? \boxed{} {hint}{} 3 "
    with pytest.raises(
        Rejection, match=r"rollout.judge.template: the row lacks the column \{hint\}.*it has answer"
    ):
        await judge(pool, **options).reward(chat, "x", {"answer": 3})


async def test_an_answer_without_a_score_is_asked_for_again_then_rejects_the_prompt():
    pool = Pool("good", "<score>7</score>", "<score>0.25</score>")
    assert await judge(pool, temperatures=[0.5]).reward("q", "a", {}) == 0.25
    assert len({seed for _, seed, _ in pool.asked}) == 3
    pool = Pool()
    told = r"pool judge gave no score from 0 to 1.*ends with 'no idea'"
    with pytest.raises(Rejection, match=told) as raised:
        await judge(pool, temperatures=[0.5], retries=1).reward("q", "a", {})
    assert raised.value.reason == "reward_exception" and len(pool.asked) == 2


async def test_a_temperature_without_a_score_does_not_count(caplog):
    pool = Pool("<score>0.25</score>", "no idea", "<score>0.75</score>")
    assert await judge(pool, retries=0).reward("q", "a", {}) == 0.5
    assert "at temperature 0.5 ends with 'no idea'" in caplog.text


@pytest.mark.parametrize(
    ("said", "score"),
    [
        ("<score>1.</score>", 1.0),
        ("<SCORE>0.5</Score>", 0.5),
        ("<score>.</score>", None),
        ("<score>0.7</score>", 0.7),
        ("<think><score>0.1</score></think><score>1.0</score>", 1.0),
        ("<think><score>0.1</score></think>hm", None),
        ("<score>-0.5</score>", None),
        ("<score>1.01</score>", None),
        ("<score>high</score>", None),
        ("0.7", None),
    ],
)
def test_scores(said, score):
    assert find_score(said) == score


class Scores:
    """In place of a router: a score for each request that it is sent."""

    def __init__(self) -> None:
        self.scores, self.sent = {}, []

    async def score_many(self, requests):
        self.sent = [request.input_ids for request in requests]
        return [self.scores.get(tuple(ids), 0.5) for ids in self.sent]


CHAT = [{"role": "user", "content": "1+2="}]


@pytest.mark.parametrize(
    "row", [{"prompt": "1+2="}, {"prompt": CHAT}, {"messages": CHAT}, {"messages": CHAT, "prompt": ";"}]
)
async def test_a_reward_model_is_asked_as_it_was_trained(row, tmp_path):
    make_tokenizer().save_pretrained(tmp_path)
    tokenizer, router = Tokenizer(tmp_path), Scores()
    pool = ServerPool("liked", router, tokenizer, GenerationHyperparameters(), context=7)
    reward = make_model_reward(pool)
    trained = encode_pair(tokenizer, {**row, "chosen": "3", "rejected": "12"})
    prompt, columns = make_reward_arguments({**row, "input_ids": [1], "answer": "3"})
    wanted = [ids.tolist() for ids in trained]
    router.scores = {tuple(wanted[0]): 2.5, tuple(wanted[1]): -1.0}
    assert await reward(prompt, ["3", "12"], columns) == [2.5, -1.0]
    assert router.sent == wanted
    with pytest.raises(Rejection, match="8 tokens, the context of its reward model is 7") as caught:
        await reward(prompt, ["3", "123"], columns)
    assert caught.value.reason == RejectReason.TOO_LONG
    router.scores = {tuple(wanted[0]): math.nan}
    with pytest.raises(Rejection, match="the score of pool liked is nan"):
        await reward(prompt, ["3"], columns)
