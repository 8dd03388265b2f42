import collections
import dataclasses
from collections.abc import MutableMapping
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence
from transformers.modeling_outputs import BaseModelOutput

import tenterhook as th
from tenterhook._tree import Opaque
from tenterhook.testing import Residual, no_leak

X = torch.linspace(-1, 1, 6).reshape(2, 3)


class Gives(nn.Module):
    """A model with one part, which gives whatever a function makes of its input."""

    class Part(nn.Module):
        def __init__(self, make):
            super().__init__()
            self.make, self.linear = make, nn.Linear(3, 3)

        def forward(self, x):
            return self.make(self.linear(x))

    def __init__(self, make):
        super().__init__()
        self.part = self.Part(make)

    def forward(self, x):
        return self.part(x)


class Named(NamedTuple):
    a: torch.Tensor
    b: object


@dataclasses.dataclass
class Data:
    a: torch.Tensor
    b: object
    late: torch.Tensor = dataclasses.field(init=False)


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    a: torch.Tensor
    b: object


class OwnMapping(MutableMapping):
    """A mapping that keeps its items in a dict of its own, which a shallow copy would share."""

    def __init__(self, **items):
        self.items_ = items

    def __getitem__(self, key):
        return self.items_[key]

    def __setitem__(self, key, value):
        self.items_[key] = value

    def __delitem__(self, key):
        del self.items_[key]

    def __iter__(self):
        return iter(self.items_)

    def __len__(self):
        return len(self.items_)


class Tagged(list):
    pass


STRUCTURES = {
    "tuple": lambda t: (t, None, 3),
    "list": lambda t: [t, "text"],
    "dict": lambda t: {"a": t, 1: (t * 2,)},
    "ordered dict": lambda t: collections.OrderedDict(a=t),
    "default dict": lambda t: collections.defaultdict(list, a=t),
    "user dict": lambda t: collections.UserDict(a=t),
    "own mapping": lambda t: OwnMapping(a=t, b=t),
    "named tuple": lambda t: Named(t, None),
    "dataclass": lambda t: Data(t, [t]),
    "frozen dataclass": lambda t: Frozen(t, {"x": t}),
    "list subclass": lambda t: Tagged([t]),
    "model output": lambda t: BaseModelOutput(last_hidden_state=t, hidden_states=(t, t * 2)),
    "return type": lambda t: t.max(dim=0),
    "packed sequence": lambda t: pack_padded_sequence(t[None], [2], batch_first=True),
    "nested": lambda t: {"a": [(t, {"b": Named(t, (None, t))})]},
    "nothing": lambda t: None,
    "empty": lambda t: (),
    "text": lambda t: "text",
}


def parts(value):
    """Every tensor, found without the help of the library."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (dict, collections.UserDict, OwnMapping)):
        return [t for part in value.values() for t in parts(part)]
    if isinstance(value, (tuple, list)):
        return [t for part in value for t in parts(part)]
    if dataclasses.is_dataclass(value):
        return [t for f in dataclasses.fields(value) if hasattr(value, f.name) for t in parts(getattr(value, f.name))]
    return []


# --- structures -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("copy", ["auto", "always", "never"])
@pytest.mark.parametrize("name", STRUCTURES)
def test_a_structure_is_kept_with_its_own_types_and_detached(name, copy):
    model = Gives(STRUCTURES[name])
    with th.record(model, "part", copy=copy) as tape:
        given = model(X)
    kept = tape["part"]
    assert type(kept) is type(given)
    assert [torch.equal(a, b) for a, b in zip(parts(kept), parts(given), strict=True)] == [True] * len(parts(given))
    assert not any(tensor.requires_grad for tensor in parts(kept))


@pytest.mark.parametrize("name", STRUCTURES)
def test_keeping_a_structure_leaves_the_models_own_as_it_is(name):
    model = Gives(STRUCTURES[name])
    with th.record(model, "part", copy="always"):
        given = model(X)
    assert all(tensor.requires_grad for tensor in parts(given) if tensor.is_floating_point())
    for tensor in parts(given):
        if tensor.is_floating_point():
            assert torch.autograd.grad(tensor.sum(), model.part.linear.weight, retain_graph=True)[0] is not None


def test_a_default_factory_and_a_frozen_class_survive():
    for name in ("default dict", "frozen dataclass"):
        model = Gives(STRUCTURES[name])
        with th.record(model, "part") as tape:
            model(X)
        kept = tape["part"]
        if name == "default dict":
            assert kept["new"] == []
        else:
            with pytest.raises(dataclasses.FrozenInstanceError):
                kept.a = None


def test_a_packed_sequence_stays_usable():
    model = Gives(STRUCTURES["packed sequence"])
    with th.record(model, "part") as tape:
        model(X)
    assert isinstance(tape["part"], PackedSequence)
    assert torch.nn.utils.rnn.pad_packed_sequence(tape["part"], batch_first=True)[0].shape == (1, 2, 3)


def test_an_object_that_is_no_structure_leaves_its_type_only():
    class Cache:
        def __init__(self, tensor):
            self.tensor = tensor

    model = Gives(lambda t: (t, Cache(t)))
    with th.record(model, "part") as tape:
        model(X)
    assert isinstance(tape["part"][1], Opaque)
    assert "Cache, not kept" in repr(tape["part"][1])


def test_an_lstm_gives_its_nested_tuple():
    model = nn.LSTM(3, 4, batch_first=True)
    with th.record(model) as tape:
        model(X[None])
    output, (hidden, cell) = tape[":return"]
    assert (output.shape, hidden.shape, cell.shape) == ((1, 2, 4), (1, 1, 4), (1, 1, 4))


# --- in-place changes afterwards --------------------------------------------------------------------------------------


class Basic(nn.Module):
    """A ResNet's basic block."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(2, 2, 3, padding=1, bias=False), nn.BatchNorm2d(2)
        self.conv2, self.bn2 = nn.Conv2d(2, 2, 3, padding=1, bias=False), nn.BatchNorm2d(2)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        return self.relu(out)


def helper(x):
    x[:, 0] = 7.0
    return x


def by(forward):
    return type("By" + forward.__name__, (nn.Module,), {"__init__": start, "forward": forward})


def start(self):
    nn.Module.__init__(self)
    self.part = nn.Linear(3, 3)


def augmented(self, x):
    y = self.part(x)
    y += 1.5
    y *= x
    return y


def relu_function(self, x):
    return functional.relu(self.part(x), inplace=True)


def index_assignment(self, x):
    y = self.part(x)
    y[:, 0] = x[:, 0]
    return y


def slice_assignment(self, x):
    y = self.part(x)
    y[1:] = 0
    return y


def underscore_method(self, x):
    return self.part(x).clamp_(min=0.0)


def through_a_view(self, x):
    y = self.part(x)
    y.view(-1)[:2].mul_(3)
    return y


def through_a_helper(self, x):
    return helper(self.part(x))


def through_data(self, x):
    y = self.part(x)
    y.data.add_(1)
    return y


def out_argument(self, x):
    y = self.part(x)
    return torch.add(y, 1, out=y)


def hidden(self, x):
    y = self.part(x)
    getattr(y, "add" + "_")(1)
    return y


def hidden_positional(self, x):
    return functional.relu(self.part(x), True)


SIGNS = [augmented, relu_function, index_assignment, slice_assignment, underscore_method, through_a_view]
SIGNS += [through_a_helper, through_data]
HIDDEN = [hidden, hidden_positional, out_argument]


@pytest.mark.parametrize("forward", SIGNS)
@pytest.mark.parametrize("grad", [True, False])
def test_a_later_change_that_shows_in_the_code_does_not_reach_what_was_recorded(forward, grad):
    model = by(forward)()
    with torch.set_grad_enabled(grad), th.record(model, "part") as tape:
        model(X)
    assert torch.equal(tape["part"], functional.linear(X, model.part.weight, model.part.bias))


@pytest.mark.parametrize("forward", HIDDEN)
def test_a_later_change_that_shows_nowhere_is_noticed_and_said(forward):
    model = by(forward)()
    with torch.no_grad(), th.record(model, "part") as tape:
        model(X)
    with pytest.raises(th.ValueChanged, match='copy="always"'):
        tape["part"]
    with torch.no_grad(), th.record(model, "part", copy="always") as tape:
        model(X)
    assert torch.equal(tape["part"], functional.linear(X, model.part.weight, model.part.bias))


@pytest.mark.parametrize("forward", [*SIGNS, *HIDDEN])
def test_in_inference_mode_nothing_reaches_what_was_recorded(forward):
    model = by(forward)()
    with torch.inference_mode(), th.record(model, "part") as tape:
        model(X)
    assert torch.equal(tape["part"], functional.linear(X, model.part.weight, model.part.bias))
    assert not tape["part"].is_inference()
    (tape["part"] * torch.ones(3, requires_grad=True)).sum().backward()


def test_a_residual_block_is_recorded_as_it_flowed():
    torch.manual_seed(0)
    model, x = Basic(), torch.randn(2, 2, 4, 4)
    with th.record(model, "**") as tape:
        model(x)
    conv1 = functional.conv2d(x, model.conv1.weight, padding=1)
    bn1 = functional.batch_norm(conv1, None, None, model.bn1.weight, model.bn1.bias, training=True)
    assert torch.allclose(tape["bn1"], bn1)
    assert tape["bn1"].min() < 0 < tape["bn1"].max()
    assert torch.equal(tape["relu#0"], tape["bn1"].relu())
    assert torch.equal(tape[":return"], (tape["bn2"] + x).relu())


def test_the_residual_of_the_testing_models_is_recorded_as_it_flowed():
    model = Residual(3)
    with th.record(model, "**") as tape:
        model(X)
    assert torch.equal(tape["norm1"], functional.layer_norm(X, (3,)))
    assert torch.equal(tape["relu#1"], (tape["norm2"] + X).relu())


def test_a_change_by_the_caller_after_the_model_has_returned_is_noticed():
    model = nn.Sequential(nn.Linear(3, 3))
    with torch.no_grad(), th.record(model, "0") as tape:
        model(X)[0, 0] = 5.0
    with pytest.raises(th.ValueChanged, match="'0'"):
        tape["0"]


def test_a_change_through_a_view_or_a_base_is_noticed():
    class Views(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = nn.Flatten()

        def forward(self, x):
            return self.part(x)

    x, model = torch.ones(2, 3, 4), Views()
    with th.record(model, "part") as tape:
        model(x)
        assert torch.equal(tape["part"], torch.ones(2, 12))
        x.add_(1)
    with pytest.raises(th.ValueChanged):
        tape["part"]


def test_a_change_of_one_tensor_in_a_structure_is_noticed():
    model = Gives(lambda t: {"a": t, "b": (t * 2,)})
    with torch.no_grad(), th.record(model, "part") as tape:
        model(X)["b"][0].zero_()
    with pytest.raises(th.ValueChanged):
        tape["part"]


def test_never_copying_compares_nothing():
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True))
    with torch.no_grad(), th.record(model, "0", copy="never") as tape:
        found = model(X)
    assert torch.equal(tape["0"], found)
    assert tape["0"].data_ptr() == found.data_ptr()


def test_a_model_without_signs_is_recorded_by_reference():
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    with th.record(model, "1") as tape:
        found = model(X)
    assert tape["1"].data_ptr() == found.data_ptr()


def test_a_parameter_is_copied_because_an_optimiser_will_change_it():
    model = nn.Linear(3, 3)
    before = model.weight.detach().clone()
    optimiser = torch.optim.SGD(model.parameters(), lr=1.0)
    with th.record(model, "weight", "bias") as tape:
        model(X).sum().backward()
        optimiser.step()
    assert torch.equal(tape["weight"], before)
    assert not torch.equal(model.weight, before)


def test_a_module_that_gives_its_own_parameter_is_copied_too():
    class Bias(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self):
            return self.weight

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.bias = Bias()

        def forward(self, x):
            return x + self.bias()

    model = Model()
    with th.record(model, "bias") as tape:
        model(X).sum().backward()
        torch.optim.SGD(model.parameters(), lr=1.0).step()
    assert torch.equal(tape["bias"], torch.ones(3))


def test_a_batch_norms_statistics_are_recorded_as_they_were_at_the_start():
    model = nn.BatchNorm1d(3)
    with th.record(model, "running_mean", "num_batches_tracked") as tape:
        model(X)
    assert torch.equal(tape["running_mean"], torch.zeros(3))
    assert tape["num_batches_tracked"] == 0


def test_an_input_that_is_made_to_require_a_gradient_later_is_still_given_detached():
    model, x = nn.Sequential(nn.Identity()), X.clone()
    with th.record(model, "0:in") as tape:
        model(x)
    x.requires_grad_()
    assert not tape["0:in"].requires_grad


# --- where the values go ----------------------------------------------------------------------------------------------


def test_floating_values_are_converted_and_others_are_not():
    model = Gives(lambda t: (t, t.argmax(-1), t > 0))
    with th.record(model, "part", dtype=torch.float64) as tape:
        given = model(X)
    assert [t.dtype for t in tape["part"]] == [torch.float64, torch.int64, torch.bool]
    assert torch.equal(tape["part"][0], given[0].double())


def test_a_conversion_to_the_same_dtype_or_device_is_a_copy_all_the_same():
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True))
    for options in ({"dtype": torch.float32}, {"device": "cpu"}, {"device": "cpu", "dtype": torch.float32}):
        with torch.no_grad(), th.record(model, "0", **options) as tape:
            model(X)
        assert torch.equal(tape["0"], functional.linear(X, model[0].weight, model[0].bias))


def test_values_can_be_sent_to_another_device():
    model = nn.Sequential(nn.Linear(3, 3))
    with th.record(model, "0", device="meta") as tape:
        model(X)
    assert tape["0"].is_meta
    assert "0" in repr(tape)


@pytest.mark.parametrize("options", [{"copy": "maybe"}, {"keep": 0}, {"keep": "first"}, {"keep": True}])
def test_an_option_that_means_nothing_is_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        th.record(nn.Linear(3, 3), **options)


def test_what_is_copied_holds_no_graph():
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True))
    with no_leak():
        with th.record(model, "**") as tape:
            found = model(X)
        del found, tape
