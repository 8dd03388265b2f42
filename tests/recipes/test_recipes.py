"""The recipes as a whole: every name is there, although its file is loaded only when it is asked for."""

import pytest

import tenterhook as th


def test_every_name_is_there_under_its_own_name():
    for name in th.recipes.__all__:
        assert getattr(th.recipes, name).__name__.rpartition(".")[2] == name
    assert set(th.recipes.__all__) <= set(dir(th.recipes))
    with pytest.raises(AttributeError, match=r"no recipe 'gradcan'; it has .*gradcam"):
        _ = th.recipes.gradcan
