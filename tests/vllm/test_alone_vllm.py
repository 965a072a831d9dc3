"""`hpc-rl generate` with a real vLLM, and no trainer."""

import pytest
from alone_trials import generate_by_servers
from vllm_servers import TEST_ENVIRONMENT

pytestmark = [pytest.mark.vllm, pytest.mark.soak, pytest.mark.timeout(600)]


def test_generate_with_vllm(tmp_path, vllm_python):
    environment = ",".join(f"{name}={value}" for name, value in TEST_ENVIRONMENT.items())
    generate_by_servers(
        tmp_path,
        "vllm",
        vllm_python,
        f"launcher.inference_server_env_vars={environment}",
        "vllm.kv_cache_memory_bytes=67108864",
        "vllm.max_model_len=64",
    )
