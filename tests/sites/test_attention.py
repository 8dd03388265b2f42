"""Attention calls: the pattern and the scores that are computed beside a kernel, and the comparison with its output."""

import math

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

import tenterhook as th


def model_with(function):
    """Return a model whose attention calls a function of one's own, as transformers does."""

    class Attention(nn.Module):
        is_causal = True

        def forward(self, given, **options):
            attention_interface = function
            return attention_interface(self, *given, **options)[0]

    return nn.Sequential(Attention())


def recorded(model, *given, **options):
    with torch.no_grad(), th.record(model, "0@pattern", "0@z") as tape:
        model[0](given, **options)
    return tape["0@pattern"], tape["0@z"]


def flash(module, query, key, value, mask, *, scaling, sliding_window=None, softcap=None, is_causal=None, **_):
    """Compute what flash attention documents, position by position. The mask is one of padding, ``[batch, key]``."""
    batch, heads, queries, _size = query.shape
    keys, group = key.shape[2], heads // key.shape[1]
    causal = module.is_causal if is_causal is None else is_causal
    out = torch.zeros(batch, queries, heads, value.shape[-1], dtype=query.dtype)
    for b, h, i in ((b, h, i) for b in range(batch) for h in range(heads) for i in range(queries)):
        place = i + keys - queries  # The last query belongs to the last key.
        chosen = [
            j for j in range(keys)
            if (not causal or j <= place)
            and (sliding_window is None or abs(place - j) < sliding_window)
            and (mask is None or mask[b, j])
        ]  # fmt: skip
        if chosen:
            scores = torch.stack([query[b, h, i] @ key[b, h // group, j] * scaling for j in chosen])
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            out[b, i, h] = scores.softmax(0) @ value[b, h // group, chosen]
    return out, None


@pytest.mark.parametrize("seed", range(24))
def test_flash_attention_with_padding_windows_and_a_cache(seed):
    draw = torch.Generator().manual_seed(seed)

    def pick(*choices):
        return choices[int(torch.randint(len(choices), (1,), generator=draw))]

    keys, heads = pick(4, 7), pick(1, 2)
    queries = pick(1, 2, keys)
    query, key, value = (
        torch.randn(2, n, length, 4, generator=draw, dtype=torch.float64)
        for n, length in ((2 * heads, queries), (heads, keys), (heads, keys))
    )
    mask = pick(None, torch.ones(2, keys, dtype=torch.long))
    if mask is not None:
        mask[0, : pick(1, 2)] = 0
    options = {"scaling": 0.7, "sliding_window": pick(None, 2, 3, 9), "softcap": pick(None, 1.5)}
    options["is_causal"] = pick(True, False, None)
    pattern, z = recorded(model_with(flash), query, key, value, mask, **options)
    found = pattern @ value.repeat_interleave(2, 1)
    seen = z.abs().amax(-1, keepdim=True) > 0  # Queries that are padding see no key.
    assert torch.allclose(found.transpose(1, 2) * seen, z, atol=1e-12)


@pytest.mark.parametrize("seed", range(8))
def test_flex_attention(seed):
    draw = torch.Generator().manual_seed(seed)
    queries, keys, document = 5, 5, torch.randint(3, (2, 5), generator=draw).sort(-1).values

    def allowed(batch, _head, i, j):
        return (document[batch, i] == document[batch, j]) & (i >= j)

    def flexible(_module, query, key, value, mask, *, scaling, softcap=None):
        def change(score, *_):
            return score if softcap is None else softcap * torch.tanh(score / softcap)

        out = flex_attention(query, key, value, change, mask, scaling, enable_gqa=True)
        return out.transpose(1, 2), None

    query, key, value = (torch.randn(2, heads, queries, 16, generator=draw) for heads in (4, 2, 2))
    mask = create_block_mask(allowed, 2, None, queries, keys, device="cpu")
    options = {"scaling": 0.4, "softcap": [None, 2.0][seed % 2]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.warn", lambda *_, **__: None)  # It advises to compile.
        pattern, z = recorded(model_with(flexible), query, key, value, mask, **options)
    seen = (document[:, :, None] == document[:, None]) & torch.ones(5, 5, dtype=torch.bool).tril()
    assert torch.equal(pattern.amax(1) > 0, seen)
    assert torch.allclose((pattern @ value.repeat_interleave(2, 1)).transpose(1, 2), z, atol=1e-5)


def test_a_mask_of_an_unknown_type_is_refused():
    model = model_with(lambda _module, q, _k, _v, _mask, **_: (q.transpose(1, 2), None))
    given = [torch.randn(1, 1, 3, 4)] * 3
    with pytest.raises(th.UnsupportedModel, match="has a mask of type str"):
        recorded(model, *given, "causal", scaling=1.0)
    with pytest.raises(th.UnsupportedModel, match="paged cache"):
        recorded(model, *given, None, scaling=1.0, cache=object())


# -- the comparison ----------------------------------------------------------------------------------------------------


def doubled(_module, query, key, value, _mask, *, scaling, dropout=0.0):
    """Compute attention with another scale than the one that is given."""
    pattern = torch.dropout((query @ key.mT * 2 * scaling).softmax(-1), dropout, train=True)
    return (pattern @ value).transpose(1, 2), None


def given_with(size):
    draw = torch.Generator().manual_seed(0)
    query, *rest = (torch.randn(2, 2, 5, 4, generator=draw) for _ in range(3))
    return query * size, *rest, torch.zeros(1, 1, 5, 5)


@pytest.mark.parametrize("name", ["pattern", "scores"])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_an_edit_of_what_cannot_be_computed_is_refused_too(name, dropout):
    model = model_with(doubled)
    with pytest.raises(th.UnsupportedModel, match="cannot be computed"), th.edit(model, {f"0@{name}": th.scale(1.0)}):
        model[0](given_with(1), scaling=0.5, dropout=dropout)


def test_a_call_in_which_all_keys_count_alike_proves_nothing():
    def eager_doubled(*given, **options):
        return doubled(*given, **options)

    model = model_with(eager_doubled)
    for size in (0, 1e-9):
        recorded(model, *given_with(size), scaling=0.5)
    with pytest.raises(th.UnsupportedModel, match="cannot be computed"):
        recorded(model, *given_with(1), scaling=0.5)


def test_a_function_that_is_not_known_is_compared_in_each_call():
    def packed(_module, query, key, value, mask, *, scaling, starts):
        scores = query @ key.mT * scaling + mask
        seen = starts[:, None] == starts[None]
        return (scores.masked_fill(~seen, -math.inf).softmax(-1) @ value).transpose(1, 2), None

    model = model_with(packed)
    recorded(model, *given_with(1), scaling=0.5, starts=torch.zeros(5))
    with pytest.raises(th.UnsupportedModel, match="cannot be computed"):
        recorded(model, *given_with(1), scaling=0.5, starts=torch.tensor([0.0, 0, 0, 1, 1]))


def test_rows_in_which_every_key_is_masked_are_not_compared():
    def eager(_module, query, key, value, mask, *, scaling):
        pattern = (query @ key.mT * scaling + mask).softmax(-1).nan_to_num()
        return (pattern @ value).transpose(1, 2), None

    query, key, value, mask = given_with(1)
    mask = mask.repeat(2, 1, 1, 1)
    mask[0, :, :2] = -math.inf
    pattern, z = recorded(model_with(eager), query, key, value, mask, scaling=0.5)
    assert torch.allclose((pattern @ value).transpose(1, 2)[1], z[1], atol=1e-6)


def test_known_kernels_are_compared_once():
    runs = []

    class Attention(nn.Module):
        def forward(self, given):
            query, key, value, _ = given
            return scaled_dot_product_attention(query, key, value).transpose(1, 2)

    model = nn.Sequential(Attention())
    with pytest.MonkeyPatch.context() as patch:
        from tenterhook.sites.attention import AttentionCall

        check = AttentionCall._check
        patch.setattr(AttentionCall, "_check", lambda *given: runs.append(1) or check(*given))
        for _ in range(3):
            recorded(model, *given_with(1))
    assert len(runs) == 1
