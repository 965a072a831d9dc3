"""Compares this project with its peers on this machine, and writes the table of docs/performance.md.

    python benchmarks/side_by_side/run.py [--quick] [--pairs 5] [--only grpo-cold ...] [--out FILE]

Both sides take turns; a ratio is peer / ours of one pair, so more than 1 means that ours is cheaper. The table
has the median of the ratios and their range. Times are CPU seconds (user and system) of one thread; all processes
of a side count, except that the start of neither trainer does. TRL gets an environment of its own, `.venv-trl`,
which this program makes. atroposlib needs `tests/atropos/install.sh`. `--quick` makes one pair with fewer steps:
it shows that everything works, and its numbers say little.
"""

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(HERE.parent), str(ROOT)]

from run_record import describe_run, spread, write_record  # noqa: E402

PEER = "trl==1.16.0"
PEER_PYTHON = ROOT / ".venv-trl" / "bin" / "python"
ATROPOS_PYTHON = ROOT / ".venv-atropos" / "bin" / "python"
TARGET = 0.8  # mean reward of five steps
MAX_STEPS = 150  # until the target
DROPPED = 2  # first steps of a run, which warm up
BEGIN, END = "<!-- begin of the table of benchmarks/side_by_side -->", "<!-- end of the table -->"


def make_peer_environment() -> None:
    """Install TRL beside the torch of this environment, whose packages it uses; do nothing if it is there."""
    if PEER_PYTHON.exists() and _find_version(PEER_PYTHON, "trl") == PEER.partition("==")[2]:
        return
    folder = PEER_PYTHON.parents[1]
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    packages = next((folder / "lib").glob("python*/site-packages"))
    (packages / "of_hpc_rl.pth").write_text(f"{Path(version_folder()).absolute()}\n")
    pip = [str(PEER_PYTHON), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, PEER], check=True)


def version_folder() -> str:
    """Return the folder with the packages of this environment."""
    import torch

    return str(Path(torch.__file__).parents[1])


def _find_version(python: Path, package: str) -> str:
    code = f"from importlib.metadata import version; print(version({package!r}))"
    return subprocess.run(
        [str(python), "-c", code], capture_output=True, text=True, check=False
    ).stdout.strip()


def _run_json(command: list[str], env: dict[str, str]) -> Any:
    """Run a program, and return the JSON in the last line that it prints. Raises RuntimeError."""
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{command[1]} ended with code {done.returncode}:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def train(
    side: str, model: Path, rows: Path, steps: int, lr: float, seed: int, until: float | None = None
) -> Any:
    """Return the steps of a training by ours or by the peer."""
    own = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    own["PYTHONPATH"] = os.pathsep.join([str(HERE), str(ROOT)] if side == "ours" else [str(HERE)])
    python = sys.executable if side == "ours" else str(PEER_PYTHON)
    program = HERE / ("grpo_ours.py" if side == "ours" else "grpo_trl.py")
    command = [python, str(program), str(model), str(rows), "--steps", str(steps), "--lr", str(lr)]
    command += ["--seed", str(seed), *(["--until", str(until)] if until is not None else [])]
    return _run_json(command, os.environ | own)


def average(steps: list[dict[str, float]], name: str) -> float:
    """Return the mean of the steps after the first ones."""
    return statistics.fmean(step[name] for step in steps[DROPPED:])


def average_by_role(steps: list[dict[str, Any]]) -> dict[str, float]:
    """Return the mean CPU seconds of a step of each role, the largest first; `other` are all other processes."""
    counted = steps[DROPPED:]
    roles = {role for step in counted for role in step["by_role"]}
    found = {role: statistics.fmean(step["by_role"].get(role, 0.0) for step in counted) for role in roles}
    found["other"] = average(steps, "cpu_s") - sum(found.values())
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def compare_training(model: Path, folder: Path, pairs: int, steps: int, lr: float) -> dict[str, Any]:
    """Return CPU seconds and tokens a step of both sides; the seed of a pair is its number."""
    from toy import make_rows, write_rows

    rows = []
    for seed in range(pairs):
        data = folder / f"rows-{seed}.jsonl"
        write_rows(data, make_rows(seed, 8 * steps + 64))
        order = ("ours", "peer") if seed % 2 else ("peer", "ours")
        runs = {side: train(side, model, data, steps, lr, seed) for side in order}
        rows.append({side: average(run, "cpu_s") for side, run in runs.items()})
        rows[-1] |= {f"{side}_tokens": average(run, "tokens") for side, run in runs.items()}
        rows[-1]["ours_by_role"] = average_by_role(runs["ours"])
        print(f"  {rows[-1]}", flush=True)
    return {"pairs": rows, "steps": steps, "lr": lr}


def compare_learning(model: Path, folder: Path, pairs: int, max_steps: int) -> dict[str, Any]:
    """Return the CPU seconds of steps until the target, one pair for each seed; a run that misses it is an error."""
    from toy import make_rows, write_rows

    rows = []
    for seed in range(pairs):
        data = folder / f"learn-{seed}.jsonl"
        write_rows(data, make_rows(seed, 8 * MAX_STEPS + 64))
        order = ("ours", "peer") if seed % 2 else ("peer", "ours")
        runs = {side: train(side, model, data, max_steps, 1e-3, seed, TARGET) for side in order}
        rows.append({side: average(run, "cpu_s") * len(run) for side, run in runs.items()})
        rows[-1] |= {f"{side}_steps": len(run) for side, run in runs.items()}
        print(f"  {rows[-1]}", flush=True)
    return {"pairs": rows, "target": TARGET if max_steps == MAX_STEPS else f"{max_steps} steps at most"}


def measure_start_s(command: list[str]) -> float:
    """Return the CPU seconds of a process and its children."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    subprocess.run(command, env=env, capture_output=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def compare_starts(pairs: int, ours: list[str], peer: list[str]) -> dict[str, Any]:
    rows = []
    for number in range(pairs + 1):
        sides = {"peer": peer, "ours": ours}
        order = ("ours", "peer") if number % 2 else ("peer", "ours")
        rows.append({side: measure_start_s(sides[side]) for side in order})
    return {"pairs": rows[1:]}  # the first pair fills the caches


def compare_servers(pairs: int, quick: bool, folder: Path) -> dict[str, Any]:
    """Return CPU milliseconds for a group through the rollout API, by benchmarks/atropos_api.py."""
    out = folder / "atropos.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "atropos_api.py"), "--peer", str(ATROPOS_PYTHON)]
    command += ["--pairs", str(pairs), "--environments", "16", "--groups", "64" if quick else "512"]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([*command, "--out", str(out)], env=env, check=True, stdout=subprocess.DEVNULL)
    (found,) = json.loads(out.read_text())["results"]
    return {"ratio": found["ratio_groups_per_s"], "pairs": [], "groups_per_s": {
        side: found[side]["groups_per_s"] for side in ("ours", "peer")
    }, "ratio_cpu": found["ratio_cpu"]}  # fmt: skip


def list_cases(
    args: argparse.Namespace, folder: Path
) -> dict[str, tuple[str, str, Callable[[], dict[str, Any]]]]:
    """Return the cases: name -> (what is measured, the peer, the measurement)."""
    import areal_algorithms

    quick, pairs = args.quick, args.pairs
    steps = 5 if quick else 12
    python, hpc_rl = sys.executable, [sys.executable, "-m", "hpc_rl.cli"]
    trl = PEER_PYTHON.with_name("trl")
    return {
        "grpo-cold": (
            "a GRPO step, random model (CPU s)", "TRL 1.16",
            lambda: compare_training(folder / "cold", folder, pairs, steps, 1e-9),
        ),
        "grpo-warm": (
            "a GRPO step, warm model (CPU s)", "TRL 1.16",
            lambda: compare_training(folder / "warm", folder, pairs, steps if quick else 30, 1e-3),
        ),
        "grpo-learn": (
            f"GRPO until a mean reward of {TARGET} (CPU s)", "TRL 1.16",
            lambda: compare_learning(folder / "warm", folder, pairs, 6 if quick else MAX_STEPS),
        ),
        "packing": (
            "packing 10,000 rows (CPU s)", "first-fit-decreasing (AReaL)",
            lambda: areal_algorithms.measure_packing(pairs, 2000 if quick else 10000),
        ),
        **{
            f"gae-{name.split()[0]}": (
                f"advantages of 64 x 1,024 tokens, {name} (CPU s)", "loop over columns (AReaL)",
                lambda name=name: areal_algorithms.measure_gae(pairs, name),
            )
            for name in areal_algorithms.make_masks()
        },
        "atropos": (
            "groups through the rollout API, 16 environments (groups/s)", "atroposlib's run-api",
            lambda: compare_servers(pairs, quick, folder),
        ),
        "import": (
            "import of the package (CPU s)", "import trl",
            lambda: compare_starts(pairs, [python, "-c", "import hpc_rl"], [str(PEER_PYTHON), "-c", "import trl"]),
        ),
        "help": (
            "help of the command that trains (CPU s)", "trl grpo --help",
            lambda: compare_starts(pairs, [*hpc_rl, "submit", "--help"], [str(trl), "grpo", "--help"]),
        ),
    }  # fmt: skip


def summarize(case: dict[str, Any]) -> dict[str, float]:
    """Return median and range of the ratios of a case's pairs."""
    if "ratio" in case:
        return case["ratio"]
    ratios = [pair["peer"] / pair["ours"] for pair in case["pairs"]]
    return spread(ratios)


def format_table(record: dict[str, Any]) -> str:
    """Return the table of a record as Markdown."""
    lines = ["| what | peer | peer's | ours | peer / ours | range |", "|---|---|---|---|---|---|"]
    for case in record["cases"].values():
        ratio = case["ratio"]
        if case["pairs"]:
            sides = {
                side: statistics.median(pair[side] for pair in case["pairs"]) for side in ("peer", "ours")
            }
        else:
            sides = case["groups_per_s"]
        shown = [f"{sides[side]:.3g}" for side in ("peer", "ours")]
        spread = f"{ratio['min']:.2f}-{ratio['max']:.2f}"
        lines.append(
            f"| {case['what']} | {case['peer']} | {' | '.join(shown)} | **{ratio['median']:.2f}** | {spread} |"
        )
    if roles := format_roles(record):
        lines += ["", *roles]
    machine, versions, cases = record["machine"], record["versions"], record["cases"].values()
    kind = "pair (a quick run, which says little)" if any(case["quick"] for case in cases) else "pairs"
    days = sorted({case["time"][:10] for case in cases})
    pairs = sorted({case["num_pairs"] for case in cases})
    loads = [case["load"][0] for case in cases if case["load"]]
    lines += [
        "",
        f"{' to '.join(dict.fromkeys((days[0], days[-1])))}, {' or '.join(map(str, pairs))} {kind}, "
        f"{machine['cpus']} CPUs ({machine['processor']}), load {min(loads):.1f} to {max(loads):.1f} before a case; "
        f"{', '.join(f'{name} {number}' for name, number in versions.items())}.",
    ]
    return "\n".join(lines)


def format_roles(record: dict[str, Any]) -> list[str]:
    """Return a sentence for each training case: the CPU time of our processes in a step, the median of the pairs."""
    lines = []
    for case in record["cases"].values():
        shares = [pair["ours_by_role"] for pair in case["pairs"] if "ours_by_role" in pair]
        if shares:
            medians = {role: statistics.median(one.get(role, 0.0) for one in shares) for role in shares[0]}
            shown = [
                f"{role.replace('_', ' ')} {1e3 * used_s:.0f}"
                for role, used_s in medians.items()
                if used_s > 5e-4
            ]
            text = ", ".join(shown)
            lines.append(f"CPU ms of our processes: {case['what'].partition(' (')[0]}: {text}.")
    return lines


def write_table(page: Path, record: dict[str, Any]) -> None:
    """Replace the table of a page. Raises ValueError if it has no place for one."""
    text = page.read_text()
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{page} has no lines {BEGIN} and {END}")
    page.write_text(f"{before}{BEGIN}\n\n{format_table(record)}\n\n{END}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one pair, few steps: about 5 minutes")
    parser.add_argument("--pairs", type=int, help="default: 5, with --quick 1")
    parser.add_argument("--only", nargs="+", metavar="CASE", default=[])
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "side_by_side.json")
    parser.add_argument("--page", type=Path, help="page whose table is replaced, as docs/performance.md")
    args = parser.parse_args()
    args.pairs = args.pairs or (1 if args.quick else 5)
    import torch
    from toy import make_models

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="side-by-side-") as name:
        known = list_cases(args, Path(name))
        if unknown := set(args.only) - known.keys():
            parser.error(f"{', '.join(sorted(unknown))}: no such case; there are {', '.join(known)}")
        chosen = args.only or list(known)
        if any(case.startswith(("grpo", "import", "help")) for case in chosen):
            make_peer_environment()
            make_models(Path(name))
        cases = load_cases(args.out, known) if args.only else {}
        for case in chosen:
            what, peer, measure = known[case]
            print(case, flush=True)
            begun = {**describe_run(), "quick": args.quick, "num_pairs": args.pairs}
            cases[case] = {"what": what, "peer": peer, **begun, **measure()}
            cases[case]["ratio"] = summarize(cases[case])
            cases[case]["load_after"] = os.getloadavg()
            print(f"  peer / ours: {cases[case]['ratio']}", flush=True)
            # written after each case, because a later one may fail
            record = make_record({name: cases[name] for name in known if name in cases})
            write_record(args.out, record)
    if args.page:
        write_table(args.page, record)
    print(format_table(record))


def load_cases(path: Path, known: Collection[str]) -> dict[str, Any]:
    """Return the stored cases, which a run of other cases keeps."""
    stored = json.loads(path.read_text())["cases"] if path.exists() else {}
    return {name: case for name, case in stored.items() if name in known}


def make_record(cases: dict[str, Any]) -> dict[str, Any]:
    about = describe_run("torch", "transformers")
    if PEER_PYTHON.exists():
        about["versions"]["trl"] = _find_version(PEER_PYTHON, "trl")
    return {
        "what": "CPU of this project and of its peers on the same work, alternately",
        "machine": about["machine"],
        "versions": about["versions"],
        "cases": cases,
    }


if __name__ == "__main__":
    main()
