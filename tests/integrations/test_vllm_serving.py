"""Asynchronous engines, and the OpenAI-compatible server of vLLM. `make vllm` runs these tests."""

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest
from vllm_engines import (
    POINT,
    RESID,
    WORKER,
    assert_same,
    difference,
    generated,
    greedy,
    model_folder,
    prompts,
    read_tokens,
    reference,
    vector,
)  # fmt: skip

import tenterhook as th
from tenterhook.integrations.vllm import attach

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return model_folder(tmp_path_factory.mktemp("models"))


async def answer(client, prompt, sampling, name):
    async for output in client.generate({"prompt_token_ids": prompt}, sampling, name):
        last = output
    return last


async def use(client, model):
    engine = attach(client)
    tokens = prompts([20, 30, 40])
    own = await engine.params(greedy(), edits={POINT: th.add(vector(0))})
    with pytest.raises(th.AddressError, match="Did you mean"):
        await engine.params(greedy(), edits={"model.layers.9@resid": th.zero()})
    with pytest.raises(th.SessionError, match="async with"), engine.record(RESID):
        raise AssertionError
    async with engine.record(RESID) as tape:
        asked = [answer(client, each, own if each is tokens[0] else greedy(), f"r{len(each)}") for each in tokens]
        outputs = await asyncio.gather(*asked)
    edits = [{POINT: th.add(vector(0))}, {POINT: th.scale(1.0)}, {POINT: th.scale(1.0)}]
    for output, prompt, edit in zip(outputs, tokens, edits, strict=True):
        ids, streams = generated(model, prompt, edit)
        assert output.outputs[0].token_ids == ids
        for point, rows in streams.items():
            assert (tape.request(output)[point] - rows).norm() < 1e-4 * rows.norm()
    assert_same(tape.request(outputs[1]), model, read_tokens(outputs[1]))
    # A client that leaves: its request has the rows until then, and others are not affected.
    async with engine.record(POINT) as tape:
        leaving = client.generate({"prompt_token_ids": tokens[1]}, greedy(200), "left")
        await anext(leaving)
        await leaving.aclose()
        stayed = await answer(client, tokens[0], greedy(), "stayed")
    assert_same(tape.request(stayed), model, read_tokens(stayed))
    left = tape.request("left")[POINT]
    assert len(tokens[1]) <= len(left) < len(tokens[1]) + 199
    assert difference(left[: len(tokens[1])], reference(model, tokens[1], POINT)[POINT][0]) < 1e-4
    # A request that runs when the block ends keeps its edits to its last token.
    async with engine.edit({POINT: th.add(vector(0))}):
        late = client.generate({"prompt_token_ids": tokens[1]}, greedy(20), "late")
        await anext(late)
    *_, output = [each async for each in late]
    plain = await answer(client, tokens[1], greedy(20), "plain")
    assert output.outputs[0].token_ids == generated(model, tokens[1], {POINT: th.add(vector(0))}, count=20)[0]
    assert plain.outputs[0].token_ids == generated(model, tokens[1], {POINT: th.scale(1.0)}, count=20)[0]
    await engine.close()


def test_an_asynchronous_engine_records_and_edits_concurrent_requests(llama):
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    folder, model = llama
    options = {"dtype": "float32", "skip_tokenizer_init": True, "enforce_eager": True, "max_model_len": 256}
    arguments = AsyncEngineArgs(str(folder), worker_extension_cls=WORKER, max_num_seqs=8, **options)

    async def run():
        client = AsyncLLM.from_engine_args(arguments)
        try:
            await use(client, model)
        finally:
            client.shutdown()

    asyncio.run(run())


def server_command(folder, port):
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--port", str(port)]
    command += ["--host", "127.0.0.1", "--dtype", "float32", "--skip-tokenizer-init", "--enforce-eager"]
    command += ["--max-model-len", "256", "--max-num-seqs", "8", "--served-model-name", "llama"]
    return [*command, "--middleware", "tenterhook.integrations.vllm.SavedEdits"]


def test_a_server_without_the_extension_does_not_start(llama, tmp_path):
    folder, _ = llama
    options = {"env": {**os.environ, "TENTERHOOK_EDITS": str(tmp_path)}, "capture_output": True, "text": True}
    ended = subprocess.run(server_command(folder, 0), **options, check=False, timeout=300)
    assert ended.returncode != 0
    assert "have no tenterhook in them" in ended.stdout + ended.stderr


@pytest.fixture(scope="module")
def server(llama, tmp_path_factory):
    """The server with a folder of saved edits, as its address."""
    folder, _ = llama
    edits = tmp_path_factory.mktemp("edits")
    th.save_edits(edits / "calm.edits", {POINT: th.add(vector(0))})
    th.save_edits(edits / "other.edits", {"model.layers.9@resid": th.zero()})
    outside = tmp_path_factory.mktemp("outside") / "secret.edits"
    th.save_edits(outside, {POINT: th.zero()})
    (edits / "link.edits").symlink_to(outside)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [*server_command(folder, port), "--worker-extension-cls", WORKER]
    process = subprocess.Popen(command, env={**os.environ, "TENTERHOOK_EDITS": str(edits)})
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(3000):  # Ten minutes, for a machine that does much else.
            try:
                urllib.request.urlopen(f"{address}/health").close()
                break
            except OSError:
                assert process.poll() is None
                time.sleep(0.2)
        yield address
    finally:
        process.terminate()
        process.wait(60)


def complete(server, prompt, **extra):
    body = {"model": "llama", "prompt": prompt, "max_tokens": 6, "temperature": 0, "ignore_eos": True, **extra}
    body |= {"return_token_ids": True, "detokenize": False}
    request = urllib.request.Request(
        f"{server}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request) as answered:
            return json.load(answered)["choices"][0]["token_ids"]
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_a_request_of_the_server_names_a_saved_edit(llama, server):
    _, model = llama
    (prompt,) = prompts([20])
    plain = generated(model, prompt, {POINT: th.scale(1.0)})[0]
    edited = generated(model, prompt, {POINT: th.add(vector(0))})[0]
    assert plain != edited
    assert complete(server, prompt) == plain
    assert complete(server, prompt, vllm_xargs={"tenterhook_edits": "calm"}) == edited
    assert complete(server, prompt, vllm_xargs={"tenterhook_edits": ["calm"]}) == edited
    assert complete(server, prompt) == plain


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"tenterhook_edits": "nothing"}, "This server has: calm, other"),
        ({"tenterhook_edits": "link"}, "there is no saved edit"),
        ({"tenterhook_edits": "../outside/secret"}, "there is no saved edit"),
        ({"tenterhook_edits": "other"}, "does not fit this model"),
        ({"tenterhook_edits": 3}, "is the name of a saved edit"),
        ({"tenterhook": "gASV"}, "Clients of a server name a saved edit"),
    ],
)
def test_a_client_that_names_something_else_gets_an_error_and_the_server_lives_on(server, given, text):
    (prompt,) = prompts([20])
    code, said = complete(server, prompt, vllm_xargs=given)
    assert code == 400
    assert text in said
    assert len(complete(server, prompt)) == 6
