"""Replay and sweeps: many edits of one input, compared with a full run with a raw hook for each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

import tenterhook as th
from benchmarks.harness import Goal, Row, Trial, Workload, always, measure
from benchmarks.models import BLOCKS, TOKENS, gpt2, tokens
from benchmarks.resnet import ResNet18

FEW = 8  # rounds for work of a second or more
CHANNELS = 256


def run(rounds: int) -> Iterator[Row]:
    """Measure the whole suite."""
    small = gpt2()
    yield from measure(patching(small), min(rounds, FEW))
    yield from measure(last_block(small, tokens(), "small GPT-2"), rounds)
    yield from measure(last_block(real_gpt2(), torch.arange(64)[None], "GPT-2, 64 tokens", goal=1.3), min(rounds, FEW))
    yield from measure(channels(), min(rounds, FEW // 2))


def real_gpt2() -> GPT2LMHeadModel:
    """Return GPT-2 in its original size, with random weights."""
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(use_cache=False)).eval()


def difference(output: Any) -> Tensor:
    """Return the usual metric: the difference of two logits at the last position."""
    return output.logits[0, -1, 7] - output.logits[0, -1, 9]  # type: ignore[no-any-return]


def hooked(module: nn.Module, change: Callable[[Tensor], Tensor], call: Callable[[], Any]) -> Any:
    """Run the whole model once, with a raw hook that changes a module's output."""
    handle = module.register_forward_hook(lambda _m, _a, out: change(out))
    try:
        return call()
    finally:
        handle.remove()


def patching(model: nn.Module) -> Workload:
    """Patch every block and position with the values of another input."""
    ids, other = tokens(), tokens().flip(1)
    with torch.no_grad(), th.record(model, "transformer.h.*") as clean:
        model(other)
    found: dict[str, Tensor] = {}

    def put(value: Tensor, source: Tensor, position: int) -> Tensor:
        value = value.clone()
        value[:, position] = source[:, position]
        return value

    @torch.no_grad()
    def loop() -> None:
        rows = []
        for block in BLOCKS:
            module = model.get_submodule(block)
            for position in range(TOKENS):
                change = partial(put, source=clean[block], position=position)
                rows.append(difference(hooked(module, change, lambda: model(ids))))
        found["effects"] = torch.stack(rows)

    def edits(block: str, position: int) -> dict[str, Any]:
        return {block: th.set(clean[block][:, position], at=th.at[:, position])}

    def ours() -> None:
        cases = th.grid(edits, block=BLOCKS, position=range(TOKENS))
        found["effects"] = th.sweep(model, cases, difference, ids, progress=False).values

    return Workload(
        name=f"patch {len(BLOCKS)} layers × {TOKENS} positions",
        ways={"raw hooks, one by one": always(loop, lambda: found), "tenterhook": always(ours, lambda: found)},
        reference="raw hooks, one by one",
        goals={"tenterhook": Goal("ratio", at_most=1 / 5)},
        calls=1,
        tolerance=1e-4,
    )


def last_block(model: Any, ids: Tensor, name: str, goal: float | None = None) -> Workload:
    """Replay an edit at the last block, compared with running only the rest of the model by hand."""
    block = model.get_submodule(BLOCKS[-1])
    found: dict[str, Tensor] = {}
    kept: dict[str, Tensor] = {}
    with torch.no_grad():
        handle = block.register_forward_hook(lambda _m, _a, out: kept.update(out=out))
        model(ids)
        handle.remove()

    @torch.no_grad()
    def ideal() -> None:
        found["logits"] = model.lm_head(model.transformer.ln_f(kept["out"] * 2))

    @torch.no_grad()
    def whole() -> None:
        found["logits"] = hooked(block, lambda out: out * 2, lambda: model(ids)).logits

    @contextmanager
    def ours() -> Iterator[Trial]:
        with torch.no_grad(), th.record(model, replay=[BLOCKS[-1]]) as tape:
            model(ids)

        def call() -> None:
            found["logits"] = model(ids).logits

        with torch.no_grad(), th.replay(model, tape), th.edit(model, {BLOCKS[-1]: th.scale(2.0)}):
            yield Trial(call, lambda: found)

    return Workload(
        name=f"an edit at the last of 12 blocks, {name}",
        ways={
            "only what follows, by hand": always(ideal, lambda: found),
            "raw hook, whole run": always(whole, lambda: found),
            "tenterhook, replayed": ours,
        },
        reference="raw hook, whole run",
        goals={"tenterhook, replayed": Goal("ratio", at_most=goal)} if goal else {},
        calls=4,
    )


def channels() -> Workload:
    """Ablate channels of the last stage of a residual network, one by one."""
    torch.manual_seed(0)
    model, image = ResNet18().eval(), torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    found: dict[str, Tensor] = {}

    def without(value: Tensor, channel: int) -> Tensor:
        value = value.clone()
        value[:, channel] = 0
        return value

    @torch.no_grad()
    def loop() -> None:
        rows = [
            hooked(model.get_submodule("layer4.0"), partial(without, channel=channel), lambda: model(image))[0, 5]
            for channel in range(CHANNELS)
        ]
        found["scores"] = torch.stack(rows)

    def ours() -> None:
        cases = th.grid(lambda channel: {"layer4.0": th.zero(at=th.at[:, channel])}, channel=range(CHANNELS))
        found["scores"] = th.sweep(model, cases, lambda out: out[0, 5], image, progress=False).values

    return Workload(
        name=f"ablate {CHANNELS} channels of the last stage, ResNet-18",
        ways={"raw hooks, one by one": always(loop, lambda: found), "tenterhook": always(ours, lambda: found)},
        reference="raw hooks, one by one",
        goals={"tenterhook": Goal("ratio", at_most=1 / 5)},
        calls=1,
        tolerance=1e-4,
    )
