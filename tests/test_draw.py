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


NAMES = [f"transformer.h.{layer}.attn.resid_dropout#{call}" for layer in (0, 10) for call in (0, 1)]
WIDE = Table(
    "",
    (Column(), Column("point"), Column("class"), Column("mean", right=True), Column("norm", right=True)),
    tuple(Row(("✗", name, "MultiheadAttention", f"{number}.39e-42", "0.175")) for number, name in enumerate(NAMES)),
)


def in_terminal(table, width, **options):
    from rich.console import Console

    out = io.StringIO()
    Console(file=out, width=width).print(as_rich(table, **options))
    return out.getvalue().splitlines()


@pytest.mark.parametrize("width", [120, 80, 60, 40, 30])
def test_numbers_are_whole_and_rows_keep_their_marks_and_calls_at_any_width(width):
    head, *rows = in_terminal(WIDE, width)[: 1 + len(NAMES)]
    assert all(len(line) <= width for line in (head, *rows))
    for row, name in zip(rows, NAMES, strict=True):
        mark, short, *others = row.split()
        assert mark == "✗"
        assert short.endswith(name[-2:])
        assert all("…" not in other for other in others if other[0].isdecimal())
        assert len(others) == len(head.split()) - 1
    assert len({row.split()[1] for row in rows}) == len(rows) or width < 80


def test_names_are_shortened_in_whole_parts_before_a_column_is_left_out():
    head, first, *_, last = in_terminal(WIDE, 66)
    assert head.split() == ["point", "class", "mean", "norm"]
    assert first.split()[1] == "tr….0.attn.resid_dropout#0"
    assert last.split()[1] == "t….10.attn.resid_dropout#1"


def test_what_is_left_out_is_named_with_the_ways_to_see_it():
    assert in_terminal(WIDE, 120)[-1].startswith("✗")
    text = " ".join(line.strip() for line in in_terminal(WIDE, 40, also="--json"))
    assert "columns not shown: norm (a wider terminal or --json shows them)" in text


def test_spare_columns_give_way_first():
    columns = [Column(each.title, each.right, spare=each.title == "class") for each in WIDE.columns]
    spared = Table("", tuple(columns), WIDE.rows)
    assert in_terminal(spared, 40)[0].split() == ["point", "mean", "norm"]


def test_shapes_are_not_cut_and_prose_loses_its_end():
    table = Table(
        "",
        (Column("name"), Column("shape"), Column("source")),
        tuple(Row((f"block.{number}", "16×128×1024", "y = self.project(x) + bias")) for number in range(2)),
    )
    assert in_terminal(table, 36)[1] == "block.0  16×128×1024  y = self.proj…"
    longer = Table("", table.columns[:2], (Row(("a", "[2, 128]")), Row(("b", "Output(logits=[2, 128], past=None)"))))
    assert in_terminal(longer, 20)[1:] == ["a     [2, 128]", "b     Output(logits…"]


def test_guides_stay_whole_where_names_are_shortened():
    rows = tuple(Row((f"a_rather_long_name_{depth}", "1"), depth=depth) for depth in range(3))
    lines = in_terminal(Table("", (Column("name", tree=True), Column("n", right=True)), rows), 20)
    assert lines[3].startswith("   └─ a")
    assert lines[3].split()[1].endswith("_2")


def test_a_table_without_rows_leaves_nothing_out():
    assert in_terminal(Table("none", WIDE.columns, ()), 10) == ["none"]


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
