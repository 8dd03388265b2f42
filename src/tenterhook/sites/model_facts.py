"""Facts about a whole model that are needed before any of its points is hooked. They are cached per model."""

from __future__ import annotations

from dataclasses import dataclass
from weakref import ref

from torch import nn

from tenterhook._model_table import ModelTable
from tenterhook.address.walk import walk
from tenterhook.sites.fused_layers import FUSED
from tenterhook.sites.inplace import model_changes_in_place

__all__ = ["Facts", "facts"]


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts about a model.

    ``in_place``: its code may change tensors in place. ``fused``: the paths of layers whose fast path bypasses their
    children.
    """

    in_place: bool
    fused: tuple[str, ...]


_known: ModelTable[Facts] = ModelTable()


def facts(model: nn.Module) -> Facts:
    """Return the facts about ``model``.

    They are computed once, because walking a large model costs more than a session on one point. They may be out of
    date without harm: a value that is changed in place is detected by its version, and a bypassed point is reported as
    never reached.
    """
    known = _known.get(ref(model))
    if known is None:
        known = _look(model)
        _known.put(model, known)
    return known


def _look(model: nn.Module) -> Facts:
    fused = tuple(path for path, module in walk(model)[0] if isinstance(module, FUSED))
    return Facts(in_place=model_changes_in_place(model.modules()), fused=fused)
