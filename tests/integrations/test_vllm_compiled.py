"""Engines of vLLM that run compiled code. `make vllm` runs these tests."""

import pytest
from vllm_engines import (
    POINT,
    RESID,
    assert_same,
    difference,
    generated,
    greedy,
    model_folder,
    prompts,
    read_tokens,
    reference,
    running,
    serve,
    vector,
)  # fmt: skip

import tenterhook as th
from tenterhook.integrations.vllm import attach, declare

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder, model = model_folder(tmp_path_factory.mktemp("models"))
    points = declare(RESID, "model.layers.0@mlp_out", "model.norm")
    with running(folder, enforce_eager=False, **points) as llm:
        with attach(llm) as engine:
            yield llm, engine, model


def test_declared_points_are_recorded_in_compiled_code(llama):
    llm, engine, model = llama
    with engine.record(RESID, "model.layers.0@mlp_out") as tape:
        outputs = serve(llm, prompts([200, 5, 70, 33, 8, 9, 10, 90, 64]), greedy())
    for output in outputs:
        assert len(tape.request(output)) == 4
        assert_same(tape.request(output), model, read_tokens(output))


def test_requests_are_edited_in_compiled_code_and_vectors_change_without_compiling(llama):
    llm, engine, model = llama
    tokens = prompts([10, 80, 33])
    for first in (0, 10):
        edits = [{POINT: th.add(vector(first))}, {f"{POINT}#{{2..}}": th.add(vector(first + 1))}, None]
        params = [engine.params(greedy(), edits=each) if each else greedy() for each in edits]
        with engine.record(RESID) as tape:
            outputs = serve(llm, tokens, params)
        for output, prompt, each in zip(outputs, tokens, edits, strict=True):
            ids, streams = generated(model, prompt, each or {POINT: th.scale(1.0)})
            assert output.outputs[0].token_ids == ids
            for point, rows in streams.items():
                assert (tape.request(output)[point] - rows).norm() < 1e-4 * rows.norm()


@pytest.mark.parametrize("point", ["model.layers.1@mlp_out", "model.layers.1.mlp:x", "model.embed_tokens"])
def test_a_point_that_was_not_declared_is_refused_at_once(llama, point):
    llm, engine, _ = llama
    with pytest.raises(th.SessionError, match="cannot be added after it started"):
        engine.params(greedy(), edits={point: th.zero()})
    with pytest.raises(th.SessionError, match="declare"), engine.record(point):
        raise AssertionError
    assert serve(llm, prompts([9]), greedy())[0].finished


def test_an_engine_lists_and_harvests_the_points_that_were_declared(llama, tmp_path):
    _, engine, model = llama
    assert engine.points("model.layers.*@mlp_out", "model.norm") == ["model.layers.0@mlp_out", "model.norm"]
    tokens = prompts([7, 90, 33])
    th.harvest(engine, tokens, POINT, to=tmp_path / "acts", rows="token")
    store = th.open(tmp_path / "acts")
    for number, prompt in enumerate(tokens):
        rows = store[POINT][:][store["sample"][:] == number]
        assert difference(rows, reference(model, prompt, POINT)[POINT][0]) < 1e-4
    with pytest.raises(th.SessionError, match="cannot be added after it started"):
        th.harvest(engine, tokens, "model.layers.1.mlp", to=tmp_path / "other", rows="token")
    assert not (tmp_path / "other").exists()


def test_the_points_are_part_of_the_key_of_the_compiled_code(llama):
    from vllm.config import VllmConfig

    one, other = (VllmConfig(additional_config=declare(point)["additional_config"]) for point in (POINT, RESID))
    assert one.compute_hash() != other.compute_hash()


def test_declared_points_work_with_two_workers_and_a_prefix_cache(tmp_path):
    folder, model = model_folder(tmp_path)
    options = {"enforce_eager": False, "enable_prefix_caching": True, **declare(RESID)}
    (prompt,) = prompts([200])
    steered, _ = generated(model, prompt, {POINT: th.add(vector(0))})
    with running(folder, alone=False, workers=2, **options) as llm, attach(llm) as engine:
        params = engine.params(greedy(), edits={POINT: th.add(vector(0))})
        plain, edited = serve(llm, [prompt], greedy())[0], serve(llm, [prompt], params)[0]
        again = serve(llm, [prompt], params)[0]
        with engine.record(RESID) as tape:
            outputs = serve(llm, [prompt, prompt[:30]], greedy())
        for output in outputs:
            assert_same(tape.request(output), model, read_tokens(output))
    assert (
        plain.outputs[0].token_ids
        == outputs[0].outputs[0].token_ids
        == generated(model, prompt, {POINT: th.scale(1.0)})[0]
    )
    assert edited.outputs[0].token_ids == again.outputs[0].token_ids == steered
    assert (edited.num_cached_tokens, again.num_cached_tokens) == (0, 128)


def test_declared_points_in_an_eager_engine_do_not_limit_it(tmp_path):
    folder, model = model_folder(tmp_path)
    with running(folder, alone=False, **declare(POINT)) as llm, attach(llm) as engine:
        with engine.record(POINT, "model.layers.1.mlp") as tape:
            (output,) = serve(llm, prompts([9]), greedy())
        assert_same(tape.request(output), model, read_tokens(output))
