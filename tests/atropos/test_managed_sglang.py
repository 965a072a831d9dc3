"""atroposlib's clients against the gateway over a real SGLang on the CPU."""

import pytest

pytest.register_assert_rewrite("conformance", "managed")

from managed import Managed, caller  # noqa: E402, F401
from sglang_servers import served_sglang  # noqa: E402

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600), pytest.mark.soak]


@pytest.fixture(scope="module")
def served(tmp_path_factory, sglang_python):
    replica = served_sglang(tmp_path_factory.mktemp("sglang"), sglang_python)
    yield replica
    replica.stop()


class TestManagedSGLang(Managed):
    LENGTH = 500
