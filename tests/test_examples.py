"""The examples run, in a short form, and give the results that they describe."""

import io
import runpy
from pathlib import Path

import pytest
from rich.console import Console

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name, **shorter):
    main = runpy.run_path(str(EXAMPLES / name))["main"]
    main.__globals__.update(shorter)
    return main


def test_the_maps_of_two_photos_lie_on_their_own(tmp_path):
    shares = run("photos.py", STEPS=14)(tmp_path / "photos.png", tmp_path / "photos.html")
    assert shares["temple"] + shares["flower"] > 1.2  # By chance, each share is a half.
    assert (tmp_path / "photos.png").stat().st_size > 1000
    assert '"title":"LayerCAM at relu#3: [1, 24, 48]"' in (tmp_path / "photos.html").read_text()


def test_a_digit_is_explained_in_ten_ways(tmp_path, capsys):
    found = run("attribution.py", STEPS=30)(tmp_path / "attribution.png")
    assert len({each.method for each in found}) == 10
    assert all(each.map.shape == (1, 8, 8) for each in found)
    assert "integrated gradients" in capsys.readouterr().out


def test_probes_fall_along_the_layers_and_a_frozen_one_can_be_built_on(tmp_path):
    found, right = run("transfer.py", STEPS=60)(tmp_path / "probes.png")
    read = found.accuracy.mean(1)
    assert read[0] > read[2] > found.chance
    assert right > 0.2


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
    assert "deepfool (steps 50, overshoot 0.02): 24 of 24 succeeded" in shown
    assert "reached the target class" in shown
    assert (tmp_path / "adversarial.png").stat().st_size > 1000


def test_a_small_transformer_is_steered_and_the_vector_passed_on(tmp_path, capsys):
    example = runpy.run_path(str(EXAMPLES / "steering.py"))
    example["main"].__globals__.update(STEPS=40, SCALES=(-8, 0, 8))
    example["main"](tmp_path / "steering.png")
    shown = capsys.readouterr().out
    shares = [float(line.split("%")[0].split()[-1]) for line in shown.splitlines() if line.startswith("scale")]
    assert shares[0] < shares[1] < shares[2]
    assert "the same text, True" in shown
    assert "transformer.h.2              KL   0.000   same top token 100.0%" in shown
    assert (tmp_path / "steering.png").stat().st_size > 1000


def test_a_planted_circuit_is_found(tmp_path, capsys):
    circuit = run("circuit.py", STEPS=120)(tmp_path / "circuit.png")
    parts = {sender for sender, _ in circuit.edges}
    assert parts <= {"embed", "attn0.0", "attn1.0", "mlp0"}  # The others were off while the model learned.
    assert ("embed", "attn0.0.v") in circuit.edges
    assert circuit.faithfulness() > 0.9
    assert "random" in capsys.readouterr().out
    assert (tmp_path / "circuit.png").stat().st_size > 1000


@pytest.mark.references
def test_a_sentence_model_is_ablated_and_steered(tmp_path, capsys):
    runpy.run_path(str(EXAMPLES / "sentences.py"))["main"](tmp_path / "sentences.png")
    shown = capsys.readouterr().out
    assert "mean ablation: base" in shown
    leans = [float(line.split()[-1]) for line in shown.splitlines() if line.startswith("scale")]
    assert leans[0] < -0.1
    assert leans[2] > 0.1
    assert (tmp_path / "sentences.png").stat().st_size > 1000
