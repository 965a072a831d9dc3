"""`hpc-rl env`: the URLs of a trial; the rest is handed over to `python -m hpc_rl.app.run_environment`."""

import json
import os
import sys

from hpc_rl.cli.options import CommandParser, Namespace, print_json
from hpc_rl.errors import TrialStateError

HANDED_OVER = ("serve", "process", "evaluate")


def parser() -> CommandParser:
    made = CommandParser(
        "Run an environment: tasks of your own that feed a trainer.",
        "hpc-rl env serve | process | evaluate --help shows the options of an environment.",
    )
    made.add_argument("action", choices=["urls", *HANDED_OVER], help="urls: print where a trial takes groups")
    made.add_trial()
    made.add_json("the URLs")
    return made


def run(args: Namespace) -> int:
    from hpc_rl.config.loading.stored import from_dict
    from hpc_rl.name_resolve import keys, open_names
    from hpc_rl.submit.trial_index import resolve

    trial = resolve(args.trial)
    config = from_dict(json.loads(trial.config_json.read_bytes()))
    seen = open_names(trial, config).leases(keys.ROLLOUT).get(keys.ROLLOUT)
    if seen is None or not seen.alive:
        raise TrialStateError(
            f"trial {trial.name} has no rollout role that runs; see hpc-rl status {args.trial}"
        )
    url, token = seen.value["url"], trial.tokens()["data"]
    urls = {"rollout_server_url": f"{url}/t/{token}", "base_url": f"{url}/t/{token}/v1", "api_key": token}
    if args.json:
        print_json(urls)
    else:
        print("\n".join(f"{name:<18}  {value}" for name, value in urls.items()))
    return 0


def hand_over(argv: list[str]) -> None:
    """Become the environment process. Never returns."""
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "hpc_rl.app.run_environment", *argv])
