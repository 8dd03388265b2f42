"""Weights that PyTorch computes from other parameters: pruning, weight and spectral normalisation, parametrizations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune
from torch.nn.utils.prune import BasePruningMethod

from tenterhook.pytorch.module_calls import buffers_of, children_of, forward_pre_hooks_of, parameters_of
from tenterhook.pytorch.names import attribute, find
from tenterhook.pytorch.support import check, feature, require

__all__ = [
    "PowerIteration",
    "WeightHook",
    "has_derived_weights",
    "parametrization_cache",
    "parametrized_weights",
    "power_iterations",
    "weight_hooks",
]

attribute("BasePruningMethod", "_tensor_name")
_CACHE = attribute("torch.nn.utils.parametrize", "_cache")
attribute("parametrizations.spectral_norm", "_u")
attribute("parametrizations.spectral_norm", "_v")
attribute("parametrizations.spectral_norm", "n_power_iterations")
attribute("WeightNorm", "compute_weight")
WeightNorm: Any = find("torch.nn.utils.weight_norm.WeightNorm", ())
SpectralNorm: Any = find("torch.nn.utils.spectral_norm.SpectralNorm", ())
_UTILITIES = "torch.nn.utils."
_SPECTRAL_NORM: Any = find("torch.nn.utils.parametrizations._SpectralNorm")


class WeightHook:
    """A forward pre-hook of PyTorch that computes a plain attribute of a module from the module's parameters."""

    __slots__ = ("hook", "module", "name")

    def __init__(self, module: nn.Module, hook: Any, name: str) -> None:
        self.module, self.hook, self.name = module, hook, name

    def compute(self) -> Tensor:
        """Return the attribute's value for the current parameters, without changing the module."""
        if isinstance(self.hook, BasePruningMethod):
            return self.hook.apply_mask(self.module)  # type: ignore[no-any-return]
        if isinstance(self.hook, SpectralNorm):
            return self.hook.compute_weight(self.module, do_power_iteration=False)  # type: ignore[no-any-return]
        return self.hook.compute_weight(self.module)  # type: ignore[no-any-return]

    def state(self) -> tuple[tuple[int, int], ...]:
        """Return a value that changes when a parameter or buffer of the module is replaced or changed in place."""
        tensors = (*parameters_of(self.module).values(), *buffers_of(self.module).values())
        return tuple((id(each), _version(each)) for each in tensors if each is not None)


def has_derived_weights(module: nn.Module) -> bool:
    """Return whether PyTorch computes weights of a module from other parameters."""
    return parametrize.is_parametrized(module) or any(map(_is_utility, forward_pre_hooks_of(module).values()))


def _is_utility(hook: Any) -> bool:
    return type(hook).__module__.startswith(_UTILITIES)


def weight_hooks(module: nn.Module) -> list[WeightHook]:
    """Return the pre-hooks of pruning, ``weight_norm`` and ``spectral_norm`` on a module."""
    if any(map(_is_utility, forward_pre_hooks_of(module).values())):
        require("weights computed from parameters")
    return _weight_hooks(module)


def _weight_hooks(module: nn.Module) -> list[WeightHook]:
    found = []
    for hook in forward_pre_hooks_of(module).values():
        if isinstance(hook, (WeightNorm, SpectralNorm)):
            found.append(WeightHook(module, hook, hook.name))
        elif isinstance(hook, BasePruningMethod):
            found.append(WeightHook(module, hook, hook._tensor_name))
    return found


def parametrized_weights(module: nn.Module) -> Iterator[tuple[tuple[int, str], Any]]:
    """Yield the key in PyTorch's cache and the parametrizations of each parametrized tensor of a module."""
    if parametrize.is_parametrized(module):
        lists: Any = children_of(module)["parametrizations"]
        for name, each in children_of(lists).items():
            yield (id(module), name), each


def parametrization_cache() -> dict[tuple[int, str], Any]:
    """Return the weights that ``parametrize.cached()`` has computed. Empty outside of that context.

    This is called around every edited parameter. If the cache is missing, the probe refuses edits of parametrized
    weights.
    """
    return getattr(parametrize, _CACHE, {})


class PowerIteration:
    """The vectors that spectral normalisation updates at each call in training."""

    __slots__ = ("_again", "_found", "_rounds", "_steps", "_vectors", "_versions")

    def __init__(self, vectors: list[Tensor], steps: int, again: Any) -> None:
        self._vectors, self._steps, self._again = vectors, steps, again
        self._found: list[Tensor] = []
        self._versions: list[int] = []
        self._rounds: int | None = None

    def note(self) -> None:
        """Save the current vectors."""
        self._found, self._versions = [each.clone() for each in self._vectors], list(map(_version, self._vectors))
        self._rounds = None

    def repeat(self) -> None:
        """Restore the saved vectors, and repeat the updates since then with the current parameters.

        After an interrupt it can be called again, with the same result.
        """
        if self._rounds is None:
            pairs = zip(self._vectors, self._versions, strict=True)
            self._rounds = -(-max(_version(each) - before for each, before in pairs) // self._steps)
        if self._rounds <= 0:
            return
        with torch.no_grad():
            for each, found in zip(self._vectors, self._found, strict=True):
                each.copy_(found)
            for _ in range(self._rounds):
                self._again()


def power_iterations(module: nn.Module) -> list[PowerIteration]:
    """Return the power iterations of a module's own spectral normalisation, both the hook and the parametrization."""
    found = []
    for hook in forward_pre_hooks_of(module).values():
        if isinstance(hook, SpectralNorm):
            vectors = [getattr(module, f"{hook.name}_u"), getattr(module, f"{hook.name}_v")]
            found.append(PowerIteration(vectors, hook.n_power_iterations, _refine_old(hook, module)))
    for _, each in parametrized_weights(module):
        parts: list[Any] = [part for part in each if _is_spectral_norm(part)]
        for part in parts:
            again = _refine_new(part, each) if part is each[0] else _nothing
            found.append(PowerIteration([part._u, part._v], part.n_power_iterations, again))
    return found


def _is_spectral_norm(part: nn.Module) -> bool:
    """Return whether a parametrization is PyTorch's spectral norm and has vectors. It has none for a 1-D weight."""
    return isinstance(_SPECTRAL_NORM, type) and isinstance(part, _SPECTRAL_NORM) and "_u" in buffers_of(part)


def _refine_old(hook: Any, module: nn.Module) -> Any:
    return lambda: hook.compute_weight(module, do_power_iteration=True)


attribute("ParametrizationList", "original")


def _refine_new(part: Any, weights: Any) -> Any:
    return lambda: type(part).forward(part, weights.original)


@feature(
    "weights computed from parameters",
    used_by="an edit of a parameter in a model with pruning, weight or spectral normalisation, or parametrizations",
    still_works="edits of the inputs and outputs of modules",
)
def probe_derived_weights() -> str | None:
    """Check that derived weights are recognised and have the needed attributes.

    The meta device draws no random numbers.
    """
    pruned = nn.Linear(2, 2, device="meta")
    prune.identity(pruned, "weight")
    check(has_derived_weights(pruned), "pruning is not recognised")
    check([each.name for each in _weight_hooks(pruned)] == ["weight"], "the name of a pruned weight is not known")
    normalised: Any = _SPECTRAL_NORM(torch.empty(2, 2, device="meta"))
    check(_is_spectral_norm(normalised), "spectral normalisation is not recognised")
    check(normalised._u.shape == normalised._v.shape == (2,), "the vectors of spectral normalisation are not found")
    steps = [each.n_power_iterations for each in (normalised, SpectralNorm())]
    check(steps == [1, 1], "the steps of spectral normalisation are not known")
    old = [getattr(kind, "compute_weight", None) for kind in (WeightNorm, SpectralNorm)]
    check(all(map(callable, old)), "weight or spectral normalisation by hooks is not recognised")
    parametrized = nn.Linear(2, 2, device="meta")
    weight, _ = parametrized.parameters()
    parametrize.register_parametrization(parametrized, "weight", nn.Identity(), unsafe=True)
    ((_, found),) = parametrized_weights(parametrized)
    check(found.original is weight, "the weight before its parametrizations is not found")
    check(isinstance(getattr(parametrize, _CACHE, None), dict), "the cache of parametrized weights has moved")
    return None


def _nothing() -> None:
    """Do nothing: the vectors of a later parametrization are not updated."""


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version
