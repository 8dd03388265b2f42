"""The compiler that people use, on small real models, and CUDA graphs where there is a GPU."""

import pytest
import torch
from compiled_toys import X, close, needs_traced_hooks, net, outer
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import tenterhook as th

# Dynamo's own, as it looks at tensors with a history, and the compiler's, which uses what PyTorch has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute", "ignore::DeprecationWarning")

IDS = torch.arange(12).reshape(2, 6)


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def gpt2():
    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=32, n_positions=16, use_cache=False)
    config._attn_implementation = "eager"
    return GPT2LMHeadModel(config).eval()


def llama():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, use_cache=False, **sizes)).eval()


@needs_traced_hooks
def test_a_small_model_is_recorded_edited_and_trained():
    call, target, at = outer(net(), fullgraph=True)
    plain = net()

    def run(model, call, at=""):
        with th.record(model, f"{at}b0.a", f"{at}b1:y", f"{at}b1", grad=True) as tape:
            with th.edit(model, {f"{at}b1": th.add(torch.ones(3))}, grad={f"{at}b1.a": lambda g: g * 2}):
                call(X).pow(2).sum().backward()
        return tape

    wanted, found = run(plain, plain), run(target, call, at)
    for name in wanted:
        assert close(found[at + name], wanted[name])
        assert close(found.grad[at + name], wanted.grad[name])
    assert close(target._orig_mod.b0.a.weight.grad, plain.b0.a.weight.grad)


POINTS = {
    gpt2: [
        "transformer.h.*",
        "transformer.h.1.attn:eager_attention_forward():attn_weights",
        "transformer.h.0.mlp:in",
        "lm_head",
    ],
    llama: ["model.layers.*", "model.layers.1.mlp.act_fn", "model.layers.0.self_attn:hidden_states", "lm_head"],
}


def graphs_without_a_session(make, dynamic, inputs):
    """What Dynamo makes of the model itself: its guards on arguments by name may want a second graph for new shapes."""
    stats = torch._dynamo.utils.counters["stats"]
    begun = stats["unique_graphs"]
    call = torch.compile(make(), fullgraph=True, dynamic=dynamic, backend="eager")
    with torch.no_grad():
        for ids in inputs:
            call(input_ids=ids)
    made = stats["unique_graphs"] - begun
    torch._dynamo.reset()
    return made


@pytest.mark.slow
@pytest.mark.parametrize("make", [gpt2, llama], ids=["gpt2", "llama"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_a_language_model_is_recorded_in_one_graph(make, dynamic):
    plain, model = make(), make()
    inputs = (IDS, IDS[:, :5].contiguous()) if dynamic else (IDS, IDS.flip(0))
    usual = graphs_without_a_session(make, dynamic, inputs)
    call = torch.compile(model, fullgraph=True, dynamic=dynamic)
    session = th.record(model, *POINTS[make])
    with torch.no_grad(), session as tape, th.record(plain, *POINTS[make]) as wanted:
        for ids in inputs:
            call(input_ids=ids)
            plain(input_ids=ids)
    assert list(tape) == list(wanted)
    for name in wanted:
        torch.testing.assert_close(tape[name], wanted[name], atol=1e-4, rtol=1e-3)
    assert session.compiled.breaks == 0
    assert session.compiled.graphs == usual


@pytest.mark.slow
def test_a_language_model_is_trained_with_its_gradients_recorded():
    plain, model = gpt2(), gpt2()
    call = torch.compile(model, fullgraph=True)
    with (
        th.record(model, "transformer.h.*", grad=True) as tape,
        th.record(plain, "transformer.h.*", grad=True) as wanted,
    ):
        call(input_ids=IDS).logits.pow(2).sum().backward()
        plain(input_ids=IDS).logits.pow(2).sum().backward()
    for name in wanted.grad:
        torch.testing.assert_close(tape.grad[name], wanted.grad[name], atol=1e-4, rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "block"), [(gpt2, "transformer.h.1"), (llama, "model.layers.1")], ids=["gpt2", "llama"]
)
def test_a_language_model_is_replayed_in_one_graph(make, block):
    model = make()
    model.set_attn_implementation("eager")
    call = torch.compile(model, fullgraph=True)
    with torch.no_grad():
        with th.record(model, replay=True) as tape:
            model(input_ids=IDS, use_cache=False)
        with th.edit(model, {block: th.scale(2.0)}):
            wanted = model(input_ids=IDS, use_cache=False).logits
        session = th.replay(model, tape)
        with session, th.edit(model, {block: th.scale(2.0)}):
            found = [call(input_ids=IDS, use_cache=False).logits for _ in range(2)]
    for each in found:
        torch.testing.assert_close(each, wanted, atol=1e-4, rtol=1e-3)
    assert session.served.calls[block] == 2
    assert session.compiled.graphs == 1
    assert session.compiled.breaks == 0


@pytest.mark.slow
def test_a_model_that_takes_another_way_when_it_is_compiled_is_replayed_from_a_compiled_run():
    model, block = llama(), "model.layers.1"  # Transformers leave out its mask where nothing is traced.
    call = torch.compile(model, backend="aot_eager")
    with torch.no_grad(), th.edit(model, {block: th.scale(2.0)}):
        wanted = model(input_ids=IDS).logits
    for run, served in ((model, False), (call, True)):
        with torch.no_grad():
            with th.record(model, replay=True) as tape:
                run(input_ids=IDS)
            session = th.replay(model, tape)
            with session, th.edit(model, {block: th.scale(2.0)}):
                torch.testing.assert_close(call(input_ids=IDS).logits, wanted, atol=1e-5, rtol=1e-4)
        assert (block in session.served.calls) is served
        assert (block in session.served.computed) is not served
        assert session.compiled.breaks == 0


@pytest.mark.filterwarnings("ignore::UserWarning")  # The compiler's own, of sizes as small as these and of its tuning.
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_cuda_graphs_do_not_rewrite_what_was_recorded(mode):
    model = gpt2().to("cuda", torch.bfloat16)
    call = torch.compile(model, mode=mode, fullgraph=True)
    inputs = [IDS.cuda(), IDS.flip(0).cuda(), IDS.cuda() + 1]
    with torch.no_grad():
        for ids in inputs:
            call(input_ids=ids)
        with th.record(model, "transformer.h.*") as tape:
            for ids in inputs:
                call(input_ids=ids)
        with th.record(model, "transformer.h.*") as wanted:
            for ids in inputs:
                model(input_ids=ids)
    for name in wanted:
        torch.testing.assert_close(tape[name], wanted[name], atol=2e-2, rtol=2e-2)
