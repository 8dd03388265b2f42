"""Circuits: the edges between the parts of a model that carry a behaviour.

Every part of a residual model (embedding, attention heads, MLPs) adds its output to the stream, and reads from it what
earlier parts have written. An edge is what one part writes as it arrives at another. ``edges`` scores all of them,
``Edges.prune`` keeps the best as a :class:`Circuit`, and ``Circuit.run`` runs the model with everything else patched.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

import tenterhook as th
from tenterhook._text import counted, printable
from tenterhook.recipes._circuit_figure import curve_figure, graph_figure
from tenterhook.recipes._circuit_run import patched_run
from tenterhook.recipes._circuit_task import (
    Task,
    check_batch,
    check_scores,
    check_threshold,
    chosen,
    connected,
    flat,
    graph_for,
    needed,
    other_values,
    pairs_of,
    place_of,
)
from tenterhook.recipes._edge_products import differences
from tenterhook.recipes._edge_runs import Runs, recorded
from tenterhook.recipes._edge_scores import exact_scores, gradient_scores
from tenterhook.recipes._figures import Pictured
from tenterhook.recipes._greedy import removed
from tenterhook.recipes._inputs import eager, steady
from tenterhook.recipes._residual_find import Nodes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Circuit", "Curve", "Edges", "edges", "greedy", "load"]

Method = Literal["eap", "eap-ig", "exact"]
Mode = Literal["denoise", "noise"]
Patch = Literal["corrupt", "mean", "zero"]
METHODS = ("eap", "eap-ig", "exact")
SHOWN = 8


@dataclass(frozen=True)
class Edges(Pictured):
    """The scores of all edges.

    ``scores``: ``[example, sender, receiver]``, or ``[1, sender, receiver]`` if the metric is one number for all
    examples; zero where there is no edge. ``exists``: which edges there are.
    ``how``: how exact scores were computed. ``feeds``: for each receiver, the senders whose output depends on it.
    """

    senders: tuple[str, ...]
    receivers: tuple[str, ...]
    scores: Tensor
    exists: Tensor
    method: Method
    mode: Mode
    how: tuple[str, ...] = ()
    task: Task | None = field(default=None, repr=False, compare=False)
    feeds: tuple[tuple[str, ...], ...] | None = field(default=None, repr=False)

    @property
    def values(self) -> Tensor:
        """The scores averaged over the examples, ``[sender, receiver]``."""
        return self.scores.mean(0)

    @property
    def error(self) -> Tensor:
        """The standard error of the average; NaN for a single example."""
        count = len(self.scores)
        return self.scores.std(0) / math.sqrt(count) if count > 1 else torch.full_like(self.values, math.nan)

    def score(self, sender: str, receiver: str) -> float:
        """Return the score of one edge, averaged over the examples."""
        place = place_of(self.senders, sender, "sender"), place_of(self.receivers, receiver, "receiver")
        if not bool(self.exists[place]):
            raise th.RecipeError(f"there is no edge from {sender!r} to {receiver!r}: the receiver comes first")
        return float(self.values[place])

    @property
    def table(self) -> list[tuple[str, str, float, float]]:
        """All edges, the largest absolute score first: sender, receiver, score, standard error."""
        order = self._order().tolist()
        width, values, errors = len(self.receivers), self.values.flatten(), self.error.flatten()
        return [
            (self.senders[i // width], self.receivers[i % width], float(values[i]), float(errors[i])) for i in order
        ]

    def _order(self) -> Tensor:
        size = self.values.abs().masked_fill(~self.exists.to(self.values.device), -1.0).flatten()
        return size.argsort(descending=True, stable=True)[: int(self.exists.sum())]

    def prune(self, k: int | None = None, *, threshold: float | None = None) -> Circuit:
        """Return the circuit of the ``k`` edges with the largest absolute scores, or of those above a threshold.

        Edges that cannot carry anything from the input to the output are left out.
        """
        if (k is None) == (threshold is None):
            raise th.RecipeError("prune() takes k= or threshold=, one of them")
        if threshold is not None:
            check_threshold(threshold)
            kept = (self.values.abs() >= threshold).cpu() & self.exists
        else:
            if type(k) is not int or not 0 <= k <= int(self.exists.sum()):
                raise th.RecipeError(f"k= is a number of edges from 0 to {int(self.exists.sum())}; got {k!r:.40}")
            flat = torch.zeros(self.exists.numel(), dtype=torch.bool)
            flat[self._order()[:k].cpu()] = True
            kept = flat.reshape(self.exists.shape)
        return self._circuit(kept)

    def _circuit(self, kept: Tensor) -> Circuit:
        carries = kept if self.feeds is None else connected(self.senders, self.feeds, kept)
        return Circuit(self.senders, self.receivers, carries, self.values.cpu(), self.task)

    def curve(self, ks: Iterable[int], *, random: int = 3, seed: int = 0, patch: Patch = "corrupt") -> Curve:
        """Measure the faithfulness of circuits of several sizes, beside random circuits with as many edges.

        Args:
            ks: the numbers of edges.
            random: the number of random circuits of each size.
            seed: the seed of the random circuits.
            patch: as for :meth:`Circuit.run`.
        """
        sizes = tuple(ks)
        generator = torch.Generator().manual_seed(seed)
        found, others = [], []
        places = self.exists.flatten().nonzero().flatten()
        for k in sizes:
            found.append(self.prune(k).faithfulness(patch=patch))
            row = []
            for _ in range(random):
                flat = torch.zeros(self.exists.numel(), dtype=torch.bool)
                flat[places[torch.randperm(len(places), generator=generator)[:k]]] = True
                row.append(self._circuit(flat.reshape(self.exists.shape)).faithfulness(patch=patch))
            others.append(row)
        return Curve(sizes, torch.tensor(found), torch.tensor(others))

    def show(self, *, title: str = "", most: int = 60) -> Figure:
        """Return a matplotlib figure of the graph with the ``most`` largest edges."""
        return self.prune(min(most, int(self.exists.sum()))).draw(title=title or f"edges ({self.method})")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the scores as JSON, without the model. :func:`load` reads them."""
        _write(path, {
            "kind": "edges", "senders": self.senders, "receivers": self.receivers, "scores": self.scores.tolist(),
            "dtype": str(self.scores.dtype), "exists": self.exists.tolist(), "method": self.method, "mode": self.mode,
            "feeds": self.feeds,
        })  # fmt: skip

    def __repr__(self) -> str:
        lines = [f"{counted(int(self.exists.sum()), 'edge')} ({self.method}, {self.mode}), "]
        lines[0] += counted(len(self.scores), "example")
        for sender, receiver, score, _ in self.table[:SHOWN]:
            lines.append(f"  {printable(sender):<12} → {printable(receiver):<14} {score:+.4g}")
        more = int(self.exists.sum()) - SHOWN
        return "\n".join([*lines, *([f"  … and {more} more"] if more > 0 else [])])


@dataclass(frozen=True)
class Circuit(Pictured):
    """Some edges of a model. ``kept`` is ``[sender, receiver]``, True for the edges of the circuit."""

    senders: tuple[str, ...]
    receivers: tuple[str, ...]
    kept: Tensor
    values: Tensor
    task: Task | None = field(default=None, repr=False, compare=False)

    @property
    def edges(self) -> list[tuple[str, str]]:
        """The edges, as pairs of sender and receiver."""
        return [(self.senders[i], self.receivers[j]) for i, j in self.kept.nonzero().tolist()]

    def __len__(self) -> int:
        return int(self.kept.sum())

    def run(self, inputs: Any = None, *, patch: Patch | Tensor | Any = "corrupt", corrupt: Any = None) -> Any:
        """Run the model with every edge outside the circuit patched, and return its output.

        Args:
            inputs: a clean input. Without one, the first that the edges were scored with.
            patch: the values on the other edges: ``"corrupt"``, those of the corrupt input; ``"mean"``, the mean of
                each part over the examples of the corrupt input; ``"zero"``, nothing.
            corrupt: the corrupt input that belongs to ``inputs``, with the same shapes.

        Returns:
            The output of the model.
        """
        return self._run(inputs, patch, corrupt, ~self.kept & self._exists())

    def _exists(self) -> Tensor:
        return needed(self.task).graph.exists

    def _run(self, inputs: Any, patch: Any, corrupt: Any, patched: Tensor) -> Any:
        task = needed(self.task)
        if inputs is None and corrupt is None:
            inputs, corrupt = task.pairs[0]
        elif inputs is None or corrupt is None:
            missing = "corrupt=, the input that belongs to the clean one" if corrupt is None else "the clean inputs too"
            raise th.RecipeError(f"run() needs {missing}")
        [(inputs, corrupt)] = pairs_of(inputs, corrupt, several=False)
        return patched_run(task.model, task.graph, inputs, patched, other_values(task, corrupt, patch))

    def faithfulness(self, *, patch: Patch = "corrupt") -> float:
        """Return how much of the metric the circuit keeps: 1 is that of the clean input, 0 of the corrupt one."""
        return self._share(~self.kept & self._exists(), patch)

    def completeness(self, *, patch: Patch = "corrupt") -> float:
        """Return how much of the metric the model keeps without the circuit: the edges of the circuit are patched.

        Near 0, nothing outside the circuit carries the behaviour.
        """
        return self._share(self.kept, patch)

    def _share(self, patched: Tensor, patch: Patch) -> float:
        task = needed(self.task)
        clean, corrupt = task.ends()
        found = [flat(task, self._run(one, patch, other, patched), one) for one, other in task.pairs]
        gap = (clean - corrupt).mean()
        if float(gap) == 0 or not math.isfinite(gap):
            what = "the same" if float(gap) == 0 else "not finite"
            raise th.RecipeError(f"the metric is {what} for the clean and the corrupt inputs; choose other pairs")
        return float((torch.cat(found) - corrupt).mean() / gap)

    def draw(self, *, title: str = "") -> Figure:
        """Return a matplotlib figure: the nodes in layers, from the input at the bottom to the output at the top."""
        weights = [float(self.values[i, j]) for i, j in self.kept.nonzero().tolist()]
        return graph_figure(
            self.senders, self.receivers, self.edges, weights, title=title or counted(len(self), "edge")
        )

    def show(self, *, title: str = "") -> Figure:
        """Return the figure of :meth:`draw`. A notebook shows it as the value of a cell."""
        return self.draw(title=title)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the circuit as JSON, without the model. :func:`load` reads it."""
        _write(path, {
            "kind": "circuit", "senders": self.senders, "receivers": self.receivers, "kept": self.kept.tolist(),
            "values": self.values.tolist(),
        })  # fmt: skip

    def __repr__(self) -> str:
        lines = [f"circuit of {counted(len(self), 'edge')}"]
        lines += [f"  {printable(one):<12} → {printable(other)}" for one, other in self.edges[:SHOWN]]
        return "\n".join([*lines, *([f"  … and {len(self) - SHOWN} more"] if len(self) > SHOWN else [])])


@dataclass(frozen=True)
class Curve(Pictured):
    """Faithfulness over the number of edges: of the circuits, and ``random`` ``[size, circuit]`` of random ones."""

    ks: tuple[int, ...]
    faithfulness: Tensor
    random: Tensor

    def show(self, *, title: str = "") -> Figure:
        """Return a matplotlib figure of the curve."""
        return curve_figure(self.ks, self.faithfulness, self.random, title=title or "faithfulness")

    def __repr__(self) -> str:
        lines = [f"{'edges':>7}  circuit  random"]
        for k, own, others in zip(self.ks, self.faithfulness.tolist(), self.random, strict=True):
            mean = f"{float(others.mean()):6.3f}" if others.numel() else ""
            lines.append(f"{k:>7}  {own:7.3f}  {mean}")
        return "\n".join(lines)


def edges(  # noqa: PLR0913
    model: nn.Module,
    clean: Any,
    corrupt: Any,
    *,
    metric: Callable[[Any], Any],
    method: Method = "eap",
    nodes: Nodes = "heads",
    steps: int = 8,
    mode: Mode = "denoise",
    only: Iterable[tuple[Any, ...]] | None = None,
    batch: int | None = None,
    progress: bool | None = None,
) -> Edges:
    """Score every edge of a model: how much the metric changes if the edge carries its value of the other input.

    >>> import torch, tenterhook as th
    >>> class Model(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.embed, self.a, self.b, self.head = (torch.nn.Linear(4, 4) for _ in range(4))
    ...
    ...     def forward(self, x):
    ...         x = self.embed(x)
    ...         x = x + self.a(x)
    ...         return self.head(x + self.b(x))
    >>> nodes = {"embed": (None, "embed"), "a": ("a:in", "a"), "b": ("b:in", "b"), "out": ("head:in", None)}
    >>> found = th.recipes.circuit.edges(
    ...     Model(), torch.randn(5, 4), torch.randn(5, 4), metric=lambda out: out[:, 0], nodes=nodes
    ... )
    >>> found.values.shape, len(found.prune(6))
    (torch.Size([3, 3]), 6)

    Args:
        model: any ``nn.Module`` in which parts add to a stream.
        clean: an input, a tensor, a tuple of arguments or a dict of keyword arguments, whose rows are examples; or a
            list of inputs.
        corrupt: the other input, or a list of as many. Shapes are those of the clean one.
        metric: a function from the model's output to one number for each example, or to one number.
        method: ``"eap"``, the gradient at each receiver times the change of each sender: two forward passes and one
            backward pass; ``"eap-ig"``, the same with the gradient averaged over ``steps`` inputs between the two;
            ``"exact"``, a patch of each edge by itself, in batches.
        nodes: ``"heads"`` (the embedding, each head with separate edges into its query, key and value, each MLP, the
            logits) or ``"layers"`` (with whole attentions), for models of transformers; or a dict of name to ``(reads,
            writes)``: the point where a node reads the stream and the point whose value it adds, or None.
        steps: the number of steps of ``"eap-ig"``.
        mode: ``"denoise"`` puts values of the clean input into the corrupt run; ``"noise"`` does the reverse.
        only: for ``"exact"``, the edges to patch: pairs of sender and receiver, or rows of ``Edges.table``.
        batch: the number of patches at once, for ``"exact"``; see ``th.sweep``.
        progress: whether ``"exact"`` shows a progress bar.

    Returns:
        The :class:`Edges`.

    Raises:
        RecipeError: the inputs differ in shape, no gradient reaches the metric, or the stream at a node is not the sum
            of what the nodes before it write.
    """
    if method not in METHODS:
        raise th.RecipeError(f"method= is one of {', '.join(map(repr, METHODS))}; got {method!r:.40}")
    if mode not in ("denoise", "noise"):
        raise th.RecipeError(f"mode= is 'denoise' or 'noise'; got {mode!r:.40}")
    if type(steps) is not int or steps < 1:
        raise th.RecipeError(f"steps= is a positive int; got {steps!r:.40}")
    if not callable(metric):
        raise th.RecipeError(f"metric= is a function of the model's output; got {metric!r:.40}")
    check_batch(batch)
    modules = list(model.modules())
    pairs = pairs_of(clean, corrupt)
    ways = [pair if mode == "denoise" else pair[::-1] for pair in pairs]
    with _quiet(model, modules):
        task = Task(model, pairs, metric, graph_for(model, pairs[0], nodes, modules))
        wanted = task.graph.exists if only is None else chosen(task.graph, only, method)
        if method == "exact":
            scores, how = _exact(task, ways, wanted, batch, progress=progress)
        else:
            parts, how = steps if method == "eap-ig" else 0, ()
            with Runs(model, task.graph) as runs:
                found = [gradient_scores(runs, task.graph, source, base, metric, parts) for source, base in ways]
            scores = torch.cat(found)
    names = tuple(sender.name for sender in task.graph.senders)
    heard = tuple(receiver.name for receiver in task.graph.receivers)
    check_scores(scores, names, heard)
    return Edges(names, heard, scores, wanted, method, mode, how, task, _feeds(task))


@contextlib.contextmanager
def _quiet(model: nn.Module, modules: list[nn.Module]) -> Iterator[None]:
    """Run without compiled code, and outside inference mode. Refuse random runs of a model in training mode."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(eager())
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(mode=False))
        if any([module.training for module in modules]):  # noqa: C419  A list is faster; there may be thousands.
            stack.enter_context(steady(model))
        yield


def _exact(
    task: Task, ways: Sequence[tuple[Any, Any]], wanted: Tensor, batch: int | None, *, progress: bool | None
) -> tuple[Tensor, tuple[str, ...]]:
    found: list[Tensor] = []
    how: tuple[str, ...] = ()
    for source, base in ways:
        ends = [recorded(task.model, task.graph, given, task.metric)[0] for given in (source, base)]
        scores, how = exact_scores(
            task.model, task.graph, base, differences(task.graph, *ends), task.metric,
            wanted=wanted, batch=batch, progress=progress,
        )  # fmt: skip
        found.append(scores)
    return torch.cat(found), how


def _feeds(task: Task) -> tuple[tuple[str, ...], ...]:
    return tuple(receiver.feeds for receiver in task.graph.receivers)


def greedy(
    model: nn.Module,
    clean: Any,
    corrupt: Any,
    *,
    metric: Callable[[Any], Any],
    threshold: float,
    nodes: Nodes = "heads",
    batch: int | None = None,
) -> Circuit:
    """Remove edges one after the other, from the output to the input, as long as the metric changes little (ACDC).

    Each edge is patched in addition to those that were removed before it, with the value of the corrupt run. If the
    metric, averaged over the examples, then changes by less than ``threshold``, the edge stays removed. Edges of one
    receiver run as one batch, up to the first that must stay; the result is that of single runs.

    Args:
        model: as for :func:`edges`.
        clean: an input whose rows are examples.
        corrupt: the other input, with the same shapes.
        metric: as for :func:`edges`; it need not be differentiable.
        threshold: the largest change of the metric that removes an edge.
        nodes: as for :func:`edges`.
        batch: the number of patches at once; see ``th.sweep``.

    Returns:
        The :class:`Circuit` of the edges that are left.
    """
    check_threshold(threshold)
    check_batch(batch)
    [pair] = pairs_of(clean, corrupt, several=False)
    with _quiet(model, list(model.modules())):
        task = Task(model, (pair,), metric, graph_for(model, pair, nodes))
        patched = removed(task, threshold, batch)
    names = tuple(sender.name for sender in task.graph.senders)
    heard = tuple(receiver.name for receiver in task.graph.receivers)
    kept = connected(names, _feeds(task), ~patched & task.graph.exists)
    return Circuit(names, heard, kept, kept.float(), task)


def load(path: str | os.PathLike[str]) -> Edges | Circuit:
    """Read edges or a circuit that ``save`` wrote. They have no model: they can be read, pruned and drawn, not run."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
        return _read(found)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError, RecursionError) as error:
        raise th.RecipeError(f"{path} holds no edges and no circuit: {type(error).__name__}: {error}") from error


def _read(found: Any) -> Edges | Circuit:
    """Return what a file describes. Raise ValueError, or another error of a conversion, if it is no such file."""
    senders, receivers = (_names(found[part]) for part in ("senders", "receivers"))
    shape = len(senders), len(receivers)
    if found["kind"] == "circuit":
        kept, values = torch.tensor(found["kept"]), torch.tensor(found["values"])
        _check_shapes({"kept": kept.shape, "values": values.shape}, shape)
        return Circuit(senders, receivers, _booleans(kept), values)
    if found["kind"] != "edges" or found["method"] not in METHODS or found["mode"] not in ("denoise", "noise"):
        raise ValueError("its kind, method or mode is not known")
    exists = torch.tensor(found["exists"])
    scores = torch.tensor(found["scores"], dtype=getattr(torch, found["dtype"].removeprefix("torch.")))
    _check_shapes({"exists": exists.shape, "scores": scores.shape[1:]}, shape)
    feeds = found.get("feeds")  # Files of earlier versions have none.
    feeds = None if feeds is None else tuple(map(_names, feeds))
    if feeds is not None and (len(feeds) != len(receivers) or not set().union(*feeds) <= set(senders)):
        raise ValueError("its feeds are not those of its receivers")
    return Edges(senders, receivers, scores, _booleans(exists), found["method"], found["mode"], feeds=feeds)


def _names(given: Any) -> tuple[str, ...]:
    if not isinstance(given, list) or not all(isinstance(each, str) for each in given):
        raise ValueError("its names are not texts")
    return tuple(given)


def _booleans(given: Tensor) -> Tensor:
    if given.dtype != torch.bool:
        raise ValueError("its edges are not true or false")
    return given


def _check_shapes(found: dict[str, Sequence[int]], wanted: tuple[int, int]) -> None:
    for name, shape in found.items():
        if tuple(shape) != wanted:
            raise ValueError(f"{name} has the shape {list(shape)} for {wanted[0]} senders and {wanted[1]} receivers")


def _write(path: str | os.PathLike[str], content: dict[str, Any]) -> None:
    target = Path(path)
    part = target.with_name(f".{target.name}.part")
    part.write_text(json.dumps(content) + "\n", encoding="utf-8")
    part.replace(target)
