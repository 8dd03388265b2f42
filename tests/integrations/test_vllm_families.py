"""The points of each family of models in vLLM, compared with transformers on the same weights. `make vllm` runs them.

Layers of families add to the residual stream in different ways: one after the other or in parallel, before a norm or
after it, and vLLM returns the stream, or two tensors whose sum it is, or the stream beside an unused tensor.
"""

import pytest
import torch
from vllm_engines import (
    RESID,
    continued,
    difference,
    greedy,
    model_folder,
    prompts,
    reference,
    running,
    serve,
    vector,
)  # fmt: skip

import tenterhook as th
from tenterhook.integrations.vllm import attach

pytestmark = pytest.mark.vllm
LAYERS = "model.layers"
ELSEWHERE = dict.fromkeys(("falcon", "falcon_7b", "gpt2", "gptj"), "transformer.h") | {"opt": "model.decoder.layers"}
# vLLM runs these by their code in transformers, and calls what is around the layers `model`.
BY_TRANSFORMERS = {"olmo2": LAYERS, "glm": LAYERS, "gpt_neox": "gpt_neox.layers"}
# In transformers, layers of these also return the pattern of their attention.
WITH_PATTERN = {"falcon", "falcon_7b", "gptj"}
# In transformers or in vLLM, the attention of these has no queries and keys for each head under the names of others.
NO_HEADS = {"falcon", "falcon_7b", "gptj", "gpt_neox", "deepseek_v2"}
HEADS = {"opt": ("k", "v", "z")}
FAMILIES = (
    "llama", "mistral", "qwen2_moe", "qwen3", "qwen3_moe", "gemma2", "gemma3", "cohere", "cohere2", "deepseek_v2",
    "ernie4_5", "exaone4", "falcon", "falcon_7b", "glm4", "glm4_moe", "granite", "granitemoe", "mixtral", "nemotron",
    "olmoe", "opt", "phi3", "stablelm", "gpt2", "gptj",
)  # fmt: skip


def compare(root, family, *, alone):
    """Record and edit a family in an engine, and compare values and tokens with those of transformers."""
    folder, model = model_folder(root, family)
    there = BY_TRANSFORMERS.get(family) or ELSEWHERE.get(family, LAYERS)
    here = LAYERS if family in BY_TRANSFORMERS else there
    points = [f"{there}.*@{name}" for name in ("resid", "attn_out", "mlp_out")]
    if family not in NO_HEADS:
        points += [f"{there}.*.*@{name}" for name in HEADS.get(family, "qkvz")]
    edit = {f"{there}.1@resid": th.add(vector(0), part=0 if family in WITH_PATTERN else None)}
    # The engine may replace methods of the classes of transformers, so this comes first.
    tokens = prompts([70, 5, 33])
    read = [continued(model, each, 6)[0, :-1].tolist() for each in tokens]
    with torch.no_grad(), th.edit(model, edit):
        steered = continued(model, tokens[1], 6)[0].tolist()
    expected = [reference(model, each, *points) for each in read]
    with torch.no_grad(), th.edit(model, edit):
        expected.append(reference(model, steered[:-1], *points))
    with running(folder, alone=alone) as llm, attach(llm) as engine:
        wanted = [each.replace(there, here, 1) for each in points]
        params = engine.params(greedy(), edits={f"{here}.1@resid": th.add(vector(0))})
        with engine.record(*wanted) as tape:
            outputs = serve(llm, [*tokens, tokens[1]], [*[greedy()] * 3, params])
        with (
            pytest.raises(th.AddressError, match="Use @resid of the layer before"),
            engine.record(f"{here}.1@resid_pre"),
        ):
            raise AssertionError
    for output, right, ids in zip(outputs, expected, [*read, steered[:-1]], strict=True):
        assert [*output.prompt_token_ids, *output.outputs[0].token_ids[:-1]] == ids
        request = tape.request(output)
        assert len(request) == len(right) >= 9
        for address, rows in right.items():
            value = rows[0] if isinstance(rows, tuple) else rows
            assert difference(request[address.replace(there, here, 1)], value.reshape(len(ids), -1)) < 1e-4, address


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_of_vllm_has_the_values_of_transformers(tmp_path, family):
    compare(tmp_path, family, alone=True)


@pytest.mark.parametrize("family", BY_TRANSFORMERS)
def test_a_family_that_vllm_runs_by_its_code_in_transformers_has_the_same_values(tmp_path, family):
    compare(tmp_path, family, alone=False)


def test_queries_that_vllm_scales_elsewhere_are_refused(tmp_path):
    folder, _ = model_folder(tmp_path, "opt")
    with running(folder) as llm, attach(llm) as engine:
        with pytest.raises(th.AddressError, match=r"part of the output of .*layers.1.self_attn.qkv_proj"):
            engine.params(greedy(), edits={"model.decoder.layers.1.self_attn@q": th.zero()})
        with pytest.raises(th.AddressError, match="multiplies the queries"), engine.record("**@q"):
            raise AssertionError


def test_a_stream_that_vllm_divides_in_half_precision_is_refused(tmp_path):
    folder, model = model_folder(tmp_path, "deepseek_v2", torch.float16)
    (prompt,) = prompts([20])
    with running(folder, dtype="float16") as llm, attach(llm) as engine:
        for point in (RESID, "model.layers.1@mlp_out", "model.layers.2.mlp.experts"):
            with pytest.raises(th.AddressError, match=r"in float16, vLLM divides the residual stream .* by 2"):
                engine.params(greedy(), edits={point: th.zero()})
        with engine.record("model.layers.*@attn_out") as tape:
            (output,) = serve(llm, [prompt], greedy(1))
    expected = reference(model, prompt, "model.layers.*@attn_out")
    for point, rows in expected.items():
        assert difference(tape.request(output)[point].float(), rows[0].float()) < 2e-2, point


def test_what_each_of_two_workers_has_a_term_of_is_refused(tmp_path):
    folder, model = model_folder(tmp_path, "qwen2_moe")
    whole = [RESID, "model.layers.*@attn_out", "model.layers.*@mlp_out", "model.norm", "model.embed_tokens"]
    terms = [
        "model.layers.1.mlp.shared_expert",
        "model.layers.1.mlp.shared_expert.down_proj",
        "model.layers.1.self_attn.attn",
    ]
    (prompt,) = prompts([20])
    with running(folder, alone=False, workers=2) as llm, attach(llm) as engine:
        for point in terms:
            with pytest.raises(th.AddressError, match="divided among the 2"), engine.record(point):
                raise AssertionError
        with engine.record(*whole) as tape:
            (output,) = serve(llm, [prompt], greedy(1))
    expected = reference(model, prompt, *whole)
    assert len(expected) == 11
    for point, rows in expected.items():
        assert difference(tape.request(output)[point], rows[0]) < 1e-4, point
