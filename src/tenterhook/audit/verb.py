"""``th.audit``: a list of every hook on a model and in the process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias, overload

from torch import nn

from tenterhook._draw import Table, as_html, as_rich, as_text
from tenterhook.address import Selector, resolve
from tenterhook.errors import HookError, SelectorError, SessionError
from tenterhook.pytorch.modes import without_function_modes
from tenterhook.pytorch.support import require

if TYPE_CHECKING:
    from rich.console import Group

    from tenterhook.audit.rows import AuditRow, HookKind, HookRisk

__all__ = ["Audit", "audit"]

Chosen: TypeAlias = "Selector | AuditRow | Callable[[AuditRow], object]"

NOTHING_NAMED = (
    "remove() needs a selector or a kind, and removed nothing. Examples: remove('h.3'), remove('**') for the hooks of "
    "all modules, remove(kind='forward'), remove(lambda found: ...)."
)


class Audit(Sequence["AuditRow"]):
    """The hooks found on a model and in the process at one moment. Printing it draws a table.

    ``select`` returns a part of it, ``remove`` removes hooks, and ``risks`` lists possible problems.
    """

    __slots__ = ("_model", "_rows")

    def __init__(self, model: nn.Module, rows: Iterable[AuditRow]) -> None:
        self._model, self._rows = model, tuple(rows)

    @property
    def model(self) -> nn.Module:
        """The audited model."""
        return self._model

    @property
    def risks(self) -> tuple[tuple[AuditRow, HookRisk], ...]:
        """All pairs of a row and a risk of that row."""
        return tuple((row, risk) for row in self._rows for risk in row.risks)

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[AuditRow]:
        return iter(self._rows)

    @overload
    def __getitem__(self, index: int) -> AuditRow: ...
    @overload
    def __getitem__(self, index: slice) -> Audit: ...
    def __getitem__(self, index: int | slice) -> AuditRow | Audit:
        return Audit(self._model, self._rows[index]) if isinstance(index, slice) else self._rows[index]

    def select(self, *selectors: Chosen, kind: str | Iterable[str] | None = None) -> Audit:
        """Return the rows that match any of the selectors, and the kind.

        Args:
            *selectors: addresses and globs, modules, classes and regexes; rows of this audit; or predicates ``found ->
                bool``. ``**`` selects the rows of all modules, and ``**.weight`` those of all parameters named
                ``weight``. Rows of the process have no address; select them by kind or predicate.
            kind: one kind or several, such as ``"forward"``.
        """
        kinds = _kinds(kind)
        rows = [row for row in self._rows if kinds is None or row.kind in kinds]
        if selectors:
            wanted = {id(row) for selector in selectors for row in self._chosen(selector)}
            rows = [row for row in rows if id(row) in wanted]
        return Audit(self._model, rows)

    def _chosen(self, selector: Chosen) -> list[AuditRow]:
        from tenterhook.audit.rows import AuditRow

        if isinstance(selector, AuditRow):
            return [row for row in self._rows if row is selector]
        if callable(selector) and not isinstance(selector, nn.Module | type):
            ask: Callable[[Any], object] = selector  # type: ignore[assignment]
            return [row for row in self._rows if ask(row)]
        subjects = {
            id(point.module if point.tensor is None else point.tensor) for point in resolve(self._model, selector)
        }
        return [row for row in self._rows if id(_subject(row)) in subjects and row.address]

    def remove(self, *selectors: Chosen, kind: str | Iterable[str] | None = None) -> tuple[AuditRow, ...]:
        """Remove the hooks that ``select`` returns, and return the rows that were removed.

        The effect is that of the ``remove()`` of their handles. Rows that are not plain hooks, such as an instance's
        own forward or a parametrization, are not removed.

        Raises:
            SelectorError: there is neither a selector nor a kind. Nothing is removed.
            SessionError: a selected hook belongs to an open session. Nothing is removed.
            HookError: no selected row is a plain hook. The error names another way to remove the first one.
        """
        if not selectors and kind is None:
            raise SelectorError(NOTHING_NAMED)
        chosen = self.select(*selectors, kind=kind)
        ours = next((row for row in chosen if row.session), None)
        if ours is not None:
            text = f"{_named(ours)} belongs to {ours.session}, which needs it"
            raise SessionError(f"{text}; nothing was removed. Close the session first: session.close()")
        plain = [row for row in chosen if not row.instead]
        if chosen and not plain:
            first = chosen[0]
            raise HookError(f"{_named(first)} is not a removable hook. To remove it: {first.instead}")
        gone = [row for row in plain if row.in_place]
        for row in gone:
            if row.table is not None:
                row.table.remove(row.key)
        return tuple(gone)

    def _table(self) -> Table:
        from tenterhook.audit.audit_table import table

        return table(self._model, self._rows)

    def __str__(self) -> str:
        return as_text(self._table())

    __repr__ = __str__

    def __rich__(self) -> Group:
        return as_rich(self._table())

    def _repr_html_(self) -> str:
        return as_html(self._table())


def audit(model: nn.Module, inputs: Any = None) -> Audit:
    """Return every hook on a model and in the process, with its owner, call order and risks.

    >>> import torch, tenterhook as th
    >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    >>> handle = model[0].register_forward_hook(print)
    >>> found = th.audit(model)
    >>> found[0].address, found[0].kind.value, found[0].who.name, found[0].key == handle.id
    ('0', 'forward', 'print', True)
    >>> len(found.remove("**")), len(th.audit(model))
    (1, 0)

    Args:
        model: any ``nn.Module``.
        inputs: inputs for the model, in order to measure the cost of each hook: a tensor, a tuple of arguments, or a
            dict of keyword arguments. The model runs forward a few times, and backward if its output requires a
            gradient. Parameters, gradients, buffers and random states are restored afterwards. The hooks do run, and
            their side effects elsewhere are not undone.

    Raises:
        SessionError: there are ``inputs``, and a session is open on the model.
    """
    from tenterhook.audit.risks import with_risks
    from tenterhook.audit.scan import scan

    require("listing hooks", "module calls", "modes")
    resolve(model, [])  # Raises an error if it is not a model.
    # An active mode should appear in the audit. It should not intercept the audit's own operations.
    with without_function_modes():
        rows = scan(model)
    if inputs is not None:
        rows = _with_costs(model, inputs, rows)
    with without_function_modes():
        return Audit(model, [_with_silence(row) for row in with_risks(model, rows)])


def _with_costs(model: nn.Module, inputs: Any, rows: list[AuditRow]) -> list[AuditRow]:
    session = next((row.session for row in rows if row.session), None)
    if session is not None:
        text = f"{session} is open and would record the passes that measure costs"
        raise SessionError(f"{text}. Close it first, or call audit without inputs.")
    from tenterhook.audit.cost import measure

    costs = measure(model, inputs, rows)
    return [replace(row, cost=costs.get(row)) for row in rows]


def _with_silence(row: AuditRow) -> AuditRow:
    """Return the row, with a risk added if its hook did not run and no other risk explains why."""
    from tenterhook.audit.risks import NEVER_CALLED, NOT_FIRED

    explained = any(risk.name == NEVER_CALLED.name for risk in row.risks)
    silent = row.cost is not None and row.cost.calls == 0 and not explained
    return replace(row, risks=(*row.risks, NOT_FIRED)) if silent else row


def _subject(row: AuditRow) -> object:
    return row.module if row.tensor is None else row.tensor


def _named(row: AuditRow) -> str:
    return f"the {row.kind} of {row.address!r}" if row.address else f"the {row.kind}"


def _kinds(kind: str | Iterable[str] | None) -> set[HookKind] | None:
    if kind is None:
        return None
    names = [kind] if isinstance(kind, str) else list(kind)
    from tenterhook.audit.rows import HookKind

    known = {each.value: each for each in HookKind}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise SelectorError(f"unknown kind {unknown[0]!r}. The kinds are: {', '.join(known)}.")
    return {known[name] for name in names}
