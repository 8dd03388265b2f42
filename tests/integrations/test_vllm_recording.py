"""Recordings of an engine of vLLM, compared with transformers on the same weights. `make vllm` runs them."""

import threading

import pytest
import torch
from vllm_engines import (
    RESID,
    as_inputs,
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
)  # fmt: skip

import tenterhook as th
from tenterhook.integrations.vllm import attach

pytestmark = pytest.mark.vllm
LONG, SHORT = 200, 5


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def llama(root):
    folder, model = model_folder(root)
    with running(folder, enable_prefix_caching=True, max_num_seqs=4) as llm:
        with attach(llm) as engine:
            yield llm, engine, model


def test_a_long_prompt_that_is_computed_in_parts_has_all_its_tokens_in_order(llama):
    llm, engine, model = llama
    with engine.record(RESID) as tape:
        outputs = serve(llm, prompts([LONG, SHORT, 70, 120, 64, 65]), greedy())
    for output in outputs:
        assert_same(tape.request(output), model, read_tokens(output))


def test_points_inside_a_forward_arguments_and_attention_are_recorded(llama):
    llm, engine, model = llama
    points = ["model.layers.1.self_attn@z", "model.layers.1.self_attn@q", "model.layers.1.self_attn@v"]
    with engine.record(*points, "model.layers.2:hidden_states", "model.layers.0.mlp:x[2]", "model.norm") as tape:
        outputs = serve(llm, prompts([30, SHORT]), greedy())
    for output in outputs:
        request, tokens = tape.request(output), read_tokens(output)
        expected = reference(model, tokens, *points, "model.layers.1.mlp", "model.layers.0.mlp")
        for point in points:
            assert difference(request[point], expected[point][0].flatten(1)) < 1e-4
        # In vLLM, a layer gets the output of the MLP before it, and adds the residual itself.
        assert difference(request["model.layers.2:hidden_states"], expected["model.layers.1.mlp"][0]) < 1e-4
        assert difference(request["model.layers.0.mlp:x[2]"], expected["model.layers.0.mlp"][0]) < 1e-4


def test_a_recorded_request_does_not_read_the_prefix_cache(llama):
    llm, engine, model = llama
    (prompt,) = prompts([LONG], seed=2)
    serve(llm, [prompt], greedy())
    assert serve(llm, [prompt], greedy())[0].num_cached_tokens == 128
    with engine.record(RESID) as tape:
        (output,) = serve(llm, [prompt], greedy())
    assert output.num_cached_tokens == 0
    assert_same(tape.request(output), model, read_tokens(output))


def test_tokens_from_the_prefix_cache_are_marked_and_have_no_values(llama):
    llm, engine, model = llama
    (prompt,) = prompts([LONG], seed=3)
    serve(llm, [prompt], greedy())
    with engine.record("model.layers.1@resid", prefix_cache="use") as tape:
        (output,) = serve(llm, [prompt], greedy())
    request = tape.request(output)
    assert request.cached_tokens == 128
    with pytest.raises(th.TapeError, match="first 128 tokens came from the prefix cache"):
        request["model.layers.1@resid"]
    first, rows = request.part("model.layers.1@resid")
    expected = reference(model, read_tokens(output), "model.layers.1@resid")["model.layers.1@resid"][0]
    assert first == 128
    assert difference(rows, expected[128:]) < 1e-4


def test_an_aborted_request_keeps_what_was_computed(llama):
    llm, engine, model = llama
    first, second = prompts([20, 30], seed=4)
    with engine.record(RESID) as tape:
        for name, prompt in (("one", first), ("two", second)):
            llm.llm_engine.add_request(name, as_inputs([prompt])[0], greedy(30))
        for _ in range(4):
            llm.llm_engine.step()
        llm.llm_engine.abort_request(["one"])
        (output,) = [each for _ in range(40) for each in llm.llm_engine.step() if each.finished]
    assert_same(tape.request("two"), model, read_tokens(output))
    aborted = tape.request("one")["model.layers.1@resid"]
    assert 20 <= len(aborted) < 30
    assert difference(aborted[:20], reference(model, first, "model.layers.1@resid")["model.layers.1@resid"][0]) < 1e-4


def test_each_sample_of_a_prompt_has_its_own_values(llama):
    from vllm import SamplingParams

    llm, engine, model = llama
    sampling = SamplingParams(temperature=1.0, n=2, max_tokens=5, ignore_eos=True, detokenize=False)
    with engine.record(RESID) as tape:
        (output,) = serve(llm, prompts([12], seed=5), sampling)
    with pytest.raises(th.AmbiguousCall, match="sample=0, sample=1"):
        tape.request(output.request_id)
    for sample in (0, 1):
        assert_same(tape.request(output, sample=sample), model, read_tokens(output, sample))


def test_only_requests_of_the_block_are_recorded_and_the_tape_can_be_read_in_it(llama):
    llm, engine, _ = llama
    (before,) = serve(llm, prompts([9]), greedy())
    with engine.record("model.layers.1@resid") as tape:
        (inside,) = serve(llm, prompts([9]), greedy())
        early = tape.request(inside)["model.layers.1@resid"]
        (later,) = serve(llm, prompts([11]), greedy())
    serve(llm, prompts([9]), greedy())
    assert tape.requests == [inside.request_id, later.request_id]
    assert torch.equal(tape.request(inside)["model.layers.1@resid"], early)
    with pytest.raises(th.NotRecorded, match="It has these requests"):
        tape.request(before)


def test_requests_that_another_thread_runs_are_recorded_and_edited(llama):
    llm, engine, model = llama
    params = engine.params(greedy(), edits={"model.layers.1@resid": th.scale(1.5)})
    with engine.record(RESID) as tape:
        outputs = []
        thread = threading.Thread(target=lambda: outputs.extend(serve(llm, prompts([9, 12]), [params, greedy()])))
        thread.start()
        thread.join()
    ids, streams = generated(model, prompts([9, 12])[0], {"model.layers.1@resid": th.scale(1.5)})
    assert outputs[0].outputs[0].token_ids == ids
    assert difference(tape.request(outputs[0])["model.layers.2@resid"], streams["model.layers.2@resid"]) < 1e-4
    assert_same(tape.request(outputs[1]), model, read_tokens(outputs[1]))


def test_recordings_nest(llama):
    llm, engine, _ = llama
    with engine.record(RESID) as outer:
        with engine.record("model.layers.1@resid") as inner:
            (output,) = serve(llm, prompts([9]), greedy())
        (alone,) = serve(llm, prompts([10]), greedy())
    assert torch.equal(*(tape.request(output)["model.layers.1@resid"] for tape in (outer, inner)))
    assert inner.requests == [output.request_id]
    assert outer.requests == [output.request_id, alone.request_id]


@pytest.mark.parametrize(
    ("point", "error", "text"),
    [
        ("model.layers.9@resid", th.AddressError, "Did you mean"),
        ("model.layers.1", th.AddressError, "model.layers.1@resid, their sum"),
        ("lm_head", th.AddressError, "was not reached"),
        ("model.layers.1@resid#2", th.AddressError, "all its calls"),
        ("model.layers.1.mlp.down_proj.weight", th.AddressError, "is a parameter"),
        ("model.layers.1.self_attn@pattern", th.AddressError, "does not compute the pattern"),
        ("model.layers.1@resid_pre", th.AddressError, "Use @resid of the layer before"),
        ("model.layers.(", th.AddressError, ""),
    ],
)
def test_a_bad_point_is_an_error_before_anything_runs_and_the_engine_lives_on(llama, point, error, text):
    llm, engine, _ = llama
    with pytest.raises(error, match=text), engine.record(point):
        raise AssertionError
    assert len(serve(llm, prompts([9]), greedy())[0].outputs[0].token_ids) == 6


def test_an_engine_is_attached_once_at_a_time(llama):
    llm, _, _ = llama
    with pytest.raises(th.SessionError, match="attached already"):
        attach(llm)


def test_a_closed_engine_leaves_nothing_behind_and_serves_on(llama):
    llm, engine, _ = llama
    worker = llm.llm_engine.model_executor.driver_worker.worker
    engine.params(greedy(), edits={"model.layers.1@resid": th.zero()})
    engine.close()
    engine.close()
    assert not any("forward" in vars(module) for module in worker.get_model().modules())
    assert "execute_model" not in vars(worker.model_runner)
    assert "assign_request_id" not in vars(llm.llm_engine.input_processor)
    assert serve(llm, prompts([9]), greedy())[0].finished
    with pytest.raises(th.SessionError, match="is closed"), engine.record(RESID):
        raise AssertionError
    with attach(llm) as again, again.record(RESID) as tape:
        (output,) = serve(llm, prompts([9]), greedy())
    assert tape.requests == [output.request_id]
