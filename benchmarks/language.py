"""What people do with language models: patterns, skipped blocks, generation, and many prompts at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

import tenterhook as th
from benchmarks.everyday import Work, measure
from benchmarks.harness import Row
from benchmarks.models import BLOCKS, VOCABULARY, gpt2, tokens

SKIPPED = BLOCKS[1::2]
LONG, PROMPTS = 64, 16
DONE: Mapping[str, Any] = {}


def run(rounds: int) -> Iterator[Row]:
    """Measure the whole suite."""
    model, ids = gpt2(), tokens()
    with torch.no_grad():
        yield from measure(pattern(model, ids), rounds)
        yield from measure(skip(model, ids), rounds)
        yield from measure(batch(model), max(rounds // 4, 5))
        yield from measure(generate(model, ids[:, :1]), max(rounds // 6, 5))


def pattern(model: nn.Module, ids: torch.Tensor) -> Work:
    """Record the attention pattern of one layer of twelve, with the fused kernel."""

    def ours() -> Mapping[str, Any]:
        with th.record(model, f"{BLOCKS[5]}.attn@pattern"):
            model(ids)
        return DONE

    return Work("attention pattern of one layer", {"plain": _plain(model, ids), "tenterhook": ours}, "ratio", 1.10)


def skip(model: nn.Module, ids: torch.Tensor) -> Work:
    """Skip six of twelve blocks."""
    short = gpt2()
    short.transformer.h = nn.ModuleList([short.transformer.h[place] for place in range(0, len(BLOCKS), 2)])

    def ours() -> Mapping[str, Any]:
        with th.edit(model, dict.fromkeys(SKIPPED, th.skip())):
            model(ids)
        return DONE

    ways = {"the model without them": _plain(short, ids), "tenterhook": ours}
    return Work("skip 6 of 12 blocks", ways, "ratio", 1.02)


def batch(model: nn.Module) -> Work:
    """Run 16 prompts of mixed length, each with its own edit and recording."""
    draw = torch.Generator().manual_seed(0)
    cases = []
    for number in range(PROMPTS):
        ids = torch.randint(VOCABULARY, (1, int(torch.randint(4, 13, (1,), generator=draw))), generator=draw)
        edits = {BLOCKS[number % len(BLOCKS)]: th.scale(0.5, at=th.at[:, -1])}
        cases.append(th.case(ids, edits=edits, record="transformer.h.*"))

    def singly() -> Mapping[str, Any]:
        found = []
        for case in cases:
            with th.record(model, "transformer.h.*") as tape, th.edit(model, case.edits):
                model(*case.args)
            found.append(tape)
        return DONE

    def ours() -> Mapping[str, Any]:
        th.batch(model, cases)
        return DONE

    work = f"{PROMPTS} prompts of 4 to 12 tokens, each with its own edit"
    return Work(work, {"one by one": singly, "tenterhook": ours}, "ratio", 0.25)


def generate(model: Any, ids: torch.Tensor) -> Work:
    """Record one block while the model generates."""
    options = {"max_new_tokens": LONG - 2, "do_sample": False, "pad_token_id": 0, "use_cache": True}
    options |= {"eos_token_id": None, "attention_mask": torch.ones_like(ids)}

    def plain() -> Mapping[str, Any]:
        model.generate(ids, **options)
        return DONE

    def ours() -> Mapping[str, Any]:
        with th.record(model, BLOCKS[5]):
            model.generate(ids, **options)
        return DONE

    return Work(f"generate {LONG - 2} tokens, one block", {"plain": plain, "tenterhook": ours}, "ratio", 1.03)


def _plain(model: nn.Module, ids: torch.Tensor) -> Callable[[], Mapping[str, Any]]:
    def plain() -> Mapping[str, Any]:
        model(ids)
        return DONE

    return plain
