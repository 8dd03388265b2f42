"""Edited parameters reach everything that reads them, and leave nothing behind."""

import asyncio
import copy
import functools
import random
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint

import tenterhook as th
from tenterhook.compiled import late_start
from tenterhook.engine import session
from tenterhook.pytorch import dynamo

X = torch.linspace(-1, 1, 12).reshape(4, 3)


# --- random layers against the same layer with its parameter overwritten ----------------------------------------------


@pytest.fixture(params=[False, True, "model"], ids=["", "after-compile", "compiled-model"], autouse=True)
def compile_was_used(request, monkeypatch):
    """Sessions act otherwise in a process that has used torch.compile."""
    for user in (dynamo, session):
        monkeypatch.setattr(user, "has_compiled_anything", lambda: bool(request.param))
    if request.param == "model":
        monkeypatch.setattr(late_start, "runs", lambda _: True)
    return request.param


class Double(nn.Module):
    def forward(self, weight):
        return weight * 2


class Nested(Double):
    def right_inverse(self, weight):
        return weight / 2


def weight_norm(layer):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.utils.weight_norm(layer)


def pruned(layer):
    prune.l1_unstructured(layer, "weight", 3)
    return layer


def pruned_twice(layer):
    return pruned(pruned(layer))


def parametrized(layer):
    parametrize.register_parametrization(layer, "weight", Nested())
    parametrize.register_parametrization(layer, "weight", Nested())
    return layer


LAYERS = {
    lambda layer: layer: ("weight", "bias"),
    pruned: ("weight_orig", "weight_mask", "bias"),
    pruned_twice: ("weight_orig", "weight_mask"),
    weight_norm: ("weight_g", "weight_v", "bias"),
    nn.utils.spectral_norm: ("weight_orig", "weight_u", "bias"),
    parametrizations.weight_norm: ("parametrizations.weight.original0", "parametrizations.weight.original1", "bias"),
    parametrizations.spectral_norm: ("parametrizations.weight.original", "bias"),
    parametrizations.orthogonal: ("parametrizations.weight.original",),
    parametrized: ("parametrizations.weight.original", "bias"),
}


class Reads(nn.Module):
    """A parent that uses the child's weight without calling the child."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return functional.linear(x, self.inner.weight)


class Stream(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        yield functional.linear(x, self.inner.weight)
        yield self.inner(x)


class Later(Stream):
    async def forward(self, x):
        await asyncio.sleep(0)
        return functional.linear(x, self.inner.weight) + self.inner(x)


class LaterStream(Stream):
    async def forward(self, x):
        for _ in range(2):
            await asyncio.sleep(0)
            yield functional.linear(x, self.inner.weight) + self.inner(x)


PARENTS = {None: "", nn.Sequential: "0.", Reads: "inner.", Stream: "inner.", Later: "inner.", LaterStream: "inner."}


def drained(value):
    async def all_of_it():
        return sum([item async for item in value])

    if hasattr(value, "__anext__"):
        return asyncio.run(all_of_it())
    if hasattr(value, "__await__"):
        return asyncio.run(value)
    return value if isinstance(value, torch.Tensor) else sum(value)


def random_case(seed):
    """A model, the address of a parameter in it, and how to run it."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    wrap, parent = draw.choice(list(LAYERS)), draw.choice(list(PARENTS))
    address = PARENTS[parent] + draw.choice(LAYERS[wrap])
    layer = wrap(nn.Linear(3, 3))
    model = layer if parent is None else parent(layer)
    cached = draw.random() < 0.3

    def run():
        if cached:
            with parametrize.cached():
                return drained(model(X)) + drained(model(X))
        return drained(model(X))

    # In training, spectral normalisation refines its vectors: each call of a session begins with the model's own.
    several = cached or parent in (Stream, Later, LaterStream)
    spectral = wrap in (nn.utils.spectral_norm, parametrizations.spectral_norm)
    return model.train(draw.random() < 0.5 and not (spectral and several)), layer, address, run


def state(model):
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def load(model, values):
    with torch.no_grad():
        for name, value in model.state_dict().items():
            value.copy_(values[name])


def refresh(layer):
    """Have a layer compute its weight from its present parameters; nothing else in it changes."""
    training = layer.training
    layer.eval()(X)
    layer.train(training)


def run_plainly(run, model, layer, values):
    """Run a model with these parameters and buffers; gives the output, the state and the layer's weight after it."""
    with torch.no_grad():
        load(model, values)
        refresh(layer)
        return run(), state(model), layer.weight.clone()


@pytest.mark.parametrize("seed", range(120))
def test_an_edit_of_any_parameter_gives_what_the_overwritten_parameter_gives(seed):
    model, layer, address, run = random_case(seed)
    start = state(model)
    other = torch.randn_like(start[address])
    truth, _, _ = run_plainly(run, model, layer, {**start, address: other})
    _, after, weight = run_plainly(run, model, layer, start)
    load(model, start)
    refresh(layer)
    with th.edit(model, {address: th.set(other)}):
        found = run()
    assert torch.allclose(found, truth, atol=1e-5)
    assert all(torch.allclose(after[name], value, atol=1e-6) for name, value in state(model).items())
    assert torch.allclose(layer.weight, weight, atol=1e-5)


def test_a_weight_norm_module_follows_training_in_a_session():
    layer = weight_norm(nn.Linear(3, 3))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    with th.edit(layer, {"weight_g": th.scale(2.0)}):
        for _ in range(3):
            layer(X).sum().backward()
            optimizer.step()
            layer(X)
    assert torch.allclose(layer.weight, torch._weight_norm(layer.weight_v, layer.weight_g, 0))


def test_zeros_in_a_spectral_norm_do_not_ruin_its_vectors():
    layer = nn.utils.spectral_norm(nn.Linear(3, 3))
    with th.edit(layer, {"weight_orig": th.zero()}):
        layer(X)
    assert layer(X).isfinite().all()


def test_a_cached_weight_from_before_the_session_is_not_used_in_it_and_comes_back_after_it():
    layer = parametrizations.weight_norm(nn.Linear(3, 3))
    with parametrize.cached():
        before = layer(X)
        weight = layer.weight
        with th.edit(layer, {"parametrizations.weight.original0": th.zero(), "bias": th.zero()}):
            assert layer(X).eq(0).all()
        assert layer.weight is weight
        assert torch.equal(layer(X), before)


def test_a_hook_of_the_users_own_that_computes_a_weight_sees_the_edit():
    layer = nn.Linear(3, 3, bias=False)
    layer.raw = layer.weight
    del layer._parameters["weight"]
    layer.register_forward_pre_hook(lambda module, _: setattr(module, "weight", module.raw - module.raw.mean()))
    layer(X)
    weight = layer.weight
    with th.edit(layer, {"raw": th.zero()}):
        assert layer(X).eq(0).all()
    assert layer.weight is weight


class Checkpointed(nn.Module):
    def __init__(self, layer, *, reentrant):
        super().__init__()
        self.layer, self.reentrant = layer, reentrant

    def forward(self, x):
        return checkpoint(self.layer, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_computes_the_weight_again_from_the_edited_parameter(reentrant, closed):
    model = Checkpointed(weight_norm(nn.Linear(3, 3)), reentrant=reentrant)
    layer, x = model.layer, X.clone().requires_grad_()
    session = th.edit(model, {"layer.weight_g": th.scale(2.0)}).start()
    loss = model(x).pow(2).sum()
    if closed:
        session.close()
    loss.backward()
    session.close()
    g, v = (each.detach().clone().requires_grad_() for each in (layer.weight_g, layer.weight_v))
    functional.linear(X, torch._weight_norm(v, g * 2, 0), layer.bias.detach()).pow(2).sum().backward()
    assert torch.allclose(layer.weight_g.grad, g.grad)
    assert torch.allclose(layer.weight_v.grad, v.grad)


# --- parameters that are kept a second time ---------------------------------------------------------------------------


class Keeper(nn.Module):
    """A module that reads its parameter from somewhere else as well."""

    def __init__(self, keep):
        super().__init__()
        self.w = nn.Parameter(torch.randn(3))
        self.read = keep(self)

    def forward(self, x):
        return x * self.w + x * self.read()


class Plain:
    def __init__(self, w):
        self.w = w


class Slots:
    __slots__ = ("w",)

    def __init__(self, w):
        self.w = w


def in_a_list(module):
    module.ws = [module.w]
    return lambda: module.ws[0]


def in_a_dict_in_a_list(module):
    module.ws = [{"a": {"w": module.w}}]
    return lambda: module.ws[0]["a"]["w"]


def in_a_closure(module):
    w = module.w
    return lambda: w


def in_a_second_attribute(module):
    module.__dict__["again"] = module.w
    return lambda: module.again


def in_an_object(module):
    module.holder = Plain(module.w)
    return lambda: module.holder.w


def in_slots(module):
    module.holder = Slots(module.w)
    return lambda: module.holder.w


def in_a_hidden_module(module):
    hidden = nn.Module()
    hidden.w = module.w
    module.others = [hidden]
    return lambda: module.others[0].w


def in_a_tuple(module):
    module.ws = (module.w,)
    return lambda: module.ws[0]


def in_a_default(module):
    return lambda w=module.w: w


def in_a_partial(module):
    return functools.partial(lambda w: w, module.w)


def in_a_view(module):
    module.view = module.w.view(3)
    return lambda: module.view


def in_an_array(module):
    module.array = module.w.detach().numpy()
    return lambda: torch.from_numpy(module.array)


SEEN = [
    in_a_list, in_a_dict_in_a_list, in_a_closure, in_a_second_attribute, in_an_object, in_slots, in_a_hidden_module,
]  # fmt: skip
REFUSED = [in_a_tuple, in_a_default, in_a_partial, in_a_view, in_an_array]


@pytest.mark.parametrize("keep", SEEN)
def test_a_parameter_that_is_kept_elsewhere_is_edited_there_too(keep):
    model = Keeper(keep)
    before = model(X)
    with th.edit(model, {"w": th.scale(3.0)}):
        found = model(X)
    assert torch.allclose(found, X * model.w * 6)
    assert torch.equal(model(X), before)


@pytest.mark.parametrize("keep", REFUSED)
def test_a_parameter_that_is_kept_where_no_edit_reaches_is_refused_at_the_start(keep):
    model = Keeper(keep)
    with pytest.raises(th.UnsupportedModel, match="'w' cannot be edited"):
        th.edit(model, {"w": th.zero()}).start()
    assert "forward" not in model.__dict__


GLOBAL = []


class ReadsGlobal(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(3))
        GLOBAL[:] = [self.w]

    def forward(self, x):
        return x * GLOBAL[0]


def test_a_parameter_in_a_global_list_is_edited_there_too():
    model = ReadsGlobal()
    with th.edit(model, {"w": th.zero()}):
        assert model(X).eq(0).all()
    assert GLOBAL[0] is model.w


# --- tied parameters --------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(4, 3), nn.Linear(3, 4, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.embed(ids))


@pytest.mark.parametrize("name", ["embed.weight", "head.weight"])
def test_a_second_owner_that_is_called_by_itself_uses_the_edited_parameter(name):
    model = Tied()
    with th.edit(model, {name: th.zero()}):
        assert model.head(X).eq(0).all()
        assert model.embed(torch.arange(4)).eq(0).all()


@pytest.mark.parametrize("part", ["embed", "head"])
def test_a_second_owner_outside_of_the_given_module_is_refused(part):
    model = Tied()
    with pytest.raises(th.UnsupportedModel, match="outside this"):
        th.edit(getattr(model, part), {"weight": th.zero()}).start()


def test_an_optimizer_is_no_second_owner():
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with th.edit(model, {"embed.weight": th.zero()}):
        model(torch.arange(4))
    assert optimizer.param_groups[0]["params"][0] is model.embed.weight


@pytest.mark.parametrize("wrap", [weight_norm, parametrizations.weight_norm])
@pytest.mark.parametrize("make", [nn.LSTM, nn.GRU])
def test_a_normalised_recurrent_layer_uses_its_edited_weights_and_forgets_them(wrap, make):
    layer = functools.partial(nn.utils.weight_norm if wrap is weight_norm else wrap, name="weight_hh_l0")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model = layer(make(3, 3))
    name = "weight_hh_l0_g" if wrap is weight_norm else "parametrizations.weight_hh_l0.original0"
    before = model(X)[0]
    tensor = functools.reduce(getattr, name.split("."), model)
    with torch.no_grad():
        tensor.mul_(3)
        truth = model(X)[0]
        tensor.div_(3)
    with th.edit(model, {name: th.scale(3.0)}):
        assert torch.allclose(model(X)[0], truth, atol=1e-6)
    assert torch.allclose(model(X)[0], before, atol=1e-6)


# --- the model's own updates of buffers -------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
def test_a_norm_layer_in_training_keeps_its_own_updates_of_an_edited_buffer(seed):
    draw = random.Random(seed)
    torch.manual_seed(seed)
    make = draw.choice([nn.BatchNorm1d, lambda size: nn.InstanceNorm1d(size, track_running_stats=True)])
    model = nn.Sequential(make(3))
    x = torch.randn(5, 3, 4)
    model(x)
    twin = copy.deepcopy(model)
    name, change = draw.choice([("running_mean", th.set(5.0)), ("running_var", th.scale(3.0))])
    if draw.random() < 0.3:
        name, change = "num_batches_tracked", th.set(100)
    with th.edit(model, {f"0.{name}": change}):
        for step in range(draw.randrange(1, 4)):
            model(x * step)
            twin(x * step)
    assert all(torch.equal(value, twin.state_dict()[key]) for key, value in model.state_dict().items())


class Counts(nn.Module):
    def __init__(self, *, assigns):
        super().__init__()
        self.register_buffer("seen", torch.tensor([1.0, 2.0]))
        self.assigns = assigns

    def forward(self, x):
        if self.assigns:
            self.seen = self.seen + x
        else:
            self.seen += x
        return self.seen * 1


@pytest.mark.parametrize("assigns", [False, True])
def test_what_a_model_adds_to_an_edited_buffer_is_added_to_the_original(assigns):
    model = Counts(assigns=assigns)
    with th.edit(model, {"seen": th.set(100.0)}):
        assert model(torch.ones(2)).tolist() == [101, 101]
        model(torch.ones(2))
    assert model.seen.tolist() == [3, 4]


# --- ways out ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_in_the_middle_of_a_call_leaves_the_original_in_place(error):
    class Fails(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = weight_norm(nn.Linear(3, 3))

        def forward(self, x):
            self.layer(x)
            raise error

    model = Fails()
    g, weight = model.layer.weight_g, model.layer.weight
    with th.edit(model, {"layer.weight_g": th.zero()}):
        with pytest.raises(error):
            model(X)
        assert model.layer.weight_g is g
        assert model.layer.weight is weight


def test_a_generator_that_is_left_half_way_leaves_the_original_in_place():
    model = Stream(nn.Linear(3, 3, bias=False))
    weight = model.inner.weight
    with th.edit(model, {"inner.weight": th.zero()}):
        steps = model(X)
        assert next(steps).eq(0).all()
        assert model.inner.weight is weight
        steps.close()
    assert model.inner.weight is weight


def test_a_generator_takes_what_is_sent_and_thrown_and_returns_its_value():
    class Echo(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.tensor(2.0))

        def forward(self, x):
            given = yield self.w * x
            try:
                yield self.w * given
            except ValueError:
                yield self.w * 7
            return "done"

    model = Echo()
    with th.edit(model, {"w": th.scale(10.0)}):
        steps = model(torch.tensor(1.0))
        found = [next(steps).item(), steps.send(3).item(), steps.throw(ValueError("no")).item()]
        with pytest.raises(StopIteration) as end:
            next(steps)
    assert found == [20, 60, 140]
    assert end.value.value == "done"


def test_a_weight_that_hooks_compute_in_a_module_whose_call_was_replaced_is_refused():
    layer = weight_norm(nn.Linear(3, 3))
    layer._compiled_call_impl = layer._call_impl
    with pytest.raises(th.UnsupportedModel, match=r"Module\.compile"), th.edit(layer, {"weight_g": th.scale(2.0)}):
        layer(X)
