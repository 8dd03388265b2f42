"""Random dictionaries, points and edits, beside the same computation written out with autograd."""

import contextlib
import random

import pytest
import torch
from torch import nn

import tenterhook as th

SIZE, WIDTH = 8, 24


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = nn.Linear(SIZE, SIZE)
        self.norm = nn.LayerNorm(SIZE)

    def forward(self, x):
        return x + self.mlp(self.norm(x)), None


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.h = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(SIZE, 5)

    def forward(self, x):
        for block in self.h:
            x, _ = block(x)
        return self.head(x)


def dictionary(rng):
    kind = rng.choice(["relu", "topk", "jumprelu", "gated", "batchtopk"])
    made = th.Dictionary(SIZE, WIDTH, kind=kind, k=4 if "topk" in kind else None, center=rng.random() < 0.5).double()
    for each in made.parameters():
        nn.init.normal_(each)
    if hasattr(made, "threshold"):
        made.threshold.data.fill_(0.3)
    return made.eval()


def random_edit(rng, layer):
    """Return an edit, and the mask and the function of what it does, written out."""
    latent, position, number = rng.randrange(WIDTH), rng.randrange(4), rng.uniform(-2, 5)
    mask = torch.zeros(2, 4, WIDTH, dtype=torch.bool)
    kind = rng.choice(["latent", "scale", "in place", "function"])
    mask[:, slice(None) if kind == "latent" else position, latent] = True

    def write(latents):
        latents[:, position, latent] = number

    def change(latents):
        return torch.where(mask, number, latents)

    if kind == "latent":
        return {f"h.{layer}@latents[{latent}]": th.set(number)}, change
    if kind == "scale":
        edit = {f"h.{layer}@latents": th.scale(number, at=th.at[:, position, latent])}
        return edit, lambda latents: torch.where(mask, number * latents, latents)
    return {f"h.{layer}@latents": write if kind == "in place" else change}, change


@pytest.mark.parametrize("seed", range(25))
def test_values_and_gradients_are_those_of_the_formula(seed):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    model, x = Model().double().eval(), torch.randn(2, 4, SIZE).double()
    saes = {layer: dictionary(rng) for layer in rng.sample(range(3), rng.randint(1, 3))}
    with_error, edits, changes = rng.random() < 0.7, {}, {}
    for layer in saes:
        if rng.random() < 0.7:
            edit, changes[layer] = random_edit(rng, layer)
            edits |= edit
    latents = {}

    def by_hand(value):
        for layer, block in enumerate(model.h):
            value, _ = block(value)
            if layer in saes:
                clean = saes[layer].encode(value)
                error = value - saes[layer].decode(clean)
                latents[layer] = changes.get(layer, torch.clone)(clean)
                latents[layer].retain_grad()
                value = saes[layer].decode(latents[layer]) + (error if with_error else 0)
        return model.head(value)

    tensors = [*model.parameters(), *(each for sae in saes.values() for each in sae.parameters())]

    def gradients(given):
        found = [torch.zeros_like(each) if each.grad is None else each.grad.clone() for each in (given, *tensors)]
        for each in tensors:
            each.grad = None
        return found

    first, second = (x.clone().requires_grad_() for _ in range(2))
    expected = by_hand(first)
    expected.square().sum().backward()
    wanted = gradients(first)
    points = [f"h.{layer}@latents" for layer in saes]
    with th.splice(model, {f"h.{layer}": sae for layer, sae in saes.items()}, error=with_error):
        with th.edit(model, edits) if edits else contextlib.nullcontext(), th.record(model, points, grad=True) as tape:
            found = model(second)
            found.square().sum().backward()
    close = {"atol": 1e-8, "rtol": 1e-6}
    assert torch.allclose(found, expected, **close)
    for own, hand in zip(gradients(second), wanted, strict=True):
        assert torch.allclose(own, hand, **close)
    for layer, value in latents.items():
        assert torch.allclose(tape[f"h.{layer}@latents"], value, **close)
        assert torch.allclose(tape.grad[f"h.{layer}@latents"], value.grad, **close)


MODES = {"no_grad": torch.no_grad, "inference": torch.inference_mode, "grad": torch.enable_grad}


@pytest.mark.parametrize(
    ("mode", "compiled"),
    [("no_grad", False), ("inference", False), ("grad", False), ("no_grad", True), ("grad", True)],
)
@pytest.mark.parametrize("point", ["latents", "error"])
def test_an_edit_in_place_acts_once_and_keeps_the_bits_elsewhere(mode, compiled, point):
    torch.manual_seed(3)
    model, x = Model().eval(), torch.randn(2, 4, SIZE)
    sae = th.Dictionary(SIZE, WIDTH, kind="topk", k=4)
    called = torch.compile(model, backend="eager") if compiled else model

    def write(value):
        value[:, -1, 3] = 5.0

    def edited(value):
        latents = sae.encode(value)
        error = value - sae.decode(latents)
        write(latents if point == "latents" else error)
        return torch.cat([value[:, :-1], (sae.decode(latents) + error)[:, -1:]], 1)

    with torch.no_grad():
        value = model.h[1](model.h[0](x)[0])[0]
        expected = model.head(model.h[2](edited(value))[0])
        plain = model(x)
    with MODES[mode](), th.splice(called, {"h.1": sae}, error=True), th.edit(called, {f"h.1@{point}": write}):
        found = called(x)
    assert torch.allclose(found, expected, atol=1e-5)
    assert not torch.allclose(found[:, -1], plain[:, -1], atol=1e-3)
    assert torch.equal(found[:, :-1], plain[:, :-1])


@pytest.mark.parametrize("seed", range(10))
def test_an_error_term_keeps_the_bits_of_every_dtype_and_of_rows_with_nan(seed):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    dtype = rng.choice([torch.float32, torch.float64, torch.bfloat16, torch.float16])
    model, x = Model().to(dtype).eval(), torch.randn(2, 4, SIZE, dtype=dtype)
    x[0, 1, 2], x[1, 0, 0] = float("nan"), float("inf")
    sae = dictionary(rng).to(rng.choice([torch.float32, torch.float64, torch.bfloat16]))
    with torch.no_grad():
        plain = model(x).nan_to_num(7.0)
        with th.splice(model, {"h.1": sae, "h.2": dictionary(rng)}, error=True):
            assert torch.equal(model(x).nan_to_num(7.0), plain)
            with th.record(model, "h.1@latents", "h.2@error"):
                assert torch.equal(model(x).nan_to_num(7.0), plain)
        with th.splice(model, {"h.1": sae}, error=True):
            with th.edit(model, {"h.1@latents": th.add(2.0, at=th.at[0, 0, 4])}):
                found = model(x).nan_to_num(7.0)
    assert torch.equal(found[0, 1:], plain[0, 1:])
    assert torch.equal(found[1], plain[1])


def test_a_function_that_keeps_the_latents_can_differentiate_by_them():
    torch.manual_seed(0)
    model, x, sae, seen = Model().eval(), torch.randn(2, 4, SIZE), th.Dictionary(SIZE, WIDTH), []
    with th.splice(model, {"h.1": sae}, error=True), th.edit(model, {"h.1@latents": seen.append}):
        loss = model(x).square().sum()
    (found,) = torch.autograd.grad(loss, seen[0])
    with th.splice(model, {"h.1": sae}, error=True), th.record(model, "h.1@latents", grad=True) as tape:
        model(x).square().sum().backward()
    assert torch.allclose(found, tape.grad["h.1@latents"], atol=1e-5)


def test_latents_of_another_layout_keep_the_bits():
    class Flat(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(SIZE, WIDTH))

        def encode(self, value):
            return (value @ self.weight).relu().reshape(-1, WIDTH)

        def decode(self, latents):
            return (latents @ self.weight.T).reshape(2, 4, SIZE)

    model, x = Model().eval(), torch.randn(2, 4, SIZE)
    plain = model(x)
    with th.splice(model, {"h.1": Flat()}, error=True), th.record(model, "h.1@latents", grad=True) as tape:
        found = model(x)
        found.sum().backward()
    assert torch.equal(found, plain)
    assert tape.grad["h.1@latents"].shape == (8, WIDTH)


class Foreign(nn.Module):
    """A dictionary of another library, in three kinds."""

    def __init__(self, kind):
        super().__init__()
        self.inner, self.kind = th.Dictionary(SIZE, WIDTH), kind

    def encode(self, value):
        if self.kind == "norm":  # Kept from encode to decode, and deleted there, as in SAELens.
            self.norm = value.norm(dim=-1, keepdim=True)
            value = value / self.norm
        return self.inner.encode(value)

    def decode(self, latents):
        if self.kind == "mixing":
            latents = latents.cumsum(1)
        found = self.inner.decode(latents)
        if self.kind == "norm":
            found = found * self.norm
            del self.norm
        return found


@pytest.mark.parametrize("kind", ["plain", "norm", "mixing"])
def test_dictionaries_of_other_libraries_are_decoded_as_written_out(kind):
    torch.manual_seed(0)
    model, x, sae = Model().eval(), torch.randn(2, 4, SIZE), Foreign(kind)
    plain = model(x)

    def edited(value):
        latents = sae.encode(value)
        error = value - sae.decode(latents)
        latents = latents.clone()
        latents[:, 1, 3] = 5.0
        sae.encode(value)
        return sae.decode(latents) + error

    with torch.no_grad():
        expected = model.head(model.h[2](edited(model.h[1](model.h[0](x)[0])[0]))[0])
    with th.splice(model, {"h.1": sae}, error=True):
        assert torch.equal(model(x), plain)
        with th.record(model, "h.1@latents", grad=True) as tape:
            found = model(x)
            found.sum().backward()
        assert torch.equal(found, plain)
        assert tape.grad["h.1@latents"].abs().sum() > 0
        with th.edit(model, {"h.1@latents[3]": th.set(5.0, at=th.at[:, 1])}):
            found = model(x)
    assert torch.allclose(found, expected, atol=1e-5)
    assert torch.equal(found[:, 0], plain[:, 0])
