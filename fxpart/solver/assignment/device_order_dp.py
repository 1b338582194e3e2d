"""Dynamic program over device orders: the set of used devices, and the first free unit.

The cost of a stage depends on its device, on the set of earlier devices (not on their order,
because the worst link counts), and on the number of later stages. So a state is the set of used
devices and the first unit that is not yet assigned. Identical devices are counted, not named. Only
the first stage depends on its successor, over whose link it reduces tied gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import inf, prod

import numpy as np

from fxpart.solver.assignment.device_order import DeviceLinks
from fxpart.solver.dp import ThresholdSolution, sort_loads
from fxpart.solver.problem import PartitionProblem
from fxpart.solver.schedule_costs import (
    count_stage_in_flight,
    get_fill_fraction,
    splits_backward,
)
from fxpart.solver.tables import Floats, Kind, PartitionTables, StageCostTable
from fxpart.solver.work import SolverTimeout, work_seconds

State = tuple[int, ...]  # number of used devices of each class
Step = tuple[int, int]  # class of a device, and of its successor (-1: irrelevant)
Steps = dict[State, list[tuple[State, Step, Kind]]]


class DeviceClasses:
    """Devices of a problem in classes of identical devices, and their links."""

    def __init__(self, problem: PartitionProblem, links: DeviceLinks) -> None:
        """Group identical devices."""
        self.problem, self._links = problem, links
        self.classes: list[list[int]] = []
        for device in range(len(problem.devices)):
            for group in self.classes:
                if self._twins(group[0], device):
                    group.append(device)
                    break
            else:
                self.classes.append([device])

    @property
    def states(self) -> int:
        """Return the number of distinguishable sets of devices."""
        return prod(len(group) + 1 for group in self.classes)

    def _twins(self, a: int, b: int) -> bool:
        one, other = self.problem.devices[a], self.problem.devices[b]
        if (one.type, one.memory) != (other.type, other.memory):
            return False
        for table in (self._links.latency, self._links.inverse):
            if table[a][b] != table[b][a]:
                return False
            for k in range(len(table)):
                if k not in (a, b) and (table[k][a], table[a][k]) != (table[k][b], table[b][k]):
                    return False
        return True

    def devices(self, classes: list[int]) -> tuple[int, ...]:
        """Return the first devices of these classes, in this order."""
        used = [0] * len(self.classes)
        found = []
        for c in classes:
            found.append(self.classes[c][used[c]])
            used[c] += 1
        return tuple(found)

    def kind(self, state: State, device: int, following: int) -> Kind:
        """Return cost kind of a stage on a device of the class, after the devices of ``state``."""
        before = tuple(d for group, n in zip(self.classes, state, strict=True) for d in group[:n])
        own = self.classes[device][state[device]]
        limit = self.problem.devices[own]
        link = self._links.into(own, before)
        tie = link
        if not before and following >= 0:
            after = self.classes[following][1 if following == device else 0]
            tie = self._links.into(after, (own,))
        return (limit.type, limit.memory, *link, *tie)

    def steps(self, stages: int, used: int) -> Steps:
        """Yield (next set, device and successor, kind) for the sets of ``used`` devices."""
        found: Steps = {}
        sizes = [range(len(group) + 1) for group in self.classes]
        for state in product(*sizes):
            if sum(state) == used:
                found[state] = list(self._from(state, stages))
        return found

    def _from(self, state: State, stages: int) -> Iterator[tuple[State, Step, Kind]]:
        every = range(len(self.classes))
        first = not any(state) and stages > 1
        for c in every:
            if state[c] == len(self.classes[c]):
                continue
            after = tuple(n + (k == c) for k, n in enumerate(state))
            for following in every if first else (-1,):
                if following < 0 or after[following] < len(self.classes[following]):
                    yield after, (c, following), self.kind(state, c, following)


DeviceOrderStages = tuple[list[int], tuple[int, ...]]  # first units and devices
# by variant, schedule and its filling, and kind
Known = dict[tuple[int, str, float, Kind], tuple[Floats, Floats, Floats]]
Key = tuple[State, int]  # second item: required class of the successor (-1: any)


class FixedDeviceOrder(DeviceClasses):
    """Devices in one fixed order: stage k on the k-th."""

    def __init__(
        self, problem: PartitionProblem, links: DeviceLinks, order: tuple[int, ...]
    ) -> None:
        """Make each device its own class."""
        self.problem, self._links = problem, links
        self.classes = [[device] for device in order]

    def steps(self, stages: int, used: int) -> Steps:
        """Yield the only possible step."""
        count = len(self.classes)
        state = (1,) * used + (0,) * (count - used)
        after = (1,) * (used + 1) + (0,) * (count - used - 1)
        following = 1 if used == 0 and stages > 1 else -1
        return {state: [(after, (used, following), self.kind(state, used, following))]}


class _Cell:
    """Minimum totals by number of assigned units, and the previous stage: its source and first
    unit.

    sources: previous states, with the device and the cost kind of the stage.
    """

    __slots__ = ("first", "source", "sources", "total")

    def __init__(self, units: int) -> None:
        self.total = np.full(units + 1, inf)
        self.source = np.full(units + 1, -1, dtype=np.int64)
        self.first = np.zeros(units + 1, dtype=np.int64)
        self.sources: list[tuple[Key, Step, Kind]] = []


class DeviceOrderProgram:
    """One variant, schedule and number of stages."""

    def __init__(
        self,
        fleet: DeviceClasses,
        tables: PartitionTables,
        variant: int,
        schedule: str,
        stages: int,
        deadline: float,
        known: Known | None = None,
    ) -> None:
        """deadline: a ``work_seconds()`` value. known: shared tables."""
        self.fleet, self.units, self.deadline = fleet, tables.units, deadline
        m = tables.problem.variants[variant].microbatches
        self._fill = get_fill_fraction(schedule, m, stages)
        self._costs = tables.variant(variant, split=splits_backward(schedule))
        self._flying = [count_stage_in_flight(schedule, m, stages, k) for k in range(stages)]
        self._steps = [fleet.steps(stages, k) for k in range(stages)]
        self._key = (variant, schedule, self._fill)
        self._known = {} if known is None else known

    def below(
        self, threshold: float, *, longest: bool = False
    ) -> ThresholdSolution[DeviceOrderStages] | None:
        """Return the stages with the minimum sum (or longest load); raise SolverTimeout at the
        deadline."""
        start: Key = (tuple(0 for _ in self.fleet.classes), -1)
        live = {start: _Cell(self.units)}
        live[start].total[0] = 0.0
        cells = dict(live)
        for k, steps in enumerate(self._steps):
            if work_seconds() > self.deadline:
                raise SolverTimeout
            following: dict[Key, _Cell] = {}
            known: dict[Kind, Floats] = {}
            for key, cell in live.items():
                for after, step, kind in steps[key[0]]:
                    if key[1] not in (-1, step[0]):
                        continue
                    if kind not in known:
                        known[kind] = self._admitted(kind, k, threshold, longest)
                    target = following.setdefault((after, step[1]), _Cell(self.units))
                    target.sources.append((key, step, kind))
                    _relax(cell, target, known[kind], longest)
            live = {key: cell for key, cell in following.items() if np.isfinite(cell.total).any()}
            cells.update(live)
        last = min(live, key=lambda key: float(live[key].total[-1]), default=None)
        if last is None or live[last].total[-1] == inf:
            return None
        return self._walk(cells, last)

    def _admitted(self, kind: Kind, k: int, threshold: float, longest: bool) -> Floats:
        """Return the costs of the intervals that stage ``k`` may use."""
        seconds, load, flights = self._dense(kind)
        allowed = (load <= threshold) & (flights >= self._flying[k])
        return np.where(allowed, load if longest else seconds, inf)

    def _dense(self, kind: Kind) -> tuple[Floats, Floats, Floats]:
        """Return seconds, loads and microbatches in flight by (first unit, last unit)."""
        key = (*self._key, kind)
        if key not in self._known:
            self._known[key] = _dense(self._costs.of_kind(kind, self._fill))
        return self._known[key]

    def _walk(self, cells: dict[Key, _Cell], key: Key) -> ThresholdSolution[DeviceOrderStages]:
        """Return the best stages that end with this state."""
        unit, starts, classes, load = self.units, list[int](), list[int](), 0.0
        total = float(cells[key].total[-1])
        while unit:
            cell = cells[key]
            assert cell.source[unit] >= 0, "the path left the table"
            first = int(cell.first[unit])
            key, step, kind = cell.sources[cell.source[unit]]
            load = max(load, float(self._dense(kind)[1][first, unit - 1]))
            starts.append(first)
            classes.append(step[0])
            unit = first
        return ThresholdSolution(total, load, (starts[::-1], self.fleet.devices(classes[::-1])))

    def loads(self, low: float, high: float) -> Floats | None:
        """Return every load strictly between low and high, sorted and distinct; None: too many."""
        steps = (step for steps in self._steps for each in steps.values() for step in each)
        kinds = dict.fromkeys(kind for _, _, kind in steps)
        return sort_loads((self._dense(kind)[1] for kind in kinds), low, high)


def _relax(cell: _Cell, target: _Cell, costs: Floats, longest: bool) -> None:
    """Append one more stage to every total of ``cell``; store improvements in ``target``."""
    before = cell.total[: len(costs), None]
    totals = np.maximum(before, costs) if longest else before + costs
    first = np.argmin(totals, axis=0)
    best = totals[first, np.arange(len(costs))]
    better = np.flatnonzero(best < target.total[1:])
    target.total[better + 1] = best[better]
    target.first[better + 1] = first[better]
    target.source[better + 1] = len(target.sources) - 1


def _dense(table: StageCostTable) -> tuple[Floats, Floats, Floats]:
    """Return bands as square arrays; entries that are not intervals are infinite."""
    units = len(table.seconds)
    found = []
    for band, blank in ((table.seconds, inf), (table.load, inf), (table.flights, -1)):
        square = np.full((units, units), blank, dtype=np.float64)
        for first in range(units):
            square[first, first:] = band[first, : units - first]
        found.append(square)
    return found[0], found[1], found[2]
