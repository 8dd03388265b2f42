"""What harvesting costs on a GPU: `PYTHONPATH=src python -m benchmarks.gpu_harvest OUT.json` on a machine that has one.

A Llama-shaped model of a billion parameters in bf16, batches of 8 × 512 tokens. Wall time of a whole run of batches,
from the first forward until the last byte is where it belongs, the device synchronised; ways take turns, minimum of
several. `--tiny` runs the same on a CPU with a tiny model, to see that it works.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
import types
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM


class Slower:
    """In the place of xxhash where that is not installed: zlib's crc32, which is slower, so that no figure gains."""

    def __init__(self, data: Any = b"") -> None:
        self._state = zlib.crc32(data)

    def update(self, data: Any) -> None:
        """Take more."""
        self._state = zlib.crc32(data, self._state)

    def hexdigest(self) -> str:
        """The checksum so far."""
        return f"{self._state:016x}"


try:
    import xxhash

    CHECKSUM = f"xxhash {xxhash.VERSION}"
except ImportError:
    stand_in = types.ModuleType("xxhash")
    stand_in.xxh3_64 = stand_in.xxh3_128 = Slower  # type: ignore[attr-defined]
    sys.modules["xxhash"] = stand_in
    CHECKSUM = "crc32, because xxhash is not installed"

import tenterhook as th  # noqa: E402
from tenterhook.harvest.job import Job  # noqa: E402
from tenterhook.harvest.rows import Taking  # noqa: E402
from tenterhook.sinks.shards import Column  # noqa: E402
from tenterhook.sinks.shards_place import Directory  # noqa: E402
from tenterhook.sinks.shards_write import Writer  # noqa: E402

TINY = "--tiny" in sys.argv
DEVICE = "cpu" if TINY else "cuda"
ROUNDS, BATCHES = (2, 3) if TINY else (3, 120)
LAYERS, SAMPLES, TOKENS = (2, 2, 16) if TINY else (16, 8, 512)
HOST, DISK = 1.10, 1.05
SOME = BATCHES if TINY else 20  # of the slowest way
MEMORY = 1 << 20 if TINY else 2 << 30


def llama() -> nn.Module:
    """Llama 3.2 1B in shape."""
    torch.manual_seed(0)
    width = 64 if TINY else 2048
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=LAYERS,
        num_attention_heads=4 if TINY else 32,
        num_key_value_heads=2 if TINY else 8,
        vocab_size=1000 if TINY else 128_256,
        tie_word_embeddings=True,
        use_cache=False,
    )
    with torch.device(DEVICE):
        return LlamaForCausalLM(config).to(torch.float32 if TINY else torch.bfloat16).train(mode=False)


def synchronize() -> None:
    """Wait for the device."""
    if not TINY:
        torch.cuda.synchronize()


class Discard(Writer):
    """A writer that takes every byte to host memory, and no further."""

    def _write(self, shard: int, column: Column, piece: Any) -> None:  # noqa: ARG002
        self.seconds["copy"] += piece.ready()
        piece.release()

    def _commit(self, *_: Any) -> None:
        pass


def plain(model: nn.Module, batches: list[Tensor]) -> None:
    """The forward alone, up to the logits' layer, as the others run it."""
    with torch.no_grad():
        for batch in batches:
            model.model(batch.to(DEVICE))
    synchronize()


def by_hand(model: nn.Module, batches: list[Tensor]) -> None:
    """What people write: `.cpu()` in a hook."""
    kept: list[Tensor] = []

    def keep(_: nn.Module, __: Any, output: Any) -> None:
        kept.append((output[0] if isinstance(output, tuple) else output).cpu())

    handles = [layer.register_forward_hook(keep) for layer in model.model.layers]
    with torch.no_grad():
        for batch in batches:
            model.model(batch.to(DEVICE))
            kept.clear()
    for handle in handles:
        handle.remove()
    synchronize()


def to_host(job: Job, batches: list[Tensor], columns: dict[str, Column], writer: Discard) -> None:
    """Every block of every batch into host memory, through the pinned ring."""
    for number, batch in enumerate(batches):
        made = job.run(batch, number * SAMPLES)
        for (key, kind), rows in made.rows.items():
            if kind == "value":
                writer.put(0, columns[key], rows)
    writer.drain()
    synchronize()


def to_disk(model: nn.Module, batches: list[Tensor], folder: Path) -> None:
    """One block of every batch to disk, committed."""
    shutil.rmtree(folder, ignore_errors=True)
    th.harvest(
        model.model, batches, MIDDLE, to=folder, rows="token", stop=False, memory=MEMORY, progress=False,
        shard_bytes=256 << 20,
    )  # fmt: skip


MIDDLE = f"layers.{LAYERS // 2}"


def disk_rate(folder: Path) -> float:
    """Bytes per second of a plain write with one fsync, the best of three."""
    data, best = torch.randint(0, 255, ((4 if TINY else 512) << 20,), dtype=torch.uint8), 0.0
    for _ in range(3):
        began = time.perf_counter()
        descriptor = os.open(folder / "plain", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        view = memoryview(data.numpy())
        while view:
            view = view[os.write(descriptor, view) :]
        os.fsync(descriptor)
        os.close(descriptor)
        best = max(best, data.numel() / (time.perf_counter() - began))
    (folder / "plain").unlink()
    return best


def turns(ways: dict[str, Callable[[], None]]) -> dict[str, float]:
    """Seconds of each way, the ways taking turns."""
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(ROUNDS):
        for name, way in ways.items():
            synchronize()
            began = time.perf_counter()
            way()
            best[name] = min(best[name], time.perf_counter() - began)
    return best


def check(job: Job, batch: Tensor, model: nn.Module) -> None:
    """Before anything is timed: the rows are what plain hooks see, bit for bit."""
    seen: dict[str, Tensor] = {}

    def keeper(name: str) -> Any:
        return lambda _, __, output: seen.update({name: output[0] if isinstance(output, tuple) else output})

    handles = [layer.register_forward_hook(keeper(f"layers.{i}")) for i, layer in enumerate(model.model.layers)]
    with torch.no_grad():
        model.model(batch.to(DEVICE))
    for handle in handles:
        handle.remove()
    made = job.run(batch, 0)
    for name, value in seen.items():
        if not torch.equal(made.rows[name, "value"], value.flatten(0, 1)):
            raise AssertionError(f"{name} is not what a hook sees")


def main() -> None:
    """Measure, print, and write where the first argument says."""
    model = llama()
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randint(1000, (SAMPLES, TOKENS), generator=generator) for _ in range(BATCHES)]
    if not TINY:
        batches = [batch.pin_memory() for batch in batches]
    job = Job(model.model, ("layers.*",), Taking("token"), stop=False)
    check(job, batches[0], model)
    columns = {
        key: Column(key, "value", key, "F32" if TINY else "BF16", tuple(rows.shape[1:]))
        for (key, kind), rows in job.run(batches[0], 0).rows.items()
        if kind == "value"
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        writer = Discard(Directory(folder / "none"), MEMORY)
        ways = {
            "plain forward": lambda: plain(model, batches),
            "all blocks to host, .cpu() in hooks": lambda: by_hand(model, batches[:SOME]),
            "all blocks to host memory": lambda: to_host(job, batches, columns, writer),
            "one block to disk": lambda: to_disk(model, batches, folder / "acts"),
        }
        for way in ways.values():
            way()
        took = turns(ways)
        took["all blocks to host, .cpu() in hooks"] *= BATCHES / SOME
        writer.close()
        store = th.open(folder / "acts")
        stored = sum(record["bytes"] for shard in store.shards for record in shard["files"].values())
        rate = disk_rate(folder)
    report(took, stored, rate, writer.budget.peak)


def report(took: dict[str, float], stored: int, rate: float, peak: int) -> None:
    """The figures with their goals."""
    base = took["plain forward"]
    limit = max(base, stored / rate)
    result: dict[str, Any] = {
        "device": "cpu" if TINY else torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "checksum": CHECKSUM,
        "batches": BATCHES,
        "disk GB/s": rate / 1e9,
        "stored GB": stored / 1e9,
        "pinned bytes in flight at most": peak,
    }
    for name, seconds in took.items():
        result[name] = {"ms": seconds / BATCHES * 1e3, "ratio": seconds / base}
    result["one block to disk"]["of max(forward, disk)"] = took["one block to disk"] / limit
    result["goals"] = {
        f"all blocks to host memory ≤ {HOST}": took["all blocks to host memory"] / base <= HOST,
        f"one block to disk ≤ {DISK} of max(forward, bytes / disk rate)": took["one block to disk"] / limit <= DISK,
    }
    print(json.dumps(result, indent=1))
    paths = [argument for argument in sys.argv[1:] if not argument.startswith("--")]
    if paths:
        Path(paths[0]).write_text(json.dumps(result, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
