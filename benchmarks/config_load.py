"""CPU seconds of command lines, each in a fresh interpreter.

    python benchmarks/config_load.py [--runs 9] [--out benchmarks/results/config_load.json]

`python` is an interpreter that does nothing, `library` the import of jsonargparse, `dry_run` a whole `hpc-rl
submit FILE --dry_run` without the scheduler, `areal` an AReaL file with references (`config show`), the
others are commands about trials. User plus system time of the process; the median counts. Goals: at most 1.0
s for a submit, 0.4 s for a command about a trial.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from run_record import describe_run, spread, write_record

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "helpers")]

from toy_trials import make_toy  # noqa: E402

from hpc_rl.core.trial import find_account_name  # noqa: E402

AREAL = ROOT / "tests" / "unit" / "config" / "areal" / "gsm8k_grpo.yaml"


def cpu_seconds(argv: list[str], folder: str) -> float:
    env = {**os.environ, "XDG_STATE_HOME": folder}
    process = subprocess.Popen([sys.executable, *argv], cwd=folder, env=env, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{argv} ended with {process.returncode}")
    return usage.ru_utime + usage.ru_stime


def write_trial(folder: Path) -> None:
    """Write the toy's model and task, and a configuration for this machine."""
    make_toy(folder, "base")
    (folder / "grpo.yaml").write_text(
        "experiment_name: sums\ntrial_name: small\ntotal_train_steps: 10\n"
        "cluster: {fileroot: runs, n_gpus_per_node: 0}\ntrain_dataset: {path: task/train.jsonl}\n"
        "actor: {path: base}\ngconfig: {n_samples: 4, max_new_tokens: 4}\nlauncher: {type: local}\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    trial = f"runs/{find_account_name()}/sums/small"
    hpc_rl = ["-m", "hpc_rl.cli"]
    commands = {
        "python": ["-c", "pass"],
        "library": ["-c", "import jsonargparse"],
        "dry_run": [*hpc_rl, "submit", "grpo.yaml", "--dry_run", "--no_check"],
        "areal": [*hpc_rl, "config", "show", str(AREAL)],
        "render": [*hpc_rl, "render", "grpo.yaml"],
        "status": [*hpc_rl, "status", trial, "--offline"],
        "logs": [*hpc_rl, "logs", trial, "--list"],
        "list": [*hpc_rl, "list", "--offline"],
        "cancel": [*hpc_rl, "cancel", trial],
        "submit_help": [*hpc_rl, "submit", "--help"],
    }
    about = describe_run("jsonargparse")
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    with tempfile.TemporaryDirectory() as folder:
        write_trial(Path(folder))
        for _ in range(args.runs):  # interleaved, so that a busy moment hits all of them
            for name, argv in commands.items():
                seconds[name].append(cpu_seconds(argv, folder))
    result = {
        **about,
        "cpu_s": {name: spread(all_s) for name, all_s in seconds.items()},
        "runs": args.runs,
    }
    print(json.dumps(result, indent=2))
    if args.out:
        write_record(args.out, result)


if __name__ == "__main__":
    main()
