"""Sessions on compiled models, on a GPU: `PYTHONPATH=src python -m benchmarks.gpu_compiled OUT.json`.

It measures the wall time of whole steps with the device synchronised before and after. Contenders take turns on one
compiled model, and the minimum counts. Before any timing, values are compared with those of raw hooks in eager mode.
`--tiny` runs everything on the CPU with small models, as a test of the script. `--page OUT.json` writes the figures
into the docs.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import tenterhook as th

TINY = "--tiny" in sys.argv
DEVICE = "cpu" if TINY else "cuda"
DTYPE = torch.float32 if TINY else torch.bfloat16
ROUNDS, CALLS = (3, 2) if TINY else (30, 10)
GPT2_BLOCKS, LLAMA_BLOCKS = "transformer.h.*", "model.layers.*"


def gpt2() -> Any:
    """Return GPT-2 small."""
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 128} if TINY else {}
    return GPT2LMHeadModel(GPT2Config(use_cache=False, **sizes)).to(DEVICE, DTYPE).train(mode=False)


def llama() -> Any:
    """Return a Llama with a billion parameters: 16 blocks of width 2048."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
    sizes |= {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000}
    if TINY:
        sizes |= {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
        sizes |= {"num_key_value_heads": 2, "vocab_size": 128}
    return LlamaForCausalLM(LlamaConfig(use_cache=False, **sizes)).to(DEVICE, DTYPE).train(mode=False)


def tokens(batch: int, length: int) -> torch.Tensor:
    """Return random tokens."""
    return torch.randint(0, 128, (min(batch, 2), 8) if TINY else (batch, length), device=DEVICE)


def synchronize() -> None:
    """Wait for the device."""
    if not TINY:
        torch.cuda.synchronize()


Way = Callable[[], Any]


def turns(ways: dict[str, tuple[Way, Callable[[], None]]]) -> dict[str, float]:
    """Return milliseconds for each way. In each turn a way is opened, run once, timed over some calls and closed."""
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(ROUNDS):
        for name, (opened, step) in ways.items():
            with opened():
                step()
                synchronize()
                began = time.perf_counter()
                for _ in range(CALLS):
                    step()
                synchronize()
                best[name] = min(best[name], (time.perf_counter() - began) / CALLS * 1e3)
    return best


@contextmanager
def nothing() -> Iterator[None]:
    """Open no session."""
    yield


@contextmanager
def raw(model: nn.Module, blocks: str, kept: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Register hooks by hand on every block."""
    parent, handles = model.get_submodule(blocks.removesuffix(".*")), []
    for name, module in parent.named_children():
        handles.append(module.register_forward_hook(lambda _m, _a, out, name=name: kept.__setitem__(name, out)))
    yield kept
    for handle in handles:
        handle.remove()


def first(value: Any) -> torch.Tensor:
    """Return the hidden states in the output of a block."""
    return value if isinstance(value, torch.Tensor) else value[0]  # type: ignore[no-any-return]


def compare(model: Any, call: Any, blocks: str, ids: torch.Tensor) -> float:
    """Return the largest relative error of the values recorded in the graph, compared with raw hooks in eager mode."""
    inputs = [ids, ids.flip(1), ids.roll(1, 1)]
    runs: list[dict[str, Any]] = [{} for _ in inputs]
    session = th.record(model, blocks)
    with torch.no_grad():
        for each, kept in zip(inputs, runs, strict=True):
            with raw(model, blocks, kept):
                model(each)
        with session as tape:
            for each in inputs:
                call(each)
    assert not session.compiled.breaks, session.compiled  # noqa: S101
    prefix = blocks.removesuffix("*")
    worst = 0.0
    for number, kept in enumerate(runs):
        for name, value in kept.items():
            wanted, found = first(value).float(), first(tape[f"{prefix}{name}#{number}"]).float()
            worst = max(worst, float((wanted - found).norm() / wanted.norm()))
    assert worst < (1e-4 if TINY else 3e-2), worst  # noqa: S101
    return worst


def recording(model: Any, blocks: str, ids: torch.Tensor, mode: str | None) -> dict[str, Any]:
    """Measure recording the output of every block."""
    call = torch.compile(model, mode=mode, fullgraph=True)

    def step() -> None:
        with torch.no_grad():
            call(ids)

    def eager() -> None:
        with torch.no_grad():
            model(ids)

    for _ in range(3):
        step()
    worst = compare(model, call, blocks, ids)
    ways: dict[str, Any] = {
        "compiled": (nothing, step),
        "compiled, tenterhook": (lambda: th.record(model, blocks, keep="last"), step),
        "compiled again": (nothing, step),
        "eager": (nothing, eager),
        "eager, raw hooks": (lambda: raw(model, blocks, {}), eager),
    }
    return {"times": turns(ways), "worst": worst}


def steering(model: Any, point: str, ids: torch.Tensor) -> dict[str, Any]:
    """Measure adding a vector to the output of one block."""
    call = torch.compile(model, fullgraph=True)
    vector = torch.randn(model.config.hidden_size, device=DEVICE, dtype=DTYPE)
    edit = {point: th.add(vector)}

    def step() -> Any:
        with torch.no_grad():
            return call(ids).logits

    for _ in range(3):
        step()
    with th.edit(model, edit):
        found = step()
    with th.edit(model, edit), torch.no_grad():
        wanted = model(ids).logits
    worst = float((found.float() - wanted.float()).norm() / wanted.float().norm())
    assert worst < (1e-4 if TINY else 3e-2), worst  # noqa: S101
    ways: dict[str, Any] = {
        "compiled": (nothing, step),
        "compiled, steered": (lambda: th.edit(model, edit), step),
        "compiled again": (nothing, step),
    }
    return {"times": turns(ways), "worst": worst}


def replaying(model: Any, point: str, ids: torch.Tensor, mode: str | None) -> dict[str, Any]:
    """Measure an edit of one block's output, with and without serving the calls before it."""
    model.set_attn_implementation("eager")  # Otherwise compiled code uses another mask, and nothing is served.
    call = torch.compile(model, mode=mode, fullgraph=True)
    edit = {point: th.scale(2.0)}

    def step() -> Any:
        with torch.no_grad():
            return call(ids).logits

    with torch.no_grad():
        with th.record(model, replay=True) as tape:
            model(ids)
        with th.edit(model, edit):
            wanted = model(ids).logits.float()
    session = th.replay(model, tape)
    with session, th.edit(model, edit):
        worst = max(float((step().float() - wanted).norm() / wanted.norm()) for _ in range(3))
    assert worst < (1e-4 if TINY else 3e-2), worst  # noqa: S101
    assert point in session.served.calls, session.served  # noqa: S101
    assert not session.compiled.breaks, session.compiled  # noqa: S101

    @contextmanager
    def replayed() -> Iterator[None]:
        with th.replay(model, tape, verify=False), th.edit(model, edit):
            yield

    ways: dict[str, Any] = {"compiled, edited": (lambda: th.edit(model, edit), step), "replayed": (replayed, step)}
    return {"times": turns(ways), "worst": worst}


def training(model: Any, blocks: str, ids: torch.Tensor) -> dict[str, Any]:
    """Measure a training step with the gradients of every block."""
    call = torch.compile(model, fullgraph=True)
    labels = ids[:, 1:].flatten()

    def loss_of(run: Any) -> torch.Tensor:
        logits = run(ids).logits[:, :-1]
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        loss_of(call).backward()

    for _ in range(3):
        step()
    with th.record(model, blocks, grad=True) as wanted:
        loss_of(model).backward()
    with th.record(model, blocks, grad=True) as found:
        loss_of(call).backward()
    pairs = [(first(wanted.grad[name]).float(), first(found.grad[name]).float()) for name in wanted.grad]
    worst = max(float((one - other).norm() / one.norm()) for one, other in pairs)
    assert worst < (1e-4 if TINY else 5e-2), worst  # noqa: S101
    ways: dict[str, Any] = {
        "compiled step": (nothing, step),
        "compiled step, gradients": (lambda: th.record(model, blocks, grad=True, keep="last"), step),
        "compiled step again": (nothing, step),
    }
    return {"times": turns(ways), "worst": worst}


def rows() -> Iterator[tuple[str, str, float, float, dict[str, Any]]]:
    """Yield the work, the goal as text, its bound, the figure, and all times."""
    found = training(gpt2(), GPT2_BLOCKS, tokens(8, 512))
    ratio = found["times"]["compiled step, gradients"] / found["times"]["compiled step"]
    yield "a training step of GPT-2, batch 8, 512 tokens, gradients of 12 blocks", "≤ 1.10", 1.10, ratio, found
    torch.compiler.reset()
    found = recording(gpt2(), GPT2_BLOCKS, tokens(1, 32), "reduce-overhead")
    times = found["times"]
    ratio = times["compiled, tenterhook"] / times["compiled"]
    yield "GPT-2, batch 1, 32 tokens, CUDA graphs, 12 blocks recorded", "≤ 1.10 of compiled", 1.10, ratio, found
    faster = times["eager, raw hooks"] / times["compiled, tenterhook"]
    yield "the same, beside raw hooks in eager mode", "≥ 5 times as fast", -5, faster, {}
    model, ids = llama(), tokens(8, 512)
    found = recording(model, LLAMA_BLOCKS, ids, None)
    times = found["times"]
    ratio = times["compiled, tenterhook"] / times["compiled"]
    yield "Llama-shaped, 1B, batch 8, 512 tokens, 16 blocks recorded", "≤ 1.03 of compiled", 1.03, ratio, found
    found = steering(model, LLAMA_BLOCKS.replace("*", "1" if TINY else "8"), ids)
    ratio = found["times"]["compiled, steered"] / found["times"]["compiled"]
    yield "the same, a vector added at one block", "≤ 1.02 of compiled", 1.02, ratio, found
    found = replaying(model, LLAMA_BLOCKS.replace("*", "1" if TINY else "11"), ids, None)
    ratio = found["times"]["replayed"] / found["times"]["compiled, edited"]
    yield "the same, block 11 of 16 edited, what lies before it served", "≤ 0.5 of compiled", 0.5, ratio, found
    del model
    torch.compiler.reset()
    found = replaying(gpt2(), GPT2_BLOCKS.replace("*", "1" if TINY else "8"), tokens(1, 32), "reduce-overhead")
    ratio = found["times"]["replayed"] / found["times"]["compiled, edited"]
    yield "GPT-2, batch 1, CUDA graphs, block 8 of 12 edited, the rest served", "none: see below", 1e9, ratio, found


def main(path: str | None) -> None:
    """Measure, print and write."""
    device = "cpu" if TINY else torch.cuda.get_device_name()
    result: dict[str, Any] = {"device": device, "torch": torch.__version__, "rows": []}
    for work, goal, bound, figure, found in rows():
        reached = figure >= -bound if bound < 0 else figure <= bound
        result["rows"].append({"work": work, "goal": goal, "figure": figure, "reached": reached, **found})
        print(f"{'ok  ' if reached else 'MISS'} {figure:7.3f}  {goal:20s} {work}", flush=True)
        for name, took in found.get("times", {}).items():
            print(f"             {took:9.3f} ms  {name}", flush=True)
        if path is not None:
            Path(path).write_text(json.dumps(result, indent=1), encoding="utf-8")


def page(path: Path) -> None:
    """Write the figures of a run into the page, on any machine."""
    from benchmarks.report import write_section

    result = json.loads(path.read_text(encoding="utf-8"))
    lines = [f"## Compiled, on a GPU\n\n{result['device']}, torch {result['torch']}, bf16.\n"]
    lines += ["| work | figure | goal |", "|---|--:|---|"]
    lines += [f"| {row['work']} | {row['figure']:.3f} | {row['goal']} |" for row in result["rows"]]
    lines += [
        "\nWhere a whole forward takes half a millisecond, deciding what can be served takes longer than computing it."
    ]
    write_section("compiled", "\n".join(lines))


if __name__ == "__main__":
    given = [each for each in sys.argv[1:] if not each.startswith("--")]
    if "--page" in sys.argv:
        page(Path(given[0]))
    else:
        main(given[0] if given else None)
