"""A whole GRPO trial whose server is a real SGLang."""

import pytest

pytest.register_assert_rewrite("server_trials")

from server_trials import ServerTrial, run_trial  # noqa: E402
from toy_trials import ROOT  # noqa: E402

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]
NUM_STEPS = 4


@pytest.fixture(scope="module")
def finished(tmp_path_factory, sglang_python):
    environment = f"PYTHONPATH={ROOT / 'tests/sglang/shim'},OMP_NUM_THREADS=1"
    return run_trial(
        tmp_path_factory.mktemp("sglang-trial"),
        "sglang",
        sglang_python,
        NUM_STEPS,
        f"launcher.inference_server_env_vars={environment}",
        "sglang.max_total_tokens=16384",
        "sglang.context_length=64",
    )


class TestSGLangTrial(ServerTrial):
    NUM_STEPS = NUM_STEPS
