"""``th.doctor``: a report of versions, features and packages, to read or to paste into a bug report."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from tenterhook._draw import as_html, as_rich, as_text

if TYPE_CHECKING:
    from rich.console import Group

    from tenterhook._draw import Table
    from tenterhook.doctor.features import FeatureStatus
    from tenterhook.doctor.machine import Python, Torch
    from tenterhook.doctor.packages import Package

__all__ = ["Diagnosis", "doctor"]


@dataclass(frozen=True, slots=True, repr=False)
class Diagnosis:
    """The result of :func:`doctor`. It prints as plain text without home directories, user names or secrets."""

    tenterhook: str
    python: Python
    torch: Torch
    features: tuple[FeatureStatus, ...]
    packages: tuple[Package, ...]
    environment: dict[str, str]
    patched: dict[str, str]
    """functions of PyTorch that another library replaced, each with its replacement"""

    @property
    def tested(self) -> bool:
        """True if tenterhook is tested with this release of torch."""
        return not self.torch.untested

    @property
    def unavailable(self) -> tuple[FeatureStatus, ...]:
        """The features that do not work here. A session that needs one raises ``UnsupportedTorch`` when it starts."""
        return tuple(each for each in self.features if each.status == "unavailable")

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain dicts, lists and values, as ``tenterhook doctor --json`` prints it."""
        return {
            "tenterhook": self.tenterhook,
            "python": asdict(self.python),
            "torch": asdict(self.torch) | {"gpus": [asdict(each) for each in self.torch.gpus]},
            "tested": self.tested,
            "features": [asdict(each) for each in self.features],
            "packages": [asdict(each) for each in self.packages],
            "environment": dict(self.environment),
            "patched": dict(self.patched),
        }

    def _tables(self) -> list[Table]:
        from tenterhook.doctor.doctor_table import tables

        return tables(self)

    def __str__(self) -> str:
        return "\n\n".join(map(as_text, self._tables()))

    __repr__ = __str__

    def __rich__(self) -> Group:
        from rich.console import Group

        spaced = [part for table in self._tables() for part in ("", as_rich(table))]
        return Group(*spaced[1:])

    def _repr_html_(self) -> str:
        return "".join(map(as_html, self._tables()))


def doctor() -> Diagnosis:
    """Return a report of what is installed, and of which tenterhook features work with it.

    Each feature that depends on PyTorch's internals is checked by a small run on the CPU. This loads PyTorch's
    compiler, which takes a few seconds. GPUs are listed without initialising CUDA, and packages without importing them.

    >>> import tenterhook as th
    >>> found = th.doctor()
    >>> found.unavailable, found.features[0].status
    ((), 'fast')
    >>> sorted(found.to_dict())
    ['environment', 'features', 'packages', 'patched', 'python', 'tenterhook', 'tested', 'torch']
    """
    from tenterhook._version import __version__
    from tenterhook.doctor.environment import environment
    from tenterhook.doctor.features import features
    from tenterhook.doctor.machine import python, torch_build
    from tenterhook.doctor.packages import packages
    from tenterhook.pytorch.replaced import replaced_functions

    variables = environment()  # Read before the compiler is loaded, because loading it sets some variables.
    return Diagnosis(
        tenterhook=__version__,
        python=python(),
        torch=torch_build(),
        features=features(),
        packages=packages(),
        environment=variables,
        patched=replaced_functions(),
    )
