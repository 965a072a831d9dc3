"""Adapters alone in a real vLLM on the CPU."""

import pytest

pytest.register_assert_rewrite("conformance", "adapter_suite")

from adapter_suite import check_adapters, make_actor  # noqa: E402
from conformance import LONG, ServedReplica, api  # noqa: E402, F401
from vllm_servers import backend_of  # noqa: E402

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def served(tmp_path_factory, vllm_python):
    folder = tmp_path_factory.mktemp("vllm-adapters")
    replica = ServedReplica(
        folder, lambda _trial, model: backend_of(vllm_python, model, folder, actor=make_actor(model))
    )
    replica.start(600)
    yield replica
    replica.stop()


async def test_each_token_is_from_the_adapter_that_its_label_names(served, api, tmp_path):  # noqa: F811
    await check_adapters(served, api, tmp_path, LONG | {"max_new_tokens": 3500})
