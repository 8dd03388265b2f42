"""Files that were damaged or made to harm: every one is refused in words, or read as what it was.

Two kinds of input are made of a good file. *Damaged* ones are changed byte by byte, as a disk or a network does it:
what is still accepted must have the values of the good file. *Forged* ones are changed in what they say and then given
a right checksum, as an attacker does it: what is accepted must be drawn without any error but tenterhook's own.

Each test counts its inputs, and the long ones print the counts (``-m slow -s``).
"""

import copy
import json
import random
import resource
import struct
from dataclasses import dataclass

import pytest
import torch
import xxhash
from torch import nn

import tenterhook as th
from tenterhook.record import tensor_file as record_file
from tenterhook.record.tape_file import TAPE
from tenterhook.report.page import render, tapes_page
from tenterhook.watch import blackbox

SHORT, LONG = 150, 10_000
ROOM = 400_000  # kB by which a test may grow, whatever is in the files
JUNK = [
    None, True, -1, 0, 2**31, 2**63, 2**70, -(2**70), 1e308, float("nan"), "", "x", "\x1b[2J",
    "../../etc/passwd", [], {}, [[]], ["tensor", "t0"], ["tensor", "t99"], ["list", [["list", []]]], {"a": 1},
    "os:system",
    ["dataclass", "os:x", ["__class__"], [1], None],
    ["namedtuple", "a:b", ["x", "x"], [1, 2]], ["range", 0, 10**12, 1],
    ["size", [10**12]], ["bytes", "!"], ["device", "cuda:9"],
    ["dtype", "qint8"], ["int", "0x" + "f" * 5000], ["complex", "a", 1],
]  # fmt: skip


@dataclass
class Counts:
    inputs: int = 0
    clean_errors: int = 0
    accepted: int = 0
    other_exceptions: int = 0
    wrong_values: int = 0
    peak_growth_kb: int = 0

    def check(self, least):
        assert self.inputs >= least
        assert self.clean_errors + self.accepted == self.inputs
        assert self.clean_errors > 0
        assert (self.other_exceptions, self.wrong_values) == (0, 0), self
        assert self.peak_growth_kb < ROOM, self


def fuzz(make, use, same, count, seed=0):
    """Make inputs, use each, and count what comes of it; ``same`` tells whether what was accepted is right."""
    rng, counts = random.Random(seed), Counts()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(count):
        counts.inputs += 1
        make(rng)
        try:
            found = use()
        except th.TenterhookError:
            counts.clean_errors += 1
            continue
        except Exception as error:
            counts.other_exceptions += 1
            raise AssertionError(f"input {counts.inputs} of seed {seed}: {type(error).__name__}: {error}") from error
        counts.accepted += 1
        counts.wrong_values += not same(found)
    counts.peak_growth_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return counts


def damaged(content, rng):
    """The bytes with one to three changes: flipped bits, cuts, zeros, insertions, parts that change places."""
    data = bytearray(content)
    for _ in range(rng.randint(1, 3)):
        place = rng.randrange(len(data) + 1) if rng.random() < 0.5 else rng.randrange(min(len(data), 400) + 1)
        length = rng.choice([1, 2, 8, 64, 4096])
        how = rng.randrange(6)
        if how == 0 and place < len(data):
            data[place] ^= 1 << rng.randrange(8)
        elif how == 1:
            del data[place:]
        elif how == 2:
            del data[place : place + length]
        elif how == 3:
            data[place:place] = rng.randbytes(length)
        elif how == 4:
            data[place : place + length] = bytes(len(data[place : place + length]))
        else:
            other = rng.randrange(len(data) + 1)
            data[place : place + length] = data[other : other + length]
    return bytes(data)


def forged(value, rng):
    """A copy of plain JSON in which a few parts, anywhere, are something else."""
    value = copy.deepcopy(value)
    for _ in range(rng.randint(1, 3)):
        at, key, inside = None, None, value
        while isinstance(inside, dict | list) and len(inside) and (at is None or rng.random() < 0.8):
            at, key = inside, rng.choice(list(inside) if isinstance(inside, dict) else range(len(inside)))
            inside = at[key]
        if at is None:
            return rng.choice(JUNK)
        how = rng.randrange(4)
        if how == 0:
            del at[key]
        elif how == 1 and isinstance(at, list):
            at.append(copy.deepcopy(rng.choice(JUNK)))
        else:
            at[key] = copy.deepcopy(rng.choice(JUNK))
    return value


@pytest.fixture(params=[pytest.param(SHORT, id="short"), pytest.param(LONG, id="long", marks=pytest.mark.slow)])
def count(request):
    return request.param


@pytest.fixture
def tell(request, capsys):
    def told(counts, least):
        with capsys.disabled():
            if least > SHORT:
                print(f"\n{request.node.name}: {counts}", end="")  # noqa: T201  # what the long tests are run for
        counts.check(least)

    return told


# -- tapes ------------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.act = nn.Linear(3, 4), nn.Tanh()

    def forward(self, x):
        for _ in range(2):
            y = self.act(self.fc(x))
        return {"out": (y, [y * 2, None]), "size": y.shape, "name": "net", "scale": 1e-3}


@pytest.fixture
def tape():
    torch.manual_seed(0)
    model = Net()
    with th.record(model, "**", "fc.weight", grad=True) as made:
        model(torch.randn(2, 3))["out"][0].sum().backward()
    made.notes["failure"] = {
        "address": "fc", "kind": "Linear", "error": "E", "message": "m", "where": "f:1", "inputs": {"x": "1"},
        "parameters": {},
    }  # fmt: skip
    made.notes |= {"tokens": ["a"], "order": ["fc#0"], "edits": [], "inputs": {"0": "x"}}
    made.notes["model"] = {"name": "n", "class": "Net", "modules": 3, "parameters": 16}
    return made


def values(tape):
    return (
        [(address, repr(tape[address])) for address in tape],
        [(a, repr(tape.grad[a])) for a in tape.grad],
        tape.notes,
    )


def test_a_damaged_tape_is_refused_or_unchanged(tape, tmp_path, count, tell):
    file = tmp_path / "run.th"
    tape.save(file)
    good, right = file.read_bytes(), values(th.load(file))
    counts = fuzz(
        lambda rng: file.write_bytes(damaged(good, rng)),
        lambda: th.load(file),
        lambda found: values(found) == right,
        count,
    )
    tell(counts, count)


def test_a_forged_tape_is_refused_or_can_be_looked_at(tape, tmp_path, count, tell):
    file = tmp_path / "run.th"
    tape.save(file)
    texts, tensors = record_file.read(TAPE, file)
    described, notes = json.loads(texts["tape"]), json.loads(texts["notes"])

    def make(rng):
        both = forged({"tape": described, "notes": notes}, rng)
        parts = both if isinstance(both, dict) else {}
        record_file.write(TAPE, file, tensors, {key: json.dumps(parts.get(key)) for key in ("tape", "notes")})

    def look():
        found = th.load(file)
        texts = [repr(found), found._repr_html_(), repr(list(found.grad))]
        texts.append(render(tapes_page({"a": found}, size=400_000)))
        return texts

    tell(fuzz(make, look, lambda texts: all("\x1b" not in text for text in texts), count // 2), count // 2)


# -- watches ----------------------------------------------------------------------------------------------------------


def watched(folder):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    box, log = folder / "box.thb", folder / "run.jsonl"
    with th.watch(model, blackbox=6, to=box, sinks=[th.JsonLines(log)], on_nan="record") as w:
        for step in range(9):
            model(torch.full((2, 4), float("nan") if step == 5 else 1.0 + step)).sum().backward()
            w.step()
    return box, log


def in_box(box):
    return {page.step: (page.rows.tobytes(), page.table.tobytes()) for page in box.pages}


def test_a_damaged_black_box_is_refused_or_holds_fewer_steps(tmp_path, count, tell):
    file, _ = watched(tmp_path)
    good = file.read_bytes()
    whole = th.blackbox(file)
    steps, note = in_box(whole), ["a problem was recorded, but its text is damaged"]

    def same(found):
        right = all(steps.get(step) == held for step, held in in_box(found).items())
        return right and found.wrong in (whole.wrong, note, []) and found.header == whole.header and bool(repr(found))

    make = lambda rng: file.write_bytes(damaged(good, rng))
    tell(fuzz(make, lambda: th.blackbox(file), same, count), count)


def test_a_forged_black_box_is_refused_or_can_be_looked_at(tmp_path, count, tell):
    file, _ = watched(tmp_path)
    good = file.read_bytes()
    length = struct.unpack_from("<Q", good, 8)[0]
    header, rest = json.loads(good[24 : 24 + length]), good[24 + length :]

    def make(rng):
        text = json.dumps(forged(header, rng)).encode()
        head = blackbox.HEAD.pack(blackbox.MARK, len(text), xxhash.xxh3_64_intdigest(text))
        end = rng.choice([rest, rest[: blackbox.EVENT_ROOM], damaged(rest, rng)])
        file.write_bytes(head + text + end)

    def look():
        found = th.blackbox(file)
        return [repr(found), repr(found.rows()), found._repr_html_(), repr(found.series("0"))]

    tell(fuzz(make, look, lambda texts: all("\x1b" not in text for text in texts), count), count)


def test_a_damaged_log_is_refused_or_has_fewer_steps(tmp_path, count, tell):
    _, file = watched(tmp_path)
    good = file.read_bytes()
    steps = [repr(step) for step in th.JsonLines.read(file)]

    def same(found):
        return all(repr(step) in steps for step in found)

    tell(fuzz(lambda rng: file.write_bytes(damaged(good, rng)), lambda: th.JsonLines.read(file), same, count), count)


def test_a_forged_log_is_refused_or_has_numbers_only(tmp_path, count, tell):
    _, file = watched(tmp_path)
    lines = [json.loads(line) for line in file.read_bytes().splitlines()]

    def make(rng):
        made = []
        for line in forged(lines, rng) if isinstance(lines, list) else []:
            text = json.dumps({k: v for k, v in line.items() if k != "checksum"} if isinstance(line, dict) else line)[
                :-1
            ]
            made.append(text.encode() + b',"checksum":"%016x"}' % xxhash.xxh3_64_intdigest(text.encode()))
        file.write_bytes(b"\n".join(made) + b"\n")

    def numbers(found):
        rows = [row for step in found for kind in step["rows"].values() for row in kind.values()]
        return all(isinstance(number, int | float) for row in rows for number in row.values())

    tell(fuzz(make, lambda: th.JsonLines.read(file), numbers, count), count)


# -- pages ------------------------------------------------------------------------------------------------------------

PIECES = [
    "</script>",
    "<!--",
    "\x1b[2J",
    "\u202e",
    "\ud800",
    "\x00",
    "\u2028",
    "&lt;",
    '"',
    "\\",
    "\\u003c/script",
    "é",
    "a",
    "\n",
    "@@DATA@@",
]


def test_a_page_of_whatever_names_is_one_page_of_plain_data(count, tell):
    made = {}

    def text(rng):
        return "".join(rng.choices(PIECES, k=rng.randint(0, 6)))

    def make(rng):
        model = nn.Sequential()
        for number in range(3):
            model.add_module(f"{number}{text(rng)}".replace(".", ""), nn.Identity())
        with th.record(model) as tape:
            model(torch.ones(2))
        tape.notes |= {"tokens": [text(rng)], "edits": [text(rng)], "inputs": {text(rng): text(rng)}}
        tape.notes["model"] = {"name": text(rng), "class": text(rng), "modules": 1, "parameters": 1}
        made["page"] = tapes_page({text(rng) or "tape": tape}, title=text(rng))

    def whole(content):
        content.encode()
        data = content.split('<script id="data" type="application/json">')[1].split("</script>")[0]
        parsed = json.loads(data)
        tags = [content.count(tag) for tag in ("<script", "</script", "<!--", "<title")]
        return tags == [2, 2, 0, 1] and len(parsed["points"]) == 4 and "\x1b" not in content and "\u202e" not in content

    counts = fuzz(make, lambda: render(made["page"]), whole, count // 3)
    counts.clean_errors += 1  # There is none to be had: a page refuses no name.
    counts.inputs += 1
    tell(counts, count // 3)
