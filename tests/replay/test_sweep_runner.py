"""Sweeps: one row for each case, equal to running the cases one by one by hand."""

import decimal
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import tenterhook as th
from tenterhook.testing import untouched


@pytest.fixture(scope="module")
def gpt2():
    torch.manual_seed(0)
    config = GPT2Config(n_layer=3, n_embd=16, n_head=2, vocab_size=50, n_positions=16, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config).eval()


IDS = torch.arange(6)[None]


def difference(output):
    return output.logits[0, -1, 3] - output.logits[0, -1, 4]


def by_hand(model, edit_one, cases, metric, *args, **kwargs):
    """The same with PyTorch's own hooks, one whole run for each case."""
    rows = []
    for case in cases:
        handles = edit_one(case)
        with torch.no_grad():
            rows.append(metric(model(*args, **kwargs)))
        for handle in handles:
            handle.remove()
    return torch.stack(rows)


def patch(model, tape):
    def one(case):
        def hook(_module, _args, out):
            out = out.clone()
            out[:, case["position"]] = tape[f"transformer.h.{case['layer']}"][:, case["position"]]
            return out

        return [model.transformer.h[case["layer"]].register_forward_hook(hook)]

    return one


@pytest.mark.parametrize("batch", [None, 1, 4])
def test_patching_every_layer_and_position(gpt2, batch):
    with torch.no_grad(), th.record(gpt2, "transformer.h.*") as tape:
        gpt2(IDS.flip(1), use_cache=False)

    def edits(layer, position):
        address = f"transformer.h.{layer}"
        return {address: th.set(tape[address][:, position], at=th.at[:, position])}

    cases = th.grid(edits, layer=range(3), position=range(6))
    with untouched(gpt2):
        found = th.sweep(gpt2, cases, difference, IDS, use_cache=False, batch=batch)
    truth = by_hand(gpt2, patch(gpt2, tape), [case.labels for case in cases], difference, IDS, use_cache=False)
    if batch == 1:
        assert torch.equal(found.values, truth)
    torch.testing.assert_close(found.values, truth)
    assert found.grid.shape == (3, 6)
    assert torch.equal(found.grid[2, 1], found.values[13])
    assert found.base == difference(gpt2(IDS, use_cache=False))
    assert found.done
    assert not found.failed
    runs = {None: 1, 1: 18, 4: 6}[batch]
    assert found.served.runs == runs
    assert found.served.calls["transformer.h.0"] >= (1 if batch is None else 2)


def test_functions_structures_arguments_and_variables(gpt2):
    cases = [
        {"transformer.h.1": lambda value: value * 2},
        {"transformer.h.1": lambda value, ctx: value.mul_(3)},
        {"transformer.h.1.attn": lambda value: (value[0] * 0, *value[1:])},
        {"transformer.h.1.attn": lambda value: (value[0] * 2, *value[1:])},
        {"transformer.h.2.mlp:in": th.zero()},
        {"transformer.h.2.mlp:in": th.scale(3.0)},
        {"transformer.h.2.attn:query_states[*]": th.zero(at=th.at[:, 0])},
        {"transformer.h.2.attn:query_states[*]": th.zero(at=th.at[:, 1])},
        {"transformer.h.0": th.mean(dim=1), "transformer.h.2": [th.scale(2.0), th.noise(seed=1)]},
        {"transformer.h.1.mlp.c_fc.weight": th.scale(2.0)},
        {"transformer.h.1.mlp.c_fc.weight": th.zero()},
    ]
    found = th.sweep(gpt2, cases, lambda output: output.logits, IDS, use_cache=False)
    for case, row in zip(cases, found.values, strict=True):
        with torch.no_grad(), th.edit(gpt2, case):
            torch.testing.assert_close(row, gpt2(IDS, use_cache=False).logits)


def test_several_examples_for_each_case(gpt2):
    ids = torch.stack([torch.arange(6), torch.arange(6).flip(0), torch.ones(6, dtype=torch.long)])
    mask = torch.ones(3, 6, dtype=torch.long)
    cases = th.grid(lambda unit: {"transformer.h.1.mlp.act": th.zero(at=th.at[..., unit])}, unit=range(5))
    inputs = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
    found = th.sweep(gpt2, cases, lambda output: output.logits[:, -1], **inputs)
    assert found.values.shape == (5, 3, 50)
    for case, row in zip(cases, found.values, strict=True):
        with torch.no_grad(), th.edit(gpt2, case.edits):
            torch.testing.assert_close(row, gpt2(**inputs).logits[:, -1])


class Vision(nn.Module):
    """A small residual network that works in place, as they do."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.stage1, self.stage2 = self.block(), self.block()
        self.head = nn.Linear(8, 5)

    @staticmethod
    def block():
        return nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True))

    def forward(self, x):
        x = self.stem(x)
        x = self.stage2(self.stage1(x)) + x
        return self.head(x.mean((2, 3)))


def test_ablating_channels_of_a_vision_model():
    torch.manual_seed(0)
    model, image = Vision().eval(), torch.randn(1, 3, 10, 10)
    cases = th.grid(lambda channel: {"stage2": th.zero(at=th.at[:, channel])}, channel=range(8))
    found = th.sweep(model, cases, lambda output: output[0, 2], image)
    for channel in range(8):
        handle = model.stage2.register_forward_hook(
            lambda _m, _a, out, channel=channel: out.index_fill(1, torch.tensor(channel), 0)
        )
        with torch.no_grad():
            torch.testing.assert_close(found.values[channel], model(image)[0, 2])
        handle.remove()
    assert found.served.calls["stage1"] > 0


def test_a_model_whose_examples_meddle_is_run_case_by_case_and_says_so():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).train()
    cases = [{"0": th.scale(float(factor))} for factor in range(1, 5)]
    x = torch.randn(3, 4)
    with pytest.warns(th.TenterhookWarning, match=r"changes its buffers \('1.running_mean' and 2 more\)"):
        found = th.sweep(model, cases, lambda output: output.sum(), x)
    assert any("one case at a time" in line and "gives another result" in line for line in found.how)
    for case, value in zip(cases, found.values, strict=True):
        with torch.no_grad(), th.edit(model, case):
            torch.testing.assert_close(value, model(x).sum())


class Picky(nn.Module):
    """Takes one example at a time."""

    def __init__(self):
        super().__init__()
        self.inner, self.out = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x):
        if x.shape[0] != 1:
            raise ValueError("one at a time")
        return self.out(self.inner(x))


def test_a_model_that_refuses_a_batch_is_run_case_by_case():
    model = Picky()
    found = th.sweep(model, [{"inner": th.scale(float(n))} for n in range(4)], lambda out: out.sum(), torch.ones(1, 4))
    assert any("one at a time" in line for line in found.how)
    with torch.no_grad(), th.edit(model, {"inner": th.scale(3.0)}):
        assert torch.equal(found.values[3], model(torch.ones(1, 4)).sum())


def test_nothing_after_the_point_that_is_read_runs(gpt2, monkeypatch):
    ran = []
    original = type(gpt2.transformer.ln_f).forward
    monkeypatch.setattr(nn.LayerNorm, "forward", lambda self, x: (ran.append(self), original(self, x))[1])
    cases = [{"transformer.h.0": th.scale(float(n))} for n in range(3)]
    found = th.sweep(gpt2, cases, lambda value: value[0, -1], IDS, read="transformer.h.1", use_cache=False)
    assert gpt2.transformer.ln_f not in ran
    assert gpt2.transformer.h[2].ln_1 not in ran
    with torch.no_grad(), th.edit(gpt2, cases[2]), th.record(gpt2, "transformer.h.1") as tape:
        gpt2(IDS, use_cache=False)
    torch.testing.assert_close(found.values[2], tape["transformer.h.1"][0, -1])


# -- what goes wrong --------------------------------------------------------------------------------------------------


def test_a_metric_that_fails_on_one_case_loses_nothing_else(gpt2):
    cases = th.grid(lambda n: {"transformer.h.1": th.scale(float(n))}, n=range(5))

    def metric(output, case):
        if case is not None and case.labels["n"] == 3:
            raise ZeroDivisionError("three")
        return difference(output)

    with pytest.warns(th.TenterhookWarning, match=r"1 of 5 cases failed. Case 3 \(n=3\)"):
        found = th.sweep(gpt2, cases, metric, IDS, use_cache=False)
    assert isinstance(found.failed[3], ZeroDivisionError)
    assert found.values.isnan().tolist() == [False, False, False, True, False]
    assert "failed: ZeroDivisionError" in repr(found)


def test_an_edit_that_fails_on_one_case_loses_nothing_else(gpt2):
    def bad(value):
        raise ZeroDivisionError

    cases = [{"transformer.h.1": th.scale(2.0)}, {"transformer.h.1": bad}, {"transformer.h.1": th.zero()}]
    with pytest.warns(th.TenterhookWarning, match="1 of 3 cases failed"):
        found = th.sweep(gpt2, cases, difference, IDS, use_cache=False)
    assert list(found.failed) == [1]
    with torch.no_grad(), th.edit(gpt2, cases[2]):
        torch.testing.assert_close(found.values[2], difference(gpt2(IDS, use_cache=False)))


def test_bad_cases_are_refused_before_anything_runs(gpt2):
    ran = []
    handle = gpt2.register_forward_hook(lambda *_: ran.append(1))
    for cases, text in [
        ([], "at least one case"),
        ([{"transformer.h.0": th.zero()}, {}], "case 1 .* edits nothing"),
        ([th.zero()], "case 0 is a Zero"),
    ]:
        with pytest.raises(th.SweepError, match=text):
            th.sweep(gpt2, cases, difference, IDS)
    with pytest.raises(th.AddressError, match=r"transformer\.h") as caught:
        th.sweep(gpt2, [{"transformer.h.0": th.zero()}, {"transformer.x.0": th.zero()}], difference, IDS)
    assert "in case 1" in "".join(caught.value.__notes__)
    with pytest.raises(th.SweepError, match="a function"):
        th.sweep(gpt2, [{"transformer.h.0": th.zero()}], 3, IDS)
    with pytest.raises(th.SweepError, match="axis 'n' of the grid is empty"):
        th.grid(lambda n: {}, n=[])
    handle.remove()
    assert not ran


def test_all_cases_failing_is_an_error_that_names_one(gpt2):
    with pytest.raises(th.SweepError, match=r"2 of 2 cases failed\. Case 0"):
        th.sweep(gpt2, [{"transformer.h.0": th.set(torch.zeros(7))}] * 2, difference, IDS, use_cache=False)


def test_an_interrupted_sweep_goes_on_where_it_stopped(gpt2):
    cases = th.grid(lambda n: {"transformer.h.1": th.scale(float(n))}, n=range(6))
    count = []

    def metric(output, case):
        count.append(case)
        if len(count) == 4:
            raise KeyboardInterrupt
        return difference(output)

    with untouched(gpt2), pytest.raises(th.SweepInterrupted) as caught:
        th.sweep(gpt2, cases, metric, IDS, use_cache=False, batch=1)
    half = caught.value.sweep
    assert not half.done
    assert half.values.isnan().tolist() == [False, False, True, True, True, True]
    whole = half.resume()
    assert whole.done
    assert len(count) == 1 + 6 + 1  # The unedited run, each case once, and the one that was interrupted once more.
    assert torch.equal(whole.values, th.sweep(gpt2, cases, difference, IDS, use_cache=False, batch=1).values)


def test_ctrl_c_in_a_real_process(tmp_path):
    script = """
import signal, time, torch, tenterhook as th
signal.signal(signal.SIGINT, signal.default_int_handler)  # A shell's background jobs are started without it.
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
def metric(output):
    print("case", flush=True)
    time.sleep(0.05)
    return output.sum()
cases = [{"0": th.scale(float(n))} for n in range(200)]
try:
    th.sweep(model, cases, metric, torch.ones(1, 4), batch=1)
except KeyboardInterrupt as error:
    found = error.sweep
    print("kept", int((~found.values.isnan()).sum()), "forward" in model.__dict__, flush=True)
"""
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    timer = threading.Timer(60, process.kill)
    timer.start()
    lines = [process.stdout.readline() for _ in range(5)]
    assert lines == ["case\n"] * 5
    time.sleep(0.02)
    os.kill(process.pid, signal.SIGINT)
    rest = process.communicate()[0].splitlines()
    timer.cancel()
    kept = rest[-1].split()
    assert kept[0] == "kept"
    assert 3 <= int(kept[1]) < 200
    assert kept[2] == "False"


# -- what is shown ----------------------------------------------------------------------------------------------------


def test_results_as_rows_a_frame_and_a_table(gpt2):
    cases = th.grid(lambda layer, by: {f"transformer.h.{layer}": th.scale(by)}, layer=range(2), by=[0.0, 2.0])
    found = th.sweep(gpt2, cases, difference, IDS, use_cache=False)
    assert [(row["layer"], row["by"]) for row in found.rows()] == [(0, 0.0), (0, 2.0), (1, 0.0), (1, 2.0)]
    assert found.rows()[2]["value"] == pytest.approx(float(found.values[2]))
    text = repr(found)
    assert "sweep: 4 of 4 cases" in text
    assert "calls were served" in text
    assert "<table" in found._repr_html_()
    named = th.sweep(gpt2, [{"transformer.h.0": th.zero()}], difference, IDS, use_cache=False)
    assert named.rows()[0]["case"] == "transformer.h.0: th.zero()"
    with pytest.raises(th.SweepError, match=r"th.grid\(...\) gives them axes"):
        _ = named.grid


def test_the_bar_is_shown_where_it_is_asked_for(gpt2, capsys):
    cases = [{"transformer.h.0": th.scale(float(n))} for n in range(3)]
    th.sweep(gpt2, cases, difference, IDS, use_cache=False, progress=True)
    th.sweep(gpt2, cases, difference, IDS, use_cache=False)
    assert capsys.readouterr().out == ""


class Drifting(nn.Module):
    """Its output depends on something that cannot be seen: how many batches it has run, counted in C."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two, self.out = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x):
        context = decimal.getcontext()
        context.prec += len(x) > 1
        x = self.one(x) + (context.prec > 2)
        return self.out(self.two(x))


def test_comparisons_that_are_not_waited_for_are_looked_at_in_the_end(monkeypatch):
    from tenterhook.replay import call_server as serve

    monkeypatch.setattr(serve.CallServer, "waits_for", ("cpu", "cuda"))
    model = Drifting()
    cases = [{point: th.scale(float(factor))} for point in ("two", "out") for factor in range(1, 5)]
    decimal.getcontext().prec = 1
    found = th.sweep(model, cases, lambda output: output.sum(), torch.ones(1, 4), batch=5)
    assert decimal.getcontext().prec == 3
    assert any("one case at a time" in line for line in found.how)
    for case, value in zip(cases, found.values, strict=True):
        with torch.no_grad(), th.edit(model, case):
            torch.testing.assert_close(value, model(torch.ones(1, 4)).sum())


def test_comparisons_that_hold_cost_no_second_run(monkeypatch, gpt2):
    from tenterhook.replay import call_server as serve

    monkeypatch.setattr(serve.CallServer, "waits_for", ("cpu", "cuda"))
    cases = th.grid(lambda layer, by: {f"transformer.h.{layer}": th.scale(by)}, layer=range(3), by=[0.5, 2.0, 3.0])
    found = th.sweep(gpt2, cases, difference, IDS, use_cache=False, batch=4)
    assert found.served.runs == 3
    for case, value in zip(cases, found.values, strict=True):
        with torch.no_grad(), th.edit(gpt2, case.edits):
            torch.testing.assert_close(value, difference(gpt2(IDS, use_cache=False)))


def test_a_heat_map_and_a_frame_show_every_case(gpt2):
    cases = th.grid(lambda layer, by: {f"transformer.h.{layer}": th.scale(by)}, layer=range(2), by=[0.0, 2.0, 3.0])
    found = th.sweep(gpt2, cases, difference, IDS, use_cache=False)
    figure = found.heatmap(title="scaled")
    image = figure.axes[0].images[0]
    assert torch.equal(torch.tensor(image.get_array()), found.grid)
    assert [tick.get_text() for tick in figure.axes[0].get_xticklabels()] == ["0.0", "2.0", "3.0"]
    assert figure.axes[0].get_ylabel() == "layer"
    frame = found.to_pandas()
    assert list(frame.columns) == ["layer", "by", "value"]
    assert len(frame) == 6


# -- one batch for several groups -------------------------------------------------------------------------------------


class Meddling(nn.Module):
    """Each example has something of the others: of those before it, or of those behind it."""

    def __init__(self, *, behind):
        super().__init__()
        torch.manual_seed(0)
        self.zero, self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)
        self._behind = behind

    def forward(self, x):
        x = self.one(self.zero(x))
        return self.two(x.flip(0).cumsum(0).flip(0) if self._behind else x.cumsum(0))


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("behind", [False, True])
def test_examples_that_meddle_in_one_direction_only_are_found_out(behind, groups):
    model, x = Meddling(behind=behind), torch.ones(1, 4)
    points = ("zero", "one") if groups == 2 else ("one",)
    cases = [{point: th.scale(float(factor))} for point in points for factor in range(2, 6)]
    found = th.sweep(model, cases, lambda output: output.sum(), x)
    assert any("one case at a time" in line and "the unedited input gives another result" in line for line in found.how)
    for case, value in zip(cases, found.values, strict=True):
        with torch.no_grad(), th.edit(model, case):
            assert torch.equal(value, model(x).sum())


def patches(gpt2, points, count=4):
    with torch.no_grad(), th.record(gpt2, *points) as tape:
        gpt2(IDS.flip(1), use_cache=False)

    def edits(point, position):
        value = tape[point]
        value = value[0] if isinstance(value, tuple) else value
        return {point: th.set(value[:, position], at=th.at[:, position])}

    return th.grid(edits, point=points, position=range(count))


def check(gpt2, cases, found):
    for case, value in zip(cases, found.values, strict=True):
        with torch.no_grad(), th.edit(gpt2, case.edits):
            torch.testing.assert_close(value, difference(gpt2(IDS, use_cache=False)))


def test_groups_join_a_batch_where_they_begin(gpt2):
    points = ["transformer.h.2", "transformer.drop", "transformer.h.0", "transformer.h.1", "transformer.ln_f"]
    cases = patches(gpt2, points)
    with untouched(gpt2):
        found = th.sweep(gpt2, cases, difference, IDS, use_cache=False)
    check(gpt2, cases, found)
    assert "cases with later edits joined a running batch" in found.how
    # The dropout hands its input on: its group is the first, and by itself. All others share a batch.
    assert found.served.runs == 2


def test_groups_whose_values_are_added_to_what_was_there_before_have_batches_of_their_own(gpt2):
    cases = patches(gpt2, [f"transformer.h.{layer}.mlp" for layer in range(3)])
    found = th.sweep(gpt2, cases, difference, IDS, use_cache=False)
    check(gpt2, cases, found)
    assert not any("joined" in line for line in found.how)
    assert not found.failed


def test_what_comes_out_otherwise_for_those_that_joined_is_run_again(monkeypatch):
    from tenterhook.replay import growing_batch

    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 1)), torch.randn(1, 4)
    cases = [{str(layer): th.scale(float(factor))} for layer in range(3) for factor in range(1, 5)]
    true = growing_batch.GrowingBatch.__call__

    def wrong(self, value, context):
        joined = true(self, value, context)
        joined[value.shape[0] :] += 1
        return joined

    monkeypatch.setattr(growing_batch.GrowingBatch, "__call__", wrong)
    found = th.sweep(model, cases, lambda output: output.sum(), x)
    for case, value in zip(cases, found.values, strict=True):
        with torch.no_grad(), th.edit(model, case):
            torch.testing.assert_close(value, model(x).sum())
    assert found.served.runs == 1 + 3  # All groups at once, and each of them once more.


@pytest.mark.parametrize("what", ["weights", "modes"])
def test_no_group_joins_after_the_weights_or_the_modes_have_changed(what, request):
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 1)), torch.randn(1, 4)
    cases = [{str(layer): th.scale(float(n))} for layer, count in ((0, 4), (1, 2), (2, 2)) for n in range(1, 1 + count)]
    request.addfinalizer(lambda: torch.use_deterministic_algorithms(mode=False))
    changed = []

    def changing(output):
        changed.append(1)
        if len(changed) == 5:  # The unedited run, and four cases at the first point.
            if what == "modes":
                torch.use_deterministic_algorithms(mode=True)
            else:
                with torch.no_grad():
                    model[0].weight.add_(1)
        return output.sum()

    found = th.sweep(model, cases, changing, x, batch=5)  # Four cases; then two, and two that would join.
    assert not any("joined" in line for line in found.how)
    for case, value in list(zip(cases, found.values, strict=True))[4:]:
        with torch.no_grad(), th.edit(model, case):
            torch.testing.assert_close(value, model(x).sum())
