"""GPT-2 written out part by part, so that each part can read a stream of its own. An independent reference."""

import math

import torch


def unrolled(model, ids, stream):
    """Return the logits. ``stream(receiver, written)`` returns what a receiver reads, given what was written so far."""
    body, written = model.transformer, {}
    heads = model.config.n_head
    places = torch.arange(ids.shape[1])
    written["embed"] = body.wte(ids) + body.wpe(places)
    for number, layer in enumerate(body.h):
        attention = layer.attn
        size = attention.c_attn.weight.shape[0] // heads
        weights = attention.c_attn.weight.split(size * heads, 1)
        biases = attention.c_attn.bias.split(size * heads)
        made = {}
        for head in range(heads):
            part = slice(head * size, (head + 1) * size)
            q, k, v = (
                layer.ln_1(stream(f"attn{number}.{head}.{name}", written)) @ weight[:, part] + bias[part]
                for name, weight, bias in zip("qkv", weights, biases, strict=True)
            )
            scores = q @ k.mT / math.sqrt(size)
            later = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)
            z = scores.masked_fill(later, -torch.inf).softmax(-1) @ v
            made[f"attn{number}.{head}"] = z @ attention.c_proj.weight[part]
        written |= made
        written[f"bias{number}"] = attention.c_proj.bias.expand_as(written["embed"])
        written[f"mlp{number}"] = layer.mlp(layer.ln_2(stream(f"mlp{number}", written)))
    return model.lm_head(body.ln_f(stream("logits", written)))


def plain(_receiver, written):
    """Return the stream itself."""
    return sum(written.values())


def writes(model, ids):
    """Return what each part writes, in a run without patches."""
    found = {}

    def stream(receiver, written):
        found.update(written)
        return plain(receiver, written)

    unrolled(model, ids, stream)
    return found
