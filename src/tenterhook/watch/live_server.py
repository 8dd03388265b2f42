"""Live view of a watch: a small web page on this machine, which requests new numbers every second.

The server listens on the loopback address only. It serves only the page and its numbers, and only if the Host header
names that address, so that scripts of other sites cannot read it. The page has no external resources. A page that is
not visible sends no requests. Readers cannot affect the training run.
"""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading
import time
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlsplit

from tenterhook.errors import SessionError
from tenterhook.watch.live_updates import REFRESH, LiveUpdates, LiveView

if TYPE_CHECKING:
    from tenterhook.watch.results import Results

__all__ = ["MOST_READERS", "LiveServer"]

HOST = "127.0.0.1"
TAKEN = (
    "cannot serve on port {port} of {host}: {why}. Another program may use it. Choose another port, or let the "
    "system choose a free one: w.serve()."
)
MOST_PORT = 65535
MOST_READERS = 64
TIMEOUT = 10.0  # seconds that a connection may be idle, or that a reader may take to receive data
LONGEST_LINE, MOST_LINES = 8192, 100  # limits of a request
PAGE = Path(__file__).with_name("live.html")
FULL = f"{MOST_READERS} connections are open, which is the maximum. Close another page, and load this one again."
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:"


class LiveServer:
    """A server that runs in threads of its own until it is closed."""

    def __init__(self, watch: Results, port: int) -> None:
        if type(port) is not int or not 0 <= port <= MOST_PORT:
            raise ValueError(f"port must be an integer from 0 (any free port) to {MOST_PORT}; got {port!r}")
        try:
            self._listener = _Listener((HOST, port), LiveUpdates(watch))
        except OSError as error:
            raise SessionError(TAKEN.format(port=port, host=HOST, why=error.strerror or error)) from error
        self.url = f"http://{HOST}:{self._listener.server_address[1]}/"
        self._published = 0.0
        self._thread = threading.Thread(target=self._listener.serve_forever, name="tenterhook-watch", daemon=True)
        self._thread.start()

    def due(self) -> bool:
        """Return True if a page is open and its last update is long enough ago."""
        now = time.monotonic()
        if now - self._listener.asked > 3 * REFRESH or now - self._published < REFRESH / 2:
            return False
        self._published = now
        return True

    def close(self) -> None:
        """Stop the server, release the port, and close all connections."""
        self._listener.shutdown()
        self._listener.server_close()
        self._listener.close_connections()
        self._thread.join()


class _Listener(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 2 * MOST_READERS

    def __init__(self, address: tuple[str, int], live: LiveUpdates) -> None:
        self.live = live
        self.asked = float("-inf")
        """time of the last request for numbers"""
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            full = len(self._open) >= MOST_READERS
            if not full:
                self._open.add(request)
        if full:
            _refuse(request)
            super().shutdown_request(request)
        else:
            super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.discard(request)
        super().shutdown_request(request)

    def close_connections(self) -> None:
        with self._lock:
            for connection in self._open:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore the error. The terminal of a training run should not show it."""


def _refuse(request: socket.socket) -> None:
    """Reply with an error to a reader beyond the limit, without waiting long."""
    with contextlib.suppress(OSError):
        request.settimeout(0.1)
        # Closing a socket with unread data resets the connection, and the client would not receive the reply.
        request.recv(LONGEST_LINE)
        request.sendall(_answer(HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", FULL.encode(), close=True))


class _Handler(socketserver.StreamRequestHandler):
    timeout = TIMEOUT
    server: _Listener

    def handle(self) -> None:
        """Answer requests until the reader is idle, disconnects or sends an invalid request."""
        with contextlib.suppress(OSError, ValueError):
            while (asked := self._read()) is not None:
                self.wfile.write(self._answered(*asked))

    def _read(self) -> tuple[str, str, str] | None:
        """Return the method, target and host of a request, or None at the end. Raise ValueError if it is invalid."""
        line = self.rfile.readline(LONGEST_LINE)
        if not line.strip():
            return None
        method, target, _version = line.decode("ascii").split()
        host = ""
        for _ in range(MOST_LINES):
            name, _, value = self.rfile.readline(LONGEST_LINE).decode("latin-1").partition(":")
            if not name.strip():
                return method, target, host
            if name.lower() == "host":
                host = value.strip().rsplit(":", 1)[0]
        raise ValueError("the request has too many header lines")

    def _answered(self, method: str, target: str, host: str) -> bytes:
        asked = urlsplit(target)
        if host not in (HOST, "localhost"):
            return _answer(HTTPStatus.FORBIDDEN, "text/plain", b"this page is only available on this machine")
        if method != "GET":
            return _answer(HTTPStatus.METHOD_NOT_ALLOWED, "text/plain", b"only GET is supported")
        if asked.path == "/":
            return _answer(HTTPStatus.OK, "text/html; charset=utf-8", PAGE.read_bytes())
        if asked.path != "/numbers":
            return _answer(HTTPStatus.NOT_FOUND, "text/plain", b"not found; the valid paths are / and /numbers")
        self.server.asked = time.monotonic()
        try:
            view = LiveView.of(dict(parse_qsl(asked.query, keep_blank_values=True)))
        except ValueError as error:
            return _answer(HTTPStatus.BAD_REQUEST, "text/plain", str(error).encode())
        return _answer(HTTPStatus.OK, "application/json", self.server.live.answer(view))


def _answer(status: HTTPStatus, kind: str, body: bytes, *, close: bool = False) -> bytes:
    lines = [
        f"HTTP/1.1 {status.value} {status.phrase}",
        f"Content-Type: {kind}",
        f"Content-Length: {len(body)}",
        "Cache-Control: no-store",
        "X-Content-Type-Options: nosniff",
        f"Content-Security-Policy: {POLICY}",
        *(["Connection: close"] if close else []),
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body
