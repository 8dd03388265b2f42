import io
import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import tenterhook as th


def train(*sinks, steps=3, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with th.watch(model, optimizer=optimizer, sinks=sinks, on_nan="record", **options) as w:
        for step in range(steps):
            optimizer.zero_grad()
            model(torch.randn(16, 4) if step != 2 else torch.full((16, 4), float("nan"))).square().mean().backward()
            optimizer.step()
    return w


def test_each_step_is_a_line_of_json(tmp_path):
    file = tmp_path / "deep" / "run.jsonl"
    w = train(th.JsonLines(file), every=2, steps=5)
    lines = [json.loads(line, parse_constant=pytest.fail) for line in file.read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 2, 4]
    assert set(lines[0]["rows"]) == {"values", "gradients", "parameters", "updates"}
    assert lines[0]["rows"]["values"]["2"]["norm"] == w.pages[0].column("norm", "values")["2"]
    assert lines[1]["rows"]["values"]["0"]["min"] == "nan"
    assert lines[1]["rows"]["values"]["0"]["nan"] == 16 * 8


def test_tensorboard_reads_what_was_written(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    w = train(th.TensorBoard(tmp_path / "runs", histograms=1), steps=2, slow=1)
    events = EventAccumulator(str(tmp_path / "runs"))
    events.Reload()
    for page in w.pages:
        for kind in ("values", "gradients", "parameters", "updates"):
            for address, norm in page.column("norm", kind).items():
                found = events.Scalars(f"{kind}/{address}/norm")
                assert [event.step for event in found] == [0, 1]
                assert found[page.step].value == pytest.approx(norm, rel=1e-5)
    histogram = events.Histograms("values/2")[-1].histogram_value
    row = w.row("2")
    assert sum(histogram.bucket) == sum(row["histogram"]["counts"])
    assert list(histogram.bucket_limit) == pytest.approx(row["histogram"]["edges"][1:])


def test_without_tensorboard_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError, match=r'pip install "tenterhook\[tensorboard\]"'):
        th.TensorBoard(tmp_path)


def test_a_sink_of_ones_own_gets_each_step():
    class Keeps:
        def __init__(self):
            self.steps, self.closed = [], False

        def write(self, page, findings, books):
            self.steps.append((page.step, page.column("count", "values")["0"]))

        def close(self):
            self.closed = True

    sink = Keeps()
    train(sink)
    assert sink.steps == [(0, 128), (1, 128), (2, 128)]
    assert sink.closed


def test_a_log_is_read_back_with_its_numbers(tmp_path):
    file = tmp_path / "run.jsonl"
    w = train(th.JsonLines(file))
    steps = th.JsonLines.read(file)
    assert [step["step"] for step in steps] == [0, 1, 2]
    assert steps[0]["rows"]["values"]["2"]["norm"] == w.pages[0].column("norm", "values")["2"]
    assert steps[2]["rows"]["values"]["0"]["min"] != steps[2]["rows"]["values"]["0"]["min"]  # It is NaN again.


def test_a_log_of_a_killed_process_is_continued_on_a_new_line(tmp_path):
    file = tmp_path / "run.jsonl"
    train(th.JsonLines(file), steps=2)
    file.write_bytes(file.read_bytes()[:-40])
    assert [step["step"] for step in th.JsonLines.read(file)] == [0]
    train(th.JsonLines(file), steps=1)
    assert json.loads(file.read_bytes().splitlines()[-1])["step"] == 0
    with pytest.raises(th.TapeFileError, match="damaged at line 2"):
        th.JsonLines.read(file)


def test_a_sink_that_fails_is_stopped_with_one_warning_and_the_others_go_on(tmp_path):
    class Fails:
        def write(self, page, findings, books):
            raise ConnectionError("the reader is gone")

        def close(self):
            raise ConnectionError("still gone")

    with pytest.warns(th.TenterhookWarning, match="was stopped at step 0: ConnectionError: the reader") as said:
        train(Fails(), th.JsonLines(tmp_path / "run.jsonl"))
    assert len(said) == 1
    assert len(th.JsonLines.read(tmp_path / "run.jsonl")) == 3


class WritesOne:
    def write(self, page):
        pass

    def close(self):
        pass


@pytest.mark.parametrize(
    ("given", "fix"),
    [
        (["run.jsonl"], r"sinks=\[th\.JsonLines\('run\.jsonl'\)\]"),
        ([Path("run.jsonl")], r"sinks=\[th\.JsonLines\('run\.jsonl'\)\]"),
        ("run.jsonl", r"sinks=\[th\.JsonLines\('run\.jsonl'\)\]"),
        ([io.StringIO()], r"an open file is not a sink\. Pass sinks=\[th\.JsonLines\(path\)\]"),
        ([th.JsonLines], r"JsonLines is a class, not a sink\. Make one: sinks=\[JsonLines\(\.\.\.\)\]"),
        ([print], "has no method write and close"),
        ([WritesOne()], r"must take \(page, findings, history\)"),
    ],
)
def test_what_is_not_a_sink_is_an_error_at_once_with_the_fix(given, fix):
    with pytest.raises(TypeError, match=fix):
        th.watch(nn.Linear(2, 2), sinks=given)


def test_one_sink_without_a_list_is_an_error_with_the_fix(tmp_path):
    with pytest.raises(TypeError, match=r"must be a list of sinks; got one sink\. Pass sinks=\["):
        th.watch(nn.Linear(2, 2), sinks=th.JsonLines(tmp_path / "run.jsonl"))
