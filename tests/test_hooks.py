"""``tenterhook.hooks``, compared with PyTorch's hooks where those are right, and with true gradients elsewhere."""

import copy

import pytest
import torch
from hook_toys import Run, X, then, x_leaf
from torch import nn

import tenterhook as th
from tenterhook import hooks
from tenterhook.testing import untouched


def same(one, other):
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other), (one, other)
    elif isinstance(one, tuple | list):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            same(a, b)
    else:
        assert one == other


# -- forward hooks ----------------------------------------------------------------------------------------------------


def forward_log(pre, post, *, with_kwargs, prepend):
    """Return what the forward hooks of a module receive, if these two functions register them."""
    log, module = [], nn.Bilinear(3, 3, 2)
    torch.manual_seed(0)
    module.reset_parameters()
    for name in ("first", "second"):
        pre(
            module,
            lambda *a, name=name: log.append((name, "pre", len(a), a[1:])),
            prepend=prepend,
            with_kwargs=with_kwargs,
        )
        post(
            module,
            lambda *a, name=name: log.append((name, "post", len(a), a[1:])),
            prepend=prepend,
            with_kwargs=with_kwargs,
        )
    module(X, input2=X)
    return [(name, when, count) for name, when, count, _ in log], [rest for *_, rest in log]


@pytest.mark.parametrize("with_kwargs", [False, True])
@pytest.mark.parametrize("prepend", [False, True])
def test_forward_hooks_are_called_like_pytorchs_own(with_kwargs, prepend):
    options = {"with_kwargs": with_kwargs, "prepend": prepend}
    mine = forward_log(hooks.register_forward_pre_hook, hooks.register_forward_hook, **options)
    theirs = forward_log(nn.Module.register_forward_pre_hook, nn.Module.register_forward_hook, **options)
    assert mine[0] == theirs[0]
    for one, other in zip(mine[1], theirs[1], strict=True):
        same(
            [v for v in one if isinstance(v, tuple | torch.Tensor)],
            [v for v in other if isinstance(v, tuple | torch.Tensor)],
        )


@pytest.mark.parametrize("returned", [None, X * 2, (X * 3,)])
def test_what_a_pre_hook_returns_replaces_the_input_and_is_wrapped(returned):
    mine, theirs = nn.Linear(3, 2), nn.Linear(3, 2)
    theirs.load_state_dict(mine.state_dict())
    hooks.register_forward_pre_hook(mine, lambda module, args: returned)
    theirs.register_forward_pre_hook(lambda module, args: returned)
    same(mine(X), theirs(X))


def test_with_kwargs_a_pre_hook_replaces_arguments_and_keywords():
    module = nn.Bilinear(3, 3, 2)
    hooks.register_forward_pre_hook(
        module, lambda module, args, kwargs: (args, {"input2": kwargs["input2"] * 0}), with_kwargs=True
    )
    same(module(X, input2=X), module.bias.expand(4, 2))


def test_what_a_forward_hook_returns_replaces_the_output():
    module = nn.Linear(3, 2)
    hooks.register_forward_hook(module, lambda module, args, output: {"y": output})
    assert set(module(X)) == {"y"}


@pytest.mark.parametrize("register", [hooks.register_forward_hook, nn.Module.register_forward_hook])
def test_always_call_hooks_run_when_forward_raises(register):
    def broken(x):
        raise ZeroDivisionError

    module, log = Run(broken), []
    register(module, lambda *_: log.append("always"), always_call=True)
    register(module, lambda *_: log.append("never"))
    with pytest.raises(ZeroDivisionError):
        module(X)
    assert log == ["always"]


def test_ours_and_native_hooks_stand_in_one_line():
    module, log = nn.Linear(3, 2), []
    module.register_forward_hook(lambda *_: log.append("native"))
    hooks.register_forward_hook(module, lambda *_: log.append("ours"))
    module.register_forward_hook(lambda *_: log.append("native again"))
    hooks.register_forward_hook(module, lambda *_: log.append("ours first"), prepend=True)
    module(X)
    assert log == ["ours first", "native", "ours", "native again"]


# -- handles ----------------------------------------------------------------------------------------------------------

REGISTER = {
    "forward_pre": hooks.register_forward_pre_hook,
    "forward": hooks.register_forward_hook,
    "backward_pre": hooks.register_backward_pre_hook,
    "backward": hooks.register_backward_hook,
}


@pytest.mark.parametrize("kind", REGISTER)
def test_a_handle_removes_its_hook_any_number_of_times_and_leaves_the_module_as_it_was(kind):
    module, log = nn.Linear(3, 2), []
    with untouched(module):
        handle = REGISTER[kind](module, lambda *_: log.append(1))
        assert isinstance(handle.id, int)
        handle.remove()
        handle.remove()
        with REGISTER[kind](module, lambda *_: log.append(2)) as other:
            assert other.id > handle.id
            assert "in place" in repr(other)
            torch.autograd.grad(module(x_leaf()).sum(), module.weight)
        torch.autograd.grad(module(x_leaf()).sum(), module.weight)
    assert log in ([2], [2] * (kind != "backward"))
    assert "removed" in repr(other)


@pytest.mark.parametrize("kind", ["backward_pre", "backward"])
def test_hooks_may_remove_themselves_and_register_others_while_they_run(kind):
    module, log = nn.Linear(3, 2), []

    def once(*_):
        log.append("once")
        handle.remove()
        later.append(REGISTER[kind](module, lambda *_: log.append("later")))

    later = []
    handle = REGISTER[kind](module, once)
    for _ in range(3):
        module(x_leaf()).sum().backward()
    assert log == ["once", "later", "later"]
    later[0].remove()
    assert not module._forward_pre_hooks
    assert not module._forward_hooks


@pytest.mark.parametrize("kind", REGISTER)
def test_a_copy_of_a_hooked_module_has_the_hooks_and_a_life_of_its_own(kind):
    module, log = nn.Linear(3, 2), []
    handle = REGISTER[kind](module, lambda module, *_: log.append(module))
    twin = copy.deepcopy(module)
    twin(x_leaf()).sum().backward()
    assert log == [twin]
    handle.remove()
    module(x_leaf()).sum().backward()
    twin(x_leaf()).sum().backward()
    assert log == [twin, twin]


@pytest.mark.parametrize("kind", REGISTER)
@pytest.mark.parametrize(("module", "fn", "said"), [(3, print, "got a int"), (nn.Linear, print, "the class Linear")])
def test_what_is_no_module_is_refused(kind, module, fn, said):
    with pytest.raises(th.HookError, match=said):
        REGISTER[kind](module, fn)


@pytest.mark.parametrize("kind", REGISTER)
def test_what_is_no_function_is_refused_and_nothing_is_left(kind):
    module = nn.Linear(3, 2)
    with untouched(module), pytest.raises(th.HookError, match="a hook is a function; got a int"):
        REGISTER[kind](module, 3)


# -- tensor hooks -----------------------------------------------------------------------------------------------------


def test_a_tensor_hook_replaces_the_gradient_like_pytorchs_own():
    results = []
    for register in (hooks.register_hook, torch.Tensor.register_hook):
        x, log = x_leaf(), []
        y = x * 2
        register(y, lambda g, log=log: log.append(g.clone()))
        register(y, lambda g: g * 10)
        register(x, lambda g: g + 1)
        y.pow(2).sum().backward()
        results.append((log, x.grad))
    same(*results)


@pytest.mark.parametrize("changed", ["view", "base"])
def test_a_hook_on_a_view_survives_a_change_in_place(changed):
    x, log = x_leaf(), []
    base = x * 2
    view = base[:, 1:]
    hooks.register_hook(view, lambda g: (log.append(g), g * 10)[1])
    (view if changed == "view" else base).mul_(3)
    base.pow(2).sum().backward()
    expected = 2 * (X * 6) * 3
    same(log, [expected[:, 1:]])
    expected[:, 1:] *= 10
    if changed == "view":
        expected[:, 0] = 2 * (X * 2)[:, 0]
    torch.testing.assert_close(x.grad, expected * 2)


def test_a_removed_tensor_hook_is_not_called():
    x, log = x_leaf(), []
    base = x * 2
    handle = hooks.register_hook(base[:, 1:], log.append)
    handle.remove()
    handle.remove()
    base.mul_(2).sum().backward()
    assert not log


def test_a_tensor_that_needs_no_gradient_or_is_none_is_refused():
    with pytest.raises(th.HookError, match="requires no gradient"):
        hooks.register_hook(X, print)
    with pytest.raises(th.HookError, match=r"torch\.Tensor; got a list"):
        hooks.register_hook([X], print)


# -- read-only hooks --------------------------------------------------------------------------------------------------


def spoil(*given):
    for value in given:
        for tensor in value if isinstance(value, tuple) else (value,):
            if isinstance(tensor, torch.Tensor):
                with torch.no_grad():
                    tensor.mul_(2)
                return


@pytest.mark.parametrize("kind", [*REGISTER, "tensor"])
@pytest.mark.parametrize(
    ("fn", "said"),
    [(lambda *given: given[-1], r"<lambda> returned a"), (spoil, "spoil changed a tensor in place")],
)
def test_a_read_only_hook_that_returns_or_changes_something_is_an_error_that_names_it(kind, fn, said):
    module, x = nn.Linear(3, 2), x_leaf()
    h = x * 2
    if kind == "tensor":
        hooks.register_hook(h, fn, readonly=True)
    else:
        getattr(hooks, f"register_{kind}_hook")(module, fn, readonly=True)
    with pytest.raises(th.ReadonlyHook, match=said):
        module(h).pow(2).sum().backward()


@pytest.mark.parametrize("kind", REGISTER)
def test_a_read_only_hook_that_only_looks_is_no_trouble(kind):
    module, log = nn.Linear(3, 2), []
    getattr(hooks, f"register_{kind}_hook")(module, lambda *given: log.append(len(given)), readonly=True)
    module(x_leaf()).sum().backward()
    assert log == [{"forward_pre": 2, "forward": 3, "backward_pre": 2, "backward": 3}[kind]]


def test_a_read_only_hook_in_inference_mode_is_held_to_its_word():
    module = nn.Linear(3, 2)
    hooks.register_forward_hook(
        module, lambda module, args, output: None if output.zero_() is output else 1, readonly=True
    )
    with torch.inference_mode(), pytest.raises(th.ReadonlyHook, match="in place"):
        module(X)


# -- backward hooks beside PyTorch's own ------------------------------------------------------------------------------

NATIVE_IS_RIGHT = {
    "linear": (lambda: nn.Linear(3, 2), lambda m, x: m(x)),
    "two inputs": (lambda: nn.Bilinear(3, 3, 2), lambda m, x: m(x, x * 2)),
    "something else among the inputs": (lambda: Run(lambda x, n, y: x * n + y), lambda m, x: m(x, 3, x)),
    "no input with a gradient": (lambda: nn.Linear(3, 2), lambda m, x: m(X)),
    "two outputs": (lambda: Run(lambda x: (x * 2, x * 3)), lambda m, x: then(m(x), lambda y: y[0] * y[1])),
    "two outputs, one used": (lambda: Run(lambda x: (x * 2, x * 3)), lambda m, x: m(x)[1]),
    "used twice": (lambda: nn.Linear(3, 3), lambda m, x: m(m(x))),
}


def backward_log(case, pre, post, replace):
    torch.manual_seed(0)
    make, use = NATIVE_IS_RIGHT[case]
    module, x, log = make(), x_leaf(), []

    def seen(name):
        def hook(module, *gradients):
            log.append((name, gradients))
            if not replace or name.startswith("second"):
                return None
            return tuple(None if g is None else g * 2 for g in gradients[0])

        return hook

    pre(module, seen("pre"))
    post(module, seen("first"))
    post(module, seen("second"))
    use(module, x).pow(2).sum().backward()
    return log, x.grad, [p.grad for p in module.parameters()]


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("case", NATIVE_IS_RIGHT)
def test_backward_hooks_are_called_like_pytorchs_own(case, replace):
    mine = backward_log(case, hooks.register_backward_pre_hook, hooks.register_backward_hook, replace)
    theirs = backward_log(
        case, nn.Module.register_full_backward_pre_hook, nn.Module.register_full_backward_hook, replace
    )
    assert [name for name, _ in mine[0]] == [name for name, _ in theirs[0]]
    same(*[[g for _, gradients in log for part in gradients for g in part] for log, *_ in (mine, theirs)])
    same(mine[1:], theirs[1:])


def test_backward_hooks_are_prepended_like_pytorchs_own():
    module, log = nn.Linear(3, 2), []
    for name in "abc":
        hooks.register_backward_hook(module, lambda *_, name=name: log.append(name), prepend=name == "c")
    module(x_leaf()).sum().backward()
    assert log == ["c", "a", "b"]


def test_an_input_that_needs_no_gradient_has_none_where_pytorch_gives_zeros():
    module, log = nn.Bilinear(3, 3, 2), []
    hooks.register_backward_hook(module, lambda module, incoming, outgoing: log.append(incoming))
    x = x_leaf()
    module(x, X).sum().backward()
    same(log[0][0], x.grad)
    assert log[0][1] is None
