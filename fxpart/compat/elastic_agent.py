"""Failures of torch's local elastic agent, which has no public access to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

# A rank's process id and exit status; a negative status is the signal that ended it.
Failures = Mapping[int, tuple[int, int]]


def make_reporting_agent(kind: type[Any], tell: Callable[[Failures], object]) -> type[Any]:
    """Return an agent class that also reports failures by rank after each check.

    kind: ``LocalElasticAgent``, which reports failures only at the end. Uses ``_monitor_workers``,
    which torch's agents override, and ``failures`` of its result; without them nothing is reported.
    """
    look = getattr(kind, "_monitor_workers", None)
    if look is None:
        return kind

    def looked(self: Any, worker_group: Any) -> Any:
        result = look(self, worker_group)
        failures = getattr(result, "failures", None) or {}
        tell({rank: (each.pid, each.exitcode) for rank, each in failures.items()})
        return result

    return type(kind.__name__, (kind,), {"_monitor_workers": looked})
