"""Whether tensors are as others were: asked in one call where PyTorch can, one by one where it cannot."""

import weakref

import pytest
import torch
from torch import nn

from tenterhook.pytorch import modes
from tenterhook.statistics import tensor_signature
from tenterhook.statistics.tensor_signature import MOST_GUARDS, TensorSignature


def some():
    return [torch.randn(3, 4), torch.randn(5, dtype=torch.float64), torch.tensor(1.0), torch.randn(2, 3).bfloat16()]


def changed(place, tensor):
    found = some()
    found[place] = tensor
    return found


@pytest.fixture(params=["at once", "one by one"])
def like(request, monkeypatch):
    if request.param == "one by one":
        monkeypatch.setattr(tensor_signature, "tensor_guard", lambda _tensors: None)
    found = TensorSignature(some())
    assert found.fits(some())
    assert (found._check is not None) == (request.param == "at once")
    return found


def test_others_of_the_same_shapes_and_types_are(like):
    for _ in range(3):
        assert like.fits(some())


@pytest.mark.parametrize(
    "other",
    [
        changed(0, torch.randn(4, 3)),
        changed(0, torch.randn(3, 4).double()),
        changed(0, torch.randn(3, 4, device="meta")),
        changed(0, torch.randn(3, 4).to_sparse()),
        changed(0, nn.Parameter(torch.randn(3, 4))),
        changed(2, None),
        changed(2, 1.0),
        some()[:3],
        [*some(), torch.tensor(1.0)],
        [],
    ],
    ids=["shape", "type", "device", "layout", "class", "None", "number", "fewer", "more", "none at all"],
)
def test_what_is_of_another_kind_is_not(like, other):
    assert not like.fits(other)
    assert not like.in_a_row
    assert like.fits(some())


@pytest.mark.parametrize(
    "other",
    [
        changed(0, torch.randn(4, 3).t()),
        changed(0, torch.randn(3, 4, requires_grad=True)),
        changed(0, torch.randn(4).expand(3, 4)),
    ],
    ids=["strides", "gradient", "expanded"],
)
def test_what_only_lies_in_memory_in_another_way_is(like, other):
    for _ in range(MOST_GUARDS + 2):
        assert like.fits(other)
        assert like.fits(some())


def test_what_is_known_to_be_contiguous_is():
    like = TensorSignature(some())
    assert like.fits(some())
    assert not like.in_a_row, "nobody has asked by now"
    assert like.fits(some())
    assert like.in_a_row
    odd = changed(0, torch.randn(4, 3).t())
    for _ in range(3):
        assert like.fits(odd)
        assert not like.in_a_row
    for _ in range(MOST_GUARDS * 2):  # Those that differ each time are not learnt for ever.
        assert like.fits(some())
        assert like.fits(odd)
        assert not like.in_a_row


def test_no_tensor_is_held():
    found = some()
    like = TensorSignature(found)
    assert like.fits(found)
    gone = [weakref.ref(tensor) for tensor in found]
    del found
    assert [tensor() for tensor in gone] == [None] * 4


def test_where_there_is_no_such_way_each_is_asked(monkeypatch):
    class Broken:
        def __init__(self, *_, **__):
            raise TypeError("another signature")

    monkeypatch.setattr(modes, "_tensor_guards", Broken)
    like = TensorSignature(some())
    assert like.fits(some())
    assert like.fits(some())
    assert not like.in_a_row
    assert not like.fits(changed(0, torch.randn(4, 3)))
