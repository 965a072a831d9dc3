"""`hpc-rl serve`: a trial with servers alone."""

from hpc_rl.cli import without_trainer
from hpc_rl.cli.options import CommandParser, Namespace

ABOUT = """Serve a model at an endpoint of OpenAI's API, as a job, until it is cancelled. `hpc-rl status`
shows the URL, `hpc-rl env urls` also the API key. After a preemption it serves again."""
EPILOG = """examples:
  hpc-rl serve models/qwen -t 8:00:00 allocation_mode=sglang:d8
  hpc-rl serve my-trial@400
The trial is called MODEL-serve or TRIAL-serve-STEP; --name gives it another name."""


def make_parser() -> CommandParser:
    return without_trainer.make_parser(ABOUT, EPILOG)


def main(args: Namespace) -> int:
    return without_trainer.submit(args, "serve")
