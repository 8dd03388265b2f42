import contextlib
import gc

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import tenterhook as th
from tenterhook.testing import Cell, Mixed, Residual, live_tensors, no_leak, state_of, untouched

X = torch.linspace(-1, 1, 6).reshape(2, 3)


def raw(model, *paths):
    """What cloning hooks of PyTorch's own see."""
    kept, handles = {}, []
    for path in paths:
        keep = lambda module, args, output, path=path: kept.setdefault(path, []).append(output.detach().clone())
        handles.append(model.get_submodule(path).register_forward_hook(keep))
    return kept, handles


@pytest.fixture(scope="module")
def gpt2():
    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=32, n_positions=16, use_cache=False)
    return GPT2LMHeadModel(config).eval()


IDS = torch.arange(16).reshape(2, 8)


def images():
    torch.manual_seed(0)
    block = lambda: nn.Sequential(
        nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(inplace=True), nn.Dropout(0.3)
    )
    return nn.Sequential(block(), block(), nn.Flatten(), nn.Linear(48, 2))


PICTURES = torch.linspace(-1, 1, 96).reshape(2, 3, 4, 4)


# --- against cloning hooks --------------------------------------------------------------------------------------------


def test_every_output_of_a_transformer_is_what_a_cloning_hook_sees(gpt2):
    paths = [name for name, module in gpt2.named_modules() if name and type(module).forward is not nn.Module.forward]
    paths.remove("transformer")
    kept = {}
    handles = [
        gpt2.get_submodule(path).register_forward_hook(
            lambda module, args, output, path=path: kept.setdefault(path, []).append(
                (output if isinstance(output, torch.Tensor) else output[0]).detach().clone()
            )
        )
        for path in paths
    ]
    gpt2(IDS)
    for handle in handles:
        handle.remove()
    with th.record(gpt2, "**") as tape:
        gpt2(IDS)
    for path, values in kept.items():
        found = [value if isinstance(value, torch.Tensor) else value[0] for value in tape.calls(path)]
        assert all(map(torch.equal, found, values)), path
        assert len(found) == len(values)


def test_every_output_of_an_in_place_network_is_what_a_cloning_hook_sees():
    model = images()
    kept, handles = raw(model, *[name for name, _ in model.named_modules() if name])
    torch.manual_seed(1)
    model(PICTURES)
    for handle in handles:
        handle.remove()
    torch.manual_seed(1)
    with th.record(model, "**") as tape:
        model(PICTURES)
    assert all(torch.equal(tape[path], values[0]) for path, values in kept.items())
    assert len(tape) == len(kept) + 1


def test_arguments_are_recorded_by_name_whether_given_by_place_or_by_name():
    model = Mixed(3)
    with th.record(model, "part:x", "part:scale", "part:in", "part") as tape:
        model(X)
    assert torch.equal(tape["part:x"], X)
    assert torch.equal(tape["part:in"], X)
    assert torch.equal(tape["part:scale"], torch.full_like(X, 2))
    assert set(tape["part"]) == {"y", "rest"}
    assert tape["part"]["rest"][1] is None


def test_no_selector_records_every_output():
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    with th.record(model) as tape:
        model(X)
    assert list(tape) == [":return", "0", "1"]


def test_selectors_of_every_kind_find_their_points():
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    with th.record(model, model[1], nn.Linear, lambda name, module: name == "") as tape:
        model(X)
    assert set(tape) == {":return", "0", "1", "2"}


# --- recording changes nothing ----------------------------------------------------------------------------------------


def outcome(model, x, session=None):
    torch.manual_seed(3)
    x = x.clone().requires_grad_()
    with session or contextlib.nullcontext():
        found = model(x)
        found.pow(2).sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    buffers = [buffer.clone() for buffer in model.buffers()]
    return [found.detach(), x.grad, *gradients, *buffers, torch.get_rng_state()]


@pytest.mark.parametrize("copy", ["auto", "always", "never"])
@pytest.mark.parametrize("make", [images, lambda: nn.Sequential(Residual(4), nn.Dropout(0.5), Residual(4))])
def test_outputs_gradients_buffers_and_random_numbers_are_bitwise_the_same(make, copy):
    x = PICTURES if make is images else torch.linspace(-1, 1, 8).reshape(2, 4)
    plain, model = make(), make()
    model.load_state_dict(plain.state_dict())
    expected = outcome(plain, x)
    found = outcome(model, x, th.record(model, "**", "**:in", copy=copy))
    assert all(map(torch.equal, found, expected))


def test_a_transformer_in_training_is_bitwise_the_same():
    config = GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=32, n_positions=16)

    def run(*, record):
        torch.manual_seed(0)
        model = GPT2LMHeadModel(config).train()
        session = th.record(model, "**", "**.attn:in") if record else contextlib.nullcontext()
        torch.manual_seed(1)
        with session:
            loss = model(IDS, labels=IDS).loss
            loss.backward()
        return [loss.detach(), torch.get_rng_state(), *[p.grad for p in model.parameters()]]

    assert all(map(torch.equal, run(record=False), run(record=True)))


def test_a_training_run_of_several_steps_is_bitwise_the_same():
    def run(*, record):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Dropout(0.2), nn.Linear(8, 1)
        )
        optimiser = torch.optim.Adam(model.parameters(), lr=0.1)
        with th.record(model, "**", keep="last") if record else contextlib.nullcontext():
            for _ in range(5):
                optimiser.zero_grad()
                model(X).pow(2).sum().backward()
                optimiser.step()
        return list(model.state_dict().values())

    assert all(map(torch.equal, run(record=False), run(record=True)))


# --- calls ------------------------------------------------------------------------------------------------------------


def unrolled(model, x):
    """The recurrent model by hand: the state after each step."""
    cell, states, state = model.cell, [], torch.zeros_like(x[0])
    for step in x:
        state = torch.tanh(
            torch.nn.functional.linear(step, cell.weight_ih, cell.bias_ih)
            + torch.nn.functional.linear(state, cell.weight_hh, cell.bias_hh)
        )
        states.append(state)
    return states


STEPS = torch.linspace(-1, 1, 30).reshape(5, 2, 3)


def test_each_call_of_a_module_is_kept_in_order():
    model = Cell(3)
    with th.record(model, "cell") as tape:
        model(STEPS)
    for index, state in enumerate(unrolled(model, STEPS)):
        assert torch.allclose(tape[f"cell#{index}"], state, atol=1e-6)
        assert tape.calls("cell")[index] is tape[f"cell#{index}"]
    assert tape["cell#-1"] is tape["cell#4"]


def test_only_the_calls_that_were_named_are_kept():
    model = Cell(3)
    with th.record(model, "cell#1", "cell#3", "cell:in#0") as tape:
        model(STEPS)
    assert list(tape) == ["cell#1", "cell#3", "cell:in"]
    assert torch.equal(tape["cell:in#0"], STEPS[0])


@pytest.mark.parametrize(("keep", "held"), [("all", [0, 1, 2, 3, 4]), ("last", [4]), (2, [3, 4]), (9, [0, 1, 2, 3, 4])])
@pytest.mark.parametrize("copy", ["auto", "always"])
def test_the_last_calls_are_kept_as_many_as_asked_for(keep, held, copy):
    model = Cell(3)
    with th.record(model, "cell", keep=keep, copy=copy) as tape:
        model(STEPS)
    assert list(tape) == [f"cell#{index}" for index in held]
    for index in held:
        assert torch.allclose(tape[f"cell#{index}"], unrolled(model, STEPS)[index], atol=1e-6)


def test_with_only_the_last_call_kept_no_index_is_needed():
    model = Cell(3)
    with th.record(model, "cell", keep="last") as tape:
        found = model(STEPS)
    assert torch.equal(tape["cell"], found)


def test_a_call_from_the_end_cannot_be_known_beforehand():
    with pytest.raises(th.AddressError, match="which call will be the last"):
        th.record(Cell(3), "cell#-1")


# --- names ------------------------------------------------------------------------------------------------------------


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = self.first
        self.head = nn.Linear(3, 3)
        self.head.weight = self.first.weight

    def forward(self, x):
        return self.head(self.second(self.first(x)))


def test_a_shared_module_is_found_by_each_of_its_names():
    model = Shared()
    with th.record(model, "second") as tape:
        model(X)
    assert torch.equal(tape["first#0"], tape["second#0"])
    assert tape.calls("first") == tape.calls("second")
    assert len(tape) == 2
    assert "first" in tape


def test_naming_a_shared_module_twice_records_it_once():
    model = Shared()
    with th.record(model, "first", "second") as tape:
        model(X)
    assert len(tape) == 2


def test_a_tied_parameter_is_found_by_each_of_its_names():
    model = Shared()
    with th.record(model, "head.weight") as tape:
        model(X)
    assert torch.equal(tape["first.weight"], model.first.weight)
    assert torch.equal(tape["second.weight"], tape["head.weight"])


def test_the_output_may_be_asked_for_with_or_without_its_word():
    model = nn.Sequential(nn.Linear(3, 3))
    with th.record(model, "0:return", ":return") as tape:
        model(X)
    assert torch.equal(tape["0"], tape["0:return"])
    assert torch.equal(tape[""], tape[":return"])


# --- fast paths -------------------------------------------------------------------------------------------------------


def layer():
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()


def encoder():
    return nn.TransformerEncoder(layer(), 2).eval()


TOKENS = torch.linspace(-1, 1, 64).reshape(2, 4, 8)
PADDING = torch.tensor([[False, False, False, False], [False, False, True, True]])
nested_is_new = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")


@pytest.mark.parametrize("grad", [True, False])
def test_the_children_of_a_fused_layer_are_recorded_in_eval(grad):
    model = layer()
    with torch.set_grad_enabled(grad):
        plain = model(TOKENS)
        with untouched(model), th.record(model, "linear1", "norm2", "self_attn") as tape:
            found = model(TOKENS)
    assert torch.allclose(found, plain, atol=1e-6)
    assert torch.allclose(tape["norm2"], plain, atol=1e-6)
    assert tape["linear1"].shape == (2, 4, 16)


def test_a_fused_layer_keeps_its_fast_path_where_only_the_layer_is_asked_for():
    model = layer()
    with torch.no_grad():
        plain = model(TOKENS)
        with th.record(model, ":return") as tape, th.record(nn.Sequential(model), "0"):
            found = model(TOKENS)
    assert torch.equal(found, plain)
    assert torch.equal(tape[":return"], plain)


def test_a_fused_layer_stands_untouched_between_calls():
    model = layer()
    with th.record(model, "linear1"), torch.no_grad():
        assert not model._forward_pre_hooks
        model(TOKENS)
        assert not model._forward_pre_hooks


@nested_is_new
@pytest.mark.parametrize("grad", [True, False])
def test_the_children_of_an_encoder_are_recorded_with_a_padding_mask(grad):
    model = encoder()
    with torch.set_grad_enabled(grad):
        plain = model(TOKENS, src_key_padding_mask=PADDING)
        with untouched(model), th.record(model, "layers.*.linear1", "layers.1") as tape:
            found = model(TOKENS, src_key_padding_mask=PADDING)
    assert torch.allclose(found[~PADDING], plain[~PADDING], atol=1e-5)
    assert tape["layers.0.linear1"].shape == (2, 4, 16)
    assert torch.equal(tape["layers.1"], found)


@nested_is_new
def test_the_layers_of_an_encoder_keep_their_nested_tensors_where_nothing_inside_is_asked_for():
    model = encoder()
    with torch.no_grad():
        plain = model(TOKENS, src_key_padding_mask=PADDING)
        with th.record(model, "layers.0", ":return") as tape:
            found = model(TOKENS, src_key_padding_mask=PADDING)
    assert torch.equal(found, plain)
    assert torch.equal(tape[":return"], plain)
    assert tape["layers.0"].is_nested
    assert "nested" in repr(tape)


@nested_is_new
def test_an_edit_inside_an_encoder_takes_effect_with_a_padding_mask():
    model = encoder()
    with torch.no_grad(), th.edit(model, {"layers.1.norm2": th.zero()}):
        assert model(TOKENS, src_key_padding_mask=PADDING).count_nonzero() == 0


def test_a_whole_transformer_is_recorded_with_masks():
    torch.manual_seed(0)
    model = nn.Transformer(8, 2, 1, 1, 16, batch_first=True).eval()
    with torch.no_grad(), th.record(model, "**") as tape:
        model(TOKENS, TOKENS, src_key_padding_mask=PADDING)
    assert "encoder.layers.0.linear2" in tape
    assert "decoder.layers.0.multihead_attn" in tape
    assert "encoder.layers.0.self_attn.out_proj" not in tape


# --- no leak ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [images, lambda: nn.Sequential(nn.Conv2d(3, 3, 3), nn.Tanh())])
def test_no_tensor_survives_its_tape(make):
    model = make()
    with no_leak():
        with th.record(model, "**", "**:in") as tape:
            model(PICTURES)
        del tape


def test_a_tape_keeps_no_graph_alive():
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    with th.record(model, "0", "1") as tape:
        model(X)
    held = {id(tensor) for tensor in (tape["0"], tape["1"])}
    left = [t for t in live_tensors() if t.grad_fn is not None and t.shape == (2, 3)]
    assert all(id(t) not in held for t in left)
    assert tape["0"].grad_fn is None


def test_a_tape_does_not_keep_its_model_alive():
    import weakref

    model = nn.Sequential(nn.Linear(3, 3))
    gone = weakref.ref(model)
    with th.record(model, "0") as tape:
        model(X)
    del model
    assert gone() is None
    assert tape["0"].shape == (2, 3)


def test_a_session_that_ended_by_an_exception_leaves_no_tensor():
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())

    def run():
        with contextlib.suppress(ZeroDivisionError), th.record(model, "**"):
            model(X)
            _ = 1 / 0

    with no_leak():
        run()


def test_a_thousand_sessions_leave_nothing_even_without_the_collector():
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Linear(3, 3))
    before = state_of(model)
    with torch.no_grad(), no_leak():
        gc.disable()
        for index in range(1000):
            with th.record(model, "**", keep="last") as tape, th.edit(model, {"0": th.scale(2), "2.bias": th.zero()}):
                model(X)
            if index % 100 == 0:
                with th.record(model, "1", stop=True) as tape:
                    model(X)
        del tape
        objects = len(gc.get_objects())
        for _ in range(50):
            with th.record(model, "**"), th.edit(model, {"0": th.scale(2), "2.bias": th.zero()}):
                model(X)
        assert len(gc.get_objects()) - objects < 50
    assert before.keys() == state_of(model).keys()


# --- a look at a model ------------------------------------------------------------------------------------------------


def test_looking_at_shapes_changes_nothing():
    model = images()
    with untouched(model):
        text = str(th.points(model, inputs=PICTURES))
    assert "[2, 3, 4, 4]" in text


def test_looking_at_shapes_takes_arguments_and_keywords():
    model = Mixed(3)
    assert "calls" in str(th.points(model, inputs=(X,)))
    assert "calls" in str(th.points(model, inputs={"x": X}))


def test_a_tape_shows_its_shapes_in_the_tree():
    model = Cell(3)
    with th.record(model, "**") as tape:
        model(STEPS)
    assert "5" in str(th.points(model, tape=tape))


# --- attention weights that a fused kernel does not compute -----------------------------------------------------------


class Attention(nn.Module):
    """Attention that gives its weights, like that of transformers, only without the fused kernel."""

    def __init__(self, *, fused):
        super().__init__()
        self.fused = fused

    def forward(self, x):
        attn_weights = None if self.fused else torch.softmax(x @ x.mT, -1)
        return nn.functional.scaled_dot_product_attention(x, x, x) if self.fused else attn_weights @ x


def test_attention_weights_that_are_never_computed_are_reported_once():
    model = nn.Sequential(Attention(fused=True), Attention(fused=True))
    with (
        pytest.warns(th.TenterhookWarning, match=r"'0:attn_weights' was None at .*, as at 1 other .*\"eager\"") as seen,
        th.record(model, "*:attn_weights") as tape,
    ):
        model(X)
        model(X)
    assert len(seen) == 1
    assert tape["0:attn_weights#0"] is None


def test_attention_weights_that_are_computed_somewhere_need_no_warning():
    model = nn.Sequential(Attention(fused=False), Attention(fused=False))
    with th.record(model, "*:attn_weights") as tape:
        model(X)
        model[0].fused = True
        model(X)
    assert tape["0:attn_weights#1"] is None
