"""atroposlib's clients against the gateway over the embedded engine."""

import pytest

pytest.register_assert_rewrite("conformance", "managed")

from conformance import ServedReplica  # noqa: E402
from managed import (  # noqa: E402
    Managed,
    caller,  # noqa: F401
    check_counters,
    check_managed,
    check_nodes,
    check_update,
    run,
)

from hpc_rl.config.options.inference import EmbeddedConfig  # noqa: E402
from hpc_rl.core.resource_limits import raise_limits  # noqa: E402
from hpc_rl.servers.embedded.backend import EmbeddedBackend  # noqa: E402

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("embedded")
    replica = ServedReplica(folder, lambda _trial, _model: EmbeddedBackend(EmbeddedConfig()))
    replica.start(60)
    yield replica
    replica.stop()


class TestManagedEmbedded(Managed):
    async def test_managed_server_of_a_vllm_server(self, caller, atropos_python):  # noqa: F811
        await check_managed(caller, atropos_python, "vllm")

    async def test_a_thousand_chats_at_once(self, caller, atropos_python):  # noqa: F811
        raise_limits()
        got = await run(atropos_python, "many", caller)
        assert got["errors"] == [] and got["answered"] == 1000
        assert caller.gateway.counters.requests == 1000  # none was tried again
        check_counters(caller)

    async def test_requests_are_held_while_weights_are_updated(self, caller, served, atropos_python):  # noqa: F811
        await check_update(caller, served, atropos_python, "retract", self.LENGTH)

    async def test_the_data_token_in_the_path_instead_of_the_key(self, caller, atropos_python):  # noqa: F811
        got = await run(atropos_python, "sglang", caller, f"/t/{caller.token}/v1", "x")
        check_nodes(got["turns"], caller)
        check_counters(caller)
