"""A whole GRPO trial whose server is a real SGLang, on its own units and on the trainer's."""

import pytest

pytest.register_assert_rewrite("server_trials")

from server_trials import ServerTrial, SharedUnitsTrial, run_trial  # noqa: E402
from toy_trials import ROOT  # noqa: E402

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]
NUM_STEPS = 4
OPTIONS = (
    f"launcher.inference_server_env_vars=PYTHONPATH={ROOT / 'tests/sglang/shim'},OMP_NUM_THREADS=1",
    "sglang.max_total_tokens=16384",
    "sglang.context_length=64",
)


@pytest.fixture(scope="module")
def alone(tmp_path_factory, sglang_python):
    here = tmp_path_factory.mktemp("sglang-trial")
    return run_trial(here, "sglang", sglang_python, NUM_STEPS, *OPTIONS)


@pytest.fixture(scope="module")
def shared(tmp_path_factory, sglang_python):
    here = tmp_path_factory.mktemp("sglang-shared")
    return run_trial(here, "sglang", sglang_python, NUM_STEPS, *OPTIONS, shares_units=True)


class TestSGLangTrial(ServerTrial):
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
