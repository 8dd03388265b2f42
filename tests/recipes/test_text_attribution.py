"""Attribution of text, beside single runs and gradients by autograd."""

import copy
from collections import UserDict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lm_toys import gpt2, llama
from transformers import BertConfig, BertForMaskedLM, T5Config, T5ForConditionalGeneration

import tenterhook as th
from tenterhook.testing import untouched

METHODS = ("ig", "gradient", "input-x-gradient", "attention-rollout", "erasure")
PROMPT, OUTPUT = [4, 9, 2, 7, 11], [3, 8, 5]


class Words:
    """A tokenizer whose tokens are the numbers in a text."""

    def __call__(self, text, add_special_tokens=True):
        ids = [int(word) for word in text.split()]
        return {"input_ids": [1, *ids] if add_special_tokens else ids}

    def decode(self, ids):
        return f"<{ids[0]}>"


@pytest.fixture(scope="module")
def model():
    return gpt2(2).double()


def score(model, ids, place, embedded=None):
    """Return the log probability of the token at a place, from the tokens before it alone."""
    table = model.get_input_embeddings().weight
    embedded = table[torch.tensor(ids[:place])] if embedded is None else embedded
    logits = model(inputs_embeds=embedded[None]).logits
    return logits[0, -1].log_softmax(-1)[ids[place]]


@pytest.mark.parametrize("place", range(3))
def test_gradients_are_those_of_the_context_alone(model, place):
    ids, end = PROMPT + OUTPUT, len(PROMPT) + place
    leaf = model.get_input_embeddings().weight[torch.tensor(ids[:end])].detach().requires_grad_()
    (slope,) = torch.autograd.grad(score(model, ids, end, leaf), leaf)
    sizes = th.recipes.text(model, None, PROMPT, OUTPUT, method="gradient").values[0]
    products = th.recipes.text(model, None, PROMPT, OUTPUT, method="input-x-gradient").values[0]
    assert torch.allclose(sizes[:end, place], slope.norm(dim=-1), atol=1e-10)
    assert torch.allclose(products[:end, place], (slope * leaf).sum(-1), atol=1e-10)
    assert not sizes[end:, place].any()


@pytest.mark.parametrize("baseline", [None, 6])
def test_integrated_gradients_add_up_to_the_change_of_the_score(model, baseline):
    found = th.recipes.text(model, None, PROMPT, OUTPUT, baseline=baseline, steps=100)
    table = model.get_input_embeddings().weight
    for place in range(3):
        end = len(PROMPT) + place
        start = torch.zeros(end, 16).double() if baseline is None else table[baseline].expand(end, -1)
        change = score(model, PROMPT + OUTPUT, end) - score(model, PROMPT + OUTPUT, end, start)
        assert torch.allclose(found.values[0][:, place].sum() - found.error[0][place], change, atol=1e-9)
        assert abs(found.error[0][place]) < 1e-4
        assert torch.allclose(found.scores[0][place], score(model, PROMPT + OUTPUT, end), atol=1e-9)


def test_erasure_is_the_change_of_the_score_without_one_token(model):
    found = th.recipes.text(model, None, PROMPT, OUTPUT, method="erasure").values[0]
    ids, table = PROMPT + OUTPUT, model.get_input_embeddings().weight
    for place, token in [(0, 2), (2, 0), (2, 6)]:
        end = len(PROMPT) + place
        without = table[torch.tensor(ids[:end])].clone()
        without[token] = 0
        change = score(model, ids, end) - score(model, ids, end, without)
        assert torch.allclose(found[token, place], change, atol=1e-9)


def test_attention_rollout_multiplies_the_patterns(model):
    found = th.recipes.text(model, None, PROMPT, OUTPUT, method="attention-rollout").values[0]
    ids = torch.tensor([PROMPT + OUTPUT])
    with th.record(model, "**@pattern") as tape:
        model(ids)
    first, second = ((tape[point].float().mean(1) + torch.eye(8)) / 2 for point in tape)
    assert torch.allclose(found[:, 1], (second @ first)[0, 5, :7], atol=1e-6)
    assert torch.allclose(found.sum(0), torch.ones(3))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("make", [gpt2, llama])
def test_a_batch_of_texts_of_other_lengths_is_that_of_single_ones(method, make):
    model = make()
    prompts, outputs = [PROMPT, [12, 13], [7, 7, 8]], [OUTPUT, [4, 4, 4, 9], [2]]
    together = th.recipes.text(model, None, prompts, outputs, method=method, steps=5)
    for place, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        alone = th.recipes.text(model, None, prompt, output, method=method, steps=5)
        assert torch.allclose(together.values[place], alone.values[0], atol=2e-5)
        assert together.matrix(place).shape == (len(prompt), len(output))


def test_text_is_tokenized_generated_and_drawn(model):
    found = th.recipes.text(model, Words(), "4 9 2", max_new_tokens=3, method="gradient")
    made = model.generate(torch.tensor([[1, 4, 9, 2]]), max_new_tokens=3, do_sample=False)[0, 4:]
    assert found.prompts == (("<1>", "<4>", "<9>", "<2>"),)
    assert found.outputs == (tuple(f"<{token}>" for token in made.tolist()),)
    given = th.recipes.text(model, Words(), "4 9 2", " ".join(map(str, made.tolist())), method="gradient")
    assert torch.equal(given.values[0], found.values[0])
    labels = [label.get_text() for label in found.show().axes[0].get_yticklabels()]
    assert labels == ["<1>", "<4>", "<9>", "<2>"]
    assert "<9>" in repr(found)
    assert "completeness error" in repr(th.recipes.text(model, None, PROMPT, OUTPUT, steps=3))


def test_frozen_parameters_make_no_difference(model):
    expected = th.recipes.text(model, None, PROMPT, OUTPUT, method="gradient").values[0]
    frozen = gpt2(2).double().requires_grad_(False)
    assert torch.allclose(th.recipes.text(frozen, None, PROMPT, OUTPUT, method="gradient").values[0], expected)


def test_bad_input_is_named(model):
    with pytest.raises(th.RecipeError, match="method= is one of 'ig'"):
        th.recipes.text(model, None, PROMPT, OUTPUT, method="shap")
    with pytest.raises(th.RecipeError, match="one output for each prompt; got 1 and 2"):
        th.recipes.text(model, None, PROMPT, [OUTPUT, OUTPUT])
    with pytest.raises(th.RecipeError, match="tokenizer"):
        th.recipes.text(model, None, "4 9")
    with pytest.raises(th.RecipeError, match="is empty"):
        th.recipes.text(model, Words(), "4 9", "")
    with pytest.raises(th.RecipeError, match="embedding of Linear is not known"):
        th.recipes.text(torch.nn.Linear(2, 2), None, PROMPT, OUTPUT)
    with pytest.raises(th.RecipeError, match="training mode"):
        th.recipes.text(gpt2(1).train(), None, PROMPT, OUTPUT)


@pytest.mark.parametrize("method", METHODS)
def test_models_that_see_later_tokens_are_refused(method):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    bert = BertForMaskedLM(BertConfig(vocab_size=20, initializer_range=0.5, **sizes)).eval()
    with pytest.raises(
        th.RecipeError, match=r"BertForMaskedLM is no causal language model .* with the tokens after it"
    ):
        th.recipes.text(bert, None, PROMPT, OUTPUT, method=method)
    t5 = T5ForConditionalGeneration(T5Config(vocab_size=20, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2))
    with pytest.raises(th.RecipeError, match="it has an encoder and a decoder"):
        th.recipes.text(t5.eval(), None, PROMPT, OUTPUT, method=method)


# -- what users give ---------------------------------------------------------------------------------------------------


class Encoding(UserDict):
    """What a tokenizer of transformers returns."""


class Padding(Words):
    """A tokenizer that pads a batch."""

    def __init__(self, side):
        self.side = side

    def batch(self, texts):
        rows = [self(text)["input_ids"] for text in texts]
        longest = max(map(len, rows))
        ids, mask = torch.zeros(2, len(rows), longest, dtype=torch.long)
        for place, row in enumerate(rows):
            part = slice(0, len(row)) if self.side == "right" else slice(longest - len(row), None)
            ids[place, part], mask[place, part] = torch.tensor(row), 1
        return Encoding(input_ids=ids, attention_mask=mask)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_batch_of_a_tokenizer_is_its_texts(model, side):
    tokenizer, texts, outputs = Padding(side), ["4 9", "2 7 11 3"], ["3 8", "5"]
    expected = th.recipes.text(model, tokenizer, texts, outputs, method="gradient")
    found = th.recipes.text(model, tokenizer, tokenizer.batch(texts), outputs, method="gradient")
    assert found.prompts == expected.prompts == (("<1>", "<4>", "<9>"), ("<1>", "<2>", "<7>", "<11>", "<3>"))
    assert all(map(torch.equal, found.values, expected.values))
    lists = {name: value.tolist() for name, value in tokenizer.batch(texts).items()}
    assert th.recipes.text(model, tokenizer, lists, outputs, method="gradient").prompts == expected.prompts
    with pytest.raises(th.RecipeError, match="has 'input_ids'; got one with 'attention_mask'"):
        th.recipes.text(model, tokenizer, {"attention_mask": torch.ones(1, 2)}, outputs)


def test_each_text_may_be_an_encoding_of_its_own(model):
    texts, outputs = ["4 9", "2 7 11 3"], ["3 8", "5"]
    expected = th.recipes.text(model, Words(), texts, outputs, method="gradient")
    found = th.recipes.text(model, Words(), [Words()(text) for text in texts], np.array(outputs), method="gradient")
    assert (found.prompts, found.outputs) == (expected.prompts, expected.outputs)
    assert all(map(torch.equal, found.values, expected.values))


FORMS = {
    "array": np.array,
    "list of numpy integers": lambda ids: list(np.array(ids)),
    "list of tensors": lambda ids: list(torch.tensor(ids)),
    "tuple": tuple,
    "matrix of one row": lambda ids: torch.tensor([ids]),
    "list of lists": lambda ids: [ids],
}


@pytest.mark.parametrize("form", FORMS)
def test_token_ids_may_have_any_form(model, form):
    expected = th.recipes.text(model, None, PROMPT, OUTPUT, method="gradient")
    found = th.recipes.text(model, None, FORMS[form](PROMPT), FORMS[form](OUTPUT), method="gradient")
    assert found.prompts == expected.prompts
    assert torch.equal(found.values[0], expected.values[0])


class Recurrent(torch.nn.Module):
    """A causal language model that is no transformer, with arguments and outputs of its own."""

    def __init__(self, *, plain):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.rnn = torch.nn.Embedding(20, 8), torch.nn.GRU(8, 8, batch_first=True)
        self.head, self.plain = torch.nn.Linear(8, 20), plain

    def get_input_embeddings(self):
        return self.embed

    def forward(self, tokens):
        logits = self.head(self.rnn(self.embed(tokens))[0])
        return logits if self.plain else SimpleNamespace(logits=logits)


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("method", ["ig", "erasure"])
def test_any_causal_model_can_be_attributed(method, plain):
    model = Recurrent(plain=plain).eval()
    found = th.recipes.text(model, None, [PROMPT, [3, 4]], [OUTPUT, [7]], method=method, steps=100)
    assert [tuple(each.shape) for each in found.values] == [(7, 3), (2, 1)]
    if method == "ig":
        assert max(float(each.abs().max()) for each in found.error) < 1e-5
        return
    ids = torch.tensor([PROMPT + OUTPUT[:1]])
    embedded = model.embed(ids).detach()
    embedded[0, 1] = 0
    without = model.head(model.rnn(embedded)[0])[0, -1].log_softmax(-1)[OUTPUT[1]]
    torch.testing.assert_close(found.values[0][1, 1], found.scores[0][1] - without)


@pytest.mark.parametrize("method", METHODS)
def test_it_works_in_inference_mode(method):
    model = gpt2(2)
    expected = th.recipes.text(model, None, PROMPT, OUTPUT, method=method, steps=4)
    with untouched(model), torch.inference_mode():
        found = th.recipes.text(model, None, torch.tensor(PROMPT), torch.tensor(OUTPUT), method=method, steps=4)
    assert torch.equal(found.values[0], expected.values[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("make", [gpt2, llama])
def test_half_precision_is_that_of_the_model_and_not_of_the_sums(make, dtype):
    model = make().to(dtype)
    wide = copy.deepcopy(model).double()
    found, expected = (th.recipes.text(each, None, PROMPT, OUTPUT, steps=30, baseline=6) for each in (model, wide))
    logits = model(torch.tensor([PROMPT + OUTPUT])).logits[0].double().log_softmax(-1)
    by_hand = logits[torch.arange(4, 7), torch.tensor(OUTPUT)]
    torch.testing.assert_close(found.scores[0].double(), by_hand, atol=1e-5, rtol=0)  # The log is not rounded again.
    gap = (found.values[0] - expected.values[0]).abs().max() / expected.values[0].abs().max()
    assert gap < (0.05 if dtype == torch.bfloat16 else 0.01)
    assert float((found.error[0] - expected.error[0]).abs().max()) < (0.05 if dtype == torch.bfloat16 else 0.01)


class Backwards(torch.nn.ModuleList):
    """Layers that run in the order opposite to that in which they were registered."""

    def __iter__(self):
        return iter(list(self._modules.values())[::-1])

    def __getitem__(self, place):
        return list(self._modules.values())[::-1][place]


def test_rollout_multiplies_layers_in_the_order_in_which_they_run():
    model = gpt2(3)
    expected = th.recipes.text(model, None, PROMPT, OUTPUT, method="attention-rollout").values[0]
    other = gpt2(3)
    other.transformer.h = Backwards(list(other.transformer.h)[::-1])
    found = th.recipes.text(other, None, PROMPT, OUTPUT, method="attention-rollout").values[0]
    assert torch.allclose(found, expected, atol=1e-6)


def test_rollout_multiplies_each_call_of_shared_layers():
    """Layers A, B, A, B are those of a model with four layers of its own."""
    shared, plain = gpt2(4), gpt2(4)
    for place in (2, 3):
        plain.transformer.h[place].load_state_dict(plain.transformer.h[place - 2].state_dict())
        shared.transformer.h[place] = shared.transformer.h[place - 2]
    found, expected = (
        th.recipes.text(each, None, PROMPT, OUTPUT, method="attention-rollout").values[0] for each in (shared, plain)
    )
    assert torch.allclose(found, expected, atol=1e-6)


def test_random_numbers_in_training_mode_are_refused():
    model = gpt2(1).train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.eval()  # What is left is the dropout that the attention calls as a function.
    state = torch.get_rng_state()
    with pytest.raises(th.RecipeError, match="its run uses random numbers"):
        th.recipes.text(model, None, PROMPT, OUTPUT)
    assert torch.equal(torch.get_rng_state(), state)
    quiet = llama().train()
    assert th.recipes.text(quiet, None, PROMPT, OUTPUT, method="gradient").values[0].any()
    assert quiet.training


def test_bad_tokens_and_options_are_named(model):
    for prompt, output, options, text in [
        ([400], OUTPUT, {}, "there is no token 400: the vocabulary has 0 to 49"),
        (PROMPT, [-1], {}, "there is no token -1"),
        (PROMPT, OUTPUT, {"baseline": 99}, "there is no token 99"),
        (PROMPT, OUTPUT, {"baseline": 1.5}, "baseline= is a token id"),
        (torch.tensor(PROMPT).float(), OUTPUT, {}, "token ids are integers"),
        (7, OUTPUT, {}, "token ids are integers"),
        (PROMPT, OUTPUT, {"batch": 0}, "batch= is a positive integer"),
        (PROMPT, None, {"max_new_tokens": 0}, "max_new_tokens= is a positive integer"),
    ]:
        with pytest.raises(th.RecipeError, match=text):
            th.recipes.text(model, None, prompt, output, **options)
    with pytest.raises(th.RecipeError, match="Recurrent has no attention patterns that are known"):
        th.recipes.text(Recurrent(plain=True).eval(), None, PROMPT, OUTPUT, method="attention-rollout")
