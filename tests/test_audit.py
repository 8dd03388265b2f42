"""``th.audit`` on real registrations: hooks found, their order, their cost, and their removal."""

import copy
import functools
import gc
import pickle
import time
import warnings
import weakref
from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.nn.utils import parametrizations, prune
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config, GPT2LMHeadModel

import tenterhook as th
from tenterhook import hooks
from tenterhook.testing import state_of, untouched

X = torch.linspace(-1, 1, 8).reshape(2, 4)
IDS = torch.arange(6)[None]


def gpt2():
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=2, n_embd=16, n_head=2, vocab_size=32, n_positions=16, use_cache=False, bos_token_id=0, eos_token_id=0
    )
    return GPT2LMHeadModel(config)


class Block(nn.Module):
    """A block with an in-place activation and an in-place sum, as in a ResNet."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(2, 2, 3, padding=1), nn.BatchNorm2d(2)
        self.relu = nn.ReLU(inplace=True)
        self.conv2, self.bn2 = nn.Conv2d(2, 2, 3, padding=1), nn.BatchNorm2d(2)

    def forward(self, x):
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += x
        return self.relu(out)


def resnet():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 2, 1), Block(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(2 * 16, 3))


IMAGE = torch.linspace(-1, 1, 3 * 16).reshape(1, 3, 4, 4)


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


def look(*_):
    """A hook that pickle can store by name."""


def look_too(*_):
    pass


def only(audit):
    assert len(audit) == 1
    return audit[0]


def names(found):
    return {risk.name for risk in found.risks}


# --- hooks found ------------------------------------------------------------------------------------------------------


def test_a_model_without_hooks_has_an_empty_audit():
    assert len(th.audit(mlp())) == 0
    assert str(th.audit(mlp())) == "Sequential: no hooks, no risks"


REGISTRATIONS = {
    "forward pre": lambda m: m.register_forward_pre_hook(look),
    "forward": lambda m: m.register_forward_hook(look),
    "backward pre": lambda m: m.register_full_backward_pre_hook(look),
    "full backward": lambda m: m.register_full_backward_hook(look),
    "legacy backward": lambda m: m.register_backward_hook(look),
    "state dict pre": lambda m: m.register_state_dict_pre_hook(look),
    "state dict": lambda m: m._register_state_dict_hook(look),
    "load state dict pre": lambda m: m.register_load_state_dict_pre_hook(look),
    "load state dict post": lambda m: m.register_load_state_dict_post_hook(look),
    "gradient": lambda m: m.weight.register_hook(look),
    "post accumulate": lambda m: m.weight.register_post_accumulate_grad_hook(look),
    "th backward pre": lambda m: hooks.register_backward_pre_hook(m, look),
    "th backward": lambda m: hooks.register_backward_hook(m, look),
}


@pytest.mark.parametrize("kind", REGISTRATIONS)
def test_every_kind_of_hook_is_found_with_its_key_and_its_function(kind):
    model = gpt2()
    handle = REGISTRATIONS[kind](model.get_submodule("transformer.h.1.ln_1"))
    found = only(th.audit(model))
    place = "transformer.h.1.ln_1"
    assert found.address == (f"{place}.weight" if kind in ("gradient", "post accumulate") else place)
    assert (found.kind, found.key, found.order) == (kind, handle.id, 1)
    assert (found.who.name, found.who.module) == ("look", __name__)
    assert found.where == f"{__file__}:{look.__code__.co_firstlineno}"


@pytest.mark.parametrize("kind", REGISTRATIONS)
def test_removing_leaves_the_model_as_if_nothing_had_been_registered(kind):
    model = gpt2()
    before = state_of(model, rng=False)
    handle = REGISTRATIONS[kind](model.get_submodule("transformer.h.1.ln_1"))
    removed = th.audit(model).remove(kind=kind)
    assert [found.key for found in removed] == [handle.id]
    assert len(th.audit(model)) == 0
    after = state_of(model, rng=False)
    # PyTorch leaves an empty dict on a tensor that had None.
    assert {key for key in before if isinstance(before[key], dict) and before[key] != after[key]} == set()
    assert after["transformer.h.1.ln_1: _is_full_backward_hook"] is None
    handle.remove()  # A second removal is not an error.


GLOBALS = {
    "global forward pre": torch_module.register_module_forward_pre_hook,
    "global forward": functools.partial(torch_module.register_module_forward_hook, with_kwargs=True, always_call=True),
    "global backward pre": torch_module.register_module_full_backward_pre_hook,
    "global full backward": torch_module.register_module_full_backward_hook,
    "global legacy backward": torch_module.register_module_backward_hook,
    "global registration": torch_module.register_module_module_registration_hook,
}


@pytest.mark.parametrize("kind", GLOBALS)
def test_global_hooks_are_found_and_removed_with_all_their_tables(kind):
    model = mlp()
    with untouched(model):
        handle = GLOBALS[kind](look)
        found = only(th.audit(model))
        assert (found.address, found.kind, found.key) == ("", kind, handle.id)
        assert th.audit(model).select("**").remove("**") == ()  # A global hook belongs to no module.
        assert len(th.audit(model).remove(kind=kind)) == 1
    assert torch_module._global_is_full_backward_hook is None


def test_flags_are_reported():
    model = mlp()
    model[0].register_forward_hook(look, with_kwargs=True, always_call=True)
    model[1].register_forward_pre_hook(look, with_kwargs=True)
    model[2].register_forward_hook(look)
    assert [found.flags for found in th.audit(model)] == [("with_kwargs", "always_call"), ("with_kwargs",), ()]


class Counter:
    def __init__(self):
        self.seen = 0

    def __call__(self, *_):
        self.seen += 1

    def method(self, *_):
        self.seen += 1


def decorated(function):
    @functools.wraps(function)
    def wrapper(*args):
        return function(*args)

    return wrapper


@pytest.mark.parametrize(
    ("hook", "name", "function"),
    [
        (look, "look", look),
        (functools.partial(functools.partial(look, 1), 2), "look", look),
        (Counter().method, "Counter.method", Counter.method),
        (functools.partial(Counter().method, 1), "Counter.method", Counter.method),
        (Counter(), "Counter", Counter.__call__),
        (decorated(look), "look", look),
    ],
    ids=["function", "partial", "method", "partial of a method", "object", "decorated"],
)
def test_whatever_was_registered_is_traced_to_the_function_behind_it(hook, name, function):
    model = mlp()
    model[0].register_forward_hook(hook)
    who = only(th.audit(model)).who
    assert (who.name, who.module, who.file, who.line) == (
        name, __name__, __file__, function.__code__.co_firstlineno,
    )  # fmt: skip


def test_a_builtin_has_a_name_and_no_place():
    model = mlp()
    model[0].register_forward_hook(print)
    found = only(th.audit(model))
    assert (found.who.name, found.where) == ("print", "")


def test_a_readonly_hook_of_ours_is_shown_as_the_users_function():
    model = mlp()
    hooks.register_forward_hook(model[0], look, readonly=True)
    hooks.register_hook(model[0].weight, look_too, readonly=True)
    assert [found.who.name for found in th.audit(model)] == ["look", "look_too"]


def test_a_shared_module_and_a_tied_weight_are_found_once_with_their_other_names():
    model = nn.Module()
    model.one = model.two = nn.Linear(2, 2)
    model.one.register_forward_hook(look)
    assert (only(th.audit(model)).address, only(th.audit(model)).aliases) == ("one", ("two",))
    tied = gpt2()
    tied.lm_head.weight.register_hook(look)
    found = only(th.audit(tied))
    assert (found.address, found.aliases) == ("transformer.wte.weight", ("lm_head.weight",))
    assert len(th.audit(tied).remove("lm_head.weight")) == 1


# --- order ------------------------------------------------------------------------------------------------------------


def test_the_order_that_is_shown_is_the_order_in_which_they_run():
    model, ran = mlp(), []

    def register(method, name, **options):
        def hook(*_):
            ran.append(name)

        hook.__qualname__ = name
        return method(hook, **options)

    first = model[0]
    handles = [
        register(torch_module.register_module_forward_hook, "global"),
        register(first.register_forward_hook, "b"),
        register(first.register_forward_hook, "c"),
        register(first.register_forward_hook, "a", prepend=True),
    ]
    try:
        found = sorted(th.audit(model).select(kind=["forward", "global forward"]), key=lambda row: row.order)
        first(X)
        assert [row.who.name for row in found] == ran == ["global", "a", "b", "c"]
        assert [row.order for row in found] == [1, 2, 3, 4]
    finally:
        handles[0].remove()


@pytest.mark.parametrize("kind", ["full backward", "backward pre", "legacy backward", "gradient", "th backward"])
def test_backward_hooks_are_reported_in_the_order_in_which_they_run(kind):
    model, ran = nn.Sequential(nn.Linear(4, 4)), []
    register = {
        "full backward": model[0].register_full_backward_hook,
        "backward pre": model[0].register_full_backward_pre_hook,
        "legacy backward": model[0].register_backward_hook,
        "gradient": model[0].weight.register_hook,
        "th backward": functools.partial(hooks.register_backward_hook, model[0]),
    }[kind]
    for name in "xyz":
        register(functools.partial(lambda name, *_: ran.append(name), name))
    told = [row.hook.args[0] for row in sorted(th.audit(model), key=lambda row: row.order)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model(X.clone().requires_grad_()).sum().backward()
    assert told == ran == ["x", "y", "z"]


# --- other than hooks -------------------------------------------------------------------------------------------------


def test_a_monkey_patched_forward_is_found_and_not_removed_as_a_hook():
    model = mlp()
    model[1].forward = look
    found = only(th.audit(model))
    assert (found.address, found.kind, found.who.name) == ("1", "own forward", "look")
    with pytest.raises(th.HookError, match=r"own forward of '1'.*del module.forward"):
        th.audit(model).remove("1")
    assert model[1].forward is look


def test_a_forward_in_the_way_of_accelerate_is_distinguished():
    model = mlp()

    class AlignDevicesHook:
        pass

    def new_forward(module, *args, **kwargs):
        return module._old_forward(*args, **kwargs)

    model[0]._old_forward, model[0]._hf_hook = model[0].forward, AlignDevicesHook()
    model[0].forward = functools.partial(new_forward, model[0])
    found = only(th.audit(model))
    assert found.note == "runs the accelerate hook AlignDevicesHook"
    assert found.who.name.endswith("new_forward")
    assert "bound elsewhere" not in names(found)


def test_old_style_norms_and_pruning_are_named_and_keep_their_own_way_out():
    model = mlp()
    prune.l1_unstructured(model[0], "weight", 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nn.utils.weight_norm(model[2])
    audit = th.audit(model)
    assert [(found.address, found.kind, found.note) for found in audit] == [
        ("0", "forward pre", "pruning"),
        ("2", "forward pre", "weight norm"),
    ]
    with pytest.raises(th.HookError, match=r"prune\.remove"):
        audit.remove("0")
    with pytest.raises(th.HookError, match="remove_weight_norm"):
        audit.remove("2")


def test_spectral_norm_is_named_in_all_its_three_hooks():
    model = nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 4)))
    assert {found.kind for found in th.audit(model)} == {"forward pre", "state dict", "load state dict pre"}
    assert {found.note for found in th.audit(model)} == {"spectral norm"}


def test_a_parametrization_is_found_and_the_error_names_its_way_out():
    model = mlp()
    parametrizations.orthogonal(model[0])
    found = only(th.audit(model).select(kind="parametrization"))
    assert found.address == "0.parametrizations.weight"
    assert found.who.name == "_Orthogonal"
    with pytest.raises(th.HookError, match=r"remove_parametrizations\(module, 'weight'\)"):
        th.audit(model).remove("**")
    model[2].register_forward_hook(look)
    assert [gone.address for gone in th.audit(model).remove("**")] == ["2"]
    assert torch.nn.utils.parametrize.is_parametrized(model[0])


def test_an_instances_own_call_is_found_and_python_ignores_it():
    model = mlp()
    model[0].__dict__["__call__"] = look
    model[1].__dict__["_call_impl"] = look
    dead, alive = th.audit(model)
    assert (dead.kind, dead.note, names(dead)) == ("own call", "__call__", {"no effect"})
    assert (alive.note, names(alive)) == ("_call_impl", set())
    assert model[0](X) is not None
    assert model[1](X) is None


def test_modes_and_switches_of_the_process_are_found_while_they_are_on():
    class Function(TorchFunctionMode):
        pass

    class Dispatch(TorchDispatchMode):
        pass

    model = mlp()
    with Function(), Dispatch(), torch.autograd.graph.saved_tensors_hooks(look, look_too):
        assert {(found.kind.value, found.who.name.split(".")[-1]) for found in th.audit(model)} == {
            ("function mode", "Function"), ("dispatch mode", "Dispatch"), ("saved tensors", "look"),
        }  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.autograd.set_detect_anomaly(mode=True):
            assert names(only(th.audit(model))) == {"anomaly mode"}
    assert len(th.audit(model)) == 0


# --- own sessions -----------------------------------------------------------------------------------------------------


def test_an_open_session_is_named_and_cannot_be_removed():
    model = mlp()
    with th.record(model, "1") as tape:
        found = only(th.audit(model))
        assert (found.address, found.kind, found.who.name) == ("1", "own forward", "tenterhook")
        with pytest.raises(th.SessionError, match="open record session on a Sequential"):
            th.audit(model).remove("**")
        model(X)
    assert tape["1"].shape == (2, 4)
    assert len(th.audit(model)) == 0


def test_a_gradient_edit_of_a_parameter_is_named_as_the_sessions_and_takes_others_along_into_safety():
    model = mlp()
    model[0].weight.register_hook(look)
    with th.edit(model, grad={"0.weight": lambda grad: grad * 0}):
        with pytest.raises(th.SessionError, match="open edit session"):
            th.audit(model).remove("0.weight")
        assert len(model[0].weight._backward_hooks) == 2
        model(X).sum().backward()
    assert model[0].weight.grad.abs().sum() == 0
    assert len(th.audit(model).remove("0.weight")) == 1


def test_costs_are_not_measured_in_the_middle_of_a_session():
    model = mlp()
    with th.record(model, "1") as tape:
        with pytest.raises(th.SessionError, match="record session"):
            th.audit(model, X)
        model(X)
    assert len(tape.calls("1")) == 1


def test_what_a_copy_carries_of_a_session_is_no_session_of_its_own():
    model = mlp()
    with th.record(model, "1"):
        twin = copy.deepcopy(model)
        assert [found.session for found in th.audit(twin)] in ([], [""])
        model(X)


# --- select and remove ------------------------------------------------------------------------------------------------


def hooked():
    model = gpt2()
    for path in ("transformer.h.0", "transformer.h.0.attn", "transformer.h.1"):
        model.get_submodule(path).register_forward_hook(look)
    model.transformer.h[1].register_forward_pre_hook(look_too)
    model.transformer.h[1].ln_1.weight.register_hook(look)
    return model


def test_rows_are_selected_by_glob_class_kind_and_predicate():
    model = hooked()
    audit = th.audit(model)
    assert len(audit) == 5
    assert [found.address for found in audit.select("transformer.h.*", kind="forward")] == [
        "transformer.h.0", "transformer.h.1",
    ]  # fmt: skip
    assert [found.address for found in audit.select("**.weight")] == ["transformer.h.1.ln_1.weight"]
    assert len(audit.select("**")) == 4
    assert len(audit.select(type(model.transformer.h[0]))) == 3
    assert only(audit.select(lambda found: found.who.name == "look_too")).kind == "forward pre"
    assert only(audit.select(audit[2])) is audit[2]
    assert len(audit.select(kind=["forward pre", "gradient"])) == 2


def test_an_unknown_name_or_kind_is_an_error_that_helps():
    audit = th.audit(hooked())
    with pytest.raises(th.AddressError, match=r"transformer\.h\.0"):
        audit.select("transformer.h.O")
    with pytest.raises(th.SelectorError, match="The kinds are: forward pre"):
        audit.select(kind="fwd")


def test_remove_silently_removes_nothing_and_says_what_to_say():
    model = hooked()
    with pytest.raises(th.SelectorError, match=r"remove\('\*\*'\)"):
        th.audit(model).remove()
    assert len(th.audit(model)) == 5


def test_two_stars_remove_all_module_hooks_and_leave_tensors_alone():
    model = hooked()
    removed = th.audit(model).remove("**")
    assert len(removed) == 4
    assert only(th.audit(model)).kind == "gradient"
    for module in model.modules():
        tables = {name: table for name, table in vars(module).items() if "hooks" in name and table}
        assert tables == {}


def test_flags_go_with_their_hook():
    model = mlp()
    model[0].register_forward_hook(look, with_kwargs=True, always_call=True)
    kept = model[0].register_forward_hook(look_too, with_kwargs=True)
    th.audit(model).remove(lambda found: found.who.name == "look")
    assert list(model[0]._forward_hooks) == list(model[0]._forward_hooks_with_kwargs) == [kept.id]
    assert dict(model[0]._forward_hooks_always_called) == {}


def test_after_the_last_legacy_hook_is_gone_a_full_one_can_be_registered():
    model = mlp()
    model[0].register_backward_hook(look)
    with pytest.raises(RuntimeError, match="regular backward hooks and full backward hooks"):
        model[0].register_full_backward_hook(look)
    th.audit(model).remove("0")
    model[0].register_full_backward_hook(look)


def test_a_hook_that_is_gone_meanwhile_is_not_removed_twice():
    model = mlp()
    handle = model[0].register_forward_hook(look)
    audit = th.audit(model)
    handle.remove()
    assert audit.remove("**") == ()


def test_removing_one_of_our_backward_hooks_leaves_the_other_working():
    model, seen = mlp(), []
    hooks.register_backward_hook(model[0], look)
    hooks.register_backward_hook(model[0], lambda *_: seen.append("kept"))
    th.audit(model).remove(lambda found: found.hook is look)
    model(X).sum().backward()
    assert seen == ["kept"]
    th.audit(model).remove("**")
    assert not model[0]._forward_hooks
    assert not model[0]._forward_pre_hooks


# --- costs ------------------------------------------------------------------------------------------------------------


def sleepy(*_):
    time.sleep(0.002)


def test_costs_tell_a_slow_hook_from_a_quick_one():
    model = mlp()
    model[0].register_forward_hook(sleepy)
    model[1].register_forward_hook(look)
    slow, quick = th.audit(model, X)
    assert slow.cost.microseconds > 2000 > quick.cost.microseconds > 0
    assert (slow.cost.calls, quick.cost.calls) == (1, 1)


class Loop(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.Linear(4, 4)

    def forward(self, x, *, times):
        for _ in range(times):
            x = self.cell(x)
        return x


def test_calls_are_counted_per_pass_and_inputs_may_be_keywords():
    model = Loop()
    model.cell.register_forward_hook(look)
    assert only(th.audit(model, {"x": X, "times": 3})).cost.calls == 3


@pytest.mark.parametrize("kind", ["full backward", "backward pre", "legacy backward", "gradient", "th backward"])
def test_backward_hooks_are_measured_too(kind):
    model = nn.Sequential(nn.Linear(4, 4))
    REGISTRATIONS[kind](model[0])
    assert only(th.audit(model, X)).cost.calls == 1
    assert only(th.audit(model, X)).cost.microseconds > 0


def test_without_a_backward_pass_backward_hooks_have_no_cost_and_are_not_blamed():
    model = mlp().requires_grad_(requires_grad=False)
    model[0].register_full_backward_hook(look)
    found = only(th.audit(model, X))
    assert found.cost is None
    assert found.risks == ()


def test_measuring_leaves_model_process_and_inputs_as_they_were():
    model = resnet()
    model[1].relu.register_forward_hook(look)
    model[1].bn1.register_forward_pre_hook(look, with_kwargs=True)
    model[0].register_forward_hook(look, always_call=True)
    hooks.register_backward_hook(model[1], look)
    model[4].weight.register_hook(look)
    model[4].weight.register_post_accumulate_grad_hook(lambda tensor: tensor.data.zero_())
    model[4].weight.grad = torch.ones_like(model[4].weight)
    handle = torch_module.register_module_forward_hook(look_too)
    image = IMAGE.clone()
    try:
        with untouched(model):
            audit = th.audit(model, image)
    finally:
        handle.remove()
    assert all(found.cost.microseconds > 0 for found in audit if found.kind != "post accumulate")
    assert only(audit.select(kind="post accumulate")).cost is None
    assert image.equal(IMAGE)
    assert audit.select(kind="global forward")[0].cost.calls == 12  # 11 modules, one of them called twice


def test_an_in_place_first_layer_does_not_write_into_the_inputs():
    model, x = nn.Sequential(nn.ReLU(inplace=True)), X.clone()
    model[0].register_forward_hook(look)
    th.audit(model, x)
    assert x.equal(X)


def test_a_hook_that_raises_leaves_everything_in_place():
    model = mlp()

    def fails(*_):
        raise ValueError("on purpose")

    model[0].register_forward_hook(look)
    model[1].register_forward_hook(fails)
    model[0].weight.register_hook(look)
    with untouched(model), pytest.raises(ValueError, match="on purpose"):
        th.audit(model, X)


def test_hooks_that_remove_add_and_write_are_undone():
    model = mlp()

    def once(module, args, output):
        handle.remove()
        module.seen = output
        module.register_forward_hook(look)
        module.weight.data.mul_(2)

    handle = model[0].register_forward_hook(once)
    model[0].register_forward_hook(look_too)
    with untouched(model):
        audit = th.audit(model, X)
    assert [found.cost.calls for found in audit] == [1, 1]


def test_spectral_norm_in_training_keeps_its_vectors_and_weight():
    model = nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 4)))
    model(X)
    with untouched(model):
        th.audit(model, X)


def test_a_checkpoint_that_runs_again_in_the_backward_pass_is_counted_and_updates_no_statistics():
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))

        def forward(self, x):
            return checkpoint(self.body, x, use_reentrant=False)

    model = Checkpointed()
    model.body[0].register_forward_hook(look)
    with untouched(model):
        assert only(th.audit(model, X)).cost.calls == 2


def test_costs_on_gpt2_leave_it_untouched():
    model = hooked()
    with untouched(model):
        audit = th.audit(model, {"input_ids": IDS})
    assert all(found.cost.calls == 1 for found in audit)


class Around(nn.Module):
    """A module of this file. Releases of PyTorch differ in whether they compile the forward of a torch.nn module."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


def test_a_compiled_model_is_measured_without_compiling():
    model = Around(mlp())
    model.inner[0].register_forward_hook(look)
    compiled = []
    model.compile(backend=lambda graph, _: compiled.append(graph) or graph.forward)
    assert only(th.audit(model, X).select("inner.0")).cost.calls == 1
    assert compiled == []
    model(X)
    assert len(compiled) == 1


# --- risks ------------------------------------------------------------------------------------------------------------


def test_good_hooks_have_no_risks():
    model = hooked()
    assert th.audit(model).risks == ()


def test_a_legacy_backward_hook_is_a_risk_because_its_gradients_are_wrong():
    class Exp(nn.Module):
        def forward(self, x):
            return (x * 2).exp() + 1

    model, seen = Exp(), []
    model.register_backward_hook(lambda module, grad_input, grad_output: seen.append(grad_input[0].item()))
    x = torch.ones(1, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model(x).backward()
    assert seen == [1.0] != [x.grad.item()]
    assert "legacy backward" in names(only(th.audit(model)))


@pytest.mark.parametrize(
    ("model", "path"),
    [
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True)), "0"),
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True)), "1"),
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4))), "0"),
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4))), "1"),
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), "0"),
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4)), "2"),
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True))), "1"),
    ],
)
def test_in_place_neighbours_are_reported_exactly_where_pytorch_raises(model, path):
    model = model()
    model.get_submodule(path).register_full_backward_hook(look)
    try:
        model(X.clone().requires_grad_() * 1).sum().backward()
        raises = False
    except RuntimeError as error:
        raises = "BackwardHookFunction" in str(error)
    assert ("in-place neighbour" in names(only(th.audit(model)))) == raises


def test_an_in_place_sum_around_the_module_is_reported():
    model = resnet()
    model[1].bn2.register_full_backward_hook(look)
    assert "in-place neighbour" in names(only(th.audit(model)))
    with pytest.raises(RuntimeError, match="BackwardHookFunction"):
        model(IMAGE)
    th.audit(model).remove("**")
    model[4].register_full_backward_hook(look)
    assert names(only(th.audit(model))) == set()


KEPT = {}


def keeps_globally(module, args, output):
    KEPT["output"] = output


def test_a_graph_that_a_hook_keeps_is_found_in_closures_objects_defaults_and_globals():
    model, kept, counter = mlp(), [], Counter()
    model[0].register_forward_hook(lambda module, args, output: kept.append(output))
    model[1].register_forward_hook(counter)
    model[2].register_forward_hook(keeps_globally)
    assert not any("holds a graph" in names(found) for found in th.audit(model))
    model(X)
    counter.values = {"deep": [model(X)]}
    try:
        details = [risk.detail for _, risk in th.audit(model).risks if risk.name == "holds a graph"]
        assert details == ["kept[0]", ".values['deep'][0]", "KEPT['output']"]
    finally:
        KEPT.clear()


def test_detached_values_and_parameters_are_no_graph():
    model, kept = mlp(), []
    model[0].register_forward_hook(lambda module, args, output: kept.append(output.detach()))
    model[1].register_forward_hook(functools.partial(look, model[0].weight))
    model(X)
    assert not any("holds a graph" in names(found) for found in th.audit(model))


def reaches_itself(kind):
    module = nn.Linear(2, 2)
    tensor = module.weight
    register = tensor.register_post_accumulate_grad_hook if kind == "post accumulate" else tensor.register_hook
    register(lambda _: tensor.shape and None)
    return module


@pytest.mark.parametrize("kind", ["post accumulate", "gradient"])
def test_a_hook_that_keeps_its_own_tensor_for_ever_is_reported_and_one_that_does_not_is_not(kind):
    module = reaches_itself(kind)
    told = "never freed" in names(only(th.audit(module)))
    tensor = weakref.ref(module.weight)
    del module
    gc.collect()
    assert (tensor() is not None) == told
    if tensor() is not None:
        tensor()._post_accumulate_grad_hooks.clear()


def test_a_hook_that_reaches_its_tensor_through_the_module_is_reported_too():
    module = nn.Linear(2, 2)
    module.weight.register_post_accumulate_grad_hook(lambda _: module.bias)
    assert "never freed" in names(only(th.audit(module)))
    th.audit(module).remove("weight")
    module.weight.register_post_accumulate_grad_hook(look)
    assert names(only(th.audit(module))) == set()


def test_hooks_below_data_parallel_are_reported():
    model = nn.DataParallel(mlp())
    model.module[0].register_forward_hook(look)
    assert names(only(th.audit(model))) == {"data parallel"}
    assert names(only(th.audit(model.module))) == set()


def test_hooks_inside_a_compiled_module_are_reported_and_those_around_it_are_not():
    inner = mlp()
    inner.compile(backend="eager")
    model = nn.Sequential(inner, nn.ReLU())
    for module in (model, inner, inner[0], model[1]):
        module.register_forward_hook(look)
    compiled = {found.address for found, risk in th.audit(model).risks if risk.name == "compiled"}
    assert compiled == {"0", "0.0"}
    assert only(th.audit(model).select(kind="compiled")).address == "0"


def test_the_wrapper_of_torch_compile_is_seen_through():
    model = torch.compile(mlp(), backend="eager")
    model._orig_mod[0].register_forward_hook(look)
    wrapper, hook = th.audit(model)
    assert (wrapper.kind, wrapper.address) == ("compiled", ":return")
    assert (hook.address, names(hook)) == ("_orig_mod.0", {"compiled"})


def test_a_forward_hook_below_a_transformer_layer_takes_its_fast_path_and_a_backward_hook_does_not():
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True).eval()
    layer.linear1.register_full_backward_hook(look)
    assert "leaves the fast path" not in names(only(th.audit(layer)))
    layer.linear1.register_forward_hook(look)
    assert "leaves the fast path" in names(only(th.audit(layer).select(kind="forward")))


@pytest.mark.parametrize("hook", [look, functools.partial(look, 1), Counter(), Counter().method, lambda *_: None])
def test_what_does_not_pickle_is_reported_exactly(hook):
    model = mlp()
    model[0].register_forward_hook(hook)
    try:
        pickle.dumps(model)
        pickles = True
    except (pickle.PicklingError, AttributeError):
        pickles = False
    assert ("does not pickle" not in names(only(th.audit(model)))) == pickles


def test_hooks_on_what_is_never_called_are_reported():
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(4, 2), "list": nn.ModuleList([nn.Linear(4, 4)])})
    for path in ("attention", "attention.out_proj", "list", "list.0"):
        model.get_submodule(path).register_forward_hook(look)
    told = {found.address for found, risk in th.audit(model).risks if risk.name == "never called"}
    assert told == {"attention.out_proj", "list"}


def test_a_hook_that_did_not_run_in_the_measured_passes_is_reported():
    class Skips(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return {"y": self.used(x)}

    model = Skips()
    model.unused.register_forward_hook(look)
    model.used.register_forward_hook(look)
    model.register_full_backward_hook(look)  # Never runs, because the output is a dict.
    told = {found.address for found, risk in th.audit(model, X).risks if risk.name == "did not fire"}
    assert told == {":return", "unused"}


def test_a_function_that_is_registered_twice_on_one_module_is_reported():
    model, counter = mlp(), Counter()
    model[0].register_forward_hook(look)
    model[0].register_forward_hook(look)
    model[1].register_forward_hook(look)
    model[1].register_forward_pre_hook(look)
    model[2].register_forward_hook(counter.method)
    model[2].register_forward_hook(counter.method)
    told = [found.address for found, risk in th.audit(model).risks if risk.name == "registered twice"]
    assert told == ["0", "0", "2", "2"]


def test_a_forward_that_runs_the_weights_of_the_original_after_a_deepcopy_is_reported():
    model = nn.Linear(2, 2)
    original = model.forward
    model.forward = lambda x: original(x) * 2
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.weight.zero_()
        twin.bias.zero_()
    assert twin(torch.ones(1, 2)).equal(model(torch.ones(1, 2)))  # The copy still uses the weights of the original.
    assert "bound elsewhere" in names(only(th.audit(twin)))
    assert "bound elsewhere" not in names(only(th.audit(model)))


def test_a_global_hook_is_a_risk():
    handle = torch_module.register_module_forward_hook(look)
    try:
        assert "global" in names(only(th.audit(mlp())))
    finally:
        handle.remove()


# --- drawing ----------------------------------------------------------------------------------------------------------


def test_an_audit_draws_itself_as_text_rich_and_html():
    from rich.console import Console

    model = mlp()
    model[0].register_forward_hook(look)
    model[0].register_backward_hook(look)
    audit = th.audit(model, X)
    lines = str(audit).splitlines()
    assert lines[0] == "Sequential: 2 hooks, 1 risk"
    assert lines[1].split() == ["order", "point", "kind", "who", "where", "calls", "µs/call", "risk"]
    assert lines[2].split()[:4] == ["1", "0", "forward", "look"]
    assert lines[3].endswith("⚠ 1")
    assert lines[4].startswith("⚠ 1 legacy backward: ")
    console = Console(width=200)
    with console.capture() as captured:
        console.print(audit)
    assert "legacy backward" in captured.get()
    assert "<table" in audit._repr_html_()


def test_an_audit_is_a_sequence_of_rows():
    audit = th.audit(hooked())
    assert len(audit) == len(list(audit)) == 5
    assert isinstance(audit[1:3], th.Audit)
    assert audit[0] in audit


def test_something_that_is_no_model_is_an_error():
    with pytest.raises(th.SelectorError, match=r"nn\.Module"):
        th.audit(nn.Linear)


def test_auditing_touches_nothing():
    model = hooked()
    with untouched(model):
        str(th.audit(model))
    assert isinstance(model.transformer.h[0]._forward_hooks, OrderedDict)
