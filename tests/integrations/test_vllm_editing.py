"""Edits of an engine of vLLM, compared with transformers under ``th.edit``. `make vllm` runs them."""

from types import SimpleNamespace

import pytest
import torch
from vllm_engines import (
    POINT,
    RESID,
    as_inputs,
    difference,
    generated,
    greedy,
    model_folder,
    prompts,
    running,
    serve,
    vector,
)  # fmt: skip

import tenterhook as th
from tenterhook.integrations.vllm import attach

pytestmark = pytest.mark.vllm
LONG = 200


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def llama(root):
    folder, model = model_folder(root)
    with running(folder, enable_prefix_caching=True, max_num_seqs=8) as llm:
        with attach(llm) as engine:
            yield llm, engine, model


DIRECTIONS = torch.stack([vector(10), vector(11)])
# The edits of a request, and the same for transformers, where a value has a batch dimension.
ONE = {
    "all tokens": ({POINT: th.add(vector(0))}, {POINT: th.add(vector(0))}),
    "the last token of the prompt": (
        {POINT: th.add(vector(1), at=th.at[-1])},
        {f"{POINT}#0": th.add(vector(1), at=th.at[:, -1])},
    ),
    "some tokens of the prompt": (
        {"model.layers.0.mlp": th.zero(at=th.at[2:9])},
        {"model.layers.0.mlp#0": th.zero(at=th.at[:, 2:9])},
    ),
    "listed tokens and columns": (
        {POINT: th.scale(5.0, at=th.at[[0, 3], 8:40])},
        {f"{POINT}#0": [th.scale(5.0, at=th.at[:, 0, 8:40]), th.scale(5.0, at=th.at[:, 3, 8:40])]},
    ),
    "from step 3 on": ({f"{POINT}#{{3..}}": th.add(vector(2))}, {f"{POINT}#{{3..}}": th.add(vector(2))}),
    "step 2 only": ({f"{POINT}#2": th.set(vector(3))}, {f"{POINT}#2": th.set(vector(3))}),
    "a row for each token": (
        {POINT: th.set(torch.stack([vector(4), vector(5)]), at=th.at[4:6])},
        {f"{POINT}#0": th.set(torch.stack([vector(4), vector(5)]), at=th.at[:, 4:6])},
    ),
    "every layer": ({RESID: th.scale(1.3)}, {RESID: th.scale(1.3)}),
    "two edits in order": (
        {POINT: [th.scale(0.5), th.add(vector(6))]},
        {POINT: [th.scale(0.5), th.add(vector(6))]},
    ),
    "clamp and project": (
        {"model.layers.0@mlp_out": th.clamp(-0.1, 0.1), POINT: th.project(vector(7), remove=True)},
        {"model.layers.0@mlp_out": th.clamp(-0.1, 0.1), POINT: th.project(vector(7), remove=True)},
    ),
    "the mean of a row": ({"model.layers.0.mlp": th.mean(dim=-1)}, {"model.layers.0.mlp": th.mean(dim=-1)}),
    "edits that directions describe": (
        {POINT: [th.rotate(DIRECTIONS, 2.0), th.lowrank(DIRECTIONS, DIRECTIONS), th.mask((vector(8) > 0).float())]},
        {POINT: [th.rotate(DIRECTIONS, 2.0), th.lowrank(DIRECTIONS, DIRECTIONS), th.mask((vector(8) > 0).float())]},
    ),
    "an argument": ({"model.layers.1.mlp:x": th.zero()}, {"model.layers.1.mlp:x": th.zero()}),
}


def test_requests_with_edits_of_their_own_equal_transformers_under_the_same_edit(llama):
    llm, engine, model = llama
    tokens = prompts([10 + 9 * number for number in range(len(ONE))])
    params = [engine.params(greedy(), edits=edits) for edits, _ in ONE.values()]
    with engine.record(RESID) as tape:
        together = serve(llm, tokens, params)
    for name, output, prompt, one in zip(ONE, together, tokens, params, strict=True):
        ids, streams = generated(model, prompt, ONE[name][1])
        (alone,) = serve(llm, [prompt], one)
        assert output.outputs[0].token_ids == alone.outputs[0].token_ids == ids, name
        for point, rows in streams.items():
            assert difference(tape.request(output)[point], rows) < 1e-4, (name, point)


def test_16_requests_with_16_vectors_touch_no_other_requests(llama):
    llm, engine, model = llama
    tokens = prompts([20 + number for number in range(20)])
    plain = serve(llm, tokens, greedy())
    params = [engine.params(greedy(), edits={POINT: th.add(vector(number))}) for number in range(16)]
    outputs = serve(llm, tokens, [*params, *[greedy()] * 4])
    for number in range(16):
        ids, _ = generated(model, tokens[number], {POINT: th.add(vector(number))})
        assert outputs[number].outputs[0].token_ids == ids
    for number in range(16, 20):
        assert outputs[number].outputs[0].token_ids == plain[number].outputs[0].token_ids


def test_an_edit_of_all_requests_holds_for_the_requests_of_its_block(llama):
    llm, engine, model = llama
    tokens = prompts([10, 40])
    plain = [each.outputs[0].token_ids for each in serve(llm, tokens, greedy())]
    own = engine.params(greedy(), edits={"model.layers.0@resid": th.scale(0.5)})
    with engine.edit({POINT: th.add(vector(0))}):
        outputs = serve(llm, tokens, [greedy(), own])
    ids, _ = generated(model, tokens[0], {POINT: th.add(vector(0))})
    both, _ = generated(model, tokens[1], {POINT: th.add(vector(0)), "model.layers.0@resid": th.scale(0.5)})
    assert [each.outputs[0].token_ids for each in outputs] == [ids, both]
    assert [each.outputs[0].token_ids for each in serve(llm, tokens, greedy())] == plain


def test_an_edited_prefix_is_never_shared_with_other_requests(llama):
    llm, engine, model = llama
    (prompt,) = prompts([LONG], seed=9)
    expected, _ = generated(model, prompt, {POINT: th.scale(1.0)})
    for number in range(2):
        edits = {POINT: th.add(vector(number))}
        steered, _ = generated(model, prompt, edits)
        params = engine.params(greedy(), edits=edits)
        first, again = serve(llm, [prompt], params)[0], serve(llm, [prompt], params)[0]
        plain = serve(llm, [prompt], greedy())[0]
        assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 128)  # The same edit may share its prefix.
        assert first.outputs[0].token_ids == again.outputs[0].token_ids == steered
        assert plain.outputs[0].token_ids == expected
        with engine.edit(edits):
            assert serve(llm, [prompt], greedy())[0].outputs[0].token_ids == steered


def test_an_edit_that_counts_from_the_end_shares_no_prefix_with_a_longer_prompt(llama):
    llm, engine, model = llama
    (prompt,) = prompts([LONG], seed=10)
    params = engine.params(greedy(), edits={POINT: th.add(vector(0, 30.0), at=th.at[-1])})
    for length in (128, LONG):
        (output,) = serve(llm, [prompt[:length]], params)
        ids, _ = generated(model, prompt[:length], {f"{POINT}#0": th.add(vector(0, 30.0), at=th.at[:, -1])})
        assert output.outputs[0].token_ids == ids


def test_an_aborted_request_takes_its_edits_with_it(llama):
    llm, engine, model = llama
    tokens = prompts([20, 150, 40], seed=11)
    with engine.record(POINT) as tape:
        for number, prompt in enumerate(tokens):
            params = engine.params(greedy(8), edits={POINT: th.add(vector(number))})
            llm.llm_engine.add_request(f"aborted-{number}", as_inputs([prompt])[0], params)
        llm.llm_engine.step()  # The second prompt is computed in part.
        llm.llm_engine.abort_request(["aborted-0", "aborted-1"])
        (output,) = [each for _ in range(20) for each in llm.llm_engine.step() if each.finished]
    ids, streams = generated(model, tokens[2], {POINT: th.add(vector(2))}, count=8)
    assert output.outputs[0].token_ids == ids
    assert difference(tape.request(output)[POINT], streams[POINT]) < 1e-4
    (plain,) = serve(llm, [tokens[1]], greedy(8))
    assert plain.outputs[0].token_ids == generated(model, tokens[1], {POINT: th.scale(1.0)}, count=8)[0]
    assert not llm.llm_engine.model_executor.driver_worker.worker.tenterhook_state.requests


def test_saved_edits_are_edits_of_a_request(llama, tmp_path):
    llm, engine, model = llama
    th.save_edits(tmp_path / "calm.edits", {POINT: th.add(vector(0))})
    (output,) = serve(llm, prompts([12]), engine.params(greedy(), edits=th.load_edits(tmp_path / "calm.edits")))
    assert output.outputs[0].token_ids == generated(model, prompts([12])[0], {POINT: th.add(vector(0))})[0]


def test_many_sets_of_edits_do_not_stay_in_the_workers(llama):
    llm, engine, _ = llama
    state = llm.llm_engine.model_executor.driver_worker.worker.tenterhook_state
    for number in range(300):
        engine.params(greedy(), edits={"model.layers.2.mlp": th.scale(float(number))})
    assert len(state._known_edits) <= 256


@pytest.mark.parametrize(
    ("edits", "error", "text"),
    [
        ({POINT: th.add(torch.ones(63))}, th.EditError, r"float32\[63\]"),
        ({"model.layers.1@resit": th.zero()}, th.AddressError, "no such meaning"),
        ({POINT: th.noise()}, th.EditError, "cannot be applied per request"),
        ({POINT: th.mean()}, th.EditError, "cannot be applied per request"),
        ({"model.layers.1.mlp": th.skip()}, th.EditError, "cannot be applied per request"),
        ({POINT: lambda value: value}, th.EditError, "a function is code"),
        ({POINT: th.zero(at=th.at[::-1])}, th.EditError, "goes forward"),
        ({POINT: th.zero(at=th.at[:, -1])}, th.EditError, "without a batch dimension"),
        ({POINT: th.set(torch.ones(4, 64))}, th.EditError, "at= must name as many tokens"),
        ({f"{POINT}#-1": th.zero()}, th.AddressError, "last; count from #0"),
        ({POINT: th.mask(torch.ones(2, 64))}, th.EditError, "does not broadcast"),
        ({POINT: th.add([1.0, 2.0])}, th.EditError, "does not fit"),
        ({POINT: th.zero}, th.EditError, r"Call it: th.zero\(...\)"),
        ({POINT: torch.ones(64)}, th.EditError, "use th.set"),
        ({}, th.EditError, "dict of address to ready edit"),
        ("calm.edits", th.EditError, r"th.load_edits\(path\); got 'calm.edits'"),
    ],
)
def test_a_bad_edit_is_an_error_of_the_caller_and_the_engine_lives_on(llama, edits, error, text):
    llm, engine, _ = llama
    with pytest.raises(error, match=text):
        engine.params(greedy(), edits=edits)
    with pytest.raises(error, match=text), engine.edit(edits):
        raise AssertionError
    assert len(serve(llm, prompts([9]), greedy())[0].outputs[0].token_ids) == 6


def test_parameters_that_are_not_those_of_one_request_are_refused(llama):
    _, engine, _ = llama
    edits = {POINT: th.zero()}
    with pytest.raises(TypeError, match="SamplingParams of one request; got a list"):
        engine.params([greedy()], edits=edits)
    with pytest.raises(th.EditError, match="all edits in one dict"):
        engine.params(engine.params(greedy(), edits=edits), edits=edits)


def test_a_token_before_the_prompt_is_an_error_when_the_request_is_added(llama):
    llm, engine, _ = llama
    params = engine.params(greedy(), edits={POINT: th.zero(at=th.at[-20])})
    with pytest.raises(th.EditError, match="has 9 tokens only"):
        serve(llm, prompts([9]), params)
    assert serve(llm, prompts([30]), params)[0].finished


def test_a_token_that_is_never_read_is_an_error_when_the_request_is_added(llama):
    llm, engine, _ = llama
    params = engine.params(greedy(), edits={POINT: th.zero(at=th.at[20])})
    with pytest.raises(th.EditError, match="no token 20, counted from 0: the request reads 14 at most"):
        serve(llm, prompts([30, 9]), params)
    assert serve(llm, prompts([30]), params)[0].finished
    with pytest.raises(th.EditError, match="would have no effect"):
        serve(llm, prompts([9]), engine.params(greedy(3), edits={f"{POINT}#{{3..}}": th.zero()}))


def test_an_edit_of_a_block_without_an_effect_is_an_error_at_its_end(llama):
    llm, engine, _ = llama
    with pytest.raises(th.NeverReached, match="no request was added"), engine.edit({POINT: th.zero()}):
        pass
    with pytest.raises(th.NeverReached, match="no token 50"), engine.edit({POINT: th.zero(at=th.at[50])}):
        assert serve(llm, prompts([9]), greedy())[0].finished
    with engine.edit({POINT: th.zero(at=th.at[50])}):
        assert len(serve(llm, prompts([9, 60]), greedy())) == 2


def test_parameters_of_an_engine_that_was_restarted_are_refused(root, llama):
    from vllm import SamplingParams

    llm, engine, _ = llama
    other = engine.params(greedy(), edits={POINT: th.zero()})
    other.extra_args["tenterhook"].admission = SimpleNamespace(is_open=True)
    with pytest.raises(th.EditError, match="another engine"):
        serve(llm, prompts([9]), other)
    with pytest.raises(th.EditError, match="made by engine"):
        serve(llm, prompts([9]), SamplingParams(extra_args={"tenterhook": {"edits": []}}))
    assert serve(llm, prompts([9]), greedy())[0].finished
