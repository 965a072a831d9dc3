"""atroposlib's clients against the gateway over the embedded engine."""

import pytest

pytest.register_assert_rewrite("conformance", "managed")

from conformance import ServedReplica  # noqa: E402
from managed import Managed, caller  # noqa: E402, F401

from hpc_rl.config.sections.inference import EmbeddedConfig  # noqa: E402
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
    pass
