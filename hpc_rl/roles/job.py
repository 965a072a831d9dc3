"""The program that a job script executes after setting the environment: see supervise/job_runner.py."""

import sys


def main() -> int:
    """Run the job. Arguments: settings `name=value`, then `--` and the arguments of the script."""
    from hpc_rl.supervise.job_loop import hold_signals

    hold_signals()
    from hpc_rl.supervise.job_policy import parse_words
    from hpc_rl.supervise.job_runner import JobRunner

    return JobRunner(*parse_words(sys.argv[1:])).run()


if __name__ == "__main__":
    sys.exit(main())
