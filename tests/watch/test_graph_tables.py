"""Points of a compiled model that are measured together: lists, checkpoints, breaks, samples, in-place changes."""

import weakref

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils.checkpoint import checkpoint

import tenterhook as th
from tenterhook.compiled.collected_gradients import AT_ONCE
from tenterhook.statistics.measure import RowNumbers

WIDTH = 8
NUMBERS = ("count", "mean", "std", "min", "max", "norm", "zeros", "exact", "steps")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.relu, self.down = nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(self.relu(self.up(x)))


class Blocks(nn.Module):
    def __init__(self, kind, count=3):
        super().__init__()
        self.kind, self.blocks, self.head = kind, nn.ModuleList([Block() for _ in range(count)]), nn.Linear(WIDTH, 1)

    def forward(self, x):
        for place, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=False) if self.kind == "checkpoint" else block(x)
            if self.kind == "in place":
                x.add_(1)
            elif self.kind == "several calls":
                x = self.blocks[0](x)
            elif self.kind == "break" and place == 1:
                torch._dynamo.graph_break()
        return self.head(x)


def train(model, net, **options):
    sgd = torch.optim.SGD(net.parameters(), 0.01)
    with th.watch(model, optimizer=sgd, **options) as watch:
        for seed in range(3):
            sgd.zero_grad()
            model(torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(seed))).square().mean().backward()
            sgd.step()
    return watch


def both(kind, backend="aot_eager", count=3, **options):
    watches, nets = [], []
    for compiles in (False, True):
        torch.manual_seed(0)
        net = Blocks(kind, count)
        model = torch.compile(net, backend=backend, fullgraph=kind != "break") if compiles else net
        watches.append(train(model, net, **options))
        nets.append(net)
    for one, other in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6 if backend == "inductor" else 0, atol=0)
    return watches


def assert_same_rows(plain, compiled):
    mine, theirs = ({(row["kind"], row["address"]): row for row in watch.rows()} for watch in (compiled, plain))
    assert set(mine) == set(theirs)
    for key, row in theirs.items():
        for name in NUMBERS:
            assert mine[key][name] == pytest.approx(row[name], rel=1e-4, abs=1e-5), (key, name)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["plain", "checkpoint", "in place", "several calls"])
def test_the_rows_of_a_whole_graph_are_those_without_the_compiler(kind, backend):
    plain, compiled = both(kind, backend)
    assert (compiled.compiled.graphs, compiled.compiled.breaks) == (1, 0)
    assert_same_rows(plain, compiled)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo itself asks for it.
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_values_before_a_graph_break_are_measured_and_keep_their_gradient(backend):
    assert_same_rows(*both("break", backend))


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo itself asks for it.
@pytest.mark.parametrize("net", [Blocks("plain"), Blocks("break"), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())])
def test_no_value_leaves_a_graph_to_be_measured(net):
    left = []

    def counted(graph, _inputs):
        left.append(len(next(iter(reversed(graph.graph.nodes))).args[0]))
        return graph.forward

    with th.watch(torch.compile(net, backend=counted)) as watch:
        watch.model(torch.randn(2, WIDTH)).sum().backward()
    assert set(left) == {1}  # The output of the model, or what goes on after a graph break.


def test_long_tensors_are_sampled_at_the_same_positions():
    plain, compiled = both("plain", sample=32)
    assert not compiled.row("blocks.0.up")["exact"]
    assert_same_rows(plain, compiled)


def test_an_operation_measures_many_points():
    nodes = []

    def counted(graph, _inputs):
        # The operation is the first argument of the one that makes it functional.
        nodes.append([node for node in graph.graph.nodes if "measure_into" in str((node.target, *node.args[:1]))])
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=counted, bw_compiler=counted)
    net = Blocks("plain", 20)
    with th.watch(torch.compile(net, backend=backend, fullgraph=True)) as watch:
        net_output = watch.model(torch.randn(2, WIDTH))
        net_output.sum().backward()
    points = 20 * 4 + 2
    assert [len(each) for each in nodes] == [-(-points // AT_ONCE)] * 2
    assert sum(row["kind"] in {"values", "gradients"} and "weight" not in row["address"] for row in watch.rows())


def test_nothing_stays_of_a_graph_whose_outputs_are_not_used():
    net = Blocks("plain")
    model = torch.compile(net, backend="aot_eager", fullgraph=True)
    with th.watch(model) as watch:
        model(torch.randn(2, WIDTH))  # No backward pass.
        watch.step()
        model(torch.randn(2, WIDTH)).sum().backward()
        watch.step()
    assert watch.row("head")["count"] == 4
    assert watch.row("head", "gradients")["count"] == 2


def test_gradients_whose_numbers_are_in_transfer_are_released_before_the_next_graph(monkeypatch):
    monkeypatch.setattr(RowNumbers, "arrived", False)  # As on a GPU that is behind.
    net = Blocks("plain")
    model = torch.compile(net, backend="aot_eager", fullgraph=True)
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    with th.watch(model, optimizer=optimizer) as watch:
        watch._late = True
        for _ in range(3):
            model(torch.randn(2, WIDTH)).sum().backward()
            gradients = [weakref.ref(each.grad) for each in net.parameters()]
            optimizer.step()
            optimizer.zero_grad()
            assert all(each() is None for each in gradients)
    assert watch.row("head.weight", "gradients")["steps"] == 3


def test_the_calls_of_a_closure_are_in_their_step():
    watches = []
    for compiles in (False, True):
        torch.manual_seed(0)
        net = Blocks("plain")
        model = torch.compile(net, backend="aot_eager", fullgraph=True) if compiles else net
        optimizer = torch.optim.LBFGS(net.parameters(), lr=0.01, max_iter=3)
        inputs = torch.randn(16, WIDTH)

        def closure(model=model, optimizer=optimizer, inputs=inputs):
            optimizer.zero_grad()
            loss = model(inputs).square().mean()
            loss.backward()
            return loss

        with th.watch(model, optimizer=optimizer) as watch:
            for _ in range(2):
                optimizer.step(closure)
        watches.append(watch)
    assert_same_rows(*watches)


@pytest.mark.parametrize("selectors", [["head:in"], ["blocks.0.up", "blocks.1:in", ":in"]])
def test_arguments_are_measured_in_a_graph(selectors):
    rows = []
    for compiles in (False, True):
        torch.manual_seed(0)
        net = Blocks("plain")
        model = torch.compile(net, backend="aot_eager", fullgraph=True) if compiles else net
        with th.watch(model, *selectors) as watch:
            for seed in range(3):
                model(torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(seed))).sum().backward()
        rows.append({row["address"]: row for row in watch.rows() if row["kind"] == "values"})
        assert watch.steps == 3
    assert set(rows[0]) == set(rows[1]) == set(selectors)
    for address, row in rows[0].items():
        for name in NUMBERS:
            assert rows[1][address][name] == pytest.approx(row[name], rel=1e-4, abs=1e-5), (address, name)
