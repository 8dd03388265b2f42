"""``tenterhook cost``, as a person at a terminal sees it."""

import json
import sys

import pytest
from click.testing import CliRunner

from tenterhook.cli.command import tenterhook

SOURCE = """
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 2)

    def forward(self, x):
        wide = self.up(x).tanh()
        return self.down(wide)
"""
UP = 2 * 4 * 8 * 32


@pytest.fixture
def call(tmp_path, monkeypatch):
    (tmp_path / "costly.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield lambda *args: CliRunner().invoke(tenterhook, ["cost", "costly.py:Net", *map(str, args)])
    sys.modules.pop("costly", None)


def test_cost_prints_the_tree(call):
    result = call("-i", "4x8")
    assert result.exit_code == 0, result.output
    assert "354 parameters, 2.6k FLOPs, 3.1k backward" in result.stdout
    assert "costly.py:10 wide = self.up(x).tanh()" in result.stdout


def test_cost_as_json_on_the_meta_device(call):
    found = json.loads(call("-i", "4x8", "--device", "meta", "--json").stdout)
    assert found["device"] == "meta"
    assert {each["address"]: each["flops"] for each in found["modules"]} == {"": UP + 512, "up": UP, "down": 512}


def test_cost_sorted_and_line_by_line(call):
    result = call("-i", "4x8", "--sort", "own_flops", "--lines", ":return", "--forward")
    assert result.exit_code == 0, result.output
    assert result.stdout.index("up ") < result.stdout.index("down ")
    assert "return self.down(wide)" in result.stdout
    assert "backward" not in result.stdout


def test_cost_writes_a_page(call, tmp_path):
    result = call("-i", "4x8", "-o", "cost.html")
    assert result.stdout.startswith("cost.html: ")
    assert (tmp_path / "cost.html").stat().st_size > 10_000


def test_a_model_that_fails_ends_with_the_code_for_it(call):
    result = call("-i", "4x9")
    assert result.exit_code == 3
    assert "the run failed in up (Linear)" in result.output
