"""The backward pass: its number, the order of recorded operations, and the hooks of a tensor."""

from __future__ import annotations

import threading
from collections.abc import Callable
from operator import methodcaller
from typing import Any

import torch
from torch import Tensor, nn

from tenterhook.pytorch.module_calls import hook_tables_of
from tenterhook.pytorch.names import attribute, find, is_absent, member
from tenterhook.pytorch.support import check, feature

__all__ = [
    "BACKWARD_FUNCTION",
    "OWN_ALIASES",
    "PYTHON_NODE",
    "LightHookTable",
    "call_after_backward",
    "current_backward_id",
    "forget_hooks",
    "is_numbered",
    "is_of_several_views",
    "is_older",
    "is_rebased",
    "keeps_graph",
    "new_backward_id",
    "next_operation_number",
    "operation_number",
    "own_alias",
    "post_accumulate_hooks_of",
    "rebase",
    "sequence_number",
    "set_hooks",
    "size_and_stride",
    "storage_identity",
    "tensor_hooks",
    "view_base",
]

# -- the backward pass that is running ---------------------------------------------------------------------------------

current_backward_id: Callable[[], int] = find("torch._C._current_graph_task_id")
"""Return the number of the backward pass that runs in this thread, or -1."""

_keeps_graph = find("torch._C._autograd._get_current_graph_task_keep_graph")
_engine: Any = find("torch.autograd.Variable._execution_engine")
_run_backward: Any = getattr(_engine, attribute("autograd engine", "run_backward"), None)
attribute("autograd engine", "queue_callback")

# Public from 2.15 on.
call_after_backward: Callable[[Callable[[], None]], None] = getattr(
    torch.autograd.graph, "queue_callback", None
) or getattr(_engine, "queue_callback", _engine)
"""Call a function after the running backward pass has ended."""


def _assume_kept() -> bool:
    return True


keeps_graph: Callable[[], bool] = _assume_kept if is_absent(_keeps_graph) else _keeps_graph
"""Return whether the running backward pass retains its graph. Always True if this release has no such function."""


class _CountingPass(threading.local):
    """A graph with one leaf, for backward passes that only read their own number."""

    def __init__(self) -> None:
        numbers: list[int] = []
        with torch.inference_mode(mode=False):
            self.one = torch.ones((), device="cpu")
            self.leaf = torch.zeros((), device="cpu", requires_grad=True)
        self.leaf.register_hook(lambda _: numbers.append(current_backward_id()))
        self.numbers = numbers


_counting = _CountingPass()


def new_backward_id(counting: _CountingPass = _counting) -> int:
    """Return the number of a new, empty backward pass.

    The engine counts its passes, and only code inside a pass can read the number.
    """
    leaf = (counting.leaf,)
    if _run_backward is None:
        torch.autograd.grad(leaf, leaf, (counting.one,))
    else:  # Like torch.autograd.grad, without its checks, which take longer than the pass.
        _run_backward(leaf, (counting.one,), False, False, leaf, allow_unreachable=False, accumulate_grad=False)
    return counting.numbers.pop()


find("torch.autograd.graph._engine_run_backward")
BACKWARD_FUNCTION = "_engine_run_backward"
"""The name of PyTorch's function that runs a backward pass, as it appears in tracebacks."""

PYTHON_NODE: Any = torch.autograd.function.BackwardCFunction
"""The class of graph nodes that are implemented in Python."""

# -- operations, and when they were recorded ---------------------------------------------------------------------------

next_operation_number: Callable[[], int] = find("torch._C._autograd._get_sequence_nr")
"""Return the sequence number of the next operation that autograd records in this thread."""

attribute("autograd.Node", "_sequence_nr")
attribute("autograd.Node", "_set_sequence_nr")
# Among the operations that are ready, autograd runs the one with the highest number first.
OWN_ALIASES = 1 << 62
"""The number that :func:`own_alias` adds to the sequence number of an alias."""
sequence_number: Callable[[Any], int] = methodcaller("_sequence_nr")
"""Return the sequence number that autograd uses for a recorded operation, see :func:`operation_number`."""


def operation_number(node: Any) -> int:
    """Return the sequence number of a recorded operation. Later operations have higher numbers."""
    number: int = node._sequence_nr()
    return number if number < OWN_ALIASES else number - OWN_ALIASES


def is_numbered(node: Any) -> bool:
    """Return whether an object is an operation that autograd has recorded."""
    return hasattr(node, "_sequence_nr")


def is_older(tensor: Tensor, since: int) -> bool:
    """Return whether a tensor that requires a gradient existed before operation number ``since``."""
    node = tensor.grad_fn
    return node is None or operation_number(node) < since


def own_alias(tensor: Tensor) -> Tensor:
    """Return an alias of a tensor with its own graph node, which separates the gradient of this use of the tensor.

    The backward of the alias runs as soon as it is ready, so that it does not change the order of other operations.
    """
    alias = tensor[...]  # Not view_as: it changes the strides of dimensions of size one, which kernels read.
    node: Any = alias.grad_fn
    if node is not None:
        node._set_sequence_nr(OWN_ALIASES + node._sequence_nr())
    return alias


_unsafe_preserve_version_counter: Any = find("torch.autograd.grad_mode._unsafe_preserve_version_counter")
_creation_of_view: Any = find("torch._C._autograd._get_creation_meta")
_SEVERAL_VIEWS: Any = find("torch._C._autograd.CreationMeta.MULTI_OUTPUT_NODE")


class _Rebase(torch.autograd.Function):
    """An operation that reports an in-place change of its tensors, and does not change them."""

    @staticmethod
    def forward(ctx: Any, see: Callable[[tuple[Any, ...]], tuple[Any, ...]], *given: Tensor) -> Any:
        ctx.see = see
        ctx.mark_dirty(*given)
        ctx.set_materialize_grads(False)  # A gradient of None stays None.
        return given

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        return (None, *ctx.see(gradients))


_REBASED = f"{_Rebase.__name__}Backward"


def rebase(tensors: list[Tensor], see: Callable[[tuple[Any, ...]], tuple[Any, ...]]) -> None:
    """Call ``see`` with the gradients of all later uses of these tensors and their views. Its result replaces them.

    The tensors keep their identity, memory and version, and autograd tracks later in-place changes as usual. The
    tensors must be neither leaves nor views.
    """
    with _unsafe_preserve_version_counter(tuple(tensors)):
        _Rebase.apply(see, *tensors)  # type: ignore[no-untyped-call]


def is_rebased(tensor: Tensor) -> bool:
    """Return whether :func:`rebase` was the last operation that changed this tensor."""
    node = tensor.grad_fn
    return node is not None and node.name() == _REBASED


def is_of_several_views(tensor: Tensor) -> bool:
    """Return whether a tensor is a view from a function such as ``chunk`` or ``unbind``.

    It must not be changed in place.
    """
    if view_base(tensor) is None or not _creation_of_view:
        return False
    return bool(_creation_of_view(tensor) == _SEVERAL_VIEWS)


attribute("AsStridedBackward0", "_saved_size")
attribute("AsStridedBackward0", "_saved_stride")


def size_and_stride(node: Any) -> tuple[Any, Any]:
    """Return the size and strides that were passed to an ``as_strided`` operation."""
    return node._saved_size, node._saved_stride


attribute("Tensor", "_version")  # Read in many files.

# -- tensors -----------------------------------------------------------------------------------------------------------

view_base: Callable[[Tensor], Tensor | None] = member("Tensor", "_base", Tensor)
"""Return the tensor that a view was created from, or None."""

tensor_hooks: Callable[[Tensor], dict[Any, Any] | None] = member("Tensor", "_backward_hooks", Tensor)
"""Return the table of a tensor's gradient hooks, or None if it never had one."""

post_accumulate_hooks_of: Callable[[Tensor], dict[Any, Any] | None] = member(
    "Tensor", "_post_accumulate_grad_hooks", Tensor
)
attribute("autograd.Node", "_register_hook_dict")


class LightHookTable(dict[Any, Any]):
    """A table of tensor hooks that is smaller than PyTorch's OrderedDict and supports weak references."""

    __slots__ = ("__weakref__",)


def _set_hooks_directly(tensor: Tensor, node: Any, hooks: dict[Any, Any]) -> dict[Any, Any]:
    """Set the table of hooks of a tensor without hooks.

    ``node`` is its ``grad_fn``. Return the table that is in use.
    """
    tensor._backward_hooks = hooks
    node._register_hook_dict(tensor)
    return hooks


def _set_hooks_publicly(tensor: Tensor, _node: Any, hooks: dict[Any, Any]) -> dict[Any, Any]:
    """Add hooks to the table that ``register_hook`` creates. Return that table."""
    handle = tensor.register_hook(_no_change)
    table = tensor_hooks(tensor)
    if table is None:
        raise TypeError("Tensor.register_hook has not created a table")  # The probe checks this.
    del table[handle.id]
    table.update(hooks)
    return table


def _no_change(gradient: Any) -> None:
    """Do nothing. As a tensor hook, this changes no gradient."""


# Registering the table of a tensor without hooks crashes the process.
_can_set_directly = hasattr(torch.autograd.graph.Node, "_register_hook_dict") and not is_absent(tensor_hooks)
set_hooks: Callable[[Tensor, Any, dict[Any, Any]], dict[Any, Any]] = (
    _set_hooks_directly if _can_set_directly else _set_hooks_publicly
)


def forget_hooks(tensor: Tensor, table: str) -> None:
    """Remove an empty table of hooks from a tensor: ``_backward_hooks`` or ``_post_accumulate_grad_hooks``."""
    setattr(tensor, table, None)


def storage_identity(tensor: Tensor) -> int:
    """Return a number that is equal for tensors that share memory, and different for all others."""
    return int(tensor.untyped_storage()._cdata)


attribute("UntypedStorage", "_cdata")


# -- probes ------------------------------------------------------------------------------------------------------------


def _leaf() -> Tensor:
    return torch.ones(2, 2, dtype=torch.float64, device="cpu", requires_grad=True)


@feature("backward passes", used_by="every session", still_works="nothing that opens a session")
def probe_backward_passes() -> str | None:
    """Check that code can determine whether it runs inside a backward pass, and in which one."""
    seen: list[int] = []

    def outer(_gradient: Tensor) -> None:
        seen.append(current_backward_id())
        inner = _leaf()
        inner.register_hook(lambda _: seen.append(current_backward_id()))
        with torch.enable_grad():
            (inner * 2).sum().backward()
        seen.append(current_backward_id())

    check(current_backward_id() == -1, "outside of a backward pass its number is not -1")
    leaf = _leaf()
    value = leaf * 2
    value.register_hook(outer)
    value.sum().backward()
    check(current_backward_id() == -1, "after a backward pass its number is not -1")
    check(len(seen) == 3, "tensor hooks do not run once")
    check(seen[0] == seen[2] != seen[1] and -1 not in seen, "nested backward passes cannot be distinguished")
    tensor = torch.ones(2, device="cpu")
    version = tensor._version
    tensor.add_(1)
    check(tensor._version > version, "the version of a tensor does not count changes in place")
    return None


@feature(
    "gradients",
    used_by="recording, editing and watching gradients",
    still_works="recording and editing values",
)
def probe_gradients() -> str | None:
    """Check operation numbers, aliases, views and the tables of tensor hooks."""
    leaf = _leaf()
    first = leaf * 2
    since = next_operation_number()
    second = first * 3
    check(is_older(first, since) and not is_older(second, since), "operation numbers do not grow")
    check(operation_number(second.grad_fn) > operation_number(first.grad_fn), "operation numbers do not grow")
    _probe_alias()
    check(view_base(first[0]) is first and view_base(first) is None, "the base of a view is not known")
    _probe_hooks()
    version = first._version
    first.detach().mul_(2)
    check(first._version > version, "changes in place are not counted")
    _probe_end()
    strided = torch.as_strided(_leaf() * 1, (2,), (1,))
    check(
        tuple(map(tuple, size_and_stride(strided.grad_fn))) == ((2,), (1,)), "the layout of as_strided cannot be read"
    )
    check(
        storage_identity(first) == storage_identity(first[0]) != storage_identity(second),
        "tensors with shared memory cannot be recognised",
    )
    reasons = []
    if set_hooks is _set_hooks_publicly:
        reasons.append("hooks are registered one by one with Tensor.register_hook")
    if keeps_graph is _assume_kept:
        reasons.append("it is unknown whether a backward pass keeps its graph, and assumed that it does")
    return "; ".join(reasons) or None


def _probe_alias() -> None:
    """Check that an alias has its own gradient, and that its backward runs before that of later operations."""
    order: list[str] = []
    leaf = _leaf()
    value = leaf * 2
    alias = own_alias(value)
    later = value * 3
    alias.register_hook(lambda _: order.append("alias"))
    alias.grad_fn.register_hook(lambda *_: order.append("alias ran"))  # type: ignore[union-attr]
    later.grad_fn.register_hook(lambda *_: order.append("later ran"))  # type: ignore[union-attr]
    (alias + later).sum().backward()
    check(order == ["alias", "alias ran", "later ran"], "an alias does not run first in the backward pass")
    check(leaf.grad is not None and bool((leaf.grad == 8).all()), "an alias changes the gradient")
    check(view_base(alias) is value and alias.data_ptr() == value.data_ptr(), "an alias has memory of its own")


def _probe_hooks() -> None:
    """Check that the hooks in a table run in order and can replace gradients."""
    leaf = _leaf()
    value = leaf * 2
    seen: list[float] = []

    def look(gradient: Tensor) -> None:
        seen.append(float(gradient.sum()))

    def double(gradient: Tensor) -> Tensor:
        return gradient * 2

    hooks = LightHookTable(first=look)
    table = set_hooks(value, value.grad_fn, hooks)
    table["second"] = double
    table["third"] = look
    check(tensor_hooks(value) is table, "a tensor's table of hooks has moved")
    value.sum().backward()
    check(seen == [4, 8], "hooks in a tensor's table do not run in order")
    check(leaf.grad is not None and bool((leaf.grad == 4).all()), "a hook cannot replace a gradient")
    check(tensor_hooks(_leaf()) is None, "a tensor without hooks has a table of them")
    check(post_accumulate_hooks_of(_leaf()) is None, "a tensor's table of hooks after accumulation has moved")


@feature(
    "backward hooks",
    used_by="tenterhook.hooks.register_backward_hook and register_backward_pre_hook",
    still_works="sessions that record and edit gradients",
)
def probe_rebase() -> str | None:
    """Check that the gradients of all later uses of a tensor can be seen together, even after in-place changes."""
    leaf = _leaf()
    first, second = leaf.tanh(), leaf * 3
    before, view, version = first * 5, second[0], second._version
    seen: list[Any] = []

    def see(gradients: tuple[Any, ...]) -> tuple[Any, ...]:
        seen.append([float(gradient.sum()) for gradient in gradients])
        return gradients[0] * 0, gradients[1] * 10

    check(not any(hook_tables_of(nn.Module())), "hooks are stored elsewhere")
    rebase([first, second], see)
    check(second._version == version, "the version of a tensor cannot be preserved")
    view.mul_(2)
    (before.sum() * 0 + first.sum() + second.sum()).backward()
    check(seen == [[4, 6]], "the gradients of later uses of tensors cannot be seen together")
    check(
        leaf.grad is not None and leaf.grad.tolist() == [[60, 60], [30, 30]],
        "the gradients of later uses of tensors cannot be replaced",
    )
    part, _ = (leaf * 1).chunk(2)
    check(is_of_several_views(part) and not is_of_several_views(view), "views made together cannot be recognised")
    return None


def _probe_end() -> None:
    """Check that a function is called at the end of a backward pass, and that ``retain_graph`` is known there."""
    leaf, ended, kept = _leaf(), [], []
    value = leaf * 2

    def hook(_gradient: Tensor) -> None:
        kept.append(keeps_graph())
        call_after_backward(lambda: ended.append(leaf.grad is not None))

    value.register_hook(hook)
    value.sum().backward(retain_graph=True)
    value.sum().backward()
    check(ended == [True, True], "no function can be called at the end of a backward pass")
    known = [True, keeps_graph is _assume_kept]
    check(kept == known, "it is unknown whether a backward pass keeps its graph")
    counting = _CountingPass()  # The probe's thread never ends, so `_counting` would keep its tensors for that thread.
    one, other = new_backward_id(counting), new_backward_id(counting)
    check(0 <= one < other, "backward passes are not numbered in order")
