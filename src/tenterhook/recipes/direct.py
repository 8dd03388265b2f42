"""Direct logit attribution: the contribution of each part of a model to a token's score.

The final residual stream is a sum of everything written to it. The readout is linear if the scale of the last norm is
held constant. So a score is a sum of contributions. This holds for some architectures only, and is checked against the
score itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import tenterhook as th
from tenterhook._text import printable
from tenterhook.recipes import _inputs as given
from tenterhook.recipes._figures import Pictured, new_figure
from tenterhook.recipes._readout import TOLERANCE, Readout, readout

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["DirectLogits", "direct_logits"]

LAST = (slice(None), -1)
SHOWN = 40  # bars in a figure
Linear = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False, repr=False)
class DirectLogits(Pictured):
    """Contributions to a score, ``[points, examples]``, and ``bias``, the constant part of the readout.

    ``contributions.sum(0) + bias`` equals ``score``, up to ``error``. ``heads`` has the contributions of single
    attention heads, ``[heads, examples]``, for each output projection.
    """

    points: tuple[str, ...]
    contributions: Tensor
    bias: Tensor
    score: Tensor
    error: float
    heads: Mapping[str, Tensor] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)

    def best(self, count: int = 5) -> list[tuple[str, float]]:
        """Return the points with the largest absolute contribution, averaged over the examples."""
        mean = self.contributions.mean(1)
        return [(self.points[i], float(mean[i])) for i in mean.abs().argsort(descending=True)[:count].tolist()]

    def show(self) -> Figure:
        """Return a matplotlib figure with a bar for each of the largest contributions, averaged over the examples."""
        named = dict(zip(self.points, self.contributions.mean(1).tolist(), strict=True))
        shown = {point for point, _ in self.best(SHOWN)}
        bars = {point: value for point, value in named.items() if point in shown} | {"bias": float(self.bias.mean())}
        figure = new_figure(6, 1.2 + 0.24 * len(bars))
        axes = figure.add_subplot()
        axes.barh(
            list(bars), list(bars.values()), color=["tab:red" if each > 0 else "tab:blue" for each in bars.values()]
        )
        axes.invert_yaxis()
        axes.tick_params(labelsize=7)
        axes.set_title(f"direct contributions to the score, {float(self.score.mean()):.3f}", fontsize=9)
        return figure

    def __repr__(self) -> str:
        lines = [f"direct contributions to the score {float(self.score.mean()):.3f}, checked to {self.error:.1e}"]
        return "\n".join([*lines, *(f"  {printable(point):<28} {value:+.3f}" for point, value in self.best())])


def direct_logits(  # noqa: PLR0913
    model: nn.Module,
    inputs: Any,
    *,
    points: Any,
    target: int,
    against: int | None = None,
    at: Any = LAST,
    norm: str | None = None,
    head: str | None = None,
    heads: Mapping[Any, int] | None = None,
) -> DirectLogits:
    """Split a token's score into the contributions of the points that write to the residual stream.

    With ``heads``, the output of attention is split further, into the contribution of each head and the bias of the
    projection. That projection replaces the attention in ``points``.

    Args:
        model: a language model, or any model with one head that reads the stream.
        inputs: a tensor, a tuple of arguments or a dict of keyword arguments.
        points: everything that writes to the stream: embeddings, attention, MLP. In GPT-2
            ``["transformer.wte", "transformer.wpe", "transformer.h.*.attn", "transformer.h.*.mlp"]``.
        target: the token whose score is split.
        against: a token whose score is subtracted, to split the difference of the two.
        at: the position, as an index with the examples in front. Default: the last.
        norm: as for ``logit_lens``.
        head: as for ``logit_lens``.
        heads: the output projections of attention, and the number of heads of each: in GPT-2
            ``{"transformer.h.*.attn.c_proj": 12}``, in Llama ``{"model.layers.*.self_attn.o_proj": 32}``.

    Returns:
        A :class:`DirectLogits`.

    Raises:
        RecipeError: the score cannot be split: the points do not add up to the stream, or the readout is not linear.
    """
    reads = readout(model, inputs, norm=norm, head=head)
    split = {each: count for where, count in (heads or {}).items() for each in given.selected(model, where)}
    addresses = tuple(each for each in given.selected(model, points) if each not in split)
    args, kwargs = given.arguments(inputs)
    asked = [*addresses, *split, *(f"{each}:in" for each in split)]
    with torch.no_grad(), th.record(model, *asked, reads.stream, reads.head) as tape:
        model(*args, **kwargs)
    whole = given.lone(tape[reads.stream], reads.stream)
    scores, stream = given.lone(tape[reads.head], reads.head)[at], whole[at].double()
    parts = [_written(tape[point], point, whole)[at].double() for point in addresses]
    for projection, count in split.items():
        parts += _by_head(model, projection, count, tape, at)
        addresses += (*(f"{projection} head {number}" for number in range(count)), f"{projection} bias")
    limit = TOLERANCE.get(whole.dtype, 1e-4)
    _check_sum(parts, stream, limit)
    linear, offset = _normed(reads, whole[at], limit)
    direction, constant = _direction(model.get_submodule(reads.head), target, against, scores.shape[-1])
    found = torch.stack([linear(part) @ direction for part in parts])
    bias = (offset @ direction + constant).expand(found.shape[1:])
    score = scores[..., target].double() - (0 if against is None else scores[..., against].double())
    error = float((found.sum(0) + bias - score).abs().max())
    if error > limit * max(1.0, float(scores.double().abs().max())) * 10:
        raise th.RecipeError(f"the contributions do not add up to the score: off by {error:.3g}")
    settings = {"target": target, "against": against, "at": at, "norm": reads.norm, "head": reads.head}
    single, first = dict[str, Tensor](), len(addresses) - sum(count + 1 for count in split.values())
    for projection, count in split.items():
        single[projection] = found[first : first + count].float()
        first += count + 1
    return DirectLogits(addresses, found.float(), bias.float(), score.float(), error, single, settings)


def _by_head(model: nn.Module, projection: str, heads: int, tape: Any, at: Any) -> list[Tensor]:
    """Return what each head writes through a projection, and the projection's bias.

    The parts are computed by running the projection on one head's input at a time, and their sum is checked.
    """
    module, came = model.get_submodule(projection), given.lone(tape[f"{projection}:in"], f"{projection}:in")
    gave = given.lone(tape[projection], projection)
    if type(heads) is not int or heads < 1 or came.shape[-1] % heads:
        text = (
            f"the input of {projection!r} has {came.shape[-1]} features, which cannot be divided into {heads!r} heads"
        )
        raise th.RecipeError(f"{text}. Give the number of query heads: config.num_attention_heads.")
    owner = torch.arange(came.shape[-1], device=came.device) // (came.shape[-1] // heads)
    with torch.no_grad():
        own = module(torch.zeros_like(came))
        each = [module(came.where(owner == head, 0)) - own for head in range(heads)]
    gap = float((torch.stack([*each, own]).double().sum(0) - gave.double()).abs().max())
    if gap > TOLERANCE.get(gave.dtype, 1e-4) * max(1.0, float(gave.double().abs().max())) * 10:
        text = f"the outputs of the heads through {projection!r} do not add up to its output: off by {gap:.3g}"
        raise th.RecipeError(
            f"{text}. The projection must be linear, such as attn.c_proj, self_attn.o_proj, attention.dense."
        )
    return [part[at].double() for part in (*each, own)]


def _written(value: Any, point: str, stream: Tensor) -> Tensor:
    """Return the tensor in a point's value that has the shape of the stream."""
    found = [each for each in given.floats(value) if _fits(each, stream)]
    if len(found) != 1:
        text = f"{point!r} has {len(found)} tensors of the stream's shape, {list(stream.shape)}, but one is needed"
        raise th.RecipeError(text)
    return found[0].expand_as(stream)


def _fits(value: Tensor, stream: Tensor) -> bool:
    return (
        value.dim() == stream.dim() and value.shape[-1] == stream.shape[-1]
        and all(own in (1, whole) for own, whole in zip(value.shape, stream.shape, strict=True))
    )  # fmt: skip


def _check_sum(parts: Sequence[Tensor], stream: Tensor, limit: float) -> None:
    gap = float((torch.stack([part.expand_as(stream) for part in parts]).sum(0) - stream).abs().max())
    if gap <= limit * max(1.0, float(stream.abs().max())) * 10:
        return
    share = gap / float(stream.abs().max())
    raise th.RecipeError(
        f"the outputs of these points do not add up to the stream: off by {gap:.3g}, {share:.0%} of its maximum.\n"
        "Give everything that is added to it (embeddings, positions, attention, MLP), in the form that is added: "
        "if the architecture has a norm after a layer, give the norm.\n"
        "If values are scaled before they are added, there is no such sum."
    )


def _normed(reads: Readout, value: Tensor, limit: float) -> tuple[Linear, Tensor]:
    """Return the norm as a linear map, with its scale held at this value, and its bias.

    The form of the norm is found by trying the known ones, and checked.
    """
    if not reads.norm:
        return lambda part: part, torch.zeros(value.shape[-1], dtype=torch.float64, device=value.device)
    module = reads.model.get_submodule(reads.norm)
    with torch.no_grad():
        truth, wide = module(value).double(), value.double()
    eps = float(getattr(module, "eps", None) or getattr(module, "variance_epsilon", None) or 0.0)
    offset = _parameter(module, "bias", wide, 0.0)
    for centred in (True, False):
        middle = wide.mean(-1, keepdim=True) if centred else torch.zeros_like(wide[..., :1])
        scale = ((wide - middle).square().mean(-1, keepdim=True) + eps).rsqrt()
        for weight in (_parameter(module, "weight", wide, 1.0), 1 + _parameter(module, "weight", wide, 0.0)):
            gap = ((wide - middle) * scale * weight + offset - truth).abs().max()
            if float(gap) <= limit * max(1.0, float(truth.abs().max())):
                return _held(scale, weight, centred=centred), offset
    text = f"{reads.norm!r} is a {type(module).__name__}, which is not linear even with a constant scale"
    raise th.RecipeError(f"{text}: the score cannot be split into contributions")


def _held(scale: Tensor, weight: Tensor, *, centred: bool) -> Linear:
    def linear(part: Tensor) -> Tensor:
        return (part - part.mean(-1, keepdim=True) if centred else part) * scale * weight

    return linear


def _parameter(module: nn.Module, name: str, like: Tensor, otherwise: float) -> Tensor:
    found = getattr(module, name, None)
    filled = torch.full_like(like[..., :1].flatten()[:1], otherwise).expand(like.shape[-1])
    return found.detach().double() if isinstance(found, Tensor) else filled


def _direction(head: nn.Module, target: int, against: int | None, vocabulary: int) -> tuple[Tensor, Tensor]:
    for token in (target, *([] if against is None else [against])):
        if not 0 <= token < vocabulary:
            raise th.RecipeError(f"a token is 0 to {vocabulary - 1}; got {token}")
    weight, bias = getattr(head, "weight", None), getattr(head, "bias", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2 or len(weight) != vocabulary:  # noqa: PLR2004
        raise th.RecipeError(f"the head is a {type(head).__name__}, but a linear layer is needed")
    rows = weight.detach().double()
    added = bias.detach().double() if isinstance(bias, Tensor) else torch.zeros(vocabulary).to(rows)
    if against is None:
        return rows[target], added[target]
    return rows[target] - rows[against], added[target] - added[against]
