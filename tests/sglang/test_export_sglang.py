"""The model that `hpc-rl export` writes, on a real SGLang by the printed command."""

import pytest

pytest.register_assert_rewrite("exported_trials")

from exported_trials import check_served, load_greedy, train_and_export  # noqa: E402
from sglang_servers import SHIM  # noqa: E402

pytestmark = [pytest.mark.sglang, pytest.mark.soak, pytest.mark.timeout(1200)]


def test_it_makes_the_greedy_tokens_of_the_trials_server(tmp_path, sglang_python):
    trial, told = train_and_export(tmp_path)
    extra = ["--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native"]
    extra += ["--max-total-tokens", "16384", "--context-length", "64", "--disable-overlap-schedule"]
    env = {"SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": str(SHIM), "OMP_NUM_THREADS": "1"}
    check_served(tmp_path, told, "sglang", sglang_python, load_greedy(trial), extra, env)
