"""What is written into a page, read back from the file."""

import base64
import io
import json
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import tenterhook as th
from tenterhook._draw import Column, Row, Table
from tenterhook.report.execution_order import in_order
from tenterhook.report.images import Pictures, weight
from tenterhook.report.page import Chart, Page, render, tapes_page, write, write_tapes
from tenterhook.testing import Attention, Cell


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3, padding=1)
        self.relu = nn.ReLU(inplace=True)
        self.head = nn.Linear(5, 2)

    def forward(self, x):
        return self.head(self.relu(self.conv(x)).mean((2, 3)))


def recorded(model=None, *selectors, grad=True, x=None):
    torch.manual_seed(0)
    model = model or Net()
    x = torch.randn(2, 3, 6, 7) if x is None else x
    with th.record(model, *(selectors or ["**"]), grad=grad) as tape:
        output = model(x)
        if grad:
            output.sum().backward()
    return tape


def data_of(text):
    return json.loads(re.search(r'<script id="data" type="application/json">(.*?)</script>', text, re.DOTALL)[1])


def values_of(picture):
    """A picture of a page as an array, decoded by other means than those that wrote it."""
    count, rows, columns = picture["size"]
    sheet = np.array(Image.open(io.BytesIO(base64.b64decode(picture["png"]))))
    low, high = (np.frombuffer(base64.b64decode(picture[key]), np.float32) for key in ("low", "high"))
    maps = []
    for number in range(count):
        left, top = number // picture["down"] * columns, number % picture["down"] * rows
        levels = sheet[top : top + rows, left : left + columns].astype(np.float64)
        maps.append(np.where(levels == 0, np.nan, low[number] + (levels - 1) / 254 * (high[number] - low[number])))
    return np.stack(maps)


def test_the_maps_of_a_page_are_the_values_of_the_tape(tmp_path):
    tape = recorded()
    size = write_tapes(tmp_path / "page.html", tape)
    text = (tmp_path / "page.html").read_text()
    assert len(text.encode()) == size
    data = data_of(text)
    conv = next(point for point in data["points"] if point["address"] == "conv")
    (call,) = conv["runs"][0]
    (part,) = call["parts"]
    assert part["shape"] == [2, 5, 6, 7]
    assert part["numbers"]["mean"] == pytest.approx(tape["conv"].mean().item(), rel=1e-3)
    for seen, right in ((part, tape["conv"]), (part["gradient"], tape.grad["conv"])):
        drawn = values_of(data["pictures"][seen["picture"]])
        expected = right[0].double().numpy()
        step = (expected.max((1, 2)) - expected.min((1, 2)))[:, None, None] / 254
        assert (np.abs(drawn - expected) <= step * 0.51 + 1e-12).all()


def test_a_page_fetches_nothing_and_ends_no_script_early(tmp_path):
    model = nn.Sequential()
    model.add_module("</script><b>", nn.ReLU())
    with th.record(model, nn.ReLU) as tape:
        model(torch.ones(1, 2))
    write_tapes(tmp_path / "page.html", tape)
    text = (tmp_path / "page.html").read_text()
    assert text.count("</script>") == 2
    assert data_of(text)["points"][0]["path"] == ["</script><b>"]
    assert not re.search(r'(src|href)\s*=\s*"?(https?:|//)', text)
    assert "default-src 'none'" in text


def test_the_same_memory_is_drawn_once():
    model = nn.Sequential(nn.Identity(), nn.Identity())
    page = tapes_page({"run": recorded(model, grad=False, x=torch.randn(1, 3, 8, 8))})
    numbers = {part["picture"] for point in page.points for call in point["runs"][0] for part in call["parts"]}
    assert len(page.pictures) == 1
    assert numbers == {0}


@pytest.mark.parametrize("size", [300_000, 500_000, 1_000_000])
def test_a_page_is_as_large_as_allowed_and_no_larger(tmp_path, size):
    model = nn.Sequential(*(nn.Conv2d(3, 3, 1) for _ in range(6)))
    tape = recorded(model, x=torch.randn(1, 3, 256, 256))
    written = write_tapes(tmp_path / "page.html", tape, size=size)
    assert written <= size
    assert written > 0.4 * size  # Pictures are as fine as that allows.


def test_pictures_that_cannot_fit_are_left_out_and_the_others_stay():
    pictures = Pictures(1_000)
    for _ in range(20):
        pictures.add(torch.randn(1, 64, 32, 32))
    made = pictures.encode()
    assert len(made) == 20
    assert sum(map(weight, made)) <= 1_000
    assert None in made


def test_too_small_a_size_says_what_is_least():
    with pytest.raises(ValueError, match="at least 300,000 bytes"):
        tapes_page({"run": recorded()}, size=1000)


def test_numbers_too_are_kept_within_the_size(tmp_path):
    model = Cell()
    with th.record(model, "cell") as tape:
        model(torch.randn(2000, 2, 4))
    written = write_tapes(tmp_path / "page.html", tape, size=300_000)
    assert written <= 300_000
    data = data_of((tmp_path / "page.html").read_text())
    calls = [call["call"] for call in data["points"][0]["runs"][0]]
    assert (calls[0], calls[-1]) == (0, 1999)
    assert 1 < len(calls) < 2000
    assert any("are shown" in remark["text"] for remark in data["remarks"])


def test_points_that_cannot_fit_say_how_much_they_need(tmp_path):
    model = nn.Sequential(*(nn.Identity() for _ in range(1500)))
    tape = recorded(model, grad=False, x=torch.randn(2, 2))
    with pytest.raises(ValueError, match=r"the numbers of these 1,501 points take .* Increase size="):
        write_tapes(tmp_path / "page.html", tape, size=300_000)
    assert not (tmp_path / "page.html").exists()


def test_values_that_are_no_numbers_do_not_break_a_page(tmp_path):
    x = torch.randn(1, 3, 6, 7)
    x[0, 0, 0, 0] = torch.nan
    x[0, 1, 0, 0] = torch.inf
    tape = recorded(x=x)
    page = tapes_page({"run": tape})
    data = data_of(render(page))
    assert any(remark["address"] == "conv" and "NaN" in remark["text"] for remark in data["remarks"])
    conv = next(point for point in data["points"] if point["address"] == "conv")
    drawn = values_of(data["pictures"][conv["runs"][0][0]["parts"][0]["picture"]])
    assert np.isnan(drawn[0, 0, 0])
    assert conv["runs"][0][0]["parts"][0]["numbers"]["nans"] == int(tape["conv"].isnan().sum())


def test_calls_and_structures_each_have_their_place():
    model = Cell()
    with th.record(model, "cell") as tape:
        model(torch.randn(3, 2, 4))
    (point,) = tapes_page({"run": tape}).points
    assert [call["call"] for call in point["runs"][0]] == [0, 1, 2]
    lstm = nn.LSTM(3, 4)
    with th.record(lstm) as tape:
        lstm(torch.randn(5, 2, 3))
    (point,) = tapes_page({"run": tape}).points
    assert [part["path"] for part in point["runs"][0][0]["parts"]] == ["[0]", "[1][0]", "[1][1]"]


def test_inner_points_carry_their_source_also_from_a_file(tmp_path):
    model = Attention()
    tape = recorded(model, ":weights", x=torch.randn(1, 5, 4, requires_grad=True))
    tape.save(tmp_path / "run.th")
    for each in (tape, th.load(tmp_path / "run.th")):
        (point,) = tapes_page({"run": each}).points
        ((line, text),) = point["source"]
        assert text == "weights = scores.softmax(-1)"
        assert re.search(rf"testing\.py:{line}$", point["where"])


def test_a_name_that_is_assigned_twice_shows_both_lines(tmp_path):
    class Twice(nn.Module):
        def forward(self, x):
            y = x + 1
            y = y * 2
            return y

    tape = recorded(Twice(), ":y", grad=False, x=torch.ones(2))
    tape.save(tmp_path / "run.th")
    for each in (tape, th.load(tmp_path / "run.th")):
        (point,) = tapes_page({"run": each}).points
        assert [text for _, text in point["source"]] == ["y = x + 1", "y = y * 2"]


def test_gradients_that_vanish_and_values_that_explode_are_remarked_upon():
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)), nn.Linear(4, 1))
    with torch.no_grad():
        model[1].weight.mul_(1e-9)
        model[1].bias.zero_()
    texts = {each["address"]: each["text"] for each in tapes_page({"a": recorded(model, x=torch.randn(2, 4))}).remarks}
    assert "vanishes" in texts["0"]
    assert not tapes_page({"a": recorded(nn.Linear(4, 4), x=torch.randn(2, 4))}).remarks
    with torch.no_grad():
        model[1].weight.mul_(1e9)
        model[2].weight.mul_(1e9)
    texts = {each["address"]: each["text"] for each in tapes_page({"a": recorded(model, x=torch.randn(2, 4))}).remarks}
    assert "explode" in texts["2"]


def test_two_tapes_stand_under_the_same_points_with_how_far_they_are_apart():
    model = Net()
    with th.edit(model, {"relu": th.scale(2.0)}):
        right = recorded(model)
    page = tapes_page({"a": recorded(model), "b": right})
    compared = {point["address"]: point["runs"][0][0]["compared"] for point in page.points}
    assert compared["conv"]["value"] == {"apart": 0.0, "differs": False, "text": "equal"}
    assert compared["relu"]["value"]["apart"] == pytest.approx(1.0)
    assert compared["relu"]["value"]["differs"]
    assert page.first == {"address": "relu", "call": 0, "gradient": False}


def test_a_page_of_plain_rows_and_series_needs_no_tape(tmp_path):
    chart = Chart("loss", [0, 1, 2], {"train": [3.0, float("nan"), 1.0]}, x_label="step", log=True)
    table = Table("findings", (Column("what"), Column("steps", right=True)), (Row(("dead", "3")),), ("that is all",))
    size = write(tmp_path / "page.html", Page("a watch", {"steps": "3"}, charts=[chart], tables=[table]))
    data = data_of((tmp_path / "page.html").read_text())
    assert size < 200_000
    assert data["charts"][0]["series"] == {"train": [3.0, None, 1.0]}
    assert data["tables"][0]["rows"] == [[["dead", "3"], 0, ""]]


def test_a_page_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    file = tmp_path / "page.html"
    file.write_text("old")
    monkeypatch.setattr("pathlib.Path.write_bytes", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write(file, Page("x"))
    assert [each.name for each in tmp_path.iterdir()] == ["page.html"]
    assert file.read_text() == "old"
    with pytest.raises(FileNotFoundError, match="create it first"):
        write(tmp_path / "none" / "page.html", Page("x"))


def test_the_order_is_that_of_the_note_where_the_tape_has_none():
    tape = recorded(None, "**", grad=False)
    assert in_order(tape) == ["conv", "relu", "head", ":return"]
    tape.log.ordered = False
    tape.notes["order"] = ["head#0", "conv#0", "relu#0", ":return#0"]
    assert in_order(tape) == ["head", "conv", "relu", ":return"]


def test_the_ends_of_a_narrow_range_stay_apart():
    x = 1000 + torch.linspace(0, 0.01, 64).reshape(1, 64)
    page = tapes_page({"tape": recorded(nn.Identity(), grad=False, x=x)})
    seen = page.points[0]["runs"][0][0]["parts"][0]["numbers"]
    assert len(seen["histogram"]) == 8
    assert seen["high"] - seen["low"] == pytest.approx(0.01, rel=0.02)


def test_without_pillow_a_page_says_what_to_install(tmp_path):
    code = (
        "import sys; sys.modules['PIL'] = None\n"
        "import torch, tenterhook as th\n"
        "model = torch.nn.Linear(2, 2)\n"
        "with th.record(model) as tape: model(torch.ones(1, 2))\n"
        "try: th.page('page.html', tape)\n"
        "except ImportError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == 'a page needs pillow: pip install "tenterhook[page]"\n'
    assert list(tmp_path.iterdir()) == []
