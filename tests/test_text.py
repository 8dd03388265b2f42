"""Names, notes and messages with control characters: tenterhook prints none of these characters."""

import io
import random
import warnings

import pytest
import torch
from click.testing import CliRunner
from rich.console import Console
from torch import nn

import tenterhook as th
from tenterhook._text import printable, printable_json, printable_lines
from tenterhook.cli.command import tenterhook

BAD = [
    "\x1b[2J", "\x1b]0;title\x07", "\x9b31m", "\r", "\x08", "\x00", "\x7f", "\u202e", "\u2066", "\u200b", "\u2028",
    "\U000e0001", "\n", "\t", "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>", "$x^{", "'\"`", "é", "漢",
]  # fmt: skip


def clean(text, lines=True):
    """Return whether a text has only printable characters and ends of lines."""
    return all(char.isprintable() or (lines and char in "\n\t") for char in text)


def names(seed, count):
    rng = random.Random(seed)
    return [f"n{place}" + "".join(rng.choices(BAD, k=rng.randint(1, 4))) for place in range(count)]


def hostile(seed):
    """A model whose modules, classes and arguments have names with control characters."""
    first, second, third, kind, argument = names(seed, 5)
    kind = kind.replace("\0", "")
    scale = type(kind, (nn.Module,), {"forward": lambda self, x: {argument: x * 2}})()
    pick = type(f"{kind}!", (nn.Module,), {"forward": lambda self, x: x[argument]})()
    model = nn.Sequential()
    for name, module in (
        (first, nn.Linear(4, 4)),
        (second, scale),
        (third, pick),
        ("act", nn.Tanh()),
        ("end", nn.Linear(4, 2)),
    ):
        model.add_module(name, module)
    return model


def drawn(result):
    """Return every text that a result can print."""
    console = Console(file=io.StringIO(), width=100, color_system=None)
    console.print(result)
    made = [repr(result), console.file.getvalue()]
    if not isinstance(result, th.Point):  # The text of a point is its address, which must stay exact.
        made.append(str(result))
    return [*made, result._repr_html_()] if hasattr(result, "_repr_html_") else made


def check(texts):
    for text in texts:
        assert clean(text), [char for char in text if not char.isprintable() and char != "\n"]
        if text.startswith("<div"):  # HTML of a notebook.
            assert "<img src=x" not in text
            assert "<script" not in text


def test_escapes_are_pythons_own_and_everything_else_stays():
    assert printable("fc\x1b[2J\n\u202e\ud800") == "fc\\x1b[2J\\n\\u202e\\ud800"
    assert printable_lines("a\n\tb\x1b") == "a\n\tb\\x1b"
    for text in ("layer4.1.conv2", "名前", "émoji 🙂", ""):
        assert printable(text) == text


def test_json_keeps_its_value():
    import json

    for name in names(0, 200):
        text = printable_json(json.dumps({name: [name]}, ensure_ascii=False, indent=1))
        assert clean(text)
        assert json.loads(text) == {name: [name]}


@pytest.mark.parametrize("seed", range(12))
def test_no_result_prints_a_control_character(seed, tmp_path):
    model, x = hostile(seed), torch.randn(3, 4)
    with th.record(model, grad=True) as tape:
        model(x).sum().backward()
    tape.notes["failure"] = dict.fromkeys(("address", "kind", "error", "message", "where"), names(seed, 1)[0])
    tape.notes["failure"] |= {"address": "end", "inputs": {names(seed, 2)[1]: "x"}, "parameters": {}}
    tape.save(tmp_path / "run.th")
    again = th.load(tmp_path / "run.th")
    assert list(again) == list(tape)
    with th.watch(model, on_nan="record") as w:
        model(x).sum().backward()
        w.step()
        model(x * torch.nan).sum().backward()
    results = [tape, again, again.look("end"), w, *w.findings, th.points(model), *th.points(model), th.audit(model)]
    results += [again[address] for address in again if not isinstance(again[address], torch.Tensor)]
    sweep = th.sweep(model, [{address: th.zero()} for address in list(tape)[:2]], lambda out: out.sum(), x)
    check(text for result in [*results, sweep, *sweep.cases] for text in drawn(result))
    check([str(w.nonfinite)])


@pytest.mark.parametrize("seed", range(4))
def test_no_recipe_prints_a_control_character(seed):
    model, x = hostile(seed), torch.randn(6, 4)
    points = [name for name, _ in model.named_children()][:1]
    loss = lambda: model(x).square().mean()
    results = [th.recipes.learning_signal(model, loss), th.recipes.saliency(model, x, target=0)]
    results.append(
        th.recipes.probe(model, x.repeat(4, 1), [0, 1] * 12, points=["act", *map(_escaped, points)], folds=2)
    )
    for result in results:
        check([repr(result)])


def edited(model, name):
    with th.edit(model, {_escaped(name): th.set(torch.ones(7, 7, 7))}):
        model(torch.ones(1, 4))


def _escaped(name):
    from tenterhook.address.grammar import escape

    return escape(name)


@pytest.mark.parametrize("seed", range(12))
def test_no_error_or_warning_prints_a_control_character(seed, tmp_path):
    model, name, other = hostile(seed), names(seed, 1)[0], names(seed + 1000, 1)[0] + "?"
    with th.record(model) as tape:
        model(torch.ones(1, 4))
    (tmp_path / "bad").write_bytes(b"x")
    tries = [
        lambda: tape[_escaped(other)],
        lambda: th.points(model, _escaped(other)),
        lambda: th.load(tmp_path / f"no {name}".replace("\0", "").replace("/", "")),
        lambda: th.blackbox(tmp_path / f"no {name}".replace("\0", "").replace("/", "")),
        lambda: edited(model, name),
    ]
    for call in tries:
        with pytest.raises(Exception) as caught:  # Each call raises another type.
            call()
        check([str(caught.value)])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        warnings.warn(name, th.TenterhookWarning, stacklevel=1)
    check([str(said[0].message)])


@pytest.mark.parametrize("seed", range(6))
def test_no_command_prints_a_control_character(seed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = hostile(seed)
    for number in range(2):
        with th.record(model, grad=True) as tape:
            model(torch.randn(1, 4)).sum().backward()
        tape.notes["model"] = {"name": names(seed, 1)[0], "class": names(seed, 2)[1], "modules": 1, "parameters": 1}
        tape.notes["tokens"] = names(seed, 3)
        tape.save(f"{number}.th")
    outputs = []
    for args in (
        ["show", "0.th"], ["show", "0.th", "--json"], ["show", "0.th", "--maps", "2"],
        ["show", "0.th", names(seed, 1)[0]],
        ["diff", "0.th", "1.th", "--all"], ["diff", "0.th", "1.th", "--json"], ["page", "0.th", "1.th"],
        ["show", names(seed, 1)[0].replace("\0", "")], [names(seed, 1)[0]],
        ["points", names(seed, 1)[0].replace("\0", "")],
    ):  # fmt: skip
        done = CliRunner().invoke(tenterhook, args)
        assert done.exit_code in (0, 1, 2, 4), (args, done.output)
        outputs += [done.stdout, done.stderr]
    check(outputs)
    page = (tmp_path / "0.html").read_text()
    data = page.split('<script id="data" type="application/json">')[1].split("</script>")[0]
    assert clean(data)
    assert "<" not in data
    assert page.count("<script") == 2
