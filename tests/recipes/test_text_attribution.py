"""Attribution of text, beside single runs and gradients by autograd."""

import pytest
import torch
from lm_toys import gpt2, llama
from transformers import BertConfig, BertForMaskedLM, T5Config, T5ForConditionalGeneration

import tenterhook as th

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
