import http.client
import json
import socket
import urllib.error
import urllib.request

import pytest
import torch
from torch import nn

import tenterhook as th


def get(url, **headers):
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=10) as answer:
        return answer.read().decode()


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
        for _ in range(3):
            model(torch.ones(2, 4)).sum().backward()
            w.step()
            found = json.loads(get(url + "numbers"))
            seen.append((found["steps"], len(found["norms"]["values 0"])))
        assert seen == [(1, 1), (2, 2), (3, 3)]
        assert {row["address"] for row in found["rows"] if row["kind"] == "values"} == {"0", "1", ":return"}
        model(torch.full((2, 4), float("nan"))).sum().backward()
        w.step()
        found = json.loads(get(url + "numbers"))  # JSON has no NaN, and a browser would refuse one.
        assert "came in with what the model was given" in found["nonfinite"]["text"]
        with pytest.raises(urllib.error.HTTPError, match="404"):
            get(url + "../etc/passwd")
        with pytest.raises(urllib.error.HTTPError, match="403"):
            get(url + "numbers", Host="evil.example")
    port = int(url.rsplit(":", 1)[1].strip("/"))
    with pytest.raises(OSError), socket.create_connection(("127.0.0.1", port), timeout=2):
        pass


def test_a_port_in_use_is_a_clear_error():
    model = nn.Linear(2, 2)
    with socket.socket() as other, th.watch(model, of=("values",)) as w:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(th.SessionError, match=rf"cannot serve on port {port} .*Choose another port"):
            w.serve(port)
        assert w.serve().startswith("http://127.0.0.1:")
    with pytest.raises(ValueError, match="a port is a number"), th.watch(model) as w:
        w.serve(-1)


def test_nobody_outside_this_machine_is_answered():
    model = nn.Linear(2, 2)
    with th.watch(model) as w:
        port = int(w.serve().rsplit(":", 1)[1].strip("/"))
        addresses = {info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)}
        for address in addresses - {"127.0.0.1"}:
            if address.startswith("127."):
                continue
            with pytest.raises(OSError):
                http.client.HTTPConnection(address, port, timeout=2).request("GET", "/")
