"""The flag table against the command line of the SGLang that is installed."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from hpc_rl.config.tables.sglang_versions import FLAGS

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300)]


def test_every_flag_of_the_table_is_one_of_sglangs(sglang_python):
    shim = str(Path(__file__).parent / "shim")
    env = {**os.environ, "SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": shim}
    code = "from importlib.metadata import version; print(version('sglang'))"
    version = subprocess.run(
        [sglang_python, "-c", code], env=env, capture_output=True, text=True, check=True
    ).stdout.strip()
    text = subprocess.run(
        [sglang_python, "-m", "sglang.launch_server", "--help"],
        env=env,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    known = set(re.findall(r"(?<![\w-])--[a-z0-9][\w-]*", text))
    words = {word for flag in FLAGS[version].values() for word in ([flag] if isinstance(flag, str) else flag)}
    assert {word for word in words if word.startswith("--")} - known == set()
