"""Training helpers: clip, scale and reverse gradients, freeze parts, and penalise activations.

Each is a session: ``with th.recipes.freeze(model, "encoder"): …``. The model is unchanged afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import TracebackType
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

import tenterhook as th
from tenterhook.recipes import _inputs as given

__all__ = ["Penalty", "activation_penalty", "clip_gradient", "freeze", "reverse_gradient", "scale_gradient"]

Kind = Literal["l1", "l2"] | Callable[[Tensor], Tensor]


def clip_gradient(
    model: nn.Module, points: Any, *, norm: float | None = None, value: float | None = None, per_example: bool = False
) -> Any:
    """Clip the gradient during the backward pass at some points.

    >>> import torch, tenterhook as th
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    >>> with th.recipes.clip_gradient(model, "0", norm=0.1), th.record(model, "0", grad=True) as tape:
    ...     (model(torch.ones(8, 4)) * 100).sum().backward()
    >>> round(float(model[0].bias.grad.norm()), 3) <= 0.3
    True

    Args:
        model: any ``nn.Module``.
        points: the points; ``"head:in"`` is the gradient that this module alone returns.
        norm: the largest norm of the gradient at a point. The direction does not change.
        value: the largest absolute value of each element. Give either ``norm`` or ``value``.
        per_example: apply ``norm`` to each example, the first dimension, separately.

    Returns:
        A session, to use in ``with``.

    Raises:
        RecipeError: both or neither of ``norm`` and ``value`` are given, or the number is not positive.
    """
    if (norm is None) == (value is None):
        raise th.RecipeError("give norm=, the largest norm, or value=, the largest absolute value: one of them")
    limit = _positive(norm if norm is not None else value, "norm" if norm is not None else "value")

    def clip(grad: Tensor) -> Tensor:  # An edit of gradients is called for one tensor at a time.
        return grad.clamp(-limit, limit) if norm is None else _shortened(grad, limit, per_example)

    return th.edit(model, grad=given.everywhere(points, clip))


def scale_gradient(model: nn.Module, points: Any, factor: float) -> Any:
    """Return a session that multiplies the gradient at some points during the backward pass.

    This scales the learning rate of everything before the points.

    Args:
        model: any ``nn.Module``.
        points: the points, as for ``th.edit``.
        factor: the factor.
    """
    return th.edit(model, grad=given.everywhere(points, th.scale(_finite(factor, "factor"))))


def reverse_gradient(model: nn.Module, points: Any, strength: float = 1.0) -> Any:
    """Return a session that reverses the gradient at some points during the backward pass (Ganin et al. 2016).

    At ``"domain:in"``, the layers before the domain head learn to make its loss larger, while the head itself learns to
    make it smaller.

    Args:
        model: any ``nn.Module``.
        points: the points, as for ``th.edit``.
        strength: the gradient is multiplied by ``-strength``.
    """
    return th.edit(model, grad=given.everywhere(points, th.scale(-_positive(strength, "strength"))))


def freeze(model: nn.Module, *selectors: Any) -> Any:
    """Return a session in which some parameters are constants and get no gradient.

    ``requires_grad`` and the optimizer are not changed. An optimizer still applies an existing ``.grad``, so call
    ``zero_grad(set_to_none=True)`` first.

    Args:
        model: any ``nn.Module``.
        *selectors: modules, with all their parameters (``"encoder"``), and single parameters (``"head.bias"``).

    Raises:
        RecipeError: a selector is neither a module nor a parameter, or there is no parameter to freeze.
    """
    changes: dict[str, Any] = {}
    for point in th.points(model, *selectors):
        if point.site.value == "parameter":
            changes[str(point)] = _constant
        elif point.site.value == "return":
            changes.update(dict.fromkeys(_parameters_in(model, point), _constant))
        else:
            text = f"{point} is neither a module nor a parameter; only these can be frozen"
            raise th.RecipeError(text)
    if not changes:
        raise th.RecipeError(f"{', '.join(map(repr, selectors))}: there is no parameter to freeze")
    return th.edit(model, changes)


def activation_penalty(model: nn.Module, points: Any, *, kind: Kind = "l1", weight: float = 1.0) -> Penalty:
    """Return a penalty on the size of the values at some points, to add to the loss.

    >>> import torch, tenterhook as th
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(inplace=True), torch.nn.Linear(8, 1))
    >>> with th.recipes.activation_penalty(model, "1", weight=0.01) as penalty:
    ...     loss = model(torch.ones(2, 4)).square().mean() + penalty()
    ...     loss.backward()

    Args:
        model: any ``nn.Module``.
        points: the points. Each call of each point is one term.
        kind: ``"l1"``, the mean absolute value; ``"l2"``, the mean square; or a function from the value to one number.
        weight: the factor of the penalty.

    Returns:
        A :class:`Penalty`, a session. Call it to get the term for the loss.

    Raises:
        RecipeError: ``kind`` or ``weight`` is wrong.
    """
    if not callable(kind) and kind not in ("l1", "l2"):
        raise th.RecipeError(f'kind= is "l1", "l2" or a function; got {kind!r}')
    return Penalty(model, points, kind, _finite(weight, "weight"))


class Penalty:
    """A session that collects a term for each call at its points. Calling it returns their sum and starts again."""

    def __init__(self, model: nn.Module, points: Any, kind: Kind, weight: float) -> None:
        self._measure = kind if callable(kind) else MEASURES[kind]
        self._weight = weight
        self._terms: list[Tensor] = []
        self._seen: set[tuple[str, int]] = set()
        self._session = th.edit(model, given.everywhere(points, self._gather))

    def _gather(self, value: Any, ctx: Any) -> None:
        # A clone, because an in-place activation may follow, and backward needs this value.
        term: Any = self._measure(given.lone(value, ctx.address).clone())
        if not isinstance(term, Tensor) or term.numel() != 1:
            got = list(term.shape) if isinstance(term, Tensor) else type(term).__name__
            raise th.RecipeError(
                f"a penalty is one number for each value; at {ctx.address!r} the function returned {got}"
            )
        # Activation checkpointing runs a call again. Its term is counted already.
        place = (ctx.address, ctx.call)
        if place not in self._seen:
            self._seen.add(place)
            self._terms.append(term.reshape(()))

    def __call__(self) -> Tensor:
        """Return the weighted sum of the terms since the last call of this method."""
        if not self._terms:
            raise th.RecipeError("no point was reached since the last time; run the model first")
        found = torch.stack(self._terms).sum() * self._weight
        self._terms.clear()
        return found

    def start(self) -> Self:
        """Start to collect."""
        self._session.start()
        return self

    def close(self) -> None:
        """Close the session and discard the remaining terms."""
        self._terms.clear()
        self._session.close()

    def __enter__(self) -> Self:
        self._session.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self._terms.clear()
        return bool(self._session.__exit__(kind, error, trace))


MEASURES: dict[str, Callable[[Tensor], Tensor]] = {
    "l1": lambda value: value.abs().mean(),
    "l2": lambda value: value.square().mean(),
}


# -- the parts --------------------------------------------------------------------------------------------------------


def _constant(value: Tensor) -> Tensor:
    return value.detach()


def _parameters_in(model: nn.Module, point: Any) -> list[str]:
    """Return selectors for every parameter of a module.

    If possible this is one glob, because unused parameters are no error in a glob.
    """
    prefix = "" if str(point) == ":return" else f"{point}."
    names = [name for name, _ in point.module.named_parameters()]
    if not names:
        return []
    glob = f"{prefix}**.{{{','.join(sorted({name.rpartition('.')[2] for name in names}))}}}"
    found = th.points(model, glob)
    alone = all(each.site.value == "parameter" and isinstance(each.tensor, nn.Parameter) for each in found)
    return [glob] if alone else [f"{prefix}{name}" for name in names]


def _shortened(grad: Tensor, limit: float, per_example: bool) -> Tensor:  # noqa: FBT001
    size = grad.flatten(1).norm(dim=1).reshape(-1, *[1] * (grad.dim() - 1)) if per_example else grad.norm()
    return torch.where(size > limit, grad * (limit / size), grad)


def _positive(number: Any, name: str) -> float:
    if _finite(number, name) <= 0:
        raise th.RecipeError(f"{name}= is a positive number; got {number!r}")
    return float(number)


def _finite(number: Any, name: str) -> float:
    if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
        raise th.RecipeError(f"{name}= is a number; got {number!r}")
    return float(number)
