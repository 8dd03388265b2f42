"""The sources of models. Each lists names with families, and builds a case for a name."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from zoo import hugging, own, vision
from zoo.case import Case

__all__ = ["SOURCES", "Source", "installed", "load"]


@dataclass(frozen=True)
class Source:
    """A library of models."""

    package: str
    names: Callable[[], Iterator[tuple[str, str]]]
    build: Callable[[str], Case]


SOURCES = {
    "own": Source("torch", own.names, own.build),
    "transformers": Source("transformers", hugging.names, hugging.build),
    "torchvision": Source("torchvision", vision.torchvision_names, vision.build_torchvision),
    "timm": Source("timm", vision.timm_names, vision.build_timm),
}


def installed(source: Source) -> bool:
    """Return whether the library is installed."""
    return importlib.util.find_spec(source.package) is not None


def load(source: Source) -> None:
    """Import the modules that every model of the source needs, once, before processes are forked."""
    vision.prepare_torchvision()  # Other libraries import it if it is installed.
    if source.package == "transformers":
        hugging.load()
