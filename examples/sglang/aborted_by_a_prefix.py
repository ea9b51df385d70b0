"""An abort of the request ``a`` ends the request ``ab`` as well, because names are compared with ``startswith``.

Two requests wait; one of them is aborted. Exit status 1 where the other one is gone too.
"""

# ruff: noqa: T201 - it prints what it sees.

from __future__ import annotations

import os

from one_scheduler import new_scheduler, request
from sglang.srt.managers.io_struct import AbortReq


def main() -> int:
    scheduler = new_scheduler()
    scheduler.process_input_requests([request("a", 3), request("ab", 3), AbortReq(rid="a")])
    left = [req.rid for req in scheduler.waiting_queue]
    print(f"a was aborted; still waiting: {', '.join(left) or 'nobody'}", flush=True)
    return 0 if left == ["ab"] else 1


if __name__ == "__main__":
    os._exit(main())  # The threads of a scheduler wait for a server.
