"""Batches over many architectures of transformers: every value of every case is what it is alone."""

import inspect

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM

import tenterhook as th
from tenterhook._tree import tensors

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

COMMON = {
    "vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GROUPED = {"num_key_value_heads": 2}
EXPERTS = GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2}
CAUSAL = {
    "bloom": {"n_layer": 2, "n_head": 4},
    "ctrl": {"n_embd": 32, "n_layer": 2, "n_head": 4, "dff": 48},
    "falcon": {},
    "falcon_mamba": {"state_size": 4},
    "gemma2": GROUPED | {"head_dim": 8, "sliding_window": 4},
    "gpt_neo": {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 4},
    "gpt_neox": {},
    "gptj": {"n_layer": 2, "n_head": 4, "n_embd": 32, "rotary_dim": 4},
    "mamba": {"state_size": 4},
    "mistral": GROUPED | {"sliding_window": 4},
    "olmo": {},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "phi": {},
    "qwen2": GROUPED,
    "qwen3": GROUPED | {"head_dim": 8},
    "recurrent_gemma": GROUPED,
}
MASKED = {
    "albert": {"embedding_size": 16},
    "deberta-v2": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    "distilbert": {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48},
    "electra": {"embedding_size": 16},
    "modernbert": {"local_attention": 4},
    "roberta": {"type_vocab_size": 1},
    "xlm-roberta": {},
}
SEQUENCES = {
    "bart": {
        "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
    },
}  # fmt: skip


def model_of(kind, name, more):
    torch.manual_seed(0)
    return kind.from_config(AutoConfig.for_model(name, **{**COMMON, **more})).eval()


def cases_of(*, decoder, record):
    draw, cases = torch.Generator().manual_seed(0), []
    for number in range(6):
        rows = 1 + number % 2
        more = {"decoder_input_ids": torch.randint(3, 60, (rows, 9 - number), generator=draw)} if decoder else {}
        cases.append(th.case(torch.randint(3, 60, (rows, 3 + 2 * number), generator=draw), record=record, **more))
    return cases


def far(one, other):
    assert one.shape == other.shape
    if not one.is_floating_point() or not one.numel():
        return 0.0
    return float((one - other).abs().max() / one.abs().max().clamp(min=1e-9))


ALL = [
    (kind, name, more)
    for kind, found in (
        (AutoModelForCausalLM, CAUSAL), (AutoModelForMaskedLM, MASKED), (AutoModelForSeq2SeqLM, SEQUENCES),
    )
    for name, more in found.items()
]  # fmt: skip


@pytest.mark.parametrize(("kind", "name", "more"), ALL, ids=lambda each: each if isinstance(each, str) else "")
def test_every_value_of_every_case(kind, name, more):
    model = model_of(kind, name, more)
    given = {"use_cache": False} if "use_cache" in inspect.signature(type(model).forward).parameters else {}
    cases = cases_of(decoder=kind is AutoModelForSeq2SeqLM, record="**")
    for case, run in zip(cases, th.batch(model, cases), strict=True):
        with torch.no_grad(), th.record(model) as tape:
            output = model(*case.args, **case.kwargs, **given)
        assert far(output.logits, run.output.logits) < 1e-5
        assert list(run.tape) == list(tape)
        for address in tape:
            for (path, mine), (there, theirs) in zip(tensors(tape[address]), tensors(run.tape[address]), strict=True):
                assert path == there
                assert far(mine, theirs) < 1e-4, (address, path)


@pytest.mark.parametrize(("name", "more"), [*CAUSAL.items(), *SEQUENCES.items()], ids=lambda each: str(each)[:20])
def test_generations(name, more):
    kind = AutoModelForSeq2SeqLM if name in SEQUENCES else AutoModelForCausalLM
    model, options = model_of(kind, name, more), {"max_new_tokens": 6, "do_sample": False}
    cases = [th.case(*each.args) for each in cases_of(decoder=False, record=())]
    for case, run in zip(cases, th.batch(model, cases, generate=options), strict=True):
        alone = model.generate(*case.args, attention_mask=torch.ones_like(case.args[0]), **options)
        assert torch.equal(alone, run.output)


@pytest.mark.parametrize("name", ["mixtral", "granitemoe"])
def test_experts_keep_rows_apart_but_not_inside(name):
    model = model_of(AutoModelForCausalLM, name, EXPERTS)
    cases = cases_of(decoder=False, record=())
    for case, run in zip(cases, th.batch(model, cases), strict=True):
        with torch.no_grad():
            assert far(model(*case.args).logits, run.output.logits) < 1e-5
    with pytest.raises(th.BatchError, match="as inside a mixture of experts"):
        th.batch(model, cases_of(decoder=False, record="**.act_fn"))
