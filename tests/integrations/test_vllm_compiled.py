"""Engines of vLLM that run compiled code. `make vllm` runs these tests."""

import pytest
from vllm_engines import (
    POINT,
    RESID,
    assert_same,
    generated,
    greedy,
    model_folder,
    prompts,
    read_tokens,
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


def test_the_points_are_part_of_the_key_of_the_compiled_code(llama):
    from vllm.config import VllmConfig

    one, other = (VllmConfig(additional_config=declare(point)["additional_config"]) for point in (POINT, RESID))
    assert one.compute_hash() != other.compute_hash()
