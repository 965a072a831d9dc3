"""The environment role: run the command of one environment during the trial.

The command gets a YAML file with URLs and settings by `--config`, in the format of hpc-rl and of atroposlib;
options in the command take precedence. When the rollout role comes back under another URL, the command is
restarted. All its processes end with this one, so that no environment feeds a trial that has ended.
"""

import logging
import os
import shlex
import subprocess
import sys
import threading
from urllib.parse import urlsplit

import yaml

from hpc_rl.config.environment_file import make_environment_settings
from hpc_rl.config.options.experiment import GRPOConfig
from hpc_rl.core.errors import ConfigError, ExitCode, RoleFailed
from hpc_rl.core.proc import TiedProcess
from hpc_rl.core.trial import write_atomic
from hpc_rl.name_resolve import keys, open_names
from hpc_rl.name_resolve.shared_fs import NameResolve
from hpc_rl.roles import role
from hpc_rl.roles.node_environment import correct

logger = logging.getLogger(__name__)
POLL_S = 1.0
OWN_END_S = 3.0
END_GRACE_S = 5.0
# atroposlib would derive its servers from these variables of a job
HIDDEN_VARIABLES = ("SLURM_JOB_NODELIST", "INFER_TP", "NUM_TRAINING_NODES")


def serve_environment(context: role.Context) -> int:
    """Run the command until it has finished, or until asked to stop."""
    if not isinstance(context.config, GRPOConfig) or context.config.environments is None:
        raise ConfigError("the trial's configuration has no section environments; submit the trial again")
    name, command = list(context.config.environments.commands.items())[context.index]
    names = open_names(context.trial, context.config)
    while not context.stopping.is_set():
        url = _find_rollout_url(names)
        if url is None:
            context.stopping.wait(POLL_S)
            continue
        settings = make_environment_settings(context.config, name, url, context.tokens["data"])
        file = context.attempt.dir / f"environment-{context.index}.yaml"
        write_atomic(file, yaml.safe_dump(settings), mode=0o600)
        code = _execute_command(context, names, add_settings(shlex.split(command), str(file)), url)
        if code == 0:
            logger.info("environment %s has finished", name)
            return ExitCode.DONE
        if code is not None:
            raise RoleFailed(f"environment {name} exited with code {code}; its output is in this log")
    return ExitCode.STOPPED


def add_settings(command: list[str], file: str) -> list[str]:
    """Add a settings file to a command; for `hpc-rl env serve`, before the command's own file."""
    option, at = ["--config", file], len(command)
    for i in range(len(command) - 1):
        if command[i : i + 2] == ["env", "serve"]:
            at = i + 2
            break
    return [*command[:at], *option, *command[at:]]


def _execute_command(context: role.Context, names: NameResolve, argv: list[str], url: str) -> int | None:
    """Return the exit code of the command; None if it was ended here, to stop or to restart it."""
    environment = {name: value for name, value in os.environ.items() if name not in HIDDEN_VARIABLES}
    correct(environment, [urlsplit(url).hostname or ""])
    logger.info("the environment is started: %s", shlex.join(argv))
    process = TiedProcess(argv, environment, subprocess.PIPE)
    relay = threading.Thread(target=_relay, args=(process, context.tokens["data"]), daemon=True)
    relay.start()
    try:
        while (code := process.poll()) is None:
            if context.stopping.wait(POLL_S):
                return _wait_for_end(process)
            if _find_rollout_url(names) not in (None, url):
                logger.warning("the rollout API has a new URL, so the environment is started again")
                return None
        return code if code >= 0 else 128 - code
    finally:
        process.end(END_GRACE_S, whole_session=True)
        relay.join(END_GRACE_S)


def _relay(process: TiedProcess, token: str) -> None:
    """Copy the command's output to the log of this role, without the token, which environments print."""
    assert process.stdout is not None
    for line in process.stdout:
        sys.stdout.buffer.write(line.replace(token.encode(), b"***"))
        sys.stdout.buffer.flush()


def _wait_for_end(process: TiedProcess) -> int | None:
    """Return 0 if the command finishes by itself, as after the trial's last step; else None."""
    try:
        return 0 if process.wait(OWN_END_S) == 0 else None
    except subprocess.TimeoutExpired:
        return None


def _find_rollout_url(names: NameResolve) -> str | None:
    seen = names.list_leases(keys.ROLLOUT).get(keys.ROLLOUT)
    return seen.value["url"] if seen is not None and seen.alive else None


if __name__ == "__main__":
    role.run("environment", serve_environment)
