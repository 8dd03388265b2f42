"""Tables that a diagnosis is printed as."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from tenterhook._draw import Column, Row, Style, Table

if TYPE_CHECKING:
    from tenterhook.doctor.features import FeatureStatus
    from tenterhook.doctor.machine import Torch
    from tenterhook.doctor.packages import Package
    from tenterhook.doctor.verb import Diagnosis

__all__ = ["tables"]

MEANINGS = {
    "fallback": "fallback: a slower way is used, with the same results.",
    "unavailable": "unavailable: a session that needs it raises UnsupportedTorch when it starts.",
}
COMMIT_LENGTH = 12


def tables(found: Diagnosis) -> list[Table]:
    """Return one table for each subject. Subjects without rows are left out."""
    made = [
        _versions(found),
        _features(found.features),
        _packages(found.packages),
        _pairs("environment", "variable", "value", found.environment),
        _pairs("functions of PyTorch that were replaced", "function", "replaced by", found.patched),
    ]
    return [table for table in made if table.rows]


def _versions(found: Diagnosis) -> Table:
    torch, python = found.torch, found.python
    tested = f"not tested with tenterhook: {torch.untested}" if torch.untested else "tested"
    rows = {
        "tenterhook": found.tenterhook,
        "Python": f"{python.version} ({python.implementation})",
        "platform": python.platform,
        "torch": f"{torch.version} ({tested})",
        "torch commit": (torch.git or "")[:COMMIT_LENGTH],
        "torch build": _build(torch),
        "GPUs": _gpus(torch),
    }
    return _table("tenterhook doctor", ("", ""), [Row(row) for row in rows.items() if row[1]])


def _build(torch: Torch) -> str:
    if torch.cuda:
        return f"CUDA {torch.cuda}"
    if torch.rocm:
        return f"ROCm {torch.rocm}"
    return torch.accelerator or "CPU only"


def _gpus(torch: Torch) -> str:
    names = ", ".join(f"{each.count} × {each.name}" for each in torch.gpus)
    if torch.devices is None:
        return f"torch failed to count them{f'; on this machine: {names}' if names else ''}"
    if sum(each.count for each in torch.gpus) == torch.devices:
        return names or "none"
    usable = f"{torch.devices} usable by torch ({torch.accelerator})" if torch.devices else "none usable by torch"
    return f"{usable}{f'; on this machine: {names}' if names else ''}"


def _features(features: Sequence[FeatureStatus]) -> Table:
    rows = [
        Row((each.name, each.status, each.used_by, each.why), style=_style(bad=each.status == "unavailable"))
        for each in features
    ]
    counts = Counter(each.status for each in features)
    title = f"features: {', '.join(f'{count} {status}' for status, count in counts.items())}"
    footer = tuple(meaning for status, meaning in MEANINGS.items() if counts[status])
    return _table(title, ("feature", "status", "used by", "why"), rows, footer)


def _packages(packages: Sequence[Package]) -> Table:
    shown = [each for each in packages if each.version or each.required]
    rows = [
        Row((each.name, each.version or "missing", _part(each), each.needs), style=_style(bad=each.version is None))
        for each in shown
    ]
    absent = [f"{each.name} ({_part(each)})" for each in packages if each not in shown]
    footer = (f"not installed: {', '.join(absent)}",) if absent else ()
    return _table("packages", ("package", "version", "installed by", "needs"), rows, footer)


def _style(*, bad: bool) -> Style:
    return "strong" if bad else ""


def _part(package: Package) -> str:
    if package.required:
        return "tenterhook"
    return f"tenterhook[{package.extra}]" if package.extra else ""


def _pairs(title: str, left: str, right: str, pairs: Mapping[str, str]) -> Table:
    return _table(title, (left, right), [Row(pair) for pair in pairs.items()])


def _table(title: str, columns: tuple[str, ...], rows: list[Row], footer: tuple[str, ...] = ()) -> Table:
    return Table(title, tuple(Column(each) for each in columns), tuple(rows), footer)
