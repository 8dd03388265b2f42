import pytest

from versions import page
from versions.pairs import DEFAULT, Pair


def result(**changes):
    plain = {"torch": "2.15.0", "python": "3.13.0", "passed": 4534, "failed": [], "skipped": 12}
    return plain | {"seconds": 1500, "date": "2026-01-02", "features": []} | changes


@pytest.fixture
def in_a_folder(monkeypatch, tmp_path):
    monkeypatch.setattr(page, "PAGE", tmp_path / "versions.md")
    monkeypatch.setattr(page, "RESULTS", tmp_path / "results.json")
    return tmp_path


def rows(text):
    return [line for line in text.splitlines() if line.startswith("| 2.")]


def test_a_row_gives_versions_counts_time_and_features():
    row = next(row for row in rows(page.text({"2.15.0/3.13": result()})) if "2.15.0" in row)
    assert row == "| 2.15.0 | 3.13.0 | 4,534 | 0 | 12 | 25 | 2026-01-02 | none |"


def test_features_that_are_not_fast_are_given_with_their_reason():
    slow = [{"name": "checkpoints", "status": "fallback", "why": "a|b\nis gone"}]
    assert "checkpoints: fallback (a\\|b is gone) |" in page.text({"2.15.0/3.13": result(features=slow)})


def test_features_that_no_one_reported_are_not_called_fast():
    assert "| not reported |" in page.text({"2.15.0/3.13": result(features=None)})


def test_a_default_pair_without_a_result_is_shown_as_not_run():
    assert all("not run" in row for row in rows(page.text({})))
    assert len(rows(page.text({}))) == len(DEFAULT)


def test_failures_are_named_below_the_table_and_the_rest_counted():
    text = page.text({"2.15.0/3.13": result(failed=[f"tests/test_a.py::test_{n:02}" for n in range(23)])})
    assert "## Failed with torch 2.15.0 and Python 3.13" in text
    assert "- `tests/test_a.py::test_19`\n- and 3 more\n" in text
    assert "test_20" not in text


def test_a_pair_that_is_run_again_replaces_its_own_row_only(in_a_folder):
    page.add(Pair.parse("2.15.0/3.13"), result(passed=1))
    page.add(Pair.parse("2.11.0/3.12"), result(torch="2.11.0", passed=2))
    page.add(Pair.parse("2.15.0/3.13"), result(passed=3))
    assert {pair: each["passed"] for pair, each in page.read().items()} == {"2.11.0/3.12": 2, "2.15.0/3.13": 3}
    written = rows((in_a_folder / "versions.md").read_text())
    assert [row.split(" | ")[2] for row in written if "not run" not in row] == ["2", "3"]
    assert sorted(path.name for path in in_a_folder.iterdir()) == ["results.json", "versions.md"]


def test_the_page_in_the_repository_is_that_of_its_results():
    assert page.PAGE.read_text(encoding="utf-8") == page.text(page.read())
