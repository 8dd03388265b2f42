import dataclasses
import functools

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import GPT2Config, GPT2LMHeadModel

import tenterhook as th
from tenterhook.testing import Cell, Mixed, untouched

X = torch.linspace(-1, 1, 6).reshape(2, 3)


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))


def by_hand(model, middle=lambda v: v):
    """The same network, written out, with something in its middle."""
    first = functional.linear(X, model[0].weight, model[0].bias)
    return functional.linear(middle(torch.tanh(first)), model[2].weight, model[2].bias)


# --- functions --------------------------------------------------------------------------------------------------------


def test_a_function_of_the_value_takes_its_place():
    model = mlp()
    with th.edit(model, {"1": lambda v: v.roll(1, 0) * 2}):
        found = model(X)
    assert torch.equal(found, by_hand(model, lambda v: v.roll(1, 0) * 2))


def test_a_function_may_ask_for_the_context():
    model, seen = mlp(), []

    def change(value, ctx):
        seen.append((ctx.address, ctx.call, ctx.module, ctx.tape, repr(ctx)))

    with th.edit(model, {"1": change, "0:in": change}):
        model(X)
    assert seen == [("0:in", 0, model[0], None, "<0:in#0>"), ("1", 0, model[1], None, "<1#0>")]


class Callable_:
    def __call__(self, value, ctx):
        assert ctx.address == "1"
        return value * 3

    def method(self, value):
        return value * 3


ARITIES = {
    "one": lambda v: v * 3,
    "two": lambda v, ctx: v * (3 + ctx.call),
    "a default of its own": lambda v, k=3: v * k,
    "a context by name": lambda v, ctx=None: v * (3 if ctx is not None else 0),
    "any": lambda *args: args[0] * 3 if len(args) == 1 else None,
    "keywords": lambda v, **options: v * 3,
    "an object": Callable_(),
    "a method": Callable_().method,
    "a partial": functools.partial(lambda k, v: v * k, 3),
    "a builtin": torch.zeros_like,
    "a function of torch": functional.relu,
    "a module": nn.ReLU(),
}


@pytest.mark.parametrize("name", ARITIES)
def test_a_function_of_any_shape_is_called_as_it_wants(name):
    model, change = mlp(), ARITIES[name]
    expected = {
        "a builtin": torch.zeros_like,
        "a function of torch": torch.relu,
        "a module": torch.relu,
    }.get(name, lambda v: v * 3)
    with th.edit(model, {"1": change}):
        assert torch.equal(model(X), by_hand(model, expected))


@pytest.mark.parametrize("wrong", [lambda: None, lambda a, b, c: None, lambda *, v: v])
def test_a_function_that_takes_something_else_is_refused_before_anything_runs(wrong):
    with pytest.raises(th.EditError, match=r"\(value\) or \(value, ctx\)"):
        th.edit(mlp(), {"1": wrong})


def test_returning_none_keeps_the_value():
    model = mlp()
    plain = model(X)
    with th.edit(model, {"1": lambda v: None, "0:in": lambda v: None, "0.weight": lambda v: None}):
        assert torch.equal(model(X), plain)


def test_a_function_may_change_the_value_in_place():
    model = mlp()

    def zero(value):
        value.zero_()

    with torch.no_grad(), th.edit(model, {"1": zero}):
        assert torch.equal(model(X), by_hand(model, torch.zeros_like))


def test_an_exception_says_where_it_came_from():
    def wrong(value):
        raise KeyError("mine")

    with pytest.raises(KeyError) as caught, th.edit(model := mlp(), {"1": wrong}):
        model(X)
    assert any("wrong at '1', call #0" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("given", [3, None, "zero", torch.ones(3)])
def test_what_is_no_edit_is_refused(given):
    with pytest.raises(th.EditError, match="ready edit"):
        th.edit(mlp(), {"1": given})


def test_a_number_in_place_of_an_edit_is_answered_with_the_edit_that_sets_it():
    with pytest.raises(th.EditError, match=r"got 0\. .*th\.set\(0\)"):
        th.edit(mlp(), {"1": 0})


def test_a_tensor_in_place_of_an_edit_is_answered_with_the_edit_that_sets_it():
    with pytest.raises(th.EditError, match=r"th\.set\(tensor\)"):
        th.edit(mlp(), {"1": torch.ones(3)})


@pytest.mark.parametrize("name", ["zero", "scale", "set"])
def test_a_ready_edit_that_was_not_called_is_reported(name):
    with pytest.raises(th.EditError, match=rf"th\.{name}\(\.\.\.\)"):
        th.edit(mlp(), {"1": getattr(th, name)})


@pytest.mark.parametrize("changes", [{}, None])
def test_nothing_to_edit_is_an_error(changes):
    with pytest.raises(th.EditError, match="nothing to edit"):
        th.edit(mlp(), changes)


def test_something_that_is_no_dict_is_an_error():
    with pytest.raises(th.EditError, match="dict of selector to change"):
        th.edit(mlp(), [("1", th.zero())])


# --- order ------------------------------------------------------------------------------------------------------------


def test_a_list_of_edits_is_applied_in_order():
    model = mlp()
    with th.edit(model, {"1": [th.add(1.0), th.scale(2), lambda v: v - 3]}):
        assert torch.equal(model(X), by_hand(model, lambda v: (v + 1) * 2 - 3))


def test_several_selectors_that_meet_at_a_point_act_in_the_order_they_are_written():
    model = mlp()
    with th.edit(
        model, {nn.Tanh: th.add(1.0), "1": th.scale(2), "*": lambda v, ctx: v - 3 if ctx.address == "1" else v}
    ):
        assert torch.equal(model(X), by_hand(model, lambda v: (v + 1) * 2 - 3))


def test_an_edit_at_one_call_leaves_the_others():
    model, x = Cell(3), torch.linspace(-1, 1, 18).reshape(3, 2, 3)
    cell = lambda step, state: torch.tanh(
        functional.linear(step, model.cell.weight_ih, model.cell.bias_ih)
        + functional.linear(state, model.cell.weight_hh, model.cell.bias_hh)
    )
    with th.edit(model, {"cell#1": th.zero()}):
        found = model(x)
    assert torch.allclose(found, cell(x[2], torch.zeros(2, 3)), atol=1e-6)


def test_an_edit_takes_effect_exactly_once_for_each_call():
    model, calls = mlp(), []
    with th.edit(model, {"1": lambda v, ctx: calls.append(ctx.call)}):
        for _ in range(3):
            model(X)
    assert calls == [0, 1, 2]


# --- checks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "got"),
    [
        (lambda v: v[:1], r"float32\[1, 3\]"),
        (lambda v: v.double(), r"float64\[2, 3\]"),
        (lambda v: v.to("meta"), "meta"),
        (lambda v: (v,), r"\(float32"),
        (lambda v: 3, "3"),
    ],
)
def test_another_kind_of_value_is_refused_and_the_point_is_named(change, got):
    with pytest.raises(th.EditError, match=rf"at '1', call #0.*{got}"), th.edit(model := mlp(), {"1": change}):
        model(X)


def test_the_check_can_be_left_out():
    model = mlp()
    with th.edit(model, {"1": lambda v: v[:1]}, check=False):
        assert model(X).shape == (1, 3)


def test_a_structure_must_keep_its_tensors_where_they_are():
    model = Mixed(3)
    with pytest.raises(th.EditError, match="at 'part'"), th.edit(model, {"part": lambda v: {"y": v["y"]}}):
        model(X)


# --- structures and arguments -----------------------------------------------------------------------------------------


def test_a_part_of_a_structured_output_is_edited():
    model = Mixed(3)
    with th.edit(model, {"part": th.zero(part="y")}):
        assert model(X).count_nonzero() == 0
    with th.edit(model, {"part": th.set(1.0, part=("rest", 0))}):
        assert torch.equal(model(X), model.part(X, scale=torch.full_like(X, 2))["y"])


def test_a_frozen_dataclass_is_rebuilt():
    @dataclasses.dataclass(frozen=True)
    class Out:
        a: torch.Tensor
        b: int

    class Net(nn.Module):
        def forward(self, x):
            return Out(x, 3)

    model = Net()
    with th.edit(model, {":return": th.scale(2)}):
        found = model(X)
    assert isinstance(found, Out)
    assert torch.equal(found.a, X * 2)
    assert found.b == 3


def test_a_model_output_keeps_its_type_and_attributes():
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=16, n_positions=8, use_cache=False))
    ids = torch.arange(8)[None]
    with th.edit(model, {":return": th.zero(part="logits")}):
        found = model(ids)
    assert type(found) is type(model(ids))
    assert found.logits.count_nonzero() == 0
    assert found["logits"] is found.logits
    assert found[0] is found.logits


class Arguments(nn.Module):
    """Takes arguments in every way that Python has."""

    class Part(nn.Module):
        def forward(self, x, y=2.0, *rest, z=3.0, **more):
            return x * y + sum(rest) + z + sum(more.values())

    def __init__(self, call):
        super().__init__()
        self.part, self.call = self.Part(), call

    def forward(self, x):
        return self.call(self.part, x)


def with_part(call, edits):
    model = Arguments(call)
    with untouched(model), th.edit(model, edits):
        return model(X)


def test_arguments_are_edited_by_name_however_they_were_given():
    ten = lambda v: v * 10
    assert torch.equal(with_part(lambda p, x: p(x), {"part:x": ten}), X * 10 * 2 + 3)
    assert torch.equal(with_part(lambda p, x: p(x=x), {"part:x": ten}), X * 10 * 2 + 3)
    assert torch.equal(with_part(lambda p, x: p(x=x), {"part:in": ten}), X * 10 * 2 + 3)
    assert torch.equal(with_part(lambda p, x: p(x, 5.0), {"part:y": ten}), X * 50 + 3)
    assert torch.equal(with_part(lambda p, x: p(x, y=5.0), {"part:y": ten}), X * 50 + 3)
    assert torch.equal(with_part(lambda p, x: p(x, z=1.0), {"part:z": ten}), X * 2 + 10)


def test_a_default_is_edited_like_an_argument():
    assert torch.equal(with_part(lambda p, x: p(x), {"part:y": lambda v: v + 1}), X * 3 + 3)
    assert torch.equal(with_part(lambda p, x: p(x), {"part:z": lambda v: v + 1}), X * 2 + 4)


def test_the_rest_of_the_places_and_names_are_edited_as_a_whole():
    found = with_part(lambda p, x: p(x, 1.0, 10.0, 20.0), {"part:rest": lambda rest: tuple(v * 2 for v in rest)})
    assert torch.equal(found, X + 60 + 3)
    found = with_part(lambda p, x: p(x, 1.0, q=10.0), {"part:more": lambda more: {**more, "r": 5.0}})
    assert torch.equal(found, X + 15 + 3)


def test_one_of_the_undeclared_names_is_edited_by_itself():
    assert torch.equal(with_part(lambda p, x: p(x, 1.0, q=10.0), {"part:q": lambda v: v * 2}), X + 20 + 3)


def test_the_first_argument_of_a_forward_that_declares_none():
    class Any_(nn.Module):
        def forward(self, *args, **kwargs):
            return args[0] if args else kwargs["x"]

    model = nn.Sequential(Any_())
    with th.edit(model, {"0:in": th.scale(2)}):
        assert torch.equal(model(X), X * 2)
        assert torch.equal(model[0](x=X), X * 2)


def test_a_default_that_can_only_be_given_by_place_is_not_spoken_of():
    class Strict(nn.Module):
        def forward(self, x, k=2.0, /):
            return x * k

    model = nn.Sequential(Strict())
    with pytest.raises(th.NeverReached, match="never with the argument 'k'"), th.edit(model, {"0:k": lambda v: v}):
        model(X)
    with th.edit(model, {"0:k": lambda v: v + 1}):
        assert torch.equal(model[0](X, 2.0), X * 3)


def test_an_unchanged_default_is_not_passed_on():
    class Sentinel(nn.Module):
        def forward(self, x, k=2.0, **more):
            return x * k

    model = Sentinel()
    with model.register_forward_pre_hook(lambda m, args, kwargs: None, with_kwargs=True):
        with th.edit(model, {":k": lambda v: None}):
            assert torch.equal(model(X), X * 2)


# --- parameters -------------------------------------------------------------------------------------------------------


def test_a_parameter_is_edited_for_the_time_of_the_call():
    model = mlp()
    with untouched(model), th.edit(model, {"0.weight": th.zero(), "2.bias": th.add(1.0)}):
        found = model(X)
        assert model[0].weight.count_nonzero() == 9
    first = torch.tanh(model[0].bias.expand(2, 3))
    assert torch.allclose(found, functional.linear(first, model[2].weight, model[2].bias + 1))


def test_a_parameter_is_edited_if_only_its_owner_is_called():
    model = mlp()
    with th.edit(model, {"0.weight": th.zero()}):
        assert torch.equal(model[0](X), model[0].bias.expand(2, 3))


def test_the_gradient_of_an_edited_parameter_follows_the_chain_rule_to_the_original():
    model = nn.Linear(3, 1, bias=False)
    with th.edit(model, {"weight": lambda w: w * w}):
        model(X).sum().backward()
    assert torch.allclose(model.weight.grad, 2 * model.weight.detach() * X.sum(0))


def test_an_edited_model_trains_step_after_step():
    def run(*, edit):
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
        session = th.edit(model, {"weight": lambda w: w * 2}).start() if edit else None
        for _ in range(4):
            optimiser.zero_grad()
            found = model(X) if edit else functional.linear(X, model.weight * 2, model.bias)
            found.pow(2).sum().backward()
            optimiser.step()
        if session:
            session.close()
        return list(model.parameters())

    assert all(map(torch.equal, run(edit=True), run(edit=False)))


def test_several_backward_passes_of_one_session_each_reach_the_parameter():
    model = nn.Linear(3, 1, bias=False)
    with th.edit(model, {"weight": lambda w: w * w}):
        for _ in range(3):
            model(X).sum().backward()
    assert torch.allclose(model.weight.grad, 3 * 2 * model.weight.detach() * X.sum(0))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(4, 3), nn.Linear(3, 4, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.embed(ids))


@pytest.mark.parametrize("name", ["embed.weight", "head.weight"])
def test_a_tied_parameter_is_edited_everywhere_by_either_name(name):
    model, ids = Tied(), torch.tensor([0, 2])
    with untouched(model), th.edit(model, {name: th.scale(2)}):
        found = model(ids)
    double = model.embed.weight * 2
    assert torch.allclose(found, double[ids] @ double.T)


@pytest.mark.parametrize("make", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_recurrent_layer_uses_its_edited_weights(make):
    torch.manual_seed(0)
    model = nn.Sequential(make(3, 4))
    x = X[:, None]
    other = make(3, 4)
    other.load_state_dict(model[0].state_dict())
    with torch.no_grad():
        other.weight_hh_l0.mul_(3)
    with untouched(model), th.edit(model, {"0.weight_hh_l0": th.scale(3)}):
        found = model(x)[0]
    assert torch.equal(found, other(x)[0])


def test_a_buffer_is_edited():
    model = nn.BatchNorm1d(3).eval()
    with untouched(model), th.edit(model, {"running_mean": th.set(1.0)}):
        found = model(X)
    assert torch.allclose(found, (X - 1) / (1 + model.eps) ** 0.5)


def test_a_weight_that_only_its_parent_uses_is_edited():
    torch.manual_seed(0)
    model, x = nn.MultiheadAttention(4, 2).eval(), torch.linspace(-1, 1, 8).reshape(2, 1, 4)
    with untouched(model), th.edit(model, {"out_proj.weight": th.zero(), "out_proj.bias": th.set(7.0)}):
        found = model(x, x, x)[0]
    assert torch.equal(found, torch.full_like(x, 7.0))


def test_a_parameter_that_is_never_used_in_a_call_is_reported():
    model = mlp()
    with pytest.raises(th.NeverReached, match=r"0\.weight"), th.edit(model, {"0.weight": th.zero()}):
        model[2](X)


def test_a_parameter_of_another_shape_is_refused():
    model = mlp()
    with untouched(model), pytest.raises(th.EditError, match=r"at '0\.weight'"):
        with th.edit(model, {"0.weight": lambda w: w[:1]}):
            model(X)


def test_an_edit_that_fails_after_another_was_made_puts_that_one_back():
    model = mlp()

    def wrong(weight):
        raise ValueError("no")

    with (
        untouched(model),
        pytest.raises(ValueError, match="no"),
        th.edit(model, {"0.bias": th.zero(), "0.weight": wrong}),
    ):
        model(X)


# --- gradients of the model under edits -------------------------------------------------------------------------------


def test_gradients_flow_through_an_edit_as_through_the_same_code_by_hand():
    model = mlp()
    change = lambda v: v.sin() * 2
    by_hand(model, change).pow(2).sum().backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    with th.edit(model, {"1": change}):
        model(X).pow(2).sum().backward()
    assert all(map(torch.equal, [parameter.grad for parameter in model.parameters()], expected))


def test_a_gradient_flows_to_the_tensor_that_was_set():
    model, patch = mlp(), torch.ones(2, 3, requires_grad=True)
    with th.edit(model, {"1": th.set(patch)}):
        model(X).sum().backward()
    assert torch.allclose(patch.grad, model[2].weight.sum(0).expand(2, 3))
    assert model[0].weight.grad is None


def test_an_edit_that_never_took_effect_is_an_error_after_everything_is_out():
    model = mlp()
    with (
        untouched(model),
        pytest.raises(th.NeverReached, match="1 edit had no effect"),
        th.edit(model, {"1": th.zero()}),
    ):
        pass


def test_a_call_from_the_end_cannot_be_known_beforehand():
    with pytest.raises(th.AddressError, match="count from #0"):
        th.edit(Cell(3), {"cell#-1": th.zero()})
