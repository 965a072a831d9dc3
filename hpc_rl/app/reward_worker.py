"""The user's reward function in its own process, started by an executor worker with its import path."""

import sys

from hpc_rl import log
from hpc_rl.errors import ConfigError, ExitCode
from hpc_rl.rollout import pipes
from hpc_rl.rollout.rewards.reward_process import serve


def main() -> int:
    pipes.die_with_parent()
    log.setup("reward")
    try:
        serve(sys.argv[1])
    except ConfigError as error:
        print(error, file=sys.stderr)
        return ExitCode.BAD_CONFIG
    return ExitCode.DONE


if __name__ == "__main__":
    sys.exit(main())
