"""The cost of harvesting on a GPU: `PYTHONPATH=src python -m benchmarks.gpu_harvest OUT.json`.

The model is a Llama with a billion parameters in bf16, with batches of 8 × 512 tokens. It measures the wall time until
the last byte is stored, with the device synchronised. Each way runs a short and a long series of batches. The ways take
turns, and the minimum counts. The difference of the two series is the cost of a batch in a long harvest. The fixed cost
of a harvest (the digest of the weights, the pinned memory, the plan, the last commit) is reported separately, and so is
the total of the long series. `--tiny` runs the same on a CPU with a tiny model, as a test of the script.
"""

from __future__ import annotations

import functools
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
    """A replacement for xxhash if it is not installed: zlib's crc32. It is slower, so that no figure gets better."""

    def __init__(self, data: Any = b"") -> None:
        self._state = zlib.crc32(data)

    def update(self, data: Any) -> None:
        """Add data to the checksum."""
        self._state = zlib.crc32(data, self._state)

    def hexdigest(self) -> str:
        """Return the checksum so far."""
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
from tenterhook.harvest.weights_digest import weights_of  # noqa: E402

TINY = "--tiny" in sys.argv
DEVICE = "cpu" if TINY else "cuda"
ROUNDS, SHORT, BATCHES = (2, 2, 6) if TINY else (3, 40, 340)
LAYERS, SAMPLES, TOKENS = (2, 2, 16) if TINY else (16, 8, 512)
HOST, DISK = 1.10, 1.05
FACTS = 3  # sample, position and token of each row
SOME = 2 if TINY else 10  # batches for the slowest way
PLAIN, BY_HAND = "plain forward", "all blocks to host, .cpu() in hooks"
ALL_TO_HOST, ONE_TO_DISK = "all blocks to host memory", "one block to disk"
MEMORY = 1 << 20 if TINY else 2 << 30
TIMES = 10  # 512 MiB


def llama() -> nn.Module:
    """Return a model with the shape of Llama 3.2 1B."""
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


def plain(model: nn.Module, batches: list[Tensor]) -> None:
    """Run the forward pass alone, up to the logits' layer, like the other ways."""
    with torch.no_grad():
        for batch in batches:
            model.model(batch.to(DEVICE, non_blocking=True))
    synchronize()


def by_hand(model: nn.Module, batches: list[Tensor]) -> None:
    """Harvest as people usually write it: with `.cpu()` in a hook."""
    kept: list[Tensor] = []

    def keep(_: nn.Module, __: Any, output: Any) -> None:
        kept.append((output[0] if isinstance(output, tuple) else output).cpu())

    handles = [layer.register_forward_hook(keep) for layer in model.model.layers]
    with torch.no_grad():
        for batch in batches:
            model.model(batch.to(DEVICE, non_blocking=True))
            kept.clear()
    for handle in handles:
        handle.remove()
    synchronize()


def to_host(model: nn.Module, batches: list[Tensor]) -> Any:
    """Copy every block of every batch to host memory, and pass it to a function."""
    counted = []
    done = th.harvest(
        model.model, batches, "layers.*", to=lambda rows: counted.append(len(rows)), rows="token", stop=False,
        progress=False, memory=MEMORY,
    )  # fmt: skip
    if counted != [LAYERS + FACTS] * len(batches):
        raise AssertionError("the function did not get every row")
    return done


def to_disk(model: nn.Module, batches: list[Tensor], folder: Path) -> None:
    """Harvest one block of every batch to disk, with commits."""
    th.harvest(model.model, batches, MIDDLE, to=folder, rows="token", stop=False, progress=False, shard_bytes=256 << 20)


MIDDLE = f"layers.{LAYERS // 2}"


def disk_rate(folder: Path) -> float:
    """Return the bytes per second of a plain write with one fsync, of a size like a harvest. The best of two."""
    data, best = torch.randint(0, 255, ((1 if TINY else 512) << 20,), dtype=torch.uint8), 0.0
    for _ in range(2):
        os.sync()
        began = time.perf_counter()
        descriptor = os.open(folder / "plain", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for _ in range(TIMES):
            view = memoryview(data.numpy())
            while view:
                view = view[os.write(descriptor, view) :]
        os.fsync(descriptor)
        os.close(descriptor)
        best = max(best, TIMES * data.numel() / (time.perf_counter() - began))
        (folder / "plain").unlink()
    return best


def seconds(call: Callable[[], Any], folder: Path | None = None) -> float:
    """Return the wall time of a call, with the device synchronised. First remove a folder and flush the disk."""
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
        os.sync()
    synchronize()
    began = time.perf_counter()
    call()
    synchronize()
    return time.perf_counter() - began


Way = Callable[[list[Tensor]], None]
Took = dict[str, dict[int, float]]
"""Seconds, by way and number of batches."""


def turns(ways: dict[str, Way], batches: list[Tensor], folder: Path, told: Callable[[Took], None]) -> None:
    """Measure a short and a long series of each way in turns."""
    took: Took = {name: dict.fromkeys((SHORT, BATCHES), float("inf")) for name in ways}
    for _ in range(ROUNDS):
        for name, way in ways.items():
            for count in (SHORT, BATCHES):
                now = seconds(functools.partial(way, batches[:count]), folder)
                took[name][count] = min(took[name][count], now)
        told(took)


def steady(took: dict[int, float]) -> float:
    """Return the seconds for each further batch."""
    return (took[BATCHES] - took[SHORT]) / (BATCHES - SHORT)


def check(model: nn.Module, batches: list[Tensor]) -> None:
    """Check before any timing that the rows in host memory equal those of plain hooks, bit for bit, in every batch."""
    seen: list[dict[str, Tensor]] = []

    def keeper(name: str) -> Any:
        return lambda _, __, output: seen[-1].update({name: output[0] if isinstance(output, tuple) else output})

    handles = [layer.register_forward_hook(keeper(f"layers.{i}")) for i, layer in enumerate(model.model.layers)]
    with torch.no_grad():
        for batch in batches:
            seen.append({})
            model.model(batch.to(DEVICE))
    for handle in handles:
        handle.remove()
    # A ring with room for less than two batches, so that it is reused many times.
    room = 3 * sum(value.nbytes for value in seen[0].values()) // 2
    wrong: list[str] = []
    numbers = iter(seen)

    def compare(rows: dict[str, Tensor]) -> None:
        right = next(numbers)
        wrong.extend(name for name in right if not torch.equal(rows[name], right[name].flatten(0, 1).cpu()))

    options: dict[str, Any] = {"rows": "token", "stop": False, "progress": False}
    th.harvest(model.model, batches, "layers.*", to=compare, memory=max(room, 1 << 16), **options)
    if wrong or next(numbers, None) is not None:
        raise AssertionError(f"not what a hook sees, or not there: {wrong}")


def main() -> None:
    """Measure, print each figure as soon as it is known, and write to the path in the first argument."""
    model = llama()
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randint(1000, (SAMPLES, TOKENS), generator=generator) for _ in range(BATCHES)]
    if not TINY:
        batches = [batch.pin_memory() for batch in batches]
    check(model, batches[:SOME])
    result: dict[str, Any] = {
        "device": "cpu" if TINY else torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "checksum": CHECKSUM,
        "batches": BATCHES,
        "digest of the weights, s": seconds(lambda: weights_of(model.model)),
        "the same again, s": seconds(lambda: weights_of(model.model)),
    }
    tell(result)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        told: list[Any] = []
        ways: dict[str, Way] = {
            PLAIN: lambda part: plain(model, part),
            ALL_TO_HOST: lambda part: told.append(to_host(model, part)),
            ONE_TO_DISK: lambda part: to_disk(model, part, folder / "acts"),
        }
        first = {name: seconds(functools.partial(way, batches[:SHORT])) for name, way in ways.items()}
        result["first time, s"] = first
        by_hand(model, batches[:SOME])
        result[BY_HAND] = {"ms": seconds(lambda: by_hand(model, batches[:SOME])) / SOME * 1e3}
        result["disk GB/s"] = disk_rate(folder) / 1e9
        tell(result)
        turns(ways, batches, folder / "acts", lambda took: report(result, took, folder, told[-1]))


def report(result: dict[str, Any], took: Took, folder: Path, told: Any) -> None:
    """Compute the figures so far, with their goals."""
    store = th.open(folder / "acts")
    stored = sum(record["bytes"] for shard in store.shards for record in shard["files"].values())
    base = steady(took[PLAIN])
    limit = max(base, stored / BATCHES / (result["disk GB/s"] * 1e9))
    for name, each in took.items():
        result[name] = {
            "ms": steady(each) * 1e3,
            "ratio": steady(each) / base,
            "fixed, s": each[SHORT] - SHORT * steady(each),
            "ms with all that is fixed": each[BATCHES] / BATCHES * 1e3,
            "ratio with all that is fixed": each[BATCHES] / took[PLAIN][BATCHES],
        }
    result[BY_HAND]["ratio"] = result[BY_HAND]["ms"] / base / 1e3
    result[ONE_TO_DISK]["of max(forward, disk)"] = steady(took[ONE_TO_DISK]) / limit
    result["stored GB"] = stored / 1e9
    result["pinned bytes in flight at most"] = told.peak
    result["to host memory, limited by"] = told.limit
    result["goals"] = {
        f"{ALL_TO_HOST} ≤ {HOST}": steady(took[ALL_TO_HOST]) / base <= HOST,
        f"{ONE_TO_DISK} ≤ {DISK} of max(forward, bytes / disk rate)": steady(took[ONE_TO_DISK]) / limit <= DISK,
    }
    tell(result)


def tell(result: dict[str, Any]) -> None:
    """Print and write the results so far."""
    text = json.dumps(result, indent=1, ensure_ascii=False)
    print(text, flush=True)
    for path in [argument for argument in sys.argv[1:] if not argument.startswith("--")]:
        Path(path).write_text(text, encoding="utf-8")


def page(path: Path) -> None:
    """Write the figures of a run into the page, on any machine."""
    from benchmarks.report import write_section

    result = json.loads(path.read_text(encoding="utf-8"))
    rows = {name: row for name, row in result.items() if isinstance(row, dict) and "ms" in row}
    lines = [
        "## Harvest on a GPU\n\nOne H200: a Llama-shaped model of 1B, batch 8, 512 tokens, bf16; a batch, steady.\n"
    ]
    lines += ["| way | ms | ratio |", "|---|--:|--:|"]
    lines += [f"| {name} | {row['ms']:.2f} | {row['ratio']:.3f} |" for name, row in rows.items()]
    lines += ["", *[f"- {goal}: {'met' if met else 'missed'}" for goal, met in result["goals"].items()]]
    write_section("gpu_harvest", "\n".join(lines))


if __name__ == "__main__":
    if "--page" in sys.argv:
        page(Path(sys.argv[sys.argv.index("--page") + 1]))
    else:
        main()
