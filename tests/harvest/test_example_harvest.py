"""The example, killed half-way and started again: a trained transformer, rows, a probe, an autoencoder, a plot."""

import io
import os
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

import tenterhook as th
from tenterhook.harvest.verify import verify

EXAMPLE = Path(__file__).parents[2] / "examples" / "harvest.py"
SMALL = {"STEPS": 450, "SAE_EPOCHS": 3, "SEQUENCES": 1400}
SECONDS = 120


def run(folder):
    out = io.StringIO()
    example = runpy.run_path(str(EXAMPLE))
    example["main"].__globals__.update(SMALL)
    example["main"](folder, Console(file=out, width=120))
    return out.getvalue(), example


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::PendingDeprecationWarning")
def test_the_example_is_killed_and_goes_on_and_learns_from_what_was_stored(tmp_path):
    code = f"import runpy; e = runpy.run_path({str(EXAMPLE)!r}); e['main'].__globals__.update({SMALL!r}); "
    code += f"from pathlib import Path; from rich.console import Console; e['main'](Path({str(tmp_path)!r}), Console())"
    process = subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"OMP_NUM_THREADS": "1"})
    commits, deadline = tmp_path / "rows" / "commits", time.monotonic() + SECONDS
    while not list(commits.glob("*.json")) and time.monotonic() < deadline:
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    there = len(th.open(tmp_path / "rows").shards)
    assert 1 <= there < 3

    told, example = run(tmp_path)
    assert "Training" not in told  # The weights were saved, and the same model goes on.
    assert verify(tmp_path / "rows").complete
    store = th.open(tmp_path / "rows")
    data = example["corpus"]()
    assert store["token"][:].tolist() == data[: SMALL["SEQUENCES"]].flatten().tolist()
    shares = {line.split()[0]: float(line.split()[1][:-1]) for line in told.splitlines() if line.endswith("%")}
    assert shares["blocks.1"] > shares["embed"] + 10  # What came before is known inside, and not at the entrance.
    explained = float(told.split("explains ")[1].split("%")[0])
    assert explained > 50
    assert (tmp_path / "harvest.png").read_bytes().startswith(b"\x89PNG")
