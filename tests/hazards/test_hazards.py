"""Every case in which hooks go wrong: tenterhook is right, or it refuses; and what is tested elsewhere is tested."""

import ast
from pathlib import Path

import pytest

from hazards.__main__ import kinds, page
from hazards.apart import RIGHT, WRONG, judge, judge_apart
from hazards.cases import CASES, Case
from hazards.elsewhere import ELSEWHERE
from hazards.tools import TOOLS, Unable

ROOT = Path(__file__).parents[2]

REFUSED = {
    "a module is called three times: all calls, or a question which one": "AmbiguousCall",
    "the same, in code that gives no sign of it beforehand": "ValueChanged",
    "`nn.MultiheadAttention.out_proj`, which is never called": "NeverReached",
    "a point that is never reached is said": "NeverReached",
    "an edit does not become part of what `torch.export` writes down": "SessionError",
}


@pytest.mark.filterwarnings("ignore")  # Dynamo warns as it tries to trace the code of a session.
@pytest.mark.parametrize("case", CASES, ids=[case.sentence for case in CASES])
def test_tenterhook_is_right_or_refuses(case):
    expected = f"loud ({REFUSED[case.sentence]})" if case.sentence in REFUSED else RIGHT
    assert judge(TOOLS["tenterhook"], case) == expected


def test_the_cases_can_tell_right_from_wrong():
    cases = [case for case in CASES if case.section != "Compiled models"]
    found = kinds({case.sentence: judge(TOOLS["baukit-style"], case) for case in cases})
    assert found["silently wrong"] > 8
    assert found["right"] > 3
    assert found["loud"] > 1


def test_no_two_cases_have_the_same_sentence():
    assert len({case.sentence for case in CASES}) == len(CASES)


def crash(_tool):
    import os
    import signal

    os.kill(os.getpid(), signal.SIGKILL)


def sleep(_tool):
    import time

    time.sleep(60)


def unable(_tool):
    raise Unable


@pytest.mark.parametrize(
    ("check", "verdict"),
    [
        (lambda _: True, "right"),
        (lambda _: False, WRONG),
        (lambda _: 1 / 0, "loud (ZeroDivisionError)"),
        (lambda _: bool(__import__("warnings").warn("beware", stacklevel=1)), "loud (UserWarning)"),
        (unable, "–"),
        (crash, "loud (SIGKILL)"),
        (sleep, "loud (no end in 1 s)"),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # That a process with threads is forked.
def test_each_kind_of_answer_is_distinguished_in_a_process_of_its_own(check, verdict):
    assert judge_apart(TOOLS["raw hooks"], Case("", "", check), seconds=1) == verdict


def functions(path):
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("row", ELSEWHERE, ids=[row.sentence for row in ELSEWHERE])
def test_what_is_listed_as_tested_elsewhere_is(row):
    assert row.tests
    for test in row.tests:
        path, _, name = test.partition("::")
        assert name in functions(path), test


def test_the_page_in_the_docs_has_every_case_and_every_hazard():
    text = (ROOT / "docs" / "hazards.md").read_text(encoding="utf-8")
    assert all(f"| {case.sentence} |" in text for case in CASES)
    assert all(test in text for row in ELSEWHERE for test in row.tests)
    assert "**silently wrong**" in page({"a tool": {case.sentence: WRONG for case in CASES}})
