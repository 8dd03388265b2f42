"""The zoo in short: models of each kind, from the packages that the tests have anyway. `make zoo` runs all of it."""

import pytest

pytest.importorskip("transformers")

from zoo import models
from zoo.case import Case, NotRunnable
from zoo.check import check
from zoo.isolate import run_apart
from zoo.values import difference, snapshot

SHORT = (
    ("own", "residual-inplace"),
    ("own", "convolution-train"),
    ("own", "lstm"),
    ("own", "encoder-train-mask"),
    ("own", "checkpoint-plain"),
    ("own", "quantised-mlp"),
    ("transformers", "gpt2"),
    ("transformers", "t5"),
    ("transformers", "mixtral"),
    ("transformers", "mamba"),
)


@pytest.mark.parametrize(("source", "name"), SHORT, ids=[name for _, name in SHORT])
@pytest.mark.filterwarnings("ignore")  # The libraries' own remarks on tiny configurations.
def test_recording_everything_is_right_and_leaves_no_trace(source, name):
    found = check(models.SOURCES[source].build(name))
    assert found["problems"] == []
    assert found["values"] > 0


def test_the_check_sees_a_value_that_differs():
    import torch

    kept = snapshot({"a": (torch.ones(2), None)})
    assert difference({"a": (torch.ones(2), None)}, kept) is None
    assert "off by" in difference({"a": (torch.zeros(2), None)}, kept)
    assert "other keys" in difference({"b": (torch.ones(2), None)}, kept)


def test_a_model_that_does_not_run_by_itself_is_not_counted():
    import torch

    class Broken(torch.nn.Module):
        def forward(self, x):
            raise ValueError("broken")

    with pytest.raises(NotRunnable, match="broken"):
        check(Case(Broken(), (torch.ones(1),)))


def test_sums_of_values_that_are_passed_on_keep_their_order():
    import torch
    from torch import nn

    class Grouped(nn.Module):
        """A value with uses of its own, and several by way of a module that hands it on."""

        def __init__(self):
            super().__init__()
            self.stem, self.same = nn.Linear(32, 32), nn.Identity()
            self.q, self.k, self.v = (nn.Linear(32, 32) for _ in range(3))

        def forward(self, x):
            h = self.stem(x)
            y = self.same(h)
            return self.q(y) * self.k(y) * self.v(y) + h * 3

    torch.manual_seed(0)
    for shape in ((8, 32), (8, 1, 32)):
        found = check(Case(Grouped(), (torch.randn(shape),)))
        assert found["problems"] == []
        assert "order" not in found


@pytest.mark.zoo
@pytest.mark.parametrize("source", models.SOURCES)
def test_no_model_of_the_zoo_fails(source):
    found = models.SOURCES[source]
    if not models.installed(found):
        pytest.skip(f"{found.package} is not installed")
    models.load(found)
    results = {name: run_apart(found, name, 60) for name, _ in found.names()}
    failed = {name: result["problems"] for name, result in results.items() if result["status"] == "failed"}
    assert failed == {}
