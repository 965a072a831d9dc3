"""Exports of a trial: the weights in Hugging Face format, with a model card, and their upload."""

from dataclasses import dataclass
from pathlib import Path

from hpc_rl.checkpoint.generation import Found
from hpc_rl.core.errors import ConfigError, ExitCode
from hpc_rl.core.trial import Trial
from hpc_rl.trials import hub
from hpc_rl.trials.checkpoints import Weights, choose_export
from hpc_rl.trials.conversion import write_export
from hpc_rl.trials.model_card import write_model_card


@dataclass(frozen=True)
class Export:
    """An export that is to be written to a new folder."""

    trial: Trial
    chosen: Weights
    folder: Path
    merge: bool = False
    repository: str = ""  # of Hugging Face's hub, as OWNER/NAME; empty for no upload
    is_private: bool = False  # a repository that is made

    @property
    def step(self) -> int:
        return self.chosen.step

    @property
    def version(self) -> str:
        """The version of the weights."""
        return self.chosen.version if isinstance(self.chosen, Found) else str(self.chosen)

    @property
    def title(self) -> str:
        """What is exported, for people."""
        if isinstance(self.chosen, Found):
            return f"checkpoint {self.step} of {self.trial}"
        return f"weights {self.chosen} of {self.trial}"

    def write(self) -> int:
        """Write the folder, and return an exit code: the reason of a failure is on standard error then.

        Raises CannotWrite, Damaged, NothingToResume.
        """

        def write_card(folder: Path) -> None:
            write_model_card(self.trial, self.step, self.version, folder, self.repository)

        return write_export(self.trial, self.chosen, self.folder, self.merge, write_card)

    def upload(self) -> str:
        """Upload the written folder; return its URL, or "" without a repository. Raises CannotWrite."""
        return hub.push(self.folder, self.repository, self.is_private) if self.repository else ""


def plan_export(
    trial: Trial,
    to: Path | None = None,
    *,
    step: int | None = None,
    best: str | None = None,
    label: str | None = None,
    merge: bool = False,
    push: str | None = None,
    private: bool = False,
) -> Export:
    """Choose the weights of an export, and check what can be checked before it is written.

    Args:
        trial: The trial.
        to: A new folder; None for one in the trial's directory.
        step: Of a checkpoint, or of published weights; None for the newest checkpoint.
        best: A metric: take the checkpoint with its largest value.
        label: A published version.
        merge: Merge the trained adapter of a checkpoint into the model.
        push: A repository of the hub, as OWNER/NAME.
        private: A repository that is made is private.

    Raises NothingToResume, TrialStateError, ConfigError.
    """
    if private and not push:
        raise ConfigError("--private needs --push: add --push OWNER/NAME, or remove --private")
    if push:
        hub.check_push(push)
    chosen = choose_export(trial, step, best, label)
    is_checkpoint = isinstance(chosen, Found)
    if merge and not is_checkpoint:
        raise ConfigError("--merge needs a checkpoint: give the step of one, see `hpc-rl checkpoint list`")
    name = f"checkpoint-{chosen.step:08d}" if is_checkpoint else f"weights-{chosen}"
    folder = (to or trial.exports / name).expanduser().absolute()
    return Export(trial, chosen, folder, merge, push or "", private)


def write_and_upload(export: Export) -> tuple[int, str]:
    """Write an export and upload it; return the exit code, and the URL or ""."""
    code = export.write()
    return (code, "") if code != ExitCode.DONE else (code, export.upload())
