"""The documentation: every page is in the navigation, every link leads somewhere, every public name is described."""

import importlib
import re
from functools import reduce
from pathlib import Path

import pytest

import tenterhook as th
from tenterhook import hooks, recipes, testing

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
WITH_LINKS = [*PAGES, *sorted(ROOT.glob("*.md")), *sorted((ROOT / ".github").rglob("*.md"))]
SETTINGS = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")

FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
DIRECTIVE = re.compile(r"^::: (\S+)\n    options:\n      heading: (\S+)$", re.MULTILINE)


def name_of(path):
    return str(path.relative_to(ROOT))


def without_code(path):
    return FENCE.sub("", path.read_text(encoding="utf-8"))


def anchors(path):
    """The anchors of a page, as MkDocs makes them."""
    text = without_code(path)
    titles = [re.sub(r"\{.*\}|[`*]|\]\([^)]*\)|\[", "", title).strip() for title in HEADING.findall(text)]
    slugs = {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in titles}
    return slugs | set(re.findall(r"^::: (\S+)", text, re.MULTILINE)) | set(re.findall(r"\{ ?#([\w.-]+)", text))


def test_every_page_is_in_the_navigation():
    listed = re.findall(r"^ +- [^#\n]*?([\w/-]+\.md)$", SETTINGS.split("\nnav:\n")[1], re.MULTILINE)
    assert len(listed) == len(set(listed))
    assert sorted(listed) == sorted(str(path.relative_to(DOCS)) for path in PAGES)


@pytest.mark.parametrize("path", WITH_LINKS, ids=name_of)
def test_every_link_leads_somewhere(path):
    broken = []
    for link in LINK.findall(without_code(path)):
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        target, _, anchor = link.partition("#")
        found = (path.parent / target).resolve() if target else path
        if not found.exists() or (anchor and found.suffix == ".md" and anchor not in anchors(found)):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_a_page_of_the_site_links_to_pages_of_the_site_only(path):
    outside = [link for link in LINK.findall(without_code(path)) if not link.startswith(("http", "#"))]
    outside = [link for link in outside if not (path.parent / link.partition("#")[0]).resolve().is_relative_to(DOCS)]
    assert outside == []


def described():
    """What the reference describes: the object's path by the name that a user writes."""
    pages = (DOCS / "reference").glob("*.md")
    return {name: path for page in pages for path, name in DIRECTIVE.findall(page.read_text(encoding="utf-8"))}


PUBLIC = {
    **{f"th.{name}": getattr(th, name) for name in th.__all__},
    **{f"th.recipes.{name}": getattr(recipes, name) for name in recipes.__all__},
    **{f"th.recipes.patching.{name}": getattr(recipes.patching, name) for name in recipes.patching.__all__},
    **{f"hooks.{name}": getattr(hooks, name) for name in hooks.__all__},
    **{f"testing.{name}": getattr(testing, name) for name in testing.__all__},
}
# Modules have a page each, and these two are no functions or classes; the text describes them.
IN_THE_TEXT = {
    "th.hooks": "hooks.md",
    "th.recipes": "recipes.md",
    "th.recipes.patching": "recipes.md",
    "th.at": "edits.md",
    "th.__version__": "verbs.md",
}


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_in_the_reference(name):
    if name in IN_THE_TEXT:
        text = (DOCS / "reference" / IN_THE_TEXT[name]).read_text(encoding="utf-8")
        assert name in text or name.replace("th.", "tenterhook.") in text
    else:
        assert name in described()


@pytest.mark.parametrize("name", sorted(set(PUBLIC) - set(IN_THE_TEXT)))
def test_the_reference_describes_the_object_of_that_name(name):
    module, _, attribute = described()[name].rpartition(".")
    assert getattr(importlib.import_module(module), attribute) is PUBLIC[name]


@pytest.mark.parametrize("path", sorted(described().values()))
def test_what_the_reference_describes_exists_and_has_a_docstring(path):
    parts = path.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        assert reduce(getattr, parts[cut:], found).__doc__
        return
    pytest.fail(f"{path} cannot be imported")


def test_the_site_loads_nothing_from_other_servers():
    assert "font: false" in SETTINGS
    assert "assets_fetch: false" in SETTINGS
    loaded = re.compile(r"""<(?:script|img|iframe|link)\b[^>]*\b(?:src|href)=["']?https?:|!\[[^\]]*\]\(https?:""")
    assert [name_of(path) for path in PAGES if loaded.search(path.read_text(encoding="utf-8"))] == []


README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_readme_shows_how_to_install_and_a_first_result_at_once():
    start = "\n".join(README.splitlines()[:40])
    assert "pip install" in start
    assert re.search(r"^>>> .*\n(?!>>>|\.\.\.|```)\S", start, re.MULTILINE)


def test_the_readme_has_one_picture():
    assert len(re.findall(r"!\[", README)) == 1
