"""What a watch costs on a GPU: `PYTHONPATH=src python -m benchmarks.gpu_watch figures.json` on a machine that has one.

Wall time of ten training steps with the device synchronised before and after, contenders taking turns, minimum of many.
The steps run one behind the other as they do in training, so that what a watch leaves to the GPU is paid for too.
`--tiny` does the same with a small model on the CPU, to see that the script runs. `--page PATH` puts the figures of a
run into docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import tenterhook as th

STEPS = 10
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
        """Train."""
        for _ in range(count):
            self.optimizer.zero_grad(set_to_none=True)
            self.model(self.ids, labels=self.ids).loss.backward()
            self.optimizer.step()

    def wait(self) -> None:
        """Until the device has done everything."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def timed(self) -> float:
        """Milliseconds for a step."""
        self.wait()
        began = time.perf_counter()
        self.steps(STEPS)
        self.wait()
        return (time.perf_counter() - began) / STEPS * 1e3

    def peak(self, work: Callable[[], None]) -> float:
        """The most memory that was in use at a time, in GiB."""
        if self.device != "cuda":
            work()
            return 0.0
        torch.cuda.reset_peak_memory_stats()
        work()
        self.wait()
        return torch.cuda.max_memory_allocated() / 2**30


def ways(setting: Setting) -> dict[str, dict[str, Any] | None]:
    """The contenders: the options of a watch, or None for none."""
    common = {"optimizer": setting.optimizer}
    return {
        "training step": None,
        "training step, again": None,
        "values, every step": {**common, "of": ("values",)},
        "values and gradients, every step": {**common, "of": ("values", "gradients")},
        "everything, every step": common,
        'everything, every step, on_nan="raise"': {**common, "on_nan": "raise"},
        "everything, every element, every step": {**common, "sample": None},
        "everything, every 10th step": {**common, "every": 10},
    }


def measure(setting: Setting, rounds: int) -> dict[str, dict[str, float]]:
    """Milliseconds, ratio and peak memory of each way."""
    best: dict[str, float] = {}
    peak: dict[str, float] = {}
    setting.steps(3)
    for _ in range(rounds):
        for name, options in ways(setting).items():
            watch = None if options is None else th.watch(setting.model, **options).start()
            setting.steps(2)
            best[name] = min(best.get(name, float("inf")), setting.timed())
            if name not in peak:
                peak[name] = setting.peak(lambda: setting.steps(2))
            if watch is not None:
                watch.close()
                _check(watch)
    plain = best["training step"]
    return {name: {"ms": took, "ratio": took / plain, "peak GiB": peak[name]} for name, took in best.items()}


def _check(watch: Any) -> None:
    """No figure of a watch that saw nothing, or something else than there was."""
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
    lines = [
        f"## Watch on a GPU\n\n{result['device']}, torch {result['torch']}, GPT-2 small, bf16, batch 8, 512 tokens.\n",
        "| work | ms | ratio | peak GiB | goal |",
        "|---|--:|--:|--:|---|",
    ]
    for name, row in result["rows"].items():
        goal = f"≤ {GOALS[name]}" if name in GOALS else ""
        lines.append(f"| {name} | {row['ms']:.2f} | {row['ratio']:.3f} | {row['peak GiB']:.2f} | {goal} |")
    write_section("gpu-watch", "\n".join(lines))


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", type=Path, nargs="?", help="where the figures go, as JSON")
    parser.add_argument("--tiny", action="store_true", help="a small model on the CPU")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--page", type=Path, help="put the figures of this file into docs/benchmarks.md, and stop")
    options = parser.parse_args()
    if options.page is not None:
        page(options.page)
        return
    setting = Setting(tiny=options.tiny)
    rows = measure(setting, options.rounds)
    for name, row in rows.items():
        print(f"{name:45s} {row['ms']:8.2f} ms  {row['ratio']:6.3f}  {row['peak GiB']:6.2f} GiB", flush=True)
    if options.out is not None:
        device = "CPU" if options.tiny else torch.cuda.get_device_name()
        result = {"device": device, "torch": torch.__version__, "rows": rows}
        options.out.write_text(json.dumps(result, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
