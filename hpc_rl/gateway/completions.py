"""Completions in progress: cut into slices for streams and stop strings, and put together again.

Servers get token ids only. Stop strings are looked for here, in the decoded text, so they work with every
server and end at the same token. A completion with stop strings is made in slices: each continues from the
tokens of the previous one.
"""

import bisect
import uuid
from collections.abc import Sequence

from hpc_rl.core.types import Turn
from hpc_rl.datasets.tokenizer import Tokenizer
from hpc_rl.gateway.requests import PromptOrder
from hpc_rl.servers.client import GenerateRequest, append_spans

BROKEN = "\ufffd"  # the decoded form of a character whose bytes are incomplete


class Completion:
    """One completion: its tokens so far, from one or several slices."""

    def __init__(self, order: PromptOrder, index: int, number: int, tokenizer: Tokenizer) -> None:
        self.order, self.index = order, index  # in the answer
        self.turn = Turn([], [], [], "")
        self.matched: int | str | None = None
        self.text = ""
        self.rid = uuid.uuid4().hex
        self._number = number  # among the completions of its prompt
        self._tokenizer = tokenizer

    @property
    def done(self) -> bool:
        return bool(self.turn.finish_reason)

    def request(self, max_tokens: int | None) -> GenerateRequest:
        """Return the request for the next slice; None asks for all the rest."""
        num_made, sampling = len(self.turn.output_ids), dict(self.order.sampling)
        left = sampling["max_new_tokens"] - num_made
        sampling["max_new_tokens"] = left if max_tokens is None else min(left, max_tokens)
        if "min_new_tokens" in sampling:
            least = max(0, sampling["min_new_tokens"] - num_made)
            sampling["min_new_tokens"] = min(least, sampling["max_new_tokens"])
        if "sampling_seed" in sampling:
            sampling["sampling_seed"] += self._number
        return GenerateRequest(self.order.input_ids + self.turn.output_ids, sampling, self.rid)

    def absorb(self, slice_: Turn) -> None:
        """Append a slice; end the completion at its end, at a stop string, or at its limit."""
        turn, before = self.turn, len(self.turn.output_ids)
        turn.output_ids += slice_.output_ids
        turn.output_logprobs += slice_.output_logprobs
        append_spans(turn.versions, slice_.versions, before)
        full = len(turn.output_ids) >= self.order.sampling["max_new_tokens"] or not slice_.output_ids
        if slice_.finish_reason == "stop":
            turn.finish_reason = "stop"
            ends = turn.output_ids[-1:]
            self.matched = ends[0] if set(ends) & set(self.order.sampling.get("stop_token_ids", ())) else None
        elif full:
            turn.finish_reason = "length"
        self.text = self._decode(len(turn.output_ids))
        self._cut_at_stop(before)
        if isinstance(self.matched, int) and self.order.trims_stop:
            self.text = self._decode(len(turn.output_ids) - 1)

    def find_stable_text(self) -> str:
        """Return the text that further tokens can't change: no half character, no start of a stop string."""
        if self.done:
            return self.text
        text = self.text.rstrip(BROKEN)
        held = max((_count_overlap(text, stop) for stop in self.order.stops), default=0)
        return text[: len(text) - held]

    def _cut_at_stop(self, before: int) -> None:
        stops, ids = self.order.stops, self.turn.output_ids
        if _find_first_stop(self.text, stops) is None:
            return
        sizes = range(before + 1, len(ids) + 1)
        size = sizes[
            bisect.bisect_left(sizes, True, key=lambda k: bool(_find_first_stop(self._decode(k), stops)))
        ]
        self.text = self._decode(size)
        at, stop = _find_first_stop(self.text, stops) or (len(self.text), "")
        if self.order.trims_stop:
            self.text = self.text[:at]
        turn = self.turn
        del turn.output_ids[size:], turn.output_logprobs[size:]
        turn.versions = [
            (label, start, min(end, size)) for label, start, end in turn.versions if start < size
        ]
        turn.finish_reason, self.matched = "stop", stop

    def _decode(self, size: int) -> str:
        return self._tokenizer.decode(self.turn.output_ids[:size], self.order.skips_special)


def _find_first_stop(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    return min(((at, stop) for stop in stops if (at := text.find(stop)) >= 0), default=None)


def _count_overlap(text: str, stop: str) -> int:
    """Return how many characters at the end of the text are the start of the stop string."""
    return next((size for size in range(min(len(text), len(stop)), 0, -1) if text.endswith(stop[:size])), 0)
