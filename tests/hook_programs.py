"""Random programs around one module. They use tensors and change them in place, before, in and after its call.

A program runs once without hooks and once with them. Every choice comes from a seed, so both runs are the same.
"""

import dataclasses
import functools
import random

import torch
from torch import nn

from tenterhook import hooks


@dataclasses.dataclass
class Pair:
    one: object
    other: object


class Toy(nn.Module):
    """A module whose forward is chosen by name. It may store its inputs on itself."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.kept = kind, []
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 6, dtype=torch.float64).view(2, 3))

    def forward(self, x, y=None, box=None):
        out = MODULES[self.kind](self, x, y if y is not None else self.weight)
        if box is not None:
            box["seen"].append(x)
        return out


def keeps(self, value):
    self.kept.append(value)
    return value


def changes(x, by=1.5):
    return x.mul_(by)


def in_two(h):
    return h[:, :1], h[:, 1:]


def with_sum(h):
    return h, h.sum()


def added(one, other):
    return one + other


MODULES = {
    "flatten": lambda self, x, y: x.flatten(),
    "unflatten": lambda self, x, y: x.unflatten(1, (3, 1)),
    "transpose": lambda self, x, y: x.t(),
    "slice": lambda self, x, y: x[:, 1:],
    "expand": lambda self, x, y: x.unsqueeze(0).expand(2, 2, 3),
    "identity": lambda self, x, y: x,
    "chunk": lambda self, x, y: x.chunk(3, 1),
    "split": lambda self, x, y: list(x.split([1, 2], 1)),
    "unbind": lambda self, x, y: x.unbind(0),
    "a part of a chunk": lambda self, x, y: x.chunk(3, 1)[1],
    "slices": lambda self, x, y: (x[:, :1], x[:, 1:]),
    "itself beside": lambda self, x, y: (x, x * y),
    "itself in a dict": lambda self, x, y: {"x": x, "more": [x * 2, None]},
    "a view beside": lambda self, x, y: Pair(x.flatten(), (x * y).sin()),
    "itself twice": lambda self, x, y: (x, x),
    "linear": lambda self, x, y: x @ y.t(),
    "product": lambda self, x, y: x * y,
    "two": lambda self, x, y: (x * y, x + 2 * y),
    "two of one": lambda self, x, y: (x * y).unbind(0),
    "views of its own": lambda self, x, y: in_two(x * y),
    "a whole and its sum": lambda self, x, y: with_sum(x * y),
    "keeps its input": lambda self, x, y: keeps(self, x) * y,
    "keeps a view": lambda self, x, y: keeps(self, x[0]).sin() * y,
    "keeps and returns a view": lambda self, x, y: keeps(self, x).view(3, 2),
    "keeps its output": lambda self, x, y: keeps(self, x * y),
    "keeps its outputs": lambda self, x, y: (keeps(self, x * y), keeps(self, (x - y)).t()),
    "changes its input": lambda self, x, y: changes(x) * y,
    "changes a part": lambda self, x, y: (changes(x[:, :1]), x * y)[1],
    "changes and returns it": lambda self, x, y: changes(x),
    "changes and returns a view": lambda self, x, y: changes(x).flatten(),
    "uses and changes": lambda self, x, y: added((x + y).sin(), changes(x)),
    "changes both": lambda self, x, y: (changes(x), (y * 1).add_(x))[1],
    "changes its own": lambda self, x, y: changes(x * y).relu_(),
    "changes a part and returns both": lambda self, x, y: (changes(x[0]), x),
}


def tensors_in(value):
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, Pair):
        value = [value.one, value.other]
    return [t for part in value for t in tensors_in(part)] if isinstance(value, list | tuple) else []


class Program:
    """A call of a toy module among random uses and in-place changes."""

    def __init__(self, seed, kind):
        self.seed, self.kind = seed, kind

    def run(self, register=None, around=None, change=0.4):
        """Return the value of the loss and the gradients of the leaves.

        ``register`` hooks the module, ``around`` calls it, ``change`` is the share of in-place steps.
        """
        draw = random.Random(self.seed)
        torch.manual_seed(self.seed)
        module = Toy(self.kind)
        leaf = torch.randn(2, 6, dtype=torch.float64, requires_grad=True)
        other = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
        base = leaf * 1
        x = {"whole": base[:, :3] * 1, "view": base[:, 1:4], "leaf": leaf[:, :3]}[draw.choice(["whole", "view"])]
        y = draw.choice([None, other * 1, other])
        live, losses = [x, base, *([y] if draw.random() < 0.5 and y is not None and y is not other else [])], []
        call = module
        if register is not None:
            register(module)
        if around is not None:
            call = functools.partial(around, module)
        self._steps(draw, live, losses, draw.randrange(3), change)
        box = {"seen": [x * 2]} if draw.random() < 0.3 else None
        options = {} if box is None else {"box": box}
        ways = [((x,), {}), ((), {"x": x})] if y is None else [((x, y), {}), ((x,), {"y": y}), ((), {"y": y, "x": x})]
        args, kwargs = draw.choice(ways)
        outputs = tensors_in(call(*args, **kwargs, **options))
        live = [*outputs, *outputs, *live, *module.kept, *(box["seen"] if box else []), x[:1], outputs[0][..., :1]]
        self._steps(draw, live, losses, draw.randrange(1, 6), change)
        losses += [(tensor.sin() * 0.7).sum() for tensor in outputs]
        losses.append(x.cos().sum() * draw.choice([0, 0, 1]) + base.sum())
        torch.stack(losses).sum().backward()
        return [torch.stack(losses).sum().detach(), *(t.grad for t in (leaf, other, module.weight))]

    @staticmethod
    def _steps(draw, live, losses, count, often):
        for _ in range(count):
            tensor, step = draw.choice(live), draw.random()
            if step < often:
                change = draw.choice(["mul_", "add_", "part", "no_grad"])
                if change == "part":
                    (tensor[..., :1] if tensor.dim() else tensor).mul_(3)
                elif change == "no_grad":
                    with torch.no_grad():
                        tensor.mul_(1.25)
                else:
                    getattr(tensor, change)(draw.choice([2.0, -0.5]))
            else:
                losses.append((tensor * draw.choice([2.0, 3.0])).sum())


def observe(module, log=None):
    """Register hooks that add what they receive to ``log``."""
    hooks.register_backward_pre_hook(module, lambda m, o: None if log is None else log.append(("pre", o)))
    hooks.register_backward_hook(module, lambda m, i, o: None if log is None else log.append(("post", i, o)))


def edit_input(gradient):
    return None if gradient is None else gradient * 3 + 1


def edit_output(gradient):
    return None if gradient is None else gradient * 2 - 1


def edit(module):
    """Register hooks that change every gradient."""
    hooks.register_backward_pre_hook(module, lambda m, o: tuple(map(edit_output, o)))
    hooks.register_backward_hook(module, lambda m, i, o: tuple(map(edit_input, i)))


class Gradient(torch.autograd.Function):
    """An operation that copies a tensor, and calls a function on its gradient in the backward pass."""

    @staticmethod
    def forward(ctx, tensor, function):
        ctx.function = function
        return tensor.clone()

    @staticmethod
    def backward(ctx, gradient):
        new = ctx.function(gradient)
        return gradient if new is None else new, None


def by_copies(inputs, outputs):
    """Return a function that calls a module on copies, with a gradient function for each copy: hooks, written out."""

    def around(module, *args, **kwargs):
        given, number = [], iter(range(100))

        def copy(value, function):
            if not isinstance(value, torch.Tensor) or not value.requires_grad:
                return value
            new = Gradient.apply(value, functools.partial(function, next(number)))
            given.append((value, new))
            return new

        box = kwargs.pop("box", None)
        args = [copy(value, inputs) for value in args]
        kwargs = {key: copy(value, inputs) for key, value in kwargs.items()}
        if box is not None:
            caller = box["seen"][0]
            box["seen"][0] = copy(caller, inputs)
        versions = [new._version for _, new in given]
        out = module(*args, **kwargs, **({} if box is None else {"box": box}))
        if box is not None:
            box["seen"][0] = caller
        for (value, new), version in zip(given, versions, strict=True):
            if new._version != version:
                value.copy_(new)  # The caller must see the module's in-place change of its input.
        number = iter(range(100))
        return [copy(value, outputs) for value in tensors_in(out)]

    return around
