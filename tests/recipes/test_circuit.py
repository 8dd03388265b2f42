"""Edges and circuits, beside a model that is written out part by part and differentiated by autograd."""

import json
import math

import pytest
import torch
from lm_toys import gemma2, gpt2, ids, llama, neox
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from unrolled import plain, unrolled, writes

import tenterhook as th
from tenterhook.recipes import circuit
from tenterhook.testing import untouched

CLEAN, CORRUPT = ids(0, 2, 5), ids(1, 2, 5)


def metric(output):
    logits = output if isinstance(output, torch.Tensor) else output.logits
    return logits[:, -1, 3] - logits[:, -1, 5]


def inputs(given):
    return {"input_ids": given, "use_cache": False}


@pytest.fixture(scope="module")
def model():
    return gpt2(2).double()


def edges(model, method="eap", **options):
    options = {"metric": metric, "progress": False} | options
    return circuit.edges(model, inputs(CLEAN), inputs(CORRUPT), method=method, **options)


def by_autograd(model, base, source):
    """Return the derivative of the metric with respect to the share of the other input that each edge carries."""
    change = {name: value.detach() for name, value in writes(model, source).items()}
    change = {name: change[name] - value.detach() for name, value in writes(model, base).items()}
    shares = {}

    def stream(receiver, written):
        for sender in written:
            shares[sender, receiver] = torch.zeros(len(base), 1, 1, dtype=torch.float64, requires_grad=True)
        return plain(receiver, written) + sum(shares[name, receiver] * change[name] for name in written)

    value = metric(unrolled(model, base, stream)).sum()
    found = torch.autograd.grad(value, list(shares.values()))
    return {edge: each.flatten() for edge, each in zip(shares, found, strict=True) if not edge[0].startswith("bias")}


def exactly(model, base, source, edge):
    """Return the effect of a patch of one edge, in a model written out part by part."""
    other, start = writes(model, source), writes(model, base)

    def stream(receiver, written):
        value = plain(receiver, written)
        return value + other[edge[0]] - start[edge[0]] if receiver == edge[1] else value

    return metric(unrolled(model, base, stream)) - metric(unrolled(model, base, plain))


def patched_by_hand(model, clean, corrupt, kept):
    """Return the logits of a circuit, with the values of the corrupt run on all other edges."""
    other = writes(model, corrupt)

    def stream(receiver, written):
        def carried(name):
            return name.startswith("bias") or (name, receiver) in kept

        return sum(value if carried(name) else other[name] for name, value in written.items())

    return unrolled(model, clean, stream)


def test_the_model_written_out_is_the_model(model):
    assert torch.allclose(unrolled(model, CLEAN, plain), model(CLEAN).logits, atol=1e-12)


@pytest.mark.parametrize("mode", ["denoise", "noise"])
def test_eap_is_the_derivative_of_each_edge(model, mode):
    found = edges(model, mode=mode)
    base, source = (CORRUPT, CLEAN) if mode == "denoise" else (CLEAN, CORRUPT)
    expected = by_autograd(model, base, source)
    assert len(expected) == int(found.exists.sum()) == 46
    for (sender, receiver), value in expected.items():
        place = found.senders.index(sender), found.receivers.index(receiver)
        assert torch.allclose(found.scores[:, *place], value, atol=1e-12), (sender, receiver)
        assert found.score(sender, receiver) == pytest.approx(value.mean().item(), abs=1e-12)


@pytest.mark.parametrize("mode", ["denoise", "noise"])
def test_exact_scores_are_those_of_single_patches(model, mode):
    found = edges(model, "exact", mode=mode)
    base, source = (CORRUPT, CLEAN) if mode == "denoise" else (CLEAN, CORRUPT)
    for edge in [("embed", "attn0.1.v"), ("attn0.0", "attn1.1.q"), ("mlp0", "mlp1"), ("attn1.0", "logits")]:
        place = found.senders.index(edge[0]), found.receivers.index(edge[1])
        assert torch.allclose(found.scores[:, *place], exactly(model, base, source, edge), atol=1e-10), edge


def test_some_edges_alone_are_scored_exactly(model):
    whole, best = edges(model, "exact"), edges(model).table[:7]
    found = edges(model, "exact", only=best)
    assert int(found.exists.sum()) == 7
    assert torch.allclose(found.scores[:, found.exists], whole.scores[:, found.exists])
    assert {row[:2] for row in found.table} == {row[:2] for row in best}
    with pytest.raises(th.RecipeError, match="only= is for"):
        edges(model, only=best)


class Coupled(nn.Module):
    """A model whose examples depend on each other, so that no batch of cases gives what single runs give."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.a, self.head = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        stream = self.embed(x)
        out = self.head(stream + self.a(stream))
        return out + out.square().mean(0, keepdim=True)


def test_a_batch_that_differs_from_single_runs_is_not_used():
    model = Coupled().double()
    one, other = torch.randn(3, 4).double(), torch.randn(3, 4).double()
    nodes = {"embed": (None, "embed"), "a": ("a:in", "a"), "out": ("head:in", None)}
    found = circuit.edges(model, one, other, metric=lambda out: out[:, 0], nodes=nodes, method="exact", progress=False)
    assert "3 by a sweep" in found.how[0]
    change = model.embed(one) - model.embed(other)
    with th.edit(model, {"a:in": th.add(change)}):
        patched = model(other)[:, 0]
    expected = patched - model(other)[:, 0]
    assert torch.allclose(found.scores[:, 0, 0], expected, atol=1e-10)


def test_a_frozen_model_has_the_same_scores(model):
    frozen = gpt2(2).double().requires_grad_(False)
    assert torch.allclose(edges(frozen).scores, edges(model).scores)


def test_eap_ig_goes_from_eap_to_the_exact_effect_where_there_is_one_path():
    torch.manual_seed(0)

    class Path(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x):
            return self.head(self.embed(x)).tanh()

    model = Path().double()
    one, other = torch.randn(4, 3).double(), torch.randn(4, 3).double()
    nodes = {"embed": (None, "embed"), "out": ("head:in", None)}
    options = {"metric": lambda out: out[:, 0], "nodes": nodes, "progress": False}
    exact = circuit.edges(model, one, other, method="exact", **options).scores
    gaps = [
        float((circuit.edges(model, one, other, method="eap-ig", steps=steps, **options).scores - exact).abs().max())
        for steps in (1, 4, 64)
    ]
    assert gaps[0] > gaps[1] > gaps[2]
    assert gaps[2] < 1e-4
    assert float((circuit.edges(model, one, other, **options).scores - exact).abs().max()) > 0.01


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_a_circuit_runs_with_everything_else_patched(model, share):
    found = edges(model)
    generator = torch.Generator().manual_seed(0)
    kept = found.exists & (torch.rand(found.exists.shape, generator=generator) < share)
    made = circuit.Circuit(found.senders, found.receivers, kept, found.values, found.task)
    expected = patched_by_hand(model, CLEAN, CORRUPT, set(made.edges))
    assert torch.allclose(made.run().logits, expected, atol=1e-10)
    clean, corrupt = metric(model(CLEAN)), metric(model(CORRUPT))
    share = (metric(expected) - corrupt).mean() / (clean - corrupt).mean()
    assert made.faithfulness() == pytest.approx(share.item(), abs=1e-10)


def test_edges_that_carry_nothing_are_left_out_without_a_difference(model):
    found = edges(model)
    whole = found.values.abs().masked_fill(~found.exists, -1).flatten().argsort(descending=True)[:12]
    kept = torch.zeros(found.exists.numel(), dtype=torch.bool)
    kept[whole] = True
    pruned = found.prune(12)
    loose = circuit.Circuit(found.senders, found.receivers, kept.reshape(found.exists.shape), found.values, found.task)
    assert len(pruned) <= len(loose) == 12
    assert torch.allclose(pruned.run().logits, loose.run().logits, atol=1e-10)


def test_the_whole_circuit_is_the_model_and_the_empty_one_the_corrupt_run(model):
    found = edges(model)
    assert torch.equal(found.prune(46).run().logits, model(CLEAN).logits)
    assert torch.allclose(found.prune(0).run().logits, model(CORRUPT).logits, atol=1e-10)
    assert found.prune(46).faithfulness() == pytest.approx(1)
    assert found.prune(46).completeness() == pytest.approx(0, abs=1e-9)
    assert found.prune(threshold=0.0).edges == found.prune(46).edges


def test_other_values_on_the_patched_edges(model):
    empty = edges(model).prune(0)
    other = writes(model, CORRUPT)
    for patch, change in (("zero", torch.zeros_like), ("mean", lambda v: v.mean(0, keepdim=True).expand_as(v))):

        def stream(_receiver, written, change=change):
            return sum(value if name.startswith("bias") else change(other[name]) for name, value in written.items())

        assert torch.allclose(empty.run(patch=patch).logits, unrolled(model, CLEAN, stream), atol=1e-10)


def test_another_pair_can_run_through_a_circuit(model):
    made = edges(model).prune(20)
    one, other = ids(5, 3, 5), ids(6, 3, 5)
    expected = patched_by_hand(model, one, other, set(made.edges))
    assert torch.allclose(made.run(inputs(one), corrupt=inputs(other)).logits, expected, atol=1e-10)
    with pytest.raises(th.RecipeError, match="needs corrupt="):
        made.run(inputs(one))


def greedy_by_hand(model, threshold):
    found = edges(model)
    kept = {
        (found.senders[i], found.receivers[j]) for i, j in found.exists.nonzero().tolist()
    }  # fmt: skip
    now = metric(model(CLEAN)).mean()
    order = sorted(range(len(found.receivers)), key=lambda place: -int(found.exists[:, place].sum()))
    for place in order:
        for sender in reversed(range(int(found.exists[:, place].sum()))):
            edge = (found.senders[sender], found.receivers[place])
            value = metric(patched_by_hand(model, CLEAN, CORRUPT, kept - {edge})).mean()
            if abs(value - now) < threshold:
                kept.remove(edge)
                now = value
    return kept


def test_greedy_removal_is_that_of_single_runs(model):
    found = circuit.greedy(model, inputs(CLEAN), inputs(CORRUPT), metric=metric, threshold=0.05)
    kept = greedy_by_hand(model, 0.05)
    assert 5 < len(kept) < 47
    assert set(found.edges) <= kept  # Edges that carry nothing are left out.
    assert torch.allclose(metric(found.run()), metric(patched_by_hand(model, CLEAN, CORRUPT, kept)), atol=1e-10)


def test_several_pairs_give_one_row_for_each_example(model):
    one = circuit.edges(model, [inputs(CLEAN), inputs(ids(7))], [inputs(CORRUPT), inputs(ids(8))], metric=metric)
    assert one.scores.shape[0] == 4
    assert torch.allclose(one.scores[:2], edges(model).scores)
    assert torch.allclose(one.error, one.scores.std(0) / 2)
    assert abs(one.table[0][2]) == pytest.approx(float(one.values.abs().max()))


def test_a_metric_of_one_number_scores_the_examples_together(model):
    found = edges(model, metric=lambda out: metric(out).mean())
    assert torch.allclose(found.values, edges(model).values)
    assert found.table[0][2] == pytest.approx(edges(model).table[0][2])


def test_all_methods_have_one_scale_for_a_metric_of_one_number(model):
    for method in ("eap", "eap-ig", "exact"):
        together = edges(model, method=method, metric=lambda out: metric(out).mean())
        assert torch.allclose(together.values, edges(model, method=method).values, atol=1e-6)


@pytest.mark.parametrize("make", [llama, neox], ids=["shared keys and rotary positions", "parallel and interleaved"])
def test_heads_of_other_families(make):
    model = make()
    found, exact = edges(model, "eap-ig", steps=4), edges(model, "exact")
    whole = found.prune(int(found.exists.sum()))
    assert torch.equal(whole.run().logits, model(CLEAN).logits)
    assert torch.allclose(found.prune(0).run().logits, model(CORRUPT).logits, atol=1e-4)
    # A patch of one edge alone, by a run of the circuit without it.
    sender, receiver, value, _ = edges(model, "exact", mode="noise").table[0]
    kept = found.exists.clone()
    kept[found.senders.index(sender), found.receivers.index(receiver)] = False
    alone = circuit.Circuit(found.senders, found.receivers, kept, found.values, found.task)
    assert (metric(alone.run()) - metric(model(CLEAN))).mean().item() == pytest.approx(value, abs=1e-4)
    assert exact.how[0].endswith("0 by a sweep")


def test_a_metric_of_integers_needs_no_gradient_for_exact_scores(model):
    def best(output):
        return output.logits[:, -1].argmax(-1)

    found = edges(model, "exact", metric=best)
    floats = edges(model, "exact", metric=lambda output: best(output).double())
    assert found.values.is_floating_point()
    assert torch.equal(found.values.double(), floats.values)
    small = circuit.greedy(model, inputs(CLEAN), inputs(CORRUPT), metric=best, threshold=0.5)
    assert len(small) < int(found.exists.sum())


@pytest.mark.parametrize("method", ["eap", "eap-ig", "exact"])
def test_a_model_with_dropout_in_training_mode_is_refused(method):
    with pytest.raises(th.RecipeError, match=r"would use random numbers\.\nCall model\.eval\(\) first"):
        edges(gpt2(1).train(), method)


class Doubled(nn.Linear):
    """A linear layer with more than its weight and bias."""

    def forward(self, x):
        return 2 * super().forward(x)


class Renamed(nn.Linear):
    """A linear layer with another class."""


def with_layers(model, kind):
    """Replace the query projections of a model by copies of another class."""
    for layer in model.model.layers:
        old = layer.self_attn.q_proj
        layer.self_attn.q_proj = kind(old.in_features, old.out_features, bias=False)
        layer.self_attn.q_proj.load_state_dict(old.state_dict())
    return model


def test_subclasses_of_linear_layers_count_if_they_compute_the_same():
    found, plain = edges(with_layers(llama(), Renamed)), edges(llama())
    assert found.receivers == plain.receivers
    assert torch.allclose(found.scores, plain.scores)
    with pytest.raises(th.RecipeError, match="its projections to q, k and v are not known"):
        edges(with_layers(llama(), Doubled))


def test_a_model_that_changes_has_another_graph():
    model = llama()
    before = edges(model)
    with_layers(model, Renamed)
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight.zero_()
    after = edges(model)
    assert before.score("mlp0", "attn1.0.q") != 0
    assert after.score("mlp0", "attn1.0.k") == 0  # Nothing is asked for.
    with_layers(model, Doubled)
    with pytest.raises(th.RecipeError, match="its projections to q, k and v are not known"):
        edges(model)


OWN = {"gptj": {"rotary_dim": 4}, "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 4}}


@pytest.mark.parametrize("name", OWN)
def test_whole_attentions_of_models_that_compute_them_by_themselves(name):
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 16, "num_layers": 2, "num_heads": 2, "max_position_embeddings": 32}
    if name == "gptj":
        sizes = {"vocab_size": 50, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
    config = AutoConfig.for_model(name, **sizes, initializer_range=0.2, **OWN[name])
    model = AutoModelForCausalLM.from_config(config).eval().double()
    near = 3e-4 * (model.get_input_embeddings()(CLEAN) - model.get_input_embeddings()(CORRUPT)).detach()
    base = model.get_input_embeddings()(CORRUPT).detach()
    pair = {"inputs_embeds": base + near}, {"inputs_embeds": base}
    found = circuit.edges(model, *pair, metric=metric, nodes="layers")
    exact = circuit.edges(model, *pair, metric=metric, nodes="layers", method="exact", progress=False)
    assert torch.allclose(found.scores, exact.scores, atol=5e-3 * float(exact.scores.abs().max()))
    assert torch.equal(found.prune(int(found.exists.sum())).run().logits, model(**pair[0]).logits)


def test_norms_after_attention_and_mlp_count_as_writers():
    found = edges(gemma2(), nodes="layers")
    assert torch.allclose(found.prune(0).run().logits, gemma2()(CORRUPT).logits, atol=1e-4)
    with pytest.raises(th.RecipeError, match="cannot be separated into heads"):
        edges(gemma2())


def test_circuits_are_saved_and_loaded_as_data(model, tmp_path):
    found = edges(model)
    found.save(tmp_path / "edges.json")
    again = circuit.load(tmp_path / "edges.json")
    assert torch.equal(again.values, found.values)
    assert again.prune(9).edges == found.prune(9).edges
    made = found.prune(9)
    made.save(tmp_path / "circuit.json")
    assert circuit.load(tmp_path / "circuit.json").edges == made.edges
    with pytest.raises(th.RecipeError, match="loaded from a file"):
        circuit.load(tmp_path / "circuit.json").run()
    (tmp_path / "other.json").write_text("[]")
    with pytest.raises(th.RecipeError, match="holds no edges"):
        circuit.load(tmp_path / "other.json")


def test_a_curve_has_random_circuits_beside_it_and_all_results_are_drawn(model):
    found = edges(model)
    curve = found.curve([5, 46], random=2)
    assert curve.random.shape == (2, 2)
    assert curve.faithfulness[1] == pytest.approx(1)
    assert float(curve.random[1].mean()) == pytest.approx(1)
    assert "circuit  random" in repr(curve)
    for each in (found, found.prune(9), curve):
        assert each.show().axes
        assert "<img" in each._repr_html_() or "<svg" in each._repr_html_()
    assert "… and 38 more" in repr(found)


# -- how edges are scored by gradients ---------------------------------------------------------------------------------


def by_hand(model, nodes, one, other, out):
    """Return the scores of a model of plain parts: the gradient at each receiver times the change of each sender."""
    writers = {name: point for name, (_, point) in nodes.items() if point}
    readers = {name: point for name, (point, _) in nodes.items() if point}
    with torch.no_grad(), th.record(model, *writers.values()) as tape:
        model(one)
    before = {name: tape[point] for name, point in writers.items()}
    with th.record(model, *writers.values(), *readers.values(), grad=True) as tape:
        tape.backward(out(model(other)).sum())
    return {
        (sender, receiver): ((before[sender] - tape[writers[sender]]) * tape.grad[readers[receiver]]).flatten(1).sum(1)
        for sender in writers for receiver in readers
    }  # fmt: skip


class Plain(nn.Module):
    """A model of four parts. ``again`` reuses one module, and ``static`` writes a value into memory of its own."""

    def __init__(self, *, again=False, static=False):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.a, self.b, self.head = (nn.Linear(4, 4) for _ in range(4))
        self.b = self.a if again else self.b
        self.put = nn.Identity()
        self.register_buffer("memory", torch.zeros(3, 4, dtype=torch.float64))
        self.static = static

    def forward(self, x):
        stream = self.embed(x)
        one = self.a(stream).tanh()
        one = self.put(self.memory.copy_(one.detach()) if self.static else one)
        stream = stream + one
        return self.head(stream + self.b(stream))


PLAIN = {"embed": (None, "embed"), "a": ("a:in", "put"), "b": ("b:in", "b"), "out": ("head:in", None)}


def first(output):
    return output[:, 0]


def test_a_module_that_is_called_twice_is_named_by_its_calls():
    model = Plain(again=True).double()
    one, other = torch.randn(3, 4).double(), torch.randn(3, 4).double()
    nodes = {"embed": (None, "embed"), "a": ("a:in#0", "put"), "b": ("a:in#1", "a#1"), "out": ("head:in", None)}
    found = circuit.edges(model, [one, other], [other, one], metric=first, nodes=nodes)
    twin = Plain().double()
    twin.load_state_dict(model.state_dict())
    expected = circuit.edges(twin, [one, other], [other, one], metric=first, nodes=PLAIN)
    assert torch.allclose(found.scores, expected.scores, atol=1e-12)
    truth = by_hand(twin, PLAIN, one, other, first)
    for (sender, receiver), score in truth.items():
        place = expected.senders.index(sender), expected.receivers.index(receiver)
        if bool(expected.exists[place]):
            assert torch.allclose(expected.scores[:3, *place], score, atol=1e-12), (sender, receiver)


def test_a_value_that_the_next_run_overwrites_is_an_error():
    model = Plain(static=True).double().eval()
    one, other = torch.randn(3, 4).double(), torch.randn(3, 4).double()
    with pytest.raises(th.RecipeError, match="'put' has a value in memory that the model uses again"):
        circuit.edges(model, one, other, metric=first, nodes=PLAIN)


def checkpointed(reentrant):
    model = gpt2(2).double().train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    return model


def test_scores_under_activation_checkpoints_are_the_same():
    for method in ("eap", "eap-ig"):
        expected = edges(gpt2(2).double(), method)
        assert torch.allclose(edges(checkpointed(reentrant=False), method).scores, expected.scores, atol=1e-12)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # Of the run without gradients.
def test_reentrant_checkpoints_hide_gradients_which_is_an_error():
    with pytest.raises(th.RecipeError, match="gradients are disabled where 'transformer"):
        edges(checkpointed(reentrant=True))


@pytest.mark.parametrize("make", [gpt2, llama, neox])
def test_scores_computed_in_parts_are_the_same(make, monkeypatch):
    model = make().double()
    expected = edges(model)
    monkeypatch.setattr("tenterhook.recipes._edge_products.ROOM", 1)
    monkeypatch.setattr("tenterhook.recipes._edge_products.POSITIONS", 3)
    found = edges(model)
    assert torch.allclose(found.scores, expected.scores, atol=1e-12)


def test_scores_of_layers_whose_norms_differ_are_the_derivatives():
    model = gpt2(2).double()
    model.transformer.h[1].ln_1.eps = 1e-2
    found = edges(model)
    for (sender, receiver), value in by_autograd(model, CORRUPT, CLEAN).items():
        place = found.senders.index(sender), found.receivers.index(receiver)
        assert torch.allclose(found.scores[:, *place], value, atol=1e-12), (sender, receiver)


@pytest.mark.parametrize("method", ["eap", "eap-ig", "exact"])
def test_scores_inside_autocast_are_those_of_the_model_in_low_precision(method):
    model = gpt2(2)
    expected = edges(model, method)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = edges(model, method)
        assert found.prune(46).faithfulness() == pytest.approx(1)
    size = float(expected.scores.abs().max())
    assert 0 < float((found.scores - expected.scores).abs().max()) < 0.05 * size


class Skips(nn.Module):
    """A model that skips a part for some inputs."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.a, self.head = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x, part=None):
        stream = self.embed(x)
        return self.head(stream if part is None else stream + self.a(stream))


def test_a_part_that_one_input_skips_is_an_error():
    nodes = {"embed": (None, "embed"), "a": ("a:in", "a"), "out": ("head:in", None)}
    x = [torch.randn(3, 4) for _ in range(4)]
    whole = [{"x": x[0], "part": 1}, {"x": x[1], "part": 1}]
    model = Skips()
    assert circuit.edges(model, whole[0], whole[1], metric=first, nodes=nodes).scores.abs().sum() > 0
    with pytest.raises(th.NeverReached, match="'a"):
        circuit.edges(model, [whole[0], {"x": x[2]}], [whole[1], {"x": x[3]}], metric=first, nodes=nodes)


# -- bad input ---------------------------------------------------------------------------------------------------------


def test_bad_arguments_are_named(model):
    with pytest.raises(th.RecipeError, match="need the same shapes: clean has"):
        circuit.edges(model, inputs(CLEAN), inputs(ids(0, 2, 7)), metric=metric)
    with pytest.raises(th.RecipeError, match="which no gradient reaches"):
        edges(model, metric=lambda out: out.logits.argmax(-1).float().mean())
    with pytest.raises(th.RecipeError, match=r"gave a tensor of \[2, 5, 50\]"):
        edges(model, metric=lambda out: out.logits)
    with pytest.raises(th.RecipeError, match="method= is one of 'eap'"):
        edges(model, "ig")
    with pytest.raises(th.RecipeError, match="there is no sender 'attn9'"):
        edges(model).score("attn9", "logits")
    with pytest.raises(th.RecipeError, match=r"no receiver 'attn1\.0'; there are attn1\.0\.q, attn1\.0\.k"):
        edges(model).score("embed", "attn1.0")
    with pytest.raises(th.RecipeError, match="the receiver comes first"):
        edges(model).score("mlp1", "mlp0")
    with pytest.raises(th.RecipeError, match="takes k= or threshold="):
        edges(model).prune()
    with pytest.raises(th.RecipeError, match="the same for the clean and the corrupt"):
        circuit.edges(model, inputs(CLEAN), inputs(CLEAN), metric=metric).prune(3).faithfulness()


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.mlp, self.head = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        x = self.embed(x)
        return self.head(x / 2 + self.mlp(x))


def test_a_stream_that_is_no_sum_is_an_error_that_names_the_place():
    nodes = {"embed": (None, "embed"), "mlp": ("mlp:in", "mlp"), "out": ("head:in", None)}
    with pytest.raises(th.RecipeError, match="'out' reads at 'head:in' is not the sum"):
        circuit.edges(Scaled(), torch.randn(2, 4), torch.randn(2, 4), metric=lambda out: out[:, 0], nodes=nodes)
    with pytest.raises(th.RecipeError, match="Give the nodes"):
        circuit.edges(Scaled(), torch.randn(2, 4), torch.randn(2, 4), metric=lambda out: out[:, 0])
    with pytest.raises(th.RecipeError, match="two addresses or None"):
        circuit.edges(
            Scaled(), torch.randn(2, 4), torch.randn(2, 4), metric=lambda out: out[:, 0], nodes={"a": "embed"}
        )


class InPlace(nn.Module):
    """A model that adds one part to another in place, after the other has written."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.a, self.b, self.head = (nn.Linear(4, 4) for _ in range(4))
        self.direct = nn.Linear(4, 4)
        self.skips = False

    def forward(self, x):
        stream = self.embed(x)
        one, other = self.a(stream), self.b(stream)
        other += one
        out = self.head(stream + other)
        return out + self.direct(x) if self.skips else out


IN_PLACE = {"embed": (None, "embed"), "a": ("a:in", "a"), "b": ("b:in", "b"), "out": ("head:in", None)}


def test_parts_that_are_changed_in_place_afterwards_are_patched_with_what_they_wrote():
    model = InPlace()
    one, other = torch.randn(3, 4), torch.randn(3, 4)
    found = circuit.edges(model, one, other, metric=lambda out: out[:, 0], nodes=IN_PLACE)
    kept = found.exists.clone()
    kept[found.senders.index("b"), found.receivers.index("out")] = False
    made = circuit.Circuit(found.senders, found.receivers, kept, found.values, found.task)
    stream = model.embed(one)
    expected = model.head(stream + model.a(stream) + model.b(model.embed(other)))
    assert torch.allclose(made.run(), expected, atol=1e-6)


def test_a_way_that_is_no_edge_is_an_error():
    model = InPlace()
    model.skips = True
    with pytest.raises(th.RecipeError, match="by a way that is no edge"):
        circuit.edges(model, torch.randn(3, 4), torch.randn(3, 4), metric=lambda out: out[:, 0], nodes=IN_PLACE)


# -- what users give ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_loaded_edges_give_the_circuits_that_they_gave_with_the_model(model, tmp_path, seed):
    found = circuit.edges(model, inputs(ids(seed)), inputs(ids(seed + 9)), metric=metric)
    found.save(tmp_path / "edges.json")
    again = circuit.load(tmp_path / "edges.json")
    assert again.table == found.table
    for k in range(0, 47, 3):
        assert again.prune(k).edges == found.prune(k).edges
    middle = found.table[20][2]
    assert again.prune(threshold=abs(middle)).edges == found.prune(threshold=abs(middle)).edges


def test_files_that_describe_no_circuit_are_refused(model, tmp_path):
    found, path = edges(model), tmp_path / "edges.json"
    found.save(path)
    scores = json.loads(path.read_text())
    found.prune(9).save(path)
    kept = json.loads(path.read_text())
    wrong = [
        scores | {"exists": kept["values"]}, scores | {"exists": scores["exists"][:-1]},
        scores | {"scores": kept["kept"]}, scores | {"feeds": scores["feeds"][1:]}, scores | {"feeds": [["x"]] * 11},
        scores | {"senders": "abcdefg"}, scores | {"kind": "other"}, scores | {"method": "other"},
        scores | {"dtype": "torch.save"}, kept | {"kept": kept["values"]}, kept | {"values": kept["values"][0]},
        kept | {"receivers": list(range(11))}, {}, [],
    ]  # fmt: skip
    for content in wrong:
        path.write_text(json.dumps(content))
        with pytest.raises(th.RecipeError, match="holds no edges and no circuit"):
            circuit.load(path)
    del scores["feeds"]  # As in files of earlier versions.
    path.write_text(json.dumps(scores))
    assert circuit.load(path).table == found.table


@pytest.mark.parametrize("method", ["eap", "eap-ig", "exact"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_scores_that_are_not_finite_are_an_error(model, method, bad):
    with pytest.raises(th.RecipeError, match=r"score of an edge is not finite.*'embed' → 'attn0\.0\.q'"):
        edges(model, method, metric=lambda output: metric(output) * bad)
    with pytest.raises(th.RecipeError, match="metric of the clean input is"):
        circuit.greedy(model, inputs(CLEAN), inputs(CORRUPT), metric=lambda output: metric(output) * bad, threshold=0.1)


def test_a_model_whose_output_is_not_finite_is_refused():
    model = gpt2(2)
    with torch.no_grad():
        model.transformer.h[1].mlp.c_fc.bias[0] = math.nan
    with pytest.raises(th.RecipeError, match="not finite"):
        edges(model)


@pytest.mark.parametrize("method", ["eap", "eap-ig", "exact"])
def test_it_works_in_inference_mode(method):
    model = gpt2(2)
    expected = edges(model, method)
    with untouched(model), torch.inference_mode():
        one, other = inputs(CLEAN.clone()), inputs(CORRUPT.clone())
        found = circuit.edges(model, one, other, metric=metric, method=method, progress=False)
        share = found.prune(20).faithfulness()
        kept = circuit.greedy(model, one, other, metric=metric, threshold=0.05)
    assert torch.equal(found.scores, expected.scores)
    assert share == pytest.approx(expected.prune(20).faithfulness(), abs=1e-6)
    assert kept.edges == circuit.greedy(model, inputs(CLEAN), inputs(CORRUPT), metric=metric, threshold=0.05).edges


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("make", [gpt2, llama])
@pytest.mark.parametrize("method", ["eap", "exact"])
def test_padding_makes_no_difference(make, side, method):
    model = make().double()
    mask = torch.ones(2, 5, dtype=torch.long)
    part = slice(2, None) if side == "left" else slice(0, 3)
    mask[1] = 0
    mask[1, part] = 1
    last = torch.tensor([4, 4] if side == "left" else [4, 2])

    def given(tokens):
        return {"input_ids": tokens, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}

    def at_last(output):
        rows = len(output.logits)
        return output.logits[torch.arange(rows), last.repeat(rows // 2), 3]

    found = circuit.edges(model, given(CLEAN), given(CORRUPT), metric=at_last, method=method, progress=False)
    alone = circuit.edges(
        model, CLEAN[1:, part], CORRUPT[1:, part], metric=lambda out: out.logits[:, -1, 3], method=method,
        progress=False,
    )  # fmt: skip
    torch.testing.assert_close(found.scores[1], alone.scores[0])


def test_prompts_of_other_lengths_are_refused_behind_padding_too(model):
    one = torch.ones(2, 5, dtype=torch.long)
    other = one.clone()
    other[1, :2] = 0
    clean, corrupt = ({"input_ids": CLEAN, "attention_mask": mask} for mask in (one, other))
    for pair in ((clean, corrupt), ([clean, clean], [clean, corrupt])):
        with pytest.raises(th.RecipeError, match="row 1 has 5 tokens in the clean input and 3 in the corrupt one"):
            circuit.edges(model, *pair, metric=metric)


def test_a_run_takes_pairs_of_the_same_shapes_only(model):
    made = edges(model).prune(20)
    for one, other in [(CLEAN, CORRUPT[:1]), (torch.cat([CLEAN, CLEAN]), CORRUPT), (CLEAN[:, :4], CORRUPT)]:
        with pytest.raises(th.RecipeError, match="both inputs need the same shapes"):
            made.run(one, corrupt=other)
    with pytest.raises(th.RecipeError, match="needs the clean inputs too"):
        made.run(corrupt=CORRUPT)


def test_pairs_may_come_from_generators(model):
    expected = circuit.edges(model, [CLEAN, ids(7)], [CORRUPT, ids(8)], metric=metric)
    found = circuit.edges(model, iter([CLEAN, ids(7)]), (each for each in [CORRUPT, ids(8)]), metric=metric)
    assert torch.equal(found.scores, expected.scores)


def test_random_numbers_in_training_mode_are_refused():
    model = gpt2(2).train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.eval()  # What is left is the dropout that the attention calls as a function.
    with pytest.raises(th.RecipeError, match="its run uses random numbers"):
        edges(model)
    quiet = llama().double().train()
    assert torch.equal(edges(quiet).scores, edges(llama().double()).scores)
    assert quiet.training


def test_options_that_make_no_sense_are_named(model):
    found = edges(model)
    for threshold in (math.nan, -1, "x", True):
        with pytest.raises(th.RecipeError, match="threshold= is a number from 0"):
            found.prune(threshold=threshold)
        with pytest.raises(th.RecipeError, match="threshold= is a number from 0"):
            circuit.greedy(model, inputs(CLEAN), inputs(CORRUPT), metric=metric, threshold=threshold)
    for batch in (0, -1, 2.0):
        with pytest.raises(th.RecipeError, match="batch= is a positive integer"):
            edges(model, "exact", batch=batch)
    for value, kind in ((None, "NoneType"), ("x", "str")):
        with pytest.raises(th.RecipeError, match=f"metric= gave a {kind}"):
            edges(model, metric=lambda _output, value=value: value)
    with pytest.raises(th.RecipeError, match="have no examples"):
        circuit.edges(model, CLEAN[:0], CORRUPT[:0], metric=metric)


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("method", ["eap", "eap-ig"])
def test_compiled_models_have_the_same_edges(method, in_place):
    model = gpt2(1)
    expected = edges(model, method, steps=2)
    if in_place:
        model.compile(backend="eager")
    else:
        model = torch.compile(model, backend="eager")
    model(CLEAN)
    assert torch.allclose(edges(model, method, steps=2).scores, expected.scores, atol=1e-6)
    torch._dynamo.reset()


class Named(nn.Module):
    """A model whose output is a dict or a tuple."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.a, self.head, self.kind = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3), kind

    def forward(self, x):
        stream = self.embed(x)
        out = self.head(stream + self.a(stream)).tanh()
        return {"plain": out, "dict": {"y": out, "n": 3}, "tuple": (3, out)}[self.kind]


@pytest.mark.parametrize("method", ["eap", "eap-ig", "exact"])
@pytest.mark.parametrize("kind", ["dict", "tuple"])
def test_the_output_may_have_any_form(kind, method):
    one, other = torch.randn(2, 5, 4)
    nodes = {"embed": (None, "embed"), "a": ("a:in", "a"), "out": ("head:in", None)}
    options = {"nodes": nodes, "method": method, "progress": False}
    expected = circuit.edges(Named("plain"), one, other, metric=lambda out: out[:, 0], **options)
    part = "y" if kind == "dict" else 1
    found = circuit.edges(Named(kind), one, other, metric=lambda out: out[part][:, 0], **options)
    assert torch.allclose(found.scores, expected.scores, atol=1e-6)
    assert found.scores.shape[0] == 5
    assert found.prune(3).faithfulness() == pytest.approx(1)
