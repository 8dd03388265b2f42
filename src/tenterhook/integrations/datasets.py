"""Hugging Face Datasets: values of a model as columns of a data set.

``dataset.map(features(model, {"h.6": "middle"}), batched=True, batch_size=32)`` adds a column ``middle``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import tenterhook as th
from tenterhook._tree import tensors

__all__ = ["features"]


def features(
    model: nn.Module,
    points: Mapping[str, str],
    *,
    inputs: Sequence[str] = ("input_ids", "attention_mask"),
    at: Any = None,
) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Return a function for ``Dataset.map(..., batched=True)`` that adds values at points as columns.

    The model runs without gradients and only as far as the last point. Only the first run is complete, to detect points
    that are reached several times. For such a point, name the call (``"cell#2"``).

    Args:
        model: any ``nn.Module``.
        points: a dict of address to column name.
        inputs: the columns to pass to the model, by name. Columns that a batch does not have are left out. Examples of
            different lengths need a batch size of 1, or a tokenizer that pads.
        at: the part of each value to use, such as ``th.at[:, 0]``. The examples stay in the first dimension.

    Raises:
        UnsupportedModel: a batch has none of the columns. Raised by the returned function.
        TapeError: the value at a point is not one tensor. Raised by the returned function.
    """
    body = th.features(model, points)
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))

    def run(batch: Mapping[str, Any]) -> dict[str, Any]:
        given = {name: _tensor(batch[name], name).to(device) for name in inputs if name in batch}
        if not given:
            has = ", ".join(batch)
            raise th.UnsupportedModel(f"the batch has none of {', '.join(inputs)}; it has {has}. Give inputs=[...].")
        with torch.no_grad():
            found = body(**given)
        return {column: _column(found[column], address, at) for address, column in points.items()}

    return run


def _tensor(values: Any, name: str) -> Tensor:
    try:
        return torch.as_tensor(values)
    except (ValueError, TypeError) as error:
        text = f"the column {name!r} cannot be converted to a tensor: {error}"
        raise ValueError(f"{text}. Pad the examples to one length, or use batch_size=1.") from error


def _column(value: Any, address: str, at: Any) -> Any:
    found = [tensor for _, tensor in tensors(value)]
    if len(found) != 1:
        raise th.TapeError(f"{address!r} has {len(found)} tensors, but a column needs exactly one")
    tensor = found[0] if at is None else found[0][at]
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).cpu().numpy()
