"""What torch's agent for one machine does not say in public: how its ranks have failed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

# A rank's process id and exit status; negative: the signal that ended it.
Failures = Mapping[int, tuple[int, int]]


def make_reporting_agent(kind: type[Any], tell: Callable[[Failures], object]) -> type[Any]:
    """The agent's class, which also tells of failures by rank whenever it has looked for them.

    kind: ``LocalElasticAgent``, which gives them to its caller at the very end only. Needs
    ``_monitor_workers``, one of the methods that torch has its agents extended by, and ``failures``
    of what that returns; of an agent without them nothing is told.
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
