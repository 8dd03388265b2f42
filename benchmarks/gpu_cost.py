"""Costs, and a watch in compiled graphs, on a GPU: `PYTHONPATH=src python -m benchmarks.gpu_cost OUT.json`.

The figures of `th.cost` for a training step of GPT-2 are compared with PyTorch's own: FLOPs with FlopCounterMode, saved
bytes with hooks on saved tensors, the peak with `torch.cuda.max_memory_allocated`. Then the time of `th.cost` is
measured in plain steps, and that of a compiled training step with a watch in its graph, in turns with the plain
compiled step; the median of the ratios counts. `--tiny` uses a small model on the CPU, as a test of the script.
`--part` runs one of the two parts, `--mode` is that of `torch.compile`, and `--seconds` limits the turns of a watch.
Each figure is printed as soon as it is known.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import GPT2Config, GPT2LMHeadModel

import tenterhook as th

STEPS, FIRST, TURNS, LEAST = 20, 12, 8, 2
OURS = {"set_addresses", "pieces", "add_to_table", "put_together", "gather"}
GOALS = {"everything, every step, in the graph": 1.05, "everything, every 10th step, in the graph": 1.01}


class Setting:
    """A model, its optimizer and its input, on the device."""

    def __init__(self, *, tiny: bool) -> None:
        self.device = torch.device("cpu" if tiny else "cuda")
        small = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 100, "bos_token_id": 0, "eos_token_id": 0}
        torch.manual_seed(0)
        model = GPT2LMHeadModel(GPT2Config(use_cache=False, **(small if tiny else {})))
        model.loss_type = "ForCausalLM"  # Otherwise a warning of transformers breaks the first graph.
        self.model: Any = model.to(self.device, torch.float32 if tiny else torch.bfloat16).train()
        shape = (2, 16) if tiny else (8, 512)
        self.ids = torch.randint(0, 100 if tiny else 50257, shape, device=self.device)

    def wait(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def step(self) -> None:
        """Run a forward and a backward pass, without gradients of earlier passes."""
        self.model.zero_grad(set_to_none=True)
        self.model(self.ids, labels=self.ids).loss.backward()

    def timed(self, work: Any, count: int) -> float:
        """Return milliseconds of a function."""
        self.wait()
        began = time.perf_counter()
        for _ in range(count):
            work()
        self.wait()
        return (time.perf_counter() - began) / count * 1e3


def costs(setting: Setting) -> dict[str, Any]:
    """Compare the cost of a step with PyTorch's own counters, and measure the time that it takes."""
    setting.step()
    cost = th.cost(setting.model, setting.ids, labels=setting.ids)
    setting.model.zero_grad(set_to_none=True)
    with FlopCounterMode(display=False) as forward:
        loss = setting.model(setting.ids, labels=setting.ids).loss
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    del loss
    found: dict[str, Any] = {
        "forward FLOPs": (cost.flops, forward.get_total_flops()),
        "backward FLOPs": (cost.backward_flops, backward.get_total_flops()),
        "saved bytes": (cost.saved_bytes, saved_bytes(setting)),
        "peak bytes": (cost.peak_bytes, peak_bytes(setting)),
    }
    plain = min(setting.timed(setting.step, 5) for _ in range(3))
    whole = min(setting.timed(lambda: th.cost(setting.model, setting.ids, labels=setting.ids), 1) for _ in range(3))
    found |= {"plain step, ms": plain, "th.cost, ms": whole, "th.cost, in plain steps": whole / plain}
    timed = th.cost(setting.model, setting.ids, labels=setting.ids, time=True)
    on_meta = th.cost(setting.model.to("meta"), setting.ids, labels=setting.ids)
    found["forward FLOPs, meta device"] = (on_meta.flops, cost.flops)
    found["saved bytes, meta device"] = (on_meta.saved_bytes, cost.saved_bytes)
    print(timed)
    return found


def saved_bytes(setting: Setting) -> int:
    """Return the bytes that hooks on saved tensors see, each storage once, without parameters and buffers."""
    own = {each.untyped_storage().data_ptr() for each in (*setting.model.parameters(), *setting.model.buffers())}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor.detach())
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        setting.model(setting.ids, labels=setting.ids)
    return sum(each.untyped_storage().nbytes() for place, each in kept.items() if place not in own)


def peak_bytes(setting: Setting) -> int:
    """Return the peak of a plain step, as the allocator counts it."""
    setting.model.zero_grad(set_to_none=True)
    if setting.device.type != "cuda":
        return 0
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    setting.step()
    return int(torch.cuda.max_memory_allocated())


def compiled_watch(setting: Setting, mode: str, seconds: float) -> Iterator[tuple[str, Any]]:
    """Measure compiled training steps with a watch in the graph, in turns with plain ones, and yield each figure."""
    ends = time.perf_counter() + seconds
    optimizer = torch.optim.AdamW(setting.model.parameters(), lr=1e-5)
    model: Any = torch.compile(
        setting.model, backend="eager" if mode == "none" else "inductor", mode=None if mode == "none" else mode
    )

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        model(setting.ids, labels=setting.ids).loss.backward()
        optimizer.step()

    yield "compile, s", setting.timed(step, 1) / 1e3
    setting.timed(step, FIRST)
    yield "plain compiled step, ms", median(setting.timed(step, STEPS) for _ in range(3))
    for place, (name, every) in enumerate(zip(GOALS, (1, 10), strict=True)):
        ratios: list[float] = []
        until = time.perf_counter() + (ends - time.perf_counter()) / (len(GOALS) - place)
        while len(ratios) < TURNS and (time.perf_counter() < until or len(ratios) < LEAST):
            setting.timed(step, FIRST)
            before = setting.timed(step, STEPS)
            began = time.perf_counter()
            with th.watch(model, optimizer=optimizer, every=every) as watch:
                setting.timed(step, FIRST)
                first = time.perf_counter() - began
                took = setting.timed(step, STEPS)
                if not ratios:
                    yield f"{name}: first {FIRST} steps with compilation, s", first
                    yield f"{name}: graphs, breaks", (watch.compiled.graphs, watch.compiled.breaks)
                    if every == 1:
                        yield from inside(setting, step)
            setting.timed(step, 2)
            after = setting.timed(step, STEPS)
            ratios.append(2 * took / (before + after))
            if len(ratios) == 1:
                yield f"{name}: rows", len(watch.rows())
                yield f"{name}: first ratio", ratios[0]
        low, middle, high = quantiles(ratios, n=4)
        yield name, {"ratio": middle, "low": low, "high": high, "goal": GOALS[name]}


def inside(setting: Setting, step: Callable[[], None]) -> Iterator[tuple[str, Any]]:
    """Yield what a watched step consists of: the time of the host, the kernels, and the time of ours."""
    setting.wait()
    began = time.perf_counter()
    step()
    yield "watched step, host, ms", (time.perf_counter() - began) * 1e3
    setting.wait()
    if setting.device.type != "cuda":
        return
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        setting.wait()
    kernels = [each for each in profile.key_averages() if each.self_device_time_total > 0]
    yield "watched step: kernels", sum(each.count for each in kernels)
    yield "watched step: kernels, ms", sum(each.self_device_time_total for each in kernels) / 1e3
    for each in kernels:
        if each.key in OURS:
            yield f"watched step: {each.key}: launches, ms", (each.count, each.self_device_time_total / 1e3)


def page(path: Path) -> None:
    """Write the figures of a run, of either part, into the page, on any machine."""
    from benchmarks.report import write_section

    result = json.loads(path.read_text(encoding="utf-8"))
    name = "gpu_cost" if "saved bytes" in result["figures"] else "gpu_watch_compiled"
    title = "Costs on a GPU" if name == "gpu_cost" else "Watch of a compiled model on a GPU"
    lines = [
        f"## {title}\n\nOne {result['device']}, torch {result['torch']}, GPT-2 small, bf16, batch 8, 512 tokens.\n"
    ]
    lines += ["| figure | value | goal |", "|---|--:|---|"]
    for figure, value in result["figures"].items():
        if isinstance(value, dict):
            lines.append(f"| {figure}, × the step | {value['ratio']:.3f} | ≤ {value['goal']:g} |")
        elif isinstance(value, list) and name == "gpu_cost":
            lines.append(f"| {figure}: th.cost, PyTorch's own count | {value[0]:,}, {value[1]:,} | |")
        else:
            shown = value if isinstance(value, list) else [value]
            lines.append(f"| {figure} | {', '.join(f'{v:.2f}' if isinstance(v, float) else str(v) for v in shown)} | |")
    write_section(name, "\n".join(lines))


def measured(options: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    """Yield the figures of the parts."""
    if options.part != "watch":
        yield from costs(Setting(tiny=options.tiny)).items()
    if options.part != "cost":
        yield from compiled_watch(Setting(tiny=options.tiny), options.mode, options.seconds)


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", type=Path, nargs="?", help="where the figures go, as JSON")
    parser.add_argument("--tiny", action="store_true", help="a small model on the CPU")
    parser.add_argument("--part", choices=["cost", "watch"])
    parser.add_argument("--mode", default="default", help="of torch.compile; none for no code generation")
    parser.add_argument("--seconds", type=float, default=100.0, help="of the watch, with its compilation")
    parser.add_argument("--page", type=Path, metavar="JSON", help="write such figures into docs/benchmarks.md instead")
    options = parser.parse_args()
    if options.page is not None:
        page(options.page)
        return
    figures: dict[str, Any] = {}
    for name, figure in measured(options):
        figures[name] = figure
        print(f"{name:70s} {figure}", flush=True)
    if options.out is not None:
        device = "CPU" if options.tiny else torch.cuda.get_device_name()
        result = {"device": device, "torch": torch.__version__, "mode": options.mode, "figures": figures}
        options.out.write_text(json.dumps(result, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
