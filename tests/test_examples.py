"""The examples run, in a short form, and show what they promise."""

import io
import runpy
from pathlib import Path

import pytest
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


def test_the_attacks_deceive_the_net_and_are_drawn(tmp_path, capsys):
    example = runpy.run_path(str(EXAMPLES / "adversarial.py"))
    example["main"].__globals__.update(STEPS=40, IMAGES=24)
    example["main"](tmp_path / "adversarial.png")
    shown = capsys.readouterr().out
    assert "deepfool (steps 50, overshoot 0.02): 24 of 24 deceive the model" in shown
    assert "reach the class aimed at" in shown
    assert (tmp_path / "adversarial.png").stat().st_size > 1000


def test_a_small_transformer_is_steered_and_the_vector_handed_on(tmp_path, capsys):
    example = runpy.run_path(str(EXAMPLES / "steering.py"))
    example["main"].__globals__.update(STEPS=40, SCALES=(-8, 0, 8))
    example["main"](tmp_path / "steering.png")
    shown = capsys.readouterr().out
    shares = [float(line.split("%")[0].split()[-1]) for line in shown.splitlines() if line.startswith("scale")]
    assert shares[0] < shares[1] < shares[2]
    assert "the same text, True" in shown
    assert "transformer.h.2              KL   0.000   same first choice 100.0%" in shown
    assert (tmp_path / "steering.png").stat().st_size > 1000


@pytest.mark.references
def test_a_sentence_model_is_ablated_and_steered(tmp_path, capsys):
    runpy.run_path(str(EXAMPLES / "sentences.py"))["main"](tmp_path / "sentences.png")
    shown = capsys.readouterr().out
    assert "mean ablation: base" in shown
    leans = [float(line.split()[-1]) for line in shown.splitlines() if line.startswith("scale")]
    assert leans[0] < -0.1
    assert leans[2] > 0.1
    assert (tmp_path / "sentences.png").stat().st_size > 1000
