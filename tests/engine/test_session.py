import contextlib
import copy
import functools
import inspect
import io
import pickle
import threading
import types
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import tenterhook as th
from tenterhook.testing import Cell, state_of, untouched

X = torch.linspace(-1, 1, 6).reshape(2, 3)


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))


class Two(nn.Module):
    """Calls only the first of its two children, unless told otherwise."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x, *, both=False, mask=None):
        y = self.a(x)
        return self.b(y) if both else y


class Fails(nn.Module):
    def __init__(self, error):
        super().__init__()
        self.inner, self.error = nn.Linear(3, 3), error

    def forward(self, x):
        self.inner(x)
        raise self.error


# --- in: all or nothing -----------------------------------------------------------------------------------------------


def test_an_unknown_second_name_leaves_nothing_behind():
    model = mlp()
    with untouched(model), pytest.raises(th.AddressError):
        th.record(model, "0", "none")


def test_a_start_that_fails_midway_takes_out_what_it_had_put_in():
    model = mlp()
    session = th.edit(model, {"0": th.zero(), "1": th.zero()}, grad={"2.weight": lambda g: g})
    model[2].weight.requires_grad_(False)  # The last thing to be installed will refuse.
    with untouched(model), pytest.raises(th.EditError):
        session.start()


def test_a_session_that_failed_to_start_is_closed():
    model = mlp()
    session = th.edit(model, grad={"2.weight": lambda g: g})
    model[2].weight.requires_grad_(False)
    with pytest.raises(th.EditError):
        session.start()
    with pytest.raises(th.ClosedSession):
        session.start()


def test_making_a_session_installs_nothing():
    model = mlp()
    with untouched(model):
        th.record(model, "**")
        th.edit(model, {"0": th.zero()})


def test_a_replaced_module_is_refused_when_the_session_starts():
    model = mlp()
    session = th.record(model, "0", "1")
    model[1] = nn.ReLU()
    with untouched(model), pytest.raises(th.ModelChanged, match="'1'"):
        session.start()


def test_a_pattern_is_refused_too_when_one_of_its_modules_has_gone():
    model = mlp()
    session = th.edit(model, {"*": th.zero()})
    del model[2]
    with untouched(model), pytest.raises(th.ModelChanged):
        session.start()


def test_a_glob_of_outputs_is_what_it_finds_when_the_recording_starts():
    model = mlp()
    for change in (lambda: model.append(nn.Tanh()), lambda: model.__delitem__(0), lambda: None):
        session = th.record(model, "*")
        change()
        with untouched(model), session as tape:
            model(X)
        assert list(tape) == [name for name, _ in model.named_children()]


# --- out: by every way ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt(), SystemExit(1), GeneratorExit()])
def test_an_exception_in_the_model_passes_through_and_everything_is_out(error):
    model = Fails(error)
    with untouched(model), pytest.raises(type(error)), th.record(model, "**"), th.edit(model, {"inner": th.zero()}):
        model(X)


def test_an_exception_in_the_block_is_not_hidden_by_what_was_never_reached():
    model = mlp()
    with untouched(model), pytest.raises(ZeroDivisionError), th.record(model, "0"):
        _ = 1 / 0


def test_a_stop_takes_everything_out():
    model = mlp()
    with untouched(model), th.edit(model, {"0": th.zero()}), th.record(model, "0", stop=True):
        model(X)


def test_a_nested_session_that_fails_to_start_takes_the_outer_one_out_too():
    model = mlp()
    with untouched(model), pytest.raises(th.AddressError), th.edit(model, {"0": th.zero()}), th.record(model, "none"):
        pass


def test_a_nested_session_that_fails_to_close_takes_the_outer_one_out_too():
    model = Two()
    with untouched(model), pytest.raises(th.NeverReached), th.edit(model, {"a": th.zero()}), th.record(model, "b"):
        model(X)


def test_an_edit_that_raises_leaves_nothing_behind():
    model = mlp()

    def wrong(value):
        raise RuntimeError("wrong")

    with untouched(model), pytest.raises(RuntimeError, match="wrong"), th.edit(model, {"0": wrong}):
        model(X)


def test_parameters_are_back_after_an_exception_inside_the_call():
    model = Fails(ValueError())
    with untouched(model), pytest.raises(ValueError), th.edit(model, {"inner.weight": th.zero()}):
        model(X)


# --- start, close, with -----------------------------------------------------------------------------------------------


def test_start_and_close_do_what_with_does():
    model = mlp()
    with untouched(model):
        session = th.record(model, "1").start()
        model(X)
        session.close()
    assert list(session.tape) == ["1"]


def test_close_may_be_called_any_number_of_times():
    model = mlp()
    session = th.record(model, "1").start()
    model(X)
    with untouched(nn.Identity()):
        for _ in range(3):
            session.close()
    assert not session.is_open


def test_close_inside_the_with_block_is_the_end_of_it():
    model = mlp()
    with (session := th.record(model, "1")) as tape:
        model(X)
        session.close()
        model(X)
    assert list(tape) == ["1"]


def test_closing_a_session_that_was_never_started_is_allowed():
    session = th.record(mlp(), "1")
    session.close()
    with pytest.raises(th.ClosedSession):
        session.start()


def test_a_closed_session_says_that_it_is_closed_and_what_to_do():
    model = mlp()
    with (session := th.record(model, "1")):
        model(X)
    with pytest.raises(th.ClosedSession, match=r"th\.record"):
        session.start()
    with pytest.raises(th.ClosedSession), session:
        pass


def test_starting_twice_is_an_error_and_keeps_the_session():
    model = mlp()
    with (session := th.record(model, "1")) as tape:
        with pytest.raises(th.SessionError, match="open already"):
            session.start()
        model(X)
    assert "1" in tape


def test_with_is_reentrant_and_the_outermost_block_closes():
    model = mlp()
    with (session := th.record(model, "1")) as tape:
        with session as same:
            assert same is tape
            model(X)
        assert session.is_open
        model(X)
    assert list(tape) == ["1#0", "1#1"]


def test_a_session_can_be_closed_by_another_thread():
    model = mlp()
    with untouched(model):
        session = th.record(model, "1").start()
        model(X)
        closer = threading.Thread(target=session.close)
        closer.start()
        closer.join()
    assert "closed" in repr(session)
    seen = []
    with th.edit(model, {"1": lambda v, ctx: seen.append(ctx.tape)}):
        model(X)
    assert seen == [None]


# --- several at once --------------------------------------------------------------------------------------------------


def test_sessions_closed_out_of_order_leave_the_model_as_it_was():
    model = mlp()
    plain = model(X)
    with untouched(model):
        sessions = [th.edit(model, {"1": lambda v, k=k: v + k}).start() for k in (1.0, 10.0, 100.0)]
        model(X)
        for session in (sessions[0], sessions[2], sessions[1]):
            session.close()
    assert torch.equal(model(X), plain)


def test_interleaved_sessions_each_see_the_calls_of_their_own_time():
    model = mlp()
    first = th.record(model, "1").start()
    model(X)
    second = th.record(model, "1").start()
    model(X)
    first.close()
    model(X)
    second.close()
    assert (len(first.tape), len(second.tape)) == (2, 2)


def test_edits_on_outputs_act_from_the_outer_session_to_the_inner_one():
    model, order = nn.Identity(), []
    outer = th.edit(model, {":return": lambda v: order.append("outer") or v + 1})
    inner = th.edit(model, {":return": lambda v: order.append("inner") or v * 10})
    with outer, inner:
        assert torch.equal(model(X), (X + 1) * 10)
    assert order == ["outer", "inner"]


def test_edits_on_inputs_act_from_the_outer_session_to_the_inner_one():
    model = nn.Identity()
    with th.edit(model, {":in": lambda v: v + 1}), th.edit(model, {":in": lambda v: v * 10}):
        assert torch.equal(model(X), (X + 1) * 10)


def test_edits_of_a_parameter_act_from_the_outer_session_to_the_inner_one():
    model = nn.Linear(3, 3, bias=False)
    with th.edit(model, {"weight": lambda w: w + 1}), th.edit(model, {"weight": lambda w: w * 10}):
        found = model(X)
    assert torch.equal(found, X @ ((model.weight + 1) * 10).T)


@pytest.mark.parametrize("site", [":in", ":return"])
@pytest.mark.parametrize("record_first", [True, False])
def test_a_recording_sees_what_flows_on_after_all_edits_whatever_the_nesting(site, record_first):
    model = nn.Identity()
    recording, editing = th.record(model, site), th.edit(model, {site: th.scale(3)})
    first, second = (recording, editing) if record_first else (editing, recording)
    with first, second:
        model(X)
    assert torch.equal(recording.tape[site], X * 3)


def test_the_context_has_the_tape_of_the_innermost_recording_of_the_same_model():
    model, other, seen = mlp(), mlp(), []
    edit = th.edit(model, {"2": lambda v, ctx: seen.append(ctx.tape)})
    with th.record(model, "0"), th.record(model, "1") as inner, th.record(other), edit:
        model(X)
        other(X)
    assert seen == [inner]


def test_a_module_shared_by_two_models_serves_a_session_on_each():
    shared = nn.Linear(3, 3)
    one, other = nn.Sequential(shared), nn.Sequential(nn.Tanh(), shared)
    with th.record(one, "0") as first, th.edit(other, {"1": th.zero()}):
        other(X)
    assert torch.equal(first["0"], torch.zeros(2, 3))


# --- while a forward runs ---------------------------------------------------------------------------------------------


def test_a_session_opened_inside_a_running_forward_sees_the_calls_that_begin_after_it():
    model, found = mlp(), []

    def open_one(value):
        session = th.record(model, "0", "1", "2", ":return", keep="all")
        found.append(session.start())

    with th.edit(model, {"0": open_one}):
        model(X)
    assert list(found[0].tape) == ["1", "2"]
    with pytest.raises(th.NeverReached, match="0: Linear was not called"):
        found[0].close()


@pytest.mark.parametrize("what", ["record", "edit"])
def test_a_session_closed_inside_a_running_forward_does_nothing_more_in_it(what):
    model = mlp()
    plain = model(X)
    make = {
        "record": lambda: th.record(model, "**"),
        "edit": lambda: th.edit(model, {"*": th.zero(), ":return": th.zero()}),
    }
    session = make[what]()

    def close(value):
        if session.is_open:
            with contextlib.suppress(th.NeverReached):
                session.close()

    with untouched(model):
        session.start()
        with th.edit(model, {"0:in": close}):
            found = model(X)
    assert torch.equal(found, plain)
    assert what == "edit" or len(session.tape) == 0


def test_an_edit_may_close_its_own_session():
    model = mlp()
    plain = model(X)
    session = th.edit(model, {"0": lambda v: session.close() or v * 2})
    with pytest.raises(th.NeverReached), untouched(model):
        session.start()
        model(X)
    session.close()
    assert torch.equal(model(X), plain)


def test_a_running_recording_survives_another_session_that_opens_and_closes_around_the_same_module():
    model = mlp()

    def visit(value):
        with th.record(model, "1", ":return") as inner:
            model[1](value)
            model.forward(value)
        assert len(inner) == 3

    with th.record(model, "**") as tape, th.edit(model, {"0#0": visit}):
        model(X)
    assert set(tape) == {":return#0", ":return#1", "0#0", "0#1", "1#0", "1#1", "1#2", "2#0", "2#1"}


# --- a model that changes ---------------------------------------------------------------------------------------------


def test_a_model_that_gains_a_module_under_a_pattern_is_warned_of():
    model = mlp()
    with pytest.warns(th.TenterhookWarning, match="gained or lost"), th.record(model, "*"):
        model.append(nn.ReLU())
        model(X)


def test_a_model_that_loses_a_module_is_warned_of_and_the_lost_one_is_clean():
    model = mlp()
    lost = model[2]
    with pytest.warns(th.TenterhookWarning, match="gained or lost"), th.record(model, "*"):
        model(X)
        del model[2]
    assert "forward" not in vars(lost)


def test_a_named_module_that_was_replaced_is_reported_as_the_reason():
    model = mlp()
    with pytest.raises(th.NeverReached, match="'1' was replaced by another one"), th.record(model, "1"):
        model[1] = nn.ReLU()
        model(X)


# --- forwards of their own --------------------------------------------------------------------------------------------


def wrapped_as_accelerate_does(module):
    old = module.forward

    def new_forward(module, *args, **kwargs):
        return old(*args, **kwargs) + 1

    module.forward = functools.update_wrapper(functools.partial(new_forward, module), old)
    return module


def wrapped_by_a_method(module):
    module.forward = types.MethodType(lambda self, input: type(self).forward(self, input) + 1, module)
    return module


def wrapped_by_a_closure(module):
    old = module.forward
    module.forward = lambda input: old(input) + 1
    return module


OWN = [wrapped_as_accelerate_does, wrapped_by_a_method, wrapped_by_a_closure]


@pytest.mark.parametrize("wrap", OWN)
def test_a_forward_of_the_instance_is_used_and_preserved(wrap):
    model = nn.Sequential(wrap(nn.Linear(3, 3)), nn.Tanh())
    own, plain = model[0].forward, model[0](X)
    with untouched(model), th.record(model, "0", "0:in") as tape, th.edit(model, {"0:input": th.scale(1)}):
        model(X)
    assert model[0].forward is own
    assert torch.equal(tape["0"], plain)
    assert torch.equal(tape["0:in"], X)


def test_a_bare_module_with_a_forward_of_its_own_can_be_hooked():
    model = nn.Module()
    model.forward = lambda x: x + 1
    with untouched(model), th.record(model, ":return") as tape:
        model(X)
    assert torch.equal(tape[":return"], X + 1)


def test_a_forward_that_is_replaced_during_a_session_stays_and_is_warned_of():
    model = mlp()
    theirs = lambda x: x
    with pytest.warns(th.TenterhookWarning, match="'1' was replaced"), th.record(model, "0", "1", "2") as tape:
        model(X)
        model[1].forward = theirs
    assert model[1].forward is theirs
    assert len(tape) == 3
    del model[1].forward
    assert all("forward" not in vars(m) for m in model.modules())


@pytest.mark.parametrize("verb", ["record", "edit"])
def test_a_replacement_that_calls_through_our_forward_finds_it_inert_afterwards(verb):
    model = mlp()
    plain = model(X)
    session = th.record(model, "1") if verb == "record" else th.edit(model, {"1": th.zero()})
    with pytest.warns(th.TenterhookWarning), session:
        old = model[1].forward
        model[1].forward = lambda x: old(x) * 1
        model(X)
    assert torch.equal(model(X), plain)
    assert verb == "edit" or len(session.tape) == 1


def test_a_replacement_made_with_wraps_is_not_taken_for_ours():
    model = mlp()
    first = th.record(model, "1").start()
    model(X)
    old = model[1].forward

    @functools.wraps(old.__func__)
    def theirs(self, x):
        return old(x) + 1

    model[1].forward = method = types.MethodType(theirs, model[1])
    with th.record(model, "1") as tape:
        model(X)
    assert model[1].forward is method
    assert torch.equal(tape["1"], first.tape["1#1"] + 1)
    with pytest.warns(th.TenterhookWarning):
        first.close()
    assert model[1].forward is method


def test_with_warnings_as_errors_a_replaced_forward_still_lets_everything_out():
    model = mlp()
    session = th.record(model, "0", "1", "2").start()
    model(X)
    model[1].forward = lambda x: x
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(th.TenterhookWarning):
            session.close()
    assert "forward" not in vars(model[0])
    assert "forward" not in vars(model[2])
    assert not session.is_open


@pytest.mark.parametrize("make", [mlp, lambda: wrapped_as_accelerate_does(nn.Linear(3, 3)), Two, lambda: Cell(3).cell])
def test_the_signature_of_a_forward_is_the_same_inside_a_session(make):
    model = make()
    before = inspect.signature(model.forward)
    with th.edit(model, {":return": lambda v: v}, check=False) as session:
        assert inspect.signature(model.forward) == before
        with th.record(model):
            assert inspect.signature(model.forward) == before
            model(X)
        assert session.is_open


def test_the_signature_is_the_same_under_a_lone_recording():
    model = Two()
    before = inspect.signature(model.forward)
    with th.record(model, ":return"):
        assert inspect.signature(model.forward) == before
        model(X)


# --- copies -----------------------------------------------------------------------------------------------------------


def by_pickle(model):
    return pickle.loads(pickle.dumps(model))


def by_torch_save(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, by_pickle, by_torch_save])
@pytest.mark.parametrize("verb", ["record", "edit"])
def test_a_copy_made_in_a_session_runs_its_own_weights_unrecorded_and_unedited(duplicate, verb):
    model = mlp()
    keys = list(model.state_dict())
    session = th.record(model, "**") if verb == "record" else th.edit(model, {"*": th.zero()})
    with session:
        twin = duplicate(model)
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.fill_(0.5)
        expected = nn.functional.linear(
            torch.tanh(nn.functional.linear(X, *twin[0].parameters())), *twin[2].parameters()
        )
        assert torch.equal(twin(X), expected)
        assert verb == "edit" or len(session.tape) == 0
        model(X)
    assert torch.equal(twin(X), expected)
    assert list(twin.state_dict()) == list(model.state_dict()) == keys


@pytest.mark.parametrize("wrap", [wrapped_by_a_method])
def test_a_deep_copy_keeps_an_instances_own_forward_and_binds_it_to_itself(wrap):
    model = wrap(nn.Linear(3, 3))
    with th.record(model):
        twin = copy.deepcopy(model)
        model(X)
    with torch.no_grad():
        twin.weight.zero_(), twin.bias.zero_()
    assert torch.equal(twin(X), torch.ones(2, 3))


def test_a_deep_copy_of_a_module_wrapped_by_a_partial_runs_its_own_weights():
    model = nn.Linear(3, 3)
    model.forward = functools.partial(lambda module, x: type(module).forward(module, x) + 1, model)
    with th.record(model):
        twin = copy.deepcopy(model)
        model(X)
    with torch.no_grad():
        twin.weight.zero_(), twin.bias.zero_()
    assert torch.equal(twin(X), torch.ones(2, 3))


def test_a_copy_made_in_a_session_sheds_what_it_brought_along_at_its_first_call():
    model = mlp()
    with th.record(model):
        twin = copy.deepcopy(model)
        model(X)
    twin(X)
    assert all("forward" not in vars(module) for module in twin.modules())


def test_a_copy_made_in_a_session_can_be_hooked_itself():
    model = mlp()
    with th.record(model, "1") as mine:
        twin = copy.deepcopy(model)
        with th.record(twin, "1") as theirs, th.edit(twin, {"1": th.zero()}):
            twin(X)
        model(X)
    assert theirs["1"].count_nonzero() == 0
    assert mine["1"].count_nonzero() > 0
    assert all("forward" not in vars(module) for module in twin.children())


def test_a_pickle_made_in_a_session_does_not_need_tenterhook():
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    with th.record(model, "linear1"):
        data = pickle.dumps(model)
        model(torch.zeros(1, 2, 8))
    assert b"tenterhook" not in data


def test_a_replica_as_data_parallel_makes_them_runs_its_own_weights():
    model, found = nn.Linear(3, 3), []
    with th.record(model) as tape:
        replica = model._replicate_for_data_parallel()
        replica._parameters.clear()
        replica.weight, replica.bias = torch.zeros(3, 3), torch.ones(3)  # plain tensors, as there
        thread = threading.Thread(target=lambda: found.append(replica(X)))
        thread.start()
        thread.join()
        model(X)
    assert torch.equal(found[0], torch.ones(2, 3))
    assert len(tape) == 1


# --- what was never reached -------------------------------------------------------------------------------------------


def never(model, *addresses, run=lambda model: model(X)):
    with pytest.raises(th.NeverReached) as caught, th.record(model, *addresses):
        run(model)
    return str(caught.value)


def test_never_called():
    assert "b: Linear was not called, but other modules of the session were" in never(Two(), "a", "b")


def test_the_model_was_not_called_at_all():
    assert "was the model called inside the session?" in never(mlp(), "0", run=lambda model: None)


def test_called_by_another_thread_only():
    def run(model):
        thread = threading.Thread(target=model, args=(X,))
        thread.start()
        thread.join()

    assert "was called once, but not by the thread that opened the session" in never(mlp(), "0", run=run)


def test_the_projection_of_an_attention():
    text = never(nn.MultiheadAttention(4, 2), "out_proj", run=lambda m: m(*[torch.zeros(2, 1, 4)] * 3))
    assert "passes the weight to a function" in text


def test_a_container_that_is_never_called():
    model = Two()
    model.items = nn.ModuleList([nn.Linear(3, 3)])
    text = never(model, "items")
    assert "a ModuleList is never called itself" in text
    assert "'items.*'" in text


def test_a_call_index_that_was_not_reached():
    text = never(Cell(3), "cell#7", run=lambda model: model(torch.zeros(5, 1, 3)))
    assert "cell#7: the module was called 5 times, so its last call is #4" in text


def test_a_call_index_is_missed_even_if_another_call_of_the_same_module_was_recorded():
    text = never(Cell(3), "cell#0", "cell#7", run=lambda model: model(torch.zeros(5, 1, 3)))
    assert "1 point was never reached" in text
    assert "cell#7" in text


def test_an_argument_that_was_never_passed():
    class Takes(nn.Module):
        def forward(self, *args, **kwargs):
            return args[0]

    assert "never with the argument 'mask'" in never(Takes(), ":mask")


def test_a_default_argument_is_an_argument():
    with th.record(Two(), ":mask") as tape:
        tape._model()(X)
    assert tape[":mask"] is None


def test_a_call_that_raised():
    def run(model):
        with pytest.raises(ValueError):
            model(X)

    assert "called once, but no call returned" in never(Fails(ValueError()), ":return", run=run)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_a_part_of_a_scripted_module():
    assert "scripted" in never(torch.jit.script(mlp()), "0")


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_a_scripted_module_inside_a_model_can_be_recorded_as_a_whole():
    model = nn.Sequential(torch.jit.script(nn.Tanh()), nn.Linear(3, 3))
    with th.record(model, "0") as tape:
        model(X)
    assert torch.equal(tape["0"], X.tanh())


def test_points_found_by_a_pattern_need_not_be_reached():
    with th.record(Two(), "*") as tape:
        tape._model()(X)
    assert list(tape) == ["a"]


def test_an_edit_by_a_pattern_needs_to_take_effect_somewhere():
    model = Two()
    with th.edit(model, {"*": th.zero()}):
        model(X)
    with pytest.raises(th.NeverReached, match="1 edit had no effect:\n  b:"), th.edit(model, {"{b,b}": th.zero()}):
        model(X)


def test_every_edit_that_is_named_has_to_take_effect_even_in_a_list():
    model = Two()
    with pytest.raises(th.NeverReached, match="b: Linear was not called"), th.edit(model, {("a", "b"): th.zero()}):
        model(X)


def test_several_misses_are_reported_together():
    model = nn.Sequential(*[nn.Identity() for _ in range(12)], Two())
    text = never(model, *[f"{k}#3" for k in range(12)])
    assert text.startswith("12 points were never reached:")
    assert text.endswith("… and 2 more")


def test_clearing_the_tape_does_not_undo_that_a_point_was_reached():
    model = mlp()
    with th.record(model, "0", "1") as tape, th.record(model, "0", copy="always") as other:
        model(X)
        tape.clear()
        other.clear()
    assert len(tape) == len(other) == 0


# --- any order of things ----------------------------------------------------------------------------------------------

ADDRESSES = ["0", "1", "1:in", "2", ":return"]
STEP = st.one_of(
    st.tuples(st.just("record"), st.sets(st.sampled_from(ADDRESSES), min_size=1)),
    st.tuples(st.just("edit"), st.sampled_from(ADDRESSES), st.sampled_from([2.0, -0.5, 3.0])),
    st.tuples(st.just("close"), st.integers(0, 5)),
    st.tuples(st.just("run")),
    st.tuples(st.just("hook"), st.sampled_from([0, 1, 2])),
)


class Reference:
    """What should happen, by plain arithmetic: a chain of three functions with edits at the points between."""

    def __init__(self, model):
        self.model, self.open, self.hooks = model, [], [0, 0, 0]

    def at(self, address, value):
        for kind, wanted, factor, _ in self.open:
            if kind == "edit" and wanted == address:
                value = value * factor
        for kind, wanted, _, expected in self.open:
            if kind == "record" and address in wanted:
                expected.setdefault(address, []).append(value)
        return value

    def run(self, x):
        for index, layer in enumerate(self.model):
            x = self.at("1:in", x) if index == 1 else x
            x = torch.tanh(x) if index == 1 else nn.functional.linear(x, layer.weight, layer.bias)
            for _ in range(self.hooks[index]):
                x = x + 1
            x = self.at(str(index), x)
        return self.at(":return", x)


@settings(max_examples=60, deadline=None)
@given(st.lists(STEP, max_size=14))
def test_any_stack_of_sessions_does_what_plain_arithmetic_says_and_leaves_no_trace(steps):
    model = mlp()
    reference, live, handles = Reference(model), [], []
    before = state_of(model)
    for step in steps:
        if step[0] == "record":
            session = th.record(model, *step[1]).start()
            entry = ("record", step[1], None, {})
        elif step[0] == "edit":
            session = th.edit(model, {step[1]: th.scale(step[2])}).start()
            entry = ("edit", step[1], step[2], None)
        else:
            session = None
        if session is not None:
            live.append((session, entry))
            reference.open.append(entry)
        elif step[0] == "run":
            with torch.no_grad():
                expected = reference.run(X)
                assert torch.equal(model(X), expected)
        elif step[0] == "hook":
            handles.append(model[step[1]].register_forward_hook(lambda module, args, out: out + 1))
            reference.hooks[step[1]] += 1
        elif live:
            close_and_compare(*live.pop(step[1] % len(live)), reference)
    while live:
        close_and_compare(*live.pop(), reference)
    for handle in handles:
        handle.remove()
    after = state_of(model)
    assert before.keys() == after.keys()
    assert all("forward" not in vars(m) and not m._forward_hooks for m in model.modules())


def close_and_compare(session, entry, reference):
    reference.open = [other for other in reference.open if other is not entry]
    try:
        session.close()
    except th.NeverReached:
        assert entry[0] == "edit" or not all(address in entry[3] for address in entry[1])
    if entry[0] == "record":
        for address, expected in entry[3].items():
            assert all(map(torch.equal, session.tape.calls(address), expected))
            assert len(session.tape.calls(address)) == len(expected)


@pytest.mark.parametrize("fails", [False, True])
def test_an_exit_stack_closes_a_session(fails):
    model, before = mlp(), mlp().state_dict().keys()
    with contextlib.suppress(ZeroDivisionError), contextlib.ExitStack() as stack:
        tape = stack.enter_context(th.record(model))
        stack.enter_context(th.edit(model, {"0": th.scale(2)}))
        model(torch.ones(1, next(model.parameters()).shape[1]))
        if fails:
            raise ZeroDivisionError
    assert len(tape) > 0
    assert all("forward" not in vars(module) for module in model.modules())
    assert model.state_dict().keys() == before
