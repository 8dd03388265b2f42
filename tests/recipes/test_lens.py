"""The lenses, compared with hooks by hand, and with a model whose basis turns from layer to layer."""

import lm_toys
import pytest
import torch
from torch import nn

import tenterhook as th
from tenterhook.testing import untouched

MODELS = {
    "gpt2": (lm_toys.gpt2, "transformer.h.*", "transformer.ln_f"),
    "llama": (lm_toys.llama, "model.layers.*", "model.norm"),
    "gemma": (lm_toys.gemma, "model.layers.*", "model.norm"),
    "neox": (lm_toys.neox, "gpt_neox.layers.*", "gpt_neox.final_layer_norm"),
}


@pytest.fixture(params=MODELS)
def case(request):
    build, points, norm = MODELS[request.param]
    return build(), points, norm


def head_of(model):
    return model.get_output_embeddings()


def test_it_is_the_norm_and_the_head_at_every_block(case):
    model, points, norm = case
    ids, kept = lm_toys.ids(), []
    blocks = model.get_submodule(points.removesuffix(".*"))
    handles = [block.register_forward_hook(lambda _m, _a, out: kept.append(out)) for block in blocks]
    with torch.no_grad():
        final = model(ids).logits
    for handle in handles:
        handle.remove()
    with torch.no_grad():
        truth = torch.stack([head_of(model)(model.get_submodule(norm)(value)) for value in kept])
    with untouched(model):
        found = th.recipes.logit_lens(model, ids, points=points)
    torch.testing.assert_close(found.logits, truth)
    torch.testing.assert_close(found.final, final)
    torch.testing.assert_close(found.logits[-1], final)  # After the last block it is what the model says.
    assert found.points == tuple(points.replace("*", str(layer)) for layer in range(3))
    assert not torch.allclose(found.logits[0], final)


def test_what_is_read_off_it(case):
    model, points, _ = case
    found = th.recipes.logit_lens(model, lm_toys.ids(), points=points, at=th.at[:, -1:])
    assert found.logits.shape == (3, 2, 1, 50)
    first, last = found.logits[0].log_softmax(-1), found.final.log_softmax(-1)
    truth = nn.functional.kl_div(first, last, reduction="none", log_target=True).sum(-1)
    torch.testing.assert_close(found.divergence[0], truth)
    assert found.divergence[-1].abs().max() < 1e-5
    assert found.agreement[-1] == 1
    token = int(found.final[0, 0].argmax())
    assert found.rank(token)[-1, 0, 0] == 0
    order = found.logits[0, 1, 0].argsort(descending=True).tolist()
    assert found.rank(token)[0, 1, 0] == order.index(token)
    assert torch.equal(found.top(3)[0, 1, 0], torch.tensor(order[:3]))


def test_a_cap_on_the_scores_is_refused():
    model = lm_toys.gemma2()
    model.config.final_logit_softcapping = 0.5
    with pytest.raises(th.RecipeError, match=r"does not give the model's scores, and is off by .*cap on the scores"):
        th.recipes.logit_lens(model, lm_toys.ids(), points="model.layers.*")


class Turning(nn.Module):
    """Each layer turns the stream by a fixed rotation; the head reads the end. Linear, so that the truth is known."""

    def __init__(self, width=6, layers=3):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(30, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        for layer in self.layers:
            nn.init.orthogonal_(layer.weight)
        self.head = nn.Linear(width, 30)
        nn.init.normal_(self.head.weight)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def test_a_tuned_lens_learns_the_turn_that_a_logit_lens_misses():
    model = Turning()
    ids = torch.randint(0, 30, (40, 8), generator=torch.Generator().manual_seed(1))
    batches = list(ids[:32].split(8))
    with untouched(model):
        lens = th.recipes.tuned_lens(model, batches, points="layers.*", epochs=150, lr=0.03, head="head")
    held = ids[32:]
    plain = th.recipes.logit_lens(model, held, points="layers.*", head="head").divergence.flatten(1).mean(1)
    tuned = lens(model, held).divergence.flatten(1).mean(1)
    assert plain[0] > 0.5
    assert bool((tuned[:2] < 0.02 * plain[:2]).all())
    assert tuned[2] < 1e-3
    # The truth: after layer 1 only the last rotation is missing.
    with torch.no_grad():
        x = torch.randn(5, 6)
        scores = model.head(x + lens.maps[1](x)).log_softmax(-1)
        truth = model.head(model.layers[2](x)).log_softmax(-1)
    torch.testing.assert_close(scores, truth, atol=0.25, rtol=0.1)
    assert all(parameter.grad is None for parameter in (*model.parameters(), *lens.parameters()))


def test_an_untrained_tuned_lens_is_the_logit_lens_and_a_trained_one_is_nearer():
    model = lm_toys.gpt2()
    batches = [lm_toys.ids(seed, 8, 8) for seed in range(6)]
    plain = th.recipes.logit_lens(model, lm_toys.ids(99, 8, 8), points="transformer.h.*")
    start = th.recipes.tuned_lens(model, batches, points="transformer.h.*", epochs=0)
    torch.testing.assert_close(start(model, lm_toys.ids(99, 8, 8)).logits, plain.logits)
    with untouched(model):
        lens = th.recipes.tuned_lens(model, batches, points="transformer.h.*", epochs=40, lr=1e-2)
    tuned = lens(model, lm_toys.ids(99, 8, 8))
    assert tuned.tuned
    before, after = plain.divergence.flatten(1).mean(1), tuned.divergence.flatten(1).mean(1)
    assert bool((after[:2] < 0.8 * before[:2]).all())
    assert lens.losses[-1] < lens.losses[0]
    again = th.recipes.tuned_lens(model, batches, points="transformer.h.*", epochs=0)
    again.load_state_dict(lens.state_dict())
    assert torch.equal(again(model, lm_toys.ids()).logits, lens(model, lm_toys.ids()).logits)


def test_bad_input_is_an_error(case):
    model, points, norm = case
    first = next(name for name, each in model.named_modules() if type(each) is type(model.get_submodule(norm)))
    with pytest.raises(th.RecipeError, match="but the stream is"):
        th.recipes.logit_lens(model, lm_toys.ids(), points="lm_head" if hasattr(model, "lm_head") else "embed_out")
    with pytest.raises(th.RecipeError, match=r"the module that computes the scores of .* is unknown"):
        th.recipes.logit_lens(Turning(), lm_toys.ids() % 30, points="layers.*")
    with pytest.raises(th.RecipeError, match="does not give the model's scores"):
        th.recipes.logit_lens(model, lm_toys.ids(), points=points, norm=first)
    with pytest.raises(th.RecipeError, match="no batches"):
        th.recipes.tuned_lens(model, [], points=points)
    found = th.recipes.logit_lens(model, lm_toys.ids(), points=points)
    with pytest.raises(th.RecipeError, match="token 50 is not in the vocabulary: 0 to 49"):
        found.rank(50)
    assert "same top token" in repr(found)
    assert len(found.show(decode=lambda token: f"<{token}>").axes[0].texts) == 18
    assert len(th.recipes.logit_lens(model, lm_toys.ids(), points=points, at=th.at[:, -1]).show().axes[0].texts) == 3


def test_a_jacobian_lens_is_exact_where_the_rest_is_linear():
    model = Turning()
    ids = torch.randint(0, 30, (20, 8), generator=torch.Generator().manual_seed(1))
    with untouched(model):
        lens = th.recipes.jacobian_lens(model, list(ids.split(10)), points="layers.*", norm="", head="head")
    found = lens(model, ids)
    assert found.kind == "jacobian"
    assert float(found.divergence.max()) < 1e-5
    torch.testing.assert_close(lens.maps[1].weight + torch.eye(6), model.layers[2].weight, atol=1e-5, rtol=1e-4)


def test_a_jacobian_lens_has_the_mean_derivative_at_one_position():
    model = lm_toys.gpt2(2).double()
    ids = lm_toys.ids(0, 3, 1)  # One position, so that there is no choice.
    lens = th.recipes.jacobian_lens(model, [ids], points="transformer.h.0", batch=7)

    with th.record(model, "transformer.h.0") as tape:
        model(ids)
    start = tape["transformer.h.0"]
    mean = torch.zeros(16, 16).double()
    for row in range(3):

        def of(value, row=row):
            changed = start.clone()
            changed[row] = value
            return model.transformer.h[1](changed)[row, 0]

        mean += torch.autograd.functional.jacobian(of, start[row])[:, 0] / 3
    torch.testing.assert_close(lens.maps[0].weight.double() + torch.eye(16), mean, atol=1e-6, rtol=1e-4)


# -- what users give ---------------------------------------------------------------------------------------------------

LENSES = {
    "logit": lambda model, batches: th.recipes.logit_lens(model, batches[0], points="transformer.h.*"),
    "tuned": lambda model, batches: th.recipes.tuned_lens(model, batches, points="transformer.h.*", epochs=3)(
        model, batches[0]
    ),
    "jacobian": lambda model, batches: th.recipes.jacobian_lens(model, batches, points="transformer.h.*")(
        model, batches[0]
    ),
}


@pytest.mark.parametrize("kind", LENSES)
def test_a_lens_works_in_inference_mode_and_takes_no_random_numbers(kind):
    model = lm_toys.gpt2()
    expected = LENSES[kind](model, [lm_toys.ids()])
    with untouched(model), torch.inference_mode():  # The state of the random number generator is compared too.
        found = LENSES[kind](model, [lm_toys.ids()])
    torch.testing.assert_close(found.logits, expected.logits)


@pytest.mark.parametrize("kind", LENSES)
def test_a_lens_of_a_model_in_training_mode_is_refused_if_it_is_random(kind):
    model = lm_toys.gpt2().train()
    with pytest.raises(th.RecipeError, match="Dropout"):
        LENSES[kind](model, [lm_toys.ids()])
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.eval()  # What is left is the dropout that the attention calls as a function.
    with pytest.raises(th.RecipeError, match="its run uses random numbers"):
        LENSES[kind](model, [lm_toys.ids()])


def padded(tokens, side):
    """Return inputs in which the first row has two tokens of padding."""
    mask = torch.ones_like(tokens)
    mask[0, slice(0, 2) if side == "left" else slice(-2, None)] = 0
    return {
        "input_ids": torch.where(mask.bool(), tokens, 0), "attention_mask": mask,
        "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
    }  # fmt: skip


@pytest.mark.parametrize("side", ["left", "right"])
def test_averages_leave_padding_out(side):
    model, tokens = lm_toys.gpt2(), lm_toys.ids(3)
    found = th.recipes.logit_lens(model, padded(tokens, side), points="transformer.h.*")
    row = tokens[:1, 2:] if side == "left" else tokens[:1, :-2]
    alone = [th.recipes.logit_lens(model, each, points="transformer.h.*") for each in (row, tokens[1:])]
    same = [(each.top()[..., 0] == each.final.argmax(-1)).flatten(1).float() for each in alone]
    torch.testing.assert_close(found.agreement, torch.cat(same, 1).mean(1))
    away = torch.cat([each.divergence.flatten(1) for each in alone], 1).mean(1)
    assert f"KL {away[0]:7.3f}" in repr(found)
    last = th.recipes.logit_lens(model, padded(tokens, side), points="transformer.h.*", at=th.at[:, -1])
    assert last.mask is None or last.mask.tolist() == [side == "left", True]


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_tuned_lens_is_not_trained_on_padding(side):
    model, tokens = lm_toys.gpt2(), lm_toys.ids(3)
    inputs = padded(tokens, side)
    found = th.recipes.tuned_lens(model, inputs, points="transformer.h.*", lr=0.01)
    row = tokens[:1, 2:] if side == "left" else tokens[:1, :-2]
    away = [th.recipes.logit_lens(model, each, points="transformer.h.*").divergence for each in (row, tokens[1:])]
    expected = torch.cat([each.flatten(1) for each in away], 1).mean()
    assert found.losses[0] == pytest.approx(expected.item(), rel=1e-4)
    other = {**inputs, "input_ids": torch.where(inputs["attention_mask"].bool(), tokens, 7)}
    again = th.recipes.tuned_lens(model, other, points="transformer.h.*", lr=0.01)
    for one, two in zip(found.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("seed", range(3))
def test_a_jacobian_lens_is_not_made_of_padding(seed):
    model, tokens = lm_toys.gpt2(2).double(), lm_toys.ids(3)
    inputs = padded(tokens, "right")
    made = th.recipes.jacobian_lens(model, inputs, points="transformer.h.0", seed=seed)
    place = int(torch.randint(6, (1,), generator=torch.Generator().manual_seed(seed)))
    used = [0, 1] if place < 4 else [1]
    with th.record(model, "transformer.h.0") as tape:
        model(tokens)
    start, mean = tape["transformer.h.0"], torch.zeros(16, 16).double()
    for row in used:

        def of(value, row=row):
            changed = start.clone()
            changed[row, place] = value
            return model.transformer.h[1](changed)[row, place]

        mean += torch.autograd.functional.jacobian(of, start[row, place]) / len(used)
    torch.testing.assert_close(made.maps[0].weight.double() + torch.eye(16), mean, atol=1e-6, rtol=1e-4)


def test_one_input_is_a_batch():
    model, tokens = lm_toys.gpt2(), lm_toys.ids()
    for make in (th.recipes.tuned_lens, th.recipes.jacobian_lens):
        expected = make(model, [tokens], points="transformer.h.*").state_dict()
        for given in (tokens, {"input_ids": tokens}, (tokens,), (each for each in [tokens])):
            found = make(model, given, points="transformer.h.*").state_dict()
            assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_options_that_make_no_sense_are_named():
    model, tokens = lm_toys.gpt2(), lm_toys.ids()
    for options in ({"epochs": -1}, {"epochs": 1.5}, {"lr": 0}, {"lr": float("nan")}):
        with pytest.raises(th.RecipeError, match="epochs= is an integer from 0 and lr= a positive number"):
            th.recipes.tuned_lens(model, [tokens], points="transformer.h.*", **options)
    with pytest.raises(th.RecipeError, match="batch= is a positive integer"):
        th.recipes.jacobian_lens(model, [tokens], points="transformer.h.*", batch=0)
    with torch.no_grad():
        model.transformer.h[1].mlp.c_fc.bias[0] = float("nan")
    for lens in LENSES.values():
        with pytest.raises(th.RecipeError, match="scores are not finite"):
            lens(model, [tokens])


def test_a_tuned_lens_learns_inside_autocast():
    """Autocast keeps what it has made of a map, and a step changes the map."""
    model, tokens = lm_toys.gpt2(), lm_toys.ids(0, 4, 6)
    options = {"points": "transformer.h.*", "epochs": 20, "lr": 0.01}
    expected = th.recipes.tuned_lens(model, [tokens], **options).losses
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = th.recipes.tuned_lens(model, [tokens], **options).losses
    assert expected[-1] < 0.5 * expected[0]
    assert found[-1] == pytest.approx(expected[-1], rel=0.1)
