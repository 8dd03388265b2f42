"""The task of a circuit: the model, its graph, pairs of inputs and the metric; and the checks of the arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import tenterhook as th
from tenterhook.recipes._circuit_run import patched_run
from tenterhook.recipes._edge_runs import measured, recorded
from tenterhook.recipes._inputs import arguments, floats, normal, tensors_of
from tenterhook.recipes._residual import TOLERANCE, Graph, Sender
from tenterhook.recipes._residual_find import Nodes, graph_of

__all__ = [
    "Task", "check_batch", "check_scores", "check_threshold", "chosen", "connected", "flat", "graph_for", "needed",
    "other_values", "pairs_of", "place_of",
]  # fmt: skip

OUTSIDE = (
    "with every edge patched, the run of the clean input does not give the output of the corrupt one: the input "
    "reaches the output by a way that is no edge, for instance through cross-attention. Give the nodes: nodes={...}."
)
NOT_FINITE = (
    "the {what} is not finite, so edges have no score: {detail}. Look for NaN or inf in the inputs, the metric and the "
    "model: th.watch(model) names the first place."
)
OTHER_LENGTHS = (
    "the attention masks of the pair differ: row {row} has {one} tokens in the clean input and {two} in the corrupt "
    "one. An edge puts values of one run into the other, position by position.\n"
    "Choose prompts with the same number of tokens."
)


@dataclass(frozen=True)
class Task:
    """The two inputs and the metric for which edges were scored."""

    model: nn.Module
    pairs: tuple[tuple[Any, Any], ...]
    metric: Callable[[Any], Any]
    graph: Graph

    def ends(self) -> tuple[Tensor, Tensor]:
        """Return the metric of the clean and of the corrupt inputs, one number for each example."""
        found = [[_numbers(self, given) for given in pair] for pair in self.pairs]
        return torch.cat([one for one, _ in found]), torch.cat([other for _, other in found])


def _numbers(task: Task, given: Any) -> Tensor:
    args, kwargs = arguments(given)
    with torch.no_grad():
        return flat(task, task.model(*args, **kwargs), given)


def flat(task: Task, output: Any, given: Any) -> Tensor:
    return measured(task.metric, output, _examples(given)).detach().reshape(-1)


def _examples(given: Any) -> int:
    args, kwargs = arguments(given)
    return next((tensor.shape[0] for tensor in tensors_of((args, kwargs)) if tensor.dim()), 1)


def graph_for(model: nn.Module, pair: tuple[Any, Any], nodes: Nodes, modules: list[nn.Module] | None = None) -> Graph:
    """Return the graph of a model. Its edges must carry everything: with all of them patched, one run is the other."""

    def check(graph: Graph) -> None:
        other = recorded(model, graph, pair[1], lambda _output: 0.0)[0]
        patched = patched_run(model, graph, pair[0], graph.exists, lambda sender: sender.written(other[sender.point]))
        with torch.no_grad():
            ends = [model(*args, **kwargs) for args, kwargs in map(arguments, pair)]
        found, one, two = (next(floats(output)).float() for output in (patched, *ends))
        if not bool((one + two).isfinite().all()):
            raise th.RecipeError(NOT_FINITE.format(what="output of the model", detail=_first_bad(one + two)))
        tolerance = TOLERANCE.get(next((each.dtype for each in model.parameters()), torch.float32), 1e-1)
        if not float((found - two).norm()) <= tolerance * float((one - two).norm() + 0.05 * two.norm()):
            raise th.RecipeError(OUTSIDE)

    return graph_of(model, list(model.modules()) if modules is None else modules, pair, nodes, check)


def _first_bad(value: Tensor) -> str:
    place = value.isfinite().logical_not().nonzero()[0].tolist()
    return f"{value[tuple(place)].item()} at {place}" if place else str(value.item())


def check_scores(scores: Tensor, senders: Sequence[str], receivers: Sequence[str]) -> None:
    """Raise if a score of an edge is not finite."""
    bad = scores.isfinite().logical_not()
    if bool(bad.any()):
        example, one, other = bad.nonzero()[0].tolist()
        detail = f"that of {senders[one]!r} → {receivers[other]!r} is {scores[example, one, other].item()}"
        raise th.RecipeError(NOT_FINITE.format(what="score of an edge", detail=f"{detail} for example {example}"))


def connected(senders: Sequence[str], feeds_of: Sequence[Sequence[str]], kept: Tensor) -> Tensor:
    """Return the edges that can carry something: others reach their sender, and others leave their receiver.

    ``feeds_of``: for each receiver, the senders whose output depends on it.
    """
    kept, last = kept.clone(), -1
    places = {name: place for place, name in enumerate(senders)}
    feeds = [[places[name] for name in each] for each in feeds_of]
    fed = {place for each in feeds for place in each}
    while (count := int(kept.sum())) != last:
        last = count
        for place, outs in enumerate(feeds):
            if outs and not bool(kept[outs].any()):
                kept[:, place] = False
        heard = {sender for place, outs in enumerate(feeds) if bool(kept[:, place].any()) for sender in outs}
        for place in fed - heard:
            kept[place] = False
    return kept


def other_values(task: Task, corrupt: Any, patch: Any) -> Callable[[Sender], Tensor]:
    """Return the function from a sender to the value on its patched edges."""
    if patch not in ("corrupt", "mean", "zero"):
        raise th.RecipeError(f"patch= is 'corrupt', 'mean' or 'zero'; got {patch!r:.40}")
    values = recorded(task.model, task.graph, corrupt, lambda _output: 0.0)[0]

    def other(sender: Sender) -> Tensor:
        written = sender.written(values[sender.point])
        if patch == "zero":
            return torch.zeros_like(written)
        return written.mean(0, keepdim=True).expand_as(written) if patch == "mean" else written

    return other


def pairs_of(clean: Any, corrupt: Any, *, several: bool = True) -> tuple[tuple[Any, Any], ...]:
    """Return the pairs of inputs, after a comparison of their shapes."""
    clean, corrupt = (list(each) if isinstance(each, Iterator) else each for each in (clean, corrupt))
    lists = isinstance(clean, list), isinstance(corrupt, list)
    if any(lists) and not (several and all(lists) and clean and len(clean) == len(corrupt)):
        raise th.RecipeError(
            "give as many clean inputs as corrupt ones, in two lists, or one of each" if several
            else "one clean and one corrupt input are needed; put the examples into rows"
        )  # fmt: skip
    pairs = tuple(zip(clean, corrupt, strict=True)) if all(lists) else ((clean, corrupt),)
    for pair in pairs:
        _check_pair(*pair)
    with torch.inference_mode(mode=False):
        return tuple((normal(one), normal(other)) for one, other in pairs)


def _check_pair(one: Any, other: Any) -> None:
    shapes = [[list(tensor.shape) for tensor in tensors_of(arguments(given))] for given in (one, other)]
    if shapes[0] != shapes[1]:
        raise th.RecipeError(
            f"an edge puts values of one run into the other, so both inputs need the same shapes: clean has "
            f"{shapes[0]}, corrupt has {shapes[1]}.\nChoose prompts with the same number of tokens."
        )
    if any(0 in shape for shape in shapes[0]):
        raise th.RecipeError(f"the inputs have no examples: their shapes are {shapes[0]}")
    masks = [given.get("attention_mask") for given in (one, other) if isinstance(given, Mapping)]
    if len(masks) == 2 and all(isinstance(mask, Tensor) and mask.dim() == 2 for mask in masks):  # noqa: PLR2004
        for row, (mine, its) in enumerate(zip(*masks, strict=True)):
            if not torch.equal(mine, its):
                counts = {"one": int((mine != 0).sum()), "two": int((its != 0).sum())}
                raise th.RecipeError(OTHER_LENGTHS.format(row=row, **counts))


def check_threshold(threshold: Any) -> None:
    """Raise if a threshold is no number from 0."""
    if isinstance(threshold, bool) or not isinstance(threshold, (int, float)) or not threshold >= 0:
        raise th.RecipeError(f"threshold= is a number from 0; got {threshold!r:.40}")


def check_batch(batch: Any) -> None:
    """Raise if a number of patches is no positive integer."""
    if batch is not None and (type(batch) is not int or batch < 1):
        raise th.RecipeError(f"batch= is a positive integer, or None; got {batch!r:.40}")


def chosen(graph: Graph, only: Iterable[tuple[Any, ...]], method: str) -> Tensor:
    """Return the edges of a list, ``[sender, receiver]``."""
    if method != "exact":
        raise th.RecipeError("only= is for method='exact'; the others score all edges at once")
    senders, receivers = ([each.name for each in part] for part in (graph.senders, graph.receivers))
    wanted = torch.zeros_like(graph.exists)
    for one, other, *_ in only:
        place = place_of(senders, one, "sender"), place_of(receivers, other, "receiver")
        if not bool(graph.exists[place]):
            raise th.RecipeError(f"there is no edge from {one!r} to {other!r}: the receiver comes first")
        wanted[place] = True
    return wanted


def place_of(names: Sequence[str], name: str, what: str) -> int:
    if name not in names:
        shown = ", ".join([each for each in names if each.startswith(f"{name}.")] or names[:6])
        raise th.RecipeError(f"there is no {what} {name!r}; there are {shown}, … (all: .{what}s)")
    return names.index(name)


def needed(task: Task | None) -> Task:
    if task is None:
        raise th.RecipeError("this was loaded from a file, which has no model: call circuit.edges() again to run it")
    return task
