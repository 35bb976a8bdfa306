"""A proxy before an S3 server that loses answers, fails requests or is slow, as it is told."""

import http.client
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

_HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "date", "server"}


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to one request.

    Attributes:
        forwards: whether the server gets it.
        status: answer to it in place of the server's; 0 closes the connection without any.
        seconds: wait before that.
        is_cut: whether the connection is closed in the middle of the server's answer.
    """

    forwards: bool = False
    status: int = 0
    seconds: float = 0.0
    is_cut: bool = False


LOST_ANSWER = Fault(forwards=True)
LOST_REQUEST = Fault()
HALF_ANSWER = Fault(forwards=True, is_cut=True)


@dataclass(slots=True)
class Proxy:
    """A proxy that runs.

    Attributes:
        url: where it listens.
        fault: what happens to a request of a method and a path; None lets it through.
        requests: method and path of each request.
    """

    url: str
    fault: Callable[[str, str], Fault | None] = lambda _method, _path: None
    requests: list[tuple[str, str]] = field(default_factory=list)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    proxy: Proxy
    target: str

    def _answer(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        body = self.rfile.read(length)
        self.proxy.requests.append((self.command, self.path))
        fault = self.proxy.fault(self.command, self.path)
        if fault is not None:
            time.sleep(fault.seconds)
        status, content = 0, b""
        headers: list[tuple[str, str]] = []
        if fault is None or fault.forwards:
            status, headers, content = self._forwarded(body)
        is_cut = fault is not None and fault.is_cut
        if fault is not None and not is_cut and (fault.status or not fault.seconds):
            status, headers, content = fault.status, [("Content-Length", "0")], b""
        if not status:
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        self.send_response_only(status)
        for name, value in headers:
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content[: len(content) // 2] if is_cut else content)
        self.close_connection |= is_cut

    def _forwarded(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        connection = http.client.HTTPConnection(self.target, timeout=60)
        connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():
            if name.lower() not in ("connection", "expect"):
                connection.putheader(name, value)
        connection.endheaders(body or None)
        answer = connection.getresponse()
        content = answer.read()
        headers = [(k, v) for k, v in answer.getheaders() if k.lower() not in _HOP_BY_HOP]
        if answer.getheader("Content-Length") is None:
            headers.append(("Content-Length", str(len(content))))
        connection.close()
        return answer.status, headers, content

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _answer  # noqa: N815 - names of the base

    def log_message(self, *_: Any) -> None:
        pass


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, *_: Any) -> None:
        pass  # a client that goes away


@contextmanager
def proxy_before(endpoint: str) -> Iterator[Proxy]:
    """Run a proxy before a server."""
    handler = type("Handler", (_Handler,), {"target": urlsplit(endpoint).netloc})
    with _Server(("127.0.0.1", 0), handler) as server:
        proxy = handler.proxy = Proxy(f"http://127.0.0.1:{server.server_port}")  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield proxy
        finally:
            server.shutdown()
            thread.join()
