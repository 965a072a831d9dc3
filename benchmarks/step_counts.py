"""Counts of a training step, of requests and of file calls, in place of times.

    python benchmarks/step_counts.py [--only engines wire files] [--out benchmarks/results/step_counts.json]

`engines` counts the operators of PyTorch and the host reads in a training step. A host read waits for a value
of the device: `.item()`, `.tolist()`, `.cpu()`, `.numpy()`, and operators whose result has a size that depends
on values. Steps with several numbers of layers and micro-batches give the share of each layer, micro-batch and
step. A share may be negative: the first micro-batch sets the gradients that the others add to. Views are not
counted: they compute nothing. Sizes are small; the counts do not depend on them.

`wire` counts requests and bytes between a router and a server, as benchmarks/rollout_path.py does.

`files` takes the calls on files from benchmarks/results/cluster_load.json, the result of
benchmarks/cluster_load.py.

The result keeps `before`, the counts of an earlier commit, and what is not counted now. It writes the table in
docs/performance.md.
"""

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from run_record import describe_run, write_record

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "performance.md"
BEGIN, END = "<!-- begin of the table of benchmarks/step_counts.py -->", "<!-- end of the counts -->"
PARTS = ("engines", "wire", "files")
# (layers, micro-batches): four to solve for the four shares, one to check them. The first micro-batch differs.
SIZES = ((2, 2), (2, 4), (4, 2), (4, 4), (3, 3))
ROW_TOKENS, ROWS_PER_MICRO_BATCH = 32, 2
HEADS = (4, 2, 8)
MODEL = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 64}
EXPERTS = {"model_type": "qwen3_moe", "num_experts_per_tok": 2, "moe_intermediate_size": 16}
# name -> backend, its options, and what differs in the model
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "fsdp, padded rows": ("fsdp", {"layout": "padded"}, {}),
    "fsdp, packed rows": ("fsdp", {"layout": "packed"}, {}),
    "megatron": ("megatron", {}, {}),
    "megatron, 4 experts": ("megatron", {}, {**EXPERTS, "num_experts": 4}),
    "megatron, 16 experts": ("megatron", {}, {**EXPERTS, "num_experts": 16}),
}
SHARES = ("layer and micro-batch", "micro-batch", "layer", "step")
# operators whose result has a size that depends on values
READING = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_consecutive")
WIRE_ROWS = {  # name in the result -> row of the table; a group has 8 samples
    "requests_per_group": "requests to a server for a group",
    "http_requests_per_group": "of them HTTP",
    "bytes_sent_per_group": "bytes to a server for a group",
    "bytes_received_per_token": "bytes from a server per token",
}
PYTHON_READS = ("tolist", "cpu", "numpy")


@contextmanager
def count_operators() -> Iterator[Counter[str]]:
    """Count operators: `forward`, `backward`, and host reads: `reads`. The names of reads have counts too."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    counts: Counter[str] = Counter()

    def note_read(name: str) -> None:
        counts["reads"] += 1
        counts[f"read {name}"] += 1

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs, name = kwargs or {}, func.overloadpacket.__name__
            first = func._schema.returns[:1]
            is_view = bool(first) and first[0].alias_info is not None and not first[0].alias_info.is_write
            if not is_view:
                is_backward = torch._C._current_graph_task_id() != -1
                counts["backward" if is_backward else "forward"] += 1
            by_mask = name.startswith("index") and any(
                isinstance(one, torch.Tensor) and one.dtype == torch.bool
                for one in (args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else ())
            )
            sizes_unknown = name == "repeat_interleave" and kwargs.get("output_size") is None
            if name in READING or by_mask or sizes_unknown:
                note_read(name)
            return func(*args, **kwargs)

    originals = {name: getattr(torch.Tensor, name) for name in PYTHON_READS}

    def replace(name: str) -> Callable[..., Any]:
        def counted(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            note_read(name)
            return originals[name](self, *args, **kwargs)

        return counted

    for name in PYTHON_READS:
        setattr(torch.Tensor, name, replace(name))
    try:
        with Mode():
            yield counts
    finally:
        for name, original in originals.items():
            setattr(torch.Tensor, name, original)


def count_step(name: str, num_layers: int, num_micro_batches: int) -> Counter[str]:
    """Return the counts of the second update of an engine."""
    from engines import EngineSide, batches, write_model

    backend, options, model = CASES[name]
    shape = {
        "model": {**MODEL, **model, "num_hidden_layers": num_layers},
        "heads": HEADS,
        "rows": ROWS_PER_MICRO_BATCH * num_micro_batches,
        "lengths": (ROW_TOKENS, ROW_TOKENS),
        "tokens_per_mb": ROWS_PER_MICRO_BATCH * ROW_TOKENS,
    }
    with tempfile.TemporaryDirectory(prefix="step-counts-") as folder:
        write_model(Path(folder), shape)
        side = EngineSide(backend, Path(folder), shape, "cpu", **options)
        side.step(batches(shape, 0))
        with count_operators() as counts:
            side.step(batches(shape, 1))
    return counts


def split_shares(found: dict[tuple[int, int], float]) -> dict[str, float]:
    """Return the shares of a count: count = step + m * (micro-batch) + n * (layer) + n * m * (both).

    Raises ValueError if a count does not fit.
    """
    (few, one), _, (many, _), (_, several), last = SIZES
    layers, rounds = many - few, several - one
    more_rounds = {n: found[n, several] - found[n, one] for n in (few, many)}
    both = (more_rounds[many] - more_rounds[few]) / (layers * rounds)
    micro_batch = more_rounds[few] / rounds - few * both
    layer = (found[many, one] - found[few, one]) / layers - one * both
    step = found[few, one] - one * micro_batch - few * layer - few * one * both
    n, m = last
    if found[last] != step + m * micro_batch + n * layer + n * m * both:
        raise ValueError(f"the counts are not sums of equal shares: {found}")
    return dict(zip(SHARES, (both, micro_batch, layer, step), strict=True))


def count_engines(names: list[str]) -> dict[str, Any]:
    """Return, by case and kind of count, the shares of SHARES."""
    import torch

    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for name in names:
        counts = {size: count_step(name, *size) for size in SIZES}
        kinds = sorted({kind for one in counts.values() for kind in one})
        found[name] = {
            kind: split_shares({size: one[kind] for size, one in counts.items()}) for kind in kinds
        }
        print(name, json.dumps({kind: one[SHARES[0]] for kind, one in found[name].items()}), file=sys.stderr)
    return found


def count_wire(tree: Path, num_groups: int) -> dict[str, Any]:
    """Return requests and bytes by the length of a completion."""
    from rollout_path import run_wire

    return run_wire({"now": tree}, num_groups)["now"]


def read_files() -> dict[str, Any]:
    record = json.loads((ROOT / "benchmarks/results/cluster_load.json").read_text())
    return record["file_calls_per_minute_by_nodes"]


def format_table(record: dict[str, Any]) -> str:
    """Return the rows of docs/performance.md."""
    before, after = record["before"], record["after"]
    rows = ["| count | before | now |", "|---|--:|--:|"]

    def add(what: str, *keys: str) -> None:
        texts = []
        for value in (before, after):
            for key in keys:
                value = value[key]
            texts.append(format_number(value))
        rows.append(f"| {what} | {texts[0]} | {texts[1]} |")

    for name in after["engines"]:
        add(f"{name}: operators, forward", "engines", name, "forward", SHARES[0])
        add(f"{name}: operators, backward", "engines", name, "backward", SHARES[0])
        add(f"{name}: host reads", "engines", name, "reads", SHARES[0])
    for length in after["wire"]:
        for key, what in WIRE_ROWS.items():
            add(f"{what}, completions of {length}", "wire", length, key)
    for role, name in (("supervisor", "supervisor"), ("rollout", "rollout role")):
        for nodes in after["files"][role]:
            if nodes != "growth":
                add(f"file calls per minute of the {name}, {nodes} nodes", "files", role, nodes)
    return "\n".join(rows)


def format_number(value: float) -> str:
    return f"{value:,.0f}" if value == round(value) or value >= 100 else f"{value:.3g}"


def write_page(record: dict[str, Any]) -> None:
    head, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, tail = rest.partition(END)
    PAGE.write_text(f"{head}{BEGIN}\n\n{format_table(record)}\n\n{END}{tail}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--cases", nargs="+", choices=tuple(CASES), default=tuple(CASES), metavar="CASE")
    parser.add_argument("--groups", type=int, default=200, help="of samples, for `wire`")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))
    record: dict[str, Any] = {"before": {}, "after": {}}
    if args.out and args.out.exists():
        record = json.loads(args.out.read_text())
    after = record["after"]
    if "engines" in args.only:
        after["engines"] = count_engines(args.cases)
    if "wire" in args.only:
        after["wire"] = count_wire(ROOT, args.groups)
    if "files" in args.only:
        after["files"] = read_files()
    after |= describe_run("torch", "transformers", "megatron-core")
    print(json.dumps(record, indent=2))
    if args.out:
        write_record(args.out, record)
        if args.out.resolve() == ROOT / "benchmarks/results/step_counts.json":
            write_page(record)


if __name__ == "__main__":
    main()
