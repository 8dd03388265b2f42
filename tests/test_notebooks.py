"""The notebooks of the tutorials: each is its page, and running its cells in order shows what the page says."""

import ast
import contextlib
import doctest
import importlib.util
import io
import json
import linecache
import traceback
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
PAGES = sorted((DOCS / "tutorials").glob("*.md"))
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def maker():
    spec = importlib.util.spec_from_file_location("notebooks", DOCS / "notebooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(cell, names, filename):
    """Run a cell as Jupyter does, and return the output that it shows."""
    source = "".join(cell["source"])
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    body = ast.parse(source, filename)
    last = body.body.pop() if isinstance(body.body[-1], ast.Expr) else None
    shown = io.StringIO()
    try:
        with contextlib.redirect_stdout(shown):
            exec(compile(body, filename, "exec"), names)
            value = eval(compile(ast.Expression(last.value), filename, "eval"), names) if last is not None else None
    except Exception as error:
        if "raises-exception" not in cell["metadata"].get("tags", []):
            raise
        return "".join(traceback.format_exception_only(error))
    assert "tags" not in cell["metadata"], "this cell was to raise an exception"
    return shown.getvalue() + (f"{value!r}\n" if value is not None else "")


def expected(cell):
    if not cell["outputs"]:
        return ""
    (output,) = cell["outputs"]
    kinds = {"error": "traceback", "stream": "text"}
    found = output.get(kinds.get(output["output_type"], "")) or output["data"]["text/plain"]
    return "".join(found).rstrip("\n") + "\n"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_notebook_is_its_page(page):
    made = maker().as_json(page)
    assert page.with_suffix(".ipynb").read_text(encoding="utf-8") == made, "run `python docs/notebooks.py`"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_cells_of_a_notebook_show_what_the_page_says(page):
    notebook = json.loads(page.with_suffix(".ipynb").read_text(encoding="utf-8"))
    names = {"__name__": "__main__"}
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert len(cells) > 5
    for cell in cells:
        filename = f"<{page.stem} {cell['id']}>"
        found, wanted = run(cell, names, filename), expected(cell)
        assert doctest.OutputChecker().check_output(wanted, found, FLAGS), f"{filename}\n{found}\n!=\n{wanted}"


def test_an_example_with_an_output_ends_a_cell():
    error = "Traceback (most recent call last):\nZeroDivisionError: ..."
    page = f"Text.\n\n```pycon\n>>> x = 1\n>>> x\n1\n>>> 1 / 0\n{error}\n>>> print(x)\n1\n\n```\n"
    text, first, second, third = maker().notebook(page)["cells"]
    assert text["source"] == ["Text."]
    assert "".join(first["source"]) == "x = 1\nx"
    assert first["outputs"][0]["data"] == {"text/plain": ["1"]}
    assert second["metadata"] == {"tags": ["raises-exception"]}
    assert third["outputs"][0] == {"output_type": "stream", "name": "stdout", "text": ["1\n"]}
