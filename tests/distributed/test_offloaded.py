"""Models whose weights accelerate keeps elsewhere, and DataParallel."""

import pytest
import torch
from torch import nn

import tenterhook as th

X = torch.linspace(-1, 1, 12).reshape(3, 4)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.act, self.b = nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)

    def forward(self, x):
        hidden = self.act(self.a(x))
        return self.b(hidden)


def net():
    torch.manual_seed(0)
    return Net()


@pytest.fixture(params=["cpu", "disk", "dispatched"])
def offloaded(request, tmp_path):
    accelerate = pytest.importorskip("accelerate")
    cpu = torch.device("cpu")
    if request.param == "cpu":
        return accelerate.cpu_offload(net(), execution_device=cpu)
    if request.param == "disk":
        return accelerate.disk_offload(net(), tmp_path, execution_device=cpu)
    places = {"a": "disk", "act": "cpu", "b": "disk"}
    return accelerate.dispatch_model(net(), places, main_device="cpu", offload_dir=tmp_path, force_hooks=True)


def test_an_offloaded_model_shows_its_values_and_gradients(offloaded):
    plain = net()
    points = ("a", "act", "b:in")
    with th.record(plain, *points, grad=True) as wanted:
        plain(X).sum().backward()
    with th.record(offloaded, *points, grad=True) as tape:
        offloaded(X).sum().backward()
    for point in points:
        assert torch.equal(tape[point], wanted[point])
        assert torch.equal(tape.grad[point], wanted.grad[point])


def test_an_offloaded_model_is_edited_and_stopped_and_goes_on(offloaded):
    plain = net()
    before = {name: parameter.device for name, parameter in offloaded.named_parameters()}
    with th.edit(offloaded, {"act": th.scale(2)}), th.edit(plain, {"act": th.scale(2)}):
        assert torch.equal(offloaded(X), plain(X))
    with th.record(offloaded, "a", stop=True) as tape:
        offloaded(X)
    assert torch.equal(tape["a"], plain.a(X))
    assert {name: parameter.device for name, parameter in offloaded.named_parameters()} == before
    assert torch.equal(offloaded(X), plain(X))


def test_the_inside_of_an_offloaded_forward_is_hidden(offloaded):
    with pytest.raises(th.NoSource, match="wrapped by"):
        th.record(offloaded, ":hidden").start()


@pytest.mark.parametrize(
    "session",
    [
        lambda model: th.record(model, "a.weight"),
        lambda model: th.record(model, "a.weight", grad=True),
        lambda model: th.edit(model, {"a.weight": th.zero()}),
        lambda model: th.edit(model, grad={"a.weight": th.zero()}),
    ],
)
def test_an_offloaded_parameter_is_refused(offloaded, session):
    with pytest.raises(th.UnsupportedModel, match=r"'a\.weight' is offloaded"):
        session(offloaded).start()
    assert torch.equal(offloaded(X), net()(X))


def test_data_parallel_without_replicas_is_a_module_like_others():
    model, plain = nn.DataParallel(net()), net()
    with th.record(model, "module.a") as tape, th.edit(model, {"module.act": th.zero()}):
        found = model(X)
    assert torch.equal(tape["module.a"], plain.a(X))
    assert torch.equal(found, plain.b.bias.expand(3, 4))


def test_data_parallel_with_replicas_is_refused():
    model = nn.DataParallel(net())
    model.device_ids = [0, 1]  # As it would be with two devices.
    with pytest.raises(th.UnsupportedModel, match="copies of the model in other threads"):
        th.record(model, "module.a").start()
    with th.record(model.module, "a") as tape:
        model.module(X)
    assert torch.equal(tape["a"], net().a(X))
