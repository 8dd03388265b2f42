import copy
import gc
import warnings
import weakref

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config, GPT2LMHeadModel

import tenterhook as th
from tenterhook.testing import Attention, Cell, Mixed, Residual, no_leak, untouched
from tenterhook.watch import observers

STATISTICS = ("count", "mean", "std", "min", "max", "norm", "zeros", "nan", "inf")


def truth(tensors):
    x = torch.cat([tensor.detach().double().reshape(-1) for tensor in tensors]).numpy()
    fine = x[np.isfinite(x)]
    norm, zeros = np.sqrt((fine**2).sum()), (fine == 0).sum()
    return [x.size, fine.mean(), fine.std(), fine.min(), fine.max(), norm, zeros, np.isnan(x).sum(), np.isinf(x).sum()]


def assert_row(row, tensors, rel=1e-4):
    for name, expected in zip(STATISTICS, truth(tensors), strict=True):
        assert row[name] == pytest.approx(expected, rel=rel, abs=1e-6), name


def digits(n=64):
    data = load_digits()
    return torch.tensor(data.data[:n] / 16, dtype=torch.float32), torch.tensor(data.target[:n])


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 10))


def gpt2():
    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_embd=16, n_head=2, n_positions=16, vocab_size=40, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config)


def train(model, optimizer, steps=3, after=lambda: None):
    x, y = digits()
    torch.manual_seed(1)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        after()


def test_statistics_are_those_of_everything_that_passed():
    model = net()
    twin = copy.deepcopy(model)
    seen = {"values": {}, "gradients": {}, "updates": {}, "parameters": {}}
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    x, y = digits()
    torch.manual_seed(1)
    for _ in range(3):  # The truth: everything recorded, step by step, on a twin.
        before = {name: p.detach().clone() for name, p in twin.named_parameters()}
        optimizer.zero_grad()
        with th.record(twin, "*", grad=True, copy="always") as tape:
            nn.functional.cross_entropy(twin(x), y).backward()
        for name in ("0", "1", "2", "3"):
            seen["values"].setdefault(name, []).append(tape[name])
            seen["gradients"].setdefault(name, []).append(tape.grad[name].clone())
        optimizer.step()
        for name, p in twin.named_parameters():
            seen["gradients"].setdefault(name, []).append(p.grad.clone())
            seen["updates"].setdefault(name, []).append(p.detach() - before[name])
            seen["parameters"].setdefault(name, []).append(p.detach().clone())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with th.watch(model, optimizer=optimizer, sample=None, slow=1) as w:
        train(model, optimizer)
    for kind, by_name in seen.items():
        for name, tensors in by_name.items():
            row = w.row(name, kind)
            assert row["steps"] == 3
            assert row["exact"]
            assert_row(row, tensors, rel=1e-3 if kind == "updates" else 1e-4)
            for stat, expected in zip(STATISTICS, truth(tensors[-1:]), strict=True):
                assert row["last"][stat] == pytest.approx(expected, rel=1e-3, abs=1e-6)


def test_training_goes_exactly_as_without_a_watch():
    plain, watched = gpt2(), gpt2()
    ids = torch.arange(12).view(1, 12)
    for model, watching in ((plain, False), (watched, True)):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        torch.manual_seed(3)
        w = th.watch(model, optimizer=optimizer).start() if watching else None
        for _ in range(4):
            optimizer.zero_grad()
            model(ids, labels=ids).loss.backward()
            optimizer.step()
        if w is not None:
            w.close()
    for (name, one), other in zip(plain.named_parameters(), watched.parameters(), strict=True):
        assert torch.equal(one, other), name
        assert torch.equal(one.grad, other.grad), name


def test_it_leaves_the_model_as_it_was():
    model = net().eval()
    x, _ = digits()
    with untouched(model), no_leak():
        with th.watch(model, every=2, of=("values", "gradients")):
            for _ in range(3):
                with torch.no_grad():
                    model(x)


def test_no_tensor_outlives_it():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer, 1)
    with no_leak():
        with th.watch(model, optimizer=optimizer):
            train(model, optimizer, 3)
        optimizer.zero_grad()
        model.zero_grad()


def test_steps_between_are_free_of_it():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inside = []
    with th.watch(model, optimizer=optimizer, every=3) as w:
        train(model, optimizer, 7, after=lambda: inside.append("forward" in vars(model[0])))
    assert inside == [False, False, True, False, False, True, False]  # After step 2 comes step 3, which is watched.
    assert w.steps == 7
    assert [page.step for page in w.pages] == [0, 3, 6]
    assert w.row("0")["steps"] == 3


def test_others_may_come_and_go_between_watched_steps():
    model, (x, _) = net().eval(), digits()
    with th.watch(model, "0", "3", every=2, steps="manual") as w:
        for step in range(6):
            if step == 1:
                tape = th.record(model, "0").start()
            if step == 3:
                tape.close()
            if step == 5:
                model[3].forward = model[3].forward  # Somebody else's, on this instance.
            model(x).sum().backward()
            w.step()
        assert w.row("0")["steps"] == w.row("3")["steps"] == 3
        del model[3].forward
        with th.edit(model, {"0": th.zero()}):
            w.step()
            model(x)
    assert "forward" not in vars(model[0])
    assert "forward" not in vars(model[3])


def test_without_an_optimizer_the_next_call_ends_a_step():
    model, (x, _) = net().eval(), digits()
    with th.watch(model, every=2) as w:
        for n in range(5):
            model(x[: n + 1]).sum().backward()
    assert w.steps == 5
    assert [page.column("count", "values")["3"] for page in w.pages] == [10, 30, 50]


def test_a_step_can_be_ended_by_hand():
    model, (x, _) = net().eval(), digits()
    with th.watch(model, steps="manual") as w:
        for _ in range(2):
            for part in x.split(16):
                model(part).sum().backward()
            w.step()
    assert w.steps == 2
    assert [page.column("count", "values")["3"] for page in w.pages] == [640, 640]
    with pytest.raises(th.SessionError, match="not open"):
        w.step()


def test_the_parts_of_a_batch_are_put_together():
    model, twin = net().eval(), net().eval()
    x, y = digits()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with th.watch(model, "0", optimizer=optimizer, sample=None) as w:
        for part, target in zip(x.split(16), y.split(16), strict=True):
            nn.functional.cross_entropy(model(part), target, reduction="sum").backward()
        optimizer.step()
    with th.record(twin, "0", grad=True) as tape:
        nn.functional.cross_entropy(twin(x), y, reduction="sum").backward()
    assert w.steps == 1
    assert_row(w.row("0"), [tape["0"]])
    assert_row(w.row("0", "gradients"), [tape.grad["0"]], rel=1e-3)
    assert_row(w.row("0.weight", "gradients"), [twin[0].weight.grad], rel=1e-3)


def test_values_are_those_before_a_change_in_place():
    torch.manual_seed(0)
    model, x = Residual(8), torch.randn(5, 8, requires_grad=True)
    with th.record(model, "**", grad=True) as tape:
        model(x).sum().backward()
    with th.watch(model, sample=None) as w:
        model(x).sum().backward()
    assert w.row("norm1")["min"] < 0
    for name in ("norm1", "norm2"):
        assert_row(w.row(name), [tape[name]])
        assert_row(w.row(name, "gradients"), [tape.grad[name]])


def test_a_spread_that_squares_cannot_tell_is_right_too():
    class Far(nn.Module):
        def forward(self, x):
            return x * 1e-3 + 1000

    x = torch.randn(50, 4, requires_grad=True)
    with th.watch(nn.Sequential(Far())) as w:
        w.model(x).sum().backward()
    assert w.row("0")["std"] == pytest.approx(float((x.detach() * 1e-3 + 1000).double().std(correction=0)), rel=1e-4)


class Sneaky(nn.Module):
    """Changes a value in place where no sign of it can be seen."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        out = self.fc(x)
        torch.mul(out, 0, out=out) if not torch.is_grad_enabled() else getattr(out, "mul" + chr(95))(0)
        return out


def test_a_change_without_a_sign_is_noticed_and_then_copied():
    model, x = Sneaky(), torch.randn(3, 4)
    with pytest.warns(th.TenterhookWarning, match="changed in place before"):
        with th.watch(model, "fc", steps="manual") as w:
            for _ in range(3):
                model(x).sum().backward()
                w.step()
    row = w.row("fc")
    assert row["steps"] == 2
    assert row["zeros"] == 0
    assert_row({k: row["last"][k] for k in STATISTICS}, [model.fc(x)])


def test_a_module_that_is_called_many_times_is_one_row():
    torch.manual_seed(0)
    model, x = Cell(), torch.randn(6, 2, 4)
    with th.record(model, "cell", grad=True) as tape:
        model(x).sum().backward()
    with th.watch(model, "cell") as w:
        model(x).sum().backward()
    assert_row(w.row("cell"), tape.calls("cell"))
    assert_row(w.row("cell", "gradients"), tape.grad.calls("cell"))


class Skips(nn.Module):
    def __init__(self):
        super().__init__()
        self.same, self.fc = nn.Identity(), nn.Linear(3, 3)

    def forward(self, x):
        h = self.fc(x)
        return self.same(h) * 2 + h * 5


def test_a_module_that_returns_its_input_has_the_gradient_of_its_own_use():
    model = Skips()
    with th.watch(model) as w:
        model(torch.ones(2, 3)).sum().backward()
    assert w.row("same", "gradients")["mean"] == 2
    assert w.row("fc", "gradients")["mean"] == 7


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_changes_nothing(reentrant):
    class Kept(nn.Module):
        def __init__(self, keep):
            super().__init__()
            self.a, self.b, self.keep = nn.Linear(4, 4), nn.Tanh(), keep

        def body(self, x):
            return self.b(self.a(x))

        def forward(self, x):
            return checkpoint(self.body, x, use_reentrant=reentrant) if self.keep else self.body(x)

    torch.manual_seed(0)
    plain = Kept(keep=False)
    saved = Kept(keep=True)
    saved.load_state_dict(plain.state_dict())
    x = torch.randn(3, 4, requires_grad=True)
    found = []
    for model in (plain, saved):
        with th.watch(model) as w:
            model(x).square().sum().backward()
        found.append({(row["kind"], row["address"]): [row[name] for name in STATISTICS] for row in w.rows()})
    assert found[0].keys() == found[1].keys()
    for key, numbers in found[0].items():
        assert found[1][key] == pytest.approx(numbers, rel=1e-5), key


def test_structures_have_a_row_for_each_tensor():
    model, x = Mixed(), torch.randn(2, 4)
    with th.record(model, "part", grad=True) as tape:
        model(x).sum().backward()
    with th.watch(model, "part") as w:
        model(x).sum().backward()
    assert_row(w.row("part['y']"), [tape["part"]["y"]])
    assert_row(w.row("part['rest'][0]", "gradients"), [tape.grad["part"]["rest"][0]])


def test_arguments_and_variables_can_be_watched():
    model, x = Attention(), torch.randn(1, 5, 4, requires_grad=True)
    with th.record(model, ":weights", ":x", grad=True) as tape:
        model(x).square().sum().backward()
    with th.watch(model, ":weights", ":x") as w:
        model(x).square().sum().backward()
    for address in (":weights", ":x"):
        assert_row(w.row(address), [tape[address]])
        assert_row(w.row(address, "gradients"), [tape.grad[address]])


def test_little_memory_is_held_and_the_numbers_are_the_same():
    found = []
    x, y = digits()
    for hold in (2**30, 1000):
        model = net().eval()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with th.watch(model, optimizer=optimizer, hold=hold) as w:
            for _ in range(2):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
        found.append({(row["kind"], row["address"]): [row[name] for name in STATISTICS] for row in w.rows()})
    assert found[0].keys() == found[1].keys()
    for key, numbers in found[0].items():
        assert found[1][key] == pytest.approx(numbers, rel=1e-4, abs=1e-10), key  # A mean may be nothing but rounding.


def test_several_backward_passes_through_one_graph_add_up():
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)), torch.ones(1, 3)
    with th.watch(model) as w:
        out = model(x)
        out[:, 0].sum().backward(retain_graph=True)
        out[:, 1].sum().backward()
    assert w.row(":return", "gradients")["max"] == 1


def test_only_what_was_asked_for_is_there():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with th.watch(model, "0", "3.bias", of=("gradients", "updates"), optimizer=optimizer) as w:
        train(model, optimizer)
    assert {(row["kind"], row["address"]) for row in w.rows()} == {
        ("gradients", "0"), ("gradients", "0.weight"), ("gradients", "0.bias"), ("gradients", "3.bias"),
        ("updates", "0.weight"), ("updates", "0.bias"), ("updates", "3.bias"),
    }  # fmt: skip


def test_what_changes_slowly_is_taken_now_and_then():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with th.watch(model, optimizer=optimizer, every=2, slow=3) as w:
        train(model, optimizer, 9)
    assert [page.step for page in w.pages] == [0, 2, 4, 6, 8]
    assert list(w.series("0.weight", "norm", "updates")) == [0, 4, 8]
    assert list(w.series("0.weight", "norm", "gradients")) == [0, 2, 4, 6, 8]
    assert sum(w.row("0")["histogram"]["counts"]) == 3 * 32


def test_it_draws_itself_and_gives_plain_data():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with th.watch(model, optimizer=optimizer) as w:
        train(model, optimizer)
    text = repr(w)
    assert "Sequential: 3 steps" in text
    assert "0.weight" in text
    assert "<table" in w._repr_html_()
    plain = w.to_dict()
    assert plain["model"] == "Sequential"
    assert plain["nonfinite"] is None
    assert w.series("3", "norm").keys() == {0, 1, 2}
    assert sum(w.row("0")["histogram"]["counts"]) == 32
    assert w.row("1")["quantiles"]["0.01"] == 0
    with pytest.raises(th.NotRecorded, match=r"Did you mean 0\.weight"):
        w.row("0.wieght", "parameters")
    with pytest.raises(ValueError, match=r"kind= is one of 'values', 'gradients', .*; got 'value'"):
        w.row("0", "value")
    with pytest.raises(ValueError, match=r"statistic= is one of .*'norm'.*; got 'normm'"):
        w.series("0", "normm")


def test_a_model_that_fails_half_way_leaves_what_had_passed():
    class Fails(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(2, 2)

        def forward(self, x):
            self.a(x)
            raise RuntimeError("half-way")

    model = Fails()
    with untouched(model), pytest.raises(RuntimeError, match="half-way"):
        with th.watch(model) as w:
            model(torch.ones(1, 2))
    assert w.row("a")["count"] == 2


def test_two_watches_and_a_recording_go_together():
    model, (x, _) = net().eval(), digits()
    with th.watch(model, "0") as one, th.watch(model, "0", "3") as other, th.record(model, "0") as tape:
        model(x).sum().backward()
    assert_row(one.row("0"), [tape["0"]])
    assert_row(other.row("0"), [tape["0"]])


def test_under_autocast_values_are_measured_in_their_own_type():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with th.watch(model, sample=None) as w, torch.autocast("cpu", torch.float16):
        with th.record(model, "0", copy="always") as tape:
            model(torch.randn(3, 4)).float().sum().backward()
    assert tape["0"].dtype == torch.float16
    assert_row(w.row("0"), [tape["0"]])


def test_an_optimizer_that_is_closed_over_keeps_no_hook():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with th.watch(model, optimizer=optimizer):
        assert optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "every= must be a positive integer; got 0"),
        ({"on_nan": "shout"}, "on_nan= must be one of raise, warn, record; got 'shout'"),
        ({"of": ("value",)}, "of= must be one or more of values, gradients, parameters, updates; got value"),
        ({"steps": "optimizer"}, "needs an optimizer"),
        ({"thresholds": {"ded": 1}}, "unknown threshold: ded; valid: dead_units"),
    ],
)
def test_what_makes_no_sense_is_refused_at_once(options, message):
    with pytest.raises(ValueError, match=message):
        th.watch(net(), **options)


def test_an_optimizer_that_is_not_named_is_reported_how_to_be():
    model = nn.Linear(2, 2)
    with pytest.raises(th.SelectorError, match=r"by keyword: th\.watch\(model, optimizer=optimizer\)"):
        th.watch(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_name_that_is_not_there_is_refused_and_one_never_reached_is_reported():
    model = net()
    with pytest.raises(th.AddressError, match="has no '7'"):
        th.watch(model, "7")
    with pytest.raises(th.NeverReached), th.watch(model, "0"):
        pass


def test_parameters_of_a_wrapped_model_have_the_names_of_the_plain_one():
    plain = nn.Sequential(nn.Linear(2, 2))
    for model in (torch.compile(plain, backend="eager"), torch.optim.swa_utils.AveragedModel(plain)):
        with th.watch(model, on_nan="record") as w:
            pass
        assert w._parameters.names == {"0.weight", "0.bias"}


def test_the_table_of_a_compiled_model_has_the_name_of_its_class():
    model = torch.compile(nn.Sequential(nn.Linear(2, 2)), backend="eager")
    with th.watch(model, on_nan="record") as w:
        model(torch.ones(1, 2)).sum().backward()
    assert repr(w).startswith("Sequential in torch.compile: 1 step")
    torch.compiler.reset()


def test_no_warning_is_given_in_an_ordinary_run():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = gpt2()
        ids = torch.arange(8).view(1, 8)
        with th.watch(model, of=("values",)):
            model(ids, labels=ids).loss.backward()


def test_a_module_that_gives_what_its_last_child_gave_has_the_same_quantiles():
    model = nn.Sequential(nn.Linear(4, 3), nn.Sequential(nn.Linear(3, 50), nn.Tanh()))
    with th.watch(model) as w:
        model(torch.randn(20, 4)).sum().backward()
    assert w.row("1")["quantiles"] == w.row("1.1")["quantiles"]
    assert w.row("1", "gradients")["quantiles"] == w.row("1.1", "gradients")["quantiles"]
    assert w.row("1")["quantiles"]["0.99"] > w.row("1")["quantiles"]["0.5"]


# -- gradients as they pass -------------------------------------------------------------------------------------------


class Hooking(nn.Module):
    """Hooks the outputs of its parts after they have passed."""

    def __init__(self, one=None, other=None):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)
        self._one, self._other = one, other

    def forward(self, x):
        one, other = self.one(x), self.other(x)
        if self._one is not None:
            one.register_hook(self._one)
        if self._other is not None:
            other.register_hook(self._other)
        return (one + other).square().sum()


@pytest.mark.parametrize("small", [0, 2**15])
def test_a_gradient_is_what_the_last_hook_lets_through(monkeypatch, small):
    monkeypatch.setattr(observers, "SMALL", small)
    x, plain, model = torch.randn(3, 4), Hooking(), Hooking(one=lambda gradient: gradient * 3)
    with th.record(plain, "one", grad=True) as tape:
        plain(x).backward()
    with th.watch(model, steps="manual") as w:
        for _ in range(2):
            model(x).backward()
            w.step()
    for step in range(2):
        assert w.series("one", "norm", "gradients")[step] == pytest.approx(3 * float(tape.grad["one"].norm()))
        assert w.series("other", "norm", "gradients")[step] == pytest.approx(float(tape.grad["one"].norm()))


class Keeping(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Linear(4, 4)

    def forward(self, x):
        self.passed = self.one(x)
        return self.passed.square().sum()


@pytest.mark.parametrize(("every", "left"), [(1, True), (3, False)])
def test_autograd_copies_small_gradients_only_where_every_step_is_watched(every, left):
    x, model = torch.randn(3, 4), Keeping()
    norm = pytest.approx(2 * float(model.one(x).detach().norm()))
    with th.watch(model, "one", steps="manual", every=every) as w:
        for _ in range(7):
            model(x).backward()
            w.step()
    assert w.series("one", "norm", "gradients") == dict.fromkeys(range(0, 7, every), norm)
    assert model.passed.retains_grad is left


def test_a_gradient_that_is_changed_in_place_later_is_noticed_and_copied_from_then_on(monkeypatch):
    monkeypatch.setattr(observers, "SMALL", 0)

    def change(gradient):
        gradient.mul_(2)  # It is also the gradient of the other part, which has it already, or will have.

    x, plain, model = torch.randn(3, 4), Hooking(), Hooking(one=change)
    with th.record(plain, "one", grad=True) as tape:
        plain(x).backward()
    with th.watch(model, "one", "other", steps="manual") as w:
        model(x).backward()
        with pytest.warns(th.TenterhookWarning, match="1 gradient was changed in place before being measured"):
            w.step()
        model(x).backward()
        w.step()
    norm = float(tape.grad["one"].norm())
    assert w.series("other", "norm", "gradients") == {1: pytest.approx(norm)}
    assert w.series("one", "norm", "gradients")[1] == pytest.approx(2 * norm)


def test_points_whose_gradients_are_one_tensor_have_each_their_row(monkeypatch):
    monkeypatch.setattr(observers, "SMALL", 0)

    class Adds(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.one, self.other, self.apart = nn.Linear(4, 4), nn.Linear(4, 4), False

        def forward(self, x):
            one, other = self.one(x), self.other(x)
            return (one * 2 + other if self.apart else one + other).square().sum()  # A sum hands its gradient on.

    model, x = Adds(), torch.randn(3, 4)
    with th.watch(model, steps="manual") as w:
        for step in range(6):
            model.apart = step in (2, 3)
            with th.record(model, "one", "other", grad=True) as tape:
                model(x).backward()
            w.step()
            for name in ("one", "other"):
                norm = float(tape.grad[name].norm())
                assert w.series(name, "norm", "gradients")[step] == pytest.approx(norm, rel=1e-5), (step, name)


@pytest.mark.parametrize("small", [0, 2**15])
def test_a_second_pass_through_a_graph_is_added_whoever_holds_the_gradient(monkeypatch, small):
    monkeypatch.setattr(observers, "SMALL", small)
    x, model = torch.randn(3, 4), Hooking()
    with th.record(model, "one", grad=True) as tape:
        model(x).backward()
    with th.watch(model, steps="manual") as w:
        for _ in range(2):
            loss = model(x)
            loss.backward(retain_graph=True)
            loss.backward()
            w.step()
    assert w.row("one", "gradients")["last"]["norm"] == pytest.approx(2 * float(tape.grad["one"].norm()))


def test_a_graph_that_outlives_the_watch_holds_no_gradient(monkeypatch):
    monkeypatch.setattr(observers, "SMALL", 0)
    seen = []
    model = Hooking(one=lambda gradient: seen.append(weakref.ref(gradient)))
    with th.watch(model, steps="manual") as w:
        loss = model(torch.randn(3, 4))
        loss.backward(retain_graph=True)
        w.step()
    loss.backward(retain_graph=True)
    gc.collect()
    assert [ref() for ref in seen] == [None, None]


class Inside(nn.Module):
    """Its part's output has a hook already as it passes, and passes twice."""

    def __init__(self, seen):
        super().__init__()
        self.part, self._seen = Hooked(seen), seen

    def forward(self, x):
        return self.part(x)


class Hooked(nn.Module):
    def __init__(self, seen):
        super().__init__()
        self.inner, self._seen = nn.Linear(4, 4), seen

    def forward(self, x):
        x = self.inner(x) * 2
        x.register_hook(lambda gradient: self._seen.append(weakref.ref(gradient)))
        return x


def test_points_that_share_a_tensor_with_hooks_of_its_own_hold_nothing_in_the_end(monkeypatch):
    monkeypatch.setattr(observers, "SMALL", 0)
    seen = []
    model = Inside(seen)
    with th.watch(model, steps="manual") as w:
        for _ in range(3):
            out = model(torch.randn(3, 4))
            out.sum().backward(retain_graph=True)
            w.step()
            assert w.row("part", "gradients")["last"]["count"] == 12
            gc.collect()
            assert seen[-1]() is None
    assert len(seen) == 3


def test_calls_inside_a_transform_go_by_and_change_nothing():
    model, x = net().eval(), torch.randn(5, 64)
    named = dict(model.named_parameters())

    def loss(parameters, x):
        return torch.func.functional_call(model, parameters, (x,)).square().mean()

    expected = torch.func.grad(loss)(named, x)
    with th.watch(model, on_nan="raise") as w:
        for _ in range(2):
            found = torch.func.grad(loss)(named, x)
        model(x).sum().backward()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert w.steps == 1
    assert w.row("0")["count"] == 5 * 32
