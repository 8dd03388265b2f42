import json
import threading
import time

import numpy as np
import pytest
import torch
import xxhash
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel

import tenterhook as th
from tenterhook.harvest.weights_digest import weights_of
from tenterhook.store.place import Directory


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).eval()


def gpt2(layers=3):
    torch.manual_seed(0)
    config = GPT2Config(n_layer=layers, n_embd=32, n_head=2, n_positions=32, vocab_size=100, use_cache=False)
    return GPT2LMHeadModel(config).eval()


def texts(count=10, width=12):
    """Token ids with lengths of their own, padded on the right."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, width + 1, (count,), generator=generator)
    ids = torch.randint(1, 100, (count, width), generator=generator)
    mask = torch.arange(width) < lengths[:, None]
    return ids * mask, mask.long(), lengths


def batched(ids, mask, size=4):
    pairs = zip(ids.split(size), mask.split(size), strict=True)
    return [{"input_ids": some, "attention_mask": ones} for some, ones in pairs]


x = torch.randn(50, 4, generator=torch.Generator().manual_seed(2))


# -- values -----------------------------------------------------------------------------------------------------------


def test_what_is_stored_is_what_a_recording_shows(tmp_path):
    model = net()
    th.harvest(model, x, "1", to=tmp_path, batch_size=8, shard_rows=20)
    with th.record(model, "1") as tape:
        for part in x.split(8):  # A product of other sizes may round differently.
            model(part)
    store = th.open(tmp_path)
    assert store.complete
    assert len(store) == 50
    assert torch.equal(store["1"][:], torch.cat(tape.calls("1")))
    assert store["sample"][:].tolist() == list(range(50))


def test_several_points_and_globs_stand_beside_each_other(tmp_path):
    model = net()
    th.harvest(model, list(x.split(7)), "*", "2:in", to=tmp_path)
    store = th.open(tmp_path)
    assert store.points == ("0", "1", "2", "2:in")
    assert torch.equal(store["2"][:], torch.cat([model(part) for part in x.split(7)]))
    row = store[11]
    assert torch.equal(row["1"], row["0"].relu())
    assert torch.equal(row["2:in"], row["1"])


def test_the_manifest_says_what_was_harvested_and_a_commit_what_a_shard_is(tmp_path):
    model, batches = net(), list(x.split(10))
    th.harvest(model, batches, "0", "1", to=tmp_path, shard_rows=20, dtype=torch.float16)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert (manifest["format"], manifest["format_version"]) == ("tenterhook.rows", 2)
    assert manifest["harvest"]["model"]["class"] == "torch.nn.modules.container.Sequential"
    assert manifest["harvest"]["model"]["weights"] == weights_of(model)
    assert manifest["harvest"]["points"] == ["0", "1"]
    assert [(column["key"], column["dtype"], column["shape"]) for column in manifest["columns"]] == [
        ("0", "F16", [8]), ("1", "F16", [8]), ("sample", "I64", [])
    ]  # fmt: skip
    shards = [{"batches": [k, k + 2], "samples": [10 * k, 10 * k + 20]} for k in range(0, len(batches) - 1, 2)]
    assert manifest["plan"]["shards"][: len(shards)] == shards
    assert manifest["versions"]["torch"] == torch.__version__
    commit = json.loads((tmp_path / "commits/00000001.json").read_text())
    assert (commit["rows"], commit["batches"], commit["samples"]) == (20, [2, 4], [20, 40])
    for name, record in commit["files"].items():
        data = (tmp_path / name).read_bytes()
        assert len(data) == record["bytes"]
        assert record["blocks"] == [xxhash.xxh3_64(data[record["head"] :]).hexdigest()]


@pytest.fixture
def plain_bf16():
    """On some CPUs the bf16 of oneDNN dies."""
    torch.backends.mkldnn.set_flags(False)
    yield
    torch.backends.mkldnn.set_flags(True)


@pytest.mark.usefixtures("plain_bf16")
def test_any_reader_of_safetensors_reads_a_shard(tmp_path):
    model = net().bfloat16()
    th.harvest(model, x.bfloat16(), "1", to=tmp_path, batch_size=50)
    loaded = load_file(tmp_path / "shards/00000000/1.safetensors")["1"]
    assert loaded.dtype == torch.bfloat16
    assert torch.equal(loaded, model[:2](x.bfloat16()))


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2]
)
def test_types_are_kept_and_converted(tmp_path, dtype):
    th.harvest(net(), x, "1", to=tmp_path, dtype=dtype)
    store = th.open(tmp_path)
    assert store["1"].dtype == dtype
    assert torch.equal(store["1"][:].double(), torch.cat([net()[:2](part) for part in x.split(32)]).to(dtype).double())


def test_a_type_that_the_format_lacks_is_reported(tmp_path):
    with pytest.raises(th.HarvestError, match=r"complex128.*cannot store"):
        th.harvest(nn.Identity(), torch.zeros(3, 2, dtype=torch.complex128), ":return", to=tmp_path)


def test_nothing_runs_after_the_last_point(tmp_path):
    model, ran = net(), []
    model[2].register_forward_hook(lambda *_: ran.append(1))
    th.harvest(model, x, "1", to=tmp_path / "a")
    assert not ran
    th.harvest(model, x, "1", to=tmp_path / "b", stop=False)
    assert len(ran) == 2  # Two batches; the first, which tells what a row is, runs once like the other.


def test_the_model_is_left_as_it_was(tmp_path):
    from tenterhook.testing import untouched

    model = net()
    with untouched(model):
        th.harvest(model, x, "1", to=tmp_path)


def test_values_that_are_overwritten_later_are_stored_as_they_were(tmp_path):
    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(4, 4)

        def forward(self, x):
            y = self.first(x)
            return y.mul_(0)

    torch.manual_seed(0)
    model = Late()
    th.harvest(model, x, "first", to=tmp_path, stop=False, batch_size=10)
    assert torch.equal(th.open(tmp_path)["first"][:10], model.first(x[:10]))


def test_a_model_that_uses_its_memory_again_is_noticed(tmp_path, monkeypatch):
    hidden = [torch.Tensor.copy_]  # so that nothing in its source tells

    class Static(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("out", torch.zeros(10, 4))

        def forward(self, x):
            return hidden[0](self.out, x)

    # A slow disk: the next batch overwrites the memory of the one before, which is still to be written.
    from tenterhook.store.rows_file import RowsFile

    plain = RowsFile.write
    monkeypatch.setattr(RowsFile, "write", lambda file, data: (time.sleep(0.05), plain(file, data))[1])
    with pytest.raises(th.ValueChanged, match='copy="always"'):
        th.harvest(Static(), x, ":return", to=tmp_path / "a", batch_size=10)
    th.harvest(Static(), x, ":return", to=tmp_path / "b", batch_size=10, copy="always")
    assert torch.equal(th.open(tmp_path / "b")[":return"][:], x)


def test_gradients_are_stored_beside_the_values(tmp_path):
    model = gpt2(2)
    ids, mask, _ = texts()
    batches = [{**batch, "labels": batch["input_ids"]} for batch in batched(ids, mask)]
    th.harvest(model, batches, "transformer.h.0", to=tmp_path, rows="token", grad=lambda out, batch: out.loss)
    store = th.open(tmp_path)
    values, grads = [], []
    for batch in batches:
        with th.record(model, "transformer.h.0", grad=True) as tape:
            tape.backward(model(**batch).loss)
        keep = batch["attention_mask"].bool()
        values.append(tape["transformer.h.0"][keep])
        grads.append(tape.grad["transformer.h.0"][keep])
    assert torch.equal(store["transformer.h.0"][:], torch.cat(values))
    assert torch.equal(store.grad["transformer.h.0"][:], torch.cat(grads))
    assert all(parameter.grad is None for parameter in model.parameters())


# -- rows -------------------------------------------------------------------------------------------------------------


def test_tokens_are_stored_without_padding_each_with_its_place(tmp_path):
    model = gpt2()
    ids, mask, lengths = texts()
    th.harvest(model, batched(ids, mask), "transformer.h.1", to=tmp_path, rows="token", shard_rows=30)
    store = th.open(tmp_path)
    assert len(store) == int(lengths.sum())
    places = [(sample, position) for sample, length in enumerate(lengths) for position in range(length)]
    assert list(zip(store["sample"][:].tolist(), store["position"][:].tolist(), strict=True)) == places
    assert store["token"][:].tolist() == [int(ids[sample, position]) for sample, position in places]
    # The truth: each text alone, without padding.
    for sample in (0, 3, 9):
        with th.record(model, "transformer.h.1") as tape, torch.no_grad():
            model(ids[sample : sample + 1, : lengths[sample]])
        mine = store["transformer.h.1"][store["sample"][:] == sample]
        assert torch.allclose(mine, tape["transformer.h.1"][0], atol=1e-5)


@pytest.mark.parametrize("how", ["last", "mean", "max"])
def test_a_reduction_is_over_the_tokens_that_count(tmp_path, how):
    model = gpt2()
    ids, mask, lengths = texts()
    th.harvest(model, batched(ids, mask), "transformer.h.1", to=tmp_path, reduce=how)
    got = th.open(tmp_path)["transformer.h.1"][:]
    for sample, length in enumerate(lengths):
        with th.record(model, "transformer.h.1") as tape, torch.no_grad():
            model(ids[sample : sample + 1, :length])
        alone = tape["transformer.h.1"][0]
        expected = {"last": alone[-1], "mean": alone.mean(0), "max": alone.amax(0)}[how]
        assert torch.allclose(got[sample], expected, atol=1e-5)


def test_a_function_and_a_projection(tmp_path):
    model, matrix = net(), torch.randn(8, 2)
    th.harvest(model, x, "1", to=tmp_path, reduce=lambda value, mask: value * 2, project=matrix, batch_size=50)
    assert torch.equal(th.open(tmp_path)["1"][:], model[:2](x) * 2 @ matrix)


def test_a_mask_can_be_a_function_and_positions_come_from_the_batch(tmp_path):
    model = gpt2(1)
    ids, _, _ = texts()
    batches = [{"input_ids": part, "position_ids": torch.arange(12).expand(len(part), 12) + 3} for part in ids.split(5)]
    th.harvest(model, batches, "transformer.h.0", to=tmp_path, rows="token", mask=lambda b: b["input_ids"] > 50)
    store = th.open(tmp_path)
    assert len(store) == int((ids > 50).sum())
    assert store["position"][:].tolist() == ((ids > 50).nonzero()[:, 1] + 3).tolist()


def test_rows_of_images_are_whole_maps(tmp_path):
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(inplace=True))
    images = torch.randn(9, 1, 6, 6)
    th.harvest(model, images, "0", to=tmp_path, batch_size=4)
    store = th.open(tmp_path)
    assert store["0"].shape == (9, 2, 4, 4)
    assert torch.allclose(store["0"][:], model[0](images), atol=1e-6)


# -- data -------------------------------------------------------------------------------------------------------------


class Endless:
    """An iterable without a length, which begins anew each time."""

    def __iter__(self):
        return (part for part in x.split(7))


def sources(tmp_path):
    np.save(tmp_path / "x.npy", x.numpy())
    return {
        "list": list(x.split(7)),
        "tensor": x,
        "array": x.numpy(),
        "tuples": [(part,) for part in x.split(7)],
        "dicts": [{"input": part} for part in x.split(7)],
        "loader": DataLoader(TensorDataset(x), batch_size=7),
        "dataset": TensorDataset(x),
        "generator": (part for part in x.split(7)),
        "iterable": Endless(),
        ".npy": tmp_path / "x.npy",
    }


@pytest.mark.parametrize("kind", range(10))
def test_data_of_every_kind_gives_the_same_rows(tmp_path, kind):
    name, data = list(sources(tmp_path).items())[kind]
    done = th.harvest(net(), data, "1", to=tmp_path / "out", batch_size=7, shard_rows=14)
    store = th.open(tmp_path / "out")
    assert store.complete
    assert done.rows == len(store) == 50
    assert torch.equal(store["1"][:], torch.cat([net()[:2](part) for part in x.split(7)]))
    assert store["sample"][:].tolist() == list(range(50))
    assert th.harvest(net(), sources(tmp_path)[name], "1", to=tmp_path / "out", batch_size=7).made == 0


def test_safetensors_and_parquet_and_text(tmp_path):
    import pyarrow as pa
    from pyarrow import parquet
    from safetensors.torch import save_file

    ids, mask, lengths = texts()
    model = gpt2(1)
    save_file({"input_ids": ids, "attention_mask": mask}, tmp_path / "a.safetensors")
    ragged = [row[:n].tolist() for row, n in zip(ids, lengths, strict=True)]
    parquet.write_table(pa.table({"input_ids": ragged}), tmp_path / "b.parquet")
    (tmp_path / "c.txt").write_text("\n\n".join(" ".join(map(str, row)) for row in ragged))

    def tokenizer(lines, **_):
        parts = [torch.tensor([int(word) for word in line.split()]) for line in lines]
        ids = nn.utils.rnn.pad_sequence(parts, batch_first=True)
        ones = [torch.ones(len(part), dtype=torch.long) for part in parts]
        return {"input_ids": ids, "attention_mask": nn.utils.rnn.pad_sequence(ones, batch_first=True)}

    stores = []
    for file in ("a.safetensors", "b.parquet", "c.txt"):
        done = th.harvest(
            model, tmp_path / file, "transformer.h.0", to=tmp_path / f"of-{file}", rows="token", batch_size=3,
            tokenizer=tokenizer,
        )  # fmt: skip
        stores.append(done.open())
    for store in stores:
        assert store["token"][:].tolist() == ids[mask.bool()].tolist()
        assert torch.allclose(store["transformer.h.0"][:], stores[0]["transformer.h.0"][:], atol=1e-5)
    with pytest.raises(th.HarvestError, match="tokenizer="):
        th.harvest(model, tmp_path / "c.txt", "transformer.h.0", to=tmp_path / "d")
    with pytest.raises(th.HarvestError, match="no file"):
        th.harvest(model, "nowhere.npy", "transformer.h.0", to=tmp_path / "d")


def test_a_data_set_of_columns_is_padded_and_masked(tmp_path):
    """As datasets.Dataset is: slices are dicts of lists, and a fingerprint tells it from others."""

    class Columns:
        column_names = ("input_ids", "text")
        _fingerprint = "abc"
        rows = ([5, 6, 7], [8], [9, 10], [11])

        def __len__(self):
            return 4

        def __getitem__(self, part):
            return {"input_ids": list(self.rows[part]), "text": ["…"] * len(self.rows[part])}

    th.harvest(gpt2(1), Columns(), "transformer.h.0", to=tmp_path, rows="token", batch_size=2)
    store = th.open(tmp_path)
    assert store["token"][:].tolist() == [5, 6, 7, 8, 9, 10, 11]
    assert store["position"][:].tolist() == [0, 1, 2, 0, 0, 1, 0]
    assert store.manifest["harvest"]["data"]["fingerprint"] == "abc, 4 by 2"


# -- going on ---------------------------------------------------------------------------------------------------------


def commits(path):
    return sorted(file.name for file in (path / "commits").iterdir())


class Breaks(nn.Module):
    """Fails at its seventh call, if it is told to by what is no part of a model's identity."""

    def __init__(self, model, breaks):
        super().__init__()
        self.model, self.breaks, self.calls = model, threading.Event(), 0
        if breaks:
            self.breaks.set()

    def forward(self, x):
        self.calls += 1
        if self.calls == 7 and self.breaks.is_set():
            raise RuntimeError("the model broke")
        return self.model(x)


@pytest.mark.parametrize("data", [list(x.split(5)), Endless()], ids=["anywhere", "stream"])
def test_a_harvest_goes_on_where_the_commits_stop_and_makes_nothing_twice(tmp_path, data):
    with pytest.raises(RuntimeError, match="broke"):
        th.harvest(Breaks(net(), breaks=True), data, "model.1", to=tmp_path / "a", shard_rows=14)
    there = {file: (tmp_path / "a/commits" / file).stat().st_mtime_ns for file in commits(tmp_path / "a")}
    assert there
    assert not th.open(tmp_path / "a").complete
    again = Breaks(net(), breaks=False)
    done = th.harvest(again, data, "model.1", to=tmp_path / "a")
    assert done.found == len(there)
    assert done.rows == 50 - len(there) * (14 if isinstance(data, Endless) else 15)
    th.harvest(Breaks(net(), breaks=False), data, "model.1", to=tmp_path / "b", shard_rows=14)
    same(tmp_path / "a", tmp_path / "b")
    assert all((tmp_path / "a/commits" / file).stat().st_mtime_ns == when for file, when in there.items())


def same(one, other):
    """Two stores are the same files with the same bytes."""
    names = Directory(one).names("")
    assert names == Directory(other).names("")
    assert len(names) > 4
    for name in names:
        assert (one / name).read_bytes() == (other / name).read_bytes(), name


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda: {"model": nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).eval()}, "model.weights"),
        (lambda: {"batches": x + 1}, "data.fingerprint"),
        (lambda: {"batches": x[:40]}, "data.batches: the store has 7, this call has 5"),
        (lambda: {"batch_size": 9}, "data.batches"),
        (lambda: {"points": ("0",)}, "points"),
        (lambda: {"dtype": torch.float16}, "dtype: the store has None, this call has 'float16'"),
        (lambda: {"shard_rows": 3}, "shard_rows"),
        (lambda: {"reduce": lambda value, mask: value}, "reduce"),
        (lambda: {"project": torch.eye(8)}, "project"),
    ],
)
def test_another_harvest_is_refused_with_what_differs(tmp_path, change, said):
    torch.manual_seed(9)
    begun = {"model": net(), "batches": x, "points": ("1",), "batch_size": 8}

    def run(model, batches, points, **rest):
        return th.harvest(model, batches, *points, to=tmp_path, **rest)

    run(**begun)
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    with pytest.raises(th.DifferentHarvest, match=said):
        run(**{**begun, **change()})
    assert before == {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}


def test_a_function_with_other_code_is_another_one(tmp_path):
    th.harvest(net(), x, "1", to=tmp_path, reduce=lambda value, mask: value * 2)
    th.harvest(net(), x, "1", to=tmp_path, reduce=lambda value, mask: value * 2)
    with pytest.raises(th.DifferentHarvest, match="reduce"):
        th.harvest(net(), x, "1", to=tmp_path, reduce=lambda value, mask: value * 3)


def test_a_loader_that_shuffles_is_refused_on_the_second_run(tmp_path):
    loader = DataLoader(TensorDataset(x), batch_size=5, shuffle=True)
    with pytest.raises(RuntimeError, match="broke"):
        th.harvest(Breaks(net(), breaks=True), loader, "model.1", to=tmp_path, shard_rows=10)
    with pytest.raises(th.DifferentHarvest, match="shuffled loader"):
        th.harvest(Breaks(net(), breaks=False), loader, "model.1", to=tmp_path)


def test_a_stream_that_shrank_is_refused(tmp_path):
    class Some:
        def __init__(self, count):
            self.count = count

        def __iter__(self):
            return iter(x.split(5)[: self.count])

    th.harvest(net(), Some(10), "1", to=tmp_path, shard_rows=10)
    for count in (9, 6):
        with pytest.raises(th.DifferentHarvest, match="data"):
            th.harvest(net(), Some(count), "1", to=tmp_path)


def test_a_length_that_lies_is_found_out(tmp_path):
    class Lies:
        def __len__(self):
            return 12

        def __iter__(self):
            return iter(x.split(5))

    with pytest.raises(th.HarvestError, match="ended after 10 batches, but its length is 12"):
        th.harvest(net(), Lies(), "1", to=tmp_path, shard_rows=10)
    assert len(commits(tmp_path)) == 5


# -- bad input --------------------------------------------------------------------------------------------------------


def test_bad_input_is_reported_before_anything_is_written(tmp_path):
    with pytest.raises(th.AddressError, match="nope"):
        th.harvest(net(), x, "nope", to=tmp_path / "a")
    with pytest.raises(th.HarvestError, match="name the points"):
        th.harvest(net(), x, to=tmp_path / "a")
    with pytest.raises(th.HarvestError, match="data is empty"):
        th.harvest(net(), [], "1", to=tmp_path / "a")
    with pytest.raises(ValueError, match="sample"):
        th.harvest(net(), x, "1", to=tmp_path / "a", rows="rows")
    with pytest.raises(ValueError, match="last, mean, max"):
        th.harvest(net(), x, "1", to=tmp_path / "a", reduce="min")
    with pytest.raises(TypeError, match="batches must be"):
        th.harvest(net(), 5, "1", to=tmp_path / "a")
    with pytest.raises(ValueError, match="engine="):
        th.harvest(net(), x, "1", to=tmp_path / "a", engine="dask")
    assert not (tmp_path / "a" / "manifest.json").exists()


def test_a_batch_that_the_model_does_not_take_names_call(tmp_path):
    loader = DataLoader(TensorDataset(x, torch.zeros(50)), batch_size=10)
    with pytest.raises(TypeError) as raised:
        th.harvest(net(), loader, "1", to=tmp_path / "a")
    assert any("call=lambda model, batch" in note for note in raised.value.__notes__)
    th.harvest(net(), loader, "1", to=tmp_path / "b", call=lambda model, batch: model(batch[0]))
    assert len(th.open(tmp_path / "b")) == 50


def test_a_foreign_or_unwritable_directory_is_left_alone(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    with pytest.raises(th.StoreError, match=r"other files \(thesis.tex\)"):
        th.harvest(net(), x, "1", to=tmp_path / "mine")
    (tmp_path / "file").write_text("x")
    with pytest.raises(OSError, match="file"):
        th.harvest(net(), x, "1", to=tmp_path / "file")
    with pytest.raises(OSError, match="proc"):
        th.harvest(net(), x, "1", to="/proc/acts")


def test_rows_that_change_their_shape_are_reported_and_what_was_committed_stays(tmp_path):
    batches = [torch.randn(4, 5, 4)] * 6 + [torch.randn(4, 6, 4)]
    with pytest.raises(th.HarvestError, match=r"changed at batch 6.*\[5, 8\].*\[6, 8\].*rows=\"token\""):
        th.harvest(net(), batches, "1", to=tmp_path, shard_rows=8)
    assert len(th.open(tmp_path)) == 24


def test_a_point_without_rows_is_reported(tmp_path):
    with pytest.raises(th.HarvestError, match="first dimension must be the samples"):
        th.harvest(nn.Sequential(nn.Flatten(0)), x, "0", to=tmp_path / "a")
    ids = torch.ones(2, 3, dtype=torch.long)
    with pytest.raises(th.HarvestError, match="mask is empty"):
        batch = {"input_ids": ids, "attention_mask": ids * 0}
        th.harvest(gpt2(1), [batch], "transformer.h.0", to=tmp_path / "b", rows="token")
    with pytest.raises(th.HarvestError, match=r"\[samples, tokens"):
        th.harvest(net()[0], x[:, :4], ":return", to=tmp_path / "c", reduce="last")


def test_points_with_different_numbers_of_rows_do_not_stand_beside_each_other(tmp_path):
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Identity(), nn.Identity()

        def forward(self, x):
            return self.b(self.a(x)[:, ::2])

    with pytest.raises(th.HarvestError, match="same number of rows"):
        th.harvest(Half(), torch.randn(4, 6, 2), "a", "b", to=tmp_path, rows="token")


def test_dropout_in_training_mode_is_warned_of(tmp_path):
    with pytest.warns(th.TenterhookWarning, match="eval"):
        th.harvest(nn.Sequential(nn.Linear(4, 4), nn.Dropout()), x, "0", to=tmp_path)


def test_two_harvests_into_one_place_are_kept_apart(tmp_path):
    inside, go = threading.Event(), threading.Event()

    class Waits(nn.Module):
        def forward(self, x):
            inside.set()
            go.wait(10)
            return x

    running = threading.Thread(target=th.harvest, args=(Waits(), x, ":return"), kwargs={"to": tmp_path})
    running.start()
    inside.wait(10)
    with pytest.raises(th.StoreError, match="another process is harvesting"):
        th.harvest(Waits(), x, ":return", to=tmp_path)
    go.set()
    running.join()
    assert len(th.open(tmp_path)) == 50


# -- never in the way -------------------------------------------------------------------------------------------------


def test_memory_in_flight_is_bounded_and_reported(tmp_path, monkeypatch):
    from tenterhook.store.rows_file import RowsFile

    plain = RowsFile.write
    monkeypatch.setattr(RowsFile, "write", lambda file, data: (time.sleep(0.002), plain(file, data))[1])
    batches = [torch.randn(64, 512) for _ in range(40)]  # 128 KiB each
    done = th.harvest(nn.Identity(), batches, ":return", to=tmp_path, memory=400_000)
    assert 128 * 1024 < done.peak <= 400_000
    assert "of 0 MiB" in repr(done)
    assert torch.equal(th.open(tmp_path)[":return"][:], torch.cat(batches))


def test_a_bar_shows_rows_bytes_and_what_limits(tmp_path, capsys):
    th.harvest(net(), x, "1", to=tmp_path, progress=True, batch_size=5)
    shown = capsys.readouterr().err
    assert "rows/s" in shown
    assert "GB/s" in shown
    assert "limit:" in shown
    assert "left" in shown
    assert "10/10" in shown
