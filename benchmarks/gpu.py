"""The everyday session on a GPU: open, run once, close. `PYTHONPATH=src python -m benchmarks.gpu [PATH]`.

The work and the ways are those of :mod:`benchmarks.everyday`. The device is synchronised before and after each call.
With a path, the figures are written there. `--page PATH` puts such figures into docs/benchmarks.md, on any machine.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

import tenterhook as th
from benchmarks import everyday
from benchmarks.everyday import Work

ROUNDS = 60
SIZES = ((1, 32), (8, 512))
MIDDLE = "transformer.h.6"
GOALS = {
    (1, "outputs of all modules"): 1.15,
    (1, "outputs of 12 blocks by glob"): 1.04,
    (1, "gradients of all modules (forward and backward)"): 1.23,
}


def gpt2() -> Any:
    """Return GPT-2 small in bf16."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(use_cache=False)).to("cuda", torch.bfloat16).train(mode=False)


def works(model: Any, ids: torch.Tensor) -> Iterator[tuple[bool, Work]]:
    """Yield each piece of work, and whether it needs gradients."""
    yield False, everyday.outputs(model, ids)
    yield False, everyday.blocks(model, ids)
    yield False, everyday.edit(model, ids)
    yield False, everyday.variables(model, ids)
    yield True, everyday.gradients(model, ids)
    yield True, to_the_middle(model, ids)


def to_the_middle(model: Any, ids: torch.Tensor) -> Work:
    """Compute the gradient of one block in the middle, without continuing further back."""

    def by_hand() -> Mapping[str, Any]:
        kept: dict[str, Any] = {}
        handle = model.get_submodule(MIDDLE).register_forward_hook(lambda _m, _a, out: kept.update(x=out))
        try:
            loss = model(ids, labels=ids).loss
        finally:
            handle.remove()
        out = kept["x"]
        return {MIDDLE: torch.autograd.grad(loss, out[0] if isinstance(out, tuple) else out)}

    def ours() -> Mapping[str, Any]:
        with th.record(model, MIDDLE, grad=True) as tape:
            tape.backward(model(ids, labels=ids).loss)
        return tape.grad

    return Work("gradient of the middle block alone", {"raw hook": by_hand, "tenterhook": ours}, "ratio", 1.03)


def synchronised(way: Callable[[], Mapping[str, Any]]) -> Callable[[], Mapping[str, Any]]:
    """Return a way that waits for the device before it returns."""

    def run() -> Mapping[str, Any]:
        kept = way()
        torch.cuda.synchronize()
        return kept

    return run


def main() -> None:
    """Measure, then print and write the rows."""
    model = gpt2()
    rows: list[dict[str, Any]] = []
    began = time.perf_counter()
    for batch, length in SIZES:
        ids = torch.randint(0, 50257, (batch, length), device="cuda")
        for grad, work in works(model, ids):
            for name, way in work.ways.items():
                work.ways[name] = synchronised(way)
            with torch.set_grad_enabled(grad):
                for row in everyday.measure(work, ROUNDS):
                    goal = GOALS.get((batch, row.work)) if row.who == "tenterhook" else None
                    rows.append(
                        {
                            "batch": batch, "tokens": length, "work": row.work, "way": row.who,
                            "ms": row.seconds * 1e3, "ratio": row.figure, "quartiles": row.spread[::2], "goal": goal,
                        }
                    )  # fmt: skip
                    print(f"{batch} x {length:4d}  {row.work:50s} {row.who:12s} {row.figure:6.3f}", flush=True)
            gc.collect()
    print(f"{time.perf_counter() - began:.0f} s")
    result = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps(result, indent=1), encoding="utf-8")


def page(path: Path) -> None:
    """Write the figures of a run into the page, on any machine."""
    from benchmarks.report import write_section

    result = json.loads(path.read_text(encoding="utf-8"))
    title = (
        f"## GPU\n\n{result['device']}, torch {result['torch']}, GPT-2 small, bf16. One session for each call, with "
        f"opening and closing it; median of the ratios of {ROUNDS} rounds to the first way.\n"
    )
    lines = [
        title,
        "| batch × tokens | work | way | ms | ratio | quartiles | goal |",
        "|---|---|---|--:|--:|---|---|",
    ]
    for row in result["rows"]:
        goal = f"≤ {row['goal']:g}" + (" (missed)" if row["ratio"] > row["goal"] else "") if row["goal"] else ""
        lines.append(
            f"| {row['batch']} × {row['tokens']} | {row['work']} | {row['way']} | {row['ms']:.2f} | {row['ratio']:.3f} "
            f"| {row['quartiles'][0]:.3f} – {row['quartiles'][1]:.3f} | {goal} |"
        )
    write_section("gpu", "\n".join(lines))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--page"]:
        page(Path(sys.argv[2]))
    else:
        main()
