"""A watch on a compiled model: whole graphs, and the numbers of the model without the compiler."""

import pytest
import torch
from torch import nn

import tenterhook as th
from tenterhook.testing import untouched

WIDTH = 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(WIDTH, 16), nn.Dropout(0.0), nn.Linear(16, WIDTH)

    def forward(self, x):
        return x + self.down(self.drop(torch.tanh(self.up(x))))


class Net(nn.Module):
    """The same block twice, a module with several outputs, and one that returns its input."""

    def __init__(self):
        super().__init__()
        self.block, self.other, self.norm = Block(), Block(), nn.BatchNorm1d(WIDTH)
        self.split, self.same, self.head = Split(), nn.Identity(), nn.Linear(WIDTH, 1)

    def forward(self, x):
        x = self.norm(self.block(self.block(x)))
        one, two = self.split(self.other(x))
        return self.head(self.same(one + two))


class Split(nn.Module):
    def forward(self, x):
        return x * 2, x.sin()


def backend_of(way):
    return {"backend": "inductor" if "inductor" in way else "aot_eager", "fullgraph": True}


def compiled(model, way):
    if way == "none":
        return model
    if "in place" in way:
        model.compile(**backend_of(way))
        return model
    return torch.compile(model, **backend_of(way))


def data(steps, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(4, WIDTH, generator=generator) for _ in range(steps)]


def train(way, steps=4, *, optimizer=True, watched=True, batches=None, **options):
    torch.manual_seed(0)
    net = Net()
    model = compiled(net, way)
    sgd = torch.optim.SGD(net.parameters(), 0.01)
    given = {"optimizer": sgd} if optimizer else {}
    session = th.watch(model, **given, **options) if watched else None
    if session is not None:
        session.start()
    for x in batches or data(steps):
        sgd.zero_grad()
        model(x).square().mean().backward()
        sgd.step()
    if session is not None:
        session.close()
    return net, session


def rows(watch):
    return {(row["kind"], row["address"]): row for row in watch.rows()}


WAYS = ["wrapper", "in place"]


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("way", "options"),
    [
        ("wrapper", {}),
        ("in place", {"every": 2}),
        *(
            pytest.param(way, options, marks=SLOW)
            for way in (*WAYS, "inductor")
            for options in ({}, {"every": 2}, {"optimizer": False})
        ),
    ],
)
def test_the_numbers_are_those_without_the_compiler_and_the_graph_is_whole(way, options):
    _, plain = train("none", **options)
    _, watch = train(way, **options)
    assert watch.compiled.breaks == 0
    assert watch.compiled.graphs <= (2 if "every" in options else 1)
    assert [page.step for page in watch.pages] == [page.step for page in plain.pages]
    mine, theirs = rows(watch), rows(plain)
    if way == "in place" and "optimizer" in options:  # No event ends the backward pass.
        theirs = {key: row for key, row in theirs.items() if key[0] != "gradients" or ".weight" not in key[1]}
        theirs = {key: row for key, row in theirs.items() if key[0] != "gradients" or ".bias" not in key[1]}
    assert set(mine) == set(theirs)
    for key, row in theirs.items():
        twice = key[0] == "gradients" and key[1].startswith("block") and "." not in key[1].removeprefix("block.")
        for name in ("count", "mean", "std", "norm", "zeros", *(() if twice else ("min", "max"))):
            assert mine[key][name] == pytest.approx(row[name], rel=1e-4, abs=1e-6), (key, name)
        assert mine[key]["steps"] == row["steps"]


@pytest.mark.parametrize("way", ["in place", pytest.param("wrapper", marks=SLOW)])
def test_training_gives_the_same_parameters_as_unwatched(way):
    unwatched, _ = train(way, watched=False)
    net, _ = train(way)
    assert all(torch.equal(*both) for both in zip(net.parameters(), unwatched.parameters(), strict=True))


@SLOW
def test_steps_that_are_not_watched_run_the_plain_graph():
    _, watch = train("wrapper", steps=9, every=3)
    assert [page.step for page in watch.pages] == [0, 3, 6]
    assert watch.compiled.graphs <= 2  # One with statistics, and one without, which an earlier model may have left.


def test_the_batches_of_an_accumulated_step_are_one_row():
    torch.manual_seed(0)
    net = nn.Linear(WIDTH, 2)
    model, sgd = torch.compile(net, backend="aot_eager", fullgraph=True), torch.optim.SGD(net.parameters(), 0.1)
    batches = data(4)
    with th.watch(model, optimizer=sgd) as watch:
        for x in batches:
            model(x).sum().backward()
        sgd.step()
    [page] = watch.pages
    assert page.column("count", "values")[":return"] == 4 * 8
    assert page.column("count", "gradients")[":return"] == 4 * 8


@pytest.mark.parametrize("way", ["wrapper", pytest.param("in place", marks=SLOW)])
def test_the_first_nan_is_named_with_its_line_by_a_call_without_the_compiler(way):
    class Breaks(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

        def forward(self, x):
            return self.out(torch.log(self.fc(x) - 100))

    torch.manual_seed(0)
    net = Breaks()
    model, sgd = compiled(net, way), torch.optim.SGD(net.parameters(), 0.1)
    with th.watch(model, optimizer=sgd, on_nan="record") as watch:
        model(data(1)[0]).sum().backward()
        sgd.step()
    found = watch.nonfinite
    assert (found.step, found.kind, found.line.operation) == (0, "values", "log")
    assert "torch.log" in found.line.source


def test_a_nan_raises_before_the_parameters_change():
    net = nn.Linear(2, 1)
    model, sgd = torch.compile(net, backend="aot_eager", fullgraph=True), torch.optim.SGD(net.parameters(), 0.1)
    before = net.weight.detach().clone()
    with pytest.raises(th.NonFinite), th.watch(model, optimizer=sgd, on_nan="raise"):
        model(torch.full((1, 2), torch.inf)).sum().backward()
        sgd.step()
    assert torch.equal(net.weight, before)


def test_the_model_is_as_before():
    net = Net().eval()
    model = torch.compile(net, backend="aot_eager", fullgraph=True)
    with untouched(net), th.watch(model) as watch:
        model(data(1)[0]).sum()
    assert watch.row("head")["count"] == 4
    with untouched(net):
        model(data(1)[0])


@SLOW
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo itself asks for it.
def test_compiled_parts_of_a_model_are_watched_together_with_the_others():
    torch.manual_seed(0)
    net = Net()
    net.block.compile(backend="aot_eager", fullgraph=True)
    sgd = torch.optim.SGD(net.parameters(), 0.01)
    with th.watch(net, optimizer=sgd) as watch:
        for x in data(4):
            sgd.zero_grad()
            net(x).square().mean().backward()
            sgd.step()
    theirs = rows(train("none")[1])
    assert watch.compiled.breaks == 0
    assert set(rows(watch)) == set(theirs)
    assert all(
        rows(watch)[key]["norm"] == pytest.approx(row["norm"], rel=1e-4, abs=1e-6) for key, row in theirs.items()
    )
