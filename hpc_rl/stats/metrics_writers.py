"""MetricsWriters for metrics: JSON lines, TensorBoard and metrics services. Only rank 0 writes. No torch.

A line is written completely before `log` returns, so a killed trainer loses no reported line.
"""

import importlib
import json
import logging
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import RawIOBase
from pathlib import Path
from typing import Any, Protocol

from hpc_rl.core.errors import ConfigError
from hpc_rl.core.files import is_full
from hpc_rl.core.records import flatten
from hpc_rl.core.refusal import Kind, Refusal

logger = logging.getLogger(__name__)

Scalars = Mapping[str, float | int | str]


class MetricsWriter(Protocol):
    """A receiver of metrics."""

    def log(self, step: int, scalars: Scalars) -> None: ...

    def close(self) -> None: ...

    def state(self) -> dict[str, Any]:
        """Return the writer's position, for the manifest of a generation."""


class FullDisk:
    """Logs that a disk is full, once until there is space again."""

    def __init__(self) -> None:
        self._reported = False

    @contextmanager
    def reported(self, message: str) -> Iterator[None]:
        """Log the message if the block fails for lack of space; raise any other error."""
        try:
            yield
            self._reported = False
        except OSError as error:
            if not is_full(error):
                raise
            if not self._reported:
                logger.error("DISK FULL: %s (%s)", message, error)
            self._reported = True


class JsonlWriter:
    """One JSON object per line, `step` first; NaN and infinity become null.

    On a full disk, lines wait in memory, in order, for the next call. `file` replaces the file at `path`.
    """

    def __init__(self, path: Path, file: RawIOBase | None = None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file: Any = file or path.open("ab", buffering=0)
        self._waiting = b""
        self._full = FullDisk()

    def log(self, step: int, scalars: Mapping[str, Any]) -> None:
        row = {"step": step, **{name: _replace_infinite(value) for name, value in scalars.items()}}
        self._waiting += json.dumps(row).encode() + b"\n"
        self._write()

    def _write(self) -> None:
        with self._full.reported(f"metrics wait in memory until there is space in {self.path.parent}"):
            while self._waiting:
                self._waiting = self._waiting[self._file.write(self._waiting) or 0 :]

    def close(self) -> None:
        if not self._file.closed:
            self._write()
            self._file.close()

    def state(self) -> dict[str, Any]:
        # called before a generation is committed, so write waiting lines first
        if self._file.closed:
            return {"file": self.path.name, "bytes": 0}
        self._write()
        return {"file": self.path.name, "bytes": self._file.tell()}


def _replace_infinite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


OF_UPDATE = {  # metrics of the update; other metrics of a step with a reward belong to its batch
    "loss", "grad_norm", "lr", "update_successful", "rows_skipped", "rows_masked", "groups_dropped",
    "entropy", "entropy_coeff", "clip_ratio", "dual_clip_ratio", "importance_weight", "behave_imp_weight",
    "behave_dropped", "behave_approx_kl", "mismatch_log_w_mean", "mismatch_log_w_max",
    "mismatch_log_w_fresh", "mismatch_kl", "mismatch_ess", "mismatch_excluded", "loglinear_error", "kl_loss",
    "kl_rewards", "publish_servers", "lineage", "total_steps", "save_failed", "callback_errors",
    "updates_skipped",
}  # fmt: skip


TRIAL_TAG = "hpc_rl.trial"  # of a run in MLflow: the directory of its trial
MAX_PARAMETER = 6000  # characters of a parameter in MLflow
EVALUATED_STEP = "evaluated_step"  # in wandb: the x-axis of evaluations


def make_tag(name: str, has_reward: bool) -> str:
    """Return TensorBoard's name of a metric, with the group `train`, `eval`, `rollout` or `time`.

    Parts of the reward and stats of workflows keep their groups `reward` and `agent`. `has_reward`: the step
    trained on completions, not on a dataset.
    """
    if name.endswith("_s") and "/" not in name:
        return f"time/{name}"
    if name.startswith("eval_"):
        return f"eval/{name.removeprefix('eval_')}"
    if "/" in name:
        return name
    return f"rollout/{name}" if has_reward and name not in OF_UPDATE else f"train/{name}"


class TensorBoardWriter:
    """Writes event files with TensorBoard's own writer, which needs neither TensorFlow nor torch.

    Metrics during a full disk are missing (the JSON lines have them); a new file begins when there is space
    again. `open_writer` replaces TensorBoard's writer.
    """

    def __init__(
        self, folder: Path, start_step: int = 0, open_writer: Callable[[], Any] | None = None
    ) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self.folder = folder
        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        self._open = open_writer or (lambda: EventFileWriter(str(folder), flush_secs=5))
        self._writer: Any = None
        self._full = FullDisk()
        # readers then drop later events of earlier starts
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._add(event_pb2.Event(wall_time=time.time(), step=start_step + 1, session_log=start))

    def _add(self, event: Any) -> None:
        # the writer's thread may have failed since the last event; it reports this now and can't be reused
        with self._full.reported(f"TensorBoard's files in {self.folder} lack metrics until there is space"):
            writer, self._writer = self._writer or self._open(), None
            writer.add_event(event)
            self._writer = writer

    def log(self, step: int, scalars: Scalars) -> None:
        numbers = _select_numbers(scalars).items()
        has_reward = "reward" in scalars
        values = [
            self._summary.Value(tag=make_tag(name, has_reward), simple_value=float(value))
            for name, value in numbers
        ]
        when = scalars.get("time", 0.0)
        self._add(self._event(wall_time=float(when), step=step, summary=self._summary(value=values)))

    def close(self) -> None:
        with FullDisk().reported(f"TensorBoard's files in {self.folder} lack the last metrics"):
            if self._writer is not None:
                self._writer.close()

    def state(self) -> dict[str, Any]:
        return {"folder": str(self.folder)}


class MetricsWriters:
    """Several writers as one. The first gets all; the others get each `every`-th step and all evaluations."""

    def __init__(self, writers: list[MetricsWriter], every: int = 1) -> None:
        self.writers, self.every = writers, every

    def log(self, step: int, scalars: Scalars) -> None:
        is_for_all = step % self.every == 0 or any(name.startswith("eval_") for name in scalars)
        for writer in self.writers if is_for_all else self.writers[:1]:
            writer.log(step, scalars)

    def correct(self, step: int, scalars: Scalars) -> None:
        """Write a line of the JSON lines again: readers take the newest line of a step."""
        for writer in self.writers[:1]:
            writer.log(step, scalars)

    def close(self) -> None:
        for writer in self.writers:
            writer.close()

    def state(self) -> dict[str, Any]:
        return {type(writer).__name__: writer.state() for writer in self.writers}


@dataclass(frozen=True)
class RunIdentity:
    """The identity of a trial in a metrics service."""

    experiment_name: str
    trial_name: str
    folder: Path  # of the attempt, for the service's files
    trial_folder: Path  # for files that all attempts share
    config: Mapping[str, Any]


class WandBWriter:
    """Weights & Biases; all attempts of a trial share one run.

    `settings` is the section `stats_logger.wandb`.
    """

    def __init__(self, who: RunIdentity, settings: Any) -> None:
        wandb = _import_package("wandb", "stats_logger.wandb.mode", settings.mode)
        options = {"base_url": settings.wandb_base_url} if settings.wandb_base_url else {}
        self._run = wandb.init(
            mode=settings.mode,
            entity=settings.entity,
            project=settings.project or who.experiment_name,
            name=settings.name or who.trial_name,
            job_type=settings.job_type,
            group=settings.group or f"{who.experiment_name}_{who.trial_name}",
            notes=settings.notes,
            tags=settings.tags,
            config=dict(who.config) if settings.config is None else settings.config,
            dir=str(who.folder),
            id=f"{who.experiment_name}_{who.trial_name}_{settings.id_suffix}",
            resume="allow",
            settings=wandb.Settings(**options),
        )
        # an evaluation beside training arrives after later steps, and wandb drops values of earlier steps
        self._run.define_metric("eval_*", step_metric=EVALUATED_STEP)

    def log(self, step: int, scalars: Scalars) -> None:
        if "eval_version" in scalars:
            self._run.log({**_select_numbers(scalars), EVALUATED_STEP: step})
        else:
            self._run.log(_select_numbers(scalars), step=step)

    def close(self) -> None:
        self._run.finish()

    def state(self) -> dict[str, Any]:
        return {"id": self._run.id}


class SwanlabWriter:
    """SwanLab. `settings` is the section `stats_logger.swanlab`."""

    def __init__(self, who: RunIdentity, settings: Any) -> None:
        self._swanlab = _import_package("swanlab", "stats_logger.swanlab.mode", settings.mode)
        self._swanlab.init(
            project=settings.project or who.experiment_name,
            experiment_name=settings.name or who.trial_name,
            config=dict(who.config) if settings.config is None else settings.config,
            logdir=settings.logdir or str(who.folder / "swanlab"),
            mode=settings.mode,
        )

    def log(self, step: int, scalars: Scalars) -> None:
        self._swanlab.log(_select_numbers(scalars), step=step)

    def close(self) -> None:
        self._swanlab.finish()

    def state(self) -> dict[str, Any]:
        return {}


class MLflowWriter:
    """MLflow; all attempts of a trial share one run. `settings` is the section `stats_logger.mlflow`.

    MLflow sends metrics in its own thread. If its server fails, it logs an error and training continues.
    """

    def __init__(self, who: RunIdentity, settings: Any) -> None:
        self._mlflow = mlflow = _import_package("mlflow", "stats_logger.mlflow.mode", settings.mode)
        if settings.mode == "local":
            # MLflow 3 refuses stores of files, which it keeps for old runs, unless this is set; a database
            # would need the whole package, and locks on the shared file system
            os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
            mlflow.set_tracking_uri(Path(settings.logdir or who.trial_folder / "mlflow").absolute().as_uri())
        elif settings.tracking_uri:
            mlflow.set_tracking_uri(settings.tracking_uri)
        experiment = mlflow.set_experiment(settings.experiment or who.experiment_name)
        self._id = self._find_run(experiment.experiment_id, str(who.trial_folder))
        if self._id:
            mlflow.start_run(run_id=self._id)
            return
        tags = {TRIAL_TAG: str(who.trial_folder), **(settings.tags or {})}
        self._id = mlflow.start_run(run_name=settings.name or who.trial_name, tags=tags).info.run_id
        options = flatten(who.config if settings.config is None else settings.config)
        mlflow.log_params({_clean_name(name): str(value)[:MAX_PARAMETER] for name, value in options.items()})

    def _find_run(self, experiment_id: str, trial: str) -> str:
        """Return the id of the run that an earlier attempt began, or ''."""
        found = self._mlflow.search_runs([experiment_id], output_format="list")
        return next((run.info.run_id for run in found if run.data.tags.get(TRIAL_TAG) == trial), "")

    def log(self, step: int, scalars: Scalars) -> None:
        numbers = {_clean_name(name): float(value) for name, value in _select_numbers(scalars).items()}
        self._mlflow.log_metrics(numbers, step=step, synchronous=False)

    def close(self) -> None:
        self._mlflow.flush_async_logging()
        self._mlflow.end_run()

    def state(self) -> dict[str, Any]:
        return {"id": self._id}


class TrackioWriter:
    """Trackio; all attempts of a trial share one run. `settings` is the section `stats_logger.trackio`."""

    def __init__(self, who: RunIdentity, settings: Any) -> None:
        os.environ["TRACKIO_DIR"] = str(settings.logdir or who.trial_folder / "trackio")  # read by the import
        if settings.mode == "local":
            for name in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):  # they would send the metrics elsewhere
                os.environ.pop(name, None)
        self._trackio = _import_package("trackio", "stats_logger.trackio.mode", settings.mode)
        self._trackio.init(
            project=settings.project or who.experiment_name,
            name=settings.name or who.trial_name,
            space_id=settings.space_id,
            config=dict(who.config) if settings.config is None else settings.config,
            resume="allow",
            embed=False,  # in no notebook
        )

    def log(self, step: int, scalars: Scalars) -> None:
        self._trackio.log(_select_numbers(scalars), step=step)

    def close(self) -> None:
        self._trackio.finish()

    def state(self) -> dict[str, Any]:
        return {}


# section of `stats_logger` -> its writer
SERVICES: dict[str, Callable[..., MetricsWriter]] = {
    "wandb": WandBWriter,
    "swanlab": SwanlabWriter,
    "mlflow": MLflowWriter,
    "trackio": TrackioWriter,
}


def _import_package(package: str, option: str, value: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        why = f"needs {package}, which is not installed ({error})"
        use = f"`pip install 'hpc-rl[{package}]'`, or set it to disabled"
        raise ConfigError(Refusal(option=option, value=value, kind=Kind.MACHINE, why=why, use=use)) from error


def _clean_name(name: str) -> str:
    """Return a name that MLflow accepts, as `eval_pass_8` for `eval_pass@8`."""
    return re.sub(r"[^\w\-. :/]", "_", name)


def _select_numbers(scalars: Scalars) -> dict[str, float | int]:
    return {
        name: value for name, value in scalars.items() if isinstance(value, (int, float)) and name != "time"
    }


def open_writers(
    metrics: Path,
    tensorboard: Path,
    start_step: int = 0,
    who: RunIdentity | None = None,
    stats_logger: Any = None,
) -> MetricsWriters:
    """Open the writers of an incarnation that continues from `start_step`.

    These are JSON lines, TensorBoard if it is installed, and the services in `stats_logger` that are not
    disabled. Raises ConfigError if the package of a service is missing.
    """
    writers: list[MetricsWriter] = [JsonlWriter(metrics)]
    try:
        writers.append(TensorBoardWriter(tensorboard, start_step))
    except ImportError as error:
        logger.warning(
            "the trial writes no TensorBoard files, because tensorboard is not installed: %s", error
        )
    opened = MetricsWriters(writers, stats_logger.every_steps if stats_logger else 1)
    try:
        for name, service in SERVICES.items():
            settings = getattr(stats_logger, name, None)
            if settings is not None and settings.mode != "disabled":
                writers.append(service(who, settings))
    except BaseException:
        opened.close()
        raise
    return opened
