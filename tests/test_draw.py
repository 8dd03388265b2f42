import io
import re

import pytest

from tenterhook._draw import Column, Row, Table, as_html, as_rich, as_text, short_number

TREE = Table(
    "a tree",
    (Column("name", tree=True), Column("size", right=True), Column("note")),
    (
        Row(("root", "120", "")),
        Row(("left", "20", ""), depth=1),
        Row(("leaf", "20", "x"), depth=2, style="strong"),
        Row(("right", "100", ""), depth=1, style="dim"),
        Row(("leaf", "5", ""), depth=2),
    ),
    ("the end",),
)


def test_plain_text_has_guides_and_aligned_columns():
    assert as_text(TREE).split("\n") == [
        "a tree",
        "name        size  note",
        "root         120",
        "├─ left       20",
        "│  └─ leaf    20  x",
        "└─ right     100",
        "   └─ leaf     5",
        "the end",
    ]


def test_a_column_without_content_is_left_out():
    table = Table("", (Column("a"), Column("empty"), Column("b")), (Row(("1", "", "2")),))
    assert as_text(table) == "a  b\n1  2"


def test_a_table_without_titles_has_no_head():
    assert as_text(Table("", (Column(), Column()), (Row(("1", "2")),))) == "1  2"


def test_a_table_without_rows_is_its_title():
    assert as_text(Table("nothing", (Column("a"),), ())) == "nothing"


def test_wide_characters_take_two_places():
    table = Table("", (Column(), Column()), (Row(("層", "x")), Row(("ab", "y"))))
    assert as_text(table) == "層  x\nab  y"


def test_html_is_escaped_and_fetches_nothing():
    table = Table("<t>", (Column("<c>"),), (Row(("<script>alert(1)</script>",)),), ("<f>",))
    drawn = as_html(table)
    assert "<script" not in drawn
    assert not re.search(r"src=|href=|url\(|<t>|<c>|<f>", drawn)


def test_html_has_a_row_for_each_row():
    assert as_html(TREE).count("<tr>") == 1 + len(TREE.rows)


def test_rich_shows_what_plain_text_shows():
    from rich.console import Console

    out = io.StringIO()
    Console(file=out, width=80).print(as_rich(TREE))
    assert [line.split() for line in out.getvalue().splitlines()] == [
        line.split() for line in as_text(TREE).splitlines()
    ]


def test_rich_does_not_read_markup_in_cells():
    from rich.console import Console

    out = io.StringIO()
    Console(file=out, width=80).print(as_rich(Table("", (Column(),), (Row(("[bold]x[/bold]",)),))))
    assert "[bold]x[/bold]" in out.getvalue()


def test_rich_dims_the_guides_and_not_the_name_behind_them():
    from rich.console import Console

    out = io.StringIO()
    Console(file=out, width=80, force_terminal=True, color_system="standard").print(as_rich(TREE))
    assert "\x1b[1mleaf" in out.getvalue()


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (999, "999"),
        (1000, "1.0k"),
        (85_056, "85.1k"),
        (999_960, "1.0M"),
        (124_439_808, "124.4M"),
        (7 * 10**15, "7000.0T"),
    ],
)
def test_numbers_are_short(number, text):
    assert short_number(number) == text
