"""Failures: what an end comes of, and what is done about it. One table, pure functions.

Slurm's FAILED says nothing and srun's code little, so the class comes from the exit record of the process itself, then from
what srun and the node said in the log, then from the code. What happens to the whole attempt is recover.py's to say.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hpc_rl.errors import ExitCode, FailureClass

FINAL_CODES = (
    ExitCode.BAD_CONFIG,
    ExitCode.REFUSED,
    ExitCode.NOTHING_TO_RESUME,
)  # no second try changes them


@dataclass(frozen=True)
class Policy:
    """What follows from a failure of one class.

    Args:
        then: `restart` the role in place, `requeue` the job to get other nodes, or `end` and wait for a person.
        counts: It uses up `recover.retries`; a new generation gives them all back.
        most: Tries at most without a new generation, where `recover.retries` allows more.
        exclude_nodes: The nodes that it happened on are avoided for a while.
        pause_s: Before each restart in place; null: the longer the more failures there were.
        advice: What a person has to do once it has come to that.
    """

    then: Literal["restart", "requeue", "end"]
    counts: bool
    advice: str
    most: int | None = None
    exclude_nodes: bool = False
    pause_s: float | None = None


GO_ON = (
    "then `hpc-rl recover` goes on from the newest generation, or `hpc-rl submit` begins where there is none"
)
POLICIES: dict[FailureClass, Policy] = {
    FailureClass.USER: Policy(
        "end", True, f"the same would happen again: correct the configuration or the code, {GO_ON}"
    ),
    FailureClass.DATA: Policy(
        "end", True, f"the same would happen again: look at the data, the workflow and the reward, {GO_ON}"
    ),
    FailureClass.OUT_OF_MEMORY: Policy(
        "restart",
        True,
        f"give it more memory, or make its batches smaller (max_tokens_per_mb), {GO_ON}",
        most=1,
    ),
    FailureClass.NODE: Policy(
        "requeue", True, f"ask the administrators about the nodes, {GO_ON}", exclude_nodes=True
    ),
    FailureClass.INFRASTRUCTURE: Policy("restart", True, f"look for the cause in the logs, {GO_ON}"),
    FailureClass.DISK_FULL: Policy(
        "restart", False, f"make room where the trial lies, {GO_ON}", pause_s=20.0
    ),
    FailureClass.PREEMPTION: Policy("requeue", False, "nothing: the scheduler starts it again"),
    FailureClass.WALL_TIME: Policy("requeue", False, "nothing: it goes on where it stopped"),
    FailureClass.UNKNOWN: Policy("restart", True, f"look for the cause in the logs, {GO_ON}"),
}


@dataclass(frozen=True)
class End:
    """How one incarnation of a unit ended; codes of deaths by signal are 128 + signal. `nodes` are those to blame."""

    code: int
    reason: str
    failure: FailureClass = FailureClass.UNKNOWN
    nodes: tuple[str, ...] = ()
    final: bool = False  # the role itself says that a further start would end the same way

    @property
    def by_signal(self) -> bool:
        return self.code > 128

    @property
    def policy(self) -> Policy:
        return POLICIES[self.failure]


def is_failure(code: int) -> bool:
    """Whether an end uses up the retry budget."""
    return code not in (ExitCode.DONE, ExitCode.STOPPED)


# What srun, slurmstepd, the kernel and PyTorch write where a process was ended for its memory or its node died.
_MEMORY = re.compile(
    r"exceeded (?:job |step )?memory limit|memory limit at some point|oom[-_ ]?kill|out[ -]of[ -]memory|OutOfMemory",
    re.IGNORECASE,
)
_NODE = re.compile(
    r"node failure on (?P<list>[\w.\[\],-]+)|CANCELLED AT \S+ DUE TO NODE FAILURE"
    r"|launch (?:for|of) .* failed on node (?P<launch>[\w.-]+)|(?:requested )?node configuration is not available"
    r"|(?:nodes? .*?|requested nodes are )(?:down|not responding|busy or down)",
    re.IGNORECASE,
)


def classify(end: End, said: Sequence[str]) -> End:
    """The end with its class, from its code and from the lines that its launcher and its processes left; the line is named."""
    if not is_failure(end.code) or end.final or end.failure is not FailureClass.UNKNOWN:
        return end
    if end.code in FINAL_CODES:
        return End(end.code, end.reason, FailureClass.USER)
    for line in said:
        if _MEMORY.search(line):
            return End(
                end.code, f"killed for using too much memory ({line.strip()})", FailureClass.OUT_OF_MEMORY
            )
    for line in said:
        if found := _NODE.search(line):
            nodes = tuple(name for name in found.groups() if name)
            return End(end.code, f"lost its node ({line.strip()})", FailureClass.NODE, nodes)
    if end.code == ExitCode.CANNOT_WRITE:
        return End(end.code, end.reason, FailureClass.DISK_FULL)
    return end


def class_of(record: dict[str, Any]) -> FailureClass:
    """The class that a process put on its exit record; unknown where it put none, or one of a later version."""
    try:
        return FailureClass(record.get("class", ""))
    except ValueError:
        return FailureClass.UNKNOWN
