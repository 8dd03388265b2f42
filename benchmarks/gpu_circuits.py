"""Circuits and dictionaries on a GPU: `PYTHONPATH=src python -m benchmarks.gpu_circuits OUT.json`.

`--tiny` runs it on a CPU.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

import tenterhook as th
from tenterhook.recipes import circuit

ROUNDS, MANY = 5, 40


class Setting:
    """The model, the inputs and the sizes, for a GPU or tiny for a CPU."""

    def __init__(self, *, tiny: bool) -> None:
        self.tiny = tiny
        self.device, self.dtype = ("cpu", torch.float32) if tiny else ("cuda", torch.bfloat16)
        small = {"n_layer": 2, "n_embd": 48, "n_head": 4, "vocab_size": 100} if tiny else {}
        torch.manual_seed(0)
        config = GPT2Config(use_cache=False, bos_token_id=0, eos_token_id=0, **small)
        self.model: Any = GPT2LMHeadModel(config).to(self.device, self.dtype).eval()
        self.size, self.words = config.n_embd, config.vocab_size

    def ids(self, examples: int, tokens: int) -> Tensor:
        """Return random tokens."""
        return torch.randint(1, self.words, (examples, tokens), device=self.device)

    def best(self, *ways: Callable[[], Any], rounds: int = ROUNDS) -> list[float]:
        """Return the shortest time of each way; the ways take turns."""
        times = [float("inf")] * len(ways)
        for number in range(1 if self.tiny else rounds + 1):
            for place, way in enumerate(ways):
                self._wait()
                began = time.perf_counter()
                way()
                self._wait()
                if number or self.tiny:  # The first round warms up.
                    times[place] = min(times[place], time.perf_counter() - began)
        return times

    def _wait(self) -> None:
        if not self.tiny:
            torch.cuda.synchronize()


def metric(output: Any) -> Tensor:
    """Return the difference of two logits at the last position, for each example."""
    return (output.logits[:, -1, 7] - output.logits[:, -1, 9]).float()  # type: ignore[no-any-return]


def scores(setting: Setting) -> dict[str, Any]:
    """Time the scores of all edges beside two forward passes and one backward pass."""
    model, found = setting.model, {}
    for examples, tokens in ((2, 6),) if setting.tiny else ((1, 16), (8, 64), (8, 512)):
        clean, corrupt = setting.ids(examples, tokens), setting.ids(examples, tokens)

        def plain(clean: Tensor = clean, corrupt: Tensor = corrupt) -> None:
            with torch.no_grad():
                model(clean)
            model.zero_grad(set_to_none=True)
            metric(model(corrupt)).sum().backward()

        def eap(clean: Tensor = clean, corrupt: Tensor = corrupt) -> None:
            circuit.edges(model, clean, corrupt, metric=metric)

        eap()  # The graph of the model is found once.
        model.zero_grad(set_to_none=True)
        one, other = setting.best(plain, eap, rounds=MANY)
        found[f"{examples} × {tokens} tokens"] = {"plain": one, "tenterhook": other, "times": other / one}
    model.zero_grad(set_to_none=True)
    return found


def exact(setting: Setting) -> dict[str, Any]:
    """Time exact scores of 1,000 edges beside one run with raw hooks for each. The last layer's logits have most."""
    model, count = setting.model, 20 if setting.tiny else 1000
    clean, corrupt = setting.ids(1, 6 if setting.tiny else 16), setting.ids(1, 6 if setting.tiny else 16)
    scored = circuit.edges(model, clean, corrupt, metric=metric)
    wanted = scored.table[:count]
    graph = scored.task.graph  # type: ignore[union-attr]
    senders = {each.name: place for place, each in enumerate(graph.senders)}
    places = {each.name: place for place, each in enumerate(graph.receivers)}
    from tenterhook.recipes._edge_batch import case, through_norm
    from tenterhook.recipes._edge_products import differences
    from tenterhook.recipes._edge_runs import recorded

    with torch.no_grad():
        change = differences(
            graph, recorded(model, graph, clean, metric)[0], recorded(model, graph, corrupt, metric)[0]
        )
        with th.record(model, *graph.streams) as tape:
            base = metric(model(corrupt))

    @torch.no_grad()
    def loop() -> Tensor:
        rows = []
        for sender, receiver, *_ in wanted:
            at = graph.receivers[places[receiver]]
            new = through_norm(graph, places[receiver], tape[at.stream] + change[senders[sender]])
            [(point, edit)] = case(at, new).items()
            rows.append(metric(_hooked(model, point, edit, corrupt)) - base)
        return torch.cat(rows)

    def ours() -> circuit.Edges:
        return circuit.edges(model, clean, corrupt, metric=metric, method="exact", only=wanted, progress=False)

    found = ours()
    mine = torch.tensor([found.score(sender, receiver) for sender, receiver, *_ in wanted])
    theirs = loop().float().cpu()
    one, other = setting.best(loop, ours)
    return {
        "edges": count, "raw hooks": one, "tenterhook": other, "faster": one / other,
        "largest gap": float((mine - theirs).abs().max()), "largest value": float(theirs.abs().max()),
        "how": list(found.how),
    }  # fmt: skip


def _hooked(model: Any, point: str, edit: Any, given: Tensor) -> Any:
    """Run a model with one edit, installed as a raw hook."""
    path, _, site = point.partition(":")
    path = path.partition("@")[0]

    def put(value: Tensor) -> Tensor:
        if edit.at is None:
            return edit.value  # type: ignore[no-any-return]
        value = value.clone()
        value[edit.at] = edit.value
        return value

    module = model.get_submodule(path)
    if site == "in":
        handle = module.register_forward_pre_hook(lambda _m, args: (put(args[0]), *args[1:]))
    else:

        def after(_m: Any, _a: Any, value: Any) -> Any:
            return put(value) if isinstance(value, Tensor) else (put(value[0]), *value[1:])

        handle = module.register_forward_hook(after)
    try:
        return model(given)
    finally:
        handle.remove()


def splice(setting: Setting) -> dict[str, Any]:
    """Time a splice with an error term beside the model and the dictionary by hand."""
    model, layer = setting.model, 1 if setting.tiny else 6
    given = setting.ids(*((2, 6) if setting.tiny else (8, 512)))
    sae = th.Dictionary(setting.size, 16 * setting.size, kind="jumprelu").to(setting.device, setting.dtype)
    sae.requires_grad_(requires_grad=False)
    block, point = model.transformer.h[layer], f"transformer.h.{layer}"

    def by_hand(_m: Any, _a: Any, value: Any) -> Any:
        stream = value if isinstance(value, Tensor) else value[0]
        latents = sae.encode(stream)
        made = sae.decode(latents)
        new = made + (stream - made).detach()
        return new if isinstance(value, Tensor) else (new, *value[1:])

    def hooked() -> None:
        handle = block.register_forward_hook(by_hand)
        with torch.no_grad():
            model(given)
        handle.remove()

    def ours() -> None:
        with torch.no_grad(), th.splice(model, {point: sae}, error=True):
            model(given)

    def read() -> None:
        with torch.no_grad(), th.splice(model, {point: sae}, error=True), th.record(model, f"{point}@latents"):
            model(given)

    hand, spliced, kept = setting.best(hooked, ours, read)
    return {
        "by hand": hand, "tenterhook": spliced, "times": spliced / hand, "latents recorded": kept,
        "recorded, times": kept / hand,
    }  # fmt: skip


def training(setting: Setting) -> dict[str, Any]:
    """Time the training of a dictionary on a store beside the same steps on tensors in memory."""
    width, size = (4, 48) if setting.tiny else (16, 768)
    rows, batch, steps = (2000, 256, 5) if setting.tiny else (400_000, 4096, 90)
    data = torch.randn(rows, size).bfloat16()
    with tempfile.TemporaryDirectory() as folder:
        th.harvest(nn.Identity(), data, ":return", to=folder, batch_size=rows // 10, progress=False)
        store = th.open(folder)
        memory = _InMemory(data.to(setting.device), batch)
        given: dict[str, Any] = {
            "width": width * size, "k": 32, "steps": steps, "batch_size": batch, "device": setting.device,
            "progress": False,
        }  # fmt: skip

        def from_store() -> None:
            th.recipes.dictionary(store, ":return", **given)

        def from_memory() -> None:
            th.recipes.dictionary(memory, ":return", **given)

        one, other = setting.best(from_memory, from_store)
    return {
        "width": width * size, "rows a second, memory": steps * batch / one,
        "rows a second, store": steps * batch / other, "share": one / other,
    }  # fmt: skip


class _InMemory:
    """A store whose rows are one tensor on the device."""

    def __init__(self, data: Tensor, batch: int) -> None:
        self._data, self._batch = data, batch

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, _point: str) -> Tensor:
        return self._data

    def loader(self, *_points: str, batch_size: int, seed: int, drop_last: bool) -> _InMemoryLoader:
        """Return batches in a random order."""
        del seed, drop_last
        return _InMemoryLoader(self._data, batch_size)


class _InMemoryLoader:
    def __init__(self, data: Tensor, batch: int) -> None:
        self._data, self._batch = data, batch

    def __len__(self) -> int:
        return len(self._data) // self._batch

    def __iter__(self) -> Any:
        order = torch.randperm(len(self._data), device=self._data.device)
        for place in range(len(self)):
            yield self._data[order[place * self._batch : (place + 1) * self._batch]]


PARTS: Mapping[str, Callable[[Setting], dict[str, Any]]] = {
    "scores": scores, "exact": exact, "splice": splice, "training": training,
}  # fmt: skip
GOALS = {"scores": "at most 1.15", "exact": "40 times", "splice": "at most 1.05", "training": "at least 0.9"}


def main(*, tiny: bool, out: Path | None) -> None:
    """Run all parts, print their figures, and write them."""
    setting, result = Setting(tiny=tiny), {"torch": torch.__version__}
    for name, part in PARTS.items():
        result[name] = part(setting)  # type: ignore[assignment]
        print(name, f"(goal: {GOALS[name]})", json.dumps(result[name], indent=1), flush=True)
    if out is not None:
        out.write_text(json.dumps(result, indent=1), encoding="utf-8")


def page(path: Path) -> None:
    """Write the figures of a run into the page, on any machine."""
    from benchmarks.report import write_section

    result = json.loads(path.read_text(encoding="utf-8"))
    lines = [f"## Circuits and dictionaries on a GPU\n\nOne H200, torch {result['torch']}, GPT-2 small in bf16.\n"]
    lines += ["| work | beside | figure | goal |", "|---|---|--:|--:|"]
    for name, entry in result["scores"].items():
        beside = "two forward passes and one backward pass"
        lines.append(f"| EAP of all edges, {name} | {beside} | {entry['times']:.2f} times | 1.15 |")
    entry, spliced, trained = result["exact"], result["splice"], result["training"]
    lines.append(f"| exact scores of {entry['edges']:,} edges | raw hooks | {entry['faster']:.1f} times faster | 40 |")
    lines.append(f"| splice with an error term | model and dictionary by hand | {spliced['times']:.2f} times | 1.05 |")
    lines.append(
        f"| training a dictionary of width {trained['width']:,} on a store | tensors in memory | "
        f"{trained['share']:.2f} of the speed | 0.9 |"
    )
    write_section("gpu_circuits", "\n".join(lines))


if __name__ == "__main__":
    paths = [Path(each) for each in sys.argv[1:] if not each.startswith("--")]
    if "--page" in sys.argv:
        page(paths[0])
    else:
        main(tiny="--tiny" in sys.argv, out=paths[0] if paths else None)
