"""The places inside a function where a value can be reached: names that are bound, calls and operators.

Each has the name by which it is addressed and, where the name comes several times, its number in the order of the
source: ``x`` with ``x[0]``, ``x[1]``; ``softmax()``; ``self.cache``; ``out["x"]``.
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
    """One place: its name, whether it is the result of a call, its number among its namesakes, and where it stands.

    ``key`` finds it again in the tree: the number of the node in the order of a walk, and which target of the node.
    An argument has no node in the body; it stands before the first one.
    """

    name: str
    kind: Kind
    number: int
    line: int
    column: int
    key: tuple[int, int]

    @property
    def text(self) -> str:
        """The name as it is addressed, without the number."""
        return str(Inner(Pattern((self.name,)), is_call=self.kind == "call"))


@functools.lru_cache(maxsize=1024)
def places(code: CodeType, qualname: str) -> tuple[Place, ...]:
    """Every place in a function, in the order of the source."""
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
            # By where it ends: of f(g(x)), g comes first, as it is called first.
            end, column = node.end_lineno or node.lineno, node.end_col_offset or node.col_offset
            found.append((name, "call", end, column, 0, (index, 0)))
    return found


def _arguments(tree: ast.FunctionDef) -> list[ast.arg]:
    given = tree.args
    rest = [each for each in (given.vararg, given.kwarg) if each is not None]
    return [*given.posonlyargs, *given.args, *given.kwonlyargs, *rest]


def walk(tree: ast.FunctionDef) -> list[ast.AST]:
    """The nodes of a function's body, in an order that depends on the source alone."""
    return [node for statement in tree.body for node in ast.walk(statement)]


def bound_names(node: ast.AST) -> list[ast.expr]:
    """What a node binds: names, attributes and subscripts, each as it is written."""
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
    """The name of a call or an operator, as it is addressed without its parentheses."""
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
    """The last name of what is called: ``softmax`` for ``F.softmax`` and for ``x.softmax``."""
    if isinstance(function, ast.Attribute):
        return function.attr
    if isinstance(function, ast.Name):
        return function.id
    if isinstance(function, ast.Subscript | ast.Call):
        return last_name(function.value if isinstance(function, ast.Subscript) else function.func)
    return None
