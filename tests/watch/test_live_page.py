"""The live page of a watch in a real Chromium."""

import itertools
import os
import shutil

import pytest
import torch
from playwright.sync_api import expect, sync_playwright
from torch import nn

import tenterhook as th

NO_CHROMIUM = "the tests of the page need Chromium: apt-get install chromium, or set CHROMIUM to its path"


@pytest.fixture
def page():
    path = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    if not path:
        pytest.fail(NO_CHROMIUM)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])  # Root has no sandbox.
        page = browser.new_page()
        page.wrong = []
        page.on("console", lambda message: page.wrong.append(message.text))
        page.on("pageerror", lambda error: page.wrong.append(str(error)))
        yield page
        browser.close()


def test_the_page_shows_a_watch_while_it_runs(page):
    torch.manual_seed(0)
    model = nn.Sequential()
    model.add_module("<img src=x>", nn.Linear(4, 8))
    model.add_module("act", nn.Tanh())
    model.add_module("head", nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(value=1.0):
        optimizer.zero_grad()
        model(torch.full((6, 4), value)).square().mean().backward()
        optimizer.step()

    with th.watch(model, optimizer=optimizer, on_nan="record", thresholds={"saturated": 0.0}) as w:
        train()
        train()
        page.goto(w.serve())
        expect(page.locator("#state")).to_have_text("2 steps, 20 rows, 1 finding")
        expect(page.locator("#rows tr")).to_have_count(4)
        assert page.locator("#rows td:first-child").all_inner_texts() == ["<img src=x>", "act", "head", ":return"]
        assert page.locator("img").count() == 0  # A name is text and nothing else.
        expect(page.locator("#rows polyline")).to_have_count(4)
        assert page.locator("#rows rect").count() > 4
        expect(page.locator("#findings summary")).to_have_text("saturated activation at 'act'")
        shown = page.locator("#rows tr", has_text="head").locator("td").all_inner_texts()
        assert float(shown[5]) == pytest.approx(w.row("head")["last"]["norm"], rel=0.01)

        page.locator("#kinds button", has_text="parameters").click()
        expect(page.locator("#rows tr")).to_have_count(4)
        page.locator("#head button", has_text="norm").click()
        expect(page.locator("#head [aria-sort=descending]")).to_have_text("norm")
        norms = [float(row.locator("td").nth(5).inner_text()) for row in page.locator("#rows tr").all()]
        assert norms == sorted(norms, reverse=True)
        page.fill("#find", "bias")
        expect(page.locator("#rows tr")).to_have_count(2)
        page.fill("#find", "no such thing")
        expect(page.locator("#none")).to_have_text("No matching points.")
        page.fill("#find", "")
        page.locator("#kinds button", has_text="values").click()

        train(float("nan"))
        expect(page.locator("#state")).to_contain_text("3 steps")  # Without a reload.
        expect(page.locator("#wrong")).to_contain_text("input of the model already contained it")
        expect(page.locator("#rows tr.bad")).to_have_count(4)
        assert page.wrong == []
    expect(page.locator("#state")).to_contain_text("the watch has ended")


def test_a_long_list_is_loaded_where_it_is_looked_at(page):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(3, 3, bias=False) for _ in range(300)))
    with th.watch(model, of=("values", "parameters"), on_nan="record") as w:
        for _ in range(2):
            model(torch.randn(2, 3))
            w.step()
        page.goto(w.serve())
        expect(page.locator("#state")).to_contain_text("601 rows")
        expect(page.locator("#rows tr").first).to_contain_text("0")
        assert page.locator("#rows tr").count() < 80
        assert page.evaluate("document.documentElement.scrollHeight") > 300 * 20
        page.evaluate("scrollTo(0, 200 * 21)")
        expect(page.locator("#rows td:first-child", has_text="210")).to_be_visible()
        assert page.evaluate("scrollY") == 200 * 21
        row = page.locator("#rows tr", has=page.locator("td:first-child", has_text="210"))
        assert float(row.locator("td").nth(5).inner_text()) == pytest.approx(w.row("210")["last"]["norm"], rel=0.01)
        page.evaluate("scrollTo(0, document.documentElement.scrollHeight)")
        expect(page.locator("#rows td:first-child", has_text=":return")).to_be_visible()
        page.locator("#kinds button", has_text="parameters").click()
        page.locator("#head button", has_text="norm").click()
        norms = {row["address"]: row["last"]["norm"] for row in w.rows() if row["kind"] == "parameters"}
        largest = max(norms, key=norms.get)
        expect(page.locator("#rows td:first-child").first).to_have_text(largest)
        for _ in range(2):
            model(torch.randn(2, 3))
            w.step()
        expect(page.locator("#state")).to_contain_text("4 steps")
        expect(page.locator("#rows td:first-child").first).to_have_text(largest)
        page.locator("#kinds button", has_text="values").click()
        page.fill("#find", "210")
        expect(page.locator("#rows tr")).to_have_count(1)
        shown = page.locator("#rows td").all_inner_texts()
        assert float(shown[5]) == pytest.approx(w.row("210")["last"]["norm"], rel=0.01)
        assert page.wrong == []


def humps(heights, least=3):
    """Count the tops of a row of bars, without those that rise by less than ``least`` levels."""
    count, low, high, rising = 0, heights[0], heights[0], True
    for height in heights[1:]:
        if rising:
            high = max(high, height)
            if height <= high - least:
                count, rising, low = count + 1, False, height
        else:
            low = min(low, height)
            if height >= low + least:
                rising, high = True, height
    return count + rising


def test_a_gaussian_has_one_hump_on_an_axis_of_values(page):
    torch.manual_seed(0)
    model = nn.ModuleDict({"wide": nn.Identity(), "shifted": nn.Identity(), "two": nn.Identity(), "far": nn.Identity()})

    def forward():
        sign = torch.randint(0, 2, (64, 64)) * 2.0 - 1
        model["wide"](torch.randn(64, 64) * 30)
        model["shifted"](torch.randn(64, 64) * 0.01 + 0.05)
        model["two"](torch.randn(64, 64) + 6 * sign)
        model["far"](torch.where(torch.rand(64, 64) < 0.003, 1e5, torch.randn(64, 64)))

    with th.watch(model, slow=1, steps="manual") as w:
        for _ in range(100):
            forward()
            w.step()
        page.goto(w.serve())
        expect(page.locator("#rows tr")).to_have_count(4)
        seen = {}
        for row in page.locator("#rows tr").all():
            bars = row.locator("svg").first.locator("rect").all()
            boxes = [(float(bar.get_attribute("x")), float(bar.get_attribute("height"))) for bar in bars]
            assert len({round(b[0] - a[0], 6) for a, b in itertools.pairwise(boxes)}) == 1  # One width.
            seen[row.locator("td").first.inner_text()] = [height for _, height in boxes]
            title = row.locator("svg title").first.text_content()
            assert ("of the values are outside this range" in title) is (row.locator("td").first.inner_text() == "far")
        assert {name: humps(heights) for name, heights in seen.items()} == {"wide": 1, "shifted": 1, "two": 2, "far": 1}
        zero = page.locator("#rows tr", has_text="wide").locator("svg line")
        assert 35 < float(zero.get_attribute("x1")) < 55  # About the middle of 90 pixels.
        assert page.locator("#rows tr", has_text="shifted").locator("svg line").count() <= 1
        assert page.wrong == []


def test_findings_of_one_kind_are_one_entry(page):
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(12) for layer in (nn.Linear(4, 4), nn.Tanh())))
    with th.watch(model, thresholds={"saturated": 0.0, "vanishing": 0.0}) as w:
        for _ in range(2):
            model(torch.randn(2, 4)).sum().backward()
            w.step()
        page.goto(w.serve())
        expect(page.locator("#findings summary")).to_have_text("saturated activation in 12 layers: 1 … 23")
        assert page.locator("#findings li:visible").count() == 0
        page.locator("#findings summary").click()
        texts = page.locator("#findings li").all_inner_texts()
        assert [text.split(":")[0] for text in texts] == [f"saturated activation at {at}" for at in range(1, 24, 2)]
        model(torch.randn(2, 4)).sum().backward()
        w.step()
        expect(page.locator("#state")).to_contain_text("3 steps")
        assert page.locator("#findings li:visible").count() == 12  # It stays open.
        assert page.wrong == []


def test_a_hidden_page_asks_for_nothing(page):
    model = nn.Linear(2, 2)
    with th.watch(model) as w:
        page.goto(w.serve())
        expect(page.locator("#state")).to_contain_text("0 steps")
        page.evaluate("Object.defineProperty(document, 'hidden', { value: true })")
        page.wait_for_timeout(1500)
        asked = []
        page.on("request", lambda request: asked.append(request.url))
        page.wait_for_timeout(2500)
        assert asked == []
