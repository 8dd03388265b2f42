"""Every case in which hooks go wrong: tenterhook is right, or it refuses."""

import pytest

from hazards.__main__ import judge
from hazards.cases import CASES
from hazards.tools import TOOLS

REFUSED = {
    "a module is called three times: all calls, or a question which one": "AmbiguousCall",
    "the same, in code that gives no sign of it beforehand": "ValueChanged",
    "`nn.MultiheadAttention.out_proj`, which is never called": "NeverReached",
    "a point that is never reached is said": "NeverReached",
}


@pytest.mark.parametrize(("sentence", "case"), [(sentence, case) for _, sentence, case in CASES])
def test_tenterhook_is_right_or_refuses(sentence, case):
    expected = f"refuses ({REFUSED[sentence]})" if sentence in REFUSED else "right"
    assert judge(TOOLS["tenterhook"], case) == expected


def test_the_cases_can_tell_right_from_wrong():
    verdicts = [judge(TOOLS["usual tracer"], case) for _, _, case in CASES]
    assert verdicts.count("**silently wrong**") > 8
    assert "right" in verdicts
