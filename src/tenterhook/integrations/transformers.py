"""Hugging Face Transformers: the same names for the parts of many architectures, and recorded generation.

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

from torch import Tensor, nn

import tenterhook as th
from tenterhook.address.grammar import escape
from tenterhook.address.meanings import ATTENTION_CHILDREN, MLP_CHILDREN
from tenterhook.record.generation import joined, run_of

__all__ = ["Aliases", "Generated", "aliases", "generate", "model_of"]

COUNTS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")


@dataclass(frozen=True)
class Aliases:
    """Addresses of the parts of a model, by meaning.

    ``layers``: the output of each layer. ``attn`` and ``mlp``: the output of each layer's attention and MLP. ``resid``:
    the residual stream before each layer and after the last, one more than there are layers. ``embed``, ``norm`` and
    ``head``: single addresses, empty if the model has none.
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
        """Return an alias by name. ``names["attn.3"]`` is the address for one layer."""
        alias, dot, index = name.partition(".")
        if alias.startswith("_") or alias not in self.__dataclass_fields__ or alias == "family":
            known = ", ".join(field for field in self.__dataclass_fields__ if field != "family")
            raise th.AddressError(
                f"{name!r} is not an alias. The aliases are {known}; {known.split(', ')[0]}.3 is a single one."
            )
        found: tuple[str, ...] | str = getattr(self, alias)
        if not dot:
            return found
        try:
            return found[int(index)] if isinstance(found, tuple) else _no_number(name)
        except (ValueError, IndexError):
            raise th.AddressError(f"{name!r}: there are {alias}.0 to {alias}.{len(found) - 1}") from None


def model_of(thing: Any) -> nn.Module:
    """Return the model of a pipeline, or the model itself. Raise ``UnsupportedModel`` for anything else."""
    found = thing if isinstance(thing, nn.Module) else getattr(thing, "model", None)
    if not isinstance(found, nn.Module):
        raise th.UnsupportedModel(f"a model or a pipeline is needed; got a {type(thing).__name__}")
    return found


def aliases(model: Any, *, part: Literal["decoder", "encoder"] | None = None) -> Aliases:
    """Return the aliases of a model or of a pipeline's model. Every address is checked to exist.

    Args:
        model: a transformers model, plain, in a pipeline, or wrapped (by peft, by ``DistributedDataParallel``).
        part: the half of an encoder-decoder model.

    Raises:
        UnsupportedModel: the layers, attention or MLP cannot be found, or ``part`` is needed.
    """
    model = model_of(model)
    config = _config(model)
    stack = _stack(model, config, part)
    listed: Any = model.get_submodule(stack)
    layers = tuple(f"{escape(stack)}.{number}" for number in range(len(listed)))
    found = Aliases(
        str(getattr(config, "model_type", type(model).__name__)), layers,
        _inside(model, layers, ATTENTION_CHILDREN), _inside(model, layers, MLP_CHILDREN),
        (*(f"{layer}:in" for layer in layers), layers[-1]),
        _asked(model, "get_input_embeddings"), _last_norm(model, stack), _asked(model, "get_output_embeddings"),
    )  # fmt: skip
    _validate(model, found)
    return found


# -- generation -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Generated:
    """The result of :func:`generate`: the tokens, and a tape with one call for each step."""

    tokens: Tensor
    tape: th.Tape

    def joined(self, point: str) -> Tensor:
        """Return the values of all steps at a point, joined along the positions, as ``tape.sequence`` does.

        With ``keep=``, join the steps that are held.
        """
        run, held = run_of(self.tape, -1), self.tape.calls(point)
        steps = run["steps"][-len(held) :]
        return joined(point, held, {**run, "steps": [[start - steps[0][0], length] for start, length in steps]})


def generate(model: Any, inputs: Any, *points: Any, keep: Any = "all", **kwargs: Any) -> Generated:
    """Generate tokens, and record some points at every step.

    Args:
        model: a model with ``generate``, or a pipeline of one.
        inputs: token ids, or the output of a tokenizer.
        *points: as for ``th.record``.
        keep: ``"all"`` steps, the ``"last"``, or a number of last steps, which limits the memory.
        **kwargs: options of ``model.generate``.

    Returns:
        A :class:`Generated` with the tokens and the tape.

    Raises:
        UnsupportedModel: the model has no ``generate``.
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
    raise th.UnsupportedModel(f"{type(model).__name__} has no transformers config, so its parts cannot be found")


def _stack(model: nn.Module, config: Any, part: str | None) -> str:
    """Return the name of the list of layers."""
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
            raise th.UnsupportedModel(f"{type(model).__name__} has the stacks {shown}. Choose one: part='decoder'.")
        found = wanted
    if not found:
        shown = ", ".join(str(count) for count in counts if count is not None)
        raise th.UnsupportedModel(f"{type(model).__name__} has no list of {shown} layers of one class")
    return found[0]


def _inside(model: nn.Module, layers: Sequence[str], candidates: Sequence[str]) -> tuple[str, ...]:
    """Return the address of the same part in every layer, for the first candidate that exists."""
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
    """Return the name of the module that a method of the model returns, or an empty string."""
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
    """Return the address of the last norm that follows the list of layers, or an empty string."""
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
            "Use the addresses directly: print th.points(model)."
        )


def _no_number(name: str) -> str:
    raise th.AddressError(f"{name!r}: there is only one, without a number")
