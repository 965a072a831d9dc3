"""A hub of one process, for the real client of Hugging Face's hub: repositories in memory, nothing checked."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub:
    """`files`: (repository, path) -> content; `requests`: method and path of each; `url`: for HF_ENDPOINT."""

    def __init__(self) -> None:
        self.files: dict[tuple[str, str], bytes] = {}
        self.requests: list[str] = []
        self.created: list[dict] = []
        self.committed: list[dict] = []
        self.url = ""

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, dict[str, str], bytes]:
        """Return status, headers and body of an answer."""
        parts = [part for part in path.split("/") if part]
        if parts[:3] == ["api", "repos", "create"]:
            self.created.append(json.loads(body))
            return self._json(
                {"url": f"{self.url}/{self.created[-1]['organization']}/{self.created[-1]['name']}"}
            )
        if parts[:2] == ["api", "validate-yaml"]:
            return self._json({"errors": [], "warnings": []})
        if "preupload" in parts:
            files = [{"path": file["path"], "uploadMode": "regular"} for file in json.loads(body)["files"]]
            return self._json({"files": [file | {"shouldIgnore": False} for file in files]})
        if "commit" in parts:
            self.committed += [json.loads(line) for line in body.splitlines()]
            return self._json(
                {"commitUrl": f"{self.url}/{'/'.join(parts[2:4])}/commit/{COMMIT}", "commitOid": COMMIT}
            )
        if "revision" in parts:
            repository = "/".join(parts[2:4])
            names = [name for owner, name in self.files if owner == repository]
            if not names:
                return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"
            return self._json(
                {"id": repository, "sha": COMMIT, "siblings": [{"rfilename": n} for n in names]}
            )
        if "tree" in parts:
            repository = "/".join(parts[2:4])
            known = {
                name: len(content) for (owner, name), content in self.files.items() if owner == repository
            }
            return self._json(
                [{"type": "file", "path": n, "size": size, "oid": COMMIT} for n, size in known.items()]
            )
        if "resolve" in parts:
            at = parts.index("resolve")
            repository, name = "/".join(parts[at - 2 : at]), "/".join(parts[at + 2 :])
            content = self.files[repository, name]
            headers = {"ETag": f'"{sha256(content).hexdigest()}"', "X-Repo-Commit": COMMIT}
            return 200, headers, content
        return 404, {}, b"{}"

    @staticmethod
    def _json(value: object) -> tuple[int, dict[str, str], bytes]:
        return 200, {"Content-Type": "application/json"}, json.dumps(value).encode()


@contextmanager
def serve_hub() -> Iterator[FakeHub]:
    """Serve a hub without repositories until the block ends."""
    hub = FakeHub()

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.requests.append(f"{self.command} {path}")
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, headers, content = hub.answer(self.command, path, body)
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        do_GET = do_POST = do_HEAD = _answer

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
