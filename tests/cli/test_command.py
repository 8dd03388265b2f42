"""The command, as a person at a terminal sees it: what it prints, and with which exit code it ends."""

import json
import shutil
import subprocess
import sys
import textwrap

import pytest
import torch
from click.testing import CliRunner

import tenterhook as th
from tenterhook.cli.command import tenterhook
from tenterhook.cli.errors import CommandError, Unreadable
from tenterhook.cli.tapes import _open, read_tape

SOURCE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.conv = nn.Conv2d(3, width, 3, padding=1)
        self.relu = nn.ReLU(inplace=True)
        self.head = nn.Linear(width, 4)

    def forward(self, x):
        features = self.relu(self.conv(x))
        pooled = features.mean((2, 3))
        return self.head(pooled)

class Broken(Net):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(7, 4)

class Many(nn.Module):
    def __init__(self):
        super().__init__()
        self.b1, self.b2 = (nn.Sequential(nn.Linear(2, 2)) for _ in range(2))

    def forward(self, x):
        return self.b2(self.b1(x))

class Loop(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.Linear(2, 2)

    def forward(self, x):
        for _ in range(4):
            x = self.cell(x)
        return x

ready = Net(width=2)
number = 3

def explodes():
    raise ValueError("no weights today")
"""


@pytest.fixture
def call(tmp_path, monkeypatch):
    """Run the command in a directory with a few models, and give its result."""
    (tmp_path / "nets.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)
    yield lambda *args: CliRunner().invoke(tenterhook, [str(arg) for arg in args])
    for name in set(sys.modules) - before:
        if name == "nets":
            del sys.modules[name]


def test_points_draws_the_tree_with_shapes_after_a_run(call):
    result = call("points", "nets.py:Net", "--input", "2x3x8x8")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0] == "Net: 4 modules, 196 parameters, 4 points"
    assert lines[3].split() == ["├─", "conv", "Conv2d", "168", "[2,", "6,", "8,", "8]", "1"]


def test_points_inside_a_forward_stand_beside_their_source(call):
    result = call("points", "nets:Net", ":*")
    line = next(line for line in result.stdout.splitlines() if line.startswith("features"))
    assert line.split() == ["features", "conv()", "relu()", "13", "features", "=", "self.relu(self.conv(x))"]


def test_points_as_json_have_parameters_calls_and_where(call):
    result = call("points", "nets.py:Net", "conv", ":pooled", "head.weight", "-i", "1x3x4x4", "--json")
    conv, pooled, weight = json.loads(result.stdout)
    assert (conv["address"], conv["parameters"], conv["calls"]) == ("conv", 3 * 6 * 9 + 6, 1)
    assert pooled["where"].endswith("nets.py:14")
    assert weight["shape"] == [4, 6]


def test_record_keeps_what_the_model_computes(call, tmp_path):
    result = call("record", "nets.py:Net", "conv", "head", "-i", "ones:1x3x8x8", "--grad", "-o", "run.th")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("run.th: 2 values, 2 gradients, ")
    tape = th.load(tmp_path / "run.th")
    torch.manual_seed(0)
    scope = {}
    exec(SOURCE, scope)
    model = scope["Net"]()
    with torch.no_grad():
        expected = model(torch.ones(1, 3, 8, 8))
    assert torch.equal(tape["head"], expected)
    assert torch.equal(tape.grad["head"], torch.ones(1, 4))  # The loss is the sum of the output.
    assert tape.notes["order"] == ["conv#0", "head#0"]
    assert tape.notes["model"] == {"name": "nets.py:Net", "class": "Net", "modules": 4, "parameters": 196}


def test_record_with_an_edit_and_a_stop(call, tmp_path):
    result = call("record", "nets:Net", "relu", "-i", "1x3x8x8", "--edit", "conv=zero(at=at[:, 1:3])", "--stop")
    assert result.exit_code == 0, result.output
    tape = th.load(tmp_path / "run.th")
    assert list(tape) == ["relu"]
    assert not tape["relu"][:, 1:3].any()
    assert tape["relu"][:, 0].any()


def test_record_and_edit_ranges_of_calls(call):
    result = call("record", "nets.py:Loop", "cell#{1..2}", "-i", "1x2", "--edit", "cell#{2..}=skip()", "-o", "run.th")
    assert result.exit_code == 0
    tape = th.load("run.th")
    assert list(tape) == ["cell#1", "cell#2"]
    assert torch.equal(tape["cell#1"], tape["cell#2"])


def test_record_with_a_file_of_edits_and_one_more(call, tmp_path):
    plain = call("record", "nets.py:Net", "conv", "relu", "-i", "1x3x8x8", "-o", "plain.th")
    assert plain.exit_code == 0, plain.output
    channels = [th.scale(0.0, at=th.at[:, 0]), th.add(torch.full((8, 8), 2.0, dtype=torch.float64), at=th.at[:, 1])]
    th.save_edits(tmp_path / "some.edits", {"conv": channels})
    args = ["record", "nets.py:Net", "conv", "-i", "1x3x8x8", "--edits", "some.edits"]
    result = call(*args, "--edit", "conv=scale(3, at=at[:, 1])")
    assert result.exit_code == 0, result.output
    was, now = th.load(tmp_path / "plain.th")["conv"], th.load(tmp_path / "run.th")["conv"]
    assert not now[:, 0].any()
    torch.testing.assert_close(now[:, 1], (was[:, 1] + 2) * 3)  # The file comes first, in the type of the model.
    assert torch.equal(now[:, 2:], was[:, 2:])
    assert th.load(tmp_path / "run.th").notes["edits"] == ["some.edits", "conv=scale(3, at=at[:, 1])"]


def test_a_model_that_fails_half_way_is_kept_and_marked(call, tmp_path):
    result = call("record", "nets.py:Broken", "**", "-i", "1x3x8x8", "--grad", "-o", "run.th")
    assert result.exit_code == 3
    assert "failed in head (Linear)" in result.stderr
    assert "inputs: input=float32[1, 6]" in result.stderr
    assert "Traceback" not in result.output
    tape = th.load(tmp_path / "run.th")
    assert list(tape) == ["conv", "relu"]
    failure = tape.notes["failure"]
    assert failure["address"] == "head"
    assert failure["inputs"] == {"input": "float32[1, 6]"}
    assert failure["parameters"]["weight"] == "float32[4, 7]"
    shown = call("show", "run.th")
    assert "✗ the run failed in head (Linear)" in shown.stdout
    told = json.loads(call("record", "nets.py:Broken", "-i", "1x3x8x8", "--json").stdout)
    assert told["values"] == 2
    assert told["failure"]["error"] == "RuntimeError"


@pytest.mark.parametrize("command", ["points", "audit"])
def test_a_model_that_fails_while_it_is_looked_at_is_reported_by_its_module(call, command):
    result = call(command, "nets.py:Broken", "--input", "1x3x8x8")
    assert result.exit_code == 3
    assert "failed in head (Linear)" in result.stderr
    assert "inputs: input=float32[1, 6]" in result.stderr
    assert "Traceback" not in result.output
    assert "Traceback" in call("--debug", command, "nets.py:Broken", "--input", "1x3x8x8").stderr


def test_a_failure_of_the_backward_pass_is_reported_as_one(call, tmp_path):
    (tmp_path / "nets.py").write_text(
        "from torch import nn\n"
        "class Back(nn.Linear):\n"
        "    def forward(s, x): return super().forward(x).sigmoid().mul_(2)\n"
    )
    size = ["--set", "in_features=4", "--set", "out_features=2"]
    result = call("record", "nets.py:Back", *size, "-i", "1x4", "--grad", "-o", "run.th")
    assert result.exit_code == 3
    for text in (result.stderr, call("show", "run.th").stdout):
        assert "RuntimeError: in the backward pass: one of the variables" in text
        assert "no module of the model" not in text
        assert "no tensors" not in text


CALLS = {
    "nothing": ([], "The input x is missing. Give it, for example --input 1x3x64x64"),
    "one too many": (["-i", "1x3x8x8", "-i", "2"], "Got 2 inputs without a name, but it takes 1"),
    "another name": (["-i", "xs=1x3x8x8"], "It has no argument 'xs'. Did you mean x?"),
    "twice": (["-i", "1x3x8x8", "-i", "x=1x3x8x8"], "x is given twice"),
}


@pytest.mark.parametrize(("inputs", "expected"), CALLS.values(), ids=CALLS)
def test_a_call_that_the_model_does_not_take_is_refused_before_anything_is_written(call, tmp_path, inputs, expected):
    (tmp_path / "run.th").write_bytes(b"mine")
    result = call("record", "nets.py:Net", *inputs, "-o", "run.th")
    assert result.exit_code == 2
    assert "the model takes x." in result.stderr
    assert expected in result.stderr
    assert (tmp_path / "run.th").read_bytes() == b"mine"


@pytest.mark.parametrize("command", ["points", "audit"])
def test_a_model_is_not_looked_at_with_inputs_that_it_does_not_take(call, command):
    result = call(command, "nets.py:Net", "-i", "1x3x8x8", "-i", "2")
    assert result.exit_code == 2
    assert "it takes 1" in result.stderr


def test_inputs_are_left_to_the_call_where_a_decorator_or_a_hook_adds_to_them(call, tmp_path):
    (tmp_path / "nets.py").write_text(
        "import functools, torch\n"
        "from torch import nn\n"
        "def adding(forward):\n"
        "    @functools.wraps(forward)\n"
        "    def added(self, x): return forward(self, x, 2)\n"
        "    return added\n"
        "class Wrapped(nn.Linear):\n"
        "    @adding\n"
        "    def forward(self, x, times): return super().forward(x) * times\n"
        "class Two(nn.Bilinear): pass\n"
        "hooked = Two(4, 4, 2)\n"
        "hooked.register_forward_pre_hook(lambda module, args: (args[0], args[0]))\n"
    )
    size = ["--set", "in_features=4", "--set", "out_features=2"]
    assert call("record", "nets.py:Wrapped", *size, "-i", "1x4").exit_code == 0
    assert call("record", "nets.py:hooked", "-i", "1x4").exit_code == 0


@pytest.mark.parametrize("json_", [[], ["--json"]])
def test_a_run_without_a_value_leaves_the_tape_that_was_there(call, tmp_path, json_):
    (tmp_path / "run.th").write_bytes(b"mine")
    failed = call("record", "nets.py:Net", "head", "-i", "1x5x8x8", "-o", "run.th", *json_)
    assert failed.exit_code == 3
    assert "run.th is not changed" in failed.stderr
    (tmp_path / "idle.py").write_text(
        "from torch import nn\n"
        "class Idle(nn.Linear):\n"
        "    def __init__(self): super().__init__(2, 2); self.never = nn.ReLU()\n"
    )
    idle = call("record", "idle.py:Idle", "nev*", "-i", "1x2", "-o", "run.th", *json_)
    assert idle.exit_code == 2
    assert (tmp_path / "run.th").read_bytes() == b"mine"
    assert not json_ or json.loads(idle.stdout)["tape"] is None
    del sys.modules["idle"]


def test_show_selects_by_glob_and_counts_as_numpy_does(call):
    call("record", "nets.py:Net", "-i", "1x3x8x8", "--grad", "-o", "run.th")
    rows = json.loads(call("show", "run.th", "{conv,relu}", "--json").stdout)["values"]
    assert [row["address"] for row in rows] == ["conv", "relu"]
    tape = th.load("run.th")
    values = tape["conv"].double().numpy()
    assert rows[0]["mean"] == pytest.approx(values.mean(), rel=1e-6)
    assert rows[0]["std"] == pytest.approx(values.std(ddof=1), rel=1e-6)
    assert rows[1]["zeros"] == int((tape["relu"] == 0).sum())
    assert rows[0]["gradient"]["norm"] == pytest.approx(tape.grad["conv"].double().norm().item(), rel=1e-6)
    wrong = call("show", "run.th", "con")
    assert wrong.exit_code == 2
    assert "Did you mean conv?" in wrong.stderr


@pytest.mark.parametrize("selector", [":return", ":pooled"])
def test_show_selects_points_of_the_model_itself(call, selector):
    call("record", "nets.py:Net", "conv", ":return", ":pooled", "-i", "1x3x8x8", "-o", "run.th")
    rows = json.loads(call("show", "run.th", selector, "--json").stdout)["values"]
    assert [row["address"] for row in rows] == [selector]


def test_show_counts_calls_from_the_end(call):
    model = torch.nn.ReLU()
    with th.record(model) as tape:
        for _ in range(3):
            model(torch.ones(2))
    tape.save("run.th")
    for selector, wanted in ((":return#-1", 2), (":return#-3", 0)):
        rows = json.loads(call("show", "run.th", selector, "--json").stdout)["values"]
        assert [row["address"] for row in rows] == [f":return#{wanted}"]
    assert "matches nothing on this tape" in call("show", "run.th", ":return#-4").stderr


def test_show_draws_maps(call):
    call("record", "nets.py:Net", "conv", "-i", "1x3x8x8")
    shown = call("show", "run.th", "--maps", "3")
    assert "conv 2" in shown.stdout
    assert "█" in shown.stdout


def test_show_in_a_terminal_keeps_the_numbers_and_names_what_it_leaves_out(call, monkeypatch):
    call("record", "nets.py:Net", "-i", "1x3x8x8", "--grad", "-o", "run.th")
    monkeypatch.setattr("tenterhook.cli.options._in_terminal", lambda: True)
    monkeypatch.setenv("COLUMNS", "50")
    shown = call("show", "run.th").stdout
    assert shown.splitlines()[1].split() == ["point", "shape", "mean", "std", "min", "max", "|grad|"]
    assert "columns not shown: module, zeros (a wider terminal or --json" in " ".join(shown.split())
    monkeypatch.setattr("tenterhook.cli.options._in_terminal", lambda: False)
    assert "module" in call("show", "run.th").stdout


def test_diff_finds_the_first_difference_and_says_how_many_points_it_compared(call):
    call("record", "nets.py:Net", "-i", "1x3x8x8", "-o", "a.th")
    call("record", "nets.py:Net", "-i", "1x3x8x8", "--edit", "relu=scale(1.5)", "-o", "b.th")
    same = call("diff", "a.th", "a.th")
    assert (same.exit_code, same.stdout.strip()) == (0, "no difference in 4 values")
    parted = call("diff", "a.th", "b.th")
    assert parted.exit_code == 1
    assert parted.stdout.startswith("the first difference is at relu: off by up to ")
    assert "a relative difference of 0.5" in parted.stdout
    assert "compared 4 values: 3 values differ" in parted.stdout
    told = json.loads(call("diff", "a.th", "b.th", "--json").stdout)
    assert told["first"] == "relu"
    assert [row["differs"] for row in told["points"]] == [False, True, True, True]
    assert call("diff", "a.th", "b.th", "--rtol", "10").exit_code == 0


def test_diff_counts_what_only_one_tape_holds(call):
    call("record", "nets.py:Net", "-i", "1x3x8x8", "--grad", "-o", "a.th")
    call("record", "nets.py:Net", "conv", "head", "-i", "1x3x8x8", "-o", "b.th")
    result = call("diff", "a.th", "b.th")
    assert result.exit_code == 1
    assert result.stdout.splitlines() == [
        "no difference in 2 values that both tapes have",
        "2 values only in the first tape (--all)",
        "the second tape has no gradients, and the first has 4",
    ]
    assert call("diff", "b.th", "a.th", "--all").stdout.count("only in the second") == 2 + 4 + 1
    call("record", "nets.py:Net", "conv", "head", "-i", "1x3x8x8", "--seed", "1", "-o", "c.th")
    assert call("diff", "a.th", "c.th").stdout.startswith("the first difference is at conv: off by up to ")


def test_half_precision_is_no_difference_beyond_its_rounding(call):
    call("record", "nets.py:Net", "-i", "1x3x8x8", "-o", "a.th")
    call("record", "nets.py:Net", "-i", "1x3x8x8", "--dtype", "bfloat16", "-o", "b.th")
    assert call("diff", "a.th", "b.th", "--rtol", "0.1", "--atol", "0.02").exit_code == 0
    assert call("diff", "a.th", "b.th", "--rtol", "1e-6", "--atol", "0").exit_code == 1


def test_page_is_written_beside_the_tape(call, tmp_path):
    call("record", "nets.py:Net", "-i", "1x3x8x8", "-o", "run.th")
    result = call("page", "run.th")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("run.html: 0.1 MB")
    assert (tmp_path / "run.html").read_text().startswith("<!doctype html>")


def test_a_page_that_cannot_fit_is_described_in_words(call, tmp_path):
    (tmp_path / "long.py").write_text(
        "from torch import nn\nnet = nn.Sequential(*(nn.Identity() for _ in range(1500)))\n"
    )
    call("record", "long.py:net", "-i", "2x2", "-o", "run.th")
    result = call("page", "run.th", "--size", "300k")
    assert result.exit_code == 2
    assert "Increase size=" in result.stderr
    assert isinstance(result.exception, SystemExit)
    del sys.modules["long"]


def test_audit_lists_hooks_for_people_and_for_programs(call, tmp_path):
    hooked = "\nready.head.register_forward_hook(lambda *_: None)\n"
    (tmp_path / "hooked.py").write_text(SOURCE + hooked)
    assert "Net: 1 hook" in call("audit", "hooked.py:ready").stdout
    (row,) = json.loads(call("audit", "hooked.py:ready", "--input", "1x3x8x8", "--json").stdout)
    assert (row["address"], row["kind"]) == ("head", "forward")
    assert row["cost"]["calls"] > 0
    del sys.modules["hooked"]


WRONG = {
    "no such name": (["points", "nets.py:Nat"], "Did you mean Net?"),
    "nothing near": (
        ["points", "nets.py:zzz"],
        "nets.py has no 'zzz'.\nIt has Net, Broken, Many, Loop, ready, explodes.\n",
    ),
    "a part of a model": (["points", "nets.py:Net.conv"], "nets.py:Net has no 'conv'.\nGive a part of a model as"),
    "another number": (["points", "nets.py:Many", "b9"], "Did you mean b1, b2?\ntenterhook points nets.py:Many shows"),
    "another number, glob": (["points", "nets.py:Many", "b9.*"], "Did you mean b1, b2?"),
    "edit of another": (["record", "nets.py:Many", "-i", "1x2", "--edit", "b9=zero()"], "Did you mean b1, b2?"),
    "no such inner": (
        ["points", "nets.py:Net", ":fatures"],
        "\ntenterhook points nets.py:Net ':*' shows all names beside the source",
    ),
    "a directory for a tape": (["record", "nets.py:Net", "-i", "1x3x8x8", "-o", "."], "is a directory; name a file"),
    "no directory": (["record", "nets.py:Net", "-i", "1x3x8x8", "-o", "no/run.th"], "there is no directory no."),
    "a directory for a page": (["page", "a.th", "-o", "."], ". is a directory; name a file in it: -o a.html"),
    "no such file": (["points", "nots.py:Net"], "there is no file nots.py"),
    "no such module": (["points", "nots:Net"], "there is no module 'nots' to import"),
    "no name": (["points", "nets.py"], "nets.py:name"),
    "no model": (["points", "nets.py:number"], "nets.py:number is a int"),
    "not made": (["points", "nets.py:explodes"], "no weights today"),
    "set on a model": (["points", "nets.py:ready", "--set", "width=3"], "is already a model"),
    "wrong argument": (["points", "nets.py:Net", "--set", "wide=3"], "unexpected keyword argument 'wide'"),
    "unknown point": (["points", "nets.py:Net", "had"], "Did you mean head?"),
    "wrong edit": (["record", "nets.py:Net", "-i", "1x3x8x8", "--edit", "conv=zap()"], "'conv=zap()' is not an edit"),
    "no edits": (["record", "nets.py:Net", "-i", "1x3x8x8", "--edits", "none.edits"], "there is no file none.edits"),
    "wrong edits": (["record", "nets.py:Net", "-i", "1x3x8x8", "--edits", "nets.py"], "or not a set of edits"),
    "wrong input": (["record", "nets.py:Net", "-i", "x.npy"], "there is no such file"),
    "wrong keep": (["record", "nets.py:Net", "--keep", "some"], "--keep is all, last"),
    "stop and grad": (["record", "nets.py:Net", "--stop", "--grad"], "so --grad cannot run backward"),
    "no tape": (["show", "none.th"], "there is no file none.th"),
    "three tapes": (["page", "a", "b", "c"], "one tape, or two"),
    "no page": (["page", "a.th", "-o", "a.pdf"], "a page is an .html file"),
    "bad size": (["page", "nets.py", "--size", "big"], "a size is a number of bytes"),
    "small size": (["page", "nets.py", "--size", "10k"], "at least 300,000 bytes"),
    "no maps": (["page", "nets.py", "--maps", "0"], "0 is not in the range"),
    "not a tape": (["page", "nets.py"], "or not a tape"),
    "weights": (["points", "model.safetensors"], "contains only weights"),
    "nothing": (["points", "resnet"], "'resnet' is not a model"),
}


UNREADABLE = {
    "there is no file none.edits",
    "or not a set of edits",
    "there is no file none.th",
    "or not a tape",
}


@pytest.mark.parametrize(("args", "expected"), WRONG.values(), ids=WRONG)
def test_mistakes_are_reported_in_words_each_with_its_exit_code(call, args, expected):
    result = call(*args)
    assert result.exit_code == (4 if expected in UNREADABLE else 2)
    assert expected in result.stderr
    assert "Traceback" not in result.output
    assert isinstance(result.exception, SystemExit)


def test_a_mistake_is_not_placed_in_a_line_of_the_program_itself(call):
    assert "\n  at " not in call("points", "nets.py:Net", "--set", "wide=3").stderr
    assert "nets.py:" in call("points", "nets.py:explodes").stderr.partition("\n  at ")[2]


def test_debug_shows_the_traceback(call):
    result = call("--debug", "points", "nets.py:explodes")
    assert result.exit_code == 2
    assert "Traceback" in result.stderr
    assert 'raise ValueError("no weights today")' in result.stderr
    assert "Traceback" in call("points", "nets.py:explodes", "--debug").stderr
    assert "Traceback" not in call("points", "nets.py:explodes", "--", "--debug").stderr


def test_a_damaged_tape_is_reported_to_be_damaged(call, tmp_path):
    call("record", "nets.py:Net", "-i", "1x3x8x8", "-o", "run.th")
    content = bytearray((tmp_path / "run.th").read_bytes())
    content[-5] ^= 1
    (tmp_path / "run.th").write_bytes(content)
    for command in (["show"], ["page"], ["diff", "run.th"]):
        result = call(*command, "run.th")
        assert result.exit_code == 4
        assert "damaged" in result.stderr


def test_a_tape_larger_than_the_memory_is_not_read(tmp_path, monkeypatch):
    file = tmp_path / "huge.th"
    with file.open("wb") as opened:
        opened.truncate(2**20)
    monkeypatch.setattr("tenterhook.cli.limits.memory", lambda: 2**19)
    with pytest.raises(Unreadable, match="Record fewer points"):
        read_tape(file)


def test_without_a_browser_the_path_is_reported(tmp_path):
    with pytest.raises(CommandError, match=r"no browser could be opened\. Open this file"):
        _open(tmp_path / "page.html", lambda _: False)
    opened = []
    _open(tmp_path / "page.html", lambda address: opened.append(address) or True)
    assert opened == [(tmp_path / "page.html").as_uri()]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_printed_for_each_shell(call, shell):
    result = call("completion", shell)
    assert result.exit_code == 0
    assert "_TENTERHOOK_COMPLETE" in result.stdout


def test_it_completes_commands_and_models(tmp_path, monkeypatch):
    (tmp_path / "nets.py").write_text("")
    monkeypatch.chdir(tmp_path)
    from click.shell_completion import ShellComplete

    complete = ShellComplete(tenterhook, {}, "tenterhook", "_TENTERHOOK_COMPLETE")
    assert [item.value for item in complete.get_completions([], "re")] == ["record"]
    assert [item.value for item in complete.get_completions(["points"], "ne")] == ["nets.py:"]
    assert [item.value for item in complete.get_completions(["points"], "tr")] == ["transformers:"]


def test_it_completes_the_names_in_a_file_without_running_it(call):
    from click.shell_completion import ShellComplete

    complete = ShellComplete(tenterhook, {}, "tenterhook", "_TENTERHOOK_COMPLETE")
    names = [item.value for item in complete.get_completions(["points"], "nets.py:")]
    assert names == [f"nets.py:{name}" for name in ("Net", "Broken", "Many", "Loop", "explodes", "ready", "number")]
    assert [item.value for item in complete.get_completions(["points"], "nets.py:re")] == ["nets.py:ready"]
    assert complete.get_completions(["points"], "none.py:") == []
    assert "nets" not in sys.modules


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
@pytest.mark.parametrize(
    ("line", "replies"), [("points nets.py:Ne", "Net"), ("points ne", "nets.py:"), ("po", "points")]
)
def test_bash_completes_a_model_though_a_colon_ends_its_words(call, tmp_path, line, replies):
    program = tmp_path / "tenterhook"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -c "import tenterhook.cli; tenterhook.cli.main()" "$@"\n')
    program.chmod(0o755)
    (tmp_path / "complete.sh").write_text(call("completion", "bash").stdout)
    words = line.replace(":", " : ").split()
    script = f"""
        source ./complete.sh
        COMP_LINE="tenterhook {line} and more"; COMP_POINT={len("tenterhook ") + len(line)}
        COMP_WORDS=(tenterhook {" ".join(words)}); COMP_CWORD={len(words)}
        _tenterhook_completion ./tenterhook; echo "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [replies], done.stderr


@pytest.mark.parametrize("command", ["", "points", "record", "show", "page", "diff", "audit", "completion"])
def test_every_help_has_an_example(call, command):
    result = call(*filter(None, [command]), "--help")
    assert result.exit_code == 0
    assert "  tenterhook " in result.stdout.split("Usage:")[1].split("\n", 1)[1]


def test_as_a_process_it_has_no_traceback_and_plain_text_in_a_pipe(tmp_path):
    (tmp_path / "nets.py").write_text(textwrap.dedent(SOURCE))
    command = [sys.executable, "-m", "tenterhook"]
    done = subprocess.run([*command, "points", "nets.py:Net"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[1].split() == ["name", "type", "params"]
    assert "\x1b" not in done.stdout
    failed = subprocess.run([*command, "show", "x.th"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (failed.returncode, failed.stderr) == (4, "error: there is no file x.th.\n")
