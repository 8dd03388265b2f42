"""The line and the operands that a report of NaN or Inf names, against programs that are run operation by operation."""

import importlib.util
import random
import re

import pytest
import torch
from torch import nn

import tenterhook as th

CASES = 80
BENIGN = ("add", "half", "view", "rows", "inplace", "join")
FAULTS = ("log", "exp", "sqrt", "divide", "log_", "exp_", "slice", "cat")


class Program:
    """A straight program over tensors ``v0``, ``v1``, …, as lines of source, with a fault in one or two of them."""

    def __init__(self, seed):
        self.draw = random.Random(seed)
        self.lines, self.faults = [], {}
        self.live = ["v0"]
        length = self.draw.randint(3, 10)
        bad = set(self.draw.sample(range(length), self.draw.choice((1, 1, 2))))
        for place in range(length):
            self.step(place, faulty=place in bad)
        self.returned = self.live[-1]

    def step(self, place, *, faulty):
        draw, new = self.draw, f"v{place + 1}"
        one, two = self.live[-1], draw.choice(self.live)
        kind = draw.choice(FAULTS if faulty else BENIGN)
        text = {
            "add": f"{new} = torch.add({one}, {two})",
            "half": f"{new} = torch.mul({one}, 0.5)",
            "view": f"{new} = {one}.reshape(2, 6).reshape(3, 4)",
            "rows": f"{new} = torch.flip({one}, (0,))",
            "inplace": f"{new} = {one}.clone().add_(1.0)",
            "join": f"{new} = torch.maximum({one}, {two})",
            "log": f"{new} = torch.log(-{one}.abs() - 1)",
            "exp": f"{new} = torch.exp({one}.abs() + 1e4)",
            "sqrt": f"{new} = torch.sqrt(-{one}.abs() - 1)",
            "divide": f"{new} = torch.div({one}.abs() + 1, 0.0)",
            "log_": f"{new} = (-{one}.abs() - 1).log_()",
            "exp_": f"{new} = ({one}.abs() + 1e4).exp_()",
            "slice": f"{new} = -{one}.abs() - 1; {new}[1].log_()",
            "cat": f"{new} = torch.log(torch.cat([-{one}.abs() - 1, {two}])[:3])",
        }[kind]
        if faulty:
            self.faults[place] = kind
        self.lines.append(text)
        self.live.append(new)

    def write(self, folder):
        body = "".join(f"        {line}\n" for line in self.lines)
        source = "import torch\nfrom torch import nn\n\n\nclass Made(nn.Module):\n    def forward(self, v0):\n"
        file = folder / "made.py"
        file.write_text(f"{source}{body}        return {self.returned}\n")
        spec = importlib.util.spec_from_file_location("made", file)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.Made(), file

    def truth(self, x):
        """The first line whose value is not finite although all that it reads is, and the operands of its fault."""
        known = {"v0": x}
        for place, line in enumerate(self.lines):
            scope = {"torch": torch, **{name: value.clone() for name, value in known.items()}}
            exec(line, scope)
            new = f"v{place + 1}"
            read = [known[name] for name in re.findall(r"\bv\d+\b", line) if name in known]
            if not scope[new].isfinite().all() and all(value.isfinite().all() for value in read):
                return place, self.operand(self.faults[place], known[f"v{place}"], line, known)
            known[new] = scope[new]
        return None

    @staticmethod
    def operand(kind, one, line, known):
        if kind in ("exp", "exp_"):
            return "exp", one.abs() + 1e4
        if kind == "divide":
            return "div", one.abs() + 1
        if kind == "slice":
            return "log", (-one.abs() - 1)[1]
        if kind == "cat":
            two = known[re.findall(r"\bv\d+\b", line)[2]]
            return "log", torch.cat([-one.abs() - 1, two])[:3]
        return kind.strip("_"), -one.abs() - 1


@pytest.mark.parametrize("seed", range(CASES))
def test_the_line_and_its_operands_are_those_of_the_first_bad_operation(seed, tmp_path):
    program = Program(seed)
    torch.manual_seed(seed)
    x = torch.randn(3, 4, dtype=random.Random(seed).choice((torch.float32, torch.float64, torch.bfloat16)))
    if x.dtype is torch.bfloat16:
        x = x.abs().mul(100).round()  # Values that sums of two do not round away.
    model, file = program.write(tmp_path)
    place, (operation, operand) = program.truth(x)
    with th.watch(nn.Sequential(model), on_nan="record") as w, torch.no_grad():
        w.model(x)
    line = w.nonfinite.line
    assert (line.file, line.line) == (str(file), 7 + place)
    assert line.operation.strip("_") == operation
    found = line.operands[0]
    assert (found.argument, found.dtype, found.shape) == ("0", str(x.dtype)[6:], tuple(operand.shape))
    assert (found.min, found.max) == (float(operand.min()), float(operand.max()))
    assert (found.nan, found.inf) == (0, 0)
    shown = f"argument 0 of `{line.operation}`: {str(x.dtype)[6:]} {list(operand.shape)}, min {found.min:.3g}, max "
    assert shown in str(w.nonfinite)
    assert "argument 0 of '0'" not in str(w.nonfinite)


def test_the_report_has_the_operands_in_the_documented_form():
    class Overflows(nn.Module):
        def forward(self, x):
            return torch.exp(x)

    x = torch.full((4, 4), -1.5625, dtype=torch.float16)
    x[0, 0] = 713.0
    with th.watch(nn.Sequential(Overflows()), on_nan="record") as w:
        w.model(x)
    lines = [line.strip() for line in str(w.nonfinite).splitlines()]
    assert "argument 0 of `exp`: float16 [4, 4], min -1.56, max 713" in lines
    assert w.nonfinite.to_dict()["line"]["operands"][0]["max"] == 713.0


def test_numbers_and_keywords_are_operands_too():
    class Divides(nn.Module):
        def forward(self, x):
            return torch.div(x, other=torch.zeros(1)) + x / 0

    with th.watch(nn.Sequential(Divides()), on_nan="record") as w:
        w.model(torch.ones(2))
    assert "argument 1 of `div`: float32 [1], min 0, max 0" in str(w.nonfinite)

    class ByZero(nn.Module):
        def forward(self, x):
            return x / 0

    with th.watch(nn.Sequential(ByZero()), on_nan="record") as w:
        w.model(torch.ones(2))
    assert re.search(r"argument 1 of `div`: \w+ \[\], min 0, max 0", str(w.nonfinite))


def test_without_a_line_the_arguments_of_the_call_are_shown():
    x = torch.tensor([[1.0, float("nan")]])
    with th.watch(nn.Sequential(nn.Linear(2, 2)), on_nan="record") as w:
        w.model(x)
    assert "argument 0 of ':return': float32 [1, 2], min 1, max 1, 1 NaN" in str(w.nonfinite)


@pytest.mark.parametrize("seed", range(30))
def test_a_bad_gradient_has_the_operands_of_the_forward_operation(seed):
    draw = random.Random(seed)
    shape = (draw.randint(1, 4), 3)
    faults = {"sqrt": torch.sqrt, "norm": torch.norm, "pow": lambda value: torch.pow(value, 0.5)}
    name = draw.choice(list(faults))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            h = self.a(x) * 0.0
            h = faults[name](h) if name != "norm" else h / torch.norm(h).sqrt() * 0 + torch.sqrt(h)
            return self.b(h)

    torch.manual_seed(seed)
    with th.watch(Net(), on_nan="record") as w:
        w.model(torch.randn(shape)).sum().backward()
    if name == "norm":  # The value itself is no number: nothing is left to be said of gradients.
        assert w.nonfinite.kind == "values"
        return
    assert w.nonfinite.kind == "gradients"
    operand = w.nonfinite.line.operands[0]
    assert (operand.dtype, operand.shape, operand.min, operand.max) == ("float32", shape, 0.0, 0.0)
    assert f"argument 0 of `{name}`: float32 {list(shape)}, min 0, max 0" in str(w.nonfinite)
    assert f"gradient of the output of ':return': float32 {list(shape)}, min 1, max 1" in str(w.nonfinite)


@pytest.mark.parametrize("seed", range(20))
def test_statistics_without_a_finite_element_are_nan_and_not_zero(seed, tmp_path):
    draw = random.Random(seed)
    bad = [float("nan"), float("inf"), -float("inf")]
    some = [draw.choice([*bad, 1.0, -2.0, 0.0]) for _ in range(draw.randint(1, 4))]
    if draw.random() < 0.5:
        some = [draw.choice(bad) for _ in some]
    model = nn.Sequential(nn.Identity())
    finite = [number for number in some if number in (1.0, -2.0, 0.0)]
    with th.watch(model, on_nan="record", sinks=[th.JsonLines(tmp_path / "log")]) as w:
        model(torch.tensor([some]))
    row = w.row("0")
    logged = th.JsonLines.read(tmp_path / "log")[0]["rows"]["values"]["0"]
    for numbers in (row, row["last"], logged, w.nonfinite.statistics if len(finite) < len(some) else row):
        norm = sum(number**2 for number in finite) ** 0.5
        expected = norm if finite else float("nan")
        assert numbers["norm"] == pytest.approx(expected, nan_ok=True)
        mean = sum(finite) / len(finite) if finite else float("nan")
        assert numbers["mean"] == pytest.approx(mean, nan_ok=True)


def test_a_black_box_prints_the_report_line_by_line(tmp_path):
    with th.watch(nn.Sequential(nn.ReLU()), on_nan="record", blackbox=2, to=tmp_path / "box.thb") as w:
        w.model(torch.full((2, 2), float("nan")))
    shown = str(th.blackbox(tmp_path / "box.thb")).splitlines()
    assert [line for line in shown if line.startswith("  ")][-1] == "  argument 0 of ':return': float32 [2, 2], 4 NaN"


def test_a_gradient_of_nan_alone_is_not_drawn_as_zero():
    class Roots(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(2, 2)

        def forward(self, x):
            return torch.sqrt(self.fc(x) * 0)

    with th.watch(Roots(), on_nan="record") as w:
        w.model(torch.ones(1, 2)).sum().backward()
    row = next(line for line in str(w).splitlines() if line.startswith("fc "))
    assert row.split()[-1] == "nan"
    assert list(w.series("fc", "norm", "gradients").values()) == [pytest.approx(float("nan"), nan_ok=True)]
