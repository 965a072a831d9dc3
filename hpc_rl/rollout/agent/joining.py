"""Joins the calls of an episode into token sequences. Pure.

A call whose prompt begins with the prompt and the completion of an earlier one continues that call. So the
calls form trees, and each path from a first call to a last one is a sequence. Where a conversation branches,
several sequences share a beginning: its completions are trained on in the first of them, and are context in
the others.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from hpc_rl.core.types import Trajectory, Turn
from hpc_rl.rollout.workflow import trajectory


@dataclass(slots=True, eq=False)
class Call:
    """One completion that an agent got, sampled with `temperature`."""

    input_ids: list[int]
    turn: Turn
    temperature: float

    @property
    def ids(self) -> list[int]:
        """The tokens of prompt and completion."""
        return self.input_ids + self.turn.output_ids


@dataclass(slots=True)
class CallSequence:
    """Calls of which each continues the one before, and whether each is trained on in this sequence."""

    calls: list[Call]
    trained: list[bool]


def join_calls(calls: Iterable[Call]) -> list[CallSequence]:
    """Return the sequences of an episode's calls, given in the order of their ends.

    Calls without a token are left out. Each other call is trained on in exactly one sequence.
    """
    made = [call for call in calls if call.turn.output_ids]
    parents = _find_parents(made)
    inner = set(parents.values())
    sequences, trained = [], set[int]()
    for last in range(len(made)):
        if last in inner:
            continue
        path = [last]
        while path[-1] in parents:
            path.append(parents[path[-1]])
        path.reverse()
        sequences.append(CallSequence([made[at] for at in path], [at not in trained for at in path]))
        trained.update(path)
    return sequences


def _find_parents(calls: Sequence[Call]) -> dict[int, int]:
    """Return the number of the call that each call continues: the longest, and of equal ones the latest."""
    known: dict[int, dict[bytes, int]] = {}  # length -> tokens -> number of the call
    parents: dict[int, int] = {}
    for number in sorted(range(len(calls)), key=lambda number: (len(calls[number].input_ids), number)):
        call = calls[number]
        tokens = np.asarray(call.ids, np.int32)
        for length in sorted((one for one in known if one <= len(call.input_ids)), reverse=True):
            found = known[length].get(tokens[:length].tobytes())
            if found is not None:
                parents[number] = found
                break
        known.setdefault(len(tokens), {})[tokens.tobytes()] = number
    return parents


def make_trajectory(sequence: CallSequence, reward: float, temperature: float) -> Trajectory:
    """Return the trajectory of a sequence. `temperature` is the trial's."""
    turns, end = [], 0
    for call in sequence.calls:
        turns.append((call.input_ids[end:], call.turn))
        end = len(call.input_ids) + len(call.turn.output_ids)
    made = trajectory(turns, reward)
    temperatures = np.full(len(made.ids), temperature, np.float32)
    for call, trained in zip(sequence.calls, sequence.trained, strict=True):
        first = len(call.input_ids)
        last = first + len(call.turn.output_ids)
        if trained:
            temperatures[first:last] = call.temperature
            continue
        made.loss_mask[first:last] = False
        made.logprobs[first:last] = 0.0
        made.lineages[first:last] = made.steps[first:last] = -1
    if (temperatures != np.float32(temperature)).any():
        made.temperatures = temperatures
    return made
