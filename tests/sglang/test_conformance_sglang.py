"""The conformance suite on a real SGLang on the CPU, and what only a subprocess can do: be killed, fail to
start.
"""

import os
import stat
import subprocess

import pytest
from patience import until

pytest.register_assert_rewrite("conformance")

from conformance import (  # noqa: E402
    LONG,
    Conformance,
    api,  # noqa: F401
    check_drain,
    check_failed_start,
    make_model,
)
from sglang_servers import backend_of, served_sglang  # noqa: E402

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def served(tmp_path_factory, sglang_python):
    replica = served_sglang(tmp_path_factory.mktemp("sglang"), sglang_python)
    yield replica
    replica.stop()
    assert not replica.secret.exists()


class TestSGLang(Conformance):
    async def test_key_is_in_a_private_file_and_not_in_any_argv(self, api):  # noqa: F811
        secret = api.served.secret
        assert stat.S_IMODE(secret.stat().st_mode) == 0o600
        key = secret.read_text().split('"')[3]
        shown = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
        assert "sglang.launch_server" in shown and key not in shown
        assert key not in (secret.parent / "sglang.log").read_text()


async def test_a_server_that_stops_returns_its_tokens(served):
    await check_drain(served, LONG)  # the last test of this server


async def test_failed_start_shows_sglangs_own_words(tmp_path, sglang_python):
    make_model(tmp_path / "model", 0)
    backend = backend_of(sglang_python, tmp_path / "model", tmp_path, ("--no-such-flag",))
    await check_failed_start(backend, tmp_path / "model")


@pytest.mark.soak
async def test_replica_ends_when_sglang_is_killed(tmp_path, sglang_python):
    make_model(tmp_path / "model", 0)
    backend = backend_of(sglang_python, tmp_path / "model", tmp_path)
    await backend.start(str(tmp_path / "model"), "0.0")
    assert not backend.alive()
    os.kill(backend.process.pid, 9)
    await until(backend.alive, 30)  # the kernel has its memory to free
    assert "SIGKILL" in backend.alive()
    await backend.stop()
