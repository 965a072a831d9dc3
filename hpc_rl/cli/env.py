"""`hpc-rl env`: the URLs of a trial; the rest is handed over to `python -m hpc_rl.tools.run_environment`."""

import json
import os
import sys
from pathlib import Path

import yaml

from hpc_rl.cli.options import CommandParser, Namespace, print_json
from hpc_rl.core.errors import TrialStateError

HANDED_OVER = ("serve", "process", "evaluate")


def make_parser() -> CommandParser:
    made = CommandParser(
        "Run an environment: a program with your tasks, which feeds a trainer.",
        "hpc-rl env serve | process | evaluate --help shows the options of an environment.",
    )
    urls = "urls: print the URLs of a trial for environments"
    made.add_argument("action", choices=["urls", *HANDED_OVER], help=urls)
    made.add_trial()
    made.add_json("the URLs")
    written = "urls: write a settings file for --config of an environment: URLs, tokenizer, group size"
    made.add_argument("--write", metavar="FILE", help=written)
    return made


def main(args: Namespace) -> int:
    from hpc_rl.config.environment_file import make_environment_settings
    from hpc_rl.config.load.stored import from_dict
    from hpc_rl.config.options.experiment import GRPOConfig
    from hpc_rl.core.trial import write_atomic
    from hpc_rl.name_resolve import keys, open_names
    from hpc_rl.trials.trial_index import resolve

    trial = resolve(args.trial)
    config = from_dict(json.loads(trial.config_json.read_bytes()))
    serves = isinstance(config, GRPOConfig) and config.purpose == "serve"
    if not isinstance(config, GRPOConfig) or (config.environments is None and not serves):
        raise TrialStateError(
            f"trial {trial.name} takes no groups from environments; submit it with a section `environments`"
        )
    seen = open_names(trial, config).list_leases(keys.ROLLOUT).get(keys.ROLLOUT)
    if seen is None or not seen.alive:
        raise TrialStateError(
            f"the rollout role of trial {trial.name} does not run; see `hpc-rl status {args.trial}`"
        )
    url, token = seen.value["url"], trial.load_tokens()["data"]
    urls = {} if serves else {"rollout_server_url": f"{url}/t/{token}"}
    urls |= {"base_url": f"{url}/t/{token}/v1", "api_key": token}
    if args.write and serves:
        raise TrialStateError(f"--write needs a trial with environments; {trial.name} only serves a model")
    if args.write:
        settings = make_environment_settings(config, Path(args.write).stem, url, token)
        write_atomic(Path(args.write), yaml.safe_dump(settings), mode=0o600)
    if args.json:
        print_json(urls)
    else:
        print("\n".join(f"{name:<18}  {value}" for name, value in urls.items()))
    return 0


def hand_over(argv: list[str]) -> None:
    """Become the environment process. Never returns."""
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "hpc_rl.tools.run_environment", *argv])
