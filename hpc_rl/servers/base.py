"""Backend: what generates behind the proxy. Implementations: embedded.py (in this process) and sglang.py (a subprocess)."""

from __future__ import annotations

from typing import Any, Protocol

Answer = tuple[int, Any]  # HTTP status and JSON body


class Backend(Protocol):
    """Requests are those of SGLang's native API; see proxy.py for the paths that arrive here."""

    async def start(self, path: str, version: str) -> None:
        """Load the checkpoint at `path` and be ready to generate. Raises ConfigError, RoleFailed, OSError."""

    async def request(self, path: str, body: dict[str, Any] | None) -> Answer:
        """POST `body` to `path`, or GET it where body is None. Never raises for what a client did wrong: that is a status."""

    def alive(self) -> str:
        """Empty while it lives, else why it does not."""

    async def stop(self) -> None:
        """End it; what is in flight is lost."""
