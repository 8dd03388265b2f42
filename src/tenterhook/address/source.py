"""The source of a function: found, parsed, and compared with the code that runs.

All work on the inside of a ``forward`` starts here. A function is refused, with the reason, if it has no source or if
its file was changed after the import.
"""

from __future__ import annotations
import __future__

import ast
import copy
import dis
import functools
import inspect
import linecache
from dataclasses import dataclass
from types import CodeType
from typing import Any

from tenterhook.errors import NoSource
from tenterhook.pytorch.python_code import free_names, nested_codes

__all__ = ["Source", "compiled", "read_source"]

FUTURES = functools.reduce(
    lambda flags, name: flags | getattr(__future__, name).compiler_flag, __future__.all_feature_names, 0
)


@dataclass(frozen=True, slots=True)
class Source:
    """The syntax tree of a function, with the line numbers of its file, and the source lines."""

    tree: ast.FunctionDef
    lines: tuple[str, ...]
    first_line: int
    filename: str
    class_name: str | None


@functools.lru_cache(maxsize=1024)
def read_source(code: CodeType, qualname: str) -> Source:
    """Return the source of a code object. Raise :class:`NoSource` if there is none or it does not match the code."""
    lines, first = _lines(code, qualname)
    tree = _parse("".join(lines), first, qualname)
    owner = qualname.rpartition(".")[0].rpartition(".")[2]
    class_name = owner if owner.isidentifier() else None
    source = Source(tree, tuple(lines), first, code.co_filename, class_name)
    _check(source, code, qualname)
    return source


def _lines(code: CodeType, qualname: str) -> tuple[list[str], int]:
    linecache.checkcache(code.co_filename)
    try:
        return inspect.getsourcelines(code)
    except (OSError, TypeError, IndexError) as error:
        raise NoSource(
            f"{qualname} has no readable source ({code.co_filename}), so the values inside it cannot be addressed. "
            "Code that was typed at a prompt, read from stdin, generated, or compiled has no source."
        ) from error


def _parse(text: str, first: int, qualname: str) -> ast.FunctionDef:
    """Return the tree with the line numbers of its file, so that tracebacks and debuggers show the user's own lines."""
    # An indented function is put below an `if`. Dedenting would also change the text of multi-line strings.
    inside = text[:1].isspace()
    try:
        parsed = ast.parse(f"if 1:\n{text}" if inside else text)
    except SyntaxError as error:
        raise NoSource(f"the source of {qualname} cannot be parsed on its own: {error}") from error
    ast.increment_lineno(parsed, first - 2 if inside else first - 1)
    body = parsed.body[0].body if inside else parsed.body  # type: ignore[attr-defined]
    if not body or not isinstance(body[0], ast.FunctionDef):
        raise NoSource(f"{qualname} is not defined by a plain `def`, so the values inside it cannot be addressed")
    return body[0]


def compiled(source: Source, tree: ast.FunctionDef, code: CodeType, extra: str | None = None) -> CodeType:
    """Compile a function's tree like the original: in a class of the same name, with the same free variables.

    The class gives names with two leading underscores their mangled form. The outer function defines the free
    variables, including ``extra``.
    """
    free = [*free_names(code), *([extra] if extra is not None else [])]
    bare = _without_decorators(tree)
    body: list[ast.stmt] = [bare]
    if source.class_name is not None:
        body = [ast.ClassDef(name=source.class_name, bases=[], keywords=[], body=body, decorator_list=[])]
    own = source.class_name if source.class_name is not None else bare.name
    if own not in free:  # It refers to its own name as a global, which the outer function would hide.
        body = [ast.Global(names=[own]), *body]
    arguments = ast.arguments(
        posonlyargs=[], args=[ast.arg(arg=name) for name in free], kwonlyargs=[], kw_defaults=[], defaults=[]
    )
    outer = ast.FunctionDef(name="outer", args=arguments, body=body, decorator_list=[])
    module = ast.Module(body=[outer], type_ignores=[])
    for node in (outer, *body):
        ast.copy_location(node, bare)
    ast.fix_missing_locations(module)
    made = compile(module, source.filename, "exec", flags=code.co_flags & FUTURES, dont_inherit=True)
    return _inner(made, code.co_name)


def _without_decorators(tree: ast.FunctionDef) -> ast.FunctionDef:
    """Return the function without decorators, so that they are not evaluated again."""
    bare = copy.copy(tree)
    bare.decorator_list = []
    return bare


def _inner(code: CodeType, name: str) -> CodeType:
    """Return the code of the function ``name`` inside a module's code."""
    todo = [code]
    while todo:
        for inner in nested_codes(todo.pop(0)):
            if inner.co_name == name and inner.co_flags & inspect.CO_NEWLOCALS:
                return inner
            todo.append(inner)
    raise NoSource(f"the source of {name} does not define a function of that name")


def _check(source: Source, code: CodeType, qualname: str) -> None:
    """Raise :class:`NoSource` if the source, compiled, differs from the code that runs."""
    if _same(compiled(source, source.tree, code), code) or _same_in_file(code):
        return
    raise NoSource(
        f"the source of {qualname} in {source.filename} does not match the code that runs: the file was changed after "
        "it was imported, or the code was rewritten. Restart Python to use the current file."
    )


def _same(one: CodeType, other: CodeType) -> bool:
    """Return whether two code objects do the same, regardless of how the compiler loads methods."""
    if (one.co_varnames, free_names(one)) != (other.co_varnames, free_names(other)):
        return False
    ours, theirs = _steps(one), _steps(other)
    if len(ours) != len(theirs):
        return False
    return all(
        _same(a[1], b[1]) if isinstance(a[1], CodeType) and isinstance(b[1], CodeType) else a == b
        for a, b in zip(ours, theirs, strict=True)
    )


def _same_in_file(code: CodeType) -> bool:
    """Return whether the whole file, compiled, contains this code. This check is exact and slow, so it runs last."""
    try:
        whole = compile("".join(linecache.getlines(code.co_filename)), code.co_filename, "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return False
    todo = [whole]
    while todo:
        for inner in nested_codes(todo.pop()):
            if (inner.co_qualname, inner.co_firstlineno) == (code.co_qualname, code.co_firstlineno):
                return inner == code
            todo.append(inner)
    return False


# In a whole file the compiler knows the imports, and loads `F.relu` with another instruction than in a single function.
LOADS = {"LOAD_METHOD": "LOAD_ATTR"}
SKIPPED = {"CACHE", "PRECALL", "PUSH_NULL", "RESUME", "NOP", "EXTENDED_ARG", "COPY_FREE_VARS", "MAKE_CELL"}


def _steps(code: CodeType) -> list[tuple[str, Any]]:
    steps = []
    for step in dis.get_instructions(code):
        if step.opname not in SKIPPED:
            moved = step.opcode in dis.hasjrel or step.opcode in dis.hasjabs
            value = step.argval if isinstance(step.argval, CodeType) else repr(step.argval)
            steps.append((LOADS.get(step.opname, step.opname), None if moved else value))
    return steps
