"""A launcher for the tests: ``launcher.py KIND FOLDER RESTARTS``; prints how it ended as JSON.

With a fourth word, of a torch whose agent cannot be asked for failures.
"""

from __future__ import annotations

import json
import sys

from fxpart import compat, launching


def main(kind: str, folder: str, restarts: str, *untold: str) -> None:
    """Two ranks of the kind."""
    if untold:
        compat.telling = lambda agent, tell: agent  # type: ignore[assignment]
    seen: list[tuple[int, str]] = []

    def again(count: int, first: launching.Failed | None) -> None:
        seen.append((count, "" if first is None else f"{first.rank} {first.how}"))

    ended = launching.start(
        [kind, folder], 2, restarts=int(restarts), on_restart=again, module="launched"
    )
    first = ended.first
    sys.stdout.write(json.dumps({
        "code": ended.code, "restarts": ended.restarts, "asked": ended.asked, "seen": seen,
        "first": None if first is None else [first.rank, first.pid, first.status],
    }) + "\n")  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])
