"""The cost of a publication as `n x overhead + bytes / bandwidth`, fitted, and predictions for larger models.

    python benchmarks/publish_fit.py [--measured benchmarks/results/publish.json] [--dir DIR]
                                     [--out benchmarks/results/publish_fit.json]

One rank with n tensors of one size publishes by the disk transport, and a copy on the node follows. Fitted, over a
grid of n and bytes (all values, in bfloat16), are CPU seconds, which other processes disturb less than the clock:
  blocked  the transport's start(), on the thread that trains
  write    compare, hash, encode and write, in the background
  apply    read a version, overwrite the values, and hash all values, on a node
Each point is the smallest of three; a share of the values changes that is near the one in `--measured`. The
predictions add the time of a file system with a bandwidth that all readers and writers share.
"""

import argparse
import json
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from run_record import describe_run, write_record

from hpc_rl.core.trial import Trial
from hpc_rl.core.types import WeightVersion
from hpc_rl.engines.base import PublishedPiece
from hpc_rl.weight_files.model_copy import NUM_APPLIERS, ModelCopy
from hpc_rl.weights.disk_transport import DiskTransport
from hpc_rl.weights.transport import Published, TransportContext

TENSORS = (50, 300, 1200)
MEGABYTES = (32, 96, 256)
PHASES = ("blocked", "write", "apply")
DENSITY = 0.02
REPEATS = 3
# name -> parameters, tensors, ranks, nodes of servers
MODELS = {"8B": (8.19e9, 399, 8, 2), "70B": (70.6e9, 723, 64, 8)}
BANDWIDTHS = (1e9, 10e9)


class Engine:
    """A model of equal tensors, with float32 masters that are published in bfloat16."""

    device = torch.device("cpu")

    def __init__(self, num_tensors: int, num_bytes: int) -> None:
        size = num_bytes // 2 // num_tensors
        self.masters = [torch.randn(size) for _ in range(num_tensors)]

    def list_published_pieces(self) -> list[PublishedPiece]:
        pieces = [PublishedPiece.of_whole(f"t{i}", one) for i, one in enumerate(self.masters)]
        return [piece._replace(dtype=torch.bfloat16) for piece in pieces]

    def write_model_files(self, folder: Path, tokenizer: Path | None = None) -> None:
        pass

    def update(self) -> None:
        for master in self.masters:
            master[torch.rand(len(master)) < DENSITY] *= 1.5


class NoServers:
    def publish(self, version: Any, path: Path, num_bytes: int, stopping: threading.Event) -> Published:
        return Published(["none"])


def measure(folder: Path, num_tensors: int, num_bytes: int) -> dict[str, float]:
    trial, engine = Trial(folder / "trial"), Engine(num_tensors, num_bytes)
    trial.make_dirs()
    context = TransportContext(
        trial=trial,
        engine=engine,  # type: ignore[arg-type]
        publisher=NoServers(),
        stopping=threading.Event(),
        tokenizer=folder,
    )
    transport, copy = DiskTransport(context), ModelCopy(folder / "node", trial.weights)
    rows = []
    for step in range(2 + REPEATS):  # the first two allocate
        version = WeightVersion(0, step)
        engine.update()
        thread, process = time.thread_time(), time.process_time()
        transport.start(version)
        blocked_s = time.thread_time() - thread
        transport.settle(wait=True)
        write_s = time.process_time() - process - blocked_s
        process = time.process_time()
        copy.bring_to(version)
        rows.append((blocked_s, write_s, time.process_time() - process))
    return dict(zip(PHASES, map(min, zip(*rows[2:], strict=True)), strict=True))


def fit(points: list[dict[str, float]], phase: str) -> dict[str, float]:
    """Least squares of the relative errors."""
    seconds = np.array([point[phase] for point in points])
    terms = np.array([[point["tensors"], point["bytes"]] for point in points])
    (overhead_s, per_byte_s), *_ = np.linalg.lstsq(terms / seconds[:, None], np.ones(len(points)), rcond=None)
    errors = np.abs(terms @ [overhead_s, per_byte_s] / seconds - 1)
    return {
        "overhead_us": 1e6 * overhead_s,
        "gb_per_s": 1e-9 / per_byte_s,
        "largest_error": float(errors.max()),
        "median_error": float(np.median(errors)),
    }


def estimate(fitted: dict[str, float], tensors: float, num_bytes: float) -> float:
    return tensors * fitted["overhead_us"] * 1e-6 + num_bytes / (fitted["gb_per_s"] * 1e9)


def predict(fits: dict[str, Any], name: str, bandwidth: float, share: float) -> dict[str, float]:
    """Predict a version that stores a share of the bytes of all values."""
    parameters, tensors, ranks, nodes = MODELS[name]
    whole = 2 * parameters
    blocked_s = estimate(fits["blocked"], tensors, whole / ranks)
    complete_s = blocked_s + estimate(fits["write"], tensors, whole / ranks) + share * whole / bandwidth
    apply_s = estimate(fits["apply"], tensors * ranks, whole) / min(NUM_APPLIERS, ranks)
    return {
        "num_bytes": share * whole,
        "training_blocked_s": blocked_s,
        "complete_s": complete_s,
        "nodes_have_it_s": complete_s + nodes * share * whole / bandwidth + apply_s,
    }


def predict_whole(name: str, bandwidth: float, by_disk: bool) -> dict[str, float]:
    """Predict a full publication; gathering and loading cost nothing."""
    parameters, _, _, nodes = MODELS[name]
    once_s = 2 * parameters / bandwidth
    have_s = (1 + nodes) * once_s if by_disk else once_s
    return {"num_bytes": 2 * parameters, "training_blocked_s": once_s, "nodes_have_it_s": have_s}


def read_shares(measured: Path) -> dict[str, float]:
    """Return the largest median share of bytes per learning rate."""
    shares: dict[str, float] = {}
    for case in json.loads(measured.read_text())["cases"]:
        rate = f"{case['rate']:g}"
        shares[rate] = max(shares.get(rate, 0), case["difference"]["share_of_bytes"]["median"])
    return shares


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    results = Path(__file__).parent / "results"
    parser.add_argument("--measured", type=Path, default=results / "publish.json")
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="for all files")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    about, points = describe_run("torch", "numpy", "xxhash"), []
    for tensors in TENSORS:
        for megabytes in MEGABYTES:
            with tempfile.TemporaryDirectory(dir=args.dir, prefix="publish-fit-") as folder:
                point = measure(Path(folder), tensors, megabytes * 10**6)
            points.append({"tensors": tensors, "bytes": megabytes * 10**6, **point})
            print(points[-1], flush=True)
    fits = {phase: fit(points, phase) for phase in PHASES}
    predictions = []
    for name in MODELS:
        for bandwidth in BANDWIDTHS:
            where = {"model": name, "gb_per_s": bandwidth / 1e9}
            for rate, share in read_shares(args.measured).items():
                predictions.append(
                    {**where, "way": f"difference, {rate}", **predict(fits, name, bandwidth, share)}
                )
            for way, by_disk in (("disk", True), ("broadcast", False)):
                predictions.append({**where, "way": way, **predict_whole(name, bandwidth, by_disk)})
    print(json.dumps({"fits": fits, "predictions": predictions}, indent=2))
    if args.out:
        found = {"density": DENSITY, "points": points, "fits": fits, "predictions": predictions}
        write_record(args.out, {**about, **found})


if __name__ == "__main__":
    main()
