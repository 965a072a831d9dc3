"""A trial trained by an engine of a few lines; the loop, the run and the start around it are real."""

import json
import threading
from collections.abc import Callable
from pathlib import Path

from hpc_rl.checkpoint.generation import scan, verify
from hpc_rl.config.options.dataset import DatasetConfig
from hpc_rl.config.options.experiment import SFTConfig
from hpc_rl.config.options.operations import RecoverConfig
from hpc_rl.config.options.training import TrainEngineConfig
from hpc_rl.core import checked_file
from hpc_rl.core.allocation import Train
from hpc_rl.core.checked_file import CheckedReader, FileRecord
from hpc_rl.core.errors import ExitCode
from hpc_rl.core.trial import Trial
from hpc_rl.engines.shared.mesh import Mesh
from hpc_rl.name_resolve import open_names
from hpc_rl.stats.metrics_writers import JsonlWriter, MetricsWriters
from hpc_rl.trainers import start
from hpc_rl.trainers.evaluations import EvaluationsBeside, make_numbers
from hpc_rl.trainers.loop import train
from hpc_rl.trainers.ranks import Ranks
from hpc_rl.trainers.run import Run


class FakeSnapshot:
    """The number, written once a test allows it."""

    def __init__(self, content: bytes) -> None:
        self.content, self.size = content, len(content)
        self.may_write = threading.Event()
        self.may_write.set()

    def write(self, folder: Path, cancel: threading.Event | None = None) -> list[FileRecord]:
        self.may_write.wait()
        return [checked_file.write(folder / "state.json", [memoryview(self.content)], cancel)]


class FakeEngine:
    """Its state is one number, the sum of the batches that it has seen."""

    mesh, num_train_steps = Mesh(), 10

    def __init__(self) -> None:
        self.total = 0

    def snapshot(self, copied: bool) -> FakeSnapshot:
        return FakeSnapshot(json.dumps(self.total).encode())

    def state_bytes(self) -> int:
        return 100

    def counters(self) -> dict[str, int]:
        return {"updates": self.total}

    def initialize(self, num_train_steps: int, empty: bool = False) -> None:
        self.total = 0

    def load(self, folder: Path, saved_num_ranks: int, files: dict | None = None) -> None:
        with CheckedReader(folder / "state.json", files and files["state.json"]) as reader:
            self.total = json.loads(reader.read(0, reader.size))

    def export(self, folder: Path, tokenizer: Path | None = None) -> None:
        (folder / "model.json").write_text(json.dumps(self.total))


class FakeRecipe:
    """Batch k is the number k.

    `calls` is what happened; `at` maps a step to what a test does before its batch comes.
    """

    def __init__(self, run: Run, total: int, at: dict | None = None, evaluates: bool = True) -> None:
        self.run, self.total_steps, self.at, self.evaluates = run, total, at or {}, evaluates
        self.numbers: dict[int, dict] = {}  # step -> what its evaluation answers
        self.calls: list[str] = []
        self.trained: list[int] = []

    def batch(self, step: int) -> int | None:
        self.at.get(step, lambda: None)()
        return (
            None
            if self.run.stopping.is_set() and step in self.at and getattr(self.at[step], "waits", False)
            else step
        )

    def update(self, step: int, batch: int) -> None:
        self.run.engine.total += batch
        self.trained.append(step)
        self.run.stats.value("loss", 1.0 / step)
        self.run.stats.value("reward/format", 0.25)
        self.calls.append(f"update {step}")
        self.at.get(f"during {step}", lambda: None)()

    def publish(self, step: int) -> None:
        self.calls.append(f"publish {step}")

    def evaluate(self, step: int) -> dict | None:
        self.calls.append(f"evaluate {step}")
        return None if self.run.stopping.is_set() else self.numbers.get(step, {})

    def report_evaluation(self, step: int, version: str, results: dict, elapsed_s: float) -> dict:
        self.calls.append(f"evaluated {step}")
        numbers = make_numbers(version, results, elapsed_s)
        self.run.writers.log(step, numbers)
        return numbers

    def position(self, step: int) -> tuple[int, int]:
        return divmod(step * 2, 10)

    def frontier(self, step: int) -> dict[str, int]:
        return {"sealed": step}

    def retain(self, step: int) -> None:
        self.calls.append(f"retain {step}")


def make_config(tmp_path, **sections) -> SFTConfig:
    return SFTConfig(
        experiment_name="e",
        trial_name="t",
        train_dataset=DatasetConfig(path="rows.jsonl", batch_size=2),
        model=TrainEngineConfig(path=str(tmp_path / "model")),
        **{"recover": RecoverConfig(mode="auto", freq_steps=3, keep=2), **sections},
    )


class Starter:
    """Starts incarnations of one trial, as the app does."""

    def __init__(self, tmp_path: Path, **sections) -> None:
        self.trial = Trial(tmp_path / "trial")
        self.trial.make_dirs()
        self.config = make_config(tmp_path, **sections)
        self.attempt_id = "7.0"
        self.incarnation = -1
        self.data: dict = {}  # fingerprint of the training rows
        self.beside: Callable[[Run], EvaluationsBeside] | None = None

    def __call__(
        self, total: int, at: dict | None = None, numbers: dict | None = None
    ) -> tuple[ExitCode, FakeRecipe]:
        self.incarnation += 1
        attempt = self.trial.attempt(self.attempt_id)
        attempt.make_dirs()
        stopping = threading.Event()
        tokens, names = {"control": "c", "data": "d"}, open_names(self.trial)
        context = start.TrainerContext(
            trial=self.trial,
            attempt=attempt,
            incarnation=self.incarnation,
            config=self.config,
            tokens=tokens,
            names=names,
            train=Train("fsdp"),
            device="cpu",
            ranks=Ranks(),
            stopping=stopping,
            data=self.data,
        )
        engine = self.engine = FakeEngine()
        begun = start.load_state(context, start.begin(context), [engine])
        writers = MetricsWriters([JsonlWriter(attempt.metrics(self.incarnation))])
        run = Run(
            **vars(context), engine=engine, lineage=begun["lineage"], step=begun["step"], writers=writers
        )
        if begun["manifest"]:
            run.restore(begun["manifest"])
        recipe = FakeRecipe(run, total, at)
        recipe.numbers = numbers or {}
        self.last = run
        if self.beside is not None:
            run.evaluate_beside(self.beside(run))
        try:
            return train(run, recipe), recipe
        finally:
            writers.close()

    def end(self, code: int) -> None:
        """The supervisor's word on how the last incarnation ended."""
        events = self.trial.attempt(self.attempt_id).events
        row = {"event": "exited", "role": "trainer", "incarnation": self.incarnation, "code": code}
        with events.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def generations(self) -> list[int]:
        return [found.step for found in map(verify, scan(self.trial)) if not found.problem]

    def rows(self) -> list[dict]:
        path = self.trial.attempt(self.attempt_id).metrics(self.incarnation)
        return [json.loads(line) for line in path.read_text().splitlines()]
