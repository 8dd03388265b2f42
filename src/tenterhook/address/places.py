"""The places inside a function where a value can be read: assigned names, calls and operators.

Each place has a name. If the name occurs several times, the place also has a number, in the order of the source: ``x``
with ``x[0]``, ``x[1]``; ``softmax()``; ``self.cache``; ``out["x"]``.
"""

from __future__ import annotations

import ast
import functools
from dataclasses import dataclass
from types import CodeType
from typing import Literal

from tenterhook.address.grammar import Inner, Pattern
from tenterhook.address.source import read_source

__all__ = ["Place", "bound_names", "last_name", "places"]

Kind = Literal["name", "call", "argument"]

OPERATORS: dict[type[ast.AST], str] = {
    ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.MatMult: "matmul", ast.Div: "truediv", ast.Mod: "mod",
    ast.FloorDiv: "floordiv", ast.Pow: "pow", ast.LShift: "lshift", ast.RShift: "rshift", ast.BitAnd: "and_",
    ast.BitOr: "or_", ast.BitXor: "xor", ast.USub: "neg", ast.UAdd: "pos", ast.Invert: "invert", ast.Eq: "eq",
    ast.NotEq: "ne", ast.Lt: "lt", ast.LtE: "le", ast.Gt: "gt", ast.GtE: "ge",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Place:
    """One place: its name, its kind, its number among places of the same name, and its position in the source.

    ``key`` identifies the place in the syntax tree: the index of the node in the walk, and the index of the target
    within the node. An argument has no node in the body and uses the index -1.
    """

    name: str
    kind: Kind
    number: int
    line: int
    column: int
    key: tuple[int, int]

    @property
    def text(self) -> str:
        """The name as written in an address, without the number."""
        return str(Inner(Pattern((self.name,)), is_call=self.kind == "call"))


@functools.lru_cache(maxsize=1024)
def places(code: CodeType, qualname: str) -> tuple[Place, ...]:
    """Return every place in a function, in the order of the source."""
    found = sorted(_found(read_source(code, qualname).tree), key=lambda item: item[2:5])
    counts: dict[tuple[str, Kind], int] = {}
    result = []
    for name, kind, line, column, _, key in found:
        number = counts.get((name, kind), 0)
        counts[name, kind] = number + 1
        result.append(Place(name, kind, number, line, column, key))
    return tuple(result)


Found = tuple[str, Kind, int, int, int, tuple[int, int]]


def _found(tree: ast.FunctionDef) -> list[Found]:
    found: list[Found] = [
        (each.arg, "argument", each.lineno, each.col_offset, 0, (-1, number))
        for number, each in enumerate(_arguments(tree))
    ]
    for index, node in enumerate(walk(tree)):
        for place, target in enumerate(bound_names(node)):
            found.append((ast.unparse(target), "name", target.lineno, target.col_offset, place, (index, place)))
        name = call_name(node)
        if name is not None and isinstance(node, ast.expr):
            # Calls are ordered by their end: in f(g(x)), g comes first because it is called first.
            end, column = node.end_lineno or node.lineno, node.end_col_offset or node.col_offset
            found.append((name, "call", end, column, 0, (index, 0)))
    return found


def _arguments(tree: ast.FunctionDef) -> list[ast.arg]:
    given = tree.args
    rest = [each for each in (given.vararg, given.kwarg) if each is not None]
    return [*given.posonlyargs, *given.args, *given.kwonlyargs, *rest]


def walk(tree: ast.FunctionDef) -> list[ast.AST]:
    """Return the nodes of a function's body, in an order that depends only on the source."""
    return [node for statement in tree.body for node in ast.walk(statement)]


def bound_names(node: ast.AST) -> list[ast.expr]:
    """Return the targets that a node binds: names, attributes and subscripts, as written."""
    if isinstance(node, ast.Assign):
        return [leaf for target in node.targets for leaf in _leaves(target)]
    if isinstance(node, ast.AugAssign | ast.For | ast.comprehension):
        return _leaves(node.target)
    if isinstance(node, ast.NamedExpr) or (isinstance(node, ast.AnnAssign) and node.value is not None):
        return _leaves(node.target)
    if isinstance(node, ast.With):
        return [leaf for item in node.items if item.optional_vars is not None for leaf in _leaves(item.optional_vars)]
    if isinstance(node, ast.match_case):
        return _captures(node.pattern)
    return []


def _leaves(target: ast.expr) -> list[ast.expr]:
    if isinstance(target, ast.Tuple | ast.List):
        return [leaf for part in target.elts for leaf in _leaves(part)]
    if isinstance(target, ast.Starred):
        return _leaves(target.value)
    return [target]


def _captures(pattern: ast.pattern) -> list[ast.expr]:
    names = []
    for node in ast.walk(pattern):
        name = getattr(node, "name", None) or getattr(node, "rest", None)
        if isinstance(node, ast.MatchAs | ast.MatchStar | ast.MatchMapping) and name:
            names.append(ast.copy_location(ast.Name(id=name, ctx=ast.Store()), node))
    return list(names)


def call_name(node: ast.AST) -> str | None:
    """Return the name of a call or an operator as used in an address, without parentheses."""
    if isinstance(node, ast.Call):
        return last_name(node.func)
    if isinstance(node, ast.UnaryOp) and isinstance(node.operand, ast.Constant):
        return None  # -1 is a number, not an operation.
    if isinstance(node, ast.BinOp | ast.UnaryOp):
        return OPERATORS.get(type(node.op))
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        return OPERATORS.get(type(node.ops[0]))
    return None


def last_name(function: ast.expr) -> str | None:
    """Return the last name of a called expression: ``softmax`` for ``F.softmax`` and for ``x.softmax``."""
    if isinstance(function, ast.Attribute):
        return function.attr
    if isinstance(function, ast.Name):
        return function.id
    if isinstance(function, ast.Subscript | ast.Call):
        return last_name(function.value if isinstance(function, ast.Subscript) else function.func)
    return None
