"""Random models, random edits: what is replayed is what is computed, to the last bit, always."""

import copy
import warnings

import hypothesis.strategies as st
import torch
from hypothesis import HealthCheck, given, settings
from torch import nn

import tenterhook as th

WIDTH = 4


class Residual(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        out = self.inner(x)
        mixed = out + x
        return mixed


class Twice(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        once = self.inner(x)
        return self.inner(once)


class Branches(nn.Module):
    """Takes and gives structures, by place and by name, and adds in place."""

    def __init__(self, one, other):
        super().__init__()
        self.one, self.other = Pair(one), Pair(other)

    def forward(self, x):
        first, _ = self.one(x, scale=2.0)
        both = self.other(x=first, scale=0.5)
        total = both[1]["copy"] + 0
        total += first
        return total


class Pair(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x, *, scale):
        out = self.inner(x) * scale
        return out, {"copy": out.clone(), "none": None}


class Stateful(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls = (self.calls + 1) % 3
        return x + self.calls


LEAVES = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "relu": lambda: nn.ReLU(inplace=True),
    "tanh": nn.Tanh,
    "dropout": lambda: nn.Dropout(0.5),
    "norm": lambda: nn.BatchNorm1d(WIDTH),
    "identity": nn.Identity,
    "stateful": Stateful,
}
leaves = st.sampled_from(sorted(LEAVES)).map(lambda name: ("leaf", name))
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.tuples(st.just("chain"), st.lists(inner, min_size=1, max_size=3)),
        st.tuples(st.just("residual"), inner),
        st.tuples(st.just("twice"), inner),
        st.tuples(st.just("branches"), inner, inner),
    ),
    max_leaves=6,
)


def build(tree):
    kind = tree[0]
    if kind == "leaf":
        return LEAVES[tree[1]]()
    if kind == "chain":
        return nn.Sequential(*(build(part) for part in tree[1]))
    if kind == "residual":
        return Residual(build(tree[1]))
    if kind == "twice":
        return Twice(build(tree[1]))
    return Branches(build(tree[1]), build(tree[2]))


def doubled(value):
    return (value[0] * 2, *value[1:]) if isinstance(value, tuple) else value * 2


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    parts=st.lists(trees, min_size=3, max_size=5),
    train=st.booleans(),
    tied=st.booleans(),
    picks=st.lists(st.tuples(st.integers(0, 9), st.sampled_from(["", ":in", ".weight"])), min_size=1, max_size=2),
    look=st.integers(0, 9),
    sparse=st.booleans(),
)
def test_replayed_equals_computed(parts, train, tied, picks, look, sparse):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *map(build, parts), nn.Linear(WIDTH, WIDTH)).train(train)
    if tied:
        model[-1].weight = model[0].weight
    names = [name for name, _ in model.named_modules() if name]
    changes = {}
    for pick, suffix in picks:
        name = names[-1 - pick % len(names)]  # Rather late than early, so that there is something to serve.
        has_weight = isinstance(getattr(model.get_submodule(name), "weight", None), nn.Parameter)
        changes[name + (suffix if suffix != ".weight" or has_weight else "")] = doubled
    seen = names[-1 - look % len(names)]
    x = torch.linspace(-1, 1, 3 * WIDTH).view(3, WIDTH)
    with torch.no_grad():
        kept = [address.split(":")[0] for address in changes] if sparse else True
        with th.record(model, replay=kept) as tape:
            model(x)
        twin = copy.deepcopy(model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", th.TenterhookWarning)  # There are models of which nothing can be served.
            with th.replay(model, tape) as session:
                for turn in range(3):
                    wanted = run(twin, changes, seen, x, turn)
                    found = run(model, changes, seen, x, turn)
                    assert len(wanted) == len(found)
                    assert all(torch.equal(one, other) for one, other in zip(wanted, found, strict=True))
    assert session.served.runs == 3


def run(model, changes, seen, x, seed):
    """Everything that can be told of a run: output, values inside, state, and the random numbers that come next."""
    torch.manual_seed(seed)
    with th.edit(model, changes), th.record(model, seen) as tape:
        output = model(x)
    inside = [tensor for address in tape for tensor in flat(tape[address])]
    return [output, *inside, torch.rand(1), *(value.clone() for value in model.state_dict().values())]


def flat(value):
    if isinstance(value, torch.Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value or ()
    return [tensor for part in parts for tensor in flat(part)]
