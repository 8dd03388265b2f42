"""The logit lens, the tuned lens and the Jacobian lens: the prediction of a model if it ended at a point.

The logit lens applies the model's last norm and head to each point of the residual stream. The tuned lens applies a
learned affine map first, because early points use another basis. The Jacobian lens uses the mean derivative of the end
of the stream as that map.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

import tenterhook as th
from tenterhook._text import printable
from tenterhook.recipes import _inputs as given
from tenterhook.recipes._figures import Pictured, heatmap
from tenterhook.recipes._readout import Readout, readout

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Kind", "Lens", "StreamValues", "TunedLens", "batches_of", "logit_lens", "stream_values", "tuned_lens"]

Kind = Literal["logit", "tuned", "jacobian"]


@dataclass(frozen=True, eq=False, repr=False)
class Lens(Pictured):
    """The result of a lens.

    ``logits``: the scores at each point, ``[points, …, vocabulary]``. ``final``: the model's own scores. ``mask``:
    where there is no padding, if the inputs have an ``attention_mask``; averages leave padding out.
    """

    points: tuple[str, ...]
    logits: Tensor
    final: Tensor
    kind: Kind = "logit"
    settings: Mapping[str, Any] = field(default_factory=dict)
    mask: Tensor | None = None

    @property
    def tuned(self) -> bool:
        """True for a tuned lens."""
        return self.kind == "tuned"

    def top(self, count: int = 1) -> Tensor:
        """Return the most likely tokens at each point, ``[points, …, count]``."""
        return self.logits.topk(count).indices

    def rank(self, token: int) -> Tensor:
        """Return the rank of a token at each point; 0 is the most likely."""
        if not 0 <= token < self.logits.shape[-1]:
            text = f"token {token} is not in the vocabulary: 0 to {self.logits.shape[-1] - 1}"
            raise th.RecipeError(text)
        return (self.logits > self.logits[..., token : token + 1]).sum(-1)

    @property
    def divergence(self) -> Tensor:
        """The divergence of each point's prediction from the model's: KL(final ‖ lens), in nats."""
        final = self.final.float().log_softmax(-1)
        return (final.exp() * (final - self.logits.float().log_softmax(-1))).sum(-1)

    @property
    def agreement(self) -> Tensor:
        """The fraction of positions where each point's most likely token is the model's."""
        return self._average(self.top()[..., 0] == self.final.argmax(-1))

    def _average(self, values: Tensor) -> Tensor:
        """Return the average of values ``[points, …]`` over positions that are no padding."""
        kept = values.flatten(1) if self.mask is None else values[:, self.mask]
        return kept.float().mean(1)

    def show(
        self, *, decode: Callable[[int], str] = str, example: int = 0, labels: Sequence[str] | None = None
    ) -> Figure:
        """Return a matplotlib figure of the most likely token, and its probability, at each point of one example."""
        scores = self.logits if self.logits.dim() > 3 else self.logits[:, :, None]  # noqa: PLR2004
        chances, tokens = scores[:, example].float().softmax(-1).max(-1)
        words = [[decode(token) for token in line] for line in tokens.tolist()]
        columns = labels if labels is not None else [str(place) for place in range(chances.shape[1])]
        return heatmap(chances, self.points, columns, title=f"{self.kind} lens", signed=False, words=words)

    def __repr__(self) -> str:
        away = self._average(self.divergence).tolist()
        lines = [f"{self.kind} lens: {list(self.logits.shape)}"]
        lines += [
            f"  {printable(point):<28} KL {kl:7.3f}   same top token {share:6.1%}"
            for point, kl, share in zip(self.points, away, self.agreement.tolist(), strict=True)
        ]
        return "\n".join(lines)


def logit_lens(
    model: nn.Module, inputs: Any, *, points: Any, at: Any = None, norm: str | None = None, head: str | None = None
) -> Lens:
    """Apply the model's own readout at each point of the residual stream (nostalgebraist 2020).

    In a transformers model, ``norm`` and ``head`` are found automatically. In any model they are checked: applied to
    the end of the stream, they must give the model's own scores.

    Args:
        model: a language model, or any model with one head that reads the stream.
        inputs: a tensor, a tuple of arguments or a dict of keyword arguments.
        points: points of the stream, such as ``"transformer.h.*"``.
        at: the part of the stream to read, such as ``th.at[:, -1:]``. Default: all.
        norm: the name of the module before the head, or ``""`` for none.
        head: the name of the module that computes the scores.

    Returns:
        A :class:`Lens` with the scores at every point.

    Raises:
        RecipeError: the readout is not found or does not give the model's scores, or a point is not in the stream.
    """
    with given.steady(model):
        reads = readout(model, inputs, norm=norm, head=head)
        addresses = given.selected(model, points)
        stream = stream_values(model, inputs, addresses, reads, at)
        with torch.no_grad():
            scores = torch.stack([reads(value) for value in stream.values])
    settings = {"norm": reads.norm, "head": reads.head, "at": at}
    return Lens(addresses, scores, stream.final, settings=settings, mask=stream.mask)


class TunedLens(nn.Module):
    """Maps from each point to the end of the stream: ``x + x A + b``, initialised to ``x``.

    It contains no part of the model. Save its ``state_dict``. Call it with a model and inputs to get a :class:`Lens`.
    """

    def __init__(self, points: Sequence[str], width: int, *, norm: str, head: str, kind: Kind = "tuned") -> None:
        super().__init__()
        self.kind: Kind = kind
        self.points, self.norm, self.head = tuple(points), norm, head
        # Without the usual start, which would take random numbers from the user's generator.
        self.maps = nn.ModuleList(nn.utils.skip_init(nn.Linear, width, width) for _ in points)
        for parameter in self.maps.parameters():
            nn.init.zeros_(parameter)
        self.losses: list[float] = []

    def forward(self, model: nn.Module, inputs: Any, *, at: Any = None) -> Lens:
        """Run the model and return the scores at every point."""
        reads = Readout(model, self.norm, self.head)
        with given.steady(model):
            stream = stream_values(model, inputs, self.points, reads, at)
            with torch.no_grad():
                scores = torch.stack([reads(self._mapped(place, value)) for place, value in enumerate(stream.values)])
        settings = {"norm": self.norm, "head": self.head, "at": at}
        return Lens(self.points, scores, stream.final, self.kind, settings, stream.mask)

    def loss(self, reads: Readout, stream: StreamValues) -> Tensor:
        """Return KL(final ‖ lens), averaged over points and over positions that are no padding."""
        aim = stream.final.float().log_softmax(-1)
        terms = [
            (aim.exp() * (aim - reads(self._mapped(place, value)).float().log_softmax(-1))).sum(-1)
            for place, value in enumerate(stream.values)
        ]
        return torch.stack([term.mean() if stream.mask is None else term[stream.mask].mean() for term in terms]).mean()

    def _mapped(self, place: int, value: Tensor) -> Tensor:
        change = self.maps[place]
        return value + change(value.to(change.weight.dtype)).to(value.dtype)  # type: ignore[no-any-return,arg-type]


def tuned_lens(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    points: Any,
    epochs: int = 1,
    lr: float = 1e-3,
    norm: str | None = None,
    head: str | None = None,
) -> TunedLens:
    """Train the maps of a tuned lens, one for each point, on some batches (Belrose et al. 2023).

    The model is not trained, and the ``.grad`` of its parameters is not changed.

    Args:
        model: as for :func:`logit_lens`.
        batches: a list of inputs, or one. They are kept in a list and used once per epoch. Padding that an
            ``attention_mask`` names does not count.
        points: points of the stream.
        epochs: the number of epochs.
        lr: the learning rate of Adam.
        norm: as for :func:`logit_lens`.
        head: as for :func:`logit_lens`.

    Returns:
        A :class:`TunedLens`. ``.losses`` has the loss of each step.
    """
    if type(epochs) is not int or epochs < 0 or not 0 < lr < math.inf:
        raise th.RecipeError(
            f"epochs= is an integer from 0 and lr= a positive number; got {epochs!r:.40} and {lr!r:.40}"
        )
    inputs = batches_of(batches, "learn from")
    with torch.inference_mode(mode=False), given.steady(model):
        reads = readout(model, inputs[0], norm=norm, head=head)
        addresses = given.selected(model, points)
        start = stream_values(model, inputs[0], addresses, reads, None).values[0]
        lens = TunedLens(addresses, start.shape[-1], norm=reads.norm, head=reads.head).to(start.device)
        optimizer = torch.optim.Adam(lens.parameters(), lr=lr)
        own = list(lens.parameters())
        for _ in range(epochs):
            for batch in inputs:
                stream = stream_values(model, batch, addresses, reads, None)
                with torch.enable_grad():
                    loss = lens.loss(reads, stream)
                for parameter, grad in zip(own, torch.autograd.grad(loss, own), strict=True):
                    parameter.grad = grad
                optimizer.step()
                torch.clear_autocast_cache()  # Inside autocast, the next step would use the maps of the first one.
                lens.losses.append(float(loss.detach()))
    if not all(bool(parameter.isfinite().all()) for parameter in own):
        first = next((step for step, value in enumerate(lens.losses) if not math.isfinite(value)), len(lens.losses))
        raise th.RecipeError(f"the maps are not finite: the loss went wrong at step {first}. Try a smaller lr=")
    lens.zero_grad(set_to_none=True)
    return lens


def batches_of(batches: Any, purpose: str) -> list[Any]:
    """Return inputs as a list. They may be one input, a list or a generator."""
    found = [batches] if isinstance(batches, Tensor | Mapping | tuple) else list(batches)
    if not found:
        raise th.RecipeError(f"there are no batches to {purpose}")
    with torch.inference_mode(mode=False):
        return [given.normal(each) for each in found]


@dataclass(frozen=True)
class StreamValues:
    """The values at points of the stream, the model's scores, and which positions are no padding (None: all)."""

    values: list[Tensor]
    final: Tensor
    mask: Tensor | None


def stream_values(model: nn.Module, inputs: Any, points: Sequence[str], reads: Readout, at: Any) -> StreamValues:
    """Return the values at points of the stream, and the model's scores."""
    args, kwargs = given.arguments(inputs)
    with torch.no_grad(), th.record(model, *points, reads.stream) as tape:
        final = given.output_scores(model(*args, **kwargs))
    end = given.lone(tape[reads.stream], reads.stream)
    values = [given.lone(tape[point], point) for point in points]
    for point, value in zip(points, values, strict=True):
        if value.shape != end.shape:
            text = f"the value at {point!r} is {list(value.shape)}, but the stream is {list(end.shape)}"
            raise th.RecipeError(f"{text}. Choose points of that stream, such as the outputs of the blocks.")
    mask = _mask(kwargs.get("attention_mask"), end)
    if at is None:
        return StreamValues(values, final, mask)
    cut = None if mask is None else mask[..., None].expand(end.shape)[at][..., 0]
    return StreamValues([value[at] for value in values], final[at], cut)


def _mask(given: Any, stream: Tensor) -> Tensor | None:
    """Return where an attention mask has tokens, if it has padding."""
    if not isinstance(given, Tensor) or given.shape != stream.shape[:-1] or bool(given.all()):
        return None
    return given.bool()
