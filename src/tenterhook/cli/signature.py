"""A check of the inputs against the signature of ``forward``, before the run, so that a mistake costs no run."""

from __future__ import annotations

import inspect

from torch import nn

from tenterhook._text import counted
from tenterhook.address.suggest import listed, nearest
from tenterhook.cli.errors import CommandError
from tenterhook.cli.inputs import Inputs
from tenterhook.pytorch.module_calls import forward_pre_hooks_of

__all__ = ["check_call"]

SHAPE = "1x3x64x64"
POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def check_call(model: nn.Module, inputs: Inputs) -> None:
    """Raise :class:`CommandError` if ``forward`` does not accept the inputs, naming missing and extra arguments."""
    signature = _signature(model)
    if signature is None:
        return
    try:
        signature.bind(*inputs.args, **inputs.kwargs)
    except TypeError:
        lines = [_takes(signature), *_missing(signature, inputs), *_too_many(signature, inputs)]
        raise CommandError("\n".join(lines)) from None


def _signature(model: nn.Module) -> inspect.Signature | None:
    """Return the signature of ``forward``, or None if it cannot be known before the call.

    A forward pre-hook or a custom ``__call__`` may change the inputs.
    """
    if forward_pre_hooks_of(model) or type(model).__call__ is not nn.Module.__call__:
        return None
    try:  # A decorator may add arguments, so the signature of the wrapped function is not used.
        return inspect.signature(model.forward, follow_wrapped=False)
    except (TypeError, ValueError):
        return None


def _takes(signature: inspect.Signature) -> str:
    names = [str(each).partition(":")[0].partition("=")[0].strip() for each in signature.parameters.values()]
    return f"the model takes {listed(names) if names else 'no input'}."


def _missing(signature: inspect.Signature, inputs: Inputs) -> list[str]:
    given = {*_positional(signature)[: len(inputs.args)], *inputs.kwargs}
    needed = [name for name, each in signature.parameters.items() if each.default is each.empty]
    missing = [name for name in needed if name not in given and signature.parameters[name].kind not in VARIADIC]
    if not missing:
        return []
    one = len(missing) == 1 and not inputs.kwargs
    example = f"--input {SHAPE}" if one else " ".join(f"--input {name}={SHAPE}" for name in missing)
    return [f"The input {listed(missing)} is missing. Give it, for example {example}"]


def _too_many(signature: inspect.Signature, inputs: Inputs) -> list[str]:
    positional, kinds = _positional(signature), {each.kind for each in signature.parameters.values()}
    lines = []
    if len(inputs.args) > len(positional) and inspect.Parameter.VAR_POSITIONAL not in kinds:
        got = counted(len(inputs.args), "input")
        lines.append(f"Got {got} without a name, but it takes {len(positional)}; leave out the rest.")
    lines += [f"{name} is given twice: without a name, and as {name}=." for name in _twice(signature, inputs)]
    for name in inputs.kwargs if inspect.Parameter.VAR_KEYWORD not in kinds else ():
        if name not in signature.parameters:
            near = nearest(name, signature.parameters)
            lines.append(f"It has no argument {name!r}." + (f" Did you mean {listed(near)}?" if near else ""))
    return lines


def _twice(signature: inspect.Signature, inputs: Inputs) -> list[str]:
    return [name for name in _positional(signature)[: len(inputs.args)] if name in inputs.kwargs]


def _positional(signature: inspect.Signature) -> list[str]:
    return [name for name, each in signature.parameters.items() if each.kind in POSITIONAL]
