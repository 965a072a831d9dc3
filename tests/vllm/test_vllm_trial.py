"""A whole GRPO trial whose server is a real vLLM, on its own units and on the trainer's."""

import pytest

pytest.register_assert_rewrite("server_trials")

from server_trials import ServerTrial, SharedUnitsTrial, run_trial  # noqa: E402
from vllm_servers import TEST_ENVIRONMENT  # noqa: E402

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
NUM_STEPS = 3
VARIABLES = ",".join(f"{name}={value}" for name, value in TEST_ENVIRONMENT.items())
OPTIONS = (
    f"launcher.inference_server_env_vars={VARIABLES}",
    "vllm.kv_cache_memory_bytes=67108864",
    "vllm.max_model_len=64",
)


@pytest.fixture(scope="module")
def alone(tmp_path_factory, vllm_python):
    here = tmp_path_factory.mktemp("vllm-trial")
    return run_trial(here, "vllm", vllm_python, NUM_STEPS, *OPTIONS)


@pytest.fixture(scope="module")
def shared(tmp_path_factory, vllm_python):
    here = tmp_path_factory.mktemp("vllm-shared")
    return run_trial(here, "vllm", vllm_python, NUM_STEPS, *OPTIONS, shares_units=True)


class TestVLLMTrial(ServerTrial):
    NUM_STEPS = NUM_STEPS

    @pytest.fixture
    def finished(self, alone):
        return alone


@pytest.mark.soak
class TestSharedUnits(SharedUnitsTrial):
    NUM_STEPS = NUM_STEPS

    @pytest.fixture
    def finished(self, shared):
        return shared
