"""The gradient of every example, compared with a loop over the examples."""

import lm_toys
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import BertConfig, BertForSequenceClassification

import tenterhook as th
from tenterhook.testing import untouched


def loop(model, inputs, loss):
    """The truth: one backward pass for each example."""
    count = len(next(iter(inputs.values())) if isinstance(inputs, dict) else inputs)
    found = {}
    for place in range(count):
        one = slice(place, place + 1)
        given = {key: value[one] for key, value in inputs.items()} if isinstance(inputs, dict) else inputs[one]
        model.zero_grad(set_to_none=True)
        output = model(**given) if isinstance(inputs, dict) else model(given)
        loss(output, one).sum().backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                found.setdefault(name, torch.zeros(count, *parameter.shape))[place] = parameter.grad
    model.zero_grad(set_to_none=True)
    return found


def agrees(model, inputs, loss, **tolerance):
    truth = loop(model, inputs, loss)
    with untouched(model):
        found = th.recipes.per_sample_gradients(model, inputs, lambda out: loss(out, slice(None)))
    assert found.grads.keys() == truth.keys()
    for name, value in found.grads.items():
        torch.testing.assert_close(value, truth[name], msg=lambda text, name=name: f"{name}: {text}", **tolerance)
    squares = sum(value.flatten(1).square().sum(1) for value in truth.values())
    torch.testing.assert_close(found.norms.float(), squares.sqrt(), rtol=1e-4, atol=1e-5)
    return found


LABELS = torch.tensor([0, 1, 2, 0, 1])
scores_loss = lambda out, rows: F.cross_entropy(out, LABELS[rows], reduction="none")


def test_a_convolutional_net_with_every_kind_of_layer():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, stride=2), nn.GroupNorm(2, 4), nn.ReLU(inplace=True),
        nn.Conv2d(4, 4, 3, groups=2, dilation=2, padding=2), nn.BatchNorm2d(4), nn.Flatten(2), nn.Linear(16, 3),
        nn.LayerNorm(3), nn.RMSNorm(3), nn.Conv1d(4, 2, 2), nn.Flatten(), nn.Linear(4, 3, bias=False), nn.PReLU(),
    ).eval()  # fmt: skip
    nn.init.normal_(model[4].running_mean)
    agrees(model, torch.randn(5, 2, 8, 8), scores_loss)


class Reused(nn.Module):
    """One layer called three times, once in vain, and a weight that two layers share."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.out, self.tied = nn.Linear(4, 4), nn.Linear(4, 3), nn.Linear(4, 3)
        self.tied.weight = self.out.weight
        self.unused = nn.Linear(2, 2)

    def forward(self, x):
        self.layer(x)
        h = torch.tanh(self.layer(torch.tanh(self.layer(x))))
        return self.out(h) + self.tied(h * 2)


def test_layers_called_several_times_and_weights_that_are_shared():
    found = agrees(Reused(), torch.randn(5, 4), scores_loss)
    assert "unused.weight" not in found.grads
    assert "tied.weight" not in found.grads


def lm_loss(out, rows):
    return out.logits[:, -1].log_softmax(-1)[:, 7]


@pytest.mark.parametrize("build", [lm_toys.gpt2, lm_toys.llama, lm_toys.neox])
def test_language_models_with_positions_that_the_examples_share(build):
    agrees(build(), {"input_ids": lm_toys.ids(0, 4, 5)}, lm_loss, atol=1e-5, rtol=1e-3)


def test_an_encoder_with_a_mask():
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=30, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, num_labels=3
    )
    model = BertForSequenceClassification(config).eval()
    ids = lm_toys.ids(0, 5, 6) % 30
    mask = torch.ones_like(ids)
    mask[:2, 4:] = 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    agrees(model, inputs, lambda out, rows: scores_loss(out.logits, rows), atol=1e-5, rtol=1e-3)


class Token(nn.Module):
    """A parameter of the model itself."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.token, self.out = nn.Parameter(torch.randn(1, 4)), nn.Linear(4, 3)

    def forward(self, x):
        return self.out(torch.tanh(x + self.token))


def test_a_parameter_of_the_model_itself():
    agrees(Token(), torch.randn(5, 4), scores_loss)


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.out = nn.Parameter(torch.ones(4)), nn.Linear(4, 3)

    def forward(self, x, mask=None):
        x = x * self.scale
        return self.out(x if mask is None else x * mask)


def test_what_cannot_be_distinguished_is_refused_not_guessed():
    model, x = Masked(), torch.randn(5, 4)
    agrees(model, x, scores_loss)
    with pytest.raises(th.RecipeError, match=r"'' \(Masked\) has its own parameters"):
        th.recipes.per_sample_gradients(model, (x, torch.rand(5, 4)), lambda out: scores_loss(out, slice(None)))
    model.scale.requires_grad_(requires_grad=False)
    found = th.recipes.per_sample_gradients(model, (x, torch.rand(5, 4)), lambda out: scores_loss(out, slice(None)))
    assert list(found.grads) == ["out.weight", "out.bias"]
    mixing = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    with pytest.raises(th.RecipeError, match=r"'1' \(BatchNorm1d\) mixes the examples.*eval"):
        th.recipes.per_sample_gradients(mixing, x, lambda out: out.sum(1))
    with pytest.raises(th.RecipeError, match=r"one number for each example, \[5\], .*got \[\]"):
        th.recipes.per_sample_gradients(Token(), x, lambda out: out.sum())
    with pytest.raises(th.RecipeError, match="no parameter that requires a gradient"):
        th.recipes.per_sample_gradients(nn.ReLU(), x, lambda out: out.sum(1))


def test_it_prints_and_draws_itself():
    found = th.recipes.per_sample_gradients(Token(), torch.randn(5, 4), lambda out: out.sum(1))
    assert repr(found).startswith("gradients of 5 examples, 3 parameters each")
    assert len(found.show().axes) == 1


# -- attention and recurrent layers, which are run again ---------------------------------------------------------------


class Recurrent(nn.Module):
    """A recurrent layer between two linear ones; the examples are in front, outside of it at least."""

    def __init__(self, kind, *, batch_first, start=False, **options):
        super().__init__()
        ways = 2 if options.get("bidirectional") else 1
        self.inner = kind(6, 5, batch_first=batch_first, **options)
        self.before, self.head = nn.Linear(4, 6), nn.Linear(5 * ways, 3)
        self.start = nn.Linear(4, 5) if start else None

    def forward(self, x):
        y = self.before(x)
        y = y if self.inner.batch_first else y.transpose(0, 1)
        start = None if self.start is None else self.start(x[:, 0])[None]
        state = (start, start * 2) if start is not None and isinstance(self.inner, nn.LSTM) else start
        y, state = self.inner(y, state)
        last = state[0] if isinstance(state, tuple) else state
        y = y if self.inner.batch_first else y.transpose(0, 1)
        return self.head(y).mean(1) + last[-1, :, :3]


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (nn.LSTM, {}),
        (nn.LSTM, {"num_layers": 2, "bidirectional": True}),
        (nn.LSTM, {"start": True}),
        (nn.GRU, {"num_layers": 2}),
        (nn.GRU, {"start": True, "bias": False}),
        (nn.RNN, {"bidirectional": True}),
    ],
)
def test_recurrent_layers(kind, options, batch_first):
    torch.manual_seed(0)
    model = Recurrent(kind, batch_first=batch_first, **options)
    labels = torch.tensor([0, 2, 1, 1])
    agrees(model, torch.randn(4, 7, 4), lambda out, rows: F.cross_entropy(out, labels[rows], reduction="none"))


class Attends(nn.Module):
    """Attention from one input to another, with masks, twice by the same layer."""

    def __init__(self, *, batch_first, mask, **options):
        super().__init__()
        self.inner, self.mask = nn.MultiheadAttention(8, 2, batch_first=batch_first, **options), mask

    def forward(self, x):
        turned = x if self.inner.batch_first else x.transpose(0, 1)
        other = turned * 2 if self.inner.kdim == 8 else turned[..., :6]
        masks = {}
        if self.mask == "padding":
            masks["key_padding_mask"] = x[:, :, 0] > 1.5
        if self.mask == "causal":
            masks |= {"attn_mask": nn.Transformer.generate_square_subsequent_mask(x.shape[1]), "is_causal": True}
        if self.mask == "each":
            near = (x @ x.mT).repeat_interleave(2, 0)
            masks["attn_mask"] = near - near.diagonal(dim1=1, dim2=2)[..., None]
        y, weights = self.inner(turned, other, other, need_weights=self.mask != "causal", **masks)
        y, _ = self.inner(y, other, other)
        y = y if self.inner.batch_first else y.transpose(0, 1)
        return y.square().mean((1, 2)) + (0 if weights is None else weights.square().sum((1, 2)))


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("mask", ["none", "padding", "causal", "each"])
@pytest.mark.parametrize("options", [{}, {"kdim": 6, "vdim": 6, "add_bias_kv": True}], ids=["self", "cross"])
def test_attention_layers(mask, options, batch_first):
    torch.manual_seed(0)
    model = Attends(batch_first=batch_first, mask=mask, **options)
    found = agrees(model, torch.randn(3, 5, 8), lambda out, _rows: out)
    assert found.grads["inner.out_proj.weight"].shape == (3, 8, 8)


@pytest.mark.parametrize("train", [True, False], ids=["training", "evaluation"])
def test_a_transformer_of_pytorchs_own(train):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = nn.Sequential(nn.Linear(4, 8), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)).train(train)
    agrees(model, torch.randn(3, 5, 4), lambda out, _rows: out.square().mean((1, 2)))


def test_frozen_parts_of_such_layers_have_no_gradient():
    torch.manual_seed(0)
    model = Attends(batch_first=True, mask="none")
    model.inner.out_proj.requires_grad_(False)
    found = agrees(model, torch.randn(3, 5, 8), lambda out, _rows: out)
    assert sorted(found.grads) == ["inner.in_proj_bias", "inner.in_proj_weight"]


def test_such_layers_refuse_what_cannot_be_distinguished():
    ask = th.recipes.per_sample_gradients
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.5, batch_first=True)
    with pytest.raises(th.RecipeError, match=r"'self_attn' \(MultiheadAttention\).*it uses random numbers"):
        ask(layer, torch.randn(3, 5, 8), lambda out: out.mean((1, 2)))

    class Packs(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.GRU(4, 3, batch_first=True)

        def forward(self, x):
            packed = nn.utils.rnn.pack_padded_sequence(x, [3, 2, 1], batch_first=True)
            return self.inner(packed)[1][-1].sum(1)

    with pytest.raises(th.RecipeError, match="'inner' has a PackedSequence as input; pass a padded tensor"):
        ask(Packs(), torch.randn(3, 5, 4), lambda out: out)
    wrong = Recurrent(nn.GRU, batch_first=True)
    wrong.inner.batch_first = False
    wrong.forward = lambda x: wrong.inner(wrong.before(x))[0].sum((1, 2))
    with pytest.raises(th.RecipeError, match="dimension 1 must be the 3 examples"):
        ask(wrong, torch.randn(3, 5, 4), lambda out: out)
