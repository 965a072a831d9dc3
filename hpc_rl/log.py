"""Logging with role, rank and host in every line, and without the tokens of the trial."""

import logging
import socket
import sys


class _Redacting(logging.Formatter):
    """Formatter that replaces secrets in the whole text of a record, tracebacks included."""

    def __init__(self, layout: str, secrets: list[str]) -> None:
        super().__init__(layout)
        self._secrets = secrets

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text


def setup(role: str, rank: int | str = 0, secrets: list[str] | None = None) -> None:
    """Send all logging to stderr with a `time role rank host` prefix."""
    handler = logging.StreamHandler(sys.stderr)
    host = socket.gethostname().split(".")[0]
    layout = f"%(asctime)s {role} {rank} {host} %(levelname)s %(message)s"
    handler.setFormatter(_Redacting(layout, [secret for secret in secrets or [] if secret]))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    for noisy in ("aiohttp.access", "urllib3", "filelock"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
