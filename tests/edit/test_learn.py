"""Learned edits: planted subspaces, vectors and heads are found, and the model stays as it was."""

import math

import pytest
import torch
from torch import nn

import tenterhook as th

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
