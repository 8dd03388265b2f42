"""Write the tutorials as notebooks: docs/tutorials/*.ipynb, each made from the page of the same name.

``python docs/notebooks.py`` writes them, and a test fails if a notebook differs from its page. Do not edit a notebook:
edit the page and run this script.

An example with an output ends a cell, because a notebook shows the value of a cell's last line. The outputs are those
of the page, where ``...`` stands for text that varies.
"""

from __future__ import annotations

import ast
import doctest
import json
import re
from pathlib import Path
from typing import Any

TUTORIALS = Path(__file__).parent / "tutorials"
BLOCK = re.compile(r"^```pycon\n(.*?)^```$\n?", re.MULTILINE | re.DOTALL)
OWN_LINK = re.compile(r"^\[This page as a notebook\]\(.*\n\n?", re.MULTILINE)


def main() -> None:
    """Write a notebook for each tutorial."""
    for page in sorted(TUTORIALS.glob("*.md")):
        page.with_suffix(".ipynb").write_text(as_json(page), encoding="utf-8")


def as_json(page: Path) -> str:
    """Return the text of the notebook file for a page."""
    return json.dumps(notebook(page.read_text(encoding="utf-8")), indent=1, ensure_ascii=False) + "\n"


def notebook(text: str) -> dict[str, Any]:
    r"""Return the notebook of a page, in Jupyter's format 4.5.

    >>> [cell["cell_type"] for cell in notebook("# Add\n\n```pycon\n>>> 1 + 1\n2\n\n```\n")["cells"]]
    ['markdown', 'code']
    """
    cells: list[dict[str, Any]] = []
    for index, part in enumerate(BLOCK.split(OWN_LINK.sub("", text))):
        if index % 2:
            cells += code_cells(part)
        elif part.strip():
            cells.append({"cell_type": "markdown", "metadata": {}, "source": lines(part.strip())})
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def code_cells(block: str) -> list[dict[str, Any]]:
    """Return the cells of one block of examples."""
    cells, source = [], ""
    for example in doctest.DocTestParser().get_examples(block):
        source += example.source
        if example.want:
            cells.append(code_cell(source, example))
            source = ""
    return [*cells, code_cell(source)] if source else cells


def code_cell(source: str, example: doctest.Example | None = None) -> dict[str, Any]:
    """Return a cell, with the output of its last example."""
    cell: dict[str, Any] = {"cell_type": "code", "execution_count": None, "metadata": {}, "outputs": []}
    cell["source"] = lines(source.rstrip("\n"))
    if example is not None and example.exc_msg is not None:
        cell["metadata"] = {"tags": ["raises-exception"]}  # Jupyter continues after such a cell.
        name, _, text = example.exc_msg.rstrip("\n").partition(": ")
        error = {"output_type": "error", "ename": name, "evalue": text, "traceback": [example.exc_msg.rstrip("\n")]}
        cell["outputs"] = [error]
    elif example is not None and is_value(source):
        data = {"text/plain": lines(example.want.rstrip("\n"))}
        cell["outputs"] = [{"output_type": "execute_result", "execution_count": None, "metadata": {}, "data": data}]
    elif example is not None:
        cell["outputs"] = [{"output_type": "stream", "name": "stdout", "text": lines(example.want)}]
    return cell


def is_value(source: str) -> bool:
    """Return whether the last line of a cell is an expression that has a value to show."""
    last = ast.parse(source).body[-1]
    if not isinstance(last, ast.Expr):
        return False
    call = last.value
    return not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "print")


def lines(text: str) -> list[str]:
    """Return a text as a list of lines, as notebooks store it."""
    return text.splitlines(keepends=True)


if __name__ == "__main__":
    main()
