"""Models and data of other libraries: what accelerate has dispatched, and data sets of Hugging Face."""

import accelerate
import pytest
import torch
from torch import nn

import tenterhook as th
from tenterhook.harvest.verify import verify

x = torch.randn(40, 4, generator=torch.Generator().manual_seed(2))


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 3)).eval()


@pytest.mark.parametrize(
    "places",
    [{"0": "cpu", "1": "cpu", "2": "disk", "3": "cpu"}, {"0": "disk", "1": "cpu", "2": "cpu", "3": "disk"}],
    ids=["inside", "first and last"],
)
def test_a_dispatched_model_gives_the_rows_that_it_gives_whole(tmp_path, places):
    offloaded = accelerate.dispatch_model(
        net(), places, main_device="cpu", offload_dir=tmp_path / "weights", force_hooks=True
    )
    assert any(parameter.is_meta for parameter in offloaded.parameters())
    options = {"batch_size": 8, "shard_rows": 16, "stop": False}
    th.harvest(offloaded, x, "0", "2.0", "3", to=tmp_path / "acts", **options)
    model, store = net(), th.open(tmp_path / "acts")
    for stop, address in ((1, "0"), (4, "3")):
        assert torch.equal(store[address][:], torch.cat([model[:stop](part) for part in x.split(8)]))
    assert torch.equal(store["2.0"][:], torch.cat([model[2][0](model[:2](part)) for part in x.split(8)]))
    assert verify(tmp_path / "acts").complete
    again = th.harvest(offloaded, x, "0", "2.0", "3", to=tmp_path / "acts", **options)
    assert (again.made, again.found) == (0, 3)


def test_a_model_of_transformers_on_a_device_map_gives_the_same_rows(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_embd=16, n_head=2, n_positions=16, vocab_size=50, use_cache=False)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "model")
    ids = torch.randint(50, (6, 8), generator=torch.Generator().manual_seed(3))
    kept = []
    for places in (None, {"": "cpu"}):
        model = GPT2LMHeadModel.from_pretrained(tmp_path / "model", device_map=places).eval()
        th.harvest(model, ids, "transformer.h.1", to=tmp_path / f"{places}", rows="token", batch_size=2)
        kept.append(th.open(tmp_path / f"{places}")["transformer.h.1"][:])
    assert torch.equal(*kept)


@pytest.mark.slow  # It takes seconds to import datasets.
def test_a_data_set_of_hugging_face_gives_its_columns_and_is_reported_from_another(tmp_path):
    import datasets
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(n_layer=1, n_embd=16, n_head=2, n_positions=16, vocab_size=50, use_cache=False)
    model = GPT2LMHeadModel(config).eval()
    rows = [[5, 6, 7], [8], [9, 10], [11], [12, 13, 14, 15]]
    data = datasets.Dataset.from_dict({"input_ids": rows, "text": ["…"] * 5})
    th.harvest(model, data, "transformer.h.0", to=tmp_path / "acts", rows="token", batch_size=2)
    store = th.open(tmp_path / "acts")
    assert store["token"][:].tolist() == [token for row in rows for token in row]
    assert store["sample"][:].tolist() == [0, 0, 0, 1, 2, 2, 3, 4, 4, 4, 4]
    tensors = data.remove_columns("text").select([0]).with_format("torch")
    th.harvest(model, tensors, "transformer.h.0", to=tmp_path / "tensors", rows="token")
    assert torch.allclose(th.open(tmp_path / "tensors")["transformer.h.0"][:], store["transformer.h.0"][:3], atol=1e-6)
    with pytest.raises(th.DifferentHarvest, match="fingerprint"):
        th.harvest(model, data.select(range(4)), "transformer.h.0", to=tmp_path / "acts", rows="token", batch_size=2)
