"""Where the tests of this folder run, at which sizes, and where their numbers go.

With a GPU: sizes of real models, and numbers in benchmarks/results/gpu.json, or in the file that
HPC_RL_GPU_RESULTS names. Without one the same code runs on the CPU at tiny sizes, so that it works when there is
a GPU; its numbers are not kept.
"""

import gc
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
RESULTS = BENCHMARKS / "results" / "gpu.json"
sys.path.append(str(BENCHMARKS))

from run_record import describe_run, write_record  # noqa: E402


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = str(Path(__file__).parent)
    for item in items:
        if str(item.path).startswith(here):
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session")
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def clean(device: str) -> Iterator[None]:
    """Leave nothing on the GPU, and no process group, to the next test."""
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


@pytest.fixture(scope="session")
def keep(device: str) -> Iterator[Callable[[str, Any], None]]:
    """Take a result by its name; all are written at the end."""
    results: dict[str, Any] = {}
    yield results.__setitem__
    print(json.dumps(results, indent=2))
    if device == "cpu" or not results:
        return
    path = Path(os.environ.get("HPC_RL_GPU_RESULTS", RESULTS))
    about = describe_run("torch", "transformers", "flash-attn", "flash-attn-3")
    about["versions"]["cuda"] = torch.version.cuda
    write_record(path, {**about, "gpu": torch.cuda.get_device_name(), "results": results})
