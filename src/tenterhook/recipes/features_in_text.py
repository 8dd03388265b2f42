"""The texts in which features of a dictionary are most active."""

from __future__ import annotations

import html
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import tenterhook as th
from tenterhook._text import printable
from tenterhook.recipes._inputs import latents_of

__all__ = ["FeatureText", "FeatureTexts", "feature_texts"]

SHOWN = 20
STYLE = """body{font:14px/1.6 system-ui,sans-serif;max-width:60em;margin:2em auto;padding:0 1em;color:#222}
h2{font-size:1em;margin:1.6em 0 .3em}small{color:#777;font-weight:normal}p{margin:.15em 0;white-space:pre-wrap}
span{border-radius:2px}b{display:inline-block;width:4em;font-weight:normal;color:#777}"""


@dataclass(frozen=True)
class FeatureText:
    """One latent: the share of rows in which it is active, and the texts in which it is most active.

    ``texts``: for each text the tokens around the row, with the value of the latent at each. ``values``: the value at
    the row itself.
    """

    latent: int
    frequency: float
    values: tuple[float, ...]
    texts: tuple[tuple[tuple[str, float], ...], ...]


@dataclass(frozen=True)
class FeatureTexts:
    """The result of :func:`feature_texts`. ``dead``: the number of latents that are active nowhere."""

    features: tuple[FeatureText, ...]
    dead: int
    rows: int

    def __len__(self) -> int:
        return len(self.features)

    def __getitem__(self, latent: int) -> FeatureText:
        """Return the feature of a latent."""
        for each in self.features:
            if each.latent == latent:
                return each
        raise th.RecipeError(f"latent {latent} is not among these; ask for it with latents=")

    def save(self, path: str | os.PathLike[str], *, title: str = "Features") -> Path:
        """Write a page of HTML that needs nothing else, and return its path."""
        target = Path(path)
        part = target.with_name(f".{target.name}.part")
        part.write_text(self._page(title), encoding="utf-8")
        part.replace(target)
        return target

    def _page(self, title: str) -> str:
        head = f"<!doctype html><meta charset=utf-8><title>{html.escape(title)}</title><style>{STYLE}</style>"
        about = f"<h1>{html.escape(title)}</h1><p>{self.rows:,} rows, {self.dead} latents are active in none</p>"
        return "\n".join([head, about, *map(_section, self.features), ""])

    def _repr_html_(self) -> str:
        return f"<style>{STYLE}</style>" + "\n".join(map(_section, self.features[:SHOWN]))

    def __repr__(self) -> str:
        lines = [f"{len(self.features)} features over {self.rows:,} rows; {self.dead} latents are active in none"]
        for each in self.features[:SHOWN]:
            best = "".join(token for token, _ in each.texts[0]) if each.texts else ""
            lines.append(f"  {each.latent:>6}  {each.frequency:6.2%}  {max(each.values, default=0):.3g}  {best}")
        return "\n".join(map(printable, lines))


def feature_texts(
    dictionary: nn.Module,
    store: Any,
    point: str,
    *,
    latents: Iterable[int] | None = None,
    top: int = 8,
    around: int = 8,
    tokenizer: Any = None,
    batch_size: int = 4096,
) -> FeatureTexts:
    """Find the rows of a store in which each latent is most active, with the tokens around them.

    Args:
        dictionary: a dictionary for the rows: any module with ``encode``.
        store: a store of rows for tokens, from :func:`tenterhook.open`.
        point: the address of the rows.
        latents: the latents to show. By default the 50 with the largest values.
        top: the number of texts for each latent.
        around: the number of tokens before and after the row.
        tokenizer: a tokenizer with ``decode``; without one, tokens are shown as numbers.
        batch_size: the number of rows to encode at once.

    Returns:
        A :class:`FeatureTexts`. ``.save("features.html")`` writes a page.

    Raises:
        NotRecorded: the point is not in the store.
        RecipeError: an argument is wrong, or the dictionary is for another width.
    """
    _check(dictionary, store, {"top": (top, 1), "around": (around, 0), "batch_size": (batch_size, 1)})
    values, rows, active = _best(dictionary, store[point], top, batch_size)
    largest = values.amax(0).argsort(descending=True)[:50].tolist()
    chosen = largest if latents is None else latents_of(latents, values.shape[1])
    texts = _Texts(dictionary, store, point, around, tokenizer)
    features = []
    for latent in chosen:
        found = [(value, row) for value, row in zip(values[:, latent].tolist(), rows[:, latent].tolist(), strict=True)]
        found = [(value, row) for value, row in found if value > 0]
        features.append(
            FeatureText(
                latent, float(active[latent]) / max(len(store), 1), tuple(value for value, _ in found),
                tuple(texts.around(row, latent) for _, row in found),
            )
        )  # fmt: skip
    return FeatureTexts(tuple(features), int((active == 0).sum()), len(store))


def _check(dictionary: Any, store: Any, counts: dict[str, tuple[Any, int]]) -> None:
    if not isinstance(dictionary, nn.Module) or not callable(getattr(dictionary, "encode", None)):
        got = type(dictionary).__name__
        text = f"a dictionary is an nn.Module with encode(), such as trained.dictionary; got a {got}"
        raise th.RecipeError(text)
    if not hasattr(store, "facts"):
        raise th.RecipeError(f"the store is what th.open(folder) returns; got a {type(store).__name__}")
    for name, (given, least) in counts.items():
        if type(given) is not int or given < least:
            raise th.RecipeError(f"{name}= is an int from {least}; got {given!r:.40}")


@torch.no_grad()
def _best(dictionary: Any, column: Any, top: int, batch_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the largest values of each latent, ``[top, latent]``, their rows, and how often each is active."""
    best: tuple[Tensor, Tensor] | None = None
    active: Any = 0
    for start in range(0, len(column), batch_size):
        found = _encoded(dictionary, column[start : start + batch_size])
        found = found.masked_fill(~found.isfinite(), -torch.inf)  # A row with NaN is not an activation.
        active = active + (found > 0).sum(0)
        own = found.topk(min(top, len(found)), dim=0)
        pair = own.values, own.indices + start
        if best is not None:
            pair = torch.cat([best[0], pair[0]]), torch.cat([best[1], pair[1]])
            kept = pair[0].topk(min(top, len(pair[0])), dim=0)
            pair = kept.values, pair[1].gather(0, kept.indices)
        best = pair
    if best is None:
        raise th.RecipeError("the store has no rows yet")
    return best[0].cpu(), best[1].cpu(), active.cpu()


@torch.no_grad()
def _encoded(dictionary: Any, rows: Tensor) -> Tensor:
    like = next(iter(dictionary.parameters()), rows)
    try:
        found: Tensor = dictionary.encode(rows.to(like.device, like.dtype))
    except RuntimeError as error:
        text = f"the {type(dictionary).__name__} cannot encode rows of shape {list(rows.shape)}: {error}"
        raise th.RecipeError(text) from error
    return found


class _Texts:
    """The tokens around a row of a store."""

    def __init__(self, dictionary: Any, store: Any, point: str, around: int, tokenizer: Any) -> None:
        self._dictionary, self._rows, self._around, self._tokenizer = dictionary, store[point], around, tokenizer
        facts = store.facts
        self._samples = facts["sample"]
        self._tokens = facts.get("token")

    def around(self, row: int, latent: int) -> tuple[tuple[str, float], ...]:
        """Return the tokens around a row, in the same sample, with the values of a latent."""
        low, high = max(row - self._around, 0), min(row + self._around + 1, len(self._rows))
        samples = self._samples[low:high].tolist()
        same = [low + place for place, sample in enumerate(samples) if sample == samples[row - low]]
        low, high = same[0], same[-1] + 1
        values = _encoded(self._dictionary, self._rows[low:high])[:, latent].tolist()
        return tuple(zip(self._named(low, high, samples), values, strict=True))

    def _named(self, low: int, high: int, samples: Sequence[int]) -> Iterator[str]:
        if self._tokens is None:
            yield from (f"sample {samples[0]} " for _ in range(low, high))
            return
        for token in self._tokens[low:high].tolist():
            yield f"{token} " if self._tokenizer is None else str(self._tokenizer.decode([token]))


def _section(feature: FeatureText) -> str:
    most = max(feature.values, default=0.0)
    lines = [f"<h2>latent {feature.latent} <small>active in {feature.frequency:.2%} of the rows</small></h2>"]
    for value, text in zip(feature.values, feature.texts, strict=True):
        tokens = "".join(
            f'<span title="{own:.3g}" style="background:rgba(214,96,77,{max(own, 0) / most:.2f})">'
            f"{html.escape(printable(token))}</span>"
            for token, own in text
        )
        lines.append(f"<p><b>{value:.3g}</b>{tokens}</p>")
    return "\n".join(lines)
