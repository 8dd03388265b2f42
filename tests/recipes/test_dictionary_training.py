"""Dictionaries trained on stores: planted features, stops, and the texts of features."""

import json
import random

import pytest
import torch
from safetensors.torch import load_file, save
from torch import nn

import tenterhook as th
from tenterhook.recipes import dictionary_training

SIZE, COUNT = 32, 64


def planted(rows=20000, seed=0):
    """Return directions in superposition, and rows that are sums of a few of them."""
    generator = torch.Generator().manual_seed(seed)
    directions = nn.functional.normalize(torch.randn(COUNT, SIZE, generator=generator), dim=1)
    active = (torch.rand(rows, COUNT, generator=generator) < 0.05).float()
    return directions, (active * (0.5 + torch.rand(rows, COUNT, generator=generator))) @ directions + 0.1


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    th.harvest(nn.Identity(), planted()[1], ":return", to=folder, batch_size=5000, progress=False)
    return th.open(folder)


def train(store, **options):
    given = {"width": COUNT, "k": 3, "steps": 20, "batch_size": 256, "progress": False}
    return th.recipes.dictionary(store, ":return", **(given | options))


def agreement(found):
    """Return the mean over the planted directions of the largest cosine with a direction of the dictionary."""
    rows = nn.functional.normalize(found.dictionary.W_dec, dim=1)
    return float((planted()[0] @ rows.T).amax(1).mean())


def test_planted_features_in_superposition_are_recovered(store):
    found = train(store, steps=1000)
    assert agreement(found) > 0.95
    assert found.explained > 0.75
    assert found.dead == 0
    assert 2 < found.l0 <= 3


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["batchtopk", "jumprelu", "relu"])
def test_planted_features_are_recovered_by_every_kind(store, kind):
    found = train(store, steps=1500, batch_size=512, kind=kind)
    assert agreement(found) > 0.95
    assert found.explained > 0.85
    assert kind == "relu" or 2.5 < found.l0 < 5


@pytest.mark.parametrize("kind", ["topk", "batchtopk", "jumprelu", "relu"])
def test_the_scale_is_part_of_the_weights(store, kind):
    found = train(store, kind=kind, steps=60)
    rows = store[":return"][:4000]
    latents = found.dictionary.encode(rows)
    error = rows - found.dictionary.decode(latents)
    explained = 1 - error.square().sum() / (rows - rows.mean(0)).square().sum()
    assert float(explained) == pytest.approx(found.explained, abs=0.12)
    assert torch.allclose(found.dictionary.W_dec.norm(dim=1), torch.ones(COUNT), atol=1e-5)
    assert not found.dictionary.training


def test_a_training_continues_where_it_stopped_with_the_same_result(store, tmp_path, monkeypatch):
    expected = train(store, steps=40)
    options = {"steps": 40, "to": tmp_path / "sae", "save_every": 15}
    kept = []
    whole = dictionary_training.measure

    def stopping(*args):
        kept.append(args)
        if len(kept) == 25:
            raise KeyboardInterrupt
        return whole(*args)

    monkeypatch.setattr(dictionary_training, "measure", stopping)
    with pytest.raises(KeyboardInterrupt):
        train(store, **options)
    monkeypatch.setattr(dictionary_training, "measure", whole)
    found = train(store, **options)
    assert torch.equal(found.dictionary.W_dec, expected.dictionary.W_dec)
    assert found.history[-1] == expected.history[-1]
    again = train(store, **options)  # Nothing is left to do.
    assert torch.equal(again.dictionary.W_enc, expected.dictionary.W_enc)
    loaded = th.load_dictionary(tmp_path / "sae")
    assert torch.equal(loaded.W_enc, expected.dictionary.W_enc)
    with pytest.raises(th.RecipeError, match="only the same call can continue it: it has k=3"):
        train(store, **options, k=4)
    (tmp_path / "sae" / "training.json").write_text("{")
    with pytest.raises(th.RecipeError, match="holds a damaged training"):
        train(store, **options)


@pytest.mark.parametrize("seed", range(8))
def test_a_training_that_is_stopped_again_and_again_has_the_same_result(seed, tmp_path, monkeypatch):
    rng = random.Random(seed)
    rows = torch.randn(rng.choice([130, 500]), 8, generator=torch.Generator().manual_seed(seed))
    th.harvest(nn.Identity(), rows, ":return", to=tmp_path / "rows", batch_size=77, progress=False)
    store, steps = th.open(tmp_path / "rows"), rng.randint(5, 60)
    options = {
        "kind": rng.choice(["topk", "batchtopk", "relu", "jumprelu"]), "batch_size": rng.choice([32, 100]),
        "seed": seed, "width": rng.choice([4, 40]), "steps": steps,
    }  # fmt: skip
    expected = train(store, **options)
    stopped_at(monkeypatch, [rng.randint(1, steps) for _ in range(6)])
    for _ in range(7):
        try:
            found = train(store, **options, to=tmp_path / "sae", save_every=rng.randint(1, 9))
        except KeyboardInterrupt:
            continue
    for name, tensor in expected.dictionary.state_dict().items():
        assert torch.equal(found.dictionary.state_dict()[name], tensor)
    assert found.history == expected.history


def stopped_at(monkeypatch, steps):
    """Interrupt each of the next trainings at one of its steps."""
    whole = dictionary_training.measure
    left = iter([*steps, 0])
    waiting = [next(left)]

    def stopping(*args):
        waiting[0] -= 1
        if waiting[0] == 0:
            waiting[0] = next(left)
            raise KeyboardInterrupt
        return whole(*args)

    monkeypatch.setattr(dictionary_training, "measure", stopping)


def test_a_training_continues_only_on_the_same_rows(store, tmp_path, monkeypatch):
    other = tmp_path / "rows"
    th.harvest(nn.Identity(), planted(seed=1)[1], ":return", to=other, batch_size=5000, progress=False)
    stopped_at(monkeypatch, [12])
    with pytest.raises(KeyboardInterrupt):
        train(store, to=tmp_path / "sae", save_every=5)
    with pytest.raises(th.RecipeError, match="other rows than those of this store"):
        train(th.open(other), to=tmp_path / "sae", save_every=5)


def test_every_damage_of_a_state_is_an_error(store, tmp_path):
    train(store, to=tmp_path)
    state, file = json.loads((tmp_path / "training.json").read_text()), tmp_path / "20-training.safetensors"
    content, tensors = file.read_bytes(), load_file(file)
    texts = ["", "[]", "{}", *(json.dumps(state | {name: "?"}) for name in state)]
    texts += [json.dumps({name: each for name, each in state.items() if name != gone}) for gone in state]
    texts.append(json.dumps(state | {"step": -5}))
    damaged = [(text.encode(), content) for text in texts]
    whole = json.dumps(state).encode()
    for name in tensors:
        rest = {each: tensor for each, tensor in tensors.items() if each != name}
        damaged += [(whole, save(rest)), (whole, save(rest | {name: torch.zeros(3)}))]
    for text, weights in [*damaged, (whole, b"?"), (whole, content[:200])]:
        (tmp_path / "training.json").write_bytes(text)
        file.write_bytes(weights)
        with pytest.raises(th.RecipeError):
            train(store, to=tmp_path)


@pytest.mark.parametrize("kind", ["topk", "batchtopk", "jumprelu", "relu"])
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_is_named_and_not_learned(kind, number, tmp_path):
    rows = torch.randn(2000, 8, generator=torch.Generator().manual_seed(0))
    rows[777, 3] = number
    th.harvest(nn.Identity(), rows, ":return", to=tmp_path / "rows", batch_size=500, progress=False)
    with pytest.raises(th.RecipeError, match="row 777 of ':return' has NaN or infinity"):
        train(th.open(tmp_path / "rows"), kind=kind, batch_size=64, steps=100, to=tmp_path / "sae", save_every=1)
    state = next((tmp_path / "sae").glob("*-training.safetensors"), None)
    assert state is None or all(bool(tensor.isfinite().all()) for tensor in load_file(state).values())


def test_rows_of_any_size_are_learned_alike_and_zeros_are_an_error(tmp_path):
    rows, found = torch.randn(500, 8, generator=torch.Generator().manual_seed(0)), {}
    for power in (-30, 0, 30):
        folder = tmp_path / str(power)
        th.harvest(nn.Identity(), rows * 10.0**power, ":return", to=folder, batch_size=500, progress=False)
        found[power] = train(th.open(folder), batch_size=64).explained
    assert found[-30] == pytest.approx(found[0], abs=1e-4)
    assert found[30] == pytest.approx(found[0], abs=1e-4)
    th.harvest(nn.Identity(), rows * 0, ":return", to=tmp_path / "zeros", batch_size=500, progress=False)
    with pytest.raises(th.RecipeError, match="are all zero"):
        train(th.open(tmp_path / "zeros"), batch_size=64)


def test_a_loss_that_grows_without_limit_is_an_error(store):
    with pytest.raises(th.RecipeError, match="try a smaller lr="):
        train(store, kind="relu", lr=1e30, steps=100)


def test_training_draws_no_random_numbers_of_the_user(store):
    before = torch.get_rng_state()
    train(store)
    assert torch.equal(torch.get_rng_state(), before)


def test_relu_needs_no_k(store):
    assert train(store, kind="relu", width=16, k=32).dictionary.width == 16


def test_a_transcoder_is_trained_with_a_target(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 4)).eval()
    th.harvest(model, torch.randn(4000, 6), "0", "1", to=tmp_path, batch_size=1000, progress=False)
    found = th.recipes.dictionary(
        th.open(tmp_path), "0", target="1", width=48, k=12, steps=300, batch_size=256, progress=False
    )
    assert found.dictionary.out == 4
    assert found.explained > 0.6
    x = torch.randn(100, 6)
    with th.splice(model, {("0", "1"): found.dictionary}):
        assert nn.functional.mse_loss(model(x), model[1](model[0](x))) < 0.5 * model[1](model[0](x)).var()


def test_the_loss_that_a_dictionary_recovers_is_measured_by_a_splice(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
    th.harvest(model, torch.randn(4000, 6), "1", to=tmp_path, batch_size=1000, progress=False)
    found = th.recipes.dictionary(th.open(tmp_path), "1", width=32, k=6, steps=100, batch_size=256, progress=False)
    x, labels = torch.randn(200, 6), torch.randint(3, (200,))
    expected = recovered_by_hand(model, found, x, labels)

    def loss(output):
        return nn.functional.cross_entropy(output, labels)

    assert found.recovered(model, x, loss) == pytest.approx(expected, rel=1e-4)


def test_the_loss_that_a_transcoder_recovers_is_measured_at_its_output(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.Linear(6, 3)).eval()
    th.harvest(model, torch.randn(4000, 6), "1", "2", to=tmp_path, batch_size=1000, progress=False)
    found = th.recipes.dictionary(
        th.open(tmp_path), "1", target="2", width=32, k=8, steps=100, batch_size=256, progress=False
    )
    x, labels = torch.randn(200, 6), torch.randint(3, (200,))
    with torch.no_grad():
        hidden = model[1](model[0](x))
        plain, spliced, without = (
            float(nn.functional.cross_entropy(model[3](value), labels))
            for value in (model[2](hidden), found.dictionary(hidden), torch.zeros_like(hidden))
        )

    def loss(output):
        return nn.functional.cross_entropy(output, labels).item()

    assert found.recovered(model, x, loss) == pytest.approx((without - spliced) / (without - plain), rel=1e-4)
    with pytest.raises(th.RecipeError, match="is in training mode"):
        found.recovered(nn.Sequential(*model, nn.Dropout(0.5)).train(), x, loss)
    with pytest.raises(th.RecipeError, match="with and without '2'"):
        found.recovered(model, x, lambda _: 1.0)


@torch.no_grad()
def recovered_by_hand(model, found, x, labels):
    hidden = model[1](model[0](x))
    plain, spliced, without = (
        nn.functional.cross_entropy(model[2](value), labels)
        for value in (hidden, found.dictionary(hidden), torch.zeros_like(hidden))
    )
    return float((without - spliced) / (without - plain))


def test_dead_latents_come_back(store):
    found = train(store, width=256, steps=250)
    assert found.dead < 0.5


def test_the_history_is_drawn(store):
    found = train(store, steps=60)
    assert [entry["step"] for entry in found.history] == [50, 60]
    assert len(found.show().axes) == 3
    assert "explained variance" in repr(found)


# -- texts -------------------------------------------------------------------------------------------------------------


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 10)
        self.embed.weight.data = torch.eye(10)

    def forward(self, input_ids):
        return self.embed(input_ids)


@pytest.fixture
def texts(tmp_path):
    ids = torch.randint(0, 10, (20, 6), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": part} for part in ids.split(5)]
    th.harvest(Tokens(), data, "embed", to=tmp_path, rows="token", progress=False)
    return ids, th.open(tmp_path)


def words():
    """Return a dictionary with one latent for each token, and one that is never active."""
    made = th.Dictionary(10, 11)
    with torch.no_grad():
        made.W_enc.copy_(torch.eye(10, 11) * torch.arange(1, 12))
        made.b_enc.zero_()
    return made


def test_the_texts_of_a_feature_are_those_in_which_it_is_most_active(texts, tmp_path):
    ids, store = texts
    found = th.recipes.feature_texts(words(), store, "embed", top=3, around=2)
    assert found.dead == 1
    assert found.features[0].latent == 9
    seven = found[7]
    assert seven.frequency == pytest.approx((ids == 7).float().mean().item())
    assert seven.values == (8.0, 8.0, 8.0)
    for text in seven.texts:
        assert 3 <= len(text) <= 5  # Only tokens of the same sample are around it.
        assert ("7 ", 8.0) in text
        tokens = [int(token) for token, _ in text]
        assert any(tokens == row[start : start + len(tokens)].tolist() for row in ids for start in range(4))
    page = found.save(tmp_path / "page.html").read_text()
    assert "latent 7" in page
    assert "http" not in page
    assert "latents are active in none" in repr(found)


def test_tokens_are_decoded_and_escaped(texts):
    class Tokenizer:
        def decode(self, ids):
            return f"<{ids[0]}>"

    found = th.recipes.feature_texts(words(), texts[1], "embed", latents=[7], top=1, tokenizer=Tokenizer())
    assert "<7>" in dict(found[7].texts[0])
    assert "&lt;7&gt;" in found._repr_html_()


def test_the_best_rows_are_found_among_rows_that_are_not_finite(tmp_path):
    rows = torch.randn(300, 8, generator=torch.Generator().manual_seed(0))
    rows[5], rows[100, 2], rows[200, 1] = float("nan"), float("inf"), float("nan")
    th.harvest(nn.Identity(), rows, ":return", to=tmp_path, batch_size=50, progress=False)
    made = th.Dictionary(8, 12)
    found = th.recipes.feature_texts(made, th.open(tmp_path), ":return", top=2, batch_size=70)
    with torch.no_grad():
        best = made.encode(rows[rows.isfinite().all(1)]).topk(2, dim=0).values
    for latent in range(12):
        assert found[latent].values == pytest.approx(tuple(best[:, latent].tolist()), rel=1e-5)


# -- bad input ---------------------------------------------------------------------------------------------------------


def test_bad_input_is_named(store, texts):
    with pytest.raises(th.RecipeError, match=r"what th.open\(folder\) returns; got a dict"):
        train({})
    with pytest.raises(th.RecipeError, match="kind= is one of 'topk'"):
        train(store, kind="top")
    with pytest.raises(th.RecipeError, match="k=99 is more than the width, 64"):
        train(store, k=99)
    with pytest.raises(th.RecipeError, match="width= is a positive int"):
        train(store, width=0)
    for name, given in {"steps": 1.5, "save_every": 2.5, "seed": -1, "lr": -1.0, "sparsity": float("nan")}.items():
        with pytest.raises(th.RecipeError, match=f"{name}= is"):
            train(store, **{name: given})
    with pytest.raises(th.RecipeError, match="is no folder"):
        train(store, to=__file__)
    with pytest.raises(th.NotRecorded):
        th.recipes.dictionary(store, "h.6", width=8, k=2)
    with pytest.raises(th.RecipeError, match="there is no latent 99"):
        th.recipes.feature_texts(words(), texts[1], "embed", latents=[99])
    with pytest.raises(th.RecipeError, match="latent 3 is not among these"):
        th.recipes.feature_texts(words(), texts[1], "embed", latents=[2])[3]
    for name, given in {"top": 0, "around": -1, "batch_size": 0}.items():
        with pytest.raises(th.RecipeError, match=f"{name}= is an int from"):
            th.recipes.feature_texts(words(), texts[1], "embed", **{name: given})
    with pytest.raises(th.RecipeError, match="cannot encode rows of shape"):
        th.recipes.feature_texts(th.Dictionary(9, 11), texts[1], "embed")
    with pytest.raises(th.RecipeError, match=r"such as trained.dictionary; got a Linear"):
        th.recipes.feature_texts(nn.Linear(10, 11), texts[1], "embed")
