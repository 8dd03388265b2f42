"""Attention heads: patch or ablate each of them, follow paths between heads, and look at their patterns.

The heads are found by meaning, ``@z`` and ``@pattern``, so the names of the model's modules do not matter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

import tenterhook as th
from tenterhook._text import printable
from tenterhook.recipes import _inputs as given
from tenterhook.recipes import patching
from tenterhook.recipes._figures import Pictured, heatmap, new_figure
from tenterhook.recipes.ablation import ablate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["AttentionPatterns", "HeadEffects", "ablate_heads", "attention_patterns", "head_paths", "patch_heads"]

HEADS = "**@z"
PATTERNS = "**@pattern"
FOUR = 4
ACROSS = 4  # Heads side by side in a figure.
NONE = (
    "{points!r} selects no attention heads of this model: it calls no attention function that is known. See "
    "th.register_meaning."
)


@dataclass(frozen=True, eq=False, repr=False)
class HeadEffects(Pictured):
    """The effect of each head: ``effect`` is ``[layers, heads, positions]``.

    ``layers`` has the addresses of the layers' heads. ``positions`` has one name, ``"all"``, if all positions were
    changed together. ``how`` describes how the cases were run.
    """

    layers: tuple[str, ...]
    positions: tuple[str, ...]
    effect: Tensor
    what: str
    how: tuple[str, ...] = ()

    def best(self, count: int = 5) -> list[tuple[str, str, float]]:
        """Return the heads with the largest absolute effect: the address, the position, the effect."""
        flat = self.effect.flatten()
        order = flat.abs().argsort(descending=True)[:count].tolist()
        _, heads, positions = self.effect.shape
        found = []
        for index in order:
            layer, rest = divmod(index, heads * positions)
            head, position = divmod(rest, positions)
            found.append((f"{self.layers[layer]}[{head}]", self.positions[position], float(flat[index])))
        return found

    def show(self, position: int | None = None, *, title: str = "") -> Figure:
        """Return a matplotlib figure with layers as rows and heads as columns.

        Of several positions, ``position`` is the index of the one to draw. By default it is the largest effect over
        all of them.
        """
        grid = self.effect
        if position is None:
            place = grid.abs().argmax(2, keepdim=True)
            drawn = grid.gather(2, place).squeeze(2)
        else:
            drawn = grid[..., position]
        columns = [str(head) for head in range(grid.shape[1])]
        return heatmap(drawn, [layer.removesuffix("@z") for layer in self.layers], columns, title=title or self.what)

    def __repr__(self) -> str:
        shown = " × ".join(map(str, self.effect.shape))
        lines = [f"{self.what}: {shown} (layers, heads, positions)"]
        return "\n".join([*lines, *(f"  {printable(head):<34} {place:<6} {e:+.4f}" for head, place, e in self.best())])


def patch_heads(  # noqa: PLR0913
    model: nn.Module,
    clean: Any,
    corrupt: Any,
    *,
    metric: Callable[[Any], Any],
    at: Iterable[int] | None = None,
    points: Any = HEADS,
    mode: Literal["denoise", "noise"] = "denoise",
    batch: int | None = None,
    progress: bool | None = None,
) -> HeadEffects:
    """Replace the output of each head by that of another run, one at a time, and measure the effect.

    Args:
        model: a transformer.
        clean: an input, or a list of inputs, as for :func:`tenterhook.recipes.patching.activation`.
        corrupt: the other input, or a list of the same length.
        metric: a function from the model's output to one number.
        at: token positions to patch one at a time. Default: all positions together.
        points: the heads. Default: those of every attention module.
        mode: ``"denoise"`` puts values of the clean run into the corrupt run; ``"noise"`` does the reverse.
        batch: as for ``th.sweep``.
        progress: as for ``th.sweep``.

    Returns:
        A :class:`HeadEffects`. An effect of 1 restores all of the difference between the two runs.

    Raises:
        RecipeError: the model has no attention heads that are known, or the inputs do not fit together.
    """
    first = clean[0] if isinstance(clean, list) and clean else clean
    places, shape = _places(model, first, points, at)
    found = patching.activation(
        model, clean, corrupt, points=points, metric=metric, at=places, mode=mode, batch=batch, progress=progress
    )
    effect = found.effect.reshape(len(found.points), *shape)
    return HeadEffects(found.points, _names(at), effect, f"patching of heads ({mode})", found.how)


def ablate_heads(  # noqa: PLR0913
    model: nn.Module,
    inputs: Any,
    *,
    metric: Callable[[Any], Any],
    how: Literal["zero", "mean", "resample"] = "zero",
    reference: Any = None,
    at: Iterable[int] | None = None,
    points: Any = HEADS,
    batch: int | None = None,
    progress: bool | None = None,
) -> HeadEffects:
    """Remove each head, one at a time, and measure the change of a metric.

    The arguments are those of :func:`patch_heads` and of :func:`tenterhook.recipes.ablate`.

    Raises:
        RecipeError: the model has no attention heads that are known, or an option is wrong.
    """
    places, shape = _places(model, inputs, points, at)
    found = ablate(
        model, inputs, points=points, metric=metric, how=how, reference=reference, at=places, batch=batch,
        progress=progress,
    )  # fmt: skip
    effect = found.effect.reshape(len(found.points), *shape)
    return HeadEffects(found.points, _names(at), effect, f"{how} ablation of heads")


def head_paths(
    model: nn.Module,
    clean: Any,
    corrupt: Any,
    *,
    receivers: Any,
    metric: Callable[[Any], Any],
    senders: Any = HEADS,
    freeze: Any = HEADS,
    mode: Literal["denoise", "noise"] = "denoise",
) -> HeadEffects:
    """Let the difference at each head reach some later heads directly, and measure the effect.

    For each sending head, all other heads are frozen, so that the difference reaches the receivers through the residual
    stream and the MLPs only. See :func:`tenterhook.recipes.patching.path`. Wang et al., *Interpretability in the
    Wild*, 2022.

    Args:
        model: a transformer.
        clean: as for :func:`patch_heads`.
        corrupt: as for :func:`patch_heads`.
        receivers: the points that receive the difference, such as ``"h.9.attn@q[6]"``, or a list of them.
        metric: a function from the model's output to one number.
        senders: the sending heads. Default: those of every attention module.
        freeze: the points to hold constant. Add ``"**@mlp_out"`` to freeze the MLPs too.
        mode: as for :func:`patch_heads`.

    Returns:
        A :class:`HeadEffects`. The effect of a head that runs after the receivers is 0.

    Raises:
        RecipeError: no sender runs before the receivers, or the inputs do not fit together.
    """
    first = clean[0] if isinstance(clean, list) and clean else clean
    layers, heads = _heads(model, first, senders)
    before = _before(model, first, layers, given.selected(model, receivers))
    if not before:
        raise th.RecipeError("no sender runs before the receivers, so that nothing can reach them")
    each = [f"{layer}[{head}]" for layer in before for head in range(heads)]
    found = patching.path(
        model, clean, corrupt, senders=each, receivers=receivers, freeze=freeze, metric=metric, mode=mode
    )
    effect = torch.zeros(len(layers), heads, 1, dtype=found.effect.dtype, device=found.effect.device)
    effect[[layers.index(layer) for layer in before]] = found.effect.reshape(len(before), heads, 1)
    return HeadEffects(tuple(layers), ("all",), effect, f"paths from heads to {', '.join(found.places)}")


# -- pictures ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, repr=False)
class AttentionPatterns(Pictured):
    """The attention patterns of one input, ``[batch, head, query, key]`` for each layer, and its tokens as text."""

    patterns: dict[str, Tensor]
    tokens: tuple[str, ...]

    def show(
        self, layer: int | str = -1, *, example: int = 0, heads: Sequence[int] | None = None, width: float = 2.6
    ) -> Figure:
        """Return a matplotlib figure: the heads of a layer side by side, with the tokens on the axes.

        Args:
            layer: the address of the layer's pattern, or its index.
            example: the row of the batch.
            heads: the heads to draw. Default: all of them.
            width: the width of each picture in inches.
        """
        address = layer if isinstance(layer, str) else list(self.patterns)[layer]
        if address not in self.patterns:
            raise th.RecipeError(f"{layer!r} is not one of the layers: {', '.join(self.patterns)}")
        values = self.patterns[address][example].detach().float().cpu()
        chosen = list(range(len(values))) if heads is None else list(heads)
        lines = -(-len(chosen) // ACROSS)
        figure = new_figure(width * min(len(chosen), ACROSS) + 0.4, width * lines + 0.4)
        for place, head in enumerate(chosen):
            axes = figure.add_subplot(lines, min(len(chosen), ACROSS), place + 1)
            axes.imshow(values[head].numpy(), cmap="Blues", vmin=0, vmax=1)
            axes.set_title(f"head {head}", fontsize=8)
            for side, count in (("x", values.shape[2]), ("y", values.shape[1])):
                texts = self._texts(count)
                ticks = {"rotation": 90} if side == "x" else {}
                getattr(axes, f"set_{side}ticks")(range(count), texts, fontsize=5, parse_math=False, **ticks)
        figure.suptitle(printable(address), fontsize=9, parse_math=False)
        return figure

    def _texts(self, count: int) -> list[str]:
        """Return the texts of the tokens, or numbers if there are more or fewer positions than tokens."""
        return list(self.tokens) if len(self.tokens) == count else [str(place) for place in range(count)]

    def __repr__(self) -> str:
        first = next(iter(self.patterns.values()))
        return f"attention patterns of {len(self.patterns)} layers, each {list(first.shape)}"


def attention_patterns(
    model: nn.Module, inputs: Any, *, points: Any = PATTERNS, tokens: Sequence[str] | None = None, tokenizer: Any = None
) -> AttentionPatterns:
    """Record the attention patterns of an input. The result draws them, with the tokens on the axes.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> import torch, tenterhook as th
    >>> model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=16, n_head=4, vocab_size=50)).eval()
    >>> found = th.recipes.attention_patterns(model, torch.tensor([[5, 6, 7]]), tokens=["a", "cat", "sat"])
    >>> found
    attention patterns of 2 layers, each [1, 4, 3, 3]
    >>> figure = found.show(layer=0, heads=[1, 3])

    Args:
        model: a transformer, with any attention kernel.
        inputs: a tensor, a tuple of arguments or a dict of keyword arguments.
        points: the patterns. Default: those of every attention module.
        tokens: the texts of the tokens of the first row. Default: from the tokenizer, or the token ids.
        tokenizer: a tokenizer with ``convert_ids_to_tokens``.

    Raises:
        RecipeError: the model has no attention patterns that are known.
    """
    addresses = _known(model, points)
    args, kwargs = given.arguments(inputs)
    with torch.no_grad(), th.record(model, *addresses) as tape:
        model(*args, **kwargs)
    ids = next((each for each in given.tensors_of((args, kwargs)) if not each.is_floating_point()), None)
    if tokens is None and ids is not None:
        first = ids.reshape(-1, ids.shape[-1])[0].tolist()
        tokens = tokenizer.convert_ids_to_tokens(first) if tokenizer is not None else list(map(str, first))
    texts = tuple(printable(str(each).replace("Ġ", " ").replace("▁", " ")) for each in tokens or ())
    return AttentionPatterns({address: tape[address] for address in tape}, texts)


# -- the parts --------------------------------------------------------------------------------------------------------


def _known(model: nn.Module, points: Any) -> tuple[str, ...]:
    try:
        return given.selected(model, points)
    except th.AddressError as error:
        raise th.RecipeError(NONE.format(points=points)) from error


def _heads(model: nn.Module, inputs: Any, points: Any) -> tuple[list[str], int]:
    """Return the addresses of the heads of each layer, and the number of heads."""
    addresses = _known(model, points)
    args, kwargs = given.arguments(inputs)
    with torch.no_grad(), th.record(model, *addresses) as tape:
        model(*args, **kwargs)
    counts = {address: given.lone(tape[address], address).shape for address in addresses}
    sizes = {shape[2] for shape in counts.values() if len(shape) == FOUR}
    if len(sizes) != 1 or any(len(shape) != FOUR for shape in counts.values()):
        shown = ", ".join(f"{address}: {list(shape)}" for address, shape in counts.items())
        raise th.RecipeError(f"all layers need the same number of heads, [batch, token, head, size]; got {shown}")
    return list(addresses), sizes.pop()


def _places(
    model: nn.Module, inputs: Any, points: Any, at: Iterable[int] | None
) -> tuple[dict[str, Any], tuple[int, int]]:
    """Return an index for each head and position, and how many there are of both."""
    _, heads = _heads(model, inputs, points)
    if at is None:
        return {f"head {head}": th.at[:, :, head] for head in range(heads)}, (heads, 1)
    positions = list(at)
    places = {f"head {head} at {place}": th.at[:, place, head] for head in range(heads) for place in positions}
    return places, (heads, len(positions))


def _names(at: Iterable[int] | None) -> tuple[str, ...]:
    return ("all",) if at is None else tuple(map(str, at))


def _before(model: nn.Module, inputs: Any, layers: list[str], receivers: Sequence[str]) -> list[str]:
    """Return the layers whose heads run before the last receiver."""
    args, kwargs = given.arguments(inputs)
    with torch.no_grad(), th.record(model, *dict.fromkeys([*layers, *receivers])) as tape:
        model(*args, **kwargs)
    order = tape.in_order()
    last = max(order.index(receiver) for receiver in receivers)
    return [layer for layer in layers if order.index(layer) < last]
