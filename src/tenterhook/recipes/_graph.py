"""Checks of the autograd graph between an input and a score: the first operation that a rule does not cover."""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor

__all__ = ["LINEAR", "ROUTES", "first_stranger"]

# Operations that copy, move or drop elements: a gradient goes back to the element that it belongs to.
_ROUTES = """
    View UnsafeView ReshapeAlias Permute Transpose T Slice Select Squeeze Unsqueeze Expand Cat Stack Clone Alias
    ConstantPadNd Index IndexSelect Gather Split SplitWithSizes Unbind Flip Roll CopyBackwards CopySlices AsStrided
    MaxPool2DWithIndices MaxPool3DWithIndices Relu AccumulateGrad ToCopy SqueezeDims Narrow Detach
    """
ROUTES = frozenset(_ROUTES.split())
# Operations that are linear in the input, unless both factors of a product depend on it.
_LINEAR = """
    Add Sub Neg Mean Sum AvgPool2D AvgPool3D AdaptiveAvgPool2D AdaptiveAvgPool3D MkldnnAdaptiveAvgPool2D Repeat
    UpsampleNearest2D UpsampleBilinear2D ReflectionPad2D ReplicationPad2D NativeBatchNorm CudnnBatchNorm Rsub
    Mul Mm Bmm Addmm Baddbmm Convolution MkldnnConvolution Linear Mv Div Cumsum PixelShuffle
    """
LINEAR = ROUTES - {"Relu", "MaxPool2DWithIndices", "MaxPool3DWithIndices"} | frozenset(_LINEAR.split())
PRODUCTS = {"Mul", "Mm", "Bmm", "Addmm", "Baddbmm", "Convolution", "MkldnnConvolution", "Linear", "Mv", "Div"}

HINTS = {
    "Relu": "Use an nn.ReLU module in place of F.relu or torch.relu.",
    "Softmax": "Explain logits and not probabilities; attention has no such rule.",
    "LogSoftmax": "Explain logits and not probabilities.",
    "NativeBatchNorm": "Fold it into the layer before it (torch.nn.utils.fusion.fuse_conv_bn_eval), in eval mode.",
    "Add": "Two branches meet there (a residual connection), and no module's rule divides the result between them.",
}


def first_stranger(scores: Tensor, leaf: Tensor, allowed: frozenset[str], own: str) -> tuple[str, str] | None:
    """Return the first operation between the leaf and the scores that is not allowed, and a hint; None if all are.

    ``own`` is the prefix of the names of nodes that already have a rule.
    """
    leads = _leading(scores.grad_fn, leaf)
    for node, yes in leads.items():
        name = _short(node)
        if not yes or node.name().startswith(own):
            continue
        operands = [before for before, _ in node.next_functions if before is not None and leads.get(before)]
        if name not in allowed or (name in PRODUCTS and _multiplies(node, name, operands, leads)):
            return _words(name, len(operands)), HINTS.get(name, "Use a module that has a rule instead.")
        if name in ("NativeBatchNorm", "CudnnBatchNorm") and getattr(node, "_saved_training", True):
            return "a batch norm in training mode", HINTS["NativeBatchNorm"]
    return None


def _multiplies(node: Any, name: str, operands: list[Any], leads: dict[Any, bool]) -> bool:
    """Return True if a node multiplies or divides two values that both depend on the input."""
    if name == "Div":
        return len(node.next_functions) > 1 and bool(leads.get(node.next_functions[1][0]))
    factors = node.next_functions[1:] if name in ("Addmm", "Baddbmm") else node.next_functions
    return sum(bool(leads.get(before)) for before, _ in factors) > 1 or (name == "Mul" and len(operands) > 1)


def _leading(top: Any, leaf: Tensor) -> dict[Any, bool]:
    """Return, for every node of the graph, True if the leaf is among its ancestors."""
    leads: dict[Any, bool] = {}
    todo: list[tuple[Any, bool]] = [(top, False)]
    while todo:
        node, after = todo.pop()
        if node is None or (node in leads and not after):
            continue
        before = [each for each, _ in node.next_functions if each is not None]
        if after:
            leads[node] = getattr(node, "variable", None) is leaf or any(leads.get(each) for each in before)
        else:
            leads[node] = False
            todo += [(node, True), *((each, False) for each in before)]
    return leads


def _short(node: Any) -> str:
    return re.sub(r"Backward\d*$", "", node.name().rpartition("::")[2])


def _words(name: str, operands: int) -> str:
    if name == "Add" and operands > 1:
        return "a sum of two branches"
    if name in PRODUCTS and operands > 1:
        return f"a product of two values that both come from the input ({name})"
    return f"the operation {name!r}"
