"""Renames: one private name of PyTorch gets another name before PyTorch is imported, and PyTorch still works.

An import hook compiles the sources that contain the word with the word replaced. Names that are defined in C are moved
on their module, and the sources that use them follow. Attributes of C types cannot be moved; for those, tenterhook's
own sources use another word instead, which makes no difference to tenterhook: what it asks for is not there.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import re
import sys
from pathlib import Path
from typing import NamedTuple

__all__ = ["SUFFIX", "Rename", "apply"]

SUFFIX = "_renamed"


class Rename(NamedTuple):
    """One word that is replaced by another."""

    word: str
    """a word, or a dotted path, in which every part stands for itself"""
    package: str
    """``torch`` or ``tenterhook``: whose sources are compiled with another word"""
    files: tuple[str, ...] = ()
    """parts of the paths of the files that are meant; all, if there are none"""
    moved_from: str = ""
    """the C module that has the name"""
    only_attributes: bool = False
    """whether the word is left alone unless it follows a dot, or is a string"""

    @property
    def new(self):
        return f"{self.word}{SUFFIX}"


def apply(rename):
    """Have the name replaced in whatever is imported from now on."""
    if any(name.partition(".")[0] == rename.package for name in sys.modules):
        raise RuntimeError(f"{rename.package} was imported before it could be changed")
    sys.meta_path.insert(0, _Finder(rename))


def _pattern(rename):
    word = re.escape(rename.word)
    if "." in rename.word:
        return re.compile(rf"(?<![\w.]){word}(?!\w)")
    before = r"(?<=[.\"])" if rename.only_attributes else r"(?<!tenterhook\.)\b"
    return re.compile(rf"{before}{word}\b")


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, rename):
        self._rename, self._waits = rename, False
        self._pattern = _pattern(rename)

    def find_spec(self, fullname, path, target=None):
        if self._rename.moved_from:
            self._move()
        if fullname.partition(".")[0] != self._rename.package:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or type(spec.loader) is not importlib.machinery.SourceFileLoader:
            return None
        if not self._is_meant(spec.origin):
            return None
        loader = _Loader(fullname, spec.origin, self._pattern, self._rename.new)
        places = spec.submodule_search_locations
        return importlib.util.spec_from_file_location(
            fullname, spec.origin, loader=loader, submodule_search_locations=places
        )

    def _is_meant(self, origin):
        if self._rename.files and not any(part in origin for part in self._rename.files):
            return False
        return self._rename.word in Path(origin).read_text(encoding="utf-8")

    def _move(self):
        """Move a name in C once its module has it; some are added while torch is imported."""
        module = sys.modules.get("torch._C")
        if module is not None and not self._waits:
            self._waits = True
            init = module._autograd_init  # It adds more names, which are imported right after it.
            module._autograd_init = lambda: (init(), self._move())[0]
        for step in self._rename.moved_from.split(".")[2:]:
            module = getattr(module, step, None)
        found = getattr(module, self._rename.word, None)
        if found is not None:
            delattr(module, self._rename.word)
            setattr(module, self._rename.new, found)


class _Loader(importlib.machinery.SourceFileLoader):
    """Compiles a file with one word replaced, line by line the same otherwise."""

    def __init__(self, fullname, path, pattern, new):
        super().__init__(fullname, path)
        self._pattern, self._new = pattern, new

    def get_code(self, fullname):
        source = self._pattern.sub(self._new, self.get_data(self.path).decode())
        return compile(source, self.path, "exec", dont_inherit=True)
