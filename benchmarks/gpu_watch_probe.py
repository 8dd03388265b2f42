"""Temporary: what each part of a watch costs on a GPU."""

from __future__ import annotations

import cProfile
import gc
import io
import pstats
import sys
import time
from collections import defaultdict
from typing import Any

import numpy as np
import torch

import tenterhook as th
from benchmarks.gpu_watch import Setting, compare
from tenterhook.sinks import fused
from tenterhook.watch import measuring, observe, parameters, session

TINY = "--tiny" in sys.argv
BEST: dict[str, list[float]] = defaultdict(lambda: [9e9, 9e9])
pinned = fused.to_device
hold = observe._hold


def unpinned(device: Any, numbers: Any) -> Any:
    return torch.from_numpy(np.ascontiguousarray(numbers)).to(device, non_blocking=True)


def timed(setting: Setting, steps: int = 10) -> tuple[float, float]:
    setting.wait()
    began = time.perf_counter()
    setting.steps(steps)
    asked = time.perf_counter()
    setting.wait()
    return (time.perf_counter() - began) / steps * 1e3, (asked - began) / steps * 1e3


def phases(setting: Setting) -> None:
    """Host ms per watched step in each part of a watch, by wrapping it."""
    spent: dict[str, float] = defaultdict(float)
    undo = []

    def wrap(owner: Any, name: str) -> None:
        old = getattr(owner, name)

        def new(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return old(*args, **kwargs)
            finally:
                spent[f"{getattr(owner, '__name__', owner)}.{name}"] += time.perf_counter() - began

        setattr(owner, name, new)
        undo.append((owner, name, old))

    for owner, names in (
        (session.Watch, ("_measure", "_before_update", "_end", "_drain", "on_call", "on_return", "_publish", "_open")),
        (measuring.Measuring, ("measure", "_from_log")),
        (measuring.Parcel, ("send", "open")),
        (parameters.Parameters, ("before", "after", "_take", "measure_gradients")),
        (fused.Block, ("measure", "count", "_places")),
        (fused._Addresses, ("__call__",)),
        (fused.Samples, ("take", "move")),
    ):
        for name in names:
            wrap(owner, name)
    with th.watch(setting.model, optimizer=setting.optimizer):
        setting.steps(8)
        setting.wait()
        spent.clear()
        setting.steps(16)
        setting.wait()
    for owner, name, old in undo:
        setattr(owner, name, old)
    print("\nhost ms per step in parts of a watch (nested ones count in both)")
    for name, took in sorted(spent.items(), key=lambda item: -item[1]):
        print(f"  {name:45s} {took / 16 * 1e3:7.3f}")


def profiled(setting: Setting, name: str, options: dict[str, Any] | None) -> None:
    from torch.profiler import ProfilerActivity, profile

    watch = None if options is None else th.watch(setting.model, optimizer=setting.optimizer, **options).start()
    setting.steps(12)
    setting.wait()
    activities = [ProfilerActivity.CPU] + ([] if TINY else [ProfilerActivity.CUDA])
    with profile(activities=activities) as found:
        setting.steps(4)
        setting.wait()
    if watch is not None:
        watch.close()
    averages = found.key_averages()
    device = lambda e: getattr(e, "self_device_time_total", 0)
    busy = sum(device(e) for e in averages) / 4e3
    print(f"\n{name}: the GPU is busy {busy:.2f} ms per step; host operations "
          f"{sum(e.self_cpu_time_total for e in averages) / 4e3:.2f} ms; {sum(e.count for e in averages) / 4:.0f} events")
    for e in sorted(averages, key=lambda e: -device(e))[:14]:
        print(f"  gpu {device(e) / 4e3:8.3f} ms x{e.count / 4:7.1f}  {e.key[:90]}")
    for e in sorted(averages, key=lambda e: -e.self_cpu_time_total)[:14]:
        print(f"  cpu {e.self_cpu_time_total / 4e3:8.3f} ms x{e.count / 4:7.1f}  {e.key[:90]}")


def kernels(setting: Setting) -> None:
    """The kernels by themselves, over tensors as a step leaves them."""
    if TINY:
        return
    shapes = ([(8, 512, 768)] * 7 + [(8, 512, 2304)] + [(8, 512, 3072)] * 2) * 12 + [(8, 512, 50257)]
    given = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]
    size = sum(t.nbytes for t in given)
    for warps in (2, 4, 8):
        fused.WARPS = warps
        block = fused.Block([t.shape for t in given], torch.bfloat16, given[0].device)
        block.measure(given)
        torch.cuda.synchronize()
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        began.record()
        for _ in range(10):
            block.measure(given)
        ended.record()
        torch.cuda.synchronize()
        took = began.elapsed_time(ended) / 10
        print(f"kernels, {warps} warps: {took:.3f} ms for {size / 2**30:.2f} GiB, {size / took / 1e9:.2f} TB/s")
        began_at = time.perf_counter()
        for _ in range(10):
            block.measure(given)
        print(f"  host {(time.perf_counter() - began_at) / 10 * 1e3:.3f} ms")
        torch.cuda.synchronize()
    fused.WARPS = 4
    began.record()
    for _ in range(10):
        for tensor in given:
            tensor.clone()
    ended.record()
    torch.cuda.synchronize()
    print(f"clones of the same: {began.elapsed_time(ended) / 10:.3f} ms")


def main() -> None:
    setting = Setting(tiny=TINY)
    device = torch.device("cpu") if TINY else torch.device("cuda", 0)
    if not TINY:
        print("kernels:", fused.why_not(device))
        compare(device)
    ways: dict[str, tuple[Any, ...]] = {
        "plain": (None, pinned, hold),
        "values": ({"of": ("values",)}, pinned, hold),
        "gradients": ({"of": ("gradients",)}, pinned, hold),
        "values and gradients": ({"of": ("values", "gradients")}, pinned, hold),
        "everything": ({}, pinned, hold),
        "everything, unpinned": ({}, unpinned, hold),
        "everything, hold 1 GiB": ({"hold": 2**30}, pinned, hold),
        "everything, raise": ({"on_nan": "raise"}, pinned, hold),
        "every 10th": ({"every": 10}, pinned, hold),
        "every 10000th": ({"every": 10000}, pinned, hold),
        "plain again": (None, pinned, hold),
    }
    setting.steps(5)
    for _ in range(1 if TINY else 8):
        for name, (options, to_device, how) in ways.items():
            fused.to_device, observe._hold = to_device, how
            options = None if options is None else dict(options)
            points = options.pop("points", ["**"]) if options is not None else []
            watch = None if options is None else th.watch(setting.model, *points, optimizer=setting.optimizer, **options).start()
            setting.steps(4)
            gc.collect()
            took = timed(setting)
            BEST[name] = [min(one, other) for one, other in zip(BEST[name], took, strict=True)]
            if watch is not None:
                watch.close()
                assert watch.rows()
    fused.to_device, observe._hold = pinned, hold
    plain = min(BEST["plain"][0], BEST["plain again"][0])
    print(f"\n{'way':34s} {'ms/step':>8s} {'ratio':>6s} {'host ms until asked':>20s}")
    for name, (took, asked) in BEST.items():
        print(f"{name:34s} {took:8.2f} {took / plain:6.3f} {asked:12.2f}", flush=True)
    try:
        phases(setting)
    except Exception as error:
        print(repr(error))
    if not TINY:
        print("peak GiB, plain", setting.peak(lambda: setting.steps(2)))
        with th.watch(setting.model, optimizer=setting.optimizer):
            setting.steps(2)
            print("peak GiB, watched", setting.peak(lambda: setting.steps(3)))
    profiled(setting, "everything", {})
    print("\ncProfile of 16 watched steps, this thread")
    with th.watch(setting.model, optimizer=setting.optimizer):
        setting.steps(8)
        setting.wait()
        profile = cProfile.Profile()
        profile.enable()
        setting.steps(16)
        profile.disable()
    out = io.StringIO()
    pstats.Stats(profile, stream=out).sort_stats("tottime").print_stats(32)
    print("\n".join(line[:150] for line in out.getvalue().splitlines()[6:]))


def replay() -> None:
    """The sweep, and where its time goes."""
    from benchmarks import gpu_replay

    print("\nthe sweep")
    gpu_replay.main(tiny=TINY, out=None)
    from transformers import GPT2Config, GPT2LMHeadModel

    from tenterhook.replay import joining, runner

    device, dtype = ("cpu", torch.float32) if TINY else ("cuda", torch.bfloat16)
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=12, use_cache=False, **({"n_embd": 48, "n_head": 4} if TINY else {})))
    model = model.to(device, dtype).eval()
    ids, other = (torch.randint(0, 50257, (1, 64), device=device) for _ in range(2))
    blocks = [f"transformer.h.{layer}" for layer in range(12)]
    with torch.no_grad(), th.record(model, *blocks) as clean:
        model(other)

    def ours() -> Any:
        cases = th.grid(
            lambda block, position: {block: th.set(clean[block][:, position], at=th.at[:, position])},
            block=blocks,
            position=range(64),
        )
        return th.sweep(model, cases, gpu_replay.difference, ids, progress=False)

    old = joining.train
    for name, way in (
        ("joined", old),
        ("joined, 256 at most", lambda *args: old(*args[:3], 260)),
        ("joined, 128 at most", lambda *args: old(*args[:3], 130)),
        ("apart", lambda waiting, *_: [waiting.pop(0)]),
    ):
        runner.train = way
        took = []
        for _ in range(2 if TINY else 6):
            if not TINY:
                torch.cuda.synchronize()
            began = time.perf_counter()
            found = ours()
            found.values.float().cpu()
            took.append(time.perf_counter() - began)
        print(f"  {name:24s} {min(took) * 1e3:8.1f} ms  {found.how[0]}")
    runner.train = old
    profile = cProfile.Profile()
    profile.enable()
    found = ours()
    found.values.float().cpu()
    profile.disable()
    print(*found.how, sep="\n")
    out = io.StringIO()
    pstats.Stats(profile, stream=out).sort_stats("tottime").print_stats(30)
    pstats.Stats(profile, stream=out).sort_stats("cumtime").print_stats("tenterhook", 35)
    print("\n".join(line[:150] for line in out.getvalue().splitlines()[6:]))


if __name__ == "__main__":
    import traceback

    for part in (main, replay):
        try:
            part()
        except Exception:
            traceback.print_exc(file=sys.stdout)
