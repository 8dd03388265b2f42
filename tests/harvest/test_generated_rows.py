"""Harvests of generated text: one row for each token that the model read."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import tenterhook as th
from tenterhook.harvest.job import Job

POINTS = "transformer.h.0", "transformer.h.1.mlp"


@pytest.fixture
def model():
    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=40, n_positions=64)
    config.pad_token_id, config.bos_token_id, config.eos_token_id = 0, 1, 2
    return GPT2LMHeadModel(config).eval().double()


def prompts(count, *, seed=0):
    """Return batches of three prompts, of which some are padded on the left."""
    draw = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(count):
        ids = torch.randint(3, 40, (3, 6), generator=draw)
        mask = torch.ones_like(ids)
        ids[0, :2], mask[0, :2] = 0, 0
        batches.append({"input_ids": ids, "attention_mask": mask})
    return batches


OPTIONS = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": [*range(2, 40, 6)]}


def test_rows_are_those_of_one_forward_pass_over_prompt_and_generated_tokens(model, tmp_path):
    batches = prompts(3)
    done = th.harvest(model, batches, *POINTS, to=tmp_path, generate=OPTIONS)
    store = th.open(tmp_path)
    assert done.rows == len(store["sample"])
    rows = {name: store[name][:] for name in ("sample", "position", "token", "step", *POINTS)}
    lengths = set()
    for sample in range(9):
        batch, row = batches[sample // 3], sample % 3
        mine = rows["sample"] == sample
        text = rows["token"][mine].long()[None]
        prompt = batch["input_ids"][row][batch["attention_mask"][row].bool()]
        assert torch.equal(text[0, : len(prompt)], prompt)
        lengths.add(len(text[0]) - len(prompt))
        assert rows["position"][mine].tolist() == list(range(len(text[0])))
        assert rows["step"][mine].tolist() == [0] * len(prompt) + list(range(1, 1 + len(text[0]) - len(prompt)))
        with torch.no_grad(), th.record(model, *POINTS) as tape:
            logits = model(text).logits
        for point in POINTS:
            torch.testing.assert_close(rows[point][mine], tape[point][0], rtol=0, atol=1e-9)
        assert torch.equal(logits[0, len(prompt) - 1 : -1].argmax(-1), text[0, len(prompt) :])
    assert len(lengths) > 1  # Some texts end early.


def interrupted(run, *, after):
    """Return ``run`` with a Ctrl-C in one of its calls."""
    calls = []

    def stopped(*args):
        calls.append(args)
        if len(calls) > after:
            raise KeyboardInterrupt
        return run(*args)

    return stopped


def test_an_interrupted_harvest_is_resumed_and_gives_the_same_rows(model, tmp_path, monkeypatch):
    batches = prompts(6)
    for options in (OPTIONS, OPTIONS | {"do_sample": True}):
        places = [tmp_path / f"{number} {options['do_sample']}" for number in range(2)]
        th.harvest(model, batches, POINTS[0], to=places[0], generate=options, shard_rows=30)

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(Job, "run", interrupted(Job.run, after=3))
            th.harvest(model, batches, POINTS[0], to=places[1], generate=options, shard_rows=30)
        assert 0 < len(th.open(places[1])["step"]) < len(th.open(places[0])["step"])
        th.harvest(model, batches, POINTS[0], to=places[1], generate=options, shard_rows=30)
        first, second = map(th.open, places)
        for name in ("sample", "token", "step", POINTS[0]):
            assert torch.equal(first[name][:], second[name][:])


def test_another_length_is_another_harvest(model, tmp_path):
    th.harvest(model, prompts(1), POINTS[0], to=tmp_path, generate=OPTIONS)
    with pytest.raises(th.DifferentHarvest, match=r"generate.*max_new_tokens"):
        th.harvest(model, prompts(1), POINTS[0], to=tmp_path, generate=OPTIONS | {"max_new_tokens": 9})


def test_rows_can_be_passed_to_a_function(model):
    found = []
    options = OPTIONS | {"eos_token_id": None}
    keep = lambda rows: found.append({name: rows[name].clone() for name in rows})
    done = th.harvest(model, [batch["input_ids"] for batch in prompts(2)], POINTS[0], to=keep, generate=options)
    assert done.rows == sum(len(rows["step"]) for rows in found)
    assert set(found[0]) == {POINTS[0], "sample", "position", "token", "step"}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"reduce": "last"}, "remove reduce="),
        ({"call": lambda model, batch: model(batch)}, "remove call="),
        ({"grad": lambda output, _: output.sum()}, "remove grad="),
        ({"generate": OPTIONS | {"num_return_sequences": 2, "do_sample": True}}, "6 sequences for 3 samples"),
    ],
)
def test_options_that_do_not_fit_are_errors(model, options, text):
    with pytest.raises((th.HarvestError, ValueError), match=text):
        th.harvest(model, prompts(1), POINTS[0], to=print, **({"generate": OPTIONS} | options))


def test_padding_on_the_right_and_models_that_do_not_generate_are_errors(model):
    batch = prompts(1)[0]
    wrong = {name: value.flip(1) for name, value in batch.items()}
    with pytest.raises(th.HarvestError, match="padding_side = 'left'"):
        th.harvest(model, [wrong], POINTS[0], to=print, generate=OPTIONS)
    with pytest.raises(th.HarvestError, match="Linear has no such method"):
        th.harvest(torch.nn.Linear(2, 2), [torch.ones(1, 2)], ":return", to=print, generate={})


def test_a_number_of_tokens_is_not_a_dict_of_options():
    with pytest.raises(th.HarvestError, match=r"got 3. For a number of tokens: generate=dict\(max_new_tokens"):
        th.harvest(torch.nn.Linear(2, 2), [torch.ones(1, 2)], ":return", to=print, generate=3)
