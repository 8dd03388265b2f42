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
    """Return the anchors of a page, as MkDocs makes them."""
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
    """Return the import path of each object in the reference, by the name that a user writes."""
    pages = (DOCS / "reference").glob("*.md")
    return {name: path for page in pages for path, name in DIRECTIVE.findall(page.read_text(encoding="utf-8"))}


PUBLIC = {
    **{f"th.{name}": getattr(th, name) for name in th.__all__},
    **{f"th.recipes.{name}": getattr(recipes, name) for name in recipes.__all__},
    **{f"th.recipes.patching.{name}": getattr(recipes.patching, name) for name in recipes.patching.__all__},
    **{f"hooks.{name}": getattr(hooks, name) for name in hooks.__all__},
    **{f"testing.{name}": getattr(testing, name) for name in testing.__all__},
}
# Modules have a page each. These two names are neither functions nor classes, so the text describes them.
IN_THE_TEXT = {
    "th.hooks": "hooks.md",
    "th.recipes": "recipes.md",
    "th.recipes.circuit": "recipes.md",
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


def cells(text, label):
    """Return the cells of the first table row with this label, without emphasis."""
    line = next(line for line in text.splitlines() if line.startswith(f"| {label}"))
    return [cell.strip().strip("*") for cell in line.split("|")[2:-1]]


BENCHMARKS = (DOCS / "benchmarks.md").read_text(encoding="utf-8")
HAZARDS = (DOCS / "hazards.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("label", "kind"),
    [("[34 cases", 0), ("… an error", 1), ("… **wrong", 2), ("… cannot", 3)],
)
def test_the_hazards_in_the_readme_are_those_of_the_page(label, kind):
    tools = ["tenterhook ", "raw hooks ", "nnsight", "TransformerLens", "captum"]
    assert cells(README, label) == [cells(HAZARDS, tool)[kind] for tool in tools]


@pytest.mark.parametrize(
    ("label", "row"),
    [
        ("keep 12 block outputs,", "keep 12 block outputs |"),
        ("keep all 164 outputs,", "keep all modules |"),
        ("edit one point,", "edit one point | 1.00"),
        ("gradients of 12 blocks,", "gradients of 12 blocks | 1.00"),
        ("patch 12 layers × 16 positions,", "patch 12 layers × 16 positions | 250"),
    ],
)
def test_the_times_of_other_libraries_in_the_readme_are_those_of_the_page(label, row):
    if "<!-- peers: begin -->\n## Peers\n\nA small GPT-2" not in BENCHMARKS:
        pytest.skip(
            "the page was measured again: copy the new figures to the README, and adapt this test to the new table"
        )
    raw, ours, nnsight, lens, *_ = cells(BENCHMARKS, row)
    assert cells(README, label)[:4] == [ours, raw, nnsight, lens]


@pytest.mark.parametrize(
    ("label", "row"),
    [
        ("integrated gradients, 20 steps, × captum", "integrated gradients, 20 steps, with its check | tenterhook"),
        ("Grad-CAM, × captum", "Grad-CAM | tenterhook"),
        ("occlusion of 81 windows, × captum", "occlusion, 81 windows | tenterhook"),
    ],
)
def test_the_times_beside_captum_in_the_readme_are_those_of_the_page(label, row):
    measured = float(cells(BENCHMARKS, row)[1].removesuffix(" ×"))
    assert abs(float(cells(README, label)[0]) - measured) < 0.006, f"write {measured:.2f} in the README"


def test_the_files_that_contributing_names_exist():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = re.findall(r"`((?:src|tests|docs|benchmarks|versions)/[\w./-]+)`", text)
    assert len(named) > 15
    written = {"docs/benchmarks.md", "docs/hazards.md", "docs/versions.md", "docs/zoo.md"}
    assert [name for name in named if name not in written and not (ROOT / name).exists()] == []
