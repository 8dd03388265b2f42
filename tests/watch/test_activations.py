"""Dead units of activations that a forward calls as functions, against what the forward itself keeps."""

import functools
import importlib.util
import json
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tenterhook as th
from tenterhook.watch.finding_groups import grouped
from tenterhook.watch.findings import Finding

CASES = 70
STEPS, DEAD_STEPS = 7, 4
FORMS = {  # The name by which it is called, and its source.
    "F.relu": ("relu", "F.relu(h)"),
    "torch.relu": ("relu", "torch.relu(h)"),
    "functional": ("relu", "torch.nn.functional.relu(h)"),
    "imported": ("relu6", "relu6(h)"),
    "method": ("relu", "h.relu()"),
    "in place": ("relu_", "h.clone().relu_()"),
    "gelu": ("gelu", "F.gelu(h)"),
    "silu": ("silu", "F.silu(h)"),
    "hardswish": ("hardswish", "F.hardswish(h)"),
    "clamp": ("clamp", "torch.clamp(h, min=0)"),
    "clamped": ("clamp", "h.clamp(min=0)"),
    "clamp_min": ("clamp_min", "h.clamp_min(0.0)"),
    "attribute": ("act", "self.act(h)"),
    "partial": ("approximate", "self.approximate(h)"),
    "helper": ("rectified():relu", "rectified(h)"),
    "own method": ("squash():relu", "self.squash(h)"),
}
HEAD = """import functools
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import relu6


def rectified(x):
    x = x * 1.0
    return F.relu(x)


class Made(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.fc = nn.ModuleList(nn.Linear(5, 5) for _ in range(layers + 1))
        self.act, self.approximate = F.relu, functools.partial(F.gelu, approximate="tanh")
        self.kept = []

    def squash(self, x):
        return torch.relu(x)

    def forward(self, x):
        self.kept.clear()
        h = x
"""


class Made:
    """A model of random activations, with the address of each."""

    def __init__(self, seed, folder):
        draw = random.Random(seed)
        # A helper that is called twice is one place in the source, and its units would be counted together.
        forms = list(dict.fromkeys(draw.choices(list(FORMS), k=draw.randint(1, 5))))
        names = [FORMS[form][0] for form in forms]
        self.addresses, counts = [], {}
        for name in names:
            number = counts[name] = counts.get(name, -1) + 1
            whole = f"{name}()" if names.count(name) == 1 else f"{name}()[{number}]"
            self.addresses.append(f"0:{whole}")
        lines = []
        for place, form in enumerate(forms):
            lines += [f"h = self.fc[{place}](h)", f"a = {FORMS[form][1]}", "self.kept.append(a.detach().clone())"]
            lines += ["h = a + 0.0"]
        lines.append(f"return self.fc[{len(forms)}](h)")
        file = folder / "made_activations.py"
        file.write_text(HEAD + "".join(f"        {line}\n" for line in lines))
        spec = importlib.util.spec_from_file_location("made_activations", file)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        torch.manual_seed(seed)
        self.net = module.Made(len(forms))
        for layer in self.net.fc:
            dead = torch.rand(5) < draw.choice((0.0, 0.3, 0.7))
            with torch.no_grad():
                layer.bias[dead] = -100.0


@pytest.mark.parametrize("seed", range(CASES))
def test_dead_units_of_functions_are_found_without_naming_them(seed, tmp_path):
    made = Made(seed, tmp_path)
    model, idle, expected, calls = nn.Sequential(made.net), {}, {}, random.Random(seed).randint(1, 3)
    with th.watch(model, steps="manual", on_nan="record", thresholds={"dead_steps": DEAD_STEPS}) as w:
        for _ in range(STEPS):
            active = {}
            for _ in range(calls):
                model(torch.randn(2, 5)).sum().backward()
                for address, value in zip(made.addresses, made.net.kept, strict=True):
                    active[address] = active.get(address, False) | value.ne(0).any(0)
            for address, seen in active.items():
                idle[address] = torch.where(seen, 0, idle.get(address, torch.zeros(5)) + 1)
                if count := int((idle[address] >= DEAD_STEPS).sum()):
                    expected[address] = count  # A finding stays, as it was when it was last true.
            w.step()
    found = {each.address: each.evidence["dead"] for each in w.findings if each.kind == "dead units"}
    # A layer that is zero as a whole makes the next outputs constant, not zero: only activations are found here.
    assert {address: count for address, count in found.items() if ":" in address} == expected


def dead_in(model, steps=5, **options):
    with th.watch(model, on_nan="record", thresholds={"dead_steps": 3}, **options) as w:
        for _ in range(steps):
            model(torch.randn(4, 4)).sum().backward()
    return {each.address: each.evidence["dead"] for each in w.findings if each.kind == "dead units"}


class Feed(nn.Module):
    def __init__(self, dead=2):
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 4)
        with torch.no_grad():
            self.a.bias[:dead] = -100.0

    def forward(self, x):
        return self.b(F.relu(self.a(x)))


def test_encoder_layers_of_pytorch_are_looked_into():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    with torch.no_grad():
        layer.linear1.bias[:5] = -100.0
    model = nn.Sequential(layer)
    with th.watch(model, thresholds={"dead_steps": 2}) as w:
        for _ in range(3):
            model(torch.randn(2, 3, 8)).sum().backward()
    found = {each.address: each.evidence["dead"] for each in w.findings if each.kind == "dead units"}
    assert found == {"0:_ff_block():activation()": 5}


def test_a_module_that_returns_the_activation_is_found_once():
    class Direct(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 8)
            nn.init.constant_(self.fc.bias, -100.0)

        def forward(self, x):
            return F.relu(self.fc(x))

    class Named(Direct):
        def forward(self, x):
            out = F.relu(self.fc(x))
            return out

    torch.manual_seed(0)
    for kind in (Direct, Named):
        assert dead_in(nn.Sequential(kind(), nn.Linear(8, 1)), steps=6) == {"0": 8}


def test_modules_and_functions_that_are_no_activations_are_left_alone():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.relu, self.fc = nn.ReLU(), nn.Linear(4, 4)
            nn.init.constant_(self.fc.bias, -100.0)

        def forward(self, x):
            h = self.relu(self.fc(x))  # A module: a point of its own.
            return torch.clamp(h, 0, 6) + h.clamp(max=1.0) + 1

    torch.manual_seed(0)
    assert dead_in(nn.Sequential(Odd())) == {"0.relu": 4}


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo looks at what it is given where a graph is left.
@pytest.mark.parametrize("wrap", [lambda model: model, lambda model: torch.compile(model, backend="eager")])
def test_nothing_of_the_training_changes_and_the_model_comes_back(wrap):
    def train(watching):
        torch.manual_seed(0)
        plain = nn.Sequential(Feed(), Feed())
        model = wrap(plain)
        optimizer = torch.optim.SGD(plain.parameters(), 0.1)
        watch = th.watch(model, optimizer=optimizer, every=2, thresholds={"dead_steps": 3}) if watching else None
        if watch is not None:
            watch.start()
        for _ in range(10):
            optimizer.zero_grad()
            model(torch.randn(3, 4)).square().sum().backward()
            optimizer.step()
        if watch is not None:
            watch.close()
            in_graph = model is not plain  # There, units are not looked at.
            assert {each.address for each in watch.findings} == (set() if in_graph else {"0:relu()", "1:relu()"})
        assert "forward" not in vars(plain[0])
        return [parameter.detach().clone() for parameter in plain.parameters()]

    torch.compiler.reset()
    assert all(torch.equal(a, b) for a, b in zip(train(watching=True), train(watching=False), strict=True))


def test_recomputation_does_not_count_twice_and_a_step_is_one_step():
    from torch.utils.checkpoint import checkpoint

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Feed()

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=False) + checkpoint(self.inner, x, use_reentrant=False)

    model = Outer()
    with th.watch(model, steps="manual", thresholds={"dead_steps": 3}) as w:
        for step in range(3):
            model(torch.randn(2, 4, requires_grad=True)).sum().backward()
            w.step()
            assert bool(w.findings) is (step == 2)


def test_a_unit_that_comes_back_ends_the_finding():
    class Functional(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 8)

        def forward(self, x):
            return torch.relu(self.fc(x))

    torch.manual_seed(0)
    model = nn.Sequential(Functional())
    with th.watch(model, steps="manual", thresholds={"dead_steps": 3}) as w:
        for step in range(12):
            with torch.no_grad():
                model[0].fc.bias.fill_(-100.0 if step < 6 else 100.0)
            model(torch.randn(2, 4)).sum().backward()
            w.step()
    (finding,) = w.findings
    assert finding.last <= 6


@pytest.mark.parametrize("seed", range(40))
def test_findings_of_one_kind_are_one_entry_in_the_order_of_the_model(seed):
    draw = random.Random(seed)
    kinds = ("dead units", "saturated activation", "vanishing gradient", "exploding gradient")
    found = [
        Finding(draw.choice(kinds), f"h.{number}", draw.randint(0, 9), draw.randint(9, 19), draw.random(), 0, "x")
        for number in draw.sample(range(30), draw.randint(1, 12))
    ]  # fmt: skip
    groups = grouped(found)
    assert [group.kind for group in groups] == list(dict.fromkeys(each.kind for each in found))
    assert sorted(each.address for group in groups for each in group.details) == sorted(each.address for each in found)
    for group in groups:
        own = [each for each in found if each.kind == group.kind]
        numbers = sorted(int(each.address[2:]) for each in own)
        assert group.addresses == [f"h.{number}" for number in numbers]
        assert (group.first, group.last) == (min(each.first for each in own), max(each.last for each in own))
        data = json.loads(json.dumps(group.to_dict()))
        assert (data["count"], len(data["details"]), data["addresses"]) == (len(own), len(own), group.addresses)
        if len(own) > 3:
            where = "in {} layers" if group.kind in kinds[:2] else "at {} points"
            assert group.title == f"{group.kind} {where.format(len(own))}: h.{numbers[0]} … h.{numbers[-1]}"
        assert str(group).count("\n") == 0


def test_groups_stand_in_the_table_in_json_and_in_the_log(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(*(Feed() for _ in range(12)))
    log = th.JsonLines(tmp_path / "log")
    with th.watch(model, thresholds={"dead_steps": 2, "vanishing": 0}, sinks=[log], blackbox=4, to=tmp_path / "b") as w:
        for _ in range(3):
            model(torch.randn(4, 4)).sum().backward()
    title = "dead units in 12 layers: 0:relu() … 11:relu()"
    assert [line for line in str(w).splitlines() if line.startswith("⚠")] == [f"⚠ {w.finding_groups[0]}"]
    assert str(w.finding_groups[0]).startswith(title)
    assert len(w.findings) == 12
    (entry,) = w.to_dict()["findings"]
    assert (entry["kind"], entry["count"]) == ("dead units", 12)
    logged = [group for step in th.JsonLines.read(tmp_path / "log") for group in step["findings"]]
    assert [(group["kind"], group["count"]) for group in logged] == [("dead units", 12)]
    assert [text.startswith(title) for text in th.blackbox(tmp_path / "b").wrong] == [True]


def test_the_address_of_a_finding_can_be_recorded():
    torch.manual_seed(0)
    model = nn.Sequential(Feed(dead=3))
    (address,) = dead_in(model)
    with th.record(model, address) as tape:
        model(torch.randn(4, 4))
    assert int((tape[address] == 0).all(0).sum()) >= 3


def test_a_partial_counts_as_what_it_calls():
    class Partial(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.act = nn.Linear(4, 4), functools.partial(F.threshold, threshold=0.0, value=0.0)
            nn.init.constant_(self.fc.bias, -100.0)

        def forward(self, x):
            return self.act(self.fc(x)) + 1

    assert dead_in(nn.Sequential(Partial())) == {"0:act()": 4}
