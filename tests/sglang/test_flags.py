"""The flag table against the command line of the SGLang that is installed."""

from pathlib import Path

import pytest
from other_pythons import flags_of_help, version_in, words_of

from hpc_rl.config.sglang_versions import FLAGS

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300)]


def test_every_flag_of_the_table_is_one_of_sglangs(sglang_python):
    shim = str(Path(__file__).parent / "shim")
    env = {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": shim}
    known = flags_of_help([sglang_python, "-m", "sglang.launch_server", "--help"], env)
    assert words_of(FLAGS[version_in(sglang_python, "sglang")]) - known == set()
