"""Features that depend on PyTorch's internals, each with the result of its probe."""

from __future__ import annotations

from dataclasses import dataclass

from tenterhook.doctor.redact import redact
from tenterhook.pytorch.all_features import run_all_probes

__all__ = ["FeatureStatus", "features"]


@dataclass(frozen=True, slots=True)
class FeatureStatus:
    """A feature, and its status on this installation."""

    name: str
    status: str
    """``fast``, ``fallback`` (slower, with the same results) or ``unavailable``"""
    why: str
    """the reason if the status is not ``fast``"""
    used_by: str


def features() -> tuple[FeatureStatus, ...]:
    """Probe every feature that is not probed yet, and return all of them."""
    return tuple(
        FeatureStatus(each.name, str(each.status), redact(each.why), each.used_by) for each in run_all_probes()
    )
