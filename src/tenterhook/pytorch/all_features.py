"""Every feature with the outcome of its probe, for reports about an installation."""

from __future__ import annotations

import importlib
import pkgutil
from functools import partial

from tenterhook import pytorch
from tenterhook.pytorch.support import FEATURES, Feature, Status

__all__ = ["run_all_probes"]

_FEATURE_OF_FILE = {"dynamo_probe": ("compiled models", "a session in a process that uses torch.compile")}
"""Features whose file is only imported on use, and their users. The report needs them if the import fails."""


def run_all_probes() -> list[Feature]:
    """Run the probes that have not run yet. Return every feature, those that every session needs first.

    The first call in a process imports the compiler, for the probe of compiled models. A file that cannot be imported
    makes its feature unavailable. The other features are still reported.
    """
    loading = [_loading(file.name) for file in pkgutil.iter_modules(pytorch.__path__)]
    broken = {each.name: each for each in loading if each.run() is Status.UNAVAILABLE}
    features = sorted((FEATURES | broken).values(), key=lambda each: each.used_by != "every session")
    for each in features:
        each.run()
    return features


def _loading(file: str) -> Feature:
    """Return a feature whose probe imports a file of this package. The import registers the features in that file."""
    name, used_by = _FEATURE_OF_FILE.get(file, (f"pytorch/{file}.py", ""))
    return Feature(name, used_by, partial(_load, f"{pytorch.__name__}.{file}"), still_works="")


def _load(module: str) -> None:
    importlib.import_module(module)
