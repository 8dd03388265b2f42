"""Handles and life cycle of ``tenterhook.hooks``: copies, pickles, garbage, order of registration, other calls."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from hook_toys import Run, X, x_leaf
from torch import nn

import tenterhook as th
from tenterhook import hooks

REGISTER = {
    "forward_pre": hooks.register_forward_pre_hook,
    "forward": hooks.register_forward_hook,
    "backward_pre": hooks.register_backward_pre_hook,
    "backward": hooks.register_backward_hook,
}
LOG = []


def note(module, *_):
    LOG.append(module.name)


def hooked(kind, *, readonly=False):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    model[0].name = "original"
    model.handle = REGISTER[kind](model[0], note, readonly=readonly)
    return model


def calls_of(model):
    del LOG[:]
    model(x_leaf()).sum().backward()
    return list(LOG)


@pytest.mark.parametrize("copying", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("readonly", [False, True])
@pytest.mark.parametrize("kind", REGISTER)
def test_the_handle_of_a_copy_removes_the_hook_of_the_copy_only(kind, readonly, copying):
    model = hooked(kind, readonly=readonly)
    twin = copying(model)
    twin[0].name = "twin"
    assert (calls_of(model), calls_of(twin)) == (["original"], ["twin"])
    twin.handle.remove()
    assert (calls_of(model), calls_of(twin)) == (["original"], [])
    assert not twin[0]._forward_hooks
    model.handle.remove()
    assert calls_of(model) == []


@pytest.mark.parametrize("kind", REGISTER)
def test_the_handle_of_the_original_leaves_the_hook_of_the_copy(kind):
    model = hooked(kind)
    twin = copy.deepcopy(model)
    twin[0].name = "twin"
    model.handle.remove()
    assert (calls_of(model), calls_of(twin)) == ([], ["twin"])


def test_a_copy_of_a_handle_alone_removes_nothing():
    model = hooked("backward")
    copy.deepcopy(model.handle).remove()
    pickle.loads(pickle.dumps(model.handle)).remove()
    assert calls_of(model) == ["original"]
    x, seen = x_leaf(), []
    copy.deepcopy(hooks.register_hook(x, seen.append)).remove()
    x.sum().backward()
    assert len(seen) == 1


@pytest.mark.parametrize("kind", REGISTER)
def test_a_handle_keeps_no_module_alive_and_makes_no_cycle(kind):
    gc.collect()
    gc.disable()
    try:
        module = nn.Linear(3, 2)
        handle, gone = REGISTER[kind](module, lambda *_: None), weakref.ref(module)
        module(x_leaf()).sum().backward()
        del module
        assert gone() is None
        handle.remove()
    finally:
        gc.enable()


# -- the order of registration ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("register_pre", [hooks.register_forward_pre_hook, nn.Module.register_forward_pre_hook])
@pytest.mark.parametrize("pre_hook_first", [False, True])
@pytest.mark.parametrize("calls", [1, 2])
def test_grad_input_is_that_of_what_forward_gets(register_pre, pre_hook_first, calls):
    module, log = nn.Tanh(), []

    def register():
        hooks.register_backward_hook(module, lambda m, i, o: (log.append(i[0]), (i[0] + 1,))[1])

    if not pre_hook_first:
        register()
    register_pre(module, lambda m, args: args[0] * 3)
    if pre_hook_first:
        register()
    for _ in range(calls):
        x = x_leaf()
        module(x).sum().backward()
    slope = 1 - (X * 3).tanh().pow(2)
    torch.testing.assert_close(log[-1], slope)
    torch.testing.assert_close(x.grad, (slope + 1) * 3)


def test_a_later_pre_hook_that_adds_an_argument_is_an_error_in_the_first_call_only():
    module, log = Run(lambda x, y: x * y), []
    hooks.register_backward_hook(module, lambda m, i, o: log.append(i))
    module.register_forward_pre_hook(lambda m, args: (args[0], args[0] * 2))
    with pytest.raises(th.HookError, match="replaced some of the inputs"):
        module(x_leaf())
    x = x_leaf()
    module(x).sum().backward()
    torch.testing.assert_close(log[0], (X * 2, X))
    torch.testing.assert_close(x.grad, X * 4)


# -- calls of other kinds ---------------------------------------------------------------------------------------------


class OldCall(nn.Linear):
    """A module that calls its hooks itself, as PyTorch 1 did: without keyword arguments, and not after an exception."""

    fails = False

    def __call__(self, *given, **keywords):
        for hook in self._forward_pre_hooks.values():
            new = hook(self, given)
            if new is not None:
                given = new if isinstance(new, tuple) else (new,)
        if self.fails:
            raise ZeroDivisionError
        result = self.forward(*given, **keywords)
        for hook in self._forward_hooks.values():
            new = hook(self, given, result)
            result = result if new is None else new
        return result


def test_a_class_with_a_call_in_the_style_of_pytorch_1_calls_the_hooks():
    module, plain, log = OldCall(3, 2), nn.Linear(3, 2), []
    plain.load_state_dict(module.state_dict())
    hooks.register_backward_pre_hook(module, lambda m, o: (o[0] * 2,))
    hooks.register_backward_hook(module, lambda m, i, o: log.append((i, o)))
    hooks.register_forward_pre_hook(module, lambda m, args: (args[0] * 1,))
    for _ in range(2):
        x, y = x_leaf(), x_leaf()
        module(x).pow(2).sum().backward()
        plain(y).pow(2).sum().backward()
        torch.testing.assert_close(x.grad, y.grad * 2)
        torch.testing.assert_close(log[-1][0][0], y.grad * 2)
    assert len(log) == 2


def test_calls_that_an_exception_ends_are_forgotten():
    module = OldCall(3, 2)
    module.name, module.fails = "original", True
    hooks.register_backward_hook(module, note)
    for _ in range(100):
        with pytest.raises(ZeroDivisionError):
            module(x_leaf())
    manager = module._forward_hooks["tenterhook-backward"].__self__
    assert sum(map(len, manager._running.values())) < 50
    module.fails = False
    assert calls_of(module) == ["original"]


def test_a_list_that_the_module_appends_to_is_the_callers_own():
    module = Run(lambda x, found: (found.append(x * 2), x * 3)[1])
    hooks.register_backward_hook(module, lambda *_: None)
    x, first = x_leaf(), x_leaf()
    found = [first]
    (module(x, found).sum() + sum(found).sum()).backward()
    assert len(found) == 2
    assert found[0] is first
    torch.testing.assert_close(x.grad, torch.full_like(X, 5))
    torch.testing.assert_close(first.grad, torch.ones_like(X))


# -- what a hook may return -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("register", [hooks.register_backward_hook, nn.Module.register_full_backward_hook])
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_a_gradient_for_inputs_that_require_none_is_an_error(register):
    module, answers = nn.Linear(3, 2), [None, (None,), (X,)]
    register(module, lambda m, i, o: answers.pop(0))
    module(X).sum().backward()
    module(X).sum().backward()
    with pytest.raises((RuntimeError, th.HookError), match="no input"):
        module(X).sum().backward()


@pytest.mark.parametrize("register", [hooks.register_backward_hook, nn.Module.register_full_backward_hook])
def test_none_in_the_place_of_a_gradient_stops_it(register):
    module, x = nn.Bilinear(3, 3, 2), x_leaf()
    register(module, lambda m, i, o: (None, i[1]))
    y = x_leaf()
    module(x, y).sum().backward()
    assert x.grad is None or not x.grad.any()
    assert y.grad.any()


def test_a_gradient_where_none_flowed_is_an_error_that_names_the_place():
    module = Run(lambda x, y: x * 2)
    hooks.register_backward_hook(module, lambda m, i, o: (i[0], X))
    with pytest.raises(th.HookError, match="at index 1 of grad_input, which has no gradient"):
        module(x_leaf(), x_leaf()).sum().backward()
