"""`hpc-rl evaluate`: a trial with servers alone."""

from hpc_rl.cli import without_trainer
from hpc_rl.cli.options import CommandParser, Namespace

ABOUT = """Evaluate a model on valid_dataset with the reward and the workflow of the configuration, and
eval_gconfig, as a job. The trial writes exports/results/scores.json and completions.jsonl. After a preemption
it continues; the same command continues a stopped one."""
EPILOG = """examples:
  hpc-rl evaluate my-trial@400
  hpc-rl evaluate models/qwen --config grpo.yaml valid_dataset.path=test.jsonl eval_gconfig.n_samples=4
The trial is called MODEL-evaluate or TRIAL-evaluate-STEP; --name gives it another name."""


def make_parser() -> CommandParser:
    return without_trainer.make_parser(ABOUT, EPILOG)


def main(args: Namespace) -> int:
    return without_trainer.submit(args, "evaluate")
