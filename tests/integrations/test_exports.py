"""Rows in the formats of others, read back by others."""

import json
import sys

import pyarrow.parquet
import pytest
import torch
from torch import nn

import tenterhook as th
from tenterhook.integrations.parquet import to_parquet
from tenterhook.integrations.zarr import to_zarr


@pytest.fixture
def store(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Unflatten(1, (2, 3)), nn.Flatten(), nn.Linear(6, 2)).bfloat16()
    points = ("0", "1")
    th.harvest(
        model, torch.randn(50, 4).bfloat16(), *points, to=tmp_path / "acts", batch_size=5, shard_rows=20,
        grad=lambda output, _: output.float().square().sum(),
    )  # fmt: skip
    return th.open(tmp_path / "acts")


def test_parquet_has_every_row_and_every_column(store, tmp_path):
    files = to_parquet(store, tmp_path / "parquet")
    assert [file.name for file in files] == ["00000000.parquet", "00000001.parquet", "00000002.parquet"]
    table = pyarrow.parquet.read_table(tmp_path / "parquet")
    assert set(table.column_names) == {"0", "1", "0.grad", "1.grad", "sample"}
    assert table["sample"].to_pylist() == list(range(50))
    assert torch.equal(torch.tensor(table["0"].to_pylist()), store["0"][:].float())
    assert torch.equal(torch.tensor(table["1.grad"].to_pylist()), store.grad["1"][:].float().flatten(1))
    assert json.loads(table.schema.metadata[b"tenterhook.shapes"])["1"] == [2, 3]


def test_parquet_that_was_broken_off_goes_on(store, tmp_path):
    files = to_parquet(store, tmp_path / "parquet")
    before = files[0].stat().st_mtime_ns
    files[1].unlink()
    to_parquet(store, tmp_path / "parquet")
    assert files[0].stat().st_mtime_ns == before
    assert pyarrow.parquet.read_table(tmp_path / "parquet").num_rows == 50


def test_zarr_keeps_types_and_shapes(store, tmp_path):
    import tensorstore

    folder = to_zarr(store, tmp_path / "zarr")
    assert json.loads((folder / "zarr.json").read_text())["attributes"]["points"] == ["0", "1"]

    def array(name):
        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(folder / name)}}
        return tensorstore.open(spec).result().read().result()

    assert array("0").dtype.name == "bfloat16"
    assert torch.equal(torch.from_numpy(array("1").astype("float32")), store["1"][:].float())
    assert torch.equal(torch.from_numpy(array("0.grad").astype("float32")), store.grad["0"][:].float())
    assert array("sample").tolist() == list(range(50))


def test_zarr_is_there_whole_or_not_at_all(store, tmp_path):
    shard = store.place.root / "shards/00000002/1.safetensors"
    shard.write_bytes(b"\0" * shard.stat().st_size)
    with pytest.raises(th.StoreError):
        to_zarr(th.open(store.place.root), tmp_path / "zarr")
    assert [file.name for file in tmp_path.iterdir()] == ["acts"]
    (tmp_path / "zarr").mkdir()
    with pytest.raises(th.StoreError, match="already exists"):
        to_zarr(store, tmp_path / "zarr")


def test_fp8_becomes_what_holds_it_exactly(tmp_path):
    import tensorstore

    model, rows = nn.Identity(), torch.randn(8, 4)
    th.harvest(model, rows, ":return", to=tmp_path / "acts", dtype=torch.float8_e4m3fn)
    store, expected = th.open(tmp_path / "acts"), rows.to(torch.float8_e4m3fn).float()
    to_parquet(store, tmp_path / "parquet")
    table = pyarrow.parquet.read_table(tmp_path / "parquet")
    assert torch.equal(torch.tensor(table[":return"].to_pylist()), expected)
    folder = to_zarr(store, tmp_path / "zarr")
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(folder / store.columns[0].file)}}
    assert torch.equal(torch.from_numpy(tensorstore.open(spec).result().read().result()), expected)


@pytest.mark.parametrize(("name", "export"), [("pyarrow", to_parquet), ("tensorstore", to_zarr)])
def test_a_package_that_is_missing_is_reported_with_how_to_get_it(store, tmp_path, monkeypatch, name, export):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ModuleNotFoundError, match="pip install"):
        export(store, tmp_path / "out")
