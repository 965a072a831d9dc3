"""The conformance suite on a real SGLang on the CPU, and what only a subprocess can do: be killed, fail to
start.
"""

import asyncio
import os
import stat
import subprocess
from pathlib import Path

import pytest

pytest.register_assert_rewrite("conformance")

from conformance import Conformance, ServedReplica, api, make_model  # noqa: E402, F401

from hpc_rl.config.sections.inference import SGLangConfig  # noqa: E402
from hpc_rl.errors import RoleFailed  # noqa: E402
from hpc_rl.servers.sglang import SGLangBackend, settings_of  # noqa: E402

HERE = Path(__file__).parent
pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]


def backend_of(python: str, tokenizer: Path, folder: Path, extra_args: tuple[str, ...] = ()) -> SGLangBackend:
    env = {
        "PATH": os.environ["PATH"],
        "HOME": os.environ.get("HOME", "/"),
        "HF_HUB_OFFLINE": "1",
        "SGLANG_USE_CPU_ENGINE": "1",
    }
    env |= {"PYTHONPATH": str(HERE / "shim"), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    of_cpu = SGLangConfig(
        dtype="float32", attention_backend="torch_native", context_length=4096, max_running_requests=64
    )
    settings = settings_of(of_cpu, "cpu", 1, 0)
    settings["tokenizer_path"] = str(tokenizer)
    files = {"log": folder / "sglang.log", "secret": folder / "sglang.yaml"}
    return SGLangBackend(python=python, env=env, settings=settings, extra_args=extra_args, **files)


@pytest.fixture(scope="module")
def served(tmp_path_factory, sglang_python):
    folder = tmp_path_factory.mktemp("sglang")
    replica = ServedReplica(folder, lambda _trial, model: backend_of(sglang_python, model, folder))
    replica.start(300)
    replica.secret = folder / "sglang.yaml"
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


async def test_failed_start_shows_sglangs_own_words(tmp_path, sglang_python):
    make_model(tmp_path / "model", 0)
    backend = backend_of(sglang_python, tmp_path / "model", tmp_path, ("--no-such-flag",))
    try:
        with pytest.raises(RoleFailed, match="no-such-flag"):
            await backend.start(str(tmp_path / "model"), "0.0")
    finally:
        await backend.stop()


@pytest.mark.soak
async def test_replica_ends_when_sglang_is_killed(tmp_path, sglang_python):
    make_model(tmp_path / "model", 0)
    backend = backend_of(sglang_python, tmp_path / "model", tmp_path)
    await backend.start(str(tmp_path / "model"), "0.0")
    assert not backend.alive()
    os.kill(backend._process.pid, 9)
    await asyncio.sleep(0.5)
    assert "SIGKILL" in backend.alive()
    await backend.stop()
