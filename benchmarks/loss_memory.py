"""Peak memory and CPU time of the loss at a vocabulary of 152k, against peers.

    python benchmarks/loss_memory.py [--pairs 5] [--device cpu] [--out benchmarks/results/loss_memory.json]

Each case computes log-probabilities of given tokens from hidden states and the head, and their backward pass.
Ours: without and with the entropy, which the policy loss reports. Peers: whole logits; AReaL's way, whole
logits with the softmax in chunks of rows; PyTorch's linear_cross_entropy in chunks. Peak memory is the one of
the process less the memory with the inputs, or on a GPU the allocated memory. It includes the gradients
(`gradient_mb`), which every case needs. The gradients of all cases are compared by their norms.

Each case runs in a process of its own, because a peak can't be taken back. Cases alternate within a round, in
a new order each time; ratios are taken within a round. On a CPU one thread and CPU seconds.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from run_record import describe_run, spread, write_record

from hpc_rl.engines.shared.logprobs import token_logprobs

Shape = dict[str, int]
SHAPES: dict[str, Shape] = {
    "cpu": {"tokens": 2048, "vocabulary": 151_936, "width": 256},
    "cuda": {"tokens": 16_384, "vocabulary": 151_936, "width": 4096},
    "tiny": {"tokens": 64, "vocabulary": 512, "width": 16},  # for the test of this file
}


def of_logits(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(logits.float(), -1).gather(1, targets[:, None]).squeeze(1)


def loss_ours(hidden: torch.Tensor, head: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return token_logprobs(hidden, head, targets, needs_entropy=False)[0].sum()


def loss_with_entropy(hidden: torch.Tensor, head: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return token_logprobs(hidden, head, targets)[0].sum()


def loss_whole(hidden: torch.Tensor, head: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return of_logits(hidden @ head.T, targets).sum()


def loss_areal(hidden: torch.Tensor, head: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    logits = hidden @ head.T
    parts = zip(logits.split(1024), targets.split(1024), strict=True)  # as areal.utils.functional does
    return torch.cat([of_logits(*part) for part in parts]).sum()


def loss_torch(hidden: torch.Tensor, head: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    options = torch.nn.LinearCrossEntropyOptions()  # in chunks
    return -F.linear_cross_entropy(hidden, head, targets, reduction="sum", options=options)


CASES = {
    "ours": loss_ours,
    "ours with entropy": loss_with_entropy,
    "whole logits": loss_whole,
    "areal": loss_areal,
    "torch chunked": loss_torch,
}


def one_loss(case: str, shape: Shape, device: str) -> dict[str, float]:
    """Run in a process of its own: a peak can't be taken back."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16

    def draw(*size: int) -> torch.Tensor:
        return (
            torch.randn(*size, generator=generator).mul_(size[-1] ** -0.25).to(device, dtype).requires_grad_()
        )

    hidden, head = draw(shape["tokens"], shape["width"]), draw(shape["vocabulary"], shape["width"])
    targets = torch.randint(0, shape["vocabulary"], (shape["tokens"],), generator=generator).to(device)
    work = CASES[case]
    work(hidden[:2], head[:8], targets[:2] % 8).backward()  # imports, and what is made once
    hidden.grad = head.grad = None
    before = memory(device, begin=True)
    begin = seconds(device)
    loss = work(hidden, head, targets)
    loss.backward()
    took = seconds(device) - begin
    assert hidden.grad is not None and head.grad is not None
    return {
        "peak_mb": (memory(device) - before) / 1e6,
        "gradient_mb": (hidden.grad.nbytes + head.grad.nbytes) / 1e6,
        "s": took,
        "loss": float(loss.detach()),
        "norms": float(hidden.grad.float().norm() + head.grad.float().norm()),
    }


def seconds(device: str) -> float:
    """CPU seconds, or on a GPU the time when it has done what it was given."""
    if device == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def memory(device: str, begin: bool = False) -> int:
    """Bytes: what is in use, or at most was since."""
    if device != "cpu":
        if begin:
            torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated() if begin else torch.cuda.max_memory_allocated()
    if begin:
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def measure_loss(size: str, device: str, pairs: int) -> dict[str, Any]:
    shape = SHAPES[size]
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in CASES}
    missing = {}
    names = list(CASES)
    for number in range(pairs):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            command = [sys.executable, __file__, "--case", name, "--size", size, "--device", device]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                missing[name] = done.stderr.strip().splitlines()[-1]  # out of memory, or an old PyTorch
                continue
            rows[name].append(json.loads(done.stdout.splitlines()[-1]))
            print("loss", name, rows[name][-1], flush=True)
    found = {}
    for name, runs in rows.items():
        if not runs:
            continue
        off = abs(runs[0]["norms"] / rows["ours"][0]["norms"] - 1)
        if off > (1e-4 if device == "cpu" else 2e-2):
            raise SystemExit(f"gradients of {name} are others: {runs[0]} against {rows['ours'][0]}")
        pairs_of = list(zip(runs, rows["ours"], strict=False))
        found[name] = {
            **{key: spread([run[key] for run in runs]) for key in ("peak_mb", "gradient_mb", "s")},
            "ratio_peak": spread([run["peak_mb"] / ours["peak_mb"] for run, ours in pairs_of]),
            "ratio_s": spread([run["s"] / ours["s"] for run, ours in pairs_of]),
        }
    return {"shape": shape, "cases": found, "missing": missing}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=5, help="rounds; each has one run of every case")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--size", choices=tuple(SHAPES), help="sizes; by default those of the device")
    parser.add_argument("--case", choices=tuple(CASES), help=argparse.SUPPRESS)  # in a process of its own
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    size = args.size or args.device
    if args.case:
        print(json.dumps(one_loss(args.case, SHAPES[size], args.device)))
        return
    result = {
        **describe_run("torch"),
        "pairs": args.pairs,
        "device": args.device,
        "gpu": torch.cuda.get_device_name() if args.device == "cuda" else None,
        **measure_loss(size, args.device, args.pairs),
    }
    if args.out:
        write_record(args.out, result)


if __name__ == "__main__":
    main()
