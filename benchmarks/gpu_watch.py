"""The cost of a watch on a GPU: `PYTHONPATH=src python -m benchmarks.gpu_watch figures.json` on a machine that has one.

It measures the wall time of twenty training steps with the device synchronised before and after. Contenders take turns,
and the minimum counts. A contender with a goal is also compared repeatedly with the plain steps directly before and
after it, and the median is its ratio: a step waits for the host, whose speed varies on a shared machine. The steps run
one after the other as in training, so that work that a watch leaves to the GPU is included. The first steps are not
timed: in them the watch learns what each step contains, and reports each one immediately. Before any timing, the
results of our own kernels are compared with those of PyTorch's operations. `--tiny` uses a small model on the CPU, as a
test of the script. `--page PATH` puts the figures of a run into docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import tenterhook as th
from tenterhook.statistics import fused
from tenterhook.statistics.measure import COLUMNS, MEAN, whole
from tenterhook.statistics.measure import measure as statistics

FIRST, STEPS = 15, 20  # Of these twenty, three measure what changes slowly, and two are a tenth.
FEW, MANY = 2, 6
OTHER = "the same, by PyTorch's operations"
GOALS = {"everything, every step": 1.10, "everything, every 10th step": 1.03}


class Setting:
    """A model, its optimizer and its input, on the device."""

    def __init__(self, *, tiny: bool) -> None:
        self.device = "cpu" if tiny else "cuda"
        small = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 100, "bos_token_id": 0, "eos_token_id": 0}
        torch.manual_seed(0)
        model = GPT2LMHeadModel(GPT2Config(use_cache=False, **(small if tiny else {})))
        self.model: Any = model.to(self.device, torch.float32 if tiny else torch.bfloat16).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5)
        shape = (2, 16) if tiny else (8, 512)
        self.ids = torch.randint(0, 100 if tiny else 50257, shape, device=self.device)

    def steps(self, count: int) -> None:
        """Run training steps."""
        for _ in range(count):
            self.optimizer.zero_grad(set_to_none=True)
            self.model(self.ids, labels=self.ids).loss.backward()
            self.optimizer.step()

    def wait(self) -> None:
        """Wait for the device."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def timed(self) -> float:
        """Return milliseconds per step."""
        self.wait()
        began = time.perf_counter()
        self.steps(STEPS)
        self.wait()
        return (time.perf_counter() - began) / STEPS * 1e3

    def peak(self, work: Callable[[], None]) -> float:
        """Return the peak memory of a function in GiB."""
        if self.device != "cuda":
            work()
            return 0.0
        torch.cuda.reset_peak_memory_stats()
        work()
        self.wait()
        return torch.cuda.max_memory_allocated() / 2**30


def ways(setting: Setting) -> dict[str, dict[str, Any] | None]:
    """Return the contenders: the options of a watch, or None for no watch."""
    common = {"optimizer": setting.optimizer}
    return {
        "training step": None,
        "training step, again": None,
        "values, every step": {**common, "of": ("values",)},
        "values and gradients, every step": {**common, "of": ("values", "gradients")},
        "everything, every step": common,
        f"everything, every step, {OTHER}": common,
        'everything, every step, on_nan="raise"': {**common, "on_nan": "raise"},
        "everything, every element, every step": {**common, "sample": None},
        "everything, every 10th step": {**common, "every": 10},
        f"everything, every 10th step, {OTHER}": {**common, "every": 10},
    }


def beside(setting: Setting, options: dict[str, Any]) -> list[tuple[float, float]]:
    """Return milliseconds of watched steps, and their ratios to the plain steps before and after."""
    found = []
    before = setting.timed()
    for _ in range(MANY):
        with th.watch(setting.model, **options):
            setting.steps(FIRST)
            took = setting.timed()
        setting.steps(2)
        after = setting.timed()
        found.append((took, 2 * took / (before + after)))
        before = after
    return found


def measure(setting: Setting, rounds: int) -> dict[str, dict[str, float]]:
    """Return milliseconds, ratio and peak memory of each way. With a goal, also return the quartiles of the ratios."""
    best: dict[str, float] = {}
    peak: dict[str, float] = {}
    pairs: dict[str, list[tuple[float, float]]] = {name: [] for name in GOALS}
    setting.steps(3)
    gc.collect()
    gc.freeze()  # Existing objects need not be scanned in every turn.
    for _ in range(rounds):
        for name, options in ways(setting).items():
            fused.wanted = not name.endswith(OTHER)
            watch = None if options is None else th.watch(setting.model, **options).start()
            setting.steps(FIRST)
            gc.collect()
            best[name] = min(best.get(name, float("inf")), *(setting.timed() for _ in range(FEW)))
            if name not in peak:
                peak[name] = setting.peak(lambda: setting.steps(2))
            if watch is not None:
                watch.close()
                _check(watch)
            if options is not None and name in GOALS:
                pairs[name] += beside(setting, options)
    fused.wanted = True
    plain = min(best["training step"], best["training step, again"])
    rows = {name: {"ms": took, "ratio": took / plain, "peak GiB": peak[name]} for name, took in best.items()}
    for name, found in pairs.items():
        low, middle, high = quantiles([ratio for _, ratio in found], n=4)
        rows[name] |= {"ms": median(took for took, _ in found), "ratio": middle, "low": low, "high": high}
    return rows


def compare(device: torch.device) -> None:
    """Raise if our own kernels and PyTorch's operations differ, for tensors and for a whole watch."""
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        found = [
            torch.randn(5, 7, device=device),
            torch.randn(400_000, device=device) * 3 + 500,
            torch.full((3,), float("nan"), device=device),
            torch.tensor(2.0, device=device),
            torch.randn(3, 1024 * 33, device=device).relu_(),
            torch.randn(640, 64, device=device).t(),
            torch.randn(65, device=device)[1:],
            torch.randn(1, 8, device=device).expand(4, 8),
            torch.randn(65536, device=device),
            torch.randn(5_000_011, device=device),
        ]
        found = [tensor.to(dtype) for tensor in found]
        found[0][0, 0], found[4][2, 5], found[4][0, 0] = float("-inf"), float("nan"), float("inf")
        for _ in range(2):  # The second time uses the cached plan.
            table = statistics(found).host()
            true = np.stack([whole(tensor) for tensor in found])
            np.testing.assert_allclose(table, true, rtol=1e-4, atol=1e-4, err_msg=str(dtype))
    fused.wanted = False
    theirs = _small(device, None, "raise")
    fused.wanted = True
    for on_nan in ("raise", "record"):  # With "record", a watch can measure everything at once, after the update.
        _are_alike(_small(device, 2**21, on_nan), theirs)
    print(f"{len(theirs)} rows of a watch, and statistics of 30 tensors, are those that PyTorch's operations give")


def _are_alike(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        if (mine["kind"], mine["address"], mine["count"]) != (other["kind"], other["address"], other["count"]):
            raise AssertionError(f"{mine} where there should be {other}")
        for name in COLUMNS[MEAN:]:
            if abs(mine[name] - other[name]) > 1e-3 * abs(other[name]) + 1e-5:
                raise AssertionError(f"{mine['kind']} of {mine['address']}: {name} {mine[name]}, not {other[name]}")


def _small(device: torch.device, sample: int | None, on_nan: str) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 3000), nn.LayerNorm(3000)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with th.watch(model, optimizer=optimizer, sample=sample, on_nan=on_nan) as watch:
        for _ in range(12):
            optimizer.zero_grad()
            model(torch.linspace(-1, 1, 160, device=device).view(10, 16)).pow(4).mean().backward()
            optimizer.step()
    return watch.rows()


def _check(watch: Any) -> None:
    """Raise if a watch recorded too little, or wrong values."""
    rows = watch.rows()
    if 2 * len(rows) < len(list(watch.model.modules())) or watch.nonfinite is not None:
        raise AssertionError(f"the watch has {len(rows)} rows, and {watch.nonfinite}")
    weight = watch.model.transformer.ln_f.weight
    if "parameters" in watch.to_dict()["of"]:
        row = watch.row("transformer.ln_f.weight", "parameters")
        norm = float(torch.linalg.vector_norm(weight.detach().float()))
        if abs(row["last"]["norm"] - norm) > 0.01 * norm:
            raise AssertionError(f"a norm of {row['last']['norm']}, where it is {norm}")


def page(path: Path) -> None:
    """Write the figures of a run into the page, on any machine."""
    from benchmarks.report import write_section

    result = json.loads(path.read_text(encoding="utf-8"))
    how = (
        "The least of many turns; of what has a goal, medians: of its steps, and of their ratios to the plain ones "
        "right before and after, with the quartiles. A step waits for the host here, whose turns differ."
    )
    where = f"{result['device']}, torch {result['torch']}, GPT-2 small, bf16, batch 8, 512 tokens"
    lines = [
        f"## Watch on a GPU\n\n{where}. {how}\n",
        "| work | ms | ratio | peak GiB | goal |",
        "|---|--:|--:|--:|---|",
    ]
    for name, row in result["rows"].items():
        goal = f"≤ {GOALS[name]}" if name in GOALS else ""
        spread = f" ({row['low']:.3f} – {row['high']:.3f})" if "low" in row else ""
        lines.append(f"| {name} | {row['ms']:.2f} | {row['ratio']:.3f}{spread} | {row['peak GiB']:.2f} | {goal} |")
    write_section("gpu-watch", "\n".join(lines))


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", type=Path, nargs="?", help="where the figures go, as JSON")
    parser.add_argument("--tiny", action="store_true", help="a small model on the CPU")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--page", type=Path, help="put the figures of this file into docs/benchmarks.md, and stop")
    options = parser.parse_args()
    if options.page is not None:
        page(options.page)
        return
    setting = Setting(tiny=options.tiny)
    device = torch.device(setting.device, 0) if setting.device == "cuda" else torch.device("cpu")
    why = fused.why_not(device) if device.type in fused.devices else "they are for GPUs"
    print("our own kernels are used" if why is None else f"our own kernels are not used: {why}", flush=True)
    if why is None:
        compare(device)
    rows = measure(setting, options.rounds)
    for name, row in rows.items():
        print(f"{name:70s} {row['ms']:8.2f} ms  {row['ratio']:6.3f}  {row['peak GiB']:6.2f} GiB", flush=True)
    if options.out is not None:
        named = "CPU" if options.tiny else torch.cuda.get_device_name()
        result = {"device": named, "torch": torch.__version__, "kernels": why or "our own", "rows": rows}
        options.out.write_text(json.dumps(result, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
