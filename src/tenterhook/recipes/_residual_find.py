"""The search for the graph of a residual model: in the layers of a transformer, or from nodes that the caller names."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

import tenterhook as th
from tenterhook.recipes._inputs import arguments
from tenterhook.recipes._residual import TOLERANCE, Graph, Receiver, Sender, first_tensor, stream_tensor
from tenterhook.recipes._residual_check import checked, wide
from tenterhook.recipes._residual_heads import Layout, cores, layout_of

__all__ = ["Nodes", "graph_of"]

Nodes = Literal["heads", "layers"] | Mapping[str, tuple[str | None, str | None]]

FEW = 16  # modules in a layer that may be norms
NO_LAYERS = (
    "the layers of {kind} are not known. Give the nodes: nodes={{'embed': (None, 'embed'), 'mlp': ('mlp:in', 'mlp'), "
    "'out': ('head:in', None)}}, each with the point where it reads the stream and the point whose value it adds."
)
NORM_AFTER_SUM = (
    "the output of {layer!r} is that of {norm!r}: this model normalises after each addition (as BERT does), so its "
    "stream is not the sum of what its parts write. Each norm rescales what all earlier parts have written by a number "
    "that depends on all of them, and an edge from one part to another has no value of its own. Patch whole outputs "
    "instead: th.recipes.patching."
)
NO_HEADS = "the attention {attention!r} cannot be separated into heads: {why}. Use nodes='layers'."

_known: WeakKeyDictionary[nn.Module, dict[str, tuple[_State, Graph]]] = WeakKeyDictionary()


def graph_of(
    model: nn.Module, modules: list[nn.Module], pair: tuple[Any, Any], nodes: Nodes, check: Callable[[Graph], None]
) -> Graph:
    """Return the graph of a model, found and checked with two inputs.

    The graph of a transformer is found once, until the model changes. ``check`` raises if the graph is not that of the
    model.
    """
    clean, corrupt = pair
    given: Any = nodes
    if not isinstance(given, str):
        found = checked(model, _given(model, clean, given), clean, corrupt)
        check(found)
        return found
    if given not in ("heads", "layers"):
        raise th.RecipeError(f"nodes= is 'heads', 'layers' or a dict of nodes; got {given!r:.40}")
    known = _known.setdefault(model, {})
    if given not in known or not known[given][0].holds(modules):
        known.pop(given, None)
        found = checked(model, _transformer(model, clean, heads=given == "heads"), clean, corrupt)
        check(found)
        known[given] = _State(modules), found
    return known[given][1]


class _State:
    """The modules of a model, their numbers, and its parameters with their versions.

    If they change, its graph may change too: some layers multiply what they add to the stream by a number.
    """

    def __init__(self, modules: list[nn.Module]) -> None:
        self._modules = list(map(ref, modules))
        self._numbers = _numbers(modules)
        self._owned = [
            (ref(module), name, ref(each), _version(each))
            for module in modules for name, each in module.named_parameters(recurse=False)
        ]  # fmt: skip

    def holds(self, modules: list[nn.Module]) -> bool:
        """Return whether nothing has changed."""
        if [each() for each in self._modules] != modules or _numbers(modules) != self._numbers:
            return False
        for module, name, known, version in self._owned:
            now = getattr(module(), name, None)
            if now is not known() or _version(now) != version:
                return False
        return True


def _numbers(modules: list[nn.Module]) -> list[float]:
    return [value for module in modules for value in module.__dict__.values() if type(value) is float]


def _version(parameter: Any) -> int:
    return -1 if parameter.is_inference() else parameter._version


def _is_linear(module: nn.Module) -> bool:
    """Return whether a module may be a linear layer with a weight ``[out, in]``, or a Conv1D of transformers."""
    if not isinstance(module, nn.Linear):
        return type(module).__name__ == "Conv1D"
    weight = module.weight
    return weight.is_floating_point() and weight.shape == (module.out_features, module.in_features)


def _is_exact(module: nn.Module, given: Tensor, output: Tensor) -> bool:
    """Return whether a layer computes what its weight and bias say. A subclass may do more."""
    if type(module) is nn.Linear or not isinstance(module, nn.Linear):
        return True
    with torch.no_grad():
        plain = nn.functional.linear(given, module.weight, module.bias)
    gap = float((plain - output).norm() / output.norm().clamp_min(1e-30))
    return plain.shape == output.shape and gap <= TOLERANCE.get(output.dtype, 1e-1)


# -- transformers ------------------------------------------------------------------------------------------------------


def _transformer(model: nn.Module, given: Any, *, heads: bool) -> Graph:
    layers = _layers(model)
    inside = [path for layer in layers for path in _candidates(model, layer)]
    attentions = [_attention(model, layer) for layer in layers]
    wanted = [f"{path}{end}" for path in inside for end in ("", ":in")]
    parts = [_path(model, f"{layer}@{name}") for layer in layers for name in ("attn_out", "mlp_out")]
    wanted += [f"{path}{end}" for path in (*parts, *map(_mlp_input, parts)) for end in ("", ":in")]
    whole = [_whole_attention(model, *each) for each in zip(layers, attentions, strict=True)]
    wanted += [f"{path}:in" for path in whole]
    ends = _norms_after(model, layers)
    wanted += [*(f"{layer}@resid" for layer in layers), *(f"{norm}:in" for norm in ends)]
    wanted += [f"{path}@{name}" for path in attentions if path for name in "qkv"] if heads else []
    args, kwargs = arguments(given)
    with torch.no_grad(), th.record(model, *dict.fromkeys(wanted)) as tape:
        model(*args, **kwargs)
    found = _Builder(model, tape, heads=heads)
    found.refuse_norms_after_sums(layers)
    if heads and not all(attentions):
        own = {layer: path for layer, path, known in zip(layers, whole, attentions, strict=True) if not known}
        found.find_heads(own, given)
    embed = f"{layers[0]}@resid_pre"
    found.senders.append(Sender("embed", embed))
    for number, (layer, attention) in enumerate(zip(layers, attentions, strict=True)):
        found.layer(number, layer, attention)
    arrives = first_tensor(tape[f"{layers[-1]}@resid"])
    read = (f"{norm}:in" for norm in ends if _same(first_tensor(tape[f"{norm}:in"]), arrives))
    last = next(read, f"{layers[-1]}@resid")
    found.receivers.append(Receiver("logits", last, last, None, len(found.senders), ()))
    return Graph(tuple(found.senders), tuple(found.receivers), embed)


def _layers(model: nn.Module) -> list[str]:
    """Return the paths of the layers, whose outputs are the stream."""
    try:
        points = th.points(model, "**@mlp_out")
    except th.AddressError:
        raise th.RecipeError(NO_LAYERS.format(kind=type(model).__name__)) from None
    return [str(point).rpartition("@")[0] for point in points]


def _attention(model: nn.Module, layer: str) -> str:
    """Return the path of the attention of a layer, or an empty string if it has no heads that are known."""
    try:
        below = [str(point).rpartition("@")[0] for point in th.points(model, f"{layer}.**@z")]
    except th.AddressError:
        return ""
    if len(below) > 1:
        raise th.RecipeError(f"{layer!r} has {len(below)} attentions ({', '.join(below[:3])}); one is needed")
    return below[0]


def _whole_attention(model: nn.Module, layer: str, attention: str) -> str:
    """Return the path of the module that reads the input of a layer's attention."""
    if attention:
        return attention
    written = _path(model, f"{layer}@attn_out")
    above = written.rpartition(".")[0]
    return above if above != layer and _is_linear(model.get_submodule(written)) else written


def _candidates(model: nn.Module, layer: str) -> list[str]:
    """Return the modules of a layer that may be norms or projections."""
    inside = model.get_submodule(layer)
    return [
        f"{layer}.{name}" for name, module in inside.named_modules()
        if name and (_is_linear(module) or "norm" in type(module).__name__.lower())
    ]  # fmt: skip


class _Builder:
    """The nodes of a transformer, layer after layer."""

    def __init__(self, model: nn.Module, tape: th.Tape, *, heads: bool) -> None:
        self.model, self.tape, self.heads = model, tape, heads
        self.senders: list[Sender] = []
        self.receivers: list[Receiver] = []
        self._layouts: dict[str, Layout] = {}

    def find_heads(self, attentions: Mapping[str, str], given: Any) -> None:
        """Find the heads of attentions that compute them in code of their own. ``attentions``: by layer."""
        projections = [self._reading(attention) for attention in attentions.values()]
        results = [f"{_path(self.model, f'{layer}@attn_out')}:in" for layer in attentions]
        made = cores(self.model, given, projections, results)
        for (layer, attention), core in zip(attentions.items(), made, strict=True):
            layout = layout_of(*core)
            if isinstance(layout, str):
                raise th.RecipeError(NO_HEADS.format(attention=attention, why=layout))
            self._layouts[layer] = layout

    def _reading(self, attention: str) -> list[str]:
        """Return the linear layers that read the input of an attention."""
        arrives = stream_tensor(self.tape[f"{attention}:in"], attention)
        inside = (f"{attention}.{name}" for name, _ in self.model.get_submodule(attention).named_modules() if name)
        return [
            path for path in inside
            if _is_linear(module := self.model.get_submodule(path))
            and self._runs_once(path)
            and _same(given := stream_tensor(self.tape[f"{path}:in"], path), arrives)
            and _is_exact(module, given, stream_tensor(self.tape[path], path))
        ]  # fmt: skip

    def layer(self, number: int, layer: str, attention: str) -> None:
        """Add the attention and the MLP of a layer."""
        written, mlp = (_path(self.model, f"{layer}@{name}") for name in ("attn_out", "mlp_out"))
        before, first = len(self.senders), len(self.receivers)
        if self.heads:
            self._heads(number, layer, attention, written, before)
        else:
            name, reads = f"attn{number}", self._reader(layer, _whole_attention(self.model, layer, attention))
            self.senders.append(Sender(name, self._after(layer, written)))
            self.receivers.append(Receiver(name, *reads, before, (name,)))
        name, reads = f"mlp{number}", self._reader(layer, _mlp_input(mlp))
        stream = self.receivers[-1].stream
        start, middle, end = (first_tensor(self.tape[point]) for point in (stream, reads[0], f"{layer}@resid"))
        # Where attention and MLP are parallel, both read the same stream.
        alike = torch.equal(middle, start)
        self.receivers.append(Receiver(name, *reads, before if alike else len(self.senders), (name,)))
        self.senders.append(Sender(name, self._after(layer, mlp)))
        if not alike:
            self.senders[before:-1] = self._as_added(self.senders[before:-1], start, middle)
            self.senders[-1:] = self._as_added(self.senders[-1:], middle, end)
        if reads[0] != stream:
            self.receivers[first:] = map(_before_its_norm, self.receivers[first:])

    def _as_added(self, senders: list[Sender], before: Tensor, after: Tensor) -> list[Sender]:
        """Return the senders of one module with the scale with which its output is added to the stream.

        Some modules add the stream to their output by themselves. Their last linear layer is then what writes.
        """
        first = senders[0]
        if first.head is not None:
            end = first.point.removesuffix(":in")
            scale = _scale(stream_tensor(self.tape[end], end), before, after)
            return senders if scale is None else [replace(each, scale=scale) for each in senders]
        end = first.point
        inside = [path for path in self.tape if path.startswith(f"{end}.") and not path.endswith(":in")]
        linear = [path for path in inside if _is_linear(self.model.get_submodule(path))]
        for path in (end, *reversed(linear)):
            scale = _scale(stream_tensor(self.tape[path], path), before, after)
            if scale is not None:
                return [replace(first, point=path, scale=scale)]
        return senders

    def refuse_norms_after_sums(self, layers: Sequence[str]) -> None:
        """Raise if the output of a layer is that of a norm."""
        for layer in layers:
            end = first_tensor(self.tape[f"{layer}@resid"])
            for norm in self._norms(layer):
                value = stream_tensor(self.tape[norm], norm)
                if value.numel() == end.numel() and torch.equal(value.reshape(end.shape), end):
                    raise th.RecipeError(NORM_AFTER_SUM.format(layer=layer, norm=norm))

    def _heads(self, number: int, layer: str, attention: str, written: str, before: int) -> None:
        projection = self.model.get_submodule(written)
        given, made = (stream_tensor(self.tape[f"{written}{end}"], written) for end in (":in", ""))
        if (
            not _is_linear(projection)
            or not _is_exact(projection, given, made)
            or self._after(layer, written) != written
        ):
            why = f"{written} is no plain linear layer that writes to the stream"
            raise th.RecipeError(NO_HEADS.format(attention=attention, why=why))
        parts = self._layouts.get(layer) or self._projected(attention)
        counts = {part: len(channels) for part, (_, channels) in parts.items()}
        for part, (path, channels) in parts.items():
            projecting = self.model.get_submodule(path)
            stream, _, norm = self._reader(layer, path)
            share = counts["q"] // counts[part]  # The number of heads that share a key and a value.
            for head, own in enumerate(channels):
                feeds = tuple(f"attn{number}.{each}" for each in range(head * share, (head + 1) * share))
                name = f"attn{number}.{head}.{part}"
                self.receivers.append(Receiver(name, stream, path, norm, before, feeds, projecting, own))
        for head in range(counts["q"]):
            name = f"attn{number}.{head}"
            self.senders.append(Sender(name, f"{written}:in", head, counts["q"], projection))

    def _projected(self, attention: str) -> Layout:
        """Return the projections to q, k and v: the path of the module, and the channels of each head."""
        values = {name: self.tape[f"{attention}@{name}"] for name in "qkv"}
        reads = self._reading(attention)
        sizes = {part: (value.shape[2], value.shape[3]) for part, value in values.items()}
        if len(reads) == 1:
            out = stream_tensor(self.tape[reads[0]], reads[0])
            for layout in (_in_parts(sizes), _in_heads(sizes)):
                channels = list(itertools.chain(*layout.get("v", [])))
                fits = bool(channels) and max(channels) < out.shape[-1]
                if fits and _same(out[..., channels], values["v"].flatten(2)):
                    return {part: (reads[0], layout[part]) for part in "qkv"}
        by_letter = {path.rpartition(".")[2].lstrip("w_")[:1]: path for path in reads}
        if len(reads) == 3 and set(by_letter) == set("qkv"):  # noqa: PLR2004
            return {part: (by_letter[part], _in_parts({part: sizes[part]})[part]) for part in "qkv"}
        raise th.RecipeError(NO_HEADS.format(attention=attention, why="its projections to q, k and v are not known"))

    def _reader(self, layer: str, path: str) -> tuple[str, str, nn.Module | None]:
        """Return the point where a module reads the stream, the point of its own input, and the norm between them."""
        arrives = stream_tensor(self.tape[f"{path}:in"], path)
        for norm in self._norms(layer):
            if _same(stream_tensor(self.tape[norm], norm), arrives):
                return f"{norm}:in", f"{path}:in", self.model.get_submodule(norm)
        return f"{path}:in", f"{path}:in", None

    def _after(self, layer: str, written: str) -> str:
        """Return the point whose value is added to the stream: a norm may come after the module."""
        value = stream_tensor(self.tape[written], written)
        for norm in self._norms(layer):
            if _same(stream_tensor(self.tape[f"{norm}:in"], norm), value):
                return norm
        return written

    def _norms(self, layer: str) -> list[str]:
        below = _candidates(self.model, layer)
        norms = [path for path in below if not _is_linear(self.model.get_submodule(path))][:FEW]
        return [path for path in norms if self._runs_once(path)]

    def _runs_once(self, path: str) -> bool:
        """Return whether a module is called once. One that is called for q and for k reads no stream."""
        return len(self.tape.calls(path)) == 1


def _scale(value: Tensor, before: Tensor, after: Tensor) -> float | None:
    """Return the number with which a value is added to the stream, or None if it is not what was added."""
    if value.numel() != after.numel() or before.numel() != after.numel() or value.shape[-1] != after.shape[-1]:
        return None
    one, other = wide(value).flatten(), wide(after).flatten() - wide(before).flatten()
    scale = float(one @ other / (one @ one).clamp_min(1e-30))
    rest = float((other - scale * one).norm())
    if rest > 4 * torch.finfo(after.dtype).eps * float(wide(after).norm()):
        return None
    # A scale that differs from 1 by no more than the rounding of the sum is 1.
    return 1.0 if abs(scale - 1) * float(one.norm()) <= 4 * rest + 1e-30 else scale


def _before_its_norm(receiver: Receiver) -> Receiver:
    """Return a receiver that is patched before its norm, if it is a whole module: no other receiver reads that norm."""
    if receiver.projection is not None:
        return receiver
    return replace(receiver, consumer=receiver.stream, norm=None)


def _mlp_input(path: str) -> str:
    """Return the module that reads the input of an MLP. Some layers have its two parts beside each other."""
    return f"{path[:-1]}1" if path.endswith(".fc2") else path


def _norms_after(model: nn.Module, layers: Sequence[str]) -> list[str]:
    """Return the norms outside the layers."""
    inside = tuple(f"{layer}." for layer in layers)
    named = ((name, type(module).__name__.lower()) for name, module in model.named_modules())
    return [name for name, kind in named if "norm" in kind and not name.startswith(inside)]


def _path(model: nn.Module, address: str) -> str:
    return th.points(model, address)[0].path


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one, other)


def _in_parts(sizes: Mapping[str, tuple[int, int]]) -> dict[str, list[tuple[int, ...]]]:
    """Return the channels of each head if all heads of q come first, then those of k and v."""
    found, start = {}, 0
    for part, (heads, size) in sizes.items():
        found[part] = [tuple(range(start + head * size, start + (head + 1) * size)) for head in range(heads)]
        start += heads * size
    return found


def _in_heads(sizes: Mapping[str, tuple[int, int]]) -> dict[str, list[tuple[int, ...]]]:
    """Return the channels of each head if q, k and v of a head are adjacent; empty if the heads are shared."""
    if len(set(sizes.values())) > 1:
        return {}
    heads, size = sizes["q"]
    starts = {part: place * size for place, part in enumerate("qkv")}
    return {
        part: [tuple(range(3 * size * head + start, 3 * size * head + start + size)) for head in range(heads)]
        for part, start in starts.items()
    }


# -- other models ------------------------------------------------------------------------------------------------------


def _given(model: nn.Module, inputs: Any, nodes: Any) -> Graph:
    """Return the graph of nodes that the caller names, in the order in which they run."""
    if not isinstance(nodes, Mapping) or not all(isinstance(each, tuple) and len(each) == 2 for each in nodes.values()):  # noqa: PLR2004
        raise th.RecipeError(f"nodes= is a dict of name to (reads, writes), two addresses or None; got {nodes!r:.80}")
    nodes = {name: tuple(_canonical(model, point) for point in pair) for name, pair in nodes.items()}
    points = [point for pair in nodes.values() for point in pair if point is not None]
    order: list[str] = []
    args, kwargs = arguments(inputs)
    note = {point: _noting(order, point) for point in points}
    with torch.no_grad(), th.edit(model, note), th.record(model, *points) as tape:
        model(*args, **kwargs)
    if len(order) != len(points):
        twice = next(point for point in points if order.count(point) > 1)
        raise th.RecipeError(f"{twice!r} is reached {order.count(twice)} times in one run; a node runs once")
    senders = [Sender(name, pair[1]) for name, pair in nodes.items() if pair[1] is not None]
    senders.sort(key=lambda sender: order.index(sender.point))
    reads = [(name, pair[0]) for name, pair in nodes.items() if pair[0] is not None]
    reads.sort(key=lambda each: order.index(each[1]))
    receivers: list[Receiver] = []
    for name, point in reads:
        before = sum(order.index(sender.point) < order.index(point) for sender in senders)
        # Parallel parts read the same stream, without what the first of them has written.
        alike = (
            each
            for each in receivers
            if _same(stream_tensor(tape[each.stream], point), stream_tensor(tape[point], point))
        )
        before = next((each.senders for each in alike), before)
        feeds = (name,) if nodes[name][1] is not None else ()
        receivers.append(Receiver(name, point, point, None, before, feeds))
    if not senders or not receivers:
        raise th.RecipeError("nodes= needs at least one node that writes to the stream and one that reads it")
    return Graph(tuple(senders), tuple(receivers), senders[0].point)


def _canonical(model: nn.Module, point: str | None) -> str | None:
    """Return a point under the address that sessions report."""
    return None if point is None else str(th.points(model, point)[0])


def _noting(order: list[str], point: str) -> Any:
    def note(_value: Any) -> None:
        order.append(point)

    return note
