"""One tool in its own environment: ``python -m hazards.apart TOOL`` judges every case, each in its own process.

The library is imported once, and the processes are forked from there. The output is one line of JSON for each case.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import warnings
from typing import Any, NoReturn

import torch

from hazards.cases import CASES, Case
from hazards.tools import Tool, Unable, torch_state

__all__ = ["BROKEN", "CANNOT", "RIGHT", "WRONG", "judge", "judge_apart"]

SECONDS = 60.0
RIGHT, WRONG, CANNOT, BROKEN = "right", "**silently wrong**", "–", "not imported"


def judge(tool: Tool, case: Case) -> str:
    """Return the verdict on a tool in one case: right, loud, silently wrong, or cannot express."""
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            right = case.check(tool)
    except Unable:
        return CANNOT
    except ImportError:
        return BROKEN  # An error in the case, not in the tool.
    except Exception as error:  # noqa: BLE001  # any exception of a tool is its answer
        return f"loud ({type(error).__name__})"
    if right:
        return RIGHT
    # Warnings of PyTorch and Python about themselves, such as deprecations, do not count as warnings of a wrong value.
    told = [each for each in said if not issubclass(each.category, DeprecationWarning | FutureWarning)]
    return f"loud ({told[0].category.__name__})" if told else WRONG


def judge_apart(tool: Tool, case: Case, seconds: float = SECONDS) -> str:
    """Judge a case in a separate process, which may crash or never end.

    It uses os.fork, because some libraries refuse to work in a child of multiprocessing.
    """
    mine, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        _answer(tool, case, theirs)
    os.close(theirs)
    ready = select.select([mine], [], [], seconds)[0]
    verdict = os.read(mine, 1000).decode() if ready else ""
    os.close(mine)
    if not ready:
        os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if not ready:
        return f"loud (no end in {seconds:.0f} s)"
    return verdict or (f"loud ({signal.Signals(-code).name})" if code < 0 else f"loud (exit {code})")


def _answer(tool: Tool, case: Case, pipe: int) -> NoReturn:
    try:
        # Output of a library must not mix with the results.
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        os.write(pipe, judge(tool, case).encode())
    finally:
        os._exit(0)


def main() -> int:
    """Judge every case, and print one line for each."""
    from hazards.peers import tool_called

    torch.set_num_threads(1)
    tool: Any = tool_called(sys.argv[1])
    tool.began = torch_state()
    print(json.dumps({"version": tool.load() if hasattr(tool, "load") else ""}), flush=True)
    for case in CASES:
        print(json.dumps({"case": case.sentence, "verdict": judge_apart(tool, case)}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
