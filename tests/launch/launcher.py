"""A launcher for the tests: ``launcher.py KIND FOLDER RESTARTS``; prints how it ended as JSON.

With a fourth word, of a torch whose agent cannot be asked for failures. Who asks for a process's
end first gets its status, the agent or the thread that watches: here the agent waits for the other.
"""

from __future__ import annotations

import faulthandler
import json
import sys
import time
from collections.abc import Callable
from typing import Any

from fxpart import compat, launch


def untelling(kind: type[Any], tell: Callable[[Any], object]) -> type[Any]:
    """The agent's class; it tells nothing, and looks once the thread has seen that a rank ended."""
    running = tell.__self__  # type: ignore[attr-defined]

    def looked(self: Any, worker_group: Any) -> Any:
        while not running.ends:
            time.sleep(0.005)
        return kind._monitor_workers(self, worker_group)

    return type(kind.__name__, (kind,), {"_monitor_workers": looked})


def main(kind: str, folder: str, restarts: str, *untold: str) -> None:
    """Two ranks of the kind. After 18 seconds all threads say where they are."""
    faulthandler.dump_traceback_later(18)
    if untold:
        compat.make_reporting_agent = untelling
    seen: list[tuple[int, str]] = []

    def again(count: int, first: launch.RankFailure | None) -> None:
        seen.append((count, "" if first is None else f"{first.rank} {first.how}"))

    ended = launch.start(
        [kind, folder], 2, restarts=int(restarts), on_restart=again, module="launched"
    )
    first = ended.first
    sys.stdout.write(json.dumps({
        "code": ended.code, "restarts": ended.restarts, "asked": ended.asked, "seen": seen,
        "first": None if first is None else [first.rank, first.pid, first.status],
    }) + "\n")  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])
