"""Random models, and the wrappers that people put around models."""

import contextlib
import random
import sys
import types

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

WIDTH = 3
# Names that wrappers use too: a model may have them as its own.
NAMES = ("a", "b", "layers", "module", "model", "_orig_mod", "base_model", "first", "last")


class Chain(nn.Module):
    """Calls its children in an order of its own, some of them twice, and has a parameter."""

    def __init__(self, draw, depth):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        names = draw.sample(NAMES, draw.randint(1, 3))
        for name in names:
            self.add_module(name, tree(draw, depth - 1))
        self.order = draw.sample(names, len(names)) + ([draw.choice(names)] if draw.random() < 0.3 else [])

    def forward(self, x):
        for name in self.order:
            x = torch.tanh(self.get_submodule(name)(x)) * self.scale
        return x


def tree(draw, depth):
    return Chain(draw, depth) if depth > 0 and draw.random() < 0.7 else nn.Linear(WIDTH, WIDTH)


def random_model(seed):
    torch.manual_seed(seed)
    return Chain(random.Random(seed), 3)


@contextlib.contextmanager
def peft():
    """Stand-ins for peft's classes, under the names by which they are known."""
    model, tuner = types.ModuleType("peft.peft_model"), types.ModuleType("peft.tuners.tuners_utils")

    class BaseTuner(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.model = inner

        def forward(self, *args, **kwargs):
            return self.model.forward(*args, **kwargs)

    class PeftModel(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.base_model = BaseTuner(inner)

        def forward(self, *args, **kwargs):
            return self.base_model(*args, **kwargs)

    model.PeftModel, tuner.BaseTuner = PeftModel, BaseTuner
    before = {name: sys.modules.get(name) for name in (model.__name__, tuner.__name__)}
    sys.modules |= {model.__name__: model, tuner.__name__: tuner}
    try:
        yield PeftModel
    finally:
        for name, was in before.items():
            if was is None:
                del sys.modules[name]
            else:
                sys.modules[name] = was


def compiled(module):
    made = torch.compile(module, backend="eager")
    return made if isinstance(made, nn.Module) else module  # Compiled a second time, it is a function.


WRAPPERS = {
    "compile": compiled,
    "data parallel": nn.DataParallel,
    "averaged": torch.optim.swa_utils.AveragedModel,
    "checkpoint": checkpoint_wrapper,
}


def wrapped(model, draw, ways):
    """Wrap some parts of a model, and the model itself, some of them several times; gives it and what was used."""
    used = []
    parents = [(module, name) for module in model.modules() for name, _ in module.named_children()]
    for parent, name in draw.sample(parents, min(len(parents), draw.randint(0, 2))):
        way = draw.choice([way for way in ways if way != "averaged"])
        setattr(parent, name, ways[way](getattr(parent, name)))
        used.append(way)
    for _ in range(draw.randint(0 if used else 1, 2)):
        way = draw.choice([way for way in ways if way != "checkpoint"])
        model = ways[way](model)
        used.append(way)
    return model, used
