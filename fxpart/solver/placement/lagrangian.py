"""The memory limit as a price: a proven bound, and choices on both sides of the limit.

L(p) = min over choices of seconds + p x bytes, less p x budget, is at most the optimum (Lagrange,
Everett 1963). It is concave and piecewise linear in p; each minimizer is one line of it. The best p
is at the intersection of the lines of a choice above the budget and of one below it (Handler and
Zang 1980).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from fxpart.solver.placement.elimination import Elimination
from fxpart.solver.placement.problem import Choice, PlacementArrays
from fxpart.solver.work import work_seconds

MOST = 60  # number of prices tried
CLOSE = 1e-9  # relative distance of two intersecting lines from the function at its maximum


@dataclass
class PlacementRecord:
    """The best choice so far, and every distinct one found, in order."""

    numbers: PlacementArrays
    choice: Choice | None = None
    seconds: float = inf
    bytes: float = inf
    solver: str = ""
    seen: dict[Choice, None] = field(default_factory=dict)

    def add(self, choice: Choice, solver: str) -> None:
        """Evaluate a choice and store it if it is the best that fits."""
        if choice in self.seen:
            return
        self.seen[choice] = None
        found = self.numbers.evaluate(choice)
        if found.feasible and found.seconds < self.seconds:
            self.choice, self.seconds, self.bytes = choice, found.seconds, found.bytes
            self.solver = solver


@dataclass(frozen=True)
class LagrangianBound:
    """A proven lower bound in seconds (infinite: nothing fits), with its price.

    price: seconds per byte. prices: all that were tried. least: bytes that every choice needs.
    """

    seconds: float
    price: float
    prices: tuple[float, ...]
    least: float


@dataclass(frozen=True)
class _LagrangianLine:
    """One choice: L(p) <= seconds + p * (standing - budget) for every p."""

    choice: Choice
    seconds: float
    standing: float


def multiplier_bound(
    numbers: PlacementArrays, elimination: Elimination, record: PlacementRecord, deadline: float
) -> LagrangianBound:
    """Return the best bound over all prices; add the choices found to ``record``.

    deadline: a ``work_seconds()`` value; after it the best bound so far is returned.
    """
    budget = numbers.problem.budget - numbers.reserve()
    light = _line(numbers, elimination, 1.0, 0.0)
    least = light.standing + numbers.reserve()
    if light.standing > budget * (1 + 1e-12):
        return LagrangianBound(inf, 0.0, (), least)
    fast = _line(numbers, elimination, 0.0, 1.0)
    for line in (fast, light):
        record.add(line.choice, "elimination")
    best, at, prices = fast.seconds, 0.0, [0.0]
    above, below = fast, light
    while above.standing > budget and len(prices) < MOST and work_seconds() < deadline:
        if above.standing <= below.standing or above.seconds >= below.seconds:
            break
        price = (below.seconds - above.seconds) / (above.standing - below.standing)
        crossing = above.seconds + price * (above.standing - budget)
        line = _line(numbers, elimination, price, 1.0)
        record.add(line.choice, "elimination")
        prices.append(price)
        value = line.seconds + price * (line.standing - budget)
        if value > best:
            best, at = value, price
        if value >= crossing - CLOSE * abs(crossing):
            break
        if line.standing > budget:
            above = line
        else:
            below = line
    return LagrangianBound(max(0.0, best - 1e-12 * abs(best)), at, tuple(prices), least)


def _line(
    numbers: PlacementArrays, elimination: Elimination, price: float, seconds: float
) -> _LagrangianLine:
    chosen = elimination.run(price, seconds).choose({})
    choice = tuple(chosen[v] for v in range(len(numbers.sizes)))
    problem = numbers.problem
    standing = sum(
        float(numbers.standing[k][s]) for k, s in zip(problem.nodes, choice, strict=True)
    )
    return _LagrangianLine(choice, numbers.evaluate(choice).seconds, standing)
