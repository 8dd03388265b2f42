"""Lazy loading of public names on first use.

``import tenterhook`` loads no engine, so a program that opens no session loses only a few milliseconds. The
``__getattr__`` of PEP 562 is not enough, because several public names are also names of packages: importing
``tenterhook.record.verb`` sets ``tenterhook.record`` to the package, and ``th.record(model)`` would then find the
package.
"""

import contextlib
import importlib
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

__all__ = ["load_on_use"]


def load_on_use(package: str, homes: Mapping[str, str]) -> None:
    """Load public names of a package on their first use.

    Args:
        package: the name of the package.
        homes: for each public name the place of its definition: ``"module:attribute"``, or ``"module"`` for a module.
    """
    module = sys.modules[package]
    names = {name: _Name(name, home) for name, home in homes.items()}
    module.__class__ = type("package", (ModuleType,), {**names, "__dir__": _names_of(module, homes)})


class _Name:
    """A public name that is not loaded yet. It is a data descriptor, so it precedes the module's own ``__dict__``."""

    def __init__(self, name: str, home: str) -> None:
        self.name = name
        self.home = home

    def __get__(self, module: ModuleType, owner: type) -> Any:
        place, _, attribute = self.home.partition(":")
        found = importlib.import_module(place)
        value = getattr(found, attribute) if attribute else found
        self._settle(module, value)
        return value

    def __set__(self, module: ModuleType, value: object) -> None:
        # When the import system loads a subpackage, it sets the attribute of that name on the package.
        if not isinstance(value, ModuleType):
            self._settle(module, value)

    def __delete__(self, module: ModuleType) -> None:
        self._settle(module, None)
        del module.__dict__[self.name]

    def _settle(self, module: ModuleType, value: object) -> None:
        """Make the value an ordinary attribute of the module. The import system does not set it again."""
        importlib.import_module(self.home.partition(":")[0])
        with contextlib.suppress(AttributeError):  # Another thread was first.
            delattr(type(module), self.name)
        module.__dict__[self.name] = value


def _names_of(module: ModuleType, homes: Mapping[str, str]) -> Any:
    def __dir__(_: ModuleType) -> list[str]:  # noqa: N807 (it is the module's)
        return sorted({*vars(module), *homes})

    return __dir__
