"""Requests that a client should not send, as raw bytes, and what may come back: for both services of a trial."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

ROLLOUT = [
    *(
        ("GET", path)
        for path in ("/batch?step=1&lineage=0&wait_s=0", "/status", "/", "/info", "/wandb_info", "/gateway")
    ),
    *(("GET", path) for path in ("/status-env", "/reset_data", "/latest_example")),
    *(("POST", path) for path in ("/evaluate", "/retain", "/register", "/register-env", "/disconnect-env")),
    *(("POST", path) for path in ("/scored_data", "/scored_data_list")),
    *(
        ("GET", prefix + path)
        for prefix in ("", "/eval")
        for path in ("/health", "/v1/models", "/model_info")
    ),
    *(
        ("POST", prefix + path)
        for prefix in ("", "/eval")
        for path in ("/generate", "/v1/completions", "/v1/chat/completions")
    ),
]
CONTROL = {
    "server": (
        "/pause_generation",
        "/continue_generation",
        "/abort_request",
        "/update_weights_from_disk",
        "/switch_weights",
        "/flush_cache",
        "/shutdown",
    ),
    "rollout": ("/retain",),
}
SERVER = [
    ("GET", "/health"),
    ("GET", "/model_info"),
    ("GET", "/channel"),
    ("POST", "/generate"),
    ("POST", "/v1/chat/completions"),
    *(("POST", path) for path in CONTROL["server"]),
]
ENDPOINTS = {"rollout": ROLLOUT, "server": SERVER}
WRONG_TOKENS = {
    "none": b"",
    "empty": b"Bearer ",
    "other": b"Bearer x",
    "not-latin1": b"Bearer \xff\xfe",
    "utf8": "Bearer \u20ac".encode(),
    "long": b"Bearer " + b"x" * 5000,
    "basic": b"Basic dXNlcjpwYXNz",
    "twice": b"Bearer Bearer DATA",
    "begin": b"Bearer DATA-",
    "lower": b"bearer DATA",
    "comma": b"Bearer x, Bearer DATA",
    "two-lines": b"x\r\nX-Authorization: Bearer DATA",
}
BODIES = {
    "nothing": b"",
    "null": b"null",
    "list": b"[]",
    "list-of-null": b"[null]",
    "text": b'"x"',
    "number": b"5",
    "nan": b"NaN",
    "cut": b'{"a": ',
    "bytes": b"\xff\xfe\x00",
    "deep": b"[" * 100_000,
    "deep-object": b'{"a":' * 20_000 + b"1" + b"}" * 20_000,
    "deep-field": b'{"text": ' + b"[" * 500 + b"]" * 500 + b"}",
    "huge-number": b'{"step": 1' + b"0" * 400 + b', "version": 1' + b"0" * 400 + b"}",
    "many-digits": b'{"step": ' + b"9" * 6000 + b"}",
    "surrogate": b'{"text": "\\ud800", "version": "\\ud800", "desired_name": "\\udfff"}',
    "unknown": b'{"no_such_key": 1}',
    "types": b'{"step": "x", "version": [], "rid": {}, "mode": 5, "env_id": [], "tokens": 5, "messages": {}}',
    "infinite": b'{"step": 1e999, "version": "1e999.1", "env_id": 1e999, "wait_s": NaN}',
}
GENERATE = [
    {"text": 5}, {"text": []}, {"text": [5]}, {"text": ""}, {"text": "x" * 100_000}, {"input_ids": []},
    {"input_ids": [[]]}, {"input_ids": [None]}, {"input_ids": [1e9]}, {"input_ids": [10**400]},
    {"input_ids": [-1]}, {"input_ids": "x"}, {"input_ids": [True]}, {"input_ids": [3], "text": "a"},
    {"input_ids": [3], "rid": 5}, {"input_ids": [3], "rid": ["a", "b"]},
    {"input_ids": [3], "sampling_params": 5}, {"input_ids": [3], "sampling_params": [{}, {}]},
    {"input_ids": [3], "sampling_params": [5]}, {"input_ids": [3], "logprob_start_len": "x"},
    {"input_ids": [3], "return_logprob": {}, "sampling_params": {"max_new_tokens": 1}},
    {"input_ids": [3], "stream": {}, "sampling_params": {"max_new_tokens": 1}},
    *({"input_ids": [3], "sampling_params": {key: value}} for key, value in [
        ("n", 10**6), ("n", 0), ("n", -1), ("n", 10**400), ("n", "2"), ("n", None), ("n", True), ("n", 1.5),
        ("temperature", 10**400), ("temperature", -1), ("temperature", "x"), ("temperature", []),
        ("top_p", 2), ("top_k", 0), ("top_k", 10**30), ("max_new_tokens", -1), ("max_new_tokens", 10**12),
        ("max_new_tokens", []), ("min_new_tokens", 10**12), ("stop_token_ids", "x"), ("stop_token_ids", [[]]),
        ("stop_token_ids", [10**400]), ("stop", 5), ("stop", [5]), ("sampling_seed", 10**400), ("x", 1),
        ("ignore_eos", 5), ("regex", "("),
    ]),
]  # fmt: skip
MESSAGE = {"role": "user", "content": "1+1="}
CHAT = [
    {"messages": value}
    for value in ([], [None], [5], {}, "x", [{}], [{"role": 5}], [{"role": "user", "content": 5}],
                  [{"role": "user", "content": [{"type": "image_url"}]}], [{"role": "\ud800", "content": "x"}])
] + [
    {"messages": [MESSAGE], "max_tokens": 1, key: value}
    for key, value in [
        ("n", 10**6), ("n", 0), ("n", "x"), ("n", 10**400), ("stop", 5), ("stop", [5]), ("stop", ["x"] * 1000),
        ("max_tokens", -1), ("max_tokens", "x"), ("max_tokens", 10**400), ("temperature", 10**400),
        ("temperature", {}), ("logprobs", "x"), ("top_logprobs", 10**9), ("tools", [5]), ("stream", 5),
        ("seed", 10**400), ("x", "y"), ("model", {}), ("logit_bias", {"x": 1}), ("response_format", 5),
        ("stream_options", 5), ("user", []),
    ]
]  # fmt: skip


@dataclass(frozen=True)
class Probe:
    """One request; `refused` where nothing but a refusal may come back."""

    service: str
    name: str
    data: bytes
    refused: bool = True
    hangs_up: bool = False  # the client sends no more: nothing may come back


def request(method: str, path: str, headers: bytes = b"", body: bytes | None = None) -> bytes:
    length = b"" if body is None else b"Content-Length: %d\r\n" % len(body)
    head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n".encode()
    return head + headers + length + b"\r\n" + (body or b"")


def probes(tokens: dict[str, str]) -> Iterator[Probe]:
    data, control = tokens["data"], tokens["control"]
    bearer = {name: f"Authorization: Bearer {token}\r\n".encode() for name, token in tokens.items()}
    for service, endpoints in ENDPOINTS.items():
        for method, path in endpoints:
            body = None if method == "GET" else b"{}"
            for name, header in WRONG_TOKENS.items():
                header = header.replace(b"DATA", data.encode())
                line = b"Authorization: " + header + b"\r\n" if header else b""
                yield Probe(service, f"token {name} {path}", request(method, path, line, body))
            for prefix in ("/t/", "/t/x", f"/t/{control}", f"/t/{data}x", f"/t/x/../{data}"):
                yield Probe(service, f"prefix {prefix} {path}", request(method, prefix + path, b"", body))
            for wrong in ("DELETE", "PATCH", "TRACE", "X" * 100):
                yield Probe(service, f"{wrong[:6]} {path}", request(wrong, path, bearer["data"], body))
            if method == "POST" and path != "/shutdown":
                needed = bearer["control" if path in CONTROL[service] else "data"]
                for name, given in BODIES.items():
                    # most controls need nothing of a body: an object with keys that they ignore is a call
                    is_call = path in (*CONTROL[service], "/register-env", "/scored_data_list")
                    yield Probe(
                        service, f"body {name} {path}", request(method, path, needed, given), not is_call
                    )
        for path in CONTROL[service]:
            for name, where in {
                "data": path,
                "prefix": f"/t/{data}{path}",
                "traversal": f"/t/{data}/..{path}",
                "escaped": f"/t/{data}/%2e%2e{path}",
                "escaped-name": "/%" + f"{ord(path[1]):02x}" + path[2:],
                "slashes": f"//{path[1:]}",
                "ending": f"{path}/",
                "upper": path.upper(),
                "query": f"{path}?token={control}",
                "absolute": f"http://x{path}",
            }.items():
                data_header = b"" if name == "prefix" else bearer["data"]
                yield Probe(service, f"data {name} {path}", request("POST", where, data_header, b"{}"))
    for service, prefixes in {"server": [""], "rollout": ["", "/eval"]}.items():
        for prefix in prefixes:
            for path, bodies in (
                ("/generate", GENERATE), ("/v1/chat/completions", CHAT), ("/v1/completions", [
                    {"prompt": value, "max_tokens": 1}
                    for value in (5, [], [None], [[]], {}, [10**400], ["x", 5], "\ud800")
                ] if service == "rollout" else [])
            ):  # fmt: skip
                for number, given in enumerate(bodies):
                    content = request("POST", prefix + path, bearer["data"], json.dumps(given).encode())
                    yield Probe(service, f"{prefix}{path} {str(given)[:60]} {number}", content, refused=False)
        yield from malformed(service, bearer["data"])


def malformed(service: str, bearer: bytes) -> Iterator[Probe]:
    head = b"POST /generate HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    chunked = b"Transfer-Encoding: chunked\r\n"
    for name, data in {
        "length minus": head + bearer + b"Content-Length: -1\r\n\r\n{}",
        "length text": head + bearer + b"Content-Length: abc\r\n\r\n{}",
        "length huge": head + bearer + b"Content-Length: 1" + b"0" * 30 + b"\r\n\r\n{}",
        "length 1 GB": head + bearer + b"Content-Length: 1000000000\r\n\r\n{}",
        "length twice": head + bearer + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
        "length and chunks": head + bearer + b"Content-Length: 2\r\n" + chunked + b"\r\n2\r\n{}\r\n0\r\n\r\n",
        "length too short": head + bearer + b"Content-Length: 1\r\n\r\n{}",
        "chunk size": head + bearer + chunked + b"\r\nzz\r\n{}\r\n0\r\n\r\n",
        "chunk minus": head + bearer + chunked + b"\r\n-2\r\n{}\r\n0\r\n\r\n",
        "chunk huge": head + bearer + chunked + b"\r\nffffffffffffffffffff\r\n{}",
        "chunk end": head + bearer + chunked + b"\r\n2\r\n{}xx0\r\n\r\n",
        "coding": head + bearer + b"Transfer-Encoding: gzip, chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        "coding unknown": head + bearer + b"Transfer-Encoding: xyz\r\n\r\n{}",
        "not gzip": head + bearer + b"Content-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{}",
        "encoding": head + bearer + b"Content-Encoding: zzz\r\nContent-Length: 2\r\n\r\n{}",
        "header long": head + b"X: " + b"x" * 100_000 + b"\r\n\r\n",
        "headers many": head + b"X: y\r\n" * 20_000 + b"\r\n",
        "header without colon": head + b"nothing\r\n\r\n",
        "header NUL": head + b"X: \x00\r\n\r\n",
        "header folded": head + b"X: a\r\n b\r\n\r\n",
        "line long": b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\n\r\n",
        "line feed": b"GET /health HTTP/1.1\nHost: x\n\n",
        "version": b"GET /health HTTP/9.9\r\n\r\n",
        "version old": b"GET /health HTTP/0.9\r\n\r\n",
        "no version": b"GET /health\r\n\r\n",
        "star": b"OPTIONS * HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
        "connect": b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
        "upgrade": b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n",
        "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
        "zeros": bytes(1000),
        "percent": b"GET /%ff%zz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
        "not ascii": "GET /\u20ac HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode(),
        "port": b"GET http://x:99999999/health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
        "bracket": b"GET http://[::1/health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    }.items():  # fmt: skip
        yield Probe(service, f"malformed {name}", data, refused=False, hangs_up=True)
    for query in (
        "step=x&lineage=0", "step=1", "step=0&lineage=0", "step=-1&lineage=0", "step=1&lineage=99999999",
        "step=1&lineage=0&wait_s=nan", "step=1&lineage=0&wait_s=1e999", "step=" + "9" * 5000 + "&lineage=0",
        "step=99999999999999999999&lineage=0", "step=1&lineage=" + "9" * 40, "step=%00&lineage=0", "step=1e3&lineage=0",
    ):  # fmt: skip
        if service == "rollout":
            data = request("GET", f"/batch?{query}", bearer)
            yield Probe(service, f"batch {query[:50]}", data, refused="wait_s" not in query)


async def answer_to(url: str, probe: Probe, timeout_s: float) -> int | None:
    """The status that comes back; None where the connection is closed without one. Raises TimeoutError."""
    where = urlsplit(url)
    async with asyncio.timeout(timeout_s):
        reader, writer = await asyncio.open_connection(where.hostname, where.port)
        try:
            writer.write(probe.data)
            if probe.hangs_up:  # it may be a beginning that could be right
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(1.0):
                        line = await reader.readline()
                        return int(line.split()[1]) if line.startswith(b"HTTP/") else None
                writer.write_eof()
            line = await reader.readline()
            return int(line.split()[1]) if line.startswith(b"HTTP/") else None
        except ConnectionError:
            return None
        finally:
            writer.transport.abort()
