"""Several gloo ranks as processes: started by a test, and the main program of each."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from patience import extend

from hpc_rl.core.trial import load_json, write_json
from hpc_rl.engines.shared.distributed import init_ranks, shutdown

ROOT = Path(__file__).resolve().parents[2]


def run(script: Path, scenario: str, num_ranks: int, folder: Path, timeout_s: float = 200) -> None:
    """Run `python SCRIPT SCENARIO RANK NUM_RANKS FOLDER` for each rank; all must succeed."""
    paths = [ROOT, ROOT / "tests" / "helpers", ROOT / "tests" / "integration"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ":".join(map(str, paths))}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), scenario, str(rank), str(num_ranks), str(folder)],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(num_ranks)
    ]
    try:
        for rank, process in enumerate(ranks):
            _, errors = process.communicate(timeout=extend(timeout_s))
            assert process.returncode == 0, f"rank {rank}: {errors[-3000:]}"
    finally:
        for process in ranks:
            process.kill()
            process.wait()
            process.stderr.close()  # a warning of it would fail another test


def main(scenarios: Mapping[str, Callable[[Path, int, int], None]]) -> None:
    """Join the process group, and run the scenario `scenario_<name>` that the command line names."""
    scenario, rank, num_ranks, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    torch.set_num_threads(1)
    record = folder / f"store-{scenario}-{num_ranks}.json"

    def publish(address: str, port: int) -> None:
        write_json(record, [address, port])

    def find() -> tuple[str, int]:
        deadline = time.monotonic() + extend(60)
        while (found := load_json(record)) is None:
            if time.monotonic() > deadline:
                raise TimeoutError("rank 0 did not publish its store")
            time.sleep(0.05)
        return found[0], found[1]

    init_ranks(rank, num_ranks, "cpu", publish, find, timeout_s=extend(60))
    scenarios[f"scenario_{scenario}"](folder, rank, num_ranks)
    shutdown()
    print(json.dumps({"done": rank}))
