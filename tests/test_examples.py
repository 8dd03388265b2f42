"""The examples run, in a short form, and show what they promise."""

import io
import runpy
from pathlib import Path

from rich.console import Console

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_the_digits_show_points_values_gradients_and_a_change(tmp_path):
    out = io.StringIO()
    example = runpy.run_path(str(EXAMPLES / "digits.py"))
    example["main"].__globals__["STEPS"] = 5
    example["main"](Console(file=out, width=120), tmp_path / "page.html")
    shown = out.getvalue()
    assert "Net: 7 modules" in shown
    assert "relu#1" in shown
    assert "tape: 8 values, 8 gradients" in shown
    assert "d loss / d image" in shown
    assert "without channel" in shown
    assert "page.html" in shown
    assert '"address":"norm1"' in (tmp_path / "page.html").read_text()
