import ast
import importlib.util
import random
import textwrap

import pytest

from tenterhook.address.functions import places_of
from tenterhook.address.read_analysis import is_read_again
from tenterhook.address.source import read_source

NAMES = "abcd"


def expression(draw):
    return draw.choice(["{0}", "{0} + 1", "{0} + {1}", "x", "3"]).format(draw.choice(NAMES), draw.choice(NAMES))


def statements(draw, depth):
    """Lines of a random body; every name is assigned before."""
    lines = []
    for _ in range(draw.randrange(1, 5)):
        kind = draw.choice(["set", "set", "set", "add", "two", "if", "for", "use"] if depth else ["set", "two", "add"])
        if kind == "set":
            lines.append(f"{draw.choice(NAMES)} = {expression(draw)}")
        elif kind == "two":
            lines.append(f"{', '.join(draw.sample(NAMES, 2))} = {expression(draw)}, {expression(draw)}")
        elif kind == "add":
            lines.append(f"{draw.choice(NAMES)} += {expression(draw)}")
        elif kind == "use":
            lines.append(f"seen.append({expression(draw)})")
        else:
            head = f"if {expression(draw)} > x:" if kind == "if" else "for turn in range(2):"
            lines += [head, *(f"    {line}" for line in statements(draw, depth - 1))]
            if kind == "if" and draw.random() < 0.5:
                lines += ["else:", *(f"    {line}" for line in statements(draw, depth - 1))]
    return lines


class Watched(dict):
    """Variables that note where the value was assigned that each read finds."""

    def __init__(self, values):
        super().__init__(values)
        self.line, self.assigned, self.read = 0, {}, set()

    def __setitem__(self, name, value):
        self.assigned[name] = self.line
        super().__setitem__(name, value)

    def __getitem__(self, name):
        if name in self.assigned:
            self.read.add((name, self.assigned[name]))
        return super().__getitem__(name)


def lines_that_are_read(body, end, x):
    """Run the body as plain statements; gives (name, line of assignment) for each value that was read."""
    variables = Watched({"x": x, "seen": [], "range": range})
    tree = ast.parse("\n".join([*body, f"RESULT = {end}"]))
    for node in ast.walk(tree):
        for name in ("body", "orelse"):
            block = getattr(node, name, None)
            if isinstance(block, list):
                marks = [ast.parse(f"mark({each.lineno})").body[0] for each in block]
                setattr(node, name, [each for pair in zip(marks, block, strict=True) for each in pair])
    scope = {"mark": lambda line: setattr(variables, "line", line)}
    exec(compile(ast.fix_missing_locations(tree), "body", "exec"), scope, variables)
    return variables.read


@pytest.fixture
def imported(tmp_path):
    def load(text):
        path = tmp_path / "generated.py"
        path.write_text(text)
        spec = importlib.util.spec_from_file_location("generated", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.function

    return load


def answers(function):
    tree = read_source(function.__code__, function.__qualname__).tree
    return {
        (place.name, place.line): is_read_again(tree, place) for place in places_of(function) if place.kind == "name"
    }


@pytest.mark.parametrize("seed", range(150))
def test_a_variable_that_is_reported_to_be_never_read_is_not_read_in_any_run(seed, imported):
    draw = random.Random(seed)
    straight = seed % 3 == 0
    body = [f"{name} = x" for name in NAMES] + statements(draw, 0 if straight else 2)
    end = draw.choice(NAMES)
    function = imported("def function(x, seen=[]):\n" + textwrap.indent("\n".join([*body, f"return {end}"]), "    "))
    said = answers(function)
    read = {(name, line + 1) for x in (-5, 0, 4) for name, line in lines_that_are_read(body, end, x)}
    assert all(said[place] for place in read if place in said)
    if straight:
        assert {place for place, answer in said.items() if answer} == {place for place in read if place in said}


READ = {
    "in a nested function": "y = x\ndef inner():\n    return y\nreturn inner()",
    "in a lambda that was made before": "y = 1\nf = lambda: y\ny = x\nreturn f()",
    "in a generator that was made before": "y = 1\ng = (y for _ in range(1))\ny = x\nreturn sum(g)",
    "in the next turn of a loop": "y = 0\nfor i in range(2):\n    x = x + y\n    y = x\nreturn x",
    "in the test of a while": "y = 0\nwhile y < 3:\n    y = x\n    x = x + 1\nreturn x",
    "by del": "y = x\ndel y\nreturn x",
    "in a return": "y = x\nreturn y",
    "in a returned tuple": "y = x\nreturn x, y",
    "by an augmented assignment": "y = x\ny += 1\nreturn y",
    "in an except": "try:\n    y = x\n    x = 1 / x\nexcept ZeroDivisionError:\n    return y\nreturn x",
    "in a finally": "try:\n    y = x\nfinally:\n    x = y\nreturn x",
    "after a continue": "for i in x:\n    print(y)\n    y = x\n    if i:\n        continue\n    y = 2\nreturn x",
    "after a break": "for i in range(3):\n    y = x\n    if i:\n        break\n    y = 2\nreturn y",
    "by an except around it": "try:\n    y = x\n    y = 1 / 0\nexcept ZeroDivisionError:\n    return y",
    "by a finally after a return": "try:\n    y = x\n    return 1\nfinally:\n    print(y)",
    "after a suppressed error": "with suppress(Exception):\n    y = x\n    y = 1 / 0\nreturn y",
    "by locals": "y = x\nreturn locals()",
    "by a later part of the same expression": "return (y := x) + y",
    "in a comprehension": "y = x\nreturn [y for _ in range(2)]",
    "in an f-string": "y = x\nreturn f'{y}'",
    "as an attribute": "y = x\nreturn y.real",
}


@pytest.mark.parametrize("how", READ)
def test_a_variable_is_read(how, imported):
    function = imported("def function(x):\n" + textwrap.indent(READ[how], "    "))
    source = READ[how].splitlines()
    places = [line for name, line in answers(function) if name == "y" and "y = x" in source[line - 2]]
    assert all(answers(function)["y", line] for line in places)
    assert places or ":=" in READ[how]


UNREAD = {
    "at all": "y = x\nreturn x",
    "before it is assigned again": "y = x\ny = 2\nreturn y",
    "after a loop that does not read it": "for i in range(2):\n    x = x + i\n    y = x\nreturn x",
    "beside another name": "z, y = x, x\nreturn z",
}


@pytest.mark.parametrize("how", UNREAD)
def test_a_variable_is_not_read(how, imported):
    function = imported("def function(x):\n" + textwrap.indent(UNREAD[how], "    "))
    first = min(line for name, line in answers(function) if name == "y")
    assert not answers(function)["y", first]
