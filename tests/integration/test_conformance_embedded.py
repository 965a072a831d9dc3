"""The conformance suite on the embedded backend, and what only that backend promises."""

import asyncio
from pathlib import Path

import pytest

pytest.register_assert_rewrite("conformance")

from conformance import (  # noqa: E402
    LONG,
    PROMPT,
    Conformance,
    ServedReplica,
    api,  # noqa: F401
    check_drain,
    make_model,
    make_reward_model,
    plain_scores,
)

from hpc_rl.config.options.inference import EmbeddedConfig  # noqa: E402
from hpc_rl.core.errors import ConfigError  # noqa: E402
from hpc_rl.servers.embedded.backend import EmbeddedBackend  # noqa: E402
from hpc_rl.servers.embedded.scorer import EmbeddedScorer  # noqa: E402


def _served(folder: Path, **config):
    served = ServedReplica(
        folder, lambda _trial, _model: EmbeddedBackend(EmbeddedConfig(**config), address="127.0.0.1")
    )
    served.start(60)
    return served


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    replica = _served(tmp_path_factory.mktemp("embedded"))
    yield replica
    replica.stop()


@pytest.fixture(scope="module")
def invariant(tmp_path_factory):
    replica = _served(tmp_path_factory.mktemp("invariant"), batch_invariant=True)
    yield replica
    replica.stop()


class TestEmbedded(Conformance):
    lacks_penalties = True

    async def test_seed_gives_the_same_tokens_in_any_company(self, api):  # noqa: F811
        seeded = {"max_new_tokens": 24, "ignore_eos": True, "sampling_seed": 7}
        alone = await api.turn(**seeded)
        crowd = await asyncio.gather(
            *(api.turn(PROMPT[: 1 + i % 5], max_new_tokens=30) for i in range(20)), api.turn(**seeded)
        )
        assert crowd[-1].output_ids == alone.output_ids
        other = await api.turn(max_new_tokens=24, ignore_eos=True, sampling_seed=8)
        assert other.output_ids != alone.output_ids

    async def test_samples_of_one_prompt_differ_and_share_its_prefill(self, api):  # noqa: F811
        turns = await asyncio.gather(*(api.turn(max_new_tokens=20, ignore_eos=True) for _ in range(8)))
        assert len({tuple(turn.output_ids) for turn in turns}) == 8


async def test_a_server_that_stops_returns_its_tokens(served):
    await check_drain(served, LONG)  # the last test of this server


class TestBatchInvariant:
    @pytest.fixture
    def served(self, invariant):
        return invariant

    async def test_company_changes_no_bit(self, api):  # noqa: F811
        shapes = [(PROMPT[: 2 + i % 4], 5 + 3 * i, i) for i in range(8)]
        requests = [
            {"ids": ids, "max_new_tokens": made, "sampling_seed": i, "ignore_eos": True}
            for ids, made, i in shapes
        ]
        alone = [await api.turn(**request) for request in requests]
        together = await asyncio.gather(*(api.turn(**request) for request in reversed(requests)))
        for one, other in zip(alone, reversed(together), strict=True):
            assert (one.output_ids, one.output_logprobs) == (other.output_ids, other.output_logprobs)


async def test_a_reward_model_scores_texts_of_any_length_as_transformers_does(tmp_path):
    make_reward_model(tmp_path / "scores", 3)
    inputs = [PROMPT * times for times in (1, 7, 3)] + [[5], [0, 4, 5], [*PROMPT, 1]] + [PROMPT * 300] * 12
    scorer = EmbeddedScorer(EmbeddedConfig())
    await scorer.start(str(tmp_path / "scores"), "")
    status, answers = await scorer.request("/classify", {"input_ids": inputs})
    refused = [
        await scorer.request("/classify", {"input_ids": bad}) for bad in ([[]], [[99]], [[1] * 5000], [1])
    ]
    generates = await scorer.request("/generate", {"input_ids": PROMPT})
    await scorer.stop()
    assert status == 200
    found = [answer["embedding"][0] for answer in answers]
    wanted = plain_scores(tmp_path / "scores", inputs[:7])
    assert max(abs(a - b) for a, b in zip(found, wanted, strict=False)) < 1e-4
    assert max(found[6:]) - min(found[6:]) < 1e-4
    assert [code for code, _ in refused] == [400] * 4
    assert generates[0] == 404
    make_model(tmp_path / "writes", 3)
    with pytest.raises(ConfigError, match="its files lack score"):
        await EmbeddedScorer(EmbeddedConfig()).start(str(tmp_path / "writes"), "")
