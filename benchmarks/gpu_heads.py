"""Heads and batches on a GPU: `PYTHONPATH=src:. python -m benchmarks.gpu_heads OUT.json`. `--tiny` runs it on a CPU."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import tenterhook as th
from benchmarks.harness import WrongValues

ROUNDS = 5
SKIP = 1.02
GOALS = {"patch every head": 130.0, "16 prompts, each with its own edit": 8.0}


def difference(output: Any) -> torch.Tensor:
    """Return the difference of two logits at the last position."""
    return output.logits[0, -1, 7] - output.logits[0, -1, 9]  # type: ignore[no-any-return]


def compared(ways: dict[str, Callable[[], torch.Tensor]], rounds: int) -> dict[str, Any]:
    """Return the fastest time of each way, and the largest difference between their results."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    values: dict[str, torch.Tensor] = {}
    for _ in range(rounds):
        for name, way in ways.items():
            _wait()
            began = time.perf_counter()
            values[name] = way().float().cpu()
            times[name].append(time.perf_counter() - began)
    one, other = values.values()
    best = {name: min(each) for name, each in times.items()}
    first, second = best.values()
    return {
        "seconds": best,
        "first call": {name: each[0] for name, each in times.items()},
        "faster": first / second,
        "largest gap": float((one - other).abs().max()),
        "largest value": float(one.abs().max()),
    }


def heads(device: str, dtype: torch.dtype, *, tiny: bool) -> dict[str, Any]:
    """Patch every head of a Llama-shaped model of 1B at the last position of 64 tokens."""
    sizes: dict[str, int] = {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "vocab_size": 128256,
    }
    if tiny:
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "vocab_size": 500}
    config = LlamaConfig(num_attention_heads=32, num_key_value_heads=8, **sizes)
    torch.manual_seed(0)
    with torch.device(device):
        model = LlamaForCausalLM(config).to(dtype).eval()
    ids, other = (torch.randint(0, sizes["vocab_size"], (1, 64), device=device) for _ in range(2))
    layers, count = sizes["num_hidden_layers"], 32
    size = sizes["hidden_size"] // count
    points = [f"model.layers.{layer}.self_attn@z" for layer in range(layers)]
    with torch.no_grad(), th.record(model, *points) as clean:
        model(other)

    @torch.no_grad()
    def loop() -> torch.Tensor:
        rows = []
        for layer in range(layers):
            projection = model.model.layers[layer].self_attn.o_proj
            for head in range(count):
                part = slice(head * size, (head + 1) * size)

                def put(_module: Any, args: Any, layer: int = layer, head: int = head, part: slice = part) -> Any:
                    value = args[0].clone()
                    value[:, -1, part] = clean[points[layer]][:, -1, head]
                    return (value,)

                handle = projection.register_forward_pre_hook(put)
                rows.append(difference(model(ids)))
                handle.remove()
        return torch.stack(rows)

    def ours() -> torch.Tensor:
        cases = th.grid(
            lambda layer, head: {points[layer]: th.set(clean[points[layer]][:, -1, head], at=th.at[:, -1, head])},
            layer=range(layers),
            head=range(count),
        )
        found = th.sweep(model, cases, difference, ids, progress=False)
        print(*found.how, sep="\n", flush=True)
        return found.values

    return compared({"raw hooks, one by one": loop, "tenterhook": ours}, 2 if tiny else ROUNDS)


def batches(device: str, dtype: torch.dtype, *, tiny: bool) -> dict[str, Any]:
    """Run 16 prompts of mixed length, each with its own edit and recording: one by one, and as a batch."""
    config = GPT2Config(**({"n_layer": 3, "n_embd": 48, "n_head": 4} if tiny else {}))
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config).to(device, dtype).eval()
    draw, layers = torch.Generator().manual_seed(0), config.n_layer
    cases = []
    for number in range(16):
        length = int(torch.randint(8, 65, (1,), generator=draw))
        ids = torch.randint(0, 50257, (1, length), generator=draw).to(device)
        push = torch.ones(config.n_embd, device=device, dtype=dtype)
        edits = {f"transformer.h.{number % layers}": th.add(push, at=th.at[:, -1])}
        cases.append(th.case(ids, edits=edits, record="transformer.h.*"))

    def singly() -> torch.Tensor:
        rows = []
        for case in cases:
            with torch.no_grad(), th.record(model, "transformer.h.*"), th.edit(model, case.edits):
                rows.append(difference(model(*case.args)))
        return torch.stack(rows)

    def together() -> torch.Tensor:
        found = th.batch(model, cases)
        print(*found.how, sep="\n", flush=True)
        return torch.stack([difference(run.output) for run in found])

    return compared({"one by one": singly, "th.batch": together}, 2 if tiny else 3 * ROUNDS)


def skips(device: str, dtype: torch.dtype, *, tiny: bool) -> dict[str, Any]:
    """Skip six of twelve blocks: the time over that of the model without them, one session for each call."""
    config = GPT2Config(use_cache=False, **({"n_embd": 48, "n_head": 4} if tiny else {}))
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config).to(device, dtype).eval()
    short = GPT2LMHeadModel(config).to(device, dtype).eval()
    short.load_state_dict(model.state_dict())
    short.transformer.h = torch.nn.ModuleList(list(short.transformer.h)[::2])
    ids = torch.randint(0, 50257, (1, 32) if tiny else (8, 512), device=device)
    edits = {f"transformer.h.{layer}": th.skip() for layer in range(1, 12, 2)}

    @torch.no_grad()
    def plain() -> Any:
        return short(ids).logits

    @torch.no_grad()
    def ours() -> Any:
        with th.edit(model, edits):
            return model(ids).logits

    if not torch.equal(plain(), ours()):
        raise WrongValues("the model with skipped blocks gives another output than the model without them")
    ratios: list[float] = []
    for _ in range(5 if tiny else 100):
        took = []
        for way in (plain, ours):
            _wait()
            began = time.perf_counter()
            way()
            _wait()
            took.append(time.perf_counter() - began)
        ratios.append(took[1] / took[0])
    return {"ratio": statistics.median(ratios), "quartiles": statistics.quantiles(ratios)}


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main(*, tiny: bool, out: Path | None) -> None:
    """Measure both, print the figures, and write them."""
    device, dtype = ("cpu", torch.float32) if tiny else ("cuda", torch.bfloat16)
    found = {
        "patch every head": heads(device, dtype, tiny=tiny),
        "16 prompts, each with its own edit": batches(device, dtype, tiny=tiny),
    }
    skipped = skips(device, dtype, tiny=tiny)
    print(f"6 of 12 blocks skipped: {skipped['ratio']:.3f} of the model without them (goal {SKIP:g})", skipped)
    for name, result in found.items():
        print(f"{name}: {result['faster']:.1f} times faster (goal {GOALS[name]:g})", result)
    if out is not None:
        out.write_text(json.dumps(found | {"skip": skipped, "torch": torch.__version__}, indent=1), encoding="utf-8")


def page(path: Path) -> None:
    """Write the figures of a run into the page, on any machine."""
    from benchmarks.report import write_section

    result = json.loads(path.read_text(encoding="utf-8"))
    skipped = result.pop("skip")["ratio"]
    about = (
        f"One H200, torch {result.pop('torch')}, bf16: every head of a Llama-shaped model of 1B (16 layers × 32 heads) "
        "at the last of 64 positions; 16 prompts of 8 to 64 tokens through GPT-2 small."
    )
    lines = [
        f"## Heads and batches on a GPU\n\n{about}\n",
        "| work | way | seconds | times faster | goal |",
        "|---|---|--:|--:|--:|",
    ]
    for work, each in result.items():
        for name, took in each["seconds"].items():
            last = name == list(each["seconds"])[-1]
            lines.append(
                f"| {work} | {name} | {took:.4f} | {each['faster']:.1f} | {GOALS[work]:g} |"
                if last
                else f"| {work} | {name} | {took:.4f} | | |"
            )
    lines.append(
        f"\nGPT-2 small b8 s512, 6 of 12 blocks skipped: {skipped:.3f} of the model without them (goal {SKIP:g})."
    )
    write_section("gpu_heads", "\n".join(lines))


if __name__ == "__main__":
    paths = [Path(each) for each in sys.argv[1:] if not each.startswith("--")]
    if "--page" in sys.argv:
        page(paths[0])
    else:
        main(tiny="--tiny" in sys.argv, out=paths[0] if paths else None)
