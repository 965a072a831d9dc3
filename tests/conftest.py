"""Which tests share a process where several run at once: those with a SGLang, those with a vLLM, two halves of
those with a Slurm, else those of a file. What takes longest starts first.

No test sees or changes what the account that runs them keeps: its index of trials, its cluster profiles.
"""

import os
import shutil
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from patience import extend, set_slowness

from hpc_rl.core.collector import pause_collector

STARTED_ONCE = ("slurm", "sglang", "vllm")
# The tests with a Slurm mostly wait. These take half of the time, and run beside the others on a cluster of their own.
SECOND_SLURM = ("test_trial.py", "test_layouts.py", "test_endings.py", "test_options.py", "test_versions.py")
# What takes minutes, the longest first: started last it would run alone, at the end.
LONG = ("slurm", "slurm-2", "test_kill_anything.py", "vllm", "sglang")
LONG += ("test_trainer.py", "test_docs.py", "test_check_episode.py", "test_readme.py", "test_teacher_page.py")
LONG += ("test_mpiexec.py", "test_checkpoint_command.py", "test_areal_files.py", "test_rollout_faults.py")
LONG += ("test_new_user.py", "test_bad_input.py", "test_megatron_engine.py", "test_benchmarks.py")
LONG += ("test_fsdp_layouts.py", "test_wheel.py", "test_supervisor_faults.py", "test_collective_trial.py")
LONG += (
    "test_fsdp.py",
    "test_weight_groups.py",
    "test_memory_estimate.py",
    "test_loading.py",
    "test_lora_trial.py",
)
LONG += ("test_quickstart.py", "test_managed_embedded.py", "test_notebook.py", "test_rows.py")
LONG += ("test_environment_trial.py", "test_elastic.py", "test_teacher_quickstart.py")
# A test that starts processes ends by what happens, whatever the load: this only guards.
GUARD_S = 300
QUICK_S = 60
HERE = Path(__file__).parent
# No test measures time.
hypothesis.settings.register_profile("any load", deadline=None)
hypothesis.settings.load_profile("any load")
OWN = pytest.StashKey[Path]()


def pytest_configure(config: pytest.Config) -> None:
    set_slowness()
    config.stash[OWN] = own = Path(tempfile.mkdtemp(prefix="hpc-rl-account-"))
    os.environ |= {"XDG_STATE_HOME": str(own / "state"), "XDG_CONFIG_HOME": str(own / "config")}
    os.environ["LANGUAGE"] = "C"  # argparse looks for no catalogue of messages, file by file, for each word
    # The tests start thousands of processes: each that compiled the package would take half a second more.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Import the modules of the tests, and what they import."""
    with pause_collector():
        return (yield)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: rank(process_of(item.nodeid)))
    for item in items:
        is_quick = item.path.is_relative_to(HERE / "unit") or item.path.is_relative_to(HERE / "golden")
        marker = item.get_closest_marker("timeout")
        limit_s = marker.args[0] if marker is not None else QUICK_S if is_quick else GUARD_S
        item.add_marker(pytest.mark.timeout(extend(limit_s)), append=False)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="write the golden files instead of comparing with them"
    )


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--update-golden", default=False))


def pytest_unconfigure(config: pytest.Config) -> None:
    shutil.rmtree(config.stash[OWN], ignore_errors=True)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `-n 3 --dist loadscope`."""
    from xdist.scheduler import LoadScopeScheduling

    class ByWhatIsStarted(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return process_of(nodeid)

    return ByWhatIsStarted(config, log) if config.getoption("dist") == "loadscope" else None


def rank(process: str) -> int:
    """Place in LONG of the tests of a process; behind all of it where it is none of them."""
    name = Path(process).name
    return LONG.index(name) if name in LONG else len(LONG)


def process_of(nodeid: str) -> str:
    """Tests with the same answer run in one process."""
    path = Path(nodeid.partition("::")[0])
    if "slurm" in path.parts and path.name in SECOND_SLURM:
        return "slurm-2"
    return next((kind for kind in STARTED_ONCE if kind in path.parts or path.stem.endswith(kind)), str(path))
