"""Aliases over many families of transformers, looked at in a run; pipelines; generation."""

import pytest
import torch
import transformers as hf
from torch import nn

import tenterhook as th
from tenterhook.integrations.transformers import aliases, generate, model_of
from tenterhook.testing import untouched

SMALL = {
    "num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "vocab_size": 50,
    "max_position_embeddings": 64, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
GROUPED = SMALL | {"num_key_value_heads": 1}
GPT = {"n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": 50, "n_positions": 64, "pad_token_id": 0}
T5 = {"num_layers": 2, "d_model": 16, "d_ff": 32, "d_kv": 8, "num_heads": 2, "vocab_size": 50}

CAUSAL = {
    "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**GPT)),
    "gptj": lambda: hf.GPTJForCausalLM(hf.GPTJConfig(**GPT, rotary_dim=4)),
    "gpt_neo": lambda: hf.GPTNeoForCausalLM(
        hf.GPTNeoConfig(
            num_layers=2,
            hidden_size=16,
            num_heads=2,
            attention_types=[[["global"], 2]],
            vocab_size=50,
            max_position_embeddings=64,
        )
    ),
    "gpt_neox": lambda: hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**SMALL)),
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED)),
    "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**GROUPED)),
    "qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**GROUPED)),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**GROUPED, head_dim=8)),
    "gemma": lambda: hf.GemmaForCausalLM(hf.GemmaConfig(**GROUPED, head_dim=8)),
    "gemma2": lambda: hf.Gemma2ForCausalLM(hf.Gemma2Config(**GROUPED, head_dim=8)),
    "phi": lambda: hf.PhiForCausalLM(hf.PhiConfig(**SMALL)),
    "opt": lambda: hf.OPTForCausalLM(
        hf.OPTConfig(
            num_hidden_layers=2,
            hidden_size=16,
            ffn_dim=32,
            num_attention_heads=2,
            vocab_size=50,
            max_position_embeddings=64,
            word_embed_proj_dim=16,
            pad_token_id=0,
        )
    ),
    "bloom": lambda: hf.BloomForCausalLM(hf.BloomConfig(n_layer=2, hidden_size=16, n_head=2, vocab_size=50)),
    "falcon": lambda: hf.FalconForCausalLM(
        hf.FalconConfig(num_hidden_layers=2, hidden_size=16, num_attention_heads=2, vocab_size=50)
    ),
    "stablelm": lambda: hf.StableLmForCausalLM(hf.StableLmConfig(**GROUPED)),
    "mixtral": lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**GROUPED, num_local_experts=2)),
}
ENCODERS = {
    "bert": lambda: hf.BertForMaskedLM(hf.BertConfig(**SMALL)),
    "roberta": lambda: hf.RobertaModel(hf.RobertaConfig(**SMALL)),
    "distilbert": lambda: hf.DistilBertModel(
        hf.DistilBertConfig(n_layers=2, dim=16, hidden_dim=32, n_heads=2, vocab_size=50)
    ),
}
IDS = torch.randint(1, 50, (2, 5), generator=torch.Generator().manual_seed(0))


def built(build):
    torch.manual_seed(0)
    return build().eval()


def only(value):
    return value[0] if isinstance(value, tuple) else value


@pytest.mark.parametrize("family", [*CAUSAL, *ENCODERS])
def test_the_aliases_name_what_they_say(family):
    model = built((CAUSAL | ENCODERS)[family])
    names = aliases(model)
    assert len(names.layers) == len(names.attn) == len(names.mlp) == 2
    assert len(names.resid) == 3
    points = [*names.layers, *names.attn, *names.mlp, *names.resid]
    with untouched(model), th.record(model, *dict.fromkeys(points)) as tape, torch.no_grad():
        model(IDS)
    width = 16
    for point in points:
        assert only(tape[point]).reshape(2, 5, -1).shape[-1] == width, point
    # The stream before a layer is what the layer before gave.
    for place in (1, 2):
        assert torch.equal(only(tape[names.resid[place]]), only(tape[names.layers[place - 1]]))
    assert names.family == model.config.model_type
    assert model.get_submodule(names.embed) is model.get_input_embeddings()


# Where a layer adds what attention and MLP write to its input and nothing else, that is what the aliases must show.
ADDITIVE = ["gpt2", "gptj", "gpt_neo", "gpt_neox", "llama", "mistral", "qwen2", "qwen3", "gemma", "phi", "stablelm"]


@pytest.mark.parametrize("family", [*ADDITIVE, "opt", "mixtral"])
def test_a_layer_adds_what_attention_and_mlp_write(family):
    model = built(CAUSAL[family])
    names = aliases(model)
    with th.record(model, *names.layers, *names.attn, *names.mlp, *names.resid[:2]) as tape, torch.no_grad():
        model(IDS)
    for layer in range(2):
        parts = [only(tape[each[layer]]).reshape(2, 5, 16) for each in (names.resid, names.attn, names.mlp)]
        torch.testing.assert_close(sum(parts), only(tape[names.layers[layer]]), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("family", ["gpt2", "llama", "gpt_neox", "gemma", "phi"])
def test_norm_and_head_read_the_stream(family):
    model = built(CAUSAL[family])
    names = aliases(model)
    found = th.recipes.logit_lens(model, IDS, points=list(names.layers), norm=names.norm, head=names.head)
    torch.testing.assert_close(found.logits[-1], model(IDS).logits.detach())


def test_an_encoder_decoder_asks_which():
    model = built(lambda: hf.T5ForConditionalGeneration(hf.T5Config(**T5)))
    with pytest.raises(th.UnsupportedModel, match=r"the stacks encoder.block, decoder.block. Choose one"):
        aliases(model)
    names = aliases(model, part="encoder")
    assert names.attn == ("encoder.block.0.layer.0.SelfAttention", "encoder.block.1.layer.0.SelfAttention")
    assert names.mlp[0] == "encoder.block.0.layer.1.DenseReluDense"
    assert names.norm == "encoder.final_layer_norm"


def test_an_alias_by_its_name():
    names = aliases(built(CAUSAL["llama"]))
    assert names["attn"] == names.attn
    assert names["attn.1"] == "model.layers.1.self_attn"
    assert names["norm"] == "model.norm"
    with pytest.raises(th.AddressError, match=r"attn.0 to attn.1"):
        names["attn.2"]
    with pytest.raises(th.AddressError, match=r"'atn' is not an alias. The aliases are layers, attn"):
        names["atn"]
    with pytest.raises(th.AddressError, match="only one, without a number"):
        names["norm.1"]


def test_what_has_no_aliases_is_reported():
    with pytest.raises(th.UnsupportedModel, match="no transformers config"):
        aliases(nn.Linear(2, 2))
    with pytest.raises(th.UnsupportedModel, match="a model or a pipeline is needed; got a int"):
        aliases(3)
    model = built(CAUSAL["gpt2"])
    for block in model.transformer.h:
        block.perceptron = block.mlp
        del block.mlp
    with pytest.raises(th.UnsupportedModel, match="GPT2Block has no mlp under a known name; it has ln_1, attn"):
        aliases(model)


def test_generation_is_recorded_step_by_step():
    model = built(CAUSAL["llama"])
    names = aliases(model)
    plain = model.generate(IDS, max_new_tokens=6, do_sample=False)
    with untouched(model):
        found = generate(model, {"input_ids": IDS}, *names.layers, keep="all", max_new_tokens=6, do_sample=False)
    assert torch.equal(found.tokens, plain)
    assert len(found.tape.calls(names.layers[1])) == 6
    with th.record(model, names.layers[1]) as whole, torch.no_grad():
        model(plain[:, :-1])
    torch.testing.assert_close(found.joined(names.layers[1]), whole[names.layers[1]], atol=1e-5, rtol=1e-4)


def test_keep_bounds_what_generation_holds():
    model = built(CAUSAL["gpt2"])
    found = generate(model, IDS, "transformer.h.0", keep=2, max_new_tokens=9, do_sample=False)
    assert list(found.tape) == ["transformer.h.0#7", "transformer.h.0#8"]
    assert found.joined("transformer.h.0").shape == (2, 2, 16)
    with pytest.raises(th.UnsupportedModel, match="cannot generate"):
        generate(built(ENCODERS["roberta"]).embeddings, IDS)


def test_a_pipeline_is_its_model(tmp_path):
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "good", "bad", "film"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    tokenizer = hf.BertTokenizer(str(tmp_path / "vocab.txt"))
    config = hf.BertConfig(**{**SMALL, "vocab_size": len(words)}, num_labels=2)
    torch.manual_seed(0)
    model = hf.BertForSequenceClassification(config).eval()
    pipe = hf.pipeline("text-classification", model=model, tokenizer=tokenizer, device="cpu")
    names = aliases(pipe)
    assert model_of(pipe) is pipe.model
    with untouched(pipe.model), th.record(pipe.model, *names.attn) as tape:
        (plain,) = pipe("good film")
    assert tape[names.attn[0]].shape == (1, 4, 16)
    with th.edit(pipe.model, {names.mlp[1]: lambda v: v + torch.randn(16, generator=torch.Generator().manual_seed(1))}):
        (edited,) = pipe("good film")
    assert plain["score"] != edited["score"]


def test_a_model_from_a_directory(tmp_path):
    model = built(CAUSAL["gpt2"])
    model.save_pretrained(tmp_path)
    again = hf.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert aliases(again) == aliases(model)
    positive, negative = IDS, IDS.flip(1)
    found = th.recipes.steering(again, positive, negative, point=aliases(again).resid[1], at=th.at[:, -1])
    with found.apply(again, 3, point=aliases(again).layers[1]):
        again.generate(IDS, max_new_tokens=3, do_sample=False)
