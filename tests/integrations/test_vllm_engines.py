"""Engines of vLLM of many kinds: families of models, preemption, processes and workers. `make vllm` runs them."""

import pytest
from vllm_engines import (
    POINT,
    RESID,
    as_inputs,
    assert_same,
    difference,
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
LONG, SHORT = 200, 5


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt2", "mixtral"])
def test_64_requests_of_mixed_length_have_the_values_of_transformers(root, family):
    folder, model = model_folder(root, family)
    layer = "transformer.h.*" if family == "gpt2" else "model.layers.*"
    with running(folder, alone=False, max_num_seqs=64, max_num_batched_tokens=256) as llm, attach(llm) as engine:
        with engine.record(f"{layer}@resid", f"{layer}@attn_out", f"{layer}@mlp_out") as tape:
            outputs = serve(llm, prompts([3 + 7 * number % 60 for number in range(64)]), greedy())
        assert len(tape.requests) == 64
        for output in outputs:
            assert len(tape.request(output)) == 9
            assert_same(tape.request(output), model, read_tokens(output))


# Layers of the first return the stream itself beside an unused tensor; vLLM runs the second by its transformers code.
@pytest.mark.parametrize("family", ["cohere", "phi"])
def test_layers_that_return_something_else_have_the_values_of_transformers(root, family):
    folder, model = model_folder(root, family)
    (prompt,) = prompts([20])
    ids, streams = generated(model, prompt, {POINT: th.add(vector(0))})
    with running(folder, alone=False) as llm, attach(llm) as engine:
        with engine.record(RESID, "model.layers.*@attn_out", "model.layers.*@mlp_out") as tape:
            outputs = serve(llm, prompts([70, SHORT, 33]), greedy())
        for output in outputs:
            assert len(tape.request(output)) == 9
            assert_same(tape.request(output), model, read_tokens(output))
        with engine.record(RESID) as tape:
            edited, _ = serve(llm, [prompt] * 2, [engine.params(greedy(), edits={POINT: th.add(vector(0))}), greedy()])
        assert edited.outputs[0].token_ids == ids
        for point, rows in streams.items():
            assert difference(tape.request(edited)[point], rows) < 1e-4


def test_requests_that_are_preempted_have_each_token_once(root):
    folder, model = model_folder(root)
    with running(folder, alone=False, num_gpu_blocks_override=4, max_num_seqs=3) as llm, attach(llm) as engine:
        with engine.record(RESID) as tape:
            outputs = serve(llm, prompts([118, 119, 120]), greedy(20))
        computed = sum(len(rows) for chunks in tape._chunks.values() for _, rows in chunks["model.layers.0@resid"].rows)
        assert computed > sum(len(read_tokens(output)) for output in outputs)  # Some were computed twice.
        for output in outputs:
            assert_same(tape.request(output), model, read_tokens(output))


def test_a_preempted_request_keeps_its_edits(root):
    folder, model = model_folder(root)
    tokens = prompts([118, 119, 120])
    with running(folder, alone=False, num_gpu_blocks_override=4, max_num_seqs=3) as llm, attach(llm) as engine:
        params = [engine.params(greedy(20), edits={f"{POINT}#{{{n}..}}": th.add(vector(n))}) for n in range(3)]
        outputs = serve(llm, tokens, params)
    for number, output in enumerate(outputs):
        ids, _ = generated(model, tokens[number], {f"{POINT}#{{{number}..}}": th.add(vector(number))}, count=20)
        assert output.outputs[0].token_ids == ids


def test_an_engine_without_the_extension_is_refused(root):
    folder, _ = model_folder(root)
    with running(folder, alone=False, worker_extension_cls="") as llm:
        with pytest.raises(th.SessionError, match="worker_extension_cls="):
            attach(llm)
        assert serve(llm, prompts([9]), greedy())


def test_an_engine_in_its_own_process_and_with_two_workers_has_the_same_values(root):
    folder, model = model_folder(root)
    for workers in (1, 2):
        with running(folder, alone=False, workers=workers) as llm, attach(llm) as engine:
            points = [RESID, "model.layers.1@mlp_out", "model.layers.1.self_attn@z"]
            with engine.record(*points) as tape:
                outputs = serve(llm, prompts([LONG, SHORT, 70]), greedy())
            for output in outputs:
                assert_same(tape.request(output), model, read_tokens(output))
            params = engine.params(greedy(), edits={POINT: th.add(vector(0))})
            (edited,) = serve(llm, prompts([SHORT]), params)
            ids, _ = generated(model, prompts([SHORT])[0], {POINT: th.add(vector(0))})
            assert edited.outputs[0].token_ids == ids
            with pytest.raises(th.AddressError, match="Did you mean"), engine.record("model.layers.7"):
                raise AssertionError
            if workers == 2:
                with pytest.raises(th.AddressError, match="divided among the 2"):
                    engine.params(greedy(), edits={"model.layers.1.mlp.act_fn": th.zero()})
            assert serve(llm, prompts([SHORT]), greedy())[0].finished


def test_sampling_parameters_do_not_survive_a_restart_of_the_engine(root):
    folder, model = model_folder(root)
    (prompt,) = prompts([SHORT])
    kept = None
    for _ in range(2):
        with running(folder, alone=False) as llm, attach(llm) as engine:
            if kept is not None:
                with pytest.raises(th.EditError, match="another engine"):
                    serve(llm, [prompt], kept)
            kept = engine.params(greedy(), edits={POINT: th.add(vector(0))})
            (output,) = serve(llm, [prompt], kept)
            assert output.outputs[0].token_ids == generated(model, prompt, {POINT: th.add(vector(0))})[0]


def test_a_harvest_is_resumed_by_an_engine_that_was_restarted(root, tmp_path):
    folder, _ = model_folder(root)
    tokens = prompts([20 + number for number in range(12)])
    options = {"rows": "token", "batch_size": 4, "shard_rows": 60, "to": tmp_path / "acts"}
    with running(folder, alone=False) as llm, attach(llm) as engine:
        run, calls = engine.serve, []

        def failing(*args):
            calls.append(args)
            if len(calls) == 3:
                raise KeyboardInterrupt
            return run(*args)

        engine.serve = failing
        with pytest.raises(KeyboardInterrupt):
            th.harvest(engine, tokens, POINT, **options)
    with running(folder, alone=False) as llm, attach(llm) as engine:
        rest = th.harvest(engine, tokens, POINT, **options)
    assert 0 < rest.rows < sum(map(len, tokens))
    store = th.open(tmp_path / "acts")
    assert store["token"][:].tolist() == [token for each in tokens for token in each]


def test_requests_that_run_when_their_engine_is_closed_keep_their_edits(root):
    folder, model = model_folder(root)
    (prompt,) = prompts([20])
    expected, _ = generated(model, prompt, {POINT: th.add(vector(0))}, count=20)
    with running(folder) as llm:
        worker = llm.llm_engine.model_executor.driver_worker.worker
        engine = attach(llm)
        for name in ("one", "two"):
            params = engine.params(greedy(20), edits={POINT: th.add(vector(0))})
            llm.llm_engine.add_request(name, as_inputs([prompt])[0], params)
            finished = [each for _ in range(3) for each in llm.llm_engine.step() if each.finished]
        engine.close()
        with attach(llm) as again, again.record(POINT) as tape:
            finished += [each for _ in range(30) for each in llm.llm_engine.step() if each.finished]
            assert tape.requests == []
            (plain,) = serve(llm, [prompt], greedy())
        assert [each.outputs[0].token_ids for each in finished] == [expected] * 2
        assert_same(tape.request(plain), model, read_tokens(plain))
        serve(llm, [prompt], greedy())
        assert worker.tenterhook_state is None
        assert not any("forward" in vars(module) for module in worker.get_model().modules())


def test_a_closed_engine_ends_its_recordings_and_the_tape_stays(root):
    folder, model = model_folder(root)
    with running(folder, alone=False) as llm:
        engine = attach(llm)
        params = engine.params(greedy(), edits={POINT: th.zero()})
        with engine.record(RESID) as tape:
            (output,) = serve(llm, prompts([9]), greedy())
            engine.close()
        assert_same(tape.request(output), model, read_tokens(output))
        with pytest.raises(th.ClosedSession, match="Attach again"):
            engine.params(greedy(), edits={POINT: th.zero()})
        with pytest.raises(th.EditError, match="was closed or restarted"):
            serve(llm, prompts([9]), params)
        assert serve(llm, prompts([9]), greedy())[0].finished


def test_drafts_of_speculative_decoding_leave_no_rows(root):
    folder, model = model_folder(root)
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
    (repeated,) = prompts([6])
    with running(folder, alone=False, speculative_config=drafts) as llm, attach(llm) as engine:
        with engine.record(RESID) as tape:
            outputs = serve(llm, [repeated * 5, prompts([LONG])[0]], greedy(12))
        with pytest.raises(th.TapeError, match="decodes speculatively"):
            tape.request(outputs[0].request_id)
    for output in outputs:
        assert_same(tape.request(output), model, read_tokens(output))


def test_compiled_code_without_declared_points_is_refused(root):
    folder, _ = model_folder(root)
    with running(folder, alone=False, enforce_eager=False) as llm, attach(llm) as engine:
        with pytest.raises(th.SessionError, match="None was declared"), engine.record(RESID):
            raise AssertionError
        with pytest.raises(th.SessionError, match="enforce_eager=True"):
            engine.params(greedy(), edits={POINT: th.zero()})
        assert serve(llm, prompts([SHORT]), greedy())[0].finished


def test_two_engines_in_one_process_have_declared_points_of_their_own(root):
    folder, model = model_folder(root)
    (prompt,) = prompts([20])
    options = [{"enforce_eager": False, **declare(*points)} for points in ((RESID,), ("model.norm", POINT))]
    with running(folder, **options[0]) as one, running(folder, **options[1]) as other:
        forged = greedy(extra_args={"tenterhook": {"request": "0", "recordings": [], "edits": [{"edits": "?"}]}})
        assert serve(one, [prompt], forged)[0].finished  # Without attach(), what a client sends has no effect.
        first, second = attach(one), attach(other)
        params = first.params(greedy(), edits={POINT: th.add(vector(0))})
        with first.record(RESID) as mine, second.record(POINT) as its:
            (edited,), (plain,) = serve(one, [prompt], params), serve(other, [prompt], greedy())
        ids, streams = generated(model, prompt, {POINT: th.add(vector(0))})
        assert edited.outputs[0].token_ids == ids
        for point, rows in streams.items():
            assert difference(mine.request(edited)[point], rows) < 1e-4
        assert_same(its.request(plain), model, read_tokens(plain))
        first.close()
        second.close()
