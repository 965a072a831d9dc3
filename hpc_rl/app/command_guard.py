"""Runs a command, and kills all that it started once standard input closes.

The environment role starts commands of users so, as the leader of a process group: even after a kill of the
role no process is left that still feeds the trial.
"""

import os
import signal
import subprocess
import sys
import threading


def main(argv: list[str]) -> int:
    """Run the command; return its exit code."""
    # of the group, for the command; a handler, since what is ignored stays ignored in the child
    signal.signal(signal.SIGTERM, lambda *_: None)
    threading.Thread(target=_kill_group_at_end_of_input, daemon=True).start()
    try:
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL)
    except OSError as error:
        print(f"{argv[0]!r} can't be started: {error}", file=sys.stderr)
        return 127
    code = process.wait()
    return code if code >= 0 else 128 - code


def _kill_group_at_end_of_input() -> None:
    while os.read(sys.stdin.fileno(), 1024):
        pass
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
