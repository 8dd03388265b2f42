"""The page of a cost."""

import pytest
import torch
from torch import nn

import tenterhook as th
from tenterhook.report.cost_page import POINTS, cost_page
from tenterhook.report.treemap import TreemapPart, lay_out_parts


@pytest.fixture(scope="module")
def cost():
    net = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))
    return th.cost(net, torch.ones(4, 8))


def test_the_page_has_treemaps_the_memory_and_the_tree(cost, tmp_path):
    page = cost_page(cost)
    saved, flops = page.treemaps
    assert saved["title"] == "memory saved for backward"
    assert {box["name"] for box in flops["boxes"]} == {"Sequential", "0", "1", "2", "3"}
    [memory] = page.charts
    assert max(memory.series["in use"]) == cost.peak_bytes
    assert max(memory.series["saved for backward"]) == cost.saved_bytes
    assert page.tables[0].title.startswith("Sequential: 288 parameters")
    assert th.page(tmp_path / "cost.html", cost) > 10_000


def test_a_long_timeline_keeps_its_peak(cost):
    long = th.cost(nn.Sequential(*(nn.Tanh() for _ in range(2 * POINTS))), torch.ones(2, requires_grad=True))
    [memory] = cost_page(long).charts
    assert len(memory.x) <= 2 * POINTS
    assert max(memory.series["in use"]) == long.peak_bytes


def test_a_cost_without_a_backward_pass_has_a_page():
    cost = th.cost(nn.Linear(2, 2), torch.ones(1, 2), backward=False)
    assert [each["title"] for each in cost_page(cost).treemaps] == ["FLOPs of the forward"]


def test_areas_of_a_treemap_are_sizes_and_boxes_do_not_overlap():
    sizes = [5, 3, 3, 2, 1, 1]
    whole = TreemapPart(
        "all", sum(sizes), "", [TreemapPart(str(number), size, "") for number, size in enumerate(sizes)]
    )
    outer, *inner = lay_out_parts(whole)
    areas = [box.width * box.height for box in inner]
    assert all(area / areas[0] == pytest.approx(size / 5, rel=1e-3) for area, size in zip(areas, sizes, strict=True))
    for one in inner:
        assert one.left >= outer.left
        assert one.left + one.width <= outer.left + outer.width + 0.01
        for other in inner:
            across = min(one.left + one.width, other.left + other.width) - max(one.left, other.left)
            down = min(one.top + one.height, other.top + other.height) - max(one.top, other.top)
            assert one is other or across < 0.01 or down < 0.01
