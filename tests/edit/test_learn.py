"""Learned edits: planted subspaces, vectors and heads are found, and the model stays as it was."""

import math

import pytest
import torch
from torch import nn

import tenterhook as th
from tenterhook.testing import untouched

SIZE, RANK = 12, 2


class Two(nn.Module):
    """A model with two variables in its hidden layer, in a random basis. The output needs both."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        basis = torch.linalg.qr(torch.randn(SIZE, SIZE, generator=generator))[0]
        self.first, self.second = basis[:RANK], basis[RANK : 2 * RANK]
        self.mix = nn.Linear(SIZE, SIZE, bias=False)
        self.mix.weight.data = basis.T.contiguous()
        self.read = nn.Linear(SIZE, SIZE, bias=False)
        self.read.weight.data = basis.clone()

    def forward(self, x):
        inside = self.read(self.mix(x))
        return torch.cat([inside[:, :RANK], (inside[:, :RANK] * inside[:, RANK : 2 * RANK]).tanh()], 1)

    def swapped(self, base, source):
        """Return the output if the first variable comes from ``source``."""
        return self(torch.cat([source[:, :RANK], base[:, RANK:]], 1))


@pytest.fixture(scope="module")
def model():
    return Two().eval()


def pairs(model, count=8, rows=64):
    generator = torch.Generator().manual_seed(1)
    made = []
    for _ in range(count):
        base, source = (torch.randn(rows, SIZE, generator=generator) for _ in range(2))
        made.append((base, source, model.swapped(base, source).detach()))
    return made


mse = nn.functional.mse_loss


def angle(one, other):
    """Return the largest principal angle between the spans of two sets of rows, in degrees."""
    bases = [torch.linalg.qr(each.double().T)[0] for each in (one, other)]
    least = torch.linalg.svdvals(bases[0].T @ bases[1]).min().clamp(max=1)
    return math.degrees(math.acos(least))


def test_a_planted_subspace_is_found_within_a_degree(model):
    found = th.learn(model, {"mix": th.rotate(rank=RANK)}, pairs(model), loss=mse, steps=400, progress=False)
    assert angle(found.edits["mix"].directions, model.first) < 1
    assert found.losses[-1] < 1e-3 < found.losses[0]


def test_a_learned_rotation_takes_its_part_from_another_input(model, tmp_path):
    found = th.learn(model, {"mix": th.rotate(rank=RANK)}, pairs(model), loss=mse, steps=400, progress=False)
    base, source, wanted = pairs(model, 1, 5)[0]
    with found.apply(model, source):
        assert torch.allclose(model(base), wanted, atol=0.05)
    th.save_edits(tmp_path / "found.edits", found.edits)
    again = th.load_edits(tmp_path / "found.edits")
    assert again == found.edits
    with th.edit(model, again):  # Without a source, the part is removed.
        assert torch.allclose(model(base), model.swapped(base, torch.zeros_like(base)), atol=0.05)


def test_a_steering_vector_is_learned_from_a_start(model):
    def loss(output, target):
        return mse(output, target)

    x = torch.randn(64, SIZE)
    wanted = model(x + torch.eye(SIZE)[0]).detach()
    found = th.learn(model, {"mix": th.add(torch.zeros(SIZE))}, [(x, wanted)], loss=loss, steps=300, progress=False)
    assert torch.allclose(found.edits["mix"].value @ model.first.T, torch.tensor([1.0, 0.0]), atol=0.05)


def test_a_low_rank_edit_learns_a_linear_change(model):
    x = torch.randn(64, SIZE)
    wanted = model(x * torch.tensor([-1.0, *[1.0] * (SIZE - 1)])).detach()
    found = th.learn(model, {"mix": th.lowrank(rank=1)}, [(x, wanted)], loss=mse, steps=500, progress=False)
    assert found.losses[-1] < 0.01 * found.losses[0]
    with th.edit(model, found.edits):
        assert torch.allclose(mse(model(x), wanted), torch.tensor(found.losses[-1]), atol=1e-3)


def test_a_mask_keeps_the_units_that_are_needed():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    with torch.no_grad():
        model[2].weight[:, [1, 4, 6]] = 0  # Nothing reads these units.
    x = torch.randn(128, 6)
    start = {"1": th.mask(torch.full((8,), 0.9))}
    found = th.learn(model, start, [(x, model(x).detach())], loss=mse, steps=200, lr=0.05, penalty=1e-3, progress=False)
    keep = found.edits["1"].keep
    assert keep[[1, 4, 6]].tolist() == [0, 0, 0]
    assert set(keep.tolist()) <= {0.0, 1.0}
    with th.edit(model, found.edits):
        assert mse(model(x), model[2](model[1](model[0](x)))) < 1e-2


def test_heads_are_masked_at_a_point_with_a_meaning():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(n_layer=1, n_embd=16, n_head=4, vocab_size=30, n_positions=16, initializer_range=0.2)
    model = GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        model.transformer.h[0].attn.c_proj.weight[4:8] = 0  # Nothing reads the second head.
    ids = torch.randint(1, 30, (16, 8))
    at = "transformer.h.0.attn@z"
    found = th.learn(
        model, {at: th.mask(torch.full((4, 1), 0.9))}, [(ids, model(ids).logits.detach())],
        loss=lambda out, target: mse(out.logits, target), steps=60, lr=0.1, penalty=1e-3, progress=False,
    )  # fmt: skip
    assert found.edits[at].keep.flatten().tolist() == [1, 0, 1, 1]


def test_an_edit_at_one_position_is_learned_there_only():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    x, wanted = torch.randn(8, 3, 4), torch.zeros(8, 3, 2)
    start = {"0": th.add(torch.zeros(4), at=th.at[:, -1])}
    found = th.learn(model, start, [(x, wanted)], loss=mse, steps=50, progress=False)
    with th.edit(model, found.edits):
        assert torch.equal(model(x)[:, :-1], model[1](model[0](x))[:, :-1])


def test_the_model_is_untouched(model):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    th.learn(model, {"mix": th.rotate(rank=1)}, pairs(model, 1), loss=mse, steps=3, progress=False)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(each.requires_grad and each.grad is None for each in model.parameters())


def test_the_same_seed_gives_the_same_edit(model):
    one, other = (
        th.learn(model, {"mix": th.rotate(rank=1)}, pairs(model, 2), loss=mse, steps=5, progress=False)
        for _ in range(2)
    )
    assert one.edits == other.edits
    assert one.losses == other.losses


# -- the edits themselves ----------------------------------------------------------------------------------------------


def test_a_rotation_replaces_the_part_in_the_span():
    value, other = torch.randn(3, 4), torch.randn(3, 4)
    rows = torch.randn(2, 4)
    basis = torch.linalg.qr(rows.T)[0]
    model = nn.Identity()
    with th.edit(model, {":return": th.rotate(rows, other)}):
        found = model(value)
    assert torch.allclose(found @ basis, other @ basis, atol=1e-5)
    assert torch.allclose(found - found @ basis @ basis.T, value - value @ basis @ basis.T, atol=1e-5)


def test_a_mask_takes_the_rest_from_another_value():
    value, other, keep = torch.randn(3, 4), torch.randn(3, 4), torch.tensor([1.0, 0.0, 0.5, 1.0])
    model = nn.Identity()
    with th.edit(model, {":return": th.mask(keep, other)}):
        assert torch.allclose(model(value), value * keep + other * (1 - keep))


def test_bad_input_is_named(model):
    with pytest.raises(th.EditError, match="has not been learned"), th.edit(model, {"mix": th.rotate(rank=2)}):
        model(torch.ones(1, SIZE))
    options = {"loss": mse, "progress": False}
    x = torch.ones(2, SIZE)
    with pytest.raises(th.EditError, match="has no tensor that can be learned"):
        th.learn(model, {"mix": th.zero()}, [(x, x)], **options)
    with pytest.raises(th.EditError, match="triples"):
        th.learn(model, {"mix": th.rotate(rank=1)}, [(x, x)], **options)
    with pytest.raises(th.EditError, match="rank= is from 1 to 12"):
        th.learn(model, {"mix": th.rotate(rank=99)}, [(x, x, x)], **options)
    with pytest.raises(th.EditError, match="a pair is"):
        th.learn(model, {"mix": th.rotate(rank=1)}, [x], **options)
    with pytest.raises(th.EditError, match="no gradient of the loss"):
        th.learn(
            model, {"mix": th.add(torch.zeros(SIZE))}, [(x, x)], loss=lambda out, _: out.detach().sum(), progress=False
        )
    with pytest.raises(th.EditError, match="training mode"):
        th.learn(nn.Sequential(nn.Linear(2, 2), nn.Dropout()), {"0": th.add(torch.zeros(2))}, [(x, x)], **options)
    with pytest.raises(th.AddressError):
        th.learn(model, {"nowhere": th.rotate(rank=1)}, [(x, x, x)], **options)


def test_gradients_may_be_off_where_it_is_called():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), torch.randn(6, 4)
    with torch.no_grad():
        start = {"0": th.add(torch.zeros(8))}
        found = th.learn(model, start, [(x, torch.ones(6, 2))], loss=nn.functional.mse_loss, steps=20, progress=False)
        assert not torch.is_grad_enabled()
    assert found.losses[-1] < found.losses[0]
    assert not found.edits["0"].value.requires_grad


# -- beside a loop of hooks and Adam -----------------------------------------------------------------------------------


def by_hand(model, change, starts, x, source, target, steps, lr):
    """Return the tensors of a search with a raw hook at the first layer, in float32 whatever the model has."""
    leaves = [start.float().clone().requires_grad_() for start in starts]
    optimizer = torch.optim.Adam(leaves, lr=lr)
    for _ in range(steps):
        other = model[0](source).detach()
        handle = model[0].register_forward_hook(
            lambda _m, _a, value, other=other: change(value, other, *(leaf.to(value.dtype) for leaf in leaves))
        )
        loss = mse(model(x).float(), target)
        handle.remove()
        for leaf, slope in zip(leaves, torch.autograd.grad(loss, leaves), strict=True):
            leaf.grad = slope
        optimizer.step()
    return [leaf.detach() for leaf in leaves]


def rotated(value, other, rows):
    basis = torch.linalg.qr(rows.float().T)[0].to(value.dtype)
    return value + (other - value) @ basis @ basis.T


FORMS = {
    "add": (th.add, lambda value, _o, s: value + s, [(8,)], ["value"]),
    "scale": (th.scale, lambda value, _o, s: value * s, [(8,)], ["factor"]),
    "lowrank": (
        th.lowrank, lambda value, _o, down, up: value + value @ down.T @ up,
        [(2, 8), (2, 8)], ["down", "up"],
    ),
    "rotate": (th.rotate, rotated, [(2, 8)], None),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", FORMS)
def test_the_search_is_that_of_raw_hooks_in_every_precision(form, dtype):
    make, change, shapes, names = FORMS[form]
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).eval().to(dtype)
    x, source = torch.randn(2, 16, 4).to(dtype)
    target = torch.randn(16, 2)
    starts = [torch.randn(shape).to(dtype) for shape in shapes]
    expected = by_hand(model, change, starts, x, source, target, 40, 0.01)
    pair = (x, source, target) if form == "rotate" else (x, target)
    found = th.learn(
        model, {"0": make(*starts)}, [pair], steps=40, lr=0.01, progress=False,
        loss=lambda output, target: mse(output.float(), target),
    ).edits["0"]  # fmt: skip
    exact = {"atol": 1e-6, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.02, "rtol": 0.02}
    if names is None:
        assert angle(found.directions, expected[0]) < (0.05 if dtype == torch.float32 else 1)
    for name, value in zip(names or [], expected, strict=names is not None):
        assert getattr(found, name).dtype == dtype
        torch.testing.assert_close(getattr(found, name).float(), value, **exact)


# -- what users give ---------------------------------------------------------------------------------------------------


def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)).eval()


def learned(model, edits, pairs, **options):
    return th.learn(model, edits, pairs, **({"loss": mse, "steps": 5, "progress": False} | options))


def test_pairs_may_come_from_a_loader_or_a_generator():
    model, x, wanted = small(), torch.randn(6, 4), torch.ones(6, 2)
    start = {"0": th.add(torch.zeros(8))}
    expected = learned(model, start, [(x, wanted)]).edits
    data = torch.utils.data.TensorDataset(x, wanted)
    assert learned(model, start, torch.utils.data.DataLoader(data, batch_size=6)).edits == expected
    assert learned(model, start, ((x, wanted) for _ in range(1))).edits == expected


def test_a_glob_learns_an_edit_for_each_of_its_points():
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    x, wanted = torch.randn(6, 4), torch.ones(6, 4)
    found = learned(model, {"*": th.add(torch.zeros(4))}, [(x, wanted)]).edits
    named = learned(model, {str(place): th.add(torch.zeros(4)) for place in range(3)}, [(x, wanted)]).edits
    assert found == named
    assert len({tuple(each.value.tolist()) for each in found.values()}) == 3
    assert list(learned(model, {"{2..2}": th.add(torch.zeros(4))}, [(x, wanted)]).edits) == ["2"]
    with pytest.raises(th.EditError, match="'1' is selected twice"):
        learned(model, {"*": th.add(torch.zeros(4)), "1:return": th.add(torch.zeros(4))}, [(x, wanted)])


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x):
        value = self.a(x)
        return value, value * 2


class Twice(nn.Module):
    """A module that returns a tuple, and a cell that is called twice."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.pair, self.cell, self.out = Pair(), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        one, two = self.pair(x)
        return self.out(self.cell(self.cell(one + two)))


@pytest.mark.parametrize("edit", [th.rotate(rank=1, part=1), th.lowrank(rank=1, part=1, at=th.at[:, :3])])
def test_a_part_of_a_value_is_learned(edit):
    model, x, wanted = Twice().eval(), torch.randn(6, 4), torch.ones(6, 2)
    pair = (x, torch.randn(6, 4), wanted) if isinstance(edit, th.rotate) else (x, wanted)
    found = learned(model, {"pair": edit}, [pair], steps=40)
    assert found.losses[-1] < found.losses[0]
    size = getattr(found.edits["pair"], "directions" if isinstance(edit, th.rotate) else "up").shape
    assert size == ((1, 4) if isinstance(edit, th.rotate) else (1, 3))


def test_an_edit_of_every_call_is_learned():
    model, x, wanted = Twice().eval(), torch.randn(6, 4), torch.ones(6, 2)
    found = learned(model, {"cell": th.add(torch.zeros(4))}, [(x, wanted)], steps=40)
    vector = found.edits["cell"].value
    inside = model.cell(sum(model.pair(x))) + vector
    by_calls = mse(model.out(model.cell(inside) + vector), wanted)
    with th.edit(model, found.edits):
        torch.testing.assert_close(mse(model(x), wanted), by_calls)
    assert by_calls < found.losses[0]
    with pytest.raises(th.EditError, match=r"'cell' is called 2 times in a run.*Name it: 'cell#0'"):
        learned(model, {"cell": th.rotate(rank=1)}, [(x, x, wanted)])


def test_inputs_from_inference_mode_can_be_learned_from():
    model = small()
    torch.manual_seed(1)
    x, source, wanted = torch.randn(6, 4), torch.randn(6, 4), torch.ones(6, 2)
    expected = learned(model, {"0": th.rotate(rank=2)}, [(x, source, wanted)]).edits
    with torch.inference_mode():
        inputs = {"input": x.clone()}, (source.clone(),), wanted.clone()
        assert learned(model, {"0": th.rotate(rank=2)}, [inputs]).edits == expected


@pytest.mark.parametrize("bad", ["loss", "inputs", "start"])
def test_a_search_that_ends_in_nan_is_an_error(bad):
    model, x, wanted = small(), torch.randn(6, 4), torch.ones(6, 2)
    x = x * math.nan if bad == "inputs" else x
    loss = (lambda out, target: mse(out, target) * math.nan) if bad == "loss" else mse
    for edit in (th.project(torch.zeros(8)), th.mask(torch.ones(8)), th.rotate(rank=2)):
        if bad == "start" and not isinstance(edit, th.project):
            continue
        pair = (x, x, wanted) if isinstance(edit, th.rotate) else (x, wanted)
        with pytest.raises(th.EditError, match=r"'0' are not finite. The loss was nan at step"):
            learned(model, {"0": edit}, [pair], loss=loss)


class Random(nn.Module):
    """A model whose dropout is no module."""

    def __init__(self, kind):
        super().__init__()
        self.a, self.b, self.kind = nn.Linear(4, 8), nn.Linear(8, 2), kind
        self.rnn = nn.LSTM(8, 8, 2, dropout=0.5) if kind == "lstm" else None

    def forward(self, x):
        value = self.a(x)
        value = self.rnn(value)[0] if self.rnn is not None else nn.functional.dropout(value, 0.5, self.training)
        return self.b(value)


@pytest.mark.parametrize("kind", ["lstm", "function"])
def test_random_runs_in_training_mode_are_refused(kind):
    x, wanted, start = torch.randn(6, 4), torch.ones(6, 2), {"a": th.add(torch.zeros(8))}
    model = Random(kind).train()
    state = torch.get_rng_state()
    with pytest.raises(th.EditError, match="its run uses random numbers"):
        learned(model, start, [(x, wanted)])
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    learned(model.eval(), start, [(x, wanted)])
    steady = nn.Sequential(nn.Linear(4, 2), nn.Dropout(0.0)).train()
    learned(steady, {"0": th.add(torch.zeros(2))}, [(x, wanted)])
    with pytest.raises(th.EditError, match=r"'1' \(BatchNorm1d\) would update its statistics"):
        learned(nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2)), {"0": th.add(torch.zeros(2))}, [(x, wanted)])


def test_an_interrupted_search_leaves_nothing_behind():
    model, x, wanted = small(), torch.randn(6, 4), torch.ones(6, 2)
    steps = []

    def loss(output, target):
        steps.append(1)
        if len(steps) == 3:
            raise KeyboardInterrupt
        return mse(output, target)

    for each in model.parameters():
        each.grad = torch.ones_like(each)
    with untouched(model), pytest.raises(KeyboardInterrupt):
        learned(model, {"0": th.rotate(rank=2)}, [(x, x, wanted)], loss=loss)


def test_edits_and_options_that_cannot_be_learned_are_named():
    model, x, wanted = small(), torch.randn(6, 4), torch.ones(6, 2)
    start = {"0": th.add(torch.zeros(8))}
    for options, text in [
        ({"loss": lambda out, _target: out.square().mean(1)}, r"float32\[6\]; one number is needed"),
        ({"loss": "mse"}, "a function of"),
        ({"lr": -1}, "lr= is a positive number"),
        ({"lr": math.nan}, "lr= is a positive number"),
    ]:
        with pytest.raises(th.EditError, match=text):
            learned(model, start, [(x, wanted)], **options)
    for edits, text in [
        ([("0", th.add(torch.zeros(8)))], "a dict of address to edit"),
        ({"0": [th.add(torch.zeros(8)), th.scale(torch.ones(8))]}, "one edit is learned at a point"),
        ({"0": th.lowrank(rank=5, at=th.at[:, :4])}, "rank= is from 1 to 4"),
        ({"0": th.lowrank(rank=2.0)}, "rank= is from 1 to 8"),
    ]:
        with pytest.raises(th.EditError, match=text):
            learned(model, edits, [(x, wanted)])
    with pytest.raises(th.EditError, match=r"only th\.rotate"):
        learned(model, {"0": th.mask(torch.ones(8))}, [(x, x, wanted)])
    for make, text in [
        (lambda: th.rotate(4), r"Write th.rotate\(rank=4\)"),
        (lambda: th.mask(0.5), "takes a tensor as keep="),
        (lambda: th.lowrank(down=torch.zeros(2, 8)), "both down= and up="),
    ]:
        with pytest.raises(th.EditError, match=text):
            make()


def test_the_loss_must_depend_on_the_edit():
    class Beside(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 2), nn.Linear(4, 2)

        def forward(self, x):
            self.a(x)
            return self.b(x)

    with pytest.raises(th.EditError, match="does not depend on the edit at 'a'"):
        learned(Beside(), {"a": th.add(torch.zeros(2))}, [(torch.randn(6, 4), torch.ones(6, 2))])


class Stream(nn.Module):
    """A stream in float32, also inside autocast."""

    def __init__(self):
        super().__init__()
        self.a, self.stream, self.b = nn.Linear(8, 8), nn.Identity(), nn.Linear(8, 2)

    def forward(self, x):
        return self.b(self.stream(x + self.a(x)))


@pytest.mark.parametrize("form", FORMS)
def test_the_search_inside_autocast_is_that_outside(form):
    """Autocast keeps what it has made of a tensor, and a step changes the tensor."""
    make, _, shapes, _ = FORMS[form]
    torch.manual_seed(1)
    model, x, source, wanted = Stream().eval(), torch.randn(16, 8), torch.randn(16, 8), torch.ones(16, 2)
    start = make(*(torch.randn(shape) for shape in shapes))
    pair = (x, source, wanted) if form == "rotate" else (x, wanted)

    def search():
        return learned(
            model, {"stream": start}, [pair], steps=60, loss=lambda output, target: mse(output.float(), target)
        ).losses

    expected = search()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = search()
    assert expected[-1] < 0.95 * expected[0]
    assert found[-1] == pytest.approx(expected[-1], rel=0.03)
