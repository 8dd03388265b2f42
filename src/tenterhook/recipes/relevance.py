"""DeepLIFT and layer-wise relevance propagation (LRP): backward passes with a special rule for each layer.

The rules are installed at modules, one for each call, and replace the module's own backward. The operations between the
modules are checked one by one. If an operation would need a rule and has none, the recipe raises an error that names
it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tenterhook as th
from tenterhook.recipes._graph import LINEAR, ROUTES, first_stranger
from tenterhook.recipes._layers import convolve
from tenterhook.recipes._target import Given, Score, Target, baseline_like, differentiable, prepared
from tenterhook.recipes.result import Attribution

__all__ = ["deeplift", "lrp"]

Rule = Literal["epsilon", "z+"]
Back = Callable[[nn.Module, Tensor, Tensor, Tensor], Tensor]
"""returns the gradient of a module's input, from the module, its input, its output and the gradient of the output"""

ELEMENTWISE = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Sigmoid,
    nn.Tanh, nn.Softplus, nn.Softsign, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.LogSigmoid,
)  # fmt: skip
POOLS = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
MEANS = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)
LAYERS = (nn.Linear, *CONVOLUTIONS, *MEANS)
TINY = 1e-10  # below this difference the ratio is meaningless, and the derivative is used


def deeplift(
    model: nn.Module, inputs: Tensor, *, target: Target = None, baseline: Any = None, more: Any = ()
) -> Attribution:
    """DeepLIFT with the rescale rule: each element's contribution to the change of the score from a baseline.

    >>> import torch, tenterhook as th
    >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2)).double()
    >>> found = th.recipes.deeplift(model, torch.ones(1, 3).double(), target=0)
    >>> bool(found.error.abs() < 1e-9)
    True

    The result is correct if every nonlinear operation between the input and the score is an elementwise module
    (``nn.ReLU``, ``nn.GELU``, …) or a max pooling module. Reused and in-place modules are handled call by call. Sums,
    linear layers, batch norms in evaluation mode and reshaping are supported. Shrikumar et al., 2017.

    Args:
        model: an ``nn.Module`` of this kind.
        inputs: the examples, with the batch in front.
        target: as for :func:`tenterhook.recipes.saliency`; use logits, not probabilities.
        baseline: as for :func:`tenterhook.recipes.integrated_gradients`.
        more: as for :func:`tenterhook.recipes.saliency`.

    Returns:
        An :class:`Attribution` with the shape of the input. ``.error`` is the deviation from the change of the score.

    Raises:
        RecipeError: an operation has no rule, such as ``F.relu``, attention or a product of two values.
    """
    given = prepared("deeplift", model, inputs, more)
    x, score = given.x, Score(given, target)
    start = baseline_like(given, baseline, x)
    if target is None:
        with torch.no_grad():
            score.settle(given.run(x))
    rules = {path: _rescaled for path, module in model.named_modules() if isinstance(module, (*ELEMENTWISE, *POOLS))}
    both = torch.arange(given.examples, device=x.device).repeat(2)
    with differentiable(given):
        leaf = torch.cat([x, start]).requires_grad_()
        scores = score(_run(given, leaf, both, rules), both)
        _check(given, scores, leaf, LINEAR, "is neither linear nor a module with a rule")
        slope = torch.autograd.grad(scores[: given.examples].sum(), leaf)[0][: given.examples]
    found = slope * (x - start)
    here, there = scores.detach().chunk(2)
    settings = {"rule": "rescale", "baseline": 0 if baseline is None else baseline}
    return Attribution("DeepLIFT", found, x, score.target, settings, found.flatten(1).sum(1) - (here - there))


def lrp(
    model: nn.Module,
    inputs: Tensor,
    *,
    target: Target = None,
    rule: Rule | Mapping[Any, Rule] = "epsilon",
    epsilon: float = 1e-6,
    more: Any = (),
) -> Attribution:
    """Layer-wise relevance propagation: distribute the score backwards, layer by layer, to the input.

    >>> import torch, tenterhook as th
    >>> layers = [torch.nn.Linear(3, 4, bias=False), torch.nn.ReLU(), torch.nn.Linear(4, 2, bias=False)]
    >>> model, x = torch.nn.Sequential(*layers).double(), torch.ones(1, 3).double()
    >>> found = th.recipes.lrp(model, x, target=0)
    >>> torch.allclose(found.attribution.sum(), model(x)[0, 0], atol=1e-3)
    True

    The result is correct for stacks of linear layers, convolutions, average and max pooling and activations, if all of
    them are modules. Reused and in-place modules are handled call by call. Bach et al., 2015; Montavon et al., 2017.

    Args:
        model: an ``nn.Module`` of this kind.
        inputs: the examples, with the batch in front.
        target: as for :func:`tenterhook.recipes.saliency`.
        rule: ``"epsilon"``; ``"z+"``, which counts only positive contributions to a unit; or a dict of selector to
            rule, as in ``{nn.Conv2d: "z+", "head": "epsilon"}``. Other layers use epsilon.
        epsilon: a number added to denominators, away from zero.
        more: as for :func:`tenterhook.recipes.saliency`.

    Returns:
        An :class:`Attribution` with the shape of the input.

    Raises:
        RecipeError: the model has a sum of two branches (a residual connection), a product, attention or a batch norm.
            These need rules beyond a single module. Fold a batch norm into its convolution with
            ``torch.nn.utils.fusion.fuse_conv_bn_eval``.
    """
    given = prepared("lrp", model, inputs, more)
    x, score = given.x, Score(given, target)
    chosen = _chosen(given, rule)
    rules: dict[str, Back] = {}
    for path, module in model.named_modules():
        if isinstance(module, ELEMENTWISE):
            rules[path] = _passed
        elif isinstance(module, LAYERS):
            rules[path] = _with({"epsilon": _epsilon, "z+": _z_plus}[chosen.get(path, "epsilon")], epsilon)
    with differentiable(given):
        leaf = x.clone().requires_grad_()
        scores = score(_run(given, leaf, None, rules))
        _check(given, scores, leaf, ROUTES, "has no rule that distributes relevance")
        found = torch.autograd.grad(scores, leaf, scores.detach())[0]
    shown = rule if isinstance(rule, str) else "by selector"
    return Attribution("LRP", found, x, score.target, {"rule": shown, "epsilon": epsilon})


# -- rules ------------------------------------------------------------------------------------------------------------


class Ruled(torch.autograd.Function):
    """An identity on a module's output, with a special rule for the gradient of the module's input."""

    @staticmethod
    def forward(ctx: Any, _x: Tensor, leaf: Tensor, output: Tensor, module: nn.Module, back: Back) -> Tensor:
        """Return a copy of the output, which later operations may change in place."""
        # Attributes, because save_for_backward would lose the separate graph of these two.
        ctx.kept, ctx.rule = (leaf, output), (module, back)
        return output.detach().clone()

    @staticmethod
    def backward(ctx: Any, came: Tensor) -> Any:
        """Return the gradient that the rule computes."""
        (leaf, output), (module, back) = ctx.kept, ctx.rule
        return back(module, leaf, output, came), None, None, None, None


def _run(given: Given, x: Tensor, rows: Tensor | None, rules: Mapping[str, Back]) -> Any:
    """Run the model with rules at modules, by path. Modules that this run does not call are left out."""
    try:
        with _ruled(given.model, rules):
            return given.run(x.clone(), rows)
    except th.NeverReached:
        pass
    with torch.no_grad(), th.record(given.model, lambda name, _module: name in rules, copy="never") as tape:
        given.run(x.detach(), rows)
    reached = {address.split("#")[0].removeprefix(":return") for address in tape}
    with _ruled(given.model, {path: back for path, back in rules.items() if path in reached}):
        return given.run(x.clone(), rows)


@contextlib.contextmanager
def _ruled(model: nn.Module, rules: Mapping[str, Back]) -> Iterator[None]:
    """Install rules at modules for the calls inside the block. Each call gets a separate autograd graph."""
    inputs: dict[tuple[nn.Module, int], tuple[Tensor, Tensor]] = {}

    def cut(value: Tensor, ctx: Any) -> Tensor:
        leaf = value.detach().clone().requires_grad_()
        inputs[ctx.module, ctx.call] = value, leaf
        return leaf.clone() if getattr(ctx.module, "inplace", False) else leaf

    def join(back: Back) -> Callable[[Tensor, Any], Tensor]:
        def joined(output: Tensor, ctx: Any) -> Tensor:
            x, leaf = inputs.pop((ctx.module, ctx.call))
            return Ruled.apply(x, leaf, output, ctx.module, back)  # type: ignore[no-any-return, no-untyped-call]

        return joined

    edits: dict[str, Any] = {f"{path}:in": cut for path in rules}
    edits |= {path or ":return": join(back) for path, back in rules.items()}
    with th.edit(model, edits) if edits else contextlib.nullcontext():
        yield


def _rescaled(module: nn.Module, leaf: Tensor, output: Tensor, came: Tensor) -> Tensor:
    """Return the gradient times the ratio of the differences of output and input, instead of the derivative."""
    (here, there), (out, base) = leaf.detach().chunk(2), output.detach().chunk(2)
    gap, came = here - there, came.chunk(2)[0]
    still = gap.abs() < TINY
    if isinstance(module, POOLS):
        # The larger maximum decides: the input's place where the value increased, otherwise the baseline's.
        top = torch.maximum(out, base)
        moved = sum(_pulled(leaf, output, torch.cat([came * (top - base), came * (out - top)])).chunk(2))
        found = torch.where(still, 0, moved / torch.where(still, 1, gap))
    else:
        found = came * (out - base) / torch.where(still, 1, gap)
        if bool(still.any()):
            found = torch.where(still, _pulled(leaf, output, torch.cat([came, came])).chunk(2)[0], found)
    return torch.cat([found, torch.zeros_like(found)])


def _passed(_module: nn.Module, _leaf: Tensor, _output: Tensor, came: Tensor) -> Tensor:
    return came


def _with(shared: Callable[..., Tensor], epsilon: float) -> Back:
    return lambda module, leaf, output, came: shared(module, leaf, output, came, epsilon)


def _epsilon(_module: nn.Module, leaf: Tensor, output: Tensor, came: Tensor, epsilon: float) -> Tensor:
    return _pulled(leaf, output, came / _away(output.detach(), epsilon)) * leaf.detach()


def _z_plus(module: nn.Module, leaf: Tensor, _output: Tensor, came: Tensor, epsilon: float) -> Tensor:
    """Use positive inputs with positive weights, and negative inputs with negative weights."""
    with torch.enable_grad():
        up, down = (leaf.detach().clamp(**side).requires_grad_() for side in ({"min": 0}, {"max": 0}))
        if isinstance(module, MEANS):
            speaks = type(module).forward(module, up) + 0 * down.sum()  # type: ignore[arg-type]
        else:
            weight, bias = (getattr(module, name) for name in ("weight", "bias"))
            positive = bias.detach().clamp(min=0) if bias is not None else None
            speaks = _linear(module, up, weight.detach().clamp(min=0), positive)
            speaks = speaks + _linear(module, down, weight.detach().clamp(max=0), None)
        one, other = torch.autograd.grad(speaks, (up, down), came / _away(speaks.detach(), epsilon))
    return up.detach() * one + down.detach() * other


def _linear(module: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if isinstance(module, nn.Linear):
        return F.linear(x, weight, bias)
    return convolve(module, x, weight, bias)  # type: ignore[arg-type]


def _pulled(leaf: Tensor, output: Tensor, came: Tensor) -> Tensor:
    """Return the gradient that the module's own backward computes."""
    return torch.autograd.grad(output, leaf, came, retain_graph=True)[0]


def _away(value: Tensor, epsilon: float) -> Tensor:
    """Move a denominator away from zero."""
    return value + ((value >= 0).to(value.dtype) * 2 - 1) * epsilon


# -- checks -----------------------------------------------------------------------------------------------------------


def _chosen(given: Given, rule: Any) -> dict[str, Rule]:
    """Return the rule for each module path."""
    by = rule if isinstance(rule, Mapping) else {"**": rule}
    wrong = [each for each in by.values() if each not in ("epsilon", "z+")]
    if wrong:
        raise th.RecipeError(f'lrp: a rule is "epsilon" or "z+"; got {wrong[0]!r}')
    if not isinstance(rule, Mapping):
        return {path: rule for path, _ in given.model.named_modules()}
    return {str(point).removeprefix(":return"): each for selector, each in by.items()
            for point in th.points(given.model, selector)}  # fmt: skip


def _check(given: Given, scores: Tensor, leaf: Tensor, allowed: frozenset[str], why: str) -> None:
    found = first_stranger(scores, leaf, allowed, Ruled.__name__)
    if found is None:
        return
    operation, hint = found
    raise th.RecipeError(
        f"{given.recipe} cannot be right here: between the input and the score, {operation} {why}.\n{hint} "
        "Or use integrated_gradients, which only needs gradients."
    )
