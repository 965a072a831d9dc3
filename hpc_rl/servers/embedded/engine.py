"""The embedded engine: continuous batching in one thread.

Waiting sequences are prefilled together and join the rows that are decoded. Finished rows leave and the last
rows take their places, so a step only computes live rows. Samples of one prompt share its prefill. Commands
(pause, update, abort) run between steps. backend.py handles HTTP requests, decoder.py tensors.
"""

import array
import collections
import logging
import threading
import time
import traceback
from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch

from hpc_rl.core.proc import trim_memory
from hpc_rl.servers.embedded.changes import PreparedChanges
from hpc_rl.servers.embedded.decode_batch import DecodeBatch, Sequence
from hpc_rl.servers.embedded.model import Model
from hpc_rl.servers.embedded.sampler import draw_uniforms, sample
from hpc_rl.servers.wire import SamplingParams

logger = logging.getLogger(__name__)

MAX_PREFILL_TOKENS = 8192  # padded, per step: limits the pause of running rows
MAX_STOP_SETS = 64  # distinct sets of stop tokens that are kept while nothing runs


class EmbeddedEngine:
    """The engine thread. Call start() first; submit() and command() may be called from any thread.

    After the start, only this thread uses the model. It calls `deliver` with the sequences that finished in a
    step. It decodes at most `max_running` rows at once; with `batch_invariant` each row separately, in a
    cache whose shape depends only on the row's length. `pace` returns the least seconds of a step, by its
    rows, for tests.
    """

    def __init__(
        self,
        model: Model,
        version: str,
        deliver: Callable[[list[Sequence]], None],
        max_running: int = 256,
        batch_invariant: bool = False,
        pace: Callable[[int], float] | None = None,
    ) -> None:
        self.model, self.version, self._pace = model, version, pace
        self.max_running, self.batch_invariant = max_running, batch_invariant
        self.paused: str | None = None  # the mode
        self.failure = ""
        self.num_tokens = 0  # sampled since the start
        self._deliver = deliver
        self._waiting: collections.deque[Sequence] = collections.deque()
        self._batches: list[DecodeBatch] = []
        self._commands: collections.deque[tuple[Callable[[], Any], Future[Any]]] = collections.deque()
        self._inbox: collections.deque[Sequence] = collections.deque()
        self._wake = threading.Event()
        self._stop = False
        self._donors: dict[bytes, Sequence] = {}
        self._finished: list[Sequence] = []
        self._stop_sets: dict[tuple[int, ...], int] = {}
        self._stop_table = torch.zeros(0, model.vocab_size, dtype=torch.bool)
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def alive(self) -> bool:
        return self._thread.is_alive()

    def stop(self, timeout_s: float = 10.0) -> None:
        self._stop = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def submit(self, sequences: list[Sequence]) -> None:
        self._inbox.extend(sequences)
        self._wake.set()

    def load(self) -> dict[str, int]:
        """Return the numbers of running and waiting sequences; approximate while the engine works."""
        return {
            "running": sum(len(batch) for batch in self._batches),
            "waiting": len(self._waiting) + len(self._inbox),
        }

    def command(self, call: Callable[[], Any]) -> Future[Any]:
        """Call one of the commands below between two steps, in the engine's thread."""
        future: Future[Any] = Future()
        if self.failure:
            future.set_exception(RuntimeError(f"the engine has failed: {self.failure}"))
            return future
        self._commands.append((call, future))
        self._wake.set()
        return future

    # commands
    def pause(self, mode: str) -> None:
        self._queue_newcomers()
        self.paused = mode
        if mode == "abort":
            self.abort(lambda _sequence: True, "aborted by pause_generation")
        elif mode == "retract":
            self._retract()

    def resume(self) -> None:
        self.paused = None

    def _retract(self) -> None:
        """Move running sequences back to the head of the queue, in order, without their cache."""
        back = []
        for batch in self._batches:
            for row in range(len(batch)):
                sequence = batch.collect(row, self.version)
                sequence.num_retractions += 1
                sequence.row = -1
                back.append(sequence)
        self._waiting.extendleft(reversed(back))
        self._batches.clear()
        self._donors.clear()

    def update(
        self, path: str, version: str | None, keep_cache: bool, changes: PreparedChanges | None = None
    ) -> None:
        """Load weights, by their changes if these are of the version in use.

        If it raises OSError or ValueError, the old weights stay loaded.
        """
        start = time.monotonic()
        if (
            changes is not None
            and (changes.base is None or str(changes.base) == self.version)
            and self.model.apply(changes)
        ):
            source = f"changes since {changes.base}" if changes.base else f"its published values in {path}"
        else:
            self.model.load(path)
            source = path
        self._enter_version(version, keep_cache)
        form = "the server has loaded weights %s from %s in %.3f s"
        logger.info(form, self.version, source, time.monotonic() - start)

    def release_memory(self) -> None:
        """Drop the weights and the cache of a paused engine, until the next update."""
        self._retract()
        self.model.release()
        trim_memory()

    def finish_writing(self, version: str | None, keep_cache: bool) -> None:
        """Give the version to weights that `model.write` has overwritten."""
        self.model.finish_writing()
        self._enter_version(version, keep_cache)

    def _enter_version(self, version: str | None, keep_cache: bool) -> None:
        if keep_cache:
            for batch in self._batches:
                for row in range(len(batch)):
                    batch.close_span(row, self.version)
        else:
            self._retract()
        self._donors.clear()
        if version is not None:
            self.version = version

    def collect(self, sequences: Collection[Sequence]) -> None:
        """Move the tokens so far of these running sequences from their rows into them."""
        for batch in self._batches:
            for row, sequence in enumerate(batch.sequences):
                if sequence in sequences:
                    batch.collect(row, self.version)

    def abort(self, match: Callable[[Sequence], bool], message: str) -> int:
        """End the matching sequences; return their number."""
        self._queue_newcomers()
        reason = {"type": "abort", "message": message}
        going = dict.fromkeys(filter(match, self._waiting))
        self._waiting = collections.deque(sequence for sequence in self._waiting if sequence not in going)
        for batch in self._batches:
            leaving = [row for row, sequence in enumerate(batch.sequences) if match(sequence)]
            going |= dict.fromkeys(batch.collect(row, self.version) for row in leaving)
            batch.leave(leaving)
        self._batches = [batch for batch in self._batches if len(batch)]
        for sequence in going:
            self._finish(sequence, reason)
        return len(going)

    # the thread
    def _main(self) -> None:
        try:
            with torch.inference_mode():
                while not self._stop:
                    if not self._step():
                        self._wake.wait()
                        self._wake.clear()
        except Exception as error:  # any error ends the thread, so record it for callers
            self.failure = f"{type(error).__name__}: {error}"
            logger.error("the embedded engine has failed, so the server stops:\n%s", traceback.format_exc())
        self._end()

    def _end(self) -> None:
        self._queue_newcomers()
        for sequence in [*self._waiting, *(s for batch in self._batches for s in batch.sequences)]:
            self._finish(sequence, {"type": "abort", "message": self.failure or "the server stops"})
        self._flush()
        while self._commands:
            self._commands.popleft()[1].set_exception(RuntimeError(self.failure or "the server stops"))

    def _step(self) -> bool:
        """Run commands, admit new sequences, decode one token per row. Returns False if idle."""
        while self._commands:
            self._execute_command(*self._commands.popleft())
        self._queue_newcomers()
        if self.paused or not (self._waiting or self._batches):
            self._flush()
            return bool(self._commands)
        begun = time.monotonic()
        self._admit()
        least_s = self._pace(sum(map(len, self._batches))) if self._pace is not None else 0.0
        for batch in self._batches:
            self._decode(batch)
        if least_s:
            time.sleep(max(0.0, begun + least_s - time.monotonic()))
        self._batches = [batch for batch in self._batches if len(batch)]
        self._flush()
        return True

    def _execute_command(self, call: Callable[[], Any], future: Future[Any]) -> None:
        try:
            result = call()
        except (OSError, ValueError) as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    def _queue_newcomers(self) -> None:
        while self._inbox:
            sequence = self._inbox.popleft()
            if sequence.params.max_new_tokens == 0:
                self._finish(sequence, {"type": "length", "length": 0})
            else:
                self._waiting.append(sequence)

    def _flush(self) -> None:
        if self._finished:
            finished, self._finished = self._finished, []
            self._deliver(finished)

    def _finish(self, sequence: Sequence, reason: dict[str, Any]) -> None:
        sequence.finish = reason
        if self._donors.get(sequence.prompt_key) is sequence:
            del self._donors[sequence.prompt_key]
        self._finished.append(sequence)

    # newcomers
    def _admit(self) -> None:
        if not self._batches and len(self._stop_sets) > MAX_STOP_SETS:
            self._stop_sets.clear()
            self._stop_table = self._stop_table[:0]
        room = self.max_running - sum(len(batch) for batch in self._batches)
        fresh: dict[bytes, list[Sequence]] = {}
        shared: list[Sequence] = []
        longest, joining = 0, 0
        while self._waiting and joining < room:
            sequence = self._waiting[0]
            if sequence.cancelled:
                self._finish(self._waiting.popleft(), {"type": "abort", "message": "the client has gone"})
                continue
            sequence.prompt_key = array.array("i", sequence.ids + sequence.tokens).tobytes()
            new = sequence.prompt_key not in fresh
            if self.batch_invariant:
                self._batches.append(DecodeBatch(self.model, exact=True))
                self._prefill(self._batches[-1], {sequence.prompt_key: [sequence]})
            elif new and sequence.prompt_key in self._donors:
                shared.append(sequence)
            else:
                length = len(sequence.prompt_key) // 4
                if new and fresh and (len(fresh) + 1) * max(longest, length) > MAX_PREFILL_TOKENS:
                    break
                longest = max(longest, length) if new else longest
                fresh.setdefault(sequence.prompt_key, []).append(sequence)
            self._waiting.popleft()
            joining += 1
        if shared:
            self._share(self._batches[0], shared)
        if fresh:
            if not self._batches:
                self._batches.append(DecodeBatch(self.model, exact=False))
            for bucket in _make_buckets(fresh):
                self._prefill(self._batches[0], bucket)

    def _share(self, batch: DecodeBatch, sequences: list[Sequence]) -> None:
        """Copy the prompts' cache from running samples, without the last token, which the next step feeds."""
        first, donors = len(batch), [self._donors[sequence.prompt_key].row for sequence in sequences]
        lengths = [len(sequence.prompt_key) // 4 for sequence in sequences]
        batch.reserve(first + len(sequences), max(lengths), 1)
        if max(lengths) > 1:
            batch.rows.copy(donors, list(range(first, first + len(sequences))), max(lengths) - 1)
        last = [sequence.tokens[-1] if sequence.tokens else sequence.ids[-1] for sequence in sequences]
        stops = [self._stop_set(one.params) for one in sequences]
        batch.join(sequences, stops, [length - 1 for length in lengths], last)

    def _prefill(self, batch: DecodeBatch, prompts: dict[bytes, list[Sequence]]) -> None:
        """Run one forward pass over distinct prompts; give each sequence a row and its first token."""
        keys = list(prompts)
        ids = [np.frombuffer(key, np.int32) for key in keys]
        lengths = np.array([len(row) for row in ids])
        padded = np.zeros((len(ids), lengths.max()), np.int64)
        for row, tokens in enumerate(ids):
            padded[row, : len(tokens)] = tokens
        logits, cache = self.model.decoder.prefill(torch.from_numpy(padded), torch.from_numpy(lengths))
        pick = [index for index, key in enumerate(keys) for _ in prompts[key]]
        sequences = [sequence for key in keys for sequence in prompts[key]]
        first = len(batch)
        limits = [s.params.max_new_tokens - len(s.tokens) for s in sequences]
        columns = int(lengths.max()) + (max(limits) if batch.exact else 16)
        batch.reserve(first + len(sequences), columns, max(limits) if batch.exact else 16, cache[0])
        expand = None if len(pick) == len(keys) else torch.tensor(pick)
        batch.rows.write(first, cache, expand)
        stops = [self._stop_set(one.params) for one in sequences]
        batch.join(sequences, stops, lengths[pick].tolist(), [0] * len(pick))
        if not batch.exact:
            self._donors.update((key, prompts[key][0]) for key in keys)
        self._accept(batch, first, logits if expand is None else logits[expand])

    # tokens
    def _decode(self, batch: DecodeBatch) -> None:
        num_rows = len(batch)
        if not num_rows:
            return
        state = batch.state[:num_rows]
        columns = batch.longest() + 1
        batch.reserve(num_rows, columns, int(state["made"].max()) + 1)
        ids, lengths = torch.from_numpy(state["pending"]), torch.from_numpy(state["length"])
        logits = self.model.decoder.decode(ids, lengths, batch.rows, columns)
        state["length"] += 1
        self._accept(batch, 0, logits)

    def _accept(self, batch: DecodeBatch, first: int, logits: torch.Tensor) -> None:
        """Sample the next token of the rows from `first` on; remove finished rows."""
        rows = slice(first, len(batch))
        state = batch.state[rows]
        early = state["made"] < state["least"]
        if early.any():
            at = torch.from_numpy(np.flatnonzero(early))
            stops = self._stop_table[torch.from_numpy(state["stop"][early])]
            logits[at] = logits[at].masked_fill(stops, float("-inf"))
        uniform = draw_uniforms(state["seed"], state["length"])
        tokens, logprobs = sample(logits, state["temperature"], state["top_k"], state["top_p"], uniform)
        made = state["made"]
        numbers = np.arange(first, first + len(tokens))
        batch.tokens[numbers, made] = tokens
        batch.logprobs[numbers, made] = logprobs
        made += 1
        self.num_tokens += len(tokens)
        state["pending"][:] = tokens
        stopped = self._stop_table.numpy()[state["stop"], tokens]
        ended = stopped | (made >= state["limit"])
        leaving = np.flatnonzero(ended)
        for index in leaving.tolist():
            sequence = batch.collect(first + index, self.version)
            if stopped[index]:
                self._finish(sequence, {"type": "stop", "matched": int(tokens[index])})
            else:
                self._finish(sequence, {"type": "length", "length": len(sequence.tokens)})
        batch.leave((leaving + first).tolist())

    def _stop_set(self, params: SamplingParams) -> int:
        """Return the row of the stop table for this request."""
        wanted = () if params.ignore_eos else (*params.stop_token_ids, *self.model.eos_ids)
        if wanted not in self._stop_sets:
            row = torch.zeros(1, self.model.vocab_size, dtype=torch.bool)
            row[0, [token for token in wanted if 0 <= token < self.model.vocab_size]] = True
            self._stop_table = torch.cat((self._stop_table, row))
            self._stop_sets[wanted] = len(self._stop_sets)
        return self._stop_sets[wanted]


def _make_buckets(prompts: dict[bytes, list[Sequence]]) -> list[dict[bytes, list[Sequence]]]:
    """Group prompts of similar length, so that padding costs less than another forward pass."""
    buckets: list[dict[bytes, list[Sequence]]] = []
    for key in sorted(prompts, key=len):
        shortest = len(next(iter(buckets[-1]))) if buckets else 0
        if not buckets or len(key) > 1.5 * shortest + 64:
            buckets.append({})
        buckets[-1][key] = prompts[key]
    return buckets
