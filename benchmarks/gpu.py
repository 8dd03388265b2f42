"""The cost of recording on a GPU, compared with raw hooks: `PYTHONPATH=src python -m benchmarks.gpu`.

It measures the wall time of whole steps with the device synchronised before and after. Contenders take turns, and the
minimum counts. With a path, the figures are written there. `--page PATH` puts such figures into docs/benchmarks.md.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import tenterhook as th

ROUNDS, CALLS = 20, 3
MIDDLE = "transformer.h.6"


def gpt2() -> GPT2LMHeadModel:
    """Return GPT-2 small in bf16."""
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(use_cache=False)).to("cuda", torch.bfloat16).train(mode=False)


def turns(ways: dict[str, Callable[[], Callable[[], None]]]) -> dict[str, float]:
    """Return milliseconds for each way.

    The ways take turns, and each is opened again for its turn, outside of the timing.
    """
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(ROUNDS):
        for name, opened in ways.items():
            step = opened()
            step()
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(CALLS):
                step()
            torch.cuda.synchronize()
            best[name] = min(best[name], (time.perf_counter() - began) / CALLS * 1e3)
            getattr(step, "close", lambda: None)()
    return best


class Step:
    """A step, and the function that closes it."""

    def __init__(self, run: Callable[[], None], close: Callable[[], None] = lambda: None) -> None:
        self._run, self.close = run, close

    def __call__(self) -> None:
        self._run()


def forward_ways(model: Any, ids: torch.Tensor) -> dict[str, Any]:
    """Return the ways to record values."""

    def run() -> None:
        with torch.no_grad():
            model(ids)

    def raw() -> Step:
        kept: dict[str, Any] = {}
        handles = [
            module.register_forward_hook(lambda _m, _a, out, name=name: kept.__setitem__(name, out))
            for name, module in model.named_modules()
        ]
        return Step(run, lambda: [handle.remove() for handle in handles] and None)

    def ours(*selectors: str) -> Step:
        session = th.record(model, *selectors, keep="last").start()
        return Step(run, session.close)

    return {
        "forward": lambda: Step(run),
        "forward, raw hooks on all modules": raw,
        "forward, tenterhook on all modules": lambda: ours("**"),
        "forward, tenterhook on 12 blocks": lambda: ours("transformer.h.*"),
    }


def backward_ways(model: Any, ids: torch.Tensor) -> dict[str, Any]:
    """Return the ways to record gradients."""

    def run() -> None:
        model.zero_grad(set_to_none=True)
        model(ids, labels=ids).loss.backward()

    def tensor_hooks() -> Step:
        kept: dict[str, Any] = {}

        def hook(_m: Any, _a: Any, out: Any, name: str) -> None:
            if isinstance(out, torch.Tensor) and out.requires_grad:
                out.register_hook(lambda grad: kept.__setitem__(name, grad))

        handles = [
            module.register_forward_hook(lambda m, a, out, name=name: hook(m, a, out, name))
            for name, module in model.named_modules()
        ]
        return Step(run, lambda: [handle.remove() for handle in handles] and None)

    def full_hooks() -> Step:
        kept: dict[str, Any] = {}
        handles = [
            module.register_full_backward_hook(lambda _m, _i, out, name=name: kept.__setitem__(name, out[0]))
            for name, module in model.named_modules()
            if name and not isinstance(module, torch.nn.ModuleList)
        ]
        return Step(run, lambda: [handle.remove() for handle in handles] and None)

    def ours(*selectors: str) -> Step:
        session = th.record(model, *selectors, grad=True, keep="last").start()
        return Step(run, session.close)

    return {
        "step": lambda: Step(run),
        "step, tensor hooks on all modules": tensor_hooks,
        "step, full backward hooks on all modules": full_hooks,
        "step, tenterhook on all modules": lambda: ours("**"),
        "step, tenterhook on 12 blocks": lambda: ours("transformer.h.*"),
    }


def middle_ways(model: Any, ids: torch.Tensor) -> dict[str, Any]:
    """Return the ways to compute the gradient of one block in the middle, without continuing further back."""
    kept: dict[str, Any] = {}

    def bare() -> Step:
        handle = model.get_submodule(MIDDLE).register_forward_hook(lambda _m, _a, out: kept.__setitem__("x", out))

        def run() -> None:
            loss = model(ids, labels=ids).loss
            out = kept["x"]
            torch.autograd.grad(loss, out[0] if isinstance(out, tuple) else out)

        return Step(run, handle.remove)

    def ours() -> Step:
        session = th.record(model, MIDDLE, grad=True, keep="last").start()

        def run() -> None:
            session.tape.backward(model(ids, labels=ids).loss)

        return Step(run, session.close)

    return {"autograd.grad to the middle block": bare, "tape.backward at the middle block": ours}


def main() -> None:
    """Measure, then print and write the times with their ratios."""
    model = gpt2()
    ids = torch.randint(0, 50257, (8, 512), device="cuda")
    result: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    for group in (forward_ways, backward_ways, middle_ways):
        times = turns(group(model, ids))
        base = next(iter(times.values()))
        for name, took in times.items():
            print(f"{name:45s} {took:8.2f} ms  {took / base:6.3f}", flush=True)
            result[name] = {"ms": took, "ratio": took / base}
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps(result, indent=1), encoding="utf-8")


def page(path: Path) -> None:
    """Write the figures of a run into the page, on any machine."""
    from benchmarks.report import write_section

    result = json.loads(path.read_text(encoding="utf-8"))
    lines = [
        f"## GPU\n\n{result.pop('device')}, torch {result.pop('torch')}, GPT-2 small, bf16, batch 8, 512 tokens.\n"
    ]
    lines += ["| work | ms | ratio | goal |", "|---|--:|--:|---|"]
    goals = {"step, tenterhook on all modules": "≤ 1.15", "tape.backward at the middle block": "≤ 1.03"}
    lines += [
        f"| {name} | {row['ms']:.2f} | {row['ratio']:.3f} | {goals.get(name, '')} |" for name, row in result.items()
    ]
    write_section("gpu", "\n".join(lines))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--page"]:
        page(Path(sys.argv[2]))
    else:
        main()
