"""PyTorch as another library may have patched it."""

import functools
import importlib.util
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils import checkpoint as torch_checkpoint

__all__ = ["PATCHES"]


def _call_in_a_wrapper():
    original = nn.Module.__call__

    @functools.wraps(original)
    def call(self, *args, **kwargs):
        return original(self, *args, **kwargs)

    nn.Module.__call__ = call


def _call_without_instance_forwards():
    def call(self, *args, **kwargs):
        return type(self).forward(self, *args, **kwargs)

    nn.Module.__call__ = call


def _call_impl_in_a_wrapper():
    original = nn.Module._call_impl

    def call(self, *args, **kwargs):
        return original(self, *args, **kwargs)

    nn.Module._call_impl = call


def _checkpoint_in_a_wrapper():
    original = torch_checkpoint.checkpoint

    def checkpoint(function, *args, use_reentrant=None, **kwargs):
        return original(function, *args, use_reentrant=use_reentrant, **kwargs)

    torch_checkpoint.checkpoint = checkpoint


class _Recomputes(torch.autograd.Function):
    """A checkpoint as other libraries have one of their own."""

    @staticmethod
    def forward(ctx, function, *args):
        ctx.again, ctx.given = function, args
        with torch.no_grad():
            return function(*args)

    @staticmethod
    def backward(ctx, *gradients):
        given = [each.detach().requires_grad_(each.requires_grad) for each in ctx.given]
        with torch.enable_grad():
            out = ctx.again(*given)
        torch.autograd.backward(out, gradients[0])
        return (None, *(each.grad for each in given))


def _checkpoint_by_another_library():
    def checkpoint(function, *args, use_reentrant=None, **kwargs):
        return _Recomputes.apply(function, *args)

    torch_checkpoint.checkpoint = checkpoint


def _checkpoint_in_another_file():
    """A copy of PyTorch's own, compiled under another file's name; ``torch.utils.checkpoint`` only has its names."""
    spec = importlib.util.find_spec("torch.utils.checkpoint")
    source, elsewhere = Path(spec.origin).read_text(encoding="utf-8"), spec.origin.replace("checkpoint.py", "_other.py")
    code = compile(source, elsewhere, "exec", dont_inherit=True)
    state = {"__name__": "torch.utils._checkpoint", "__file__": code.co_filename}
    module = type(sys)("torch.utils._checkpoint")
    module.__dict__.update(state)
    sys.modules[module.__name__] = module
    exec(code, module.__dict__)
    torch_checkpoint.checkpoint = module.checkpoint
    torch_checkpoint.CheckpointFunction = module.CheckpointFunction


def _register_hook_in_a_wrapper():
    original = torch.Tensor.register_hook

    def register_hook(self, hook):
        return original(self, hook)

    torch.Tensor.register_hook = register_hook


PATCHES = {
    "nn.Module.__call__ in a wrapper": _call_in_a_wrapper,
    "nn.Module.__call__ without instance forwards": _call_without_instance_forwards,
    "nn.Module._call_impl in a wrapper": _call_impl_in_a_wrapper,
    "checkpoint in a wrapper": _checkpoint_in_a_wrapper,
    "checkpoint by another library": _checkpoint_by_another_library,
    "checkpoint of PyTorch moved to another file": _checkpoint_in_another_file,
    "register_hook in a wrapper": _register_hook_in_a_wrapper,
}
