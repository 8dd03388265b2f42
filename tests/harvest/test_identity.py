"""A harvest goes on only with the model, the code and the data that it was begun with; what differs is named."""

import functools
import json
import os
import random
import subprocess
import sys
import threading
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers import GPT2Config, GPT2Model

import tenterhook as th
from tenterhook.harvest.identity import identify
from tenterhook.harvest.job import Job
from tenterhook.harvest.resume import SAMPLED, _sampled
from tenterhook.harvest.rows import RowRule

x = torch.randn(60, 4, generator=torch.Generator().manual_seed(2))
LIMIT, SCALE = 0.5, 2.0


def run(folder, model, data=x, **options):
    options = {"batch_size": 10, "shard_rows": 20, **options}
    points = options.pop("points", (":return",))
    return th.harvest(model, data, *points, to=folder, **options)


def refused(folder, begun, other, said):
    """Begin one harvest, lose a shard, and go on with another: it is refused, and the first still goes on."""
    run(folder, **begun())
    (folder / "commits/00000001.json").unlink()
    with pytest.raises(th.DifferentHarvest, match=said) as raised:
        run(folder, **other())
    assert run(folder, **begun()).made == 1
    return str(raised.value)


def linear():
    torch.manual_seed(0)
    return nn.Linear(4, 4).eval()


# -- models -----------------------------------------------------------------------------------------------------------


class Act(nn.Module):
    def __init__(self, act=F.relu, **values):
        super().__init__()
        self.first, self.act = linear(), act
        self.register_buffer("shift", torch.full((4,), values.pop("shift", 0.0)), persistent=False)
        self.__dict__.update(values)

    def forward(self, x):
        return self.act(self.first(x)) + self.shift + self.helper()

    def helper(self):
        return 0.0


class Other(Act):
    def helper(self):
        return 1.0


@dataclass
class Settings:
    theta: float = 1.0


def sub(cls, **options):
    return lambda: nn.Sequential(OrderedDict(first=linear(), last=cls(**options))).eval()


MODELS = {
    "another activation": (sub(nn.ReLU), sub(nn.GELU), r"model.modules.last.class: .*ReLU.*GELU"),
    "epsilon": (sub(nn.LayerNorm, normalized_shape=4), sub(nn.LayerNorm, normalized_shape=4, eps=1e-3), "last.eps"),
    "slope": (sub(nn.LeakyReLU), sub(nn.LeakyReLU, negative_slope=0.3), "last.negative_slope: .*0.01.*0.3"),
    "a kind of gelu": (sub(nn.GELU), sub(nn.GELU, approximate="tanh"), "last.approximate: .*'none'.*'tanh'"),
    "a function": (lambda: Act(F.relu), lambda: Act(F.gelu), r"\(root\).act: .*relu.*gelu"),
    "a lambda": (lambda: Act(lambda v: v * 2), lambda: Act(lambda v: v * 3), r"\(root\).act.code"),
    "a partial": (
        lambda: Act(functools.partial(F.elu, alpha=1.0)),
        lambda: Act(functools.partial(F.elu, alpha=2.0)),
        "act.keywords.alpha: .*1.0.*2.0",
    ),
    "a number": (lambda: Act(scale=1), lambda: Act(scale=2), "scale: .*1.*2"),
    "nothing and zero": (lambda: Act(scale=None), lambda: Act(scale=0), "scale"),
    "true and one": (lambda: Act(scale=True), lambda: Act(scale=1), "scale"),
    "in a dict": (lambda: Act(c={"a": {"k": 1}}), lambda: Act(c={"a": {"k": 2}}), "c.a.k"),
    "in a dataclass": (lambda: Act(s=Settings()), lambda: Act(s=Settings(2.0)), "s.theta"),
    "a plain tensor": (lambda: Act(t=torch.zeros(2)), lambda: Act(t=torch.ones(2)), r"\(root\).t"),
    "an array": (lambda: Act(t=torch.zeros(2).numpy()), lambda: Act(t=torch.ones(2).numpy()), r"\(root\).t"),
    "a buffer outside the state dict": (lambda: Act(shift=0.0), lambda: Act(shift=1.0), "buffer shift"),
    "a method": (Act, Other, r"\(root\).class.*Act.*Other"),
    "one module in training mode": (sub(nn.Dropout), lambda: train_last(sub(nn.Dropout)()), "last.training"),
    "a hook": (sub(nn.ReLU), lambda: hooked(sub(nn.ReLU)()), "last.forward_hook 0"),
}


def train_last(model):
    model.last.train()
    return model


def hooked(model):
    model.last.register_forward_hook(lambda module, args, out: out * 2)
    return model


@pytest.mark.parametrize("what", MODELS)
@pytest.mark.filterwarnings("ignore:the model is in training mode")
def test_another_model_with_the_same_weights_is_refused(tmp_path, what):
    one, other, said = MODELS[what]
    refused(tmp_path, lambda: {"model": one()}, lambda: {"model": other()}, said)


def test_a_method_that_forward_calls_is_part_of_the_model(tmp_path):
    def net(add):
        class Same(nn.Module):
            def forward(self, x):
                return self.inner(x)

            def inner(self, x):
                return x + add

            def never_called(self):
                return add

        return Same()

    refused(tmp_path, lambda: {"model": net(1)}, lambda: {"model": net(2)}, r"inner\(\).closure add: .*1.*2")


def test_a_configuration_of_transformers_is_part_of_the_model(tmp_path):
    ids = torch.randint(50, (30, 6), generator=torch.Generator().manual_seed(0))

    def gpt2(**values):
        torch.manual_seed(0)
        config = GPT2Config(n_layer=2, n_embd=8, n_head=2, n_positions=8, vocab_size=50, use_cache=False, **values)
        return {"model": GPT2Model(config).eval(), "data": ids, "points": ("h.1",), "rows": "token"}

    text = refused(tmp_path, gpt2, lambda: gpt2(scale_attn_by_inverse_layer_idx=True), "config.scale_attn_by_inverse")
    assert "h.0.attn" in text  # The attribute of the module that uses it, too.


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:torch.quantize_per")
def test_a_quantized_model_is_known_by_its_packed_weights(tmp_path):
    def packed(seed):
        torch.manual_seed(seed)
        return torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(4, 4)).eval(), {nn.Linear})

    try:
        one, other = packed(0), packed(1)
    except RuntimeError:
        pytest.skip("this build has no quantized linear layer")
    refused(tmp_path, lambda: {"model": one}, lambda: {"model": other}, "model.weights")


@pytest.mark.parametrize("edit", [th.scale, lambda by: lambda value: value * by], ids=["ready", "own"])
def test_an_edit_that_is_open_is_part_of_the_harvest(tmp_path, edit):
    model = nn.Sequential(linear(), nn.ReLU()).eval()

    def edited(by):
        with th.edit(model, {"0": edit(by)}):
            run(tmp_path, model, points=("1",))

    edited(2.0)
    assert torch.allclose(th.open(tmp_path)["1"][:], (model[0](x) * 2).relu(), atol=1e-6)
    (tmp_path / "commits/00000001.json").unlink()
    with pytest.raises(th.DifferentHarvest, match=r"model.edits.0 at 0"):
        run(tmp_path, model, points=("1",))
    with pytest.raises(th.DifferentHarvest, match=r"model.edits.0 at 0.*2.0.*3.0"), th.edit(model, {"0": edit(3.0)}):
        run(tmp_path, model, points=("1",))
    edited(2.0)
    with th.record(model, "0"):  # It changes nothing.
        with pytest.raises(th.DifferentHarvest):
            run(tmp_path, model, points=("1",))
        model(x)


def test_what_a_model_changes_in_itself_as_it_runs_is_no_difference(tmp_path):
    class Counts(nn.Module):
        def __init__(self, scale):
            super().__init__()
            self.calls, self.seen, self.scale = 0, [], scale

        def forward(self, x):
            self.calls += 1
            self.seen.append(x.shape)
            return x * self.scale

    model = Counts(1)
    run(tmp_path, model)
    (tmp_path / "commits/00000001.json").unlink()
    assert run(tmp_path, model).made == 1
    model.scale = 2
    with pytest.raises(th.DifferentHarvest, match="scale"):
        run(tmp_path, model)


def test_where_a_model_came_from_and_where_it_is_do_not_matter(tmp_path):
    class Placed(nn.Module):
        def __init__(self, device):
            super().__init__()
            self.device, self.where, self.lock = device, torch.device(device), threading.Lock()

        def forward(self, x):
            return x

    run(tmp_path, Placed("cpu"))
    assert run(tmp_path, Placed("cuda:1")).made == 0


LAYERS = [
    (nn.ReLU, {}), (nn.GELU, {"approximate": ["none", "tanh"]}), (nn.LeakyReLU, {"negative_slope": [0.01, 0.1, 0.5]}),
    (nn.ELU, {"alpha": [1.0, 0.5]}), (nn.LayerNorm, {"normalized_shape": [4], "eps": [1e-5, 1e-2]}),
    (nn.Hardtanh, {"min_val": [-1.0, -0.1], "max_val": [1.0, 0.2]}), (nn.Softplus, {"beta": [1.0, 3.0]}),
    (nn.Threshold, {"threshold": [0.0, 0.3], "value": [0.0, 1.0]}), (nn.Softmax, {"dim": [0, 1]}),
    (nn.GroupNorm, {"num_groups": [1, 2, 4], "num_channels": [4]}), (nn.Tanh, {}),
    (nn.Softshrink, {"lambd": [0.1, 0.6]}),
]  # fmt: skip


def random_spec(draw):
    chosen = [draw.choice(LAYERS) for _ in range(draw.randrange(1, 6))]
    return [(cls, {name: draw.choice(values) for name, values in options.items()}) for cls, options in chosen]


@pytest.mark.parametrize("seed", range(40))
def test_models_that_compute_something_else_have_another_identity(seed):
    """The outputs are the truth: where they differ, so do the identities; a model that is built again has the same."""
    draw = random.Random(seed)
    spec = random_spec(draw)

    def built(spec):
        return nn.Sequential(linear(), *(cls(**options) for cls, options in spec)).eval()

    def identity(model):
        found = identify(Job(model, (":return",), RowRule()), {})
        return found.tree, found.values

    assert identity(built(spec)) == identity(built(spec))
    other, place = list(spec), draw.randrange(len(spec))
    other[place] = random_spec(draw)[0]
    same = torch.equal(built(spec)(x), built(other)(x))
    assert same or identity(built(spec)) != identity(built(other))


# -- functions --------------------------------------------------------------------------------------------------------


def helped(value):
    return value * SCALE


def made(kind, factor):
    """Functions whose code is the same, and which differ in one value."""

    class Calls:
        def __init__(self):
            self.factor = factor

        def __call__(self, model, batch):
            return model(batch) * self.factor

        def method(self, model, batch):
            return model(batch) * self.factor

    def with_default(model, batch, by=factor):
        return model(batch) * by

    def with_name(model, batch, *, by=factor):
        return model(batch) * by

    def inner(value):
        return value * factor

    return {
        "closure": lambda model, batch: model(batch) * factor,
        "closure of what it calls": lambda model, batch: inner(model(batch)),
        "default": with_default,
        "keyword default": with_name,
        "partial": functools.partial(with_default, by=factor),
        "object": Calls(),
        "bound method": Calls().method,
        "decorated": torch.no_grad()(lambda model, batch: model(batch) * factor),
    }[kind]


KINDS = [
    "closure", "closure of what it calls", "default", "keyword default", "partial", "object", "bound method",
    "decorated",
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_another_value_in_a_function_is_another_harvest(tmp_path, kind):
    def options(factor):
        return {"model": linear(), "call": made(kind, factor)}

    refused(tmp_path, lambda: options(2.0), lambda: options(3.0), r"call[^:]*: the store has 2.0, this call has 3.0")


def test_another_global_is_another_harvest_in_a_function_and_in_what_it_calls(tmp_path, monkeypatch):
    ids = torch.randint(50, (30, 6), generator=torch.Generator().manual_seed(0))
    embedding = nn.Embedding(50, 3)
    options = {
        "model": embedding, "data": ids, "rows": "token", "mask": lambda batch: batch.float() / 50 > LIMIT,
        "reduce": lambda value, mask: helped(value),
    }  # fmt: skip
    run(tmp_path, **options)
    monkeypatch.setitem(globals(), "LIMIT", 0.25)
    with pytest.raises(th.DifferentHarvest, match=r"mask.global LIMIT: the store has 0.5, this call has 0.25"):
        run(tmp_path, **options)
    monkeypatch.setitem(globals(), "LIMIT", 0.5)
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    with pytest.raises(th.DifferentHarvest, match=r"reduce.global helped.global SCALE: the store has 2.0"):
        run(tmp_path, **options)


def test_a_value_in_a_module_of_the_user_is_followed(tmp_path, monkeypatch):
    (tmp_path / "my_settings.py").write_text("scale = 2.0\ndef twice(v):\n    return v * scale\n")
    monkeypatch.syspath_prepend(tmp_path)
    import my_settings

    def call(model, batch):
        import my_settings as mine

        return my_settings.twice(model(batch)) * mine.scale

    options = {"model": linear(), "call": call}
    run(tmp_path / "acts", **options)
    my_settings.scale = 3.0
    with pytest.raises(th.DifferentHarvest) as raised:
        run(tmp_path / "acts", **options)
    assert "global mine.scale: the store has 2.0, this call has 3.0" in str(raised.value)
    assert "global my_settings.twice.global scale" in str(raised.value)


def test_a_table_in_a_closure_is_compared_whole(tmp_path):
    words = {f"word {number}": number for number in range(5000)}

    def options(changed=None):
        vocabulary = dict(reversed({**words, **(changed or {})}.items()))
        return {"model": linear(), "call": lambda model, batch: model(batch) + vocabulary["word 7"]}

    run(tmp_path, **options())
    run(tmp_path, **options())
    with pytest.raises(th.DifferentHarvest, match=r"closure vocabulary: the store has dict of 5000"):
        run(tmp_path, **options({"word 4000": -1}))


def test_a_model_that_a_function_holds_is_part_of_it(tmp_path):
    def options(teacher):
        return {"model": linear(), "call": lambda model, batch: teacher(model(batch))}

    torch.manual_seed(0)
    one, other = nn.Linear(4, 4), nn.Linear(4, 4)
    refused(tmp_path, lambda: options(one), lambda: options(other), "closure teacher.weights")


def test_comments_and_lines_and_docstrings_are_no_difference(tmp_path):
    def options(text):
        space = {}
        exec(text, space)
        return {"model": linear(), "call": space["call"]}

    run(tmp_path, **options("def call(model, batch):\n    return model(batch) * 2\n"))
    again = "\n\ndef call(model, batch):\n    '''Doubles.'''\n    # as it says\n    return model(batch) * 2\n"
    assert run(tmp_path, **options(again)).made == 0
    with pytest.raises(th.DifferentHarvest, match=r"call\.code"):
        run(tmp_path, **options("def call(model, batch):\n    return model(batch) * 3\n"))


# -- what cannot be identified ----------------------------------------------------------------------------------------


def test_what_cannot_be_identified_is_named_and_needs_trust(tmp_path):
    with (tmp_path / "file").open("w+") as file:
        options = {"model": linear(), "call": lambda model, batch: (file.tell(), model(batch))[1]}
        with pytest.raises(th.HarvestError, match=r"call=, closure file: _io.TextIOWrapper[\s\S]*trust=True"):
            run(tmp_path / "acts", **options)
        assert not (tmp_path / "acts/manifest.json").exists()
        run(tmp_path / "acts", **options, trust=True)
        assert run(tmp_path / "acts", **options, trust=True).made == 0
        assert list(json.loads((tmp_path / "acts/manifest.json").read_text())["unknown"]) == ["call=, closure file"]


def test_trust_does_not_cover_what_differs(tmp_path):
    run(tmp_path, Act(scale=1))
    with pytest.raises(th.DifferentHarvest, match="scale"):
        run(tmp_path, Act(scale=2), trust=True)


# -- data -------------------------------------------------------------------------------------------------------------


class Rows(Dataset):
    """A data set that is read row by row, so that nobody can hash it beforehand."""

    def __init__(self, changed=None):
        self.rows, self.read = torch.arange(4000.0).view(1000, 4).clone(), set()
        if changed is not None:
            self.rows[changed] = -1

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        self.read.add(index)
        return self.rows[index]


def test_each_resumed_harvest_compares_other_rows_until_all_were(tmp_path):
    options = {"model": nn.Identity(), "batch_size": 5, "shard_rows": 50}
    run(tmp_path, data=Rows(), **options)
    seen = set()
    for turn in range(-(-200 // SAMPLED)):
        data = Rows()
        run(tmp_path, data=data, **options)
        assert len(data.read) <= (SAMPLED + 2) * 5
        assert turn or max(data.read) - min(data.read) > 900  # over its whole length
        seen |= data.read
    assert seen == set(range(1000))


def test_one_changed_row_of_many_is_found_by_one_of_the_next_harvests(tmp_path):
    options = {"model": nn.Identity(), "batch_size": 5, "shard_rows": 50}
    run(tmp_path, data=Rows(), **options)
    with pytest.raises(th.DifferentHarvest, match="the batches of shard 11 have changed"):
        for _ in range(-(-200 // SAMPLED)):
            run(tmp_path, data=Rows(changed=567), **options)


@pytest.mark.parametrize("count", [1, 2, 15, 16, 17, 100, 1000, 12_345])
def test_the_sample_is_small_and_comes_to_all(count):
    seen, turns = set(), -(-count // SAMPLED)
    for turn in range(turns):
        chosen = _sampled(count, turn)
        assert len(chosen) <= SAMPLED + 2
        assert set(chosen) <= set(range(count))
        seen.update(chosen)
    assert seen == set(range(count))


def test_texts_in_a_batch_are_data_too(tmp_path):
    def options(word):
        batches = [{"rows": part, "text": [word] * len(part)} for part in x.split(10)]
        return {"model": linear(), "data": batches, "call": lambda model, batch: model(batch["rows"])}

    refused(tmp_path, lambda: options("one"), lambda: options("other"), "data.fingerprint")


def test_a_loader_with_workers_is_compared_without_starting_them(tmp_path):
    def loader():
        return DataLoader(Rows(), batch_size=50, num_workers=1, prefetch_factor=2)

    run(tmp_path, nn.Identity(), loader(), shard_rows=100)
    assert run(tmp_path, nn.Identity(), loader(), shard_rows=100).made == 0


def test_another_tokenizer_is_another_harvest(tmp_path):
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    (tmp_path / "lines.txt").write_text("a b c\n" * 30)

    def options(**changed):
        words = Tokenizer(WordLevel({"a": 0, "b": 1, "c": 2, "?": 3, "_": 4, **changed}, unk_token="?"))
        words.pre_tokenizer = Whitespace()
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?", pad_token="_")
        torch.manual_seed(0)
        call = lambda model, batch: model(batch["input_ids"])
        data = tmp_path / "lines.txt"
        return {"model": nn.Embedding(9, 3), "data": data, "tokenizer": tokenizer, "rows": "token", "call": call}

    refused(tmp_path / "acts", options, lambda: options(z=5), "tokenizer.model")


# -- the same everywhere ----------------------------------------------------------------------------------------------

SCRIPT = """
import sys, torch, threading
from torch import nn
import tenterhook as th

NAMES = {"alpha", "beta", "gamma"}

class Net(nn.Module):
    kinds = frozenset({"one", "two", "three"})
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.words = {"x", "y", "z"}
        self.act, self.me = torch.relu, self.helper
        self.obj = object()
    def helper(self): return len(self.kinds)
    def forward(self, x):
        return self.act(self.first(x)) * self.me() if "a" in {"a", "b", "c"} else x

def call(model, batch, extra=NAMES):
    return model(batch) + len([name for name in NAMES if name in {"alpha", "delta"}])

torch.manual_seed(0)
th.harvest(Net().eval(), torch.ones(20, 4), "first", to=sys.argv[1], call=call, batch_size=5)
print(th.harvest(Net().eval() if len(sys.argv) < 3 else None, torch.ones(20, 4), "first", to=sys.argv[1], call=call,
                 batch_size=5).made if len(sys.argv) > 3 else "begun")
"""


def test_the_manifest_is_the_same_in_every_process(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    texts = set()
    for seed in ("0", "1", "2"):
        folder = tmp_path / f"acts{seed}"
        env = os.environ | {"PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1"}
        subprocess.run([sys.executable, str(script), str(folder)], env=env, check=True)
        texts.add((folder / "manifest.json").read_text())
    assert len(texts) == 1
    assert "0x" not in texts.pop()


def test_a_store_of_the_older_format_is_read_and_goes_on_only_with_trust(tmp_path, monkeypatch):
    from tenterhook.store import format as shards

    model = linear()
    run(tmp_path, model)
    expected = th.open(tmp_path)[":return"][:]
    monkeypatch.setattr(shards, "FORMAT_VERSION", 1)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    for key in ("values", "changes", "unknown", "format", "format_version", "tenterhook", "checksum"):
        manifest.pop(key)
    manifest["harvest"]["model"] = {key: manifest["harvest"]["model"][key] for key in ("class", "weights", "training")}
    (tmp_path / "manifest.json").write_bytes(shards.pack(manifest))
    for file in Path(tmp_path / "commits").iterdir():
        commit = json.loads(file.read_text())
        commit["data"].pop("each")
        file.write_bytes(
            shards.pack({key: commit[key] for key in ("shard", "batches", "samples", "rows", "data", "files")})
        )
    monkeypatch.undo()
    assert torch.equal(th.open(tmp_path)[":return"][:], expected)
    (tmp_path / "commits/00000002.json").unlink()
    with pytest.raises(th.DifferentHarvest, match=r"older tenterhook[\s\S]*trust=True"):
        run(tmp_path, model)
    assert run(tmp_path, model, trust=True).made == 1
    with pytest.raises(th.DifferentHarvest, match=r"model.weights"):
        run(tmp_path, nn.Linear(4, 4), trust=True)
