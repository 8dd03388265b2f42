"""A live view of a watch: one small page on this machine, which asks for new numbers every second.

It listens on the loopback address alone, answers nothing but the page and its numbers, and answers only requests that
name that address as their host, so that no other site's script can read it. Everything that the page needs is in it.
"""

from __future__ import annotations

import contextlib
import json
import math
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tenterhook.errors import SessionError

if TYPE_CHECKING:
    from tenterhook.watch.results import Results

__all__ = ["Server"]

HOST = "127.0.0.1"
TAKEN = (
    "cannot serve on port {port} of {host}: {why}. Something else may be using it. Choose another port, or let the "
    "system choose a free one: w.serve()."
)
LATEST = 120  # Steps in a sparkline.
MOST_PORT = 65535
PAGE = Path(__file__).with_name("live.html")


class Server:
    """Serves a watch from a thread of its own, until it is closed."""

    def __init__(self, watch: Results, port: int) -> None:
        if type(port) is not int or not 0 <= port <= MOST_PORT:
            raise ValueError(f"a port is a number from 0, for any that is free, to {MOST_PORT}; got {port!r}")
        try:
            self._server = ThreadingHTTPServer((HOST, port), _handler(watch))
        except OSError as error:
            raise SessionError(TAKEN.format(port=port, host=HOST, why=error.strerror or error)) from error
        self._server.daemon_threads = True
        self.url = f"http://{HOST}:{self._server.server_address[1]}/"
        self._thread = threading.Thread(target=self._server.serve_forever, name="tenterhook-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop, and give the port back."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def numbers(watch: Results) -> dict[str, Any]:
    """What the page shows: plain data, with None for what is no number."""
    found = watch.live()
    pages = watch.pages[-LATEST:]
    lines: dict[str, list[list[float]]] = {}
    for page in pages:
        for kind, address, line in page.lines():
            lines.setdefault(f"{kind} {address}", []).append([page.step, line["norm"]])
    return _finite(found | {"norms": lines})  # type: ignore[no-any-return]


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _handler(watch: Results) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        server_version = "tenterhook"
        sys_version = ""

        def do_GET(self) -> None:
            host = self.headers.get("Host", "").rsplit(":", 1)[0]
            if host not in (HOST, "localhost"):
                self._answer(HTTPStatus.FORBIDDEN, "text/plain", b"this page is for this machine alone")
            elif self.path == "/":
                self._answer(HTTPStatus.OK, "text/html; charset=utf-8", PAGE.read_bytes())
            elif self.path == "/numbers":
                self._answer(HTTPStatus.OK, "application/json", json.dumps(numbers(watch)).encode())
            else:
                self._answer(HTTPStatus.NOT_FOUND, "text/plain", b"there is / and /numbers")

        def _answer(self, status: HTTPStatus, kind: str, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("Content-Security-Policy", "default-src 'self' 'unsafe-inline'; img-src data:")
            self.end_headers()
            with contextlib.suppress(ConnectionError):  # A reader who has gone is no matter for a training run.
                self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Nothing: a training run's terminal is not the place."""

    return Handler
