"""The page in a real Chromium, opened from disk with the network off."""

import os
import re
import shutil
import time

import pytest
import torch
from playwright.sync_api import expect, sync_playwright
from torch import nn

import tenterhook as th
from tenterhook._draw import Column, Row, Table
from tenterhook.report.page import Chart, Page, write, write_tapes
from tenterhook.testing import Attention, Cell

NO_CHROMIUM = "the tests of the page need Chromium: apt-get install chromium, or set CHROMIUM to its path"
LOWEST, HIGHEST = (0x44, 0x01, 0x54), (0xFD, 0xE7, 0x25)  # the ends of viridis


@pytest.fixture(scope="module")
def browser():
    path = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    if not path:
        pytest.fail(NO_CHROMIUM)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])  # Root has no sandbox.
        yield browser
        browser.close()


@pytest.fixture
def show(browser):
    """Open a file, and hold it to what every page must keep: no message on the console, no request but the file."""
    contexts, said, asked = [], [], []

    def opened(file, **options):
        context = browser.new_context(viewport={"width": 1280, "height": 800}, offline=True, **options)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(file.as_uri())
        page.wait_for_selector("html[data-ready]")
        return page

    yield opened
    for context in contexts:
        context.close()
    assert said == []
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []
    assert len([url for url in asked if url.startswith("file:")]) == len(contexts)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()) for _ in range(3)))
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


def tape_of(model, x, *selectors, loss=torch.sum):
    with th.record(model, *(selectors or ["**"]), grad=True) as tape:
        loss(model(x)).backward()
    return tape


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    torch.manual_seed(0)
    file = tmp_path_factory.mktemp("page") / "page.html"
    write_tapes(file, tape_of(Net(), torch.randn(1, 3, 16, 16), "**", "stem.weight"), title="a small net")
    return file


def row(page, address):
    return page.locator(f'.row[data-address="{address}"]')


def pixel(page, x, y, card=".maps >> nth=0"):
    """The colour that is on the screen, counted from the corner of the first picture of a card."""
    canvas = page.locator(card).locator(".pictures canvas").first
    read = """(canvas, [x, y]) => {
        const ratio = canvas.width / parseFloat(canvas.style.width);
        const copy = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
        copy.drawImage(canvas, -Math.floor(x * ratio), -Math.floor(y * ratio));
        return [...copy.getImageData(0, 0, 1, 1).data].slice(0, 3);
    }"""
    return tuple(canvas.evaluate(read, [x, y]))


def ink(page, canvas):
    """The columns of a chart, as shares of its width, between which more than its frame and its text is drawn."""
    read = """(canvas) => {
        const { width, height } = canvas;
        const copy = new OffscreenCanvas(width, height).getContext("2d");
        copy.drawImage(canvas, 0, 0);
        const { data } = copy.getImageData(0, 0, width, height);
        const found = [];
        for (let at = 0; at < data.length; at += 4) {
            const parts = [data[at], data[at + 1], data[at + 2]];
            if (data[at + 3] > 200 && Math.max(...parts) - Math.min(...parts) > 90) found.push((at / 4) % width);
        }
        const end = (pick) => found.reduce((a, b) => pick(a, b)) / width;
        return found.length ? [end(Math.min), end(Math.max)] : null;
    }"""
    page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    return page.locator(canvas).first.evaluate(read)


def seconds_to_draw(page):
    """How long the page was busy until it could be used, or is in drawing itself anew: the longer of the two."""
    again = """async () => {
        const began = performance.now();
        TH.theme.toggle();
        await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
        return performance.now() - began;
    }"""
    return max(float(page.locator("html").get_attribute("data-ready")), page.evaluate(again)) / 1000


def through(values, model=None, selector="0"):
    """A tape of values that pass, unchanged where no model is given."""
    model = model or nn.Sequential(nn.Identity())
    with th.record(model, selector) as tape:
        model(values)
    return tape


def ready(page):
    page.wait_for_selector('.maps .pictures[data-ready="yes"]')


def test_it_opens_from_disk_without_a_network_and_shows_the_model(show, file):
    page = show(file)
    assert page.title() == "a small net"
    assert page.locator("#top h1").inner_text() == "a small net"
    assert row(page, "stem").count() == 1
    assert page.locator("#depth canvas").count() == 2


def test_search_finds_and_enter_goes_there(show, file):
    page = show(file)
    page.keyboard.press("/")
    page.keyboard.type("relu")
    expect(page.locator("#hits")).to_have_text("3 of 14")
    assert page.locator(".row[data-address]").evaluate_all("rows => rows.map((row) => row.dataset.address)") == [
        "blocks", "blocks.0", "blocks.0.1", "blocks.1", "blocks.1.1", "blocks.2", "blocks.2.1",
    ]  # fmt: skip
    page.keyboard.press("Enter")
    expect(page.locator("h2")).to_contain_text("blocks.0.1")
    page.keyboard.press("Enter")
    expect(page.locator("h2")).to_contain_text("blocks.1.1")
    page.fill("#query", "no such thing")
    expect(page.locator("#rows")).to_contain_text("No matching points.")
    page.keyboard.press("Escape")
    assert row(page, "stem").count() == 1


def test_clicking_a_point_shows_its_numbers_histograms_and_maps(show, file):
    page = show(file)
    row(page, "blocks.1.0").click()
    expect(page.locator("h2")).to_contain_text("blocks.1.0")
    ready(page)
    assert page.locator(".maps").count() == 2
    assert page.locator(".maps h3").all_inner_texts() == ["Values", "Gradients"]
    assert page.locator(".histogram canvas").count() == 2
    assert page.locator(".note", has_text="8 maps of 16×16").count() == 2
    assert page.evaluate("decodeURIComponent(location.hash)") == "#blocks.1.0"
    row(page, "head").click()
    expect(page.locator("h2")).to_contain_text("head")
    assert page.locator(".vector").count() == 2


def test_the_keyboard_walks_the_tree(show, file):
    page = show(file)
    row(page, "stem").click()
    page.locator("#tree").focus()
    page.keyboard.press("ArrowDown")
    expect(page.locator("h2")).to_contain_text("stem.weight")
    page.keyboard.press("ArrowDown")
    expect(page.locator("h2")).to_contain_text("blocks")
    page.keyboard.press("ArrowLeft")
    assert row(page, "blocks.0").count() == 0
    page.keyboard.press("ArrowRight")
    assert row(page, "blocks.0").count() == 1
    page.keyboard.press("End")
    expect(page.locator("h2")).to_contain_text("head")


def test_colours_are_those_of_the_values_and_follow_the_scale(show, tmp_path):
    values = torch.zeros(1, 2, 4, 4)
    values[0, 0, 0, 0], values[0, 1, 3, 3], values[0, 0, 3, 0] = 1.0, -1.0, torch.nan
    model = nn.Conv2d(2, 2, 1)
    with th.record(model, ":in") as tape:
        model(values)
    write_tapes(tmp_path / "page.html", tape)
    page = show(tmp_path / "page.html")
    ready(page)
    tile = float(page.locator('input[type="range"]').first.input_value())
    cell = tile / 4
    low, high = page.locator(".bound").all()
    assert (low.input_value(), high.input_value()) == ("-1", "1")
    assert pixel(page, cell / 2, cell / 2) == HIGHEST
    assert pixel(page, cell / 2, tile - cell / 2) == (255, 0, 200)  # No number.
    assert pixel(page, tile + 3 + tile - cell / 2, tile - cell / 2) == LOWEST
    middle = pixel(page, cell * 1.5, cell / 2)
    high.fill("0")
    high.press("Enter")
    page.wait_for_function("document.querySelectorAll('.bound')[1].value === '0'")
    page.wait_for_timeout(200)
    assert middle not in (LOWEST, HIGHEST)
    assert pixel(page, cell * 1.5, cell / 2) == HIGHEST  # Zero is now the end of the scale.
    page.locator("select").first.select_option("grey")
    page.wait_for_timeout(200)
    assert pixel(page, cell / 2, cell / 2) == (255, 255, 255)


def test_a_map_can_be_looked_at_closely(show, file):
    page = show(file)
    row(page, "stem").click()
    ready(page)
    canvas = page.locator(".maps .pictures canvas").first
    canvas.click(position={"x": 5, "y": 5})
    expect(page.locator(".large-holder").first).to_be_visible()
    assert page.locator(".large-holder").first.get_attribute("data-title").startswith("channel 0, ")
    canvas.hover(position={"x": 5, "y": 5})
    expect(page.locator("#tip")).to_contain_text("channel 0, row 0")


def test_the_chart_of_the_depth_leads_to_a_point(show, file):
    page = show(file)
    over = page.locator('.depth[data-key="gradient"] .u-over')
    box = over.bounding_box()
    over.click(position={"x": box["width"] - 2, "y": 20})
    expect(page.locator("h2")).to_contain_text(":return")
    over.click(position={"x": 2, "y": 20})
    expect(page.locator("h2")).to_contain_text("stem")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_light_or_dark_as_the_reader_likes_it(show, file, scheme):
    page = show(file, color_scheme=scheme)

    def brightness():
        colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
        return sum(map(int, colour.removeprefix("rgb(").removesuffix(")").split(",")))

    assert (brightness() > 384) is (scheme == "light")
    page.locator("#theme").click()
    assert (brightness() > 384) is (scheme == "dark")
    ready(page)


def test_calls_are_chosen_by_chip_and_by_key(show, tmp_path):
    model = Cell()
    with th.record(model, "cell") as tape:
        model(torch.randn(3, 2, 4))
    write_tapes(tmp_path / "page.html", tape)
    page = show(tmp_path / "page.html")
    expect(page.locator("h2")).to_contain_text("cell#0")
    page.locator(".chips button", has_text="#2").click()
    expect(page.locator("h2")).to_contain_text("cell#2")
    page.locator("h2").click()
    page.keyboard.press("[")
    expect(page.locator("h2")).to_contain_text("cell#1")


def test_inner_points_show_their_line_and_tokens_stand_along_the_axes(show, tmp_path):
    tape = tape_of(Attention(), torch.randn(1, 4, 8, requires_grad=True), ":weights")
    tape.notes["tokens"] = ["The", " cat", " sat", " down"]
    write_tapes(tmp_path / "page.html", tape)
    page = show(tmp_path / "page.html")
    expect(page.locator(".source")).to_contain_text("weights = scores.softmax(-1)")
    ready(page)
    page.locator(".pictures canvas").first.hover(position={"x": 96 + 30, "y": 78 + 10})
    expect(page.locator("#tip")).to_contain_text('row 0 "The", column 1 " cat"')


def test_a_failed_run_is_marked_where_it_failed(show, tmp_path):
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Flatten(), nn.Linear(5, 2))
    with pytest.raises(RuntimeError), th.record(model, "**") as tape:
        model(torch.randn(1, 3, 4, 4))
    write_tapes(tmp_path / "page.html", tape)
    page = show(tmp_path / "page.html")
    expect(page.locator(".failure")).to_contain_text("The run failed in 2 (Linear)")
    expect(page.locator(".failure")).to_contain_text("float32[1, 64]")
    expect(row(page, "2").locator(".badge")).to_have_text("failed")
    expect(page.locator("h2")).to_contain_text("2")


def test_two_tapes_stand_side_by_side(show, tmp_path):
    torch.manual_seed(0)
    model, x = Net(), torch.randn(1, 3, 8, 8)
    left = tape_of(model, x)
    with th.edit(model, {"blocks.1": th.scale(3.0)}):
        right = tape_of(model, x)
    write_tapes(tmp_path / "page.html", {"before": left, "after": right})
    page = show(tmp_path / "page.html")
    row(page, "blocks.1").click()
    ready(page)
    first, second = (canvas.bounding_box() for canvas in page.locator(".maps").first.locator(".pictures canvas").all())
    assert first["y"] == second["y"]
    assert first["x"] + first["width"] <= second["x"]
    expect(page.locator(".compared").first).to_contain_text("Values of the two runs: off by up to")
    expect(page.locator(".compared").first).to_contain_text("a relative difference of 2.")
    titles = page.locator(".histograms h3").all_inner_texts()
    assert [title.split("\n")[0] for title in titles] == [
        f"Histogram, {name} {what}" for what in ("value", "gradient") for name in ("before", "after")
    ]
    tops = [card.bounding_box()["y"] for card in page.locator(".histograms .card").all()]
    assert tops[0] == tops[1] < tops[2] == tops[3]
    before, after = (ink(page, f".histogram >> nth={at} >> canvas") for at in (0, 1))
    assert after[1] - after[0] > 2.5 * (before[1] - before[0])  # On one axis, three times as far.
    for key in ("value", "gradient"):
        marks = page.locator(f'.depth[data-key="{key}"] .run')
        assert marks.all_inner_texts() == ["before", "after"]
        assert len({mark.locator("i").get_attribute("style") for mark in marks.all()}) == 2
    row(page, "stem").click()
    assert page.locator(".compared").all_inner_texts()[0] == "Values of the two runs: equal."
    expect(page.locator(".compared >> nth=1")).to_contain_text("Gradients of the two runs: off by up to")


def test_two_tapes_open_at_the_first_difference_and_it_is_marked_in_the_tree(show, tmp_path):
    class Backwards(nn.Module):
        def __init__(self):
            super().__init__()
            self.last, self.first = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh())

        def forward(self, x):
            return self.last(self.first(self.first(x)))

    torch.manual_seed(0)
    model, x = Backwards(), torch.randn(2, 4)
    left = tape_of(model, x)
    with th.edit(model, {"first.1#1": th.scale(2.0)}):
        right = tape_of(model, x)
    write_tapes(tmp_path / "page.html", {"before": left, "after": right})
    page = show(tmp_path / "page.html")
    expect(page.locator("h2")).to_contain_text("first.1#1")
    expect(row(page, "first.1").locator(".badge.first")).to_have_text("first difference")
    assert page.locator(".badge.first").count() == 1
    expect(row(page, "last").locator(".badge.differs")).to_have_text("≠")
    expect(page.locator(".compared").first).to_contain_text("This is the first difference.")
    expect(page.locator(".remarks li").first).to_contain_text("first.1#1: the first difference: values, off by up to")
    assert page.locator(".remarks li").all_inner_texts()[1].startswith("compared: 4 of 8 values differ; ")
    for key in ("value-difference", "gradient-difference"):
        assert ink(page, f'.depth[data-key="{key}"] canvas') is not None
    row(page, "first").locator(".fold").click()  # Folded away, it is marked at the row above it.
    expect(row(page, "first").locator(".badge.first")).to_have_text("first difference")


def test_gradients_alone_that_differ_are_the_first_difference(show, tmp_path):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), torch.randn(2, 4)
    left = tape_of(model, x)
    with th.edit(model, grad={"1": lambda gradient: gradient * 2}):
        right = tape_of(model, x)
    write_tapes(tmp_path / "page.html", {"before": left, "after": right})
    page = show(tmp_path / "page.html")
    expect(page.locator("h2")).to_contain_text("1")
    texts = page.locator(".compared").all_inner_texts()
    assert texts[0] == "Values of the two runs: equal."
    assert texts[1].startswith("Gradients of the two runs: off by up to")
    assert texts[1].endswith("This is the first difference.")
    expect(row(page, "1").locator(".badge.first")).to_have_attribute("title", re.compile("gradients"))
    assert row(page, "2").locator(".badge").count() == 0
    expect(row(page, "0").locator(".badge.differs")).to_have_text("≠")


def test_two_equal_tapes_say_how_much_was_compared_and_mark_nothing(show, tmp_path):
    torch.manual_seed(0)
    tape = tape_of(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(2, 4))
    write_tapes(tmp_path / "page.html", {"before": tape, "after": tape})
    page = show(tmp_path / "page.html")
    assert page.locator(".remarks li").all_inner_texts() == ["compared: 0 of 3 values differ; 0 of 3 gradients differ"]
    assert page.locator(".badge").count() == 0


def test_names_from_a_model_are_text_and_nothing_else(show, tmp_path):
    model = nn.Sequential()
    model.add_module("</script><img src=x onerror=alert(1)>", nn.ReLU())
    with th.record(model, nn.ReLU) as tape:
        model(torch.ones(1, 4))
    write_tapes(tmp_path / "page.html", tape, title="<b>bold</b>")
    page = show(tmp_path / "page.html")
    assert page.title() == "<b>bold</b>"
    assert page.locator("img").count() == 0
    expect(page.locator("h2")).to_contain_text("onerror=alert(1)")


def colours(page, place):
    """How many of the pixels of an image that is on the page are clearly red, and clearly blue."""
    read = """(image) => {
        const canvas = new OffscreenCanvas(image.naturalWidth, image.naturalHeight).getContext("2d");
        canvas.drawImage(image, 0, 0);
        const data = canvas.getImageData(0, 0, image.naturalWidth, image.naturalHeight).data;
        let red = 0, blue = 0;
        for (let at = 0; at < data.length; at += 4) {
            if (data[at] > data[at + 2] + 80) red++;
            if (data[at + 2] > data[at] + 80) blue++;
        }
        return [red, blue];
    }"""
    return page.locator(".figure img").nth(place).evaluate(read)


def test_attributions_are_drawn_beside_the_tape_and_alone(show, tmp_path):
    torch.manual_seed(0)
    model, x = Net().eval(), torch.rand(1, 3, 16, 16)
    cam = th.recipes.gradcam(model, x, point="blocks.2", target=1)
    signed = th.recipes.integrated_gradients(model, x, target=1, steps=5)
    th.page(tmp_path / "tape.html", tape_of(model, x), also=[cam, signed, th.recipes.side_by_side([cam, signed])])
    page = show(tmp_path / "tape.html")
    assert row(page, "stem").count() == 1
    titles = page.locator(".figure h3").all_inner_texts()
    assert titles == [
        "Grad-CAM at blocks.2: [1, 16, 16]",
        "integrated gradients: [1, 3, 16, 16]",
        "Grad-CAM at blocks.2, integrated gradients",
    ]
    expect(page.locator(".figure").nth(1)).to_contain_text("steps     5")
    for place in range(3):
        box = page.locator(".figure img").nth(place).bounding_box()
        assert box["width"] > 400
        assert box["height"] > 150
    red, blue = colours(page, 1)
    assert red > 500  # What counts for the target is red, and what counts against it blue.
    assert blue > 500
    th.page(tmp_path / "alone.html", signed)
    page = show(tmp_path / "alone.html")
    assert page.title() == "integrated gradients: [1, 3, 16, 16]"
    assert not page.locator("#side").is_visible()
    assert page.locator(".figure img").count() == 1


def test_what_has_no_picture_is_described_in_words_and_a_small_page_leaves_pictures_out(show, tmp_path):
    class Solid(nn.Module):
        def forward(self, x):
            return x.flatten(1).sum(1, keepdim=True)

    solid = th.recipes.saliency(Solid(), torch.rand(1, 2, 3, 4, 5), target=0)
    flat = th.recipes.saliency(Solid(), torch.rand(1, 1, 64, 64), target=0)
    size = th.page(tmp_path / "page.html", [solid, *[flat] * 9], size=450_000)
    assert size < 450_000
    page = show(tmp_path / "page.html")
    assert page.title() == "10 results"
    expect(page.locator(".figure").first).to_contain_text("cannot be drawn")
    assert 0 < page.locator(".figure img").count() < 9
    expect(page.locator(".figure").last).to_contain_text("maximum size of the page")


def test_charts_and_tables_alone_make_a_page(show, tmp_path):
    chart = Chart("loss", list(range(50)), {"train": [1 / (1 + x) for x in range(50)], "test": [0.5] * 50}, log=True)
    table = Table("findings", (Column("what"), Column("steps", right=True)), (Row(("dead units", "3")),))
    write(tmp_path / "page.html", Page("a watch", {"steps": "50"}, charts=[chart], tables=[table]))
    page = show(tmp_path / "page.html")
    expect(page.locator(".chart h3")).to_have_text("loss")
    assert page.locator(".chart canvas").count() == 1
    expect(page.locator("table.rows td").first).to_have_text("dead units")
    assert not page.locator("#side").is_visible()
    assert not page.locator(".keys").is_visible()
    page.locator("#theme").click()
    left, right = ink(page, ".chart canvas")
    assert right - left > 0.8


def test_five_thousand_points_stay_quick(show, tmp_path):
    model = nn.Sequential(*(nn.Sequential(*(nn.Identity() for _ in range(49))) for _ in range(100)))
    with th.record(model, "**", copy="always") as tape:
        model(torch.randn(1, 16, 64))
    assert len(tape) == 5001
    assert write_tapes(tmp_path / "page.html", tape) <= 10_000_000
    page = show(tmp_path / "page.html")
    assert page.locator(".row").count() < 120  # Only what can be seen is in the document.
    began = time.perf_counter()
    page.fill("#query", "99.48")
    expect(page.locator("#hits")).to_have_text("1 of 5,001")
    page.keyboard.press("Enter")
    expect(page.locator("h2")).to_contain_text("99.48")
    ready(page)
    assert time.perf_counter() - began < 5


class Times(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return x * self.factor


@pytest.mark.parametrize("factor", [1e-11, 1e-6, 1e9])
def test_gradients_and_values_of_every_size_are_drawn_at_once(show, tmp_path, factor):
    model = nn.Sequential(*(Times(factor) for _ in range(4)))
    write_tapes(tmp_path / "page.html", tape_of(model, torch.randn(2, 4, requires_grad=True)))
    page = show(tmp_path / "page.html")
    assert seconds_to_draw(page) < 2
    for key in ("value", "gradient"):
        left, right = ink(page, f'.depth[data-key="{key}"] canvas')
        assert right - left > 0.5
    assert ink(page, ".histogram canvas") is not None


@pytest.mark.parametrize("size", [1e-40, 1e-35, 1e-26, 1e-22, 1e-18, 1.0, 1e18, 1e30, 3e38])
def test_histograms_of_every_size_are_drawn_at_once(show, tmp_path, size):
    write_tapes(tmp_path / "page.html", through(torch.linspace(-1, 1, 64).reshape(4, 16) * size))
    page = show(tmp_path / "page.html")
    assert seconds_to_draw(page) < 2
    for now in ("linear", "log"):
        left, right = ink(page, ".histogram canvas")
        assert right - left > 0.6
        page.locator(".cards .toggle", has_text=now).click()


def test_ticks_stand_at_round_numbers_over_the_whole_range_of_floats(show, file):
    page = show(file)
    ticks = """([low, high]) => {
        const chart = { width: 400, height: 104 };
        const of = (axis, ...range) => axis.values(chart, axis.splits(chart, 1, ...range));
        const [linear, powers] = [TH.axes.linear(1, { size: 40 }), TH.axes.logarithmic({ size: 40 })];
        return [of(linear, low, high), of(powers, Math.log10(low), Math.log10(high))];
    }"""
    assert page.evaluate(ticks, [0.9, 1.1])[0] == ["0.9", "1", "1.1"]
    assert page.evaluate(ticks, [1000.001, 1000.002])[0] == ["1000.001", "1000.0015", "1000.002"]
    assert page.evaluate(ticks, [1e-44, 5.0])[1] == ["1e-40", "1e-20", "1"]
    assert page.evaluate(ticks, [3e-8, 3e-5])[1] == ["1e-7", "1e-6", "1e-5"]
    assert page.evaluate(ticks, [0.15, 0.6])[1] == ["0.2", "0.5"]
    steps = "TH.axes.linear(1, { size: 40, whole: true }).splits({ width: 1400, height: 104 }, 0, 0, 4)"
    assert page.evaluate(steps) == [0, 1, 2, 3, 4]
    assert page.evaluate("TH.axes.linear(TH.axes.unitOf([-2e-35, 3.4e-35]), { size: 40 }).label") == "× 1e-35"


def test_a_chart_that_cannot_be_drawn_leaves_the_others_alone(show, file):
    page = show(file)
    page.evaluate("""() => {
        const whole = uPlot;
        let made = 0;
        uPlot = function (...given) {
            made += 1;
            if (made === 1) throw new Error("no ink");
            return new whole(...given);
        };
        uPlot.paths = whole.paths;
    }""")
    page.locator("#theme").click()
    expect(page.locator('.depth[data-key="value"]')).to_contain_text("This chart could not be drawn: no ink")
    assert page.locator('.depth[data-key="gradient"] canvas').count() == 1
    expect(page.locator(".histogram canvas")).to_have_count(2)


@pytest.mark.parametrize("value", [1.0, 0.0, -3.0, 1e-10, 1e30])
def test_the_histogram_of_one_value_is_a_narrow_bar_in_the_middle(show, tmp_path, value):
    write_tapes(tmp_path / "page.html", through(torch.full((4, 16), value)))
    page = show(tmp_path / "page.html")
    left, right = ink(page, ".histogram canvas")
    assert 0.4 < (left + right) / 2 < 0.7
    assert right - left < 0.08
    page.locator(".histogram .u-over").hover()
    expect(page.locator("#tip")).to_contain_text(": 64")


@pytest.mark.parametrize("width", [360, 420, 800, 1400])
def test_nothing_is_cut_off_on_narrow_and_wide_screens(show, file, tmp_path, width):
    tape = tape_of(nn.Sequential(*(Times(1e-11) for _ in range(4))), torch.randn(2, 4, requires_grad=True))
    write_tapes(tmp_path / "two.html", {"before": tape, "after": tape})
    for each in (file, tmp_path / "two.html"):
        page = show(each)
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_timeout(200)
        for part in ("document.documentElement", "document.getElementById('main')"):
            assert page.evaluate(f"{part}.scrollWidth <= {part}.clientWidth")
        for box in (button.bounding_box() for button in page.locator(".toggle").all()):
            assert box["x"] + box["width"] <= width
        if each == file or width > 600:  # Four columns are wider than a telephone: they scroll in their card.
            assert page.locator(".numbers").evaluate("(card) => card.scrollWidth <= card.clientWidth")


def test_on_a_narrow_screen_a_short_tree_takes_no_more_room_than_it_needs(show, tmp_path):
    write_tapes(tmp_path / "page.html", through(torch.randn(2, 3)))
    page = show(tmp_path / "page.html")
    page.set_viewport_size({"width": 420, "height": 900})
    page.wait_for_timeout(100)
    assert page.locator("#tree").bounding_box()["height"] == 24
    assert page.locator(".row").count() == 1


def test_masked_cells_have_the_colour_of_the_end_of_the_scale_in_every_map(show, tmp_path):
    torch.manual_seed(0)
    values = torch.rand(1, 4, 4, 4) + torch.arange(4.0).reshape(4, 1, 1)
    values[0, :, 0, 3] = torch.finfo(torch.float32).min
    write_tapes(tmp_path / "page.html", through(values))
    page = show(tmp_path / "page.html")
    ready(page)
    tile = float(page.locator('input[type="range"]').first.input_value())
    across = int(page.locator(".maps canvas").last.bounding_box()["width"] // tile)
    for at in range(4):
        left, top = (tile + 3) * (at % across), (tile + 3) * (at // across)
        assert pixel(page, left + tile * 7 / 8, top + tile / 8) == LOWEST
    page.locator(".pictures canvas").hover(position={"x": tile * 7 / 8, "y": tile / 8})
    expect(page.locator("#tip")).to_contain_text("below -1e30")


@pytest.mark.parametrize(
    ("ends", "shown"),
    [
        ((-0.038123, 0.038123), ["-0.0381", "0.0381"]),
        ((-2.12e-35, 3.4e-35), ["-2.12e-35", "3.4e-35"]),
        ((2.65e-6, 1.5e6), ["2.65e-6", "1.5e6"]),
    ],
)
def test_the_ends_of_the_scale_can_be_read_whole(show, tmp_path, ends, shown):
    write_tapes(tmp_path / "page.html", through(torch.tensor(ends).repeat(4, 2)))
    page = show(tmp_path / "page.html")
    ready(page)
    for bound, text in zip(page.locator(".bound").all(), shown, strict=True):
        assert bound.input_value() == text
        assert bound.evaluate("(field) => field.scrollWidth <= field.clientWidth")


@pytest.mark.parametrize(
    ("bad", "text"), [([torch.nan], "NaN"), ([torch.inf], "Inf"), ([torch.inf, torch.nan], "NaN Inf")]
)
def test_the_badge_says_what_is_no_number(show, tmp_path, bad, text):
    values = torch.ones(2, 4)
    values[0, : len(bad)] = torch.tensor(bad)
    write_tapes(tmp_path / "page.html", through(values))
    expect(row(show(tmp_path / "page.html"), "0").locator(".badge")).to_have_text(text)


class Twice(nn.Module):
    def forward(self, x):
        y = x * 2
        y = y + 1
        return y


def test_of_several_lines_none_is_claimed_unless_the_address_names_it(show, tmp_path):
    first = Twice.forward.__code__.co_firstlineno + 1
    write_tapes(tmp_path / "name.html", through(torch.ones(2, 3), Twice(), ":y"))
    page = show(tmp_path / "name.html")
    page.locator(".chips button", has_text="#1").click()
    expect(page.locator(".source")).to_contain_text(f"test_page.py, lines {first}, {first + 1}")
    expect(page.locator(".source")).to_contain_text("does not store which")
    write_tapes(tmp_path / "place.html", through(torch.ones(2, 3), Twice(), ":y[1]"))
    page = show(tmp_path / "place.html")
    expect(page.locator(".source")).to_contain_text(f"test_page.py:{first + 1}")
    assert page.locator(".source code").count() == 1


def test_attention_has_heads_queries_and_keys_and_a_head_is_enlarged_by_a_click(show, tmp_path):
    tape = through(torch.rand(1, 4, 5, 5))
    tape.notes["tokens"] = ["The", " cat", " sat", " down", "."]
    write_tapes(tmp_path / "page.html", tape)
    page = show(tmp_path / "page.html")
    ready(page)
    expect(page.locator(".maps .note")).to_have_text("4 heads of 5×5")
    canvas = page.locator(".pictures canvas")
    canvas.hover(position={"x": 50, "y": 10})
    expect(page.locator("#tip")).to_contain_text('head 0, query 0 "The", key 1 " cat"')
    canvas.click(position={"x": 5, "y": 5})
    expect(page.locator(".large-holder")).to_have_attribute("data-title", re.compile("^head 0, "))
    tile = float(page.locator('input[type="range"]').first.input_value())
    large = page.locator("canvas.large").bounding_box()
    assert min(large["width"] - 96, large["height"] - 78) > 1.5 * tile


def test_the_strip_of_a_line_stands_below_its_values(show, tmp_path):
    values = torch.zeros(3, 1, 4)
    values[0, 0] = torch.tensor([1.0, -1.0, 1.0, -1.0])
    write_tapes(tmp_path / "page.html", tape_of(nn.Identity(), values.requires_grad_()))
    page = show(tmp_path / "page.html")
    page.wait_for_selector(".strip[style]")
    expect(page.locator(".vector .note").first).to_have_text("example 0 of 3")
    plot, strip = (page.locator(f".vector >> nth=0 >> {part}").bounding_box() for part in (".u-over", ".strip"))
    assert strip["x"] == pytest.approx(plot["x"], abs=1)
    assert strip["width"] == pytest.approx(plot["width"], abs=1)
    assert page.locator(".vector").count() == 2
    of = """(canvas) => {
        const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d");
        copy.drawImage(canvas, 0, 0);
        const count = [0, 0];
        const { data } = copy.getImageData(0, 0, canvas.width, canvas.height);
        for (let at = 0; at < data.length; at += 4) {
            if (data[at + 3] < 200) continue;
            if (data[at + 2] > data[at] + 60) count[0] += 1;
            if (data[at] > data[at + 2] + 60) count[1] += 1;
        }
        return count;
    }"""
    blue, orange = (page.locator(f".vector >> nth={at} >> .u-wrap canvas").evaluate(of) for at in (0, 1))
    assert blue[0] > 50 > blue[1]
    assert orange[1] > 50 > orange[0]


def test_findings_of_one_kind_are_one_entry_with_details(show, tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))))
    for layer in range(0, 18, 3):
        nn.init.constant_(model[layer].bias, -100.0)
    with th.watch(model, on_nan="record", thresholds={"dead_steps": 2, "vanishing": 0}) as w:
        for _ in range(3):
            model(torch.randn(2, 4)).sum().backward()
        model(torch.full((2, 4), torch.inf)).sum().backward()
    th.page(tmp_path / "page.html", w)
    page = show(tmp_path / "page.html")
    report, *groups = page.locator(".remarks > ul > li").all()
    assert "argument 0 of ':return': float32 [2, 4], 8 Inf" in report.inner_text().splitlines()
    (dead,) = groups
    title = dead.locator("summary")
    expect(title).to_contain_text("dead units in 6 layers: 1 … 16")
    assert dead.locator("li:visible").count() == 0
    title.click()
    *found, advice = dead.locator("li").all_inner_texts()
    assert [text.split("'")[1] for text in found] == ["1", "4", "7", "10", "13", "16"]
    assert advice.startswith("Likely cause: ")
    assert " Try: " in advice


def test_a_remark_names_its_point_and_the_bars_and_the_depth_say_what_they_are(show, file, tmp_path):
    write_tapes(tmp_path / "page.html", through(torch.full((2, 4), torch.nan)))
    page = show(tmp_path / "page.html")
    expect(page.locator(".remarks li")).to_have_text("0: the first value with NaN: 8 of 8 elements")
    assert page.locator(".sizes").count() == 0  # No size is known.
    page = show(file)
    expect(page.locator(".sizes")).to_contain_text("valuesgradientssize (rms)")
    expect(page.locator("#depth")).to_contain_text("modules, in order of execution")


def test_many_lines_have_colours_of_their_own(show, tmp_path):
    chart = Chart(
        "norms", list(range(5)), {f"layer {at}": [at + 1.0] * 5 for at in range(12)}, x_label="step", log=True
    )
    write(tmp_path / "page.html", Page("a watch", charts=[chart]))
    markers = show(tmp_path / "page.html").locator(".u-marker")
    assert len(set(markers.evaluate_all("(all) => all.map((each) => each.style.border)")) - {""}) == 12
