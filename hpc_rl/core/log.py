"""Logging with role, rank and host in every line, and without the secrets of the trial.

Also escapes text of user code and files, so that it is safe to show.
"""

import logging
import socket
import sys
import unicodedata
from collections.abc import Iterable
from urllib.parse import quote

MIN_SECRET_CHARS = 6  # a shorter one would hide parts of words
# control characters, halves of surrogate pairs, ends of lines and paragraphs, bidirectional overrides
_UNSAFE = ("Cc", "Cs", "Zl", "Zp")
_REVERSING = {*"\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"}
_secrets: list[str] = []  # of this process, in every form that may appear in a message; the longest first


def escape_controls(text: str) -> str:
    """Return `text` with terminal control characters escaped; line feeds and tabs are kept.

    Reasons, names and logs come from user code and from files.
    """
    if text.isascii() and text.replace("\n", "").replace("\t", "").isprintable():
        return text
    return "".join(
        char.encode("unicode_escape").decode()
        if char not in "\n\t" and (unicodedata.category(char) in _UNSAFE or char in _REVERSING)
        else char
        for char in text
    )


def redact(text: str) -> str:
    """Return `text` with `***` for the secrets that `configure` received."""
    for secret in _secrets:
        text = text.replace(secret, "***")
    return text


class _Redacting(logging.Formatter):
    """Formatter that replaces secrets in the whole text of a record, tracebacks included.

    A line feed in a message can't forge another record.
    """

    def format(self, record: logging.LogRecord) -> str:
        return escape_controls(redact(super().format(record))).replace("\n", "\n    ")


def configure(role: str, rank: int | str = 0, secrets: Iterable[str] = ()) -> None:
    """Send all logging to stderr with a `time role rank host` prefix; `redact` hides `secrets`."""
    lines = {line for secret in secrets for line in (secret, *secret.splitlines())}
    forms = {form for line in lines for form in (line, repr(line)[1:-1], quote(line, safe=""))}
    _secrets[:] = sorted((form for form in forms if len(form) >= MIN_SECRET_CHARS), key=len, reverse=True)
    handler = logging.StreamHandler(sys.stderr)
    host = socket.gethostname().split(".")[0]
    layout = f"%(asctime)s {role} {rank} {host} %(levelname)s %(message)s"
    handler.setFormatter(_Redacting(layout))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    for noisy in ("aiohttp.access", "urllib3", "filelock"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
