"""Transformers: the same names for the same parts of many architectures, and generation that is recorded.

>>> from transformers import GPT2Config, GPT2LMHeadModel
>>> from tenterhook.integrations.transformers import aliases
>>> names = aliases(GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=20)))
>>> names.attn, names.mlp[1], names.resid[2]
(('transformer.h.0.attn', 'transformer.h.1.attn'), 'transformer.h.1.mlp', 'transformer.h.1')
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

import tenterhook as th
from tenterhook._tree import tensors
from tenterhook.address.grammar import escape

__all__ = ["Aliases", "Generated", "aliases", "generate", "model_of"]

# Where a layer keeps what its attention, and its MLP, write; the first that is there. What BERT calls attention has the
# residual and the norm in it already, so that its dense layer is meant.
ATTENTION = (
    "self_attn", "attn", "self_attention", "attention.output.dense", "attention.o_proj", "attention",
    "layer.0.SelfAttention", "mixer",
)  # fmt: skip
MLP = (
    "mlp", "feed_forward", "ffn", "block_sparse_moe", "layer.1.DenseReluDense", "output.dense", "fc2", "intermediate",
)  # fmt: skip
COUNTS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")


@dataclass(frozen=True)
class Aliases:
    """Addresses by what they mean.

    ``layers``: the output of each layer. ``attn`` and ``mlp``: what each layer's attention and MLP write. ``resid``:
    the stream before each layer, and after the last: one more than there are layers. ``embed``, ``norm`` and ``head``
    are single addresses, empty where a model has none.
    """

    family: str
    layers: tuple[str, ...]
    attn: tuple[str, ...]
    mlp: tuple[str, ...]
    resid: tuple[str, ...]
    embed: str
    norm: str
    head: str

    def __getitem__(self, name: str) -> tuple[str, ...] | str:
        """An alias by its name; ``names["attn.3"]`` is one of them."""
        alias, dot, index = name.partition(".")
        if alias.startswith("_") or alias not in self.__dataclass_fields__ or alias == "family":
            known = ", ".join(field for field in self.__dataclass_fields__ if field != "family")
            raise th.AddressError(
                f"{name!r} is no alias. There are {known}, and {known.split(', ')[0]}.3 is one of many."
            )
        found: tuple[str, ...] | str = getattr(self, alias)
        if not dot:
            return found
        try:
            return found[int(index)] if isinstance(found, tuple) else _no_number(name)
        except (ValueError, IndexError):
            raise th.AddressError(f"{name!r}: there are {alias}.0 to {alias}.{len(found) - 1}") from None


def model_of(thing: Any) -> nn.Module:
    """The model of a pipeline; a model itself."""
    found = thing if isinstance(thing, nn.Module) else getattr(thing, "model", None)
    if not isinstance(found, nn.Module):
        raise th.UnsupportedModel(f"a model or a pipeline is needed; got a {type(thing).__name__}")
    return found


def aliases(model: Any, *, part: Literal["decoder", "encoder"] | None = None) -> Aliases:
    """The aliases of a model, or of a pipeline's; each is looked up in the model before it is given out.

    Args:
        model: a transformers model, as it is, in a pipeline, or wrapped (by peft, by ``DistributedDataParallel``).
        part: which half of an encoder-decoder.
    """
    model = model_of(model)
    config = _config(model)
    stack = _stack(model, config, part)
    listed: Any = model.get_submodule(stack)
    layers = tuple(f"{escape(stack)}.{number}" for number in range(len(listed)))
    found = Aliases(
        str(getattr(config, "model_type", type(model).__name__)), layers,
        _inside(model, layers, ATTENTION), _inside(model, layers, MLP),
        (*(f"{layer}:in" for layer in layers), layers[-1]),
        _asked(model, "get_input_embeddings"), _last_norm(model, stack), _asked(model, "get_output_embeddings"),
    )  # fmt: skip
    _validate(model, found)
    return found


# -- generation -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Generated:
    """What was generated: the tokens, and the tape of it, with one call for each step."""

    tokens: Tensor
    tape: th.Tape

    def joined(self, point: str) -> Tensor:
        """The values of all steps at a point along the positions, as one run of the whole sequence would have them.

        The last token is not among them: it was generated, and never read.
        """
        steps = [_single(value, point) for value in self.tape.calls(point)]
        if len({step.shape[0] for step in steps}) > 1 or any(step.dim() < 2 for step in steps):  # noqa: PLR2004
            shapes = ", ".join(str(list(step.shape)) for step in steps[:4])
            raise th.TapeError(f"{point!r} has no positions in its second dimension that could be joined: {shapes}, …")
        return torch.cat(steps, 1)


def generate(model: Any, inputs: Any, *points: Any, keep: Any = "all", **kwargs: Any) -> Generated:
    """Generate, with some points recorded at every step.

    Args:
        model: a model with ``generate``, or a pipeline's.
        inputs: token ids, or what a tokenizer gives.
        *points: as for ``th.record``.
        keep: ``"all"`` steps, the ``"last"``, or the last so many; then memory does not grow with the length.
        **kwargs: for ``model.generate``.
    """
    model = model_of(model)
    if not callable(getattr(model, "generate", None)):
        raise th.UnsupportedModel(f"{type(model).__name__} cannot generate: it has no generate()")
    given = dict(inputs) if isinstance(inputs, Mapping) else {"inputs": inputs}
    with th.record(model, *points, keep=keep) as tape:
        found: Any = model.generate(**given, **kwargs)
    return Generated(found if isinstance(found, Tensor) else found.sequences, tape)


# -- the parts --------------------------------------------------------------------------------------------------------


def _config(model: nn.Module) -> Any:
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "model_type") and hasattr(config, "get_text_config"):
            return config
    raise th.UnsupportedModel(f"{type(model).__name__} has no config of transformers, so that its parts have no names")


def _stack(model: nn.Module, config: Any, part: str | None) -> str:
    """The name of the list of layers."""
    text = config.get_text_config(decoder=part != "encoder") if hasattr(config, "get_text_config") else config
    counts = {getattr(each, name, None) for each in (config, text) for name in (*COUNTS, "decoder_layers")}
    found = [
        str(name) for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) in counts and len({type(each) for each in module}) == 1
    ]  # fmt: skip
    found = [name for name in found if not any(name.startswith(f"{other}.") for other in found)]
    if len(found) > 1 or part is not None:
        wanted = [name for name in found if part is not None and part in name.split(".")]
        if len(wanted) != 1:
            shown = ", ".join(found) or "none"
            raise th.UnsupportedModel(f"{type(model).__name__} has the stacks {shown}. Say which: part='decoder'.")
        found = wanted
    if not found:
        shown = ", ".join(str(count) for count in counts if count is not None)
        raise th.UnsupportedModel(f"{type(model).__name__} has no list of {shown} layers of one class")
    return found[0]


def _inside(model: nn.Module, layers: Sequence[str], candidates: Sequence[str]) -> tuple[str, ...]:
    """The same part of every layer."""
    for path in candidates:
        found = tuple(f"{layer}.{path}" for layer in layers)
        if all(_has(model, name) for name in found):
            return found
    return ()


def _has(model: nn.Module, address: str) -> bool:
    try:
        th.points(model, address)
    except th.AddressError:
        return False
    return True


def _asked(model: nn.Module, question: str) -> str:
    """The name of the module that a model tells about."""
    for module in model.modules():
        ask = getattr(module, question, None)
        if not callable(ask):
            continue
        try:
            answer = ask()
        except (NotImplementedError, AttributeError):
            continue
        for name, each in model.named_modules():
            if each is answer and name:
                return escape(name)
    return ""


def _last_norm(model: nn.Module, stack: str) -> str:
    """The norm beside the list of layers that comes after it."""
    front, _, last = stack.rpartition(".")
    parent = model.get_submodule(front)
    names = [name for name, _ in parent.named_children()]
    after = [
        name for name, module in parent.named_children()
        if "norm" in type(module).__name__.lower() and names.index(name) > names.index(last)
    ]  # fmt: skip
    return escape(f"{front}.{after[-1]}" if front else after[-1]) if after else ""


def _validate(model: nn.Module, found: Aliases) -> None:
    for point in (*found.layers, *found.attn, *found.mlp, *found.resid, found.embed, found.norm, found.head):
        if point:
            th.points(model, point)
    missing = [name for name in ("attn", "mlp") if not getattr(found, name)]
    if missing:
        layer = type(model.get_submodule(found.layers[0].replace("\\", ""))).__name__
        inside = [name for name, _ in model.get_submodule(found.layers[0].replace("\\", "")).named_children()]
        raise th.UnsupportedModel(
            f"{layer} has no {' and no '.join(missing)} under a known name; it has {', '.join(inside)}.\n"
            "Its points can be named as they are: print th.points(model)."
        )


def _single(value: Any, point: str) -> Tensor:
    found = [tensor for _, tensor in tensors(value)]
    if len(found) != 1:
        raise th.TapeError(f"{point!r} passes {len(found)} tensors, and one can be joined")
    return found[0]


def _no_number(name: str) -> str:
    raise th.AddressError(f"{name!r}: there is only one, without a number")
