"""`hpc-rl generate` with a real SGLang, and no trainer."""

import pytest
from alone_trials import generate_by_servers
from toy_trials import ROOT

pytestmark = [pytest.mark.sglang, pytest.mark.soak, pytest.mark.timeout(600)]


def test_generate_with_sglang(tmp_path, sglang_python):
    environment = f"PYTHONPATH={ROOT / 'tests/sglang/shim'},OMP_NUM_THREADS=1"
    generate_by_servers(
        tmp_path,
        "sglang",
        sglang_python,
        f"launcher.inference_server_env_vars={environment}",
        "sglang.max_total_tokens=16384",
        "sglang.context_length=64",
    )
