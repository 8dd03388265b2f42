"""An attention call: its arguments, and the scores, the pattern and the output that it computes.

Fused kernels (SDPA, flash attention) compute no pattern. It is computed here from the query, the key, the mask and the
scale of the same call, and compared with the output of the kernel.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from tenterhook.address.functions import plain
from tenterhook.errors import UnsupportedModel
from tenterhook.pytorch.modes import is_fake
from tenterhook.pytorch.tracing import is_exporting
from tenterhook.pytorch.transforms import in_transform

__all__ = ["AttentionCall", "per_head_result"]

# The largest relative difference between the output of a kernel and the output that the pattern gives.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
OTHER_OUTPUT = (
    "the attention pattern of {address!r} cannot be computed from its query, key, mask and scale: the output would "
    "differ by {difference:.2g} (relative). {kind} computes its attention in another way. Use "
    'attn_implementation="eager" and a point inside its forward, or th.register_meaning({kind}, "pattern", ...).'
)
NOT_ATTENTION = "{kind} calls its attention function with arguments that are not known: {given}"
UNKNOWN_MASK = "{kind} has a mask of type {mask}, which is not known. Use attn_implementation='sdpa'."
PAGED = (
    "{kind} keeps its keys in a paged cache (continuous batching), so the keys of this call are not those that it "
    "attends to. Call generate() instead."
)
NAMES = ("module", "query", "key", "value", "attention_mask")
TORCH_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
FOUR = 4


_checked: WeakKeyDictionary[type[nn.Module], set[Any]] = WeakKeyDictionary()


def _kind(given: tuple[str, Any]) -> tuple[str, str]:
    name, value = given
    is_scalar = isinstance(value, (bool, int, float, str, type(None)))
    return name, repr(value) if is_scalar else type(value).__name__


@dataclass(frozen=True)
class AttentionCall:
    """One call of an attention function; query, key and value are ``[batch, head, token, size]``."""

    function: Any
    given: dict[str, Any]
    is_torch: bool
    """True for ``torch.nn.functional.scaled_dot_product_attention``"""

    @classmethod
    def of(cls, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], module: nn.Module) -> Self:
        """Return the call of a function with some arguments."""
        is_torch = not (args and isinstance(args[0], nn.Module)) and "module" not in kwargs
        names = TORCH_NAMES if is_torch else NAMES
        call = cls(function, {**dict(zip(names, args, strict=False)), **kwargs}, is_torch)
        tensors = [call.given.get(name) for name in ("query", "key", "value")]
        if len(args) > len(names) or not _fit_together(tensors):
            shown = ", ".join([*(type(each).__name__ for each in args), *kwargs])
            raise UnsupportedModel(NOT_ATTENTION.format(kind=type(module).__name__, given=shown))
        return call

    def with_value(self, name: str, value: Tensor) -> Self:
        """Return the call with another query, key or value."""
        return replace(self, given={**self.given, name: value})

    def run(self) -> Any:
        """Call the function itself."""
        given = dict(self.given)
        names = TORCH_NAMES[:4] if self.is_torch else NAMES
        args = [given.pop(name) for name in names if name in given]
        return self.function(*args, **given)

    # -- the same by hand ----------------------------------------------------------------------------------------------

    def scores(self) -> Tensor:
        """Return the input of the softmax: scaled products of queries and keys, with the mask added."""
        query, key = self.given["query"], self._for_each_head("key")
        if self.given.get("cache") is not None:
            raise UnsupportedModel(PAGED.format(kind=type(self.given.get("module")).__name__))
        scores = torch.matmul(query, key.mT) * self._scale
        if (cap := self.given.get("softcap")) is not None:
            scores = torch.tanh(scores / cap) * cap
        if (bias := self.given.get("position_bias")) is not None:
            scores = scores + bias
        mask = self._mask(scores)
        if mask is None:
            return scores
        if mask.dtype == torch.bool:
            return scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        return scores + mask

    def pattern(self, scores: Tensor) -> Tensor:
        """Return the softmax of the scores, in float32 as transformers does, in the dtype of the query."""
        sinks, dtype = self.given.get("s_aux"), torch.promote_types(scores.dtype, torch.float32)
        if sinks is None:
            return torch.softmax(scores, -1, dtype=dtype).to(self.given["query"].dtype)
        column = sinks.reshape(1, -1, 1, 1).expand(scores.shape[0], -1, scores.shape[2], 1).to(scores.dtype)
        whole = torch.softmax(torch.cat([scores, column], -1), -1, dtype=dtype)
        return whole[..., :-1].to(self.given["query"].dtype)

    def output(self, pattern: Tensor) -> Any:
        """Return what the function returns, computed with a pattern."""
        if self.dropout:
            pattern = torch.dropout(pattern, self.dropout, train=True)
        out = torch.matmul(pattern, self._for_each_head("value"))
        if self.is_torch:
            return out
        return out.transpose(1, 2).contiguous(), pattern if self._is_eager else None

    def z_of(self, output: Any) -> Tensor:
        """Return the output of each head, ``[batch, token, head, size]``, from what the function returned."""
        return output.transpose(1, 2) if self.is_torch else output[0]  # type: ignore[no-any-return]

    def with_z(self, output: Any, z: Tensor) -> Any:
        """Return the function's output with another output of the heads."""
        return z.transpose(1, 2) if self.is_torch else (z, *output[1:])

    @property
    def dropout(self) -> float:
        """The probability of dropout in this call."""
        return float(self.given.get("dropout_p" if self.is_torch else "dropout") or 0.0)

    def check_once(self, scores: Tensor, pattern: Tensor, output: Any, address: str, module: nn.Module) -> None:
        """Raise if the pattern does not give the output that the function returns.

        Args:
            scores: the scores of this call, without edits.
            pattern: the pattern of this call, without edits.
            output: what the function returned; None if it did not run.
            address: the point, for the error.
            module: the attention module.

        For SDPA and eager attention, a comparison holds for all modules of the class that use the same function with
        the same kind of arguments. Other functions can choose another way by their values, as flash attention does for
        packed sequences, so each of their calls is compared.
        """
        known = _checked.setdefault(type(module), set())
        kind = (plain(self.function), self.is_torch, pattern.dtype, *sorted(map(_kind, self.given.items())))
        if kind in known or pattern.shape[-1] == 1 or not _can_compare(pattern):  # With one key, every pattern is 1.
            return
        if self.dropout:
            self._without_dropout().check_once(scores, pattern, None, address, module)
            return
        with torch.no_grad():
            found = self._check(scores, pattern, self.run() if output is None else output, address, module)
        if found and (self.is_torch or self._is_eager or self._is_sdpa):
            known.add(kind)

    def _check(self, scores: Tensor, pattern: Tensor, output: Any, address: str, module: nn.Module) -> bool:
        """Raise if the pattern does not give the output. Return whether the comparison can tell patterns apart."""
        theirs = self.z_of(output).detach()
        # Rows in which every key is masked, as for padding, have no meaning, and kernels differ in them.
        seen = scores > torch.finfo(scores.dtype).min / 2
        shown = seen.any(-1).transpose(1, 2).unsqueeze(-1)
        size = torch.where(shown, theirs.abs(), 0).amax().clamp(min=1e-12)

        def far(pattern: Tensor) -> Tensor:
            gap = (self.z_of(self.output(pattern)).detach() - theirs).abs()
            return torch.where(shown, gap, 0).amax() / size

        even = (seen / seen.sum(-1, keepdim=True).clamp(min=1)).to(pattern.dtype)
        difference, other = torch.stack([far(pattern), far(even)]).tolist()
        limit = TOLERANCE.get(theirs.dtype, 5e-2)
        if not difference <= limit:
            kind = type(module).__name__
            raise UnsupportedModel(OTHER_OUTPUT.format(address=address, kind=kind, difference=difference))
        return bool(other > limit)  # Where scores are all but equal, another scale gives the same output.

    def _without_dropout(self) -> Self:
        return replace(self, given={**self.given, "dropout_p" if self.is_torch else "dropout": 0.0})

    @property
    def _is_sdpa(self) -> bool:
        return "sdpa" in getattr(self.function, "__name__", "")

    @property
    def _is_eager(self) -> bool:
        return "eager" in getattr(self.function, "__name__", "")

    @property
    def _scale(self) -> float:
        scale = self.given.get("scale" if self.is_torch else "scaling")
        return float(scale) if scale is not None else self.given["query"].shape[-1] ** -0.5

    def _for_each_head(self, name: str) -> Tensor:
        """Return the key or the value, repeated for the heads of a group that share it."""
        tensor: Tensor = self.given[name]
        times = self.given["query"].shape[1] // tensor.shape[1]
        return tensor.repeat_interleave(times, 1) if times > 1 else tensor

    def _mask(self, scores: Tensor) -> Tensor | None:
        mask = self.given.get("attn_mask" if self.is_torch else "attention_mask")
        if mask is None:
            return self._positions(scores)
        if not isinstance(mask, Tensor):
            return self._dense(mask, scores)
        if mask.dim() == 2 and not self.is_torch:  # noqa: PLR2004  Flash attention takes a mask of padding.
            padding, positions = mask[:, None, None, -scores.shape[-1] :].bool(), self._positions(scores)
            return padding if positions is None else padding & positions
        return mask[..., : scores.shape[-1]]

    def _dense(self, mask: Any, scores: Tensor) -> Tensor:
        """Return a mask of flex attention as a tensor."""
        from torch.nn.attention.flex_attention import BlockMask, create_mask

        if not isinstance(mask, BlockMask):
            kind = type(self.given.get("module")).__name__
            raise UnsupportedModel(UNKNOWN_MASK.format(kind=kind, mask=type(mask).__name__))
        batch, heads, queries, keys = *mask.kv_num_blocks.shape[:2], *scores.shape[-2:]
        return create_mask(mask.mask_mod, batch, heads, queries, keys, device=str(scores.device))

    def _positions(self, scores: Tensor) -> Tensor | None:
        """Return the mask that a function without a mask of its own makes from the positions, or None."""
        queries, keys = scores.shape[-2:]
        ones = scores.new_ones(queries, keys, dtype=torch.bool)
        if self.is_torch or self._is_sdpa:  # The first query belongs to the first key.
            return ones.tril() if self._is_causal(queries) else None
        if self._is_eager:
            return None
        # Flash attention: the last query belongs to the last key.
        window = self.given.get("sliding_window")
        if window is not None and keys > window:
            ones = ones.triu(keys - queries - window + 1).tril(keys - queries + window - 1)
        return ones.tril(keys - queries) if self._is_causal(queries) else ones

    def _is_causal(self, queries: int) -> bool:
        if self.is_torch:
            return bool(self.given.get("is_causal"))
        if queries == 1 and self._is_sdpa:
            return False
        asked = self.given.get("is_causal")
        return bool(getattr(self.given["module"], "is_causal", True) if asked is None else asked)


def _can_compare(tensor: Tensor) -> bool:
    """Return whether the numbers of a tensor can be compared here."""
    return not (tensor.is_meta or is_fake(tensor) or in_transform() or torch.compiler.is_compiling() or is_exporting())


def _fit_together(tensors: list[Any]) -> bool:
    if any(not isinstance(each, Tensor) or each.dim() != FOUR for each in tensors):
        return False
    query, key, value = (each.shape for each in tensors)
    same = key[1:3] == value[1:3] and query[3] == key[3]
    return bool(same and key[1] > 0 and query[1] % key[1] == 0)


def per_head_result(z: Tensor, projection: nn.Module) -> Tensor:
    """Return what each head writes to the residual stream, ``[batch, token, head, width]``, without the bias."""
    weight: Any = projection.weight
    heads, size = z.shape[-2:]
    # nn.Linear has [out, in], and Conv1D of transformers [in, out].
    rows = weight.T if isinstance(projection, nn.Linear) else weight
    return torch.einsum("bthd,hdo->btho", z, rows.reshape(heads, size, -1))
