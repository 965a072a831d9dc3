"""Notes about sampling options that the loss does not account for.

The trainer computes log-probabilities of the whole distribution at the sampling temperature. Servers return
the same values if only the temperature changes the distribution. With top_p, top_k and min_p they still
return these values, but sample from a part of the distribution. Penalties change the returned values.
"""

from collections.abc import Iterator

from hpc_rl.config.options.experiment import GRPOConfig
from hpc_rl.config.options.inference import GenerationHyperparameters
from hpc_rl.config.rules.consistency import find_server_backend
from hpc_rl.core.refusal import Refusal, make_note

_CUT_OFF = ("top_p", "top_k", "min_p")
_PENALTIES = ("repetition_penalty", "frequency_penalty")
_USE = "eval_gconfig may have it, so that only evaluations sample so"


def list_notes(config: GRPOConfig) -> Iterator[Refusal]:
    neutral, sampling = GenerationHyperparameters(), config.gconfig
    backend = find_server_backend(config) or "generation"
    for name in (*_CUT_OFF, *_PENALTIES):
        value, unused = getattr(sampling, name), getattr(neutral, name)
        if value == unused:
            continue
        if name in _PENALTIES:
            why = (
                f"{backend} servers return log-probabilities with the penalty, and the trainer computes them "
                "without: the ratio of the loss is not 1 even for the policy that generated"
            )
        else:
            why = "tokens are sampled from a part of the distribution, and the loss takes them for all of it"
        why = f": {why}; use {unused:g} to train, {_USE}"
        yield make_note(f"gconfig.{name}", why, value=f"{value:g}", is_warning=True)
