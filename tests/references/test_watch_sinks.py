"""Sinks and callbacks of a watch with the real libraries, without a network."""

import pytest
import torch
from torch import nn

import tenterhook as th

pytestmark = [pytest.mark.references, pytest.mark.filterwarnings("ignore")]


def train(*sinks):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with th.watch(model, optimizer=optimizer, sinks=sinks) as watch:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(16, 4)).square().mean().backward()
            optimizer.step()
    return [page.column("norm", "values")["2"] for page in watch.pages]


def test_wandb_writes_a_run_offline(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    from tenterhook.integrations.wandb import WandbSink

    monkeypatch.setenv("WANDB_SILENT", "true")
    run = wandb.init(mode="offline", dir=tmp_path, project="tenterhook")
    norms = train(WandbSink())
    assert run.summary["tenterhook/values/2/norm"] == pytest.approx(norms[-1])
    assert run.summary["tenterhook/step"] == 2
    run.finish()
    assert len(list(tmp_path.rglob("*.wandb"))) == 1


def test_mlflow_has_the_history_of_each_metric(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # Its database needs more packages.
    mlflow = pytest.importorskip("mlflow")
    from tenterhook.integrations.mlflow import MLflowSink

    mlflow.set_tracking_uri(f"file:{tmp_path}")
    mlflow.set_experiment("tenterhook")
    with mlflow.start_run() as run:
        norms = train(MLflowSink())
    found = mlflow.MlflowClient().get_metric_history(run.info.run_id, "values/2/norm")
    assert [(each.step, each.value) for each in found] == list(enumerate(norms))


def test_opentelemetry_collects_the_gauges():
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    from tenterhook.integrations.opentelemetry import OpenTelemetrySink

    reader = InMemoryMetricReader()
    meter = MeterProvider([reader]).get_meter("test")
    norms = train(OpenTelemetrySink(meter))
    metrics = reader.get_metrics_data().resource_metrics[0].scope_metrics[0].metrics
    points = {
        (metric.name, point.attributes.get("kind"), point.attributes.get("address")): point.value
        for metric in metrics
        for point in metric.data.data_points
    }
    assert points["tenterhook.norm", "values", "2"] == norms[-1]
    assert points["tenterhook.step", None, None] == 2


def test_lightning_is_watched_with_one_line(tmp_path):
    lightning = pytest.importorskip("pytorch_lightning")
    from tenterhook.integrations.lightning import watching

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 1)

        def training_step(self, batch, _index):
            return self.fc(batch).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    callback = watching()
    trainer = lightning.Trainer(
        max_steps=5, callbacks=[callback], logger=False, enable_checkpointing=False, enable_progress_bar=False,
        default_root_dir=tmp_path, accelerator="cpu",
    )  # fmt: skip
    trainer.fit(Module(), torch.utils.data.DataLoader(torch.randn(64, 4), batch_size=4))
    assert callback.watch.steps == 5
    assert callback.watch.row("fc", "gradients")["steps"] == 5
    assert not callback.watch.is_open
