from __future__ import annotations

import dataclasses
import gc
import json
import math
import os
import signal
import subprocess
import sys
import types
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tenterhook._tree import Opaque
from tenterhook.errors import (
    AmbiguousCall,
    GradientError,
    NoBackward,
    NoGradient,
    NotRecorded,
    TapeFileError,
    ValueChanged,
)
from tenterhook.record import tape_file as store
from tenterhook.record import tensor_file as files
from tenterhook.record.decode_values import DecodedRecord
from tenterhook.record.kept_value import KeptValue
from tenterhook.record.tape import Tape, Track
from tenterhook.record.tape_file import load, save
from tenterhook.record.tape_log import LogEntries
from tenterhook.record.tensor_file import checksum
from tenterhook.record.verb import record

SRC = Path(store.__file__).parents[2]


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass
class Plain:
    logits: Any
    extra: Any = None

    def __post_init__(self) -> None:
        Plain.made += 1


Plain.made = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Tight:
    values: Any
    keys: Any


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = self.decoder = nn.Sequential(nn.Linear(2, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x)


class Carried(dict):
    def __init__(self, *, needed: int) -> None:
        raise AssertionError("a loaded mapping is not constructed")


def tape_of(**values: Any) -> Tape:
    tape = Tape()
    for address, value in values.items():
        tape._tracks[address] = Track(LogEntries(tape.log, {0: KeptValue(value, [])}), kind="Toy")
    return tape


def round_trip(value: Any, folder: Path) -> Any:
    save(tape_of(x=value), folder / "run.th")
    return load(folder / "run.th")["x"]


def same(a: Any, b: Any) -> bool:
    """Equal in type, structure and values, NaN being equal to itself."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(bits(a), bits(b))
    if dataclasses.is_dataclass(a):
        return all(same(getattr(a, field.name), getattr(b, field.name)) for field in dataclasses.fields(a))
    if isinstance(a, dict):
        return same([*a.items()], [*b.items()])
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(same, a, b))
    # Only the text tells -0.0 from 0.0, and only the value of a long integer can be compared.
    return a == b if isinstance(a, int) else repr(a) == repr(b)


def bits(tensor: Tensor) -> Tensor:
    return tensor.resolve_conj().contiguous().reshape(-1).view(torch.uint8)


def leftovers(folder: Path, *expected: str) -> set[str]:
    return {entry.name for entry in folder.iterdir()} - set(expected)


# -- real models ------------------------------------------------------------------------------------------------------


def tiny_gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=40, n_positions=16, n_embd=8, n_layer=2, n_head=2)
    return transformers.GPT2LMHeadModel(config).eval()


def test_a_transformers_model_comes_back_with_its_own_output_class(tmp_path):
    model, ids = tiny_gpt2(), torch.arange(5)[None]
    with record(model, ":return", "transformer.h.*", "lm_head.weight", grad=True) as tape:
        model(ids, labels=ids).loss.backward()
    tape.save(tmp_path / "run.th")
    again = load(tmp_path / "run.th")
    assert list(again) == list(tape)
    assert list(again.grad) == list(tape.grad)
    assert type(again[":return"]) is type(tape[":return"])
    assert again[":return"].loss is again[":return"]["loss"]
    assert torch.equal(again[":return"].logits, tape[":return"][1])
    assert all(same(again[address], tape[address]) for address in tape if address != ":return")
    assert all(same(again.grad[address], tape.grad[address]) for address in tape.grad)
    assert repr(again) == repr(tape)
    assert again.nbytes == tape.nbytes


def test_a_model_output_stays_readable_where_transformers_is_not_loaded(tmp_path):
    model = tiny_gpt2()
    with record(model, ":return") as tape, torch.no_grad():
        model(torch.arange(5)[None])
    tape.save(tmp_path / "run.th")
    script = """
        import sys
        from tenterhook.record.tape_file import load
        tape = load(sys.argv[1])
        value = tape[":return"]
        assert not any(name.startswith("transformers") for name in sys.modules)
        assert value.logits is value["logits"] and value[0] is value.logits and value.loss is None
        assert value.logits.shape == (1, 5, 40)
        assert "GPT2" in repr(value) or "CausalLM" in repr(value), repr(value)
        assert "logits" in repr(tape), tape
        tape.save(sys.argv[2])
    """
    run_python(script, tmp_path / "run.th", tmp_path / "again.th")
    again = load(tmp_path / "again.th")[":return"]
    assert type(again) is type(tape[":return"])
    assert list(again) == list(tape[":return"])
    assert torch.equal(again["logits"], tape[":return"].logits)


def test_an_lstm_and_its_calls_come_back(tmp_path):
    model = nn.LSTM(3, 4, num_layers=2, batch_first=True)
    with record(model, ":return") as tape:
        for length in (2, 5):
            model(torch.randn(1, length, 3))
    tape.save(tmp_path / "run.th")
    again = load(tmp_path / "run.th")
    assert list(again) == [":return#0", ":return#1"]
    assert same(again.calls(":return"), tape.calls(":return"))
    assert same(again[":return#-1"], tape[":return#1"])
    with pytest.raises(AmbiguousCall):
        again[":return"]


def test_both_names_of_a_shared_module_find_it_after_loading(tmp_path):
    model = Shared()
    with record(model, "encoder.0", "encoder.0:in", "encoder.0.weight", grad=True) as tape:
        model(torch.ones(1, 2)).sum().backward()
    tape.save(tmp_path / "run.th")
    del model
    gc.collect()
    again = load(tmp_path / "run.th")
    again.save(tmp_path / "second.th")
    for loaded in (again, load(tmp_path / "second.th")):
        assert loaded["decoder.0"] is loaded["encoder.0"]
        assert loaded["decoder.0:in"] is loaded["encoder.0:in"]
        assert loaded["decoder.0.weight"] is loaded["encoder.0.weight"]
        assert loaded.grad["decoder.0"] is loaded.grad["encoder.0"]


def test_a_gradient_that_there_is_not_gives_the_same_reason_after_loading(tmp_path):
    model = nn.ModuleDict({"used": nn.Linear(2, 2), "unused": nn.Linear(2, 2)})
    with record(model, "used", "unused", "used:in", grad=True) as tape:
        x = torch.ones(1, 2)
        model["unused"](x)
        loss = model["used"](x).sum()
    tape.save(tmp_path / "early.th")
    early = load(tmp_path / "early.th")
    with pytest.raises(NoBackward):
        early.grad["used"]
    loss.backward()
    tape.save(tmp_path / "run.th")
    again = load(tmp_path / "run.th")
    assert torch.equal(again.grad["used"], torch.ones(1, 2))
    for address, error in {"unused": NoGradient, "used:in": GradientError}.items():
        for one in (tape, again):
            with pytest.raises(error):
                one.grad[address]
    assert list(again.grad) == list(tape.grad) == ["used"]


def test_a_tape_without_gradients_says_so_after_loading(tmp_path):
    save(tape_of(x=torch.ones(1)), tmp_path / "run.th")
    with pytest.raises(NoBackward, match="has no gradients"):
        load(tmp_path / "run.th").grad["x"]


def test_an_empty_tape_and_a_track_without_calls_come_back(tmp_path):
    tape = Tape()
    save(tape, tmp_path / "run.th")
    assert len(load(tmp_path / "run.th")) == 0
    tape._tracks["fc"] = Track(LogEntries(tape.log, {}), kind="Linear")
    save(tape, tmp_path / "run.th")
    with pytest.raises(NotRecorded, match="it has not run yet"):
        load(tmp_path / "run.th")["fc"]


# -- structures -------------------------------------------------------------------------------------------------------

NATIVE = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.bool, torch.uint8, torch.int8]
NATIVE += [torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64, torch.complex64]
NATIVE += [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu]
OTHERS = [torch.complex128, torch.float4_e2m1fn_x2]


@pytest.mark.parametrize("dtype", NATIVE + OTHERS, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3)], ids=str)
def test_every_type_and_shape_of_tensor_comes_back(dtype, shape, tmp_path):
    raw = torch.randint(0, 2, (*shape, dtype.itemsize), dtype=torch.uint8)
    assert same(round_trip(raw.view(dtype).reshape(shape), tmp_path), raw.view(dtype).reshape(shape))


def test_half_complex_comes_back(tmp_path):
    value = torch.view_as_complex(torch.tensor([[1.0, 2.0], [3.0, -4.0]], dtype=torch.float16))
    assert same(round_trip(value, tmp_path), value)


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(12.0).reshape(3, 4).t(),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.ones(1).expand(4, 5),
        torch.arange(10)[::3],
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.randn(3, dtype=torch.complex128).conj(),
        torch.randn(3, dtype=torch.complex64).conj().imag,
        nn.Parameter(torch.ones(3)),
        torch.ones(2, requires_grad=True) * 2,
    ],
    ids=["transposed", "channels last", "expanded", "strided", "conj", "conj 128", "neg", "parameter", "graph"],
)
def test_a_tensor_of_any_layout_in_memory_comes_back_with_equal_values(value, tmp_path):
    again = round_trip(value, tmp_path)
    assert torch.equal(again, value)
    assert again.is_contiguous()
    assert not again.requires_grad
    assert type(again) is Tensor


def test_a_tensor_subclass_that_only_overrides_functions_comes_back_plain(tmp_path):
    class Tagged(Tensor):
        pass

    assert torch.equal(round_trip(torch.ones(3).as_subclass(Tagged), tmp_path), torch.ones(3))


def test_tensors_that_share_memory_come_back_each_with_its_values(tmp_path):
    base = torch.arange(12.0).reshape(3, 4)
    value = (base, base[1], base[:, 1:3], base.view(12), base.view(torch.int32), base)
    again = round_trip(value, tmp_path)
    assert same(again, value)
    assert again[0] is again[5]


def test_a_tensor_that_stands_at_two_addresses_is_stored_once(tmp_path):
    value = torch.randn(1000)
    save(tape_of(a=value, b=value.detach(), c=(value,)), tmp_path / "run.th")
    assert len(load_file(tmp_path / "run.th")) == 1


def test_a_loaded_value_that_is_changed_in_place_is_noticed_where_it_is_shared(tmp_path):
    value = torch.randn(4)
    save(tape_of(a=value, b=value), tmp_path / "run.th")
    again = load(tmp_path / "run.th")
    again["a"].zero_()
    with pytest.raises(ValueChanged, match="'b'"):
        again["b"]


def test_many_short_lived_gradients_are_not_mistaken_for_each_other(tmp_path):
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(6)])
    with record(model, "*", grad=True) as tape:
        loss = model(torch.randn(3, 2)).sum()
        loss.backward(retain_graph=True)
        loss.backward()
    tape.save(tmp_path / "run.th")
    again = load(tmp_path / "run.th")
    assert all(same(again.grad[address], tape.grad[address]) for address in tape.grad)


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        -7,
        2**64 + 1,
        -(1 << 20_000),
        0.1,
        -0.0,
        math.inf,
        -math.inf,
        math.nan,
        5e-324,
        complex(math.nan, -math.inf),
        "text \n ü \ud800 \x00",
        b"\x00\xff",
        torch.Size([2, 3]),
        torch.bfloat16,
        torch.device("cuda:1"),
        range(2, 10**30, 3),
        slice(None, -1, 2),
        Opaque("a.Cache"),
        (),
        [],
        {},
        {1: "a", "1": "b", None: "c", (1, (True, "x")): "d", b"k": "e", 2.5: "f"},
        {"tensor": ["tensor", "t0"]},
        ["tensor", "t0"],
        ([(), [[]]], {"a": {}}),
    ],
    ids=lambda value: repr(value)[:30] if not isinstance(value, int) else type(value).__name__,
)
def test_a_constant_or_structure_comes_back(value, tmp_path):
    assert same(round_trip(value, tmp_path), value)


@pytest.mark.parametrize(
    "value",
    [
        Pair(torch.ones(2), [1]),
        Plain(torch.ones(2)),
        Tight(torch.ones(2), (1, 2)),
        OrderedDict(b=1, a=torch.ones(1)),
        Counter("abca"),
        torch.max(torch.randn(3, 4), dim=1),
        torch.linalg.slogdet(torch.eye(2)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_class_that_is_loaded_is_used_again(value, tmp_path):
    assert same(round_trip(value, tmp_path), value)


def test_loading_calls_no_constructor(tmp_path):
    carried = dict.__new__(Carried)
    carried["a"] = torch.ones(1)
    value = (Plain(1), carried)
    before = Plain.made
    assert same(round_trip(value, tmp_path), value)
    assert Plain.made == before


def test_what_code_alone_could_rebuild_comes_back_as_its_parts(tmp_path):
    factory = defaultdict(list, a=torch.ones(1))
    mapping = types.MappingProxyType({"a": 1})
    again = round_trip((deque([torch.ones(1), 2]), mapping, factory), tmp_path)
    assert same(again[0], (torch.ones(1), 2))
    assert again[1] == {"a": 1}
    assert again[2] == factory
    assert again[2].default_factory is None


def test_an_object_that_is_no_structure_stays_opaque(tmp_path):
    class Cache:
        pass

    model = nn.Identity()
    with record(model, ":return") as tape:
        model((torch.ones(1), Cache()))
    tape.save(tmp_path / "run.th")
    assert "Cache, not kept" in repr(load(tmp_path / "run.th")[":return"][1])


def vanished(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sys.modules[kind.__module__], kind.__name__)


def test_a_named_tuple_without_its_class_keeps_its_fields(tmp_path, monkeypatch):
    save(tape_of(x=Pair(torch.ones(2), 3)), tmp_path / "run.th")
    with monkeypatch.context() as patch:
        vanished(Pair, patch)
        tape = load(tmp_path / "run.th")
        again = tape["x"]
        assert type(again).__name__ == "Pair"
        assert again._fields == ("left", "right")
        assert again.right == again[1] == 3
        tape.save(tmp_path / "second.th")
    assert type(load(tmp_path / "second.th")["x"]) is Pair


def test_a_dataclass_without_its_class_keeps_its_fields(tmp_path, monkeypatch):
    save(tape_of(x=Tight(torch.ones(2), None)), tmp_path / "run.th")
    with monkeypatch.context() as patch:
        vanished(Tight, patch)
        tape = load(tmp_path / "run.th")
        again = tape["x"]
        assert isinstance(again, DecodedRecord)
        assert again.values is again["values"] is again[0]
        assert again.keys is None
        assert repr(again) == "Tight(values=tensor([1., 1.]), keys=None)"
        assert "x['values']" in repr(tape)
        with pytest.raises(dataclasses.FrozenInstanceError):
            again.keys = 1
        with pytest.raises(dataclasses.FrozenInstanceError):
            del again.keys
        with pytest.raises(KeyError):
            again["other"]
        tape.save(tmp_path / "second.th")
    assert type(load(tmp_path / "second.th")["x"]) is Tight


def test_a_class_whose_fields_have_changed_is_not_used(tmp_path, monkeypatch):
    save(tape_of(x=Plain(1), y=Pair(1, 2)), tmp_path / "run.th")
    module = sys.modules[__name__]
    monkeypatch.setattr(module, "Plain", dataclasses.make_dataclass("Plain", ["logits", "other"]))
    monkeypatch.setattr(module, "Pair", namedtuple("Pair", ["left"]))  # noqa: PYI024
    again = load(tmp_path / "run.th")
    assert isinstance(again["x"], DecodedRecord)
    assert again["x"].logits == 1
    assert again["y"].right == 2


def test_a_class_made_inside_a_function_still_gives_its_fields(tmp_path):
    @dataclasses.dataclass
    class Local:
        a: Any

    renamed = namedtuple("renamed", ["a", "class", "a"], rename=True)  # noqa: PYI024
    again = round_trip((Local(torch.ones(1)), renamed(1, 2, 3)), tmp_path)
    assert torch.equal(again[0].a, torch.ones(1))
    assert again[1]._fields == ("a", "_1", "_2")


def test_a_class_with_a_finalizer_is_not_used(tmp_path, monkeypatch):
    save(tape_of(x=Plain(1)), tmp_path / "run.th")
    monkeypatch.setattr(Plain, "__del__", lambda self: None, raising=False)
    assert isinstance(load(tmp_path / "run.th")["x"], DecodedRecord)


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.complex_numbers()
    | st.text(st.characters(exclude_categories=()))
    | st.binary(max_size=8)
)
KEYS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: st.tuples(inner) | st.tuples(inner, inner),
    max_leaves=3,
)


@st.composite
def random_tensors(draw: st.DrawFn) -> Tensor:
    dtype = draw(st.sampled_from(NATIVE + OTHERS))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    count = math.prod(shape) * dtype.itemsize
    raw = draw(st.binary(min_size=count, max_size=count))
    if dtype == torch.bool:
        raw = bytes(byte & 1 for byte in raw)
    flat = torch.tensor(list(raw), dtype=torch.uint8)
    tensor = flat.view(dtype).reshape(shape)
    return tensor.transpose(0, -1) if len(shape) > 1 and draw(st.booleans()) else tensor


STRUCTURES = st.recursive(
    SCALARS | random_tensors(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=3)
        | st.builds(Pair, inner, inner)
        | st.builds(Plain, inner, inner)
        | st.builds(Tight, inner, inner)
        | st.dictionaries(KEYS, inner, max_size=3).map(OrderedDict)
    ),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(value=STRUCTURES)
def test_any_structure_comes_back_equal_and_so_does_its_second_copy(value, tmp_path):
    save(tape_of(x=value), tmp_path / "run.th")
    again = load(tmp_path / "run.th")
    assert same(again["x"], value)
    save(again, tmp_path / "second.th")
    assert same(load(tmp_path / "second.th")["x"], value)


# -- what cannot be written -------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("make", "fix"),
    [
        (lambda: torch.eye(3).to_sparse(), "to_dense"),
        (lambda: torch.eye(4).to_sparse_csr(), "to_dense"),
        (lambda: torch.eye(4).to_mkldnn(), "to_dense"),
        (lambda: torch.quantize_per_tensor(torch.eye(3), 0.1, 0, torch.qint8), "dequantize"),
        (lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]), "unbind"),
        (lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged), "unbind"),
        (lambda: torch.ones(3, device="meta"), "cpu"),
        (lambda: torch.masked.masked_tensor(torch.ones(2), torch.tensor([True, False])), "plain tensors"),
        (lambda: torch.zeros(4, dtype=torch.uint8).view(torch.bits16), "uint8"),
    ],
    ids=["sparse", "csr", "mkldnn", "quantized", "nested", "jagged", "meta", "subclass", "bits"],
)
def test_a_tensor_that_no_file_can_hold_is_refused_by_address_with_the_fix(make, fix, tmp_path):
    with pytest.raises(TapeFileError, match=r"'h\.3'.*" + fix):
        save(tape_of(**{"h.2": torch.ones(1), "h.3": {"a": [make()]}}), tmp_path / "run.th")
    assert not leftovers(tmp_path)


def test_a_key_that_no_file_can_hold_is_refused_by_address(tmp_path):
    with pytest.raises(TapeFileError, match=r"'h\.3'.*object"):
        save(tape_of(**{"h.3": {(1, object()): 2}}), tmp_path / "run.th")
    assert not leftovers(tmp_path)


def test_a_structure_that_contains_itself_is_refused(tmp_path):
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(TapeFileError, match=r"'x'.*contains itself"):
        save(tape_of(x=endless), tmp_path / "run.th")


def test_a_value_that_was_overwritten_is_an_error_at_saving_and_nothing_is_written(tmp_path):
    value = torch.ones(3)
    tape = tape_of(a=torch.ones(1))
    tape._tracks["b"] = Track(LogEntries(tape.log, {0: (value, value._version), 1: (value, value._version)}))
    value.zero_()
    with pytest.raises(ValueChanged, match="'b#0'"):
        save(tape, tmp_path / "run.th")
    assert not leftovers(tmp_path)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_tensor_on_a_gpu_comes_back_on_the_cpu(tmp_path):
    assert same(round_trip(torch.arange(3, device="cuda"), tmp_path), torch.arange(3))


# -- whole or not at all ----------------------------------------------------------------------------------------------


def test_stock_readers_open_the_file_and_see_plain_json(tmp_path):
    save(tape_of(fc=(torch.ones(2), math.nan)), tmp_path / "run.th")
    with safe_open(tmp_path / "run.th", "pt") as file:
        texts = file.metadata()
        assert torch.equal(file.get_tensor("t0"), torch.ones(2))
    assert texts["format"] == "tenterhook.tape"
    assert texts["format_version"] == "1"
    assert texts["torch"] == torch.__version__
    tape = json.loads(texts["tape"], parse_constant=pytest.fail)
    assert [track["address"] for track in tape["values"]] == ["fc"]


def test_paths_are_text_or_path_objects(tmp_path):
    for path in (str(tmp_path / "a.th"), tmp_path / "b.th"):
        tape_of(x=1).save(path)
        assert load(path)["x"] == 1


def test_saving_over_a_tape_replaces_it_and_leaves_nothing_beside_it(tmp_path):
    path = tmp_path / "run.th"
    for value in (1, 2):
        save(tape_of(x=value), path)
    assert load(path)["x"] == 2
    assert not leftovers(tmp_path, "run.th")


@pytest.mark.skipif(os.name != "posix", reason="modes and links as POSIX has them")
def test_a_new_file_has_the_usual_mode_and_an_old_one_keeps_its_mode_and_links(tmp_path):
    path, usual = tmp_path / "run.th", tmp_path / "usual"
    usual.touch()
    save(tape_of(x=1), path)
    assert path.stat().st_mode == usual.stat().st_mode
    path.chmod(0o640)
    (tmp_path / "link.th").symlink_to(path)
    save(tape_of(x=2), tmp_path / "link.th")
    assert (tmp_path / "link.th").is_symlink()
    assert path.stat().st_mode & 0o777 == 0o640
    assert load(path)["x"] == 2


def test_a_missing_folder_or_a_folder_as_the_path_is_named(tmp_path):
    with pytest.raises(TapeFileError, match=r"no directory .*nowhere"):
        save(tape_of(x=1), tmp_path / "nowhere" / "run.th")
    with pytest.raises(TapeFileError, match="is a directory"):
        save(tape_of(x=1), tmp_path)


@pytest.mark.parametrize(
    ("where", "error", "shown"),
    [
        ((files, "serialize_file"), OSError(28, "No space left on device"), TapeFileError),
        ((files, "serialize_file"), KeyboardInterrupt(), KeyboardInterrupt),
        ((os, "fsync"), OSError(5, "Input/output error"), TapeFileError),
        ((Path, "replace"), PermissionError(13, "Permission denied"), TapeFileError),
    ],
    ids=["writing", "interrupted", "syncing", "renaming"],
)
def test_a_failure_while_writing_leaves_the_old_file_and_nothing_else(where, error, shown, tmp_path, monkeypatch):
    path = tmp_path / "run.th"
    save(tape_of(x=1), path)

    def fail(*args, **kwargs):
        raise error

    with monkeypatch.context() as patch, pytest.raises(shown) as caught:
        patch.setattr(*where, fail)
        save(tape_of(x=2), path)
    if shown is TapeFileError:
        assert str(path) in str(caught.value)
        assert error.strerror in str(caught.value)
    assert load(path)["x"] == 1
    assert not leftovers(tmp_path, "run.th")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="uses limits and file systems of Linux")
def test_a_full_disk_and_a_read_only_folder_leave_the_old_file(tmp_path):
    path = tmp_path / "run.th"
    save(tape_of(x=1), path)
    script = """
        import resource, sys, torch
        from tenterhook.errors import TapeFileError
        from tenterhook.record.kept_value import KeptValue
        from tenterhook.record.tape_log import LogEntries
        from tenterhook.record.tape import Tape, Track
        tape = Tape()
        tape._tracks["x"] = Track(LogEntries(tape.log, {0: KeptValue(torch.ones(100_000), [])}))
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
        for path in (sys.argv[1], "/proc/run.th"):
            try:
                tape.save(path)
            except TapeFileError as error:
                assert path in str(error), error
            else:
                raise AssertionError(path)
    """
    run_python(script, path)
    assert load(path)["x"] == 1
    assert not leftovers(tmp_path, "run.th")


@pytest.mark.skipif(os.name != "posix", reason="SIGKILL is a POSIX signal")
@pytest.mark.parametrize("moment", ["os.fsync", "pathlib.Path.replace", "file.serialize_file"])
def test_a_process_killed_while_saving_leaves_the_old_file(moment, tmp_path):
    path = tmp_path / "run.th"
    save(tape_of(x=1), path)
    script = f"""
        import os, pathlib, signal, sys
        from tenterhook.record import tensor_file as file, tape_file as store
        tape = store.load(sys.argv[1])
        tape._tracks["y"] = tape._tracks["x"]
        {moment} = lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGKILL)
        tape.save(sys.argv[1])
    """
    run_python(script, path, status=-signal.SIGKILL)
    assert list(load(path)) == ["x"]


# -- damaged and foreign files ----------------------------------------------------------------------------------------


def written(folder: Path) -> Path:
    path = folder / "run.th"
    value = (torch.arange(6.0).reshape(2, 3), Pair(torch.ones(2, dtype=torch.complex128), 1.25), "text")
    tape = tape_of(fc=value, other={"k": None})
    tape.grad._tracks["fc"] = Track({0: KeptValue(torch.full((3,), 2.0), [])})
    save(tape, path)
    return path


def with_texts(path: Path, **changes: Any) -> None:
    """Write the file again with other texts in its header and a checksum that fits them."""
    with safe_open(path, "pt") as file:
        texts = file.metadata() | changes
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    texts["checksum"] = checksum(texts, tensors)
    save_file(tensors, path, texts)


def test_a_missing_file_and_a_folder_are_named(tmp_path):
    with pytest.raises(TapeFileError, match=r"there is no file .*nothing\.th"):
        load(tmp_path / "nothing.th")
    with pytest.raises(TapeFileError, match="is a directory"):
        load(tmp_path)
    assert issubclass(TapeFileError, OSError)


@pytest.mark.skipif(os.name != "posix", reason="pipes with names")
def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(TapeFileError, match="pipe is not a file"):
        load(tmp_path / "pipe")


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 a zip, not a tape", b"\xff" * 64, b"{}", bytes(100)])
def test_a_file_of_another_kind_is_named(content, tmp_path):
    path = tmp_path / "run.th"
    path.write_bytes(content)
    with pytest.raises(TapeFileError, match=r"run\.th is .*not a tape"):
        load(path)


@pytest.mark.parametrize(("dtype", "shape"), [("F4", [16]), ("F32", [2**62, 4]), ("F32", [0, 2**63]), ("F32", [4])])
def test_a_header_that_promises_more_than_the_file_holds_is_refused(dtype, shape, tmp_path):
    end = 0 if 0 in shape else 8
    texts = {"format": "tenterhook.tape", "format_version": "1"}
    table = {"__metadata__": texts, "t0": {"dtype": dtype, "shape": shape, "data_offsets": [0, end]}}
    header = json.dumps(table).encode()
    (tmp_path / "run.th").write_bytes(len(header).to_bytes(8, "little") + header + bytes(end))
    with pytest.raises(TapeFileError, match=r"run\.th is truncated, damaged"):
        load(tmp_path / "run.th")


def test_a_safetensors_file_that_tenterhook_did_not_write_is_named(tmp_path):
    for metadata in (None, {"format": "pt"}):
        save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors", metadata)
        with pytest.raises(TapeFileError, match="safetensors file, but not a tape"):
            load(tmp_path / "model.safetensors")


def test_a_file_of_a_later_version_asks_for_an_upgrade(tmp_path):
    path = written(tmp_path)
    with_texts(path, format_version="2")
    with pytest.raises(TapeFileError, match=r"version 2.*(?s:.)*pip install -U tenterhook"):
        load(path)


@pytest.mark.parametrize("version", ["", "0", "one", "-1", "²", "9" * 5000])
def test_a_version_that_is_none_is_damage(version, tmp_path):
    path = written(tmp_path)
    with_texts(path, format_version=version)
    with pytest.raises(TapeFileError, match="not a format version"):
        load(path)


def test_a_file_cut_short_anywhere_or_grown_is_refused(tmp_path):
    path = written(tmp_path)
    whole = path.read_bytes()
    for length in range(0, len(whole), 13):
        path.write_bytes(whole[:length])
        with pytest.raises(TapeFileError, match=r"run\.th"):
            load(path)
    path.write_bytes(whole + b"\0")
    with pytest.raises(TapeFileError, match="truncated, damaged"):
        load(path)


def test_a_flipped_bit_among_the_values_is_found(tmp_path):
    path = written(tmp_path)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(TapeFileError, match=r"run\.th is damaged: its checksum"):
        load(path)


@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.floats(0, 1, exclude_max=True), change=st.integers(1, 255))
def test_a_changed_byte_anywhere_never_gives_another_value(place, change, tmp_path):
    path = tmp_path / "run.th" if (tmp_path / "run.th").exists() else written(tmp_path)
    content = bytearray(path.read_bytes())
    content[int(place * len(content))] ^= change
    damaged = tmp_path / "damaged.th"
    damaged.write_bytes(content)
    try:
        again = load(damaged)
    except TapeFileError as error:
        assert "damaged.th" in str(error)  # noqa: PT017
    else:
        # Only the blanks that pad the header can change without a trace.
        assert same(dict(again), dict(load(path)))
        assert same(dict(again.grad), dict(load(path).grad))


TRACK = {"address": "x", "kind": "", "missing": []}


@pytest.mark.parametrize(
    "value",
    [
        [],
        [[]],
        {},
        ["nothing"],
        ["__init__"],
        ["decode", 1],
        ["tensor", "t99"],
        ["tensor"],
        ["tuple", 5],
        ["dict", [[["list", []], 1]], None],
        ["dict", [[1]], None],
        ["int", "12 monkeys"],
        ["bytes", "*"],
        ["dtype", "nn"],
        ["dtype", "_inductor"],
        ["device", "toaster"],
        ["size", ["a"]],
        ["return_type", "max", [1, 2, 3]],
        ["return_type", "__loader__", []],
        ["return_type", "sys", []],
        ["namedtuple", "a:B", ["x", "y"], [1]],
        ["namedtuple", "a:B", ["x y"], [1]],
        ["namedtuple", "a:import os", ["x"], [1]],
        ["dataclass", "a:B", ["__class__"], [1], None],
        ["dataclass", "a:B", ["x;y"], [1], None],
        ["dataclass", 5, ["x"], [1], None],
        ["range", 0, 1, 0],
    ],
    ids=repr,
)
def test_a_description_that_makes_no_sense_is_malformed(value, tmp_path):
    path = written(tmp_path)
    described = {"values": [TRACK | {"calls": [[0, value]]}], "gradients": [], "aliases": {}, "views": {}}
    with_texts(path, tape=json.dumps(described))
    with pytest.raises(TapeFileError, match=r"run\.th is malformed"):
        load(path)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "null",
        "[]",
        "{}",
        '{"views":{"t0":"float64"},"values":[],"gradients":[],"aliases":{}}',
        '{"views":{"t0":"complex128"},"values":[],"gradients":[],"aliases":{}}',
        '{"views":{},"values":[{}],"gradients":[],"aliases":{}}',
        '{"views":{},"values":[],"gradients":[],"aliases":[1]}',
        "[" * 100_000,
        "9" * 5000,
    ],
    ids=lambda text: text[:20],
)
def test_text_that_describes_no_tape_is_malformed(text, tmp_path):
    path = written(tmp_path)
    with_texts(path, tape=text)
    with pytest.raises(TapeFileError, match=r"run\.th is malformed"):
        load(path)


def test_a_file_makes_no_module_load_and_no_code_run(tmp_path):
    path = written(tmp_path)
    references = ["antigravity:Thing", "os:system", "torch:_inductor", "subprocess:Popen", "builtins:eval"]
    calls = [[i, ["dataclass", reference, ["args"], ["true"], None]] for i, reference in enumerate(references)]
    described = {"values": [TRACK | {"calls": calls}], "gradients": [], "aliases": {}, "views": {}}
    with_texts(path, tape=json.dumps(described))
    before = set(sys.modules)
    assert all(isinstance(value, DecodedRecord) and value.args == "true" for value in load(path).calls("x"))
    assert set(sys.modules) == before


def run_python(script: str, *arguments: Path, status: int = 0) -> None:
    lines = script.splitlines()
    indent = min(len(line) - len(line.lstrip()) for line in lines if line.strip())
    code = "\n".join(line[indent:] for line in lines)
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": str(SRC)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status, done.stderr
