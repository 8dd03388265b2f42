"""What a model would say, were it to stop at a point: the logit lens, and the tuned lens.

The logit lens reads each point of the stream with the model's own last norm and head. The tuned lens puts a learned
affine map before them, because early points speak another basis.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import tenterhook as th
from tenterhook._text import printable
from tenterhook.recipes import _inputs as given
from tenterhook.recipes._figures import heatmap
from tenterhook.recipes._readout import Readout, readout

__all__ = ["Lens", "TunedLens", "logit_lens", "tuned_lens"]


@dataclass(frozen=True, eq=False, repr=False)
class Lens:
    """What a lens shows.

    ``logits``: the scores read at each point, ``[points, …, vocabulary]``. ``final``: the scores that the model gave.
    """

    points: tuple[str, ...]
    logits: Tensor
    final: Tensor
    tuned: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)

    def top(self, count: int = 1) -> Tensor:
        """The most likely tokens at each point, ``[points, …, count]``."""
        return self.logits.topk(count).indices

    def rank(self, token: int) -> Tensor:
        """The place of a token among all, at each point; 0 is the most likely."""
        if not 0 <= token < self.logits.shape[-1]:
            text = f"token {token} is not in the vocabulary: 0 to {self.logits.shape[-1] - 1}"
            raise th.RecipeError(text)
        return (self.logits > self.logits[..., token : token + 1]).sum(-1)

    @property
    def divergence(self) -> Tensor:
        """How far what is read at each point is from what the model says: KL(final ‖ lens), in nats."""
        final = self.final.float().log_softmax(-1)
        return (final.exp() * (final - self.logits.float().log_softmax(-1))).sum(-1)

    @property
    def agreement(self) -> Tensor:
        """The share of the positions at which each point has the model's own first choice."""
        same = self.top()[..., 0] == self.final.argmax(-1)
        return same.flatten(1).float().mean(1)

    def show(self, *, decode: Callable[[int], str] = str, example: int = 0, labels: Sequence[str] | None = None) -> Any:
        """A matplotlib figure: the first choice at each point and position of an example, and its probability."""
        scores = self.logits if self.logits.dim() > 3 else self.logits[:, :, None]  # noqa: PLR2004
        chances, tokens = scores[:, example].float().softmax(-1).max(-1)
        words = [[decode(token) for token in line] for line in tokens.tolist()]
        columns = labels if labels is not None else [str(place) for place in range(chances.shape[1])]
        title = "tuned lens" if self.tuned else "logit lens"
        return heatmap(chances, self.points, columns, title=title, signed=False, words=words)

    def __repr__(self) -> str:
        away = self.divergence.flatten(1).mean(1).tolist()
        lines = [f"{'tuned' if self.tuned else 'logit'} lens: {list(self.logits.shape)}"]
        lines += [
            f"  {printable(point):<28} KL {kl:7.3f}   same first choice {share:6.1%}"
            for point, kl, share in zip(self.points, away, self.agreement.tolist(), strict=True)
        ]
        return "\n".join(lines)


def logit_lens(
    model: nn.Module, inputs: Any, *, points: Any, at: Any = None, norm: str | None = None, head: str | None = None
) -> Lens:
    """Read the stream at each point as the model reads its end (nostalgebraist 2020).

    ``norm`` and ``head`` are found by themselves in a transformers model, and checked in any: read so, the end of the
    stream must give the model's own scores.

    Args:
        model: a language model, or anything whose stream is read by one head.
        inputs: a tensor, a tuple of arguments or a dict of named ones.
        points: points of the stream, such as ``"transformer.h.*"``.
        at: which part of it, such as ``th.at[:, -1:]``; all if it is not given.
        norm: the module before the head, ``""`` for none.
        head: the module that makes the scores.
    """
    reads = readout(model, inputs, norm=norm, head=head)
    addresses = given.selected(model, points)
    values, final = _stream(model, inputs, addresses, reads, at)
    with torch.no_grad():
        scores = torch.stack([reads(value) for value in values])
    return Lens(addresses, scores, final, settings={"norm": reads.norm, "head": reads.head, "at": at})


class TunedLens(nn.Module):
    """Learned maps from each point to the end of the stream: ``x + x A + b``, at first nothing but ``x``.

    It holds no part of the model. Save it by its ``state_dict``; call it with a model and inputs for a :class:`Lens`.
    """

    def __init__(self, points: Sequence[str], width: int, *, norm: str, head: str) -> None:
        super().__init__()
        self.points, self.norm, self.head = tuple(points), norm, head
        self.maps = nn.ModuleList(nn.Linear(width, width) for _ in points)
        for parameter in self.maps.parameters():
            nn.init.zeros_(parameter)
        self.losses: list[float] = []

    def forward(self, model: nn.Module, inputs: Any, *, at: Any = None) -> Lens:
        """What the lens shows of a run."""
        reads = Readout(model, self.norm, self.head)
        values, final = _stream(model, inputs, self.points, reads, at)
        with torch.no_grad():
            scores = torch.stack([reads(self._mapped(place, value)) for place, value in enumerate(values)])
        settings = {"norm": self.norm, "head": self.head, "at": at}
        return Lens(self.points, scores, final, tuned=True, settings=settings)

    def loss(self, reads: Readout, values: Sequence[Tensor], final: Tensor) -> Tensor:
        """KL(final ‖ lens), averaged over positions and points."""
        aim = final.float().log_softmax(-1)
        terms = [
            (aim.exp() * (aim - reads(self._mapped(place, value)).float().log_softmax(-1))).sum(-1).mean()
            for place, value in enumerate(values)
        ]
        return torch.stack(terms).mean()

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
    """Learn the maps of a tuned lens (Belrose et al. 2023), one for each point, on some batches.

    The model is not trained: not even the ``.grad`` of its parameters is touched. ``.losses`` has each step's loss.

    Args:
        model: as for :func:`logit_lens`.
        batches: inputs, gone through ``epochs`` times; a list, so that it can be.
        points: points of the stream.
        epochs: how often.
        lr: of Adam.
        norm: as for :func:`logit_lens`.
        head: the same.
    """
    inputs = list(batches)
    if not inputs:
        raise th.RecipeError("there are no batches to learn from")
    reads = readout(model, inputs[0], norm=norm, head=head)
    addresses = given.selected(model, points)
    values, _ = _stream(model, inputs[0], addresses, reads, None)
    lens = TunedLens(addresses, values[0].shape[-1], norm=reads.norm, head=reads.head).to(values[0].device)
    optimizer = torch.optim.Adam(lens.parameters(), lr=lr)
    for _ in range(epochs):
        for batch in inputs:
            values, final = _stream(model, batch, addresses, reads, None)
            with torch.enable_grad():
                loss = lens.loss(reads, values, final)
            own = list(lens.parameters())
            for parameter, grad in zip(own, torch.autograd.grad(loss, own), strict=True):
                parameter.grad = grad
            optimizer.step()
            lens.losses.append(float(loss.detach()))
    lens.zero_grad(set_to_none=True)
    return lens


def _stream(
    model: nn.Module, inputs: Any, points: Sequence[str], reads: Readout, at: Any
) -> tuple[list[Tensor], Tensor]:
    """What passes at points of the stream, and the scores of the model."""
    args, kwargs = given.arguments(inputs)
    with torch.no_grad(), th.record(model, *points, reads.stream) as tape:
        final = given.output_scores(model(*args, **kwargs))
    end = given.lone(tape[reads.stream], reads.stream)
    values = [given.lone(tape[point], point) for point in points]
    for point, value in zip(points, values, strict=True):
        if value.shape != end.shape:
            text = f"{point!r} passes {list(value.shape)}, and the stream that is read is {list(end.shape)}"
            raise th.RecipeError(f"{text}. Choose points of that stream, such as the outputs of the blocks.")
    if at is None:
        return values, final
    return [value[at] for value in values], final[at]
