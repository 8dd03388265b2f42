"""``th.features``: a trainable module that returns the values at some points of a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

import tenterhook.compiled.engine_api  # noqa: F401 - registers the support for compiled models
from tenterhook._tree import map_tensors, tensors
from tenterhook.address import Point, Selector, Site, resolve
from tenterhook.address.grammar import CallRange
from tenterhook.address.suggest import listed
from tenterhook.address.walk import find
from tenterhook.compiled.traced_features import FeaturePoint, feature_points, several, traced
from tenterhook.engine.action import Action, Binding, Context
from tenterhook.engine.session import Session
from tenterhook.errors import AddressError, AmbiguousCall, SelectorError, ValueChanged
from tenterhook.pytorch.dynamo import disable, mark_as_traced, resume_compiling, stop_compiling
from tenterhook.pytorch.module_calls import load_state_as, same_state
from tenterhook.pytorch.support import require
from tenterhook.sites.model_facts import facts

__all__ = ["Features", "features"]

CHANGED = (
    "the feature {name!r} ({address}) was changed in place by a later operation. This could not be detected from the "
    "model's source. Set module.inplace = True on the module that changes it: then the feature is copied."
)


def features(model: nn.Module, points: Mapping[str, str] | Selector | Iterable[Selector]) -> Features:
    """Return a module that runs ``model`` as far as needed and returns a dict of the values at ``points``.

    >>> import torch, tenterhook as th
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> body = th.features(model, {"0": "low", "1": "high"})
    >>> {name: value.shape for name, value in body(torch.ones(3, 4)).items()}
    {'low': torch.Size([3, 8]), 'high': torch.Size([3, 8])}

    Gradients flow back into the model. The result shares the model's modules, parameters and buffers under the same
    names: its ``state_dict`` is the model's own, and ``body.requires_grad_(False)`` freezes the model.

    The first call runs the whole model, to find points that run several times. After the last feature it continues
    without gradients and in evaluation mode. If a point runs several times, the address must name the call
    (``"relu#1"``). If every address names its call, and in all calls after the first, the model stops after the last
    feature.

    Args:
        model: any ``nn.Module``.
        points: a dict of address to name, or selectors. With selectors, the address of each value is its name.

    Returns:
        A :class:`Features` module. Its ``forward`` takes the arguments of ``model``.

    Raises:
        SelectorError: a selector of the dict matches several points, or a name occurs twice, or a point is a parameter.
        AddressError: an address is not in the model, or it counts calls from the end (``#-1``).
    """
    return Features(model, _named(model, points))


class Features(nn.Module):
    """The module that :func:`features` returns. ``.model`` is the model. ``.points`` maps each address to its name."""

    model: nn.Module

    if TYPE_CHECKING:

        def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Any]: ...

    def __init__(self, model: nn.Module, points: Mapping[str, str]) -> None:
        require("module calls", "shared state")
        super().__init__()
        # These are the dicts of the model itself: a change of one (move, load, freeze, add) is a change of the other.
        vars(self).update(same_state(model), model=model)
        self.points = dict(points)
        self.training = model.training
        self._found: tuple[Point, ...] | None = None
        self._feature_points: list[FeaturePoint] = []
        self._counted = all(point.call is not None for point in self._resolved())

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Run the model with its own arguments up to the last feature, and return the features by name."""
        if torch.compiler.is_compiling() and self._feature_points:
            return traced(self.model, self._feature_points, self._taken, args, kwargs, stop=self._counted)  # type: ignore[no-any-return]
        return self._taken(args, kwargs)

    def _taken(self, args: Any, kwargs: Any) -> dict[str, Any]:
        # For the code around this call. A model that is compiled itself starts compiling again.
        compiling = stop_compiling()
        try:
            session = _FeatureSession(self.model, self._resolved(), stop=self._counted)
            try:
                with session:
                    session.run(*args, **kwargs)
                values = {name: session.value(address, name) for address, name in self.points.items()}
            finally:
                session.patches.clear()  # They refer to the session. Break the cycle, so that memory is freed at once.
        finally:
            resume_compiling(compiling)
        self._counted = True
        return values

    # Dynamo may start a graph at ``forward``. It leaves the graph for ``_taken``, which opens a session.
    mark_as_traced(forward)
    disable(_taken)

    def _resolved(self) -> tuple[Point, ...]:
        if self._found is None or any(find(self.model, each.path) is not each.module for each in self._found):
            self._found = tuple(resolve(self.model, list(self.points)))
            self._feature_points = feature_points(self._found, self.points)
        return self._found

    # -- state of the model -------------------------------------------------------------------------------------------

    def train(self, mode: bool = True) -> Self:  # noqa: FBT001, FBT002
        """Set training or evaluation mode, for the model too."""
        self.model.train(mode)
        self.training = mode
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's own state dict."""
        return self.model.state_dict(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        # A copy may hold another model, so it resolves the points again by name.
        return {**vars(self), "_found": None, "_feature_points": []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._resolved()

    def extra_repr(self) -> str:
        return ", ".join(f"{address} -> {name}" for address, name in self.points.items())


load_state_as(Features, lambda features: features.model)


class _FeatureSession(Session):
    """One run of a model that collects values together with their autograd graph."""

    verb = "features"

    def __init__(self, model: nn.Module, points: tuple[Point, ...], *, stop: bool) -> None:
        self.patches = {str(point): FeatureAction(self, copy=facts(model).in_place) for point in points}
        bindings = [Binding(point, self.patches[str(point)]) for point in points]
        super().__init__(model, bindings, [[binding] for binding in bindings])
        self._stop, self._left = stop, len(points)
        self._modes: list[nn.Module] = []
        self._grad = torch.is_grad_enabled()

    def run(self, *args: Any, **kwargs: Any) -> None:
        """Run the model. Ignore an exception that is raised after the last feature."""
        try:
            self.model(*args, **kwargs)
        except Exception:
            if self._left:
                raise
        finally:
            torch.set_grad_enabled(self._grad)
            for module in self._modes:
                module.training = True

    @property
    def is_last(self) -> bool:
        """True if exactly one feature is missing and the run stops after it."""
        return self._stop and self._left == 1

    def took_one(self) -> None:
        """Count one collected feature. After the last one, stop, or continue without gradients and in eval mode."""
        self._left -= 1
        if self._left:
            return
        if self._stop:
            self.done = True
            return
        torch.set_grad_enabled(False)
        self._modes = [module for module in self.model.modules() if module.training]
        for module in self._modes:
            module.training = False

    def value(self, address: str, name: str) -> Any:
        """Return the value at a point.

        Raises:
            AmbiguousCall: the point ran several times.
            ValueChanged: the value was changed in place after it was collected.
        """
        patch = self.patches[address]
        if patch.calls > 1 and "#" not in address:
            raise AmbiguousCall(several(address, name, patch.calls))
        if any(tensor._version != version for tensor, version in patch.versions):
            raise ValueChanged(CHANGED.format(name=name, address=address))
        return patch.value


class FeatureAction(Action):
    """An action that collects a value, copied if a later operation of the model may change it in place."""

    observes = True
    again = False

    def __init__(self, session: _FeatureSession, *, copy: bool) -> None:
        self._session, self._copy = session, copy
        self.calls = 0
        self.value: Any = None
        self.versions: list[tuple[Tensor, int]] = []

    @property
    def reached(self) -> bool:
        return self.calls > 0

    def __call__(self, value: Any, context: Context) -> None:  # noqa: ARG002
        self.calls += 1
        if self.calls > 1:
            return
        if self._copy and not self._session.is_last:
            value = map_tensors(torch.clone, value)
        elif not self._session.is_last:
            self.versions = [(tensor, tensor._version) for _, tensor in tensors(value) if not tensor.is_inference()]
        self.value = value
        self._session.took_one()


def _single_calls(point: Point) -> list[str]:
    """Return the address of a point, or that of each call where it has a range of calls."""
    if not isinstance(point.call, CallRange):
        return [str(point)]
    if point.call.last is None:
        raise AddressError(f"{point}: each call is a feature, so the range needs an end, such as #{{0..3}}")
    return [f"{point.address}#{call}" for call in range(point.call.first, point.call.last + 1)]


def _named(model: nn.Module, points: Any) -> dict[str, str]:
    if not isinstance(points, Mapping):
        named = {each: each for point in resolve(model, [points]) for each in _single_calls(point)}
    else:
        named = {}
        for selector, name in points.items():
            found = [each for point in resolve(model, [selector]) for each in _single_calls(point)]
            if len(found) != 1:
                text = f"{selector!r} selects {len(found)} points ({listed(found)}), and a named feature is one point."
                raise SelectorError(f"{text}\nPass a list of selectors: then each feature is named by its address.")
            if not isinstance(name, str) or name in named.values():
                raise SelectorError(f"each feature needs its own name, a str; {selector!r} has {name!r}")
            named[found[0]] = name
    if not named:
        raise SelectorError("give at least one point: th.features(model, {'layer4': 'top'})")
    for point in resolve(model, list(named)):
        if point.site is Site.PARAMETER:
            raise SelectorError(f"{point} is a parameter; a feature is a value that a run computes")
        if isinstance(point.call, int) and point.call < 0:
            raise AddressError(f"{point}: a run cannot know which call will be the last; count from the first, #0")
    return named
