"""``th.skip``: do not call a module, and use another value as its output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from tenterhook.address import Point, Site
from tenterhook.edit.ready import Edit
from tenterhook.edit.returned import structure_returned
from tenterhook.engine.action import Context, SkipAction
from tenterhook.errors import EditError, NoSource
from tenterhook.sites.module import MISSING, Argument, argument

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
        self._place = _first_argument(point.module)
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


def _first_argument(module: nn.Module) -> Argument:
    """Return the accessor of the first argument of a module, found once for each class."""
    return argument(module, None) if "forward" in module.__dict__ else _of_class(type(module).forward, module)


def _of_class(forward: Any, module: nn.Module) -> Argument:
    found = _arguments.get(forward)
    if found is None:
        found = _arguments[forward] = argument(module, None)
    return found


_arguments: WeakKeyDictionary[Any, Argument] = WeakKeyDictionary()


def _why_not(module: nn.Module) -> str | None:
    """Return why the first argument cannot be the output of a module, or None if it can."""
    kind = type(module).__name__
    for given, returned in (("in_features", "out_features"), ("in_channels", "out_channels")):
        sizes = _attribute(module, given), _attribute(module, returned)
        if isinstance(sizes[0], int) and isinstance(sizes[1], int) and sizes[0] != sizes[1]:
            return f"{kind} has {given}={sizes[0]} and {returned}={sizes[1]}"
    if isinstance(module, CONVOLUTIONS):
        return None if _keeps_size(module) else f"{kind} changes the size of its input"
    several = isinstance(module, (nn.RNNBase, nn.MultiheadAttention))  # The structure is a better reason.
    if type(module).__module__.startswith("torch.nn.modules") and not several and not _is_same_shape(module):
        return f"the output of {kind} does not have the shape of its input"
    try:
        return structure_returned(module)
    except NoSource as error:
        return f"the source that would show what it returns cannot be read ({error})"


def _attribute(module: nn.Module, name: str) -> Any:
    """Return an attribute or None, without the error of nn.Module for a missing one, which takes long."""
    return getattr(module, name, None) if name in module.__dict__ or hasattr(type(module), name) else None


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
