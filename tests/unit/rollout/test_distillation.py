"""The teacher of a distillation: which tokens it is asked for, and where its answers go."""

from functools import partial

import numpy as np
import pytest

from hpc_rl.config.options.distillation import DistillationConfig
from hpc_rl.config.options.inference import GenerationHyperparameters
from hpc_rl.core.types import Reply, TokenLogprobs, Trajectory, TrajectoryGroup, Turn, decode, encode
from hpc_rl.rollout.distillation import Demonstration, Teacher, TextSource, make_demonstration
from hpc_rl.rollout.rewards import Rejection
from hpc_rl.rollout.server_pool import ServerPool
from tests.unit.rollout.test_rollout_worker import Client, Tokenizer, answer, make


class Pool:
    """Answers -t for the token at position t of an input."""

    def __init__(self):
        self.asked = []

    async def compute_logprobs(self, inputs, starts, top_k=0, min_version=""):
        self.asked.append((inputs, starts, min_version))
        places = [range(start, len(ids)) for ids, start in zip(inputs, starts, strict=True)]
        return [
            TokenLogprobs(
                [-float(t) for t in row],
                [[t, t + 1][:top_k] for t in row] if top_k else [],
                [[-0.5, -float(t)][:top_k] for t in row] if top_k else [],
            )
            for row in places
        ]


class Words:
    """A tokenizer of characters."""

    def encode(self, text, add_special_tokens=True):
        return [ord(one) for one in text]

    def chat(self, messages):
        return "|".join(f"{one['role']}:{one['content']}" for one in messages)


def trajectory(ids, mask, **more) -> Trajectory:
    of_tokens = {"logprobs": np.zeros(len(ids), np.float32)}
    of_tokens |= {name: np.zeros(len(ids), np.int32) for name in ("lineages", "steps")}
    arrays = {"ids": np.array(ids, np.int32), "loss_mask": np.array(mask, bool), **of_tokens, **more}
    return Trajectory(**arrays, reward=0.0, finish_reason="stop")


def prompt(input_ids=(7, 8), **columns):
    return {"input_ids": list(input_ids), "columns": columns, "version": "0.3"}


async def test_all_trajectories_of_a_group_are_scored_in_one_call():
    """A tool's tokens between two turns, a completion that is empty, and one that has a score already."""
    pool = Pool()
    given = np.full(3, -9, np.float32)
    group = TrajectoryGroup(0, [
        trajectory([7, 8, 1, 2, 3, 4], [0, 0, 1, 0, 0, 1]),
        trajectory([7, 8], [0, 0]),
        trajectory([7, 8, 5], [0, 0, 1], teacher_logprobs=given),
        trajectory([7, 8, 6], [0, 0, 1]),
    ])  # fmt: skip
    await Teacher(pool).score(group, prompt())
    assert pool.asked == [([[7, 8, 1, 2, 3, 4], [7, 8, 6]], [2, 2], "")]
    found = [one.teacher_logprobs.tolist() for one in group.trajectories]
    assert found == [[0, 0, -2, 0, 0, -5], [0, 0], [-9, -9, -9], [0, 0, -2]]
    assert group.trajectories[0].teacher_logprobs.dtype == np.float32
    # stored with the trajectory: a batch that is read again has them
    again = decode(encode(group))
    assert again.trajectories[0].teacher_logprobs.tolist() == found[0]
    await Teacher(pool).score(again, prompt())
    assert len(pool.asked) == 1


async def test_a_trajectory_without_a_prompt_is_scored_from_its_second_token():
    pool, group = Pool(), TrajectoryGroup(0, [trajectory([1, 2], [1, 1])])
    await Teacher(pool).score(group, prompt(()))
    assert pool.asked[0][1] == [1]
    assert group.trajectories[0].teacher_logprobs.tolist() == [0, -1]


async def test_likely_tokens_are_stored_at_the_tokens_that_the_model_made():
    """A model with two tokens has no third; a trajectory with a score of its own gets likely tokens, too."""
    given = np.full(3, -9, np.float32)
    group = TrajectoryGroup(0, [
        trajectory([7, 8, 1, 2, 3], [0, 0, 1, 0, 1]),
        trajectory([7, 8], [0, 0]),
        trajectory([7, 8, 5], [0, 0, 1], teacher_logprobs=given),
    ])  # fmt: skip
    pool = Pool()
    await Teacher(pool, top_k=3).score(group, prompt())
    first, empty, scored = decode(encode(group)).trajectories
    nothing, none = [0, 0, 0], [-np.inf] * 3
    assert first.teacher_logprobs.tolist() == [0, 0, -2, 0, -4]
    assert first.teacher_top_ids.tolist() == [nothing, nothing, [2, 3, 0], nothing, [4, 5, 0]]
    rows = [none, none, [-0.5, -2, -np.inf], none, [-0.5, -4, -np.inf]]
    assert first.teacher_top_logprobs.tolist() == rows
    assert first.teacher_top_ids.dtype == np.int32 and first.teacher_top_logprobs.dtype == np.float32
    assert empty.teacher_top_logprobs.tolist() == [none, none]
    assert scored.teacher_top_ids[2].tolist() == [2, 3, 0]
    await Teacher(pool, top_k=3).score(group, prompt())
    assert len(pool.asked) == 1


async def test_a_demonstration_stands_before_the_same_tokens():
    pool, tokenizer = Pool(), Words()
    shown = Demonstration("solution", "{question} e.g. {demonstration}", tokenizer)
    group = TrajectoryGroup(0, [trajectory([7, 8, 1, 2], [0, 0, 1, 1])])
    await Teacher(pool, shown, follows_trainer=True).score(group, prompt(prompt="q", solution="ab"))
    text = [ord(one) for one in "q e.g. ab"]
    assert pool.asked == [([[*text, 1, 2]], [9], "0.3")]
    assert group.trajectories[0].teacher_logprobs.tolist() == [0, 0, -9, -10]
    # of a chat, the last question is replaced
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    made = shown.encode({"messages": chat, "solution": "ab"})
    assert "".join(map(chr, made)) == "system:s|user:q e.g. ab"
    with pytest.raises(Rejection, match="no demonstration in the column solution"):
        shown.encode({"prompt": "q"})
    other = TrajectoryGroup(0, [trajectory([9, 9, 1], [0, 0, 1])])
    with pytest.raises(Rejection, match="begin with its prompt"):
        await Teacher(pool, shown).score(other, prompt(prompt="q", solution="ab"))
    assert make_demonstration(DistillationConfig(), tokenizer) is None
    default = make_demonstration(DistillationConfig(demonstration_column="solution"), tokenizer)
    text = "".join(map(chr, default.encode({"prompt": "1+1?", "solution": "It is 2."})))
    assert text.startswith("1+1?\n\nThis is an example") and "\nIt is 2.\n" in text


async def test_a_worker_scores_what_is_trained_on_and_not_what_is_evaluated():
    pool = Pool()
    made, sent = make(Client())
    made._teacher = Teacher(pool)
    group = decode((await answer(made, sent))["group"])
    assert pool.asked == [([[5, 6, 1, 2, 99]] * 3, [2] * 3, "")]
    assert [one.teacher_logprobs.tolist() for one in group.trajectories] == [[0, 0, -2, -3, -4]] * 3
    await answer(made, sent, evaluate=True)
    assert len(pool.asked) == 1


class Frozen(Client):
    async def generate_many(self, requests):
        self.requests += requests
        return [Turn([4, 99], [-1.0, -2.0], [("none", 0, 2)], "stop") for _ in requests]


async def test_samples_of_a_teacher_have_the_version_of_the_trainer():
    """So that they never get too old; an evaluation asks the policy."""
    policy, frozen = Client(), Frozen()
    made, sent = make(policy)
    source = ServerPool("teacher", frozen, Tokenizer(), GenerationHyperparameters(max_new_tokens=9))
    made._sampler = partial(made._sampler, source=source)
    group = decode((await answer(made, sent))["group"])
    assert [one.ids.tolist() for one in group.trajectories] == [[5, 6, 4, 99]] * 3 and not policy.requests
    assert group.trajectories[0].steps.tolist() == [-1, -1, 3, 3]
    assert [one.min_version for one in frozen.requests] == [""] * 3
    assert frozen.requests[0].sampling["max_new_tokens"] == 9
    await answer(made, sent, evaluate=True)
    assert len(policy.requests) == 1 and len(frozen.requests) == 3


class Elsewhere:
    """An endpoint that answers the seed, or is cut off."""

    def __init__(self):
        self.asked = []

    async def ask(self, messages, seeds, max_new_tokens=None, temperature=None):
        self.asked.append((messages, list(seeds)))
        return [Reply("ab", 9, "stop"), Reply("ababab", 9, "stop"), Reply("ab", 9, "length")]


class Characters(Words):
    eos_token_id = 99


async def test_texts_of_an_endpoint_become_tokens_of_the_policy():
    """With an end of sequence, unless the endpoint cut them off; they are cut at the policy's limit."""
    elsewhere, (made, sent) = Elsewhere(), make(Client())
    source = TextSource(elsewhere, Characters(), GenerationHyperparameters(max_new_tokens=4))
    made._sampler = partial(made._sampler, source=source)
    group = decode((await answer(made, sent))["group"])
    made_ids = [one.ids[2:].tolist() for one in group.trajectories]
    assert made_ids == [[97, 98, 99], [97, 98, 97, 98], [97, 98]]
    assert [one.finish_reason for one in group.trajectories] == ["stop", "length", "length"]
    assert group.trajectories[0].steps.tolist() == [-1, -1, 3, 3, 3]
    ((messages, seeds),) = elsewhere.asked
    assert messages[-1]["role"] == "user" and len({*seeds}) == 3
    await answer(made, sent, evaluate=True)
    assert len(elsewhere.asked) == 1
