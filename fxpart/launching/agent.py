"""torch's agent for one machine, which also says how its ranks have failed when it starts again."""

from __future__ import annotations

from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from fxpart.launching.ended import Failed
from fxpart.launching.running import Running


class Agent(LocalElasticAgent):
    """Tells ``running`` of failures; torch's own gives them to its caller at the very end only."""

    def __init__(self, running: Running, **options: Any) -> None:
        """options: torch's."""
        super().__init__(**options)
        self._running = running

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Look after the ranks; one of the methods that torch has its agents extended by."""
        result: RunResult = super()._monitor_workers(worker_group)
        self._running.failures = {
            rank: Failed(rank, failure.pid, failure.exitcode)
            for rank, failure in result.failures.items()
        }
        return result
