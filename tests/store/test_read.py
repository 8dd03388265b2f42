import pickle

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import nn
from torch.utils.data import DataLoader

import tenterhook as th
from tenterhook._tensor_bytes import as_bytes
from tenterhook.store import rows_file as shards_file

ROWS, WIDTH = 1000, 6


@pytest.fixture(scope="module")
def data():
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def store(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("store") / "acts"
    th.harvest(nn.Sequential(nn.Identity(), nn.ReLU()), data, "0", "1", to=folder, batch_size=70, shard_rows=140)
    return th.open(folder)


@pytest.mark.parametrize(
    "index", [slice(None), slice(3, 9), slice(130, 150), slice(5, 900), slice(-20, None), slice(9, 3)]
)
def test_slices(store, data, index):
    assert torch.equal(store["0"][index], data[index])


def test_steps_numbers_lists_and_masks(store, data):
    assert torch.equal(store["0"][::7], data[::7])
    assert torch.equal(store["0"][900:3:-50], data[torch.tensor(range(900, 3, -50))])
    assert torch.equal(store["0"][141], data[141])
    assert torch.equal(store["0"][-1], data[-1])
    assert torch.equal(store["0"][[5, 999, 5, -3]], data[[5, 999, 5, -3]])
    assert torch.equal(store["0"][np.array([7, 8])], data[[7, 8]])
    assert torch.equal(store["0"][data[:, 0] > 1], data[data[:, 0] > 1])
    assert store["0"][[]].shape == (0, WIDTH)
    for beyond in (ROWS, -ROWS - 1, [ROWS]):
        with pytest.raises(IndexError):
            store["0"][beyond]


def test_rows_of_all_columns_belong_together(store, data):
    rows = store[[3, 500, 140]]
    assert set(rows) == {"0", "1", "sample"}
    assert rows["sample"].tolist() == [3, 500, 140]
    assert torch.equal(rows["1"], data[[3, 500, 140]].relu())


def test_a_slice_within_a_shard_is_mapped_not_copied(store):
    assert store["0"][10:20].data_ptr() == store["0"][:139][10:].data_ptr()
    assert store["0"][10:20].untyped_storage().data_ptr() == store["0"][100:120].untyped_storage().data_ptr()


def test_writing_to_what_was_read_does_not_reach_the_file(store, data):
    fresh = th.open(store.place)
    fresh["0"][0:5].zero_()
    assert torch.equal(th.open(store.place)["0"][0:5], data[0:5])


def test_samples_are_drawn_without_putting_back(store, data):
    drawn = store["sample"].sample(300, seed=1)
    assert len(set(drawn.tolist())) == 300
    assert torch.equal(store["0"].sample(300, seed=1), data[drawn])
    assert len(store["0"].sample(10**6)) == ROWS


def test_numpy(store, data):
    assert np.array_equal(np.asarray(store["0"]), data.numpy())
    assert store["0"].numpy().dtype == np.float32


def test_bfloat16_reads_as_it_is_and_as_float32_in_numpy(tmp_path):
    rows = torch.randn(20, 4).bfloat16()
    th.harvest(nn.Identity(), rows, ":return", to=tmp_path)
    store = th.open(tmp_path)
    assert torch.equal(store[":return"][3:], rows[3:])
    assert np.array_equal(store[":return"].numpy(), rows.float().numpy())


def test_an_unknown_name_is_reported_with_the_nearest(store):
    with pytest.raises(th.NotRecorded, match="Did you mean sample"):
        store["sampel"]


def test_it_draws_itself(store):
    assert "1.0k rows in 8 shards, complete" in repr(store)
    assert "<'0': 1,000 rows of [6]" in repr(store["0"])
    assert "<table" in store._repr_html_()


def test_a_directory_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(th.StoreError, match=r"there is no directory .*nowhere"):
        th.open(tmp_path / "nowhere")
    with pytest.raises(th.StoreError, match=r"has no manifest\.json"):
        th.open(tmp_path)


def test_a_store_is_a_data_set_that_workers_can_open(store, data):
    again = pickle.loads(pickle.dumps(store))
    assert torch.equal(again["0"][:], data)
    batch = next(iter(DataLoader(store["0"], batch_size=10, num_workers=1)))
    assert torch.equal(batch, data[:10])


def test_blocks_are_compared_once_and_only_those_that_are_read(tmp_path, monkeypatch, data):
    for room in ("tenterhook.store.rows_file", "tenterhook.store.read"):
        monkeypatch.setattr(f"{room}.BLOCK", 1000)
    th.harvest(nn.Identity(), data, ":return", to=tmp_path)
    store = th.open(tmp_path)
    file = tmp_path / "shards/00000000/_return.safetensors"
    with safe_open(file, "pt") as opened:
        assert torch.equal(opened.get_tensor(":return"), data)
    raw = bytearray(file.read_bytes())
    raw[4096 + 20_500] ^= 1  # in block 20: rows 833 to 874
    file.write_bytes(raw)
    assert torch.equal(store[":return"][:830], data[:830])
    assert torch.equal(store[":return"][[3, 900]], data[[3, 900]])
    for index in (850, slice(820, 860), [850], slice(870, 880)):
        with pytest.raises(th.StoreError, match="bytes from 24,096 on"):
            store[":return"][index]
    th.open(tmp_path, check=False)[":return"][850]


def test_a_file_of_rows_takes_pieces_of_any_size(tmp_path, data):
    file = shards_file.RowsFile(tmp_path / "a", shards_file.Rows("x", torch.float32, (WIDTH,)))
    for part in data.split([1, 0, 299, 700]):
        file.write(as_bytes(part))
    record = file.finish()
    assert record["rows"] == ROWS
    assert record["bytes"] == (tmp_path / "a").stat().st_size
    with safe_open(tmp_path / "a", "pt") as opened:
        assert torch.equal(opened.get_tensor("x"), data)


def test_a_long_name_has_room_in_the_header(tmp_path):
    name = "layer." * 1000 + "x"
    file = shards_file.RowsFile(tmp_path / "a", shards_file.Rows(name, torch.uint8, ()))
    file.write(as_bytes(torch.arange(5, dtype=torch.uint8)))
    assert file.finish()["head"] == 8192
    with safe_open(tmp_path / "a", "pt") as opened:
        assert opened.get_tensor(name).tolist() == [0, 1, 2, 3, 4]


# -- the loader -------------------------------------------------------------------------------------------------------


def order(loader):
    return torch.cat([batch["sample"] for batch in loader])


@pytest.fixture
def make(store, monkeypatch):
    monkeypatch.setattr("tenterhook.store.loader.CHUNK", 500)

    def loader(*points, batch_size=32, buffer_rows=200, **options):
        return store.loader(*(points or ("0", "sample")), batch_size=batch_size, buffer_rows=buffer_rows, **options)

    return loader


def test_an_epoch_has_every_row_once_and_columns_stay_together(make, data):
    loader = make()
    batches = list(loader)
    assert len(batches) == len(loader) == 32
    seen = torch.cat([batch["sample"] for batch in batches])
    assert sorted(seen.tolist()) == list(range(ROWS))
    assert torch.equal(torch.cat([batch["0"] for batch in batches]), data[seen])
    assert (seen.diff() == 1).float().mean() < 0.1


def test_a_loader_prints_its_points_and_batches(make):
    assert repr(make()) == "<loader of '0', 'sample': 32 batches of 32 rows, shuffled, seed 0>"
    assert "in the order of the store" in repr(make(shuffle=False))


def test_epochs_differ_and_a_seed_repeats_them(make):
    loader = make(seed=5)
    first, second = order(loader), order(loader)
    assert not torch.equal(first, second)
    again = make(seed=5)
    assert torch.equal(order(again), first)
    assert torch.equal(order(again), second)
    assert not torch.equal(order(make(seed=6)), first)


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_the_order_does_not_depend_on_the_workers(make, workers):
    assert torch.equal(order(make(workers=workers)), order(make(workers=1)))


@pytest.mark.parametrize("stop_at", [0, 1, 6, 7, 31])
def test_it_goes_on_where_another_stood(make, stop_at):
    loader = make(workers=2)
    list(loader)
    whole = [batch["sample"] for batch in make_after(make)]
    running = iter(loader)
    for _ in range(stop_at):
        next(running)
    state = loader.state_dict()
    running.close()
    other = make()
    other.load_state_dict(state)
    rest = [batch["sample"] for batch in other]
    assert len(rest) == 32 - stop_at
    assert all(map(torch.equal, rest, whole[stop_at:]))
    assert torch.equal(order(other), order(loader))  # and the epoch after that


def make_after(make):
    """A loader of which one epoch has passed."""
    loader = make()
    list(loader)
    return loader


def test_a_state_of_another_loader_is_refused(make):
    state = make(seed=1).state_dict()
    with pytest.raises(th.StoreError, match="seed: 1, not 2"):
        make(seed=2).load_state_dict(state)


def test_without_shuffling_the_order_is_that_of_the_store(make, data):
    assert torch.equal(torch.cat(list(make("0", shuffle=False))), data)


def test_a_last_batch_that_is_not_full_can_be_left_out(make):
    loader = make("0", drop_last=True)
    assert {len(batch) for batch in loader} == {32}
    assert len(loader) == 31


def test_processes_share_the_rows(make):
    parts = [order(make(rank=rank, world=3)) for rank in range(3)]
    assert sorted(torch.cat(parts).tolist()) == list(range(ROWS))
    assert {len(part) for part in parts} <= {333, 334}
    with pytest.raises(ValueError, match="rank="):
        make(rank=3, world=3)


def test_breaking_off_leaves_no_thread(make):
    import threading

    for _ in range(5):
        for _batch in make(workers=2):
            break
    import gc

    gc.collect()
    assert not [
        thread
        for thread in threading.enumerate()
        if thread.name.startswith("tenterhook") and thread.name != "tenterhook-probe"
    ]
