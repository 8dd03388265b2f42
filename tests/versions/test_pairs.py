import pytest

from versions.pairs import DEFAULT, Pair, VersionsError


def test_a_pair_is_read_from_its_text_and_written_back():
    pair = Pair.parse("2.15.0/3.13")
    assert (pair.torch, pair.python) == ("2.15.0", "3.13")
    assert str(pair) == "2.15.0/3.13"


def test_a_release_candidate_is_a_release():
    assert Pair.parse("2.16.0rc2/3.13").torch == "2.16.0rc2"


@pytest.mark.parametrize("text", ["2.15.0", "2.15/3.13", "2.15.0/3", "2.15.0/3.13.1", "2.15.0 3.13", "", "torch/3.13"])
def test_a_text_that_is_no_pair_is_refused_with_an_example(text):
    with pytest.raises(VersionsError, match=r"not a pair of versions.*such as 2\.15\.0/3\.13"):
        Pair.parse(text)


def test_pairs_are_sorted_as_numbers():
    texts = ["2.15.0/3.13", "2.9.1/3.11", "2.10.0/3.12", "2.10.0/3.9"]
    pairs = sorted(map(Pair.parse, texts), key=lambda pair: pair.order)
    assert list(map(str, pairs)) == ["2.9.1/3.11", "2.10.0/3.9", "2.10.0/3.12", "2.15.0/3.13"]


def test_the_default_set_has_every_supported_python():
    assert {pair.python for pair in DEFAULT} == {"3.11", "3.12", "3.13"}
