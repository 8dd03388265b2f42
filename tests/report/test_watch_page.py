"""The page of a watch, and the verb that writes pages."""

import pytest
import torch
from torch import nn

import tenterhook as th
from tenterhook.report.watch_page import LINES, watch_page


def watched(steps=5, layers=4):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(layers)])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with th.watch(model, on_nan="record") as watch:
        for step in range(steps):
            loss = model(torch.ones(2, 4)).sum() * (float("nan") if step == 3 else 1.0)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return watch


def test_the_page_of_a_watch_has_its_series_its_findings_and_its_numbers(tmp_path):
    watch = watched()
    page = watch_page(watch)
    values = next(chart for chart in page.charts if chart.title == "standard deviation of values")
    assert list(values.x) == [0, 1, 2, 3, 4]
    assert values.series["0"][:2] == [pytest.approx(watch.series("0", "std")[step]) for step in (0, 1)]
    assert "NaN" in page.remarks[0]["text"]
    assert page.tables[0].rows
    size = th.page(tmp_path / "watch.html", watch, title="A try")
    text = (tmp_path / "watch.html").read_text()
    assert size == len(text.encode())
    assert "A try" in text
    assert "http://" not in text.replace("http://www.w3.org", "")


def test_a_chart_has_no_more_lines_than_can_be_distinguished():
    page = watch_page(watched(steps=2, layers=30))
    assert all(len(chart.series) <= LINES for chart in page.charts)
    assert {"0", ":return"} <= set(page.charts[0].series)


def test_what_was_found_is_reported_once():
    page = watch_page(watched())
    told = [line for remark in page.remarks for line in remark["text"].splitlines()]
    assert told
    assert not [line for line in page.tables[0].footer if line.removeprefix("⚠ ") in told]


def test_what_recipes_found_stands_on_the_page_of_a_watch(tmp_path):
    found = th.recipes.saliency(nn.Linear(3, 2), torch.ones(1, 3), target=0)
    th.page(tmp_path / "watch.html", watched(), also=found)
    text = (tmp_path / "watch.html").read_text()
    assert '"title":"saliency: [1, 3]"' in text


def test_what_is_none_of_these_is_refused(tmp_path):
    with pytest.raises(TypeError, match=r"two runs \(each a watch or the path of its JSON lines\); got a Linear"):
        th.page(tmp_path / "page.html", nn.Linear(1, 1))
    with pytest.raises(TypeError, match="also= takes results of recipes or matplotlib figures; got a Linear"):
        th.page(tmp_path / "page.html", watched(), also=[nn.Linear(1, 1)])
    assert not list(tmp_path.iterdir())
