"""The next steps of a trial: commands that a user may run now, as `hpc-rl status` shows them."""

import shlex

from hpc_rl.core.records import DoneRecord, JobRecord, TrialState
from hpc_rl.status.formatting import find_program_name, format_size
from hpc_rl.status.status_text import format_row
from hpc_rl.status.trial_status import TrialStatus
from hpc_rl.trials import trial_index


def describe_next_steps(status: TrialStatus) -> list[str]:
    lines = []
    if status.attempts and status.plan.get("purpose", "train") == "train":
        newest = "none yet" if status.generation is None else f"newest {status.generation}"
        lines.append(format_row("checkpoint", newest))
    if status.exports:
        lines.append(format_row("exports", f"{', '.join(status.exports[-3:])}  in {status.trial.exports}"))
    if status.weight_history is not None:
        lines.append(format_row("weights", str(status.weight_history)))
    done = DoneRecord.read(status.trial.done)
    if done is not None and done.freed_bytes and status.weight_history is None:
        stay = "the weights published for servers are removed; exports and checkpoints stay"
        lines.append(format_row("weights", f"{format_size(done.freed_bytes)} freed: {stay}"))
    for number, command in enumerate(suggest_commands(status)):
        lines.append(format_row("next" if number == 0 else "", command))
    return lines


def suggest_commands(status: TrialStatus) -> list[str]:
    if status.state is TrialState.RENDERED:
        return [f"ls {status.trial.scripts}"]
    if status.state in (TrialState.RUNNING, TrialState.PENDING):
        verbs = ["logs --follow", "cancel"]
    elif status.state is TrialState.STOPPING:
        verbs = ["logs --follow"]
    elif status.state is TrialState.DONE or status.generation is None:
        verbs = [find_failure_log(status)]
    else:
        verbs = [find_failure_log(status), "recover"]
    again = format_submission_command(status) if status.generation is None else ""
    if status.plan.get("purpose") == "serve" and status.state is TrialState.RUNNING:
        again = f"{find_program_name()} env urls {trial_index.format_name(status.trial)}"
    return [*trial_index.list_commands(status.trial, *verbs), *filter(None, [again])]


def format_submission_command(status: TrialStatus) -> str:
    """Return the command that starts a failed trial without a checkpoint; "" if no command does."""
    job = JobRecord.read(status.trial.job(status.jobs[-1].job_id)) if status.jobs else None
    failed = status.over and status.state is not TrialState.DONE
    # other modes refuse what there is of a trial
    if job is None or not failed or status.plan.get("recover_mode") != "auto":
        return ""
    if job.command[1:2] not in (("submit",), ("generate",), ("evaluate",), ("serve",)):
        return ""
    return shlex.join([find_program_name(), *job.command[1:]])


def find_failure_log(status: TrialStatus) -> str:
    """Return the command for the log of the role that ended the newest attempt."""
    roles = status.attempts[-1].roles if status.attempts else []
    failed = next((one for one in roles if one.gave_up and one.role in ("rollout", "environment")), None)
    if failed is None:  # without options it shows the trainer and the supervisor
        return "logs"
    return f"logs --role {failed.role}" + (f" --index {failed.index}" if failed.index else "")
