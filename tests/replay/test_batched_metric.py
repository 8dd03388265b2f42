"""The metric of a sweep, computed for many cases in one call where nobody can see the difference."""

import math
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tenterhook as th
from tenterhook.replay.batched_metric import Joined, measure_together, only_measures
from tests.replay.test_prefix_serving import heads, ids, late, llama

OUTPUT = {"logits": torch.randn(1, 6, 9)}
RIGHT, WRONG, DIRECTION, SEEN, NOTES = 3, 4, torch.randn(9), [], {"weight": 2.0}
LAYER, COUNT = nn.Linear(9, 1), 0


def last(output):
    return output["logits"][0, -1]


def helped(output):
    return last(output)[RIGHT] - last(output)[WRONG]


def loop(output):
    found = [F.cross_entropy(output["logits"][0], torch.zeros(6, dtype=torch.long), reduction="none") for _ in range(2)]
    return sum(each.mean() for each in found) * NOTES["weight"]


@pytest.mark.parametrize(
    "metric",
    [
        helped,
        loop,
        lambda output: output["logits"].mean(),
        lambda output, place=2: output["logits"][0, place] @ DIRECTION,
        lambda output: torch.stack([output["logits"][0, 0, 0], math.sqrt(2) * last(output)[1]]),
        lambda output: F.softmax(output["logits"], dim=-1)[0, -1, :3],
        lambda output: last(output).argmax(),
    ],
)
def test_a_metric_that_only_computes_is_called_once_for_all(metric):
    assert only_measures(metric, OUTPUT)
    outputs = {"logits": torch.randn(5, 1, 6, 9)}
    together = measure_together(metric, outputs)
    for row, value in zip(outputs["logits"], together, strict=True):
        torch.testing.assert_close(metric({"logits": row}), value)


def an_index(draw, shape):
    """Return a random index with numbers, slices, an ellipsis or None."""
    parts = [
        draw.choice([slice(None), draw.randrange(-n, n), slice(draw.randrange(-n, n), None, draw.choice([1, 2]))])
        for n in shape[: draw.randrange(1, len(shape) + 1)]
    ]
    if draw.random() < 0.4:
        cut = draw.randrange(len(parts) + 1)
        parts[cut:] = [..., *parts[cut + len(shape) - len(parts) + (cut < len(parts)) :]]
    if draw.random() < 0.1:
        parts.append(None)
    return tuple(parts) if len(parts) > 1 or draw.random() < 0.5 else parts[0]


@pytest.mark.parametrize("seed", range(20))
def test_a_prefix_that_is_not_joined_yet_reads_as_the_whole(seed):
    draw = random.Random(seed)
    shape, at = [3, 7, 5], draw.randrange(3)
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    cut = draw.randrange(1, shape[at])
    joined = Joined(whole.narrow(at, 0, cut), whole.narrow(at, cut, shape[at] - cut), at)
    for _ in range(50):
        first, second = an_index(draw, shape), draw.choice([..., -1, slice(None), slice(1, None)])
        one = joined[first]
        assert torch.equal(one + 0, whole[first] + 0)
        if whole[first].dim() and whole[first].shape[0]:
            assert torch.equal(one[second] * 1, whole[first][second])
    assert torch.equal(torch.stack([joined, joined]), torch.stack([whole, whole]))
    assert torch.equal(F.softmax(joined, -1).sum() - joined, F.softmax(whole, -1).sum() - whole)
    assert torch.equal(joined[torch.tensor([0, 2])], whole[[0, 2]])
    assert (len(joined), joined.shape, -joined[0, 0, 0]) == (3, (3, 7, 5), -whole[0, 0, 0])


def counts(output):
    global COUNT  # noqa: PLW0603  The test is about it.
    COUNT = COUNT + 1
    return output["logits"].sum()


def changes(output):
    DIRECTION[0] = 1
    return output["logits"].sum()


def grows(output):
    given = DIRECTION
    given += 1
    return output["logits"].sum()


def local():
    count = 0

    def inner(output):
        nonlocal count
        count = count + 1
        return output["logits"].sum()

    return inner


class Metric:
    def __call__(self, output):
        return output["logits"].sum()


@pytest.mark.parametrize(
    "metric",
    [
        counts,
        changes,
        grows,
        local(),
        Metric(),
        LAYER,
        lambda output: SEEN.append(output) or output["logits"].sum(),
        lambda output: print(output) or output["logits"].sum(),  # noqa: T201  Nobody calls it.
        lambda output: [torch.manual_seed(0), output["logits"].sum()][1],
        lambda output: DIRECTION.add_(1) @ output["logits"][0, 0],
        lambda output: torch.add(DIRECTION, 1, out=DIRECTION) @ output["logits"][0, 0],
        lambda output: F.relu(DIRECTION, inplace=True) @ output["logits"][0, 0],
        lambda output: LAYER(output["logits"]).sum(),
    ],
)
def test_a_metric_that_may_do_more_is_called_for_each_case(metric):
    assert not only_measures(metric, OUTPUT)


@pytest.mark.parametrize(
    "metric",
    [
        lambda output: float(output["logits"].sum()),
        lambda output: output["logits"].sum() if output["logits"].sum() > 0 else output["logits"].mean(),
        lambda output: output["logits"][output["logits"] > 0].sum(),
        lambda output: F.dropout(output["logits"]).sum(),
        lambda output: 1 / 0,
    ],
)
def test_a_metric_that_one_call_cannot_compute(metric):
    assert measure_together(metric, {"logits": torch.randn(5, 1, 6, 9)}) is None


def test_the_values_do_not_keep_the_outputs():
    outputs = {"logits": torch.randn(5, 1, 6, 9)}
    found = measure_together(lambda output: output["logits"][0, 0, 0], outputs)
    assert found.untyped_storage().nbytes() == found.nbytes


def plain(output):
    return output.logits[0, -1, 5] - output.logits[0, 3, 7]


@pytest.mark.parametrize("at", [th.at[:, -1], th.at[:, 2]])
@pytest.mark.parametrize("layers", [[0], [0, 1]])
def test_a_metric_of_the_key_value_cache_gets_that_of_its_own_case(at, layers):
    def keys(output):
        return output.past_key_values.layers[2].keys[0, 0].sum()

    model = llama()
    cases = [{f"model.layers.{layer}": th.scale(1.5 + n, at=at)} for n in range(9) for layer in layers]
    found = th.sweep(model, cases, keys, ids())
    assert any("a DynamicCache in the output is that of the whole batch" in line for line in found.how)
    for case, value in zip(cases, found.values, strict=True):
        with torch.no_grad(), th.edit(model, case):
            torch.testing.assert_close(keys(model(ids())), value)


def test_sweeps_give_the_same_values_either_way():
    model, calls = llama(), []

    def noted(output):
        calls.append(1)
        return plain(output)

    cases = heads(model, th.at[:, -1])
    one, other = (th.sweep(model, cases, metric, ids()) for metric in (plain, noted))
    assert late(one)
    assert late(other)
    assert len(calls) == len(cases) + 1
    assert torch.equal(one.values, other.values)
    assert torch.equal(one.base, other.base)
