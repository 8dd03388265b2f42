"""Dictionaries trained on stores: planted features, stops, and the texts of features."""

import pytest
import torch
from torch import nn

import tenterhook as th

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
    from tenterhook.recipes import dictionary_training

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
    with pytest.raises(th.NotRecorded):
        th.recipes.dictionary(store, "h.6", width=8, k=2)
    with pytest.raises(th.RecipeError, match="there is no latent 99"):
        th.recipes.feature_texts(words(), texts[1], "embed", latents=[99])
    with pytest.raises(th.RecipeError, match="latent 3 is not among these"):
        th.recipes.feature_texts(words(), texts[1], "embed", latents=[2])[3]
