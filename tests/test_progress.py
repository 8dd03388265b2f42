"""The progress bar."""

import io
import sys

import pytest

from tenterhook._look.progress import bar


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_nothing_is_drawn_where_no_one_looks(capsys):
    with bar("sweep", total=3) as move:
        move(advance=1)
        move(2, note="half")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("how", [{"done": 3}, {"advance": 3}, {"done": 3, "total": 3}])
def test_a_terminal_sees_how_far_it_is(monkeypatch, how):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with bar("harvest", total=3 if "total" not in how else None, stays=True) as move:
        move(**how, note="12 rows/s [a]")
    shown = terminal.getvalue()
    assert "harvest" in shown
    assert "3/3" in shown
    assert "12 rows/s [a]" in shown


def test_it_is_gone_at_the_end_unless_it_is_to_stay(monkeypatch):
    drawn = {}
    for stays in (True, False):
        monkeypatch.setattr(sys, "stderr", Terminal())
        with bar("points", total=1, stays=stays) as move:
            move(1)
        drawn[stays] = sys.stderr.getvalue().rstrip(" \r\n")
    erased = "\x1b[2K"
    assert drawn[False].endswith(erased)
    assert not drawn[True].endswith(erased)
