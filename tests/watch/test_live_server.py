import contextlib
import http.client
import json
import os
import socket
import subprocess
import sys
import textwrap
import time
import urllib.error
import urllib.request

import pytest
import torch
from torch import nn

import tenterhook as th
from tenterhook.watch import live_server, live_updates


def get(url, **headers):
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=10) as answer:
        return answer.read().decode()


def numbers(url, **query):
    return json.loads(get(f"{url}numbers?{'&'.join(f'{key}={value}' for key, value in query.items())}"))


def port_of(url):
    return int(url.rsplit(":", 1)[1].strip("/"))


def test_the_page_shows_numbers_that_move_on_while_training_runs():
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
    with th.watch(model, on_nan="record") as w:
        url = w.serve()
        assert url.startswith("http://127.0.0.1:")
        assert w.serve() == url
        page = get(url)
        assert "<title>tenterhook watch</title>" in page
        assert "http://" not in page.replace("http://www.w3.org/2000/svg", "")  # Nothing is fetched from elsewhere.
        seen = []
        for step in range(3):
            model(torch.ones(2, 4)).sum().backward()
            w.step()
            found = numbers(url, since=-1, found=step)  # Another question each time: an answer holds for a second.
            seen.append((found["steps"], found["step"], len(found["history"]["norms"][0])))
        assert seen == [(1, 0, 1), (2, 1, 2), (3, 2, 3)]
        assert [row[-1] for row in found["rows"]] == ["0", "1", ":return"]
        row = w.row("0")["last"]
        assert found["rows"][0][1:6] == pytest.approx(
            [row[name] for name in ("mean", "std", "min", "max", "norm")], rel=1e-3
        )
        model(torch.full((2, 4), float("nan"))).sum().backward()
        w.step()
        found = json.loads(get(url + "numbers?found=9"), parse_constant=pytest.fail)  # A browser would refuse a NaN.
        assert "input of the model already contained it" in found["nonfinite"]
        with pytest.raises(urllib.error.HTTPError, match="404"):
            get(url + "../etc/passwd")
        with pytest.raises(urllib.error.HTTPError, match="403"):
            get(url + "numbers", Host="evil.example")
        for wrong in ("kind=all", "order=size", "first=-1", "count=1000", "since=x", "found=-2"):
            with pytest.raises(urllib.error.HTTPError, match="400"):
                get(f"{url}numbers?{wrong}")
    with pytest.raises(OSError), socket.create_connection(("127.0.0.1", port_of(url)), timeout=2):
        pass


def many(count=300):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(count)))


def test_a_refresh_of_a_large_model_is_a_few_kilobytes_of_what_is_new():
    model = many()
    with th.watch(model, on_nan="record", slow=1, thresholds={"vanishing": 0.0}) as w:
        url = w.serve()
        for _ in range(3):
            model(torch.randn(2, 4)).sum().backward()
            w.step()
        first = numbers(url, since=-1, count=48)
        assert (first["total"], len(first["rows"]), len(first["bars"])) == (301, 48, 48)
        text = get(f"{url}numbers?since=1&count=48&spread=0")
        assert len(text) < 4_000
        assert len(json.loads(text)["rows"]) == 48
        nothing = get(f"{url}numbers?since={first['step']}&count=48&spread=0")
        assert json.loads(nothing)["rows"] == []
        assert len(nothing) < 300


def test_rows_are_found_and_put_in_order_where_they_are():
    model = many(50)
    with th.watch(model, on_nan="record") as w:
        url = w.serve()
        model(torch.randn(2, 4)).sum().backward()
        w.step()
        ordered = numbers(url, kind="parameters", order="norm", down=1, count=10)
        norms = {row["address"]: row["last"]["norm"] for row in w.rows() if row["kind"] == "parameters"}
        assert [row[-1] for row in ordered["rows"]] == sorted(norms, key=norms.get, reverse=True)[:10]
        found = numbers(url, kind="parameters", find="4.WEIGHT", first=1)
        assert [row[-1] for row in found["rows"]] == ["14.weight", "24.weight", "34.weight", "44.weight"]
        assert found["total"] == 5


def test_names_that_are_no_plain_text_are_escaped():
    model = nn.Sequential()
    model.add_module("a\x1b[2J\n\u202e", nn.Linear(2, 2))
    with th.watch(model, on_nan="record") as w:
        url = w.serve()
        model(torch.ones(1, 2)).sum().backward()
        w.step()
        assert numbers(url)["rows"][0][-1] == "a\\x1b[2J\\n\\u202e"


def test_a_port_in_use_is_a_clear_error():
    model = nn.Linear(2, 2)
    with socket.socket() as other, th.watch(model, of=("values",)) as w:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(th.SessionError, match=rf"cannot serve on port {port} .*Choose another port"):
            w.serve(port)
        assert w.serve().startswith("http://127.0.0.1:")
    with pytest.raises(ValueError, match="port must be an integer"), th.watch(model) as w:
        w.serve(-1)


def test_no_one_outside_this_machine_is_answered():
    model = nn.Linear(2, 2)
    with th.watch(model) as w:
        port = port_of(w.serve())
        addresses = {info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)}
        for address in addresses - {"127.0.0.1"}:
            if address.startswith("127."):
                continue
            with pytest.raises(OSError):
                http.client.HTTPConnection(address, port, timeout=2).request("GET", "/")


# -- readers that do as they like -------------------------------------------------------------------------------------


def ask(connection, target="/numbers", host="127.0.0.1"):
    connection.sendall(f"GET {target} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
    return connection.recv(65536)


def test_the_sixty_fifth_connection_is_refused_in_words_and_one_that_ends_makes_room():
    with th.watch(nn.Linear(2, 2)) as w, contextlib.ExitStack() as stack:
        address = ("127.0.0.1", port_of(w.serve()))
        held = [stack.enter_context(socket.create_connection(address, timeout=10)) for _ in range(64)]
        for connection in held:
            assert ask(connection).startswith(b"HTTP/1.1 200")
        with socket.create_connection(address, timeout=10) as more:
            answer = ask(more)
            assert answer.startswith(b"HTTP/1.1 503")
            assert b"64 connections are open, which is the maximum" in answer
        held[0].close()
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            with socket.create_connection(address, timeout=10) as again:
                if ask(again).startswith(b"HTTP/1.1 200"):
                    break
            time.sleep(0.05)
        else:
            pytest.fail("nobody was let in again")


def test_a_silent_reader_is_hung_up_on(monkeypatch):
    monkeypatch.setattr(live_server._Handler, "timeout", 0.2)
    with (
        th.watch(nn.Linear(2, 2)) as w,
        socket.create_connection(("127.0.0.1", port_of(w.serve())), timeout=10) as idle,
    ):
        idle.sendall(b"GET /num")
        assert idle.recv(10) == b""


def test_requests_that_are_none_end_the_connection_and_nothing_else():
    with th.watch(nn.Linear(2, 2)) as w:
        url = w.serve()
        for junk in (
            b"\x00" * 100 + b"\r\n\r\n",
            b"GET\r\n\r\n",
            b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 200,
            b"A" * 9000,
        ):
            with socket.create_connection(("127.0.0.1", port_of(url)), timeout=10) as connection:
                with contextlib.suppress(OSError):  # The server may hang up before it has read everything.
                    connection.sendall(junk)
                    connection.shutdown(socket.SHUT_WR)
                    assert b"200" not in connection.recv(100)
        assert json.loads(get(url + "numbers"))["steps"] == 0


LEAVES = """
    import socket, struct, sys, threading, time, torch, tenterhook as th
    from torch import nn
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(20)))
    with th.watch(model) as w:
        port = int(w.serve().rsplit(":", 1)[1].strip("/"))
        for step in range(60):
            reader = socket.create_connection(("127.0.0.1", port))
            reader.sendall(b"GET /numbers HTTP/1.1\\r\\nHost: 127.0.0.1\\r\\n\\r\\n")
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # Hangs up at once.
            reader.close()
            model(torch.ones(2, 4)).sum().backward()
            w.step()
        stalled = socket.create_connection(("127.0.0.1", port))
        for _ in range(200):
            stalled.sendall(b"GET / HTTP/1.1\\r\\nHost: 127.0.0.1\\r\\n\\r\\n")  # And never reads.
    print("trained", w.steps)
"""


def test_a_reader_that_leaves_or_never_reads_prints_nothing_and_stops_nothing():
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(LEAVES)],
        capture_output=True, text=True, check=False, timeout=60, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "trained 60\n", "")


def test_nothing_is_published_for_a_page_that_no_one_asks_for():
    model = nn.Sequential(nn.Linear(4, 4))
    with th.watch(model, on_nan="record") as w:
        url = w.serve()
        for _ in range(12):
            model(torch.randn(2, 4)).sum().backward()
            w.step()
        assert len(w._history.pages) == 8  # The others wait, to be published together.
        get(url + "numbers")
        model(torch.randn(2, 4)).sum().backward()
        w.step()
        assert len(w._history.pages) == 13


def test_readers_of_the_same_rows_share_one_answer(monkeypatch):
    made = []
    whole = live_updates.LiveUpdates._made
    monkeypatch.setattr(live_updates.LiveUpdates, "_made", lambda self, view: made.append(view) or whole(self, view))
    with th.watch(nn.Linear(2, 2)) as w:
        url = w.serve()
        answers = {get(f"{url}numbers?since=3&count=40") for _ in range(5)}
    assert len(answers) == 1
    assert len(made) <= 2  # Unless a second has gone by in between.
