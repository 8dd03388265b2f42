"""One tool, in its own environment: ``python -m hazards.apart TOOL`` judges every case, each in a process of its own.

The library is imported once; the processes are forked from that. One line of JSON comes out for each case.
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
    """What one tool does in one case: right, loud, silently wrong, or nothing that it could."""
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            right = case.check(tool)
    except Unable:
        return CANNOT
    except ImportError:
        return BROKEN  # Ours, not the tool's.
    except Exception as error:  # noqa: BLE001  Whatever a tool raises is its answer.
        return f"loud ({type(error).__name__})"
    if right:
        return RIGHT
    # What PyTorch and Python say of themselves, a deprecation for one, warns nobody of a wrong value.
    told = [each for each in said if not issubclass(each.category, DeprecationWarning | FutureWarning)]
    return f"loud ({told[0].category.__name__})" if told else WRONG


def judge_apart(tool: Tool, case: Case, seconds: float = SECONDS) -> str:
    """The same in a process of its own, which may crash or never end.

    It is forked by hand, because some libraries refuse to work in a child that multiprocessing has made.
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
        # A library's chatter must not mix with the answers.
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        os.write(pipe, judge(tool, case).encode())
    finally:
        os._exit(0)


def main() -> int:
    """Judge, and print a line for each case."""
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
