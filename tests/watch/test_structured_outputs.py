"""What modules return that is more than one tensor: measured like any other, and as quickly."""

import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config, GPT2LMHeadModel

import tenterhook as th
from tenterhook.watch import measuring, observers, step_events
from tenterhook.watch.gradient_holders import HeldGradient
from tenterhook.watch.session import Watch


def norms(row):
    return row["last"]["norm"]


def size(tensor):
    return pytest.approx(float(torch.linalg.vector_norm(tensor.detach())), rel=1e-4)


def small_gpt2():
    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_embd=16, n_head=2, n_positions=16, vocab_size=40, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config).eval()


@pytest.fixture
def no_long_way(monkeypatch):
    def never(*_):
        raise AssertionError("a gradient was caught by a hook of its own")

    monkeypatch.setattr(observers, "_caught", never)


@pytest.fixture
def one_by_one(monkeypatch):
    """How often a log was looked at entry by entry."""
    times = []
    slow = measuring.Measuring._one_by_one
    monkeypatch.setattr(
        measuring.Measuring, "_one_by_one", lambda *args, **more: (times.append(1), slow(*args, **more))[1]
    )
    return times


@pytest.mark.usefixtures("no_long_way")
@pytest.mark.parametrize("patient", [False, True], ids=["at once", "when the model returns"])
@pytest.mark.parametrize("every", [1, 2])
def test_what_a_transformer_returns_has_its_values_and_its_gradients(monkeypatch, every, patient, one_by_one):
    monkeypatch.setattr(step_events, "DEFERRED_ON", {"cpu"} if patient else frozenset())
    model, ids = small_gpt2(), torch.arange(6).unsqueeze(0)
    out = model(ids, labels=ids, output_hidden_states=True)
    asked = (out.loss, out.logits, *out.hidden_states)
    expected = dict(zip(asked, torch.autograd.grad(out.loss, asked), strict=True))
    with th.watch(model, of=("values", "gradients"), steps="call", every=every) as w:
        for _ in range(5 * every):
            model(ids, labels=ids, output_hidden_states=True).loss.backward()
            w.step()
    for place in range(3):
        for address in (f":return['hidden_states'][{place}]", f"transformer['hidden_states'][{place}]"):
            assert norms(w.row(address)) == size(out.hidden_states[place])
            assert norms(w.row(address, "gradients")) == size(expected[out.hidden_states[place]])
    last = out.hidden_states[-1]  # The same tensor as the last hidden state.
    assert norms(w.row("transformer['last_hidden_state']", "gradients")) == size(expected[last])
    assert norms(w.row(":return['logits']", "gradients")) == size(expected[out.logits])
    assert norms(w.row("lm_head", "gradients")) == size(expected[out.logits])
    assert norms(w.row(":return['loss']")) == size(out.loss)
    assert norms(w.row(":return['loss']", "gradients")) == 1
    assert len(one_by_one) <= 2, "from the third watched step on, everything is known"


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.lstm, self.last = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 1)
        self.uses_state = False

    def forward(self, x):
        every, (_, state) = self.lstm(x)
        found = self.last(every).sum()
        return found + (state * 3).sum() if self.uses_state else found


def test_what_no_one_uses_has_no_gradient_and_costs_nothing(one_by_one):
    model, x = Recurrent(), torch.randn(2, 5, 3)
    with th.watch(model, of=("values", "gradients"), steps="call") as w:
        for _ in range(5):
            model(x).backward()
            w.step()
        before = len(one_by_one)
        assert not [row for row in w.rows() if row["address"] == "lstm[1][1]" and row["kind"] == "gradients"]
        model.uses_state = True
        model(x).backward()
        w.step()
    assert before <= 2
    every, (_, state) = model.lstm(x)
    loss = model.last(every).sum() + (state * 3).sum()
    expected = torch.autograd.grad(loss, (every, state))
    assert norms(w.row("lstm[0]", "gradients")) == size(expected[0])
    assert norms(w.row("lstm[1][1]", "gradients")) == size(expected[1])
    assert w.row("lstm[1][1]", "gradients")["steps"] == 1


class Beside(nn.Module):
    """Gives what it was given beside what it made."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, x):
        return x, self.fc(x)


class Given(nn.Module):
    def __init__(self, inside):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.inside = nn.Linear(3, 3), inside

    def forward(self, x):
        h = self.first(x)
        same, made = self.inside(h)
        return (same * 2 + h * 5 + made).sum()


def test_a_structure_with_what_was_given_has_the_gradient_of_this_use_alone():
    model = Given(Beside())
    with th.watch(model, of=("values", "gradients")) as w:
        model(torch.randn(4, 3)).backward()
    assert w.row("inside[0]", "gradients")["mean"] == 2
    assert w.row("inside[1]", "gradients")["mean"] == 1


class Twice(nn.Module):
    """One after another hands its input on."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.one, self.two = nn.Linear(3, 3), nn.Identity(), nn.Identity()

    def forward(self, x):
        h = self.one(self.first(x))
        return (self.two(h) * 2 + h * 5).sum()


def test_one_that_returns_what_another_module_returned_has_the_gradient_of_its_own_use():
    model = Twice()
    with th.watch(model, of=("values", "gradients")) as w:
        model(torch.randn(4, 3)).backward()
    assert w.row("two", "gradients")["mean"] == 2
    assert w.row("one", "gradients")["mean"] == w.row("first", "gradients")["mean"] == 7


class Parts(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, x):
        y = self.fc(x)
        return y * 2, {"numbers": torch.arange(3), "half": y / 2}


def test_tensors_without_a_gradient_stand_beside_those_with_one():
    torch.manual_seed(0)
    model, x = Parts(), torch.randn(4, 3)
    with th.watch(model, of=("values", "gradients")) as w:
        twice, rest = model(x)
        (twice.sum() * 3 + rest["half"].sum() * 5).backward()
    assert norms(w.row(":return[0]")) == size(twice)
    assert w.row(":return[0]", "gradients")["mean"] == 3
    assert w.row(":return[1]['half']", "gradients")["mean"] == 5


def test_a_value_in_a_structure_that_is_changed_in_place_later_is_noticed_and_then_copied():
    class Changes(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.parts = Parts()

        def forward(self, x):
            twice, rest = self.parts(x)
            torch.Tensor.mul_(twice, 10)  # Nothing in the code of a module says so.
            return (twice + rest["half"]).sum()

    model, x = Changes(), torch.randn(4, 3)
    twice = model.parts.fc(x) * 2
    with th.watch(model, of=("values", "gradients"), steps="call") as w:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(3):
                model(x).backward()
                w.step()
    assert norms(w.row("parts[0]")) == size(twice)


class Chain(nn.Module):
    """Parts one after another, each of which gives two tensors."""

    def __init__(self, way=lambda part, x: part(x)):
        super().__init__()
        torch.manual_seed(0)
        self.parts, self.way = nn.ModuleList([Pair() for _ in range(4)]), way

    def forward(self, x):
        for part in self.parts:
            one, two = self.way(part, x)
            x = one * 2 + two
        return x.square().sum()


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x):
        y = self.fc(x)
        return torch.tanh(y), torch.sin(y)


def by_hand(model, x):
    """The norms of both tensors of every part, and of their gradients."""
    given, out = x, []
    for part in model.parts:
        out += part(given)
        given = out[-2] * 2 + out[-1]
    return out, torch.autograd.grad(given.square().sum(), out)


@pytest.fixture
def spilt(monkeypatch):
    """How often the log was emptied on the way."""
    times = []
    spill = Watch._spill
    monkeypatch.setattr(Watch, "_spill", lambda self: (times.append(1), spill(self))[1])
    return times


@pytest.mark.parametrize("hold", [2**30, 300])
@pytest.mark.parametrize(
    "way",
    [
        lambda part, x: part(x),
        lambda part, x: checkpoint(part, x, use_reentrant=False),
        lambda part, x: checkpoint(part, x, use_reentrant=True),
    ],
    ids=["as it is", "checkpointed", "checkpointed inside"],
)
def test_structures_are_the_same_recomputed_and_with_little_memory(spilt, way, hold):
    model, x = Chain(way), torch.randn(3, 8, requires_grad=True)
    out, gradients = by_hand(model, x)
    with th.watch(model, "parts.*", of=("values", "gradients"), steps="call", hold=hold) as w:
        for _ in range(3):
            model(x).backward()
            w.step()
    for place in range(8):
        address = f"parts.{place // 2}[{place % 2}]"
        assert norms(w.row(address)) == size(out[place])
        assert norms(w.row(address, "gradients")) == size(gradients[place])
        assert w.row(address, "gradients")["steps"] == 3
    assert bool(spilt) is (hold == 300)


def test_a_small_tensor_behind_a_large_one_does_not_hide_its_size(spilt):
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(64, 64)

        def forward(self, x):
            y = self.fc(x)
            return torch.tanh(y), y.sum()

    model, x = nn.Sequential(*[Both() for _ in range(4)]), torch.randn(16, 64)
    with th.watch(model, "*", of=("values", "gradients"), steps="call", hold=x.nbytes) as w:
        for _ in range(2):
            given, total = x, 0.0
            for part in model:
                given, number = part(given)
                total = total + number
            (given.sum() + total).backward()
            w.step()
    assert spilt


@pytest.mark.parametrize(
    ("shape", "stride", "copied"),
    [((3, 4), (4, 1), False), ((1, 3, 4), (12, 4, 1), False), ((1, 3, 4), (4, 4, 1), True),
     ((1, 3, 1, 4), (12, 4, 4, 1), True), ((3, 1, 4), (4, 4, 1), True), ((1, 1, 4), (4, 4, 1), False)],
)  # fmt: skip
def test_a_gradient_is_held_as_it_is_unless_that_would_alter_how_a_sum_lies(shape, stride, copied):
    gradient = torch.randn(12).as_strided(shape, stride)
    held = HeldGradient()
    held.open, held.copies = True, False
    held.hold(gradient)
    assert (held.gradient is not gradient) is copied
    assert torch.equal(held.gradient, gradient)


class Both(nn.Module):
    """What it made, beside what it was given."""

    def __init__(self):
        super().__init__()
        self.own = nn.Linear(4, 4)

    def forward(self, x, other):
        return self.own(x), other


class Chooses(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.pair, self.which = nn.Linear(4, 4), Both(), 0

    def forward(self, x):
        return self.pair(x, self.first(x))[self.which].sum()


def test_gradients_stand_under_the_place_of_their_tensor_also_if_they_come_alone():
    model = Chooses()
    with th.watch(model, of=("values", "gradients"), steps="manual") as w:
        for step in range(6):
            model.which = step % 2
            model(torch.randn(3, 4)).backward()
            w.step()
    assert list(w.series("pair[0]", "norm", "gradients")) == [0, 2, 4]
    assert list(w.series("pair[1]", "norm", "gradients")) == [1, 3, 5]
    assert "pair" not in {row["address"] for row in w.rows()}
