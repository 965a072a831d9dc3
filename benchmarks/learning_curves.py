"""Steps that each training method needs to learn a toy, on several seeds.

    python benchmarks/learning_curves.py [CASE …] [--seeds 1 2 3] [--out benchmarks/results/learning_curves.json]

Cases: the algorithms of core/algorithms.py, opd by the teacher's four most likely tokens (opd-top4), adapters
(lora-1, lora-8) with ten times the learning rate of `full`, and PPO with a critic on a task of two turns with a
reward for each (ppo-turns). A case trains by the recipe and engine of a trial, in this process: samples come
from the embedded engine with the weights of one step before. A curve is the mean reward of the policy's samples
at temperature 1, over WINDOW steps; a method has learned when it reaches the threshold of its task, or the
teacher's reward. Cases that are already in the file and not named keep their numbers.

Tasks, with the models of the quickstart: `copy`: answer a sum with its first digit, from a random model; the
teacher has learned it by SFT. `choose`: the same from a model that was trained to answer with any digit of the
sum. `turns`: answer with an even digit, then with an odd one, from a random model. `hints`: the questions of
`quickstart --method teacher`; the policy knows how to use a hint, and only its teacher, the policy at the
start, sees one.
"""

import argparse
import asyncio
import json
import queue
import random
import statistics
import tempfile
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from run_record import describe_run, write_record

from hpc_rl.config.load.load import load
from hpc_rl.config.options.experiment import GRPOConfig, SFTConfig
from hpc_rl.config.rules.check import check
from hpc_rl.config.schedule import count_critic_updates_per_step, count_updates_per_step
from hpc_rl.core.algorithms import ALGORITHMS
from hpc_rl.core.allocation import Train
from hpc_rl.core.trial import Trial
from hpc_rl.core.types import Batch, TokenLogprobs, Trajectory, TrajectoryGroup, Turn
from hpc_rl.datasets.encode import encode_sequence
from hpc_rl.datasets.rows import load_rows
from hpc_rl.datasets.tokenizer import Tokenizer
from hpc_rl.engines.fsdp.engine import FSDPEngine
from hpc_rl.examples import hints, toy
from hpc_rl.rollout.distillation import Teacher, make_demonstration
from hpc_rl.rollout.workflow import trajectory
from hpc_rl.servers.embedded.decode_batch import Sequence
from hpc_rl.servers.embedded.engine import EmbeddedEngine
from hpc_rl.servers.embedded.given_tokens import compute_logprobs
from hpc_rl.servers.embedded.model import Model
from hpc_rl.servers.wire import GivenTokens, SamplingParams
from hpc_rl.stats.metrics_writers import MetricsWriters
from hpc_rl.trainers.critic import Critic
from hpc_rl.trainers.grpo_recipe import GRPO
from hpc_rl.trainers.ranks import Ranks
from hpc_rl.trainers.run import Run
from hpc_rl.trainers.supervised import compute_sequence_loss, make_sequences

WINDOW = 5  # steps
MARGIN = 0.01  # by which a reward may be below the teacher's: the noise of WINDOW batches
SFT_STEPS = 400
OUT = Path(__file__).parent / "results" / "learning_curves.json"
COMMON = (
    "experiment_name=curves",
    "cluster.n_gpus_per_node=0",
    "actor.gradient_checkpointing=false",
    "actor.optimizer.weight_decay=0",
    "actor.optimizer.warmup_steps_proportion=0",
    "actor.optimizer.eps=1e-8",
    "train_dataset.batch_size=32",
    "gconfig.n_samples=8",
)
OF_GROUP = ("actor.reward_norm.mean_level=group", "actor.reward_norm.std_level=group")


# -- tasks


@dataclass(frozen=True)
class Task:
    """The prompts, their rewards, and the models to start from."""

    threshold: float
    num_steps: int  # at most
    model: str
    max_new_tokens: int
    num_turns: int = 1
    teacher: str = ""


TASKS = {
    "copy": Task(0.9, 150, "base", 2, teacher="teacher"),
    "choose": Task(0.9, 150, "pretrained", 2),
    "turns": Task(0.9, 150, "base", 2, num_turns=2),
    "hints": Task(0.9, 250, "student", 3, teacher="student"),
}


def make_models(folder: Path, seed: int) -> None:
    """Make the tasks and the models of section Tasks above."""
    toy.make(folder, seed)
    questions, draw = [row["prompt"] for row in load_rows(folder / "task/train.jsonl")], random.Random(seed)
    files = {
        "first": [{"prompt": one, "completion": one[0]} for one in questions],
        "any": [{"prompt": one, "completion": draw.choice(one[:5:2])} for one in questions for _ in range(3)],
    }
    toy.write_rows(folder / "task", files)
    train_model(folder / "base", folder / "task/first.jsonl", folder / "teacher", seed)
    train_model(folder / "base", folder / "task/any.jsonl", folder / "pretrained", seed)
    hints.make(folder / "hints", seed)
    train_model(folder / "hints/base", folder / "hints/task/student-sft.jsonl", folder / "student", seed)


def train_model(path: Path, rows: Path, export: Path, seed: int) -> None:
    """Train on completions, and export the model."""
    words = [
        f"model.path={path}",
        f"train_dataset.path={rows}",
        "experiment_name=e",
        "trial_name=t",
        "trainer=sft",
    ]
    words += ["model.optimizer.lr=2e-3", "model.optimizer.weight_decay=0", "model.optimizer.eps=1e-8"]
    words += ["model.gradient_checkpointing=false", "cluster.n_gpus_per_node=0", "total_train_epochs=1"]
    config = check(load([], words, profiles=[]), files=False).config
    assert isinstance(config, SFTConfig)
    engine = FSDPEngine(config.model, device="cpu", seed=seed)
    engine.initialize(SFT_STEPS)
    tokenizer, draw = Tokenizer(path), random.Random(seed)
    encoded = [encode_sequence(tokenizer, row) for row in load_rows(rows)]
    for _ in range(SFT_STEPS):
        batch = draw.sample(encoded, 64)
        weight = float(sum(mask.sum() for _, mask in batch))
        engine.train_batch(make_sequences(batch), compute_sequence_loss, weight, 1.0)
    engine.export(export, path)


# -- samples


class Policy:
    """A model in an embedded engine, without a server."""

    def __init__(self, path: Path) -> None:
        self.model = Model(str(path), "float32")
        self.done: queue.SimpleQueue[list[Sequence]] = queue.SimpleQueue()
        self.engine = EmbeddedEngine(self.model, "0.0", self.done.put, max_running=512)
        self.engine.start()

    def update(self, tensors: dict[str, torch.Tensor]) -> None:
        self.engine.command(lambda: self.model.write(tensors)).result()
        self.engine.command(lambda: self.engine.finish_writing("0.0", False)).result()

    def sample(self, prompts: list[list[int]], max_new_tokens: int, draw: random.Random) -> list[Sequence]:
        params = SamplingParams(max_new_tokens=max_new_tokens, stop_token_ids=tuple(self.model.eos_ids))
        made = [Sequence(ids, params, draw.getrandbits(60), str(i)) for i, ids in enumerate(prompts)]
        self.engine.submit(made)
        missing = len(made)
        while missing:
            missing -= len(self.done.get())
        return made

    async def compute_logprobs(
        self, inputs: list[list[int]], starts: list[int], top_k: int = 0, min_version: str = ""
    ) -> list[TokenLogprobs]:
        """Score given tokens, as the pool of a teacher."""
        given = [GivenTokens(ids, start) for ids, start in zip(inputs, starts, strict=True)]
        answers = self.engine.command(lambda: compute_logprobs(self.model, given, top_k)).result()
        return [TokenLogprobs(**answer) for answer in answers]


@dataclass
class Player:
    """Plays a task with a policy: prompts in, groups with rewards out."""

    task: Task
    name: str
    config: GRPOConfig
    tokenizer: Tokenizer
    rows: list[dict[str, Any]]
    draw: random.Random
    _next: int = field(default=0)

    def play(self, policy: Policy, version: int) -> list[tuple[TrajectoryGroup, dict[str, Any]]]:
        """Return the groups of the next prompts with their rows."""
        size, num = self.config.train_dataset.batch_size, self.config.gconfig.n_samples
        rows = [self.rows[(self._next + i) % len(self.rows)] for i in range(size)]
        self._next += size
        turns: list[list[Sequence]] = []
        context = [self.tokenizer.encode(row["prompt"]) for row in rows for _ in range(num)]
        for _ in range(self.task.num_turns):
            turns.append(policy.sample(context, self.task.max_new_tokens, self.draw))
            context = [
                [*ids, *one.tokens, *self.tokenizer.encode("=")]
                for ids, one in zip(context, turns[-1], strict=True)
            ]
        games = list(zip(*turns, strict=True))
        groups = []
        for index, row in enumerate(rows):
            part = range(index * num, (index + 1) * num)
            made = [self._make_trajectory(games[i], row, version) for i in part]
            groups.append((TrajectoryGroup(index, made), row))
        return groups

    def _make_trajectory(self, turns: tuple[Sequence, ...], row: dict[str, Any], version: int) -> Trajectory:
        pairs: list[tuple[list[int], Turn]] = []
        length = 0
        for turn in turns:
            versions = [(f"0.{version}", 0, len(turn.tokens))]
            reason = str((turn.finish or {})["type"])
            pairs.append((turn.ids[length:], Turn(turn.tokens, turn.logprobs, versions, reason)))
            length = len(turn.ids) + len(turn.tokens)
        rewards = self._reward([self.tokenizer.decode(one.tokens) for one in turns], row)
        return trajectory(pairs, sum(rewards), rewards if len(turns) > 1 else None)

    def _reward(self, texts: list[str], row: dict[str, Any]) -> list[float]:
        if self.name == "turns":
            pairs = zip(texts, ("02468", "13579"), strict=True)
            return [0.5 * (bool(text) and text[0] in wanted) for text, wanted in pairs]
        wanted = row["answer"] if self.name == "hints" else row["prompt"][0]
        return [float(texts[0] == wanted)]


def load_task(name: str, folder: Path) -> list[dict[str, Any]]:
    if name != "hints":
        return list(load_rows(folder / "task/train.jsonl"))
    rows = load_rows(folder / "hints/task/train.jsonl")
    shift = {row["prompt"]: (int(row["answer"]) - int(row["prompt"][1])) % 10 for row in rows}
    return [{**row, "prompt": f"|{row['prompt']}=", "hint": str(shift[row["prompt"]])} for row in rows]


# -- training


@dataclass(frozen=True)
class Case:
    """One method on a task."""

    options: tuple[str, ...]
    task: str = "copy"
    lr: float = 1e-3
    reaches_teacher: bool = False  # the threshold is the teacher's reward


OF_TEACHER = (
    "distillation.pool=teacher",
    "pools.teacher.path=teacher",
    "allocation_mode=embedded[rollout]:d1+embedded[teacher]:d1+fsdp:d1",
)
OF_CRITIC = (
    "critic.optimizer.lr=2e-3",
    "critic.optimizer.weight_decay=0",
    "critic.gradient_checkpointing=false",
)
SHOWN = (
    "distillation.demonstration_column=hint",
    "distillation.demonstration_template={demonstration}{question}",
)
SPECIAL = {
    "grpo": Case(OF_GROUP),
    "areal": Case(OF_GROUP),
    "ppo": Case(OF_CRITIC),
    # no hard bound of the ratio, so smaller steps
    "cispo": Case((), lr=5e-4),
    "sapo": Case((), lr=5e-4),
    "opd": Case(OF_TEACHER, reaches_teacher=True),
    "opsd": Case((*OF_TEACHER, *SHOWN), "hints", 2e-3),
    "sft_distill": Case(OF_TEACHER, reaches_teacher=True),
}
CASES = {name: SPECIAL.get(name, Case(())) for name in ALGORITHMS}
CASES = {
    name: replace(case, options=(f"actor.algorithm={name}", *case.options)) for name, case in CASES.items()
}
ADAPTED = ("actor.algorithm=grpo", *OF_GROUP, "actor.ppo_n_minibatches=1")
LORA = (*ADAPTED, "actor.use_lora=true", "actor.lora_alpha=32")
CASES |= {
    "opd-top4": Case(("actor.algorithm=opd", *OF_TEACHER, "distillation.top_k=4"), reaches_teacher=True),
    "full": Case(ADAPTED, "choose", 1e-3),
    "lora-1": Case((*LORA, "actor.lora_rank=1"), "choose", 1e-2),
    "lora-8": Case((*LORA, "actor.lora_rank=8"), "choose", 1e-2),
    "ppo-turns": Case(("actor.algorithm=ppo", *OF_CRITIC), "turns", 2e-3),
}


def make_config(case: Case, task: Task, folder: Path, seed: int) -> GRPOConfig:
    rows = folder / ("hints/task" if case.task == "hints" else "task") / "train.jsonl"
    words = [*COMMON, "trial_name=t", f"actor.path={folder / task.model}", f"train_dataset.path={rows}"]
    words += [f"actor.optimizer.lr={case.lr}", f"total_train_steps={task.num_steps}", f"seed={seed}"]
    words += [f"gconfig.max_new_tokens={task.max_new_tokens}"]
    if any(option.startswith("critic.") for option in case.options):
        words += [f"critic.path={folder / task.model}"]
    config = check(load([], [*words, *case.options], profiles=[]), files=False).config
    assert isinstance(config, GRPOConfig)
    return config


def make_recipe(config: GRPOConfig, folder: Path, num_prompts: int) -> GRPO:
    total = config.total_train_steps or 0
    engine = FSDPEngine(config.actor, device="cpu", seed=config.seed)
    engine.initialize(total * count_updates_per_step(config))
    critic = None
    if config.critic is not None:
        per_step = count_critic_updates_per_step(config)
        model = FSDPEngine(config.critic, device="cpu", seed=config.seed, name="critic")
        model.initialize(total * per_step)
        critic = Critic(model, config.critic, Ranks(), per_step)
    trial = Trial(folder / "trial")
    run = Run(
        trial=trial,
        attempt=trial.attempt("1.0"),
        incarnation=0,
        config=config,
        tokens={},
        names=None,  # type: ignore[arg-type]
        train=Train("fsdp"),
        device="cpu",
        ranks=Ranks(),
        stopping=threading.Event(),
        engine=engine,
        lineage=0,
        step=0,
        writers=MetricsWriters([]),
    )
    transport: Any = SimpleNamespace(settle=lambda wait: None)
    return GRPO(run, SimpleNamespace(), transport, num_prompts, critic=critic)  # type: ignore[arg-type]


@dataclass
class Samples:
    """Makes the train batches: of the policy, or of the teacher that samples in its place."""

    player: Player
    policy: Policy
    teacher: Policy | None

    def make(self, step: int, version: int) -> tuple[Batch, float]:
        """Return a batch of samples of the newest weights, and the mean reward of the policy."""
        played, config = self.player.play(self.policy, version), self.player.config
        reward = compute_reward(played)
        if self.teacher is not None and ALGORITHMS[config.actor.algorithm].sampled_by == "teacher":
            played = self.player.play(self.teacher, version)
        elif self.teacher is not None and (section := config.distillation) is not None:
            shown = make_demonstration(section, self.player.tokenizer)
            scorer = Teacher(self.teacher, shown, top_k=section.top_k)
            for group, row in played:
                ids = self.player.tokenizer.encode(row["prompt"])
                prompt: Any = {"input_ids": ids, "columns": row, "version": "0.0"}
                asyncio.run(scorer.score(group, prompt))
        return Batch(step, [group for group, _ in played]), reward


def compute_reward(played: list[tuple[TrajectoryGroup, dict[str, Any]]]) -> float:
    return statistics.mean(row.reward for group, _ in played for row in group.trajectories)


def train(name: str, folder: Path, seed: int) -> dict[str, Any]:
    """Train one case until it reaches the threshold; return its curve and its steps."""
    case = CASES[name]
    task, begin = TASKS[case.task], time.process_time()
    config = make_config(case, task, folder, seed)
    rows, draw = load_task(case.task, folder), random.Random(seed)
    draw.shuffle(rows)
    player = Player(task, case.task, config, Tokenizer(folder / task.model), rows, draw)
    policy = Policy(folder / task.model)
    teacher = Policy(folder / task.teacher) if config.distillation is not None else None
    threshold = task.threshold
    if case.reaches_teacher and teacher is not None:
        of_teacher = statistics.mean(compute_reward(player.play(teacher, 0)) for _ in range(WINDOW))
        threshold = of_teacher - MARGIN
    samples, recipe = Samples(player, policy, teacher), make_recipe(config, folder, len(rows))
    rewards: list[float] = []
    batch, reward = samples.make(1, 0)
    reached = None
    for step in range(1, task.num_steps + 1):
        following = samples.make(step + 1, step - 1)
        rewards.append(reward)
        if len(rewards) >= WINDOW and statistics.mean(rewards[-WINDOW:]) >= threshold:
            reached = step
            break
        recipe.update(step, batch)
        policy.update({name: one for bucket in recipe.run.engine.weights() for name, one in bucket})
        batch, reward = following
    for one in (policy, teacher):
        if one is not None:
            one.engine.stop()
    means = [statistics.mean(rewards[i : i + WINDOW]) for i in range(0, len(rewards), WINDOW)]
    return {
        "threshold": round(threshold, 3),
        "steps": reached,
        "curve": [round(one, 3) for one in means],
        "cpu_s": round(time.process_time() - begin, 1),
    }


# -- results


def describe(case: Case) -> dict[str, Any]:
    return {"task": case.task, "lr": case.lr, "options": list(case.options), "seeds": {}}


def store(out: Path, about: dict[str, Any], results: dict[str, Any]) -> None:
    tasks = {name: vars(task) for name, task in TASKS.items()}
    write_record(out, {**about, "window": WINDOW, "tasks": tasks, "cases": results})


def print_table(results: dict[str, Any]) -> None:
    """Print the steps of each seed; of an adapter also the mean of their ratios to full training."""
    print(f"{'case':<14}{'task':<8}{'threshold':<11}steps")
    for name, one in results.items():
        seeds = one["seeds"]
        steps = [str(found["steps"] or "not reached") for found in seeds.values()]
        more = ""
        if name.startswith("lora") and "full" in results and all(found["steps"] for found in seeds.values()):
            full = results["full"]["seeds"]
            both = [(seeds[seed]["steps"], full[seed]["steps"]) for seed in seeds if seed in full]
            more = f"   {sum(a for a, _ in both) / sum(b for _, b in both):.2f} of full training's"
        threshold = next(iter(seeds.values()))["threshold"]
        print(f"{name:<14}{one['task']:<8}{threshold:<11.3f}{', '.join(steps)}{more}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"all by default: {', '.join(CASES)}")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    if unknown := set(options.cases) - CASES.keys():
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    torch.set_num_threads(1)
    about = describe_run("torch", "transformers")
    chosen = options.cases or list(CASES)
    results = json.loads(options.out.read_text())["cases"] if options.out.exists() else {}
    results |= {name: describe(CASES[name]) for name in chosen}
    results = {name: results[name] for name in CASES if name in results}
    with tempfile.TemporaryDirectory() as folder:
        for seed in options.seeds:
            models = Path(folder) / str(seed)
            make_models(models, seed)
            for name in chosen:
                found = results[name]["seeds"][str(seed)] = train(name, models, seed)
                print(name, seed, json.dumps(found), flush=True)
                store(options.out, about, results)
    print_table(results)


if __name__ == "__main__":
    main()
