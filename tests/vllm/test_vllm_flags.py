"""The flag table against the command line of the vLLM that is installed."""

import pytest
from other_pythons import flags_of_help, version_in, words_of

from hpc_rl.config.vllm_versions import FLAGS, RESERVED

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]


def test_every_flag_of_the_table_is_one_of_vllms(vllm_python):
    argv = [vllm_python, "-m", "vllm.entrypoints.cli.main", "serve", "--help=all"]
    known = flags_of_help(argv, {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"})
    assert words_of(FLAGS[version_in(vllm_python, "vllm")]) - known == set()
    reserved = {word for word in (*RESERVED.also, *RESERVED.set_by_the_trial) if word.startswith("--")}
    assert reserved - known == set()
