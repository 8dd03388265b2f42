"""Versions of other packages, and the versions that tenterhook needs. No package is imported."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata

__all__ = ["Package", "packages"]

OTHERS = (
    "accelerate", "bitsandbytes", "deepspeed", "lightning", "numpy", "peft", "safetensors", "scikit-learn", "timm",
    "torchao", "torchvision", "transformers", "triton", "vllm", "wandb",
)  # fmt: skip
"""Packages to report if they are installed. No extra of tenterhook installs them, or the extras are not known."""

FOR_DEVELOPERS = frozenset({"bench", "dev", "docs"})
_REQUIREMENT = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)\s*(?:\[[^]]*\])?\s*([^;]*)")
_EXTRA = re.compile(r"extra\s*==\s*['\"]([^'\"]+)['\"]")


@dataclass(frozen=True, slots=True)
class Package:
    """A package, with its version if it is installed."""

    name: str
    version: str | None
    extra: str = ""
    """the extra of tenterhook that installs it"""
    required: bool = False
    """True if every installation of tenterhook includes it"""
    needs: str = ""
    """the versions that tenterhook accepts, such as ``>=0.8``"""


def packages() -> tuple[Package, ...]:
    """Return the packages that tenterhook and its extras need, and other related packages that are installed."""
    known = {each.name: each for each in _required()}
    others = (Package(name, version) for name in OTHERS if name not in known and (version := _version(name)))
    return tuple(sorted([*known.values(), *others], key=lambda each: each.name))


def _required() -> Iterator[Package]:
    """Yield the requirements of tenterhook's metadata. Yield nothing if no package manager installed tenterhook."""
    found: dict[str, tuple[set[str], str]] = {}
    for text in _requirements():
        parsed = _REQUIREMENT.match(text)
        extra = _EXTRA.search(text)
        if parsed is None or (extra and extra[1] in FOR_DEVELOPERS):
            continue
        name = re.sub(r"[-_.]+", "-", parsed[1]).lower()
        extras, needs = found.setdefault(name, (set(), parsed[2].strip(" ()")))
        extras.add(extra[1] if extra else "")
    for name, (extras, needs) in found.items():
        if name != "torch":
            shown = "" if "" in extras else ", ".join(sorted(extras))
            yield Package(name, _version(name), shown, "" in extras, needs)


def _requirements() -> list[str]:
    try:
        return metadata.requires("tenterhook") or []
    except metadata.PackageNotFoundError:
        return []


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except (metadata.PackageNotFoundError, KeyError):  # KeyError: an uninstall failed and left incomplete metadata.
        return None
