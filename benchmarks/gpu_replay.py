"""A patching sweep on a GPU: `PYTHONPATH=src python -m benchmarks.gpu_replay OUT.json`. `--tiny` runs it on a CPU."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import tenterhook as th


def difference(output: Any) -> torch.Tensor:
    """Return the difference of two logits at the last position."""
    return output.logits[0, -1, 7] - output.logits[0, -1, 9]  # type: ignore[no-any-return]


def main(*, tiny: bool, out: Path | None) -> None:
    """Patch 12 layers × 64 positions of GPT-2 small in bf16: with raw hooks one by one, and with a sweep."""
    device, dtype = ("cpu", torch.float32) if tiny else ("cuda", torch.bfloat16)
    layers, positions = (3, 6) if tiny else (12, 64)
    config = GPT2Config(n_layer=layers, use_cache=False, **({"n_embd": 48, "n_head": 4} if tiny else {}))
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config).to(device, dtype).eval()
    ids, other = (torch.randint(0, 50257, (1, positions), device=device) for _ in range(2))
    blocks = [f"transformer.h.{layer}" for layer in range(layers)]
    with torch.no_grad(), th.record(model, *blocks) as clean:
        model(other)

    @torch.no_grad()
    def loop() -> torch.Tensor:
        rows = []
        for block in blocks:
            for position in range(positions):

                def put(_m: Any, _a: Any, value: Any, block: str = block, position: int = position) -> Any:
                    value = value.clone()
                    value[:, position] = clean[block][:, position]
                    return value

                handle = model.get_submodule(block).register_forward_hook(put)
                rows.append(difference(model(ids)))
                handle.remove()
        return torch.stack(rows)

    def ours() -> torch.Tensor:
        cases = th.grid(
            lambda block, position: {block: th.set(clean[block][:, position], at=th.at[:, position])},
            block=blocks,
            position=range(positions),
        )
        found = th.sweep(model, cases, difference, ids, progress=False)
        print(*found.how, sep="\n", flush=True)
        return found.values

    times: dict[str, float] = {}
    values: dict[str, torch.Tensor] = {}
    for name, way in (("raw hooks, one by one", loop), ("tenterhook", ours)) * 4:
        if not tiny:
            torch.cuda.synchronize()
        began = time.perf_counter()
        values[name] = way().float().cpu()
        times[name] = min(times.get(name, float("inf")), time.perf_counter() - began)
    gap = float((values["tenterhook"] - values["raw hooks, one by one"]).abs().max())
    size = float(values["raw hooks, one by one"].abs().max())
    ratio = times["raw hooks, one by one"] / times["tenterhook"]
    print(
        {name: f"{took * 1e3:.1f} ms" for name, took in times.items()},
        f"{ratio:.1f} times faster; off by {gap} of {size}",
    )
    if out is not None:
        result = {
            "times": times,
            "faster": ratio,
            "largest gap": gap,
            "largest value": size,
            "torch": torch.__version__,
        }
        out.write_text(json.dumps(result, indent=1), encoding="utf-8")


def page(path: Path) -> None:
    """Write the figures of a run into the page, on any machine."""
    from benchmarks.report import write_section

    result = json.loads(path.read_text(encoding="utf-8"))
    gap, size = result["largest gap"], result["largest value"]
    about = f"One H200, torch {result['torch']}: 12 layers × 64 positions of GPT-2 small in bf16."
    why = f"The largest difference is {gap:.3g}, of values up to {size:.3g}: a batch adds up in another order, in bf16."
    lines = [f"## Replay on a GPU\n\n{about}\n", "| way | seconds |", "|---|--:|"]
    lines += [f"| {name} | {took:.3f} |" for name, took in result["times"].items()]
    lines.append(f"\n{result['faster']:.1f} times faster (goal: 40). {why}")
    write_section("gpu_replay", "\n".join(lines))


if __name__ == "__main__":
    paths = [Path(each) for each in sys.argv[1:] if not each.startswith("--")]
    if "--page" in sys.argv:
        page(paths[0])
    else:
        main(tiny="--tiny" in sys.argv, out=paths[0] if paths else None)
