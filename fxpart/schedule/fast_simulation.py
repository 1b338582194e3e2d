"""Fast simulation, without a timeline, of schedules that alternate after a warm-up.

The results equal those of :func:`fxpart.schedule.simulate.simulate` with overlapped transfers. It
is about thirty times faster, for plans with hundreds of thousands of actions. It requires one stage
per rank, and links and stages that process microbatches in order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fxpart.schedule.action import StageEdge
from fxpart.schedule.spec import SCHEDULES


class _FastSimulationStage:
    """One stage: its pending dependencies and its progress."""

    def __init__(self, ahead: int, microbatches: int, forward: float, backward: float) -> None:
        """ahead: number of warm-up forwards."""
        self.ahead, self.microbatches = ahead, microbatches
        self.forward, self.backward = forward, backward
        self.at, self.forwards, self.backwards = 0.0, 0, 0
        # Arrival times of the inputs of each microbatch, by link, and the outgoing links.
        self.given: list[list[float]] = []
        self.returned: list[list[float]] = []
        self.down: list[tuple[list[float], float, int]] = []
        self.up: list[tuple[list[float], float, int]] = []

    def run(self) -> bool:
        """Run all computations that are ready; return whether there was one."""
        start = self.forwards + self.backwards
        while self.backwards < self.microbatches:
            forward = self.forwards < min(self.ahead + self.backwards, self.microbatches)
            done = self.forwards if forward else self.backwards
            at = self.at
            for arrivals in self.given if forward else self.returned:
                if len(arrivals) <= done:
                    return self.forwards + self.backwards > start
                at = max(at, arrivals[done])
            self.at = at + (self.forward if forward else self.backward)
            for arrivals, seconds, _ in self.down if forward else self.up:
                free = arrivals[-1] if arrivals else 0.0
                arrivals.append(max(self.at, free) + seconds)
            if forward:
                self.forwards += 1
            else:
                self.backwards += 1
        return self.forwards + self.backwards > start


def compute_last_backward_ends(
    name: str,
    microbatches: int,
    edges: Sequence[StageEdge],
    forward: Sequence[float],
    backward: Sequence[float],
    transfer: Mapping[tuple[int, int], float],
) -> list[float]:
    """Return the seconds from the start of the step to the end of each stage's last backward.

    name: of a schedule with a ``warmup``. forward, backward: seconds by stage for one microbatch.
    transfer: seconds by edge (source, target), and of the gradient (target, source); 0 where
    missing.
    """
    warmup = SCHEDULES[name].warmup
    assert warmup is not None, f"{name} has no fast simulation"
    count = len(forward)
    ahead = warmup(count, microbatches, edges)
    stages = [
        _FastSimulationStage(min(a, microbatches), microbatches, f, b)
        for a, f, b in zip(ahead, forward, backward, strict=True)
    ]
    for edge in edges:
        seconds = transfer.get((edge.source, edge.target), 0.0)
        values: list[float] = []
        stages[edge.source].down.append((values, seconds, edge.target))
        stages[edge.target].given.append(values)
        if edge.backward:
            gradients: list[float] = []
            stages[edge.target].up.append((gradients, seconds, edge.source))
            stages[edge.source].returned.append(gradients)
    todo = list(range(count - 1, -1, -1))
    while todo:
        stage = stages[todo.pop()]
        if stage.run():
            todo += [peer for _, _, peer in (*stage.down, *stage.up) if peer not in todo]
    return [stage.at for stage in stages]
