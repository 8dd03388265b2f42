"""Attention rollout: the amount of each input token that reaches an output token through all attention layers."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

import tenterhook as th
from tenterhook.recipes._target import Given, prepared
from tenterhook.recipes.result import Attribution

__all__ = ["attention_rollout"]

EVERY_SOFTMAX = "**:softmax()[*]"
HEADS = 4  # dimensions of attention weights: examples, heads, from, to
NONE = (
    "attention_rollout needs the attention weights, [examples, heads, tokens, tokens], but {where}.\n"
    "A fused attention kernel does not compute them: load the model with attn_implementation='eager'. Otherwise name "
    "their points, as in points='h.*.attn:weights'; th.points(model, 'h.0.attn:*') lists the points."
)


def attention_rollout(
    model: nn.Module,
    inputs: Tensor,
    *,
    points: Any = EVERY_SOFTMAX,
    token: int | None = 0,
    heads: Literal["mean", "max", "min"] = "mean",
    residual: float = 0.5,
    grid: tuple[int, int] | None = None,
    more: Any = (),
) -> Attribution:
    """Multiply the attention weights of all layers in the order in which they ran: ``[examples, tokens]``.

    >>> import torch, tenterhook as th
    >>> from torch import nn
    >>> layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    >>> model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    >>> found = th.recipes.attention_rollout(model, torch.randn(1, 5, 8))
    >>> found.attribution.shape, torch.allclose(found.attribution.sum(-1), torch.ones(1))
    (torch.Size([1, 5]), True)

    Every layer counts, and every call of a layer that is used several times. Rollout follows attention only. It ignores
    the effect of the values and of other layers. Abnar and Zuidema, 2020.

    Args:
        model: any ``nn.Module`` that computes its attention weights.
        inputs: the examples, with the batch in front.
        points: the points of the weights. Default: every ``softmax`` whose result has the shape of attention weights.
        token: the output token, -1 for the last; None for all, ``[examples, tokens, tokens]``.
        heads: the reduction over heads.
        residual: the fraction of each token that bypasses the attention.
        grid: the height and width of the tokens of an image, which are the last tokens. The map covers the image.
        more: as for :func:`tenterhook.recipes.saliency`.

    Returns:
        An :class:`Attribution` over the input tokens.

    Raises:
        RecipeError: no attention weights were found, as in a fused attention kernel.
    """
    given = prepared("attention_rollout", model, inputs, more, floating=False)
    if heads not in ("mean", "max", "min"):
        raise th.RecipeError(f'attention_rollout: heads= is "mean", "max" or "min"; got {heads!r}')
    weights = _weights(given, points)
    found: Tensor | None = None
    for each in weights:
        layer = {"mean": each.mean(1), "max": each.amax(1), "min": each.amin(1)}[heads]
        layer = layer / layer.sum(-1, keepdim=True) * (1 - residual)
        layer.diagonal(dim1=-2, dim2=-1).add_(residual)
        found = layer if found is None else layer @ found
    assert found is not None  # noqa: S101  There is at least one layer.
    found = found if token is None else _row(found, token)
    settings = {"token": token, "heads": heads, "residual": residual, "layers": len(weights)}
    if grid is None:
        return Attribution("attention rollout", found, given.x, None, settings)
    return Attribution("attention rollout", _on_grid(found, token, grid), given.x, None, settings, kind="map")


def _weights(given: Given, points: Any) -> list[Tensor]:
    """Return the attention weights of every layer, in the order in which they ran."""
    kept: list[Tensor] = []

    def note(value: Any, ctx: Any) -> None:
        found = _as_weights(value, ctx.module, given.examples)
        if found is not None:
            kept.append(found.detach().clone())

    edits: dict[Any, Any] = {points: note} if not isinstance(points, list) else dict.fromkeys(points, note)
    for path, module in given.model.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            # Without need_weights, MultiheadAttention uses a fused kernel. Without gradients, it has another fast path.
            edits[f"{path}:need_weights"] = lambda _value: True
            edits[f"{path}:query"] = lambda value: value.detach().requires_grad_()
    try:
        with torch.enable_grad(), th.edit(given.model, edits):
            given.run(given.x)
    except (th.AddressError, th.NeverReached) as error:
        raise th.RecipeError(NONE.format(where=f"{points!r} selects no value of this run")) from error
    if not kept:
        raise th.RecipeError(NONE.format(where=f"no value at {points!r} has that shape"))
    if any(each.shape[-1] != kept[0].shape[-1] for each in kept):
        lengths = sorted({each.shape[-1] for each in kept})
        text = f"attention_rollout needs layers over the same tokens, but these have {lengths}"
        raise th.RecipeError(f"{text}; choose some of them by points=.")
    return kept


def _as_weights(value: Any, module: nn.Module, examples: int) -> Tensor | None:
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.dim() < HEADS - 1:
        return None
    if value.dim() == HEADS - 1:
        heads = getattr(module, "num_heads", value.shape[0] // examples)
        value = value.unflatten(0, (-1, heads)) if value.shape[0] == examples * heads else value
    square = value.dim() == HEADS and value.shape[0] == examples and value.shape[-1] == value.shape[-2]
    sums = value.sum(-1) if square else None
    return value if sums is not None and torch.allclose(sums, torch.ones_like(sums), atol=1e-2) else None


def _row(found: Tensor, token: int) -> Tensor:
    tokens = found.shape[1]
    if not -tokens <= token < tokens:
        raise th.RecipeError(f"attention_rollout: there is no token {token}; the model has {tokens}")
    return found[:, token]


def _on_grid(found: Tensor, token: int | None, grid: tuple[int, int]) -> Tensor:
    height, width = grid
    if token is None or height * width > found.shape[-1]:
        text = f"attention_rollout: grid={grid} is {height * width} places for one of {found.shape[-1]} tokens"
        raise th.RecipeError(f"{text}; give a token=, and a grid with no more places than tokens")
    places: Tensor = found[:, -height * width :].unflatten(1, grid)
    return places
