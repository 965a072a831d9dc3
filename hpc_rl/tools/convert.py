"""The part of `hpc-rl checkpoint export` and `import` that needs torch; no GPU. Started by the command.

The command holds the checkpoint, and this process exits with the command: its standard input is the command's
pipe.
"""

import argparse
import json
import logging
import os
import sys
import threading
from pathlib import Path

from hpc_rl.checkpoint import generation
from hpc_rl.checkpoint.generation import IMPORTED, IMPORTED_LINEAGE, Commit, Manifest, hash_config
from hpc_rl.config.load.stored import from_dict
from hpc_rl.config.options.experiment import GRPOConfig
from hpc_rl.config.schedule import count_updates_per_step
from hpc_rl.core.errors import ConfigError, Damaged, ExitCode, HpcRlError
from hpc_rl.core.files import is_full
from hpc_rl.core.trial import EXPORT_RECORD_NAME, Trial, fsync_dir, load_json, write_json
from hpc_rl.trainers.run import find_tokenizer_folder, list_versions


def export(trial: Trial, step: int, out: Path, merge: bool) -> None:
    """Write the weights of a checkpoint, held by the command, into a folder in Hugging Face format.

    Raises Damaged, OSError, HpcRlError.
    """
    from hpc_rl.engines.shared.offline import export_state
    from hpc_rl.engines.shared.state import has_state
    from hpc_rl.trainers.exports import CRITIC

    folder = trial.generation(step)
    checked = generation.verify(generation.check(folder), generation.LIGHT_BYTES)
    if checked.problem or checked.manifest is None:
        raise Damaged(f"checkpoint {step} can't be used: {checked.problem}")
    config = from_dict(load_json(folder / generation.CONFIG_NAME) or load_json(trial.config_json) or {})
    files = {file.name: file for file in checked.manifest.files}
    model = config.actor if isinstance(config, GRPOConfig) else config.model
    if merge and not model.use_lora:
        raise ConfigError(f"{trial} trains no adapter, so there is nothing to merge: omit --merge")
    num_ranks, tokenizer = checked.manifest.num_ranks, find_tokenizer_folder(config)
    export_state(model, config.seed, folder, num_ranks, files, out, tokenizer, merge=merge)
    critic = config.critic if isinstance(config, GRPOConfig) else None
    if critic is not None and has_state("critic", files):
        (out / CRITIC).mkdir()
        export_state(critic, config.seed, folder, num_ranks, files, out / CRITIC, tokenizer, "critic")
    write_json(
        out / EXPORT_RECORD_NAME, {"step": step, "version": checked.manifest.version, "trial": str(trial)}
    )
    fsync_dir(out)


def import_(trial: Trial, step: int, source: Path) -> None:
    """Commit a checkpoint with the weights of a Hugging Face model. Raises ConfigError, OSError."""
    from hpc_rl.engines.shared.offline import import_weights

    config = from_dict(json.loads(trial.config_json.read_bytes()))
    commit = Commit(trial, step, IMPORTED, 0)
    commit.begin()
    try:
        model = config.actor if isinstance(config, GRPOConfig) else config.model
        updates = step * count_updates_per_step(config)
        files, counters = import_weights(model, config.seed, source, updates, commit.folder)
        commit.record_rank(0, files)
        commit.commit(
            Manifest(
                step=step,
                lineage=IMPORTED_LINEAGE,
                attempt=f"{IMPORTED}.0",
                incarnation=0,
                submission=IMPORTED,
                version=IMPORTED,
                num_ranks=1,
                config_hash=hash_config(load_json(trial.config_json) or {}),
                counters=counters,
                versions=list_versions(trial),
            )
        )
    except BaseException:
        commit.abandon()
        raise


def _exit_with_command() -> None:
    while os.read(0, 4096):
        pass
    os._exit(ExitCode.KILLED_BY_SYSTEM)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m hpc_rl.tools.convert", description=__doc__)
    parser.add_argument("action", choices=("export", "import"))
    parser.add_argument("--trial_dir", type=Path, required=True)
    parser.add_argument("--step", type=int, required=True)
    parser.add_argument("--to", type=Path)
    parser.add_argument("--source", type=Path)
    parser.add_argument("--merge", action="store_true")
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    threading.Thread(target=_exit_with_command, daemon=True, name="command-pipe").start()
    trial = Trial(args.trial_dir)
    try:
        if args.action == "export":
            export(trial, args.step, args.to, args.merge)
        else:
            import_(trial, args.step, args.source)
    except HpcRlError as error:
        print(f"hpc-rl: {error}", file=sys.stderr)
        return error.exit_code
    except (OSError, ValueError) as error:
        print(f"hpc-rl: checkpoint {args.action}: {error}", file=sys.stderr)
        return ExitCode.CANNOT_WRITE if is_full(error) else ExitCode.FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())
