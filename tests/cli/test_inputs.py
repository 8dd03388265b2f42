"""INPUT in all its forms."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import save_file
from torch import nn

import tenterhook as th
from tenterhook.cli.edits import read_edits
from tenterhook.cli.errors import CommandError
from tenterhook.cli.inputs import read_inputs

MODEL = nn.Linear(1, 1)


def read(*texts, model=MODEL, **more):
    return read_inputs(texts, model, **more)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=4))
def test_a_shape_is_random_values_of_that_shape(shape):
    (value,) = read("x".join(map(str, shape))).args
    assert list(value.shape) == shape
    assert value.dtype == torch.float32


def test_whole_numbers_are_below_their_end():
    inputs = read("input_ids=int:4x50<7", "mask=bool:3", "zeros:2", "scalar")
    ids = inputs.kwargs["input_ids"]
    assert (ids.dtype, tuple(ids.shape)) == (torch.int64, (4, 50))
    assert set(ids.flatten().tolist()) == set(range(7))
    assert inputs.kwargs["mask"].dtype == torch.bool
    assert inputs.args[0].tolist() == [0, 0]
    assert inputs.args[1].shape == ()


@pytest.mark.parametrize("text", ["int:3", "3<5", "int:3<0", "bytes:3", "99999999x99999999"])
def test_shapes_that_make_no_sense_are_explained(text):
    with pytest.raises(CommandError, match=text.replace("<", "<")):
        read(text)


def test_files_of_arrays_give_the_values_that_are_in_them(tmp_path):
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    np.save(tmp_path / "x.npy", values)
    np.savez(tmp_path / "x.npz", a=values, b=values * 2)
    torch.save({"a": torch.ones(2)}, tmp_path / "x.pt")
    torch.save([torch.ones(2), torch.zeros(1)], tmp_path / "list.pt")
    save_file({"a": torch.full((2,), 3.0)}, tmp_path / "x.safetensors")
    assert np.array_equal(read(str(tmp_path / "x.npy")).args[0].numpy(), values)
    assert np.array_equal(read(str(tmp_path / "x.npz")).kwargs["b"].numpy(), values * 2)
    assert read(str(tmp_path / "x.pt")).kwargs["a"].tolist() == [1, 1]
    assert len(read(str(tmp_path / "list.pt")).args) == 2
    assert read(str(tmp_path / "x.safetensors")).kwargs["a"].tolist() == [3, 3]
    assert read(f"name={tmp_path / 'x.npy'}").kwargs["name"].shape == (2, 3)


def test_pickled_code_in_a_file_is_not_run(tmp_path):
    np.save(tmp_path / "x.npy", np.array([_Evil()], dtype=object), allow_pickle=True)
    torch.save(_Evil(), tmp_path / "x.pt")
    for name in ("x.npy", "x.pt"):
        with pytest.raises(CommandError, match="could not be read"):
            read(str(tmp_path / name))


class _Evil:
    def __reduce__(self):
        return (exec, ("raise SystemExit('code from a file was run')",))


def test_an_image_has_the_channels_that_the_model_takes(tmp_path):
    pixels = np.zeros((4, 6, 3), dtype=np.uint8)
    pixels[1, 2] = (255, 0, 51)
    Image.fromarray(pixels).save(tmp_path / "x.png")
    (image,) = read(str(tmp_path / "x.png"), model=nn.Conv2d(3, 1, 1)).args
    assert tuple(image.shape) == (1, 3, 4, 6)
    assert image[0, :, 1, 2].tolist() == pytest.approx([1, 0, 0.2])
    (grey,) = read(str(tmp_path / "x.png"), model=nn.Conv2d(1, 1, 1), image_size=(8, 9)).args
    assert tuple(grey.shape) == (1, 1, 8, 9)


def test_a_file_of_another_kind_is_refused(tmp_path):
    (tmp_path / "x.csv").write_text("1,2")
    with pytest.raises(CommandError, match=r"not from '\.csv'"):
        read(str(tmp_path / "x.csv"))


def test_edits_are_read_with_numbers_indices_and_files(tmp_path):
    np.save(tmp_path / "v.npy", np.ones(2, dtype=np.float32))
    found = read_edits(("h.5=zero", "h.7=scale(2, at=at[:, -1])", f"h.8=set('{tmp_path / 'v.npy'}')", "h.5=add(1.5)"))
    assert [type(edit).__name__ for edit in found["h.5"]] == ["Zero", "Add"]
    assert found["h.7"][0].at == (slice(None), -1)
    assert found["h.8"][0].value.tolist() == [1, 1]
    assert read_edits(("h.5#{1..}=skip()",)) == {"h.5#{1..}": [th.skip()]}


@pytest.mark.parametrize("text", ["h.5", "h.5=zap()", "h.5=zero(open('x'))", "h.5=scale(at=at[f()])", "h.5=scale(("])
def test_what_is_no_edit_is_not_run(text):
    with pytest.raises(CommandError):
        read_edits((text,))
