"""A whole GRPO trial whose server is a real vLLM."""

import pytest

pytest.register_assert_rewrite("server_trials")

from server_trials import ServerTrial, run_trial  # noqa: E402
from vllm_servers import TEST_ENVIRONMENT  # noqa: E402

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
NUM_STEPS = 3


@pytest.fixture(scope="module")
def finished(tmp_path_factory, vllm_python):
    environment = ",".join(f"{name}={value}" for name, value in TEST_ENVIRONMENT.items())
    return run_trial(
        tmp_path_factory.mktemp("vllm-trial"),
        "vllm",
        vllm_python,
        NUM_STEPS,
        f"launcher.inference_server_env_vars={environment}",
        "vllm.kv_cache_memory_bytes=67108864",
        "vllm.max_model_len=64",
    )


class TestVLLMTrial(ServerTrial):
    NUM_STEPS = NUM_STEPS
