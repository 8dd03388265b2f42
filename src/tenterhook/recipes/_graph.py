"""What lies between a score and an input: which operations can be followed, and the first that cannot."""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor

__all__ = ["LINEAR", "ROUTES", "first_stranger"]

# Operations that hand each element on as it is, or not at all: what comes back goes where it came from.
_ROUTES = """
    View UnsafeView ReshapeAlias Permute Transpose T Slice Select Squeeze Unsqueeze Expand Cat Stack Clone Alias
    ConstantPadNd Index IndexSelect Gather Split SplitWithSizes Unbind Flip Roll CopyBackwards CopySlices AsStrided
    MaxPool2DWithIndices MaxPool3DWithIndices Relu AccumulateGrad ToCopy SqueezeDims Narrow Detach
    """
ROUTES = frozenset(_ROUTES.split())
# And operations that are linear in what comes from the input, if they do not multiply it with itself.
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
    "Add": "Two branches meet there (a residual connection), and how they share is no module's rule.",
}


def first_stranger(scores: Tensor, leaf: Tensor, allowed: frozenset[str], own: str) -> tuple[str, str] | None:
    """The first operation between the scores and the leaf that is not allowed, and a hint; None if there is none."""
    leads = _leading(scores.grad_fn, leaf)
    for node, yes in leads.items():
        name = _short(node)
        if not yes or node.name().startswith(own):
            continue
        operands = [before for before, _ in node.next_functions if before is not None and leads.get(before)]
        if name not in allowed or (name in PRODUCTS and _multiplies(node, name, operands, leads)):
            return _words(name, len(operands)), HINTS.get(name, "Give it a module of its own that has a rule.")
        if name in ("NativeBatchNorm", "CudnnBatchNorm") and getattr(node, "_saved_training", True):
            return "a batch norm in training mode", HINTS["NativeBatchNorm"]
    return None


def _multiplies(node: Any, name: str, operands: list[Any], leads: dict[Any, bool]) -> bool:
    """Whether what comes from the input is multiplied with, or divides, what comes from it."""
    if name == "Div":
        return len(node.next_functions) > 1 and bool(leads.get(node.next_functions[1][0]))
    factors = node.next_functions[1:] if name in ("Addmm", "Baddbmm") else node.next_functions
    return sum(bool(leads.get(before)) for before, _ in factors) > 1 or (name == "Mul" and len(operands) > 1)


def _leading(top: Any, leaf: Tensor) -> dict[Any, bool]:
    """Of every operation of a graph, from the top: whether it leads to the leaf."""
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
