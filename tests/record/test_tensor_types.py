"""Sparse, quantized and other unusual tensors: recorded, with gradients, and shown."""

import copy
import inspect
import pickle

import pytest
import torch
from torch import nn

import tenterhook as th
from tenterhook.testing import untouched

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:torch.quantize", "ignore:torch.ao")

X = torch.linspace(-1, 1, 6).reshape(2, 3)
LAYOUTS = {
    "coo": lambda x: x.to_sparse(),
    "csr": lambda x: x.to_sparse_csr(),
    "csc": lambda x: x.to_sparse_csc(),
}


class Sparse(nn.Module):
    def __init__(self, layout):
        super().__init__()
        self.layout = layout

    def forward(self, x):
        return LAYOUTS[self.layout](x * 2)


class Dense(nn.Module):
    def forward(self, x):
        return x.to_dense() * 3


@pytest.mark.parametrize("options", [{}, {"values": False}, {"copy": "always"}, {"keep": "last"}])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_sparse_output_has_a_gradient(layout, options):
    model = nn.Sequential(nn.Linear(3, 3), Sparse(layout), Dense())
    with untouched(model), th.record(model, grad=True, **options) as tape:
        model(X).sum().backward()
        model.zero_grad()
    assert torch.equal(tape.grad["1"].to_dense(), torch.full((2, 3), 3.0))
    assert torch.equal(tape.grad["0"], torch.full((2, 3), 6.0))
    if options.get("values", True):
        assert torch.equal(tape["1"].to_dense(), model[0](X) * 2)
    assert "1" in repr(tape)
    assert tape.nbytes > 0


def test_the_sparse_gradient_of_an_embedding_is_shown():
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True))
    with th.record(model, "0", "0.weight", grad=True) as tape:
        model(torch.tensor([1, 1, 2])).sum().backward()
    assert "3.9" in repr(tape)  # The norm of two rows of ones, of which one counts twice: √(3·4 + 3).


class Quantized(nn.Module):
    def forward(self, x):
        return torch.quantize_per_tensor(x, 0.5, 0, torch.qint8)


class Packed(torch.Tensor):
    """A tensor subclass that has no operations but ``dequantize``, as some of torchao have."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=torch.float32)

    def __init__(self, inner):
        self.inner = inner

    def dequantize(self):
        return self.inner * 0.5

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.detach.default:
            return Packed(args[0].inner)
        raise NotImplementedError(f"{function} is not there")


class Packs(nn.Module):
    def forward(self, x):
        return Packed(x)


class Bare(Packed):
    def dequantize(self):
        raise NotImplementedError


@pytest.mark.parametrize("kind", [Packed, Bare])
def test_a_tape_with_a_quantized_subclass_is_shown(kind):
    class Makes(nn.Module):
        def forward(self, x):
            return kind(x)

    model = nn.Sequential(nn.Identity(), Makes())
    with torch.no_grad(), th.record(model, "*", copy="never") as tape:
        model(X)
    assert "1" in repr(tape)
    assert type(tape["1"]) is kind or type(tape["1"]) is Packed


def test_a_tape_with_a_quantized_tensor_is_shown():
    model = nn.Sequential(nn.Identity(), Quantized())
    with torch.no_grad(), th.record(model, "*") as tape:
        model(X)
    assert "qint8" in repr(tape)


# -- modules that print their __dict__ ---------------------------------------------------------------------------------


class Prints(nn.Linear):
    def __repr__(self):
        return f"Prints({vars(self)})"


SESSIONS = {
    "record": th.record,
    "gradients": lambda model: th.record(model, grad=True),
    "edit": lambda model: th.edit(model, {"0": th.zero()}),
    "parameter": lambda model: th.edit(model, {"0.weight": th.zero()}),
    "watch": th.watch,
}


@pytest.mark.parametrize("session", SESSIONS)
@pytest.mark.parametrize(("layer", "x"), [(nn.EmbeddingBag(5, 3), torch.tensor([[1, 2]])), (Prints(3, 3), X)])
def test_a_module_that_shows_its_attributes_can_be_printed_in_a_session(layer, x, session):
    model = nn.Sequential(layer)
    signature, output = str(inspect.signature(layer.forward)), model(x)
    with untouched(model), SESSIONS[session](model):
        model(x)
        assert type(layer).__name__ in str(model)
        assert str(inspect.signature(layer.forward)) == signature
        again = copy.deepcopy(model)
        assert torch.equal(again(x), output)
        assert type(layer).__name__ in str(again)
        assert torch.equal(pickle.loads(pickle.dumps(model))(x), output)
