"""Slurm's words for what a job does, base states and the flags that hide them, and what each means to a trial."""

from __future__ import annotations

from hpc_rl.schedulers.base import State

# long name, short name, meaning. COMPLETING and the other transitional words still hold nodes, so they run.
_TABLE = [
    ("PENDING", "PD", State.PENDING),
    ("RUNNING", "R", State.RUNNING),
    ("SUSPENDED", "S", State.RUNNING),
    ("COMPLETED", "CD", State.DONE),
    ("CANCELLED", "CA", State.CANCELLED),
    ("FAILED", "F", State.FAILED),
    ("OUT_OF_MEMORY", "OOM", State.OUT_OF_MEMORY),
    ("TIMEOUT", "TO", State.TIMEOUT),
    ("DEADLINE", "DL", State.TIMEOUT),
    ("NODE_FAIL", "NF", State.NODE_FAIL),
    ("BOOT_FAIL", "BF", State.NODE_FAIL),
    ("PREEMPTED", "PR", State.PREEMPTED),
    ("COMPLETING", "CG", State.RUNNING),
    ("CONFIGURING", "CF", State.PENDING),
    ("POWER_UP_NODE", "", State.PENDING),
    ("RECONFIG_FAIL", "", State.NODE_FAIL),
    ("LAUNCH_FAILED", "", State.PENDING),
    ("REQUEUED", "RQ", State.PENDING),
    ("REQUEUE_HOLD", "RH", State.PENDING),
    ("SPECIAL_EXIT", "SE", State.PENDING),
    ("REQUEUE_FED", "RF", State.PENDING),
    ("REVOKED", "RV", State.CANCELLED),
    ("RESV_DEL_HOLD", "RD", State.PENDING),
    ("EXPEDITING", "", State.PENDING),
    ("RESIZING", "RS", State.RUNNING),
    ("SIGNALING", "SI", State.RUNNING),
    ("STAGE_OUT", "SO", State.RUNNING),
    ("STOPPED", "ST", State.RUNNING),
    ("UPDATE_DB", "", State.RUNNING),
]
STATES = {name: state for long, short, state in _TABLE for name in (long, short) if name}


def parse(native: str) -> State:
    """`CANCELLED by 1000` and `COMPLETED+` are read too; a word that no table has is UNKNOWN."""
    words = native.split()
    return STATES.get(words[0].rstrip("+").upper(), State.UNKNOWN) if words else State.UNKNOWN
