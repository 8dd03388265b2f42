"""``th.skip``: do not call a module, and use another value as its output."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from tenterhook.address import Point, Site
from tenterhook.address.functions import forward_of
from tenterhook.address.source import read_source
from tenterhook.edit.ready import Edit
from tenterhook.engine.action import Context, SkipAction
from tenterhook.errors import EditError, NoSource
from tenterhook.sites.module import MISSING, argument

__all__ = ["Skip", "SkipEdit"]

GIVE = (
    "Give the output to use instead: th.skip(value), or th.skip(lambda x: ...), which gets the arguments of the call."
)
NOT_OUTPUT = "{point}: th.skip() skips a module, and this is not the output of one. Write {path!r}."
ALONE = "th.skip() replaces a whole call, so that at= and part= have no meaning here. Leave them out."
ONLY_EDIT = "th.skip() does not fit here: it is for values at the outputs of modules, in th.edit and th.sweep."

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
# The modules of torch.nn whose output has the shape of their input; besides these, those in the files named below.
SAME_SHAPE = (
    nn.GroupNorm, nn.Identity, nn.LayerNorm, nn.Linear, nn.LocalResponseNorm, nn.RMSNorm, nn.Sequential,
    nn.TransformerDecoder, nn.TransformerDecoderLayer, nn.TransformerEncoder, nn.TransformerEncoderLayer,
)  # fmt: skip
SAME_SHAPE_FILES = tuple(f"torch.nn.modules.{name}" for name in ("activation", "batchnorm", "dropout", "instancenorm"))


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Skip(Edit):
    """Do not call the module. Its output is its first argument, or ``value``.

    ``value`` is a tensor, a structure of tensors, or a function that gets the arguments of the call.
    """

    value: Any = None

    def __post_init__(self) -> None:
        if self.at is not None or self.part is not None:
            raise EditError(ALONE)

    def change(self, tensor: Tensor, context: Context) -> Tensor:  # noqa: ARG002
        raise EditError(ONLY_EDIT)

    def __repr__(self) -> str:
        return "th.skip()" if self.value is None else super(Skip, self).__repr__()


class SkipEdit(SkipAction):
    """The action that uses another value as a module's output, without calling the module."""

    observes = False
    again = True
    reached = False

    def __init__(self, skip: Skip, point: Point) -> None:
        if point.site is not Site.RETURN:
            raise EditError(NOT_OUTPUT.format(point=point, path=point.path or ":return"))
        self._value = skip.value
        self._place = argument(point.module, None)
        if skip.value is None and (reason := _why_not(point.module)):
            raise EditError(f"{point} cannot be skipped as it is: {reason}.\n{GIVE}")

    def output(self, args: tuple[Any, ...], kwargs: dict[str, Any], context: Context) -> Any:
        """Return the value to use as the output of a call with these arguments."""
        value = self._value
        if isinstance(value, Callable) and not isinstance(value, nn.Module):  # type: ignore[arg-type]
            return value(*args, **kwargs)
        if value is not None:
            return value
        found = self._place.get(args, kwargs)
        if found is MISSING:
            raise EditError(f"{context.address!r} was called without arguments, so no input can be its output.\n{GIVE}")
        return found

    def __call__(self, value: Any, context: Context) -> Any:  # noqa: ARG002
        self.reached = True
        return value


def _why_not(module: nn.Module) -> str | None:
    """Return why the first argument cannot be the output of a module, or None if it can."""
    kind = type(module).__name__
    if isinstance(module, (nn.RNNBase, nn.MultiheadAttention)):
        return f"{kind} returns a tuple"
    for given, returned in (("in_features", "out_features"), ("in_channels", "out_channels")):
        sizes = getattr(module, given, None), getattr(module, returned, None)
        if isinstance(sizes[0], int) and isinstance(sizes[1], int) and sizes[0] != sizes[1]:
            return f"{kind} has {given}={sizes[0]} and {returned}={sizes[1]}"
    if isinstance(module, CONVOLUTIONS):
        return None if _keeps_size(module) else f"{kind} changes the size of its input"
    if type(module).__module__.startswith("torch.nn.modules") and not _is_same_shape(module):
        return f"the output of {kind} does not have the shape of its input"
    return _returns_several(module)


def _keeps_size(conv: nn.Conv1d | nn.Conv2d | nn.Conv3d) -> bool:
    if any(step != 1 for step in conv.stride):
        return False
    if isinstance(conv.padding, str):
        return conv.padding == "same"
    spread = zip(conv.padding, conv.dilation, conv.kernel_size, strict=True)
    return all(2 * padding == dilation * (size - 1) for padding, dilation, size in spread)


def _is_same_shape(module: nn.Module) -> bool:
    in_file = type(module).__module__ in SAME_SHAPE_FILES and not isinstance(module, nn.GLU)
    return in_file or isinstance(module, SAME_SHAPE)


def _returns_several(module: nn.Module) -> str | None:
    """Return a reason if the source of a forward shows that it returns a tuple, a dict or nothing."""
    try:
        function = forward_of(module)
        if function not in _reasons:
            _reasons[function] = _structure_returned(function)
    except NoSource as error:
        return f"the source that would show what it returns cannot be read ({error})"
    reason = _reasons[function]
    return f"{type(module).__name__} {reason}" if reason is not None else None


_reasons: WeakKeyDictionary[FunctionType, str | None] = WeakKeyDictionary()


def _structure_returned(function: FunctionType) -> str | None:
    tree = read_source(function.__code__, function.__qualname__).tree
    returned = [node.value for node in _own_nodes(tree) if isinstance(node, ast.Return)]
    for value in returned:
        if value is None or (isinstance(value, ast.Constant) and value.value is None):
            return "may return None"
        named = [bound for target, bound in _assignments(tree) if isinstance(value, ast.Name) and target == value.id]
        if any(_is_structure(each, function.__globals__) for each in (value, *named)):
            return f"returns a structure ({ast.unparse(value)}), and its input is one value of it"
    return None if returned else "returns nothing"


def _is_structure(value: ast.AST, names: dict[str, Any]) -> bool:
    """Return whether an expression makes a tuple, a dict, or an object of another class than a tensor."""
    if isinstance(value, ast.BinOp):
        return _is_structure(value.left, names) or _is_structure(value.right, names)
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name):
        made = names.get(value.func.id, getattr(builtins, value.func.id, None))
        return isinstance(made, type) and not issubclass(made, Tensor)
    return isinstance(value, (ast.Tuple, ast.List, ast.Dict))


def _assignments(tree: ast.FunctionDef) -> Iterator[tuple[str, ast.expr]]:
    """Yield the target and the value of each assignment in a function."""
    for node in _own_nodes(tree):
        if isinstance(node, ast.Assign):
            yield from ((ast.unparse(target), node.value) for target in node.targets)
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign)) and node.value is not None:
            yield ast.unparse(node.target), node.value


def _own_nodes(tree: ast.FunctionDef) -> Iterator[ast.AST]:
    """Yield the nodes of a function without those of functions inside it."""
    stack: list[ast.AST] = list(tree.body)
    while stack:
        node = stack.pop()
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
            stack.extend(ast.iter_child_nodes(node))
