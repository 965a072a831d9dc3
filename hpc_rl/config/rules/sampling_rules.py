"""Notes about sampling options that the loss does not account for.

The trainer computes log-probabilities of the whole distribution at the sampling temperature. Servers return
the same values if only the temperature changes the distribution. With top_p, top_k and min_p, SGLang and the
embedded engine still return these values, but sample from a part of the distribution; vLLM returns the values
of that part, so `lacks` in core/backends.py refuses them. Penalties and min_new_tokens change the returned
values on every backend that has them. `tests/helpers/conformance.py` shows this with real servers.
"""

from collections.abc import Iterator

from hpc_rl.config.options.experiment import GRPOConfig
from hpc_rl.config.options.inference import GenerationHyperparameters
from hpc_rl.config.rules.consistency import find_server_backend
from hpc_rl.core.algorithms import ALGORITHMS
from hpc_rl.core.refusal import Refusal, make_note

_USE = "and set it in eval_gconfig if only evaluations should have it"
_CUT_OFF = "servers sample from a part of the distribution, but the loss assumes the whole one"
_RATIO = "the probability ratio in the loss is then not 1 even without an update"
_PENALTY = (
    "{backend} servers return log-probabilities with the penalty, the trainer computes them without it: "
    f"{_RATIO}"
)
_NO_END = (
    "until the minimum, {backend} servers leave the end-of-sequence token out of log-probabilities, and the "
    f"trainer does not: {_RATIO}"
)
REASONS = {  # option of gconfig -> why the loss can't follow it
    "top_p": _CUT_OFF,
    "top_k": _CUT_OFF,
    "min_p": _CUT_OFF,
    "repetition_penalty": _PENALTY,
    "frequency_penalty": _PENALTY,
    "min_new_tokens": _NO_END,
}


def list_notes(config: GRPOConfig) -> Iterator[Refusal]:
    row = ALGORITHMS.get(config.actor.algorithm)
    if row is not None and row.sampled_by == "teacher":  # a cross-entropy has no ratio
        return
    neutral, sampling = GenerationHyperparameters(), config.gconfig
    backend = find_server_backend(config) or "generation"
    for name, reason in REASONS.items():
        value, unused = getattr(sampling, name), getattr(neutral, name)
        if value != unused:
            why = f": {reason.format(backend=backend)}; use {unused:g} to train {_USE}"
            yield make_note(f"gconfig.{name}", why, value=f"{value:g}", is_warning=True)
