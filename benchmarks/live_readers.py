"""Readers of a live page, like browsers: ``live_readers.py URL COUNT``, controlled by the lines ``go`` and ``stop``.

After each line it prints the size of the largest refresh so far, in bytes.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from urllib.parse import urlsplit

HEADERS = (
    "Host: {host}\r\nConnection: keep-alive\r\nUser-Agent: Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36\r\n"
    "Accept: */*\r\nSec-Fetch-Site: same-origin\r\nSec-Fetch-Mode: cors\r\nSec-Fetch-Dest: empty\r\n"
    "Referer: http://{host}/\r\nAccept-Encoding: gzip, deflate, br\r\nAccept-Language: en\r\n\r\n"
)
SPREAD = 10
largest = 0


def read(url: str, phase: float, going: threading.Event) -> None:
    """Request new data every second, on one connection at a time."""
    global largest  # noqa: PLW0603  # one number, printed by one thread
    host, connection, since, turn = urlsplit(url).netloc, None, -1, 0
    while True:
        if not going.is_set():
            if connection is not None:
                connection.close()
            connection, since = None, -1
            going.wait()
            time.sleep(phase)
        if connection is None:
            address, port = host.split(":")
            connection = socket.create_connection((address, int(port)))
        spread = int(since < 0 or turn % SPREAD == 0)
        query = f"kind=values&order=&down=1&find=&first=0&count=47&since={since}&found=0&spread={spread}"
        connection.sendall(f"GET /numbers?{query} HTTP/1.1\r\n{HEADERS.format(host=host)}".encode())
        body = answer(connection)
        if since >= 0:
            largest = max(largest, len(body))
        since, turn = json.loads(body)["step"], turn + 1
        time.sleep(1)


def answer(connection: socket.socket) -> bytes:
    """Return the body of one response."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += connection.recv(65536)
    head, _, body = data.partition(b"\r\n\r\n")
    length = int(head.split(b"Content-Length: ")[1].split(b"\r\n")[0])
    while len(body) < length:
        body += connection.recv(65536)
    return body


def main() -> None:
    """Read until standard input ends."""
    url, count = sys.argv[1], int(sys.argv[2])
    going = threading.Event()
    for number in range(count):
        threading.Thread(target=read, args=(url, number / count, going), daemon=True).start()
    for line in sys.stdin:
        (going.set if line.strip() == "go" else going.clear)()
        sys.stdout.write(f"{largest}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
