"""Check the token and the body of a request, for the rollout service and the servers' proxies.

A trial has two tokens: `control` (batches, publish, shutdown) and `data` (generation, counters). A token
travels as `Authorization: Bearer <token>`; the data token also as a path prefix, `/t/<data token>/...`, for
clients without headers.
"""

import enum
import hmac
import json
import re
from collections.abc import Mapping
from typing import Any

# the parser recurses: an exception from deep inside leaves CPython 3.11 with a wrong stack count
MAX_DEPTH = 200
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_OPEN, _OPEN_OR_CLOSED = ord("["), bytes.maketrans(b"{}", b"[]")
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)  # without the last quote, up to the end


class Access(enum.IntEnum):
    """Rights of a request."""

    NONE = 0
    DATA = 1
    CONTROL = 2


class Tokens:
    """The tokens of a trial, `{"control": …, "data": …}`."""

    def __init__(self, tokens: Mapping[str, str]) -> None:
        self._control = tokens["control"].encode()
        self._data = tokens["data"].encode()

    def find_access(self, authorization: str, prefix: str = "") -> Access:
        """Return the rights of a request with this Authorization header, or this token in its path."""
        bearer = (
            _encode(authorization.removeprefix("Bearer ")) if authorization.startswith("Bearer ") else b""
        )
        if hmac.compare_digest(bearer, self._control):
            return Access.CONTROL
        has_data = hmac.compare_digest(bearer, self._data)
        return Access.DATA if has_data or hmac.compare_digest(_encode(prefix), self._data) else Access.NONE


def _encode(given: str) -> bytes:
    # headers may hold bytes that are not UTF-8; tokens hold none of these
    return given.encode(errors="replace")


def parse_json_object(body: bytes) -> dict[str, Any]:
    """Parse the JSON object in a request's body.

    Raises ValueError for anything else, and for deep nesting.
    """
    found = parse_json_value(body)
    if not isinstance(found, dict):
        raise ValueError(f"the body of the request must be a JSON object, not {type(found).__name__}")
    return found


def parse_json_value(body: bytes) -> Any:
    """Parse the JSON value in a request's body; numbers may be NaN or infinite.

    Raises ValueError for invalid JSON, deep nesting, and half a surrogate pair.
    """
    if _is_too_deep(body):
        raise ValueError(f"the body of the request is nested deeper than {MAX_DEPTH} levels")
    try:
        found = json.loads(body.decode("utf-8-sig"))  # of bytes it would read UTF-16, too
        if b"\\u" in body:
            json.dumps(found, ensure_ascii=False).encode()
    except ValueError as error:
        raise ValueError(f"the body of the request is not valid JSON: {error}") from error
    return found


def _is_too_deep(body: bytes) -> bool:
    """Return whether brackets outside of strings are nested deeper than MAX_DEPTH."""
    brackets = _STRING.sub(b"", body).translate(_OPEN_OR_CLOSED, _NO_BRACKETS)
    if brackets.count(b"[") <= MAX_DEPTH:
        return False
    depth = 0
    for byte in brackets:
        depth += 1 if byte == _OPEN else -1
        if depth > MAX_DEPTH:
            return True
    return False
