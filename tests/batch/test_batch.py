"""Batches: each case gives what it gives alone, with its own edits, recordings and gradients."""

import random

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import tenterhook as th
from tenterhook.testing import untouched

WIDTH, WORDS = 16, 40


def gpt2(kind=GPT2LMHeadModel, **more):
    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_head=2, n_embd=WIDTH, vocab_size=WORDS, n_positions=64, **more)
    config.pad_token_id, config.bos_token_id, config.eos_token_id = 0, 1, 2
    return kind(config).eval().double()


def llama():
    torch.manual_seed(0)
    config = LlamaConfig(
        num_hidden_layers=2, hidden_size=WIDTH, num_attention_heads=4, num_key_value_heads=2, intermediate_size=32,
        vocab_size=WORDS, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval().double()


def bert():
    torch.manual_seed(0)
    config = BertConfig(
        num_hidden_layers=2, hidden_size=WIDTH, num_attention_heads=2, intermediate_size=32, vocab_size=WORDS
    )
    return BertForMaskedLM(config).eval().double()


def t5():
    torch.manual_seed(0)
    config = T5Config(
        num_layers=2, d_model=WIDTH, num_heads=2, d_kv=8, d_ff=32, vocab_size=WORDS, pad_token_id=0, eos_token_id=2,
        decoder_start_token_id=0,
    )  # fmt: skip
    return T5ForConditionalGeneration(config).eval().double()


def cnn():
    torch.manual_seed(0)
    parts = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(2), nn.Flatten()
    return nn.Sequential(*parts, nn.Linear(32, 5)).eval().double()


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 3)).eval().double()


def ids(draw, rows=None, length=None):
    shape = (rows or draw.choice([1, 1, 2, 3]), length or draw.randint(2, 9))
    return torch.tensor([[draw.randrange(3, WORDS) for _ in range(shape[1])] for _ in range(shape[0])])


def tokens(draw):
    return (ids(draw),), {}


def sequences(draw):
    rows = draw.choice([1, 2])
    return (), {"input_ids": ids(draw, rows), "decoder_input_ids": ids(draw, rows)}


def pictures(draw):
    size = draw.choice([8, 8, 11])
    return (torch.randn(draw.choice([1, 2]), 3, size, size, dtype=torch.double),), {}


def vectors(draw):
    return (torch.randn(draw.choice([1, 4]), 6, dtype=torch.double),), {}


# For each class: a model, its inputs, points to record, and points to edit with an index of each that any case has.
KINDS = {
    "gpt2": (gpt2, tokens, ["transformer.h.*", "transformer.h.1.attn@pattern", "transformer.h.0.mlp:in", "lm_head"],
             [("transformer.h.0", th.at[:, -1]), ("transformer.h.1.attn@z[1]", th.at[:, 0]),
              ("transformer.h.1", None)]),
    "llama": (llama, tokens, ["model.layers.*", "model.layers.1.self_attn@scores", "model.layers.0@resid_pre"],
              [("model.layers.0", th.at[:, -1]), ("model.layers.1.self_attn@v", None), ("model.layers.1.mlp", None)]),
    "bert": (bert, tokens, ["bert.encoder.layer.*", "bert.embeddings", "bert.encoder.layer.0.attention.self@pattern"],
             [("bert.encoder.layer.0", th.at[:, 1]), ("bert.embeddings", None)]),
    "t5": (t5, sequences, ["encoder.block.*.layer.0", "decoder.block.*.layer.1", "decoder.final_layer_norm"],
           [("encoder.block.0.layer.1", th.at[..., -1, :]), ("decoder.block.1.layer.2", None)]),
    "cnn": (cnn, pictures, ["*"], [("0", th.at[:, 3]), ("3", None)]),
    "mlp": (mlp, vectors, ["*", "2:in"], [("0", th.at[:, 2]), ("2", None)]),
}  # fmt: skip


def output_of(output):
    return output if isinstance(output, torch.Tensor) else output.logits


def loss(output):
    return output_of(output).pow(2).sum()


def an_edit(draw, at, *, grad):
    """Return an edit of one tensor; the values at some points are tuples of one tensor and None."""
    return draw.choice(
        [
            lambda: th.zero(at=at) if at or not grad else th.scale(2.0),
            lambda: th.scale(draw.random(), at=at),
            lambda: th.noise(std=0.5, seed=draw.randrange(9), at=at),
            lambda: [th.add(draw.random(), at=at), th.clamp(-1, 1)],
            lambda: lambda value: value * 0.5 if isinstance(value, torch.Tensor) else None,
        ]
    )()


def alone(model, args, kwargs, edits, points, *, grad):
    """Return what a case gives by itself."""
    with torch.set_grad_enabled(grad), th.record(model, *points, grad=grad) as tape:
        if edits:
            with th.edit(model, edits):
                output = model(*args, **kwargs)
        else:
            output = model(*args, **kwargs)
        if grad:
            tape.backward(loss(output))
    return output, tape


def close(one, other):
    if isinstance(one, tuple):
        assert len(one) == len(other)
        for mine, theirs in zip(one, other, strict=True):
            close(mine, theirs)
    elif one is None or other is None:
        assert one is other
    else:
        assert one.shape == other.shape
        torch.testing.assert_close(other, one, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", KINDS)
def test_each_case_is_what_it_is_alone(kind, seed):
    make, inputs, points, places = KINDS[kind]
    draw, model = random.Random(f"{kind} {seed}"), make()
    torch.manual_seed(seed)
    grad, cases = seed % 2 == 1, []
    for _ in range(draw.choice([2, 5, 9])):
        args, kwargs = inputs(draw)
        edits = {name: an_edit(draw, at, grad=grad) for name, at in draw.sample(places, draw.randint(0, len(places)))}
        record = draw.sample(points, draw.randint(1, len(points)))
        cases.append(th.case(*args, edits=edits, record=record, grad=loss if grad else None, **kwargs))
    with untouched(model):
        found = th.batch(model, cases)
    for case, run in zip(cases, found, strict=True):
        output, tape = alone(model, case.args, case.kwargs, case.edits, case.record, grad=grad)
        close(output_of(output).detach(), output_of(run.output))
        assert list(run.tape) == list(tape)
        assert run.tape.in_order() == tape.in_order()
        for address in tape:
            close(tape[address], run.tape[address])
        for address in set(tape.grad) & set(run.tape.grad) if grad else ():
            close_gradients(tape.grad[address], run.tape.grad[address])
        # Alone, a value that an edit replaced by a constant has no gradient; in a batch, a shared value has none.
        assert not grad or len(set(tape.grad) - set(run.tape.grad)) <= sum("embeddings" in name for name in tape.grad)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("lengths", [[3, 3, 9, 12], [3, 3, 3, 3, 4, 4], [2, 5, 5, 5, 6, 6, 11], [4] * 5])
def test_later_batches_have_other_padding_and_other_points_than_the_first(lengths, size):
    model, draw, blocks = gpt2(), random.Random(size), ["transformer.h.0", "transformer.h.1", "transformer.h.1.attn@z"]
    cases = []
    for number, length in enumerate(lengths):
        x = torch.randint(3, WORDS, (1 + number % 2, length), generator=torch.Generator().manual_seed(number))
        edits = {blocks[number % 3]: th.scale(0.5 + number, at=th.at[:, -1])}
        cases.append(th.case(x, edits=edits, record=draw.sample(blocks, 1)))
    for _ in range(2):
        found = th.batch(model, cases, batch=size)
        for case, run in zip(cases, found, strict=True):
            output, tape = alone(model, case.args, case.kwargs, case.edits, case.record, grad=False)
            close(output.logits, run.output.logits)
            assert list(run.tape) == list(tape)
            for address in tape:
                close(tape[address], run.tape[address])


def close_gradients(one, other):
    """Compare two gradients. Those of a position bias, which all rows share, cannot be separated in a batch."""
    if isinstance(other, tuple):
        for mine, theirs in zip(one, other, strict=True):
            close_gradients(mine, theirs)
    elif other is not None:
        close(one, other)


@pytest.mark.parametrize("make", [gpt2, llama, t5])
def test_generations_end_where_they_end_alone(make):
    model, draw = make(), random.Random(3)
    layer = {"gpt2": "transformer.h.1", "llama": "model.layers.1", "t5": "decoder.block.1.layer.2"}[make.__name__]
    options = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": [*range(2, WORDS, 3)]}
    cases = []
    for number in range(6):
        edits = {f"{layer}#{{0..1}}": th.add(torch.randn(WIDTH).double() * 3, at=th.at[:, -1])} if number % 2 else {}
        cases.append(th.case(ids(draw, rows=1 + (number == 4)), edits=edits, record=[layer]))
    found = th.batch(model, cases, generate=options)
    lengths = set()
    for case, run in zip(cases, found, strict=True):
        with th.record(model, *case.record) as tape:
            given = {"attention_mask": torch.ones_like(case.args[0]), **options}
            if case.edits:
                with th.edit(model, case.edits):
                    output = model.generate(*case.args, **given)
            else:
                output = model.generate(*case.args, **given)
        assert torch.equal(output, run.output)
        assert list(run.tape) == list(tape)
        lengths.add(len(tape.calls(layer)))
        for mine, theirs in zip(tape.calls(layer), run.tape.calls(layer), strict=True):
            close(mine, theirs)
        close(tape.sequence(layer), run.tape.sequence(layer))
        assert torch.equal(tape.tokens, run.tape.tokens)
        assert torch.equal(tape.mask, run.tape.mask)
    assert len(lengths) > 1  # Some end early.


def test_results_are_in_the_order_of_the_cases_and_cases_that_do_not_fit_run_alone():
    model = mlp()
    inputs = [torch.randn(rows, 6, dtype=torch.double) for rows in (3, 1, 2)]
    found = th.batch(model, [*map(th.case, inputs), th.case(inputs[0], edits={"0.bias": th.zero()})])
    assert [run.output.shape[0] for run in found] == [3, 1, 2, 3]
    assert found.how == [
        "3 cases in 1 batch: 3",
        "1 case also ran alone and gave the same result",
        "1 case alone: no other case has inputs of the same kind",
    ]
    with th.edit(model, {"0.bias": th.zero()}):
        close(model(inputs[0]).detach(), found[3].output)


def test_skipped_modules_are_skipped_for_the_cases_that_skip_them():
    model, draw = gpt2(), random.Random(1)
    inputs = [ids(draw) for _ in range(6)]
    skip = {"transformer.h.0": th.skip()}
    found = th.batch(model, [th.case(each, edits=skip if place % 2 else None) for place, each in enumerate(inputs)])
    assert found.how[0] == "6 cases in 2 batches: 3, 3"
    for place, (each, run) in enumerate(zip(inputs, found, strict=True)):
        with torch.no_grad():
            if place % 2:
                with th.edit(model, skip):
                    expected = model(each)
            else:
                expected = model(each)
        close(expected.logits, run.output.logits)


def test_large_batches_are_split_and_later_ones_are_compared_now_and_then():
    model = mlp()
    cases = [th.case(torch.randn(1, 6, dtype=torch.double), record="2") for _ in range(8)]
    assert th.batch(model, cases, batch=3).how[0] == "8 cases in 3 batches: 3, 3, 2"
    assert "no case ran alone" in th.batch(model, cases, batch=3).how[1]
    for _ in range(7):
        last = th.batch(model, cases, batch=3)
    assert last.how[1] == "1 case also ran alone and gave the same result"


def test_edits_of_one_value_are_applied_in_the_order_of_each_case():
    model, blocks = gpt2(), "transformer.h"
    z, head = f"{blocks}.0.attn@z", f"{blocks}.0.attn@z[1]"
    clamp, more = th.clamp(-0.05, 0.05), th.add(0.1)
    edits = [
        {head: more, z: clamp},
        {z: clamp, head: more},
        {f"{blocks}.1": th.scale(2.0), f"{blocks}.*": th.add(1.0)},
        {f"{blocks}.*": th.add(1.0), f"{blocks}.1": th.scale(2.0)},
        {model.transformer.h[1]: clamp, f"{blocks}.1": more, z: more},
    ]
    x = torch.randint(3, WORDS, (1, 9))
    cases = [th.case(x[:, : 4 + n], edits=each, record=f"{blocks}.*") for n, each in enumerate(edits)]
    for case, run in zip(cases, th.batch(model, cases), strict=True):
        output, tape = alone(model, case.args, case.kwargs, case.edits, case.record, grad=False)
        close(output.logits, run.output.logits)
        for address in tape:
            close(tape[address], run.tape[address])


def test_a_cache_of_the_whole_batch_is_not_given_to_a_case():
    x = torch.randint(3, WORDS, (1, 9))
    found = th.batch(gpt2(), [th.case(x[:, :length], use_cache=True) for length in (5, 9)])
    assert "DynamicCache of the whole batch" in repr(found[0].output)
    for use in (lambda cache: cache.layers, len, iter, lambda cache: cache[0]):
        with pytest.raises(th.BatchError, match="has no part for each case"):
            use(found[0].output.past_key_values)


class MixesLongRows(nn.Module):
    """Lets a token see later ones, padding among them, if there are more than ten."""

    def forward(self, value):
        return value + value.mean(1, keepdim=True) if value.shape[1] > 10 else value


@pytest.mark.parametrize("size", [None, 2])
def test_more_padding_than_before_is_compared_again(size):
    model = gpt2()
    model.transformer.h[0].mlp = MixesLongRows()
    short, long = (
        [th.case(torch.randint(3, WORDS, (1, n)), record="transformer.h.*") for n in of] for of in ([3, 4], [4, 12])
    )
    assert th.batch(model, short).how[1] == "1 case also ran alone and gave the same result"
    with pytest.raises(th.BatchError, match="gives another result in the batch than alone"):
        th.batch(model, [*short, *long] if size else long, batch=size)


def test_an_edit_sees_the_tape_of_its_own_case():
    model, draw, seen = gpt2(), random.Random(2), {}
    layer, later = "transformer.h.0", "transformer.h.1"

    def watching(number):
        def edit(value, ctx):
            seen[number] = None if ctx.tape is None else ctx.tape[layer].shape
            return value + ctx.tape[layer]

        return edit

    inputs = [ids(draw, 1, 3), ids(draw, 2, 6)]
    found = th.batch(model, [th.case(each, edits={later: watching(n)}, record=layer) for n, each in enumerate(inputs)])
    assert seen == {0: (1, 3, WIDTH), 1: (2, 6, WIDTH)}
    for number, each in enumerate(inputs):
        with torch.no_grad(), th.record(model, layer), th.edit(model, {later: watching(number)}):
            close(model(each).logits, found[number].output.logits)


def test_dicts_of_a_tokenizer_and_texts():
    model = bert()

    def tokenizer(text, return_tensors):
        assert return_tensors == "pt"
        numbers = torch.tensor([[3 + ord(letter) % 30 for letter in text]])
        return {"input_ids": numbers, "attention_mask": torch.ones_like(numbers)}

    texts = ["a cat", "some longer words"]
    found = th.batch(model, [th.case(texts[0]), th.case(tokenizer(texts[1], "pt"))], tokenizer=tokenizer)
    for text, run in zip(texts, found, strict=True):
        close(model(**tokenizer(text, "pt")).logits.detach(), run.output.logits)
    with pytest.raises(th.BatchError, match=r"case 0 is text\. Pass the tokenizer"):
        th.batch(model, [th.case("a cat")])


def test_one_with_its_own_mask():
    model, draw = llama(), random.Random(5)
    padded, mask = ids(draw, 2, 6), torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    given = {"attention_mask": mask, "position_ids": positions}
    other = ids(draw, 1, 9)
    ones = {"attention_mask": torch.ones_like(other), "position_ids": torch.arange(9)[None]}
    found = th.batch(model, [th.case(padded, **given), th.case(other, **ones)])
    assert found.how[0] == "2 cases in 1 batch: 2"
    own = mask.bool()
    close(model(padded, **given).logits.detach()[own], found[0].output.logits[own])
    close(model(other).logits.detach(), found[1].output.logits)


# -- refusals ----------------------------------------------------------------------------------------------------------


class Mixing(nn.Module):
    """A model that subtracts the mean over the rows."""

    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 6), Centred(), nn.Linear(6, 2)

    def forward(self, x):
        return self.last(self.middle(self.first(x)))


class Centred(nn.Module):
    def forward(self, x):
        return x - x.mean(0)


class Scaled(nn.Module):
    """A model that quantizes with a scale for the whole batch."""

    def forward(self, x):
        scale = x.abs().max() / 7
        return (x / scale).round() * scale


def rows(count, *, scale=1.0):
    torch.manual_seed(0)
    return [th.case(torch.randn(1, 6, dtype=torch.double) * scale**place) for place in range(count)]


def test_a_model_that_mixes_rows_is_refused_at_the_place_where_it_does():
    with pytest.raises(th.BatchError, match=r"The first difference is at 'middle' \(Centred\).*\n.*batch=1"):
        th.batch(Mixing().double().eval(), rows(4))
    assert len(th.batch(Mixing().double().eval(), rows(4), batch=1)) == 4


def test_a_maximum_over_the_batch_is_found_also_if_the_first_case_has_it():
    with pytest.raises(th.BatchError, match="gives another result in the batch"):
        th.batch(nn.Sequential(Scaled()), rows(8, scale=0.5))


def test_batch_norm_in_training_mode_is_refused_and_its_statistics_stay():
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)).double().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    cases = [th.case(torch.randn(2, 6, dtype=torch.double)) for _ in range(3)]
    with pytest.raises(th.BatchError, match=r"'1' \(BatchNorm1d\).*\nThe model is in training mode.*model\.eval"):
        th.batch(model, cases)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_visible_padding_is_refused():
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(WORDS, 4)

        def forward(self, input_ids, attention_mask=None):
            return self.words(input_ids).cumsum(1).sum(1)

    draw = random.Random(0)
    same = [th.case(ids(draw, 1, 4)) for _ in range(3)]
    assert len(th.batch(Sum().double().eval(), same)) == 3
    with pytest.raises(th.BatchError, match="does not hide padding: cases of equal length need none"):
        th.batch(Sum().double().eval(), [*same, th.case(ids(draw, 1, 7))])


def test_a_loss_over_the_batch_is_refused():
    model, draw = gpt2(), random.Random(0)
    first, second = ids(draw, 1, 4), ids(draw, 1, 7)
    with pytest.raises(th.BatchError, match=r"the output differs at \['loss'\]"):
        th.batch(model, [th.case(first, labels=first), th.case(second, labels=second)])


def test_a_value_with_rows_in_another_order_is_refused():
    class Sorted(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(6, 6)

        def forward(self, x):
            order = x[:, 0].argsort()
            return self.inner(x[order])[order.argsort()]

    model = nn.Sequential(Sorted()).double().eval()
    cases = [th.case(torch.full((1, 6), 5.0 - n).double(), record="0.inner") for n in range(4)]
    with pytest.raises(th.BatchError, match=r"'0\.inner' differs .*\nThe output is the same.*Do not record it"):
        th.batch(model, cases)
    assert len(th.batch(model, [th.case(*each.args) for each in cases])) == 4


def test_an_edit_around_a_batch_is_checked_every_time():
    model, draw = gpt2(), random.Random(0)
    cases = [th.case(ids(draw, 1, 4)), th.case(ids(draw, 1, 6))]
    th.batch(model, cases)
    with th.edit(model, {"transformer.h.0": th.zero(at=th.at[:, -1])}):  # The last position is padding for one case.
        with pytest.raises(th.BatchError, match="does not hide padding"):
            th.batch(model, cases)
        with torch.no_grad():
            close(model(cases[0].args[0]).logits, th.batch(model, cases, batch=1)[0].output.logits)


def test_sampling_is_refused():
    model, draw = gpt2(), random.Random(0)
    with pytest.raises(th.BatchError, match="do_sample=True draws other tokens"):
        th.batch(model, [th.case(ids(draw)) for _ in range(4)], generate={"max_new_tokens": 8, "do_sample": True})


def test_a_point_without_rows_is_refused():
    class Inside(nn.Module):
        def forward(self, x):
            total = x.sum()
            return x * 2, total

    with pytest.raises(th.BatchError, match=r"another result in the batch"):
        th.batch(nn.Sequential(Inside()), rows(3))
    positions = gpt2().transformer.wpe
    assert isinstance(positions, nn.Embedding)
    draw = random.Random(0)
    cases = [th.case(ids(draw, 1, 4), edits={"transformer.wpe": th.zero()}), th.case(ids(draw, 1, 5))]
    with pytest.raises(th.BatchError, match=r"case 0 edits 'transformer\.wpe', which all cases of a batch share"):
        th.batch(gpt2(), cases)


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: th.batch(mlp(), []), th.BatchError, "needs at least one case"),
        (lambda: th.batch(mlp(), [torch.ones(1, 6)]), th.BatchError, "case 0 is a Tensor; write th.case"),
        (lambda: th.batch(mlp(), rows(2), batch=0), th.BatchError, "a positive int; got 0"),
        (lambda: th.batch(mlp(), rows(2), generate={}), th.BatchError, "Sequential has no such method"),
        (th.case, th.BatchError, "a case needs an input"),
        (lambda: th.case(1, edits=[3]), th.BatchError, "edits= is a dict of edits"),
        (lambda: th.case(1, record="0", grad=True), th.BatchError, "grad= is a function"),
        (lambda: th.case(1, grad=loss), th.BatchError, "there are none"),
        (lambda: th.batch(mlp(), [th.case(3)]), th.BatchError, "case 0 has no tensor"),
        (lambda: th.batch(mlp(), [th.case(torch.ones(1, 6), edits={"9": th.zero()})]), th.AddressError, "'9'"),
        (lambda: th.batch(mlp(), [th.case(torch.ones(1, 6), record="2#-1")]), th.AddressError, "count from #0"),
    ],
)
def test_bad_input_is_an_error_before_anything_runs(make, error, text):
    with pytest.raises(error, match=text):
        make()


def test_the_error_of_a_case_names_the_case():
    cases = rows(3)
    cases[1] = th.case(torch.ones(1, 6, dtype=torch.double), edits={"0": th.set(torch.ones(5).double())})
    with pytest.raises(th.EditError) as caught:
        th.batch(mlp(), cases)
    assert "in case 1 of the batch" in caught.value.__notes__


def test_a_loss_without_a_graph_and_a_step_after_the_end_are_errors():
    case = th.case(torch.ones(1, 6).double(), record="0", grad=lambda output: 3.0)
    with pytest.raises(th.BatchError, match="grad= must return a loss, one number with a graph; got"):
        th.batch(mlp(), [case, case])
    model, draw = gpt2(), random.Random(3)
    late = th.case(ids(draw), edits={"transformer.h.0#7": th.scale(1.0)})
    never = th.case(ids(draw), edits={"transformer.h.0": th.scale(1.0)})
    with pytest.raises(th.NeverReached):
        th.batch(model, [late, never], generate={"max_new_tokens": 4, "do_sample": False})


def test_a_classifier_without_a_padding_token_says_that_the_batch_fails():
    model, draw = gpt2(GPT2ForSequenceClassification), random.Random(0)
    cases = [th.case(ids(draw, 1, 4)), th.case(ids(draw, 1, 6))]
    found = th.batch(model, cases)
    close(model(cases[0].args[0]).logits.detach(), found[0].output.logits)
    model.config.pad_token_id = None
    with pytest.raises(th.BatchError, match="the model failed with several cases at once"):
        th.batch(model, cases)


def test_a_token_that_the_model_has_no_embedding_for_does_not_pad():
    torch.manual_seed(0)  # The configuration names token 50256, the usual end of a text, and there are 40 tokens.
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=WIDTH, vocab_size=WORDS)).eval()
    long, short = torch.arange(6)[None], torch.arange(3)[None]
    with torch.no_grad():
        for found, given in zip(th.batch(model, [th.case(long), th.case(short)]), (long, short), strict=True):
            torch.testing.assert_close(found.output.logits, model(given).logits)
