"""`hpc-rl generate`: a trial with servers alone."""

from hpc_rl.cli import without_trainer
from hpc_rl.cli.options import CommandParser, Namespace

ABOUT = """Answer the prompts of train_dataset with the reward and the workflow of the configuration,
gconfig.n_samples times each, as a job. The trial writes exports/results/completions.jsonl, a line for each
completion, and scores.json. After a preemption it continues; the same command continues a stopped one."""
EPILOG = """examples:
  hpc-rl generate --config grpo.yaml gconfig.n_samples=8 keep_best_samples=1
  hpc-rl generate my-trial@400 --data more.jsonl
The trial is called MODEL-generate or TRIAL-generate-STEP; --name gives it another name."""


def make_parser() -> CommandParser:
    return without_trainer.make_parser(ABOUT, EPILOG)


def main(args: Namespace) -> int:
    return without_trainer.submit(args, "generate")
