"""Random small models, for all four users of gradients: record, edit, watch and hooks.

A model is a chain of modules in containers. A container returns the very tensor of its last child; some children return
views, or their input. The caller of a container may use its result twice or change it in place, in a way that reading
its source does not show. The truth is an unrolled model, without any in-place operation, in which each value at each
point has a copy of its own.
"""

import operator
import warnings

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import tenterhook as th

WIDTH = 4


class Apply(nn.Module):
    def __init__(self, run):
        super().__init__()
        self.run = run

    def forward(self, x):
        return self.run(x)


class First(nn.Module):
    """It returns its child's output in a tuple, as attention does without weights."""

    def __init__(self, child):
        super().__init__()
        self.child = child

    def forward(self, x):
        return self.child(x), None


KINDS = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "view": lambda: Apply(lambda x: (x.contiguous() * 2).view(-1).view(-1, WIDTH)),
    "turned": lambda: Apply(lambda x: (x * 2).t().contiguous().t()),
    "slice": lambda: Apply(lambda x: torch.cat([x * 3, x], 1)[:, 1 : WIDTH + 1]),
    "one example": lambda: Apply(lambda x: (x * 2).unsqueeze(0).sin()[0]),
    "identity": nn.Identity,
    "dropout": lambda: nn.Dropout(0.5),
    "two": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Identity()),
}
# What the caller of a container does with its result: as it is, and without in-place operations.
CHANGES = [getattr(torch.Tensor, name + chr(95)) for name in ("mul", "tanh")]
USES = {
    "": (lambda y, x: y, lambda y, x: y),
    "twice": (lambda y, x: y * 2 + y.sin(), lambda y, x: y * 2 + y.sin()),
    "residual": (lambda y, x: y.cos() + x * 3, lambda y, x: y.cos() + x * 3),
    "changed": (lambda y, x: CHANGES[0](y, 3) + 0, lambda y, x: y * 3),
    "read, changed": (lambda y, x: operator.add(y * 2, CHANGES[1](y)), lambda y, x: y * 2 + y.tanh()),
}
PASS_ON = {"identity", "dropout"}  # A change in place of their result changes their input too.


class Model(nn.Module):
    def __init__(self, plan):
        super().__init__()
        self.begin = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList()
        for kinds, shape, use, _ in plan:
            inner = nn.Sequential(*[KINDS[kind]() for kind in kinds])
            self.blocks.append({"plain": nn.Sequential, "tuple": First}[shape](inner))
            self.blocks[-1].use = use
        self.ways = [way for *_, way in plan]

    def forward(self, x):
        x = self.begin(x) * 1.0
        for block, way in zip(self.blocks, self.ways, strict=True):
            x = through(block, x) if way == "plain" else checkpoint(through, block, x, use_reentrant=way == "reentrant")
        return x


def through(block, x):
    y = block(x)
    return USES[block.use][0](y[0] if isinstance(y, tuple) else y, x)


class Unrolled:
    """The same model, with a copy of the value at each point."""

    def __init__(self, model, edits=None):
        self.model, self.edits, self.copies = model, edits or {}, {}
        self.names = {module: name for name, module in model.named_modules()}

    def __call__(self, x):
        x = self.called(self.model.begin, x) * 1.0
        for block in self.model.blocks:
            x = USES[block.use][1](self.called(block, x), x)
        return x

    def called(self, module, x):
        name = self.names[module]
        if isinstance(module, First):
            value = self.called(module.child, x)
        elif isinstance(module, nn.Sequential):
            value = x
            for child in module:
                value = self.called(child, value)
        else:
            value = module(x)
        value = value.clone()
        if name in self.edits:
            value.register_hook(self.edits[name])
        self.copies[name] = value
        return value


plans = st.lists(
    st.tuples(
        st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=3),
        st.sampled_from(["plain", "tuple"]),
        st.sampled_from(sorted(USES)),
        st.sampled_from(["plain", "plain", "checkpoint", "reentrant"]),
    ).filter(lambda block: "changed" not in block[2] or not PASS_ON.intersection(block[0])),
    min_size=1,
    max_size=3,
)


def backward(loss, x):
    loss.backward()


def two_passes(loss, x):
    loss.backward(retain_graph=True)
    (loss * 2).backward()


def of_input(loss, x):
    torch.autograd.grad(loss, x)


def twice_differentiated(loss, x):
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    slope.square().sum().backward()


PASSES = {"backward": backward, "two passes": two_passes, "autograd.grad": of_input, "double": twice_differentiated}
SETTINGS = {"deadline": None, "suppress_health_check": list(HealthCheck), "derandomize": True}


def made(plan, seed):
    torch.manual_seed(seed)
    return Model(plan).double().eval(), torch.randn(3, WIDTH, dtype=torch.float64)


def truths(model, values, way="backward", edits=None):
    """Return the gradient of each copy, summed over the passes. With edits, it is the one after the edit."""
    if edits is not None:
        return edited_truths(model, values, edits)
    unrolled, x = Unrolled(model), values.clone().requires_grad_()
    loss = unrolled(x).square().sum()
    copies, losses = list(unrolled.copies.values()), [loss]
    if way == "two passes":
        losses.append(loss * 2)
    if way == "double":
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        losses.append(slope.square().sum())
    found = [torch.zeros_like(copy) for copy in copies]
    for each in losses:
        more = torch.autograd.grad(each, copies, retain_graph=True, allow_unused=True)
        found = [one if other is None else one + other for one, other in zip(found, more, strict=True)]
    return dict(zip(unrolled.copies, found, strict=True))


def edited_truths(model, values, edits):
    unrolled, found = Unrolled(model, edits), {}
    loss = unrolled(values.clone().requires_grad_()).square().sum()
    for name, copy in unrolled.copies.items():
        copy.register_hook(lambda gradient, name=name: found.__setitem__(name, gradient))
    loss.backward()
    model.zero_grad()
    return found


def fits(plan, way):
    """Return whether PyTorch allows such passes: a reentrant checkpoint allows only the first kind."""
    return way == "backward" or all(each != "reentrant" for *_, each in plan)


def close(found, truth, where):
    torch.testing.assert_close(found, truth, rtol=1e-9, atol=1e-10, msg=lambda text: f"{where}: {text}")


@settings(max_examples=150, **SETTINGS)
@given(
    plan=plans, seed=st.integers(0, 9), way=st.sampled_from(sorted(PASSES)), values=st.booleans(), keep=st.booleans()
)
def test_recorded_gradients_are_those_of_the_unrolled_model(plan, seed, way, values, keep):
    way = way if fits(plan, way) else "backward"
    model, given_values = made(plan, seed)
    truth, x = truths(model, given_values, way), given_values.clone().requires_grad_()
    points = list(truth)
    with th.record(model, *points, grad=True, values=values, keep="last" if keep else "all") as tape:
        PASSES[way](model(x).square().sum(), x)
    for name in points:
        found = tape.grad[name]
        close(found[0] if isinstance(found, tuple) else found, truth[name], name)


@settings(max_examples=60, **SETTINGS)
@given(plan=plans, seed=st.integers(0, 9), read=st.booleans())
def test_gradients_of_a_glob_can_be_computed_after_the_session(plan, seed, read):
    model, values = made([(kinds, shape, use, "plain") for kinds, shape, use, _ in plan], seed)
    truth = truths(model, values)
    with th.record(model, "begin", "blocks.**", grad=True, values=False) as tape:
        loss = model(values.clone().requires_grad_()).square().sum()
        if read:
            assert not list(tape.grad)
    tape.backward(loss)
    for name in truth:
        found = tape.grad[name]
        close(found[0] if isinstance(found, tuple) else found, truth[name], name)


@settings(max_examples=80, **SETTINGS)
@given(plan=plans, seed=st.integers(0, 9), data=st.data(), recorded=st.booleans())
def test_edited_gradients_are_those_of_the_edited_unrolled_model(plan, seed, data, recorded):
    model, values = made(plan, seed)
    names = list(truths(model, values))
    changes = st.sampled_from([lambda g: g * 2, lambda g: g + 0.1, lambda g: g.clamp(-0.5, 0.5)])
    edits = data.draw(st.dictionaries(st.sampled_from(names), changes, min_size=1, max_size=3))
    mine, truth = values.clone().requires_grad_(), values.clone().requires_grad_()
    with th.edit(model, grad=edits):
        if recorded:  # The points of the recording are then shared with those of the edit.
            with th.record(model, grad=True):
                model(mine).square().sum().backward()
        else:
            model(mine).square().sum().backward()
    slopes = [p.grad for p in model.parameters()]
    model.zero_grad()
    Unrolled(model, edits)(truth).square().sum().backward()
    for found, wanted in zip((mine.grad, *slopes), (truth.grad, *(p.grad for p in model.parameters())), strict=True):
        close(found, wanted, "a leaf")


@settings(max_examples=80, **SETTINGS)
@given(plan=plans, seed=st.integers(0, 9), way=st.sampled_from(["backward", "two passes", "autograd.grad"]))
def test_backward_hooks_get_the_gradients_of_the_unrolled_model(plan, seed, way):
    model, values = made([(kinds, shape, use, "plain") for kinds, shape, use, _ in plan], seed)
    truth, found = truths(model, values, way), {}

    def keep(name):
        def hook(_module, gradients):
            found[name] = found.get(name, 0) + gradients[0]

        return hook

    handles = [th.hooks.register_backward_pre_hook(model.get_submodule(name), keep(name)) for name in truth]
    x = values.clone().requires_grad_()
    PASSES[way](model(x).square().sum(), x)
    for handle in handles:
        handle.remove()
    for name, gradient in found.items():
        close(gradient, truth[name], name)
    assert found.keys() == truth.keys()


@settings(max_examples=60, **SETTINGS)
@given(plan=plans, seed=st.integers(0, 9), data=st.data(), values=st.booleans())
def test_gradients_are_seen_after_the_edit_of_the_same_point_and_before_those_further_back(plan, seed, data, values):
    model, given_values = made([(kinds, shape, use, "plain") for kinds, shape, use, _ in plan], seed)
    names = list(truths(model, given_values))
    chosen = data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=3, unique=True))
    truth = truths(model, given_values, edits=dict.fromkeys(chosen, lambda gradient: gradient * -2))
    with warnings.catch_warnings(), th.watch(model, steps="manual") as w:
        warnings.simplefilter("ignore", th.TenterhookWarning)
        edit = th.edit(model, grad=dict.fromkeys(chosen, lambda gradient: gradient * -2))
        with edit, th.record(model, *names, grad=True, values=values) as tape:
            model(given_values.clone().requires_grad_()).square().sum().backward()
        w.step()
    for name, gradient in truth.items():
        found = tape.grad[name]
        close(found[0] if isinstance(found, tuple) else found, gradient, name)
        if "changed" not in "".join(use for _, _, use, _ in plan):  # Else the watch copies it from the second step on.
            assert w.series(name, "norm", "gradients")[0] == pytest.approx(float(gradient.norm()), rel=1e-4), name


@settings(max_examples=40, **SETTINGS)
@given(plan=plans, seed=st.integers(0, 9), way=st.sampled_from(["backward", "two passes"]))
def test_watched_gradients_are_those_of_the_unrolled_model(plan, seed, way):
    way = way if fits(plan, way) else "backward"
    model, values = made(plan, seed)
    truth = truths(model, values, way)
    with warnings.catch_warnings(), th.watch(model, steps="manual") as w:
        warnings.simplefilter(
            "ignore", th.TenterhookWarning
        )  # What is changed in place is copied from the second step on.
        for _ in range(3):
            x = values.clone().requires_grad_()
            PASSES[way](model(x).square().sum(), x)
            w.step()
    for name, gradient in truth.items():
        assert w.series(name, "norm", "gradients")[2] == pytest.approx(float(gradient.norm()), rel=1e-4), name
