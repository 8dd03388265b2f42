import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module

from tenterhook.testing import no_leak, untouched


def model():
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))


def replace_by_an_equal_parameter(m):
    m[0].weight = nn.Parameter(m[0].weight.detach().clone())


def replace_a_container(m):
    m[0].__dict__["_forward_hooks"] = type(m[0]._forward_hooks)()


CHANGES = {
    "a hook": lambda m: m[0].register_forward_hook(lambda *_: None),
    "a pre-hook": lambda m: m[0].register_forward_pre_hook(lambda *_: None),
    "a forward": lambda m: setattr(m[0], "forward", m[0].forward),
    "an attribute that is None": lambda m: setattr(m[0], "extra", None),
    "a flag": lambda m: m.eval(),
    "a parameter in place": lambda m: m[0].weight.data.add_(1),
    "an equal parameter": replace_by_an_equal_parameter,
    "a buffer": lambda m: m(torch.ones(2, 2)),
    "requires_grad": lambda m: m[0].weight.requires_grad_(False),
    "a gradient": lambda m: m[0](torch.ones(1, 2)).sum().backward(),
    "a tensor hook": lambda m: m[0].weight.register_hook(lambda g: g),
    "a container": replace_a_container,
    "a module": lambda m: m.append(nn.ReLU()),
    "a random number": lambda m: torch.rand(1),
    "a class": lambda m: setattr(m[0], "__class__", nn.Bilinear),
}


@pytest.mark.parametrize("name", CHANGES)
def test_every_change_is_noticed(name):
    changed = model()
    with pytest.raises(AssertionError, match="changed:"), untouched(changed):
        CHANGES[name](changed)


def test_a_second_hook_on_a_tensor_that_has_one_is_noticed():
    changed = model()
    changed[0].weight.register_hook(lambda g: g)
    with pytest.raises(AssertionError, match=r"\(hooks\)"), untouched(changed):
        changed[0].weight.register_hook(lambda g: g)


@pytest.mark.parametrize("make", [model, lambda: nn.LSTM(2, 2)])
def test_a_run_alone_is_no_change(make):
    same = make().eval()
    same.array = torch.ones(3).numpy()
    with untouched(same):
        same(torch.ones(2, 2))


def test_hooks_of_all_modules_are_part_of_what_is_compared(monkeypatch):
    monkeypatch.setattr(torch_module, "_global_is_full_backward_hook", None)  # PyTorch sets it and never resets it.
    with torch_module.register_module_full_backward_hook(lambda *_: None), untouched(model()):
        pass
    with pytest.raises(AssertionError, match="global"), untouched(model()):
        handle = torch_module.register_module_forward_hook(lambda *_: None)
    handle.remove()


def test_random_numbers_may_be_let_through():
    with untouched(model(), rng=False):
        torch.rand(1)


def test_a_tensor_that_outlives_the_block_is_noticed():
    kept = []
    with pytest.raises(AssertionError, match="1 tensor is still alive"), no_leak():
        kept.append(torch.ones(2))


def test_a_tensor_that_only_a_cycle_keeps_is_noticed():
    with pytest.raises(AssertionError, match="still alive"), no_leak():
        cycle = [torch.ones(2)]
        cycle.append(cycle)
        del cycle


def test_a_tensor_that_takes_the_place_of_an_old_one_is_noticed():
    old = [torch.ones(2) for _ in range(50)]
    with pytest.raises(AssertionError, match="50 tensors are still alive"), no_leak():
        old.clear()
        new = [torch.ones(2) for _ in range(50)]
    assert len(new) == 50


def test_the_collector_is_left_as_it_was():
    gc.disable()
    try:
        with no_leak():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
    with no_leak():
        weakref.ref(model())
    assert gc.isenabled()
