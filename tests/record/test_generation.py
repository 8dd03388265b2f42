"""Steps of generate, joined to sequences."""

import pytest
import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

import tenterhook as th


def gpt2():
    torch.manual_seed(0)
    config = GPT2Config(n_layer=3, n_head=2, n_embd=16, vocab_size=40, n_positions=64)
    config.pad_token_id, config.bos_token_id, config.eos_token_id = 0, 1, 2
    return GPT2LMHeadModel(config).eval().double(), "transformer.h.1"


def llama():
    torch.manual_seed(0)
    config = LlamaConfig(
        num_hidden_layers=3, hidden_size=16, num_attention_heads=4, num_key_value_heads=2, intermediate_size=32,
        vocab_size=40, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval().double(), "model.layers.1"


def prompts(seed=0):
    """A batch of two prompts, the first of which is padded on the left."""
    ids = torch.randint(3, 40, (2, 6), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    ids[0, :2], mask[0, :2] = 0, 0
    return ids, mask


def whole(model, point, tokens, mask):
    """Record one forward pass over prompt and generated tokens."""
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad(), th.record(model, point) as tape:
        model(tokens, attention_mask=mask, position_ids=positions)
    return tape[point]


@pytest.mark.parametrize("make", [gpt2, llama])
@pytest.mark.parametrize("how", [{}, {"use_cache": False}, {"cache_implementation": "static"}, {"do_sample": True}])
def test_a_sequence_is_what_one_forward_pass_gives(make, how):
    model, point = make()
    ids, mask = prompts()
    with th.record(model, point) as tape:
        output = model.generate(ids, attention_mask=mask, max_new_tokens=8, **{"do_sample": False, **how})
    joined = tape.sequence(point)
    assert torch.equal(tape.tokens, output[:, :-1])
    full = torch.cat([mask, torch.ones_like(output[:, 6:-1])], 1)
    expected = whole(model, point, tape.tokens, full)
    assert joined.shape == expected.shape
    assert (joined - expected)[tape.mask].abs().max() < 1e-9
    assert not tape.mask[0, :2].any()


def test_the_mask_ends_where_a_sequence_ends():
    model, point = gpt2()
    ids, mask = prompts()
    plain = model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False)
    end = int(plain[0, 8])  # The first row ends here, and is padded from there on.
    with th.record(model, point) as tape:
        output = model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False, eos_token_id=end)
    first = (output[0, 6:] == end).nonzero()[0, 0].item() + 6
    expected = [0, 0] + [1] * (first - 1) + [0] * (tape.tokens.shape[1] - first - 1)
    assert tape.mask[0].int().tolist() == expected


def test_several_generations_on_one_tape_and_in_a_file(tmp_path):
    model, point = gpt2()
    first, second = prompts(1), prompts(2)
    with th.record(model, point, "lm_head") as tape:
        model.generate(first[0], attention_mask=first[1], max_new_tokens=4, min_new_tokens=4, do_sample=False)
        model.generate(second[0], attention_mask=second[1], max_new_tokens=5, min_new_tokens=5, do_sample=False)
    assert tape.sequence(point, run=0).shape == (2, 9, 16)
    assert tape.sequence(point).shape == (2, 10, 16)
    tape.save(tmp_path / "run.th")
    again = th.load(tmp_path / "run.th")
    for run in (0, 1):
        assert torch.equal(again.sequence(point, run=run), tape.sequence(point, run=run))
    assert torch.equal(again.tokens, tape.tokens)
    with pytest.raises(th.TapeError, match="holds 2 calls"):
        tape.sequence(point, run=2)


def test_entries_that_were_dropped_are_not_replaced_by_those_of_another_generation():
    model, point = gpt2()
    how = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    one, other = torch.tensor([[5]]), torch.tensor([[6]])
    with th.record(model, point) as cleared:
        model.generate(one, **how)
        cleared.clear()
        model.generate(other, **how)
    with th.record(model, point, keep=5) as bounded:
        model.generate(one, **how)
        model.generate(other, **how)
    with th.record(model, point) as alone:
        model.generate(other, **how)
    for tape in (cleared, bounded):
        with pytest.raises(th.TapeError, match="of 4 steps"):
            tape.sequence(point, run=0)
    assert torch.equal(cleared.sequence(point), alone.sequence(point))


def test_several_samples_of_each_prompt():
    model, point = gpt2()
    ids, mask = prompts()
    with th.record(model, point) as tape:
        model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=True, num_return_sequences=3)
    assert tape.sequence(point).shape[0] == 6
    assert tape.mask[:3, :2].logical_not().all()
    assert tape.mask[3:, :6].all()


def test_a_decoder_with_an_encoder():
    torch.manual_seed(0)
    config = BartConfig(
        vocab_size=40, d_model=16, encoder_layers=1, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=64,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=3, forced_eos_token_id=None,
    )  # fmt: skip
    model = BartForConditionalGeneration(config).eval().double()
    ids, mask = prompts()
    point = "model.decoder.layers.1"
    with th.record(model, point) as tape:
        output = model.generate(ids, attention_mask=mask, max_new_tokens=5, min_new_tokens=5, do_sample=False)
    with torch.no_grad(), th.record(model, point) as once:
        model(ids, attention_mask=mask, decoder_input_ids=output[:, :-1])
    assert (tape.sequence(point) - once[point]).abs().max() < 1e-9


def test_an_edit_at_some_steps_equals_whole_prefixes_with_the_edit_at_those_positions():
    model, point = gpt2()
    ids = torch.randint(3, 40, (2, 6), generator=torch.Generator().manual_seed(3))
    vector = torch.randn(16, dtype=torch.float64, generator=torch.Generator().manual_seed(4)) * 3
    how = {"max_new_tokens": 7, "min_new_tokens": 7, "do_sample": False}
    with th.edit(model, {f"{point}#{{2..4}}": th.add(vector)}):
        found = model.generate(ids, **how)
    tokens = ids
    for _ in range(7):  # Step n reads position 5 + n.
        length = tokens.shape[1]
        at = slice(min(7, length), min(10, length))
        with torch.no_grad(), th.edit(model, {point: th.add(vector, at=th.at[:, at])}):
            logits = model(tokens).logits[:, -1]
        logits[:, 2] = -torch.inf
        tokens = torch.cat([tokens, logits.argmax(-1, keepdim=True)], 1)
    assert torch.equal(found, tokens)


def test_beam_search_and_missing_steps_are_refused():
    model, point = gpt2()
    ids, mask = prompts()
    with th.record(model, point) as tape:
        model.generate(ids, attention_mask=mask, max_new_tokens=4, num_beams=3, do_sample=False)
    with pytest.raises(th.TapeError, match="Beam search"):
        tape.sequence(point)
    with th.record(model, point, keep="last") as tape:
        model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False)
    with pytest.raises(th.TapeError, match="keep='all'"):
        tape.sequence(point)
    with th.record(model, point) as tape:
        model(ids)
    with pytest.raises(th.TapeError, match="holds no generation"):
        tape.sequence(point)


def test_assisted_decoding_is_right_or_refused():
    model, point = gpt2()
    torch.manual_seed(5)
    assistant, _ = gpt2()
    ids = torch.randint(3, 40, (1, 6), generator=torch.Generator().manual_seed(3))
    with th.record(model, point) as tape:
        model.generate(ids, assistant_model=assistant, max_new_tokens=8, do_sample=False)
    try:
        joined = tape.sequence(point)
    except th.TapeError as error:
        assert "assisted decoding" in str(error)  # noqa: PT017
    else:
        assert (joined - whole(model, point, tape.tokens, torch.ones_like(tape.tokens))).abs().max() < 1e-9


def test_a_point_without_tokens_is_refused():
    model, _ = gpt2()
    ids, mask = prompts()
    with th.record(model, "transformer.h.0.attn:in#{0..}", "transformer.wpe:input") as tape:
        model.generate(ids, attention_mask=mask, max_new_tokens=3, do_sample=False)
    assert tape.sequence("transformer.h.0.attn:in").shape[0] == 2
    with pytest.raises(th.AddressError, match="names a call already"):
        tape.sequence("transformer.h.0.attn:in#1")


def test_the_mask_of_an_encoder_is_not_that_of_its_decoder():
    torch.manual_seed(0)
    config = BartConfig(
        d_model=16, encoder_layers=1, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=16, decoder_ffn_dim=16, vocab_size=40, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=2, forced_eos_token_id=None,
    )  # fmt: skip
    model = BartForConditionalGeneration(config).eval()
    ids, mask = prompts()
    with th.record(model, "model.decoder.layers.1") as tape:
        model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False, eos_token_id=[39])
    assert tape.mask[:, 0].all()
