"""Dictionaries in the stream, beside the same computation by hand."""

import threading

import pytest
import torch
from torch import nn

import tenterhook as th


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        return x + self.mlp(self.norm(x)), None


class Model(nn.Module):
    """Three blocks that return tuples, as in transformers."""

    def __init__(self):
        super().__init__()
        self.h = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        for block in self.h:
            x, _ = block(x)
        return self.head(x)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Model().eval()


@pytest.fixture
def sae():
    torch.manual_seed(1)
    made = th.Dictionary(8, 32, kind="topk", k=4, center=True)
    nn.init.normal_(made.b_dec)
    return made


@pytest.fixture
def x():
    return torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(2))


def by_hand(model, x, change):
    """Run the model with its second block's output replaced."""
    for place, block in enumerate(model.h):
        x, _ = block(x)
        x = change(x) if place == 1 else x
    return model.head(x)


def names(model):
    return [name for name, _ in model.named_modules()]


# -- values ------------------------------------------------------------------------------------------------------------


def test_without_an_error_term_the_stream_is_the_reconstruction(model, sae, x):
    with th.splice(model, {"h.1": sae}):
        found = model(x)
    assert torch.equal(found, by_hand(model, x, sae))


def test_with_an_error_term_the_outputs_keep_their_bits(model, sae, x):
    plain = model(x)
    with th.splice(model, {"h.1": sae, "h.0": sae}, error=True):
        assert torch.equal(model(x), plain)
        with th.record(model, ["h.1@latents", "h.1@latents[3]", "h.1@error"], grad=True) as tape:
            found = model(x)
            found.sum().backward()
    assert torch.equal(found, plain)
    assert torch.equal(tape["h.1@latents"][..., 3], tape["h.1@latents[3]"])


def test_the_error_is_the_value_minus_its_reconstruction(model, sae, x):
    with th.splice(model, {"h.1": sae}, error=True), th.record(model, ["h.1", "h.1@latents", "h.1@error"]) as tape:
        model(x)
    value = tape["h.1"][0]
    assert torch.equal(tape["h.1@latents"], sae.encode(value))
    assert torch.equal(tape["h.1@error"], value - sae(value))


def test_an_edited_latent_writes_its_direction_and_the_error_stays(model, sae, x):
    def change(value):
        latents = sae.encode(value)
        edited = latents.clone()
        edited[..., 3] = 2.0
        return sae.decode(edited) + (value - sae.decode(latents))

    with th.splice(model, {"h.1": sae}, error=True), th.edit(model, {"h.1@latents[3]": th.set(2.0)}):
        found = model(x)
    assert torch.equal(found, by_hand(model, x, change))


def test_positions_that_no_edit_changes_keep_their_bits(model, sae, x):
    with (
        th.splice(model, {"h.1": sae}, error=True),
        th.edit(model, {"h.1@latents": th.set(2.0, at=th.at[:, -1])}),
        th.record(model, "h.1.splice") as tape,
    ):
        model(x)
    with th.record(model, "h.1") as plain:
        model(x)
    assert torch.equal(tape["h.1.splice"][:, :-1], plain["h.1"][0][:, :-1])
    assert not torch.equal(tape["h.1.splice"][:, -1], plain["h.1"][0][:, -1])


def test_an_edit_in_place_counts_as_an_edit(model, sae, x):
    def silence(latents):
        latents.zero_()

    with torch.no_grad(), th.splice(model, {"h.1": sae}, error=True), th.edit(model, {"h.1@latents": silence}):
        found = model(x)
    assert torch.allclose(found, by_hand(model, x, lambda v: sae.b_dec + (v - sae(v))), atol=1e-6)


def test_an_edited_error_reaches_the_output(model, sae, x):
    with th.splice(model, {"h.1": sae}, error=True), th.edit(model, {"h.1@error": th.zero()}):
        found = model(x)
    assert torch.allclose(found, by_hand(model, x, sae), atol=1e-6)


def test_a_transcoder_reads_at_one_point_and_writes_at_another(model, x):
    torch.manual_seed(3)
    transcoder = th.Dictionary(8, 32, skip=True)
    nn.init.normal_(transcoder.W_skip)
    with th.splice(model, {("h.1.norm", "h.1.mlp"): transcoder}), th.record(model, "h.1.mlp@latents") as tape:
        found = model(x)

    before = model.h[0](x)[0]
    normed = model.h[1].norm(before)
    latents = transcoder.encode(normed)
    after = before + transcoder.decode(latents) + normed @ transcoder.W_skip.T
    assert torch.equal(tape["h.1.mlp@latents"], latents)
    assert torch.allclose(found, model.head(model.h[2](after)[0]), atol=1e-6)


def test_a_dictionary_at_an_argument_changes_what_the_module_gets(model, sae, x):
    with th.splice(model, {"h.1.mlp:in": sae}), th.record(model, "h.1.mlp:in") as tape:
        model(x)
    assert torch.equal(tape["h.1.mlp:in"], sae(model.h[1].norm(model.h[0](x)[0])))


def test_a_dictionary_of_another_dtype_gets_its_own_and_gives_back_the_models(model, sae, x):
    found = []
    with th.splice(model, {"h.1": sae.double()}), th.edit(model, {"h.1@latents": lambda v: found.append(v.dtype)}):
        assert model(x).dtype == torch.float32
    assert found == [torch.float64]


# -- gradients ---------------------------------------------------------------------------------------------------------


def test_gradients_are_those_of_latents_and_error_as_written_out(model, sae, x):
    with th.splice(model, {"h.1": sae}, error=True):
        with th.record(model, ["h.1@latents", "h.1@error"], grad=True) as tape:
            model(x).square().sum().backward()
    made = {}

    def change(value):
        clean = sae.encode(value)
        made["latents"] = clean.detach().requires_grad_()
        made["error"] = (value - sae.decode(clean)).detach().requires_grad_()
        return sae.decode(made["latents"]) + made["error"]

    total = by_hand(model, x, change).square().sum()
    latents, error = torch.autograd.grad(total, (made["latents"], made["error"]))
    assert torch.allclose(tape.grad["h.1@latents"], latents, atol=1e-5)
    assert torch.allclose(tape.grad["h.1@error"], error, atol=1e-5)


def test_with_an_error_term_the_gradient_before_it_is_that_of_the_plain_model(model, sae, x):
    one, other = (x.clone().requires_grad_() for _ in range(2))
    model(one).square().sum().backward()
    with th.splice(model, {"h.1": sae}, error=True), th.record(model, ["h.1@latents", "h.1@error"], grad=True):
        model(other).square().sum().backward()
    assert torch.allclose(one.grad, other.grad, atol=1e-5)


def test_a_latent_has_a_gradient_with_respect_to_the_latents_of_an_earlier_splice(model, sae, x):
    model, sae, x = model.double(), sae.double(), x.double()

    def later_with(change):
        seen = []
        with th.splice(model, {"h.0": sae, "h.1": sae}, error=True):
            with th.edit(model, {"h.0@latents": th.add(change), "h.1@latents": seen.append}):
                model(x)
        return seen[0][0, 0]

    change = torch.zeros(2, 4, 32, dtype=torch.float64, requires_grad=True)
    later = later_with(change)
    index = later.argmax()
    (gradient,) = torch.autograd.grad(later[index], change)
    step = torch.zeros_like(change)
    step[0, 0, gradient[0, 0].abs().argmax()] = 1e-6
    slope = (later_with(step)[index] - later_with(-step)[index]) / 2e-6
    assert torch.allclose(slope, (gradient * step).sum() / 1e-6, rtol=1e-5)
    assert slope.abs() > 1e-3


# -- sessions ----------------------------------------------------------------------------------------------------------


def test_everything_is_removed_at_the_end_and_after_an_error(model, sae, x):
    before, plain = list(model.named_modules()), model(x)
    with pytest.raises(KeyError), th.splice(model, {"h.1": sae, "h.2.mlp": sae}):
        model(x)
        raise KeyError
    assert all(one == other for one, other in zip(before, model.named_modules(), strict=True))
    assert torch.equal(model(x), plain)
    with pytest.raises(th.AddressError):
        th.points(model, "h.1@latents")


def test_the_state_of_the_model_has_the_same_names_in_the_session(model, sae):
    before = list(model.state_dict())
    with th.splice(model, {"h.1": sae}):
        assert list(model.state_dict()) == before


def test_modes_of_the_module_and_of_the_dictionary_stay(model, sae):
    model.h[1].norm.train()
    sae.train()
    with th.splice(model, {"h.1": sae}, error=True):
        assert not model.h[1].training
        assert model.h[1].norm.training
        assert sae.training
    assert model.h[1].norm.training


def test_a_module_with_two_names_is_spliced_under_both(sae, x):
    shared = nn.Linear(8, 8)
    model = nn.Sequential(shared, nn.ReLU(), shared)
    with th.splice(model, {"0": sae}):
        found = model(x)
    assert torch.equal(found, sae(shared(torch.relu(sae(shared(x))))))


def test_sessions_nest_and_close_in_any_order(model, sae, x):
    plain = model(x)
    one, other = th.splice(model, {"h.0": sae}), th.splice(model, {"h.0.mlp": sae})
    one.start(), other.start()
    assert th.points(model, ["h.0@latents", "h.0.mlp@latents"]).addresses == ("h.0@latents", "h.0.mlp@latents")
    one.close()
    assert th.points(model, ["h.0.mlp@latents"]).addresses == ("h.0.mlp@latents",)
    other.close()
    assert torch.equal(model(x), plain)


def test_a_module_that_was_replaced_before_the_start_is_an_error(model, sae):
    session = th.splice(model, {"h.1": sae})
    model.h[1] = Block()
    with pytest.raises(th.ModelChanged, match=r"the module 'h\.1' was replaced or removed"):
        session.start()


def test_a_failed_start_removes_what_was_installed(model, sae):
    before = names(model)
    with th.splice(model, {"h.1": sae}):
        inside = names(model)
        with pytest.raises(th.SpliceError, match=r"there is a dictionary at 'h\.1' already"):
            th.splice(model, {"h.0": sae, "h.1": sae}).start()
        assert names(model) == inside
    assert names(model) == before


def test_a_session_that_was_open_before_still_records(model, sae, x):
    with th.record(model, ["h.1", "h.2"]) as tape, th.splice(model, {"h.1": sae}):
        model(x)
    assert torch.equal(tape["h.1"][0], by_blocks(model, x, 2))
    assert not torch.equal(tape["h.2"][0], by_blocks(model, x, 3))


def by_blocks(model, x, count):
    for block in model.h[:count]:
        x, _ = block(x)
    return x


def test_calls_in_other_threads_run_without_the_dictionary(model, sae, x):
    plain, found = model(x), []
    with th.splice(model, {"h.1": sae}):
        thread = threading.Thread(target=lambda: found.append(model(x)))
        thread.start()
        thread.join()
    assert torch.equal(found[0], plain)


def test_a_sequential_model_may_have_dictionaries(sae, x):
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Linear(8, 2))
    first, middle, last = model
    with th.splice(model, {"1": sae}):
        assert torch.equal(model(x), last(sae(middle(first(x)))))


def test_the_code_of_the_model_can_read_attributes_of_a_spliced_layer(model, sae):
    model.h[1].kind = "full"
    with th.splice(model, {"h.1": sae}):
        assert model.h[1].kind == "full"
        assert model.h[1].mlp.in_features == 8


def test_a_compiled_model_runs_the_dictionary(model, sae, x):
    compiled = torch.compile(model, backend="eager")
    plain = compiled(x)
    spliced = by_hand(model, x, sae)
    with th.splice(compiled, {"h.1": sae}):
        assert torch.equal(compiled(x), spliced)
    assert torch.equal(compiled(x), plain)
    torch.compiler.reset()  # The caches would keep values of this test.


# -- with sweeps, replay and harvests ----------------------------------------------------------------------------------


def test_latents_are_swept_like_other_points(model, sae, x):
    with th.splice(model, {"h.1": sae}, error=True):
        cases = th.grid(lambda latent: {"h.1@latents": th.zero(at=th.at[..., latent])}, latent=range(32))
        found = th.sweep(model, cases, lambda out: out.sum(), x)
        for latent in (0, 7):
            with th.edit(model, {f"h.1@latents[{latent}]": th.zero()}), torch.no_grad():
                assert torch.allclose(model(x).sum(), found.values[latent], atol=1e-5)


def test_a_replay_serves_what_is_before_the_edited_latents(model, sae, x):
    with torch.no_grad(), th.splice(model, {"h.1": sae}, error=True):
        with th.record(model, replay=True) as tape:
            model(x)
        with th.edit(model, {"h.1@latents[3]": th.set(2.0)}):
            plain = model(x)
            with th.replay(model, tape) as session:
                assert torch.equal(model(x), plain)
    assert session.served.calls["h.0"] == 1
    assert session.served.calls["h.1"] == 1


def test_latents_are_harvested_and_the_harvest_resumes(model, sae, x, tmp_path):
    for _ in range(2):
        with th.splice(model, {"h.1": sae}, error=True):
            th.harvest(model, [x, x + 1], "h.1@latents", to=tmp_path / "store", progress=False)
    store = th.open(tmp_path / "store")
    assert store["h.1@latents"][:].reshape(-1, 32).shape == (16, 32)
    other = th.Dictionary(8, 32, kind="topk", k=4)
    with th.splice(model, {"h.1": other}, error=True), pytest.raises(th.DifferentHarvest):
        th.harvest(model, [x, x + 1], "h.1@latents", to=tmp_path / "store", progress=False)


# -- bad input ---------------------------------------------------------------------------------------------------------


def test_bad_input_is_named_before_anything_is_installed(model, sae):
    before = names(model)
    with pytest.raises(th.SpliceError, match="with encode"):
        th.splice(model, {"h.1": nn.Linear(8, 8)})
    with pytest.raises(th.SpliceError, match="give a dict of address to dictionary"):
        th.splice(model, {})
    with pytest.raises(th.SpliceError, match="selects 3 points"):
        th.splice(model, {"h.*": sae})
    with pytest.raises(th.SpliceError, match="in every call"):
        th.splice(model, {"h.1#0": sae})
    with pytest.raises(th.SpliceError, match="give a module inside it, such as 'h'"):
        th.splice(model, {":return": sae}).start()
    with pytest.raises(th.AddressError):
        th.splice(model, {"h.9": sae})
    assert names(model) == before


def test_a_dictionary_of_another_width_is_an_error_that_names_it(model, x):
    with pytest.raises(th.SpliceError, match=r"'h.1': the Dictionary cannot encode float32\[2, 4, 8\]"):
        with th.splice(model, {"h.1": th.Dictionary(6, 32)}):
            model(x)
    with pytest.raises(th.SpliceError, match=r"decode\(\) of the Dictionary returned float32\[2, 4, 6\]"):
        with th.splice(model, {"h.1": th.Dictionary(8, 32, out=6)}):
            model(x)


def test_latents_of_a_point_without_a_dictionary_are_an_error_that_says_what_is_there(model, sae):
    with th.splice(model, {"h.1": sae}):
        with pytest.raises(th.AddressError, match=r"th.splice\(model, \{'h.2': dictionary\}\)"):
            th.points(model, "h.2@latents")
        with pytest.raises(th.AddressError, match="error=True"):
            th.points(model, "h.1@error")
        with pytest.raises(th.AddressError, match="latents 0 to 31"), th.record(model, "h.1@latents[99]"):
            model(torch.ones(1, 8))


def test_an_encoder_that_returns_no_tensor_is_an_error(model, x):
    class Other(nn.Module):
        def encode(self, x):
            return x, x

        def decode(self, x):
            return x

    with pytest.raises(th.SpliceError, match="needs one dense tensor of latents"), th.splice(model, {"h.1": Other()}):
        model(x)


def test_a_transcoder_whose_input_did_not_run_is_an_error(model, x):
    with pytest.raises(th.SpliceError, match=r"'h.2.norm' did not run before it"):
        with th.splice(model, {("h.2.norm", "h.1.mlp"): th.Dictionary(8, 32)}):
            model(x)


def test_a_splice_inside_a_checkpoint_is_an_error(sae, x):
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))

        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)

    model = Outer()
    with pytest.raises(th.SpliceError, match="inside an activation checkpoint"), th.splice(model, {"inner.0": sae}):
        model(x)
    with th.splice(model, {"inner": sae}):
        pass
