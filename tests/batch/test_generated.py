"""Generations in a batch: options that see padding, windows, caches, and prompts with a mask of their own."""

import random

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

import tenterhook as th

WORDS = 40
SMALL = {
    "vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 24, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
KINDS = {
    "gpt2": (GPT2LMHeadModel, GPT2Config(n_layer=2, n_head=4, n_embd=16, vocab_size=WORDS, n_positions=64)),
    "llama": (LlamaForCausalLM, LlamaConfig(**SMALL)),
    "window": (MistralForCausalLM, MistralConfig(**SMALL, sliding_window=5)),
}
PART = {"gpt2": "transformer.h.1.attn", "llama": "model.layers.1.self_attn", "window": "model.layers.1.self_attn"}


def model_of(name):
    kind, config = KINDS[name]
    torch.manual_seed(0)
    model = kind(config).double().eval()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(10)  # The next token depends on the prompt.
    return model


def prompts(draw, *lengths):
    return [torch.tensor([[draw.randrange(3, WORDS) for _ in range(length)]]) for length in lengths]


def check(model, cases, options):
    """Compare each case of a batch with a single run of generate. Return the batch."""
    found = th.batch(model, cases, generate=options)
    for case, run in zip(cases, found, strict=True):
        given = {"attention_mask": torch.ones_like(case.args[0]), **case.kwargs}
        with th.record(model, *(case.record or ["lm_head"])) as tape:
            if case.edits:
                with th.edit(model, case.edits):
                    output = model.generate(*case.args, **given, **options)
            else:
                output = model.generate(*case.args, **given, **options)
        assert torch.equal(output, run.output)
        assert not case.record or list(run.tape) == list(tape)
        mask = given["attention_mask"]
        for address in tape if case.record else ():
            mine, theirs = tape[address], run.tape[address]
            assert mine.shape == theirs.shape, address
            if bool(mask.all()):  # What a model computes at hidden tokens has no meaning.
                torch.testing.assert_close(theirs, mine, rtol=1e-9, atol=1e-11)
    return found


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("seed", range(6))
def test_parts_of_attention_at_every_step(name, seed):
    draw, model = random.Random(f"{name} {seed}"), model_of(name)
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": draw.choice([None, [*range(2, WORDS, 4)]])}
    if draw.random() < 0.3:
        options["use_cache"] = False
    for _ in range(2):  # What is known from the first batch holds for the second one.
        cases = []
        for ids in prompts(draw, *draw.choices(range(1, 12), k=draw.randint(2, 6))):
            point = f"{PART[name]}@{draw.choice(['k', 'v[1]', 'pattern', 'z', 'scores[3]'])}"
            edits = {f"{PART[name]}@{draw.choice(['v', 'z', 'k[0]'])}": th.scale(draw.random())}
            more = {}
            if ids.shape[1] > 3 and draw.random() < 0.3:
                more["attention_mask"] = torch.ones_like(ids)
                more["attention_mask"][0, : draw.randint(1, 2)] = 0
            cases.append(th.case(ids, record=point, edits=edits if draw.random() < 0.5 else {}, **more))
        check(model, cases, options)


def test_a_window_that_was_full_for_all_cases_is_not_full_for_shorter_ones():
    draw, model = random.Random(0), model_of("window")
    for lengths in ([7, 9, 8], [7, 9, 8], [1, 9, 3]):
        cases = [th.case(ids, record=f"{PART['window']}@k") for ids in prompts(draw, *lengths)]
        check(model, cases, {"max_new_tokens": 5, "do_sample": False})


def test_a_window_that_fills_after_the_first_case_has_ended():
    draw, model = random.Random(1), model_of("window")
    first, *rest = prompts(draw, 1, 3, 2, 3)
    end = int(model.generate(first, attention_mask=torch.ones_like(first), max_new_tokens=1)[0, -1])
    cases = [th.case(ids, record=f"{PART['window']}@k") for ids in (first, *rest)]
    found = check(model, cases, {"max_new_tokens": 8, "do_sample": False, "eos_token_id": end})
    assert found[0].output.shape[1] == 2
    assert max(run.output.shape[1] for run in found) == 11


OPTIONS = {
    "max_length": 14, "min_length": 13, "repetition_penalty": 4.0, "no_repeat_ngram_size": 1,
    "sequence_bias": [[[0, 5], 9.0]], "bad_words_ids": [[5]],
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
def test_options_that_see_padding_keep_prompts_of_other_lengths_apart(name):
    draw, model = random.Random(2), model_of("llama")
    options = {"do_sample": False, name: OPTIONS[name]}
    if name != "max_length":
        options |= {"max_new_tokens": 12, "eos_token_id": 7}
    found = check(model, [th.case(ids) for ids in prompts(draw, 9, 3, 3, 9, 5)], options)
    assert found.how[-1] == f"only prompts of one length ran together: {name}= sees padding"
    model.generation_config.update(**({} if name == "max_length" else {name: OPTIONS[name]}))
    check(model, [th.case(ids) for ids in prompts(draw, 9, 3, 3, 9, 5)], options)


def test_a_static_cache():
    draw, model = random.Random(3), model_of("llama")
    options = {"max_new_tokens": 4, "do_sample": False, "cache_implementation": "static"}
    for point in ("model.layers.1", f"{PART['llama']}@z"):
        found = check(model, [th.case(ids, record=point) for ids in prompts(draw, 9, 3, 5)], options)
        assert found.how[0] == "3 cases in 1 batch: 3"
    found = th.batch(
        model, [th.case(ids, record=f"{PART['llama']}@k") for ids in prompts(draw, 9, 3, 3)], generate=options
    )
    assert found.how[-1] == "only prompts of one length ran together: cache_implementation= sees padding"


def test_keys_in_a_static_cache_are_recorded_as_they_were():
    draw, model = random.Random(4), model_of("llama")
    [ids] = prompts(draw, 5)
    options = {"max_new_tokens": 4, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    tapes = []
    for cache in ("static", "dynamic"):
        with th.record(model, f"{PART['llama']}@k", f"{PART['llama']}@v[1]") as tape:
            model.generate(ids, cache_implementation=cache, **options)
        tapes.append(tape)
    for address in tapes[0]:
        size = tapes[1][address].shape[1]
        torch.testing.assert_close(tapes[0][address][:, :size], tapes[1][address], rtol=1e-9, atol=1e-11)
        assert tapes[0][address][:, size:].abs().sum() == 0


@pytest.mark.parametrize("flip", [False, True])
def test_tokens_that_a_case_hides_itself_are_not_compared(flip):
    draw, model = random.Random(5), model_of("gpt2")
    cases = []
    for ids in prompts(draw, 4, 6, 8):
        mask = torch.ones_like(ids)
        mask[0, :2] = 0
        mask = mask.flip(1) if flip else mask
        cases.append(th.case(ids, attention_mask=mask, record=["**@k", "**@pattern", "transformer.h.1"]))
    for case, run in zip(cases, th.batch(model, cases), strict=True):
        with torch.no_grad():
            logits = model(*case.args, **case.kwargs).logits
        own = case.kwargs["attention_mask"].bool()
        torch.testing.assert_close(run.output.logits[own], logits[own], rtol=1e-9, atol=1e-11)


def test_a_loss_of_tokens_that_a_case_hides_itself_is_refused_for_that_reason():
    draw, model = random.Random(6), model_of("gpt2").float()

    def loss(output):
        return output.logits.square().mean()

    cases = []
    for ids in prompts(draw, 6, 8, 9):
        mask = torch.ones_like(ids)
        mask[0, :2] = 0
        cases.append(th.case(ids, attention_mask=mask, record="transformer.h.0", grad=loss))
    # An edited pattern is computed step by step, and where no key is seen, the kernel gives something else.
    [ids], edits = prompts(draw, 9), {f"{PART['gpt2']}@pattern[0]": th.scale(0.5)}
    cases.append(th.case(ids, record="transformer.h.0", edits=edits, grad=loss))
    with pytest.raises(th.BatchError, match=r"the gradient of .* differs(.|\n)*Leave them out of grad="):
        th.batch(model, cases)
