"""Logging: every line says which role, which rank and which host wrote it; the trial's tokens never appear."""

from __future__ import annotations

import logging
import socket
import sys


class _Redact(logging.Filter):
    def __init__(self, secrets: list[str]) -> None:
        super().__init__()
        self.secrets = secrets

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        if any(s in text for s in self.secrets):
            for secret in self.secrets:
                text = text.replace(secret, "***")
            record.msg, record.args = text, ()
        return True


def setup(role: str, rank: int | str = 0, secrets: list[str] | None = None, level: int = logging.INFO) -> None:
    """Send all logging to stderr with a `time role rank host` prefix."""
    handler = logging.StreamHandler(sys.stderr)
    host = socket.gethostname().split(".")[0]
    handler.setFormatter(logging.Formatter(f"%(asctime)s {role} {rank} {host} %(levelname)s %(message)s"))
    handler.addFilter(_Redact([s for s in secrets or [] if s]))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    for noisy in ("aiohttp.access", "urllib3", "filelock"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
