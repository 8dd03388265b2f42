"""Create an environment for each peer and run the work in it: ``python -m benchmarks.peers [peer ...]``."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from benchmarks.harness import Row
from benchmarks.peers.common import WORKS, read_rows
from benchmarks.peers.environment import environment
from benchmarks.report import ROOT, publish

PEERS = {
    "tenterhook": (),
    "nnsight": ("nnsight==0.8.1",),
    "torchlens": ("torchlens==2.36.1", "transformers"),
    "transformer_lens": ("transformer-lens==4.3.0",),
    "pyvene": ("pyvene==0.1.8",),
}
"""The packages of each peer, in addition to constraints.txt. tenterhook runs in the current environment."""


def main() -> int:
    """Run the named peers, or all of them. A failing peer does not stop the others."""
    options = _options()
    rows, failed = [], []
    for name in options.peer or PEERS:
        print(f"{name} …", flush=True)
        try:
            rows += _run(name, options.rounds)
        except subprocess.CalledProcessError as error:
            failed.append(name)
            print(f"{name} failed:\n{error.stderr or error.stdout or error}", file=sys.stderr)
    publish("peers", _arranged(rows), write=not (options.dry or failed or options.peer))
    return 1 if failed else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description="Measure other libraries too.")
    parser.add_argument("peer", nargs="*", help=f"which to run, of: {', '.join(PEERS)} (all, and then write the docs)")
    parser.add_argument("--rounds", type=int, default=20, help="turns of each contender (%(default)s)")
    parser.add_argument("--dry", action="store_true", help="print only: leave the docs and the results alone")
    options = parser.parse_args()
    if unknown := set(options.peer) - set(PEERS):
        parser.error(f"no such peer: {', '.join(sorted(unknown))}; there is {', '.join(PEERS)}")
    return options


def _run(name: str, rounds: int) -> list[Row]:
    python = environment(name, PEERS[name]) if PEERS[name] else Path(sys.executable)
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "rows.json"
        command = [str(python), "-m", f"benchmarks.peers.{name}", str(target), str(rounds)]
        offline = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled"}
        subprocess.run(command, check=True, cwd=ROOT, env=offline, capture_output=True, text=True)
        return read_rows(target)


def _arranged(rows: Iterable[Row]) -> list[Row]:
    """Sort rows by work, with one row of raw hooks for each work.

    Raw hooks run in every process. The row from tenterhook's process is used, or else the first one.
    """
    first: dict[tuple[str, str], Row] = {}
    for row in rows:
        first.setdefault((row.work, row.who), row)
    order = list(WORKS.values())
    return sorted(first.values(), key=lambda row: order.index(row.work) if row.work in order else len(order))


if __name__ == "__main__":
    sys.exit(main())
