"""`hpc-rl remove <trial>`: remove the directory of a trial, after asking."""

import sys

from hpc_rl.cli.options import CommandParser, Namespace, columns, print_json
from hpc_rl.errors import ConfigError, ExitCode
from hpc_rl.status.formatting import size_text
from hpc_rl.submit import trial_index
from hpc_rl.submit.removal import contents, remove
from hpc_rl.submit.submission import check_idle


def parser() -> CommandParser:
    made = CommandParser(
        "Remove a trial: its checkpoints, weights, logs and exports. Shows what that frees, and asks first."
    )
    made.add_trial()
    made.add_flag("--keep_exports", help="leave the directory `exports/` of the trial where it is")
    made.add_flag("--yes", help="do not ask")
    made.add_json("what was removed; needs --yes")
    return made


def run(args: Namespace) -> int:
    trial = trial_index.resolve(args.trial)
    check_idle(trial)
    found = [
        one for one in contents(trial) if one.num_files and not (args.keep_exports and one.name == "exports")
    ]
    size = sum(one.size_bytes for one in found)
    if args.json and not args.yes:
        raise ConfigError("remove --json does not ask: add --yes")
    if not args.json:
        print(f"{trial}  {trial.dir}")
        rows = [[one.name, f"{one.num_files} files", size_text(one.size_bytes)] for one in found]
        print("\n".join(f"  {line}" for line in columns(rows)))
    if not (args.yes or _agreed(size)):
        print("nothing is removed")
        return ExitCode.REFUSED
    remove(trial, args.keep_exports)
    if args.json:
        print_json({"trial": str(trial), "dir": str(trial.dir), "freed_bytes": size})
    else:
        kept = f"; exports stay in {trial.dir / 'exports'}" if (trial.dir / "exports").is_dir() else ""
        print(f"removed, {size_text(size)} are free{kept}")
    return ExitCode.DONE


def _agreed(size_bytes: int) -> bool:
    """Ask on the terminal. Raises ConfigError where there is none."""
    if not sys.stdin.isatty():
        raise ConfigError("the input is not a terminal, so remove can't ask: add --yes")
    return input(f"Remove it, and free {size_text(size_bytes)}? [y/N] ").strip().lower() in ("y", "yes")
