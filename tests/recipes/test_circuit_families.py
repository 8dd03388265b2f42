"""Circuits of families whose streams are unusual, beside patches by PyTorch's own hooks."""

import re

import pytest
import torch
from lm_toys import gpt2, ids, neox
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import tenterhook as th
from tenterhook.recipes import circuit
from tenterhook.recipes._residual_heads import cores, layout_of

CLEAN, CORRUPT = ids(0, 2, 5), ids(1, 2, 5)
LLAMA = {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
LLAMA |= {"vocab_size": 50, "max_position_embeddings": 64, "initializer_range": 0.2, "eos_token_id": None}
BLOOM = {"n_layer": 2, "hidden_size": 16, "n_head": 2, "vocab_size": 50, "initializer_range": 0.2}
OPT = {"num_hidden_layers": 2, "hidden_size": 16, "ffn_dim": 32, "num_attention_heads": 2, "vocab_size": 50}
OPT |= {"max_position_embeddings": 64, "word_embed_proj_dim": 16, "init_std": 0.2, "eos_token_id": 2}
MPT = {"n_layers": 2, "d_model": 16, "n_heads": 2, "vocab_size": 50, "max_seq_len": 64, "expansion_ratio": 2}
MPT |= {"initializer_range": 0.2}
TIMES = 0.3
GRANITE = LLAMA | {"residual_multiplier": TIMES, "embedding_multiplier": 3.0, "num_key_value_heads": 1}
# By family: its sizes, its layers, the writers in a layer, the norms that read, the last norm, and the scale.
FAMILIES = {
    "opt": (
        OPT, "model.decoder.layers", ("self_attn.out_proj", "fc2"), ("self_attn_layer_norm", "final_layer_norm"),
        "model.decoder.final_layer_norm", 1,
    ),
    "granite": (
        GRANITE, "model.layers", ("self_attn.o_proj", "mlp"), ("input_layernorm", "post_attention_layernorm"),
        "model.norm", TIMES,
    ),
    "bloom": (
        BLOOM, "transformer.h", ("self_attention.dense", "mlp.dense_4h_to_h"),
        ("input_layernorm", "post_attention_layernorm"), "transformer.ln_f", 1,
    ),
    "mpt": (
        MPT, "transformer.blocks", ("attn.out_proj", "ffn.down_proj"), ("norm_1", "norm_2"), "transformer.norm_f", 1,
    ),
}  # fmt: skip
# The module that computes the queries, and the first channel of the query of the second head.
HEADS = {
    "opt": ("self_attn.q_proj", 8), "granite": ("self_attn.q_proj", 8), "mpt": ("attn.Wqkv", 8),
    "bloom": ("self_attention.query_key_value", 24),
}  # fmt: skip


def made(name, **more):
    torch.manual_seed(0)
    sizes = FAMILIES[name][0] if name in FAMILIES else LLAMA
    config = AutoConfig.for_model(name, pad_token_id=0, bos_token_id=1, **sizes, **more)
    return AutoModelForCausalLM.from_config(config).eval().double()


def metric(output):
    return output.logits[:, -1, 3] - output.logits[:, -1, 5]


def edges(model, method="eap", **options):
    pair = ({"input_ids": each, "use_cache": False} for each in (CLEAN, CORRUPT))
    return circuit.edges(model, *pair, metric=metric, method=method, progress=False, **options)


class ByHooks:
    """A model whose parts are read and patched by PyTorch's own hooks."""

    def __init__(self, model, name):
        self.model, self.name = model, name
        _, layers, (attention, mlp), (first, second), last, self.scale = FAMILIES[name]
        self.writers, self.readers = {}, {}
        for number, layer in enumerate(model.get_submodule(layers)):
            for kind, writer, reader in (("attn", attention, first), ("mlp", mlp, second)):
                self.writers[f"{kind}{number}"] = layer.get_submodule(writer)
                self.readers[f"{kind}{number}"] = layer.get_submodule(reader)
        self.readers["logits"] = model.get_submodule(last)
        self.start = model.get_submodule(f"{layers}.0")

    def run(self, tokens, hooks=()):
        handles = [getattr(module, f"register_forward_{kind}")(hook) for module, kind, hook in hooks]
        try:
            return metric(self.model(tokens, use_cache=False))
        finally:
            for handle in handles:
                handle.remove()

    def values(self, tokens):
        """Return what each part writes, what each reads, and what the writers are given."""
        written, read, given = {}, {}, {}

        def keep_start(_module, args, kwargs):
            written["embed"] = args[0] if args else kwargs["hidden_states"]

        hooks = []
        for name, module in self.writers.items():

            def keep(_module, args, output, name=name):
                written[name], given[name] = output.view(written["embed"].shape) * self.scale, args[0]

            hooks.append((module, "hook", keep))
        for name, module in self.readers.items():
            hooks.append((module, "pre_hook", lambda _m, args, name=name: read.__setitem__(name, args[0])))
        handle = self.start.register_forward_pre_hook(keep_start, with_kwargs=True)
        self.run(tokens, hooks)
        handle.remove()
        return written, read, given

    def patched(self, receiver, change, channels=None):
        """Return the metric of the corrupt run, in which a receiver reads its stream plus a change."""
        norm = self.readers[receiver.partition(".")[0]]
        if channels is None:
            return self.run(CORRUPT, [(norm, "pre_hook", lambda _m, args: (args[0] + change.view(args[0].shape),))])
        number = int(receiver.partition(".")[0].removeprefix("attn"))
        layer = self.model.get_submodule(FAMILIES[self.name][1])[number]
        projection, seen = layer.get_submodule(HEADS[self.name][0]), []
        keep = (norm, "pre_hook", lambda _m, args: seen.append(args[0]))

        def put(_module, _args, output):
            if len(seen) != 1:
                return output
            normed = norm(seen[0] + change)
            own = nn.functional.linear(normed, projection.weight, projection.bias)[..., channels]
            return torch.cat([output[..., : channels.start], own, output[..., channels.stop :]], -1)

        return self.run(CORRUPT, [keep, (projection, "hook", put)])


def truth(hand, change, receiver, channels=None):
    """Return the effect of a patched edge, and its derivative at no change."""
    share = torch.zeros((), dtype=torch.float64, requires_grad=True)
    each = [
        torch.autograd.grad(value, share, retain_graph=True)[0]
        for value in hand.patched(receiver, share * change, channels)
    ]
    with torch.no_grad():
        exact = hand.patched(receiver, change, channels) - hand.run(CORRUPT)
    return exact, torch.stack(each)


def changes(hand):
    with torch.no_grad():
        one, other = hand.values(CLEAN), hand.values(CORRUPT)
    return [
        {name: value - after[name] for name, value in before.items()} for before, after in zip(one, other, strict=True)
    ]


@pytest.mark.parametrize("name", FAMILIES)
def test_edges_of_layers_are_those_of_patches_by_hooks(name):
    model = made(name)
    hand = ByHooks(model, name)
    written, read, _ = changes(hand)
    found, exact = edges(model, nodes="layers"), edges(model, "exact", nodes="layers")
    assert set(found.senders) == set(written)
    assert torch.allclose(sum(written.values()), read["logits"].view(written["embed"].shape), atol=1e-12)
    for sender, receiver, *_ in found.table:
        effect, derivative = truth(hand, written[sender], receiver)
        place = found.senders.index(sender), found.receivers.index(receiver)
        assert torch.allclose(exact.scores[:, *place], effect, atol=1e-10), (sender, receiver)
        assert torch.allclose(found.scores[:, *place], derivative, atol=1e-10), (sender, receiver)
    assert len(found.table) == 15


@pytest.mark.parametrize("name", HEADS)
def test_edges_of_heads_are_those_of_patches_by_hooks(name):
    model = made(name)
    hand = ByHooks(model, name)
    written, _, given = changes(hand)
    for layer in range(2):
        weight = hand.writers[f"attn{layer}"].weight
        heads = given[f"attn{layer}"].unflatten(-1, (2, -1))
        for head, part in enumerate(weight.detach().unflatten(1, (2, -1)).unbind(1)):
            written[f"attn{layer}.{head}"] = heads[..., head, :] @ part.T * hand.scale
    found, exact = edges(model), edges(model, "exact")
    cases = [
        ("embed", "attn0.1.q"),
        ("attn0.0", "attn1.1.q"),
        ("mlp0", "attn1.0.q"),
        ("attn0.1", "mlp0"),
        ("attn1.0", "logits"),
    ]
    for sender, receiver in cases:
        head = receiver.split(".")[1:2]
        first = int(head[0]) * HEADS[name][1] if head else 0
        channels = slice(first, first + 8) if head else None
        effect, derivative = truth(hand, written[sender], receiver, channels)
        place = found.senders.index(sender), found.receivers.index(receiver)
        assert torch.allclose(exact.scores[:, *place], effect, atol=1e-10), (sender, receiver)
        assert torch.allclose(found.scores[:, *place], derivative, atol=1e-10), (sender, receiver)


@pytest.mark.parametrize("make", [gpt2, neox], ids=["parts", "heads"])
def test_heads_that_gradients_find_are_those_of_the_attention_call(make):
    model = make().double()
    graph = edges(model).task.graph
    receivers = {each.name: each for each in graph.receivers if each.projection is not None}
    senders = [each for each in graph.senders if each.head == 0]
    projections = [[receivers[f"attn{number}.0.q"].consumer] for number in range(len(senders))]
    found = cores(model, CLEAN, projections, [each.point for each in senders])
    for number, core in enumerate(found):
        layout = layout_of(*core)
        for part in "qkv":
            for head, channels in enumerate(layout[part][1]):
                assert receivers[f"attn{number}.{head}.{part}"].channels == channels


@pytest.mark.parametrize("shared", [True, False])
def test_heads_that_gradients_cannot_find_are_refused(shared):
    torch.manual_seed(0)
    leaf = torch.randn(2, 4, 8 if shared else 12, dtype=torch.float64, requires_grad=True)
    if shared:  # Two heads have one key and one value.
        q, k, v = leaf[..., :4].unflatten(-1, (2, 2)), leaf[..., None, 4:6], leaf[..., None, 6:]
        why = "share keys"
    else:  # The result of a head depends on the query of the other.
        q, k, v = (leaf[..., 4 * part : 4 * part + 4].unflatten(-1, (2, 2)) for part in range(3))
        q = q + q.flip(-2)
        why = "overlap|not a query"
    weights = torch.einsum("bthc,bshc->bhts", q, k.expand_as(q)).softmax(-1)
    result = torch.einsum("bhts,bshc->bthc", weights, v.expand_as(q)).flatten(-2)
    assert re.search(why, layout_of({"qkv": leaf}, result))
    assert "two or more positions" in layout_of({"qkv": leaf[:, :1].repeat(1, 1, 3)[..., :12]}, result[:, :1])


@pytest.mark.parametrize("name", ["gptj", "gpt_neo", "codegen"])
def test_heads_of_families_with_attention_of_their_own(name):
    own = {
        "gptj": {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64, "rotary_dim": 4},
        "gpt_neo": {
            "hidden_size": 16, "num_layers": 2, "num_heads": 2, "attention_types": [[["global", "local"], 1]],
            "window_size": 4,
        },
        "codegen": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "rotary_dim": 4},
    }  # fmt: skip
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.2}
    config = AutoConfig.for_model(name, **sizes, **own[name])
    model = AutoModelForCausalLM.from_config(config).eval().double()
    found = edges(model)
    assert torch.equal(found.prune(len(found.table)).run().logits, model(CLEAN).logits)
    assert torch.allclose(found.prune(0).run().logits, model(CORRUPT).logits, atol=1e-10)
    # Patching the query, key and value of all heads of a layer is patching its attention.
    whole = edges(model, nodes="layers")
    for receiver in ("attn0", "attn1"):
        heads = [place for place, each in enumerate(found.receivers) if each.startswith(f"{receiver}.")]
        together = found.scores[:, found.senders.index("embed"), heads].sum(-1)
        alone = whole.scores[:, whole.senders.index("embed"), whole.receivers.index(receiver)]
        assert torch.allclose(together, alone, atol=1e-10)


@pytest.mark.parametrize("name", FAMILIES)
def test_circuits_of_these_families_run(name):
    model = made(name)
    found = edges(model, nodes="layers")
    whole, empty = found.prune(len(found.table)), found.prune(0)
    assert torch.equal(whole.run().logits, model(CLEAN).logits)
    assert torch.allclose(empty.run().logits, model(CORRUPT).logits, atol=1e-10)
    assert whole.faithfulness() == pytest.approx(1)
    small = circuit.greedy(
        model, {"input_ids": CLEAN}, {"input_ids": CORRUPT}, metric=metric, threshold=0.3, nodes="layers"
    )
    assert 0 < len(small) < len(found.table)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_scale_of_what_is_added_is_found_in_low_precision(dtype):
    model = made("granite").to(dtype)
    senders = edges(model).task.graph.senders
    assert [each.scale for each in senders if each.name == "embed"] == [1]
    assert all(each.scale == pytest.approx(TIMES, rel=2e-2) for each in senders if each.name != "embed")
    plain = edges(made("llama", num_key_value_heads=1).to(dtype)).task.graph.senders
    assert {each.scale for each in plain} == {1.0}


@pytest.mark.parametrize("name", ["bert", "opt"])
def test_norms_after_the_sums_are_refused_with_the_reason(name):
    more = {"is_decoder": True} if name == "bert" else {"do_layer_norm_before": False}
    for nodes in ("heads", "layers"):
        with pytest.raises(th.RecipeError, match="normalises after each addition"):
            edges(made(name, **more), nodes=nodes)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma", "gpt_neox", "phi", "mistral", "olmo"])
def test_heads_of_usual_families(name):
    own = {"head_dim": 8} if name in ("qwen3", "gemma") else {}
    model = made(name, **own | ({} if name in ("gpt_neox", "phi") else {"num_key_value_heads": 1}))
    found = edges(model)
    assert torch.allclose(found.prune(0).run().logits, model(CORRUPT).logits, atol=1e-10)
    exact = edges(model, "exact", only=found.table[:3])
    ig = edges(model, "eap-ig", steps=8)
    assert exact.how[0].endswith("0 by a sweep")
    assert torch.isfinite(ig.scores).all()


# Mixtures of experts, whose MLP may return a tuple, and norms that are called for the queries and the keys.
TUPLES = {
    "gpt_oss": {"num_local_experts": 4},
    "llama4_text": {"num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 32},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}


@pytest.mark.parametrize("nodes", ["layers", "heads"])
@pytest.mark.parametrize("name", TUPLES)
def test_mixtures_of_experts_have_exact_edges(name, nodes):
    torch.manual_seed(0)
    sizes = LLAMA | {"num_key_value_heads": 1, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1} | TUPLES[name]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **sizes)).eval()
    slopes, exact = edges(model, nodes=nodes), edges(model, "exact", nodes=nodes)
    assert torch.equal(slopes.prune(len(slopes.table)).run().logits, model(CLEAN).logits)
    torch.testing.assert_close(slopes.prune(0).run().logits, model(CORRUPT).logits, atol=1e-4, rtol=1e-3)
    written = []
    for tokens in (CLEAN, CORRUPT):
        part = "feed_forward" if name == "llama4_text" else "mlp"
        writer = model.model.layers[0].get_submodule(part)
        keep = writer.register_forward_hook(lambda _m, _a, out: written.append(out))
        model(tokens, use_cache=False)
        keep.remove()
    one, other = ((out[0] if isinstance(out, tuple) else out).detach().view(2, 5, 16) for out in written)

    def patched(receiver, share):
        module = model.model.norm if receiver == "logits" else model.model.layers[1].post_attention_layernorm
        handle = module.register_forward_pre_hook(lambda _m, args: (args[0] + share * (one - other), *args[1:]))
        value = metric(model(CORRUPT, use_cache=False)).detach()
        handle.remove()
        return value

    for receiver in ("logits", "mlp1"):
        place = exact.senders.index("mlp0"), exact.receivers.index(receiver)
        truth = patched(receiver, 1) - patched(receiver, 0)
        slope = (patched(receiver, 0.01) - patched(receiver, -0.01)) / 0.02
        torch.testing.assert_close(exact.scores[:, *place], truth, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(slopes.scores[:, *place], slope, atol=2e-3, rtol=1e-2)


def test_a_scale_that_changes_after_the_first_search_counts():
    model, other = made("granite"), made("granite")
    edges(model)
    for each in (model, other):
        for layer in each.model.layers:
            layer.residual_multiplier = 0.7
    assert torch.allclose(edges(model).scores, edges(other).scores)
