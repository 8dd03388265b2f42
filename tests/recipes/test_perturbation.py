"""Attribution by taking away, compared with one run of an unrolled model for each part that is taken."""

import itertools

import pytest
import torch
from recipe_models import Tokens, images, reused, unrolled

import tenterhook as th
from tenterhook.testing import untouched

R = th.recipes
TARGET = 3


def score(model, x):
    with torch.no_grad():
        return unrolled(model, x)["out"][:, TARGET]


def test_occlusion_is_the_mean_fall_over_the_windows_of_each_pixel():
    model, x = reused(), images()
    total, times = torch.zeros_like(x), torch.zeros_like(x)
    for top, left in itertools.product([0, 3, 6], [0, 2, 4, 6]):  # The last rows are cut off where the image ends.
        covered = x.clone()
        covered[:, :, top : top + 4, left : left + 2] = 0.25
        fall = score(model, x) - score(model, covered)
        total[:, :, top : top + 4, left : left + 2] += fall[:, None, None, None]
        times[:, :, top : top + 4, left : left + 2] += 1
    with untouched(model):
        found = R.occlusion(model, x, window=(4, 2), stride=(3, 2), baseline=0.25, target=TARGET)
    torch.testing.assert_close(found.attribution, total / times)
    assert any("batches" in line for line in found.how)
    halves = R.occlusion(model, x, window=4, target=TARGET)
    assert halves.settings["stride"] == (2, 2)


def test_a_large_baseline_and_a_single_window():
    model, x = reused(), images()
    start = torch.rand_like(x)
    found = R.occlusion(model, x, window=8, baseline=start, target=TARGET)
    wanted = (score(model, x) - score(model, start))[:, None, None, None].expand_as(x)
    torch.testing.assert_close(found.attribution, wanted)


def test_feature_ablation_of_every_pixel_and_of_segments():
    model, x = reused(), images()
    every = R.feature_ablation(model, x, target=TARGET, baseline=0.1)
    for place in [(0, 0, 0), (2, 5, 7), (1, 7, 3)]:
        without = x.clone()
        without[(slice(None), *place)] = 0.1
        fall = score(model, x) - score(model, without)
        torch.testing.assert_close(every.attribution[(slice(None), *place)], fall)
    segments = torch.tensor([[7, 7, 9, 9], [7, 4, 4, 9]]).repeat_interleave(4, 0).repeat_interleave(2, 1)
    found = R.feature_ablation(model, x, mask=segments, target=TARGET)
    for segment in (4, 7, 9):
        fall = score(model, x) - score(model, torch.where(segments == segment, 0, x))
        for example in range(2):
            shown = found.attribution[example][:, segments == segment]
            torch.testing.assert_close(shown, fall[example].expand_as(shown))
    assert found.settings["features"] == 3


def test_tokens_are_taken_away_too():
    torch.manual_seed(0)
    model, ids = Tokens(), torch.tensor([[1, 2, 3]])
    found = R.feature_ablation(model, ids, target=1)
    with torch.no_grad():
        wanted = (model(ids) - model(torch.tensor([[1, 0, 3]])))[0, 1]
    torch.testing.assert_close(found.attribution[0, 1], wanted)


def test_channel_ablation_of_one_call_and_of_all():
    model, x = reused(), images()
    with torch.no_grad():
        names = unrolled(model, x)
        one, every = [], []
        for channel in range(6):
            cut = names["relu#1"].clone()
            cut[:, channel] = 0
            one.append(model.fc(model.conv3(cut).relu().flatten(1))[:, TARGET])
            first = names["relu#0"].clone()
            first[:, channel] = 0
            cut = model.conv2(first).relu()
            cut[:, channel] = 0
            every.append(model.fc(model.conv3(cut).relu().flatten(1))[:, TARGET])
        base = names["out"][:, TARGET]
    found = R.channel_ablation(model, x, point="relu#1", target=TARGET)
    torch.testing.assert_close(found.attribution, base[:, None] - torch.stack(one, 1))
    with untouched(model):
        both = R.channel_ablation(model, x, point="relu", target=TARGET)
    torch.testing.assert_close(both.attribution, base[:, None] - torch.stack(every, 1))
    assert "reached 2 times" in both.how[0]
    some = R.channel_ablation(model, x, point="relu#1", target=TARGET, channels=[4, 1])
    torch.testing.assert_close(some.attribution, found.attribution[:, [4, 1]])


def test_units_of_a_transformer_lie_along_the_last_dimension():
    torch.manual_seed(0)
    model, ids = Tokens(), torch.tensor([[1, 2, 3]])
    found = R.channel_ablation(model, ids, point="mix", dim=-1, target=1, value=0.5)
    with torch.no_grad():
        mixed = model.mix(model.embed(ids))
        mixed[..., 2] = 0.5
        wanted = model(ids)[0, 1] - model.head(torch.tanh(mixed).mean(1))[0, 1]
    torch.testing.assert_close(found.attribution[0, 2], wanted)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda m, x: R.occlusion(m, x, window=9), r"\[8, 8\]; got 9"),
        (lambda m, x: R.occlusion(m, x, window=(2, 2, 2)), "window= is a number"),
        (lambda m, x: R.occlusion(m, x, window=2, stride=0), "stride= is a number"),
        (lambda m, x: R.occlusion(torch.nn.Linear(4, 2), torch.rand(1, 4), window=2), "use feature_ablation"),
        (lambda m, x: R.feature_ablation(m, x, mask=torch.rand(8, 8)), "whole numbers"),
        (lambda m, x: R.feature_ablation(m, x, mask=torch.arange(5)), r"broadcasts to an example, \[3, 8, 8\]"),
        (lambda m, x: R.channel_ablation(m, x, point="fc", dim=3), "dimension 3 at 'fc'"),
        (lambda m, x: R.occlusion(m, x, window=4, target=7), "no class 7"),
        (lambda m, x: R.occlusion(m, torch.zeros(1, 3, 8, 8, dtype=torch.long), window=4), "floating-point"),
    ],
)
def test_bad_input_is_an_error(call, text):
    with pytest.raises(th.RecipeError, match=text):
        call(reused(), images())
