"""RolloutClient: the trainer's synchronous requests to the rollout role, for batches and evaluations.

It finds the role by its lease and survives the role's restarts: if the role returns within `deadline_s`, the
caller only waits longer. The role repeats its answer for a step, so asking twice is harmless.
"""

import http.client
import json
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from hpc_rl.core import net
from hpc_rl.core.errors import RoleFailed, Stale
from hpc_rl.core.types import EvalResult, decode
from hpc_rl.name_resolve import keys
from hpc_rl.name_resolve.shared_fs import NameResolve

logger = logging.getLogger(__name__)

RETRY_S = 0.2  # between two searches for a missing role
SCORED_HEADER = "X-Hpc-Rl-Scored"  # with the answer 204 of an evaluation: its number of scored prompts
NOT_YET = (0, 425, 503)  # unreachable; does not see the record of our lineage yet; is shutting down


@dataclass
class RolloutClient:
    """Used by rank 0: the other ranks get a batch by their own network. Not for several threads at once."""

    names: NameResolve
    tokens: dict[str, str]
    deadline_s: float = 600.0  # longest absence of the role before RoleFailed
    poll_s: float = 2.0  # longest time that the role holds a request; also the delay until `stopping` is seen
    _connection: http.client.HTTPConnection | None = None
    _away_since: float | None = None
    _scored: str = ""  # number of scored prompts of the evaluation
    _on_progress: Callable[[], None] = lambda: None

    def batch_bytes(
        self,
        step: int,
        lineage: int,
        stopping: threading.Event | None = None,
        within_s: float = math.inf,
        version: int | None = None,
    ) -> bytes | None:
        """Return the encoded batch `step` for a trainer at version step-1 of `lineage`; None when stopped.

        With `version` step-2 the trainer asks early, before it has trained on the batch of the step before.

        Also None if the attempt ends before the batch can be made. Raises Stale if a trainer of a later
        lineage has already asked, RoleFailed if the role stays away or can't answer, TimeoutError if the
        batch is not ready within_s: ask again.
        """
        path = f"/batch?step={step}&lineage={lineage}&wait_s={self.poll_s}"
        path += "" if version is None else f"&version={version}"
        return self._wait_for_answer("GET", path, None, stopping, within_s)

    def evaluate(
        self,
        label: str,
        trainer: str,
        name: str = "",
        together: Sequence[str] = (),
        stopping: threading.Event | None = None,
        on_progress: Callable[[], None] = lambda: None,
        within_s: float = math.inf,
    ) -> EvalResult | None:
        """Return the evaluation of a held-out set by the weights `label`; None if `stopping` was set.

        `trainer` is the trainer's own version. The sets in `together` begin too. `on_progress` is called when
        more prompts are scored. Raises the same as batch_bytes.
        """
        payload: dict[str, Any] = {"version": label, "set": name, "together": list(together)}
        payload |= {"trainer": trainer, "wait_s": self.poll_s}
        self._on_progress, self._scored = on_progress, ""
        body = self._wait_for_answer("POST", "/evaluate", payload, stopping, within_s)
        return None if body is None else decode(body)

    def retain(self, step: int) -> None:
        """Report that batches up to `step` can be deleted. An absent role gets the next report."""
        try:
            self._request("POST", "/retain", {"step": step})
        except (OSError, http.client.HTTPException, LookupError) as error:
            form = "the rollout role does not answer, so old batches up to %d are deleted only later: %s"
            logger.info(form, step, error)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _wait_for_answer(
        self,
        method: str,
        path: str,
        payload: dict[str, Any] | None,
        stopping: threading.Event | None,
        within_s: float = math.inf,
    ) -> bytes | None:
        until = time.monotonic() + within_s
        while stopping is None or not stopping.is_set():
            if time.monotonic() > until:
                raise TimeoutError(f"no answer to {path} within {within_s:g} s")
            try:
                status, body = self._request(method, path, payload)
            except (OSError, http.client.HTTPException, LookupError) as error:
                status, body = 0, str(error).encode()
            if status in NOT_YET:
                self._is_away(body.decode(errors="replace"))
                time.sleep(RETRY_S)
                continue
            self._away_since = None
            if status == 200:
                return body
            if status == 205:  # the attempt ends before the batch can be made
                return None
            if status == 409:
                raise Stale(body.decode(errors="replace"))
            if status != 204:
                asked, reason = path.partition("?")[0], body.decode(errors="replace")
                raise RoleFailed(
                    f"the rollout role refused the request {asked} with status {status}: {reason}"
                )
        return None

    def _is_away(self, why: str) -> None:
        now = time.monotonic()
        if self._away_since is None:
            logger.warning("the rollout role does not answer (%s); the trainer waits for it", why)
            self._away_since = now
        if now - self._away_since > self.deadline_s:
            raise RoleFailed(
                f"the rollout role did not answer the trainer for {self.deadline_s:.0f} s: {why}"
            )

    def _request(self, method: str, path: str, payload: dict[str, Any] | None) -> tuple[int, bytes]:
        data = None if payload is None else json.dumps(payload).encode()
        headers = {"Authorization": f"Bearer {self.tokens['control']}", "Content-Type": "application/json"}
        try:
            if self._connection is None:
                seen = self.names.list_leases(keys.ROLLOUT).get(keys.ROLLOUT)
                if seen is None or not seen.alive:
                    raise LookupError("the rollout role has no current heartbeat")
                url = urlsplit(seen.value["url"])
                timeout_s = self.poll_s + 60.0
                self._connection = _connect(url.hostname or "", url.port, timeout_s)
            self._connection.request(method, path, data, headers)
            response = self._connection.getresponse()
            scored = response.headers.get(SCORED_HEADER, "")
            if scored != self._scored:
                self._scored = scored
                self._on_progress()
            return response.status, response.read()
        except (OSError, http.client.HTTPException):
            self.close()
            raise


def _connect(host: str, port: int | None, timeout_s: float) -> http.client.HTTPConnection:
    """Return a connection that fails soon if the host of the rollout role is lost. Raises OSError."""
    connection = http.client.HTTPConnection(host, port, timeout=net.SILENCE_S)
    connection.connect()
    net.notice_silence(connection.sock)
    connection.sock.settimeout(timeout_s)
    return connection
