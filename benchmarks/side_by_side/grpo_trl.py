"""GRPO on the toy by TRL's GRPOTrainer; runs in TRL's environment. The same arguments and output as grpo_ours.py.

A step is what lies between the trainer's callbacks `on_step_begin` and `on_step_end`; generation is inside.
"""

import argparse
import json
import tempfile
import time

import torch
import transformers
from datasets import Dataset
from side_arguments import parse_arguments
from toy import MAX_NEW_TOKENS, NUM_PROMPTS, NUM_SAMPLES, score_digits
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Steps(TrainerCallback):
    """Records each step, and stops at a mean reward of five steps."""

    def __init__(self, until: float | None) -> None:
        self.until, self.steps, self.rewards, self.tokens = until, [], [], []
        self._begun = 0.0

    def on_step_begin(self, *_args, **_more):
        self.rewards, self.tokens = [], []
        self._begun = time.process_time()

    def on_step_end(self, _args, _state, control, **_more):
        cpu_s = time.process_time() - self._begun
        means = {
            name: sum(values) / len(values)
            for name, values in (("reward", self.rewards), ("tokens", self.tokens))
        }
        self.steps.append({"cpu_s": cpu_s, **means})
        recent = [step["reward"] for step in self.steps[-5:]]
        if self.until is not None and len(recent) == 5 and sum(recent) / 5 >= self.until:
            control.should_training_stop = True


def train(args: argparse.Namespace, folder: str) -> list[dict[str, float]]:
    steps = Steps(args.until)

    def reward(prompts, completions, completion_ids, answer, **_more):
        rewards = [score_digits(text, right) for text, right in zip(completions, answer, strict=True)]
        steps.rewards += rewards
        steps.tokens += map(len, completion_ids)
        return rewards

    config = GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=NUM_PROMPTS * NUM_SAMPLES,
        num_generations=NUM_SAMPLES,
        max_completion_length=MAX_NEW_TOKENS,
        max_steps=args.steps,
        learning_rate=args.lr,
        lr_scheduler_type="constant",
        beta=0.0,
        num_iterations=1,
        temperature=1.0,
        loss_type="grpo",
        scale_rewards="group",
        max_grad_norm=1.0,
        weight_decay=0.0,
        gradient_checkpointing=False,
        use_cpu=True,
        bf16=False,
        fp16=False,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=args.seed,
    )
    rows = [json.loads(line) for line in args.rows.read_text().splitlines()]
    trainer = GRPOTrainer(
        model=str(args.model),
        args=config,
        reward_funcs=reward,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(args.model),
        callbacks=[steps],
    )
    trainer.train()
    return steps.steps


def main() -> None:
    args = parse_arguments(__doc__)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory(prefix="trl-side-") as folder:
        steps = train(args, folder)
    print(json.dumps(steps))


if __name__ == "__main__":
    main()
