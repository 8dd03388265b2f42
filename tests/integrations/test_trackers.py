"""Where the numbers of a watch go: sinks of other libraries, and callbacks of trainers."""

import builtins
import json
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import tenterhook as th
from tenterhook.integrations.lightning import WatchesTraining
from tenterhook.integrations.opentelemetry import OpenTelemetrySink
from tenterhook.integrations.trainer import watching
from tenterhook.integrations.wandb import WandbSink
from tenterhook.watch.sink import Sink, scalars


def train(*sinks, steps=3):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    with torch.no_grad():
        model[0].bias[:4] = -100.0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with th.watch(model, optimizer=optimizer, sinks=sinks, thresholds={"dead_steps": 2}) as watch:
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(16, 4)).square().mean().backward()
            optimizer.step()
    return watch


class Run:
    """The part of a run of Weights & Biases that the sink uses."""

    name = "a run"

    def __init__(self):
        self.defined, self.logged, self.alerts = [], [], []

    def define_metric(self, name, step_metric):
        self.defined.append((name, step_metric))

    def log(self, numbers):
        self.logged.append(numbers)

    def alert(self, title, text):
        self.alerts.append((title, text))


def test_a_run_of_wandb_gets_each_step_on_an_axis_of_its_own():
    run = Run()
    watch = train(WandbSink(run))
    assert run.defined == [("tenterhook/*", "tenterhook/step")]
    assert [numbers["tenterhook/step"] for numbers in run.logged] == [0, 1, 2]
    for page, numbers in zip(watch.pages, run.logged, strict=True):
        assert numbers["tenterhook/values/2/norm"] == page.column("norm", "values")["2"]
    [(title, text)] = run.alerts
    assert title == "dead units at '1'"
    assert "Likely cause: " in text


class Meter:
    """A meter of OpenTelemetry that keeps what it gets."""

    def __init__(self):
        self.found = {}

    def create_gauge(self, name):
        keep = self.found.setdefault(name, [])
        return SimpleNamespace(set=lambda number, attributes: keep.append((number, attributes)))

    def create_counter(self, name):
        keep = self.found.setdefault(name, [])
        return SimpleNamespace(add=lambda number, attributes: keep.append((number, attributes)))


def test_a_meter_of_opentelemetry_gets_gauges_with_attributes():
    meter = Meter()
    watch = train(OpenTelemetrySink(meter, attributes={"run": "a"}))
    norms = {
        (attributes["kind"], attributes["address"]): number for number, attributes in meter.found["tenterhook.norm"]
    }
    assert norms["values", "2"] == watch.pages[-1].column("norm", "values")["2"]
    assert [number for number, _ in meter.found["tenterhook.step"]] == [0, 1, 2]
    assert meter.found["tenterhook.findings"] == [(1, {"run": "a", "kind": "dead units"})]


@pytest.mark.parametrize("name", ["wandb", "mlflow", "opentelemetry"])
def test_a_missing_package_is_named_with_its_command(name, monkeypatch):
    load = builtins.__import__

    def without(wanted, *args, **kwargs):
        if wanted.partition(".")[0] == name:
            raise ImportError(wanted)
        return load(wanted, *args, **kwargs)

    module = __import__(f"tenterhook.integrations.{name}", fromlist=[name])
    kind = {"wandb": "WandbSink", "mlflow": "MLflowSink", "opentelemetry": "OpenTelemetrySink"}[name]
    for each in [each for each in sys.modules if each.partition(".")[0] == name]:
        monkeypatch.delitem(sys.modules, each)
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=rf"tenterhook\[{name}\]"):
        getattr(module, kind)()


def test_every_sink_follows_the_protocol(tmp_path):
    sinks = [th.JsonLines(tmp_path / "a"), th.TensorBoard(tmp_path), WandbSink(Run()), OpenTelemetrySink(Meter())]
    assert all(isinstance(sink, Sink) for sink in sinks)
    assert not isinstance(object(), Sink)


def test_scalars_are_named_by_kind_address_and_statistic_and_are_finite():
    page = train().pages[0]
    found = scalars(page, ["norm", "max"])
    assert found["values/2/norm"] == page.column("norm", "values")["2"]
    assert {name.rpartition("/")[2] for name in found} == {"norm", "max"}


# -- trainers ---------------------------------------------------------------------------------------------------------


def test_the_trainer_of_transformers_is_watched_with_one_line(tmp_path):
    torch.manual_seed(0)
    config = GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=32, n_positions=16, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config)
    rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)} for _ in range(8)]
    arguments = TrainingArguments(
        str(tmp_path), max_steps=4, per_device_train_batch_size=2, report_to=[], use_cpu=True, disable_tqdm=True
    )
    callback = watching("transformer.h.*", sinks=[th.JsonLines(tmp_path / "run.jsonl")])
    Trainer(model, arguments, train_dataset=rows, callbacks=[callback]).train()
    assert callback.watch.steps == 4
    assert [json.loads(line)["step"] for line in (tmp_path / "run.jsonl").read_text().splitlines()] == [0, 1, 2, 3]
    assert callback.watch.row("transformer.h.0", "gradients")["steps"] == 4
    assert not any("forward" in vars(each) for each in model.modules())


def test_a_lightning_callback_watches_and_passes_on_the_loss():
    """Lightning's own loop is tested with the other libraries; these are the calls that it makes."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    trainer, callback = SimpleNamespace(optimizers=[optimizer]), WatchesTraining((), {"thresholds": {"loss_spike": 2}})
    callback.on_train_start(trainer, model)
    for step in range(20):
        loss = model(torch.ones(2, 4)).square().mean() + 1
        loss = loss * (10 if step == 15 else 1)
        callback.on_before_backward(trainer, model, loss)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    callback.on_train_end(trainer, model)
    assert [(each.kind, each.first) for each in callback.watch.findings] == [("loss spike", 15)]
    assert not callback.watch.is_open
