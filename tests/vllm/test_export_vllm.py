"""The model that `hpc-rl export` writes, on a real vLLM by the printed command."""

import pytest

pytest.register_assert_rewrite("exported_trials")

from exported_trials import check_served, load_greedy, train_and_export  # noqa: E402
from vllm_servers import TEST_ENVIRONMENT  # noqa: E402

from hpc_rl.servers.vllm import CPU_ENVIRONMENT  # noqa: E402

pytestmark = [pytest.mark.vllm, pytest.mark.soak, pytest.mark.timeout(1200)]


def test_it_makes_the_greedy_tokens_of_the_trials_server(tmp_path, vllm_python):
    trial, told = train_and_export(tmp_path)
    extra = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "64"]
    extra += ["--kv-cache-memory-bytes", str(1 << 26)]
    env = CPU_ENVIRONMENT | TEST_ENVIRONMENT
    check_served(tmp_path, told, "vllm", vllm_python, load_greedy(trial), extra, env)
