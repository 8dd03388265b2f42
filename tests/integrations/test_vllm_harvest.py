"""Harvests from an engine of vLLM, compared with harvests from transformers. `make vllm` runs them."""

import pytest
import torch
from vllm_engines import POINT, difference, greedy, model_folder, prompts, reference, running, serve, vector

import tenterhook as th
from tenterhook.integrations.vllm import attach

pytestmark = pytest.mark.vllm
TOKENS = prompts([3 + 11 * number % 90 for number in range(40)])


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder, model = model_folder(tmp_path_factory.mktemp("models"))
    with running(folder, max_num_seqs=16, max_num_batched_tokens=256) as llm:
        with attach(llm) as engine:
            yield llm, engine, model


def test_the_rows_of_prompts_are_those_of_transformers(llama, tmp_path):
    _, engine, model = llama
    done = th.harvest(engine, TOKENS, POINT, to=tmp_path / "acts", rows="token", batch_size=16)
    store = th.open(tmp_path / "acts")
    assert done.rows == sum(map(len, TOKENS)) == len(store)
    assert store["sample"][:].unique().tolist() == list(range(40))
    for number, tokens in enumerate(TOKENS):
        mine = store["sample"][:] == number
        assert store["token"][:][mine].tolist() == tokens
        assert store["position"][:][mine].tolist() == list(range(len(tokens)))
        assert not store["step"][:][mine].any()
        assert difference(store[POINT][:][mine], reference(model, tokens, POINT)[POINT][0]) < 1e-4


def test_generated_tokens_have_rows_with_their_steps(llama, tmp_path):
    llm, engine, model = llama
    th.harvest(engine, TOKENS[:5], POINT, to=tmp_path / "acts", generate={"max_new_tokens": 4})
    store = th.open(tmp_path / "acts")
    outputs = serve(llm, TOKENS[:5], greedy(4))
    for number, tokens in enumerate(TOKENS[:5]):
        mine = store["sample"][:] == number
        read = [*tokens, *outputs[number].outputs[0].token_ids[:-1]]
        assert store["token"][:][mine].tolist() == read
        assert store["step"][:][mine].tolist() == [0] * len(tokens) + [1, 2, 3]
        assert difference(store[POINT][:][mine], reference(model, read, POINT)[POINT][0]) < 1e-4


@pytest.mark.parametrize("reduce", ["last", "mean", "max"])
def test_a_row_for_each_request(llama, tmp_path, reduce):
    _, engine, model = llama
    th.harvest(engine, TOKENS[:6], POINT, to=tmp_path / "acts", reduce=reduce)
    rows = th.open(tmp_path / "acts")[POINT][:]
    for number, tokens in enumerate(TOKENS[:6]):
        values = reference(model, tokens, POINT)[POINT][0]
        expected = {"last": values[-1], "mean": values.mean(0), "max": values.amax(0)}[reduce]
        assert difference(rows[number], expected) < 1e-4


def test_an_interrupted_harvest_is_resumed_with_the_same_rows(llama, tmp_path, monkeypatch):
    _, engine, _ = llama
    options = {"rows": "token", "batch_size": 8, "shard_rows": 300}
    whole = th.harvest(engine, TOKENS, POINT, to=tmp_path / "whole", **options)
    run, calls = type(engine).serve, []

    def failing(*args):
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return run(*args)

    monkeypatch.setattr(type(engine), "serve", failing)
    with pytest.raises(KeyboardInterrupt):
        th.harvest(engine, TOKENS, POINT, to=tmp_path / "acts", **options)
    monkeypatch.undo()
    rest = th.harvest(engine, TOKENS, POINT, to=tmp_path / "acts", **options)
    assert 0 < rest.rows < whole.rows
    one, other = th.open(tmp_path / "whole"), th.open(tmp_path / "acts")
    assert torch.equal(one["token"][:], other["token"][:])
    assert difference(other[POINT][:], one[POINT][:]) < 1e-5


def test_a_harvest_that_is_interrupted_while_requests_run_leaves_none_behind(llama, tmp_path, monkeypatch):
    llm, engine, _ = llama
    options = {"rows": "token", "batch_size": 20}
    step, calls = llm.llm_engine.step, []

    def failing():
        calls.append(None)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(llm.llm_engine, "step", failing)
    with pytest.raises(KeyboardInterrupt):
        th.harvest(engine, TOKENS, POINT, to=tmp_path / "acts", **options)
    monkeypatch.undo()
    assert not llm.llm_engine.has_unfinished_requests()
    llm.llm_engine.add_request("77", {"prompt_token_ids": TOKENS[0]}, greedy())  # Somebody else's request.
    th.harvest(engine, TOKENS, POINT, to=tmp_path / "acts", **options)
    store = th.open(tmp_path / "acts")
    assert store["token"][:].tolist() == [token for tokens in TOKENS for token in tokens]


def test_another_harvest_is_not_resumed(llama, tmp_path):
    _, engine, _ = llama
    options = {"to": tmp_path / "acts", "rows": "token"}
    th.harvest(engine, TOKENS[:4], POINT, **options)
    with pytest.raises(th.DifferentHarvest, match="generate"):
        th.harvest(engine, TOKENS[:4], POINT, generate={"max_new_tokens": 2}, **options)
    with engine.edit({POINT: th.add(vector(0))}), pytest.raises(th.DifferentHarvest, match="edits"):
        th.harvest(engine, TOKENS[:4], POINT, **options)


def test_a_harvest_under_edits_that_is_complete_needs_no_request(llama, tmp_path):
    _, engine, model = llama
    for _ in range(2):
        with engine.edit({POINT: th.add(vector(0))}):
            th.harvest(engine, TOKENS[:4], POINT, to=tmp_path / "acts", rows="token")
    expected = reference(model, TOKENS[0], POINT)[POINT][0] + vector(0)
    assert difference(th.open(tmp_path / "acts")[POINT][: len(TOKENS[0])], expected) < 1e-4


def test_rows_can_be_passed_to_a_function(llama):
    _, engine, _ = llama
    seen = []
    done = th.harvest(engine, TOKENS[:10], POINT, to=lambda rows: seen.append(rows[POINT]), rows="token", batch_size=4)
    assert len(seen) == 3
    assert sum(map(len, seen)) == done.rows


@pytest.mark.parametrize(
    ("given", "options", "error", "text"),
    [
        (TOKENS[:2], {}, th.HarvestError, 'rows="token"'),
        (torch.ones(2, 3), {"rows": "token"}, th.HarvestError, "an engine harvests prompts"),
        ([], {"rows": "token"}, th.HarvestError, "got nothing"),
        (TOKENS[:2], {"generate": {"nonsense": 1}}, th.HarvestError, "generate={'nonsense': 1}"),
        (TOKENS[:2], {"generate": {"max_tokens": 3}}, th.HarvestError, "max_new_tokens"),
        (TOKENS[:2], {"generate": {"n": 2, "temperature": 1}}, th.HarvestError, "one sample of each prompt"),
        (TOKENS[:2], {"rows": "token", "grad": lambda output, batch: output}, th.HarvestError, "grad= of th.harvest"),
    ],
)
def test_a_harvest_that_does_not_fit_an_engine_is_an_error(llama, tmp_path, given, options, error, text):
    llm, engine, _ = llama
    with pytest.raises(error, match=text):
        th.harvest(engine, given, POINT, to=tmp_path / "acts", **options)
    with pytest.raises(th.AddressError, match="Did you mean"):
        th.harvest(engine, TOKENS[:2], "model.layers.9@resid", to=tmp_path / "acts", rows="token")
    with pytest.raises(th.AddressError, match="was not reached"):
        th.harvest(engine, TOKENS[:2], "lm_head", to=tmp_path / "acts", rows="token")
    with pytest.raises(th.HarvestError, match=r"attach\(llm\); got a LLM"):
        th.harvest(llm, TOKENS[:2], POINT, to=tmp_path / "acts", rows="token")
    assert not (tmp_path / "acts").exists()
    assert serve(llm, TOKENS[:1], greedy())[0].finished
